"""The kinds of hostile media: sounds and videos with damaged headers, texts of captions, and
pictures that claim to be huge."""

import math
import random
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from data_specs import CLIPS, EVERY_LENGTH
from hostile import Kind, damaged_bytes
from malformed_media import PNG, chunk, gif
from media_files import picture

from ditkit_core.data.captions import captions_of
from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import scan
from ditkit_core.data.media.clip import available, probe, read_clip
from ditkit_core.data.media.image import image_size, read_image
from ditkit_core.data.media.sound import decode_sound, sound_seconds

MARKS = (
    # Boxes of MP4 and its kin
    b"ftyp", b"moov", b"mvhd", b"tkhd", b"edts", b"elst", b"mdhd", b"hdlr", b"stsd", b"stts",
    b"ctts", b"stsc", b"stsz", b"stco",
    b"stss", b"avc1", b"avcC", b"mp4a", b"esds", b"colr", b"moof", b"tfhd", b"tfdt", b"trun",
    b"mdat",
    # Elements of Matroska: header, segment information, time scale, tracks, audio, rate, channels,
    # cluster, block, cues
    b"\x1a\x45\xdf\xa3", b"\x15\x49\xa9\x66", b"\x2a\xd7\xb1", b"\x16\x54\xae\x6b", b"\xe1",
    b"\xb5", b"\x9f", b"\x1f\x43\xb6\x75", b"\xa3",
    b"\x1c\x53\xbb\x6b",
    # Chunks of WAV and AVI, pages and heads of Ogg, FLAC, MP3
    b"RIFF", b"fmt ", b"data", b"LIST", b"avih", b"strh", b"strf", b"idx1", b"OggS", b"OpusHead",
    b"fLaC", b"ID3", b"\xff\xfb",
)  # fmt: skip
"""What stands in front of the fields of a container's headers."""
NUMBERS = (0, 1, 2, 7, 255, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 48_000)


def damaged_header(draw: random.Random, data: bytes) -> bytes:
    """A media file with a few numbers changed behind, or a size in front of, a mark of its
    container."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        mark = draw.choice([mark for mark in MARKS if mark in changed] or [b""])
        places = [at for at in range(len(changed)) if changed.startswith(mark, at)][:64]
        place = draw.choice(places)
        at = max(place - 4, 0) if draw.random() < 0.3 else place + len(mark) + draw.randrange(64)
        order, size = draw.choice(("big", "little")), draw.choice((1, 2, 4, 4, 8))
        number = draw.choice((*NUMBERS, draw.randrange(2**16))) % 256**size
        changed[at : at + size] = number.to_bytes(size, order)  # type: ignore[arg-type]
    return bytes(changed) if draw.random() < 0.8 else damaged_bytes(draw, bytes(changed))


def write_file(path: Path, sound: str = "", video: str = "", rate: int = 16_000) -> Path:
    """Write half a second of noise and eight frames."""
    noise = np.random.default_rng(0)
    with av.open(str(path), "w") as container:
        streams = []
        if video:
            moving = container.add_stream(video, rate=Fraction(16))
            moving.width, moving.height, moving.pix_fmt = 64, 48, "yuv420p"
            images = noise.integers(0, 255, (8, 48, 64, 3), np.uint8)
            frames = [av.VideoFrame.from_ndarray(image, format="rgb24") for image in images]
            streams.append((moving, frames))
        if sound:
            track = container.add_stream(sound, rate=rate)
            track.layout = "stereo"
            layout = {"format": "s16", "layout": "stereo"}
            samples = noise.integers(-9000, 9000, (1, rate), np.int16)
            frame = av.AudioFrame.from_ndarray(samples, **layout)
            frame.sample_rate, frame.pts = rate, 0
            resampler = av.AudioResampler(
                track.format, track.layout, rate, track.codec_context.frame_size or 0
            )
            streams.append((track, [*resampler.resample(frame)]))
        for stream, frames in streams:
            for frame in [*frames, None]:
                container.mux(stream.encode(frame))
    return path


def write_media(folder: Path, codecs: Mapping[str, tuple[str, str]]) -> list[Path]:
    """Small files, one for each suffix with its (sound, video) codecs."""
    return [
        write_file(folder / f"good{suffix}", *kinds, 48_000 if kinds[0] == "libopus" else 16_000)
        for suffix, kinds in codecs.items()
    ]


class Sounds:
    """Sound files, and sound tracks of videos, with damaged headers."""

    def prepare(self, folder: Path) -> None:
        self.files = write_media(folder, {
            ".wav": ("pcm_s16le", ""), ".flac": ("flac", ""), ".m4a": ("aac", ""),
            ".ogg": ("libopus", ""), ".mp3": ("libmp3lame", ""),
            ".mp4": ("aac", "libx264"), ".mkv": ("aac", "libx264"), ".avi": ("pcm_s16le", "mpeg4"),
        })  # fmt: skip

    def use(self, draw: random.Random, folder: Path) -> None:
        source = draw.choice(self.files)
        path = folder / f"x{source.suffix}"
        path.write_bytes(damaged_header(draw, source.read_bytes()))
        seconds = sound_seconds(path)
        assert math.isfinite(seconds), seconds
        until = draw.choice((math.inf, 0.25, 1.0))
        samples, rate = decode_sound(path, until_seconds=until, rate=draw.choice((0, 16_000)))
        assert rate > 0 and np.isfinite(samples).all()
        assert len(samples) <= math.ceil(min(until * rate, 2**30))


class Videos:
    """Videos with damaged headers."""

    def prepare(self, folder: Path) -> None:
        self.files = write_media(folder, {
            ".mp4": ("aac", "libx264"), ".mov": ("", "libx264"), ".mkv": ("", "libx264"),
            ".webm": ("", "libvpx-vp9"),
            ".avi": ("pcm_s16le", "mpeg4"), ".ts": ("", "libx264"),
        })  # fmt: skip

    def use(self, draw: random.Random, folder: Path) -> None:
        source = draw.choice(self.files)
        path = folder / f"x{source.suffix}"
        path.write_bytes(damaged_header(draw, source.read_bytes()))
        path.with_suffix(".txt").write_text("a caption")
        probe(path)
        available(path, 8.0)
        config = DataConfig(
            folder=str(folder),
            frames=draw.choice((1, 5)),
            height=16,
            width=16,
            on_bad=draw.choice(("error", "skip")),
        )
        scan(config, replace(CLIPS, fps=8.0))
        read_clip(path, frames=draw.choice((1, 5)), fps=8.0, height=16, width=16)


class Captions:
    """Texts next to images: any encoding, any character, any length, and the ways to change
    them."""

    def prepare(self, folder: Path) -> None:
        self.image = picture(folder / "a.png").read_bytes()
        self.pieces = (
            "a", "dog", ", ", ". ", "\n", "\r\n", "\0", "\t", "\x1b[2J", "\u202e", "\ufeff", "é",
            "🐕", "\\", "{", "}", '"', "(.*)*", "<b>", "x" * 5000,
            "\u2028", "\U000e0001", "word " * 400, "[trigger]", "%s", "../..",
        )  # fmt: skip

    def use(self, draw: random.Random, folder: Path) -> None:
        names = ("a", "b", "é", "x" * 200, "a b", "%s", "-", "a.b")
        for name in draw.sample(names, draw.choice((1, 2, 3))):
            (folder / f"{name}.png").write_bytes(self.image)
            text = "".join(draw.choices(self.pieces, k=draw.randrange(40)))
            encoding = draw.choice(("utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1", "cp1252"))
            data = text.encode(encoding, "replace")
            suffix = draw.choice((".txt", ".txt", ".caption", ".json", ".TXT"))
            if suffix == ".json":
                data = b'{"caption": "%s"}' % data if draw.random() < 0.7 else data
            (folder / f"{name}{suffix}").write_bytes(
                damaged_bytes(draw, data) if draw.random() < 0.3 else data
            )
        config = DataConfig(
            folder=str(folder),
            frames=1,
            height=16,
            width=16,
            on_bad=draw.choice(("error", "skip")),
            trigger=draw.choice(("", "ohwx", "(.*", "\\", "a")),
            shuffle_tags=draw.random() < 0.5,
            tag_separator=draw.choice((",", "|", "a")),
            keep_tags=draw.choice((0, 1, 5)),
            tag_variants=draw.choice((1, 4, 64)),
        )
        for sample in scan(config, EVERY_LENGTH).samples:
            assert captions_of(sample.captions, config)


def _bmp(width: int, height: int) -> bytes:
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + 64, 0, 0, 54) + head + bytes(64)


def _tiff(width: int, height: int) -> bytes:
    tags = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: height, 279: 64}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return (
        b"II*\0"
        + struct.pack("<I", 72)
        + bytes(64)
        + struct.pack("<H", len(tags))
        + entries
        + bytes(4)
    )


def _webp(width: int, height: int) -> bytes:
    canvas = (
        struct.pack("<I", (width - 1) % 2**24)[:3] + struct.pack("<I", (height - 1) % 2**24)[:3]
    )
    body = (
        b"WEBPVP8X"
        + struct.pack("<I", 10)
        + bytes(4)
        + canvas
        + b"VP8L"
        + struct.pack("<I", 8)
        + b"\x2f"
        + bytes(7)
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _png(width: int, height: int) -> bytes:
    """One bit a pixel; complete up to 64 MiB of rows, which compress to a thousandth."""
    rows = min(((width + 7) // 8 + 1) * height, 2**26)
    head = struct.pack(">IIBBBBB", width % 2**32, height % 2**32, 1, 0, 0, 0, 0)
    return (
        PNG
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(bytes(rows), 1))
        + chunk(b"IEND", b"")
    )


def _jpeg(good: bytes) -> Callable[[int, int], bytes]:
    def sized(width: int, height: int) -> bytes:
        at = good.index(b"\xff\xc0") + 5
        return good[:at] + struct.pack(">HH", height % 2**16, width % 2**16) + good[at + 4 :]

    return sized


class Pictures:
    """Small files that claim to be huge, or to have no pixel."""

    sizes: Sequence[int] = (
        0,
        1,
        2,
        64,
        1000,
        1001,
        11_585,
        11_586,
        16_384,
        65_535,
        100_000,
        2**24,
        2**31 - 1,
    )

    def prepare(self, folder: Path) -> None:
        self.makers = {
            ".png": _png, ".bmp": _bmp, ".tif": _tiff, ".webp": _webp,
            ".jpg": _jpeg(picture(folder / "a.jpg").read_bytes()),
            ".gif": lambda width, height: gif(width % 2**16, height % 2**16),
        }  # fmt: skip

    def use(self, draw: random.Random, folder: Path) -> None:
        suffix, make = draw.choice(list(self.makers.items()))
        width, height = (draw.choice((*self.sizes, draw.randrange(1, 4096))) for _ in range(2))
        if suffix == ".bmp" and draw.random() < 0.3:
            height = -height
        data = make(width, height)
        path = folder / f"x{suffix}"
        path.write_bytes(damaged_bytes(draw, data) if draw.random() < 0.2 else data)
        path.with_suffix(".txt").write_text("a caption")
        config = DataConfig(folder=str(folder), frames=1, height=16, width=16, on_bad="skip")
        try:
            probe(path)
            scan(config, EVERY_LENGTH)
        finally:
            try:
                size = image_size(path)
            finally:
                pixels = read_image(path)
        assert pixels.shape[:2] == size


MEDIA_KINDS: Mapping[str, Callable[[], Kind]] = {
    "sounds": Sounds,
    "videos": Videos,
    "captions": Captions,
    "pictures": Pictures,
}
