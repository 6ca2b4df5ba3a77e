"""Measures links between two pinned processes, in alternation with memory copies.

The first process sends and measures. ``run_rank`` runs in a process with torch, for gloo and this
project's transports. Run as a script by ``mpiexec``, this module acts as a process of an MPI
library.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.link_times import Link, half_round_trip_s, stream_s

from .copies import Copies
from .links import open_gloo, open_mpi

POOL_BYTES = 128 << 20
"""Total number of bytes of all payloads of the same size, which is more than fits in the caches."""
PING_BYTES = 1 << 10
ROUNDS, WARMUPS = 2000, 20
_TOKEN_BYTES = 8
_CHANNEL_BYTES = 256 << 20
_LEAST_MESSAGES = 16
"""Minimum number of messages in a stream, so that its start and end hardly affect the result."""
COPIES = ("plain", "streaming")


class Process:
    """One of the two processes that measure the links.

    Args:
        rank: Index of the process. Process 0 sends.
        make_buffer: Function that allocates a payload with the given number of bytes.
        address: Function that returns the address of a payload.
        plan: Settings of the run: sizes, repetitions, CPUs, and the path of the compiled copy
            functions.
    """

    def __init__(
        self,
        rank: int,
        make_buffer: Callable[[int], Any],
        address: Callable[[Any], int],
        plan: dict[str, Any],
    ) -> None:
        self._rank = rank
        self._make_buffer = make_buffer
        self._address = address
        self._plan = plan
        self._copies = Copies(plan["copies"])
        self._token = make_buffer(_TOKEN_BYTES)
        self.samples: dict[str, list[float]] = defaultdict(list)

    def measure(self, open_links: Callable[[int], dict[str, Link]]) -> dict[str, list[float]]:
        """Measures all sizes, and returns seconds per message, keyed by link and size.

        Args:
            open_links: Function that takes the size of messages, and returns the opened links,
                keyed by name.
        """
        sends = not self._rank
        for nbytes in self._plan["sizes"]:
            links = open_links(nbytes)
            count = max(2, POOL_BYTES // nbytes)
            sources = [self._make_buffer(nbytes) for _ in range(count)]
            targets = [self._make_buffer(nbytes) for _ in range(count if sends else 0)]
            messages = max(_LEAST_MESSAGES, count)
            for repetition in range(-1, self._plan["repetitions"]):
                for name, link in links.items():
                    seconds = stream_s(link, sources, messages, token=self._token, sends=sends)
                    self._keep(f"{name} {nbytes}", repetition, seconds)
                for kind in COPIES if sends else ():
                    seconds = self._copy(kind, targets, sources)
                    self._keep(f"memcpy {kind} {nbytes}", repetition, seconds)
            self._close(links)
        links = open_links(PING_BYTES)
        payload = self._make_buffer(PING_BYTES)
        for repetition in range(-1, self._plan["repetitions"]):
            for name, link in links.items():
                rounds = ROUNDS if name in ("shm", "mpi", "ucx") else ROUNDS // 10
                seconds = half_round_trip_s(
                    link, payload, rounds=rounds, warmups=WARMUPS, sends=sends
                )
                self._keep(f"{name} ping", repetition, seconds)
        self._close(links)
        return self.samples

    def _keep(self, name: str, repetition: int, seconds: float | None) -> None:
        # The first repetition is a warm-up, which touches memory and opens connections, so ignore
        # it.
        if repetition >= 0 and seconds is not None:
            self.samples[name].append(seconds)

    @staticmethod
    def _close(links: dict[str, Link]) -> None:
        for link in links.values():
            link.close()

    def _copy(self, kind: str, targets: Sequence[Any], sources: Sequence[Any]) -> float:
        """Returns the mean duration in seconds of a copy of uncached memory within this process.

        Each element of ``sources`` is copied to the same element of ``targets``. ``kind`` is
        ``plain`` or ``streaming``, the name of a method of :class:`Copies`.
        """
        function, nbytes = getattr(self._copies, kind), sources[0].nbytes
        addresses = [
            (self._address(target), self._address(source))
            for target, source in zip(targets, sources, strict=True)
        ]
        start_s = time.perf_counter()
        for target, source in addresses:
            function(target, source, nbytes)
        return (time.perf_counter() - start_s) / len(addresses)


def run_rank(rank: int, plan: dict[str, Any]) -> dict[str, list[float]]:
    """Runs process ``rank`` with torch, and returns the measured seconds, keyed by name.

    ``plan`` contains the settings of the run (see :class:`Process`).
    """
    import torch

    from harness.transport_link import TransportLink

    os.sched_setaffinity(0, {plan["cpus"][rank]})

    def make_buffer(nbytes: int) -> torch.Tensor:
        return torch.ones(nbytes, dtype=torch.uint8)

    def open_links(nbytes: int) -> dict[str, Link]:
        # Each slot can contain a whole message.
        slots = max(2, min(8, _CHANNEL_BYTES // nbytes))
        links: dict[str, Link] = {
            name: TransportLink(name, rank, slot_bytes=max(4096, nbytes), slots=slots)
            for name in ("shm", "tcp")
        }
        return {**links, "gloo": open_gloo(1 - rank, make_buffer)}

    process = Process(rank, make_buffer, torch.Tensor.data_ptr, plan)
    return process.measure(open_links)


def main() -> None:
    """Runs one process of an MPI library. Process 0 writes the samples to a file."""
    import numpy
    from mpi4py import MPI

    name, plan, output = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    rank = MPI.COMM_WORLD.Get_rank()
    os.sched_setaffinity(0, {plan["cpus"][rank]})

    def make_buffer(nbytes: int) -> Any:
        return numpy.ones(nbytes, dtype=numpy.uint8)

    process = Process(rank, make_buffer, lambda payload: payload.ctypes.data, plan)
    samples = process.measure(lambda nbytes: {name: open_mpi(1 - rank, make_buffer)})
    if rank == 0:
        output.write_text(json.dumps(samples), encoding="utf-8")


if __name__ == "__main__":
    main()
