"""The VAE: what it computes against diffusers' pipeline, and the official single file against the
folder."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_encoders import tiny_vae

from ditkit_core.errors import UserError
from ditkit_core.families.vae import (
    DiffusersVae,
    diffusers_name,
    patchify,
    unpatchify,
    vae_models,
)
from ditkit_core.models.encoders import VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_flux2.encoders import VAE

CPU = torch.device("cpu")


def official_name(name: str) -> str:
    """The official name of a diffusers parameter, written the other way round than the code under
    test."""
    if name.startswith(("quant_conv", "post_quant_conv")):
        return ("decoder." if name.startswith("post") else "encoder.") + name
    half, _, rest = name.partition(".")
    rest = rest.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
    rest = rest.replace("mid_block.resnets.0", "mid.block_1").replace(
        "mid_block.resnets.1", "mid.block_2"
    )
    rest = rest.replace("mid_block.attentions.0", "mid.attn_1").replace("group_norm", "norm")
    rest = rest.replace("to_out.0", "proj_out").replace("to_", "")
    if found := re.match(r"(down|up)_blocks\.(\d)\.(resnets|downsamplers\.0|upsamplers\.0)", rest):
        stage = int(found[2]) if found[1] == "down" else 3 - int(found[2])
        inside = {"resnets": "block", "downsamplers.0": "downsample", "upsamplers.0": "upsample"}[
            found[3]
        ]
        rest = f"{found[1]}.{stage}.{inside}{rest[found.end() :]}"
    return f"{half}.{rest}"


def official_state(folder: Path) -> dict[str, torch.Tensor]:
    """The folder's weights as the official file has them: the attention's linears are convolutions
    there."""
    state = load_file(folder / "diffusion_pytorch_model.safetensors")
    state.pop("bn.num_batches_tracked")
    return {
        official_name(name): tensor[..., None, None]
        if "attentions" in name and tensor.ndim == 2
        else tensor
        for name, tensor in state.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "vae"
    tiny_vae().save_pretrained(folder)
    return folder


def loaded(path: Path) -> DiffusersVae:
    encoder = DiffusersVae(VAE, ModelPaths(vae=str(path)), CPU)
    encoder.load()
    return encoder


def image(height: int = 48, width: int = 32) -> torch.Tensor:
    return torch.rand(3, 1, height, width, generator=torch.Generator().manual_seed(1)) * 2 - 1


def test_every_parameter_has_an_official_name_and_finds_back() -> None:
    from diffusers import AutoencoderKLFlux2

    with torch.device("meta"):
        names = list(AutoencoderKLFlux2().state_dict())
    official = [official_name(name) for name in names]
    assert len(set(official)) == len(names)
    for known in (
        "encoder.down.1.block.0.nin_shortcut.weight", "encoder.down.2.downsample.conv.bias", "encoder.mid.attn_1.q.weight",
        "encoder.quant_conv.weight", "encoder.norm_out.bias", "decoder.up.3.upsample.conv.weight", "bn.running_var",
        "decoder.up.0.block.2.norm1.weight", "decoder.mid.attn_1.proj_out.bias", "decoder.post_quant_conv.bias",
        "decoder.mid.block_2.conv1.weight", "decoder.up.1.block.0.nin_shortcut.bias", "encoder.mid.attn_1.norm.weight",
    ):  # fmt: skip
        assert known in official, known
    assert [diffusers_name(name) for name in official] == names
    assert [diffusers_name(name) for name in names] == names


def test_latents_are_those_of_diffusers_pipeline(folder: Path) -> None:
    from diffusers import AutoencoderKLFlux2, Flux2Pipeline

    latents = loaded(folder).encode([image()])[0]["latents"]
    parts = {"scheduler": None, "text_encoder": None, "tokenizer": None, "transformer": None}
    pipeline = Flux2Pipeline(vae=AutoencoderKLFlux2.from_pretrained(folder), **parts)
    with torch.no_grad():
        expected = pipeline._encode_vae_image(image().transpose(0, 1), generator=None)[0]
    assert latents.shape == (16, 1, 3, 2) and latents.dtype == torch.float32
    assert torch.equal(latents[:, 0], expected)


def test_decoding_undoes_normalisation_and_patches(folder: Path) -> None:
    encoder = loaded(folder)
    pixels = encoder.decode(encoder.encode([image()])[0]["latents"])
    vae = tiny_vae()
    with torch.no_grad():
        expected = vae.decode(vae.encode(image().transpose(0, 1)).latent_dist.mode()).sample
    assert pixels.shape == (3, 1, 48, 32) and pixels.min() >= 0 and pixels.max() <= 1
    # normalising and back rounds each latent twice in fp32
    torch.testing.assert_close(
        pixels, (expected / 2 + 0.5).clamp(0, 1).transpose(0, 1), atol=1e-5, rtol=0
    )


def test_a_patch_becomes_channels_in_the_order_channel_row_column() -> None:
    probe = torch.arange(3 * 2 * 4 * 6).view(3, 2, 4, 6).float()
    patches = patchify(probe, 2)
    assert patches.shape == (12, 2, 2, 3)
    for channel, row, column in ((0, 0, 1), (1, 1, 0), (2, 1, 1)):
        expected = probe[channel, :, row::2, column::2]
        assert torch.equal(patches[channel * 4 + row * 2 + column], expected)
    assert torch.equal(unpatchify(patches, 2), probe)


def test_a_number_of_groups_that_is_none_is_found_when_loading(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "vae")
    config = json.loads((tmp_path / "vae" / "config.json").read_text())
    (tmp_path / "vae" / "config.json").write_text(json.dumps(config | {"norm_num_groups": True}))
    with pytest.raises(
        UserError, match="vae: its configuration has a damaged value .*norm_num_groups is True"
    ):
        loaded(tmp_path / "vae")


def test_the_statistics_are_read_and_never_updated(folder: Path) -> None:
    encoder = loaded(folder)
    first = encoder.encode([image()])[0]["latents"]
    norm = encoder.module.bn
    assert norm.eps == 1e-4 and not any(module.training for module in encoder.module.modules())
    encoder.module.train()  # not even then
    assert torch.equal(encoder.encode([image()])[0]["latents"], first)
    encoder.decode(first)
    stored = load_file(folder / "diffusion_pytorch_model.safetensors")
    assert torch.equal(norm.running_mean, stored["bn.running_mean"])
    assert torch.equal(norm.running_var, stored["bn.running_var"])


@pytest.mark.parametrize(
    "settings", [{}, {"decoder_block_out_channels": (32, 32, 64, 96)}], ids=["usual", "small"]
)
def test_the_official_single_file_gives_what_the_folder_gives(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    tiny_vae(block_out_channels=(32, 64, 64, 128), **settings).save_pretrained(tmp_path / "vae")
    file = tmp_path / "ae.safetensors"
    state = official_state(tmp_path / "vae")
    assert state["encoder.mid.attn_1.q.weight"].shape == (128, 128, 1, 1)
    save_file(state, file)
    from_file, from_folder = loaded(file), loaded(tmp_path / "vae")
    latents = from_file.encode([image()])[0]["latents"]
    assert torch.equal(latents, from_folder.encode([image()])[0]["latents"])
    assert torch.equal(from_file.decode(latents), from_folder.decode(latents))
    assert (
        from_file.strides == from_folder.strides == (1, 16)
        and from_file.channels == from_folder.channels == 16
    )
    assert ("decoder_block_out_channels" in from_file.config) == bool(settings)


def test_progress_is_reported_of_one_item(folder: Path) -> None:
    progress: list[float] = []
    loaded(folder).encode([image()], progress.append)
    assert progress == [1]


def test_unloading_frees_the_weights(folder: Path) -> None:
    encoder = loaded(folder)
    encoder.unload()
    assert encoder.module is None


def test_an_image_that_is_no_multiple_of_the_stride_is_a_mistake_of_ours(folder: Path) -> None:
    with pytest.raises(AssertionError, match="40"):
        loaded(folder).encode([image(height=40)])


def test_a_truncated_file_is_one_line(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "ae.safetensors"
    save_file(official_state(folder), file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="ae.safetensors is truncated") as caught:
        DiffusersVae(VAE, ModelPaths(vae=str(file)), CPU)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["decoder.mid.block_1.conv1.bias", "bn.running_var"])
def test_a_file_that_lacks_a_tensor_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    state = official_state(folder)
    del state[name]
    save_file(state, tmp_path / "ae.safetensors")
    with pytest.raises(UserError, match=f"1 missing: {re.escape(diffusers_name(name))}") as caught:
        loaded(tmp_path / "ae.safetensors")
    assert "set model.vae to" in str(caught.value) and "\n" not in str(caught.value)


def test_a_configuration_that_does_not_fit_names_the_vae(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"layers_per_block": 1}))
    with pytest.raises(UserError, match="does not fit the weights.*set model.vae to") as caught:
        loaded(tmp_path)
    assert "preset" not in str(caught.value)


def test_the_vae_of_flux_1_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    state = {
        name: tensor
        for name, tensor in official_state(folder).items()
        if not name.startswith("bn.") and "quant_conv" not in name
    }
    save_file(state, tmp_path / "ae.safetensors")
    with pytest.raises(UserError, match="FLUX.1's file has the same name.*FLUX.2-dev"):
        DiffusersVae(VAE, ModelPaths(vae=str(tmp_path / "ae.safetensors")), CPU)
    shutil.copytree(folder, tmp_path / "vae")
    (tmp_path / "vae" / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    with pytest.raises(UserError, match="contains AutoencoderKL, not AutoencoderKLFlux2; get ae"):
        DiffusersVae(VAE, ModelPaths(vae=str(tmp_path / "vae")), CPU)


@pytest.mark.parametrize(
    "wrong", [{"block_out_channels": "wide"}, {"latent_channels": None}, {"layers_per_block": []}]
)
def test_a_configuration_that_makes_no_vae_is_one_line(
    folder: Path, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | wrong))
    with pytest.raises(UserError, match="no model can be built") as caught:
        loaded(tmp_path)
    assert "\n" not in str(caught.value)
    if "latent_channels" in wrong:  # what plans look at before they build it
        with pytest.raises(UserError, match="no model can be built"):
            vae_models(VAE, ModelPaths(vae=str(tmp_path)), channels=128)


def test_a_single_file_of_widths_that_it_cannot_have_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    state = official_state(folder)
    state["encoder.down.0.block.0.conv1.weight"] = torch.zeros(8, 32, 3, 3)
    save_file(state, tmp_path / "ae.safetensors")
    with pytest.raises(UserError, match="8 channels are not 32 equal groups"):
        DiffusersVae(VAE, ModelPaths(vae=str(tmp_path / "ae.safetensors")), CPU)


def test_a_folder_without_weights_is_found_at_once(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "vae")
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(UserError, match="contains no .safetensors file"):
        DiffusersVae(VAE, ModelPaths(base=str(tmp_path)), CPU)


def test_identity_follows_the_weights_and_needs_no_loading(folder: Path, tmp_path: Path) -> None:
    def identity(name: str, **changed: torch.Tensor) -> str:
        save_file(official_state(folder) | changed, tmp_path / name)
        return DiffusersVae(VAE, ModelPaths(vae=str(tmp_path / name)), CPU).identity

    statistics = {"bn.running_mean": torch.zeros(16)}
    first, same, other = (
        identity("first.safetensors"),
        identity("same.safetensors"),
        identity("o.safetensors", **statistics),
    )
    assert first == same != other


def test_bf16_encodes_almost_what_fp32_does_with_its_statistics(folder: Path) -> None:
    where = ModelPaths(vae=str(folder))
    exact, rounded = (
        DiffusersVae(VAE, where, CPU, mode=VaeMode(dtype))
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert exact.identity != rounded.identity
    exact.load()
    rounded.load()
    norms = [each.module.bn for each in (exact, rounded)]
    assert torch.equal(norms[0].running_var, norms[1].running_var)
    expected, found = (each.encode([image()])[0]["latents"] for each in (exact, rounded))
    assert found.dtype == torch.float32
    # measured: 0.008, of random weights
    assert 0 < (found - expected).norm() / expected.norm() < 0.02
