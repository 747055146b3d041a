"""The train command for one transformer, stage by stage: check, encode, load, train, and export,
verify and sample."""

from collections.abc import Sequence
from dataclasses import replace

from ditkit_core.commands.export import Exporter
from ditkit_core.commands.report import say_beginning, warn_of_base
from ditkit_core.config.resume import ConfigChange
from ditkit_core.diagnostics.doctor.dataset import summarize_data
from ditkit_core.diagnostics.report.environment import (
    data_summary,
    describe_environment,
    model_summary,
    write_about,
)
from ditkit_core.diagnostics.report.live_page import LivePage
from ditkit_core.diagnostics.report.page import write_report
from ditkit_core.diagnostics.step_trace import StepTrace
from ditkit_core.diagnostics.verification.verifier import Verifier
from ditkit_core.distributed.torchrun import current_ranks
from ditkit_core.engine.placement import Placement
from ditkit_core.errors import Interrupted
from ditkit_core.io.console import progress, say, warn
from ditkit_core.io.files import json_hash
from ditkit_core.loading.model import Model
from ditkit_core.loading.weights import engine_for
from ditkit_core.previews.callbacks import QueuedPreviews
from ditkit_core.previews.class_images import (
    class_conditions,
    encoded_class_images,
    num_missing_class_images,
)
from ditkit_core.previews.exchange import samples_in_place
from ditkit_core.previews.manager import Previews
from ditkit_core.previews.stages import denoiser_stages
from ditkit_core.run import checks
from ditkit_core.run.data_record import keys_of
from ditkit_core.run.encoding import Encoded, encode_all
from ditkit_core.run.jobs import Jobs, TrainingJob
from ditkit_core.run.model import build_model, fingerprints_of
from ditkit_core.run.plans.planned_step import place_run
from ditkit_core.run.restore import start_from
from ditkit_core.run.training import (
    base_steps,
    load_for_training,
    split_samples,
    trainer_of,
    validator_of,
)
from ditkit_core.sampling.denoise import single_stage
from ditkit_core.training.trainer import Callback, ProgressBar, TrainResult

_NUM_STAGES = 5


def prepare_jobs(jobs: Jobs, left: Sequence[TrainingJob]) -> None:
    """Check every expert of a run, then encode for all of them, before the first of those that are
    left is trained."""
    run, ranks, folders = jobs.run, current_ranks(), [job.folder for job in jobs]
    for folder in folders:
        checks.check_listed(folder, run.data)
    num_images = ranks.on_first(
        lambda: num_missing_class_images(
            run.data, started=any(folder.has_save for folder in folders)
        )
    )
    # On `meta`: a mistake of the second expert must not appear after hours of training the first.
    for job in left:
        build_model(job.run)
    checks.check_encoding(run, ranks, num_class_images=num_images)
    data = encode_all(run.data, with_class_prompt=num_images > 0)
    for folder in folders:
        checks.check_samples(folder, [*data.samples, *data.prior])
    if num_images:
        encoded_class_images(run, denoiser_stages(run.for_class_images, {}), num_images)


def train_job(
    job: TrainingJob,
    jobs: Jobs,
    changes: Sequence[ConfigChange],
    previews: Previews | None,
    page: LivePage,
) -> TrainResult:
    """Train one transformer, export it and verify the export; its folder is locked by this process.
    Without `previews` they are generated on the devices that train.

    Raises:
        Interrupted: If a signal ended it early.
    """
    ranks, folder = current_ranks(), job.folder
    say_beginning(job, changes)

    _stage(1, "check data and model")
    is_started = ranks.broadcast_object(folder.has_save)
    # Reads the dataset: a missing caption is reported before gigabytes are downloaded.
    checks.check_beginning(job, is_started=is_started)
    num_images = ranks.on_first(lambda: num_missing_class_images(job.run.data, started=is_started))
    unloaded = build_model(job.run)
    job = replace(job, run=job.run.with_arch(unloaded.origin.arch))
    run, config = job.run, job.run.config
    checks.check_model(job, unloaded, ranks.size, is_started=is_started)
    for line in run.sample_adapters.described():
        say(line)
    # before hours of encoding: a model that does not fit its devices is reported now
    placement = place_run(run, unloaded, training=True)

    _stage(2, "encode")
    warn_of_base(run.spec, run.arch, config)
    checks.check_encoding(run, ranks, num_class_images=num_images)
    # by all ranks at once: each claims what it encodes
    data = encode_all(run.data, with_class_prompt=num_images > 0)
    checks.check_items(run.spec, unloaded.module, [*data.samples, *data.prior])
    summarize_data(run.data, data.samples)
    if num_images:
        # encodes them into the cache now, while no transformer is in memory
        class_conditions(run.data)

    _stage(3, "load the model")
    ranks.check_same(
        {
            "data": json_hash(keys_of([*data.samples, *data.prior])),
            **fingerprints_of(config, run.component, unloaded.origin.stored.source),
        }
    )
    prepared, data = _load(job, unloaded, placement, data, num_images)
    start_from(job.init_from, prepared, folder)
    if not config.train.steps:
        warn("train.steps = 0: nothing is trained; exports and samples are of the initial weights")
    samples = split_samples(config.held_out.clips, run.data.dataset, data)
    encoded = [*data.samples, *data.prior]
    if ranks.is_first:
        checks.check_data(
            folder, encoded, unloaded.origin.stored.source.fingerprint(), base_steps(run.data)
        )
        held_out = [sample.id for sample in samples.held_out]
        write_about(
            folder,
            environment=describe_environment(run.devices, run.described_precision),
            data=data_summary(run.data.dataset, {sample.id for sample in data.samples}, held_out),
            model={
                **model_summary(run.spec.name, prepared, random_base=jobs.run.has_random_base),
                **run.sample_adapters.recorded_digests(folder, warn),
            },
        )
    validator = validator_of(config, samples)
    model = replace(
        prepared, engine=engine_for(prepared, run.execution, placement.checkpointing, ranks)
    )

    _stage(4, "train")
    with progress("train", config.train.steps) as bar, Verifier(run, folder) as verifier:
        exporter = Exporter(job, prepared, encoded, verifier)
        in_place = samples_in_place(job, jobs, prepared, write_report)
        callbacks: list[Callback] = [ProgressBar(bar), _LastStage(), exporter, in_place]
        # A preview process takes over the previews; the samples of the finished model are generated
        # here in both cases.
        callbacks += [QueuedPreviews(job, prepared, previews)] if previews is not None else []
        callbacks += (
            [StepTrace(config.train.profile, folder.trace, warn)] if config.train.profile else []
        )
        requests = jobs.run.config.run_folder  # also of a run whose experts have their own folders
        result = trainer_of(job, model, samples, validator, [*callbacks, page], requests).fit()
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


def _load(
    job: TrainingJob, unloaded: Model, placement: Placement, data: Encoded, num_images: int
) -> tuple[Model, Encoded]:
    """The model with its weights, and the data with the class images that were missing.

    The base model generates the class images, before training. A model with experts needs all of
    them for that, and only one is in memory at a time, so the images are generated before the
    expert that is trained gets loaded.
    """
    run = job.run
    if num_images and run.expert is not None:
        data = data._replace(
            prior=encoded_class_images(run, denoiser_stages(run.for_class_images, {}), num_images)
        )
    prepared = load_for_training(job, unloaded, placement)
    if num_images and run.expert is None:
        stages = single_stage(prepared.module, engine_for(prepared, run.execution))
        data = data._replace(prior=encoded_class_images(run, stages, num_images))
    return prepared, data
