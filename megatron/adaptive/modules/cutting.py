"""Cuts a recorded forward pass into stages, and determines each stage's calls and messages.

::

    segment        0      1      2      3          partition 1-2-1
    stage          0   |  1      1   |  2
                       |             |
    x ─────────────────> used here   |             x crosses the first border
    mask ──────────────────────────────> used      mask crosses both borders, through stage 1

A border is the boundary between two stages. A tensor that is computed before a border and used
after it is sent across the border in a message. Tensors such as positions and masks, which a few
calls compute from inputs and buffers, are not sent. Instead, each stage that uses such a tensor
computes it again, which is possible because every stage has the inputs of the batch.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.fx.node import map_aggregate

from megatron.adaptive.config.schedule import format_partition, parse_partition
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.cut_points import NO_BLOCKS
from megatron.adaptive.modules.tape import Ref, Tape, Value
from megatron.adaptive.planner.job_shape import least_largest_of


def check_stages(num_segments: int, num_stages: int) -> None:
    """Checks that there are at least as many segments as stages.

    Raises:
        ConfigError: If there are fewer segments than stages. The message states both numbers.
    """
    if num_stages > num_segments == 1:
        raise ConfigError(
            f"{num_stages} stages were requested, but the model has {NO_BLOCKS}, or reduce "
            "pipeline_size or chunks"
        )
    if num_stages > num_segments:
        raise ConfigError(
            f"{num_segments - 1} cut points make {num_segments} segments, but {num_stages} "
            f"stages were requested; add at least {num_stages - 1} cut points, or reduce "
            "pipeline_size or chunks"
        )


def read_partition(partition: str | Sequence[int]) -> tuple[int, ...]:
    """Parses a partition: a string such as ``3-4-5``, or a sequence of numbers.

    Raises:
        ConfigError: If ``partition`` has neither of these forms.
    """
    try:
        if isinstance(partition, str):
            return parse_partition(partition)
        return tuple(map(int, partition))
    except ValueError as error:
        raise ConfigError(f"partition: {error}") from None


def given_partition(
    text: str | Sequence[int], num_segments: int, num_stages: int
) -> tuple[int, ...]:
    """Parses the partition that the user set, and checks it against the model and the pipeline.

    Args:
        text: Number of segments in each stage, as a string such as ``3-4-5`` or a sequence of
            numbers.
        num_segments: Number of segments into which the cut points divide the model.
        num_stages: Number of stages of the pipeline.

    Raises:
        ConfigError: If the partition does not fit the model or the pipeline.
    """
    partition = read_partition(text)
    if len(partition) != num_stages or min(partition) < 1 or sum(partition) != num_segments:
        raise ConfigError(
            f"partition {format_partition(partition)} does not fit {num_segments} segments and "
            f"{num_stages} stages; use {num_stages} positive integers whose sum is {num_segments}"
        )
    return partition


def check_weights(weights: Sequence[float] | None, num_segments: int) -> None:
    """Checks that ``weights`` contains one cost for each of the ``num_segments`` segments.

    Raises:
        ConfigError: If the number of weights differs from the number of segments.
    """
    if weights is not None and len(weights) != num_segments:
        raise ConfigError(
            f"weights must have one value for each of the {num_segments} segments (parts between "
            f"cut points), got {len(weights)}"
        )


def balanced(weights: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Divides segments among stages so that the most expensive stage is as cheap as possible.

    Among equally good partitions, the function chooses one with the smallest sum of squared stage
    costs.

    Args:
        weights: Non-negative cost of each segment, in any unit.
        num_stages: Number of stages. Each stage gets at least one segment.

    Returns:
        Number of segments in each stage.

    Raises:
        ConfigError: If a weight is negative or not finite, or there are too few segments.
    """
    check_stages(len(weights), num_stages)
    for segment, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(
                f"weight {weight} of segment {segment} must be finite and non-negative"
            )
    partition = least_largest_of(weights, num_stages)
    assert partition is not None
    return partition


# Maximum number of calls that a stage repeats to recompute a tensor. A tensor that needs more calls
# is sent instead.
_MOST_REPEATED = 64


@dataclass(slots=True, kw_only=True)
class StagePlan:
    """Lists the calls that a stage runs and the tensors that it needs.

    Calls and tensors are identified by their indices on the tape (the recorded forward pass).

    Attributes:
        calls: Tape indices of the stage's calls, in execution order.
        received: Tensors that the stage receives from the previous stage, in the order of the
            message.
        sent: Tensors that the stage sends to the next stage, in the order of the message.
        inputs: Names of the batch entries that the stage uses.
        parameters: Names of the parameters that the stage uses.
        buffers: Names of the buffers that the stage uses.
        copied: Received tensors, inputs and constants that the stage copies because it changes them
            in place.
        result: Tape index of the loss; ``None`` for all stages except the last.
        segments: Indices of the stage's segments in the model.
    """

    calls: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    copied: set[int] = field(default_factory=set)
    result: int | None = None
    segments: range = range(0)


def uses_of(tape: Tape) -> dict[str, set[int]]:
    """Returns the indices of the segments that use each parameter, keyed by the parameter's name.

    ``tape`` is the recorded forward pass. The key of a parameter with several names is its first
    name.
    """
    segments_of: dict[str, set[int]] = {}
    for number in _needed(tape):
        call = tape.calls[number]
        for read in call.reads:
            value = tape.values[read]
            if value.source == "parameter":
                segments_of.setdefault(value.name, set()).add(call.segment)
    return segments_of


def frozen_segments(tape: Tape) -> int:
    """Returns the number of leading segments through which no gradient of the loss flows.

    For example, these are the segments of a frozen encoder at the start of the model. A stage that
    contains only such segments needs no backward pass and keeps no activations.

    Args:
        tape: Recorded forward pass in training mode.
    """
    # A gradient crosses a border between two segments if a tensor that requires a gradient is
    # computed before the border and used after it.
    is_crossed = [False] * tape.num_segments

    def cross(number: int, segment: int) -> None:
        value = tape.values[number]
        if value.requires_grad and value.made_by >= 0:
            home = tape.calls[value.made_by].segment
            is_crossed[home + 1 : segment + 1] = [True] * (segment - home)

    for number in _needed(tape):
        call = tape.calls[number]
        for read in (*call.reads, *(old for old, _ in call.changes)):
            cross(read, call.segment)
    cross(tape.loss, tape.num_segments - 1)
    uncrossed = (border for border in range(1, tape.num_segments) if not is_crossed[border])
    return max(uncrossed, default=0)


_MOST_LATE = 8
"""Maximum number of calls that may be moved behind the frozen segments."""


class LateCalls(NamedTuple):
    """Identifies calls at the start of the model that are moved behind the frozen segments.

    Many vision-language models first compute the text embeddings, then run the image encoder and
    insert its output into the embeddings. If only the encoder is frozen, the gradients of the
    embeddings must pass through all stages of the encoder. To avoid this, the embeddings are
    computed after the encoder.

    Attributes:
        border: Number of leading frozen segments, which is also the index of the segment to which
            the calls move.
        parameters: Names of the trained parameters that the calls use.
    """

    border: int
    parameters: frozenset[str]


def late_calls(tape: Tape) -> LateCalls | None:
    """Identifies calls that need gradients and could be moved behind the frozen segments.

    Returns ``None`` if there are no such calls.

    Args:
        tape: Recorded forward pass in training mode.
    """
    needed = _needed(tape)
    for border in range(tape.num_segments - 1, 0, -1):
        early = [number for number in needed if tape.calls[number].segment < border]
        trained = [
            number
            for number in early
            if any(tape.values[made].requires_grad for made, _ in tape.calls[number].outputs)
        ]
        if not trained:
            return None
        if len(trained) > _MOST_LATE:
            continue
        names = frozenset(
            value.name
            for number in trained
            for value in (tape.values[read] for read in tape.calls[number].reads)
            if value.source == "parameter" and value.requires_grad
        )
        late = LateCalls(border, names)
        moved = _late_numbers(tape, late)
        frozen = {
            tape.calls[number].segment
            for number in early
            if number not in moved
            and any(tape.values[read].source == "parameter" for read in tape.calls[number].reads)
        }
        # Move calls only if each leading segment keeps other calls with parameters.
        if moved.issuperset(trained) and len(moved) <= _MOST_LATE and len(frozen) == border:
            return late
    return None


def postpone(tape: Tape, late: LateCalls | None) -> None:
    """Moves the calls that ``late`` identifies to a later segment, and renumbers all calls.

    Args:
        tape: Recorded forward pass, which is modified in place.
        late: Calls to move; ``None`` moves no calls.
    """
    if late is None or not (moved := _late_numbers(tape, late)):
        return
    first = next(
        (number for number, call in enumerate(tape.calls) if call.segment >= late.border),
        len(tape.calls),
    )
    early = [number for number in range(first) if number not in moved]
    order = [*early, *sorted(moved), *range(first, len(tape.calls))]
    for number in moved:
        tape.calls[number].segment = late.border
    tape.calls = [tape.calls[number] for number in order]
    numbers = {old: new for new, old in enumerate(order)}
    for value in tape.values:
        if value.made_by >= 0:
            value.made_by = numbers[value.made_by]


def _late_numbers(tape: Tape, late: LateCalls) -> set[int]:
    """Returns the indices of the calls to move, or an empty set if they cannot be moved.

    These are the calls in segments before ``late.border`` that depend on ``late.parameters``. Calls
    cannot be moved if one of them draws random numbers or changes a tensor in place, or if another
    call changes a tensor that they read.
    """
    moved: set[int] = set()
    made: set[int] = set()
    read: set[int] = set()
    changed: set[int] = set()
    for number, call in enumerate(tape.calls):
        if call.segment >= late.border:
            break
        values = [tape.values[each] for each in call.reads]
        depends = not made.isdisjoint((*call.reads, *(old for old, _ in call.changes))) or any(
            value.source == "parameter" and value.name in late.parameters for value in values
        )
        if not depends:
            changed.update(tape.values[old].storage for old, _ in call.changes)
            continue
        if call.is_random or call.changes:
            return set()
        moved.add(number)
        made.update(value for value, _ in call.outputs)
        read.update(value.storage for value in values)
    return moved if read.isdisjoint(changed) else set()


def slice_tape(tape: Tape, partition: Sequence[int]) -> list[StagePlan]:
    """Cuts a recorded forward pass and returns the plan of each stage.

    Args:
        tape: Recorded forward pass.
        partition: Number of segments in each stage. The sum must be the tape's number of segments.

    Raises:
        ConfigError: If a stage changes a tensor in place and another stage also uses this tensor.
    """
    slicer = _Slicer(tape, partition)
    slicer.check_changes()
    return slicer.run()


def unchecked_slices(tape: Tape) -> list[StagePlan]:
    """Returns a plan for each segment of ``tape``, as if each segment were a stage.

    Unlike :func:`slice_tape`, this function allows a segment to change tensors of another segment
    in place. Such segments can run one after another in one process, for example when they are
    measured, but not as stages of different processes.
    """
    return _Slicer(tape, (1,) * tape.num_segments).run()


def signature_of(tape: Tape, plan: StagePlan) -> str:
    """Returns a key that is equal for stages with the same calls and tensor shapes.

    Args:
        tape: Recorded forward pass.
        plan: Plan of the stage.
    """
    numbers: dict[int, int] = {}

    def local(part: Any) -> Any:
        number = part.value if isinstance(part, Ref) else None
        return part if number is None else Ref(numbers.setdefault(number, len(numbers)))

    lines: list[Any] = []
    for number in plan.received:
        numbers.setdefault(number, len(numbers))
    for call in (tape.calls[number] for number in plan.calls):
        lines.append((call.function, map_aggregate((call.args, call.kwargs), local)))
        made = [made for made, _ in call.outputs] + [new for _, new in call.changes]
        lines.append([numbers.setdefault(number, len(numbers)) for number in made])
    lines.append([numbers.setdefault(number, len(numbers)) for number in plan.sent])
    for number in numbers:
        value = tape.values[number]
        lines.append((value.source, value.shape, value.dtype, value.requires_grad))
    return repr((lines, plan.result is None))


def segment_kinds(tape: Tape) -> tuple[int, ...]:
    """Returns the index of each segment's kind. Segments with the same calls are of one kind."""
    numbers: dict[str, int] = {}
    return tuple(
        numbers.setdefault(signature_of(tape, plan), len(numbers))
        for plan in unchecked_slices(tape)
    )


def _needed(tape: Tape) -> list[int]:
    """Returns the indices of those calls that affect the loss or change tensors in place."""
    needed = {tape.loss}
    numbers = []
    for number in range(len(tape.calls) - 1, -1, -1):
        call = tape.calls[number]
        made = {value for value, _ in call.outputs} | {new for _, new in call.changes}
        if call.changes or made & needed:
            numbers.append(number)
            needed.update(call.reads)
            needed.update(old for old, _ in call.changes)
    return numbers[::-1]


class _Slicer:
    """Divides the calls of a recorded forward pass among stages, and plans each stage."""

    def __init__(self, tape: Tape, partition: Sequence[int]) -> None:
        self._tape = tape
        ends = list(accumulate(partition))
        self._stage_of = [bisect_right(ends, segment) for segment in range(tape.num_segments)]
        self._plans = [
            StagePlan(segments=range(end - size, end))
            for size, end in zip(partition, ends, strict=True)
        ]
        self._calls = _needed(tape)
        self._changed = {
            tape.values[old].storage
            for number in self._calls
            for old, _ in tape.calls[number].changes
        }
        self._closure = functools.cache(self._find_closure)
        self._last_use: dict[int, int] = {}

    def run(self) -> list[StagePlan]:
        """Returns the plans of all stages, in order."""
        tape = self._tape
        members: list[set[int]] = [set() for _ in self._plans]
        for number in self._calls:
            stage = self._stage_of[tape.calls[number].segment]
            members[stage].add(number)
            call = tape.calls[number]
            for value_number in {*call.reads, *(old for old, _ in call.changes)}:
                members[stage] |= self._use(value_number, stage)
        last = len(self._plans) - 1
        if tape.values[tape.loss].made_by >= 0:
            members[last] |= self._use(tape.loss, last)
        for value, stage in sorted(self._last_use.items()):
            for border in range(self._home(tape.values[value]), stage):
                self._plans[border].sent.append(value)
                self._plans[border + 1].received.append(value)
        for plan, calls in zip(self._plans, members, strict=True):
            plan.calls = sorted(calls)
            self._list_sources(plan)
        self._plans[-1].result = tape.loss
        return self._plans

    def _home(self, value: Value) -> int:
        """Returns the index of the stage that computes the tensor ``value``."""
        return self._stage_of[self._tape.calls[value.made_by].segment]

    def _use(self, number: int, stage: int) -> frozenset[int] | set[int]:
        """Records that ``stage`` uses tensor ``number``, and returns the calls that recompute it.

        A stage can repeat the calls of another stage to recompute a tensor instead of receiving it.
        The returned set is empty if ``stage`` receives the tensor, or computes it in its own calls.
        """
        value = self._tape.values[number]
        if value.made_by < 0 or self._home(value) == stage:
            return set()
        closure = self._closure(number)
        if closure is not None:
            return closure
        self._last_use[number] = max(stage, self._last_use.get(number, 0))
        return set()

    def _find_closure(self, number: int) -> frozenset[int] | None:
        """Returns the calls that recompute tensor ``number``, or ``None`` if it must be sent."""
        value = self._tape.values[number]
        if value.requires_grad or value.source == "parameter" or value.storage in self._changed:
            return None
        if value.made_by < 0:
            return frozenset()
        call = self._tape.calls[value.made_by]
        if call.is_random or call.changes:
            return None
        closure = {value.made_by}
        for read in call.reads:
            part = self._closure(read)
            if part is None:
                return None
            closure |= part
        return frozenset(closure) if len(closure) <= _MOST_REPEATED else None

    def _list_sources(self, plan: StagePlan) -> None:
        """Adds the inputs, parameters, buffers and copied tensors of a stage to ``plan``."""
        tape = self._tape
        received = set(plan.received)
        lists: dict[str, list[str]] = {
            "input": plan.inputs,
            "parameter": plan.parameters,
            "buffer": plan.buffers,
        }
        calls = [tape.calls[number] for number in plan.calls]
        olds = {old for call in calls for old, _ in call.changes}
        changed = {tape.values[old].storage for old in olds}
        # Do not copy buffers or tensors that share memory with a buffer, because changes of a
        # buffer must persist.
        changed -= {0, *(value.storage for value in tape.values if value.source == "buffer")}
        for call in calls:
            for read in call.reads:
                value = tape.values[read]
                names = lists.get(value.source)
                if names is not None and value.name not in names:
                    names.append(value.name)
                # Calls may also change the tensor through a view that shares its memory.
                is_changed = read in olds or value.storage in changed
                if is_changed and (read in received or value.source in ("input", "constant")):
                    plan.copied.add(read)

    def check_changes(self) -> None:
        """Raises ``ConfigError`` if a stage reads a tensor that another stage changes in place."""
        tape = self._tape
        by_storage: dict[int, list[int]] = {}
        for number, value in enumerate(tape.values):
            if value.storage:
                by_storage.setdefault(value.storage, []).append(number)
        readers: dict[int, list[int]] = {}
        for number in self._calls:
            for read in tape.calls[number].reads:
                readers.setdefault(read, []).append(number)
        for number in self._calls:
            call = tape.calls[number]
            stage = self._stage_of[call.segment]
            for old, new in call.changes:
                for view in by_storage.get(tape.values[old].storage, []):
                    self._check_view(view, old, new, number, stage, readers.get(view, []))

    def _check_view(
        self, view: int, old: int, new: int, number: int, stage: int, readers: Sequence[int]
    ) -> None:
        """Checks that no other stage reads a view of a tensor that a call changes in place.

        Args:
            view: Tape index of the view, which shares memory with the changed tensor.
            old: Tape index of the changed tensor before the change.
            new: Tape index of the changed tensor after the change.
            number: Index of the call that changes the tensor.
            stage: Index of the stage that runs this call.
            readers: Indices of the calls that read the view.

        Raises:
            ConfigError: If another stage reads the view after the change.
        """
        tape = self._tape
        value = tape.values[view]
        # A view that is created after the change needs no check, because every stage reads its new
        # content.
        if (view == new and old != new) or value.made_by > number:
            return
        later = [reader for reader in readers if reader > number]
        reading_stages = {self._stage_of[tape.calls[reader].segment] for reader in later}
        if value.source == "buffer":
            elsewhere = {self._stage_of[tape.calls[reader].segment] for reader in readers} - {stage}
            if elsewhere:
                raise ConfigError(
                    f"buffer {value.name} changes in stage {stage} and is used in stage "
                    f"{min(elsewhere)}; move the cut point so that only one stage uses it"
                )
            return
        home = stage if value.made_by < 0 else self._home(value)
        if later and (home != stage or (value.source and reading_stages - {stage})):
            raise ConfigError(
                f"stage {stage} changes a tensor of shape {list(value.shape)} in place, but stage "
                f"{max(reading_stages)} reads the same memory through another tensor; use an "
                "out-of-place operation, or move the cut point"
            )


def check_groups(model: torch.nn.Module, groups: Sequence[Sequence[str]]) -> None:
    """Checks that all names in each group of ``shared_weights`` refer to the same parameter.

    Args:
        model: Whole model of the user.
        groups: Groups of parameter names, from the setting ``shared_weights``.

    Raises:
        ConfigError: If a name is unknown, or the names in a group belong to different parameters.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for group in groups:
        if isinstance(group, str):
            raise ConfigError(
                f"shared_weights contains {group!r}; pass a list of groups, each a list of names"
            )
        for name in group:
            if name not in named:
                raise ConfigError(
                    f"shared_weights contains {name!r}, which is not a parameter of the model"
                )
            if named[name] is not named[group[0]]:
                raise ConfigError(
                    f"shared_weights has {group[0]} and {name} in one group, but they are two "
                    "parameters of the model; assign the same parameter to both names first"
                )


def keep_only(
    model: torch.nn.Module, names: Iterable[str], device: torch.device
) -> dict[str, torch.Tensor]:
    """Moves the named parameters and buffers to ``device``, and frees the memory of the others.

    Kept parameters remain the same Python objects, except parameters on the ``meta`` device, which
    are replaced by uninitialized parameters. Parameters and buffers that are not kept are replaced
    by tensors of the same shape on the ``meta`` device. A replacement keeps the class and the
    Python attributes of the original parameter, such as a ``no_decay`` attribute that the model's
    code has set.

    Args:
        model: Whole model of the user.
        names: Names of the parameters and buffers to keep.
        device: Device to which the kept tensors are moved.

    Returns:
        The kept parameters and buffers, keyed by name.
    """
    keep = set(names)
    by_id: dict[int, torch.Tensor] = {}
    held: dict[str, torch.Tensor] = {}
    for name, parameter in list(model.named_parameters()):
        if name in keep and not parameter.is_meta:
            parameter.data = parameter.data.to(device)
            held[name] = parameter
            continue
        replacement = _parameter_like(parameter, device if name in keep else "meta")
        by_id[id(parameter)] = replacement
        if name in keep:
            held[name] = replacement
    for name, buffer in list(model.named_buffers()):
        if name in keep and buffer.is_meta:
            by_id[id(buffer)] = held[name] = torch.empty_like(buffer, device=device)
        elif name in keep:
            by_id[id(buffer)] = held[name] = buffer.to(device)
        else:
            by_id[id(buffer)] = torch.empty_like(buffer, device="meta")
        if by_id[id(buffer)] is not buffer:
            vars(by_id[id(buffer)]).update(vars(buffer))
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in tables:
            for key, tensor in tensors.items():
                if tensor is not None and id(tensor) in by_id:
                    tensors[key] = by_id[id(tensor)]
    return held


def _parameter_like(
    parameter: torch.nn.Parameter, device: torch.device | str
) -> torch.nn.Parameter:
    """Returns an uninitialized parameter like ``parameter`` on ``device``.

    The new parameter has the same shape, class and Python attributes as ``parameter``.
    """
    values = torch.empty_like(parameter.detach(), device=device)
    replacement = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
    kind = type(parameter)
    if kind is not type(replacement) and issubclass(kind, torch.nn.Parameter):
        # Do not call the constructor of a subclass of Parameter, because it may require other
        # arguments.
        replacement = torch.Tensor._make_subclass(kind, values, parameter.requires_grad)
    vars(replacement).update(vars(parameter))
    return replacement
