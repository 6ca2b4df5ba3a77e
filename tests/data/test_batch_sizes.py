"""Compares the batch sizes during a run with those that megatron-core calculates."""

from __future__ import annotations

import random

import pytest

from megatron.adaptive.config.data import BatchConfig
from megatron.adaptive.data.loader import BatchSizes


def sizes_of(
    global_batch: int, ramp: tuple[int, int, int] | None = None, *, micro: int = 1, copies: int = 1
) -> BatchSizes:
    config = BatchConfig(
        micro_batch_size=micro, global_batch_size=global_batch, rampup_batch_size=ramp
    )
    return BatchSizes(config, copies)


def batches(sizes: BatchSizes, train_samples: int) -> list[int]:
    """Returns the sizes of all batches in a run that trains at most ``train_samples`` samples.

    ``sizes`` determines the size of each batch.
    """
    drawn: list[int] = []
    while sum(drawn) + sizes.global_batch_size_at(sum(drawn)) <= train_samples:
        drawn.append(sizes.global_batch_size_at(sum(drawn)))
    return drawn


def test_constant_batch() -> None:
    sizes = sizes_of(16, micro=2, copies=4)
    assert [sizes.global_batch_size_at(samples) for samples in (0, 16, 10**9)] == [16, 16, 16]
    assert sizes.num_microbatches_at(0) == 2
    assert sizes.iterations_for(16 * 5 + 15) == 5
    assert sizes.iterations_for(15) == 0


def test_ramp_up_table() -> None:
    sizes = sizes_of(16, (4, 4, 48), micro=2, copies=2)
    # The batch size increases after 16, 32 and 48 samples.
    assert batches(sizes, 100) == [4, 4, 4, 4, 8, 8, 12, 12, 16, 16]
    assert [sizes.num_microbatches_at(samples) for samples in (0, 15, 16, 32, 48, 49)] == [
        1,
        1,
        2,
        3,
        4,
        4,
    ]


def random_case(rng: random.Random) -> tuple[int, int, int, tuple[int, int, int]]:
    micro, copies = rng.randrange(1, 4), rng.randrange(1, 4)
    unit = micro * copies
    start, increment = unit * rng.randrange(1, 5), unit * rng.randrange(1, 5)
    last = start + increment * rng.randrange(1, 40)
    return micro, copies, last, (start, increment, rng.randrange(1, 5000))


def test_ramp_up_equals_megatron_core() -> None:
    from megatron.core import num_microbatches_calculator

    calculator_class = getattr(
        num_microbatches_calculator, "RampupBatchsizeNumMicroBatchesCalculator", None
    )
    if calculator_class is None:
        pytest.skip("this megatron-core has no batch sizes that grow linearly")
    rng = random.Random(3)
    for _ in range(60):
        micro, copies, last, ramp = random_case(rng)
        sizes = sizes_of(last, ramp, micro=micro, copies=copies)
        calculator = calculator_class(last, micro, copies, False, 1, ramp[0], ramp[1], ramp[2])
        boundaries = [ramp[2] * part // 40 + shift for part in range(41) for shift in (-1, 0, 1)]
        for samples in (0, *filter(lambda count: count > 0, boundaries), ramp[2] * 3):
            calculator.update(samples, consistency_check=True)
            assert sizes.global_batch_size_at(samples) == calculator.get_current_global_batch_size()
            assert sizes.num_microbatches_at(samples) == calculator.get()


def test_iterations_are_the_batches_that_fit() -> None:
    rng = random.Random(4)
    for _ in range(60):
        micro, copies, last, ramp = random_case(rng)
        sizes = sizes_of(last, ramp, micro=micro, copies=copies)
        # The smallest numbers end the run while the batch size increases. The largest end it much
        # later.
        for train_samples in (0, ramp[0], rng.randrange(1, 2 * ramp[2] + 2 * last), 4 * ramp[2]):
            assert sizes.iterations_for(train_samples) == len(batches(sizes, train_samples))
