"""Our transformer against recordings of the official code (outputs and gradients made by running
it)."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch.overrides import TorchFunctionMode

from ditkit_core.models.precision import Precision, PrecisionConfig
from ditkit_wan.model.transformer import WanInputs, WanTransformer
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN
from ditkit_wan.state_dict import to_native

GOLDEN = Path(__file__).parents[1] / "golden"


class Recording:
    """One recorded forward and backward."""

    def __init__(self, name: str):
        with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
            self.config = json.loads(file.metadata()["config"])
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)

    def group(self, prefix: str) -> dict[str, torch.Tensor]:
        return {
            key.removeprefix(prefix): t for key, t in self.tensors.items() if key.startswith(prefix)
        }

    def model(self, precision: Precision, text_tokens: int) -> WanTransformer:
        c = self.config
        arch = WanArch(
            dim=c["dim"], ffn_dim=c["ffn_dim"], heads=c["num_heads"], layers=c["num_layers"],
            in_channels=c["in_dim"],
            out_channels=c["out_dim"], text_dim=c["text_dim"], text_tokens=text_tokens,
            freq_dim=c["freq_dim"],
            image_dim=self.tensors["in.clip_fea"].shape[-1] if "in.clip_fea" in self.tensors else 0,
        )  # fmt: skip
        model = WanTransformer(arch, precision)
        model.load_state_dict({to_native(key): tensor for key, tensor in self.group("sd.").items()})
        return model


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-30))


def run(
    recording: Recording,
    model: WanTransformer,
    latents: torch.Tensor,
    text: torch.Tensor,
    t: torch.Tensor,
):
    latents, text = latents.requires_grad_(), text.requires_grad_()
    out = model(WanInputs([latents], t, [text]))[0]
    loss = (
        (out.float() - recording.tensors[recording_target(recording)].reshape(out.shape))
        .square()
        .mean()
    )
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return out, loss, latents.grad, text.grad, gradients


def recording_target(recording: Recording) -> str:
    return next(key for key in recording.tensors if key.startswith("in.target"))


@pytest.mark.parametrize("name", ["wan22_t2v_fp32", "diffsynth_wan_t2v_fp32"])
def test_fp32_outputs_and_gradients_equal_the_recording(name):
    """2e-6 on the output is reachable only with the fp64 sinusoid; 2e-5 on gradients is summation
    order over two blocks."""
    recording = Recording(name)
    t = recording.tensors
    official = name == "wan22_t2v_fp32"
    text = t["in.context.0"] if official else t["in.context"][0]
    latents = t["in.x.0"] if official else t["in.latents"][0]
    # DiffSynth hands the text over unpadded
    model = recording.model(
        Precision(matmul=torch.float32), recording.config.get("text_len", len(text))
    )
    out, loss, d_latents, d_text, gradients = run(
        recording, model, latents, text, t["in.t" if official else "in.timestep"]
    )
    assert relative(out, t["out.0"].reshape(out.shape)) <= 2e-6
    assert relative(loss, t["loss"]) <= 2e-6
    assert (
        relative(d_latents, t["gi.x.0" if official else "gi.latents"].reshape(latents.shape))
        <= 2e-5
    )
    assert (
        relative(d_text, t["gi.context.0" if official else "gi.context"].reshape(text.shape))
        <= 2e-5
    )
    check_parameters(recording, gradients)


def check_parameters(
    recording: Recording, gradients: dict[str, torch.Tensor], rounding: float = 1e-7
) -> None:
    expected = {to_native(key): tensor for key, tensor in recording.group("gp.").items()}
    assert expected.keys() == gradients.keys()
    norm = max(float(tensor.norm()) for tensor in expected.values())
    for key, tensor in expected.items():
        # k.bias has a gradient of exactly zero in exact arithmetic: compare on the scale of the
        # whole gradient too
        assert (
            relative(gradients[key], tensor) <= 2e-5
            or float((gradients[key] - tensor).norm()) <= rounding * norm
        ), key


def test_image_to_video_in_fp32_equals_the_recording():
    """`y` behind the latents, image tokens with keys and values of their own; tolerances as
    above."""
    recording = Recording("wan21_i2v_fp32")
    t = recording.tensors
    model = recording.model(Precision(matmul=torch.float32), recording.config["text_len"])
    given = {
        name: t[f"in.{name}"].requires_grad_() for name in ("x.0", "context.0", "y.0", "clip_fea")
    }
    latents, text, y, image = given.values()
    out = model(WanInputs([latents], t["in.t"], [text], y=[y], image=[image[0]]))[0]
    loss = (out - t["in.target.0"]).square().mean()
    loss.backward()
    assert relative(out, t["out.0"]) <= 2e-6 and relative(loss, t["loss"]) <= 2e-6
    for name, tensor in given.items():
        assert relative(tensor.grad, t[f"gi.{name}"]) <= 2e-5, name
    # 512 rows of text, all but 7 of them equal: the biases of their keys are 2.6e-5 off an fp64 run
    # in the recording, and 2.1e-5 in ours
    check_parameters(
        recording, {name: p.grad for name, p in model.named_parameters()}, rounding=2e-7
    )


# What the bf16 recording is off by from an fp64 run of the same weights, by our own run of it, and
# what we are off from the recording by: (the recording from fp64, ours from fp64, ours from the
# recording), then the tolerance, 1.5 times the last. The recording rounds q and k twice (after the
# norm and before attention) and we once, so both are some bf16 roundings (4e-3) away from exact and
# from each other; what is summed over two blocks' backward (text, single biases) collects more of
# them.
BF16 = {
    "output": 3.8e-3,  # 4.0e-3, 3.6e-3, 2.5e-3
    "loss": 2.5e-4,  # 9.1e-4, 7.6e-4, 1.6e-4
    "latents": 8.3e-3,  # 6.2e-3, 6.0e-3, 5.5e-3
    "text": 1.75e-2,  # 1.4e-2, 1.3e-2, 1.2e-2
    "all parameters": 5.8e-3,  # 5.4e-3, 5.2e-3, 3.8e-3
    # 1.9e-2, 1.9e-2, 2.0e-2: biases of k, whose gradients all but cancel in the softmax
    "any parameter": 3e-2,
}


def flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradients[name].detach().double().flatten() for name in sorted(gradients)])


def test_the_bf16_recording_is_met_within_rounding():
    recording = Recording("wan22_t2v_autocast_bf16")
    t, given = recording.tensors, ("in.x.0", "in.context.0")
    half = bf16_model(recording, Precision(matmul=torch.bfloat16))
    exact = recording.model(Precision(matmul=torch.float64), recording.config["text_len"]).double()

    out, loss, d_latents, d_text, d_parameters = run(
        recording, half, *(t[key].clone() for key in given), t["in.t"]
    )
    assert out.dtype == torch.float32
    ours = {
        "output": out,
        "loss": loss,
        "latents": d_latents,
        "text": d_text,
        "all parameters": flat(d_parameters),
    }
    out, loss, d_latents, d_text, d_exact = run(
        recording, exact, *(t[key].double() for key in given), t["in.t"]
    )
    truth = {
        "output": out,
        "loss": loss,
        "latents": d_latents,
        "text": d_text,
        "all parameters": flat(d_exact),
    }
    d_recorded = {to_native(key): tensor for key, tensor in recording.group("gp.").items()}
    assert d_recorded.keys() == d_parameters.keys()
    theirs = {
        "output": t["out.0"],
        "loss": t["loss"],
        "latents": t["gi.x.0"],
        "text": t["gi.context.0"],
    }
    theirs["all parameters"] = flat(d_recorded)
    for name, recorded in theirs.items():
        assert relative(ours[name], recorded) < BF16[name], name
        assert relative(ours[name], truth[name]) < 1.25 * relative(recorded, truth[name]), name
    off = {name: relative(d_parameters[name], recorded) for name, recorded in d_recorded.items()}
    assert {name: error for name, error in off.items() if error >= BF16["any parameter"]} == {}


def preset(name: str, matmul: torch.dtype = torch.bfloat16, **fields: str) -> Precision:
    return PrecisionConfig(preset=name, **fields).precision(matmul, WAN.precision.reference)


def bf16_model(recording: Recording, precision: Precision) -> WanTransformer:
    model = recording.model(precision, recording.config["text_len"])
    for name, parameter in model.named_parameters():
        if not WAN.precision.keep_fp32(name):
            parameter.data = parameter.data.bfloat16()
    return model


def found(recording: Recording, precision: Precision) -> dict[str, torch.Tensor]:
    """Output, loss and gradients with the recording's weights, those of matmuls rounded to bf16."""
    model, t = bf16_model(recording, precision), recording.tensors
    out, loss, d_latents, d_text, d_parameters = run(
        recording, model, t["in.x.0"].clone(), t["in.context.0"].clone(), t["in.t"]
    )
    return {
        "output": out,
        "loss": loss,
        "latents": d_latents,
        "text": d_text,
        "parameters": flat(d_parameters),
    }


class ExactBf16(TorchFunctionMode):
    """Linear layers, GELU and attention in bf16 by their definition: computed in fp64 and rounded
    to bf16 where the official code's kernels round. Attention rounds twice: the exponentials,
    before they meet the values, and its result.

    Args:
        replace: Whether the definition's results are passed on, or those of this CPU's kernels.
    """

    def __init__(self, *, replace: bool):
        super().__init__()
        self.replace = replace
        self.differing: Counter[str] = Counter()
        """Elements in which this CPU's kernel and the definition differ, by function; 0 where they
        never do."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        definitions = {
            F.linear: F.linear,
            F.gelu: F.gelu,
            F.scaled_dot_product_attention: self.attention,
        }
        if func not in definitions or out.dtype != torch.bfloat16:
            return out
        wide = [arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args]
        exact = definitions[func](*wide, **(kwargs or {})).bfloat16()
        self.differing[func.__name__] += int((exact != out).sum())
        return exact if self.replace else out

    @staticmethod
    def attention(q, k, v, attn_mask, dropout_p, is_causal):
        assert attn_mask is None and dropout_p == 0.0 and not is_causal
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return weights.bfloat16().double() @ v / weights.sum(-1, keepdim=True)


def exact_bf16(
    recording: Recording, precision: Precision, *, replace: bool
) -> tuple[torch.Tensor, Counter[str]]:
    """Output of the forward with the recording's weights, and in how many elements this CPU's
    kernels differ from the definition."""
    model, t = bf16_model(recording, precision), recording.tensors
    with torch.no_grad(), ExactBf16(replace=replace) as mode:
        out = model(WanInputs([t["in.x.0"]], t["in.t"], [t["in.context.0"]]))[0]
    assert mode.differing.keys() == {"linear", "gelu", "scaled_dot_product_attention"}
    return out, mode.differing


def test_reference_makes_the_roundings_of_the_official_bf16_run():
    """To 1e-6 on any CPU: every rounding of the official forward is made, in the same place. What
    is left to the CPU is computed in fp32 or wider and is 2e-7 off."""
    recording = Recording("wan22_t2v_autocast_bf16")
    t = recording.tensors
    out, _ = exact_bf16(recording, preset("reference"), replace=True)
    loss = (out - t[recording_target(recording)].reshape(out.shape)).square().mean()
    assert relative(out, t["out.0"]) < 1e-6 and relative(loss, t["loss"]) < 1e-6
    plain, _ = exact_bf16(recording, preset("default"), replace=True)
    assert 1e-3 < relative(plain, t["out.0"]) < BF16["output"], "the roundings make a difference"


# How far `reference` may be from the recording where attention rounds elsewhere than it did on the
# recording's machine. Torch's kernel for avx2 rounds some exponentials to the other bf16 number: 25
# of the 1536 elements that attention returns differ by one rounding, which two blocks carry on.
# Which elements these are is the kernel's accident, so the bounds are 1.5 times the largest of 25
# runs in which one element in 20, at random, is moved by one rounding; then this largest, and what
# avx2 gives.
OTHER_KERNELS = {
    "output": 3.5e-3,  # 2.3e-3, 1.3e-3
    "loss": 8.1e-4,  # 5.4e-4, 1.4e-4
    "latents": 8.6e-3,  # 5.8e-3, 4.7e-3
    "text": 1.8e-2,  # 1.2e-2, 9.1e-3
    "parameters": 5e-3,  # 3.3e-3, 2.5e-3
}


def test_reference_is_the_official_bf16_run():
    """With this CPU's kernels: the output to 1e-6 where they round as the recording's machine did,
    which is measured in the same forward. In the backward some roundings are not made: autocast
    casts gradients where its casts of the forward were."""
    recording = Recording("wan22_t2v_autocast_bf16")
    t = recording.tensors
    theirs = {
        "output": t["out.0"],
        "loss": t["loss"],
        "latents": t["gi.x.0"],
        "text": t["gi.context.0"],
    }
    theirs["parameters"] = flat(
        {to_native(key): tensor for key, tensor in recording.group("gp.").items()}
    )
    default, reference = found(recording, preset("default")), found(recording, preset("reference"))
    off = {
        name: (relative(reference[name], theirs[name]), relative(default[name], theirs[name]))
        for name in theirs
    }
    _, differing = exact_bf16(recording, preset("reference"), replace=False)
    if differing.total() == 0:
        assert off["output"][0] < 1e-6 and off["loss"][0] < 1e-6
        assert all(mine < 0.7 * plain for mine, plain in off.values()), off
    else:
        assert all(mine < OTHER_KERNELS[name] for name, (mine, _) in off.items()), off
        # At most 0.89 of it in those runs; the others can come out on either side.
        assert all(off[name][0] < off[name][1] for name in ("output", "parameters")), off


def test_in_fp32_reference_is_default_but_for_the_rotation():
    recording = Recording("wan22_t2v_fp32")
    t = recording.tensors
    target = t[recording_target(recording)]
    outs = []
    for name in ("default", "reference"):
        model = recording.model(preset(name, torch.float32), recording.config["text_len"])
        out = model(WanInputs([t["in.x.0"]], t["in.t"], [t["in.context.0"]]))[0]
        outs.append(out.detach().reshape(target.shape))
    assert relative(outs[1], t["out.0"].reshape(target.shape)) < 2e-6
    assert relative(outs[1], outs[0]) < 1e-6


def test_fast_is_between_default_and_a_timestep_in_bf16():
    """Measured on the recording: 3.6e-3, 5.4e-3 and 1.2e-1 of the output from an fp64 run."""
    recording = Recording("wan22_t2v_autocast_bf16")
    t = recording.tensors
    exact = recording.model(Precision(matmul=torch.float64), recording.config["text_len"]).double()
    truth = exact(WanInputs([t["in.x.0"].double()], t["in.t"], [t["in.context.0"].double()]))[0]
    precisions = {
        "default": preset("default"),
        "fast": preset("fast"),
        "timestep": preset("default", timestep="bf16"),
    }
    off = {
        name: relative(found(recording, precision)["output"], truth)
        for name, precision in precisions.items()
    }
    assert off["default"] < off["fast"] < 1e-2 < 0.1 * off["timestep"] * 1.5, off
