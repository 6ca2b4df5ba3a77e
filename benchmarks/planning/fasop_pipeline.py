"""FASOP's pipeline with its peculiarities, and a climb over partitions; see ``fasop_cost``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

__all__ = ["climb", "pipeline"]


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
