"""The training of one transformer, put together: its weights, its samples and its trainer."""

from collections.abc import Sequence
from typing import NamedTuple

from ditkit_core.data.dataset import Dataset
from ditkit_core.distributed.torchrun import current_ranks
from ditkit_core.encoding.encode import text_key
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.loader import BaseSteps, Batch, TrainDataLoader, files_of, split_held_out
from ditkit_core.encoding.prior_preservation import PriorDataLoader
from ditkit_core.engine.placement import Placement
from ditkit_core.io.console import say, warn
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.loading.model import Model
from ditkit_core.run.config import RunConfig
from ditkit_core.run.data import RunData
from ditkit_core.run.encoding import Encoded
from ditkit_core.run.jobs import TrainingJob
from ditkit_core.run.model import load_model, tracked_run
from ditkit_core.run.plans.planned_step import utilisation_of_run
from ditkit_core.training.train_model import batch_size_of, data_loader
from ditkit_core.training.trainer import Callback, Trainer, TrainerConfig
from ditkit_core.training.validation import Validator


def training_data(
    data: RunData, samples: Sequence[EncodedSample], prior: Sequence[EncodedSample]
) -> TrainDataLoader | PriorDataLoader:
    """The data loader of a run."""
    config = data.config.train
    loader = data_loader(data.spec, config, samples, base_steps(data))
    if loader.num_shapes > 1:
        say(
            f"{len(samples)} samples have {loader.num_shapes} shapes: {loader.mean_size:.1f} in a "
            f"micro-batch on average"
        )
    if not prior:
        return loader
    return PriorDataLoader(
        loader,
        prior,
        seed=config.seed,
        batch_size=batch_size_of(data.spec, config),
        weight=data.config.prior.weight,
        caption_dropout=config.caption_dropout,
        control_dropout=config.control_dropout,
    )


def base_steps(data: RunData) -> BaseSteps | None:
    """The steps whose target is the base's own prediction; None for none."""
    prior = data.config.prior
    if not prior.match_base:
        return None
    key = text_key(prior.prompt, data.auxiliary.encoders[1]) if prior.prompt else ""
    return BaseSteps(
        share=prior.match_base,
        accumulation=data.config.train.accumulation,
        weight=prior.weight,
        text_key=key,
    )


class SplitSamples(NamedTuple):
    """The encoded samples of a run: those that it trains on, and those that are held out for
    validation."""

    trained: list[EncodedSample]
    prior: list[EncodedSample]
    """The class images of prior preservation, which are trained on too."""
    held_out: list[EncodedSample]
    files: list[str]
    """The file of each held-out sample. The bootstrap of the confidence interval resamples files:
    clips of one file are not independent."""


def split_samples(num_held_out: int, dataset: Dataset, encoded: Encoded) -> SplitSamples:
    """Split off the samples of what was encoded that are held out, `num_held_out` at least; windows
    of a file stay together."""
    files, by_id = files_of(dataset.samples), {sample.id: sample for sample in encoded.samples}
    kept, held_out = split_held_out(list(by_id), num_held_out, files)
    named = [files.get(id, id) for id in held_out]
    return SplitSamples(
        [by_id[id] for id in kept], encoded.prior, [by_id[id] for id in held_out], named
    )


def validator_of(config: RunConfig, samples: SplitSamples) -> Validator | None:
    """What measures the validation loss; None if no sample is held out."""
    if not samples.held_out:
        return None
    clips = Batch(
        ids=[sample.id for sample in samples.held_out],
        items=[sample.load() for sample in samples.held_out],
    )
    return Validator(config.held_out, clips, files=samples.files, flow=config.flow)


def load_for_training(job: TrainingJob, unloaded: Model, placement: Placement) -> Model:
    """Load the weights, or the rows of them that this rank keeps, and say how the model is
    trained."""
    run, ranks = job.run, current_ranks()
    if kinds := run.auxiliary.optional_conditions:
        share = run.config.train.control_dropout
        say(
            f"train.control_dropout = {share:g}: {share:.0%} of the samples are trained without "
            f"{', '.join(kinds)}"
        )
    prepared = load_model(unloaded, placement, run.config.train.seed, ranks)
    if prepared.shards is not None:
        say(f"weights, gradients and optimizer state are divided over {ranks.shard} ranks")
    return prepared


def trainer_of(
    job: TrainingJob,
    model: Model,
    samples: SplitSamples,
    validator: Validator | None,
    callbacks: Sequence[Callback],
    requests: RunFolder | None = None,
) -> Trainer:
    """The trainer of a job, whose model is loaded and has the engine that trains it; `requests` as
    for `Trainer`."""
    run, config = job.run, job.run.config
    sections = TrainerConfig(
        train=config.train,
        flow=config.flow,
        optim=config.optim,
        ema=config.ema,
        save=config.save,
        log=config.log,
        tracked=tracked_run(run, job.folder),
        utilisation=utilisation_of_run(run, samples.trained),
    )
    return Trainer(
        model,
        training_data(run.data, samples.trained, samples.prior),
        sections,
        folder=job.folder.path,
        validator=validator,
        callbacks=callbacks,
        ranks=current_ranks(),
        requests=requests,
        warn=warn,
    )
