"""What a process of its own gets from the one that starts it."""

import pytest
import torch

from ditkit_core.io.worker_process import visible_devices


@pytest.mark.parametrize(
    ("device", "seen", "visible"),
    [
        ("cpu", None, ""),
        ("cuda", None, "0"),
        ("cuda:1", None, "1"),
        ("cuda:1", "3, GPU-ab", "GPU-ab"),
        ("cuda:0", "5", "5"),
    ],
)
def test_the_process_sees_its_device_alone(device: str, seen: str | None, visible: str) -> None:
    environment = {} if seen is None else {"CUDA_VISIBLE_DEVICES": seen}
    assert visible_devices(torch.device(device), environment) == visible
