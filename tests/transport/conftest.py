"""Provides fixtures that run programs in worker processes, for the tests of transports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .pool import Pool


class Pools:
    """Manages the worker pool of a test module. Creates a new pool if a worker has exited."""

    def __init__(self) -> None:
        self._pool: Pool | None = None

    def get(self) -> Pool:
        if self._pool is None or not self._pool.is_whole:
            self.stop()
            self._pool = Pool(4)
        return self._pool

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.stop()


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    made.stop()


@pytest.fixture
def pool(pools: Pools) -> Pool:
    """Returns the pool of worker processes that all tests of the module share."""
    return pools.get()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Pool]]:
    """Yields a function that starts a program on new worker processes, used only by this test."""
    made: list[Pool] = []

    def start_program(program: str, num_ranks: int, **arguments: Any) -> Pool:
        folder = tmp_path / f"job{len(made)}"
        folder.mkdir()
        made.append(Pool(num_ranks, folder))
        made[-1].start(program, range(num_ranks), **arguments)
        return made[-1]

    yield start_program
    for pool in made:
        pool.stop()
