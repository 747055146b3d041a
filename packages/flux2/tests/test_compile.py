"""Each kind of block compiles as one graph. Nothing compiles them yet; this keeps the way open."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.15", reason="torch 2.11 cannot trace ContextVar.get, 2.15 can")
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_every_kind_of_block_compiles_whole_and_keeps_its_numbers(kind):
    """The plain compositions that run under a compiler sum in another order: some fp32 roundings of 6e-8 each.

    In a process of its own: the type checks of tests cannot be traced.
    """
    script = Path(__file__).parent / "compiled_blocks.py"
    ran = subprocess.run([sys.executable, str(script), kind], check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert len(found) == 3 and found["Flux2Join"] == 0
    assert max(found.values()) <= 2e-6, found
