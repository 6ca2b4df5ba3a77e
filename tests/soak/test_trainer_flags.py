"""Tests how runs with single flags are judged, and that every flag of the trainer is in a test."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import pytest

from megatron.adaptive.config.arguments import flag_table
from tests.multiprocess.launch import ROOT
from tests.soak.trainer_flags import QUICK, SETS, Run, Trainer, judge, read_sets

STEP = ("1", "4.5", "1.0")
ROW = "name | --swiglu | --glu-linear-offset 1 --ranks 4"


def run(*numbers: tuple[str, ...], error: str = "") -> Run:
    return Run(not error, numbers, (error,) if error else ())


class Recorded:
    """Stand-in for :class:`Trainer` that returns prepared results."""

    def __init__(self, **runs: Run) -> None:
        self._runs = runs

    def run(self, flag_set: object, kind: str) -> Run:
        return self._runs[kind]


def test_a_row_has_flags_of_the_context_and_flags_to_test() -> None:
    row = read_sets(ROW)["name"]
    assert (row.ranks, row.context, row.mark) == (4, ("--swiglu",), "")
    assert row.flags == ("--glu-linear-offset", "1")
    assert {row.mark for row in SETS.values()} == {"", "same", "refused"}


@pytest.mark.parametrize(
    ("mark", "engine", "core", "context", "result"),
    [
        ("", run(STEP), run(STEP), run(), "equal"),
        ("", run(STEP), run(STEP), run(STEP), "IDLE"),
        ("same", run(STEP), run(STEP), run(STEP), "equal"),
        ("same", run(STEP), run(STEP), run(), "CHANGES"),
        ("", run(STEP), run(), run(), "DIFFERS"),
        ("", run(), run(), run(), "DIFFERS"),
        ("", run(error="error: a bug"), run(STEP), run(), "FAILS"),
        ("", run(STEP), run(error="error: CUDA"), run(), "own fails"),
        ("refused", run(error="error: no"), run(), run(), "refused"),
        ("refused", run(STEP, error="error: late"), run(), run(), "FAILS"),
        ("refused", run(STEP), run(), run(), "FAILS"),
    ],
)
def test_results(mark: str, engine: Run, core: Run, context: Run, result: str) -> None:
    row = read_sets(f"{ROW} | {mark}")["name"]
    trainer = cast(Trainer, Recorded(engine=engine, own=core, context=context))
    assert judge(trainer, row)[0] == result


def test_every_flag_of_the_trainer_is_in_a_test() -> None:
    paths = [path for path in (ROOT / "tests").rglob("*") if path.suffix in {".py", ".txt"}]
    # The test of Megatron-LM's command line contains flags, but only tests their names.
    skipped = {"megatron_lm_flags.py", Path(__file__).name}
    texts = [path.read_text() for path in paths if path.name not in skipped]
    names_in_tests = set(re.findall(r"--[a-z0-9-]+|\b[a-z0-9_]+\b", "\n".join(texts)))
    for rows in flag_table().values():
        for spelling, _, _ in rows:
            names = re.findall(r"--[a-z0-9-]+", spelling)
            fields = {name.strip("-").replace("-", "_") for name in names}
            assert not names_in_tests.isdisjoint({*names, *fields}), (
                f"no test has the flag {names[0]}"
            )


@pytest.mark.long
@pytest.mark.multiprocess
def test_some_rows_train(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    results = [judge(trainer, SETS[name]) for name in QUICK]
    assert [result for result, _ in results] == ["equal", "equal", "refused"], results
