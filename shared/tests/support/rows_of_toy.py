"""What the ranks do for `loading/test_divided_loading.py`: each reads its rows of a model, and
compares them with those of a whole one."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gathered import log_gathered
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ditkit_core.adapters.config import AdapterConfig, BaseConfig, ExportConfig
from ditkit_core.adapters.files.export import export_adapter
from ditkit_core.adapters.inject import canonical_name, trainable_parameters
from ditkit_core.distributed.division import Division
from ditkit_core.distributed.fsdp import shards_integers
from ditkit_core.distributed.ranks import Ranks
from ditkit_core.distributed.shards import Shards
from ditkit_core.engine.placement import place_blocks
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.loading.model import Model
from ditkit_core.loading.on_meta import loaded_dtype, model_on_meta
from ditkit_core.loading.weights import give_dtypes, load_weights
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.run.config import RunConfig
from ditkit_core.run.restore import load_trained
from ditkit_core.testing.live_bytes import LiveBytes
from ditkit_core.testing.replicas import forked
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, ToyModel, in_form, toy_items
from ditkit_core.testing.world import make_model
from ditkit_core.training.checkpoint import State, save_state
from ditkit_core.training.config import SaveConfig

CPU = torch.device("cpu")
ARCH = ToyArch(dim=96, depth=2, heads=4)
RARER = "mlp.2.bias"
"""Parameters in another dtype than the rest of their block: a full fine-tune in bf16 leaves them
whole."""
SPEC = altered(
    TOY,
    presets={"wide": ARCH},
    infer_arch=None,
    op_group_of=lambda name: "norm" if name.endswith(RARER) else TOY.precision.op_group_of(name),
)
LORA, FULL, DORA = (
    AdapterConfig(rank=4),
    AdapterConfig(method="full"),
    AdapterConfig(rank=4, use_dora=True),
)
FP32, BF16 = torch.float32, torch.bfloat16
CASES = {
    "lora": (LORA, BaseConfig(), BF16),
    "lora in fp32": (LORA, BaseConfig(), FP32),
    "lokr": (AdapterConfig(method="lokr", rank=4), BaseConfig(), BF16),
    "full": (FULL, BaseConfig(), FP32),
    "full in bf16": (FULL, BaseConfig(), BF16),
    "int8": (LORA, BaseConfig(quantize="int8"), BF16),
    "fp8": (LORA, BaseConfig(quantize="fp8"), BF16),
    "nf4": (LORA, BaseConfig(quantize="nf4"), BF16),
    "dora": (DORA, BaseConfig(), BF16),
    "dora on int8": (DORA, BaseConfig(quantize="int8"), BF16),
    "dora on nf4": (DORA, BaseConfig(quantize="nf4"), BF16),
    "dora next to an assistant": (DORA, BaseConfig(assistant="lora.safetensors"), BF16),
    "merged into nf4": (LORA, BaseConfig(quantize="nf4", merge=("lora.safetensors",)), BF16),
}
CASES = {
    name: case
    for name, case in CASES.items()
    if shards_integers() or case[1].quantize not in ("int8", "nf4")
}
"""Torch 2.11 shards no integers, and the command refuses them."""


GATHERED: list[tuple[int, int]] = []
"""Bytes of all gathered weights that are alive, and of the last one, on the first rank."""


class PeakBytes(LiveBytes):
    """The most bytes that were alive at once on the host."""

    peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Its storage is a pretended one of the whole; what it does to its rows comes here, too.
        if DTensor in types:
            return func(*args, **(kwargs or {}))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, self.total())
        return out

    def total(self) -> int:
        alive = (storage for made in self._made.values() if (storage := made()) is not None)
        return sum(storage.nbytes() for storage in alive if storage.device == CPU)


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes of tensors that are read in the block, one number for each read."""
    sizes, read = list[int](), SafetensorsSource.read

    def counting(self: SafetensorsSource, *given: Any, **named: Any) -> Tensor:
        found = read(self, *given, **named)
        sizes.append(found.nbytes)
        return found

    SafetensorsSource.read = counting  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        SafetensorsSource.read = read  # type: ignore[method-assign]


def built(folder: Path, name: str) -> Model:
    adapter, base, dtype = CASES[name]
    merge = tuple(str(folder / file) for file in base.merge)
    assistant = base.assistant and str(folder / base.assistant)
    base = replace(base, merge=merge, assistant=assistant)
    return model_on_meta(
        SPEC, ModelPaths(transformer=str(folder / "toy.safetensors"), preset="wide"), adapter, base,
        precision=Precision(matmul=dtype)
    )  # fmt: skip


def loaded(folder: Path, whole: Mapping[str, Model], ranks: Ranks) -> dict[str, Any]:
    ranks.shard = ranks.size
    log_gathered(lambda alive, size: GATHERED.append((alive, size)))
    return {name: compared(folder, name, expected, ranks) for name, expected in whole.items()}


def exported(whole: Model, divided: Model, folder: Path) -> dict[str, Any]:
    """The adapter, over the norm of the base's rows if it has one, of both models: whether the
    files are the same, and what was gathered for it."""
    GATHERED.clear()
    files = []
    for name, prepared in (("whole", whole), ("divided", divided)):
        given = {"metadata": {}, "whole_in": prepared.whole_in}
        with prepared.readable():
            files += export_adapter(
                prepared.module, SPEC, folder, name, ExportConfig(dtype="fp32"), **given
            )
    one, other = (path.read_bytes() for path in files)
    trained = sum(parameter.nbytes for parameter in whole.trainable.values())
    return {
        "same": one == other,
        "most": max(alive for alive, _ in GATHERED),
        "trained": trained,
        "largest": max(size for _, size in GATHERED),
    }


def compared(folder: Path, name: str, expected: Model, ranks: Ranks) -> dict[str, Any]:
    """Load a model divided: what differs from the whole one, what was read, and what the host had
    at most."""
    unloaded = built(folder, name)
    give_dtypes(unloaded, loaded_dtype(unloaded.spec, unloaded.origin.precision))
    division = Division(
        unloaded.module,
        trainable_parameters(unloaded.module),
        unloaded.origin.precision,
        ranks,
        CPU,
    )
    with counted() as sizes, PeakBytes() as bytes:
        found = load_weights(
            unloaded, placement=place_blocks(unloaded.module, [CPU]), seed=0, division=division
        )
    shards = Shards(found.module, found.trainable, unloaded.origin.precision, ranks, CPU, division)
    parameters: dict[str, nn.Parameter] = dict(found.module.named_parameters())
    wanted = dict(expected.module.named_parameters())
    assert parameters.keys() == wanted.keys() and shards.local.keys() == expected.trainable.keys()
    own = {path: local(parameter) for path, parameter in parameters.items()}
    differ = [
        path
        for path, rows in own.items()
        if not same(rows, wanted[path], division.rows(parameters[path]))
    ]
    differ += [
        path
        for path, each in parameters.items()
        if each.requires_grad != wanted[path].requires_grad
    ]
    differ += [
        name
        for name, rows in shards.local.items()
        if not torch.equal(rows, own[division.paths[name]])
    ]
    # In bf16, the layers of `RARER` have two dtypes, which only loading bears.
    if unloaded.origin.precision.matmul == FP32:
        # The first one, in which FSDP2 takes over what has changed since it divided the model.
        forward(found.module)
    trained = {name: local(parameters[path]) for name, path in division.paths.items()}
    apart = [
        name
        for name, rows in shards.local.items()
        if rows.numel() and rows.data_ptr() != trained[name].data_ptr()
    ]
    file = unloaded.origin.stored.source.tensors
    num_bytes = sum(each.num_bytes for each in file.values())
    result = replace(found, shards=shards, trainable=shards.local)
    files = partial(exported, expected, result, folder / f"{name} on {ranks.size}")
    return {
        "differ": differ,
        "apart": apart,
        "restored": name != "lora in fp32" or restored(folder, expected, result),
        "exported": CASES[name][0].method == "lora" and ranks.on_first(files, shards.help),
        "read": sum(sizes),
        "file": num_bytes,
        "largest": max(torch.Size(each.shape).numel() for each in file.values()),
        "shard": sum(rows.nbytes for rows in own.values()),
        "whole": sum(parameter.nbytes for parameter in wanted.values()),
        "peak": bytes.peak,
        "undivided": sorted(
            canonical_name(path)
            for path, each in parameters.items()
            if not isinstance(each, DTensor)
        ),
    }


@torch.no_grad()
def forward(model: Any) -> Tensor:
    (item,) = toy_items(1)
    made: Tensor = model(
        TOY.training.make_inputs([item["latents"]], torch.tensor([0.5]), [item], 1.0)
    )[0]
    return made


def restored(folder: Path, whole: Model, divided: Model) -> bool:
    """Whether a model that has run already has the weights of a save in its next forward. What is
    in no block stays whole after a forward."""
    run = RunFolder(folder / "run")
    for prepared in (whole, divided):
        load_trained(prepared, run)
    assert any(name.startswith("head.") for name in divided.trainable)
    return torch.equal(forward(whole.module), forward(divided.module))


def local(parameter: Tensor) -> Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def same(rows: Tensor, whole: Tensor, which: range | None) -> bool:
    """Bitwise."""
    wanted = whole if which is None else whole[which.start : which.stop]
    return rows.dtype == wanted.dtype and torch.equal(
        rows.reshape(-1).view(torch.uint8), wanted.detach().reshape(-1).view(torch.uint8)
    )


def write(folder: Path) -> None:
    torch.manual_seed(0)
    weights = ToyModel(ARCH, Precision(matmul=FP32)).state_dict()
    save_file(in_form(weights, "diffusers"), folder / "toy.safetensors")
    save(folder)
    module = next(
        name.removesuffix(".weight") for name, each in weights.items() if each.shape == (96, 96)
    )
    flat = module.replace(".", "_")
    save_file(
        {
            f"lora_unet_{flat}.lora_down.weight": torch.randn(2, 96),
            f"lora_unet_{flat}.lora_up.weight": torch.randn(96, 2),
            f"lora_unet_{flat}.alpha": torch.tensor(2.0),
        },
        folder / "lora.safetensors",
    )


def save(folder: Path) -> None:
    """The save of a run that trained a LoRA."""
    run = RunFolder(folder / "run")
    run.path.mkdir()
    run.store(RunConfig(adapter=LORA))
    trained = trainable_parameters(make_model(SPEC, ARCH, adapter=LORA))
    tensors = {"trainable": {name: torch.randn(each.shape) for name, each in trained.items()}}
    save_state(run.state, State(step=1, tensors=tensors, values={"optimizer": {}}), SaveConfig())


if __name__ == "__main__":
    torch.set_num_threads(1)
    into = Path(sys.argv[1])
    write(into)
    unloaded = {name: built(into, name) for name in CASES}
    # Once for all processes, which are copies of this one.
    whole = {
        name: load_weights(each, placement=place_blocks(each.module, [CPU]), seed=0)
        for name, each in unloaded.items()
    }
    for num in (2, 5):
        forked(num, partial(loaded, into, whole), into / str(num))
