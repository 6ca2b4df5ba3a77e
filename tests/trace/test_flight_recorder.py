"""Checks that dumps of torch's flight recorder reveal the stuck collective and the late ranks."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.cli import trace
from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.flight_recorder import StuckCalls, find_stuck, read_dumps
from tests.multiprocess.launch import ROOT, Ranks, tail

SCRIPT = ROOT / "tests" / "support" / "flight_recorder_rank.py"
LIMIT_S = 100.0
PAIR, WORLD = ("1", "pair"), ("0", "default_pg")


def call(number: int, *, group: tuple[str, str] = WORLD, ended: bool = True, **more: Any) -> Any:
    """Returns the entry of a dump for collective ``number``, in the format that torch documents.

    ``group`` contains the ID and name of the process group. ``ended`` states whether the call has
    finished. ``more`` contains fields that replace the default values.
    """
    return {
        "frames": [{"name": "step", "filename": "/jobs/train.py", "line": 10}],
        "record_id": number,
        "pg_id": int(group[0]),
        "process_group": group,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1000 * number,
        "input_sizes": [[3, 4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[3, 4]],
        "output_dtypes": ["Float"],
        "state": "completed" if ended else "started",
        "time_discovered_started_ns": 1,
        "time_discovered_completed_ns": None,
        "retired": ended,
        "timeout_ms": 600000,
        "is_p2p": False,
        **more,
    }


def stuck(folder: Path, *entries: list[Any] | None, version: str = "2.5") -> StuckCalls:
    """Writes a dump for each rank whose ``entries`` are not ``None``, and returns the analysis."""
    config = {
        "0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(len(entries))))},
        "1": {"name": "1", "desc": "pair", "ranks": "[0, 1]"},
    }
    for rank, of_rank in enumerate(entries):
        if of_rank is not None:
            content = {"version": version, "pg_config": config, "entries": of_rank}
            (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content))
    return find_stuck(read_dumps(folder))


@pytest.mark.multiprocess
@pytest.mark.timeout(150)
def test_dumps_of_a_real_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("pickles", "json"):
        (tmp_path / name).mkdir()
    log = tmp_path / "log.txt"
    variables = {"DUMPS": str(tmp_path), "TORCH_FR_BUFFER_SIZE": "100"}
    ranks = Ranks([str(SCRIPT)], world_size=3, log=log, limit_s=LIMIT_S, variables=variables)
    try:
        assert ranks.wait(LIMIT_S) == [0, 0, 0], tail(log)
    finally:
        ranks.kill()
    for name in ("pickles", "json"):
        assert trace.diagnose_run([str(tmp_path / name), "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        (call_of_all,) = said["stuck"]
        assert call_of_all["call"]["name"] == "gloo:all_reduce"
        assert (call_of_all["waiting"], call_of_all["late"]) == ([0, 2], [1])
        assert said["culprits"] == [1]
    assert trace.diagnose_run([str(tmp_path / "pickles")]) == 0
    assert "rank 1 has not made this call" in capsys.readouterr().out


def test_a_late_rank_that_waits_elsewhere_is_not_the_culprit(tmp_path: Path) -> None:
    waits = [call(1), call(2, ended=False)]
    in_pair = [call(1), call(7, group=PAIR, ended=False)]
    said = stuck(tmp_path, in_pair, [call(1)], waits)
    assert said.culprits == (1,)
    assert [(item.call.group, item.waiting, item.late) for item in said.stuck] == [
        ("0 (default_pg)", (2,), (0, 1)),
        ("1 (pair)", (0,), (1,)),
    ]
    assert "at jobs/train.py:10 in step" in said.format()


def test_ranks_that_wait_for_each_other(tmp_path: Path) -> None:
    said = stuck(
        tmp_path,
        [call(1), call(2, group=PAIR, ended=False)],
        [call(1), call(1, group=PAIR), call(2, ended=False)],
    )
    assert said.culprits == (0, 1)
    assert "wait for each other" in said.text


def test_different_operations(tmp_path: Path) -> None:
    other = call(2, ended=False, profiling_name="nccl:broadcast")
    said = stuck(tmp_path, [call(2, ended=False)], [other])
    assert "different operations as collective 2" in said.text
    assert "rank 1 called nccl:broadcast" in said.format()


def test_a_transfer_that_does_not_end(tmp_path: Path) -> None:
    said = stuck(tmp_path, [call(2, ended=False)], [call(2, ended=False)])
    assert said.culprits == ()
    assert "have entered collective 2, but the collective does not finish" in said.text


def test_a_rank_without_a_dump(tmp_path: Path) -> None:
    said = stuck(tmp_path, [call(2, ended=False)], None, [call(2, ended=False)])
    assert said.culprits == (1,)
    assert said.notes == (
        "no dump of rank 1: the process may have exited, or torch did not write a dump",
    )


def test_a_message_that_was_not_sent(tmp_path: Path) -> None:
    message = {"is_p2p": True, "p2p_seq_id": 4, "profiling_name": "nccl:recv 0<-1"}
    said = stuck(tmp_path, [call(1), call(1, ended=False, **message)], [call(1)])
    assert said.culprits == (1,)
    assert said.stuck[0].call.is_message


def message(record: int, number: int, name: str, *, ended: bool = True) -> Any:
    """Returns the entry of a dump for the ``number``-th point-to-point message of a rank.

    ``record`` is the ID of the entry, and ``name`` is the profiling name of the call. ``ended``
    states whether the call has finished.
    """
    return call(
        0, ended=ended, record_id=record, is_p2p=True, p2p_seq_id=number, profiling_name=name
    )


@pytest.mark.parametrize("overwritten", [0, 100])
def test_a_message_that_both_ends_called_has_no_culprit(tmp_path: Path, overwritten: int) -> None:
    """Checks that both ends of a message are matched, although their record numbers may differ."""
    said = stuck(
        tmp_path,
        [
            message(overwritten, 1, "nccl:send 0->1"),
            message(overwritten + 1, 2, "nccl:recv 0<-1", ended=False),
        ],
        [
            message(overwritten, 1, "nccl:recv 1<-0"),
            message(overwritten + 1, 2, "nccl:send 1->2", ended=False),
        ],
        [message(overwritten, 1, "nccl:recv 2<-1", ended=False)],
    )
    assert said.culprits == ()
    assert "both ranks of the message send 1->2" in said.text
    assert "the devices of ranks 1-2" in said.advice
    assert [(item.waiting, item.late) for item in said.stuck] == [((0,), (1,)), ((1, 2), ())]


@pytest.mark.parametrize("overwritten", [0, 100])
def test_a_rank_that_sends_nothing_is_the_culprit(tmp_path: Path, overwritten: int) -> None:
    said = stuck(
        tmp_path,
        [
            message(overwritten, 1, "nccl:send 0->1"),
            message(overwritten + 1, 2, "nccl:recv 0<-1", ended=False),
        ],
        [
            message(overwritten, 1, "nccl:recv 1<-0"),
            message(overwritten + 1, 2, "nccl:send 1->2"),
            message(overwritten + 2, 3, "nccl:recv 1<-0"),
        ],
        [
            message(overwritten, 1, "nccl:recv 2<-1"),
            message(overwritten + 1, 2, "nccl:recv 2<-1", ended=False),
        ],
    )
    assert said.culprits == (1,)
    assert [(item.waiting, item.late) for item in said.stuck] == [((0,), (1,)), ((2,), (1,))]


def test_ranks_that_wait_for_messages_of_each_other_may_still_compute(tmp_path: Path) -> None:
    said = stuck(
        tmp_path,
        [message(0, 1, "nccl:recv 0<-1", ended=False)],
        [message(0, 1, "nccl:recv 1<-0", ended=False)],
    )
    assert said.culprits == ()
    assert "or are still computing" in said.text


@pytest.mark.parametrize("ended", [True, False])
def test_messages_of_a_batch_end_with_it(tmp_path: Path, ended: bool) -> None:
    said = stuck(
        tmp_path,
        [
            message(0, 1, "nccl:recv 0<-1", ended=False),
            message(1, 1, "nccl:coalesced", ended=ended),
        ],
        [],
    )
    assert [item.late for item in said.stuck] == ([] if ended else [(1,)])


def test_a_message_of_an_unknown_rank_blames_nobody(tmp_path: Path) -> None:
    said = stuck(tmp_path, [message(0, 1, "gloo:recvAnySource", ended=False)], [call(1)])
    assert said.culprits == ()
    assert "no dump shows who sends the messages" in said.text


def test_dumps_made_for_nvrx_are_read(tmp_path: Path) -> None:
    stuck(tmp_path, [call(1, ended=False)], [])
    for rank in (0, 1):
        (tmp_path / f"nccl_trace_rank_{rank}").rename(tmp_path / f"_dump_{rank}")
    # This file was written by another program and must not be read as a dump.
    (tmp_path / "core_dump_2").write_bytes(b"core")
    assert find_stuck(read_dumps(tmp_path)).culprits == (1,)


def test_a_job_that_waits_for_nothing(tmp_path: Path) -> None:
    said = stuck(tmp_path, [call(1)], [call(1)])
    assert said.stuck == ()
    assert "no stuck calls" in said.format()


class Shell:
    """Object whose unpickling would run a shell command."""

    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            pickle.dumps({"version": "3.0", "entries": []}),
            "must be .* version 2.x .*, got version 3.0",
        ),
        (pickle.dumps({"version": "1.4", "entries": []}), "version 1.4;"),
        (pickle.dumps({"entries": []}), "version None;"),
        (pickle.dumps([1]), "version None;"),
        (b'{"version": "9.1"}', "version 9.1;"),
        (b'{"version": "2.5", "entries": [{"pg_id": 0}]}', "damaged dump"),
        (pickle.dumps({"version": "2.5"}), "damaged dump"),
        (pickle.dumps({"version": "2.5", "entries": 7}), "damaged dump"),
        (pickle.dumps({"version": "2.5", "entries": [Shell()]}), "object of posix.system"),
        (b"\x80\x04garbage", "is not a dump of torch's flight recorder"),
        (b"", "is not a dump of torch's flight recorder"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, content: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nccl_trace_rank_0").write_bytes(content)
    with pytest.raises(TraceError, match=message) as raised:
        read_dumps(tmp_path)
    assert "nccl_trace_rank_0" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "executed").exists()
