"""What each command is told beside the configuration: flags that belong to one call and are not stored with the run."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from ditkit_core.errors import UserError
from ditkit_core.models.adapter_formats import ADAPTER_FORMS, nearest_form


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
    check: bool = False
    """Look after data and model before they are trained: what will be trained on, what is left out and why, cuts, duplicates and cut
    captions, and two steps on the largest micro-batch of which nothing is kept. Written into the run folder as check.json and
    check.html. Exit status 0 if the run can be trained, 1 if not."""
    json: bool = False
    """Print the plan, the audit or the check as JSON."""
    report: bool = False
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

    demo: bool = False
    """Export the demo's run."""
    to: str | None = None
    """Names that the file's tensors get: official (ComfyUI and most others load it), diffusers, diffsynth or musubi. Unset: those of
    export.forms, and of a file its own."""
    dtype: Literal["bf16", "fp32", "fp8_scaled"] | None = None
    """Dtype of the file's tensors; fp8_scaled is for a whole transformer. Unset: export.dtype, and of an adapter file its own."""
    merge: bool = False
    """Merge the adapter into the base and write the whole transformer."""
    out: str = ""
    """File to write instead of one in the run's exports folder, or beside the file that was given; for a whole transformer a folder.
    Of several forms, those other than the official one append their name to the file's."""
    step: int | Literal["best"] | None = None
    """Save to export, by its step; best is the one with the lowest held-out loss. Unset: the latest."""
    inspect: str = ""
    """Say what this file is: form, ranks, modules, norms, which preset it fits, which programs load it. Writes nothing."""
    adapter: str = ""
    """Adapter file to work on in place of a run: with --to, --rank or --merge."""
    rank: str = ""
    """Rank to reduce the adapter file to, or of what is extracted: 16, or auto:0.95 for the least that keeps this share of the energy in
    each module."""
    extract: str = ""
    """Whole transformer to take a low-rank adapter out of: its difference to --base."""
    base: str = ""
    """Transformer that --extract compares with, --merge merges into, and a file is to fit: a file, a folder, or a folder or hub id in
    diffusers layout. Unset: model.*."""
    strength: float | None = None
    """What the adapter is multiplied with when a file is merged. Unset: 1."""
    part: Literal["transformer", "transformer_2"] | None = None
    """Which of the two, of a file that holds an adapter for each expert."""
    json: bool = False
    """Print what --inspect finds as JSON."""

    def __post_init__(self) -> None:
        if self.to is not None and self.to not in ADAPTER_FORMS:
            hint = f"; did you mean {nearest_form(self.to)}?" if nearest_form(self.to) else ""
            raise UserError(
                f'--to on the command line must be one of {", ".join(ADAPTER_FORMS)}, not "{self.to}"{hint}'
            )
        if self.rank:
            parse_rank(self.rank)
        if problem := self._problem():
            raise UserError(problem)

    @property
    def on_files(self) -> bool:
        """Whether it is files that are worked on, not a run."""
        return bool(self.inspect or self.adapter or self.extract)

    def _problem(self) -> str:
        """What is wrong with options that go with others; empty if nothing is."""
        given = [f"--{name}" for name in ("inspect", "adapter", "extract") if getattr(self, name)]
        if len(given) > 1:
            return f"{' and '.join(given)}: one file is worked on at a time; leave one of them out"
        if self.on_files and (self.step is not None or self.demo):
            return (
                f"{given[0]} works on a file, and --{'demo' if self.demo else 'step'} is a run's; leave one of them out"
            )
        if self.inspect and (other := self._given("to", "dtype", "merge", "out", "rank", "strength")):
            return f"--inspect writes nothing, and --{other} is about what is written; leave one of them out"
        if self.json and not self.inspect:
            return "--json prints what --inspect finds; give --inspect FILE with it"
        if self.adapter and not (self.to or self.rank or self.merge or self.dtype):
            return "--adapter FILE: say what to make of it: --to FORM, --rank N, --dtype, or --merge; --inspect FILE describes it"
        if self.extract and self.merge:
            return "--extract takes an adapter out, --merge puts one in; leave one of them out"
        if self.merge and self.rank:
            return "--merge and --rank: a merged adapter has no rank; reduce it first, then merge what was written"
        if self.extract and not self.rank:
            return "--extract needs the rank of the adapter: --rank 32, or --rank auto:0.95"
        if self.rank and not (self.adapter or self.extract):
            return (
                "--rank is about a file: give --adapter FILE or --extract TUNED with it; a run's rank is adapter.rank"
            )
        if self.strength is not None and not (self.merge and self.adapter):
            return "--strength is how strongly an adapter file is merged; give --adapter FILE --merge with it"
        if self.base and not self.on_files:
            return "--base goes with --extract, --inspect and --adapter FILE; a run knows its base"
        if self.part and not (self.adapter or self.inspect):
            return "--part chooses in a file; give --adapter FILE or --inspect FILE with it"
        if self.dtype == "fp8_scaled" and self.on_files and not self.merge:
            return "--dtype fp8_scaled is for whole transformers; give bf16 or fp32"
        return ""

    def _given(self, *names: str) -> str:
        """The first of these options that is given; empty if none is."""
        return next((name for name in names if getattr(self, name) not in ("", None, False)), "")


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
