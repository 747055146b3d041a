"""Bytes by device and purpose, current and peak, of real or fake tensors.

Under `FakeTensorMode` the devices `cpu:0`, `cpu:1`, … are distinct, refuse to mix, and support a
backward, so they stand for GPUs on a machine without any. A storage counts from the operation that
allocates it until its last tensor is freed.
"""

import math
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, register_flop_formula

from ditkit_core.nn.context import as_on
from ditkit_core.nn.kernels import ops  # noqa: F401, declares the operations that are counted here
from ditkit_core.planner.repeated_fakes import RepeatedFakes

_HOST = torch.device("cpu")
_DEVICE_OF = torch.ops.prim.device.default
"""What torch asks of fake tensors twice as often as it computes with them."""
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_COUNTED_AS = {
    torch.ops.aten.addmm_: torch.ops.aten.addmm,
    torch.ops.aten._int_mm: torch.ops.aten.mm,
}
"""Operations whose arithmetic torch counts under another name, or not at all."""

# torch 2.11 counts attention on GPUs alone. Registered, it counts for torch's own counter too,
# which the audit uses.
for _on_cpu, _on_gpu in {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: torch.ops.aten._scaled_dot_product_flash_attention_backward,
}.items():
    if _on_cpu not in flop_registry:
        register_flop_formula(_on_cpu, get_raw=True)(flop_registry[_on_gpu])


@register_flop_formula(
    [torch.ops.ditkit.add_product, torch.ops.ditkit.multiply_codes], get_raw=True
)
def _flops_of_products(*operands: Any, out_val: Any = None, **named: Any) -> int:
    """Of our own products, which only Hopper GPUs run: (total, left, right) and (left, transposed
    right, ..)."""
    left, right = (
        operands[1:3] if operands[0].dtype == operands[2].dtype else (operands[0], operands[1].T)
    )
    return 2 * len(left) * left.shape[1] * right.shape[1]


class TooMuchMemory(Exception):
    """A device has more bytes than a limit."""

    def __init__(self, num_bytes: int):
        super().__init__(num_bytes)
        self.num_bytes = num_bytes


class MemoryTracker(TorchDispatchMode):
    """A dispatch mode that counts the memory of each device while it is active.

    Attributes:
        live: Bytes by device and purpose.
        peak: The most bytes that were alive at once, by device, since `restart_peak`.
        at_peak: Bytes by device and purpose when the device's peak was reached.
        limits: Bytes by device; the operation that allocates more raises `TooMuchMemory`.
    """

    def __init__(self, *, rounding: int = 1) -> None:
        """Start with no memory counted.

        Args:
            rounding: Storages are rounded up to a multiple of this many bytes, 512 for CUDA's
                allocator.
        """
        super().__init__()
        self.live: dict[torch.device, Counter[str]] = {}
        self.peak: Counter[torch.device] = Counter()
        self.at_peak: dict[torch.device, Counter[str]] = {}
        self.limits: dict[torch.device, int] = {}
        self._total: Counter[torch.device] = Counter()
        self._rounding = rounding
        self._purpose = "activations"
        # by the storage's address: device, purpose, bytes counted, and the reference that says when
        # it is freed
        self._known: dict[int, tuple[torch.device, str, int, weakref.ref[UntypedStorage]]] = {}
        self._elastic: dict[int, weakref.ref[UntypedStorage]] = {}

    def total(self, device: torch.device) -> int:
        """Bytes alive on a device."""
        return self._total[device]

    def bytes_of(self, tree: Any) -> int:
        """Bytes of the tensors in a tree; each storage counts once."""
        storages = {
            storage._cdata: storage.nbytes()
            for storage in (leaf.untyped_storage() for leaf in _tensors(tree))
        }
        return sum(map(self.rounded, storages.values()))

    def track(self, tree: Any, purpose: str) -> None:
        """Count existing tensors, or change their purpose: a module, a tensor, or a tree of
        tensors."""
        for leaf in _tensors(
            [*tree.parameters(), *tree.buffers()] if isinstance(tree, nn.Module) else tree
        ):
            storage = leaf.untyped_storage()
            entry = self._known.get(storage._cdata)
            if entry is None or entry[1:3] != (purpose, self.rounded(storage.nbytes())):
                # Forgotten first, because `_add` skips storages that it knows.
                self._forget(storage._cdata)
                self._add(leaf, purpose)

    def watch(self, tensor: Tensor) -> None:
        """Follow the size of a storage that is resized in place, which no dispatched operation
        shows."""
        storage = tensor.untyped_storage()
        self._elastic[storage._cdata] = weakref.ref(storage)

    @contextmanager
    def purpose(self, name: str) -> Iterator[None]:
        """Tensors that are created inside the block have this purpose; those outside of any are
        activations."""
        before, self._purpose = self._purpose, name
        try:
            yield
        finally:
            self._purpose = before

    def restart_peak(self) -> None:
        """Measure the peak from now on."""
        self.peak = Counter(self._total)
        self.at_peak = {device: Counter(purposes) for device, purposes in self.live.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Before an operation whose outputs would otherwise raise a peak with storages that are
        # empty by now; a view allocates nothing.
        if self._elastic and not func.is_view:
            self.poll()
        out = func(*args, **(kwargs or {}))
        for leaf in _tensors(out):
            self._add(leaf, self._purpose)
        return out

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled under it, and torch's guard against its compiler costs as much as the
        rest of a small operation."""
        return False

    def poll(self) -> None:
        """Read the sizes of storages that are resized in place. Shrunk ones are counted before
        grown ones, so that no false peak appears."""
        changes: list[tuple[int, int]] = []
        for address, reference in list(self._elastic.items()):
            storage, entry = reference(), self._known.get(address)
            if storage is None or entry is None:
                self._elastic.pop(address)
            elif change := self.rounded(storage.nbytes()) - entry[2]:
                changes.append((change, address))
        for change, address in sorted(changes):
            device, purpose, size, freed = self._known[address]
            self._known[address] = (device, purpose, size + change, freed)
            self._count(device, purpose, change)

    def _add(self, tensor: Tensor, purpose: str) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        # A view or an in-place result: its storage is counted already.
        if address in self._known:
            return
        size = self.rounded(storage.nbytes())
        freed = weakref.ref(storage, lambda _: self._forget(address))
        self._known[address] = (tensor.device, purpose, size, freed)
        self._count(tensor.device, purpose, size)

    def _forget(self, address: int) -> None:
        if (entry := self._known.pop(address, None)) is not None:
            self._count(entry[0], entry[1], -entry[2])

    def _count(self, device: torch.device, purpose: str, size: int) -> None:
        self.live.setdefault(device, Counter())[purpose] += size
        self._total[device] += size
        if self._total[device] > self.peak[device]:
            self.peak[device] = self._total[device]
            self.at_peak[device] = Counter(self.live[device])
            if self._total[device] > self.limits.get(device, math.inf):
                raise TooMuchMemory(self._total[device])

    def rounded(self, size: int) -> int:
        """Bytes that a storage of this size counts."""
        return -(-size // self._rounding) * self._rounding


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors of a tree that own a storage; of wrapper tensors, such as 8-bit optimizer state,
    the inner tensors."""
    for leaf in _leaves(tree):
        if is_traceable_wrapper_subclass(leaf):
            yield from _tensors([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        else:
            yield leaf


def _leaves(tree: Any) -> list[Tensor]:
    """The tensors of an argument or a result, mostly a single one or a list: a plan spent a tenth
    of its time in torch's general trees."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, list | tuple):
        return [leaf for part in tree for leaf in _leaves(part)]
    if tree is None or isinstance(tree, bool | int | float | torch.dtype | torch.device):
        return []
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def fake_tensors(kind: str) -> Iterator["Meter"]:
    """A context of tensors without memory, counted as on a kind of device, `cuda` or `cpu`; the
    process's random generator is restored."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # torch_remat and libraries compare data pointers, which fake tensors lack
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        # torchao compiles its step, which does not work with fake tensors
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(as_on(kind))
        stack.enter_context(RepeatedFakes())
        yield stack.enter_context(Meter(kind))


class Kernel(NamedTuple):
    """The work of one operation."""

    kind: str
    """`matmul_16` and `matmul_32` (bits of its inputs), `matmul_int8`, `matmul_fp8`, and with
    `_scaled` where a kernel may apply the scales of codes too, which else are a pass of kind
    `scales`; `attention`, `attention_backward`, and with `_32` where their inputs are fp32; of all
    else `fused` for the kernels of `nn/kernels`, `conversion` for those that read quantized
    weights, `transfer` for copies between devices, and `elementwise`."""
    flops: int
    """Of matmuls and attention; 0 for all else."""
    bytes: int
    """Read and written in the device's memory: each input once, each output once."""


KernelCounts = frozenset[tuple[Kernel, int]]
"""Kernels and how often each runs. A frozenset remembers its hash, so that times of the same
kernels are looked up."""


def flops_in(kernels: Iterable[tuple[Kernel, int]]) -> int:
    """Floating-point operations of matmuls and attention."""
    return sum(kernel.flops * count for kernel, count in kernels)


class Meter(MemoryTracker):
    """Also counts kernels with their work, and the memory that a GPU's attention allocates inside
    of one operation.

    Attributes:
        kernels: How often each kernel ran; a view, and memory without contents, is none.
    """

    def __init__(self, kind: str) -> None:
        """Start with nothing counted, for fake devices of a kind: CUDA's allocator hands out
        multiples of 512 bytes."""
        super().__init__(rounding=512 if kind == "cuda" else 1)
        self.kernels = Counter[Kernel]()
        self.is_updating = False
        """Whether an optimizer runs. It reads scalars, which fake tensors lack; any value works,
        because none decides a branch."""
        self._kind = kind
        self._product: tuple[int, Kernel] | None = None
        """The last product of codes, with the storage of its sums."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if self.is_updating:
            if func is torch.ops.aten._local_scalar_dense.default:
                return args[0].dtype.is_floating_point * 1.0 or 1
            args = _on_one_device(func, args)
        # The kernel allocates it without a dispatch, so it is allocated here for the length of the
        # operation.
        workspace = None
        if func is _ATTENTION_BACKWARD and self._kind == "cuda":
            workspace = self._flash_workspace(args[1])
        out = super().__torch_dispatch__(func, types, args, kwargs)
        count = flop_registry.get(_COUNTED_AS.get(func._overloadpacket, func._overloadpacket))
        flops = 0 if count is None else count(*args, **(kwargs or {}), out_val=out)
        if moved := _traffic(func, args, kwargs or {}, out):
            kind = _kind_of_product(func, args) if flops else _kind_of_pass(func, args, out)
            self._note(Kernel(kind, flops, moved), func, args, (kwargs or {}).get("out", out))
        del workspace
        return out

    def _note(self, kernel: Kernel, func: Any, args: Any, out: Any) -> None:
        """Count a kernel. A product of codes is named anew where a pass over its sums applies
        scales and one kernel could have done both."""
        if kernel.kind in ("matmul_int8", "matmul_fp8"):
            self._product = (_leaves(out)[0].untyped_storage()._cdata, kernel)
        elif func is torch.ops.ditkit.apply_scales.default and self._product is not None:
            (sums, *_, bias), (storage, product) = args, self._product
            # As `nn/eight_bit_products.py` chooses on Hopper.
            is_plain = sums.dtype == torch.int32 or (bias is None and out.dtype == torch.bfloat16)
            if sums.untyped_storage()._cdata == storage and is_plain:
                self.kernels[product] -= 1
                # drops what is not there any more
                self.kernels += Counter({product._replace(kind=f"{product.kind}_scaled"): 1})
                kernel = kernel._replace(kind="scales")
        self.kernels[kernel] += 1

    def _flash_workspace(self, query: Tensor) -> Tensor | None:
        """The accumulator of the query's gradient: FlashAttention 2 keeps it in fp32, padded to its
        tiles."""
        if query.dtype not in (torch.bfloat16, torch.float16):
            return None
        batch, heads, rows, features = query.shape
        accumulator = torch.empty(
            batch,
            heads,
            -(-rows // 128) * 128,
            -(-features // 32) * 32 + 1,
            dtype=torch.float32,
            device=query.device,
        )
        self._add(accumulator, "activations")
        return accumulator


def _kind_of_product(func: Any, args: Any) -> str:
    name, first = func._overloadpacket.__name__, _leaves(args)[0]
    if "attention" in name:
        return f"attention{'_backward' * ('backward' in name)}{'_32' * (first.dtype.itemsize > 2)}"
    if first.dtype.itemsize == 1:
        scaled = "_scaled" * (name == "multiply_codes")
        return f"matmul_{'int8' if first.dtype == torch.int8 else 'fp8'}{scaled}"
    return "matmul_16" if first.dtype.itemsize == 2 else "matmul_32"


def _kind_of_pass(func: Any, args: Any, out: Any) -> str:
    if func.namespace == "ditkit":
        return "conversion" if func._overloadpacket.__name__.startswith("dequantize") else "fused"
    if (
        "copy" in func._overloadpacket.__name__
        and len({x.device for x in (*_leaves(args), *_leaves(out))}) > 1
    ):
        return "transfer"
    return "elementwise"


def _traffic(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes that an operation reads and writes; 0 where it only makes a view or reserves memory."""
    if (roles := _roles(func)) is None:
        return 0
    written, read = list[Tensor](), list[Tensor]()
    for position, (name, is_written, is_read) in enumerate(roles):
        argument = args[position] if position < len(args) else kwargs.get(name)
        if argument is None or isinstance(argument, (bool, int, float, torch.dtype)):
            continue
        tensors = _leaves(argument)
        written += tensors if is_written else []
        read += tensors if is_read else []
    storages = {x.untyped_storage()._cdata for x in (*written, *read)}
    written += [x for x in _leaves(out) if x.untyped_storage()._cdata not in storages]
    if not written:
        return 0
    if func._overloadpacket.__name__ in _FROM_A_VALUE:
        read = []
    # An input that is given twice is read once.
    unique = {
        (x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()): x for x in read
    }
    return sum(map(_touched, (*written, *unique.values())))


@cache
def _roles(func: Any) -> list[tuple[str, bool, bool]] | None:
    """For each argument of an operation its name, whether it is written, and whether it is read;
    None if no contents are."""
    name, roles = func._overloadpacket.__name__, []
    if name in _WITHOUT_CONTENTS or func.is_view:
        return None
    for spec in func._schema.arguments:
        is_written = spec.alias_info is not None and spec.alias_info.is_write
        # Only written: a result that was passed in, and the target of a copy.
        roles.append(
            (spec.name, is_written, not (is_written and (spec.kwarg_only or name in _OVERWRITE)))
        )
    return roles


_OVERWRITE = ("copy_", "fill_", "zero_")
_FROM_A_VALUE = ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
"""Take from their input the device and dtype, and some the shape, but no value."""
_WITHOUT_CONTENTS = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_local_scalar_dense",
)


def _touched(x: Tensor) -> int:
    """Bytes of the distinct elements of a tensor: an expanded axis is read once."""
    return x.itemsize * math.prod(
        size for size, stride in zip(x.shape, x.stride(), strict=True) if stride
    )


def _on_one_device(func: Any, args: Any) -> Any:
    """The arguments on one device: `torch.tensor` puts tables on the host, because fake devices are
    CPUs whose index it ignores."""
    tensors = [leaf for leaf in _leaves(args) if leaf.ndim]
    for wrapper in filter(is_traceable_wrapper_subclass, tensors):
        for name in wrapper.__tensor_flatten__()[0]:
            if (inner := getattr(wrapper, name)).device == _HOST:
                setattr(wrapper, name, torch.empty_like(inner, device=wrapper.device))
    elsewhere = [tensor.device for tensor in tensors if tensor.device != _HOST]
    if not elsewhere or len(elsewhere) == len(tensors) or "copy" in func._overloadpacket.__name__:
        return args
    return tree_map_only(
        Tensor,
        lambda x: torch.empty_like(x, device=elsewhere[0]) if x.ndim and x.device == _HOST else x,
        args,
    )
