"""The encode stage: encode every clip and caption once, and store the results in the cache.

This is the only stage that loads a VAE or a text encoder. It loads one at a time, and none if
nothing is missing. Each result is stored at once, so a run that was killed continues where it
stopped.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ditkit_core.data.dataset import Sample
from ditkit_core.data.masks import MASK
from ditkit_core.data.media.clip import TRANSFORM_VERSION, media_kind, read_clip
from ditkit_core.data.media.crop import CENTRE, Crop
from ditkit_core.data.references import ReferenceSize, encoded_sizes
from ditkit_core.encoding.cache import Cache, MediaHashes, key
from ditkit_core.encoding.encoded_sample import Condition, EncodedSample
from ditkit_core.encoding.loss_masks import MaskEncoder
from ditkit_core.encoding.missing import (
    EncodeTask,
    Progress,
    encode_missing,
    should_continue,
    with_owner,
)
from ditkit_core.errors import EnvironmentFault, UserError
from ditkit_core.io.console import NullProgress
from ditkit_core.models.conditions import ClipInputs, Conditioner
from ditkit_core.models.encoders import Encoder, Prompt
from ditkit_core.models.spec import identity

_MIRRORED: Mapping[bool, Mapping[str, Any]] = {False: {}, True: {"mirrored": True}}
"""Part of the keys of what is read mirrored; the keys of the rest are as in earlier versions."""
_LONG_HASH_BYTES = 2**28
"""Reading this many bytes takes seconds; for fewer a progress bar would only flicker."""


def _cropped(crop: Crop) -> dict[str, Any]:
    """Part of the keys of what is cropped elsewhere than at its centre, likewise."""
    return {} if crop == CENTRE else {"crop": list(crop)}


def text_key(caption: str, encoder: Encoder, pictures: Sequence[str] = ()) -> str:
    """The cache key (of kind `text`) of a caption that an encoder encodes, with the digests of the
    pictures that it sees."""
    # Nothing in front of the pictures: without any, keys are as in earlier versions.
    return key("text", caption, encoder.identity, *pictures)


class PromptFiles(NamedTuple):
    """A text, and the images that its encoder may see."""

    text: str
    references: tuple[Path, ...] = ()
    is_mirrored: bool = False

    def read(self, picture_size: ReferenceSize) -> Prompt:
        """The text with the pixels of its references at `DataSpec.picture_size`; UserError if one
        cannot be read."""
        return Prompt(self.text, [clip.read()[:, 0] for clip in self.pictures(picture_size)])

    def pictures(self, picture_size: ReferenceSize | None) -> "list[_Clip]":
        """What the encoder sees: nothing where it reads texts alone."""
        clips = _reference_clips(self.references, picture_size) if picture_size else []
        return [clip._replace(is_mirrored=self.is_mirrored) for clip in clips]


@dataclass(frozen=True, kw_only=True)
class SampleEncoders:
    """The encoders that turn samples into training items."""

    media: Encoder
    """From pixels to `latents`; loaded only if a clip is missing in the cache."""
    text: Encoder
    """From a caption to tensors; loaded only if a caption is missing in the cache."""
    fps: float
    """Frames per second of the clips."""
    reference_size: ReferenceSize | None = None
    """`DataSpec.reference_size`; required if samples have references."""
    picture_size: ReferenceSize | None = None
    """`DataSpec.picture_size`; None if the text encoder reads texts alone."""
    conditioning: "Conditioning | None" = None
    """The encoders of conditions besides the caption."""
    assemble: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = identity
    """`TrainingSpec.assemble`."""
    more_captions: Mapping[str, str] = field(default_factory=dict)
    """Captions that training items have next to their own, by the prefix of their tensors."""
    mask_weight: float = 0.0
    """`train.mask_weight`."""
    flips: bool = False
    """`data.flip`: each sample is encoded mirrored, too."""

    def text_keys(
        self, prompts: Iterable[PromptFiles], cache: Cache, progress: Progress = NullProgress
    ) -> dict[PromptFiles, str]:
        """The cache key of each text, with what its encoder sees of the references."""
        pictures = {prompt: prompt.pictures(self.picture_size) for prompt in prompts}
        digests = _media_keys([*chain(*pictures.values())], cache, self.text, progress)
        return {
            prompt: text_key(prompt.text, self.text, [digests[clip] for clip in clips])
            for prompt, clips in pictures.items()
        }

    def prompts_of(self, sample: Sample) -> list[PromptFiles]:
        """The empty caption, `more_captions` and the captions of a sample, with its references."""
        texts = ("", *self.more_captions.values(), *sample.captions)
        return [PromptFiles(text, sample.references, sample.is_mirrored) for text in texts]


def encode(
    samples: Sequence[Sample],
    encoders: SampleEncoders,
    cache: Cache,
    *,
    extra_prompts: Sequence[PromptFiles] = (),
    progress: Progress = NullProgress,
    on_bad: Callable[[Sample, UserError], None] | None = None,
) -> list[EncodedSample]:
    """Encode everything that the cache lacks: clips and references, then conditions, then captions
    and the empty caption, which is another one for each sample whose references its encoder sees.

    Args:
        extra_prompts: Further texts, such as prompts of previews; find them in the cache by
            `SampleEncoders.text_keys`.
        progress: Shows the stages `hash` (if it takes seconds), `media`, each kind of condition,
            and `text`.
        on_bad: Called with each sample that cannot be encoded, which is then left out; None makes
            the first one an error.

    Returns:
        The samples in the same order, without those left out.

    Raises:
        UserError: If a clip cannot be read, or the output of an encoder is not finite.
    """
    keep_going = on_bad is not None
    conditioning = encoders.conditioning or Conditioning(conditioners=())
    # No sample of a dataset has an id with a line break.
    mirrored = {
        sample.id: replace(sample, id=f"{sample.id}\n", is_mirrored=True) for sample in samples
    }
    read = [*samples, *(mirrored.values() if encoders.flips else ())]
    inputs = {sample.id: clip_inputs_of(sample, encoders.fps) for sample in read}
    # Before the clips: encoding those may take hours, and a missing condition should be reported
    # first.
    used = conditioning.used(inputs, keep_going=keep_going)
    clips = {sample.id: _clips_of(sample, encoders.fps, encoders.reference_size) for sample in read}
    keys = _media_keys(
        [clip for sample_clips in clips.values() for clip in sample_clips],
        cache,
        encoders.media,
        progress,
    )
    failures = _fill_media(cache, keys, encoders.media, progress, keep_going=keep_going)
    readable = {
        name: controls for name, controls in inputs.items() if keys[clips[name][0]] not in failures
    }
    conditions = conditioning.fill(readable, used, cache, failures, progress, keep_going=keep_going)
    masked = {
        sample.id: replace(readable[sample.id], files={MASK.name: str(sample.mask)})
        for sample in read
        if sample.mask is not None and sample.id in readable
    }
    masks = _mask_conditioning(
        masked, {name: keys[clips[name][0]] for name in masked}, encoders.media.identity, cache
    )
    weights = masks.fill(
        masked, masks.used(masked), cache, failures, progress, keep_going=keep_going
    )
    prompts = {sample.id: encoders.prompts_of(sample) for sample in read}
    # Encoded without samples, too, unless each sample has its empty caption.
    common = () if encoders.picture_size else ("", *encoders.more_captions.values())
    extra = [*map(PromptFiles, common), *extra_prompts]
    text_keys = encoders.text_keys([*extra, *chain(*prompts.values())], cache, progress)
    encoded = list[tuple[Sample, EncodedSample]]()
    # By key: captions that samples share are encoded once.
    texts = {text_keys[prompt]: prompt for prompt in extra[: len(common)]}
    for sample in samples:
        again = partial(encode, [sample], encoders, cache, extra_prompts=extra_prompts)
        ways, ids = [], (sample.id, mirrored[sample.id].id)[: 1 + encoders.flips]
        for id in ids:
            media_key, *reference_keys = (keys[clip] for clip in clips[id])
            empty, *others = (text_keys[prompt] for prompt in prompts[id])
            num_more = len(encoders.more_captions)
            encoded_sample = EncodedSample(
                id=sample.id,
                cache=cache,
                media_key=media_key,
                text_keys=tuple(others[num_more:]),
                empty_text_key=empty,
                reference_keys=tuple(reference_keys),
                conditions=(*conditions.get(id, ()), *weights.get(id, ())),
                assemble=encoders.assemble,
                more_text_keys=dict(zip(encoders.more_captions, others[:num_more], strict=True)),
                mask_weight=encoders.mask_weight,
                repeats=sample.repeats,
                encode_again=again,
            )
            ways.append(encoded_sample)
        failed = [failures[key] for way in ways for key in way.item_keys if key in failures]
        if on_bad is not None and failed:
            on_bad(sample, failed[0])
            continue
        encoded.append((sample, replace(ways[0], mirrored=ways[1] if encoders.flips else None)))
        texts |= {text_keys[prompt]: prompt for id in ids for prompt in prompts[id]}
    texts |= {text_keys[prompt]: prompt for prompt in extra}
    failures = _fill_texts(cache, texts, encoders, progress, keep_going=keep_going)
    for prompt in extra_prompts:
        if (error := failures.get(text_keys[prompt])) is not None:
            raise error
    usable = []
    for sample, encoded_sample in encoded:
        failed = [failures[key] for key in encoded_sample.caption_keys if key in failures]
        if on_bad is not None and failed:
            on_bad(sample, failed[0])
        else:
            usable.append(encoded_sample)
    return usable


def _mask_conditioning(
    masked: Mapping[str, ClipInputs], keys: Mapping[str, str], media_identity: str, cache: Cache
) -> "Conditioning":
    """The conditioner of loss masks, at the sizes of their clips' latents, whose `keys` are by the
    clips' names; none without masks."""
    grids = {
        (inputs.frames, inputs.height, inputs.width): cache.read_encoded(
            cache.shapes, "media", keys[name], str(inputs.clip)
        )["latents"][1:]
        for name, inputs in masked.items()
    }
    return Conditioning(conditioners=[MaskEncoder(media_identity, grids)] if masked else [])


def encode_references(
    paths: Sequence[Path],
    *,
    cache: Cache,
    media_encoder: Encoder,
    reference_size: ReferenceSize,
    progress: Progress = NullProgress,
) -> list[Tensor]:
    """The latents of the references of one sample, in order, computed as for training; encoded if
    the cache lacks them."""
    clips = _reference_clips(paths, reference_size)
    keys = _media_keys(clips, cache, media_encoder, progress)
    fill = partial(_fill_media, cache, keys, media_encoder, progress, keep_going=False)
    fill()
    return [
        cache.read_encoded(cache.get, "media", keys[clip], str(clip.path), fill)["latents"]
        for clip in clips
    ]


Used = tuple[str, ...] | UserError
"""The columns that a conditioner reads for a clip, or the reason why it cannot."""


@dataclass(frozen=True, kw_only=True)
class Conditioning:
    """The conditioners of a model."""

    conditioners: Sequence[Conditioner]
    texts: Collection[str] = ()
    """Columns whose values are texts and not files."""
    sounds: Collection[str] = ()
    """Columns whose files may be read for their sound; "" for the clip itself."""

    def fill(
        self,
        inputs: Mapping[str, ClipInputs],
        all_used: Sequence[Mapping[str, Used]],
        cache: Cache,
        failures: dict[str, UserError],
        progress: Progress = NullProgress,
        *,
        keep_going: bool = False,
    ) -> dict[str, tuple[Condition, ...]]:
        """Encode the conditions of clips (by any name) that the cache lacks; the entries of all by
        name, including those that failed.

        Args:
            all_used: The result of `used` for these clips; it may contain more.
            failures: Receives, by cache key, the reason why a condition could not be encoded; stays
                empty unless `keep_going`.
        """
        conditions_by_name: dict[str, list[Condition]] = {name: [] for name in inputs}
        tasks: list[EncodeTask[ClipInputs]] = []
        with MediaHashes(cache.folder) as hashes:
            for conditioner, columns_by_name in zip(self.conditioners, all_used, strict=True):
                wanted = {}
                for name, controls in inputs.items():
                    if not (used := columns_by_name[name]):
                        continue
                    if isinstance(used, UserError):
                        # A key of its own, under which nothing is stored, so that the failure is
                        # found like any other.
                        failures[address := key("no condition", conditioner.kind, name)] = used
                    else:
                        wanted[address := self._key(conditioner, controls, used, hashes)] = controls
                    conditions_by_name[name].append(
                        Condition(conditioner.kind, address, conditioner.optional)
                    )
                tasks.append(
                    EncodeTask(
                        kind=conditioner.kind,
                        wanted=wanted,
                        encoder=conditioner,
                        read=lambda item: item,
                        name=_named,
                    )
                )
        for task in tasks:
            failures |= encode_missing(cache, task, progress, keep_going=keep_going)
        return {name: tuple(conditions) for name, conditions in conditions_by_name.items()}

    def used(
        self, inputs: Mapping[str, ClipInputs], *, keep_going: bool = False
    ) -> list[dict[str, Used]]:
        """The columns that each conditioner reads for each clip, by name; with `keep_going`
        possibly the reason why it cannot."""
        columns_by_conditioner: list[dict[str, Used]] = []
        for conditioner in self.conditioners:
            columns_by_name: dict[str, Used] = {}
            for name, controls in inputs.items():
                try:
                    columns_by_name[name] = conditioner.uses(controls)
                except UserError as error:
                    if not should_continue(error, keep_going=keep_going):
                        if controls.clip is None or isinstance(error, EnvironmentFault):
                            raise
                        raise with_owner(_named(controls), error) from error
                    columns_by_name[name] = error
            columns_by_conditioner.append(columns_by_name)
        return columns_by_conditioner

    def check(self, controls: ClipInputs) -> None:
        """Read everything that would be encoded for a clip or a prompt, without loading weights."""
        for conditioner in self.conditioners:
            conditioner.check(controls)

    def reads(self, controls: ClipInputs) -> bool:
        """Whether all conditions of a clip can be encoded."""
        try:
            self.check(controls)
        except UserError as error:
            if not should_continue(error, keep_going=True):
                raise
            return False
        return True

    def tensors(
        self, controls: ClipInputs, cache: Cache, progress: Progress = NullProgress
    ) -> dict[str, Tensor]:
        """The tensors of the conditions of one clip or prompt, encoded if the cache lacks them."""
        item: dict[str, Tensor] = {}
        inputs = {"": controls}
        fill = partial(self.fill, inputs, self.used(inputs), cache, {}, progress)
        for kind, address, _ in fill()[""]:
            item |= cache.read_encoded(cache.get, kind, address, _named(controls), fill)
        return item

    def _key(
        self,
        conditioner: Conditioner,
        controls: ClipInputs,
        used: Sequence[str],
        hashes: MediaHashes,
    ) -> str:
        transform = {
            "version": TRANSFORM_VERSION,
            "frames": controls.frames,
            "fps": controls.fps,
            "height": controls.height,
            "width": controls.width,
            "start": controls.start_seconds,
            **_MIRRORED[controls.is_mirrored],
            **_cropped(Crop(*controls.crop)),
        }
        contents = []
        for column in sorted(used):
            if column in self.texts:
                contents.append(f"{column}: {controls.files[column]}")
            else:
                # "" stands for the clip itself
                path = Path(controls.files[column]) if column else controls.clip
                if path is None:
                    content = "nothing"
                elif column in self.sounds:
                    content = hashes.of_sound(path)
                else:
                    content = hashes.of(path, as_stored=column == MASK.name)
                contents.append(f"{column}= {content}")
        return key(
            conditioner.kind, conditioner.identity, json.dumps(transform, sort_keys=True), *contents
        )


def _named(controls: ClipInputs) -> str:
    return str(controls.clip or next(iter(controls.files.values()), "a prompt"))


def clip_inputs_of(sample: Sample, fps: float) -> ClipInputs:
    """The inputs of a sample's conditioners."""
    return ClipInputs(
        clip=sample.media,
        start_seconds=sample.start_seconds,
        files=sample.controls,
        frames=sample.frames,
        height=sample.height,
        width=sample.width,
        fps=fps if media_kind(sample.media) == "video" else 0.0,
        is_mirrored=sample.is_mirrored,
        crop=sample.crop,
    )


class _Clip(NamedTuple):
    """The part of a media file that is encoded, and its size."""

    path: Path
    frames: int
    fps: float
    """0 for a still image."""
    height: int
    width: int
    start_seconds: float = 0.0
    is_mirrored: bool = False
    crop: Crop = CENTRE

    def read(self) -> Tensor:
        return read_clip(**self._asdict())

    def key(self, content: str, encoder: Encoder) -> str:
        transform = {
            "version": TRANSFORM_VERSION,
            "kind": media_kind(self.path),
            "frames": self.frames,
            "fps": self.fps
            or 0,  # 0 and not 0.0: keeps the key of earlier versions, and so their caches
            "height": self.height,
            "width": self.width,
        }
        if self.start_seconds:  # left out at 0, again for the key of earlier versions
            transform["start"] = self.start_seconds
        transform |= {**_MIRRORED[self.is_mirrored], **_cropped(self.crop)}
        return key("media", content, json.dumps(transform, sort_keys=True), encoder.identity)


def _clips_of(sample: Sample, fps: float, reference_size: ReferenceSize | None) -> list[_Clip]:
    """The sample's own clip, then its references."""
    rate = fps if media_kind(sample.media) == "video" else 0.0
    own_clip = _Clip(
        sample.media,
        sample.frames,
        rate,
        sample.height,
        sample.width,
        sample.start_seconds,
        sample.is_mirrored,
        sample.crop,
    )
    if not sample.references:
        return [own_clip]
    assert reference_size is not None
    references = _reference_clips(sample.references, reference_size)
    return [own_clip, *(clip._replace(is_mirrored=sample.is_mirrored) for clip in references)]


def _reference_clips(paths: Sequence[Path], reference_size: ReferenceSize) -> list[_Clip]:
    sizes = encoded_sizes(paths, reference_size)
    return [
        _Clip(path, 1, 0.0, height, width)
        for path, (height, width) in zip(paths, sizes, strict=True)
    ]


def _media_keys(
    clips: Sequence[_Clip], cache: Cache, encoder: Encoder, progress: Progress
) -> dict[_Clip, str]:
    """The cache key of each clip."""
    if not clips:
        return {}
    keys = {}
    with MediaHashes(cache.folder) as hashes:
        takes_long = sum(hashes.bytes_to_read(clip.path) for clip in clips) >= _LONG_HASH_BYTES
        with (progress if takes_long else NullProgress)("hash", len(clips)) as advance:
            for clip in clips:
                # The hash of the content, not of the path: a file that was renamed or copied is
                # found again, and a file that was changed is encoded again.
                keys[clip] = clip.key(hashes.of(clip.path), encoder)
                advance(1.0)
    return keys


def _fill_media(
    cache: Cache,
    keys: Mapping[_Clip, str],
    encoder: Encoder,
    progress: Progress,
    *,
    keep_going: bool,
) -> dict[str, UserError]:
    wanted = {key: clip for clip, key in keys.items()}
    jobs = EncodeTask(
        kind="media",
        wanted=wanted,
        encoder=encoder,
        read=_Clip.read,
        name=lambda clip: str(clip.path),
    )
    return encode_missing(cache, jobs, progress, keep_going=keep_going)


def _fill_texts(
    cache: Cache,
    wanted: Mapping[str, PromptFiles],
    encoders: SampleEncoders,
    progress: Progress,
    *,
    keep_going: bool,
) -> dict[str, UserError]:
    size = encoders.picture_size
    task = EncodeTask(
        kind="text",
        wanted=wanted,
        encoder=encoders.text,
        read=lambda prompt: prompt.read(size) if size else prompt.text,
        name=lambda prompt: repr(prompt.text),
    )
    # A text alone cannot be unreadable: what fails concerns its encoder, and so all samples.
    return encode_missing(cache, task, progress, keep_going=keep_going and size is not None)
