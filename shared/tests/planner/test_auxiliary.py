"""What encoding and drawing hold, on a model whose bytes can be counted by hand, and on the toy."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.models.encoders import AuxiliaryModel, LayerContext, VaeMode, decodings_of
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import run_plain
from ditkit_core.models.tiling import Tiles
from ditkit_core.planner import measurement_cache
from ditkit_core.planner.auxiliary import (
    AuxiliaryPlanner,
    AuxiliaryRow,
    DeviceMemory,
    denoising_bytes,
    held_while_sampling,
    measure_model,
)
from ditkit_core.planner.memory_tracker import MemoryTracker, TooMuchMemory
from ditkit_core.previews.decoding import first_that_fits
from ditkit_core.testing.combinations import daily
from ditkit_core.testing.plans import step_of
from ditkit_core.testing.toy import TOY
from ditkit_core.testing.world import make_model
from ditkit_core.weights.layer_streaming import MARGIN_BYTES

WIDTH = 64
LAYER = 4 * WIDTH * WIDTH
"""Bytes of the weight of a layer in fp32."""
SIZE = (1, 64, 64)


def layers(dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        made = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    made[2].weight = made[0].weight  # shared, as an embedding may be
    return made.to(dtype).eval()


def run(module: nn.Module, size: tuple[int, int, int], device: torch.device) -> Tensor:
    """The input, the first layer's output and the second's are alive at once, then the third's in
    place of one."""
    rows = size[1] * size[2]
    return module(torch.empty(rows, WIDTH).to(device))


def run_streamed(
    module: nn.Module, device: torch.device, passing: Callable[[], LayerContext]
) -> Tensor:
    rows = torch.empty(4, WIDTH).to(device)
    holding = passing()
    for name in "01":
        with holding(name) as layer:
            rows = layer(rows)
    return rows


VAE = AuxiliaryModel(
    name="VAE decoder",
    stage="sample",
    build=lambda _: layers(torch.float32),
    run=run,
    tiles=Tiles(32, 8),
)
ENCODER = replace(VAE, name="VAE encoder", stage="encode")
TEXT = AuxiliaryModel(
    name="text encoder", stage="encode", build=layers, run=run, run_streamed=run_streamed
)


def rows(
    available: int | None,
    *,
    encoded: Sequence[tuple[int, int, int]] = (SIZE,),
    in_use: int = 0,
    denoising: int = 0,
    num_samples: int = 1,
    **options: Any,
) -> list[AuxiliaryRow]:
    planner = AuxiliaryPlanner(models=[ENCODER, TEXT, VAE], text_dtype=torch.float32, **options)
    memory = DeviceMemory("cuda", available, in_use=in_use)
    return [
        *planner.encode_rows(encoded, DeviceMemory("cpu", available)),
        *planner.sample_rows([SIZE], [memory], denoising=denoising, num_samples=num_samples),
    ]


def activations(size: tuple[int, int, int]) -> int:
    """`nn.Sequential` drops what a layer was given when the next has been called: two live, and the
    caller's input."""
    return 3 * 4 * WIDTH * size[1] * size[2]


def test_a_shared_weight_counts_once_and_activations_at_their_highest() -> None:
    found = measure_model(VAE, SIZE, dtype=torch.bfloat16)
    assert found == (2 * LAYER, 2 * LAYER + activations(SIZE))
    assert measure_model(TEXT, SIZE, dtype=torch.bfloat16).weights == LAYER


def test_what_needs_more_than_a_limit_is_not_run_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measurement_cache, "_kept", OrderedDict())
    ran = list[list[Tensor]]()
    runs = SimpleNamespace(begun=ran)  # a key has the contents of a list

    def films(module: nn.Module, size: tuple[int, int, int], device: torch.device) -> list[Tensor]:
        frames = list[Tensor]()
        runs.begun.append(frames)
        for _ in range(size[0]):
            frames.append(module(torch.empty(16, WIDTH, device=device)))
        return frames

    film = replace(VAE, run=films)

    def peak(limit: int | None = None) -> int:
        return measure_model(film, (9, 4, 4), dtype=torch.float32, limit=limit).peak

    frame = 4 * WIDTH * 16
    with pytest.raises(TooMuchMemory):
        peak(2 * LAYER + 4 * frame)
    assert 0 < len(ran[0]) < 9
    with pytest.raises(TooMuchMemory):
        peak(2 * LAYER + 3 * frame)
    assert len(ran) == 1, "less than what it was known to need"
    whole = peak()
    assert len(ran[-1]) == 9
    number = len(ran)
    assert peak(whole) == whole
    with pytest.raises(TooMuchMemory):
        peak(whole - 1)
    assert len(ran) == number, "it was kept"


def test_layer_by_layer_one_layer_is_there_at_a_time() -> None:
    found = measure_model(TEXT, SIZE, dtype=torch.float32, mode="layer by layer")
    # both layers have a weight of one name and shape: the second takes the place of the first
    names = 1
    assert found == (names * LAYER, names * LAYER + 2 * 4 * WIDTH * 4)


def test_in_tiles_an_image_takes_what_one_tile_takes() -> None:
    tiled = measure_model(VAE, (1, 256, 128), dtype=torch.float32, mode="in tiles")
    assert tiled == measure_model(VAE, (1, 32, 32), dtype=torch.float32)


def test_the_planned_bytes_are_those_that_are_measured() -> None:
    module = layers(torch.float32).to_empty(device="cpu")
    module[2].weight = module[0].weight
    with torch.no_grad(), MemoryTracker() as ledger:
        ledger.track(module, "weights")
        run(module, SIZE, torch.device("cpu"))
    assert (
        ledger.peak[torch.device("cpu")]
        == measure_model(VAE, SIZE, dtype=torch.float32, kind="cpu").peak
    )


def test_with_room_nothing_is_changed_and_nothing_advised() -> None:
    found = rows(2**40)
    assert [(row.stage, row.name) for row in found] == [
        ("encode", "VAE encoder"), ("encode", "text encoder"), ("sample", "denoising"), ("sample",
        "VAE decoder"),
    ]  # fmt: skip
    assert all(row.fits and row.mode == "whole" and not row.remedy for row in found)
    assert [row.fits for row in rows(None)] == [None] * 4


def test_tiles_of_an_encoder_are_offered_with_what_they_need_and_never_taken() -> None:
    needed = measure_model(VAE, SIZE, dtype=torch.float32).peak
    tiled = measure_model(VAE, SIZE, dtype=torch.float32, mode="in tiles").peak
    encoder = rows(needed - 1, streaming="never")[0]
    assert (encoder.mode, encoder.peak, encoder.fits) == ("whole", needed, False)
    assert encoder.remedy == f"encode.vae_tiling = true would need {tiled / 2**30:.1f} GiB"
    assert rows(needed, streaming="never")[0].fits
    chosen = rows(needed - 1, streaming="never", encoding=VaeMode(tiled=True))
    assert (chosen[0].mode, chosen[0].peak, chosen[0].fits, chosen[0].remedy) == (
        "in tiles",
        tiled,
        True,
        "",
    )
    assert rows(tiled - 1, encoding=VaeMode(tiled=True))[0].remedy == 'encode.device = "cpu"'
    assert "still too much" in rows(tiled - 1)[0].remedy


def test_a_vae_that_encodes_in_bf16_is_planned_so_and_the_text_encoder_in_its_own_dtype() -> None:
    vae = replace(VAE, build=layers)
    planner = AuxiliaryPlanner(
        models=[replace(vae, stage="encode"), TEXT],
        text_dtype=torch.float32,
        encoding=VaeMode(torch.bfloat16),
    )
    found = planner.encode_rows([SIZE], DeviceMemory("one", 2**40, "cuda"))
    needed = [
        measure_model(vae, SIZE, dtype=torch.bfloat16),
        measure_model(TEXT, SIZE, dtype=torch.float32),
    ]
    assert [row.peak for row in found] == [each.peak for each in needed]
    assert [row.mode for row in found] == ["in bf16", "whole"]


def test_a_gpu_decodes_in_the_first_way_that_it_has_room_for_and_a_cpu_in_the_first() -> None:
    vae = replace(VAE, build=layers)
    wide, narrow = (
        measure_model(vae, SIZE, dtype=dtype).peak for dtype in (torch.float32, torch.bfloat16)
    )
    tiled = measure_model(vae, SIZE, dtype=torch.bfloat16, mode="in tiles").peak
    assert tiled < narrow < wide
    planner = AuxiliaryPlanner(
        models=[vae], text_dtype=torch.float32, decodings=decodings_of("auto", tiled=False)
    )

    def decoder(available: int | None, kind: str = "cuda") -> AuxiliaryRow:
        return planner.sample_rows([SIZE], [DeviceMemory("one", available, kind)], denoising=0)[-1]

    found = [decoder(available) for available in (None, wide, wide - 1, narrow - 1, tiled - 1)]
    assert [row.mode for row in found] == [
        "whole",
        "whole",
        "in bf16",
        "in bf16 tiles",
        "in bf16 tiles",
    ]
    assert [row.fits for row in found] == [
        None,
        True,
        True,
        True,
        False,
    ] and "smaller sample.height" in found[-1].remedy
    assert (decoder(1, "cpu").mode, decoder(1, "cpu").peak) == ("whole", wide)
    free = {"whole": 9, "in bf16": 5, "in bf16 tiles": 1}
    ways = decodings_of("auto", tiled=False)
    assert [
        first_that_fits(ways, lambda way: free[way.label], left)[0] for left in (9, 8, 5, 4, 1, 0)
    ] == [
        0,
        1,
        1,
        2,
        2,
        2,
    ]


def test_a_text_encoder_streams_where_the_encoder_itself_would() -> None:
    # of the state dict, in which a shared weight stands twice, as the encoder counts
    state = 3 * LAYER
    assert rows(state + MARGIN_BYTES)[1].mode == "whole"
    assert rows(state + MARGIN_BYTES - 1)[1].mode == "layer by layer"
    assert rows(2**40, streaming="always")[1].mode == "layer by layer"
    whole = rows(LAYER, streaming="never")[1]
    assert whole.mode == "whole" and whole.remedy.startswith(
        'encode.streaming = "always" would need'
    )


def test_sampling_happens_next_to_what_training_keeps() -> None:
    found = {row.name: row for row in rows(2**40, in_use=1000, denoising=10, num_samples=2)}
    alone = measure_model(VAE, SIZE, dtype=torch.float32)
    assert found["VAE decoder"].peak == 1000 + alone.peak
    # the decoder stays until all are sampled
    assert found["denoising"].peak == 1000 + alone.weights + 10
    assert rows(2**40, in_use=1000, denoising=10)[2].peak == 1010
    assert found["VAE encoder"].peak == alone.peak
    purposes = {
        "weights": 1,
        "adapters": 2,
        "gradients": 4,
        "optimizer": 8,
        "average": 0,
        "activations": 32,
    }
    assert held_while_sampling(purposes) == 1 + 2 + 8
    assert held_while_sampling(purposes, averages=True) == 1 + 2 + 8 + 2
    assert held_while_sampling(purposes | {"average": 2}) == 1 + 2 + 8 + 2 + 2


def test_the_largest_image_and_the_largest_clip_are_both_looked_at() -> None:
    wide, long = (1, 64, 96), (9, 64, 64)
    row = rows(2**40, encoded=[SIZE, long, wide])[0]
    assert row.size == wide and row.peak == measure_model(VAE, wide, dtype=torch.float32).peak


@pytest.mark.parametrize("frames", daily([1, 9], 9))
def test_denoising_takes_what_the_whole_model_does(frames: int) -> None:
    """Two blocks more hold nothing more, and the real model what the fake one says."""
    arch, size = replace(TOY.architecture.presets["tiny"], depth=5), (frames, 32, 32)
    step = step_of(TOY, arch, size, AdapterConfig(rank=2))
    planned = denoising_bytes(
        replace(step, kind="cpu").with_execution(precision=Precision(matmul=torch.float32)), size
    )
    model = make_model(TOY, arch, adapter=AdapterConfig(rank=2)).eval()
    with torch.no_grad(), MemoryTracker() as ledger:
        ledger.track(model, "weights")
        weights = ledger.total(torch.device("cpu"))
        item = TOY.training.empty_item(arch, size, ())
        run_plain(model, TOY.training.make_inputs([item["latents"]], torch.empty(1), [item], 1.0))
    assert planned == pytest.approx(ledger.peak[torch.device("cpu")] - weights, rel=0.05)
    assert TOY.auxiliary.models(arch, ModelPaths()) == ()


def test_an_adapter_for_samples_is_there_while_they_are_generated_and_decoded() -> None:
    planner = AuxiliaryPlanner(models=[VAE], text_dtype=torch.float32)
    memories = [DeviceMemory("one", 2**40, in_use=100), DeviceMemory("two", 2**40, in_use=10)]
    without = planner.sample_rows([SIZE], memories, denoising=5)
    found = planner.sample_rows([SIZE], memories, denoising=5, adapter_bytes=[7, 3])
    assert [row.peak - before.peak for row, before in zip(found, without, strict=True)] == [7, 3, 7]
