"""Tests that each microbatch is assigned to one replica, and that replicas take equal times."""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Callable

import numpy as np
import pytest

from megatron.adaptive.schedule.microbatch_assignment import EQUAL, Dealer, Measured, Size, deal
from tests.support.sliced_run import SlicedRun

# For each pipeline rank, these are the milliseconds per microbatch, per token, and per pair of
# tokens.
COSTS = ((5.0, 0.02, 1e-5), (3.0, 0.02, 1e-5))


def test_the_drawing_of_the_module() -> None:
    costs = [9.0, 5.0, 8.0, 4.0, 4.0, 2.0]
    assert deal([[1.5 * c for c in costs], costs]) == ((2, 3), (0, 1, 4, 5))


@pytest.mark.parametrize("seed", range(40))
def test_all_are_dealt_once_in_groups_and_no_replica_goes_without(seed: int) -> None:
    rng = random.Random(seed)
    replicas, group = rng.randint(1, 5), rng.randint(1, 3)
    least = rng.randint(1, 2 * group)
    count = replicas * group * (-(-least // group) + rng.randint(0, 4))
    costs = [
        [rng.uniform(0.5, 30) * rng.lognormvariate(0, 1) for _ in range(count)]
        for _ in range(replicas)
    ]
    dealt = deal(costs, group=group, least=least)
    assert sorted(n for share in dealt for n in share) == list(range(count))
    assert all(len(share) % group == 0 and len(share) >= least for share in dealt)


class Job:
    """Simulates steps on replicas of two ranks. Actions take the times of ``COSTS`` plus noise."""

    def __init__(self, mode: str, *, replicas: int = 2, noise: float = 0.03, seed: int = 1) -> None:
        self.rng, self.noise, self.replicas = random.Random(seed), noise, replicas
        self.dealer = Dealer(mode, replicas=replicas, ranks=2, pair=1e-3)
        self.said: list[str] = []

    def documents(self) -> Size:
        lengths = [min(2048, int(self.rng.lognormvariate(5.5, 0.8))) for _ in range(4)]
        return float(sum(lengths)), float(sum(length * length for length in lengths))

    def step(
        self, sizes: list[Size], slow: dict[int, float] | None = None
    ) -> tuple[list[int], float]:
        """Runs a step. Returns each replica's number of microbatches, and the relative step time.

        ``sizes`` contains the size of each microbatch. ``slow`` contains the factors by which some
        replicas are slower.

        The step time is relative to the shortest time that is possible with any assignment.
        """
        dealt = self.dealer.deal(sizes)
        factors = [(slow or {}).get(replica, 1.0) for replica in range(self.replicas)]
        measured: list[list[Measured]] = []
        ends: list[float] = []
        for factor, share in zip(factors, dealt, strict=True):
            ranks: list[Measured] = []
            for parts in COSTS:
                times = [factor * self.time(parts, sizes[n]) for n in share]
                noisy = [time * (1 + self.rng.gauss(0, self.noise)) for time in times]
                pairs = list(zip(noisy, (sizes[n] for n in share), strict=True))
                sums = (sum(t * size[axis] for t, size in pairs) for axis in (0, 1))
                ranks.append((sum(noisy), *sums))  # type: ignore[arg-type]
                ends.append(sum(times))
            measured.append(ranks)
        if (text := self.dealer.add(measured)) is not None:
            self.said.append(text)
        alone = max(sum(self.time(parts, size) for size in sizes) for parts in COSTS)
        return [len(share) for share in dealt], max(ends) * sum(1 / f for f in factors) / alone

    @staticmethod
    def time(parts: tuple[float, ...], size: Size) -> float:
        return parts[0] + parts[1] * size[0] + parts[2] * size[1]


def test_costs_are_fitted_and_times_equal() -> None:
    job = Job("lengths")
    late = [job.step([job.documents() for _ in range(32)])[1] for _ in range(30)][10:]
    assert sum(late) / len(late) < 1.02
    assert job.said == []
    for fit, (fixed, token, pair) in zip(job.dealer._fits, COSTS, strict=True):
        assert fit.parts[2] / fit.parts[1] == pytest.approx(pair / token, rel=0.25)
        assert fit.parts[0] / fit.parts[1] == pytest.approx(fixed / token, rel=0.6)


@pytest.mark.parametrize(("mode", "size"), [("both", Job.documents), ("speed", lambda job: EQUAL)])
def test_a_slow_replica_gets_less_within_three_steps_and_back(
    mode: str, size: Callable[[Job], Size]
) -> None:
    job = Job(mode, replicas=3)
    seen = [
        job.step([size(job) for _ in range(72)], {1: 1.5} if 10 <= step < 25 else {})
        for step in range(40)
    ]
    counts = [count for count, _ in seen]
    # The assignment must be nearly independent of noise. If the three replicas are equally fast,
    # each gets 24 microbatches. If the second replica is slow, it gets 18, and the others get 27
    # each.
    if mode == "speed":
        assert all(count == [24, 24, 24] for count in counts[4:11])
        assert all(17 <= count[1] <= 19 for count in counts[13:25])
        assert all(23 <= count[1] <= 25 for count in counts[28:])
    assert max(excess for _, excess in seen[13:25] + seen[28:]) < 1.06
    assert len(job.said) == 2
    slowness = [float(word) for word in re.findall(r"[0-9]+[.][0-9]+", job.said[0])]
    assert slowness == pytest.approx([1.0, 1.5, 1.0], rel=0.06)


def test_equal_microbatches_stay_where_workers_read_them() -> None:
    job = Job("speed", noise=0.01)
    for _ in range(6):
        job.step([EQUAL] * 12)
    assert job.dealer.deal([EQUAL] * 12) == (tuple(range(0, 12, 2)), tuple(range(1, 12, 2)))
    for _ in range(6):
        job.step([EQUAL] * 12, {0: 2.0})
    assert job.dealer.deal([EQUAL] * 12) == ((0, 2, 4, 6), (1, 3, 5, 7, 8, 9, 10, 11))


def test_one_slow_step_and_noise_change_nothing() -> None:
    job = Job("speed", noise=0.2)
    counts = [job.step([EQUAL] * 32, {0: 3.0} if step == 9 else {})[0] for step in range(30)]
    assert all(abs(count[0] - 16) <= 1 for count in counts)


def test_too_few_lengths_are_dealt_by_tokens_and_say_so_once() -> None:
    job = Job("lengths")
    sizes: list[Size] = [(100.0, 1e4)] * 8 + [(400.0, 1.6e5)] * 2
    counts = [job.step(sizes)[0] for _ in range(20)]
    assert counts == [[5, 5]] * 20
    assert job.said == [
        "microbatches are distributed over replicas by token count, because the first 8 steps had "
        "only 2 different lengths, too few to fit costs"
    ]


def test_a_replica_takes_long_microbatches_in_the_middle() -> None:
    dealer = Dealer("lengths", replicas=1, ranks=2, pair=1e-3)
    sizes = [(float(n), float(n * n)) for n in (50, 10, 40, 20, 30, 60)]
    assert dealer.deal(sizes) == ((1, 4, 0, 5, 2, 3),)
    assert dealer.deal(sizes[:2]) == ((1, 0),)


def test_a_replica_takes_rows_of_more_slices_than_ranks_first() -> None:
    sizes = [(float(n), float(n * n)) for n in (50, 10, 40, 40, 30, 60)]
    for tokens, order in ((29, (5, 0, 2, 3, 4, 1)), (30, (1, 2, 0, 5, 3, 4))):
        dealer = Dealer("lengths", replicas=1, ranks=2, pair=1e-3, slice_tokens=tokens)
        assert dealer.deal(sizes) == (order,)


def mean_step_s(chunks: int, tokens: int, *, by_slices: bool) -> float:
    """Returns the mean time in seconds of simulated steps on four ranks with a few long documents.

    Slices have ``tokens`` tokens. If ``by_slices`` is true, the order of microbatches may depend on
    this length.
    """
    rng = np.random.default_rng(1)
    seconds = []
    for _ in range(8):
        drawn = rng.lognormal(np.log(300), 1.5, 24)
        documents = tuple(np.clip(drawn, 16, 4096).astype(int).tolist())
        run = SlicedRun(documents=documents, tokens=tokens, num_ranks=4, num_chunks=chunks)
        sizes = [(float(sum(row)), float(sum(n * n for n in row))) for row in run.rows]
        of_slice = tokens if by_slices else None
        dealer = Dealer("lengths", replicas=1, ranks=4, pair=1e-3, slice_tokens=of_slice)
        (order,) = dealer.deal(sizes)
        seconds.append(run.step_s([run.rows[number] for number in order]))
    return statistics.fmean(seconds)


def test_steps_are_shorter_with_long_rows_first_on_one_chunk_per_rank() -> None:
    for chunks, low, high in ((1, 0.9, 0.99), (2, 1.0, 1.1)):
        first = mean_step_s(chunks, 512, by_slices=True)
        assert low < first / mean_step_s(chunks, 512, by_slices=False) < high
