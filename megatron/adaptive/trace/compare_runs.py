"""Compares two traced runs, and finds the parts of the work that became slower or faster.

The comparison is based on the computing times of cells. A cell is one kind of action on one chunk
of one rank. The logarithms of the times are compared, so that relative changes can be added::

    change of a cell  =  everything + kind of action + rank + stage + kind of action on the rank

The changes are selected one at a time. Each time, the change that accounts for most of the
remaining difference is selected. A rank on which all kinds of actions became slower is therefore
reported as one change instead of three. The links, and the ranks that read data, are compared
separately.

If both runs recorded layers and collectives (``--trace-detail``), their times are also compared. A
layer is reported if it changed differently from the other layers on the same ranks. For each
process group, the transfer times and the waits for each rank are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron.adaptive.config.number_text import number_text
from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.diagnose.samples import (
    Floats,
    Measured,
    chance,
    measure,
    middle,
    spread,
    tame_mean,
)
from megatron.adaptive.trace.read import RunTrace, describe_numbers
from megatron.adaptive.trace.trace_format import DRAWN_ACTIONS

SURE = 3.5
"""Minimum size of a reported change, in standard errors."""

LEAST = 0.02
"""Minimum size of a reported change, as a fraction of the time in the first run."""

OF_STEP = 0.002
"""Minimum size of a reported change, as a fraction of a step. Not used for computing times."""

RANKS_DIFFER = 0.008
"""Standard deviation of a rank's change in speed between two runs with equal settings."""

FEWEST_LAYERS = 3
"""Minimum number of layers on the same ranks for comparing these layers with each other."""

MOST_CHANGES = 20
"""Maximum number of reported changes of computing time."""

_MEDIAN_ERROR = 1.25
"""Ratio of the standard error of a median to the standard error of a mean."""

_LEAST_ERROR = 1e-3
"""Minimum standard error assumed for the logarithm of a time."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Describes a part of the work whose time differs between two runs.

    Attributes:
        kind: Kind of change: ``everything``, ``action`` (one kind of action on all ranks),
            ``rank``, ``stage``, ``action on rank``, ``link``, ``data``, ``layer``, ``transfers``
            (of the collectives of a process group) or ``waits`` (of other ranks for a rank).
        ranks: Affected global ranks; for a link, the sender and the receiver.
        stages: Affected pipeline stages.
        action: Kind of action (F, B or W); empty if several kinds are affected.
        layer: Index of the layer in the model, or -1 if the change does not concern a single layer.
        collective: Kind of the process group and name of the operation; empty unless the change
            concerns collectives.
        before_ms: Time in ms in the first run: per message for ``link``, per read for ``data``, per
            step for ``layer``, ``transfers`` and ``waits``, and computing time per microbatch for
            all other kinds.
        after_ms: Time in ms in the second run, with the same meaning as ``before_ms``.
        confidence: Estimated probability that the change is not random, between 0.5 and 0.99.
    """

    kind: str
    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    action: str = ""
    layer: int = -1
    collective: str = ""
    before_ms: float
    after_ms: float
    confidence: float

    @property
    def relative(self) -> float:
        """Relative change of the time. Positive if the second run is slower."""
        return self.after_ms / self.before_ms - 1 if self.before_ms > 0 else math.inf

    @property
    def place(self) -> str:
        """Description of the affected part of the work for the user."""
        if self.kind == "everything":
            return "computing on all ranks"
        if self.kind == "link":
            return f"messages from rank {self.ranks[0]} to rank {self.ranks[1]}"
        rank = f"rank {self.ranks[0]}"
        if self.kind == "data":
            return f"reading data on {rank}"
        if self.kind == "layer":
            ranks = f"rank{'s' * (len(self.ranks) != 1)} {describe_numbers(self.ranks)}"
            return f"layer {self.layer} ({ranks})"
        if self.kind == "transfers":
            return f"transfers in {self.collective} on ranks {describe_numbers(self.ranks)}"
        if self.kind == "waits":
            return f"waits for {rank} in {self.collective}"
        if self.kind == "action":
            return f"{self.action} on all ranks"
        stages = f"stage{'s' * (len(self.stages) != 1)} {describe_numbers(self.stages)}"
        return f"{self.action} on {rank} ({stages})" if self.action else f"{rank} ({stages})"

    def format(self) -> str:
        """Returns the change as a line of text."""
        change = "slower" if self.relative > 0 else "faster"
        return (
            f"{self.place}: {abs(self.relative):.1%} {change}, {number_text(self.before_ms, 4)} -> "
            f"{number_text(self.after_ms, 4)} ms; confidence {self.confidence:.0%}"
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Contains the result of comparing two runs.

    Attributes:
        changes: Detected changes, sorted from the largest to the smallest relative change.
        before_ms: Median step time in ms of the first run.
        after_ms: Median step time in ms of the second run.
        error: Standard error of the ratio of the step times, as a fraction.
        iterations: Number of compared iterations of the first and the second run.
        notes: Caveats about the traces. Not included in the output of :meth:`format`.
    """

    changes: tuple[Change, ...]
    before_ms: float
    after_ms: float
    error: float
    iterations: tuple[int, int]
    notes: tuple[str, ...] = ()

    @property
    def relative(self) -> float:
        """Relative change of the step time. Positive if the second run is slower."""
        return self.after_ms / self.before_ms - 1

    def is_slower_by(self, limit: float) -> bool:
        """Returns whether the second run is significantly slower, and by more than ``limit``.

        Args:
            limit: Tolerated relative increase of the step time. If the increase may be random, the
                result is ``False``.
        """
        return self.relative > limit and self.relative > SURE * self.error

    def format(self) -> str:
        """Returns the comparison as text: the step time, followed by one line per change."""
        first, second = self.iterations
        is_sure = abs(self.relative) > SURE * self.error
        word = "slower" if self.relative > 0 else "faster"
        change = f"{abs(self.relative):.1%} {word}" if is_sure else "no certain change"
        lines = [
            f"a step takes {number_text(self.before_ms, 4)} -> {number_text(self.after_ms, 4)} ms: "
            f"{change} (medians of {first} and {second} iterations, standard error "
            f"{self.error:.1%})"
        ]
        lines += [f"  {change.format()}" for change in self.changes]
        if not self.changes:
            lines.append("  no part of the work changed by more than 2% and by more than the noise")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Returns the comparison as a dict for ``json.dumps``."""
        result = asdict(self)
        for fields, change in zip(result["changes"], self.changes, strict=True):
            fields |= {"place": change.place, "relative": change.relative}
        return {**result, "relative": self.relative}


def compare_runs(
    before: RunTrace,
    after: RunTrace,
    iterations: tuple[Sequence[int] | None, Sequence[int] | None] = (None, None),
) -> Comparison:
    """Finds the changes between two runs with the same pipeline shape.

    Args:
        before: Trace of the first run.
        after: Trace of the second run.
        iterations: Iterations to use from each run. ``None`` selects all except the first, or an
            evenly spaced sample if there are too many.

    Raises:
        TraceError: The runs have different shapes or too few iterations, or cannot be read.
    """
    _check_shapes(before, after)
    first, second = measure(before, iterations[0]), measure(after, iterations[1])
    for run, measured in ((before, first), (after, second)):
        if len(measured.iterations) < 3:
            raise TraceError(
                f"{run.origin} has {len(measured.iterations)} iterations after the first, but a "
                "comparison requires at least 3 iterations; record a longer run"
            )
    changes = [
        *_computing(first, second),
        *_links(first, second),
        *_data(first, second),
        *_layers((before, after), (first, second)),
        *_collectives(first, second),
    ]
    _, error = _difference(np.log(first.step_ns), np.log(second.step_ns))
    return Comparison(
        changes=tuple(sorted(changes, key=lambda change: -abs(change.relative))),
        before_ms=first.step / 1e6,
        after_ms=second.step / 1e6,
        error=float(error),
        iterations=(len(first.iterations), len(second.iterations)),
        notes=tuple(f"{run.origin}: {note}" for run in (before, after) for note in run.notes()),
    )


def _check_shapes(before: RunTrace, after: RunTrace) -> None:
    shapes = []
    for run in (before, after):
        header = run.ranks[min(run.ranks)].header
        layers = "-".join(map(str, header.layers))
        shapes.append(
            f"{len(run.ranks)} ranks ({run.num_ranks} per pipeline), {run.num_chunks} chunks per "
            f"rank, placement {header.placement}{f', {layers} layers per stage' * bool(layers)}"
        )
    if shapes[0] != shapes[1] or before.ranks.keys() != after.ranks.keys():
        raise TraceError(
            f"{before.origin} has {shapes[0]}, but {after.origin} has {shapes[1]}; compare runs of"
            " the same shape"
        )


def _difference(before: Floats, after: Floats) -> tuple[Any, Any]:
    """Returns the difference between the medians of ``after`` and ``before``.

    The medians are taken over the first axis. The second result is the standard error of the
    difference.
    """
    errors = [
        _MEDIAN_ERROR * spread(series, axis=0) / math.sqrt(len(series))
        for series in (before, after)
    ]
    error = np.maximum(_LEAST_ERROR, np.hypot(*errors))
    return middle(after, axis=0) - middle(before, axis=0), error


def _computing(first: Measured, second: Measured) -> Iterator[Change]:
    """Yields the changes in computing time between two runs.

    The change that accounts for most of the difference comes first.
    """
    with np.errstate(divide="ignore"):
        series = [np.log(tame_mean(m.action_ns.astype(np.float64))) for m in (first, second)]
    change, error = _difference(*series)
    # Assume for each cell (one kind of action on one chunk of a rank) at least the median noise of
    # all cells, because a few iterations may underestimate the noise of a single cell.
    error = np.maximum(error, middle(error))
    times_ms = [np.exp(middle(log_ns, axis=0)) / 1e6 for log_ns in series]
    is_known = np.isfinite(change)
    weight = np.where(is_known, 1 / error**2, 0.0)
    rest = np.where(is_known, change, 0.0)
    for _ in range(MOST_CHANGES):
        best = _largest_change(first, weight, rest)
        if best is None:
            return
        part = best.part
        rest[part.cells] -= np.where(is_known[part.cells], best.size, 0.0)
        before_ms, after_ms = (
            float(np.nansum(np.where(is_known, times, 0.0)[part.cells]) / len(part.ranks))
            for times in times_ms
        )
        yield Change(
            kind=part.kind,
            ranks=part.ranks,
            stages=part.stages,
            action=part.action,
            before_ms=before_ms,
            after_ms=after_ms,
            confidence=chance(best.certainty - SURE / 2),
        )


@dataclass(frozen=True, eq=False)
class _Part:
    """Describes a part of the work that may have changed as a whole.

    Attributes:
        kind: Kind of the part, as in :class:`Change`.
        cells: Index that selects the part in arrays ``[ranks, chunks, 3]``, whose last axis is the
            kind of action.
        ranks: Global ranks that do this part of the work.
        stages: Pipeline stages that do this part of the work.
        action: Kind of action (F, B or W); empty if the part contains several kinds.
    """

    kind: str
    cells: Any
    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    action: str = ""


@dataclass(frozen=True, eq=False)
class _PartChange:
    """Describes how much a part of the work changed.

    Attributes:
        part: Part of the work.
        size: Change in the logarithm of the time.
        certainty: Ratio of the change to its standard error.
        explained: Amount by which the change reduces the weighted sum of squared differences
            between the runs.
    """

    part: _Part
    size: float
    certainty: float
    explained: float


_KINDS_OF_PART: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("everything", (0, 1, 2)),
    ("action", (0, 1)),
    ("rank", (1, 2)),
    ("stage", (2,)),
    ("action on rank", (1,)),
)
"""Kinds of parts of the work, each with the axes of ``[ranks, chunks, 3]`` to sum over.

If two parts consist of the same cells, such as a rank with a single chunk and its stage, the kind
that comes first is used.
"""

_PREFERRED = 1 + 1e-9
"""Factor by which a kind of part must explain more than the kinds before it in ``_KINDS_OF_PART``.

Otherwise, an earlier kind is selected. The factor is slightly above 1, because sums of the same
numbers over different axes may differ by rounding errors.
"""


def _largest_change(m: Measured, weight: Floats, rest: Floats) -> _PartChange | None:
    """Returns the change that accounts for most of ``rest``, or ``None`` if none is significant.

    For example, a change of a whole rank accounts for more than a change of its backward passes.

    Args:
        m: Measured times of one of the runs.
        weight: ``[ranks, chunks, 3]``, weight of each difference: the inverse of its squared
            standard error, or 0 if it is unknown.
        rest: ``[ranks, chunks, 3]``, differences between the logarithms of the times, from which
            the changes that were already selected have been subtracted.
    """
    best: _PartChange | None = None
    for kind, axes in _KINDS_OF_PART:
        inside = np.atleast_1d(weight.sum(axis=axes))
        ranks = len(m.headers) if 0 in axes else 1
        with np.errstate(divide="ignore", invalid="ignore"):
            effect = np.atleast_1d((weight * rest).sum(axis=axes)) / inside
            error = np.sqrt(1 / inside + RANKS_DIFFER**2 / ranks)
            certainty = np.abs(effect) / error
        is_sure = (inside > 0) & (np.abs(effect) >= np.maximum(LEAST, SURE * error))
        explained = np.where(is_sure, effect**2 * inside, 0.0)
        index = np.unravel_index(int(explained.argmax()), explained.shape)
        if float(explained[index]) > (_PREFERRED * best.explained if best else 0.0):
            best = _PartChange(
                part=_part(m, kind, *map(int, index)),
                size=float(effect[index]),
                certainty=float(certainty[index]),
                explained=float(explained[index]),
            )
    return best


def _part(m: Measured, kind: str, first: int = 0, second: int = 0) -> _Part:
    """Returns the part of the work that ``kind``, ``first`` and ``second`` identify.

    Args:
        m: Measured times of one of the runs.
        kind: Kind of the part, as in :class:`Change`.
        first: Index of the rank on the rank axis or, if ``kind`` is ``action``, index of the kind
            of action.
        second: Index of the chunk if ``kind`` is ``stage``, or index of the kind of action if
            ``kind`` is ``action on rank``.
    """
    every = slice(None)
    if kind in ("everything", "action"):
        ranks = tuple(header.rank for header in m.headers)
        stages = tuple(sorted({stage for stages in m.stages for stage in stages}))
        if kind == "everything":
            return _Part(kind, (every, every, every), ranks, stages)
        return _Part(kind, (every, every, first), ranks, stages, DRAWN_ACTIONS[first])
    rank = (m.headers[first].rank,)
    if kind == "stage":
        return _Part(kind, (first, second, every), rank, (m.stages[first][second],))
    if kind == "action on rank":
        cells = (first, every, second)
        return _Part(kind, cells, rank, m.stages[first], DRAWN_ACTIONS[second])
    return _Part(kind, (first, every, every), rank, m.stages[first])


def _links(first: Measured, second: Measured) -> Iterator[Change]:
    """Yields a change for each link whose message times differ between the two runs.

    ``first`` and ``second`` contain the measured times of the two runs.
    """
    clocks_ns = first.clock_error_ns + second.clock_error_ns
    delays = [_delays(m) for m in (first, second)]
    for link in sorted(delays[0].keys() & delays[1].keys()):
        before, after = (of_links[link] for of_links in delays)
        certainty = _is_changed(before, after, first.step, clocks_ns)
        if certainty is not None:
            stages = {stage for rank in link for stage in first.stages[first.column[rank]]}
            yield Change(
                kind="link",
                ranks=link,
                stages=tuple(sorted(stages)),
                before_ms=float(np.median(before)) / 1e6,
                after_ms=float(np.median(after)) / 1e6,
                confidence=certainty,
            )


def _delays(m: Measured) -> dict[tuple[int, int], Floats]:
    """Maps each link (sender, receiver) to the times in ns that messages took to arrive.

    Messages without an exact arrival time are omitted.
    """
    messages = m.messages
    taken_ns = (messages.arrived_ns - messages.sent_ns).astype(np.float64)
    exact = ((link, rows[messages.seen[rows]]) for link, rows in messages.by_link())
    return {link: taken_ns[rows] for link, rows in exact if len(rows)}


def _data(first: Measured, second: Measured) -> Iterator[Change]:
    """Yields a change for each rank whose data reads became slower or faster.

    ``first`` and ``second`` contain the measured times of the two runs.
    """
    for column, header in enumerate(first.headers):
        before, after = (
            m.read_ns[:, column][m.reads[:, column] > 0]
            / m.reads[:, column][m.reads[:, column] > 0]
            for m in (first, second)
        )
        certainty = _is_changed(before, after, first.step, 0.0)
        if certainty is not None:
            yield Change(
                kind="data",
                ranks=(header.rank,),
                stages=first.stages[column],
                before_ms=float(np.median(before)) / 1e6,
                after_ms=float(np.median(after)) / 1e6,
                confidence=certainty,
            )


def _layers(
    runs: tuple[RunTrace, RunTrace], measured: tuple[Measured, Measured]
) -> Iterator[Change]:
    """Yields a change for each layer that changed differently from the other layers on its ranks.

    ``runs`` contains the traces of both runs, and ``measured`` their measured times.
    """
    times = [_times_of_layers(*both) for both in zip(runs, measured, strict=True)]
    by_ranks: dict[tuple[int, ...], list[int]] = {}
    for layer in sorted(times[0].keys() & times[1].keys()):
        if times[0][layer].ranks == times[1][layer].ranks:
            by_ranks.setdefault(times[0][layer].ranks, []).append(layer)
    for ranks, layers in by_ranks.items():
        if len(layers) < FEWEST_LAYERS:
            continue
        series = [np.log([of_run[layer].step_ns for layer in layers]).T for of_run in times]
        change, error = _difference(*series)
        error = np.hypot(np.maximum(error, np.median(error)), RANKS_DIFFER)
        rest = change - np.median(change)
        for number, layer in enumerate(layers):
            before_ns, after_ns = (float(np.median(of_run[layer].step_ns)) for of_run in times)
            is_far = abs(rest[number]) >= max(LEAST, SURE * error[number])
            if is_far and abs(after_ns - before_ns) >= OF_STEP * measured[0].step:
                first = measured[0]
                stages = {stage for rank in ranks for stage in first.stages[first.column[rank]]}
                yield Change(
                    kind="layer",
                    ranks=ranks,
                    stages=tuple(sorted(stages)),
                    layer=layer,
                    before_ms=before_ns / 1e6,
                    after_ms=after_ns / 1e6,
                    confidence=chance(float(abs(rest[number]) / error[number]) - SURE / 2),
                )


@dataclass(frozen=True, eq=False)
class _LayerTimes:
    """Contains the times of a layer in one run.

    Attributes:
        ranks: Global ranks that have the layer.
        step_ns: ``[iterations]``, total time in ns of the layer's passes, averaged over ``ranks``.
    """

    ranks: tuple[int, ...]
    step_ns: Floats


def _times_of_layers(run: RunTrace, m: Measured) -> dict[int, _LayerTimes]:
    """Maps the index of each layer to the times of the layer in ``run``.

    Layers that were not timed in all iterations of ``m`` are omitted.
    """
    times: dict[int, dict[int, list[int]]] = {}
    for rank in sorted(run.ranks):
        for iteration in m.iterations.tolist():
            for layer, forward_ns, backward_ns, _ in run.ranks[rank].layers(iteration):
                of_rank = times.setdefault(layer, {}).setdefault(rank, [])
                of_rank.append(forward_ns + backward_ns)
    return {
        layer: _LayerTimes(tuple(by_rank), np.array(list(by_rank.values())).mean(axis=0))
        for layer, by_rank in times.items()
        if all(len(of_rank) == len(m.iterations) for of_rank in by_rank.values())
        and all(min(of_rank) > 0 for of_rank in by_rank.values())
    }


def _collectives(first: Measured, second: Measured) -> Iterator[Change]:
    """Yields changes of the transfer times of groups and of the waits for single ranks.

    ``first`` and ``second`` contain the measured times of the two runs.
    """
    groups = [{(of.name, of.ranks): of for of in m.collectives} for m in (first, second)]
    for name, ranks in sorted(groups[0].keys() & groups[1].keys()):
        of_runs = [of_run[name, ranks] for of_run in groups]
        crosses = len({first.headers[first.column[rank]].clock for rank in ranks}) > 1
        clocks_ns = (first.clock_error_ns + second.clock_error_ns) * crosses
        clocks_ns *= of_runs[0].per_step
        stages = {stage for rank in ranks for stage in first.stages[first.column[rank]]}
        before, after = (of.per_step_ns(of.transfer_ns.min(axis=1)) for of in of_runs)
        if (sure := _is_changed(before, after, first.step, clocks_ns)) is not None:
            yield Change(
                kind="transfers",
                ranks=ranks,
                stages=tuple(sorted(stages)),
                collective=name,
                before_ms=_median_ms(before),
                after_ms=_median_ms(after),
                confidence=sure,
            )
        waits = [of.per_step_ns(of.held_up_ns) for of in of_runs]
        for column, rank in enumerate(ranks):
            before, after = (of_run[:, column] for of_run in waits)
            if (sure := _is_changed(before, after, first.step, clocks_ns)) is not None:
                yield Change(
                    kind="waits",
                    ranks=(rank,),
                    stages=first.stages[first.column[rank]],
                    collective=name,
                    before_ms=_median_ms(before),
                    after_ms=_median_ms(after),
                    confidence=sure,
                )


def _median_ms(times_ns: Floats) -> float:
    """Returns the median of ``times_ns`` in ms, but at least 0.001 to avoid division by 0."""
    return max(float(np.median(times_ns)) / 1e6, 1e-3)


def _is_changed(before: Floats, after: Floats, step_ns: float, error_ns: float) -> float | None:
    """Returns the confidence that the times changed, or ``None`` if the change is not reported.

    A change is reported if it is large enough and unlikely to be random. It must be at least the
    fraction :data:`LEAST` of the time in the first run, and the fraction :data:`OF_STEP` of a step.

    Args:
        before: Times in ns in the first run.
        after: Times in ns in the second run.
        step_ns: Duration of a step in ns.
        error_ns: Additional error of the difference in ns, such as the error of the clock offsets.
    """
    if min(len(before), len(after)) < 3:
        return None
    change = float(np.median(after) - np.median(before))
    error = math.hypot(
        *(_MEDIAN_ERROR * float(spread(x)) / math.sqrt(len(x)) for x in (before, after))
    )
    sure = (abs(change) - error_ns) / max(error, 1.0)
    matters = abs(change) >= max(LEAST * float(np.median(before)), OF_STEP * step_ns)
    return chance(sure - SURE / 2) if matters and sure >= SURE else None
