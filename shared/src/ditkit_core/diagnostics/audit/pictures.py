"""Pictures of what precision does: one sample, generated from the same noise with the places of a
step in other dtypes."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.data.media.clip import write_image
from ditkit_core.diagnostics.audit.audit import Subject, backend_of, eval_mode
from ditkit_core.diagnostics.audit.dtype_view import DtypeView, as_stored, by_op_group
from ditkit_core.documents.tables import Table
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.io.files import write_text
from ditkit_core.models.encoders import GenerationRequest, Sampler
from ditkit_core.models.precision import PLACES, Precision, PrecisionConfig, set_precision
from ditkit_core.models.protocol import Stages
from ditkit_core.nn.quantized_linear import products_in_dtype
from ditkit_core.sampling.denoise import generate, single_stage
from ditkit_core.sampling.render import contact_sheet, evenly_spaced, grid

REFERENCE = "fp32"
"""The picture that the others are compared with: all places in fp32 or wider."""
THIS_RUN = "this run"
ALL_LOWERED = "all lowered"
GAIN = 10
"""Differences are shown this many times as large."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One sample in some dtypes."""

    name: str
    frames: Float[Tensor, "3 few height width"]
    """In [0, 1]; of a clip a few frames, evenly spaced."""
    mean: float
    """Mean absolute difference from the reference, in levels of 255."""
    largest: float
    """Largest difference from the reference, in levels of 255."""


def choices_of(subject: Subject) -> Mapping[str, Precision]:
    """The dtypes that are compared, by name; a preset that the run has already is left out."""
    low, reference = subject.lowered, subject.spec.precision.reference
    presets = {
        name: PrecisionConfig(preset=name).precision(low, reference)
        for name in ("default", "fast", "reference")
    }
    named = {
        THIS_RUN: subject.precision,
        **presets,
        ALL_LOWERED: Precision(**dict.fromkeys(PLACES, low)),
    }
    exact = Precision(matmul=torch.float32)
    kept = {f"{REFERENCE}, {THIS_RUN}" if subject.precision == exact else REFERENCE: exact}
    for name, precision in named.items():
        kept |= {} if precision in kept.values() else {name: precision}
    return kept


def pictures(
    subject: Subject,
    sampler: Sampler,
    job: GenerationRequest,
    advance: Callable[[], None] = lambda: None,
) -> Iterator[Picture]:
    """Generate one sample for each choice of dtypes; the reference comes first.

    Weights are cast where they are used, so that a model that is split, streamed or quantized is
    sampled without moving its weights; text encoder and VAE are the same for all.

    Args:
        subject: The model and the run's dtypes; afterwards it is unchanged.
        job: The sample: its seed makes the noise of all.
        advance: Called after each step.
    """
    exact: Tensor | None = None
    for name, precision in choices_of(subject).items():
        is_run = name == THIS_RUN
        dtype_of = (
            as_stored if is_run else by_op_group(precision, subject.spec.precision.op_group_of)
        )
        view = DtypeView(subject.model, dtype_of, lambda name, gradient: None)
        engine = replace(subject.run, policy="none", backend=backend_of(subject, precision))

        def run_view(
            model: Stages, inputs: Any, view: DtypeView = view, engine: BlockEngine = engine
        ) -> Any:
            return engine(view, inputs)  # samplers read what the model is, and run its view

        with (
            eval_mode(subject.model, subject.precision),
            nullcontext() if is_run else products_in_dtype(subject.model),
        ):
            set_precision(subject.model, precision)
            (pixels,) = generate(sampler, [job], single_stage(subject.model, run_view), advance)
        exact = pixels if exact is None else exact
        difference = 255 * (pixels - exact).abs()
        yield Picture(
            name=name,
            frames=evenly_spaced(pixels).float().cpu(),
            mean=float(difference.mean()),
            largest=float(difference.max()),
        )


def picture_table(results: Sequence[Picture]) -> Table:
    """How far each picture is from the first."""
    return Table(
        head=["picture", "mean difference", "largest difference"],
        rows=[[one.name, f"{one.mean:.2f} / 255", f"{one.largest:.0f} / 255"] for one in results],
        num_left=1,
    )


def write_pictures(results: Sequence[Picture], folder: Path) -> list[Path]:
    """Write the pictures as PNGs: a file each, and one with all of them over their differences from
    the first; of a clip, a few frames side by side. pictures.json has the differences in levels.

    Returns:
        The files, the one of all first.
    """
    shown = [contact_sheet([result.frames]) for result in results]
    differences = [(GAIN * (image - shown[0]).abs()).clamp(max=1.0) for image in shown]
    files = [
        folder / "all.png",
        *(folder / f"{re.sub('[^a-z0-9]+', '_', result.name)}.png" for result in results),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [
        {"name": one.name, "mean": one.mean, "largest": one.largest, "file": file.name}
        for one, file in zip(results, files[1:], strict=True)
    ]
    write_text(folder / "pictures.json", json.dumps({"pictures": numbers}, indent=1) + "\n")
    for file, image in zip(
        files, [grid([*shown, *differences], columns=len(shown)), *shown], strict=True
    ):
        write_image(file, image)
    return files
