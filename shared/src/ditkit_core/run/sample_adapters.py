"""The adapters that samples are generated with and training is without: `sample.adapter` and `sample.adapter_low`; and the one that
training is with and samples are without, `base.assistant`, which is added to them with the opposite strength."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from ditkit_core.adapters.added import AddedAdapter
from ditkit_core.adapters.files.read import open_adapter, parse_merge
from ditkit_core.errors import UserError
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.run.context import RunContext
from ditkit_core.run.experts import check_named
from ditkit_core.run.prepare import build_on_meta, loaded_dtype

RECORD = "sample_adapters"
"""Name of the files' digests in the model's part of `about.json`."""


def check_sample_adapters(run: RunContext) -> None:
    """Refuse adapters for samples that are missing or do not fit, before any weights are read.

    Their names are compared with the model's once its architecture is known.

    Raises:
        UserError: Naming the key and the file.
    """
    sample = run.config.sample
    if run.arch is not None and sample.adapter_low and not run.experts:
        raise UserError(
            "sample.adapter_low is for the second of two experts, and this model has one transformer; add its files to sample.adapter"
        )
    for key, entries in _keys(run):
        for path, _ in (parse_merge(entry, key) for entry in entries):
            if not path.is_file():
                raise UserError(f"{key}: there is no file {path}; correct the path, or leave it out")
    for expert, (key, entries) in zip(run.experts, _keys(run), strict=False):
        for path, _ in (parse_merge(entry, key) for entry in entries):
            check_named(expert, {key: str(path)})
    _check_assistants(run)
    if run.arch is not None:
        open_sample_adapters(run)


def _check_assistants(run: RunContext) -> None:
    """Refuse `base.assistant` where what is trained or written would contain it.

    Raises:
        UserError: With what to do instead.
    """
    config = run.config
    given = [(key, entry) for key, entry in config.base.assistants if entry]
    if not given:
        return
    if run.arch is not None and config.base.assistant_low and not run.experts:
        raise UserError(
            "base.assistant_low is for the second of two experts, and this model has one transformer; set base.assistant instead"
        )
    for expert, (key, entry) in zip(run.experts, config.base.assistants, strict=False):
        if entry:
            check_named(expert, {key: str(parse_merge(entry, key)[0])})
    refused = {
        "adapter.method = full": config.adapter.method == "full",
        "adapter.use_dora": config.adapter.use_dora,
        "export.merged": config.export.merged,
    }
    if others := [what for what, is_set in refused.items() if is_set]:
        raise UserError(
            f"{given[0][0]} is part of the base in training alone, and with {others[0]} it could not be taken out again; train a LoRA, "
            "LoKr or LoHa, and merge it with the export command's --adapter FILE --merge"
        )


def open_sample_adapters(run: RunContext) -> list[list[AddedAdapter]]:
    """The open adapters of each transformer of the model, the noisiest expert's first.

    Raises:
        UserError: If a file is missing, is damaged, does not fit the model, or is a DoRA.
    """
    assistants = run.config.base.assistants
    if not any(entry for _, entry in assistants) and not any(entries for _, entries in _keys(run)):
        return [[] for _ in range(len(run.experts) or 1)]
    shapes = linear_shapes(run)
    found = [[_open(run, key, entry, shapes) for entry in entries] for key, entries in _keys(run)]
    for added, (key, entry) in zip(found, assistants, strict=False):
        if entry:
            file, strength = _open(run, key, entry, shapes)
            added.append(AddedAdapter(file, -strength))
    return found


def _open(run: RunContext, key: str, entry: str, shapes: Mapping[str, tuple[int, ...]]) -> AddedAdapter:
    path, strength = parse_merge(entry, key)
    try:
        file = open_adapter(path, run.spec.architecture.names, shapes)
    except UserError as error:
        raise UserError(f"{key}: {error}") from error
    if any(module.use_dora for module in file.modules.values()):
        raise UserError(
            f"{key}: {path} is a DoRA, which changes the norms of weights and cannot be added to a layer's output; merge it into the base, and "
            "give the LoRA that the export command's --extract makes of the difference"
        )
    return AddedAdapter(file, strength)


def linear_shapes(run: RunContext) -> dict[str, tuple[int, ...]]:
    """Weight shapes [out, in] of the model's Linear layers, by name."""
    model = build_on_meta(run.spec, run.arch, run.precision)
    return {name: tuple(each.weight.shape) for name, each in model.named_modules() if isinstance(each, nn.Linear)}


def dtype_of_added(run: RunContext) -> Callable[[str], torch.dtype]:
    """The dtype that products are made in, by name of the base parameter."""
    return loaded_dtype(run.spec, run.precision)


def _keys(run: RunContext) -> Sequence[tuple[str, Sequence[str]]]:
    """The settings and their files, one for each transformer of the model."""
    sample = run.config.sample
    keys = [("sample.adapter", sample.adapter), ("sample.adapter_low", sample.adapter_low)]
    return keys if run.experts or run.arch is None else keys[:1]


def describe_sample_adapters(run: RunContext) -> Iterator[str]:
    """A line for each adapter that samples are generated with."""
    for (key, entries), adapters in zip(_keys(run), open_sample_adapters(run), strict=False):
        for file, strength in adapters[: len(entries)]:
            yield (
                f"{key}: samples are generated with {len(file.modules)} modules of {file.source.path} at strength {strength:g}; training is "
                "without them"
            )


def recorded_digests(run: RunContext, folder: RunFolder, warn: Callable[[str], None]) -> dict[str, dict[str, str]]:
    """Digests of the files, for the run's `about.json`; warns of a file that has changed since the record that is there.

    Args:
        run: The run.
        folder: Its folder.
        warn: Called with one line for each such file.
    """
    now: dict[str, str] = {}
    before = _recorded(folder)
    assistants = [key for key, _ in run.config.base.assistants]
    for (setting, entries), adapters, assistant in zip(_keys(run), open_sample_adapters(run), assistants, strict=False):
        for index, (file, _) in enumerate(adapters):
            key = setting if index < len(entries) else assistant
            # With its place: files of one name in several folders are usual, as one for each expert.
            path, name = file.source.path, f"{key}[{index}] {file.source.path.name}"
            now[name] = file.source.fingerprint()
            if before.get(name, now[name]) != now[name]:
                warn(
                    f"{key}: {path} has changed since the last part of this run; its samples cannot be compared with earlier ones"
                )
    return {RECORD: now} if now else {}


def _recorded(folder: RunFolder) -> Mapping[str, object]:
    try:
        found = json.loads(folder.about.read_text(encoding="utf-8"))["model"][RECORD]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}
