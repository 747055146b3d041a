"""Filling the cache with the results of one encoder. Each result is stored at once, so that a killed run continues where it stopped."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ditkit_core.encoding.cache import Cache
from ditkit_core.errors import EnvironmentFault, UserError
from ditkit_core.io.console import say, warn
from ditkit_core.io.memory import release_memory
from ditkit_core.models.conditions import Conditioner
from ditkit_core.models.encoders import Encoder

_ESTIMATED_FROM = 2
"""Number of entries that the size of the rest is estimated from; not 1, because the first caption is the empty one, which may be short."""
_WORTH_REPORTING_BYTES = 10**9

Progress = Callable[[str, int], AbstractContextManager[Callable[[float], None]]]
"""(stage, number of items) to a context whose function is called with the number of items finished since its last call."""


def should_continue(error: UserError, *, keep_going: bool) -> bool:
    """Whether to leave out the sample of this error and continue; the machine's faults concern every sample."""
    return keep_going and not isinstance(error, EnvironmentFault)


def with_owner(name: str, error: UserError) -> UserError:
    """The error with the name of the clip it concerns: a message about a text alone does not say whose text it is."""
    return error if name in str(error) else error.at(name)


Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class EncodeTask(Generic[Item]):
    """All items for one encoder."""

    kind: str
    """Kind of the cache entries."""
    wanted: Mapping[str, Item]
    """Items by cache key."""
    encoder: Encoder | Conditioner
    read: Callable[[Item], Any]
    """From an item to the encoder's input."""
    name: Callable[[Item], str]
    """From an item to its name in messages."""


def encode_missing(
    cache: Cache, jobs: EncodeTask[Item], progress: Progress, *, keep_going: bool = False
) -> dict[str, UserError]:
    """Encode the items that the cache lacks; the encoder is loaded for the first item that can be read.

    Returns:
        By cache key, the reason why an item could not be read; empty unless `keep_going`.

    Raises:
        UserError: If an item cannot be read, or a result is not finite or cannot be stored.
    """
    missing = {key: item for key, item in jobs.wanted.items() if not cache.has(jobs.kind, key)}
    failures: dict[str, UserError] = {}
    if not missing:
        return failures
    with ExitStack() as stack:
        advance = stack.enter_context(progress(jobs.kind, len(missing)))
        loaded = False
        sizes: list[int] = []
        keys = list(missing)
        for first in range(0, len(keys), jobs.encoder.items_at_once):
            given: dict[str, Any] = {}
            for key in keys[first : first + jobs.encoder.items_at_once]:
                try:
                    # Decoded late: only missing items need it, and pixels take many times the memory of latents.
                    given[key] = jobs.read(missing[key])
                except UserError as error:
                    if not should_continue(error, keep_going=keep_going):
                        raise
                    failures[key] = error
                    advance(1.0)
            # Loaded late: if no item can be read, there is no need to load a text encoder of 10 GB.
            if given and not loaded:
                jobs.encoder.load()
                stack.callback(release_memory)
                stack.callback(jobs.encoder.unload)
                loaded = True
            with torch.no_grad():
                try:
                    encoded = jobs.encoder.encode(list(given.values()), advance) if given else []
                except UserError as error:  # conditioners read their files themselves, so they fail here
                    if not should_continue(error, keep_going=keep_going) or len(given) > 1:
                        if isinstance(error, EnvironmentFault) or len(given) > 1:
                            raise
                        raise with_owner(jobs.name(missing[next(iter(given))]), error) from error
                    failures |= dict.fromkeys(given, error)
                    advance(1.0)
                    continue
            for key, tensors in zip(given, encoded, strict=True):
                name = jobs.name(missing[key])
                _check_finite(tensors, name, jobs.kind)
                cache.put(jobs.kind, key, tensors, {"source": name, "encoder": jobs.encoder.identity})
                sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
                # Encoding may take hours: warn about a full disk while there is time to make room.
                if len(sizes) == _ESTIMATED_FROM:
                    _report_room(cache, jobs.kind, sizes, len(missing) - len(failures) - len(sizes))
    return failures


def _report_room(cache: Cache, kind: str, sizes: Sequence[int], count: int) -> None:
    """Report how much the cache will grow, or warn that the disk is too small, from the sizes of the first entries and the number left."""
    needed, free = count * sum(sizes) // len(sizes), shutil.disk_usage(cache.folder).free
    line = f"the cache {cache.folder} will grow by about {needed / 1e9:.1f} GB for {count} more entries of kind {kind}"
    if needed > free:
        warn(
            f"{line}, but only {free / 1e9:.1f} GB are free; make room, or set encode.cache to a folder on another disk"
        )
    elif needed > _WORTH_REPORTING_BYTES:
        say(line)


def _check_finite(tensors: Mapping[str, Tensor], name: str, kind: str) -> None:
    # A NaN in the cache would end training hours later, in a step that says nothing about the file.
    remedies = {"text": "set encode.text_dtype to fp32", "media": "download the VAE's weights again"}
    remedy = remedies.get(kind, f"correct the file of its {kind}, or download the weights of that encoder again")
    for part, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(f"{part} of {name} are not finite; {remedy}, or remove it")
