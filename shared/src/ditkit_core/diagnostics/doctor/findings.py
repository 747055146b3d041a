"""What the dataset doctor finds, as plain values: what will be trained, what is left out, and what is likely to be a mistake.

Every finding has a code that stays the same, so that programs can go by it; docs/doctor.md lists them.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, runtime_checkable

SCHEMA = 1
"""Version of the JSON: raised when a key goes or changes its meaning."""

DatasetName = Literal["data", "prior"]
"""The section of the configuration that names it: `prior` is of class pictures."""

Severity = Literal["error", "warning", "note"]
"""An error keeps the run from being trained."""

CODES: Mapping[str, str] = {
    "D01": "the dataset as a whole cannot be used",
    "D02": "a file, a caption or a line of metadata is bad",
    "D03": "a clip, or what goes with it, cannot be read where it is trained on",
    "D04": "files with the same content",
    "D05": "clips that look nearly alike",
    "D06": "a hard cut inside a clip",
    "D07": "blank pictures",
    "D08": "a clip that does not move",
    "D09": "a picture that stays for a second or more",
    "D10": "an HDR video",
    "D11": "pictures that are enlarged",
    "D12": "a video with fewer frames per second than are trained",
    "D13": "most of a video is not trained on",
    "D14": "a caption that is too long for the text encoder",
    "D15": "many files with one caption",
    "D16": "an empty caption",
    "D17": "fewer samples of a shape than a micro-batch has",
    "D18": "a picture that is not how its clip begins or ends",
    "D19": "a video that does not lie over the clip that it goes with",
    "D20": "the model was not tried",
    "D21": "the model, its files or its settings cannot be trained, or what is to be drawn cannot be",
    "D22": "a loss or gradient is not finite",
    "D23": "parameters that get no gradient",
    "D24": "a save that does not come back as it was",
    "D25": "memory does not suffice for the largest micro-batch",
    "D26": "more memory is planned for than there is",
    "D27": "a video that is damaged behind what is trained of it",
    "D28": "clips of so few frames that the model is told all of them",
}
"""What each finding is about."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing to know or to mend."""

    code: str
    severity: Severity
    where: str
    """A file, a sample, a setting."""
    what: str
    remedy: str
    """How to mend it."""

    def __post_init__(self) -> None:
        assert self.code in CODES, self.code

    @classmethod
    def error(cls, code: str, where: str, what: str, remedy: str = "") -> "Finding":
        """What keeps the run from being trained."""
        return cls(code=code, severity="error", where=where, what=what, remedy=remedy)

    @classmethod
    def warning(cls, code: str, where: str, what: str, remedy: str) -> "Finding":
        """What is likely to be a mistake."""
        return cls(code=code, severity="warning", where=where, what=what, remedy=remedy)

    @classmethod
    def note(cls, code: str, where: str, what: str, remedy: str) -> "Finding":
        """What is worth knowing."""
        return cls(code=code, severity="note", where=where, what=what, remedy=remedy)

    def __str__(self) -> str:
        text = f"{self.code} {self.where}: {self.what}" if self.where else f"{self.code} {self.what}"
        return f"{text}; {self.remedy}" if self.remedy else text


@dataclass(frozen=True, kw_only=True)
class BucketRow:
    """Samples of one shape."""

    dataset: DatasetName = "data"
    frames: int
    height: int
    """Pixels, as `width`."""
    width: int
    references: int
    """Pictures that each is made from."""
    samples: int
    held_out: int
    """How many of them are measured on and never trained."""
    tokens: int | None
    """Of one sample in the blocks; None if the architecture is not known."""
    batch_size: int | None
    """Samples of a full micro-batch."""
    micro_batches: int | None
    """In an epoch; None for class pictures too, which go with the micro-batches of the data."""


@dataclass(frozen=True, kw_only=True)
class FileRow:
    """One file and what is trained of it."""

    dataset: DatasetName = "data"
    file: str
    samples: int
    """Windows of it."""
    seconds: float
    """0 for an image, as `fps`."""
    fps: float
    trained_fps: float
    frames: int
    """At the trained rate."""
    kept: int
    dropped: int
    height: int
    """Pixels, as `width`."""
    width: int
    enlarged: float
    """By how much its pictures are made larger at most, side by side; 1 where they are not."""


@dataclass(frozen=True, kw_only=True)
class Excluded:
    """What is not trained on."""

    name: str
    reason: str
    stops: bool
    """Whether training would stop for it rather than leave it out."""


@dataclass(frozen=True, kw_only=True)
class CutCaption:
    """A caption of which the text encoder reads only the beginning."""

    sample: str
    tokens: int
    """Tokens that are cut."""
    kept: str
    """What is read."""


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
    """What an accelerator is planned to hold in a step; bytes."""

    device: str
    peak: int
    """At most."""
    reserve: int
    """Left to others and to the driver."""
    total: int
    fits: bool


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Whether a run fits its accelerators."""

    batch: str = ""
    """The micro-batch that is planned for; empty if none is."""
    devices: tuple[DeviceRow, ...] = ()
    fits: bool | None = None
    """All of it, with encoding and drawing; None if it was not planned."""
    why_not: str = ""
    """Why it was not planned."""


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """Two steps on the largest micro-batch, and a save of what they trained."""

    expert: str
    """Which of several transformers; empty where there is one."""
    frames: int
    height: int
    width: int
    samples: tuple[str, ...]
    tokens: int
    losses: tuple[float, ...]
    """Of the two steps that were taken."""
    grad_norms: tuple[float, ...]
    parameters: int
    """How many tensors are trained."""
    without_gradient: tuple[str, ...]
    """Those that no step brought a gradient to."""
    reloaded: bool | None
    """Whether a save came back to the bit; None if none was made."""
    peak_bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Everything that the doctor says of a run."""

    model: str
    samples: int
    class_pictures: int = 0
    """How many samples of prior preservation there are beside those."""
    fps: float
    buckets: tuple[BucketRow, ...] = ()
    files: tuple[FileRow, ...] = ()
    excluded: tuple[Excluded, ...] = ()
    captions: CaptionRow | None = None
    same: tuple[tuple[str, ...], ...] = ()
    """Samples whose files have the same content."""
    alike: tuple[tuple[str, ...], ...] = ()
    """Samples that look nearly alike."""
    memory: MemoryPlan | None = None
    """None if there is nothing to plan for."""
    steps: tuple[StepRow, ...] = ()
    """One for each transformer that is trained."""
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0

    @property
    def trainable(self) -> bool:
        """Whether the run can be trained as it is."""
        return not any(finding.severity == "error" for finding in self.findings)

    @property
    def kept(self) -> int:
        """Frames that are trained on, of all files."""
        return sum(row.kept for row in self.files)

    @property
    def dropped(self) -> int:
        """Frames of these files that are not."""
        return sum(row.dropped for row in self.files)


def check_json(checkup: CheckReport) -> dict[str, Any]:
    """The checkup as plain values; docs/doctor.md says what each is."""
    found = asdict(checkup)
    totals = {"kept": checkup.kept, "dropped": checkup.dropped}
    return {"schema": SCHEMA, "trainable": checkup.trainable, **found, "frames": totals}


@runtime_checkable
class CutsCaptions(Protocol):
    """A text encoder that can say, without its weights, what it reads of a caption."""

    truncated: list[str]
    """Captions that were cut when they were encoded, a line for each."""

    def cut_of(self, caption: str) -> tuple[int, str] | None:
        """How many tokens are cut, and the text that is read; None if all of it is.

        Raises:
            UserError: If the tokenizer cannot be read.
        """
        ...
