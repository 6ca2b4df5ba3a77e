"""Builds and runs the C++ tests in ``csrc/tests``, with the address and undefined sanitizers.

Objects are kept in ``build/cpp-tests`` under a digest of what they are made of, so that only what
changed is compiled again.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLAGS = (
    *("-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-I", "csrc", "-pthread"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)
# What all test programs are linked with; neither Python nor an RDMA device is needed for it.
FOLDERS = ("common", "shm", "tcp")
COMPILE_LIMIT_S = 280


class CppTests:
    """The test programs of one compiler."""

    def __init__(self, compiler: str, folder: Path = ROOT / "build" / "cpp-tests") -> None:
        self._compiler = compiler
        self._folder = folder
        headers = sorted((ROOT / "csrc").rglob("*.h"))
        self._headers = hashlib.sha256(b"".join(path.read_bytes() for path in headers))

    def build(self, name: str) -> Path:
        """Returns the program of ``csrc/tests/<name>.cc``.

        Raises:
            AssertionError: it does not compile without warnings; carries the compiler's words.
        """
        sources = [ROOT / "csrc" / "tests" / f"{name}.cc"]
        for folder in FOLDERS:
            sources += sorted((ROOT / "csrc" / folder).glob("*.cc"))
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(self._compile, sources))
        program = self._folder / name
        self._run([*(str(path) for path in objects), "-o", str(program)])
        return program

    def _compile(self, source: Path) -> Path:
        digest = self._headers.copy()
        digest.update(source.read_bytes())
        digest.update(repr((self._compiler, FLAGS)).encode())
        name = f"{source.parent.name}-{source.stem}"
        target = self._folder / f"{name}.{digest.hexdigest()[:16]}.o"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            for old in target.parent.glob(f"{name}.*.o"):
                old.unlink(missing_ok=True)
            fresh = target.with_suffix(f".{os.getpid()}.new")
            self._run(["-c", str(source.relative_to(ROOT)), "-o", str(fresh)])
            fresh.replace(target)
        return target

    def _run(self, arguments: list[str]) -> None:
        done = subprocess.run(
            [self._compiler, *FLAGS, *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMPILE_LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
