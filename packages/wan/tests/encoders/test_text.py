"""The text encoder: captions to features as diffusers makes them, from every kind of file."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ditkit_core.errors import UserError
from ditkit_core.models.encoders import Streaming
from ditkit_core.models.paths import ModelPaths
from ditkit_core.nn.quantized_linear import QuantizedLinear
from ditkit_core.testing.denied import denied
from ditkit_core.weights import layer_streaming
from ditkit_core.weights.layer_streaming import MARGIN_BYTES
from ditkit_wan.encoders.text import TEXT_TOKENS, TextEncoder, clean

CPU = torch.device("cpu")
CAPTION = "a red circle moves right"


def loaded(dtype: torch.dtype = torch.float32, **where: Any) -> TextEncoder:
    encoder = TextEncoder(ModelPaths(**where), CPU, dtype)
    encoder.load()
    return encoder


@cache
def exact(checkpoint: Path) -> TextEncoder:
    """The checkpoint's encoder in fp32; tests only encode with it."""
    return loaded(base=str(checkpoint))


@cache
def pipeline(checkpoint: Path) -> Any:
    """diffusers' pipeline of a text encoder alone."""
    from diffusers import WanPipeline

    parts = {"transformer": None, "vae": None, "scheduler": None}
    return WanPipeline.from_pretrained(checkpoint, **parts, local_files_only=True)


def hf_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "text_encoder" / "model.safetensors")


def official_name(name: str) -> str:
    """A parameter's name in the official code, written the other way round than the code under
    test."""
    if not name.startswith("encoder.block."):
        return {
            "shared.weight": "token_embedding.weight",
            "encoder.final_layer_norm.weight": "norm.weight",
        }[name]
    _, _, block, _, layer, *rest = name.removesuffix(".weight").split(".")
    inner = {
        "0.layer_norm": "norm1", "1.layer_norm": "norm2", "1.DenseReluDense.wi_0": "ffn.gate.0",
        "1.DenseReluDense.wi_1": "ffn.fc1", "1.DenseReluDense.wo": "ffn.fc2",
        "0.SelfAttention.relative_attention_bias": "pos_embedding.embedding",
    }  # fmt: skip
    tail = ".".join([layer, *rest])
    return f"blocks.{block}.{inner.get(tail, tail.replace('0.SelfAttention', 'attn'))}.weight"


@pytest.mark.parametrize(
    "caption", ["", CAPTION, "a  blue&amp;amp;red square…\n moves \t left ", "zebra ✓ " * 30]
)
def test_features_are_those_of_diffusers(checkpoint: Path, caption: str) -> None:
    with torch.no_grad():
        expected, _ = pipeline(checkpoint).encode_prompt(
            caption, do_classifier_free_guidance=False, max_sequence_length=512, device="cpu"
        )
    text = exact(checkpoint).encode([caption])[0]["text"]
    assert torch.equal(
        torch.nn.functional.pad(text, (0, 0, 0, TEXT_TOKENS - len(text))), expected[0]
    )
    assert 1 <= len(text) < 300 and text.abs().sum() > 0


def test_captions_are_cleaned_as_in_training() -> None:
    assert clean("  â€œa&nbsp;&amp;amp; b\n\tcâ€\x9d ") == '"a & b c"'


def test_a_long_caption_is_cut_and_said(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = loaded(base=str(checkpoint))
    text = encoder.encode(["red " * 600])[0]["text"]
    assert len(text) == TEXT_TOKENS
    assert len(encoder.truncated) == 1 and "is 601 tokens long: 89 were cut" in encoder.truncated[0]
    assert encoder.truncated[0] in capsys.readouterr().err
    encoder.encode(["red"])[0]
    assert len(encoder.truncated) == 1


def test_where_a_caption_is_cut_is_known_without_weights(checkpoint: Path) -> None:
    encoder = TextEncoder(ModelPaths(base=str(checkpoint)), CPU, torch.float32)
    cut = encoder.cut_of("red " * 600)
    assert cut is not None and cut[0] == 89 and cut[1].split() == ["red"] * 511
    assert encoder.cut_of("red " * 511) is None, "with its end it has 512 tokens"
    assert encoder._model is None


def test_comfyui_and_official_files_give_what_the_folder_gives(
    checkpoint: Path, tmp_path: Path
) -> None:
    expected = exact(checkpoint).encode([CAPTION])[0]["text"]
    state = hf_state(checkpoint)
    assert "encoder.embed_tokens.weight" not in state
    comfyui = {
        **state,
        "spiece_model": torch.zeros(7, dtype=torch.uint8),
        "encoder.embed_tokens.weight": state["shared.weight"].clone(),
    }
    official = {official_name(name): tensor for name, tensor in state.items()}
    assert "blocks.1.attn.q.weight" in official and "blocks.0.ffn.gate.0.weight" in official
    for name, tensors in (("umt5_xxl_fp16", comfyui), ("official", official)):
        file = tmp_path / f"{name}.safetensors"
        save_file(tensors, file)
        text = loaded(text_encoder=str(file), tokenizer=str(checkpoint / "tokenizer")).encode(
            [CAPTION]
        )[0]["text"]
        assert torch.equal(text, expected), name


def streaming(how: Streaming, dtype: torch.dtype = torch.float32, **where: Any) -> TextEncoder:
    encoder = TextEncoder(ModelPaths(**where), CPU, dtype, how)
    encoder.load()
    return encoder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_streamed_features_are_the_resident_ones_bitwise(
    checkpoint: Path, dtype: torch.dtype
) -> None:
    captions = [CAPTION, "", "zebra ✓ " * 9, "red " * 600]
    streamed, resident = (
        streaming(how, dtype, base=str(checkpoint)) for how in ("always", "never")
    )
    assert (streamed.streams, streamed.items_at_once, resident.streams, resident.items_at_once) == (
        True,
        64,
        False,
        1,
    )
    done: list[float] = []
    together = streamed.encode(captions, done.append)
    assert sum(done) == pytest.approx(len(captions)) and len(done) > len(captions)
    for caption, found in zip(captions, together, strict=True):
        (expected,) = resident.encode([caption])
        assert found["text"].dtype == dtype and torch.equal(found["text"], expected["text"])
        # No padding is kept alive.
        assert found["text"].untyped_storage().nbytes() == found["text"].nbytes
    assert all(parameter.is_meta for parameter in streamed._model.parameters())
    assert not any(parameter.is_meta for parameter in resident._model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_streamed_eight_bit_weights_give_the_resident_features(
    checkpoint: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    file, _ = scaled_files(checkpoint, tmp_path)
    where = {"text_encoder": str(file), "tokenizer": str(checkpoint / "tokenizer")}
    streamed, resident = (
        streaming(how, dtype, **where).encode([CAPTION])[0]["text"] for how in ("always", "never")
    )
    assert torch.equal(streamed, resident)


def test_an_encoder_that_memory_has_no_room_for_is_streamed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = hf_state(checkpoint).values()
    needed = sum(2 * tensor.numel() for tensor in tensors)
    for free, streams in ((needed + MARGIN_BYTES, False), (needed + MARGIN_BYTES - 1, True)):
        monkeypatch.setattr(layer_streaming, "free_memory_bytes", lambda device, free=free: free)
        assert streaming("auto", torch.bfloat16, base=str(checkpoint)).streams == streams
        assert (
            "text encoder: read layer by layer for 64 captions" in capsys.readouterr().out
        ) == streams


def test_a_streamed_encoder_is_loaded_again_after_it_was_freed(checkpoint: Path) -> None:
    encoder = streaming("always", base=str(checkpoint))
    first = encoder.encode([CAPTION])[0]["text"]
    encoder.unload()
    encoder.load()
    assert torch.equal(encoder.encode([CAPTION])[0]["text"], first)


def test_features_are_stored_in_the_encoders_dtype(checkpoint: Path) -> None:
    expected = exact(checkpoint).encode([CAPTION])[0]["text"]
    text = loaded(torch.bfloat16, base=str(checkpoint)).encode([CAPTION])[0]["text"]
    assert text.dtype == torch.bfloat16
    # bf16 keeps 8 bits: a few roundings through two layers
    assert (text.float() - expected).norm() / expected.norm() < 3e-2


def test_the_projection_that_overflows_stays_fp32_in_fp16(checkpoint: Path) -> None:
    encoder = loaded(torch.float16, base=str(checkpoint))
    dtypes = {name.split(".")[-2]: p.dtype for name, p in encoder._model.named_parameters()}
    assert dtypes["wo"] == torch.float32 and dtypes["wi_0"] == dtypes["q"] == torch.float16
    assert encoder.encode([CAPTION])[0]["text"].isfinite().all()


def scaled_files(checkpoint: Path, folder: Path) -> tuple[Path, Path]:
    """The encoder as ComfyUI scales it, linear layers in 8 bits and embeddings in 16, and one that
    holds the values of that."""
    codes, values = {"scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)}, {}
    for name, tensor in hf_state(checkpoint).items():
        if name.endswith(
            (
                ".q.weight",
                ".k.weight",
                ".v.weight",
                ".o.weight",
                ".wi_0.weight",
                ".wi_1.weight",
                ".wo.weight",
            )
        ):
            scale = tensor.abs().max() / 448
            codes[name] = (tensor / scale).to(torch.float8_e4m3fn)
            codes[name.replace("weight", "scale_weight")] = scale
            codes[name.replace("weight", "scale_input")] = torch.ones(())
            values[name] = codes[name].float() * scale
        else:
            codes[name] = tensor.half()
            values[name] = codes[name].float()
    files = folder / "umt5_xxl_fp8_e4m3fn_scaled.safetensors", folder / "values.safetensors"
    save_file(codes | {"spiece_model": torch.zeros(7, dtype=torch.uint8)}, files[0])
    save_file(values, files[1])
    return files


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scaled_eight_bit_weights_are_held_as_they_are(
    checkpoint: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    tokenizer = str(checkpoint / "tokenizer")
    scaled, dense = (
        loaded(dtype, text_encoder=str(file), tokenizer=tokenizer)
        for file in scaled_files(checkpoint, tmp_path)
    )
    matrices = [module for module in scaled._model.modules() if isinstance(module, QuantizedLinear)]
    assert len(matrices) == 7 * len(scaled._model.encoder.block)
    assert {module.weight.dtype for module in matrices} == {torch.float8_e4m3fn}
    text = scaled.encode([CAPTION])[0]["text"]
    assert text.dtype == dtype and torch.equal(text, dense.encode([CAPTION])[0]["text"])
    assert scaled.identity != dense.identity


def test_the_error_of_eight_bits_is_that_of_noise_as_large_as_their_rounding(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Three bits of fraction: 0.026 of each weight in the mean of squares."""
    file, _ = scaled_files(checkpoint, tmp_path)
    random = torch.Generator().manual_seed(0)
    noisy = hf_state(checkpoint)
    for name in load_file(file):
        if name.endswith("scale_weight"):
            weight = noisy[name.replace("scale_weight", "weight")]
            weight.mul_(1 + 0.026 * torch.randn(weight.shape, generator=random))
    save_file(noisy, tmp_path / "noisy.safetensors")
    where = [
        {"text_encoder": str(each), "tokenizer": str(checkpoint / "tokenizer")}
        for each in (file, tmp_path / "noisy.safetensors")
    ]
    found, like = (loaded(**each).encode([CAPTION])[0]["text"] for each in where)
    expected = exact(checkpoint).encode([CAPTION])[0]["text"]
    assert 0.4 < (found - expected).norm() / (like - expected).norm() < 2.5


def test_eight_bit_weights_in_another_form_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    state = hf_state(checkpoint) | {
        "encoder.block.0.layer.0.SelfAttention.q.weight_scale_inv": torch.ones(1, 1)
    }
    save_file(state, tmp_path / "umt5.safetensors")
    with pytest.raises(
        UserError, match="q.weight_scale_inv, which is not supported; get the bf16"
    ) as caught:
        TextEncoder(ModelPaths(text_encoder=str(tmp_path / "umt5.safetensors")), CPU, torch.float32)
    assert "\n" not in str(caught.value)


def test_a_single_file_needs_a_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    save_file(hf_state(checkpoint), tmp_path / "umt5.safetensors")
    with pytest.raises(UserError, match="set model.tokenizer"):
        TextEncoder(ModelPaths(text_encoder=str(tmp_path / "umt5.safetensors")), CPU, torch.float32)


def test_a_folder_without_a_tokenizer_is_one_line(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing here")
    with pytest.raises(UserError, match="no tokenizer") as caught:
        loaded(base=str(checkpoint), tokenizer=str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("tokenizer.json", "{}", "tokenizer.json has no vocabulary"),
        ("tokenizer.json", "{", "tokenizer.json is not readable JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is not a JSON object"),
    ],
)
def test_a_broken_tokenizer_is_found_at_once(
    checkpoint: Path, tmp_path: Path, name: str, text: str, said: str
) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(checkpoint / "tokenizer", folder)
    (folder / name).write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        TextEncoder(ModelPaths(base=str(checkpoint), tokenizer=str(folder)), CPU, torch.float32)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def changed(folder: Path, target: Path, name: str, *path: str, value: Any) -> str:
    """A copy of a folder with one value of a JSON file changed."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    found = json.loads((target / name).read_text())
    owner = found
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    (target / name).write_text(json.dumps(found))
    return str(target)


@pytest.mark.parametrize(
    ("path", "value"),
    [(("version",), None), (("truncation",), {}), (("post_processor",), True), (("model", "vocab"), [1]), (("model", "unk_id"), 10**9)],
)  # fmt: skip
def test_a_damaged_tokenizer_is_one_line(
    checkpoint: Path, tmp_path: Path, path: tuple[str, ...], value: Any
) -> None:
    folder = changed(checkpoint / "tokenizer", tmp_path, "tokenizer.json", *path, value=value)
    with pytest.raises(
        UserError, match="contains no tokenizer that can be read .*; set model.tokenizer"
    ) as caught:
        loaded(base=str(checkpoint), tokenizer=folder)
    assert "\n" not in str(caught.value) and folder in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_heads", None), ("dropout_rate", None), ("num_layers", 10**9), ("num_layers", True), ("d_model", 10**30), ("d_kv", "x")],
)  # fmt: skip
def test_a_damaged_configuration_is_one_line(
    checkpoint: Path, tmp_path: Path, key: str, value: Any
) -> None:
    folder = changed(checkpoint / "text_encoder", tmp_path, "config.json", key, value=value)
    with pytest.raises(UserError, match="config") as caught:
        loaded(base=str(checkpoint), text_encoder=folder)
    assert "\n" not in str(caught.value) and folder in str(caught.value)


@pytest.mark.parametrize(
    "part", ["tokenizer", "tokenizer/tokenizer.json", "text_encoder", "text_encoder/config.json"]
)
def test_files_without_permission_are_said_as_such(
    checkpoint: Path, tmp_path: Path, part: str
) -> None:
    shutil.copytree(checkpoint, tmp_path / "base")
    with (
        denied(tmp_path / "base" / part),
        pytest.raises(UserError, match="cannot be read .Permission denied"),
    ):
        TextEncoder(ModelPaths(base=str(tmp_path / "base")), CPU, torch.float32)


def test_a_tokenizer_without_padding_is_one_line(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint / "tokenizer", tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(UserError, match="tokenizer") as caught:
        loaded(base=str(checkpoint), tokenizer=str(tmp_path))
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_padding_that_the_encoder_does_not_know_is_one_line(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = changed(
        checkpoint / "tokenizer", tmp_path, "tokenizer_config.json", "pad_token", value="<other>"
    )
    encoder = loaded(base=str(checkpoint), tokenizer=folder)
    with pytest.raises(
        UserError, match="and the text encoder knows .*: they do not belong together"
    ) as caught:
        encoder.encode(["a red circle"])
    assert "\n" not in str(caught.value) and folder in str(caught.value)


@pytest.mark.parametrize("part", ["text_encoder", "tokenizer"])
def test_a_missing_part_is_found_at_once(checkpoint: Path, tmp_path: Path, part: str) -> None:
    base = tmp_path / "base"
    shutil.copytree(checkpoint, base)
    shutil.rmtree(base / part)
    with pytest.raises(UserError, match=f"contains no {part}; set model.{part}"):
        TextEncoder(ModelPaths(base=str(base)), CPU, torch.float32)


def test_truncated_weights_are_found_at_once(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint / "text_encoder", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="model.safetensors is truncated"):
        TextEncoder(
            ModelPaths(base=str(checkpoint), text_encoder=str(tmp_path)), CPU, torch.float32
        )


def test_weights_of_another_depth_name_the_text_encoder(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint / "text_encoder", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_layers": 3}))
    with pytest.raises(UserError, match="set model.text_encoder to") as caught:
        loaded(base=str(checkpoint), text_encoder=str(tmp_path))
    assert "preset" not in str(caught.value)


def test_a_clip_file_is_no_text_encoder(checkpoint: Path, tmp_path: Path) -> None:
    save_file(
        {"vision_model.post_layernorm.bias": torch.zeros(2)}, tmp_path / "clip_vision_h.safetensors"
    )
    with pytest.raises(UserError, match="not a UMT5 encoder"):
        loaded(
            text_encoder=str(tmp_path / "clip_vision_h.safetensors"),
            tokenizer=str(checkpoint / "tokenizer"),
        )


def test_identity_follows_weights_tokenizer_and_dtype(checkpoint: Path, tmp_path: Path) -> None:
    def identity(dtype: torch.dtype = torch.float32, how: Streaming = "never", **where: Any) -> str:
        return TextEncoder(ModelPaths(base=str(checkpoint), **where), CPU, dtype, how).identity

    for file in (checkpoint / "tokenizer").iterdir():
        (tmp_path / file.name).write_text(file.read_text().replace("▁red", "▁rouge"))
    identities = [identity(), identity(torch.bfloat16), identity(tokenizer=str(tmp_path))]
    assert len(set(identities)) == 3 and identities[0] == identity() == identity(how="always")


@pytest.mark.parametrize("missing", ["tokenizer.json", "tokenizer_config.json"])
def test_an_incomplete_tokenizer_is_said_before_anything_is_loaded(
    checkpoint: Path, tmp_path: Path, missing: str
) -> None:
    for file in (checkpoint / "tokenizer").iterdir():
        if file.name != missing:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UserError, match=missing):
        TextEncoder(ModelPaths(base=str(checkpoint), tokenizer=str(tmp_path)), CPU, torch.float32)
