"""Which segments a stage gets: balanced by their weights, or as the user says."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.adaptive.config.partition import format_partition, parse_partition
from megatron.adaptive.errors import ConfigError

__all__ = ["balanced", "check_stages", "given_partition"]


def check_stages(num_segments: int, num_stages: int) -> None:
    """Refuse more stages than segments.

    Raises:
        ConfigError: names both numbers.
    """
    if num_stages > num_segments:
        raise ConfigError(
            f"{num_segments - 1} cut points make {num_segments} segments, and {num_stages} stages "
            f"were asked for: mark at least {num_stages - 1} cut points, or lower pipeline_size or "
            "chunks"
        )


def given_partition(
    given: str | Sequence[int], num_segments: int, num_stages: int
) -> tuple[int, ...]:
    """Read a user's partition, segments of each stage such as ``3-4-5``.

    Raises:
        ConfigError: it does not fit the model or the pipeline.
    """
    try:
        partition = parse_partition(given) if isinstance(given, str) else tuple(map(int, given))
    except ValueError as error:
        raise ConfigError(f"partition: {error}") from None
    if len(partition) != num_stages or min(partition) < 1 or sum(partition) != num_segments:
        raise ConfigError(
            f"partition {format_partition(partition)} was given for {num_segments} segments and "
            f"{num_stages} stages: give {num_stages} numbers from 1 on whose sum is {num_segments}"
        )
    return partition


def balanced(weights: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Divide segments so that the largest stage is as small as possible.

    Of several such divisions the one with the least sum of squares.

    Args:
        weights: what each segment costs, in any unit, at least 0.
        num_stages: stages, each of at least one segment.

    Raises:
        ConfigError: a weight is negative or not finite, or there are too few segments.
    """
    check_stages(len(weights), num_stages)
    for segment, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(
                f"weight {weight} of segment {segment}: give a finite number that is not negative"
            )
    before = [0.0]
    for weight in weights:
        before.append(before[-1] + weight)
    # best[end]: largest stage, sum of squares and stages of the segments up to `end`.
    best: list[tuple[float, float, tuple[int, ...]] | None] = [(0.0, 0.0, ())]
    best += [None] * len(weights)
    for _ in range(num_stages):
        grown: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (len(weights) + 1)
        for end in range(1, len(weights) + 1):
            for start in range(end):
                rest = best[start]
                if rest is None:
                    continue
                cost = before[end] - before[start]
                found = (max(rest[0], cost), rest[1] + cost * cost, (*rest[2], end - start))
                if grown[end] is None or found < grown[end]:  # type: ignore[operator]
                    grown[end] = found
        best = grown
    answer = best[-1]
    assert answer is not None
    return answer[2]
