"""What the ranks of the transport tests run; see :class:`Job` in ``conftest.py``.

A program gets a :class:`Rank` and its arguments and returns what the test looks at.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.engine.stop import StopRequest
from megatron.adaptive.errors import PeerLostError, TransportError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.transport.gloo import GlooTransport
from megatron.adaptive.transport.interface import Arrival, CompletionQueue, Label
from megatron.adaptive.transport.liveness import Watcher, here

LIMIT_S = 40.0


class Rank:
    """One rank of a job whose ranks know each other over a gloo group."""

    def __init__(self, folder: Path, rank: int, num_ranks: int) -> None:
        self.folder = folder
        self.rank = rank
        self.num_ranks = num_ranks
        self.store: dist.Store | None = None

    def connect(self, store: dist.Store | None = None) -> None:
        """Join the process group."""
        self.store = store or dist.FileStore(str(self.folder / "store"), self.num_ranks)
        dist.init_process_group(
            "gloo",
            store=self.store,
            rank=self.rank,
            world_size=self.num_ranks,
            timeout=datetime.timedelta(seconds=LIMIT_S),
        )

    def transport(
        self, *peers: int, shape: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32
    ) -> GlooTransport:
        """Open the channels to ``peers`` over a group of their own."""
        if not dist.is_initialized():
            self.connect()
        group = dist.new_group(backend="gloo")
        return GlooTransport(
            group,
            peers=peers,
            device=torch.device("cpu"),
            payload_shape=shape,
            dtype=dtype,
            describe=lambda rank: f"rank {rank} (stage {rank} on host-{rank})",
        )

    def mark(self, name: str) -> None:
        """Tell the test that this rank got here."""
        (self.folder / f"{self.rank}.mark.{name}").touch()

    def await_mark(self, rank: int, name: str) -> None:
        """Wait until another rank, or the test in its place, got there."""
        end = time.monotonic() + LIMIT_S
        while not (self.folder / f"{rank}.mark.{name}").exists():
            assert time.monotonic() < end, f"rank {rank} did not get to {name}"
            time.sleep(0.01)


def label(microbatch: int, kind: ActionKind = ActionKind.F, step: int = 3, chunk: int = 0) -> Label:
    return Label(step, Action(kind, chunk, microbatch))


def wait(transport: GlooTransport, limit_s: float = LIMIT_S) -> Arrival:
    arrival = transport.completions.wait(time.monotonic() + limit_s)
    assert arrival is not None, "nothing arrived"
    return arrival


def error_of(action: Any) -> list[str]:
    """Return class and text of the error that ``action()`` raises."""
    try:
        action()
    except TransportError as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]


def exchange(rank: Rank, shape: list[int]) -> int:
    """Both ranks send and receive the same kinds of messages at the same time."""
    peer = 1 - rank.rank
    transport = rank.transport(peer, shape=tuple(shape), dtype=torch.bfloat16)

    def message(sender: int, number: int) -> tuple[Label, torch.Tensor]:
        kind = (ActionKind.F, ActionKind.B)[(number + sender) % 2]
        generator = torch.Generator().manual_seed(100 * sender + number)
        tensor = torch.randn(shape, generator=generator).to(torch.bfloat16)
        return label(number, kind, chunk=number % 3), tensor

    for number in range(30):
        transport.send(peer, *message(rank.rank, number))
    for number in range(30):
        text, tensor = message(peer, number)
        arrival = wait(transport)
        assert (arrival.label, arrival.peer, arrival.nbytes) == (text, peer, tensor.nbytes)
        torch.testing.assert_close(arrival.take(), tensor, rtol=0, atol=0)
    transport.flush(LIMIT_S)
    transport.close()
    return 30


def pile_up(rank: Rank, shape: list[int]) -> list[int]:
    """Rank 1 takes nothing before rank 0 has sent everything."""
    transport = rank.transport(1 - rank.rank, shape=tuple(shape))
    taken = []
    if rank.rank == 0:
        for microbatch in range(300):
            transport.send(1, label(microbatch), torch.full((64, 64), float(microbatch)))
        transport.flush(LIMIT_S)
        rank.mark("sent")
    else:
        rank.await_mark(0, "sent")
        for _ in range(300):
            arrival = wait(transport)
            assert arrival.take()[0, 0] == arrival.label.action.microbatch
            taken.append(arrival.label.action.microbatch)
    transport.close()
    return taken


def bereaved(rank: Rank, shape: list[int]) -> list[Any]:
    """Rank 0 is killed by the test while rank 1 waits for it."""
    transport = rank.transport(1 - rank.rank, shape=tuple(shape))
    if rank.rank == 0:
        transport.send(1, label(0), torch.ones(4))
        time.sleep(LIMIT_S)
    wait(transport)
    rank.mark("waits")
    waiting = error_of(lambda: wait(transport))

    def keep_sending() -> None:
        for microbatch in range(100):
            transport.send(0, label(microbatch), torch.ones(4))

    return [waiting, error_of(keep_sending), error_of(transport.close), error_of(transport.close)]


def close_cleanly(rank: Rank, shape: list[int]) -> list[Any]:
    """Rank 0 sends and closes; what it sent is still there for rank 1, and nothing is an error."""
    transport = rank.transport(1 - rank.rank, shape=tuple(shape))
    seen: list[Any] = []
    if rank.rank == 0:
        for microbatch in range(3):
            transport.send(1, label(microbatch), torch.full((4,), float(microbatch)))
        rank.mark("sent")
    else:
        rank.await_mark(0, "sent")
    transport.close()
    transport.close()
    while (arrival := transport.completions.poll()) is not None:
        seen.append([arrival.label.action.microbatch, arrival.take().tolist()])
    threads = [thread.name for thread in threading.enumerate() if "receive" in thread.name]
    return [seen, threads]


def refused(rank: Rank) -> list[Any]:
    """Messages that a channel does not carry are refused where they are sent."""
    transport = rank.transport(1 - rank.rank, shape=(2, 3))
    seen: list[Any] = []
    if rank.rank == 0:
        tensors = (torch.ones(3, 2), torch.ones(2, 3, dtype=torch.float16))
        seen = [error_of(lambda t=t: transport.send(1, label(0), t)) for t in tensors]
        transport.send(1, label(5), torch.ones(2, 3))
    else:
        seen = [wait(transport).label.action.microbatch]
    transport.close()
    return seen


def foreign(rank: Rank, words: list[int], shape: list[int] | None) -> list[Any]:
    """Rank 0 sends a header that is none of ours."""
    fixed = None if shape is None else tuple(shape)
    if rank.rank == 1:
        transport = rank.transport(0, shape=fixed)
        seen = error_of(lambda: wait(transport))
        rank.mark("done")
        os._exit(_save(rank, seen))
    rank.connect()
    group = dist.new_group(backend="gloo")
    works = [group.send([torch.tensor(words + [0] * (16 - len(words)))], 1, 0)]
    if fixed is not None:
        works.append(group.send([torch.ones(fixed)], 1, 1))
    rank.await_mark(1, "done")
    os._exit(_save(rank, []))


def disagree(rank: Rank, shape: list[int]) -> list[Any]:
    """Rank 1 opened the channel for another shape than rank 0."""
    transport = rank.transport(1 - rank.rank, shape=(2, 3) if rank.rank == 0 else tuple(shape))
    seen = []
    if rank.rank == 0:
        transport.send(1, label(0), torch.ones(2, 3))
        rank.await_mark(1, "done")
    else:
        seen = error_of(lambda: wait(transport))
        rank.mark("done")
    os._exit(_save(rank, seen))


def stuck(rank: Rank) -> list[Any]:
    """Rank 1 is stopped by the test; rank 0 cannot flush."""
    transport = rank.transport(1 - rank.rank)
    if rank.rank == 1:
        rank.mark("ready")
        time.sleep(LIMIT_S)
    rank.await_mark(0, "stopped")
    for microbatch in range(4):
        transport.send(1, label(microbatch), torch.ones(1 << 20))
    os._exit(_save(rank, error_of(lambda: transport.flush(0.5))))


def watch(
    rank: Rank,
    port: int,
    *,
    machines: list[str] | None = None,
    serve: bool = False,
    with_store: bool = True,
    on_lost: Any = lambda error: None,
    **options: Any,
) -> Watcher:
    """Join the job whose store is at ``port``, and watch it.

    Args:
        rank: this rank.
        port: port of the store.
        machines: where the ranks say they run; in truth all are here.
        serve: rank 0 serves the store, else the test does.
        with_store: whether the watcher may use it.
        on_lost: given to the watcher.
        options: further options of the watcher.
    """
    store = dist.TCPStore("127.0.0.1", port, rank.num_ranks, serve and rank.rank == 0)
    rank.connect(store)
    places: list[Any] = [None] * rank.num_ranks
    dist.all_gather_object(places, here(rank.rank))
    for place, machine in zip(places, machines or [], strict=False):
        place["machine"] = place["host"] = machine
    options = {"grace_s": 0.5, **options}
    return Watcher(places, rank.rank, store if with_store else None, on_lost, **options)


def blocked(rank: Rank, port: int, **options: Any) -> None:
    """All wait for messages that never come; of three, rank 0 is in a collective without rank 2."""
    if options.pop("without_pidfd", False):
        del os.pidfd_open
    stop = StopRequest() if options.pop("with_stop", False) else None
    watcher = watch(rank, port, **options)
    watcher.position = "iteration 7"
    group = dist.new_group([0, rank.num_ranks - 1], backend="gloo")
    rank.mark("blocked")
    if rank.rank == 0 and rank.num_ranks == 3:
        dist.all_reduce(torch.ones(1), group=group)
    CompletionQueue().wait(time.monotonic() + LIMIT_S)
    raise AssertionError(f"still alive, {stop}")


def broken(rank: Rank, port: int) -> list[Any]:
    """The collective that rank 0 is in breaks because rank 1 is killed."""
    watcher = watch(rank, port, grace_s=5.0)
    rank.mark("blocked")
    if rank.rank == 1:
        time.sleep(LIMIT_S)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        os._exit(_save(rank, [str(error), str(watcher.verdict(10.0))]))
    raise AssertionError("the collective succeeded")


def woken(rank: Rank, port: int, at_exit_s: int) -> list[Any]:
    """The loss reaches a main thread that waits for messages; it ends in its own way."""
    queue = CompletionQueue()
    calls = []

    def on_lost(error: PeerLostError) -> None:
        calls.append(str(error))
        queue.put(error)

    watcher = watch(rank, port, on_lost=on_lost, grace_s=1.0)
    rank.mark("blocked")
    seen = error_of(lambda: queue.wait(time.monotonic() + LIMIT_S))
    seen += [str(watcher.verdict(0.0)), len(calls)]
    watcher.close()
    if at_exit_s:
        _save(rank, seen)
        # Holds the interpreter's lock: no thread of Python can do anything any more.
        ctypes.PyDLL(None).sleep(at_exit_s)
    os._exit(_save(rank, seen))


def reporting(rank: Rank, port: int) -> None:
    """Rank 1 fails by itself and says why, then is slow to end."""
    watcher = watch(rank, port)
    if rank.rank == 1:
        watcher.report("out of memory on device 0\nwith a second line")
        watcher.report("a later reason")
        rank.await_mark(0, "seen")
        return
    time.sleep(LIMIT_S)


def leaving(rank: Rank, port: int, *, serve: bool) -> list[Any]:
    """All ranks end well, rank 2 long after the process of rank 1 is gone."""
    watcher = watch(rank, port, serve=serve)
    dist.barrier()
    if rank.rank == 2:
        rank.await_mark(0, "one-is-gone")
        time.sleep(1.0)
    watcher.leave()
    watcher.close()
    watcher.close()
    threads = [thread.name for thread in threading.enumerate() if "liveness" in thread.name]
    return [str(watcher.verdict(0.0)), threads]


def closed(rank: Rank, port: int) -> list[Any]:
    """Rank 0 stops watching before rank 1 is killed."""
    watcher = watch(rank, port)
    dist.barrier()
    if rank.rank == 1:
        rank.mark("blocked")
        time.sleep(LIMIT_S)
    watcher.close()
    rank.mark("closed")
    rank.await_mark(1, "killed")
    time.sleep(1.0)
    os._exit(_save(rank, str(watcher.verdict(0.0))))


def _save(rank: Rank, result: Any) -> int:
    (rank.folder / f"{rank.rank}.json").write_text(json.dumps(result))
    return 0


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank = Rank(Path(job["folder"]), job["rank"], job["num_ranks"])
    out = os.open(rank.folder / f"{rank.rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    _save(rank, globals()[job["program"]](rank, **job["arguments"]))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(JOB)  # type: ignore[name-defined]  # noqa: F821
