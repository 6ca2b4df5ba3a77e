"""Makes parameters and buffers equal on all processes before training starts.

Processes that build the model with different seeds get different initial values. The differences
would remain during training, because all copies of a parameter are updated with the same gradients.
To find them, each rank sends a checksum of each tensor to all ranks. Only tensors whose checksums
differ are sent::

    replica 0 ──broadcast──> other replicas, same position in the pipeline
    first position with the tensor ──> other positions with the tensor
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from megatron.adaptive.config.input_files import printable
from megatron.adaptive.engine.process_context import is_alone
from megatron.adaptive.modules.mesh import Mesh

_INTEGER_BYTES = 8
_LARGE = 65_536
"""Maximum size, in integers, of a tensor whose checksum uses a separate factor for each integer."""
_GROUP = 1024
_FACTOR = 6364136223846793005
"""Odd multiplier with random bits, from which the factors of checksums are computed."""


@torch.no_grad()
def equalize(held: Mapping[str, torch.Tensor], shared: Collection[str], mesh: Mesh) -> None:
    """Replaces tensors that differ between processes with the tensors of the first process.

    All ranks must call this. If no tensors differ, only checksums are sent.

    Args:
        held: Parameters and buffers of this rank, keyed by name.
        shared: Names of the parameters that several ranks of a pipeline use.
        mesh: Replica and pipeline position of this process, and its process groups.
    """
    if is_alone() or dist.get_world_size() == 1:
        return
    # If there is only one replica, compare only shared weights and buffers, because all other
    # tensors exist on a single rank.
    compared = {
        name: tensor
        for name, tensor in held.items()
        if tensor.layout == torch.strided
        and (mesh.dp_size > 1 or name in shared or not isinstance(tensor, torch.nn.Parameter))
    }
    rows = mesh.gather((mesh.dp_rank, mesh.pp_rank, _checksums(compared)))
    sums = {(replica, position): of_rank for replica, position, of_rank in rows}
    unequal: set[str] = set()
    for position in range(mesh.pipeline_size):
        names = _differing([sums[replica, position] for replica in range(mesh.dp_size)])
        unequal.update(names)
        if position == mesh.pp_rank:
            for name in names:
                _broadcast(held[name], mesh.dp_group)
    # All replicas now have the values of replica 0, so compare only the ranks of replica 0 with
    # each other.
    of_positions = [sums[0, position] for position in range(mesh.pipeline_size)]
    for name in _differing(of_positions):
        unequal.add(name)
        holders = [position for position, row in enumerate(of_positions) if name in row]
        if mesh.pp_rank in holders:
            _send_to_others(held[name], [mesh.pp_ranks[position] for position in holders])
    if unequal and mesh.is_first:
        others = f" and {len(unequal) - 1} more" if len(unequal) > 1 else ""
        print(
            f"the processes built the model with different values of {printable(min(unequal))}"
            f"{others}; all processes now use the values of the first process that has them",
            flush=True,
        )


def _differing(rows: Sequence[Mapping[str, int]]) -> list[str]:
    """Returns the sorted names of the tensors whose checksums differ between ranks.

    Each item of ``rows`` contains the checksums of one rank, keyed by name.
    """
    sums_of: dict[str, set[int]] = {}
    for row in rows:
        for name, checksum in row.items():
            sums_of.setdefault(name, set()).add(checksum)
    return sorted(name for name, sums in sums_of.items() if len(sums) > 1)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor. The result is a view if the tensor is contiguous."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.reshape(-1).view(torch.uint8)


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Copies ``tensor`` from the first rank of ``group`` to the other ranks of the group."""
    values = tensor.detach().contiguous()
    dist.broadcast(_bytes_of(values), src=dist.get_process_group_ranks(group)[0], group=group)
    tensor.copy_(values)


def _send_to_others(tensor: torch.Tensor, ranks: Sequence[int]) -> None:
    """Copies ``tensor`` from the first of the global ``ranks`` to the other ranks."""
    values = tensor.detach().contiguous()
    first, *others = ranks
    if dist.get_rank() != first:
        dist.recv(_bytes_of(values), src=first)
        tensor.copy_(values)
        return
    for rank in others:
        dist.send(_bytes_of(values), dst=rank)


def _checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Returns the checksum of each tensor, keyed by name."""
    if not tensors:
        return {}
    sums = torch.stack([_checksum(tensor) for tensor in tensors.values()])
    return dict(zip(tensors, sums.tolist(), strict=True))


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a checksum of a tensor's bytes as an int64 scalar on the tensor's device.

    The bytes are read as 64-bit integers. The checksum is the sum of all integers, each multiplied
    by a factor that depends on its index. In large tensors, neighboring integers share a factor, to
    save memory and time. Overflows are ignored.
    """
    data = _bytes_of(tensor.detach())
    if data.storage_offset() % _INTEGER_BYTES:
        data = data.clone()  # Viewing bytes as integers requires aligned memory.
    end = len(data) // _INTEGER_BYTES * _INTEGER_BYTES
    integers = data[:end].view(torch.int64)
    parts = [data[end:].long()]
    if len(integers) > _LARGE:
        count = len(integers) // _GROUP * _GROUP
        parts.append(integers[:count].view(-1, _GROUP).sum(1))
        integers = integers[count:]
    sums = torch.cat([*parts, integers])
    factors = _FACTOR * (2 * torch.arange(len(sums), device=sums.device) + 1)
    return (sums * factors).sum()
