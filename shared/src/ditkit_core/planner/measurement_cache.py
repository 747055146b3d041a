"""Measurements on fake tensors that a process keeps: a page plans a run after each change of its
file, and most changes alter nothing of them. A command plans once and keeps none."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeVar

from torch import Tensor, nn

from ditkit_core.planner.planned_step import StepJob

Measurement = TypeVar("Measurement")

MOST_KEPT = 128
"""Measurements that are kept; the one that was not asked for the longest goes first."""
NEUTRAL: Mapping[str, tuple[str, ...]] = {
    "job": ("kinds", "validates", "extra_forwards"),
    "execution": (
        *("device", "devices", "split_points", "reserve", "swap_blocks"),
        *("pipelined", "cuda_graphs"),
    ),
    "optim": ("lr", "schedule", "warmup_steps", "final_lr_fraction"),
}
"""Values of a step that no measurement of it depends on: they say where its stages go, how long it
takes, or by how much it learns."""
_kept: OrderedDict[Hashable, Any] | None = None


def keep_measurements() -> None:
    """Keep measurements from now on, until the process ends."""
    global _kept
    _kept = OrderedDict() if _kept is None else _kept


def measured_once(key: Callable[[], Hashable], measure: Callable[[], Measurement]) -> Measurement:
    """The measurement that is kept under a key, or a new one; always a new one where none are
    kept."""
    if _kept is None:
        return measure()
    name = key()
    if name not in _kept:
        _kept[name] = measure()
        if len(_kept) > MOST_KEPT:
            _kept.popitem(last=False)
    _kept.move_to_end(name)
    result: Measurement = _kept[name]
    return result


def step_key(job: StepJob) -> Hashable:
    """What the measurements of a step depend on."""
    values = {
        "job": _without(job, ("execution", "optim", "micro_batches", *NEUTRAL["job"])),
        "execution": _without(job.execution, NEUTRAL["execution"]),
        "optim": _without(job.optim, NEUTRAL["optim"]),
        "micro_batches": min(2, job.micro_batches),  # of further ones the second is measured
    }
    return content_key(values)


def _without(value: Any, names: Sequence[str]) -> dict[str, Any]:
    """The fields of a dataclass but for these."""
    every = (field.name for field in fields(value))
    return {name: getattr(value, name) for name in every if name not in names}


def module_key(module: nn.Module) -> Hashable:
    """The tensors of a module and the configuration that it was built by, which may be a file."""
    tensors = content_key(module.state_dict())
    return type(module), tensors, str(getattr(module, "config", ""))


def content_key(value: Any, above: tuple[int, ...] = ()) -> Hashable:
    """A key that values of equal content share: of tensors by their shape, of functions by their
    code and what they refer to outside of it. Any other object shares it with none.

    Args:
        above: The objects that contain it, by address: a function may refer to what contains it.
    """
    if id(value) in above:
        return _Identity, above.index(id(value))
    keys = partial(_keys, above=(*above, id(value)))
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device.type
    if isinstance(value, partial):
        return partial, *keys((value.func, value.args, value.keywords))
    if isinstance(value, MethodType):
        return MethodType, value.__func__, *keys((value.__self__,))
    if isinstance(value, FunctionType):
        inside = [cell.cell_contents for cell in value.__closure__ or ()]
        referred = value.__defaults__, value.__kwdefaults__, *inside
        return value.__module__, value.__code__, *keys(referred)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), *keys(getattr(value, field.name) for field in fields(value))
    if isinstance(value, Mapping):
        return Mapping, *keys(value.keys()), *keys(value.values())
    if isinstance(value, AbstractSet):
        return AbstractSet, frozenset(keys(value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return type(value), *keys(value)
    if value is None or isinstance(value, Hashable):
        return type(value), value
    return _Identity(value)


def _keys(values: Iterable[Any], above: tuple[int, ...]) -> list[Hashable]:
    return [content_key(value, above) for value in values]


class _Identity:
    """Stands for an object that only equals itself, and keeps it, so that no other gets its
    address."""

    def __init__(self, value: object):
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)
