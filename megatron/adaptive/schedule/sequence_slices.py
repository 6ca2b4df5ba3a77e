"""Computes where sequences are cut into slices in simulations, and the cost of each slice.

``config.sequence_slices`` explains the ways to cut, and cuts the sequences of a training run.
"""

from __future__ import annotations

import itertools

from megatron.adaptive.config.sequence_slices import SliceCut, cut_points
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.schedule import check_num_slices


def slice_bounds(
    num_slices: int, attention_share: float, cut: SliceCut = "equal-cost"
) -> tuple[float, ...]:
    """Returns the ends of the slices of a sequence of length 1.

    Args:
        num_slices: Number of slices, at least 1.
        attention_share: Attention's share of the cost of the whole sequence, from 0 to 1.
        cut: Way to cut.

    Returns:
        Bounds from 0 to 1, one more than there are slices.

    Raises:
        ScheduleError: An argument is out of range.
    """
    check_num_slices(num_slices)
    check_attention_share(attention_share)
    return cut_points(num_slices, attention_share if cut == "equal-cost" else 0.0)


def slice_costs(bounds: tuple[float, ...], attention_share: float) -> tuple[float, ...]:
    """Returns the cost of each slice as a share of the cost of the whole sequence.

    Args:
        bounds: Ends of the slices, as ``slice_bounds`` returns them.
        attention_share: Attention's share of the cost of the whole sequence, from 0 to 1.
    """
    return tuple(
        (1 - attention_share) * (end - start) + attention_share * (end * end - start * start)
        for start, end in itertools.pairwise(bounds)
    )


def check_attention_share(share: float) -> None:
    """Checks that attention's share of the cost is from 0 to 1.

    Raises:
        ScheduleError: The share is out of range or not a number.
    """
    if not 0 <= share <= 1:
        raise ScheduleError(
            f"attention share {share:g}: give attention's part of the time of a whole forward,"
            " from 0 to 1"
        )
