"""Simulates GPUs that exchange messages over NCCL, in order to find deadlocks.

Each rank has a host, which launches actions, and a device, which has queues of kernels. A kernel
begins when it is the first in its queue and in its stream. A collective ends when all members of
its group have begun it, and a message ends when both of its ends have begun it.

Each iteration chooses one of the possible events at random, so each seed gives different delays
between the ranks. The job is deadlocked if no event is possible before all actions have finished.

There are two methods of receiving messages::

    THREADS   A send is posted when the message has been computed, and a receive is posted when
              the send was announced. Each runs in a separate stream. The message counts as
              arrived when its data has arrived.
    STREAM    A send is posted when the action is launched. When the host polls, the receive is
              posted in the compute stream, and the message counts as arrived at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any

from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.catalog import make_schedule
from megatron.adaptive.schedule.stage_placement import Placement

F, B = ActionKind.F, ActionKind.B
COMPUTE = "computing"


class Receiving(Enum):
    """Method of receiving messages. The docstring of this module explains both methods."""

    THREADS = "threads"
    STREAM = "computing stream"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Describes a simulated job: its parallel sizes, and how its ranks choose and receive work.

    Attributes:
        pp, tp, ep: Pipeline-, tensor- and expert-parallel size.
        microbatches: Number of microbatches in the only step.
        follows_list: Whether ranks follow the order of 1F1B. Otherwise, the first rank of each
            stage chooses an action whose input has arrived on all ranks of the stage.
        receiving: Method of receiving messages.
        one_queue: Whether messages share a hardware queue with the compute stream.
    """

    pp: int
    tp: int
    ep: int
    microbatches: int = 4
    follows_list: bool = True
    receiving: Receiving = Receiving.THREADS
    one_queue: bool = False


@dataclass(eq=False)
class Kernel:
    """Kernel in a queue of a device.

    Attributes:
        rank: Rank of the device.
        stream: Name of the kernel's stream.
        partners: Key of the kernels that end together with this kernel, or ``None`` if it ends by
            itself.
        count: Number of kernels that end together, including this kernel.
        after: Kernel in another stream that must end before this kernel can begin.
    """

    rank: int
    stream: str
    partners: Any = None
    count: int = 1
    after: Kernel | None = None
    has_ended: bool = False


@dataclass(eq=False)
class Message:
    """Message in a channel, which is the input of an action."""

    action: Action
    computed: Kernel
    is_posted: bool = False
    received: Kernel | None = None


@dataclass(eq=False)
class Device:
    """State of the device and the host of one rank.

    Attributes:
        queues: Kernels that have not begun, by hardware queue.
        streams: Kernels that have not ended, by stream.
        launched: Actions that the host has launched.
        inputs: Actions whose inputs have arrived.
    """

    queues: dict[str, list[Kernel]] = field(default_factory=dict)
    streams: dict[str, list[Kernel]] = field(default_factory=dict)
    launched: list[Action] = field(default_factory=list)
    inputs: set[Action] = field(default_factory=set)


class Job:
    """Simulates one step of a job.

    Args:
        shape: Description of the job.
        seed: Seed of the random order of events.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.size = shape.pp * shape.tp * shape.ep
        self.devices = [Device() for _ in range(self.size)]
        self.orders = _orders(shape.pp, shape.microbatches)
        self.decided: list[list[Action]] = [[] for _ in range(shape.pp)]
        self.channels: dict[tuple[int, int], list[Message]] = {}
        self.began: dict[Any, list[Kernel]] = {}
        self.rng = random.Random(seed)
        self.late = self.rng.randrange(self.size)
        if shape.follows_list:
            self.decided = [list(order) for order in self.orders]

    def stands_still(self) -> bool:
        """Simulates the step, and returns whether it deadlocked."""
        while True:
            steps = [*self._steps()]
            if not steps:
                return any(self._is_unfinished(device) for device in self.devices)
            weights = [0.02 if rank == self.late else 1.0 for rank, _, _ in steps]
            _, step, arguments = self.rng.choices(steps, weights)[0]
            step(*arguments)

    def _is_unfinished(self, device: Device) -> bool:
        # The hosts do not wait for their devices, so all actions may be launched even in a
        # deadlock. Therefore, also check for kernels that have not ended.
        return len(device.launched) < 2 * self.shape.microbatches or any(device.streams.values())

    def _steps(self) -> Iterator[tuple[int, Any, tuple[Any, ...]]]:
        """Yields the events that can happen next, as ``(rank, function, arguments)``."""
        for rank, device in enumerate(self.devices):
            stage = self._stage(rank)
            if rank == self._first(stage) and not self.shape.follows_list:
                for action in self._open(stage):
                    yield rank, self.decided[stage].append, (action,)
            number = len(device.launched)
            if number < len(self.decided[stage]):
                action = self.decided[stage][number]
                if not self._takes(stage, action) or action in device.inputs:
                    yield rank, self._launch, (rank, action)
            for queue in device.queues.values():
                if queue and self._may_begin(queue[0]):
                    yield rank, self._begin, (queue,)
        for (sender, receiver), messages in self.channels.items():
            yield from self._message_steps(sender, receiver, messages)

    def _message_steps(
        self, sender: int, receiver: int, messages: list[Message]
    ) -> Iterator[tuple[int, Any, tuple[Any, ...]]]:
        if not messages:
            return
        message = messages[0]
        if self.shape.receiving is Receiving.STREAM:
            yield receiver, self._receive_in_stream, (sender, receiver, messages)
        elif not message.is_posted:
            if message.computed.has_ended:
                yield sender, self._post_send, (sender, receiver, message)
        elif message.received is None:
            yield receiver, self._post_receive, (sender, receiver, message)
        elif message.received.has_ended:
            yield receiver, self._announce, (receiver, messages)

    def _launch(self, rank: int, action: Action) -> None:
        stage, shape = self._stage(rank), self.shape
        self.devices[rank].launched.append(action)
        tp_group, ep_group = rank // shape.tp, (stage, rank % shape.tp)
        self._post(Kernel(rank, COMPUTE, ("tp", tp_group, action), shape.tp))
        self._post(Kernel(rank, COMPUTE, ("ep", ep_group, action), shape.ep))
        computed = self._post(Kernel(rank, COMPUTE))
        target = stage + (1 if action.kind is F else -1)
        if 0 <= target < shape.pp:
            receiver = rank + (target - stage) * shape.tp * shape.ep
            message = Message(action, computed)
            self.channels.setdefault((rank, receiver), []).append(message)
            if shape.receiving is Receiving.STREAM:
                self._post_send(rank, receiver, message)

    def _post_send(self, sender: int, receiver: int, message: Message) -> None:
        message.is_posted = True
        key = sender, receiver, message.action
        self._post(Kernel(sender, f"to {receiver}", key, 2, after=message.computed))

    def _post_receive(self, sender: int, receiver: int, message: Message) -> None:
        key = sender, receiver, message.action
        message.received = self._post(Kernel(receiver, f"from {sender}", key, 2))

    def _receive_in_stream(self, sender: int, receiver: int, messages: list[Message]) -> None:
        action = messages[0].action
        self._post(Kernel(receiver, COMPUTE, (sender, receiver, action), 2))
        self._announce(receiver, messages)

    def _announce(self, receiver: int, messages: list[Message]) -> None:
        self.devices[receiver].inputs.add(messages.pop(0).action)

    def _post(self, kernel: Kernel) -> Kernel:
        device = self.devices[kernel.rank]
        is_apart = kernel.stream != COMPUTE and not self.shape.one_queue
        device.queues.setdefault("messages" if is_apart else COMPUTE, []).append(kernel)
        device.streams.setdefault(kernel.stream, []).append(kernel)
        return kernel

    def _may_begin(self, kernel: Kernel) -> bool:
        first = self.devices[kernel.rank].streams[kernel.stream][0]
        return first is kernel and (kernel.after is None or kernel.after.has_ended)

    def _begin(self, queue: list[Kernel]) -> None:
        kernel = queue.pop(0)
        together = self.began.setdefault(kernel.partners, []) if kernel.partners else []
        together.append(kernel)
        if len(together) == kernel.count:
            for partner in together:
                partner.has_ended = True
                self.devices[partner.rank].streams[partner.stream].pop(0)

    def _open(self, stage: int) -> list[Action]:
        """Returns the actions among which the first rank of ``stage`` may choose now."""
        decided = set(self.decided[stage])
        members = range(self._first(stage), self._first(stage + 1))
        return [
            action
            for action in self.orders[stage]
            if action not in decided
            and (action.kind is F or Action(F, 0, action.microbatch) in decided)
            and (
                not self._takes(stage, action)
                or all(action in self.devices[rank].inputs for rank in members)
            )
        ]

    def _takes(self, stage: int, action: Action) -> bool:
        return stage > 0 if action.kind is F else stage < self.shape.pp - 1

    def _stage(self, rank: int) -> int:
        return rank // (self.shape.tp * self.shape.ep)

    def _first(self, stage: int) -> int:
        return stage * self.shape.tp * self.shape.ep


@lru_cache
def _orders(ranks: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    placement = Placement(num_ranks=ranks, num_chunks=1)
    return tuple(map(tuple, make_schedule("1f1b", placement, microbatches).orders))


def standing_still(shape: Shape, seeds: int) -> int:
    """Returns for how many of the seeds 0 to ``seeds`` - 1 a job of shape ``shape`` deadlocks."""
    return sum(Job(shape, seed).stands_still() for seed in range(seeds))
