"""Our transformer against a recording of the official code (outputs and gradients made by running
it)."""

import json
from pathlib import Path

import torch
from flux2_pieces import native
from safetensors import safe_open
from torch import Tensor

from ditkit_core.models.precision import Precision, PrecisionConfig
from ditkit_flux2.model.inputs import Flux2Inputs
from ditkit_flux2.model.transformer import Flux2Transformer
from ditkit_flux2.presets import Flux2Arch
from ditkit_flux2.spec import FLUX2

GOLDEN = Path(__file__).parents[1] / "golden" / "flux2_bfl_fp32.safetensors"
GRID = (3, 4)
"""Rows and columns of the recorded image's tokens."""


def recorded() -> tuple[dict[str, Tensor], Flux2Arch]:
    with safe_open(GOLDEN, "pt") as file:
        config = json.loads(file.metadata()["config"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    arch = Flux2Arch(
        dim=config["hidden_size"], heads=config["num_heads"], double_layers=config["depth"],
        guidance=True,
        single_layers=config["depth_single_blocks"], text_dim=config["context_in_dim"],
        text_tokens=5,
        in_channels=config["in_channels"], out_channels=config["in_channels"],
        axes=tuple(config["axes_dim"]),
        theta=float(config["theta"]), mlp_ratio=config["mlp_ratio"],
    )  # fmt: skip
    return tensors, arch


def group(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        key.removeprefix(prefix): tensor
        for key, tensor in tensors.items()
        if key.startswith(prefix)
    }


def latents_of(rows: Tensor) -> list[Tensor]:
    """[batch, tokens, channels] to latents [channels, 1, height, width]."""
    return list(rows.transpose(1, 2).unflatten(-1, (1, *GRID)))


def relative(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


def run(
    tensors: dict[str, Tensor],
    arch: Flux2Arch,
    dtype: torch.dtype,
    precision: Precision | None = None,
) -> dict[str, Tensor]:
    """Everything that is recorded, by the recording's own names, with parameters' gradients under
    ours."""
    model = Flux2Transformer(arch, precision or Precision(matmul=dtype))
    model.load_state_dict(native(group(tensors, "sd.")))
    model = model.to(dtype)
    rows, text = (tensors[key].to(dtype, copy=True).requires_grad_() for key in ("in.x", "in.ctx"))
    inputs = Flux2Inputs(
        latents_of(rows), tensors["in.timesteps"], tensors["in.guidance"], list(text), [[], []]
    )
    found: dict[str, Tensor] = {}
    carry = model.embed(inputs)
    for index, block in enumerate(model.double_blocks):
        carry = block(carry)
        found |= {f"aux.double.{index}.img": carry.image, f"aux.double.{index}.txt": carry.text}
    carry = model.join(carry)
    for index, block in enumerate(model.single_blocks):
        carry = block(carry)
        found[f"aux.single.{index}"] = carry.tokens
    out = torch.stack(model(inputs)).flatten(2).transpose(1, 2)
    loss = (out - tensors["in.target"]).square().mean()
    loss.backward()
    found |= {"out.0": out, "loss": loss, "gi.x": rows.grad, "gi.ctx": text.grad}
    return found | {f"gp.{name}": parameter.grad for name, parameter in model.named_parameters()}


def compared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is recorded, with parameters' gradients under our names."""
    kept = {
        key: t
        for key, t in tensors.items()
        if key.startswith(("aux.double", "aux.single", "out", "loss", "gi."))
    }
    return kept | {f"gp.{name}": tensor for name, tensor in native(group(tensors, "gp.")).items()}


def test_fp32_outputs_states_and_gradients_equal_the_recording():
    """2e-5 on states and output, 1e-4 on gradients: the recording itself is 1e-5 and 6e-5 off an
    fp64 run, because its sinusoid of 1000 · guidance is fp32. The next test says how far we are
    from it.
    """
    tensors, arch = recorded()
    ours, theirs = run(tensors, arch, torch.float32), compared(tensors)
    assert ours.keys() == theirs.keys()
    off = {name: relative(ours[name], theirs[name]) for name in theirs}
    assert {
        name: error for name, error in off.items() if error > (1e-4 if name[0] == "g" else 2e-5)
    } == {}


def test_fp32_is_ten_times_closer_to_fp64_than_the_recording():
    """All but the loss, a single number in which errors may cancel, in which ours is within 1e-6
    like the rest (2e-6 for gradients)."""
    tensors, arch = recorded()
    ours, theirs, exact = (
        run(tensors, arch, torch.float32),
        compared(tensors),
        run(tensors, arch, torch.float64),
    )
    off = {name: relative(ours[name], exact[name]) for name in exact}
    assert {
        name: error for name, error in off.items() if error > (2e-6 if name[0] == "g" else 1e-6)
    } == {}
    for name in ("out.0", "gi.x", "gi.ctx"):
        assert off[name] < 0.1 * relative(theirs[name], exact[name]), name


def test_rotary_tables_equal_the_recording():
    """2e-7: the recording's are fp32 throughout."""
    tensors, arch = recorded()
    model = Flux2Transformer(arch, Precision(matmul=torch.float32))
    rows = latents_of(tensors["in.x"])
    carry = model.embed(
        Flux2Inputs(
            rows, tensors["in.timesteps"], tensors["in.guidance"], list(tensors["in.ctx"]), [[], []]
        )
    )
    turn = tensors["aux.pe_x"][:1, 0]  # [1, tokens, pairs, 2, 2], the same for both samples
    assert relative(carry.rotary[:, 5:, 0, :, 0], turn[..., 0, 0]) <= 2e-7
    assert relative(carry.rotary[:, 5:, 0, :, 1], turn[..., 1, 0]) <= 2e-7


def preset(name: str, matmul: torch.dtype = torch.bfloat16, **fields: str) -> Precision:
    return PrecisionConfig(preset=name, **fields).precision(matmul, FLUX2.precision.reference)


def test_in_fp32_reference_is_nearer_to_the_official_recording_than_default():
    """The recording's sinusoids are fp32, as in `reference`. With the kernels for products that it
    was made with, which MKL takes on a CPU with AVX-512, 0.022 of the default's distance is left at
    most; with those for AVX2 0.5 to 0.81."""
    tensors, arch = recorded()
    theirs, default = compared(tensors), run(tensors, arch, torch.float32)
    reference = run(tensors, arch, torch.float32, preset("reference", torch.float32))
    left = {
        name: relative(reference[name], theirs[name]) / relative(default[name], theirs[name])
        for name in ("out.0", "aux.single.1", "gi.x", "gi.ctx")
    }
    assert max(left.values()) < (0.05 if min(left.values()) < 0.1 else 0.85), left


def test_fast_loses_little_and_a_timestep_in_bf16_much():
    """The output's error from an fp64 run with the same weights."""
    tensors, arch = recorded()
    state = {name: tensor.bfloat16() for name, tensor in native(
        {key.removeprefix("sd."): tensor for key,
        tensor in tensors.items() if key.startswith("sd.")}
    ).items()}  # fmt: skip

    def out(precision: Precision) -> Tensor:
        model = Flux2Transformer(arch, precision)
        model.load_state_dict(state)
        for name, parameter in model.named_parameters():
            wide = torch.promote_types(precision.matmul, torch.float32)
            parameter.data = parameter.data.to(
                wide if FLUX2.precision.keep_fp32(name) else precision.matmul
            )
        rows, text = tensors["in.x"].bfloat16(), tensors["in.ctx"].bfloat16()
        sigma = torch.tensor([0.7313, 0.2517])
        with torch.no_grad():
            inputs = Flux2Inputs(
                latents_of(rows), sigma, tensors["in.guidance"], list(text), [[], []]
            )
            return torch.stack([each.double() for each in model(inputs)])

    truth = out(Precision(matmul=torch.float64))
    precisions = {
        "default": preset("default"), "fast": preset("fast"), "timestep": preset("default",
        timestep="bf16"),
    }  # fmt: skip
    off = {name: relative(out(precision), truth) for name, precision in precisions.items()}
    assert off["default"] < off["fast"] < 2.5e-2 and off["fast"] < 0.5 * off["timestep"], off
