"""The benchmark of the transports: its compiled helpers and its processes."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.channels import copies
from benchmarks.channels.pair import Pair, PairError
from megatron.adaptive import extension

MIB = 1 << 20


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return copies.build(tmp_path_factory.mktemp("copies"))
    except copies.NoCompilerError as error:
        pytest.skip(str(error))


# ---- the machine


@pytest.mark.parametrize("size", [0, 1, 255, 256, 4096 + 17, MIB])
@pytest.mark.parametrize("kind", ["plain", "streaming"])
def test_copies_are_whole(library: Path, kind: str, size: int) -> None:
    found = copies.Copies(library)
    source = bytes(range(256)) * (size // 256 + 1)
    target = ctypes.create_string_buffer(size + 128)
    start = -ctypes.addressof(target) % 64
    getattr(found, kind)(ctypes.addressof(target) + start, source, size)
    assert target.raw[start : start + size] == source[:size]
    assert not any(target.raw[start + size :])


# ---- processes


def make_pair(library: Path) -> Pair:
    allowed = sorted(os.sched_getaffinity(0))
    return Pair("two", cores=(allowed[0], allowed[-1]), copies=library, pool_bytes=MIB)


@pytest.fixture(scope="module")
def pair(library: Path) -> Iterator[Pair]:
    made = make_pair(library)
    yield made
    made.close()


@pytest.mark.multiprocess
@pytest.mark.parametrize("dies", [False, True], ids=["raises", "dies"])
def test_a_pair_of_which_one_fails_says_so_and_is_gone(library: Path, dies: bool) -> None:
    pair = make_pair(library)
    pids = pair.pids
    if dies:
        os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(PairError, match="two: " if dies else "has no attribute 'no_such_pattern'"):
        pair.call("patterns", "no_such_pattern")
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
    pair.close()


needs_extension = pytest.mark.skipif(
    extension.load() is None, reason="shared memory needs the C++ extension"
)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "connector", ["gloo", *(pytest.param(name, marks=needs_extension) for name in ("shm", "tcp"))]
)
def test_a_pair_runs_the_patterns(pair: Pair, connector: str) -> None:
    options = {} if connector == "gloo" else {"slot_bytes": 1 << 16, "slots": 4}
    shared = {"connector": connector, "options": options}
    for nbytes, fresh in ((1 << 12, False), (1 << 18, False), (1 << 16, True)):
        asked = {"nbytes": nbytes, "messages": 12, "fresh": fresh}
        first, second = pair.call("patterns", "stream", **asked, **shared)
        assert 0 < first < 10
        assert second is None
    trip = pair.call("patterns", "half_round_trip", nbytes=1024, rounds=20, **shared)
    assert all(0 < seconds < 10 for seconds in trip)


@needs_extension
@pytest.mark.multiprocess
def test_reserved_memory_is_handed_over_and_a_step_of_the_pipeline_takes_time(pair: Pair) -> None:
    shared = {"connector": "shm", "options": {"slot_bytes": 1 << 16, "slots": 4}}
    plain = pair.call("patterns", "copy", kind="plain", nbytes=1 << 16, messages=8)
    assert 0 < plain[0] < 1
    left, arrived = pair.call("patterns", "hand_over", nbytes=1 << 16, rounds=10, **shared)
    assert all(0 < end - start < 10 for start, end in zip(left, arrived, strict=True))
    in_place = {"nbytes": 1 << 16, "messages": 10, "fresh": True, "in_place": True}
    pair.call("patterns", "stream", **in_place, **shared)
    step = {"nbytes": 1 << 16, "products": 1, "microbatches": 4}
    for connector in (None, "shm", "gloo transport"):
        shared = {"connector": connector, "options": {"slot_bytes": 1 << 16, "slots": 4}}
        assert all(0 < s < 10 for s in pair.call("pipeline_steps", "step", **step, **shared))
