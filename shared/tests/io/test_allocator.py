"""The allocator's settings, which have to be in the environment before torch is imported."""

import json
import os
import subprocess
import sys

import pytest

from ditkit_core.io import allocator, worker_process
from ditkit_core.io.allocator import allocator_settings

SET = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_segments_expand_unless_the_user_has_set_the_allocator(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(allocator, "_OF_WINDOWS", tmp_path / "dxg")
    assert allocator_settings({"HOME": "/"}) == SET
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert allocator_settings({name: "max_split_size_mb:128"}) == {}
    (tmp_path / "dxg").touch()  # a Linux inside of Windows
    assert allocator_settings({}) == {}
    (tmp_path / "dxg").unlink()
    monkeypatch.setattr(sys, "platform", "win32")
    assert allocator_settings({}) == {}


SCRIPT = """
import json, os, sys
from ditkit_core.commands import cli
from ditkit_core.config import cli_args

seen = []
original = cli_args.read_flags
cli.read_flags = lambda *given, **named: seen.append(("torch" in sys.modules, os.environ.get("PYTORCH_ALLOC_CONF"))) or original(*given, **named)
family = cli.Family(name="toy", presets=(), demo=None, spec=None)
assert cli.start(family, "train", ["--print-schema"]) == 0
print(json.dumps(seen))
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="elsewhere torch has no such segments"
)
@pytest.mark.parametrize("given", [None, "backend:cudaMallocAsync"])
def test_a_command_sets_it_before_torch_is_imported(given):
    environment = {
        name: value for name, value in os.environ.items() if name not in allocator._NAMES
    }
    if given is not None:
        environment["PYTORCH_ALLOC_CONF"] = given
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [[False, given or SET["PYTORCH_ALLOC_CONF"]]]


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="elsewhere torch has no such segments"
)
def test_the_process_of_previews_gets_it_too(monkeypatch):
    import torch

    for name in allocator._NAMES:
        monkeypatch.delenv(name, raising=False)
    assert SET.items() <= worker_process._environment(torch.device("cpu")).items()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.8")
    assert "PYTORCH_ALLOC_CONF" not in worker_process._environment(torch.device("cpu"))
