"""Exports of a run: next to each save, at the end of training, and by the export command."""

import filecmp
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

from ditkit_core.adapters.config import ExportConfig
from ditkit_core.adapters.files.export import (
    VERIFIED_LATER,
    check_export,
    export_adapter,
    export_merged,
    loaded_by,
    read_by,
    whole_forms,
    why_unverified,
    with_forms_of,
)
from ditkit_core.adapters.files.export_names import (
    ExportName,
    adapter_file,
    copies_of_expert,
    exports_without_save,
    finished_adapters,
    remove_earlier,
    rename_adapters,
)
from ditkit_core.commands.comfyui import models_of
from ditkit_core.commands.options import ExportOptions
from ditkit_core.config.toml import read_stored_file
from ditkit_core.diagnostics.report.page import write_report
from ditkit_core.diagnostics.verification.verifier import Verifier
from ditkit_core.encoding.cache import key
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.errors import UserError
from ditkit_core.io.console import say, warn
from ditkit_core.io.files import atomic_folder, atomic_write, local_path, temporary_path
from ditkit_core.io.hub import check_hub
from ditkit_core.io.memory import release_memory
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.loading.model import Model
from ditkit_core.models.adapter_formats import VERIFIED
from ditkit_core.models.adapter_programs import NOT_TRIED
from ditkit_core.models.spec import Expert, ModelSpec
from ditkit_core.run.checks import check_run
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run, with_config
from ditkit_core.run.jobs import Jobs, TrainingJob, jobs_of
from ditkit_core.run.model import build_model, export_metadata, load_model
from ditkit_core.run.plans.planned_step import place_run
from ditkit_core.run.publish import publish
from ditkit_core.run.restore import load_trained
from ditkit_core.training.trainer import Callback


def export(spec: ModelSpec, config: RunConfig, options: ExportOptions) -> None:
    """Write a run's trained weights for other programs."""
    if options.comfyui:
        if config.adapter.method == "full":
            raise UserError(
                "--comfyui is for adapters, and this run trains every weight; its exports are "
                "folders: name one by --out"
            )
        name = f"{config.run_folder.name}.safetensors"
        options = replace(
            options,
            out=str(models_of(local_path(options.comfyui)) / "loras" / name),
            to=options.to or with_forms_of(ExportConfig(), config.adapter, spec).forms[0],
        )
    # A flag replaces the run's list of forms: somebody who names one wants that file alone.
    wanted = replace(
        config.export,
        forms=(options.to,)
        if options.to
        else with_forms_of(config.export, config.adapter, spec).forms,
        dtype=options.dtype or config.export.dtype,
        merged=options.merge,
    )
    check_export(spec, wanted, config.adapter)
    check_hub(options.hub)  # before an export, which may take long
    if options.out:
        check_kind(
            local_path(options.out), is_transformer=wanted.merged or config.adapter.method == "full"
        )
    run = create_run(spec, config, fetch=True)
    check_run(with_config(run, replace(run.request.config, export=wanted)))
    folder, jobs = config.run_folder, jobs_of(run)
    files = _finished(jobs, folder, options) if options.publishes else []
    for job in jobs if not files else ():
        files += _export(job, wanted, options, folder, job.name if run.trains_several else "")
        release_memory()  # before the next expert: both need not fit at once
    if options.publishes:
        publish(spec, files, options.hub, folder)


def _finished(jobs: Jobs, folder: RunFolder, options: ExportOptions) -> list[Path]:
    """The finished adapters of a run, unless something else is asked for; they were verified when
    it ended."""
    is_other = (
        options.to or options.dtype or options.merge or options.out or options.step is not None
    )
    run = jobs.run
    if (
        is_other
        or folder.completed_step() is None
        or run.config.adapter.method == "full"
        or run.config.export.merged
    ):
        return []
    if jobs.in_folders:
        return [copy for job in jobs for _, copy in expert_adapters(job, folder) if copy.is_file()]
    return [name.at(folder) for name in finished_adapters(folder)]


def _export(
    job: TrainingJob, wanted: ExportConfig, options: ExportOptions, folder: RunFolder, expert: str
) -> list[Path]:
    """Export one transformer as the `[export]` section with the command's flags applied says, into
    a run's folder unless `--out` is given, with the expert's name where the run has several.
    Returns the files, or the folders of a whole transformer."""
    run = job.run
    spec, config = run.spec, run.config
    is_transformer = wanted.merged or config.adapter.method == "full"
    out_path = local_path(options.out)
    chosen_path = (
        out_path.with_name(f"{out_path.stem}{expert and '_'}{expert}{out_path.suffix}")
        if options.out
        else None
    )
    if chosen_path is not None:
        check_free(_written(chosen_path, spec, wanted, is_transformer=is_transformer))
    unloaded = build_model(run)
    prepared = load_model(unloaded, place_run(run, unloaded), config.train.seed)
    step = load_trained(prepared, job.folder, options.step)
    out = chosen_path or ExportName(run=folder.name, expert=expert, by_command=True, step=step).at(
        folder
    )
    metadata = export_metadata(job, prepared, step, data="")
    with nullcontext(out.parent) if chosen_path is not None else put_into(out.parent) as target:
        if is_transformer:
            name = out.name if chosen_path is not None else out.stem
            written = _export_transformer(prepared, spec, target / name, wanted, metadata)
        else:
            exact = bool(options.out) and len(wanted.forms) == 1
            with prepared.readable():
                written = export_adapter(
                    prepared.module, spec, target, out.stem, wanted, metadata=metadata, exact=exact
                )
    files = [out.parent / path.relative_to(target) for path in written]
    for form, file in zip(
        whole_forms(spec, wanted) if is_transformer else wanted.forms, files, strict=True
    ):
        if not is_transformer and (read := read_by(spec, form, prepared.module)):
            say(f"{file}: {loaded_by(read)}")
            if options.comfyui and (doubt := read.get("ComfyUI", NOT_TRIED)):
                warn(f"{file}: ComfyUI {doubt}")
        if is_transformer and (
            limit := why_unverified(spec, wanted, form, prepared.module, complete=True)
        ):
            say(f"{file}: diffusers {limit}")
    say("\n".join(str(file) for file in files))
    return files


def _export_transformer(
    prepared: Model,
    spec: ModelSpec,
    folder: Path,
    config: ExportConfig,
    metadata: Mapping[str, str],
) -> list[Path]:
    with prepared.readable_one_by_one() as original:
        return export_merged(
            prepared.module,
            spec,
            folder,
            config,
            metadata=metadata,
            original=original,
            config_json=prepared.config_json,
        )


def _written(
    out: Path, spec: ModelSpec, wanted: ExportConfig, *, is_transformer: bool
) -> list[Path]:
    """The folders of a whole transformer, or the files of an adapter, that `--out` names."""
    if is_transformer:
        return [out / f"transformer_{form}" for form in whole_forms(spec, wanted)]
    # a single file has the name as it is given
    forms = wanted.forms if len(wanted.forms) > 1 else ("official",)
    return [adapter_file(out.parent, out.stem, form) for form in forms]


class Exporter(Callback):
    """Writes the trained weights next to each save, and the final exports of a finished run."""

    def __init__(
        self,
        job: TrainingJob,
        prepared: Model,
        encoded: Sequence[EncodedSample],
        verifier: Verifier,
    ):
        self._job, self._prepared, self._verifier = job, prepared, verifier
        self._run, self._folder = job.run, job.folder
        self._data = key(*(part for sample in encoded for part in (sample.id, *sample.keys)))
        self._is_adapter = self._run.config.adapter.method != "full"
        self._writes_transformer = self._run.config.export.merged or not self._is_adapter

    def resumed(self, step: int) -> None:
        """Write what is missing after the save that the run continues from; a kill came between the
        two."""
        if not all(
            self._folder.follows_save(path, step) for path in chain(*self._exports_of_save(step))
        ):
            self._export_save(step)
        self._remove_stale()
        self._verifier.start()
        write_report(self._folder.path)

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print what the verification has found meanwhile."""
        if self._verifier.is_busy:
            self._verifier.look()

    def on_save(self, step: int) -> None:
        """Export the weights of a save, begin to verify them, remove the exports of removed saves,
        and rewrite the report."""
        self._export_save(step)
        files, folders = self._exports_of_save(step)
        self._remove_stale(kept={*files, *folders})  # the save may still be being written
        self._verifier.start()
        write_report(self._folder.path)

    def finished(self, step: int) -> None:
        """Export under the final names, and wait until every export is verified with the program
        that will use it."""
        self._remove_stale()
        if self._is_adapter and self._export_adapter(ExportName(run=self._folder.name), step):
            remove_earlier(self._folder)
        if self._writes_transformer:
            self._export_transformer(self._folder.exports, step)
        self._prepared.module.eval()  # the last samples are generated without dropout
        # Nothing verifies these finished exports, as their headers say.
        spec, config, exports = self._run.spec, self._run.config.export, self._folder.exports
        names = {
            form: ExportName(run=self._folder.name, form=form)
            for form in config.forms
            if self._is_adapter
        }
        files = [(form, name.at(self._folder), False) for form, name in names.items()]
        forms = whole_forms(spec, config) if self._writes_transformer else ()
        for form, path, complete in [
            *files,
            *((form, exports / f"transformer_{form}", True) for form in forms),
        ]:
            if limit := why_unverified(
                spec, config, form, self._prepared.module, complete=complete
            ):
                say(f"{path} was read back, and is not verified with diffusers, which {limit}")
        self._verifier.wait()

    def _exports_of_save(self, step: int) -> tuple[list[Path], list[Path]]:
        """What is written next to a save: the adapter's files, and the folder of the transformer,
        if there is any."""
        forms = self._run.config.export.forms if self._is_adapter else ()
        files = [
            ExportName(run=self._folder.name, step=step, form=form).at(self._folder)
            for form in forms
        ]
        # The transformer of the last step is written by `finished`.
        has_folder = self._writes_transformer and step < self._run.config.train.steps
        return files, [self._folder.exports / self._folder.save(step).name] * has_folder

    def _export_save(self, step: int) -> None:
        files, folders = self._exports_of_save(step)
        if files:
            self._export_adapter(ExportName(run=self._folder.name, step=step), step)
        for folder in folders:
            # a folder with this name is complete, however large the model is
            with atomic_folder(folder) as unfinished:
                self._export_transformer(unfinished, step)

    def _remove_stale(self, kept: Collection[Path] = ()) -> None:
        """Remove exports whose saves are gone, but those to be kept: with full fine-tuning each one
        is as large as the model."""
        for old in set(exports_without_save(self._folder)).difference(kept):
            # Windows keeps a file that is open, as one that is verified is; the next save removes
            # it.
            with suppress(OSError):
                shutil.rmtree(old) if old.is_dir() else old.unlink()

    # The parameters at this point are those to be used: the trainer has put the average in place,
    # if there is one.
    def _export_adapter(self, name: ExportName, step: int) -> list[Path]:
        run, prepared, folder = self._run, self._prepared, self._folder.exports
        config, metadata = run.config.export, self._metadata(step)
        with prepared.readable():
            return export_adapter(
                prepared.module,
                run.spec,
                folder,
                name.stem,
                config,
                metadata=metadata,
                whole_in=prepared.whole_in,
            )

    def _export_transformer(self, folder: Path, step: int) -> None:
        run = self._run
        _export_transformer(
            self._prepared, run.spec, folder, run.config.export, self._metadata(step)
        )

    def _metadata(self, step: int) -> dict[str, str]:
        return export_metadata(self._job, self._prepared, step, data=self._data) | {
            VERIFIED: VERIFIED_LATER
        }


def rename_exports(folder: RunFolder, experts: Sequence[Expert]) -> None:
    """Give the adapters of a run the name of its folder, if that was renamed or copied since they
    were written."""
    if folder.config_file.exists():
        stored = read_stored_file(RunConfig, folder.config_file).get("run.folder")
        former = RunFolder(Path(stored)).name if isinstance(stored, str) else folder.name
        rename_adapters(folder, former, [expert.name for expert in experts])


def expert_adapters(job: TrainingJob, folder: RunFolder) -> list[tuple[Path, Path]]:
    """The finished adapters of an expert, each with its path in the exports of the run of all
    experts."""
    return copies_of_expert(job.folder, folder, job.name)


def copy_expert_adapters(job: TrainingJob, folder: RunFolder) -> None:
    """Copy an expert's adapter into the exports of the run of all experts, with the expert in its
    name."""
    pairs = expert_adapters(job, folder)
    for file, copy in pairs:
        with atomic_write(copy) as temporary:
            shutil.copyfile(file, temporary)
    if any(ExportName.parse(copy.name, (folder.name,), (job.name,)) for _, copy in pairs):
        remove_earlier(folder, job.name)


def has_expert_adapters(job: TrainingJob, folder: RunFolder) -> bool:
    """Whether the exports of the run of all experts have the expert's current adapter.

    The copy is outdated if the expert was trained further by itself since.
    """
    return all(
        copy.is_file() and filecmp.cmp(file, copy, shallow=False)
        for file, copy in expert_adapters(job, folder)
    )


def check_kind(out: Path, *, is_transformer: bool) -> None:
    """Refuse a path of the wrong kind: a whole transformer is written into a folder, an adapter
    into a file."""
    if is_transformer and (out.is_file() or out.suffix == ".safetensors"):
        raise UserError(
            f"--out {out} names a file, and a whole transformer is written into a folder; name a "
            f"folder"
        )
    if not is_transformer and (out.is_dir() or out.suffix != ".safetensors"):
        raise UserError(f"--out {out} is not a file name; give one that ends with .safetensors")


def check_free(paths: Iterable[Path]) -> None:
    """Refuse to replace a file, or a folder that is not empty: it may be somebody's only copy."""
    for path in paths:
        if path.is_file() or any(path.glob("*")):
            raise UserError(f"{path} exists; name another one with --out, or remove it")


@contextmanager
def put_into(folder: Path) -> Iterator[Path]:
    """A new folder next to the files of another, into which they are moved when the block ends; the
    same command may run again."""
    unfinished = temporary_path(folder / "export")
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        written = [
            path.relative_to(unfinished) for path in sorted(unfinished.rglob("*")) if path.is_file()
        ]
        for path in written:
            if (folder / path).exists() and not filecmp.cmp(
                folder / path, unfinished / path, shallow=False
            ):
                raise UserError(
                    f"{folder / path} exists with another content, such as of another dtype; name "
                    f"another one with --out, or remove it"
                )
        for path in written:
            if not (folder / path).exists():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                os.replace(unfinished / path, folder / path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
