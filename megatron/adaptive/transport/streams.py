"""Streams and events as the NCCL transport uses them, on a GPU and on the host.

The transport's threads and their order are the same on both. On the host, where gloo's sends and
receives are done when they have been waited for, there is nothing to order, and nothing here waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch

from megatron.adaptive.accelerator import make_current

_FIRST = -1
"""Priority of the transport's streams. CUDA gives streams few queues of the hardware, in which a
kernel that cannot start yet holds up those of other streams; queues are not shared between
priorities, so that no message waits behind a computation."""


class Moment(Protocol):
    """The end of the work that a stream had been given."""

    def synchronize(self) -> None:
        """Sleeps, without the GIL, until the device has got there."""


class Streams(Protocol):
    """The streams of a device. Any thread may call it."""

    def private(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context of a thread: the device and a new stream are current within."""

    def mark(self) -> Moment:
        """Returns the end of what the calling thread's current stream has been given so far."""

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a finished tensor of another stream for use in the current one.

        Its memory is given to no other tensor before the current stream is done with it.
        """


class CudaStreams:
    """The streams of a GPU.

    Args:
        device: The GPU, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextlib.contextmanager
    def private(self) -> Iterator[None]:
        make_current(self._device)
        with torch.cuda.stream(torch.cuda.Stream(self._device, priority=_FIRST)):
            yield

    def mark(self) -> Moment:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor


class HostStreams:
    """The streams of a processor: what was called is done."""

    def private(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def mark(self) -> Moment:
        return _PASSED

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class _Passed:
    """A moment that has passed."""

    def synchronize(self) -> None:
        """Returns at once."""


_PASSED = _Passed()
