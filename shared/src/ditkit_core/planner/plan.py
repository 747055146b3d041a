"""`train --plan`: what a run will hold on each device, before anything is loaded or written."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ditkit_core.adapters.inject import AdapterConfig
from ditkit_core.adapters.read import config_from_file, open_adapter
from ditkit_core.data.buckets import bucket_sizes
from ditkit_core.data.dataset import Sample
from ditkit_core.engine.ac_policies import Full, Policy
from ditkit_core.engine.ac_schedule import ACSchedule
from ditkit_core.engine.placement import Placement
from ditkit_core.errors import UserError
from ditkit_core.io.console import say
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import StagedModel
from ditkit_core.planner import gpus as hardware
from ditkit_core.planner.ac_budget import Task, choose, limited
from ditkit_core.planner.auxiliary import CompanionRow, Size
from ditkit_core.planner.beside_training import beside_training, class_pictures_to_draw, has_data
from ditkit_core.planner.memory import Budget, DevicePlan, Division, compose, on_host
from ditkit_core.planner.partition import budgets_here, budgets_of, host_limit, place, place_on
from ditkit_core.planner.profiler import Job, Profile, profile
from ditkit_core.planner.reduced_model import thinned
from ditkit_core.planner.report import Report
from ditkit_core.planner.stage_costs import mixed
from ditkit_core.planner.step_time import Workload, both_orders, step_seconds
from ditkit_core.run.checks import check as check_run
from ditkit_core.run.checks import check_settings, check_training
from ditkit_core.run.expert_runs import notes_on, resident
from ditkit_core.run.prepare import arch_here, build_on_meta
from ditkit_core.run.run import Run, with_config
from ditkit_core.sampling.prompts import Shape, shape_of
from ditkit_core.weights.quantize import check_scaled


def make_report(run: Run, gpus: str = "", host: str = "") -> Report:
    """Plan a run.

    Args:
        run: The run.
        gpus: The cards to plan for; empty for the devices that the run would take here.
        host: What streamed weights may take on the host; empty for what is free here, or any amount with `gpus`.
    """
    check(run, here=not gpus)
    return report_of(run, gpus, host)


def report_of(
    run: Run,
    gpus: str = "",
    host: str = "",
    samples: Sequence[Sample] | None = None,
    class_pictures: Sequence[Sample] | None = None,
) -> Report:
    """The same of a run that was checked.

    Args:
        run, gpus, host: As for `make_report`.
        samples: What it trains on, if that is known already; None looks at the dataset.
        class_pictures: The same of those of prior preservation.
    """
    notes = (*notes_on(run), *_notes(run))
    run = as_held(resident(run))
    targets = _targets(run, gpus, host)
    preset, arch = arch_here(run.spec, run.config.model)
    adapter, bucket = _adapter(run, arch), largest_bucket(run, arch, samples, class_pictures)
    config, micro_batches, pipelined = run.config, run.config.micro_batches, run.config.train.pipelined
    limit = host_limit(host, here=not gpus) if targets.kind == "cuda" else None  # on a CPU the host is the device
    model = _divisible(run, arch, adapter, targets)
    divided, found = _divided(run, _job(run, arch, adapter, bucket, kind=targets.kind), targets, model, limit)
    division = divided.division
    plans = compose(found, division, targets.budgets, micro_batches=micro_batches, pipelined=pipelined)
    estimate = orders = None
    if targets.cards:
        work = Workload(
            micro_batches=micro_batches, pipelined=pipelined, fp32=run.precision.matmul == torch.float32,
            quantize=config.base.quantize,
        )  # fmt: skip
        estimate = step_seconds(found, division, targets.cards, work)
        orders = both_orders(found, division, targets.cards, work)
    stages = (found.embed, *found.blocks, found.head)
    streamed = on_host(found, division.streamed)
    flops = micro_batches * sum(stage.flops_forward + stage.flops_backward for stage in stages)
    return Report(
        model=f"{run.spec.name} {preset}".strip(),
        policy=str(divided.schedule),
        chosen=divided.chosen,
        quantize=config.base.quantize,
        bucket=bucket.described(),
        tokens=sum(map(run.spec.training.num_tokens, bucket.items)),
        micro_batches=micro_batches,
        pipelined=pipelined,
        devices=plans,
        beside=beside_training(
            run,
            arch,
            adapter,
            bucket.shapes,
            plans,
            gpus=bool(gpus),
            samples=samples,
            streamed=streamed,
            class_shapes=bucket.class_shapes,
        ),
        previews=bool(config.sample.every_steps and not config.sample.device),
        division=division,
        host=streamed,
        host_limit=limit,
        flops=flops,
        seconds=estimate.seconds if estimate else None,
        rates=tuple(
            dict.fromkeys(
                f"{card.name}: {card.bf16_flops / 1e12:.0f} TFLOP/s in bf16 ({card.source})" for card in targets.cards
            )
        ),
        is_cuda=targets.kind == "cuda",
        orders=orders,
        notes=notes,
    )


def check(run: Run, *, here: bool) -> None:
    """Refuse what the run itself would, before anything is planned.

    Args:
        run: The run.
        here: Whether it is planned for the devices of this machine.
    """
    if here:
        check_run(run)
    else:
        check_settings(run)
    check_training(run, here=here)


def beside_of(run: Run, devices: Sequence[DevicePlan], *, gpus: bool, streamed: int) -> tuple[CompanionRow, ...]:
    """What encoding and drawing hold beside these steps, of a run that is configured as they are."""
    run = as_held(resident(run))
    arch = arch_here(run.spec, run.config.model)[1]
    adapter = _adapter(run, arch)
    bucket = largest_bucket(run, arch)
    return beside_training(
        run, arch, adapter, bucket.shapes, devices, gpus=gpus, streamed=streamed, class_shapes=bucket.class_shapes
    )


def as_held(run: Run) -> Run:
    """The run with `base.quantize` as its file makes it: matrices that the file has in scaled 8 bits stay so if nothing else is asked.

    Raises:
        UserError: If such weights are to be trained.
    """
    config = run.config
    if config.base.quantize != "none" or run.stored_as == "none":
        return run
    check_scaled(str(config.model.here(run.part)), config.adapter.method)
    return with_config(run, replace(config, base=replace(config.base, quantize="fp8")))


def _notes(run: Run) -> Iterator[str]:
    config = run.config
    if config.train.attention != "sdpa":
        yield f"train.attention = {config.train.attention}: planned is what sdpa's kernels hold, which others may not"
    if config.train.compile:
        yield f"train.compile = {config.train.compile}: planned is what eager blocks hold and take, of which compiled ones differ"
    if config.base.quantize == "none" and run.stored_as == "fp8":
        yield f"{config.model.here(run.part)} is in scaled 8 bits: planned as it is held, like base.quantize = fp8"


@dataclass(frozen=True, kw_only=True)
class _Targets:
    """What is planned for."""

    kind: str
    devices: tuple[torch.device, ...]
    budgets: tuple[Budget, ...]
    cards: tuple[hardware.Card, ...] = ()


def _targets(run: Run, gpus: str, host: str) -> _Targets:
    reserve = run.config.train.reserve
    if not gpus and run.devices[0].type == "cpu":
        if host:
            raise UserError(
                f"--host {host} is memory for weights that are streamed to GPUs, and this run is planned for the CPU; leave it out, "
                "or say for which cards: --gpus 24GiB"
            )
        return _Targets(kind="cpu", devices=run.devices, budgets=budgets_here(run.devices, reserve))
    cards = hardware.parse_gpus(gpus) if gpus else hardware.cards_here(run.devices)
    devices = _named(run, len(cards)) if gpus else run.devices
    cards = hardware.keeping_reserves(cards, reserve)
    return _Targets(kind="cuda", devices=devices, budgets=budgets_of(cards), cards=cards)


def _named(run: Run, count: int) -> tuple[torch.device, ...]:
    """Cards that need not be here, under the names that the configuration has for them, which policies may be given by."""
    names = run.config.train.devices
    if len(names) != count or not all(name.startswith("cuda:") for name in names):
        names = tuple(f"cuda:{index}" for index in range(count))
    return tuple(map(torch.device, names))


def _adapter(run: Run, arch: Any) -> AdapterConfig:
    """As configured, with what an `adapter.init` file decides."""
    adapter = run.config.adapter
    if not adapter.init or adapter.method == "full":
        return adapter
    model = build_on_meta(run.spec, arch, Precision())
    linears = {name: tuple(m.weight.shape) for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    return config_from_file(
        adapter, open_adapter(Path(adapter.init).expanduser(), run.spec.architecture.names, linears)
    )[0]


def _divisible(run: Run, arch: Any, adapter: AdapterConfig, targets: _Targets) -> Any:
    """The model as it is divided: CPUs compare what is trained of it too."""
    if targets.kind == "cuda" or len(targets.budgets) == 1:
        return build_on_meta(run.spec, arch, run.precision)
    return thinned(run.spec, arch, run.precision, adapter, quantize=run.config.base.quantize, of_each=None).whole


@dataclass(frozen=True, kw_only=True)
class Divided:
    """A step on its devices."""

    schedule: ACSchedule
    """`train.checkpointing` as the engine takes it: of a plan, budgets and devices resolved to blocks."""
    placement: Placement
    chosen: str = ""
    """One line on what a budget came to."""

    @property
    def division(self) -> Division:
        """As a plan takes it."""
        order = list(dict.fromkeys(self.placement.blocks))
        return Division(devices=tuple(map(order.index, self.placement.blocks)), streamed=self.placement.streamed)


def _divided(run: Run, job: Job, targets: _Targets, model: StagedModel, host: int | None) -> tuple[Divided, Profile]:
    """Which device runs what, and which block has which policy, with what the stages then hold: the same for the run and for its plan.

    A budget fills devices that are divided as full checkpointing divides them, which is what is left where bytes are short.
    """
    schedule = job.schedule

    @functools.cache
    def of(policy: Policy) -> Profile:
        return profile(replace(job, policy=ACSchedule.everywhere(policy)))

    def under(policies: Sequence[Policy]) -> Profile:
        return mixed([of(policy) for policy in policies])

    def placed(profiles: Callable[[], Profile | Sequence[Profile]]) -> Placement:
        compared = targets.kind == "cuda" and len(targets.budgets) > 1 and not run.config.train.cuts
        return place_on(run, model, targets.devices, targets.budgets, profiles() if compared else None)

    count = len(model.blocks())
    if schedule.budget is not None:
        limits = limited(targets.budgets, schedule.budget)
        divided = Divided(schedule=schedule, placement=placed(lambda: of(Full())))
        if host is not None and (streamed := divided.placement.streamed):
            host = max(0, host - on_host(of(Full()), streamed))
        task = Task(
            profile_of=of, division=divided.division, budgets=limits, micro_batches=run.config.micro_batches,
            pipelined=run.config.train.pipelined, host=host, can_offload=targets.kind == "cuda",
        )  # fmt: skip
        choice = choose(task)
        return replace(divided, schedule=choice.schedule, chosen=choice.described()), under(choice.policies)
    if not schedule.devices:
        found = under(schedule.policies([None] * count))
        return Divided(schedule=schedule, placement=placed(lambda: found)), found
    alone = [schedule.alone_on(device) for device in targets.devices]
    placement = placed(lambda: [under(each.policies([None] * count)) for each in alone])
    policies = schedule.policies(placement.blocks)
    return Divided(schedule=ACSchedule.of_blocks(policies), placement=placement), under(policies)


def divided_for_training(run: Run, model: StagedModel, arch: Any, adapter: AdapterConfig) -> Divided:
    """Where a run trains each stage, and under which policy: as its plan says, over several GPUs without `train.cuts` by what they hold.

    CPUs are divided by weights alone, as all devices are for commands that do not train and keep no activations.

    Args:
        run: The run.
        model: With its adapters; `meta` will do.
        arch: Its architecture.
        adapter: What is trained, with what an `adapter.init` file decided.

    Raises:
        UserError: If `train.cuts` or `train.swap_blocks` do not divide the model, the devices cannot be compared, or a budget cannot be
            kept.
    """
    has_budget = run.config.train.schedule.budget is not None
    compared = len(run.devices) > 1 and not run.config.train.cuts and all(each.type == "cuda" for each in run.devices)
    if not compared and not has_budget:
        placement = place(run, model)
        return Divided(schedule=run.config.train.schedule, placement=placement)
    began = time.monotonic()
    kind = run.devices[0].type
    targets = _Targets(kind=kind, devices=run.devices, budgets=budgets_here(run.devices, run.config.train.reserve))
    job = _job(as_held(run), arch, adapter, largest_bucket(run, arch), kind=kind)
    divided, _ = _divided(run, job, targets, model, host_limit("", here=True) if kind == "cuda" else None)
    if divided.chosen:
        say(divided.chosen)
    if compared:
        say(f"cuts chosen by what a step holds on each device, planned in {time.monotonic() - began:.0f} s")
    return divided


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The micro-batch that a plan is made for."""

    size: Size
    references: tuple[tuple[int, int], ...]
    items: list[dict[str, Tensor]]
    shapes: tuple[Shape, ...]
    """All that the data can give."""
    class_shapes: tuple[Shape, ...]
    """The same of the class pictures of prior preservation."""
    source: str
    """Where the size is from."""

    def described(self) -> str:
        """In a few words."""
        frames, height, width = self.size
        edited = f" with references {', '.join(f'{h}x{w}' for h, w in self.references)}" if self.references else ""
        what = f"{frames} frames of {height}x{width}" if frames > 1 else f"{height}x{width}"
        return f"{len(self.items)} x {what}{edited} ({self.source})"


def largest_bucket(
    run: Run, arch: Any, samples: Sequence[Sample] | None = None, class_pictures: Sequence[Sample] | None = None
) -> Bucket:
    """The micro-batch with the most tokens that the data can give: of the dataset if it is here, else of the configured size.

    Each micro-batch of the data is followed by as many class pictures, of which those of one shape go through the model together: the
    largest of all counts.

    Args:
        run: The run.
        arch: Its architecture.
        samples: The dataset's, if they are known already.
        class_pictures: Those of prior preservation, if they are known already.
    """
    data, train = run.config.data, run.config.train
    shapes: set[Shape] = set()
    if samples is None and has_data(run):
        samples = run.data.dataset.samples
    if samples is not None:
        shapes = _shapes(run, samples)
        source = f"the largest in {', '.join(data.folders or (data.folder,))}"
    elif data.buckets:
        step = data.bucket_step or 4 * run.spec.data.size_step
        buckets = bucket_sizes(data.height, data.width, step=step, max_aspect=data.max_aspect)
        shapes = {((data.frames, height, width), ()) for height, width in buckets}
        source = "the largest bucket of data.height and data.width"
    else:
        shapes = {((data.frames, data.height, data.width), ())}
        source = "data.frames, height and width"

    def batch(shape: Shape) -> list[dict[str, Tensor]]:
        with torch.device("meta"):
            item = run.spec.training.empty_item(arch, *shape)
        count = (
            max(1, train.batch_tokens // run.spec.training.num_tokens(item)) if train.batch_tokens else train.batch_size
        )
        return [item] * count

    of_class = _class_shapes(run, class_pictures)
    batches = {shape: batch(shape) for shape in sorted(shapes)}
    most = max(map(len, batches.values()))
    batches.update((shape, batch(shape)[:most]) for shape in sorted(of_class - shapes))
    largest = max(batches, key=lambda shape: sum(map(run.spec.training.num_tokens, batches[shape])))
    if largest not in shapes:
        source = "the largest of the class pictures, which is larger than the data's"
    return Bucket(
        size=largest[0], references=largest[1], items=batches[largest], shapes=tuple(sorted(shapes)), source=source,
        class_shapes=tuple(sorted(of_class)),
    )  # fmt: skip


def _shapes(run: Run, samples: Sequence[Sample]) -> set[Shape]:
    return {
        shape_of(sample, sample.controls, run.auxiliary.columns, run.spec.data.reference_size) for sample in samples
    }


def _class_shapes(run: Run, class_pictures: Sequence[Sample] | None) -> set[Shape]:
    """Of the class pictures that are there, if any, and of those that are still to be drawn."""
    if class_pictures is None:
        config = run.data.prior_data if run.data.prior_folder.is_dir() else None
        class_pictures = [] if config is None else run.data.scanned(config, "prior.folder").samples
    return {*_shapes(run, class_pictures), *class_pictures_to_draw(run).shapes}


def job_for(run: Run, *, kind: str = "cuda") -> Job:
    """The step of a run's largest micro-batch, as configured, on a kind of device."""
    run = as_held(resident(run))
    arch = arch_here(run.spec, run.config.model)[1]
    return _job(run, arch, _adapter(run, arch), largest_bucket(run, arch), kind=kind)


def _job(run: Run, arch: Any, adapter: AdapterConfig, bucket: Bucket, *, kind: str) -> Job:
    config = run.config
    return Job(
        spec=run.spec, arch=arch, adapter=adapter, precision=run.precision, batch=bucket.items,
        policy=config.train.schedule, optim=config.optim, ema=config.ema, flow=config.flow,
        clip_norm=config.train.clip_norm, quantize=config.base.quantize, micro_batches=run.config.micro_batches, kind=kind,
    )  # fmt: skip
