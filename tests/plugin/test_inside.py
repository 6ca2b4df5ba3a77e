"""Compares this package with megatron-core's schedule, in programs with their own training loop."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.trace.read import read_run

from ..multiprocess.launch import ROOT, torchrun
from .releases import INSTALLED, real

PROGRAM = Path(__file__).with_name("user_inside.py")
WHOLE = {"settings": {"split_backward": False}}
SPLIT = {"settings": {"schedule": "hinted", "split_backward": True}}
OWN = {
    "settings": {"trace_dir": "traces"},
    "models": {
        "actor": {"schedule": "1f1b", "trace_dir": "traces of the actor"},
        "critic": {"schedule": "gpipe", "trace_dir": "traces"},
    },
}
# Only the critic uses a schedule of this package. The other models use megatron-core's schedule.
ONE = {"models": {"critic": {"schedule": "dfc"}}}
REPLICAS: list[dict[str, Any]] = [
    {"program": "actor", "runs": {"whole": WHOLE, "own": OWN}},
    {"program": "policy", "runs": {"split": SPLIT, "gloo": {"settings": {"transport": "gloo"}}}},
    {"program": "policy", "shape": {"overlap": True}, "runs": {"split": SPLIT}},
    {"program": "bridge", "runs": {"whole": WHOLE}},
]
CHUNKS: list[dict[str, Any]] = [
    {"program": "actor", "shape": {"vp": 2}, "runs": {"split": SPLIT, "one": ONE}},
    {
        "program": "policy",
        "shape": {"vp": 2},
        "runs": {"interleaved": {"settings": {"schedule": "interleaved"}}},
    },
    {
        "program": "bridge",
        "shape": {"vp": 2},
        # The run "odd" has 3 microbatches on 2 pipeline ranks, which megatron-core's schedule
        # rejects.
        "runs": {"split": SPLIT, "odd": {**WHOLE, "shape": {"drops_last": True}}},
    },
]
WORKERS: list[dict[str, Any]] = [
    {"program": "replay", "runs": {"split": SPLIT}},
    {"program": "threads", "runs": {"split": SPLIT}},
]
FOREIGN: list[dict[str, Any]] = [
    {"program": "bridge", "shape": {"foreign": True}, "runs": {"whole": WHOLE, "split": SPLIT}}
]
releases = pytest.mark.parametrize(
    "python_path",
    [
        pytest.param(INSTALLED, marks=[pytest.mark.slow, pytest.mark.multiprocess]),
        pytest.param("0.19.2", marks=real),
    ],
    indirect=True,
)


def run(
    cases: list[dict[str, Any]], world_size: int, folder: Path, python_path: str = str(ROOT)
) -> list[dict[str, Any]]:
    """Runs each case without and with ``install()``, and checks that the results are bitwise equal.

    Returns:
        The results of all ranks with each of the case's settings.
    """
    cases_file, results_file = folder / "cases.json", folder / "results.json"
    plain: dict[str, Any] = {"plain": None}
    cases_file.write_text(json.dumps([{**case, "runs": plain | case["runs"]} for case in cases]))
    torchrun(
        PROGRAM,
        [str(cases_file), str(results_file)],
        world_size=world_size,
        log=folder / "output.txt",
        limit_s=200.0,
        python_path=python_path,
    )
    results: list[dict[str, Any]] = json.loads(results_file.read_text())
    for case, result in zip(cases, results, strict=True):
        expected = result.pop("plain")
        assert result.keys() == case["runs"].keys()
        for name, seen in result.items():
            # The results must be bitwise equal to those without ``install()``.
            assert seen == expected, f"{case['program']} {name}"
    return results


@pytest.mark.long
@releases
def test_unequal_microbatches_on_two_replicas(python_path: str, tmp_path: Path) -> None:
    run(REPLICAS, 4, tmp_path, python_path)
    said = (tmp_path / "output.txt").read_text()
    for number, schedule in (("", "1f1b"), (", for model 2", "adaptive"), (", for model 3", "gpi")):
        assert f"schedule {schedule}" in said
        assert number in said
    # Each model must have a separate trace, which contains only training steps.
    actor = read_run(tmp_path / "traces of the actor")
    assert sorted(actor.ranks) == [0, 1, 2, 3]
    counts = [4, 2, 4, 2], [2, 2, 2, 2]  # The second replica has fewer microbatches.
    for rank, trace in actor.ranks.items():
        actions = trace.table().of_kind("F")
        expected = dict(enumerate(counts[rank % 2], start=1))
        assert Counter(actions.iteration.tolist()) == expected
    # The reference and the critic were configured with the same folder, so one of them must use
    # another folder.
    for folder in ("traces", "traces-model-2"):
        assert sorted(read_run(tmp_path / folder).ranks) == [0, 1, 2, 3]


@releases
def test_two_chunks(python_path: str, tmp_path: Path) -> None:
    run(CHUNKS, 2, tmp_path, python_path)


@releases
def test_workers_that_replay_choices_or_call_from_other_threads(
    python_path: str, tmp_path: Path
) -> None:
    run(WORKERS, 2, tmp_path, python_path)


@pytest.mark.parametrize("python_path", [pytest.param("0.19.2", marks=real)], indirect=True)
def test_process_groups_of_the_program(python_path: str, tmp_path: Path) -> None:
    """Checks that results are the same if a program creates its process groups itself."""
    run(FOREIGN, 4, tmp_path, python_path)
