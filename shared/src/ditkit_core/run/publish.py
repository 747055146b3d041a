"""Uploads exported files with a model card and samples, or shows the card."""

from collections.abc import Sequence
from pathlib import Path

from ditkit_core.adapters.files.card import Card, CardFile, CardSample, name_of
from ditkit_core.adapters.files.identify import find_adapter
from ditkit_core.errors import UserError
from ditkit_core.io.console import say, warn
from ditkit_core.io.files import json_part, read_json_object, read_text, write_text
from ditkit_core.io.hub import Hub, check_hub, upload
from ditkit_core.io.run_dir import RunFolder, is_changed_list, listed_samples
from ditkit_core.models.spec import ModelSpec
from ditkit_core.run.config import RunConfig
from ditkit_core.weights.fp8_scaled import open_weights
from ditkit_core.weights.metadata import published_header

_MOST_SAMPLES = 6
_README = "README.md"


def publish(spec: ModelSpec, paths: Sequence[Path], hub: Hub, run: RunFolder | None = None) -> None:
    """Make the model card of exported files, adapters or folders of whole transformers, and upload
    both if asked.

    Nothing else is uploaded than these files, the card, and the newest samples of their run;
    without one, the first file may be in the exports of one.
    """
    check_hub(hub)
    around = RunFolder(paths[0].absolute().parent.parent)
    if (
        run is None
        and around.exports == paths[0].absolute().parent
        and around.config_file.is_file()
    ):
        run = around
    files = [_described(spec, path) for path in paths]
    step = max(
        int(text) if (text := file.header.get("ditkit.step", "")).isdecimal() else -1
        for file in files
    )
    samples = {} if run is None else _samples_of(run, step)
    card = Card(
        spec=spec,
        name=name_of(paths, hub.repository),
        repository=hub.repository or "NAME/REPO",
        files=files,
        samples=[CardSample(path=path, prompt=prompt) for path, (_, prompt) in samples.items()],
        num_samples=None if run is None else _num_samples(run),
        license=hub.license,
    )
    card_path = Path(hub.card) if hub.card not in ("", "-") else None
    text = read_text(card_path) if card_path is not None and hub.repository else card.text()
    if hub.card == "-":
        say(text.rstrip("\n"))
    elif card_path is not None and not hub.repository:
        write_text(card_path, text)
        say(f"card:     {card_path}")
    if not hub.repository:
        return
    uploads: dict[str, Path | bytes] = {_README: text.encode()}
    for path, file in zip(paths, files, strict=True):
        if path.is_file():
            uploads[file.path] = path
            continue
        inside = [
            part
            for part in sorted(path.iterdir())
            if part.is_file() and not part.name.startswith(".")
        ]
        uploads |= {f"{path.name}/{part.name}": part for part in inside}
    uploads |= {path: file for path, (file, _) in samples.items()}
    page = upload(hub, uploads, f"Add {card.name}")
    say(f"pushed:   {page} ({', '.join(uploads)})")


def _described(spec: ModelSpec, path: Path) -> CardFile:
    source = open_weights(path)
    header = dict(source.metadata)
    if published_header(RunConfig, header) != header:
        raise UserError(
            f"{path} was written by an earlier version, and its header names folders of this "
            f"machine; write it again with --to FORM"
        )
    if path.is_dir():
        return CardFile(
            path=path.name, header=header, readers=None, transformer_class=_class_of(path)
        )
    adapter = find_adapter(path, spec)
    return CardFile(
        path=path.name,
        header=header,
        readers=spec.adapters.rules.readers(adapter.layout, adapter.modules),
    )


def _class_of(folder: Path) -> str:
    """diffusers' class of a transformer; empty in other forms, which have no config.json."""
    config = folder / "config.json"
    name = read_json_object(config).get("_class_name", "") if config.is_file() else ""
    return name if isinstance(name, str) and name.isidentifier() else ""


def _samples_of(run: RunFolder, step: int) -> dict[str, tuple[Path, str]]:
    """By path in the repository, the samples of a step and their prompts; none where that step has
    none."""
    path = run.samples / f"step-{step:06d}.json"
    if is_changed_list(path):
        warn(
            f"{path} was changed or damaged since it was written: its samples are left out of the "
            f"card"
        )
        return {}
    samples = listed_samples(path)[:_MOST_SAMPLES]
    return {
        f"samples/{sample.file.name}": (sample.file, sample.prompt)
        for sample in samples
        if sample.file.is_file()
    }


def _num_samples(run: RunFolder) -> int | None:
    """Number of samples that the run trained on; None if nothing says so."""
    data = json_part(run.about, "data")
    try:
        return int(data["samples"]) - len(data["held_out"])
    except (ValueError, KeyError, TypeError):
        return None
