"""Tiny vision-language models with all files that one on the hub has. Their weights are random, or
such that each token has one successor, which makes an answer of any image."""

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

WIDTH = 64
"""Channels, and the most tokens of a vocabulary."""
_SPECIAL = (
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "[UNK]",
)
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_captioner(
    folder: Path,
    answer: str = "",
    *,
    ends: bool = True,
    kind: Literal["llava", "qwen2.5", "qwen3"] = "llava",
    shard_bytes: int = 10**9,
) -> Path:
    """Write a model with three layers into a folder.

    Args:
        answer: What it answers to everything, of different words; empty for random weights.
        ends: Whether the answer ends, instead of beginning again.
        kind: LLaVA's classes, or Qwen2.5-VL's and Qwen3-VL's, which need torchvision.
        shard_bytes: Largest size of a file of weights.
    """
    words = answer.split()
    fillers = [f"w{number}" for number in range(WIDTH)]
    tokenizer = _tokenizer(["user", "assistant", *words, *fillers][: WIDTH - len(_SPECIAL)])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, processor = {"llava": _llava, "qwen2.5": _qwen2_5, "qwen3": _qwen3}[kind](tokenizer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.5)
        if words:
            _answering(model, tokenizer, words, ends)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder, max_shard_size=shard_bytes)
    processor.save_pretrained(folder)
    return folder


def _tokenizer(words: Sequence[str]) -> Any:
    names = [*_SPECIAL, *words]
    tokenizer = Tokenizer(
        models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _SPECIAL])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        unk_token="[UNK]",
        chat_template=_TEMPLATE,
    )


def _answering(model: Any, tokenizer: Any, words: Sequence[str], ends: bool) -> None:
    """Make each token's state its own channel alone, and the head a table of successors."""
    language, head = model.get_decoder(), model.get_output_embeddings().weight
    for layer in language.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    language.norm.weight.data.fill_(1.0)
    language.embed_tokens.weight.data.copy_(torch.eye(WIDTH))
    head.data.zero_()
    chain = ["assistant", *words, "<|im_end|>" if ends else words[0]]
    for token, following in pairwise(map(tokenizer.convert_tokens_to_ids, chain)):
        head.data[following, token] = 1.0


def _llava(tokenizer: Any) -> tuple[Any, Any]:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
        ),
        text_config=transformers.LlamaConfig(
            vocab_size=WIDTH,
            hidden_size=WIDTH,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
    )
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessorPil(
            size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}
        ),
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        chat_template=_TEMPLATE,
        num_additional_image_tokens=1,
        image_token="<|image_pad|>",
    )
    return transformers.LlavaForConditionalGeneration(config), processor


_TEXT = {
    "vocab_size": WIDTH,
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": None,
    "eos_token_id": _SPECIAL.index("<|im_end|>"),
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
}
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": WIDTH,
    "patch_size": 4,
}
_IDS = {
    "image_token_id": _SPECIAL.index("<|image_pad|>"),
    "video_token_id": _SPECIAL.index("<|video_pad|>"),
    "vision_start_token_id": _SPECIAL.index("<|vision_start|>"),
    "vision_end_token_id": _SPECIAL.index("<|vision_end|>"),
}
_LIMITS = {"size": {"shortest_edge": 64, "longest_edge": 1024}, "patch_size": 4}


def _qwen2_5(tokenizer: Any) -> tuple[Any, Any]:
    vision = _VISION | {"window_size": 16, "fullatt_block_indexes": [1]}
    config = transformers.Qwen2_5_VLConfig(text_config=_TEXT, vision_config=vision, **_IDS)
    processor = transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**_LIMITS),
        video_processor=transformers.Qwen2VLVideoProcessor(**_LIMITS),
        tokenizer=tokenizer,
        chat_template=_TEMPLATE,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config), processor


def _qwen3(tokenizer: Any) -> tuple[Any, Any]:
    vision = _VISION | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    # The small models have one matrix at both ends; an answer of ours takes two.
    tied = {"tie_word_embeddings": "w53" in tokenizer.get_vocab()}
    config = transformers.Qwen3VLConfig(
        text_config=_TEXT | tied, vision_config=vision, **_IDS, **tied
    )
    processor = transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**_LIMITS),
        video_processor=transformers.Qwen3VLVideoProcessor(**_LIMITS),
        tokenizer=tokenizer,
        chat_template=_TEMPLATE,
    )
    return transformers.Qwen3VLForConditionalGeneration(config), processor


def write_photos(folder: Path, names: Sequence[str]) -> Path:
    """Write small images of different sizes and contents."""
    for number, name in enumerate(names):
        pixels = random.Random(number).randbytes((24 + 4 * number) * 32 * 3)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.frombuffer(pixels, np.uint8).reshape(-1, 32, 3)).save(path)
    return folder
