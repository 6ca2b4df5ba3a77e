"""Defines fixtures for the tests in this folder: servers that store snapshots, and training runs.

Only one training run exists at a time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron.adaptive import accelerator

accelerator.install()  # This call must precede the import of megatron.core.

from tests.checkpoint.keepers import keepers  # noqa: E402

from .models import Training  # noqa: E402

__all__ = ["keepers"]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Training]]:
    """Yields a function that closes the previous training run, and then starts a new run."""
    made: list[Training] = []
    monkeypatch.delenv("MEGATRON_ADAPTIVE_JOB", raising=False)

    def make(*arguments: Any) -> Training:
        end()
        made.append(Training(*arguments))
        return made[-1]

    def end() -> None:
        while made:
            made.pop().pipeline.close()
        # Collect reference cycles, because they keep process groups and their sockets alive.
        gc.collect()

    yield make
    end()
