"""The sections `[adapter]`, `[base]` and `[export]` of a configuration; this module needs no
torch."""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

from ditkit_core.config.field import setting
from ditkit_core.config.layer_patterns import check_used, parse_patterns, value_for
from ditkit_core.config.nearest import check_arguments, nearest_word
from ditkit_core.errors import UserError, argument
from ditkit_core.execution import BaseExecution
from ditkit_core.models.adapter_formats import set_forms

METHOD_NAMES = {"lora": "LoRA", "lokr": "LoKr", "loha": "LoHa"}
_LARGEST_RANK = 2**20
"""Larger than any side of a layer; beyond it a rank is a typing error."""
FP8_SCALED = "fp8_scaled"
"""The dtype of an export whose matrices have 8 bits and a scale."""


@dataclass(frozen=True, kw_only=True)
class BaseConfig(BaseExecution):
    """The `[base]` section: how the frozen base is changed before training."""

    merge: tuple[str, ...] = setting((), resume="refused", holds="path")
    """Existing LoRA files to merge into the base before training, each as `FILE` or
    `FILE@strength`. For a model of two experts: the files of the high-noise expert."""
    merge_low: tuple[str, ...] = setting((), resume="refused", holds="path", part_of="merge")
    """The same for the low-noise expert. Name a file for both experts in both keys."""
    assistant: str = setting("", resume="refused", holds="path")
    """A LoRA file, as `FILE` or `FILE@strength`, or its hub id (`owner/name/file.safetensors`), that undoes the distillation of a distilled base
    while an adapter is trained, so that the adapter does not. It is merged into the base for
    training and taken out again for samples. For a model of two experts: the file of the high-noise
    expert."""
    assistant_low: str = setting("", resume="refused", holds="path")
    """The same for the low-noise expert."""

    @property
    def merges(self) -> list[tuple[str, tuple[str, ...]]]:
        """What is merged into each transformer for good, after the key that names it."""
        return [("base.merge", self.merge), ("base.merge_low", self.merge_low)]

    def merge_key(self, component: str) -> str:
        """The key that names what is merged into a transformer for good; the component as for
        `files`."""
        return self.merges[component == "transformer_2"][0]

    @property
    def assistants(self) -> list[tuple[str, str]]:
        """The assistant of each transformer, after the key that names it; empty for none."""
        return [("base.assistant", self.assistant), ("base.assistant_low", self.assistant_low)]

    def assistant_key(self, component: str) -> str:
        """The key that names a transformer's assistant, if it has one, else empty; the component as
        for `files`."""
        key, entry = self.assistants[component == "transformer_2"]
        return key if entry else ""

    def files(self, component: str) -> list[tuple[str, str]]:
        """The files that are merged into a transformer (`transformer`, or `transformer_2` for the
        second of two), each after the key that names it.

        Its assistant is the last.
        """
        is_second = component == "transformer_2"
        (key, entries), assistant = self.merges[is_second], self.assistants[is_second]
        return [*((key, entry) for entry in entries), *[assistant] * bool(assistant[1])]


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The `[adapter]` section: which parameters are trained."""

    method: Literal["lora", "lokr", "loha", "full"] = setting("lora", resume="refused")
    """`lora` trains low-rank adapters over a frozen base, `lokr` Kronecker products, `loha`
    elementwise products of two low-rank matrices, and `full` every parameter."""
    rank: int = setting(32, resume="refused")
    """Rank of the adapters; for a LoKr, the rank of its second factor, which is stored whole if
    that is smaller."""
    alpha: float = setting(0.0, resume="refused")
    """The adapter is scaled by alpha / rank; 0 means alpha = rank."""
    rank_pattern: tuple[str, ...] = setting((), resume="refused")
    """Other ranks by layer, each as `PATTERN=RANK`: a name's end (`self_attn.q=64`) or a glob
    (`*.ffn.*=8`). The first that fits a layer counts."""
    alpha_pattern: tuple[str, ...] = setting((), resume="refused")
    """Other values of alpha by layer, each as `PATTERN=ALPHA`, with patterns as in rank_pattern."""
    dropout: float = setting(0.0, resume="stated")
    """Probability of dropping an input of the adapter in training, 0 to below 1."""
    targets: tuple[str, ...] = setting((), resume="refused")
    """Layers that get an adapter: a named set of the model, name endings (`self_attn.q`) or glob
    patterns (`layers.1*.ffn.*`). Empty means the model's first set."""
    use_rslora: bool = setting(False, resume="refused")
    """Scale by alpha / sqrt(rank)."""
    use_dora: bool = setting(False, resume="refused")
    """Also train the norm of each output's weights (DoRA)."""
    decompose_factor: int = setting(-1, resume="refused")
    """For a LoKr: the largest size of its first factor, which has to divide the size of the layer;
    -1 makes both factors about equally large."""
    decompose_both: bool = setting(False, resume="refused")
    """For a LoKr: make the first factor a low-rank product too, where the rank is small enough."""
    init: str = setting("", resume="refused", holds="path")
    """An existing LoRA file to start from; rank and alpha are taken from it."""

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha < 0 or not 0 <= self.dropout < 1:
            raise UserError(
                f"{argument('adapter.rank')} = {self.rank}, {argument('adapter.alpha')} = "
                f"{self.alpha}, {argument('adapter.dropout')} = {self.dropout}: "
                "set the rank to at least 1, alpha to at least 0, and dropout from 0 to below 1"
            )
        if (largest := max(self.rank, *self._ranks.values(), 0)) > _LARGEST_RANK:
            raise UserError(
                f"{argument('adapter.rank')} or {argument('adapter.rank_pattern')} has a rank of "
                f"{largest:g}, and no layer has a side above {_LARGEST_RANK}; write a smaller one"
            )
        if self.method in ("lokr", "loha") and (self.dropout or self.use_rslora or self.use_dora):
            raise UserError(
                f"{argument('adapter.dropout')}, use_rslora and use_dora are for "
                f"{argument('adapter.method')} = lora, and this one is {self.method}; leave them "
                f"out"
            )
        if self.method != "lokr" and (self.decompose_factor != -1 or self.decompose_both):
            raise UserError(
                f"{argument('adapter.decompose_factor')} and {argument('adapter.decompose_both')} "
                f"are for {argument('adapter.method')} = lokr, and this one is {self.method}; "
                f"leave them out"
            )
        if self.decompose_factor < 1 and self.decompose_factor != -1:
            raise UserError(
                f"{argument('adapter.decompose_factor')} = {self.decompose_factor} must be at "
                f"least 1, or -1 for factors of about equal size"
            )
        if self.method == "full" and (self._ranks or self._alphas):
            raise UserError(
                f"{argument('adapter.rank_pattern')} and {argument('adapter.alpha_pattern')} are "
                f"for adapters, and {argument('adapter.method')} = full trains the weights "
                "themselves; leave them out"
            )

    @cached_property
    def _ranks(self) -> dict[str, float]:
        return parse_patterns(
            argument("adapter.rank_pattern"), self.rank_pattern, "RANK", is_integer=True
        )

    @cached_property
    def _alphas(self) -> dict[str, float]:
        return parse_patterns(argument("adapter.alpha_pattern"), self.alpha_pattern, "ALPHA")

    @property
    def name(self) -> str:
        """The method's name in messages."""
        return "DoRA" if self.use_dora else METHOD_NAMES.get(self.method, "")

    def rank_of(self, layer: str) -> int:
        """The rank of a layer's adapter."""
        return int(value_for(layer, self._ranks) or self.rank)

    def alpha_of(self, layer: str) -> float:
        """The alpha of a layer's adapter."""
        return value_for(layer, self._alphas) or self.alpha or self.rank_of(layer)

    def check_patterns(self, layers: Collection[str]) -> None:
        """Refuse patterns that decide nothing for these layers."""
        check_used(argument("adapter.rank_pattern"), self._ranks, layers)
        check_used(argument("adapter.alpha_pattern"), self._alphas, layers)

    @property
    def scaling(self) -> float:
        """The factor of B·A, in layers that no pattern fits."""
        return (self.alpha or self.rank) / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class LoraConfig(AdapterConfig):
    """An `AdapterConfig` by the names that peft has for it: `r` is `rank`, `lora_alpha` is `alpha`,
    `lora_dropout` is `dropout`, and `target_modules` is `targets`::

        LoraConfig(
            r=16, lora_alpha=32, target_modules=["self_attn.q", "self_attn.v"], use_rslora=True
        )

    Defaults are ours: rank 32, alpha equal to the rank, and the model's first set of layers.
    """

    def __init__(
        self,
        *,
        r: int | None = None,
        lora_alpha: float | None = None,
        target_modules: str | Iterable[str] | None = None,
        lora_dropout: float | None = None,
        **settings: Any,
    ):
        """Take values by either name.

        Args:
            r: Rank of the adapters.
            lora_alpha: The adapter is scaled by lora_alpha / r.
            target_modules: Layers that get an adapter: name endings, glob patterns or named sets of
                the model. `all-linear` means every Linear layer.
            lora_dropout: Probability of dropping an input of the adapter in training.
            settings: Fields of `AdapterConfig`.

        Raises:
            UserError: If a value is impossible, or there by both names.
        """
        check_arguments(
            "LoraConfig", settings, (*_PEFT_NAMES, *(field.name for field in fields(AdapterConfig)))
        )
        targets = None
        if target_modules is not None:
            targets = (
                (target_modules,) if isinstance(target_modules, str) else tuple(target_modules)
            )
            for target in targets:
                if target != ALL_LINEAR and nearest_word(target, (ALL_LINEAR,), 0.85):
                    raise UserError(f"target_modules has {target!r}; did you mean {ALL_LINEAR}?")
            targets = ("*",) if targets == (ALL_LINEAR,) else targets
        named = {
            "r": r,
            "lora_alpha": lora_alpha,
            "target_modules": targets,
            "lora_dropout": lora_dropout,
        }
        for theirs, value in named.items():
            if value is not None:
                if (ours := _PEFT_NAMES[theirs]) in settings:
                    raise UserError(
                        f"{theirs} and {ours} are two names of one setting; leave one of them out"
                    )
                settings[ours] = value
        super().__init__(**settings)

    @property
    def r(self) -> int:
        """`rank`."""
        return self.rank

    @property
    def lora_alpha(self) -> float:
        """`alpha`, and the rank where that is 0."""
        return self.alpha or self.rank

    @property
    def target_modules(self) -> tuple[str, ...]:
        """`targets`."""
        return self.targets

    @property
    def lora_dropout(self) -> float:
        """`dropout`."""
        return self.dropout


ALL_LINEAR = "all-linear"
"""peft's word for every Linear layer."""
_PEFT_NAMES = {
    "r": "rank",
    "lora_alpha": "alpha",
    "target_modules": "targets",
    "lora_dropout": "dropout",
}


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """The `[export]` section: what is written next to each save and at the end."""

    forms: tuple[str, ...] = setting(("official",), resume="free")
    """Formats of the files, which differ in the names of tensors: `official` (ComfyUI and diffusers
    load it), `diffusers`, `diffsynth`, `musubi`, or several of them. A complete transformer is
    written only in the first two."""
    dtype: str = setting("bf16", resume="free")
    """Dtype of the files: bf16 or fp32; or fp8_scaled for a complete transformer as ComfyUI reads
    it, with the blocks' matrices in 8 bits with a scale and the rest in bf16 (adapters next to it
    are in bf16)."""
    merged: bool = setting(False, resume="free")
    """Also write the complete transformer with the adapter merged in, as a full fine-tune does:
    next to each save and at the end."""

    def __post_init__(self) -> None:
        if self.dtype not in ("bf16", "fp32", FP8_SCALED):
            raise UserError(
                f"{argument('export.dtype')} = {self.dtype!r}: choose bf16, fp32 or {FP8_SCALED}"
            )
        if not self.forms or len(set(self.forms)) < len(self.forms):
            raise UserError(
                f"{argument('export.forms')} = {list(self.forms)}: name at least one form, and "
                f"each once"
            )
        # No other program reads these files, so a second form would be a file that nobody can load.
        if self.scaled and self.forms != ("official",):
            raise UserError(
                f"{argument('export.dtype')} = {FP8_SCALED} is for ComfyUI, which reads the "
                f"official form; {set_forms(['official'])}, or another dtype"
            )

    @property
    def scaled(self) -> bool:
        """Whether matrices of complete transformers are written in 8 bits with a scale."""
        return self.dtype == FP8_SCALED
