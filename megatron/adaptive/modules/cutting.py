"""Cuts a tape into stages: calls, parameters and tensors of each, and the rank that keeps them.

::

    segment        0      1      2      3          partition 1-2-1
    stage          0   |  1      1   |  2
                       |             |
    x ─────────────────> used here   |             x crosses the first border
    mask ──────────────────────────────> used      mask crosses both, stage 1 hands it on

What crosses a border is all that was made before it and is used after it. Values that follow from
inputs and buffers alone by a few calls (positions, masks) do not cross: each stage that uses one
makes it itself, of the inputs that it is given anyway.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from megatron.adaptive.config.schedule import format_partition, parse_partition
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.recording import Tape, Value
from megatron.adaptive.planner.job_shape import least_largest_of


def check_stages(num_segments: int, num_stages: int) -> None:
    """Refuse more stages than segments.

    Raises:
        ConfigError: names both numbers.
    """
    if num_stages > num_segments:
        raise ConfigError(
            f"{num_segments - 1} cut points make {num_segments} segments, and {num_stages} stages "
            f"were asked for: mark at least {num_stages - 1} cut points, or lower pipeline_size or "
            "chunks"
        )


def read_partition(given: str | Sequence[int]) -> tuple[int, ...]:
    """Reads the segments of each stage, such as ``3-4-5``; ConfigError if it is no partition."""
    try:
        return parse_partition(given) if isinstance(given, str) else tuple(map(int, given))
    except ValueError as error:
        raise ConfigError(f"partition: {error}") from None


def given_partition(
    given: str | Sequence[int], num_segments: int, num_stages: int
) -> tuple[int, ...]:
    """Read a user's partition, segments of each stage such as ``3-4-5``.

    Raises:
        ConfigError: it does not fit the model or the pipeline.
    """
    partition = read_partition(given)
    if len(partition) != num_stages or min(partition) < 1 or sum(partition) != num_segments:
        raise ConfigError(
            f"partition {format_partition(partition)} was given for {num_segments} segments and "
            f"{num_stages} stages: give {num_stages} numbers from 1 on whose sum is {num_segments}"
        )
    return partition


def check_weights(weights: Sequence[float] | None, num_segments: int) -> None:
    """Refuse weights that are not one for each segment.

    Raises:
        ConfigError: there are more, or fewer.
    """
    if weights is not None and len(weights) != num_segments:
        raise ConfigError(
            f"{len(weights)} weights were given for {num_segments} segments: give one for each "
            "piece between cut points"
        )


def balanced(weights: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Divide segments so that the largest stage is as small as possible.

    Of several such divisions the one with the least sum of squares.

    Args:
        weights: what each segment costs, in any unit, at least 0.
        num_stages: stages, each of at least one segment.

    Raises:
        ConfigError: a weight is negative or not finite, or there are too few segments.
    """
    check_stages(len(weights), num_stages)
    for segment, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(
                f"weight {weight} of segment {segment}: give a finite number that is not negative"
            )
    partition = least_largest_of(weights, num_stages)
    assert partition is not None
    return partition


# Calls that a stage may repeat rather than be sent their result.
_MOST_REPEATED = 64


@dataclass(slots=True, kw_only=True)
class StagePlan:
    """Lists what one stage does.

    Attributes:
        calls: numbers of its calls, in order.
        received: values that come from the stage before, in the order of the message.
        sent: values for the stage after, likewise.
        inputs: names of the batch's entries that it uses.
        parameters, buffers: names of those it uses.
        copied: values that it changes and must not share with others.
        result: the loss, in the last stage.
    """

    calls: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    copied: set[int] = field(default_factory=set)
    result: int | None = None


def check_shared(tape: Tape, groups: Sequence[Sequence[str]]) -> None:
    """Refuse parameters that are used on both sides of a cut and are not declared.

    Args:
        tape: the forward.
        groups: names of each shared parameter; one name is enough.

    Raises:
        ConfigError: names the parameter, its other names and the cut.
    """
    declared = {name for group in groups for name in group}
    for name, segments in uses_of(tape).items():
        if len(segments) < 2 or declared & {name, *tape.aliases.get(name, ())}:
            continue
        others = tape.aliases.get(name, ())
        also = f" (also {', '.join(others)})" if others else ""
        raise ConfigError(
            f"parameter {name}{also} is used before and after cut point "
            f"{tape.cuts[min(segments)]}: declare it with shared_weights=[{[name, *others]}], or "
            "remove that cut point"
        )


def uses_of(tape: Tape) -> dict[str, set[int]]:
    """Return the segments that use each parameter, by its first name."""
    found: dict[str, set[int]] = {}
    for number in _needed(tape):
        call = tape.calls[number]
        for one in call.reads:
            value = tape.values[one]
            if value.source == "parameter":
                found.setdefault(value.name, set()).add(call.segment)
    return found


def slice_tape(tape: Tape, partition: Sequence[int]) -> list[StagePlan]:
    """Cut a tape.

    Args:
        tape: the forward.
        partition: segments of each stage, in order; their sum is that of the tape.

    Raises:
        ConfigError: a tensor is changed in place where another stage sees it.
    """
    return _Slicer(tape, partition).run()


def _needed(tape: Tape) -> list[int]:
    """Calls that the loss depends on or that change something, in order."""
    wanted = {tape.loss}
    found = []
    for number in range(len(tape.calls) - 1, -1, -1):
        call = tape.calls[number]
        made = {value for value, _ in call.outputs} | {new for _, new in call.changes}
        if call.changes or made & wanted:
            found.append(number)
            wanted.update(call.reads)
            wanted.update(old for old, _ in call.changes)
    return found[::-1]


class _Slicer:
    def __init__(self, tape: Tape, partition: Sequence[int]) -> None:
        self._tape = tape
        ends = list(accumulate(partition))
        self._stage_of = [bisect_right(ends, segment) for segment in range(tape.num_segments)]
        self._plans = [StagePlan() for _ in partition]
        self._calls = _needed(tape)
        self._changed = {
            tape.values[old].storage for number in self._calls
            for old, _ in tape.calls[number].changes
        }  # fmt: skip
        self._closure = functools.cache(self._find_closure)
        self._last_use: dict[int, int] = {}

    def run(self) -> list[StagePlan]:
        """Return the stages' plans."""
        tape = self._tape
        self._check_changes()
        members: list[set[int]] = [set() for _ in self._plans]
        for number in self._calls:
            stage = self._stage_of[tape.calls[number].segment]
            members[stage].add(number)
            call = tape.calls[number]
            for one in {*call.reads, *(old for old, _ in call.changes)}:
                members[stage] |= self._use(one, stage)
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
        return self._stage_of[self._tape.calls[value.made_by].segment]

    def _use(self, number: int, stage: int) -> frozenset[int] | set[int]:
        """Note that a stage uses a value; returns the calls that it repeats for that."""
        value = self._tape.values[number]
        if value.made_by < 0 or self._home(value) == stage:
            return set()
        closure = self._closure(number)
        if closure is not None:
            return closure
        self._last_use[number] = max(stage, self._last_use.get(number, 0))
        return set()

    def _find_closure(self, number: int) -> frozenset[int] | None:
        """Calls that make a value of inputs and buffers, ``None`` where it has to be sent."""
        value = self._tape.values[number]
        if value.requires_grad or value.source == "parameter" or value.storage in self._changed:
            return None
        if value.made_by < 0:
            return frozenset()
        call = self._tape.calls[value.made_by]
        if call.is_random or call.changes:
            return None
        found = {value.made_by}
        for one in call.reads:
            part = self._closure(one)
            if part is None:
                return None
            found |= part
        return frozenset(found) if len(found) <= _MOST_REPEATED else None

    def _list_sources(self, plan: StagePlan) -> None:
        tape = self._tape
        received = set(plan.received)
        lists: dict[str, list[str]] = {
            "input": plan.inputs, "parameter": plan.parameters, "buffer": plan.buffers
        }  # fmt: skip
        for number in plan.calls:
            call = tape.calls[number]
            for one in call.reads:
                value = tape.values[one]
                names = lists.get(value.source)
                if names is not None and value.name not in names:
                    names.append(value.name)
            for old, _ in call.changes:
                value = tape.values[old]
                if old in received or value.source in ("input", "constant"):
                    plan.copied.add(old)

    def _check_changes(self) -> None:
        """Refuse changes in place that another stage would have to see."""
        tape = self._tape
        by_storage: dict[int, list[int]] = {}
        for number, value in enumerate(tape.values):
            if value.storage:
                by_storage.setdefault(value.storage, []).append(number)
        readers: dict[int, list[int]] = {}
        for number in self._calls:
            for one in tape.calls[number].reads:
                readers.setdefault(one, []).append(number)
        for number in self._calls:
            call = tape.calls[number]
            stage = self._stage_of[call.segment]
            for old, new in call.changes:
                for one in by_storage.get(tape.values[old].storage, []):
                    self._check_view(one, old, new, number, stage, readers.get(one, []))

    def _check_view(
        self, one: int, old: int, new: int, number: int, stage: int, readers: Sequence[int]
    ) -> None:
        tape = self._tape
        value = tape.values[one]
        if (one == new and old != new) or value.made_by > number:
            return  # it was made of what the change left
        later = [reader for reader in readers if reader > number]
        where = {self._stage_of[tape.calls[reader].segment] for reader in later}
        if value.source == "buffer":
            elsewhere = {self._stage_of[tape.calls[reader].segment] for reader in readers} - {stage}
            if elsewhere:
                raise ConfigError(
                    f"buffer {value.name} changes in stage {stage} and is used in stage "
                    f"{min(elsewhere)}: move the cut point so that one stage has it alone"
                )
            return
        home = stage if value.made_by < 0 else self._home(value)
        if later and (home != stage or (value.source and where - {stage})):
            raise ConfigError(
                f"a tensor of shape {list(value.shape)} is changed in place in stage {stage} and "
                f"seen through another one in stage {max(where)}: use the operation that returns "
                "a new tensor, or move the cut point"
            )


def check_groups(model: torch.nn.Module, groups: Sequence[Sequence[str]]) -> None:
    """Check declared groups of shared weights.

    Raises:
        ConfigError: a name is unknown, or a group is not one parameter.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for group in groups:
        if isinstance(group, str):
            raise ConfigError(
                f"shared_weights holds {group!r}: give a list of groups, each a list of names"
            )
        for name in group:
            if name not in named:
                raise ConfigError(
                    f"shared_weights names {name!r}, which is no parameter of the model"
                )
            if named[name] is not named[group[0]]:
                raise ConfigError(
                    f"shared_weights says that {group[0]} and {name} are one parameter, but the "
                    f"model has two: assign one to the other before"
                )


def keep_only(
    model: torch.nn.Module, names: Iterable[str], device: torch.device
) -> dict[str, torch.Tensor]:
    """Move what the rank keeps to its device, and free the rest.

    Parameters stay the same objects. What goes is replaced by a tensor on the ``meta`` device: its
    shape stays known, its memory is free.

    Returns:
        What was kept, by name.
    """
    keep = set(names)
    by_id: dict[int, torch.Tensor] = {}
    held: dict[str, torch.Tensor] = {}
    for name, parameter in list(model.named_parameters()):
        if name in keep:
            parameter.data = parameter.data.to(device)
            held[name] = parameter
        else:
            by_id[id(parameter)] = torch.nn.Parameter(
                torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
            )
    for name, buffer in list(model.named_buffers()):
        if name in keep:
            by_id[id(buffer)] = held[name] = buffer.to(device)
        else:
            by_id[id(buffer)] = torch.empty_like(buffer, device="meta")
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for key, one in tensors.items():
                if one is not None and id(one) in by_id:
                    tensors[key] = by_id[id(one)]  # type: ignore[assignment]
    return held
