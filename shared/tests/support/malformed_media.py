"""Media files that are damaged, hostile or unusual; each function writes one and returns what it is
called."""

import os
import struct
import zlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from media_files import noisy_video, numbered_video, picture, sound_only, truncated
from PIL import Image, PngImagePlugin

PNG = b"\x89PNG\r\n\x1a\n"


def of_bytes(suffix: str, data: bytes) -> Callable[[Path, str], str]:
    """What writes a file of given contents."""

    def write(folder: Path, name: str) -> str:
        (folder / f"{name}{suffix}").write_bytes(data)
        return f"{name}{suffix}"

    return write


def chunk(kind: bytes, data: bytes) -> bytes:
    """A piece of a png."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int) -> bytes:
    """A png of one bit a pixel whose header says a size, and whose data end early."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return PNG + header + chunk(b"IDAT", zlib.compress(bytes(4096))) + chunk(b"IEND", b"")


def gif(width: int, height: int) -> bytes:
    """A gif of one pixel on a canvas of a size."""
    head = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    return head + b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00;"


def video(folder: Path, name: str, suffix: str = ".mp4", **given: object) -> Path:
    return numbered_video(folder / f"{name}{suffix}", **given)  # type: ignore[arg-type]


def header_only(folder: Path, name: str) -> str:
    path = video(folder, name)
    path.write_bytes(path.read_bytes()[:40])
    return path.name


def without_index(folder: Path, name: str) -> str:
    path = video(folder, name)
    return truncated(path, path).name


def cut_in_the_middle(folder: Path, name: str) -> str:
    path = noisy_video(folder / f"{name}.mp4")
    return truncated(path, path, 0.2).name


def matroska_cut(folder: Path, name: str) -> str:
    path = noisy_video(folder / f"{name}.mkv")
    return truncated(path, path, 0.1).name


def png_called_mp4(folder: Path, name: str) -> str:
    picture(folder / f"{name}.png").rename(folder / f"{name}.mp4")
    return f"{name}.mp4"


def mp4_called_png(folder: Path, name: str) -> str:
    video(folder, name).rename(folder / f"{name}.png")
    return f"{name}.png"


def script_called_mp4(folder: Path, name: str) -> str:
    video(folder / ".hidden", name, ".mkv")
    (folder / f"{name}.mp4").write_text(f"ffconcat version 1.0\nfile .hidden/{name}.mkv\n")
    return f"{name}.mp4"


def patched(folder: Path, name: str, box: bytes, at: int, data: bytes) -> str:
    """A video with bytes of one of its boxes replaced."""
    path = video(folder, name)
    old = bytearray(path.read_bytes())
    place = old.index(box) + 4 + at
    old[place : place + len(data)] = data
    path.write_bytes(old)
    return path.name


def endless_frames(folder: Path, name: str) -> str:
    return patched(folder, name, b"stts", 12, struct.pack(">I", 0x7FFFFFFF))


def frames_of_no_duration(folder: Path, name: str) -> str:
    return patched(folder, name, b"stts", 12, bytes(4))


def timescale(value: int) -> Callable[[Path, str], str]:
    """What writes a video whose clock has so many ticks a second."""
    return lambda folder, name: patched(folder, name, b"mdhd", 12, struct.pack(">I", value))


def huge_video(folder: Path, name: str) -> str:
    """A video of 24 frames of 16384 x 16384 pixels in a few kilobytes."""
    path = folder / f"{name}.mov"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("png", rate=24)
        stream.height, stream.width, stream.pix_fmt = 32, 32, "monob"
        for i in range(24):
            packet = av.Packet(png(16384, 16384))
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, i, i, Fraction(1, 24)
            packet.is_keyframe = True
            container.mux(packet)
    return path.name


def remuxed(source: Path, path: Path, keep: Callable[[int], bool], shift: int = 0) -> Path:
    """Copy the packets of a video that are to be kept, their times moved by milliseconds."""
    with (
        av.open(str(source)) as given,
        av.open(str(path), "w", options={"avoid_negative_ts": "disabled"}) as container,
    ):
        stream = container.add_stream_from_template(given.streams.video[0])
        for i, packet in enumerate(packet for packet in given.demux(video=0) if packet.size):
            if keep(i):
                packet.stream = stream
                if shift:
                    ticks = round(shift / 1000 / packet.time_base)
                    packet.pts, packet.dts = packet.pts + ticks, packet.dts + ticks
                container.mux(packet)
    return path


def without_first_keyframe(folder: Path, name: str) -> str:
    source = noisy_video(folder / f".{name}.mp4")
    return remuxed(source, folder / f"{name}.mkv", lambda i: i > 0).name


def negative_times(folder: Path, name: str) -> str:
    source = numbered_video(folder / f".{name}.mp4")
    return remuxed(source, folder / f"{name}.mp4", lambda i: True, -100).name


def backwards(folder: Path, name: str) -> str:
    return video(folder, name, ".avi").name  # avi cannot say when reordered frames are shown


def without_first_packet_data(folder: Path, name: str) -> str:
    path = noisy_video(folder / f"{name}.mp4")
    return clear_packet(path, 0, keep=8).name


def damaged_inside(folder: Path, name: str) -> str:
    path = noisy_video(folder / f"{name}.mp4")
    return clear_packet(path, 9, keep=8).name


def clear_packet(path: Path, index: int, *, keep: int) -> Path:
    """Put zeros in place of what one packet holds after its first bytes."""
    with av.open(str(path)) as container:
        packet = [packet for packet in container.demux(video=0) if packet.size][index]
        assert packet.pos is not None and packet.size > 2 * keep
        start, stop = packet.pos + keep, packet.pos + packet.size
    data = path.read_bytes()
    path.write_bytes(data[:start] + bytes(stop - start) + data[stop:])
    return path


def unknown_codec(folder: Path, name: str) -> str:
    path = video(folder, name)
    path.write_bytes(path.read_bytes().replace(b"avc1", b"zzzz").replace(b"avcC", b"zzzC"))
    return path.name


def sound(suffix: str) -> Callable[[Path, str], str]:
    return lambda folder, name: sound_only(folder / f"{name}{suffix}").name


def one_frame(folder: Path, name: str) -> str:
    return video(folder, name, frames=1).name


def tagged_transparent(folder: Path, name: str) -> str:
    path = folder / f"{name}.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=24)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        stream.metadata["alpha_mode"] = "1"
        for _ in range(8):
            container.mux(
                stream.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), "rgb24"))
            )
        container.mux(stream.encode(None))
    return path.name


def animated_png(folder: Path, name: str) -> str:
    frames = [Image.new("RGB", (16, 16), (0, 0, 60 * i)) for i in range(3)]
    frames[0].save(folder / f"{name}.png", save_all=True, append_images=frames[1:])
    return f"{name}.png"


def still(suffix: str, share: float = 1.0, **given: object) -> Callable[[Path, str], str]:
    """What writes an image of noise, or the first share of one."""

    def write(folder: Path, name: str) -> str:
        path = folder / f"{name}{suffix}"
        noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
        Image.fromarray(noise).save(path, **given)  # type: ignore[arg-type]
        return truncated(path, path, share).name

    return write


def deep_tif(folder: Path, name: str) -> str:
    Image.fromarray(np.zeros((16, 16), np.float32)).save(folder / f"{name}.tif")
    return f"{name}.tif"


def text_bomb(folder: Path, name: str) -> str:
    """A png whose compressed text is of 64 MiB."""
    info = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(1 << 26), 9))
    data = picture(folder / f"{name}.png").read_bytes()
    (folder / f"{name}.png").write_bytes(data[:33] + info + data[33:])
    return f"{name}.png"


def wrong_checksum(folder: Path, name: str) -> str:
    path = folder / still(".png")(folder, name)
    data = bytearray(path.read_bytes())
    data[29] ^= 255  # of the header
    path.write_bytes(data)
    return path.name


def folder_called_mp4(folder: Path, name: str) -> str:
    picture(folder / f"{name}.mp4" / "0001.png")
    return f"{name}.mp4"


def link(target: Callable[[Path], Path]) -> Callable[[Path, str], str]:
    """What writes a link called like a video."""

    def write(folder: Path, name: str) -> str:
        (folder / f"{name}.mp4").symlink_to(target(folder / f"{name}.mp4"))
        return f"{name}.mp4"

    return write


def outside(path: Path) -> Path:
    return video(path.parent.parent, f"outside-{path.stem}")


def pipe(folder: Path, name: str) -> str:
    os.mkfifo(folder / f"{name}.mp4")
    return f"{name}.mp4"


def named(spoilt: str) -> Callable[[Path, str], str]:
    """What writes a sound image whose name has something in it."""
    return lambda folder, name: picture(folder / f"{name}{spoilt}.png").name


def clip(
    suffix: str, size: tuple[int, int], codec: str, pixels: str, **options: str
) -> Callable[[Path, str], str]:
    """What writes a video of noise without loss."""

    def write(folder: Path, name: str) -> str:
        path = folder / f"{name}{suffix}"
        random = np.random.default_rng(1)
        with av.open(str(path), "w") as container:
            stream = container.add_stream(codec, rate=24, options=options)
            stream.height, stream.width, stream.pix_fmt = *size, pixels
            for _ in range(18):
                frame = av.VideoFrame.from_ndarray(
                    random.integers(0, 255, (*size, 3), np.uint8), format="rgb24"
                )
                container.mux(stream.encode(frame.reformat(format=pixels)))
            container.mux(stream.encode(None))
        return path.name

    return write


def transparent_mov(folder: Path, name: str) -> str:
    """White, fully transparent, over whatever colour is below: read as white."""
    path = folder / f"{name}.mov"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("qtrle", rate=24)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "argb"
        for i in range(18):
            pixels = np.full((48, 64, 4), 10 * i, np.uint8)
            pixels[..., 3] = 0
            frame = av.VideoFrame.from_ndarray(pixels, format="rgba")
            container.mux(stream.encode(frame.reformat(format="argb")))
        container.mux(stream.encode(None))
    return path.name


def transparent_png(folder: Path, name: str) -> str:
    Image.new("RGBA", (64, 48), (9, 9, 9, 0)).save(folder / f"{name}.png")
    return f"{name}.png"


def palette_png(folder: Path, name: str) -> str:
    image = Image.new("P", (64, 48), 1)
    image.putpalette([0, 0, 0, 255, 255, 255])
    image.save(folder / f"{name}.png", transparency=0)
    return f"{name}.png"


def sized(height: int, width: int) -> Callable[[Path, str], str]:
    return lambda folder, name: picture(folder / f"{name}.png", (height, width), "white").name


def tagged(tag: str, count: int) -> Callable[[Path, str], str]:
    """What writes a white video with a long tag."""

    def write(folder: Path, name: str) -> str:
        path = folder / f"{name}.mp4"
        with av.open(str(path), "w") as container:
            container.metadata["comment"] = tag * count
            stream = container.add_stream("libx264", rate=24)
            stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
            for _ in range(24):
                white = av.VideoFrame.from_ndarray(
                    np.full((48, 64, 3), 255, np.uint8), format="rgb24"
                )
                container.mux(stream.encode(white))
            container.mux(stream.encode(None))
        return path.name

    return write


def tagged_in_latin_1(folder: Path, name: str) -> str:
    path = folder / tagged("QQQQ", 9)(folder, name)
    path.write_bytes(path.read_bytes().replace(b"QQQQ", b"\xe9\xff\xfe\x80"))
    return path.name


def commented_png(folder: Path, name: str) -> str:
    info = PngImagePlugin.PngInfo()
    info.add_text("parameters", "x" * 900_000)
    Image.new("RGB", (64, 48), "white").save(folder / f"{name}.png", pnginfo=info)
    return f"{name}.png"


def hdr_video(folder: Path, name: str) -> str:
    path = folder / f"{name}.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=24)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        stream.codec_context.color_trc = 16
        for _ in range(24):
            grey = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 255, np.uint8), format="rgb24")
            container.mux(stream.encode(grey))
        container.mux(stream.encode(None))
    return path.name


def phone_picture(folder: Path, name: str) -> str:
    white, gains = Image.new("RGB", (64, 48), "white"), Image.new("RGB", (8, 8))
    white.save(folder / f"{name}.jpg", format="MPO", save_all=True, append_images=[gains])
    return f"{name}.jpg"


def turned_picture(folder: Path, name: str) -> str:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (64, 48), "white").save(folder / f"{name}.jpg", exif=exif)
    return f"{name}.jpg"


def moving_gif(folder: Path, name: str) -> str:
    frames: Sequence[Image.Image] = [
        Image.new("RGB", (64, 48), (255, 255, 255 - i)) for i in range(18)
    ]
    frames[0].save(
        folder / f"{name}.gif", save_all=True, append_images=list(frames[1:]), duration=40
    )
    return f"{name}.gif"
