"""Facts that are only known while a run is running, stored for its report: the machine, and
summaries of model and data."""

import json
import os
import platform
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import torch

import ditkit_core
from ditkit_core.data.dataset import Dataset
from ditkit_core.diagnostics.report.data import RANDOM_BASE
from ditkit_core.io.files import dicts_of, json_part, write_text
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.loading.model import Model

_MOST_EXCLUDED = 1000  # bounds the file, and the report that shows the list


def describe_environment(devices: Sequence[torch.device], precision: str) -> dict[str, str]:
    """Versions, devices and the dtype of each place, without names of machines or users: reports
    are shared."""
    return {
        "devices": ", ".join(map(_device, devices)),
        "ditkit": ditkit_core.__version__,
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "precision": precision,
        "CPU threads": f"{torch.get_num_threads()} of {os.cpu_count()}",
    }


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    properties = torch.cuda.get_device_properties(device)
    return f"{device} {properties.name} {properties.total_memory / 2**30:.1f} GiB"


def model_summary(family: str, prepared: Model, *, random_base: bool) -> dict[str, Any]:
    """Summarize what is trained.

    Args:
        family: Name of the model's family.
        random_base: Whether the base is a demo's that was never trained, so that samples show
            nothing.
    """
    trained = sum(
        parameter.numel() for parameter in prepared.module.parameters() if parameter.requires_grad
    )
    summary = {"family": family, "preset": prepared.origin.preset, "trained_parameters": trained}
    return summary | {RANDOM_BASE: True} if random_base else summary


def data_summary(
    dataset: Dataset, encoded: Collection[str], held_out: Sequence[str]
) -> dict[str, Any]:
    """Summarize the samples that are trained on, and those that were left out.

    Args:
        encoded: Ids of the samples that were encoded.
        held_out: Ids of those that are held out for validation.
    """
    encoded_samples = [sample for sample in dataset.samples if sample.id in encoded]
    shapes = Counter((sample.frames, sample.height, sample.width) for sample in encoded_samples)
    excluded = [*dataset.excluded]
    excluded += [
        (sample.id, "could not be encoded")
        for sample in dataset.samples
        if sample.id not in encoded
    ]
    return {
        "samples": len(encoded_samples),
        "captions": sum(len(sample.captions) for sample in encoded_samples),
        "masks": sum(sample.mask is not None for sample in encoded_samples),
        "fps": dataset.fps,
        "held_out": list(held_out),
        "shapes": [
            {"frames": frames, "height": height, "width": width, "samples": count}
            for (frames, height, width), count in sorted(shapes.items())
        ],
        "num_excluded": len(excluded),
        "excluded": [
            {"file": name, "reason": reason} for name, reason in excluded[:_MOST_EXCLUDED]
        ],
    }


def write_about(
    folder: RunFolder,
    *,
    environment: Mapping[str, str],
    data: Mapping[str, Any],
    model: Mapping[str, Any],
) -> None:
    """Store environment, data and model in the run's folder. An environment that differs from the
    last one is appended: a run may move."""
    parts = dicts_of(json_part(folder.about).get("environments"))
    # Compared without its time: a run that continues on the same machine adds nothing.
    before = {name: value for name, value in parts[-1].items() if name != "since"} if parts else {}
    if before != dict(environment):
        since = datetime.now(UTC).isoformat(" ", "seconds")
        parts.append({"since": since, **environment})
    write_text(
        folder.about,
        json.dumps({"environments": parts, "model": dict(model), "data": dict(data)}, indent=1)
        + "\n",
    )
