"""Tone mapping of HDR video (PQ and HLG) to SDR, which models are trained on.

Read without conversion, HDR images look grey and flat, and a model would learn to generate such
images. Refusing them would exclude the default recordings of most phones. So light up to three
quarters of diffuse white (203 cd/m²) stays as it is, and brighter light is compressed into the
remaining quarter: diffuse white becomes 241 of 255. Sources: ITU-R BT.2100 (transfer functions),
BT.2408 (203 cd/m²), BT.2087 (BT.2020 to BT.709), BT.1886 (2.4).
"""

import functools

import numpy as np
from numpy.typing import NDArray

PQ, HLG = 16, 18
"""Transfer characteristics as ITU-T H.273 numbers them."""

_UNSPECIFIED = 2
_DOLBY = ("dvh1", "dvhe", "dva1", "dvav", "dav1")
"""MP4 sample entries of streams that only Dolby Vision decoders can show (HEVC, AVC, AV1);
backward-compatible streams use other names."""

_WHITE = 203.0
"""Luminance of diffuse white in cd/m²."""
_KNEE = 0.75
"""Fraction of diffuse white up to which light stays as it is."""
_HLG_PEAK = 1000.0
"""Peak luminance in cd/m² of the screen that HLG is mapped to; its system gamma is then 1.2."""
_TO_BT709 = np.array(
    [
        [1.660491, -0.587641, -0.072850],
        [-0.124550, 1.132900, -0.008349],
        [-0.018151, -0.100579, 1.118730],
    ],
    np.float32,
)
_LUMINANCE = np.array([0.2627, 0.6780, 0.0593], np.float32)
"""Luminance coefficients of red, green and blue in BT.2020."""

Light = NDArray[np.float32]


def is_dolby_alone(entry: str, transfer: int) -> bool:
    """Whether a stream has the colours of Dolby Vision profile 5, which other decoders cannot show.

    `entry` is the name of the stream's sample entry; "" outside MP4 and MOV, where profile 5 is not
    recognised. With an HDR10 base layer (profile 7) the transfer characteristics are specified.
    """
    return entry in _DOLBY and transfer == _UNSPECIFIED


def to_sdr(image: NDArray[np.uint16], transfer: int) -> NDArray[np.uint8]:
    """Convert an HDR image [height, width, RGB] in BT.2020 with 16 bits, of transfer `PQ` or `HLG`,
    to SDR in BT.709 with 8 bits."""
    light: Light = _light(transfer)[image]
    if transfer == HLG:
        light = (
            light
            * np.maximum(light @ _LUMINANCE, 1e-6)[..., None] ** np.float32(0.2)
            * np.float32(_HLG_PEAK / _WHITE)
        )
    light = np.maximum(light @ _TO_BT709.T, 0)
    # One factor for all three channels keeps the hue; compressing each channel alone would shift
    # bright colours to white.
    brightest = np.maximum(light.max(-1, keepdims=True), np.float32(1e-6))
    light = light * (_compressed(brightest) / brightest)
    return np.asarray((light ** np.float32(1 / 2.4) * 255 + 0.5).clip(0, 255), np.uint8)


def _compressed(light: Light) -> Light:
    """Linear up to the knee, then approaching 1 with a continuous slope."""
    above = np.maximum(light - _KNEE, 0) / (1 - _KNEE)
    return np.asarray(
        np.where(light <= _KNEE, light, _KNEE + (1 - _KNEE) * above / (1 + above)), np.float32
    )


@functools.cache
def _light(transfer: int) -> Light:
    """Light by 16-bit code value: for PQ in units of diffuse white, for HLG the linear light of the
    scene."""
    code = np.arange(65536, dtype=np.float64) / 65535
    if transfer == PQ:
        m1, m2, c1, c2, c3 = 2610 / 16384, 2523 / 32, 3424 / 4096, 2413 / 128, 2392 / 128
        root = code ** (1 / m2)
        return (10000 / _WHITE * (np.maximum(root - c1, 0) / (c2 - c3 * root)) ** (1 / m1)).astype(
            np.float32
        )
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    return np.where(code <= 0.5, code**2 / 3, (np.exp((code - c) / a) + b) / 12).astype(np.float32)
