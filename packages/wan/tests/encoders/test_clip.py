"""The CLIP vision encoder, from a folder and from ComfyUI's single file."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ditkit_core.errors import UserError
from ditkit_core.models.paths import ModelPaths
from ditkit_wan.encoders.clip import ImageEncoder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CLIPVisionModel(
            CLIPVisionConfig(
                hidden_size=160, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
                image_size=28,
                patch_size=14, hidden_act="gelu",
            )
        )  # fmt: skip
    path = tmp_path_factory.mktemp("clip") / "image_encoder"
    model.save_pretrained(path)
    return path


def test_tokens_are_those_of_the_last_layer_but_one(folder: Path) -> None:
    from transformers import CLIPVisionModel

    encoder = ImageEncoder(ModelPaths(image_encoder=str(folder)), CPU, torch.float32)
    encoder.load()
    grey = torch.zeros(3, 1, 40, 56)
    tokens = encoder.encode([grey])[0]["image"]
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    pixels = ((0.5 - torch.tensor(mean)) / torch.tensor(std)).view(1, 3, 1, 1).expand(1, 3, 28, 28)
    with torch.no_grad():
        states = CLIPVisionModel.from_pretrained(folder)(
            pixels, output_hidden_states=True
        ).hidden_states
    assert tokens.shape == (5, 160) and len(states) == 4
    torch.testing.assert_close(tokens, states[2][0], atol=1e-5, rtol=0)


def test_the_comfyui_file_gives_what_the_folder_gives(folder: Path, tmp_path: Path) -> None:
    state = {
        f"vision_model.{name.removeprefix('vision_model.')}": t
        for name, t in load_file(folder / "model.safetensors").items()
    }
    state |= {"visual_projection.weight": torch.zeros(4, 160)}
    save_file(state, tmp_path / "clip_vision_h.safetensors")
    results = []
    for path in (folder, tmp_path / "clip_vision_h.safetensors"):
        encoder = ImageEncoder(ModelPaths(image_encoder=str(path)), CPU, torch.float32)
        encoder.load()
        results.append(
            encoder.encode([torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(1))])[
                0
            ]["image"]
        )
    assert torch.equal(*results)


def test_another_models_file_is_refused(tmp_path: Path) -> None:
    save_file({"shared.weight": torch.zeros(2, 2)}, tmp_path / "umt5.safetensors")
    with pytest.raises(UserError, match="not a CLIP vision encoder"):
        ImageEncoder(
            ModelPaths(image_encoder=str(tmp_path / "umt5.safetensors")), CPU, torch.float32
        ).load()
