"""The adapter of one module in a file: its keys, and the matrices behind them."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ditkit_core.adapters.dora import is_over_base
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.state_dict import TensorSlice
from ditkit_core.weights.factored import METHOD_OF_PART, FactoredMatrices
from ditkit_core.weights.fused_tensors import LoraMatrices


@dataclass(frozen=True)
class FileAdapter:
    """The adapter of one module in the file, which may be several modules of ours."""

    name: str
    """The module's name in the file."""
    keys: Mapping[str, str]
    """The file's key by part: `down`, `up`, perhaps `magnitude`, or the parts in `nn/factored.py: PARTS`; perhaps `alpha`."""
    parts: tuple[TensorSlice, ...]
    """The parts of our modules that make up its rows."""
    rank: int
    scale: float
    """The factor of the change."""
    method: str = "lora"
    """`lora`, `lokr` or `loha`."""

    def rows(self, source: SafetensorsSource, index: int, columns: Tensor | None = None) -> LoraMatrices:
        """Read the LoRA of one of its parts.

        Args:
            index: The part.
            columns: Indices of the columns of B, and rows of A, to read; None for all.
        """

        def read(part: str) -> Tensor:
            return source.read(self.keys[part], index=index, of=len(self.parts)).float()

        down, up = source.read(self.keys["down"]).float().flatten(1), read("up").flatten(1)
        if columns is not None:
            down, up = down[columns], up[:, columns]
        magnitude = read("magnitude").flatten() if "magnitude" in self.keys else None
        return LoraMatrices(down, up, magnitude, magnitude is not None and is_over_base(source.metadata))

    def matrices(self, source: SafetensorsSource, index: int) -> FactoredMatrices:
        """Read the LoKr or LoHa of one of its parts."""
        tensors = {part: source.read(key).float() for part, key in self.keys.items() if part in METHOD_OF_PART}
        return FactoredMatrices(tensors, index, len(self.parts))
