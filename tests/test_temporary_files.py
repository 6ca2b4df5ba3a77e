"""Tests that test runs remove their temporary files, and that tests never share folders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness.report import ROOT

TESTS = """
import multiprocessing.util
import tempfile
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(2))
def test_a_folder_with_a_long_name(number, tmp_path):
    names = Path("names.txt")
    (tmp_path / "large").touch()
    multiprocessing.util.get_temp_dir()
    with names.open("a") as file:
        print(tmp_path, file=file)
        print(tempfile.mkdtemp(), file=file)
    lines = names.read_text().splitlines()
    assert len(set(lines)) == len(lines)
    assert not Path(lines[0], "large").exists() or number == 0

def test_that_fails(tmp_path):
    (tmp_path / "evidence").touch()
    Path("failed.txt").write_text(str(tmp_path))
    assert False
"""


def test_files_are_removed_if_tests_pass_and_names_used_once(tmp_path: Path) -> None:
    """Checks that a test run leaves only files of failed tests, and uses each folder name once."""
    (tmp_path / "test_folders.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "test_folders.py"]
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, *settings, "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    # If the temporary folder of multiprocessing were removed too early, a traceback would be
    # printed at exit.
    assert "Traceback" not in done.stderr
    assert list(tmp_path.glob("tests-*")) == []
    folders = [Path(line) for line in (tmp_path / "names.txt").read_text().splitlines()]
    assert not any((folder / "large").exists() for folder in folders)
    assert not any(folder.exists() for folder in folders[1::2])
    assert Path((tmp_path / "failed.txt").read_text(), "evidence").exists()
