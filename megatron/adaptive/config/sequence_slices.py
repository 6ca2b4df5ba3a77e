"""Cuts sequences into slices, the pieces in which ``--sequence-slices`` runs a microbatch.

Most of a layer's work grows with the number of tokens. Attention grows with the number of pairs of
tokens, and a slice attends to all slices before it. With a share ``a`` of attention in the cost of
the whole sequence, the part from ``x`` to ``y`` of a sequence of length 1 costs

    (1 - a) (y - x) + a (y^2 - x^2)

So slices of equal length cost more towards the end, and slices of equal cost become shorter::

    equal-length    |    |    |    |    |     4 slices
    equal-cost      |       |    |   |  |

Only the positions of the cuts are computed here. ``gpt/sequence_slices.py`` cuts tensors, and keeps
the keys and values that later slices of a sequence need.

Source: TeraPipe, arXiv 2102.07988, and Seq1F1B, arXiv 2406.03488, cut sequences so that slices cost
the same, by a count of floating-point operations.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from megatron.adaptive.errors import ConfigError

SliceCut = Literal["equal-cost", "equal-length"]
"""Way to cut a sequence: into slices of equal cost, or of equal length."""
SLICE_CUTS: tuple[SliceCut, ...] = get_args(SliceCut)

LEAST_TOKENS = 16
"""Smallest number of tokens in a slice."""


def cut_points(num_slices: int, attention_share: float) -> tuple[float, ...]:
    """Returns where a sequence of length 1 is cut into slices of equal cost.

    Args:
        num_slices: Number of slices, at least 1.
        attention_share: Attention's share of the cost of the whole sequence, from 0 to 1; with 0,
            slices have the same length.

    Returns:
        Positions from 0 to 1, one more than there are slices.
    """
    linear = 1 - attention_share
    parts = [number / num_slices for number in range(num_slices + 1)]
    if attention_share == 0:
        return tuple(parts)
    # Solve linear x + share x^2 = part. This form of the root is exact for small shares, too.
    return tuple(
        2 * part / (linear + math.sqrt(linear * linear + 4 * attention_share * part))
        if part
        else 0.0
        for part in parts
    )


def slice_ends(
    length: int, slices: int, multiple: int = 1, attention_share: float = 0.0
) -> tuple[int, ...]:
    """Returns the ends of the slices of a sequence.

    Slices cost about the same; their lengths are rounded to ``multiple``, and no slice is shorter
    than :data:`LEAST_TOKENS`.

    Args:
        length: Number of tokens in the sequence.
        slices: Number of slices, at least 1.
        multiple: Number that divides the length of each slice, such as the number of
            tensor-parallel ranks among which each slice is divided.
        attention_share: Attention's share of the cost of the whole sequence, from 0 to 1; with 0,
            lengths differ by ``multiple`` at most.

    Returns:
        Position after the last token of each slice, ascending; the last one is ``length``.

    Raises:
        ConfigError: A slice would be too short, or the length is not a multiple of ``multiple``.
    """
    blocks, rest = divmod(length, multiple)
    if rest and slices > 1:
        raise ConfigError(
            f"--sequence-slices {slices} cuts sequences of {length} tokens at multiples of "
            f"{multiple} (tensor parallel ranks), which do not divide it: change --seq-length"
        )
    shortest = blocks // slices * multiple
    least = -(-LEAST_TOKENS // multiple)  # number of blocks
    if slices > 1 and shortest < LEAST_TOKENS:
        most = max(1, blocks // least)
        raise ConfigError(
            f"--sequence-slices {slices} cuts sequences of {length} tokens into slices of "
            f"{shortest}, and a slice has at least {LEAST_TOKENS}: give {most} or fewer"
        )
    ends = []
    for number, point in enumerate(cut_points(slices, attention_share)[1:-1], 1):
        # Leave room for the slices before and after.
        first, last = number * least, blocks - (slices - number) * least
        ends.append(min(max(math.floor(point * blocks + 1e-9), first), last) * multiple)
    return (*ends, length)
