"""The combinations of values that a check runs daily; the others are marked `exhaustive` and run
nightly."""

import heapq
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest

NIGHTLY_FOR_FAMILIES = (
    "test_levers_of_policies_change_nothing",
    "test_policies_leave_nothing_in_a_model",
    "test_no_cut_changes_a_number_over_a_quantized_base",
    "test_no_layout_changes_a_number_of_training",
    "test_offloading_changes_no_bit",
    "test_training_on_another_device_changes_no_number",
    "test_an_outer_autocast_changes_nothing",
    "test_an_outer_autocast_changes_no_preset",
    "test_errors_come_in_the_right_order",
    "test_streaming_changes_no_bit",
    "test_streaming_trained_weights_changes_no_bit",
    "test_streamed_samples_are_the_same",
    "test_a_streamed_model_trains_and_measures_alike_on_two_devices",
    "test_one_backward_over_several_streamed_forwards",
    "test_streams_wait_for_each_other",
    "test_updating_in_the_backward_changes_no_bit",
    "test_other_levers_of_a_full_fine_tune_change_no_bit",
    "test_no_policy_changes_a_bit_over_a_quantized_base",
    "test_a_recompute_leaves_out_a_quantized_last_matmul",
    "test_pipelining_changes_the_order_of_summation_alone",
    "test_pipelined_micro_batches_equal_one_backward_over_their_sum",
    "test_nothing_waits_or_crosses_but_the_carry_while_micro_batches_are_launched",
    "test_a_gpu_trains_as_the_cpu_does",
    "test_levers_together_change_no_number",
    "test_replays_change_no_bit",
)
"""Checks of what the core alone can break: `Conformance.nightly`. The core's own model runs them
daily. What a family could break there (its cuts, carry, modules, randomness and names) has another
check that a family runs daily: replays on a stand-in for a GPU, all levers at once, of adapters and
of a full fine-tune, every cut, what is sent to the host, and what a policy repeats."""

NIGHTLY_FOR_VARIANTS = (
    *NIGHTLY_FOR_FAMILIES,
    "test_a_policy_holds_what_it_says",
    "test_what_is_sent_is_what_a_policy_keeps",
    "test_a_quantized_base_adds_nothing_to_what_is_kept",
    "test_a_model_written_in_scaled_8_bits_is_read_back_as_it_is",
    "test_levers_at_once_change_no_number",
    "test_levers_of_a_full_fine_tune_change_no_bit",
    "test_backward_may_start_in_another_thread",
    "test_steps_on_one_batch_lower_its_loss",
    "test_no_cut_changes_a_bit",
    "test_what_a_forward_keeps_holds_no_streamed_weight",
)
"""The slowest checks, of features that all variants of a family share:
`Conformance.nightly_of_variants`. What a variant could break has another check that every variant
runs daily: a division what crosses it, policies what they repeat, names those of every form, and
all that reads what is not its own, replays on a stand-in for a GPU."""

NUM_FOR_FAMILIES = dict.fromkeys(
    (
        "test_no_policy_changes_a_bit",
        "test_a_policy_holds_what_it_says",
        "test_a_policy_changes_no_number_of_a_preset",
        "test_a_sample_in_a_ragged_batch_equals_itself_alone",
        "test_steps_on_one_batch_lower_its_loss",
        "test_the_blocks_matrices_are_quantized_and_nothing_else",
        "test_reentrant_checkpoints_change_no_gradient",
        "test_backward_may_start_in_another_thread",
        "test_a_quantized_base_adds_nothing_to_what_is_kept",
        "test_no_cut_changes_a_bit",
        "test_a_carry_crosses_a_boundary_once",
        "test_what_a_forward_keeps_holds_no_streamed_weight",
        "test_levers_of_a_full_fine_tune_change_no_bit",
        "test_levers_at_once_change_no_number",
        "test_a_gpu_replays_bit_by_bit",
    ),
    1,
)
"""How many combinations of these checks a family runs daily, and the core's own model all: levers
meet in the engine, not in a model."""


def pairwise(
    levers: Mapping[str, Sequence[Any]],
    allowed: Callable[[tuple[Any, ...]], bool] = lambda case: True,
    *,
    first: Sequence[tuple[Any, ...]] = (),
    apart: Collection[tuple[str, str]] = (),
) -> list[tuple[Any, ...]]:
    """Cases that cover every allowed pair of values of two levers, chosen greedily: the next case
    is the one with the most missing pairs.

    Args:
        first: Cases that are among them whatever they cover.
        apart: Two levers each, the first of `levers` first, whose pairs another check covers: each
            of their values is there, and each pair with a value of another lever.
    """
    numbers = {lever: number for number, lever in enumerate(levers)}
    elsewhere = {(numbers[one], numbers[other]) for one, other in apart}
    # levers of which no pair is left: their values by themselves
    alone = [i for i in numbers.values() if sum(i in two for two in elsewhere) == len(numbers) - 1]
    every = [case for case in itertools.product(*levers.values()) if allowed(case)]
    # A bit for each pair, or value alone: sets took half a second at each import of the checks.
    bits: dict[tuple[Any, ...], int] = {}
    covered = []
    for case in every:
        parts: list[Any] = [(number, case[number]) for number in alone]
        parts += [
            (value, other)
            for value, other in itertools.combinations(enumerate(case), 2)
            if (value[0], other[0]) not in elsewhere
        ]
        covered.append(sum(bits.setdefault(part, 1 << len(bits)) for part in parts))
    missing = (1 << len(bits)) - 1
    # The most pairs first, of equals the first case. What a case covers only falls, so one that is
    # still the first when counted again is the best.
    left = [(-pairs.bit_count(), index) for index, pairs in enumerate(covered)]
    heapq.heapify(left)
    cases = [*first]
    for case in first:
        missing &= ~covered[every.index(case)]
    while missing:
        _, index = left[0]
        count = (missing & covered[index]).bit_count()
        if heapq.heapreplace(left, (-count, index)) == (-count, index):
            cases.append(every[index])
            missing &= ~covered[index]
    return cases


def case_id(case: tuple[Any, ...]) -> str:
    """A case's name in the name of its test."""
    return "-".join(map(str, case))


def every_value(*levers: Sequence[Any]) -> list[Any]:
    """The product of some levers; the daily cases contain each value of each lever once or more.

    For checks of one subject under two levers: `LeverChecks` and `PolicyChecks` check pairs of
    levers daily.
    """
    longest = max(map(len, levers))
    cases = [tuple(lever[i % len(lever)] for lever in levers) for i in range(longest)]
    return _marked(levers, cases)


def every_pair(
    *levers: Sequence[Any],
    allowed: Callable[[tuple[Any, ...]], bool] = lambda case: True,
    apart: Collection[tuple[str, str]] = (),
) -> list[Any]:
    """The allowed part of the product of some levers; the daily cases contain every pair of values
    of two levers, but for those `apart`, which names levers by their numbers: `0`, `1`."""
    numbered = {str(index): lever for index, lever in enumerate(levers)}
    return _marked(levers, pairwise(numbered, allowed, apart=apart), allowed)


def daily(values: Sequence[Any], *chosen: Any) -> list[Any]:
    """The values of one lever; only these are daily."""
    return [
        pytest.param(value, marks=() if value in chosen else pytest.mark.exhaustive)
        for value in values
    ]


def _marked(
    levers: Sequence[Sequence[Any]],
    daily: Sequence[tuple[Any, ...]],
    allowed: Callable[[tuple[Any, ...]], bool] = lambda case: True,
) -> list[Any]:
    return [
        pytest.param(*case, marks=() if case in daily else pytest.mark.exhaustive)
        for case in itertools.product(*levers)
        if allowed(case)
    ]
