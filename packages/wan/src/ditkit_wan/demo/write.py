"""The demo's inputs: a complete tiny Wan checkpoint, and captioned videos.

The demo trains on these exactly as a run trains on real weights. The checkpoint is in diffusers
layout. The one of `wan-train --demo` is trained (`trained.py`); tests also use checkpoints of every
variant with random weights. Their initialisation matters, because LoRA trains only the attention
and feed-forward layers of the blocks: the frozen patch embedding must keep all of the image, the
gates must let the blocks' result through, and the frozen head must be able to output it.
"""

import json
from pathlib import Path
from typing import Any

from ditkit_core.data.media.synthetic import write_index, write_inputs, write_text_encoder
from ditkit_core.families.demo import unigram_tokenizer
from ditkit_core.families.demo_motions import CAPTIONS, write_clips
from ditkit_core.io.files import write_text
from ditkit_wan.demo import models as demo_models
from ditkit_wan.demo import trained
from ditkit_wan.demo.models import VARIANTS, Variant


def write_demo(folder: Path) -> None:
    """Write the demo's inputs, as `write_inputs`: `checkpoint/` and `clips/`, the same bytes every
    time."""
    write_inputs(folder, {"clips": write_clips, "checkpoint": write_trained})


def write_checkpoint(folder: Path, captions: list[str], variant: str = "t2v") -> None:
    """Write a complete tiny Wan checkpoint in diffusers layout, with random weights.

    Args:
        folder: The folder to write.
        captions: Sentences whose words become the tokenizer's vocabulary.
        variant: One of `VARIANTS`.
    """
    from safetensors.torch import save_file

    kind = VARIANTS[variant]
    tokenizer = unigram_tokenizer(captions)
    _write_others(
        folder,
        kind,
        tokenizer,
        demo_models.build_text_encoder(len(tokenizer)),
        demo_models.build_vae(kind),
    )
    if kind.ours is not None:
        save_file(demo_models.build_official(kind.ours), folder / "transformer.safetensors")
    for expert in range(0 if kind.ours is not None else kind.experts):
        part = f"transformer_{expert + 1}" if expert else "transformer"
        demo_models.build_transformer(kind, expert).save_pretrained(folder / part)


def write_trained(folder: Path) -> None:
    """Write the checkpoint of the demo, in diffusers layout: text to video, trained on clips of
    `ditkit_core.families.demo_motions`."""
    tokenizer = unigram_tokenizer(CAPTIONS)
    trained.load_part("transformer").save_pretrained(folder / "transformer")
    _write_others(
        folder, VARIANTS["t2v"], tokenizer, trained.load_text_encoder(), trained.load_part("vae")
    )


def _write_others(folder: Path, kind: Variant, tokenizer: Any, text_encoder: Any, vae: Any) -> None:
    """Everything in a checkpoint except its transformers."""
    from diffusers import UniPCMultistepScheduler

    tokenizer.save_pretrained(folder / "tokenizer")
    write_text_encoder(folder, text_encoder, tied="encoder.embed_tokens.weight")
    vae.save_pretrained(folder / "vae")
    UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        num_train_timesteps=1000,
        flow_shift=3.0,
    ).save_pretrained(folder / "scheduler")
    index: dict[str, Any] = {
        "boundary_ratio": None,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", type(tokenizer).__name__],
        "transformer": [None, None] if kind.ours is not None else ["diffusers", kind.transformer],
        "transformer_2": ["diffusers", kind.transformer] if kind.experts > 1 else [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    # these pipelines have no such setting
    if kind.pipeline not in ("WanVACEPipeline", "WanAnimatePipeline"):
        index["expand_timesteps"] = False
    if kind.has_image_encoder:
        _write_image_encoder(folder)
        index |= {
            "image_encoder": ["transformers", "CLIPVisionModel"],
            "image_processor": ["transformers", "CLIPImageProcessor"],
        }
    if kind.has_audio_encoder:
        write_audio_encoder(folder / "audio_encoder")
    write_index(folder, kind.pipeline, index | dict(kind.index))


def write_audio_encoder(folder: Path) -> None:
    """Write a tiny wav2vec2, as transformers stores it."""
    from safetensors.torch import save_file

    model = demo_models.build_audio_encoder()
    model.config.save_pretrained(folder)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_image_encoder(folder: Path) -> None:
    """CLIP and its image processor's settings; they are written here, because the library's class
    warns if torchvision is missing."""
    from safetensors.torch import save_file

    from ditkit_wan.encoders.clip import MEAN, STD

    model = demo_models.build_image_encoder()
    model.config.save_pretrained(folder / "image_encoder")
    save_file(
        dict(model.state_dict()),
        folder / "image_encoder" / "model.safetensors",
        metadata={"format": "pt"},
    )
    side = model.config.image_size
    prepared = {
        "image_processor_type": "CLIPImageProcessor",
        "crop_size": {"height": side, "width": side},
        "size": {"shortest_edge": side},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": MEAN,
        "image_std": STD,
        "resample": 3,
        "rescale_factor": 1 / 255,
    }
    (folder / "image_processor").mkdir()
    write_text(
        folder / "image_processor" / "preprocessor_config.json",
        json.dumps(prepared, indent=2) + "\n",
    )
