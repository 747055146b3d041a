"""Files of text encoders and tokenizers that cannot be used: refused in one line, before the
weights are read where possible."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_encoders import write_mistral, write_qwen

from ditkit_core.errors import UserError
from ditkit_core.families.text import LanguageModelEncoder
from ditkit_core.models.paths import ModelPaths
from ditkit_flux2.encoders import TEXT

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("mistral") / "base"
    write_mistral(base)
    return base


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("qwen") / "base"
    write_qwen(base)
    return base


def made(**where: Any) -> LanguageModelEncoder:
    return LanguageModelEncoder(TEXT, ModelPaths(**where), CPU, torch.float32, "never")


def refused(make: Callable[..., Any], said: str, **where: Any) -> None:
    with pytest.raises(UserError, match=said) as caught:
        make(**where)
    assert "\n" not in str(caught.value)


def refused_when_loaded(said: str, **where: Any) -> None:
    encoder = made(**where)
    refused(encoder.load, said)


def changed_config(folder: Path, target: Path, **changes: Any) -> str:
    shutil.copytree(folder / "text_encoder", target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return str(target)


def test_the_tokenizer_of_the_other_family_is_refused_at_once(mistral: Path, qwen: Path) -> None:
    refused(
        made,
        r"has no token \[SYSTEM_PROMPT\]|has no token <s>",
        base=str(mistral),
        tokenizer=str(qwen / "tokenizer"),
    )
    refused(
        made, r"has no token <\|im_start\|>", base=str(qwen), tokenizer=str(mistral / "tokenizer")
    )


@pytest.mark.parametrize("token", ["[SYSTEM_PROMPT]", "[/INST]", "<pad>"])
def test_a_token_that_is_only_text_is_refused_by_name(
    mistral: Path, tmp_path: Path, token: str
) -> None:
    shutil.copytree(mistral / "tokenizer", tmp_path, dirs_exist_ok=True)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary["added_tokens"] = [
        known for known in vocabulary["added_tokens"] if known["content"] != token
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    refused(
        made,
        f"has no token {re.escape(token)}.*set model.tokenizer",
        base=str(mistral),
        tokenizer=str(tmp_path),
    )


def test_a_tokenizer_of_more_tokens_than_the_encoder_knows_is_refused(
    qwen: Path, tmp_path: Path
) -> None:
    shutil.copytree(qwen / "tokenizer", tmp_path, dirs_exist_ok=True)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary["added_tokens"].append(
        dict(vocabulary["added_tokens"][0], id=5000, content="<|new|>")
    )
    vocabulary["model"]["vocab"]["<|new|>"] = 5000
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    refused_when_loaded(
        "token 5000.*do not belong together", base=str(qwen), tokenizer=str(tmp_path)
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "tokenizer.json is not readable JSON"),
        ("[]", "tokenizer.json is not a JSON object"),
        ("{}", "tokenizer.json has no vocabulary"),
        ('{"model": {}}', "tokenizer.json has no vocabulary"),
        (
            '{"model": {"vocab": {}}, "added_tokens": [1]}',
            "tokenizer.json has an invalid list of added tokens",
        ),
        (None, "tokenizer.json is missing; set model.tokenizer"),
    ],
)
def test_a_broken_tokenizer_is_found_at_once(
    qwen: Path, tmp_path: Path, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    refused(made, said, base=str(qwen), tokenizer=str(tmp_path))


@pytest.mark.parametrize(
    "changes", [{"version": None}, {"truncation": {}}, {"post_processor": True}, {"normalizer": 3}]
)
def test_a_damaged_tokenizer_is_one_line(
    qwen: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    shutil.copytree(qwen / "tokenizer", tmp_path, dirs_exist_ok=True)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary | changes))
    refused_when_loaded(
        "tokenizer.json is not a tokenizer that can be read",
        base=str(qwen),
        tokenizer=str(tmp_path),
    )


def test_a_single_file_needs_a_tokenizer(qwen: Path) -> None:
    file = qwen / "text_encoder" / "model.safetensors"
    refused(made, "set model.tokenizer", text_encoder=str(file))
    refused(
        made,
        "is a file; name the folder with tokenizer.json",
        text_encoder=str(file),
        tokenizer=str(file),
    )


@pytest.mark.parametrize("mark", ["weight_scale_inv", "weight_scale_2", "weight_scale"])
def test_eight_bit_weights_in_another_form_are_refused_at_once(
    qwen: Path, tmp_path: Path, mark: str
) -> None:
    file = tmp_path / "qwen_3_8b.safetensors"
    # of a weight that is not in 8 bits
    scale = {f"model.layers.0.mlp.up_proj.{mark}": torch.ones(())}
    save_file(load_file(qwen / "text_encoder" / "model.safetensors") | scale, file)
    refused(
        made, f"up_proj.{mark}, which is not supported; get the bf16 or the fp8_scaled file",
        text_encoder=str(file),
        tokenizer=str(qwen / "tokenizer"),
    )  # fmt: skip


def test_another_model_is_refused_at_once(qwen: Path, tmp_path: Path) -> None:
    other = changed_config(qwen, tmp_path / "other", model_type="umt5")
    refused(
        made,
        "contains a model of type umt5, not a Mistral 3 or Qwen3",
        base=str(qwen),
        text_encoder=other,
    )
    strange = changed_config(qwen, tmp_path / "strange", model_type=["qwen3"])
    refused(
        made,
        r"contains a model of type \['qwen3'\], not a Mistral 3",
        base=str(qwen),
        text_encoder=strange,
    )
    save_file({"vision_model.post_layernorm.bias": torch.zeros(2)}, tmp_path / "clip.safetensors")
    refused(
        made, "clip.safetensors is not a Mistral 3 or Qwen3 text encoder",
        text_encoder=str(tmp_path / "clip.safetensors"),
        tokenizer=str(qwen / "tokenizer"),
    )  # fmt: skip


def test_too_few_layers_are_refused_at_once(mistral: Path, tmp_path: Path) -> None:
    write_qwen(tmp_path / "short", layers=26)
    refused(
        made,
        "has 26 layers, and FLUX.2 reads the hidden states after layer 27",
        base=str(tmp_path / "short"),
    )
    state = load_file(tmp_path / "short" / "text_encoder" / "model.safetensors")
    save_file(state, tmp_path / "short.safetensors")
    refused(
        made, "has 26 layers", text_encoder=str(tmp_path / "short.safetensors"),
        tokenizer=str(tmp_path / "short" / "tokenizer"),
    )  # fmt: skip


@pytest.mark.parametrize("changes", [{"hidden_size": "wide"}, {"num_hidden_layers": None}])
def test_a_configuration_without_sizes_is_refused_at_once(
    qwen: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    refused(
        made, "config.json has no num_hidden_layers or no hidden_size", base=str(qwen),
        text_encoder=changed_config(qwen, tmp_path, **changes),
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": "one"},
        {"hidden_act": "unknown"},
        {"vocab_size": -3},
        {"rms_norm_eps": None},
        {"num_attention_heads": None},
    ],
)
def test_a_configuration_that_makes_no_model_is_one_line(
    qwen: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    where = {"base": str(qwen), "text_encoder": changed_config(qwen, tmp_path, **changes)}
    refused_when_loaded("config.json does not describe a Qwen3", **where)


def test_weights_that_do_not_fit_the_configuration_name_the_text_encoder(
    qwen: Path, tmp_path: Path
) -> None:
    where = {
        "base": str(qwen),
        "text_encoder": changed_config(qwen, tmp_path, intermediate_size=64),
    }
    refused_when_loaded(
        "configuration does not fit the weights; set model.text_encoder to", **where
    )


def test_a_missing_weight_and_one_too_many_in_a_layer_are_refused(
    qwen: Path, tmp_path: Path
) -> None:
    shutil.copytree(qwen / "text_encoder", tmp_path, dirs_exist_ok=True)
    state = load_file(tmp_path / "model.safetensors")
    norm = "model.layers.26.input_layernorm.weight"
    save_file(
        {name: tensor for name, tensor in state.items() if name != norm},
        tmp_path / "model.safetensors",
    )
    where = {"base": str(qwen), "text_encoder": str(tmp_path)}
    refused_when_loaded("1 missing: layers.26.input_layernorm.weight", **where)
    bias = "model.layers.3.self_attn.q_proj.bias"
    save_file(state | {bias: torch.zeros(16)}, tmp_path / "model.safetensors")
    refused_when_loaded(f"1 unexpected: {bias}", **where)
    later = "model.layers.27.self_attn.q_proj.bias"  # a layer that is not used
    save_file(state | {later: torch.zeros(16)}, tmp_path / "model.safetensors")
    made(**where).load()


def test_truncated_weights_are_found_at_once(qwen: Path, tmp_path: Path) -> None:
    shutil.copytree(qwen / "text_encoder", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(made, "model.safetensors is truncated", base=str(qwen), text_encoder=str(tmp_path))


@pytest.mark.parametrize("part", ["text_encoder", "tokenizer"])
def test_a_missing_part_is_found_at_once(qwen: Path, tmp_path: Path, part: str) -> None:
    shutil.copytree(qwen, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / part)
    refused(made, f"contains no {part}; set model.{part}", base=str(tmp_path))
