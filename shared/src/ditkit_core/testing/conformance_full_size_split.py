"""Checks of a model at its published size, divided over two to four devices that refuse to mix,
without memory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from ditkit_core.engine.engine import POLICIES
from ditkit_core.models.spec import ModelSpec
from ditkit_core.testing.full_size_split import Divided, balanced, divided_step


# torch_remat looks at the addresses of tensors, and fake ones have none.
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
class FullSizeSplitConformance:
    """Inherit, set what has no value here, and define `crossing`."""

    spec: ClassVar[ModelSpec]
    preset: ClassVar[str]
    size: ClassVar[tuple[int, int, int]]
    """Frames, height and width of an item."""
    few: ClassVar[Mapping[str, Any]]
    """Fields of an architecture of a few blocks, some of each kind."""
    all_blocks: ClassVar[tuple[str, int]]
    """A policy, and the number of devices, for a step of all blocks: it takes minutes."""
    most_apart: ClassVar[float]
    """By how many bytes the weights of two devices may differ: about the bytes of a block."""

    def crossing(self, arch: Any, cut: int) -> tuple[int, int]:
        """Tensors of the carry before this block, and the ones among them that come from adapters,
        whose gradients go back."""
        raise NotImplementedError

    def _items(self, arch: Any) -> Sequence[Mapping[str, Tensor]]:
        with torch.device("meta"):
            return [self.spec.training.empty_item(arch, self.size, ())]

    def _divided(
        self, arch: Any, num_devices: int, policy: str, patch: pytest.MonkeyPatch, *, steps: int = 1
    ) -> Divided:
        placement = balanced(self.spec, num_devices)
        divided = divided_step(
            self.spec,
            arch,
            placement,
            self._items(arch),
            policy=policy,
            rank=32,
            patch=patch,
            steps=steps,
        )
        divided.check()
        return divided

    @pytest.mark.parametrize(
        "policy",
        [
            pytest.param(
                policy, marks=pytest.mark.slow if policy == "full" else pytest.mark.exhaustive
            )
            for policy in POLICIES
        ],
    )
    def test_a_step_over_four_devices_sends_each_carry_once(
        self, policy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        arch = replace(self.spec.architecture.presets[self.preset], **self.few)
        divided = self._divided(arch, 4, policy, monkeypatch)
        transfers = [(carry["tensors"], carry["gradients"]) for carry in divided.carried]
        expected = [self.crossing(arch, cut) for cut in divided.placement.split_points]
        assert len(transfers) == 3 and transfers == expected
        kinds = {self.crossing(arch, cut) for cut in range(1, len(divided.placement.blocks))}
        assert set(expected) == kinds, "a cut of each kind"

    @pytest.mark.exhaustive
    @pytest.mark.timeout(1200)
    def test_all_blocks_do_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        policy, num_devices = self.all_blocks
        divided = self._divided(
            self.spec.architecture.presets[self.preset], num_devices, policy, monkeypatch, steps=2
        )
        live, peak = divided.ledger.live, divided.ledger.peak
        devices = list(dict.fromkeys(divided.placement.blocks))
        weight_bytes = [live[device]["weights"] for device in devices]
        print(
            policy,
            divided.placement.split_points,
            [f"{peak[device] / 2**30:.2f} GiB" for device in devices],
        )
        assert len(devices) == num_devices
        assert max(weight_bytes) - min(weight_bytes) < self.most_apart
