"""From a model to the programs that one rank runs: cut it, keep this rank's part, prepare that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.modules.batch import BatchShape, samples_in, stretched
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
from megatron.adaptive.modules.recording import Forwards, SampledModel, Tape
from megatron.adaptive.modules.segments import check_replay, measure_segments
from megatron.adaptive.modules.update import Update
from megatron.adaptive.schedule.stage_placement import Placement

_REPEATS = 3


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PipelineSettings(SampledModel):
    """Holds what a user asks of a :class:`~megatron.adaptive.modules.pipeline.Pipeline`.

    Attributes:
        micro_batch_size: samples of a microbatch; the planner's best where ``None``.
        pipeline_size: processes of a pipeline, the rest are replicas; the planner's best where it
            is ``auto``, or ``None`` without a ``micro_batch_size``; else all where ``None``.
        batch_size: samples of a step over all replicas, for the planner; those of the sample where
            ``None``.
        memory_limit_bytes: that a process may use, for the planner; what the device has free where
            ``None``.
        schedule: order of work, see ``docs/schedules.md``.
        chunks: stages per process; chosen by the schedule where ``None``.
        activation_cap: most activations a process keeps, in microbatches over its chunks.
        split_backward: compute weight gradients apart; chosen by the schedule where ``None``.
        partition: segments between cut points that each stage gets, as ``"3-4-5"`` or numbers.
        weights: what each segment costs, in any unit; measured with the sample where ``None``.
        seed: of dropout and all else that is random within the model.
        transport: how neighbouring processes are connected.
        trace_dir: folder for traces, ``None`` for none.
        timeout_s: limit of every wait for another process.
        hang_after_s: name the process that others wait for when nothing has moved for this long; 0
            for never, 10 times the median step and at least 30 s where ``None``. All may rest
            between two steps for as long as the caller likes.
        on_hang: ``report``, a page and a line, or ``end`` the job besides.
    """

    micro_batch_size: int | None = None
    pipeline_size: int | Literal["auto"] | None = None
    batch_size: int | None = None
    memory_limit_bytes: float | None = None
    schedule: str = "adaptive"
    chunks: int | None = None
    activation_cap: float | None = None
    split_backward: bool | None = None
    partition: str | Sequence[int] | None = None
    weights: Sequence[float] | None = None
    seed: int = 1234
    transport: TransportConfig | None = None
    trace_dir: str | None = None
    timeout_s: float = 600.0
    hang_after_s: float | None = None
    on_hang: str = "report"

    @property
    def samples(self) -> int:
        """Samples of a step over all replicas."""
        given = self.batch_size
        return samples_in(self.sample_batch, "sample_batch") if given is None else given


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
    request: PipelineSettings, shape: BatchShape, mesh: Mesh, placement: Placement
) -> Assembly:
    """Cut the model, keep this rank's part of it and prepare to run that. Collective.

    Raises:
        ConfigError: the model cannot be cut so.
    """
    weights = request.weights
    sample = stretched(request.sample_batch, shape.micro_batch_size)
    first = shape.microbatch(sample, 0, request.device)
    forwards = Forwards.of(request, first, request.slicing)
    tape = forwards.training
    check_stages(tape.num_segments, placement.num_stages)
    check_shared(tape, request.shared_weights)

    def measured() -> tuple[float, ...]:
        if shape.samples >= 2 * shape.micro_batch_size:
            check_replay(request, forwards, shape.microbatch(sample, 1, request.device))
        if request.partition or weights:
            return tuple(weights or ())
        found = measure_segments(
            request, tape, first, request.device, split=False, repeats=_REPEATS
        )
        return tuple(one.seconds for one in found)

    weights = mesh.on_first(measured)  # times differ from rank to rank: one decides
    if request.partition is not None:
        partition = given_partition(request.partition, tape.num_segments, placement.num_stages)
    else:
        check_weights(weights, tape.num_segments)
        partition = balanced(weights, placement.num_stages)
    return _hold(request.model, forwards, partition, weights, mesh, placement)


def _hold(
    model: torch.nn.Module,
    forwards: Forwards,
    partition: tuple[int, ...],
    weights: tuple[float, ...],
    mesh: Mesh,
    placement: Placement,
) -> Assembly:
    device = mesh.accelerator.device
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
