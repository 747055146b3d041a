"""The training loop: resume, step, report, validate, save, until done or interrupted."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ditkit_core.distributed.ranks import Ranks
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.errors import UserError
from ditkit_core.io.console import Bar
from ditkit_core.io.memory import peak_memory_bytes, peak_reserved_bytes, restart_peak
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.io.run_requests import pending, remove_requests
from ditkit_core.io.runtimes import runtime_of
from ditkit_core.io.signals import Interrupts
from ditkit_core.io.step_clock import StepClock
from ditkit_core.io.trackers import TrackedRun
from ditkit_core.loading.model import Model
from ditkit_core.nn.context import AttentionCalls, counted_calls
from ditkit_core.training.checkpoint import (
    latest,
    load_state,
    prune_saves,
    save_sharded,
    save_state,
)
from ditkit_core.training.config import EMAConfig, FlowConfig, SaveConfig, TrainConfig
from ditkit_core.training.flow_matching import PreparedBatch
from ditkit_core.training.losses import NonFiniteLoss, write_failure
from ditkit_core.training.metrics import LogConfig, MetricsLog
from ditkit_core.training.optim.fused_checks import check_fused_backward
from ditkit_core.training.optim.optimizer import learning_rate
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.replay import replays_of
from ditkit_core.training.tensor_stats import DriftMonitor, StatsRecorder
from ditkit_core.training.train_model import (
    DataLoader,
    MicroBatch,
    Prefetcher,
    data_loader,
    with_clock,
)
from ditkit_core.training.train_state import TrainState
from ditkit_core.training.train_step import StepContext, training_step
from ditkit_core.training.validation import ValidationResult, Validator

if TYPE_CHECKING:
    from ditkit_core.distributed.sharded_checkpoint import BackgroundWriter

_LOGGER = logging.getLogger(__name__)
_STOPPING = "stopping after this step, with a save; Ctrl-C again stops at once, without one"


class Callback:
    """Acts at points of the training loop; a subclass overrides the methods of those that it needs.

    It must not change the state of a random generator that training uses, or the run would not be
    reproducible.
    """

    on_all_ranks: ClassVar[bool] = False
    """Whether all ranks call it, together; by default the first rank alone does."""

    def started(self, step: int) -> None:
        """Called before the first step; `step` is above 0 if the run resumes."""

    def resumed(self, step: int) -> None:
        """Called after `started` if the run resumes, while the parameters are those to export.

        An earlier start may have been killed after it saved this step, and before what follows a
        save was done.
        """

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after each optimizer step, with its metrics by name."""

    def after_validation(self, step: int, loss: ValidationResult) -> None:
        """Called after each validation."""

    def on_save(self, step: int) -> None:
        """Called after a save, while the parameters are those to export."""

    def wants_preview(self, step: int, *, stopping: bool) -> bool:
        """Whether to call `generate_preview`; asked before training, and after each step but the
        last.

        `stopping`: a signal ends the run here, so that anything slow has to wait until the run is
        resumed.
        """
        return False

    def previews_when_asked(self) -> bool:
        """Whether to call `generate_preview` after a step at which a user asks for samples (`--tell
        sample`)."""
        return False

    def generate_preview(self, step: int, is_stopping: Callable[[], bool]) -> None:
        """Generate samples of the unfinished model; called while the parameters are those to
        export.

        `is_stopping`: whether a signal came meanwhile, so that anything slow has to end and to wait
        until the run is resumed."""

    def finished(self, step: int) -> None:
        """Called when all steps are done, also by an earlier start, while the parameters are those
        to export."""


class ProgressBar(Callback):
    """Shows the step and its metrics."""

    def __init__(self, bar: Bar):
        self._bar, self._is_first = bar, True

    def started(self, step: int) -> None:
        if step:
            self._bar.begin(step)

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._bar.update(**metrics)
        # The first step compiles, and validation and samples before training come before it: no
        # measure of the steps that follow.
        if self._is_first:
            self._bar.begin(step)
        else:
            self._bar.advance()
        self._is_first = False

    def after_validation(self, step: int, loss: ValidationResult) -> None:
        self._bar.update(held_out=loss.mean)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The sections of a configuration that the loop reads."""

    train: TrainConfig = field(default_factory=TrainConfig)
    flow: FlowConfig = field(default_factory=FlowConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    log: LogConfig = field(default_factory=LogConfig)
    tracked: TrackedRun | None = None
    """What trackers show of the run; None for its folder's name alone."""
    utilisation: Callable[[Sequence[Mapping[str, Tensor]], float], float] | None = None
    """From the training items and the seconds of a step to the share of its GPUs' peak rate that it
    used; None if that is unknown."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The state of a run when the loop ends."""

    step: int
    """Optimizer steps done."""
    finished: bool
    """False if a signal ended it before `train.steps`."""
    held_out_before: float | None
    """Validation loss before the first step of the run, however often it was resumed."""
    held_out: float | None
    held_out_interval: tuple[float, float] | None
    """Its 95 % confidence interval, as `validation.py` defines it; None with clips of fewer than
    two files, or before the first step."""
    save: Path | None


class Trainer:
    """Trains a model until `train.steps`, resuming the run in its folder bitwise identically if
    there is one."""

    def __init__(
        self,
        model: Model,
        data: DataLoader | Sequence[EncodedSample],
        config: TrainerConfig | None = None,
        *,
        folder: str | Path,
        validator: Validator | None = None,
        callbacks: Sequence[Callback] = (),
        ranks: Ranks | None = None,
        requests: RunFolder | None = None,
        warn: Callable[[str], None] = _LOGGER.warning,
    ):
        """Make optimizer and average.

        Args:
            data: Micro-batches by index; or encoded samples, which become micro-batches as
                `config.train` says.
            config: How it is trained; None for the defaults of the commands.
            folder: The run folder: state/, metrics.jsonl, tensorboard/, and failure-step-N.json if
                a loss is not finite.
            validator: Measures the validation loss; None disables validation.
            callbacks: Called at fixed points of the loop, in this order, but the callbacks of all
                ranks last.
            ranks: The processes that train the run together; None for the ranks that divide the
                model's weights, or this one alone.
            requests: The folder in which a user asks for samples, a save or the end
                (`io/run_requests.py`); None for `folder`.
            warn: Called with one line if something of an earlier part is damaged, and if
                activations drift.

        Raises:
            UserError: If the configuration contradicts itself.
        """
        config, folder = config or TrainerConfig(), Path(folder)
        check_fused_backward(config.train, config.optim, adapts=model.adapts)
        self._requests = requests or RunFolder(folder)
        self._devices = {parameter.device for parameter in model.module.parameters()}
        self._clock = StepClock(sorted(self._devices, key=str))
        self._model, self._config, self._folder = with_clock(model, self._clock), config, folder
        train, shards = config.train, model.shards
        if shards is not None:
            shards.divide_gradients_by(shards.ranks.context)
        self._ranks = ranks or (shards.ranks if shards else Ranks())
        loader = data_loader(model.spec, train, data) if isinstance(data, Sequence) else data
        self._data = Prefetcher(
            loader,
            self._prepare,
            accumulation=train.accumulation,
            steps=train.steps,
            ranks=self._ranks,
        )
        self._validator, self._warn, self._metrics_digest = validator, warn, ""
        self._callbacks = [
            callback for callback in callbacks if callback.on_all_ranks or self._ranks.is_first
        ]
        self._state = TrainState(
            model.module,
            model.trainable,
            config.optim,
            config.ema,
            model.streamer,
            model.shards,
            kernels=train.kernels,
        )
        self._replays = replays_of(self._model, train, config.optim, warn)
        self._last_save: Path | None = None
        self._writer: BackgroundWriter | None = None
        if model.shards is not None and not model.adapts:
            # imports parts of torch that take seconds
            from ditkit_core.distributed import sharded_checkpoint

            self._writer = sharded_checkpoint.BackgroundWriter()

    def fit(self) -> TrainResult:
        """Train. SIGINT and SIGTERM end the loop after the current step, with a save.

        Raises:
            UserError: If a loss, gradient or validation loss is not finite (the last save stays as
                it is), or a save cannot be written or does not fit.
        """
        state, steps, save = self._state, self._config.train.steps, self._config.save
        self._resume()
        start = state.step
        if self._last_save is not None:
            self._call(lambda callback: callback.resumed(start))
        with self._log() as metrics, ExitStack() as handlers:
            interrupts = handlers.enter_context(Interrupts(partial(self._warn, _STOPPING)))
            handlers.enter_context(self._data)
            if self._replays is not None:
                handlers.callback(self._replays.free)
            if self._writer is not None:
                handlers.callback(self._writer.finish)
            saved_at, stopping = time.monotonic(), False
            # A resumed run has the loss before training in its save.
            if start == 0 and steps:
                self._validate(metrics)
                self._preview(interrupts, stopping=False)
                # nothing is trained that could be saved
                stopping = self._stops(interrupts, metrics, saved=True)
            while state.step < steps and not stopping:
                self._ranks.begin_step(state.step + 1)
                self._train_step(metrics, count_attention=state.step == start)
                last = state.step == steps
                is_due = last or save.due(state.step, time.monotonic() - saved_at)
                # The first rank decides for all, in one exchange.
                saving, requests = self._ranks.broadcast_object(
                    (is_due, sorted(pending(self._requests)))
                )
                # whoever stops saves without validation
                saving = saving or ("save" in requests and "stop" not in requests)
                interrupts.requested |= "stop" in requests
                # Before the save, which stores the validation loss of its step.
                if last or (
                    self._validator is not None and self._validator.due(state.step, saving=saving)
                ):
                    self._validate(metrics)
                if saving:
                    self._save(metrics)
                    saved_at = time.monotonic()
                stopping = self._stops(interrupts, metrics, saved=saving)
                self._preview(interrupts, stopping=stopping, requested="sample" in requests)
                stopping = stopping or self._stops(interrupts, metrics, saved=saving)
                if requests and self._ranks.is_first:
                    # Samples that a stop has put off are generated by the next start.
                    remove_requests(
                        self._requests,
                        {*requests} - ({"sample"} if stopping and not last else set()),
                    )
            handlers.close()  # from here on a signal ends the process, as before training
            self._ranks.begin_step(0)
            if state.step >= steps:
                if self._ranks.is_first:  # a kill after the last save may have left some
                    prune_saves(self._folder / "state", state.step, save)
                self._call(lambda callback: callback.finished(state.step))
        return TrainResult(
            step=state.step,
            finished=state.step >= steps,
            held_out_before=state.history.before,
            held_out=state.history.last,
            held_out_interval=state.history.interval,
            save=self._last_save,
        )

    def _log(self) -> AbstractContextManager[MetricsLog | None]:
        if not self._ranks.is_first:
            return nullcontext()
        return MetricsLog(
            self._folder,
            self._config.log,
            start_step=self._state.step,
            digest=self._metrics_digest,
            tracked=self._config.tracked,
            warn=self._warn,
        )

    def _resume(self) -> None:
        """Load the newest save, if there is one."""
        name = self._ranks.on_first(
            lambda: save.name if (save := latest(self._folder / "state", self._warn)) else ""
        )
        self._last_save = self._folder / "state" / name if name else None
        if self._last_save is not None:
            saved = load_state(self._last_save, self._model.shards)
            self._state.load_state_dict(saved, self._last_save)
            self._metrics_digest = saved.metrics
        limit = torch.finfo(self._model.matmul_dtype).max
        self._drift = DriftMonitor(limit, self._warn, self._state.first_activations)
        # Loading and encoding do not count towards the peak memory of training.
        restart_peak(self._devices)
        self._model.module.train()
        for callback in self._callbacks:
            callback.started(self._state.step)

    def _context(self, step: int) -> StepContext:
        config = self._config.train
        return StepContext(
            step=step,
            seed=config.seed,
            flow=self._config.flow,
            pipelined=config.pipelined,
            ranks=self._ranks,
            clock=self._clock,
            clip_by=config.clip_by,
            last_norm=self._state.last_norm,
            replays=self._replays,
        )

    def _prepare(self, batches: Sequence[MicroBatch], micro: int, step: int) -> PreparedBatch:
        """Prepare a micro-batch of a step, and page-lock it if it is sent to a GPU. Runs in a
        background thread."""
        batch = self._context(step).prepare(self._model.spec, batches, micro)
        return (
            batch.pinned()
            if any(runtime_of(device) is not None for device in self._devices)
            else batch
        )

    def _train_step(self, metrics: MetricsLog | None, *, count_attention: bool) -> None:
        """Run one optimizer step, and report it."""
        began = time.perf_counter()
        self._clock.begin()
        state, config = self._state, self._config.train
        # By index, so that a resumed run gets the same micro-batches as one that was never
        # interrupted.
        data_seconds = self._data.seconds_waited
        batches = self._data.micro_batches(state.step)
        lr = learning_rate(state.step, self._config.optim, config.steps)
        looks = config.sentinels and (state.step == 0 or (state.step + 1) % config.sentinels == 0)
        watch = StatsRecorder() if looks else None
        prepared = partial(self._data.prepared, state.step)
        context = replace(self._context(state.step), prepared=prepared, is_seen=count_attention)
        waited, sent = self._ranks.seconds_waited, self._ranks.bytes_sent
        replays = 0 if self._replays is None else self._replays.num_replays
        try:
            with counted_calls(AttentionCalls() if count_attention else None):
                result = training_step(
                    self._model,
                    batches,
                    state.optimizer,
                    context,
                    lr=lr,
                    clip_norm=config.clip_norm,
                    watch=watch,
                )
        except NonFiniteLoss as error:
            failed, family = error, self._model.spec.name
            described = self._ranks.on_first(
                lambda: write_failure(failed, self._folder, lr, self._last_save, family)
            )
            raise UserError(described) from error
        self._clock.end()
        state.optimizer.zero_grad()  # frees their memory for validation, saving and sampling
        # A validation loss belongs to the step that it was measured at.
        state.step, state.held_out, state.last_norm = state.step + 1, None, result.grad_norm
        if watch is not None and watch.reading is not None:
            drift = self._drift.take(state.step, watch.reading)
            if metrics is not None:
                metrics.write(state.step, drift)
        state.average.update(state.step)
        items = [item for micro in self._ranks.share(len(batches)) for item in batches[micro].items]
        tokens = self._ranks.total(map(self._model.spec.training.num_tokens, items))
        # includes reading data, excludes validation and saving
        seconds = time.perf_counter() - began
        numbers = {
            "prior_loss" if batches[0].matches_base else "loss": result.loss,
            "lr": lr,
            **state.optimizer.rates(lr),
            "grad_norm": result.grad_norm,
            "seconds": seconds,
            "data_seconds": self._data.seconds_waited - data_seconds,
            "tokens_per_second": tokens / seconds,
            "peak_memory_bytes": peak_memory_bytes(self._devices),
        }
        if (reserved := peak_reserved_bytes(self._devices)) is not None:
            numbers["peak_reserved_bytes"] = reserved
        if self._replays is not None:
            numbers["replays"] = self._replays.num_replays - replays
        if self._config.utilisation is not None:
            # Ranks of a context group work on the same items.
            numbers["mfu"] = self._config.utilisation(items, seconds) / self._ranks.context
        numbers |= self._clock.numbers()
        if self._ranks.size > 1:
            numbers["wait_seconds"] = self._ranks.seconds_waited - waited
            numbers["sent_bytes"] = self._ranks.bytes_sent - sent
        for callback in self._callbacks:
            callback.after_step(state.step, numbers)
        if metrics is not None and metrics.due(state.step):
            metrics.write(state.step, numbers)

    def _validate(self, metrics: MetricsLog | None) -> None:
        """Measure the validation loss, if there is a validator."""
        validator, state = self._validator, self._state
        if validator is None:
            return
        with state.used():
            loss = validator.measure(self._model, state.step, self._last_save, self._ranks)
        state.held_out = loss.mean
        held_out = state.history.take(loss, first=state.step == 0, files=validator.files)
        if metrics is not None:
            metrics.write(state.step, held_out)
        for callback in self._callbacks:
            callback.after_validation(state.step, loss)

    def _save(self, metrics: MetricsLog | None) -> None:
        shards = self._model.shards
        folder = self._folder / "state"
        digest = metrics.saved() if metrics else ""
        self._last_save = RunFolder(self._folder).save(self._state.step)
        if self._writer is not None:  # too much to be gathered on one rank
            assert shards is not None
            self._writer.finish()  # before another copy of the state is made
            state = replace(self._state.state_dict(), metrics=digest)
            self._writer.start(save_sharded(folder, state, self._config.save, shards))
        elif shards is not None or self._ranks.is_first:
            state = replace(self._state.state_dict(), metrics=digest)
            if shards is not None:
                state = replace(state, tensors=shards.unsharded(state.tensors))
            if self._ranks.is_first:
                save_state(folder, state, self._config.save)
        self._call(lambda callback: callback.on_save(self._state.step))

    def _stops(self, interrupts: Interrupts, metrics: MetricsLog | None, *, saved: bool) -> bool:
        """Whether a signal came, on any rank, before a preview or in it, which it ends; then the
        step is saved."""
        if (stopping := self._ranks.any(interrupts.requested)) and not saved:
            self._save(metrics)
        return stopping

    def _preview(self, interrupts: Interrupts, *, stopping: bool, requested: bool = False) -> None:
        step = self._state.step
        # After the last step, the samples of the finished model take the place of a preview.
        if step < self._config.train.steps:
            requested = requested and not stopping
            wanting = [
                callback
                for callback in self._callbacks
                if callback.wants_preview(step, stopping=stopping)
                or (requested and callback.previews_when_asked())
            ]
            if requested and self._ranks.is_first and not wanting:
                self._warn(
                    "no samples, as asked for by --tell: this run generates none while it trains"
                )
            if wanting and self._replays is not None:
                self._replays.free()  # encoders and the VAE need the memory of the graphs
            if self._model.shards is None or self._ranks.broadcast_object(bool(wanting)):
                self._call(
                    lambda callback: callback.generate_preview(step, lambda: interrupts.requested),
                    wanting,
                )

    def _call(
        self, act: Callable[[Callback], None], callbacks: Sequence[Callback] | None = None
    ) -> None:
        """Call `act` on the callbacks, by default all, while the parameters are those to export.

        The callbacks of the first rank come first; where the weights are divided, the other ranks
        help it.
        """
        chosen, shards = self._callbacks if callbacks is None else callbacks, self._model.shards

        def call(on_all_ranks: bool) -> None:
            for callback in (
                candidate for candidate in chosen if candidate.on_all_ranks == on_all_ranks
            ):
                act(callback)

        if shards is None and not chosen:
            return
        with self._state.used():
            if shards is None:
                call(False)
            else:
                self._ranks.on_first(lambda: call(False), shards.help)
            call(True)
