"""Kills one of three ranks at random times. Checks the other ranks, and that nothing is left.

::

    rank 0 ── rank 1 ── rank 2      all send, reserve, wait, hold and release at random;
                                    one is killed

    python -m tests.soak.killed_ranks [--quick] [--part shm tcp] [--count 100] [--json FILE]

The trials run in a separate process, which imports everything once and forks the ranks. If the rank
in the middle is killed, there are two neighbours. If a rank at an end is killed, there is one
neighbour, and the third rank exits normally.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

from harness.processes import run_module
from harness.report import Result, Row, one_line, parser_of
from harness.report import measure as run_parts
from megatron.adaptive import extension
from megatron.adaptive.errors import PeerLostError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.transport.interface import Label
from megatron.adaptive.transport.native import NativeTransport

RANKS = 3
SLOT_BYTES, SLOTS = 256 << 10, 6
SIZES = (0, 100, 1 << 10, 64 << 10, 256 << 10, 1 << 20)
START_S, SURVIVE_S, END_S = 30.0, 20.0, 10.0
MOST_S = 5.0
"""Time in seconds within which a neighbour must detect that a rank was killed."""
# Latest time of a kill. By then, a rank has sent about a hundred messages, which takes longer over
# RDMA.
_LATEST_KILL_S = {"shm": 0.06, "tcp": 0.06, "rdma": 0.5}
KINDS = tuple(_LATEST_KILL_S)
_PRIVATE = (
    *("unshare", "--mount", "--net", "sh", "-ec"),
    'mount -t tmpfs shm /dev/shm; ip link set lo up; exec "$0" "$@"',
)
"""Command prefix that starts a program with private shared memory and private abstract sockets."""
_FORWARD = Label(0, Action(ActionKind.F, 0, 0))


def neighbours(rank: int) -> list[int]:
    """Returns the ranks that have a channel to ``rank``."""
    return [peer for peer in (rank - 1, rank + 1) if 0 <= peer < RANKS]


def be_rank(rank: int, kind: str, connection: Connection, seed: int) -> None:
    """Runs rank ``rank``, which reports its addresses, state and error over ``connection``.

    The rank opens channels of the transport ``kind``. ``seed`` selects its random actions.
    """
    node = extension.require("the benchmark").Node(rank, bytes(16), seed, RANKS)
    connection.send(node.listen("unix") if kind == "shm" else node.listen("tcp", "127.0.0.1"))
    addresses = connection.recv()
    for peer in neighbours(rank):
        node.open(kind, peer, addresses[peer], START_S, slot_bytes=SLOT_BYTES, slots=SLOTS)
    transport = NativeTransport(
        node, dict.fromkeys(neighbours(rank), kind), device=torch.device("cpu")
    )
    connection.send("open")
    try:
        live(transport, rank, random.Random(seed * RANKS + rank), connection)
        connection.send(("told to end", time.monotonic(), ""))
    except PeerLostError as error:
        connection.send(("PeerLostError", time.monotonic(), str(error)))
    except Exception as error:
        connection.send((type(error).__name__, time.monotonic(), str(error)))
    try:
        transport.close()
    except Exception as error:
        print(f"rank {rank}: close: {type(error).__name__}: {error}", file=sys.stderr)
    connection.send("closed")


def live(
    transport: NativeTransport, rank: int, draw: random.Random, connection: Connection
) -> None:
    """Exchanges random messages over ``transport`` until ``connection`` delivers a stop command.

    ``draw`` selects the messages that ``rank`` sends to its neighbours.
    """
    payloads = [torch.ones(size, dtype=torch.uint8) for size in SIZES]
    held: list[torch.Tensor] = []
    turn = 0
    while True:
        turn += 1
        if turn % 16 == 0 and connection.poll():
            return
        peer = draw.choice(neighbours(rank))
        choice = draw.random()
        if choice < 0.4:
            transport.send(peer, _FORWARD, draw.choice(payloads))
        elif choice < 0.5:
            transport.send(peer, _FORWARD, transport.reserve(peer, (SLOT_BYTES,), torch.uint8))
        item: Any = transport.completions.wait(time.monotonic() + draw.choice((0.0, 0.002)))
        if item is not None:
            held.append(item.take())
        while len(held) > SLOTS // 2:
            held.pop(draw.randrange(len(held)))


class Trial:
    """Kills one of three ranks, and observes the other ranks.

    Args:
        kind: Name of the transport.
        seed: Seed of all random numbers.
    """

    def __init__(self, kind: str, seed: int) -> None:
        self._draw = random.Random(seed)
        self._latest_kill_s = _LATEST_KILL_S[kind]
        context = multiprocessing.get_context("fork")
        self._ends: list[Connection] = []
        self._ranks = []
        for rank in range(RANKS):
            parent_end, child_end = context.Pipe()
            process = context.Process(
                target=be_rank, args=(rank, kind, child_end, seed), daemon=True
            )
            process.start()
            child_end.close()
            self._ends.append(parent_end)
            self._ranks.append(process)

    def run(self) -> dict[str, Any]:
        """Kills a rank, and returns how its neighbours reacted and which processes are left."""
        addresses = [self._expect(rank, START_S) for rank in range(RANKS)]
        for end in self._ends:
            end.send(addresses)
        for rank in range(RANKS):
            assert self._expect(rank, START_S) == "open"
        victim = self._draw.randrange(RANKS)
        time.sleep(self._draw.uniform(0.0, self._latest_kill_s))
        killed_at = time.monotonic()
        pid = self._ranks[victim].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        outcomes = {}
        survivors = [rank for rank in range(RANKS) if rank != victim]
        for rank in neighbours(victim):
            name, raised_at, text = self._expect(rank, SURVIVE_S)
            outcomes[rank] = {"raised": name, "seconds": raised_at - killed_at, "text": text}
        for rank in survivors:
            if rank not in outcomes:
                self._say_stop(rank)
                outcomes[rank] = {"raised": self._expect(rank, SURVIVE_S)[0], "seconds": None}
        for rank in survivors:
            assert self._expect(rank, END_S) == "closed"
            self._ranks[rank].join(END_S)
        return {"victim": victim, "outcomes": outcomes, "left": self._left()}

    def end(self) -> None:
        """Kills all ranks that are still running."""
        for process in self._ranks:
            process.kill()
            process.join()
        for end in self._ends:
            end.close()

    def _say_stop(self, rank: int) -> None:
        # The rank may already have detected the failure and exited.
        with contextlib.suppress(OSError):
            self._ends[rank].send("stop")

    def _expect(self, rank: int, limit_s: float) -> Any:
        if not self._ends[rank].poll(limit_s):
            raise TimeoutError(f"rank {rank} sent nothing within {limit_s:g} s")
        return self._ends[rank].recv()

    def _left(self) -> list[str]:
        """Returns descriptions of the processes that did not exit."""
        return [f"process {rank.pid}" for rank in self._ranks if rank.is_alive()]


def litter() -> set[str]:
    """Returns the names of objects that a killed rank could leave behind.

    These are shared memory, sockets, temporary files, child processes and RDMA objects.
    """
    names = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    names |= {str(path) for path in Path(tempfile.gettempdir()).iterdir()}
    sockets = Path("/proc/net/unix").read_text(encoding="utf-8").split()
    names |= {name for name in sockets if name.startswith("@megatron-adaptive-")}
    names |= {f"process {child.pid}" for child in psutil.Process().children()}
    names |= {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _open(fd)}
    return names | rdma_objects()


def rdma_objects() -> set[str]:
    """Returns the IDs of queue pairs, memory regions and other objects of each RDMA device."""
    if not Path("/sys/class/infiniband").exists() or shutil.which("rdma") is None:
        return set()
    done = subprocess.run(["rdma", "resource", "show"], capture_output=True, text=True, check=False)
    return {f"RDMA device {line}" for line in done.stdout.splitlines()}


def _open(fd: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")
    except OSError:
        return False


def private() -> tuple[str, ...]:
    """Returns a command prefix that gives a program private shared memory and sockets.

    Returns ``()`` if the system does not permit this.
    """
    try:
        done = subprocess.run([*_PRIVATE, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        return ()
    return () if done.returncode else _PRIVATE


def measure(count: int, kind: str) -> Result:
    """Kills ranks that communicate over the transport ``kind``, and returns rows of a table.

    The trials run in a separate process.

    If permitted, this process gets private shared memory and sockets, because :func:`litter` would
    otherwise include the objects of all programs.

    Args:
        count: Number of kills.
        kind: Name of the transport.
    """
    arguments = ("--raw", kind, "--count", count)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_module(
            "tests.soak.killed_ranks",
            *arguments,
            limit_s=120.0 + 60.0 * count,
            prefix=private(),
            TMPDIR=folder,
        )
    title = f"{count} kills at random times, {kind}"
    return Result(rows=rows_of(outcomes, title), facts={f"kills, {kind}": outcomes})


def rows_of(result: dict[str, Any], title: str) -> list[Row]:
    """Returns rows titled ``title`` about the trials in ``result``, which :func:`main` printed."""
    trials = result["trials"]
    failed = [trial["failed"] for trial in trials if "failed" in trial]
    whole = [trial for trial in trials if "failed" not in trial]
    neighbours = [
        outcome
        for trial in whole
        for outcome in trial["outcomes"].values()
        if outcome["seconds"] is not None
    ]
    strange = [neighbour for neighbour in neighbours if neighbour["raised"] != "PeerLostError"]
    left = result["litter"] + [name for trial in whole for name in trial["left"]]
    seconds = [neighbour["seconds"] for neighbour in neighbours]
    notes = [
        *failed[:1],
        *(f"{neighbour['raised']}: {neighbour['text']}" for neighbour in strange[:1]),
    ]
    return [
        Row(
            what=f"{title}: neighbours without PeerLostError",
            value=len(failed) + len(strange),
            goal=0,
            note=one_line("; ".join(notes)) if notes else f"of {len(neighbours)}",
        ),
        Row(
            what="the same: longest time until PeerLostError",
            value=max(seconds, default=None),
            unit="s",
            goal=MOST_S,
            note=f"median {statistics.median(seconds):.3g} s" if seconds else "",
        ),
        Row(
            what="the same: segments, files, sockets and processes left",
            value=len(left),
            goal=0,
            note=one_line(", ".join(left)),
        ),
    ]


def main() -> int:
    """Runs the trials, and prints a table or the outcomes as JSON."""
    parser = parser_of(__doc__, KINDS, "kill 20 ranks over each transport")
    parser.add_argument("--count", type=int, help="number of kills (100; 20 with --quick)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random times (1)")
    parser.add_argument(
        "--raw",
        choices=KINDS,
        help="run the trials in this process, and print the outcomes as JSON",
    )
    options = parser.parse_args()
    count = options.count or (20 if options.quick else 100)
    if options.raw is None:
        return run_parts({kind: partial(measure, count, kind) for kind in ("shm", "tcp")}, options)
    torch.set_num_threads(1)
    before = litter()
    trials = []
    for index in range(count):
        trial = Trial(options.raw, options.seed + index)
        try:
            trials.append(trial.run())
        except (AssertionError, EOFError, OSError, TimeoutError) as error:
            trials.append({"failed": f"{type(error).__name__}: {error}"})
        finally:
            trial.end()
    # Temporary files of other programs disappear after a while, but files left by the trials stay.
    left = litter() - before
    end = time.monotonic() + END_S
    while left and time.monotonic() < end:
        time.sleep(0.2)
        left &= litter()
    print(json.dumps({"trials": trials, "litter": sorted(left)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
