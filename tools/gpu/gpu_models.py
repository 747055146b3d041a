"""Parts of tools/gpu/gpu_truth.py: training steps of models at their published sizes, with random
weights, next to diffusers' and to the plan.

    uv run tools/gpu/gpu_parts.py klein4b --device cuda --out rows.jsonl

A step is a micro-batch of one sample: forward, loss, backward, clipping, and the update of AdamW.
Weights are random, because a step takes the same time and memory with any. diffusers runs as its
training scripts do: its model in bf16 under autocast, a LoRA of peft in fp32 on the same layers,
gradient checkpointing, fused AdamW. Peaks are of all tensors, weights and optimizer included.
"""

import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import diffusers_models
import plan_truth
from device_clock import attempted, busy_and_span, launches, seconds
from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.inject import inject, trainable_parameters
from ditkit_core.encoding.loader import Batch
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.execution import Execution
from ditkit_core.io.memory import release_memory
from ditkit_core.loading.model import Model
from ditkit_core.models.precision import Precision, set_precision
from ditkit_core.models.spec import ModelSpec, build_on_meta
from ditkit_core.planner.gpus import GPU, gpus_here, parse_gpus
from ditkit_core.planner.memory import Budget, Partition, compose
from ditkit_core.planner.planned_step import StepJob
from ditkit_core.planner.profiler import profile
from ditkit_core.planner.step_time import step_seconds
from ditkit_core.planner.workload import Workload
from ditkit_core.training.config import EMAConfig, FlowConfig, TrainConfig
from ditkit_core.training.flow_matching import prepare
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.replay import replays_of
from ditkit_core.training.train_state import TrainState
from ditkit_core.training.train_step import StepContext, training_step
from gpu_cases import CASES, Case, Mode, described, small

Rows = Iterator[dict[str, Any]]
Step = Callable[[], float]
"""Takes a training step, and returns its loss."""
GIB = 2**30


def models(part: str, device: torch.device, tiny: bool) -> Rows:
    """The cases of a part, ours and diffusers'."""
    yield from steps_of_cases(CASES[part], device, tiny)


def steps_of_cases(cases: list[Case], device: torch.device, tiny: bool) -> Rows:
    """Steps of cases with the same model, ours and diffusers'."""
    if tiny:
        cases = [small(cases[0])]  # the others differ in their sizes alone
    gpu = gpus_here([device])[0] if device.type == "cuda" else parse_gpus("h100")[0]
    with planner(device) as plans:
        planned = {
            (case.name, mode): plans.submit(plan_of, case, mode, gpu, device.type, tiny)
            for case in cases
            for mode in case.modes
        }
        by_case = {
            case.name: {mode: planned[case.name, mode] for mode in case.modes} for case in cases
        }
        yield from attempted("ours", partial(_ours, cases, by_case, device, tiny))
        release_memory()  # for diffusers' model
        yield from attempted("diffusers", partial(_theirs, cases, device, tiny))


@contextmanager
def planner(device: torch.device) -> Iterator[Executor]:
    """Plans steps meanwhile: next to a GPU in a process of its own, which takes none of the time in
    which the host launches work."""
    pool: Executor
    if device.type == "cuda":
        pool = ProcessPoolExecutor(2, mp_context=get_context("spawn"), initializer=_without_gpu)
    else:
        pool = ThreadPoolExecutor(1)
    with pool:
        yield pool


def _without_gpu() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a context would take memory of the GPU
    torch.set_num_threads(1)


class Planned(NamedTuple):
    """The planner's answer."""

    peak: int
    seconds: float


def plan_of(case: Case, mode: Mode, gpu: GPU, kind: str, tiny: bool) -> Planned:
    """A plan of the step on a GPU."""
    spec, arch, adapter, item = described(case, tiny)
    job = StepJob(
        spec=spec,
        arch=arch,
        adapter=adapter,
        batch=[item],
        kind=kind,
        execution=Execution(
            checkpointing=mode.policy, kernels=mode.kernels, precision=mode.precision
        ),
    )
    work = Workload(
        execution=job.execution,
        cuda_graphs=mode.cuda_graphs,
        rounding=OptimConfig().rounding if case.method == "full" else "",
    )
    costs = profile(job)
    division = Partition(devices=(0,) * len(costs.blocks))
    (memory,) = compose(costs, division, [Budget(name="", total=2**50, rates=gpu)], work)
    return Planned(peak=memory.peak, seconds=step_seconds(costs, division, [gpu], work))


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model with its optimizer, and inputs of its steps."""

    spec: ModelSpec
    module: Any
    trained: TrainState
    batch: Batch


def build(case: Case, device: torch.device, tiny: bool) -> TrainedModel:
    """Our model with random weights, in the dtypes that loading gives, and a batch of random
    latents and conditions."""
    spec, arch, adapter, outline = described(case, tiny)
    precision = Precision(matmul=torch.bfloat16)
    module = build_on_meta(spec, arch, precision)
    inject(module, adapter, spec.adapters.targets)
    plan_truth.fill(module, spec, precision, device, swapped=False)
    kernels = "triton" if device.type == "cuda" else "torch"
    trained = TrainState(
        module, trainable_parameters(module), OptimConfig(), EMAConfig(), kernels=kernels
    )
    module.train()
    return TrainedModel(spec=spec, module=module, trained=trained, batch=random_batch(outline))


def random_batch(outline: Mapping[str, Tensor]) -> Batch:
    """One sample of random values."""
    torch.manual_seed(0)
    item = {name: torch.randn(tensor.shape).to(tensor.dtype) for name, tensor in outline.items()}
    return Batch(ids=["0"], items=[item])


def _note(line: str) -> None:
    """A line of the program, which gpu_truth.py lists as what Python warns of."""
    print(f"{__file__}:0: UserWarning: {line}", file=sys.stderr)


@contextmanager
def step_of(model: TrainedModel, mode: Mode) -> Iterator[Step]:
    """A training step as the loop takes it: the batch is prepared, and page-locked, before. Graphs
    are freed behind the block.

    The only function that knows how a step is replayed.
    """
    set_precision(model.module, mode.precision)
    engine = BlockEngine(policy=mode.policy, kernels=mode.kernels)
    there = Model(model.module, engine, model.spec, model.trained.optimizer.parameters)
    batch = prepare(model.spec, FlowConfig(), [model.batch], 0, seed=0, step=0)
    if next(model.module.parameters()).is_cuda:
        batch = batch.pinned()
    context = StepContext(step=0, seed=0, flow=FlowConfig(), prepared=lambda micro: batch)
    replays = None
    if mode.cuda_graphs != "off":
        train = TrainConfig(
            checkpointing=mode.policy, kernels=mode.kernels, cuda_graphs=mode.cuda_graphs
        )
        replays = replays_of(there, train, OptimConfig(), _note)
        context = replace(context, replays=replays)

    def step() -> float:
        return training_step(
            there, [model.batch], model.trained.optimizer, context, lr=1e-5, clip_norm=1.0
        ).loss

    try:
        yield step
    finally:
        if replays is not None:
            replays.free()


def _ours(
    cases: list[Case],
    planned: Mapping[str, Mapping[Mode, Future[Planned]]],
    device: torch.device,
    tiny: bool,
) -> Rows:
    model = build(cases[0], device, tiny)
    yield {"name": f"{cases[0].preset}, {cases[0].method}", **weights(model.module)}
    for case in cases:
        model = replace(model, batch=random_batch(described(case, tiny)[3]))
        for mode in case.modes:
            name = f"{case.name}, {mode}"
            labels = {"case": case.name, "trainer": "ditkit", **asdict(mode)}
            yield from attempted(
                name,
                partial(
                    _row,
                    {"name": name, **labels},
                    step_of(model, mode),
                    case,
                    device,
                    planned[case.name][mode],
                    _warm_up(mode),
                ),
            )


def weights(module: nn.Module) -> dict[str, Any]:
    """Columns with the size of a model, and what of it is trained."""
    parameters = list(module.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return {
        "trained": trained,
        "weights GiB": sum(parameter.nbytes for parameter in parameters) / GIB,
    }


def _row(
    labels: Mapping[str, Any],
    making: AbstractContextManager[Step],
    case: Case,
    device: torch.device,
    planned: Future[Planned] | None = None,
    warm_up: int = 1,
) -> Rows:
    """Times of a step, its peak, and what the plan says of both; of a step that cannot fit only the
    plan."""
    if (
        planned is not None
        and _may_not_fit(device)
        and planned.result().peak > torch.cuda.mem_get_info(device)[1]
    ):
        yield {
            **labels,
            "planned GiB": planned.result().peak / GIB,
            "value": "more than this GPU has",
        }
        return
    row = dict(labels)
    with making as step:
        row |= measured(step, case.repeats, device, warm_up)
        if case.with_launches:
            kernels = launches(step, device)
            row |= {"launches": len(kernels), "busy ms": busy_and_span(kernels)[0] / 1e3}
    if planned is not None:
        plan = planned.result()
        row |= {"planned GiB": plan.peak / GIB, "planned seconds": plan.seconds}
        if device.type == "cuda":
            ratio = plan.peak / GIB / row["peak GiB"]
            row |= {
                "planned / measured": ratio,
                "time planned / measured": plan.seconds / row["seconds"],
            }
            row["ok"] = row["ok"] and abs(ratio - 1) <= plan_truth.TOLERANCE
    yield row


def _warm_up(mode: Mode) -> int:
    """Steps before those that are timed: kernels are compiled in the first, graphs recorded in the
    second or third."""
    return 1 if mode.cuda_graphs == "off" else 3


def _may_not_fit(device: torch.device) -> bool:
    """Whether weights leave so little memory that it is worth to wait for a plan."""
    return (
        device.type == "cuda"
        and torch.cuda.memory_allocated(device) > torch.cuda.mem_get_info(device)[1] / 2
    )


def measured(step: Step, repeats: int, device: torch.device, warm_up: int = 1) -> dict[str, Any]:
    """The first step, then the median of those behind the warm-up and the fastest, and the peak of
    all."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    losses = list[float]()
    times = [seconds(lambda: losses.append(step()), device) for _ in range(warm_up + repeats)]
    timed = times[warm_up:]
    row: dict[str, Any] = {
        "seconds": statistics.median(timed), "fastest": min(timed), "steps": len(timed),
        "first step": times[0], "loss": losses[0],
        "ok": all(map(torch.isfinite, torch.tensor(losses))),
    }  # fmt: skip
    if on_gpu:
        row |= {
            "peak GiB": torch.cuda.max_memory_allocated(device) / GIB,
            "reserved GiB": torch.cuda.max_memory_reserved(device) / GIB,
        }
    return row


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A model of diffusers, and its prediction for random inputs of a size."""

    module: Any
    predict: Callable[[Mapping[str, Tensor]], Tensor]
    """From latents, text and target of a sample on the device."""


def _theirs(cases: list[Case], device: torch.device, tiny: bool) -> Rows:
    if not any(case.theirs for case in cases):
        return
    peer = their_model(cases[0], device, tiny)
    yield {"name": f"{cases[0].preset}, {cases[0].method}, diffusers", **weights(peer.module)}
    parameters = [parameter for parameter in peer.module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    for case in cases:
        inputs = {
            name: tensor.to(device)
            for name, tensor in random_batch(described(case, tiny)[3]).items[0].items()
        }
        inputs["target"] = torch.randn(inputs["latents"].shape, device=device)
        for policy in case.theirs:
            checkpoint = {
                "none": peer.module.disable_gradient_checkpointing,
                "full": peer.module.enable_gradient_checkpointing,
            }
            checkpoint[policy]()
            name = f"{case.name}, diffusers, {policy}"
            labels = {"case": case.name, "trainer": "diffusers", "policy": policy}
            step = partial(
                their_step, partial(peer.predict, inputs), inputs["target"], parameters, optimizer
            )
            yield from attempted(
                name, partial(_row, {"name": name, **labels}, nullcontext(step), case, device)
            )


def their_step(
    predict: Callable[[], Tensor],
    target: Tensor,
    parameters: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> float:
    """A training step as diffusers' scripts take it."""
    with torch.autocast(target.device.type, torch.bfloat16):
        prediction = predict()
    loss = (prediction.float() - target.unsqueeze(0)).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def their_model(case: Case, device: torch.device, tiny: bool) -> Peer:
    """diffusers' model in bf16 with random weights, and for a LoRA peft's on the layers that ours
    has."""
    spec, arch, adapter, _ = described(case, tiny)
    with device, diffusers_models.default_dtype(torch.bfloat16):
        module = {"wan": diffusers_models.wan, "flux2": diffusers_models.flux2}[case.family](arch)
    module.requires_grad_(False)
    for name, parameter in module.named_parameters():
        if set(module._keep_in_fp32_modules or ()) & set(name.split(".")):
            parameter.data = parameter.data.float()
    _add_lora(module, spec, arch, adapter, device)
    predict = _predict_wan if case.family == "wan" else _predict_flux2
    return Peer(module=module.train(), predict=partial(predict, module))


def _add_lora(
    module: Any, spec: ModelSpec, arch: Any, adapter: AdapterConfig, device: torch.device
) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    adapted = inject(build_on_meta(spec, arch, Precision()), adapter, spec.adapters.targets)
    names = (spec.architecture.names.from_native["diffusers"](f"{name}.weight") for name in adapted)
    targets = list(
        dict.fromkeys(part.name.removesuffix(".weight") for parts in names for part in parts)
    )
    inject_adapter_in_model(
        LoraConfig(r=adapter.rank, lora_alpha=adapter.rank, target_modules=targets), module
    )
    for name, parameter in module.named_parameters():
        if "lora_" in name:
            parameter.data = 0.02 * torch.randn(parameter.shape, device=device)


def _predict_wan(module: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    timestep = torch.tensor([731.0], device=inputs["latents"].device)
    latents, text = (inputs[name].bfloat16()[None] for name in ("latents", "text"))
    return module(
        hidden_states=latents, timestep=timestep, encoder_hidden_states=text, return_dict=False
    )[0]


def _predict_flux2(module: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    from ditkit_flux2.model.rope import token_positions

    latents, text = (inputs[name].bfloat16()[None] for name in ("latents", "text"))
    num_text, device, (rows, columns) = text.shape[1], latents.device, latents.shape[-2:]
    positions = token_positions(num_text, (rows, columns), [], device)
    guidance = torch.tensor([3.5], device=device) if module.config.guidance_embeds else None
    tokens = module(
        hidden_states=latents.flatten(2).transpose(1, 2), encoder_hidden_states=text,
        timestep=torch.tensor([0.731], device=device),
        guidance=guidance, img_ids=positions[num_text:], txt_ids=positions[:num_text],
        return_dict=False,
    )[0]  # fmt: skip
    return tokens.transpose(1, 2).unflatten(-1, (1, rows, columns))
