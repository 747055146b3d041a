"""Conditions of S2V besides text: speech, a reference image, poses, and the frames before the clip.

The first frame of a clip is where it starts: the model generates the frames after it, so speech and
poses are those of these frames. Sources: Wan-Video/Wan2.2, wan/speech2video.py and
wan/modules/s2v/audio_encoder.py; aigc-apps/VideoX-Fun, scripts/wan2.2/train_s2v.py.
"""

from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ditkit_core.data.media.clip import media_kind, probe, read_clip
from ditkit_core.data.media.crop import Crop
from ditkit_core.data.media.sound import decode_sound
from ditkit_core.encoding.cache import key
from ditkit_core.errors import UserError
from ditkit_core.families.first_frame import VaeConditioner, column_or_own, image_or_own
from ditkit_core.models.conditions import ClipConditioner, ClipInputs
from ditkit_wan.conditioning.control import REFERENCE
from ditkit_wan.conditioning.media import missing_condition, video
from ditkit_wan.encoders import speech as speech_encoder
from ditkit_wan.encoders.speech import SpeechEncoder
from ditkit_wan.model.variants.speech import MOTION_FRAMES, MOTION_LATENTS

AUDIO, POSE, MOTION = "input_audio", "s2v_pose_video", "motion_video"
_VIDEO_RATE = 30
"""Rows per second that hidden states are resampled to; the rows of frames are chosen from these."""
_SHORT_SECONDS = 0.5
"""What speech may lack at a clip's end: the rows of these frames are zeros, as in the official
code."""


class Speech(ClipConditioner):
    """`audio` [states, features, frames - 1]: hidden states of wav2vec2 at every frame after the
    first, from the sound of these frames alone."""

    kind = "speech"

    def __init__(self, encoder: SpeechEncoder | None, fps: float):
        """Set the encoder.

        Args:
            encoder: wav2vec2; None if conditions are only checked.
            fps: The model's frames per second, for a sample without a rate.
        """
        self.encoder, self.fps = encoder, fps

    @cached_property
    def identity(self) -> str:
        """Digest of the encoder."""
        assert self.encoder is not None, "nothing is encoded without files"
        return key(self.encoder.identity, self.kind, "rows of frames after the first")

    def load(self) -> None:
        assert self.encoder is not None
        self.encoder.load()

    def unload(self) -> None:
        assert self.encoder is not None
        self.encoder.unload()

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The column, or the clip's own sound track.

        Raises:
            UserError: If there is neither, or the clip has one frame.
        """
        if controls.frames < 5:
            raise UserError(
                f"{controls.clip or 'a sample'} has {controls.frames} frame(s), and S2V learns "
                f"those after the first; use clips of 5 or more"
            )
        if AUDIO in controls.files:
            return (AUDIO,)
        if controls.clip is None or media_kind(controls.clip) != "video" or controls.clip.is_dir():
            raise missing_condition(
                controls, [AUDIO], "which this model speaks by, nor a sound track"
            )
        return ("",)

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        assert self.encoder is not None
        states = self.encoder.encode([self._sound(controls)])[0]["states"]
        return {"audio": rows_of_frames(states, controls.frames - 1, controls.fps or self.fps)}

    def check(self, controls: ClipInputs) -> None:
        """Read the sound, and check that it is long enough."""
        self.uses(controls)
        self._sound(controls)

    def _sound(self, controls: ClipInputs) -> Float[Tensor, " samples"]:
        """The sound of the frames after the first."""
        path = Path(controls.files[AUDIO]) if AUDIO in controls.files else controls.clip
        assert path is not None, "`uses` refuses it"
        fps = controls.fps or self.fps
        start = controls.start_seconds + 1 / fps
        end = start + (controls.frames - 1) / fps
        sound, rate = decode_sound(path, until_seconds=end, rate=speech_encoder.RATE)
        part = torch.from_numpy(sound[round(start * rate) :])
        if len(part) < max((end - start - _SHORT_SECONDS) * rate, speech_encoder.FEWEST_SAMPLES):
            raise UserError(
                f"{path} has {len(sound) / rate:.1f} s of sound and the clip needs {end:.1f} s; "
                f"give longer sound or a shorter clip"
            )
        return part


def rows_of_frames(
    states: Float[Tensor, "states rows features"], frames: int, fps: float
) -> Float[Tensor, "states features frames"]:
    """Hidden states at the time of every frame: resampled to 30 rows per second, of which each
    frame takes the nearest.

    Args:
        states: 50 rows per second.
        frames: Number of frames; those after the end of the states get zeros.
        fps: Frames per second.

    Raises:
        UserError: If there are too few states.
    """
    count = int(states.shape[1] / speech_encoder.STATES_PER_SECOND * _VIDEO_RATE)
    if not count:
        raise UserError("the sound of a clip is too short: give at least a twentieth of a second")
    resampled = F.interpolate(states.transpose(1, 2), size=count, mode="linear", align_corners=True)
    chosen = torch.round(torch.arange(frames, dtype=torch.float64) / fps * _VIDEO_RATE).long()
    rows = resampled[..., chosen.clamp(max=count - 1)]
    return torch.where(chosen < count, rows, torch.zeros(()))


class SpeechReference(VaeConditioner):
    """`reference`: latents of an image of the speaker; defaults to the clip's first frame."""

    kind = "speech-reference"

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The image, or the clip itself."""
        return (column_or_own(controls, REFERENCE, why="speech to video"),)

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        return {"reference": self.latents(image_or_own(controls, REFERENCE))}


class Poses(VaeConditioner):
    """`pose`: latents of a video of the clip's poses. As in the official code, a copy of its first
    used frame is encoded in front and cut off."""

    kind = "pose"
    optional = True

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The video, if there is one."""
        return (POSE,) if POSE in controls.files else ()

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        pixels = video(controls, POSE)[:, 1:]
        return {"pose": self.latents(torch.cat([pixels[:, :1], pixels], 1))[:, 1:].clone()}


class Motion(VaeConditioner):
    """`motion`: latents of the 73 frames up to the clip's first; and `continued`, the clip's
    latents as they are encoded after these.

    They are the last frames of the column's video, or frames of the clip's own file, where its
    window begins late enough.
    """

    kind = "motion"
    optional = True

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The column's video or the clip itself; nothing for a clip that starts from its reference
        image."""
        if MOTION in controls.files:
            return (MOTION,) if controls.clip is None else (MOTION, "")
        return ("",) if self._follows(controls) else ()

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        before = self._before(controls)
        if controls.clip is None:
            return {"motion": self.latents(before)}
        after = self._frames(controls, controls.clip, controls.start_seconds, controls.frames)[
            :, 1:
        ]
        latents = self.latents(torch.cat([before, after], 1))
        return {
            "motion": latents[:, :MOTION_LATENTS].clone(),
            "continued": latents[:, MOTION_LATENTS:].clone(),
        }

    def _follows(self, controls: ClipInputs) -> bool:
        """Whether the clip's own file has all frames before its window."""
        return (
            controls.clip is not None
            and controls.fps > 0
            and controls.start_seconds * controls.fps >= MOTION_FRAMES - 1 - 1e-6
        )

    def _before(self, controls: ClipInputs) -> Float[Tensor, "3 73 height width"]:
        if MOTION not in controls.files:
            assert controls.clip is not None, "`uses` says so"
            start = controls.start_seconds - (MOTION_FRAMES - 1) / controls.fps
            return self._frames(controls, controls.clip, max(start, 0.0), MOTION_FRAMES)
        path, fps = Path(controls.files[MOTION]), controls.fps or 1.0
        start = probe(path).seconds - MOTION_FRAMES / fps
        if start < -0.5 / fps:
            raise UserError(
                f"{path} is shorter than the {MOTION_FRAMES} frames at {fps:g} per second that a "
                f"clip continues; give a longer video"
            )
        return self._frames(controls, path, max(start, 0.0), MOTION_FRAMES)

    @staticmethod
    def _frames(
        controls: ClipInputs, path: Path, start: float, frames: int
    ) -> Float[Tensor, "3 frames height width"]:
        return read_clip(
            path,
            frames=frames,
            fps=controls.fps or 1.0,
            height=controls.height,
            width=controls.width,
            start_seconds=start,
            is_mirrored=controls.is_mirrored,
            crop=Crop(*controls.crop),
        )
