"""What families share, against diffusers' pipelines: of Z-Image, and of Qwen-Image, which no
package here has."""

import dataclasses
import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLLTXVideo,
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    QwenImagePipeline,
    ZImagePipeline,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3Model,
)

from ditkit_core.errors import UserError
from ditkit_core.families.demo import write_transformer, write_vae
from ditkit_core.families.euler import EulerSampler, classifier_free, shifted_levels
from ditkit_core.families.language_models import (
    QWEN2_5_VL,
    QWEN2_5_VL_TOWER,
    QWEN3,
    TextEncoding,
    TextFamily,
)
from ditkit_core.families.references import area_size
from ditkit_core.families.spec import GUIDE, STEPS, CaptionEncoding, family_spec
from ditkit_core.families.t5 import T5_XXL, T5Encoding
from ditkit_core.families.text import LanguageModelEncoder, text_model
from ditkit_core.families.vae import DiffusersVae, VaeFamily, vae_models
from ditkit_core.io.rng import generator
from ditkit_core.loading.architecture import arch_here
from ditkit_core.models.encoders import AuxiliaryModel, Encoder, GenerationRequest, VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.spec import AdapterSpec, ArchitectureSpec, ModelSpec, SampleDefaults
from ditkit_core.models.state_dict import StateDictNames, TensorSlice
from ditkit_core.models.tiling import Tiles
from ditkit_core.planner.auxiliary import measure_model
from ditkit_core.sampling.denoise import generate, single_stage
from ditkit_core.testing.auxiliary_models import live
from ditkit_core.testing.sampling import generate_latents
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY
from ditkit_flux2 import FLUX2
from ditkit_flux3 import FLUX3
from ditkit_krea2 import KREA2
from ditkit_ltx import LTX
from ditkit_qwen import QWEN
from ditkit_qwenimage import QWENIMAGE
from ditkit_wan import WAN
from ditkit_zimage import ZIMAGE

CPU = torch.device("cpu")
WIDTHS = [32, 32, 32, 64]
BLOCKS: dict[str, Any] = {
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": WIDTHS, "layers_per_block": 2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "16 channels, shifted": {
        "latent_channels": 16, "shift_factor": 0.1159, "scaling_factor": 0.3611,
        "use_quant_conv": False, "use_post_quant_conv": False,
    },
    "4 channels": {"latent_channels": 4, "scaling_factor": 0.18215},
}  # fmt: skip


def family(kind: str, **changes: Any) -> VaeFamily:
    return VaeFamily(published=BLOCKS | KINDS[kind], **changes)


def written_vae(folder: Path, kind: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = AutoencoderKL(**BLOCKS, **KINDS[kind]).eval()
    vae.save_pretrained(folder / "vae")
    return vae


def loaded(vae_family: VaeFamily, /, **paths: Path) -> DiffusersVae:
    encoder = DiffusersVae(
        vae_family, ModelPaths(**{name: str(path) for name, path in paths.items()}), CPU
    )
    encoder.load()
    return encoder


def image() -> Tensor:
    return torch.rand(3, 1, 48, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1


@pytest.mark.parametrize("kind", KINDS)
def test_latents_are_moved_and_scaled_as_pipelines_do(tmp_path: Path, kind: str) -> None:
    vae = written_vae(tmp_path, kind)
    encoder = loaded(family(kind), base=tmp_path)
    (latents,) = (item["latents"] for item in encoder.encode([image()]))
    assert encoder.strides == (1, 8) and latents.shape == (encoder.channels, 1, 6, 4)
    assert encoder.channels == KINDS[kind]["latent_channels"]
    with torch.no_grad():
        mode = vae.encode(image().transpose(0, 1)).latent_dist.mode()
        expected = (mode - (vae.config.shift_factor or 0)) * vae.config.scaling_factor
        # the line of ZImagePipeline.__call__ before it decodes
        back = (expected / vae.config.scaling_factor) + (vae.config.shift_factor or 0)
        pixels = vae.decode(back).sample
    assert torch.equal(latents[:, 0], expected[0])
    assert torch.equal(encoder.decode(latents), (pixels / 2 + 0.5).clamp(0, 1).transpose(0, 1))


def test_squares_of_latents_become_channels(tmp_path: Path) -> None:
    written_vae(tmp_path, "4 channels")
    plain, folded = (loaded(family("4 channels", patch=patch), base=tmp_path) for patch in (1, 2))
    assert (folded.channels, folded.strides) == (16, (1, 16)) and plain.identity != folded.identity
    one, other = (encoder.encode([image()])[0]["latents"] for encoder in (plain, folded))
    assert torch.equal(other[4 * 3 + 2 * 1 + 0], one[3, :, 1::2, 0::2])
    assert torch.equal(plain.decode(one), folded.decode(other))


def latent_diffusion_name(name: str) -> str:
    """The name of a parameter in a single file, written the other way round than the code under
    test."""
    for ours, theirs in (
        ("conv_norm_out", "norm_out"), ("conv_shortcut", "nin_shortcut"), ("mid_block.resnets.0", "mid.block_1"),
        ("mid_block.resnets.1", "mid.block_2"), ("mid_block.attentions.0", "mid.attn_1"), ("group_norm", "norm"),
        ("to_out.0", "proj_out"), (".to_", "."), ("downsamplers.0", "downsample"), ("upsamplers.0", "upsample"),
        (".resnets.", ".block."), ("down_blocks", "down"), *((f"up_blocks.{stage}", f"up.{3 - stage}") for stage in range(4)),
    ):  # fmt: skip
        name = name.replace(ours, theirs)
    return name


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_file_gives_what_the_folder_gives(tmp_path: Path, kind: str) -> None:
    written_vae(tmp_path, kind)
    state = load_file(tmp_path / "vae" / "diffusion_pytorch_model.safetensors")
    renamed = {latent_diffusion_name(name): tensor for name, tensor in state.items()}
    assert "decoder.up.3.block.0.conv1.weight" in renamed
    save_file(renamed, tmp_path / "ae.safetensors")
    folder, file = (
        loaded(family(kind), base=tmp_path),
        loaded(family(kind), vae=tmp_path / "ae.safetensors"),
    )
    assert torch.equal(folder.encode([image()])[0]["latents"], file.encode([image()])[0]["latents"])
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="is not the VAE of this model; set model.vae"):
        loaded(family(kind), vae=tmp_path / "other.safetensors")


def test_plans_count_the_vae_as_it_is(tmp_path: Path) -> None:
    vae = written_vae(tmp_path, "4 channels")
    for model in vae_models(family("4 channels"), ModelPaths(base=str(tmp_path)), channels=4):
        weights, peak = measure_model(model, (1, 64, 64), dtype=torch.float32)
        # allocators round each tensor up
        assert (
            weights
            == pytest.approx(sum(parameter.nbytes for parameter in vae.parameters()), rel=0.02)
            and weights < peak
        )


def test_a_vae_of_other_channels_is_refused_before_anything_is_planned(tmp_path: Path) -> None:
    written_vae(tmp_path, "4 channels")
    with pytest.raises(UserError, match="vae makes 4 latent channels and the model takes 64; set"):
        vae_models(family("4 channels"), ModelPaths(base=str(tmp_path)), channels=64)


ENCODING = TextEncoding(
    models=(QWEN3,), reader="Z-Image", remedy="set model.text_encoder to a Qwen3", num_tokens=64
)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A folder with a tiny Qwen3 and its tokenizer, and both as transformers has them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = Tokenizer(
        models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[])
    )
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        padding_side="right",
        # What Qwen3's own template says of one user's turn that is answered after thinking.
        chat_template="{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    )  # fmt: skip
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=5,
        num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, rope_theta=1e6,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3Model(config).eval()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn(parameter.shape) * 0.2)
    folder = tmp_path_factory.mktemp("qwen")
    model.save_pretrained(folder / "text_encoder")
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder, model, tokenizer


@pytest.mark.parametrize("caption", ["", "a fox", "too long " * 9])
@pytest.mark.parametrize("streaming", ["always", "never"])
def test_features_are_rows_of_the_hidden_states_before_the_last_layer(
    qwen: tuple[Path, Any, Any], caption: str, streaming: Any
) -> None:
    folder, model, tokenizer = qwen
    encoder = LanguageModelEncoder(
        ENCODING, ModelPaths(base=str(folder)), CPU, torch.float32, streaming
    )
    encoder.load()
    (features,) = (item["text"] for item in encoder.encode([caption]))
    pipeline = ZImagePipeline(
        scheduler=None, vae=None, text_encoder=model, tokenizer=tokenizer, transformer=None
    )
    with torch.no_grad():
        (expected,) = pipeline._encode_prompt(
            caption, device=CPU, max_sequence_length=ENCODING.num_tokens
        )
    assert torch.equal(features, expected)
    assert (len(features) == ENCODING.num_tokens) == (len(caption) > 9) == bool(encoder.truncated)
    assert encoder.family.layers == (4,)


SYSTEM = "<|im_start|>system\nDescribe it.<|im_end|>\n<|im_start|>user\n"
SEES = TextFamily(
    name="Qwen2.5-VL", layers=(-1,), before=SYSTEM, dropped=24,
    after="<|im_end|>\n<|im_start|>assistant\n",
    special=("<|im_start|>", "<|im_end|>"), padding="<|endoftext|>", kind="Qwen2_5_VLText",
    model_type="qwen2_5_vl_text",
    unstated={"head_dim": 8}, published={"7B": {"hidden_size": 3584, "num_hidden_layers": 28}},
)  # fmt: skip


@pytest.fixture(scope="module")
def seeing(
    qwen: tuple[Path, Any, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """A folder with a tiny Qwen2.5-VL, which sees and reads, and the model as transformers has
    it."""
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(qwen[2]), "hidden_size": 16, "intermediate_size": 32,
            "num_hidden_layers": 3, "num_attention_heads": 2,
            "num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6,
            "mrope_section": [2, 1, 1]},
        },
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
        "out_hidden_size": 16},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2_5_VLForConditionalGeneration(config).eval()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn(parameter.shape) * 0.2)
    folder = tmp_path_factory.mktemp("seeing")
    model.save_pretrained(folder / "text_encoder")
    (folder / "tokenizer").symlink_to(qwen[0] / "tokenizer")
    return folder, model


@pytest.mark.parametrize("streaming", ["always", "never"])
def test_features_behind_the_last_norm_begin_after_the_system_prompt(
    qwen: tuple[Path, Any, Any], seeing: tuple[Path, Any], streaming: Any
) -> None:
    folder, model = seeing
    encoding = TextEncoding(models=(SEES,), reader="Qwen-Image", remedy="", num_tokens=128)
    encoder = LanguageModelEncoder(
        encoding, ModelPaths(base=str(folder)), CPU, torch.float32, streaming
    )
    encoder.load()
    features = [encoder.encode([caption])[0]["text"] for caption in ("", "a fox")]
    pipeline = QwenImagePipeline(
        scheduler=None, vae=None, text_encoder=model, tokenizer=qwen[2], transformer=None
    )
    pipeline.prompt_template_encode = SEES.render("{}")
    pipeline.prompt_template_encode_start_idx = SEES.dropped
    for caption, rows in zip(("", "a fox"), features, strict=True):
        with torch.no_grad():
            (expected,), _ = pipeline._get_qwen_prompt_embeds(caption, CPU)
        assert rows.shape == expected.shape
        # padded with a mask here, one caption without a mask there: another kernel
        torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)
    others = (replace_in(encoding, dropped=0), replace_in(encoding, layers=(3,)))
    identities = {
        LanguageModelEncoder(one, ModelPaths(base=str(folder)), CPU, torch.float32).identity
        for one in (encoding, *others)
    }
    assert len(identities) == 3, "caches tell them apart"


def replace_in(encoding: TextEncoding, **changes: Any) -> TextEncoding:
    return dataclasses.replace(
        encoding, models=(dataclasses.replace(encoding.models[0], **changes),)
    )


def test_plans_count_the_last_norm_and_no_dropped_token(seeing: tuple[Path, Any]) -> None:
    encoding = TextEncoding(models=(SEES,), reader="Qwen-Image", remedy="", num_tokens=128)
    model = text_model(encoding, 16, ModelPaths(base=str(seeing[0])))
    built = model.build(torch.float32)
    assert [name for name in built.state_dict() if name.startswith("norm.")] == ["norm.weight"]
    assert measure_model(model, (1, 64, 64), dtype=torch.float32)[0] > 0
    item = family_spec(**{**SPEC, "text": encoding}, shift=3.0).training.empty_item(
        Arch(), (1, 64, 64)
    )
    assert len(item["text"]) == 128 - SEES.dropped


def test_plans_of_a_text_encoder_follow_what_is_published_and_what_is_there(
    qwen: tuple[Path, Any, Any],
) -> None:
    there = text_model(ENCODING, 16, ModelPaths(base=str(qwen[0]))).build(torch.float32)
    assert len(there.get_submodule("layers")) == 4
    published = text_model(ENCODING, 2560, ModelPaths()).build(torch.bfloat16)
    assert len(published.get_submodule("layers")) == 35, "hidden_states[-2] of 36 layers"
    with pytest.raises(UserError, match="no published text encoder has features of width 7"):
        text_model(ENCODING, 7, ModelPaths()).build(torch.float32)


class Scripted(torch.nn.Module):
    """A model whose velocity depends on latents, text and noise level by known sums."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Identity()
        self.embed.arch = "small"
        self.calls: list[float] = []

    def forward(self, inputs: Any, engine: Any) -> list[Tensor]:
        noised, sigma, items, guidance = inputs
        self.calls.append(guidance)
        return [(noised[0] * float(sigma) + items[0]["text"].mean()).float()]


@pytest.mark.parametrize(("guidance", "calls"), [(1.0, 1), (3.0, 2)])
def test_euler_steps_are_those_of_diffusers_scheduler(
    tmp_path: Path, guidance: float, calls: int
) -> None:
    written_vae(tmp_path, "4 channels")
    sampler = EulerSampler(
        DiffusersVae(family("4 channels"), ModelPaths(base=str(tmp_path)), CPU),
        CPU,
        make_inputs=lambda *parts: parts,
        sample_defaults=lambda arch: SampleDefaults(),
        levels=lambda pixels, steps, shift: shifted_levels(steps, shift or 3.0),
    )
    text, without = (torch.full((2, 3), value) for value in (0.5, -0.25))
    job = GenerationRequest(
        conditions={"text": text}, negative={"text": without}, frames=1, height=48, width=32,
        steps=5, guidance=guidance,
        shift=0.0, seed=3,
    )  # fmt: skip
    model = Scripted()
    latents = generate_latents(sampler, job, model, lambda *_: None)
    assert len(model.calls) == 5 * calls
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    # As ZImagePipeline has them.
    scheduler.set_timesteps(sigmas=torch.linspace(1.0, 1 / 5, 5).tolist())
    expected = torch.randn((4, 1, 6, 4), generator=generator(3, "sample"))
    for t, sigma in zip(scheduler.timesteps, scheduler.sigmas, strict=False):
        velocity = expected * float(sigma) + text.mean()
        if calls == 2:
            velocity = classifier_free(velocity, expected * float(sigma) + without.mean(), guidance)
        expected = scheduler.step(velocity, t, expected, return_dict=False)[0]
    # diffusers' noise levels are fp32
    torch.testing.assert_close(latents, expected, rtol=1e-5, atol=1e-5)


@dataclasses.dataclass(frozen=True)
class Arch:
    in_channels: int = 16
    text_dim: int = 2560


SPEC: dict[str, Any] = {
    "name": "toy",
    "import_path": "ditkit_flux2.spec:TOY",
    "architecture": ArchitectureSpec(
        presets={"toy": Arch()}, build=lambda *_: None, names=StateDictNames.renaming(to_native=str)
    ),
    "make_inputs": lambda *parts: parts,
    "vae": family("16 channels, shifted"),
    "text": ENCODING,
    "adapters": AdapterSpec(targets={"all": ("q",)}),
}


def test_a_family_of_the_required_fields_is_a_whole_spec() -> None:
    spec = family_spec(**SPEC, patch=(1, 2, 2), shift=3.0, verifier="ditkit_flux2.verify:DIFFUSERS")
    item = spec.training.empty_item(Arch(), (1, 64, 96), [(32, 32)])
    shapes = {name: tuple(tensor.shape) for name, tensor in item.items()}
    assert shapes == {"latents": (16, 1, 8, 12), "text": (64, 2560), "reference.0": (16, 1, 4, 4)}
    assert spec.training.num_tokens(item) == 64 + 8 * 12 // 4 + 4
    assert (spec.data.size_step, spec.data.frame_step) == (16, 0) and spec.training.shift(
        item["latents"]
    ) == 3.0
    assert spec.adapters.verify is not None and spec.demo.config.name == "demo.toml"
    assert [model.name for model in spec.auxiliary.models(Arch(), ModelPaths())] == [
        "VAE encoder",
        "text encoder",
        "VAE decoder",
    ]
    usual = {
        "head.linear.weight": "head", "blocks.0.norm_q.weight": "qk_norms",
        "blocks.1.norm1.bias": "norms",
        "blocks.0.adaLN_modulation.1.weight": "modulation", "embed.time_in.0.weight": "time_mlp",
        "blocks.0.q.weight": "matmul",
    }  # fmt: skip
    assert {name: spec.precision.op_group_of(name) for name in usual} == usual


def test_references_that_a_text_encoder_sees_are_rows_of_its_captions() -> None:
    seeing = replace(QWEN2_5_VL, vision=QWEN2_5_VL_TOWER)
    text = TextEncoding(models=(seeing,), reader="Zed", remedy="", num_tokens=64)
    sees = {"picture_size": area_size(384 * 384), "reference_size": area_size(1024 * 1024)}
    spec = family_spec(**{**SPEC, "text": text}, shift=3.0, **sees, needs_references=True)
    assert spec.data.picture_size is sees["picture_size"] and spec.data.needs_references
    item = spec.training.empty_item(Arch(), (1, 64, 64), [(1024, 1024), (512, 2048)])
    # 384 x 384, and 192 x 768 of which 196 x 756 is seen, in slots of 28 pixels
    assert len(item["text"]) == 64 + 14 * 14 + 7 * 27
    assert len(spec.training.empty_item(Arch(), (1, 64, 64), [])["text"]) == 64
    divided = replace(seeing, vision=replace(QWEN2_5_VL_TOWER, divides_text=True))
    spec = family_spec(**{**SPEC, "text": replace(text, models=(divided,))}, shift=3.0, **sees)
    item = spec.training.empty_item(Arch(), (1, 64, 64), [(1024, 1024), (512, 2048)])
    assert [len(item[name]) for name in ("text.0", "text.1", "text")] == [1, 1, 64]
    assert spec.training.num_tokens(item) == 66 + 8 * 8 + 128 * 128 + 64 * 256
    for wrong, says in (
        ({"text": text}, "has no picture_size, and its text encoder sees references"),
        (sees, "has picture_size, and its text encoder reads captions alone"),
    ):
        with pytest.raises(UserError, match=says):
            family_spec(**{**SPEC, **wrong}, shift=3.0)
    with pytest.raises(UserError, match="has models with a `vision` and models without"):
        TextEncoding(models=(seeing, QWEN3), reader="Zed", remedy="")


def test_a_model_of_images_may_have_a_vae_of_videos(tmp_path: Path) -> None:
    def statistics(vae: Any) -> tuple[Tensor, Tensor]:
        return torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)

    videos = VaeFamily(
        kind="AutoencoderKLQwenImage", published={"z_dim": 16}, is_video=True,
        statistics=statistics, recipe="posterior mode, {}",
        channels=lambda config: config["z_dim"], strides=lambda config: (4, 8),
    )  # fmt: skip
    spec = family_spec(**{**SPEC, "vae": videos}, patch=(1, 2, 2), shift=3.0)
    assert (spec.data.size_step, spec.data.frame_step, spec.data.size) == (16, 0, (1, 1024, 1024))
    clips = family_spec(**{**SPEC, "vae": videos}, patch=(1, 2, 2), shift=3.0, size=(81, 480, 832))
    assert clips.data.frame_step == 4
    write_vae(tmp_path, videos)  # of a demo
    vae = AutoencoderKLQwenImage.from_pretrained(tmp_path / "vae")
    encoder = loaded(videos, base=tmp_path)
    latents = encoder.encode([image()])[0]["latents"]
    with torch.no_grad():
        mode = vae.encode(image()[None]).latent_dist.mode()
        # the line of QwenImageEditPipeline._encode_vae_image
        mean, deviation = (values.view(1, -1, 1, 1, 1) for values in statistics(vae))
        expected = (mode - mean) / deviation
    assert latents.shape == (16, 1, 6, 4) and torch.equal(latents, expected[0])
    assert encoder.decode(latents).shape == (3, 1, 48, 32)


def test_what_a_family_does_not_say_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"the TextEncoding of Zed names no .*T5Encoding.*CaptionEncoding.*4\. Enc"
    ):
        TextEncoding(models=(), reader="Zed", remedy="")
    family = VaeFamily(
        published={}, kind="AutoencoderKLLTXVideo", label="the VAE of Zed", is_video=True
    )
    with torch.device("meta"):  # it has a published VAE's size
        with pytest.raises(
            UserError,
            match=r"the VAE of Zed decodes with a noise level .*give its VaeFamily decode_ti",
        ):
            family.build({"timestep_conditioning": True})
        assert family.build({"timestep_conditioning": False}) is not None
    with pytest.raises(
        UserError, match=r"write_vae knows small sizes of .*give it sizes of AutoencoderKLLTXVideo"
    ):
        write_vae(tmp_path, family)
    assert not list(tmp_path.iterdir())


class Letters:
    """An encoder of a package: a row for each letter."""

    identity, items_at_once = "letters", 1

    def __init__(self, components: ModelPaths, device: Any, dtype: torch.dtype, streaming: Any):
        self.dtype = dtype

    def load(self) -> None: ...

    def unload(self) -> None: ...

    def encode(self, items: Any, advance: Any = lambda share: None) -> list[dict[str, Tensor]]:
        advance(float(len(items)))
        return [
            {"text": torch.tensor([[float(ord(letter))] for letter in item]).to(self.dtype)}
            for item in items
        ]


def test_a_family_takes_an_encoder_of_its_package() -> None:
    plan = AuxiliaryModel(
        name="text encoder",
        stage="encode",
        build=lambda dtype: nn.Linear(1, 1),
        run=lambda *_: None,
    )
    letters = CaptionEncoding(num_tokens=7, encoder=Letters, model=lambda text_dim, paths: plan)
    spec = family_spec(**{**SPEC, "text": letters}, shift=3.0)
    encoder = spec.auxiliary.text_encoder(ModelPaths(), CPU, torch.float32, "auto")
    assert isinstance(encoder, Encoder) and encoder.encode(["ab"])[0]["text"].tolist() == [
        [97.0],
        [98.0],
    ]
    assert spec.auxiliary.models(Arch(), ModelPaths())[1] is plan
    assert spec.training.empty_item(Arch(), (1, 64, 64))["text"].shape == (7, 2560)


def test_a_family_takes_t5_as_it_takes_language_models() -> None:
    t5 = T5Encoding(model=T5_XXL, remedy="", num_tokens=128)
    spec = family_spec(**{**SPEC, "text": t5}, shift=3.0)
    assert spec.training.empty_item(Arch(), (1, 64, 64))["text"].shape == (128, 2560)
    published = spec.auxiliary.models(Arch(), ModelPaths())[1].build(torch.bfloat16)
    assert published.get_submodule("encoder.embed_tokens").weight.shape == (32128, 4096)
    with pytest.raises(UserError, match="the text encoder has no tokenizer|set model"):
        spec.auxiliary.text_encoder(ModelPaths(), CPU, torch.float32, "auto")


LTX_SIZES: dict[str, Any] = {
    "latent_channels": 8, "block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8),
    "down_block_types": ("LTXVideoDownBlock3D",) * 2, "layers_per_block": (1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1), "spatio_temporal_scaling": (True, False),
    "decoder_spatio_temporal_scaling": (True, False), "downsample_type": ("conv", "conv"),
    "upsample_residual": (False, False), "upsample_factor": (1, 1), "patch_size": 4,
}  # fmt: skip


def ltx(folder: Path, **config: Any) -> tuple[Any, VaeFamily]:
    """A tiny VAE of LTX-Video in a folder, and its family."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = AutoencoderKLLTXVideo(**(LTX_SIZES | config)).eval()
        vae.latents_mean.normal_()
        vae.latents_std.uniform_(0.5, 2.0)
        for name, parameter in vae.named_parameters():
            if "per_channel_scale" in name:
                parameter.data.normal_()
    vae.save_pretrained(folder / "vae")
    return vae, VaeFamily(
        kind="AutoencoderKLLTXVideo", published=LTX_SIZES, is_video=True, recipe="posterior mode, {}",
        statistics=lambda vae: (vae.latents_mean, vae.latents_std),
        channels=lambda config: config["latent_channels"], strides=lambda config: (2, 8),
        decode_timestep=0.05, decode_noise_scale=0.025, tiles=Tiles(side=64, overlap=32),
    )  # fmt: skip


def clip_latents(width: int = 4) -> Tensor:
    return torch.randn((8, 2, 4, width), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("conditioned", [True, False])
def test_a_vae_decodes_with_timestep_and_noise_as_ltx_does(
    tmp_path: Path, conditioned: bool
) -> None:
    vae, family = ltx(tmp_path, timestep_conditioning=conditioned)
    decoder, latents, seed = loaded(family, base=tmp_path), clip_latents(), 5
    noise = torch.randn(latents.shape, generator=generator(seed, "decode"))
    pipeline = LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), vae=vae, text_encoder=None, tokenizer=None,
        transformer=None,
    )  # fmt: skip
    for scale in (0.025, None):
        decoder.family = replace(family, decode_noise_scale=scale)
        decoder.decode_clip = decoder.family.decode_clip
        # the lines of LTXPipeline.__call__ before and at its decoding
        with torch.no_grad():
            batch = pipeline._denormalize_latents(
                latents[None], vae.latents_mean, vae.latents_std, vae.config.scaling_factor
            )
            share = torch.tensor([0.05 if scale is None else scale])[:, None, None, None, None]
            noised = (1 - share) * batch + share * noise
            arguments = (noised, torch.tensor([0.05])) if conditioned else (batch, None)
            expected = vae.decode(*arguments, return_dict=False)[0]
        expected = pipeline.video_processor.postprocess_video(expected, output_type="pt")
        pixels = decoder.decode(latents, seed)
        assert torch.equal(pixels, expected[0].transpose(0, 1)), scale
    assert torch.equal(decoder.decode(latents, seed), pixels), "repeatable"
    assert torch.equal(decoder.decode(latents, seed + 1), pixels) != conditioned


def test_tiles_take_their_parts_of_the_noise(tmp_path: Path) -> None:
    """All of it in one tile is the whole, and the noise of several tiles is one for all of them."""
    _, family = ltx(tmp_path, timestep_conditioning=True)
    paths = ModelPaths(base=str(tmp_path))
    whole, tiled = (
        DiffusersVae(family, paths, CPU, VaeMode(tiled=tiled)) for tiled in (False, True)
    )
    small, wide = clip_latents(), clip_latents(width=16)
    assert torch.equal(whole.decode(small, 3), tiled.decode(small, 3))
    pixels, of_tiles = (decoder.decode(wide, 3) for decoder in (whole, tiled))
    others = whole.decode(wide, 4)
    for side in (slice(0, 8), slice(-8, None)):  # far from the other tiles
        error, effect = (
            (one[..., side] - pixels[..., side]).abs().max() for one in (of_tiles, others)
        )
        assert error < effect / 20, side


def test_noise_inside_a_decoder_is_of_the_samples_seed(tmp_path: Path) -> None:
    """LTX-Video 0.9.1 adds noise in the blocks of its decoder, from torch's own generator."""
    _, family = ltx(tmp_path, timestep_conditioning=True, decoder_inject_noise=(True, True, False))
    decoder, latents = loaded(family, base=tmp_path), clip_latents()
    state = torch.random.get_rng_state()
    first = decoder.decode(latents, 5)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(3)
    assert torch.equal(decoder.decode(latents, 5), first)


def test_the_seed_of_a_sample_reaches_its_decoder(tmp_path: Path) -> None:
    _, family = ltx(tmp_path, timestep_conditioning=True)
    sampler = EulerSampler(
        loaded(family, base=tmp_path), CPU, make_inputs=lambda *parts: parts,
        sample_defaults=lambda arch: SampleDefaults(),
        levels=lambda pixels, steps, shift: shifted_levels(steps, 3.0),
    )  # fmt: skip
    job = GenerationRequest(
        conditions={"text": torch.ones(2, 3)}, negative=None, frames=3, height=32, width=32,
        steps=1, guidance=1.0, shift=0.0, seed=5,
    )  # fmt: skip
    latents = generate_latents(sampler, job, Scripted(), lambda *_: None)
    (pixels,) = generate(sampler, [job], single_stage(Scripted(), lambda *_: None))
    assert torch.equal(pixels, sampler.decoder.decode(latents, job.seed))
    assert not torch.equal(pixels, sampler.decoder.decode(latents, 0))


def test_plans_count_the_noise_that_a_vae_decodes_with(tmp_path: Path) -> None:
    _, family = ltx(tmp_path, timestep_conditioning=True)
    _, model = vae_models(family, ModelPaths(base=str(tmp_path)), channels=8)
    planned = measure_model(model, (3, 128, 128), dtype=torch.float32, kind="cpu").peak
    decoder, latents = loaded(family, base=tmp_path), torch.zeros(8, 2, 16, 16)
    assert live(decoder.module, lambda: decoder.decode(latents)) == pytest.approx(planned, rel=0.05)


def test_a_vae_with_statistics_needs_no_recipe() -> None:
    family = VaeFamily(
        published={}, statistics=lambda vae: (torch.zeros(1), torch.ones(1)), patch=2
    )
    vae = SimpleNamespace(family=family, config={})
    assert (
        DiffusersVae.recipe.fget(vae)
        == "posterior mode, normalised by channel, 2x2 patches as channel, row, column, {}"
    )


@dataclass(frozen=True)
class _Published:
    width: int = 4
    axes: tuple[int, ...] = (2, 2)


def test_a_demo_transformer_is_written_in_the_published_names(tmp_path: Path) -> None:
    """And none is written that the family would read otherwise."""
    read = lambda config, index: _Published(config["hidden_size"], tuple(config["axes"]))
    build = lambda arch, precision: nn.ModuleDict({"embed": nn.Linear(arch.width, arch.width)})
    spec = altered(TOY, infer_arch=read, build=build)
    with pytest.raises(
        UserError, match=r"reads 'hidden_size' of a transformer's config\.json.*`config`"
    ):
        write_transformer(tmp_path, spec, _Published())
    with pytest.raises(UserError, match=r"reads another architecture"):
        write_transformer(tmp_path, spec, _Published(), {"hidden_size": 8, "axes": [2, 2]})
    assert not list(tmp_path.iterdir())
    names = replace(
        TOY.architecture.names, from_native={"official": lambda name: (TensorSlice(name),)}
    )
    config = {"hidden_size": 4, "axes": [2, 2]}
    write_transformer(tmp_path, altered(spec, names=names), _Published(), config)
    assert json.loads((tmp_path / "transformer" / "config.json").read_text()) == config


@pytest.mark.parametrize(
    "argument", ["import_path", "architecture", "make_inputs", "vae", "text", "adapters", "levels"]
)
def test_a_missing_piece_is_named_with_its_file_and_the_step_of_the_guide(argument: str) -> None:
    given = {name: value for name, value in SPEC.items() if name != argument}
    if argument == "levels":
        given["shift"] = lambda latents: 2.0
    with pytest.raises(
        UserError,
        match=rf"the spec of toy has no `{argument}`: write it in .+\.py \(docs/adding_a_model\.md, \d\. .+\)",
    ):
        family_spec(**given)


def test_headings_that_a_missing_piece_names_are_those_of_the_guide() -> None:
    page = (Path(__file__).parents[1] / GUIDE).read_text(encoding="utf-8")
    assert all(f"\n## {heading}\n" in page for _, heading in STEPS.values())


@pytest.mark.parametrize(
    "spec", [WAN, FLUX2, FLUX3, KREA2, LTX, QWEN, QWENIMAGE, ZIMAGE], ids=lambda spec: spec.name
)
def test_a_hub_id_that_is_no_model_of_a_family_is_answered_with_what_it_is(spec: ModelSpec) -> None:
    def answer(hub_id: str) -> str:
        with pytest.raises(UserError) as error:
            arch_here(spec, ModelPaths(base=hub_id))
        return str(error.value)

    assert f"by its name it is FLUX.1, and no model of {spec.name}" in answer(
        "black-forest-labs/FLUX.1-dev"
    )
    assert "by its name it is LTX-2" in answer("Lightricks/LTX-2")
    for other in (
        family
        for family in (WAN, FLUX2, FLUX3, KREA2, LTX, QWEN, QWENIMAGE, ZIMAGE)
        if family is not spec
    ):
        wrong = f"{next(iter(other.architecture.hub_presets))}-x"
        assert f"use the {other.name} commands" in answer(wrong), wrong
    for hub_id in spec.architecture.hub_presets:
        assert "did you mean" in answer(f"{hub_id}s"), hub_id
