"""Our transformer against `Flux2Transformer2DModel` with the same weights: outputs, parameter and
input gradients."""

import pytest
import torch
from flux2_pieces import native
from torch import Tensor

from ditkit_core.models.precision import Precision, set_precision
from ditkit_core.nn.rope import timestep_features
from ditkit_flux2.model.inputs import Flux2Inputs
from ditkit_flux2.model.rope import token_positions
from ditkit_flux2.model.transformer import Flux2Transformer
from ditkit_flux2.presets import Flux2Arch
from ditkit_flux2.spec import FLUX2

GRID, TEXT = (3, 4), 5
REFERENCES = {"none": [], "one": [(2, 3)], "two": [(2, 3), (4, 1)]}
ARCHS = {"dev": True, "klein": False}
"""Whether the strength of guidance is embedded."""


def pair(guidance: bool, dtype: torch.dtype) -> tuple[Flux2Transformer, torch.nn.Module]:
    """Ours and diffusers' with equal random weights, nothing left at an initial one."""
    from diffusers import Flux2Transformer2DModel

    torch.manual_seed(0)
    theirs = Flux2Transformer2DModel(
        in_channels=8, num_layers=2, num_single_layers=2, attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=20, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=guidance,
    )  # fmt: skip
    for parameter in theirs.parameters():
        if parameter.ndim > 1:
            parameter.data = torch.randn_like(parameter) / parameter.shape[1] ** 0.5
        else:
            parameter.data = 1 + 0.1 * torch.randn_like(parameter)
    ours = ours_with(theirs, guidance, dtype).to(dtype)
    return ours, theirs.to(dtype)


def ours_with(theirs: torch.nn.Module, guidance: bool, dtype: torch.dtype) -> Flux2Transformer:
    arch = Flux2Arch(
        dim=32, heads=2, double_layers=2, single_layers=2, text_dim=20, text_tokens=TEXT,
        guidance=guidance, in_channels=8,
        out_channels=8, axes=(4, 4, 4, 4),
    )  # fmt: skip
    ours = Flux2Transformer(arch, Precision(matmul=dtype))
    ours.load_state_dict(
        native({name: tensor.clone() for name, tensor in theirs.state_dict().items()})
    )
    return ours


class Given:
    """Inputs of both models; latents, references and text get gradients."""

    def __init__(
        self,
        dtype: torch.dtype,
        references: list[tuple[int, int]],
        batch: int = 2,
        exact: bool = False,
    ):
        random = torch.Generator().manual_seed(1)

        def draw(*size: int) -> Tensor:
            values = torch.randn(size, generator=random, dtype=torch.float64)
            return (values.bfloat16() if exact else values).to(dtype).requires_grad_()

        self.latents = draw(batch, 8, 1, *GRID)
        self.references = [draw(batch, 8, 1, *grid) for grid in references]
        self.text = draw(batch, TEXT, 20)
        self.target = torch.randn(batch, 8, 1, *GRID, generator=random, dtype=torch.float64)
        self.sigma = torch.tensor([0.8125, 0.25], dtype=torch.float64)[:batch]
        self.guidance = torch.tensor([1.0, 4.0], dtype=torch.float64)[:batch]
        self.grids = references

    def leaves(self) -> dict[str, Tensor]:
        return {
            "latents": self.latents,
            "text": self.text,
            **{f"reference {i}": tensor for i, tensor in enumerate(self.references)},
        }

    def ours(self, model: Flux2Transformer) -> Tensor:
        batch = range(len(self.latents))
        references = [[tensor[i] for tensor in self.references] for i in batch]
        guidance = self.guidance if model.embed.arch.guidance else None
        return torch.stack(
            model(
                Flux2Inputs(list(self.latents), self.sigma, guidance, list(self.text), references)
            )
        )

    def theirs(self, model: torch.nn.Module) -> Tensor:
        pictures = [self.latents, *self.references]
        rows = torch.cat([picture.flatten(2).transpose(1, 2) for picture in pictures], 1)
        positions = token_positions(TEXT, GRID, self.grids, torch.device("cpu"))
        out = model(
            hidden_states=rows, encoder_hidden_states=self.text, timestep=self.sigma,
            guidance=self.guidance,
            img_ids=positions[TEXT:], txt_ids=positions[:TEXT], return_dict=False,
        )[0]  # fmt: skip
        target = out[:, : GRID[0] * GRID[1]]
        return target.transpose(1, 2).unflatten(-1, (1, *GRID))


def exact_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make diffusers run in fp64 where it writes fp32 by hand: `.float()`, its sinusoid and its
    rotary tables."""
    from diffusers.models import embeddings

    def sinusoid(timesteps: Tensor, dim: int, **_: object) -> Tensor:
        return timestep_features(timesteps, dim)

    monkeypatch.setattr(embeddings, "get_timestep_embedding", sinusoid)
    monkeypatch.setattr(Tensor, "float", Tensor.double)


def both(
    ours: Flux2Transformer, theirs: torch.nn.Module, given: Given
) -> list[tuple[str, Tensor, Tensor]]:
    """[(name, our tensor, their tensor)] of output, input gradients and every parameter
    gradient."""
    out = given.ours(ours)
    (out.double() - given.target).square().mean().backward()
    mine = {name: leaf.grad.clone() for name, leaf in given.leaves().items()}
    for leaf in given.leaves().values():
        leaf.grad = None
    their_out = given.theirs(theirs)
    (their_out.double() - given.target).square().mean().backward()
    pairs = [("output", out, their_out)]
    pairs += [(name, mine[name], leaf.grad) for name, leaf in given.leaves().items()]
    expected = native({name: parameter.grad for name, parameter in theirs.named_parameters()})
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert expected.keys() == gradients.keys()
    return pairs + [(name, gradients[name], expected[name]) for name in expected]


def assert_close(pairs: list[tuple[str, Tensor, Tensor]], tolerance: float) -> None:
    for name, mine, their in pairs:
        mine, their = mine.detach().double(), their.detach().double()
        error = float((mine - their).norm() / their.norm())
        assert error <= tolerance, (name, error)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("references", REFERENCES)
@pytest.mark.parametrize("arch", ARCHS)
def test_fp64_equals_diffusers_run_in_fp64(arch, references, batch, monkeypatch):
    ours, theirs = pair(ARCHS[arch], torch.float64)
    given = Given(torch.float64, REFERENCES[references], batch)
    exact_diffusers(monkeypatch)
    assert_close(both(ours, theirs, given), 1e-10)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("references", REFERENCES)
@pytest.mark.parametrize("arch", ARCHS)
def test_fp32_equals_diffusers(arch, references, batch, monkeypatch):
    """1e-5: with one sinusoid on both sides, the order of summation is all that differs.

    diffusers computes its own in fp32, from 1000 · t rounded to fp32: that alone moves its
    gradients by up to 6e-5 from an fp64 run.
    """
    from diffusers.models import embeddings

    monkeypatch.setattr(
        embeddings, "get_timestep_embedding", lambda t, dim, **_: timestep_features(t, dim).float()
    )
    ours, theirs = pair(ARCHS[arch], torch.float32)
    assert_close(both(ours, theirs, Given(torch.float32, REFERENCES[references], batch)), 1e-5)


@pytest.mark.parametrize("arch", ARCHS)
def test_fp32_is_closer_to_fp64_than_diffusers_as_it_is(arch):
    """With its own sinusoid; inputs that bf16 can hold, so that all three get the same."""
    ours, theirs = pair(ARCHS[arch], torch.float32)
    exact = ours_with(theirs, ARCHS[arch], torch.float64).double()
    references = REFERENCES["two"]
    with torch.no_grad():
        truth = Given(torch.float64, references, exact=True).ours(exact)
        mine, them = (
            float((out.double() - truth).norm() / truth.norm())
            for out in (
                Given(torch.float32, references, exact=True).ours(ours),
                Given(torch.float32, references, exact=True).theirs(theirs),
            )
        )
    assert mine < them
    assert mine < 1e-6


@pytest.mark.parametrize("arch", ARCHS)
def test_samples_of_different_size_and_references_equal_diffusers_on_each_alone(arch, monkeypatch):
    """fp64; gradients of weights are sums over the samples."""
    ours, theirs = pair(ARCHS[arch], torch.float64)
    exact_diffusers(monkeypatch)
    samples = [Given(torch.float64, references, 1) for references in REFERENCES.values()]
    out = ours(
        Flux2Inputs(
            [given.latents[0] for given in samples],
            torch.cat([given.sigma for given in samples]),
            torch.cat([given.guidance for given in samples]),
            [given.text[0] for given in samples],
            [[tensor[0] for tensor in given.references] for given in samples],
        )
    )
    sum(
        (o - given.target[0]).square().sum() for o, given in zip(out, samples, strict=True)
    ).backward()
    mine = [{name: leaf.grad.clone() for name, leaf in given.leaves().items()} for given in samples]
    pairs = []
    for index, given in enumerate(samples):
        for leaf in given.leaves().values():
            leaf.grad = None
        their_out = given.theirs(theirs)
        (their_out - given.target).square().sum().backward()
        pairs.append((f"output {index}", out[index], their_out[0]))
        pairs += [
            (f"{name} {index}", mine[index][name], leaf.grad)
            for name, leaf in given.leaves().items()
        ]
    expected = native({name: parameter.grad for name, parameter in theirs.named_parameters()})
    pairs += [(name, parameter.grad, expected[name]) for name, parameter in ours.named_parameters()]
    assert_close(pairs, 1e-10)


@pytest.mark.parametrize("arch", ARCHS)
def test_references_are_given_in_order_and_predicted_for_by_none(arch):
    ours, _ = pair(ARCHS[arch], torch.float64)
    given = Given(torch.float64, [(2, 3), (2, 3)])
    with torch.no_grad():
        out = given.ours(ours)
        given.references.reverse()
        swapped = given.ours(ours)
    assert out.shape == given.latents.shape
    assert float((out - swapped).norm() / out.norm()) > 1e-3


def test_a_model_that_embeds_guidance_depends_on_it_and_will_not_do_without():
    ours, _ = pair(True, torch.float64)
    given = Given(torch.float64, [])
    with torch.no_grad():
        out = given.ours(ours)
        given.guidance = given.guidance + 1
        assert float((given.ours(ours) - out).norm() / out.norm()) > 1e-3
    with pytest.raises(AssertionError, match="guidance"):
        ours(Flux2Inputs(list(given.latents), given.sigma, None, list(given.text), [[], []]))


@pytest.mark.parametrize("references", REFERENCES)
@pytest.mark.parametrize("arch", ARCHS)
def test_bf16_is_closer_to_fp64_than_diffusers(arch, references):
    """Same bf16 weights, same inputs; diffusers as `from_pretrained(torch_dtype=bf16)` leaves
    it."""
    guidance = ARCHS[arch]
    _, theirs = pair(guidance, torch.float32)
    for parameter in theirs.parameters():
        parameter.data = parameter.data.bfloat16().float()  # equal values for all three
    exact = ours_with(theirs, guidance, torch.float64).double()
    half = ours_with(theirs, guidance, torch.bfloat16)
    for name, parameter in half.named_parameters():
        if not FLUX2.precision.keep_fp32(name):
            parameter.data = parameter.data.bfloat16()
    grids = REFERENCES[references]
    with torch.no_grad():
        truth = Given(torch.float64, grids, exact=True).ours(exact)
        mine = Given(torch.bfloat16, grids, exact=True).ours(half)
        them = Given(torch.bfloat16, grids, exact=True).theirs(theirs.bfloat16())

    def error(out: Tensor) -> float:
        return float((out.double() - truth).norm() / truth.norm())

    assert mine.dtype == torch.float32
    assert error(mine) < error(them)
    assert error(mine) < 1e-2


def test_in_bf16_reference_is_nearer_to_diffusers_than_default():
    """Its bf16 run rounds in the same places as the official code but for the norms of q and k, and
    the timestep is rounded alike."""
    from diffusers import Flux2Transformer2DModel

    torch.manual_seed(0)
    theirs = Flux2Transformer2DModel(
        in_channels=8, num_layers=2, num_single_layers=2, attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=20, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=True,
    )  # fmt: skip
    for parameter in theirs.parameters():
        random = torch.randn_like(parameter)
        parameter.data = (
            random / parameter.shape[1] ** 0.5 if parameter.ndim > 1 else 1 + 0.1 * random
        ).bfloat16()
    ours = ours_with(theirs.float(), True, torch.bfloat16)
    for name, parameter in ours.named_parameters():
        parameter.data = (
            parameter.data if FLUX2.precision.keep_fp32(name) else parameter.data.bfloat16()
        )

    def off(precision: Precision) -> float:
        set_precision(ours, precision)
        return float((given.ours(ours) - target).double().norm() / target.double().norm())

    given = Given(torch.bfloat16, [], exact=True)
    given.sigma = torch.tensor([0.7313, 0.2517], dtype=torch.float64)
    with torch.no_grad():
        target = given.theirs(theirs.bfloat16())
        reference = off(Precision(**dict.fromkeys(FLUX2.precision.reference, torch.bfloat16)))
        default = off(Precision())
    assert reference < 0.5 * default, (reference, default)
