"""A VAE of one layer: which way it decodes in, and what its identity depends on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.encoders import WHOLE, VaeMode
from ditkit_core.models.state_dict import StateDictNames
from ditkit_core.models.tiling import Tiles
from ditkit_core.weights.frozen import FrozenVae

CPU = torch.device("cpu")
TILED = VaeMode(tiled=True)
LATENTS = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))


class LinearVae(FrozenVae):
    """Tiles overlap by half, and the layer looks at no neighbour: tiles change nothing."""

    recipe = "one layer, {}"
    strides = (1, 1)


def vae(
    folder: Path, *, mode: VaeMode = WHOLE, decodings: Sequence[VaeMode] = (), room: int = 64
) -> LinearVae:
    """A VAE for which memory has room for `room` latent pixels at a time."""

    def work(layer: Any, part: torch.Tensor, device: torch.device) -> torch.Tensor:
        if part[0].numel() > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return layer(part.to(layer.weight.dtype).movedim(0, -1)).movedim(-1, 0).float()

    file = folder / "vae.safetensors"
    save_file({"weight": torch.eye(3, 4) * 0.7}, file)
    return LinearVae(
        make=lambda config: torch.nn.Linear(4, 3, bias=False),
        config={},
        source=SafetensorsSource.open(file),
        names=StateDictNames.renaming(to_native=str),
        device=CPU,
        dtype=mode.dtype,
        key="model.vae",
        mode=mode,
        decodings=decodings,
        tiles=Tiles(side=4, overlap=2),
        encode_clip=work,
        decode_clip=work,
    )


def test_a_way_without_room_is_not_tried_again_until_the_weights_are_freed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, narrow = vae(tmp_path), vae(tmp_path, decodings=(WHOLE, TILED), room=16)
    pixels = [decoder.decode(LATENTS) for decoder in (whole, narrow, narrow)]
    assert (whole.decoded, narrow.decoded) == ("whole", "in tiles")
    assert all(torch.allclose(pixels[0], other) for other in pixels[1:])
    assert capsys.readouterr().err.count("no room on cpu") == 1
    narrow.unload()
    narrow.decode(LATENTS)
    assert capsys.readouterr().err.count("decoding it in tiles") == 1


def test_the_last_way_is_the_host_and_then_there_is_none(tmp_path: Path) -> None:
    decoder = vae(tmp_path, decodings=(WHOLE,), room=1)
    with pytest.raises(torch.OutOfMemoryError):
        decoder.decode(LATENTS)
    assert decoder.decoded == ""


def test_what_encodes_otherwise_has_another_identity(tmp_path: Path) -> None:
    modes = (WHOLE, VaeMode(torch.bfloat16), TILED)
    assert len({vae(tmp_path, mode=mode).identity for mode in modes}) == 3
    assert vae(tmp_path, decodings=(TILED,)).identity == vae(tmp_path).identity, (
        "decoding makes no latents"
    )


def test_a_clip_whose_sides_do_not_fit_is_no_clip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = vae(tmp_path)
    encoder.load()
    monkeypatch.setattr(LinearVae, "strides", (4, 8))
    for size in ((4, 8, 8), (5, 12, 8), (5, 8, 12)):
        with pytest.raises(AssertionError, match=f"{size[0]} frames of {size[1]} x {size[2]}"):
            encoder.encode([torch.zeros(3, *size)])
