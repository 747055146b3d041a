"""Samples that two ranks generate, for `sampling/test_shares.py`."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.distributed.ranks import Ranks, world
from ditkit_core.distributed.shards import Shards
from ditkit_core.models.encoders import GenerationRequest
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import run_plain
from ditkit_core.sampling.denoise import single_stage
from ditkit_core.sampling.render import PromptRequest, SampleFiles, render_samples
from ditkit_core.sampling.shares import ALONE, SampleShares
from ditkit_core.testing.toy import TOY, ToyArch, ToySampler
from ditkit_core.testing.world import make_model

ARCH = ToyArch(dim=32, depth=2)
SIZES = {
    "images": ((1, 16, 16), (1, 32, 16), (1, 16, 16)),
    "clips": ((9, 32, 16), (1, 16, 16), (17, 16, 32)),
}
"""Frames, height and width of each sample: three, so that one of two ranks has two of them."""


def requests_for(name: str) -> list[PromptRequest]:
    """A sample of each size, with a seed of its own."""
    made = []
    for seed, (frames, height, width) in enumerate(SIZES[name]):
        text = torch.randn(4, ARCH.text_dim, generator=torch.Generator().manual_seed(seed))
        job = GenerationRequest(
            conditions={"text": text}, negative=None, references=[], frames=frames, height=height,
            width=width,
            steps=2, guidance=1.0, shift=0.0, seed=seed,
        )  # fmt: skip
        made.append(PromptRequest(number=seed, prompt=f"number {seed}", job=job))
    return made


def rendered(name: str, folder: Path, shares: SampleShares) -> list[str]:
    """Generate the samples with the toy, and return the files that this rank knows of."""
    model: Any = make_model(TOY, ARCH)
    if shares.in_step:
        precision = Precision(matmul=torch.float32)
        Shards(model, trainable_parameters(model), precision, shares.ranks, torch.device("cpu"))
    to, stages = (
        SampleFiles(folder=folder, stem="step-000002", fps=8.0),
        single_stage(model, run_plain),
    )
    files = render_samples(
        stages, ToySampler(torch.device("cpu")), requests_for(name), to, lambda: None, shares
    )
    return [file.name for file in files]


def over_ranks() -> dict[str, Any]:
    """By case, the files that this rank knows of, and on the first rank the digests of those in the
    folder."""
    ranks, base, found = world() or Ranks(), Path(os.environ["RANKS_FOLDER"]), dict[str, Any]()
    both = SampleShares(ranks=ranks, num=2)
    for name in SIZES:
        cases = {
            "both": both,
            "first": replace(both, num=1),
            "divided": replace(both, ranks=replace(ranks, shard=2)),
            **({"alone": ALONE} if ranks.is_first else {}),
        }
        for case, shares in cases.items():
            folder = base / f"{name} {case}"
            files = rendered(name, folder, shares)
            written = sorted(folder.iterdir()) if ranks.is_first else []
            digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in written}
            found[f"{name} {case}"] = {"files": files, "digests": digests}
    return found
