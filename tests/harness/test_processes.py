"""Tests that list the children and descendants of a process."""

from __future__ import annotations

import os
import subprocess
import threading

import psutil

from harness.processes import children_of, descendants_of
from tests.multiprocess.launch import wait_until


def test_the_family_of_a_process_is_that_of_psutil() -> None:
    """Checks the result against psutil; children belong to the thread that started them."""
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
