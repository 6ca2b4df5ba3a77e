"""Tests RDMA between nodes of the lab, and the exit statuses that the lab returns."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil
import pytest

from . import rdma_lab
from .rdma_lab import Result, run

pytestmark = [
    pytest.mark.rdma_lab,
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # The first test may have to compile the kernel.
]

ROOT = Path(__file__).resolve().parents[2]
DEBIAN_PYTHON = "/usr/bin/python3"
POWER_OFF = "import ctypes; ctypes.CDLL(None).reboot(0x4321FEDC)"


def rdma_lab_or_skip(pytestconfig: pytest.Config) -> None:
    """Skips the test if the lab cannot run. Otherwise, prepares the lab."""
    if reason := rdma_lab.why_not():
        pytest.skip(reason)
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    try:
        # Show the output, so that the user sees that compiling takes minutes.
        with capture.global_and_fixture_disabled():
            rdma_lab.prepare()
    except rdma_lab.LabError as error:  # Most likely, there is no network.
        pytest.skip(str(error))


lab = pytest.fixture(scope="module", autouse=True)(rdma_lab_or_skip)


def shell(script: str, *, nodes: int = 2, timeout_s: float = 60.0) -> Result:
    """Runs the shell script ``script`` on ``nodes`` nodes, and returns the result.

    The run fails after ``timeout_s`` seconds.
    """
    return run(["sh", "-c", script], nodes=nodes, timeout_s=timeout_s)


def test_nodes_have_devices_and_reach_each_other(tmp_path: Path) -> None:
    """Checks the devices and links of three nodes, two of which are linked through the third."""
    script = """
        ibv_devinfo -v -d $LAB_RDMA_DEV
        echo mine $(cat /sys/class/infiniband/rxe0/ports/1/gids/$LAB_RDMA_GID)
        echo $RANK of $WORLD_SIZE $(pwd) locked $(ulimit -l) $(cat /proc/sys/kernel/hostname)
        echo $GIVEN >$LAB_SHARE/from-$RANK
        if [ $RANK = 1 ]; then
            timeout 10 ibv_rc_pingpong -d rxe0 -g $LAB_RDMA_GID -n 100
        elif [ $RANK = 2 ]; then
            until ibv_rc_pingpong -d rxe0 -g $LAB_RDMA_GID -n 100 node1; do sleep 0.1; done
        fi
    """
    result = run(
        ["sh", "-c", script], nodes=3, timeout_s=60.0, env={"GIVEN": "a 'word"}, share=tmp_path
    )
    assert result.status == 0, result.text
    assert result.statuses == (0, 0, 0)
    for rank, said in enumerate(result.output):
        address = f"10.77.0.{rank + 1}"
        assert "PORT_ACTIVE" in said
        assert re.search(rf"GID\[ +\d+\]:\s+::ffff:{re.escape(address)}, RoCE v2", said), said
        assert re.search(rf"^mine 0000:.*:ffff:0a4d:000{rank + 1}$", said, re.MULTILINE), said
        assert f"\n{rank} of 3 {Path.cwd()} locked unlimited node{rank}\n" in said
        assert (tmp_path / f"from-{rank}").read_text() == "a 'word\n"
    for rank in (1, 2):
        assert "100 iters in" in result.output[rank]


def test_perftest_measures_between_nodes() -> None:
    program = (
        "from tests.labs.rdma_lab.perftest import bandwidth, latencies\n"
        "rate = bandwidth(65536, total_bytes=8 << 20)\n"
        "print('measured', rate, latencies(64, count=100)[0])\n"
    )
    result = run([DEBIAN_PYTHON, "-c", program], timeout_s=120.0, env={"PYTHONPATH": str(ROOT)})
    assert result.status == 0, result.text
    assert result.output[0] == result.output[1]  # Both nodes must report the same measurements.
    rate, latency_us = map(float, result.output[0].removeprefix("measured ").split())
    assert rate > 0
    assert latency_us > 0


def test_status_of_a_command_that_fails() -> None:
    result = shell("echo half a line | tr -d '\\n'; [ $RANK = 0 ] || exit 7")
    assert (result.status, result.statuses) == (7, (0, 7)), result.text
    assert result.output == ("half a line\n", "half a line\n")


def test_time_that_is_over() -> None:
    result = shell("sleep 600", timeout_s=3.0)
    assert (result.status, result.statuses) == (rdma_lab.TIMED_OUT, (None, None)), result.text
    for said in result.output:
        assert said.startswith("(the node did not finish;")


def test_node_that_loses_power() -> None:
    result = shell(f"[ $RANK = 0 ] || {DEBIAN_PYTHON} -c '{POWER_OFF}'")
    assert (result.status, result.statuses) == (rdma_lab.DIED, (0, rdma_lab.DIED)), result.text


def test_nothing_is_left_behind() -> None:
    """Checks that the processes of a node exit, even if they run in the background."""
    groups: set[int] = set()

    def up(_rank: int, _line: str) -> None:
        children = {child.pid for child in psutil.Process().children()}
        groups.update(map(_group, _kernels() & children))

    script = ["sh", "-c", "sleep 600 & echo up"]
    assert run(script, nodes=1, timeout_s=60.0, on_line=up).status == 0
    # Other labs may start and stop nodes at the same time, so check only this lab's process groups.
    assert groups
    assert [pid for pid in _kernels() if _group(pid) in groups] == []


def _kernels() -> set[int]:
    """Returns the IDs of all processes that run the kernel or the programs of a node."""
    kernel = str(rdma_lab.prepare())
    pids = set()
    for link in Path("/proc").glob("[0-9]*/exe"):
        try:
            if str(link.readlink()).startswith(kernel):
                pids.add(int(link.parent.name))
        except OSError:  # The process has exited, or it belongs to another user.
            continue
    return pids


def _group(pid: int) -> int:
    """Returns the process group of the process ``pid``, or -1 if the process has exited."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1
