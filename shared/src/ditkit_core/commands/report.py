"""`train --report`, the lines that a run prints before it trains and when it ends, and whom it
tells then."""

import json
import math
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from http.client import HTTPException
from pathlib import Path
from statistics import mean, variance
from typing import Any

import torch

from ditkit_core.adapters.files.export_names import finished_adapters
from ditkit_core.commands.export import expert_adapters
from ditkit_core.commands.options import TrainOptions, command_line
from ditkit_core.config.command_words import command_words, is_address
from ditkit_core.config.resume import ConfigChange
from ditkit_core.diagnostics.report.data import RANDOM_BASE, read_metrics, read_sections
from ditkit_core.diagnostics.report.overview import LOOK, RANDOM_SAMPLES, section_verdict
from ditkit_core.diagnostics.report.page import write_report
from ditkit_core.diagnostics.report.words import format_number, judge_change, plural
from ditkit_core.distributed.launch import launched
from ditkit_core.errors import UserError
from ditkit_core.io.console import say, warn
from ditkit_core.io.files import json_part
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.loading.architecture import distilled_by_name
from ditkit_core.models.spec import ModelSpec
from ditkit_core.run.config import RunConfig
from ditkit_core.run.experts import describe_expert
from ditkit_core.run.jobs import Jobs, TrainingJob
from ditkit_core.sampling.config import SampleConfig
from ditkit_core.training.checkpoint import best
from ditkit_core.training.config import TrainConfig
from ditkit_core.training.trainer import TrainResult


def report(spec: ModelSpec, config: RunConfig, options: TrainOptions) -> None:
    """Rewrite report.html of the run in `run.folder`; also works while the run is training."""
    say(f"report:   {write_report(config.run_folder.path)}")


def say_beginning(job: TrainingJob, changes: Sequence[ConfigChange]) -> None:
    """Print what a job trains, what changed since its last part, and its precision."""
    run, config = job.run, job.run.config
    if run.expert is not None:
        say(describe_expert(run.expert, config.flow, config.held_out))
    for change in changes:
        say(f"changed since the last part of this run: {change}")
    say(_opening(job))
    if run.spec.import_path:
        say_where_previews_could_be(config.sample, run.devices)


def warn_of_base(spec: ModelSpec, arch: Any, config: RunConfig) -> None:
    """Warn of settings that do not suit the base."""
    # An assistant is the other remedy for what advice is about.
    if (advice := spec.training.advice(arch)) and not any(
        entry for _, entry in config.base.assistants
    ):
        warn(advice)
    named = config.model.transformer or config.model.base
    if preset := distilled_by_name(spec, arch, named):
        warn(
            f"{named} is named as the distilled {preset}, and is trained and sampled as a model that "
            f"is not distilled; if it is {preset}, set model.preset = {preset}"
        )
    if config.flow.guidance != 1 and spec.auxiliary.sample_defaults(arch).guided_by != "embedding":
        warn(
            f"flow.guidance = {config.flow.guidance:g} is not used: this model has no guidance "
            f"embedding"
        )


def say_where_previews_could_be(sample: SampleConfig, devices: Sequence[torch.device]) -> None:
    """If training waits for its previews, name an idle GPU that could generate them."""
    if launched() or sample.device or not sample.preview_steps:
        return
    gpus = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    if idle := [gpu for gpu in gpus if gpu not in devices]:
        say(
            f"training pauses while previews are generated; set sample.device = {idle[0]} (idle) "
            f"to generate them in the background"
        )


def _opening(job: TrainingJob) -> str:
    """What is trained, in a line."""
    run = job.run
    config, devices = run.config, " and ".join(map(str, run.devices))
    adapter = config.adapter
    trained_part = (
        "all weights" if adapter.method == "full" else f"a {adapter.name} of rank {adapter.rank}"
    )
    # the next line says its rank, when the file is open
    if adapter.init and adapter.method != "full":
        trained_part = f"the adapter in {Path(adapter.init).name}"
    model = (
        config.model.preset
        or f"{run.spec.name} ({Path(config.model.transformer or config.model.base).name})"
    )
    forms = ""
    if config.export.forms != job.settings.export.forms:
        of_dora = "no file of a DoRA is for both ComfyUI and diffusers"
        why = of_dora if adapter.use_dora else "it has a name for each layer"
        several = "s" * (len(config.export.forms) > 1)
        forms = f"; its files are in the {' and '.join(config.export.forms)} form{several}, because {why}"
    precision = f"precision {config.precision.preset}, each dtype is in the report"
    return f"train {trained_part} of {model} for {plural(config.train.steps, 'step')} on {devices} ({precision}){forms}"


def held_out_lines(result: TrainResult, folder: RunFolder) -> Iterator[str]:
    """The lines about the validation loss at the end: how it changed, and which save is best."""
    before, after = result.held_out_before, result.held_out
    if not before or after is None:
        return
    if not result.step:
        yield f"validation loss {format_number(before)}; nothing was trained"
        return
    values = f"{format_number(before)} before training, {format_number(after)} after"
    clips = (
        len(listed)
        if isinstance(listed := json_part(folder.about, "data").get("held_out"), list)
        else 0
    )
    verdict = judge_change(before, after, result.held_out_interval, clips)
    yield f"{verdict.words}: {values}"
    if verdict.kind == "fell":
        random = json_part(folder.about, "model").get(RANDOM_BASE)
        yield f"it learns. {RANDOM_SAMPLES if random else LOOK}"
    # The best save by validation loss, which is often not the last one: adapters overfit.
    best_save = best(folder.state)
    if best_save is None:
        return
    if best_save.held_out >= before:
        yield f"no save is better than before training: the best one, step {best_save.step}, has {format_number(best_save.held_out)}"
    elif best_save.step != result.step:
        change = judge_change(
            before, best_save.held_out, best_save.values.get("held_out_interval"), clips
        ).words
        yield f"best save: step {best_save.step}, where the {change}; export it with --step best"
    else:
        yield f"best save: step {best_save.step}, the last one"


def loss_rise(losses: Sequence[float]) -> str:
    """How the training loss rose between the first and the last quarter of a run; empty if it did
    not, or may have by chance.

    Noise levels are drawn anew at each step, so losses differ by a factor from step to step. A long
    run is judged by the means of both quarters and three times the standard error of their
    difference; in a short one all losses of the second half have to be above all of the first
    quarter, and twice as high on average.
    """
    count = len(losses) // 4
    if not count:
        return ""
    first, last = losses[:count], losses[-count:]
    rise = mean(last) - mean(first)
    if count < _ENOUGH_LOSSES:
        half = losses[len(losses) // 2 :]
        has_risen = min(half) > max(first) and mean(half) > 2 * max(first)
    else:
        has_risen = rise > 3 * math.sqrt((variance(first) + variance(last)) / count)
    means = f"{format_number(mean(first))} to {format_number(mean(last))}"
    return (
        f"the training loss rose from {means} (means of the first and the last "
        f"{plural(count, 'step')})" * has_risen
    )


_ENOUGH_LOSSES = 10
"""Losses from which on a standard error says something."""


def say_results(jobs: Jobs, folder: RunFolder) -> None:
    """Print the last lines of a run: where its files are, and which command to run next."""
    run, experts = jobs.run, jobs.in_folders
    of_experts = [copy for job in experts for _, copy in expert_adapters(job, folder)]
    for file in of_experts if experts else [name.at(folder) for name in finished_adapters(folder)]:
        say(f"adapter:  {file}")
    folders = [(job.folder, f" ({job.name})") for job in experts] or [(folder, "")]
    for result_folder, name in folders:
        for model in sorted(result_folder.exports.glob("transformer_*")):
            say(f"model:    {model}{name}")
        curves = command_line("tensorboard", "--logdir", str(result_folder.tensorboard))
        say(f"metrics:  {result_folder.metrics}{name or f' (curves: {curves})'}")
    if folder.samples.exists():
        say(f"samples:  {folder.samples}")
    if folder.report.exists():
        say(f"report:   {folder.report}")
    sample, train = (
        command_line(f"{run.spec.name}-{verb}", "--run", str(folder.path))
        for verb in ("sample", "train")
    )
    say(f'next:     {sample} --prompt "..." generates another sample')
    if not experts:
        steps = max(run.config.train.steps, folder.completed_step() or 0)
        further, verb = 2 * steps or TrainConfig().steps, "continues" if steps else "trains"
        say(f"          {train} --train.steps {further} {verb} the run")
    for result_folder, name in folders:
        series = read_metrics(result_folder.metrics)[0] if result_folder.metrics.is_file() else {}
        if "loss" in series and (rise := loss_rise(series["loss"].values)):
            warn(
                f"{rise}{name}: a lower optim.lr in another run.folder may learn; this run "
                f"continues from what it has become"
            )


_COMMAND_SECONDS = 60.0
"""Time that the end of a run waits for the user's command, which then continues by itself."""
_WEBHOOK_SECONDS = 20.0


def tell(config: RunConfig, reason: str = "", *, is_stopped: bool = False) -> None:
    """Start the command, or call the webhook, of `run.on_end`; of `run.on_error` if there is a
    reason why the run is not complete. Nothing that goes wrong with it is more than a warning: the
    run has ended already."""
    key = "run.on_error" if reason else "run.on_end"
    words = command_words(config.run.on_error if reason else config.run.on_end, key)
    if not words:
        return
    status = "complete" if not reason else "stopped" if is_stopped else "failed"
    folder, verdict, step = config.run_folder, "", 0
    with suppress(UserError):  # no step was logged
        sections = read_sections(folder.path)
        step = max(section.step for section in sections)
        names = [section.name and f"{section.name}: " for section in sections]
        verdicts = [section_verdict(section)[0].words for section in sections]
        verdict = "; ".join(f"{name}{words}" for name, words in zip(names, verdicts, strict=True))
    # What the command finds in its environment, and a webhook in its JSON, by name without the
    # prefix.
    about = {
        "run": str(folder.path.resolve()),
        "name": folder.name,
        "status": status,
        "step": str(step),
        "verdict": verdict,
        "reason": reason,
        "report": str(folder.report.resolve()),
    }
    try:
        if is_address(words[0]):
            _call_webhook(words[0], about)
            say(f"{key}: the webhook was called")
        else:
            _start(words, about, folder, key)
    # ValueError: an address or a variable with characters that it cannot have.
    except (OSError, ValueError) as error:
        text = " ".join(str(error).split())[:200] or type(error).__name__
        warn(f"{key} failed ({text}); the run itself is not affected")


def _call_webhook(address: str, about: Mapping[str, str]) -> None:
    summary = f"{about['name']} {about['status']} at step {about['step']}: {about['reason'] or about['verdict']}"
    # Slack shows `text`, Discord shows `content`; other services take what they want.
    content = json.dumps({"text": summary, "content": summary[:2000], **about}).encode()
    headers = {"Content-Type": "application/json", "User-Agent": "ditkit"}
    request = urllib.request.Request(address, data=content, headers=headers)
    try:
        urllib.request.urlopen(request, timeout=_WEBHOOK_SECONDS).close()
    # Without the errors themselves: the address is a secret, and they may have it.
    except urllib.error.HTTPError as error:
        raise OSError(f"the webhook answered {error.code}") from None
    except HTTPException as error:
        raise OSError(f"the webhook cannot be called: {type(error).__name__}") from None


def _start(words: Sequence[str], about: Mapping[str, str], folder: RunFolder, key: str) -> None:
    log = folder.path / f"{key.partition('.')[2]}.log"
    environment = {
        **os.environ,
        **{f"DITKIT_{name.upper()}": value for name, value in about.items()},
    }
    # A folder that is no run, such as one that was named by mistake, gets no file; the terminal has
    # the output then.
    with open(log, "ab") if folder.config_file.is_file() else nullcontext() as output:
        # In a session of its own: it goes on if this terminal closes, and may take as long as it
        # likes.
        process = subprocess.Popen(
            list(words),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        status = process.wait(timeout=_COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        say(
            f"{key}: {words[0]} is still "
            f"working{f'; its output is in {log}' if log.exists() else ''}"
        )
        process.returncode = 0  # nobody waits for it any more, and Python would warn of that
        return
    if status:
        warn(
            f"{key}: {words[0]} ended with status "
            f"{status}{f', see {log}' if log.exists() else ''}; the run itself is not affected"
        )
    else:
        say(f"{key}: {words[0]} was called")
