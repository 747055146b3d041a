"""The encode stage: every clip and caption once through its encoder, into the cache.

The only stage that loads a VAE or a text encoder, one at a time, and neither when nothing is missing. Each result is
stored as soon as it is there, so a stage that was killed continues where it stopped.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from torch import Tensor

from ditkit_core.config.field import setting
from ditkit_core.data.dataset import Sample
from ditkit_core.data.media.clip import TRANSFORM_VERSION, media_kind, read_clip
from ditkit_core.data.references import ReferenceSize, encoded_sizes
from ditkit_core.encoding.cache import Cache, MediaHashes, key
from ditkit_core.encoding.encoded_sample import Condition, EncodedSample
from ditkit_core.encoding.missing import EncodeTask, Progress, encode_missing, should_continue, with_owner
from ditkit_core.errors import MissingDependency, UserError
from ditkit_core.io.console import NullProgress
from ditkit_core.models.conditions import ClipInputs, Conditioner
from ditkit_core.models.encoders import Encoder
from ditkit_core.models.spec import identity

_LONG_HASH_BYTES = 2**28
"""So many take seconds to read; less is over before a progress bar says anything."""


@dataclass(frozen=True, kw_only=True)
class EncodeConfig:
    """The `[encode]` section: where encoded clips and captions are kept, and what computes them.

    The VAE runs in fp32: its latents are the training data, and narrower ones would carry the rounding into every step.
    """

    cache: str = setting("", resume="free", holds="path")
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


def text_key(caption: str, encoder: Encoder) -> str:
    """Where the cache keeps a caption as encoded by an encoder (kind `text`)."""
    return key("text", caption, encoder.identity)


@dataclass(frozen=True, kw_only=True)
class SampleEncoders:
    """What makes training items of samples."""

    media: Encoder
    """Pixels to `latents`; loaded only if a clip is missing."""
    text: Encoder
    """Caption to tensors; loaded only if a caption is missing."""
    fps: float
    """Frames per second of the clips."""
    reference_size: ReferenceSize | None = None
    """As in `DataSpec`; needed where samples have references."""
    conditioning: "Conditioning | None" = None
    """What encodes conditions besides clip and caption."""
    assemble: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = identity
    """As in `TrainingSpec`."""


def encode(
    samples: Sequence[Sample],
    encoders: SampleEncoders,
    cache: Cache,
    *,
    extra_captions: Sequence[str] = (),
    progress: Progress = NullProgress,
    on_bad: Callable[[Sample, UserError], None] | None = None,
) -> list[EncodedSample]:
    """Encode what the cache lacks: all clips and the images they are made from, then all captions and the empty one.

    Args:
        samples: What to encode.
        encoders: What encodes them.
        cache: Where results are kept.
        extra_captions: Captions needed besides (of samples to be generated); found again by `text_key`.
        progress: Watches stages `hash`, `media`, the kinds of conditions and `text`, each only if there is something to do; `hash` if it takes seconds.
        on_bad: Called with each clip that cannot be decoded, which is then left out; by default the first one is an error.

    Returns:
        The samples in the same order, without those left out.

    Raises:
        UserError: If a clip cannot be read, or an encoder gives numbers that are not finite.
    """
    keep_going, conditioning = on_bad is not None, encoders.conditioning or Conditioning(conditioners=())
    given = {sample.id: clip_inputs_of(sample, encoders.fps) for sample in samples}
    # what has no condition is said before hours go into clips
    used = conditioning.used(given, keep_going=keep_going)
    cuts = {sample.id: _cuts_of(sample, encoders.fps, encoders.reference_size) for sample in samples}
    keys = _media_keys([cut for each in cuts.values() for cut in each], cache, encoders.media, progress)
    failures = _fill_media(cache, keys, encoders.media, progress, keep_going=keep_going)
    left = {name: controls for name, controls in given.items() if keys[cuts[name][0]] not in failures}
    conditions = conditioning.fill(left, used, cache, failures, progress, keep_going=keep_going)
    encoded = []
    for sample in samples:
        media_keys = [keys[cut] for cut in cuts[sample.id]]
        of_sample = conditions.get(sample.id, ())
        failed = [failures[key] for key in (*media_keys, *(each.key for each in of_sample)) if key in failures]
        if on_bad is not None and failed:
            on_bad(sample, failed[0])
            continue
        encoded.append(
            EncodedSample(
                id=sample.id,
                cache=cache,
                media_key=media_keys[0],
                text_keys=tuple(text_key(caption, encoders.text) for caption in sample.captions),
                empty_text_key=text_key("", encoders.text),
                reference_keys=tuple(media_keys[1:]),
                conditions=of_sample,
                assemble=encoders.assemble,
                repeats=sample.repeats,
            )
        )
    good = {sample.id for sample in encoded}
    captions = ["", *(caption for sample in samples if sample.id in good for caption in sample.captions)]
    # By key: captions that many samples share are encoded once. The empty one is always there, for caption dropout.
    texts = {text_key(caption, encoders.text): caption for caption in (*captions, *extra_captions)}
    encode_missing(cache, EncodeTask(kind="text", wanted=texts, encoder=encoders.text, read=str, name=repr), progress)
    return encoded


def encode_references(
    paths: Sequence[Path],
    *,
    cache: Cache,
    media_encoder: Encoder,
    reference_size: ReferenceSize,
    progress: Progress = NullProgress,
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
    return [cache.found(cache.get, "media", keys[cut], str(cut.path))["latents"] for cut in cuts]


Used = tuple[str, ...] | UserError
"""What a conditioner reads of a clip, or why it cannot."""


@dataclass(frozen=True, kw_only=True)
class Conditioning:
    """The conditioners of a model, and which of its columns are texts and no files."""

    conditioners: Sequence[Conditioner]
    texts: Collection[str] = ()

    def fill(
        self,
        given: Mapping[str, ClipInputs],
        all_used: Sequence[Mapping[str, Used]],
        cache: Cache,
        failures: dict[str, UserError],
        progress: Progress = NullProgress,
        *,
        keep_going: bool = False,
    ) -> dict[str, tuple[Condition, ...]]:
        """Encode what the cache lacks.

        Args:
            given: What to encode, by any name.
            all_used: What `used` said of these, or of more.
            cache: Where results are kept.
            failures: Takes, by key, why something could not be encoded; stays empty unless `keep_going`.
            progress: Watches the kinds of conditions.
            keep_going: Whether the first failure is no error.

        Returns:
            By name, where the cache keeps its conditions, those that failed included.
        """
        found: dict[str, list[Condition]] = {name: [] for name in given}
        with MediaHashes(cache.folder) as hashes:
            for conditioner, of_kind in zip(self.conditioners, all_used, strict=True):
                wanted = {}
                for name, controls in given.items():
                    used = of_kind[name]
                    if isinstance(used, UserError):
                        address = key("no condition", conditioner.kind, name)
                        failures[address] = used
                        found[name].append(Condition(conditioner.kind, address, conditioner.optional))
                    elif used:
                        address = self._key(conditioner, controls, used, hashes)
                        found[name].append(Condition(conditioner.kind, address, conditioner.optional))
                        wanted[address] = controls
                jobs = EncodeTask(
                    kind=conditioner.kind, wanted=wanted, encoder=conditioner, read=lambda item: item, name=_named
                )
                failures |= encode_missing(cache, jobs, progress, keep_going=keep_going)
        return {name: tuple(conditions) for name, conditions in found.items()}

    def used(self, given: Mapping[str, ClipInputs], *, keep_going: bool = False) -> list[dict[str, Used]]:
        """What each conditioner reads of each, by name; with `keep_going` why it cannot in its place.

        Raises:
            UserError: The first failure; with `keep_going` only what no other sample would mend.
        """
        found: list[dict[str, Used]] = []
        for conditioner in self.conditioners:
            of_kind: dict[str, Used] = {}
            for name, controls in given.items():
                try:
                    of_kind[name] = conditioner.uses(controls)
                except UserError as error:
                    if not should_continue(error, keep_going=keep_going):
                        if controls.clip is None or isinstance(error, MissingDependency):
                            raise
                        raise with_owner(_named(controls), error) from error
                    of_kind[name] = error
            found.append(of_kind)
        return found

    def check(self, controls: ClipInputs) -> None:
        """Read everything that would be encoded of a clip or a drawing, without weights.

        Raises:
            UserError: If it cannot be encoded.
        """
        for conditioner in self.conditioners:
            conditioner.check(controls)

    def reads(self, controls: ClipInputs) -> bool:
        """Whether all of it can be encoded."""
        try:
            self.check(controls)
        except UserError as error:
            if not should_continue(error, keep_going=True):
                raise
            return False
        return True

    def tensors(self, controls: ClipInputs, cache: Cache, progress: Progress = NullProgress) -> dict[str, Tensor]:
        """The conditions of one clip or drawing, encoded if the cache lacks them."""
        item: dict[str, Tensor] = {}
        given = {"": controls}
        for kind, address, _ in self.fill(given, self.used(given), cache, {}, progress)[""]:
            item |= cache.found(cache.get, kind, address, _named(controls))
        return item

    def _key(self, conditioner: Conditioner, controls: ClipInputs, used: Sequence[str], hashes: MediaHashes) -> str:
        cut = {
            "version": TRANSFORM_VERSION,
            "frames": controls.frames,
            "fps": controls.fps,
            "height": controls.height,
            "width": controls.width,
            "start": controls.start_seconds,
        }
        contents = []
        for column in sorted(used):
            if column in self.texts:
                contents.append(f"{column}: {controls.files[column]}")
            else:
                path = Path(controls.files[column]) if column else controls.clip
                contents.append(f"{column}= {hashes.of(path) if path else 'nothing'}")
        return key(conditioner.kind, conditioner.identity, json.dumps(cut, sort_keys=True), *contents)


def _named(controls: ClipInputs) -> str:
    return str(controls.clip or next(iter(controls.files.values()), "a prompt"))


def clip_inputs_of(sample: Sample, fps: float) -> ClipInputs:
    """What a conditioner is given of a sample."""
    return ClipInputs(
        clip=sample.media,
        start_seconds=sample.start_seconds,
        files=sample.controls,
        frames=sample.frames,
        height=sample.height,
        width=sample.width,
        fps=fps if media_kind(sample.media) == "video" else 0.0,
    )


class _Cut(NamedTuple):
    """A media file as the encoder is given it."""

    path: Path
    frames: int
    fps: float
    """0 for a still image."""
    height: int
    width: int
    start_seconds: float = 0.0

    def read(self) -> Tensor:
        return read_clip(**self._asdict())

    def key(self, content: str, encoder: Encoder) -> str:
        transform = {
            "version": TRANSFORM_VERSION,
            "kind": media_kind(self.path),
            "frames": self.frames,
            "fps": self.fps or 0,  # as a whole number: the key of earlier versions
            "height": self.height,
            "width": self.width,
        }
        if self.start_seconds:  # not at 0: the key of earlier versions
            transform["start"] = self.start_seconds
        return key("media", content, json.dumps(transform, sort_keys=True), encoder.identity)


def _cuts_of(sample: Sample, fps: float, reference_size: ReferenceSize | None) -> list[_Cut]:
    """The sample's own clip, then its references."""
    rate = fps if media_kind(sample.media) == "video" else 0.0
    own = _Cut(sample.media, sample.frames, rate, sample.height, sample.width, sample.start_seconds)
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
        with (progress if takes_long else NullProgress)("hash", len(cuts)) as advance:
            for cut in cuts:
                # The content's hash, not the path: a file that was renamed or copied is found again, one that was
                # changed is not.
                keys[cut] = cut.key(hashes.of(cut.path), encoder)
                advance(1.0)
    return keys


def _fill_media(
    cache: Cache, keys: Mapping[_Cut, str], encoder: Encoder, progress: Progress, *, keep_going: bool
) -> dict[str, UserError]:
    wanted = {key: cut for cut, key in keys.items()}
    jobs = EncodeTask(kind="media", wanted=wanted, encoder=encoder, read=_Cut.read, name=lambda cut: str(cut.path))
    return encode_missing(cache, jobs, progress, keep_going=keep_going)
