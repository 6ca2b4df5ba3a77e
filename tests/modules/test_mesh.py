"""Tests that a job can start and close several times in the same processes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ..multiprocess.launch import torchrun

pytestmark = pytest.mark.multiprocess

SCRIPT = Path(__file__).with_name("joining.py")
RANKS, TIMES, LIMIT_S = 2, 8, 60.0


@pytest.mark.parametrize("store", ["True", "False"])
def test_a_job_can_begin_anew_after_its_end(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that ranks do not use addresses of a previous job in the launcher's store."""
    monkeypatch.setenv("AGENT_STORE", store)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("OTHER_PORT", str(taken.getsockname()[1]))
    torchrun(SCRIPT, [str(TIMES)], world_size=RANKS, log=tmp_path / "output.txt", limit_s=LIMIT_S)
