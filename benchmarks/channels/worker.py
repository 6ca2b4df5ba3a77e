"""One process of a pair: does what ``transport.py`` says through a unix socket, until it closes.

``--family torch``: torch tensors, gloo and the transports of this project. ``--family mpi``: numpy
arrays and the MPI library that ``mpiexec`` started this with.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from .connectors import Connector
from .copies import Copies, NoCompilerError

_FEWEST = 2


@dataclass(frozen=True)
class Family:
    """Makes and checks the payloads of a process.

    Attributes:
        buffer: makes a touched payload of so many bytes.
        address: where a payload lies.
        connector: opens a connector by name and options; collective.
        close: leaves the other process; collective.
    """

    buffer: Callable[[int], Any]
    address: Callable[[Any], int]
    connector: Callable[[str, dict[str, Any]], Connector]
    close: Callable[[], object] = lambda: None


def torch_family(rank: int, meet: str) -> Family:
    """Torch tensors, over gloo or a transport of ours.

    Args:
        rank: in the group of processes.
        meet: how torch's ranks find each other.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)

    def buffer(nbytes: int) -> Any:
        return torch.ones(nbytes, dtype=torch.uint8)

    def connector(name: str, options: dict[str, Any]) -> Connector:
        if name == "gloo":
            from .connectors import open_gloo

            return open_gloo(rank, buffer)
        from .ours import TransportConnector, open_transport

        return TransportConnector(rank, open_transport(name, rank, options))

    return Family(buffer, torch.Tensor.data_ptr, connector, dist.destroy_process_group)


def mpi_family(rank: int) -> Family:
    """Numpy arrays; MPI ends with the process."""
    import numpy

    from .connectors import Mpi

    def buffer(nbytes: int) -> Any:
        return numpy.ones(nbytes, dtype=numpy.uint8)

    return Family(buffer, lambda payload: payload.ctypes.data, lambda *_: Mpi(rank, buffer))


class Member:
    """This process, for a pattern.

    Args:
        rank: 0, which sends where only one does, or 1.
        family: what its payloads are.
        copies: the compiled helpers, where there are any.
        pool_bytes: least size of a pool of cold memory.
    """

    def __init__(self, rank: int, family: Family, copies: Copies | None, pool_bytes: int) -> None:
        self.rank = rank
        self.address = family.address
        self._copies = copies
        self._family = family
        self._pool_bytes = pool_bytes
        self._pools: dict[tuple[str, int], list[Any]] = {}
        self._connectors: dict[str, tuple[Any, Connector]] = {}

    @property
    def copies(self) -> Copies:
        """The compiled helpers."""
        if self._copies is None:
            raise NoCompilerError("this pattern needs copies.c")
        return self._copies

    def pool(self, use: str, nbytes: int, count: int | None = None) -> list[Any]:
        """Touched payloads of ``nbytes``, ``pool_bytes`` together unless ``count`` is given."""
        key = use, nbytes
        if key not in self._pools:
            # Of one size at a time: memory.
            self._pools = {old: pool for old, pool in self._pools.items() if old[0] != use}
            number = count or max(_FEWEST, self._pool_bytes // max(1, nbytes))
            self._pools[key] = [self._family.buffer(nbytes) for _ in range(number)]
        return self._pools[key]

    def connector(self, kind: str, options: dict[str, Any], name: str | None = None) -> Connector:
        """The connector of that kind with these options; both processes ask at the same time.

        Args:
            kind: what ``connectors.py`` or ``ours.py`` calls it.
            options: where they are others than last time, it is opened anew.
            name: by which it is kept, so that there can be several of a kind.
        """
        name = name or kind
        known = self._connectors.get(name)
        if known is not None and known[0] == options:
            return known[1]
        if known is not None:
            known[1].close()
            del self._connectors[name]
        made = self._family.connector(kind, options)
        self._connectors[name] = options, made
        return made

    def forget(self) -> None:
        """Close all connectors, in the order in which they were opened, and drop all pools."""
        for _, connector in self._connectors.values():
            connector.close()
        self._connectors.clear()
        self._pools.clear()

    def close(self) -> None:
        """End everything; both processes do so."""
        self.forget()
        self._family.close()


def serve(connection: Any, member: Member) -> None:
    """Run commands until told to stop: ``(module, function, arguments)``."""
    while (command := connection.recv()) is not None:
        module, function, arguments = command
        try:
            found = getattr(importlib.import_module(f"benchmarks.channels.{module}"), function)
            connection.send((True, found(member, **arguments)))
        except Exception:
            connection.send((False, traceback.format_exc()))
    member.close()
    connection.send((True, None))


def main() -> int:
    """Be one process of a pair."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", required=True, help="unix socket of transport.py")
    parser.add_argument("--family", choices=("torch", "mpi"), required=True)
    parser.add_argument("--rank", type=int, help="default: what mpiexec says")
    parser.add_argument("--cpus", type=int, nargs=2, required=True, help="processor of each rank")
    parser.add_argument("--copies", type=Path, help="compiled copies.c")
    parser.add_argument("--pool-bytes", type=int, required=True, help="cold memory")
    options = parser.parse_args()
    rank = options.rank
    if rank is None:
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
    os.sched_setaffinity(0, {options.cpus[rank]})
    with Client(options.address, family="AF_UNIX") as connection:
        started = time.monotonic()
        try:
            if options.family == "torch":
                family = torch_family(rank, f"file://{options.address}.store")
            else:
                family = mpi_family(rank)
            copies = None if options.copies is None else Copies(options.copies)
            member = Member(rank, family, copies, options.pool_bytes)
        except Exception:
            connection.send((rank, os.getpid(), traceback.format_exc()))
            return 1
        connection.send((rank, os.getpid(), None))
        try:
            serve(connection, member)
        except (EOFError, ConnectionError):
            print(f"rank {rank} after {time.monotonic() - started:.0f} s: left", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
