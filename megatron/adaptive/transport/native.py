"""Transport over the C++ extension: shared memory, RDMA verbs, TCP, and loopback for tests.

One ``_C.Node`` per process and job carries the channels to all peers and the queue that they meet
in. A message goes out of the caller's memory at once where the channel has room, else its tensor is
kept until it has::

    send()      tensor ──copy──> slot of the channel ──> peer
    reserve()            slot ─────── send() ──────────> peer     computed in place, no copy
    take()               slot <──────────────────────── peer      a view, no copy

What arrives is in ``native_queue.py``, the GPU's part in ``staging.py``; what the bytes look like
is in ``docs/transport.md``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron.adaptive import extension
from megatron.adaptive.errors import DeadlineError, TransportError
from megatron.adaptive.transport.header import CODE_OF, KINDS, Label, code_of, settled
from megatron.adaptive.transport.interface import Channel
from megatron.adaptive.transport.native_queue import NativeQueue, tensor_of_capsule, uses_torch
from megatron.adaptive.transport.staging import Staging

__all__ = ["NativeChannel", "NativeTransport"]

_CLOSE_S = 30.0
_DROP_AFTER_S = 0.1
_KIND_CODE = {kind: code for code, kind in enumerate(KINDS)}


class NativeTransport:
    """Channels of the C++ extension to some peers. ``connect.py`` makes it.

    Args:
        node: the ``_C.Node``, with its channels open.
        kinds: transport of each peer.
        device: where received tensors go.
        describe: text for a peer in error messages.
        least_free: slots of a channel that its receiver leaves to the sender.
        staging: the GPU's part; for a ``device`` that is a GPU it is made.
    """

    def __init__(
        self,
        node: Any,
        kinds: Mapping[int, str],
        *,
        device: torch.device,
        describe: Callable[[int], str] = lambda rank: f"rank {rank}",
        least_free: int = 2,
        staging: Staging | None = None,
    ) -> None:
        self.name = "+".join(sorted(set(kinds.values())))
        self._node = node
        is_direct = uses_torch(extension.require("a native transport"))
        self._send = node.send_tensor if is_direct else _send_nothing
        self._reserve = node.reserve_tensor if is_direct else self._reserve_capsule
        self._kinds = dict(kinds)
        self._describe = describe
        self._is_closed = False
        if staging is None and device.type == "cuda":
            staging = Staging(node, device, kinds)
        self._staging = staging
        self.completions = NativeQueue(node, staging, least_free)

    def send(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        """Implements :class:`~megatron.adaptive.transport.interface.Transport`."""
        action = label.action
        if self._staging is not None:
            self._staging.send(peer, label, tensor)
            return
        if not self._send(
            peer, label.step, _KIND_CODE[action.kind], action.chunk, action.microbatch, tensor
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
        tag = label.step, _KIND_CODE[action.kind], action.chunk, action.microbatch, code, variant
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

    def channel(self, peer: int) -> Channel:
        """Implements :class:`~megatron.adaptive.transport.interface.Transport`."""
        return NativeChannel(self, peer)

    def reserve(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Implements :meth:`~megatron.adaptive.transport.interface.Channel.reserve`."""
        code, variant = code_of(dtype, len(shape))
        if self._staging is not None:
            return self._staging.empty(shape, dtype)
        tensor = self._reserve(peer, code, shape)
        if tensor is None:
            return torch.empty(shape, dtype=dtype)
        return tensor.view(dtype) if variant else tensor  # type: ignore[no-any-return]

    def describe_links(self) -> dict[int, dict[str, Any]]:
        """Implements :class:`~megatron.adaptive.transport.interface.Transport`."""
        return {peer: {"kind": kind, **self._node.info(peer)} for peer, kind in self._kinds.items()}

    def flush(self, timeout_s: float) -> None:
        """Implements :class:`~megatron.adaptive.transport.interface.Transport`."""
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
        """Implements :class:`~megatron.adaptive.transport.interface.Transport`."""
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

    def _reserve_capsule(self, peer: int, code: int, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Does the work of ``Node.reserve_tensor`` under an older torch."""
        itemsize = next(dtype.itemsize for dtype, (other, _) in CODE_OF.items() if other == code)
        nbytes = torch.Size(shape).numel() * itemsize
        found = self._node.reserve(peer, nbytes, code, shape) if nbytes else None
        if found is None:
            return None
        return tensor_of_capsule(found[0])


def _send_nothing(*_: Any) -> bool:
    return False


class NativeChannel:
    """A directed channel of a :class:`NativeTransport`."""

    def __init__(self, transport: NativeTransport, peer: int) -> None:
        self.peer = peer
        self._transport = transport
        self._is_closed = False

    def send(self, tag: Label, tensor: torch.Tensor) -> None:
        """Implements :class:`~megatron.adaptive.transport.interface.Channel`."""
        if self._is_closed:
            raise TransportError(f"the channel to rank {self.peer} is closed: send before close()")
        self._transport.send(self.peer, tag, tensor)

    def reserve(self, tag: Label, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Implements :class:`~megatron.adaptive.transport.interface.Channel`."""
        return self._transport.reserve(self.peer, shape, dtype)

    def close(self) -> None:
        """Implements :class:`~megatron.adaptive.transport.interface.Channel`."""
        self._is_closed = True
