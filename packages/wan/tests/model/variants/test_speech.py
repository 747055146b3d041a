"""S2V against a recording of the official code: outputs and every gradient, and in a batch whose
samples differ in what they have."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from ditkit_core.models.encoders import Denoiser, GenerationRequest
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.testing.full_size_split import balanced, divided_step
from ditkit_core.testing.world import make_model
from ditkit_wan.model.inputs import WanInputs
from ditkit_wan.model.rope import angles_at
from ditkit_wan.model.transformer import WanTransformer
from ditkit_wan.model.variants.speech import motion_angles
from ditkit_wan.presets import PRESETS, SPEECH_LAYERS, SpeechArch, WanArch
from ditkit_wan.sampling import WanSampler
from ditkit_wan.spec import WAN
from ditkit_wan.state_dict import to_native, to_official

GOLDEN = Path(__file__).parents[2] / "golden" / "wan22_s2v_fp32.safetensors"
FIELDS = {
    "latents": "x", "text": "context", "reference": "ref_latents", "motion": "motion_latents",
    "pose": "cond_states",
}  # fmt: skip


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.double()
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30))


@pytest.fixture(scope="module")
def recorded() -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    with safe_open(GOLDEN, "pt") as file:
        return json.loads(file.metadata()["config"]), {
            key: file.get_tensor(key)
            for key in file.keys()  # noqa: SIM118
        }


def group(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {
        key.removeprefix(prefix): tensor
        for key, tensor in tensors.items()
        if key.startswith(prefix)
    }


def native_name(name: str, speech: SpeechArch) -> str:
    """Our name of a recorded parameter. The recorded model is smaller than the published one, and
    so has its second injector in another block."""
    native = to_native(name)
    assert native is not None and to_official(native) == name
    for block, published in zip(speech.layers, SPEECH_LAYERS, strict=False):
        native = native.replace(f"layers.{published}.audio.", f"layers.{block}.audio.")
    return native


def test_outputs_and_every_gradient_equal_the_recording(recorded) -> None:
    """Two samples in one batch, with packed motion frames and poses. 2e-6 and 2e-5: the order of
    summation over the blocks."""
    config, tensors = recorded
    speech = SpeechArch(
        layers=tuple(config["audio_inject_layers"]),
        features=config["audio_dim"],
        tokens=config["num_audio_token"],
    )
    arch = WanArch(
        dim=config["dim"], ffn_dim=config["ffn_dim"], heads=config["num_heads"],
        layers=config["num_layers"],
        text_dim=config["text_dim"], text_tokens=config["text_len"], freq_dim=config["freq_dim"],
        speech=speech,
    )  # fmt: skip
    model = WanTransformer(arch, Precision(matmul=torch.float32))
    weights = group(tensors, "sd.")
    native = {name: native_name(name, speech) for name in weights}
    model.load_state_dict({native[name]: tensor for name, tensor in weights.items()})
    leaves = {
        field: [tensors[f"in.{name}.{i}"].clone().requires_grad_() for i in range(2)]
        for field, name in FIELDS.items()
    }
    audio = tensors["in.audio_input"].clone().requires_grad_()
    out = model(WanInputs(timestep=tensors["in.t"], audio=list(audio), **leaves))
    loss = (
        sum(
            (velocity - tensors[f"in.target.{i}"]).square().mean() for i, velocity in enumerate(out)
        )
        / 2
    )
    loss.backward()
    for i, velocity in enumerate(out):
        assert relative(velocity, tensors[f"out.{i}"]) <= 2e-6
    assert relative(loss, tensors["loss"]) <= 2e-6
    assert relative(audio.grad, tensors["gi.audio_input"]) <= 2e-5
    for field, name in FIELDS.items():
        for i, leaf in enumerate(leaves[field]):
            assert relative(leaf.grad, tensors[f"gi.{name}.{i}"]) <= 2e-5, (field, i)
    gradients = {native[name]: gradient for name, gradient in group(tensors, "gp.").items()}
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert ours.keys() == gradients.keys()
    norm = max(float(gradient.norm()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        # k.bias has a gradient of exactly zero in exact arithmetic: compare on the scale of the
        # whole gradient too
        off = float((ours[name] - gradient).norm())
        assert off <= 2e-5 * float(gradient.norm()) or off <= 1e-7 * norm, name


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
@pytest.mark.slow
def test_at_its_published_size_it_is_divided_over_devices_that_refuse_to_mix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arch = PRESETS["s2v-14b"]
    assert arch.speech is not None
    arch = replace(arch, layers=5, speech=replace(arch.speech, layers=(0, 4)))
    with torch.device("meta"):
        planned = [WAN.training.empty_item(arch, (81, 448, 832), ())]
    assert planned[0]["latents"].shape == (16, 20, 56, 104) and planned[0]["audio"].shape == (
        25,
        1024,
        80,
    )
    # 20 frames of 28 x 52 tokens, the reference, and 1456 + 364 + 4 · 91 for the frames before
    assert WAN.training.num_tokens(planned[0]) == 21 * 1456 + 1456 + 364 + 364
    divided = divided_step(
        WAN, arch, balanced(WAN, 3), planned, policy="full", rank=32, patch=monkeypatch
    )
    divided.check()
    # tokens, modulation, time, rotary table, text, late, and the rows and styles of speech; of
    # these the tokens alone come from an adapter
    assert [(carry["tensors"], carry["gradients"]) for carry in divided.carried] == [(8, 1)] * 2


def test_motion_is_spread_over_the_positions_of_the_clip_as_numpy_rounds() -> None:
    """`rope_precompute` truncates numpy's linspace, which is an integer too low at some sizes: 119
    rows in halves are one."""
    head_dim, device = 24, torch.device("cpu")
    for height, width in ((28, 52), (119, 8), (149, 8)):
        expected = []
        for first, times, number, step in ((1, 1, 1, 1), (3, 1, 2, 2), (19, 4, 16, 4)):
            # times run from -first towards the clip
            positions = [
                -np.linspace(first, first - number + 1, times).astype(int),
                *(
                    np.linspace(0, size - 1, 2 * size // (2 * step)).astype(int)
                    for size in (height, width)
                ),
            ]
            expected.append(angles_at([torch.from_numpy(axis) for axis in positions], head_dim))
        assert torch.equal(motion_angles(height, width, head_dim, device), torch.cat(expected))


def test_a_sample_starts_from_its_reference_and_its_negative_side_hears_nothing(
    checkpoint: Path,
) -> None:
    """speech2video.py: the unconditional side has zeros as audio; the reference is decoded in front
    of what is generated."""
    calls: list[WanInputs] = []

    def engine(model: Any, inputs: WanInputs) -> list[torch.Tensor]:
        calls.append(inputs)
        return [torch.zeros_like(inputs.latents[0])]

    tiny = WanArch(dim=24, ffn_dim=32, heads=2, layers=1, text_dim=20)
    denoiser = Denoiser(make_model(WAN, tiny), engine, 4.5)
    sampler = WanSampler(
        ModelPaths(base=str(checkpoint)), torch.device("cpu"), arch=PRESETS["s2v-14b"]
    )
    conditions = {
        "text": torch.ones(3, 4096), "audio": torch.ones(25, 1024, 8), "reference": torch.full((16,
        1, 8, 8), 3.0),
    }  # fmt: skip
    motion = {"motion": torch.full((16, 19, 8, 8), 2.0)}
    for extra, in_front in (({}, 1), (motion, 19)):
        calls.clear()
        job = GenerationRequest(
            conditions=conditions | extra, negative={"text": torch.zeros(3, 4096)}, frames=9,
            height=64, width=64, steps=2,
            guidance=4.5, seed=0, shift=0.0,
        )  # fmt: skip
        steps = sampler.denoise(job)
        next(steps)
        try:
            while True:
                steps.send(denoiser)
        except StopIteration as end:
            latents = end.value
        assert latents.shape == (16, in_front + 2, 8, 8)
        assert torch.equal(
            latents[:, :in_front], (extra or conditions)["motion" if extra else "reference"]
        )
        assert [inputs.latents[0].shape for inputs in calls] == [(16, 2, 8, 8)] * 4
        heard = [bool(inputs.audio[0].any()) for inputs in calls if inputs.audio]
        assert heard == [True, False] * 2
