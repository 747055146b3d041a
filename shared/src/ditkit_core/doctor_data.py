"""The doctor's look at the data: every file probed, every window decoded once at low size, every caption counted.

What is listed here as trained on is what training reads, decoded by the same code; what cannot be decoded is excluded as encoding would.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ditkit_core.cache import MediaHashes
from ditkit_core.console import progress, say, warn
from ditkit_core.data import files_of, split_held_out
from ditkit_core.dataset import Dataset, NothingToTrain, Sample
from ditkit_core.doctor import BucketRow, Checkup, CutCaption, CutsCaptions, Excluded, FileRow, Finding
from ditkit_core.doctor_findings import (
    captions_of,
    file_row,
    of_buckets,
    of_captions,
    of_duplicates,
    of_excluded,
    of_file,
    of_look,
    of_unused,
    same_content,
)
from ditkit_core.doctor_media import Fingerprint, Look, look, near_duplicates
from ditkit_core.encode import controls_of
from ditkit_core.encoded import EncodedSample
from ditkit_core.errors import NotEquipped, UserError
from ditkit_core.media import available, kind_of, pictures, probe
from ditkit_core.run import Run
from ditkit_core.run_checks import check_scenes
from ditkit_core.sample_stage import shape_of
from ditkit_core.video import is_hdr

Shape = tuple[int, int, int, tuple[tuple[int, int], ...]]
"""Frames, height, width, and the sizes of references."""


_MOST_IN_BRIEF = 5


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What was found, and the samples that can be trained on."""

    checkup: Checkup
    samples: list[Sample]
    """In order of id."""
    largest: list[Sample] = field(default_factory=list)
    """One micro-batch of the most tokens."""


def examine(run: Run) -> Examined:
    """Look at everything that a run would train on; neither a model nor an encoder is loaded.

    Args:
        run: The run. Whether its data section has bad files stop training decides if they are errors; they are all listed anyway.
    """
    data = run.config.data
    stopping = {"bad": data.on_bad == "error", "short": data.short_clips == "error", "unused": False}
    lenient = replace(data, on_bad="skip", short_clips="skip" if stopping["short"] else data.short_clips)
    try:
        found: Dataset | NothingToTrain = run.scanned(lenient)
    except NothingToTrain as error:
        found = error
    except UserError as error:
        return _unusable(run, error, [])
    excluded = [
        Excluded(name=name, reason=reason, stops=stopping[kind])
        for (name, reason), kind in zip(found.excluded, found.kinds, strict=True)
    ]
    if isinstance(found, NothingToTrain):
        return _unusable(run, found, excluded)
    looks = _Looks(run=run, fps=found.fps, stops=stopping["bad"])
    with progress("look at clips", len(found.samples)) as bar:
        for sample in found.samples:
            looks.take(sample)
            bar.advance()
    samples = looks.good
    captions = captions_of(samples, _cut_captions(run, samples))
    buckets, largest = _buckets(run, samples)
    same = same_content(_hashes(run, samples))
    known = {id for group in same for id in group[1:]}
    alike = near_duplicates({id: print for id, print in looks.prints.items() if id not in known})
    files = list(looks.files())
    findings = [
        *of_excluded(excluded),
        *of_excluded(looks.excluded, "D03"),
        *_too_few(run, samples),
        *of_buckets(buckets),
        *(finding for row, hdr in files for finding in of_file(row, is_hdr=hdr)),
        *of_unused([row for row, _ in files]),
        *looks.findings,
        *map(refused, dict.fromkeys([*looks.lacking, *_wrong_with_scenes(run, samples)])),
        *of_duplicates(same, alike),
        *of_captions(samples, captions),
    ]
    checkup = Checkup(
        model=run.spec.name, samples=len(samples), fps=found.fps, buckets=tuple(buckets),
        files=tuple(row for row, _ in files), excluded=(*excluded, *looks.excluded), captions=captions, same=tuple(same),
        alike=tuple(alike), findings=tuple(findings),
    )  # fmt: skip
    return Examined(checkup=checkup, samples=samples, largest=largest)


def say_in_brief(run: Run, encoded: Sequence[EncodedSample]) -> None:
    """What is known without another look once everything is encoded: said before training, likely mistakes as warnings."""
    ids = {each.id for each in encoded}
    samples = [sample for sample in run.dataset.samples if sample.id in ids]
    shapes = Counter((sample.frames, sample.height, sample.width) for sample in samples)
    listed = ", ".join(
        f"{count} of {frames} x {height} x {width}" for (frames, height, width), count in sorted(shapes.items())
    )
    missing = len(run.dataset.excluded) + len(run.dataset.samples) - len(samples)
    say(f"data: {len(samples)} samples ({listed}), {missing} left out; {run.spec.name}-train --check looks closer")
    keys: dict[str, list[str]] = defaultdict(list)
    for each in encoded:
        keys[each.media_key].append(each.id)
    findings = [*of_duplicates([group for group in keys.values() if len(group) > 1], [])]
    findings += of_captions(samples, captions_of(samples, None))
    encoder = run.encoders[1]
    if isinstance(encoder, CutsCaptions) and (cut := len(encoder.truncated)):
        findings.append(
            Finding(
                code="D14", severity="warning", where=f"{cut} captions", what="they are too long for the text encoder, and were cut",
                remedy="shorten them",
            )
        )  # fmt: skip
    shown = [finding for finding in findings if finding.severity == "warning"]
    for finding in shown[:_MOST_IN_BRIEF]:
        warn(str(finding))
    if len(shown) > _MOST_IN_BRIEF:
        warn(f"and {len(shown) - _MOST_IN_BRIEF} more; see {run.spec.name}-train --check")


def _unusable(run: Run, error: UserError, excluded: Sequence[Excluded]) -> Examined:
    """What is said of a dataset of which nothing can be trained."""
    whole = Finding(code="D01", severity="error", where="", what=str(error), remedy="")
    checkup = Checkup(
        model=run.spec.name, samples=0, fps=run.config.data.fps or run.spec.fps, excluded=tuple(excluded),
        findings=(*of_excluded(excluded), whole),
    )  # fmt: skip
    return Examined(checkup=checkup, samples=[])


@dataclass(kw_only=True)
class _Looks:
    """What is seen sample by sample."""

    run: Run
    fps: float
    stops: bool
    """Whether what cannot be decoded stops training."""
    good: list[Sample] = field(default_factory=list)
    excluded: list[Excluded] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    prints: dict[str, tuple[Path, Fingerprint]] = field(default_factory=dict)
    lacking: dict[str, None] = field(default_factory=dict)
    """What is not installed and no sample is to blame for, in order."""

    def take(self, sample: Sample) -> None:
        """Read what training would read of a sample: the clip decoded at low size, what it is conditioned by as it is encoded."""
        seen: Look | None = None
        fps = self.fps if kind_of(sample.media) == "video" else 0.0
        try:
            seen = look(sample.media, frames=sample.frames, fps=fps, start_seconds=sample.start_seconds)
            for reference in sample.references:
                _decode(pictures(reference, frames=1, fps=0.0))
            if self.run.readers is not None:
                self.run.readers.check(controls_of(sample, self.fps))
        except NotEquipped as error:
            self.lacking[str(error)] = None
        except UserError as error:
            self.excluded.append(Excluded(name=sample.id, reason=str(error), stops=self.stops))
            return
        self.good.append(sample)
        self.findings += of_look(sample.id, seen, fps) if seen else ()
        if seen and seen.fingerprint is not None:
            self.prints[sample.id] = (sample.media, seen.fingerprint)

    def files(self) -> Iterator[tuple[FileRow, bool]]:
        """Each file with what is trained of it, and whether it is HDR."""
        windows: dict[Path, list[Sample]] = defaultdict(list)
        for sample in self.good:
            windows[sample.media].append(sample)
        for path, samples in windows.items():
            info = probe(path)
            if info.kind == "video" and not info.seconds:  # images of a folder that gives no rate
                info = replace(info, seconds=available(path, self.fps).frames / self.fps, fps=self.fps)
            hdr = info.kind == "video" and path.is_file() and is_hdr(path)
            yield file_row(str(path), info, samples, self.fps), hdr


def _decode(shown: Iterable[Any]) -> None:
    for _ in shown:
        pass


def _hashes(run: Run, samples: Sequence[Sample]) -> dict[str, tuple[str, Path]]:
    """Content hash and file of each sample that is one file; what encoding needs anyway, and remembers."""
    with MediaHashes(run.cache.folder) as hashes:
        return {each.id: (hashes.of(each.media), each.media) for each in samples if each.media.is_file()}


def _cut_captions(run: Run, samples: Sequence[Sample]) -> list[CutCaption] | None:
    """Captions that the text encoder does not read to their end; None if it cannot say so without its weights."""
    if any(map(run.config.model.is_to_be_fetched, ("text_encoder", "tokenizer", "vae"))):
        return None
    try:
        encoder = run.encoders[1]
        if not isinstance(encoder, CutsCaptions):
            return None
        cuts = {caption: encoder.cut_of(caption) for caption in {c for each in samples for c in each.captions}}
    except UserError:  # said where the model is tried
        return None
    return [
        CutCaption(sample=sample.id, tokens=cut[0], kept=cut[1])
        for sample in samples for caption in sample.captions if (cut := cuts[caption]) is not None
    ]  # fmt: skip


def shape_for(run: Run, sample: Sample) -> Shape:
    """What samples of one micro-batch have in common."""
    size, references = shape_of(sample, sample.controls, run.columns, run.spec.reference_size)
    return *size, references


def _buckets(run: Run, samples: Sequence[Sample]) -> tuple[list[BucketRow], list[Sample]]:
    """The shapes that there are, and the samples of a largest micro-batch."""
    train = run.config.train
    ids = [sample.id for sample in samples]
    held_out: set[str] = set()
    with suppress(UserError):  # a finding says that nothing would be left
        held_out = set(split_held_out(ids, run.config.held_out.clips, files_of(samples))[1])
    groups: dict[Shape, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[shape_for(run, sample)].append(sample)
    rows, largest, most = [], list[Sample](), 0
    for shape, members in sorted(groups.items(), key=lambda pair: pair[0]):
        trained = [sample for sample in members if sample.id not in held_out]
        tokens = _tokens(run, shape)
        size: int | None = train.batch_size
        if train.batch_tokens:
            size = max(1, train.batch_tokens // tokens) if tokens else None
        weight = sum(sample.repeats for sample in trained)
        rows.append(
            BucketRow(
                frames=shape[0],
                height=shape[1],
                width=shape[2],
                references=len(shape[3]),
                samples=len(members),
                held_out=len(members) - len(trained),
                tokens=tokens,
                batch_size=size,
                micro_batches=-int(-weight // size) if size else None,
            )
        )
        whole = trained[: size or 1]
        cost = len(whole) * (tokens or shape[0] * shape[1] * shape[2])
        if cost > most:
            largest, most = whole, cost
    return rows, largest


def _tokens(run: Run, shape: Shape) -> int | None:
    """Tokens of a sample of this shape; None if the architecture is not known here."""
    if run.arch is None:
        return None
    return run.spec.num_tokens(outline_of(run, shape))


def outline_of(run: Run, shape: Shape) -> dict[str, Tensor]:
    """A training item of this shape on `meta`; the architecture is known."""
    with torch.device("meta"):
        return run.spec.outline(run.arch, shape[:3], shape[3])


def _wrong_with_scenes(run: Run, samples: Sequence[Sample]) -> Iterator[str]:
    """Why what is to be drawn cannot be."""
    try:
        check_scenes(run, samples)
    except UserError as error:
        yield str(error)


def refused(error: UserError | str) -> Finding:
    """What training itself would stop with."""
    return Finding(code="D21", severity="error", where="", what=str(error), remedy="")


def _too_few(run: Run, samples: Sequence[Sample]) -> Iterator[Finding]:
    count = run.config.held_out.clips
    try:
        split_held_out([sample.id for sample in samples], count, files_of(samples))
    except UserError:
        yield Finding(
            code="D01", severity="error", where="held_out.clips",
            what=f"{len(samples)} samples can be trained on, and {count} are held out, windows of a file together: none is left",
            remedy="add clips, mend those that are left out, or lower held_out.clips",
        )  # fmt: skip
