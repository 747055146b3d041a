"""The flags of each command that belong to one call and are not stored with the run, and which of them go together."""

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from ditkit_core.errors import UserError
from ditkit_core.models.adapter_formats import ADAPTER_FORMS, nearest_form

_ONE_FILE = "inspect adapter extract"
"""Options of `export` that name a file to work on, in place of a run."""


def option(
    default: Any, *, goes_with: Mapping[str, str] | None = None, excludes: Mapping[str, str] | None = None
) -> Any:
    """An option that does not go with every other.

    Args:
        default: Its value where it is not given.
        goes_with: By names of other options, of which it needs one, what to say where none of them is given.
        excludes: By names of other options what to say where `{other}` is given too. The option's own name goes before what is said.
    """
    return dataclasses.field(default=default, metadata={"goes_with": goes_with or {}, "excludes": excludes or {}})


def check_combination(options: Any) -> None:
    """Check which options are given together.

    Raises:
        UserError: If one excludes another, or lacks one that it goes with.
    """
    given = [field for field in dataclasses.fields(options) if getattr(options, field.name) != field.default]
    flags = {field.name: f"--{field.name.replace('_', '-')}" for field in given}
    # All contradictions go first: where two options exclude each other, adding what one of them lacks would be no remedy.
    for field in given:
        for names, message in field.metadata.get("excludes", {}).items():
            if other := next((flags[name] for name in names.split() if name in flags), ""):
                raise UserError(f"{flags[field.name]} {message.format(other=other)}; leave one of them out")
    for field in given:
        for names, message in field.metadata.get("goes_with", {}).items():
            if not any(name in flags for name in names.split()):
                raise UserError(f"{flags[field.name]} {message}")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `train`."""

    demo: bool = False
    """Train on a generated tiny checkpoint and generated clips, written into the run folder."""
    init_from: str = ""
    """Run folder whose trained weights this new run starts from, at step 0."""
    plan: bool = option(False, excludes={"fit": "and --fit: --fit says what its choice will hold as well"})
    """Say what the run will hold on each device, and whether it fits, and stop; needs no weights and no GPU. Exit status 0 if it
    fits, 3 if not."""
    fit: bool = False
    """Choose checkpointing, division, swapped blocks and quantization for the devices, print the whole configuration and stop."""
    gpus: str = option(
        "", goes_with={"plan fit": "says what to plan for; give --plan or --fit with it, or set train.devices to train"}
    )
    """Devices to plan for in place of those here: `24GiB`, `2x24GiB,1x16GiB`, `rtx4090`."""
    host: str = option("", goes_with={"plan fit": "says what to plan with; give --plan or --fit with it"})
    """Host memory that streamed weights may take in a plan: `32GiB`. Unset: what is free here less 2 GiB; with --gpus any."""
    write: str = option("", goes_with={"fit": "saves the configuration that --fit chose; give --fit with it"})
    """File to save the configuration in that --fit chose."""
    audit_precision: bool = option(
        False, excludes={"plan fit": "and {other}: one computes, the other needs no weights"}
    )
    """Say which operation's precision matters in this run: one batch against fp64, with one place of [precision] lowered at a time, and
    what each costs. Written into the run folder's audit; trains nothing."""
    check: bool = option(
        False, excludes={"plan fit audit_precision report": "and {other}: each does its work and stops"}
    )
    """Look after data and model before they are trained: what will be trained on, what is left out and why, cuts, duplicates and cut
    captions, and two steps on the largest micro-batch of which nothing is kept. Written into the run folder as check.json and
    check.html. Exit status 0 if the run can be trained, 1 if not."""
    json: bool = option(
        False,
        goes_with={
            "plan audit_precision check": "prints a plan, an audit or a check; give --plan with it, --audit-precision or --check"
        },
    )
    """Print the plan, the audit or the check as JSON."""
    report: bool = option(
        False, excludes={"plan fit audit_precision": "writes the page of a run and stops, and {other} does other work"}
    )
    """Write the run's report.html anew from its files and stop; with --run. Needs no model, and may be asked while the run goes on."""


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """Options of `encode`."""

    demo: bool = False
    """Encode the demo's generated clips."""
    dump: str = ""
    """Folder to write what each sample became: the pixels that the encoder is given as .mp4 or .png, its captions as .txt."""
    verify_cache: bool = False
    """First read every entry of the cache against the digest that it was stored with; damaged ones are removed, and encoded again if
    they are of this data."""
    prune_cache: str = ""
    """Then remove from the cache `unused` (what no run in the folder of this run needs), what was last needed so many days ago (`30d`),
    or what was needed longest ago, down to a size (`50GB`). What this data needs stays."""


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Options of `sample`."""

    demo: bool = False
    """Sample with the demo's run."""
    adapter: str = ""
    """Adapter file to sample with instead of the run's latest; of a model with two experts that of the high-noise one."""
    adapter_low: str = ""
    """Adapter file of the low-noise expert. An expert without a file draws as it is, if the other has one."""
    prompt: tuple[str, ...] = ()
    """Prompt to sample, in place of those in sample.prompts; repeat the flag for several."""
    reference: tuple[str, ...] = ()
    """Picture to edit, in place of those in sample.references; repeat the flag for several."""
    control: tuple[str, ...] = ()
    """What to draw with, as column=path (`input_image=cat.png`), in place of sample.controls; repeat the flag for several."""
    images: int | None = None
    """How many to draw of each prompt. Unset: sample.images."""
    seed: int | None = None
    """Seed of the first one. Unset: sample.seed."""
    out: str = ""
    """Folder for the samples instead of the run's samples folder."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of `export`."""

    demo: bool = option(False, excludes={_ONE_FILE: "is a run's, and {other} works on a file"})
    """Export the demo's run."""
    to: str | None = None
    """Names that the file's tensors get: official (ComfyUI and most others load it), diffusers, diffsynth or musubi. Unset: those of
    export.forms, and of a file its own."""
    dtype: Literal["bf16", "fp32", "fp8_scaled"] | None = None
    """Dtype of the file's tensors; fp8_scaled is for a whole transformer. Unset: export.dtype, and of an adapter file its own."""
    merge: bool = option(
        False,
        excludes={
            "extract": "and --extract: one puts an adapter in, the other takes one out",
            "rank": "and --rank: a merged adapter has no rank; reduce it first, then merge what was written",
        },
    )
    """Merge the adapter into the base and write the whole transformer."""
    out: str = ""
    """File to write instead of one in the run's exports folder, or beside the file that was given; for a whole transformer a folder.
    Of several forms, those other than the official one append their name to the file's."""
    step: int | Literal["best"] | None = option(None, excludes={_ONE_FILE: "is a run's, and {other} works on a file"})
    """Save to export, by its step; best is the one with the lowest held-out loss. Unset: the latest."""
    inspect: str = option(
        "",
        excludes={
            "adapter extract": "and {other}: one file is worked on at a time",
            "to dtype merge out rank strength": "writes nothing, and {other} is about what is written",
        },
    )
    """Say what this file is: form, ranks, modules, norms, which preset it fits, which programs load it. Writes nothing."""
    adapter: str = option(
        "",
        excludes={"extract": "and --extract: one file is worked on at a time"},
        goes_with={
            "to rank merge dtype": "FILE: say what to make of it: --to FORM, --rank N, --dtype, or --merge; --inspect FILE describes it"
        },
    )
    """Adapter file to work on in place of a run: with --to, --rank or --merge."""
    rank: str = option(
        "",
        goes_with={
            "adapter extract": "is about a file: give --adapter FILE or --extract TUNED with it; a run's rank is adapter.rank"
        },
    )
    """Rank to reduce the adapter file to, or of what is extracted: 16, or auto:0.95 for the least that keeps this share of the energy in
    each module."""
    extract: str = option("", goes_with={"rank": "needs the rank of the adapter: --rank 32, or --rank auto:0.95"})
    """Whole transformer to take a low-rank adapter out of: its difference to --base."""
    base: str = option(
        "", goes_with={_ONE_FILE: "goes with --extract, --inspect and --adapter FILE; a run knows its base"}
    )
    """Transformer that --extract compares with, --merge merges into, and a file is to fit: a file, a folder, or a folder or hub id in
    diffusers layout. Unset: model.*."""
    strength: float | None = option(
        None,
        goes_with={
            "merge": "is how strongly an adapter file is merged; give --adapter FILE --merge with it",
            "adapter": "is how strongly an adapter file is merged; give --adapter FILE --merge with it",
        },
    )
    """What the adapter is multiplied with when a file is merged. Unset: 1."""
    part: Literal["transformer", "transformer_2"] | None = option(
        None, goes_with={"adapter inspect": "chooses in a file; give --adapter FILE or --inspect FILE with it"}
    )
    """Which of the two, of a file that holds an adapter for each expert."""
    json: bool = option(False, goes_with={"inspect": "prints what --inspect finds; give --inspect FILE with it"})
    """Print what --inspect finds as JSON."""

    def __post_init__(self) -> None:
        if self.to is not None and self.to not in ADAPTER_FORMS:
            hint = f"; did you mean {nearest_form(self.to)}?" if nearest_form(self.to) else ""
            raise UserError(
                f'--to on the command line must be one of {", ".join(ADAPTER_FORMS)}, not "{self.to}"{hint}'
            )
        if self.rank:
            parse_rank(self.rank)
        if self.dtype == "fp8_scaled" and self.on_files and not self.merge:
            raise UserError("--dtype fp8_scaled is for whole transformers; give bf16 or fp32")

    @property
    def on_files(self) -> bool:
        """Whether it is files that are worked on, not a run."""
        return any(getattr(self, name) for name in _ONE_FILE.split())


def parse_rank(text: str) -> tuple[int | None, float]:
    """`16` or `auto:0.95` to a rank, None if it is to be found, and the share of energy to keep, above 0 and at most 1.

    Raises:
        UserError: If it is neither.
    """
    auto, colon, share = text.rpartition(":")
    with suppress(ValueError):
        if not colon and int(text) > 0:
            return int(text), 1.0
        if auto == "auto" and 0 < float(share) <= 1:
            return None, float(share)
    raise UserError(
        f'--rank must be a whole number above 0, or auto: and a share above 0 and up to 1 (auto:0.95), not "{text}"'
    )
