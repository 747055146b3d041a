"""The training loop: resume, step, report, measure, save, until done or interrupted."""

import json
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from ditkit_core.config.field import setting
from ditkit_core.engine.ac_schedule import ACSchedule, check_sizes, parse_schedule
from ditkit_core.engine.block_swap import BlockSwap
from ditkit_core.errors import UserError
from ditkit_core.io.files import write_text
from ditkit_core.io.memory import peak_memory_bytes, restart_peak
from ditkit_core.io.signals import Interrupts
from ditkit_core.models.protocol import Engine
from ditkit_core.models.spec import ModelSpec
from ditkit_core.nn.context import AttentionCalls, counted_calls
from ditkit_core.training.checkpoint import SaveConfig, latest, load_state, save_state
from ditkit_core.training.ema import EMAConfig
from ditkit_core.training.flow_matching import FlowConfig
from ditkit_core.training.metrics import LogConfig, MetricsLog, Progress, SilentProgress
from ditkit_core.training.optimizer import OptimConfig, learning_rate, optimizers_that
from ditkit_core.training.tensor_stats import Watch, resumed
from ditkit_core.training.train_state import Trained
from ditkit_core.training.train_step import MicroBatch, NonFiniteLoss, StepResult, training_step
from ditkit_core.training.validation import Course, HeldOutConfig, held_out_loss

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The `[train]` section."""

    steps: int = setting(1000, resume="free")
    """Optimizer steps of the whole run, what was done before resuming included. 0 trains nothing: what the run starts from is exported and
    drawn."""
    batch_size: int = setting(1, resume="stated")
    """Samples in a micro-batch. One holds samples of one shape, so that it may be smaller where shapes differ."""
    batch_tokens: int = setting(0, resume="stated")
    """Tokens in a micro-batch, in place of batch_size: as many samples as fit, one at least. 0 goes by batch_size."""
    accumulation: int = setting(1, resume="stated")
    """Micro-batches in an optimizer step."""
    clip_norm: float = setting(1.0, resume="stated")
    """Longest gradient that is applied as it is, over all parameters; 0 clips nothing."""
    seed: int = setting(0, resume="refused")
    """Decides initial adapters, data order, noise and dropout."""
    caption_dropout: float = setting(0.0, resume="stated")
    """Share of samples whose caption is replaced by the empty one, in [0, 1]."""
    control_dropout: float = setting(-1.0, resume="stated")
    """Share of samples that are given without what the model can be trained without (a first frame, where text alone is enough), in [0, 1].
    -1 means the model's own: half of them where it is to draw from text alone as well as from a picture (TI2V), else none."""
    device: str = setting("auto", resume="free")
    """Where to train: `auto` (the first GPU, else the CPU), `cpu`, `cuda:1`."""
    devices: tuple[str, ...] = setting((), resume="free")
    """Devices to divide the model over, in order, in place of `device`: `["cuda:0", "cuda:1"]`, or `["all"]` for all GPUs of this
    machine. The embedding is on the first, the head on the last, and each has one block at least: to leave a card out, name it not."""
    split_points: tuple[int, ...] = setting((), resume="free", formerly=("cuts",))
    """Blocks before which the next device begins; empty divides so that the fullest device is least full for its size."""
    reserve: tuple[float, ...] = setting((), resume="free")
    """GiB of each GPU, in order, that are left to others (a desktop, another program); one number holds for all of them. Cuts are
    chosen and plans are made for what remains."""
    swap_blocks: tuple[int, ...] = setting((), resume="free")
    """Blocks on each device, in order, whose weights stay in host memory and are fetched ahead of their turn; one number holds for
    all devices. Changes no number. A full fine-tune needs optim.fused_backward, and keeps there what the optimizer keeps, too."""
    pipelined: bool = setting(False, resume="stated")
    """Run the forwards of all micro-batches of a step, then one backward, so that the devices of a divided model work at once. Needs
    accumulation of at least 2, and the memory of all micro-batches."""
    threads: int = setting(0, resume="stated")
    """CPU threads of torch; 0 leaves that to torch. On a CPU, sums depend on it in their last bits."""
    checkpointing: str = setting("none", resume="free")
    """Activation checkpointing: what is recomputed in backward instead of kept. One policy for all blocks, or by blocks or devices:
    `full, 0-9=none`. Changes no number."""
    attention: str = setting("sdpa", resume="stated")
    """Attention backend."""
    compile: bool | str = setting(False, resume="stated")
    """Compile the blocks with torch.compile, which takes minutes in the first step; what it gains is not measured yet. A string names a backend
    in place of `inductor`. Changes numbers in their last bits, and with inductor what dropout draws, differently under each
    train.checkpointing."""
    sentinels: int = setting(50, resume="free")
    """Optimizer steps between two looks at the activations and gradients of a step, the first step included, for metrics.jsonl: the
    largest activation of each block and how far it drifted, values that are not finite, gradients that underflow. 0 looks at none."""

    def __post_init__(self) -> None:
        if self.sentinels < 0:
            raise UserError(f"train.sentinels = {self.sentinels} must be steps between two looks, or 0 for none")
        for name, least in {"batch_size": 1, "accumulation": 1, "steps": 0, "clip_norm": 0, "threads": 0}.items():
            if not getattr(self, name) >= least:
                raise UserError(f"train.{name} = {getattr(self, name)} must be at least {least}")
        if self.batch_tokens < 0:
            raise UserError(
                f"train.batch_tokens = {self.batch_tokens} must be at least 0, which goes by train.batch_size"
            )
        if self.batch_tokens and self.batch_size != 1:
            raise UserError(
                f"train.batch_tokens = {self.batch_tokens} takes the place of train.batch_size = {self.batch_size}; leave one of them out"
            )
        if self.threads > 256:
            raise UserError(
                f"train.threads = {self.threads}: torch would start as many; give the number of cores, or 0"
            )
        check_sizes(self.schedule.budget or ())
        if not all(0 <= reserve < math.inf for reserve in self.reserve):
            raise UserError(f"train.reserve = {list(self.reserve)} must be GiB of at least 0")
        if not 0 <= self.caption_dropout <= 1:
            raise UserError(f"train.caption_dropout = {self.caption_dropout} must be in [0, 1]")
        if not 0 <= self.control_dropout <= 1 and self.control_dropout != -1:
            raise UserError(
                f"train.control_dropout = {self.control_dropout} must be in [0, 1], or -1 for the model's own"
            )

    @cached_property
    def schedule(self) -> ACSchedule:
        """What `checkpointing` means: parsed once, and handed to whoever checks, plans or runs it."""
        return parse_schedule(self.checkpointing)


def check_fused_backward(config: TrainConfig, optim: OptimConfig, *, prior: bool = False) -> None:
    """Refuse what `optim.fused_backward` cannot do, because it applies each gradient before the others are there.

    Args:
        config, optim: Sections of the configuration.
        prior: Whether there is prior preservation.
    """
    if not optim.fused_backward:
        return
    refused = {
        f"train.clip_norm = {config.clip_norm:g}": "set train.clip_norm = 0; optim.name = adafactor limits each update itself",
        f"train.accumulation = {config.accumulation}": "set train.accumulation = 1 and a larger train.batch_size",
        "train.pipelined": "set train.pipelined = false and train.accumulation = 1",
        "prior preservation": "leave prior.folder and prior.prompt out",
    }
    asked = (config.clip_norm > 0, config.accumulation > 1, config.pipelined, prior)
    found = [pair for pair, is_asked in zip(refused.items(), asked, strict=True) if is_asked]
    if found:
        raise UserError(
            f"optim.fused_backward applies each gradient before the others are there, so it does not go with "
            f"{' or '.join(what for what, _ in found)}: {'; '.join(remedy for _, remedy in found)}; or set optim.fused_backward = false"
        )


def check_swap(counts: Sequence[int], method: str, optim: OptimConfig) -> None:
    """Refuse to stream trained weights while a step needs them all at once, before a model is there.

    Args:
        counts: `train.swap_blocks`.
        method: `adapter.method`.
        optim: A section of the configuration.

    Raises:
        UserError: With what to set instead.
    """
    if not any(counts) or method != "full":
        return
    where = f"train.swap_blocks = {list(counts)} with adapter.method = full streams trained weights"
    if not optim.fused_backward:
        raise UserError(
            f"{where}, which have to be updated while they are there: set optim.fused_backward = true (it needs train.clip_norm = 0 "
            "and train.accumulation = 1), or leave train.swap_blocks out, or divide the model with train.devices"
        )
    if not optim.kind.streams:
        raise UserError(
            f"{where} and what the optimizer keeps of them, which optim.name = {optim.name} cannot; "
            f"use {', '.join(optimizers_that(lambda kind: kind.streams))}"
        )


@runtime_checkable
class TrainingData(Protocol):
    """Micro-batches in an order that is a function of their index."""

    def micro_batches(self, index: int) -> Sequence[MicroBatch]:
        """Micro-batch `index` of the run, counted from 0 over all optimizer steps, and what accompanies it."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run stands when the loop ends."""

    step: int
    """Optimizer steps done."""
    finished: bool
    """False if a signal ended it before `train.steps`."""
    held_out_before: float | None
    """Held-out loss before the first step of the run, however often it was resumed."""
    held_out: float | None
    """Held-out loss when last measured."""
    held_out_interval: tuple[float, float] | None
    """Its 95 % interval, as `validation.py` defines it; None with clips of fewer than two files, or before the first step."""
    save: Path | None
    """The newest save."""


def train(
    model: Any,
    run: Engine,
    spec: ModelSpec,
    data: TrainingData,
    trainable: Mapping[str, nn.Parameter],
    *,
    config: TrainConfig,
    flow: FlowConfig,
    optim: OptimConfig,
    ema: EMAConfig,
    save: SaveConfig,
    held_out: HeldOutConfig,
    log: LogConfig,
    folder: Path,
    held_out_clips: MicroBatch | None = None,
    held_out_files: Sequence[str] = (),
    on_save: Callable[[int], None] = lambda step: None,
    on_finish: Callable[[int], None] = lambda step: None,
    on_preview: Callable[[int], None] = lambda step: None,
    preview_steps: int = 0,
    previews_wait: bool = False,
    swap: BlockSwap | None = None,
    matmul: torch.dtype = torch.float32,
    progress: Progress | None = None,
    warn: Callable[[str], None] = _LOGGER.warning,
) -> TrainResult:
    """Train until `config.steps`, continuing the run in `folder` to the bit if there is one.

    Args:
        model: The staged model, on its devices.
        run: The engine for its forward.
        spec: The model's spec.
        data: Gives the micro-batches.
        trainable: The parameters to train, by name; no two names share one.
        config, flow, optim, ema, save, held_out, log: Sections of the configuration.
        folder: The run folder: state/, metrics.jsonl, tensorboard/, and failure-step-N.json if a loss is not finite.
        held_out_clips: What the held-out loss is measured on; None measures nothing.
        held_out_files: The file that each of these is of; empty: each is of its own.
        on_save: Called with the step after each save, while the parameters are those to export.
        on_finish: Called with the step when all steps are done, now or before, while the parameters are those to export.
        on_preview: Called with the step before training and every `preview_steps` steps but the last, while the parameters are
            those to look at. It may take no random number that training takes.
        preview_steps: Optimizer steps between two previews; 0 for none.
        previews_wait: Whether `on_preview` only keeps what is to be drawn, so that a signal need not come before it.
        swap: What streams weights of the model, as the engine has it.
        matmul: What the blocks multiply in: activations near its largest number are warned of.
        progress: Display to advance by steps.
        warn: Called with one line for a save that is passed over, and where activations drift.

    Returns:
        How the run stands. SIGINT and SIGTERM end it after the current step, with a save.

    Raises:
        UserError: If a loss, gradient or held-out loss is not finite (the last save is untouched), or a save cannot be
            written or does not fit.
    """
    check_fused_backward(config, optim)
    progress = progress or SilentProgress()
    trained = Trained(model, trainable, optim, ema, swap)
    path = latest(folder / "state", warn)
    start, course = 0, Course(files=held_out_files)
    seen: Mapping[str, float] = {}
    if path is not None:
        state = load_state(path)
        trained.restore(state, path)
        start, course = state.step, Course(state.values, held_out_files)
        seen = state.values.get("sentinels", {})
    drift = resumed(torch.finfo(matmul).max, warn, seen)
    devices = {parameter.device for parameter in model.parameters()}
    restart_peak(devices)
    model.train()
    progress.advance(float(start))

    with Interrupts() as interrupts, MetricsLog(folder, log, start_step=start) as metrics:

        def measure(step: int) -> float | None:
            if held_out_clips is None:
                return None
            with trained.used():
                loss = held_out_loss(
                    model, run, spec, held_out_clips.ids, held_out_clips.items, held_out.sigmas, flow.guidance
                )
            if (broken := loss.broken()) is not None:
                sigma, place = broken
                raise UserError(_cannot_measure(step, held_out_clips.ids[place], sigma, path))
            metrics.write(step, course.take(loss, first=step == 0))
            progress.update(held_out=loss.mean)
            return loss.mean

        def save_all(step: int, loss: float | None) -> Path:
            values = {**course.state(), "sentinels": drift.first}
            written = save_state(folder / "state", trained.state(step, loss, values), save)
            with trained.used():
                on_save(step)
            return written

        def preview(step: int) -> None:
            if preview_steps and step % preview_steps == 0 and step < config.steps:
                with trained.used():
                    on_preview(step)

        saved_at, done = time.monotonic(), start
        if start == 0 and config.steps:
            measure(0)
            preview(0)
        for step in range(start, config.steps):
            began = time.perf_counter()
            first = step * config.accumulation
            batches = [batch for micro in range(config.accumulation) for batch in data.micro_batches(first + micro)]
            lr = learning_rate(step, optim, config.steps)
            looks = config.sentinels and (step == 0 or (step + 1) % config.sentinels == 0)
            watch = Watch() if looks else None
            try:
                with counted_calls(AttentionCalls() if step == start else None):
                    result = training_step(
                        model, run, spec, batches, trained.optimizer,
                        step=step, lr=lr, seed=config.seed, flow=flow, clip_norm=config.clip_norm, pipelined=config.pipelined,
                        watch=watch,
                    )  # fmt: skip
            except NonFiniteLoss as error:
                raise _failure(error, folder, lr, path) from error
            trained.optimizer.zero_grad()  # measuring, saving and sampling need the memory, not the gradients
            done = step + 1
            if watch is not None and watch.reading is not None:
                metrics.write(done, drift.take(done, watch.reading))
            trained.average.update(done)
            tokens = sum(spec.training.num_tokens(item) for batch in batches for item in batch.items)
            numbers = _numbers(result, lr, time.perf_counter() - began, tokens, devices)
            progress.advance(1.0)
            progress.update(**numbers)
            if metrics.due(done):
                metrics.write(done, numbers)

            last = done == config.steps
            saving = last or save.due(done, time.monotonic() - saved_at)
            loss = measure(done) if last or held_out.due(done, saving=saving) else None
            if saving:
                path, saved_at = save_all(done, loss), time.monotonic()
            if interrupts.requested:
                path = path if saving else save_all(done, loss)
                if previews_wait:
                    preview(done)
                break
            preview(done)

    if done >= config.steps:
        with trained.used():
            on_finish(done)
    return TrainResult(
        step=done, finished=done >= config.steps, held_out_before=course.before, held_out=course.last,
        held_out_interval=course.interval, save=path,
    )  # fmt: skip


def _numbers(
    result: StepResult, lr: float, seconds: float, tokens: int, devices: Collection[torch.device]
) -> dict[str, float]:
    """What is reported of a step; seconds include reading its data, but no measuring and saving."""
    return {
        "loss": result.loss,
        "lr": lr,
        "grad_norm": result.grad_norm,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "peak_memory_bytes": peak_memory_bytes(devices),
    }


def _cannot_measure(step: int, clip: str, sigma: float, save: Path | None) -> str:
    """The line for a held-out loss that is not finite."""
    where = f"is not finite at held-out clip {clip}, noise level {sigma:g}"
    if step == 0:
        return (
            f"before training, the loss {where}: the weights or that clip are damaged; replace them, or remove the clip"
        )
    remedy = (
        f"the last save is {save}: lower optim.lr, and go on from there" if save else "nothing is saved: lower optim.lr"
    )
    return f"the loss after step {step} {where}; {remedy}"


def _failure(error: NonFiniteLoss, folder: Path, lr: float, save: Path | None) -> UserError:
    """Write the evidence of a loss that is not finite, and say where it is."""
    file = folder / f"failure-step-{error.evidence['step'] + 1:06d}.json"
    write_text(file, json.dumps({**error.evidence, "lr": lr}, indent=1, allow_nan=False))
    return UserError(
        f"{error}; evidence is in {file}, the last save is {save or 'none'}: look at the samples it names, "
        f"or lower optim.lr ({lr:g})"
    )
