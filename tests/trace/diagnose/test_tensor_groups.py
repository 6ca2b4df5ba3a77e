"""Checks that the diagnosis names the rank that slows down its tensor-parallel group."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.adaptive.trace.collectives import JoinedCollectives
from megatron.adaptive.trace.diagnose import Finding
from megatron.adaptive.trace.diagnose.cause import Evidence
from megatron.adaptive.trace.diagnose.causes.slow_rank import SlowRankCause
from megatron.adaptive.trace.diagnose.samples import Measured, measure
from megatron.adaptive.trace.machine_counters import ELAPSED, THROTTLED
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.trace_format import trace_file_name
from tests.support.synthetic_trace import Fault, SyntheticRun, write_synthetic

from .conftest import NOISE

SLOW = (2, 3)
"""Global ranks of stage 1. They form a tensor-parallel group and are slow in all runs."""


def measured(folder: Path, counters: dict[int, dict[str, int]] | None = None) -> Measured:
    """Returns the measurements of a run in which pairs of ranks form tensor-parallel groups.

    ``counters`` contains the machine counters of ranks, which are the same in each iteration.
    """
    faults = tuple(Fault(kind="slow-rank", rank=rank, factor=1.4) for rank in SLOW)
    run = SyntheticRun(faults=faults, replicas=2, **{**NOISE, "iterations": 16})
    write_synthetic(folder, run)
    for rank in range(run.world_size):
        path = folder / trace_file_name(rank)
        header, *lines = path.read_text().splitlines()
        record = json.loads(header)
        record |= {"tp_rank": record["dp_rank"], "dp_rank": 0}
        of_rank = (counters or {}).get(rank, {})
        lines = [
            json.dumps({**json.loads(line), "machine": of_rank})
            if of_rank and line.startswith('{"begin')
            else line
            for line in lines
        ]
        path.write_text("\n".join([json.dumps(record), *lines]) + "\n")
    return measure(read_run(folder))


def slow_ranks(m: Measured) -> list[Finding]:
    cause = SlowRankCause()
    return [
        replace(finding, description=cause.describe(finding))
        for finding in cause.find(Evidence(m, None), ())
    ]


def waiting_for(m: Measured, rank: int | None) -> Measured:
    """Returns ``m`` with additional collectives in which the group ``SLOW`` waits for ``rank``.

    If ``rank`` is ``None``, the group waits for each of its members in turn.
    """
    count = 4 * len(m.iterations)
    start_ns = np.zeros((count, 2), dtype=np.int64)
    if rank is None:
        start_ns[::2, 0] = start_ns[1::2, 1] = 1_000_000
    else:
        start_ns[:, SLOW.index(rank)] = 1_000_000
    joined = JoinedCollectives(
        kind="tensor",
        operation="all-reduce",
        ranks=SLOW,
        iteration=np.repeat(m.iterations, 4),
        start_ns=start_ns,
        end_ns=start_ns + 2_000_000,
        step_iteration=m.iterations,
        step_ns=np.full((len(m.iterations), 2), 8_000_000),
        per_step=4.0,
        total_ns=8e6,
        size_bytes=1024.0,
    )
    return replace(m, collectives=(joined,))


def test_without_evidence_the_group_is_named(tmp_path: Path) -> None:
    (finding,) = slow_ranks(measured(tmp_path))
    assert finding.ranks == SLOW
    assert "one of ranks 2-3 (stage 1, host0), which share every layer" in finding.headline


@pytest.mark.parametrize("rank", SLOW)
def test_the_rank_that_its_machine_delays_is_named(tmp_path: Path, rank: int) -> None:
    step_ns = 200_000_000
    idle = {ELAPSED: step_ns, THROTTLED: 0}
    counters = dict.fromkeys(range(8), idle)
    counters[rank] = {ELAPSED: step_ns, THROTTLED: step_ns // 3}
    (finding,) = slow_ranks(measured(tmp_path, counters))
    assert finding.ranks == (rank,)
    assert finding.reason is not None
    assert finding.reason.counter == THROTTLED


@pytest.mark.parametrize("rank", SLOW)
def test_the_rank_for_which_collectives_wait_is_named(tmp_path: Path, rank: int) -> None:
    (finding,) = slow_ranks(waiting_for(measured(tmp_path), rank))
    assert finding.ranks == (rank,)


def test_a_group_whose_members_are_late_in_turn_is_named_whole(tmp_path: Path) -> None:
    (finding,) = slow_ranks(waiting_for(measured(tmp_path), None))
    assert finding.ranks == SLOW


def test_ranks_of_replicas_are_still_named_each(tmp_path: Path) -> None:
    faults: Any = tuple(Fault(kind="slow-rank", rank=rank, factor=1.4) for rank in (3, 4))
    write_synthetic(
        tmp_path, SyntheticRun(faults=faults, replicas=3, **{**NOISE, "iterations": 16})
    )
    findings = slow_ranks(measure(read_run(tmp_path)))
    assert {finding.ranks for finding in findings} == {(3,), (4,)}
