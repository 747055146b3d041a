"""A configuration put to work: what the commands share, made when first asked for."""

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ditkit_core
from ditkit_core.activation_checkpoint import Engine
from ditkit_core.attention import check_backend
from ditkit_core.cache import Cache
from ditkit_core.config import RunConfig
from ditkit_core.config_file import to_toml
from ditkit_core.console import progress, say, warn
from ditkit_core.data import split_held_out
from ditkit_core.dataset import Dataset, Sample, scan
from ditkit_core.encode import encode as encode_samples
from ditkit_core.encode import text_key
from ditkit_core.encoded import EncodedSample
from ditkit_core.errors import UserError
from ditkit_core.export import check_export
from ditkit_core.model import Encoder, ModelSpec, Sampler
from ditkit_core.precision import Precision, parse_dtype
from ditkit_core.prepare import Prepared, Unloaded, build
from ditkit_core.sample_stage import draw_samples


@dataclass(frozen=True)
class Run:
    """A run's configuration with its model family."""

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

    def check_parts(self) -> None:
        """Find every part that the run will need and read what describes it, before hours go into the first of them."""
        assert self.encoders
        if self.config.sample.prompts or self.config.sample.captions:
            assert self.sampler

    @cached_property
    def sampler(self) -> Sampler:
        """The family's sampler, not loaded."""
        return self.spec.sampler(self.config.model, self.device, self.precision.matmul)

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
                self.sampler,
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


@contextmanager
def _encode_progress(stage: str, total: int) -> Iterator[Any]:
    with progress(f"encode {stage}", total) as bar:
        yield bar.advance
