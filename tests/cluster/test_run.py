"""Tests the error messages of ``train elastic``, and nodes that join without being listed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest

from megatron.adaptive.cli.run import main
from megatron.adaptive.cluster.incarnation import EXIT_LEFT
from megatron.adaptive.cluster.job_state_file import (
    Incarnation,
    IncarnationProgress,
    StateFile,
    phases,
    read_state,
    render_state,
)
from megatron.adaptive.errors import ConfigError, SetupError

from ..multiprocess.launch import forking, start
from .jobs import FLAGS, ROOT, JobFolder

TRAINER = str(ROOT / "pretrain_gpt.py")
SAVING = [*FLAGS, "--train-iters", "9", "--save-interval", "3"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "requires a script"),
        (["none.py"], "none.py: no such file"),
        ([TRAINER, *SAVING], "add --checkpoint DIR or --save"),
        (
            ["--wait", "never", TRAINER],
            "'never' is not a number of seconds from 0.001 to 1,000,000,",
        ),
        (["--replicate-every", "-1", TRAINER], "'-1' is not a whole number"),
        (["--replicate-memory", "0", TRAINER], "'0' is not a number of GiB from 1e-06 to 1,0"),
        (["--nodes", "0", TRAINER], "'0' is not a whole number from 1 to 1,000,000"),
        (["--status"], "pass the job's checkpoint folder"),
        (["--checkpoint", "c", TRAINER, *FLAGS, "--train-iters", "9"], "--save-interval"),
        (["--checkpoint", "c", TRAINER, *SAVING, "--lr", "x"], "--lr"),
        (["--checkpoint", "c", "--machines", "none", TRAINER, *SAVING], "No such file"),
        (["--unequal", "--checkpoint", "c", TRAINER, *SAVING], "--unequal requires the planner"),
        (
            ["--checkpoint", "c", TRAINER, *SAVING, "--stage-data-parallel-sizes", "2-1"],
            "the job chooses the ranks of its stages",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    arguments: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        main(arguments)
    assert reason in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_no_machine_that_answers_is_waited_for_until_the_deadline(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "ssh").write_text("#!/bin/sh\necho 'ssh: no route to host' >&2\nexit 255\n")
    (tools / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    machines = tmp_path / "machines.txt"
    machines.write_text("far-away slots=2\n")
    arguments = ["--machines", str(machines), "--checkpoint", str(tmp_path / "c"), "--wait", "0.5"]
    with pytest.raises(SetupError, match=r"fits 0 processes, and no machine joined within 0.5 s"):
        main([*arguments, TRAINER, *SAVING])
    said = capfd.readouterr()
    assert "machine far-away is left out: ssh: no route to host" in said.err
    main(["--status", str(tmp_path / "c")])
    assert "far-away             unreachable" in capfd.readouterr().out


def test_the_state_tells_parts_of_a_morph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = 10**9
    before = IncarnationProgress(iteration=8, saved_ns=12 * second, saving_s=0.5)
    marks = {"notice": 11, "ended": 13, "planned": 13, "begun": 14}
    incarnation = Incarnation(
        number=2,
        layout="PP 2 x DP 1, layers 2-2",
        processes=2,
        nodes=("a", "b"),
        reason="c was lost",
        before=before,
        marks_ns={name: moment * second for name, moment in marks.items()},
    )
    now = IncarnationProgress(
        total=9, iteration=9, begun_ns=17 * second, loaded_s=1, first_ns=18 * second
    )
    incarnation.phases_s = phases(incarnation, now)
    assert incarnation.phases_s == {
        "notice": 0.5,
        "checkpoint": 0.5,
        "end": 1.0,
        "plan": 0.0,
        "start": 2.0,
        "load": 1.0,
        "first_step": 1.0,
        "whole": 7.0,
    }
    (tmp_path / "elastic").mkdir()
    report = {
        "status": "training",
        "manager": {"host": "h", "pid": 1},
        "iteration": 9,
        "total_iterations": 20,
        "checkpoint_iteration": 8,
        "lost_steps": 0,
        "machines": [{"name": "a", "status": "present", "why": "", "slots": 1}],
        "epochs": [incarnation.to_dict()],
    }
    StateFile(tmp_path / "elastic").write(report)
    assert main(["--status", str(tmp_path), "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert {**read, **report} == read
    assert "load 1.00 s, first_step 1.00 s: 7.00 s" in render_state(read)
    # A second manager takes over and continues from the checkpoint of iteration 8.
    file = StateFile(tmp_path / "elastic")
    assert file.take_over(tmp_path) == 1
    file.write(
        {**report, "iteration": 12, "epochs": [{**incarnation.to_dict(), "resumed_iteration": 8}]}
    )
    read = read_state(tmp_path)
    assert (read["lost_steps"], [incarnation["epoch"] for incarnation in read["earlier"]]) == (
        1,
        [incarnation.number],
    )
    assert "1 steps lost in 1 layout changes" in render_state(read)
    assert "epochs under earlier managers: 1" in render_state(read)


def test_a_state_that_cannot_be_written_is_told_once_until_it_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks that the log contains one line about a full disk, even if several writes fail."""
    file = StateFile(tmp_path / "elastic")
    for _ in range(2):
        for _ in range(3):
            file.write({"iteration": 1})
        (tmp_path / "elastic").mkdir()
        file.write({"iteration": 2})
        assert json.loads((tmp_path / "elastic" / "state.json").read_text())["iteration"] == 2
        shutil.rmtree(tmp_path / "elastic")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4
    for failing, over in (said[:2], said[2:]):
        assert "No such file or directory; the run continues" in failing
        assert over.endswith("can be written again; 3 states of the job were lost")


def test_a_job_without_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pass the checkpoint folder of a job"):
        main(["--status", str(tmp_path)])
    (tmp_path / "elastic").mkdir()
    (tmp_path / "elastic" / "state.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        main(["--status", str(tmp_path)])


@pytest.mark.multiprocess
@pytest.mark.long
@pytest.mark.timeout(600)
def test_nodes_that_join_by_themselves_outlive_their_manager(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    command = [
        sys.executable,
        "-m",
        "megatron.adaptive",
        "train",
        "elastic",
        "--checkpoint",
        str(checkpoints),
    ]
    command += ["--nodes", "2", "--address", "127.0.0.1", "--replicate-every", "1"]
    trainer = [TRAINER, *FLAGS, "--train-iters", "9999", "--save-interval", "5"]
    job = JobFolder(checkpoints)
    trainer += ["--keep-checkpoints", "2", "--async-save"]
    nodes = {
        name: start([*command, "--name", name, *trainer], tmp_path / f"{name}.txt", forking())
        for name in "ab"
    }
    try:
        job.until(lambda: job.state().get("checkpoint_iteration", 0) >= 10, "a checkpoint", 200)
        state = job.state()
        (first,) = state["epochs"]
        assert sorted(first["nodes"]) == ["a", "b"]
        manager = next(name for name, node in nodes.items() if node.pid == state["manager"]["pid"])
        (left,) = set(nodes) - {manager}
        family = [
            process
            for node in nodes.values()
            for process in psutil.Process(node.pid).children(True)
        ]
        nodes[manager].kill()

        def goes_on() -> bool:
            now = job.state()
            is_managed = now["manager"]["pid"] == nodes[left].pid and now["epochs"]
            return is_managed and now["iteration"] > state["iteration"] + 10

        job.until(goes_on, "another manager", 200)
        state = job.state()
        (incarnation,) = state["epochs"]
        assert incarnation["nodes"] == [left]
        assert incarnation["resumed_iteration"] >= 10
        # The remaining node has copies of its own state and of the state of the manager's node.
        done = [
            max(line["iteration"] for line in map(json.loads, text) if "iteration" in line)
            for path in checkpoints.glob("elastic/epoch-1-*/progress.jsonl")
            if '"start_iteration": 0,' in (text := path.read_text().splitlines())[0]
        ]
        assert incarnation["resumed_iteration"] >= done[0] - 1
        assert (
            incarnation["source"] == "copies in memory" or incarnation["resumed_iteration"] % 5 == 0
        )
        # This signal asks the node to save a checkpoint and leave. The node could join again later.
        nodes[left].send_signal(signal.SIGUSR1)
        assert nodes[left].wait(60) == EXIT_LEFT
        assert len(list(checkpoints.glob("iter_*"))) == 2
        assert list(checkpoints.glob(".iter_*")) == []
        said = (tmp_path / f"{left}.txt").read_text()
        assert "Traceback" not in said
        # C++ prints this text if a store has exited together with its rank.
        assert "frame #" not in said
    finally:
        for node in nodes.values():
            if node.poll() is None:
                node.kill()
            node.wait(10)
    assert psutil.wait_procs(family, timeout=10)[1] == []
