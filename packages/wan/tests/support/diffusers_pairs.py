"""Our transformer and diffusers' with the same weights, of any variant that diffusers has."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ditkit_core.models.precision import Precision
from ditkit_core.nn.rope import timestep_features
from ditkit_wan.model.transformer import WanInputs, WanTransformer
from ditkit_wan.presets import WanArch
from ditkit_wan.state_dict import to_native

Pairs = Sequence[tuple[str, Tensor, Tensor]]


def pair(
    arch: WanArch, *, dtype: torch.dtype, vace: bool = False, **theirs: Any
) -> tuple[WanTransformer, torch.nn.Module]:
    """Ours and diffusers' with equal random weights, nothing left at an initial zero or one;
    `theirs` are diffusers' names of what is extra."""
    from diffusers import WanTransformer3DModel, WanVACETransformer3DModel

    torch.manual_seed(0)
    kind = WanVACETransformer3DModel if vace else WanTransformer3DModel
    model = kind(
        num_attention_heads=arch.heads, attention_head_dim=arch.head_dim,
        in_channels=arch.in_channels, text_dim=arch.text_dim,
        out_channels=arch.out_channels, freq_dim=arch.freq_dim, ffn_dim=arch.ffn_dim,
        num_layers=arch.layers, **theirs,
    )  # fmt: skip
    for (
        name,
        parameter,
    ) in model.named_parameters():  # the official scales, but nothing is zero or one
        fan_in = parameter[0].numel() if parameter.ndim > 1 else arch.head_dim
        parameter.data = torch.randn_like(parameter) / fan_in**0.5
        if ".norm" in name and name.endswith("weight"):
            parameter.data = 1 + 0.1 * parameter
        if "time_embedder" in name:
            parameter.data = 0.02 * torch.randn_like(parameter)
    ours = WanTransformer(arch, Precision(matmul=dtype))
    ours.load_state_dict(
        {to_native(name): tensor.clone() for name, tensor in model.state_dict().items()}
    )
    return ours.to(dtype), model.to(dtype)


def exact_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make diffusers run in fp64 where it writes fp32 by hand: `.float()`, its sinusoid and its
    rotary buffers."""
    import diffusers.models.transformers.transformer_wan as module
    from diffusers.models import embeddings

    def sinusoid(timesteps: Tensor, dim: int, **_: object) -> Tensor:
        return timestep_features(timesteps, dim)

    monkeypatch.setattr(embeddings, "get_timestep_embedding", sinusoid)
    monkeypatch.setattr(Tensor, "float", Tensor.double)

    def tables(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        from ditkit_wan.model.rope import rotary_angles

        _, _, frames, height, width = hidden_states.shape
        angles = rotary_angles(
            (frames, height // 2, width // 2), self.attention_head_dim, hidden_states.device
        )
        both = angles.repeat_interleave(2, -1)[None, :, None]
        return both.cos(), both.sin()

    monkeypatch.setattr(module.WanRotaryPosEmbed, "forward", tables)


def random_inputs(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Leaves of these shapes, batch first, the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(*shape, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for name, shape in shapes.items()
    }


def compared(
    ours: WanTransformer, theirs: Any, given: Mapping[str, Tensor], timestep: Tensor
) -> Pairs:
    """[(name, our tensor, their tensor)] of outputs, input gradients and every parameter gradient;
    a random target.

    Args:
        given: `latents`, `text` and what else `WanInputs` has, with a batch dimension.
        timestep: Per sample or per token.
    """
    goal = torch.randn(
        given["latents"].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )

    def gradients(out: Tensor) -> dict[str, Tensor]:
        (out.double() - goal).square().mean().backward()
        found = {name: tensor.grad for name, tensor in given.items()}
        for tensor in given.values():
            tensor.grad = None
        return found

    out = torch.stack(
        ours(WanInputs(timestep=timestep, **{name: list(tensor) for name, tensor in given.items()}))
    )
    mine = gradients(out)
    hidden = torch.cat([given[name] for name in ("latents", "y") if name in given], 1)
    more = {"image": "encoder_hidden_states_image", "vace": "control_hidden_states"}
    extra = {their_name: given[name] for name, their_name in more.items() if name in given}
    if (
        ours.embed.arch.image_positions
    ):  # diffusers takes the two images of a sample as two rows of the batch
        extra[more["image"]] = given["image"].unflatten(1, (2, -1)).flatten(0, 1)
    their_out = theirs(
        hidden_states=hidden,
        timestep=timestep,
        encoder_hidden_states=given["text"],
        return_dict=False,
        **extra,
    )[0]
    pairs = [("output", out, their_out)]
    pairs += [(name, mine[name], gradient) for name, gradient in gradients(their_out).items()]
    named = dict(ours.named_parameters())
    return pairs + [
        (name, named[to_native(name)].grad, p.grad) for name, p in theirs.named_parameters()
    ]


def assert_close(pairs: Pairs, tolerance: float) -> None:
    """Every tensor within a relative tolerance; what is rounding alone (biases of k) is measured
    against the largest."""
    norm = max(float(their.double().norm()) for name, _, their in pairs if name != "output")
    for name, mine, their in pairs:
        mine, their = mine.detach().double(), their.detach().double()
        error, size = float((mine - their).norm()), float(their.norm())
        assert error <= max(tolerance * size, 1e-2 * tolerance * norm), (name, error, size)
