"""A configuration put to work: what the commands share, made when first asked for."""

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ditkit_core
from ditkit_core.activation_checkpoint import Engine
from ditkit_core.attention_backends import check_backend
from ditkit_core.block_swap import check_swap, choose_streamed
from ditkit_core.buckets import describe_sizes
from ditkit_core.cache import Cache
from ditkit_core.checkpoint_budget import check_sizes
from ditkit_core.compiled import backend_of, check_compiled, check_compiler
from ditkit_core.config import RunConfig
from ditkit_core.config_file import to_toml
from ditkit_core.console import progress, say, warn
from ditkit_core.data import split_held_out
from ditkit_core.dataset import DataConfig, Dataset, Sample, scan
from ditkit_core.devices import ALL, choose_device, choose_devices, spread
from ditkit_core.division import budgets_here, choose_cuts, weights_profile
from ditkit_core.encode import encode as encode_samples
from ditkit_core.encode import encode_references, text_key
from ditkit_core.encoded import EncodedSample
from ditkit_core.errors import UserError
from ditkit_core.export import check_adapted, check_export
from ditkit_core.model import Encoder, ModelSpec, Sampler
from ditkit_core.offload import can_offload
from ditkit_core.placement import Placement, place
from ditkit_core.plan import Budget
from ditkit_core.policy_schedule import parse_schedule
from ditkit_core.precision import Precision, parse_dtype
from ditkit_core.prepare import Prepared, Unloaded, build, load
from ditkit_core.prior import count_media, prior_data_config
from ditkit_core.profile import Profile
from ditkit_core.quantization import check_quantize
from ditkit_core.run_folder import RunFolder
from ditkit_core.sample_stage import Scene, draw_samples
from ditkit_core.scaled_files import num_scaled, open_weights
from ditkit_core.train import check_fused_backward


class Encoded(NamedTuple):
    """What a run trains on, in the cache."""

    samples: list[EncodedSample]
    prior: list[EncodedSample]
    """The class pictures of prior preservation."""


@dataclass(frozen=True)
class Run:
    """A run's configuration with its model family."""

    spec: ModelSpec
    config: RunConfig

    def __post_init__(self) -> None:
        data = self.config.data
        frames, height, width = self.spec.size
        data = replace(
            data, frames=data.frames or frames, height=data.height or height, width=data.width or width
        )  # fmt: skip
        object.__setattr__(self, "config", replace(self.config, data=data))  # what the model decides, decided once
        if self.config.train.threads:
            torch.set_num_threads(self.config.train.threads)

    def check(self) -> None:
        """Refuse what cannot work in any command, before anything is written or loaded."""
        spread(self.config.train.reserve, len(self.devices), "train.reserve")
        choose_device(self.config.encode.device, "encode.device")
        check_backend(self.config.train.attention, training=False, devices=[device.type for device in self.devices])
        self.check_settings()

    def check_settings(self) -> None:
        """The same as far as no device of this machine matters."""
        assert self.precision
        check_quantize(self.config.base.quantize, self.config.adapter.method)
        check_export(self.spec, self.config.export, self.config.adapter)
        check_backend(self.config.train.attention, training=False)
        self.config.sample.check(
            frame_step=self.spec.frame_step,
            size_step=self.spec.size_step,
            takes_references=self.spec.reference_size is not None,
        )

    def check_training(self, *, here: bool = True) -> None:
        """Refuse what cannot be trained, and warn of what does nothing.

        Args:
            here: Whether it is the devices of this machine that are to train.
        """
        train, base = self.config.train, self.config.base
        if base.quantized_cache and base.quantize == "none" and self.stored_as == "none":
            raise UserError(
                f"base.quantized_cache = {base.quantized_cache!r} keeps a quantized base, and base.quantize = none makes none; set "
                "base.quantize to int8, fp8 or nf4, or leave base.quantized_cache out"
            )
        if train.pipelined and train.accumulation == 1 and not self.config.prior.wanted:
            raise UserError(
                "train.pipelined overlaps the micro-batches of a step, and train.accumulation = 1 makes one; set "
                "train.accumulation to 2 or more, or leave train.pipelined out"
            )
        kinds = dict.fromkeys(device.type for device in self.devices) if here else ()
        check_backend(self.config.train.attention, training=True, devices=tuple(kinds))
        optim = self.config.optim
        check_swap(
            train.swap_blocks, self.config.adapter.method, fused_backward=optim.fused_backward, optimizer=optim.name
        )
        check_fused_backward(train, optim, prior=self.config.prior.wanted)
        check_sizes(parse_schedule(train.checkpointing).budget or (), len(self.devices) if here else None)
        check_compiler(backend_of(train.compile), kinds)
        quantized = base.quantize != "none" or self.stored_as != "none"
        check_compiled(backend_of(train.compile), parse_schedule(train.checkpointing).distinct, quantized=quantized)
        if self.precision.matmul == torch.float16:
            raise UserError(
                "model.dtype = fp16 cannot train: gradients underflow without a loss scaler; choose bf16 or fp32"
            )
        if self.config.adapter.method == "full" and self.precision.matmul == torch.float64:
            raise UserError("adapter.method = full in fp64 is for comparisons alone; set model.dtype = fp32")
        if self._trains_bf16 and optim.rounding == "nearest":
            raise UserError(
                "adapter.method = full with model.dtype = bf16 and optim.rounding = nearest rounds most updates away; set "
                "optim.rounding to stochastic, or to split (2 bytes more per weight), or model.dtype = fp32"
            )
        self.config.precision.check_training(optimizer=optim.name, fused_backward=optim.fused_backward)
        for unused in self._unused() if here else ():
            warn(unused)

    @property
    def _trains_bf16(self) -> bool:
        """Whether trained weights are kept in bf16; those of adapters never are."""
        return self.config.adapter.method == "full" and self.precision.matmul == torch.bfloat16

    def _unused(self) -> Iterator[str]:
        """Settings that do nothing here."""
        train, count = self.config.train, len(self.devices)
        if self.config.optim.rounding != "nearest" and not self._trains_bf16:
            yield f"optim.rounding = {self.config.optim.rounding} is of bf16 weights that are trained, and this run has none"
        if train.pipelined and count == 1:
            yield "train.pipelined lets several devices work at once, and this run has one: it needs more memory and is no faster"
        if any(train.reserve) and all(device.type == "cpu" for device in self.devices):
            yield f"train.reserve = {list(train.reserve)} is of GPUs and is not used: this run is on the CPU"
        offloads = any(entry.policy.offload for entry in parse_schedule(train.checkpointing).entries)
        if offloads and not any(map(can_offload, self.devices)):
            yield f"train.checkpointing = {train.checkpointing} moves what blocks keep to the host, and this run is on the host: nothing is moved"
        if train.devices == (ALL,) and count == 1:
            yield 'train.devices = ["all"] is one GPU here: the model is not divided'

    @cached_property
    def stored_as(self) -> str:
        """What the blocks' matrices are in a file that lies here: `fp8` for scaled 8 bits, else `none`; `none` of a file elsewhere."""
        path = self.config.model.here("transformer")
        if path is None or (path.is_dir() and not any(path.glob("*.safetensors"))):
            return "none"
        try:
            return "fp8" if num_scaled(open_weights(path)) else "none"
        except UserError:  # said where the file is needed, which a plan by model.preset or a config.json does not
            return "none"

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """What the model is divided over; most often one."""
        config = self.config.train
        if not config.devices:
            return (choose_device(config.device, "train.device"),)
        if config.device != "auto":
            raise UserError(f"train.device = {config.device!r} and train.devices are both set; leave one of them out")
        return choose_devices(config.devices)

    @property
    def device(self) -> torch.device:
        """Where inputs go, and samples are decoded: the first."""
        return self.devices[0]

    def load(self, unloaded: Unloaded, placement: Placement | None = None) -> Prepared:
        """Give the model its weights, on its devices.

        Args:
            unloaded: The model.
            placement: Which device runs what; None chooses it without a look at activations.
        """
        placed = placement or self.placement(unloaded.model)
        if len(self.devices) > 1:
            say(placed.described())
        prepared = load(unloaded, placement=placed, seed=self.config.train.seed, say=say)
        if prepared.passage is not None:
            say(prepared.passage.describe())
        return prepared

    def placement(self, model: Any, profile: Profile | Sequence[Profile] | None = None) -> Placement:
        """Which of the devices runs what.

        Args:
            model: With its adapters; `meta` will do.
            profile: What a step of it holds, or would on each of the devices; None divides by weights and what training keeps for them alone.

        Raises:
            UserError: If `train.cuts` or `train.swap_blocks` do not divide the model, or the devices cannot be compared.
        """
        chosen = len(self.devices) > 1 and not self.config.train.cuts
        budgets = budgets_here(self.devices, self.config.train.reserve) if chosen else ()
        return self.divided(model, self.devices, budgets, profile)

    def divided(
        self,
        model: Any,
        devices: Sequence[torch.device],
        budgets: Sequence[Budget],
        profile: Profile | Sequence[Profile] | None = None,
    ) -> Placement:
        """The same for any devices, with what each can hold, of which cuts given by hand need nothing."""
        config, cuts = self.config.train, self.config.train.cuts
        if len(devices) > 1 and not cuts:
            if profile is None:
                profile = weights_profile(model, self.spec, self.precision, averaged=bool(self.config.ema.decay))
            cuts = choose_cuts(
                profile, budgets, swap_blocks=config.swap_blocks, micro_batches=self.micro_batches,
                pipelined=config.pipelined,
            )  # fmt: skip
        placed = place(model, devices, cuts)
        has_weights = [next(block.parameters(), None) is not None for block in model.blocks()]
        return replace(placed, streamed=choose_streamed(placed, config.swap_blocks, has_weights))

    @property
    def micro_batches(self) -> int:
        """How many a step adds up; prior preservation adds one to each."""
        return self.config.train.accumulation * (2 if self.config.prior.wanted else 1)

    @cached_property
    def precision(self) -> Precision:
        """The dtypes of the model."""
        matmul = parse_dtype(self.config.model.dtype)
        return self.config.precision.precision(matmul, self.spec.reference_precision)

    def engine(self, prepared: Prepared, schedule: str = "") -> Engine:
        """Runs the model as configured.

        Args:
            prepared: The model.
            schedule: What `train.checkpointing` came to; empty where nothing has a backward, and a budget need not be resolved.
        """
        config = self.config.train
        streaming = () if prepared.passage is None else (prepared.passage,)
        resolved = parse_schedule(config.checkpointing).budget is None
        policy = schedule or (config.checkpointing if resolved else "none")
        return Engine(policy=policy, backend=config.attention, compile=config.compile, passages=streaming)

    @cached_property
    def cache(self) -> Cache:
        """Where encoded clips and captions are kept."""
        own = self.config.encode.cache
        return Cache(Path(own) if own else Path(self.config.run.folder).parent / "cache")

    @cached_property
    def dataset(self) -> Dataset:
        """The samples, checked."""
        return self._scan(self.config.data, "data.folder")

    @property
    def prior_folder(self) -> Path:
        """Where the class pictures of prior preservation lie."""
        return Path(self.config.prior.folder or RunFolder(Path(self.config.run.folder)).prior)

    def _scan(self, config: DataConfig, key: str) -> Dataset:
        spec = self.spec
        found = scan(
            config,
            frame_step=spec.frame_step,
            size_step=spec.size_step,
            fps=spec.fps,
            reference_size=spec.reference_size,
            key=key,
        )
        for name, reason in found.excluded:
            warn(f"left out: {name}: {reason}")
        edits = sum(bool(sample.references) for sample in found.samples)
        if edits:
            say(f"{key}: {edits} of {len(found.samples)} samples have references")
        if config.buckets:
            say(f"{key}: buckets {describe_sizes((sample.height, sample.width) for sample in found.samples)} samples")
        return found

    @cached_property
    def encoders(self) -> tuple[Encoder, Encoder]:
        """Media and text encoder, not loaded."""
        config, device = self.config.encode, choose_device(self.config.encode.device, "encode.device")
        media = self.spec.media_encoder(self.config.model, device, config.vae_tiling)
        return media, self.spec.text_encoder(
            self.config.model, device, parse_dtype(config.text_dtype), config.streaming
        )

    def check_parts(self, *, drawing: bool = False) -> None:
        """Find every part that the run will need and read what describes it, before hours go into the first of them.

        Args:
            drawing: Whether pictures are drawn even if [sample] asks for none.
        """
        assert self.encoders
        if drawing or self.config.sample.prompts or self.config.sample.captions:
            assert self.sampler

    @cached_property
    def sampler(self) -> Sampler:
        """The family's sampler, not loaded."""
        tiled = self.config.sample.vae_tiling
        return self.spec.sampler(self.config.model, self.device, self.precision.matmul, tiled)

    def build(self) -> Unloaded:
        """The model on `meta`, its files matched and its adapters in place: what is wrong with either shows here."""
        config = self.config
        unloaded = build(self.spec, config.model, config.adapter, config.base, precision=self.precision, say=say)
        check_adapted(self.spec, config.export, unloaded.model)
        return unloaded

    def encode(self, class_prompt: str = "") -> Encoded:
        """Every sample, and the texts and references of the samples to be drawn, through the encoders into the cache.

        Args:
            class_prompt: The prompt of class pictures that are still to be drawn, if any are.
        """
        data = self.dataset
        held_out = self.config.held_out.clips
        split_held_out(
            [sample.id for sample in data.samples], held_out
        )  # says now if nothing would be left to train on
        scenes = self.scenes(data.samples)
        texts = [*self._texts(scenes), *filter(None, [class_prompt])]
        encoded = self._encode([*data.samples, *self._prior_samples()], data.fps, texts)
        for scene in scenes:
            self._encode_references(scene.references)
        own = {sample.id for sample in data.samples}
        return Encoded(
            [sample for sample in encoded if sample.id in own], [sample for sample in encoded if sample.id not in own]
        )

    def encode_prior(self) -> list[EncodedSample]:
        """The class pictures of prior preservation alone."""
        return self._encode(self._prior_samples(), self.dataset.fps, [])

    def _prior_samples(self) -> list[Sample]:
        """The class pictures; none if none are wanted or all are still to be drawn."""
        prior = self.config.prior
        if not prior.wanted or (prior.prompt and not count_media(self.prior_folder)):
            return []
        found = self._scan(prior_data_config(self.config.data, str(self.prior_folder)), "prior.folder")
        return [replace(sample, id=f"prior: {sample.id}") for sample in found.samples]

    def _encode(self, samples: Sequence[Sample], fps: float, texts: Sequence[str]) -> list[EncodedSample]:
        media, text = self.encoders
        return encode_samples(
            samples,
            cache=self.cache,
            media_encoder=media,
            text_encoder=text,
            fps=fps,
            reference_size=self.spec.reference_size,
            extra_captions=texts,
            progress=_encode_progress,
            on_bad=self._left_out if self.config.data.on_bad == "skip" else None,
        )

    def scenes(self, samples: Sequence[Sample]) -> list[Scene]:
        """What is to be drawn: the prompts, or the first of the samples' captions."""
        data = self.config.data
        return self.config.sample.scenes(
            samples, size=(data.frames, data.height, data.width), size_step=self.spec.size_step
        )

    def encode_scenes(self, scenes: Sequence[Scene]) -> None:
        """The texts and references of the samples to be drawn into the cache."""
        self._encode([], self.spec.fps, self._texts(scenes))
        for scene in scenes:
            self._encode_references(scene.references)

    def _texts(self, scenes: Sequence[Scene]) -> list[str]:
        return [*(scene.prompt for scene in scenes), self.config.sample.negative]

    def _encode_references(self, pictures: Sequence[Path]) -> list[Tensor]:
        if not pictures:
            return []
        assert self.spec.reference_size is not None, "checked"
        return encode_references(
            pictures,
            cache=self.cache,
            media_encoder=self.encoders[0],
            reference_size=self.spec.reference_size,
            progress=_encode_progress,
        )

    def _left_out(self, sample: Sample, error: UserError) -> None:
        warn(f"left out: {error}")

    def draw(self, prepared: Prepared, scenes: Sequence[Scene], folder: Path, stem: str) -> list[Path]:
        """Draw what the section asks for, with the model as it is."""
        if not scenes:
            return []
        defaults = self.spec.sample_defaults(prepared.arch)
        config = self.config.sample.resolved(defaults, warn)
        self.encode_scenes(scenes)
        text_encoder = self.encoders[1]

        def conditions(text: str) -> Mapping[str, Tensor]:
            tensors = self.cache.get("text", text_key(text, text_encoder))
            assert tensors is not None, text
            return tensors

        with progress("sample", len(scenes) * config.images * config.steps) as bar:
            return draw_samples(
                prepared.model,
                self.engine(prepared),
                self.sampler,
                scenes,
                config,
                conditions=conditions,
                references=self._encode_references,
                negative=conditions(config.negative) if config.uses_negative(defaults) else None,
                fps=self.config.data.fps or self.spec.fps,
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


@contextmanager
def _encode_progress(stage: str, total: int) -> Iterator[Any]:
    with progress(f"encode {stage}", total) as bar:
        yield bar.advance
