"""Filling the cache: one encoder's work, each result stored as soon as it is there, so that what was killed goes on where it stopped."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ditkit_core.encoding.cache import Cache
from ditkit_core.errors import MissingDependency, UserError
from ditkit_core.io.console import say, warn
from ditkit_core.io.memory import release_memory
from ditkit_core.models.conditions import Conditioner
from ditkit_core.models.encoders import Encoder

_JUDGED_BY = 2
"""Entries of a kind by which the size of the rest is judged; the first caption is the empty one, which some models keep short."""
_WORTH_TELLING_BYTES = 10**9

Progress = Callable[[str, int], AbstractContextManager[Callable[[float], None]]]
"""(what is done, how many) to a context in which the yielded function is told how much of that is done since."""


def should_continue(error: UserError, *, keep_going: bool) -> bool:
    """Whether the sample of an error is left out."""
    return keep_going and not isinstance(error, MissingDependency)


def with_owner(name: str, error: UserError) -> UserError:
    """An error with the name of what it is about: that a text is wrong does not say whose it is."""
    return error if name in str(error) else UserError(f"{name}: {error}")


Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class EncodeTask(Generic[Item]):
    """Everything that one encoder has to have encoded."""

    kind: str
    wanted: Mapping[str, Item]
    """By cache key."""
    encoder: Encoder | Conditioner
    read: Callable[[Item], Any]
    """An item to what the encoder takes."""
    name: Callable[[Item], str]
    """What a person calls the item."""


def encode_missing(
    cache: Cache, jobs: EncodeTask[Item], progress: Progress, *, keep_going: bool = False
) -> dict[str, UserError]:
    """Encode what the cache lacks, loading the encoder for the first item that can be read.

    Returns:
        By key, why items could not be read; empty unless `keep_going`.
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
                    # Decoded here, not where the file was checked: only what the cache lacks, and pixels are many
                    # times their latents.
                    given[key] = jobs.read(missing[key])
                except UserError as error:
                    if not should_continue(error, keep_going=keep_going):
                        raise
                    failures[key] = error
                    advance(1.0)
            # Late: where nothing can be read, a text encoder of 10 GB need not be.
            if given and not loaded:
                jobs.encoder.load()
                stack.callback(release_memory)
                stack.callback(jobs.encoder.unload)
                loaded = True
            with torch.no_grad():
                try:
                    encoded = jobs.encoder.encode(list(given.values()), advance) if given else []
                except UserError as error:  # conditioners read what they encode themselves
                    if not should_continue(error, keep_going=keep_going) or len(given) > 1:
                        if isinstance(error, MissingDependency) or len(given) > 1:
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
                # Hours may follow: that the disk will not do is said while there is time to do something.
                if len(sizes) == _JUDGED_BY:
                    _tell_room(cache, jobs.kind, sizes, len(missing) - len(failures) - len(sizes))
    return failures


def _tell_room(cache: Cache, kind: str, sizes: Sequence[int], count: int) -> None:
    """Say how large the cache grows, and warn hours before the disk is full, given the bytes of the first entries and how many follow."""
    needed, free = count * sum(sizes) // len(sizes), shutil.disk_usage(cache.folder).free
    line = f"the cache {cache.folder} takes about {needed / 1e9:.1f} GB more for {count} more of {kind}"
    if needed > free:
        warn(f"{line}, and {free / 1e9:.1f} GB are free there; make room, or set encode.cache to a folder elsewhere")
    elif needed > _WORTH_TELLING_BYTES:
        say(line)


def _check_finite(tensors: Mapping[str, Tensor], name: str, kind: str) -> None:
    remedies = {"text": "set encode.text_dtype to fp32", "media": "fetch the VAE's weights again"}
    remedy = remedies.get(kind, f"correct what its {kind} is made from, or fetch the weights of that encoder again")
    for part, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(f"{part} of {name} are not finite numbers; {remedy}, or remove it")
