"""A profile: measured times of a pipeline's stages and links, as a JSON file.

::

    {"version": 1, "forward_s": [0.010, 0.011], "backward_s": [0.010, 0.012],
     "weight_s": [0.009, 0.010], "latency_s": 0.0002, "occupancy_s": 0.0011,
     "links": [{"from": 0, "to": 1, "latency_s": 0.003}], "rank_factors": [1.0, 1.3],
     "action_sigma": 0.1}

Times are seconds of one microbatch, one entry per stage in pipeline order; everything after
``backward_s`` may be left out. ``latency_s`` and ``occupancy_s`` are those of every link that
``links`` does not name (see ``workload.Link``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.workload import Link, StageTimes

__all__ = ["Profile", "load_profile"]

VERSION = 1
_LISTS = ("forward_s", "backward_s", "weight_s", "recompute_s", "rank_factors")
_NUMBERS = ("latency_s", "occupancy_s", "action_sigma", "microbatch_sigma", "latency_sigma")
_NAMES = ("version", *_LISTS, *_NUMBERS, "links")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What was measured.

    Attributes:
        times: per stage.
        link: every link that ``links`` does not name.
        links: others, by ``(from rank, to rank)``.
        rank_factors: how many times longer each rank takes, ``None`` for 1.
        action_sigma: spread of the actions' own factors, see ``workload.Jitter``.
        microbatch_sigma: spread of the microbatches' factors.
        latency_sigma: spread of the latencies.
    """

    times: StageTimes
    link: Link = field(default_factory=Link)
    links: dict[tuple[int, int], Link] = field(default_factory=dict)
    rank_factors: tuple[float, ...] | None = None
    action_sigma: float = 0.0
    microbatch_sigma: float = 0.0
    latency_sigma: float = 0.0


def load_profile(path: Path, *, num_stages: int) -> Profile:
    """Read a profile.

    Args:
        path: the file.
        num_stages: stages that it must describe.

    Raises:
        ScheduleError: the file cannot be read, or a value is missing, unknown or not a time.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ScheduleError(f"profile {path} cannot be read: {error}") from error
    if not isinstance(data, dict) or data.get("version") != VERSION:
        raise ScheduleError(
            f"profile {path} has version {data.get('version') if isinstance(data, dict) else None}:"
            f" this program reads version {VERSION}"
        )
    unknown = sorted(set(data) - set(_NAMES))
    if unknown:
        raise ScheduleError(f"profile {path} has {unknown[0]!r}: known are {', '.join(_NAMES)}")
    lists = {name: _list(path, data, name, num_stages) for name in _LISTS}
    numbers = {name: _number(path, name, data.get(name, 0.0)) for name in _NUMBERS}
    link = Link(latency_s=numbers.pop("latency_s"), occupancy_s=numbers.pop("occupancy_s"))
    factors = lists.pop("rank_factors")
    return Profile(
        times=StageTimes(**lists),
        link=link,
        links=_links(path, data.get("links", []), link),
        rank_factors=factors or None,
        **numbers,
    )


def _list(path: Path, data: dict[str, Any], name: str, num_stages: int) -> tuple[float, ...]:
    values = data.get(name)
    if values is None and name not in ("forward_s", "backward_s"):
        return ()
    given = len(values) if isinstance(values, list) else 0
    if not given or (name != "rank_factors" and given != num_stages):
        raise ScheduleError(
            f"profile {path} has {given} values of {name}: it needs a list of {num_stages}, one"
            " per stage in pipeline order"
        )
    assert isinstance(values, list)
    return tuple(_number(path, f"{name}[{at}]", value) for at, value in enumerate(values))


def _number(path: Path, name: str, value: Any) -> float:
    sound = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not sound or not 0 <= value < float("inf"):
        raise ScheduleError(
            f"profile {path} has {name} = {value}: it must be a finite number, not negative"
        )
    return float(value)


def _links(path: Path, entries: Any, link: Link) -> dict[tuple[int, int], Link]:
    links = {}
    for at, entry in enumerate(entries if isinstance(entries, list) else [None]):
        known = {"from", "to", "latency_s", "occupancy_s"}
        if not isinstance(entry, dict) or not {"from", "to"} <= set(entry) <= known:
            raise ScheduleError(
                f"profile {path} has links[{at}] = {entry}: it must have from and to (ranks) and"
                " latency_s, occupancy_s or both"
            )
        links[int(entry["from"]), int(entry["to"])] = Link(
            latency_s=_number(path, "latency_s", entry.get("latency_s", link.latency_s)),
            occupancy_s=_number(path, "occupancy_s", entry.get("occupancy_s", link.occupancy_s)),
        )
    return links
