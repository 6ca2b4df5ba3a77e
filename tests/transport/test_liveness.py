"""Tests that ranks exit with an error if another rank is killed, but not if it leaves the job."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron.adaptive.transport.liveness import here

from ..multiprocess.launch import forking, free_port
from .pool import Pool

pytestmark = pytest.mark.multiprocess

Start = Callable[..., Pool]
LIMIT_S = 30.0  # All ranks must exit within this number of seconds.


@pytest.fixture
def port() -> Iterator[int]:
    """Yields the port of a store that outlives all ranks, as the store of torchrun does."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield store.port
    del store


def check_line(text: str, dead: int, pid: int, survivor: int, reason: str, host: str = "") -> None:
    """Checks that ``text`` has one error line, in which rank ``survivor`` reports rank ``dead``.

    The line must contain the ``reason``, and the process ID ``pid`` and the ``host`` of the lost
    rank. If ``host`` is empty, this is the host of the test.
    """
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, text
    name = f"rank {dead} (stage {dead}, pid {pid} on host {host or socket.gethostname()})"
    assert lines[0].startswith(f"error: {name} {reason}")
    assert f"; this is rank {survivor} (stage {survivor})" in lines[0]
    assert lines[0].endswith(
        "; the job cannot continue without the lost rank; restart the job from the last checkpoint"
    )


def kill_when_all_are_blocked(job: Pool, dead: int, num_ranks: int) -> None:
    for rank in range(num_ranks):
        job.await_mark(f"blocked {rank}")
    job.signal(dead)


ENDED = "ended unexpectedly"
APART = {"machines": ["east", "west"]}
KILLS: dict[str, tuple[int, int, dict[str, Any], str, str]] = {
    "first-rank": (3, 0, {}, ENDED, ""),
    "middle-rank": (3, 1, {}, ENDED, ""),
    # The watchers of the next two cases run without pidfd_open and without a store, respectively.
    "no-pidfd": (2, 1, {"without_pidfd": True}, ENDED, ""),
    "no-store": (2, 1, {"with_store": False}, ENDED, ""),
    # Rank 0 runs on the same machine as rank 1, and notices that it has exited. Rank 2 runs on
    # another machine, and learns this from rank 0 through the store.
    "elsewhere": (3, 1, {"machines": ["east", "east", "west"]}, ENDED, "east"),
    # No other rank runs on the machine of the killed rank, so nobody reports its exit.
    "silent": (2, 1, {**APART, "silent_s": 4.0}, "cannot be reached, no heartbeat from", "west"),
    # Rank 0 also serves the store, so the store is lost too.
    "no-answer": (2, 0, {**APART, "serve": True}, "cannot be reached, the job's store", "east"),
}
"""Number of ranks, killed rank, watcher options, expected reason and expected host of each case."""


@pytest.mark.parametrize(
    ("num_ranks", "dead", "options", "reason", "host"), KILLS.values(), ids=KILLS.keys()
)
def test_killed_rank_ends_all_that_are_blocked(
    start: Start,
    port: int,
    num_ranks: int,
    dead: int,
    options: dict[str, Any],
    reason: str,
    host: str,
) -> None:
    job = start(
        "programs.blocked", num_ranks, port=free_port() if "serve" in options else port, **options
    )
    kill_when_all_are_blocked(job, dead, num_ranks)
    for rank in set(range(num_ranks)) - {dead}:
        assert job.status(rank, LIMIT_S) == 1
        check_line(job.text(rank), dead, job.pid(dead), rank, reason, host=host)
        assert f"this is rank {rank} (stage {rank}) in iteration 7;" in job.text(rank)


def test_asking_to_stop_does_not_keep_a_bereaved_rank_alive(start: Start, port: int) -> None:
    """Checks that a rank exits although its handler for the launcher's SIGTERM only sets a flag."""
    job = start("programs.blocked", 3, port=port, with_stop=True)
    for rank in range(3):
        job.await_mark(f"blocked {rank}")
    job.signal(0, signal.SIGTERM)
    job.signal(1)
    job.signal(0, signal.SIGTERM)
    assert job.status(0, LIMIT_S) == 1
    check_line(job.text(0), 1, job.pid(1), 0, "ended unexpectedly")


def test_main_thread_that_can_act_is_told_once(start: Start, port: int) -> None:
    job = start("programs.woken", 2, port=port, at_exit_s=0)
    kill_when_all_are_blocked(job, 1, 2)
    assert job.status(0, LIMIT_S) == 0, job.text(0)
    kind, text, verdict, calls = job.result(0)
    assert (kind, calls) == ("PeerLostError", 1)
    assert text == verdict
    assert f"error: {text}\n" in job.text(0)


def test_broken_collective_is_explained(start: Start, port: int) -> None:
    """Checks that the failure of a collective is explained by the loss of a rank."""
    job = start("programs.broken", 2, port=port)
    kill_when_all_are_blocked(job, 1, 2)
    assert job.status(0, LIMIT_S) == 0, job.text(0)
    broken, verdict = job.result(0)
    assert "rank 1" not in broken
    check_line(job.text(0), 1, job.pid(1), 0, "ended unexpectedly")
    assert f"error: {verdict}\n" in job.text(0)


@pytest.mark.long
def test_main_thread_that_hangs_on_its_way_out_is_ended(start: Start, port: int) -> None:
    """Checks that a rank is ended if its main thread hangs after it has closed the watcher."""
    job = start("programs.woken", 2, port=port, at_exit_s=50)
    kill_when_all_are_blocked(job, 1, 2)
    assert job.status(0, LIMIT_S) == 1, job.text(0)
    check_line(job.text(0).partition("\nTimeout")[0], 1, job.pid(1), 0, "ended unexpectedly")


def test_first_reason_that_is_reported_reaches_all(start: Start, port: int) -> None:
    job = start("programs.reporting", 3, port=port)
    for rank in (0, 2):
        assert job.status(rank, LIMIT_S) == 1
        reason = "failed: out of memory on device 0; this"
        check_line(job.text(rank), 1, job.pid(1), rank, reason)
    job.mark("seen")
    assert job.status(1) == 0
    assert "error:" not in job.text(1)


@pytest.mark.parametrize("serve", [False, True], ids=["store-elsewhere", "store-in-rank-0"])
def test_rank_that_leaves_ends_nobody(start: Start, port: int, serve: bool) -> None:
    """Checks that rank 0, which may serve the store, stays until all ranks have left the job."""
    job = start("programs.leaving", 3, port=free_port() if serve else port, serve=serve)
    assert job.status(1) == 0, job.text(1)
    job.mark("one-is-gone")
    for rank in range(3):
        assert job.status(rank) == 0, job.text(rank)
        assert job.result(rank) == ["None", []]
    assert [job.text(rank) for rank in range(3)] == [""] * 3


def test_closed_watcher_sees_nothing(start: Start, port: int) -> None:
    job = start("programs.closed", 2, port=port)
    job.await_mark("closed")
    job.await_mark("blocked 1")
    job.signal(1)
    job.status(1)
    job.mark("killed")
    assert job.status(0) == 0, job.text(0)
    assert job.result(0) == "None"
    assert "error:" not in job.text(0)


UNDER_TORCHRUN = """
import os, signal, sys, time
import torch.distributed as dist
from megatron.adaptive.engine.stop import StopRequest
from megatron.adaptive.transport.liveness import Watcher, here

stop = StopRequest()
dist.init_process_group("gloo")
rank = dist.get_rank()
places = [None] * dist.get_world_size()
dist.all_gather_object(places, here(rank))
store = dist.distributed_c10d._get_default_store()
watcher = Watcher(places, rank, store, lambda error: None, grace_s=0.5)
dist.barrier()
if sys.argv[1] == "leave":
    watcher.leave()
    watcher.close()
    dist.destroy_process_group()
elif rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
else:
    time.sleep(50)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "leave"])
def test_under_torchrun_every_survivor_tells(tmp_path: Path, how: str) -> None:
    """Checks that all remaining ranks print an error line before torchrun ends them."""
    script = tmp_path / "watched.py"
    script.write_text(UNDER_TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    process = subprocess.Popen(
        [*command, str(script), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=forking(),
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun then terminates all ranks.
            process.wait(40)
    survivors = re.findall(
        r"^error: rank 1 .* ended unexpectedly; this is rank (\d)", text, re.MULTILINE
    )
    assert sorted(survivors) == (["0", "2"] if how == "kill" else []), text
    assert (process.returncode == 0) == (how == "leave"), text


def test_place_tells_machines_apart() -> None:
    host = here(3)
    assert (host["pid"], host["pp_rank"]) == (os.getpid(), 3)
    assert host["host"] == socket.gethostname()
    assert host["machine"] == here(0)["machine"]
