"""Which conditions an architecture is given beside clip and caption: the columns that they come from, and what encodes them."""

from collections.abc import Sequence

import torch

from ditkit_core.models.conditions import Column, Conditioner
from ditkit_core.models.paths import ModelPaths
from ditkit_wan.presets import WanArch

_REFERENCE_LISTS = ("src_ref_images", "object_file_path")
"""Names that other programs give a list of references."""

_COLUMNS = {
    "input_image": Column(
        name="input_image", kind="image", aliases=("first_image", "start_image"), moment="begin",
        doc="The picture that the clip begins with; without it, the clip's own first frame where the model needs one.",
    ),
    "end_image": Column(
        name="end_image", kind="image", aliases=("last_image",), moment="end",
        doc="The picture that the clip ends with; without it, the clip's own last frame where the model needs one.",
    ),
    "reference_image": Column(
        name="reference_image", kind="image", aliases=("ref_image",), doc="A picture of what the clip shows, in any pose.",
    ),
    "control_video": Column(
        name="control_video", kind="video", aliases=("control_file_path", "control_path"), required=True,
        doc="A video of poses, depth, edges, … that the clip follows frame by frame.",
    ),
    "camera_control_direction": Column(
        name="camera_control_direction", kind="text",
        doc="Where the camera goes: Left, Right, Up, Down, In, Out, or two in one word, as LeftUp.",
    ),
    "camera_control_speed": Column(
        name="camera_control_speed", kind="text", doc="How fast it goes, by frame; 1/54 = 0.0185 unless given.",
    ),
    "camera_file": Column(
        name="camera_file", kind="table", aliases=("control_file_path", "pose_file"),
        instead_of=("camera_control_direction", "camera_control_speed"),
        doc="A text file of camera poses (as RealEstate10K has them), in place of direction and speed.",
    ),
    "vace_video": Column(
        name="vace_video", kind="video", aliases=("vace_control_video", "src_video", "control_file_path", "control_path"),
        doc="The video to keep or to make anew; all grey unless given.",
    ),
    "vace_video_mask": Column(
        name="vace_video_mask", kind="video", aliases=("src_mask",),
        doc="White where the video is made anew, black where it is kept: a video, or one picture for all frames; all white unless given.",
    ),
    "vace_reference_image": Column(
        name="vace_reference_image", kind="image", aliases=_REFERENCE_LISTS, in_front=True,
        doc="A picture of what the clip shows.",
    ),
    "vace_reference_image_2": Column(
        name="vace_reference_image_2", kind="image", aliases=_REFERENCE_LISTS, in_front=True, doc="A second one.",
    ),
    "vace_reference_image_3": Column(
        name="vace_reference_image_3", kind="image", aliases=_REFERENCE_LISTS, in_front=True, doc="A third one.",
    ),
    "wantodance_music_path": Column(
        name="wantodance_music_path", kind="audio", aliases=("music",), required=True,
        doc="The music: .npy or .safetensors of its 35 features at 30 rows a second, or sound where librosa is installed.",
    ),
    "wantodance_reference_image": Column(
        name="wantodance_reference_image", kind="image", doc="Who dances; without it, the clip's own first frame.",
    ),
    "wantodance_keyframes": Column(
        name="wantodance_keyframes", kind="video", doc="A video of the moments that are given, black between them.",
    ),
    "wantodance_keyframes_mask": Column(
        name="wantodance_keyframes_mask", kind="text", doc="Which frames of it are given: a list of 0 and 1, one for each frame.",
    ),
}  # fmt: skip
"""By name: what people have in their metadata. Aliases are the names of other trainers."""


def columns(arch: WanArch) -> Sequence[Column]:
    """The columns of a dataset that an architecture is conditioned by."""
    return [_COLUMNS[name] for name in _names(arch)]


def _names(arch: WanArch) -> tuple[str, ...]:
    if arch.music:
        return tuple(name for name in _COLUMNS if name.startswith("wantodance_"))
    if arch.vace_layers:
        return tuple(name for name in _COLUMNS if name.startswith("vace_"))
    if arch.camera_channels:
        return ("input_image", "camera_control_direction", "camera_control_speed", "camera_file")
    beside = _channels_beside(arch)
    if beside == 2 * arch.out_channels:
        return ("control_video", "input_image", *(("reference_image",) if arch.ref_conv else ()))
    if beside:
        return ("input_image", "end_image")
    return ("input_image",) if arch.token_times else ()


def conditioners(
    arch: WanArch, components: ModelPaths | None, device: torch.device, tiled: bool
) -> Sequence[Conditioner]:
    """What encodes the conditions of an architecture; nothing is loaded yet.

    Args:
        arch: The architecture.
        components: Where the model's files are; None takes no encoder, for `uses` and `check` alone.
        device: Where encoders work.
        tiled: Whether the VAE works in tiles.

    Raises:
        UserError: If an encoder's files are missing, damaged, or of another model.
    """
    from ditkit_wan.conditioning import control, dance
    from ditkit_wan.conditioning import images as image
    from ditkit_wan.conditioning.vace import Vace
    from ditkit_wan.encoders.clip import ImageEncoder
    from ditkit_wan.encoders.vae import VaeEncoder

    if not _names(arch):
        return ()
    vae: VaeEncoder | image.Outlined = image.Outlined(arch.out_channels, (4, 16 if arch.token_times else 8))
    clip: ImageEncoder | image.Outlined | None = vae if arch.image_dim else None
    if components is not None:
        vae = VaeEncoder(components, device, tiled=tiled, channels=arch.out_channels)
        clip = ImageEncoder(components, device, torch.float32) if arch.image_dim else None
    beside = _channels_beside(arch)
    found: list[Conditioner] = []
    if arch.music:
        assert clip is not None
        found += [dance.Music(arch.music.fps), dance.Keyframes(vae), dance.KeyframeVision(clip, (dance.DANCER,))]
        found.append(image.ClipVision(clip, (dance.DANCER,), name="refimage", kind="clip-vision-dancer"))
    elif arch.vace_layers:
        found.append(Vace(vae))
    elif arch.camera_channels:
        with_mask = beside > arch.out_channels
        found += [control.Camera(), image.FirstLast(vae, both=False) if with_mask else control.FirstLatent(vae)]
        if clip is not None:
            found.append(image.ClipVision(clip, (image.FIRST,)))
    elif beside == 2 * arch.out_channels:
        found.append(control.Control(vae))
        if arch.ref_conv:
            found.append(control.Reference(vae))
        if clip is not None:
            found.append(control.ControlVision(clip, (control.REFERENCE, image.FIRST)))
    elif beside:
        both = bool(arch.image_positions)
        found.append(image.FirstLast(vae, both=both))
        if clip is not None:
            found.append(image.ClipVision(clip, (image.FIRST, image.LAST) if both else (image.FIRST,)))
    elif arch.token_times:
        found.append(image.FirstFrame(vae))
    return found


def is_told_first_latent(arch: WanArch) -> bool:
    """Whether every clip's first latent frame, which is all of a single picture, is given as `y`."""
    beside = _channels_beside(arch)
    follows = beside == 2 * arch.out_channels and not arch.camera_channels
    return beside > 0 and not (arch.music or arch.vace_layers or follows)


def _channels_beside(arch: WanArch) -> int:
    """Channels of `y`, which goes into the first layer beside the noised latents."""
    return arch.in_channels - arch.out_channels
