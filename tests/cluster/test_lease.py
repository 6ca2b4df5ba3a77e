"""A job has one manager."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron.adaptive.cluster import lease as lease_module
from megatron.adaptive.cluster.lease import Lease, LeaseTakenError
from megatron.adaptive.errors import SetupError


def forget_machine(folder: Path) -> None:
    """Let the last claim look as if another machine had made it."""
    path = max(folder.glob("claim-*.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot": "another"}))


def test_a_second_manager_is_refused_while_the_first_counts_on(tmp_path: Path) -> None:
    first = Lease(tmp_path)
    first.claim()
    first.publish({"port": 7})
    forget_machine(tmp_path)
    over = threading.Event()

    def count() -> None:
        while not over.wait(0.1):
            first.beat()

    counting = threading.Thread(target=count)
    counting.start()
    try:
        with pytest.raises(LeaseTakenError, match=f"managed by process {os.getpid()} on") as caught:
            Lease(tmp_path).claim()
    finally:
        over.set()
        counting.join()
    assert caught.value.owner["port"] == 7


def test_one_that_ended_or_died_here_is_succeeded_at_once(tmp_path: Path) -> None:
    first = Lease(tmp_path)
    first.claim()
    first.end()
    begin_s = time.monotonic()
    code = "from megatron.adaptive.cluster.lease import Lease; from pathlib import Path\n"
    code += f"Lease(Path({str(tmp_path)!r})).claim()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    second = Lease(tmp_path)
    second.claim()  # its process is gone
    assert time.monotonic() - begin_s < lease_module.STALE_S
    assert second.is_taken_over
    assert second.beat()


def test_one_that_stands_still_elsewhere_is_succeeded_and_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "STALE_S", 0.5)
    first = Lease(tmp_path)
    first.claim()
    forget_machine(tmp_path)
    second = Lease(tmp_path)
    second.claim()
    second.publish({"port": 8})
    assert not first.beat()
    first.end()  # takes nothing from the other
    assert second.beat()
    assert first.taken().owner["port"] == 8


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="cannot write .*file.*--checkpoint"):
        Lease(tmp_path / "file" / "elastic").claim()


def test_a_full_disk_does_not_look_like_a_manager_that_is_gone(tmp_path: Path) -> None:
    """The counter was cut to nothing first, and stayed so."""
    lease = Lease(tmp_path)
    lease.claim()
    assert lease.beat()
    before = (tmp_path / "beat-1").read_text()
    said: list[str] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        assert lease.is_held(said.append)
        assert lease.is_held(said.append)  # said once
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "beat-1").read_text() == before
    assert said == [f"warning: cannot write {tmp_path}: File too large"]
    (tmp_path / "claim-2.json").write_text("{}")
    assert not lease.is_held(said.append)
    assert said[1:] == ["warning: another manager took the job over while this one stood still"]
