"""Small worlds for the conformance checks: a model with seeded weights, one training step, and what
it did."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.inject import initialise, inject, is_adapter_name, trainable_parameters
from ditkit_core.encoding.loader import Batch
from ditkit_core.encoding.loss_masks import LOSS_WEIGHTS
from ditkit_core.loading.model import Model
from ditkit_core.models.precision import Precision, autocast_disabled
from ditkit_core.models.protocol import Engine
from ditkit_core.models.spec import ModelSpec
from ditkit_core.testing.lessons import teaching
from ditkit_core.testing.observer import Observer
from ditkit_core.testing.pretend_devices import on_host
from ditkit_core.training.config import FlowConfig
from ditkit_core.training.flow_matching import to_device
from ditkit_core.training.optim.optimizer import NamedOptimizer
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_step import StepContext, training_step
from ditkit_core.training.validation import validation_loss

Items = Sequence[Mapping[str, Tensor]]

ADAPTERS = {
    "full": None,
    "lora": AdapterConfig(rank=4),
    "lora with dropout": AdapterConfig(rank=4, alpha=8.0, dropout=0.2),
    "dora": AdapterConfig(rank=4, use_dora=True),
    "lokr": AdapterConfig(method="lokr", rank=2, alpha=3.0, decompose_factor=4),
    "loha": AdapterConfig(method="loha", rank=4),
}
"""What is trained, by the names that the checks go by."""
EVERYWHERE = {"lora everywhere": AdapterConfig(rank=4, targets=("*",))}
"""One that also adapts layers outside the blocks, which compute tensors for all of them:
modulation, time and text embedding."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_model(
    spec: ModelSpec,
    arch: Any,
    *,
    dtype: torch.dtype = torch.float32,
    adapter: AdapterConfig | None = None,
) -> nn.Module:
    """A model on the CPU with random weights, none of them zero, and with an adapter that does
    something.

    Args:
        adapter: What is trained; None trains every parameter.
    """
    key = spec.name, arch, dtype, adapter
    return made_once(key, spec, lambda: _make_model(spec, arch, dtype, adapter))


def made_once(key: tuple[Any, ...], spec: ModelSpec, make: Callable[[], nn.Module]) -> nn.Module:
    """A model of its own that is made once for a key and a spec, and copied.

    Args:
        key: Everything that the model depends on, but the spec: another one of the same name gets a
            model that is made for it.
    """
    if key not in _MADE:
        _MADE[key] = spec, make()
    made_of, model = _MADE[key]
    return _copied(model if made_of is spec else make(), {})


_MADE: dict[tuple[Any, ...], tuple[ModelSpec, nn.Module]] = {}


def over_the_same_tensors(module: nn.Module) -> Any:
    """A module of its own, in which layers can be replaced, with the parameters and buffers of
    another."""
    return _copied(module, {id(x): x for x in (*module.parameters(), *module.buffers())})


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A model of its own, in a fifth of the time that peft takes to adapt one, and a third of the
    time of `copy.deepcopy`."""
    kind: Any = type(value)
    if isinstance(value, Tensor | nn.Module):
        if id(value) not in memo:
            memo[id(value)] = (
                value.detach().clone() if isinstance(value, Tensor) else kind.__new__(kind)
            )
            if isinstance(value, nn.Parameter):
                memo[id(value)] = nn.Parameter(memo[id(value)], value.requires_grad)
            elif isinstance(value, nn.Module):
                memo[id(value)].__dict__ = {
                    name: _copied(item, memo) for name, item in value.__dict__.items()
                }
        return memo[id(value)]
    if issubclass(kind, dict):
        return (
            kind((name, _copied(item, memo)) for name, item in value.items()) if value else kind()
        )
    return kind(_copied(item, memo) for item in value) if kind in (list, set, tuple) else value


def _make_model(
    spec: ModelSpec, arch: Any, dtype: torch.dtype, adapter: AdapterConfig | None
) -> nn.Module:
    random = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        model: nn.Module = spec.architecture.build(arch, Precision(matmul=dtype))
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=random) * parameter[0].numel() ** -0.5
        if parameter.ndim == 1:
            values = 0.1 * values + (1.0 if name.endswith("weight") else 0.0)
        parameter.data = values.to(
            torch.promote_types(dtype, torch.float32) if spec.precision.keep_fp32(name) else dtype
        )
    if adapter is None:
        inject(model, AdapterConfig(method="full"), {})
    else:
        add_adapter(model, spec, adapter, random)
    return model.train()


def add_adapter(
    model: nn.Module, spec: ModelSpec, adapter: AdapterConfig, random: torch.Generator
) -> None:
    """An adapter that does something: none of its factors is zero."""
    inject(model, adapter, spec.adapters.targets)
    initialise(model, 0, device_of=lambda name: torch.device("cpu"))
    for name, parameter in model.named_parameters():
        if is_adapter_name(name) and not parameter.any():
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=random)


@dataclass(frozen=True)
class Outcome:
    """Everything that one forward and backward produced, on the host."""

    loss: Tensor
    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    """By parameter name; inputs as `input 0`, `input 1`, …"""
    num_attention: int
    """Forwards of attention in blocks, recomputed ones included."""
    generator_state: Tensor
    """torch's generator after the backward."""

    def equals(self, other: "Outcome") -> bool:
        """Bitwise identical in loss, outputs and gradients."""
        return not self.differences(other)

    def differences(self, other: "Outcome") -> list[str]:
        """Names of what is not bitwise identical."""
        names = [] if torch.equal(self.loss, other.loss) else ["loss"]
        pairs = zip(self.outputs, other.outputs, strict=True)
        names += [f"output {i}" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
        assert self.gradients.keys() == other.gradients.keys()
        for name, a in self.gradients.items():
            b = other.gradients[name]
            if (a is None) != (b is None) or (
                a is not None and b is not None and not torch.equal(a, b)
            ):
                names.append(name)
        return names


def outcome(
    spec: ModelSpec,
    model: Any,
    items: Items,
    engine: Engine | None,
    *,
    backward: Any = None,
    conditions: bool = False,
) -> Outcome:
    """One training step without an optimizer, from the same random state every time.

    Args:
        model: On whatever devices; the items are on the host.
        engine: The engine; None is the model's plain forward.
        backward: Starts the backward of a loss; by default in this thread.
        conditions: Whether what an item has besides latents (text, references) gets a gradient,
            too.
    """
    if conditions:
        items = [
            {name: x if name == "latents" else _leaf(x) for name, x in item.items()}
            for item in items
        ]
    latents = [item["latents"].clone().requires_grad_() for item in items]
    sigma = torch.linspace(0.3, 0.8, len(items))
    model.zero_grad(set_to_none=True)
    torch.manual_seed(11)
    with _CountAttention() as count, count.without(model.embed):
        first = next(model.embed.parameters()).device
        there = [to_device(item, first) for item in items]
        inputs = spec.training.make_inputs(
            [latent.to(first) for latent in latents], sigma.to(first), there, 1.0
        )
        outputs = list(model(inputs) if engine is None else model(inputs, engine=engine))
        wide = [output.to(torch.promote_types(output.dtype, torch.float32)) for output in outputs]
        loss = sum((output.square().mean() for output in wide), torch.zeros(()))
        (backward or torch.Tensor.backward)(loss)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients |= {f"input {i}": latent.grad for i, latent in enumerate(latents)}
    if conditions:
        gradients |= {
            f"{name} {i}": x.grad
            for i, item in enumerate(items)
            for name, x in item.items()
            if name != "latents"
        }
    values = {
        name: None if gradient is None else on_host(gradient)
        for name, gradient in gradients.items()
    }
    return Outcome(
        on_host(loss), [on_host(o) for o in outputs], values, count.forwards, torch.get_rng_state()
    )


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_() if tensor.is_floating_point() else tensor


def train_shortly(
    spec: ModelSpec, model: Any, items: Items, engine: Engine, *, pipelined: bool = False
) -> tuple[list[float], dict[str, Tensor]]:
    """A measurement of the first item and an optimizer step as a run does them, on items that are
    on the host, then a measurement of the last.

    One item has a loss mask. Where an adapter is trained, the step's first micro-batch matches the
    base.

    Returns:
        Every number that is reported, and the trained parameters' values and (clipped) gradients,
        on the host.
    """
    trained, items = trainable_parameters(model), masked(items)
    optimizer = NamedOptimizer(trained, OptimConfig(lr=1e-2))
    batch = Batch(
        ids=[f"clip {i}" for i in range(len(items))], items=[dict(item) for item in items]
    )
    first, *others = micro_batches(items)
    adapts = len(trained) < sum(1 for _ in model.parameters())

    def measure(of: slice) -> float:
        return validation_loss(
            Model(model, engine, spec), batch.ids[of], batch.items[of], (0.5,)
        ).mean

    before = measure(slice(1))
    result = training_step(
        Model(model, engine, spec),
        [replace(first, matches_base=adapts), *others],
        optimizer,
        StepContext(step=0, seed=1, flow=FlowConfig(weighting="bell"), pipelined=pipelined),
        lr=1e-2,
        clip_norm=0.1,
    )
    values = {name: on_host(parameter) for name, parameter in trained.items()}
    values |= {
        f"gradient of {name}": on_host(gradient) for name, gradient in optimizer.gradients().items()
    }
    return [before, *result, measure(slice(-1, None))], values


def backward_without_autocast(loss: Tensor) -> None:
    """A backward as the training step runs it: torch obeys an outer autocast there too, recorded
    ops included."""
    with autocast_disabled(loss.device.type):
        loss.backward()


def masked(items: Items) -> list[Mapping[str, Tensor]]:
    """The items, the first with a loss mask that halves the weight of every other column."""
    first, *others = items
    weights = torch.ones(1, *first["latents"].shape[1:])
    weights[..., ::2] = 0.5
    return [{**first, LOSS_WEIGHTS: weights}, *others]


def differing(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that only one of both has, or that are not bitwise identical."""
    both = [
        name
        for name in actual
        if name in expected and not torch.equal(actual[name], expected[name])
    ]
    return sorted({*both, *(actual.keys() ^ expected.keys())})


def micro_batches(items: Items, num: int = 2) -> list[Batch]:
    """Micro-batches of one sample and of all in turn: a sample alone may take another way than a
    batch."""
    full_batch = Batch(
        ids=[f"clip {i}" for i in range(len(items))], items=[dict(item) for item in items]
    )
    first = Batch(ids=full_batch.ids[:1], items=full_batch.items[:1])
    return [full_batch if i % 2 else first for i in range(num)]


def counted(work: Callable[[], Outcome]) -> tuple[Outcome, Counter[str]]:
    """What some work did, and how often each operation below autograd ran in it, by its full
    name."""
    with _CountAll() as count:
        return work(), count.ran


class _CountAll(Observer):
    """Counts operations that run: what a checkpoint hands out does not."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[str(func)] += 1
        return func(*args, **(kwargs or {}))


_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_safe_softmax",
    "_softmax",
)
"""Operations of torch, none of them composed above autograd, that `is_attention_forward` knows."""
_OF_DEVICES = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
"""Where an operation goes on behind the count."""


class _CountAttention:
    """Counts attention forwards below autograd; with dropout the CPU composes attention, and its
    softmax is counted.

    Counted by kernels of these operations alone, in front of each device's. A dispatch mode is
    asked of every operation, which took half the time of a tiny model's step.
    """

    def __init__(self) -> None:
        self.forwards = 0
        self._paused = False

    def __enter__(self) -> Self:
        self._library = torch.library.Library("aten", "IMPL")
        for name in _ATTENTION:
            operation = getattr(torch.ops.aten, name).default
            kernel = partial(self._run, operation)
            self._library.impl(name, kernel, "BackendSelect", with_keyset=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._library._destroy()

    def _run(self, operation: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        paused, self._paused = self._paused, True  # one is composed of others
        self.forwards += not paused
        try:
            return operation.redispatch(keys & _OF_DEVICES, *args, **kwargs)
        finally:
            self._paused = paused

    @contextmanager
    def without(self, module: nn.Module) -> Iterator[None]:
        """Leave out the forwards of a module: no policy is about an embedding that attends."""

        def pause(*_: Any) -> None:
            self._paused = not self._paused

        hooks = [module.register_forward_pre_hook(pause), module.register_forward_hook(pause)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def largest(distances: Iterable[float]) -> float:
    """The largest number; NaN if one is NaN, which Python's `max` passes over unless it is the
    first."""
    return torch.tensor([*distances], dtype=torch.float64).max().item()


@cache  # asked of every operation
def is_attention_forward(func: Any) -> bool:
    """Whether an operation, or the operation of a full name, is a forward of attention; one
    composed of several is known by its softmax."""
    name = str(func)
    return "backward" not in name and ("_scaled_dot_product" in name or "softmax" in name)


def is_last(layer: str, block: nn.Module, last_layers: Collection[str]) -> bool:
    """Whether `ModelChecks.last_layers` have a layer, by its name inside of a block."""
    return layer in last_layers or f"{type(block).__name__} {layer}" in last_layers


class ModelChecks:
    """Base of the checks of a model: inherit, set `spec` and `arch`, define `items`."""

    spec: ClassVar[ModelSpec]
    arch: ClassVar[Any]
    last_layers: ClassVar[tuple[str, ...]] = ()
    """Names, inside of a block, of the layers that end it: under an adapter nothing keeps what they
    return, and `attn_only` never repeats them; nor does `full` the last of a block, but for its
    adapter's product with A. None where something behind them saves their result (a norm, a
    dropout). `Block ffn.2` is the layer of blocks of this class alone, where it does not end
    another's."""
    idle: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the names of parameters that some items do not use, or whose result nothing
    reads: layers of the last block's text. Also of tensors of items that are positions, which have
    no gradient."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Let each check of the class teach when it fails."""
        super().__init_subclass__(**options)
        for name, check in list(vars(cls).items()):
            if name.startswith("test_") and callable(check):
                setattr(cls, name, teaching(cls.__name__, check))

    def items(self, count: int, ragged: bool = False) -> Items:
        """Training items, deterministic; of different sizes if `ragged`.

        Of three ragged items, the second has more tokens than the first, and the third has as many
        as the first in another grid.
        """
        raise NotImplementedError

    def inputs(self, items: Items) -> Any:
        """A model's inputs of some items, each at a noise level of its own."""
        sigma = torch.linspace(0.3, 0.8, len(items))
        return self.spec.training.make_inputs(
            [item["latents"] for item in items], sigma, items, 1.0
        )
