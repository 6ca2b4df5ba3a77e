"""Parts of a benchmark: one that fails is a goal missed, and the others are measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.report import Result, Row


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
