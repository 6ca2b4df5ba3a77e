"""Tests that stages with different numbers of ranks give the same results as a single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from .launch import SMALL_GPT, CaseRuns

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(640)]

# Tests with three ranks cover the same behaviour, so tests with four ranks run only in the long
# suite.
FOUR = [pytest.mark.long]
LIMIT_S = 600.0
STEPS = 4
REL = 1e-5
BASE = f"{SMALL_GPT} --num-layers 4 --train-iters 4 --attention-dropout 0 --hidden-dropout 0"
ONE = "--pipeline-schedule megatron"
UNTIED = "--untie-embeddings-and-output-weights"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
HALF = "--bf16"


def unequal(sizes: str, schedule: str, more: str = "") -> str:
    """Returns flags for ``schedule`` with different numbers of replicas for each stage.

    ``more`` contains additional flags.

    ``sizes`` contains the number of replicas of each stage, such as ``2-1``.
    """
    stages = len(sizes.split("-"))
    flags = f"--pipeline-model-parallel-size {stages} --stage-data-parallel-sizes {sizes} "
    return f"{flags}--pipeline-schedule {schedule} {more}".strip()


# The outer keys are world sizes. The inner keys are flags that also change the reference.
CASES: dict[int, dict[str, list[str]]] = {
    3: {
        "": [
            unequal("2-1", "1f1b"),
            unequal("2-1", "adaptive"),
            unequal("2-1", "gpipe", "--partition 3-1"),
            unequal("1-2", "1f1b"),
            unequal("1-2", "adaptive", "--activation-cap 1 --split-backward False"),
            unequal("1-2", "1f1b", "--overlap-grad-reduce --transport gloo"),
            unequal("2-1", "adaptive", "--transport tcp"),
        ],
        UNTIED: [unequal("2-1", "1f1b"), unequal("1-2", "adaptive")],
        DROPOUT: [unequal("2-1", "1f1b"), unequal("1-2", "adaptive")],
        HALF: [unequal("2-1", "adaptive")],
    },
    4: {
        "": [
            unequal("2-1-1", "1f1b", "--partition 2-1-1"),
            unequal("2-1-1", "adaptive", "--partition 2-1-1"),
            unequal("1-2-1", "adaptive", "--partition 1-2-1 --overlap-grad-reduce"),
        ]
    },
}
THREE = "--global-batch-size 6"  # This batch size can be divided among three replicas.
CASES[4][THREE] = [unequal("1-3", "1f1b"), unequal("3-1", "adaptive")]

# Each item contains the flags of a job and its last iteration. Each job resumes from the checkpoint
# of the previous job.
PARTS = {
    3: [
        (unequal("2-1", "1f1b"), 1),
        ("--pipeline-model-parallel-size 3 --partition 2-1-1", 2),
        (unequal("1-2", "adaptive"), 4),
    ],
    4: [
        ("--pipeline-model-parallel-size 2", 1),
        (unequal("2-1-1", "adaptive", "--partition 2-1-1"), 2),
        ("--tensor-model-parallel-size 2", 3),
        (unequal("1-1-2", "1f1b", "--partition 1-1-2"), 4),
    ],
}
CHANGING = ("", UNTIED, DROPOUT, HALF, THREE)


def case(name: str, flags: str, steps: int = STEPS, after: str | None = None) -> dict[str, Any]:
    """Returns a case for ``worker.py``, which takes ``steps`` steps and saves a checkpoint.

    The case has the name ``name`` and the flags ``flags``, and continues from the case ``after``.
    """
    all_flags = f"{BASE} {flags}".split()
    return {
        "name": name, "flags": all_flags, "steps": steps, "evaluate_after": STEPS,
        "after": after, "save": True,
    }  # fmt: skip


def part(size: int, number: int) -> str:
    return f"part-{size}-{number}"


def cases_of(size: int) -> list[dict[str, Any]]:
    """Returns all cases with the world size ``size``."""
    if size == 1:
        return [case(f"one {changes}".strip(), f"{changes} {ONE}") for changes in CHANGING]
    cases = [
        case(f"{changes} {flags}".strip(), f"{changes} {flags}")
        for changes, several in CASES[size].items()
        for flags in several
    ]
    for number, (flags, steps) in enumerate(PARTS[size]):
        before = part(size, number - 1) if number else None
        cases.append(case(part(size, number), flags, steps, before))
    return cases


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> CaseRuns:
    """Returns an object that trains all cases on first use, and provides their results."""
    return CaseRuns(cases_of, tmp_path_factory.mktemp, LIMIT_S)


def told(seen: dict[str, Any], key: str) -> list[float]:
    """Returns the values that the ranks report under ``key``, and checks that all ranks agree.

    ``seen`` contains the reports of all ranks.
    """
    first, *others = [values for values in seen[key] if values]
    for other in others:
        assert other == pytest.approx(first, rel=1e-6, abs=0)
    agreed: list[float] = first
    return agreed


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the weights in the checkpoint of the last iteration in ``folder``, keyed by name."""
    whole = folder / "whole.pt"
    if not whole.exists():
        dcp_to_torch_save(folder / f"iter_{STEPS:07d}", whole)
    loaded = torch.load(whole, weights_only=False)
    return {
        name: value
        for name, value in loaded.items()
        if isinstance(value, torch.Tensor) and not name.startswith("optimizer")
    }


def require_equal_numbers(
    runs: CaseRuns, size: int, name: str, changes: str, since: int = 0
) -> None:
    reference = f"one {changes}".strip()
    seen, expected = runs(size, name), runs(1, reference)
    # Values in bf16 have only 8 bits of precision, so this comparison only detects lost parts and
    # parts that are counted twice.
    rel = 0.02 if changes == HALF else REL
    for key in ("losses", "grad_norms"):
        assert told(seen, key) == pytest.approx(told(expected, key)[since:], rel=rel, abs=0)
    for key in ("params_norm", "evaluated"):
        assert told(seen, key) == pytest.approx(told(expected, key), rel=rel, abs=0)
    if changes == HALF:
        return
    here, there = weights(runs.folders[size] / name), weights(runs.folders[1] / reference)
    assert here.keys() == there.keys()
    for key, value in there.items():
        torch.testing.assert_close(here[key], value, rtol=1e-4, atol=2e-6, msg=key)


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "changes", "flags"),
    [
        pytest.param(size, changes, further, marks=FOUR if size == 4 else [])
        for size, several in CASES.items()
        for changes, flags in several.items()
        for further in flags
    ],
    ids=str,
)
def test_unequal_stages_equal_one_process(
    runs: CaseRuns, size: int, changes: str, flags: str
) -> None:
    require_equal_numbers(runs, size, f"{changes} {flags}".strip(), changes)


@pytest.mark.long
@pytest.mark.parametrize("size", [3, pytest.param(4, marks=FOUR)])
def test_checkpoints_load_into_other_shapes_and_back(runs: CaseRuns, size: int) -> None:
    losses = []
    for number in range(len(PARTS[size])):
        losses += told(runs(size, part(size, number)), "losses")
    expected = told(runs(1, "one"), "losses")
    assert losses == pytest.approx(expected, rel=REL, abs=0)
    since = PARTS[size][-2][1]
    require_equal_numbers(runs, size, part(size, len(PARTS[size]) - 1), "", since)
