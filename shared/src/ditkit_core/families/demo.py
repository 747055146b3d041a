"""Parts of a demo that most families share: images or clips of simple shapes, a tiny Qwen3,
Qwen3-VL or T5 with its tokenizer, a tiny VAE, a random transformer."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ditkit_core.data.media.synthetic import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    paint,
    random_model,
    write_frames,
    write_text_encoder,
)
from ditkit_core.errors import UserError
from ditkit_core.families.spec import GUIDE
from ditkit_core.families.vae import VaeFamily
from ditkit_core.io.files import write_text
from ditkit_core.models.precision import Precision
from ditkit_core.models.spec import ModelSpec

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIDE = 64
ROWS = {"red": 0.25, "green": 0.42, "blue": 0.58, "yellow": 0.75}
"""Where shapes of a colour are, as a share of the height: apart, so that no two images are nearly
alike."""
LOOKS = tuple(product(BACKGROUNDS, SHAPES, COLOURS))
CAPTIONS = tuple(
    f"a {colour} {shape} on a {background} background" for background, shape, colour in LOOKS
)
"""Captions of the images or clips that `write_shapes` writes."""


def write_shapes(folder: Path, frame_step: int, fps: float = 16.0) -> None:
    """Write 24 captioned images of a shape, or clips in which it moves to the right, and the
    metadata.jsonl that has their captions. No two are nearly alike.

    Args:
        folder: Where to write them.
        frame_step: `DataSpec.frame_step`. Clips have one frame more than twice this; 0: images.
        fps: Frame rate of clips: `DataSpec.fps`.
    """
    from PIL import Image

    lines, count = [], 2 * frame_step + 1
    for index, (caption, (background, shape, colour)) in enumerate(
        zip(CAPTIONS, LOOKS, strict=True)
    ):
        frames = [
            paint(
                SIDE, SIDE, shape=shape, colour=colour, background=background,
                centre=(SIDE * ROWS[colour],
                SIDE * (0.5 + (0.3 * (frame / (count - 1) - 0.5) if count > 1 else 0))),
                radius=SIDE * 0.22,
            )
            for frame in range(count)
        ]  # fmt: skip
        name = f"shape{index:02d}.{'mp4' if frame_step else 'png'}"
        if frame_step:
            write_frames(folder / name, frames, round(fps))
        else:
            Image.fromarray(frames[0]).save(folder / name)
        lines.append(json.dumps({"file_name": name, "text": caption}) + "\n")
    write_text(folder / "metadata.jsonl", "".join(lines))


def write_text_model(
    folder: Path, captions: Sequence[str], *, width: int, are_separate: bool = False
) -> None:
    """Write `tokenizer/` and `text_encoder/` of a Qwen3 with three layers of random weights.

    Args:
        captions: Their words are the vocabulary.
        width: A multiple of 32.
        are_separate: Whether words do not resemble each other (`separate_words`), for a base that
            is trained.
    """
    tokenizer = word_tokenizer(captions)
    tokenizer.save_pretrained(folder / "tokenizer")
    config = resolve_name("transformers:Qwen3Config")(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    model = random_model("text encoder", resolve_name("transformers:Qwen3ForCausalLM"), config)
    if are_separate:
        separate_words(model.model, tokenizer, captions)
    write_text_encoder(folder, model, tied="lm_head.weight")


def random_qwen3_vl(
    kind: str,
    tokenizer: Any,
    captions: Sequence[str],
    *,
    width: int,
    layers: int,
    image_token: str = "",
) -> Any:
    """A Qwen3-VL of thin layers and random weights, with a part that sees, whose features of a word
    are its embedding (`separate_words`).

    Args:
        kind: Its class: `Qwen3VLForConditionalGeneration`, or `Qwen3VLModel` without a head.
        tokenizer: Its `word_tokenizer`.
        captions: The captions whose words do not resemble each other.
        width: Of the features; a multiple of 16.
        layers: Layers that read.
        image_token: The tokenizer's token that stands for an image; empty for the class's own id.
    """
    reads = {
        "vocab_size": len(tokenizer), "hidden_size": width, "intermediate_size": 2 * width,
        "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 8, "max_position_embeddings": 1024, "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }  # fmt: skip
    sees = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
        "out_hidden_size": width, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    ids = {"image_token_id": tokenizer.convert_tokens_to_ids(image_token)} if image_token else {}
    has_head = kind == "Qwen3VLForConditionalGeneration"
    config = resolve_name("transformers:Qwen3VLConfig")(
        text_config=reads, vision_config=sees, tie_word_embeddings=has_head,
        architectures=[kind], dtype="float32", **ids,
    )  # fmt: skip
    model = random_model("text encoder", resolve_name(f"transformers:{kind}"), config)
    decoder = model.model.language_model if has_head else model.language_model
    separate_words(decoder, tokenizer, captions)
    return model


@torch.no_grad()
def separate_words(decoder: Any, tokenizer: Any, captions: Sequence[str]) -> None:
    """Change the layers of a Qwen3 or Qwen3-VL, of random weights, so that the features of a
    word are its embedding, because its layers add nothing, and that the embeddings of these
    captions' words are orthogonal: what an adapter learns about one word then leaves the others
    alone."""
    for layer in decoder.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    rows, width = decoder.embed_tokens.weight, decoder.config.hidden_size
    words = {word for caption in captions for word in caption.split()[1:]}
    ids = tokenizer.convert_tokens_to_ids([f"Ġ{word}" for word in sorted(words)])
    rows.mul_(width**0.5)  # all rows to a root mean square of about 1
    rows[ids] = torch.eye(width)[: len(ids)] * width**0.5


def word_tokenizer(
    captions: Sequence[str], chat_template: str = CHAT_TEMPLATE, markers: Sequence[str] = ()
) -> Any:
    """A byte-level tokenizer like Qwen's, in which every word of the captions that follows a space
    is one token.

    The merges build a word letter by letter from its space on. No other merge applies on the way,
    so the order of words is free. `markers` are more tokens of the template, which are no special
    tokens.
    """
    from tokenizers import AddedToken, pre_tokenizers

    space = "Ġ"  # how byte-level tokenizers write it
    words = {f"{space}{word}" for caption in captions for word in caption.split()}
    starts = sorted(
        {word[:end] for word in words for end in range(2, len(word) + 1)}, key=lambda s: (len(s), s)
    )
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *starts]
    tokenizer = resolve_name("transformers:Qwen2Tokenizer")(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[(start[:-1], start[-1]) for start in starts],
        eos_token=END,
        pad_token=PAD,
        unk_token=PAD,
        model_max_length=512,
        chat_template=chat_template,
        padding_side="right",
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (PAD, START, END)]
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in markers])
    return tokenizer


def unigram_tokenizer(captions: Sequence[str]) -> Any:
    """A unigram tokenizer of the T5 kind over the captions' words and characters.

    The vocabulary is counted, not fitted by `UnigramTrainer`, whose threads may order equal pieces
    differently.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    words = Counter(f"▁{word}" for caption in captions for word in caption.split())
    characters = Counter({character: 0.01 for word in sorted(words) for character in word})
    total = sum(words.values()) + sum(characters.values())
    pieces = sorted((words + characters).items(), key=lambda piece: (-piece[1], piece[0]))
    special = ["<pad>", "</s>", "<unk>"]
    vocabulary = [(piece, 0.0) for piece in special] + [
        (piece, math.log(n / total)) for piece, n in pieces
    ]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return resolve_name("transformers:PreTrainedTokenizerFast")(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=512,
    )


def random_t5(kind: str, vocabulary_size: int, *, width: int) -> Any:
    """A two-layer encoder of random weights; `kind` is the start of its classes, `T5` or `UMT5`."""
    config = resolve_name(f"transformers:{kind}Config")(
        vocab_size=vocabulary_size,
        d_model=width,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        architectures=[f"{kind}EncoderModel"],
    )
    encoder = resolve_name(f"transformers:{kind}EncoderModel")
    return random_model("text encoder", encoder, config)


@torch.no_grad()
def separate_pieces(encoder: Any, tokenizer: Any) -> None:
    """Change the layers of a T5 of random weights, so that the features of a word are its
    embedding, because its layers add nothing, and that the embeddings of the words and of the end
    of a caption are orthogonal; `tokenizer` is a `unigram_tokenizer`."""
    for name, weight in encoder.named_parameters():
        if name.endswith(("o.weight", "wo.weight")):
            weight.zero_()
    pieces, width = tokenizer.convert_ids_to_tokens(range(len(tokenizer))), encoder.config.d_model
    ids = [i for i, piece in enumerate(pieces) if piece == "</s>" or piece[0] == "▁" != piece]
    encoder.shared.weight[ids] = torch.eye(width)[: len(ids)] * width**0.5


def save_trained(folder: Path, weights: Path, **models: Any) -> None:
    """Save models of diffusers into the folders of their names, such as `vae` and `transformer`,
    with the trained weights that `weights` has as `vae.safetensors` and so on."""
    for name, model in models.items():
        model.load_state_dict(load_file(weights / f"{name}.safetensors"))
        model.save_pretrained(folder / name)


def write_vae(folder: Path, family: VaeFamily, sizes: Mapping[str, Any] | None = None) -> None:
    """Write `vae/` of a family's class with random weights.

    Args:
        folder: The checkpoint.
        family: Names the class.
        sizes: Arguments of the class. None: known for the classes of `_VAE_SIZES`, with 16 latent
            channels at an eighth of the size.

    Raises:
        UserError: If the class is another one, and `sizes` are missing.
    """
    if sizes is None and family.kind not in _VAE_SIZES:
        raise UserError(
            f"write_vae knows small sizes of {', '.join(_VAE_SIZES)}: give it sizes of "
            f"{family.kind}, arguments of "
            f"that class in diffusers ({GUIDE}, 8. Demo, run files and README)"
        )
    settings = _VAE_SIZES[family.kind] if sizes is None else sizes
    random_model("vae", resolve_name(f"diffusers:{family.kind}"), **settings).save_pretrained(
        folder / "vae"
    )


_VIDEO_SIZES: Mapping[str, Any] = {
    "base_dim": 4,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "z_dim": 16,
}
_VAE_SIZES: Mapping[str, Mapping[str, Any]] = {
    "AutoencoderKL": {
        "block_out_channels": (8, 8, 16, 16), "layers_per_block": 1, "norm_num_groups": 4,
        "latent_channels": 16,
        "use_quant_conv": False, "use_post_quant_conv": False, "scaling_factor": 1.0,
        "shift_factor": 0.0,
        "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
    },
    "AutoencoderKLWan": _VIDEO_SIZES,
    "AutoencoderKLQwenImage": _VIDEO_SIZES,
}  # fmt: skip


def write_transformer(
    folder: Path, spec: ModelSpec, arch: Any, config: Mapping[str, Any] | None = None
) -> None:
    """Write `transformer/` of a family whose official names are one for each parameter, with random
    weights.

    Args:
        folder: The checkpoint.
        spec: The family.
        arch: Sizes.
        config: Its config.json, in the names that the published file has. None: the fields of
            `arch`.

    Raises:
        UserError: If `infer_arch` of the family reads another architecture from this config.json,
            or none.
    """
    config = asdict(arch) if config is None else config
    try:
        read = (
            spec.architecture.infer_arch(json.loads(json.dumps(config)), {})
            if spec.architecture.infer_arch
            else arch
        )
    except KeyError as error:
        raise UserError(
            f"{spec.name} reads {error} of a transformer's config.json, and write_transformer is "
            f"about to write none: "
            f"give it `config` in the published names ({GUIDE}, 8. Demo, run files and README)"
        ) from error
    if read != arch:
        raise UserError(
            f"{spec.name} reads another architecture from the demo's config.json: {read} instead "
            f"of {arch}"
        )
    model = random_model(spec.name, spec.architecture.build, arch, Precision(matmul=torch.float32))
    official = spec.architecture.names.from_native["official"]
    state = {}
    for name, tensor in model.state_dict().items():
        (part,) = official(name)
        assert part.of == 1, (
            f"{name} is a part of {part.name}: write the checkpoint with the official code"
        )
        state[part.name] = tensor.contiguous()
    (folder / "transformer").mkdir(parents=True)
    save_file(
        state,
        folder / "transformer" / "diffusion_pytorch_model.safetensors",
        metadata={"format": "pt"},
    )
    write_text(folder / "transformer" / "config.json", json.dumps(config, indent=2) + "\n")
