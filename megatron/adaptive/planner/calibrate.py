"""Fits a profile to traces of runs: what layers, links, reductions and the optimizer took.

A trace knows durations of stages. Those of each kind of layer are the non-negative least-squares
solution over all stages of all runs given; where stages do not separate two kinds, such as the
embedding and the layers behind it, they are divided as their operations are. Runs with partitions
that differ, and with stages that hold neither embedding nor head, add more.

Durations are taken as they were: a run whose ranks shared cores gives those of ranks that do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import numpy as np

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner import profile_file
from megatron.adaptive.planner.cluster import NodeType
from megatron.adaptive.planner.model_description import Model
from megatron.adaptive.trace.metrics import RunFigures, run_figures
from megatron.adaptive.trace.read import RunTrace
from megatron.adaptive.trace.span_columns import match_messages
from megatron.adaptive.trace.step_view import stages_of_rank
from megatron.adaptive.trace.trace_format import KINDS

_PRIOR = 1e-3
"""Weight of the operations against a measured stage; decides only where stages do not."""

_SIGMA_OF_MAD = 1.4826
"""Of a normal distribution: spread over the median distance from the median."""

_F, _B, _W = range(3)


@dataclass(frozen=True, kw_only=True)
class TracedRun:
    """Describes a run to learn from.

    Attributes:
        trace: what its ranks recorded.
        micro_batch: samples of a microbatch.
        hosts: type of the node by host.
        skip: iterations at the beginning that do not count.
        iterations: those that count, instead; empty for all but the skipped.
    """

    trace: RunTrace
    micro_batch: int
    hosts: Mapping[str, NodeType]
    skip: int = 2
    iterations: tuple[int, ...] = ()

    @property
    def tp(self) -> int:
        """Tensor-parallel width."""
        return 1 + max(rank.header.tp_rank for rank in self.trace.ranks.values())

    @property
    def dp(self) -> int:
        """Data-parallel replicas."""
        return 1 + max(rank.header.dp_rank for rank in self.trace.ranks.values())

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of each stage, as ``--num-layers`` counts them.

        Raises:
            ConfigError: the trace does not say them.
        """
        layers = next(iter(self.trace.ranks.values())).header.layers
        if not layers:
            raise ConfigError(
                f"{self.trace.origin}: the trace does not say how many layers its stages hold:"
                " trace the run anew"
            )
        return tuple(layers)

    def figures(self) -> RunFigures:
        """Returns the figures of the iterations that count.

        Raises:
            ConfigError: there are none.
        """
        complete = self.trace.complete_iterations()
        if self.iterations:
            return run_figures(self.trace, tuple(sorted(set(self.iterations) & set(complete))))
        if len(complete) <= self.skip:
            raise ConfigError(
                f"{self.trace.origin}: {len(complete)} complete iterations, of which the first"
                f" {self.skip} do not count: trace more"
            )
        return run_figures(self.trace, complete[self.skip :])


def calibrate(
    model: Model, runs: Sequence[TracedRun], described: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Fits a profile.

    Args:
        model: that all runs trained.
        runs: at least one.
        described: the model as the profile file has it; by its name and arguments by default.

    Returns:
        What a profile file holds.

    Raises:
        ConfigError: a run does not say which layers its stages hold, or holds others than the
            model.
        TraceError: a trace is damaged or has no complete iterations beyond those skipped.
    """
    stages: dict[_Key, list[_Stage]] = {}
    found = _Found()
    for run in runs:
        figures = run.figures()
        for key, rows in _stages(model, run, figures).items():
            stages.setdefault(key, []).extend(rows)
        _learn(found, model, run, figures)
    return profile_file.document(
        described or {"name": model.name, "arguments": list(model.arguments)},
        [
            {"gpu": gpu, "tp": tp, "micro_batch": size, "tp_included": tp > 1, **row}
            for (gpu, tp, size), rows in stages.items()
            for row in _layer_rows(model, rows)
        ],
        made=profile_file.timestamp(),
        nodes={node.name: {"gpu": node.gpu} for run in runs for node in run.hosts.values()},
        links=[
            {"nodes": [one, other], "within": within, **_curve(sizes)}
            for (one, other, within), sizes in found.travel.items()
        ],
        all_reduce=[
            {"node": node, "ranks": ranks, **_curve(sizes)}
            for (node, ranks), sizes in found.reduce.items()
        ],
        optimizer_s_per_parameter={gpu: median(each) for gpu, each in found.optimizer.items()},
        step_s={gpu: median(each) for gpu, each in found.rest.items()},
        action_sigma=median(found.spread) if found.spread else 0.0,
    )


_Stage = tuple[Sequence[int], tuple[float, float, float]]
"""Layers of a stage, and seconds of one microbatch: forward, backward, weight gradient or NaN."""
_Key = tuple[str, int, int]
"""GPU, tensor-parallel ranks, samples of a microbatch."""


@dataclass(frozen=True, kw_only=True)
class _Found:
    """Collects what runs show beside their stages.

    Attributes:
        travel: seconds of messages by size, by both node types and whether on one host.
        reduce: seconds of reductions by bytes, by node type and replicas.
        optimizer: seconds for each parameter, by GPU.
        rest: seconds of a step that nothing explains, by GPU.
        spread: of each rank's forwards and backwards, as a part of them.
    """

    travel: dict[tuple[str, str, bool], dict[int, list[float]]] = field(default_factory=dict)
    reduce: dict[tuple[str, int], dict[int, list[float]]] = field(default_factory=dict)
    optimizer: dict[str, list[float]] = field(default_factory=dict)
    rest: dict[str, list[float]] = field(default_factory=dict)
    spread: list[float] = field(default_factory=list)


def _held(model: Model, run: TracedRun, rank: int) -> tuple[range, ...]:
    """Layers of each chunk of a rank."""
    header = run.trace.ranks[rank].header
    stages = model.stage_layers(run.layers)
    return tuple(stages[stage] for stage in stages_of_rank(header, header.pp_rank))


def _stages(model: Model, run: TracedRun, figures: RunFigures) -> dict[_Key, list[_Stage]]:
    """Returns one row for each rank and chunk, by GPU, width and microbatch."""
    rows: dict[_Key, list[_Stage]] = {}
    known = np.isfinite(figures.median_ns).any(axis=0)
    typical = np.nanmedian(np.where(known, figures.median_ns, 0.0), axis=0)
    typical[~known] = np.nan
    pieces = figures.count.max(axis=0)
    for column, rank in enumerate(figures.ranks.tolist()):
        host = run.trace.ranks[rank].header.host
        for chunk, layers in enumerate(_held(model, run, rank)):
            count = np.maximum(pieces[column, chunk], 1)
            # A weight gradient that was cut takes all its pieces.
            whole = typical[column, chunk] * count / max(int(count[_F]), 1) / 1e9
            key = (run.hosts[host].gpu, run.tp, run.micro_batch)
            seconds = (float(whole[_F]), float(whole[_B]), float(whole[_W]))
            rows.setdefault(key, []).append((layers, seconds))
    return rows


def _layer_rows(model: Model, rows: Sequence[_Stage]) -> list[dict[str, Any]]:
    kinds = sorted({model.layers[i] for layers, _ in rows for i in layers})
    held = [[sum(model.layers[i] == kind for i in layers) for kind in kinds] for layers, _ in rows]
    counts = np.array(held, dtype=np.float64)
    flops = np.array([model.kinds[kind].forward_flops for kind in kinds])
    measured = np.array([seconds for _, seconds in rows])
    split = ~np.isnan(measured[:, _W])
    forward = _solve(counts, measured[:, _F], flops)
    whole = _solve(counts, np.nansum(measured[:, _B:], axis=1), flops)
    if split.any():
        weight = np.minimum(_solve(counts[split], measured[split, _W], flops), whole)
    else:
        weight = whole * np.array([_weight_share(model, kind) for kind in kinds])
    columns = {
        "forward_s": forward,
        "backward_input_s": whole - weight,
        "backward_weight_s": weight,
    }
    return [
        {"kind": kind, **{name: float(column[i]) for name, column in columns.items()}}
        for i, kind in enumerate(kinds)
    ]


def _weight_share(model: Model, name: str) -> float:
    """Returns the share of weight gradients in a backward: half of all but attention."""
    kind = model.kinds[name]
    if not kind.parameters:
        return 0.0
    if not kind.forward_flops:
        return 1.0
    return 0.5 * (1 - kind.attention_flops / kind.forward_flops)


def _solve(counts: Any, seconds: Any, flops: Any) -> Any:
    """Seconds of each kind, not negative, that explain the stages best.

    Projected coordinate descent on ``|A x - b|^2 + prior |x - p|^2``, ``p`` in proportion to the
    operations.
    """
    work = counts @ flops
    rate = float(work @ seconds / (work @ work)) if (work > 0).any() else 0.0
    prior = flops * rate
    scale = _PRIOR * float((counts**2).sum()) / counts.shape[1]
    gram = counts.T @ counts + scale * np.eye(counts.shape[1])
    right = counts.T @ seconds + scale * prior
    x = np.maximum(prior, 0.0)
    for _ in range(2000):
        before = x.copy()
        for i in range(len(x)):
            x[i] = max(0.0, x[i] + (right[i] - gram[i] @ x) / gram[i, i])
        if np.abs(x - before).max() <= 1e-9 * max(x.max(), 1e-12):
            break
    return x


def _learn(found: _Found, model: Model, run: TracedRun, figures: RunFigures) -> None:
    ranks = figures.ranks.tolist()
    headers = [run.trace.ranks[rank].header for rank in ranks]
    column = {kind: np.median(figures.kind_ns[:, :, KINDS.index(kind)], axis=0) for kind in KINDS}
    held = [
        sum(
            model.layer(i).held_parameters(run.tp) for part in _held(model, run, rank) for i in part
        )
        for rank in ranks
    ]
    for i, header in enumerate(headers):
        gpu = run.hosts[header.host].gpu
        if column["optimizer"][i] > 0 and held[i]:
            each = float(column["optimizer"][i]) / 1e9 / held[i]
            found.optimizer.setdefault(gpu, []).append(each)
        rest = column["step"][i] - np.median(figures.step_ns[:, i])
        rest -= column["reduce"][i] + column["optimizer"][i]
        if column["step"][i] > 0:
            found.rest.setdefault(gpu, []).append(max(0.0, float(rest) / 1e9))
    # The reduction of gradients between the replicas of one host.
    alone = run.dp > 1 and len({header.host for header in headers}) == 1
    for pp_rank in range(run.trace.num_ranks if alone else 0):
        mine = [i for i, header in enumerate(headers) if header.pp_rank == pp_rank]
        size = round(held[mine[0]] * model.precision.reduce_bytes)
        # The replica that comes last waits for nobody.
        seconds = min(float(column["reduce"][i]) for i in mine) / 1e9
        if seconds > 0 and size:
            sizes = found.reduce.setdefault((run.hosts[headers[0].host].name, run.dp), {})
            sizes.setdefault(size, []).append(seconds)
    known = (figures.count[..., :_W] > 1) & (figures.median_ns[..., :_W] > 0)
    part = figures.mad_ns[..., :_W][known] / figures.median_ns[..., :_W][known]
    found.spread.extend((_SIGMA_OF_MAD * part).tolist())
    _messages(found, run, figures)


def _messages(found: _Found, run: TracedRun, figures: RunFigures) -> None:
    """Messages whose arrival is exact: from being handed over to being there."""
    tables = {
        rank: trace.table(figures.iterations.tolist()) for rank, trace in run.trace.ranks.items()
    }
    messages = match_messages(tables)
    for i in np.flatnonzero(messages.seen):
        ends = [int(messages.source[i]), int(messages.target[i])]
        hosts = [run.trace.ranks[rank].header.host for rank in ends]
        one, other = sorted(run.hosts[host].name for host in hosts)
        seconds = float(messages.arrived_ns[i] - messages.sent_ns[i]) / 1e9
        size = int(messages.bytes[i])
        if size > 0 and seconds > 0:
            key = (one, other, hosts[0] == hosts[1])
            found.travel.setdefault(key, {}).setdefault(size, []).append(seconds)


def _curve(sizes: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """Fits latency and bandwidths to the median of each size; one size gives a bandwidth."""
    size = np.array(sorted(sizes), dtype=np.float64)
    seconds = np.array([median(sizes[int(one)]) for one in size])
    latency = 0.0
    if len(size) > 1:
        slope, intercept = np.polyfit(size, seconds, 1)
        if slope > 0 and 0 <= intercept < seconds.min():
            latency = float(intercept)
    curve = np.stack([size, size / (seconds - latency)], axis=1)
    return {"latency_s": latency, "sizes": curve.tolist()}


def accuracy(predicted: Sequence[float], measured: Sequence[float]) -> dict[str, float]:
    """Returns figures of how well the steps of some runs were predicted, by name.

    Errors are shares of the measured seconds; ``rank_correlation`` is 1 for the same order;
    ``place_of_best`` is that of the fastest run in the predicted order, 1 for first; ``regret`` is
    the part by which the run predicted to be fastest was slower than the fastest.

    Args:
        predicted: seconds of each run's step, of one run at least.
        measured: the same as they were.
    """
    errors = [abs(one / other - 1) for one, other in zip(predicted, measured, strict=True)]
    order = np.argsort(predicted, kind="stable").tolist()
    best = min(range(len(errors)), key=measured.__getitem__)
    return {
        "runs": len(errors),
        "median_error": median(errors),
        "mean_error": fmean(errors),
        "worst_error": max(errors),
        "rank_correlation": rank_correlation(predicted, measured),
        "place_of_best": order.index(best) + 1,
        "regret": measured[order[0]] / measured[best] - 1,
    }


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns Spearman's correlation of ranks; equal values share the mean of theirs."""
    a, b = _ranks(one), _ranks(other)
    if a.std() == 0 or b.std() == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    below = (array[None, :] < array[:, None]).sum(axis=1)
    equal = (array[None, :] == array[:, None]).sum(axis=1)
    ranks: np.ndarray = below + (equal - 1) / 2
    return ranks
