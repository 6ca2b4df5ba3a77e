"""Tests how the fork server of a node's ranks handles signals and time limits."""

from __future__ import annotations

import importlib.util
import itertools
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.cluster import rank_forkserver
from tests.multiprocess.launch import ROOT, environment

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
RANKS = 40

WAITING = """
import signal, sys
signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(0))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
signal.sigtimedwait({signal.SIGUSR2}, 5)
sys.exit(3)
"""


@pytest.fixture
def orders() -> Iterator[socket.socket]:
    """Yields a connection to a fork server."""
    test_end, server_end = socket.socketpair()
    with test_end, server_end:
        test_end.settimeout(60)
        server = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "megatron.adaptive.cluster.rank_forkserver",
                str(server_end.fileno()),
            ],
            pass_fds=[server_end.fileno()],
            env=environment(),
            cwd=ROOT,
        )
        server_end.close()
        try:
            yield test_end
        finally:
            server.kill()
            server.wait(20)


@pytest.mark.long
def test_a_signal_right_after_the_fork_is_not_lost(orders: socket.socket, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(WAITING)
    answers = orders.makefile()
    for key in range(RANKS):
        rank = {"key": str(key), "variables": {}, "script": str(script), "arguments": []}
        start = json.dumps({"start": {**rank, "folder": str(tmp_path)}})
        # Send both lines at once, so that the signal arrives as soon as possible after the fork.
        orders.sendall(f"{start}\n{json.dumps({'signal': int(signal.SIGUSR1)})}\n".encode())
        ended = next(answer for line in answers if "ended" in (answer := json.loads(line)))
        assert ended == {"ended": str(key), "status": 0}


HANGING = """
import ctypes, sys
print("hangs", flush=True)
ctypes.PyDLL(None).sleep(300)  # in C, while no other thread can run Python
"""


@pytest.mark.long
def test_a_process_ends_at_its_limit_or_alone(orders: socket.socket, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(HANGING)
    answers = (json.loads(line) for line in orders.makefile())
    common = {"variables": {}, "script": str(script), "arguments": [], "folder": str(tmp_path)}

    def start(key: str, limit_s: int) -> dict[str, Any]:
        return {"start": {"key": key, "limit_s": limit_s, **common}}

    kill = {"signal": int(signal.SIGKILL), "key": "b"}
    for order in (start("a", 0), start("b", 0), kill, start("c", 1)):
        orders.sendall(json.dumps(order).encode() + b"\n")
    ended = [answer for answer in itertools.islice(answers, 6) if "ended" in answer]
    # The first process, which has no time limit, continues.
    assert ended == [
        {"ended": "b", "status": -signal.SIGKILL},
        {"ended": "c", "status": -signal.SIGALRM},
    ]


@pytest.mark.parametrize("name", rank_forkserver._MODULES)
def test_what_it_imports_before_ranks_exists(name: str) -> None:
    # If the fork server could not import a module, each rank would have to import it.
    assert importlib.util.find_spec(f"megatron.adaptive.{name}") is not None
