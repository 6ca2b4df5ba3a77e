"""Shares the keepers of snapshots, and trainings of which one runs at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.checkpoint.keepers import keepers

from .models import Training

__all__ = ["keepers"]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Training]]:
    """A function that begins a training, and ends the one before."""
    made: list[Training] = []
    monkeypatch.delenv("MEGATRON_ADAPTIVE_JOB", raising=False)

    def make(*given: Any) -> Training:
        if made:
            made[-1].pipeline.close()
        made.append(Training(*given))
        return made[-1]

    yield make
    if made:
        made[-1].pipeline.close()
