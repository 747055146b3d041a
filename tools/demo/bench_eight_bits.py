"""Products in 8 bits (`base.compute`) next to bf16: errors of gradients by layer, and losses of a
training, on the Wan demo.

    # under five minutes on one CPU thread
    uv run tools/demo/bench_eight_bits.py > benchmarks/eight_bits_cpu.md
    # a look
    uv run tools/demo/bench_eight_bits.py --steps 20

Each training starts from the same weights and sees the same samples, noise and noise levels; only
the products with the frozen base differ. Then the weights that the bf16 run ended with are loaded
in every way, and one gradient over some micro-batches is compared with that in fp32, layer by
layer.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from demo_runs import run_demo
from ditkit_core.config.resolve import resolve
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.loading.model import Model
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.encoding import encode_all
from ditkit_core.run.model import build_model, load_model
from ditkit_core.run.plans.planned_step import place_run
from ditkit_core.run.restore import load_trained
from ditkit_core.run.training import training_data
from ditkit_core.training.train_step import StepContext, accumulate_gradients
from ditkit_wan.spec import WAN

WAYS: Mapping[str, Mapping[str, str]] = {
    "bf16": {},
    "int8 stored": {"base.quantize": "int8"},
    "int8 computed": {"base.quantize": "int8", "base.compute": "int8"},
    "fp8 stored": {"base.quantize": "fp8"},
    "fp8 computed": {"base.quantize": "fp8", "base.compute": "fp8"},
}
TRAINED = ("bf16", "int8 stored", "int8 computed", "fp8 computed")
MICRO_BATCHES = 8


def train(folder: Path, way: str, steps: int) -> float:
    """The demo in bf16 with products of one way; returns its minutes."""
    flags = [
        "--model.dtype",
        "bf16",
        "--train.threads",
        "1",
        "--train.steps",
        str(steps),
        "--sample.prompts",
        "[]",
    ]
    flags += [
        "--held_out.every_steps",
        str(max(1, steps // 4)),
        "--log.tensorboard",
        "false",
        "--log.every_steps",
        "1",
    ]
    flags += [text for key, value in WAYS[way].items() for text in (f"--{key}", value)]
    return run_demo("wan", folder, 0, flags)[0]


def losses(folder: Path) -> tuple[dict[int, float], dict[int, float]]:
    """By step: the loss of training, and that of validation."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = (
        {each["step"]: each[key] for each in lines if key in each} for key in ("loss", "held_out")
    )
    training, validation = found
    return training, validation


def curves(folders: Mapping[str, Path], steps: int) -> Iterator[str]:
    """Mean losses of spans of steps, and the validation loss, of the runs side by side."""
    found = {way: losses(folder) for way, folder in folders.items()}
    yield f"| training loss, mean of steps | {' | '.join(found)} |"
    yield "|---|" + "---:|" * len(found)
    span = max(1, steps // 10)
    for first in range(1, steps + 1, span):
        inside = [step for step in next(iter(found.values()))[0] if first <= step < first + span]
        means = [
            sum(training[step] for step in inside) / len(inside) for training, _ in found.values()
        ]
        yield f"| {first} to {first + span - 1} | {' | '.join(f'{mean:.4f}' for mean in means)} |"
    bf16 = found["bf16"][0]
    apart = [
        max(abs(training[step] / bf16[step] - 1) for step in bf16) for training, _ in found.values()
    ]
    yield f"| largest difference from bf16 in a step | {' | '.join(f'{each:.2%}' for each in apart)} |"
    yield ""
    yield f"| validation loss after step | {' | '.join(found)} |"
    yield "|---|" + "---:|" * len(found)
    for step in sorted(found["bf16"][1]):
        yield f"| {step} | {' | '.join(f'{validation[step]:.4f}' for _, validation in found.values())} |"


def gradients(folder: Path, flags: Mapping[str, Any]) -> dict[str, Tensor]:
    """The gradient of a run's trained adapter over some micro-batches, by parameter, with other
    settings of the base."""
    run = create_run(WAN, resolve(RunConfig, stored=folder, flags=flags))
    unloaded = build_model(run)
    prepared = load_model(unloaded, place_run(run, unloaded, training=True), run.config.train.seed)
    load_trained(prepared, RunFolder(folder))
    data = training_data(run.data, encode_all(run.data)[0], [])
    batches = [batch for index in range(MICRO_BATCHES) for batch in data.micro_batches(index)[:1]]
    model = Model(prepared.module.eval(), BlockEngine(), run.spec)
    accumulate_gradients(model, batches, StepContext(step=0, seed=1, flow=run.config.flow))
    return {
        name: value.grad.double()
        for name, value in prepared.trainable.items()
        if value.grad is not None
    }


def errors(folder: Path) -> Iterator[str]:
    """The difference of each layer's gradient from that in fp32, relative to it, in every way."""
    with redirect_stdout(sys.stderr):  # what loading says
        exact = gradients(folder, {"model.dtype": "fp32"})
        found = {
            way: gradients(folder, {"model.dtype": "bf16", **flags}) for way, flags in WAYS.items()
        }
    yield f"| gradient of the adapter of | {' | '.join(found)} |"
    yield "|---|" + "---:|" * len(found)
    layers = dict.fromkeys(name.partition(".lora_")[0] for name in exact)
    for title, names in [
        (layer, [name for name in exact if name.startswith(f"{layer}.lora_")]) for layer in layers
    ]:
        yield _row(f"`{title}`", names, found.values(), exact)
    yield _row("all layers", list(exact), found.values(), exact)


def _row(title: str, names: Sequence[str], found: Any, exact: Mapping[str, Tensor]) -> str:
    whole = torch.cat([exact[name].flatten() for name in names])
    apart = [torch.cat([each[name].flatten() for name in names]) - whole for each in found]
    return (
        f"| {title} | {' | '.join(f'{float(each.norm() / whole.norm()):.1e}' for each in apart)} |"
    )


HEAD = """# Products in 8 bits next to bf16

`uv run tools/demo/bench_eight_bits.py > benchmarks/eight_bits_cpu.md`, torch {torch}, one CPU thread: errors and losses, not speed, which only a
GPU's tensor cores have.

*stored*: `base.quantize`, products in bf16. *computed*: also `base.compute`, inputs and gradients rounded to 8 bits for the products with
the frozen base. All with `model.dtype = "bf16"`, on the Wan demo: 4 blocks of width 96, trained weights, a LoRA.

## {steps} steps of training

The same samples, noise and noise levels in every run.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    print(HEAD.format(torch=torch.__version__.partition("+")[0], steps=steps), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folders = {way: Path(temporary) / way.replace(" ", "-") for way in TRAINED}
        minutes = {way: train(folder, way, steps) for way, folder in folders.items()}
        print("\n".join(curves(folders, steps)), flush=True)
        print(
            f"\nMinutes of each run: "
            f"{', '.join(f'{way} {took:.1f}' for way, took in minutes.items())}."
        )
        print(
            f"\n## Gradients by layer, over {MICRO_BATCHES} micro-batches, after {steps} steps in "
            f"bf16\n"
        )
        print(
            "Norm of the difference from the gradient in fp32, relative to that gradient.\n",
            flush=True,
        )
        print("\n".join(errors(folders["bf16"])))


if __name__ == "__main__":
    main()
