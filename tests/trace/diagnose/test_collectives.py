"""Members of groups for which others wait, and congested groups, are findings of their own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.collectives import collective_figures, join_collectives
from megatron.adaptive.trace.diagnose import Diagnosis, diagnose
from megatron.adaptive.trace.read import read_run
from tests.support.synthetic_trace import SyntheticRun, write_synthetic

STEP_MS = 10.0
NUMBER = 20
"""Number of collectives of a group in an iteration."""

Times = Callable[[int, int], tuple[float, float]]
"""Function of iteration and rank: delay of the arrival, and time of the transfer, in ms."""


def diagnosed(folder: Path, kind: str, groups: list[tuple[int, ...]], times_ms: Times) -> Diagnosis:
    """Adds collectives to the traces of a made-up run of eight ranks, and diagnoses it."""
    shape = SyntheticRun(num_ranks=4, replicas=2, iterations=16, rank_sigma=0.005)
    write_synthetic(folder, shape)
    numbers = random.Random(5)
    lines = {path: path.read_text().splitlines() for path in folder.glob("trace_rank_*.jsonl")}
    paths = {int(path.stem.rpartition("_")[2]): path for path in lines}
    for members in groups:
        for iteration in range(1, shape.iterations + 1):
            arrivals = {rank: [] for rank in members}
            ends = {rank: [] for rank in members}
            for number in range(NUMBER):
                begin_ns = number * 2_000_000
                for rank in members:
                    late_ms, _ = times_ms(iteration, rank)
                    arrivals[rank].append(
                        begin_ns + int((late_ms + numbers.uniform(0, 0.05)) * 1e6)
                    )
                last_ns = max(arrivals[rank][-1] for rank in members)
                for rank in members:
                    _, transfer_ms = times_ms(iteration, rank)
                    ends[rank].append(last_ns + int(transfer_ms * numbers.uniform(0.9, 1.1) * 1e6))
            first_ns = min(_start_ns(lines[paths[rank]], iteration) for rank in members)
            for rank in members:
                _add(
                    lines[paths[rank]],
                    iteration,
                    kind,
                    members,
                    first_ns,
                    arrivals[rank],
                    ends[rank],
                )
    for path, text in lines.items():
        path.write_text("\n".join(text) + "\n")
    return diagnose(read_run(folder))


def _is_marker(line: str, iteration: int) -> bool:
    return line.startswith(f'{{"begin_iteration": {iteration},')


def _start_ns(lines: list[str], iteration: int) -> int:
    (line,) = (line for line in lines if _is_marker(line, iteration))
    return int(json.loads(line)["start_ns"])


def _add(
    lines: list[str],
    iteration: int,
    kind: str,
    members: tuple[int, ...],
    first_ns: int,
    starts_ns: list[int],
    ends_ns: list[int],
) -> None:
    """Adds the collectives of a rank to the marker of an iteration."""
    (index,) = (n for n, line in enumerate(lines) if _is_marker(line, iteration))
    marker = json.loads(lines[index])
    shift_ns = first_ns - marker["start_ns"]
    kept = [
        [number, 0, start + shift_ns, end - start]
        for number, (start, end) in enumerate(zip(starts_ns, ends_ns, strict=True))
    ]
    group = {
        "kind": kind,
        "lowest_rank": min(members),
        "size": len(members),
        "operations": ["all-reduce"],
        "totals": [[NUMBER, sum(row[3] for row in kept), NUMBER * 4096]],
        "kept": kept,
    }
    marker.setdefault("collectives", []).append(group)
    lines[index] = json.dumps(marker)


PAIRS = [(0, 1), (2, 3), (4, 5), (6, 7)]


def causes(diagnosis: Diagnosis) -> list[tuple[str, tuple[int, ...]]]:
    names = ("slow collective member", "congested collectives")
    return [(f.cause, f.ranks) for f in diagnosis.findings if f.cause in names]


def test_nothing_is_found_where_nothing_is_wrong(tmp_path: Path) -> None:
    assert causes(diagnosed(tmp_path, "tensor", PAIRS, lambda *_: (0.0, 0.3))) == []


def test_the_rank_is_named_for_which_its_group_waits(tmp_path: Path) -> None:
    def late(iteration: int, rank: int) -> tuple[float, float]:
        return (0.9 if rank == 3 else 0.0), 0.1

    diagnosis = diagnosed(tmp_path, "tensor", PAIRS, late)
    assert causes(diagnosis) == [("slow collective member", (3,))]
    (finding,) = (f for f in diagnosis.findings if f.cause == "slow collective member")
    assert finding.delay_ms == pytest.approx(0.9 * NUMBER, rel=0.1)
    assert "the tensor ranks wait 17." in finding.headline
    assert " ms of a step for rank 3 (stage 1, host" in finding.headline
    assert finding.cost_fraction > 0
    assert (finding.period.kind, finding.against) == ("lasting", "peers")


def test_a_group_that_transfers_slowly_is_named_from_then_on(tmp_path: Path) -> None:
    def congested(iteration: int, rank: int) -> tuple[float, float]:
        return 0.0, 1.5 if rank in (4, 5) and iteration >= 8 else 0.3

    diagnosis = diagnosed(tmp_path, "data", PAIRS, congested)
    assert causes(diagnosis) == [("congested collectives", (4, 5))]
    (finding,) = (f for f in diagnosis.findings if f.cause == "congested collectives")
    assert (finding.period.first, finding.period.kind) == (8, "begun")
    assert finding.factor == pytest.approx(5.0, rel=0.1)
    assert "data all-reduce of ranks 4-5 (" in finding.headline


def test_a_group_that_is_always_slower_than_others_is_named(tmp_path: Path) -> None:
    def congested(iteration: int, rank: int) -> tuple[float, float]:
        return 0.0, 1.5 if rank in (0, 1) else 0.3

    diagnosis = diagnosed(tmp_path, "tensor", PAIRS, congested)
    assert causes(diagnosis) == [("congested collectives", (0, 1))]
    (finding,) = (f for f in diagnosis.findings if f.cause == "congested collectives")
    assert (finding.period.kind, finding.against) == ("lasting", "others")


def test_late_replicas_are_no_slow_members(tmp_path: Path) -> None:
    def late(iteration: int, rank: int) -> tuple[float, float]:
        return (0.9 if rank == 3 else 0.0), 0.1

    assert causes(diagnosed(tmp_path, "data", PAIRS, late)) == []


def test_waits_and_transfers_add_up(tmp_path: Path) -> None:
    diagnosed(tmp_path, "tensor", PAIRS[:1], lambda _, rank: (0.4 * rank, 0.2))
    run = read_run(tmp_path)
    (joined,) = join_collectives(run, [3])
    whole_ns = (joined.end_ns - joined.start_ns).sum()
    assert joined.wait_ns.sum() + joined.transfer_ns.sum() == whole_ns
    (figures,) = collective_figures(run, 3)
    assert (figures.last_rank, figures.count) == (1, NUMBER)
    assert figures.last_ms == pytest.approx(0.4 * NUMBER, rel=0.15)
    assert figures.wait_ms + figures.transfer_ms == pytest.approx(whole_ns / 2 / 1e6)
    (tmp_path / "trace_rank_00001.jsonl").unlink()
    assert join_collectives(read_run(tmp_path), [3]) == []  # a member has no trace


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", 3),
        ("size", -1),
        ("totals", []),
        ("kept", [[0, 1, 0, 5]]),
        ("kept", [[0, 0, 0, -5]]),
        ("operations", "all-reduce"),
    ],
)
def test_damaged_collectives_are_named(tmp_path: Path, field: str, value: object) -> None:
    diagnosed(tmp_path, "tensor", PAIRS[:1], lambda *_: (0.0, 0.1))
    path = tmp_path / "trace_rank_00000.jsonl"
    lines = path.read_text().splitlines()
    (index,) = (n for n, line in enumerate(lines) if _is_marker(line, 3))
    marker = json.loads(lines[index])
    marker["collectives"][0][field] = value
    lines[index] = json.dumps(marker)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(TraceError, match="field 'collectives' is"):
        read_run(tmp_path)
