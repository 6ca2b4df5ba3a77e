"""How many bytes the fullest GPU of a pipeline rank needs.

Weights, gradients and optimizer state follow from the parameters of its layers; activations from
how many microbatches the schedule holds at its worst moment.
"""

from __future__ import annotations

from functools import lru_cache

from megatron.adaptive.planner.model import LayerKind, Model
from megatron.adaptive.planner.plan import StageMemory
from megatron.adaptive.planner.profile import Profile
from megatron.adaptive.planner.runtime import OURS, Runtime
from megatron.adaptive.schedule import registry
from megatron.adaptive.schedule.memory import default_cap, peak_units

__all__ = ["in_flight", "layer_kept_bytes", "stage_memory", "state_bytes"]


@lru_cache(maxsize=4096)
def in_flight(schedule: str, pp: int, chunks: int, num_microbatches: int) -> tuple[float, ...]:
    """Microbatches that each pipeline rank holds at the schedule's worst moment.

    Counted in whole ranks: a chunk's microbatch is ``1 / chunks``.
    """
    if schedule == "1f1b":
        return tuple(float(min(pp - rank, num_microbatches)) for rank in range(pp))
    placement = registry.placement_for(schedule, pp, chunks)
    if registry.is_rule(schedule):
        cap = default_cap(placement, num_microbatches)
        return (min(cap, float(num_microbatches)),) * pp
    return peak_units(registry.make_schedule(schedule, placement, num_microbatches))


def layer_kept_bytes(
    kind: LayerKind,
    profile: Profile,
    gpu: str,
    *,
    tp: int,
    micro_batch: int,
    recompute: str,
) -> float:
    """Bytes that one microbatch of a layer keeps on one GPU, measured where that is known."""
    if recompute == "none" and profile.knows(kind.name, gpu, tp):
        measured = profile.times(kind.name, gpu, tp, micro_batch).kept_bytes
        if measured is not None:
            return measured
    return kind.kept_bytes(tp, recompute) * micro_batch


def state_bytes(model: Model, *, dp: int, distributed_optimizer: bool) -> tuple[float, ...]:
    """Bytes of weight, gradient and optimizer state for one parameter that a rank holds."""
    sizes = model.precision
    shared = dp if distributed_optimizer else 1
    return (
        float(sizes.parameter_bytes),
        float(sizes.gradient_bytes),
        sizes.optimizer_bytes / shared,
    )


def stage_memory(
    model: Model,
    *,
    parameters: float,
    kept_bytes: float,
    held: float,
    workspace_bytes: float,
    dp: int,
    distributed_optimizer: bool,
    limit_bytes: float,
    runtime: Runtime = OURS,
    groups: int = 0,
) -> StageMemory:
    """Put the parts together.

    Args:
        model: for the bytes of numbers.
        parameters: that one GPU of the rank holds.
        kept_bytes: of one microbatch over all layers of the rank.
        held: microbatches in flight, see ``in_flight``.
        workspace_bytes: the largest that a layer needs while it runs.
        dp: replicas.
        distributed_optimizer: whether they divide the optimizer state.
        limit_bytes: usable memory of the GPU.
        runtime: what the training program needs besides.
        groups: groups of ranks that the GPU communicates in.
    """
    besides = runtime.context_bytes + groups * runtime.group_bytes
    copies = parameters * runtime.parameter_copies_bytes
    weight, gradient, state = state_bytes(model, dp=dp, distributed_optimizer=distributed_optimizer)
    return StageMemory(
        parameter_bytes=parameters * weight,
        gradient_bytes=parameters * gradient,
        optimizer_bytes=parameters * state,
        activation_bytes=kept_bytes * held,
        workspace_bytes=workspace_bytes + besides + copies,
        limit_bytes=limit_bytes,
    )
