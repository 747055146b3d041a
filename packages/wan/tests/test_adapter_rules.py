"""What is said of programs that read Wan's adapter files; test_conformance.py holds most of it
against the diffusers that is installed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ditkit_core.adapters.config import AdapterConfig, BaseConfig, ExportConfig
from ditkit_core.adapters.files.export import export_adapter
from ditkit_core.adapters.files.identify import find_adapter, layers_of, parameters_of
from ditkit_core.adapters.files.merge import merge_into
from ditkit_core.adapters.files.read import open_adapter
from ditkit_core.adapters.inject import adapter_layers
from ditkit_core.commands import cli
from ditkit_core.engine.placement import place_blocks
from ditkit_core.errors import UserError
from ditkit_core.io.rng import generator
from ditkit_core.loading.architecture import arch_here
from ditkit_core.loading.on_meta import model_on_meta
from ditkit_core.loading.weights import load_weights
from ditkit_core.models.adapter_formats import AdapterLayout
from ditkit_core.models.adapter_programs import NO_MODEL, NOT_TRIED
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import run_plain
from ditkit_wan.adapters import RULES, fillers
from ditkit_wan.presets import PRESETS
from ditkit_wan.spec import WAN
from ditkit_wan.verify import DIFFUSERS

ATTENTION = ("self_attn.q", "cross_attn.v")


class Trained:
    """A tiny model with an adapter that does something."""

    def __init__(self, checkpoint: Path, targets: tuple[str, ...], alpha: float = 6.0):
        self.components = ModelPaths(base=str(checkpoint), dtype="fp32")
        adapter = AdapterConfig(rank=4, alpha=alpha, targets=targets)
        precision = Precision(matmul=torch.float32)
        unloaded = model_on_meta(WAN, self.components, adapter, BaseConfig(), precision=precision)
        self.model = load_weights(
            unloaded, placement=place_blocks(unloaded.module, [torch.device("cpu")]), seed=0
        ).module
        self.layers = layers_of(WAN.architecture.build, unloaded.origin.arch)
        for name, layer in adapter_layers(self.model).items():
            up = layer.lora_B["default"].weight
            up.data.copy_(0.2 * torch.randn(up.shape, generator=generator("up", name)))

    def write(self, folder: Path, form: str) -> Path:
        config = ExportConfig(forms=(form,), dtype="fp32")
        (file,) = export_adapter(self.model, WAN, folder, "adapter", config, metadata={})
        return file

    def verify(self, file: Path) -> str:
        return DIFFUSERS.verify(file, self.components, self.model, run_plain)

    def loads(self, file: Path) -> bool:
        """Whether diffusers loads all of a file, to the same outputs."""
        try:
            return "agrees with our model" in self.verify(file)
        except UserError:
            return False


def test_musubis_names_without_all_of_a_block_or_alpha_or_with_two_underscores_are_rejected(
    checkpoint: Path, tmp_path: Path
) -> None:
    trained = Trained(checkpoint, ATTENTION)
    complete = load_file(trained.write(tmp_path, "musubi"))
    parts = {
        "some": {name: tensor for name, tensor in complete.items() if "ffn" not in name},
        "no alpha": {
            name: tensor for name, tensor in complete.items() if not name.endswith("alpha")
        },
        "videox": {
            name.replace("lora_unet_", "lora_unet__"): tensor for name, tensor in complete.items()
        },
        "complete": complete,
    }
    for what, tensors in parts.items():
        save_file(tensors, tmp_path / "x.safetensors")
        found = find_adapter(tmp_path / "x.safetensors", WAN, layers=trained.layers)
        said = WAN.adapters.rules.readers(found.layout, list(found.shapes))["diffusers"]
        assert trained.loads(tmp_path / "x.safetensors") == (said == "") == (what == "complete"), (
            what
        )


def test_zeros_fill_blocks_from_the_first_on() -> None:
    assert fillers("official", ["layers.1.self_attn.q"]) == []
    assert fillers("musubi", ["embed.time_embedding.0"]) == []
    found = fillers("musubi", ["layers.1.self_attn.q", "layers.1.ffn.0"])
    assert (
        len(found) == 2 * 10 - 2
        and "layers.0.ffn.2" in found
        and "layers.0.cross_attn.k_img" not in found
    )
    assert "layers.0.cross_attn.v_img" in fillers("musubi", ["layers.0.cross_attn.k_img"])


def test_a_partial_adapter_is_converted_for_musubi_and_back_without_its_zeros(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = Trained(checkpoint, ATTENTION, alpha=4.0)
    official, musubi = trained.write(tmp_path, "official"), tmp_path / "m.safetensors"
    flags = ["--base", str(checkpoint), "--out"]
    assert (
        cli.run(WAN, "export", ["--adapter", str(official), "--to", "musubi", *flags, str(musubi)])
        == 0
    )
    said = capsys.readouterr().out
    assert "24 modules are written as zeros" in said and "bitwise identical" in said
    assert "loaded whole by diffusers, ComfyUI, musubi-tuner (DiffSynth loads nothing of it" in said
    assert trained.loads(musubi)
    back = tmp_path / "back.safetensors"
    assert (
        cli.run(WAN, "export", ["--adapter", str(musubi), "--to", "official", *flags, str(back)])
        == 0
    )
    ours, theirs = load_file(official), load_file(back)
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )
    assert len(open_adapter(musubi, WAN.architecture.names, trained.layers).modules) == 30


def test_an_adapter_of_a_published_size_is_known_by_its_shapes(tmp_path: Path) -> None:
    dim = PRESETS["t2v-1.3b"].dim
    tensors = {"diffusion_model.blocks.29.self_attn.q.lora_A.weight": torch.ones(2, dim)}
    tensors["diffusion_model.blocks.29.self_attn.q.lora_B.weight"] = torch.ones(dim, 2)
    save_file(tensors, tmp_path / "x.safetensors")
    presets = find_adapter(tmp_path / "x.safetensors", WAN).presets
    assert (
        "t2v-1.3b" in presets
        and "vace-1.3b" in presets
        and not any("14b" in name or "5b" in name for name in presets)
    )


@pytest.mark.parametrize("form", ["official", "kohya"])
def test_differences_of_published_files_are_merged_into_the_parameters_that_they_are_of(
    tmp_path: Path, form: str
) -> None:
    """Keys as distilled LoRAs for Wan have them: differences of biases, norms, modulations and the
    patch embedding."""
    architecture, arch = WAN.architecture, PRESETS["t2v-1.3b"]
    parameters, layers = (
        parameters_of(architecture.build, arch),
        layers_of(architecture.build, arch),
    )
    wanted = {
        "blocks.0.self_attn.q.diff_b": "layers.0.self_attn.q.bias",
        "blocks.0.self_attn.norm_q.diff": "layers.0.self_attn.norm_q.weight",
        "blocks.0.norm3.diff": "layers.0.norm3.weight",
        "blocks.0.norm3.diff_b": "layers.0.norm3.bias",
        "blocks.0.diff_m": "layers.0.modulation",
        "patch_embedding.diff": "embed.patch_embedding.weight",
        "head.diff_m": "head.modulation",
    }
    named = {
        official: next(name for name in parameters if name.endswith(ours.rpartition("embed.")[2]))
        for official, ours in wanted.items()
    }
    tensors = {
        "blocks.0.ffn.0.lora_A.weight": torch.ones(2, arch.dim),
        "blocks.0.ffn.0.lora_B.weight": torch.ones(arch.ffn_dim, 2),
    }
    tensors |= {official: torch.ones(parameters[ours]) for official, ours in named.items()}
    if form == "kohya":
        tensors = {
            key.replace("lora_A", "lora_down").replace("lora_B", "lora_up"): tensor
            for key, tensor in tensors.items()
        }
        stems = {
            key: next(
                end
                for end in (".lora_down.weight", ".lora_up.weight", ".diff_b", ".diff_m", ".diff")
                if key.endswith(end)
            )
            for key in tensors
        }
        tensors = {
            f"lora_unet_{key.removesuffix(stems[key]).replace('.', '_')}{stems[key]}": tensor
            for key, tensor in tensors.items()
        }
    else:
        tensors = {f"diffusion_model.{key}": tensor for key, tensor in tensors.items()}
    save_file(tensors, tmp_path / "x.safetensors")
    file = open_adapter(
        tmp_path / "x.safetensors", architecture.names, layers, parameters=parameters
    )
    assert set(file.differences) == set(named.values()) and list(file.modules) == ["layers.0.ffn.0"]
    modulation = torch.zeros(parameters["layers.0.modulation"])
    merge_into([(file, 0.5)])["layers.0.modulation"](modulation)
    assert torch.equal(modulation, torch.full_like(modulation, 0.5))
    assert "t2v-1.3b" in find_adapter(tmp_path / "x.safetensors", WAN).presets


@pytest.mark.parametrize(
    ("name", "models", "remedy"),
    [
        (
            "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight",
            r"FLUX\.2, or of FLUX\.1 or Chroma, .*",
            "use the flux2 commands for FLUX.2",
        ),
        (
            "transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight",
            r"FLUX\.1 or Chroma, .*, or of FLUX\.3",
            "use the flux3 commands for FLUX.3",
        ),
        (
            "transformer.single_transformer_blocks.0.proj_mlp.lora_A.weight",
            r"FLUX\.1",
            "name a file of this one",
        ),
        (
            "transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj.lora_A.weight",
            r"FLUX\.2, or of FLUX\.1 or Chroma, .*",
            "use the flux2 commands for FLUX.2",
        ),
        (
            "transformer.transformer_blocks.0.attn.add_q_proj.lora_A.weight",
            r"FLUX\.2 or Qwen-Image, or of FLUX\.1, Stable Diffusion 3 or Chroma, .*",
            "use the flux2 commands for FLUX.2 and the qwenimage commands for Qwen-Image",
        ),
    ],
)
def test_a_lora_of_another_family_is_reported(
    name: str, models: str, remedy: str, tmp_path: Path
) -> None:
    save_file({name: torch.ones(2, 2)}, tmp_path / "x.safetensors")
    told = rf"is a LoRA of another model \(its names look like those of {models}\): .* {remedy}$"
    with pytest.raises(UserError, match=told):
        find_adapter(tmp_path / "x.safetensors", WAN)
    layers = layers_of(WAN.architecture.build, PRESETS["t2v-1.3b"])
    with pytest.raises(UserError, match=told):  # as adapter.init and base.merge open it
        open_adapter(tmp_path / "x.safetensors", WAN.architecture.names, layers)


@pytest.mark.parametrize(
    ("config", "answer"),
    [
        ({"_class_name": "Flux2Transformer2DModel"}, "describes FLUX.2 (Flux2Transformer2DModel), and no model of wan; use the flux2 commands"),
        ({"_class_name": "QwenImageTransformer2DModel"}, "describes Qwen-Image (QwenImageTransformer2DModel), and no model of wan"),
        ({"architectures": ["UMT5EncoderModel"]}, "describes a text encoder (UMT5EncoderModel), and no model of wan"),
        ({"_class_name": "WanTransformer3DModel"}, "does not describe this model of wan (WanTransformer3DModel: it has no out_channels); set model.preset"),
    ],
)  # fmt: skip
def test_a_base_of_another_family_is_answered_with_its_commands(
    tmp_path: Path, config: dict[str, object], answer: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as error:
        arch_here(WAN, ModelPaths(transformer=str(tmp_path)))
    assert str(error.value).startswith(f"{tmp_path / 'config.json'} {answer}")


def test_diffusers_loads_nothing_of_an_architecture_that_it_has_no_model_of() -> None:
    """An adapter of the blocks alone says nothing of the model: the architecture does."""
    official, blocks = AdapterLayout(form="official"), ["layers.0.ffn.0"]
    for preset, arch in PRESETS.items():
        rules = WAN.for_arch(arch).adapters.rules
        has_none = "control" in preset or preset.startswith(("wantodance", "s2v"))
        assert ("has no such model" in rules.readers(official, blocks)["diffusers"]) == has_none, (
            preset
        )
        assert not rules.readers(official, blocks)["ComfyUI"]
    for name in ("layers.4.music.v", "embed.img_emb_refimage.proj.1", "head.head_global.head"):
        assert "has no such model" in RULES.readers(official, [*blocks, name])["diffusers"]


def test_a_file_is_said_to_be_for_the_preset_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It fits many presets: diffusers has models of some."""
    file, dim = tmp_path / "x.safetensors", PRESETS["t2v-1.3b"].dim
    key = "diffusion_model.blocks.29.self_attn.q.lora"
    save_file({f"{key}_A.weight": torch.ones(2, dim), f"{key}_B.weight": torch.ones(dim, 2)}, file)
    for preset, has_none in (("t2v-1.3b", False), ("fun-v1.1-control-1.3b", True)):
        assert (
            cli.run(WAN, "export", ["--inspect", str(file), "--json", "--model.preset", preset])
            == 0
        )
        said = json.loads(capsys.readouterr().out)["readers"]["diffusers"]
        assert ("has no such model" in said) == has_none, preset


def test_other_readers() -> None:
    official = AdapterLayout(form="official")
    readers = RULES.readers(official, ["layers.0.ffn.0"])
    loading = {reader for reader, said in readers.items() if not said}
    assert loading == {"diffusers", "ComfyUI", "DiffSynth"}
    assert readers["OneTrainer"] == readers["sd-scripts"] == NO_MODEL
    assert readers["ai-toolkit"] == NOT_TRIED
    vace = RULES.readers(official, ["layers.0.ffn.0", "vace_blocks.0.ffn.0"])
    assert "rejects vace_blocks.0.ffn.0" in vace["diffusers"] and not vace["ComfyUI"]
    assert (
        "k_img without v_img" in RULES.readers(official, ["layers.0.cross_attn.k_img"])["diffusers"]
    )
    # ComfyUI knows VideoX-Fun's files by one key alone, and loads nothing of those without it.
    videox = AdapterLayout(form="videox")
    assert not RULES.readers(videox, ["layers.0.ffn.0", "layers.0.cross_attn.k"])["ComfyUI"]
    assert RULES.readers(videox, ["layers.0.ffn.0"])["ComfyUI"].startswith("loads nothing")
    assert RULES.readers(AdapterLayout(form="diffusers", naming="diffusers"), ["layers.0.ffn.0"])[
        "DiffSynth"
    ]
