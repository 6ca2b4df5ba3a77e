"""Checks that machine counters in the traces explain why a rank is slow."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.diagnose import Diagnosis, diagnose
from megatron.adaptive.trace.gpu_counters import (
    GPU_CLOCK,
    GPU_ERRORS,
    GPU_HOT,
    GPU_OTHERS,
    GPU_POWER_LIMITED,
    GPU_REPLAYS,
)
from megatron.adaptive.trace.machine_counters import (
    CLOCK,
    CLOCK_LIMIT,
    DISK_PAGES,
    DISK_READ,
    DISK_WAIT,
    ELAPSED,
    FULL_CLOCK,
    KERNEL,
    MACHINE_BUSY,
    MEMORY_WAIT,
    OWN_BUSY,
    PROCESSOR_WAIT,
    PROCESSORS,
    STEAL,
    THROTTLED,
    TURN_WAIT,
)
from megatron.adaptive.trace.network_counters import (
    LINK_ERRORS,
    LINK_PAUSES,
    LINK_RETRIES,
    LINK_SPEED,
    RESENT_SEGMENTS,
    SENT_SEGMENTS,
)
from megatron.adaptive.trace.read import read_run
from tests.support.synthetic_trace import Fault, SyntheticRun, write_synthetic

from .conftest import NOISE

Count = Callable[[int, int], dict[str, float]]
"""Function that takes a rank and an iteration, and returns the values of machine counters by name.

Values that are times are given as fractions of the iteration.
"""

NOT_TIMES = (
    PROCESSORS,
    DISK_PAGES,
    DISK_READ,
    SENT_SEGMENTS,
    RESENT_SEGMENTS,
    CLOCK,
    CLOCK_LIMIT,
    FULL_CLOCK,
    LINK_ERRORS,
    LINK_RETRIES,
    LINK_PAUSES,
    LINK_SPEED,
    GPU_CLOCK,
    GPU_OTHERS,
    GPU_ERRORS,
    GPU_REPLAYS,
    TURN_WAIT,
)

RANKS = 4
SLOW = Fault(kind="slow-rank", rank=2, factor=1.5)


def diagnosed(
    folder: Path, count: Count, *faults: Fault, iterations: int = 16, hosts: int = 1, **header: str
) -> Diagnosis:
    """Returns the diagnosis of a synthetic run with the machine counters that ``count`` returns.

    Args:
        folder: Folder for the traces.
        count: Function that takes a rank and an iteration, and returns counters that replace the
            default values.
        faults: Faults to simulate in the run.
        iterations: Number of iterations.
        hosts: Number of machines.
        header: Additional fields for the trace headers.
    """
    run = SyntheticRun(faults=faults, hosts=hosts, **{**NOISE, "iterations": iterations})
    write_synthetic(folder, run)
    for rank, path in enumerate(sorted(folder.glob("*.jsonl"))):
        lines = path.read_text().split("\n")
        lines[0] = json.dumps({**json.loads(lines[0]), **header})
        for number, line in enumerate(lines):
            if line.startswith('{"begin_iteration"'):
                marker = json.loads(line)
                elapsed_ns = 400_000_000
                fractions = {OWN_BUSY: 0.8, MACHINE_BUSY: 0.8 * RANKS, PROCESSOR_WAIT: 0.01}
                counted = {**fractions, **count(rank, marker["begin_iteration"])}
                others = {name: int(counted.pop(name)) for name in NOT_TIMES if name in counted}
                machine = {name: round(part * elapsed_ns) for name, part in counted.items()}
                machine |= {ELAPSED: elapsed_ns, PROCESSORS: 8, **others}
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
        ({PROCESSOR_WAIT: 0.3, PROCESSORS: 1}, "may use fewer processors", "taskset"),
        ({PROCESSOR_WAIT: 0.3}, "ranks share processors of host", "OMP_NUM_THREADS"),
        ({PROCESSOR_WAIT: 0.3, THROTTLED: 0.28}, "a quota on processor time", "cpu.max"),
        ({STEAL: 0.25}, "takes its processors away for 25%", "does not share its processors"),
        ({GPU_HOT: 0.3}, "the temperature of its GPU", "cooling"),
        ({GPU_POWER_LIMITED: 0.3}, "the power limit of its GPU", "nvidia-smi -pl"),
        ({GPU_OTHERS: 2}, "2 other processes on host0 use the rank", "stop the other processes"),
        ({GPU_ERRORS: 1}, "has 1 uncorrectable errors per step", "exclude host0"),
        ({GPU_REPLAYS: 40}, "retransmits 40 PCIe packets per step", "PCIe link"),
        ({MEMORY_WAIT: 0.3, DISK_PAGES: 400}, "is short of memory", "free memory"),
        (
            {DISK_WAIT: 0.3, DISK_PAGES: 400},
            "its memory or its files are read from disk",
            "free memory",
        ),
    ],
    ids=[
        "other-programs",
        "pinned",
        "crowded",
        "quota",
        "steal",
        "hot",
        "power",
        "shared",
        "memory errors",
        "replays",
        "memory",
        "disk",
    ],
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
        only(1, **{PROCESSOR_WAIT: 0.3}),  # Rank 1 waits for a processor, but rank 2 is slow.
        # All ranks wait for the disk, so this does not explain why one rank is slow.
        lambda rank, _: {DISK_WAIT: 0.3},
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


def test_memory_that_one_rank_lacks_is_counted_on_all_ranks_of_the_machine(tmp_path: Path) -> None:
    def count(rank: int, iteration: int) -> dict[str, float]:
        return {MEMORY_WAIT: 0.3, DISK_PAGES: 90 if rank == SLOW.rank else 0}

    finding = next(f for f in diagnosed(tmp_path, count, SLOW).findings if f.cause == "slow rank")
    assert finding.reason is not None
    assert finding.reason.counter == MEMORY_WAIT


def test_time_in_the_kernel_counts_as_shortage_of_memory_only_if_memory_is_short(
    tmp_path: Path,
) -> None:
    for memory, is_named in ((0.08, True), (0.01, False)):
        count = only(SLOW.rank, **{MEMORY_WAIT: memory, KERNEL: 0.3, DISK_PAGES: 90})
        (finding,) = diagnosed(tmp_path / str(memory), count, SLOW).findings
        counters = [reason.counter for reason in (finding.reason,) if reason is not None]
        assert counters == ([MEMORY_WAIT] if is_named else [])


def test_a_rank_with_two_waits_has_two_reasons(tmp_path: Path) -> None:
    both = {PROCESSOR_WAIT: 0.25, MEMORY_WAIT: 0.12, DISK_PAGES: 90}
    (finding,) = diagnosed(tmp_path, only(SLOW.rank, **both), SLOW).findings
    assert finding.reason is not None
    assert finding.reason.counter == PROCESSOR_WAIT
    assert [reason.counter for reason in finding.more_reasons] == [MEMORY_WAIT]
    assert f"  and {finding.more_reasons[0].text}" in finding.format()


@pytest.mark.parametrize(
    ("clocks", "device", "text"),
    [
        (
            {CLOCK: 2_000_000, CLOCK_LIMIT: 2_000_000},
            "cpu",
            "2.00 GHz instead of 3.00 GHz, because its limit is 2.0",
        ),
        ({CLOCK: 2_000_000}, "cpu", "runs at 2.00 GHz instead of 3.00 GHz"),
        ({CLOCK: 2_990_000}, "cpu", ""),
        ({CLOCK: 2_000_000}, "cuda", ""),
        ({CLOCK: 2_000_000}, "", ""),
    ],
    ids=["capped", "hot", "full", "gpu", "unknown"],
)
def test_a_slow_clock_is_a_reason_for_a_rank_without_a_gpu(
    tmp_path: Path, clocks: dict[str, float], device: str, text: str
) -> None:
    full = {CLOCK: 3_000_000, CLOCK_LIMIT: 3_200_000, FULL_CLOCK: 3_200_000}
    said = diagnosed(
        tmp_path,
        lambda rank, _: {**full, **clocks} if rank == SLOW.rank else full,
        SLOW,
        device=device,
    )
    (finding,) = said.findings
    reason = finding.reason.text if finding.reason else ""
    assert text in reason
    assert bool(text) == bool(reason)


def test_a_slow_clock_of_a_gpu_is_a_reason(tmp_path: Path) -> None:
    said = diagnosed(
        tmp_path, lambda rank, _: {GPU_CLOCK: 1200 if rank == SLOW.rank else 1900}, SLOW
    )
    (finding,) = said.findings
    assert finding.reason is not None
    assert "its GPU on host0 runs at 1200 MHz instead of 1900 MHz" in finding.reason.text


def test_counters_that_a_machine_lacks_are_named_once(tmp_path: Path) -> None:
    write_synthetic(tmp_path, SyntheticRun(**NOISE, iterations=8))
    for path in tmp_path.glob("*.jsonl"):
        text = path.read_text()
        path.write_text(text.replace('"uncounted": []', '"uncounted": ["clock_khz"]', 1))
    said = diagnose(read_run(tmp_path))
    (note,) = (note for note in said.notes if "not readable on some" in note)
    assert "some machines: clock_khz;" in note


@pytest.mark.parametrize("size_bytes", [8_000_000, 0])
def test_a_slow_disk_explains_slow_reading(tmp_path: Path, size_bytes: int) -> None:
    fault = Fault(kind="slow-data", rank=0, seconds=0.006)
    counts = {DISK_WAIT: 0.2, DISK_READ: size_bytes}
    (finding,) = diagnosed(tmp_path, only(0, **counts), fault).findings
    assert finding.cause == "slow data"
    if not size_bytes:
        assert finding.reason is None
        return
    assert finding.reason is not None
    assert "reads 8 MB per step from a disk" in finding.reason.text
    assert finding.advice[0] == finding.reason.remedy


LOST = tuple(
    Fault(kind="slow-link", rank=1, to=2, seconds=0.08, first=i, last=i) for i in (3, 7, 8, 12)
)


@pytest.mark.parametrize("resent", [6, 0])
def test_messages_that_are_late_when_packets_are_lost(tmp_path: Path, resent: int) -> None:
    def count(rank: int, iteration: int) -> dict[str, float]:
        is_lost = rank == 1 and any(fault.holds(iteration) for fault in LOST)
        return {SENT_SEGMENTS: 100, RESENT_SEGMENTS: 5 * resent if is_lost else 0}

    findings = diagnosed(tmp_path, count, *LOST, iterations=20, hosts=4).findings
    named = [(finding.cause, finding.ranks) for finding in findings]
    assert (("lossy link", (1, 2)) in named) == bool(resent)
    for finding in findings:
        if finding.cause == "lossy link":
            assert finding.reason is not None
            assert "of its TCP segments" in finding.reason.text
            assert finding.cost_fraction > 0.02


@pytest.mark.parametrize(
    ("hosts", "transport", "everywhere", "is_lossy"),
    [
        (4, "", False, True),
        (1, "gloo", False, True),
        (1, "", False, False),
        (1, "shm", False, False),
        (4, "", True, False),
    ],
    ids=["machines", "over-tcp", "unknown", "over-memory", "no-relation"],
)
def test_losses_explain_late_messages_only_if_these_cross_the_network_and_meet_them(
    tmp_path: Path, hosts: int, transport: str, everywhere: bool, is_lossy: bool
) -> None:
    def count(rank: int, iteration: int) -> dict[str, float]:
        is_lost = everywhere or any(fault.holds(iteration) for fault in LOST)
        return {SENT_SEGMENTS: 100, RESENT_SEGMENTS: 10 * is_lost}

    said = diagnosed(tmp_path, count, *LOST, iterations=20, hosts=hosts, transport=transport)
    assert any(finding.cause == "lossy link" for finding in said.findings) == is_lossy


def test_a_slow_link_that_loses_packets_says_so(tmp_path: Path) -> None:
    fault = Fault(kind="slow-link", rank=1, to=2, seconds=0.02)
    lossy = only(1, **{SENT_SEGMENTS: 100, RESENT_SEGMENTS: 4})
    (tmp_path / "tcp").mkdir()
    (tmp_path / "memory").mkdir()
    (finding,) = diagnosed(tmp_path / "tcp", lossy, fault, transport="tcp").findings
    assert (finding.cause, finding.ranks) == ("slow link", (1, 2))
    assert finding.reason is not None
    assert "retransmits 4.0% of its TCP segments" in finding.reason.text
    within = {LINK_RETRIES: 7, SENT_SEGMENTS: 100, RESENT_SEGMENTS: 4}
    (finding,) = diagnosed(tmp_path / "memory", only(1, **within), fault).findings
    assert (finding.cause, finding.reason) == ("slow link", None)


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        (
            {LINK_SPEED: 10_000},
            "runs at 10,000 Mbit/s, but the interfaces of other machines run at 25,000 Mbit/s",
        ),
        ({LINK_RETRIES: 7}, "retransmits 7 packets per step"),
        ({LINK_ERRORS: 3}, "counts 3 faulty or dropped packets per step"),
        ({LINK_PAUSES: 900}, "cannot send for 900 ticks per step"),
        ({}, ""),
    ],
    ids=["speed", "retries", "errors", "pauses", "sound"],
)
def test_ports_explain_a_slow_link_between_machines(
    tmp_path: Path, counts: dict[str, float], text: str
) -> None:
    def count(rank: int, iteration: int) -> dict[str, float]:
        return {LINK_SPEED: 25_000, LINK_PAUSES: 9, **(counts if rank == 1 else {})}

    fault = Fault(kind="slow-link", rank=1, to=2, seconds=0.02)
    findings = diagnosed(tmp_path, count, fault, hosts=4).findings
    (finding,) = (finding for finding in findings if finding.cause == "slow link")
    reason = finding.reason.text if finding.reason else ""
    assert text in reason
    assert bool(text) == bool(reason)


@pytest.mark.parametrize(("turn_wait_ns", "is_named"), [(2_000_000, False), (500_000, True)])
def test_messages_that_wait_for_a_processor_are_on_no_slow_link(
    tmp_path: Path, turn_wait_ns: int, is_named: bool
) -> None:
    fault = Fault(kind="slow-link", rank=1, to=2, seconds=0.008)
    waits = {PROCESSOR_WAIT: 0.3, TURN_WAIT: turn_wait_ns}
    findings = diagnosed(tmp_path, lambda rank, iteration: dict(waits), fault).findings
    assert ("slow link" in {finding.cause for finding in findings}) == is_named


STARVED = {PROCESSOR_WAIT: 0.8, MACHINE_BUSY: 0.8 * RANKS + 4}


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind="slow-rank", rank=2, factor=1.5, first=9),
        Fault(kind="slow-data", rank=0, seconds=0.002),
        LOST[0],
    ],
    ids=["rank", "data", "link"],
)
def test_of_ranks_without_processors_nothing_else_is_said(tmp_path: Path, fault: Fault) -> None:
    faults = tuple(replace(lost, seconds=0.04) for lost in LOST) if fault in LOST else (fault,)
    (tmp_path / "starved").mkdir()
    (tmp_path / "quiet").mkdir()

    def lost(rank: int, iteration: int) -> dict[str, float]:
        is_lost = any(fault.holds(iteration) for fault in LOST)
        return {SENT_SEGMENTS: 100, RESENT_SEGMENTS: 30 * is_lost}

    said = diagnosed(tmp_path / "starved", lambda *of: {**STARVED, **lost(*of)}, *faults, hosts=4)
    assert {finding.cause for finding in said.findings} <= {"busy machine", "spikes"}
    said = diagnosed(tmp_path / "quiet", lost, *faults, hosts=4)
    assert {finding.cause for finding in said.findings} & {"slow rank", "slow data", "lossy link"}


@pytest.mark.parametrize("machine", ['{"steal_ns": -1}', '{"steal_ns": 0.5}', "[1]", '{"a": "b"}'])
def test_damaged_counters_are_refused(tmp_path: Path, machine: str) -> None:
    write_synthetic(tmp_path, SyntheticRun(**NOISE, iterations=8))
    path = sorted(tmp_path.glob("*.jsonl"))[1]
    text = path.read_text()
    path.write_text(text.replace('"start_ns": ', f'"machine": {machine}, "start_ns": ', 2))
    with pytest.raises(TraceError, match="'machine'"):
        diagnose(read_run(tmp_path))
