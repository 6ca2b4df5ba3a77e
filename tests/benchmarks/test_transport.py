"""Tests the copies, processes and result rows of the transport benchmark."""

from __future__ import annotations

import ctypes
import os
import statistics
from pathlib import Path

import pytest

from benchmarks import transport
from benchmarks.channels import copies
from harness.processes import fork_ranks
from megatron.adaptive import extension

KIB = 1 << 10
needs_extension = pytest.mark.skipif(
    extension.load() is None, reason="shared memory needs the C++ extension"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return copies.build(tmp_path_factory.mktemp("copies"))
    except copies.NoCompilerError as error:
        pytest.skip(str(error))


@pytest.fixture
def cpus() -> list[int]:
    allowed = sorted(os.sched_getaffinity(0))
    return [allowed[0], allowed[-1]]


@pytest.mark.parametrize("size", [0, 1, 255, 256, 4096 + 17, 1 << 20])
@pytest.mark.parametrize("kind", ["plain", "streaming"])
def test_copies_are_whole(library: Path, kind: str, size: int) -> None:
    compiled = copies.Copies(library)
    source = bytes(range(256)) * (size // 256 + 1)
    target = ctypes.create_string_buffer(size + 128)
    start = -ctypes.addressof(target) % 64
    getattr(compiled, kind)(ctypes.addressof(target) + start, source, size)
    assert target.raw[start : start + size] == source[:size]
    assert not any(target.raw[start + size :])


def test_limits_of_the_machine_take_time(library: Path, cpus: list[int]) -> None:
    compiled = copies.Copies(library)
    assert 0 < compiled.copy_s(64 * KIB) < 1
    assert 0 < compiled.wake_s(*cpus) < 1
    # The measurement needs two processors. Otherwise, each thread would wait until the other thread
    # is preempted.
    if cpus[0] != cpus[1]:
        assert 0 < compiled.cache_line_s(*cpus) < 1


@pytest.mark.long
@needs_extension
@pytest.mark.multiprocess
def test_a_pair_measures_every_link(library: Path, cpus: list[int]) -> None:
    plan = {"sizes": [64 * KIB], "repetitions": 2, "cpus": cpus, "copies": str(library)}
    samples = fork_ranks("benchmarks.channels.pair", 2, 120.0, plan)
    names = {f"{name} {64 * KIB}" for name in ("shm", "tcp", "gloo")}
    names |= {f"memcpy {kind} {64 * KIB}" for kind in ("plain", "streaming")}
    assert set(samples) == {*names, "shm ping", "tcp ping", "gloo ping"}
    assert all(len(series) == 2 and min(series) > 0 for series in samples.values())


@needs_extension
@pytest.mark.multiprocess
def test_a_pipeline_takes_a_step_over_each_transport(cpus: list[int]) -> None:
    plan = {"nbytes": 64 * KIB, "microbatches": 4, "repetitions": 1, "cpus": cpus}
    steps_s = fork_ranks("benchmarks.channels.pipeline_step", 2, 120.0, plan)
    assert set(steps_s) == {"alone", "shm", "tcp", "gloo"}
    assert all(statistics.median(series) > 0 for series in steps_s.values())


def test_peers_are_compared_by_the_copies_of_their_own_process() -> None:
    def samples(name: str, message_s: float, copy_s: float) -> dict[str, list[float]]:
        sizes = transport.COMPARED
        return {
            **{f"{name} {nbytes}": [message_s] for nbytes in sizes},
            **{
                f"memcpy {kind} {nbytes}": [copy_s]
                for kind in ("plain", "streaming")
                for nbytes in sizes
            },
        }

    own_samples = {**samples("shm", 1.0, 1.0), **samples("gloo", 5.0, 1.0)}
    rows = transport._over_peers(own_samples, {"mpi": samples("mpi", 4.0, 2.0)}, "")
    assert [row.value for row in rows] == [5.0, 2.0] * 3
    rows = transport._over_peers(own_samples, {}, "there is no MPI")
    assert [row.met for row in rows] == [True, None] * 3
