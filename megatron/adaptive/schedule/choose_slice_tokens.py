"""Chooses the length of slices by simulation, for ``--slice-tokens auto``.

The first steps run with two lengths of slices, such as 256 and 512 tokens. The documents of each
step, and therefore its slices, are known. On each stage the duration of an action is fitted as::

    fixed + per_token * tokens + per_pair * pairs          pairs: tokens that attend to each other

Slices of the same length have the same number of tokens, but different numbers of pairs. Slices of
a second length are needed to separate the fixed time from the time per token. With the fitted
times, the documents of the measured steps are packed and simulated with each length. The
simulations use the ``adaptive`` run-time rule with several limits on activations and, if stages may
move, with both placements. The length with the shortest steps is chosen. If several lengths have
nearly the same step time, the longest of these lengths is chosen.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from megatron.adaptive.config.number_text import number_text
from megatron.adaptive.config.sequence_slices import Cut
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import ActionKind, SliceCounts, mean_slices
from megatron.adaptive.schedule.catalog import Candidate
from megatron.adaptive.schedule.memory_caps import default_cap, with_rounding
from megatron.adaptive.schedule.numba_kernels import saves_time
from megatron.adaptive.schedule.policy import rule_of
from megatron.adaptive.schedule.rank_state import whole_sizes
from megatron.adaptive.schedule.simulate import SimResult
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import Link, Workload, work_of_items

_ALIKE = 0.01
"""Maximum relative difference between two step times that are treated as equal."""
_GAIN = 0.005
"""Minimum relative gain over settings that need less memory. Smaller gains are ignored."""
_FAR = 3.0
"""Multiple of the median residual above which an action is treated as an outlier."""


class Timed(NamedTuple):
    """Measured duration of an action on one slice.

    Attributes:
        tokens: Number of tokens of the slice.
        pairs: Number of (query, key) pairs of tokens for which attention is computed in the slice.
        seconds: Duration of the action.
    """

    tokens: float
    pairs: float
    seconds: float


class CostParts(NamedTuple):
    """Parts of an action's duration.

    Attributes:
        fixed_s: Fixed time per action in seconds, which does not depend on the length of the slice.
        token_s: Time in seconds per token.
        pair_s: Time in seconds per pair of tokens that attend to each other.
    """

    fixed_s: float
    token_s: float
    pair_s: float


Lanes = Mapping[tuple[ActionKind, int], Sequence[Timed]]
"""Measured actions, keyed by the kind of action and the pipeline stage."""
Parts = Mapping[tuple[ActionKind, int], CostParts]
"""Fitted parts of the actions' durations, keyed by the kind of action and the pipeline stage."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Pipeline for which a slice length is chosen.

    Attributes:
        placements: Placements of the stages to compare, starting with the current placement.
        weight_pieces: Number of W actions per weight gradient, or 0 if B computes weight gradients.
        link: Delays of all links that ``links`` does not contain, for messages of ``link_tokens``
            tokens.
        links: Delays of individual links, keyed by ``(sending rank, receiving rank)``.
        link_tokens: Number of tokens per message in the measurements of the links.
        room: Function that takes a slice length and a placement, and returns the number of tokens
            whose activations fit into the memory of every rank.
        cap: User's limit on the number of microbatches whose activations a rank holds, or ``None``.
    """

    placements: Sequence[Placement]
    weight_pieces: int
    link: Link
    links: Mapping[tuple[int, int], Link]
    link_tokens: int
    room: Callable[[int, Placement], float]
    cap: float | None = None


@dataclass(frozen=True, kw_only=True)
class TokensChoice:
    """Slice length that was chosen, with the rule to run.

    Attributes:
        tokens: Number of tokens of each slice.
        candidate: Run-time rule to run, with its settings, or ``None`` if this length must be
            measured first.
        text: Description of the decision, as one line for the log.
    """

    tokens: int
    candidate: Candidate | None
    text: str


def fit(rows: Sequence[Timed], *, has_fixed: bool = True) -> CostParts:
    """Fits the non-negative parts of an action's duration to measured durations.

    The parts are fitted twice. Outliers of the first fit, such as interrupted actions, are excluded
    from the second fit.

    Args:
        rows: Measured actions, at least one.
        has_fixed: Whether to fit a fixed time per action. If False, the whole duration is
            attributed to tokens and pairs.
    """
    table = np.array(rows, dtype=float)
    parts = _least_squares(table, has_fixed=has_fixed)
    misses = np.abs(table[:, 2] - _terms(table) @ parts)
    near = misses <= max(_FAR * float(np.median(misses)), 1e-12)
    return CostParts(*map(float, _least_squares(table[near], has_fixed=has_fixed)))


def _terms(table: Any) -> Any:
    return np.column_stack([np.ones(len(table)), table[:, 0], table[:, 1]])


def _least_squares(table: Any, *, has_fixed: bool) -> Any:
    """Fits the non-negative parts of an action's duration by least squares.

    Each row of ``table`` contains the tokens, pairs and seconds of a measured action. The fixed
    part is 0 if ``has_fixed`` is false.
    """
    terms, seconds = _terms(table), table[:, 2]
    sizes = np.maximum(np.abs(terms).max(axis=0), 1e-30)
    best, least = np.zeros(3), float(seconds @ seconds)
    columns = range(0 if has_fixed else 1, 3)
    subsets = (itertools.combinations(columns, number) for number in (1, 2, 3))
    for subset in map(list, itertools.chain.from_iterable(subsets)):
        scaled = terms[:, subset] / sizes[subset]
        solution, _, rank, _ = np.linalg.lstsq(scaled, seconds, rcond=1e-6)
        if rank < len(subset) or solution.min() < 0:
            continue
        missed = seconds - scaled @ solution
        # Accept a subset with more parts only if it reduces the residual by more than rounding
        # errors.
        if (squares := float(missed @ missed)) < least * (1 - 1e-9):
            least = squares
            best = np.zeros(3)
            best[subset] = solution / sizes[subset]
    return best


def choose_tokens(
    lengths: Sequence[int],
    lanes: Lanes,
    cuts_of: Callable[[int], Sequence[Sequence[Cut]]],
    setting: Setting,
    until_s: float,
) -> TokensChoice:
    """Chooses the slice length that gives the shortest simulated steps.

    Lengths are compared by their fastest schedules that fit into memory. If several lengths are
    almost equally fast, the longest of them is chosen.

    Args:
        lengths: Slice lengths to simulate, in tokens. The first length is simulated even after
            ``until_s``.
        lanes: Measured actions, keyed by kind and pipeline stage.
        cuts_of: Function that takes a slice length in tokens and returns the microbatches of each
            simulated step, in execution order.
        setting: Description of the pipeline.
        until_s: Value of ``time.monotonic`` after which no more steps are simulated.

    Raises:
        ScheduleError: No schedule fits into memory with any of the lengths.
    """
    parts = {lane: fit(rows) for lane, rows in lanes.items() if rows}
    best: dict[int, tuple[float, Candidate]] = {}
    planned = 0
    for tokens in lengths:
        if best and time.monotonic() >= until_s:
            break
        steps = cuts_of(tokens)
        for placement in setting.placements:
            works = [SlicedStep.of(cuts, parts, placement, setting) for cuts in steps]
            offered = list(fitting_candidates(works, placement, setting, tokens))
            planned += len(offered) * sum(step.num_actions(setting) for step in works)
            for candidate in offered:
                # Simulate at least one candidate for each length, even after the time limit.
                if tokens in best and time.monotonic() >= until_s:
                    break
                step_s = statistics.fmean(step.seconds(candidate, planned) for step in works)
                if tokens not in best or step_s < best[tokens][0] * (1 - _GAIN):
                    best[tokens] = step_s, candidate
    if not best:
        raise ScheduleError(
            f"no slice length fits into memory (tried: {', '.join(map(str, lengths))} tokens); "
            "lower --seq-length or recompute activations"
        )
    least_s = min(step_s for step_s, _ in best.values())
    chosen = max(n for n, (step_s, _) in best.items() if step_s <= least_s * (1 + _ALIKE))
    listed = ", ".join(f"{n}: {number_text(best[n][0] * 1e3, 4)} ms" for n in sorted(best))
    step_s, candidate = best[chosen]
    text = (
        f"auto takes slices of {chosen} tokens, {candidate}: simulated step "
        f"{number_text(step_s * 1e3, 4)} ms; simulated step times by slice length: {listed}"
    )
    return TokensChoice(tokens=chosen, candidate=candidate, text=text)


class SlicedStep(NamedTuple):
    """One step to simulate, with the durations of its actions.

    Attributes:
        work: Durations of all actions and messages.
        counts: Number of slices of each microbatch.
        least: Smallest limit on activations with which the step can run, in microbatches of mean
            size.
        row_tokens: Mean number of tokens per microbatch.
    """

    work: Workload
    counts: SliceCounts
    least: float
    row_tokens: float

    @classmethod
    def of(
        cls, cuts: Sequence[Cut], parts: Parts, placement: Placement, setting: Setting
    ) -> SlicedStep:
        """Computes the durations of a step's actions from its microbatches.

        Args:
            cuts: Microbatches of the step, in the order in which they run.
            parts: Fitted times of all actions.
            placement: Assignment of pipeline stages to ranks.
            setting: Description of the pipeline. Its placements are not used.
        """
        numbers = [len(cut.ends) for cut in cuts]
        counts: SliceCounts = numbers[0] if len(set(numbers)) == 1 else tuple(numbers)
        items = np.array([cut.work(n) for cut in cuts for n in range(len(cut.ends))], dtype=float)
        terms = np.column_stack([np.ones(len(items)), items])
        seconds = np.zeros((3, placement.num_stages, len(items)))
        for (kind, stage), of_lane in parts.items():
            seconds[tuple(ActionKind).index(kind), stage] = terms @ np.array(of_lane)
        mean = float(items[:, 0].mean())
        share = mean / setting.link_tokens

        def scaled(link: Link) -> Link:
            return replace(link, occupancy_s=link.occupancy_s * share)

        links = {pair: scaled(link) for pair, link in setting.links.items()}
        work = work_of_items(placement, seconds, scaled(setting.link), links, counts)
        sizes = tuple((items[:, 0] / mean).tolist())
        if len(set(sizes)) > 1:
            work = replace(work, sizes=sizes)
        least = max(whole_sizes(sizes, counts))
        return cls(work, counts, least, mean * mean_slices(counts))

    def num_actions(self, setting: Setting) -> int:
        """Returns the number of actions on all ranks in this step."""
        stages_and_items: int = self.work.durations_ps[0].size
        return stages_and_items * (2 + setting.weight_pieces)

    def cap_of(self, placement: Placement, cap: float | None) -> float:
        """Returns the limit on activations in this step, in microbatches of mean size.

        Args:
            placement: Assignment of pipeline stages to ranks.
            cap: Limit in microbatches of mean size, or ``None`` for the default limit. A limit
                below :attr:`least` is raised to :attr:`least`, as in a real step.
        """
        usual = default_cap(placement, self.num_microbatches, mean_slices(self.counts))
        return max(usual if cap is None else cap, self.least)

    def simulate(self, candidate: Candidate, planned: int) -> SimResult:
        """Simulates this step under a run-time rule.

        Args:
            candidate: Run-time rule with its settings.
            planned: Total number of actions in the completed and planned simulations.
        """
        raised = replace(candidate, cap=self.cap_of(candidate.placement, candidate.cap))
        policies = raised.policies(self.num_microbatches, self.counts)
        shared = rule_of(policies)
        compiled = shared is not None and saves_time(shared[0], planned)
        return raised.simulate(self.work, compiled=compiled, policies=policies)

    def seconds(self, candidate: Candidate, planned: int) -> float:
        """Returns the simulated step time in seconds. See :meth:`simulate` for the arguments."""
        return self.simulate(candidate, planned).makespan_s

    @property
    def num_microbatches(self) -> int:
        """Returns the number of microbatches in the step."""
        return self.work.num_microbatches


def fitting_candidates(
    steps: Sequence[SlicedStep], placement: Placement, setting: Setting, tokens: int
) -> Iterator[Candidate]:
    """Yields candidates for the ``adaptive`` run-time rule that fit into memory in all steps.

    Args:
        steps: Steps to simulate.
        placement: Assignment of pipeline stages to ranks.
        setting: Description of the pipeline.
        tokens: Number of tokens of each slice.
    """
    room = setting.room(tokens, placement)

    def fits(cap: float | None) -> bool:
        held = [step.cap_of(placement, cap) * step.row_tokens for step in steps]
        return max(held) <= with_rounding(room)

    # If a step's longest row is larger than the cap, the step raises its cap to the size of this
    # row. So with a cap of 1, each step has its smallest possible cap.
    if not fits(1.0):
        return
    most = min(room / step.row_tokens for step in steps)
    if setting.cap is not None:
        most = min(most, setting.cap)
    usual = statistics.median(
        default_cap(placement, step.num_microbatches, mean_slices(step.counts)) for step in steps
    )
    # A cap of ``None`` means that each step uses its default cap.
    caps: list[float | None] = [None] if fits(None) else []
    caps += [cap for cap in (usual / 1.5, 2 * usual) if cap >= 1 and fits(cap)]
    if setting.cap is not None or not caps:
        caps = [most]
    for cap in caps:
        for shares in (True, False)[: placement.num_chunks]:
            yield Candidate(
                name="adaptive",
                placement=placement,
                weight_pieces=setting.weight_pieces,
                cap=cap,
                shares=shares,
            )
