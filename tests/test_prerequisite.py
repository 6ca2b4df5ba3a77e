"""Tests the error messages and progress of ``prerequisite.sh --python VERSION`` without a network.

The tests run the script in a copy of the files that it reads, with a separate cache folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .multiprocess.launch import ROOT

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
FILES = ("prerequisite.sh", "pyproject.toml", "setup.py", *ROOT.glob("requirements*.txt"))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Returns a folder with copies of the files that the script reads."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    return folder


def run(
    checkout: Path, arguments: str, *, script: str = "prerequisite.sh", **variables: str
) -> tuple[int, str, str]:
    """Runs ``script`` in ``checkout`` with ``arguments``. Returns its status, stdout and stderr."""
    done = subprocess.run(
        ["bash", str(checkout / script), *arguments.split()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(checkout.parent),
            "PYENV_ROOT": str(checkout.parent / "none"),
            "XDG_CACHE_HOME": str(checkout.parent / "cache"),
            # These variables make pip ignore the settings of this machine and not use the network.
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            **variables,
        },
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--python", "--python must be a version of two numbers, such as 3.12, got ''"),
        ("--python 3", "--python must be a version of two numbers, such as 3.12, got '3'"),
        (
            "--python 3.12.1",
            "--python must be a version of two numbers, such as 3.12, got '3.12.1'",
        ),
        ("--python 2.7", "--python must be a version of two numbers, such as 3.12, got '2.7'"),
        ("--python 3.9", "--python must be 3.10 or newer, got 3.9"),
        (
            "--python 3.99",
            "--python 3.99: Python 3.99 is not installed; install it with pyenv install 3.99, or"
            " Debian's python3.99-venv",
        ),
        (
            "--python 3.12 --rdma",
            "--python 3.12 cannot be combined with --rdma; remove --rdma or --all",
        ),
        (
            "--python 3.12 --gpu-target",
            "--gpu-target and --python 3.12 cannot be combined; use one of them",
        ),
    ],
)
def test_a_python_that_cannot_be_set_up_is_refused_in_one_line(
    checkout: Path, arguments: str, line: str
) -> None:
    assert run(checkout, arguments) == (2, "", f"error: {line}\n")
    # scripts/test.sh must print the same error, and must not run any tests.
    if arguments.startswith("--python 3.9"):
        status, printed, errors = run(checkout, arguments, script="scripts/test.sh")
        assert (status != 0, printed, errors) == (True, "", f"error: {line}\n")


def test_the_environment_to_be_used_is_named_without_making_it(checkout: Path) -> None:
    status, printed, errors = run(checkout, "--python 3.12 --print-python")
    path = checkout.parent / "cache/megatron-adaptive/python-3.12/bin/python"
    assert (status, printed, errors) == (0, f"{path}\n", "")
    assert not path.parents[1].exists()


@pytest.mark.long
def test_a_python_of_pyenv_is_used_where_its_command_fails(checkout: Path) -> None:
    """Checks that the environment is created, and that a second call installs torch again."""
    commands, versions = checkout.parent / "bin", checkout.parent / "pyenv/versions"
    commands.mkdir()
    shim = commands / f"python{VERSION}"
    shim.write_text("#!/bin/sh\necho 'pyenv: version is not installed' >&2\nexit 127\n")
    shim.chmod(0o755)
    real = versions / f"{VERSION}.99/bin/python"
    real.parent.mkdir(parents=True)
    real.symlink_to(Path(sys._base_executable))  # type: ignore[attr-defined]
    environment = checkout.parent / f"cache/megatron-adaptive/python-{VERSION}"
    variables = {"PATH": f"{commands}:{os.environ['PATH']}", "PYENV_ROOT": str(versions.parent)}
    for _ in range(2):
        status, printed, errors = run(checkout, f"--python {VERSION}", **variables)
        first, *_, last = errors.splitlines()
        assert (status, printed) == (2, "")
        assert first == f"creating the environment {environment} with {real}"
        assert last.startswith(f"error: --python {VERSION}: pip could not install torch==")
        assert (environment / "bin/python").exists()
        assert not (environment / ".torch").exists()
