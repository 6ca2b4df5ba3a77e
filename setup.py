"""Builds the optional C++ extension. All other settings of the package are in pyproject.toml.

Two environment variables control the build. Their values are 0 (do not build), 1 (building is
required) and auto (the default, build if possible):

* ``MEGATRON_ADAPTIVE_EXTENSION`` controls the whole extension. The package works without it, but
  messages between ranks of one node are slower.
* ``MEGATRON_ADAPTIVE_RDMA`` controls the part of the extension that uses RDMA. This part needs
  ``infiniband/verbs.h``.

Compiled objects are cached in ``$XDG_CACHE_HOME/megatron-adaptive/extension`` under a digest of all
their inputs. If the variable is not set, ``~/.cache`` is used in its place. All checkouts of a user
share the cache.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SWITCHES = ("0", "1", "auto")
FOLDERS = ("bindings", "common", "cuda", "rdma", "shm", "tcp")
SOURCES = tuple(
    str(path) for folder in FOLDERS for path in sorted(Path("csrc", folder).glob("*.cc"))
)
COMPILE_ARGS = (
    "-std=c++17",
    "-O2",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-missing-field-initializers",
)
RDMA_PROBE = """
#include <infiniband/verbs.h>
ibv_device* device = nullptr;
"""
RDMA_MACRO = "MEGATRON_ADAPTIVE_RDMA"
VERBS_HEADER = Path("/usr/include/infiniband/verbs.h")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
PYTHON_HEADER = re.compile(r"^\s*#\s*include\s+<(?:Python\.h|pybind11/)", re.MULTILINE)
PATH_VARIABLES = ("CPATH", "CPLUS_INCLUDE_PATH", "SOURCE_DATE_EPOCH")
KEPT_S = 14 * 24 * 3600.0  # Cached objects are deleted if they have not been used for this time.


def switch(name: str) -> str:
    """Returns the value of the environment variable ``name``, which is 0, 1 or auto."""
    value = os.environ.get(name, "auto") or "auto"
    if value not in SWITCHES:
        raise SystemExit(f"error: {name}={value!r} must be one of {', '.join(SWITCHES)}")
    return value


def say(line: str) -> None:
    """Prints ``line`` to stderr. pip shows it with ``-v``, or if the build fails."""
    print(f"megatron-adaptive: {line}", file=sys.stderr, flush=True)


def reason_of(error: BaseException) -> str:
    """Returns a one-line description of ``error``, without the command of a failed compiler."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, subprocess.CalledProcessError):
            return f"{cause.cmd[0]} failed with status {cause.returncode}; see its messages above"
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(error).split())


class ObjectCache:
    """Compiles source files, and reuses objects that were compiled from the same inputs.

    If a file causes warnings, its object is not cached. Therefore, a cached object is valid with
    and without ``-Werror``. Several threads and processes may use the same cache at the same time.
    """

    def __init__(self, folder: Path, pybind11: tuple[str, str]) -> None:
        """Opens the cache in ``folder``, given the version and the include folder of pybind11."""
        self._folder = folder
        self._pybind11 = pybind11
        self._texts: dict[Path, str] = {}
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                if time.time() - path.stat().st_mtime > KEPT_S:
                    path.unlink()

    def compile(self, command: Sequence[str], source: str, target: str) -> None:
        """Compiles ``source`` into the object file ``target``.

        Raises:
            CalledProcessError: The compiler failed. Its output was written to stderr.
        """
        kept = self._kept(command, source)
        if kept is not None and kept.exists():
            with suppress(OSError):  # Another process may remove the object at this moment.
                shutil.copyfile(kept, target)
                kept.touch()
                return
        done = subprocess.run(
            [*command, source, "-o", target], capture_output=True, text=True, check=False
        )
        sys.stderr.write(done.stdout + done.stderr)
        done.check_returncode()
        if kept is not None and not done.stdout + done.stderr:
            fresh = kept.with_suffix(f".{os.getpid()}.new")
            with suppress(OSError):
                shutil.copyfile(target, fresh)
                fresh.replace(kept)

    def _kept(self, command: Sequence[str], source: str) -> Path | None:
        version = compiler_version(command[0])
        if version is None:
            return None
        texts = [(str(path), self._texts[path]) for path in sorted(self._closure(Path(source)))]
        rdma = any(RDMA_MACRO in text for _, text in texts)
        digest = hashlib.sha256(repr((version, texts)).encode())
        # Most files do not include Python's headers, so their objects are valid for all Python
        # versions.
        if uses_python := any(PYTHON_HEADER.search(text) for _, text in texts):
            digest.update(repr((sys.version, self._pybind11[0])).encode())
        python_folders = {f"-I{sysconfig.get_path(name)}" for name in ("include", "platinclude")}
        for word in command:
            if word == "-Werror" or (word.startswith(f"-D{RDMA_MACRO}") and not rdma):
                continue
            if word in python_folders and not uses_python:
                continue
            # Leave out the paths of folders in this environment, because the versions above already
            # identify their content.
            own = word.startswith((f"-I{sys.prefix}", f"-I{self._pybind11[1]}"))
            digest.update(b"own" if own else word.encode() + b"\0")
        if rdma and VERBS_HEADER.exists():
            digest.update(VERBS_HEADER.read_bytes())
        digest.update(repr([os.environ.get(name) for name in PATH_VARIABLES]).encode())
        return self._folder / f"{Path(source).stem}.{digest.hexdigest()[:32]}.o"

    def _closure(self, source: Path) -> set[Path]:
        """Returns ``source`` and all project files that it includes directly or indirectly."""
        found: set[Path] = set()
        waiting = [source]
        while waiting:
            path = waiting.pop()
            if path in found:
                continue
            found.add(path)
            if path not in self._texts:
                self._texts[path] = path.read_text(encoding="utf-8")
            waiting += self._included(path)
        return found

    def _included(self, path: Path) -> Iterator[Path]:
        for name in INCLUDE.findall(self._texts[path]):
            for folder in (path.parent, Path("csrc")):
                if (folder / name).exists():
                    yield Path(os.path.normpath(folder / name))
                    break


@cache
def compiler_version(compiler: str) -> str | None:
    """Returns the version text of ``compiler``, or ``None`` if it does not print a version."""
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 and done.stdout else None


def cache_folder() -> Path:
    """Returns the folder that contains the cached objects."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return root / "megatron-adaptive" / "extension"


class BuildExtension(build_ext):
    """Builds the extension if possible. An environment variable can make the build mandatory."""

    def build_extension(self, ext: Extension) -> None:
        """Builds ``ext``. If an optional extension cannot be built, only prints the reason."""
        try:
            from pybind11.setup_helpers import ParallelCompile

            self._configure(ext)
            self._keep_objects()
            with ParallelCompile(default=len(os.sched_getaffinity(0))):
                super().build_extension(ext)
        # Catch all exceptions, because compilers fail in many ways and an optional extension may be
        # left out.
        except Exception as error:
            reason = reason_of(error)
            if not ext.optional:
                raise SystemExit(f"error: the C++ extension was not built: {reason}") from error
            say(f"warning: the C++ extension was not built and is left out: {reason}")

    def _configure(self, ext: Extension) -> None:
        """Adds the compiler settings of ``ext`` that depend on this machine."""
        import pybind11

        ext.include_dirs.append(pybind11.get_include())
        rdma = self._use_rdma()
        if rdma:
            ext.define_macros.append((RDMA_MACRO, "1"))
        ext.depends.append(self._record(f"rdma={rdma}\n"))
        say(f"building the C++ extension {'with' if rdma else 'without'} RDMA")

    def _keep_objects(self) -> None:
        """Changes the compiler object, so that it reuses cached objects."""
        import pybind11

        compiler = self.compiler
        command = getattr(compiler, "compiler_so_cxx", None)
        if command is None or compiler.compiler_type != "unix":
            return
        objects = ObjectCache(cache_folder(), (pybind11.__version__, pybind11.get_include()))
        compiled = itertools.count(1)

        def compile_one(
            target: str, source: str, _: str, words: list[str], more: list[str], *__: object
        ) -> None:
            objects.compile([*command, *words, *more], source, target)
            say(f"compiled {next(compiled)} of {len(SOURCES)} files")

        compiler._compile = compile_one

    def _use_rdma(self) -> bool:
        wanted = switch("MEGATRON_ADAPTIVE_RDMA")
        if wanted == "0":
            return False
        reason = self._probe_rdma()
        if reason is None:
            return True
        if wanted == "1":
            raise RuntimeError(
                "MEGATRON_ADAPTIVE_RDMA=1, but a program with infiniband/verbs.h does not compile "
                f"(on Debian: install libibverbs-dev): {reason}"
            )
        return False

    def _probe_rdma(self) -> str | None:
        """Tries to compile the RDMA header, and returns the error, or ``None`` on success."""
        compiler = getattr(self.compiler, "compiler_cxx", None) or ["c++"]
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.cc")
            source.write_text(RDMA_PROBE)
            command = [*compiler, "-c", str(source), "-o", str(Path(folder, "probe.o"))]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except OSError as error:
                return str(error)
        if done.returncode == 0:
            return None
        return next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)

    def _record(self, text: str) -> str:
        """Writes ``text`` to a file unless the file already contains it, and returns the path."""
        path = Path(self.build_temp, "configuration.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        return str(path)


def extensions() -> list[Extension]:
    """Returns a list that contains the extension, or an empty list if the extension is disabled."""
    if switch("MEGATRON_ADAPTIVE_EXTENSION") == "0":
        return []
    return [
        Extension(
            "megatron.adaptive._C",
            sources=list(SOURCES),
            include_dirs=["csrc"],
            depends=[str(path) for path in sorted(Path("csrc").rglob("*.h"))],
            # The library dl loads the CUDA driver and libibverbs at run time if they are installed.
            libraries=["dl"],
            extra_compile_args=list(COMPILE_ARGS),
            language="c++",
            # If the extension is optional, an editable install continues even if the build failed.
            optional=switch("MEGATRON_ADAPTIVE_EXTENSION") != "1",
        )
    ]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExtension})
