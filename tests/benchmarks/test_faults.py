"""The benchmark of faults finds what it is to find, and a part that fails takes no other along."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.report import Result, Row
from benchmarks.trust import control_plane, damages


def test_a_part_that_fails_is_missed_and_the_others_stay(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "others_busy", lambda: 0.5)

    def fail() -> Result:
        raise RuntimeError("no disk | here")

    def work() -> Result:
        return Result(rows=[Row(what="it", value=1, goal=1)])

    kept: list[int] = []
    parts = {"first": work, "second": fail, "third": work}
    total = report.run(parts, lambda total: kept.append(len(total.rows)))
    assert kept == [1, 2, 3]
    assert [row.met for row in total.rows] == [True, False, True]
    assert total.rows[1].note == "RuntimeError: no disk / here"
    assert report.finish(total, None) == 1
    assert "other programs used 50% of the processors" in capsys.readouterr().out


def test_nodes_join_a_manager_at_once_and_are_lost(tmp_path: Path) -> None:
    result = control_plane.measure(24, 0.05, 2.0, tmp_path, seed=1, silent=False)
    joined, late, cores, memory, status = result.rows
    assert joined.value is not None
    assert late.value is not None
    assert late.value < 2
    assert memory.met
    assert cores.value is not None
    assert status.value is not None
    assert result.facts["control plane"]["morphs"] >= 1


@pytest.mark.long
def test_damages_are_found_and_mended(tmp_path: Path) -> None:
    shapes = ("trainer-1", "pipeline-1")
    result = damages.measure(tmp_path, 60, 4, 6, seed=1, shapes=shapes)
    assert {row.what: row.met for row in result.rows if row.met is False} == {}
