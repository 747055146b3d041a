"""ICC profiles made here, because none may be taken along: of cameras and displays, of grey images
and of print."""

import struct
from collections.abc import Mapping

Colorants = tuple[tuple[float, float, float], ...]
"""XYZ of red, green and blue for the white of ICC (D50), as the profiles of their makers have
them."""

P3: Colorants = (
    (0.51512, 0.24120, -0.00105),
    (0.29198, 0.69225, 0.04189),
    (0.15710, 0.06657, 0.78407),
)
ADOBE: Colorants = (
    (0.60974, 0.31111, 0.01947),
    (0.20528, 0.62567, 0.06087),
    (0.14919, 0.06322, 0.74457),
)
BT2020: Colorants = (
    (0.67350, 0.27904, -0.00193),
    (0.16567, 0.67535, 0.02998),
    (0.12506, 0.04561, 0.79686),
)
SRGB: Colorants = (
    (0.43607, 0.22249, 0.01392),
    (0.38515, 0.71687, 0.09708),
    (0.14307, 0.06061, 0.71410),
)
_D50 = (0.9642, 1.0, 0.8249)


def srgb_curve(entries: int = 1024) -> bytes:
    """The curve of sRGB as a table, as old profiles have it."""
    values = [i / (entries - 1) for i in range(entries)]
    light = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values
    ]
    return struct.pack(
        f">4s4xI{entries}H", b"curv", entries, *(round(each * 65535) for each in light)
    )


def gamma_curve(gamma: float) -> bytes:
    return struct.pack(">4s4xIHxx", b"curv", 1, round(gamma * 256))


def _xyz(values: tuple[float, float, float]) -> bytes:
    return struct.pack(">4s4x3i", b"XYZ ", *(round(value * 65536) for value in values))


def _profile(
    kind: bytes, space: bytes, connection: bytes, name: str, tags: Mapping[bytes, bytes]
) -> bytes:
    text = name.encode() + b"\0"
    described = struct.pack(">4s4xI", b"desc", len(text)) + text + bytes(78)
    tags = {b"desc": described, b"cprt": b"text\0\0\0\0none\0", b"wtpt": _xyz(_D50), **tags}
    table, data, at = b"", b"", 128 + 4 + 12 * len(tags)
    for tag, value in tags.items():
        table += struct.pack(">4sII", tag, at + len(data), len(value))
        data += value + bytes(-len(value) % 4)
    size = at + len(data)
    date = struct.pack(">6H", 2026, 1, 1, 0, 0, 0)
    head = (
        struct.pack(">I4xI4s4s4s", size, 0x02400000, kind, space, connection)
        + date
        + b"acsp"
        + bytes(28)
    )
    return (
        (head + struct.pack(">3i", *(round(value * 65536) for value in _D50))).ljust(128, b"\0")
        + struct.pack(">I", len(tags))
        + table
        + data
    )


def rgb_profile(colorants: Colorants, curve: bytes, name: str = "a display") -> bytes:
    tags = dict(zip((b"rXYZ", b"gXYZ", b"bXYZ"), map(_xyz, colorants), strict=True))
    return _profile(
        b"mntr", b"RGB ", b"XYZ ", name, {**tags, b"rTRC": curve, b"gTRC": curve, b"bTRC": curve}
    )


def with_cicp(profile: bytes, primaries: int, transfer: int) -> bytes:
    """A profile with one more tag: the numbers of H.273, as in profiles of HDR images."""
    count = struct.unpack_from(">I", profile, 128)[0]
    entries = [struct.unpack_from(">4sII", profile, 132 + 12 * i) for i in range(count)]
    table = b"".join(struct.pack(">4sII", tag, at + 12, size) for tag, at, size in entries)
    tag = struct.pack(">4s4x4B", b"cicp", primaries, transfer, 0, 1)
    table += struct.pack(">4sII", b"cicp", len(profile) + 12, len(tag))
    data = profile[132 + 12 * count :]
    return (
        struct.pack(">I", len(profile) + 12 + len(tag))
        + profile[4:128]
        + struct.pack(">I", count + 1)
        + table
        + data
        + tag
    )


def grey_profile(gamma: float) -> bytes:
    return _profile(
        b"mntr", b"GRAY", b"XYZ ", f"grey of gamma {gamma}", {b"kTRC": gamma_curve(gamma)}
    )


def print_profile() -> bytes:
    """CMYK inks over white paper: each ink takes a share of the light, black almost all. With the
    smallest table that ICC allows."""
    # Lab of cyan, magenta, yellow and black.
    inks = ((55, -37, -50), (48, 74, -3), (89, -5, 93), (16, 0, 0))
    grid = b""
    for corner in range(16):
        lightness, a, b = 95.0, 0.0, 0.0
        for ink, (ink_l, ink_a, ink_b) in enumerate(inks):
            if corner >> (3 - ink) & 1:
                lightness, a, b = (
                    lightness * ink_l / 95,
                    (a + ink_a) * ink_l / 95,
                    (b + ink_b) * ink_l / 95,
                )
        grid += bytes([round(lightness * 2.55), round(a) + 128, round(b) + 128])
    ramp = bytes(range(256))
    matrix = struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 65536)
    table = struct.pack(">4s4x3Bx", b"mft1", 4, 3, 2) + matrix + ramp * 4 + grid + ramp * 3
    return _profile(b"prtr", b"CMYK", b"Lab ", "a press", {b"A2B0": table})
