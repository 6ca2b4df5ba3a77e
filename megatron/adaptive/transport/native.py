"""Transport over the C++ extension: shared memory, RDMA verbs, TCP.

One ``_C.Node`` per process and job carries the channels to all peers and the queue that they meet
in. A message goes out of the caller's memory at once where the channel has room, else its tensor is
kept until it has::

    send()      tensor ──copy──> slot of the channel ──> peer
    reserve()            slot ─────── send() ──────────> peer     computed in place, no copy
    take()               slot <──────────────────────── peer      a view, no copy

A message comes in as a tensor over the channel's own memory (a slot), which goes back to the sender
when the last view of it is gone, in any order and from any thread. A receiver that holds nearly all
slots of a channel copies what comes next out of its slot, so that a channel that is smaller than
what its receiver keeps delays nobody for ever.

The GPU's part is in ``staging.py``; what the bytes look like is in ``docs/transport.md``.
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

# Without the checks of torch.utils.dlpack, for objects that are not capsules.
_from_dlpack: Callable[[Any], torch.Tensor] = getattr(
    torch._C, "_from_dlpack", torch.utils.dlpack.from_dlpack
)


def make_tensors_with(module: ModuleType, table: Any) -> None:
    """Let the extension make and read tensors through torch's table of C functions.

    That takes half the time of capsules, which for small messages is most of it; an older torch has
    no table, and gives ``None``.
    """
    module.use_torch(table, _from_dlpack)


@lru_cache(maxsize=1)
def _load() -> ModuleType:
    module = extension.require("a native transport")
    make_tensors_with(module, getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))
    return module


class NativeTransport:
    """A ``Transport`` over channels of the C++ extension to some peers. ``connect.py`` makes it.

    Args:
        node: the ``_C.Node``, with its channels open.
        kinds: transport of each peer.
        device: where received tensors go.
        describe: text for a peer in error messages.
        least_free: slots of a channel that its receiver leaves to the sender.
        make_staging: makes the GPU's part, which sends tensors of the host by its argument; for a
            ``device`` that is a GPU there is one anyhow.
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
        """Send a tensor that is not plain memory of a common type, or under an older torch."""
        action = label.action
        if not tensor.is_cpu:
            raise TransportError(
                f"{action} for {self._describe(peer)} is on {tensor.device}, but this transport "
                "was made for tensors of the CPU; make it with that device"
            )
        code, variant = code_of(tensor.dtype, tensor.dim())
        tag = label.step, KIND_CODE[action.kind], action.chunk, action.microbatch, code, variant
        reserved = self._node.reserved_at(tensor.data_ptr())
        if reserved is not None:
            reserved_for, token = reserved
            if reserved_for == peer and settled(tensor) is tensor:
                self._node.commit(peer, token, *tag, tensor.shape)
                return
            # For another channel, or its memory does not hold its elements in order.
            tensor = tensor.clone()
        tensor = settled(tensor)
        self._node.send(
            peer,
            *tag,
            tensor.shape,
            tensor.data_ptr(),
            tensor.nbytes,
            # Not the tensor: its owner may put another storage into it.
            tensor.untyped_storage(),
        )

    def reserve(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        code, variant = code_of(dtype, len(shape))
        if self._staging is not None:
            return self._staging.empty(shape, dtype)
        tensor = self._node.reserve_tensor(peer, code, shape)
        if tensor is None:
            return torch.empty(shape, dtype=dtype)
        return tensor.view(dtype) if variant else tensor  # type: ignore[no-any-return]

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
            f"{sum(waiting.values())} messages were not taken within {timeout_s:g} s by "
            f"{slow or 'the device'}; is it alive and on the network?"
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
        """Flush, and drop what arrives meanwhile: a peer that closes too waits for its slots."""
        while True:
            try:
                self.flush(min(_DROP_AFTER_S, max(0.0, end_s - time.monotonic())))
                return
            except DeadlineError:
                if time.monotonic() >= end_s:
                    raise
            with contextlib.suppress(TransportError):  # of a peer that is gone; flush() reports it
                while self.completions.poll() is not None:
                    pass


@lru_cache(maxsize=1)
def _arrival_class(module: ModuleType) -> type[Any]:
    """Return the class of messages in the memory of their channel; see :class:`Arrival`.

    The extension makes its objects and answers most of what is asked of them.
    """

    class NativeArrival(module.Arrival, Arrival):  # type: ignore[misc, name-defined]
        __slots__ = ()

        @property
        def label(self) -> Label:  # type: ignore[override]
            return _label_of(self)

        def _take(self) -> torch.Tensor:
            """Take what the extension does not by itself."""
            tensor = _viewed(self, self.tensor())
            return tensor.clone() if self.free_slots < self.least_free else tensor

        def settle(self) -> None:
            """Give the slot back if slots run out: who takes the payload may be long in coming."""
            native: Any = self
            if native.free_slots < native.least_free:
                native._settled = _viewed(native, native.tensor()).clone()

    return NativeArrival


class DeviceArrival(Arrival):
    """A message for a GPU, in its memory or in the host's.

    Args:
        native: the ``_C.Arrival``.
        staging: the GPU's part.
        least_free: with fewer free slots of a channel its payload is copied out of its own.
    """

    # The attributes of the base are properties here: most are never asked for.
    __slots__ = ("_copied", "_least_free", "_native", "_settled", "_staging")

    def __init__(self, native: Any, staging: Staging, least_free: int) -> None:
        self._native = native
        self._staging = staging
        self._least_free = least_free
        self._settled: torch.Tensor | None = None
        self._copied: Callable[[], torch.Tensor] | None = None

    label = property(lambda self: _label_of(self._native))  # type: ignore[assignment]
    peer = property(lambda self: self._native.peer)  # type: ignore[assignment]
    nbytes = property(lambda self: self._native.nbytes)  # type: ignore[assignment]
    arrived_ns = property(lambda self: self._native.arrived_ns)  # type: ignore[assignment]

    def take(self) -> torch.Tensor:
        """Implements :class:`Arrival`.

        Returns:
            The payload on the device; a view of its slot where that is there.
        """
        if self._copied is not None:
            return self._copied()
        native = self._native
        if not native.on_device:
            host = self._settled
            return self._staging.receive(_viewed(native, native.tensor()) if host is None else host)
        tensor = self._lent()
        return tensor.clone() if native.free_slots < self._least_free else tensor

    def settle(self) -> None:
        """Give the slot back if slots run out, as a ``NativeArrival`` does."""
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
    """Return the payload of a ``_C.Arrival`` in its own type."""
    variant = native.variant
    return tensor.view(DTYPE_OF[native.dtype, variant]) if variant else tensor


def _label_of(native: Any) -> Label:
    if native._label is None:
        action = _action(native.kind, native.chunk, native.microbatch)
        native._label = Label(native.step, action)
    return native._label  # type: ignore[no-any-return]


@lru_cache(maxsize=1 << 16)
def _action(kind: int, chunk: int, microbatch: int) -> Action:
    """Return an action; the same object each time, for making one takes as long as a message."""
    if kind >= len(KINDS):
        raise TransportError(
            f"a message of kind {kind} arrived, which is no input of an action; do all ranks run "
            "the same version?"
        )
    return Action(KINDS[kind], chunk, microbatch)


class NativeQueue:
    """The queue of a node as :class:`~megatron.adaptive.transport.interface.Completions`.

    Args:
        node: the ``_C.Node``.
        staging: the GPU's part, where payloads are wanted there.
        least_free: with fewer free slots of a channel its payloads are copied out of their own.
    """

    def __init__(self, node: Any, staging: Staging | None = None, least_free: int = 2) -> None:
        module = _load()
        self._staging = staging
        self._least_free = least_free
        self._node = node
        self._wait = node.wait_until
        self._arrival = module.Arrival
        self._ready: type | None = None  # of what comes out of the node as it goes to who waits
        if staging is None:
            self._ready = _arrival_class(module)
            node.deliver_as(self._ready, least_free)
        self._forwarded: CompletionQueue | None = None
        self._thread: threading.Thread | None = None

    def listen(self, listener: Listener) -> None:
        """Implements :class:`~megatron.adaptive.transport.interface.Completions`.

        From here on a thread takes what arrives out of the node and hands it on, to the listener
        and to who waits here.
        """
        forwarded = CompletionQueue()
        forwarded.listen(listener)
        self._forwarded = forwarded
        self._thread = threading.Thread(
            target=self._forward, args=(forwarded,), name="arrivals", daemon=True
        )
        self._thread.start()
        # A daemon that comes back from C++ after the interpreter's end would end the process.
        atexit.register(_stop, weakref.ref(self))

    def put(self, item: Item | Exception) -> None:
        (self._forwarded or self._node).put(item)

    def poll(self) -> Item | None:
        if self._forwarded is not None:
            return self._forwarded.poll()
        item = self._node.poll()
        # Not in _open() here either.
        ready = item is None or type(item) is self._ready
        return item if ready else self._open(item)  # type: ignore[no-any-return]

    def wait(self, deadline_s: float) -> Item | None:
        if self._forwarded is not None:
            return self._forwarded.wait(deadline_s)
        # The time is not asked for here: in a virtual machine that may take as long as a message.
        item = self._wait(deadline_s)
        # Not in _open(): a call takes as long as the rest of this.
        return item if type(item) is self._ready else self._open(item)  # type: ignore[return-value]

    def stop(self) -> None:
        """Stop the thread of :meth:`listen`, if there is one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._node.put(_STOP)
            thread.join()

    def _open(self, item: Any) -> Item | None:
        if self._staging is not None and type(item) is self._arrival:
            return DeviceArrival(item, self._staging, self._least_free)
        # Anything else was put here by a thread of Python.
        if isinstance(item, Exception):
            raise item
        return item  # type: ignore[no-any-return]

    def _forward(self, forwarded: CompletionQueue) -> None:
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
