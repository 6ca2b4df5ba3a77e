"""Checks trace settings from a user's program: the profiled steps and ranks, and the collector."""

from __future__ import annotations

from collections.abc import Iterable

from megatron.adaptive.config.collector import collector_url, shown_url
from megatron.adaptive.errors import ConfigError


def require_profiled_steps(first: int, end: int) -> None:
    """Checks that there is at least one step to profile.

    Args:
        first: Index of the first step to profile.
        end: Index of the step after the last step to profile.

    Raises:
        ConfigError: There is no step to profile.
    """
    if first >= end:
        raise ConfigError(
            "profile_step_end must be greater than profile_step_start, got "
            f"profile_step_start={first} and profile_step_end={end}"
        )


def checked_profile_ranks(ranks: object) -> tuple[int, ...]:
    """Returns the ranks to profile as a tuple of integers.

    Args:
        ranks: Ranks to profile, from the user's code.

    Raises:
        ConfigError: ``ranks`` is not a list of ranks, or contains a value that is not a
            non-negative integer.
    """
    if isinstance(ranks, str) or not isinstance(ranks, Iterable):
        raise ConfigError(f"profile_ranks must be a list of ranks such as [0], got {ranks!r}")
    checked = tuple(ranks)
    for rank in checked:
        if type(rank) is not int or rank < 0:
            raise ConfigError(
                f"each rank in profile_ranks must be a non-negative integer, got {rank!r}"
            )
    return checked


def check_collector(target: str | None, trace_dir: str | None) -> None:
    """Checks the setting ``trace_otlp``, the URL of a span collector.

    Args:
        target: URL of a collector, or ``None`` if spans are not sent to a collector.
        trace_dir: Folder of the trace, or ``None`` if tracing is off.

    Raises:
        ConfigError: ``target`` is not an HTTP URL, or tracing is off.
    """
    if target is None:
        return
    collector_url("trace_otlp", target)
    if trace_dir is None:
        raise ConfigError(
            f"trace_otlp {shown_url(target)} requires trace_dir, because the collector receives "
            "the spans of a trace; pass trace_dir, or remove trace_otlp"
        )
