"""Checks of a configuration that run before anything is written or loaded."""

from collections.abc import Callable, Iterator, Sequence

import torch

from ditkit_core.adapters.files.export import check_export
from ditkit_core.config.schema import config_values
from ditkit_core.config.sizes import per_device
from ditkit_core.data.dataset import Sample
from ditkit_core.distributed.launch import launched
from ditkit_core.encoding.encode import clip_inputs_of
from ditkit_core.engine.ac_schedule import check_sizes
from ditkit_core.engine.activation_offload import can_offload
from ditkit_core.engine.compile import backend_of, check_compiled, check_compiler
from ditkit_core.engine.devices import ALL, choose_device
from ditkit_core.errors import UserError
from ditkit_core.io.console import say, warn
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.nn.attention.backends import check_backend
from ditkit_core.nn.kernels.launch import check_kernels
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext
from ditkit_core.run.data import RunData
from ditkit_core.run.encoding import sample_prompts
from ditkit_core.run.experts import check_merges
from ditkit_core.run.gpus import check_capability
from ditkit_core.run.jobs import Jobs
from ditkit_core.sampling.prompts import SamplePrompt
from ditkit_core.training.optim.fused_checks import check_fused_backward, check_swap
from ditkit_core.training.optim.optimizers import optimizers_that
from ditkit_core.weights.quantize import check_compute, check_quantize


def check_jobs(jobs: Jobs, num_ranks: int) -> None:
    """Refuse settings that cannot be trained, before anything is written.

    Raises:
        UserError: If a setting of the run or of a job contradicts another, or a job's folder belongs to another configuration.
    """
    run, folder = jobs.run, jobs.run.config.run_folder.path
    if jobs.in_folders:
        check_run(run)
        check_preview_device(run)  # here and not per job: only the run of all experts generates previews
        if jobs.settings.adapter.init:
            raise UserError(
                f"adapter.init = {jobs.settings.adapter.init!r} belongs to one expert and would initialize both; train each in a run of its own, "
                "with experts.train = high_noise and low_noise"
            )
    elif inside := [
        folder / expert.name for expert in run.experts if RunFolder(folder / expert.name).config_file.exists()
    ]:
        raise UserError(
            f"{folder} is a run of several experts; continue one of them with --run {inside[0]}, or name a new run.folder"
        )
    for job in jobs:
        check_run(job.run)
        check_training(job.run)
        check_ranks(job.run, num_ranks)
    # The run's own folder has no saves to compare the configuration with: each expert's folder checks its own.
    for job in jobs.in_folders:
        job.changes()


def check_run(run: RunContext) -> None:
    """Refuse a configuration that no command can run, before anything is written or loaded."""
    # The first two calls only check: their results are used where the devices are planned and loaded.
    per_device(run.config.train.reserve, len(run.devices), "train.reserve")
    choose_device(run.config.encode.device, "encode.device")
    check_backend(run.config.train.attention, training=False, devices=[device.type for device in run.devices])
    check_settings(run)
    check_capability(run.execution, run.devices)


def check_settings(run: RunContext) -> None:
    """The checks of `check_run` that do not depend on the devices of this machine."""
    assert run.precision  # read for its own checks: a property that raises where the dtypes contradict each other
    base, method = run.config.base, run.config.adapter.method
    check_quantize(base.quantize, method)
    check_compute(base.compute, run.stored_as if base.quantize == "none" else base.quantize, method)
    check_export(run.spec, run.config.export, run.config.adapter)
    check_backend(run.config.train.attention, training=False)
    run.config.sample.check(
        frame_step=run.spec.data.frame_step,
        size_step=run.spec.data.size_step,
        takes_references=run.spec.data.reference_size is not None,
    )
    _check_adapter_files(run)


def _check_adapter_files(run: RunContext) -> None:
    """Refuse files of [base] and [sample] that are missing or of another model or expert, as far as the architecture is known."""
    if run.arch is not None:
        check_merges(run.config.base, run.experts, trains=run.expert)
    run.sample_adapters.check()


def check_training(run: RunContext, *, here: bool = True) -> None:
    """Refuse a configuration that cannot be trained, and warn of settings that have no effect.

    Args:
        here: Whether the run trains on the devices of this machine; False plans for other ones.
    """
    train, base = run.config.train, run.config.base
    if base.quantized_cache and base.quantize == "none" and run.stored_as == "none":
        raise UserError(
            f"base.quantized_cache = {base.quantized_cache!r} stores a quantized base, and base.quantize = none makes none; set "
            "base.quantize to int8, fp8 or nf4, or leave base.quantized_cache out"
        )
    if train.pipelined and train.accumulation == 1 and not run.config.prior.wanted:
        raise UserError(
            "train.pipelined overlaps the micro-batches of a step, and train.accumulation = 1 makes one; set "
            "train.accumulation to 2 or more, or leave train.pipelined out"
        )
    if here:
        check_preview_device(run)
    # A plan for other GPUs cannot check anything that depends on the devices' type.
    kinds = dict.fromkeys(device.type for device in run.devices) if here else ()
    check_backend(run.config.train.attention, training=True, devices=tuple(kinds))
    check_kernels(train.kernels, kinds)
    optim = run.config.optim
    _check_method(run)
    check_swap(train.swap_blocks, run.config.adapter.method, optim)
    check_fused_backward(train, optim, adapts=run.config.adapter.method != "full", prior=run.config.prior.wanted)
    check_sizes(train.schedule.budget or (), len(run.devices) if here else None)
    check_compiler(backend_of(train.compile), kinds)
    # Codes that are multiplied as they are stay codes for the backward.
    quantized = base.compute == "dtype" and (base.quantize != "none" or run.stored_as != "none")
    check_compiled(backend_of(train.compile), train.schedule.distinct, attention=train.attention, quantized=quantized)
    if run.precision.matmul == torch.float16:
        raise UserError(
            "model.dtype = fp16 cannot train: gradients underflow without a loss scaler; choose bf16 or fp32"
        )
    if run.config.adapter.method == "full" and run.precision.matmul == torch.float64:
        raise UserError("adapter.method = full in fp64 is for comparisons only; set model.dtype = fp32")
    if _trains_bf16(run) and optim.rounding == "nearest":
        raise UserError(
            "adapter.method = full with model.dtype = bf16 and optim.rounding = nearest rounds most updates away; set "
            "optim.rounding to stochastic, or to split (2 bytes more per weight), or model.dtype = fp32"
        )
    in_8_bits = optimizers_that(lambda kind: kind.averages_in_8_bits)
    run.config.precision.check_training(
        optimizer=optim.name,
        in_8_bits=in_8_bits,
        fused_backward=optim.fused_backward and run.config.micro_batches == 1,
        sharded=run.config.ranks.shard > 1,
    )
    for unused in _unused(run) if here else ():
        warn(unused)


def _check_method(run: RunContext) -> None:
    """Refuse settings for another `adapter.method`."""
    method, ratio = run.config.adapter.method, run.config.optim.loraplus_lr_ratio
    if ratio != 1 and method != "lora":
        raise UserError(
            f"optim.loraplus_lr_ratio = {ratio:g} is for the B of a LoRA, and adapter.method = {method} has none; leave it out "
            "(optim.lr_pattern sets rates by layer)"
        )
    if run.config.prior.match_base and method == "full":
        raise UserError(
            "prior.match_base compares with the base without its adapter, and adapter.method = full changes the base itself; use "
            "prior.folder or prior.prompt, or train an adapter"
        )


def check_ranks(run: RunContext, size: int) -> None:
    """Refuse settings that do not work on several ranks, which all have the complete model on their own GPUs.

    To be called again once the architecture is known.

    Raises:
        UserError: Naming the setting and a value that works.
    """
    config, train = run.config, run.config.train
    if size % config.ranks.shard:
        raise UserError(
            f"ranks.shard = {config.ranks.shard} does not divide this run's {size} process{'es' * (size > 1)}; start a multiple of it, or set "
            f"ranks.shard to {' or '.join(str(number) for number in range(1, size + 1) if size % number == 0)}"
        )
    _check_context(run, size)
    if size == 1:
        return
    if config.ranks.shard > 1:
        _check_sharded(run)
    num_groups = size // config.ranks.context
    several = f"this run has {size} ranks, each on one GPU"
    if train.devices:
        raise UserError(f"train.devices = {list(train.devices)} divides the model, and {several}; leave it out")
    if train.device not in ("auto", "cpu", "cuda"):
        raise UserError(
            f"train.device = {train.device!r} is one GPU, and {several}; leave it out: each rank takes its own"
        )
    if ":" in config.encode.device:
        raise UserError(f"encode.device = {config.encode.device!r} is one GPU, and {several}; set it to auto or cpu")
    if (launch := launched()) and config.sample.device:
        device = choose_device(config.sample.device, "sample.device")
        if device.type == "cuda" and device.index < launch.num_local:
            raise UserError(
                f"sample.device = {config.sample.device!r} is a GPU that trains; name another one or cpu, or leave it out"
            )
    if train.pipelined:
        raise UserError(f"train.pipelined overlaps the devices of a divided model, and {several}; leave it out")
    if config.optim.fused_backward:
        raise UserError(
            f"optim.fused_backward updates weights before the gradients of all ranks are added, and {several}; set it to false"
        )
    if config.micro_batches < num_groups:
        most, fitting = config.micro_batches, config.micro_batches * config.ranks.context
        working = f"{size} ranks" if num_groups == size else f"{num_groups} groups of {config.ranks.context} ranks"
        raise UserError(
            f"train.accumulation = {train.accumulation} makes {most} micro-batch{'es' * (most > 1)} a step in all, too few for {working}; set "
            f"train.accumulation to {num_groups} or a multiple of it (train.batch_size is of one micro-batch), or start at most {fitting} "
            f"process{'es' * (fitting > 1)}"
        )


def _check_sharded(run: RunContext) -> None:
    """Refuse settings that need a weight whole, where ranks divide it.

    Raises:
        UserError: Naming the setting and a value that works.
    """
    from ditkit_core.distributed.fsdp import keeps_wide_gradients, shards_integers  # torch's parts take seconds

    config, shard = run.config, f"ranks.shard = {run.config.ranks.shard}"
    if _trains_bf16(run) and not keeps_wide_gradients():
        raise UserError(
            f"{shard} with trained weights in bf16: this torch, {torch.__version__}, rounds gradients that it has summed over ranks to bf16; update "
            "it, or set model.dtype = fp32"
        )
    stored = run.stored_as if config.base.quantize == "none" else config.base.quantize
    if stored not in ("none", "fp8") and not shards_integers():
        raise UserError(
            f"{shard} with a base in {stored}: this torch, {torch.__version__}, cannot divide parameters of integers; update it, "
            "or set base.quantize to fp8 or none"
        )
    if not config.optim.kind.by_element:
        raise UserError(
            f"optim.name = {config.optim.name} needs whole weights or all of them at once, and {shard} gives each rank some rows; use "
            f"{' or '.join(optimizers_that(lambda kind: kind.by_element))}"
        )
    if config.train.clip_by == "block" and config.train.clip_norm:
        raise UserError(
            f"train.clip_by = block needs whole gradients of a block, and {shard} gives each rank some rows; use step or last_step"
        )
    if any(config.train.swap_blocks):
        raise UserError(
            f"train.swap_blocks streams whole weights, and {shard} divides them over ranks; leave it out, or divide them over more ranks"
        )
    if config.train.compile:
        raise UserError(f"train.compile cannot compile the gathering of weights that {shard} needs; set it to false")
    if config.train.schedule.budget is not None:
        raise UserError(
            f"train.checkpointing = {config.train.checkpointing!r} is planned for whole weights, and {shard} divides them; name a policy, such "
            "as full or attn_only"
        )


def _check_context(run: RunContext, size: int) -> None:
    """Refuse settings that do not work on ranks that share the tokens of each sample. `Ranks.grouped` refuses sizes that do not divide."""
    config, context = run.config, run.config.ranks.context
    if context == 1:
        return
    shared = f"ranks.context = {context} shares each sample's tokens among {context} ranks"
    if size == 1:
        raise UserError(
            f"{shared}, and this run has one; start it with torchrun --nproc-per-node {context}, or leave it out"
        )
    if config.train.compile:
        raise UserError(f"{shared}, which compiled blocks cannot exchange; leave train.compile out")
    if run.arch is not None and run.spec.architecture.token_streams(run.arch) is None:
        raise UserError(f"{shared}, and blocks of this architecture read groups of tokens; leave ranks.context out")


def check_preview_device(run: RunContext) -> None:
    """Refuse a `sample.device` that is missing or trains, and warn of one that has no effect.

    Raises:
        UserError: With the setting to change.
    """
    name = run.config.sample.device
    if not name:
        return
    device = choose_device(name, "sample.device")
    # A CPU can train and generate previews at the same time; both only get slower.
    if device.type != "cpu" and device in run.devices:
        raise UserError(
            f"sample.device = {name!r} is a device that trains; name another one or cpu, or leave it out: previews are then generated where "
            "the model is, and training waits for them"
        )
    # Another device means another process, which has to import the model family by name.
    if not run.spec.import_path:
        raise UserError(
            f"sample.device = {name!r}: another process cannot find the model {run.spec.name} (its ModelSpec.import_path is empty); "
            "leave sample.device out"
        )
    try:
        check_backend(run.config.train.attention, training=False, devices=[device.type])
        check_capability(run.execution, [device])
    except UserError as error:
        raise UserError(f"sample.device = {name!r}: {error}") from error
    if not run.config.sample.every_steps:
        warn(f"sample.device = {name} is where previews are generated, and sample.every_steps = 0 asks for none")


def say_where_previews_could_be(run: RunContext) -> None:
    """If training waits for its previews, name an idle GPU that could generate them."""
    sample = run.config.sample
    if (
        launched()
        or sample.device
        or not sample.every_steps
        or not (sample.prompts or sample.captions)
        or not run.spec.import_path
    ):
        return
    gpus = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    idle = [gpu for gpu in gpus if gpu not in run.devices]
    if idle:
        say(
            f"training pauses while previews are generated; set sample.device = {idle[0]} (idle) to generate them in the background"
        )


def check_components(run: RunContext, samples: Sequence[Sample], *, sampling: bool = False) -> None:
    """Find every model that the run will need and read its description, before the first of them works for hours.

    Args:
        samples: The samples that it trains on; [sample] may take captions from them.
        sampling: Whether images are generated even if [sample] asks for none.

    Raises:
        UserError: If a model or a library is missing, a file is of another model, or a prompt lacks a condition that the model needs.
    """
    # Asking for each is the check: making one finds its files and its libraries, and loads no weights.
    assert run.auxiliary.encoders
    _check_adapter_files(run)  # the architecture may have been unknown before
    assert run.auxiliary.conditioning or not run.auxiliary.columns
    # Faults of single samples are left to encoding, which may skip those samples; what concerns all of them is raised here.
    if run.auxiliary.conditioning is not None:
        run.auxiliary.conditioning.used(
            {sample.id: clip_inputs_of(sample, run.data.fps) for sample in samples}, keep_going=True
        )
    if sampling or run.config.sample.prompts or run.config.sample.captions:
        assert run.auxiliary.sampler
    check_prompts(run.data, sample_prompts(run.data, samples))


def check_prompts(data: RunData, prompts: Sequence[SamplePrompt]) -> None:
    """Read the conditions of the samples that will be generated.

    Args:
        prompts: Prompts with their conditions.

    Raises:
        UserError: If a condition that the model needs is missing or unreadable.
    """
    for prompt in prompts:
        if data.auxiliary.readers is not None:
            data.auxiliary.readers.check(prompt.controls(data.fps))


def _trains_bf16(run: RunContext) -> bool:
    """Whether the trained weights are bf16. The weights of adapters never are."""
    return run.config.adapter.method == "full" and run.precision.matmul == torch.bfloat16


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


def _unused(run: RunContext) -> Iterator[str]:
    """Settings that have no effect in this run."""
    config, defaults = run.request.config, config_values(RunConfig())
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
    train, count = run.config.train, len(run.devices)
    if run.config.optim.rounding != "nearest" and not _trains_bf16(run):
        yield f"optim.rounding = {run.config.optim.rounding} rounds trained bf16 weights, and this run has none"
    if train.pipelined and count == 1:
        yield "train.pipelined lets several devices work at once, and this run has one: it needs more memory and is no faster"
    if any(train.reserve) and all(device.type == "cpu" for device in run.devices):
        yield f"train.reserve = {list(train.reserve)} is memory of GPUs, and this run is on the CPU: it has no effect"
    offloads = any(rule.policy.offload for rule in train.schedule.rules)
    if offloads and not any(map(can_offload, run.devices)):
        yield f"train.checkpointing = {train.checkpointing} moves activations to the host, and this run is on the host: nothing is moved"
    if train.devices == (ALL,) and count == 1:
        yield 'train.devices = ["all"] is one GPU here: the model is not split'
