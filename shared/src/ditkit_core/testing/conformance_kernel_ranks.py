"""Checks of a model that several ranks train with the Triton kernels: the same training as in one
process, and as with torch."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from ditkit_core.testing.conformance_sharded import EXACT, ROUNDED, Limits, check_training
from ditkit_core.testing.kernel_ranks import STEPS, WORLDS, main
from ditkit_core.testing.ranks import once
from ditkit_core.testing.replicas import BRIEF
from ditkit_core.testing.scripts import printed
from ditkit_core.testing.suite_process import ProcessChecks

BLOCKS = {"norm_rotation", "norm_rotation_backward", "affine_norm", "affine_norm_backward"}
_LORA = {"factor_parts", "product_parts", "term_sums"}
OTHERS = {
    "brief lora": _LORA,
    "brief full, stochastic": {"round_stochastic"},
    "brief full, split": {"round_split", "join_split"},
    "brief lora on nf4": _LORA | {"dequantize_nf4"},
}
"""Kernels of a case besides the kernels of blocks."""


class KernelRanksConformance(ProcessChecks):
    """Inherit, set `spec` and an `arch` of one block of each kind, and define `items` of few
    tokens, an odd number among them."""

    cases: ClassVar[Sequence[str]]
    """Names of `BRIEF`: those that are trained."""
    more: ClassVar[Sequence[str]] = ()
    """Kernels of the family's blocks besides `BLOCKS`."""
    without: ClassVar[Sequence[str]] = ()
    """Kernels of `BLOCKS` that the family's blocks lack: of layer norms, where they have others."""

    @pytest.fixture
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The folder that the script writes; it runs once for all tests."""
        return Path(self._made(tmp_path_factory)["folder"])

    @pytest.fixture
    def launches(self, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        """By world, what each rank launched."""
        return dict(self._made(tmp_path_factory)["launches"])

    def _made(self, tmp_path_factory: pytest.TempPathFactory) -> Any:
        pytest.importorskip("triton")
        return once(tmp_path_factory.getbasetemp(), self.work_name(), self._run)

    @classmethod
    def work(cls) -> None:
        """The cases with torch and with the kernels."""
        main(cls.spec, cls.arch, cls().items(2, ragged=True), cls.cases)

    @classmethod
    def _run(cls, folder: Path) -> dict[str, Any]:
        folder.mkdir()
        try:
            script, arguments = cls.command()
            launches = printed(
                script, str(folder), *arguments, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"
            )
        except subprocess.TimeoutExpired as error:
            raise AssertionError(str(error)) from error
        return {"folder": str(folder), "launches": launches}

    def test_ranks_train_with_kernels_what_one_process_trains(self, folder: Path) -> None:
        """Losses, norms, gradients and weights within the tolerance of sums over ranks in another
        order."""
        for world in WORLDS:
            for name in world.cases(self.cases):
                run, alone = (folder / "triton" / f"{name} on {size}" for size in (world, 1))
                check_training(run, alone, _limits(name), STEPS)

    def test_kernels_train_what_torch_trains(self, folder: Path) -> None:
        """Within the same tolerance."""
        for name in self.cases:
            run, plain = (folder / kernels / f"{name} on 1" for kernels in ("triton", "torch"))
            check_training(run, plain, _limits(name), STEPS)

    def test_each_kernel_runs_on_every_rank(self, launches: dict[str, Any]) -> None:
        assert launches.pop("torch on 1") == [{name: [] for name in self.cases}]
        assert launches.keys() == {f"triton on {size}" for size in (1, *WORLDS)}
        for world, ranks in launches.items():
            for rank in ranks:
                for name, ran in rank.items():
                    blocks = BLOCKS - set(self.without) | set(self.more)
                    assert set(ran) == blocks | OTHERS.get(name, set()), (world, name)


def _limits(name: str) -> Limits:
    return ROUNDED if BRIEF[name].dtype == torch.bfloat16 else EXACT
