"""Describes what a simulated step has to do: how long every action and message takes.

Owns durations, links, the profile that they are read from, and random factors. These are drawn
before the step, per pipeline stage and microbatch, so that the same seed gives every schedule the
same work. Whole picoseconds, so that two moments meant to coincide do, however their times were
summed.

``docs/schedules.md`` has the form of the profile, a JSON file; its ``latency_s`` and
``occupancy_s`` are those of every link that ``links`` does not name (see :class:`Link`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from megatron.adaptive.config.input_files import read_json
from megatron.adaptive.config.schema_files import check_form
from megatron.adaptive.errors import ConfigError, ScheduleError
from megatron.adaptive.schedule.stage_placement import Placement

PS_PER_S = 10**12
_LONGEST_S = 10**5
_LISTS = ("forward_s", "backward_s", "weight_s", "recompute_s", "exchange_s", "rank_factors")
_SIGMAS = ("action_sigma", "microbatch_sigma", "latency_sigma")


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Holds the seconds of one microbatch on each stage.

    Attributes:
        forward_s: seconds of a forward, per stage in pipeline order.
        backward_s: seconds of a backward by inputs, per stage; of the whole one where there are no
            ``weight_s``.
        weight_s: seconds of the weight gradients, per stage; empty for none. A whole backward takes
            both.
        recompute_s: seconds that every backward spends on repeating its forward, per stage; empty
            for none.
        exchange_s: seconds of a forward, and as many of a backward, that pass in communication
            within the stage (experts' all-to-alls), per stage; empty for none.
        exchanges: number of these communications in each forward and backward.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...] = ()
    recompute_s: tuple[float, ...] = ()
    exchange_s: tuple[float, ...] = ()
    exchanges: int = 0

    @classmethod
    def equal(
        cls,
        num_stages: int,
        *,
        forward_s: float,
        backward_s: float,
        weight_s: float = 0.0,
        exchange_s: float = 0.0,
        exchanges: int = 0,
    ) -> StageTimes:
        """Returns the same times on every stage."""
        return cls(
            forward_s=(forward_s,) * num_stages,
            backward_s=(backward_s,) * num_stages,
            weight_s=(weight_s,) * num_stages,
            exchange_s=(exchange_s,) * num_stages if exchanges else (),
            exchanges=exchanges,
        )


@dataclass(frozen=True, kw_only=True)
class Link:
    """Describes what delays a message between two ranks.

    Attributes:
        latency_s: seconds from leaving the link to arriving.
        occupancy_s: seconds that a message keeps the link busy (bytes over bandwidth); the next one
            in the same direction waits for it.

    Raises:
        ScheduleError: a value is negative or not finite.
    """

    latency_s: float = 0.0
    occupancy_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("latency_s", "occupancy_s"):
            _check_number(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class StageProfile:
    """Holds times of a pipeline's stages and links, measured or made up.

    Random factors are lognormal with mean 1; a sigma is that of the logarithm.

    Attributes:
        times: per stage.
        link: every link that ``links`` does not name.
        links: others, by ``(from rank, to rank)``.
        rank_factors: how many times longer each rank takes for everything, ``None`` for 1.
        action_sigma: spread of every action's own factor.
        microbatch_sigma: that of a factor that all actions of a microbatch share, as when
            microbatches have different lengths.
        latency_sigma: that of the latency of each message.
        microbatch_factors: how many times the mean each microbatch took, for each measured step;
            empty where microbatches are alike.

    Raises:
        ScheduleError: a sigma is negative or not finite.
    """

    times: StageTimes
    link: Link = field(default_factory=Link)
    links: dict[tuple[int, int], Link] = field(default_factory=dict)
    rank_factors: tuple[float, ...] | None = None
    action_sigma: float = 0.0
    microbatch_sigma: float = 0.0
    latency_sigma: float = 0.0
    microbatch_factors: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        for name in _SIGMAS:
            _check_number(name, getattr(self, name))

    def factors_of(self, seed: int, num_microbatches: int) -> tuple[float, ...] | None:
        """Returns the factors of one step; ``None`` where none of so many microbatches is known."""
        known = [one for one in self.microbatch_factors if len(one) == num_microbatches]
        return known[seed % len(known)] if known else None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Holds the drawn times of one step, in whole picoseconds.

    Attributes:
        durations_ps: ``[3, stages, microbatches] int64``, kinds F, B, W.
        delays_ps: ``[2, stages, microbatches] int64``, latency of the message after an F or B.
        occupancy_ps: ``[ranks, ranks] int64``, from and to.
        exchanges_ps: ``[2, stages, microbatches] int64``, the part of each F and B that is
            communication within the stage; ``None`` for none.
        cuts: communications that this part consists of.
    """

    durations_ps: Any
    delays_ps: Any
    occupancy_ps: Any
    exchanges_ps: Any = None
    cuts: int = 0


def draw(
    placement: Placement,
    num_microbatches: int,
    times: StageTimes | StageProfile,
    *,
    seed: int = 0,
    **more: Any,
) -> Workload:
    """Draws the times of one step.

    Args:
        placement: which rank holds which stage.
        num_microbatches: microbatches per step.
        times: per stage, or of a whole multiple of stages, each so many in a row running as one:
            schedules with one and with several chunks then get the same draws.
        seed: of all random factors; chooses among measured steps.
        **more: of a profile that has nothing but these ``times`` otherwise.

    Raises:
        ScheduleError: an argument is out of range.
    """
    profile = times if isinstance(times, StageProfile) else StageProfile(times=times, **more)
    times, rank_factors = profile.times, profile.rank_factors
    microbatch_factors = profile.factors_of(seed, num_microbatches)
    _check_times(placement, times)
    stages, ranks = placement.num_stages, placement.num_ranks
    fine = len(times.forward_s)
    where = [placement.locate(stage)[0] for stage in range(stages)]
    weight = times.weight_s or (0.0,) * fine
    recompute = times.recompute_s or (0.0,) * fine
    backward = [sum(pair) for pair in zip(times.backward_s, recompute, strict=True)]
    durations = np.array([times.forward_s, backward, weight])[:, :, None]
    shares = np.array(times.exchange_s or (0.0,) * fine) / np.maximum(
        durations[:2, :, 0], 1 / PS_PER_S
    )
    durations = np.broadcast_to(durations, (3, fine, num_microbatches))
    if microbatch_factors is not None:
        durations = durations * _factors(microbatch_factors, num_microbatches, "microbatch")
    latency, occupancy = _links(placement, profile.link, profile.links)
    delays = np.broadcast_to(latency[:, :, None], (2, stages, num_microbatches))
    if any(getattr(profile, name) for name in _SIGMAS):
        rng = np.random.default_rng(seed)
        durations = durations * _lognormal(rng, profile.action_sigma, durations.shape)
        durations = durations * _lognormal(rng, profile.microbatch_sigma, (num_microbatches,))
        # The message after a forward is that of the last of the stages that run as one, the one
        # after a backward that of the first.
        factors = _lognormal(rng, profile.latency_sigma, (2, fine, num_microbatches))
        group = fine // stages
        delays = delays * np.stack([factors[0, group - 1 :: group], factors[1, ::group]])

    def summed(values: Any) -> Any:
        values = values.reshape(-1, stages, fine // stages, num_microbatches).sum(axis=2)
        values = values * _factors(rank_factors, ranks, "rank")[where][None, :, None]
        return np.rint(values * PS_PER_S).astype(np.int64)

    return Workload(
        durations_ps=summed(durations),
        delays_ps=np.rint(delays * PS_PER_S).astype(np.int64),
        occupancy_ps=np.rint(occupancy * PS_PER_S).astype(np.int64),
        exchanges_ps=summed(durations[:2] * shares[:, :, None]) if times.exchanges else None,
        cuts=times.exchanges * (fine // stages),
    )


def order_by_cost(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Returns the order in which a pipeline best takes microbatches of unequal cost.

    Short ones fill and drain the pipeline, where every rank waits for one microbatch; long ones are
    in the middle, where ranks have other work meanwhile::

        costs        5 1 4 2 3 6
        taken as     1 3 5 6 4 2        more microbatches than ranks
                     1 2 3 4 5 6        no more than ranks: nothing but filling and draining

    Equal costs keep their order, so that equal lengths leave the given one. The order is fixed
    before the step, from costs alone: sums of gradients have one order on every rank.

    Args:
        costs: of each microbatch, in any unit (seconds, tokens).
        num_ranks: ranks of the pipeline.

    Returns:
        Indices into ``costs``, first to last.
    """
    ascending = sorted(range(len(costs)), key=costs.__getitem__)
    if len(costs) <= num_ranks or costs[ascending[0]] == costs[ascending[-1]]:
        return ascending
    return ascending[::2] + ascending[1::2][::-1]


def _links(
    placement: Placement, link: Link, links: Mapping[tuple[int, int], Link]
) -> tuple[Any, Any]:
    """Returns latency after F and B ``[2, stages]`` and occupancy ``[ranks, ranks]``."""
    ranks, stages = placement.num_ranks, placement.num_stages
    latency = np.zeros((2, stages))
    occupancy = np.zeros((ranks, ranks))
    for kind, step in ((0, 1), (1, -1)):
        for stage in range(stages):
            if 0 <= stage + step < stages:
                pair = placement.locate(stage)[0], placement.locate(stage + step)[0]
                one = links.get(pair, link)
                latency[kind, stage] = one.latency_s
                occupancy[pair] = one.occupancy_s
    return latency, occupancy


def _lognormal(rng: np.random.Generator, sigma: float, shape: tuple[int, ...]) -> Any:
    """Factors of mean 1; draws as many for sigma 0, so that other draws stay what they are."""
    return np.exp(sigma * rng.standard_normal(shape) - sigma * sigma / 2)


def _factors(factors: Sequence[float] | None, count: int, what: str) -> Any:
    if factors is None:
        return np.ones(count)
    if len(factors) != count:
        raise ScheduleError(f"{len(factors)} {what} factors for {count} {what}s: give one each")
    for at, factor in enumerate(factors):
        _check_number(f"factor of {what} {at}", factor)
    return np.array(factors)


def _check_times(placement: Placement, times: StageTimes) -> None:
    for name in (field_.name for field_ in fields(times) if field_.name != "exchanges"):
        what, values = name.removesuffix("_s"), getattr(times, name)
        if what in ("weight", "recompute", "exchange") and not values:
            continue
        if len(values) != len(times.forward_s) or len(values) % placement.num_stages:
            raise ScheduleError(
                f"{len(values)} {what} times for {placement.num_stages} stages: give one per stage"
            )
        for stage, value in enumerate(values):
            _check_number(f"{what} time of stage {stage}", value)
    for stage, exchange_s in enumerate(times.exchange_s):
        whole_s = min(times.forward_s[stage], times.backward_s[stage])
        if exchange_s > whole_s or not times.exchanges:
            raise ScheduleError(
                f"stage {stage} communicates {exchange_s} s in {times.exchanges} exchanges: it must"
                f" be part of its forward and its backward (at most {whole_s}), in 1 or more"
            )


def _check_number(what: str, value: float) -> None:
    if not (math.isfinite(value) and 0 <= value <= _LONGEST_S):
        raise ScheduleError(
            f"{what} is {value}: it must be a finite number, not negative and at most {_LONGEST_S}"
        )


def load_profile(path: Path, *, num_stages: int) -> StageProfile:
    """Reads a profile.

    Args:
        path: the file.
        num_stages: stages that it must describe.

    Raises:
        ScheduleError: the file cannot be read, or a value is missing, unknown or not a time.
    """
    try:
        data = read_json(path, "name a profile, see docs/schedules.md")
        check_form(data, "times", str(path))
    except ConfigError as error:
        raise ScheduleError(f"profile {error}") from error
    lists = {name: tuple(map(float, data.get(name, ()))) for name in _LISTS}
    factors = lists.pop("rank_factors")
    for name, values in lists.items():
        if name in data and len(values) != num_stages:
            raise ScheduleError(
                f"profile {path}: {name} has {len(values)} values: it needs {num_stages}, one per"
                " stage in pipeline order"
            )
    delays = {name: float(data.get(name, 0.0)) for name in ("latency_s", "occupancy_s")}
    links = {}
    for one in data.get("links", ()):
        its = {name: float(one.get(name, usual)) for name, usual in delays.items()}
        links[one["from"], one["to"]] = Link(**its)
    return StageProfile(
        times=StageTimes(**lists, exchanges=data.get("exchanges", 0)),
        link=Link(**delays),
        links=links,
        rank_factors=factors or None,
        action_sigma=float(data.get("action_sigma", 0.0)),
        microbatch_sigma=float(data.get("microbatch_sigma", 0.0)),
        latency_sigma=float(data.get("latency_sigma", 0.0)),
    )
