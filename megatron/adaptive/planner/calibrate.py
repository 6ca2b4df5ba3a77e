"""Fits a profile to traces of training runs.

A profile contains the times of layers, links, gradient reductions and the optimizer.

A trace contains the times of stages, not of single layers. A least-squares fit finds the
non-negative layer times that best explain the measured stage times of all runs. For example, two
runs of one model on two stages have this result::

    run 1    embedding + 6 transformer layers    13 s
             6 transformer layers + head         15 s
    run 2    embedding + 5 transformer layers    11 s
             7 transformer layers + head         17 s

    fitted   embedding 1 s, transformer layer 2 s, head 3 s

With run 1 alone, the fit cannot separate the embedding's time from the times of the layers in the
same stage. The stage's time is then divided among the embedding and these layers in proportion to
their FLOPs. A profile is more accurate if the runs have different partitions, and if some stages
hold neither the embedding nor the head.

Times are not corrected for contention. If the ranks of a run shared CPU cores, the profile is only
valid for ranks that share cores in the same way.
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
"""Weight of the assumption that layer times are proportional to FLOPs, relative to the weight of
the measurements. The weight is so low that the assumption matters only if the measured stages do
not determine the times of all kinds of layers."""

_SIGMA_OF_MAD = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation."""

_F, _B, _W = range(3)


@dataclass(frozen=True, kw_only=True)
class TracedRun:
    """A traced training run, used as input to :func:`calibrate`.

    Attributes:
        trace: Trace of all ranks.
        micro_batch: Number of samples per microbatch.
        hosts: Node type of each host, keyed by host name.
        skip: Number of iterations at the beginning of the run that are ignored as warm-up.
        iterations: Indices of the iterations to use. If empty, all iterations after the warm-up are
            used.
    """

    trace: RunTrace
    micro_batch: int
    hosts: Mapping[str, NodeType]
    skip: int = 2
    iterations: tuple[int, ...] = ()

    @property
    def tp(self) -> int:
        """Tensor-parallel size of the run."""
        return 1 + max(rank.header.tp_rank for rank in self.trace.ranks.values())

    @property
    def dp(self) -> int:
        """Number of data-parallel replicas in the run."""
        return 1 + max(rank.header.dp_rank for rank in self.trace.ranks.values())

    @property
    def layers(self) -> tuple[int, ...]:
        """Number of layers in each stage, without embedding and head.

        Raises:
            ConfigError: The trace does not contain the number of layers of each stage.
        """
        layers = next(iter(self.trace.ranks.values())).header.layers
        if not layers:
            raise ConfigError(
                f"{self.trace.origin}: the trace does not contain the number of layers per stage, "
                "which a profile requires; trace the run again"
            )
        return tuple(layers)

    def figures(self) -> RunFigures:
        """Returns the median times of actions and steps in the selected iterations, in nanoseconds.

        Raises:
            ConfigError: The trace has no complete iterations after the warm-up.
        """
        complete = self.trace.complete_iterations()
        if self.iterations:
            return run_figures(self.trace, tuple(sorted(set(self.iterations) & set(complete))))
        if len(complete) <= self.skip:
            raise ConfigError(
                f"{self.trace.origin} has {len(complete)} complete iterations, but the first"
                f" {self.skip} are skipped as warm-up; trace more iterations"
            )
        return run_figures(self.trace, complete[self.skip :])


def calibrate(
    model: Model, runs: Sequence[TracedRun], described: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Fits a profile to traced training runs.

    Args:
        model: Model that was trained in all runs.
        runs: Traced runs. The list must not be empty.
        described: Description of the model, stored under the key ``model`` in the profile. Defaults
            to the model's name and arguments.

    Returns:
        Contents of a profile file.

    Raises:
        ConfigError: A trace does not contain the number of layers of each stage, these numbers do
            not add up to the model's number of layers, or the run used sequence slices.
        TraceError: A trace is damaged, or has no complete iterations to use.
    """
    for run in runs:
        if run.trace.is_sliced:
            raise ConfigError(
                f"{run.trace.origin} was traced with sequence slices, but a profile requires the "
                "times of whole sequences; trace a run without --sequence-slices and "
                "--slice-tokens"
            )
    stages: dict[_Key, list[_Stage]] = {}
    gathered = _Gathered()
    for run in runs:
        figures = run.figures()
        for key, rows in _stages(model, run, figures).items():
            stages.setdefault(key, []).extend(rows)
        _gather(gathered, model, run, figures)
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
            {"nodes": [node_type, other], "within": within, **_curve(sizes)}
            for (node_type, other, within), sizes in gathered.travel.items()
        ],
        all_reduce=[
            {"node": node, "ranks": ranks, **_curve(sizes)}
            for (node, ranks), sizes in gathered.reduce.items()
        ],
        optimizer_s_per_parameter={gpu: median(each) for gpu, each in gathered.optimizer.items()},
        step_s={gpu: median(each) for gpu, each in gathered.rest.items()},
        action_sigma=median(gathered.spread) if gathered.spread else 0.0,
    )


_Stage = tuple[Sequence[int], tuple[float, float, float]]
"""Indices of a stage's layers, and its times per microbatch in seconds: forward pass, backward pass
and weight gradients. If weight gradients are computed within the backward pass, the third time is
NaN."""
_Key = tuple[str, int, int]
"""Key by which measured stages are grouped: GPU name, tensor-parallel size, and number of samples
per microbatch."""


@dataclass(frozen=True, kw_only=True)
class _Gathered:
    """Measurements gathered from all runs, except the times of stages.

    Attributes:
        travel: Times in seconds from sending a message to its arrival. The keys of the outer dict
            contain the node types of sender and receiver, and whether both are on one host. The
            keys of the inner dicts are message sizes in bytes.
        reduce: Times of gradient reductions in seconds. The keys of the outer dict contain the node
            type and the number of replicas. The keys of the inner dicts are sizes in bytes.
        optimizer: Duration of the optimizer step per parameter in seconds, keyed by GPU name.
        rest: Part of the step time in seconds that no other measurement explains, keyed by GPU
            name.
        spread: Standard deviations of forward and backward times, each divided by the median time.
            There is one entry for each iteration, rank and stage.
    """

    travel: dict[tuple[str, str, bool], dict[int, list[float]]] = field(default_factory=dict)
    reduce: dict[tuple[str, int], dict[int, list[float]]] = field(default_factory=dict)
    optimizer: dict[str, list[float]] = field(default_factory=dict)
    rest: dict[str, list[float]] = field(default_factory=dict)
    spread: list[float] = field(default_factory=list)


def _held(model: Model, run: TracedRun, rank: int) -> tuple[range, ...]:
    """Returns the layer indices of each stage that ``rank`` holds in ``run``, as ranges."""
    header = run.trace.ranks[rank].header
    stages = model.stage_layers(run.layers)
    return tuple(stages[stage] for stage in stages_of_rank(header, header.pp_rank))


def _stages(model: Model, run: TracedRun, figures: RunFigures) -> dict[_Key, list[_Stage]]:
    """Returns the layer indices and the measured times of every stage in ``run``.

    The result is grouped by GPU model, tensor-parallel size and microbatch size. ``figures``
    contains the median times of the run's actions.
    """
    rows: dict[_Key, list[_Stage]] = {}
    is_measured = np.isfinite(figures.median_ns).any(axis=0)
    typical = np.nanmedian(np.where(is_measured, figures.median_ns, 0.0), axis=0)
    typical[~is_measured] = np.nan
    pieces = figures.count.max(axis=0)
    for column, rank in enumerate(figures.ranks.tolist()):
        host = run.trace.ranks[rank].header.host
        for chunk, layers in enumerate(_held(model, run, rank)):
            count = np.maximum(pieces[column, chunk], 1)
            # The schedule may split the computation of a weight gradient into several actions, so
            # multiply the time of one action by the number of actions.
            whole = typical[column, chunk] * count / max(int(count[_F]), 1) / 1e9
            key = (run.hosts[host].gpu, run.tp, run.micro_batch)
            seconds = (float(whole[_F]), float(whole[_B]), float(whole[_W]))
            rows.setdefault(key, []).append((layers, seconds))
    return rows


def _layer_rows(model: Model, rows: Sequence[_Stage]) -> list[dict[str, Any]]:
    """Returns a profile row per layer kind, with times fitted to the stages in ``rows``."""
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
    """Returns the fraction of backward time that layer kind ``name`` spends on weight gradients.

    The fraction is estimated from FLOPs. Half of the backward FLOPs count as weight gradients,
    except for attention scores, which have no weights, and for logits, whose weight gradients are
    not deferred.
    """
    kind = model.kinds[name]
    if not kind.parameters:
        return 0.0
    if not kind.forward_flops:
        return 1.0
    deferred_flops = kind.forward_flops - kind.attention_flops - kind.output_flops
    return 0.5 * deferred_flops / kind.forward_flops


def _solve(counts: Any, seconds: Any, flops: Any) -> Any:
    """Fits the time per layer of each kind, in seconds, to the measured times of stages.

    The fitted times are not negative.

    The fit minimizes ``|A x - b|^2 + prior |x - p|^2`` by projected coordinate descent. ``A`` is
    ``counts``, ``b`` is ``seconds``, and ``p`` contains times that are proportional to ``flops``.

    Args:
        counts: Number of layers of each kind in each stage, ``[stages, kinds]``.
        seconds: Time of each stage in seconds, ``[stages]``.
        flops: Forward FLOPs per layer of each kind, ``[kinds]``.
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
        for kind in range(len(x)):
            x[kind] = max(0.0, x[kind] + (right[kind] - gram[kind] @ x) / gram[kind, kind])
        if np.abs(x - before).max() <= 1e-9 * max(x.max(), 1e-12):
            break
    return x


def _gather(gathered: _Gathered, model: Model, run: TracedRun, figures: RunFigures) -> None:
    """Adds the measurements of ``run`` to ``gathered``, except the times of stages."""
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
            each_s = float(column["optimizer"][i]) / 1e9 / held[i]
            gathered.optimizer.setdefault(gpu, []).append(each_s)
        rest = column["step"][i] - np.median(figures.step_ns[:, i])
        rest -= column["reduce"][i] + column["optimizer"][i]
        if column["step"][i] > 0:
            gathered.rest.setdefault(gpu, []).append(max(0.0, float(rest) / 1e9))
    # A profile contains only all-reduces within one node, so use only runs on one host.
    is_one_host = run.dp > 1 and len({header.host for header in headers}) == 1
    for pp_rank in range(run.trace.num_ranks if is_one_host else 0):
        replicas = [i for i, header in enumerate(headers) if header.pp_rank == pp_rank]
        size = round(held[replicas[0]] * model.precision.reduce_bytes)
        # The replica that starts its reduction last does not wait for the others, so its time is
        # the shortest. Use this time.
        seconds = min(float(column["reduce"][i]) for i in replicas) / 1e9
        if seconds > 0 and size:
            sizes = gathered.reduce.setdefault((run.hosts[headers[0].host].name, run.dp), {})
            sizes.setdefault(size, []).append(seconds)
    has_spread = (figures.count[..., :_W] > 1) & (figures.median_ns[..., :_W] > 0)
    part = figures.mad_ns[..., :_W][has_spread] / figures.median_ns[..., :_W][has_spread]
    gathered.spread.extend((_SIGMA_OF_MAD * part).tolist())
    _messages(gathered, run, figures)


def _messages(gathered: _Gathered, run: TracedRun, figures: RunFigures) -> None:
    """Adds the transfer times of all messages in ``run`` to ``gathered``.

    Messages whose arrival was not recorded are skipped.
    """
    tables = {
        rank: trace.table(figures.iterations.tolist()) for rank, trace in run.trace.ranks.items()
    }
    messages = match_messages(tables)
    for i in np.flatnonzero(messages.seen):
        ends = [int(messages.source[i]), int(messages.target[i])]
        hosts = [run.trace.ranks[rank].header.host for rank in ends]
        node_type, other = sorted(run.hosts[host].name for host in hosts)
        seconds = float(messages.arrived_ns[i] - messages.sent_ns[i]) / 1e9
        size = int(messages.bytes[i])
        if size > 0 and seconds > 0:
            key = (node_type, other, hosts[0] == hosts[1])
            gathered.travel.setdefault(key, {}).setdefault(size, []).append(seconds)


def _curve(sizes: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """Fits a latency and one bandwidth per message size to measured message times.

    ``sizes`` maps message sizes in bytes to measured times in seconds. The bandwidths are fitted to
    the median time of each size. With only one message size, the latency is set to 0.
    """
    size = np.array(sorted(sizes), dtype=np.float64)
    seconds = np.array([median(sizes[int(message_bytes)]) for message_bytes in size])
    latency = 0.0
    if len(size) > 1:
        slope, intercept = np.polyfit(size, seconds, 1)
        if slope > 0 and 0 <= intercept < seconds.min():
            latency = float(intercept)
    curve = np.stack([size, size / (seconds - latency)], axis=1)
    return {"latency_s": latency, "sizes": curve.tolist()}


def accuracy(predicted: Sequence[float], measured: Sequence[float]) -> dict[str, float]:
    """Compares predicted with measured step times, and returns a dict of accuracy measures.

    Errors are fractions of the measured times. ``rank_correlation`` is 1 if predicted and measured
    times sort the runs in the same order. ``place_of_best`` is the position of the fastest run in
    the predicted order, starting at 1. ``regret`` is the relative slowdown from choosing the run
    with the shortest predicted time instead of the fastest run.

    Args:
        predicted: Predicted step time of each run in seconds. At least one run is required.
        measured: Measured step time of each run, in seconds.
    """
    errors = [
        abs(predicted_s / measured_s - 1)
        for predicted_s, measured_s in zip(predicted, measured, strict=True)
    ]
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


def rank_correlation(values: Sequence[float], other: Sequence[float]) -> float:
    """Returns Spearman's rank correlation of the sequences ``values`` and ``other``.

    Equal values get their mean rank. The correlation is 0 if all values of one sequence are equal.
    """
    ranks, other_ranks = _ranks(values), _ranks(other)
    if ranks.std() == 0 or other_ranks.std() == 0:
        return 0.0
    return float(np.corrcoef(ranks, other_ranks)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Returns the position of each value after sorting. Equal values get their mean position."""
    array = np.asarray(values, dtype=np.float64)
    below = (array[None, :] < array[:, None]).sum(axis=1)
    equal = (array[None, :] == array[:, None]).sum(axis=1)
    ranks: np.ndarray = below + (equal - 1) / 2
    return ranks
