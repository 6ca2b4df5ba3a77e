"""Tests that ``scripts/soak.sh`` lists existing soak tests, and rejects other names."""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess

from tests.multiprocess.launch import ROOT

SCRIPT = ROOT / "scripts" / "soak.sh"


def test_every_soak_of_the_script_is_a_module() -> None:
    modules = re.findall(r"^\w+ +\d+ +(tests\.\S+)", SCRIPT.read_text(), re.MULTILINE)
    assert len(modules) > 10
    for module in modules:
        assert importlib.util.find_spec(module) is not None, module


def test_the_script_says_how_long_all_soaks_may_take() -> None:
    """Checks that the script of all soak tests states the sum of their time limits, in hours."""
    text = SCRIPT.read_text()
    minutes = re.findall(r"^\w+ +(\d+) +tests\.\S+", text, re.MULTILINE)
    (hours,) = re.findall(r"at most (\d+) hours", text)
    assert int(hours) == math.ceil(sum(map(int, minutes)) / 60)


def test_an_unknown_soak_is_one_line_and_status_2() -> None:
    done = subprocess.run(["bash", SCRIPT, "nothing"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: unknown soak test nothing; the soak tests are commands, ")
