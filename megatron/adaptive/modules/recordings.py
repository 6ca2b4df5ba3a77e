"""Keeps recordings of the model, cut into stages, for each microbatch signature.

::

    microbatch ──> signature (shapes, dtypes, decisive values) ──> programs of this rank's stages
                        │ if new                                        ▲
                        └──> record the model ──> cut at the same points

The sample batch determines the cut points, the partition, and the parameters that each rank keeps.
In later recordings, a rank may use only the parameters that it keeps.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron.adaptive.config.input_files import printable
from megatron.adaptive.engine.executor import ActivationMeter
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.batch import Microbatch, Signature
from megatron.adaptive.modules.cutting import (
    LateCalls,
    StagePlan,
    frozen_segments,
    late_calls,
    postpone,
    slice_tape,
    unchecked_slices,
    uses_of,
)
from megatron.adaptive.modules.module_settings import ModuleSettings
from megatron.adaptive.modules.program import (
    MessageLayout,
    RankPrograms,
    StageProgram,
    deferred_layer,
)
from megatron.adaptive.modules.recompute import Recompute, changed_buffers, recomputed_ranges
from megatron.adaptive.modules.recording import (
    MODES,
    Forward,
    Forwards,
    Mode,
    RecordingCache,
    SampledModel,
    evaluation_of,
    host_random_state,
)
from megatron.adaptive.modules.tape import Call, Ref, SegmentWork, Tape
from megatron.adaptive.schedule.stage_placement import Placement, frozen_stages_of

# Number of initial steps in which new signatures are expected. A new signature in a later step is
# reported, because recording the model delays the step.
_EARLY_STEPS = 20

_PER_ELEMENT = 8.0
"""Number of multiplications assumed per element of the result, for calls other than matmuls,
convolutions and attention.
"""
# Argument position of the operand whose last dimension is summed over in a matmul, keyed by the
# function's name.
_PRODUCTS = {"linear": 0, "matmul": 0, "mm": 0, "bmm": 0, "grouped_mm": 0, "addmm": 1, "baddbmm": 1}


@dataclass(frozen=True, kw_only=True)
class Example:
    """Contains a microbatch of the sample batch and the forward passes recorded with it.

    Attributes:
        microbatch: Tensors of the microbatch, on the model's device.
        signature: Signature of the microbatch.
        forwards: Recorded forward passes, divided into segments at all cut points.
        count: Number of the sample batch's microbatches that have this signature.
        late: Calls that were moved behind frozen segments; ``None`` if no calls were moved.
    """

    microbatch: Microbatch
    signature: Signature
    forwards: Forwards
    count: int
    late: LateCalls | None = None


def record_examples(
    model: SampledModel,
    microbatches: Iterable[Microbatch],
    cache: RecordingCache | None = None,
    modes: Sequence[Mode] = MODES,
) -> list[Example]:
    """Records the model once for each signature in the sample batch.

    Args:
        model: Model with its settings for recording.
        microbatches: Microbatches of the sample batch, on the model's device.
        cache: Existing recordings to use instead of new ones in training mode.
        modes: Modes in which the model is recorded.

    Returns:
        One recording per signature. The first one contains all cut points. The others follow in the
            order of their microbatches.

    Raises:
        ConfigError: If the model cannot be recorded, no microbatch calls all cut points, or the
            model draws random numbers with Python or numpy instead of torch.
    """
    before = host_random_state()
    first_of: dict[Signature, Microbatch] = {}
    counts: dict[Signature, int] = {}
    for microbatch in microbatches:
        signature = Signature.of(microbatch, model.decisive_entries)
        first_of.setdefault(signature, microbatch)
        counts[signature] = counts.get(signature, 0) + 1
    recorded: dict[Signature, Forwards] = {}
    for signature, microbatch in first_of.items():
        may_miss = len(first_of) > 1
        training = None if may_miss or cache is None else cache.take(microbatch, "training")
        recorded[signature] = (
            Forwards.of(model, microbatch, model.slicing, may_miss=may_miss, modes=modes)
            if training is None
            else _with_modes(model, microbatch, training, modes)
        )
    if model.slicing != "record" and host_random_state() != before:
        raise ConfigError(
            "the forward pass draws random numbers with random or numpy.random, but all "
            "microbatches would get the numbers of the sample_batch; draw them with torch, or "
            'set slicing="record" if all microbatches may get the same numbers'
        )
    whole = max(recorded, key=lambda signature: len(recorded[signature].training.cuts))
    if len(recorded) > 1:
        # Record the microbatch with the most cut points again, now without may_miss. This raises an
        # error if the microbatch does not call all cut points.
        recorded[whole] = Forwards.of(model, first_of[whole], model.slicing, modes=modes)
    cuts = recorded[whole].training.cuts
    homes = homes_of([recorded[whole]])
    for forwards in recorded.values():
        align(forwards, cuts, homes)
    late = late_calls(recorded[whole].training)
    for forwards in recorded.values():
        for tape in forwards.tapes.values():
            postpone(tape, late)
    order = [whole, *(signature for signature in recorded if signature != whole)]
    return [
        Example(
            microbatch=first_of[signature],
            signature=signature,
            forwards=recorded[signature],
            count=counts[signature],
            late=late,
        )
        for signature in order
    ]


def _with_modes(
    model: SampledModel, microbatch: Microbatch, training: Forwards, modes: Sequence[Mode]
) -> Forwards:
    """Adds a recording in evaluation mode to ``training`` if ``modes`` contains this mode.

    Args:
        model: Model with its settings for recording.
        microbatch: Tensors of the recorded microbatch, on the model's device.
        training: Recording in training mode.
        modes: Modes in which the model is recorded.
    """
    if "evaluation" not in modes:
        return training
    evaluation = evaluation_of(model, microbatch, training)
    if evaluation.way != training.way:
        # Record both modes together, because they must be recorded by the same method.
        return Forwards.of(model, microbatch, model.slicing, modes=modes)
    return training.joined(evaluation, model.model)


def evaluates_alike(model: SampledModel, example: Example, cache: RecordingCache) -> bool:
    """Returns whether no segment needs additional tensors in evaluation, compared to training.

    This function records the microbatch in evaluation mode and compares the result with the
    recording in training mode. If no segment needs additional parameters, buffers, inputs or
    messages, evaluation does not affect the partition or the tensors that ranks keep. All ranks can
    then record evaluation mode later. If recording in evaluation mode fails, the function returns
    ``False``.

    Args:
        model: Model with its settings for recording.
        example: Microbatch and its recording in training mode.
        cache: Existing recordings, one of which may be used instead of a new one.
    """
    training = example.forwards.training
    before = host_random_state()
    try:
        recorded = cache.take(example.microbatch, "evaluation")
        if recorded is None:
            recorded = evaluation_of(model, example.microbatch, example.forwards)
        tape = recorded.evaluation
        if host_random_state() != before or recorded.way != example.forwards.way:
            return False
        if tape.cuts != training.cuts:
            return False
        postpone(tape, example.late)
        if changed_buffers(tape) or not tape.read_buffers <= training.read_buffers:
            return False
        plans = slice_tape(tape, (1,) * tape.num_segments)
    except Exception:
        # Do not raise the error here. The result False makes all ranks record evaluation mode when
        # the pipeline starts, and they then raise the error together.
        return False
    return all(
        set(plan.parameters) <= set(other.parameters)
        and set(plan.buffers) <= set(other.buffers)
        and set(plan.inputs) <= set(other.inputs)
        and _sent_bytes(tape, plan) <= _sent_bytes(training, other)
        for plan, other in zip(plans, unchecked_slices(training), strict=True)
    )


def _sent_bytes(tape: Tape, plan: StagePlan) -> int:
    """Returns the size in bytes of the message that a stage sends to the next stage."""
    return MessageLayout.of(tape.values[number] for number in plan.sent).nbytes


def homes_of(recorded: Iterable[Forwards]) -> dict[str, list[int]]:
    """Returns the sorted segments that use each parameter, keyed by the parameter's name.

    A segment is included if it uses the parameter in any recorded mode of any of the forward passes
    ``recorded``.
    """
    homes: dict[str, set[int]] = {}
    for forwards in recorded:
        for tape in forwards.tapes.values():
            for name, segments in uses_of(tape).items():
                homes.setdefault(name, set()).update(segments)
    return {name: sorted(segments) for name, segments in homes.items()}


def align(forwards: Forwards, cuts: Sequence[str], homes: Mapping[str, Sequence[int]]) -> None:
    """Assigns the calls of a recording to segments, although the recording may skip cut points.

    For example, a microbatch without images skips the cut points in the image encoder. Between two
    cut points that the recording contains, a call with a parameter is assigned to the segment that
    uses the parameter in other recordings. A call without parameters is assigned to the segment of
    the preceding call.

    Args:
        forwards: Recording, which is modified in place.
        cuts: Names of all cut points in the order of the forward pass.
        homes: Sorted segments that use each parameter, keyed by the parameter's name.

    Raises:
        ConfigError: If the recording contains the cut points in a different order.
    """
    for tape in forwards.tapes.values():
        # Remove cut points that the recordings of the sample batch do not contain.
        tape.remove_cuts([name for name in tape.cuts if name not in cuts])
        if tape.cuts == list(cuts):
            continue
        in_order = [name for name in cuts if name in tape.cuts]
        if in_order != tape.cuts:
            raise ConfigError(
                f"a microbatch calls the cut points {', '.join(tape.cuts)}, but the sample_batch "
                f"calls {', '.join(cuts)}; all microbatches must call them in the same order, but "
                "may skip some"
            )
        passed = [cuts.index(name) for name in tape.cuts]
        lows = [0, *(position + 1 for position in passed)]
        highs = [*passed, len(cuts)]
        current = 0
        for call in tape.calls:
            low = max(current, lows[call.segment])
            segments = (
                segment
                for read in call.reads
                if tape.values[read].source == "parameter"
                for segment in homes.get(tape.values[read].name, ())
                if low <= segment <= highs[call.segment]
            )
            current = call.segment = min(segments, default=low)
        tape.cuts = list(cuts)


@dataclass(frozen=True, kw_only=True, eq=False)
class CutForwards:
    """Contains recorded forward passes, and the calls and tensors of each stage.

    Attributes:
        forwards: Recorded forward passes.
        plans_by_mode: Plan of each stage in each recorded mode.
    """

    forwards: Forwards
    plans_by_mode: Mapping[Mode, Sequence[StagePlan]]

    @classmethod
    def of(cls, forwards: Forwards, partition: Sequence[int]) -> CutForwards:
        """Cuts the recordings ``forwards`` into the stages of ``partition``.

        Raises:
            ConfigError: If a stage changes, in place, a tensor that another stage also uses.
        """
        plans = {mode: slice_tape(tape, partition) for mode, tape in forwards.tapes.items()}
        return cls(forwards=forwards, plans_by_mode=plans)

    @property
    def training(self) -> Sequence[StagePlan]:
        """Returns the plans of all stages in training."""
        return self.plans_by_mode["training"]

    @property
    def evaluation(self) -> Sequence[StagePlan]:
        """Returns the plans of all stages in evaluation."""
        return self.plans_by_mode["evaluation"]

    def plans(self, stage: int) -> list[StagePlan]:
        """Returns the plans of a stage in all recorded modes."""
        return [plans[stage] for plans in self.plans_by_mode.values()]

    @property
    def work(self) -> tuple[float, ...]:
        """Returns the operation count of each segment.

        The counts are those of training if training is recorded, otherwise those of evaluation.
        """
        mode: Mode = "training" if "training" in self.forwards.tapes else "evaluation"
        return segment_work(self.forwards.tapes[mode])

    @property
    def work_by_action(self) -> tuple[SegmentWork, ...]:
        """Returns the operation counts of each segment, separately for each kind of action.

        The counts are those of the same mode as :attr:`work`.
        """
        mode: Mode = "training" if "training" in self.forwards.tapes else "evaluation"
        return work_by_action(self.forwards.tapes[mode])

    @property
    def largest_message(self) -> int:
        """Returns the size of the largest message between two stages, in bytes."""
        return max(
            _sent_bytes(self.forwards.tapes[mode], plan)
            for mode, plans in self.plans_by_mode.items()
            for plan in plans
        )


@dataclass(kw_only=True, eq=False)
class BufferUse:
    """Keeps track of the ranks that use each buffer in any recording.

    Attributes:
        placement: Assignment of stages to ranks.
        order: Order in which a replica runs its microbatches.
        ranks: Pipeline positions of the ranks that use each buffer, keyed by name.
        changed: Names of the buffers that a forward pass may change.
    """

    placement: Placement
    order: str = "given"
    ranks: dict[str, set[int]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)

    def add(self, cut: CutForwards) -> None:
        """Adds the buffers that the recording ``cut`` uses or changes.

        Raises:
            ConfigError: If a buffer that changes is used on several ranks, because only one of them
                would have the new values; or if a buffer changes in training although microbatches
                are ordered by cost, because its values would depend on the order.
        """
        training = cut.forwards.tapes.get("training")
        if training is not None and self.order != "given":
            self._require_constant(training)
        for stage in range(self.placement.num_stages):
            rank, _ = self.placement.locate(stage)
            for plan in cut.plans(stage):
                for name in plan.buffers:
                    self.ranks.setdefault(name, set()).add(rank)
        for tape in cut.forwards.tapes.values():
            self.changed.update(tape.values[number].name for number in changed_buffers(tape))
        for name in sorted(self.changed):
            ranks = sorted(self.ranks.get(name, ()))
            if len(ranks) > 1:
                raise ConfigError(
                    f"the forward pass changes buffer {name}, but both ranks {ranks[0]} and "
                    f"{ranks[1]} of the pipeline use it (in training, in evaluation, or for other "
                    "microbatches); move the cut point so that only one stage uses it"
                )

    def _require_constant(self, training: Tape) -> None:
        """Checks that the forward pass in training mode changes no buffers.

        Raises:
            ConfigError: If the forward pass changes a buffer.
        """
        names = sorted(training.values[number].name for number in changed_buffers(training))
        if names:
            raise ConfigError(
                f"order {self.order!r} cannot be used, because the forward pass changes buffer "
                f"{names[0]}, whose values would then depend on the order of the microbatches; "
                "remove order"
            )


def frozen_segments_of(forwards: Iterable[Forwards]) -> int:
    """Returns the number of leading segments through which no gradient flows in any recording."""
    return min(frozen_segments(each.training) for each in forwards)


def segment_bytes(tape: Tape) -> tuple[int, ...]:
    """Returns the size in bytes of the tensors that require a gradient, for each segment.

    ``tape`` is the recorded forward pass. The sizes are the same on all ranks, and roughly
    proportional to the memory of the activations that a segment keeps.
    """
    sizes = [0] * tape.num_segments
    for value in tape.values:
        if value.made_by >= 0 and value.requires_grad:
            nbytes = math.prod(value.shape) * value.dtype.itemsize
            sizes[tape.calls[value.made_by].segment] += nbytes
    return tuple(sizes)


def segment_work(tape: Tape) -> tuple[float, ...]:
    """Returns the number of multiplications of each segment in its forward and backward pass.

    The result estimates the cost of the recorded microbatch, and is the same in every run. For
    matmuls, convolutions and attention, the multiplications are counted. For any other call, each
    element of the result counts as a fixed number of multiplications, because such calls are
    limited by memory bandwidth.

    Args:
        tape: Recorded forward pass.
    """
    return tuple(work.total for work in work_by_action(tape))


def work_by_action(tape: Tape) -> tuple[SegmentWork, ...]:
    """Returns the operation counts of each segment, separately for each kind of action.

    ``tape`` is the recorded forward pass.
    """
    work = [SegmentWork()] * tape.num_segments
    for call in tape.calls:
        pairs = zip(work[call.segment], _work(tape, call), strict=True)
        work[call.segment] = SegmentWork(*(total + added for total, added in pairs))
    return tuple(work)


def _work(tape: Tape, call: Call) -> SegmentWork:
    """Returns the multiplication counts of ``call``, in the forward and in any backward pass."""
    forward = _forward_work(tape, call)
    if not any(tape.values[made].requires_grad for made, _ in call.outputs):
        return SegmentWork(forward=forward)
    # The backward pass computes gradients of at most two operands. Ignore the gradient of a bias,
    # which takes almost no time.
    operands = [tape.values[number] for number in call.reads]
    needed = [value for value in operands if value.requires_grad and len(value.shape) > 1]
    count = min(2, len(needed))
    weights = 0
    if deferred_layer(call, tape) is not None:
        weights = min(count, sum(value.source == "parameter" for value in needed))
    return SegmentWork(forward, forward * (count - weights), forward * weights)


def _forward_work(tape: Tape, call: Call) -> float:
    results = [tape.values[number] for number, _ in call.outputs]
    memory = {tape.values[number].storage for number in call.reads} - {0}
    if not call.changes and all(result.storage in memory for result in results):
        return 0.0  # A call that only returns views takes almost no time.
    made = sum(math.prod(result.shape) for result in results)
    name = str(getattr(call.function, "__name__", "")).split(".")[0].strip("_")
    arguments = (*call.args, *call.kwargs.values())
    shapes = [tape.values[item.value].shape for item in arguments if isinstance(item, Ref)]
    return _multiplications(name, made, shapes) or _PER_ELEMENT * made


def _multiplications(name: str, made: float, shapes: Sequence[tuple[int, ...]]) -> float:
    """Returns the multiplication count of a matmul, convolution or attention, or 0 for other calls.

    Args:
        name: Name of the function, without leading and trailing underscores.
        made: Number of elements of the result.
        shapes: Shapes of the operands.
    """
    if name.startswith("scaled_dot_product") and len(shapes) > 1 and len(shapes[1]) > 1:
        return 2.0 * math.prod(shapes[0]) * shapes[1][-2]
    if name.startswith("conv") and len(shapes) > 1:
        return made * math.prod(shapes[1][1:])
    position = _PRODUCTS.get(name)
    if position is None or len(shapes) <= position or not shapes[position]:
        return 0.0
    return made * shapes[position][-1]


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptPart:
    """Contains the cuts of the model, and the parameters and buffers that each rank keeps.

    Attributes:
        cuts: Names of all cut points in the order of the forward pass.
        partition: Number of segments in each stage.
        homes: Sorted segments that use each parameter, keyed by the parameter's name.
        parameter_ranks: Pipeline positions of the ranks that use each parameter, keyed by the
            parameter's name.
        held: Parameters and buffers that this rank keeps, keyed by their names in the model.
        placement: Assignment of stages to ranks.
        pp_rank: Position of this rank in the pipeline.
        device: Device on which the stages run.
        recompute: Setting that selects the calls to recompute in the backward pass.
        buffer_use: Ranks that use each buffer in the recordings so far.
        late: Calls to move behind frozen segments; ``None`` if no calls are moved.
    """

    cuts: tuple[str, ...]
    partition: tuple[int, ...]
    homes: Mapping[str, Sequence[int]]
    parameter_ranks: Mapping[str, set[int]]
    held: Mapping[str, torch.Tensor]
    placement: Placement
    pp_rank: int
    device: torch.device
    recompute: Recompute
    buffer_use: BufferUse
    late: LateCalls | None = None

    def check(
        self, cut: CutForwards, signature: Signature, held: Collection[str] | None = None
    ) -> None:
        """Checks that the ranks have the parameters and buffers that a later recording needs.

        Args:
            cut: Recording, cut into stages.
            signature: Signature of the recorded microbatches.
            held: Names of the parameters and buffers that this rank keeps; ``None`` uses the names
                in the attribute ``held``.

        Raises:
            ConfigError: If a parameter or buffer is missing on a rank, or two ranks use a buffer
                that changes. An error about a missing buffer is raised only on the rank that lacks
                the buffer. All other errors are raised on all ranks of the pipeline.
        """
        self.buffer_use.add(cut)
        held = self.held if held is None else held
        for stage in range(self.placement.num_stages):
            rank, _ = self.placement.locate(stage)
            for plan in cut.plans(stage):
                lacking = [
                    f"parameter {name}"
                    for name in plan.parameters
                    if rank not in self.parameter_ranks.get(name, ())
                ]
                if rank == self.pp_rank:
                    lacking += [f"buffer {name}" for name in plan.buffers if name not in held]
                if lacking:
                    raise ConfigError(
                        f"a microbatch with {signature} uses {lacking[0]} in stage {stage}, "
                        "which the sample_batch does not use there; pass a list of microbatches "
                        "as sample_batch, and include such a microbatch"
                    )

    def programs(self, cut: CutForwards) -> RankPrograms:
        """Returns the programs of this rank's stages for each mode in ``cut``."""
        chunks = range(self.placement.num_chunks)
        stages = [self.placement.stage_of(self.pp_rank, chunk) for chunk in chunks]
        by_mode: dict[Mode, Sequence[StageProgram]] = {}
        for mode, tape in cut.forwards.tapes.items():
            is_training = mode == "training"
            recomputed = recomputed_ranges(tape, self.recompute) if is_training else ()
            plans = cut.plans_by_mode[mode]
            by_mode[mode] = [
                StageProgram(tape, plans[stage], self.held, self.device, recomputed)
                for stage in stages
            ]
        training = cut.forwards.tapes.get("training")
        sizes = (0,) * (len(self.cuts) + 1)
        frozen: int | None = None
        if training is not None:
            sizes = segment_bytes(training)
            frozen = frozen_stages_of(self.partition, frozen_segments(training))
        return RankPrograms(
            by_mode=by_mode,
            meter=ActivationMeter(),
            segment_bytes=sizes,
            segment_work=cut.work_by_action,
            frozen_stages=frozen,
        )


class Recordings:
    """Keeps the programs of this rank's stages for each microbatch signature.

    A signature contains the shapes and dtypes of a microbatch, and the values that determine which
    operations the model runs. If a microbatch has a new signature, the model is recorded again.

    Args:
        model: Model with its settings for recording.
        part: Cuts of the model, and parameters of this rank, determined with the sample batch.
        way: Method by which the sample batch was recorded: ``record``, ``trace`` or ``export``.
        most: Maximum number of signatures to keep. If there are more, the least recently used one
            is dropped.
    """

    def __init__(self, model: SampledModel, part: KeptPart, way: str, most: int) -> None:
        # Keep only the settings that later recordings need, so that the sample batch can be freed.
        settings = {item.name: getattr(model, item.name) for item in dataclasses.fields(Forward)}
        self._forward = Forward(**settings)
        self._settings = ModuleSettings(model.model)
        self._slicing = model.slicing
        self._way = way
        self._part = part
        self._most = most
        self._kept: OrderedDict[Signature, RankPrograms] = OrderedDict()
        # Keep the recordings, so that they can be cut again for another partition.
        self._forwards: dict[Signature, list[Forwards]] = {}
        self._dropped: set[int] = set()
        self._reported: set[str] = set()

    def add(self, signature: Signature, cut: CutForwards) -> RankPrograms:
        """Stores the programs of the recording ``cut``, and returns all programs of ``signature``.

        The returned programs include those of another mode that were stored before.
        """
        programs = self._part.programs(cut)
        if signature in self._kept:
            programs = self._kept[signature].with_modes_of(programs)
        self._kept[signature] = programs
        self._forwards.setdefault(signature, []).append(cut.forwards)
        if len(self._kept) > self._most:
            dropped, _ = self._kept.popitem(last=False)
            del self._forwards[dropped]
            if "again" not in self._reported:
                self._dropped.add(hash(dropped))
        return programs

    @property
    def part(self) -> KeptPart:
        """Returns the cuts of the model, and the parameters and buffers that each rank keeps."""
        return self._part

    def cut(self, partition: Sequence[int]) -> dict[Signature, list[CutForwards]]:
        """Cuts all recordings into the stages of ``partition``. The result is keyed by signature.

        Raises:
            ConfigError: If a recording cannot be cut into these stages.
        """
        return {
            signature: [CutForwards.of(each, partition) for each in self._forwards[signature]]
            for signature in self._kept
        }

    def use(self, part: KeptPart, cuts: Mapping[Signature, Sequence[CutForwards]]) -> None:
        """Replaces all programs with programs for another partition.

        Args:
            part: New partition, and the parameters and buffers that ranks keep.
            cuts: Result of :meth:`cut`.
        """
        self._part = part
        for signature, recorded in cuts.items():
            programs = [part.programs(cut) for cut in recorded]
            self._kept[signature] = functools.reduce(RankPrograms.with_modes_of, programs)

    def of(self, microbatch: Microbatch, step: int) -> RankPrograms:
        """Returns the programs for a microbatch. Records the model if the signature is new.

        The model is recorded only in the required mode (training or evaluation).

        Args:
            microbatch: Tensors of the microbatch, on any device.
            step: Index of the training step; -1 in an evaluation.

        Raises:
            ConfigError: If the model cannot be recorded with this microbatch, uses parameters that
                the sample batch did not use, or depends on a module attribute that has changed
                since the pipeline was created.
        """
        signature = Signature.of(microbatch, self._forward.decisive_entries)
        mode: Mode = "training" if step >= 0 else "evaluation"
        programs = self._kept.get(signature)
        if programs is not None:
            self._kept.move_to_end(signature)
            if mode in programs.by_mode:
                return programs
        begin_s = time.perf_counter()
        device = self._part.device
        moved = {name: tensor.to(device) for name, tensor in microbatch.items()}
        forwards = self._settings.record(
            mode,
            lambda: Forwards.of(
                self._forward, moved, self._slicing, may_miss=True, way=self._way, modes=(mode,)
            ),
        )
        align(forwards, self._part.cuts, self._part.homes)
        for tape in forwards.tapes.values():
            postpone(tape, self._part.late)
        cut = CutForwards.of(forwards, self._part.partition)
        self._part.check(cut, signature)
        programs = self.add(signature, cut)
        self._report(signature, step, time.perf_counter() - begin_s)
        return programs

    def _report(self, signature: Signature, step: int, seconds: float) -> None:
        """Prints a line about the first late recording, and about the first repeated recording.

        A recording is late if it is made after ``_EARLY_STEPS`` steps, and repeated if its
        ``signature`` was dropped before. ``seconds`` is the duration of the recording.
        """
        if self._part.pp_rank:
            return
        if step > _EARLY_STEPS and "late" not in self._reported:
            self._reported.add("late")
            self._say(
                f"step {step}: recorded the model in {seconds:.2f} s, because no earlier "
                f"microbatch had {signature}; later recordings are not reported"
            )
        if hash(signature) in self._dropped and "again" not in self._reported:
            self._reported.add("again")
            self._say(
                f"recorded the model again in {seconds:.2f} s with {signature}, because "
                f"microbatches have more than {self._most} combinations of shapes; increase "
                "max_recordings, or pad microbatches to fewer lengths"
            )

    def _say(self, line: str) -> None:
        print(printable(line), flush=True)
