"""Configures pytest for all tests, and defines fixtures that all tests use."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import multiprocessing.util
import os
import platform
import shutil
import signal
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest

# A shell starts background jobs with SIGINT ignored. Programs that the tests start would inherit
# this setting, so restore the default handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The tests in these files start processes, but other tests in their folders do not.
FORKING = ("test_extension.py", "test_node.py", "test_liveness.py", "test_loader.py")
# The test run fails if more tests than this are rerun.
MOST_RERUNS = 3
# These suites need packages or privileges that a machine may lack, so they may be skipped.
SUITES = ("rdma_lab", "slurm_lab", "sanitizer")
# Run files that take minutes first. If such a file started last, the other workers would be idle
# until it ends.
LONGEST_FIRST = (
    *("labs", "multiprocess", "cluster", "modules", "plugin", "examples", "soak"),
    *("test_gpu_rehearsal.py", "test_gpt_steps.py"),
    *("test_extension.py", "test_imports.py", "checkpoint", "cli", "transport"),
)


# These folders contain functions that numba compiles, which takes half a minute of CPU time per
# folder.
COMPILED = ("planner", "schedule")


@pytest.fixture(scope="session", autouse=True)
def _machine_code() -> Iterator[None]:
    """Shares numba's compiled code between all checkouts with equal sources.

    numba uses cached machine code only if the modification time of the source has not changed.
    Therefore, this fixture derives the modification times of the sources from their content.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-adaptive"
    kept = []
    for name in COMPILED:
        folder = Path(__file__).parents[1] / "megatron" / "adaptive" / name
        digest = hashlib.sha256(f"{version('numba')} {platform.processor()}".encode())
        for path in sorted(folder.glob("*.py")):
            content = path.read_bytes()
            digest.update(content)
            time_s = int(hashlib.sha256(content).hexdigest()[:7], 16)
            # os.utime fails if another user owns the checkout. In this case, the time remains
            # unchanged.
            with contextlib.suppress(OSError):
                os.utime(path, (time_s, time_s))
        kept.append((folder / "__pycache__", cache / "numba" / digest.hexdigest()[:24]))
        # If the folder is not writable, numba compiles the code again.
        with contextlib.suppress(OSError):
            _copy_machine_code(*reversed(kept[-1]))
    yield
    for made, folder in kept:
        with contextlib.suppress(OSError):
            _copy_machine_code(made, folder)


@pytest.fixture(scope="session", autouse=True)
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sets the temporary folder of the programs that tests start, and removes it after the run.

    Killed programs leave temporary files behind, which would otherwise add up to thousands of
    files.
    """
    # pytest keeps the folders of failed tests, so create pytest's base folder first, outside of the
    # folder that will be removed.
    tmp_path_factory.getbasetemp()
    folder = tempfile.mkdtemp(prefix="tests-")
    # Remove this folder at exit, after multiprocessing has removed the subfolder that it uses.
    remove = partial(shutil.rmtree, folder, ignore_errors=True)
    multiprocessing.util.Finalize(None, remove, exitpriority=-200)
    with pytest.MonkeyPatch.context() as patch:
        Path(folder).chmod(0o1777)  # Some tests run programs as another user.
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[object]) -> None:
    """Recreates the folder of a test after pytest has removed it, so that its name is not reused.

    Otherwise, a process of the earlier test could write to the folder of a later test.
    """
    if fixturedef.argname == "tmp_path" and fixturedef.cached_result is not None:
        folder = fixturedef.cached_result[0]
        if isinstance(folder, Path) and folder.parent.is_dir():
            folder.mkdir(exist_ok=True)


def _copy_machine_code(source: Path, target: Path) -> None:
    """Copies the files of ``source`` that are missing or smaller in ``target``."""
    # Copy an index (.nbi) after the code files that it lists, because another process may read the
    # index immediately.
    paths = sorted(source.glob("*.nbc")) + sorted(source.glob("*.nbi"))
    for path in paths:
        there = target / path.name
        if not there.exists() or there.stat().st_size < path.stat().st_size:
            target.mkdir(parents=True, exist_ok=True)
            draft = target / f"{path.name}.{os.getpid()}.new"
            shutil.copy(path, draft)
            draft.replace(there)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts ``items`` so that long files run first, and marks tests that may be rerun.

    A failed test is run a second time, and is listed as ``RERUN`` at the end of the output.
    Thousands of tests with real processes share a few processors, so a test occasionally fails
    because it gets no processor time. A test that passes only at the second attempt is flaky and
    must be fixed, but it does not make the test run fail. Tests of losses and gradients, and tests
    without processes, do not depend on load and are never rerun. With ``--reruns 0``, no test is
    rerun.
    """
    may_rerun = config.getoption("reruns", None) != 0
    rank = {folder: number for number, folder in enumerate(LONGEST_FIRST)}
    # First run the tests that fork this process. Later, the process has many threads, and a forked
    # child could inherit a lock that one of them holds.
    rank["test_loader.py"] = -1
    items.sort(
        key=lambda item: rank.get(item.path.name, rank.get(item.path.parent.name, len(rank)))
    )
    for item in items:
        exact = any(word in item.path.name for word in ("equivalence", "fuzz"))
        real = any(item.get_closest_marker(name) for name in ("slow", "long", "multiprocess"))
        real = real or item.path.parent.name in ("cli", "labs", "cluster")
        real = real or item.path.name in FORKING
        if real and not exact and may_rerun:
            item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=2))


def pytest_collection_finish() -> None:
    """Exempts the objects that exist after the imports from garbage collection, to save time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Makes the test run fail if more than ``MOST_RERUNS`` tests were rerun."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    reruns = [] if reporter is None else reporter.stats.get("rerun", [])
    if len(reruns) > MOST_RERUNS and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the number of reruns, and a line with the reason for each skipped suite."""
    left_out: dict[str, list[str]] = {}
    for report in terminalreporter.getreports("skipped"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if any(name in report.keywords for name in SUITES) or "prerequisite.sh" in reason:
            left_out.setdefault(reason, []).append(report.nodeid.split("::")[0])
    if reruns := len(terminalreporter.stats.get("rerun", [])):
        limit = f"at most {MOST_RERUNS} reruns are allowed"
        terminalreporter.write_line(f"{reruns} tests were rerun after a failure; {limit}")
    for reason, files in left_out.items():
        where = ", ".join(sorted(set(files)))
        terminalreporter.write_line(f"skipped {len(files)} tests in {where}: {reason}")
