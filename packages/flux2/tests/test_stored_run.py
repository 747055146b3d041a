"""A run of a tiny FLUX.2 that commit 58d647d saved goes on to the same bits."""

from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from ditkit_core.data.media.synthetic import random_model, write_index, write_text_encoder
from ditkit_core.testing.stored_run import StoredRun, keep
from ditkit_flux2.demo.write import build_tokenizer
from ditkit_flux2.spec import FLUX2

STORED = StoredRun(FLUX2, Path(__file__).parent / "fixtures" / "run_58d647d.zip")

SETTINGS = {
    "model": {"base": "inputs/checkpoint"},
    "adapter": {"rank": 1},
    "data": {"folder": "inputs/pictures", "height": 32, "width": 48},
}


def write(folder: Path, commit: str) -> StoredRun:
    """Make a stored run in an empty folder with the code as it is; `STORED` was made so with that
    of 58d647d."""
    caption = "a tile of one colour"  # of all: the cache has 512 tokens of each
    _write_checkpoint(folder / "inputs" / "checkpoint", caption)
    (folder / "inputs" / "pictures").mkdir()
    for number, colour in enumerate(("teal", "red", "gold")):
        file = folder / "inputs" / "pictures" / f"{number}.png"
        Image.new("RGB", (48, 32), colour).save(file)
        file.with_suffix(".txt").write_text(caption, encoding="utf-8", newline="\n")
    return keep(FLUX2, folder, commit=commit, settings=SETTINGS)


def _write_checkpoint(folder: Path, caption: str) -> None:
    """The demo's checkpoint with less in it: kilobytes, which the repository keeps."""
    from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_tokenizer([caption])
    tokenizer.save_pretrained(folder / "tokenizer")
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=4, intermediate_size=4, num_hidden_layers=28,
        num_attention_heads=1,
        num_key_value_heads=1, head_dim=4, max_position_embeddings=1024, tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None, pad_token_id=tokenizer.pad_token_id, architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )  # fmt: skip
    write_text_encoder(
        folder, random_model("text encoder", Qwen3ForCausalLM, config), tied="lm_head.weight"
    )
    vae = random_model(
        "vae",
        AutoencoderKLFlux2,
        block_out_channels=(4, 4, 4, 4),
        layers_per_block=1,
        norm_num_groups=2,
        latent_channels=2,
    )
    vae.save_pretrained(folder / "vae")
    transformer = random_model(
        "transformer", Flux2Transformer2DModel, in_channels=8, num_layers=1, num_single_layers=1,
        num_attention_heads=2,
        attention_head_dim=8, joint_attention_dim=12, timestep_guidance_channels=16,
        axes_dims_rope=(2, 2, 2, 2),
        guidance_embeds=False,
    )  # fmt: skip
    transformer.save_pretrained(folder / "transformer")
    for file in folder.glob("*/*.safetensors"):
        save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    write_index(folder, "Flux2KleinPipeline", {"is_distilled": False})


def test_a_stored_run_is_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    STORED.check(tmp_path)
    assert "changed since the last part" not in capsys.readouterr().out, (
        "every stored key means what it meant"
    )
