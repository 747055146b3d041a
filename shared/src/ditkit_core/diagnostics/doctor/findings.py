"""The dataset doctor's report as plain values: what will be trained, what is left out, and what is
likely to be a mistake.

Every finding has a code that never changes its meaning, so that programs can rely on it;
docs/doctor.md lists them.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

SCHEMA = 1
"""Version of the JSON; raised when a key is removed or changes its meaning."""

DatasetName = Literal["data", "prior"]
"""The section of the configuration with the dataset; `prior` has the class images."""

Severity = Literal["error", "warning", "note"]
"""A run with an error cannot be trained; a warning is likely to be a mistake, and a note worth
knowing."""

CODES: Mapping[str, str] = {
    "D01": "the dataset as a whole cannot be used",
    "D02": "a file, a caption or a line of metadata is bad",
    "D03": "a clip, or one of its conditions, cannot be decoded",
    "D04": "files with the same content",
    "D05": "clips that look nearly alike",
    "D06": "a hard cut inside a clip",
    "D07": "blank frames",
    "D08": "a clip that does not move",
    "D09": "a frame that is frozen for a second or more",
    "D10": "an HDR video",
    "D11": "images that are upscaled",
    "D12": "a video with a lower frame rate than is trained",
    "D13": "most of a video is not trained on",
    "D14": "a caption that is too long for the text encoder",
    "D15": "many files with one caption",
    "D16": "an empty caption",
    "D17": "fewer samples of a shape than a micro-batch has",
    "D18": "an image that does not match the beginning or end of its clip",
    "D19": "a condition video or sound that does not match its clip in time or shape",
    "D20": "the model was not tried",
    "D21": "the model, its files or its settings cannot be trained, or the samples cannot be generated",
    "D22": "a loss or gradient is not finite",
    "D23": "parameters that get no gradient",
    "D24": "a save that differs when it is read back",
    "D25": "the largest micro-batch runs out of memory",
    "D26": "the plan needs more memory than is available",
    "D27": "a video that is damaged after the part that is trained",
    "D28": "clips so short that the model is conditioned on all their frames",
    "D29": "a loss mask that is black or white everywhere",
    "D30": "files whose colours are converted to sRGB",
    "D31": "colours that cannot be converted",
    "D32": "pictures of which more than a quarter is cut away",
    "D33": "clips that are shorter than asked for, and trained as they are",
    "D34": "a clip whose sound is silent",
    "D35": "few samples for so many steps",
    "D40": "an HD video that does not name its matrix of colours",
    "D41": "captions that hardly differ",
    "D42": "captions or prompts without the trigger word",
    "D43": "class images that are described with the trigger word",
    "D44": "captions with leftovers of the program that wrote them",
    "D45": "captions of several lines",
}
"""The subject of each code."""
_SEVERITIES: Mapping[str, Severity] = {
    **dict.fromkeys(("D01", "D21", "D22", "D23", "D24", "D25"), "error"),
    **dict.fromkeys(("D13", "D15", "D17", "D20", "D30", "D33", "D35", "D40", "D41", "D45"), "note"),
}
"""Of codes that are no warnings."""

_NAME_THEIR_FILE = ("D02", "D03", "D27")
"""Codes whose findings quote another message, which usually begins with the file's name; it is then
not printed twice."""


@dataclass(frozen=True)
class Finding:
    """One thing to know or to fix."""

    code: str
    severity: Severity = field(default="", kw_only=True)  # type: ignore[arg-type]
    """By default the code's."""
    where: str
    """A file, a sample, a setting."""
    observation: str
    remedy: str = ""
    """How to fix it."""
    settings: tuple[Mapping[str, Any], ...] = field(default=(), kw_only=True)
    """The remedies that are settings, by dotted key: one of them does. The remedy names them."""

    def __post_init__(self) -> None:
        assert self.code in CODES, self.code
        assert all(key in self.remedy for keys in self.settings for key in keys), self.remedy
        object.__setattr__(self, "severity", self.severity or _SEVERITIES.get(self.code, "warning"))

    def __str__(self) -> str:
        named = not self.where or (self.code in _NAME_THEIR_FILE and self.where in self.observation)
        text = (
            f"{self.code} {self.observation}"
            if named
            else f"{self.code} {self.where}: {self.observation}"
        )
        return f"{text}; {self.remedy}" if self.remedy else text


_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first names, and the number of the others, on one line."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def grouped(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings that differ only in names and numbers, together; in each group the smallest numbers
    come first."""
    groups: dict[tuple[str, ...], list[Finding]] = defaultdict(list)
    for finding in findings:
        text = (
            re.sub(rf"\S*{re.escape(finding.where)}\S*", "", finding.observation)
            if finding.where
            else finding.observation
        )
        groups[
            finding.severity, finding.code, _NUMBER.sub("", text), _NUMBER.sub("", finding.remedy)
        ].append(finding)
    return [
        sorted(
            group,
            key=lambda finding: [
                float(number)
                for number in _NUMBER.findall(finding.observation.replace(finding.where, ""))
            ],
        )
        for group in groups.values()
    ]


def one_line(group: Sequence[Finding]) -> str:
    """One of the groups of `grouped` as a line: the first finding, and the names of the others."""
    others = [finding.where for finding in group[1:]]
    return f"{group[0]} (and {len(others)} more: {listed(others)})" if others else str(group[0])


@dataclass(frozen=True, kw_only=True)
class BucketRow:
    """Samples of one shape."""

    dataset: DatasetName = "data"
    frames: int
    height: int
    """Pixels, as `width`."""
    width: int
    references: int
    """Reference images of each sample."""
    samples: int
    held_out: int
    """Number of these samples that are held out for validation and never trained."""
    tokens: int | None
    """Tokens of one sample in the blocks; None if the architecture is not known."""
    batch_size: int | None
    """Samples of a full micro-batch."""
    micro_batches: int | None
    """Micro-batches per epoch; None if unknown, and for class images, which go with the
    micro-batches of the data."""


@dataclass(frozen=True, kw_only=True)
class FileRow:
    """One file and the part of it that is trained."""

    dataset: DatasetName = "data"
    file: str
    samples: int
    """Number of its windows."""
    seconds: float
    """Duration; 0 for an image, as `fps`."""
    fps: float
    trained_fps: float
    frames: int
    """Frames of the file at the trained rate."""
    kept: int
    dropped: int
    height: int
    """Pixels, as `width`."""
    width: int
    enlarged: float
    """Largest factor by which a side of its images is upscaled; 1 if none is."""
    ids: tuple[str, ...] = ()
    """Names of its samples, by which findings call them."""


@dataclass(frozen=True, kw_only=True)
class Excluded:
    """A file or sample that is not trained on."""

    name: str
    reason: str
    stops: bool
    """Whether it stops training; else it is left out."""


@dataclass(frozen=True, kw_only=True)
class CutCaption:
    """A caption that is too long: the text encoder reads only its beginning."""

    sample: str
    tokens: int
    """Number of tokens that are cut off."""
    kept: str
    """The part that is read."""


@dataclass(frozen=True, kw_only=True)
class CaptionRow:
    """All captions together."""

    count: int
    distinct: int
    empty: int
    cut: tuple[CutCaption, ...] | None
    """None if no tokenizer could be read."""


@dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """The planned memory of an accelerator in a step, in bytes."""

    device: str
    peak: int
    """Peak of the run."""
    reserve: int
    """Left to other programs and to the driver."""
    total: int
    fits: bool


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Whether a run fits its accelerators."""

    batch: str = ""
    """The micro-batch of the plan; empty if nothing was planned."""
    devices: tuple[DeviceRow, ...] = ()
    fits: bool | None = None
    """Whether training, encoding and sampling fit; None if nothing was planned."""
    why_not: str = ""
    """The reason if nothing was planned."""


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """The trial of two steps on the largest micro-batch, and of a save."""

    expert: str
    """The expert that was tried; empty if the model has one transformer."""
    frames: int
    height: int
    width: int
    samples: tuple[str, ...]
    tokens: int
    losses: tuple[float, ...]
    """Loss of each of the two steps."""
    grad_norms: tuple[float, ...]
    parameters: int
    """Number of trained tensors."""
    without_gradient: tuple[str, ...]
    """Trained tensors that got no gradient in either step."""
    reloaded: bool | None
    """Whether a save was bitwise identical when read back; None if none was made."""
    peak_bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The doctor's report about a run."""

    model: str
    samples: int
    class_images: int = 0
    """Number of class images for prior preservation, not counted in `samples`."""
    fps: float
    buckets: tuple[BucketRow, ...] = ()
    files: tuple[FileRow, ...] = ()
    excluded: tuple[Excluded, ...] = ()
    captions: CaptionRow | None = None
    same: tuple[tuple[str, ...], ...] = ()
    """Samples whose files have the same content."""
    alike: tuple[tuple[str, ...], ...] = ()
    """Samples that look nearly alike."""
    masks: tuple[float, ...] = ()
    """Share of the pixels that is white, for each sample with a loss mask."""
    memory: MemoryPlan | None = None
    """None if there is nothing to plan for."""
    steps: tuple[StepRow, ...] = ()
    """The trial of each transformer that is trained."""
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0

    @property
    def trainable(self) -> bool:
        """Whether the run can be trained as it is."""
        return not any(finding.severity == "error" for finding in self.findings)

    @property
    def kept(self) -> int:
        """Number of frames of all files that are trained on."""
        return sum(row.kept for row in self.files)

    @property
    def dropped(self) -> int:
        """Number of frames of all files that are not trained on."""
        return sum(row.dropped for row in self.files)


_JSON_NAMES = {"observation": "what"}


def check_json(checkup: CheckReport) -> dict[str, Any]:
    """The report as plain values; docs/doctor.md describes each key."""
    values = asdict(
        checkup,
        dict_factory=lambda pairs: {_JSON_NAMES.get(name, name): value for name, value in pairs},
    )
    totals = {"kept": checkup.kept, "dropped": checkup.dropped}
    # Schema 1 has this name; without it, it would be another schema.
    former = {"class_pictures": checkup.class_images}
    return {"schema": SCHEMA, "trainable": checkup.trainable, **values, "frames": totals, **former}


@runtime_checkable
class CutsCaptions(Protocol):
    """A text encoder that can tell, without its weights, how much of a caption it reads."""

    truncated: list[str]
    """A line for each caption that was truncated during encoding."""

    def cut_of(self, caption: str, num_pictures: int = 0) -> tuple[int, str] | None:
        """The number of tokens that are cut off, and the text that is read; None if the whole
        caption is read.

        Args:
            num_pictures: References of its sample.
        """
        ...
