"""Predicts the step time of a plan and the memory of each pipeline rank.

A step has four consecutive parts::

    | pipeline                                  | reduction | tied embeddings | optimizer |
      actions and messages, in the order of the
      plan's schedule

The pipeline is timed by simulating the actions in the order of the schedule. A stage is as fast as
its slowest replica, and every boundary between stages on different ranks requires a message. Then
each rank reduces its gradients across its replicas. The first and last stage add up the gradients
of tied embeddings. Finally, the optimizer runs. A step is never shorter than the time for which its
messages keep the network link of a node busy (``node_traffic``).

A plan may have stages with unequal parallel sizes. The search gives such stages microbatches of
unequal sizes, so that all stages have the same number of microbatches. The trainer uses
microbatches of equal size, and distributes them over the replicas of a stage
(``schedule.unequal_widths``). :func:`as_run` converts a plan from the form used by the search to
the form used by the trainer::

    3 GPUs, 8 samples      in the search                 in the trainer
    stage 0, 2 replicas    4 microbatches of 1 sample    each replica runs 4 of 8 microbatches
    stage 1, 1 replica     4 microbatches of 2 samples   the replica runs 8 microbatches of 1 sample
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.config.schedule_specs import schedule_spec, why_whole_backward
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import NodeType
from megatron.adaptive.planner.layer_costs import (
    OURS,
    LayerTable,
    Runtime,
    in_flight,
    layer_table,
    stage_memory,
    waiting,
)
from megatron.adaptive.planner.link_costs import boundary_s, embedding_s, exposed_reduce_s, reduce_s
from megatron.adaptive.planner.node_traffic import IDLE_LINK, BusyLink, busiest_link, message_sizes
from megatron.adaptive.planner.order_timing import ScheduleTimes, jitter_s, step_times, steps_of
from megatron.adaptive.planner.plan import (
    Plan,
    Prediction,
    StageMemory,
    StagePlace,
    StagePrediction,
)
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.row_times import RowCosts, RowPipeline, held_slices, row_costs
from megatron.adaptive.schedule import catalog, unequal_widths
from megatron.adaptive.schedule.memory_caps import default_cap
from megatron.adaptive.schedule.numba_kernels import saves_time
from megatron.adaptive.schedule.policy import Policy, rule_of
from megatron.adaptive.schedule.simulate import SimResult
from megatron.adaptive.schedule.stage_placement import Placement, frozen_stages_of
from megatron.adaptive.schedule.unequal_widths import Widths
from megatron.adaptive.schedule.workload import PS_PER_S, Link, StageProfile, StageTimes, draw


def predict(
    plan: Plan, inputs: PlanInputs, runtime: Runtime = OURS, *, predictions: int | None = None
) -> Prediction:
    """Predicts the time, memory and price of one step of a plan.

    The time is predicted even if the plan does not fit into memory. In this case,
    ``Prediction.fits`` is false.

    Args:
        plan: Plan to predict.
        inputs: Model, cluster and profile of layer times.
        runtime: Properties of the training program, such as its use of memory.
        predictions: Number of similar plans that the caller is going to predict. Simulations are
            compiled if compiling saves time for this number of plans, and always if it is ``None``.

    Raises:
        ConfigError: The profile does not contain a layer's time, or the partition has a different
            number of layers than the model.
        ScheduleError: The schedule does not support the plan's number of stages or microbatches.
    """
    stages = StageSums.of(plan, inputs, runtime)
    times = _pipeline(plan, stages, runtime, predictions)
    of_rank = stages.of_rank
    reduce, optimizer = np.array(stages.reduce_s), np.array(stages.optimizer_s)
    if plan.overlap_reduce:
        backward = of_rank @ stages.durations_s[1:].sum(axis=0)
        layers = of_rank @ np.array(plan.partition)
        reduce = exposed_reduce_s(reduce, backward, np.maximum(layers, 1))
    tied = embedding_s(plan.places, inputs, plan.tp)
    ends = times.end_s + reduce + optimizer
    last = int(ends.argmax())
    nodes = [inputs.cluster.nodes[node] for node in plan.nodes]
    beside = max(inputs.profile.step_s.get(node.gpu, 0.0) * node.slowness for node in nodes)
    jitter = _jitter_s(plan, stages, inputs.profile.action_sigma)
    seconds = float(ends[last]) + tied + beside + jitter
    if (wait_s := stages.busy_link.seconds - seconds) > 0:
        # The pipeline is timed as if every pair of ranks had its own link. If ranks share a network
        # link, and sending all messages over this link takes longer than the step, use the longer
        # time as the step time.
        times = replace(times, end_s=times.end_s + wait_s)
        seconds = stages.busy_link.seconds
    quiet = _pipeline(plan, stages.without_messages(), runtime, predictions)
    # All parts are times of the rank that finishes last, because only these times add up to the
    # whole step.
    tp_s = float(of_rank[last] @ stages.tp_s) * stages.num_items
    parts = {
        "compute": float(times.busy_s[last]) - tp_s,
        "tp": tp_s,
        "transfer": float(times.end_s[last] - quiet.end_s[last]),
        "reduction": float(reduce[last]),
        "embedding": tied,
        "optimizer": float(optimizer[last]),
    }
    # Rounding errors may make this difference slightly negative.
    parts["bubble"] = max(0.0, seconds - beside - jitter - sum(parts.values()))
    parts |= {name: part for name, part in (("jitter", jitter), ("beside", beside)) if part}
    return Prediction(
        seconds=seconds,
        parts=parts,
        stages=_stage_predictions(stages, times, stages.slices),
        tokens_per_s=inputs.step_tokens(plan.global_batch) / seconds if seconds else 0.0,
        price_per_hour=sum(node.price_per_hour for node in nodes),
        estimated=stages.estimated,
        limiting_node=stages.busy_link.node if wait_s > 0 else None,
    )


def _stage_predictions(
    stages: StageSums, times: ScheduleTimes, slices: float
) -> tuple[StagePrediction, ...]:
    """Returns the predicted times and memory of each pipeline rank of a plan.

    Args:
        stages: Costs of the plan's stages.
        times: Simulated end times and busy times of the ranks.
        slices: Mean number of slices per microbatch, or 1 for whole microbatches.
    """
    forward = stages.of_rank @ stages.durations_s[0] * slices
    backward = stages.of_rank @ stages.durations_s[1:].sum(axis=0) * slices
    sends = stages.of_rank @ (stages.latency_s[0] + stages.occupancy_s[0])
    return tuple(
        StagePrediction(
            forward_s=float(forward[rank]),
            backward_s=float(backward[rank]),
            send_s=float(sends[rank]),
            bubble=1 - float(times.busy_s[rank]) / times.seconds if times.seconds else 0.0,
            memory=memory,
        )
        for rank, memory in enumerate(stages.memory)
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class StageSums:
    """Costs of each stage and rank of a plan, summed over layers. Each chunk counts as a stage.

    Times and messages are per microbatch. If sequences are cut into slices, times and messages are
    per slice of average cost instead.

    Attributes:
        durations_s: Times of forward pass, input gradients and weight gradients on the slowest
            replica, in seconds, ``[3, stages]``.
        launch_s: Part of ``durations_s`` that the CPU spends launching kernels, in seconds, ``[3,
            stages]``. A rank can launch kernels while it waits for its input.
        tp_s: Part of ``durations_s`` that is spent on tensor-parallel communication, in seconds,
            ``[stages]``.
        latency_s: Latency in seconds of the messages that a stage sends after a forward and after a
            backward pass, ``[2, stages]``.
        occupancy_s: Time in seconds during which each of these messages keeps its link busy, ``[2,
            stages]``.
        reduce_s: Duration of the whole gradient reduction if nothing overlaps with it, in seconds,
            ``[ranks]``.
        optimizer_s: Duration of the optimizer step in seconds, ``[ranks]``.
        memory: Memory that each pipeline rank needs.
        of_rank: Matrix of shape ``[ranks, stages]`` that contains 1 if the rank holds the stage,
            otherwise 0.
        message_bytes: Size in bytes of the messages that a stage sends forward and backward for one
            microbatch of a replica, ``[2, stages]``.
        estimated: Whether any of the times was estimated instead of measured.
        num_items: Number of slices that a replica processes per step. If documents are packed, this
            is a mean over steps.
        slices: Number of slices per microbatch, or 1 for whole microbatches. If documents are
            packed, this is a mean over steps.
        attention_share: Fraction of the forward time that grows with the square of the sequence
            length.
        rows: Rows of packed documents and costs of their slices, or ``None`` if all samples have
            the same length.
        frozen_stages: Number of leading stages through which no gradient flows.
        busy_link: Network link that the messages of a step keep busy for the longest time.
    """

    durations_s: Any
    launch_s: Any
    tp_s: Any
    latency_s: Any
    occupancy_s: Any
    reduce_s: tuple[float, ...]
    optimizer_s: tuple[float, ...]
    memory: tuple[StageMemory, ...]
    of_rank: Any
    message_bytes: Any
    estimated: bool
    num_items: float
    slices: float = 1
    attention_share: float = 0.0
    rows: RowCosts | None = None
    frozen_stages: int = 0
    busy_link: BusyLink = IDLE_LINK

    @classmethod
    def of(cls, plan: Plan, inputs: PlanInputs, runtime: Runtime) -> StageSums:
        """Adds up the costs of the layers in each stage of ``plan``.

        ``inputs`` contains the model, the cluster and the profile of layer times. ``runtime``
        contains the properties of the training program.

        Raises:
            ConfigError: The profile does not contain a layer's time, or the partition has a
                different number of layers than the model.
        """
        if sum(plan.partition) != inputs.model.num_layers or min(plan.partition) < 0:
            raise ConfigError(
                f"partition {format_partition(plan.partition)} has {sum(plan.partition)} layers,"
                f" but model {inputs.model.name} has {inputs.model.num_layers}; the partition"
                " must assign every layer"
            )
        placement = catalog.placement_for(plan.schedule, plan.pp, plan.chunks)
        bounds = np.concatenate([[0], np.cumsum(plan.partition)])
        rank_of = [placement.locate(stage)[0] for stage in range(placement.num_stages)]
        tables = [_tables(plan, stage_place, inputs) for stage_place in plan.places]
        durations, launch, tp_s, _ = _durations(rank_of, bounds, tables, inputs)
        rows = _row_costs(plan, inputs, rank_of, bounds)
        reduce, memories, updates, parameters = [], [], [], []
        for rank in range(plan.pp):
            layers = np.repeat(rank_of, plan.partition) == rank
            trained = max(
                float((table.parameters - table.frozen_parameters)[layers].sum())
                for _, table in tables[rank]
            )
            experts = max(float(table.expert_parameters[layers].sum()) for _, table in tables[rank])
            parameters.append((trained, experts))
            ranks = plan.expert_ranks
            dp = len(plan.places[rank].replicas)
            reduce.append(reduce_s(plan.places, rank, inputs, trained, experts, ranks))
            held, pending = _held(plan, rank, inputs, rows)
            memories.append(
                _memory(plan, rank, layers, (held, pending), tables[rank], inputs, runtime)
            )
            updated = plan.state_parameters(trained, experts, dp)
            updates.append(updated * inputs.optimizer_s(node for node, _ in tables[rank]))
        latency, occupancy, message_bytes = _messages(plan, placement, inputs, runtime)
        return cls(
            durations_s=durations,
            launch_s=launch,
            tp_s=tp_s,
            latency_s=latency,
            occupancy_s=occupancy,
            reduce_s=tuple(reduce),
            optimizer_s=tuple(updates),
            memory=tuple(memories),
            of_rank=np.eye(plan.pp)[:, rank_of],
            message_bytes=message_bytes,
            estimated=any(table.estimated for row in tables for _, table in row),
            num_items=plan.num_microbatches * plan.slices if rows is None else rows.num_items,
            slices=plan.slices if rows is None else rows.slices_per_row,
            attention_share=inputs.model.attention_share,
            rows=rows,
            frozen_stages=frozen_stages_of(plan.partition, inputs.model.frozen_layers),
            busy_link=busiest_link(plan, inputs, parameters, sliced=runtime.slices_messages(plan)),
        )

    def without_messages(self) -> StageSums:
        """Returns a copy of the costs in which messages take no time."""
        zeros = np.zeros_like(self.latency_s)
        return replace(self, latency_s=zeros, occupancy_s=zeros)


_Tables = list[tuple[NodeType, LayerTable]]
"""Node types and layer tables of a pipeline rank, one pair per kind of replica. Replicas of the
same kind have the same node type and tensor-parallel size."""


def _tables(plan: Plan, stage_place: StagePlace, inputs: PlanInputs) -> _Tables:
    """Returns a layer table for each kind of replica of the pipeline rank ``stage_place``.

    Replicas of the same kind have the same node type and tensor-parallel size.
    """
    nodes = [(inputs.cluster.nodes[replica.node], replica.tp) for replica in stage_place.replicas]
    others = list({node.name: node for node, _ in nodes}.values())
    return [
        (
            node,
            layer_table(
                inputs,
                node,
                tp=tp,
                micro_batch=stage_place.micro_batch,
                settings=plan,
                others=others,
            ),
        )
        for node, tp in {(node.name, tp): (node, tp) for node, tp in nodes}.values()
    ]


def _durations(
    rank_of: Sequence[int], bounds: Any, tables: list[_Tables], inputs: PlanInputs
) -> tuple[Any, Any, Any, Any]:
    """Returns durations, launch times and communication times of each stage, in seconds.

    The first three arrays are the fields ``durations_s``, ``launch_s`` and ``tp_s`` of
    :class:`StageSums`. The last array has shape ``[3, stages]``. It contains the time per pair of
    tokens that attend to each other, or 0 for plans without packed documents.

    Args:
        rank_of: Pipeline rank of each stage.
        bounds: Index of the first layer of each stage, followed by the number of layers.
        tables: Layer tables of each pipeline rank, one per kind of replica.
        inputs: Model, cluster and profile of layer times.
    """
    durations, work, pair_s = np.zeros((3, 3, len(rank_of)))
    tp_s = np.zeros(len(rank_of))
    for stage, rank in enumerate(rank_of):
        part = slice(bounds[stage], bounds[stage + 1])
        for _, table in tables[rank]:
            kinds = (table.forward_s, table.backward_s, table.weight_s)
            sums = np.array([seconds[part].sum() for seconds in kinds])
            launches = table.launch_s[part].sum() * np.array([1.0, 1.0, 0.0])
            durations[:, stage] = np.maximum(durations[:, stage], sums)
            work[:, stage] = np.maximum(work[:, stage], sums - launches)
            tp_s[stage] = max(tp_s[stage], table.tp_s[part].sum())
            pairs = [seconds[part].sum() for seconds in (table.pair_s, table.pair_back_s)]
            pair_s[:2, stage] = np.maximum(pair_s[:2, stage], pairs)
        durations[:2, stage] += inputs.action_s(node for node, _ in tables[rank])
    return durations, durations - work, tp_s, pair_s


def _row_costs(
    plan: Plan, inputs: PlanInputs, rank_of: Sequence[int], bounds: Any
) -> RowCosts | None:
    """Returns packed rows of documents and their costs, or ``None`` for plans without packing."""
    if plan.slice_tokens is None:
        return None

    def times_of(tokens: int) -> tuple[Any, Any]:
        changed = replace(plan, slice_tokens=tokens)
        tables = [_tables(changed, stage_place, inputs) for stage_place in plan.places]
        durations, _, _, pair_s = _durations(rank_of, bounds, tables, inputs)
        return durations, pair_s

    return row_costs(plan, inputs, times_of)


def _held(plan: Plan, rank: int, inputs: PlanInputs, rows: RowCosts | None) -> tuple[float, float]:
    """Returns how many microbatches a rank holds at most, and how many of them wait for action W.

    The action W computes weight gradients. If the plan cuts sequences into slices or packs
    documents, slices are counted instead of microbatches.
    """
    splits = not catalog.is_rule(plan.schedule) or _weight_pieces(plan, splittable=True) > 0
    if rows is not None:
        held = held_slices(plan, rows)
        return held, held if splits else 0.0
    if (widths := dealt_widths(plan)) is not None:
        return held_of(plan, widths)[rank], 0.0
    order = (plan.schedule, plan.pp, plan.chunks, plan.num_microbatches, plan.slices, plan.cap)
    share = inputs.model.attention_share
    return in_flight(*order, share)[rank], waiting(*order, share)[rank] if splits else 0.0


def _memory(
    plan: Plan,
    rank: int,
    layers: Any,
    held: tuple[float, float],
    tables: _Tables,
    inputs: PlanInputs,
    runtime: Runtime,
) -> StageMemory:
    """Returns the memory that a pipeline rank needs on its replica with the least free memory.

    Args:
        plan: Plan of the pipeline.
        rank: Pipeline rank.
        layers: Boolean array with ``True`` for each layer that the rank holds, ``[layers]``.
        held: Number of microbatches or slices that the rank holds, and the number that wait for
            action W.
        tables: Layer tables of the rank, one per kind of replica.
        inputs: Model, cluster and profile of layer times.
        runtime: Properties of the training program.
    """
    memories = [
        stage_memory(
            inputs.model,
            parameters=float(table.parameters[layers].sum()),
            expert_parameters=float(table.expert_parameters[layers].sum()),
            frozen_parameters=float(table.frozen_parameters[layers].sum()),
            kept_bytes=float(table.kept_bytes[layers].sum()),
            held=held[0],
            workspace_bytes=float(table.workspace_bytes[layers].max(initial=0.0))
            + float(table.waiting_bytes[layers].sum()) * held[1]
            + float(table.gathered_bytes[layers].sum()),
            dp=len(plan.places[rank].replicas),
            settings=plan,
            limit_bytes=node.memory_bytes,
            runtime=runtime,
            context_bytes=inputs.profile.context_bytes.get(node.gpu),
        )
        for node, table in tables
    ]
    return max(memories, key=lambda memory: memory.total_bytes - memory.limit_bytes)


def _messages(
    plan: Plan, placement: Placement, inputs: PlanInputs, runtime: Runtime
) -> tuple[Any, Any, Any]:
    """Returns latency, link occupancy and size of messages between stages, each ``[2, stages]``."""
    latency, occupancy, whole = np.zeros((3, 2, placement.num_stages))
    for stage, sizes in enumerate(message_sizes(plan, inputs)):
        rank, next_rank = placement.locate(stage)[0], placement.locate(stage + 1)[0]
        for kind, row in ((0, stage), (1, stage + 1)):
            whole[kind, row] = sizes[kind] * plan.places[rank].micro_batch
        if rank == next_rank:
            continue
        for kind, sender, receiver, row in (
            (0, rank, next_rank, stage),
            (1, next_rank, rank, stage + 1),
        ):
            ends = plan.places[sender], plan.places[receiver]
            if dealt_widths(plan) is not None:
                both = _hop_s(*ends, inputs, sizes[kind])
            else:
                both = boundary_s(*ends, inputs, sizes[kind], sliced=runtime.slices_messages(plan))
            latency[kind, row], occupancy[kind, row] = both
    return latency, occupancy, whole


def _pipeline(
    plan: Plan, stages: StageSums, runtime: Runtime, predictions: int | None
) -> ScheduleTimes:
    """Computes when each rank of the pipeline finishes, and how long it is busy.

    Gradient reductions and the optimizer step are not included. For a static schedule, the times
    follow directly from its fixed order. Run-time scheduling rules and stages with unequal numbers
    of replicas are simulated.
    """
    latency, occupancy = stages.latency_s, stages.occupancy_s
    if (widths := dealt_widths(plan)) is not None:
        return _dealt_times(plan, widths, stages.durations_s, latency + occupancy)
    if runtime.pipeline is not None:
        replaced: ScheduleTimes | None = runtime.pipeline(plan, stages)
        if replaced is not None:
            return replaced
    if (pipeline := row_pipeline(plan, stages)) is not None:
        return pipeline.times()
    if not catalog.is_rule(plan.schedule):
        steps = steps_of(plan.schedule, plan.pp, plan.chunks, plan.num_microbatches)
        return step_times(steps, stages.durations_s, latency, occupancy, launch_s=stages.launch_s)
    result = simulated(plan, stages, predictions=predictions)
    ends = [float(end[-1]) / PS_PER_S for end in result.ends_ps]
    return ScheduleTimes(end_s=np.array(ends), busy_s=np.array(result.busy_s))


def row_pipeline(plan: Plan, stages: StageSums) -> RowPipeline | None:
    """Returns a simulated pipeline for a plan with packed documents, or ``None`` for other plans.

    Args:
        plan: Plan to simulate.
        stages: Times of the plan's stages and messages.
    """
    if stages.rows is None:
        return None
    return RowPipeline(
        plan=plan,
        costs=stages.rows,
        latency_s=stages.latency_s,
        occupancy_s=stages.occupancy_s,
        weight_pieces=_weight_pieces(plan, splittable=bool(np.any(stages.durations_s[2]))),
    )


def simulated(plan: Plan, stages: StageSums, *, predictions: int | None = None) -> SimResult:
    """Simulates the pipeline of a plan whose stages have equal parallel sizes.

    If documents are packed, only the first of the planner's sample steps is simulated.

    Args:
        plan: Plan to simulate.
        stages: Times of the plan's stages and messages.
        predictions: Number of similar plans to predict, as for :func:`predict`.
    """
    if (pipeline := row_pipeline(plan, stages)) is not None:
        return pipeline.simulated()[0]
    latency, occupancy = stages.latency_s, stages.occupancy_s
    placement = catalog.placement_for(plan.schedule, plan.pp, plan.chunks)
    links = {}
    for kind, step in ((0, 1), (1, -1)):
        for stage in range(placement.num_stages):
            if 0 <= stage + step < placement.num_stages:
                pair = placement.locate(stage)[0], placement.locate(stage + step)[0]
                both = float(latency[kind, stage]), float(occupancy[kind, stage]) * plan.slices
                links[pair] = Link(latency_s=both[0], occupancy_s=both[1])
    durations = stages.durations_s * plan.slices
    forward, backward, weight = (tuple(map(float, row)) for row in durations)
    profile = StageProfile(
        times=StageTimes(forward_s=forward, backward_s=backward, weight_s=weight),
        links=links,
        attention_share=stages.attention_share,
    )
    cap = plan.cap or default_cap(placement, plan.num_microbatches, plan.slices)
    candidate = catalog.Candidate(
        name=plan.schedule,
        placement=placement,
        weight_pieces=_weight_pieces(plan, splittable=any(weight)),
        cap=cap,
        num_slices=plan.slices,
        frozen_stages=stages.frozen_stages,
    )
    work = draw(placement, plan.num_microbatches, profile, num_slices=plan.slices)
    policies = candidate.policies(plan.num_microbatches)
    compiled = _is_compiled(candidate, plan.num_microbatches, policies, predictions)
    return candidate.simulate(work, compiled=compiled, policies=policies)


def _is_compiled(
    candidate: catalog.Candidate,
    num_microbatches: int,
    policies: Sequence[Policy],
    predictions: int | None,
) -> bool:
    """Returns whether compiling the simulation of a plan saves time.

    Args:
        candidate: Schedule or run-time scheduling rule of the plan.
        num_microbatches: Number of microbatches per step.
        policies: Scheduling policy of each rank.
        predictions: Number of similar plans to predict, as for :func:`predict`.
    """
    shared = rule_of(policies)
    if not catalog.is_rule(candidate.name) or shared is None:
        return False
    if predictions is None:
        return True
    items = candidate.placement.num_stages * num_microbatches * candidate.num_slices
    # Each prediction simulates the plan twice: with messages and without them.
    return saves_time(shared[0], 2 * predictions * items * (2 + candidate.weight_pieces))


def _weight_pieces(plan: Plan, *, splittable: bool) -> int:
    """Returns the number of actions into which the trainer splits each weight gradient by default.

    Args:
        plan: Plan whose schedule determines the result.
        splittable: Whether the profile has separate times for weight gradients.
    """
    if not catalog.is_rule(plan.schedule):
        shape = plan.schedule, plan.pp, plan.chunks, plan.num_microbatches
        return int(steps_of(*shape).split)
    by_default = schedule_spec(plan.schedule).splits_backward == "by default"
    overlaps = plan.overlap_reduce
    if why_whole_backward(recompute=plan.recompute, overlaps=overlaps, replicas=plan.dp):
        return 0
    return catalog.DEFAULT_PIECES if by_default and splittable and plan.pp > 1 else 0


def _jitter_s(plan: Plan, stages: StageSums, sigma: float) -> float:
    """Returns the time in seconds by which random variation of action durations lengthens a step.

    ``sigma`` is the standard deviation of the logarithm of a duration. The result is 0 for a
    run-time scheduling rule, because such a rule runs another action if an input is late.
    """
    if sigma <= 0 or catalog.is_rule(plan.schedule):
        return 0.0
    count = plan.num_microbatches
    durations = stages.durations_s
    if (widths := dealt_widths(plan)) is not None:
        # Approximate the jitter with that of a pipeline with one rank per stage and about as much
        # work.
        count = plan.global_batch // plan.micro_batch
        durations = durations / np.array(widths.sizes, dtype=np.float64)
    steps = steps_of(plan.schedule, plan.pp, plan.chunks, count)
    return jitter_s(steps, durations, stages.latency_s + stages.occupancy_s, sigma)


def as_run(plan: Plan) -> Plan:
    """Returns a copy of the plan in which all stages have the same microbatch size.

    If the trainer cannot run the copy, or if all stages already have equal parallel sizes, ``plan``
    is returned unchanged.
    """
    is_tp_1 = all(
        replica.tp == 1 for stage_place in plan.places for replica in stage_place.replicas
    )
    if plan.uniform or not is_tp_1 or plan.chunks > 1 or plan.distributed_optimizer:
        return plan
    size = math.gcd(*(stage_place.micro_batch for stage_place in plan.places))
    places = tuple(replace(stage_place, micro_batch=size) for stage_place in plan.places)
    return replace(plan, micro_batch=size, places=places)


def dealt_widths(plan: Plan) -> Widths | None:
    """Returns the number of replicas of each stage if the numbers differ between stages.

    The result is ``None`` if all parallel sizes are equal, or if microbatch sizes differ.
    """
    if plan.uniform or any(
        stage_place.micro_batch != plan.micro_batch for stage_place in plan.places
    ):
        return None
    return Widths(tuple(len(stage_place.replicas) for stage_place in plan.places))


def held_of(plan: Plan, widths: Widths) -> tuple[float, ...]:
    """Returns, for each stage, the maximum number of microbatches that a replica holds.

    Args:
        plan: Plan that distributes microbatches over the replicas of each stage.
        widths: Number of replicas of each stage, from :func:`dealt_widths`.
    """
    held: list[float] = []
    count = plan.global_batch // plan.micro_batch
    for stage in range(widths.num_stages):
        dealt = widths.own_microbatches(stage, count)
        if plan.schedule == "1f1b":
            held.append(min(widths.warmup(stage) + 1.0, dealt))
        elif plan.schedule == "gpipe":
            held.append(float(dealt))
        else:
            held.append(unequal_widths.default_cap(widths, stage, dealt))
    return tuple(held)


def _hop_s(
    sender: StagePlace, receiver: StagePlace, inputs: PlanInputs, bytes_per_sample: float
) -> tuple[float, float]:
    """Returns the time of one message from a replica of ``sender`` to a replica of ``receiver``.

    Returns:
        Latency between the slowest pair of replicas, and the time during which their link is busy,
        both in seconds.
    """
    hops = [
        boundary_s(
            replace(sender, replicas=(source,)),
            replace(receiver, replicas=(target,)),
            inputs,
            bytes_per_sample,
        )
        for source in sender.replicas
        for target in receiver.replicas
    ]
    return max(hops, key=sum)


def _dealt_times(plan: Plan, widths: Widths, durations_s: Any, message_s: Any) -> ScheduleTimes:
    """Simulates a step that distributes microbatches over the replicas of each stage.

    Args:
        plan: Plan to simulate.
        widths: Number of replicas of each stage, from :func:`dealt_widths`.
        durations_s: Times of forward pass, input gradients and weight gradients, in seconds,
            ``[3, stages]``.
        message_s: Times of the messages after forward and backward passes in seconds, ``[2,
            stages]``.
    """
    step = unequal_widths.simulate(
        plan.schedule,
        widths,
        plan.global_batch // plan.micro_batch,
        forward_s=durations_s[0].tolist(),
        backward_s=durations_s[1:].sum(axis=0).tolist(),
        message_s=message_s.max(axis=0)[:-1].tolist(),
    )
    of_stage = [list(widths.ranks_of(stage)) for stage in range(widths.num_stages)]
    ends = np.array([ends[-1] for ends in step.ends_ps]) / PS_PER_S
    busy = np.array(step.busy_s)
    return ScheduleTimes(
        end_s=np.array([ends[ranks].max() for ranks in of_stage]),
        busy_s=np.array([busy[ranks].mean() for ranks in of_stage]),
    )
