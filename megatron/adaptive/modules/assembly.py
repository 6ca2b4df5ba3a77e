"""From a model to the programs that one rank runs: cut it, keep this rank's part, prepare that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megatron.adaptive.modules.batch import BatchShape, stretched
from megatron.adaptive.modules.cutting import (
    StagePlan,
    balanced,
    check_shared,
    check_stages,
    check_weights,
    given_partition,
    keep_only,
    slice_tape,
)
from megatron.adaptive.modules.mesh import Mesh
from megatron.adaptive.modules.program import MessageLayout, StageProgram
from megatron.adaptive.modules.recording import Forward, Forwards, Slicing, Tape
from megatron.adaptive.modules.segments import check_replay, measure_segments
from megatron.adaptive.modules.update import Update
from megatron.adaptive.schedule.placement import Placement

_REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class PipelineRequest:
    """Holds what a user asked for; see :class:`~megatron.adaptive.modules.pipeline.Pipeline`.

    Attributes:
        forward: the model, wholly there.
        sample: a batch.
        batch_size: samples of a step over all replicas.
        pipeline_size: processes of a pipeline; ``auto``, or ``None`` without a microbatch, leaves
            them to the planner.
        micro_batch_size: samples of a microbatch; ``None`` leaves them to the planner.
        partition: segments of each stage; ``None`` for a balanced one.
        weights: what each segment costs; ``None`` to measure it.
    """

    forward: Forward
    sample: Mapping[str, torch.Tensor]
    batch_size: int
    pipeline_size: int | Literal["auto"] | None
    micro_batch_size: int | None
    memory_limit_bytes: float | None
    schedule: str
    chunks: int | None
    activation_cap: float | None
    split_backward: bool | None
    partition: str | Sequence[int] | None
    weights: Sequence[float] | None
    shared_weights: Sequence[Sequence[str]]
    slicing: Slicing


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Holds what a rank needs of the model.

    Attributes:
        cut_points: names of all cut points.
        partition: segments of each stage.
        weights: what each segment costs, empty where nobody asked.
        programs, eval_programs: of this rank's stages, in training and in evaluation.
        held: parameters and buffers of this rank, by name.
        largest_message: bytes of the largest between two stages of the pipeline.
        update: the end of a step.
    """

    cut_points: tuple[str, ...]
    partition: tuple[int, ...]
    weights: tuple[float, ...]
    programs: list[StageProgram]
    eval_programs: list[StageProgram]
    held: dict[str, torch.Tensor]
    largest_message: int
    update: Update


def assemble(
    request: PipelineRequest, shape: BatchShape, mesh: Mesh, placement: Placement
) -> Assembly:
    """Cut the model, keep this rank's part of it and prepare to run that. Collective.

    Raises:
        ConfigError: the model cannot be cut so.
    """
    forward, weights = request.forward, request.weights
    sample = stretched(request.sample, shape.micro_batch_size)
    first = shape.microbatch(sample, 0, forward.device)
    forwards = Forwards.of(forward, first, request.slicing)
    tape = forwards.training
    check_stages(tape.num_segments, placement.num_stages)
    check_shared(tape, request.shared_weights)

    def measured() -> tuple[float, ...]:
        if shape.samples >= 2 * shape.micro_batch_size:
            check_replay(forward, forwards, shape.microbatch(sample, 1, forward.device))
        if request.partition or weights:
            return tuple(weights or ())
        found = measure_segments(
            forward, tape, first, forward.device, split=False, repeats=_REPEATS
        )
        return tuple(one.seconds for one in found)

    weights = mesh.on_first(measured)  # times differ from rank to rank: one decides
    if request.partition is not None:
        partition = given_partition(request.partition, tape.num_segments, placement.num_stages)
    else:
        check_weights(weights, tape.num_segments)
        partition = balanced(weights, placement.num_stages)
    return _hold(forward, forwards, partition, weights, mesh, placement)


def _hold(
    forward: Forward,
    forwards: Forwards,
    partition: tuple[int, ...],
    weights: tuple[float, ...],
    mesh: Mesh,
    placement: Placement,
) -> Assembly:
    model, device = forward.model, mesh.accelerator.device
    plans = slice_tape(forwards.training, partition)
    eval_plans = slice_tape(forwards.evaluation, partition)
    stages = [placement.stage_of(mesh.pp_rank, c) for c in range(placement.num_chunks)]
    uses: dict[str, set[int]] = {}
    for stage, both in enumerate(zip(plans, eval_plans, strict=True)):
        for plan in both:
            for name in plan.parameters:
                uses.setdefault(name, set()).add(placement.locate(stage)[0])
    mine = {n for s in stages for p in (plans[s], eval_plans[s]) for n in p.buffers}
    mine |= {name for name, ranks in uses.items() if mesh.pp_rank in ranks}
    order = [name for name, _ in model.named_parameters()]
    if 0 in stages:  # somebody must keep those that nobody uses for a checkpoint
        mine.update(name for name in order if name not in uses)
    held = keep_only(model, mine, device)

    def programs(tape: Tape, of: Sequence[StagePlan]) -> list[StageProgram]:
        return [StageProgram(tape, of[stage], held, device) for stage in stages]

    shared = {n: tuple(sorted(uses[n])) for n in order if len(uses.get(n, ())) > 1}
    return Assembly(
        cut_points=tuple(forwards.training.cuts),
        partition=partition,
        weights=weights,
        programs=programs(forwards.training, plans),
        eval_programs=programs(forwards.evaluation, eval_plans),
        held=held,
        largest_message=max(
            MessageLayout.of(tape.values[number] for number in plan.sent).nbytes
            for tape, of in ((forwards.training, plans), (forwards.evaluation, eval_plans))
            for plan in of
        ),
        update=Update(
            mesh=mesh,
            parameters={n: held[n] for n in order if n in held and n in uses},  # type: ignore[misc]
            shared=shared,
            groups=mesh.groups_of(dict.fromkeys(shared.values())),
        ),
    )
