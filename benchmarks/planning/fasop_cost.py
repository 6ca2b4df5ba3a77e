"""FASOP's own cost function, and a search for the plan that it likes best.

For comparison only: the function charges middle stages no communication and has other peculiarities
that a good model must not have, see ``cost_function.md`` of the data set. With the data set's files
it gives ``plan_cost_s`` of every listed plan.

Source: Hwang, Lee, Oh, Yi, FASOP, HPDC 2024; rules as written down with the data.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from benchmarks.planning.published.fasop import Fasop, FasopPlan
from benchmarks.planning.published.files import read_json
from megatron.adaptive.planner.search import SearchOptions

__all__ = ["CostFunction"]

_GIB = 2**30
_OURS = 1
_ARRAYS = ("times", "needs", "limits", "reduce", "ends", "m")


class CostFunction:
    """The rules for one run.

    Args:
        folder: the data set.
        run: name of the run.
    """

    def __init__(self, folder: Path, run: str) -> None:
        data = Fasop(folder)
        self.run = data.run(run)
        clusters = read_json(folder / "clusters.json")
        told = clusters["runs"][run]
        models = read_json(folder / "models.json")["models"]
        self.model = models[told["model"]]
        self.types = {one["symbol"]: one for one in clusters["node_types"][told["node_types"]]}
        self.counts: dict[str, int] = told["node_counts"]
        self.gpus = self.types["A"]["gpus_per_node"]
        self.nodes = sum(self.counts.values())
        self.batch = self.model["global_batch_size"]
        self.profile = data.profile(told["model"])
        self.layers = data.model(told["model"])
        self.split = 25 if self.layers.splits else 0
        self._sums: dict[Any, Any] = {}

    def configurations(self) -> Iterator[FasopPlan]:
        """All that FASOP tries, with every order of nodes instead of rotations."""
        orders = list(_orders("A" * self.counts["A"] + "B" * self.counts["B"]))
        total = self.gpus * self.nodes
        for tp in (1, 2, 4):
            for dp in range(1, total // tp + 1):
                pp, rest = divmod(total // tp, dp)
                if rest or self.batch % dp or pp > self.model["transformer_layers"]:
                    continue
                share = self.batch // dp
                for micro_batch in (b for b in range(1, share + 1) if share % b == 0):
                    for order in orders:
                        yield FasopPlan(
                            tp=tp,
                            dp=dp,
                            pp=pp,
                            micro_batch=micro_batch,
                            placement=order,
                        )

    def cost(self, one: FasopPlan, partition: tuple[int, ...]) -> tuple[float, bool]:
        """Seconds of a step, and whether it breaks the memory rule."""
        rows = self._rows(one)
        cuts = np.concatenate([[0], np.cumsum(partition)])
        stage = np.array(
            [rows["times"][i, cuts[i + 1]] - rows["times"][i, cuts[i]] for i in range(one.pp)]
        )
        if one.pp == 1:
            ends = stage * rows["m"]
        else:
            ends = pipeline(stage, rows["ends"][0], rows["ends"][1], rows["m"])
        need = np.diff(rows["needs"][cuts])
        seconds = float((ends + rows["reduce"][:, cuts[1]]).max()) + rows["tied"]
        return seconds, bool((need > rows["limits"]).any())

    def best(self) -> tuple[float, FasopPlan, tuple[int, ...]]:
        """The plan that the function likes best."""
        ranked = []
        for one in self.configurations():
            rows = self._rows(one)
            speed = (1 / rows["times"][:, -1]).sum()
            bound = rows["m"] / speed + rows["reduce"][:, 1].max() + rows["tied"]
            ranked.append((bound, one))
        ranked.sort(key=lambda pair: pair[0])
        found: list[tuple[float, FasopPlan, tuple[int, ...]]] = []
        for bound, one in ranked:
            if found and bound >= min(row[0] for row in found):
                break
            found.append(self._climbed(one))
        return min([*found, *self._ours()], key=lambda row: row[0])

    def _climbed(self, one: FasopPlan) -> tuple[float, FasopPlan, tuple[int, ...]]:
        """The best partition that climbing finds, from every place of the split."""
        rows = self._rows(one)
        found = [self._climb(one, rows, cuts) for cuts in self._starts(rows["times"])]
        return min(found, key=lambda row: row[0], default=(float("inf"), one, ()))

    def _climb(
        self, one: FasopPlan, rows: dict[str, Any], cuts: Any
    ) -> tuple[float, FasopPlan, tuple[int, ...]]:
        split = self.split if one.pp > 1 else 0
        seconds = climb(*(rows[name] for name in _ARRAYS), cuts, split) + rows["tied"]
        return seconds, one, tuple(np.diff(cuts).tolist())

    def _ours(self) -> Iterator[tuple[float, FasopPlan, tuple[int, ...]]]:
        """The best plans by our own costs, climbed on by FASOP's."""
        run = self.run
        options = SearchOptions(
            tp=(1, 2, 4),
            recompute=("none",),
            distributed_optimizer=(False,),
            all_nodes=True,
            top=_OURS,
            most_leaves=300,
        )
        for plan in (one.plan for one in run.searcher(options).search().found):
            names = "".join(run.cluster.nodes[node].name for node in plan.nodes)
            for order in _orders(names):
                one = FasopPlan(
                    tp=plan.tp, dp=plan.dp, pp=plan.pp, micro_batch=plan.micro_batch,
                    placement=order,
                )  # fmt: skip
                rows = self._rows(one)
                cuts = np.concatenate([[0], np.cumsum(plan.partition)]).astype(np.int64)
                for start in _near(cuts, self.split if one.pp > 1 else 0):
                    yield self._climb(one, rows, start)

    def _starts(self, times: Any) -> Iterator[Any]:
        """Partitions to climb from: work in proportion, with every place of the split."""
        pp, n = times.shape[0], times.shape[1] - 1
        if not self.split or pp == 1:
            yield _proportional(times, 0, n)
            return
        for first in range(1, pp):
            if first <= self.split and pp - first <= n - self.split:
                left = _proportional(times[:first], 0, self.split)
                right = _proportional(times[first:], self.split, n)
                yield np.concatenate([left[:-1], right])

    def _rows(self, one: FasopPlan) -> dict[str, Any]:
        """Everything that does not depend on the partition."""
        kinds = [self._gpu(one, i) for i in range(one.pp)]
        times = np.array([self._times(self.types[kind]["gpu"], one) for kind in kinds])
        m = self.batch // (one.dp * one.micro_batch)
        ends = np.zeros(2)
        if one.pp > 1:
            ends[:] = self._boundary(one, 0), self._boundary(one, one.pp - 2)
        return {
            "times": times,
            "m": m,
            "ends": ends,
            "needs": self._needs(one, m) * 1.1,
            "limits": np.array([self._limit(one, i) for i in range(one.pp)]),
            "reduce": self._reduce(one, kinds),
            "tied": self._tied(one),
        }

    def _times(self, gpu: str, one: FasopPlan) -> Any:
        key = (gpu, one.tp, one.micro_batch)
        if key not in self._sums:
            each = [
                3 * self.profile.times(kind, gpu, one.tp, one.micro_batch).forward_s
                for kind in self.layers.layers
            ]
            self._sums[key] = np.concatenate([[0.0], np.cumsum(each)])
        return self._sums[key]

    def _gpu(self, one: FasopPlan, stage: int) -> str:
        if one.pp == 1:
            return "B" if "B" in one.placement else "A"
        if one.pp < self.nodes:
            each = self.nodes / one.pp
            part = one.placement[int(each * stage) : int(each * (stage + 1))]
            return "B" if "B" in part else "A"
        return one.placement[int(stage // (one.pp / self.nodes))]

    def _limit(self, one: FasopPlan, stage: int) -> float:
        if one.pp >= self.nodes:
            node = stage // int(one.pp / self.nodes)
        else:
            # The last but one node of the stage; with a single node that is the one before.
            each = int(self.nodes / one.pp)
            node = each * (stage + 1) - 2
        kind = one.placement[node]
        return float(self.types[kind]["usable_memory_gib_per_gpu"]) * _GIB

    def _needs(self, one: FasopPlan, m: int) -> Any:
        h, s, v = (self.model[k] for k in ("hidden_size", "sequence_length", "vocab_size"))
        a, b, tp, q = self.model["attention_heads"], one.micro_batch, one.tp, min(m, one.pp)
        needs = []
        for kind in self.layers.layers:
            if kind.startswith("embedding"):
                needs.append(18 * h * v / tp + s * b * h * one.pp * q / tp)
            elif kind == "head":
                needs.append(18 * h * v / tp + (4 * s * b * h + 4 * s * b * v) / tp)
            else:
                kept = s * b * q * h * (10 + 24 / tp + 5 * a * s / (h * tp))
                needs.append(18 * 12 * h * h / tp + kept)
        return np.concatenate([[0.0], np.cumsum(needs)])

    def _link(self, one: FasopPlan, x: int, y: int) -> float:
        a, b = one.placement[x // self.gpus], one.placement[y // self.gpus]
        if x // self.gpus == y // self.gpus:
            return float(self.types[a]["intra_node_bits_per_s"])
        return float(min(self.types[k]["inter_node_bits_per_s"] for k in (a, b)))

    def _boundary(self, one: FasopPlan, stage: int) -> float:
        least = float("inf")
        for d, t in itertools.product(range(one.dp), range(one.tp)):
            x = t + one.tp * (d + one.dp * stage)
            y = x + one.tp * one.dp
            speed = self._link(one, x, y)
            near = x // self.gpus == y // self.gpus
            least = min(least, speed / (3.5 if near else one.dp * one.tp * 1.05))
        size = self.model["sequence_length"] * self.model["hidden_size"]
        return 16 * one.micro_batch * size / least

    def _reduce(self, one: FasopPlan, kinds: list[str]) -> Any:
        """``[stages, layers + 1]``: every stage reduces what the first has, so many layers."""
        h, v = self.model["hidden_size"], self.model["vocab_size"]
        parameters, table = [0.0], 0.0
        for kind in self.layers.layers:
            if kind.startswith("embedding") or kind == "head":
                added, table = (0.0 if table else float(h * v)), float(h * v)
            else:
                added = (12 * h * h + 20800) / one.tp
            parameters.append(parameters[-1] + added)
        if one.dp == 1:
            return np.zeros((one.pp, len(parameters)))
        ranks = [one.tp - 1 + one.tp * d for d in range(one.dp)]
        ring = zip(ranks, [*ranks[1:], ranks[0]], strict=True)
        least = min(self._link(one, x, y) for x, y in ring)
        rows = []
        for kind in kinds:
            speed = least
            if one.tp * one.dp >= self.gpus:
                speed = least / one.tp
            elif one.tp > 1 and kind == "B":
                speed = least * one.dp / self.gpus
            rows.append(2 * (one.dp - 1) * 16 * np.array(parameters) / (one.dp * speed))
        return np.array(rows)

    def _tied(self, one: FasopPlan) -> float:
        if self.split or one.pp == 1:
            return 0.0
        first = one.tp * (one.dp - 1)
        last = first + one.tp * one.dp * (one.pp - 1)
        least = min(self._link(one, first + t, last + t) for t in range(one.tp))
        size = 16 * self.model["hidden_size"] * self.model["vocab_size"]
        return float(size * min(one.dp, self.gpus) / (one.tp * least))


def _orders(names: str) -> Iterator[str]:
    """Distinct orders of nodes of types A and B."""
    for at in itertools.combinations(range(len(names)), names.count("A")):
        yield "".join("A" if node in at else "B" for node in range(len(names)))


def _near(cuts: Any, split: int) -> Iterator[Any]:
    """A partition, and those that differ by one layer handed over."""
    yield cuts.copy()
    stages = len(cuts) - 1
    for source, target in itertools.permutations(range(stages), 2):
        moved = cuts.copy()
        step = -1 if source < target else 1
        moved[min(source, target) + 1 : max(source, target) + 1] += step
        if (np.diff(moved) > 0).all() and (not split or split in moved):
            yield moved


def _proportional(times: Any, begin: int, end: int) -> Any:
    """Stages from layer ``begin`` to ``end``, each with work by its speed."""
    work = times[:, end] - times[:, begin]
    share = np.cumsum((1 / work) / (1 / work).sum())
    done = (times[0, begin : end + 1] - times[0, begin]) / work[0]
    stages = len(work)
    cuts = np.concatenate([[0], np.searchsorted(done, share - 1e-9)]).astype(np.int64)
    cuts[-1] = end - begin
    for i in range(1, stages + 1):
        cuts[i] = max(cuts[i], cuts[i - 1] + 1)
    for i in range(stages, 0, -1):
        cuts[i] = min(cuts[i], end - begin - (stages - i))
    return cuts + begin


@njit(cache=True)
def pipeline(stage_s: Any, first_s: float, last_s: float, m: int) -> Any:
    """End of each stage's last backward.

    Args:
        stage_s: ``[stages]``, forward and backward of one microbatch; a third is forward.
        first_s: forward transfer out of the first stage. Others onward take no time.
        last_s: backward transfer out of the last stage. Others back take no time.
        m: microbatches.
    """
    p = stage_s.shape[0]
    warm = np.zeros(p, dtype=np.int64)
    for i in range(p):
        warm[i] = min(p - 1 - i, m)
    forward_in = np.full((p, m), np.inf)
    backward_in = np.full((p, m), np.inf)
    finished = np.full((p, 2 * m), np.inf)
    forward_in[0, :] = 0.0
    at = np.zeros(p, dtype=np.int64)
    free = np.zeros(p)
    left = 2 * m * p
    while left > 0:
        for i in range(p):
            while at[i] < 2 * m:
                k, w = at[i], warm[i]
                # Position to action: forwards ahead, then pairs, then the other backwards.
                if k < w:
                    onward, n = True, k
                elif k < w + 2 * (m - w):
                    onward = (k - w) % 2 == 0
                    n = w + (k - w) // 2 if onward else (k - w) // 2
                else:
                    onward, n = False, k - m
                arrived = forward_in[i, n] if onward else backward_in[i, n]
                if arrived == np.inf:
                    break
                ready = 0.0
                if onward and i < p - 1 and 0 < n < warm[i + 1]:
                    ready = finished[i + 1, n - 1]
                elif not onward and i > 0:
                    v = warm[i - 1]
                    place = v + 2 * n + 1 if n < m - v else n + m
                    ready = finished[i - 1, place - 1]
                if ready == np.inf:
                    break
                share = stage_s[i] / 3 if onward else 2 * stage_s[i] / 3
                computed = max(free[i], arrived) + share
                end = computed
                if onward and i < p - 1:
                    end = max(computed, ready) + (first_s if i == 0 else 0.0)
                    forward_in[i + 1, n] = end
                    if i == 0 and n >= w:
                        end = computed
                elif onward:
                    backward_in[i, n] = computed
                elif i > 0:
                    end = max(computed, ready) + (last_s if i == p - 1 else 0.0)
                    backward_in[i - 1, n] = end
                finished[i, k] = end
                free[i] = end
                at[i] += 1
                left -= 1
    return free


@njit(cache=True)
def _value(
    times: Any, needs: Any, limits: Any, reduce_s: Any, ends: Any, m: int, cuts: Any, worst: float
) -> float:
    """Seconds of a partition without the embedding's; infinite where it does not fit."""
    p = cuts.shape[0] - 1
    stage_s = np.zeros(p)
    for i in range(p):
        low, high = cuts[i], cuts[i + 1]
        if low >= high or (needs[high] - needs[low]) > limits[i]:
            return np.inf
        stage_s[i] = times[i, high] - times[i, low]
    if m * stage_s.max() >= worst:
        return np.inf
    if p == 1:
        return float(m * stage_s[0] + reduce_s[0, cuts[1]])
    found = pipeline(stage_s, ends[0], ends[1], m)
    return float((found + reduce_s[:, cuts[1]]).max())


@njit(cache=True)
def climb(
    times: Any,
    needs: Any,
    limits: Any,
    reduce_s: Any,
    ends: Any,
    m: int,
    cuts: Any,
    split: int,
) -> float:
    """Hand layers over between any two stages while the step gets shorter.

    Args:
        times: ``[stages, layers + 1]``, running sums of each layer's time on a stage's GPU.
        needs: ``[layers + 1]``, running sums of bytes.
        limits: ``[stages]`` of bytes.
        reduce_s: ``[stages, layers + 1]``, gradient reduction by layers of the first stage.
        ends: transfers of the first and last stage.
        m: microbatches.
        cuts: ``[stages + 1]``, changed to the best.
        split: a stage has to begin at this layer; 0 for none.
    """
    p = cuts.shape[0] - 1
    best = _value(times, needs, limits, reduce_s, ends, m, cuts, np.inf)
    since, at = 0, 0
    trial = cuts.copy()
    while since < p * p:
        source, target = at // p, at % p
        at = (at + 1) % (p * p)
        since += 1
        if source == target:
            continue
        step = -1 if source < target else 1
        for cut in range(min(source, target) + 1, max(source, target) + 1):
            trial[cut] += step
        if split == 0 or (trial == split).any():
            value = _value(times, needs, limits, reduce_s, ends, m, trial, best)
            if value < best:
                best, since = value, 0
                cuts[:] = trial
                continue
        trial[:] = cuts
    return best
