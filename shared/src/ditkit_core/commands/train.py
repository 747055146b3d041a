"""The train command: encode → train → export → verify → sample.

A run is a list of component runs that train one transformer each. An ordinary run is a list of one, in the run's own folder. A model with
several experts has one component per expert. They are trained one after the other: they share no trained weight, so the result is bitwise
identical to training each alone. Each component then has a folder for its saves, metrics and exports inside the run's folder, which
contains what belongs to all of them: the configuration, the adapters, the samples.

Each step only does what is missing, so the same command starts a run, continues it, and reports that it is complete.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

from ditkit_core.commands.export import Exporter, copy_expert_adapters, has_expert_adapters, rename_exports
from ditkit_core.commands.options import TrainOptions
from ditkit_core.commands.report import describe_precision, held_out_lines, say_beginning, say_results
from ditkit_core.config.resume import ConfigChange
from ditkit_core.diagnostics.doctor.dataset import summarize_data
from ditkit_core.diagnostics.report.environment import data_summary, describe_environment, model_summary, write_about
from ditkit_core.diagnostics.report.live_page import LivePage
from ditkit_core.diagnostics.report.page import write_report
from ditkit_core.diagnostics.step_trace import StepTrace
from ditkit_core.diagnostics.verification.verifier import Verifier
from ditkit_core.distributed.shared_folders import check_shared, open_run
from ditkit_core.distributed.torchrun import current_ranks
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.loader import Batch, files_of, split_held_out
from ditkit_core.engine.placement import Placement
from ditkit_core.errors import Interrupted, UserError
from ditkit_core.io.console import keep_log, progress, say, warn
from ditkit_core.io.files import json_hash, local_path
from ditkit_core.io.memory import release_memory
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.loading.meta_model import MetaModel
from ditkit_core.loading.model import Model
from ditkit_core.models.spec import ModelSpec
from ditkit_core.previews.callbacks import QueuedPreviews
from ditkit_core.previews.class_images import (
    check_class_prompt,
    class_conditions,
    encoded_class_images,
    num_missing_class_images,
    of_base,
)
from ditkit_core.previews.exchange import samples_in_place
from ditkit_core.previews.manager import Previews, generate_left, previews_of
from ditkit_core.previews.queue import queued
from ditkit_core.previews.stages import denoiser_stages, generate_trained
from ditkit_core.run.checks import check_components, check_preview_device, check_ranks, check_run, check_training
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, create_run, with_arch
from ditkit_core.run.encoding import Encoded, encode_all
from ditkit_core.run.expert_runs import Component, ComponentRuns, components_of, is_joint, resolve_arch, runs_of
from ditkit_core.run.init_from import check_start, start_from
from ditkit_core.run.model import build_model, engine_of, fingerprints_of, load_run, tracked_run
from ditkit_core.run.plans.planned_step import place_run, utilisation_of_run
from ditkit_core.run.restore import check_same_adapter
from ditkit_core.run.sample_adapters import describe_sample_adapters, recorded_digests
from ditkit_core.run.train_data import (
    base_steps,
    check_data,
    check_items,
    check_listed,
    check_samples,
    store_moved_data,
    training_data,
)
from ditkit_core.sampling.denoise import single_stage
from ditkit_core.training.metrics import log_left_samples
from ditkit_core.training.trainer import Callback, ProgressBar, Trainer, TrainerConfig, TrainResult
from ditkit_core.training.validation import Validator

_NUM_STAGES = 5


def train(spec: ModelSpec, config: RunConfig, options: TrainOptions) -> None:
    """Do everything that is missing between clips and verified exports.

    Raises:
        UserError: For mistakes that the user can fix, before anything slow where possible.
        Interrupted: If a signal ended it early.
    """
    run, ranks = create_run(spec, config), current_ranks()
    # Only families with experts need the architecture this early; a demo's checkpoint does not exist yet.
    if not options.demo and any(map(spec.architecture.experts, spec.architecture.presets.values())):
        run = resolve_arch(run)
    runs = components_of(run, options.init_from)
    _check(runs)
    with open_run(config.run_folder.path, runs.run.request.config, ranks) as (folder, stated):
        if ranks.is_first:
            keep_log(folder.log)  # not before the folder is locked: another run's log is not ours
            rename_exports(runs.run, folder)
        done, left = folder.completed_step(), _left(runs)
        if ranks.broadcast_object(
            not left
            and done is not None
            and all(has_expert_adapters(expert_run, folder) for expert_run in runs.experts)
        ):
            # Someone who set another data.folder expects it to be trained on.
            changes = [change for expert_run in runs.experts or [runs.run] for change in _stated(expert_run)]
            if not (ranks.is_first and queued(folder.pending) and _takes_moved_data(runs, folder, changes)):
                for change in dict.fromkeys(map(str, changes)):
                    warn(f"not used, because the run is complete: {change}")
            say(f"{folder.path} is complete{'' if runs.experts else f' at step {done}'}; nothing is left to do")
            if ranks.is_first:
                generate_left(runs.run, folder, write_report)
                log_left_samples(folder.path, config.log, tracked_run(runs.run, folder), warn)
        else:
            if ranks.is_first:
                folder.store(runs.run.request.config)
            if options.demo:
                say(f"writing the demo's checkpoint and media into {folder.inputs}")
                ranks.on_first(lambda: spec.demo.write(folder.inputs))
                # create_run again: the architecture is read from the checkpoint, which did not exist before
                runs = components_of(create_run(spec, config), options.init_from)
            _train_what_is_left(runs, folder, stated)
        if ranks.is_first:
            say_results(runs.run, runs.experts, folder)


def _left(runs: ComponentRuns) -> list[Component]:
    """The components that are still to be trained, as the first rank sees them."""
    incomplete = [index for index, component in enumerate(runs.components) if component.completed_step is None]
    return [runs.components[index] for index in current_ranks().broadcast_object(incomplete)]


def _check(runs: ComponentRuns) -> None:
    """Refuse settings that cannot work, before anything is written.

    Raises:
        UserError: If a setting of the run or of a component contradicts another, or a component's folder belongs to another configuration.
    """
    run, config, path = runs.run, runs.run.request.config, runs.run.config.run_folder.path
    if runs.experts:
        check_run(run)
        check_preview_device(run)  # here and not per component: only the run of all experts generates previews
        if config.adapter.init:
            raise UserError(
                f"adapter.init = {config.adapter.init!r} belongs to one expert and would initialize both; train each in a run of its own, "
                "with experts.train = high_noise and low_noise"
            )
    elif inside := [path / expert.name for expert in run.experts if RunFolder(path / expert.name).config_file.exists()]:
        raise UserError(
            f"{path} is a run of several experts; continue one of them with --run {inside[0]}, or name a new run.folder"
        )
    for component in runs.components:
        check_run(component.run)
        check_training(component.run)
        check_ranks(component.run, current_ranks().size)
    # The run's own folder has no saves to compare the configuration with: each expert's folder checks its own.
    for expert_run in runs.experts:
        _stated(expert_run)


def _stated(run: RunContext) -> list[ConfigChange]:
    """The stated changes of a component's settings since its last save; refused ones are an error."""
    return run.config.run_folder.check(run.request.config)


def _takes_moved_data(runs: ComponentRuns, folder: RunFolder, changes: Sequence[ConfigChange]) -> bool:
    """Whether all that changed of a complete run is where its data is, which previews in the queue may need."""
    if not changes or not all(change.key.startswith("data.") for change in changes):
        return False
    try:
        store_moved_data(runs.run, folder, [expert_run.config.run_folder for expert_run in runs.experts])
    except UserError as error:
        warn(str(error))
        return False
    return True


def _train_what_is_left(runs: ComponentRuns, folder: RunFolder, stated: Sequence[ConfigChange]) -> None:
    """Train one transformer after the other, then generate the samples that need all of them."""
    run, left, ranks = runs.run, _left(runs), current_ranks()
    if runs.experts and left:
        names = ", then ".join(component.run.expert.name for component in left if component.run.expert)
        say(f"{len(runs.components)} experts, one in memory at a time: {names}")
        _prepare(runs, left)
    with previews_of(run, folder, write_report) if ranks.is_first else nullcontext() as previews:
        steps = [component.completed_step or 0 for component in runs.components]
        for component in left:
            with _opened(component, folder, stated) as (component_folder, changes):
                page = LivePage([component_folder.path, folder.path])
                result = _train_component(component, component_folder, changes, previews or run, page)
                steps.append(result.step)
                release_memory()  # before the next transformer, and before samples that take all of them
                if not ranks.is_first:
                    continue
                if runs.experts:
                    component_folder.mark_complete(result.step)
                    write_report(component_folder.path)
                    write_report(folder.path)
                for line in held_out_lines(result, component_folder):
                    say(line)
        if ranks.is_first:
            for expert_run in runs.experts:
                copy_expert_adapters(expert_run, folder)
        if run.experts:
            generate_trained(run, folder, max(steps))
        if not ranks.is_first:
            return
        folder.mark_complete(max(steps))
        write_report(folder.path)  # once more, now that it is complete
        if previews is not None:
            # Last, after the run is marked complete: if a signal ends the wait, the same command only generates what is left.
            previews.wait()
    log_left_samples(folder.path, run.config.log, tracked_run(run, folder), warn, is_said=True)


def _prepare(runs: ComponentRuns, left: Sequence[Component]) -> None:
    """Check every expert, then encode for all of them, before the first is trained."""
    run, ranks = runs.run, current_ranks()
    folders = [expert_run.config.run_folder for expert_run in runs.experts]
    for folder in folders:
        check_listed(folder, [sample.id for sample in run.data.dataset.samples])
    num_images = ranks.on_first(
        lambda: num_missing_class_images(
            run, started=any(component_run.config.run_folder.has_save for component_run in runs_of(run))
        )
    )
    # On `meta`: a mistake of the second expert must not appear after hours of training the first.
    for component in left:
        build_model(component.run)
    data = _encode_all(run, num_images)
    for folder in folders:
        check_samples(folder, [*data.samples, *data.prior])
    if num_images:
        encoded_class_images(run, denoiser_stages(of_base(run), {}), num_images)


def _encode_all(run: RunContext, num_images: int) -> Encoded:
    """Encode all data and texts, after a look at what that and the class images that are still to be generated need."""
    check_components(run, run.data.dataset.samples, sampling=num_images > 0)
    if num_images:
        check_class_prompt(run)
        check_shared(run.data.prior_folder, "prior.folder", current_ranks())
    check_shared(run.data.cache.folder, "encode.cache", current_ranks())
    return encode_all(run, run.config.prior.prompt if num_images else "")


@contextmanager
def _opened(
    component: Component, folder: RunFolder, stated: Sequence[ConfigChange]
) -> Iterator[tuple[RunFolder, Sequence[ConfigChange]]]:
    """Open the folder of a component: the run's own, or one inside it.

    Yields:
        The folder, and the settings that changed since the component was last trained.
    """
    path, config = component.run.config.run_folder.path, component.run.request.config
    if path == folder.path:  # already open and locked by this process
        yield folder, stated
        return
    with open_run(path, config, current_ranks()) as (component_folder, changes):
        if current_ranks().is_first:
            component_folder.store(config)
        yield component_folder, changes


def _train_component(
    component: Component,
    folder: RunFolder,
    changes: Sequence[ConfigChange],
    previews: Previews | RunContext,
    page: LivePage,
) -> TrainResult:
    """Train one transformer, export it and verify the export.

    Args:
        changes: The settings that changed since its last part.
        previews: What takes the previews; or the run that was asked for, whose previews are generated with this transformer.
        page: Writes the page while the run trains.

    Raises:
        Interrupted: If a signal ended it early.
    """
    run, ranks = component.run, current_ranks()
    say_beginning(run, changes)
    _stage(1, "check data and model")
    # Reads the dataset: a missing caption is reported before gigabytes are downloaded.
    check_listed(folder, [sample.id for sample in run.data.dataset.samples])
    is_started = ranks.broadcast_object(folder.has_save)
    if not is_started:
        check_start(component.init_from, folder)
    num_images = ranks.on_first(lambda: num_missing_class_images(run, started=is_started))
    unloaded = build_model(run)
    run = with_arch(run, unloaded.arch)
    if component.init_from and not is_started:
        check_same_adapter(unloaded.adapter, RunFolder(local_path(component.init_from)), merge_key=unloaded.merge_key)
    check_ranks(run, ranks.size)
    for line in describe_sample_adapters(run):
        say(line)
    if is_joint(run):
        raise UserError("the weights show that this model has several experts; name it with model.preset")
    # before hours of encoding: a model that does not fit its devices is reported now
    placement = place_run(run, unloaded, training=True)
    _stage(2, "encode")
    data = _encode(run, unloaded, num_images)  # by all ranks at once: each claims what it encodes
    _stage(3, "load the model")
    keys = {sample.id: sample.keys for sample in [*data.samples, *data.prior]}
    ranks.check_same({"data": json_hash(keys), **fingerprints_of(run, unloaded.stored.source)})
    prepared, data = _load(run, unloaded, placement, data, num_images)
    start_from(component.init_from, prepared, folder)
    if not run.config.train.steps:
        warn("train.steps = 0: nothing is trained; exports and samples are of the initial weights")
    samples = _split(run, folder, prepared, data)
    model = replace(prepared, engine=engine_of(run, prepared, placement.checkpointing, ranks))
    _stage(4, "train")
    with progress("train", run.config.train.steps) as bar, Verifier(run, folder) as verifier:
        exporter = Exporter(run, folder, prepared, [*data.samples, *data.prior], verifier)
        callbacks = [ProgressBar(bar), _LastStage(), exporter, *_callbacks(run, folder, prepared, previews), page]
        result = _trainer(run, folder, model, samples, callbacks).fit()
    if not result.finished:
        saved = f"stopped at step {result.step}, saved in {result.save}" if result.save else ""
        raise Interrupted(f"{saved or 'stopped before the first step'}; the same command continues")
    return result


def _stage(number: int, name: str) -> None:
    say(f"[{number}/{_NUM_STAGES}] {name}")


class _LastStage(Callback):
    """Prints where training ends and the exports begin."""

    def finished(self, step: int) -> None:
        _stage(_NUM_STAGES, "export, verify and sample")


def _encode(run: RunContext, unloaded: MetaModel, num_images: int) -> Encoded:
    """Encode everything that the run trains on and samples from into the cache.

    Args:
        run: The run.
        unloaded: Its model on `meta`; the encoded samples are checked against it.
        num_images: Number of class images that are still to be generated.
    """
    spec, config = run.spec, run.config
    # An assistant is the other remedy for what advice is about.
    if (advice := spec.training.advice(unloaded.arch)) and not any(entry for _, entry in config.base.assistants):
        warn(advice)
    if config.flow.guidance != 1 and spec.auxiliary.sample_defaults(unloaded.arch).guided_by != "embedding":
        warn(f"flow.guidance = {config.flow.guidance:g} is not used: this model has no guidance embedding")
    data = _encode_all(run, num_images)
    check_items(spec, unloaded.model, [*data.samples, *data.prior])
    summarize_data(run, data.samples)
    if num_images:
        class_conditions(run)  # encodes them into the cache now, while no transformer is in memory
    return data


def _load(
    run: RunContext, unloaded: MetaModel, placement: Placement, data: Encoded, num_images: int
) -> tuple[Model, Encoded]:
    """The model with its weights, and the data with the class images that were missing.

    The base model generates the class images, before training. A model with experts needs all of them for that, and only one is in memory
    at a time, so the images are generated before the expert that is trained gets loaded.
    """
    if num_images and run.expert is not None:
        data = data._replace(prior=encoded_class_images(run, denoiser_stages(of_base(run), {}), num_images))
    if kinds := run.auxiliary.optional_conditions:
        share = run.config.train.control_dropout
        say(f"train.control_dropout = {share:g}: {share:.0%} of the samples are trained without {', '.join(kinds)}")
    prepared = load_run(run, unloaded, placement, current_ranks())
    if prepared.shards is not None:
        say(f"weights, gradients and optimizer state are divided over {current_ranks().shard} ranks")
    if num_images and run.expert is None:
        stages = single_stage(prepared.module, engine_of(run, prepared))
        data = data._replace(prior=encoded_class_images(run, stages, num_images))
    return prepared, data


class _Samples(NamedTuple):
    """The samples that a run trains on, and the validator with the held-out ones."""

    trained: list[EncodedSample]
    prior: list[EncodedSample]
    validator: Validator | None


def _split(run: RunContext, folder: RunFolder, prepared: Model, data: Encoded) -> _Samples:
    """Split off the held-out clips, and write the description of data and environment into the run folder."""
    config, files = run.config, files_of(run.data.dataset.samples)
    by_id = {sample.id: sample for sample in data.samples}
    kept, held_out = split_held_out(list(by_id), config.held_out.clips, files)
    if current_ranks().is_first:
        check_data(folder, [*data.samples, *data.prior], prepared.origin.stored.source.fingerprint(), base_steps(run))
        summary = data_summary(run.data.dataset, by_id.keys(), held_out)
        model = model_summary(run.spec.name, prepared) | recorded_digests(run, folder, warn)
        write_about(
            folder, environment=describe_environment(run.devices, describe_precision(run)), data=summary, model=model
        )
    validator = None
    if held_out:
        clips = Batch(ids=held_out, items=[by_id[id].load() for id in held_out])
        # The bootstrap of the confidence interval resamples files: clips of one file are not independent.
        source_files = [files.get(id, id) for id in held_out]
        validator = Validator(config.held_out, clips, files=source_files, flow=config.flow)
    return _Samples([by_id[id] for id in kept], data.prior, validator)


def _callbacks(run: RunContext, folder: RunFolder, prepared: Model, previews: Previews | RunContext) -> list[Callback]:
    """The callbacks for previews and the end of training."""
    # A preview process takes over the previews; the samples of the finished model are generated here in both cases.
    sampled = run if isinstance(previews, Previews) or run.expert is None else previews
    callbacks: list[Callback] = [samples_in_place(run, sampled, prepared, folder, write_report)]
    if isinstance(previews, Previews):
        callbacks.append(QueuedPreviews(run, prepared, previews))
    if run.config.train.profile:
        callbacks.append(StepTrace(run.config.train.profile, folder.trace, warn))
    return callbacks


def _trainer(
    run: RunContext, folder: RunFolder, model: Model, samples: _Samples, callbacks: Sequence[Callback]
) -> Trainer:
    config = run.config
    sections = TrainerConfig(
        train=config.train,
        flow=config.flow,
        optim=config.optim,
        ema=config.ema,
        save=config.save,
        log=config.log,
        tracked=tracked_run(run, folder),
        utilisation=utilisation_of_run(run, samples.trained),
    )
    return Trainer(
        model,
        training_data(run, samples.trained, samples.prior),
        sections,
        folder=folder.path,
        validator=samples.validator,
        callbacks=callbacks,
        ranks=current_ranks(),
        warn=warn,
    )
