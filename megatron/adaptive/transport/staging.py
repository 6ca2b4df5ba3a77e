"""GPU tensors through a channel, without a synchronization.

Where a channel goes from one GPU's memory to the other's (``cuda-ipc``, see ``docs/cuda_ipc.md``),
the extension copies, waits and gives slots back, and this only says which stream computes. Else
tensors go through the pinned memory of the host::

    send      compute stream ── event ──> copy stream: tensor ──> slot ── event ──> worker: commit
    receive   slot ──> copy stream: tensor ── event ──> compute stream waits for it
                                               └─────> worker: give the slot back

A private stream in each direction lets copies overlap with computation. A worker thread per
direction waits for their events, asleep and without the GIL, so that the executor never does.

Slots of shared memory are pinned when the channel is there: the driver can then copy to and from
them by itself. Where that is refused (a limit on locked memory) and over networks copies still
work, through the driver's own buffers, at its speed and with its waits.
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
    """The GPU's part of a native transport.

    Args:
        node: the ``_C.Node``. Its channels are used by the executor's thread and by a worker here,
            one at a time.
        device: the GPU.
        peers: ranks with a channel.
        send_from_host: sends a tensor of the host, its slot as it is.
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
        self._place = _DLPACK_HOST  # as DLPack names the device
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._place = _DLPACK_CUDA, index
            device = torch.device("cuda", index)
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        self._pinned: list[int] = []
        self._pinned_out: set[int] = set()  # peers to which this rank sends from pinned slots
        self._slot_bytes: dict[int, int] = {}  # of peers whose channel goes between GPUs
        self._lock = threading.Lock()  # of the node's channels
        for peer in peers:
            info = node.info(peer)
            if info.get("gpu_path") == "cuda-ipc":
                self._slot_bytes[peer] = info["slot_bytes"]
            else:
                self._pin(peer, info)
        self._committing = Worker("device-to-host", self._failed, self._on_device)
        self._releasing = Worker("host-to-device", self._failed, self._on_device)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialized memory of the device, to compute a payload into."""
        return torch.empty(shape, dtype=dtype, device=self._device)

    def send(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        """Start the copy of a tensor; it leaves for ``peer`` when it is there."""
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
            # Slots are not pinned, or none is free, or the payload is larger than one. A copy to
            # memory that is not pinned would hold up this thread until the computation is done;
            # from here the worker copies it into a slot.
            host = torch.empty(payload.shape, dtype=payload.dtype, pin_memory=True)
        elif variant:
            host = host.view(payload.dtype)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        done = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._out):
            host.copy_(payload, non_blocking=True)
            done.record()
        payload.record_stream(self._out)  # its memory is not given to another before the copy

        def go() -> None:
            done.synchronize()
            with self._lock:
                self._send_from_host(peer, label, host)

        self._committing.do(go)

    def _send_between_gpus(self, peer: int, label: Label, payload: torch.Tensor) -> None:
        """Hand a tensor to the extension; what no slot holds goes through the host, in its turn."""
        stream = torch.cuda.current_stream(self._device)
        is_direct = 0 < payload.nbytes <= self._slot_bytes[peer]
        if not is_direct:
            host = torch.empty(payload.shape, dtype=payload.dtype, pin_memory=True)
            self._out.wait_stream(stream)
            with torch.cuda.stream(self._out):
                host.copy_(payload, non_blocking=True)
            payload.record_stream(self._out)
            payload, stream = host, self._out
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
        """Return a payload that is on the device as a tensor, for the current stream.

        Its slot goes back when this stream is past what it has to do when the tensor is dropped.
        """
        stream = torch.cuda.current_stream(self._device)
        return native.tensor_on(stream.cuda_stream, *self._place)

    def copy_out(self, take: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Copy what ``take`` gives, a payload on the device, to memory of its own.

        Returns:
            What returns the copy, which the stream that is current then waits for.
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
        """Return a payload on the device.

        The current stream waits for it; ``host``, a slot, is let go of when it is copied.
        """
        done = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._in):
            # Memory of this stream: nothing computed before has to end first.
            tensor = torch.empty(host.shape, dtype=host.dtype, device=self._device)
            tensor.copy_(host, non_blocking=True)
            done.record()
        current = torch.cuda.current_stream(self._device)
        current.wait_event(done)
        tensor.record_stream(current)

        def release(host: torch.Tensor = host) -> None:  # holds the slot until it ends
            done.synchronize()

        self._releasing.do(release)
        return tensor

    def make_current(self) -> None:
        """Makes the GPU current in the calling thread."""
        make_current(self._device)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all copies are done and handed on; false when the time passed."""
        end_s = time.monotonic() + timeout_s
        return self._committing.flush(end_s) and self._releasing.flush(end_s)

    def close(self) -> None:
        """Stop the threads and unpin the slots; nothing may be under way."""
        self._committing.close()
        self._releasing.close()
        runtime = torch.cuda.cudart()
        for address in self._pinned:
            runtime.cudaHostUnregister(address)
        self._pinned.clear()

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """Returns the context of a worker's thread."""
        self.make_current()
        yield

    def _pin(self, peer: int, info: Mapping[str, Any]) -> None:
        """Locks the pages of a channel's slots, if it says where they are."""
        with torch.cuda.device(self._device):
            for way in ("send", "receive"):
                address = info.get(f"{way}_address")
                if not address or not lock_pages(address, info[f"{way}_bytes"], self._device):
                    continue
                self._pinned.append(address)
                if way == "send":
                    self._pinned_out.add(peer)

    def _failed(self, error: Exception) -> None:
        self._node.put(error)
