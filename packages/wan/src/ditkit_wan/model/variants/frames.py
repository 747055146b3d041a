"""What variants share that add a signal of time: a causal convolution along it, and the tokens of a
clip by latent frame."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class CausalConv(nn.Module):
    """A convolution over time that sees no later row; the first row is repeated in front."""

    def __init__(self, channels: int, out_channels: int, stride: int, dtype: torch.dtype):
        """Set the sizes.

        Args:
            channels: Channels of the input.
            out_channels: Channels of the output.
            stride: Rows of the input per row of the output.
            dtype: Dtype that is computed in.
        """
        super().__init__()
        self.dtype = dtype
        self.conv = nn.Conv1d(channels, out_channels, 3, stride=stride)

    def forward(
        self, x: Float[Tensor, "batch rows channels"]
    ) -> Float[Tensor, "batch fewer_rows out_channels"]:
        conv = self.conv
        padded = F.pad(x.transpose(1, 2), (2, 0), mode="replicate")
        y = F.conv1d(padded, conv.weight.to(self.dtype), conv.bias.to(self.dtype), conv.stride)  # type: ignore[union-attr]
        return y.transpose(1, 2)


def by_frame(
    tokens: Float[Tensor, "batch tokens *dims"], grids: Sequence[tuple[int, int, int]]
) -> Float[Tensor, "frames frame_tokens *dims"]:
    """The tokens of every latent frame of every clip, padded with zeros where frames differ in
    size."""
    if len(set(grids)) == 1:
        f, h, w = grids[0]
        return tokens[:, : f * h * w].unflatten(1, (f, h * w)).flatten(0, 1)
    clips = [
        row[: f * h * w].unflatten(0, (f, h * w))
        for row, (f, h, w) in zip(tokens, grids, strict=True)
    ]
    largest = max(clip.shape[1] for clip in clips)
    padding = [0, 0] * (tokens.ndim - 2)
    return torch.cat([F.pad(clip, (*padding, 0, largest - clip.shape[1])) for clip in clips])


def by_sample(
    rows: Float[Tensor, "frames frame_tokens dim"],
    grids: Sequence[tuple[int, int, int]],
    length: int,
) -> Float[Tensor, "batch tokens dim"]:
    """The reverse: zeros for all that follows a clip's tokens."""
    clips = rows.split([f for f, _, _ in grids])
    flat = [clip[:, : h * w].flatten(0, 1) for clip, (_, h, w) in zip(clips, grids, strict=True)]
    return torch.stack([F.pad(clip, (0, 0, 0, length - len(clip))) for clip in flat])


def without_padding(
    rows: Float[Tensor, "batch frames *dims"], frames: Sequence[int]
) -> Float[Tensor, " all *dims"]:
    """The rows of all frames of all samples.

    Args:
        rows: Rows of each sample, padded to the longest.
        frames: Number of frames of each sample.
    """
    if set(frames) == {rows.shape[1]}:
        return rows.flatten(0, 1)
    return torch.cat([row[:count] for row, count in zip(rows, frames, strict=True)])
