"""A node that manages or joins a job, and notices that come at any moment of it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.cluster import manager as module
from megatron.adaptive.cluster.layouts import RuleChooser
from megatron.adaptive.cluster.lease import LeaseTakenError
from megatron.adaptive.cluster.manager import Participant
from megatron.adaptive.cluster.ranks import EXIT_LEFT, JobSpec


class Part:
    """What a manager or an agent does that takes signals itself for a while.

    Args:
        heeds: the signal comes while it takes them, else after that.
        status: that an agent is let go with.
    """

    def __init__(self, heeds: bool, status: int | None = None) -> None:
        self.heeds = heeds
        self.status = status
        self.why = "the job has ended"
        self.notice: signal.Signals | None = None

    def __call__(self, *arguments: Any, **named: Any) -> Part:
        return self

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        if self.heeds:
            loop.add_signal_handler(signal.SIGTERM, self._take)
        os.kill(os.getpid(), signal.SIGTERM)
        while self.heeds and self.notice is None:
            await asyncio.sleep(0)
        return 0

    def _take(self) -> None:
        self.notice = signal.SIGTERM


class Taken:
    """A manager of a job that another one manages."""

    notice: signal.Signals | None = None

    def __init__(self, *arguments: Any) -> None:
        pass

    async def run(self) -> int:
        raise LeaseTakenError("taken", {"address": "127.0.0.1", "port": 1, "secret": ""})


@pytest.mark.parametrize("heeds", [True, False])
@pytest.mark.parametrize("status", [None, 0])
def test_a_notice_is_heeded_whenever_it_comes(
    heeds: bool,
    status: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Between two managers it ended the process without a word, or was forgotten."""
    monkeypatch.setattr(module, "Manager", Taken)
    monkeypatch.setattr(module, "Agent", Part(heeds, status))
    spec = JobSpec(script=Path("x.py"), arguments=(), checkpoints=tmp_path)
    part = Participant(spec, RuleChooser(), name="a", slots=1, is_local=True)
    former = signal.getsignal(signal.SIGTERM)
    try:
        assert asyncio.run(part.run()) == (EXIT_LEFT if status is None else status)
    finally:
        signal.signal(signal.SIGTERM, former)
    why = "SIGTERM" if status is None else "the job has ended"
    assert f"[elastic] node a leaves: {why}" in capsys.readouterr().out
