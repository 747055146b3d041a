"""What the doctor sees in clips: cuts and no flash, fade or pan; blank, still and frozen images;
copies however they are encoded."""

import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from made_clips import Frames, pan, smaller, texture, written
from media_files import noisy_video, picture, truncated

from ditkit_core.data.media.video import is_hdr
from ditkit_core.diagnostics.doctor.media import (
    NEAR_BITS,
    Fingerprint,
    WindowLook,
    look_at_window,
    near_duplicates,
    window_fingerprint,
)
from ditkit_core.errors import UserError


def seen(path: Path, frames: Frames, **options: int) -> WindowLook:
    return look_at_window(written(path, frames, **options), frames=len(frames), fps=24.0)


def test_a_hard_cut_is_found_at_its_time(tmp_path: Path) -> None:
    assert seen(tmp_path / "a.mp4", pan(1, 12) + pan(2, 12)).cuts == (0.5,)
    three = seen(tmp_path / "b.mp4", pan(1, 9) + pan(2, 9) + pan(3, 6))
    assert three.cuts == (9 / 24, 18 / 24)


def test_a_cut_is_reported_as_seconds_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path / "a.mp4", pan(1, 18) + pan(2, 30))
    assert look_at_window(path, frames=16, fps=16.0, start_seconds=0.5).cuts == (0.75,)
    assert (
        look_at_window(path, frames=8, fps=16.0).cuts
        == ()
        == look_at_window(path, frames=8, fps=16.0, start_seconds=1.0).cuts
    )


@pytest.mark.parametrize("speed", [0, 1, 4, 12])
def test_a_pan_of_any_speed_is_no_cut(tmp_path: Path, speed: int) -> None:
    assert seen(tmp_path / "a.mp4", pan(5, 24, speed=speed)).cuts == ()
    slow = written(tmp_path / "slow.mp4", pan(5, 12, speed=speed), fps=8)
    assert look_at_window(slow, frames=36, fps=24.0).cuts == (), (
        "frames that are repeated make no cut of what is between"
    )


def test_flashes_and_fades_are_no_cuts(tmp_path: Path) -> None:
    flash = pan(5, 24)
    flash[10] = np.full_like(flash[10], 255)
    assert seen(tmp_path / "flash.mp4", flash).cuts == ()
    fade = [frame * (i / 23) for i, frame in enumerate(pan(6, 24))]
    assert seen(tmp_path / "fade.mp4", fade).cuts == ()


def test_what_does_not_move_and_what_stops_moving(tmp_path: Path) -> None:
    moving = seen(tmp_path / "moving.mp4", pan(1, 36))
    assert not moving.is_still and moving.frozen_seconds < 0.2
    still = seen(tmp_path / "still.mp4", pan(1, 1) * 36)
    assert still.is_still and still.frozen_seconds == 0
    stops = pan(1, 12)
    stopping = seen(tmp_path / "stopping.mp4", stops + stops[-1:] * 30)
    assert not stopping.is_still and stopping.frozen_seconds == pytest.approx(30 / 24, abs=2 / 24)


def test_blank_frames_are_counted(tmp_path: Path) -> None:
    dark = pan(1, 12) + [np.zeros((96, 128, 3))] * 6
    found = seen(tmp_path / "dark.mp4", dark)
    assert (found.blank, found.is_black) == (6, True)
    white = look_at_window(picture(tmp_path / "white.png", colour="white"), frames=1, fps=0.0)
    assert (white.blank, white.is_black, white.fingerprint, white.is_still) == (
        1,
        False,
        None,
        False,
    )


def test_what_cannot_be_decoded_is_an_error(tmp_path: Path) -> None:
    path = truncated(noisy_video(tmp_path / "a.mp4"), tmp_path / "b.mp4")
    with pytest.raises(UserError, match=r"b\.mp4"):
        look_at_window(path, frames=32, fps=24.0)


def test_hdr_is_what_the_file_says(tmp_path: Path) -> None:
    assert is_hdr(written(tmp_path / "hdr.mp4", pan(1, 3), hdr=True))
    assert not is_hdr(written(tmp_path / "sdr.mp4", pan(1, 3)))


def prints(*looks: WindowLook) -> dict[str, tuple[int, Fingerprint]]:
    found = {str(i): (i, each.fingerprint) for i, each in enumerate(looks)}
    return {name: (source, print) for name, (source, print) in found.items() if print is not None}


def test_copies_are_near_whatever_their_size_and_compression(tmp_path: Path) -> None:
    first, other = pan(1, 24), pan(2, 24)
    looks = [
        seen(tmp_path / "0.mp4", first),
        seen(tmp_path / "1.mp4", other),
        seen(tmp_path / "2.mp4", smaller(first, 64, 80), crf=34),
        seen(tmp_path / "3.mp4", [frame * 0.97 + 4 for frame in other]),
        seen(tmp_path / "4.mp4", [255 - frame for frame in first]),
        seen(tmp_path / "5.mp4", [frame[..., ::-1] for frame in first]),
    ]
    assert near_duplicates(prints(*looks)) == [("0", "2"), ("1", "3")]


def test_windows_of_one_file_are_no_duplicates_of_each_other(tmp_path: Path) -> None:
    own = seen(tmp_path / "a.mp4", pan(1, 24)).fingerprint
    assert own is not None
    assert near_duplicates({"a #0": ("a", own), "a #1": ("a", own), "b": ("b", own)}) == [
        ("a #0", "b")
    ]


def random_prints(count: int) -> dict[str, tuple[int, Fingerprint]]:
    random = np.random.default_rng(0)
    return {
        str(i): (
            i,
            window_fingerprint(random.normal(128, 40, size=(3, 32, 32, 3)).astype(np.float32)),
        )
        for i in range(count)
    }


def test_whatever_differs_in_few_enough_bits_is_found() -> None:
    found, random = random_prints(200), np.random.default_rng(1)
    for changed in range(1, NEAR_BITS + 3):
        other = found[str(changed)][1]
        bits = other.bits.copy()
        bits[random.choice(len(bits), changed, replace=False)] ^= True
        found[f"copy {changed}"] = -changed, Fingerprint(bits=bits, colours=other.colours)
    assert near_duplicates(found) == [(str(i), f"copy {i}") for i in range(1, NEAR_BITS + 1)]
    assert near_duplicates({}) == []


class Counted(Fingerprint):
    """Counts comparisons."""

    calls = 0

    def near(self, other: Fingerprint) -> bool:
        Counted.calls += 1
        return super().near(other)


def test_comparisons_grow_with_the_number_of_files_and_no_faster() -> None:
    copies = window_fingerprint(np.stack([texture(1, 32, 32)] * 3).astype(np.float32))
    calls = []
    for count in (250, 500, 1000):
        alike = [
            Counted(bits=copies.bits, colours=copies.colours + 100.0 * i) for i in range(count)
        ]
        Counted.calls = 0
        # the hardest case: all have the same bits, and no two the same colours
        assert near_duplicates({str(i): (i, each) for i, each in enumerate(alike)}) == []
        calls.append(Counted.calls)
    assert all(b < 2.1 * a for a, b in pairwise(calls))
    began = time.process_time()
    assert near_duplicates(random_prints(1000)) == []
    assert time.process_time() - began < 20
