"""Weights from files to parameters: every name and shape accounted for, then one tensor after the other.

A tensor goes from its file to the device and dtype of its parameter before the next one is read, so that the host holds
at most what stays there and one tensor more.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from ditkit_core.errors import UserError
from ditkit_core.model import StateDictNames
from ditkit_core.safetensors_file import SafetensorsSource, StoredTensor


def match(
    source: SafetensorsSource,
    names: StateDictNames,
    wanted: Mapping[str, tuple[int, ...]],
    *,
    ignore: Callable[[str], bool] = lambda name: False,
) -> dict[str, str]:
    """Find each of the model's parameters in a file, in whatever form the file names them.

    Args:
        source: The file.
        names: The model's names.
        wanted: Shape by our name.
        ignore: Names of the file, as written there, that may be left over.

    Returns:
        The file's name by our name.

    Raises:
        UserError: If one is missing, unexpected or mis-shaped: the first ten of each, and the likely reason.
    """
    prefix = _prefix_of(source, names, wanted)
    found: dict[str, str] = {}
    unexpected: list[str] = []
    for key in source.tensors:
        native = names.to_native(key.removeprefix(prefix)) if key.startswith(prefix) else None
        if native is not None and native in wanted and native not in found:
            found[native] = key
        elif not ignore(key):
            unexpected.append(key)
    missing = [name for name in wanted if name not in found]
    misshapen = [
        f"{key} {list(source.tensors[key].shape)} instead of {list(wanted[native])}"
        for native, key in found.items()
        if source.tensors[key].shape != tuple(wanted[native])
    ]
    if missing or unexpected or misshapen:
        lists = "; ".join(
            f"{len(keys)} {what}: {first_ten(keys)}"
            for what, keys in (("missing", missing), ("unexpected", unexpected), ("mis-shaped", misshapen))
            if keys
        )
        natives = [names.to_native(key.removeprefix(prefix)) for key in source.tensors]
        reason = _likely_reason(wanted, [n for n in natives if n is not None], found, unexpected)
        raise UserError(f"{source.path} does not fit the model: {reason}; {lists}")
    return found


def first_ten(items: list[str]) -> str:
    """Up to ten items in one line, and how many more there are."""
    return ", ".join(items[:10]) + (f" and {len(items) - 10} more" if len(items) > 10 else "")


def native_shapes(source: SafetensorsSource, names: StateDictNames) -> dict[str, tuple[int, ...]]:
    """Shapes of a file's tensors by our names; what no form knows is left out."""
    prefix = _prefix_of(source, names, None)
    natives = {
        names.to_native(key.removeprefix(prefix)): stored.shape
        for key, stored in source.tensors.items()
        if key.startswith(prefix)
    }
    return {name: shape for name, shape in natives.items() if name is not None}


def _prefix_of(source: SafetensorsSource, names: StateDictNames, wanted: Mapping[str, object] | None) -> str:
    """The prefix under which most of a file's names are known."""

    def num_known(prefix: str) -> int:
        natives = [names.to_native(key.removeprefix(prefix)) for key in source.tensors if key.startswith(prefix)]
        return sum(native is not None and (wanted is None or native in wanted) for native in natives)

    return max((*names.prefixes, ""), key=num_known)


def _likely_reason(
    wanted: Mapping[str, object], natives: list[str], found: Mapping[str, str], unexpected: list[str]
) -> str:
    if any(key.endswith((".scale_weight", ".weight_scale", "scaled_fp8")) for key in unexpected):
        return "these are scaled 8-bit weights; get the bf16 or fp16 file"
    if len(found) < len(wanted) / 10:
        return "these are weights of another model, or names that are not known here; name another file or preset"
    ours, theirs = _depths(wanted), _depths(natives)
    for group in ours:
        if ours[group] != theirs[group]:
            return (
                f"the preset does not fit the weights, which have {theirs[group]} {group} where it has {ours[group]}; "
                "choose another model.preset"
            )
    return "the preset does not fit the weights; choose another model.preset or other weights"


def _depths(names: Iterable[str]) -> Counter[str]:
    """How many numbered modules each list of modules has: `{"layers": 30}`."""
    numbered = {found[0] for name in names if (found := re.match(r".*?\.\d+(?=\.)", name))}
    return Counter(name.rpartition(".")[0] for name in numbered)


def load_into(
    model: nn.Module,
    source: SafetensorsSource,
    mapping: Mapping[str, str],
    *,
    device_of: Callable[[str], torch.device],
    dtype_of: Callable[[str], torch.dtype],
    edits: Mapping[str, Callable[[Tensor], None]] | None = None,
    on_tensor: Callable[[str, nn.Module], None] | None = None,
) -> None:
    """Put a file's tensors in the place of a model's parameters, in the order in which they lie in the files.

    Parameters that an adapter library moved below a `base_layer` are found by the name that they had before.

    Args:
        model: The model, built on `meta`; each loaded parameter keeps its `requires_grad`.
        source: The file.
        mapping: The file's name by our name, from `match`.
        device_of: Where the parameter of our name goes.
        dtype_of: Its dtype there.
        edits: By our name: changes the tensor in place, on the CPU in fp32, before it is converted and moved.
        on_tensor: Called with our name and the module that holds the parameter, once it is there.

    Raises:
        UserError: If a file ends before its tensor does.
    """
    places = {name.replace(".base_layer.", "."): name for name in model.state_dict()}
    passing, editing = _Scratch(torch.uint8), _Scratch(torch.float32)

    def stored(name: str) -> StoredTensor:
        return source.tensors[mapping[name]]

    for name in sorted(mapping, key=lambda name: (stored(name).file, stored(name).offset)):
        device, dtype = device_of(name), dtype_of(name)
        edit = (edits or {}).get(name)
        if edit is None and device.type == "cpu" and dtype == stored(name).dtype:
            tensor = source.read(mapping[name])
        else:
            tensor = source.read(mapping[name], passing.of(stored(name).num_bytes))
            if edit is not None:
                if tensor.dtype != torch.float32:
                    tensor = editing.of(tensor.numel()).view(tensor.shape).copy_(tensor)
                edit(tensor)
            tensor = tensor.to(device, dtype, copy=True)
        owner, _, leaf = places[name].rpartition(".")
        module = model.get_submodule(owner)
        if leaf in module._parameters:
            old = module._parameters[leaf]
            assert old is not None and old.shape == tensor.shape, f"{name}: {tensor.shape}"
            module._parameters[leaf] = nn.Parameter(tensor, requires_grad=old.requires_grad)
        else:
            module._buffers[leaf] = tensor
        if on_tensor is not None:
            on_tensor(name, module)


class _Scratch:
    """Memory that tensors pass through one after the other.

    Allocating it anew for each would not do: the allocator places what stays into the holes of what passed, finds no
    hole for the next, and the process grows to twice the model (measured).
    """

    def __init__(self, dtype: torch.dtype):
        self._memory = torch.empty(0, dtype=dtype)

    def of(self, num_elements: int) -> Tensor:
        if len(self._memory) < num_elements:
            self._memory = torch.empty(num_elements, dtype=self._memory.dtype)
        return self._memory[:num_elements]
