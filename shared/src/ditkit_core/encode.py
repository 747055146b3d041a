"""The encode stage: every clip and caption once through its encoder, into the cache.

The only stage that loads a VAE or a text encoder, one at a time, and neither when nothing is missing. Each result is
stored as soon as it is there, so a stage that was killed continues where it stopped.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from ditkit_core.cache import Cache, MediaHashes, key
from ditkit_core.dataset import Sample
from ditkit_core.encoded import EncodedSample
from ditkit_core.errors import UserError
from ditkit_core.media import TRANSFORM_VERSION, kind_of, read_clip
from ditkit_core.memory import release_memory
from ditkit_core.model import Encoder
from ditkit_core.settings import setting

Progress = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""(what is done, how many) to a context in which the yielded function is called after each one."""


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


@contextmanager
def no_progress(stage: str, total: int) -> Iterator[Callable[[], None]]:
    """Progress that nobody watches."""
    yield lambda: None


def text_key(caption: str, encoder: Encoder) -> str:
    """Where the cache keeps a caption as encoded by an encoder (kind `text`)."""
    return key("text", caption, encoder.identity)


def encode(
    samples: Sequence[Sample],
    *,
    cache: Cache,
    media_encoder: Encoder,
    text_encoder: Encoder,
    height: int,
    width: int,
    fps: float,
    extra_captions: Sequence[str] = (),
    progress: Progress = no_progress,
    on_bad: Callable[[Sample, UserError], None] | None = None,
) -> list[EncodedSample]:
    """Encode what the cache lacks: all clips, then all captions and the empty one.

    Args:
        samples: What to encode.
        cache: Where results are kept.
        media_encoder: Pixels to `latents`; loaded only if a clip is missing.
        text_encoder: Caption to tensors; loaded only if a caption is missing.
        height: Pixels of the clips.
        width: Pixels of the clips.
        fps: Frames per second of the clips.
        extra_captions: Captions needed besides (of samples to be drawn); found again by `text_key`.
        progress: Watches stages `hash`, `media` and `text`, each only if there is something to do.
        on_bad: Told of each clip that cannot be decoded, which is then left out; by default the first one is an error.

    Returns:
        The samples in the same order, without those left out.

    Raises:
        UserError: If a clip cannot be read, or an encoder gives numbers that are not finite.
    """
    media_keys: dict[str, str] = {}
    with MediaHashes(cache.folder) as hashes, (progress if samples else no_progress)("hash", len(samples)) as advance:
        for sample in samples:
            media_keys[sample.id] = _media_key(sample, hashes.of(sample.media), media_encoder, height, width, fps)
            advance()

    def read(sample: Sample) -> Tensor:
        return read_clip(sample.media, frames=sample.frames, fps=fps, height=height, width=width)

    def media_name(sample: Sample) -> str:
        return str(sample.media)

    clips = {media_keys[sample.id]: sample for sample in samples}
    media = _Jobs(kind="media", wanted=clips, encoder=media_encoder, read=read, name=media_name)
    failures = _fill(cache, media, progress, keep_going=on_bad is not None)
    good = [sample for sample in samples if media_keys[sample.id] not in failures]
    if on_bad is not None:
        for sample in samples:
            if media_keys[sample.id] in failures:
                on_bad(sample, failures[media_keys[sample.id]])

    captions = ["", *(sample.caption for sample in good), *extra_captions]
    texts = {text_key(caption, text_encoder): caption for caption in captions}
    _fill(cache, _Jobs(kind="text", wanted=texts, encoder=text_encoder, read=str, name=repr), progress)
    return [
        EncodedSample(
            id=sample.id,
            cache=cache,
            media_key=media_keys[sample.id],
            text_key=text_key(sample.caption, text_encoder),
            empty_text_key=text_key("", text_encoder),
        )
        for sample in good
    ]


def _media_key(sample: Sample, content: str, encoder: Encoder, height: int, width: int, fps: float) -> str:
    kind = kind_of(sample.media)
    transform = {
        "version": TRANSFORM_VERSION,
        "kind": kind,
        "frames": sample.frames,
        "fps": fps if kind == "video" else 0,
        "height": height,
        "width": width,
    }
    return key("media", content, json.dumps(transform, sort_keys=True), encoder.identity)


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
        for key, item in missing.items():
            try:
                given = jobs.read(item)
            except UserError as error:
                if not keep_going:
                    raise
                failures[key] = error
                advance()
                continue
            if not loaded:
                jobs.encoder.load()
                stack.callback(release_memory)
                stack.callback(jobs.encoder.unload)
                loaded = True
            with torch.no_grad():
                tensors = jobs.encoder.encode(given)
            _check_finite(tensors, jobs.name(item))
            cache.put(jobs.kind, key, tensors, {"source": jobs.name(item), "encoder": jobs.encoder.identity})
            advance()
    return failures


def _check_finite(tensors: Mapping[str, Tensor], name: str) -> None:
    for part, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(f"{part} of {name} are not finite numbers; set encode.text_dtype to fp32, or remove it")
