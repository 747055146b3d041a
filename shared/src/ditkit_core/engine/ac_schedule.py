"""Which block runs under which policy, as a person writes it: `full`, `attn_only(self)`, `full, 0-9=none`, `cuda:0=full, cuda:1=attn_only`.

The text is the value: it is what a run file says, what a plan prints, and what the engine is given. `budget` alone is not yet a
schedule; the planner turns it into one.
"""

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ditkit_core.config.sizes import parse_size
from ditkit_core.engine.ac_policies import AttentionOnly, Full, Ops, Policy
from ditkit_core.engine.devices import spread
from ditkit_core.engine.selective_ac import check_names
from ditkit_core.errors import UserError

KEY = "train.checkpointing"
BUDGET = "budget"
EVERY = "every_n"
OFFLOAD = "offload"

_ENTRY = re.compile(r"(?:(?P<where>[^=()]+)=)?(?P<kind>[^()+=]+)(?:\((?P<arguments>[^()]*)\))?(?P<offload>\+offload)?")
_RANGE = re.compile(r"(\d+)(?:(-)(\d+)?)?")
_NOT_INSIDE_PARENTHESES = re.compile(r",(?![^(]*\))")


def _without_arguments(made: Policy) -> Callable[[tuple[str, ...]], Policy]:
    def make(arguments: tuple[str, ...]) -> Policy:
        if arguments:
            raise ValueError(f"{made.kind} takes nothing in parentheses")
        return made

    return make


def _ops(names: tuple[str, ...]) -> Policy:
    check_names(names)
    return Ops(names=names)


MAKERS: dict[str, Callable[[tuple[str, ...]], Policy]] = {
    "none": _without_arguments(Policy()),
    "full": _without_arguments(Full()),
    "attn_only": lambda names: AttentionOnly(names=names),
    "ops": _ops,
    OFFLOAD: _without_arguments(Full(offload=True)),
}
"""Policies by the word that a person writes, from what stands in parentheses; ValueError says what is wrong with that."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One part of a schedule."""

    where: str
    """Blocks (`3`, `0-9`, `30-`), a device (`cuda:1`), or empty for all blocks that no other part names."""
    policy: Policy
    every: int = 1
    """The policy holds for every n-th of these blocks, counted from the first; the others keep everything."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What a person wrote, understood."""

    entries: tuple[Entry, ...] = ()
    budget: tuple[str, ...] | None = None
    """Sizes such as `20GiB`, one for each device; empty takes what the devices have; None is no budget."""

    @property
    def uniform(self) -> Policy | None:
        """The policy that all blocks have; None where they may differ, or a budget decides."""
        alone = self.entries[0] if len(self.entries) == 1 else None
        return alone.policy if alone is not None and not alone.where and alone.every == 1 else None

    @property
    def distinct(self) -> tuple[Policy, ...]:
        """Every policy that a block may have, each once."""
        spread = (policy for entry in self.entries for policy in (entry.policy, *(Policy(),) * (entry.every > 1)))
        return tuple(dict.fromkeys(spread))

    def on_the_host(self) -> "Schedule":
        """The same for a run whose device is the host, where `offload` does nothing."""
        return replace(self, entries=tuple(replace(e, policy=replace(e.policy, offload=False)) for e in self.entries))

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that it names."""
        return tuple(entry.where for entry in self.entries if entry.where and not _RANGE.fullmatch(entry.where))

    def alone_on(self, device: torch.device) -> "Schedule":
        """What holds if all blocks are on a device."""
        others = [entry for entry in self.entries if entry.where not in self.devices]
        here = [replace(entry, where="") for entry in self.entries if entry.where == str(device)]
        return replace(self, entries=(*here, *(entry for entry in others if entry.where or not here)))

    def policies(self, devices: Sequence[torch.device | None]) -> tuple[Policy, ...]:
        """The policy of each block.

        Args:
            devices: Of each block; None for one without parameters, which runs where the one before it does.

        Raises:
            UserError: If a part names blocks that there are not, names one twice, or leaves one out.
        """
        if self.budget is not None:
            raise UserError(f"{KEY} = budget has to be resolved by a plan before a model runs")
        devices = _where_run(devices)
        found: dict[int, Policy] = {}
        for entry in (entry for entry in self.entries if entry.where):
            held = _blocks(entry.where, devices)
            if twice := sorted(set(held) & set(found)):
                raise UserError(f"{KEY}: block {twice[0]} has two policies; name each block once")
            found |= _spread(entry, held)
        rest = [i for i in range(len(devices)) if i not in found]
        default = next((entry for entry in self.entries if not entry.where), None)
        if rest and default is None:
            raise UserError(
                f"{KEY} says nothing of block {rest[0]}; name it, or begin with a policy for all others: full, …"
            )
        if default is not None:
            found |= _spread(default, rest)
        return tuple(found[i] for i in range(len(devices)))


def _where_run(devices: Sequence[torch.device | None]) -> list[torch.device | None]:
    found: list[torch.device | None] = []
    for device in devices:
        found.append(device if device is not None or not found else found[-1])
    return found


def _spread(entry: Entry, held: Sequence[int]) -> dict[int, Policy]:
    return {block: entry.policy if place % entry.every == 0 else Policy() for place, block in enumerate(held)}


def _blocks(where: str, devices: Sequence[torch.device | None]) -> list[int]:
    if found := _RANGE.fullmatch(where):
        first = int(found[1])
        last = int(found[3]) if found[3] else len(devices) - 1 if found[2] else first
        if not first <= last < len(devices):
            raise UserError(f"{KEY}: blocks {where} are not among the model's {len(devices)}, 0 to {len(devices) - 1}")
        return list(range(first, last + 1))
    held = [i for i, device in enumerate(devices) if str(device) == where]
    if not held:
        names = ", ".join(dict.fromkeys(str(device) for device in devices if device is not None))
        raise UserError(f"{KEY}: no block runs on {where}; the devices are {names}")
    return held


@lru_cache(maxsize=64)
def parse_schedule(text: str) -> Schedule:
    """What a person wrote.

    Raises:
        UserError: In one line, naming the part that is not understood and what could stand there.
    """
    parts = [part.strip() for part in _NOT_INSIDE_PARENTHESES.split(text)]
    found = [_ENTRY.fullmatch(part.replace(" ", "")) for part in parts]
    if (wrong := next((part for part, entry in zip(parts, found, strict=True) if entry is None), None)) is not None:
        raise UserError(f"{KEY} = {text!r}: {wrong!r} is no policy; write {examples()}")
    pieces = [entry for entry in found if entry is not None]
    if any(piece["kind"] == BUDGET for piece in pieces):
        if len(pieces) > 1 or pieces[0]["where"] or pieces[0]["offload"]:
            raise UserError(f"{KEY} = {text!r}: budget chooses for all blocks and stands alone")
        return Schedule(budget=_arguments(pieces[0]))
    entries = tuple(_entry(piece, text) for piece in pieces)
    if any(not entry.where for entry in entries[1:]):
        raise UserError(f"{KEY} = {text!r}: what holds for all other blocks comes first, and once")
    return Schedule(entries=entries)


def parse_policy(text: str) -> Policy:
    """The one policy that a text names.

    Raises:
        UserError: If it is none, or a schedule of several.
    """
    policy = parse_schedule(text).uniform
    if policy is None:
        raise UserError(f"{KEY} = {text!r} is a schedule, and one policy is wanted; write {examples()}")
    return policy


def _entry(piece: re.Match[str], text: str) -> Entry:
    kind, arguments, every = piece["kind"], _arguments(piece), 1
    if kind == EVERY:
        if len(arguments) != 1 or not arguments[0].isdecimal() or int(arguments[0]) < 2:
            raise UserError(f"{KEY} = {text!r}: every_n takes a number of at least 2; write every_n(2)")
        kind, every, arguments = "full", int(arguments[0]), ()
    if kind not in MAKERS:
        near = difflib.get_close_matches(kind, words(), n=1)
        meant = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(words())}"
        raise UserError(f"{KEY} = {text!r}: unknown policy {kind!r}; {meant}")
    try:
        policy = MAKERS[kind](arguments)
        policy = replace(policy, offload=policy.offload or piece["offload"] is not None)
    except ValueError as error:
        raise UserError(f"{KEY} = {text!r}: {error}") from error
    return Entry(where=piece["where"] or "", policy=policy, every=every)


def _arguments(piece: re.Match[str]) -> tuple[str, ...]:
    return tuple(word.strip() for word in (piece["arguments"] or "").split(",") if word.strip())


def words() -> tuple[str, ...]:
    """Every word for a policy."""
    return (*MAKERS, EVERY, BUDGET)


def examples() -> str:
    """How a schedule is written."""
    return "none, full, attn_only, attn_only(self), ops(matmul, attention), full+offload, every_n(2), budget, or by blocks: full, 0-9=none"


def written(policies: Sequence[Policy]) -> str:
    """The shortest text that means these policies, one for each block."""
    runs: list[list[int]] = []
    for i, policy in enumerate(policies):
        if runs and policies[runs[-1][0]] == policy:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    if len(runs) == 1:
        return str(policies[0])
    return ", ".join(f"{a}={policies[a]}" if a == b else f"{a}-{b}={policies[a]}" for a, b in runs)


def check_sizes(sizes: Sequence[str], num_devices: int | None = None) -> tuple[int, ...]:
    """Bytes of `budget(20GiB, 12GiB)`.

    Args:
        sizes: What stands in parentheses.
        num_devices: For how many there have to be sizes; None does not ask.

    Raises:
        UserError: If one is no size, or they are not one for each device, or one for all.
    """
    found = [parse_size(size, f"{KEY} = budget:") for size in sizes]
    return tuple(found if num_devices is None or not found else spread(found, num_devices, f"{KEY} = budget"))
