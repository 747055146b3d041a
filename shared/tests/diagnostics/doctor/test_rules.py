"""What goes with a clip and does not belong to it: other images than its ends, videos at another
pace or of another shape."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_clips import pan, written
from media_files import noisy_video, picture, truncated

from ditkit_core.data.dataset import Sample
from ditkit_core.data.media.clip import read_clip, write_image
from ditkit_core.diagnostics.doctor.rules import check_boundary_images, check_control_videos
from ditkit_core.models.conditions import Column

BEGIN, END = (
    Column(name="begin", kind="image", moment="begin"),
    Column(name="end", kind="image", moment="end"),
)
FOLLOWED = Column(name="pose", kind="video")
FPS = 16.0


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    """The first 9 of 48 frames, and a late part of which would show another place."""
    media = written(tmp_path / "clip.mp4", pan(1, 48, speed=4, height=48, width=64), fps=16)
    return Sample(id="clip", media=media, captions=("x",), frames=9, height=32, width=48)


def frame(sample: Sample, number: int) -> str:
    """A frame of the clip as an image of another size and codec."""
    pixels = read_clip(
        sample.media, frames=1, fps=FPS, height=64, width=96, start_seconds=number / FPS
    )
    path = sample.media.with_name(f"{number}.png")
    write_image(path, (pixels[:, 0] + 1) / 2)
    return str(path)


def told(sample: Sample, **controls: str) -> list[str]:
    with_it = replace(sample, controls=controls)
    found = [
        *check_boundary_images(with_it, (BEGIN, END, FOLLOWED), FPS),
        *check_control_videos(with_it, (BEGIN, END, FOLLOWED)),
    ]
    assert all(each.severity == "warning" and each.remedy for each in found)
    return [f"{each.code} {each.observation}" for each in found]


def test_images_are_compared_with_the_frames_that_are_trained(sample: Sample) -> None:
    assert told(sample, begin=frame(sample, 0), end=frame(sample, 8)) == []
    begin, end = told(sample, begin=frame(sample, 40), end=frame(sample, 47))
    assert begin.startswith("D18 begin") and "does not look like its first frame" in begin
    assert end.startswith("D18 end") and "does not look like the last of its 9 frames" in end
    later = replace(sample, start_seconds=39 / FPS)
    assert told(later, end=frame(sample, 47)) == [] and told(later, begin=frame(sample, 0))
    still = replace(sample, frames=1)
    assert told(still, end=frame(sample, 40)) == [], "a picture has no end, and none is read"


@pytest.mark.parametrize(
    ("frames", "fps", "said"),
    [
        (48, 16, ""), (49, 16, ""), (24, 16, ""), (12, 16, ""),  # enough for what is trained
        (48, 8, "as many frames as its clip, at 8 in a second and not 16, and lasts 6.00 s and its clip 3.00 s"),
        (48, 24, "as many frames as its clip, at 24 in a second"), (80, 16, "lasts 5.00 s and its clip 3.00 s"),
    ],
)  # fmt: skip
def test_a_video_at_another_pace_is_reported(
    sample: Sample, frames: int, fps: int, said: str
) -> None:
    pose = written(sample.media.with_name("pose.mp4"), [np.zeros((48, 64, 3))] * frames, fps=fps)
    found = told(sample, pose=str(pose))
    assert [said in each and each.startswith("D19") for each in found] == ([True] if said else [])


def test_a_video_or_mask_of_another_shape_is_reported(sample: Sample) -> None:
    assert told(sample, pose=str(picture(sample.media.with_name("same.png"), (96, 128)))) == []
    (found,) = told(sample, pose=str(picture(sample.media.with_name("square.png"), (64, 64))))
    assert "is 64 x 64 and its clip 64 x 48" in found


def test_what_is_damaged_behind_its_use_is_compared_no_further(sample: Sample) -> None:
    whole = noisy_video(sample.media.with_name("whole.mp4"))
    torn = truncated(whole, sample.media.with_name("torn.mp4"))
    assert (
        told(sample, pose=str(torn)) == []
        and told(replace(sample, media=torn), pose=str(whole)) == []
    )
