"""Members of a tensor-parallel group take the same actions whatever arrives where first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive import extension
from megatron.adaptive.pipeline.agreement import Alone, Led, _decode, _encode
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.adaptive import Adaptive
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.state import RankState

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = Path(__file__).with_name("members.py")
WATCHDOG_S = 90.0
BOARDS = [
    "message",
    pytest.param(
        "memory",
        marks=pytest.mark.skipif(extension.load() is None, reason="the extension is not built"),
    ),
]

Start = Callable[[str, str, int], list[Any]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function ``(program, board, size)`` that runs members and returns their results."""
    processes: list[subprocess.Popen[str]] = []

    def run(program: str, board: str, size: int) -> list[Any]:
        for rank in range(size):
            command = [sys.executable, str(MEMBERS), program, board, str(tmp_path)]
            processes.append(
                subprocess.Popen(
                    [*command, str(rank), str(size)],
                    env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        for rank, process in enumerate(processes):
            output, _ = process.communicate(timeout=WATCHDOG_S)
            assert process.returncode == 0, f"member {rank}: {output}"
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]

    yield run
    for process in processes:
        process.kill()
        process.wait(10)


@pytest.mark.multiprocess
@pytest.mark.parametrize("board", BOARDS)
@pytest.mark.parametrize("size", [2, 3])
def test_members_do_what_the_first_one_decides(board: str, size: int, start: Start) -> None:
    results = start("agree", board, size)
    alone = [result["alone"] for result in results]
    # Left to themselves they would not agree.
    assert len({tuple(order) for order in alone}) == size
    for result in results:
        assert result["together"] == alone[0]
        assert len(result["together"]) == 2 * 2 * 3 * 8


@pytest.mark.multiprocess
@pytest.mark.parametrize("board", BOARDS)
def test_a_static_order_needs_no_leader(board: str, start: Start) -> None:
    for result in start("follow", board, 2):
        assert result["taken"] == result["order"]


@pytest.mark.multiprocess
@pytest.mark.parametrize("board", BOARDS)
def test_decisions_keep_their_order_when_the_board_wraps_around(board: str, start: Start) -> None:
    leader, *followers = start("many", board, 3)
    assert followers == [leader, leader]


@pytest.mark.multiprocess
@pytest.mark.parametrize("board", BOARDS)
def test_a_silent_leader_is_an_error(board: str, start: Start) -> None:
    _, text = start("silent", board, 2)
    assert text.splitlines() == [text]
    if board == "memory":
        assert text.startswith("DeadlineError: no decision of rank 0 (stage 1)")
    else:
        assert text.startswith("PeerLostError: no decision of the first rank")
        assert "within 0.2 s" in text


@pytest.mark.parametrize("kind", [ActionKind.F, ActionKind.B])
@pytest.mark.parametrize(("chunk", "microbatch"), [(0, 0), (3, 17), (1000, 10**9)])
def test_an_action_travels_as_a_number(kind: ActionKind, chunk: int, microbatch: int) -> None:
    action = Action(kind, chunk, microbatch)
    assert _decode(_encode(action)) == action
    assert 0 <= _encode(action) < 2**63


class Paper:
    """A board in this process."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self.closed = False

    def publish(self, value: int, timeout_s: float) -> None:
        self.values.append(value)

    def next(self, timeout_s: float) -> int:
        return self.values.pop(0)

    def close(self) -> None:
        self.closed = True


def fresh(rank: int) -> RankState:
    return RankState(placement=Placement(num_ranks=2, num_chunks=1), rank=rank, num_microbatches=2)


def test_only_decisions_are_published() -> None:
    board = Paper()
    leader = Led(board, is_leader=True)
    state = fresh(1)
    assert leader.next_action(Adaptive(), state, 1.0) is None
    assert board.values == []
    state.arrive(ActionKind.F, 0, 0)
    assert leader.next_action(Adaptive(), state, 1.0) == Action(ActionKind.F, 0, 0)
    # The follower is told even though its own input is not here yet.
    follower = Led(board, is_leader=False)
    assert follower.next_action(Adaptive(), fresh(1), 1.0) == Action(ActionKind.F, 0, 0)
    follower.close()
    assert board.closed


def test_a_rank_alone_asks_its_policy() -> None:
    alone = Alone()
    assert alone.next_action(Adaptive(), fresh(0), 1.0) == Action(ActionKind.F, 0, 0)
    assert alone.next_action(Adaptive(), fresh(1), 1.0) is None
    alone.close()
