"""The encode stage: every clip and caption once through its encoder, into the cache.

The only stage that loads a VAE or a text encoder, one at a time, and neither when nothing is missing. Each result is
stored as soon as it is there, so a stage that was killed continues where it stopped.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from ditkit_core.cache import Cache, MediaHashes, key
from ditkit_core.console import say, warn
from ditkit_core.dataset import Sample
from ditkit_core.encoded import EncodedSample
from ditkit_core.errors import UserError
from ditkit_core.media import TRANSFORM_VERSION, kind_of, read_clip
from ditkit_core.memory import release_memory
from ditkit_core.model import Encoder, ignored
from ditkit_core.references import ReferenceSize, encoded_sizes
from ditkit_core.settings import setting

_JUDGED_BY = 2
"""Entries of a kind by which the size of the rest is judged; the first caption is the empty one, which some models keep short."""
_WORTH_TELLING_BYTES = 10**9
_LONG_HASH_BYTES = 2**28
"""So many take seconds to read; less is over before a progress bar says anything."""

Progress = Callable[[str, int], AbstractContextManager[Callable[[float], None]]]
"""(what is done, how many) to a context in which the yielded function is told how much of that is done since."""


@dataclass(frozen=True, kw_only=True)
class EncodeConfig:
    """The `[encode]` section: where encoded clips and captions are kept, and what computes them.

    The VAE runs in fp32: its latents are the training data, and narrower ones would carry the rounding into every step.
    """

    cache: str = setting("", resume="free")
    """Folder of encoded clips and captions, which runs may share; empty means `cache` beside the run folder."""
    device: str = setting("auto", resume="free")
    """Device of the encoders: `auto` (a GPU if there is one), `cpu`, `cuda`, `cuda:1`, …"""
    text_dtype: Literal["bf16", "fp32"] = setting("bf16", resume="refused")
    """Dtype of the text encoder."""
    vae_tiling: bool = setting(False, resume="refused")
    """Whether the VAE encodes overlapping tiles that are blended, not whole pictures: takes less memory, and gives other latents."""
    streaming: Literal["auto", "always", "never"] = setting("auto", resume="free")
    """Whether a large text encoder passes through memory layer by layer from its files, for many captions at once: `auto` does
    where it would not fit as a whole."""


@contextmanager
def no_progress(stage: str, total: int) -> Iterator[Callable[[float], None]]:
    """Progress that nobody watches."""
    yield ignored


def text_key(caption: str, encoder: Encoder) -> str:
    """Where the cache keeps a caption as encoded by an encoder (kind `text`)."""
    return key("text", caption, encoder.identity)


def encode(
    samples: Sequence[Sample],
    *,
    cache: Cache,
    media_encoder: Encoder,
    text_encoder: Encoder,
    fps: float,
    reference_size: ReferenceSize | None = None,
    extra_captions: Sequence[str] = (),
    progress: Progress = no_progress,
    on_bad: Callable[[Sample, UserError], None] | None = None,
) -> list[EncodedSample]:
    """Encode what the cache lacks: all clips and the pictures they are made from, then all captions and the empty one.

    Args:
        samples: What to encode.
        cache: Where results are kept.
        media_encoder: Pixels to `latents`; loaded only if a clip is missing.
        text_encoder: Caption to tensors; loaded only if a caption is missing.
        fps: Frames per second of the clips.
        reference_size: As in `ModelSpec`; needed where samples have references.
        extra_captions: Captions needed besides (of samples to be drawn); found again by `text_key`.
        progress: Watches stages `hash`, `media` and `text`, each only if there is something to do; `hash` if it takes seconds.
        on_bad: Told of each clip that cannot be decoded, which is then left out; by default the first one is an error.

    Returns:
        The samples in the same order, without those left out.

    Raises:
        UserError: If a clip cannot be read, or an encoder gives numbers that are not finite.
    """
    cuts = {sample.id: _cuts_of(sample, fps, reference_size) for sample in samples}
    keys = _media_keys([cut for each in cuts.values() for cut in each], cache, media_encoder, progress)
    failures = _fill_media(cache, keys, media_encoder, progress, keep_going=on_bad is not None)
    good = []
    for sample in samples:
        failed = [failures[keys[cut]] for cut in cuts[sample.id] if keys[cut] in failures]
        if on_bad is not None and failed:
            on_bad(sample, failed[0])
        else:
            good.append(sample)

    captions = ["", *(caption for sample in good for caption in sample.captions), *extra_captions]
    texts = {text_key(caption, text_encoder): caption for caption in captions}
    _fill(cache, _Jobs(kind="text", wanted=texts, encoder=text_encoder, read=str, name=repr), progress)
    return [
        EncodedSample(
            id=sample.id,
            cache=cache,
            media_key=keys[cuts[sample.id][0]],
            text_keys=tuple(text_key(caption, text_encoder) for caption in sample.captions),
            empty_text_key=text_key("", text_encoder),
            reference_keys=tuple(keys[cut] for cut in cuts[sample.id][1:]),
        )
        for sample in good
    ]


def encode_references(
    paths: Sequence[Path],
    *,
    cache: Cache,
    media_encoder: Encoder,
    reference_size: ReferenceSize,
    progress: Progress = no_progress,
) -> list[Tensor]:
    """The latents of pictures to edit, which belong to one sample, as training has them; encoded if the cache lacks them.

    Args:
        paths: The pictures, in order.
        cache: Where results are kept.
        media_encoder: Pixels to `latents`; loaded only if a picture is missing.
        reference_size: As in `ModelSpec`.
        progress: As for `encode`.

    Raises:
        UserError: If a file is no picture, cannot be read, or is of no size that can be used.
    """
    cuts = _reference_cuts(paths, reference_size)
    keys = _media_keys(cuts, cache, media_encoder, progress)
    _fill_media(cache, keys, media_encoder, progress, keep_going=False)
    latents = []
    for cut in cuts:
        tensors = cache.get("media", keys[cut])
        if tensors is None:
            raise UserError(f"the cache {cache.folder} has lost {cut.path}; start again to encode it")
        latents.append(tensors["latents"])
    return latents


class _Cut(NamedTuple):
    """A media file as the encoder is given it."""

    path: Path
    frames: int
    fps: float
    """0 for a still image."""
    height: int
    width: int

    def read(self) -> Tensor:
        return read_clip(self.path, frames=self.frames, fps=self.fps, height=self.height, width=self.width)

    def key(self, content: str, encoder: Encoder) -> str:
        transform = {
            "version": TRANSFORM_VERSION,
            "kind": kind_of(self.path),
            "frames": self.frames,
            "fps": self.fps or 0,  # as a whole number: the key of earlier versions
            "height": self.height,
            "width": self.width,
        }
        return key("media", content, json.dumps(transform, sort_keys=True), encoder.identity)


def _cuts_of(sample: Sample, fps: float, reference_size: ReferenceSize | None) -> list[_Cut]:
    """The sample's own clip, then its references."""
    rate = fps if kind_of(sample.media) == "video" else 0.0
    own = _Cut(sample.media, sample.frames, rate, sample.height, sample.width)
    if not sample.references:
        return [own]
    assert reference_size is not None
    return [own, *_reference_cuts(sample.references, reference_size)]


def _reference_cuts(paths: Sequence[Path], reference_size: ReferenceSize) -> list[_Cut]:
    sizes = encoded_sizes(paths, reference_size)
    return [_Cut(path, 1, 0.0, height, width) for path, (height, width) in zip(paths, sizes, strict=True)]


def _media_keys(cuts: Sequence[_Cut], cache: Cache, encoder: Encoder, progress: Progress) -> dict[_Cut, str]:
    """Where the cache keeps each."""
    keys = {}
    with MediaHashes(cache.folder) as hashes:
        takes_long = sum(hashes.bytes_to_read(cut.path) for cut in cuts) >= _LONG_HASH_BYTES
        with (progress if takes_long else no_progress)("hash", len(cuts)) as advance:
            for cut in cuts:
                keys[cut] = cut.key(hashes.of(cut.path), encoder)
                advance(1.0)
    return keys


def _fill_media(
    cache: Cache, keys: Mapping[_Cut, str], encoder: Encoder, progress: Progress, *, keep_going: bool
) -> dict[str, UserError]:
    wanted = {key: cut for cut, key in keys.items()}
    jobs = _Jobs(kind="media", wanted=wanted, encoder=encoder, read=_Cut.read, name=lambda cut: str(cut.path))
    return _fill(cache, jobs, progress, keep_going=keep_going)


Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class _Jobs(Generic[Item]):
    """Everything that one encoder has to have encoded."""

    kind: str
    wanted: Mapping[str, Item]
    """By cache key."""
    encoder: Encoder
    read: Callable[[Item], Any]
    """An item to what the encoder takes."""
    name: Callable[[Item], str]
    """What a person calls the item."""


def _fill(cache: Cache, jobs: _Jobs[Item], progress: Progress, *, keep_going: bool = False) -> dict[str, UserError]:
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
                    given[key] = jobs.read(missing[key])
                except UserError as error:
                    if not keep_going:
                        raise
                    failures[key] = error
                    advance(1.0)
            if given and not loaded:
                jobs.encoder.load()
                stack.callback(release_memory)
                stack.callback(jobs.encoder.unload)
                loaded = True
            with torch.no_grad():
                encoded = jobs.encoder.encode(list(given.values()), advance) if given else []
            for key, tensors in zip(given, encoded, strict=True):
                name = jobs.name(missing[key])
                _check_finite(tensors, name, jobs.kind)
                cache.put(jobs.kind, key, tensors, {"source": name, "encoder": jobs.encoder.identity})
                sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
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
    remedy = "set encode.text_dtype to fp32" if kind == "text" else "fetch the VAE's weights again"
    for part, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(f"{part} of {name} are not finite numbers; {remedy}, or remove it")
