"""Provides the releases of megatron-core for the tests of the plugin."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

import pytest

from ..multiprocess.launch import ROOT, forkserver
from ..support.core_trees import FETCHED, UNPACKED, trees_of_others

INSTALLED = metadata.version("megatron-core")
VERSIONS = (*FETCHED, *trees_of_others())
real = [pytest.mark.long, pytest.mark.slow, pytest.mark.multiprocess]


@pytest.fixture(scope="module", params=[pytest.param(version, marks=real) for version in VERSIONS])
def python_path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yields a ``PYTHONPATH`` that selects one of the releases of megatron-core."""
    if request.param == INSTALLED:
        yield str(ROOT)
        return
    core = UNPACKED / f"megatron-core=={request.param}"
    others = [*UNPACKED.glob("triton==*")]
    if not core.exists() or not others:
        pytest.skip(
            f"megatron-core {request.param} is missing; run bash prerequisite.sh --versions"
        )
    path = ":".join(map(str, [core, ROOT, *others]))
    yield path
    forkserver(path).close()
