"""Adapters of models that ditkit does not train, and of another family, are called what they are,
before any preset is built."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ditkit_core import LoraConfig, load
from ditkit_core.adapters.config import ExportConfig
from ditkit_core.adapters.files import identify
from ditkit_core.adapters.files.export import export_merged
from ditkit_core.adapters.files.identify import adapter_in, layers_of, parameters_of
from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.loading.architecture import arch_here
from ditkit_core.models.other_models import FAMILIES, looks_like, wrong_config
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.testing.specs import altered
from ditkit_core.weights.fused_tensors import FusedTensors
from ditkit_flux2.presets import Flux2Arch
from ditkit_flux2.spec import FLUX2
from ditkit_flux3.spec import FLUX3
from ditkit_krea2.spec import KREA2
from ditkit_ltx.spec import LTX
from ditkit_qwen.spec import QWEN
from ditkit_qwenimage.spec import QWENIMAGE
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN
from ditkit_zimage.spec import ZIMAGE
from workspace import MODELS

SPECS = {spec.name: spec for spec in (WAN, FLUX2, FLUX3, KREA2, LTX, QWEN, QWENIMAGE, ZIMAGE)}
UNET = (
    "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q",
    "lora_unet_mid_block_attentions_0_proj_in",
)
FILES: Mapping[str, tuple[Sequence[str], Mapping[str, str], str]] = {
    "SDXL, kohya": (
        ("lora_unet_input_blocks_4_1_transformer_blocks_1_attn1_to_q",
        "lora_unet_output_blocks_0_1_transformer_blocks_0_ff_net_0_proj"),
        {"ss_base_model_version": "sdxl_base_v1-0"},
        "Stable Diffusion XL",
    ),
    "SDXL without a header": (("lora_unet_input_blocks_4_1_transformer_blocks_1_attn1_to_q",), {},
    "Stable Diffusion XL"),
    "SD 1.5": (UNET, {"ss_base_model_version": "sd_v1"}, "Stable Diffusion 1 and 2"),
    "SD 1.5 without a header": (UNET, {}, "Stable Diffusion 1 and 2"),
    "SD 3": (("lora_unet_joint_blocks_0_x_block_attn_qkv",), {}, "Stable Diffusion 3"),
    "FLUX.1, kohya": (
        ("lora_unet_double_blocks_0_img_attn_qkv", "lora_unet_double_blocks_0_img_mod_lin",
        "lora_unet_single_blocks_37_linear1"),
        {"modelspec.architecture": "flux-1-dev/lora"},
        "FLUX.1",
    ),
    "FLUX.1, diffusers": (
        ("transformer.single_transformer_blocks.0.attn.to_q",
        "transformer.single_transformer_blocks.0.proj_mlp"),
        {},
        "FLUX.1",
    ),
    "FLUX.1, attention of all blocks": (tuple(f"lora_unet_double_blocks_{n}_img_attn_qkv" for n in range(19)),
    {}, "FLUX.1"),
    "Chroma": (("diffusion_model.distilled_guidance_layer.layers.0.in_layer",), {}, "Chroma"),
    "HunyuanVideo": (("lora_unet_double_blocks_0_img_attn_qkv",
    "lora_unet_individual_token_refiner_blocks_0_mlp_fc1"), {}, "HunyuanVideo"),
    "SD 3, diffusers": (
        ("transformer.transformer_blocks.23.attn.add_q_proj",
        "transformer.transformer_blocks.0.attn.to_q"),
        {},
        "Stable Diffusion 3, FLUX.1, Qwen-Image or another",
    ),
    "SD 3, diffusers, feed-forward": (("transformer.transformer_blocks.0.ff_context.net.0.proj",),
    {}, "Stable Diffusion 3"),
    "LTX-2": (("diffusion_model.transformer_blocks.0.audio_attn1.to_q",), {}, "LTX-2"),
    "CogVideoX": (("transformer.transformer_blocks.0.attn1.to_q",),
    {"modelspec.architecture": "cogvideox/lora"}, "CogVideoX"),
}  # fmt: skip
"""By description: names of modules, the header, and what the message calls the model."""


HEADERS = {
    "ss_base_model_version": {
        "sd_3": "Stable Diffusion 3",
        "flux.1": "FLUX.1",
        "flux1": "FLUX.1",
        "flux_kontext": "FLUX.1",
        "flux_2_dev": "FLUX.2",
        "flux_2_klein_4b": "FLUX.2",
        "flux2_klein_9b": "FLUX.2",
        "wan": "Wan",
        "wan_2.2_14b": "Wan",
        "z_image": "Z-Image",
        "zimage": "Z-Image",
        "framepack": "FramePack",
        "hunyuan_video_1_5": "HunyuanVideo",
        "hunyuan-image-2.1": "HunyuanImage",
        "lumina2": "Lumina",
        "hidream_i1": "HiDream",
        "hidream_o1_image": "HiDream",
        "kandinsky5": "Kandinsky",
        "pixart": "PixArt",
        "krea2": "Krea 2",
        "anima": "Anima",
        "qwen_image_edit": "Qwen-Image",
        "qwen-image-2512": "Qwen-Image",
        "qwen_image_2.1": "Qwen-Image 2.1",
        "ltx2": "LTX-2",
        "ltxv": "LTX-Video",
        "chroma": "Chroma",
    },
    "modelspec.architecture": {
        "flux-1-dev/lora": "FLUX.1",
        "Flux.2-klein-4b/lora": "FLUX.2",
        "Z-Image/lora": "Z-Image",
        "wan2.1/lora": "Wan",
        "framepack/lora": "FramePack",
        "hunyuan-video-1.5/lora": "HunyuanVideo",
        "lumina-2/lora": "Lumina",
        "HiDream-O1-Image/lora": "HiDream",
        "Kandinsky-5/lora": "Kandinsky",
        "Krea-2/lora": "Krea 2",
        "ltx-video": "LTX-Video",
        "anima-preview/lora": "Anima",
    },
}
"""By key: what kohya's programs, musubi-tuner and ai-toolkit write there, and the model that it
is."""
CLASSES = {
    "HunyuanVideoTransformer3DModel": "HunyuanVideo",
    "HunyuanVideoFramepackTransformer3DModel": "FramePack",
    "HunyuanImageTransformer2DModel": "HunyuanImage",
    "Lumina2Transformer2DModel": "Lumina",
    "HiDreamImageTransformer2DModel": "HiDream",
    "Kandinsky5Transformer3DModel": "Kandinsky",
    "PixArtTransformer2DModel": "PixArt",
    "MochiTransformer3DModel": "Mochi",
    "SanaTransformer2DModel": "Sana",
}
"""diffusers' classes, as a config.json names them."""
SHARED = (
    "transformer.transformer_blocks.0.attn.add_q_proj",
    "lora_unet_double_blocks_0_img_attn_proj",
    "diffusion_model.single_blocks.0.linear1",
)
OF_FAMILY = {name: model.name for name, model in FAMILIES.items()}
METHODS = {
    "peft's OFT": ("base_model.model.{}.oft_R.weight", "OFT"),
    "peft's BOFT": ("base_model.model.{}.boft_R", "BOFT"),
    "LyCORIS' OFT and BOFT": ("lora_unet_{}.oft_blocks", "OFT or BOFT"),
    "peft's IA3": ("base_model.model.{}.ia3_l", "IA3"),
    "LyCORIS' IA3": ("lora_unet_{}.on_input", "IA3"),
    "VeRA": ("base_model.model.{}.vera_lambda_b", "VeRA"),
    "LyCORIS' GLoRA": ("lora_unet_{}.a1.weight", "GLoRA"),
    "peft's LoRA of an embedding": (
        "base_model.model.{}.lora_embedding_A",
        "a LoRA of an embedding",
    ),
}
"""By program and method: a key, and what the message calls the method."""


def written(path: Path, modules: Sequence[str], header: Mapping[str, str]) -> SafetensorsSource:
    tensors = {}
    for module in modules:
        tensors |= {
            f"{module}.lora_down.weight": torch.ones(2, 8),
            f"{module}.lora_up.weight": torch.ones(8, 2),
        }
    save_file(tensors, path, metadata=dict(header))
    return SafetensorsSource.open(path)


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("file", FILES)
def test_a_model_that_is_not_trained_is_called_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, file: str
) -> None:
    monkeypatch.setattr(identify, "layers_of", lambda *_: pytest.fail("a preset is built"))
    modules, header, name = FILES[file]
    if family == "qwenimage" and file == "SD 3, diffusers":
        pytest.skip("the names are its names: sizes tell")
    source = written(tmp_path / "x.safetensors", modules, header)
    with pytest.raises(UserError) as caught:
        adapter_in(source, SPECS[family])
    message = str(caught.value)
    assert name in message and "ditkit does not train" in message and "\n" not in message


@pytest.mark.parametrize("family", SPECS)
def test_a_header_is_read_as_programs_write_it(family: str) -> None:
    headers = [(key, *row) for key, names in HEADERS.items() for row in names.items()]
    for key, value, name in headers:
        case = f"{key} = {value}"
        likeness, remedy = looks_like((), SPECS[family].architecture.names.others, {key: value})
        if name == OF_FAMILY[family]:
            assert not likeness, case
        else:
            assert likeness == f" (its header names {name})", case
            assert remedy.startswith(
                "use the " if name in OF_FAMILY.values() else "ditkit does not train that model"
            ), case


@pytest.mark.parametrize("family", SPECS)
def test_a_class_of_diffusers_is_read_as_the_model_that_it_is(family: str) -> None:
    others = SPECS[family].architecture.names.others
    for kind, name in CLASSES.items():
        message = wrong_config({"_class_name": kind}, KeyError("x"), family, others)
        assert message.startswith(
            f"describes {name} ({kind}), and no model of {family}; ditkit does not train"
        )


def test_every_package_is_in_the_one_table_of_families():
    """And the name of each commands is its package's: a message says which to use."""
    folders = {member.folder.name for member in MODELS}
    assert set(FAMILIES) == folders == set(SPECS)
    for name, model in FAMILIES.items():
        assert model.remedy == f"use the {name} commands"


@pytest.mark.parametrize("owner", SPECS)
def test_whole_transformers_of_a_family_are_called_by_its_name_in_every_other(owner):
    """In the names of each form, and by the class in a config.json."""
    names = SPECS[owner].architecture.names
    arch = next(iter(SPECS[owner].architecture.presets.values()))
    parameters = parameters_of(SPECS[owner].architecture.build, arch)
    others = {
        family: spec.architecture.names.others for family, spec in SPECS.items() if family != owner
    }
    for form, from_native in names.from_native.items():
        theirs = {part.name for name in parameters for part in from_native(name)}
        for family, known in others.items():
            likeness, remedy = looks_like(theirs, known)
            assert OF_FAMILY[owner] in likeness and f"use the {owner} commands" in remedy, (
                family,
                form,
                likeness,
                remedy,
            )


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize(
    ("owner", "module"),
    [
        ("wan", "diffusion_model.blocks.0.self_attn.q"),
        ("wan", "transformer.blocks.0.attn1.to_q"),
        ("wan", "lora_unet_blocks_0_ffn_0"),
        ("flux2", "transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj"),
        ("flux2", "diffusion_model.double_blocks.0.img_attn.qkv"),
        ("flux2", "transformer.transformer_blocks.0.attn.add_q_proj"),
        ("qwenimage", "transformer_blocks.0.img_mlp.net.0.proj"),
        ("qwenimage", "lora_unet_transformer_blocks_0_txt_mod_1"),
    ],
)
def test_another_familys_file_is_refused_before_its_presets_are_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, owner: str, module: str
) -> None:
    if family == owner or (family == "qwenimage" and module.endswith(SHARED[0])):
        pytest.skip("its own, or one of both")
    monkeypatch.setattr(identify, "layers_of", lambda *_: pytest.fail("a preset is built"))
    source = written(tmp_path / "x.safetensors", [module], {})
    with pytest.raises(UserError, match=f"use the {owner} commands"):
        adapter_in(source, SPECS[family])


@pytest.mark.parametrize("module", SHARED)
def test_a_file_of_names_that_several_models_have_is_known_by_its_sizes(
    tmp_path: Path, module: str
) -> None:
    source = written(tmp_path / "x.safetensors", [module], {})
    layers = layers_of(FLUX2.architecture.build, next(iter(FLUX2.architecture.presets.values())))
    with pytest.raises(
        UserError, match=r"fits no preset of flux2 by its sizes, and Stable Diffusion 3, FLUX.1, "
    ) as caught:
        adapter_in(source, FLUX2)
    assert "\n" not in str(caught.value)
    assert not adapter_in(source, FLUX2, layers=layers).presets, "its base decides"
    if module == SHARED[0]:
        with pytest.raises(UserError, match="fits no preset of qwenimage by its sizes, and Stable"):
            adapter_in(source, QWENIMAGE)
    name = "transformer_blocks.0.ff_context.linear_in"
    assert not adapter_in(
        written(tmp_path / "y.safetensors", [module, f"transformer.{name}"], {}), FLUX2
    ).presets


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_is_not_read_is_called_by_its_name(tmp_path: Path, method: str) -> None:
    key, name = METHODS[method]
    module = "blocks.0.self_attn.q"
    module = module.replace(".", "_") if key.startswith("lora_unet_") else module
    save_file({key.format(module): torch.ones(2, 2)}, tmp_path / "x.safetensors")
    one = altered(WAN, presets={"t2v-1.3b": WAN.architecture.presets["t2v-1.3b"]})
    with pytest.raises(
        UserError, match=rf"contains {name}, which is not supported; merge it with the program"
    ):
        adapter_in(SafetensorsSource.open(tmp_path / "x.safetensors"), one)


def with_few_blocks(arch: object) -> object:
    """Most of Wan's many presets differ in sizes, and building all of them takes seconds: where
    nothing else counts the blocks, two have all names but for their numbers."""
    if not isinstance(arch, WanArch) or arch == WAN.architecture.presets["t2v-14b"]:
        return arch
    is_counted = arch.vace_layers or arch.music or arch.speech or arch.animate
    return arch if is_counted else replace(arch, layers=2)


@pytest.mark.parametrize("family", SPECS)
def test_no_name_of_a_familys_adapters_looks_like_another_model(family: str) -> None:
    architecture = SPECS[family].architecture
    for form, from_native in architecture.names.from_native.items():
        names = dict.fromkeys(("diffusers", "kohya", "differences"), frozenset[str]())
        for arch in map(with_few_blocks, architecture.presets.values()):
            modules = layers_of(architecture.build, arch)
            theirs = list(FusedTensors.of(modules, from_native, ".weight").complete)
            parts = (
                part.name.removesuffix(".weight")
                for name in parameters_of(architecture.build, arch)
                for part in from_native(name)
            )
            names["diffusers"] |= frozenset(theirs)
            names["kohya"] |= {f"lora_unet_{name.replace('.', '_')}" for name in theirs}
            names["differences"] |= {f"{part}.diff" for part in parts}
        for kind, of_all_presets in names.items():
            assert looks_like(of_all_presets, architecture.names.others) == ("", ""), (form, kind)


NAMED = {
    "transformer, a file": ("transformer", "lora/x.safetensors"),
    "base, a file": ("base", "lora/x.safetensors"),
    "base, a folder": ("base", "lora"),
}


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("preset", [False, True])
@pytest.mark.parametrize("named", NAMED)
def test_a_lora_as_the_model_is_called_a_lora(
    tmp_path: Path, family: str, preset: bool, named: str
) -> None:
    spec, (key, path) = SPECS[family], NAMED[named]
    (tmp_path / "lora" / "images").mkdir(parents=True)
    written(tmp_path / "lora" / "x.safetensors", ["diffusion_model.blocks.0.self_attn.q"], {})
    name = next(iter(spec.architecture.presets)) if preset else ""
    paths = ModelPaths(**{key: str(tmp_path / path), "preset": name})
    with pytest.raises(
        UserError, match=r"is a LoRA and no transformer: adapter.init .* base.merge .*$"
    ):
        load(spec, paths) if preset else arch_here(spec, paths)


@pytest.mark.parametrize("key", ["transformer", "base"])
@pytest.mark.parametrize("preset", [False, True])
def test_a_file_of_differences_as_the_model_is_called_that(
    tmp_path: Path, key: str, preset: bool
) -> None:
    save_file(
        {"diffusion_model.blocks.0.self_attn.q.diff": torch.ones(2, 2)}, tmp_path / "x.safetensors"
    )
    paths = ModelPaths(
        **{key: str(tmp_path / "x.safetensors"), "preset": "t2v-1.3b" if preset else ""}
    )
    with pytest.raises(
        UserError, match=r"is a file of differences .* and no transformer: base.merge merges it"
    ) as caught:
        load(WAN, paths) if preset else arch_here(WAN, paths)
    assert "adapter.init" not in str(caught.value), "only merging can use differences"


def test_the_form_that_a_program_asks_for_is_written_or_refused(tmp_path: Path) -> None:
    """FLUX.2's official names have q, k and v in one, which no LoKr of one layer can say."""
    arch = Flux2Arch(
        dim=64,
        heads=2,
        double_layers=1,
        single_layers=1,
        text_dim=32,
        guidance=False,
        axes=(8,) * 4,
    )
    spec = altered(FLUX2, presets={"tiny": arch})
    module = spec.architecture.build(arch, Precision())
    config = ExportConfig(forms=("diffusers",), dtype="fp32")
    (folder,) = export_merged(module, spec.for_arch(arch), tmp_path / "base", config, metadata={})
    lokr = load(
        spec, ModelPaths(transformer=str(folder), preset="tiny"), LoraConfig(method="lokr", r=2)
    )
    with pytest.raises(
        UserError, match=r"the official form has .* for more or less than one layer"
    ):
        lokr.save_adapter(tmp_path / "x.safetensors", form="official")
    assert not (tmp_path / "x.safetensors").exists()
    lokr.save_adapter(tmp_path / "x.safetensors")
