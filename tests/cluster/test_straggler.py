"""What is done about nodes that stay slow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.adaptive.cli.run import main
from megatron.adaptive.cluster.job import Incarnation, SlowRank
from megatron.adaptive.cluster.layouts import Offer, ParallelLayout, RuleChooser, choose_layout
from megatron.adaptive.cluster.membership import Node
from megatron.adaptive.cluster.ranks import Policy, RunningRanks
from megatron.adaptive.cluster.straggler import Stragglers
from megatron.adaptive.errors import ConfigError

from .jobs import FLAGS, TRAINER

MODEL = (*FLAGS, "--num-layers", "8", "--global-batch-size", "8", "--train-iters", "9")
MODEL = (*MODEL, "--save", "none", "--save-interval", "3")


class Job:
    """A job of nodes with one process each, as far as slow nodes matter."""

    def __init__(self, policy: Policy, names: str, extra: Sequence[str] = ()) -> None:
        self.said: list[str] = []
        arguments = (*MODEL, *extra)
        self.stragglers = Stragglers(policy, RuleChooser(), arguments, self.said.append)
        self.nodes = [Node(name=name, slots=1, status="present") for name in names]

    def choose(self) -> ParallelLayout:
        layout = asyncio.run(self.stragglers.choose(self.nodes))
        assert layout is not None
        return layout

    def heed(self, *found: SlowRank, layout: ParallelLayout | None = None) -> str:
        incarnation = Incarnation(number=2, layout="", processes=3, nodes=(), reason="")
        where = {f"2/{at}": node.name for at, node in enumerate(self.nodes)}
        running = RunningRanks(
            incarnation=incarnation, layout=layout or self.choose(), folder=Path(), where=where
        )
        return asyncio.run(self.stragglers.heed(found, running, self.nodes))


def slow(rank: int, factor: float = 2.0, *, times: int = 2, ranks: int = 3) -> SlowRank:
    pace_ns = tuple(1e6 * (factor if at == rank else 1.0) for at in range(ranks))
    return SlowRank(slow_rank=rank, times=times, factor=factor, pace_ns=pace_ns)


def test_a_slow_node_gets_fewer_layers_once() -> None:
    job = Job("replan", "abc")
    assert job.choose().partition == (2, 3, 3)
    assert job.heed(slow(1, times=1)) == ""  # may pass
    assert job.heed(slow(1, 1.05)) == ""
    assert job.heed(slow(1)) == "b is slow, rank 1 takes 2.00 times as long"
    assert job.choose().partition == (3, 2, 3)
    assert job.heed(slow(1, 4.0)) == ""  # one move for each node
    assert job.stragglers.told(job.nodes[1])["slowness"] == 2.0
    job.stragglers.joined(job.nodes[1], pid=0)  # as good as new
    assert job.choose().partition == (2, 3, 3)


@pytest.mark.parametrize("policy", ["replan", "exclude"])
def test_what_is_known_of_a_node_outlives_its_manager(policy: Policy) -> None:
    """The next one gave a slow node as many layers as others, and moved for it a second time."""
    before = Job(policy, "abc")
    for pid, node in enumerate(before.nodes, 10):
        node.host, node.pid = f"host-{node.name}", pid
    assert before.heed(slow(1, 4.0)) != ""
    told = [before.stragglers.told(node) for node in before.nodes]
    after = Job(policy, "abc")
    after.stragglers.recall(json.loads(json.dumps(told)))
    assert after.choose().partition == (2, 3, 3)  # none is here yet
    after.nodes = before.nodes
    for node in after.nodes:
        after.stragglers.joined(node, pid=node.pid)
    assert after.choose() == before.choose()
    assert [after.stragglers.told(node) for node in after.nodes] == told
    assert after.heed(slow(1, 4.0)) == ""  # one move for each node
    after.stragglers.joined(after.nodes[1], pid=99)  # started anew since: it may have been mended
    assert after.choose().partition == (2, 3, 3)
    assert after.stragglers.told(after.nodes[1])["slowness"] == 1.0


def test_a_job_moves_three_times_in_an_hour() -> None:
    job = Job("replan", "abcd", ["--global-batch-size", "7"])  # no replicas
    reasons = [job.heed(slow(rank, 2.0 + 2 * rank, ranks=4)) for rank in range(4)]
    assert [bool(one) for one in reasons] == [True, True, True, False]
    assert "it stays: the job has moved 3 times for such" in job.said[-1]


def test_a_slow_node_is_left_out_where_that_is_faster() -> None:
    job = Job("exclude", "abc")
    assert job.heed(slow(1, 1.2)) == ""
    assert (
        "b is slow, rank 1 takes 1.20 times as long; it stays: no shape without it" in job.said[0]
    )
    assert job.heed(slow(2, 4.0)) != ""
    assert job.choose().world_size == 2
    assert job.stragglers.told(job.nodes[2])["why"] == "left out: slow"
    assert [node.name for node in job.stragglers.wanted(job.nodes)] == ["a", "b"]
    job.nodes = job.nodes[2:]  # nobody else is left
    assert job.choose().world_size == 1


def test_nothing_is_done_where_nobody_wants_it_or_nothing_helps() -> None:
    assert Job("ignore", "abc").heed(slow(0, 4.0)) == ""
    job = Job("replan", "ab", ["--num-layers", "2"])  # a layer each already, and two are quicker
    assert job.heed(slow(0, 1.5, ranks=2)) == ""
    assert "it stays: no shape with fewer layers for it is faster" in job.said[0]


def test_a_node_that_is_as_slow_as_planned_is_no_straggler() -> None:
    job = Job("replan", "abc")
    planned = replace(job.choose(), step_s=1.0, pace={"a": 1.0, "b": 1.0, "c": 2.0})
    assert job.heed(slow(2, 2.0), layout=planned) == ""
    assert job.said == []
    assert job.heed(slow(2, 3.0), layout=planned) == "c is slow, rank 2 takes 1.50 times as long"


def test_slowness_of_equal_nodes_changes_no_shape() -> None:
    even = choose_layout(MODEL, [1, 1, 1])
    assert choose_layout(MODEL, [1, 1, 1], [2.0, 2.0, 2.0]) == even
    assert (
        asyncio.run(RuleChooser().choose(MODEL, [Offer(name=name, slots=1) for name in "abc"]))
        == even
    )


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ((), "--on-straggler exclude with no --trace-dir"),
        (("--trace-dir", "t", "--diagnose-interval", "0"), "exclude with --diagnose-interval 0"),
    ],
)
def test_without_a_diagnosis_there_are_no_stragglers(
    more: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    words = ["--on-straggler", "exclude", "--checkpoint", str(tmp_path / "c"), str(TRAINER)]
    with pytest.raises(ConfigError, match=told):
        main([*words, *MODEL, *more])
