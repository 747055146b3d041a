"""The VAE: what it computes against diffusers, and the official single file against the folder."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from narrow_vae import clip, narrow, official_within_blocks
from safetensors.torch import load_file, save_file

from ditkit_core.errors import UserError
from ditkit_core.families.causal_vae import causal_vae_name
from ditkit_core.families.vae import VaeFamily
from ditkit_core.models.encoders import VaeMode, decodings_of
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.tiling import Tiles
from ditkit_wan.encoders import vae
from ditkit_wan.encoders.vae import VaeEncoder

CPU = torch.device("cpu")


def official_name(name: str) -> str:
    """The official name of a diffusers parameter, written the other way round than the code under
    test."""
    stage = re.match(r"decoder\.up_blocks\.(\d)\.(resnets|upsamplers)\.(\d)\.", name)
    if stage:
        index = 4 * int(stage[1]) + (3 if stage[2] == "upsamplers" else int(stage[3]))
        name = f"decoder.upsamples.{index}." + name[stage.end() :]
    name = name.replace("encoder.down_blocks.", "encoder.downsamples.")
    return official_within_blocks(name)


@pytest.fixture(scope="module")
def narrow_vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a VAE of Wan 2.1's structure, four channels wide."""
    return narrow(tmp_path_factory.mktemp("vae") / "vae", base_dim=4)


def single_file(folder: Path, target: Path) -> Path:
    state = load_file(folder / "diffusion_pytorch_model.safetensors")
    save_file({official_name(name): tensor for name, tensor in state.items()}, target)
    return target


def loaded(**where: Any) -> VaeEncoder:
    encoder = VaeEncoder(ModelPaths(**where), CPU)
    encoder.load()
    return encoder


def test_every_parameter_of_the_wan_vae_has_an_official_name_and_finds_back() -> None:
    from diffusers import AutoencoderKLWan

    with torch.device("meta"):
        names = list(AutoencoderKLWan().state_dict())
    official = [official_name(name) for name in names]
    assert len(set(official)) == 194
    assert (
        "decoder.upsamples.3.time_conv.weight" in official
        and "encoder.downsamples.3.shortcut.bias" in official
    )
    assert "encoder.middle.1.to_qkv.weight" in official and "decoder.head.0.gamma" in official
    assert [causal_vae_name(name) for name in official] == names
    assert [causal_vae_name(name) for name in names] == names


def test_official_names_are_those_that_diffusers_converts() -> None:
    from diffusers import AutoencoderKLWan
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    with torch.device("meta"):
        state = AutoencoderKLWan().state_dict()
    converted = convert_wan_vae_to_diffusers({official_name(name): name for name in state})
    assert all(key == original for key, original in converted.items()) and len(converted) == len(
        state
    )


def test_latents_are_the_normalised_mean_of_the_posterior(checkpoint: Path) -> None:
    from diffusers import AutoencoderKLWan

    latents = loaded(base=str(checkpoint)).encode([clip()])[0]["latents"]
    vae = AutoencoderKLWan.from_pretrained(checkpoint / "vae")
    with torch.no_grad():
        mean = vae.encode(clip()[None]).latent_dist.mean[0]
    expected = (mean - torch.tensor(vae.config.latents_mean).view(-1, 1, 1, 1)) / torch.tensor(
        vae.config.latents_std
    ).view(-1, 1, 1, 1)
    assert latents.shape == (16, 2, 4, 4) and latents.dtype == torch.float32
    assert torch.equal(latents, expected)


def test_decoding_undoes_the_normalisation(checkpoint: Path) -> None:
    from diffusers import AutoencoderKLWan

    encoder = loaded(base=str(checkpoint))
    pixels = encoder.decode(encoder.encode([clip()])[0]["latents"])
    vae = AutoencoderKLWan.from_pretrained(checkpoint / "vae")
    with torch.no_grad():
        expected = vae.decode(vae.encode(clip()[None]).latent_dist.mean).sample[0]
    assert pixels.shape == (3, 5, 32, 32) and pixels.min() >= 0 and pixels.max() <= 1
    torch.testing.assert_close(pixels, expected / 2 + 0.5, atol=1e-5, rtol=0)


def test_the_official_single_file_gives_what_the_folder_gives(
    narrow_vae: Path, tmp_path: Path
) -> None:
    file = single_file(narrow_vae, tmp_path / "wan_2.1_vae.safetensors")
    from_file, from_folder = loaded(vae=str(file)), loaded(vae=str(narrow_vae))
    latents = from_file.encode([clip()])[0]["latents"]
    assert torch.equal(latents, from_folder.encode([clip()])[0]["latents"])
    assert torch.equal(from_file.decode(latents), from_folder.decode(latents))
    assert from_file.strides == from_folder.strides == (4, 8) and from_file.channels == 16


def test_a_clip_of_four_frames_is_refused_because_the_vae_would_drop_three(
    checkpoint: Path,
) -> None:
    with pytest.raises(AssertionError, match="4 frames"):
        loaded(base=str(checkpoint)).encode([clip(frames=4)])


def test_a_truncated_file_is_one_line(narrow_vae: Path, tmp_path: Path) -> None:
    file = single_file(narrow_vae, tmp_path / "vae.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="truncated") as caught:
        loaded(vae=str(file))
    assert "\n" not in str(caught.value)


def test_damaged_or_missing_weights_of_a_folder_are_found_at_once(
    narrow_vae: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "vae"
    shutil.copytree(narrow_vae, folder)
    file = folder / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="truncated"):
        VaeEncoder(ModelPaths(vae=str(folder)), CPU)
    file.unlink()
    with pytest.raises(UserError, match="contains no .safetensors file"):
        VaeEncoder(ModelPaths(vae=str(folder)), CPU)
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="contains no vae; set model.vae"):
        VaeEncoder(ModelPaths(base=str(tmp_path)), CPU)


@pytest.mark.parametrize("wrong", [{"base_dim": "wide"}, {"dim_mult": None}])
def test_a_configuration_that_makes_no_vae_is_one_line(
    narrow_vae: Path, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    shutil.copytree(narrow_vae, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | wrong))
    with pytest.raises(UserError, match="no model can be built") as caught:
        loaded(vae=str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_configuration_that_does_not_fit_names_the_vae(narrow_vae: Path, tmp_path: Path) -> None:
    shutil.copytree(narrow_vae, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    for change in ({"base_dim": 8}, {"num_res_blocks": 1}):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match="does not fit the weights.*set model.vae to") as caught:
            loaded(vae=str(tmp_path))
        assert "preset" not in str(caught.value)


def test_a_file_that_lacks_a_tensor_is_refused(narrow_vae: Path, tmp_path: Path) -> None:
    file = single_file(narrow_vae, tmp_path / "vae.safetensors")
    state = load_file(file)
    del state["decoder.middle.0.residual.2.bias"]
    save_file(state, file)
    with pytest.raises(UserError, match="1 missing: decoder.mid_block.resnets.0.conv1.bias"):
        loaded(vae=str(file))


def test_another_models_file_is_refused(tmp_path: Path) -> None:
    save_file({"decoder.conv_in.weight": torch.zeros(4, 4)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="not a VAE of Wan 2.1 or 2.2"):
        VaeEncoder(ModelPaths(vae=str(tmp_path / "other.safetensors")), CPU)


def test_the_pickle_is_refused_by_naming_the_file_to_get(tmp_path: Path) -> None:
    (tmp_path / "Wan2.1_VAE.pth").write_bytes(b"x")
    with pytest.raises(UserError, match="wan_2.1_vae.safetensors"):
        VaeEncoder(ModelPaths(vae=str(tmp_path / "Wan2.1_VAE.pth")), CPU)


def test_identity_follows_the_weights_and_needs_no_loading(
    narrow_vae: Path, tmp_path: Path
) -> None:
    first = single_file(narrow_vae, tmp_path / "first.safetensors")
    same = single_file(narrow_vae, tmp_path / "same.safetensors")
    state = load_file(first)
    state["conv1.bias"] = state["conv1.bias"] + 1
    save_file(state, tmp_path / "other.safetensors")
    identities = [
        VaeEncoder(ModelPaths(vae=str(file)), CPU).identity
        for file in (first, same, tmp_path / "other.safetensors")
    ]
    assert identities[0] == identities[1] != identities[2]


@pytest.mark.parametrize(
    ("key", "value"),
    [("latents_mean", "x"), ("latents_std", [1.0] * 3), ("latents_std", None), ("patch_size", {}), ("patch_size", "x"), ("patch_size", 2**63), ("patch_size", -1), ("scale_factor_spatial", 0)],
)  # fmt: skip
def test_a_value_that_the_library_reads_only_in_use_is_found_when_loading(
    narrow_vae: Path, tmp_path: Path, key: str, value: Any
) -> None:
    shutil.copytree(narrow_vae, tmp_path / "vae")
    config = json.loads((tmp_path / "vae" / "config.json").read_text())
    (tmp_path / "vae" / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(
        UserError,
        match="vae: its configuration has a damaged value .*; fetch its config.json again",
    ):
        loaded(vae=str(tmp_path / "vae"))


@pytest.mark.slow
def test_decoding_goes_on_where_memory_lacks(
    narrow_vae: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the next way, and on the host after the last; what failed once is not tried again until
    the weights are freed."""
    # a frame of the usual ones takes seconds
    monkeypatch.setattr(vae, "TILES", Tiles(side=64, overlap=16))
    ways = decodings_of("auto", tiled=False)
    latents = torch.randn(16, 2, 10, 8, generator=torch.Generator().manual_seed(1))
    expected = {
        way.label: VaeEncoder(ModelPaths(vae=str(narrow_vae)), CPU, decodings=(way,)).decode(
            latents
        )
        for way in ways
    }
    work, tried = VaeFamily.decode_clip, list[torch.dtype]()

    def lacking(failures: int) -> VaeEncoder:
        tried.clear()

        def decode(
            family: VaeFamily, module: Any, part: torch.Tensor, device: torch.device
        ) -> torch.Tensor:
            tried.append(module.dtype)
            if len(tried) <= failures:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return work(family, module, part, device)

        monkeypatch.setattr(VaeFamily, "decode_clip", decode)
        return VaeEncoder(ModelPaths(vae=str(narrow_vae)), CPU, decodings=ways)

    fp32, bf16 = torch.float32, torch.bfloat16
    for failures, mode in enumerate(expected):
        encoder = lacking(failures)
        assert torch.equal(encoder.decode(latents), expected[mode]) and encoder.decoded == mode
        attempts = len(tried)
        assert torch.equal(encoder.decode(latents), expected[mode])
        assert tried[failures:attempts] == tried[attempts:], "nothing fails twice"
        said = capfd.readouterr().err.splitlines()
        assert len(said) == failures and all(
            "no room on cpu to decode a sample" in line for line in said
        )
    encoder = lacking(1)
    assert torch.equal(encoder.decode(latents), expected["in bf16"])
    encoder.unload()
    assert torch.equal(encoder.decode(latents), expected["whole"]), (
        "later samples may have more room"
    )
    capfd.readouterr()
    encoder = lacking(3)
    on_host = encoder.decode(latents)
    assert tried[:3] == [fp32, bf16, bf16] and set(tried[3:]) == {fp32}
    in_tiles = VaeEncoder(ModelPaths(vae=str(narrow_vae)), CPU, decodings=(VaeMode(tiled=True),))
    monkeypatch.setattr(VaeFamily, "decode_clip", work)
    assert torch.equal(on_host, in_tiles.decode(latents)) and not torch.equal(
        on_host, expected["whole"]
    )
    assert "decoding it on the CPU" not in capfd.readouterr().err, (
        "which the device of this test is"
    )
    with pytest.raises(torch.OutOfMemoryError):
        lacking(99).decode(latents)


def test_bf16_decodes_almost_what_fp32_does(narrow_vae: Path) -> None:
    latents = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    exact, rounded = (
        VaeEncoder(ModelPaths(vae=str(narrow_vae)), CPU, decodings=(VaeMode(dtype),)).decode(
            latents
        )
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert exact.dtype == rounded.dtype == torch.float32 and exact.std() > 0.02
    error = (exact - rounded).abs()
    # measured: 0.11 and 44 dB, of random weights; 8 bits are rounded in each of some thirty layers
    assert 0 < error.max() < 0.25 and -10 * torch.log10(error.square().mean()) > 38


def test_bf16_encodes_almost_what_fp32_does_under_another_identity(narrow_vae: Path) -> None:
    where, clip = (
        ModelPaths(vae=str(narrow_vae)),
        torch.rand(3, 5, 32, 32, generator=torch.Generator().manual_seed(2)),
    )
    exact, rounded = (
        VaeEncoder(where, CPU, mode=VaeMode(dtype)) for dtype in (torch.float32, torch.bfloat16)
    )
    assert exact.identity != rounded.identity
    exact.load()
    rounded.load()
    expected, found = (each.encode([clip * 2 - 1])[0]["latents"] for each in (exact, rounded))
    assert found.dtype == torch.float32
    # measured: 0.009, of random weights; the normalisation is in fp32
    assert 0 < (found - expected).norm() / expected.norm() < 0.02
