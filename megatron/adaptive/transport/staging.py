"""Sends GPU tensors through a native channel without synchronizing the GPU.

If a channel connects the memory of two GPUs directly (``cuda-ipc``, described in
``docs/cuda_ipc.md``), the C++ extension copies the tensors, waits for the copies and returns the
slots. This module then only passes the compute stream to the extension. Otherwise, tensors are
copied through pinned (page-locked) host memory::

    send      compute stream ── event ──> copy stream: tensor ──> slot ── event ──> worker: commit
    receive   slot ──> copy stream: tensor ── event ──> compute stream waits for it
                                               └─────> worker: return the slot

Each direction has its own stream, so copies overlap with computation. Each direction also has a
worker thread that waits for the events of this stream without holding the GIL, so that the executor
never waits.

Slots in shared memory are pinned when the channel is opened, so that the GPU can directly copy to
and from them. Copies of messages over a network go through buffers of the GPU driver instead. The
same happens if pinning fails, for example because of a limit on locked memory. Such copies are
slower, and block the calling thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from megatron.adaptive.accelerator import lock_pages, make_current
from megatron.adaptive.transport.interface import KIND_CODE, Label, code_of, settled
from megatron.adaptive.transport.worker import Worker

_DLPACK_HOST, _DLPACK_CUDA = (1, 0), 2


class Staging:
    """Copies tensors between a GPU and the channels of a native transport.

    Args:
        node: ``_C.Node`` that owns the channels. The executor's thread and a worker thread of this
            object use the channels, but never at the same time.
        device: GPU to and from which tensors are copied.
        peers: Global ranks to which this rank has a channel.
        send_from_host: Function that sends a host tensor. If the tensor is not in a slot yet, the
            function first copies it into one.
    """

    def __init__(
        self,
        node: Any,
        device: torch.device,
        peers: Iterable[int],
        send_from_host: Callable[[int, Label, torch.Tensor], None],
    ) -> None:
        self._node = node
        self._send_from_host = send_from_host
        # DLPack identifies a device by its type and index.
        self._dlpack_device = _DLPACK_HOST
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._dlpack_device = _DLPACK_CUDA, index
            device = torch.device("cuda", index)
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        self._pinned: list[int] = []
        # ``_pinned_out`` contains the peers to which messages are sent from pinned slots.
        self._pinned_out: set[int] = set()
        # ``_slot_bytes`` maps each peer whose channel directly connects two GPUs to its slot size.
        self._slot_bytes: dict[int, int] = {}
        # This lock guards the channels of the node, which both the executor's thread and a worker
        # use.
        self._lock = threading.Lock()
        for peer in peers:
            info = node.info(peer)
            if info.get("gpu_path") == "cuda-ipc":
                self._slot_bytes[peer] = info["slot_bytes"]
            else:
                self._pin(peer, info)
        self._committing = Worker("device-to-host", self._failed, self._on_device)
        self._releasing = Worker("host-to-device", self._failed, self._on_device)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialized tensor of ``shape`` and ``dtype`` on the device."""
        return torch.empty(shape, dtype=dtype, device=self._device)

    def send(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        """Starts to copy ``tensor`` to the host. A worker then sends the copy to ``peer``.

        ``label`` becomes the label of the message.
        """
        payload = settled(tensor.detach())
        code, variant = code_of(payload.dtype, payload.dim())
        if peer in self._slot_bytes:
            self._send_between_gpus(peer, label, payload)
            return
        host = None
        if peer in self._pinned_out:
            with self._lock:
                host = self._node.reserve_tensor(peer, code, tuple(payload.shape))
        if host is None:
            # No pinned slot is both free and large enough. A copy into unpinned memory would block
            # this thread until the computation has finished. Therefore, copy the payload into other
            # pinned memory, from which the worker copies it into a slot.
            host = torch.empty(payload.shape, dtype=payload.dtype, pin_memory=True)
        elif variant:
            host = host.view(payload.dtype)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        done = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._out):
            host.copy_(payload, non_blocking=True)
            done.record()
        # Prevent the allocator from reusing the payload's memory before the copy has finished.
        payload.record_stream(self._out)

        def commit() -> None:
            done.synchronize()
            with self._lock:
                self._send_from_host(peer, label, host)

        self._committing.do(commit)

    def _send_between_gpus(self, peer: int, label: Label, payload: torch.Tensor) -> None:
        """Sends ``payload`` with ``label`` to ``peer`` through the extension.

        If ``payload`` does not fit into a slot, it is first copied to the host.
        """
        stream = torch.cuda.current_stream(self._device)
        is_direct = 0 < payload.nbytes <= self._slot_bytes[peer]
        if not is_direct:
            host = torch.empty(payload.shape, dtype=payload.dtype, pin_memory=True)
            self._out.wait_stream(stream)
            with torch.cuda.stream(self._out):
                host.copy_(payload, non_blocking=True)
            payload.record_stream(self._out)
            payload = host
            stream = self._out
        action = label.action
        tag = label.step, KIND_CODE[action.kind], action.chunk, action.microbatch
        with self._lock:
            self._node.send_after(
                peer,
                *tag,
                *code_of(payload.dtype, payload.dim()),
                tuple(payload.shape),
                payload.data_ptr(),
                payload.nbytes,
                is_direct,
                stream.cuda_stream,
                payload.untyped_storage(),
            )

    def lend(self, native: Any) -> Any:
        """Returns the payload of the message ``native`` in GPU memory, as a tensor in its slot.

        The tensor may be used only in the current stream. After its release, the slot returns to
        the sender as soon as this stream has finished all work submitted before the release.
        """
        stream = torch.cuda.current_stream(self._device)
        return native.tensor_on(stream.cuda_stream, *self._dlpack_device)

    def copy_out(self, take: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Starts to copy a payload in GPU memory out of its slot.

        Args:
            take: Function that returns the payload in its slot.

        Returns:
            Function that returns the copy. It makes the caller's current stream wait until the copy
            is complete.
        """
        done = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._in):
            copy = take().clone()
            done.record()

        def reach() -> torch.Tensor:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(done)
            copy.record_stream(current)
            return copy

        return reach

    def receive(self, host: torch.Tensor) -> torch.Tensor:
        """Copies the payload ``host`` from the host to the device, and returns the copy.

        The current stream waits for the copy. The slot of ``host`` is released after the copy has
        finished.
        """
        done = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._in):
            # Allocate the tensor in the copy stream, so that the copy does not wait for
            # computations.
            tensor = torch.empty(host.shape, dtype=host.dtype, device=self._device)
            tensor.copy_(host, non_blocking=True)
            done.record()
        current = torch.cuda.current_stream(self._device)
        current.wait_event(done)
        tensor.record_stream(current)

        def release(host: torch.Tensor = host) -> None:
            # The default value of the argument keeps a reference to the slot until the copy has
            # finished.
            done.synchronize()

        self._releasing.do(release)
        return tensor

    def make_current(self) -> None:
        """Makes the GPU the current device of the calling thread."""
        make_current(self._device)

    def flush(self, timeout_s: float) -> bool:
        """Waits until all copies have been sent. Returns False if ``timeout_s`` passes first."""
        end_s = time.monotonic() + timeout_s
        return self._committing.flush(end_s) and self._releasing.flush(end_s)

    def close(self) -> None:
        """Stops the threads and unpins the slots. No message may be in flight."""
        self._committing.close()
        self._releasing.close()
        runtime = torch.cuda.cudart()
        for address in self._pinned:
            runtime.cudaHostUnregister(address)
        self._pinned.clear()

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """Makes the GPU the current device of a worker thread, before the thread runs its jobs."""
        self.make_current()
        yield

    def _pin(self, peer: int, info: Mapping[str, Any]) -> None:
        """Pins the slots of the channel to ``peer``, if ``info`` contains their addresses."""
        with torch.cuda.device(self._device):
            for direction in ("send", "receive"):
                address = info.get(f"{direction}_address")
                if not address or not lock_pages(address, info[f"{direction}_bytes"], self._device):
                    continue
                self._pinned.append(address)
                if direction == "send":
                    self._pinned_out.add(peer)

    def _failed(self, error: Exception) -> None:
        self._node.put(error)
