"""The sample command with `--steps`, `--strengths` or several runs: one sheet of all prompts with
all checkpoints at all strengths, next to the base."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

import ditkit_core
from ditkit_core.adapters.files.entry import parse_merge
from ditkit_core.adapters.files.start import MixedAdapter
from ditkit_core.commands.options import SampleOptions
from ditkit_core.commands.preflight import check_family
from ditkit_core.commands.sample import check_adapter_low, checked_prompts, config_to_sample
from ditkit_core.config.resolve import resolve
from ditkit_core.config.schema import config_values
from ditkit_core.diagnostics.sheet import Sheet
from ditkit_core.errors import UserError
from ditkit_core.execution import StepExecution
from ditkit_core.io.console import progress, say
from ditkit_core.io.files import file_hash, json_hash, local_path
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.models.spec import ModelSpec
from ditkit_core.previews.generate import fitting_sampler, requests_for
from ditkit_core.previews.sheet import SheetColumn, file_columns, sheet_columns, sheet_stages
from ditkit_core.run.checks import check_run
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.encoding import encode_prompts
from ditkit_core.run.jobs import Jobs, jobs_of
from ditkit_core.run.model import fingerprints_of
from ditkit_core.sampling.denoise import generate
from ditkit_core.sampling.prompts import SamplePrompt
from ditkit_core.sampling.render import prompt_slug, write_sample
from ditkit_core.weights.fp8_scaled import open_weights

_CHANGES_NO_SAMPLE = (
    *("prompts", "num_control_prompts", "captions", "references", "controls", "images"),
    *("seed", "every_steps", "device"),
)
"""Keys of [sample] that a sample does not depend on, or that it has a value of its own for."""


def sample_sheet(spec: ModelSpec, config: RunConfig, options: SampleOptions) -> None:
    """Generate what a sheet lacks, and write it as a page and as an image.

    Raises:
        UserError: If a run has no such save, the runs have different bases, or there are no
            prompts.
    """
    config = config_to_sample(config, options)
    runs = [jobs_of(create_run(spec, config, fetch=True))]
    for path in options.run[1:]:
        runs.append(jobs_of(create_run(spec, _other_run(spec, config, local_path(path)))))
    if options.adapter or options.adapter_low:
        columns = file_columns(runs[0], _adapter_files(runs, options), options.strength_values)
    else:
        columns = sheet_columns(runs, options.save_words, options.strength_values)
    saves = [save for column in columns for save in column.saves.values()]
    _check_methods([save.job.run.config for save in saves], options)
    run = runs[0].run
    check_run(run)
    prompts = checked_prompts(run.data)
    folder = local_path(options.out) if options.out else config.run_folder.sheet_page.parent
    seeds = range(config.sample.seed, config.sample.seed + config.sample.images)
    rows = [(prompt, seed) for prompt in prompts for seed in seeds]
    names = ", ".join(jobs.run.config.run_folder.name for jobs in runs)
    sheet = Sheet(
        folder,
        f"{names}: sheet",
        [(prompt.prompt, seed) for prompt, seed in rows],
        [column.label for column in columns],
    )
    missing, shared = dict[tuple[int, int], str](), _shared_identity(runs[0])
    for column_index, column in enumerate(columns):
        for row_index, (prompt, seed) in enumerate(rows):
            stem = _cell_stem(shared, column, prompt, seed)
            files = (folder / f"{stem}{suffix}" for suffix in (".png", ".mp4"))
            if (file := next(filter(Path.is_file, files), None)) is not None:
                sheet.put(row_index, column_index, file)
            else:
                missing[row_index, column_index] = stem
    if missing:
        column_of: dict[int, SheetColumn] = {}
        try:
            stages = sheet_stages(runs[0], columns, lambda job: column_of[id(job)])
        except MixedAdapter as error:
            raise UserError(
                f"{error}; or sample at one strength after the other, with --adapter FILE@strength"
            ) from error
        encode_prompts(run.data, prompts)
        section, requests = requests_for(run.data, stages, prompts)
        # A request of its own for each sample, by which it is recognised; they share tensors.
        jobs = {cell: replace(requests[cell[0]].job) for cell in missing}
        column_of |= {id(job): columns[column] for (_, column), job in jobs.items()}
        sampler = fitting_sampler(run.auxiliary, prompts)
        sheet.write_page()
        with (
            progress("denoise", len(missing) * section.steps) as bar,
            closing(generate(sampler, jobs.values(), stages, bar.advance)) as samples,
        ):
            for (cell, stem), pixels in zip(missing.items(), samples, strict=True):
                path_with = {suffix: folder / f"{stem}{suffix}" for suffix in (".png", ".mp4")}
                file = write_sample(pixels, requests[cell[0]], path_with.__getitem__, run.data.fps)
                sheet.put(*cell, file)
                sheet.write_page()
    paths = sheet.write_page(), sheet.write_image()
    num_kept = len(rows) * len(columns) - len(missing)
    say(f"sheet:    {len(missing)} samples generated, {num_kept} kept, in {folder}")
    say("\n".join(map(str, paths)))


def _other_run(spec: ModelSpec, config: RunConfig, path: Path) -> RunConfig:
    """The configuration that samples with another run's adapter as with the first run's."""
    check_family("sample", RunFolder(path), spec.name)
    first = resolve(RunConfig, stored=config.run_folder.path)
    other = resolve(RunConfig, stored=path)
    values = config_values(first), config_values(other)
    for key in values[0]:
        if key.startswith(("model.", "base.")) and values[0][key] != values[1][key]:
            raise UserError(
                f"{path} has another base than {config.run_folder.path}: {key} = "
                f"{values[1][key]!r}, there {values[0][key]!r}; a sheet has one base, so make one "
                f"for each"
            )
    return replace(
        config, run=other.run, adapter=other.adapter, experts=other.experts, ema=other.ema
    )


def _adapter_files(runs: Sequence[Jobs], options: SampleOptions) -> dict[str, Path]:
    """The adapter files by the component that they are for."""
    if len(runs) > 1:
        raise UserError(
            "--adapter and several runs: a sheet is of one file or of saves; leave one of them out"
        )
    experts = runs[0].run.experts
    check_adapter_low(options, experts)
    parts = [expert.part for expert in experts] or ["transformer"]
    files = {}
    for part, flag, entry in zip(
        parts, ("--adapter", "--adapter-low"), (options.adapter, options.adapter_low), strict=False
    ):
        path, strength = parse_merge(entry, flag)
        if strength != 1:
            raise UserError(
                f"{flag} {entry} and --strengths: both say a strength; leave out @{strength:g}"
            )
        if entry:
            files[part] = path
    return files


def _check_methods(configs: Sequence[RunConfig], options: SampleOptions) -> None:
    """Refuse what no loaded model can be exchanged for, before it is loaded."""
    methods = {config.adapter.method for config in configs}
    if "full" in methods and len(methods) > 1:
        raise UserError(
            "a full fine-tune changes the base of the other runs' adapters; make a sheet of it alone"
        )
    if "full" in methods and set(options.strength_values) != {1.0}:
        raise UserError(
            "--strengths is for adapters, and this run trained all weights; leave it out, or "
            "extract an adapter from its export (--extract of the export command)"
        )
    assisted = any(entry for _, entry in configs[0].base.assistants)
    if assisted and len(options.run) > 1 and any(config.adapter.use_dora for config in configs):
        raise UserError(
            "base.assistant is next to the DoRA of one of these runs, and cannot be exchanged with "
            "it; make a sheet of each run"
        )


def _cell_stem(shared: object, column: SheetColumn, prompt: SamplePrompt, seed: int) -> str:
    """The name of a sample without its suffix: for readers, and with a digest of all that it
    depends on, so that one that is there need not be generated again."""
    content = {
        "shared": shared,
        "saves": {part: save.identity for part, save in column.saves.items()},
        "strength": column.strength,
        "prompt": prompt.prompt,
        "references": list(map(file_hash, prompt.references)),
        "files": {name: _identity(value) for name, value in prompt.files.items()},
        "clip": prompt.clip and _identity(str(prompt.clip)),
        "sizes": [prompt.start_seconds, prompt.frames, prompt.height, prompt.width],
        "seed": seed,
    }
    slug = prompt_slug(prompt.prompt)
    return f"{column.stem}-{slug}-seed-{seed}-{json_hash(content)[:12]}"


def _shared_identity(jobs: Jobs) -> Mapping[str, Any]:
    """What all samples of a sheet depend on, as JSON."""
    run = jobs.run
    config = run.config
    step = {f"train.{field.name}" for field in fields(StepExecution)}
    ignored = {f"sample.{name}" for name in _CHANGES_NO_SAMPLE}
    sections = ("model.", "base.", "precision.", "sample.")
    values = {
        key: str(value)
        for key, value in config_values(config).items()
        if key in step or (key.startswith(sections) and key not in ignored)
    }
    base = replace(config, adapter=replace(config.adapter, init=""))
    parts = [expert.part for expert in run.experts] or ["transformer"]
    conditioning = run.auxiliary.conditioning
    conditioners = conditioning.conditioners if conditioning is not None else ()
    return values | {
        "versions": [ditkit_core.__version__, torch.__version__],
        "fps": run.data.fps,
        "encoders": [encoder.identity for encoder in (*run.auxiliary.encoders, *conditioners)],
        "weights": [
            fingerprints_of(base, part, open_weights(config.model.locate(part))) for part in parts
        ],
        "adapters": [
            [adapter.file.source.fingerprint() for adapter in adapters]
            for adapters in run.sample_adapters.opened()
        ],
    }


def _identity(value: str) -> str:
    """The content of a file, or a text."""
    path = Path(value)
    return file_hash(path) if path.is_file() else value
