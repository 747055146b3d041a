"""Captions to features, for both language models: as diffusers' pipelines make them, from every
kind of file."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_encoders import WIDTH, write_mistral, write_qwen

from ditkit_core.families import text as text_module
from ditkit_core.families.language_models import TextEncoding, TextFamily
from ditkit_core.families.text import LanguageModelEncoder, Prompter, attention_mask
from ditkit_core.models.paths import ModelPaths
from ditkit_flux2.encoders import MISTRAL, QWEN, TEXT

CPU = torch.device("cpu")
SHALLOW_MISTRAL, SHALLOW_QWEN = (replace(each, layers=(2, 4, 6)) for each in (MISTRAL, QWEN))
SHALLOW = replace(TEXT, models=(SHALLOW_MISTRAL, SHALLOW_QWEN))
"""The same encoders with a fifth of the depth; the published layers are compared too."""
CAPTION = "a red circle on a dark background"
CAPTIONS = ["", CAPTION, "naïve [IMG] ✓ <think>\n  two lines ", "red " * 200]


@dataclass(frozen=True)
class Tiny:
    """A tiny text encoder on disk, and as the libraries have it."""

    family: TextFamily
    base: Path
    model: Any
    tokenizer: Any
    reference: Callable[[str], torch.Tensor]
    """Features of a caption, by diffusers."""

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return load_file(self.base / "text_encoder" / "model.safetensors")


def _mistral(base: Path, family: TextFamily = SHALLOW_MISTRAL) -> Tiny:
    from diffusers import Flux2Pipeline

    model, tokenizer = write_mistral(base, layers=family.layers[-1] + 2)
    layers = {} if family is MISTRAL else {"hidden_states_layers": family.layers}
    assert tokenizer.convert_tokens_to_ids("<pad>") == 11  # as in the published tokenizer

    def reference(caption: str) -> torch.Tensor:
        with torch.no_grad():
            return Flux2Pipeline._get_mistral_3_small_prompt_embeds(
                model, tokenizer, caption, **layers
            )[0]

    return Tiny(family, base, model, tokenizer, reference)


def _qwen(base: Path, family: TextFamily = SHALLOW_QWEN) -> Tiny:
    from diffusers import Flux2KleinPipeline

    model, tokenizer = write_qwen(base, layers=family.layers[-1] + 1)
    layers = {} if family is QWEN else {"hidden_states_layers": family.layers}

    def reference(caption: str) -> torch.Tensor:
        with torch.no_grad():
            return Flux2KleinPipeline._get_qwen3_prompt_embeds(model, tokenizer, caption, **layers)[
                0
            ]

    return Tiny(family, base, model, tokenizer, reference)


@pytest.fixture(scope="module", params=[_mistral, _qwen], ids=["mistral", "qwen"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return request.param(tmp_path_factory.mktemp("tiny") / "base")


@pytest.fixture(scope="module")
def resident(tiny: Tiny) -> LanguageModelEncoder:
    """Its encoder in fp32; tests only encode with it."""
    return loaded(base=str(tiny.base))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return _qwen(tmp_path_factory.mktemp("qwen") / "base")


def made(
    dtype: torch.dtype = torch.float32,
    streaming: Any = "never",
    *,
    encoding: TextEncoding = SHALLOW,
    **where: Any,
) -> LanguageModelEncoder:
    return LanguageModelEncoder(encoding, ModelPaths(**where), CPU, dtype, streaming)


def loaded(*args: Any, **where: Any) -> LanguageModelEncoder:
    encoder = made(*args, **where)
    encoder.load()
    return encoder


@pytest.mark.parametrize("caption", CAPTIONS)
def test_features_are_those_of_diffusers_bitwise(
    tiny: Tiny, resident: LanguageModelEncoder, caption: str
) -> None:
    text = resident.encode([caption])[0]["text"]
    assert text.shape == (TEXT.num_tokens, 3 * WIDTH) and resident.width == 3 * WIDTH
    assert torch.equal(text, tiny.reference(caption))


@pytest.mark.parametrize("make", [_mistral, _qwen], ids=["mistral", "qwen"])
def test_the_published_layers_are_those_of_diffusers(
    make: Callable[..., Tiny], tmp_path: Path
) -> None:
    published = make(tmp_path / "base", {_mistral: MISTRAL, _qwen: QWEN}[make])
    text = loaded(encoding=TEXT, base=str(published.base)).encode([CAPTION])[0]["text"]
    assert torch.equal(text, published.reference(CAPTION))


def test_streamed_features_are_the_resident_ones_bitwise(
    tiny: Tiny, resident: LanguageModelEncoder
) -> None:
    streamed = loaded(torch.float32, "always", base=str(tiny.base))
    assert (streamed.streams, resident.streams) == (True, False)
    assert (streamed.items_at_once, resident.items_at_once) == (64, 1)
    together = streamed.encode(CAPTIONS)
    for caption, features in zip(CAPTIONS, together, strict=True):
        assert torch.equal(features["text"], resident.encode([caption])[0]["text"])
    assert all(parameter.is_meta for parameter in streamed._model.parameters())


def test_layers_are_the_hidden_states_of_transformers_side_by_side(
    tiny: Tiny, resident: LanguageModelEncoder
) -> None:
    prompter = Prompter(tiny.base / "tokenizer", tiny.family, TEXT)
    prompter.load(10**6)
    ids, real, cut = prompter.tokens(CAPTION)
    with torch.no_grad():
        states = tiny.model(
            ids[None], attention_mask=real[None].long(), output_hidden_states=True
        ).hidden_states
    text = resident.encode([CAPTION])[0]["text"]
    for place, layer in enumerate(tiny.family.layers):
        assert torch.equal(text[:, place * WIDTH : (place + 1) * WIDTH], states[layer][0]), layer
    assert cut == 0 and text.std() > 0.1


def test_templates_are_rendered_to_the_byte() -> None:
    # Written out in full: the official system message has a line break after "object".
    assert MISTRAL.render("a [IMG]b") == (
        "<s>[SYSTEM_PROMPT]You are an AI that reasons about image descriptions. You give "
        "structured responses focusing on "
        "object relationships, object\nattribution and actions without "
        "speculation.[/SYSTEM_PROMPT][INST]a b[/INST]"
    )
    assert QWEN.render(" a [IMG]") == (
        "<|im_start|>user\n a [IMG]<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_the_system_message_is_the_one_of_diffusers_pipeline() -> None:
    from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

    assert f"[SYSTEM_PROMPT]{SYSTEM_MESSAGE}[/SYSTEM_PROMPT]" in MISTRAL.before


def test_tokens_are_those_of_the_tokenizers_own_template(tiny: Tiny) -> None:
    from diffusers.pipelines.flux2.pipeline_flux2 import format_input

    prompter = Prompter(tiny.base / "tokenizer", tiny.family, TEXT)
    prompter.load(10**6)
    for caption in [*CAPTIONS, "red " * 300]:
        if tiny.family is SHALLOW_MISTRAL:
            messages, how = format_input([caption])[0], {"add_generation_prompt": False}
        else:
            messages = [{"role": "user", "content": caption}]
            how = {"add_generation_prompt": True, "enable_thinking": False}
        assert tiny.tokenizer.apply_chat_template(
            messages, tokenize=False, **how
        ) == tiny.family.render(caption)
        expected = tiny.tokenizer.apply_chat_template(
            messages, padding="max_length", truncation=True, max_length=TEXT.num_tokens,
            return_dict=True, return_tensors="pt",
            **how,
        )  # fmt: skip
        ids, real, cut = prompter.tokens(caption)
        assert torch.equal(ids, expected["input_ids"][0])
        assert torch.equal(real.long(), expected["attention_mask"][0])
        assert (cut > 0) == (len(caption) > 500)


def test_padding_stands_on_the_side_of_the_family(tiny: Tiny) -> None:
    prompter = Prompter(tiny.base / "tokenizer", tiny.family, TEXT)
    prompter.load(10**6)
    ids, real, _ = prompter.tokens("red")
    padding = tiny.tokenizer.convert_tokens_to_ids(tiny.family.padding)
    first, last = (ids[~real][0], ids[real][0]) if tiny.family.pads_left else (ids[-1], ids[0])
    assert first == padding and last == tiny.tokenizer.convert_tokens_to_ids(tiny.family.special[0])
    assert bool(real[-1]) == tiny.family.pads_left and bool(real[0]) != tiny.family.pads_left


def test_without_padding_there_is_no_mask() -> None:
    assert attention_mask(torch.ones(4, dtype=torch.bool)) is None
    mask = attention_mask(torch.tensor([False, True, True]))
    assert mask is not None
    assert mask.tolist() == [[[[False, False, False], [False, True, False], [False, True, True]]]]


def test_a_long_caption_is_cut_and_said(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = loaded(base=str(tiny.base))
    caption = "red " * 300
    assert torch.equal(encoder.encode([caption])[0]["text"], tiny.reference(caption))
    length = len(tiny.tokenizer(tiny.family.render(caption), add_special_tokens=False).input_ids)
    assert len(encoder.truncated) == 1 and f"is {length} tokens long" in encoder.truncated[0]
    assert f"{length - TEXT.num_tokens} were cut" in encoder.truncated[0]
    assert encoder.truncated[0] in capsys.readouterr().err
    encoder.encode(["red"])
    assert len(encoder.truncated) == 1


def test_where_a_caption_is_cut_is_known_without_weights(tiny: Tiny) -> None:
    encoder = made(base=str(tiny.base))
    assert encoder.cut_of("red cat") is None
    caption = "red cat " * 400
    cut = encoder.cut_of(caption)
    assert cut is not None and caption.startswith(cut[1]) and 0 < len(cut[1]) < len(caption)
    assert not encoder._mapping, "no weights are read"
    encoder.load()
    assert f"{cut[0]} were cut" in cut_said(encoder, caption)


def cut_said(encoder: LanguageModelEncoder, caption: str) -> str:
    encoder.encode([caption])
    return encoder.truncated[0]


def test_progress_is_reported_layer_by_layer_and_adds_up(tiny: Tiny) -> None:
    told: list[float] = []
    loaded(torch.float32, "always", base=str(tiny.base)).encode(["a", "b", "c"], told.append)
    assert len(told) == 3 * tiny.family.layers[-1]
    assert sum(told) == pytest.approx(3, abs=1e-9)


def test_features_are_in_the_encoders_dtype(tiny: Tiny, resident: LanguageModelEncoder) -> None:
    exact = resident.encode([CAPTION])[0]["text"]
    streamed, resident = (
        loaded(torch.bfloat16, how, base=str(tiny.base)).encode([CAPTION])[0]["text"]
        for how in ("always", "never")
    )
    assert streamed.dtype == torch.bfloat16 and torch.equal(streamed, resident)
    # bf16 keeps 8 bits, through six layers
    assert (streamed.float() - exact).norm() / exact.norm() < 0.1


def test_files_with_other_names_and_with_less_give_the_same(
    tiny: Tiny, resident: LanguageModelEncoder, tmp_path: Path
) -> None:
    expected = resident.encode([CAPTION])[0]["text"]
    new_names = {name: tensor.clone() for name, tensor in tiny.model.state_dict().items()}
    prefix = "model.language_model." if tiny.family is SHALLOW_MISTRAL else "model."
    few = re.compile(re.escape(prefix) + r"(embed|layers\.[0-5]\.)")
    bare = {
        name.removeprefix(prefix): tensor for name, tensor in new_names.items() if few.match(name)
    }
    assert len(bare) < len(new_names) - 1
    plain = {f"model.{name}": tensor for name, tensor in bare.items()}
    for name, state in (("new", new_names), ("bare", bare), ("plain", plain)):
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(tiny.base / "text_encoder" / "config.json", folder)
        save_file(state, folder / "weights.safetensors")
        encoder = loaded(base=str(tiny.base), text_encoder=str(folder))
        assert torch.equal(encoder.encode([CAPTION])[0]["text"], expected), name


def test_a_configuration_of_the_language_model_alone_is_enough(tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny.base / "text_encoder", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config.get("text_config", config)))
    encoder = loaded(base=str(tiny.base), text_encoder=str(tmp_path))
    assert torch.equal(encoder.encode([CAPTION])[0]["text"], tiny.reference(CAPTION))


def test_a_single_file_gives_what_the_folder_gives(tmp_path: Path, qwen: Tiny) -> None:
    file = tmp_path / "qwen_3_4b.safetensors"
    save_file(qwen.state | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, file)
    encoder = loaded(text_encoder=str(file), tokenizer=str(qwen.base / "tokenizer"))
    assert encoder.family is SHALLOW_QWEN
    assert torch.equal(encoder.encode([CAPTION])[0]["text"], qwen.reference(CAPTION))


def test_a_single_file_of_mistral_is_known_by_its_shapes(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralModel

    config = MistralConfig(
        vocab_size=275, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=7,
        num_attention_heads=2,
        num_key_value_heads=1, head_dim=128, rope_theta=1e9, rms_norm_eps=1e-5, sliding_window=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MistralModel(config).eval()
    write_mistral(tmp_path / "other")
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    save_file(
        state | {"tekken_model": torch.zeros(7, dtype=torch.uint8)},
        tmp_path / "mistral.safetensors",
    )
    encoder = loaded(
        text_encoder=str(tmp_path / "mistral.safetensors"),
        tokenizer=str(tmp_path / "other" / "tokenizer"),
    )
    ids, real, _ = encoder._prompter.tokens(CAPTION)
    with torch.no_grad():
        states = model(
            ids[None], attention_mask=real[None].long(), output_hidden_states=True
        ).hidden_states
    expected = torch.cat([states[layer][0] for layer in (2, 4, 6)], dim=1)
    assert encoder.family is SHALLOW_MISTRAL and torch.equal(
        encoder.encode([CAPTION])[0]["text"], expected
    )


def test_identity_follows_what_changes_features_and_nothing_else(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def identity(dtype: torch.dtype = torch.float32, streaming: Any = "never", **where: Any) -> str:
        return made(dtype, streaming, base=str(tiny.base), **where).identity

    shutil.copytree(tiny.base / "tokenizer", tmp_path / "tokenizer")
    vocabulary = tmp_path / "tokenizer" / "tokenizer.json"
    first = identity()
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text("{}")
    assert first == identity(streaming="always") == identity(tokenizer=str(tmp_path / "tokenizer"))
    vocabulary.write_text(vocabulary.read_text().replace('"Ā"', '"Ȁ"'))
    others = [identity(torch.bfloat16), identity(tokenizer=str(tmp_path / "tokenizer"))]
    with monkeypatch.context() as patch:
        patch.setattr(text_module, "ATTENTION", "eager")
        others.append(identity())
    for change in ({"num_tokens": 256}, {"keeps_padding": False}):
        encoder = made(base=str(tiny.base))
        encoder.encoding = replace(SHALLOW, **change)
        others.append(encoder.identity)
    for change in (
        {"before": "[INST]"},
        {"layers": (1, 3, 5)},
        {"pads_left": not tiny.family.pads_left},
    ):
        encoder = made(base=str(tiny.base))
        encoder.family = replace(tiny.family, **change)
        others.append(encoder.identity)
    assert len({first, *others}) == len(others) + 1


def test_the_peak_of_host_memory_is_reported(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = loaded(base=str(tiny.base))
    encoder.unload()
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "text encoder: loaded into memory as a whole (encode.streaming = never)"
    assert said[1].startswith("text encoder: ") and "peak" in said[1] and said[1].endswith(" GiB")
    assert all(parameter.is_meta for parameter in encoder._model.parameters())
    encoder.unload()
    assert capsys.readouterr().out == ""
    encoder.load()
    assert torch.equal(encoder.encode([CAPTION])[0]["text"], tiny.reference(CAPTION))
