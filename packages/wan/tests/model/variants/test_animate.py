"""Animate against a recording of the official code and against diffusers: outputs and every
gradient."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ditkit_core.adapters.config import ExportConfig
from ditkit_core.adapters.files.export import export_merged
from ditkit_core.adapters.files.inspect import _is_form
from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.precision import Precision
from ditkit_core.nn.rope import timestep_features
from ditkit_core.testing.full_size_split import balanced, divided_step
from ditkit_core.weights.load import StoredParameters
from ditkit_wan.model.inputs import WanInputs, assemble, make_inputs
from ditkit_wan.model.transformer import WanTransformer
from ditkit_wan.model.variants.animate import blur_kernel
from ditkit_wan.presets import PRESETS, AnimateArch, WanArch, arch_from_config
from ditkit_wan.spec import WAN
from ditkit_wan.state_dict import NAMES

GOLDEN = Path(__file__).parents[2] / "golden" / "wan22_animate_fp32.safetensors"
FIELDS = {"latents": "x", "y": "y", "text": "context", "pose": "pose_latents"}
TINY = AnimateArch(
    layers=(0, 5), face_channels=(5, 6, 8, 8), style=12, motion=5, motion_dim=10, width=16
)
SIZES: dict[str, Any] = {
    "dim": 40, "ffn_dim": 56, "heads": 2, "layers": 10, "in_channels": 36, "text_dim": 20,
    "text_tokens": 12, "freq_dim": 24, "image_dim": 20,
}  # fmt: skip
GRID = (4, 6)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.double()
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30))


@pytest.fixture(scope="module")
def recorded() -> dict[str, torch.Tensor]:
    with safe_open(GOLDEN, "pt") as file:
        config = json.loads(file.metadata()["config"])
        assert all(
            SIZES[ours] == config[theirs]
            for ours, theirs in {"dim": "dim", "heads": "num_heads", "layers": "num_layers"}.items()
        )
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)


def native(name: str) -> str | None:
    """Our name of a recorded parameter; None for a constant. A face of 32 pixels has three residual
    blocks in place of seven."""
    parts = NAMES.to_native(name.replace("convs.4.weight", "convs.8.weight"))
    assert parts is not None, name
    return parts[0].name if parts else None


def golden_model(tensors: Mapping[str, torch.Tensor]) -> WanTransformer:
    model = WanTransformer(WanArch(**SIZES, animate=TINY), Precision(matmul=torch.float32))
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    stored = {
        key.removeprefix("sd."): tensor for key, tensor in tensors.items() if key.startswith("sd.")
    }
    constants = {key: tensor for key, tensor in stored.items() if native(key) is None}
    assert len(constants) == 6 and all(
        torch.equal(kernel, blur_kernel()) for kernel in constants.values()
    )
    names = {key: ours for key in stored if (ours := native(key))}
    model.load_state_dict({ours: stored[key].view(shapes[ours]) for key, ours in names.items()})
    return model


def test_outputs_and_every_gradient_equal_the_recording(recorded) -> None:
    """Two samples in one batch. 2e-6 and 2e-5: the order of summation over the blocks."""
    model = golden_model(recorded)
    leaves = {
        field: [recorded[f"in.{name}.{i}"].clone().requires_grad_() for i in range(2)]
        for field, name in FIELDS.items()
    }
    stacked = {
        field: recorded[f"in.{name}"].clone().requires_grad_()
        for field, name in (("image", "clip_fea"), ("face", "face_pixel_values"))
    }
    out = model(
        WanInputs(
            timestep=recorded["in.t"],
            **leaves,
            **{field: list(leaf) for field, leaf in stacked.items()},
        )
    )
    loss = (
        sum(
            (velocity - recorded[f"in.target.{i}"]).square().mean()
            for i, velocity in enumerate(out)
        )
        / 2
    )
    loss.backward()
    for i, velocity in enumerate(out):
        assert relative(velocity, recorded[f"out.{i}"]) <= 2e-6
    assert relative(loss, recorded["loss"]) <= 2e-6
    assert relative(stacked["image"].grad, recorded["gi.clip_fea"]) <= 2e-5
    assert relative(stacked["face"].grad, recorded["gi.face_pixel_values"]) <= 2e-5
    for field, name in FIELDS.items():
        for i, leaf in enumerate(leaves[field]):
            assert relative(leaf.grad, recorded[f"gi.{name}.{i}"]) <= 2e-5, (field, i)
    gradients = {
        native(key.removeprefix("gp.")): value
        for key, value in recorded.items()
        if key.startswith("gp.")
    }
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert ours.keys() == gradients.keys()
    norm = max(float(gradient.norm()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        # k.bias has a gradient of exactly zero in exact arithmetic: compare on the scale of the
        # whole gradient too
        off = float((ours[name] - gradient.view_as(ours[name])).norm())
        assert off <= 2e-5 * float(gradient.norm()) or off <= 1e-7 * norm, name


def test_the_motion_encoder_has_gradients_where_pixels_need_none(recorded) -> None:
    """The authors' reentrant checkpoint returns none then: 28 parameters would never be trained."""
    model = golden_model(recorded)
    given = {
        field: [recorded[f"in.{name}.{i}"] for i in range(2)] for field, name in FIELDS.items()
    }
    faces = recorded["in.face_pixel_values"]
    out = model(
        WanInputs(
            timestep=recorded["in.t"],
            image=list(recorded["in.clip_fea"]),
            face=list(faces),
            **given,
        )
    )
    (
        sum(
            (velocity - recorded[f"in.target.{i}"]).square().mean()
            for i, velocity in enumerate(out)
        )
        / 2
    ).backward()
    encoder = dict(
        model.embed.animate.motion_encoder.named_parameters(prefix="embed.animate.motion_encoder")
    )
    gradients = {
        native(key.removeprefix("gp.")): value
        for key, value in recorded.items()
        if key.startswith("gp.motion_encoder.")
    }
    # the directions are not under the checkpoint
    assert encoder.keys() == gradients.keys() and len(encoder) == 1 + 28
    for name, parameter in encoder.items():
        assert relative(parameter.grad, gradients[name].view_as(parameter)) <= 2e-5, name


def diffusers_pair(dtype: torch.dtype) -> tuple[WanTransformer, Any]:
    """Ours and diffusers' with equal random weights, nothing left at an initial zero or one."""
    from diffusers import WanAnimateTransformer3DModel

    torch.manual_seed(0)
    # it splits image tokens from exactly 512 rows of text
    arch = WanArch(**SIZES | {"text_tokens": 512}, animate=TINY)
    theirs = WanAnimateTransformer3DModel(
        num_attention_heads=arch.heads, attention_head_dim=arch.head_dim, text_dim=arch.text_dim,
        freq_dim=arch.freq_dim,
        ffn_dim=arch.ffn_dim, num_layers=arch.layers, image_dim=arch.image_dim,
        added_kv_proj_dim=arch.dim,
        motion_encoder_channel_sizes={"32": 5, "16": 6, "8": 8, "4": 8}, motion_encoder_size=32,
        motion_style_dim=TINY.style,
        motion_dim=TINY.motion, motion_encoder_dim=TINY.motion_dim,
        face_encoder_hidden_dim=TINY.width,
    )  # fmt: skip
    for name, parameter in theirs.named_parameters():
        parameter.data = torch.randn_like(parameter) / (
            1 if "motion_encoder" in name else parameter[0].numel() ** 0.5
        )
        if "norm" in name and name.endswith("weight"):
            parameter.data = 1 + 0.1 * parameter
        if "time_embedder" in name:
            parameter.data = 0.02 * torch.randn_like(parameter)
    ours = WanTransformer(arch, Precision(matmul=dtype))
    state = {}
    tensors = dict(theirs.named_parameters())
    for name in ours.state_dict():
        state[name] = torch.cat(
            [tensors[part.name].detach() for part in NAMES.from_native["diffusers"](name)]
        )
    ours.load_state_dict(state)
    return ours.to(dtype), theirs.to(dtype)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [pytest.param(torch.float32, 1e-5, marks=pytest.mark.slow), (torch.float64, 1e-10)],
    ids=["fp32", "fp64"],
)
def test_animate_equals_diffusers(dtype, tolerance, monkeypatch) -> None:
    """Its rows of keys and values are two tensors; its QR and its other islands of fp32 are widened
    for fp64."""
    ours, theirs = diffusers_pair(dtype)
    if dtype == torch.float64:
        from diffusers.models import embeddings
        from diffusers.models.transformers import transformer_wan_animate

        sinusoid = lambda times, dim, **_: timestep_features(times, dim)
        monkeypatch.setattr(embeddings, "get_timestep_embedding", sinusoid)
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        monkeypatch.setattr(transformer_wan_animate.WanRotaryPosEmbed, "forward", _tables)
        monkeypatch.setattr(torch, "float32", torch.float64)
    shapes = {
        "latents": (16, 4, *GRID), "y": (20, 4, *GRID), "text": (512, 20), "image": (257, 20),
        "pose": (16, 3, *GRID), "face": (3, 9, 32, 32),
    }  # fmt: skip
    random = torch.Generator().manual_seed(1)
    given = {
        name: torch.randn(2, *shape, generator=random, dtype=torch.double)
        .to(dtype)
        .requires_grad_()
        for name, shape in shapes.items()
    }
    goal = torch.randn(
        given["latents"].shape, generator=torch.Generator().manual_seed(2), dtype=torch.double
    )

    def gradients(out: torch.Tensor) -> dict[str, torch.Tensor]:
        (out.double() - goal).square().mean().backward()
        leaves = {name: tensor.grad for name, tensor in given.items()}
        for tensor in given.values():
            tensor.grad = None
        return leaves

    timestep = torch.tensor([731.25, 12.5], dtype=torch.double)
    out = torch.stack(
        ours(WanInputs(timestep=timestep, **{name: list(tensor) for name, tensor in given.items()}))
    )
    mine = gradients(out)
    their_out = theirs(
        hidden_states=torch.cat([given["latents"], given["y"]], 1), timestep=timestep,
        encoder_hidden_states=given["text"],
        encoder_hidden_states_image=given["image"], pose_hidden_states=given["pose"],
        face_pixel_values=given["face"], return_dict=False,
    )[0]  # fmt: skip
    pairs = [("output", out, their_out)]
    pairs += [(name, mine[name], gradient) for name, gradient in gradients(their_out).items()]
    named, grads = dict(theirs.named_parameters()), dict(ours.named_parameters())
    for name, parameter in grads.items():
        theirs_of = torch.cat(
            [named[part.name].grad for part in NAMES.from_native["diffusers"](name)]
        )
        pairs.append((name, parameter.grad, theirs_of))
    norm = max(float(their.detach().norm()) for name, _, their in pairs if name != "output")
    for name, mine, their in pairs:  # biases of k are rounding alone
        off = float((mine.detach().double() - their.detach().double()).norm())
        assert off <= tolerance * max(float(their.detach().norm()), 1e-2 * norm), (name, off)


def _tables(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from ditkit_wan.model.rope import rotary_angles

    _, _, frames, height, width = hidden_states.shape
    angles = rotary_angles(
        (frames, height // 2, width // 2), self.attention_head_dim, hidden_states.device
    )
    both = angles.repeat_interleave(2, -1)[None, :, None]
    return both.cos(), both.sin()


def test_files_of_all_programs_have_these_tensors_and_no_others() -> None:
    """At the published size: the official file's 1441 names, as ComfyUI keeps them, and those of
    diffusers' class, by shape."""
    from diffusers import WanAnimateTransformer3DModel

    with torch.device("meta"):
        ours = WanTransformer(PRESETS["animate-14b"], Precision()).state_dict()
        theirs = WanAnimateTransformer3DModel(image_dim=1280, added_kv_proj_dim=5120)
    assert arch_from_config(dict(theirs.config), {}) == PRESETS["animate-14b"]
    official: dict[str, torch.Tensor] = {}
    diffusers: dict[str, tuple[int, ...]] = {}
    for name, tensor in ours.items():
        (part,) = NAMES.from_native["official"](name)
        official |= NAMES.stored("official", part.name, tensor)
        assert [(slice_.name, slice_.of) for slice_ in NAMES.to_native(part.name) or ()] == [
            (name, 1)
        ]
        parts = NAMES.from_native["diffusers"](name)
        diffusers |= {part.name: (len(tensor) // len(parts), *tensor.shape[1:]) for part in parts}
        assert [NAMES.to_native(part.name)[0].index for part in parts] == list(range(len(parts)))  # type: ignore[index]
    assert diffusers == {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    kernels = [name for name in official if NAMES.to_native(name) == ()]
    assert (
        len(official) == 1441
        and len(kernels) == 14
        and all(name.endswith(".0.kernel") for name in kernels)
    )
    assert official["motion_encoder.enc.net_app.convs.7.conv2.2.bias"].shape == (1, 512, 1, 1)
    assert NAMES.to_native("motion_encoder.enc.net_app.convs.0.0.kernel") is None


@pytest.mark.parametrize("form", ["official", "diffusers"])
def test_a_whole_transformer_is_written_and_read_in_each_form(form: str, tmp_path: Path) -> None:
    """diffusers' own conversion makes of the official file what diffusers' form has; kernels of
    blurs are all that it leaves over."""
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    ours, theirs = diffusers_pair(torch.float32)
    config = ExportConfig(forms=[form], dtype="fp32")
    spec = WAN.for_arch(ours.embed.arch)
    (folder,) = export_merged(ours, spec, tmp_path, config, metadata={})
    source = SafetensorsSource.open(folder)
    tensors = {name: source.read(name) for name in source.tensors}
    converted = (
        convert_wan_transformer_to_diffusers(dict(tensors)) if form == "official" else tensors
    )
    expected = theirs.state_dict()
    assert {
        name for name in converted.keys() ^ expected.keys() if not name.endswith(".0.kernel")
    } == set()
    assert all(torch.equal(converted[name], tensor) for name, tensor in expected.items())
    assert [
        name for name in spec.architecture.names.from_native if _is_form(source, "", spec, name)
    ] == [form]
    shapes = {name: tuple(tensor.shape) for name, tensor in ours.state_dict().items()}
    stored = StoredParameters.of(source, NAMES, shapes)
    assert all(torch.equal(stored.read(name), tensor) for name, tensor in ours.state_dict().items())


def test_inputs_that_do_not_fit_their_clip_are_refused() -> None:
    model = WanTransformer(WanArch(**SIZES, animate=TINY), Precision(matmul=torch.float32))
    item = {
        "latents": torch.zeros(16, 4, *GRID), "y": torch.zeros(20, 4, *GRID), "text": torch.zeros(3,
        20), "image": torch.zeros(257, 20),
        "pose": torch.zeros(16, 3, *GRID), "face": torch.zeros(3, 9, 32, 32),
    }  # fmt: skip
    for changed, message in (
        (
            {"face": torch.zeros(3, 9, 64, 64)},
            r"'face' has the shape .* give pixels \[3, 9, 32, 32\]",
        ),
        ({"face": torch.zeros(3, 13, 32, 32)}, "3 latent frames"),
        (
            {"pose": torch.zeros(16, 4, *GRID)},
            "'pose' has the shape .* without the reference image",
        ),
        ({"face": None}, "conditioned on 'face'"),
        ({"pose": None}, "conditioned on 'pose'"),
        (
            {"latents": torch.zeros(16, 1, *GRID), "y": torch.zeros(20, 1, *GRID)},
            "no latent frame after its reference",
        ),
    ):
        given = {name: tensor for name, tensor in (item | changed).items() if tensor is not None}
        with pytest.raises(UserError, match=message):
            model(make_inputs([given["latents"]], torch.tensor([0.5]), [given], 1.0))


def test_bytes_of_a_face_are_pixels_and_the_reference_is_a_frame_in_front() -> None:
    face = torch.tensor([0, 255, 51], dtype=torch.uint8).view(3, 1, 1, 1)
    tensors = {
        "latents": torch.zeros(2, 1, 2, 2),
        "animate_reference": torch.ones(2, 1, 2, 2),
        "text": torch.zeros(1, 4),
        "face": face,
    }
    item = assemble(tensors)
    assert (
        torch.equal(item["latents"][:, 0], torch.ones(2, 2, 2)) and not item["latents"][:, 1].any()
    )
    inputs = make_inputs([item["latents"]], torch.tensor([0.5]), [item], 1.0)
    assert inputs.face is not None and inputs.face[0].flatten().tolist() == pytest.approx(
        [-1, 1, -0.6]
    )


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
@pytest.mark.slow
def test_at_its_published_size_it_is_divided_over_devices_that_refuse_to_mix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arch = PRESETS["animate-14b"]
    assert arch.animate is not None
    arch = replace(arch, layers=6, animate=replace(arch.animate, layers=(0, 5)))
    with torch.device("meta"):
        planned = [WAN.training.empty_item(arch, (77, 720, 1280), ())]
    assert planned[0]["latents"].shape == (16, 21, 90, 160) and planned[0]["face"].shape == (
        3,
        77,
        512,
        512,
    )
    assert WAN.training.num_tokens(planned[0]) == 21 * 45 * 80
    divided = divided_step(
        WAN, arch, balanced(WAN, 3), planned, policy="full", rank=32, patch=monkeypatch
    )
    divided.check()
    # tokens, modulation, time, rotary table, text, image tokens and the motion of the face; of
    # these the tokens alone come from an adapter
    assert [(carry["tensors"], carry["gradients"]) for carry in divided.carried] == [(7, 1)] * 2
