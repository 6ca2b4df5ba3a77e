"""Shares the keepers of snapshots, and trainings of which one runs at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron.adaptive import accelerator

accelerator.install()  # before any of these tests imports megatron.core

from tests.checkpoint.keepers import keepers  # noqa: E402

from .models import Training  # noqa: E402

__all__ = ["keepers"]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Training]]:
    """A function that begins a training, and ends the one before."""
    made: list[Training] = []
    monkeypatch.delenv("MEGATRON_ADAPTIVE_JOB", raising=False)

    def make(*arguments: Any) -> Training:
        end()
        made.append(Training(*arguments))
        return made[-1]

    def end() -> None:
        while made:
            made.pop().pipeline.close()
        gc.collect()  # cycles keep process groups, with their sockets

    yield make
    end()
