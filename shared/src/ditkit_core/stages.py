"""What the commands do, stage by stage: encode → train → export → verify → sample.

Each stage does what is missing and no more, so that the same command starts a run, continues it, and says that it is done.
"""

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from ditkit_core.adapters import trainable_parameters
from ditkit_core.cache import key
from ditkit_core.checkpoint import latest, load_state
from ditkit_core.config import RunConfig
from ditkit_core.config_layers import resolve
from ditkit_core.console import progress, say, warn
from ditkit_core.data import Batch, BatchSize, TrainingData, split_held_out
from ditkit_core.ema import copy_values
from ditkit_core.encoded import EncodedSample
from ditkit_core.errors import Stopped, UserError
from ditkit_core.export import check_export, export_adapter, export_merged
from ditkit_core.files import write_text
from ditkit_core.model import ModelSpec
from ditkit_core.options import EncodeOptions, ExportOptions, SampleOptions, TrainOptions
from ditkit_core.plan_stage import divided_for_training
from ditkit_core.prepare import Prepared, check_item
from ditkit_core.prior import WithPrior
from ditkit_core.prior_stage import draw_class_pictures, num_to_draw
from ditkit_core.run import Run
from ditkit_core.run_folder import RunFolder, open_run
from ditkit_core.train import train as train_loop
from ditkit_core.trained import Trained


def train(spec: ModelSpec, config: RunConfig, options: TrainOptions) -> None:
    """Do everything that is missing between clips and a verified adapter.

    Raises:
        UserError: For whatever the person can mend, before anything slow where that is possible.
        Stopped: If a signal ended it early.
    """
    run = Run(spec, config)
    run.check()
    run.check_training()
    with open_run(Path(config.run.folder), config) as (folder, stated):
        done = folder.completed_step()
        if done is not None and done >= config.train.steps:
            say(f"{folder.path} is complete at step {done}; nothing is left to do")
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
            spec.write_demo(folder.inputs)
        assert run.dataset.samples  # a caption that is missing is said before a model of many gigabytes is fetched
        num_class_pictures = num_to_draw(run, started=any(folder.state.glob("step-*")))
        unloaded = run.build()
        # before hours of encoding: what is wrong with it is said now
        divided = divided_for_training(run, unloaded.model, unloaded.arch, unloaded.adapter)
        if advice := spec.training_advice(unloaded.arch):
            warn(advice)
        if config.flow.guidance != 1 and spec.sample_defaults(unloaded.arch).guided_by != "embedding":
            warn(f"flow.guidance = {config.flow.guidance:g} is not used: this model is told no strength of guidance")
        run.check_parts(drawing=num_class_pictures > 0)
        encoded, prior = run.encode(config.prior.prompt if num_class_pictures else "")
        check_item(spec, unloaded.model, encoded[0].outline())
        prepared = run.load(unloaded, divided.placement)
        if num_class_pictures:
            draw_class_pictures(run, prepared, num_class_pictures)
            prior = run.encode_prior()
        start_from(options.init_from, prepared, folder)
        kept, held_out = split_held_out([sample.id for sample in encoded], config.held_out.clips)
        by_id = {sample.id: sample for sample in encoded}
        _check_data(folder, [*encoded, *prior], prepared)
        exporter = Exporter(run, folder, prepared, [*encoded, *prior])
        with progress("train", config.train.steps) as bar:
            result = train_loop(
                prepared.model,
                run.engine(prepared, divided.schedule),
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
                on_save=exporter.after_save,
                on_finish=exporter.finish,
                on_preview=exporter.draw,
                preview_steps=config.sample.every_steps,
                swap=prepared.passage,
                matmul=run.precision.matmul,
                progress=bar,
                warn=warn,
            )
        if not result.finished:
            raise Stopped(f"stopped at step {result.step}, saved in {result.save}; the same command continues")
        folder.mark_complete(result.step)
        if result.held_out is not None and result.held_out_before:
            fall = 1 - result.held_out / result.held_out_before
            say(f"held-out loss {result.held_out_before:.4f} before, {result.held_out:.4f} after: {fall:.1%} lower")
        _say_results(run, folder)


def training_data(
    run: Run, samples: Sequence[EncodedSample], prior: Sequence[EncodedSample]
) -> TrainingData | WithPrior:
    """What a run trains on, in its order."""
    config = run.config.train
    size = BatchSize(samples=config.batch_size, tokens=config.batch_tokens, num_tokens=run.spec.num_tokens)
    data = TrainingData(samples, seed=config.seed, batch_size=size, caption_dropout=config.caption_dropout)
    if data.num_shapes > 1:
        say(f"{len(samples)} samples have {data.num_shapes} shapes: {data.mean_size:.1f} in a micro-batch on average")
    if not prior:
        return data
    return WithPrior(
        data, prior, seed=config.seed, batch_size=size, weight=run.config.prior.weight,
        caption_dropout=config.caption_dropout,
    )  # fmt: skip


def encode(spec: ModelSpec, config: RunConfig, options: EncodeOptions) -> None:
    """Fill the cache, and nothing else."""
    run = Run(spec, config)
    run.check()
    if options.demo:
        spec.write_demo(RunFolder(Path(config.run.folder)).inputs)
    encoded, prior = run.encode()
    say(f"{len(encoded) + len(prior)} samples are encoded in {run.cache.folder}")


def sample(spec: ModelSpec, config: RunConfig, options: SampleOptions) -> None:
    """Draw samples with a run's trained weights, or with an adapter file."""
    given = {"prompts": options.prompt, "references": options.reference}
    changed: dict[str, Any] = {name: value for name, value in given.items() if value}
    changed |= {name: value for name in ("images", "seed") if (value := getattr(options, name)) is not None}
    config = replace(config, sample=replace(config.sample, **changed))
    if options.adapter:
        config = replace(config, adapter=replace(config.adapter, init=options.adapter))
    run, folder = Run(spec, config), RunFolder(Path(config.run.folder))
    run.check()
    scenes = run.scenes([] if config.sample.prompts else run.dataset.samples)
    if not scenes:
        raise UserError("there is nothing to draw: give a --prompt, or set sample.prompts or sample.captions")
    run.encode_scenes(scenes)  # before the transformer is there: a card need not hold both
    unloaded = run.build()
    prepared = run.load(unloaded)
    stem = Path(options.adapter).stem if options.adapter else f"step-{take_trained(prepared, folder):06d}"
    files = run.draw(prepared, scenes, Path(options.out) if options.out else folder.samples, stem)
    say("\n".join(str(file) for file in files))


def export(spec: ModelSpec, config: RunConfig, options: ExportOptions) -> None:
    """Write a run's trained weights for other programs."""
    wanted = replace(
        config.export,
        forms=(options.to,) if options.to else config.export.forms,
        dtype=options.dtype or config.export.dtype,
        merged=options.merge,
    )
    check_export(spec, wanted, config.adapter)
    _check_out(options.out, whole=wanted.merged or config.adapter.method == "full")
    run, folder = Run(spec, config), RunFolder(Path(config.run.folder))
    run.check()
    unloaded = run.build()
    prepared = run.load(unloaded)
    step = take_trained(prepared, folder, options.step)
    out = Path(options.out or folder.exports / f"adapter-export-step-{step:06d}.safetensors")
    metadata = run.metadata(prepared, step, data="")
    if wanted.merged or config.adapter.method == "full":
        target = out.with_suffix("") if out.suffix == ".safetensors" else out
        with prepared.readable():
            files = export_merged(
                prepared.model, spec, target, wanted, metadata=metadata, original=prepared.original,
                config_json=prepared.config_json,
            )  # fmt: skip
    else:
        stem, exact = out.stem, bool(options.out) and len(wanted.forms) == 1
        files = export_adapter(prepared.model, spec, out.parent, stem, wanted, metadata=metadata, exact=exact)
    say("\n".join(str(file) for file in files))


def _check_out(out: str, *, whole: bool) -> None:
    """Refuse an --out that is not what will be written: a folder for a whole transformer, a file for an adapter."""
    if whole and Path(out).is_file():
        raise UserError(f"--out {out} is a file, and a whole transformer is written into a folder; name one")
    if out and not whole and (Path(out).is_dir() or Path(out).suffix != ".safetensors"):
        raise UserError(f"--out {out} is no name of a file; give one that ends with .safetensors")


class Exporter:
    """Writes the trained weights beside each save, and everything that a finished run hands over."""

    def __init__(self, run: Run, folder: RunFolder, prepared: Prepared, encoded: Sequence[EncodedSample]):
        self._run, self._folder, self._prepared = run, folder, prepared
        self._data = key(*(part for sample in encoded for part in (sample.id, *sample.keys)))

    def after_save(self, step: int) -> None:
        """Export the weights of a save, and remove the exports of saves that are gone."""
        name = f"step-{step:06d}"
        if self._run.config.adapter.method == "lora":
            self._export_adapter(f"adapter-{name}", step)
        if self._writes_transformer and step < self._run.config.train.steps:  # the last one is written by `finish`
            self._export_transformer(self._folder.exports / name, step)
        saved = {path.name for path in self._folder.state.glob("step-*")}
        for old in self._folder.exports.glob("*step-*"):
            if old.name.startswith("adapter-step-") and not any(old.stem.startswith(f"adapter-{n}") for n in saved):
                old.unlink()
            elif old.name.startswith("step-") and old.name not in saved:
                shutil.rmtree(old)

    def finish(self, step: int) -> None:
        """Export under the final names, verify the adapter where it will be used, draw samples."""
        run, config = self._run, self._run.config
        model, verify, passage = self._prepared.model, run.spec.verify_export, self._prepared.passage
        files = self._export_adapter("adapter", step) if config.adapter.method == "lora" else []
        model.eval()  # dropout is no part of what was exported
        if verify is not None and len(run.devices) > 1:
            say("not verified: diffusers runs a model on one device, and this one is divided over several")
        elif verify is not None and passage is not None and run.device.type != "cpu":
            say(
                "not verified: diffusers runs a whole model on its device, and weights of this one are streamed through it"
            )
        elif verify is not None:
            with nullcontext() if passage is None else passage.whole():
                for file in files:
                    say(f"verified: {verify(file, config.model, model, run.engine(self._prepared))}")
        if self._writes_transformer:
            self._export_transformer(self._folder.exports, step)
        self.draw(step)

    def draw(self, step: int) -> None:
        """Draw the configured samples with the weights as they are."""
        run = self._run
        run.draw(self._prepared, run.scenes(run.dataset.samples), self._folder.samples, f"step-{step:06d}")

    @property
    def _writes_transformer(self) -> bool:
        return self._run.config.export.merged or self._run.config.adapter.method == "full"

    def _export_adapter(self, stem: str, step: int) -> list[Path]:
        run, metadata = self._run, self._run.metadata(self._prepared, step, data=self._data)
        model, folder = self._prepared.model, self._folder.exports
        return export_adapter(model, run.spec, folder, stem, run.config.export, metadata=metadata)

    def _export_transformer(self, folder: Path, step: int) -> None:
        run, metadata = self._run, self._run.metadata(self._prepared, step, data=self._data)
        prepared = self._prepared
        with prepared.readable():
            export_merged(
                prepared.model, run.spec, folder, run.config.export, metadata=metadata, original=prepared.original,
                config_json=prepared.config_json,
            )  # fmt: skip


def _check_data(folder: RunFolder, encoded: Sequence[EncodedSample], prepared: Prepared) -> None:
    """Store what the run trains on, and hold a run that is continued to it: order and held-out clips depend on the samples.

    Raises:
        UserError: Naming a sample that came, went or changed, or the base.
    """
    now = {sample.id: sample.keys for sample in encoded}
    now["(base weights)"] = [prepared.source.fingerprint(), ""]
    if folder.data_file.exists() and any(folder.state.glob("step-*")):
        before = json.loads(folder.data_file.read_text(encoding="utf-8"))
        changed = sorted(id for id in now.keys() | before.keys() if now.get(id) != before.get(id))
        if changed:
            raise UserError(
                f"{folder.path} was trained on something else ({len(changed)} changed, first {changed[0]!r}: clip, caption, "
                f"encoder or weights); put it back, or start a new run from its weights with --run.folder NEW --init-from {folder.path}"
            )
    else:
        write_text(folder.data_file, json.dumps(now, indent=0, sort_keys=True))


def start_from(run: str, prepared: Prepared, folder: RunFolder) -> None:
    """Take the trained weights of another run as the first ones, unless this run has a state of its own already."""
    if run and Path(run).resolve() == folder.path.resolve():
        raise UserError(f"--init-from {run} is this run itself; set run.folder to a new folder")
    if run and latest(folder.state, warn) is None:
        step = take_trained(prepared, RunFolder(Path(run)))
        say(f"starting from the weights of {run} at step {step}")


def take_trained(prepared: Prepared, folder: RunFolder, step: int | None = None) -> int:
    """Put the weights of a run's save (averaged ones, if it averaged) into the model.

    Returns:
        The save's step.

    Raises:
        UserError: If there is no such save, or it is of another model or adapter.
    """
    path = latest(folder.state, warn) if step is None else folder.state / f"step-{step:06d}"
    if path is None or not path.is_dir():
        saves = ", ".join(sorted(each.name for each in folder.state.glob("step-*"))) or "none"
        remedy = "name a run that was trained" if step is None or saves == "none" else "choose another --step"
        raise UserError(f"{folder.path} has no such save (it has {saves}); {remedy}")
    # Its own settings: they decide which weights of a save are used, and what an adapter's values mean.
    stored = resolve(RunConfig, stored=folder.path)
    own, theirs = prepared.adapter, stored.adapter
    if own.method == "lora" and not theirs.init and (own.rank, own.scaling) != (theirs.rank, theirs.scaling):
        raise UserError(
            f"{folder.path} trained an adapter of rank {theirs.rank} and scale {theirs.scaling:g}, this one has {own.rank} and "
            f'{own.scaling:g}; set adapter.* as there, or build on it with base.merge = ["{folder.exports / "adapter.safetensors"}"]'
        )
    state = load_state(path)
    # Of streamed weights those on the host, so that whatever optimizer that run had, none of its state is streamed. It updates nothing.
    with prepared.readable():
        parameters, optim = trainable_parameters(prepared.model), replace(stored.optim, fused_backward=False)
        trained = Trained(prepared.model, parameters, optim, stored.ema)
        trained.restore(state, path)
        with trained.used():
            used = {name: value.detach().clone() for name, value in parameters.items()}
        copy_values(parameters, used)
    if prepared.passage is not None:
        prepared.passage.host_changed()
    return state.step


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
    say(f"metrics:  {folder.metrics} (curves: tensorboard --logdir {folder.tensorboard})")
    say(f'next:     {command}-sample --run {folder.path} --prompt "..." draws another sample')
    say(f"          {command}-train --run {folder.path} --train.steps {2 * steps} continues the run")
