"""The doctor's note about HD videos that do not name their matrix of colours."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from ditkit_core.config.resolve import resolve
from ditkit_core.data.dataset import Sample
from ditkit_core.data.media.clip import MediaInfo
from ditkit_core.data.media.video import has_no_matrix
from ditkit_core.diagnostics.doctor.dataset import examine_dataset
from ditkit_core.diagnostics.doctor.findings import FileRow
from ditkit_core.diagnostics.doctor.media import without_matrix
from ditkit_core.diagnostics.doctor.rules import check_matrices, file_row
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.testing.toy import TOY


def video(path: Path, *, height: int = 720, tagged: bool) -> Path:
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, height, "yuv420p"
        if tagged:
            stream.codec_context.colorspace = 1
        for index in range(2):
            frame = av.VideoFrame.from_ndarray(
                np.full((height, 64, 3), 99, np.uint8), format="rgb24"
            )
            frame = frame.reformat(format="yuv420p", dst_colorspace="ITU709" if tagged else None)
            frame.pts, frame.time_base = index, Fraction(1, 8)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return path


def row_of(path: Path, info: MediaInfo) -> FileRow:
    sample = Sample(id="a", media=path, captions=("a",), frames=1, height=16, width=16)
    return file_row(str(path), info, [sample], fps=8.0)


def test_only_a_video_without_a_tag_is_named(tmp_path: Path) -> None:
    tagged, untagged = (
        video(tmp_path / "a.mp4", tagged=True),
        video(tmp_path / "b.mp4", tagged=False),
    )
    (tmp_path / "c.mp4").write_bytes(b"damaged")
    assert (has_no_matrix(tagged), has_no_matrix(untagged)) == (False, True)
    hd = MediaInfo(kind="video", width=64, height=720, seconds=1.0, fps=8.0)
    rows = [row_of(path, hd) for path in (*sorted(tmp_path.iterdir()), tmp_path)]
    assert without_matrix([*rows, row_of(untagged, replace(hd, height=480))]) == [str(untagged)]


@pytest.mark.parametrize(
    ("files", "where"), [(["a.mp4"], "a.mp4"), (["a.mp4", "b.mp4"], "2 of 3 files (a.mp4, …)")]
)
def test_the_note_is_one_for_all(files: list[str], where: str) -> None:
    (note,) = check_matrices(files, 3)
    assert (note.code, note.severity, note.where) == (
        "D40",
        "note",
        where,
    ) and "BT.601" in note.observation
    assert not list(check_matrices([], 3))


def test_a_check_notes_hd_videos_alone(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for name, height, tagged in (("hd", 720, False), ("tagged", 720, True), ("small", 480, False)):
        video(folder / f"{name}.mp4", height=height, tagged=tagged)
        (folder / f"{name}.txt").write_text(name)
    flags = {
        "data.folder": str(folder),
        "data.frames": 1,
        "data.height": 16,
        "data.width": 16,
        "run.folder": str(tmp_path / "run"),
    }
    run = create_run(TOY, resolve(RunConfig, flags={**flags, "model.preset": "tiny"}))
    found = [each for each in examine_dataset(run.data).checkup.findings if each.code == "D40"]
    assert [each.where for each in found] == [str(folder / "hd.mp4")]
