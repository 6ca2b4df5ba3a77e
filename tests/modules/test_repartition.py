"""Tests that segments and their optimizer states move between the ranks of a running pipeline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.adaptive import accelerator
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules import Pipeline
from megatron.adaptive.modules.moving import _difference, _Parcel, _replace_parameters, _text

from ..multiprocess.launch import run_ranks, tail
from .models import SHARED, knotty, make_batch

accelerator.install()

from megatron.adaptive.engine.executor import RankTimes  # noqa: E402
from megatron.adaptive.modules.assembly import PipelineSettings  # noqa: E402
from megatron.adaptive.modules.repartition import SegmentBalancer  # noqa: E402
from megatron.adaptive.rebalance.judgement import Move  # noqa: E402

WORKER = Path(__file__).with_name("repartition_worker.py")
MOVING = Path(__file__).with_name("moving_worker.py")
LIMIT_S = 200.0


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("schedule", "partition", "ranks"),
    [pytest.param("zb-v", "1-6-1-1", 2, marks=pytest.mark.long), ("adaptive", "2-7", 4)],
)
def test_segments_move_and_go_back_and_numbers_stay(
    tmp_path: Path, schedule: str, partition: str, ranks: int
) -> None:
    """Checks that moves of segments change no losses, parameters, running means or checkpoints."""
    log = tmp_path / "log"
    command = [str(WORKER), str(tmp_path), schedule, partition]
    status = run_ranks(command, world_size=ranks, log=log, limit_s=LIMIT_S)
    assert status == 0, tail(log)
    by_rank = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert all(partitions == by_rank[0] for partitions in by_rank)
    first, *others = by_rank[0]
    assert "-".join(map(str, first)) == partition
    assert len(others) > 1
    assert others[-1] == by_rank[0][-3]
    assert all(min(other) >= 1 for other in others)
    text = log.read_text()
    assert text.count(" moved in ") == len(others)
    assert f"repartition: {partition} -> " in text
    assert "the last move gained nothing" in text


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("settings_that_differ_are_named", ""),
        (
            "a_failed_save_does_not_end_a_run_whose_segments_move",
            "training waits until the checkpoint of iteration 4 is written instead",
        ),
        (
            "a_slow_search_ends_before_other_ranks_stop_to_wait",
            "repartition: partition unchanged: no other partition was simulated within 6 s",
        ),
    ],
)
def test_on_two_ranks(tmp_path: Path, program: str, line: str) -> None:
    log = tmp_path / "log"
    status = run_ranks(
        [str(MOVING), str(tmp_path), program], world_size=2, log=log, limit_s=LIMIT_S
    )
    assert status == 0, tail(log)
    assert line in log.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repartition": "on"}, "repartition: .*'on'"),
        ({"repartition": "auto", "repartition_interval": 3}, "repartition_interval: "),
        ({"repartition": "auto", "repartition_gain": 0.0}, "repartition_gain: "),
        ({"repartition_gain": 0.1}, "repartition_gain=0.1 requires repartition='auto', because "),
        ({"repartition_interval": 9}, "repartition_interval=9 requires repartition='auto'"),
        (
            {"hang_after_s": 0, "on_hang": "end"},
            "on_hang='end' requires a hang_after_s other than 0, because hangs are not detected",
        ),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Pipeline(knotty(), make_batch(4), micro_batch_size=2, shared_weights=SHARED, **options)


def parameters_of(*names: str) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.zeros(2)) for name in names}


def test_names_in_an_optimizer_move_with_its_parameters() -> None:
    former = parameters_of("a", "b", "c")
    optimizer = torch.optim.AdamW(former.items())
    after = {"b": former["b"], **parameters_of("d", "e")}
    received = {
        name: _Parcel(value=torch.zeros(2), group=0, label=label)
        for name, label in (("d", "net.d"), ("e", None))
    }
    _replace_parameters(optimizer, former, after, received)
    (group,) = optimizer.param_groups
    assert group["param_names"] == ["b", "net.d", "e"]
    assert [id(parameter) for parameter in group["params"]] == [id(p) for p in after.values()]


def test_a_difference_between_optimizers_names_option_and_ranks() -> None:
    first, same, other = (
        [{"lr": _text(torch.tensor(lr)), "betas": _text((0.9, torch.tensor(0.5)))}]
        for lr in (0.5, 0.5, 0.25)
    )
    assert _difference([None, first, same]) == ""
    assert _difference([first, None, same, other]) == (
        "option lr of the optimizer's parameter group 0 is 0.5 on rank 0, but 0.25 on rank 3; "
        "use the same value on all ranks"
    )
    assert "option betas of" in _difference([first, [{"lr": "0.5"}]])
    assert "rank 0 has 1 parameter groups, but the optimizer of rank 1 has 2" in _difference(
        [first, first * 2]
    )


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    """Yields a pipeline that runs only in this process."""
    with Pipeline(knotty(), make_batch(4), micro_batch_size=2) as pipeline:
        pipeline.set_optimizer(torch.optim.SGD(pipeline.named_parameters(), lr=0.1))
        yield pipeline


def test_names_of_parameters_and_devices_of_options_are_not_compared(pipeline: Pipeline) -> None:
    pipeline.set_optimizer(
        torch.optim.AdamW(pipeline.named_parameters(), lr=torch.tensor(0.5), foreach=False)
    )
    (options,) = balancer_of(pipeline)._mover._options() or []
    assert options["lr"] == "0.5"
    assert not {"params", "param_names"} & options.keys()


def balancer_of(pipeline: Pipeline) -> SegmentBalancer:
    """Returns a new object that can move the segments of ``pipeline``."""
    request = PipelineSettings(
        model=pipeline.model, sample_batch=make_batch(4), repartition="auto", repartition_interval=4
    )
    return SegmentBalancer(
        request, pipeline._assembly, pipeline._mesh, pipeline._orders, pipeline._maker.balance
    )


@pytest.mark.parametrize(
    ("samples", "span_s", "gain", "returns", "line"),
    [
        (40, 0.95, 0.05, False, "a step takes 950 ms, 5.0% less"),
        (42, 0.9975, 0.05, False, "a step of the earlier size takes 950 ms, 5.0% less"),
        (38, 0.95, 0.1, True, "a step of the earlier size takes 1,000 ms, 0.0% less"),
        (
            40,
            1.197,
            0.1,
            True,
            "a step takes 1,197 ms, 19.7% more than before (6.0% less was predicted)",
        ),
        (
            80,
            1.8,
            0.05,
            False,
            "cannot be measured, because the operation count of a step has changed by +100",
        ),
        (
            20,
            0.5,
            0.05,
            False,
            "cannot be measured, because the operation count of a step has changed by -50",
        ),
    ],
)
def test_a_move_is_judged_by_the_time_per_counted_work(
    pipeline: Pipeline,
    capfd: pytest.CaptureFixture[str],
    samples: int,
    span_s: float,
    gain: float,
    returns: bool,
    line: str,
) -> None:
    """Checks that a move of segments is judged by the time per operation.

    The predicted gain of the move is 6%.
    """
    balancer = balancer_of(pipeline)

    def run(samples: int, span_s: float) -> Move | None:
        work = pipeline._maker.work(make_batch(samples), None, 1)
        steps = balancer._skip + balancer._interval
        moves = [
            balancer.after_step(work, RankTimes(busy_s=1.0, span_s=span_s)) for _ in range(steps)
        ]
        return moves[-1]

    assert run(40, 1.0) is None
    move = Move(
        partition=pipeline.partition,
        present_s=1.0,
        step_s=0.94,
        why="a rank is slow",
        before_s=1.0,
        former=pipeline.partition,
    )
    assert balancer.carry_out(move)
    way_back = run(samples, span_s)
    assert balancer._gain == gain
    assert (way_back is not None) == returns
    assert line in capfd.readouterr().out
    # Each move is judged only once.
    assert run(samples, span_s) is None
