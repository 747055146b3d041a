"""Differences between the variants of Wan outside the transformer: sizes, frame rate, experts,
sampling defaults.

Sources: the configurations in Wan-Video/Wan2.1 and Wan2.2, wan/configs, and the defaults of their
generate.py; Wan-Video/Wan-Dancer, gen_video_global.sh and gen_video_local.sh; aigc-apps/VideoX-Fun,
examples/wan2.1_fun, wan2.2_fun and wan2.2_vace_fun, config/wan2.2.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ditkit_core.models.spec import DataSpec, Expert, SampleDefaults, TrainingSpec
from ditkit_wan.conditioning.columns import is_given_first_latent
from ditkit_wan.model.inputs import make_inputs
from ditkit_wan.presets import WanArch

_GUIDANCE = {"text": (4.0, 3.0), "image": (3.5, 3.5), "fun": (6.0, 6.0), "fun-vace": (5.0, 5.0)}
"""Guidance scales of the high-noise and the low-noise expert, for text to video, image to video,
and the models of VideoX-Fun."""

_NEGATIVE = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，残缺的，"
    "多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)
"""`sample_neg_prompt` in wan/configs/shared_config.py of Wan2.1 and Wan2.2; Fun and WanToDance have
the same text."""
_SPEECH_NEGATIVE = (
    "画面模糊，最差质量，画面模糊，细节模糊不清，情绪激动剧烈，手快速抖动，字幕，丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，"
    "形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)
"""`sample_neg_prompt` in wan/configs/wan_s2v_14B.py of Wan2.2."""


def training_of(training: TrainingSpec, arch: WanArch) -> TrainingSpec:
    """The family's training spec with what differs for this architecture."""
    if arch.token_times:
        training = replace(
            training, make_inputs=partial(make_inputs, latent_stride=arch.latent_stride)
        )
        if not arch.fun:
            # One model generates from text or from an image, so half of the samples are trained
            # without the image, as in VideoX-Fun.
            return replace(training, control_dropout=0.5)
    # The first latent frame is given, so a clip of fewer than 5 frames has nothing left to learn.
    if arch.speech or (is_given_first_latent(arch) and not arch.music):
        return replace(training, fewest_frames=5)
    return training


def data_of(data: DataSpec, arch: WanArch) -> DataSpec:
    """The family's data spec with the sizes and frame rate of this architecture."""
    if arch.token_times:
        return replace(data, fps=24.0, size=(121, 704, 1280), size_step=32)
    if arch.image_positions:
        return replace(data, size=(81, 720, 1280))
    if arch.speech:  # the frames before a clip have patches of 64 pixels
        return replace(data, size=(81, 448, 832), size_step=64)
    if arch.animate:
        return replace(data, fps=30.0, size=(77, 720, 1280))
    if arch.music:
        return replace(data, fps=arch.music.fps, size=(149, 1280, 720))
    return data


def experts(arch: WanArch) -> Sequence[Expert]:
    """The two transformers of an architecture with a boundary between them; none otherwise."""
    if not arch.boundary:
        return ()
    high, low = _guidance(arch)
    return (
        Expert(
            name="high_noise",
            part="transformer",
            min_sigma=arch.boundary,
            max_sigma=1.0,
            guidance=high,
        ),
        Expert(
            name="low_noise",
            part="transformer_2",
            min_sigma=0.0,
            max_sigma=arch.boundary,
            guidance=low,
        ),
    )


def sample_defaults(arch: WanArch) -> SampleDefaults:
    """The authors' steps, guidance and negative prompt; for a pair of experts, the guidance of the
    first."""
    if arch.fun:
        return SampleDefaults(steps=50, guidance=_guidance(arch)[0], negative=_NEGATIVE)
    if arch.speech:
        return SampleDefaults(steps=40, guidance=4.5, negative=_SPEECH_NEGATIVE)
    if arch.animate:
        return SampleDefaults(steps=20, guidance=1.0, negative=_NEGATIVE)
    if arch.boundary:
        return SampleDefaults(steps=40, guidance=_guidance(arch)[0], negative=_NEGATIVE)
    if arch.music:
        return SampleDefaults(
            steps=48 if arch.music.keyframes else 24, guidance=5.0, negative=_NEGATIVE
        )
    if arch.image_positions:
        return SampleDefaults(steps=50, guidance=5.0, negative=f"镜头切换，镜头晃动，{_NEGATIVE}")
    if arch.image_dim:
        return SampleDefaults(steps=40, guidance=5.0, negative=f"镜头晃动，{_NEGATIVE}")
    return SampleDefaults(steps=50, guidance=5.0, negative=_NEGATIVE)


def _guidance(arch: WanArch) -> tuple[float, float]:
    if arch.fun:
        return _GUIDANCE["fun-vace" if arch.vace_layers else "fun"]
    return _GUIDANCE["image" if arch.in_channels > arch.out_channels else "text"]
