"""Turns a model into the programs of one rank: cuts it and keeps this rank's parameters."""

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
    """Contains the settings of a :class:`~megatron.adaptive.modules.pipeline.Pipeline`.

    Attributes:
        micro_batch_size: Number of samples of a microbatch; ``None`` lets the planner choose.
        pipeline_size: Number of processes of a pipeline; the others are replicas. ``auto`` lets
            the planner choose, and so does ``None`` without a ``micro_batch_size``; otherwise
            ``None`` means all processes.
        batch_size: Number of samples of a step over all replicas; ``None`` takes the size of the
            sample batch.
        memory_limit_bytes: Memory that a process may use, in bytes, for the planner; ``None``
            takes the free memory of the device.
        schedule: Name of the schedule, see ``docs/schedules.md``.
        chunks: Number of stages per process; ``None`` takes the schedule's default.
        activation_cap: Largest number of activations that a process keeps, in microbatches over
            its chunks.
        split_backward: Whether weight gradients are computed apart; ``None`` takes the schedule's
            default.
        partition: Number of segments between cut points in each stage, as ``"3-4-5"`` or numbers.
        weights: Cost of each segment, in any unit; ``None`` measures it with the sample batch.
        seed: Seed of dropout and of all other random numbers in the model.
        transport: Settings of the connections between neighbouring processes.
        trace_dir: Folder for traces, ``None`` for none.
        timeout_s: Limit of every wait for another process, in seconds.
        hang_after_s: Time in seconds without progress after which a process that others wait for
            is reported; 0 for never, ``None`` for 10 times the median step and at least 30 s. The
            time between two steps does not count.
        on_hang: ``report`` writes a page and a line; ``end`` also ends the job.
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
        """Returns the number of samples of a step over all replicas."""
        if self.batch_size is not None:
            return self.batch_size
        return samples_in(self.sample_batch, "sample_batch")


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Contains a rank's part of the model.

    Attributes:
        cut_points: Names of all cut points.
        partition: Number of segments of each stage.
        weights: Cost of each segment, empty if it was not needed.
        programs: Programs of this rank's stages in training.
        eval_programs: Programs of this rank's stages in evaluation.
        held: Parameters and buffers of this rank, by name.
        largest_message: Size of the largest message between two stages, in bytes.
        update: Update at the end of a step.
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
    """Cuts the model, keeps this rank's part and prepares its programs. Collective.

    Args:
        request: Settings of the pipeline.
        shape: Shape of batches.
        mesh: Position of this process in the job.
        placement: Placement of stages on ranks.

    Raises:
        ConfigError: If the model cannot be cut in this way.
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
        samples = measure_segments(
            request, tape, first, request.device, split=False, repeats=_REPEATS
        )
        return tuple(segment.seconds for segment in samples)

    # Times differ from rank to rank, so all use those of the first.
    weights = mesh.on_first(measured)
    if request.partition is not None:
        partition = given_partition(request.partition, tape.num_segments, placement.num_stages)
    else:
        check_weights(weights, tape.num_segments)
        partition = balanced(weights, placement.num_stages)
    return _keep_part(request.model, forwards, partition, weights, mesh, placement)


def _keep_part(
    model: torch.nn.Module,
    forwards: Forwards,
    partition: tuple[int, ...],
    weights: tuple[float, ...],
    mesh: Mesh,
    placement: Placement,
) -> Assembly:
    """Keeps the parameters of this rank's stages and returns its part of the model."""
    device = mesh.accelerator.device
    plans = slice_tape(forwards.training, partition)
    eval_plans = slice_tape(forwards.evaluation, partition)
    stages = [placement.stage_of(mesh.pp_rank, c) for c in range(placement.num_chunks)]
    uses: dict[str, set[int]] = {}
    for stage, stage_plans in enumerate(zip(plans, eval_plans, strict=True)):
        for plan in stage_plans:
            for name in plan.parameters:
                uses.setdefault(name, set()).add(placement.locate(stage)[0])
    kept = {
        name
        for stage in stages
        for plan in (plans[stage], eval_plans[stage])
        for name in plan.buffers
    }
    kept |= {name for name, ranks in uses.items() if mesh.pp_rank in ranks}
    order = [name for name, _ in model.named_parameters()]
    # The rank of the first stage keeps unused parameters, because checkpoints contain them.
    if 0 in stages:
        kept.update(name for name in order if name not in uses)
    held = keep_only(model, kept, device)

    def programs(tape: Tape, all_plans: Sequence[StagePlan]) -> list[StageProgram]:
        return [StageProgram(tape, all_plans[stage], held, device) for stage in stages]

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
            for tape, all_plans in ((forwards.training, plans), (forwards.evaluation, eval_plans))
            for plan in all_plans
        ),
        update=Update(
            mesh=mesh,
            parameters={n: held[n] for n in order if n in held and n in uses},  # type: ignore[misc]
            shared=shared,
            groups=mesh.groups_of(dict.fromkeys(shared.values())),
        ),
    )
