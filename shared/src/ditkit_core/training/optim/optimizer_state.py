"""Optimizer state to and from named tensors and JSON values, bitwise exact and without pickle.

Tensors are keyed `parameter|entry`. A quantized entry is a tensor subclass: its inner tensors are
stored one by one as `parameter|entry|inner`, and its class and attributes among the values. Only
known classes are rebuilt, so a file cannot name code to run.
"""

import importlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ditkit_core.errors import UserError

_SUBCLASSES = {"OptimState8bit": "torchao.optim.subclass_8bit"}
"""Tensor subclasses that may be rebuilt from a file, and where they are defined."""

_FOREIGN = (
    "the saved optimizer state does not fit this run ({}); start a new run from it with --init-from"
)


def export_state(
    parts: Sequence[torch.optim.Optimizer],
    progress: Sequence[tuple[str, ...]],
    parameters: Mapping[str, nn.Parameter],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of several optimizers.

    Args:
        progress: Per optimizer, names of the scalars in its parameter groups that are state.
        parameters: All their parameters, by name.

    Returns:
        Tensors, contiguous, each on the device of the state, and values for JSON.
    """
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    subclasses: dict[str, Any] = {}
    for name, parameter in parameters.items():
        for part in parts:
            for entry, value in part.state.get(parameter, {}).items():
                key = f"{name}|{entry}"
                if not isinstance(value, Tensor):
                    scalars[key] = value
                elif type(value).__name__ in _SUBCLASSES:
                    inner, attributes = value.__tensor_flatten__()  # type: ignore[attr-defined]
                    tensors |= {f"{key}|{one}": getattr(value, one).contiguous() for one in inner}
                    subclasses[key] = [type(value).__name__, list(map(_to_json, attributes))]
                else:
                    tensors[key] = value.detach().contiguous()
    groups = [
        [{key: group[key] for key in keys if key in group} for group in part.param_groups]
        for part, keys in zip(parts, progress, strict=True)
    ]
    return tensors, {"scalars": scalars, "subclasses": subclasses, "groups": groups}


def import_state(
    parts: Sequence[torch.optim.Optimizer],
    progress: Sequence[tuple[str, ...]],
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    *,
    untouched: Collection[str] = (),
) -> None:
    """Load an exported state into newly built optimizers; settings (decay, betas) stay as the
    optimizers have them.

    The state of the parameters named in `untouched` stays on its device.
    """
    entries: dict[str, dict[str, Any]] = {}
    plain = {key: tensor for key, tensor in tensors.items() if key.count("|") == 1}
    for key, value in {
        **plain,
        **values["scalars"],
        **_rebuild(tensors, values["subclasses"]),
    }.items():
        name, entry = key.split("|")
        entries.setdefault(name, {})[entry] = value
    if foreign := entries.keys() - parameters.keys():
        raise UserError(_FOREIGN.format(f"it has {min(foreign)!r}"))
    if [len(part.param_groups) for part in parts] != [len(groups) for groups in values["groups"]]:
        raise UserError(_FOREIGN.format("other parameter groups"))
    names = {parameter: name for name, parameter in parameters.items()}
    for part, keys, saved in zip(parts, progress, values["groups"], strict=True):
        order = [parameter for group in part.param_groups for parameter in group["params"]]
        entries_by_index = {
            i: entries[names[parameter]]
            for i, parameter in enumerate(order)
            if names[parameter] in entries
        }
        state = {
            i: entry for i, entry in entries_by_index.items() if names[order[i]] not in untouched
        }
        groups = part.state_dict()["param_groups"]
        for group, scalars in zip(groups, saved, strict=True):
            group.update({key: scalars[key] for key in keys if key in scalars})
        # moves each entry to its device
        part.load_state_dict({"state": state, "param_groups": groups})
        # State that stays on the host bypasses torch's loading, which would move it to the
        # parameter's device.
        part.state.update(
            {order[i]: entry for i, entry in entries_by_index.items() if i not in state}
        )


def _rebuild(tensors: Mapping[str, Tensor], subclasses: Mapping[str, Any]) -> dict[str, Tensor]:
    rebuilt = {}
    for key, (cls_name, attributes) in subclasses.items():
        if cls_name not in _SUBCLASSES:
            raise UserError(_FOREIGN.format(f"unknown tensor class {cls_name!r}"))
        cls = getattr(importlib.import_module(_SUBCLASSES[cls_name]), cls_name)
        inner = {
            name.rsplit("|", 1)[1]: tensor
            for name, tensor in tensors.items()
            if name.startswith(f"{key}|")
        }
        rebuilt[key] = cls.__tensor_unflatten__(
            inner, [_from_json(one) for one in attributes], None, None
        )
    return rebuilt


def _to_json(value: Any) -> Any:
    return {"dtype": str(value).removeprefix("torch.")} if isinstance(value, torch.dtype) else value


def _from_json(value: Any) -> Any:
    return getattr(torch, value["dtype"]) if isinstance(value, dict) else value
