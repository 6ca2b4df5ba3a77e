"""Tests what a probe measures, in which order it measures, and how it detects outliers."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.adaptive import accelerator

accelerator.install()

from megatron.core.parallel_state import RankGenerator  # noqa: E402

from megatron.adaptive.errors import ConfigError  # noqa: E402
from megatron.adaptive.profiling.probe import Probe, _Check  # noqa: E402
from megatron.adaptive.profiling.probe_findings import (  # noqa: E402
    ALL_REDUCE,
    CLOCK,
    LARGE_MESSAGE,
    MATRIX_PRODUCT,
    MEASURES,
    WRITE,
    Figure,
    better_of,
    find_outliers,
)
from megatron.adaptive.profiling.probe_layout import (  # noqa: E402
    CONTEXT,
    DATA,
    EXPERT,
    TENSOR,
    ProbeLayout,
    batches,
)

from ..support.recorded_sleeps import record_sleeps  # noqa: E402


def figures(measure: str, values: Sequence[float], peers: str = "CPU") -> list[Figure]:
    return [
        Figure(measure=measure, ranks=(rank,), peers=peers, value=value)
        for rank, value in enumerate(values)
    ]


def links(values: Sequence[float]) -> list[Figure]:
    return [
        Figure(measure=LARGE_MESSAGE, ranks=(rank, rank + 1), peers="tcp", value=value)
        for rank, value in enumerate(values)
    ]


def test_groups_and_links_are_those_of_megatron_core() -> None:
    layout = ProbeLayout(world_size=48, tensor=2, context=2, pipeline=3, expert=4)
    core = RankGenerator(tp=2, ep=1, dp=4, pp=3, cp=2, order="tp-cp-ep-dp-pp")
    experts = RankGenerator(tp=2, ep=4, dp=2, pp=3, cp=1, order="tp-cp-ep-dp-pp")
    groups = layout.groups()
    for kind, name in ((TENSOR, "tp"), (CONTEXT, "cp"), (DATA, "dp")):
        assert sorted(groups[kind]) == sorted(map(tuple, core.get_ranks(name)))
    assert sorted(groups[EXPERT]) == sorted(map(tuple, experts.get_ranks("ep")))
    pipelines = core.get_ranks("pp")
    pairs = {pair for ranks in pipelines for pair in itertools.pairwise(ranks)}
    assert set(layout.links()) == pairs
    with_chunks = ProbeLayout(world_size=48, tensor=2, context=2, pipeline=3, chunks=2)
    assert set(with_chunks.links()) == pairs | {(ranks[0], ranks[-1]) for ranks in pipelines}


@pytest.mark.parametrize(
    ("sizes", "rule"),
    [
        ({"world_size": 6, "tensor": 4}, "multiple of tensor 4 x context 1 .*, got 6 ranks"),
        (
            {"world_size": 8, "tensor": 2, "expert": 3},
            "--expert-model-parallel-size must divide .*, got 3",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        ProbeLayout(**sizes)


def test_turns_have_each_subject_once_and_respect_processors() -> None:
    numbers = random.Random(5)
    for _ in range(50):
        world = numbers.randrange(2, 30)
        machines = [f"m{numbers.randrange(3)}" for _ in range(world)]
        most = [numbers.choice((1, 2, 8))] * world
        subjects = [
            tuple(sorted(numbers.sample(range(world), numbers.randrange(1, min(world, 4) + 1))))
            for _ in range(20)
        ]
        subjects = sorted(set(subjects))
        turns = batches(subjects, machines, most)
        assert sorted(ranks for batch in turns for ranks in batch) == subjects
        for batch in turns:
            ranks = [rank for subject in batch for rank in subject]
            assert len(set(ranks)) == len(ranks)
            for machine, count in Counter(machines[rank] for rank in ranks).items():
                here = [s for s in batch if machine in {machines[rank] for rank in s}]
                assert count <= most[0] or len(here) == 1


def test_one_slow_rank_is_named_with_the_median_of_the_others() -> None:
    hosts = [f"n{rank // 2}" for rank in range(6)]
    (outlier,) = find_outliers(
        figures(MATRIX_PRODUCT, [4e10, 4.1e10, 4e10, 2e10, 4e10, 4e10]), hosts
    )
    assert outlier.ranks == (3,)
    assert outlier.nodes == ("n1",)
    assert outlier.text == (
        "rank 3 on node n1: matrix product: 20 GFLOP/s, the others' median 40 GFLOP/s,"
        " 2.0 times slower"
    )
    assert outlier.remedy


def test_two_ranks_are_compared_with_each_other() -> None:
    assert [o.ranks for o in find_outliers(figures(MATRIX_PRODUCT, [4e10, 1e10]), "ab")] == [(1,)]
    assert not find_outliers(figures(MATRIX_PRODUCT, [4e10, 3.9e10]), "ab")


def test_noisy_figures_of_equal_ranks_give_hardly_an_outlier() -> None:
    numbers = random.Random(11)
    false_alarms = 0
    for _ in range(200):
        count = numbers.randrange(8, 64)
        spread = numbers.uniform(0.0, 0.15)
        values = [4e10 * numbers.lognormvariate(0, spread) for _ in range(count)]
        false_alarms += len(find_outliers(figures(MATRIX_PRODUCT, values), ["n"] * count))
    assert false_alarms <= 5, "there were too many false alarms among 7,000 figures"


def test_an_outlier_differs_more_than_repeated_measurements_of_the_others() -> None:
    """Checks that a rank at twice the median time is an outlier only if noise is smaller than that.

    The repeated measurements of the other ranks differ by the factor ``spread``.
    """
    hosts = ["n"] * 12

    def outliers(spread: float, slow: float) -> list[int]:
        first = figures(MATRIX_PRODUCT, [4e10 / spread] * 11 + [slow])
        again = figures(MATRIX_PRODUCT, [4e10] * 11 + [slow])
        return [o.ranks[0] for o in find_outliers(better_of(first, again), hosts)]

    assert outliers(1.1, 2e10) == [11]
    assert outliers(1.9, 2e10) == [11]
    assert outliers(2.5, 2e10) == []
    assert outliers(2.5, 1e10) == [11]


def test_the_variation_of_one_rank_hides_no_slow_rank() -> None:
    hosts = ["n"] * 4
    for count in (3, 4, 8):
        first = figures(MATRIX_PRODUCT, [1e9, 2e10, *[3.9e10] * (count - 2)])
        again = figures(MATRIX_PRODUCT, [4e10, 2e10, *[4e10] * (count - 2)])
        named = [o.ranks for o in find_outliers(better_of(first, again), hosts * 2)]
        assert named == [(1,)], count


def test_a_slow_rank_explains_its_links_and_a_slow_link_its_groups() -> None:
    hosts = [f"n{rank}" for rank in range(8)]
    slow = figures(MATRIX_PRODUCT, [4e10] * 7 + [1e10])
    messages = links([1e-3, 9e-3, 1e-3, 1e-3, 1e-3, 1e-3, 9e-3])
    groups = [
        Figure(measure=ALL_REDUCE, ranks=(rank, rank + 1), peers="tensor-parallel", value=value)
        for rank, value in ((0, 1e-3), (1, 9e-3), (3, 1e-3), (5, 9e-3), (6, 9e-3))
    ]
    groups += [
        Figure(measure=ALL_REDUCE, ranks=(rank, rank + 1), peers="tensor-parallel", value=1e-3)
        for rank in (2, 4)
    ]
    named = {(o.measure, o.ranks) for o in find_outliers([*slow, *messages, *groups], hosts)}
    assert named == {(MATRIX_PRODUCT, (7,)), (LARGE_MESSAGE, (1, 2)), (ALL_REDUCE, (5, 6))}


def test_the_data_sheet_counts_if_all_are_equally_slow() -> None:
    slow = [
        Figure(measure=CLOCK, ranks=(rank,), peers="gpu", value=0.8e9, sheet=2e9)
        for rank in range(4)
    ]
    outliers = find_outliers(slow, ["n"] * 4)
    assert [o.ranks for o in outliers] == [(0,), (1,), (2,), (3,)]
    assert all("the data sheet 2000 MHz" in o.text for o in outliers)


def test_a_failure_stays_and_the_better_figure_counts() -> None:
    failed = Figure(measure=WRITE, ranks=(2,), peers="folder", value=0.0, error="/x: No space left")
    first = [*figures(MATRIX_PRODUCT, [4e10, 1e10]), failed]
    second = figures(MATRIX_PRODUCT, [1e10, 4e10])
    kept = better_of(first, second)
    assert [figure.value for figure in kept] == [4e10, 4e10, 0.0]
    (outlier,) = find_outliers(kept, ["a", "b", "c"])
    assert outlier.text == f"rank 2 on node c: {WRITE} failed: /x: No space left"


@pytest.mark.parametrize("disturbed", range(2, 6))
def test_outliers_are_repeated_after_pauses(
    disturbed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks how often a probe measures a rank again whose first measurements are slow.

    The first ``disturbed`` measurements of the rank are slow.
    """
    measured: list[int] = []
    pauses_s = record_sleeps(monkeypatch)

    class FewRanks(Probe):
        def __init__(self) -> None:
            self._nodes = ["a", "b", "c"]
            self._job = SimpleNamespace(from_first=lambda seconds: seconds)  # type: ignore[assignment]

        def _checks(self) -> list[Any]:
            return [_Check([(0,), (1,), (2,)], lambda ranks: [])]

        def _each(self, check: _Check) -> list[Figure]:
            measured.append(len(check.subjects))
            slow = 1e10 if len(measured) <= disturbed else 4e10
            every = figures(MATRIX_PRODUCT, [4e10, slow, 4e10])
            return [figure for figure in every if figure.ranks in check.subjects]

    report = FewRanks().run()
    repeats = min(disturbed, 5) - 1
    assert measured == [3, 3] + [1] * min(repeats, 3)
    assert len(pauses_s) == len(measured) - 2
    assert sorted(pauses_s) == pauses_s
    assert [outlier.ranks for outlier in report.outliers] == [(1,)] * (disturbed == 5)


def test_every_measure_has_a_remedy() -> None:
    assert all(measure.remedy and measure.least_factor > 1 for measure in MEASURES.values())
