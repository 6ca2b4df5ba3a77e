"""Tensors from GPU to GPU over shared memory channels, without a GPU: a stand-in for its driver.

The stand-in (``csrc/tests/standin_cuda.cc``) is a library that is opened in the place of the
driver; the real thing is in ``tests/gpu/test_cuda_ipc.py``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from .cpp_tests import ROOT, SANITIZED, CppTests

THREADS = ("-O1", "-fsanitize=thread")


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which(os.environ.get("CXX") or "c++")
    if found is None:
        pytest.skip("there is no C++ compiler")
    return found


@pytest.mark.slow
@pytest.mark.sanitizer
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("flags", "folder"),
    [(SANITIZED, "cpp-tests"), (THREADS, "cpp-tests-threads")],
    ids=["address", "thread"],
)
def test_cpp(compiler: str, flags: tuple[str, ...], folder: str) -> None:
    programs = CppTests(compiler, flags=flags, folder=ROOT / "build" / folder)
    library: Path = programs.library("standin_cuda")
    done = subprocess.run(
        [programs.build("cuda_ipc_test")],
        env={**os.environ, "STANDIN_CUDA_LIBRARY": str(library)},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("0 failed\n")
