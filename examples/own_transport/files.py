"""Defines a custom transport that sends each tensor as a file. All ranks must see the same folder.

    PYTHONPATH=examples/own_transport torchrun --nproc-per-node 2 pretrain_gpt.py \\
        --pipeline-model-parallel-size 2 --transport files:Files ...

The transport is slow, but it shows everything that a transport must do.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from megatron.adaptive.transport.interface import (
    CompletionQueue,
    Endpoint,
    Header,
    HeldArrival,
    Label,
    Transport,
    settled,
)
from megatron.adaptive.transport.kind import Opening, TransportKind

POLL_S = 0.001


class Files(TransportKind):
    """Describes the transport. It connects ranks of one machine, which see the same folder."""

    def why_not(self, first: Endpoint, second: Endpoint) -> str | None:
        if first.machine != second.machine:
            return f"{first.host} and {second.host} do not share their folder for temporary files"
        return None

    def open(self, opening: Opening) -> Transport | None:
        folder = Path(opening.gather(tempfile.mkdtemp() if opening.rank == 0 else "")[0])
        return FileTransport(folder, opening) if opening.peers else None


class FileTransport:
    """Sends and receives messages. Implements all members of ``transport.interface.Transport``."""

    name = "files"

    def __init__(self, folder: Path, opening: Opening) -> None:
        self.completions = opening.completions or CompletionQueue()
        self._folder = folder
        self._rank = opening.rank
        self._device = opening.accelerator.device
        self._sent = dict.fromkeys(opening.peers, 0)
        self._received = dict.fromkeys(opening.peers, 0)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def send(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        number = self._sent[peer]
        payload = settled(tensor.detach()).cpu()
        header = Header(label, tuple(payload.shape), payload.dtype, number).words()
        self._sent[peer] += 1
        path = self._folder / f"{self._rank}-{peer}-{number}"
        torch.save({"header": header, "payload": payload}, f"{path}.part")
        # Write to a temporary name and rename the complete file. The receiver must not read an
        # incomplete file.
        os.replace(f"{path}.part", path)

    def reserve(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def describe_links(self) -> dict[int, dict[str, Any]]:
        return {peer: {"kind": self.name} for peer in self._sent}

    def flush(self, timeout_s: float) -> None:
        pass  # The message was already written to its file by ``send()``.

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()
        # This succeeds only for the last rank that closes its transport, because the folder must be
        # empty.
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _receive(self) -> None:
        try:
            while not self._is_closed.wait(POLL_S):
                for peer in self._received:
                    self._take_next(peer)
        except Exception as error:  # Pass every error to the executor, which raises the error.
            self.completions.put(error)

    def _take_next(self, peer: int) -> None:
        path = self._folder / f"{peer}-{self._rank}-{self._received[peer]}"
        if not path.exists():
            return
        self._received[peer] += 1
        message = torch.load(path, weights_only=True)
        path.unlink()
        label = Header.decode(message["header"], peer=peer).label
        # Some transports announce the end with a message without a label. This transport does not.
        assert label is not None
        payload = message["payload"].to(self._device)
        now_ns = time.monotonic_ns()
        self.completions.put(HeldArrival(label, peer, payload.nbytes, lambda: payload, now_ns))
