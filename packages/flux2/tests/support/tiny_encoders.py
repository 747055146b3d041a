"""Very narrow encoders of the kinds that FLUX.2 uses, made by the libraries that define them: a
VAE, a Mistral 3, a Qwen3."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

WIDTH = 16
MISTRAL_SPECIAL = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]",
    "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
]  # fmt: skip
QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
# What the models' own templates say of conversations of this shape: a system turn and a user turn
# of one text block each, or one user turn that is answered without thinking.
MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% set name = 'SYSTEM_PROMPT' if message.role == "
    "'system' else 'INST' %}"
    "[{{ name }}]{% for block in message.content %}{{ block.text }}{% endfor %}[/{{ name }}]{% "
    "endfor %}"
)
QWEN_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + "
    "'<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


def bytes_tokenizer(special: list[str], **settings: Any) -> Any:
    """A tokenizer of single bytes and the given special tokens, which have the first ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=1024, **settings)


def write_mistral(folder: Path, *, layers: int = 32) -> tuple[Any, Any]:
    """Write `text_encoder` and `tokenizer` of a Mistral 3; returns both as transformers has
    them."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    tokenizer = bytes_tokenizer(
        MISTRAL_SPECIAL, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        padding_side="left",
        chat_template=MISTRAL_TEMPLATE,
    )  # fmt: skip
    text = {
        "model_type": "mistral", "vocab_size": len(tokenizer), "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 1024, "rope_theta": 1e9, "rms_norm_eps": 1e-5,
        "sliding_window": None,
    }  # fmt: skip
    vision = {
        "model_type": "pixtral", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "image_size": 28,
        "num_attention_heads": 1, "head_dim": 8, "patch_size": 14,
    }  # fmt: skip
    config = Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    return _written(folder, Mistral3ForConditionalGeneration, config, tokenizer)


def write_qwen(folder: Path, *, layers: int = 28) -> tuple[Any, Any]:
    """Write `text_encoder` and `tokenizer` of a Qwen3; returns both as transformers has them."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = bytes_tokenizer(
        QWEN_SPECIAL,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="right",
        chat_template=QWEN_TEMPLATE,
    )
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=2 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=1024,
        rope_theta=1e6,
    )  # fmt: skip
    return _written(folder, Qwen3ForCausalLM, config, tokenizer)


def _written(folder: Path, kind: Any, config: Any, tokenizer: Any) -> tuple[Any, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config).eval()
        for parameter in model.parameters():  # far from zero, so that a layer more or less shows
            parameter.data.add_(torch.randn(parameter.shape) * 0.2)
    (folder / "text_encoder").mkdir(parents=True)
    model.config.save_pretrained(folder / "text_encoder")
    save_file(
        old_names(model), folder / "text_encoder" / "model.safetensors", metadata={"format": "pt"}
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    return model, tokenizer


def old_names(model: Any) -> dict[str, torch.Tensor]:
    """A model's weights under the names that the published files have."""
    moved = {
        "model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.",
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    }  # fmt: skip
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if not any(name.startswith("model.language_model.") for name in state):
        return state
    return {
        next(
            new + name.removeprefix(old) for old, new in moved.items() if name.startswith(old)
        ): tensor
        for name, tensor in state.items()
    }


def tiny_vae(**settings: Any) -> Any:
    """A VAE with the structure of FLUX.2's, whose batch norm has statistics that are not those of a
    new one."""
    from diffusers import AutoencoderKLFlux2

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = AutoencoderKLFlux2(
            **{"block_out_channels": (32, 32, 32, 32), "latent_channels": 4} | settings
        )
        vae.bn.running_mean.normal_()
        vae.bn.running_var.uniform_(0.5, 2.0)
    return vae.eval().requires_grad_(False)
