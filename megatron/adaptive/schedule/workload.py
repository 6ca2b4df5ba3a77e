"""Defines the durations of all actions and messages of a simulated step.

The durations are mean durations of stages and links from a profile, multiplied by random factors.
The factors are drawn before the step, for each pipeline stage and microbatch. With the same seed,
every schedule therefore gets the same durations. Times are integers in picoseconds, so that sums do
not depend on the order of addition.

``docs/reference/schedules.md`` describes the JSON file of a profile. The fields ``latency_s`` and
``occupancy_s`` apply to every link that is not in ``links`` (see :class:`Link`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from megatron.adaptive.config.input_files import read_json
from megatron.adaptive.config.schema_files import check_form
from megatron.adaptive.config.sequence_slices import SliceCut, cut_points
from megatron.adaptive.errors import ConfigError, ScheduleError
from megatron.adaptive.schedule.action import SliceCounts
from megatron.adaptive.schedule.schedule import check_num_slices
from megatron.adaptive.schedule.stage_placement import Placement

PS_PER_S = 10**12
"""Number of picoseconds in a second."""
_LONGEST_S = 10**5
"""Maximum allowed time in seconds, and maximum allowed factor."""
_LISTS = ("forward_s", "backward_s", "weight_s", "recompute_s", "exchange_s", "rank_factors")
_SIGMAS = ("action_sigma", "microbatch_sigma", "latency_sigma")


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """The durations of one microbatch on each stage, in seconds.

    Attributes:
        forward_s: Duration of a forward pass (F), per stage in pipeline order.
        backward_s: Duration of a backward pass (B) without weight gradients, per stage. This
            includes weight gradients if ``weight_s`` is empty.
        weight_s: Duration of the weight gradients (W), per stage, or empty if ``backward_s``
            includes them. Under a schedule without W actions, B takes ``backward_s`` plus
            ``weight_s``.
        recompute_s: Time for recomputing activations in each backward pass, per stage, or empty if
            there is no recomputation.
        exchange_s: Time of communication within the stage (all-to-alls of experts) in a forward
            pass, per stage, or empty for no communication. The same time is assumed for a backward
            pass.
        exchanges: Number of communications within the stage in each F and in each B.
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
        """Returns times of ``num_stages`` stages that all have the given durations."""
        return cls(
            forward_s=(forward_s,) * num_stages,
            backward_s=(backward_s,) * num_stages,
            weight_s=(weight_s,) * num_stages,
            exchange_s=(exchange_s,) * num_stages if exchanges else (),
            exchanges=exchanges,
        )


@dataclass(frozen=True, kw_only=True)
class Link:
    """The delays of a message between two ranks.

    Attributes:
        latency_s: Time in seconds from the end of the transfer to the arrival.
        occupancy_s: Time in seconds for which a message occupies the link: its size divided by the
            bandwidth. The next message in the same direction waits until this time has passed.

    Raises:
        ScheduleError: A value is negative or not finite.
    """

    latency_s: float = 0.0
    occupancy_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("latency_s", "occupancy_s"):
            _check_number(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class StageProfile:
    """Measured or assumed durations of a pipeline's stages and links, with their variation.

    Random factors have a lognormal distribution with mean 1. A sigma is the standard deviation of
    the logarithm of a factor.

    Attributes:
        times: Mean durations of each stage.
        link: Delays of all links that are not in ``links``.
        links: Delays of individual links, keyed by ``(sending rank, receiving rank)``.
        rank_factors: Factor for the durations of all actions of each rank, or ``None`` for a factor
            of 1.
        action_sigma: Sigma of a separate random factor for each action.
        microbatch_sigma: Sigma of a random factor for all actions of a microbatch, for example
            because microbatches differ in length.
        latency_sigma: Sigma of a separate random factor for the latency of each message.
        microbatch_factors: Measured cost of each microbatch relative to the mean, in several steps,
            or empty if all microbatches are equal.
        attention_share: Attention's share of the duration of a whole forward pass, from 0 to 1. It
            determines the durations of slices, if sequences are cut. Attention is assumed to take
            twice as long in a backward pass as in a forward pass, and to have no weight gradients.
        slice_cut: Method of cutting sequences into slices.
        slice_s: Time in seconds that each slice after the first adds to a stage's forward pass of a
            whole microbatch, and to its backward pass. Slices take longer in total because small
            kernels use a device less efficiently.

    Raises:
        ScheduleError: A sigma, the attention share or the time of a slice is out of range.
    """

    times: StageTimes
    link: Link = field(default_factory=Link)
    links: dict[tuple[int, int], Link] = field(default_factory=dict)
    rank_factors: tuple[float, ...] | None = None
    action_sigma: float = 0.0
    microbatch_sigma: float = 0.0
    latency_sigma: float = 0.0
    microbatch_factors: tuple[tuple[float, ...], ...] = ()
    attention_share: float = 0.0
    slice_cut: SliceCut = "equal-cost"
    slice_s: float = 0.0

    def __post_init__(self) -> None:
        for name in (*_SIGMAS, "slice_s"):
            _check_number(name, getattr(self, name))
        check_attention_share(self.attention_share)

    def factors_of(self, seed: int, num_microbatches: int) -> tuple[float, ...] | None:
        """Returns the factors of the microbatches in a measured step.

        ``seed`` selects one of the measured steps with ``num_microbatches`` microbatches. The
        result is ``None`` if no such step was measured.
        """
        candidates = [step for step in self.microbatch_factors if len(step) == num_microbatches]
        return candidates[seed % len(candidates)] if candidates else None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The durations of all actions and messages in one step, in integer picoseconds.

    If sequences are cut into slices, microbatch indices count slices (see ``rank_kernel``).

    Attributes:
        durations_ps: Duration of each F, B and W, ``[3, stages, microbatches] int64``.
        delays_ps: Latency of the message after each F and B, ``[2, stages, microbatches] int64``.
        occupancy_ps: Time for which a message occupies the link between two ranks, ``[from rank, to
            rank] int64``.
        exchanges_ps: Part of each duration of F and B that is communication within the stage, ``[2,
            stages, microbatches] int64``, or ``None`` for no communication.
        cuts: Number of communications within the stage during each F and B.
        num_slices: Number of slices of each microbatch, or 1 for whole microbatches.
        sizes: Activation memory of each slice relative to the mean slice, or empty if all slices
            are equal.
    """

    durations_ps: Any
    delays_ps: Any
    occupancy_ps: Any
    exchanges_ps: Any = None
    cuts: int = 0
    num_slices: SliceCounts = 1
    sizes: tuple[float, ...] = ()

    @property
    def num_microbatches(self) -> int:
        """Returns the number of microbatches in the step. Slices are not counted separately."""
        if not isinstance(self.num_slices, int):
            return len(self.num_slices)
        items: int = self.durations_ps.shape[2]
        return items // self.num_slices


def work_of_items(
    placement: Placement,
    seconds: Any,
    link: Link,
    links: Mapping[tuple[int, int], Link],
    num_slices: SliceCounts,
) -> Workload:
    """Returns the workload of a step, given the durations of its actions in ``seconds``.

    Args:
        placement: Assignment of pipeline stages to ranks.
        seconds: Duration of each F, B and W, ``[3, stages, slices of all microbatches]``.
        link: Delays of a slice's message on all links that are not in ``links``.
        links: Delays of individual links, keyed by ``(sending rank, receiving rank)``.
        num_slices: Number of slices of each microbatch.
    """
    latency, occupancy = _links(placement, link, links)
    delays = np.broadcast_to(latency[:, :, None], (2, placement.num_stages, seconds.shape[2]))

    def in_ps(values: Any) -> Any:
        return np.rint(values * PS_PER_S).astype(np.int64)

    return Workload(
        durations_ps=in_ps(seconds),
        delays_ps=in_ps(delays),
        occupancy_ps=in_ps(occupancy),
        num_slices=num_slices,
    )


def draw(
    placement: Placement,
    num_microbatches: int,
    times: StageTimes | StageProfile,
    *,
    seed: int = 0,
    link: Link | None = None,
    links: Mapping[tuple[int, int], Link] | None = None,
    rank_factors: tuple[float, ...] | None = None,
    action_sigma: float = 0.0,
    microbatch_sigma: float = 0.0,
    latency_sigma: float = 0.0,
    microbatch_factors: tuple[tuple[float, ...], ...] = (),
    num_slices: int = 1,
) -> Workload:
    """Draws random factors, and returns the durations of all actions in one step.

    Args:
        placement: Assignment of pipeline stages to ranks.
        num_microbatches: Number of microbatches per step.
        times: Durations per stage, or a profile. Its number of stages may be a multiple of the
            placement's number of stages. Each stage of the placement then consists of several
            adjacent stages of ``times``, so that schedules with one and with several chunks get the
            same durations.
        seed: Random seed of all factors. It also selects one of the measured steps in
            ``microbatch_factors``.
        link: Delays of all links that are not in ``links``, or ``None`` for no delays. If ``times``
            is a profile, this argument and the following arguments except ``num_slices`` are
            ignored.
        links: Delays of individual links, keyed by ``(sending rank, receiving rank)``, or ``None``.
        rank_factors: Factor for the durations of all actions of each rank, or ``None`` for a factor
            of 1.
        action_sigma: Sigma of a separate random factor for each action, at least 0.
        microbatch_sigma: Sigma of a random factor for all actions of a microbatch, at least 0.
        latency_sigma: Sigma of a separate random factor for the latency of each message, at least
            0.
        microbatch_factors: Measured cost of each microbatch relative to the mean, in several steps,
            or empty if all microbatches are equal.
        num_slices: Number of slices into which each microbatch is cut. The profile's
            ``attention_share``, ``slice_cut`` and ``slice_s`` determine the durations and sizes of
            the slices.

    Raises:
        ScheduleError: An argument is out of range.
    """
    check_num_slices(num_slices)
    if isinstance(times, StageProfile):
        profile = times
    else:
        profile = StageProfile(
            times=times,
            link=link or Link(),
            links=dict(links or {}),
            rank_factors=rank_factors,
            action_sigma=action_sigma,
            microbatch_sigma=microbatch_sigma,
            latency_sigma=latency_sigma,
            microbatch_factors=microbatch_factors,
        )
    times = profile.times
    _check_times(placement, times)
    stages = placement.num_stages
    fine = len(times.forward_s)
    rank_of = [placement.locate(stage)[0] for stage in range(stages)]
    means = _mean_durations(times)
    shares = np.array(times.exchange_s or (0.0,) * fine) / np.maximum(means[:2], 1 / PS_PER_S)
    durations, lengths = _sliced(profile, means, num_slices)
    num_items = num_microbatches * num_slices
    factors = _factors(profile.factors_of(seed, num_microbatches), num_microbatches, "microbatch")
    durations = np.tile(durations, num_microbatches) * np.repeat(factors, num_slices)
    latency, occupancy = _links(placement, profile.link, profile.links)
    delays = np.broadcast_to(latency[:, :, None], (2, stages, num_items))
    if any(getattr(profile, name) for name in _SIGMAS):
        durations, delays = _with_spread(profile, durations, delays, seed, num_slices)

    def summed(values: Any) -> Any:
        values = values.reshape(-1, stages, fine // stages, num_items).sum(axis=2)
        factors = _factors(profile.rank_factors, placement.num_ranks, "rank")
        values = values * factors[rank_of][None, :, None]
        return np.rint(values * PS_PER_S).astype(np.int64)

    return Workload(
        durations_ps=summed(durations),
        delays_ps=np.rint(delays * PS_PER_S).astype(np.int64),
        occupancy_ps=np.rint(occupancy / num_slices * PS_PER_S).astype(np.int64),
        exchanges_ps=summed(durations[:2] * shares[:, :, None]) if times.exchanges else None,
        cuts=times.exchanges * (fine // stages),
        num_slices=num_slices,
        sizes=_relative_sizes(lengths) * num_microbatches,
    )


def _relative_sizes(lengths: Sequence[float]) -> tuple[float, ...]:
    """Returns ``lengths`` divided by their mean, or an empty tuple if all lengths are equal."""
    sizes = tuple(length * len(lengths) for length in lengths)
    return sizes if max(sizes) - min(sizes) > 1e-9 else ()


def _sliced(
    profile: StageProfile, durations: Any, num_slices: int
) -> tuple[Any, tuple[float, ...]]:
    """Computes the durations and lengths of the slices of a microbatch.

    Args:
        profile: Profile with the attention share and the method of cutting sequences.
        durations: Duration in seconds of each action on a whole microbatch, ``[3, stages]``.
        num_slices: Number of slices, at least 1.

    Returns:
        Durations in seconds, ``[3, stages, slices]``, and the length of each slice relative to the
        sequence.
    """
    if num_slices == 1:
        return durations[:, :, None], (1.0,)
    forward_s, backward_s, weight_s = durations
    attention_s = profile.attention_share * forward_s
    attention = np.stack([attention_s, np.minimum(2 * attention_s, backward_s), 0 * weight_s])
    share = float(attention.sum() / max(durations.sum(), 1 / PS_PER_S))
    bounds = slice_bounds(num_slices, min(share, 1.0), profile.slice_cut)
    lengths = slice_costs(bounds, 0.0)
    pairs = slice_costs(bounds, 1.0)
    linear = (durations - attention)[:, :, None] * np.array(lengths)
    added = np.array([1.0, 1.0, 0.0])[:, None, None] * profile.slice_s * (1 - 1 / num_slices)
    return linear + attention[:, :, None] * np.array(pairs) + added, lengths


def _with_spread(
    profile: StageProfile, durations: Any, delays: Any, seed: int, num_slices: int
) -> tuple[Any, Any]:
    """Multiplies the durations of actions and the delays of messages by random factors.

    Args:
        profile: Profile with the sigma of each kind of factor.
        durations: Duration of each action in seconds, ``[3, stages of the profile, microbatches]``.
        delays: Latency of each message in seconds, ``[2, stages of the placement, microbatches]``.
        seed: Random seed of the factors.
        num_slices: Number of slices of each microbatch.
    """
    _, fine, num_items = durations.shape
    rng = np.random.default_rng(seed)
    durations = durations * _lognormal(rng, profile.action_sigma, durations.shape)
    of_microbatches = _lognormal(rng, profile.microbatch_sigma, (num_items // num_slices,))
    durations = durations * np.repeat(of_microbatches, num_slices)
    # Several stages of the profile may form one stage of the placement. The last of them sends the
    # message after F, and the first sends the message after B. So use the factors of these two.
    factors = _lognormal(rng, profile.latency_sigma, (2, fine, num_items))
    group = fine // delays.shape[1]
    delays = delays * np.stack([factors[0, group - 1 :: group], factors[1, ::group]])
    return durations, delays


def _mean_durations(times: StageTimes) -> Any:
    """Returns the mean durations of F, B and W in ``times``, as an array ``[3, stages]``.

    The unit is seconds. Backward passes include recomputation.
    """
    none = (0.0,) * len(times.forward_s)
    recompute = times.recompute_s or none
    backward = [sum(pair) for pair in zip(times.backward_s, recompute, strict=True)]
    return np.array([times.forward_s, backward, times.weight_s or none])


def order_by_cost(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Returns the order in which a pipeline should run microbatches of unequal cost.

    While the pipeline fills and drains, ranks wait for single microbatches, so the first and the
    last microbatches should be cheap. Expensive microbatches run in between, when ranks have other
    work::

        costs        5 1 4 2 3 6
        order        1 3 5 6 4 2        more microbatches than ranks
                     1 2 3 4 5 6        no more than ranks: the pipeline only fills and drains

    Microbatches of equal cost keep their order. The order depends only on costs and is fixed before
    the step, so that every rank sums gradients in the same order.

    Args:
        costs: Cost of each microbatch in any unit, for example seconds or tokens.
        num_ranks: Number of ranks in the pipeline.

    Returns:
        Indices into ``costs``, in execution order.
    """
    ascending = sorted(range(len(costs)), key=costs.__getitem__)
    if len(costs) <= num_ranks or costs[ascending[0]] == costs[ascending[-1]]:
        return ascending
    return ascending[::2] + ascending[1::2][::-1]


def _links(
    placement: Placement, link: Link, links: Mapping[tuple[int, int], Link]
) -> tuple[Any, Any]:
    """Returns the message latency of each stage of ``placement``, and the occupancy of each link.

    Links that are not in ``links`` have the delays of ``link``. The arrays have the shapes ``[2,
    stages]`` (after F and B) and ``[ranks, ranks]``.
    """
    ranks = placement.num_ranks
    stages = placement.num_stages
    latency = np.zeros((2, stages))
    occupancy = np.zeros((ranks, ranks))
    for kind, step in ((0, 1), (1, -1)):
        for stage in range(stages):
            if 0 <= stage + step < stages:
                pair = placement.locate(stage)[0], placement.locate(stage + step)[0]
                between = links.get(pair, link)
                latency[kind, stage] = between.latency_s
                occupancy[pair] = between.occupancy_s
    return latency, occupancy


def _lognormal(rng: np.random.Generator, sigma: float, shape: tuple[int, ...]) -> Any:
    """Draws lognormal factors with mean 1, and returns them as an array of the shape ``shape``.

    Random numbers are drawn from ``rng`` even if sigma is 0, so that changing one sigma does not
    change the random numbers of the other factors.
    """
    return np.exp(sigma * rng.standard_normal(shape) - sigma * sigma / 2)


def _factors(factors: Sequence[float] | None, count: int, subject: str) -> Any:
    if factors is None:
        return np.ones(count)
    if len(factors) != count:
        raise ScheduleError(
            f"there must be {count} {subject} factors, one for each {subject}, got {len(factors)}"
        )
    for index, factor in enumerate(factors):
        _check_number(f"factor of {subject} {index}", factor)
    return np.array(factors)


def _check_times(placement: Placement, times: StageTimes) -> None:
    for name in (field_.name for field_ in fields(times) if field_.name != "exchanges"):
        label = name.removesuffix("_s")
        values = getattr(times, name)
        if label in ("weight", "recompute", "exchange") and not values:
            continue
        if len(values) != len(times.forward_s) or len(values) % placement.num_stages:
            raise ScheduleError(
                f"there must be one {label} time for each of the {placement.num_stages} stages, "
                f"got {len(values)}"
            )
        for stage, value in enumerate(values):
            _check_number(f"{label} time of stage {stage}", value)
    for stage, exchange_s in enumerate(times.exchange_s):
        whole_s = min(times.forward_s[stage], times.backward_s[stage])
        if exchange_s > whole_s or not times.exchanges:
            raise ScheduleError(
                f"stage {stage} spends {exchange_s} s on {times.exchanges} exchanges; there must "
                "be at least 1 exchange, and exchanges must not take longer than the forward pass "
                f"or the backward pass ({whole_s} s)"
            )


def _check_number(name: str, value: float) -> None:
    if not (math.isfinite(value) and 0 <= value <= _LONGEST_S):
        raise ScheduleError(f"{name} must be a finite number from 0 to {_LONGEST_S}, got {value}")


def load_profile(path: Path, *, num_stages: int) -> StageProfile:
    """Reads a profile of stages and links from a JSON file.

    Args:
        path: Path of the JSON file.
        num_stages: Number of stages that the profile must have.

    Raises:
        ScheduleError: The file cannot be read, a value is missing or invalid, or a key is unknown.
    """
    try:
        data = read_json(path, "specify a profile (its format is in docs/reference/schedules.md)")
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
    for entry in data.get("links", ()):
        values_s = {name: float(entry.get(name, usual)) for name, usual in delays.items()}
        links[entry["from"], entry["to"]] = Link(**values_s)
    return StageProfile(
        times=StageTimes(**lists, exchanges=data.get("exchanges", 0)),
        link=Link(**delays),
        links=links,
        rank_factors=factors or None,
        action_sigma=float(data.get("action_sigma", 0.0)),
        microbatch_sigma=float(data.get("microbatch_sigma", 0.0)),
        latency_sigma=float(data.get("latency_sigma", 0.0)),
    )


def slice_bounds(
    num_slices: int, attention_share: float, cut: SliceCut = "equal-cost"
) -> tuple[float, ...]:
    """Returns the bounds of the slices as fractions of the sequence length.

    Args:
        num_slices: Number of slices, at least 1.
        attention_share: Attention's share of the cost of the whole sequence, from 0 to 1.
        cut: Method of cutting the sequence into slices.

    Returns:
        ``num_slices + 1`` bounds, from 0 to 1.

    Raises:
        ScheduleError: An argument is out of range.
    """
    check_num_slices(num_slices)
    check_attention_share(attention_share)
    return cut_points(num_slices, attention_share if cut == "equal-cost" else 0.0)


def slice_costs(bounds: tuple[float, ...], attention_share: float) -> tuple[float, ...]:
    """Returns the cost of each slice as a fraction of the cost of the whole sequence.

    Args:
        bounds: Bounds of the slices, as returned by ``slice_bounds``.
        attention_share: Attention's share of the cost of the whole sequence, from 0 to 1.
    """
    return tuple(
        (1 - attention_share) * (end - start) + attention_share * (end * end - start * start)
        for start, end in itertools.pairwise(bounds)
    )


def check_attention_share(share: float) -> None:
    """Checks that ``share``, which is attention's fraction of the cost, is between 0 and 1.

    Raises:
        ScheduleError: The share is out of range or not a number.
    """
    if not 0 <= share <= 1:
        raise ScheduleError(
            "the attention share must be the fraction of a whole forward pass that attention "
            f"takes, from 0 to 1, got {share:g}"
        )
