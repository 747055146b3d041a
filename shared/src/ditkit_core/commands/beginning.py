"""What a run prints before it trains: what is trained, on which devices, and what changed since its last part."""

from collections.abc import Sequence
from pathlib import Path

from ditkit_core.config.resume import ConfigChange
from ditkit_core.io.console import say
from ditkit_core.run.checks import say_where_previews_could_be
from ditkit_core.run.context import RunContext
from ditkit_core.run.experts import describe_expert


def say_beginning(run: RunContext, changes: Sequence[ConfigChange]) -> None:
    """Print what a component run trains, what changed since its last part, and its precision."""
    config = run.config
    if run.expert is not None:
        say(describe_expert(run.expert, config.flow, config.held_out))
    for change in changes:
        say(f"changed since the last part of this run: {change}")
    say(_opening(run))
    say_where_previews_could_be(run)


def describe_precision(run: RunContext) -> str:
    """The dtype of each place, in a line."""
    base_compute, optim = run.config.base.compute, run.config.optim
    in_8_bits, fused = optim.kind.averages_in_8_bits, optim.fused_backward and run.config.micro_batches == 1
    return run.precision.described(base_compute=base_compute, averages_in_8_bits=in_8_bits, fused_backward=fused)


def _opening(run: RunContext) -> str:
    """What is trained, in a line."""
    config, devices = run.config, " and ".join(map(str, run.devices))
    adapter = config.adapter
    what = "all weights" if adapter.method == "full" else f"a {adapter.name} of rank {adapter.rank}"
    model = config.model.preset or f"{run.spec.name} ({Path(config.model.transformer or config.model.base).name})"
    forms = ""
    if config.export.forms != run.given.config.export.forms:
        why = (
            "no file of a DoRA is for both ComfyUI and diffusers"
            if adapter.use_dora
            else "it has a name for each layer"
        )
        several = "s" * (len(config.export.forms) > 1)
        forms = f"; its files are in the {' and '.join(config.export.forms)} form{several}, because {why}"
    precision = f"precision {config.precision.preset}, each dtype is in the report"
    return f"train {what} of {model} for {config.train.steps} steps on {devices} ({precision}){forms}"
