"""What the measurements of the emulated pipeline are to show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.report import Row

from .competitors import BASELINE, COMPETITORS, PLUG_IN
from .report import Record, Shape, Speed, ratio

MAIN: Shape = (8, 32)
ADAPTIVE = "adaptive, V"
"""The policy that the speed goals are about."""
TIGHT = "hinted, V, memory p"
"""The policy for the memory of 1F1B."""
_OVER = (
    (ADAPTIVE, BASELINE, "jitter 0.3", 1.25),
    (ADAPTIVE, "megatron interleaved", "jitter 0.3", 1.08),
    (PLUG_IN, "megatron interleaved", "jitter 0.3", 1.14),
    (ADAPTIVE, BASELINE, "lengths", 1.4),
    (TIGHT, "zb-v", "quiet", 0.99),
)
"""Policy, rival, scenario, and the least ratio of their times."""


def goals(records: Sequence[Record], speeds: Sequence[Speed]) -> list[Row]:
    """Compare records and their speeds with the goals."""
    fixed = [found for found, _ in over_fixed(records, speeds, ADAPTIVE, MAIN, "jitter 0.3")]
    text = f"{ADAPTIVE} over the best fixed order in no more memory, jitter 0.3"
    return [
        *(
            _row(
                f"{policy} over {rival}, {scenario}",
                ratio(_of(records, MAIN, scenario), rival, policy),
                limit,
            )
            for policy, rival, scenario, limit in _OVER
        ),
        *(
            Row(what=f"{PLUG_IN}: activations held, {here}", value=speed.peak, unit="", goal=12.0)
            for speed in speeds
            if (speed.competitor, speed.shape) == (PLUG_IN, MAIN)
            and (here := speed.scenario) == "jitter 0.3"
        ),
        _row(text, min(fixed, default=None), 1.03),
        *(_never_slower(records, speeds, name) for name in (ADAPTIVE, TIGHT)),
        _simulation(speeds),
    ]


def over_fixed(
    records: Sequence[Record], speeds: Sequence[Speed], policy: str, shape: Shape, scenario: str
) -> Iterator[tuple[float, str]]:
    """How much longer each fixed order takes that held no more activations than the policy may.

    Yields:
        The ratio, and the fixed order with the scenario.
    """
    here = [speed for speed in speeds if speed.shape == shape and speed.scenario == scenario]
    cap = COMPETITORS[policy].cap_for(*shape)
    assert cap is not None
    for speed in here:
        if COMPETITORS[speed.competitor].is_policy or speed.peak > cap + 1e-6:
            continue
        value = ratio(_of(records, shape, scenario), speed.competitor, policy)
        if value is not None:
            where = f"{scenario}, {shape[0]} ranks, {shape[1]} microbatches"
            yield value, f"{speed.competitor}, {where}"


def _never_slower(records: Sequence[Record], speeds: Sequence[Speed], policy: str) -> Row:
    found = [
        one
        for shape, scenario in dict.fromkeys((speed.shape, speed.scenario) for speed in speeds)
        for one in over_fixed(records, speeds, policy, shape, scenario)
    ]
    value, where = min(found, default=(None, ""))
    text = f"{policy} over any fixed order in no more memory, worst"
    return _row(f"{text}: {where}" if where else text, value, 0.99)


def _simulation(speeds: Sequence[Speed]) -> Row:
    """Simulated by measured, or the inverse: the worst of all."""
    checks = [
        (min(speed.simulated_ratio, 1 / speed.simulated_ratio), speed)
        for speed in speeds
        if speed.simulated_ratio
    ]
    text = "agreement of simulation and measurement, worst"
    if not checks:
        return _row(text, None, 0.97)
    value, one = min(checks, key=lambda check: check[0])
    where = f"{one.num_ranks} ranks, {one.num_microbatches} microbatches"
    return _row(f"{text}: {one.competitor}, {one.scenario}, {where}", value, 0.97)


def _row(what: str, value: float | None, limit: float) -> Row:
    return Row(what=what, value=value, goal=limit, least=True)


def _of(records: Sequence[Record], shape: Shape, scenario: str) -> list[Record]:
    return [
        record
        for record in records
        if (record["num_ranks"], record["num_microbatches"]) == shape
        and record["scenario"] == scenario
    ]
