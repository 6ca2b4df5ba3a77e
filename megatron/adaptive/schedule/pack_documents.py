"""Packs documents into rows, each of which is a microbatch."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.adaptive.errors import ConfigError


def first_fit(lengths: Sequence[int], room: int, unit: int = 1, least: int = 1) -> list[list[int]]:
    """Packs samples, longest first, into rows: each sample into the first row with enough room.

    A sample that is longer than ``room`` begins a row whose length is a multiple of ``room``.

    If this gives fewer rows than ``least``, or not a multiple of ``unit``, rows with the most
    samples are split.

    Source: D. S. Johnson, "Near-optimal bin packing algorithms", 1973, on first fit decreasing. It
    needs at most 11/9 of the minimum number of rows, plus one.

    Args:
        lengths: Number of tokens of each sample.
        room: Largest number of tokens per row. A longer row has a multiple of this number.
        unit: Number that must divide the number of rows.
        least: Smallest allowed number of rows.

    Returns:
        Rows, each a list of indices of samples. The indices in a row are ascending, and rows are
        sorted by their first index.

    Raises:
        ConfigError: There are fewer samples than rows.
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
            f"{len(lengths)} samples of a step cannot fill a multiple of {unit} microbatches, "
            f"but only {num_rows}; use a --global-batch-size of at least {num_rows}, a multiple of "
            f"{unit}"
        )
    while len(rows) < num_rows:
        largest = max(rows, key=lambda row: (len(row), sum(lengths[n] for n in row)))
        rows.append(largest[1::2])
        del largest[1::2]
    return sorted(sorted(row) for row in rows)
