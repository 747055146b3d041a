"""Encoding as a stage of a run."""

from pathlib import Path

import pytest
import torch
from toy_world import World


def test_the_device_at_work_becomes_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the encoders, then that of the transformer."""
    calls: list[tuple[str, set[torch.device]]] = []

    def recorder(module: str):
        return lambda devices: calls.append((module, set(devices)))

    for module in ("run.encoding", "loading.weights"):
        monkeypatch.setattr(f"ditkit_core.{module}.make_current", recorder(module))
    monkeypatch.chdir(tmp_path)
    assert World(tmp_path).train("run", 1, "--train.device", "cpu", "--encode.device", "cpu") == 0
    cpu = {torch.device("cpu")}
    assert calls[0] == ("run.encoding", cpu) and ("loading.weights", cpu) in calls
