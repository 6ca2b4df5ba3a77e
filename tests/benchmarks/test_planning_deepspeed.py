"""1F1B with messages that need both ranks, against hand-made timelines."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.planning.published.deepspeed import rendezvous_times


def _times(
    stages: int, microbatches: int, message_s: float, *, buffered: bool, launch_s: float = 0.0
) -> float:
    durations = np.array([[1.0] * stages, [2.0] * stages])
    return rendezvous_times(
        microbatches,
        durations,
        np.full((2, stages), message_s),
        launch_s=np.full((2, stages), launch_s),
        buffered=np.full((2, stages), buffered),
    ).seconds


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 1), (4, 8)])
def test_messages_that_take_no_time_leave_plain_1f1b(
    stages: int, microbatches: int, buffered: bool
) -> None:
    found = _times(stages, microbatches, 0.0, buffered=buffered)
    assert found == pytest.approx(3.0 * (microbatches + stages - 1))


def test_large_messages_hold_up_both_ranks() -> None:
    # Rank 0: F0 to 1, a0 to 1.5, F1 to 2.5, g0 from 4.5 (rank 1: F0 to 2.5, B0 to 4.5) to 5,
    # a1 to 5.5, B0 to 7.5. Rank 1: F1 to 6.5, B1 to 8.5, g1 to 9. Rank 0: B1 to 11.
    assert _times(2, 2, 0.5, buffered=False) == pytest.approx(11.0)


def test_small_messages_do_not_hold_up_a_slow_rank() -> None:
    durations = np.array([[1.0, 0.25], [2.0, 0.25]])
    message = np.full((2, 2), 0.5)
    none = np.zeros((2, 2))
    small, large = (
        rendezvous_times(
            6, durations, message, launch_s=none, buffered=np.full((2, 2), one)
        ).seconds
        for one in (True, False)
    )
    # Rank 0 works 18 s. Large messages hold it up by 1 s for each microbatch; of small ones only
    # the first gradient is late: F0 to 1, a0 at 1.5, g0 at 2.5, while F1 ends at 2.
    assert large == pytest.approx(24.0)
    assert small == pytest.approx(18.5)


def test_launching_is_hidden_only_where_a_rank_waits() -> None:
    alone = _times(1, 3, 0.0, buffered=True, launch_s=0.5)
    assert alone == pytest.approx(9.0)
    assert _times(2, 3, 0.0, buffered=True, launch_s=0.5) < _times(2, 3, 0.0, buffered=True)
