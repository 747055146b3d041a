"""The checks of a run, in the order in which they are made. Each refuses a mistake with its remedy,
as early as what it needs is known.

1. *Before anything is written or loaded*, by the configuration and the headers of local files:
   `check_jobs` of the train command, and `check_run` of all others that need a model. Before them
   `create_run` has compared [experts] with the architecture, if that is known.
2. *The run's folder is locked, and its dataset is read*: `check_beginning`; then class images are
   counted (`previews/class_images.py`), which refuses missing ones that cannot be generated.
3. *The model is on meta*, matched with its files, and its architecture is known: `check_model`,
   after what building it refuses.
4. *Nothing is encoded yet*: `check_encoding`.
5. *All is encoded*, and no weights are loaded: `check_items`; `check_samples` of experts.
6. *The weights are loaded*, and nothing is trained: `check_data`. Before the weights, ranks have
   compared what they read (`Ranks.check_same`).

What a value refuses by itself is next to it (`base.quantize` in `weights/quantize.py`, a GPU in
`run/gpus.py`, a sample's adapter in `run/sample_adapters.py`), and is called from here.
"""

import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.files.export import check_export
from ditkit_core.adapters.files.export_names import ExportName, finished_adapters
from ditkit_core.adapters.inject import adapter_layers, has_whole_factors
from ditkit_core.config.resolve import resolve
from ditkit_core.config.schema import config_values
from ditkit_core.config.sizes import per_device
from ditkit_core.data.dataset import Sample
from ditkit_core.distributed.launch import launched
from ditkit_core.distributed.ranks import Ranks
from ditkit_core.distributed.shared_folders import check_shared
from ditkit_core.encoding.encode import clip_inputs_of
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.loader import BaseSteps, shapes_of
from ditkit_core.encoding.prior_preservation import PRIOR_MARK
from ditkit_core.engine.ac_schedule import check_sizes
from ditkit_core.engine.activation_offload import can_offload
from ditkit_core.engine.devices import ALL, choose_device
from ditkit_core.errors import UserError, argument
from ditkit_core.io.console import warn
from ditkit_core.io.files import local_path
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.loading.model import Model
from ditkit_core.models.protocol import StagedModel
from ditkit_core.models.spec import ArchitectureSpec, ModelSpec, TrainingSpec
from ditkit_core.nn.attention.backends import check_backend
from ditkit_core.nn.kernels.launch import check_kernels
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext
from ditkit_core.run.data import RunData
from ditkit_core.run.data_record import (
    BASE_CAPTION,
    BASE_WEIGHTS,
    EMPTY_CAPTION,
    NO_SAMPLES,
    SLIDER_CAPTIONS,
    differing,
    keys_of,
    read_record,
    write_record,
)
from ditkit_core.run.encoding import sample_prompts
from ditkit_core.run.experts import check_merges
from ditkit_core.run.gpus import check_capability
from ditkit_core.run.jobs import Jobs, TrainingJob
from ditkit_core.sampling.prompts import SamplePrompt
from ditkit_core.training.optim.fused_checks import check_fused_backward, check_swap
from ditkit_core.training.optim.optimizers import optimizers_that
from ditkit_core.weights.quantize import check_compute, check_quantize

# Before anything is written or loaded


def check_jobs(jobs: Jobs, num_ranks: int) -> None:
    """Refuse settings that cannot be trained, before anything is written."""
    run, folder = jobs.run, jobs.run.config.run_folder.path
    if jobs.in_folders:
        check_run(run)
        # here and not per job: only the run of all experts generates previews
        check_preview_device(run)
        if jobs.settings.adapter.init:
            raise UserError(
                f"adapter.init = {jobs.settings.adapter.init!r} belongs to one expert and would "
                f"initialize both; train each in a run of its own, "
                "with experts.train = high_noise and low_noise"
            )
    elif inside := [
        folder / expert.name
        for expert in run.experts
        if RunFolder(folder / expert.name).config_file.exists()
    ]:
        raise UserError(
            f"{folder} is a run of several experts; continue one of them with --run {inside[0]}, "
            f"or name a new run.folder"
        )
    for job in jobs:
        check_run(job.run)
        check_training(job.run)
        check_ranks(job.run, num_ranks)
    # The run's own folder has no saves to compare the configuration with: each expert's folder
    # checks its own.
    for job in jobs.in_folders:
        job.changes()


def check_run(run: RunContext) -> None:
    """Refuse a configuration that no command can run, before anything is written or loaded."""
    # The first two calls only check: their results are used where the devices are planned and
    # loaded.
    per_device(run.config.train.reserve, len(run.devices), "train.reserve")
    choose_device(run.config.encode.device, "encode.device")
    check_backend(
        run.config.train.attention, training=False, devices=[device.type for device in run.devices]
    )
    check_settings(run)
    check_capability(run.execution, run.devices)


def check_settings(run: RunContext) -> None:
    """The checks of `check_run` that do not depend on the devices of this machine."""
    # read for its own checks: a property that raises where the dtypes contradict each other
    assert run.precision
    base, method = run.config.base, run.config.adapter.method
    check_quantize(base.quantize, method)
    check_compute(base.compute, run.base_format, method)
    check_export(run.spec, run.config.export, run.config.adapter)
    check_backend(run.config.train.attention, training=False)
    run.config.sample.check(run.spec.data)
    _check_adapter_files(run)


def _check_adapter_files(run: RunContext) -> None:
    """Refuse files of [base] and [sample] that are missing or of another model or expert, as far as
    the architecture is known."""
    if run.arch is not None:
        check_merges(run.config.base, run.experts, trains=run.expert)
    run.sample_adapters.check()


def check_training(run: RunContext, *, here: bool = True) -> None:
    """Refuse a configuration that cannot be trained, on the devices of this machine if it is
    `here`, and warn of settings that have no effect."""
    train = run.config.train
    if train.pipelined and train.accumulation == 1 and not run.config.prior.wanted:
        raise UserError(
            "train.pipelined overlaps the micro-batches of a step, and train.accumulation = 1 "
            "makes one; set train.accumulation to 2 or more, or leave train.pipelined out"
        )
    if here:
        check_preview_device(run)
    # A plan for other GPUs cannot check anything that depends on the devices' type.
    kinds = dict.fromkeys(device.type for device in run.devices) if here else ()
    check_backend(run.config.train.attention, training=True, devices=tuple(kinds))
    check_kernels(train.kernels, kinds)
    optim = run.config.optim
    method, ratio = run.config.adapter.method, optim.loraplus_lr_ratio
    if ratio != 1 and method != "lora":
        raise UserError(
            f"optim.loraplus_lr_ratio = {ratio:g} is for the B of a LoRA, and adapter.method = "
            f"{method} has none; leave it out (optim.lr_pattern sets rates by layer)"
        )
    if run.config.prior.match_base and method == "full":
        raise UserError(
            "prior.match_base compares with the base without its adapter, and adapter.method = "
            "full changes the base itself; use prior.folder or prior.prompt, or train an adapter"
        )
    if run.config.flow.slider_positive and method == "full":
        raise UserError(
            "flow.slider_positive trains on predictions of the base without its adapter, and "
            "adapter.method = full changes the base itself; train an adapter"
        )
    if run.config.flow.slider_positive and run.config.prior.wanted:
        raise UserError(
            "flow.slider_positive would train the class images of [prior] as a slider, too; set "
            "prior.match_base, with the class in prior.prompt, or remove [prior]"
        )
    _check_method(method, run.arch, run.spec.training)
    check_swap(train.swap_blocks, method, optim)
    check_fused_backward(train, optim, adapts=method != "full", prior=run.config.prior.wanted)
    check_sizes(train.schedule.budget or (), len(run.devices) if here else None)
    if run.precision.matmul == torch.float16:
        raise UserError(
            "model.dtype = fp16 cannot train: gradients underflow without a loss scaler; choose "
            "bf16 or fp32"
        )
    if method == "full" and run.precision.matmul == torch.float64:
        raise UserError(
            "adapter.method = full in fp64 is for comparisons only; set model.dtype = fp32"
        )
    if run.trains_bf16 and optim.rounding == "nearest":
        raise UserError(
            "adapter.method = full with model.dtype = bf16 and optim.rounding = nearest rounds "
            "most updates away; set optim.rounding to stochastic, or to split (2 bytes more per "
            "weight), or model.dtype = fp32"
        )
    in_8_bits = optimizers_that(lambda kind: kind.averages_in_8_bits)
    run.config.precision.check_training(
        optimizer=optim.name,
        in_8_bits=in_8_bits,
        fused_backward=optim.fused_backward and run.config.micro_batches == 1,
        sharded=run.config.ranks.shard > 1,
    )
    if here and optim.advice:
        warn(optim.advice)
    for line in (
        without_effect(run.request.config, run.devices, trains_bf16=run.trains_bf16) if here else ()
    ):
        warn(line)


def check_ranks(run: RunContext, size: int) -> None:
    """Refuse settings that do not work on several ranks, which all have the complete model on their
    own GPUs.

    To be called again once the architecture is known.
    """
    config, train = run.config, run.config.train
    if size % config.ranks.shard:
        raise UserError(
            f"ranks.shard = {config.ranks.shard} does not divide this run's {size} "
            f"process{'es' * (size > 1)}; start a multiple of it, or set ranks.shard to "
            f"{' or '.join(str(number) for number in range(1, size + 1) if size % number == 0)}"
        )
    _check_context(config, size, run.spec.architecture, run.arch)
    if size == 1:
        return
    if config.ranks.shard > 1:
        _check_sharded(config, run.base_format, trains_bf16=run.trains_bf16)
    num_groups = size // config.ranks.context
    several = f"this run has {size} ranks, each on one GPU"
    if train.devices:
        raise UserError(
            f"train.devices = {list(train.devices)} divides the model, and {several}; leave it out"
        )
    if train.device not in ("auto", "cpu", "cuda"):
        raise UserError(
            f"train.device = {train.device!r} is one GPU, and {several}; leave it out: each rank "
            f"takes its own"
        )
    if ":" in config.encode.device:
        raise UserError(
            f"encode.device = {config.encode.device!r} is one GPU, and {several}; set it to auto "
            f"or cpu"
        )
    if (launch := launched()) and config.sample.device:
        device = choose_device(config.sample.device, "sample.device")
        if device.type == "cuda" and device.index < launch.num_local:
            raise UserError(
                f"sample.device = {config.sample.device!r} is a GPU that trains; name another one "
                f"or cpu, or leave it out"
            )
    if train.pipelined:
        raise UserError(
            f"train.pipelined overlaps the devices of a divided model, and {several}; leave it out"
        )
    if config.optim.fused_backward:
        raise UserError(
            f"optim.fused_backward updates weights before the gradients of all ranks are added, "
            f"and {several}; set it to false"
        )
    if config.micro_batches < num_groups:
        most, fitting = config.micro_batches, config.micro_batches * config.ranks.context
        working = (
            f"{size} ranks"
            if num_groups == size
            else f"{num_groups} groups of {config.ranks.context} ranks"
        )
        raise UserError(
            f"train.accumulation = {train.accumulation} makes {most} "
            f"micro-batch{'es' * (most > 1)} a step in all, too few for {working}; set "
            f"train.accumulation to {num_groups} or a multiple of it (train.batch_size is of one "
            f"micro-batch), or start at most {fitting} process{'es' * (fitting > 1)}"
        )


def _check_sharded(config: RunConfig, base_format: str, *, trains_bf16: bool) -> None:
    """Refuse settings that need a weight whole, where ranks divide it."""
    # torch's parts take seconds
    from ditkit_core.distributed.fsdp import keeps_wide_gradients, shards_integers

    shard = f"ranks.shard = {config.ranks.shard}"
    if trains_bf16 and not keeps_wide_gradients():
        raise UserError(
            f"{shard} with trained weights in bf16: this torch, {torch.__version__}, rounds "
            "gradients that it has summed over ranks to bf16; update it, or set model.dtype = fp32"
        )
    if base_format not in ("none", "fp8") and not shards_integers():
        raise UserError(
            f"{shard} with a base in {base_format}: this torch, {torch.__version__}, cannot divide "
            "parameters of integers; update it, or set base.quantize to fp8 or none"
        )
    if not config.optim.kind.by_element:
        raise UserError(
            f"optim.name = {config.optim.name} needs whole weights or all of them at once, and "
            f"{shard} gives each rank some rows; use "
            f"{' or '.join(optimizers_that(lambda kind: kind.by_element))}"
        )
    if config.train.clip_by == "block" and config.train.clip_norm:
        raise UserError(
            f"train.clip_by = block needs whole gradients of a block, and {shard} gives each rank "
            f"some rows; use step or last_step"
        )
    if any(config.train.swap_blocks):
        raise UserError(
            f"train.swap_blocks streams whole weights, and {shard} divides them over ranks; leave "
            f"it out, or divide them over more ranks"
        )
    if config.train.schedule.budget is not None:
        raise UserError(
            f"train.checkpointing = {config.train.checkpointing!r} is planned for whole weights, "
            f"and {shard} divides them; name a policy, such as full or attn_only"
        )


def _check_context(config: RunConfig, size: int, architecture: ArchitectureSpec, arch: Any) -> None:
    """Refuse settings that do not work on ranks that share the tokens of each sample.
    `Ranks.grouped` refuses sizes that do not divide."""
    context = config.ranks.context
    if context == 1:
        return
    shared = f"ranks.context = {context} shares each sample's tokens among {context} ranks"
    if size == 1:
        raise UserError(
            f"{shared}, and this run has one; start it with torchrun --nproc-per-node {context}, "
            f"or leave it out"
        )
    if config.train.token_routing:
        raise UserError(
            f"{shared}, and train.token_routing takes tokens of their samples out as well; leave "
            f"one of them out"
        )
    streams = None if arch is None else architecture.token_streams(arch)
    if arch is not None and (streams is None or streams.positions):
        raise UserError(
            f"{shared}, and blocks of this architecture read groups of tokens; leave ranks.context "
            f"out"
        )


def check_preview_device(run: RunContext) -> None:
    """Refuse a `sample.device` that is missing or trains, and warn of one that has no effect."""
    name = run.config.sample.device
    if not name:
        return
    device = choose_device(name, "sample.device")
    # A CPU can train and generate previews at the same time; both only get slower.
    if device.type != "cpu" and device in run.devices:
        raise UserError(
            f"sample.device = {name!r} is a device that trains; name another one or cpu, or leave "
            "it out: previews are then generated where the model is, and training waits for them"
        )
    # Another device means another process, which has to import the model family by name.
    if not run.spec.import_path:
        raise UserError(
            f"sample.device = {name!r}: another process cannot find the model {run.spec.name} (its "
            "ModelSpec.import_path is empty); leave sample.device out"
        )
    try:
        check_backend(run.config.train.attention, training=False, devices=[device.type])
        check_capability(run.execution, [device])
    except UserError as error:
        raise UserError(f"sample.device = {name!r}: {error}") from error
    if not run.config.sample.every_steps:
        warn(
            f"sample.device = {name} is where previews are generated, and sample.every_steps = 0 "
            f"asks for none"
        )


# The folder is locked, and the dataset is read


def check_beginning(job: TrainingJob, *, is_started: bool) -> None:
    """Refuse other data than a job was trained on, and a run that it cannot start from, unless it
    has a save and starts from nothing else. Reads the dataset."""
    check_listed(job.folder, job.run.data)
    if not is_started:
        check_start(job.init_from, job.folder)


def check_listed(folder: RunFolder, data: RunData) -> None:
    """Refuse a dataset, which is read, that lacks a sample of the run. `check_samples` would, too,
    but only after everything is encoded."""
    # read before the record: its own mistakes come first
    ids = {sample.id for sample in data.dataset.samples}
    recorded = (read_record(folder) or {}).keys() - NO_SAMPLES - ids
    _refuse_data(folder, {id for id in recorded if not id.startswith(PRIOR_MARK)})


def _refuse_data(folder: RunFolder, changed: Collection[str]) -> None:
    if changed:
        raise UserError(
            f"{folder.path} was trained on something else ({len(changed)} changed, first "
            f"{min(changed)!r}: clip, mask, caption, encoder or weights); put it back, set "
            "data.folder to where its data is now, or start a new run from its weights with "
            f"--run.folder NEW --init-from {shlex.quote(str(folder.path))}"
        )


def check_start(run: str, folder: RunFolder) -> None:
    """Refuse a run whose trained weights a new run cannot start from."""
    other = RunFolder(local_path(run))
    if run and other.path.resolve() == folder.path.resolve():
        raise UserError(f"--init-from {run} is this run itself; set run.folder to a new folder")
    if not run or other.has_save:
        return
    # A run of several experts has its saves in folders inside; the error names them.
    inside = sorted(path for path in other.path.glob("*") if RunFolder(path).has_save)
    if inside and other.config_file.exists():
        raise UserError(
            f"--init-from {run} is a run of several experts, and this run trains one; name its "
            f"folder: --init-from {' or '.join(map(str, inside))}"
        )
    if inside:
        more = f" and {len(inside) - 3} more" if len(inside) > 3 else ""
        raise UserError(
            f"--init-from {run} has no save; runs inside it: "
            f"{', '.join(map(str, inside[:3]))}{more}; name one"
        )
    raise UserError(f"--init-from {run} has no save; name the folder of a run that was trained")


def _check_method(method: str, arch: Any, training: TrainingSpec) -> None:
    """Refuse to train every weight of an architecture that cannot be trained so; None if it is not
    known yet."""
    if method == "full" and arch is not None and (refusal := training.full_refusal(arch)):
        raise UserError(f"adapter.method = full: {refusal}")


# The model is on `meta`


def check_model(job: TrainingJob, unloaded: Model, num_ranks: int, *, is_started: bool) -> None:
    """Refuse what only the architecture shows, and warn of it. `is_started` as for
    `check_beginning`."""
    if job.init_from and not is_started:
        check_same_adapter(
            unloaded.origin.adapter,
            RunFolder(local_path(job.init_from)),
            merge_key=unloaded.origin.merge_key,
        )
    check_ranks(job.run, num_ranks)
    _check_method(job.run.config.adapter.method, job.run.arch, job.run.spec.training)
    if job.run.trains_several:
        raise UserError(
            "the weights show that this model has several experts; name it with model.preset"
        )
    _warn_of_scaled_lokrs(unloaded)


def _warn_of_scaled_lokrs(unloaded: Model) -> None:
    """Say which LoKrs of whole factors alpha scales, which it does in peft and here, and not in
    LyCORIS."""
    layers = adapter_layers(unloaded.module).values()
    scales = [layer.scaling["default"] for layer in layers if has_whole_factors(layer)]
    if scaled := sorted(scale for scale in scales if scale != 1):
        keys = [key for key in ("alpha", "alpha_pattern") if getattr(unloaded.origin.adapter, key)]
        named = " and ".join(argument(f"adapter.{key}") for key in keys)
        shown = " to ".join(dict.fromkeys(f"{scale:g}" for scale in (scaled[0], scaled[-1])))
        warn(
            f"{named}: {len(scaled)} of {len(layers)} LoKrs have whole factors, because their rank "
            f"is at least half of a factor's larger side, and alpha / rank scales them by {shown}; "
            f"LyCORIS ignores alpha there: leave {named} out for the same"
        )


def check_same_adapter(
    adapter: AdapterConfig,
    folder: RunFolder,
    theirs: AdapterConfig | None = None,
    merge_key: str = "base.merge",
) -> None:
    """Refuse a run whose weights do not fit this one's adapter, which has what an `adapter.init`
    file decided. `theirs` is read where it is None; `merge_key` names what is merged into the
    transformer."""
    theirs = resolve(RunConfig, stored=folder.path).adapter if theirs is None else theirs
    of_layers = [
        (
            section.method,
            section.rank_pattern,
            section.alpha_pattern,
            section.decompose_factor,
            section.decompose_both,
        )
        for section in (adapter, theirs)
    ]
    differ = (adapter.rank, adapter.scaling) != (theirs.rank, theirs.scaling) or of_layers[
        0
    ] != of_layers[1]
    if adapter.method != "full" and not theirs.init and differ:
        name = next(finished_adapters(folder), ExportName(run=folder.name))
        raise UserError(
            f"{folder.path} trained an adapter of rank {theirs.rank} and scale {theirs.scaling:g}, "
            f"this one has {adapter.rank} and "
            f"{adapter.scaling:g}{', of another method or with other patterns' * (of_layers[0] != of_layers[1])}; set adapter.* as there, or build on it with "
            f'{merge_key} = ["{name.at(folder)}"]'
        )


# Nothing is encoded yet


def check_encoding(run: RunContext, ranks: Ranks, *, num_class_images: int) -> None:
    """Refuse what encoding, sampling and the generation of missing class images will need and is
    not there; all ranks call it."""
    data = run.data
    check_components(run, data.dataset.samples, sampling=num_class_images > 0)
    if num_class_images:
        check_class_prompt(data)
        check_shared(data.prior_folder, "prior.folder", ranks)
    check_shared(data.cache.folder, "encode.cache", ranks)


def check_components(run: RunContext, samples: Sequence[Sample], *, sampling: bool = False) -> None:
    """Find every model that the run will need and read its description, before the first of them
    works for hours. [sample] may take captions from the samples; `sampling` is for images that are
    generated even if it asks for none."""
    prior = run.config.prior
    sees = run.spec.data.picture_size is not None and any(x.references for x in samples)
    if sees and prior.match_base and prior.prompt:
        raise UserError(
            f"{argument('prior.prompt')} is one text for all samples, and this model's text encoder "
            f"sees the references of each; leave it empty: prior.match_base then takes the empty "
            f"caption with them"
        )
    # Asking for each is the check: making one finds its files and its libraries, and loads no
    # weights.
    assert run.auxiliary.encoders
    _check_adapter_files(run)  # the architecture may have been unknown before
    if run.arch is not None:
        # as plans count them: they know the transformer whose latents and features these make
        run.spec.auxiliary.models(run.arch, run.config.model)
    assert run.auxiliary.conditioning or not run.auxiliary.columns
    # Faults of single samples are left to encoding, which may skip those samples; what concerns all
    # of them is raised here.
    if run.auxiliary.conditioning is not None:
        run.auxiliary.conditioning.used(
            {sample.id: clip_inputs_of(sample, run.data.fps) for sample in samples}, keep_going=True
        )
    if sampling or run.config.sample.prompts or run.config.sample.captions:
        assert run.auxiliary.sampler
    check_prompts(run.data, sample_prompts(run.data, samples))


def check_prompts(data: RunData, prompts: Sequence[SamplePrompt]) -> None:
    """Read the conditions of the samples that will be generated."""
    for prompt in prompts:
        if data.auxiliary.readers is not None:
            data.auxiliary.readers.check(prompt.controls(data.fps))


def check_class_prompt(data: RunData) -> None:
    """Refuse to generate class images with a model that needs more than a text, before anything is
    loaded."""
    needed = ["it edits images"] * data.spec.data.needs_references
    needed += [f"has no {column.name}" for column in data.auxiliary.columns if column.required]
    try:
        for conditioner in (
            data.auxiliary.conditioning.conditioners if data.auxiliary.conditioning else ()
        ):
            conditioner.uses(data.class_inputs)
    except UserError as error:
        needed.append(str(error))
    if needed:
        raise UserError(
            "prior.prompt: class images are generated from text alone, which this model cannot do "
            f"({needed[0]}); put images of the class into prior.folder, with a metadata.jsonl that "
            "names their conditions if the model needs any, and leave prior.prompt empty"
        )


# All is encoded


def check_items(spec: ModelSpec, model: StagedModel, samples: Sequence[EncodedSample]) -> None:
    """Check one sample of each shape; otherwise one that the model cannot take would fail in the
    middle of an epoch."""
    # Reversed, so that the error names the first sample of a shape.
    for sample in {shapes_of(sample): sample for sample in reversed(samples)}.values():
        try:
            check_item(spec, model, sample.outline())
        except UserError as error:
            raise UserError(f"{sample.id}: {error}") from error


def check_item(spec: ModelSpec, model: StagedModel, item: Mapping[str, Tensor]) -> None:
    """Run the embedding on the shapes of a sample, on `meta`: the shapes of another model fail
    here, before weights are read."""
    try:
        with torch.no_grad():
            # Only shapes matter here, so any noise level works.
            sigma = torch.zeros(1, device="meta")
            model.embed(spec.training.make_inputs([item["latents"]], sigma, [item], 1.0))
    except RuntimeError as error:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in item.items())
        raise UserError(
            f"the encoded samples do not fit the transformer ({shapes}: "
            f"{str(error).splitlines()[0]}); "
            "set model.vae and model.text_encoder to those that belong to it"
        ) from error


def check_samples(folder: RunFolder, encoded: Sequence[EncodedSample]) -> None:
    """Refuse samples other than those that a run was trained on. For an expert that is complete,
    which `check_data` does not see again."""
    if before := read_record(folder):
        _refuse_data(folder, differing(keys_of(encoded), before) - NO_SAMPLES)


# The weights are loaded


def check_data(
    folder: RunFolder, encoded: Sequence[EncodedSample], base: str, steps: BaseSteps | None = None
) -> None:
    """Record the samples that a run trains on, class images included, and refuse to resume it with
    others, or with another base: data order and held-out clips depend on them."""
    now = keys_of(encoded)
    # The base is part of the record: a resumed adapter would otherwise continue on other weights.
    now[BASE_WEIGHTS] = [base, ""]
    ways = [way for sample in encoded for way in (sample, sample.mirrored) if way is not None]
    now[EMPTY_CAPTION] = sorted({f"text {way.empty_text_key}" for way in ways})
    if slider := sorted(
        {f"text {key}" for way in ways for key in way.more_text_keys.values()}
        - {*now[EMPTY_CAPTION]}
    ):
        now[SLIDER_CAPTIONS] = slider
    caption = (
        {BASE_CAPTION: [f"text {steps.text_key}"]} if steps is not None and steps.text_key else {}
    )
    before = read_record(folder)
    if before is None:
        write_record(folder, now | caption)
        return
    recorded = {BASE_CAPTION: before.pop(BASE_CAPTION)} if BASE_CAPTION in before else {}
    # Written by a version that did not record it, or with another caption.
    if EMPTY_CAPTION not in before or recorded != caption:
        before.setdefault(EMPTY_CAPTION, now[EMPTY_CAPTION])
        write_record(folder, before | caption)
    _refuse_data(folder, differing(now, before))


# Settings that have no effect

_WITHOUT_EFFECT: tuple[tuple[str, Callable[[RunConfig], object], str], ...] = (
    (
        "optim.final_lr_fraction",
        lambda run: run.optim.schedule == "constant",
        "optim.schedule = constant has no decay",
    ),
    (
        "optim.betas",
        lambda run: run.optim.name == "adafactor",
        "optim.name = adafactor uses values of its own",
    ),
    ("ema.update_every", lambda run: not run.ema.decay, "ema.decay = 0 averages nothing"),
    (
        "held_out.sigmas held_out.every_steps save.keep_best",
        lambda run: not run.held_out.clips,
        "held_out.clips = 0 measures no validation loss",
    ),
    (
        "flow.stratified",
        lambda run: (
            (run.train.accumulation, run.train.batch_size, run.train.batch_tokens) == (1, 1, 0)
        ),
        (
            "a step has one sample, and there is nothing to spread; set train.accumulation or "
            "train.batch_size above 1"
        ),
    ),
    (
        "data.bucket_step data.max_aspect",
        lambda run: not run.data.buckets,
        "data.buckets = false makes no buckets",
    ),
    (
        "data.seed",
        lambda run: run.data.windows != "random" and not run.data.shuffle_tags,
        "neither windows nor tags are random",
    ),
    (
        (
            "adapter.rank adapter.alpha adapter.dropout adapter.targets adapter.use_rslora "
            "adapter.use_dora"
        ),
        lambda run: run.adapter.method == "full",
        "adapter.method = full trains the weights themselves",
    ),
    (
        "adapter.rank adapter.alpha",
        lambda run: run.adapter.init,
        "the file of adapter.init has them",
    ),
    ("train.clip_by", lambda run: not run.train.clip_norm, "train.clip_norm = 0 clips nothing"),
    (
        "sample.device",
        lambda run: not run.sample.every_steps,
        "sample.every_steps = 0 generates no previews",
    ),
    ("log.project", lambda run: run.log.tracker == "none", "log.tracker = none logs to no project"),
)
"""Keys, when they have no effect, and why."""


def without_effect(
    config: RunConfig, devices: Sequence[torch.device], *, trains_bf16: bool
) -> Iterator[str]:
    """A line for each setting, as the user wrote it, that has no effect on the devices that
    train."""
    defaults, values = config_values(RunConfig()), config_values(config)
    for keys, holds, why in _WITHOUT_EFFECT:
        for key in keys.split() if holds(config) else ():
            if values[key] != defaults[key]:
                yield f"{key} = {values[key]} has no effect: {why}"
    if 0 < config.train.steps <= config.optim.warmup_steps:
        yield (
            f"optim.warmup_steps = {config.optim.warmup_steps} is the whole run of "
            f"{config.train.steps} steps: the learning rate never reaches optim.lr"
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
