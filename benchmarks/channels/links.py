"""Links between two processes: our transports, gloo, and an MPI library, behind one interface."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

WINDOW = 4
"""Messages that gloo or MPI has under way: more made none of them faster."""
LIMIT_S = 60.0


class Link(Protocol):
    """One transport between two processes, in both directions."""

    def expect(self, nbytes: int, count: int) -> None:
        """Announces the messages that will be received."""

    def send(self, payload: Any) -> None:
        """Starts sending; may wait for older messages."""

    def settle(self) -> None:
        """Waits until no payload that was sent is needed here any more."""

    def receive(self) -> Any:
        """Waits for the next message, which belongs to the caller until the next call."""

    def close(self) -> None:
        """Ends the link; collective."""


class Posted:
    """A link that fills buffers given beforehand: gloo or MPI.

    Args:
        make_buffer: Function that makes a payload of so many bytes.
        start_send: Function that starts to send a payload, and returns a request.
        start_receive: Function that starts to receive into a buffer, and returns a request.
        wait: Function that waits for a request.
    """

    def __init__(
        self,
        make_buffer: Callable[[int], Any],
        start_send: Callable[[Any], Any],
        start_receive: Callable[[Any], Any],
        wait: Callable[[Any], Any],
    ) -> None:
        self._make_buffer = make_buffer
        self._start_send = start_send
        self._start_receive = start_receive
        self._wait = wait
        self._sends: deque[Any] = deque()
        self._receives: deque[tuple[Any, Any]] = deque()
        self._buffers: dict[int, list[Any]] = {}
        self._nbytes = self._left = self._next = 0

    def expect(self, nbytes: int, count: int) -> None:
        """Posts buffers for the first messages; see :class:`Link`."""
        assert not self._receives
        if nbytes not in self._buffers:
            # One more than are posted, because the caller holds one.
            self._buffers = {nbytes: [self._make_buffer(nbytes) for _ in range(WINDOW + 1)]}
        self._nbytes, self._left, self._next = nbytes, count, 0
        for _ in range(WINDOW):
            self._post()

    def send(self, payload: Any) -> None:
        """Starts sending; see :class:`Link`."""
        while len(self._sends) >= WINDOW:
            self._wait(self._sends.popleft())
        self._sends.append(self._start_send(payload))

    def settle(self) -> None:
        """Waits for all sends; see :class:`Link`."""
        while self._sends:
            self._wait(self._sends.popleft())

    def receive(self) -> Any:
        """Waits for the next message; see :class:`Link`."""
        request, buffer = self._receives.popleft()
        self._wait(request)
        self._post()
        return buffer

    def close(self) -> None:
        """Does nothing: the process group or MPI ends with the process."""

    def _post(self) -> None:
        if self._left:
            buffers = self._buffers[self._nbytes]
            buffer = buffers[self._next % len(buffers)]
            self._left -= 1
            self._next += 1
            self._receives.append((self._start_receive(buffer), buffer))


def open_mpi(peer: int, make_buffer: Callable[[int], Any]) -> Posted:
    """Opens the MPI library that ``mpiexec`` chose."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return Posted(
        make_buffer,
        lambda payload: world.Isend(payload, peer),
        lambda buffer: world.Irecv(buffer, peer),
        lambda request: request.Wait(),
    )


def open_gloo(peer: int, make_buffer: Callable[[int], Any]) -> Posted:
    """Opens gloo through ``torch.distributed``; collective."""
    import torch.distributed as dist

    group = dist.new_group([0, 1], backend="gloo")
    return Posted(
        make_buffer,
        lambda payload: group.send([payload], peer, 0),
        lambda buffer: group.recv([buffer], peer, 0),
        lambda request: request.wait(),
    )


class TransportLink:
    """One of our transports, as an executor would get it. Collective to make.

    Args:
        name: ``shm``, ``tcp`` or ``gloo``.
        rank: Number of this process, 0 or 1.
        slot_bytes: Size of a slot, which holds a message whole.
        slots: Number of slots.
        fixed: Whether all messages are as large as a slot, which gloo gains from.

    Attributes:
        transport: The transport.
    """

    def __init__(
        self, name: str, rank: int, *, slot_bytes: int, slots: int, fixed: bool = False
    ) -> None:
        import torch

        from megatron.adaptive.accelerator import Accelerator
        from megatron.adaptive.config.parallel import TransportConfig
        from megatron.adaptive.schedule.action import Action, ActionKind
        from megatron.adaptive.transport.connect import Connector, own_endpoint
        from megatron.adaptive.transport.interface import Label
        from megatron.adaptive.transport.kind import Payloads
        from megatron.adaptive.transport.liveness import here

        settings = TransportConfig(
            transport=name, transport_slot_bytes=slot_bytes, transport_slots=slots
        )
        device = torch.device("cpu")
        endpoint = own_endpoint(
            rank, here(rank), device=device, own_gpu=False, options=settings, address="127.0.0.1"
        )
        shape = (slot_bytes // 4,) if fixed else None
        made = Connector(
            members=[0, 1],
            gather=_gather,
            accelerator=Accelerator(device=device, backend="gloo", name="CPU"),
            payloads=Payloads(shape=shape, dtype=torch.float32),
            describe=lambda rank: f"rank {rank}",
            timeout_s=LIMIT_S,
        ).connect(endpoint, [1 - rank], settings)
        assert made is not None
        self.transport = made
        self._peer = 1 - rank
        self._label = Label(0, Action(ActionKind.F, 0, 0))

    def expect(self, nbytes: int, count: int) -> None:
        """Does nothing: messages come unasked."""

    def send(self, payload: Any) -> None:
        """Starts sending; see :class:`Link`."""
        self.transport.send(self._peer, self._label, payload)

    def settle(self) -> None:
        """Waits for all sends; see :class:`Link`."""
        self.transport.flush(LIMIT_S)

    def receive(self) -> Any:
        """Waits for the next message; see :class:`Link`."""
        arrival: Any = self.transport.completions.wait(time.monotonic() + LIMIT_S)
        if arrival is None:
            raise TimeoutError(f"nothing arrived within {LIMIT_S:g} s")
        return arrival.take()

    def close(self) -> None:
        """Ends the transport; collective."""
        self.transport.close()


def _gather(value: Any) -> list[Any]:
    """Returns the values of both processes."""
    import torch.distributed as dist

    values: list[Any] = [None, None]
    dist.all_gather_object(values, value)
    return values
