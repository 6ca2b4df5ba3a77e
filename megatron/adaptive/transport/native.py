"""Sends tensors with the C++ extension, over shared memory, RDMA verbs or TCP.

Each process has one ``_C.Node`` per job, which owns the channels to all peers and the queue of
received messages. A send immediately copies the tensor if the channel has a free slot. Otherwise,
the transport keeps the tensor until a slot is free::

    send()      tensor ──copy──> slot of the channel ──> peer
    reserve()            slot ─────── send() ──────────> peer     computed in place, no copy
    take()               slot <──────────────────────── peer      a view, no copy

A slot is a part of the channel's memory. The payload of a received message is a tensor in a slot.
The slot returns to the sender when the last view of the tensor is released. Tensors can be released
in any order and by any thread. If a receiver occupies nearly all slots of a channel, the next
messages are copied out of their slots, so that the sender is not blocked forever.

``staging.py`` handles GPU tensors; ``docs/reference/transport.md`` describes the format of a
message.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
import torch.utils.dlpack

from megatron.adaptive import extension
from megatron.adaptive.errors import DeadlineError, TransportError
from megatron.adaptive.schedule.action import Action
from megatron.adaptive.transport.interface import (
    DTYPE_OF,
    KIND_CODE,
    KINDS,
    Arrival,
    CompletionQueue,
    Item,
    Label,
    Listener,
    code_of,
    settled,
)
from megatron.adaptive.transport.staging import Staging

_CLOSE_S = 30.0
_DROP_AFTER_S = 0.1
_STOP = object()

# Use this private function of torch, which omits the checks of torch.utils.dlpack. The checks are
# unnecessary, because the arguments are always DLPack capsules.
_from_dlpack: Callable[[Any], torch.Tensor] = getattr(
    torch._C, "_from_dlpack", torch.utils.dlpack.from_dlpack
)


def make_tensors_with(module: ModuleType, table: Any) -> None:
    """Makes the extension create and read tensors through torch's table of C functions.

    The table is twice as fast as DLPack capsules. Creating a capsule would take most of the time
    that is needed for a small message.

    Args:
        module: Python module of the C++ extension.
        table: Capsule that contains torch's table of functions, or ``None`` for an older torch
            release without such a table.
    """
    module.use_torch(table, _from_dlpack)


@lru_cache(maxsize=1)
def _load() -> ModuleType:
    module = extension.require("a native transport")
    make_tensors_with(module, getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))
    return module


class NativeTransport:
    """Sends and receives tensors over the channels of the C++ extension.

    ``connect.py`` opens the channels.

    Args:
        node: ``_C.Node`` object of the C++ extension, whose channels are open.
        kinds: Name of the transport to each peer (``shm``, ``rdma`` or ``tcp``), keyed by global
            rank.
        device: Device for received tensors.
        describe: Function that returns the name of a peer for error messages.
        least_free: Number of slots per channel that this rank must keep free for the sender.
        make_staging: Function that creates the object for copies between GPU and host. Its argument
            is a function that sends host tensors. By default, a :class:`Staging` object is created
            for a GPU, and none for a CPU.
    """

    def __init__(
        self,
        node: Any,
        kinds: Mapping[int, str],
        *,
        device: torch.device,
        describe: Callable[[int], str] = lambda rank: f"rank {rank}",
        least_free: int = 2,
        make_staging: Callable[[Callable[[int, Label, torch.Tensor], None]], Staging] | None = None,
    ) -> None:
        self.name = "+".join(sorted(set(kinds.values())))
        self._node = node
        self._send = node.send_tensor
        self._kinds = dict(kinds)
        self._describe = describe
        self._is_closed = False
        self._staging: Staging | None = None
        if make_staging is not None:
            self._staging = make_staging(self._send_from_host)
        elif device.type == "cuda":
            self._staging = Staging(node, device, kinds, self._send_from_host)
        self.completions = NativeQueue(node, self._staging, least_free)

    def send(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        if self._staging is not None:
            self._staging.send(peer, label, tensor)
            return
        self._send_from_host(peer, label, tensor)

    def _send_from_host(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        action = label.action
        if not self._send(
            peer, label.step, KIND_CODE[action.kind], action.chunk, action.microbatch, tensor
        ):
            self._send_odd(peer, label, tensor)

    def _send_odd(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        """Sends a tensor whose dtype or memory layout needs special handling.

        On torch releases without the table of C functions, this method sends every tensor.
        """
        action = label.action
        if not tensor.is_cpu:
            raise TransportError(
                f"{label.name} for {self._describe(peer)} is on {tensor.device}, but this "
                "transport was created for CPU tensors; create it for that device"
            )
        code, variant = code_of(tensor.dtype, tensor.dim())
        tag = label.step, KIND_CODE[action.kind], action.chunk, action.microbatch, code, variant
        reserved = self._node.reserved_at(tensor.data_ptr())
        if reserved is not None:
            reserved_for, token = reserved
            if reserved_for == peer and settled(tensor) is tensor:
                self._node.commit(peer, token, *tag, tensor.shape)
                return
            # Copy the tensor, because its slot belongs to another channel, or contains the elements
            # in a different order.
            tensor = tensor.clone()
        tensor = settled(tensor)
        self._node.send(
            peer,
            *tag,
            tensor.shape,
            tensor.data_ptr(),
            tensor.nbytes,
            # Keep the storage alive instead of the tensor, because the program may give the tensor
            # another storage before the message is sent.
            tensor.untyped_storage(),
        )

    def reserve(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        code, variant = code_of(dtype, len(shape))
        if self._staging is not None:
            return self._staging.empty(shape, dtype)
        tensor: torch.Tensor | None = self._node.reserve_tensor(peer, code, shape)
        if tensor is None:
            return torch.empty(shape, dtype=dtype)
        return tensor.view(dtype) if variant else tensor

    def describe_links(self) -> dict[int, dict[str, Any]]:
        return {peer: {"kind": kind, **self._node.info(peer)} for peer, kind in self._kinds.items()}

    def flush(self, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        done = self._staging is None or self._staging.flush(timeout_s)
        if done and self._node.flush(max(0.0, end_s - time.monotonic())):
            return
        waiting = {peer: self._node.pending(peer) for peer in self._kinds}
        slow = ", ".join(self._describe(peer) for peer, count in waiting.items() if count)
        raise DeadlineError(
            f"{sum(waiting.values())} messages were not received within {timeout_s:g} s by "
            f"{slow or 'the device'}; check that each receiver is running and reachable"
        )

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        end_s = time.monotonic() + _CLOSE_S
        try:
            self._drain(end_s)
        finally:
            if self._staging is not None:
                self._staging.close()
            self.completions.stop()
            self._node.close(max(_DROP_AFTER_S, end_s - time.monotonic()))

    def _drain(self, end_s: float) -> None:
        """Sends all pending messages, and discards received ones, until the time ``end_s``.

        Received messages must be discarded, because a peer that closes its channels waits until its
        slots are returned. If messages are still unsent at ``end_s``, raises the error of
        :meth:`flush`.
        """
        while True:
            try:
                self.flush(min(_DROP_AFTER_S, max(0.0, end_s - time.monotonic())))
                return
            except DeadlineError:
                if time.monotonic() >= end_s:
                    raise
            # Ignore errors here. If a peer has exited, flush() reports it.
            with contextlib.suppress(TransportError):
                while self.completions.poll() is not None:
                    pass


@lru_cache(maxsize=1)
def _arrival_class(module: ModuleType) -> type[Any]:
    """Returns the class of received messages whose payload is in the channel's memory.

    The C++ extension ``module`` creates the objects of this class, and implements most methods of
    :class:`Arrival`.
    """

    # mypy does not know the base class, because the extension defines it at run time.
    class NativeArrival(module.Arrival, Arrival):  # type: ignore[misc, name-defined]
        __slots__ = ()

        @property
        def label(self) -> Label:  # type: ignore[override]  # unlike in Arrival, it is read only
            return _label_of(self)

        def _take(self) -> torch.Tensor:
            """Returns the payload in those cases that the extension's method does not handle."""
            tensor = _viewed(self, self.tensor())
            return tensor.clone() if self.free_slots < self.least_free else tensor

        def settle(self) -> None:
            """Copies the payload out of its slot if few slots are free for the sender.

            The payload may be taken much later, but the sender may need the slot earlier.
            """
            native: Any = self
            if native.free_slots < native.least_free:
                native._settled = _viewed(native, native.tensor()).clone()

    return NativeArrival


class DeviceArrival(Arrival):
    """Received message of a rank on a GPU. The payload is in GPU memory or host memory.

    Args:
        native: Message as an object of the C++ extension (``_C.Arrival``).
        staging: Object that copies between the GPU and the channel.
        least_free: Minimum number of slots to keep free for the sender. If fewer slots are free,
            the payload is copied out of its slot.
    """

    # The attributes of Arrival are implemented as properties, because most of them are never read,
    # and computing all of them in advance would waste time.
    __slots__ = ("_copied", "_least_free", "_native", "_settled", "_staging")

    def __init__(self, native: Any, staging: Staging, least_free: int) -> None:
        self._native = native
        self._staging = staging
        self._least_free = least_free
        self._settled: torch.Tensor | None = None
        self._copied: Callable[[], torch.Tensor] | None = None

    label = property(lambda self: _label_of(self._native))
    peer = property(lambda self: self._native.peer)
    nbytes = property(lambda self: self._native.nbytes)
    arrived_ns = property(lambda self: self._native.arrived_ns)

    def take(self) -> torch.Tensor:
        """Returns the payload on the GPU, usually as a view of a slot in GPU memory."""
        if self._copied is not None:
            return self._copied()
        native = self._native
        if not native.on_device:
            host = self._settled
            return self._staging.receive(_viewed(native, native.tensor()) if host is None else host)
        tensor = self._lent()
        return tensor.clone() if native.free_slots < self._least_free else tensor

    def settle(self) -> None:
        """Copies the payload out of its slot if few slots are free for the sender."""
        native = self._native
        if native.free_slots >= self._least_free:
            return
        if native.on_device:
            self._copied = self._staging.copy_out(self._lent)
        else:
            self._settled = _viewed(native, native.tensor()).clone()

    def _lent(self) -> torch.Tensor:
        return _viewed(self._native, self._staging.lend(self._native))


def _viewed(native: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor``, as a view with its original dtype if it was sent as a different dtype.

    ``native`` is the message to which ``tensor`` belongs.
    """
    variant = native.variant
    return tensor.view(DTYPE_OF[native.dtype, variant]) if variant else tensor


def _label_of(native: Any) -> Label:
    if native._label is None:
        action = _action(native.kind, native.chunk, native.microbatch)
        native._label = Label(native.step, action)
    label: Label = native._label
    return label


@lru_cache(maxsize=1 << 16)
def _action(kind: int, chunk: int, microbatch: int) -> Action:
    """Returns an action from a cache, because creating an action takes as long as a small send.

    ``kind`` is the code that represents the action's kind in messages.
    """
    if kind >= len(KINDS):
        raise TransportError(
            f"a message has the unknown kind {kind}; run the same version of this package on all "
            "ranks"
        )
    return Action(KINDS[kind], chunk, microbatch)


class NativeQueue:
    """Implements the completion queue with the queue of a ``_C.Node``.

    Args:
        node: Object of the C++ extension that receives the messages (``_C.Node``).
        staging: Object for copies between the GPU and the channels, or ``None`` on a CPU.
        least_free: Minimum number of slots per channel to keep free for the sender. If fewer slots
            are free, payloads are copied out of their slots.
    """

    def __init__(self, node: Any, staging: Staging | None = None, least_free: int = 2) -> None:
        module = _load()
        self._staging = staging
        self._least_free = least_free
        self._node = node
        self._wait = node.wait_until
        self._arrival = module.Arrival
        # Items of this class are returned unchanged, without a call of _open().
        self._ready: type | None = None
        if staging is None:
            self._ready = _arrival_class(module)
            node.deliver_as(self._ready, least_free)
        self._forwarded: CompletionQueue | None = None
        self._thread: threading.Thread | None = None

    def listen(self, listener: Listener) -> None:
        """Calls ``listener`` with each item that arrives from now on.

        A new thread takes the items from the node. It passes each item to the listener first, and
        then to the thread that waits for items.
        """
        forwarded = CompletionQueue()
        forwarded.listen(listener)
        self._forwarded = forwarded
        self._thread = threading.Thread(
            target=self._forward, args=(forwarded,), name="arrivals", daemon=True
        )
        self._thread.start()
        # Stop the thread at exit. If it were still running and returned from C++ after the
        # interpreter has been finalized, the process would crash.
        atexit.register(_stop, weakref.ref(self))

    def put(self, item: Item | Exception) -> None:
        (self._forwarded or self._node).put(item)

    def poll(self) -> Item | None:
        if self._forwarded is not None:
            return self._forwarded.poll()
        item: Item | None = self._node.poll()
        is_ready = item is None or type(item) is self._ready
        return item if is_ready else self._open(item)

    def wait(self, deadline_s: float) -> Item | None:
        if self._forwarded is not None:
            return self._forwarded.wait(deadline_s)
        # Pass the deadline to the node unchanged to avoid reading the clock in Python. In a virtual
        # machine, reading the clock may take as long as sending a message.
        item: Item | None = self._wait(deadline_s)
        # Check the type here, because a call of _open() takes as long as the rest of this method.
        return item if type(item) is self._ready else self._open(item)

    def stop(self) -> None:
        """Stops the thread that :meth:`listen` started, if it is running."""
        thread = self._thread
        self._thread = None
        if thread is not None:
            self._node.put(_STOP)
            thread.join()

    def _open(self, item: Any) -> Item | None:
        """Converts ``item``, which the node returned, for the executor. Raises errors."""
        if self._staging is not None and type(item) is self._arrival:
            return DeviceArrival(item, self._staging, self._least_free)
        # All other items were added to the queue in Python, so they need no conversion.
        if isinstance(item, Exception):
            raise item
        other: Item | None = item
        return other

    def _forward(self, forwarded: CompletionQueue) -> None:
        """Passes items from the node to ``forwarded`` until the queue is stopped.

        Runs in a thread.
        """
        if self._staging is not None:
            self._staging.make_current()
        while True:
            try:
                item = self._node.wait_until(float("inf"))
                if item is _STOP:
                    return
                opened: Any = self._open(item)
                if hasattr(opened, "settle"):
                    opened.settle()
                forwarded.put(opened)
            except Exception as error:
                forwarded.put(error)


def _stop(reference: weakref.ref[NativeQueue]) -> None:
    queue = reference()
    if queue is not None:
        queue.stop()
