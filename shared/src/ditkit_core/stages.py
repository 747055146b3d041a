"""What the commands do, stage by stage: encode → train → export → verify → sample.

Each stage does what is missing and no more, so that the same command starts a run, continues it, and says that it is done.
"""

import json
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ditkit_core
from ditkit_core.activation_checkpoint import Engine
from ditkit_core.attention import check_backend
from ditkit_core.cache import Cache, key
from ditkit_core.checkpoint import latest, load_state
from ditkit_core.config import RunConfig
from ditkit_core.config_file import to_toml
from ditkit_core.config_layers import resolve
from ditkit_core.console import progress, say, warn
from ditkit_core.data import Batch, TrainingData, split_held_out
from ditkit_core.dataset import Dataset, Sample, scan
from ditkit_core.ema import copy_values
from ditkit_core.encode import encode as encode_samples
from ditkit_core.encode import text_key
from ditkit_core.encoded import EncodedSample
from ditkit_core.errors import Stopped, UserError
from ditkit_core.export import check_export, export_adapter, export_merged
from ditkit_core.files import write_text
from ditkit_core.model import Encoder, ModelSpec
from ditkit_core.options import EncodeOptions, ExportOptions, SampleOptions, TrainOptions
from ditkit_core.precision import Precision, parse_dtype
from ditkit_core.prepare import Prepared, Unloaded, build, load
from ditkit_core.run_folder import RunFolder, open_run
from ditkit_core.sample_stage import draw_samples
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
        for change in stated:
            say(f"changed since the last part of this run: {change}")
        done = folder.completed_step()
        if done is not None and done >= config.train.steps:
            say(f"{folder.path} is complete at step {done}; nothing is left to do")
            _say_results(run, folder)
            return
        if options.demo:
            say(f"writing the demo's checkpoint and clips into {folder.inputs}")
            spec.write_demo(folder.inputs)
        unloaded = run.build()
        encoded = run.encode()
        prepared = load(unloaded, device=run.device, seed=config.train.seed)
        _start_from(options.init_from, prepared, folder)
        kept, held_out = split_held_out([sample.id for sample in encoded], config.held_out.clips)
        by_id = {sample.id: sample for sample in encoded}
        _check_data(folder, encoded)
        exporter = Exporter(run, folder, prepared, encoded)
        with progress("train", config.train.steps) as bar:
            result = train_loop(
                prepared.model,
                run.engine,
                spec,
                TrainingData(
                    [by_id[id] for id in kept],
                    seed=config.train.seed,
                    batch_size=config.train.batch_size,
                    caption_dropout=config.train.caption_dropout,
                ),
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


def encode(spec: ModelSpec, config: RunConfig, options: EncodeOptions) -> None:
    """Fill the cache, and nothing else."""
    run = Run(spec, config)
    run.check()
    if options.demo:
        spec.write_demo(RunFolder(Path(config.run.folder)).inputs)
    encoded = run.encode()
    say(f"{len(encoded)} samples are encoded in {run.cache.folder}")


def sample(spec: ModelSpec, config: RunConfig, options: SampleOptions) -> None:
    """Draw samples with a run's trained weights, or with an adapter file."""
    if options.prompt:
        config = replace(config, sample=replace(config.sample, prompts=options.prompt))
    if options.adapter:
        config = replace(config, adapter=replace(config.adapter, init=options.adapter))
    run, folder = Run(spec, config), RunFolder(Path(config.run.folder))
    run.check()
    captions = [] if config.sample.prompts else [sample.caption for sample in run.dataset.samples]
    run.encode_texts(captions)  # before the transformer is there: a card need not hold both
    prepared = load(run.build(), device=run.device, seed=config.train.seed)
    stem = Path(options.adapter).stem if options.adapter else f"step-{_take_trained(prepared, folder):06d}"
    files = run.draw(prepared.model, captions, Path(options.out) if options.out else folder.samples, stem)
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
    run, folder = Run(spec, config), RunFolder(Path(config.run.folder))
    run.check()
    prepared = load(run.build(), device=run.device, seed=config.train.seed)
    step = _take_trained(prepared, folder, options.step)
    out = Path(options.out) if options.out else folder.exports / f"adapter-export-step-{step:06d}.safetensors"
    metadata = run.metadata(prepared, step, data="")
    if wanted.merged or config.adapter.method == "full":
        target = out.with_suffix("") if out.suffix == ".safetensors" else out
        files = export_merged(prepared.model, spec, target, wanted, metadata=metadata, config_json=prepared.config_json)
    else:
        files = export_adapter(prepared.model, spec, out.parent, out.stem, wanted, metadata=metadata)
    say("\n".join(str(file) for file in files))


@dataclass(frozen=True)
class Run:
    """A configuration put to work: what several stages need, made when first asked for."""

    spec: ModelSpec
    config: RunConfig

    def __post_init__(self) -> None:
        if self.config.train.threads:
            torch.set_num_threads(self.config.train.threads)

    def check(self) -> None:
        """Refuse what cannot work in any command, before anything is written or loaded."""
        choose_device(self.config.train.device, "train.device")
        choose_device(self.config.encode.device, "encode.device")
        check_export(self.spec, self.config.export, self.config.adapter)
        check_backend(self.config.train.attention, training=False)
        self.config.sample.check(frame_step=self.spec.frame_step, size_step=self.spec.size_step)

    def check_training(self) -> None:
        """Refuse what cannot be trained."""
        check_backend(self.config.train.attention, training=True)
        if self.precision.matmul == torch.float16:
            raise UserError(
                "model.dtype = fp16 cannot train: gradients underflow without a loss scaler; choose bf16 or fp32"
            )
        if self.config.adapter.method == "full" and self.precision.matmul != torch.float32:
            raise UserError(
                "adapter.method = full in bf16 rounds most updates away, and there are no fp32 master weights yet; "
                "set model.dtype = fp32"
            )

    @cached_property
    def device(self) -> torch.device:
        """Where training happens."""
        return choose_device(self.config.train.device, "train.device")

    @cached_property
    def precision(self) -> Precision:
        """The dtypes of the model."""
        return Precision(matmul=parse_dtype(self.config.model.dtype))

    @property
    def engine(self) -> Engine:
        """Runs the model as configured."""
        return Engine(policy=self.config.train.checkpointing, backend=self.config.train.attention)

    @cached_property
    def cache(self) -> Cache:
        """Where encoded clips and captions are kept."""
        own = self.config.encode.cache
        return Cache(Path(own) if own else Path(self.config.run.folder).parent / "cache")

    @cached_property
    def dataset(self) -> Dataset:
        """The samples, checked."""
        spec = self.spec
        found = scan(self.config.data, frame_step=spec.frame_step, size_step=spec.size_step, fps=spec.fps)
        for name, reason in found.excluded:
            warn(f"left out: {name}: {reason}")
        return found

    @cached_property
    def encoders(self) -> tuple[Encoder, Encoder]:
        """Media and text encoder, not loaded."""
        config, device = self.config.encode, choose_device(self.config.encode.device, "encode.device")
        media = self.spec.media_encoder(self.config.model, device)
        return media, self.spec.text_encoder(self.config.model, device, parse_dtype(config.text_dtype))

    def build(self) -> Unloaded:
        """The model on `meta`, its files matched and its adapters in place: what is wrong with either shows here."""
        config = self.config
        return build(self.spec, config.model, config.adapter, config.base, precision=self.precision, say=say)

    def encode(self) -> list[EncodedSample]:
        """Every sample, and the texts of the samples to be drawn, through the encoders into the cache."""
        data = self.dataset
        held_out = self.config.held_out.clips
        split_held_out(
            [sample.id for sample in data.samples], held_out
        )  # says now if nothing would be left to train on
        prompts = self.config.sample.chosen([sample.caption for sample in data.samples])
        return self._encode(data.samples, data.fps, [*prompts, self.config.sample.negative])

    def _encode(self, samples: Sequence[Sample], fps: float, texts: Sequence[str]) -> list[EncodedSample]:
        media, text = self.encoders
        return encode_samples(
            samples,
            cache=self.cache,
            media_encoder=media,
            text_encoder=text,
            height=self.config.data.height,
            width=self.config.data.width,
            fps=fps,
            extra_captions=texts,
            progress=_encode_progress,
            on_bad=self._left_out if self.config.data.on_bad == "skip" else None,
        )

    def encode_texts(self, captions: Sequence[str]) -> None:
        """The texts of the samples to be drawn into the cache."""
        config = self.config.sample
        self._encode([], self.spec.fps, [*config.chosen(captions), config.negative])

    def _left_out(self, sample: Sample, error: UserError) -> None:
        warn(f"left out: {error}")

    def draw(self, model: Any, captions: Sequence[str], folder: Path, stem: str) -> list[Path]:
        """Draw the configured samples with the model as it is."""
        config, data = self.config.sample, self.config.data
        prompts = config.chosen(captions)
        if not prompts:
            return []
        self.encode_texts(captions)
        text_encoder = self.encoders[1]

        def conditions(text: str) -> Mapping[str, Tensor]:
            tensors = self.cache.get("text", text_key(text, text_encoder))
            assert tensors is not None, text
            return tensors

        with progress("sample", len(prompts) * config.steps) as bar:
            return draw_samples(
                model,
                self.engine,
                self.spec.sampler(self.config.model, self.device, self.precision.matmul),
                prompts,
                conditions,
                config,
                size=(data.frames, data.height, data.width),
                fps=data.fps or self.spec.fps,
                folder=folder,
                stem=stem,
                on_step=bar.advance,
            )

    def metadata(self, prepared: Prepared, step: int, *, data: str) -> dict[str, str]:
        """What a file's header says about where it came from."""
        versions = {"ditkit": ditkit_core.__version__, "torch": torch.__version__, "python": platform.python_version()}
        model = self.config.model
        return {
            "ditkit.model": self.spec.name,
            "ditkit.base": model.transformer or model.base,
            "ditkit.preset": prepared.preset,
            "ditkit.step": str(step),
            "ditkit.data": data,
            "ditkit.config": to_toml(self.config),
            "ditkit.versions": json.dumps(versions),
        }


class Exporter:
    """Writes the trained weights beside each save, and everything that a finished run hands over."""

    def __init__(self, run: Run, folder: RunFolder, prepared: Prepared, encoded: Sequence[EncodedSample]):
        self._run, self._folder, self._prepared = run, folder, prepared
        self._data = key(*(part for sample in encoded for part in (sample.id, sample.media_key, sample.text_key)))
        self._captions = [sample.caption for sample in run.dataset.samples]

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
        if config.adapter.method == "lora":
            for file in self._export_adapter("adapter", step):
                if run.spec.verify_export is not None:
                    say(f"verified: {run.spec.verify_export(file, config.model, self._prepared.model, run.engine)}")
        if self._writes_transformer:
            self._export_transformer(self._folder.exports, step)
        run.draw(self._prepared.model, self._captions, self._folder.samples, f"step-{step:06d}")

    @property
    def _writes_transformer(self) -> bool:
        return self._run.config.export.merged or self._run.config.adapter.method == "full"

    def _export_adapter(self, stem: str, step: int) -> list[Path]:
        run, metadata = self._run, self._run.metadata(self._prepared, step, data=self._data)
        model, folder = self._prepared.model, self._folder.exports
        return export_adapter(model, run.spec, folder, stem, run.config.export, metadata=metadata)

    def _export_transformer(self, folder: Path, step: int) -> None:
        run, metadata = self._run, self._run.metadata(self._prepared, step, data=self._data)
        model, config_json = self._prepared.model, self._prepared.config_json
        export_merged(model, run.spec, folder, run.config.export, metadata=metadata, config_json=config_json)


def choose_device(name: str, key: str) -> torch.device:
    """The device of a setting; `auto` is the first GPU, else the CPU.

    Raises:
        UserError: If there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"{key} = {name!r} is no device; choose auto, cpu, cuda or cuda:1") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"{key} = {name!r}: ditkit runs on cpu and cuda; choose auto, cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"{key} = {name!r}: this machine has {torch.cuda.device_count()} CUDA devices; choose another")
    return device


def _check_data(folder: RunFolder, encoded: Sequence[EncodedSample]) -> None:
    """Store what the run trains on, and hold a run that is continued to it: order and held-out clips depend on the samples.

    Raises:
        UserError: Naming a sample that came, went or changed.
    """
    now = {sample.id: [sample.media_key, sample.text_key] for sample in encoded}
    if folder.data_file.exists() and any(folder.state.glob("step-*")):
        before = json.loads(folder.data_file.read_text(encoding="utf-8"))
        changed = sorted(id for id in now.keys() | before.keys() if now.get(id) != before.get(id))
        if changed:
            raise UserError(
                f"the data of {folder.path} changed since it was trained ({len(changed)} samples, first {changed[0]!r}: clip, "
                f"caption or encoder); put it back, or start a new run from its weights with --run.folder NEW --init-from {folder.path}"
            )
    else:
        write_text(folder.data_file, json.dumps(now, indent=0, sort_keys=True))


def _start_from(run: str, prepared: Prepared, folder: RunFolder) -> None:
    """Take the trained weights of another run as the first ones, unless this run has a state of its own already."""
    if run and Path(run).resolve() == folder.path.resolve():
        raise UserError(f"--init-from {run} is this run itself; set run.folder to a new folder")
    if run and latest(folder.state, warn) is None:
        step = _take_trained(prepared, RunFolder(Path(run)))
        say(f"starting from the weights of {run} at step {step}")


def _take_trained(prepared: Prepared, folder: RunFolder, step: int | None = None) -> int:
    """Put the weights of a run's save (averaged ones, if it averaged) into the model.

    Returns:
        The save's step.

    Raises:
        UserError: If there is no such save, or it is of another model or adapter.
    """
    path = latest(folder.state, warn) if step is None else folder.state / f"step-{step:06d}"
    if path is None or not path.is_dir():
        saves = ", ".join(sorted(each.name for each in folder.state.glob("step-*"))) or "none"
        raise UserError(f"{folder.path} has no such save (it has {saves}); name a run that was trained")
    # Its own settings: they decide which weights of a save are used, and what an adapter's values mean.
    stored = resolve(RunConfig, stored=folder.path)
    own, theirs = prepared.adapter, stored.adapter
    if own.method == "lora" and not theirs.init and (own.rank, own.scaling) != (theirs.rank, theirs.scaling):
        raise UserError(
            f"{folder.path} trained an adapter of rank {theirs.rank} and scale {theirs.scaling:g}, this one has {own.rank} and "
            f'{own.scaling:g}; set adapter.* as there, or build on it with base.merge = ["{folder.exports / "adapter.safetensors"}"]'
        )
    trained = Trained(prepared.model, prepared.trainable, stored.optim, stored.ema)
    state = load_state(path)
    trained.restore(state, path)
    with trained.used():
        used = {name: parameter.detach().clone() for name, parameter in prepared.trainable.items()}
    copy_values(prepared.trainable, used)
    return state.step


@contextmanager
def _encode_progress(stage: str, total: int) -> Iterator[Any]:
    with progress(f"encode {stage}", total) as bar:
        yield bar.advance


def _say_results(run: Run, folder: RunFolder) -> None:
    """The last lines: where everything is, and what to type next."""
    command, steps = run.spec.name, run.config.train.steps
    exports = sorted(folder.exports.glob("adapter.safetensors")) + sorted(folder.exports.glob("transformer_*"))
    for file in exports:
        say(f"{'adapter' if file.is_file() else 'model'}:  {file}")
    say(f"samples:  {folder.samples}")
    say(f"metrics:  {folder.metrics} (curves: tensorboard --logdir {folder.tensorboard})")
    say(f'next:     {command}-sample --run {folder.path} --prompt "..." draws another sample')
    say(f"          {command}-train --run {folder.path} --train.steps {2 * steps} continues the run")
