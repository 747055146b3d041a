"""Compiled Wan blocks, of every variant."""

from pathlib import Path
from typing import ClassVar

from ditkit_core.testing.conformance_compile import CompileConformance


class TestCompiled(CompileConformance):
    folder = Path(__file__).parent
    script = folder / "support" / "compiled_wan.py"
    trained = ("full", "float32")
    # blocks of every kind; what else variants have is in their embedding and in what plain blocks take
    in_pairs = ("TestVace", "TestWanToDance")
    # the grids of music; others know one sample and several, each once of a size and then of any
    graphs_of_sizes: ClassVar = {"TestWanToDance": 1}
