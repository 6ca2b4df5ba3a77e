"""Simulates recorded steps with slices of a different length (``--slice-tokens``).

The trace contains the lengths of all documents in a step, and the number of slices of each
microbatch. A model is fitted to the recorded slices for each stage and kind of action. It has two
parameters: the time per token, and the time per pair of tokens that attend to each other. To
simulate a different slice length, the documents are packed again, and the fitted times are used.
All recorded slices have the same number of tokens, so a fixed time per action cannot be
distinguished from the time per token. Therefore, splitting is assumed to have no additional cost.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.adaptive.config.schedule_specs import PlacementKind
from megatron.adaptive.config.sequence_slices import LEAST_TOKENS, Cut, SliceRule
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.schedule.choose_slice_tokens import Timed, fit
from megatron.adaptive.schedule.microbatch_assignment import deal
from megatron.adaptive.schedule.pack_documents import first_fit
from megatron.adaptive.trace.read import RunTrace
from megatron.adaptive.trace.trace_format import TraceHeader
from megatron.adaptive.trace.whatif.operations import Floats, Operations
from megatron.adaptive.trace.whatif.replay import (
    ALIKE,
    RULE_STEPS,
    Counts,
    RecordedStep,
    candidate_for,
    recorded_replicas,
    simulated_s,
)

_MOST_TOKENS = 1 << 40
_RULES = ("adaptive", "auto")
"""Schedules for which other slice lengths are simulated."""


def token_repairs(
    run: RunTrace, ops: Operations, whole_s: float, notes: list[str]
) -> dict[tuple[str, str], float]:
    """Simulates the last steps of the run with shorter and longer slices.

    Args:
        run: Trace of the run.
        ops: Recorded operations of the steps.
        whole_s: Mean step time of the run in seconds.
        notes: List of caveats. If the run has slices, but other lengths cannot be simulated, the
            reason is appended.

    Returns:
        Mean step time in seconds, keyed by (description, flag) of the slice length.
    """
    header = next(iter(run.ranks.values())).header
    iterations = np.unique(ops.iteration)[-RULE_STEPS:].tolist()
    rows = {iteration: _rows(run, ops, iteration) for iteration in iterations}
    tokens = _tokens(rows.values())
    if header.num_slices > 1 or tokens is None or ops.where.num_stages == 1:
        return {}
    without = "other slice lengths are not simulated: "
    if header.schedule not in _RULES:
        notes.append(f"{without}the schedule must be {' or '.join(_RULES)}, not {header.schedule}")
        return {}
    steps = [_Step.of(ops, iteration, rows[iteration]) for iteration in iterations]
    whole = [step for step in steps if step is not None]
    if len(whole) < len(steps):
        notes.append(f"{without}actions are missing")
        return {}
    model = _Model(replace(header, schedule="adaptive"), whole, tokens)
    if (miss := model.miss) > ALIKE:
        notes.append(
            f"{without}with the recorded length, the simulated step differs by {miss:.0%} from the "
            "recorded one"
        )
        return {}
    sharing = _token_ranks(run, tokens)
    others = [
        n for n in (tokens // 4, tokens // 2, 2 * tokens) if n >= LEAST_TOKENS and n % sharing == 0
    ]
    now_s = model.mean_s(tokens)
    repairs = {}
    for n in others:
        # A run with slices of this length would fail with the same error, so do not suggest the
        # length.
        with contextlib.suppress(ConfigError):
            names = f"slices of {n} tokens, if they cost no extra time", f"--slice-tokens {n}"
            repairs[names] = whole_s - now_s + model.mean_s(n)
    return repairs


def _token_ranks(run: RunTrace, tokens: int) -> int:
    """Returns the number of ranks that share the tokens of a slice.

    The length of each slice must be a multiple of this number. Traces of earlier versions do not
    contain the number. For them, returns the tensor-parallel size, or 1 if ``tokens`` is not
    divisible by this size.
    """
    headers = [trace.header for trace in run.ranks.values()]
    recorded = max(header.token_ranks for header in headers)
    size = 1 + max(header.tp_rank for header in headers)
    if recorded > 0:
        return recorded
    return size if tokens % size == 0 else 1


@dataclass(frozen=True)
class _Row:
    """Describes a recorded microbatch and its documents.

    Attributes:
        positions: Number of tokens in the microbatch, including padding.
        documents: Number of tokens in each document of the microbatch.
        slices: Number of slices of the microbatch.
    """

    positions: int
    documents: tuple[int, ...]
    slices: int

    @property
    def is_sound(self) -> bool:
        """Whether all slices are equally long, and each contains at least one token of a document.

        The numbers in a damaged file may violate this condition.
        """
        of_slice, rest = divmod(self.positions, self.slices)
        before_last = self.positions - of_slice
        is_row = min(self.documents, default=0) > 0 and rest == 0 and self.positions < _MOST_TOKENS
        return is_row and before_last < sum(self.documents) <= self.positions


def _rows(run: RunTrace, ops: Operations, iteration: int) -> list[list[_Row]]:
    """Returns a list of the microbatches in ``iteration`` for each replica.

    The lists are empty if the lengths of the microbatches are unknown.
    """
    replicas = []
    for replica in range(int(ops.where.replica.max()) + 1):
        worker = int(np.flatnonzero(ops.where.replica == replica)[0])
        trace = run.ranks[int(ops.where.ranks[worker])]
        lengths = trace.lengths(iteration)
        slices = trace.slices(iteration)
        counts = (slices,) * len(lengths) if isinstance(slices, int) else slices
        pairs = zip(lengths, counts, strict=False)
        replicas.append([_Row(positions, tuple(of), n) for (positions, *of), n in pairs])
    return replicas


def _tokens(steps: Iterable[Sequence[Sequence[_Row]]]) -> int | None:
    """Returns the number of tokens per slice, or ``None`` if it differs between rows.

    The result is also ``None`` if no microbatch is split, or if a file is damaged.
    """
    rows = [row for step in steps for replica in step for row in replica]
    if not all(row.is_sound for row in rows):
        return None
    lengths = {row.positions // row.slices for row in rows}
    if len(lengths) != 1 or max(row.slices for row in rows) == 1:
        return None
    return lengths.pop()


@dataclass(frozen=True, eq=False)
class _Step:
    """Contains the documents, recorded times and microbatches of a step.

    Attributes:
        documents: Number of tokens in each document of all replicas.
        replicas: Recorded times of each replica, and the replica's recorded step time in seconds.
        cuts: Microbatches of each replica.
    """

    documents: list[int]
    replicas: list[tuple[RecordedStep, float]]
    cuts: list[list[Cut]]

    @classmethod
    def of(cls, ops: Operations, iteration: int, rows: Sequence[Sequence[_Row]]) -> _Step | None:
        """Returns the step of ``iteration``, or ``None`` if actions are missing.

        ``rows`` contains the microbatches of each replica.
        """
        replicas = recorded_replicas(ops, iteration)
        if replicas is None:
            return None
        cuts = []
        for (step, _), of_replica in zip(replicas, rows, strict=True):
            if sum(row.slices for row in of_replica) != step.durations_s.shape[2]:
                return None
            cuts.append([_cut(row.positions // row.slices, row.documents) for row in of_replica])
        documents = [n for of_replica in rows for row in of_replica for n in row.documents]
        return cls(documents, replicas, cuts)


def _cut(tokens: int, documents: Sequence[int]) -> Cut:
    """Returns the positions at which documents are split into slices of ``tokens`` tokens."""
    rule = SliceRule(slices=1, tokens=tokens, is_packed=True, varies=True)
    return rule.cut(-(-sum(documents) // tokens) * tokens, documents)


def _work(cuts: Sequence[Cut]) -> Floats:
    """Returns the number of tokens and the number of token pairs in each slice of ``cuts``.

    The result has the shape ``[slices, 2]``.
    """
    work = [cut.work(index) for cut in cuts for index in range(len(cut.ends))]
    return np.array(work, dtype=np.float64)


class _Model:
    """Holds the times fitted to a run, and simulates the run's steps with slices of any length.

    Args:
        header: Trace header of any rank, with the rule to simulate.
        steps: Recorded steps.
        tokens: Number of tokens per recorded slice.
    """

    def __init__(self, header: TraceHeader, steps: Sequence[_Step], tokens: int) -> None:
        self._header = header
        self._steps = steps
        self._recorded_tokens = tokens
        rows: dict[tuple[int, int], list[Timed]] = defaultdict(list)
        for step in steps:
            for (times, _), cuts in zip(step.replicas, step.cuts, strict=True):
                work = _work(cuts).tolist()
                for lane in np.ndindex(times.durations_s.shape[:2]):
                    seconds = times.durations_s[lane].tolist()
                    rows[lane] += [
                        Timed(tokens, pairs, s)
                        for (tokens, pairs), s in zip(work, seconds, strict=True)
                    ]
        stages = steps[0].replicas[0][0].durations_s.shape[1]
        self._parts = np.zeros((3, stages, 2))
        for lane, timed in rows.items():
            parts = fit(timed, has_fixed=False)
            self._parts[lane] = parts.token_s, parts.pair_s
        delays = [times.delays_ps for step in steps for times, _ in step.replicas]
        self._delay_ps = np.median(np.concatenate(delays, axis=2), axis=2)
        self._pieces = max(times.pieces for step in steps for times, _ in step.replicas)

    @property
    def miss(self) -> float:
        """Largest relative difference between the recorded and the simulated time of a step.

        Each step is simulated with the recorded durations, and with the durations that the fitted
        model predicts for the recorded slice length.
        """
        misses = []
        for step in self._steps:
            span_s = max(span for _, span in step.replicas)
            replayed_s = max(times.simulated_s(self._header) for times, _ in step.replicas)
            misses += [
                abs(s / span_s - 1) for s in (replayed_s, self._step_s(step, self._recorded_tokens))
            ]
        return max(misses)

    def mean_s(self, tokens: int) -> float:
        """Returns the mean step time in seconds with slices of ``tokens`` tokens.

        Raises:
            ConfigError: A step has too few documents for such slices.
        """
        return float(np.mean([self._step_s(step, tokens) for step in self._steps]))

    def _step_s(self, step: _Step, tokens: int) -> float:
        """Packs a step's documents into slices of ``tokens`` tokens, and simulates the step.

        Returns the time of the step in seconds.
        """
        documents, replicas = step.documents, len(step.replicas)
        rows = first_fit(documents, tokens, replicas, replicas)
        cuts = [_cut(tokens, [documents[number] for number in row]) for row in rows]
        shares: Sequence[Sequence[int]] = [range(len(cuts))]
        if replicas > 1:
            costs = [float((_work([cut]) @ self._parts.sum(axis=(0, 1))).sum()) for cut in cuts]
            shares = deal([costs] * replicas)
        return max(self._replica_s([cuts[number] for number in share], tokens) for share in shares)

    def _replica_s(self, cuts: Sequence[Cut], tokens: int) -> float:
        header = self._header
        work = _work(cuts)
        counts: Counts = tuple(len(cut.ends) for cut in cuts)
        durations = np.einsum("ksp,np->ksn", self._parts, work)
        share = tokens / self._recorded_tokens
        delays = np.repeat(
            np.rint(self._delay_ps * share).astype(np.int64)[:, :, None], len(work), 2
        )
        kind: PlacementKind = "v" if header.placement == "v" else "loop"
        candidate = candidate_for(
            header.schedule, header.num_ranks, header.num_chunks, counts, self._pieces, kind
        )
        actions = durations[0].size * (2 + self._pieces)
        return simulated_s(candidate, durations, delays, counts, actions)
