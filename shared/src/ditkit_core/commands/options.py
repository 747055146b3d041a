"""The flags of each command that apply to one call and are not stored with the run, and the rules
for combining them."""

import dataclasses
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ditkit_core.adapters.files.entry import check_strength
from ditkit_core.config.nearest import nearest_word
from ditkit_core.errors import UserError
from ditkit_core.families.caption_prompts import CaptionGoal
from ditkit_core.io.files import local_path
from ditkit_core.io.hub import Hub
from ditkit_core.io.run_requests import check_request
from ditkit_core.models.adapter_formats import ADAPTER_FORMS, nearest_form

QUEUE_VERBS = ("add", "list", "move", "remove", "start", "stop", "finish")
"""Values of `train --queue`."""

_ONE_FILE = "inspect adapter extract"
"""Options of `export` that name a file to work on instead of a run, separated by spaces."""


_NO_ADAPTER = "there is no adapter file {path}; {remedy}"


def option(
    default: Any,
    *,
    needs: str | Sequence[str] = (),
    excludes: str | Sequence[str] = (),
    missing: str = "",
) -> Any:
    """An option that cannot be combined freely with the others.

    `needs` are rules `names: message` for the case that none of these other options is given, and
    `excludes` for the case that one of them, `{other}`, is; the option's name is printed in front
    of the message. `missing` is for a file or folder that is read: the message for the case that
    `{path}` does not exist; `{remedy}` says what to do.
    """
    rules = {"needs": needs, "excludes": excludes}
    metadata = {key: [value] if isinstance(value, str) else value for key, value in rules.items()}
    return dataclasses.field(default=default, metadata={**metadata, "missing": missing})


def check_combination(options: Any) -> None:
    """Check that the given options can be combined."""
    flags = {field.name: _flag(field) for field in _given(options)}
    # Contradictions are reported first: if two options exclude each other, adding a missing third
    # one does not help.
    for kind in ("excludes", "needs"):
        for field in _given(options):
            for names, _, message in (
                rule.partition(": ") for rule in field.metadata.get(kind, ())
            ):
                other = next((flags[name] for name in names.split() if name in flags), "")
                if kind == "excludes" and other:
                    raise UserError(
                        f"{flags[field.name]} {message.format(other=other)}; leave one of them out"
                    )
                if kind == "needs" and not other:
                    raise UserError(f"{flags[field.name]} {message}")


def describe_options(options: Any) -> str:
    """The given options as they were typed, or `none`."""
    return (
        ", ".join(f"{_flag(field)} {getattr(options, field.name)}" for field in _given(options))
        or "none"
    )


def _given(options: Any) -> list[dataclasses.Field[Any]]:
    return [
        field
        for field in dataclasses.fields(options)
        if getattr(options, field.name) != field.default
    ]


def _flag(field: dataclasses.Field[Any]) -> str:
    return f"--{field.name.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `train`."""

    demo: bool = False
    """Train a generated tiny checkpoint on generated clips; both are written into the run
    folder."""
    init_from: str = option("", missing="--init-from {path} does not exist; {remedy}")
    """Run folder whose trained weights initialize this new run, which starts at step 0."""
    recipe: str = option(
        "",
        excludes="demo report: and {other}: a recipe begins a run",
    )
    """Begin with a recipe instead of a run file: a goal (`character`) chooses the one that fits the
    GPU, and a name takes that one; it is written as a run file, with what the command line sets,
    and trained. `list` prints a table with memory and hours for the GPU."""
    plan: bool = option(
        False, excludes="fit: and --fit: --fit prints the memory plan of its choice as well"
    )
    """Print the peak memory per device and whether the run fits, then exit; needs no weights and no
    GPU. Exit status 0 if it fits, 3 if not."""
    fit: bool = False
    """Choose checkpointing, split points, swapped blocks and quantization for the devices (where
    nothing else fits, also how a full fine-tune updates its weights), print the whole configuration
    and exit."""
    why: bool = option(False, needs="plan fit: says what a plan assumes; add --plan or --fit")
    """Also print what the times and sizes of a plan are assumed from: rates of the GPUs, the
    reserve, the workspace."""
    gpus: str = option(
        "",
        needs="plan fit recipe: names GPUs to plan for; add --plan or --fit, or set train.devices to train",
    )
    """GPUs to plan for instead of those of this machine: `24GiB`, `2x24GiB,1x16GiB`, `rtx4090`. A
    size is that with which a GPU is sold."""
    host: str = option(
        "", needs="plan fit recipe: limits host memory in a plan; add --plan or --fit"
    )
    """Host memory that a plan may use for streamed weights: `32GiB`. Unset: the free memory of this
    machine minus 2 GiB; unlimited with --gpus."""
    nproc: int = option(
        0,
        needs="plan fit: is the number of processes in a plan; add --plan or --fit, or start them with torchrun",
    )
    """Processes on each machine to plan for, as torchrun's --nproc-per-node; each has a GPU of its
    own. Unset: with ranks.shard or ranks.context one for each GPU, else a single process, which
    divides the model over its GPUs."""
    nodes: int = option(
        1,
        needs="plan fit: is the number of machines in a plan; add --plan or --fit, or start them with torchrun",
    )
    """Machines to plan for, as torchrun's --nnodes; --gpus names the GPUs of one."""
    link: str = option("", needs="plan fit: is a link between ranks in a plan; add --plan or --fit")
    """Link between ranks to plan for: `nvlink`, `pcie`, `ib400` or `10gbe`; `pcie,10gbe` within and
    between machines. Unset: two usual ones."""
    write: str = option(
        "",
        needs="fit recipe: saves the configuration that --fit or --recipe chose; add --fit, or --recipe GOAL",
    )
    """With --fit or --recipe: file that the chosen configuration is saved in. Unset: --fit prints
    it, --recipe writes recipe.toml into run.folder."""
    comfyui: str = ""
    """Folder of a ComfyUI installation: files of `[model]` that are named nowhere else are taken
    from it, where names and shapes in their headers fit the model."""
    audit_precision: bool = option(
        False,
        excludes="plan fit: and {other}: the audit computes with the weights, {other} needs none",
    )
    """Measure which operation's precision matters in this run: compare one batch with fp64,
    lowering one place of [precision] at a time, and report the error of each. Writes into the run
    folder's audit; does not train."""
    pictures: bool = option(
        False,
        needs="audit_precision: samples with the precisions that an audit compares; add --audit-precision",
    )
    """With --audit-precision: also generate the first sample of [sample] in fp32, as trained, with
    the other presets of [precision] and with every place lowered, from the same noise."""
    check: bool = option(
        False, excludes="plan fit audit_precision report: and {other}: each does its work and stops"
    )
    """Check data and model before training: which samples are used, which are left out and why,
    scene cuts, duplicates and truncated captions; then run two steps on the largest micro-batch and
    discard them. Writes check.json and check.html into the run folder. Exit status 0 if the run can
    be trained, 1 if not."""
    json: bool = option(
        False,
        needs="plan audit_precision check: prints a plan, an audit or a check as JSON; add --plan, --audit-precision or --check",
    )
    """Print the plan, the audit or the check as JSON."""
    report: bool = option(
        False,
        excludes="plan fit audit_precision: and {other}: --report only writes the report of a run and stops",
    )
    """Rewrite the run's report.html from its files and exit; use with --run. Needs no model and
    also works while the run is training."""
    tell: str = option(
        "",
        excludes="plan fit audit_precision check report demo init_from: and {other}: --tell only tells a run that trains",
    )
    """Tell the run of --run, which trains in another process, what to do after its present step:
    `sample`, `save`, or `stop` with a save. It trains the weights of a run without requests."""
    queue: str = option(
        "",
        excludes="plan fit audit_precision check report tell recipe: and {other}: the queue is for runs",
    )
    """The queue of this machine, in which runs of all families wait for each other: `add` this run,
    `move` or `remove` it; `list` all; `start` a worker, which trains one after the other; `stop`
    the worker with its run, which is saved, or `finish` it after its run."""
    position: int | None = option(
        None, needs="queue: is a place in the queue; add --queue add or --queue move"
    )
    """With --queue add or move: position among the runs that wait, from 1. Unset: the last."""
    worker: str = option("", needs="queue: is for a worker; add --queue start, stop or finish")
    """With --queue start, stop or finish: index of the worker's GPU; `0,1` is one worker that
    trains each run on two. Unset: GPU 0, and to stop or finish all workers."""
    detach: bool = option(False, needs="queue: is for a worker; add --queue start")
    """With --queue start: work in the background, also after a logout."""
    until_empty: bool = option(False, needs="queue: is for a worker; add --queue start")
    """With --queue start: end when no run waits any more. Otherwise the worker waits for more."""

    def __post_init__(self) -> None:
        if self.tell:
            check_request(self.tell)
        if self.queue and self.queue not in QUEUE_VERBS:
            near = nearest_word(self.queue, QUEUE_VERBS)
            hint = f"; did you mean {near}?" if near else ""
            raise UserError(
                f'--queue must be one of {", ".join(QUEUE_VERBS)}, not "{self.queue}"{hint}'
            )
        # Anything else would hide every GPU from the run, which would then train on the CPU.
        index = r"(0|[1-9]\d*|(GPU|MIG)-[\w-]+)"
        if not re.fullmatch(rf"({index}(,{index})*)?", self.worker, re.ASCII):
            raise UserError(
                f'--worker must be indices of GPUs separated by commas (0 or 0,1), not "{self.worker}"'
            )
        if self.position is not None and self.position < 1:
            raise UserError(f"--position {self.position} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """Options of `encode`."""

    demo: bool = False
    """Encode the demo's generated clips."""
    dump: str = ""
    """Folder for the preprocessed samples: the pixels that the encoder receives as .mp4 or .png,
    the captions as .txt."""
    verify_cache: bool = False
    """First compare every cache entry with its digest, and have each file read again when it is
    next needed. Damaged entries are removed; what differs is encoded again if this data needs it.
    """
    prune_cache: str = ""
    """Afterwards remove cache entries: `unused` (needed by no run in this run's parent folder),
    `30d` (not needed for 30 days), or `50GB` (the least recently needed ones, down to this size).
    Entries of this data stay."""
    comfyui: str = ""
    """Folder of a ComfyUI installation: files of `[model]` that are named nowhere else are taken
    from it, where names and shapes in their headers fit the model."""


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Options of `sample`."""

    demo: bool = False
    """Sample with the demo's run."""
    run: tuple[str, ...] = ()
    """Run to sample with; repeat the flag to compare several on one sheet."""
    steps: str = option(
        "", excludes="adapter adapter_low: and {other}: a sheet is of a run's saves"
    )
    """Saves to compare on one sheet, by their steps, or `best` (the lowest validation loss) or
    `latest`, separated by commas: `200,400,best`. A row for each prompt, a column for each save at
    each strength, the base in front; as sheet.html and sheet.png. The same command continues it."""
    strengths: str = ""
    """Strengths to compare on one sheet, of saves or of the file of --adapter, separated by commas:
    `0.6,0.8,1`. Unset: 1."""
    adapter: str = option("", missing=_NO_ADAPTER)
    """Adapter file, or FILE@strength, to sample with instead of the run's latest save; for a model
    with two experts the file of the high-noise expert."""
    adapter_low: str = option("", missing=_NO_ADAPTER)
    """Adapter file of the low-noise expert. If only one expert has a file, the other samples with
    its base weights."""
    prompt: tuple[str, ...] = ()
    """Prompt to sample, replacing sample.prompts; repeat the flag for several."""
    reference: tuple[str, ...] = ()
    """Image to edit, replacing sample.references; repeat the flag for several."""
    control: tuple[str, ...] = ()
    """Extra condition, as column=path (`input_image=cat.png`), replacing sample.controls; repeat
    the flag for several."""
    images: int | None = None
    """Number of samples per prompt. Unset: sample.images."""
    seed: int | None = None
    """Seed of the first sample of each prompt. Unset: sample.seed."""
    out: str = ""
    """Folder for the samples instead of the run's samples folder."""

    def __post_init__(self) -> None:
        for strength in self.strength_values:
            check_strength(strength, "--strengths")

    @property
    def on_sheet(self) -> bool:
        """Whether samples are compared on a sheet."""
        return bool(self.steps or self.strengths or len(self.run) > 1)

    @property
    def save_words(self) -> tuple[str, ...]:
        """The saves of `steps`, as they were written."""
        return tuple(word.strip() for word in (self.steps or "latest").split(","))

    @property
    def strength_values(self) -> tuple[float, ...]:
        """The numbers of `strengths`, without repetitions."""
        try:
            values = [float(word) for word in (self.strengths or "1").split(",")]
        except ValueError as error:
            raise UserError(
                f"--strengths must be numbers separated by commas (0.6,0.8,1), not "
                f'"{self.strengths}"'
            ) from error
        return tuple(dict.fromkeys(values))


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of `export`."""

    demo: bool = option(False, excludes=f"{_ONE_FILE}: is for a run, and {{other}} works on a file")
    """Export the demo's run."""
    to: str | None = None
    """Naming scheme of the file's tensors: official (loaded by ComfyUI and most others), diffusers,
    diffsynth or musubi. Unset: export.forms; for a file, the scheme that it has."""
    dtype: Literal["bf16", "fp32", "fp8_scaled"] | None = None
    """Dtype of the file's tensors; fp8_scaled is for a whole transformer. Unset: export.dtype; for
    an adapter file, the dtype that it has."""
    merge: bool = option(
        False,
        excludes=(
            (
                "extract: and --extract: --merge adds an adapter to a transformer, --extract computes "
                "one from it"
            ),
            (
                "rank: and --rank: a merged adapter has no rank; reduce it first, then merge the "
                "reduced file"
            ),
        ),
    )
    """Merge the adapter into the base and write the whole transformer."""
    out: str = ""
    """Output file, instead of one in the run's exports folder or next to the given file; for a
    whole transformer a folder. If several forms are written, every form but the official one is
    appended to the file name."""
    comfyui: str = option(
        "",
        excludes=(
            f"{_ONE_FILE}: is for a run, and {{other}} works on a file",
            "merge out push card: and {other}: --comfyui writes a run's adapter for ComfyUI alone",
        ),
    )
    """Folder of a ComfyUI installation: the adapter is written into its models/loras."""
    step: int | Literal["best"] | None = option(
        None, excludes=f"{_ONE_FILE}: is for a run, and {{other}} works on a file"
    )
    """Save to export, by its step; best is the save with the lowest validation loss. Unset: the
    latest."""
    inspect: str = option(
        "",
        missing="there is no file {path} to --inspect; {remedy}",
        excludes=(
            "adapter extract: and {other}: one file can be given at a time",
            (
                "to dtype merge out rank strength: writes nothing, and {other} is for a file that is "
                "written"
            ),
        ),
    )
    """Describe this file: form, ranks, modules, norms, which preset it fits, which programs load
    it. Writes nothing."""
    adapter: str = option(
        "",
        missing=_NO_ADAPTER,
        excludes="extract: and --extract: one file can be given at a time",
        needs="to rank merge dtype push card: FILE needs an operation: --to FORM, --rank N, --dtype, --merge, or --push REPO; --inspect FILE describes it",
    )
    """Adapter file to work on instead of a run: with --to, --rank, --dtype, --merge, --push or
    --card."""
    rank: str = option(
        "",
        needs="adapter extract: is for a file: add --adapter FILE or --extract TUNED; a run's rank is adapter.rank",
    )
    """Rank of the reduced or extracted adapter: 16, or auto:0.95 for the lowest rank that keeps
    this share of the energy in each module."""
    extract: str = option(
        "",
        missing="there is no file or folder {path} to --extract from; {remedy}",
        needs="rank: needs the rank of the adapter: --rank 32, or --rank auto:0.95",
    )
    """Fine-tuned whole transformer; its difference to --base becomes a low-rank adapter."""
    base: str = option(
        "",
        needs=f"{_ONE_FILE}: goes with --extract, --inspect and --adapter FILE; a run knows its base",
    )
    """Base transformer that --extract compares with, --merge merges into, and adapter files are
    checked against: a file, a folder, or a folder or hub id in diffusers layout. Unset: model.*."""
    strength: float | None = option(
        None,
        needs=(
            "merge: scales an adapter file that is merged; add --adapter FILE --merge",
            "adapter: scales an adapter file that is merged; add --adapter FILE --merge",
        ),
    )
    """Factor that the adapter is multiplied by when a file is merged. Unset: 1."""
    part: Literal["transformer", "transformer_2"] | None = option(
        None,
        needs="adapter inspect: chooses an expert in a file; add --adapter FILE or --inspect FILE",
    )
    """Expert whose adapter to use, if the file contains one for each expert."""
    json: bool = option(
        False, needs="inspect: prints the result of --inspect as JSON; add --inspect FILE"
    )
    """Print the result of --inspect as JSON."""
    push: str = option(
        "", excludes="inspect extract: and {other}: it uploads an adapter or a run's export"
    )
    """Repository on the hub (NAME/REPO) to upload to: the run's finished adapters, the export that
    the other options describe, or the file of --adapter; with a model card and the newest samples.
    It is created if necessary. Needs `hf auth login`."""
    card: str = option(
        "", excludes="inspect extract: and {other}: it describes an adapter or a run's export"
    )
    """File for the model card, or - to print it; nothing is uploaded without --push. With --push a
    file that exists is uploaded as the card."""
    private: bool = option(False, needs="push: is for a repository; add --push NAME/REPO")
    """Create the repository of --push as a private one."""
    revision: str = option("", needs="push: is a branch of a repository; add --push NAME/REPO")
    """Branch to upload to, created if necessary. Unset: the main one."""
    license: str = option(
        "", needs="push card: is written into a model card; add --push NAME/REPO or --card FILE"
    )
    """License for the model card, as the hub abbreviates it: apache-2.0, cc-by-nc-4.0."""

    def __post_init__(self) -> None:
        if self.to is not None and self.to not in ADAPTER_FORMS:
            hint = f"; did you mean {nearest_form(self.to)}?" if nearest_form(self.to) else ""
            raise UserError(
                f'--to on the command line must be one of {", ".join(ADAPTER_FORMS)}, not "{self.to}"{hint}'
            )
        if self.rank:
            parse_rank(self.rank)
        if self.publishes and self.adapter and (self.to or self.rank or self.dtype or self.merge):
            raise UserError(
                "--push and --card take the file of --adapter as it is; convert it first, then "
                "name the new file"
            )
        if self.dtype == "fp8_scaled" and self.on_files and not self.merge:
            raise UserError("--dtype fp8_scaled is for whole transformers; give bf16 or fp32")

    @property
    def hub(self) -> Hub:
        """What --push and its options say."""
        card = str(local_path(self.card)) if self.card else ""
        return Hub(
            repository=self.push,
            card=card,
            private=self.private,
            revision=self.revision,
            license=self.license,
        )

    @property
    def publishes(self) -> bool:
        """Whether files are described for the hub, or uploaded."""
        return bool(self.push or self.card)

    @property
    def on_files(self) -> bool:
        """Whether the command works on files and not on a run."""
        return any(getattr(self, name) for name in _ONE_FILE.split())


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Options of `watch`."""

    demo: bool = False
    """Watch the demo's run."""
    port: int = 8400
    """Port to listen at; 0 for a free one."""
    bind: str = "127.0.0.1"
    """Address to listen at. By default only this machine can read the page; 0.0.0.0 is for
    everybody who reaches it, without a password."""
    log: str = option("", missing="there is no file {path} to --log; {remedy}")
    """File with the output of the run's command, such as slurm-7.out or nohup.out, whose last lines
    are shown too."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65_536:
            raise UserError(f"--port {self.port} must be from 0 to 65535")


@dataclass(frozen=True, kw_only=True)
class CaptionOptions:
    """Options of `caption`."""

    demo: ClassVar[bool] = False
    """The demo has captions."""

    model: str = "Qwen/Qwen3-VL-4B-Instruct"
    """Hub id or folder of a model that describes images: any that transformers loads as
    image-text-to-text, such as Qwen-VL, JoyCaption (LLaVA) or Florence-2."""
    trigger: str = ""
    """Trigger word to write into each caption. Unset: data.trigger, which training puts in front
    also of captions that lack it."""
    template: str = ""
    """Text with {caption}, and {trigger} where that belongs, in which captions are written. Unset:
    "{trigger}, {caption}", and the model's caption alone if it has the trigger word already."""
    goal: CaptionGoal | None = None
    """What is to be learnt: scene, character, object, style, motion or edit; the model is asked for
    what belongs into captions then. Unset: edit for media with references, scene for all others."""
    instruction: str = ""
    """Text to ask the model with, instead of the one for the goal; {trigger} in it is replaced."""
    words: str = ""
    """Fewest and most words to ask for, as 30-80. Unset: what the family's captions usually
    have."""
    max_tokens: int = 320
    """Limit of new tokens of a caption. What is cut there ends with its last whole sentence."""
    batch: int = 0
    """Media files at once. Unset: 1, or 8 if layers are streamed, since each token reads them
    all."""
    frames: int = 8
    """Images of a video that the model sees, spread evenly."""
    side: int = 768
    """Longest side in pixels of the images that the model sees; larger ones are reduced."""
    replace: Literal["model", "all"] | None = None
    """Which captions that exist are written again: `model` for those that this command wrote with
    other settings and nobody has changed since, `all` for a person's as well. Unset: none."""
    preview: int = 0
    """Print the first so many captions and write nothing."""
    plan: bool = False
    """Print how many captions are to be written, whether the model fits, and what would have to be
    downloaded; load and write nothing."""

    def __post_init__(self) -> None:
        for name, least in {
            "max_tokens": 1,
            "batch": 0,
            "frames": 1,
            "side": 32,
            "preview": 0,
        }.items():
            if (value := getattr(self, name)) < least:
                raise UserError(
                    f"--{name.replace('_', '-')} {value} is too small; give at least {least}"
                )
        if self.template and "{caption}" not in self.template:
            raise UserError(
                f"--template {self.template!r} has no {{caption}}, where the model's text is put; "
                f'write it as "{{trigger}}, {{caption}}"'
            )
        parse_words(self.words)


OPTIONS: dict[str, type] = {
    "train": TrainOptions,
    "encode": EncodeOptions,
    "sample": SampleOptions,
    "export": ExportOptions,
    "watch": WatchOptions,
    "caption": CaptionOptions,
}

STAGES = {
    ("train", ""): ("train", "train"),
    ("train", "plan"): ("plan", "plan_run"),
    ("train", "fit"): ("fit", "fit_run"),
    ("train", "audit_precision"): ("audit", "audit_precision"),
    ("train", "check"): ("check", "run_checks"),
    ("train", "report"): ("report", "report"),
    ("train", "tell"): ("cli", "tell_run"),
    ("train", "queue"): ("queue", "change_queue"),
    ("encode", ""): ("encode", "encode_run"),
    ("sample", ""): ("sample", "sample"),
    ("sample", "on_sheet"): ("sheet", "sample_sheet"),
    ("export", ""): ("export", "export"),
    ("export", "on_files"): ("convert", "convert_file"),
    ("caption", ""): ("caption", "caption"),
}
"""Maps a command and its option to the module in this folder and the function that do the work."""


TYPED: ContextVar[tuple[str, ...]] = ContextVar("typed arguments", default=())
"""The arguments of the command that runs, as they were typed, whichever program started it."""


def command_line(program: str, *arguments: str) -> str:
    """A command for the user's shell. Under `uv run` the programs are not on its PATH, so the
    command begins with that."""
    prefix = ("uv", "run") if "UV_RUN_RECURSION_DEPTH" in os.environ else ()
    return shlex.join([*prefix, program, *arguments])


def verb_of(command: str, options: Any) -> str:
    """The given option that selects another function than the command's own (`plan`, `fit`, …);
    empty if there is none."""
    return next(
        (verb for its, verb in STAGES if its == command and verb and getattr(options, verb)), ""
    )


def parse_words(text: str) -> tuple[int, int] | None:
    """Fewest and most words of `30-80`; None for an empty text."""
    low, dash, high = text.partition("-")
    with suppress(ValueError):
        if not text or (dash and 0 < int(low) <= int(high)):
            return (int(low), int(high)) if text else None
    raise UserError(f'--words must be two numbers, the smaller one first (30-80), not "{text}"')


def parse_rank(text: str) -> tuple[int | None, float]:
    """The rank of `16`, or None and the share of energy to keep, above 0 and at most 1, of
    `auto:0.95`."""
    auto, colon, share = text.rpartition(":")
    with suppress(ValueError):
        if not colon and int(text) > 0:
            return int(text), 1.0
        if auto == "auto" and 0 < float(share) <= 1:
            return None, float(share)
    raise UserError(
        f'--rank must be a whole number above 0, or auto: and a share above 0 and up to 1 (auto:0.95), not "{text}"'
    )
