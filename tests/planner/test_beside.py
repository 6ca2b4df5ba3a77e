"""What ranks lose on shared cores, learned from made-up stages and from traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.adaptive.planner.beside import MOST, Beside, crowds, fit_pace, work_s
from megatron.adaptive.planner.calibrate import TracedRun, calibrate
from megatron.adaptive.planner.model import LayerKind, Model
from megatron.adaptive.planner.pace import Pace
from megatron.adaptive.trace.read import RunTrace, read_run
from megatron.adaptive.trace.synthetic import SyntheticRun, write_synthetic


def _stage(layers: int, parts: Sequence[float], pace: Pace, cores: int = 2) -> Beside:
    """One whose layers take 10 ms each while all cores work, at the speeds of a pace."""
    speeds = [0.0] + [pace.speed(number, cores) for number in range(1, len(parts))]
    # Parts are those of its time: its work is that time at the mean speed.
    seconds = 0.01 * layers / float(np.dot(parts, speeds))
    return Beside(
        counts=np.array([float(layers)]),
        seconds=np.array([seconds]),
        parts=np.array([parts]),
        cores=cores,
    )


def test_speeds() -> None:
    pace = Pace(alone=1.4, crowded=0.8)
    assert [pace.speed(n, 3) for n in (1, 2, 3, 6)] == pytest.approx([1.4, 1.2, 1.0, 0.4])
    assert pace.speed(1, 1) == 1.0
    assert pace.speed(7, 0) == 1.0
    assert Pace().speed(4, 2) == 0.5


@pytest.mark.parametrize(("alone", "crowded"), [(1.0, 1.0), (1.3, 0.8), (1.0, 0.7), (1.5, 1.0)])
def test_pace_is_found(alone: float, crowded: float) -> None:
    pace = Pace(alone=alone, crowded=crowded)
    group = [
        _stage(6, (0, 1, 0, 0, 0), pace),
        _stage(6, (0, 0, 1, 0, 0), pace),
        _stage(4, (0, 0.4, 0.6, 0, 0), pace),
        _stage(6, (0, 0, 0, 0, 1), pace),
        _stage(2, (0, 0.1, 0.2, 0.3, 0.4), pace),
    ]
    found = fit_pace([group])
    assert found.alone == pytest.approx(alone, abs=0.03)
    assert found.crowded == pytest.approx(crowded, abs=0.03)


def test_runs_that_do_not_tell_change_nothing() -> None:
    busy = [_stage(layers, (0, 0, 1, 0, 0), Pace()) for layers in (2, 4)]
    assert fit_pace([busy]) == Pace(alone=pytest.approx(1.0), crowded=1.0)
    assert fit_pace([]) == Pace()
    # Only a crowd: what its layers would take without one is not known.
    assert fit_pace([[_stage(6, (0, 0, 0, 0, 1), Pace(crowded=0.5))]]).crowded == 1.0


def test_a_pace_has_limits() -> None:
    odd = [_stage(6, (0, 1, 0), Pace(alone=9.0)), _stage(6, (0, 0, 1), Pace())]
    assert fit_pace([odd]).alone == MOST
    slow = [_stage(6, (0, 1, 0), Pace(alone=0.5)), _stage(6, (0, 0, 1), Pace())]
    assert fit_pace([slow]).alone == 1.0


def test_work_is_what_all_cores_busy_would_take() -> None:
    parts = np.array([[0, 0.5, 0.5, 0, 0], [0, 0, 0, 0, 1.0], [0, 0, 0, 0, 0]])
    work = work_s(np.array([1.0, 1.0, np.nan]), parts, Pace(alone=1.2, crowded=0.8), 2)
    assert work[:2] == pytest.approx([1.1, 0.4])
    assert np.isnan(work[2])


def _run(folder: Path, **changes: object) -> RunTrace:
    settings: dict[str, object] = {"num_ranks": 2, "schedule": "gpipe", "iterations": 6}
    write_synthetic(folder, SyntheticRun(**(settings | changes)))  # type: ignore[arg-type]
    return read_run(folder)


def test_a_trace_tells_how_many_were_at_work(tmp_path: Path) -> None:
    run = _run(tmp_path, num_microbatches=1, hosts=1)
    found = crowds(run, run.complete_iterations(), 1)
    # One microbatch: no rank ever works beside another.
    for rank in (0, 1):
        assert found[rank][0, :2, 1] == pytest.approx([1.0, 1.0], abs=0.02)
        assert not found[rank][0, 2].any()  # it has no weight gradients of their own
    many = _run(tmp_path / "many", num_microbatches=16, hosts=1)
    parts = crowds(many, many.complete_iterations(), 1)
    assert parts[0][0, 0, 2] > 0.8
    assert parts[1].sum(axis=-1)[0, :2] == pytest.approx([1.0, 1.0])
    apart = _run(tmp_path / "apart", num_microbatches=16, hosts=2)
    assert not crowds(apart, apart.complete_iterations(), 1)[0][0, :, 2].any()


def test_a_crowded_run_tells_its_loss_and_no_layers(tmp_path: Path) -> None:
    kinds = {"transformer": LayerKind(name="transformer", parameters=1000, forward_flops=1.0)}
    model = Model(name="made up", kinds=kinds, layers=("transformer",) * 8)
    quiet: dict[str, object] = {"num_microbatches": 64, "action_sigma": 0.0, "layers": 4}
    one = _run(tmp_path / "one", **quiet)
    host = one.ranks[0].header.host
    calm = TracedRun(trace=one, micro_batch=1, cores={host: 2})
    # On one core two ranks take two and a half times as long: a fifth is lost.
    slow = _run(tmp_path / "two", **quiet, forward_s=0.025, backward_s=0.025, weight_s=0.025)
    full = TracedRun(trace=slow, micro_batch=1, cores={host: 1})
    assert calm.crowd == 1.0
    assert full.crowd == 2.0
    assert replace(calm, cores={}).crowd == 1.0
    alone, both = calibrate(model, [calm]), calibrate(model, [calm, full])
    times = [found.times("transformer", "cpu", 1, 1).forward_s for found in (alone, both)]
    assert times == pytest.approx([0.0025, 0.0025], rel=0.05)
    assert both.paces["cpu"].crowded == pytest.approx(0.8, abs=0.06)
    assert both.optimizer_s_per_parameter == alone.optimizer_s_per_parameter
    assert calibrate(model, [replace(calm, cores={})]).paces == {}
    # All that is known is better than nothing.
    only = calibrate(model, [full]).times("transformer", "cpu", 1, 1).forward_s
    assert only == pytest.approx(0.5 * 0.00625, rel=0.15)
