"""A model whose weights are divided over ranks, as a training loop sees it: each rank trains its
rows, as plain tensors.

FSDP2 gathers a block's weights while it runs, and leaves each rank the sum of the gradients of its
rows. Everything else (optimizer, average, clipping, saves) would have to know of DTensors, so it
gets the rows themselves, which share the DTensors' memory.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from ditkit_core.distributed.division import Division, Rows, mesh_of
from ditkit_core.distributed.fsdp import count_exchanges, divide_sums
from ditkit_core.distributed.ranks import WITHOUT_LIMIT, Ranks, distributed
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import StagedModel

T = TypeVar("T")


class Shards:
    """The rows of a model's weights that this rank has; it divides the model when it is made,
    unless that is done.

    Attributes:
        trained: The trained parameters by name as the model has them: divided ones are DTensors.
        local: The trained parameters by name: the rows of this rank, or the whole tensor where
            every rank has it.
        rows: By name, which rows those are, of the divided ones.
        ranks: The processes that divide the model.
    """

    def __init__(
        self,
        model: StagedModel,
        trained: Mapping[str, nn.Parameter],
        precision: Precision,
        ranks: Ranks,
        device: torch.device,
        division: Division | None = None,
    ):
        """Divide a model, unless that is done, and move to the device what is not divided.

        Args:
            model: The model, adapters included, on the host or the device.
            trained: Its trained parameters, by name.
            precision: Its precision: gradients are summed over ranks in `precision.reduction`.
            ranks: The processes that train; `ranks.shard` of them divide the weights.
            device: This rank's, where the rows go.
            division: The model's, if it is divided.
        """
        self._division = division or Division(model, trained, precision, ranks, device)
        self._division.finish()
        root: Any = model
        # Samples of other ranks may have conditions whose layers this rank's samples do not use.
        # torch 2.11 cannot do this.
        if (reduce_unused := getattr(root, "set_reduce_scatter_unused_params", None)) is not None:
            reduce_unused(True)
        # Also has FSDP2 take over rows that were read after it had divided the model. It pads the
        # rows of a rank with fewer than others, which are in other memory from then on: in the
        # first forward that would be too late for `local`.
        root.to(device)
        count_exchanges(root, ranks, self._division.replicas)
        self._root, self.ranks, self._group = root, ranks, self._division.group
        # A block may return a part of the carry that it was given, which nothing writes into: FSDP2
        # warns of each.
        warnings.filterwarnings(
            "ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning
        )
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._weights = dict(model.named_parameters())
        self.trained: dict[str, Any] = {
            name: self._weights[path] for name, path in self._division.paths.items()
        }
        self.local: dict[str, nn.Parameter] = {}
        self.rows: dict[str, Rows] = {}
        for name, parameter in self.trained.items():
            self.local[name] = parameter
            if isinstance(parameter, DTensor):
                self.rows[name] = self._division.rows_of(parameter)
                self.local[name] = nn.Parameter(parameter.to_local().detach())
                self.local[name].grad_dtype = parameter.grad_dtype

    @cached_property
    def for_files(self) -> Ranks:
        """The ranks, as a thread that writes files may use them while training goes on; all of them
        ask for it at once.

        Over a group of its own: nothing else may be exchanged on it.
        """
        channel = distributed().new_group(backend="gloo", timeout=WITHOUT_LIMIT)
        return replace(self.ranks, channel=channel, seconds_waited=0.0, bytes_sent=0)

    def local_parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The memory that this rank has of the model's tensors: its rows, or all. What it gathered
        for a forward is freed."""
        self.changed()
        return [self._division.local_values(tensor) for tensor in tensors]

    def elements(self, name: str) -> tuple[int, int]:
        """The place of this rank's first element in the whole parameter, and the number of elements
        of that."""
        rows = self.rows.get(name)
        if rows is None:
            return 0, self.local[name].numel()
        width = self.trained[name].numel() // rows.of
        return rows.first * width, rows.of * width

    def begin(self, *, last: bool) -> None:
        """Prepare a backward of a step. Gradients are summed over ranks in the last one of a step,
        if adapters are trained.

        The gradients of a full fine-tune are summed in each: until they are, every rank has the
        gradients of all weights.
        """
        frozen = len(self.trained) < len(self._weights)
        self._root.set_requires_gradient_sync(last or not frozen)

    def divide_gradients_by(self, divisor: int) -> None:
        """Divide sums of gradients over ranks by this number: 1 keeps the sum, as a step of
        `train_step.py` needs it; their number averages, as in loops that compute a mean on each
        rank."""
        divide_sums(self._root, divisor)

    def on_first(self, work: Callable[[], T]) -> T:
        """Do some work on the first rank, for which all gather weights; all ranks call it.

        Returns:
            What it returned, on all ranks.
        """
        return self.ranks.on_first(work, self.help)

    def take_gradients(self) -> None:
        """Give `local` the gradients that the backwards left, summed over ranks."""
        for name in self.rows:
            parameter = self.trained[name]
            self.local[name].grad = (
                None if parameter.grad is None else parameter.grad.to_local().detach()
            )
            parameter.grad = None
        # Whole ones are averaged, because that can be repeated in each backward of a step.
        factor = self.ranks.size // self.ranks.context
        for name, parameter in self.local.items():
            if name not in self.rows and parameter.grad is not None:
                parameter.grad.mul_(factor)

    def drop_gradients(self) -> None:
        """Free what a step that failed left."""
        self._root.zero_grad(set_to_none=True)

    def not_finite(self) -> set[str]:
        """The model's own names of its weights that have a value on any rank that is not finite."""
        paths = []
        for path, weight in self._weights.items():
            values = self._division.local_values(weight)
            if values.is_floating_point() and values.itemsize > 1 and not values.isfinite().all():
                paths.append(path)
        return {path for rank_paths in self.ranks.all_gather_object(paths) for path in rank_paths}

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The norm of all gradients together, from the local ones by name."""
        squares = torch.stack(
            torch._foreach_norm(list(gradients.values()), dtype=torch.float64)
        ).square()
        divided = torch.tensor([name in self.rows for name in gradients], device=squares.device)
        divided_sum = torch.where(divided, squares, 0).sum()
        total = (
            self.ranks.all_reduce(divided_sum, self._group) + torch.where(divided, 0, squares).sum()
        )
        return total.sqrt().float()

    def changed(self) -> None:
        """Have the next forward gather weights again: values of `local` were exchanged outside of a
        step."""
        for unit in self._units:
            unit.reshard()

    def unsharded(self, groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Tensors of a state, by group and `parameter` or `parameter|entry`, with all rows; on the
        first rank's host, others get none of those."""
        return {group: dict(self._gathered(tensors)) for group, tensors in groups.items()}

    def read(self, key: str, file: Any) -> Tensor:
        """The rows of this rank of a tensor of a state, from its open `safetensors` file."""
        part = file.get_slice(key)
        rows = self._rows_of_state(key, part.get_shape())
        values: Tensor = (
            file.get_tensor(key) if rows is None else part[rows.first : rows.first + rows.number]
        )
        return values.clone()

    def part(self, groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, tuple[Tensor, int]]:
        """Copies on the host of what this rank writes of a state, by `group/key`, each with its
        first row in the whole.

        Replicas of the rows, and what all ranks have, are written by one rank each, so that these
        share the work.
        """
        replica, copies = self.ranks.rank // self.ranks.shard, dict[str, tuple[Tensor, int]]()
        paths = (
            (f"{group}/{key}", key, tensor)
            for group, tensors in groups.items()
            for key, tensor in tensors.items()
        )
        for index, (path, key, tensor) in enumerate(paths):
            rows = self._rows_of_local(key, tensor)
            if rows is None and index % self.ranks.size == self.ranks.rank:
                copies[path] = tensor.detach().to("cpu", copy=True), 0
            elif rows is not None and rows.number and index % self._division.replicas == replica:
                copies[path] = tensor.detach().to("cpu", copy=True), rows.first
        return copies

    def place_for(self, key: str, meta_tensor: Tensor) -> Tensor:
        """Host memory for a tensor of a state that torch.distributed.checkpoint reads;
        `meta_tensor` is on `meta`."""
        rows = self._rows_of_state(key, meta_tensor.shape)
        if rows is None:
            return torch.empty_like(meta_tensor, device="cpu")
        return self._dtensor(
            torch.empty((rows.number, *meta_tensor.shape[1:]), dtype=meta_tensor.dtype),
            meta_tensor.shape,
        )

    @staticmethod
    def rows_in(tensor: Tensor) -> Tensor:
        """The memory of what `place_for` made."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def _dtensor(self, rows: Tensor, shape: Sequence[int]) -> DTensor:
        stride = torch.empty(shape, device="meta").stride()
        mesh = mesh_of("cpu", self.ranks)
        placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
        # On the host's mesh: files are read and written there.
        return DTensor.from_local(
            rows.cpu(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    def _rows_of_local(self, key: str, tensor: Tensor) -> Rows | None:
        """Which rows a tensor of this rank's state has; None if it is whole, as a count of steps
        is."""
        name = key.partition("|")[0]
        return (
            self.rows[name]
            if name in self.rows and tensor.shape == self.local[name].shape
            else None
        )

    def _rows_of_state(self, key: str, shape: Sequence[int]) -> Rows | None:
        """Which rows this rank needs of a saved tensor; None if it needs the whole."""
        name = key.partition("|")[0]
        return (
            self.rows[name]
            if name in self.rows and tuple(shape) == tuple(self.trained[name].shape)
            else None
        )

    def _gathered(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for key, tensor in tensors.items():
            rows = self._rows_of_local(key, tensor)
            gathered = tensor if rows is None else self._gather(tensor.detach(), rows)
            if gathered is not None:
                yield key, gathered

    def _gather(self, tensor: Tensor, rows: Rows) -> Tensor | None:
        """All rows of a tensor, on the first rank's host; None on others."""
        if self.ranks.rank >= self.ranks.shard:
            return None  # a replica of the first ranks
        most = -(-rows.of // self.ranks.shard)
        # As bytes: gloo and NCCL know few of the dtypes of quantized weights.
        flat = tensor.contiguous().view(torch.uint8).reshape(-1)
        width = math.prod(tensor.shape[1:]) * tensor.element_size()
        padded = flat.new_zeros(most * width)
        padded[: flat.numel()] = flat
        rank_rows = (
            [torch.empty_like(padded) for _ in range(self.ranks.shard)]
            if self.ranks.is_first
            else None
        )
        self.ranks.gather(padded, rank_rows, self._group)
        if rank_rows is None:
            return None
        joined = torch.cat(rank_rows)[: rows.of * width].cpu()
        return joined.view(tensor.dtype).reshape(rows.of, *tensor.shape[1:])

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Inside the block the first rank's model has its trained weights whole on the host, to
        read and not to run.

        The first rank calls it in work that the others help with (`Ranks.on_first`).
        """
        self.ranks.ask("trained weights")
        with self._with_weights(self._gather_trained()):
            yield

    @contextmanager
    def whole_in(self, module: nn.Module) -> Iterator[None]:
        """Inside the block the first rank's model has all weights of one of its modules whole on
        the host, as in `readable`."""
        start = next(name for name, submodule in self._root.named_modules() if submodule is module)
        paths = [
            f"{start}.{name}"
            for name, weight in module.named_parameters()
            if isinstance(weight, DTensor)
        ]
        with self._with_weights((path, self._ask_for(path)) for path in paths):
            yield

    @contextmanager
    def one_by_one(self, is_small: Callable[[str], bool]) -> Iterator[Callable[[str], Tensor]]:
        """Inside the block the first rank's model has its small weights whole on the host, and the
        shapes of its other ones, on `meta`.

        It yields a function that gathers a weight by its path: no host has more than one of the
        large ones. As `readable`, the first rank calls it in work that the others help with.

        Args:
            is_small: Whether a weight of this path is one of an adapter.
        """
        divided = {
            path: weight for path, weight in self._weights.items() if isinstance(weight, DTensor)
        }
        with self._with_weights(
            (
                path,
                self._ask_for(path)
                if is_small(path)
                else torch.empty(weight.shape, dtype=weight.dtype, device="meta"),
            )
            for path, weight in divided.items()
        ):
            yield self._ask_for

    def _ask_for(self, path: str) -> Tensor:
        """A whole weight, which all ranks gather on the first rank's host."""
        self.ranks.ask(_ONE + path)
        weight = self._gather_weight(path)
        assert weight is not None
        return weight

    @contextmanager
    def _with_weights(self, values: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
        """Inside the block the model has these weights in place of divided ones."""
        before = []
        for path, weight in values:
            module, _, attribute = path.rpartition(".")
            owner = self._root.get_submodule(module)
            divided = owner._parameters[attribute]
            before.append((owner, attribute, divided))
            owner._parameters[attribute] = nn.Parameter(weight, requires_grad=divided.requires_grad)
        try:
            yield
        finally:
            for owner, attribute, parameter in before:
                owner._parameters[attribute] = parameter

    def help(self, request: str) -> None:
        """Take part in what the first rank does alone: gather weights for a file."""
        if request.startswith(_ONE):
            self._gather_weight(request.removeprefix(_ONE))
            return
        for _ in self._gather_trained():
            raise AssertionError("only the first rank has them")

    def _gather_trained(self) -> Iterator[tuple[str, Tensor]]:
        trained = {id(parameter) for parameter in self.trained.values()}
        for path, weight in self._weights.items():
            if isinstance(weight, DTensor) and id(weight) in trained:
                gathered = self._gather_weight(path)
                if gathered is not None:
                    yield path, gathered

    def _gather_weight(self, path: str) -> Tensor | None:
        """A whole weight, on the first rank's host; None on others."""
        self.changed()
        weight = self._weights[path]
        assert isinstance(weight, DTensor)
        return self._gather(weight.to_local().detach(), self._division.rows_of(weight))


_ONE = "weight "
"""What the request for one weight begins with; its path follows."""
