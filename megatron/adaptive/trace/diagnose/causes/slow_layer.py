"""Finds layers that take longer than other layers, if the trace contains the times of layers.

Use ``--trace-detail layers`` to record these times. Without them, a slow layer appears as a slow
rank or as uneven stages.

The layers of a model may be of several kinds. A segment of a ``Pipeline`` is only compared with
segments that make the same calls. The trace header contains the kind of each segment. Layers with
experts and layers for multi-token prediction are not examined. Any other layer is reported only if
both its forward and its backward pass are slow, because recomputation makes only the backward pass
slower. If several layers are slow by about the same factor, none of them is reported, because they
may be of a different kind (such as every fourth layer).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from megatron.adaptive.config.number_text import number_text
from megatron.adaptive.trace.diagnose.cause import Cause, Evidence, Floats64, RecordedSteps, Remedy
from megatron.adaptive.trace.diagnose.finding import Finding
from megatron.adaptive.trace.diagnose.machine_reasons import starved
from megatron.adaptive.trace.diagnose.samples import Floats, Measured, chance, middle, noise

SLOWER = 1.25
"""Minimum ratio of a slow layer's time to the time of other layers."""

SURE = 4.0
"""Minimum difference between the times of a slow layer and other layers, in standard errors."""

FEWEST = 4
"""Minimum number of timed layers in the run needed to determine the usual time."""

MOST_SLOW = 0.25
"""Maximum fraction of slow layers. If more layers are slow, they are assumed to do other work.
"""


SLOWER_PASS = 1.15
"""Minimum ratio of a slow layer's forward time to that of other layers.

The same ratio applies to its backward time.
"""

SLOWER_LAST = 2.0
"""Minimum ratio of the last layer's time to that of other layers for it to be reported as slow.

The last layer often does additional work. For other layers, the minimum ratio is :data:`SLOWER`.
"""

ALIKE = 1.25
"""Ratio of the times of two slow layers below which they are assumed to be of the same kind.

Such layers are not reported, because every layer of their kind may need this time.
"""

FEWEST_SPACED = 3
"""Minimum number of evenly spaced slow layers to consider them a separate kind of layer."""


class SlowLayer(Cause):
    """Finds layers whose forward and backward passes take longer than those of other layers."""

    name = "slow layer"
    order = 5

    def find(self, evidence: Evidence, earlier: Sequence[Finding]) -> list[Finding]:
        return find_slow_layers(evidence.measured)

    def describe(self, finding: Finding) -> str:
        layer = finding.counts["layer"]
        return f"layer {layer} on {finding.culprit} takes {finding.factor:.2f} times as long"

    def without(self, finding: Finding, steps: RecordedSteps) -> Floats64:
        steps.duration_s[steps.affected] *= 1 - finding.counts["percent of the rank"] / 100
        return steps.duration_s

    def advise(self, finding: Finding, evidence: Evidence) -> Remedy:
        remedy = evidence.move_layers(finding)
        look = (
            f"if layer {finding.counts['layer']} has the same shape as other layers, check its "
            "kernels with torch.profiler"
        )
        return Remedy((look, *remedy.advice), remedy.partition)


@dataclass(frozen=True, eq=False)
class _Layer:
    """Holds the times of one layer on one rank.

    Attributes:
        column: Index of the rank on the rank axis.
        index: Index of the layer in the model.
        passes_ns: ``[iterations, 2]``, time in ns of a forward and of a backward pass, or NaN if
            unknown.
    """

    column: int
    index: int
    passes_ns: Floats

    @property
    def pass_ns(self) -> Floats:
        """Total time in ns of both passes, ``[iterations]``, or NaN where unknown."""
        return np.asarray(self.passes_ns.sum(axis=1))


def find_slow_layers(m: Measured) -> list[Finding]:
    """Returns findings for layers that are slower than other layers of the same kind."""
    by_kind: dict[int, list[_Layer]] = {}
    for layer in _layers(m):
        by_kind.setdefault(_kind(m, layer.index), []).append(layer)
    return [finding for layers in by_kind.values() for finding in _slow_of_kind(m, layers)]


def _kind(m: Measured, index: int) -> int:
    """Returns an integer that identifies the kind of layer ``index``, or -1 if it is unknown."""
    return m.layer_kinds[index] if index < len(m.layer_kinds) else -1


def _slow_of_kind(m: Measured, layers: Sequence[_Layer]) -> list[Finding]:
    """Returns findings for the slow layers among ``layers``, which must all be of the same kind."""
    levels = np.array([float(middle(layer.pass_ns)) for layer in layers])
    if len(levels) < FEWEST:
        return []
    usual = float(np.median(levels))
    passes = np.array([middle(layer.passes_ns, axis=0) for layer in layers])
    slower_passes = (passes >= SLOWER_PASS * np.median(passes, axis=0)).all(axis=1)
    last = max(layer.index for layer in layers)
    beside = _beside(layers, levels)
    slow = [
        number
        for number, layer in enumerate(layers)
        if levels[number]
        >= (SLOWER if layer.index < last else SLOWER_LAST) * max(usual, beside[number])
    ]
    if not slow or len(slow) > max(1, int(MOST_SLOW * len(layers))):
        return []
    if _are_spaced([layers[number].index for number in slow]):
        return []
    alone = _alone(slow, levels)
    slow = [number for number in slow if slower_passes[number] and number in alone]
    findings = []
    for number in slow:
        layer = layers[number]
        series = layer.pass_ns[np.isfinite(layer.pass_ns)]
        excess_ns = levels[number] - usual
        error_ns = 1.25 * noise(series) / math.sqrt(len(series)) + 0.01 * usual
        if excess_ns < SURE * error_ns:
            continue
        # The times of layers are random if the rank waits for a processor most of the time.
        if levels[number] / usual < 1 / (1 - starved(m, layer.column, slice(None))):
            continue
        of_rank = excess_ns / max(float(m.microbatch_ns[layer.column]), excess_ns)
        chosen = np.flatnonzero(np.isfinite(layer.pass_ns))
        finding = m.finding(
            [layer.column],
            m.iterations[chosen],
            kind="lasting",
            against="others",
            confidence=chance(excess_ns / error_ns),
            factor=float(levels[number] / usual),
            counts={"layer": layer.index, "percent of the rank": round(100 * of_rank)},
            detail=f"{number_text(levels[number] / 1e6)} ms per microbatch, other layers "
            f"{number_text(usual / 1e6)} ms",
        )
        findings.append(replace(finding, delay_ms=excess_ns / 1e6))
    return findings


def _beside(layers: Sequence[_Layer], levels: Floats) -> list[float]:
    """Returns the median time in ns of the other layers on the same rank, for each layer.

    ``levels`` contains the time in ns of each layer. If a layer is the only one on its rank, the
    result is infinite, because the rank itself may be slow.
    """
    of_rank: dict[int, list[int]] = {}
    for number, layer in enumerate(layers):
        of_rank.setdefault(layer.column, []).append(number)
    beside = [math.inf] * len(layers)
    for numbers in of_rank.values():
        for index, number in enumerate(numbers):
            if len(numbers) > 1:
                beside[number] = float(np.median(np.delete(levels[numbers], index)))
    return beside


def _alone(slow: Sequence[int], levels: Floats) -> set[int]:
    """Returns the slow layers whose times differ from those of all other slow layers.

    Args:
        slow: Indices of all slow layers.
        levels: Time in ns of each layer.
    """
    ordered = sorted(slow, key=lambda number: levels[number])
    alike = {
        number
        for pair in pairwise(ordered)
        if levels[pair[1]] < ALIKE * levels[pair[0]]
        for number in pair
    }
    return set(slow) - alike


def _are_spaced(indices: Sequence[int]) -> bool:
    """Returns whether ``indices`` contains at least three layers that are evenly spaced."""
    distances = np.diff(np.sort(indices))
    return len(indices) >= FEWEST_SPACED and len(np.unique(distances)) == 1


def _layers(m: Measured) -> list[_Layer]:
    """Returns the comparable layers that were timed in more than half of the iterations.

    Layers with experts, and layers for multi-token prediction (which come last), are excluded.
    """
    with_experts = {
        row[0] for of_rank in m.experts for marker in of_rank.values() for row in marker.tokens
    }
    end = sum(m.layers) or math.inf
    layers = []
    for column, of_rank in enumerate(m.layer_rows):
        series: dict[int, Floats] = {}
        for row, rows in enumerate(of_rank):
            for index, forward_ns, backward_ns, passes in rows:
                values = series.setdefault(index, np.full((len(of_rank), 2), np.nan))
                values[row] = np.array([forward_ns, backward_ns]) / max(1, passes)
        layers += [
            _Layer(column, index, values)
            for index, values in sorted(series.items())
            if index < end and index not in with_experts and np.isfinite(values).mean() > 0.5
        ]
    return layers
