"""Tests that the emulated nodes of a soak test are isolated, and that its checks detect faults."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.multiprocess.launch import environment, wait_until
from tests.soak.job_record import Record, Step, faults, steps_of_logs
from tests.support.nodes import Nodes, fill, send, why_not

LOSSES = {iteration: 5 - iteration / 100 for iteration in range(1, 41)}
Lines = list[dict[str, Any]]


def told(start: int, stop: int, second: int) -> Lines:
    """Returns the lines that a job writes to its progress file from the time ``second`` on.

    The job begins after iteration ``start``, and completes one iteration per second until ``stop``.
    """
    lines: Lines = [{"total_iterations": 99, "start_iteration": start, "unix_ns": second * 10**9}]
    for iteration in range(start + 1, stop + 1):
        second += 1
        lines.append(
            {
                "iteration": iteration,
                "consumed_samples": 4 * iteration,
                "loss": LOSSES[iteration],
                "unix_ns": second * 10**9,
            }
        )
        if iteration % 10 == 0:
            lines.append({"saved": iteration, "seconds": 0.1, "unix_ns": second * 10**9 + 1})
    return lines


def judged(folder: Path, *epochs: Lines, printed: list[Step] | None = None) -> list[str]:
    """Checks a job that wrote the lines ``epochs``, and returns descriptions of its faults.

    Each element of ``epochs`` is from one start of the job. ``printed`` contains the steps that the
    job has printed to its log.
    """
    record = Record(folder)
    for number, lines in enumerate(epochs, 1):
        path = folder / f"epoch-{number}-s" / "progress.jsonl"
        path.parent.mkdir()
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        record.refresh()
        record.refresh()  # A second call must not read the same lines again.
    broken, _ = faults(record.epochs, printed or [], LOSSES, first=11, batch=4, tolerance=1e-5)
    return broken


def test_a_sound_job_has_no_faults(tmp_path: Path) -> None:
    assert judged(tmp_path, told(10, 25, 100), told(20, 33, 200), told(33, 40, 300)) == []


Damage = Callable[[Lines], object]
DAMAGE: dict[str, Damage] = {
    "came after 12": lambda lines: lines.__delitem__(3),
    "iterations were never completed: [13]": lambda lines: lines.__delitem__(3),
    "differ by 1.0e-03": lambda lines: lines[2].update(loss=LOSSES[12] * 1.001),
    "reports 52 samples of 4 each": lambda lines: lines[2].update(consumed_samples=52),
    "came after 14": lambda lines: lines.insert(5, dict(lines[4])),
}


@pytest.mark.parametrize("text", DAMAGE)
def test_what_an_epoch_did_wrong_is_found(text: str, tmp_path: Path) -> None:
    lines = told(10, 25, 100)
    DAMAGE[text](lines)
    assert any(text in fault for fault in judged(tmp_path, lines, told(25, 30, 200)))


def test_an_epoch_from_the_wrong_checkpoint_or_beside_another_is_found(tmp_path: Path) -> None:
    (late,) = judged(tmp_path, told(10, 25, 100), told(10, 33, 200))
    assert "continued from 10, although 20 had been saved" in late
    other = tmp_path / "other"
    other.mkdir()
    (beside,) = judged(other, told(10, 25, 100), told(20, 33, 112))
    assert "epoch-1-s had not ended when epoch-2-s began" in beside


def test_the_log_has_what_a_full_disk_did_not_take(tmp_path: Path) -> None:
    lines = told(10, 25, 100)
    del lines[3]
    line = (
        "[x] iteration       13/  999999 | consumed samples:           52 | elapsed time per"
        f" iteration (ms): 9.1 | lm loss: {LOSSES[13]:.6E} | loss scale: 1.0 |\n"
    )
    printed = steps_of_logs(["noise " + line])
    assert [(step.iteration, step.samples) for step in printed] == [(13, 52)]
    assert judged(tmp_path, lines, printed=printed) == []


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    if reason := why_not():
        pytest.skip(reason)
    made = Nodes(tmp_path, (1, 1), 1 << 20)
    yield made
    made.close()


def until(condition: Callable[[], object]) -> None:
    wait_until(condition, lambda: "", 30.0)


def test_nodes_are_cut_stopped_filled_and_switched_off(nodes: Nodes) -> None:
    first, second = nodes.all
    first.boot([sys.executable, "-c", "import time; time.sleep(999)"], environment())
    second.boot(["bash", "-c", "sleep 99 & exit 7"], environment())
    until(lambda: second.status is not None)
    assert second.status == 7
    assert not second.is_running
    # The child process of the program is still running, and can be killed.
    (left,) = second.processes()
    until(first.processes)
    (process,) = first.processes()
    send([process], signal.SIGSTOP)
    until(lambda: process.status() == psutil.STATUS_STOPPED)
    send([process], signal.SIGCONT)
    until(lambda: process.status() == psutil.STATUS_SLEEPING)

    def reaches() -> bool:
        connect = f"exec 3<>/dev/tcp/{second.address}/9"
        command = ["ip", "netns", "exec", first.space, "timeout", "1", "bash", "-c", connect]
        return "refused" in subprocess.run(command, capture_output=True, text=True).stderr

    until(reaches)
    for silently in (True, False):
        second.cut(silently=silently)
        assert not reaches()
        second.mend()
        until(reaches)
    fill(nodes.shared / "filler")
    with pytest.raises(OSError, match="No space left"):
        (nodes.shared / "file").write_bytes(bytes(1 << 16))
    (nodes.shared / "filler").unlink()
    (nodes.shared / "file").write_bytes(bytes(1 << 16))
    first.off()
    second.off()
    until(lambda: not psutil.pid_exists(process.pid))
    until(lambda: not psutil.pid_exists(left.pid))
