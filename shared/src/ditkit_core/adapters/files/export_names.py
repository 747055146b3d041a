"""The names of what is in a run's folder of exports: one table for whoever writes, finds, renames
or removes them.

| name | content |
|---|---|
| `RUN.safetensors`, `RUN_FORM.safetensors` | the finished adapter, in the official form and in another |
| `RUN_EXPERT.safetensors`, `RUN_EXPERT_FORM.safetensors` | the adapter of one expert, in the folder of the run of all experts |
| `RUN-step-000250.safetensors`, … | the adapter of a save |
| `RUN-export-step-000250.safetensors`, … | what the export command wrote; no other command changes it |
| `transformer_FORM`, `step-000250/transformer_FORM` | a whole transformer, of the finished run and of a save |

RUN is the name of the run's folder. It was `adapter` in earlier versions, and the former name in a
folder that was renamed since.
"""

import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from ditkit_core.io.run_dir import RunFolder
from ditkit_core.models.adapter_formats import ADAPTER_FORMS

_EARLIER = "adapter"
_STEP_FOLDER = re.compile(r"step-\d+")


def adapter_file(folder: Path, stem: str, form: str) -> Path:
    """Where an adapter is written in a form: the official form has `stem` as its name, other forms
    append theirs."""
    return folder / (f"{stem}.safetensors" if form == "official" else f"{stem}_{form}.safetensors")


@dataclass(frozen=True, kw_only=True)
class ExportName:
    """The name of an adapter file."""

    run: str
    expert: str = ""
    by_command: bool = False
    step: int | None = None
    """The save that it is of; None for the finished adapter."""
    form: str = "official"

    @property
    def stem(self) -> str:
        """The name without form and suffix."""
        expert, mark = f"_{self.expert}" if self.expert else "", "-export" * self.by_command
        return self.run + expert + mark + ("" if self.step is None else f"-step-{self.step:06d}")

    def at(self, folder: RunFolder) -> Path:
        """The file in a run's exports."""
        return adapter_file(folder.exports, self.stem, self.form)

    @classmethod
    def parse(cls, name: str, runs: Collection[str], experts: Collection[str] = ()) -> Self | None:
        """The name of a file, if it is of a run with one of these names."""
        run, expert, form = (
            "|".join(map(re.escape, names)) for names in (runs, experts, ADAPTER_FORMS)
        )
        expert = f"(?:_({expert}))?" if experts else "()"
        match = re.fullmatch(
            rf"({run}){expert}(-export)?(?:-step-(\d+))?(?:_({form}))?\.safetensors", name
        )
        if match is None:
            return None
        return cls(
            run=match[1],
            expert=match[2] or "",
            by_command=bool(match[3]),
            step=None if match[4] is None else int(match[4]),
            form=match[5] or "official",
        )


def finished_adapters(folder: RunFolder) -> Iterator[ExportName]:
    """The adapters of a finished run, in every form that it has."""
    for form in ADAPTER_FORMS:
        names = (ExportName(run=run, form=form) for run in (folder.name, _EARLIER))
        yield from [name for name in names if name.at(folder).is_file()][:1]


def copies_of_expert(
    expert_folder: RunFolder, run_folder: RunFolder, expert: str
) -> list[tuple[Path, Path]]:
    """The finished adapters of an expert, each with its path in the exports of the run of all
    experts."""
    return [
        (
            name.at(expert_folder),
            replace(
                name, run=_EARLIER if name.run == _EARLIER else run_folder.name, expert=expert
            ).at(run_folder),
        )
        for name in finished_adapters(expert_folder)
    ]


def remove_earlier(folder: RunFolder, expert: str = "") -> None:
    """Remove the finished adapters that have the name of earlier versions, now that they are there
    under the run's name."""
    for form in ADAPTER_FORMS if folder.name != _EARLIER else ():
        ExportName(run=_EARLIER, expert=expert, form=form).at(folder).unlink(missing_ok=True)


def exports_without_save(folder: RunFolder) -> Iterator[Path]:
    """Files and folders that were exported with a save that is gone."""
    for path in folder.exports.glob("*step-*"):
        name = None if path.is_dir() else ExportName.parse(path.name, (folder.name, _EARLIER))
        save = path.name if path.is_dir() else ""
        if name and name.step is not None and not name.by_command:
            save = folder.save(name.step).name
        if _STEP_FOLDER.fullmatch(save) and not (folder.state / save).exists():
            yield path


def rename_adapters(folder: RunFolder, former: str, experts: Collection[str]) -> None:
    """Give the adapters of a run the name of its folder, if that was renamed or copied since they
    were written."""
    for old in list(folder.exports.glob("*.safetensors")) if former != folder.name else ():
        name = ExportName.parse(old.name, (former,), experts)
        if (
            name
            and not name.by_command
            and not (new := replace(name, run=folder.name).at(folder)).exists()
        ):
            with suppress(OSError):  # on Windows a file that is open keeps its name
                old.rename(new)
