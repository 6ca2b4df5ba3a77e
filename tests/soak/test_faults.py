"""The benchmark of faults finds what it is to find, and a part that fails takes no other along."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.report import Result, Row
from tests.soak import control_plane, damages


def test_a_part_that_fails_is_missed_and_the_others_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "others_busy", lambda: 0.5)
    target = tmp_path / "result.json"

    def fail() -> Result:
        raise RuntimeError("no disk | here")

    def work() -> Result:
        if target.exists():
            kept.append(len(json.loads(target.read_text())["rows"]))
        return Result(rows=[Row(what="it", value=1, goal=1)])

    kept: list[int] = []
    parts = {"first": work, "second": fail, "third": work, "other": work}
    options = argparse.Namespace(part=["third", "first", "second"], json=target)
    assert report.measure(parts, options, seed=3) == 1
    assert kept == [2]
    found = json.loads(target.read_text())
    assert [row["met"] for row in found["rows"]] == [True, False, True]
    assert found["rows"][1]["note"] == "RuntimeError: no disk / here"
    assert found["seed"] == 3
    assert "other programs used 50% of the processors" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "wanted"), [("", None), ("--part a c", ["a", "c"]), ("--part c --part a", ["c", "a"])]
)
def test_parts_are_named_in_one_flag_or_several(words: str, wanted: list[str] | None) -> None:
    parser = report.parser_of("What it measures.", ("a", "b", "c"))
    assert parser.parse_args(words.split()).part == wanted


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
