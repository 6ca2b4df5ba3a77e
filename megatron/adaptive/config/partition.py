"""Layers per stage: reading and writing ``0-11-8-8``, and even splits.

Stages are in pipeline order; which rank holds which is the placement's to say. A stage may hold no
layer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["even_split", "format_partition", "nearly_even_split", "parse_partition", "parse_widths"]

_PATTERN = re.compile(r"[0-9]+(-[0-9]+)*")


def parse_partition(text: str) -> tuple[int, ...]:
    """Read layers per stage from ``0-11-8-8``.

    Raises:
        ValueError: the text is not whole numbers joined by ``-``.
    """
    if _PATTERN.fullmatch(text) is None:
        raise ValueError(
            f"{text!r} is not a partition, write the layers of each stage as in 0-11-8-8"
        )
    return tuple(int(part) for part in text.split("-"))


def parse_widths(text: str) -> tuple[int, ...]:
    """Read ranks per stage from ``2-1-1``.

    Raises:
        ValueError: the text is not whole numbers from 1 on joined by ``-``.
    """
    widths = tuple(map(int, text.split("-"))) if _PATTERN.fullmatch(text) else (0,)
    if min(widths) < 1:
        raise ValueError(f"{text!r} does not tell the ranks of each stage, write it as in 2-1-1")
    return widths


def format_partition(layers_per_stage: Sequence[int]) -> str:
    """Write layers per stage as ``0-11-8-8``; the inverse of :func:`parse_partition`."""
    return "-".join(str(layers) for layers in layers_per_stage)


def even_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """The same number of layers for each stage.

    Raises:
        ValueError: the layers do not divide evenly.
    """
    if num_stages < 1 or num_layers % num_stages != 0:
        raise ValueError(f"{num_layers} layers do not divide evenly into {num_stages} stages")
    return (num_layers // num_stages,) * num_stages


def nearly_even_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers per stage that differ by one at most, the inner stages taking the remainder.

    The outer stages also carry embedding and loss, so that a spare layer is best kept off them.
    """
    base, rest = divmod(num_layers, num_stages)
    first = (num_stages - rest + 1) // 2
    return tuple(base + (first <= stage < first + rest) for stage in range(num_stages))
