"""The data that a run trains on: its micro-batches in order, the record that a resumed run is compared with, and whether the model takes it."""

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ditkit_core.encoding.encode import text_key
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.loader import BaseSteps, TrainDataLoader, shapes_of
from ditkit_core.encoding.prior_preservation import PRIOR_MARK, PriorDataLoader
from ditkit_core.errors import UserError
from ditkit_core.io.console import say
from ditkit_core.io.files import json_hash, read_json_object, write_text
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.models.protocol import StagedModel
from ditkit_core.models.spec import ModelSpec
from ditkit_core.run.data import RunData
from ditkit_core.training.train_model import batch_size_of, data_loader

EMPTY_CAPTION = "(empty caption)"
"""Key of a run's data file for the empty caption that caption dropout uses."""
_BASE_WEIGHTS = "(base weights)"
"""Its key for the fingerprint of the base."""
_BASE_CAPTION = "(caption of the steps that match the base)"
"""Its key for `prior.prompt` with `prior.match_base`. It is there so that the cache's entry is not pruned; a run may change it."""
_DIGEST = "(digest)"
"""Its key for the digest of the others; files of earlier versions have none."""
_NO_SAMPLES = {EMPTY_CAPTION, _BASE_WEIGHTS, _BASE_CAPTION}
_REMEDY = "restore it, or remove it to continue on the data as it is now"


def training_data(
    data: RunData, samples: Sequence[EncodedSample], prior: Sequence[EncodedSample]
) -> TrainDataLoader | PriorDataLoader:
    """The data loader of a run."""
    config = data.config.train
    loader = data_loader(data.spec, config, samples, base_steps(data))
    if loader.num_shapes > 1:
        say(
            f"{len(samples)} samples have {loader.num_shapes} shapes: {loader.mean_size:.1f} in a micro-batch on average"
        )
    if not prior:
        return loader
    return PriorDataLoader(
        loader,
        prior,
        seed=config.seed,
        batch_size=batch_size_of(data.spec, config),
        weight=data.config.prior.weight,
        caption_dropout=config.caption_dropout,
        control_dropout=config.control_dropout,
    )


def base_steps(data: RunData) -> BaseSteps | None:
    """The steps whose target is the base's own prediction; None for none."""
    prior = data.config.prior
    if not prior.match_base:
        return None
    key = text_key(prior.prompt, data.auxiliary.encoders[1]) if prior.prompt else ""
    return BaseSteps(
        share=prior.match_base, accumulation=data.config.train.accumulation, weight=prior.weight, text_key=key
    )


def check_listed(folder: RunFolder, ids: Collection[str]) -> None:
    """Refuse a dataset that lacks a sample of the run. `check_samples` would, too, but only after everything is encoded.

    Args:
        folder: The run's folder.
        ids: The ids of all samples of the dataset.

    Raises:
        UserError: Naming the first sample that is missing.
    """
    recorded = (_record(folder) or {}).keys() - _NO_SAMPLES - set(ids)
    _refuse(folder, {id for id in recorded if not id.startswith(PRIOR_MARK)})


def check_samples(folder: RunFolder, encoded: Sequence[EncodedSample]) -> None:
    """Refuse samples other than those that a run was trained on. For an expert that is complete, which `check_data` does not see again.

    Raises:
        UserError: Naming a sample that was added, removed or changed.
    """
    if before := _record(folder):
        _refuse(folder, _differing(_keys(encoded), before) - _NO_SAMPLES)


def check_data(folder: RunFolder, encoded: Sequence[EncodedSample], base: str, steps: BaseSteps | None = None) -> None:
    """Record the samples that a run trains on, and refuse to resume it with others: data order and held-out clips depend on them.

    The record has no folder in it: data that was moved is the same data.

    Args:
        encoded: The samples, class images included.
        base: Fingerprint of the base's weights.
        steps: `base_steps` of the run.

    Raises:
        UserError: Naming a sample that was added, removed or changed, or the base.
    """
    now = _keys(encoded)
    # The base is part of the record: a resumed adapter would otherwise continue on other weights.
    now[_BASE_WEIGHTS] = [base, ""]
    now[EMPTY_CAPTION] = sorted({f"text {sample.empty_text_key}" for sample in encoded})
    caption = {_BASE_CAPTION: [f"text {steps.text_key}"]} if steps is not None and steps.text_key else {}
    before = _record(folder)
    if before is None:
        _write(folder.data_file, now | caption)
        return
    recorded = {_BASE_CAPTION: before.pop(_BASE_CAPTION)} if _BASE_CAPTION in before else {}
    # Written by a version that did not record it, or with another caption.
    if EMPTY_CAPTION not in before or recorded != caption:
        before.setdefault(EMPTY_CAPTION, now[EMPTY_CAPTION])
        _write(folder.data_file, before | caption)
    _refuse(folder, _differing(now, before))


def _keys(encoded: Sequence[EncodedSample]) -> dict[str, list[str]]:
    return {sample.id: sample.keys for sample in encoded}


def _differing(now: Mapping[str, Any], before: Mapping[str, Any]) -> set[str]:
    return {id for id in now.keys() | before.keys() if now.get(id) != before.get(id)}


def _record(folder: RunFolder) -> dict[str, Any] | None:
    """The record of the samples that a run was trained on; None before its first save, because until then nothing depends on them."""
    if not (folder.data_file.exists() and folder.has_save):
        return None
    record = read_json_object(folder.data_file, _REMEDY)
    # Without the digest, damage would be taken for other data.
    if record.pop(_DIGEST, None) not in (None, json_hash(record)):
        raise UserError(f"{folder.data_file} is damaged; {_REMEDY}")
    return record


def _refuse(folder: RunFolder, changed: Collection[str]) -> None:
    if changed:
        raise UserError(
            f"{folder.path} was trained on something else ({len(changed)} changed, first {min(changed)!r}: clip, mask, caption, encoder "
            f"or weights); put it back, set data.folder to where its data is now, or start a new run from its weights with "
            f"--run.folder NEW --init-from {shlex.quote(str(folder.path))}"
        )


def _write(file: Path, record: Mapping[str, Any]) -> None:
    write_text(file, json.dumps({**record, _DIGEST: json_hash(record)}, indent=0, sort_keys=True))


def check_item(spec: ModelSpec, model: StagedModel, item: Mapping[str, Tensor]) -> None:
    """Run the embedding on the shapes of a sample, on `meta`: the shapes of another model fail here, before weights are read.

    Raises:
        UserError: If the model cannot take it.
    """
    try:
        with torch.no_grad():
            # Only shapes matter here, so any noise level works.
            sigma = torch.zeros(1, device="meta")
            model.embed(spec.training.make_inputs([item["latents"]], sigma, [item], 1.0))
    except RuntimeError as error:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in item.items())
        raise UserError(
            f"the encoded samples do not fit the transformer ({shapes}: {str(error).splitlines()[0]}); "
            "set model.vae and model.text_encoder to those that belong to it"
        ) from error


def check_items(spec: ModelSpec, model: StagedModel, samples: Sequence[EncodedSample]) -> None:
    """Check one sample of each shape; otherwise one that the model cannot take would fail in the middle of an epoch.

    Raises:
        UserError: Naming the sample that the model cannot take.
    """
    # Reversed, so that the error names the first sample of a shape.
    for sample in {shapes_of(sample): sample for sample in reversed(samples)}.values():
        try:
            check_item(spec, model, sample.outline())
        except UserError as error:
            raise UserError(f"{sample.id}: {error}") from error
