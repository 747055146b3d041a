"""Filling the cache with the results of one encoder. Each result is stored at once, so that a
killed run continues where it stopped."""

import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from ditkit_core.distributed.torchrun import current_ranks
from ditkit_core.encoding.cache import Cache
from ditkit_core.errors import EnvironmentFault, UserError
from ditkit_core.io.console import say, warn
from ditkit_core.io.locks import acquire
from ditkit_core.io.memory import release_memory
from ditkit_core.models.conditions import Conditioner
from ditkit_core.models.encoders import Encoder

_ESTIMATED_FROM = 2
"""Number of entries that the size of the rest is estimated from; not 1, because the first caption
is the empty one, which may be short."""
_WORTH_REPORTING_BYTES = 10**9
_LOOK_SECONDS = 0.25
"""Between looks at what other processes encode."""

Progress = Callable[[str, int], AbstractContextManager[Callable[[float], None]]]
"""(stage, number of items) to a context whose function is called with the number of items finished
since its last call."""


def should_continue(error: UserError, *, keep_going: bool) -> bool:
    """Whether to leave out the sample of this error and continue; the machine's faults concern
    every sample."""
    return keep_going and not isinstance(error, EnvironmentFault)


def with_owner(name: str, error: UserError) -> UserError:
    """The error with the name of the clip it concerns: a message about a text alone does not say
    whose text it is."""
    return error if name in str(error) else error.at(name)


Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class EncodeTask(Generic[Item]):
    """All items for one encoder."""

    kind: str
    wanted: Mapping[str, Item]
    encoder: Encoder | Conditioner
    read: Callable[[Item], Any]
    """From an item to the encoder's input."""
    name: Callable[[Item], str]
    """From an item to its name in messages."""


def encode_missing(
    cache: Cache, jobs: EncodeTask[Item], progress: Progress, *, keep_going: bool = False
) -> dict[str, UserError]:
    """Encode the items that the cache lacks; the encoder is loaded for the first item that can be
    read.

    Several processes, ranks of a run among them, may do this for one cache at the same time: each
    item is claimed by one of them, and all return when the last entry is there. What a dead process
    has claimed, another one encodes. With `keep_going` the result says, by cache key, why items
    could not be read.
    """
    missing = [key for key in jobs.wanted if not cache.has(jobs.kind, key)]
    if not missing:
        return {}
    with ExitStack() as stack:
        advance = stack.enter_context(progress(jobs.kind, len(missing)))
        work = _Work(cache, jobs, keep_going, advance, stack)
        # once more: most of what another process had begun is there by now
        busy = work.encode(work.encode(missing))
        if busy:
            say(f"waiting for {len(busy)} of kind {jobs.kind} that other processes encode")
        while busy:
            time.sleep(_LOOK_SECONDS)
            busy = work.encode(busy)
    return work.failures


@dataclass
class _Work(Generic[Item]):
    """The items of one encoder that are still to be encoded."""

    cache: Cache
    jobs: EncodeTask[Item]
    keep_going: bool
    advance: Callable[[float], None]
    stack: ExitStack
    """Unloads the encoder at its end."""
    failures: dict[str, UserError] = field(default_factory=dict)
    loaded: bool = False
    sizes: list[int] = field(default_factory=list)

    def encode(self, keys: Sequence[str]) -> list[str]:
        """Encode what no other process has claimed; the keys of the rest."""
        waiting, busy = deque(keys), []
        # Not all that an encoder takes at once: some is left to the other ranks.
        at_once = min(self.jobs.encoder.items_at_once, -(-len(waiting) // current_ranks().size))
        while waiting:
            with ExitStack() as claims:
                inputs: dict[str, Any] = {}
                while waiting and len(inputs) < at_once:
                    key = waiting.popleft()
                    if self.cache.has(self.jobs.kind, key):
                        self.advance(1.0)
                    elif not claims.enter_context(claimed(self.cache.path(self.jobs.kind, key))):
                        busy.append(key)
                    elif self.cache.has(self.jobs.kind, key):  # encoded while it was being claimed
                        self.advance(1.0)
                    else:
                        self._read(key, inputs)
                if inputs:
                    self._store(inputs, len(waiting) + len(busy))
        return busy

    def _read(self, key: str, inputs: dict[str, Any]) -> None:
        """Read the encoder's input for an item into `inputs`, or note why it cannot be read."""
        try:
            # Decoded late: only missing items need it, and pixels take many times the memory of
            # latents.
            inputs[key] = self.jobs.read(self.jobs.wanted[key])
        except UserError as error:
            if not should_continue(error, keep_going=self.keep_going):
                raise
            self.failures[key] = error
            self.advance(1.0)

    def _store(self, inputs: Mapping[str, Any], num_left: int) -> None:
        """Encode some items at once, and store each result."""
        jobs = self.jobs
        # Loaded late: if no item can be read, there is no need to load a text encoder of 10 GB.
        if not self.loaded:
            jobs.encoder.load()
            self.stack.callback(release_memory)
            self.stack.callback(jobs.encoder.unload)
            self.loaded = True
        with torch.no_grad():
            try:
                encoded = jobs.encoder.encode(list(inputs.values()), self.advance)
            except UserError as error:
                # conditioners read their files themselves, so they fail here
                if not should_continue(error, keep_going=self.keep_going):
                    if isinstance(error, EnvironmentFault) or len(inputs) > 1:
                        raise
                    raise with_owner(jobs.name(jobs.wanted[next(iter(inputs))]), error) from error
                if len(inputs) > 1:  # one of them is bad, and nothing says which
                    for number, (key, item) in enumerate(inputs.items(), 1):
                        self._store({key: item}, num_left + len(inputs) - number)
                    return
                self.failures |= dict.fromkeys(inputs, error)
                self.advance(1.0)
                return
        for key, tensors in zip(inputs, encoded, strict=True):
            name = jobs.name(jobs.wanted[key])
            _check_finite(tensors, name, jobs.kind)
            self.cache.put(
                jobs.kind, key, tensors, {"source": name, "encoder": jobs.encoder.identity}
            )
            self.sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
            # Encoding may take hours: warn about a full disk while there is time to make room.
            if len(self.sizes) == _ESTIMATED_FROM:
                num_stored = list(inputs).index(key) + 1
                _report_room(self.cache, jobs.kind, self.sizes, num_left + len(inputs) - num_stored)


def _report_room(cache: Cache, kind: str, sizes: Sequence[int], count: int) -> None:
    """Report how much the cache will grow, or warn that the disk is too small, from the sizes of
    the first entries and the number left."""
    needed, free = count * sum(sizes) // len(sizes), shutil.disk_usage(cache.folder).free
    line = f"the cache {cache.folder} will grow by about {needed / 1e9:.1f} GB for {count} more entries of kind {kind}"
    if needed > free:
        warn(
            f"{line}, but only {free / 1e9:.1f} GB are free; make room, or set encode.cache to a "
            f"folder on another disk"
        )
    elif needed > _WORTH_REPORTING_BYTES:
        say(line)


def _check_finite(tensors: Mapping[str, Tensor], name: str, kind: str) -> None:
    # A NaN in the cache would end training hours later, in a step that says nothing about the file.
    remedies = {
        "text": "set encode.text_dtype to fp32",
        "media": "download the VAE's weights again",
    }
    remedy = remedies.get(
        kind, f"correct the file of its {kind}, or download the weights of that encoder again"
    )
    for part, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(f"{part} of {name} are not finite; {remedy}, or remove it")


@contextmanager
def claimed(entry: Path) -> Iterator[bool]:
    """Claim a cache entry for the block, without waiting for another process that has claimed it;
    yields whether this process may encode it.

    So several processes that share a cache encode each item once. A claim is a lock of the
    operating system on a file next to the entry. It ends with its process, also after kill -9, so
    that a dead process blocks nobody. Machines that share a cache need a file system whose locks
    work between them, as NFS's do. Where they do not, items are encoded by more than one process:
    entries are written atomically, so that this costs time and changes nothing.

    The claim is no promise that the entry is missing: look for it inside the block.
    """
    file = entry.with_name(f".{entry.stem}.claim")
    lock = FileLock(file)
    try:
        acquire(lock, file)
    except Timeout:
        yield False
        return
    except OSError as error:
        if not isinstance(error, PermissionError):  # another user's claim
            # without locks the file says nothing, and there would be one for each entry
            with suppress(OSError):
                file.unlink()
        # a folder that cannot be written or locked: writing the entry says what is wrong, if
        # anything
        yield True
        return
    try:
        yield True
    finally:
        # Before the release: a process that opens the file now gets a lock on it, and finds the
        # entry.
        with suppress(OSError):
            file.unlink()
        lock.release()
