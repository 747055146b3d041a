"""The second look at a step that went wrong: what it blames, what it must not blame, and what
happens if it cannot look."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from toy_training import ToyBatch

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.loading.model import Model
from ditkit_core.nn.attention.backends import BACKENDS, Backend
from ditkit_core.testing.combinations import every_value
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.testing.world import make_model
from ditkit_core.training.config import FlowConfig
from ditkit_core.training.losses import NonFiniteLoss
from ditkit_core.training.nan_debug import find_first_nonfinite
from ditkit_core.training.optim.optimizer import NamedOptimizer
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_step import StepContext, training_step

ARCH = ToyArch(dim=16, depth=3)
INF, NAN = float("inf"), float("nan")


def failure(
    model: Any, engine: BlockEngine | None = None, *, ragged: bool = False
) -> NonFiniteLoss:
    batch = ToyBatch(["clip 0", "clip 1"], toy_items(2, ragged=ragged))
    optimizer = NamedOptimizer(trainable_parameters(model), OptimConfig())
    with pytest.raises(NonFiniteLoss) as error:
        training_step(
            Model(model, engine or BlockEngine(), TOY),
            [batch],
            optimizer,
            StepContext(step=3, seed=1, flow=FlowConfig()),
            lr=1e-3,
            clip_norm=0.0,
        )
    return error.value


@pytest.mark.parametrize(
    ("attention", "policy"),
    every_value(
        [("sdpa", 0.0), ("sdpa", 0.1), ("sdpa_math", 0.0), ("exact", 0.0)], ["none", "full"]
    ),
)
def test_the_masks_of_blocks_before_are_not_blamed(
    attention: tuple[str, float], policy: str
) -> None:
    backend, dropout = attention
    model = make_model(TOY, ToyArch(dim=16, depth=3, dropout=dropout))
    with torch.no_grad():
        model.layers[2].mlp[0].weight[0, 0] = NAN
    where = failure(model, BlockEngine(backend=backend, policy=policy), ragged=True).evidence[
        "where"
    ]
    assert (where["stage"], where["module"], where["operation"]) == (
        "block 2",
        "layers.2.mlp.0",
        "aten.addmm",
    )


def test_a_gradient_behind_masks_is_found_in_the_backward() -> None:
    model = make_model(TOY, ARCH)
    model.layers[1].out.weight.register_hook(lambda gradient: gradient * INF)
    where = failure(model, BlockEngine(backend="sdpa_math", policy="full"), ragged=True).evidence[
        "where"
    ]
    assert where["pass"] in ("backward", "recompute") and where["operation"] == "aten.mul"


def looked_at(model: Any, compute: Any) -> dict[str, Any] | None:
    """What is found of a computation in block 1."""
    plain = model.layers[1].forward
    model.layers[1].forward = lambda carry: plain(carry._replace(tokens=compute(carry.tokens)))
    item = toy_items(1)[0]
    inputs = TOY.training.make_inputs([item["latents"]], torch.tensor([0.5]), [item], 1.0)
    return find_first_nonfinite(model, lambda: model(inputs, BlockEngine())[0].square().mean())


def masks(x: Tensor) -> Tensor:
    """Every way to hide with -inf on finite values, none of which comes out."""
    bias = torch.zeros(4, 6).masked_fill(torch.arange(6) > 2, -INF)
    scores = (torch.ones(4, 6) + bias).mul_(2.0)
    padded = torch.nn.functional.pad(bias, (0, 2), value=-INF)
    torch.ones(4, 6).add_(bias)
    return x + scores.softmax(-1).sum() * 0 + padded.softmax(-1).sum() * 0


def test_masks_made_in_a_block_are_not_blamed() -> None:
    assert looked_at(make_model(TOY, ARCH), masks) is None


@pytest.mark.parametrize("scale", [INF, -INF])
def test_an_infinity_made_of_numbers_is_blamed_on_its_maker(scale: float) -> None:
    huge = torch.full((1,), 3e38)
    for compute in (
        lambda x: x + huge * (10.0 if scale > 0 else -10.0),
        lambda x: x + huge.clone().mul_(scale),
    ):
        found = looked_at(make_model(TOY, ARCH), compute)
        assert (
            found is not None
            and found["stage"] == "block 1"
            and found["operation"] in ("aten.mul", "aten.mul_")
        )


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_weight_is_blamed_whatever_it_is(value: float) -> None:
    model = make_model(TOY, ARCH)
    with torch.no_grad():
        model.head.out.bias.fill_(value)
    where = failure(model).evidence["where"]
    assert (where["stage"], where["module"], where["weights"]) == (
        "head",
        "head.out",
        ["head.out.bias"],
    )


# torch says it once in a process, which may have been in another test
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_attention_that_is_a_higher_order_operator_can_be_looked_at() -> None:
    def compute(x: Tensor) -> Tensor:
        q = x.detach()[:, None]
        return x + flex_attention(q, q, q).sum() * NAN

    found = looked_at(make_model(TOY, ARCH), compute)
    assert found is not None and (found["stage"], found["operation"]) == ("block 1", "aten.mul")

    def broken(x: Tensor) -> Tensor:
        q = x.detach()[:, None]
        return x + flex_attention(q, q, q, scale=NAN)[:, 0]

    found = looked_at(make_model(TOY, ARCH), broken)
    assert found is not None and (found["stage"], found["operation"]) == (
        "block 1",
        "flex_attention",
    )


def test_the_second_look_computes_attention_by_sdpa_in_place_of_flex(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def kernel(*given: Any) -> Tensor:
        calls.append(given)
        return BACKENDS["sdpa"].kernel(*given)

    monkeypatch.setitem(
        BACKENDS, "flex", Backend(kernel=kernel, takes_mask=True, takes_dropout=False,
        half_only=False)
    )  # fmt: skip
    model = make_model(TOY, ARCH)
    with torch.no_grad():
        model.layers[1].mlp[0].weight[0, 0] = NAN
    where = failure(model, BlockEngine(backend="flex")).evidence["where"]
    assert where["module"] == "layers.1.mlp.0"
    assert len(calls) == 2 * 3, "two calls in each block, of the step alone"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
        NotImplementedError("There was no rule registered"),
        UserError("attention backend cannot run this"),
    ],
)
def test_a_second_look_that_fails_does_not_hide_the_failure(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(model: Any, loss_of: Any, **ranks: Any) -> None:
        raise error

    monkeypatch.setattr("ditkit_core.training.train_step.find_first_nonfinite", fails)
    model = make_model(TOY, ARCH)
    with torch.no_grad():
        model.head.out.bias.fill_(NAN)
    found = failure(model)
    reason = str(error).partition("\n")[0] or "MemoryError"
    assert found.evidence["where"] is None and found.evidence["where_not_found"] == reason
    assert found.evidence["loss"] == "nan" and str(found).endswith(
        f"(its origin was not found: {reason})"
    )


def test_a_mistake_in_the_second_look_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(model: Any, loss_of: Any, **ranks: Any) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("ditkit_core.training.train_step.find_first_nonfinite", fails)
    model = make_model(TOY, ARCH)
    with torch.no_grad():
        model.head.out.bias.fill_(NAN)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        failure(model)
