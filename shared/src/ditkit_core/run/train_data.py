"""The data that a run trains on: its micro-batches in order, and the record that a resumed run is compared with."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ditkit_core.encoding.encode import text_key
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.loader import BaseSteps, BatchSize, TrainDataLoader
from ditkit_core.encoding.prior_preservation import PriorDataLoader
from ditkit_core.errors import UserError
from ditkit_core.io.console import say
from ditkit_core.io.files import json_hash, read_json_object, write_text
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.run.context import RunContext
from ditkit_core.run.prepare import LoadedModel

EMPTY_CAPTION = "(empty caption)"
"""Key of a run's data file for the empty caption that caption dropout uses."""
_BASE_CAPTION = "(caption of the steps that match the base)"
"""Its key for `prior.prompt` with `prior.match_base`. It is there so that the cache's entry is not pruned; a run may change it."""
_DIGEST = "(digest)"
"""Its key for the digest of the others; files of earlier versions have none."""


def training_data(
    run: RunContext, samples: Sequence[EncodedSample], prior: Sequence[EncodedSample]
) -> TrainDataLoader | PriorDataLoader:
    """The data loader of a run."""
    config = run.config.train
    size = BatchSize(samples=config.batch_size, tokens=config.batch_tokens, num_tokens=run.spec.training.num_tokens)
    dropout = {"caption_dropout": config.caption_dropout, "control_dropout": config.control_dropout}
    data = TrainDataLoader(samples, seed=config.seed, batch_size=size, base_steps=base_steps(run), **dropout)
    if data.num_shapes > 1:
        say(f"{len(samples)} samples have {data.num_shapes} shapes: {data.mean_size:.1f} in a micro-batch on average")
    if not prior:
        return data
    return PriorDataLoader(data, prior, seed=config.seed, batch_size=size, weight=run.config.prior.weight, **dropout)


def base_steps(run: RunContext) -> BaseSteps | None:
    """The steps whose target is the base's own prediction; None for none."""
    prior = run.config.prior
    if not prior.match_base:
        return None
    key = text_key(prior.prompt, run.auxiliary.encoders[1]) if prior.prompt else ""
    return BaseSteps(
        share=prior.match_base, accumulation=run.config.train.accumulation, weight=prior.weight, text_key=key
    )


def check_data(
    folder: RunFolder, encoded: Sequence[EncodedSample], prepared: LoadedModel, steps: BaseSteps | None = None
) -> None:
    """Record the samples that a run trains on, and refuse to resume it with others: data order and held-out clips depend on them.

    Args:
        folder: The run's folder.
        encoded: The samples, class images included.
        prepared: The model.
        steps: `base_steps` of the run.

    Raises:
        UserError: Naming a sample that was added, removed or changed, or the base.
    """
    now = {sample.id: sample.keys for sample in encoded}
    # The base is part of the record: a resumed adapter would otherwise continue on other weights.
    now["(base weights)"] = [prepared.source.fingerprint(), ""]
    now[EMPTY_CAPTION] = sorted({f"text {sample.empty_text_key}" for sample in encoded})
    caption = {_BASE_CAPTION: [f"text {steps.text_key}"]} if steps is not None and steps.text_key else {}
    file, remedy = folder.data_file, "restore it, or remove it to continue on the data as it is now"
    # Until the first save nothing depends on the data, so the record is replaced.
    if not (file.exists() and any(folder.state.glob("step-*"))):
        _write(file, now | caption)
        return
    before = read_json_object(file, remedy)
    # Without the digest, damage would be taken for other data.
    if before.pop(_DIGEST, None) not in (None, json_hash(before)):
        raise UserError(f"{file} is damaged; {remedy}")
    known = {_BASE_CAPTION: before.pop(_BASE_CAPTION)} if _BASE_CAPTION in before else {}
    # Written by a version that did not record it, or with another caption.
    if EMPTY_CAPTION not in before or known != caption:
        before.setdefault(EMPTY_CAPTION, now[EMPTY_CAPTION])
        _write(file, before | caption)
    changed = sorted(id for id in now.keys() | before.keys() if now.get(id) != before.get(id))
    if changed:
        raise UserError(
            f"{folder.path} was trained on something else ({len(changed)} changed, first {changed[0]!r}: clip, mask, caption, "
            f"encoder or weights); put it back, or start a new run from its weights with --run.folder NEW --init-from {folder.path}"
        )


def _write(file: Path, record: Mapping[str, Any]) -> None:
    write_text(file, json.dumps({**record, _DIGEST: json_hash(record)}, indent=0, sort_keys=True))
