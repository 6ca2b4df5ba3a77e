"""Simulates the channels of a rank whose peers do not exist, for ``plan --try``.

The messages that this rank sends are discarded. The inputs that it receives are random numbers,
created in the order in which the rank needs them::

    peer that does not exist                        executor
      slots with random data ─── view of a slot ──>   wait()
      slots that nobody reads <────── copy ────────   send(peer, label, tensor)

The number and size of the slots are the same as with shared memory. All slots are written at the
start, so that they occupy as much physical memory as with shared memory. On a CPU, the slots are
allocated outside the heap of the C library, so that they do not change the size of the heap.
"""

from __future__ import annotations

import itertools
import mmap
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.schedule.action import Action
from megatron.adaptive.transport.interface import (
    CompletionQueue,
    HeldArrival,
    Item,
    Label,
    Listener,
)
from megatron.adaptive.transport.kind import Payloads
from megatron.adaptive.transport.select import size_of_channel

_SIZE = 0.01
"""Standard deviation of the random inputs.

The value is small enough to keep losses finite, and large enough to avoid subnormal numbers, which
are slow on CPUs."""


class ExpectedInput(NamedTuple):
    """Input that a rank needs from another rank.

    Attributes:
        action: Action of this rank that needs the input.
        peer: Global rank that would send the input.
        length: Number of token positions in the input, or ``None`` for the length of the largest
            message.
    """

    action: Action
    peer: int
    length: int | None = None


class _Slots:
    """Provides the slots of a channel in one direction, in rotation.

    Args:
        accelerator: Device of this rank. The slots are allocated in its memory.
        values: Tensor to copy into every slot.
        count: Number of slots.
    """

    def __init__(self, accelerator: Accelerator, values: torch.Tensor, count: int) -> None:
        shape = (count, *values.shape)
        if accelerator.is_cuda:
            slots = torch.empty(shape, dtype=values.dtype, device=values.device)
        else:
            size_bytes = max(mmap.PAGESIZE, count * values.nbytes)
            memory = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
            slots = memory[: count * values.nbytes].view(values.dtype).view(shape)
        self._slots = itertools.cycle(slots.copy_(values).unbind())

    def next(self) -> torch.Tensor:
        """Returns the next slot, even if it is in use, because no rank reads the slots."""
        return next(self._slots).detach()


class StandIn:
    """Implements the ``Transport`` interface for a rank whose peers do not exist.

    The object is also its own completion queue. Each input is created when the rank waits for it.

    Args:
        accelerator: Device of this rank.
        payloads: Shape and dtype of the messages.
        peers: Global ranks with which this rank would exchange messages.
        options: Settings of the connections.
    """

    name = "stand-in"

    def __init__(
        self,
        accelerator: Accelerator,
        payloads: Payloads,
        peers: Sequence[int],
        options: TransportConfig,
    ) -> None:
        assert payloads.shape is not None
        size = size_of_channel(
            payloads.nbytes,
            payloads.in_flight,
            options.transport_slot_bytes,
            options.transport_slots,
        )
        values = torch.randn(payloads.shape, device=accelerator.device) * _SIZE
        values = values.to(payloads.dtype)
        self._incoming = {peer: _Slots(accelerator, values, size.slots) for peer in peers}
        self._outgoing = {peer: _Slots(accelerator, values, size.slots) for peer in peers}
        self._expected: deque[ExpectedInput] = deque()
        self._step = -1
        self._errors = CompletionQueue()
        self._device = accelerator.device

    @property
    def completions(self) -> StandIn:
        """Returns the queue of inputs, which is this object itself."""
        return self

    def begin(self, step: int, expected: Sequence[ExpectedInput]) -> None:
        """Sets the inputs that the next step needs.

        Args:
            step: Index of the step, starting at 0 as in the executor.
            expected: Inputs of the step, in the order in which the rank's actions need them.
        """
        self._step = step
        self._expected = deque(expected)

    def listen(self, listener: Listener) -> None:
        """Registers ``listener``, which is only called for errors, not for inputs."""
        self._errors.listen(listener)

    def put(self, item: Item | Exception) -> None:
        """Adds ``item``, an error that the next wait will raise."""
        self._errors.put(item)

    def poll(self) -> Item | None:
        """Raises the queued error, if there is one. Never returns an input."""
        return self._errors.poll()

    def wait(self, deadline_s: float) -> Item | None:
        """Returns the next input immediately, or ``None`` if the step needs no more inputs."""
        error = self._errors.poll()
        if error is not None or not self._expected:
            return error
        entry = self._expected.popleft()
        tensor = self._incoming[entry.peer].next()[: entry.length]
        label = Label(self._step, entry.action)
        return HeldArrival(label, entry.peer, tensor.nbytes, lambda: tensor)

    def send(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        """Copies ``tensor`` into a slot for ``peer``, as a shared-memory channel would do."""
        slot = self._outgoing[peer].next()
        slot.view(-1)[: tensor.numel()].copy_(tensor.detach().reshape(-1))

    def reserve(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns a new tensor of ``shape`` and ``dtype``, on the device of this rank."""
        return torch.empty(shape, dtype=dtype, device=self._device)

    def describe_links(self) -> dict[int, dict[str, Any]]:
        """Returns an empty dictionary, because there are no links."""
        return {}

    def flush(self, timeout_s: float) -> None:
        """Returns immediately, because :meth:`send` has already copied all messages."""

    def close(self) -> None:
        """Releases the slots."""
        self._incoming.clear()
        self._outgoing.clear()
