"""Divides the rows of a model's parameters over ranks, before or after it has values.

A model on `meta` is divided first, and then each rank reads its own rows (`weights/rows.py:
RowReader`): no host ever has the whole model.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from ditkit_core.distributed.fsdp import check_reduced, divide, reduce_whole
from ditkit_core.distributed.ranks import WITHOUT_LIMIT, Ranks, distributed
from ditkit_core.models.precision import Precision, precision_of
from ditkit_core.models.protocol import StagedModel


class Rows(NamedTuple):
    """The part of a weight's rows that a rank has: all ranks but the last ones have equally
    many."""

    first: int
    number: int
    of: int
    """Rows of the whole weight."""


class Division:
    """How the rows of a model's parameters are divided; it divides the model when it is made.

    Attributes:
        paths: The model's own name of each trained parameter.
        replicas: Number of copies of the divided model.
        group: The ranks that divide it.
        ranks: All of them.
    """

    def __init__(
        self,
        model: StagedModel,
        trained: Mapping[str, nn.Parameter],
        precision: Precision,
        ranks: Ranks,
        device: torch.device,
    ):
        """Divide a model, module by module, so that the device never has more than one of them
        whole.

        Args:
            model: The model, adapters included, on `meta`, the host or the device; on `meta` in the
                dtypes that it will have.
            trained: Its trained parameters, by name.
            precision: Its precision: gradients are summed over ranks in `precision.reduction`.
            ranks: The processes that train; `ranks.shard` of them divide the weights.
            device: This rank's, where the rows go.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.paths = {name: names[id(parameter)] for name, parameter in trained.items()}
        self._accumulation, self._reduction = (
            precision_of(model.embed).accumulation,
            precision.reduction,
        )
        for parameter in trained.values():
            # before FSDP2 takes over: it casts the sum over ranks to this dtype
            self._set_grad_dtype(parameter)
        self.replicas = ranks.size // ranks.shard
        mesh = mesh_of(device.type, ranks)
        self._model, self.ranks, self.group = model, ranks, mesh.get_group("shard")
        self._mesh = mesh if self.replicas > 1 else mesh["shard"]
        self._unsharded = [
            names[id(parameter)]
            for parameter in divide(model, precision, self._mesh, sum_over=ranks.context)
        ]

    def _set_grad_dtype(self, parameter: nn.Parameter) -> None:
        wide = torch.float32 if parameter.dtype == torch.bfloat16 else parameter.dtype
        parameter.grad_dtype = self._accumulation or wide

    def finish(self) -> None:
        """Have the gradients of what stayed whole summed over ranks, once the model has values."""
        parameters = dict(self._model.named_parameters())
        unsharded = [parameters[path] for path in self._unsharded]
        for parameter in unsharded:
            self._set_grad_dtype(parameter)
        if unsharded:
            reduce_whole(unsharded, self._mesh, self._reduction)
        check_reduced(self._model)

    def rows_of(self, parameter: DTensor) -> Rows:
        """FSDP2 gives each rank equally many rows, rounded up, so that the last ranks may have
        fewer or none."""
        rows_per_rank, of = self.rows_each(parameter), len(parameter)
        first = min(of, distributed().get_rank(self.group) * rows_per_rank)
        local = len(parameter.to_local())
        assert local == min(rows_per_rank, of - first), (local, first, of)
        return Rows(first, local, of)

    def rows_each(self, parameter: Tensor) -> int:
        """Number of rows of a parameter on each rank; the last ranks may have fewer, or none."""
        return -(-len(parameter) // self.ranks.shard)

    def rows(self, parameter: Tensor | None) -> range | None:
        """The rows of a parameter that this rank has; None if it has all, or it is no parameter."""
        if not isinstance(parameter, DTensor):
            return None
        first, number, _ = self.rows_of(parameter)
        return range(first, first + number)

    @staticmethod
    def local_values(parameter: Tensor) -> Tensor:
        """The values of a parameter that this rank has: its rows, or all."""
        local: Tensor = (
            parameter.to_local() if isinstance(parameter, DTensor) else parameter
        ).detach()
        return local

    def put(self, module: nn.Module, leaf: str, rows: Tensor) -> None:
        """Give a divided parameter its rows."""
        old = module._parameters[leaf]
        assert isinstance(old, DTensor) and rows.dtype == old.dtype, (leaf, rows.dtype)
        value = DTensor.from_local(
            rows.contiguous(),
            old.device_mesh,
            old.placements,
            run_check=False,
            shape=old.shape,
            stride=old.stride(),
        )
        module._parameters[leaf] = nn.Parameter(value, requires_grad=old.requires_grad)

    def put_whole(self, module: nn.Module, leaf: str, value: Tensor) -> None:
        """Give a parameter its values; this rank keeps its rows of them if the parameter is
        divided."""
        old = module._parameters[leaf]
        assert old is not None and old.shape == value.shape
        if (rows := self.rows(old)) is None:
            module._parameters[leaf] = nn.Parameter(value, requires_grad=old.requires_grad)
        else:
            self.put(module, leaf, value[rows.start : rows.stop].clone())

    def gather(self, values: Tensor, first: int, count: int) -> Tensor:
        """All `count` rows of a parameter, from each rank's `values`, which are its rows from
        `first` on; all ranks call it for the same."""
        gathered = values.new_zeros(count, *values.shape[1:])
        gathered[first : first + len(values)] = values
        return self.ranks.all_reduce(gathered, self.group)


def mesh_of(kind: str, ranks: Ranks) -> DeviceMesh:
    """Ranks by replica and by part of the weights, in groups whose exchanges wait however long, as
    all of a run do.

    Made once: all ranks have to ask for it at the same time, and each group keeps its connections
    until the process ends.
    """
    key = f"{kind} {ranks.shard}"
    if key not in ranks.meshes:
        names = ("replicate", "shard")
        ranks.meshes[key] = init_device_mesh(
            kind, (ranks.size // ranks.shard, ranks.shard), mesh_dim_names=names
        )
        # torch gives groups of a mesh its default limit of 30 minutes. Earlier versions have the
        # function under another name.
        set_timeout = (
            getattr(distributed(), "set_timeout", None) or distributed_c10d._set_pg_timeout
        )
        for name in names:
            set_timeout(WITHOUT_LIMIT, ranks.meshes[key].get_group(name))
    mesh: DeviceMesh = ranks.meshes[key]
    return mesh
