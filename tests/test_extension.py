"""Tests the loading of the C++ extension, its decision log between processes, and its C++ tests."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from megatron.adaptive import extension
from megatron.adaptive.errors import DeadlineError, TransportError

from .cpp_tests import SANITIZED, THREADS, CppTests, compiler_or_skip

ROOT = Path(__file__).resolve().parents[1]
# This timeout is longer than any successful wait, so a test that hangs fails with DeadlineError.
PATIENT_S = 60.0
SOON_S = 0.01


@pytest.fixture(scope="module")
def native() -> ModuleType:
    module = extension.load()
    if module is None:
        pytest.skip(str(extension.why_missing()))
    return module


def in_child(body: Callable[[], None]) -> int:
    """Forks a child process that runs ``body``, and returns the ID of the child.

    The child exits with a nonzero status if ``body`` raises an exception.
    """
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        body()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def join(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_python(
    code: str, *, env: dict[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


class TestLoading:
    def test_either_a_module_or_a_reason(self) -> None:
        assert (extension.load() is None) == (extension.why_missing() is not None)

    def test_importing_the_package_does_not_import_the_extension(self) -> None:
        code = (
            "import sys, megatron.adaptive.extension\nprint('megatron.adaptive._C' in sys.modules)"
        )
        assert run_python(code).stdout.strip() == "False"

    def test_absent_extension_is_a_reason_and_a_setup_error(self) -> None:
        code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "megatron.adaptive._C":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from megatron.adaptive import errors, extension
assert extension.load() is None
print(extension.why_missing())
try:
    extension.require("a test")
except errors.SetupError as error:
    print(error)
"""
        lines = run_python(code).stdout.splitlines()
        assert len(lines) == 2
        assert re.search(r"is not built for this Python( \(.*)?; build it with", lines[0])
        assert lines[1] == f"a test needs the C++ extension: {lines[0]}"

    def test_a_build_for_another_python_is_named(self, tmp_path: Path) -> None:
        package = ROOT / "megatron" / "adaptive"
        copied = tmp_path / "megatron" / "adaptive"
        copied.mkdir(parents=True)
        for name in ("__init__.py", "errors.py", "extension.py"):
            shutil.copy(package / name, copied)
        (copied / "_C.cpython-399-x86_64-linux-gnu.so").touch()
        code = "from megatron.adaptive import extension; print(extension.why_missing())"
        # Hide installed packages with -S, because this checkout may be installed, including its
        # built extension.
        command = [sys.executable, "-S", "-c", code]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        said = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        assert f"({sys.implementation.cache_tag}), only _C.cpython-399-x86_64-linux-gnu.so;" in said

    def test_extension_of_another_interface_is_refused(self) -> None:
        code = """
import sys, types
old = types.ModuleType("megatron.adaptive._C")
old.INTERFACE = 0
sys.modules["megatron.adaptive._C"] = old
from megatron.adaptive import extension
assert extension.load() is None
print(extension.why_missing())
"""
        assert "has interface 0, but this code needs interface" in run_python(code).stdout

    def test_require_gives_the_module(self, native: ModuleType) -> None:
        assert extension.require("a test") is native


class TestDecisionLog:
    def test_full_ring_raises_deadline_and_names_the_reader(self, native: ModuleType) -> None:
        writer = native.DecisionLog.create(2, 2)
        reader = native.DecisionLog.attach(writer.fd, 0)
        for value in range(2):
            writer.publish(value, SOON_S)
            assert reader.next(SOON_S) == value
        with pytest.raises(DeadlineError, match=r"decision 2 .* reader 1 is 2 decisions behind"):
            writer.publish(2, SOON_S)

    @pytest.mark.parametrize("by_reader", [True, False])
    def test_abort_wakes_a_waiting_thread(self, native: ModuleType, by_reader: bool) -> None:
        writer = native.DecisionLog.create(2, 1)
        waiting = native.DecisionLog.attach(writer.fd, 0)
        other = native.DecisionLog.attach(writer.fd, 1) if by_reader else writer
        caught: list[TransportError] = []

        def wait() -> None:
            try:
                waiting.next(PATIENT_S)
            except TransportError as error:
                caught.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        # This thread can continue during the other thread's wait only if the wait releases the GIL.
        time.sleep(0.02)
        other.abort(17)
        thread.join(PATIENT_S)
        assert [str(error) for error in caught] == [
            "the decision log was aborted with reason code 17"
        ]
        assert writer.abort_reason == waiting.abort_reason == 17
        assert not isinstance(caught[0], DeadlineError)

    def test_signal_handlers_run_during_a_wait(self, native: ModuleType) -> None:
        writer = native.DecisionLog.create(1, 1)
        ready, write_end = os.pipe()

        def follow() -> None:
            def interrupt(*_: object) -> None:
                # Only the first signal ends the wait. Ignore further signals, because the other
                # process may send several before it notices.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                raise KeyboardInterrupt

            reader = native.DecisionLog.attach(writer.fd, 0)
            writer.publish(1, SOON_S)
            assert reader.next(SOON_S) == 1
            try:
                signal.signal(signal.SIGINT, interrupt)
                os.write(write_end, b".")
                reader.next(PATIENT_S)
            except KeyboardInterrupt:
                reader.abort(2)

        pid = in_child(follow)
        os.close(write_end)
        assert os.read(ready, 1) == b"."
        os.close(ready)
        deadline = time.monotonic() + PATIENT_S
        while writer.abort_reason is None and time.monotonic() < deadline:
            time.sleep(0.05)
            os.kill(pid, signal.SIGINT)
        assert join(pid) == 0
        assert writer.abort_reason == 2

    @pytest.mark.parametrize("sizes", [(0, 4), (1, 0), (5000, 4), (1, 1 << 21)])
    def test_impossible_sizes(self, native: ModuleType, sizes: tuple[int, int]) -> None:
        with pytest.raises(ValueError, match="must be within"):
            native.DecisionLog.create(*sizes)

    @pytest.mark.parametrize("timeout_s", [-1.0, float("nan"), float("inf"), 1e9])
    def test_impossible_timeouts(self, native: ModuleType, timeout_s: float) -> None:
        writer = native.DecisionLog.create(1, 1)
        reader = native.DecisionLog.attach(writer.fd, 0)
        with pytest.raises(ValueError, match="timeout_s"):
            reader.next(timeout_s)

    def test_foreign_descriptor(self, native: ModuleType, tmp_path: Path) -> None:
        with (tmp_path / "file").open("wb+") as file:
            file.write(bytes(8192))
            file.flush()
            with pytest.raises(TransportError, match="does not hold a decision log"):
                native.DecisionLog.attach(file.fileno(), 0)
        with pytest.raises(TransportError, match="Bad file descriptor"):
            native.DecisionLog.attach(-1, 0)


class TestRdma:
    def test_devices_are_listed_or_the_build_says_why_not(self, native: ModuleType) -> None:
        if native.built_with_rdma:
            assert all(device.name for device in native.rdma_devices())
        else:
            with pytest.raises(TransportError, match="built without RDMA"):
                native.rdma_devices()

    def test_a_node_without_the_library_is_named(self, native: ModuleType) -> None:
        library = next(Path("/usr/lib").glob("*/libibverbs.so.1"), None)
        if not native.built_with_rdma or library is None or os.geteuid() != 0:
            pytest.skip("needs RDMA in the extension, the library, and root to hide it")
        hide = f"mount --bind /dev/null {library.resolve()}"
        ask = "from megatron.adaptive import _C; print(_C.built_with_rdma); _C.rdma_devices()"
        done = subprocess.run(
            ["unshare", "-m", "sh", "-ec", f"{hide}; exec '{sys.executable}' -c '{ask}'"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        # Importing the extension must succeed without libibverbs. Only the call of rdma_devices()
        # fails.
        assert done.stdout == "True\n", done.stderr
        assert "cannot be opened" in done.stderr
        assert "install libibverbs1 and ibverbs-providers" in done.stderr


def check_program(command: list[str | Path], expected: str, **env: str) -> None:
    """Runs a C++ test program, and checks that it succeeds and prints ``expected``."""
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert expected in done.stdout


@pytest.mark.slow
@pytest.mark.sanitizer
@pytest.mark.timeout(600)  # The first test also compiles the objects that all test programs share.
@pytest.mark.parametrize(
    "name",
    [
        "decision_log_test",
        "message_test",
        "completions_test",
        "reactor_test",
        "link_test",
        "link_watch_test",
        "channel_test",
        "hostile_test",
        "rdma_unit_test",
    ],
)
def test_cpp(name: str) -> None:
    check_program([CppTests(compiler_or_skip()).build(name)], "\n0 failed\n")


@pytest.mark.slow
@pytest.mark.sanitizer
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["fuzz_records", "fuzz_shm", "fuzz_tcp"])
def test_bytes_of_other_processes_are_survived(name: str) -> None:
    """Checks that C++ code survives a fixed set of corrupted inputs. See fuzz.h to try other
    inputs.
    """
    program = CppTests(compiler_or_skip()).build(name, "fuzz_main")
    check_program([program, "--runs", "3000"], "seeds and 3000 changes of them")


@pytest.mark.slow
@pytest.mark.sanitizer
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("flags", "folder"),
    [(SANITIZED, "cpp-tests"), (THREADS, "cpp-tests-threads")],
    ids=["address", "thread"],
)
def test_channels_between_gpus(flags: tuple[str, ...], folder: str) -> None:
    """Tests channels with a simulated CUDA driver. The tests in tests/gpu use the real driver."""
    programs = CppTests(compiler_or_skip(), flags=flags, folder=ROOT / "build" / folder)
    library = str(programs.library("standin_cuda"))
    check_program([programs.build("cuda_ipc_test")], "0 failed\n", STANDIN_CUDA_LIBRARY=library)


class TestBuild:
    """Tests that setup.py either builds the extension or prints an error message."""

    @staticmethod
    def build(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "setup.py", "-q", "build_ext"]
        command += ["--build-lib", str(folder / "lib"), "--build-temp", str(folder / "temp")]
        return subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )

    def test_failing_compiler_is_one_warning(self, tmp_path: Path) -> None:
        done = self.build(tmp_path, CC="false", CXX="false")
        assert done.returncode == 0, done.stderr
        assert "warning: the C++ extension was not built and is left out: false" in done.stderr
        assert list(tmp_path.rglob("*.so")) == []

    def test_a_file_without_python_is_compiled_once_for_all_versions(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr("setuptools.setup", lambda **_: None)
        spec = importlib.util.spec_from_file_location("own_setup", ROOT / "setup.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kept: list[set[Path | None]] = []
        for source in ("csrc/common/message.cc", "csrc/bindings/node.cc"):
            objects = set()
            for version in ("3.11.7", "3.12.1"):
                monkeypatch.setattr(sys, "version", version)
                headers = f"/usr/include/python{version}"
                monkeypatch.setattr(sysconfig, "get_path", lambda _, headers=headers: headers)
                files = module.ObjectCache(tmp_path, (version, "/usr/include/pybind11"))
                objects.add(files._kept(["c++", "-Icsrc", f"-I{headers}", "-c"], source))
            kept.append(objects)
        assert [len(objects) for objects in kept] == [1, 2]

    def test_switched_off(self, tmp_path: Path) -> None:
        done = self.build(tmp_path, MEGATRON_ADAPTIVE_EXTENSION="0", CC="false", CXX="false")
        assert done.returncode == 0
        assert "warning: the C++" not in done.stderr

    @pytest.mark.parametrize(
        ("switches", "expected"),
        [
            ({}, "error: the C++ extension was not built: false"),
            ({"MEGATRON_ADAPTIVE_RDMA": "1"}, "install libibverbs-dev"),
            (
                {"MEGATRON_ADAPTIVE_RDMA": "yes"},
                "MEGATRON_ADAPTIVE_RDMA='yes' must be one of 0, 1, auto",
            ),
        ],
    )
    def test_what_is_required_and_fails_is_an_error(
        self, tmp_path: Path, switches: dict[str, str], expected: str
    ) -> None:
        required = {"CC": "false", "CXX": "false", "MEGATRON_ADAPTIVE_EXTENSION": "1"}
        done = self.build(tmp_path, **required, **switches)
        assert done.returncode != 0
        assert expected in done.stderr
        assert "Traceback" not in done.stderr
