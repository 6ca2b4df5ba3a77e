"""Moves the stages of a running job to other ranks between two steps, without a checkpoint.

The new stages may have another placement (assignment to ranks), another partition (number of layers
per stage), or both. Sequences may also be divided into different slices. Model, optimizer and
message channels are rebuilt in the same processes. Weights and optimizer state are sent from memory
to memory. The training loop keeps its counters, logs and data loader::

    state is set aside ──> release, take down ──> build again, state to its new ranks
                           channels, traces       model, optimizer, channels

During the move, the state is kept on the GPU if the GPU has enough free memory, otherwise in host
memory. Only state that another rank needs is sent. If the placement does not change, process
groups, data and schedule are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.adaptive.checkpoint.megatron_state import (
    fill_state,
    load_rng,
    load_scheduler,
    sharded_rng,
)
from megatron.adaptive.engine.process_context import destroy_groups
from megatron.adaptive.engine.stages import ForwardBackward
from megatron.adaptive.errors import DeviceMemoryError
from megatron.adaptive.gpt.initialize import TrainingJob, remake_mesh
from megatron.adaptive.gpt.setup import KeptParts, Run, build_run
from megatron.adaptive.gpt.train_step import gather_parameters
from megatron.adaptive.profiling.free_memory import available_host_bytes, free_memory_bytes
from megatron.adaptive.rebalance.layer_state import (
    Share,
    Table,
    exchange,
    passages,
    shares_of,
    steps_of,
)
from megatron.adaptive.schedule.stage_placement import PlacementKind


def with_schedule(
    job: TrainingJob,
    *,
    partition: tuple[int, ...] | None = None,
    kind: PlacementKind | None = None,
    slices: int | None = None,
    tokens: int | None = None,
) -> TrainingJob:
    """Returns a copy of ``job`` with a different partition, placement of stages, or slice size.

    Args:
        job: Job to copy.
        partition: Number of layers per stage, or ``None`` for the current partition.
        kind: Placement of stages on ranks, or ``None`` for the current placement.
        slices: Number of slices per sequence, or ``None`` for the current number.
        tokens: Number of tokens per slice, or ``None`` for the current number.
    """
    schedule = job.config.schedule
    if tokens is not None:
        schedule = dataclasses.replace(schedule, chosen_tokens=tokens)
    if slices is not None:
        schedule = dataclasses.replace(schedule, chosen_slices=slices)
    if partition is not None:
        schedule = dataclasses.replace(schedule, partition=partition)
    if kind is not None:
        schedule = dataclasses.replace(schedule, pipeline_placement=kind)
    return dataclasses.replace(job, config=dataclasses.replace(job.config, schedule=schedule))


def move_stages(
    box: list[Run],
    release: Callable[[], None],
    *,
    kind: PlacementKind | None = None,
    partition: Sequence[int] | None = None,
    slices: int | None = None,
    tokens: int | None = None,
) -> Run:
    """Rebuilds a run with other stages, and keeps its state.

    All ranks must call this function together.

    Losses, gradients and checkpoints equal those of a run that had the new stages from the start.

    Args:
        box: List whose only element is the run, which must not be executing a step. The list is
            emptied when the run is shut down, so that the caller keeps no reference to the run.
        release: Callback that drops all other references to the run, so that the run's memory is
            freed before the next run is built. It is not called if a rank has too little memory for
            the state.
        kind: New placement of stages on ranks, or ``None`` for the current placement.
        partition: New number of layers per stage, or ``None`` for the current partition.
        slices: New number of slices per sequence, or ``None`` for the current number.
        tokens: New number of tokens per slice, or ``None`` for the current number.

    Returns:
        New run. If the old run was traced, the trace continues in new files.

    Raises:
        DeviceMemoryError: If a rank has too little memory for the state. The old run then
            continues to exist.
        TransportError: If state does not arrive at its new rank. The state is then lost.
    """
    state = _set_aside(box[0])
    kept = None
    keeps_placement = kind in (None, box[0].placement.kind)
    if keeps_placement:
        engine = box[0].forward_backward
        assert isinstance(engine, ForwardBackward)
        orders = engine.orders if slices is None and tokens is None else None
        kept = KeptParts(box[0].samples, box[0].padded_vocab_size, orders)
    job = with_schedule(
        box[0].job,
        partition=None if partition is None else tuple(partition),
        kind=None if keeps_placement else kind,
        slices=slices,
        tokens=tokens,
    )
    random = sharded_rng(job.config).data
    scheduler = box[0].scheduler.state_dict()
    groups = () if box[0].wiring is None else box[0].wiring.groups
    release()
    take_down(box.pop())
    job.accelerator.free_unused_memory()
    # Wait until no rank is in a collective of a group that is about to be destroyed.
    dist.barrier(group=job.control_group)
    destroy_groups(groups)
    if kept is None:
        remake_mesh(job)
    run = build_run(job, kept)
    _give(run, state)
    load_scheduler(run.scheduler, run.optimizer, scheduler)
    load_rng(random)
    return run


def take_down(run: Run) -> None:
    """Shuts down ``run`` by closing its channels and traces. All ranks must call this together.

    The function also drops the tensors that MoE token dispatchers keep from their last microbatch.
    Otherwise, the model's memory would never be freed: the autograd graph of these tensors refers
    to the model in a cycle that the garbage collector cannot detect.
    """
    run.tracing.close()
    if run.wiring is not None:
        run.wiring.close()
    run.job.accelerator.synchronize()
    for chunk in run.chunks:
        for module in chunk.modules():
            dispatcher = getattr(module, "token_dispatcher", None)
            for owner in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
                for name, value in list(getattr(owner, "__dict__", {}).items()):
                    if isinstance(value, torch.Tensor):
                        setattr(owner, name, None)


@dataclass(frozen=True, kw_only=True)
class _State:
    """State of a rank's stages while model and optimizer are rebuilt.

    megatron-core combines several optimizers into one. Each of them is called a chained optimizer.
    For example, experts have an optimizer that is separate from the optimizer for all other
    parameters.

    Attributes:
        shares: This rank's elements of each parameter and of its optimizer state, keyed by name.
        steps: Number of updates that the optimizer has made.
        groups: Settings of the parameter groups (such as learning rates) of each chained optimizer.
        scalers: Loss scaler of each chained optimizer, or ``None`` for an optimizer without one.
    """

    shares: dict[str, Share]
    steps: float
    groups: list[list[dict[str, Any]]]
    scalers: list[Any]


def _set_aside(run: Run) -> _State:
    """Returns this rank's state of ``run``, moved to host memory if GPU memory is short.

    Raises:
        DeviceMemoryError: If neither the GPU nor the host of a rank has enough free memory.
    """
    job = run.job
    leaves = run.optimizer.chained_optimizers
    gather_parameters(run)
    job.accelerator.synchronize()
    for leaf in leaves:
        fill_state(leaf)
    shares = shares_of(run.optimizer, run.chunks, _own_stages(run))
    needed = sum(tensor.nbytes for share in shares.values() for tensor in share.tensors)
    ranks_here = job.environment.local_world_size
    # Reserve 50% more memory, because the rank may hold more layers after the move.
    stays = 3 * needed // 2 <= free_memory_bytes(job.accelerator, ranks_here)
    fits = stays or needed <= available_host_bytes() // ranks_here
    short = [rank for rank, has in enumerate(job.gather(fits)) if not has]
    if short:
        raise DeviceMemoryError(
            f"weights and optimizer state of rank {short[0]} do not fit into the host's memory "
            "during the move; set --pipeline-placement and --partition from the start instead"
        )
    device = job.accelerator.device if stays else torch.device("cpu")
    for share in shares.values():
        share.tensors = [tensor.to(device) for tensor in share.tensors]
    return _State(
        shares=shares,
        steps=steps_of(run.optimizer),
        groups=[
            [
                {key: value for key, value in group.items() if key != "params"}
                for group in leaf.optimizer.param_groups
            ]
            for leaf in leaves
        ],
        scalers=[getattr(leaf, "grad_scaler", None) for leaf in leaves],
    )


def _own_stages(run: Run) -> list[int]:
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    return [run.placement.stage_of(pp_rank, chunk) for chunk in range(run.placement.num_chunks)]


def _give(run: Run, state: _State) -> None:
    """Loads ``state``, which this rank kept during the move, into the new run.

    All ranks must call this function together.
    """
    job = run.job
    old = state.shares
    leaves = run.optimizer.chained_optimizers
    for leaf in leaves:
        fill_state(leaf)
    new = shares_of(run.optimizer, run.chunks, _own_stages(run))
    table = Table(
        replica=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        had={name: (share.start, share.end) for name, share in old.items()},
        wants={name: (share.start, share.end) for name, share in new.items()},
        steps=state.steps,
    )
    tables = dict(enumerate(job.gather(table)))
    for name, share in new.items():
        former = old.get(name)
        if former is not None and (former.start, former.end) == (share.start, share.end):
            for tensor, before in zip(share.tensors, former.tensors, strict=True):
                tensor.copy_(before)
    exchange(passages(tables), job.rank, old, new, job.control_group)
    _restore_settings(state, leaves, max(table.steps for table in tables.values()))


def _restore_settings(state: _State, leaves: Sequence[Any], steps: float) -> None:
    """Restores the optimizers' settings, loss scalers and update counts from before the move.

    Args:
        state: State that this rank kept before the move.
        leaves: Chained optimizers of the new run.
        steps: Number of updates that the old optimizers had made.
    """
    for leaf, groups, scaler in zip(leaves, state.groups, state.scalers, strict=True):
        for values in leaf.optimizer.state.values():
            if "step" in values:
                # Change the tensor in place, because it is already on the device on which the
                # optimizer needs it: the GPU for fused Adam, the host for other optimizers.
                values["step"].fill_(steps)
        for group, before in zip(leaf.optimizer.param_groups, groups, strict=True):
            group.update(before)
            if steps and "step" in group:
                group["step"] = int(steps)
        if hasattr(leaf, "grad_scaler"):
            leaf.grad_scaler = scaler
