"""What training hands over: exports beside saves and at the end, and the export command."""

import filecmp
import shutil
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from ditkit_core.adapters.export import ExportConfig, check_export, export_adapter, export_merged, loaded_by, read_by
from ditkit_core.commands.options import ExportOptions
from ditkit_core.diagnostics.report.page import write_report
from ditkit_core.encoding.cache import key
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.errors import UserError
from ditkit_core.io.console import say
from ditkit_core.io.files import atomic_write
from ditkit_core.io.memory import release_memory
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.partition import place
from ditkit_core.run.checks import check_run
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, create_run
from ditkit_core.run.expert_runs import is_joint, resolve_arch, runs_of
from ditkit_core.run.model import build_model, engine_of, export_metadata, load_model
from ditkit_core.run.prepare import LoadedModel
from ditkit_core.run.restore import load_trained
from ditkit_core.training.callbacks import Callback


def export(spec: ModelSpec, config: RunConfig, options: ExportOptions) -> None:
    """Write a run's trained weights for other programs."""
    wanted = replace(
        config.export,
        forms=(options.to,) if options.to else config.export.forms,
        dtype=options.dtype or config.export.dtype,
        merged=options.merge,
    )
    check_export(spec, wanted, config.adapter)
    _check_out(options.out, whole=wanted.merged or config.adapter.method == "full")
    run = resolve_arch(create_run(spec, config))
    check_run(run)
    for each in runs_of(run):
        name = f"_{each.expert.name}" if each.expert is not None and is_joint(run) else ""
        _export(each, wanted, options, RunFolder(Path(config.run.folder)), name)
        release_memory()


def _export(run: RunContext, wanted: ExportConfig, options: ExportOptions, folder: RunFolder, name: str) -> None:
    """Export one transformer.

    Args:
        run: Its run.
        wanted: The `[export]` section with what the command was told.
        options: The command's.
        folder: Where the file goes, unless it was told.
        name: What files get in their names to tell them from those of another expert.
    """
    spec, config = run.spec, run.config
    unloaded = build_model(run)
    prepared = load_model(run, unloaded, place(run, unloaded))
    step = load_trained(prepared, RunFolder(Path(config.run.folder)), options.step)
    given = Path(options.out)
    out = folder.exports / f"adapter{name}-export-step-{step:06d}.safetensors"
    if options.out:
        out = given.with_name(f"{given.stem}{name}{given.suffix}")
    metadata = export_metadata(run, prepared, step, data="")
    if wanted.merged or config.adapter.method == "full":
        target = out.with_suffix("") if out.suffix == ".safetensors" else out
        with prepared.readable():
            files = export_merged(
                prepared.model,
                spec,
                target,
                wanted,
                metadata=metadata,
                original=prepared.original,
                config_json=prepared.config_json,
            )
    else:
        stem, exact = out.stem, bool(options.out) and len(wanted.forms) == 1
        files = export_adapter(prepared.model, spec, out.parent, stem, wanted, metadata=metadata, exact=exact)
        for form, file in zip(wanted.forms, files, strict=True):
            if read := read_by(spec, form, prepared.model):
                say(f"{file}: {loaded_by(read)}")
    say("\n".join(str(file) for file in files))


def _check_out(out: str, *, whole: bool) -> None:
    """Refuse an --out that is not what will be written: a folder for a whole transformer, a file for an adapter."""
    if whole and Path(out).is_file():
        raise UserError(f"--out {out} is a file, and a whole transformer is written into a folder; name one")
    if out and not whole and (Path(out).is_dir() or Path(out).suffix != ".safetensors"):
        raise UserError(f"--out {out} is no name of a file; give one that ends with .safetensors")


class Exporter(Callback):
    """Writes the trained weights next to each save, and everything that a finished run hands over."""

    def __init__(self, run: RunContext, folder: RunFolder, prepared: LoadedModel, encoded: Sequence[EncodedSample]):
        self._run, self._folder, self._prepared = run, folder, prepared
        self._data = key(*(part for sample in encoded for part in (sample.id, *sample.keys)))

    def on_save(self, step: int) -> None:
        """Export the weights of a save, remove the exports of saves that are gone, and write the report anew."""
        name = f"step-{step:06d}"
        if self._run.config.adapter.method == "lora":
            self._export_adapter(f"adapter-{name}", step)
        if self._writes_transformer and step < self._run.config.train.steps:  # the last one is written by `finished`
            self._export_transformer(self._folder.exports / name, step)
        # Exports go with their saves: of a full fine-tune each is as large as the model.
        saved = {path.name for path in self._folder.state.glob("step-*")}
        for old in self._folder.exports.glob("*step-*"):
            if old.name.startswith("adapter-step-") and not any(old.stem.startswith(f"adapter-{n}") for n in saved):
                old.unlink()
            elif old.name.startswith("step-") and old.name not in saved:
                shutil.rmtree(old)
        write_report(self._folder.path)

    def finished(self, step: int) -> None:
        """Export under the final names, and verify the adapter where it will be used."""
        files = self._export_adapter("adapter", step) if self._run.config.adapter.method == "lora" else []
        self._prepared.model.eval()  # dropout is no part of what was exported
        self._verify(files)
        if self._writes_transformer:
            self._export_transformer(self._folder.exports, step)

    def _verify(self, files: Sequence[Path]) -> None:
        """Have another program load the adapters, and compare what it predicts."""
        run, config = self._run, self._run.config
        model, verify, streamer = self._prepared.model, run.spec.adapters.verify, self._prepared.streamer
        files_of = replace(config.model, transformer=str(self._prepared.source.path))  # which may be a second expert
        if verify is None:
            return
        if len(run.devices) > 1:
            say("not verified: diffusers runs a model on one device, and this one is divided over several")
            return
        if streamer is not None and run.devices[0].type != "cpu":
            say(
                "not verified: diffusers runs a whole model on its device, and weights of this one are streamed through it"
            )
            return
        with nullcontext() if streamer is None else streamer.whole():
            for form, file in zip(config.export.forms, files, strict=False):
                if said := read_by(run.spec, form, model).get("diffusers"):
                    say(f"{file} was read again, and is not verified with diffusers: it {said}")
                else:
                    say(f"verified: {verify(file, files_of, model, engine_of(run, self._prepared))}")

    @property
    def _writes_transformer(self) -> bool:
        return self._run.config.export.merged or self._run.config.adapter.method == "full"

    def _export_adapter(self, stem: str, step: int) -> list[Path]:
        run, metadata = self._run, export_metadata(self._run, self._prepared, step, data=self._data)
        model, folder = self._prepared.model, self._folder.exports
        return export_adapter(model, run.spec, folder, stem, run.config.export, metadata=metadata)

    def _export_transformer(self, folder: Path, step: int) -> None:
        run, metadata = self._run, export_metadata(self._run, self._prepared, step, data=self._data)
        prepared = self._prepared
        with prepared.readable():
            export_merged(
                prepared.model,
                run.spec,
                folder,
                run.config.export,
                metadata=metadata,
                original=prepared.original,
                config_json=prepared.config_json,
            )


def hand_over(run: RunContext, folder: RunFolder) -> None:
    """Put an expert's adapter among the exports of the run of all experts, under a name that tells which it is."""
    for file, copy in _to_hand_over(run, folder):
        with atomic_write(copy) as temporary:
            shutil.copyfile(file, temporary)


def is_handed_over(run: RunContext, folder: RunFolder) -> bool:
    """Whether its adapter is there as it is now.

    An expert that was trained on alone since has another adapter than was sampled with and stands among the exports.
    """
    found = _to_hand_over(run, folder)
    return all(copy.is_file() and filecmp.cmp(file, copy, shallow=False) for file, copy in found)


def _to_hand_over(run: RunContext, folder: RunFolder) -> Iterator[tuple[Path, Path]]:
    """An expert's finished adapters, and where each belongs among the exports of the whole run."""
    assert run.expert is not None
    for file in sorted(RunFolder(Path(run.config.run.folder)).exports.glob("adapter*.safetensors")):
        if not file.name.startswith("adapter-"):  # of a save
            yield file, folder.exports / f"adapter_{run.expert.name}{file.name.removeprefix('adapter')}"
