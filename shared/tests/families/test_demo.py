"""The generated images and clips of demos are data that the doctor has nothing to say about."""

import json
from pathlib import Path

import pytest

from ditkit_core.data.media.clip import probe
from ditkit_core.diagnostics.doctor.media import look_at_window, near_duplicates
from ditkit_core.families.demo import CAPTIONS, write_shapes


@pytest.mark.parametrize(("frame_step", "fps"), [(0, 1.0), (4, 16.0), (8, 25.0)])
def test_no_two_of_them_are_nearly_alike_and_clips_have_the_rate_of_the_family(
    tmp_path: Path, frame_step: int, fps: float
) -> None:
    write_shapes(tmp_path, frame_step, fps)
    lines = (tmp_path / "metadata.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["text"] for row in rows] == list(CAPTIONS)
    prints = {}
    for row in rows:
        file, frames = tmp_path / row["file_name"], 2 * frame_step + 1
        assert round(probe(file).fps) == (fps if frame_step else 0)
        look = look_at_window(file, frames=frames, fps=fps if frame_step else 0.0)
        assert look.fingerprint is not None and not look.is_still | bool(look.cuts)
        prints[row["file_name"]] = (frames, look.fingerprint)
    assert len(prints) == 24 and near_duplicates(prints) == []
