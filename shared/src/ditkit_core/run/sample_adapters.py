"""The adapters that samples are generated with and training is without: `sample.adapter` and
`sample.adapter_low`; and the one that training is with and samples are without, `base.assistant`,
which is taken out again."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import Tensor

from ditkit_core.adapters.added_adapter import AddedAdapter
from ditkit_core.adapters.files.entry import is_to_be_fetched, parse_merge
from ditkit_core.adapters.files.identify import Shapes, layers_of, parameters_of
from ditkit_core.adapters.files.merge import merge_into
from ditkit_core.adapters.files.read import open_adapter
from ditkit_core.config.nearest import path_remedy
from ditkit_core.errors import UserError
from ditkit_core.io.files import json_part
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.models.spec import Expert, ModelSpec
from ditkit_core.run.config import RunConfig
from ditkit_core.run.experts import check_named
from ditkit_core.weights.fp8_scaled import open_weights
from ditkit_core.weights.load import StoredParameters

RECORD = "sample_adapters"
"""Name of the files' digests in the model's part of `about.json`."""


@dataclass(frozen=True, kw_only=True)
class SampleAdapters:
    """The adapters of [sample] and [base] that training is without, or samples are."""

    spec: ModelSpec
    arch: Any
    """None while the architecture is unknown."""
    config: RunConfig

    @property
    def _experts(self) -> Sequence[Expert]:
        return () if self.arch is None else self.spec.architecture.experts(self.arch)

    @property
    def _keys(self) -> Sequence[tuple[str, Sequence[str]]]:
        """The settings and their files, one for each transformer of the model."""
        sample = self.config.sample
        keys = [("sample.adapter", sample.adapter), ("sample.adapter_low", sample.adapter_low)]
        return keys if self._experts or self.arch is None else keys[:1]

    def check(self) -> None:
        """Refuse adapters that are missing or do not fit, before any weights are read.

        Their names are compared with the model's once its architecture is known.
        """
        sample = self.config.sample
        if self.arch is not None and sample.adapter_low and not self._experts:
            raise UserError(
                "sample.adapter_low is for the second of two experts, and this model has one "
                "transformer; add its files to sample.adapter"
            )
        for key, entries in self._keys:
            for path, _ in (parse_merge(entry, key) for entry in entries):
                if not path.is_file():
                    raise UserError(f"{key}: there is no file {path}; {path_remedy(path)}")
        for expert, (key, entries) in zip(self._experts, self._keys, strict=False):
            for path, _ in (parse_merge(entry, key) for entry in entries):
                check_named(expert, key, str(path))
        self._check_assistants()
        if self.arch is not None:
            # loading the base fetches assistants, and compares their names
            self.opened(fetch=False)

    def _check_assistants(self) -> None:
        """Refuse `base.assistant` where what is trained or written would contain it."""
        config = self.config
        assistants = [(key, entry) for key, entry in config.base.assistants if entry]
        if not assistants:
            return
        if self.arch is not None and config.base.assistant_low and not self._experts:
            raise UserError(
                "base.assistant_low is for the second of two experts, and this model has one "
                "transformer; set base.assistant instead"
            )
        for expert, (key, entry) in zip(self._experts, config.base.assistants, strict=False):
            if entry:
                check_named(expert, key, entry)  # a plan downloads no file to read its name
        key, entry = assistants[0]
        if config.adapter.method == "full":
            opposite, low = f"{-parse_merge(entry, key)[1]:g}", "_low" * key.endswith("_low")
            raise UserError(
                f"{key} is for adapters, because the weights of a full fine-tune would contain it; "
                f"instead name its file in base.merge{low}, and with "
                f"@{opposite} in sample.adapter{low}; then take it out of the export with "
                f"--adapter FILE --merge --strength {opposite}"
            )
        if config.export.merged:
            raise UserError(
                f"{key} is part of the base in training only, and export.merged could not take it "
                f"out again; leave export.merged out, and merge the "
                "adapter's file with the export command: --adapter FILE --merge"
            )

    def opened(self, *, fetch: bool = True) -> list[list[AddedAdapter]]:
        """The open adapters of each transformer of the model, the noisiest expert's first; without
        `fetch`, without the assistants that would have to be downloaded."""
        assistants = [
            (key, "" if entry and not fetch and is_to_be_fetched(entry) else entry)
            for key, entry in self.config.base.assistants
        ]
        if not any(entry for _, entry in assistants) and not any(
            entries for _, entries in self._keys
        ):
            return [[] for _ in range(len(self._experts) or 1)]
        shapes = layers_of(self.spec.architecture.build, self.arch)
        opened = [
            [self._open(key, entry, shapes) for entry in entries] for key, entries in self._keys
        ]
        for adapters, (key, entry), component in zip(
            opened, assistants, ("transformer", "transformer_2"), strict=False
        ):
            if entry:
                read = self._without_assistant(component, shapes)
                adapters.append(self._open(key, entry, shapes)._replace(base_weight=read))
        return opened

    def _open(self, key: str, entry: str, shapes: Shapes) -> AddedAdapter:
        path, strength = parse_merge(entry, key)
        try:
            file = open_adapter(path, self.spec.architecture.names, shapes)
        except UserError as error:
            raise UserError(f"{key}: {error}") from error
        return AddedAdapter(file, strength)

    def _without_assistant(self, component: str, linears: Shapes) -> Callable[[str], Tensor]:
        """Reads the weight of a module [out, in] in fp32, as a component's files have it with its
        `base.merge` alone; opens them when first called."""
        names, (key, entries) = (
            self.spec.architecture.names,
            self.config.base.merges[component == "transformer_2"],
        )

        @cache
        def opened() -> StoredParameters:
            source = open_weights(self.config.model.locate(component))
            merged = [parse_merge(entry, key) for entry in entries]
            edits = merge_into(
                [(open_adapter(path, names, linears), strength) for path, strength in merged]
            )
            shapes = parameters_of(self.spec.architecture.build, self.arch)
            return replace(StoredParameters.of(source, names, shapes), edits=edits)

        return lambda module: opened().read(f"{module}.weight")

    def described(self) -> Iterator[str]:
        """A line for each adapter that samples are generated with."""
        for (key, entries), adapters in zip(self._keys, self.opened(), strict=False):
            for adapter in adapters[: len(entries)]:
                yield (
                    f"{key}: samples are generated with {len(adapter.file.modules)} modules of "
                    f"{adapter.file.source.path} at strength {adapter.strength:g}; training is "
                    "without them"
                )

    def recorded_digests(
        self, folder: RunFolder, warn: Callable[[str], None]
    ) -> dict[str, dict[str, str]]:
        """Digests of the files, for the run's `about.json`; warns of a file that has changed since
        the record that is there."""
        now: dict[str, str] = {}
        before = json_part(folder.about, "model", RECORD)
        assistants = [key for key, _ in self.config.base.assistants]
        for (setting, entries), adapters, assistant in zip(
            self._keys, self.opened(), assistants, strict=False
        ):
            for index, (file, *_) in enumerate(adapters):
                key = setting if index < len(entries) else assistant
                # With its place: files of one name in several folders are usual, as one for each
                # expert.
                path, name = file.source.path, f"{key}[{index}] {file.source.path.name}"
                now[name] = file.source.fingerprint()
                if before.get(name, now[name]) != now[name]:
                    warn(
                        f"{key}: {path} has changed since the last part of this run; its samples "
                        f"cannot be compared with earlier ones"
                    )
        return {RECORD: now} if now else {}
