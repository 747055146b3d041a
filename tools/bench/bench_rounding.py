"""Full fine-tuning in bf16 where rounding to nearest stalls, against fp32 weights: the table of the
documentation.

    uv run tools/bench/bench_rounding.py  # in under two minutes on one CPU thread
    uv run tools/bench/bench_rounding.py --steps 2000 --lr 3e-6

A small transformer (the toy of the conformance checks) learns the velocities of another one whose
weights are 2 % away, at a constant learning rate of which bf16 keeps few updates. Every row starts
at the same values, which bf16 has, and trains with the same samples and the same optimizer, AdamW;
what differs is the dtype of weights and matmuls, and how an update is written. Printed: the loss
left, as a share of that before, computed in fp32 from the weights that an export would have; the
share of weights that moved; and bytes per weight that the step keeps.
"""

import argparse
import copy

import torch
from torch import Tensor, nn

from ditkit_core.testing.toy import TOY, ToyArch, ToyInputs
from ditkit_core.testing.world import make_model
from ditkit_core.training.optim.optimizer import NamedOptimizer
from ditkit_core.training.optim.optimizers import OptimConfig

ROWS = {
    "fp32": (torch.float32, "nearest"),
    "bf16, to nearest": (torch.bfloat16, "nearest"),
    "bf16, stochastic": (torch.bfloat16, "stochastic"),
    "bf16, split": (torch.bfloat16, "split"),
}


def inputs(step: int) -> ToyInputs:
    """Latents, noise levels and texts that are a function of the step."""
    random = torch.Generator().manual_seed(step)
    latents = [torch.randn(4, 2, 4, 4, generator=random) for _ in range(4)]
    return ToyInputs(
        latents,
        torch.rand(4, generator=random),
        [torch.randn(5, 8, generator=random) for _ in range(4)],
    )


def error(model: nn.Module, teacher: nn.Module, step: int) -> Tensor:
    """Mean squared difference of the velocities."""
    made = inputs(step)
    with torch.no_grad():
        wanted = teacher(made)
    return torch.stack(
        [(a - b).square().mean() for a, b in zip(model(made), wanted, strict=True)]
    ).mean()


def measured(model: nn.Module, teacher: nn.Module, arch: ToyArch) -> float:
    """The same for held-out samples, with the model's weights in fp32."""
    wide = make_model(TOY, arch)
    wide.load_state_dict(model.state_dict())
    with torch.no_grad():
        return float(torch.stack([error(wide, teacher, 10**6 + i) for i in range(16)]).mean())


def row(name: str, teacher: nn.Module, arch: ToyArch, args: argparse.Namespace) -> str:
    """Train, and describe the result."""
    dtype, rounding = ROWS[name]
    model = make_model(TOY, arch, dtype=dtype)
    model.load_state_dict(make_model(TOY, arch, dtype=torch.bfloat16).state_dict())
    trained = dict(model.named_parameters())
    before = {one: weight.detach().clone() for one, weight in trained.items()}
    optimizer = NamedOptimizer(
        trained, OptimConfig(lr=args.lr, weight_decay=0.0, rounding=rounding)
    )
    start = measured(model, teacher, arch)
    for step in range(args.steps):
        optimizer.zero_grad()
        optimizer.begin(args.seed, step)
        error(model, teacher, step).backward()
        optimizer.step(args.lr)
    matrices = [one for one, weight in trained.items() if not TOY.precision.keep_fp32(one)]
    moved = sum(int((trained[one] != before[one]).sum()) for one in matrices) / sum(
        before[o].numel() for o in matrices
    )
    count = sum(weight.numel() for weight in trained.values())
    tensors = [*trained.values(), *optimizer.gradients().values(), *optimizer.state()[0].values()]
    kept = sum(tensor.nbytes for tensor in tensors) / count
    left = measured(model, teacher, arch)
    return f"| {name} | {left / start:.3f} | {moved:.0%} | {kept:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    arch = ToyArch(dim=args.width, depth=2)
    teacher = copy.deepcopy(make_model(TOY, arch))
    random = torch.Generator().manual_seed(1)
    for parameter in teacher.parameters():
        parameter.data *= 1 + 0.02 * torch.randn(parameter.shape, generator=random)
    teacher.requires_grad_(False)
    print(
        f"torch {torch.__version__}, width {args.width}, {args.steps} steps of AdamW at {args.lr:g}"
    )
    print(
        "| weights | loss left | weights that moved | bytes per weight: weight, gradient, state "
        "|\n|---|---|---|---|"
    )
    for name in ROWS:
        print(row(name, teacher, arch, args), flush=True)


if __name__ == "__main__":
    main()
