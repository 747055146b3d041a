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
    plan: bool = False
    """Say what the run will hold on each device, and whether it fits, and stop; needs no weights and no GPU. Exit status 0 if it
    fits, 3 if not."""
    fit: bool = False
    """Choose checkpointing, division, swapped blocks and quantization for the devices, print the whole configuration and stop."""
    gpus: str = ""
    """Devices to plan for in place of those here: `24GiB`, `2x24GiB,1x16GiB`, `rtx4090`."""
    host: str = ""
    """Host memory that streamed weights may take in a plan: `32GiB`. Unset: what is free here less 2 GiB; with --gpus any."""
    write: str = ""
    """File to save the configuration in that --fit chose."""
    audit_precision: bool = False
    """Say which operation's precision matters in this run: one batch against fp64, with one place of [precision] lowered at a time, and
    what each costs. Written into the run folder's audit; trains nothing."""
    json: bool = False
    """Print the plan, or the audit, as JSON."""


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
    dtype: Literal["bf16", "fp32", "fp8_scaled"] | None = None
    """Dtype of the file's tensors; fp8_scaled is for a whole transformer. Unset: export.dtype."""
    merge: bool = False
    """Merge the adapter into the base and write the whole transformer."""
    out: str = ""
    """File to write instead of one in the run's exports folder; for a whole transformer a folder. Of several forms, those other than
    the official one append their name to the file's."""
    step: int | None = None
    """Save to export, by its step. Unset: the latest."""
