"""A block of one's own that compiles a function, as docs/checkpointing.md has it, under every
policy."""

import runpy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.models.protocol import run_plain
from ditkit_core.nn.attention.backends import BACKENDS

PAGE = Path(__file__).parents[3] / "docs" / "checkpointing.md"
HEADING = "## torch.compile in a block of your own"
DEPTH = 3


class Carry(NamedTuple):
    x: Tensor


class Embed(nn.Linear):
    def forward(self, x: Any) -> Any:
        return Carry(super().forward(x))


class Head(nn.Linear):
    def forward(self, carry: Any) -> Any:
        return super().forward(carry.x)


class Staged(nn.Module):
    """Blocks of the page between two layers."""

    def __init__(self, block: Any):
        super().__init__()
        self.embed, self.head = Embed(8, 32), Head(32, 8)
        self.layers = nn.ModuleList(block(32, 4) for _ in range(DEPTH))
        for layer in self.layers:
            nn.init.normal_(layer.gate)

    def blocks(self) -> list[Any]:
        return list(self.layers)


@pytest.fixture
def block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The page's block, whose function is compiled by a backend that needs no C++ compiler."""
    section, program = (
        PAGE.read_text(encoding="utf-8").partition(HEADING)[2],
        tmp_path / "program.py",
    )
    program.write_text(section.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    torch._dynamo.reset()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
        names = runpy.run_path(str(program))
    yield names["Block"]
    torch._dynamo.reset()


# the compiler's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.slow  # imports the compiler
def test_policies_keep_what_they_say_around_a_compiled_function_and_change_no_bit(
    block: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x, calls = Staged(block), torch.randn(2, 6, 8), list[int]()
    kernel = BACKENDS["sdpa"].kernel
    counted = replace(BACKENDS["sdpa"], kernel=lambda *given: calls.append(1) or kernel(*given))
    monkeypatch.setitem(BACKENDS, "sdpa", counted)

    def step(engine: Any) -> tuple[list[Tensor], int]:
        model.zero_grad(set_to_none=True)
        calls.clear()
        out = engine(model, x)
        out.square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        return [out.detach(), *(each for each in gradients if each is not None)], len(calls)

    with torch.compiler.set_stance("force_eager"):
        eager, _ = step(run_plain)
    torch._dynamo.utils.counters.clear()
    plain, _ = step(run_plain)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, (
        "the function was compiled, once for all blocks"
    )
    assert len(plain) == len(list(model.parameters())) + 1
    for one, other in zip(plain, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for policy in POLICIES:
        found, attention = step(BlockEngine(policy=policy))
        assert all(map(torch.equal, found, plain)), policy
        assert attention == (2 * DEPTH if policy == "full" else DEPTH), policy
