"""Packs documents into rows. Each row becomes a microbatch."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.adaptive.errors import ConfigError


def first_fit(lengths: Sequence[int], room: int, unit: int = 1, least: int = 1) -> list[list[int]]:
    """Packs samples of the given lengths into rows, and returns the rows.

    Each sample, starting with the longest, is added to the first row with enough room. A sample
    that is longer than ``room`` starts a new row, whose length is a multiple of ``room``.

    If the number of rows is less than ``least``, or not a multiple of ``unit``, the rows with the
    most samples are split.

    Source: D. S. Johnson, "Near-optimal bin packing algorithms", 1973 (first fit decreasing). The
    number of rows is at most 11/9 of the minimum number, plus one.

    Args:
        lengths: Number of tokens of each sample.
        room: Maximum number of tokens per row. A sample longer than this gets a row with room for
            the next multiple of ``room``.
        unit: The number of rows must be a multiple of this number.
        least: Minimum number of rows.

    Returns:
        List of rows. Each row is a list of sample indices in ascending order. The rows are sorted
        by their first index.

    Raises:
        ConfigError: There are not enough samples for the required number of rows.
    """
    rows: list[list[int]] = []
    left: list[int] = []
    for sample in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[sample]
        row = next((n for n, free in enumerate(left) if free >= length), len(rows))
        if row == len(rows):
            rows.append([])
            left.append(-(-length // room) * room)
        rows[row].append(sample)
        left[row] -= length
    num_rows = -(-max(len(rows), least) // unit) * unit
    if num_rows > len(lengths):
        raise ConfigError(
            f"this step has {len(lengths)} samples, but needs at least {num_rows}, because the "
            f"number of microbatches must be a multiple of {unit}; increase --global-batch-size to "
            f"at least {num_rows}, in multiples of {unit}"
        )
    while len(rows) < num_rows:
        largest = max(rows, key=lambda row: (len(row), sum(lengths[n] for n in row)))
        rows.append(largest[1::2])
        del largest[1::2]
    return sorted(sorted(row) for row in rows)
