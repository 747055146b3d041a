"""T5 and UMT5 as text encoders of a family, against transformers' own classes and the pipelines of
diffusers: padded and masked, padding that takes part, and no padding."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTXPipeline
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from ditkit_core.errors import UserError
from ditkit_core.families import t5
from ditkit_core.families.t5 import T5_XXL, T5Encoder, T5Encoding, T5Family, t5_model
from ditkit_core.models.encoders import Streaming
from ditkit_core.models.paths import ModelPaths
from ditkit_core.planner.auxiliary import measure_model
from ditkit_core.testing.auxiliary_models import live, num_parameters
from ditkit_core.weights import tokenizer as tokenizer_files

CPU = torch.device("cpu")
CAPTIONS = ["a red fox", "", "a  fox " * 30]
FAMILIES = {
    "T5": T5_XXL,
    "T5 of 2019": replace(T5_XXL, published={"feed_forward_proj": "relu"}),
    "UMT5": T5Family(name="UMT5", kind="UMT5", published=T5_XXL.published),
}
SIZES: dict[str, Any] = {
    "vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2,
    "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def encoding(kind: str, **changes: Any) -> T5Encoding:
    return T5Encoding(**{"model": FAMILIES[kind], "remedy": "get t5", "num_tokens": 24, **changes})


@pytest.fixture(scope="module", params=FAMILIES)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Any, Any]:
    """A folder with a tiny encoder and its tokenizer, and both as transformers has them."""
    kind = request.param
    pieces = ["<pad>", "</s>", "<unk>", "▁a", "▁red", "▁fox", "▁"]
    words = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 2))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    make_config, make = (
        (UMT5Config, UMT5EncoderModel) if kind == "UMT5" else (T5Config, T5EncoderModel)
    )
    published = FAMILIES[kind].published
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make(make_config(**SIZES, feed_forward_proj=published["feed_forward_proj"])).eval()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn(parameter.shape) * 0.2)
    folder = tmp_path_factory.mktemp("t5")
    model.save_pretrained(folder / "text_encoder")
    tokenizer.save_pretrained(folder / "tokenizer")
    return kind, folder, model, tokenizer


def loaded(
    encoding: T5Encoding,
    streaming: Streaming = "never",
    dtype: torch.dtype = torch.float32,
    **paths: Path,
) -> T5Encoder:
    where = ModelPaths(**{name: str(path) for name, path in paths.items()})
    encoder = T5Encoder(encoding, where, CPU, dtype, streaming)
    encoder.load()
    return encoder


WAYS: dict[str, dict[str, Any]] = {
    "masked": {},
    "masked, all rows": {"keeps_padding": True},
    "padding takes part": {"masked": False, "keeps_padding": True},
    "padding takes part in the encoder alone": {"masked": False},
    "not padded": {"padded": False},
}


def by_transformers(model: Any, tokenizer: Any, caption: str, way: str) -> Tensor:
    """Features of a caption as transformers' class computes them."""
    padding = {} if way == "not padded" else {"padding": "max_length"}
    tokens = tokenizer(caption, max_length=24, truncation=True, return_tensors="pt", **padding)
    mask = {"attention_mask": tokens.attention_mask} if way.startswith("masked") else {}
    with torch.no_grad():
        features = model(tokens.input_ids, **mask).last_hidden_state[0]
    every_row = way in ("masked, all rows", "padding takes part")
    return features if every_row else features[: int(tokens.attention_mask.sum())]


@pytest.mark.parametrize("way", WAYS)
def test_features_are_transformers_own_whole_and_streamed(
    world: tuple[str, Path, Any, Any], way: str
) -> None:
    kind, folder, model, tokenizer = world
    shared = model.encoder.block[1].layer[0].SelfAttention.has_relative_attention_bias
    assert shared == (kind == "UMT5"), "T5 has relative positions in its first block alone"
    whole, streamed = (
        loaded(encoding(kind, **WAYS[way]), how, base=folder) for how in ("never", "always")
    )
    together = streamed.encode(CAPTIONS)
    for caption, layer_by_layer in zip(CAPTIONS, together, strict=True):
        (item,) = whole.encode([caption])
        expected = by_transformers(model, tokenizer, caption, way)
        assert torch.equal(item["text"], expected) and torch.equal(
            layer_by_layer["text"], expected
        ), caption
    lengths = [len(item["text"]) for item in together]
    keeps = WAYS[way].get("keeps_padding", False)
    assert lengths == ([24] * 3 if keeps else [4, 1, 24])
    assert len(streamed.truncated) == 1 and streamed.cut_of(CAPTIONS[2])[0] == 68


def test_every_way_of_padding_is_another_identity(world: tuple[str, Path, Any, Any]) -> None:
    kind, folder, *_ = world
    ways = [*WAYS.values(), {"num_tokens": 23}, {"cleaning": "lower case"}]
    where = ModelPaths(base=str(folder))
    identities = {
        T5Encoder(encoding(kind, **way), where, CPU, torch.float32).identity for way in ways
    }
    assert len(identities) == len(ways)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_the_same_streamed(
    world: tuple[str, Path, Any, Any], dtype: torch.dtype
) -> None:
    kind, folder, *_ = world
    whole, streamed = (
        loaded(encoding(kind), how, dtype, base=folder).encode([CAPTIONS[0]])[0]["text"]
        for how in ("never", "always")
    )
    assert whole.dtype == dtype and torch.equal(whole, streamed)


def test_captions_are_cleaned_before_they_are_read(world: tuple[str, Path, Any, Any]) -> None:
    kind, folder, *_ = world
    plain, lower = (loaded(encoding(kind, clean=clean), base=folder) for clean in (str, str.lower))
    texts = [one.encode(["A FOX"])[0]["text"] for one in (plain, lower)]
    assert torch.equal(texts[1], plain.encode(["a fox"])[0]["text"])
    assert texts[0].shape != texts[1].shape or not torch.equal(*texts)


def test_a_single_file_in_its_original_names_gives_what_the_folder_gives(
    world: tuple[str, Path, Any, Any], tmp_path: Path
) -> None:
    kind, folder, *_ = world
    state = load_file(folder / "text_encoder" / "model.safetensors")
    save_file({f"te.{name}": tensor for name, tensor in state.items()}, tmp_path / "t5.safetensors")
    named = replace(FAMILIES[kind], to_transformers=lambda name: name.removeprefix("te."))
    paths = {"text_encoder": tmp_path / "t5.safetensors", "tokenizer": folder / "tokenizer"}
    (text,) = loaded(encoding(kind, model=named), **paths).encode([CAPTIONS[0]])
    (expected,) = loaded(encoding(kind), base=folder).encode([CAPTIONS[0]])
    assert torch.equal(text["text"], expected["text"])
    save_file({"a": torch.zeros(1)}, tmp_path / "t5.safetensors")
    with pytest.raises(UserError, match=rf"is not a {FAMILIES[kind].name} encoder; get t5"):
        loaded(encoding(kind), **paths)


def test_a_file_with_the_names_and_impossible_sizes_is_one_line(tmp_path: Path) -> None:
    """In a plan, too, and where a folder of ComfyUI's is searched."""
    bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    shapes = {
        "shared.weight": (4, 2),
        "encoder.block.0.layer.0.SelfAttention.q.weight": (2, 2),
        bias: (32, 1),
        "encoder.block.0.layer.1.DenseReluDense.wi_0.weight": (2, 2),
    }
    query = "encoder.block.0.layer.0.SelfAttention.q.weight"
    for wrong in ({bias: (32, 0)}, {bias: (600, 1)}, {query: ()}, {"shared.weight": (4,)}):
        tensors = {name: torch.zeros(shape) for name, shape in (shapes | wrong).items()}
        save_file(tensors, tmp_path / "t5.safetensors")
        paths = ModelPaths(text_encoder=str(tmp_path / "t5.safetensors"))
        with pytest.raises(UserError, match=r"t5.safetensors( is not a T5 encoder|: no model can)"):
            t5_model(encoding("T5"), paths).build(torch.bfloat16)


@pytest.mark.parametrize("streaming", ["never", "always"])
def test_what_the_encoder_holds_is_what_was_planned(
    world: tuple[str, Path, Any, Any], streaming: Streaming, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer by layer of eight captions at a time: more add their states and masks, in both."""
    monkeypatch.setattr(t5, "CAPTIONS_STREAMED", 8)
    kind, folder, *_ = world
    # Features of captions this long are most of what it holds.
    long = encoding(kind, num_tokens=512)
    encoder = loaded(long, streaming, base=folder)
    planned = measure_model(
        t5_model(long, ModelPaths(base=str(folder))), (1, 64, 64), dtype=torch.float32, kind="cpu",
        mode="layer by layer" if streaming == "always" else "whole",
    )  # fmt: skip
    captions = ["a fox"] * encoder.items_at_once
    held = live(encoder._model, lambda: encoder.encode(captions))
    assert held == pytest.approx(planned.peak, rel=0.1)


def test_a_vocabulary_of_sentencepiece_needs_its_package(
    world: tuple[str, Path, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, folder, *_ = world
    shutil.copy(folder / "tokenizer" / "tokenizer_config.json", tmp_path)
    (tmp_path / "spiece.model").write_bytes(b"")
    where = ModelPaths(base=str(folder), tokenizer=str(tmp_path))
    monkeypatch.setattr(tokenizer_files, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"spiece\.model is read with the package sentencepiece: uv"
    ):
        T5Encoder(encoding(kind), where, CPU, torch.float32)
    monkeypatch.setattr(tokenizer_files, "find_spec", lambda name: object())
    T5Encoder(encoding(kind), where, CPU, torch.float32)


def test_the_published_size_is_that_of_the_published_file() -> None:
    """4,762,310,656 parameters: t5xxl_fp16.safetensors has twice as many bytes."""
    model = t5_model(encoding("T5"), ModelPaths()).build(torch.bfloat16)
    assert num_parameters(model) == 4_762_310_656


def test_padding_that_takes_part_is_that_of_ltx(world: tuple[str, Path, Any, Any]) -> None:
    kind, folder, model, tokenizer = world
    pipeline = LTXPipeline(
        scheduler=None, vae=None, text_encoder=model, tokenizer=tokenizer, transformer=None
    )
    with torch.no_grad():
        features, mask = pipeline._get_t5_prompt_embeds(
            CAPTIONS[0], max_sequence_length=24, device=CPU, dtype=torch.float32
        )
    (text,) = loaded(encoding(kind, masked=False), base=folder).encode([CAPTIONS[0]])
    assert torch.equal(text["text"], features[0, mask[0].bool()])


def test_rows_of_padding_need_padding() -> None:
    with pytest.raises(UserError, match="keeps features of padding and is not padded"):
        encoding("T5", padded=False, keeps_padding=True)
