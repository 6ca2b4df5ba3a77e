"""Tests findings about collectives, such as late members of groups and congested groups."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.collectives import collective_figures, join_collectives
from megatron.adaptive.trace.diagnose import Diagnosis, diagnose
from megatron.adaptive.trace.read import read_run
from tests.support.detailed_trace import NUMBER, Times, add_collectives
from tests.support.synthetic_trace import SyntheticRun, write_synthetic


def diagnosed(folder: Path, kind: str, groups: list[tuple[int, ...]], times_ms: Times) -> Diagnosis:
    """Returns the diagnosis of a synthetic run of eight ranks with collectives of kind ``kind``.

    ``groups`` contains the ranks of each group. ``times_ms`` takes an iteration and a rank, and
    returns how late the rank starts a collective and how long its transfer takes.
    """
    write_synthetic(folder, SyntheticRun(num_ranks=4, replicas=2, iterations=16, rank_sigma=0.005))
    add_collectives(folder, kind, groups, times_ms)
    return diagnose(read_run(folder))


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
    assert "tensor-parallel ranks wait 18 ms per step for rank 3 (stage 1" in finding.headline
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


@pytest.mark.parametrize("kind", ["data", "expert"])
def test_late_replicas_and_ranks_with_more_tokens_are_no_slow_members(
    tmp_path: Path, kind: str
) -> None:
    def late(iteration: int, rank: int) -> tuple[float, float]:
        return (0.9 if rank == 3 else 0.0), 0.1

    assert causes(diagnosed(tmp_path, kind, PAIRS, late)) == []


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
    # The trace of one member was removed, so the collectives of its group cannot be analyzed.
    assert join_collectives(read_run(tmp_path), [3]) == []


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
    (index,) = (n for n, line in enumerate(lines) if line.startswith('{"begin_iteration": 3,'))
    marker = json.loads(lines[index])
    marker["collectives"][0][field] = value
    lines[index] = json.dumps(marker)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(TraceError, match="field 'collectives' must be"):
        read_run(tmp_path)
