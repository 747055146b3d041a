"""Which block runs under which policy, as a user writes it: `full`, `attn_only(self)`, `full,
0-9=none`, `cuda:0=full, cuda:1=attn_only`.

The text is parsed once, where a configuration is made (`TrainConfig.schedule`). Checks, planner and
engine get the parsed value. `budget` is not yet a schedule of blocks; the planner turns it into
one.
"""

import difflib
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ditkit_core.config.sizes import parse_size, per_device
from ditkit_core.engine.ac_policies import AttentionOnly, Full, Policy
from ditkit_core.errors import UserError, argument

if TYPE_CHECKING:
    import torch

KEY = "train.checkpointing"
BUDGET = "budget"
EVERY = "every_n"
OFFLOAD = "offload"

# One rule: `where=kind(arguments)+offload`; only the kind is required. Spaces are removed before.
_RULE = re.compile(
    r"(?:(?P<where>[^=()]+)=)?(?P<kind>[^()+=]+)(?:\((?P<arguments>[^()]*)\))?(?P<offload>\+offload)?"
)
# Blocks: `3`, `0-9`, or `30-` for all from block 30 on.
_RANGE = re.compile(r"(\d{1,9})(?:(-)(\d{1,9})?)?")
# Commas separate rules, and arguments inside the parentheses of a rule.
_NOT_INSIDE_PARENTHESES = re.compile(r",(?![^(]*\))")


def _without_arguments(policy: Policy) -> Callable[[tuple[str, ...]], Policy]:
    def make(arguments: tuple[str, ...]) -> Policy:
        if arguments:
            raise ValueError(f"{policy.kind} takes nothing in parentheses")
        return policy

    return make


MAKERS: dict[str, Callable[[tuple[str, ...]], Policy]] = {
    "none": _without_arguments(Policy()),
    "full": _without_arguments(Full()),
    "attn_only": lambda names: AttentionOnly(names=names),
    OFFLOAD: _without_arguments(Full(offload=True)),
}
"""Makers of policies, by the word that a user writes. They take the arguments in parentheses and
raise ValueError if these are wrong."""


@dataclass(frozen=True, kw_only=True)
class ACRule:
    """One comma-separated rule of a schedule."""

    where: str = ""
    """Blocks (`3`, `0-9`, `30-`), a device (`cuda:1`), or empty for all blocks that no other rule
    names."""
    policy: Policy
    every: int = 1
    """The policy applies to every n-th of these blocks, counted from the first; the others keep
    everything."""

    def __str__(self) -> str:
        """The rule as a user writes it."""
        # every_n stands for the policy itself, `full`, so that only its offload is written behind
        # it
        offload = "+offload" if self.policy.offload else ""
        policy_text = str(self.policy) if self.every == 1 else f"{EVERY}({self.every}){offload}"
        return f"{self.where}={policy_text}" if self.where else policy_text


@dataclass(frozen=True, kw_only=True)
class ACSchedule:
    """Which block runs under which activation checkpointing policy."""

    rules: tuple[ACRule, ...] = ()
    budget: tuple[str, ...] | None = None
    """Sizes such as `20GiB`, one per device; empty takes what the devices have; None: there is no
    budget."""

    @classmethod
    def everywhere(cls, policy: Policy) -> "ACSchedule":
        """One policy for all blocks."""
        return cls(rules=(ACRule(policy=policy),))

    @classmethod
    def of_blocks(cls, policies: Sequence[Policy]) -> "ACSchedule":
        """The shortest schedule with these policies, one per block."""
        spans = [
            list(span)
            for _, span in itertools.groupby(range(len(policies)), key=lambda i: policies[i])
        ]
        if len(spans) == 1:
            return cls.everywhere(policies[0])
        names = (str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
        return cls(
            rules=tuple(
                ACRule(where=n, policy=policies[s[0]]) for n, s in zip(names, spans, strict=True)
            )
        )

    def __str__(self) -> str:
        """The text that `parse_schedule` reads as this schedule."""
        if self.budget is None:
            return ", ".join(map(str, self.rules))
        return f"{BUDGET}({', '.join(self.budget)})" if self.budget else BUDGET

    @property
    def uniform(self) -> Policy | None:
        """The policy of all blocks; None where blocks may differ or a budget decides."""
        if len(self.rules) != 1:
            return None
        (rule,) = self.rules
        return None if rule.where or rule.every > 1 else rule.policy

    @property
    def distinct(self) -> tuple[Policy, ...]:
        """Every policy that a block may have, each once. `every_n` adds the one of the blocks that
        keep everything."""
        all_of_them = (
            policy
            for rule in self.rules
            for policy in (rule.policy, *(Policy(),) * (rule.every > 1))
        )
        return tuple(dict.fromkeys(all_of_them))

    def on_the_host(self) -> "ACSchedule":
        """This schedule for a run on the host, where `offload` does nothing."""
        return replace(
            self,
            rules=tuple(replace(r, policy=replace(r.policy, offload=False)) for r in self.rules),
        )

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that the rules name."""
        return tuple(
            rule.where for rule in self.rules if rule.where and not _RANGE.fullmatch(rule.where)
        )

    def alone_on(self, device: "torch.device") -> "ACSchedule":
        """The schedule that applies if all blocks are on one device: its own rules, and those that
        name blocks or nothing."""
        # A rule for this device becomes the default, and replaces the default for all others. Rules
        # that name blocks stay.
        others = [rule for rule in self.rules if rule.where not in self.devices]
        here = [replace(rule, where="") for rule in self.rules if rule.where == str(device)]
        return replace(self, rules=(*here, *(rule for rule in others if rule.where or not here)))

    def policies(self, devices: "Sequence[torch.device | None]") -> tuple[Policy, ...]:
        """The policy of each block.

        Args:
            devices: The device of each block; None for one without parameters, which runs where the
                one before it does.
        """
        if self.budget is not None:
            raise UserError(
                f"{argument(KEY)} = budget: a plan must resolve it into policies before a model "
                f"runs"
            )
        # A block without parameters runs where the carry is.
        here: torch.device | None = None
        devices = [here := here if device is None else device for device in devices]
        # Rules that name blocks come first: the default applies to whatever they left.
        by_block: dict[int, Policy] = {}
        for rule in (rule for rule in self.rules if rule.where):
            named = _blocks(rule.where, devices)
            if twice := sorted(set(named) & set(by_block)):
                raise UserError(
                    f"{argument(KEY)}: block {twice[0]} has two policies; name each block once"
                )
            by_block |= _policies_of(rule, named)
        rest = [i for i in range(len(devices)) if i not in by_block]
        default = next((rule for rule in self.rules if not rule.where), None)
        if rest and default is None:
            raise UserError(
                f"{argument(KEY)} has no policy for block {rest[0]}; name it, or begin with a "
                f"policy for all others: full, …"
            )
        if default is not None:
            by_block |= _policies_of(default, rest)
        return tuple(by_block[i] for i in range(len(devices)))


def _policies_of(rule: ACRule, named: Sequence[int]) -> dict[int, Policy]:
    # Counted among the named blocks, not in the model: `10-19=every_n(2)` recomputes block 10.
    return {
        block: rule.policy if position % rule.every == 0 else Policy()
        for position, block in enumerate(named)
    }


def _blocks(where: str, devices: "Sequence[torch.device | None]") -> list[int]:
    if match := _RANGE.fullmatch(where):
        first = int(match[1])
        last = int(match[3]) if match[3] else len(devices) - 1 if match[2] else first
        if not first <= last < len(devices):
            raise UserError(
                f"{argument(KEY)}: blocks {where} are not among the model's {len(devices)}, 0 to "
                f"{len(devices) - 1}"
            )
        return list(range(first, last + 1))
    named = [i for i, device in enumerate(devices) if str(device) == where]
    if not named:
        names = ", ".join(dict.fromkeys(str(device) for device in devices if device is not None))
        raise UserError(f"{argument(KEY)}: no block runs on {where}; the devices are {names}")
    return named


def parse_schedule(text: str) -> ACSchedule:
    """Parse a schedule that a user wrote."""
    parts = [part.strip() for part in _NOT_INSIDE_PARENTHESES.split(text)]
    matches = [_RULE.fullmatch(part.replace(" ", "")) for part in parts]
    if (
        wrong := next(
            (part for part, entry in zip(parts, matches, strict=True) if entry is None), None
        )
    ) is not None:
        raise UserError(
            f"{argument(KEY)} = {text!r}: {wrong!r} is not a policy; write {examples()}"
        )
    pieces = [entry for entry in matches if entry is not None]
    if any(piece["kind"] == BUDGET for piece in pieces):
        if len(pieces) > 1 or pieces[0]["where"] or pieces[0]["offload"]:
            raise UserError(
                f"{argument(KEY)} = {text!r}: budget chooses for all blocks; write nothing else "
                f"next to it"
            )
        return ACSchedule(budget=_arguments(pieces[0]))
    rules = tuple(_rule(piece, text) for piece in pieces)
    if any(not rule.where for rule in rules[1:]):
        raise UserError(
            f"{argument(KEY)} = {text!r}: the policy for all other blocks comes first, and only "
            f"once"
        )
    return ACSchedule(rules=rules)


ScheduleLike = ACSchedule | str
"""A schedule or its text, as torch takes a device or its name: for callers without a configuration,
such as your own training loop."""


def as_schedule(schedule: ScheduleLike) -> ACSchedule:
    """The schedule, parsed if it is a text."""
    return parse_schedule(schedule) if isinstance(schedule, str) else schedule


def parse_policy(text: str) -> Policy:
    """The one policy that a text names."""
    policy = parse_schedule(text).uniform
    if policy is None:
        raise UserError(f"{argument(KEY)} = {text!r} is a schedule; write one policy: {examples()}")
    return policy


def _rule(piece: re.Match[str], text: str) -> ACRule:
    kind, arguments, every = piece["kind"], _arguments(piece), 1
    # `every_n(2)` is `full` for every second block, written shorter, so that it has no maker of its
    # own.
    if kind == EVERY:
        if (
            len(arguments) != 1
            or not re.fullmatch(r"\d{1,9}", arguments[0])
            or int(arguments[0]) < 2
        ):
            raise UserError(
                f"{argument(KEY)} = {text!r}: every_n takes a number of at least 2; write "
                f"every_n(2)"
            )
        kind, every, arguments = "full", int(arguments[0]), ()
    if kind not in MAKERS:
        near = difflib.get_close_matches(kind, words(), n=1)
        meant = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(words())}"
        raise UserError(f"{argument(KEY)} = {text!r}: unknown policy {kind!r}; {meant}")
    try:
        policy = MAKERS[kind](arguments)
        # The word `offload` is `full+offload`, so that the maker may have set it already.
        policy = replace(policy, offload=policy.offload or piece["offload"] is not None)
    except ValueError as error:
        raise UserError(f"{argument(KEY)} = {text!r}: {error}") from error
    return ACRule(where=piece["where"] or "", policy=policy, every=every)


def _arguments(piece: re.Match[str]) -> tuple[str, ...]:
    return tuple(word.strip() for word in (piece["arguments"] or "").split(",") if word.strip())


def words() -> tuple[str, ...]:
    """Every word for a policy."""
    return (*MAKERS, EVERY, BUDGET)


def examples() -> str:
    """Examples of schedules, for messages and help texts."""
    return "none, full, attn_only, attn_only(self), full+offload, every_n(2), budget, or by blocks: full, 0-9=none"


def check_sizes(sizes: Sequence[str], num_devices: int | None = None) -> tuple[int, ...]:
    """Bytes of `budget(20GiB, 12GiB)`, one per device if `num_devices` is given and there are
    sizes."""
    num_bytes = [parse_size(size, f"{argument(KEY)} = budget:") for size in sizes]
    return tuple(
        num_bytes
        if num_devices is None or not num_bytes
        else per_device(num_bytes, num_devices, f"{argument(KEY)} = budget")
    )
