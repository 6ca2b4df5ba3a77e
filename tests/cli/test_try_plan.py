"""Tests that ``plan --try``, which runs a single rank, agrees with that rank of a real job."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megatron.adaptive.cli import try_plan
from megatron.adaptive.cli.plan import main
from megatron.adaptive.errors import ConfigError

from ..multiprocess.launch import ROOT, Ranks, forking_every, has_ended, tail, wait_until

SMALL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
SMALL += "--max-position-embeddings 32 --vocab-size 100"
# This model needs few operations but much memory, most of which is for its vocabulary matrices.
LARGE = "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 128 "
LARGE += "--max-position-embeddings 128 --vocab-size 32768"
LIMIT_S = 240


def write_plan(folder: Path, **changes: Any) -> Path:
    """Writes a plan for two pipeline ranks and returns its path."""
    content: dict[str, Any] = {
        "format": 1,
        "degrees": {"tensor": 1, "pipeline": 2, "data": 1, "chunks": 1},
        "placement": [{"nodes": 1, "processes_per_node": 2}],
        "partition": [1, 1],
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "schedule": "1f1b",
        "precision": "fp32",
    }
    path = folder / "plan.json"
    path.write_text(json.dumps({**content, **changes}), encoding="utf-8")
    return path


def tried(path: Path, model: str, rank: int) -> dict[str, Any]:
    """Tries ``rank`` in a separate process, and returns what the process added to the plan file."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "megatron.adaptive", "plan", "--try", str(path)),
            *("--model", model, "--rank", str(rank)),
        ],
        cwd=ROOT,
        env=forking_every(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "memory" in done.stdout
    entry: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["tried"]
    return entry


def peaks_of_job(path: Path, model: str) -> list[int]:
    """Trains with a plan, and returns the maximum resident memory of each rank in bytes.

    The ranks of the job are forked from a process with the same imports as the ranks of a trial, so
    that the memory of the imports counts equally in both.
    """
    # The optimizer's memory is completely allocated only in the second step, so train several
    # steps.
    flags = "--mock-data --tokenizer-type NullTokenizer --train-iters 3 --eval-iters 0 --lr 1e-4"
    command = [str(ROOT / "pretrain_gpt.py"), "--plan", str(path), *model.split(), *flags.split()]
    log = path.with_name("log.txt")
    ranks = Ranks(command, world_size=2, log=log, limit_s=LIMIT_S)
    peaks, processes = [0, 0], ranks.processes()
    assert len(processes) == 2, tail(log)
    end_s = time.monotonic() + LIMIT_S
    try:
        while len(ended := ranks.wait(0.05)) < 2 and not any(ended) and time.monotonic() < end_s:
            for number, rank in enumerate(processes):
                with contextlib.suppress(OSError, IndexError):  # The rank may have exited.
                    status = Path(f"/proc/{rank.pid}/status").read_text(encoding="utf-8")
                    peaks[number] = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    finally:
        ranks.kill()
    assert ended == [0, 0], tail(log)
    return peaks


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_rank_alone_needs_the_memory_that_it_needs_in_the_job(tmp_path: Path) -> None:
    # The first stage stores the activations of at most two microbatches, so this batch consists of
    # two microbatches.
    path = write_plan(tmp_path, global_batch_size=4)
    peaks = peaks_of_job(path, LARGE)
    for rank in (0, 1):
        entry = tried(path, LARGE, rank)
        measured = next(row for row in entry["ranks"] if row["rank"] == rank)
        assert measured["memory_bytes"] == pytest.approx(peaks[rank], rel=0.05)
    # The file must contain the results of both ranks.
    assert [row["rank"] for row in entry["ranks"]] == [0, 1]
    assert entry["step_s"] > 0


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("degrees", "changes", "rank"),
    [
        ({"tensor": 2, "pipeline": 2}, {"schedule": "zb-h1"}, 3),
        ({"pipeline": 2, "chunks": 2}, {"schedule": "adaptive", "partition": [1, 0, 0, 1]}, 1),
        ({"pipeline": 2}, {"schedule": "adaptive", "sequence_slices": 2, "activation_cap": 2.5}, 1),
        ({"data": 4}, {"distributed_optimizer": True, "partition": [2]}, 2),
    ],
)
def test_a_rank_of_each_kind_of_plan_runs_and_plans_with_its_times(
    degrees: dict[str, int],
    changes: dict[str, Any],
    rank: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = {"tensor": 1, "pipeline": 1, "data": 1, **degrees}
    processes = shape["tensor"] * shape["pipeline"] * shape["data"]
    placement = [{"nodes": 1, "processes_per_node": processes}]
    path = write_plan(tmp_path, degrees=shape, placement=placement, **changes)
    entry = tried(path, SMALL, rank)
    (measured,) = entry["ranks"]
    assert measured["forward_s"][0] > 0
    assert measured["optimizer_s"] > 0
    node = {"type": "here", "gpu": "cpu", "count": 1, "gpus_per_node": 4, "memory": "8 GB"}
    cluster = {"format": 1, "nodes": [{**node, "link": {"bandwidth": "1 GB/s"}}]}
    (tmp_path / "cluster.json").write_text(json.dumps(cluster), encoding="utf-8")
    arguments = [
        "--model",
        SMALL,
        "--cluster",
        str(tmp_path / "cluster.json"),
        "--profile",
        str(path),
    ]
    arguments += ["--tp", str(shape["tensor"]), "--micro-batch-sizes", "2"]
    assert main([*arguments, "--global-batch-size", "8"]) == 0
    assert "data sheets" not in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.multiprocess
def test_measurements_of_another_device_are_left_out_by_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_plan(tmp_path)
    for name, value in forking_every().items():
        monkeypatch.setenv(name, value)
    command = ["--try", str(path), "--model", SMALL]
    assert main([*command, "--rank", "0"]) == 0
    plan = json.loads(path.read_text(encoding="utf-8"))
    (measured,) = plan["tried"]["ranks"]
    measured["device"] = "A100-40"
    path.write_text(json.dumps(plan), encoding="utf-8")
    capfd.readouterr()
    assert main([*command, "--rank", "1"]) == 0
    assert (
        "rank 0 was tried on A100-40, not on cpu; the values from that trial are omitted"
        in capfd.readouterr().err
    )
    (measured,) = json.loads(path.read_text(encoding="utf-8"))["tried"]["ranks"]
    assert (measured["rank"], measured["device"]) == (1, "cpu")


@pytest.mark.parametrize(
    ("changes", "more", "message"),
    [
        ({}, ["--rank", "2"], r"--rank must be from 0 to 1, got 2; .* has 2 ranks"),
        ({}, ["--world-size", "4"], r"--world-size must be 2, .*, got 4"),
        ({"placement": [{"nodes": 2, "processes_per_node": 2}]}, [], "placement has 4 processes"),
        ({"degrees": {"pipeline": 2}}, [], "degrees.data is missing"),
        ({"stages": [{"tensor": [1, 1]}, {"tensor": [1]}]}, [], "equal data-parallel sizes"),
        ({"partition": [1, 2]}, [], "layers 1-2 add up to 3"),
        ({"tried": {"ranks": [{"rank": 0}]}}, [], 'run "plan --try" again'),
    ],
)
def test_bad_input_is_one_line(
    changes: dict[str, Any], more: list[str], message: str, tmp_path: Path
) -> None:
    path = write_plan(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message) as failure:
        main(["--try", str(path), "--model", SMALL, *more])
    assert "\n" not in str(failure.value)


@pytest.mark.long
def test_a_rank_that_needs_more_memory_than_there_is_does_not_start(tmp_path: Path) -> None:
    huge = "--num-layers 2 --hidden-size 131072 --num-attention-heads 64 --seq-length 16 "
    huge += "--max-position-embeddings 16 --vocab-size 100"
    path = write_plan(tmp_path)
    reason = r"rank 0 needs [\d,.]+ GB according to the plan, but CPU has"
    with pytest.raises(ConfigError, match=reason) as e:
        main(["--try", str(path), "--model", huge])
    assert "\n" not in str(e.value)
    assert "tried" not in json.loads(path.read_text(encoding="utf-8"))


def test_a_plan_without_measurements_is_no_profile(tmp_path: Path) -> None:
    path = write_plan(tmp_path)
    node = {"type": "here", "gpu": "cpu", "count": 1, "gpus_per_node": 2, "memory": "8 GB"}
    cluster = {"format": 1, "nodes": [{**node, "link": {"bandwidth": "1 GB/s"}}]}
    (tmp_path / "cluster.json").write_text(json.dumps(cluster), encoding="utf-8")
    arguments = ["--model", SMALL, "--cluster", str(tmp_path / "cluster.json")]
    with pytest.raises(ConfigError, match="contains no measurements; measure a rank"):
        main([*arguments, "--profile", str(path), "--global-batch-size", "8"])


def test_ranks_that_hang_while_links_are_measured_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks that the command does not wait for hanging ranks that keep the pipe open."""
    launcher = tmp_path / "launcher"
    launcher.write_text(f"#!/bin/sh\nsleep 30 &\necho $! > {tmp_path}/rank\nwait\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))
    monkeypatch.setattr(try_plan, "_LINKS_S", 1.0)
    monkeypatch.setattr(try_plan, "most_bytes", lambda plan, model: 1024.0)
    trial: Any = SimpleNamespace(world_size=2, model=None)
    begin_s = time.monotonic()
    plan: Any = None
    assert try_plan._measure_links(trial, plan) == {}
    assert time.monotonic() - begin_s < 20
    assert "links between two ranks were not measured: the ranks took more than 1 s" in (
        capsys.readouterr().err
    )
    with contextlib.suppress(psutil.NoSuchProcess):
        rank = psutil.Process(int((tmp_path / "rank").read_text()))
        # The kernel may take some time to end a killed process.
        wait_until(lambda: has_ended(rank), lambda: f"{rank} runs", 10)
