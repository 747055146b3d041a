"""Checks for every model that tokens skip blocks as an explicit construction has it. Part of
`Conformance`."""

from typing import Any

import pytest
import torch

from ditkit_core.engine.engine import BlockEngine
from ditkit_core.engine.token_route import TokenRouter
from ditkit_core.engine.token_routing import TokenRouting
from ditkit_core.models.spec import ModelSpec
from ditkit_core.models.token_streams import field_at, masks_of, with_field
from ditkit_core.testing.world import ADAPTERS, ModelChecks, make_model


def routing_of(spec: ModelSpec, arch: Any, model: Any, share: float = 0.4) -> TokenRouter | None:
    """A routing around most of a model's blocks: all but the first and the last of more than two.
    None if its blocks need all tokens."""
    streams, number = spec.architecture.token_streams(arch), len(model.blocks())
    if streams is None or not streams.routed:
        return None
    ends = int(number > 2)
    return TokenRouter(TokenRouting(ends, number - 1 - ends, share), streams)


class RoutingChecks(ModelChecks):
    """Inherit, set `spec` and `arch`, define `items`."""

    @pytest.mark.parametrize("ragged", [False, True], ids=["one size", "ragged"])
    def test_tokens_that_skip_blocks_are_as_if_they_were_hidden_there(self, ragged: bool) -> None:
        """Prediction and gradients, against all blocks on all tokens, where in the range chosen
        tokens alone are keys, and alone advance."""
        # without dropout
        model: Any = make_model(
            self.spec, self.arch, dtype=torch.float64, adapter=ADAPTERS["lora"]
        ).eval()
        router = routing_of(self.spec, self.arch, model)
        if router is None:
            pytest.skip("its blocks need all tokens")
        inputs = self.inputs(self.items(2, ragged=ragged))
        results = []
        for engine in (
            BlockEngine(router=router),
            lambda stages, inputs: _hidden(router, stages, inputs),
        ):
            torch.manual_seed(7)
            prediction = model(inputs, engine)
            sum(velocity.square().sum() for velocity in prediction).backward()
            gradients = [p.grad for p in model.parameters() if p.requires_grad]
            assert any(gradient is not None and gradient.any() for gradient in gradients)
            results.append([*prediction, *(g for g in gradients if g is not None)])
            model.zero_grad()
        for result, expected in zip(*results, strict=True):
            # Adapters are fp32.
            assert (result - expected).norm() <= 2e-6 * expected.norm() + 1e-12
        with torch.no_grad():
            plain, routed = model(inputs, BlockEngine()), model(inputs, BlockEngine(router=router))
        assert all(map(torch.equal, routed, plain)), "without a backward no token skips a block"
        assert not all(torch.equal(a, b) for a, b in zip(results[0], plain, strict=False)), (
            "some did in training"
        )


def _hidden(router: TokenRouter, model: Any, inputs: Any) -> Any:
    """The forward of all blocks on all tokens, with masks instead of missing tokens."""
    routing, streams = router.routing, router.streams
    carry = model.embed(inputs)
    lengths = {
        names[0]: field_at(carry, path).shape[1]
        for path, names in streams.fields(carry).items()
        if not names[1:]
    }
    (batch, length), device = _size(carry, streams), "cpu"
    mask = field_at(carry, next(iter(streams.masks)))
    order = torch.rand(batch, length, device=device)
    parts = (
        None
        if mask is None
        else dict(
            zip(streams.names, mask.split([lengths[n] for n in streams.names], 1), strict=True)
        )
    )
    chosen = torch.zeros(batch, length, dtype=torch.bool)
    for sample in range(batch):
        real = length if parts is None else int(parts[streams.routed][sample].sum())
        numbers = order[sample, :real].argsort()[: max(1, round((1 - routing.share) * real))]
        chosen[sample, numbers] = True
    keys = {n: torch.ones(batch, size, dtype=torch.bool) for n, size in lengths.items()} | (
        parts or {}
    )
    keys[streams.routed] = chosen
    for index, block in enumerate(model.blocks()):
        if not routing.first <= index <= routing.last or next(block.parameters(), None) is None:
            carry = block(carry)
            continue
        hidden, masks = carry, masks_of(streams, carry)
        for path, names in masks.items():
            hidden = with_field(hidden, path, torch.cat([keys[n] for n in names], 1))
        after = block(hidden)
        for path in masks:
            after = with_field(after, path, field_at(carry, path))
        for path, names in streams.fields(carry).items():
            if path in streams.residual and streams.routed in names:
                moves = torch.cat(
                    [
                        chosen if n == streams.routed else chosen.new_ones(batch, lengths[n])
                        for n in names
                    ],
                    1,
                )
                new, old = field_at(after, path), field_at(carry, path)
                after = with_field(
                    after, path, torch.where(moves[..., None], new, old.to(new.dtype))
                )
        carry = after
    return model.head(carry)


def _size(carry: Any, streams: Any) -> tuple[int, int]:
    path = next(
        path
        for path, names in streams.fields(carry).items()
        if names == (streams.routed,) and path in streams.residual
    )
    batch, length = field_at(carry, path).shape[:2]
    return batch, length
