"""Colours of images as a viewer shows them: what is stored in another space than sRGB is converted,
and sRGB is left as it is."""

import io
import struct
import zlib
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from colour_profiles import (
    ADOBE,
    BT2020,
    P3,
    SRGB,
    gamma_curve,
    grey_profile,
    print_profile,
    rgb_profile,
    srgb_curve,
    with_cicp,
)
from PIL import Image, ImageCms, PngImagePlugin

from ditkit_core.data.masks import read_mask
from ditkit_core.data.media import image as still
from ditkit_core.data.media.clip import Colours, changes_since_first, colours_of, read_clip
from ditkit_core.data.media.image import read_image
from ditkit_core.data.media.video import frames_at
from ditkit_core.encoding.cache import MediaHashes
from ditkit_core.errors import MissingDependency
from ditkit_core.io.files import file_hash

STORED = (200, 60, 40)
SHOWN = (217, 42, 23)
"""The same colour in Display P3 and in sRGB."""
DISPLAY_P3 = rgb_profile(P3, srgb_curve(), "Display P3")
ADOBE_RGB = rgb_profile(ADOBE, gamma_curve(563 / 256), "Adobe RGB (1998)")


def by_littlecms(image: Image.Image, profile: bytes) -> tuple[int, ...]:
    """The upper left pixel in sRGB."""
    srgb = ImageCms.createProfile("sRGB")
    converted = ImageCms.profileToProfile(image, io.BytesIO(profile), srgb, outputMode="RGB")
    assert converted is not None
    pixel = converted.getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return pixel


def colour(path: Path, *, as_stored: bool = False) -> tuple[int, ...]:
    return tuple(map(int, read_image(path, as_stored=as_stored)[0, 0]))


def differ(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def chunks(**content: bytes) -> PngImagePlugin.PngInfo:
    info = PngImagePlugin.PngInfo()
    for name, data in content.items():
        info.add(name.encode(), data)
    return info


def adobe_by_exif() -> Image.Exif:
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0xA001] = 65535
    exif.get_ifd(0x8769)[0xA005] = {1: "R03"}
    return exif


def primaries(values: tuple[float, ...]) -> bytes:
    return struct.pack(">8I", *(round(value * 100000) for value in values))


ADOBE_CHROMATICITIES = (0.3127, 0.3290, 0.640, 0.330, 0.210, 0.710, 0.150, 0.060)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".tif", ".avif", ".heic"])
def test_a_profile_is_applied_in_every_format(tmp_path: Path, suffix: str) -> None:
    if suffix == ".heic":
        pytest.importorskip("pillow_heif").register_heif_opener()
    path = tmp_path / f"photo{suffix}"
    Image.new("RGB", (64, 64), STORED).save(path, icc_profile=DISPLAY_P3, quality=100)
    assert differ(colour(path), SHOWN) <= 2
    assert differ(colour(path, as_stored=True), STORED) <= 2
    assert colours_of(path) == Colours("Display P3", is_converted=True)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "PA", "L", "LA", "1", "CMYK", "I;16"])
def test_a_profile_is_applied_in_every_mode(tmp_path: Path, mode: str) -> None:
    """The profile for the pixels of that mode; a transparent half is put on white as ever."""
    grey = mode in ("L", "LA", "I;16", "1")
    profile = print_profile() if mode == "CMYK" else grey_profile(1.0) if grey else ADOBE_RGB
    stored: Any = {
        "CMYK": (10, 200, 180, 20),
        "LA": (100, 255),
        "RGBA": (*STORED, 255),
        "1": 255,
        "I;16": 25700,
    }.get(mode)
    if mode in ("P", "PA"):
        plain = Image.new("RGB", (64, 64), STORED).quantize()
        image = plain.convert(mode)
    else:
        image = Image.new(mode, (64, 64), stored or (100 if grey else STORED))
    path = tmp_path / ("photo.tif" if mode in ("CMYK", "PA") else "photo.png")
    image.save(path, icc_profile=profile)
    plain = (
        image.convert("L")
        if mode in ("LA", "1")
        else image.convert("RGB")
        if mode in ("P", "PA", "RGBA")
        else image
    )
    if mode == "I;16":
        plain = Image.new("L", (64, 64), 100)
    right = by_littlecms(plain, profile)
    assert colour(path) == right
    assert mode == "1" or differ(right, colour(path, as_stored=True)) > 10


def test_transparency_is_put_on_white_after_the_conversion(tmp_path: Path) -> None:
    Image.new("RGBA", (8, 8), (*STORED, 51)).save(tmp_path / "a.png", icc_profile=DISPLAY_P3)
    assert (
        differ(colour(tmp_path / "a.png"), tuple(round(0.2 * value + 0.8 * 255) for value in SHOWN))
        <= 1
    )
    key_colour = Image.new("RGB", (8, 8), STORED)
    key_colour.paste((0, 0, 0), (0, 0, 4, 8))
    key_colour.save(tmp_path / "b.png", icc_profile=DISPLAY_P3, transparency=(0, 0, 0))
    pixels = read_image(tmp_path / "b.png")
    assert tuple(pixels[0, 0]) == (255, 255, 255) and tuple(pixels[0, 7]) == SHOWN


def test_a_turned_photograph_is_converted_too(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (64, 32), STORED).save(tmp_path / "a.png", icc_profile=DISPLAY_P3, exif=exif)
    pixels = read_image(tmp_path / "a.png")
    assert pixels.shape == (64, 32, 3) and tuple(pixels[0, 0]) == SHOWN


NUMBERS = {
    "P3": ((12, 13), P3, srgb_curve(4096)),
    "P3 with the transfer of BT.709": ((12, 1), P3, srgb_curve(4096)),
    "BT.2020": ((9, 14), BT2020, srgb_curve(4096)),
}


@pytest.mark.parametrize("suffix", [".png", ".avif", ".heic"])
@pytest.mark.parametrize("name", NUMBERS)
def test_primaries_by_number_are_those_of_the_profile(
    tmp_path: Path, suffix: str, name: str
) -> None:
    numbers, colorants, curve = NUMBERS[name]
    path, image = tmp_path / f"a{suffix}", Image.new("RGB", (64, 64), STORED)
    if suffix == ".png":
        image.save(
            path, pnginfo=chunks(cICP=bytes([*numbers, 0, 1]), gAMA=struct.pack(">I", 45455))
        )
    elif suffix == ".avif":
        image.save(path, quality=100)
        data = path.read_bytes()
        at = data.index(b"colrnclx") + 8
        path.write_bytes(data[:at] + struct.pack(">HH", *numbers) + data[at + 4 :])
    else:
        pytest.importorskip("pillow_heif").register_heif_opener()
        image.save(
            path, quality=100, color_primaries=numbers[0], transfer_characteristic=numbers[1]
        )
    right = by_littlecms(image, rgb_profile(colorants, curve))
    assert differ(right, STORED) > 15 and differ(colour(path), right) <= 2
    assert colours_of(path) is not None and changes_since_first(path) == "srgb"


@pytest.mark.parametrize("shade", [STORED, (0, 0, 0), (255, 255, 255), (3, 4, 5), (90, 200, 120)])
def test_adobe_rgb_of_a_camera_without_a_profile_is_that_of_the_profile(
    tmp_path: Path, shade: tuple[int, int, int]
) -> None:
    image = Image.new("RGB", (64, 64), shade)
    image.save(tmp_path / "_DSC1.jpg", exif=adobe_by_exif(), quality=100, subsampling=0)
    with Image.open(tmp_path / "_DSC1.jpg") as stored:
        assert differ(colour(tmp_path / "_DSC1.jpg"), by_littlecms(stored, ADOBE_RGB)) <= 1
    numbers = chunks(gAMA=struct.pack(">I", 45470), cHRM=primaries(ADOBE_CHROMATICITIES))
    image.save(tmp_path / "a.png", pnginfo=numbers)
    assert differ(colour(tmp_path / "a.png"), by_littlecms(image, ADOBE_RGB)) <= 1


def test_a_gamma_alone_is_applied(tmp_path: Path) -> None:
    image = Image.new("RGB", (8, 8), (0, 128, 255))
    image.save(tmp_path / "linear.png", pnginfo=chunks(gAMA=struct.pack(">I", 100000)))
    assert colour(tmp_path / "linear.png") == (0, 188, 255)  # half of the light
    image.save(tmp_path / "mac.png", pnginfo=chunks(gAMA=struct.pack(">I", 55556)))
    assert colour(tmp_path / "mac.png") == (
        0,
        round(255 * (1.055 * (128 / 255) ** (1.8 / 2.4) - 0.055)),
        255,
    )


def test_a_still_image_in_hdr_is_tone_mapped_as_a_video_is(tmp_path: Path) -> None:
    code = 148  # of 255 in PQ: 203 cd/m², diffuse white
    image = Image.new("RGB", (8, 8), (code, code, code))
    image.save(tmp_path / "a.png", pnginfo=chunks(cICP=bytes([9, 16, 0, 1])))
    assert differ(colour(tmp_path / "a.png"), (241, 241, 241)) <= 2
    image.save(
        tmp_path / "b.png", icc_profile=with_cicp(rgb_profile(BT2020, gamma_curve(5.0)), 9, 16)
    )
    assert colour(tmp_path / "b.png") == colour(tmp_path / "a.png")


SRGB_FILES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "sRGB by littleCMS": {
        "icc_profile": ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    },
    "sRGB by a table of 1024": {"icc_profile": rgb_profile(SRGB, srgb_curve())},
    "sRGB by a small table": {"icc_profile": rgb_profile(SRGB, srgb_curve(256))},
    "the usual gamma": {"pnginfo": chunks(gAMA=struct.pack(">I", 45455))},
    "sRGB before its gamma": {"pnginfo": chunks(gAMA=struct.pack(">I", 100000), sRGB=b"\0")},
    "the numbers of BT.709": {"pnginfo": chunks(cICP=bytes([1, 1, 0, 1]))},
    "the numbers of BT.601": {"pnginfo": chunks(cICP=bytes([6, 6, 0, 1]))},
}


@pytest.mark.parametrize("name", SRGB_FILES)
def test_srgb_is_left_bitwise_as_it_is_with_its_key(tmp_path: Path, name: str) -> None:
    pixels = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
    Image.fromarray(pixels).save(tmp_path / "a.png", **SRGB_FILES[name])
    assert np.array_equal(read_image(tmp_path / "a.png"), pixels)
    assert colours_of(tmp_path / "a.png") is None
    assert MediaHashes(tmp_path).of(tmp_path / "a.png") == file_hash(tmp_path / "a.png")


def damaged(path: Path) -> None:
    Image.new("RGB", (8, 8), STORED).save(
        path, icc_profile=DISPLAY_P3[:140] + bytes(len(DISPLAY_P3) - 140)
    )


def cannot_be_unpacked(path: Path) -> None:
    damaged(path)
    data = bytearray(path.read_bytes())
    at = data.index(b"iCCP") + 4 + len("ICC Profile") + 2
    data[at : at + 8] = bytes(8)
    length = struct.unpack_from(">I", data, data.index(b"iCCP") - 4)[0]
    start = data.index(b"iCCP")
    data[start + 4 + length : start + 8 + length] = struct.pack(
        ">I", zlib.crc32(data[start : start + 4 + length])
    )
    path.write_bytes(data)


def of_print(path: Path) -> None:
    Image.new("RGB", (8, 8), STORED).save(path, icc_profile=print_profile())


def unknown_numbers(path: Path) -> None:
    Image.new("RGB", (8, 8), STORED).save(path, pnginfo=chunks(cICP=bytes([22, 13, 0, 1])))


def impossible_gamma(path: Path) -> None:
    Image.new("RGB", (8, 8), STORED).save(path, pnginfo=chunks(gAMA=struct.pack(">I", 1)))


def impossible_primaries(path: Path) -> None:
    flat = chunks(
        gAMA=struct.pack(">I", 45455), cHRM=primaries((0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.0))
    )
    Image.new("RGB", (8, 8), STORED).save(path, pnginfo=flat)


@pytest.mark.parametrize(
    "write",
    [
        damaged,
        cannot_be_unpacked,
        of_print,
        unknown_numbers,
        impossible_gamma,
        impossible_primaries,
    ],
)
def test_what_cannot_be_converted_is_read_as_stored_and_named(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    path = tmp_path / "a.png"
    write(path)
    assert colour(path) == STORED
    colours = colours_of(path)
    assert colours is not None and not colours.is_converted and colours.name
    assert changes_since_first(path) == ""


def test_the_name_of_a_profile_is_safe_to_print(tmp_path: Path) -> None:
    profile = rgb_profile(P3, srgb_curve(), "\x1b[2Jscreen" + "x" * 100)
    Image.new("RGB", (8, 8), STORED).save(tmp_path / "a.png", icc_profile=profile)
    colours = colours_of(tmp_path / "a.png")
    assert colours is not None and colours.name.isprintable() and len(colours.name) < 70


def test_print_without_a_profile_is_read_as_ever_and_named(tmp_path: Path) -> None:
    image = Image.new("CMYK", (8, 8), (10, 200, 180, 20))
    for name in ("a.jpg", "a.tif"):
        image.save(tmp_path / name, quality=100)
        assert differ(colour(tmp_path / name), image.convert("RGB").getpixel((0, 0))) <= 2  # type: ignore[arg-type]
        assert colours_of(tmp_path / name) == Colours(
            "CMYK without a colour profile", is_converted=False
        )


def test_a_pillow_without_littlecms_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import features

    Image.new("RGB", (8, 8)).save(tmp_path / "a.png", icc_profile=DISPLAY_P3)
    monkeypatch.setattr(features, "check", lambda name: False)
    with pytest.raises(MissingDependency, match="littleCMS"):
        colours_of(tmp_path / "a.png")


def test_a_mask_is_read_as_stored_and_keeps_its_key(tmp_path: Path) -> None:
    """Its grey is a weight, not a colour."""
    path = tmp_path / "mask.png"
    Image.new("L", (16, 16), 128).save(path, icc_profile=grey_profile(1.0))
    assert read_mask(
        path, frames=1, fps=0.0, height=16, width=16, start_seconds=0.0
    ).mean() == pytest.approx(128 / 255)
    hashes = MediaHashes(tmp_path)
    assert hashes.of(path, as_stored=True) == file_hash(path) != hashes.of(path)


def test_the_key_of_a_converted_file_is_another_one_and_remembered(tmp_path: Path) -> None:
    folder = tmp_path / "frames"
    folder.mkdir()
    for i in (1, 2):
        Image.new("RGB", (8, 8), STORED).save(
            folder / f"{i}.png", icc_profile=DISPLAY_P3 if i == 2 else None
        )
    first = MediaHashes(tmp_path / "cache")
    assert first.of(folder / "1.png") == file_hash(folder / "1.png")
    assert first.of(folder / "2.png") == f"{file_hash(folder / '2.png')} srgb"
    assert first.of(folder) != first.of(folder, as_stored=True)


def test_all_readers_of_an_image_agree(tmp_path: Path) -> None:
    Image.new("RGB", (16, 16), STORED).save(tmp_path / "0.png", icc_profile=DISPLAY_P3)
    Image.new("RGB", (16, 16), STORED).save(tmp_path / "1.png", icc_profile=DISPLAY_P3)
    alone = read_clip(tmp_path / "0.png", frames=1, fps=0.0, height=16, width=16)
    sequence = read_clip(tmp_path, frames=2, fps=24.0, height=16, width=16)
    assert ((alone[:, 0, 0, 0] + 1) * 127.5).round().int().tolist() == list(SHOWN)
    assert (sequence == alone).all()


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_grey_of_16_bits_is_read_in_8(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    levels = np.array([[0, 128, 129, 25700], [32768, 65406, 65407, 65535]], np.uint16)
    Image.fromarray(levels).save(path)
    assert read_image(path)[..., 0].tolist() == [[0, 0, 1, 100], [128, 254, 255, 255]]
    if suffix == ".tif":
        Image.fromarray(levels).save(path, tiffinfo={262: 0})  # 0 is white
        assert read_image(path)[..., 0].tolist() == [[255, 255, 254, 155], [127, 1, 0, 0]]


def filmed(
    path: Path, primaries: int, transfer: int, pix_fmt: str = "yuv444p", codec: str = "ffv1"
) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=16)
        assert isinstance(stream, av.VideoStream)
        stream.height = stream.width = 64
        stream.pix_fmt = pix_fmt
        stream.codec_context.color_primaries, stream.codec_context.color_trc = primaries, transfer
        for i in range(3):
            frame = av.VideoFrame.from_ndarray(
                np.full((64, 64, 3), STORED, np.uint8), format="rgb24"
            ).reformat(format=pix_fmt)
            frame.pts, frame.time_base = i, Fraction(1, 16)
            frame.color_primaries, frame.color_trc = primaries, transfer
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def test_wide_primaries_of_a_video_are_converted(tmp_path: Path) -> None:
    path = filmed(tmp_path / "a.mkv", 12, 13)
    for frame in frames_at(path, [0.0, 0.1]):
        assert differ(tuple(map(int, frame[0, 0])), SHOWN) <= 3
    assert colours_of(path) == Colours("Display P3", is_converted=True)
    assert MediaHashes(tmp_path).of(path) == f"{file_hash(path)} srgb"
    plain = filmed(tmp_path / "b.mkv", 1, 1)
    assert differ(tuple(map(int, next(iter(frames_at(plain, [0.0])))[0, 0])), STORED) <= 2
    assert MediaHashes(tmp_path).of(plain) == file_hash(plain)


def test_an_avif_that_libav_cannot_open_is_read_as_srgb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ditkit_core.data.media import colours

    def refuse(path: Path, formats: str) -> None:
        raise av.error.InvalidDataError(1, "no")

    monkeypatch.setattr(colours, "open_container", refuse)
    Image.new("RGB", (64, 64), STORED).save(tmp_path / "a.avif", quality=100)
    assert still.image_colours(tmp_path / "a.avif") is None
