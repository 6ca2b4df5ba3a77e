"""Times 1F1B as in DeepSpeed, whose sends and receives are calls in the device's stream.

The published runs used DeepSpeed. Every rank calls sends and receives sequentially, between its
forward and backward passes. A message that fits into the library's buffers is transferred as soon
as it is sent. A larger message is transferred when both ranks have reached the call, and blocks
both ranks. The engine alternates between forward and backward passes. Before a forward pass, a rank
sends a gradient to the previous rank and receives an activation from it. Before a backward pass, a
rank receives a gradient from the next rank and sends an activation to it. Since 2023 gradients are
sent first; earlier versions sent activations first:

::

    rank 0:  F0  F1 [receive g0, send a1]  B0  F2 [receive g1, send a2]  B1 ...
    rank 1:      F0  B0 [send g0, receive a1]  F1  B1 [send g1, receive a2] ...

    rank 0:  F0  F1 [send a1, receive g0]  B0  F2 [send a2, receive g1]  B1 ...
    rank 1:      F0  B0 [receive a1, send g0]  F1  B1 [receive a2, send g1] ...

Source: the schedule of DeepSpeed's engine (``runtime/pipe/schedule.py``, ``TrainSchedule``), whose
order was reversed in February 2023 (issue 2800 of DeepSpeed).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np

from megatron.adaptive.planner.cost import StageSums
from megatron.adaptive.planner.layer_costs import Runtime
from megatron.adaptive.planner.order_timing import ScheduleTimes
from megatron.adaptive.planner.plan import Plan

_TURNED = 2023
"""First year in which gradients are sent before activations."""

_BUFFER_BYTES = 4 * 2**20
"""Maximum size in bytes of a message that does not wait for its receiver (``NCCL_BUFFSIZE``).
"""


def _pipeline(gradients_first: bool, plan: Plan, stages: StageSums) -> ScheduleTimes | None:
    """Returns the times of the pipeline of ``plan``, or ``None`` if its schedule is not 1F1B.

    With tensor parallelism, each rank sends its slice of the stage's output, and the sizes of the
    output. The receiver's CPU must read the sizes before it launches kernels, so launching does not
    overlap with waiting for the message.
    """
    if plan.schedule != "1f1b":
        return None
    widths = np.array([max(one.tp for one in place.replicas) for place in plan.places])
    sizes = stages.message_bytes / np.stack([widths, np.roll(widths, 1)])
    launch = np.where(widths > 1, 0.0, stages.launch_s[:2])
    whole = np.array([stages.durations_s[0], stages.durations_s[1:].sum(axis=0)])
    return rendezvous_times(
        plan.num_microbatches,
        whole,
        stages.latency_s + stages.occupancy_s,
        launch_s=launch,
        buffered=sizes <= _BUFFER_BYTES,
        gradients_first=gradients_first,
    )


def runtime_of(document: Mapping[str, Any]) -> Runtime:
    """Returns DeepSpeed's pipeline engine as it was when a data set was published.

    ``document`` contains a description of the data set, including the name of the paper and its
    year. Tensor-parallel ranks send slices of a stage's output (``PartitionedTensor.from_meta``).
    """
    years = re.findall(r"\b20\d\d\b", str(document.get("source", {}).get("paper", "")))
    newest = not years or int(years[0]) >= _TURNED
    return Runtime(sliced_messages=True, pipeline=partial(_pipeline, newest))


class _Call(NamedTuple):
    """Computation or message of a rank. ``direction`` is 0 for forward and 1 for backward."""

    what: Literal["compute", "send", "receive"]
    peer: int
    direction: int
    microbatch: int


def rendezvous_times(
    num_microbatches: int,
    durations_s: Any,
    message_s: Any,
    *,
    launch_s: Any,
    buffered: Any,
    gradients_first: bool = True,
) -> ScheduleTimes:
    """Returns the end time and the busy time of each rank in a step with one stage per rank.

    Args:
        num_microbatches: Number of microbatches in the step.
        durations_s: Durations of forward and backward passes in seconds, with shape ``[2,
            stages]``.
        message_s: Durations of the messages that follow forward and backward passes, in seconds,
            with shape ``[2, stages]``.
        launch_s: Parts of the durations that can overlap with waiting for a message, in seconds,
            with shape ``[2, stages]``.
        buffered: Whether each message is sent without waiting for the receiver, with shape ``[2,
            stages] bool``.
        gradients_first: Whether ranks send gradients before activations.
    """
    run = _Run(num_microbatches, durations_s, message_s, launch_s, buffered, gradients_first)
    while any(run.advance(rank) for rank in range(durations_s.shape[1])):
        pass
    return ScheduleTimes(end_s=run.free, busy_s=durations_s.sum(axis=0) * num_microbatches)


class _Run:
    """Simulates the sequence of calls on each rank in a step."""

    def __init__(
        self,
        num_microbatches: int,
        durations: Any,
        messages: Any,
        launch: Any,
        buffered: Any,
        gradients_first: bool,
    ) -> None:
        self.durations, self.messages = durations, messages
        self.launch, self.buffered = launch, buffered
        stages = durations.shape[1]
        self.calls = [
            _calls(stages, stage, num_microbatches, gradients_first) for stage in range(stages)
        ]
        self.at = [0] * stages
        self.launched = np.zeros(stages)
        self.free = np.zeros(stages)
        self.link = np.zeros((2, stages))
        self.arrived: dict[tuple[int, int, int], float] = {}

    def advance(self, rank: int) -> bool:
        """Runs calls of ``rank`` until it has to wait. Returns whether any call was run."""
        begin = self.at[rank]
        while self.at[rank] < len(self.calls[rank]):
            call = self.calls[rank][self.at[rank]]
            if call.what == "compute":
                self._compute(rank, call.direction)
            elif not self._message(rank, call):
                break
            self.at[rank] += 1
        return self.at[rank] > begin

    def _compute(self, rank: int, direction: int) -> None:
        launch = self.launch[direction, rank]
        start = max(self.launched[rank] + launch, self.free[rank])
        self.free[rank] = start + self.durations[direction, rank] - launch
        self.launched[rank] = self.free[rank]

    def _message(self, rank: int, call: _Call) -> bool:
        sender = rank if call.what == "send" else call.peer
        key = (sender, call.direction, call.microbatch)
        takes = self.messages[call.direction, sender]
        if not self.buffered[call.direction, sender]:
            if not self._meets(rank, call):
                return False
            end = max(self.free[rank], self.free[call.peer]) + takes
            self.free[rank] = self.free[call.peer] = end
            self.at[call.peer] += 1
        elif call.what == "send":
            end = max(self.free[rank], self.link[call.direction, rank]) + takes
            self.link[call.direction, rank] = self.arrived[key] = end
        elif key in self.arrived:
            self.free[rank] = max(self.free[rank], self.arrived.pop(key))
        else:
            return False
        return True

    def _meets(self, rank: int, call: _Call) -> bool:
        """Returns whether the next call of the peer is the counterpart of ``call``."""
        if self.at[call.peer] >= len(self.calls[call.peer]):
            return False
        other = self.calls[call.peer][self.at[call.peer]]
        return (
            other.peer == rank
            and {call.what, other.what} == {"send", "receive"}
            and (other.direction, other.microbatch) == (call.direction, call.microbatch)
        )


@lru_cache(maxsize=256)
def _calls(
    stages: int, stage: int, num_microbatches: int, gradients_first: bool
) -> tuple[_Call, ...]:
    """Returns the calls that the rank of stage ``stage`` makes in a step, in order."""
    found: list[_Call] = []
    for compute, messages in _program(stages, stage, num_microbatches):
        found += messages if gradients_first else reversed(messages)
        found += compute
    return tuple(found)


def _program(
    stages: int, stage: int, num_microbatches: int
) -> Iterator[tuple[list[_Call], list[_Call]]]:
    """For each slot, yields the computation of a rank and the messages that precede it.

    Even stages run forward passes in even slots and backward passes in odd slots. Odd stages do the
    opposite.
    """
    before = -1
    for slot in range(2 * (num_microbatches + stages - 1)):
        forward = slot % 2 == stage % 2
        back = (slot - 2 * stages + stage + 1) // 2
        microbatch = slot // 2 - stage // 2 if forward else back
        here = 0 <= microbatch < num_microbatches
        last = 0 <= before < num_microbatches
        messages: list[_Call] = []
        if forward and stage > 0:
            messages += [_Call("send", stage - 1, 1, before)] * last
            messages += [_Call("receive", stage - 1, 0, microbatch)] * here
        if not forward and stage < stages - 1:
            messages += [_Call("receive", stage + 1, 1, microbatch)] * here
            messages += [_Call("send", stage + 1, 0, before)] * last
        yield [_Call("compute", stage, 0 if forward else 1, microbatch)] * here, messages
        before = microbatch
