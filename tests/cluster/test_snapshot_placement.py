"""What is left of copies after a loss, and jobs that go on from it."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron.adaptive.cluster.membership import Node
from megatron.adaptive.cluster.snapshot_placement import HeldSnapshot, buddies, newest

from .jobs import ElasticJob
from .test_morphs import undisturbed


def held(node: str, rank: int, *steps: int, kind: str = "own", generation: int = 1) -> HeldSnapshot:
    return HeldSnapshot(
        node=node,
        socket=node,
        run="run",
        rank=rank,
        generation=generation,
        kind=kind,
        steps=steps,
        has_common=True,
    )


def need(*ranks: int, is_sent: bool = False) -> dict[str, Any]:
    return {"ranks": ranks, "is_sent": is_sent}


def test_the_newest_step_that_is_whole_is_taken() -> None:
    needs = {("run", 1): [need(0, is_sent=True), need(1, is_sent=True), need(0, 1)]}
    own, other = held("a", 0, 6, 7), held("b", 1, 6, 7)
    found = newest([own, other], needs)
    assert (found.step, found.seen, found.why) == (7, 7, "")
    assert dict(found.parts) == {own: (0, 2), other: (1,)}
    # The node of rank 1 is lost: its buddy has the step before.
    sent = held("a", 1, 5, 6, kind="sent")
    found = newest([own, sent], needs)
    assert (found.step, found.seen) == (6, 7)
    assert dict(found.parts) == {own: (0, 2), sent: (1,)}
    # What was not sent is not in what was.
    found = newest([sent], {("run", 1): [need(1)]})
    assert found.step == 0
    found = newest([own], needs)
    assert (found.step, found.seen) == (0, 7)
    assert found.why == "no copy is left of what rank 1 held"
    assert newest([], {}).why == "no node that is left keeps copies"


def test_what_was_copied_before_a_move_counts_until_there_is_more() -> None:
    needs = {("run", 1): [need(0), need(1)], ("run", 2): [need(0), need(1)]}
    before = [held("a", 0, 3, 4), held("b", 1, 3, 4)]
    after = [held("a", 0, 5, generation=2), held("b", 1, generation=2)]
    assert newest(before + after, needs).step == 4


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("mmm", ["b", "c", "a"]),
        ("mmn", ["c", "c", "a"]),
        ("mno", ["b", "c", "a"]),
        ("m", [None]),
    ],
)
def test_the_buddy_is_the_next_node_on_another_machine(
    hosts: str, expected: list[str | None]
) -> None:
    nodes = [Node(name=name, host=host) for name, host in zip("abc", hosts, strict=False)]
    assert list(buddies(nodes).values()) == expected


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_job_loses_a_step_at_most_where_a_copy_is_left(tmp_path: Path) -> None:
    flags = ["--train-iters", "9999", "--save-interval", "15"]
    job = ElasticJob(tmp_path, "abcd", flags, ["--replicate-every", "1"])
    try:
        first = steps_in(job, 1, 18)
        lose(job, "d")  # its ranks have replicas on other nodes
        second = steps_in(job, 2, 8)
        lose(job, "c")  # the stage of its rank is with its buddy
        steps_in(job, 3, 3)
        job.change("abe")
        fourth = steps_in(job, 4, 8)
        lose(job, "b", "e")  # neighbours: nothing is left of what b held
        steps_in(job, 5, 3)
        job.until(lambda: len(job.state()["epochs"]) == 5, "state of the fifth epoch")
        state = job.state()
    finally:
        job.close()
    incarnations = state["epochs"]
    assert len(incarnations) == 5, job.said()
    layouts = ["PP 2 x DP 2", "PP 3 x DP 1", "PP 2 x DP 1", "PP 3 x DP 1", "PP 1 x DP 1"]
    assert [one["shape"].partition(",")[0] for one in incarnations] == layouts
    for number, done in ((2, first), (3, second)):
        one = incarnations[number - 1]
        assert one["source"] == "copies in memory", job.said()
        assert one["resumed_iteration"] >= done - 1
        assert one["lost_steps"] <= 1
        last = max(job.steps(number - 1))
        assert one["resumed_iteration"] >= last - 1
        assert job.steps(number)[0] == one["resumed_iteration"] + 1
    assert incarnations[3]["source"] == "checkpoint"  # that was made for the node that came
    assert incarnations[3]["lost_steps"] == 0
    # The copy of its neighbour's part may be of another step than what is left.
    nothing_left = r"checkpoint: no copy is left of what rank 1(, 2)? held"
    assert re.fullmatch(nothing_left, incarnations[4]["source"]), job.said()
    assert incarnations[4]["resumed_iteration"] < fourth
    assert incarnations[4]["lost_steps"] == max(job.steps(4)) - incarnations[4]["resumed_iteration"]
    reported = {line["epoch"]: line["copies"] for line in job.lines() if "copies" in line}
    assert reported[1].endswith(" and 0.0 MiB sent")
    assert not reported[2].endswith(" and 0.0 MiB sent")
    assert "warning: no copy is left of what rank 1 held: going on from" in job.said()
    done_ = [line for line in job.lines() if "iteration" in line]
    last = max(line["iteration"] for line in done_)
    expected = undisturbed(job, tmp_path / "undisturbed", last)
    for line in done_:
        if line["iteration"] > 15:
            assert line["loss"] == pytest.approx(expected[line["iteration"]], rel=1e-5)


def steps_in(job: ElasticJob, incarnation: int, count: int) -> int:
    """Wait for some steps of an epoch; returns the last."""
    job.until(lambda: len(job.steps(incarnation)) >= count, f"{count} steps of epoch {incarnation}")
    return max(job.steps(incarnation))


def lose(job: ElasticJob, *names: str) -> None:
    """Kill all of some nodes at once, without notice."""
    family = []
    for name in names:
        agent = psutil.Process(job.agent(name))
        family += [agent, *agent.children(recursive=True)]
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # a child goes with its parent
            one.kill()
    end_s = time.monotonic() + 10
    while any(map(_lives, family)):
        assert time.monotonic() < end_s
        time.sleep(0.01)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != "zombie"
    except psutil.NoSuchProcess:
        return False
