"""The VAE and the text encoder as a plan sees them: their sizes, and what they hold, against the
encoders themselves."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_encoders import tiny_vae, write_mistral
from tiny_flux2 import ARCHS

from ditkit_core.config.sizes import GIB
from ditkit_core.families import text
from ditkit_core.families.text_model import build_layers
from ditkit_core.families.vae import DiffusersVae
from ditkit_core.models.encoders import AuxiliaryModel, VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_core.planner.auxiliary import measure_model
from ditkit_core.planner.memory_tracker import MemoryTracker
from ditkit_core.testing.auxiliary_models import check_tiles, live, num_parameters
from ditkit_flux2.encoders import MISTRAL, QWEN, TEXT, VAE
from ditkit_flux2.presets import PRESETS
from ditkit_flux2.spec import FLUX2

CPU = torch.device("cpu")


def auxiliary_model(name: str, preset: str = "dev", **where: str) -> AuxiliaryModel:
    (found,) = (
        each
        for each in FLUX2.auxiliary.models(PRESETS[preset], ModelPaths(**where))
        if each.name == name
    )
    return found


@pytest.mark.parametrize(
    ("name", "family", "tied", "published"),
    [
        ("Mistral Small 3", MISTRAL, False, 23_572_403_200),
        ("Qwen3 8B", QWEN, False, 8_190_735_360),
        ("Qwen3 4B", QWEN, True, 4_022_468_096),
    ],
)
def test_the_built_in_sizes_are_those_of_the_published_language_models(
    name: str, family: Any, tied: bool, published: int
) -> None:
    config = family.published[name]
    of_head = 0 if tied else config["vocab_size"] * config["hidden_size"]
    assert (
        num_parameters(build_layers(family, config)) + of_head + config["hidden_size"] == published
    )


@pytest.mark.parametrize(
    ("preset", "name"),
    [("dev", "Mistral Small 3"), ("klein-9b", "Qwen3 8B"), ("klein-base-4b", "Qwen3 4B")],
)
def test_each_preset_has_its_encoder_up_to_the_last_layer_that_is_read(
    preset: str, name: str
) -> None:
    built = auxiliary_model("text encoder", preset).build(torch.bfloat16)
    config = {**MISTRAL.published, **QWEN.published}[name]
    assert built.get_parameter("embed_tokens.weight").shape == (
        config["vocab_size"],
        config["hidden_size"],
    )
    assert len(built.get_submodule("layers")) == {"dev": 30}.get(preset, 27)
    assert {parameter.dtype for parameter in built.parameters()} == {torch.bfloat16}


def test_the_vae_takes_what_was_measured_and_less_in_tiles() -> None:
    """2.5 GiB of activations for 1024² pixels and 10 for 2048², 3 and 12 GiB to decode: what the
    README says."""
    found = {}
    for name in ("VAE encoder", "VAE decoder"):
        vae = auxiliary_model(name)
        for side in (1024, 2048):
            weights, peak = measure_model(vae, (1, side, side), dtype=torch.float32)
            assert weights == pytest.approx(4 * 84_046_115, rel=1e-4)
            found[name, side] = (peak - weights) / GIB
        assert (
            measure_model(vae, (1, 2048, 2048), dtype=torch.float32, mode="in tiles").peak
            < 1.1 * GIB
        )
    assert found["VAE encoder", 1024] == pytest.approx(2.51, abs=0.01)
    assert found["VAE encoder", 2048] == pytest.approx(10.05, abs=0.05)
    assert found["VAE decoder", 1024] == pytest.approx(3.01, abs=0.02)
    assert found["VAE decoder", 2048] == pytest.approx(12.03, abs=0.05)


@pytest.fixture(scope="module")
def vae_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "vae"
    narrow = {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "layers_per_block": 1}
    tiny_vae(**narrow).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("height", "dtype"), [(48, torch.float32), (128, torch.bfloat16)])
def test_what_the_vae_holds_is_what_was_planned(
    vae_folder: Path, height: int, dtype: torch.dtype
) -> None:
    encoder = DiffusersVae(VAE, ModelPaths(vae=str(vae_folder)), CPU, mode=VaeMode(dtype))
    encoder.load()
    encode, _, decode = FLUX2.auxiliary.models(
        replace(ARCHS["dev"], in_channels=16), ModelPaths(vae=str(vae_folder))
    )
    size = (1, height, 64)
    planned = [measure_model(each, size, dtype=dtype, kind="cpu").peak for each in (encode, decode)]
    image = torch.zeros(3, *size)
    held = live(encoder.module, lambda: encoder.encode([image]))
    # A plan counts the image's copy on the device alone; a CPU has both if their dtypes differ.
    held -= 0 if dtype == torch.float32 else image.nbytes
    assert held == pytest.approx(planned[0], rel=0.05)
    latents = torch.zeros(16, 1, height // 16, 4)
    assert live(encoder.module, lambda: encoder.decode(latents)) == pytest.approx(
        planned[1], rel=0.05
    )


def test_tiles_give_other_latents_under_another_identity(
    vae_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ModelPaths(vae=str(vae_folder))
    whole, tiled = (
        DiffusersVae(VAE, where, CPU),
        DiffusersVae(VAE, where, CPU, mode=VaeMode(tiled=True)),
    )
    assert (
        whole.identity
        != tiled.identity
        == FLUX2.auxiliary.media_encoder(where, CPU, VaeMode(tiled=True)).identity
    )
    whole.load()
    tiled.load()
    small = torch.rand(3, 1, 512, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    assert torch.equal(whole.encode([small])[0]["latents"], tiled.encode([small])[0]["latents"])
    large = torch.rand(3, 1, 528, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    check_tiles(whole, tiled, large, patch=monkeypatch)


def test_a_streamed_text_encoder_holds_what_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the bytes of what is kept on the host anyhow: the results."""
    monkeypatch.setattr(text, "captions_at_once", lambda *_: 2)
    write_mistral(tmp_path)
    where = ModelPaths(base=str(tmp_path))
    _, planner, _ = FLUX2.auxiliary.models(ARCHS["dev"], where)
    for streaming in ("always", "never"):
        encoder = text.LanguageModelEncoder(TEXT, where, CPU, torch.float32, streaming)
        encoder.load()
        mode: Any = "layer by layer" if encoder.streams else "whole"
        with MemoryTracker() as ledger:
            if not encoder.streams:
                ledger.track(encoder._model, "weights")
            (one, *_) = encoder.encode(["a fox"] * encoder.items_at_once)
        held = ledger.peak[CPU] - encoder.items_at_once * one["text"].nbytes
        planned = measure_model(planner, (1, 64, 64), dtype=torch.float32, mode=mode, kind="cpu")
        assert held == pytest.approx(planned.peak, rel=0.05)
        encoder.unload()
