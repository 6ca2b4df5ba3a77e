"""Tests that all descendants of a program are found, and that they end with the program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from harness.families import children_of, descendants_of, ending_all
from harness.report import ROOT
from tests.multiprocess.launch import has_ended, wait_until


def test_the_family_of_a_process_is_that_of_psutil() -> None:
    """Checks that child processes are found, even if another thread has started them."""
    started: list[subprocess.Popen[str]] = []
    is_over = threading.Event()

    def start() -> None:
        command = ["sh", "-c", "sh -c 'echo; exec sleep 60' & wait"]
        started.append(subprocess.Popen(command, text=True, stdout=subprocess.PIPE))
        is_over.wait(60)

    thread = threading.Thread(target=start)
    thread.start()
    try:
        wait_until(lambda: started, lambda: "no process", 20.0)
        (process,) = started
        assert process.stdout is not None
        process.stdout.readline()
        family = descendants_of(os.getpid())
        everybody = [child.pid for child in psutil.Process().children(recursive=True)]
        assert process.pid in children_of(os.getpid())
        assert set(family) == set(everybody)
        assert set(children_of(process.pid)) < set(family)
    finally:
        is_over.set()
        thread.join()
        for process in started:
            for child in psutil.Process(process.pid).children():
                child.kill()
            process.communicate(timeout=20)
    assert children_of(process.pid) == []


# The program starts a shell in a separate session, and waits for it. The shell ignores SIGTERM, and
# so does the process that it starts.
PROGRAM = """
import argparse, subprocess, sys
from pathlib import Path
from harness import report

class Opened:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        Path(sys.argv[1], "closed").touch()

def part():
    command = "trap '' TERM; sleep 600 & echo $! $$; wait"
    with Opened():
        job = subprocess.Popen(["sh", "-c", command], start_new_session=True)
        job.wait()

report.others_busy = lambda: 0.0
options = argparse.Namespace(part=None, json=None, results=None)
report.measure({"part": part}, options)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_no_process_of_a_part_outlives_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    """Checks that a benchmark and all its processes end after SIGTERM and SIGHUP."""
    program = subprocess.Popen(
        [sys.executable, "-u", "-c", PROGRAM, str(tmp_path)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Restore the default action of SIGHUP. If the tests run under nohup, the program would
        # otherwise inherit that SIGHUP is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    assert program.stdout is not None
    lines = iter(program.stdout)
    pids = next(line.split() for line in lines if line.replace(" ", "").strip().isdecimal())
    family = [psutil.Process(int(pid)) for pid in pids]
    program.send_signal(number)
    assert program.wait(60) == 128 + number
    wait_until(lambda: all(map(has_ended, family)), lambda: family, 20.0)
    assert (tmp_path / "closed").exists()
    assert program.stderr is not None
    assert program.stderr.read().endswith(f"stopped by signal {number.name}\n")
    program.stdout.close()
    program.stderr.close()


def test_handlers_of_a_program_return_after_the_block() -> None:
    former = signal.getsignal(signal.SIGTERM)
    with ending_all():
        assert signal.getsignal(signal.SIGTERM) is not former
    assert signal.getsignal(signal.SIGTERM) is former
