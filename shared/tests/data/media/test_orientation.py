"""Display matrices of videos: all eight turns and mirrors, as ffmpeg shows them; the rest is
refused."""

import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from dataset_looks import look
from numpy.typing import NDArray

from ditkit_core.data.media.clip import available, changes_since_first, probe, read_clip
from ditkit_core.data.media.video import frames_at
from ditkit_core.encoding.cache import MediaHashes
from ditkit_core.errors import UserError
from ditkit_core.io.files import file_hash

Matrix = tuple[float, float, float, float]
"""The numbers a, b, c, d of the display matrix."""

CASES: dict[Matrix, Sequence[tuple[str, str]]] = {
    (1, 0, 0, 1): [],
    (0, -1, 1, 0): [("transpose", "cclock")],
    (-1, 0, 0, -1): [("hflip", ""), ("vflip", "")],
    (0, 1, -1, 0): [("transpose", "clock")],
    (-1, 0, 0, 1): [("hflip", "")],
    (1, 0, 0, -1): [("vflip", "")],
    (0, 1, 1, 0): [("transpose", "cclock_flip")],
    (0, -1, -1, 0): [("transpose", "clock_flip")],
}
"""The filters that ffmpeg inserts for a matrix (`configure_input_video_filter` of its
fftools/ffmpeg_filter.c)."""
MIRRORED = list(CASES)[4:]


def stored() -> NDArray[np.uint8]:
    """A blue band above, red to the left below it, in 48 × 64."""
    image = np.zeros((48, 64, 3), np.uint8)
    image[:16] = (0, 0, 255)
    image[16:, :32] = (255, 0, 0)
    return image


def filmed(path: Path, matrix: Matrix) -> Path:
    """An mp4 whose track has a matrix, which is written into the box of its header."""
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=16, options={"crf": "5"})
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        for i in range(16):
            frame = av.VideoFrame.from_ndarray(stored(), format="rgb24")
            frame.pts, frame.time_base = i, Fraction(1, 16)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 44
    a, b, c, d = (round(value * 65536) for value in matrix)
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 2**30)
    path.write_bytes(data)
    return path


def remuxed(source: Path, path: Path) -> Path:
    """The same stream in another container."""
    with av.open(str(source)) as read, av.open(str(path), "w") as written:
        stream = written.add_stream_from_template(read.streams.video[0])
        for packet in read.demux(read.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                written.mux(packet)
    return path


def by_libavfilter(filters: Sequence[tuple[str, str]]) -> NDArray[np.uint8]:
    """The stored image after some of libav's filters."""
    graph = av.filter.Graph()
    last = graph.add_buffer(
        width=64, height=48, format=av.VideoFormat("rgb24"), time_base=Fraction(1, 16)
    )
    for name, option in filters:
        following = graph.add(name, option)
        last.link_to(following)
        last = following
    sink = graph.add("buffersink")
    last.link_to(sink)
    graph.configure()
    graph.push(av.VideoFrame.from_ndarray(stored(), format="rgb24"))
    frame = graph.pull()
    assert isinstance(frame, av.VideoFrame)
    return np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)


@pytest.mark.parametrize("matrix", CASES)
def test_a_clip_is_shown_as_ffmpeg_shows_it(tmp_path: Path, matrix: Matrix) -> None:
    path, right = filmed(tmp_path / "clip.mp4", matrix), by_libavfilter(CASES[matrix])
    info = probe(path)
    height, width = right.shape[:2]
    assert (info.height, info.width) == available(path, 16.0)[1:] == (height, width)
    for start in (0.0, 0.5):
        (shown,) = frames_at(path, [start])
        assert shown.shape == right.shape and np.abs(shown.astype(int) - right).mean() < 5
    clip = read_clip(path, frames=1, fps=16.0, height=height, width=width)
    assert np.abs((clip[:, 0].permute(1, 2, 0).numpy() + 1) * 127.5 - right).mean() < 5
    hashed = file_hash(path)
    assert MediaHashes(tmp_path).of(path) == (
        f"{hashed} mirrored" if matrix in MIRRORED else hashed
    )


@pytest.mark.parametrize("matrix", [(0, 1, -1, 0), (-1, 0, 0, 1), (1, 0, 0, -1)])
def test_matroska_hands_on_what_it_can_store(tmp_path: Path, matrix: Matrix) -> None:
    """Its header has a roll and a yaw, which libav makes a matrix of."""
    path, right = (
        remuxed(filmed(tmp_path / "a.mp4", matrix), tmp_path / "a.mkv"),
        by_libavfilter(CASES[matrix]),
    )
    (shown,) = frames_at(path, [0.0])
    assert shown.shape == right.shape and np.abs(shown.astype(int) - right).mean() < 5


def test_a_dataset_has_the_size_that_is_shown(tmp_path: Path) -> None:
    for name, matrix in {"lying": (-1, 0, 0, 1), "standing": (0, 1, 1, 0)}.items():
        filmed(tmp_path / f"{name}.mp4", matrix)
        (tmp_path / f"{name}.txt").write_text(name)
    lying, standing = look(tmp_path, height=64, width=64, buckets=True, bucket_step=16).samples
    assert (lying.height, lying.width) == (
        standing.width,
        standing.height,
    ) and standing.height > standing.width


@pytest.mark.parametrize("matrix", [(0.5, 0, 0, 0.5), (1, 0.01, -0.01, 1)])
def test_sizes_and_a_degree_do_not_matter(tmp_path: Path, matrix: Matrix) -> None:
    (shown,) = frames_at(filmed(tmp_path / "a.mp4", matrix), [0.0])
    assert np.abs(shown.astype(int) - stored()).mean() < 5


def test_an_empty_matrix_is_none(tmp_path: Path) -> None:
    path = filmed(tmp_path / "a.mp4", (0, 0, 0, 0))
    (shown,) = frames_at(path, [0.0])
    assert np.abs(shown.astype(int) - stored()).mean() < 5
    assert changes_since_first(path) == "mirrored", "earlier versions turned it"


@pytest.mark.parametrize(
    "matrix", [(0.707, 0.707, -0.707, 0.707), (1, 0.5, 0, 1), (1, 0, 0, 0), (1, 0, 1, 0)]
)
def test_other_matrices_are_refused_in_one_line(tmp_path: Path, matrix: Matrix) -> None:
    path = filmed(tmp_path / "a.mp4", matrix)
    for use in (
        lambda: probe(path),
        lambda: available(path, 16.0),
        lambda: list(frames_at(path, [0.0])),
    ):
        with pytest.raises(UserError, match="no quarter turn, or sheared; re-encode it") as caught:
            use()
        assert str(path) in str(caught.value)
    assert changes_since_first(path) == ""
