"""`train --recipe`: choose the recipe that fits the GPU, write it as a run file and continue with
that; or list them with hours."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from ditkit_core.commands.comfyui import with_comfyui
from ditkit_core.commands.launch import launch_words, num_processes, program_words, train_line
from ditkit_core.commands.options import verb_of
from ditkit_core.commands.plan import DOES_NOT_FIT, file_to_write
from ditkit_core.commands.preflight import check_paths
from ditkit_core.config.cli_args import Flags
from ditkit_core.config.resolve import resolve
from ditkit_core.config.sizes import GIB
from ditkit_core.config.toml import changes_to_toml, read_config_file
from ditkit_core.errors import UserError
from ditkit_core.io.console import doing, say, warn
from ditkit_core.io.files import local_path, read_text, write_text
from ditkit_core.io.run_dir import RECIPE
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.gpus import GPU, parse_gpus
from ditkit_core.planner.report import PlanReport, describe_shortfall
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.jobs import jobs_of
from ditkit_core.run.plans.fit import gpus_to_fit
from ditkit_core.run.plans.hours import PlannedRun, hours_in_words, launch_of, run_of_recipe
from ditkit_core.run.plans.plan import make_report
from ditkit_core.run.recipes import GOALS, LIST, Recipe


def use_recipe(
    spec: ModelSpec, recipes: Sequence[Recipe], flags: Flags, components: Sequence[str]
) -> Flags | int:
    """Choose among recipes and write the chosen one as a run file, with what the command line sets.

    Args:
        recipes: Those that `--recipe` names: all of a goal, one, or every recipe for the table.
        components: Keys of `[model]` whose files the family reads.

    Returns:
        The command line with the run file in place of the recipe; or an exit status, if there is
        nothing left to do: 0 after the table, or where the run has to be started elsewhere; 3 if no
        recipe fits.
    """
    common, options = flags.common, flags.options
    verb, is_printed = verb_of("train", options), common.print_config or common.changed
    is_named = [recipe.name for recipe in recipes] == [options.recipe]
    text = options.gpus
    if is_named and is_printed and not text:  # nothing is chosen
        text = recipes[0].gpus
    gpus, _ = gpus_to_fit(resolve(RunConfig, flags=flags.values), text)
    gpus = tuple(sorted(gpus, key=lambda gpu: -gpu.total))  # as recipes for several name them
    if options.recipe == LIST:
        _print_table(spec, recipes, flags, gpus)
        return 0
    candidates = list(recipes) if is_named else _promised(recipes, flags, gpus)
    if not candidates:
        smallest = min(recipes, key=_memory)
        warn(
            f"no recipe for {GOALS[recipes[0].goal]} is for {_names(gpus)}; the smallest is "
            f"{smallest.name}, for {smallest.machine}: --recipe {smallest.name} --fit looks for "
            "settings with which it fits"
        )
        return DOES_NOT_FIT
    chosen = candidates[0]
    if is_printed or verb in ("plan", "fit"):
        warn(f"recipe {chosen.name}: {GOALS[chosen.goal]}, {chosen.model}, for {chosen.machine}")
        return replace(
            flags,
            common=replace(common, config=str(chosen.path)),
            options=replace(options, recipe=""),
        )
    config = resolve(RunConfig, file=chosen.path, flags=flags.values)
    is_of_recipe = not {"data.folder", "data.folders"} & flags.values.keys()
    if is_of_recipe and not local_path(config.data.folder).is_dir():
        # Its name is an example that the reader of this message has never typed.
        raise UserError(
            f"recipe {chosen.name} needs your data: add --data.folder FOLDER, or name the folder "
            f"{config.data.folder}"
        )
    check_paths("train", verb, config, options, components)
    file_to_write(options)
    return _begin(spec, candidates, flags, gpus)


def _begin(
    spec: ModelSpec, candidates: Sequence[Recipe], flags: Flags, gpus: Sequence[GPU]
) -> Flags | int:
    """Plan one candidate after the other, and write the first that fits."""
    options = flags.options
    for chosen in candidates:
        config = resolve(RunConfig, file=chosen.path, flags=flags.values)
        doing(f"planning {chosen.name}")
        # One that was named is planned for as many, also where it promises nothing.
        used = gpus[: len(parse_gpus(chosen.gpus))] if options.gpus else ()
        names = ",".join(gpu.name for gpu in used)
        report = make_report(create_run(spec, config), names, options.host, launch_of(chosen))
        if report.fits:
            break
        warn(f"{chosen.name} does not fit: {'; '.join(_lacking(report))}")
    else:
        warn(f"nothing was written; add --fit to look for settings with which {chosen.name} fits")
        return DOES_NOT_FIT
    warn(f"recipe {chosen.name} ({GOALS[chosen.goal]}, {chosen.model}): {_cost(report)}")
    if len(candidates) > 1:
        others = ", ".join(recipe.name for recipe in candidates if recipe is not chosen)
        warn(
            f"chosen because it is for the largest GPU among those that fit, and the shortest of "
            f"these; others: {others}"
        )
    if options.comfyui:
        flags = with_comfyui(spec, flags, config)
        config, options = resolve(RunConfig, file=chosen.path, flags=flags.values), flags.options
    keys = {*read_config_file(RunConfig, chosen.path), *flags.values}
    text = f"# Recipe {chosen.name}: {GOALS[chosen.goal]}, {chosen.model}, for {chosen.machine}.\n\n{changes_to_toml(config, keys)}"
    out = local_path(options.write) if options.write else config.run_folder.path / RECIPE
    processes = chosen.processes
    if processes == 1:  # flags may divide it
        processes = num_processes(config.ranks.group_size, len(gpus))
    command = train_line(spec.name, str(out), processes)
    if out.exists() and read_text(out) != text:
        raise UserError(
            f"{out} exists with other settings, and nothing is overwritten; continue it "
            f"({command}), or give another run.folder"
        )
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, text)
    devices = config.train.devices or (config.train.device,)
    if not torch.cuda.is_available() and "cpu" not in devices:
        warn(
            f"written to {out}; this machine has no GPU, so start it where there is one: {command}"
        )
        return 0
    warn(f"written to {out}, from which this run is started and continued: {command}")
    if processes > 1:
        words = launch_words([*program_words(), str(out)], processes)
        os.execv(words[0], words)  # with its signals and its exit status
    rest = replace(options, recipe="", gpus="", host="", write="")
    return replace(flags, common=replace(flags.common, config=str(out)), options=rest)


def _promised(recipes: Sequence[Recipe], flags: Flags, gpus: Sequence[GPU]) -> list[Recipe]:
    """Those that promise to fit these GPUs, first what is for most memory, then what is shortest;
    of the model that the command line sets."""
    preset = flags.values.get("model.preset")
    if preset:
        models = {
            recipe.name: resolve(RunConfig, file=recipe.path).model.preset for recipe in recipes
        }
        if preset not in models.values():
            presets = ", ".join(dict.fromkeys(models.values()))
            raise UserError(
                f"no recipe for {GOALS[recipes[0].goal]} is for model.preset = {preset!r}; there "
                f"are some for {presets}"
            )
        recipes = [recipe for recipe in recipes if models[recipe.name] == preset]
    fitting = [recipe for recipe in recipes if gpus_for(recipe, gpus)]
    return sorted(fitting, key=lambda recipe: (-_memory(recipe), recipe.hours))


def gpus_for(recipe: Recipe, gpus: Sequence[GPU]) -> tuple[GPU, ...]:
    """The largest of these GPUs, as many as a recipe promises to fit; empty where it is for more
    GPUs or larger ones."""
    promised = parse_gpus(recipe.gpus)
    largest = sorted(gpus, key=lambda gpu: -gpu.total)[: len(promised)]
    if len(largest) < len(promised):
        return ()
    fits = all(one.total <= gpu.total for one, gpu in zip(promised, largest, strict=True))
    return tuple(largest) if fits else ()


def _memory(recipe: Recipe) -> int:
    return sum(gpu.total for gpu in parse_gpus(recipe.gpus))


def _names(gpus: Sequence[GPU]) -> str:
    numbers = Counter(gpu.name for gpu in gpus)
    return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in numbers.items())


def _lacking(report: PlanReport) -> list[str]:
    rows = [describe_shortfall(row, report.previews) for row in report.lacking]
    step = [
        f"{device.budget.name} has {device.budget.available / GIB:.1f} GiB, and a step needs "
        f"{device.peak / GIB:.1f}"
        for device in report.devices
        if not device.fits
    ]
    return step + rows or ["the host lacks memory for streamed weights"]


def _cost(report: PlanReport) -> str:
    """Memory and time of a plan."""
    parts = [
        f"{device.peak / GIB:.1f} of {device.budget.available / GIB:.1f} GiB of "
        f"{device.budget.name}"
        for device in report.devices
    ]
    if report.step.streamed:
        parts.append(f"{report.step.streamed / GIB:.1f} GiB on the host")
    if report.hours:
        parts.append(f"{hours_in_words(report.hours)} hours of training steps")
    return f"{', '.join(parts)} by plan"


def _print_table(
    spec: ModelSpec, recipes: Sequence[Recipe], flags: Flags, gpus: Sequence[GPU]
) -> None:
    """A line for each recipe, as soon as it is planned."""
    name, goal, model = (
        max(map(len, column)) for column in zip(*map(_words, recipes), strict=True)
    )
    say(
        f"{'recipe':{name}}  {'I want':{goal}}  {'of':{model}}  {'GPU GiB':>11}  {'host GiB':>8}  "
        f"{'hours':>5}  on {_names(gpus)}"
    )
    for recipe in recipes:
        first, want, of = _words(recipe)
        line = f"{first:{name}}  {want:{goal}}  {of:{model}}  "
        if not (used := gpus_for(recipe, gpus)):
            say(f"{line}{'–':>11}  {'–':>8}  {'–':>5}  for {recipe.machine}")
            continue
        doing(f"planning {recipe.name}")
        with run_of_recipe(spec, recipe, flags.values) as run:
            planned = PlannedRun.of(jobs_of(run), launch_of(recipe))
        devices = planned.devices(used)
        ranks = f"{recipe.processes} × " if recipe.processes > 1 else ""
        peaks = ranks + " + ".join(f"{device.peak / GIB:.1f}" for device in devices)
        host = planned.host + sum(device.host for device in devices)
        fits = all(device.fits for device in devices)
        hours = hours_in_words(planned.hours(used)) if fits else "–"
        say(
            f"{line}{peaks:>11}  {host / GIB:>8.1f}  "
            f"{hours:>5}{'' if fits else '  does not fit as set'}"
        )
    say("Planned, not measured; loading, encoding and decoding add minutes.")


def _words(recipe: Recipe) -> tuple[str, str, str]:
    return recipe.name, GOALS[recipe.goal], recipe.model
