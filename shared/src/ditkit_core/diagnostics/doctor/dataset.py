"""The doctor's check of the data: every file is probed, every window decoded once at low size,
every caption counted.

The windows are those that training reads, decoded by the same code; a sample that cannot be decoded
is excluded, as encoding would do.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Dataset, NothingToTrain, Sample
from ditkit_core.data.masks import read_mask
from ditkit_core.data.media.clip import (
    Colours,
    MediaInfo,
    available,
    colours_of,
    media_kind,
    probe,
    stored_images,
)
from ditkit_core.data.media.image_sequence import open_folder
from ditkit_core.data.media.video import is_hdr
from ditkit_core.diagnostics.doctor import rules
from ditkit_core.diagnostics.doctor.captions import check_captions, count_captions, cut_captions
from ditkit_core.diagnostics.doctor.findings import (
    BucketRow,
    CheckReport,
    CutsCaptions,
    DatasetName,
    Excluded,
    FileRow,
    Finding,
    grouped,
    one_line,
)
from ditkit_core.diagnostics.doctor.media import (
    Fingerprint,
    WindowLook,
    look_at_window,
    near_duplicates,
    without_matrix,
)
from ditkit_core.diagnostics.report.words import plural
from ditkit_core.encoding.cache import MediaHashes
from ditkit_core.encoding.encode import clip_inputs_of
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.loader import files_of, split_held_out
from ditkit_core.encoding.prior_preservation import PRIOR_MARK
from ditkit_core.errors import EnvironmentFault, MissingDependency, UserError
from ditkit_core.io.console import progress, say, warn
from ditkit_core.models.conditions import Column
from ditkit_core.models.spec import ModelSpec
from ditkit_core.run.checks import check_prompts
from ditkit_core.run.data import RunData
from ditkit_core.run.encoding import sample_prompts
from ditkit_core.sampling.prompts import Shape, shape_of

_MOST_IN_BRIEF = 5


@dataclass(frozen=True, kw_only=True)
class ExaminedDataset:
    """The report, and the samples that can be trained on."""

    checkup: CheckReport
    samples: list[Sample]
    """Usable samples, in the order of their ids."""
    class_images: list[Sample] = field(default_factory=list)
    """Usable class images for prior preservation."""
    largest: list[Sample] = field(default_factory=list)
    """The samples of the micro-batch with the most tokens, of data or class images."""


def examine_dataset(run_data: RunData) -> ExaminedDataset:
    """Examine everything that a run would train on, without loading a model or an encoder.

    Args:
        run_data: The data of the run. All bad files are listed; `data.on_bad` decides whether they
            are errors.
    """
    config, spec = run_data.config, run_data.spec
    examination = _Examination(data=run_data)
    examination.scan(config.data, "data")
    fps = examination.fps["data"]
    if (error := examination.errors.get("data")) is not None:
        findings = [*rules.check_excluded(examination.excluded), Finding("D01", "", str(error))]
        excluded = tuple(examination.excluded)
        checkup = CheckReport(
            model=spec.name, samples=0, fps=fps, excluded=excluded, findings=tuple(findings)
        )
        return ExaminedDataset(checkup=checkup, samples=[])
    if run_data.prior_data is not None:
        examination.scan(run_data.prior_data, "prior")
    samples, class_images = examination.good["data"], examination.good["prior"]
    all_samples = [*samples, *class_images]
    captions = count_captions(all_samples, cut_captions(run_data.auxiliary, all_samples))
    data_batches = _buckets(run_data, samples)
    prior_batches = _buckets(
        run_data,
        class_images,
        "prior",
        at_most=max((row.batch_size or 1 for row in data_batches.rows), default=1),
    )
    largest = max(data_batches, prior_batches, key=lambda batches: batches.cost).largest
    copy_groups = rules.same_content(_hashes(run_data, all_samples))
    # exact copies are not reported as near-duplicates again
    copies = {id for group in copy_groups for id in group[1:]}
    near_copy_groups = near_duplicates(
        {id: print for id, print in examination.prints.items() if id not in copies}
    )
    files = list(examination.files())
    # The order of the printed findings: missing data first, then single files, then comparisons
    # between files.
    findings = [
        *rules.check_excluded(examination.excluded),
        *rules.check_excluded(examination.undecoded, "D03"),
        *_too_few(config.held_out.clips, samples),
        *_no_class_images(run_data, examination),
        *rules.check_fewest_frames(all_samples, spec.training.fewest_frames),
        *rules.check_shortened(samples, config.data, fps),
        *rules.check_crops(all_samples, config.data, spec.data.size_step),
        *rules.check_buckets(data_batches.rows),
        *rules.check_uses(data_batches.rows, config.train.steps * config.train.accumulation),
        *(
            finding
            for row, hdr in files
            for finding in rules.check_file(
                row,
                is_hdr=hdr,
                lower=rules.less_enlarged(row, config.data, spec.data.size_step),
            )
        ),
        *rules.check_coverage([row for row, _ in files]),
        *rules.check_colours(_stored_colours(run_data.auxiliary.columns, all_samples)),
        *rules.check_matrices(without_matrix([row for row, _ in files]), len(files)),
        *examination.findings,
        *map(
            refusal,
            dict.fromkeys([*examination.missing_libraries, *_prompt_errors(run_data, samples)]),
        ),
        *rules.check_duplicates(copy_groups, near_copy_groups),
        *check_captions(samples, captions, config, class_images),
    ]
    checkup = CheckReport(
        model=spec.name,
        samples=len(samples),
        class_images=len(class_images),
        fps=fps,
        buckets=(*data_batches.rows, *prior_batches.rows),
        files=tuple(row for row, _ in files),
        excluded=(*examination.excluded, *examination.undecoded),
        captions=captions,
        same=tuple(copy_groups),
        alike=tuple(near_copy_groups),
        masks=tuple(examination.masks),
        findings=tuple(findings),
    )
    return ExaminedDataset(
        checkup=checkup, samples=samples, class_images=class_images, largest=largest
    )


def summarize_data(data: RunData, encoded: Sequence[EncodedSample]) -> None:
    """Print a summary of the data before training, and warnings about likely mistakes that encoding
    has revealed.

    Args:
        encoded: The samples that were encoded. No file is read again.
    """
    ids = {sample.id for sample in encoded}
    samples = [sample for sample in data.dataset.samples if sample.id in ids]
    counts = Counter((sample.frames, sample.height, sample.width) for sample in samples)
    shapes = ", ".join(
        f"{count} of {' x '.join(map(str, shape))}" for shape, count in sorted(counts.items())
    )
    missing = len(data.dataset.excluded) + len(data.dataset.samples) - len(samples)
    say(
        f"data: {plural(len(samples), 'sample')} ({shapes}), {missing} left out; --check examines "
        f"them"
    )
    keys: dict[str, list[str]] = defaultdict(list)
    for sample in encoded:
        keys[sample.media_key].append(sample.id)
    findings = [*rules.check_duplicates([group for group in keys.values() if len(group) > 1], [])]
    findings += check_captions(samples, count_captions(samples, None), data.config)
    findings += rules.check_crops(samples, data.config.data, data.spec.data.size_step)
    findings += rules.check_fewest_frames(samples, data.spec.training.fewest_frames)
    encoder = data.auxiliary.encoders[1]
    if isinstance(encoder, CutsCaptions) and (cut := len(encoder.truncated)):
        observation = "they are too long for the text encoder and were truncated"
        findings.append(Finding("D14", plural(cut, "caption"), observation, "shorten them"))
    groups = grouped([finding for finding in findings if finding.severity == "warning"])
    for group in groups[:_MOST_IN_BRIEF]:
        warn(one_line(group))
    if more := sum(map(len, groups[_MOST_IN_BRIEF:])):
        warn(f"and {more} more; add --check to the command to see them")


@dataclass(kw_only=True)
class _Examination:
    """The state of examining the datasets, sample by sample."""

    data: RunData
    fps: dict[DatasetName, float] = field(default_factory=dict)
    good: dict[DatasetName, list[Sample]] = field(default_factory=lambda: {"data": [], "prior": []})
    excluded: list[Excluded] = field(default_factory=list)
    """Files that did not become a sample."""
    undecoded: list[Excluded] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    prints: dict[str, tuple[Path, Fingerprint]] = field(default_factory=dict)
    masks: list[float] = field(default_factory=list)
    """White share of each sample's loss mask."""
    missing_libraries: dict[str, None] = field(default_factory=dict)
    """Messages about missing libraries, in order: the run's fault and not a sample's. A dict
    without values is an ordered set."""
    errors: dict[DatasetName, UserError] = field(default_factory=dict)
    """The reason if a dataset cannot be used at all."""

    @property
    def stops(self) -> bool:
        """Whether a sample that cannot be decoded stops training."""
        return self.data.config.data.on_bad == "error"

    def scan(self, section: DataConfig, dataset: DatasetName) -> None:
        """Scan a dataset and examine each of its samples."""
        self.fps[dataset] = self.data.fps
        stopping = {"bad": self.stops, "short": section.short_clips == "error", "unused": False}
        # Scanned leniently, so that all problems are listed and not only the first one.
        lenient = replace(
            section, on_bad="skip", short_clips="skip" if stopping["short"] else section.short_clips
        )
        try:
            scan: Dataset | NothingToTrain = self.data.scanned(lenient, f"{dataset}.folder")
        except NothingToTrain as error:
            scan = self.errors[dataset] = error
        except UserError as error:
            self.errors[dataset] = error
            return
        self.excluded += [
            Excluded(name=name, reason=reason, stops=stopping[kind])
            for (name, reason), kind in zip(scan.excluded, scan.kinds, strict=True)
        ]
        if isinstance(scan, NothingToTrain):
            return
        self.fps[dataset] = scan.fps
        with progress(
            "check clips" if dataset == "data" else "check class images", len(scan.samples)
        ) as bar:
            for sample in scan.samples:
                # Marked as encoding does: a class image may have the same id as a clip.
                self._examine(
                    sample if dataset == "data" else replace(sample, id=PRIOR_MARK + sample.id),
                    dataset,
                )
                bar.advance()

    def _examine(self, sample: Sample, dataset: DatasetName) -> None:
        """Read what training would read of a sample: the clip, decoded at low size, and its
        conditions as they are encoded."""
        look: WindowLook | None = None
        masked: float | None = None
        of_conditions: list[Finding] = []
        good, columns = self.good[dataset], self.data.auxiliary.columns
        fps = self.fps[dataset] if media_kind(sample.media) == "video" else 0.0
        try:
            look = look_at_window(
                sample.media, frames=sample.frames, fps=fps, start_seconds=sample.start_seconds
            )
            for reference in sample.references:
                for _ in stored_images(reference, frames=1, fps=0.0):
                    pass  # decoding is the check
            if self.data.auxiliary.readers is not None:
                self.data.auxiliary.readers.check(clip_inputs_of(sample, self.fps[dataset]))
            masked = self._masked(sample, fps)
            of_conditions = list(rules.check_boundary_images(sample, columns, fps))
            # Once per file: its windows follow each other, so only the last sample needs comparing.
            if all(sample.media != other.media for other in good[-1:]):
                of_conditions += rules.check_control_videos(sample, columns)
                of_conditions += rules.check_sounds(sample, columns)
            of_conditions += rules.check_silence(sample, columns, self.fps[dataset])
        except MissingDependency as error:
            self.missing_libraries[str(error)] = None
        except EnvironmentFault:
            raise
        except UserError as error:
            self.undecoded.append(Excluded(name=sample.id, reason=str(error), stops=self.stops))
            return
        good.append(sample)
        if masked is not None:
            self.masks.append(masked)
            of_conditions += rules.check_mask(sample, masked, self.data.config.train.mask_weight)
        self.findings += [
            *(rules.check_frames(sample.id, look, fps) if look else ()),
            *of_conditions,
        ]
        if look and look.fingerprint is not None:
            self.prints[sample.id] = (sample.media, look.fingerprint)

    def _masked(self, sample: Sample, fps: float) -> float | None:
        """The white share of a sample's loss mask, which is read as it is encoded; None without
        one."""
        if sample.mask is None:
            return None
        read = partial(
            read_mask,
            sample.mask,
            height=sample.height,
            width=sample.width,
            frames=sample.frames,
            crop=sample.crop,
        )
        return float(read(fps=fps, start_seconds=sample.start_seconds).mean())

    def files(self) -> Iterator[tuple[FileRow, bool]]:
        """Each file with its trained part, and whether it is HDR; damage after that part becomes a
        finding."""
        windows: dict[tuple[DatasetName, Path], list[Sample]] = defaultdict(list)
        for dataset, good in self.good.items():
            for sample in good:
                windows[dataset, sample.media].append(sample)
        for (dataset, path), samples in windows.items():
            fps = self.fps[dataset]
            try:
                info = probe(path)
            except UserError as error:
                # damaged after its windows, which were decoded without an error
                end = max(s.start_seconds + s.frames / fps for s in samples)
                extent = available(path, fps, at_most=1)
                info = MediaInfo(
                    kind="video", width=extent.width, height=extent.height, seconds=end, fps=fps
                )
                self.findings += rules.check_damaged_rest(str(path), info, error)
            if info.kind == "video" and not info.seconds:  # images of a folder that gives no rate
                info = replace(info, seconds=available(path, fps).frames / fps, fps=fps)
            hdr = info.kind == "video" and path.is_file() and is_hdr(path)
            yield rules.file_row(str(path), info, samples, fps, dataset), hdr


def _hashes(data: RunData, samples: Sequence[Sample]) -> dict[str, tuple[str, Path]]:
    """Content hash and path of each sample that is one file. Encoding needs the same hashes, and
    they are remembered for it."""
    with MediaHashes(data.cache.folder) as hashes:
        return {
            sample.id: (hashes.of(sample.media), sample.media)
            for sample in samples
            if sample.media.is_file()
        }


def _stored_colours(columns: Sequence[Column], samples: Sequence[Sample]) -> dict[str, Colours]:
    """The colours of all images and videos that are read as such and do not store sRGB, by file;
    masks are read as they are stored."""
    visual = [column.name for column in columns if column.kind in ("image", "video")]
    files: dict[Path, None] = {}  # without values an ordered set
    for sample in samples:
        controls = [Path(sample.controls[name]) for name in visual if name in sample.controls]
        for path in (sample.media, *sample.references, *controls):
            files |= dict.fromkeys(open_folder(path).files if path.is_dir() else [path])
    stored = ((str(path), colours_of(path)) for path in files)
    return {name: colours for name, colours in stored if colours is not None}


def shape_for(data: RunData, sample: Sample) -> Shape:
    """The shape of a sample; all samples of a micro-batch have the same."""
    return shape_of(sample, data.auxiliary.columns, data.spec.data.reference_size)


class _Batches(NamedTuple):
    """The shapes of a dataset and its largest micro-batch."""

    rows: list[BucketRow]
    largest: list[Sample]
    """The samples of the largest micro-batch."""
    cost: int
    """Size of that micro-batch in tokens, or in pixels if tokens are unknown; only for
    comparisons."""


def _buckets(
    data: RunData,
    samples: Sequence[Sample],
    dataset: DatasetName = "data",
    *,
    at_most: int | None = None,
) -> _Batches:
    """Group samples by shape and find the largest micro-batch.

    Args:
        at_most: Largest number of samples in a micro-batch: each of the data is followed by as many
            class images as it has samples.
    """
    train, arch = data.config.train, data.auxiliary.arch
    ids = [sample.id for sample in samples]
    held_out: set[str] = set()
    with suppress(UserError):  # `_too_few` reports it if no sample would be left to train
        count = data.config.held_out.clips if dataset == "data" else 0
        held_out = set(split_held_out(ids, count, files_of(samples))[1])
    groups: dict[Shape, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[shape_for(data, sample)].append(sample)
    rows, largest, most = [], list[Sample](), 0
    for shape, members in sorted(groups.items(), key=lambda pair: pair[0]):
        (frames, height, width), references = shape
        trained = [sample for sample in members if sample.id not in held_out]
        # None if the architecture is not known here
        tokens = (
            None
            if arch is None
            else data.spec.training.num_tokens(empty_item_of(data.spec, arch, shape))
        )
        size: int | None = train.batch_size
        if train.batch_tokens:
            size = max(1, train.batch_tokens // tokens) if tokens else None
        size = min(size, at_most) if size and at_most else size
        weight = sum(sample.repeats for sample in trained)
        row = BucketRow(
            dataset=dataset,
            frames=frames,
            height=height,
            width=width,
            references=len(references),
            samples=len(members),
            held_out=len(members) - len(trained),
            tokens=tokens,
            batch_size=size,
            micro_batches=-int(-weight // size) if size and dataset == "data" else None,
        )
        rows.append(row)
        batch = trained[: size or 1]
        # Pixels if tokens are unknown: they put the shapes of one model in the same order.
        cost = len(batch) * (tokens or frames * height * width)
        if cost > most:
            largest, most = batch, cost
    return _Batches(rows, largest, most)


def empty_item_of(spec: ModelSpec, arch: Any, shape: Shape) -> dict[str, Tensor]:
    """A training item of this shape on `meta`."""
    with torch.device("meta"):
        return spec.training.empty_item(arch, *shape)


def _prompt_errors(data: RunData, samples: Sequence[Sample]) -> Iterator[str]:
    """The reason why the samples of the [sample] section cannot be generated, if there is one."""
    try:
        check_prompts(data, sample_prompts(data, samples))
    except UserError as error:
        yield str(error)


def refusal(why: UserError | str) -> Finding:
    """The finding for an error that training itself would stop with."""
    return Finding("D21", "", str(why))


def _no_class_images(data: RunData, examination: _Examination) -> Iterator[Finding]:
    """The finding that no class image can be used, if the run has a folder of them."""
    if (error := examination.errors.get("prior")) is not None:
        yield Finding("D01", "", str(error))
    elif data.prior_data is not None and not examination.good["prior"]:
        observation = "no class image can be read: training would run without prior preservation"
        yield Finding(
            "D01",
            "prior.folder",
            observation,
            "fix the files, or remove [prior]",
            severity="warning",
        )


def _too_few(count: int, samples: Sequence[Sample]) -> Iterator[Finding]:
    try:
        split_held_out([sample.id for sample in samples], count, files_of(samples))
    except UserError:
        if not samples:
            observation = "nothing is left to train on: every sample is left out"
            yield Finding("D01", "", observation, "fix the files in the table of excluded files")
            return
        shortage = f"{plural(len(samples), 'sample')} can be trained on, and {count} are held out, windows of a file together"
        remedy = "add clips, fix those that are left out, or lower held_out.clips"
        yield Finding("D01", "held_out.clips", f"{shortage}: none is left", remedy)
