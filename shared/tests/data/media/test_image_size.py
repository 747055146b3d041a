"""The size of an image is read from its header, whatever its orientation, and a damaged image is
still found."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from ditkit_core.data.media import image
from ditkit_core.errors import UserError

XMP = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


ROTATING = {
    "nothing": b"",
    "EXIF": chunk(b"eXIf", exif(6).removeprefix(b"Exif\0\0")),
    "mirrored EXIF": chunk(b"eXIf", exif(2).removeprefix(b"Exif\0\0")),
    "XMP": chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP.encode()),
    "a profile as text": chunk(
        b"tEXt", b"Raw profile type exif\0\nexif\n      26\n" + exif(8).hex().encode()
    ),
    "a comment": chunk(b"tEXt", b"Comment\0made by a camera"),
}


def png(path: Path, what: str = "nothing", *, after: bool = False) -> Path:
    """A PNG of 40 × 24 pixels, with a chunk before or after its pixels."""
    written = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 40, 3), dtype=np.uint8)).save(
        written, "PNG"
    )
    data = written.getvalue()
    at = data.index(b"IEND" if after else b"IDAT") - 4
    path.write_bytes(data[:at] + ROTATING[what] + data[at:])
    return path


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the PNGs whose pixels are decoded."""
    names: list[str] = []
    load = PngImagePlugin.PngImageFile.load

    def counted(self: Any) -> Any:
        names.append(Path(self.filename).name)
        return load(self)

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", counted)
    return names


@pytest.mark.parametrize("after", [False, True], ids=["before the pixels", "after them"])
@pytest.mark.parametrize("what", ROTATING)
def test_a_size_is_that_of_the_upright_image(tmp_path: Path, what: str, after: bool) -> None:
    path = png(tmp_path / "a.png", what, after=after)
    with Image.open(path) as opened:
        upright = ImageOps.exif_transpose(opened)
    assert (
        image.image_size(path)
        == (upright.height, upright.width)
        == image.read_image(path).shape[:2]
    )
    assert (upright.width > upright.height) == (what in ("nothing", "mirrored EXIF", "a comment"))


def test_pixels_are_decoded_only_where_something_follows_them(
    tmp_path: Path, decoded: list[str]
) -> None:
    for number in range(20):
        image.image_size(png(tmp_path / f"{number}.png", list(ROTATING)[number % len(ROTATING)]))
    assert decoded == []
    image.image_size(png(tmp_path / "late.png", "XMP", after=True))
    assert decoded == ["late.png"]


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
def test_a_png_that_ends_too_early_is_still_found(tmp_path: Path, kept: float) -> None:
    path = png(tmp_path / "a.png")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(UserError, match=r"a\.png cannot be read as an image"):
        image.image_size(path)


def test_other_formats_keep_their_orientation(tmp_path: Path) -> None:
    pixels = Image.new("RGB", (40, 24))
    for name in ("a.jpg", "a.webp", "a.tif", "a.avif"):
        pixels.save(tmp_path / name, exif=exif(6))
        assert (
            image.image_size(tmp_path / name)
            == (40, 24)
            == image.read_image(tmp_path / name).shape[:2]
        ), name


def test_a_large_jpeg_is_decoded_smaller_where_that_is_enough(tmp_path: Path) -> None:
    pixels = np.zeros((1200, 1600, 3), np.uint8)
    pixels[:, :800] = (200, 30, 60)
    for name in ("a.jpg", "a.png"):
        Image.fromarray(pixels).save(tmp_path / name, exif=exif(6))
    whole = image.read_image(tmp_path / "a.jpg")
    small = image.read_image(tmp_path / "a.jpg", at_least=300)
    assert whole.shape == (1600, 1200, 3) and small.shape == (400, 300, 3)
    assert np.abs(small[[10, -10], 150].astype(int) - whole[[40, -40], 600]).max() <= 3
    assert image.read_image(tmp_path / "a.jpg", at_least=1200).shape == whole.shape
    exact = image.read_image(tmp_path / "a.png")
    np.testing.assert_array_equal(image.read_image(tmp_path / "a.png", at_least=300), exact)
