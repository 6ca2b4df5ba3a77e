"""Tests the hang detector with made-up states of ranks, some of which hang."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.trace import hang_watch
from megatron.adaptive.trace.hang_watch import RankEvidence, Stillness, find_culprit, main_frames

WAITS = (("/x/megatron/adaptive/transport/native.py", 364, "wait"),)
IN_COLLECTIVE = (("/x/torch/distributed/distributed_c10d.py", 5000, "barrier"),)
READS = (("/x/pathlib.py", 1044, "open"), ("/x/megatron/adaptive/data/loader.py", 1, "_fetch"))
SAVES = (("/x/pathlib.py", 1, "open"), ("/x/megatron/adaptive/checkpoint/folder.py", 1, "sync"))
COMPUTES = (("/x/user.py", 7, "forward"),)


def make_rank(rank: int, *, needs: Any = (), **more: Any) -> RankEvidence:
    """Returns the evidence about a rank that waits for the messages ``needs``.

    ``more`` contains fields that replace the default values.
    """
    now = {"doing": "wait", "iteration": 3, "step": 2, "needs": needs, "finished": {}}
    now |= more.pop("now", {})
    fields = {"name": f"rank {rank} (stage {rank})", "pid": 100 + rank, "frames": WAITS}
    return RankEvidence(rank=rank, **{**fields, "now": now, **more})


def chain(last: RankEvidence) -> list[RankEvidence]:
    """Returns ranks 0, 1 and ``last``. Ranks 0 and 1 each wait for a message from the next rank."""
    return [
        make_rank(0, needs=[[1, "B", 0, 0, "0"]], now={"finished": {"F0": 2}}),
        make_rank(1, needs=[[2, "B", 0, 0, "0"]], now={"finished": {"F0": 1}}),
        last,
    ]


def counts(**of: int) -> dict[str, Any]:
    return {"doing": "", "collectives": {name: [n, [0, 1, 2]] for name, n in of.items()}}


def start_watch(folder: Path) -> subprocess.Popen[str]:
    """Starts the hang detector for the reports in ``folder``, as the first rank of a node does."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", hang_watch.__file__, str(folder)],
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("last", "cause", "says"),
    [
        (make_rank(2, state="T", frames=()), "stopped", "kill -CONT 102"),
        (make_rank(2, state="D", frames=()), "file system", "blocked in a system call"),
        (make_rank(2, age_s=20.0), "interpreter lock", "no other Python thread"),
        (make_rank(2, state="", now={}, frames=()), "silent machine", "detector on its machine"),
        (make_rank(2, frames=READS), "data reader", "reads data"),
        (make_rank(2, frames=SAVES), "file system", "checkpoint"),
        (make_rank(2, frames=COMPUTES, line="with self._lock:"), "lock", "user.py:7 in forward"),
        (make_rank(2, frames=COMPUTES, line="torch.cuda.synchronize()"), "device", "nvidia-smi"),
        (
            make_rank(2, frames=COMPUTES, now={"doing": "F", "microbatch": 4}),
            "code",
            "the forward of microbatch 4",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_rank_at_the_end_of_the_waits(last: RankEvidence, cause: str, says: str) -> None:
    culprit = find_culprit(chain(last))
    assert (culprit.ranks, culprit.cause) == ((2,), cause)
    assert says in f"{culprit.text}; {culprit.advice}"
    assert "rank 2" in culprit.text


def test_who_has_not_entered_a_collective() -> None:
    ranks = [make_rank(r, frames=IN_COLLECTIVE, now=counts(dp=8, world=3)) for r in range(2)]
    ranks.append(make_rank(2, frames=COMPUTES, now=counts(dp=7, world=3)))
    culprit = find_culprit(ranks)
    assert (culprit.ranks, culprit.cause) == ((2,), "collective")
    assert (
        "collective 8 of the group of ranks 0 1 2, which this rank has not entered" in culprit.text
    )
    # If all ranks have entered the collective, the collective itself is the cause.
    ranks[2] = make_rank(2, frames=IN_COLLECTIVE, now=counts(dp=8, world=3))
    assert find_culprit(ranks).cause == "collective"


def test_of_two_that_wait_for_nobody_the_one_that_more_wait_for() -> None:
    ranks = [*chain(make_rank(2, frames=READS)), make_rank(3, frames=COMPUTES)]
    assert find_culprit(ranks).ranks == (2,)


def test_a_message_that_was_sent_and_did_not_arrive() -> None:
    culprit = find_culprit(
        [
            make_rank(0, needs=[[1, "B", 0, 0, "0"]], now={"finished": {"F0": 3}}),
            make_rank(1, needs=[[0, "F", 0, 1, "1"]], now={"finished": {"F0": 1}}),
        ]
    )
    assert (culprit.ranks, culprit.cause) == ((0, 1), "network")
    assert "the forward of microbatch 1, which rank 0" in culprit.text


def test_a_message_of_a_rank_that_has_done_all_of_its_step() -> None:
    """Checks that a lost message is found if its sender waits in the optimizer's collective.

    Rank 0 waits for a message from rank 1. Rank 1 has sent all messages of the step, and waits for
    rank 0 in the collective.
    """
    culprit = find_culprit(
        [
            make_rank(
                0, needs=[[1, "B", 0, 0, "0"]], now={**counts(world=7), "doing": "wait", "step": 3}
            ),
            make_rank(1, frames=IN_COLLECTIVE, now={**counts(world=8), "step": 4}),
        ]
    )
    assert (culprit.ranks, culprit.cause) == ((1, 0), "network")


def test_orders_that_contradict_each_other() -> None:
    culprit = find_culprit(
        [
            make_rank(0, needs=[[1, "B", 0, 0, "0"]], now={"finished": {"F0": 1}}),
            make_rank(1, needs=[[0, "F", 0, 1, "1"]], now={"finished": {"F0": 1}}),
        ]
    )
    assert (culprit.ranks, culprit.cause) == ((0, 1), "deadlock")
    assert "rank 1 waits for the forward of microbatch 1 of rank 0" in culprit.text
    assert "--schedule-file" in culprit.advice


def test_a_pause_between_steps_is_no_hang_unless_somebody_waits() -> None:
    def look(*begun: int, **more: Any) -> Any:
        state = {"in_step": False, "doing": "", "may_pause": True, **more}
        nows = [{**state, "collectives": {"world": [n, [0, 1]]}} for n in begun]
        still = Stillness(5.0)
        still.look(dict(enumerate(nows)), 0.0)
        return still.paused

    assert look(4, 4) == {"world": 4}
    assert look(4, 5) is None
    assert look(4, 4, in_step=True) is look(4, 4, doing="evaluate") is None
    assert look(4, 4, may_pause=False) is None
    assert hang_watch.agreed([{"world": 4}, {"world": 5}]) is hang_watch.agreed([{}, None]) is None


class TestStillness:
    def run(
        self, still: Stillness, nows: list[dict[str, Any]], *, every_s: float, **moves: bool
    ) -> float:
        """Passes an item of ``nows`` to ``still`` every ``every_s`` seconds.

        Returns the result for the last item.
        """
        still_s = 0.0
        for number, now in enumerate(nows):
            still_s = still.look({0: now}, number * every_s, **moves)
        return still_s

    def test_steps_that_take_long_make_the_limit_longer(self) -> None:
        still = Stillness(None)
        assert still.limit_s == hang_watch.LEAST_S
        self.run(still, [{"iteration": n, "in_step": True} for n in range(9)], every_s=60.0)
        assert still.limit_s == hang_watch.STEPS * 60.0
        assert Stillness(7.0).limit_s == 7.0

    def test_within_steps_only_what_ends_is_movement(self) -> None:
        steps = [{"iteration": n, "in_step": True, "done": [n]} for n in range(5)]
        for moves in ({"computes": True}, {"transfers": True}, {}):
            still = Stillness(None)
            assert self.run(still, steps + steps[-1:] * 8, every_s=5.0, **moves) == 40.0

    @pytest.mark.parametrize("doing", ["", "evaluate", "checkpoint"])
    def test_elsewhere_work_of_processors_and_disks_is_too(self, doing: str) -> None:
        steps = [{"iteration": n, "in_step": True} for n in range(5)]
        now = {"iteration": 4, "doing": doing, "in_step": False}
        for count, moves, expected in (
            (9, {}, 40.0),
            (9, {"computes": True}, 0.0),
            (200, {"transfers": True}, 0.0),
            # After a long time, a rank is also reported as hanging if it only computes.
            (200, {"computes": True}, 995.0),
        ):
            still_s = self.run(Stillness(None), [*steps, *[now] * count], every_s=5.0, **moves)
            assert still_s == expected

    def test_the_first_steps_may_import_and_compile(self) -> None:
        now = {"iteration": 1, "in_step": True}
        assert self.run(Stillness(None), [now] * 20, every_s=5.0, computes=True) == 0.0


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="the kernel does not count waits"
)
def test_a_process_that_waits_for_a_processor_counts_as_one_that_computes() -> None:
    """Checks that waiting for a busy processor counts as computing, because it is no hang."""
    processor = str(min(os.sched_getaffinity(0)))
    spin = ["taskset", "--cpu-list", processor, sys.executable, "-S", "-c", "while True: pass"]
    busy = [subprocess.Popen(spin, preexec_fn=lambda: os.nice(10)) for _ in range(2)]
    try:
        before = [hang_watch._work(process.pid)[1] for process in busy]
        time.sleep(1.0)
        spent_s = sum(hang_watch._work(process.pid)[1] for process in busy) - sum(before)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    # The two processes share one processor, so one ran while the other waited. Running and waiting
    # for a processor both count as work.
    assert spent_s > 1.5


def test_stacks_of_both_tools() -> None:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        (path, _, function), *_ = main_frames(file.read())
    assert (path, function) == (__file__, "test_stacks_of_both_tools")
    spy = (
        "Process 7: python train.py\n"
        'Thread 8 (idle): "reader"\n    wait (threading.py:324)\n'
        "Thread 7 (active)\n    poll (libc.so.6)\n    forward (/x/user.py:7)\n"
        "Thread 9 (idle)\n    more (/x/user.py:8)\n"
    )
    assert main_frames(spy) == [("/x/user.py", 7, "forward")]
    assert main_frames("") == []


@pytest.mark.long
def test_the_process_reports_once_and_ends_with_its_ranks(tmp_path: Path) -> None:
    """Checks that the hang detector reports a hang once, and exits when its ranks have ended.

    The rank has no handler for the signal that requests a stack trace. The signal would kill the
    rank, so the detector must not send it.
    """
    folder = tmp_path / "private"
    folder.mkdir()
    rank = subprocess.Popen(["sleep", "1000"])
    job = {"pids": {0: rank.pid}, "names": {0: "rank 0"}, "after_s": 2.0, "on_hang": "report"}
    job |= {"page_folder": str(tmp_path), "machine": 0, "machines": 1, "py_spy": None}
    job["parent"] = os.getpid()
    (folder / hang_watch.JOB_FILE).write_text(
        json.dumps({**job, "signal": int(signal.SIGRTMIN) + 9})
    )
    now = {"pid": rank.pid, "doing": "F", "iteration": 5, "unix_ns": time.time_ns()}
    # The state has a time in the future, so the rank seems to keep reporting its state.
    now["unix_ns"] = time.time_ns() + 60 * 10**9
    file = folder / "now_rank_00000.json"
    os.kill(rank.pid, signal.SIGSTOP)
    file.write_text(json.dumps(now))
    watch = start_watch(folder)
    try:
        assert watch.stderr is not None
        line = watch.stderr.readline()
        assert "in iteration 5: rank 0 is stopped" in line
        (page,) = tmp_path.glob("hang_*.txt")
        assert f"stacks of all ranks: {page}" in line
        assert "no stack" in page.read_text()
        file.write_text(json.dumps({**now, "doing": "ended"}))
        assert watch.wait(60) == 0
        assert watch.stderr.read() == ""
        assert not folder.exists()
    finally:
        for process in (rank, watch):
            process.kill()
            process.wait()


@pytest.mark.long
@pytest.mark.parametrize("spins", [True, False])
def test_a_rank_that_waits_for_its_gpu_does_not_count_as_computing(
    spins: bool, tmp_path: Path
) -> None:
    """Checks that a rank outside of a step does not count as computing while it waits for its GPU.

    CUDA uses a whole processor while it waits.
    """
    number = int(signal.SIGRTMIN) + 9
    folder = tmp_path / "private"
    folder.mkdir()
    # The detector asks the rank for its stack with this signal.
    program = f"import signal; signal.signal({number}, signal.SIG_IGN)\nwhile True: pass"
    rank = subprocess.Popen([sys.executable, "-S", "-c", program])
    job = {"pids": {0: rank.pid}, "names": {0: "rank 0"}, "after_s": 1.0, "on_hang": "report"}
    job |= {"page_folder": str(tmp_path), "machine": 0, "machines": 1, "py_spy": None}
    job |= {"parent": os.getpid(), "signal": number}
    (folder / hang_watch.JOB_FILE).write_text(json.dumps(job))
    now = {"pid": rank.pid, "doing": "", "iteration": 5, "spins": spins}
    now["unix_ns"] = time.time_ns() + 60 * 10**9
    (folder / "now_rank_00000.json").write_text(json.dumps(now))
    watch = start_watch(folder)
    try:
        assert watch.stderr is not None
        line = watch.stderr.readline()
        match = re.match(r"hang: no progress for (\d+) s", line)
        assert match, line
        # The detector waits ten times as long for ranks that compute.
        assert (int(match[1]) < 10) is spins
    finally:
        for process in (rank, watch):
            process.kill()
            process.wait()


def test_the_process_ends_where_its_rank_ended_before_it_began(tmp_path: Path) -> None:
    """Checks that the detector exits if its rank has ended before the detector starts.

    In this case, the detector has a new parent process, which it must not mistake for the rank.
    """
    rank = subprocess.Popen(["true"])
    rank.wait()
    folder = tmp_path / "private"
    folder.mkdir()
    job = {"parent": rank.pid, "pids": {0: rank.pid}, "names": {0: "rank 0"}, "after_s": None}
    (folder / hang_watch.JOB_FILE).write_text(json.dumps({**job, "on_hang": "report"}))
    command = [sys.executable, "-I", "-S", hang_watch.__file__, str(folder)]
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert (done.stderr, folder.exists()) == (b"", False)
