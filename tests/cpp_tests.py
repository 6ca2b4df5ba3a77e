"""Builds the C++ tests in ``csrc/tests``, by default with address and UB sanitizers.

Object files are cached in ``$XDG_CACHE_HOME/megatron-adaptive/cpp-tests`` (in ``~/.cache`` if the
variable is not set). Their names contain a digest of their inputs. All checkouts of a user share
the cache, so only changed sources are recompiled.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASICS = ("-std=c++17", "-g1", "-Wall", "-Wextra", "-Werror", "-I", "csrc", "-pthread")
THREADS = ("-O1", "-fsanitize=thread")
SANITIZED = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# This flag enables real RDMA verbs, which need libibverbs and its headers. It is passed only to the
# sources that use verbs, so the objects of other sources can be reused.
VERBS_DEFINED = "-DMEGATRON_ADAPTIVE_RDMA"
VERBS = ("-O1", VERBS_DEFINED)
# All test programs are linked with the C++ sources in these folders, which do not need Python.
FOLDERS = ("common", "cuda", "shm", "tcp", "rdma")
COMPILE_LIMIT_S = 280
KEPT_S = 14 * 24 * 3600.0  # Objects that were not used for this number of seconds are removed.


class CppTests:
    """Builds test programs with a compiler.

    Args:
        compiler: Path of the compiler.
        flags: Compiler flags in addition to ``BASICS``.
        folder: Folder for the programs. Each combination of flags needs a separate folder.
    """

    def __init__(
        self,
        compiler: str,
        *,
        flags: Sequence[str] = SANITIZED,
        folder: Path = ROOT / "build" / "cpp-tests",
    ) -> None:
        self._compiler = compiler
        self._flags = (*BASICS, *flags)
        self._folder = folder
        self._objects = cache_folder()
        self._version = subprocess.run([compiler, "--version"], capture_output=True, check=True)
        headers = sorted((ROOT / "csrc").rglob("*.h"))
        self._headers = hashlib.sha256(b"".join(path.read_bytes() for path in headers))

    def build(self, name: str, *more: str) -> Path:
        """Builds ``csrc/tests/<name>.cc`` with the files ``more``, and returns the program's path.

        A program without a ``main`` function is linked with ``test_main.cc``.

        Raises:
            AssertionError: The program cannot be compiled without warnings. The message contains
                the compiler's output.
        """
        sources = [ROOT / "csrc" / "tests" / f"{part}.cc" for part in (name, *more)]
        if not any("\nint main(" in source.read_text() for source in sources):
            sources.append(sources[0].with_name("test_main.cc"))
        for folder in FOLDERS:
            sources += sorted((ROOT / "csrc" / folder).glob("*.cc"))
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(self._compile, sources))
        program = self._folder / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run([*self._flags, *map(str, objects), "-o", str(program), "-ldl"])
        return program

    def library(self, name: str) -> Path:
        """Builds ``csrc/tests/<name>.cc`` as a separate shared library, and returns its path.

        Raises:
            AssertionError: See :meth:`build`.
        """
        made = self._compile(ROOT / "csrc" / "tests" / f"{name}.cc", "-fPIC")
        target = self._folder / f"lib{name}.so"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run([*self._flags, "-shared", str(made), "-o", str(target)])
        return target

    def _compile(self, source: Path, *more: str) -> Path:
        knows_verbs = source.parent.name == "rdma" or source.name.startswith("rdma_")
        flags = [flag for flag in self._flags if knows_verbs or flag != VERBS_DEFINED]
        digest = self._headers.copy()
        digest.update(source.read_bytes())
        digest.update(repr((self._version.stdout, flags, more)).encode())
        name = f"{source.parent.name}-{source.stem}"
        target = self._objects / f"{name}.{digest.hexdigest()[:24]}.o"
        if target.exists():
            target.touch()
        else:
            fresh = target.with_suffix(f".{os.getpid()}.new")
            self._run([*flags, *more, "-c", str(source.relative_to(ROOT)), "-o", str(fresh)])
            fresh.replace(target)
        return target

    def _run(self, arguments: Sequence[str]) -> None:
        done = subprocess.run(
            [self._compiler, *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMPILE_LIMIT_S,
        )
        assert done.returncode == 0, done.stderr


def compiler_or_skip() -> str:
    """Returns the path of the C++ compiler, or skips the test if there is no compiler."""
    compiler = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++")
    if compiler is None:
        import pytest  # Import pytest here, because benchmarks use this file without pytest.

        pytest.skip("there is no C++ compiler")
    return compiler


def cache_folder() -> Path:
    """Removes cached objects that were not used for two weeks. Returns the path of the cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "megatron-adaptive" / "cpp-tests"
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        try:
            if time.time() - path.stat().st_mtime > KEPT_S:
                path.unlink()
        except FileNotFoundError:  # A test that runs in another checkout has removed the file.
            pass
    return folder
