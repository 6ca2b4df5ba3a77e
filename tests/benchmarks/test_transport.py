"""The benchmark of the transports: its rows and goals, the compiled helpers, its processes."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.channels import chart, copies, jobs, lab, soak, transfers
from benchmarks.channels.connectors import WINDOW, Posted
from benchmarks.channels.pair import INSTALL, Pair, PairError, find_peers
from megatron.adaptive import extension

MIB = 1 << 20


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return copies.build(tmp_path_factory.mktemp("copies"))
    except copies.NoCompilerError as error:
        pytest.skip(str(error))


# ---- rows


def test_a_goal_is_a_least_or_a_most_value() -> None:
    least = report.measured("speed", [0.8, 1.0, 0.9], goal=0.9, least=True)
    assert (least.value, least.met) == (0.9, True)
    assert report.measured("speed", [0.8, 0.89, 0.9], goal=0.9, least=True).met is False
    assert report.measured("time", [2.0], goal=2.0).met is True
    assert report.measured("time", [2.1], goal=2.0).met is False
    assert report.measured("time", [2.1]).met is None
    assert "| >= 0.9 | met |" in least.line


def test_what_could_not_be_measured_misses_its_goal_unless_it_is_a_peer_that_is_not_here() -> None:
    assert report.Row(what="time", value=None, goal=1.0).met is False
    absent = report.missing("time", "not installed: do this", goal=1.0)
    assert absent.met is None
    assert absent.line == "| time | not measured | <= 1 |  | not installed: do this |"


def test_bandwidth_table_and_chart_have_a_cell_per_transport_and_size(tmp_path: Path) -> None:
    points = [
        chart.Point(name=name, pattern="stream", nbytes=size, seconds=[size / 1e9, size / 2e9])
        for name, size in (("shm", MIB), ("shm", 4 * MIB), ("gloo", MIB))
    ]
    table = chart.bandwidths(points)
    assert "| stream, GB/s | 1 MiB | 4 MiB |" in table
    assert "| gloo | 1.33 |  |" in table
    chart.chart(points, "any", tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 10_000


def series(**times: float) -> transfers.Series:
    return {(name.replace("_", " "), MIB): [seconds] * 5 for name, seconds in times.items()}


@pytest.mark.parametrize(("state", "least"), [("near", 5.0), ("between", 5.0), ("far", 10.0)])
def test_far_processors_have_goals_of_their_own(state: str, least: float) -> None:
    times = {"memcpy_plain": 2.0, "memcpy_streaming": 1.0, "shm": 1.25}
    one_way = series(**times, gloo=8.0, mpi=4.0, ucx=2.5)
    fresh = series(shm=2.0, mpi=4.0, ucx=8.0)
    fresh["shm, in place", MIB] = [1.0] * 5
    rows = transfers.bandwidth_rows(one_way, fresh, {MIB: state}, "")
    found = {row.what: row for row in rows}
    memory = found["shm, 1 MiB: speed of the faster memcpy"]
    assert (memory.value, memory.met) == (0.8, False)
    gloo = found["shm over gloo, 1 MiB"]
    assert (gloo.value, gloo.goal) == (6.4, least)
    best = found["shm over the best of MPI and UCX, 1 MiB"]
    assert (best.value, best.met) == (2.0, True)
    assert "ucx" in best.note
    written = found["shm over the best of MPI and UCX, written and read, 1 MiB"]
    assert (written.value, written.goal) == (2.0, 4.0 if state == "far" else 1.5)
    in_place = found["shm over the best of MPI and UCX, written in place and read, 1 MiB"]
    assert (in_place.value, in_place.met) == (4.0, True)


def test_a_peer_that_is_not_installed_is_no_failure() -> None:
    one_way = series(memcpy_plain=2.0, memcpy_streaming=1.0, shm=1.0, gloo=9.0)
    rows = transfers.bandwidth_rows(one_way, series(shm=1.0), {MIB: "near"}, "install it so")
    absent = [row for row in rows if row.value is None]
    assert [row.met for row in absent] == [None] * 3
    assert {row.note for row in absent} == {"install it so"}
    assert not any(row.met is False for row in rows)


def test_slots_hold_a_message_and_the_memory_of_a_channel_is_bounded() -> None:
    for nbytes in transfers.SIZES:
        options = transfers.channel_options(nbytes)
        assert options["slot_bytes"] >= nbytes
        assert options["slots"] >= 4
        assert options["slots"] * options["slot_bytes"] <= 256 * MIB


def test_kills_count_wrong_errors_slow_survivors_and_what_is_left() -> None:
    told = {"raised": "PeerLostError", "seconds": 0.5, "text": ""}
    good = {"victim": 1, "outcomes": {"0": told, "2": told}, "left": []}
    rows = jobs.kill_rows({"trials": [good], "litter": []}, "kills")
    assert [(row.value, row.met) for row in rows] == [(0, True), (0.5, True), (0, True)]
    slow = {"raised": "DeadlineError", "seconds": 6.0, "text": "waited"}
    bad = {"victim": 0, "outcomes": {"1": slow, "2": {"raised": "x", "seconds": None}}, "left": []}
    found = {"trials": [good, bad, {"failed": "hung"}], "litter": ["/dev/shm/x"]}
    rows = jobs.kill_rows(found, "kills")
    assert [(row.value, row.met) for row in rows] == [(2, False), (6.0, False), (1, False)]
    assert "hung" in rows[0].note
    assert "/dev/shm/x" in rows[2].note
    assert jobs.kill_rows({"trials": [], "litter": []}, "kills")[1].met is False


def test_rdma_is_compared_with_perftest_of_the_same_repetition() -> None:
    samples = {
        "perftest 65536": [1.0, 2.0],
        "rdma 65536": [1.0, 2.2],
        "gloo 65536": [2.0, 4.4],
        "perftest latency": [1e-4, 1e-4],
        "perftest mean latency": [4e-4, 4e-4],
        "rdma latency": [1.4e-4, 1.2e-4],
        "rdma mean latency": [5e-4, 6e-4],
        "gloo mean latency": [10e-4, 12e-4],
    }
    result = lab.rows(samples)
    met = {row.what: row.met for row in result.rows}
    assert met["rdma over ib_write_bw, 64 KiB"] is True
    latency = "rdma, 1 KiB: half a round trip over ib_write_lat"
    assert met[f"{latency}, from Python, median"] is False
    assert met[f"{latency}, the C++ channel"] is None  # was not built
    reported = [row.value for row in result.rows if row.goal is None]
    assert reported == pytest.approx([1.375, 2.0, 2.0])
    channel = {"channel latency": [1.1e-4, 1.0e-4], "channel mean latency": [4e-4, 4e-4]}
    rows = {row.what: row for row in lab.latencies(samples | channel)}
    assert rows[f"{latency}, the C++ channel, median"].met is True
    assert rows[f"{latency}, the C++ channel, mean"].value == pytest.approx(1.0)
    assert {point.name for point in result.points} == {"ib_write_bw", "rdma", "gloo over TCP"}


# ---- soak


def test_growth_is_what_does_not_come_back() -> None:
    steady = [(100 + number % 3, 10) for number in range(50)]
    assert soak.growth(steady) == (0, 0)
    growing = [(100 + number, 10 + number // 40) for number in range(50)]
    assert soak.growth(growing) == (30, 1)
    warming_up = [(min(number * 10, 90), 10) for number in range(50)]
    assert soak.growth(warming_up) == (0, 0)


def test_a_soak_has_empty_messages_whole_slots_and_pieces() -> None:
    sizes = {8 * soak.words_of(number) for number in range(2000)}
    assert 0 in sizes
    assert soak.SLOT_BYTES in sizes
    assert max(sizes) > 4 * soak.SLOT_BYTES


# ---- the machine


def test_states_of_the_processors() -> None:
    states = [transfers.state_of(value) for value in (60.0, 120.0, 131.0, float("nan"))]
    assert states == ["near", "between", "far", "unknown"]
    resident, descriptors = soak.look()
    assert resident > MIB
    assert descriptors >= 3


def test_peers_that_are_not_here_say_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    found, reason = find_peers()
    assert found == {}
    assert INSTALL in reason


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


def test_written_bytes_are_read(library: Path) -> None:
    found = copies.Copies(library)
    memory = (ctypes.c_uint64 * 1000)()
    found.write(ctypes.addressof(memory), 8000, 7)
    assert list(memory[:3]) == [7, 8, 9]
    assert found.read(ctypes.addressof(memory), 8000) == sum(range(7, 1007))


def test_a_machine_without_a_compiler_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(copies.NoCompilerError, match="no C compiler"):
        copies.build(tmp_path)


# ---- processes


def test_peers_have_some_messages_under_way_and_post_no_receive_too_many() -> None:
    posted: list[Any] = []
    waited: list[Any] = []

    def post(buffer: Any) -> Any:
        posted.append(buffer)
        return buffer

    link = Posted(0, lambda _: object(), lambda _: "send", post, waited.append)
    link.expect(MIB, WINDOW + 2)
    assert len(posted) == WINDOW
    seen = {id(link.receive()) for _ in range(WINDOW + 2)}
    assert len(posted) == len(waited) == WINDOW + 2
    assert len(seen) == WINDOW + 1
    waited.clear()
    for _ in range(WINDOW + 2):
        link.send(None)
    assert waited == ["send"] * 2
    link.settle()
    assert waited == ["send"] * (WINDOW + 2)


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
    "connector",
    ["gloo", *(pytest.param(name, marks=needs_extension) for name in ("shm", "tcp"))],
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


@needs_extension
@pytest.mark.multiprocess
def test_a_short_soak_has_the_memory_that_was_asked_for(pair: Pair) -> None:
    options = {"slot_bytes": soak.SLOT_BYTES, "slots": soak.SLOTS}
    answers = pair.call("soak", "run", connector="shm", messages=3000, options=options)
    asked = 2 * soak.SLOT_BYTES * soak.SLOTS
    for answer in answers:
        assert asked <= answer["mapped_bytes"] <= jobs.ARENAS * asked
        assert len(answer["looks"]) >= 5


@needs_extension
@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_killed_ranks_leave_nothing_and_are_missed(kind: str) -> None:
    result = jobs.kills(2, kind)
    assert [row.met for row in result.rows] == [True] * 3, result
