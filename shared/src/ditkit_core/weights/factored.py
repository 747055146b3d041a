"""The adapter of one module as a LoKr or LoHa, apart from any model."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from ditkit_core.nn.factored import PARTS, weight_change
from ditkit_core.weights.fused_tensors import rows_of

METHOD_OF_PART = {part: method for method, parts in PARTS.items() for part in parts}
"""The method that a part belongs to: `lokr` or `loha`."""


@dataclass(frozen=True)
class FactoredMatrices:
    """One module's LoKr or LoHa, in fp32, without its scaling."""

    parts: Mapping[str, Tensor]
    index: int = 0
    """Of a module that shares the adapter with others: its place among equal parts of the rows."""
    of: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """The shape [out, in] of the module's weight."""
        out, width = shape_of_parts(self._shapes)
        return out // self.of, width

    @property
    def rank(self) -> int:
        """The rank that an alpha in a file is divided by; 1 where no factor is a low-rank
        product."""
        return low_rank_of(self._shapes) or 1

    @property
    def _shapes(self) -> "Shapes":
        return {part: tuple(tensor.shape) for part, tensor in self.parts.items()}

    def change(self) -> Tensor:
        """The change of the module's weight."""
        return rows_of(weight_change(self.parts), self.index, self.of)

    def scaled(self, factor: float) -> "FactoredMatrices":
        """The same adapter with a change that is `factor` times as large."""
        first = first_part(self.parts)
        return replace(self, parts={**self.parts, first: self.parts[first] * factor})

    def converted(self, convert: Callable[[Tensor], Tensor]) -> "FactoredMatrices":
        """The adapter of the converted tensors."""
        return replace(self, parts={part: convert(tensor) for part, tensor in self.parts.items()})


def first_part(parts: Collection[str]) -> str:
    """The part that a file has the scale in."""
    return next(part for part in ("lokr_w1", "lokr_w1_a", "hada_w1_a") if part in parts)


Shapes = Mapping[str, tuple[int, ...]]


def are_factors(shapes: Shapes) -> bool:
    """Whether parts of these shapes are a LoKr or a LoHa of matrices."""
    if any(len(shape) != 2 or 0 in shape for shape in shapes.values()):
        return False
    if all(part in shapes for part in PARTS["loha"]):
        (rows, rank), (other, width) = shapes["hada_w1_a"], shapes["hada_w1_b"]
        alike = shapes["hada_w2_a"][0] == rows and shapes["hada_w2_b"][1] == width
        return (
            len(shapes) == 4
            and rank == other
            and alike
            and shapes["hada_w2_a"][1] == shapes["hada_w2_b"][0]
        )
    pairs = 0
    for factor in ("lokr_w1", "lokr_w2"):
        first, second = shapes.get(f"{factor}_a"), shapes.get(f"{factor}_b")
        pairs += 2 if first and second else 1
        is_pair = first is not None and second is not None and first[1] == second[0]
        if (factor in shapes) == is_pair or (first is None) != (second is None):
            return False
    return len(shapes) == pairs


def shape_of_parts(shapes: Shapes) -> tuple[int, int]:
    """The shape [out, in] of the weight that complete parts change."""
    if "hada_w1_a" in shapes:
        return shapes["hada_w1_a"][0], shapes["hada_w1_b"][1]
    sizes = [
        shapes[factor] if factor in shapes else (shapes[f"{factor}_a"][0], shapes[f"{factor}_b"][1])
        for factor in ("lokr_w1", "lokr_w2")
    ]
    return sizes[0][0] * sizes[1][0], sizes[0][1] * sizes[1][1]


def low_rank_of(shapes: Shapes) -> int | None:
    """The rank that an alpha in a file is divided by, as ComfyUI and LyCORIS do; None where no
    factor is a low-rank product."""
    for part in ("hada_w1_b", "lokr_w2_b", "lokr_w1_b"):
        if part in shapes:
            return shapes[part][0]
    return None


def rank_of_parts(shapes: Shapes) -> int:
    """The rank of complete parts; a second factor of a LoKr that is stored whole has its larger
    side as rank."""
    if "lokr_w2" in shapes:
        return max(shapes["lokr_w2"])
    return low_rank_of(shapes) or 1
