"""A run of a tiny Wan that commit 58d647d saved goes on to the same bits."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from ditkit_core.data.media.synthetic import random_model, write_index, write_text_encoder
from ditkit_core.families.demo import unigram_tokenizer
from ditkit_core.families.demo_motions import CLIPS, write_clip
from ditkit_core.testing.stored_run import StoredRun, keep
from ditkit_wan.spec import WAN

STORED = StoredRun(WAN, Path(__file__).parent / "fixtures" / "run_58d647d.zip")

SETTINGS = {
    "model": {"base": "inputs/checkpoint"},
    "adapter": {"rank": 2},
    "data": {"folder": "inputs/clips", "frames": 5, "height": 32, "width": 32},
    "encode": {"text_dtype": "fp32"},
}


def write(folder: Path, commit: str) -> StoredRun:
    """Make a stored run in an empty folder with the code as it is; `STORED` was made so with that
    of 58d647d."""
    _write_checkpoint(folder / "inputs" / "checkpoint", [clip.caption for clip in CLIPS[:3]])
    (folder / "inputs" / "clips").mkdir()
    for number, clip in enumerate(CLIPS[:3]):
        write_clip(folder / "inputs" / "clips" / f"{number}.mp4", clip)
    return keep(WAN, folder, commit=commit, settings=SETTINGS)


def _write_checkpoint(folder: Path, captions: list[str]) -> None:
    """The demo's checkpoint with less in it: kilobytes, which the repository keeps."""
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    tokenizer = unigram_tokenizer(captions)
    tokenizer.save_pretrained(folder / "tokenizer")
    config = UMT5Config(
        vocab_size=len(tokenizer), d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2,
        tie_word_embeddings=False,
        feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1,
        architectures=["UMT5EncoderModel"],
    )  # fmt: skip
    write_text_encoder(
        folder,
        random_model("text encoder", UMT5EncoderModel, config),
        tied="encoder.embed_tokens.weight",
    )
    vae = random_model(
        "vae", AutoencoderKLWan, base_dim=2, dim_mult=[1, 1, 1, 1], num_res_blocks=1, z_dim=16
    )
    vae.save_pretrained(folder / "vae")
    transformer = random_model(
        "transformer", WanTransformer3DModel, num_attention_heads=2, attention_head_dim=12,
        in_channels=16, out_channels=16,
        text_dim=8, freq_dim=16, ffn_dim=32, num_layers=1,
    )  # fmt: skip
    transformer.save_pretrained(folder / "transformer")
    for file in folder.glob("*/*.safetensors"):
        save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    write_index(folder, "WanPipeline", {"vae": ["diffusers", "AutoencoderKLWan"]})


def test_a_stored_run_is_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    STORED.check(tmp_path)
    assert "changed since the last part" not in capsys.readouterr().out, (
        "every stored key means what it meant"
    )
