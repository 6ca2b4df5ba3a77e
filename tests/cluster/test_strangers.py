"""Tests that unknown programs cannot affect jobs, and that nodes follow only permitted requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.cli.node import _check_answer, _Hello, _settings
from megatron.adaptive.cluster.incarnation import CHECK_S, NodeWork
from megatron.adaptive.errors import AdaptiveError, ConfigError, SetupError
from tests.soak.strangers import measure

ANSWER = {
    "conf": {"LR": "1"},
    "folder": "/run",
    "processes": [1, 2],
    "job": "pods-20260101-1",
    "port": 29500,
    "node_rank": 1,
    "master_addr": "10.0.0.1",
}
HELLO = {"host": "h", "gpus": 0, "processes": None, "node_rank": None, "address": "10.0.0.1"}


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.slow
def test_strangers_have_no_effect_on_jobs() -> None:
    """Checks that strangers cannot stop jobs, replace nodes or read settings with any message."""
    outcome = measure(1000, 60.0, seed=5)
    listeners = {"manager", "keeper a", "keeper b", "clocks", "master of pods", "doctor"}
    assert {*outcome["said"]} >= {*listeners, "ranks over tcp"}
    assert min(outcome["said"].values()) >= 300
    assert outcome["unheard"] == {}
    assert (outcome["ends"], outcome["effects"], outcome["differences"]) == ([], [], 0)
    assert outcome["steps"] > 5


@pytest.fixture
def work(tmp_path: Path) -> NodeWork:
    arguments = ("--data-path", "/data/corpus", "--trace-dir", "traces", "--lr", "1e-3")
    return NodeWork(
        script="/own/train.py", arguments=arguments, checkpoints=str(tmp_path / "checkpoints")
    )


def ordered(work: NodeWork, *more: str, **variables: str) -> dict[str, Any]:
    """Returns the command that a node runs if a request names a different program and folder."""
    rank = {
        "key": "1/0",
        "variables": {"RANK": "0", **variables},
        "arguments": [*work.arguments, "--partition", "2-2", *more],
        "script": "/bin/sh",
        "folder": "/",
    }
    return work.order(rank, "script")


def test_a_node_runs_its_own_program_in_its_own_folder(work: NodeWork) -> None:
    inside = f"{work.checkpoints}/elastic/epoch-1-ab"
    order = ordered(work, "--trace-dir", "traces/epoch-3", "--progress-dir", inside)
    assert (order["script"], order["folder"]) == ("/own/train.py", str(Path.cwd()))
    assert order["limit_s"] == 0
    check = work.order({"key": "check-1/a", "variables": {}, "arguments": ["{}"]}, "check")
    assert 0 < check["limit_s"] < CHECK_S
    assert order["arguments"][-1] == inside


@pytest.mark.parametrize(
    ("more", "variables"),
    [
        ((), {"LD_PRELOAD": "/tmp/x.so"}),
        ((), {"PYTHONPATH": "/tmp"}),
        (("--save", "/elsewhere"), {}),
        (("--save=/elsewhere",), {}),
        (("--save", "elsewhere"), {}),
        (("--load", "{}/../../x"), {}),
        (("--data-path", "/etc/x"), {}),
        (("--trace-dir", "/tmp/epoch-1"), {}),
        ((), {"MEGATRON_ADAPTIVE_JOB": '{"checkpoints": "/elsewhere"}'}),
    ],
)
def test_a_manager_names_no_other_path_or_variable(
    work: NodeWork, more: tuple[str, ...], variables: dict[str, str]
) -> None:
    with pytest.raises(AdaptiveError):
        ordered(work, *(word.format(work.checkpoints) for word in more), **variables)


@pytest.mark.parametrize(
    "change",
    [
        {"job": "../x"},
        {"job": "/tmp/x"},
        {"job": ""},
        {"processes": [1]},
        {"processes": "12"},
        {"node_rank": -1},
        {"node_rank": []},
        {"port": True},
        {"conf": []},
        {"master_addr": None},
    ],
)
def test_a_masters_answer_is_whole_and_stays_in_its_folder(change: dict[str, Any]) -> None:
    _check_answer(dict(ANSWER))
    with pytest.raises(SetupError, match="runs a different version of the program"):
        _check_answer({**ANSWER, **change})


def test_a_master_names_no_program() -> None:
    variables = {"LR": "1", "PYTHON": "/tmp/x", "LD_LIBRARY_PATH": "/tmp", "NCCL_DEBUG": "INFO"}
    assert _settings(variables, {}) == {"LR": "1", "NCCL_DEBUG": "INFO"}
    container = {"CONTAINER": "apptainer", "IMAGE": "/tmp/x.sif"}
    with pytest.raises(ConfigError, match="nodes do not accept programs from another node"):
        _settings(container, {})
    assert _settings(container, {"CONTAINER": "none"}) == {}
    with pytest.raises(ConfigError, match="PATH, which is not a variable of a run"):
        _settings({"PATH": "/tmp"}, {})


@pytest.mark.parametrize(
    "change", [{"node_rank": []}, {"gpus": -1}, {"host": "\x1b[2J"}, {"processes": True}]
)
def test_a_node_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    assert _Hello.read({**HELLO, "what": "hello"}).host == "h"
    with pytest.raises(ValueError, match="not a valid description of a node"):
        _Hello.read({**HELLO, **change})
