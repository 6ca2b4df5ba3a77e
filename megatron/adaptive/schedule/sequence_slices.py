"""Cuts sequences into slices, and computes the cost of each slice.

Most of a layer's work grows with the number of tokens. Attention grows with the number of pairs of
tokens, and a slice attends to all slices before it. With a share ``a`` of attention in the cost of
the whole sequence, the part from ``x`` to ``y`` of a sequence of length 1 costs

    (1 - a) (y - x) + a (y^2 - x^2)

So slices of equal length cost more towards the end, and slices of equal cost become shorter::

    equal-length    |    |    |    |    |     4 slices
    equal-cost      |       |    |   |  |

Source: TeraPipe, arXiv 2102.07988, and Seq1F1B, arXiv 2406.03488, cut sequences so that slices cost
the same. They count the floating-point operations of a model; here attention's share is given.
"""

from __future__ import annotations

import itertools
import math
from typing import Literal, get_args

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.schedule import check_num_slices

SliceCut = Literal["equal-cost", "equal-length"]
"""Way to cut a sequence: into slices of equal cost, or of equal length."""
SLICE_CUTS: tuple[SliceCut, ...] = get_args(SliceCut)


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
    parts = [number / num_slices for number in range(num_slices + 1)]
    if cut == "equal-length" or attention_share == 0:
        return tuple(parts)
    linear = 1 - attention_share
    # Solve linear x + share x^2 = part. This form of the root is exact for small shares, too.
    return tuple(
        2 * part / (linear + math.sqrt(linear * linear + 4 * attention_share * part))
        if part
        else 0.0
        for part in parts
    )


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
