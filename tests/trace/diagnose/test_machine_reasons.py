"""The diagnosis says what kept ranks from computing, by the counters in their traces."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.diagnose import Diagnosis, diagnose
from megatron.adaptive.trace.machine_counters import (
    DISK_PAGES,
    DISK_WAIT,
    ELAPSED,
    MACHINE_BUSY,
    MEMORY_WAIT,
    OWN_BUSY,
    PROCESSOR_WAIT,
    PROCESSORS,
    STEAL,
    THROTTLED,
)
from megatron.adaptive.trace.read import read_run
from tests.support.synthetic_trace import Fault, SyntheticRun, write_synthetic

from .conftest import NOISE

Count = Callable[[int, int], dict[str, float]]
"""Counters of a rank in an iteration, as fractions of the iteration."""

RANKS = 4
SLOW = Fault(kind="slow-rank", rank=2, factor=1.5)


def diagnosed(folder: Path, count: Count, *faults: Fault, iterations: int = 16) -> Diagnosis:
    """Diagnoses a made-up run whose ranks counted, beside what ranks of a quiet machine count."""
    run = SyntheticRun(faults=faults, **{**NOISE, "iterations": iterations})
    write_synthetic(folder, run)
    for rank, path in enumerate(sorted(folder.glob("*.jsonl"))):
        lines = path.read_text().split("\n")
        for number, line in enumerate(lines):
            if line.startswith('{"begin_iteration"'):
                marker = json.loads(line)
                elapsed_ns = 400_000_000
                fractions = {OWN_BUSY: 0.8, MACHINE_BUSY: 0.8 * RANKS, PROCESSOR_WAIT: 0.01}
                counted = {**fractions, **count(rank, marker["begin_iteration"])}
                processors = counted.pop(PROCESSORS, 8)
                pages = counted.pop(DISK_PAGES, 0)
                machine = {name: round(part * elapsed_ns) for name, part in counted.items()}
                machine |= {ELAPSED: elapsed_ns, PROCESSORS: processors, DISK_PAGES: pages}
                lines[number] = json.dumps({**marker, "machine": machine})
        path.write_text("\n".join(lines))
    return diagnose(read_run(folder))


def only(rank: int, **counts: float) -> Count:
    return lambda of, iteration: counts if of == rank else {}


@pytest.mark.parametrize(
    ("counts", "text", "remedy"),
    [
        (
            {PROCESSOR_WAIT: 0.31, MACHINE_BUSY: 0.8 * RANKS + 1.2},
            "waits for a processor take 31% of a step, while other processes keep 1.2 processors",
            "stop the other processes on",
        ),
        ({PROCESSOR_WAIT: 0.3, PROCESSORS: 1}, "may use: 1, fewer than other ranks", "taskset"),
        ({PROCESSOR_WAIT: 0.3}, "ranks on host", "OMP_NUM_THREADS"),
        ({PROCESSOR_WAIT: 0.3, THROTTLED: 0.28}, "a quota on processor time", "cpu.max"),
        ({STEAL: 0.25}, "takes its processors away for 25%", "does not share its processors"),
        ({MEMORY_WAIT: 0.3, DISK_PAGES: 400}, "is short of memory", "free memory"),
        ({DISK_WAIT: 0.3, DISK_PAGES: 400}, "its memory is read from disk", "free memory"),
    ],
    ids=["other-programs", "pinned", "crowded", "quota", "steal", "memory", "disk"],
)
def test_a_slow_rank_has_its_reason(
    tmp_path: Path, counts: dict[str, float], text: str, remedy: str
) -> None:
    everywhere = {MACHINE_BUSY: counts[MACHINE_BUSY]} if MACHINE_BUSY in counts else {}
    said = diagnosed(tmp_path, lambda rank, _: counts if rank == SLOW.rank else everywhere, SLOW)
    (finding,) = said.findings
    assert (finding.cause, finding.ranks) == ("slow rank", (SLOW.rank,))
    assert finding.reason is not None
    assert text in finding.reason.text
    assert f"because {finding.reason.text}" in said.format()
    assert remedy in finding.advice[0]
    assert said.to_json()["findings"][0]["reason"]["counter"] == finding.reason.counter


@pytest.mark.parametrize(
    "count",
    [
        lambda rank, _: {},
        only(1, **{PROCESSOR_WAIT: 0.3}),  # another rank
        lambda rank, _: {DISK_WAIT: 0.3},  # programs that read a disk, while no rank does
        lambda rank, _: {PROCESSOR_WAIT: 0.04},
    ],
    ids=["quiet", "another-rank", "disk", "little"],
)
def test_a_slow_rank_without_a_wait_of_its_own_has_no_reason(tmp_path: Path, count: Count) -> None:
    said = diagnosed(tmp_path, count, SLOW)
    (finding,) = (f for f in said.findings if f.cause == "slow rank")
    assert finding.reason is None
    assert "look for other programs" in finding.advice[-1]


def test_ranks_that_all_wait_are_found_though_none_is_slower_than_others(tmp_path: Path) -> None:
    wait = {PROCESSOR_WAIT: 0.3, MACHINE_BUSY: 0.8 * RANKS + 2}
    (finding,) = diagnosed(tmp_path, lambda rank, _: wait).findings
    assert (finding.cause, str(finding.period)) == ("busy machine", "in all iterations")
    assert finding.ranks == tuple(range(RANKS))
    assert finding.cost_fraction > 0.15
    assert finding.reason is not None
    assert "2.0 processors" in finding.reason.text


def test_a_wait_in_a_part_of_the_run_has_its_iterations(tmp_path: Path) -> None:
    def count(rank: int, iteration: int) -> dict[str, float]:
        return {PROCESSOR_WAIT: 0.3 if iteration >= 12 else 0.01}

    (finding,) = diagnosed(tmp_path, count, iterations=24).findings
    assert (finding.cause, str(finding.period)) == ("busy machine", "from iteration 12 on")


def test_a_wait_that_comes_and_goes_is_now_and_then(tmp_path: Path) -> None:
    draw = random.Random(3)
    waits = {iteration: draw.choice([0.0, 0.0, 0.4]) for iteration in range(1, 25)}
    said = diagnosed(
        tmp_path, lambda rank, iteration: {PROCESSOR_WAIT: waits[iteration]}, iterations=24
    )
    (finding,) = said.findings
    assert (finding.cause, str(finding.period)) == ("busy machine", "now and then")


def test_a_quiet_machine_and_traces_without_counters_have_no_finding(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert diagnosed(tmp_path / "a", lambda rank, _: {}).findings == ()
    write_synthetic(tmp_path / "b", SyntheticRun(**NOISE, iterations=16))
    assert diagnose(read_run(tmp_path / "b")).findings == ()


@pytest.mark.parametrize("machine", ['{"steal_ns": -1}', '{"steal_ns": 0.5}', "[1]", '{"a": "b"}'])
def test_damaged_counters_are_refused(tmp_path: Path, machine: str) -> None:
    write_synthetic(tmp_path, SyntheticRun(**NOISE, iterations=8))
    path = sorted(tmp_path.glob("*.jsonl"))[1]
    text = path.read_text()
    path.write_text(text.replace('"start_ns": ', f'"machine": {machine}, "start_ns": ', 2))
    with pytest.raises(TraceError, match="'machine'"):
        diagnose(read_run(tmp_path))
