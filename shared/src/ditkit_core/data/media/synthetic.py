"""Building blocks for the demo inputs of every family: images of simple shapes, random weights
seeded by name, complete folders.

A demo trains on generated files through the same code as real ones, so no other module knows about
demos.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from safetensors.torch import save_file
from torch import Tensor, nn

from ditkit_core.errors import UserError
from ditkit_core.io.console import progress
from ditkit_core.io.files import write_text
from ditkit_core.io.rng import generator

COLOURS = {
    "red": (225, 50, 45),
    "green": (60, 190, 80),
    "blue": (60, 100, 230),
    "yellow": (240, 205, 60),
}
BACKGROUNDS = {"dark": (22, 24, 34), "bright": (214, 216, 206)}
SHAPES = ("circle", "square", "triangle")


def write_frames(
    path: Path, frames: Sequence[UInt8[np.ndarray, "height width 3"]], fps: int
) -> None:
    """Encode frames of one size as H.264 in mp4, the same bytes every time."""
    import av

    # With several threads or macroblock trees, libx264 wrote different ones.
    options = {"crf": "16", "threads": "1", "x264-params": "mbtree=0"}
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=fps, options=options)
        (stream.height, stream.width), stream.pix_fmt = frames[0].shape[:2], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


def write_inputs(folder: Path, parts: Mapping[str, Callable[[Path], None]]) -> None:
    """Write a demo's inputs: each part into the folder of its name.

    A complete folder is left alone, but for parts that it lacks because another version wrote it; a
    partly written one is written again.
    """
    from av import FFmpegError
    from safetensors import SafetensorError

    folder = Path(folder)
    complete = folder / "complete"
    if complete.exists():
        parts = {name: write for name, write in parts.items() if not (folder / name).exists()}
    if not parts:
        return
    try:
        complete.unlink(missing_ok=True)
        for name in parts:
            shutil.rmtree(folder / name, ignore_errors=True)
        with progress("write the demo", len(parts)) as bar:
            for name, write in parts.items():
                (folder / name).mkdir(parents=True)
                write(folder / name)
                bar.advance()
        complete.touch()
    except (OSError, FFmpegError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(
            f"cannot write the demo into {folder}: {reason}; free some space or choose another "
            f"run.folder"
        ) from error


def random_model(name: str, kind: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """A module of a library, in eval mode, with random weights seeded by `name` and their own
    names."""
    # The library's own initialisation also uses the global generator; forking keeps the caller's
    # random state as it was.
    with torch.random.fork_rng(devices=[]):
        model = kind(*arguments, **settings)
    randomise(model, name)
    return model.eval()


def write_text_encoder(folder: Path, model: Any, *, tied: str) -> None:
    """Write the configuration and weights of a text encoder of transformers, without the weight
    `tied` to another one.

    The library's own `save_pretrained` shows a progress bar, so the weights are written here.
    """
    model.config.save_pretrained(folder / "text_encoder")
    state = {name: tensor for name, tensor in model.state_dict().items() if name != tied}
    save_file(state, folder / "text_encoder" / "model.safetensors", metadata={"format": "pt"})


def write_index(folder: Path, pipeline: str, parts: Mapping[str, Any]) -> None:
    """Write the `model_index.json` of a checkpoint in diffusers layout, for a pipeline of
    diffusers."""
    index = {"_class_name": pipeline, "_diffusers_version": version("diffusers"), **parts}
    write_text(folder / "model_index.json", json.dumps(index, indent=2) + "\n")


def randomise(model: nn.Module, name: str) -> None:
    """Sample every weight anew, each from a generator seeded by its name, independent of the
    libraries' initialisation."""
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim < 2 or key.endswith(".gamma"):
                parameter.fill_(0.0 if key.endswith("bias") else 1.0)
                continue
            noise = torch.randn(parameter.shape, generator=generator("demo", name, key))
            parameter.copy_(noise / math.sqrt(parameter[0].numel()))


def isometry(rows: int, columns: int, name: str) -> Float[Tensor, "{rows} {columns}"]:
    """A random matrix with orthonormal columns (an isometry); no more columns than rows."""
    return torch.linalg.qr(torch.randn(rows, columns, generator=generator("demo", name)))[0]


def paint(
    height: int,
    width: int,
    *,
    shape: str,
    colour: str,
    background: str,
    centre: tuple[float, float],
    radius: float,
) -> UInt8[np.ndarray, "{height} {width} 3"]:
    """An image of one shape (of `SHAPES`; a triangle points up) around a centre (row, column), in
    pixels; it may be outside the image."""
    rows, columns = np.mgrid[:height, :width].astype(np.float64)
    distance = _distance(shape, (rows - centre[0]) / radius, (columns - centre[1]) / radius)
    cover = np.clip((1 - distance) * radius + 0.5, 0, 1)[..., None]  # one pixel of soft edge
    colours = cover * np.array(COLOURS[colour]) + (1 - cover) * np.array(BACKGROUNDS[background])
    return np.round(colours).astype(np.uint8)


def _distance(shape: str, down: np.ndarray, right: np.ndarray) -> np.ndarray:
    """1 on the outline of the shape, less inside; coordinates in units of its radius."""
    if shape == "circle":
        return np.hypot(down, right)
    if shape == "square":
        return np.maximum(np.abs(down), np.abs(right))
    assert shape == "triangle", shape
    return np.maximum(down, np.abs(right) * 2 - down - 1)  # point up
