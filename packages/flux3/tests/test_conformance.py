"""FLUX.3 against every suite of the core, and diffusers: outputs, every gradient, samples,
adapters."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from einops import rearrange
from torch import Tensor

from ditkit_core.models.precision import Precision
from ditkit_core.nn.rope import axis_angles, timestep_features
from ditkit_core.testing.conformance import CoreChecks
from ditkit_core.testing.suites import EverySuite
from ditkit_flux3.model import Flux3Transformer, make_inputs
from ditkit_flux3.presets import Flux3Arch
from ditkit_flux3.spec import FLUX3
from ditkit_flux3.state_dict import to_native
from ditkit_flux3.verify import DIFFUSERS, diffusers_arguments

CPU = torch.device("cpu")
ARCH = Flux3Arch(
    dim=64, heads=2, tower_layers=1, layers=2, text_dim=12, in_channels=4, freq_dim=16,
    axes=(8, 8, 8, 8),
)  # fmt: skip
GRIDS = ([(2, 3), (2, 2), (1, 3)], [(2, 5), (3, 3)], [(3, 2), (1, 3), (2, 2)])
"""Rows and columns of the image of three samples, and of their references."""
SOME = ([(2, 3), (1, 3)], [(2, 7)], [(3, 3)])
"""The same with references of one sample alone."""
NONE = ([(2, 3)], [(2, 5)], [(3, 2)])
ROWS = (4, 8, 4)
"""Rows of their captions."""


def samples(*chosen: int, grids=GRIDS, dtype: torch.dtype = torch.float32):
    """Training items of these samples."""
    random = torch.Generator().manual_seed(0)
    names = ("latents", "reference.0", "reference.1")
    made = [
        {
            **{
                name: torch.randn(4, 1, *grid, generator=random, dtype=torch.float64).to(dtype)
                for name, grid in zip(names, sample, strict=False)
            },
            "text": torch.randn(rows, 12, generator=random, dtype=torch.float64).to(dtype),
        }
        for sample, rows in zip(grids, ROWS, strict=True)
    ]
    return [dict(made[i]) for i in chosen]


class TestEditing(EverySuite):
    """Samples with one reference and with two."""

    spec = FLUX3
    arch = ARCH
    last_layers = ("attn_out", "mlp_out")
    diffusers = DIFFUSERS

    def items(self, count, ragged=False):
        return samples(*(i % 3 if ragged else 0 for i in range(count)))


class TestSomeReferences(CoreChecks):
    """Samples without a reference next to one that has one."""

    spec = FLUX3
    arch = ARCH
    last_layers = TestEditing.last_layers
    idle = (
        "embed.emb_in.image_cond.",
        *(f"embed.{blocks}_stream_modulations.image_cond." for blocks in ("early", "single")),
        "content_mode_blocks.image_cond.",
    )
    one_in = 5

    def items(self, count, ragged=False):
        return samples(*(i % 3 if ragged else 0 for i in range(count)), grids=SOME)


class TestTextToImage(TestSomeReferences):
    """Without any."""

    def items(self, count, ragged=False):
        return samples(*(i % 3 if ragged else 0 for i in range(count)), grids=NONE)


# diffusers


def relative(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


def diffusers_model(arch: Flux3Arch, seed: int = 0) -> torch.nn.Module:
    """diffusers' model with random weights, none at an initial one."""
    from diffusers import Flux3Transformer2DModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Flux3Transformer2DModel(**DIFFUSERS.config(arch))
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.data = (
                1 + 0.1 * noise if parameter.ndim == 1 else noise / parameter.shape[-1] ** 0.5
            )
    return model


def native(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of diffusers' names by ours."""
    rows = {}
    for name, tensor in tensors.items():
        parts = to_native(name)
        for part, piece in zip(parts, tensor.chunk(len(parts)), strict=True):
            rows.setdefault(part.name, {})[part.index] = piece
    return {name: torch.cat([pieces[i] for i in sorted(pieces)]) for name, pieces in rows.items()}


def loaded(theirs: torch.nn.Module, arch: Flux3Arch, dtype: torch.dtype, *, cast: bool = True):
    ours = Flux3Transformer(arch, Precision(matmul=dtype))
    ours.load_state_dict(native(dict(theirs.state_dict())))
    return ours.to(dtype) if cast else ours


@contextmanager
def exact_diffusers(dtype: torch.dtype) -> Iterator[None]:
    """diffusers with the sinusoid and the rotary tables of this dtype, which it computes in fp32;
    in fp64 it also keeps q and k in fp64, which it writes as `.float()`."""
    import diffusers.models.transformers.transformer_flux3 as theirs

    def sinusoid(self, timesteps):
        return timestep_features(timesteps.double(), self.num_channels).to(dtype)

    def tables(self, ids):
        angles = torch.cat(
            [
                axis_angles(ids[:, axis].double(), size // 2, self.theta)
                for axis, size in enumerate(self.axes_dim)
            ],
            -1,
        ).repeat_interleave(2, -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs.Timesteps, "forward", sinusoid)
        patch.setattr(theirs.Flux3PosEmbed, "forward", tables)
        if dtype == torch.float64:
            patch.setattr(Tensor, "float", Tensor.double)
        yield


SIGMA = (0.8125, 0.25, 0.5)
TARGET = (0.5, 0.125, 0.0)
BATCHES = {
    "text alone": ((0,), NONE),
    "references": ((0,), GRIDS),
    "alike": ((0, 0), NONE),
    "of several sizes": ((0, 1, 2), GRIDS),
    "some references": ((0, 1, 2), SOME),
}


def outcome(items, model, run, level, target):
    """Outputs, and gradients of inputs and parameters."""
    leaves = {
        f"{i} {name}": x.requires_grad_()
        for i, item in enumerate(items)
        for name, x in item.items()
    }
    outputs = run(model, [item["latents"] for item in items], level, items, target)
    random = torch.Generator().manual_seed(5)
    loss = sum(
        (out.double() - torch.randn(out.shape, generator=random, dtype=torch.float64))
        .square()
        .sum()
        for out in outputs
    )
    loss.backward()
    return {
        **{f"output {i}": out for i, out in enumerate(outputs)},
        **{name: x.grad for name, x in leaves.items()},
    }


def run_ours(model, latents, level, items, target):
    return model(make_inputs(latents, level, items, 1.0, target))


def run_theirs(model, latents, level, items, target):
    """One sample at a time: diffusers has one layout for all of a batch."""
    outputs = []
    for i, item in enumerate(items):
        inputs = make_inputs([latents[i]], level[i : i + 1], [item], 1.0, target[i : i + 1])
        arguments = diffusers_arguments(inputs, latents[i].dtype, model.config.flow_map)
        out = model(**arguments, return_dict=False)[0][0]
        outputs.append(rearrange(out, "(h w) c -> c 1 h w", h=latents[i].shape[2]))
    return outputs


def both(arch, batch, dtype):
    chosen, grids = BATCHES[batch]
    level, target = (
        torch.tensor(values, dtype=torch.float64)[list(chosen)] for values in (SIGMA, TARGET)
    )
    theirs = diffusers_model(arch).to(dtype)
    ours = loaded(theirs, arch, dtype)
    results = []
    with exact_diffusers(dtype):
        for model, run in ((ours, run_ours), (theirs, run_theirs)):
            items = samples(*chosen, grids=grids, dtype=dtype)
            results.append(outcome(items, model, run, level, target))
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    expected = native({n: p.grad for n, p in theirs.named_parameters() if p.grad is not None})
    return (results[0] | gradients, results[1] | expected)


ARCHS = {"base": ARCH, "flow map": replace(ARCH, flow_map=True)}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_outputs_and_every_gradient_are_those_of_diffusers(arch, batch, dtype, bar):
    ours, theirs = both(ARCHS[arch], batch, dtype)
    without = {name for name, gradient in ours.items() if gradient is None}
    assert ours.keys() - without == theirs.keys()
    # Weights that only references use get no gradient without them, here as there.
    assert bool(without) == (BATCHES[batch][1] is NONE)
    assert all("image_cond" in name for name in without)
    errors = {name: relative(ours[name], theirs[name]) for name in theirs}
    assert max(errors.values()) <= bar, max(errors.items(), key=lambda pair: pair[1])
