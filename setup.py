"""Build of the optional C++ extension; everything else about the package is in pyproject.toml.

Two environment variables steer it, each 0 (leave out), 1 (must be there) or auto (the default: if
this machine can build it):

* ``MEGATRON_ADAPTIVE_EXTENSION``: the extension as a whole. Without it the package works, only
  slower where ranks of one node talk to each other.
* ``MEGATRON_ADAPTIVE_RDMA``: its part for RDMA, which needs ``infiniband/verbs.h``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SWITCHES = ("0", "1", "auto")
SOURCES = (
    "csrc/bindings/arrival.cc",
    "csrc/bindings/module.cc",
    "csrc/bindings/node.cc",
    "csrc/bindings/open_channel.cc",
    "csrc/bindings/python.cc",
    "csrc/bindings/torch_tensor.cc",
    "csrc/bindings/transport.cc",
    "csrc/common/assembler.cc",
    "csrc/common/completions.cc",
    "csrc/common/copy.cc",
    "csrc/common/fd_passing.cc",
    "csrc/common/hello.cc",
    "csrc/common/link.cc",
    "csrc/common/link_watch.cc",
    "csrc/common/listener.cc",
    "csrc/common/loopback.cc",
    "csrc/common/message.cc",
    "csrc/common/reactor.cc",
    "csrc/common/socket_address.cc",
    "csrc/common/socket_io.cc",
    "csrc/common/unshared_fd.cc",
    "csrc/cuda/agreement.cc",
    "csrc/cuda/arena.cc",
    "csrc/cuda/driver.cc",
    "csrc/cuda/owners.cc",
    "csrc/rdma/channel.cc",
    "csrc/rdma/devices.cc",
    "csrc/rdma/fate.cc",
    "csrc/rdma/incoming.cc",
    "csrc/rdma/outgoing.cc",
    "csrc/rdma/outgoing_io.cc",
    "csrc/rdma/receives.cc",
    "csrc/rdma/resources.cc",
    "csrc/rdma/select.cc",
    "csrc/rdma/status.cc",
    "csrc/rdma/wire.cc",
    "csrc/shm/channel.cc",
    "csrc/shm/courier.cc",
    "csrc/shm/decision_log.cc",
    "csrc/shm/device_slots.cc",
    "csrc/shm/distance.cc",
    "csrc/shm/incoming.cc",
    "csrc/shm/limits.cc",
    "csrc/shm/outgoing.cc",
    "csrc/shm/segment.cc",
    "csrc/tcp/buffers.cc",
    "csrc/tcp/channel.cc",
    "csrc/tcp/connection.cc",
    "csrc/tcp/frame.cc",
    "csrc/tcp/writer.cc",
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
int main() { int count = 0; return ibv_get_device_list(&count) == nullptr; }
"""


def switch(name: str) -> str:
    """Returns the value of an environment variable that is 0, 1 or auto."""
    value = os.environ.get(name, "auto") or "auto"
    if value not in SWITCHES:
        raise SystemExit(f"error: {name}={value!r} must be one of {', '.join(SWITCHES)}")
    return value


def say(line: str) -> None:
    """Prints one line about the build, where pip shows it with -v and on failure."""
    print(f"megatron-adaptive: {line}", file=sys.stderr, flush=True)


def reason_of(error: BaseException) -> str:
    """Returns an exception's text as one line, without the long command of a failed compiler."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, subprocess.CalledProcessError):
            return f"{cause.cmd[0]} failed with status {cause.returncode}, see its messages above"
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(error).split())


class BuildExtension(build_ext):
    """Builds with RDMA where the headers are; a failure ends the build only where asked to."""

    def build_extension(self, ext: Extension) -> None:
        """Builds the extension, or says in one line why there is none."""
        try:
            from pybind11.setup_helpers import ParallelCompile

            self._configure(ext)
            with ParallelCompile(default=len(os.sched_getaffinity(0))):
                super().build_extension(ext)
        except Exception as error:  # compilers fail in many ways, and none may stop an install
            reason = reason_of(error)
            if not ext.optional:
                raise SystemExit(f"error: the C++ extension was not built: {reason}") from error
            say(f"warning: the C++ extension was not built and is left out: {reason}")

    def _configure(self, ext: Extension) -> None:
        """Adds what depends on this machine."""
        import pybind11

        ext.include_dirs.append(pybind11.get_include())
        rdma = self._use_rdma()
        if rdma:
            ext.define_macros.append(("MEGATRON_ADAPTIVE_RDMA", "1"))
            ext.libraries.append("ibverbs")
        ext.depends.append(self._record(f"rdma={rdma}\n"))
        say(f"building the C++ extension {'with' if rdma else 'without'} RDMA")

    def _use_rdma(self) -> bool:
        wanted = switch("MEGATRON_ADAPTIVE_RDMA")
        if wanted == "0":
            return False
        reason = self._probe_rdma()
        if reason is None:
            return True
        if wanted == "1":
            raise RuntimeError(
                "MEGATRON_ADAPTIVE_RDMA=1, but a program with infiniband/verbs.h and -libverbs "
                f"does not build (on Debian: install libibverbs-dev): {reason}"
            )
        return False

    def _probe_rdma(self) -> str | None:
        """Builds a small program against libibverbs; returns why that failed, None if it did."""
        compiler = getattr(self.compiler, "compiler_cxx", None) or ["c++"]
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.cc")
            source.write_text(RDMA_PROBE)
            command = [*compiler, str(source), "-o", str(Path(folder, "probe")), "-libverbs"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except OSError as error:
                return str(error)
        if done.returncode == 0:
            return None
        return next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)

    def _record(self, text: str) -> str:
        """Writes a file that changes only with the configuration, to be depended on."""
        path = Path(self.build_temp, "configuration.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        return str(path)


def extensions() -> list[Extension]:
    """Returns the extension, or nothing where it is switched off."""
    if switch("MEGATRON_ADAPTIVE_EXTENSION") == "0":
        return []
    return [
        Extension(
            "megatron.adaptive._C",
            sources=list(SOURCES),
            include_dirs=["csrc"],
            depends=[str(path) for path in sorted(Path("csrc").rglob("*.h"))],
            libraries=["dl"],  # opens the CUDA driver at run time, if there is one
            extra_compile_args=list(COMPILE_ARGS),
            language="c++",
            # Lets an editable install go on when the file was not built.
            optional=switch("MEGATRON_ADAPTIVE_EXTENSION") != "1",
        )
    ]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExtension})
