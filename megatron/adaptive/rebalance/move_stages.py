"""Moves the stages of a running job between two steps: another placement, partition, or both.

Everything is built anew in the same processes, and weights and optimizer state go from memory to
memory; counters, logs and the data loader are the training loop's::

    state is set aside ──> release, take down ──> build anew, state to its new ranks
                           channels, traces       model, optimizer, channels

State waits on the device where that has room for it twice, else in the host's memory. Between
ranks travels only what another rank shall have. Under the same placement process groups, data and
the order of work stay.
"""

from __future__ import annotations

import dataclasses
import gc
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


def with_schedule(job: TrainingJob, **changes: Any) -> TrainingJob:
    """Returns the job with changes in its settings of the schedule."""
    schedule = dataclasses.replace(job.config.schedule, **changes)
    return dataclasses.replace(job, config=dataclasses.replace(job.config, schedule=schedule))


def move_stages(
    box: list[Run],
    release: Callable[[], None],
    *,
    kind: PlacementKind | None = None,
    partition: Sequence[int] | None = None,
) -> Run:
    """Goes on with other stages, from the same state. Collective over all ranks.

    Losses, gradients and checkpoints are those of a run that had these stages from the start.

    Args:
        box: holds the run, between two steps, and is empty once the run is taken down.
        release: drops every other reference to the run, so that its memory is free before another
            one is built; not called where the state has no room to wait.
        kind: how stages lie from here on, ``None`` for as they do.
        partition: layers of each stage from here on, ``None`` for those that they have.

    Returns:
        The run that takes its place. A trace goes on in new files.

    Raises:
        DeviceMemoryError: the state has no room to wait, and nothing has changed.
        TransportError: after ``release``, state did not arrive and is lost.
    """
    state = _set_aside(box[0])
    changes: dict[str, Any] = {} if partition is None else {"partition": tuple(partition)}
    kept = None
    if kind in (None, box[0].placement.kind):
        engine = box[0].forward_backward
        assert isinstance(engine, ForwardBackward)
        kept = KeptParts(box[0].samples, box[0].padded_vocab_size, engine.orders)
    else:
        changes["pipeline_placement"] = kind
    job = with_schedule(box[0].job, **changes)
    random = sharded_rng(job.config).data
    scheduler = box[0].scheduler.state_dict()
    groups = () if box[0].wiring is None else box[0].wiring.groups
    release()
    take_down(box.pop())
    gc.collect()
    if job.accelerator.is_cuda:
        torch.cuda.empty_cache()
    dist.barrier(group=job.control_group)  # nobody waits in one of the groups any more
    destroy_groups(groups)
    if kept is None:
        remake_mesh(job)
    run = build_run(job, kept)
    _give(run, state)
    load_scheduler(run.scheduler, run.optimizer, scheduler)
    load_rng(random)
    return run


def take_down(run: Run) -> None:
    """Closes the run's channels and traces; it cannot take another step. Collective.

    What experts keep of their last microbatch goes: its graph would keep the model, for the hooks
    of gradients lead back to it in a way that the garbage collector does not see.
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
    """Holds the state of a rank's stages while model and optimizer are replaced.

    Attributes:
        shares: parameters and this rank's shares of their state, by name.
        steps: updates that the optimizer has done.
        groups: settings of its groups of parameters, by chained optimizer.
        scalers: their loss scales, ``None`` where they have none.
    """

    shares: dict[str, Share]
    steps: float
    groups: list[list[dict[str, Any]]]
    scalers: list[Any]


def _set_aside(run: Run) -> _State:
    """Keeps the state of a rank: on its device, or in the host's memory where that is too full."""
    job, leaves = run.job, run.optimizer.chained_optimizers
    gather_parameters(run)
    job.accelerator.synchronize()
    for leaf in leaves:
        fill_state(leaf)
    shares = shares_of(run.optimizer, run.chunks, _own_stages(run))
    needed = sum(one.nbytes for share in shares.values() for one in share.tensors)
    ranks_here = job.environment.local_world_size
    # What comes in its place may be half as large again.
    stays = 3 * needed // 2 <= free_memory_bytes(job.accelerator, ranks_here)
    fits = stays or needed <= available_host_bytes() // ranks_here
    short = [rank for rank, has in enumerate(job.gather(fits)) if not has]
    if short:
        raise DeviceMemoryError(
            f"weights and optimizer state of rank {short[0]} would wait in the host's memory, "
            "which has no room for them: start with --pipeline-placement and --partition instead"
        )
    place = job.accelerator.device if stays else torch.device("cpu")
    for share in shares.values():
        share.tensors = [one.to(place) for one in share.tensors]
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
    """Gives model and optimizer of a run the state that is on the job's ranks. Collective."""
    job, old, leaves = run.job, state.shares, run.optimizer.chained_optimizers
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
    _settle(state, leaves, max(found.steps for found in tables.values()))


def _settle(state: _State, leaves: Sequence[Any], steps: float) -> None:
    """Gives the optimizers the former ones' settings, loss scales and count of updates."""
    for leaf, groups, scaler in zip(leaves, state.groups, state.scalers, strict=True):
        for own in leaf.optimizer.state.values():
            if "step" in own:
                own["step"] = torch.tensor(float(steps))
        for group, before in zip(leaf.optimizer.param_groups, groups, strict=True):
            group.update(before)
            if steps and "step" in group:
                group["step"] = int(steps)
        if hasattr(leaf, "grad_scaler"):
            leaf.grad_scaler = scaler
