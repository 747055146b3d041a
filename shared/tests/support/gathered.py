"""What the first of ranks that divide weights has of whole ones."""

from collections.abc import Callable
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef

from ditkit_core.distributed.shards import Shards


def log_gathered(log: Callable[[int, int], object]) -> None:
    """Log, for each weight that the first rank gathers from now on: bytes of all that are alive,
    and of this one."""
    gather, alive = Shards._gather, list[tuple[StorageWeakRef, int]]()

    def logged(*given: Any) -> Any:
        if (found := gather(*given)) is not None:
            alive[:] = [each for each in alive if not each[0].expired()]
            alive.append((StorageWeakRef(found.untyped_storage()), found.nbytes))
            log(sum(size for _, size in alive), found.nbytes)
        return found

    Shards._gather = logged  # type: ignore[method-assign]
