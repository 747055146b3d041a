"""The sample command: generate samples with a run's trained weights, or with an adapter file."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ditkit_core.adapters.files.entry import parse_merge
from ditkit_core.commands.options import SampleOptions
from ditkit_core.config.nearest import path_remedy
from ditkit_core.data.media.clip import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from ditkit_core.errors import UserError
from ditkit_core.io.console import say, warn
from ditkit_core.io.files import local_path
from ditkit_core.io.run_dir import reserve_sample_number
from ditkit_core.models.spec import Expert, ModelSpec
from ditkit_core.previews.generate import generate_samples
from ditkit_core.previews.stages import (
    ExpertWeights,
    build_with_adapter,
    denoiser_stages,
    trained_weights_in,
)
from ditkit_core.run.checks import check_prompts, check_run
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.data import RunData
from ditkit_core.run.encoding import encode_prompts, sample_prompts
from ditkit_core.run.experts import check_named
from ditkit_core.run.jobs import Jobs, jobs_of
from ditkit_core.run.model import load_to_sample
from ditkit_core.run.restore import load_trained
from ditkit_core.sampling.denoise import DenoiserStage, single_stage
from ditkit_core.sampling.prompts import SamplePrompt


def sample(spec: ModelSpec, config: RunConfig, options: SampleOptions) -> None:
    """Generate samples with a run's trained weights, or with an adapter file.

    Raises:
        UserError: If there are no trained weights, no prompts, or settings that the model cannot
            sample with.
    """
    config = config_to_sample(config, options)
    run, folder = create_run(spec, config, fetch=True), config.run_folder
    check_adapter_low(options, run.experts)
    files = [file for file in (options.adapter, options.adapter_low) if file]
    for file in files:
        path, _ = parse_merge(file, "--adapter")
        if not path.is_file():
            raise UserError(f"there is no adapter file {path}; {path_remedy(path)}")
    if not files and not run.experts and not folder.has_save:
        raise UserError(
            f"{folder.path} has no save to sample with; name a run that was trained (--run), or "
            f"give --adapter"
        )
    check_run(run)
    prompts = checked_prompts(run.data)
    # Built on `meta` before anything slow, so that an adapter that does not fit the model is
    # reported now.
    sampling, unloaded = (run, None) if run.experts else build_with_adapter(run, options.adapter)
    # before the transformer is loaded: the GPU need not have room for both
    encode_prompts(run.data, prompts)
    if unloaded is None:
        stages, label = _experts(jobs_of(run), options)
    else:
        prepared = load_to_sample(sampling, unloaded)
        stages = single_stage(prepared.module, prepared.engine)
        label = (
            _label(options.adapter)
            if options.adapter
            else f"step-{load_trained(prepared, folder):06d}"
        )
    out = local_path(options.out) if options.out else folder.samples
    # Numbers are reserved: two commands in one folder never overwrite each other.
    with reserve_sample_number(out) as number:
        files_written = generate_samples(run, stages, prompts, out, f"{number}-{label}")
    say("\n".join(str(file) for file in files_written))


def config_to_sample(config: RunConfig, options: SampleOptions) -> RunConfig:
    """The configuration with the options that stand for settings of [sample]."""
    out = local_path(options.out)
    if out.suffix.lower() in (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES) or out.is_file():
        raise UserError(
            f"--out {options.out} is the name of a file, and several are written; name a folder"
        )
    inputs = {
        "prompts": options.prompt,
        "references": options.reference,
        "controls": options.control,
    }
    changed: dict[str, Any] = {name: value for name, value in inputs.items() if value}
    changed |= {
        name: value for name in ("images", "seed") if (value := getattr(options, name)) is not None
    }
    return replace(config, sample=replace(config.sample, **changed))


def check_adapter_low(options: SampleOptions, experts: Sequence[Expert]) -> None:
    """Refuse the file of a second expert for a model without experts."""
    if options.adapter_low and not experts:
        raise UserError(
            "--adapter-low is for the second of two experts, and this model has one transformer; "
            "give --adapter"
        )


def checked_prompts(data: RunData) -> list[SamplePrompt]:
    """What to sample; refuses prompts that the model cannot sample."""
    # With prompts the dataset is not opened at all: sampling works on a machine that does not have
    # it.
    samples = [] if data.config.sample.prompts else data.dataset.samples
    prompts = sample_prompts(data, samples, warn)
    if not prompts:
        raise UserError(
            "there is nothing to sample: give a --prompt, or set sample.prompts or sample.captions"
        )
    check_prompts(data, prompts)
    return prompts


def _label(entry: str) -> str:
    """What samples with `FILE@strength` are called."""
    path, strength = parse_merge(entry, "--adapter")
    return path.stem if strength == 1 else f"{path.stem}@{strength:g}"


def _experts(jobs: Jobs, options: SampleOptions) -> tuple[Sequence[DenoiserStage], str]:
    """The experts as stages, with the adapter files if any is given, else with the run's saves; and
    a label for the samples' names."""
    run = jobs.run
    paths = dict(
        zip(
            (expert.name for expert in run.experts),
            (options.adapter, options.adapter_low),
            strict=True,
        )
    )
    files = {name: ExpertWeights(file=file) for name, file in paths.items() if file}
    for expert, option in zip(run.experts, ("--adapter", "--adapter-low"), strict=True):
        check_named(expert, option, paths[expert.name])
    if files:
        return denoiser_stages(run, files), "-".join(
            _label(weights.file) for weights in files.values()
        )
    trained, step = trained_weights_in(jobs)
    if not trained:
        raise UserError(
            f"{run.config.run.folder} has no save of an expert; name a run that was trained, or "
            f"give --adapter"
        )
    return denoiser_stages(run, trained), f"step-{step:06d}"
