"""Turns arrivals of the C++ extension into messages, and queues them.

A message comes in as a tensor over the channel's own memory (a slot), which goes back to the sender
when the last view of it is gone, in any order and from any thread. A receiver that holds nearly all
slots of a channel copies what comes next out of its slot, so that a channel that is smaller than
what its receiver keeps delays nobody for ever.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
import torch.utils.dlpack

from megatron.adaptive import extension
from megatron.adaptive.errors import TransportError
from megatron.adaptive.schedule.action import Action
from megatron.adaptive.transport.completions import Arrival, CompletionQueue, Item, Listener
from megatron.adaptive.transport.header import DTYPE_OF, KINDS, Label
from megatron.adaptive.transport.staging import Staging

__all__ = ["DeviceArrival", "NativeQueue", "tensor_of_capsule", "uses_torch"]

_LONGEST_WAIT_S = 1e8
_STOP = object()

# Without the checks of torch.utils.dlpack, for objects that are not capsules.
tensor_of_capsule: Callable[[Any], torch.Tensor] = getattr(
    torch._C, "_from_dlpack", torch.utils.dlpack.from_dlpack
)


@lru_cache(maxsize=1)
def uses_torch(module: ModuleType) -> bool:
    """Let the extension make and read tensors by itself; false where this torch does not offer it.

    That takes half the time, which for small messages is most of it.
    """
    table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    return table is not None and bool(module.use_torch(table))


@lru_cache(maxsize=1)
def _arrival_class(module: ModuleType) -> type[Any]:
    """Return the class of messages in the memory of their channel; see :class:`Arrival`.

    The extension makes its objects and answers most of what is asked of them.
    """

    class NativeArrival(module.Arrival, Arrival):  # type: ignore[misc, name-defined]
        __slots__ = ()

        @property
        def label(self) -> Label:  # type: ignore[override]
            """Implements :class:`Arrival`."""
            native: Any = self
            if native._label is None:
                native._label = _label_of(native)
            return native._label  # type: ignore[no-any-return]

        def _take(self) -> torch.Tensor:
            """Take what the extension does not by itself."""
            tensor = _view(self)
            return tensor.clone() if self.free_slots < self.least_free else tensor

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

    @property
    def label(self) -> Label:  # type: ignore[override]
        """Implements :class:`Arrival`."""
        native = self._native
        if native._label is None:
            native._label = _label_of(native)
        return native._label  # type: ignore[no-any-return]

    @property
    def peer(self) -> int:  # type: ignore[override]
        """Implements :class:`Arrival`."""
        return self._native.peer  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Implements :class:`Arrival`."""
        return self._native.nbytes  # type: ignore[no-any-return]

    @property
    def arrived_ns(self) -> int | None:  # type: ignore[override]
        """Implements :class:`Arrival`."""
        return self._native.arrived_ns  # type: ignore[no-any-return]

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
            return self._staging.receive(_view(native) if host is None else host)
        tensor = self._lent()
        return tensor.clone() if native.free_slots < self._least_free else tensor

    def settle(self) -> None:
        """Implements :func:`_settle`."""
        if self._native.free_slots >= self._least_free:
            return
        if self._native.on_device:
            self._copied = self._staging.copy_out(self._lent)
        else:
            self._settled = _view(self._native).clone()

    def _lent(self) -> torch.Tensor:
        native = self._native
        tensor = tensor_of_capsule(self._staging.lend(native))
        variant = native.variant
        return tensor.view(DTYPE_OF[native.dtype, variant]) if variant else tensor


def _view(native: Any) -> torch.Tensor:
    """Return the payload of a ``_C.Arrival`` in the host's memory as a view of its slot."""
    is_direct = uses_torch(extension.require("a native transport"))
    tensor: torch.Tensor = native.tensor() if is_direct else tensor_of_capsule(native.dlpack())
    variant = native.variant
    return tensor.view(DTYPE_OF[native.dtype, variant]) if variant else tensor


def _settle(native: Any, least_free: int) -> None:
    """Give a slot back if slots run out, for who takes the payload may be long in coming."""
    if native.free_slots < least_free:
        native._settled = _view(native).clone()


def _label_of(native: Any) -> Label:
    return Label(native.step, _action(native.kind, native.chunk, native.microbatch))


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
    """The queue of a node as :class:`~megatron.adaptive.transport.completions.Completions`.

    Args:
        node: the ``_C.Node``.
        staging: the GPU's part, where payloads are wanted there.
        least_free: with fewer free slots of a channel its payloads are copied out of their own.
    """

    def __init__(
        self,
        node: Any,
        staging: Staging | None = None,
        least_free: int = 2,
    ) -> None:
        module = extension.require("a native transport")
        self._staging = staging
        self._least_free = least_free
        self._node = node
        self._wait = node.wait_until
        self._arrival = module.Arrival
        self._ready: type | None = None  # of what comes out of the node as it goes to who waits
        if staging is None:
            self._ready = _arrival_class(module)
            node.deliver_as(self._ready, least_free, uses_torch(module))
        self._forwarded: CompletionQueue | None = None
        self._thread: threading.Thread | None = None

    def listen(self, listener: Listener) -> None:
        """Implements :class:`~megatron.adaptive.transport.completions.Completions`.

        From here on a thread takes what arrives out of the node and hands it on, to the listener
        and to who waits here.
        """
        forwarded = CompletionQueue()
        forwarded.listen(listener)
        self._forwarded = forwarded
        self._thread = threading.Thread(target=self._forward, name="arrivals", daemon=True)
        self._thread.start()
        # A daemon that comes back from C++ after the interpreter's end would end the process.
        atexit.register(_stop, weakref.ref(self))

    def put(self, item: Item | Exception) -> None:
        """Implements :class:`~megatron.adaptive.transport.completions.Completions`."""
        if self._forwarded is not None:
            self._forwarded.put(item)
        else:
            self._node.put(item)

    def poll(self) -> Item | None:
        """Implements :class:`~megatron.adaptive.transport.completions.Completions`."""
        if self._forwarded is not None:
            return self._forwarded.poll()
        item = self._node.poll()
        return None if item is None else self._open(item)

    def wait(self, deadline_s: float) -> Item | None:
        """Implements :class:`~megatron.adaptive.transport.completions.Completions`."""
        if self._forwarded is not None:
            return self._forwarded.wait(deadline_s)
        # The time is not asked for here: in a virtual machine that may take as long as a message.
        item = self._wait(deadline_s)
        # Not in _open(): a call takes as long as the rest of this.
        if type(item) is self._ready:
            return item  # type: ignore[return-value]
        return None if item is None else self._open(item)

    def stop(self) -> None:
        """Stop the thread of :meth:`listen`, if there is one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._node.put(_STOP)
            thread.join()

    def _open(self, item: Any) -> Item:
        if self._staging is not None and type(item) is self._arrival:
            return DeviceArrival(item, self._staging, self._least_free)
        # Anything else was put here by a thread of Python.
        if isinstance(item, Exception):
            raise item
        return item  # type: ignore[no-any-return]

    def _forward(self) -> None:
        forwarded = self._forwarded
        assert forwarded is not None
        while True:
            try:
                item = self._node.wait(_LONGEST_WAIT_S)
                if item is _STOP:
                    return
                if item is not None:
                    opened = self._open(item)
                    if isinstance(opened, DeviceArrival):
                        opened.settle()
                    elif type(item) is self._ready:
                        _settle(item, self._least_free)
                    forwarded.put(opened)
            except Exception as error:
                forwarded.put(error)


def _stop(reference: weakref.ref[NativeQueue]) -> None:
    queue = reference()
    if queue is not None:
        queue.stop()
