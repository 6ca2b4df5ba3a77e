"""The compiled part: ``copies.c``, built with the system's compiler when a run begins."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("copies.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread")


class NoCompilerError(Exception):
    """There is no compiler here, or it failed; the text says which."""


def build(folder: Path) -> Path:
    """Compile ``copies.c`` into ``folder``; returns the library.

    Raises:
        NoCompilerError: that is not possible here.
    """
    names = os.environ.get("CC", "").split()[:1] or COMPILERS
    compiler = next((path for name in names if (path := shutil.which(name))), None)
    if compiler is None:
        raise NoCompilerError(f"no C compiler ({', '.join(names)}); on Debian: gcc")
    library = folder / "copies.so"
    done = subprocess.run(
        [compiler, *FLAGS, "-o", str(library), str(SOURCE)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if done.returncode:
        raise NoCompilerError(f"{compiler} failed: {done.stderr.strip()[:500]}")
    return library


class Copies:
    """What ``copies.c`` offers, by address and size.

    Args:
        library: of :func:`build`.
    """

    def __init__(self, library: Path | str) -> None:
        found = ctypes.CDLL(str(library))
        address, size = ctypes.c_void_p, ctypes.c_size_t
        self.plain = found.copy_plain
        self.streaming = found.copy_streaming
        self.plain.argtypes = self.streaming.argtypes = [address, address, size]
        self.plain.restype = self.streaming.restype = None
        self.read = found.read_all
        self.read.argtypes, self.read.restype = [address, size], ctypes.c_uint64
        self.write = found.write_all
        self.write.argtypes, self.write.restype = [address, size, ctypes.c_uint64], None
        self.cycles = found.cycles
        self.cycles.argtypes, self.cycles.restype = [], ctypes.c_uint64
        self._line_ns = found.cache_line_ns
        self._line_ns.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_uint32]
        self._line_ns.restype = ctypes.c_double

    def cache_line_ns(self, first: int, second: int, attempts: int = 40) -> float:
        """Nanoseconds that a cache line takes from one processor to another and back.

        The least of short attempts: other programs only ever make it longer.
        """
        return float(min(self._line_ns(first, second, 2000) for _ in range(attempts)))
