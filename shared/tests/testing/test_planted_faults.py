"""Faults that authors of models make, each planted alone into the toy: a named check finds it, and
says what it teaches."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.errors import UserError
from ditkit_core.models.spec import PrecisionSpec
from ditkit_core.models.state_dict import TensorSlice
from ditkit_core.nn.attention.attention import attend
from ditkit_core.planner.profiler import profile
from ditkit_core.testing import toy
from ditkit_core.testing.conformance import Conformance
from ditkit_core.testing.conformance_diffusers import DiffusersChecks
from ditkit_core.testing.lessons import FAILURES, GUIDE, LESSONS, lesson_of, teaching
from ditkit_core.testing.plans import step_of
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import (
    TOY,
    ToyArch,
    ToyBlock,
    ToyCarry,
    ToyEmbed,
    ToyInputs,
    ToyModel,
    toy_items,
)
from ditkit_core.testing.world import Items

ARCH = ToyArch()
GUIDE_PAGE = Path(__file__).parents[3] / GUIDE


class Sound(Conformance):
    """The toy without a fault."""

    spec = TOY
    arch = ARCH
    last_layers = ("mlp.2",)
    places_without = ("rotary_tables", "rotary", "qk_norms")

    def items(self, count: int, ragged: bool = False) -> Items:
        return toy_items(count, ragged=ragged)


Block = type[ToyBlock]


def model_of(block: Block = ToyBlock, embed: type[ToyEmbed] = ToyEmbed, **more: Any) -> Any:
    """A spec whose model has these stages."""

    class Planted(ToyModel):
        def __init__(self, arch: ToyArch, precision: Any):
            super().__init__(arch, precision)
            self.embed = embed(arch, precision)
            self.layers = nn.ModuleList(block(arch, precision) for _ in range(arch.depth))
            more.get("finish", lambda model: None)(self)

    return altered(TOY, build=Planted)


def in_place(block: Any, carry: ToyCarry) -> ToyCarry:
    carry.tokens.mul_(1.5)
    return ToyBlock.forward(block, carry)


def text_as_attribute(block: Any, carry: ToyCarry) -> ToyCarry:
    """Written by the embedding, which hands on zeros."""
    return ToyBlock.forward(block, carry._replace(text=_KEPT["text"]))._replace(text=carry.text)


_KEPT: dict[str, Tensor] = {}


class KeepingEmbed(ToyEmbed):
    def forward(self, inputs: ToyInputs) -> ToyCarry:
        carry = super().forward(inputs)
        _KEPT["text"] = carry.text
        return carry._replace(text=torch.zeros_like(carry.text))


def counts_calls(block: Any, carry: ToyCarry) -> ToyCarry:
    block.calls = getattr(block, "calls", 0) + 1
    carry = ToyBlock.forward(block, carry)
    return carry._replace(tokens=carry.tokens * (1 + 0.1 * (block.calls % 5)))


def random_of_its_own(block: Any, carry: ToyCarry) -> ToyCarry:
    block.generator = getattr(block, "generator", None) or torch.Generator().manual_seed(0)
    noise = torch.rand(carry.tokens.shape, generator=block.generator)
    return ToyBlock.forward(block, carry._replace(tokens=carry.tokens * noise.to(carry.tokens)))


def without_mask(block: Any, carry: ToyCarry) -> ToyCarry:
    return ToyBlock.forward(block, carry._replace(padding_mask=None))._replace(
        padding_mask=carry.padding_mask
    )


def mask_off_by_one(block: Any, carry: ToyCarry) -> ToyCarry:
    mask = carry.padding_mask
    shifted = None if mask is None else torch.cat([mask[:, :1], mask[:, :-1]], 1)
    return ToyBlock.forward(block, carry._replace(padding_mask=shifted))._replace(padding_mask=mask)


def cut_gradient(block: Any, carry: ToyCarry) -> ToyCarry:
    return ToyBlock.forward(block, carry._replace(text=carry.text.detach()))


def without_device(block: Any, carry: ToyCarry) -> ToyCarry:
    ramp = torch.linspace(1, 2, carry.tokens.shape[1])[:, None]
    return ToyBlock.forward(
        block, carry._replace(tokens=carry.tokens * ramp.to(carry.tokens.dtype))
    )


def narrow_stream(block: Any, carry: ToyCarry) -> ToyCarry:
    carry = ToyBlock.forward(block, carry)
    return carry._replace(tokens=carry.tokens.to(torch.bfloat16).to(carry.tokens.dtype).bfloat16())


def one_name_twice(block: Any, carry: ToyCarry) -> ToyCarry:
    q, k, v = (
        t.unflatten(-1, (block.heads, -1))
        for t in block.qkv(carry.tokens.to(block.precision.matmul)).chunk(3, -1)
    )
    extra = attend(q, k, v, name="self", padding_mask=carry.padding_mask).flatten(2)
    carry = ToyBlock.forward(block, carry)
    return carry._replace(tokens=carry.tokens + extra)


def block_with(forward: Callable[[Any, ToyCarry], ToyCarry]) -> Block:
    return type("PlantedBlock", (ToyBlock,), {"forward": forward})


class Bf16Time(ToyEmbed):
    """The noise level rounded to bf16, whatever its place says."""

    def forward(self, inputs: ToyInputs) -> ToyCarry:
        return super().forward(
            inputs._replace(sigma=inputs.sigma.bfloat16().to(inputs.sigma.dtype))
        )


class Cutting(ToyEmbed):
    """Takes as many features as it knows."""

    def forward(self, inputs: ToyInputs) -> ToyCarry:
        return super().forward(
            inputs._replace(text=[x[..., : self.text.in_features] for x in inputs.text])
        )


class Swapped(NamedTuple):
    tokens: Float[Tensor, "batch dim tokens"]
    modulation: Float[Tensor, "batch 3 dim"]
    text: Float[Tensor, "batch text dim"]
    padding_mask: Any
    sizes: tuple[tuple[int, ...], ...]


class SwappedEmbed(ToyEmbed):
    def forward(self, inputs: ToyInputs) -> Any:
        carry = super().forward(inputs)
        return Swapped(*carry)


class ListEmbed(ToyEmbed):
    """Tensors inside of a tuple do not cross a boundary."""

    def forward(self, inputs: ToyInputs) -> Any:
        carry = super().forward(inputs)
        return carry._replace(sizes=tuple(torch.tensor(size) for size in carry.sizes))


class LiteralEmbed(ToyEmbed):
    """A list of numbers is copied from the host in each forward."""

    def forward(self, inputs: ToyInputs) -> ToyCarry:
        carry = super().forward(inputs)
        factors = torch.tensor([1.0] * ARCH.dim, device=carry.tokens.device)
        return carry._replace(tokens=carry.tokens * factors)


def with_buffer(model: Any) -> None:
    model.head.register_buffer("table", torch.ones(3))


def with_loose_parameter(model: Any) -> None:
    model.scale = nn.Parameter(torch.ones(3))


def with_shared_module(model: Any) -> None:
    model.layers[1].mlp = model.layers[0].mlp


def swapped_names(name: str) -> tuple[TensorSlice, ...]:
    official = toy.official_name(name)
    return (
        TensorSlice(
            official.replace(".out.", ".OUT.")
            .replace(".query.", ".out.")
            .replace(".OUT.", ".query.")
        ),
    )


@dataclass(frozen=True)
class Fault:
    """A fault, and the check that finds it."""

    check: str
    spec: Any
    arguments: tuple[Any, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    """Class attributes of the checks."""


NAMES = TOY.architecture.names
BITS = ("test_no_policy_changes_a_bit", ("lora", "fp32", True))
RAGGED = ("test_a_sample_in_a_ragged_batch_equals_itself_alone", (torch.float64,))


def fault(check: tuple[str, tuple[Any, ...]] | str, spec: Any, **values: Any) -> Fault:
    name, arguments = (check, ()) if isinstance(check, str) else check
    return Fault(name, spec, arguments, values)


FAULTS = {
    "an in-place residual": fault(BITS, model_of(block_with(in_place))),
    "a tensor kept outside of the carry": fault(
        ("test_reentrant_checkpoints_change_no_gradient", ("full",)),
        model_of(block_with(text_as_attribute), KeepingEmbed),
    ),
    "state that a forward leaves behind": fault(BITS, model_of(block_with(counts_calls))),
    "random numbers of a generator of its own": fault(
        BITS, model_of(block_with(random_of_its_own))
    ),
    "padding that is attended to": fault(RAGGED, model_of(block_with(without_mask))),
    "a mask that is off by one": fault(RAGGED, model_of(block_with(mask_off_by_one))),
    "a gradient that is cut": fault(RAGGED, model_of(block_with(cut_gradient))),
    "a tensor made on the default device": fault(
        ("test_training_on_another_device_changes_no_number", ("full", "none")),
        model_of(block_with(without_device)),
    ),
    "a literal": fault(
        ("test_training_on_another_device_changes_no_number", ("full", "none")),
        model_of(embed=LiteralEmbed),
    ),
    "a stream that a block casts": fault(
        "test_the_stream_has_the_dtype_of_its_place", model_of(block_with(narrow_stream))
    ),
    "tokens that are not counted": fault(
        "test_the_stream_has_the_dtype_of_its_place",
        altered(TOY, num_tokens=lambda item: item["latents"][0].numel() + 3),
    ),
    "two calls of attend with one name": fault(
        "test_attention_calls_have_names_of_their_own", model_of(block_with(one_name_twice))
    ),
    "a timestep in bf16": fault(
        ("test_a_place_that_is_lowered_from_fp64_alone_runs_lower_alone", ("timestep",)),
        model_of(embed=Bf16Time),
    ),
    "features that are cut to fit": fault(
        "test_an_item_that_does_not_fit_is_found_on_meta", model_of(embed=Cutting)
    ),
    "a carry in another order": fault(
        "test_carries_are_what_they_are_annotated_as", model_of(embed=SwappedEmbed)
    ),
    "tensors inside of a tuple": fault(
        "test_carries_are_what_they_are_annotated_as", model_of(embed=ListEmbed)
    ),
    "a table that is a buffer": fault(
        "test_it_builds_on_meta_and_is_staged", model_of(finish=with_buffer)
    ),
    "a parameter of no stage": fault(
        "test_every_parameter_belongs_to_one_stage", model_of(finish=with_loose_parameter)
    ),
    "a module of two blocks": fault(
        "test_every_parameter_belongs_to_one_stage", model_of(finish=with_shared_module)
    ),
    "two names in the other order": fault(
        "test_names_go_to_every_form_and_back",
        altered(TOY, names=replace(NAMES, from_native={"official": swapped_names})),
    ),
    "a target that matches nothing": fault(
        "test_default_targets_are_layers_of_the_model",
        altered(TOY, targets={"all": ("qkv", "attn.to_q")}),
    ),
    "every parameter a matmul's": fault(
        "test_what_stays_fp32_is_a_part_and_not_all",
        replace(TOY, precision=PrecisionSpec(op_group_of=lambda name: "matmul")),
    ),
    "a last layer that does not end the block": fault(
        ("test_what_a_full_recompute_leaves_out", ("lora",)), TOY, last_layers=("query",)
    ),
}


DEVICES = "test_training_on_another_device_changes_no_number"


def checks_of(planted: Fault) -> Any:
    return type("Planted", (Sound,), {"spec": planted.spec, **planted.values})()


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_by_its_check_which_says_what_it_teaches(name: str) -> None:
    planted = FAULTS[name]
    # without the fault it passes
    getattr(checks_of(replace(planted, spec=TOY, values={})), planted.check)(*planted.arguments)
    with pytest.raises(FAILURES) as raised:
        getattr(checks_of(planted), planted.check)(*planted.arguments)
    (lesson,) = raised.value.__notes__
    assert re.search(rf"^promise: .+\nusual cause: .+\nread: +{re.escape(GUIDE)}, \d\. ", lesson), (
        lesson
    )


class Unread(ToyBlock):
    """A block that changes the text as well: after the last block nothing reads it."""

    def __init__(self, arch: ToyArch, precision: Any):
        super().__init__(arch, precision)
        self.unread = nn.Linear(arch.dim, arch.dim)

    def forward(self, carry: ToyCarry) -> ToyCarry:
        return super().forward(carry)._replace(text=carry.text + self.unread(carry.text))


@pytest.mark.parametrize(
    ("check", "arguments"),
    [
        RAGGED,
        ("test_reentrant_checkpoints_change_no_gradient", ("full",)),
        ("test_a_fresh_adapter_changes_nothing_and_alone_is_trained", ()),
        ("test_no_policy_changes_a_bit_over_a_quantized_base", (("lora", "fp32"), "int8")),
    ],
    ids=str,
)
def test_layers_whose_result_nothing_reads_are_named(
    check: str, arguments: tuple[Any, ...]
) -> None:
    sound = {"spec": altered(model_of(Unread), targets={"all": ("qkv", "unread")})}
    idle = {"idle": (f"layers.{ARCH.depth - 1}.unread.",)}
    getattr(type("Named", (Sound,), sound | idle)(), check)(*arguments)
    with pytest.raises(FAILURES, match=r"unread"):
        getattr(type("Nameless", (Sound,), sound)(), check)(*arguments)


def test_a_literal_has_its_lesson_in_any_check_and_a_plan_names_its_line() -> None:
    spec = model_of(embed=LiteralEmbed)
    with pytest.raises(UserError) as raised:
        profile(step_of(spec, ARCH, (1, 32, 32), AdapterConfig(rank=2)))
    line = LiteralEmbed.forward.__code__.co_firstlineno + 3
    assert str(raised.value).startswith(
        f"{__file__}:{line}: a tensor is on the host; `torch.tensor([...]"
    )
    assert "\n" not in str(raised.value)
    check = teaching(
        "PolicyChecks", lambda: profile(step_of(spec, ARCH, (1, 32, 32), AdapterConfig(rank=2)))
    )
    with pytest.raises(UserError) as taught:
        check()
    assert (
        "torch.tensor([...]" in taught.value.__notes__[0]
        and lesson_of("PolicyChecks", "") is not LESSONS[DEVICES]
    )


def test_lessons_are_of_checks_that_are_there_and_headings_of_the_guide() -> None:
    owners = (*Conformance.__mro__, DiffusersChecks)
    checks = {name for owner in owners for name in vars(owner) if name.startswith("test_")}
    assert LESSONS.keys() <= checks
    page = GUIDE_PAGE.read_text(encoding="utf-8")
    headings: Sequence[str] = re.findall(r"^## (.+)$", page, re.MULTILINE)
    taught = [
        lesson_of(owner.__name__, name)
        for owner in owners
        for name in vars(owner)
        if name in checks
    ]
    assert {lesson.heading for lesson in taught} <= set(headings)
