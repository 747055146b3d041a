"""The doctor's plan of a run's memory, and its trial: two real steps on the largest micro-batch,
with a save that is read back.

Two steps, because the second matrix of a new adapter is zero, so that no gradient reaches the first
one: it only gets a gradient in the second step, after the second matrix was updated. Nothing is
kept: the model ends with the process, the save with its temporary folder.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ditkit_core.config.sizes import gib
from ditkit_core.data.dataset import Sample
from ditkit_core.diagnostics.doctor.dataset import (
    ExaminedDataset,
    empty_item_of,
    refusal,
    shape_for,
)
from ditkit_core.diagnostics.doctor.findings import (
    DeviceRow,
    Finding,
    MemoryPlan,
    Severity,
    StepRow,
    listed,
)
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.loader import BatchSize, TrainDataLoader
from ditkit_core.errors import UserError
from ditkit_core.io.console import warn
from ditkit_core.io.memory import is_out_of_memory, peak_memory_bytes, restart_peak
from ditkit_core.loading.model import Model
from ditkit_core.loading.weights import engine_for
from ditkit_core.models.paths import nothing_fetched
from ditkit_core.models.protocol import unused_layers
from ditkit_core.nn.context import AttentionCalls, counted_calls
from ditkit_core.planner.report import PlanReport
from ditkit_core.run.checks import check_components, check_item, check_items
from ditkit_core.run.context import RunContext
from ditkit_core.run.data import RunData
from ditkit_core.run.encoding import encode_samples
from ditkit_core.run.jobs import TrainingJob
from ditkit_core.run.model import build_model, load_model
from ditkit_core.run.plans.plan import report_of
from ditkit_core.run.plans.planned_step import place_run
from ditkit_core.training.checkpoint import latest, load_state, save_state
from ditkit_core.training.config import SaveConfig
from ditkit_core.training.losses import NonFiniteLoss
from ditkit_core.training.tensor_stats import StatsRecorder
from ditkit_core.training.train_state import TrainState
from ditkit_core.training.train_step import StepContext, training_step

STEPS = 2
LARGEST_SAVE_BYTES = 4 * 2**30
"""A larger save is skipped: a full fine-tune's takes minutes, and disk space that may not be
free."""


_REMEDY = "--fit finds settings that fit, and --plan prints the memory of each device"


def try_step(job: TrainingJob, examined: ExaminedDataset) -> tuple[StepRow | None, list[Finding]]:
    """Train two steps on the largest micro-batch, which is encoded if necessary. Nothing is
    downloaded.

    Args:
        examined: Its data: one sample of each shape is tried on the model without weights, then the
            largest micro-batch is trained.

    Returns:
        The measurements, None if the trial could not run to its end, and the findings.
    """
    run, model = job.run, job.run.config.model
    parts = [run.component, "vae", "text_encoder", "tokenizer"]
    parts += () if run.arch is None else run.spec.auxiliary.components(run.arch)
    if elsewhere := [part for part in parts if model.is_to_be_fetched(part)]:
        finding = Finding(
            "D20",
            f"model ({', '.join(elsewhere)})",
            "not tried: not all files of this hub id are in the local cache, and a check downloads "
            "nothing",
            f"fetch them with {model.fetch_commands(elsewhere)} and check again, or set model.base "
            f"to the folder of a download",
        )
        return None, [finding]
    try:
        with nothing_fetched():
            return _try(job, examined)
    except UserError as error:
        return None, [refusal(error)]
    except NonFiniteLoss as error:
        remedy = "look at these samples, lower optim.lr, or set model.dtype to bf16 or fp32"
        return None, [Finding("D22", "", str(error), remedy)]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        largest = examined.largest
        bucket = f"{len(largest)} x {largest[0].frames} frames of {largest[0].height} x {largest[0].width}"
        remedy = "--plan prints the memory of each device, and --fit finds settings that fit"
        return None, [Finding("D25", bucket, "memory ran out in the largest micro-batch", remedy)]


def _try(job: TrainingJob, examined: ExaminedDataset) -> tuple[StepRow, list[Finding]]:
    began, unloaded = time.monotonic(), build_model(job.run)
    run = job.run.with_arch(unloaded.origin.arch)
    config = run.config.train
    if run.trains_several:
        raise UserError(
            "the weights show that this model has several experts; name it with model.preset"
        )
    placement = place_run(run, unloaded, training=True)
    encoded = _encoded(run, unloaded, examined)
    prepared = load_model(unloaded, placement, config.seed)
    data = TrainDataLoader(
        encoded,
        seed=config.seed,
        batch_size=BatchSize(samples=len(encoded)),
        caption_dropout=config.caption_dropout,
        # without a condition, the parameters that process it would get no gradient
        control_dropout=0.0,
    )
    # A pipelined step keeps all its micro-batches in memory at once; else one at a time shows the
    # same peak.
    batches = [
        data.micro_batch(micro) for micro in range(config.accumulation if config.pipelined else 1)
    ]
    optim, ema = run.config.optim, run.config.ema
    trained = TrainState(
        prepared.module, prepared.trainable, optim, ema, prepared.streamer, kernels=config.kernels
    )
    restart_peak(devices := {parameter.device for parameter in prepared.module.parameters()})
    prepared.module.train()
    engine = engine_for(prepared, run.execution, placement.checkpointing)
    losses, norms = [], []
    gradients: dict[str, list[Tensor]] = defaultdict(list)
    for step in range(STEPS):
        with counted_calls(AttentionCalls() if step == 0 else None):
            result = training_step(
                Model(prepared.module, engine, run.spec),
                batches,
                trained.optimizer,
                StepContext(
                    step=step, seed=config.seed, flow=run.config.flow, pipelined=config.pipelined
                ),
                lr=run.config.optim.lr,
                clip_norm=config.clip_norm,
                watch=_GradientRecorder(gradients),
            )
        trained.optimizer.zero_grad()
        losses.append(result.loss)
        norms.append(result.grad_norm)
    # An adapter of usual targets is on layers that nothing reads, too, as in other programs' files;
    # of these alone it would train nothing.
    unused = tuple(f"{layer}." for layer in unused_layers(prepared.module))
    read = [name for name in trained.parameters if not name.startswith(unused)]
    without_gradient = tuple(
        name for name in read or trained.parameters if not any(map(bool, gradients.get(name, ())))
    )
    peak = float(peak_memory_bytes(devices))  # before the save, which is no part of a step
    reloaded = _reloads(trained)
    first = examined.largest[0]
    row = StepRow(
        expert=run.expert.name if run.expert else "",
        frames=first.frames,
        height=first.height,
        width=first.width,
        samples=tuple(batches[0].ids),
        tokens=sum(map(run.spec.training.num_tokens, batches[0].items)),
        losses=tuple(losses),
        grad_norms=tuple(norms),
        parameters=len(trained.parameters),
        without_gradient=without_gradient,
        reloaded=reloaded,
        peak_bytes=peak,
        seconds=time.monotonic() - began,
    )
    return row, list(_findings(row, prepared.origin.adapter.method))


def _encoded(run: RunContext, unloaded: Model, examined: ExaminedDataset) -> list[EncodedSample]:
    """The largest micro-batch, encoded, after a look at what the model refuses."""
    _check_shapes(run.data, unloaded, [*examined.samples, *examined.class_images])
    check_components(run, examined.samples)
    encoded = encode_samples(run.data, examined.largest, run.data.fps)
    wanted = len(examined.largest)
    if len(encoded) < wanted:
        raise UserError(
            f"{wanted - len(encoded)} of {wanted} samples could not be encoded; see the warnings"
        )
    check_items(run.spec, unloaded.module, encoded)
    return encoded


def _check_shapes(data: RunData, unloaded: Model, samples: Sequence[Sample]) -> None:
    """Try one sample of each shape on the model without weights: a shape that it refuses is found
    before anything is encoded."""
    for shape, sample in {shape_for(data, sample): sample for sample in reversed(samples)}.items():
        try:
            check_item(
                data.spec, unloaded.module, empty_item_of(data.spec, unloaded.origin.arch, shape)
            )
        except UserError as error:
            raise error.at(sample.id) from error


class _GradientRecorder(StatsRecorder):
    """Records for each parameter whether its gradients, one per step, had a value other than
    zero."""

    def __init__(self, flags: dict[str, list[Tensor]]):
        super().__init__()
        self._gradient_flags = flags

    def gradient(self, name: str, gradient: Tensor) -> None:
        """Record a parameter's gradient before clipping, as a flag on its device: reading it here
        would wait for the GPU."""
        super().gradient(name, gradient)
        self._gradient_flags[name].append(gradient.detach().any())


def _reloads(trained: TrainState) -> bool | None:
    """Whether a save is bitwise identical when read back, in the file and in the parameters; None
    if it is too large for a trial."""
    state = trained.state_dict()
    if (
        sum(tensor.nbytes for group in state.tensors.values() for tensor in group.values())
        > LARGEST_SAVE_BYTES
    ):
        return None
    with tempfile.TemporaryDirectory(prefix="ditkit-check-") as folder:
        save_path = save_state(Path(folder), state, SaveConfig())
        if latest(Path(folder), warn) != save_path:
            return False
        read = load_state(save_path)
        if not _equal(_flat(read.tensors), _flat(state.tensors)):
            return False
        values_before = {name: value.detach().clone() for name, value in trained.values.items()}
        # zeroed, so that a value that loading misses cannot look as if it had been loaded
        with torch.no_grad():
            for value in trained.values.values():
                value.zero_()
        trained.load_state_dict(read, save_path)
    return _equal({name: value.detach() for name, value in trained.values.items()}, values_before)


def _flat(groups: Mapping[str, Mapping[str, Tensor]]) -> dict[tuple[str, str], Tensor]:
    return {
        (group, name): tensor.detach().cpu()
        for group, tensors in groups.items()
        for name, tensor in tensors.items()
    }


def _equal(a: Mapping[Any, Tensor], b: Mapping[Any, Tensor]) -> bool:
    """Whether tensors of the same names are bitwise identical."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _findings(row: StepRow, method: str) -> Iterator[Finding]:
    """The findings of a trial."""
    if names := row.without_gradient:
        # Full fine-tuning may include parameters for inputs that this data does not have; an
        # adapter names its targets.
        severity: Severity = (
            "error" if method != "full" or len(names) == row.parameters else "warning"
        )
        count = f"{len(names)} of {row.parameters} trained parameters"
        observation = f"no gradient reaches {count}: training would not change them"
        remedy = "remove them from adapter.targets, or add the data that they process"
        yield Finding("D23", listed(names, 3), observation, remedy, severity=severity)
    if row.reloaded is False:
        observation = "the save differs when it is read back"
        remedy = "check the disk and the memory of this machine"
        yield Finding("D24", "a save of this run", observation, remedy)


def plan_memory(
    run: RunContext, samples: Sequence[Sample], class_images: Sequence[Sample]
) -> tuple[MemoryPlan, list[Finding]]:
    """Plan a run on the accelerators of this machine, as `--plan` does. Nothing is downloaded, and
    nothing is placed on a device.

    A plan that does not fit is only a warning: it is an estimate, and the trial of the largest
    micro-batch decides.

    Returns:
        The plan, and a finding for each device, encoder or sample that does not fit.
    """
    if run.devices[0].type == "cpu":
        return MemoryPlan(
            why_not="a run on the CPU shares memory with other programs; --plan prints its peak"
        ), []
    try:
        report = report_of(run, samples=samples, class_images=class_images)
    except UserError as error:
        return MemoryPlan(why_not=str(error)), []
    rows = tuple(
        DeviceRow(
            device=plan.budget.name,
            peak=plan.peak,
            reserve=plan.budget.reserve,
            total=plan.budget.total,
            fits=plan.fits,
        )
        for plan in report.devices
    )
    return MemoryPlan(batch=report.bucket, devices=rows, fits=report.fits), list(_shortages(report))


def _shortages(report: PlanReport) -> Iterator[Finding]:
    for plan in report.devices:
        if not plan.fits:
            yield _shortage(
                plan.budget.name,
                f"{report.bucket} needs {gib(plan.peak)} GiB according to the plan, and "
                f"{gib(plan.budget.available)} GiB are available",
            )
    for row in report.lacking:
        observation = (
            f"{row.stage}: {row.name} needs {gib(row.peak)} GiB according to the plan, "
            f"of {gib(row.available or 0)} GiB"
        )
        yield _shortage(row.device, observation, row.remedy)
    if report.host_missing:
        yield _shortage(
            "the host",
            f"{gib(report.host_missing)} GiB are missing for streamed weights and offloaded "
            f"activations",
        )


def _shortage(where: str, observation: str, remedy: str = "") -> Finding:
    remedy = f"{remedy}; or {_REMEDY}" if remedy else _REMEDY
    return Finding("D26", where, observation, remedy)
