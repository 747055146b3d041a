"""What a device contains of an optimizer's state that is streamed."""

from torch import Tensor

from ditkit_core.engine.block_swap import BlockSwap


def state_buffers(swap: BlockSwap) -> list[Tensor]:
    """Buffers on the devices for optimizer state, which come with an optimizer; like
    `BlockSwap.buffers`, to measure what the devices contain."""
    queues = swap._queues.values()
    return [part.buffer for queue in queues for part in queue.of_optimizer()]
