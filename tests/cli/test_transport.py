"""Tests the table, the chosen transport and the errors of ``transport --check``."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from megatron.adaptive import extension
from megatron.adaptive.cli.transport import Outcome, _print
from megatron.adaptive.config.transport_specs import BUILT_IN

from ..multiprocess.launch import forking_every, free_port

LIMIT_S = 150
FAST = "--check --seconds 0.2"

has_extension = pytest.mark.skipif(extension.load() is None, reason=str(extension.why_missing()))


def start(arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "megatron.adaptive", "transport", *arguments.split()],
        env={**forking_every(), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(arguments: str, **variables: str) -> tuple[int | None, str, str]:
    process = start(arguments, **variables)
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    return process.returncode, out, err


@has_extension
@pytest.mark.multiprocess
def test_alone_it_tries_two_processes_of_this_machine() -> None:
    status, out, err = run(f"{FAST} --json")
    assert status == 0, err
    outcomes: dict[str, Any] = {outcome["transport"]: outcome for outcome in json.loads(out)}
    assert set(outcomes) == {"shm", "rdma", "tcp", "gloo", "nccl"} | BUILT_IN.keys()
    assert [name for name, outcome in outcomes.items() if outcome["chosen"]] == ["shm"]
    for name in ("shm", "tcp", "gloo"):
        assert outcomes[name]["works"], outcomes[name]
        assert outcomes[name]["latency_us"] > 0
        assert outcomes[name]["gb_per_s"] > 0
    assert outcomes["nccl"]["note"].endswith("it has no GPU")
    assert outcomes["shm"]["note"] == "same machine"


@pytest.mark.long
@has_extension
@pytest.mark.multiprocess
def test_the_chosen_one_decides_the_status() -> None:
    status, out, err = run(f"{FAST} --transport nccl")
    assert status == 1, err
    assert "* nccl" in out
    assert "no: rank 0 on " in out


@has_extension
@pytest.mark.multiprocess
def test_two_processes_started_as_torchrun_does() -> None:
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        start(f"{FAST} --transport tcp", **variables, RANK=str(rank), LOCAL_RANK="0")
        for rank in range(2)
    ]
    try:
        texts = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], texts
    assert "* tcp" in texts[0][0]
    assert texts[1][0] == ""


def test_the_table_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    pair, hosts = (0, 3), ("a", "b")
    outcomes = [
        Outcome(
            ranks=pair,
            hosts=hosts,
            transport="rdma",
            chosen=True,
            works=True,
            latency_us=3.25,
            gb_per_s=11.5,
            note="both have an active port",
        ),
        Outcome(ranks=pair, hosts=hosts, transport="shm", note="they run elsewhere"),
    ]
    _print(outcomes, as_json=False)
    head, rdma, shm, _, foot = capsys.readouterr().out.splitlines()
    assert head.split() == ["ranks", "transport", "half", "round", "trip", "bandwidth"]
    assert rdma.split()[:6] == ["0-3", "*", "rdma", "3.2", "us", "11.50"]
    assert shm.endswith("no: they run elsewhere")
    assert foot == "* marks the transport that a run would use. 0-3: a to b"
