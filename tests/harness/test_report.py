"""Tests that a failed part of a program counts as a missed goal, and that other parts still run."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness import report
from harness.report import Result, Row


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
    options = argparse.Namespace(part=["third", "first", "second"], json=target, results=None)
    assert report.measure(parts, options, seed=3) == 1
    assert kept == [2]
    content = json.loads(target.read_text())
    assert [row["met"] for row in content["rows"]] == [True, False, True]
    assert content["rows"][1]["note"] == "RuntimeError: no disk / here"
    assert content["seed"] == 3
    assert "other programs used 50% of the processors" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "expected"),
    [("", None), ("--part a c", ["a", "c"]), ("--part c --part a", ["c", "a"])],
)
def test_parts_are_named_in_one_flag_or_several(line: str, expected: list[str] | None) -> None:
    parser = report.parser_of("What it measures.", ("a", "b", "c"))
    assert parser.parse_args(line.split()).part == expected


def test_results_are_appended_with_command_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "others_busy", lambda: 0.0)
    monkeypatch.setattr(
        sys, "argv", [str(report.ROOT / "benchmarks/transport.py"), "--part", "a b"]
    )
    page = tmp_path / "results" / "2026-11-machine.md"
    options = argparse.Namespace(part=None, json=None, results=page)
    row = Row(what="latency", value=2.0, unit="us", goal=3)
    for _ in range(2):
        assert report.measure({"a": lambda: Result(rows=[row])}, options) == 0
    text = page.read_text()
    assert text.startswith("# 2026-11-machine\n")
    assert text.count("Command: `python benchmarks/transport.py --part 'a b'`.") == 2
    assert text.count(row.line) == 2
    assert text.count(f"Commit: {report.commit_of()}. processor: ") == 2


def test_the_commit_names_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert report.commit_of(tmp_path) == "unknown"
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    commit = git("rev-parse", "--short", "HEAD")
    assert report.commit_of(tmp_path) == commit
    (tmp_path / "file").write_text("2")
    assert report.commit_of(tmp_path) == f"{commit} with changes"
