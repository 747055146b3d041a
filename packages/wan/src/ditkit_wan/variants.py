"""Differences between the variants of Wan outside the transformer: sizes, frame rate, experts, sampling defaults.

Sources: the configurations in Wan-Video/Wan2.1 and Wan2.2, wan/configs, and the defaults of their generate.py; Wan-Video/Wan-Dancer,
gen_video_global.sh and gen_video_local.sh; aigc-apps/VideoX-Fun, examples/wan2.1_fun.
"""

from collections.abc import Sequence
from dataclasses import replace

from ditkit_core.models.spec import DataSpec, Expert, SampleDefaults, TrainingSpec
from ditkit_wan.conditioning.columns import is_given_first_latent
from ditkit_wan.presets import WanArch

_GUIDANCE = {"text": (4.0, 3.0), "image": (3.5, 3.5)}
"""Guidance scales of the high-noise and the low-noise expert, for text to video and image to video."""


def training_of(training: TrainingSpec, arch: WanArch) -> TrainingSpec:
    """The family's training spec with what differs for this architecture."""
    if arch.token_times:
        # One model generates from text or from an image, so half of the samples are trained without the image, as in VideoX-Fun.
        return replace(training, control_dropout=0.5)
    # The first latent frame is given, so a clip of fewer than 5 frames has nothing left to learn.
    return replace(training, fewest_frames=5) if is_given_first_latent(arch) and not arch.music else training


def data_of(data: DataSpec, arch: WanArch) -> DataSpec:
    """The family's data spec with the sizes and frame rate of this architecture."""
    if arch.token_times:
        return replace(data, fps=24.0, size=(121, 704, 1280), size_step=32)
    if arch.image_positions:
        return replace(data, size=(81, 720, 1280))
    if arch.music:
        return replace(data, fps=arch.music.fps, size=(149, 1280, 720))
    return data


def experts(arch: WanArch) -> Sequence[Expert]:
    """The two transformers of an architecture with a boundary between them; none otherwise."""
    if not arch.boundary:
        return ()
    high, low = _guidance(arch)
    return (
        Expert(name="high_noise", part="transformer", min_sigma=arch.boundary, max_sigma=1.0, guidance=high),
        Expert(name="low_noise", part="transformer_2", min_sigma=0.0, max_sigma=arch.boundary, guidance=low),
    )


def sample_defaults(arch: WanArch) -> SampleDefaults:
    """The authors' steps and guidance; for a pair of experts, the guidance of the first."""
    if arch.boundary:
        return SampleDefaults(steps=40, guidance=_guidance(arch)[0])
    if arch.music:
        return SampleDefaults(steps=48 if arch.music.keyframes else 24, guidance=5.0)
    if arch.ref_conv or arch.camera_channels:
        return SampleDefaults(steps=50, guidance=6.0)
    image_to_video = arch.image_dim > 0 and not arch.image_positions
    return SampleDefaults(steps=40 if image_to_video else 50, guidance=5.0)


def _guidance(arch: WanArch) -> tuple[float, float]:
    return _GUIDANCE["image" if arch.in_channels > arch.out_channels else "text"]
