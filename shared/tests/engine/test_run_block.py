"""Random numbers of blocks that are recomputed. `PolicyChecks` compares their numbers with a run
that recomputes nothing."""

import threading
from typing import Any

import pytest
import torch

from ditkit_core.engine.engine import BlockEngine
from ditkit_core.engine.generator_state import GeneratorHook
from ditkit_core.engine.run_block import Replayed
from ditkit_core.testing.toy import TOY, toy_items
from ditkit_core.testing.world import make_model

HOST = torch.device("cpu")


@pytest.mark.parametrize("policy", ["full", "attn_only"])
def test_a_backward_leaves_the_generator_as_it_was(policy: str) -> None:
    """A recompute samples again what the forward sampled, and nobody sees that from outside."""
    model: Any = make_model(TOY, TOY.architecture.presets["dropout"])
    items = toy_items(2)
    latents = [item["latents"] for item in items]
    inputs = TOY.training.make_inputs(latents, torch.tensor([0.3, 0.6]), items, 1.0)
    torch.manual_seed(1)
    outputs = model(inputs, BlockEngine(policy=policy))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    sum(output.square().mean() for output in outputs).backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_two_recomputes_do_not_sample_from_one_generator_at_once() -> None:
    """Devices run backwards side by side, and all devices of the host share its generator."""
    second_runs = threading.Event()

    def first(x: torch.Tensor) -> tuple[torch.Tensor]:
        if is_recomputing:
            thread.start()
            assert not second_runs.wait(0.5), "the other one waits until this one is done"
        return (torch.rand_like(x),)

    def second(x: torch.Tensor) -> tuple[torch.Tensor]:
        if is_recomputing:
            second_runs.set()
        return (torch.rand_like(x),)

    is_recomputing = False
    bodies = [Replayed(body, GeneratorHook(HOST)) for body in (first, second)]
    x, again = torch.zeros(4), dict[int, torch.Tensor]()
    forward = [body(x)[0] for body in bodies]
    is_recomputing = True
    thread = threading.Thread(target=lambda: again.update({1: bodies[1](x)[0]}))
    again[0] = bodies[0](x)[0]
    thread.join()
    assert second_runs.is_set()
    assert all(torch.equal(again[index], forward[index]) for index in (0, 1))
