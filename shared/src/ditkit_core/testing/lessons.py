"""What a failed check teaches: which promise a model broke, its usual cause, and where the guide
explains it.

`ModelChecks` adds these lines to whatever a check raises, so that they stand under pytest's
traceback.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import pytest

from ditkit_core.errors import UserError
from ditkit_core.planner.profiler import mixes_devices

GUIDE = "docs/adding_a_model.md"


class Lesson(NamedTuple):
    """What a check is about."""

    promise: str
    """What the model promises to the core."""
    cause: str
    """What usually breaks it, in a model."""
    heading: str
    """The heading of the guide that explains it."""

    def __str__(self) -> str:
        return f"promise:     {self.promise}\nusual cause: {self.cause}\nread:        {GUIDE}, {self.heading}"


_TRANSFORMER, _PRECISION = "2. The transformer", "5. The spec"
_CARRY = Lesson(
    "a block reads its parameters and the carry, and nothing else",
    "a tensor that is kept as an attribute or in a module's variable, or a field that the carry "
    "lacks; an in-place change of a tensor of the carry",
    _TRANSFORMER,
)
_REPEATED = Lesson(
    "a block that runs twice on one carry gives the same bits twice",
    "an in-place change of the carry (`x += y`), state that a forward leaves behind, or random "
    "numbers of a generator of its own",
    _TRANSFORMER,
)
_DEVICES = Lesson(
    "everything that a forward makes is made on the device of its inputs",
    "a list of numbers in `torch.tensor([...], device=...)`, which copies from the host in each "
    "forward and cannot be replayed (torch.full, arange, "
    "linspace, or the numbers themselves), or `torch.arange(n)` without `device=`",
    _TRANSFORMER,
)
_DTYPES = Lesson(
    "each operation takes its dtype from its place of `Precision`",
    "a dtype that is written down (`.float()`, `torch.bfloat16`) or taken from a neighbouring "
    "tensor, or a parameter in the wrong operation group",
    _PRECISION,
)
_RULES = Lesson(
    "an adapter file means in diffusers what it means here, and its rules say where it does not",
    "a row of the rules that is missing or comes too late, or a name in another form",
    "6. Adapters",
)
_NAMES = Lesson(
    "every form names each parameter once, and is read back as it was written",
    "two names in the other order (q and k), or a name that one direction forgets",
    "3. Names in files",
)

LESSONS = {
    "test_it_builds_on_meta_and_is_staged": Lesson(
        "embed, blocks() and head are modules without buffers, and build without memory",
        "a table in `register_buffer`, which `.to(dtype)` would round; compute it in `embed` and "
        "put it into the carry",
        _TRANSFORMER,
    ),
    "test_every_parameter_belongs_to_one_stage": Lesson(
        "each parameter is below embed, one block, or head",
        "a parameter of the model itself, or a module that two blocks share",
        _TRANSFORMER,
    ),
    "test_carries_are_what_they_are_annotated_as": Lesson(
        "the carry's fields are the tensors that their annotations say",
        "a dimension in another order, a missing `None`, or tensors inside of a list or tuple",
        _TRANSFORMER,
    ),
    "test_an_item_that_does_not_fit_is_found_on_meta": Lesson(
        "features of another encoder are refused before weights are read",
        "code that cuts or pads features to the width that it expects",
        _TRANSFORMER,
    ),
    "test_attention_calls_have_names_of_their_own": Lesson(
        "each call of `attend` in a block has a name of its own",
        "a helper that is called twice with one name; pass it as an argument",
        _TRANSFORMER,
    ),
    "test_names_go_to_every_form_and_back": _NAMES,
    "test_default_targets_are_layers_of_the_model": Lesson(
        "each name of the first set of adapter targets is the end of a Linear layer's name",
        "a name of the official file instead of ours, or a layer that is no nn.Linear",
        "6. Adapters",
    ),
    "test_no_policy_changes_a_bit": _REPEATED,
    "test_reentrant_checkpoints_change_no_gradient": _CARRY,
    "test_a_policy_holds_what_it_says": Lesson(
        "what a block keeps is what its policy says",
        "a tensor that the block saves by itself, or that an attribute keeps alive",
        _TRANSFORMER,
    ),
    "test_training_on_another_device_changes_no_number": _DEVICES,
    "test_a_sample_in_a_ragged_batch_equals_itself_alone": Lesson(
        "a sample in a batch of several sizes gets what it gets alone, forward and backward",
        "padding that takes part in attention (`padding_mask`, also of captions), a mask that is "
        "off by one, a path without gradient (`detach`), "
        "or layers whose result nothing reads (name them in `idle`)",
        _TRANSFORMER,
    ),
    "test_what_stays_fp32_is_a_part_and_not_all": _DTYPES,
    "test_steps_on_one_batch_lower_its_loss": Lesson(
        "steps along the gradient learn a batch",
        "a gradient that is cut (`detach`, `torch.no_grad`), or a head that starts at values far "
        "too large",
        _TRANSFORMER,
    ),
    "test_a_fresh_adapter_changes_nothing_and_alone_is_trained": Lesson(
        "a new adapter changes no output, and only its parameters get gradients",
        "a layer that is called through its weight instead of as a module, or whose result nothing "
        "reads (name it in `idle`)",
        "6. Adapters",
    ),
    "test_what_a_full_recompute_leaves_out": Lesson(
        "a recompute stops before the layer that ends a block",
        "`last_layers` of the test names another layer, or the block computes something behind it "
        "that saves its result",
        _TRANSFORMER,
    ),
    "test_the_stream_has_the_dtype_of_its_place": Lesson(
        "the residual stream has the dtype of `residual`, and `num_tokens` counts its rows",
        "a stream that a block casts, or `patch` and `text_in_stream` of family_spec",
        _PRECISION,
    ),
    "test_outputs_and_every_gradient_are_those_of_diffusers": Lesson(
        "the model computes what diffusers' does, forward and backward",
        "the order of an axis, a sign in the rotation, a bias that is left out, a constant that "
        "diffusers multiplies the noise level with, or a table that it computes in fp32 (`exact`)",
        _TRANSFORMER,
    ),
    "test_bf16_is_nearer_to_fp64_than_diffusers": _DTYPES,
    "test_names_and_parameters_are_those_of_diffusers_at_full_size": _NAMES,
    "test_the_values_of_each_form_are_those_that_diffusers_converts": _NAMES,
}
"""By the name of a check."""

BY_CLASS = {
    "PolicyChecks": _REPEATED,
    "PrecisionChecks": _DTYPES,
    "AuditChecks": _DTYPES,
    "CoreChecks": _CARRY,
    "DiffusersChecks": _RULES,
}
"""By the class of a check that has no entry of its own; `_CARRY` for all others."""


FAILURES = (
    *(
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        NameError,
        RuntimeError,
        TypeError,
        UserError,
        ValueError,
    ),
    pytest.fail.Exception,
)
"""What a fault in a model makes a check raise."""


def lesson_of(owner: str, check: str) -> Lesson:
    """The lesson of a check."""
    return LESSONS.get(check, BY_CLASS.get(owner, _CARRY))


def teaching(owner: str, check: Callable[..., Any]) -> Callable[..., Any]:
    """A check that adds its lesson to what it raises."""
    lesson = lesson_of(owner, check.__name__)

    @wraps(check)
    def run(*arguments: Any, **options: Any) -> Any:
        try:
            return check(*arguments, **options)
        except FAILURES as error:
            is_mixed = mixes_devices(error) or mixes_devices(error.__cause__)
            error.add_note(str(_DEVICES if is_mixed else lesson))
            raise

    return run
