"""How far the run-time rule stays from proven optima (``benchmarks/optimal.json``)."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.registry import make_policies
from megatron.adaptive.schedule.simulate import simulate
from megatron.adaptive.schedule.workload import StageTimes

OPTIMA = Path(__file__).resolve().parents[2] / "benchmarks" / "optimal.json"
MEAN, WORST = 1.01, 1.05
UNIT_S = 1e-3


def distance(case: dict[str, object], cap: float) -> float:
    """Simulated makespan of ``adaptive`` over the optimum."""
    placement = Placement(
        num_ranks=case["ranks"],  # type: ignore[arg-type]
        num_chunks=case["chunks"],  # type: ignore[arg-type]
        kind=case["placement"],  # type: ignore[arg-type]
    )

    def seconds(name: str) -> tuple[float, ...]:
        return tuple(value * UNIT_S for value in case[name])  # type: ignore[attr-defined]

    times = StageTimes(
        forward_s=seconds("forward"), backward_s=seconds("backward"), weight_s=seconds("weight")
    )
    microbatches: int = case["microbatches"]  # type: ignore[assignment]
    result = simulate(
        placement,
        microbatches,
        make_policies("adaptive", placement, microbatches),
        times,
        latency_s=case["latency"] * UNIT_S,  # type: ignore[operator]
        cap=cap,
        weight_pieces=4,
        compiled=True,
    )
    return result.makespan_s / UNIT_S / case["optimum"]  # type: ignore[operator, no-any-return]


def test_with_memory_for_2p_the_rule_is_near_the_optimum() -> None:
    cases = json.loads(OPTIMA.read_text(encoding="utf-8"))["cases"]
    # No cap in the file: it could not bind. A cap of p is the business of ``hinted``.
    distances = [
        distance(case, 2.0 * case["ranks"])
        for case in cases
        if case["cap"] in (None, 2 * case["ranks"])
    ]
    assert len(distances) >= 60
    assert min(distances) >= 1 - 1e-9
    assert statistics.fmean(distances) <= MEAN
    assert max(distances) <= WORST
