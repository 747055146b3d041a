"""The VAE of Wan 2.2: official names against diffusers', what its latents are, and which model
takes which VAE."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from narrow_vae import NARROW_2_2, clip, narrow, official_within_blocks
from safetensors.torch import load_file, save_file

from ditkit_core.errors import UserError
from ditkit_core.families.causal_vae import causal_vae_name
from ditkit_core.models.encoders import VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.tiling import Tiles
from ditkit_wan.encoders import vae
from ditkit_wan.encoders.vae import VaeEncoder
from ditkit_wan.encoders.vae_kinds import WAN_2_2

CPU = torch.device("cpu")


def official_name(name: str) -> str:
    """The official name of a parameter of the 2.2 VAE, from diffusers' name: the other way round
    than the code under test."""
    for half, way, last in (("encoder", "down", 2), ("decoder", "up", 3)):
        name = re.sub(
            rf"^{half}\.{way}_blocks\.(\d)\.resnets\.(\d)\.",
            rf"{half}.{way}samples.\1.{way}samples.\2.",
            name,
        )
        name = re.sub(
            rf"^{half}\.{way}_blocks\.(\d)\.{way}sampler\.",
            rf"{half}.{way}samples.\1.{way}samples.{last}.",
            name,
        )
    return official_within_blocks(name)


@pytest.fixture(scope="module")
def narrow_vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return narrow(tmp_path_factory.mktemp("vae22") / "vae", **NARROW_2_2)


@pytest.fixture(scope="module")
def single_file(narrow_vae: Path) -> Path:
    state = load_file(narrow_vae / "diffusion_pytorch_model.safetensors")
    target = narrow_vae.parent / "wan2.2_vae.safetensors"
    save_file({official_name(name): tensor for name, tensor in state.items()}, target)
    return target


def loaded(path: Path, **how: Any) -> VaeEncoder:
    encoder = VaeEncoder(ModelPaths(vae=str(path)), CPU, **how)
    encoder.load()
    return encoder


def test_every_parameter_has_the_official_name_that_files_give_it() -> None:
    from diffusers import AutoencoderKLWan

    with torch.device("meta"):
        names = list(AutoencoderKLWan(**WAN_2_2).state_dict())
    official = [official_name(name) for name in names]
    assert len(set(official)) == len(names) == 196
    for name in (  # as ComfyUI's file and the official one list them
        "encoder.downsamples.0.downsamples.2.resample.1.weight", "encoder.downsamples.2.downsamples.2.time_conv.bias",
        "decoder.upsamples.0.upsamples.3.time_conv.weight", "decoder.upsamples.3.upsamples.0.shortcut.weight",
        "decoder.upsamples.3.upsamples.2.residual.6.bias", "encoder.middle.1.to_qkv.weight", "decoder.head.0.gamma",
    ):  # fmt: skip
        assert name in official
    assert [causal_vae_name(name) for name in official] == names
    assert [causal_vae_name(name) for name in names] == names


def test_the_single_file_gives_what_the_folder_gives_and_diffusers(
    narrow_vae: Path, single_file: Path
) -> None:
    from diffusers import AutoencoderKLWan

    from_file, from_folder = loaded(single_file), loaded(narrow_vae)
    assert (
        from_file.strides == from_folder.strides == (4, 16)
        and from_file.channels == from_folder.channels == 48
    )
    latents = from_file.encode([clip()])[0]["latents"]
    pixels = from_file.decode(latents)
    theirs = AutoencoderKLWan.from_pretrained(narrow_vae)
    with torch.no_grad():
        mean = theirs.encode(clip()[None]).latent_dist.mode()[0]
    normal = (mean - torch.tensor(WAN_2_2["latents_mean"]).view(-1, 1, 1, 1)) / torch.tensor(
        WAN_2_2["latents_std"]
    ).view(-1, 1, 1, 1)
    assert (
        latents.shape == (48, 2, 2, 2)
        and latents.dtype == torch.float32
        and torch.equal(latents, normal)
    )
    assert torch.equal(latents, from_folder.encode([clip()])[0]["latents"])
    assert pixels.shape == (3, 5, 32, 32) and torch.equal(pixels, from_folder.decode(latents))


def test_the_statistics_are_those_of_the_official_sampler() -> None:
    mean, std = WAN_2_2["latents_mean"], WAN_2_2["latents_std"]
    assert len(mean) == len(std) == 48
    # what the lists of Wan-Video/Wan2.2, wan/modules/vae2_2.py, add up to, plain and by place
    assert sum(mean) == pytest.approx(-0.5589) and sum(std) == pytest.approx(32.536)
    assert sum(i * v for i, v in enumerate(mean)) == pytest.approx(-7.0659)
    assert sum(i * v for i, v in enumerate(std)) == pytest.approx(758.3531)


def test_a_clip_of_four_frames_is_refused(narrow_vae: Path) -> None:
    with pytest.raises(AssertionError, match="4 frames"):
        loaded(narrow_vae).encode([clip(frames=4)])


def test_an_error_of_the_vae_is_not_swallowed(
    narrow_vae: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any) -> None:
        raise TypeError("a convolution was given a string")

    encoder = loaded(narrow_vae)
    monkeypatch.setattr(encoder.module, "encode", broken)
    monkeypatch.setattr(encoder.module, "decode", broken)
    with pytest.raises(TypeError, match="given a string"):
        encoder.encode([clip()])
    with pytest.raises(TypeError, match="given a string"):
        encoder.decode(torch.zeros(48, 2, 2, 2))


def test_the_vae_of_another_model_is_refused_in_one_line(
    checkpoint: Path, single_file: Path
) -> None:
    for components, channels, remedy in (
        (ModelPaths(vae=str(single_file)), 16, "wan_2.1_vae.safetensors"),
        (ModelPaths(base=str(checkpoint)), 48, "wan2.2_vae.safetensors"),
    ):
        with pytest.raises(
            UserError, match=f"the model takes {channels}.*{re.escape(remedy)}"
        ) as caught:
            VaeEncoder(components, CPU, channels=channels)
        assert "\n" not in str(caught.value)
    assert VaeEncoder(ModelPaths(vae=str(single_file)), CPU, channels=48).channels == 48


def test_a_vae_of_neither_kind_is_refused(tmp_path: Path, single_file: Path) -> None:
    state = load_file(single_file)
    state["conv2.weight"] = torch.zeros(32, 32, 1, 1, 1)
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="is not a VAE of Wan 2.1 or 2.2"):
        VaeEncoder(ModelPaths(vae=str(tmp_path / "other.safetensors")), CPU)


def test_the_pickle_is_refused_by_naming_the_file_to_get(tmp_path: Path) -> None:
    (tmp_path / "Wan2.2_VAE.pth").write_bytes(b"x")
    with pytest.raises(UserError, match="wan2.2_vae.safetensors"):
        VaeEncoder(ModelPaths(vae=str(tmp_path / "Wan2.2_VAE.pth")), CPU)


def test_tiles_agree_with_the_whole_where_one_holds_it(
    narrow_vae: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = vae.TILES
    monkeypatch.setattr(vae, "TILES", Tiles(side=64, overlap=16))
    whole, tiled = loaded(narrow_vae), loaded(narrow_vae, mode=VaeMode(tiled=True))
    theirs = whole.module
    assert published.side == theirs.tile_sample_min_height == theirs.tile_sample_min_width
    assert published.side - published.overlap == theirs.tile_sample_stride_height
    small = clip(frames=1, size=64)
    latents = whole.encode([small])[0]["latents"]
    assert (
        torch.equal(latents, tiled.encode([small])[0]["latents"])
        and whole.identity != tiled.identity
    )
    wide = torch.cat([small, small], dim=3)
    assert tiled.encode([wide])[0]["latents"].shape == (48, 1, 4, 8)
    assert tiled.decode(torch.cat([latents, latents], dim=3)).shape == wide.shape
