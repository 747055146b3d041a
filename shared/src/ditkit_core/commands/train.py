"""What the commands do, stage by stage: encode → train → export → verify → sample.

Each stage does what is missing and no more, so that the same command starts a run, continues it, and says that it is done.
"""

import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from ditkit_core.commands.cache import check_dump, dump_samples, prune_cache, verify_cache
from ditkit_core.commands.export import Exporter
from ditkit_core.commands.options import EncodeOptions, TrainOptions
from ditkit_core.commands.report import held_out_lines
from ditkit_core.diagnostics.doctor.dataset import say_in_brief
from ditkit_core.diagnostics.report.environment import data_summary, environment, write_about
from ditkit_core.diagnostics.report.page import write_report
from ditkit_core.encoding.cache_maintenance import parse_rule
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.loader import Batch, BatchSize, TrainingData, files_of, split_held_out
from ditkit_core.encoding.prior_preservation import WithPrior
from ditkit_core.errors import Stopped, UserError
from ditkit_core.io.console import progress, say, warn
from ditkit_core.io.files import write_text
from ditkit_core.io.memory import release_memory
from ditkit_core.io.run_dir import RunFolder, open_run
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.partition import place
from ditkit_core.previews.class_images import check_drawable, class_conditions, draw_class_pictures, num_to_draw
from ditkit_core.previews.manager import Previews, draw_left, previews_of
from ditkit_core.previews.stages import draw_trained, turns_of
from ditkit_core.run.checks import check, check_parts, check_training, say_where_previews_could_be
from ditkit_core.run.config import RunConfig
from ditkit_core.run.encoding import encode_all, encode_prior
from ditkit_core.run.expert_runs import is_joint, known
from ditkit_core.run.model import build_model, engine_of, load_model
from ditkit_core.run.prepare import Prepared, check_items
from ditkit_core.run.restore import take_trained
from ditkit_core.run.run import Run, create_run, with_arch
from ditkit_core.sampling.denoise import only
from ditkit_core.training.checkpoint import latest
from ditkit_core.training.trainer import TrainConfig, TrainResult
from ditkit_core.training.trainer import train as train_loop


def train(run: Run, options: TrainOptions, *, in_turn: bool = False, shared_previews: Previews | None = None) -> None:
    """Do everything that is missing between clips and a verified adapter of one transformer.

    Args:
        run: The run.
        options: The command's.
        in_turn: Whether it is one of several that a run trains one after the other, which says itself what comes next.
        shared_previews: What takes the previews of all of these, if they are drawn on a device of their own.

    Raises:
        UserError: For whatever the person can mend, before anything slow where that is possible.
        Stopped: If a signal ended it early.
    """
    spec, config = run.spec, run.given.config
    check(run)
    check_training(run)
    with open_run(Path(config.run.folder), config) as (folder, stated):
        done = folder.completed_step()
        if done is not None and done >= config.train.steps:
            say(f"{folder.path} is complete at step {done}; nothing is left to do")
            if not in_turn:
                draw_left(run, folder, write_report)
                _say_results(run, folder)
            return
        for change in stated:
            say(f"changed since the last part of this run: {change}")
        folder.store(config)
        optim = config.optim
        places = run.precision.described(optimizer=optim.name, fused_backward=optim.fused_backward)
        say(f"precision {config.precision.preset}: {places}")
        if options.demo:
            say(f"writing the demo's checkpoint and media into {folder.inputs}")
            spec.demo.write(folder.inputs)
            run = create_run(spec, config)  # of an architecture that was not there before
        say_where_previews_could_be(run)
        with nullcontext(shared_previews) if in_turn else previews_of(run, folder, write_report) as previews:
            result = _train(run, folder, options, previews)
            if not result.finished:
                raise Stopped(f"stopped at step {result.step}, saved in {result.save}; the same command continues")
            if run.expert is not None:  # its model is let go of: drawing takes the others too, one at a time
                release_memory()
                draw_trained(run, folder, result.step)
            folder.mark_complete(result.step)
            write_report(folder.path)  # once more, now that it is complete
            for line in held_out_lines(result, folder):
                say(line)
            if previews is not None and not in_turn:
                previews.wait()  # last: what a signal leaves of these the same command draws, and does nothing else again
        if not in_turn:
            _say_results(run, folder)


def _train(run: Run, folder: RunFolder, options: TrainOptions, previews: Previews | None) -> TrainResult:
    """Encode, train, export and verify; of a model with one transformer draw too."""
    assert run.data.dataset.samples  # a caption that is missing is said before a model of many gigabytes is fetched
    is_started = any(folder.state.glob("step-*"))
    if not is_started:
        check_start(options.init_from, folder)
    num_class_pictures = num_to_draw(run, started=is_started)
    unloaded = build_model(run)
    run = with_arch(run, unloaded.arch)
    if is_joint(run):
        raise UserError("this model has several experts, as only its weights tell; name it with model.preset")
    # before hours of encoding: what is wrong with it is said now
    placement = place(run, unloaded, training=True)
    spec, config = run.spec, run.config
    if advice := spec.training.advice(unloaded.arch):
        warn(advice)
    if config.flow.guidance != 1 and spec.auxiliary.sample_defaults(unloaded.arch).guided_by != "embedding":
        warn(f"flow.guidance = {config.flow.guidance:g} is not used: this model is told no strength of guidance")
    check_parts(run, run.data.dataset.samples, drawing=num_class_pictures > 0)
    if num_class_pictures:
        check_drawable(run)
    encoded, prior = encode_all(run, config.prior.prompt if num_class_pictures else "")
    check_items(spec, unloaded.model, [*encoded, *prior])
    say_in_brief(run, encoded)
    told = class_conditions(run) if num_class_pictures else {}
    if num_class_pictures and run.expert is not None:
        draw_class_pictures(
            run, turns_of(run, {}), num_class_pictures, told
        )  # which loads the experts one after the other
        prior = encode_prior(run)
    if run.auxiliary.conditioning and any(
        conditioner.optional for conditioner in run.auxiliary.conditioning.conditioners
    ):
        kinds = ", ".join(each.kind for each in run.auxiliary.conditioning.conditioners if each.optional)
        share = config.train.control_dropout
        say(f"train.control_dropout = {share:g}: {share:.0%} of the samples are trained without {kinds}")
    prepared = load_model(run, unloaded, placement)
    if num_class_pictures and run.expert is None:
        draw_class_pictures(run, only(prepared.model, engine_of(run, prepared)), num_class_pictures, told)
        prior = encode_prior(run)
    start_from(options.init_from, prepared, folder)
    if not config.train.steps:
        warn("train.steps = 0: nothing is trained; what is exported and drawn is the model as it starts")
    files = files_of(run.data.dataset.samples)
    kept, held_out = split_held_out([sample.id for sample in encoded], config.held_out.clips, files)
    by_id = {sample.id: sample for sample in encoded}
    _check_data(folder, [*encoded, *prior], prepared)
    summary = data_summary(run.data.dataset, by_id.keys(), held_out)
    write_about(folder, environment=environment(run.devices), data=summary)
    exporter = Exporter(run, folder, prepared, [*encoded, *prior])

    take = None if previews is None else previews.taker(run.expert)

    def preview(step: int) -> None:
        if take is None:
            exporter.draw(step)
        else:
            exporter.put_aside(step, take)

    with progress("train", config.train.steps) as bar:
        return train_loop(
            prepared.model,
            engine_of(run, prepared, placement.checkpointing),
            spec,
            training_data(run, [by_id[id] for id in kept], prior),
            prepared.trainable,
            config=config.train,
            flow=config.flow,
            optim=config.optim,
            ema=config.ema,
            save=config.save,
            held_out=config.held_out,
            log=config.log,
            folder=folder.path,
            held_out_clips=Batch(ids=held_out, items=[by_id[id].load() for id in held_out]) if held_out else None,
            held_out_files=[files.get(id, id) for id in held_out],
            on_save=exporter.after_save,
            on_finish=exporter.finish,
            on_preview=preview,
            preview_steps=config.sample.every_steps if previews is None else previews.every_steps,
            previews_wait=previews is not None,
            swap=prepared.passage,
            matmul=run.precision.matmul,
            progress=bar,
            warn=warn,
        )


def training_data(
    run: Run, samples: Sequence[EncodedSample], prior: Sequence[EncodedSample]
) -> TrainingData | WithPrior:
    """What a run trains on, in its order."""
    config = run.config.train
    size = BatchSize(samples=config.batch_size, tokens=config.batch_tokens, num_tokens=run.spec.training.num_tokens)
    data = TrainingData(
        samples, seed=config.seed, batch_size=size, caption_dropout=config.caption_dropout,
        control_dropout=config.control_dropout,
    )  # fmt: skip
    if data.num_shapes > 1:
        say(f"{len(samples)} samples have {data.num_shapes} shapes: {data.mean_size:.1f} in a micro-batch on average")
    if not prior:
        return data
    return WithPrior(
        data, prior, seed=config.seed, batch_size=size, weight=run.config.prior.weight,
        caption_dropout=config.caption_dropout, control_dropout=config.control_dropout,
    )  # fmt: skip


def encode(spec: ModelSpec, config: RunConfig, options: EncodeOptions) -> None:
    """Fill the cache, and nothing else."""
    run = create_run(spec, config)
    check(run)
    if options.demo:
        spec.demo.write(RunFolder(Path(config.run.folder)).inputs)
        run = create_run(spec, config)
    run = known(run)
    rule = parse_rule(options.prune_cache) if options.prune_cache else None
    if options.dump:
        check_dump(config.data, Path(options.dump))
    if options.verify_cache:
        verify_cache(run)
    encoded, prior = encode_all(run)
    say(f"{len(encoded) + len(prior)} samples are encoded in {run.data.cache.folder}")
    if options.dump:
        dump_samples(run, Path(options.dump), encoded)
    if rule is not None:
        prune_cache(run, rule, [*encoded, *prior])


EMPTY_CAPTION = "(empty caption)"
"""What a run's data file has the empty caption under, which caption dropout gives: where the cache keeps it."""


def _check_data(folder: RunFolder, encoded: Sequence[EncodedSample], prepared: Prepared) -> None:
    """Store what the run trains on, and hold a run that is continued to it: order and held-out clips depend on the samples.

    Raises:
        UserError: Naming a sample that came, went or changed, or the base.
    """
    now = {sample.id: sample.keys for sample in encoded}
    now["(base weights)"] = [prepared.source.fingerprint(), ""]
    now[EMPTY_CAPTION] = sorted({f"text {sample.empty_text_key}" for sample in encoded})
    if folder.data_file.exists() and any(folder.state.glob("step-*")):
        before = json.loads(folder.data_file.read_text(encoding="utf-8"))
        if EMPTY_CAPTION not in before:  # of an earlier version
            before[EMPTY_CAPTION] = now[EMPTY_CAPTION]
            write_text(folder.data_file, json.dumps(before, indent=0, sort_keys=True))
        changed = sorted(id for id in now.keys() | before.keys() if now.get(id) != before.get(id))
        if changed:
            raise UserError(
                f"{folder.path} was trained on something else ({len(changed)} changed, first {changed[0]!r}: clip, caption, "
                f"encoder or weights); put it back, or start a new run from its weights with --run.folder NEW --init-from {folder.path}"
            )
    else:
        write_text(folder.data_file, json.dumps(now, indent=0, sort_keys=True))


def check_start(run: str, folder: RunFolder) -> None:
    """Refuse another run of which a new one cannot take the trained weights.

    Raises:
        UserError: If it is the same run, has no save, or is of several experts.
    """
    if run and Path(run).resolve() == folder.path.resolve():
        raise UserError(f"--init-from {run} is this run itself; set run.folder to a new folder")
    if not run or any(RunFolder(Path(run)).state.glob("step-*")):
        return
    inside = sorted(path.parent for path in Path(run).glob("*/state") if any(path.glob("step-*")))
    if inside and RunFolder(Path(run)).config_file.exists():
        raise UserError(
            f"--init-from {run} is a run of several experts, and one is trained here; name it: --init-from {' or '.join(map(str, inside))}"
        )
    if inside:
        more = f" and {len(inside) - 3} more" if len(inside) > 3 else ""
        raise UserError(
            f"--init-from {run} has no save; runs inside it: {', '.join(map(str, inside[:3]))}{more}; name one"
        )
    raise UserError(f"--init-from {run} has no save; name the folder of a run that was trained")


def start_from(run: str, prepared: Prepared, folder: RunFolder) -> None:
    """Take the trained weights of another run as the first ones, unless this run has a state of its own already."""
    if run and latest(folder.state, warn) is None:
        check_start(run, folder)
        step = take_trained(prepared, RunFolder(Path(run)))
        say(f"starting from the weights of {run} at step {step}")


def _say_results(run: Run, folder: RunFolder) -> None:
    """The last lines: where everything is, and what to type next."""
    # Under `uv run` the commands are not on the path by themselves.
    command = f"uv run {run.spec.name}" if "UV_RUN_RECURSION_DEPTH" in os.environ else run.spec.name
    steps = max(run.config.train.steps, folder.completed_step() or 0)
    exports = sorted(folder.exports.glob("adapter.safetensors")) + sorted(folder.exports.glob("transformer_*"))
    for file in exports:
        say(f"{'adapter' if file.is_file() else 'model'}:  {file}")
    if folder.samples.exists():
        say(f"samples:  {folder.samples}")
    if folder.report.exists():
        say(f"report:   {folder.report}")
    say(f"metrics:  {folder.metrics} (curves: tensorboard --logdir {folder.tensorboard})")
    say(f'next:     {command}-sample --run {folder.path} --prompt "..." draws another sample')
    further = 2 * steps or TrainConfig().steps
    say(
        f"          {command}-train --run {folder.path} --train.steps {further} {'continues' if steps else 'trains'} the run"
    )
