"""The conditions of an architecture besides clip and caption: their columns in a dataset, and their
conditioners."""

from collections.abc import Sequence

import torch

from ditkit_core.families.first_frame import INPUT_IMAGE, FirstFrame, Outlined
from ditkit_core.models.conditions import Column, Conditioner
from ditkit_core.models.encoders import VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_wan.presets import WanArch

_REFERENCE_LISTS = ("src_ref_images", "object_file_path")
"""Names of a list of references in other programs."""

_EVERY = (
    INPUT_IMAGE,
    Column(
        name="end_image",
        kind="image",
        aliases=("last_image",),
        moment="end",
        doc="The image that the clip ends with; defaults to the clip's last frame where the model needs one.",
    ),
    Column(
        name="reference_image",
        kind="image",
        aliases=("ref_image", "ref_file_path", "src_ref"),
        doc="An image of the clip's subject, in any pose.",
    ),
    Column(
        name="control_video",
        kind="video",
        aliases=("control_file_path", "control_path"),
        required=True,
        doc="A video of poses, depth, edges, … that the clip follows frame by frame.",
    ),
    Column(
        name="camera_control_direction",
        kind="text",
        doc="Direction of the camera: Left, Right, Up, Down, In, Out, or two in one word, as LeftUp.",
    ),
    Column(
        name="camera_control_speed",
        kind="text",
        doc="Speed of the camera per frame; defaults to 1/54 = 0.0185.",
    ),
    Column(
        name="camera_file",
        kind="table",
        aliases=("control_file_path", "pose_file"),
        alternative_to=("camera_control_direction", "camera_control_speed"),
        doc="A text file of camera poses in RealEstate10K's format, in place of direction and speed.",
    ),
    Column(
        name="vace_video",
        kind="video",
        aliases=("vace_control_video", "src_video", "control_file_path", "control_path"),
        doc="The video to keep or to regenerate; defaults to grey.",
    ),
    Column(
        name="vace_video_mask",
        kind="video",
        aliases=("src_mask",),
        doc="White where the video is regenerated, black where it is kept: a video, or one image for all frames; defaults to white.",
    ),
    *(
        Column(name=name, kind="image", aliases=_REFERENCE_LISTS, in_front=True, doc=doc)
        for name, doc in (
            ("vace_reference_image", "An image of the clip's subject."),
            ("vace_reference_image_2", "A second one."),
            ("vace_reference_image_3", "A third one."),
        )
    ),
    Column(
        name="input_audio",
        kind="audio",
        aliases=("audio", "audio_path"),
        in_step=True,
        doc="The speech: a sound file or a video; defaults to the clip's own sound track.",
    ),
    Column(
        name="s2v_pose_video",
        kind="video",
        aliases=("pose_video", "control_file_path"),
        doc="A video of the speaker's poses.",
    ),
    Column(
        name="motion_video",
        kind="video",
        doc="A video that the clip continues, by its last 73 frames; defaults to those before the clip in its own file, if it has them.",
    ),
    Column(
        name="animate_pose_video",
        kind="video",
        aliases=("pose_video", "control_file_path", "src_pose"),
        required=True,
        doc="A video of the poses of the character.",
    ),
    Column(
        name="animate_face_video",
        kind="video",
        aliases=("face_video", "face_file_path", "src_face"),
        required=True,
        doc="A video of the character's face, cut out at each frame; read at 512 × 512 pixels.",
    ),
    Column(
        name="animate_inpaint_video",
        kind="video",
        aliases=("background_video", "background_file_path", "src_bg"),
        doc="To replace a character: the clip without it, black in its place.",
    ),
    Column(
        name="animate_mask_video",
        kind="video",
        aliases=("mask_video", "mask_file_path", "src_mask"),
        doc="To replace a character: white where it is generated, black where the background is kept: a video, or one image for all frames.",
    ),
    Column(
        name="wantodance_music_path",
        kind="audio",
        aliases=("music",),
        required=True,
        doc="The music: .npy or .safetensors of its 35 features at 30 rows a second, or a sound file if librosa is installed.",
    ),
    Column(
        name="wantodance_reference_image",
        kind="image",
        doc="An image of the dancer; defaults to the clip's first frame.",
    ),
    Column(
        name="wantodance_keyframes",
        kind="video",
        doc="A video with the given keyframes, black between them.",
    ),
    Column(
        name="wantodance_keyframes_mask",
        kind="text",
        doc="Which of its frames are given: a list of 0 and 1, one per frame.",
    ),
)
_COLUMNS = {column.name: column for column in _EVERY}
"""Columns by name. Aliases are the names of other trainers."""


def columns(arch: WanArch) -> Sequence[Column]:
    """The columns of a dataset that an architecture is conditioned on."""
    return [_COLUMNS[name] for name in _names(arch)]


def _names(arch: WanArch) -> tuple[str, ...]:
    if arch.speech:
        return ("input_audio", "reference_image", "s2v_pose_video", "motion_video")
    if arch.animate:
        return ("reference_image", *(name for name in _COLUMNS if name.startswith("animate_")))
    if arch.music:
        return tuple(name for name in _COLUMNS if name.startswith("wantodance_"))
    if arch.vace_layers:
        return tuple(name for name in _COLUMNS if name.startswith("vace_"))
    if arch.camera_channels:
        return ("input_image", "camera_control_direction", "camera_control_speed", "camera_file")
    if _is_controlled(arch):
        ends = ("input_image", "end_image") if _has_mask(arch) else ("input_image",)
        return ("control_video", *ends, *(("reference_image",) if arch.ref_conv else ()))
    if _extra_channels(arch):
        return ("input_image", "end_image")
    return ("input_image",) if arch.token_times else ()


def conditioners(
    arch: WanArch, components: ModelPaths | None, device: torch.device, mode: VaeMode
) -> Sequence[Conditioner]:
    """The conditioners of an architecture; nothing is loaded.

    Args:
        arch: The architecture.
        components: Where the model's files are; None creates no encoder, which is enough for `uses`
            and `check`.
        device: Device of the encoders.
        mode: How the VAE encodes.

    Raises:
        UserError: If an encoder's files are missing, damaged, or belong to another model.
    """
    from ditkit_wan.conditioning import animate, control, dance, speech
    from ditkit_wan.conditioning import images as image
    from ditkit_wan.conditioning.vace import Vace
    from ditkit_wan.encoders.clip import ImageEncoder
    from ditkit_wan.encoders.speech import SpeechEncoder
    from ditkit_wan.encoders.vae import VaeEncoder

    if not _names(arch):
        return ()
    outlined = Outlined(arch.out_channels, (4, 16 if arch.token_times else 8))
    vae: VaeEncoder | Outlined = outlined
    clip: ImageEncoder | Outlined | None = outlined if arch.image_dim else None
    if components is not None:
        vae = VaeEncoder(components, device, mode=mode, channels=arch.out_channels)
        clip = ImageEncoder(components, device, torch.float32) if arch.image_dim else None
    chosen: list[Conditioner] = []
    if arch.speech:
        sizes = {"states": arch.speech.states, "features": arch.speech.features}
        wav2vec = None if components is None else SpeechEncoder(components, device, **sizes)
        chosen += [
            speech.Speech(wav2vec, 16.0),
            speech.SpeechReference(vae),
            speech.Poses(vae),
            speech.Motion(vae),
        ]
    elif arch.animate:
        assert clip is not None
        chosen += [
            animate.Subject(vae),
            animate.BodyPoses(vae),
            animate.Faces(arch.animate.face_size),
        ]
        chosen.append(animate.SubjectVision(clip, (control.REFERENCE,), kind="clip-vision-subject"))
    elif arch.music:
        assert clip is not None
        chosen += [
            dance.Music(arch.music.fps),
            dance.Keyframes(vae),
            dance.KeyframeVision(clip, (dance.DANCER,)),
        ]
        chosen.append(
            image.ClipVision(clip, (dance.DANCER,), name="refimage", kind="clip-vision-dancer")
        )
    elif arch.vace_layers:
        chosen.append(Vace(vae))
    elif arch.camera_channels:
        ends = image.FirstLast(vae, both=False, clean_first=arch.token_times)
        chosen += [control.Camera(), ends if _has_mask(arch) else control.FirstLatent(vae)]
        if clip is not None:
            chosen.append(image.ClipVision(clip, (image.FIRST,)))
    elif _is_controlled(arch):
        masked = control.MaskedControl(vae, clean_first=arch.token_times)
        chosen.append(masked if _has_mask(arch) else control.Control(vae))
        if arch.ref_conv:
            chosen.append(control.Reference(vae))
        if clip is not None:
            chosen.append(control.ControlVision(clip, (control.REFERENCE, image.FIRST)))
    elif _extra_channels(arch):
        both = bool(arch.image_positions)
        chosen.append(image.FirstLast(vae, both=both, clean_first=arch.token_times))
        if clip is not None:
            chosen.append(
                image.ClipVision(clip, (image.FIRST, image.LAST) if both else (image.FIRST,))
            )
    elif arch.token_times:
        chosen.append(FirstFrame(vae))
    return chosen


def is_given_first_latent(arch: WanArch) -> bool:
    """Whether `y` gives the model the first latent frame of every clip; for a single image that is
    all of it."""
    return _extra_channels(arch) > 0 and not (arch.music or arch.animate or _is_controlled(arch))


def _is_controlled(arch: WanArch) -> bool:
    """Whether `y` begins with latents of a control video; latents of given frames follow."""
    return _extra_channels(arch) >= 2 * arch.out_channels


def _has_mask(arch: WanArch) -> bool:
    """Whether `y` has four channels that say which frames are given."""
    return _extra_channels(arch) % arch.out_channels > 0


def _extra_channels(arch: WanArch) -> int:
    """Channels of `y`, which the patch embedding takes after the noised latents."""
    return arch.in_channels - arch.out_channels
