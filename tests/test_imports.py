"""Tests imports without optional packages, and tests that ``megatron`` is a namespace package."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

WITHOUT_TORCH = [
    "megatron.adaptive.errors",
    "megatron.adaptive.extension",
    "megatron.adaptive.config",
    "megatron.adaptive.cluster",
    "megatron.adaptive.planner",
    "megatron.adaptive.schedule",
    "megatron.adaptive.trace",
]

# Files in the folder on the left must not import from the folders on the right. As an exception,
# the tests of the benchmarks may import benchmarks.
FORBIDDEN = {
    "megatron": ("benchmarks", "gpu_check", "harness", "studies", "tests"),
    "harness": ("benchmarks", "gpu_check", "studies", "tests"),
    "benchmarks": ("gpu_check", "studies", "tests"),
    "gpu_check": ("benchmarks", "studies", "tests"),
    "tests": ("benchmarks", "studies"),
    "studies": ("benchmarks", "gpu_check"),
    "tools": ("benchmarks", "gpu_check", "studies"),
    "scripts": ("benchmarks", "gpu_check", "harness", "studies", "tests"),
    "examples": ("benchmarks", "gpu_check", "harness", "studies", "tests"),
}

# This script imports a module while torch and megatron-core are unavailable. If the module is a
# package, the script also imports all modules in the package. For ``schedule``, numba is also
# unavailable, because importing numba is slow and only the compiled simulation needs it.
BLOCKED_IMPORT = """
import importlib, pkgutil, sys

blocked = ("torch", "numba") if sys.argv[1].endswith("schedule") else ("torch",)

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked or name.startswith("megatron.core"):
            raise ModuleNotFoundError(f"{name} is blocked in this test", name=name)
        return None

sys.meta_path.insert(0, Blocked())
module = importlib.import_module(sys.argv[1])
for found in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
assert "torch" not in sys.modules
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_import_without_torch(name: str) -> None:
    done = run("-c", BLOCKED_IMPORT, name)
    assert done.returncode == 0, done.stderr


def test_the_block_blocks() -> None:
    done = run("-c", BLOCKED_IMPORT, "torch")
    assert done.returncode != 0
    assert "torch is blocked in this test" in done.stderr


def test_megatron_is_a_namespace() -> None:
    assert not (ROOT / "megatron" / "__init__.py").exists()
    done = run("-c", "import megatron, megatron.adaptive; print(megatron.__file__)")
    assert done.stdout.strip() == "None", done.stderr


def test_installs_beside_megatron_core() -> None:
    code = """
import importlib.util
import megatron.adaptive
assert importlib.util.find_spec("megatron.core") is not None
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_the_wheel_runs_where_there_is_no_checkout(tmp_path: Path) -> None:
    """Checks that a wheel can be built, and that the installed wheel works without a checkout."""
    environment = {**os.environ, "PYTHON": sys.executable}
    build = ["bash", str(ROOT / "scripts" / "build_wheel.sh"), str(tmp_path / "dist")]
    done = subprocess.run(
        build, env=environment, capture_output=True, text=True, check=False, timeout=250
    )
    if "infiniband/verbs.h does not compile" in done.stderr:
        pytest.skip("needs infiniband/verbs.h (libibverbs-dev)")
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert "manylinux" in wheel.name
    assert len(list((tmp_path / "dist").glob("*.tar.gz"))) == 1
    with zipfile.ZipFile(wheel) as files:
        names = {name.partition(".data/data/")[2] or name for name in files.namelist()}
    for script in ("pretrain_gpt.py", "examples/gpt/pretrain_gpt_distributed_small.sh"):
        assert f"share/megatron-adaptive/{script}" in names
    assert "megatron/adaptive/py.typed" in names
    outside = ("benchmarks", "csrc", "gpu_check", "harness", "studies", "tests")
    assert not any(name.startswith(outside) for name in names)
    site = tmp_path / "site"
    install = [
        *(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site),
        wheel,
    ]
    subprocess.run(install, check=True, capture_output=True, timeout=100)
    code = """
from megatron.adaptive import extension
from megatron.adaptive.config import environment
print(extension.require("the test").__file__, environment.WORK_FOLDER)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    extension, folder = done.stdout.split()
    assert (Path(extension).is_relative_to(site), folder) == (True, str(tmp_path)), done.stderr


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_folders_do_not_import_what_stands_beside_them(folder: str) -> None:
    """Checks that no file in ``folder`` imports from a folder that ``FORBIDDEN`` lists for it."""
    wrong = [
        f"{path.relative_to(ROOT)}: imports {name}"
        for path in (ROOT / folder).rglob("*.py")
        for name in imported_names(path)
        if name.split(".")[0] in FORBIDDEN[folder]
        and not (name.startswith("benchmarks") and path.parent == ROOT / "tests" / "benchmarks")
    ]
    assert wrong == []


def imported_names(path: Path) -> list[str]:
    """Returns the names of all modules that the file ``path`` imports, even inside functions."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module or "")
    return names
