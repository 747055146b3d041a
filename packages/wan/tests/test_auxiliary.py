"""The VAE and the text encoder as a plan sees them: their sizes, and what they hold, against the
encoders themselves."""

from pathlib import Path

import pytest
import torch

from ditkit_core.config.sizes import GIB
from ditkit_core.families import t5
from ditkit_core.models.encoders import AuxiliaryModel, VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_core.planner.auxiliary import measure_model
from ditkit_core.testing.auxiliary_models import check_tiles, live, num_parameters
from ditkit_wan.encoders.clip import ImageEncoder
from ditkit_wan.encoders.text import TextEncoder
from ditkit_wan.encoders.vae import VaeEncoder
from ditkit_wan.presets import PRESETS
from ditkit_wan.spec import WAN

CPU = torch.device("cpu")


def auxiliary_models(preset: str = "t2v-1.3b", **where: str) -> dict[str, AuxiliaryModel]:
    return {each.name: each for each in WAN.auxiliary.models(PRESETS[preset], ModelPaths(**where))}


def test_the_built_in_sizes_are_those_of_the_published_files() -> None:
    """wan_2.1_vae.safetensors has 507.6 MB in fp32, the UMT5-XXL encoder 11.36 GB in bf16."""
    built = {name: each.build(torch.bfloat16) for name, each in auxiliary_models().items()}
    assert (
        num_parameters(built["VAE encoder"]) == num_parameters(built["VAE decoder"]) == 126_892_531
    )
    assert num_parameters(built["text encoder"]) == 5_680_910_336
    assert {parameter.dtype for parameter in built["text encoder"].parameters()} == {torch.bfloat16}


def test_a_model_that_looks_at_images_has_clip_and_ti2v_the_larger_vae() -> None:
    """Wan2.2_VAE.pth has 2.82 GB in fp32; clip_vision_h.safetensors 1.26 GB in fp16, a projection
    included that is not used."""
    looking = auxiliary_models("i2v-14b-480p")
    assert list(looking) == ["VAE encoder", "text encoder", "image encoder", "VAE decoder"]
    built = looking["image encoder"].build(torch.bfloat16)
    assert num_parameters(built) == 630_766_080 and {each.dtype for each in built.parameters()} == {
        torch.float32
    }
    larger = auxiliary_models("ti2v-5b")
    assert list(larger) == ["VAE encoder", "text encoder", "VAE decoder"]
    assert num_parameters(larger["VAE decoder"].build(torch.bfloat16)) == 704_688_668


def test_what_clip_holds_is_what_was_planned(clip_folder: Path) -> None:
    encoder = ImageEncoder(ModelPaths(image_encoder=str(clip_folder)), CPU, torch.float32)
    encoder.load()
    found = auxiliary_models("i2v-14b-480p", image_encoder=str(clip_folder))["image encoder"]
    planned = measure_model(found, (9, 480, 832), dtype=torch.float32, kind="cpu")
    held = live(encoder.module, lambda: encoder.encode([torch.zeros(3, 1, 480, 832)]))
    # the image, and its square on the way to the device: the CPU here
    on_the_host = 4 * 3 * (480 * 832 + 3 * 224 * 224)
    assert (
        planned.weights >= 4 * num_parameters(encoder.module)
        and planned.peak < held < 1.05 * planned.peak + on_the_host
    )


def test_the_text_encoder_takes_its_weights_and_little_more() -> None:
    weights, peak = measure_model(
        auxiliary_models()["text encoder"], WAN.data.size, dtype=torch.bfloat16
    )
    assert weights == 2 * 5_680_910_336 and weights < peak < weights + 0.2 * GIB


def test_a_clip_in_tiles_takes_a_quarter() -> None:
    """Of nine frames: what the later ones add is their pixels and latents alone."""
    encoder = auxiliary_models()["VAE encoder"]
    whole = measure_model(encoder, (9, 480, 832), dtype=torch.float32)
    tiled = measure_model(encoder, (9, 480, 832), dtype=torch.float32, mode="in tiles")
    assert 5 * GIB < whole.peak < 6.5 * GIB and tiled.peak < whole.peak / 4
    longer = measure_model(encoder, (13, 480, 832), dtype=torch.float32)
    assert 0 < longer.peak - whole.peak < 2 * 4 * 3 * 4 * 480 * 832


@pytest.mark.parametrize(
    ("size", "dtype"), [((1, 48, 64), torch.float32), ((5, 64, 32), torch.bfloat16)]
)
def test_what_the_vae_holds_is_what_was_planned(
    checkpoint: Path, size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    encoder = VaeEncoder(ModelPaths(base=str(checkpoint)), CPU, mode=VaeMode(dtype))
    encoder.load()
    found = auxiliary_models(base=str(checkpoint))
    encode, decode = (
        measure_model(found[f"VAE {half}"], size, dtype=dtype, kind="cpu").peak
        for half in ("encoder", "decoder")
    )
    clip = torch.zeros(3, *size)
    held = live(encoder.module, lambda: encoder.encode([clip]))
    # A plan counts the clip's copy on the device alone; a CPU has both if their dtypes differ.
    held -= 0 if dtype == torch.float32 else clip.nbytes
    assert held == pytest.approx(encode, rel=0.05)
    latents = torch.zeros(16, 1 + (size[0] - 1) // 4, size[1] // 8, size[2] // 8)
    assert live(encoder.module, lambda: encoder.decode(latents)) == pytest.approx(decode, rel=0.05)


def test_what_the_text_encoder_holds_is_what_was_planned(checkpoint: Path) -> None:
    encoder = TextEncoder(ModelPaths(base=str(checkpoint)), CPU, torch.float32)
    encoder.load()
    planned = measure_model(
        auxiliary_models(base=str(checkpoint))["text encoder"],
        WAN.data.size,
        dtype=torch.float32,
        kind="cpu",
    )
    assert live(encoder._model, lambda: encoder.encode(["a red circle"])) == pytest.approx(
        planned.peak, rel=0.05
    )


def test_a_streamed_text_encoder_takes_its_embedding_and_little_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """256,384 tokens of 4,096 channels; a block is a fifth of that. Of eight captions at a time."""
    monkeypatch.setattr(t5, "CAPTIONS_STREAMED", 8)
    found = auxiliary_models()["text encoder"]
    weights, peak = measure_model(found, WAN.data.size, dtype=torch.bfloat16, mode="layer by layer")
    assert weights == 2 * 256_384 * 4096 and weights < peak < weights + 0.5 * GIB


def test_what_a_streamed_text_encoder_holds_is_what_was_planned(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three captions at a time: more add their states and masks, in both."""
    monkeypatch.setattr(t5, "CAPTIONS_STREAMED", 3)
    encoder = TextEncoder(ModelPaths(base=str(checkpoint)), CPU, torch.float32, "always")
    encoder.load()
    found = auxiliary_models(base=str(checkpoint))["text encoder"]
    planned = measure_model(
        found, WAN.data.size, dtype=torch.float32, kind="cpu", mode="layer by layer"
    )
    held = live(encoder._model, lambda: encoder.encode(["a red circle"] * encoder.items_at_once))
    assert held == pytest.approx(planned.peak, rel=0.05)


@pytest.mark.slow
def test_tiles_give_other_latents_under_another_identity(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ModelPaths(base=str(checkpoint))
    whole, tiled = VaeEncoder(where, CPU), VaeEncoder(where, CPU, mode=VaeMode(tiled=True))
    assert (
        whole.identity
        != tiled.identity
        == WAN.auxiliary.media_encoder(where, CPU, VaeMode(tiled=True)).identity
    )
    whole.load()
    tiled.load()
    large = torch.rand(3, 5, 288, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    small = large[:, :, :256]
    assert torch.equal(whole.encode([small])[0]["latents"], tiled.encode([small])[0]["latents"])
    with torch.no_grad():
        # random attention, over the whole image, would hide where each tile is
        for encoder in (whole, tiled):
            for half in (encoder.module.encoder, encoder.module.decoder):
                half.mid_block.attentions[0].proj.weight.zero_()
    check_tiles(whole, tiled, large, patch=monkeypatch)
