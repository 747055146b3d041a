"""Settings that have no effect in a run, which is said when it starts."""

from collections.abc import Callable, Iterator, Sequence

import torch

from ditkit_core.config.schema import config_values
from ditkit_core.engine.activation_offload import can_offload
from ditkit_core.engine.devices import ALL
from ditkit_core.run.config import RunConfig

_WITHOUT_EFFECT: tuple[tuple[tuple[str, ...], Callable[[RunConfig], object], str], ...] = (
    (
        ("optim.final_lr_fraction",),
        lambda run: run.optim.schedule == "constant",
        "optim.schedule = constant has no decay",
    ),
    (("optim.betas",), lambda run: run.optim.name == "adafactor", "optim.name = adafactor uses values of its own"),
    (("ema.update_every",), lambda run: not run.ema.decay, "ema.decay = 0 averages nothing"),
    (
        ("held_out.sigmas", "held_out.every_steps", "save.keep_best"),
        lambda run: not run.held_out.clips,
        "held_out.clips = 0 measures no validation loss",
    ),
    (
        ("flow.stratified",),
        lambda run: (run.train.accumulation, run.train.batch_size, run.train.batch_tokens) == (1, 1, 0),
        "a step has one sample, and there is nothing to spread; set train.accumulation or train.batch_size above 1",
    ),
    (
        ("data.bucket_step", "data.max_aspect"),
        lambda run: not run.data.buckets,
        "data.buckets = false makes no buckets",
    ),
    (
        ("data.seed",),
        lambda run: run.data.windows != "random" and not run.data.shuffle_tags,
        "neither windows nor tags are random",
    ),
    (
        (
            "adapter.rank",
            "adapter.alpha",
            "adapter.dropout",
            "adapter.targets",
            "adapter.use_rslora",
            "adapter.use_dora",
        ),
        lambda run: run.adapter.method == "full",
        "adapter.method = full trains the weights themselves",
    ),
    (("adapter.rank", "adapter.alpha"), lambda run: run.adapter.init, "the file of adapter.init has them"),
    (("train.clip_by",), lambda run: not run.train.clip_norm, "train.clip_norm = 0 clips nothing"),
    (("sample.device",), lambda run: not run.sample.every_steps, "sample.every_steps = 0 generates no previews"),
    (("log.project",), lambda run: run.log.tracker == "none", "log.tracker = none logs to no project"),
)
"""Keys, when they have no effect, and why."""


def without_effect(config: RunConfig, devices: Sequence[torch.device], *, trains_bf16: bool) -> Iterator[str]:
    """A line for each setting that has no effect.

    Args:
        config: As the user wrote it.
        devices: Those that train.
        trains_bf16: Whether the trained weights are bf16.
    """
    defaults = config_values(RunConfig())
    values = config_values(config)
    for keys, holds, why in _WITHOUT_EFFECT:
        for key in keys if holds(config) else ():
            if values[key] != defaults[key]:
                yield f"{key} = {values[key]} has no effect: {why}"
    if 0 < config.train.steps <= config.optim.warmup_steps:
        yield (
            f"optim.warmup_steps = {config.optim.warmup_steps} is the whole run of {config.train.steps} steps: the learning rate never "
            "reaches optim.lr"
        )
    train, count = config.train, len(devices)
    if config.optim.rounding != "nearest" and not trains_bf16:
        yield f"optim.rounding = {config.optim.rounding} rounds trained bf16 weights, and this run has none"
    if train.pipelined and count == 1:
        yield "train.pipelined lets several devices work at once, and this run has one: it needs more memory and is no faster"
    if any(train.reserve) and all(device.type == "cpu" for device in devices):
        yield f"train.reserve = {list(train.reserve)} is memory of GPUs, and this run is on the CPU: it has no effect"
    offloads = any(rule.policy.offload for rule in train.schedule.rules)
    if offloads and not any(map(can_offload, devices)):
        yield f"train.checkpointing = {train.checkpointing} moves activations to the host, and this run is on the host: nothing is moved"
    if train.devices == (ALL,) and count == 1:
        yield 'train.devices = ["all"] is one GPU here: the model is not split'
