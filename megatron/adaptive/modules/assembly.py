"""Cuts a model into stages and keeps the calls, parameters and buffers that this rank needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, cast

import torch

from megatron.adaptive.config.flags import assign
from megatron.adaptive.config.input_files import printable
from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.config.trace_settings import checked_profile_ranks
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.batch import Microbatch, Signature, is_list, samples_in
from megatron.adaptive.modules.content import Dealing, MicrobatchOrder, check_rules
from megatron.adaptive.modules.cut_points import are_added, describe
from megatron.adaptive.modules.cutting import (
    check_stages,
    check_weights,
    given_partition,
    keep_only,
    segment_kinds,
)
from megatron.adaptive.modules.equal_start import equalize
from megatron.adaptive.modules.fake_recording import is_on_meta
from megatron.adaptive.modules.first_partition import FirstPartition, SegmentTimes
from megatron.adaptive.modules.mesh import Mesh
from megatron.adaptive.modules.recompute import Recompute, recomputed_ranges
from megatron.adaptive.modules.recording import (
    Forwards,
    Loss,
    RecordingCache,
    SampledModel,
    Slicing,
)
from megatron.adaptive.modules.recordings import (
    BufferUse,
    CutForwards,
    Example,
    KeptPart,
    Recordings,
    evaluates_alike,
    frozen_segments_of,
    homes_of,
    record_examples,
)
from megatron.adaptive.modules.segments import check_replay
from megatron.adaptive.modules.update import Update
from megatron.adaptive.rebalance.time_limit import LIMIT_S, limit_of_search
from megatron.adaptive.schedule.stage_placement import Placement

Initialize = Callable[[Mapping[str, torch.Tensor]], None]
"""Function that fills parameters and buffers in place. Its argument is a dict that maps their names
to tensors.
"""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PipelineSettings(SampledModel):
    """Contains the settings of a :class:`~megatron.adaptive.modules.pipeline.Pipeline`.

    Attributes:
        max_recordings: Maximum number of recordings of the model's forward pass to keep. Each new
            combination of tensor shapes and values of ``decisive_entries`` in a microbatch needs a
            new recording.
        order: Order in which a replica runs the microbatches of a list. ``given`` keeps the list's
            order, and is required if the forward pass changes buffers in training. ``work`` and
            ``time`` run cheap microbatches first and last. ``work`` measures the cost of a
            microbatch by its recording's operation count, and gives the same order in every run.
            ``time`` uses the predicted time.
        dealing: Method by which ``share`` distributes a list of microbatches over replicas.
            ``turns`` assigns microbatches round-robin. ``work`` balances operation counts across
            replicas, and ``time`` balances predicted times.
        compare_batches: Whether to check in some steps that all processes of a replica pass the
            same batch; use ``False`` if batches differ on purpose.
        repartition: Whether to move segments and their optimizer state between processes if
            measured times predict a gain: ``auto`` or ``off``.
        repartition_interval: Number of steps between checks for a better partition; at least 4.
        repartition_gain: Minimum predicted gain for moving segments, as a fraction of the step
            time.
        micro_batch_size: Number of samples per microbatch; ``None`` lets the planner choose.
            Must be ``None`` or 1 if the sample batch is a list of microbatches.
        pipeline_size: Number of processes per pipeline. Additional processes run replicas of the
            pipeline. ``auto`` lets the planner choose. ``None`` uses all processes, or lets the
            planner choose if ``micro_batch_size`` is also ``None``.
        batch_size: Number of samples per step over all replicas; ``None`` uses the size of the
            sample batch.
        memory_limit_bytes: Memory in bytes per process that planned layouts may use; ``None``
            allows 90% of the device's free memory.
        schedule: Name of the schedule, as listed in ``docs/schedules.md``.
        chunks: Number of stages per process; ``None`` uses the schedule's default.
        activation_cap: Maximum number of microbatches whose activations a process keeps. One
            microbatch in all stages of the process counts as 1. ``None`` uses a default that
            depends on the numbers of stages and microbatches.
        split_backward: Whether to compute weight gradients in separate actions, not in the backward
            pass. ``None`` uses the schedule's default, or ``False`` if ``recompute`` is ``"all"``,
            because separate weight gradients would need the memory that recomputation saves.
        partition: Number of segments (parts between cut points) in each stage, such as ``"3-4-5"``
            or a sequence of numbers; ``None`` balances the costs of the stages.
        weights: Cost of each segment, in any unit; ``None`` measures the costs with the sample
            batch.
        seed: Seed of the random numbers that the model draws, for example in dropout.
        transport: Settings of the connections between processes; ``None`` uses the defaults.
        trace_dir: Folder to which traces are written; ``None`` disables tracing.
        trace_detail: Events in a trace: ``actions`` for actions only, ``layers`` to add the forward
            and backward passes of each segment, ``collectives`` to also add each collective,
            ``kernels`` to also add operators (CPU) or kernels (GPU) of selected steps and ranks.
        trace_interval: Number of steps from one traced step to the next; 1 traces every step.
        trace_iterations: Number of traced steps after which tracing stops; ``None`` for no limit.
        trace_otlp: URL of an OpenTelemetry collector that also receives the spans while the job
            runs (OTLP over HTTP), or ``None``. Requires ``trace_dir``.
        profile_ranks: Ranks of the processes that record kernels.
        profile_step_start: First step in which kernels are recorded, counted from 1.
        profile_step_end: First step after the recorded ones, in which kernels are not recorded.
        timeout_s: Maximum time in seconds to wait for another process.
        hang_after_s: Number of seconds without progress after which the process that blocks all
            others is reported. 0 disables the report. ``None`` uses 10 times the median step time,
            but at least 30 s. The time between two steps does not count.
        on_hang: Reaction to a hang: ``report`` writes a report page and prints a line, ``end`` also
            stops the job.
        initialize: Function that fills this process's parameters and buffers in place. Its argument
            maps their names to tensors. Required if the model is on the ``meta`` device.
    """

    max_recordings: int = 64
    order: MicrobatchOrder = "given"
    dealing: Dealing = "turns"
    compare_batches: bool = True
    repartition: str = "off"
    repartition_interval: int = 50
    repartition_gain: float = 0.05
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
    trace_detail: str = "actions"
    trace_interval: int = 1
    trace_iterations: int | None = None
    trace_otlp: str | None = None
    profile_ranks: Sequence[int] = (0,)
    profile_step_start: int = 10
    profile_step_end: int = 12
    timeout_s: float = 600.0
    hang_after_s: float | None = None
    on_hang: str = "report"
    initialize: Initialize | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules(self.order, self.dealing)
        assign(self, "profile_ranks", checked_profile_ranks(self.profile_ranks))
        if self.initialize is None and is_on_meta(self.model):
            named = (*self.model.named_parameters(), *self.model.named_buffers())
            name = next(name for name, tensor in named if tensor.is_meta)
            raise ConfigError(
                f"{name} of the model is on the meta device and has no data; pass initialize, a "
                "function that fills the tensors of this process, or build the model with its "
                "weights"
            )

    @property
    def samples(self) -> int:
        """Returns the total number of samples per step over all replicas.

        If the sample batch is a list, each of its microbatches counts as a sample.
        """
        if self.batch_size is not None:
            return self.batch_size
        if is_list(self.sample_batch):
            return len(self.sample_batch)
        return samples_in(self.sample_batch, "sample_batch")


class PipelineOptions(TypedDict, total=False):
    """Declares the types of ``Pipeline``'s keyword arguments for functions that forward them."""

    loss: Loss | None
    arguments: Mapping[str, Any] | None
    mixed_precision: Literal["bf16", "fp16"] | None
    decisive_entries: Sequence[str]
    shared_weights: Sequence[Sequence[str]]
    slicing: Slicing
    recompute: Recompute
    max_recordings: int
    order: MicrobatchOrder
    dealing: Dealing
    compare_batches: bool
    repartition: Literal["off", "auto"]
    repartition_interval: int
    repartition_gain: float
    micro_batch_size: int | None
    pipeline_size: int | Literal["auto"] | None
    batch_size: int | None
    memory_limit_bytes: float | None
    schedule: str
    chunks: int | None
    activation_cap: float | None
    split_backward: bool | None
    partition: str | Sequence[int] | None
    weights: Sequence[float] | None
    seed: int
    transport: TransportConfig | None
    trace_dir: str | None
    trace_detail: Literal["actions", "layers", "collectives", "kernels"]
    trace_interval: int
    trace_iterations: int | None
    trace_otlp: str | None
    profile_ranks: Sequence[int]
    profile_step_start: int
    profile_step_end: int
    timeout_s: float
    hang_after_s: float | None
    on_hang: Literal["report", "end"]


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Holds the part of the model that this rank trains.

    Attributes:
        cut_points: Names of all cut points in the order in which the forward pass reaches them.
        shared_weights: Names of each parameter that several processes use, one tuple per parameter.
        partition: Number of segments in each stage.
        weights: Relative cost of each segment; empty if the partition was chosen without costs.
        recordings: Programs of this rank's stages for each microbatch signature (shapes and
            dtypes).
        held: Parameters and buffers that this rank keeps, keyed by name.
        largest_message: Size of the largest message between two stages, in bytes.
        update: Object that reduces gradients and updates the parameters at the end of a step.
        forwards: Recordings of the model's forward pass for the microbatches of the sample batch.
        sample_work: Operation count of each segment, keyed by the signature of the microbatch.
        segment_kinds: Index of each segment's kind. Segments of the same kind make the same calls
            on the first microbatch of the sample batch. Empty if segments are not measured.
        unused_entries: Names of the sample batch's entries that no stage uses; the same on all
            ranks.
    """

    cut_points: tuple[str, ...]
    shared_weights: tuple[tuple[str, ...], ...]
    partition: tuple[int, ...]
    weights: tuple[float, ...]
    recordings: Recordings
    held: dict[str, torch.Tensor]
    largest_message: int
    update: Update
    forwards: tuple[Forwards, ...]
    sample_work: Mapping[Signature, Sequence[float]]
    segment_kinds: tuple[int, ...]
    unused_entries: tuple[str, ...]

    @property
    def mean_work(self) -> tuple[float, ...]:
        """Returns each segment's operation count, averaged over the sample batch's signatures.

        A signature describes the shapes and dtypes of a microbatch.
        """
        works = zip(*self.sample_work.values(), strict=True)
        return tuple(sum(work) / len(work) for work in works)

    @property
    def frozen_segments(self) -> int:
        """Returns the number of leading segments that are frozen in all recordings."""
        return frozen_segments_of(self.forwards)


def assemble(
    request: PipelineSettings,
    microbatches: Sequence[Microbatch],
    mesh: Mesh,
    first_partition: FirstPartition,
    cache: RecordingCache,
) -> Assembly:
    """Cuts the model into stages and keeps this rank's stages. All ranks must call this together.

    Args:
        request: Settings of the pipeline, with all sizes set.
        microbatches: Microbatches of the sample batch.
        mesh: Replica and pipeline position of this process, and its process groups.
        first_partition: Object that measures segments and divides them among the stages.
        cache: Recordings that the planner has already made of the model's forward pass.

    Raises:
        ConfigError: If the model cannot be cut into the requested stages.
    """
    placement = first_partition.placement
    weights = request.weights
    moved = [
        {name: tensor.to(request.device) for name, tensor in microbatch.items()}
        for microbatch in microbatches
    ]
    examples = _record(request, moved, mesh, cache)
    tape = examples[0].forwards.training
    num_segments = tape.num_segments
    check_stages(num_segments, placement.num_stages)
    recomputed_ranges(tape, request.recompute)
    if are_added(request.model) and mesh.dp_rank == mesh.pp_rank == 0:
        print(f"cut points: {describe(tape.cuts)}", flush=True)

    def measured() -> tuple[tuple[float, ...], SegmentTimes]:
        if not is_on_meta(request.model):
            _check_replays(request, examples, moved)
        # Do not measure costs if the user set the costs or the partition, or if a single stage
        # contains all segments.
        if request.partition or weights or placement.num_stages == 1:
            return tuple(weights or ()), ()
        times = first_partition.measure(request, examples)
        return tuple(map(sum, times)), times

    # Measured times differ between ranks, but all ranks must cut the model at the same points.
    # Therefore, all ranks use the times of the first rank.
    weights, times = mesh.on_first(measured)
    if request.partition is not None:
        partition = given_partition(request.partition, num_segments, placement.num_stages)
    else:
        check_weights(weights or None, num_segments)
        costs = weights or (1.0,) * num_segments
        samples = mesh.dp_size * (request.micro_batch_size or 1)
        count = max(1, request.samples // samples)
        partition = mesh.on_first(
            lambda: first_partition.choose(
                examples,
                costs,
                times,
                num_microbatches=count,
                limit_s=limit_of_search(LIMIT_S, mesh.timeout),
            )
        )
    assembly = _keep_part(request, examples, partition, weights, mesh, placement)
    shared = {name for names in assembly.shared_weights for name in names}
    equalize(assembly.held, shared, mesh)
    return assembly


def _record(
    request: PipelineSettings, microbatches: Sequence[Microbatch], mesh: Mesh, cache: RecordingCache
) -> list[Example]:
    """Records the model's forward passes for the sample batch.

    The model is recorded in training mode and in evaluation mode. If the model is on the ``meta``
    device, only the first rank records evaluation mode at first, to check whether evaluation needs
    a different partition. If not, all ranks record evaluation mode when the pipeline first
    evaluates a batch.

    Args:
        request: Settings of the pipeline.
        microbatches: Microbatches of the sample batch, on the model's device.
        mesh: Replica and pipeline position of this process, and its process groups.
        cache: Recordings that the planner has already made of the model's forward pass.
    """
    if mesh.pipeline_size == 1 or not is_on_meta(request.model) or is_list(request.sample_batch):
        return record_examples(request, microbatches, cache)
    examples = record_examples(request, microbatches, cache, modes=("training",))
    if mesh.on_first(lambda: all(evaluates_alike(request, example, cache) for example in examples)):
        return examples
    return record_examples(request, microbatches)


def _check_replays(
    request: PipelineSettings, examples: Sequence[Example], microbatches: Sequence[Microbatch]
) -> None:
    """Checks that each recording in ``examples`` gives correct results for a second microbatch.

    The second microbatch is taken from ``microbatches`` and must have the same signature (shapes
    and dtypes) as the recorded one. A recording without such a microbatch is not checked.
    """
    forwards_of = {example.signature: example for example in examples}
    checked: set[Signature] = set()
    for microbatch in microbatches:
        signature = Signature.of(microbatch, request.decisive_entries)
        example = forwards_of[signature]
        if microbatch is not example.microbatch and signature not in checked:
            checked.add(signature)
            check_replay(request, example.forwards, microbatch)


def _keep_part(
    request: PipelineSettings,
    examples: Sequence[Example],
    partition: tuple[int, ...],
    weights: tuple[float, ...],
    mesh: Mesh,
    placement: Placement,
) -> Assembly:
    """Keeps the parameters of this rank's stages and returns the rank's :class:`Assembly`.

    ``partition`` (number of segments per stage) and ``placement`` (assignment of stages to ranks)
    determine the stages. ``examples`` contains the recordings of the sample batch, and ``weights``
    contains the cost of each segment.
    """
    model = request.model
    device = mesh.accelerator.device
    order = [name for name, _ in model.named_parameters()]
    forwards = tuple(example.forwards for example in examples)
    layout = PartitionLayout.of(forwards, partition, order, mesh.pp_rank, placement, request.order)
    cut_examples = layout.cuts
    unused = mesh.on_first(lambda: _report_unused(request, examples, cut_examples))
    uses = layout.uses
    held = _hold(request, layout.kept, device)
    cuts = tuple(forwards[0].training.cuts)
    part = KeptPart(
        cuts=cuts,
        partition=partition,
        homes=homes_of(forwards),
        parameter_ranks=uses,
        held=held,
        placement=placement,
        pp_rank=mesh.pp_rank,
        device=device,
        recompute=request.recompute,
        buffer_use=layout.buffer_use,
        late=examples[0].late,
    )
    ways = {example.forwards.way for example in examples} - {"record"}
    way = min(ways, default="record")
    recordings = Recordings(request, part, way, request.max_recordings)
    for example, cut in zip(examples, cut_examples, strict=True):
        recordings.add(example.signature, cut)
    return Assembly(
        cut_points=cuts,
        shared_weights=names_of_shared(forwards, layout.shared),
        partition=partition,
        weights=weights,
        recordings=recordings,
        held=held,
        largest_message=max(cut.largest_message for cut in cut_examples),
        update=Update(
            mesh=mesh,
            parameters={
                n: cast(torch.nn.Parameter, held[n]) for n in order if n in held and n in uses
            },
            shared=layout.shared,
            groups=mesh.groups_of(dict.fromkeys(layout.shared.values())),
        ),
        forwards=forwards,
        sample_work={
            example.signature: cut.work for example, cut in zip(examples, cut_examples, strict=True)
        },
        segment_kinds=_kinds_of(request, examples),
        unused_entries=unused,
    )


def _kinds_of(request: PipelineSettings, examples: Sequence[Example]) -> tuple[int, ...]:
    """Returns the index of each segment's kind, or an empty tuple if segments are not traced.

    Segments of the same kind make the same calls in the first recording of ``examples``. The trace
    settings in ``request`` determine whether segments are traced.
    """
    if request.trace_dir is None or request.trace_detail == "actions":
        return ()
    return segment_kinds(examples[0].forwards.training)


def _hold(
    request: PipelineSettings, names: set[str], device: torch.device
) -> dict[str, torch.Tensor]:
    """Keeps the named parameters and buffers, and fills those that are on the ``meta`` device.

    Args:
        request: Settings of the pipeline.
        names: Names of the parameters and buffers to keep.
        device: Device to which the parameters and buffers are moved.
    """
    named = (*request.model.named_parameters(), *request.model.named_buffers())
    on_meta = {name for name, tensor in named if tensor.is_meta}
    held = keep_only(request.model, names, device)
    if request.initialize is not None:
        _fill({name: held[name] for name in held if name in on_meta}, request.initialize)
    return held


@dataclass(frozen=True, kw_only=True, eq=False)
class PartitionLayout:
    """Holds the stages of a partition, and the parameters and buffers that each rank needs.

    Attributes:
        cuts: Recordings of the model's forward pass for the sample batch, cut into stages.
        buffer_use: Ranks that use each buffer.
        uses: Pipeline positions of the ranks that use each parameter, keyed by the parameter's
            name; equal on all ranks.
        shared: Entries of ``uses`` for the parameters that several ranks use. The positions are
            sorted.
        kept: Names of the parameters and buffers that this rank keeps.
    """

    cuts: Sequence[CutForwards]
    buffer_use: BufferUse
    uses: Mapping[str, set[int]]
    shared: Mapping[str, tuple[int, ...]]
    kept: set[str]

    @classmethod
    def of(
        cls,
        forwards: Sequence[Forwards],
        partition: Sequence[int],
        order: Sequence[str],
        pp_rank: int,
        placement: Placement,
        microbatch_order: str,
    ) -> PartitionLayout:
        """Returns the layout of a partition.

        Args:
            forwards: Recordings of the model's forward pass for the sample batch.
            partition: Number of segments in each stage.
            order: Names of all parameters of the model, in the model's order.
            pp_rank: Position of this rank in its pipeline.
            placement: Assignment of stages to ranks.
            microbatch_order: Order in which a replica runs its microbatches.

        Raises:
            ConfigError: If the model cannot be cut into these stages.
        """
        cuts = [CutForwards.of(each, partition) for each in forwards]
        buffer_use = BufferUse(placement=placement, order=microbatch_order)
        for cut in cuts:
            buffer_use.add(cut)
        uses = _ranks_of_parameters(cuts, placement)
        return cls(
            cuts=cuts,
            buffer_use=buffer_use,
            uses=uses,
            shared={n: tuple(sorted(uses[n])) for n in order if len(uses.get(n, ())) > 1},
            kept=_names_to_keep(cuts, uses, order, pp_rank, placement),
        )


def names_of_shared(
    forwards: Sequence[Forwards], shared: Iterable[str]
) -> tuple[tuple[str, ...], ...]:
    """Returns all names of each parameter that several processes use.

    Args:
        forwards: Recordings of the model's forward pass for the sample batch.
        shared: Names of the parameters that several processes use. A parameter with several names
            is listed under its first name.
    """
    aliases = forwards[0].training.aliases
    return tuple((name, *aliases.get(name, ())) for name in shared)


def _ranks_of_parameters(
    cut_examples: Sequence[CutForwards], placement: Placement
) -> dict[str, set[int]]:
    """Returns the pipeline positions of the ranks that use each parameter.

    The keys of the returned dict are the names of the parameters. ``cut_examples`` contains the
    stages of each recording, and ``placement`` assigns the stages to ranks.
    """
    uses: dict[str, set[int]] = {}
    for cut in cut_examples:
        for stage in range(placement.num_stages):
            for plan in cut.plans(stage):
                for name in plan.parameters:
                    uses.setdefault(name, set()).add(placement.locate(stage)[0])
    return uses


def _names_to_keep(
    cut_examples: Sequence[CutForwards],
    uses: Mapping[str, set[int]],
    order: Sequence[str],
    pp_rank: int,
    placement: Placement,
) -> set[str]:
    """Returns the names of the parameters and buffers that a rank keeps.

    Args:
        cut_examples: Recordings of the model's forward pass for the sample batch, cut into stages.
        uses: Pipeline positions of the ranks that use each parameter.
        order: Names of all parameters of the model.
        pp_rank: Position of the rank in its pipeline.
        placement: Assignment of stages to ranks.
    """
    stages = [placement.stage_of(pp_rank, chunk) for chunk in range(placement.num_chunks)]
    kept = {name for name, ranks in uses.items() if pp_rank in ranks}
    for cut in cut_examples:
        # If Python code of the model reads the values of a buffer, every rank keeps this buffer,
        # because later recordings run the whole model on each rank.
        for tape in cut.forwards.tapes.values():
            kept |= tape.read_buffers
        for stage in stages:
            for plan in cut.plans(stage):
                kept.update(plan.buffers)
    # The rank of the first stage also keeps the parameters that no stage uses, because checkpoints
    # must contain them.
    if 0 in stages:
        kept.update(name for name in order if name not in uses)
    return kept


def _report_unused(
    request: PipelineSettings, examples: Sequence[Example], cut_examples: Sequence[CutForwards]
) -> tuple[str, ...]:
    """Prints and returns the names of the sample batch's entries that no stage uses.

    ``examples`` contains the microbatches of the sample batch, and ``cut_examples`` contains the
    entries that the stages use.
    """
    used = set(request.decisive_entries)
    for cut in cut_examples:
        for plans in cut.plans_by_mode.values():
            used.update(name for plan in plans for name in plan.inputs)
    unused = sorted({name for example in examples for name in example.microbatch} - used)
    if unused:
        print(f"no stage uses the batch entry {printable(', '.join(unused))}", flush=True)
    return tuple(unused)


def _fill(tensors: Mapping[str, torch.Tensor], initialize: Initialize) -> None:
    """Calls ``initialize`` and checks that it filled all floating-point tensors in ``tensors``.

    Raises:
        ConfigError: If a floating-point tensor is not filled.
    """
    floats = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.numel()
    }
    with torch.no_grad():
        for tensor in floats.values():
            tensor.view(-1)[0] = torch.nan
        initialize(tensors)
    for name, tensor in floats.items():
        if tensor.view(-1)[0].isnan():
            raise ConfigError(
                f"initialize did not fill {name} of shape {list(tensor.shape)}; it must write "
                "values into each tensor in place"
            )
