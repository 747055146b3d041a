"""What each command is told beside the configuration: flags that belong to one call and are not stored with the run."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `train`."""

    demo: bool = False
    """Train on a generated tiny checkpoint and generated clips, written into the run folder."""
    init_from: str = ""
    """Run folder whose trained weights this new run starts from, at step 0."""


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """Options of `encode`."""

    demo: bool = False
    """Encode the demo's generated clips."""


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Options of `sample`."""

    demo: bool = False
    """Sample with the demo's run."""
    adapter: str = ""
    """Adapter file to sample with instead of the run's latest."""
    prompt: tuple[str, ...] = ()
    """Prompt to sample, in place of those in sample.prompts; repeat the flag for several."""
    reference: tuple[str, ...] = ()
    """Picture to edit, in place of those in sample.references; repeat the flag for several."""
    images: int | None = None
    """How many to draw of each prompt. Unset: sample.images."""
    seed: int | None = None
    """Seed of the first one. Unset: sample.seed."""
    out: str = ""
    """Folder for the samples instead of the run's samples folder."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of `export`."""

    demo: bool = False
    """Export the demo's run."""
    to: Literal["official", "diffusers"] | None = None
    """Names that the file's tensors get; official is what ComfyUI loads. Unset: those of export.forms."""
    dtype: Literal["bf16", "fp32"] | None = None
    """Dtype of the file's tensors. Unset: export.dtype."""
    merge: bool = False
    """Merge the adapter into the base and write the whole transformer."""
    out: str = ""
    """File to write instead of one in the run's exports folder; for a whole transformer a folder. Of several forms, those other than
    the official one append their name to the file's."""
    step: int | None = None
    """Save to export, by its step. Unset: the latest."""
