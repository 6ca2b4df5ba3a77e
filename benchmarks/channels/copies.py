"""Compiles ``copies.c`` with the system compiler when a run starts, and calls its functions."""

from __future__ import annotations

import ctypes
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path

SOURCE = Path(__file__).with_name("copies.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread")


class NoCompilerError(Exception):
    """Raised if there is no C compiler, or if the compiler has failed."""


def build(folder: Path) -> Path:
    """Compiles ``copies.c`` in ``folder``, and returns the path of the library.

    Raises:
        NoCompilerError: There is no compiler, or the compiler failed.
    """
    names = os.environ.get("CC", "").split()[:1] or COMPILERS
    compiler = next((path for name in names if (path := shutil.which(name))), None)
    if compiler is None:
        raise NoCompilerError(
            f"no C compiler is installed ({', '.join(names)}); on Debian, install gcc"
        )
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
    """Calls the functions of the compiled library.

    Args:
        library: Path of the library that :func:`build` compiled.

    Attributes:
        plain: Function that copies bytes from one address to another with memcpy.
        streaming: Function that copies bytes with store instructions that bypass the caches.
    """

    def __init__(self, library: Path | str) -> None:
        functions = ctypes.CDLL(str(library))
        address, size = ctypes.c_void_p, ctypes.c_size_t
        self.plain = functions.copy_plain
        self.streaming = functions.copy_streaming
        self.plain.argtypes = self.streaming.argtypes = [address, address, size]
        self.plain.restype = self.streaming.restype = None
        self._round_trip_ns = functions.round_trip_ns
        self._round_trip_ns.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_uint32, ctypes.c_int]
        self._round_trip_ns.restype = ctypes.c_double

    def cache_line_s(self, first: int, second: int) -> float:
        """Returns the seconds that a cache line takes from CPU ``first`` to CPU ``second``.

        The result is the minimum of many attempts, because other programs can only increase the
        duration.
        """
        return float(min(self._round_trip_ns(first, second, 2000, 0) for _ in range(40))) / 2e9

    def wake_s(self, first: int, second: int) -> float:
        """Returns the seconds that CPU ``first`` needs to wake a thread on CPU ``second``."""
        samples = [self._round_trip_ns(first, second, 200, 1) for _ in range(15)]
        return float(statistics.median(samples)) / 2e9

    def copy_s(self, nbytes: int) -> float:
        """Returns the seconds that a plain copy of ``nbytes`` takes outside of all caches."""
        count = max(8, (128 << 20) // nbytes)
        buffers = [ctypes.create_string_buffer(b"1" * nbytes, nbytes) for _ in range(2 * count)]
        start_s = time.perf_counter()
        for target, source in zip(buffers[:count], buffers[count:], strict=True):
            self.plain(target, source, nbytes)
        return (time.perf_counter() - start_s) / count
