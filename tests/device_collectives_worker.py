"""Runs one rank of the test of collectives over gloo with GPU tensors.

The process runs all cases one after another. It needs the environment variables that ``torchrun``
sets.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from megatron.adaptive import accelerator, device_collectives
from tests.device_tensor import on_device, values

WORLD_SIZE = 2


def _bucket_group(*, distributed: bool, overlaps: bool):  # type: ignore[no-untyped-def]
    """Returns megatron-core's gradient buckets of two layers, moved to the GPU.

    ``distributed`` turns on the distributed optimizer, and ``overlaps`` overlaps the reduction with
    computation.
    """
    accelerator.install()
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    alone = [dist.new_group([rank]) for rank in range(WORLD_SIZE)][dist.get_rank()]
    groups = ProcessGroupCollection()
    groups.dp = groups.dp_cp = groups.intra_dp_cp = groups.expt_dp = dist.group.WORLD
    groups.intra_expt_dp = dist.group.WORLD
    groups.tp = groups.pp = groups.ep = alone
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, overlap_grad_reduce=overlaps
    )
    core = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    wrapped = DistributedDataParallel(core, config, model, pg_collection=groups)
    (group,) = wrapped.bucket_groups
    for bucket in group.buckets:
        bucket.grad_data = on_device(bucket.grad_data)
        if bucket.param_data is not None:
            bucket.param_data = on_device(bucket.param_data)
    return group


def _gradients(*, distributed: bool, overlaps: bool) -> None:
    """Checks that gradients are averaged over replicas, even if optimizer states are sharded."""
    group = _bucket_group(distributed=distributed, overlaps=overlaps)
    rank = dist.get_rank()
    for bucket in group.buckets:
        bucket.grad_data.copy_(torch.full(bucket.grad_data.shape, 2.0 * rank + 1))
    if overlaps:
        group.start_grad_sync()
    group.finish_grad_sync()
    for bucket in group.buckets:
        buffer = torch.tensor(values(bucket.grad_data)).chunk(WORLD_SIZE)
        parts = [buffer[rank]] if distributed else buffer
        assert all(torch.equal(part, torch.full_like(part, 2.0)) for part in parts), buffer


def _parameters() -> None:
    """Checks that an all-gather of parameters sends each rank's shard to all other ranks."""
    group = _bucket_group(distributed=True, overlaps=False)
    rank = dist.get_rank()
    for bucket in group.buckets:
        part = bucket.param_data.chunk(WORLD_SIZE)[rank]
        part.copy_(torch.full(part.shape, rank + 1.0))
    group.start_param_sync(force_sync=True)
    for bucket in group.buckets:
        for peer, part in enumerate(torch.tensor(values(bucket.param_data)).chunk(WORLD_SIZE)):
            assert torch.equal(part, torch.full_like(part, peer + 1.0))


def _pipeline(batched: bool) -> None:
    """Checks that messages between stages arrive when functions of megatron-core send them."""
    accelerator.install()
    from megatron.core.pipeline_parallel import p2p_communication

    rank = dist.get_rank()
    exchange = p2p_communication._batched_p2p_ops if batched else p2p_communication._p2p_ops
    # Megatron-core receives into leaves that require a gradient, with gradients enabled.
    received = on_device(torch.zeros(2, 3, requires_grad=True))
    assert received.is_leaf
    assert received.requires_grad
    assert torch.is_grad_enabled()
    sent = on_device(torch.full((2, 3), rank + 5.0))
    works = exchange(
        tensor_send_prev=sent if rank == 1 else None,
        tensor_recv_prev=received if rank == 1 else None,
        tensor_send_next=sent if rank == 0 else None,
        tensor_recv_next=received if rank == 0 else None,
        group=dist.group.WORLD,
        prev_pipeline_rank=1 - rank,
        next_pipeline_rank=1 - rank,
    )
    for work in works.values() if isinstance(works, dict) else works:
        work.wait()
    assert values(received) == [[6.0 - rank] * 3] * 2


def _unequal_parts() -> None:
    """Checks that all-gather and reduce-scatter accept tensors of different sizes on the ranks.

    The outputs are leaves that require a gradient.
    """
    rank, sizes = dist.get_rank(), [1, 2]
    sent = on_device(torch.full((sizes[rank], 2), rank + 1.0, requires_grad=True))
    parts = [on_device(torch.zeros(size, 2, requires_grad=True)) for size in sizes]
    # Use the methods of the group, because the functions of torch.distributed may have been
    # replaced.
    group = dist.group.WORLD
    group.allgather([parts], [sent]).wait()
    assert [values(part) for part in parts] == [[[1.0, 1.0]], [[2.0, 2.0]] * 2]
    group.reduce_scatter([sent], [parts]).wait()
    assert values(sent) == [[2.0 * (rank + 1)] * 2] * sizes[rank]


def _coalesced_lists() -> None:
    """Checks that one call of all_gather_coalesced gathers several tensors from each rank."""
    rank = dist.get_rank()
    sent = [on_device(torch.full((size,), rank + 1.0)) for size in (1, 2)]
    parts = [[on_device(torch.zeros(size)) for size in (1, 2)] for _ in range(WORLD_SIZE)]
    dist.all_gather_coalesced(parts, sent)
    assert [[values(part) for part in row] for row in parts] == [
        [[1.0], [1.0, 1.0]],
        [[2.0], [2.0, 2.0]],
    ]


def _gathered_into_one() -> None:
    """Checks that one rank gathers the tensors of all ranks into one tensor, if torch can do so."""
    rank = dist.get_rank()
    part, whole = on_device(torch.full((2,), rank + 1.0)), on_device(torch.zeros(4))
    for name in ("gather_single", "gather_into_tensor"):
        if hasattr(dist, name):
            getattr(dist, name)(part, whole if rank == 1 else None, dst=1)
            assert values(whole) == ([1.0, 1.0, 2.0, 2.0] if rank == 1 else [0.0] * 4)


def _from_anybody() -> None:
    """Checks that a receive from any source returns the rank of the sender."""
    tensor = on_device(torch.tensor([7.0]))
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
    else:
        tensor.zero_()
        assert dist.recv(tensor) == 0
        assert values(tensor) == [7.0]


# The first cases must run before the first call of accelerator.install(), because it replaces
# functions that these cases call.
CASES: tuple[Callable[[], None], ...] = (
    _unequal_parts,
    _coalesced_lists,
    _gathered_into_one,
    _from_anybody,
    partial(_pipeline, batched=False),
    partial(_pipeline, batched=True),
    partial(_gradients, distributed=False, overlaps=False),
    partial(_gradients, distributed=False, overlaps=True),
    partial(_gradients, distributed=True, overlaps=False),
    partial(_gradients, distributed=True, overlaps=True),
    _parameters,
)


def main() -> None:
    """Runs all cases, with a barrier after each case."""
    device_collectives.install()
    device_collectives.install()  # The second call must have no effect.
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=100))
    for case in CASES:
        case()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
