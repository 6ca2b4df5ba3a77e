"""Tests that only one job writes to a folder, and that a suspended job can lose the folder."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.adaptive.engine import folder_lease as module
from megatron.adaptive.engine.folder_lease import Lease, LeaseTakenError

from ..support.recorded_sleeps import record_sleeps

HOLD = """
import sys, time
from pathlib import Path
from megatron.adaptive.engine.folder_lease import Lease
Lease(Path(sys.argv[1])).claim()
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


def change(folder: Path, **facts: object) -> None:
    """Changes entries of the last claim on ``folder``, as if another process had made the claim.

    ``facts`` contains the new values.
    """
    path = max((folder / ".lease").glob("claim-*.json"))
    claim = {**json.loads(path.read_text()), **facts}
    # A claim without a checksum is valid, because earlier versions wrote claims without one.
    del claim["sum"]
    path.write_text(json.dumps(claim))


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALE_S", 0.6)


def test_a_second_job_is_refused_while_the_first_counts_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.1)
    first = Lease(tmp_path)
    assert first.claim(job="first", restarts=0) == 1
    first.publish({"port": 7})
    assert (tmp_path / ".lease" / "private-1.json").stat().st_mode & 0o777 == 0o600
    change(tmp_path, boot="another")
    first.keep_up(print)
    text = rf"is written by process {os.getpid()} on \S+ \(job first\) since 20\d\d-\d\d-\d\d"
    try:
        with pytest.raises(
            LeaseTakenError, match=f"{text}.*stop that job, or choose another"
        ) as refusal:
            Lease(tmp_path).claim(job="second", restarts=1)
    finally:
        first.end()
    assert refusal.value.owner["port"] == 7
    assert "\n" not in str(refusal.value)
    # The first job has released the folder, so another job can claim it.
    assert Lease(tmp_path).claim() == 2


@pytest.mark.parametrize("is_reaped", [True, False], ids=["gone", "zombie"])
def test_one_that_was_killed_here_is_succeeded_at_once(tmp_path: Path, is_reaped: bool) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), "60"], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    holder.kill()
    if is_reaped:
        holder.wait(10)
    else:
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    begin_s = time.monotonic()
    second = Lease(tmp_path)
    assert second.claim() == 2
    assert time.monotonic() - begin_s < module.STALE_S
    assert second.former["pid"] == holder.pid
    assert second.beat()
    holder.communicate(timeout=10)


def test_a_process_of_that_number_is_not_the_holder(tmp_path: Path) -> None:
    Lease(tmp_path).claim()
    change(tmp_path, pid=os.getppid(), ticks="1")
    assert Lease(tmp_path).claim() == 2


@pytest.mark.usefixtures("_quick")
def test_a_restart_of_the_same_job_goes_on_at_once(tmp_path: Path) -> None:
    Lease(tmp_path).claim(job="a", restarts=1)
    change(tmp_path, boot="another")
    with pytest.MonkeyPatch.context() as patch:
        looked = record_sleeps(patch)
        Lease(tmp_path).claim(job="a", restarts=2)
        assert not looked
        change(tmp_path, boot="another")
        # The number of restarts is the same as in the previous claim. Therefore, a different job
        # with the same name may have made that claim, and must be given time to show that it is
        # alive.
        Lease(tmp_path).claim(job="a", restarts=2)
        assert looked


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("has_links", [True, False])
def test_one_that_stands_still_elsewhere_is_succeeded_and_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    def no_link(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    if not has_links:
        monkeypatch.setattr(os, "link", no_link)
    first = Lease(tmp_path)
    first.claim()
    first.require()
    change(tmp_path, boot="another")
    second = Lease(tmp_path)
    second.claim()
    second.publish({"port": 8})
    with pytest.raises(
        LeaseTakenError, match="was taken over by process .* while this job was stopped"
    ):
        first.require()
    said: list[str] = []
    assert not first.is_held(said.append)
    assert len(said) == 1
    first.end()  # Ending a lost lease must not affect the new owner.
    assert second.beat()
    second.require()
    assert first.taken().owner["port"] == 8
    assert not first._take(2)  # The second job has already made claim 2.
    for _ in range(12):  # Even after many claims, only a few files must be left.
        Lease(tmp_path).claim()
    assert sorted(file.name for file in (tmp_path / ".lease").iterdir()) == [
        "beat-14",
        "claim-13.json",
        "claim-14.json",
    ]


@pytest.mark.usefixtures("_quick")
def test_a_manager_that_advances_while_another_looks_is_the_one_that_is_named(
    tmp_path: Path,
) -> None:
    """Checks that the error names a manager that takes over the folder while a job waits for it."""
    first, second, manager = (Lease(tmp_path) for _ in range(3))
    first.claim(run="job")
    change(tmp_path, boot="another")
    sleep = time.sleep

    def taken_over(seconds: float) -> None:
        if manager.number == 0:
            manager.number = 1
            manager._claimed = {"run": "job", "boot": "a third", "pid": 7, "host": "near"}
            assert all(manager.advance() for _ in range(3))
        manager.beat()
        sleep(seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", taken_over)
        with pytest.raises(LeaseTakenError) as error:
            second.claim(run="job")
    assert error.value.owner["host"] == "near"
    assert second.number == 0


def test_a_claim_that_others_made_and_removed_is_not_made_again(tmp_path: Path) -> None:
    """Checks that a claim cannot be made a second time, even if its file was removed."""
    holder, stopped = Lease(tmp_path), Lease(tmp_path)
    holder.claim(run="job")
    assert all(holder.advance() for _ in range(3))
    assert not stopped._take(2)
    holder.require()
    assert sorted(path.name for path in (tmp_path / ".lease").glob("claim-*")) == [
        "claim-3.json",
        "claim-4.json",
    ]


def test_processes_of_a_manager_have_the_folder_until_it_goes_on_without_them(
    tmp_path: Path,
) -> None:
    manager, rank, other = (Lease(tmp_path) for _ in range(3))
    manager.claim(run="job")
    assert rank.join_manager(manager.number, "job-1")
    assert not other.join_manager(None, "job-1")
    assert not other.join_manager(manager.number, "another-1")
    assert not Lease(tmp_path / "elsewhere").join_manager(manager.number, "job-1")
    rank.require()
    assert manager.advance()
    manager.require()
    with pytest.raises(LeaseTakenError, match="train elastic --status"):
        rank.require()
    assert not rank.advance()


def test_a_folder_that_is_removed_is_given_to_nobody_else(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    lease = Lease(folder)
    lease.claim()
    shutil.rmtree(folder)
    lease.require()
    assert lease.beat()
    lease.require()
    assert Lease(folder).claim() == 2
    assert not lease.beat()


def test_a_full_disk_does_not_look_like_a_job_that_is_gone(tmp_path: Path) -> None:
    """Checks that a failed write does not damage the heartbeat counter of the job."""
    lease = Lease(tmp_path)
    lease.claim()
    assert lease.beat()
    counter = tmp_path / ".lease" / "beat-1"
    before = counter.read_text()
    said: list[str] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        assert lease.is_held(said.append)
        assert lease.is_held(said.append)  # The second failure must not be reported again.
        with pytest.raises(OSError, match="File too large"):
            lease.advance()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, former)
    assert counter.read_text() == before
    assert said == [f"warning: cannot write {tmp_path / '.lease'}: File too large"]
    lease.require()
    assert re.fullmatch(r"\d+", before)


@pytest.mark.parametrize(
    "facts",
    [{"since_unix_s": 1e300}, {"since_unix_s": "x"}, {"pid": "1"}, {"restarts": []}, {"job": 7}],
    ids=repr,
)
def test_a_claim_that_says_what_none_can_is_taken_for_silent(
    tmp_path: Path, facts: dict[str, object]
) -> None:
    Lease(tmp_path).claim(job="a", restarts=1)
    change(tmp_path, **facts)
    assert "process ? on another machine" in str(Lease(tmp_path).taken(1))


def test_a_damaged_claim_does_not_free_the_folder_of_a_living_job(tmp_path: Path) -> None:
    lease = Lease(tmp_path)
    lease.claim(job="a", restarts=1)
    path = tmp_path / ".lease" / "claim-1.json"
    claim = json.loads(path.read_text())
    # No process can have this ID. However, the claim is damaged, because its checksum is wrong.
    path.write_text(json.dumps({**claim, "pid": 2**22 + 1}))
    assert not module._is_gone(lease._facts(1))
