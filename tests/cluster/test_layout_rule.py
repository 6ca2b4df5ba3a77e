"""Tests which layouts the simple rule chooses, and how it handles slow nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.adaptive.cli.run import main
from megatron.adaptive.cluster.incarnation import (
    Policy,
    RunningRanks,
    TrainerProgram,
    assign,
    rank_orders,
)
from megatron.adaptive.cluster.job_state_file import Incarnation, SlowRank
from megatron.adaptive.cluster.layout_rule import Chooser, Offer, ParallelLayout, choose_layout
from megatron.adaptive.cluster.membership import Node
from megatron.adaptive.cluster.straggler import Stragglers
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.errors import ConfigError

from .jobs import FLAGS as JOB_FLAGS
from .jobs import TRAINER

FLAGS = (
    "--num-layers 6 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --save checkpoints "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 --train-iters 9 "
    "--lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 63 --mock-data --save-interval 3"
).split()


def offers(*slots: int, slowness: float = 1.0) -> list[Offer]:
    return [
        Offer(name=str(number), slots=count, slowness=slowness)
        for number, count in enumerate(slots)
    ]


def chosen(slots: list[int], *extra: str) -> ParallelLayout:
    layout = choose_layout([*FLAGS, *extra], offers(*slots))
    assert layout is not None
    return layout


def test_as_many_processes_as_batch_and_layers_allow_near_the_pipeline_asked_for() -> None:
    shapes = {
        count: chosen([1] * count, "--pipeline-model-parallel-size", "2") for count in range(1, 10)
    }
    degrees = {count: (layout.pipeline, layout.data) for count, layout in shapes.items()}
    assert degrees == {
        1: (1, 1),
        2: (2, 1),
        3: (3, 1),
        4: (2, 2),
        5: (5, 1),
        6: (3, 2),
        # The model has too few layers for seven stages, and the batch has too few samples for seven
        # replicas.
        7: (3, 2),
        8: (2, 4),
        9: (2, 4),
    }
    assert shapes[5].partition == (1, 1, 2, 1, 1)
    for layout in shapes.values():
        config = parse([*FLAGS, *layout.flags], world_size=layout.world_size, last_wins=True)
        assert config.layers_per_stage == layout.partition
        assert config.batch.global_batch_size == 8


def test_tensor_parallel_groups_stay_on_their_nodes() -> None:
    layout = chosen([3, 2, 1], "--tensor-model-parallel-size", "2")
    assert (layout.tensor, layout.world_size) == (2, 4)
    nodes = [Node(name=name, slots=slots) for name, slots in (("a", 3), ("b", 1), ("c", 2))]
    places = assign(nodes, layout)
    assert [node.name for node in places] == ["a", "a", "c", "c"]
    orders = rank_orders([], places, 3, {})
    last = orders["c"][1]
    assert last["key"] == "3/3"
    assert last["variables"] == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MEGATRON_ADAPTIVE_NODE": "c",
    }
    assert choose_layout([*FLAGS, "--tensor-model-parallel-size", "2"], offers(1, 1, 1)) is None


def test_a_job_moves_where_that_is_worth_it() -> None:
    three, four = chosen([1] * 3), chosen([1] * 4)
    assert Chooser().is_better(four, three)
    assert not Chooser().is_better(three, four)
    planned, quicker = replace(three, step_s=1.0), replace(four, step_s=0.98)
    assert not Chooser().is_better(quicker, planned)
    assert Chooser().is_better(replace(quicker, step_s=0.95), planned)
    # The planner timed out for the current layout, so the step time of this layout is unknown.
    assert Chooser().is_better(planned, four)
    assert not Chooser().is_better(planned, three)


def test_chunks_are_kept_where_they_fit() -> None:
    extra = ("--pipeline-model-parallel-size", "3", "--model-chunks", "2")
    assert chosen([3], *extra).partition == (1,) * 6
    assert chosen([4], *extra).partition == (1, 2, 2, 1)
    assert chosen([1], *extra).partition == (6,)


def test_arguments_that_are_wrong_in_every_shape_are_refused() -> None:
    with pytest.raises(ConfigError, match="--hidden-size"):
        choose_layout([*FLAGS, "--hidden-size", "33"], offers(2))


def test_an_epoch_goes_on_from_the_jobs_own_checkpoint() -> None:
    flags = [*FLAGS, "--load", "other", "--finetune", "--ckpt-step", "5", "--trace-dir=traces"]
    layout = chosen([2])

    def told(resumed: int) -> list[str]:
        return TrainerProgram(flags, Path("own")).command(layout, 3, resumed, Path("progress"))[0]

    first = parse(told(0), world_size=2, last_wins=True).checkpoint
    assert (first.load, first.save, first.finetune, first.ckpt_step) == ("other", "own", True, 5)
    later = parse(told(7), world_size=2, last_wins=True)
    assert (later.checkpoint.load, later.checkpoint.finetune) == ("own", False)
    assert later.checkpoint.ckpt_step is None
    assert later.schedule.trace_dir == "traces/epoch-3"
    assert later.progress_dir == "progress"


JOB_MODEL = (*JOB_FLAGS, "--num-layers", "8", "--global-batch-size", "8", "--train-iters", "9")
JOB_MODEL = (*JOB_MODEL, "--save", "none", "--save-interval", "3")


class Job:
    """Simulates how a job with one process per node handles slow nodes."""

    def __init__(self, policy: Policy, names: str, extra: Sequence[str] = ()) -> None:
        self.stragglers = Stragglers(policy, Chooser(), (*JOB_MODEL, *extra))
        self.nodes = [Node(name=name, slots=1, status="present") for name in names]

    def choose(self) -> ParallelLayout:
        layout = asyncio.run(self.stragglers.choose(self.nodes))
        assert layout is not None
        return layout

    def handle(self, *slow_ranks: SlowRank, layout: ParallelLayout | None = None) -> str:
        incarnation = Incarnation(number=2, layout="", processes=3, nodes=(), reason="")
        where = {f"2/{number}": node.name for number, node in enumerate(self.nodes)}
        running = RunningRanks(
            incarnation=incarnation, layout=layout or self.choose(), folder=Path(), where=where
        )
        return asyncio.run(self.stragglers.handle(slow_ranks, running, self.nodes))


def slow(rank: int, factor: float = 2.0, *, times: int = 2, ranks: int = 3) -> SlowRank:
    pace_ns = tuple(1e6 * (factor if index == rank else 1.0) for index in range(ranks))
    return SlowRank(slow_rank=rank, times=times, factor=factor, pace_ns=pace_ns)


def test_a_slow_node_gets_fewer_layers_once() -> None:
    job = Job("replan", "abc")
    assert job.choose().partition == (2, 3, 3)
    # The rank was slow only once, so the slowness may be temporary.
    assert job.handle(slow(1, times=1)) == ""
    assert job.handle(slow(1, 1.05)) == ""
    assert job.handle(slow(1)) == "b is slow: rank 1 takes 2.00 times as long as expected"
    assert job.choose().partition == (3, 2, 3)
    assert job.handle(slow(1, 4.0)) == ""  # A node may cause only one change of layout.
    assert job.stragglers.to_dict(job.nodes[1])["slowness"] == 2.0
    job.stragglers.joined("b")  # A node that joins again counts as fast.
    assert job.choose().partition == (2, 3, 3)


def test_a_slow_node_is_left_out_where_that_is_faster(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job("exclude", "abc")
    assert job.handle(slow(1, 1.2)) == ""
    assert (
        "b is slow: rank 1 takes 1.20 times as long as expected; the layout stays the same, "
        "because no layout without it is faster" in capsys.readouterr().err
    )
    assert job.handle(slow(2, 4.0)) != ""
    assert job.choose().world_size == 2
    assert job.stragglers.to_dict(job.nodes[2])["why"] == "left out: slow"
    assert [node.name for node in job.stragglers.included(job.nodes)] == ["a", "b"]
    job.nodes = job.nodes[2:]  # Only the slow node is left.
    assert job.choose().world_size == 1


def test_nothing_is_done_where_nobody_wants_it_or_nothing_helps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert Job("ignore", "abc").handle(slow(0, 4.0)) == ""
    # The fastest layout already has one layer per stage.
    job = Job("replan", "ab", ["--num-layers", "2"])
    assert job.handle(slow(0, 1.5, ranks=2)) == ""
    assert "because no layout with fewer layers for it is faster" in capsys.readouterr().err


def test_a_node_that_is_as_slow_as_planned_is_no_straggler(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = Job("replan", "abc")
    planned = replace(job.choose(), step_s=1.0, pace={"a": 1.0, "b": 1.0, "c": 2.0})
    assert job.handle(slow(2, 2.0), layout=planned) == ""
    assert capsys.readouterr().err == ""
    reason = job.handle(slow(2, 3.0), layout=planned)
    assert reason == "c is slow: rank 2 takes 1.50 times as long as expected"


def test_slowness_of_equal_nodes_changes_no_shape() -> None:
    even = choose_layout(JOB_MODEL, offers(1, 1, 1))
    assert choose_layout(JOB_MODEL, offers(1, 1, 1, slowness=2.0)) == even


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ((), "slow nodes with no --trace-dir"),
        (("--trace-dir", "t", "--diagnose-interval", "0"), "slow nodes with --diagnose-interval 0"),
    ],
)
def test_without_a_diagnosis_there_are_no_stragglers(
    more: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    arguments = ["--on-straggler", "exclude", "--checkpoint", str(tmp_path / "c"), str(TRAINER)]
    with pytest.raises(ConfigError, match=reason):
        main([*arguments, *JOB_MODEL, *more])
