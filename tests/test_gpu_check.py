"""Tests the GPU check and its time limits. ``test_gpu_rehearsal.py`` runs all of its parts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpu_check.__main__ import main
from gpu_check.check import Outcome, read_tests
from gpu_check.machine import card_and_driver, default_output
from gpu_check.parts import Part, chosen_parts, parts, set_up_part
from harness.report import ROOT
from tests.gpu import test_equivalence, test_memory, test_training
from tests.gpu.jobs import UNFUSED, trainer_flags
from tests.multiprocess.launch import rank_variables

# This script starts a second process in a new session. The second process continues after the
# script is killed.
HANGS = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)", *sys.argv[1:]]
subprocess.Popen(sleep, start_new_session=True)
print("hangs", flush=True)
time.sleep(600)
"""
WRITES = """
import json, sys
rows = [{"what": "a ratio", "value": float(sys.argv[2]), "goal": 1.0}]
json.dump({"rows": rows, "facts": {"gpus": 1}}, open(sys.argv[1], "w"))
"""


def part(name: str, code: str, *arguments: str, **others: Any) -> Part:
    limits = {"planned_s": 10.0, **others}
    return Part(name=name, command=("{python}", "-c", code, *arguments), **limits)


def report(folder: Path) -> tuple[dict[str, Any], str]:
    content = json.loads((folder / "gpu_check.json").read_text())
    return content, (folder / "gpu_check.md").read_text()


RUN = """
import sys
from pathlib import Path
from gpu_check.check import Check
from tests.test_gpu_check import some_parts
check = Check(Path(sys.argv[1]), float(sys.argv[2]), rehearse=False)
sys.exit(check.run(None, some_parts(sys.argv[1])))
"""


def some_parts(folder: str) -> list[Part]:
    """Returns parts of a GPU check that cover all possible outcomes of a part.

    The command line of the part that hangs contains ``folder``, so the test can find its processes.
    """
    return [
        part("device", WRITES, "{json}", "0.5"),
        part("hangs", HANGS, folder, planned_s=2.0),
        part("fails", "print(*range(90), sep='\\n'); raise SystemExit('no such thing')"),
        part("misses", WRITES, "{json}", "1.5"),
        part("two", "", needs=(("two GPUs", "there is only one"),)),
        part("long", "", planned_s=1000.0),
        part("works", WRITES, "{json}", "0.5", needs=(("gpus", "there is no GPU"),)),
    ]


def test_what_hangs_or_fails_is_recorded_and_the_rest_runs(tmp_path: Path) -> None:
    # Run the check in a separate process, because it kills all of its descendants.
    command = [sys.executable, "-c", RUN, str(tmp_path), "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stderr
    content, page = report(tmp_path)
    states = {part["name"]: (part["state"], part["reason"]) for part in content["parts"]}
    assert states == {
        "device": ("ok", ""),
        "hangs": ("cut", "exceeded the time limit of 4 s"),
        "fails": ("failed", "status 1: no such thing"),
        "misses": ("missed", "a ratio"),
        "two": ("left out", "there is only one"),
        "long": ("left out", "no time was left"),
        "works": ("ok", ""),
    }
    assert content["gpus"] == 1
    for part in content["parts"]:
        assert f"| {part['name']} | {part['state']} |" in page
    # The page shows only the last lines of a failed part. The log must contain all of its output.
    log = (tmp_path / "gpu_check.log").read_text()
    assert "==== hangs: cut\nhangs\n" in log
    lines = [*map(str, range(90)), "no such thing"]
    assert "\n".join(["==== fails: failed", *lines]) in log
    left = [process.pid for process in psutil.process_iter() if str(tmp_path) in _words(process)]
    assert not left


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


BARE = """
import sys
from gpu_check import __main__ as program
from gpu_check.parts import Part
part = Part(name="set-up", command={command}, planned_s=9)
program.set_up_part = lambda pack=None: part
sys.exit(program.main(sys.argv[1:]))
"""


def test_a_machine_without_torch_is_one_line_and_status_2(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    code = BARE.format(command=("echo", str(bare)))
    command = [sys.executable, "-c", code, "--output", str(tmp_path / "out"), "--minutes", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "has no torch" in done.stderr
    content, _ = report(tmp_path / "out")
    assert {entry["state"] for entry in content["parts"][1:]} == {"left out"}
    assert "nvidia-smi" in content


@pytest.mark.parametrize("has_torch", [True, False])
def test_set_up_does_not_leave_the_python_that_has_torch(has_torch: bool, tmp_path: Path) -> None:
    """Checks the choice of Python if pip cannot add packages to the virtual environment.

    ``prerequisite.sh`` then creates a new environment. Without a network, it cannot install torch
    there.
    """
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / "requirements-test.txt", tmp_path)
    (tmp_path / "scripts" / "environment.py").write_text("")
    for folder, flags in (("new", "-S -E"), ("bin", "" if has_torch else "-S -E")):
        (tmp_path / folder).mkdir()
        python = tmp_path / folder / "python3"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {flags} "$@"\n')
        python.chmod(0o755)
    new = tmp_path / "new" / "python3"
    (tmp_path / "prerequisite.sh").write_text(
        f"[[ ${{1:-}} == --print-python ]] && echo {new} || exit 1\n"
    )
    variables = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "MEGATRON_ADAPTIVE_EXTENSION": "0"}
    variables |= {"PIP_NO_INDEX": "1", "PYTHONNOUSERSITE": "1"}
    command = ["bash", str(tmp_path / "scripts" / "gpu_check.sh"), "--set-up"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100)
    expected = tmp_path / "bin" / "python3" if has_torch else new
    assert done.stdout.splitlines()[-1:] == [str(expected)], done.stderr


def test_packages_of_the_set_up_are_on_the_path_of_forked_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = str(ROOT / "build" / "gpu-check-site")
    for folders, expected in (([str(ROOT)], [str(ROOT)]), ([str(ROOT), site], [str(ROOT), site])):
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
        path = rank_variables(2, 1.0, 0)["PYTHONPATH"]
        assert path.split(os.pathsep) == expected


def test_tests_are_counted_up_to_where_they_were_cut() -> None:
    outcome = Outcome("tests")
    text = """
tests/gpu/test_one.py::test_a[x y] PASSED                 [ 10%]
tests/gpu/test_one.py::test_b FAILED                      [ 20%]
tests/gpu/test_one.py::test_c SKIPPED (no)                [ 30%]
tests/gpu/test_one.py::test_d
SKIPPED [1] tests/gpu/test_one.py:9: no
FAILED tests/gpu/test_one.py::test_b - assert 1 == 2
"""
    read_tests(text, outcome)
    assert outcome.facts["tests"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert outcome.reason == "tests/gpu/test_one.py::test_b: assert 1 == 2"
    assert outcome.facts["skips"] == [[1, "no"]]


def test_ten_minutes_hold_the_planned_limits_of_all_parts_that_one_gpu_can_run() -> None:
    for rehearse in (False, True):
        listed = parts(rehearse=rehearse)
        assert len({part.name for part in listed}) == len(listed)
        on_one_gpu = [
            part
            for part in (set_up_part(), *listed)
            if {need for need, _ in part.needs} <= {"torch", "pytest", "gpus"}
        ]
        assert sum(part.planned_s for part in on_one_gpu) <= 560
    assert on_one_gpu[0].planned_s == 30
    # The most valuable parts must run first, and parts that may make the GPU unusable must run
    # last.
    assert [part.name for part in listed] == (
        "device ipc equivalence pipeline pp1 pp2 memory resume v transports training others nccl te"
        " oom"
    ).split()


def test_the_document_has_the_planned_seconds_of_each_part() -> None:
    text = (ROOT / "docs" / "gpu_check.md").read_text()
    documented = dict(re.findall(r"^\| `?([\w-]+)`? \| (\d+) s \|", text, re.MULTILINE))
    documented |= dict(re.findall(r"^\| `nccl`, `(te)` \| (\d+) s each", text, re.MULTILINE))
    documented["nccl"] = documented["te"]
    planned = [set_up_part(), *parts(rehearse=False)]
    assert documented == {part.name: f"{part.planned_s:g}" for part in planned}


def test_every_test_of_a_gpu_is_in_one_part() -> None:
    named = [
        word.partition("::")[0]
        for part in parts(rehearse=False)
        if part.tests
        for word in part.command
        if word.startswith("tests/gpu/")
    ]
    files = {f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert set(named) == files
    # Two parts use test_memory.py. The last part runs only the test that uses up all memory, and
    # the other part excludes this test.
    assert sorted(named) == sorted([*files, "tests/gpu/test_memory.py"])


def test_jobs_on_a_gpu_compile_no_fused_kernels() -> None:
    """Checks the flags of jobs whose time limits are too short for compiling fused kernels."""
    tables = (test_equivalence.JOBS, test_training.JOBS)
    listed = [job.case(name)["flags"] for table in tables for name, job in table.items()]
    listed += [trainer_flags(""), test_memory.FLAGS.split()]
    assert all(set(UNFUSED.split()) <= set(flags) for flags in listed)
    assert not set(UNFUSED.split()) & set(trainer_flags("", is_fused=True))


def test_chosen_parts_come_in_their_own_order_after_the_one_that_finds_gpus() -> None:
    chosen = chosen_parts(["memory", "pp1"], rehearse=False)
    assert [part.name for part in chosen] == ["device", "pp1", "memory"]


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ("--parts pp3", "invalid choice: 'pp3'"),
        ("--minutes 0.1", "--minutes must be from 0.5 to 1440, got 0.1"),
        ("--pack nowhere", "--pack nowhere has no folder wheels; create it with scripts/gpu_pack"),
    ],
)
def test_bad_input_is_named(arguments: str, rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    assert rule in capsys.readouterr().err


def test_a_run_on_a_gpu_is_kept_under_results_with_card_and_driver() -> None:
    csv = (
        "name, driver_version, memory.total [MiB], memory.used [MiB]\n"
        "NVIDIA H100 80GB HBM3, 580.159.04, 81559 MiB, 0 MiB\n"
    )
    facts = card_and_driver(csv)
    assert facts == {"card": "NVIDIA H100 80GB HBM3", "driver": "580.159.04"}
    folder = default_output(facts, rehearse=False)
    assert folder.parent == ROOT / "results"
    assert folder.name.endswith("-nvidia-h100-80gb-hbm3-580.159.04")
    assert default_output(facts, rehearse=True).parent == ROOT / "runs"
    for text in ("there is no nvidia-smi", "", "NVIDIA-SMI has failed\nMake sure that"):
        assert card_and_driver(text) == {}
    assert default_output({}, rehearse=False).parent == ROOT / "runs"
