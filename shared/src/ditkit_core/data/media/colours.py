"""Colours of images and frames as sRGB, which models are trained on and viewers show.

A file says in one of these ways which colours its numbers mean; the first one that is there counts:

1. an ICC profile, which littleCMS converts, with the perceptual intent (for the profiles of cameras
   and displays it is the same as the others);
2. numbers of ITU-T H.273 for primaries and transfer (`cICP` in PNG, `nclx` in AVIF and HEIC, the
   tags of a video);
3. `sRGB`, or `gAMA` with or without `cHRM`, in PNG;
4. EXIF's mark of Adobe RGB, which cameras write instead of a profile.

What means sRGB, or nearly, is left as it is, so that most images stay bitwise what they are in the
file. Sources: ITU-T H.273 tables 2 and 3 (numbers, chromaticities), IEC 61966-2-1 (sRGB), the PNG
specification (third edition, 11.3.2), DCF 2.0 (R03).
"""

import functools
import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ditkit_core.data.media import tonemap as hdr
from ditkit_core.data.media.files import open_container
from ditkit_core.errors import MissingDependency, printable

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageCms import ImageCmsTransform

Pixels = NDArray[np.uint8]
"""Height × width × RGB."""

Chromaticities = tuple[float, float, float, float, float, float, float, float]
"""x and y of white, red, green and blue."""

_SRGB: Chromaticities = (0.3127, 0.3290, 0.640, 0.330, 0.300, 0.600, 0.150, 0.060)
_ADOBE: Chromaticities = (0.3127, 0.3290, 0.640, 0.330, 0.210, 0.710, 0.150, 0.060)
_ADOBE_GAMMA = 563 / 256
_BT2020 = 9
_PRIMARIES: dict[int, tuple[str, Chromaticities]] = {
    _BT2020: ("BT.2020", (0.3127, 0.3290, 0.708, 0.292, 0.170, 0.797, 0.131, 0.046)),
    11: ("DCI-P3", (0.314, 0.351, 0.680, 0.320, 0.265, 0.690, 0.150, 0.060)),
    12: ("Display P3", (0.3127, 0.3290, 0.680, 0.320, 0.265, 0.690, 0.150, 0.060)),
}
"""Primaries that are wider than sRGB's, by number. The others of television are too near to it for
a viewer to tell."""
_NEAR_SRGB = (1, 2, 5, 6, 7)
"""Primaries that are read as sRGB's; 2 is unspecified."""
_SRGB_TRANSFERS = (1, 2, 4, 6, 13, 14, 15)
"""Transfers that displays show with the curve of sRGB; 2 is unspecified."""

_SAME_LEVELS = 2
"""A profile that changes no colour by more levels of 0…255 is one of the many files of sRGB
itself."""
_SAME_GAMMA = 0.05
"""Relative difference from 1/2.2 at which gAMA stands for sRGB, as in libpng."""
_SAME_CHROMATICITY = 0.005
_LIGHT_BYTES = 2**26
"""Bytes of light that are computed at once: all of an image of 2**27 pixels would take
gigabytes."""

_LONGEST_NAME = 60
"""Characters of a profile's name that messages quote."""

_EXIF_FORMATS = ("JPEG", "MPO", "TIFF", "WEBP", "HEIF")
_EXIF_IFD, _INTEROP_IFD, _COLOUR_SPACE_TAG = 0x8769, 0xA005, 0xA001
_ADOBE_IN_EXIF = 2

_Curve = Callable[[NDArray[Any]], NDArray[Any]]


class StoredColours(NamedTuple):
    """Colours of an image that are not stored as sRGB."""

    name: str
    """The colour space; without a conversion, the reason."""
    to_srgb: "Callable[[Image], Image] | None"
    """Converts an image of this file to RGB or RGBA; None if nothing can, so that its numbers are
    read as sRGB."""


def stored_colours(image: "Image", path: Path) -> StoredColours | None:
    """How an open image stores its colours; None for sRGB."""
    # how Pillow hands on a profile that cannot be unpacked
    if "icc_profile" in image.info and not image.info["icc_profile"]:
        return StoredColours("a damaged colour profile", None)
    icc: bytes = image.info.get("icc_profile", b"")
    if numbers := (_numbers_of_icc(icc) if icc else _numbers_of(image, path)):
        return _by_numbers(*numbers)
    if icc:
        return _by_profile(icc, image.mode)
    if image.format == "PNG" and "srgb" not in image.info and "gamma" in image.info:
        return _by_gamma(image.info["gamma"], image.info.get("chromaticity", _SRGB))
    if _is_adobe_by_exif(image):
        return StoredColours("Adobe RGB (by EXIF)", _rgb_converter(_power(_ADOBE_GAMMA), _ADOBE))
    return StoredColours("CMYK without a colour profile", None) if image.mode == "CMYK" else None


class WidePrimaries(NamedTuple):
    """Primaries of a video's frames that are wider than sRGB's."""

    name: str
    to_srgb: Callable[[Pixels], Pixels]


def wide_primaries(primaries: int, transfer: int) -> WidePrimaries | None:
    """The conversion of frames, by numbers of H.273; None for sRGB's primaries and the like, and
    for HDR, which is tone mapped."""
    if primaries not in _PRIMARIES or transfer not in _SRGB_TRANSFERS:
        return None
    name, chromaticities = _PRIMARIES[primaries]
    return WidePrimaries(
        name, functools.partial(_converted, curve=_srgb_to_light, matrix=_matrix(chromaticities))
    )


# --- ICC profiles ---


def _by_profile(icc: bytes, mode: str) -> StoredColours | None:
    from PIL import ImageCms, features

    if not features.check("littlecms2"):
        raise MissingDependency(
            "this Pillow cannot read colour profiles (it has no littleCMS); install it with pip "
            "install pillow"
        )
    try:
        name = " ".join(
            str(_profile(icc).profile_description or "a colour profile without a name").split()
        )
        convert = _profile_transform(icc, _mode_for(icc, mode))
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError) as error:
        return StoredColours(
            printable(f"a colour profile that cannot be used ({' '.join(str(error).split())})"),
            None,
        )
    if convert is None:
        return None
    # Cut and printable: whoever made the image wrote the name.
    return StoredColours(
        printable(name[:_LONGEST_NAME]), functools.partial(_apply_profile, transform=convert)
    )


def _profile(icc: bytes) -> Any:
    from PIL import ImageCms

    return ImageCms.ImageCmsProfile(io.BytesIO(icc)).profile


def _mode_for(icc: bytes, mode: str) -> str:
    """The mode of pixels that a profile is for.

    Raises:
        ValueError: If an image of this mode has no such pixels.
    """
    space = str(_profile(icc).xcolor_space).strip()
    is_grey, is_cmyk = mode in ("1", "L", "LA", "La") or mode.startswith("I;16"), mode == "CMYK"
    # also of a grey image, which has equal parts of red, green and blue
    if space == "RGB" and not is_cmyk:
        return "RGB"
    if space == "GRAY" and is_grey:
        return "L"
    if space == "CMYK" and is_cmyk:
        return "CMYK"
    raise ValueError(f"it is for {space or 'no colours'}, and the image is {mode}")


@functools.lru_cache(maxsize=16)
def _profile_transform(icc: bytes, mode: str) -> "ImageCmsTransform | None":
    """The conversion of images of a mode (L, RGB, CMYK) to sRGB; None if it changes nothing that a
    viewer could tell."""
    from PIL import Image, ImageCms

    srgb = ImageCms.createProfile("sRGB")
    transform = ImageCms.buildTransform(
        ImageCms.ImageCmsProfile(io.BytesIO(icc)), srgb, mode, "RGB"
    )
    if mode == "CMYK":
        return transform
    steps = np.arange(0, 256, 15, dtype=np.uint8)
    grid = (
        steps[:, None]
        if mode == "L"
        else np.stack(np.meshgrid(steps, steps, steps), -1).reshape(-1, 1, 3)
    )
    after = ImageCms.applyTransform(Image.fromarray(grid), transform)
    assert after is not None
    change = np.abs(np.asarray(after).astype(int) - (grid[..., None] if mode == "L" else grid))
    return transform if change.max() > _SAME_LEVELS else None


def _apply_profile(image: "Image", transform: "ImageCmsTransform") -> "Image":
    from PIL import ImageCms

    plain, alpha = _without_alpha(image, transform.input_mode)
    converted = ImageCms.applyTransform(plain, transform)
    assert converted is not None, "not in place"
    return _with_alpha(converted, alpha)


def _numbers_of_icc(icc: bytes) -> tuple[int, int] | None:
    """The numbers in a profile's tag `cicp`, if they mean HDR: its curves would show such an image
    much too dark."""
    try:
        for at in range(132, 132 + 12 * min(struct.unpack_from(">I", icc, 128)[0], 100), 12):
            name, offset, _ = struct.unpack_from(">4sII", icc, at)
            if name == b"cicp":
                primaries, transfer = struct.unpack_from("BB", icc, offset + 8)
                return (primaries, transfer) if transfer in (hdr.PQ, hdr.HLG) else None
    except struct.error:  # too short; littleCMS will say so
        pass
    return None


# --- numbers ---


def _by_numbers(primaries: int, transfer: int) -> StoredColours | None:
    if transfer in (hdr.PQ, hdr.HLG):
        name = "HDR (PQ)" if transfer == hdr.PQ else "HDR (HLG)"
        if primaries != _BT2020:
            return StoredColours(f"{name} with other primaries than BT.2020", None)
        # 8 bits are left of it by now: steps in smooth skies are the price.
        return StoredColours(
            name,
            _array_converter(lambda pixels: hdr.to_sdr(pixels.astype(np.uint16) * 257, transfer)),
        )
    if transfer not in _SRGB_TRANSFERS or not (primaries in _PRIMARIES or primaries in _NEAR_SRGB):
        return StoredColours(f"primaries {primaries} and transfer {transfer} of H.273", None)
    if primaries in _NEAR_SRGB:
        return None
    name, chromaticities = _PRIMARIES[primaries]
    return StoredColours(name, _rgb_converter(_srgb_to_light, chromaticities))


def _by_gamma(gamma: float, chromaticities: Chromaticities) -> StoredColours | None:
    is_srgb_curve = abs(gamma * 2.2 - 1) < _SAME_GAMMA
    is_srgb = (
        max(abs(a - b) for a, b in zip(chromaticities, _SRGB, strict=True)) < _SAME_CHROMATICITY
    )
    if is_srgb_curve and is_srgb:
        return None
    if not 0.01 < gamma < 100 or not np.isfinite(_matrix(chromaticities)).all():
        return StoredColours(f"an impossible gamma or primaries (gAMA {gamma:g})", None)
    name = f"gamma {gamma:g}" if is_srgb else f"gamma {gamma:g} with primaries of its own"
    return StoredColours(name, _rgb_converter(_power(1 / gamma), chromaticities))


def _numbers_of(image: "Image", path: Path) -> tuple[int, int] | None:
    """Primaries and transfer by H.273, as the container has them; None without."""
    if image.format == "PNG":
        return _numbers_of_png(path)
    if image.format == "AVIF":
        return _numbers_of_avif(path)
    if nclx := image.info.get("nclx_profile"):  # HEIC
        return int(nclx["color_primaries"]), int(nclx["transfer_characteristics"])
    return None


def _numbers_of_png(path: Path) -> tuple[int, int] | None:
    # Pillow reads no cICP. It comes before the pixels.
    with path.open("rb") as file:
        file.seek(8)
        while len(head := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            if kind == b"cICP":
                values = file.read(2)
                return (values[0], values[1]) if len(values) == 2 else None
            if kind in (b"IDAT", b"IEND"):
                break
            file.seek(length + 4, io.SEEK_CUR)
    return None


def _numbers_of_avif(path: Path) -> tuple[int, int] | None:
    # Pillow hands on no nclx box, and libav reads it with the container.
    import av

    try:
        with open_container(path, "mov,mp4,m4a,3gp,3g2,mj2") as container:
            context = container.streams.video[0].codec_context
            return int(context.color_primaries), int(context.color_trc)
    except (av.FFmpegError, OSError, IndexError, AttributeError):
        # a form of AVIF that libav does not read
        return None


def _is_adobe_by_exif(image: "Image") -> bool:
    if image.format not in _EXIF_FORMATS:
        return False
    exif = image.getexif()
    if exif.get_ifd(_EXIF_IFD).get(_COLOUR_SPACE_TAG) == _ADOBE_IN_EXIF:
        return True
    return str(exif.get_ifd(_INTEROP_IFD).get(1, "")).strip("\0 ") == "R03"


# --- conversion of pixels ---


def _power(exponent: float) -> _Curve:
    return lambda values: values**exponent


def _srgb_to_light(values: NDArray[Any]) -> NDArray[Any]:
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


@functools.cache
def _light_to_srgb() -> Pixels:
    """Levels of sRGB by light in 1/65535."""
    light = np.arange(65536) / 65535
    return np.asarray(
        255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055) + 0.5,
        np.uint8,
    )


@functools.cache
def _matrix(chromaticities: Chromaticities) -> NDArray[np.float64]:
    """From light of these primaries to light of sRGB; white stays white (Bradford). Not finite if
    there is none."""
    bradford = np.array(
        [[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]]
    )

    def cones(values: Chromaticities) -> NDArray[np.float64]:
        points = np.array(values).reshape(4, 2)
        with np.errstate(divide="ignore", invalid="ignore"):
            xyz = np.stack([points[:, 0], points[:, 1], 1 - points.sum(1)]) / points[:, 1]
            white, primaries = bradford @ xyz[:, 0], bradford @ xyz[:, 1:]
            if not np.isfinite(primaries).all() or abs(np.linalg.det(primaries)) < 1e-9:
                return np.full((3, 3), np.nan)
            # Scaled so that equal parts are white, and to the cones' answer to it: this is the
            # adaptation to the other white.
            return primaries * np.linalg.solve(primaries, white) / white[:, None]

    return np.asarray(np.linalg.solve(cones(_SRGB), cones(chromaticities)), np.float64)


def _converted(pixels: Pixels, curve: _Curve, matrix: NDArray[np.float64]) -> Pixels:
    light = curve(np.arange(256) / 255).astype(np.float32)
    linear_rgb = light[pixels] @ matrix.T.astype(np.float32)
    return _light_to_srgb()[(linear_rgb.clip(0, 1) * 65535 + 0.5).astype(np.uint16)]


def _rgb_converter(curve: _Curve, chromaticities: Chromaticities) -> "Callable[[Image], Image]":
    return _array_converter(
        functools.partial(_converted, curve=curve, matrix=_matrix(chromaticities))
    )


def _array_converter(convert: Callable[[Pixels], Pixels]) -> "Callable[[Image], Image]":
    def converted(image: "Image") -> "Image":
        from PIL import Image

        plain, alpha = _without_alpha(image, "RGB")
        pixels = np.array(plain)
        rows = max(1, _LIGHT_BYTES // (12 * plain.width))
        for top in range(0, len(pixels), rows):
            pixels[top : top + rows] = convert(pixels[top : top + rows])
        return _with_alpha(Image.fromarray(pixels), alpha)

    return converted


def _without_alpha(image: "Image", mode: str) -> "tuple[Image, Image | None]":
    """The opaque part of an image in a mode, and its transparency."""
    return image.convert(mode), image.convert("RGBA").getchannel(
        "A"
    ) if image.has_transparency_data else None


def _with_alpha(image: "Image", alpha: "Image | None") -> "Image":
    if alpha is not None:
        image.putalpha(alpha)
    return image
