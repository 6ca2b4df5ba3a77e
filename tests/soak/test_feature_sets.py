"""Tests how feature sets are read and compared. If MEGATRON_LM is set, three sets are trained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.launch import forkserver
from tests.plugin.user_script import edited
from tests.soak.feature_set_table import SETS
from tests.soak.feature_sets import TREE, Run, Tree, compare, measure, reason_of

STEP = {"losses": {"lm loss": "0x1.8p+2"}, "norm": "0x1.0p+0", "weights": "aa"}


def run(*notes: dict[str, Any], status: int | None = 0, **reason: Any) -> Run:
    return Run(status=status, lines=[[], list(notes)], **reason)


def test_sets_are_what_their_lines_say() -> None:
    assert len(SETS) >= 40
    layout = SETS["v-uneven-layout"]
    assert layout.flags[-2:] == ("--pipeline-model-parallel-layout", "Et|tt|t|L")
    assert layout.engine_flags == ("--pipeline-placement", "v")
    assert layout.is_v
    assert layout.own_flags == ("--pipeline-schedule", "megatron")
    assert [SETS[name].ranks for name in ("adaptive", "replicas", "pipeline-of-4")] == [2, 4, 4]
    assert "--ranks" not in SETS["replicas"].flags
    # The schedule of megatron-core draws different random numbers for dropout. The reference run
    # therefore uses this project's engine with the same flag.
    assert "--keyed-dropout" in SETS["keyed-dropout"].own_flags


@pytest.mark.parametrize(
    ("reference", "engine", "result"),
    [
        (run(STEP), run(STEP), "equal"),
        (run(STEP), run({**STEP, "losses": {"lm loss": "0x1.8000002p+2"}}), "DIFFERS"),
        (run(STEP), run({**STEP, "weights": "ab"}), "DIFFERS"),
        (run(STEP), run(STEP, STEP), "DIFFERS"),
        (run({**STEP, "losses": {}}), run({**STEP, "losses": {}}), "FAILS"),
        (run(status=1, reason="CUDA"), run(), "own fails"),
        (run(STEP), run(status=2, reason="no", is_named=True), "refused"),
        (run(STEP), run(STEP, status=2, reason="late", is_named=True), "FAILS"),
        (run(STEP), run(status=1, reason="a bug"), "FAILS"),
        (run(STEP), run(status=None), "FAILS"),
    ],
)
def test_results(reference: Run, engine: Run, result: str) -> None:
    assert compare(SETS["adaptive"], reference, engine)[0] == result


@pytest.mark.parametrize(
    ("norm", "result"),
    [("0x1.000008p+0", "equal"), ("0x1.00008p+0", "DIFFERS"), ("none", "DIFFERS")],
)
def test_sums_of_a_v_may_differ_in_their_last_bits(norm: str, result: str) -> None:
    other = {**STEP, "norm": norm, "weights": "ranks hold other layers"}
    assert compare(SETS["v-zb"], run(STEP), run(other))[0] == result
    assert compare(SETS["adaptive"], run(STEP), run(other))[0] == "DIFFERS"


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "RuntimeError: [gloo] Connection closed by peer\nx\nValueError: too wide\n",
            ("ValueError: too wide", False),
        ),
        (
            "megatron.adaptive.errors.ConfigError: schedule: give another\n",
            ("schedule: give another", True),
        ),
        ("rank 0: error: schedule: give another\n", ("schedule: give another", True)),
        (
            "pretrain_gpt.py: error: unrecognized arguments: --x\n",
            ("unrecognized arguments: --x", False),
        ),
        ("done\n", ("no line of the log contains an error", False)),
    ],
)
def test_reasons(log: str, reason: tuple[str, bool]) -> None:
    assert reason_of(log) == reason


SCRIPT = """\
import os
import torch
from functools import partial
if __name__ == "__main__":
    run(extra_args_provider=add_modelopt_args if has_nvidia_modelopt else None)
"""


def test_a_script_gets_the_lines_of_the_page() -> None:
    assert edited(SCRIPT).splitlines() == [
        "import os",
        "import megatron.adaptive",
        "megatron.adaptive.install()",
        "import torch",
        "from functools import partial",
        "_record()",
        'if __name__ == "__main__":',
        "    run(extra_args_provider=megatron.adaptive.add_arguments)",
    ]
    with pytest.raises(AssertionError, match="^the script must contain exactly once: import torch"):
        edited(SCRIPT.replace("import torch\n", ""))


@pytest.mark.multiprocess
def test_a_set_that_runs_again_replaces_its_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that a set can be trained again with the same ``--logs`` folder."""
    # Creating a :class:`Tree` changes these variables, so restore them after the test.
    for name in ("PATH", "MAKEFLAGS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    helpers = tmp_path / "tree" / "megatron" / "core" / "datasets"
    helpers.mkdir(parents=True)
    (helpers / "Makefile").write_text("all:\n")
    (tmp_path / "tree" / "pretrain_gpt.py").write_text(SCRIPT)
    tree = Tree(tmp_path / "tree", tmp_path / "logs", _server=forkserver())
    log = tmp_path / "logs" / "adaptive" / "engine" / "log.txt"
    for _ in range(2):
        assert tree.run(SETS["adaptive"], "engine").status == 1
        assert log.read_text().count("KeyError: 'megatron.training.training'") >= 1
        assert not (log.parent / "old").exists()
        (log.parent / "old").touch()


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.skipif(TREE not in os.environ, reason=f"{TREE} is not set to a Megatron-LM checkout")
def test_three_sets_of_a_checkout(tmp_path: Path) -> None:
    tree = Tree(Path(os.environ[TREE]), tmp_path)
    rows = [measure(tree, SETS[name]) for name in ("adaptive", "chunks-interleaved", "v-zb")]
    assert [row["result"] for row in rows] == ["equal"] * 3, rows
