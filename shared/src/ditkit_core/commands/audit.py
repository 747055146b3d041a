"""`train --audit-precision`: measure which operation's precision matters in this run."""

import sys
from contextlib import nullcontext, redirect_stdout

from ditkit_core.commands.options import TrainOptions
from ditkit_core.diagnostics.audit.audit import (
    Subject,
    audit,
    estimated_seconds,
    num_passes,
    with_adapters_at_work,
)
from ditkit_core.diagnostics.audit.findings import AuditFindings
from ditkit_core.diagnostics.audit.pictures import (
    Picture,
    choices_of,
    pictures,
    write_pictures,
)
from ditkit_core.diagnostics.audit.render import audit_document
from ditkit_core.encoding.loader import files_of, split_held_out
from ditkit_core.errors import UserError
from ditkit_core.io.console import progress, say, warn
from ditkit_core.io.memory import is_out_of_memory
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.loading.model import Model
from ditkit_core.loading.weights import engine_for
from ditkit_core.models.encoders import DecodedBy
from ditkit_core.models.spec import ModelSpec
from ditkit_core.previews.decoding import FittingDecoder
from ditkit_core.previews.generate import guided_by
from ditkit_core.run.checks import check_components, check_items, check_run, check_training
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.data import RunData
from ditkit_core.run.encoding import encode_all, prompt_encoder, sample_prompts
from ditkit_core.run.jobs import jobs_of
from ditkit_core.run.model import build_model, load_model
from ditkit_core.run.plans.planned_step import place_run
from ditkit_core.run.restore import load_trained, start_from
from ditkit_core.run.training import training_data
from ditkit_core.sampling.denoise import single_stage
from ditkit_core.sampling.prompts import SamplePrompt
from ditkit_core.training.checkpoint import latest

SAMPLES = 2
"""Number of samples of the run's first micro-batch that are audited, each at a noise level in every
range."""

_LONG_SECONDS = 300
"""An audit that may take longer prints an estimate first."""


def audit_precision(spec: ModelSpec, config: RunConfig, options: TrainOptions) -> None:
    """Audit a run and write the findings into its folder."""
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        run = jobs_of(create_run(spec, config)).largest
        if run.expert is not None:
            say(f"auditing the {run.expert.name} expert")
        expert_folder = run.config.run_folder  # the expert's own folder, which has its saves
        findings, results = _find(spec, run.request.config, expert_folder, options)
        folder = config.run_folder.audit
        shown = write_pictures(results, folder / "pictures") if results else []
        pictures_of = dict(zip(shown[1:], results, strict=True))  # the first has all of them
        document = audit_document(findings, folder, pictures_of)
        files = document.write(folder / "precision.json")
        document.show()
        for file in (*files, *shown):
            say(f"written:  {file}")
    if options.json:
        say(document.json())


def _find(
    spec: ModelSpec, config: RunConfig, folder: RunFolder, options: TrainOptions
) -> tuple[AuditFindings, list[Picture]]:
    run = create_run(spec, config)
    check_run(run)
    check_training(run)
    if options.demo:
        spec.demo.write(folder.inputs)
        # again: the demo's checkpoint, which has the architecture, did not exist before
        run = create_run(spec, config)
    # reads the dataset: mistakes in it are reported before weights are downloaded
    assert run.data.dataset.samples
    unloaded = build_model(run)
    run = run.with_arch(unloaded.origin.arch)
    placement = place_run(run, unloaded, training=True)
    check_components(run, run.data.dataset.samples)
    prompts = sample_prompts(run.data, run.data.dataset.samples)[:1] if options.pictures else []
    if options.pictures and (run.expert is not None or not prompts):
        raise UserError(
            "--pictures needs a model of one transformer, and this one samples with two; leave it out"
            if prompts
            else "--pictures has nothing to sample; set sample.prompts or sample.captions"
        )
    encoded, _ = encode_all(run.data)
    check_items(run.spec, unloaded.module, encoded)
    prepared = load_model(unloaded, placement, run.config.train.seed)
    weights = _weights(prepared, folder, options.init_from)
    kept, _ = split_held_out(
        [sample.id for sample in encoded],
        run.config.held_out.clips,
        files_of(run.data.dataset.samples),
    )
    by_id = {sample.id: sample for sample in encoded}
    batch = training_data(run.data, [by_id[id] for id in kept], []).micro_batches(0)[0]
    subject = Subject(
        model=prepared.module,
        spec=run.spec,
        precision=run.precision,
        run=engine_for(prepared, run.execution, placement.checkpointing),
        ids=batch.ids[:SAMPLES],
        items=batch.items[:SAMPLES],
        guidance=run.config.flow.guidance,
        seed=run.config.train.seed,
    )
    try:
        findings = _audit(subject, weights, prepared, run.config.train.seed)
        return findings, [] if not prompts else _sampled(run.data, subject, prompts[0])
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            "memory ran out in the audit, because it computes in fp64; for the audit alone, use "
            "smaller samples (--data.frames, --data.height, --data.width, --train.batch_size 1), "
            "or stream more blocks with --train.swap_blocks"
        ) from error


def _sampled(data: RunData, subject: Subject, prompt: SamplePrompt) -> list[Picture]:
    """One sample in the dtypes that are compared."""
    stages = single_stage(subject.model, subject.run)
    config, negative = guided_by(data, stages)
    job = prompt_encoder(data).requests(prompt, config, negative)[0]
    decoder = FittingDecoder(data.auxiliary, [(prompt.frames, prompt.height, prompt.width)])
    sampler = DecodedBy(data.auxiliary.sampler.denoise, decoder)
    with progress("pictures", config.steps * len(choices_of(subject))) as bar:
        return list(pictures(subject, sampler, job, bar.advance))


def _weights(prepared: Model, folder: RunFolder, init_from: str) -> str:
    """Load the weights of the run's latest save, if there is one, else the initial ones; returns a
    description of them."""
    if latest(folder.state, warn) is not None:
        return f"the run's save of step {load_trained(prepared, folder)}"
    start_from(init_from, prepared, folder)
    return "the run's initial weights: nothing was saved yet"


def _audit(subject: Subject, weights: str, prepared: Model, seed: int) -> AuditFindings:
    with with_adapters_at_work(prepared.module, seed) as changed:
        if changed:
            weights += "; B of the adapters is zero and gets small random values, so that gradients reach A"
        tokens = sum(map(subject.spec.training.num_tokens, subject.items))
        notes = (
            f"weights: {weights}",
            (
                f"samples: {', '.join(subject.ids)}: {tokens} tokens, each sample at a noise level in "
                f"every range of σ"
            ),
        )
        seconds = estimated_seconds(subject)
        if seconds > _LONG_SECONDS:
            say(
                f"estimated time: at most {seconds / 3600:.1f} h for {num_passes(subject)} "
                f"forwards and backwards of {tokens} tokens, most of them at this device's fp64 "
                "speed; smaller samples (--data.frames, --data.height, --data.width) take less"
            )
        with progress("audit", num_passes(subject)) as bar:
            return audit(subject, advance=bar.advance, notes=notes)
