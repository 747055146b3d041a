"""What a language model sees pictures with: pixels to the rows that stand at a picture's slots, one
layer of the tower after the other.

Source: `Qwen2_5_VisionTransformerPretrainedModel`, `Qwen3VLVisionModel`, `Qwen2VLImageProcessor` and
    `vision_utils.py` in huggingface/transformers.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pkgutil import resolve_name
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from numpy import ndarray
from torch import Tensor, nn

from ditkit_core.families.language_models import VisionTower
from ditkit_core.models.encoders import LayerContext

HOW_IT_SEES = "not padded, sees with"
"""How pixels become patches and rows among tokens, in the identity of caches in front of the
tower's fields. What encodes the same prompt otherwise, such as another resizing in `patches_of`, has other
words, or caches would give out stale features."""


def build_tower(tower: VisionTower, config: Mapping[str, Any], attention: str) -> nn.Module:
    """The tower of a configuration, on the default device."""
    make_config = resolve_name(f"transformers:{tower.name}Config")
    model: nn.Module = resolve_name(tower.module)(
        make_config.from_dict(dict(config), attn_implementation=attention)
    )
    return model


class Grid(NamedTuple):
    """Rows and columns of a picture's patches; `merge` of both become one slot."""

    rows: int
    columns: int
    merge: int

    @property
    def slots(self) -> tuple[int, int]:
        """Rows and columns of slots."""
        return self.rows // self.merge, self.columns // self.merge

    def positions(self) -> Int64[ndarray, "patches 2"]:
        """Row and column of each patch. Patches of one slot are together, slot after slot."""
        at = np.indices((self.rows, self.columns)).reshape(
            2, self.slots[0], self.merge, self.slots[1], self.merge
        )
        return at.transpose(1, 3, 2, 4, 0).reshape(-1, 2)

    def windows(self, side: int) -> tuple[Int64[ndarray, " slots"], list[int]]:
        """The slots in the order of windows of `side` slots, and the number of patches of each
        window."""
        row, column = np.indices(self.slots) // side
        window = (row * -(-self.slots[1] // side) + column).reshape(-1)
        sizes = np.bincount(window) * self.merge**2
        return np.argsort(window, kind="stable"), sizes.tolist()

    def table(self, side: int) -> tuple[Int64[ndarray, "patches 4"], Float32[ndarray, "patches 4"]]:
        """Where each patch is in a square table of `side` learned positions: its four neighbours
        there, and their weights."""
        taps, shares = [], []
        for index, size in zip(self.positions().T, (self.rows, self.columns), strict=True):
            at = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(1, size - 1))
            below = np.floor(at)
            taps.append((below.astype(np.int64)[:, None] + [0, 1]).clip(0, side - 1))
            distance = np.abs((at - below)[:, None] - np.array([0, 1], np.float32))
            shares.append((1 - distance).clip(0))
        indices = taps[0][:, :, None] * side + taps[1][:, None, :]
        return indices.reshape(-1, 4), (shares[0][:, :, None] * shares[1][:, None, :]).reshape(
            -1, 4
        )


class Patches(NamedTuple):
    """The pictures of one prompt, as their tower takes them."""

    pixels: Float[Tensor, "patches values"]
    grids: list[Grid]


def patches_of(
    vision: VisionTower, config: Any, pictures: Sequence[Float[Tensor, "3 _ _"]]
) -> Patches:
    """Cut pictures, at least one, into normalised patches, each twice, for two frames of a video.

    Args:
        config: Configuration of the tower in transformers.
        pictures: Pixels in [-1, 1].
    """
    patch, merge, frames = config.patch_size, config.spatial_merge_size, config.temporal_patch_size
    factor = patch * merge
    mean, deviation = (
        torch.tensor(values)[:, None, None] * 255 for values in (vision.mean, vision.deviation)
    )
    rows, grids = [], []
    for picture in pictures:
        height, width = vision.grid(picture.shape[-2], picture.shape[-1], factor)
        # Of 8 bits, as the processor resizes them: overshoot is cut between its two passes.
        image = ((picture + 1) * 127.5).round().to(torch.uint8)
        if picture.shape[-2:] != (height * factor, width * factor):
            size = height * factor, width * factor
            image = nn.functional.interpolate(image[None], size, mode="bicubic", antialias=True)[0]
        squares = ((image - mean) / deviation).reshape(3, height, merge, patch, width, merge, patch)
        squares = squares.permute(1, 4, 2, 5, 0, 3, 6)[..., None, :, :]
        squares = squares.expand(-1, -1, -1, -1, -1, frames, -1, -1)
        rows.append(squares.reshape(height * width * merge**2, -1))
        grids.append(Grid(height * merge, width * merge, merge))
    return Patches(torch.cat(rows), grids)


class Sight(NamedTuple):
    """What a model sees of the pictures of one prompt."""

    slots: Int64[Tensor, " slots"]
    """The tokens that are slots, in order."""
    rows: Float[Tensor, "slots width"]
    """What stands there instead of the slot's embedding."""
    deeper: Sequence[Float[Tensor, "slots width"]] = ()
    """What is added there behind the first layer, the second, …"""

    def put(self, hidden: Float[Tensor, "1 tokens width"]) -> None:
        """Replace embeddings."""
        hidden[0].index_copy_(0, self.slots, self.rows.to(hidden.dtype))

    def add(self, hidden: Float[Tensor, "1 tokens width"], layer: int) -> None:
        """Add what belongs behind a layer, counted from 0."""
        if layer < len(self.deeper):
            state = hidden[0]
            state.index_copy_(0, self.slots, state[self.slots] + self.deeper[layer].to(state.dtype))


class _Prompt:
    """The pictures of one prompt on their way through the tower."""

    def __init__(self, patches: Patches, tower: Any, device: torch.device):
        self.patches, self.tower, self.device = patches, tower, device
        self.hidden = patches.pixels.to(device)
        self.deeper: list[Tensor] = []
        self.order: Tensor | None = None
        pictures = [grid.rows * grid.columns for grid in patches.grids]
        # An array and not a tensor: attention splits by its numbers, which a plan has to know.
        self.pictures = self.windows = np.cumsum([0, *pictures])

    def enter(self, rotary: nn.Module) -> None:
        """Compute positions, and bring windows together."""
        grids, config = self.patches.grids, self.tower.config
        positions = np.concatenate([grid.positions() for grid in grids])
        self.table = tuple(rotary(self.hidden, torch.tensor(positions).to(self.device)))
        if side := getattr(config, "window_size", 0):  # Qwen2.5-VL
            divided = [grid.windows(side // config.patch_size // grid.merge) for grid in grids]
            starts = np.cumsum([0, *(len(order) for order, _ in divided)])
            orders = [start + order for start, (order, _) in zip(starts, divided, strict=False)]
            self.order = torch.tensor(np.concatenate(orders)).to(self.device)
            self.windows = np.cumsum([0, *(size for _, sizes in divided for size in sizes)])
            self.hidden = self._ordered(self.hidden)
            self.table = tuple(map(self._ordered, self.table))

    def _ordered(self, rows: Tensor) -> Tensor:
        assert self.order is not None
        return rows.reshape(len(self.order), -1, rows.shape[-1])[self.order].reshape(rows.shape)

    def learned_positions(self, embedding: nn.Module) -> Tensor:
        """What is added to patches where positions are learned."""
        tables = [grid.table(self.tower.num_grid_per_side) for grid in self.patches.grids]
        indices, weights = (
            torch.tensor(np.concatenate(parts)).to(self.device)
            for parts in zip(*tables, strict=True)
        )
        positions: Tensor = (embedding(indices) * weights[:, :, None]).sum(1)
        return positions.to(self.hidden.dtype)

    def merged(self, merger: nn.Module) -> Tensor:
        """A row for each slot, in the order of the pictures."""
        rows: Tensor = merger(self.hidden)
        return rows if self.order is None else rows[self.order.argsort()]


def seen_rows(
    tower: Any,
    prompts: Sequence[Patches],
    device: torch.device,
    passing: Callable[[], LayerContext],
) -> list[tuple[Tensor, list[Tensor]]]:
    """Run the pictures of some prompts through the tower, one layer after the other: for each
    prompt the rows of its slots, and the rows of `Sight.deeper`.

    Args:
        tower: The tower of transformers, `visual` of the model whose layers `passing` names.
        device: Of the weights.
        passing: Makes a context that loads one layer at a time; each call makes another one with
            its own memory.
    """
    states = [_Prompt(patches, tower, device) for patches in prompts]
    rotary = type(tower.rotary_pos_emb)(tower.config).to(device)
    outer, layer_context = passing(), passing()
    with outer("visual.patch_embed") as embedding:
        for state in states:
            state.hidden = embedding(state.hidden)
    if getattr(tower.config, "num_position_embeddings", 0):  # Qwen3-VL
        with outer("visual.pos_embed") as embedding:
            for state in states:
                state.hidden = state.hidden + state.learned_positions(embedding)
    for state in states:
        state.enter(rotary)
    num_blocks = len(tower.blocks)
    everywhere = getattr(tower.config, "fullatt_block_indexes", range(num_blocks))
    deepstack = list(getattr(tower.config, "deepstack_visual_indexes", ()))
    for layer in range(num_blocks):
        with layer_context(f"visual.blocks.{layer}") as block:
            for state in states:
                ends = state.pictures if layer in everywhere else state.windows
                state.hidden = block(state.hidden, ends, position_embeddings=state.table)
        if layer in deepstack:
            name = f"visual.deepstack_merger_list.{deepstack.index(layer)}"
            with outer(name) as merger:
                for state in states:
                    state.deeper.append(state.merged(merger))
    with outer("visual.merger") as merger:
        return [(state.merged(merger), state.deeper) for state in states]


def mrope_positions(
    is_slot: Sequence[bool], sizes: Sequence[tuple[int, int]]
) -> Int64[Tensor, "3 1 tokens"]:
    """Where each token of a prompt is in time, height and width: a text's tokens advance on all
    three axes, a picture's only in height and width, and what follows is behind its longer side.

    Args:
        sizes: Rows and columns of slots of each picture, in order; they say where one of two
            pictures that touch ends.
    """
    parts, start, left = list[Tensor](), 0, iter(sizes)
    for is_picture, run in groupby(is_slot):
        length = len(list(run))
        if not is_picture:
            parts.append(torch.arange(start, start + length).expand(3, -1))
            start, length = start + length, 0
        while length:
            rows, columns = next(left)
            at = np.indices((1, rows, columns)).reshape(3, -1)
            parts.append(torch.tensor(at) + start)
            start, length = start + max(rows, columns), length - rows * columns
    return torch.cat(parts, 1)[:, None]
