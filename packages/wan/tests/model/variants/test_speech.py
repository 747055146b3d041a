"""S2V against a recording of the official code: outputs and every gradient, and in a batch whose samples differ in what they have."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ditkit_core.models.precision import Precision
from ditkit_wan.model.inputs import WanInputs
from ditkit_wan.model.transformer import WanTransformer
from ditkit_wan.presets import SpeechArch, WanArch
from ditkit_wan.state_dict import to_native, to_official

GOLDEN = Path(__file__).parents[2] / "golden" / "wan22_s2v_fp32.safetensors"
FIELDS = {
    "latents": "x", "text": "context", "reference": "ref_latents", "motion": "motion_latents", "pose": "cond_states",
}  # fmt: skip


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.double()
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30))


@pytest.fixture(scope="module")
def recorded() -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    with safe_open(GOLDEN, "pt") as file:
        return json.loads(file.metadata()["config"]), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def group(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def test_outputs_and_every_gradient_equal_the_recording(recorded) -> None:
    """Two samples in one batch, with packed motion frames and poses. 2e-6 and 2e-5: the order of summation over the blocks."""
    config, tensors = recorded
    speech = SpeechArch(
        layers=tuple(config["audio_inject_layers"]), features=config["audio_dim"], tokens=config["num_audio_token"]
    )
    arch = WanArch(
        dim=config["dim"], ffn_dim=config["ffn_dim"], heads=config["num_heads"], layers=config["num_layers"],
        text_dim=config["text_dim"], text_tokens=config["text_len"], freq_dim=config["freq_dim"], speech=speech,
    )  # fmt: skip
    model = WanTransformer(arch, Precision(matmul=torch.float32))
    weights = group(tensors, "sd.")
    model.load_state_dict({to_native(name): tensor for name, tensor in weights.items()})
    assert sorted(to_official(name) for name in model.state_dict()) == sorted(weights)
    leaves = {
        field: [tensors[f"in.{name}.{i}"].clone().requires_grad_() for i in range(2)] for field, name in FIELDS.items()
    }
    audio = tensors["in.audio_input"].clone().requires_grad_()
    out = model(WanInputs(timestep=tensors["in.t"], audio=list(audio), **leaves))
    loss = sum((velocity - tensors[f"in.target.{i}"]).square().mean() for i, velocity in enumerate(out)) / 2
    loss.backward()
    for i, velocity in enumerate(out):
        assert relative(velocity, tensors[f"out.{i}"]) <= 2e-6
    assert relative(loss, tensors["loss"]) <= 2e-6
    assert relative(audio.grad, tensors["gi.audio_input"]) <= 2e-5
    for field, name in FIELDS.items():
        for i, leaf in enumerate(leaves[field]):
            assert relative(leaf.grad, tensors[f"gi.{name}.{i}"]) <= 2e-5, (field, i)
    gradients = {to_native(name): gradient for name, gradient in group(tensors, "gp.").items()}
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert found.keys() == gradients.keys()
    norm = max(float(gradient.norm()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        # k.bias has a gradient of exactly zero in exact arithmetic: compare on the scale of the whole gradient too
        off = float((found[name] - gradient).norm())
        assert off <= 2e-5 * float(gradient.norm()) or off <= 1e-7 * norm, name
