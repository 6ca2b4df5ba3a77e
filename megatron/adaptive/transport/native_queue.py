"""What arrives over the C++ extension, and the queue it is taken from.

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

__all__ = ["NativeArrival", "NativeQueue", "tensor_of_capsule", "uses_torch"]

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


class NativeArrival(Arrival):
    """A message in the memory of its channel; see :class:`Arrival`.

    Args:
        native: the ``_C.Arrival``.
        queue: the queue that it came out of.
    """

    # The attributes of the base are properties here: most are never asked for.
    __slots__ = ("_copied", "_label", "_native", "_queue", "_settled")
    _label: Label

    def __init__(self, native: Any, queue: NativeQueue) -> None:
        self._native = native
        self._queue = queue
        self._settled: torch.Tensor | None = None
        self._copied: Callable[[], torch.Tensor] | None = None  # the same on a GPU

    @property
    def label(self) -> Label:  # type: ignore[override]
        """See :class:`Arrival`."""
        try:
            return self._label
        except AttributeError:
            native = self._native
            self._label = Label(native.step, _action(native.kind, native.chunk, native.microbatch))
            return self._label

    @property
    def peer(self) -> int:  # type: ignore[override]
        """See :class:`Arrival`."""
        return self._native.peer  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """See :class:`Arrival`."""
        return self._native.nbytes  # type: ignore[no-any-return]

    @property
    def arrived_ns(self) -> int | None:  # type: ignore[override]
        """See :class:`Arrival`."""
        return self._native.arrived_ns  # type: ignore[no-any-return]

    def take(self) -> torch.Tensor:
        """See :class:`Arrival`.

        Returns:
            A view of the slot, which goes back when the last view is gone, whichever thread that
            happens in; a copy where slots run out.
        """
        queue, native = self._queue, self._native
        if queue.staging is not None:
            return self._take_on_device(queue.staging)
        tensor = self._settled
        if tensor is None:
            # Not through tensor_of() where that is possible: a call takes a tenth of all this.
            plain = queue.is_direct and not native.variant
            tensor = native.tensor() if plain else queue.tensor_of(native)
            return tensor.clone() if native.free_slots < queue.least_free else tensor
        return tensor

    def _take_on_device(self, staging: Staging) -> torch.Tensor:
        queue, native = self._queue, self._native
        if self._copied is not None:
            return self._copied()
        if not native.on_device:
            tensor = self._settled
            return staging.receive(queue.tensor_of(native) if tensor is None else tensor)
        tensor = queue.tensor_of(native)
        return tensor.clone() if native.free_slots < queue.least_free else tensor

    def settle(self) -> None:
        """Give the slot back if slots run out, for who takes the payload may be long in coming."""
        queue, native = self._queue, self._native
        if native.free_slots < queue.least_free:
            if native.on_device and queue.staging is not None:
                self._copied = queue.staging.copy_out(lambda: queue.tensor_of(native))
            else:
                self._settled = queue.tensor_of(native).clone()


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
        self.staging = staging
        self.least_free = least_free
        self._node = node
        self._wait = node.wait_until
        self._arrival = module.Arrival
        self.is_direct = uses_torch(module)
        self._forwarded: CompletionQueue | None = None
        self._thread: threading.Thread | None = None

    def listen(self, listener: Listener) -> None:
        """See :class:`~megatron.adaptive.transport.completions.Completions`.

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
        """See :class:`~megatron.adaptive.transport.completions.Completions`."""
        if self._forwarded is not None:
            self._forwarded.put(item)
        else:
            self._node.put(item)

    def poll(self) -> Item | None:
        """See :class:`~megatron.adaptive.transport.completions.Completions`."""
        if self._forwarded is not None:
            return self._forwarded.poll()
        item = self._node.poll()
        return None if item is None else self._open(item)

    def wait(self, deadline_s: float) -> Item | None:
        """See :class:`~megatron.adaptive.transport.completions.Completions`."""
        if self._forwarded is not None:
            return self._forwarded.wait(deadline_s)
        # The time is not asked for here: in a virtual machine that may take as long as a message.
        item = self._wait(deadline_s)
        # Not in _open(): a call takes as long as the rest of this.
        if type(item) is self._arrival:
            return NativeArrival(item, self)
        return None if item is None else self._open(item)

    def tensor_of(self, native: Any) -> torch.Tensor:
        """Return the payload of a ``_C.Arrival`` as a view of its slot."""
        tensor: torch.Tensor
        if native.on_device:
            assert self.staging is not None
            tensor = tensor_of_capsule(self.staging.lend(native))
        else:
            tensor = native.tensor() if self.is_direct else tensor_of_capsule(native.dlpack())
        variant = native.variant
        return tensor.view(DTYPE_OF[native.dtype, variant]) if variant else tensor

    def stop(self) -> None:
        """Stop the thread of :meth:`listen`, if there is one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._node.put(_STOP)
            thread.join()

    def _open(self, item: Any) -> Item:
        if isinstance(item, self._arrival):
            return NativeArrival(item, self)
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
                    if isinstance(opened, NativeArrival):
                        opened.settle()
                    forwarded.put(opened)
            except Exception as error:
                forwarded.put(error)


def _stop(reference: weakref.ref[NativeQueue]) -> None:
    queue = reference()
    if queue is not None:
        queue.stop()
