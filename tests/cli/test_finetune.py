"""Tests that ``train finetune`` computes the losses of transformers, and that it can be resumed."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file

from megatron.adaptive import __main__ as program
from megatron.adaptive.config.environment import JOB_VARIABLE, JobOrder
from megatron.adaptive.trace.read import read_run

from ..cluster.jobs import ElasticJob
from ..multiprocess.launch import ROOT, TRANSFORMERS, forking_every

pytest.importorskip("transformers", reason="bash prerequisite.sh --examples")
from ..support.tuned_models import (
    loss_of_transformers,
    write_image_data,
    write_image_model,
    write_text_data,
    write_text_model,
)

LIMIT_S = 200.0
COMMAND = ("-m", "megatron.adaptive", "train", "finetune")


def paths_in(folder: Path) -> list[str]:
    """Returns the command-line options for the model, data and output in ``folder``."""
    names = {"--model": "model", "--data": "data/train.jsonl", "--output": "tuned"}
    return [word for flag, name in names.items() for word in (flag, str(folder / name))]


def tuned(folder: Path, options: str) -> str:
    """Fine-tunes the model in ``folder`` on its data, and returns the program's output."""
    done = subprocess.run(
        [sys.executable, *COMMAND, *paths_in(folder), *options.split()],
        cwd=ROOT,
        env=forking_every(TRANSFORMERS),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_whole_model_with_images_is_tuned_on_two_processes(tmp_path: Path) -> None:
    """Checks that losses on two processes equal transformers' losses before and after training."""
    write_image_model(tmp_path / "model")
    data = write_image_data(tmp_path / "data")
    options = "--epochs 2 --lr 5e-3 --length-multiple 8 --eval-share 0.2 --nproc-per-node 2"
    traces = tmp_path / "traces"
    options += f" --repartition auto --order work --trace-dir {traces} --trace-interval 2"
    output = tuned(tmp_path, options)
    losses = re.findall(r"step \d of 4: loss ([\d.]+)", output)
    evaluated = re.findall(r"evaluation loss ([\d.]+)", output)
    assert (len(losses), len(evaluated)) == (4, 2)
    order = list(range(20))
    random.Random(1).shuffle(order)
    trained, held_out = order[:16], order[16:]
    random.Random(2).shuffle(trained)
    before = loss_of_transformers(tmp_path / "model", data, trained[:8])
    assert float(losses[0]) == pytest.approx(before, rel=1e-5)
    after = loss_of_transformers(tmp_path / "tuned", data, held_out)
    assert float(evaluated[-1]) == pytest.approx(after, rel=1e-5)
    assert after < loss_of_transformers(tmp_path / "model", data, held_out) - 0.3
    # If segments have moved, each partition has a separate trace.
    read = [read_run(folder) for folder in sorted(tmp_path.glob("traces*"))]
    assert all(sorted(run.ranks) == [0, 1] for run in read)
    assert sorted(step for run in read for step in run.iterations) == [1, 3]


@pytest.mark.long
@pytest.mark.multiprocess
def test_two_replicas_evaluate_the_one_sample_of_a_single_process(tmp_path: Path) -> None:
    """Checks that the number of replicas does not change which samples are used for evaluation."""
    write_text_model(tmp_path / "model")
    (tmp_path / "data").mkdir()
    write_text_data(tmp_path / "data" / "train.jsonl")
    losses = []
    for processes in ("1", "2"):
        shutil.rmtree(tmp_path / "tuned", ignore_errors=True)
        options = f"--lr 0 --eval-share 0.03 --pipeline-size 1 --nproc-per-node {processes}"
        output = tuned(tmp_path, options)
        assert re.search(r"^\d+ samples for training, 1 for evaluation", output, re.MULTILINE)
        losses += re.findall(r"evaluation loss ([\d.]+)", output)
    assert float(losses[1]) == pytest.approx(float(losses[0]), rel=1e-5)


@pytest.mark.long
def test_an_interrupted_run_continues_with_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks that a resumed run has the losses of an undisturbed run, and rejects changed data."""
    write_text_model(tmp_path / "model")
    (tmp_path / "data").mkdir()
    write_text_data(tmp_path / "data" / "train.jsonl")
    checkpoints = tmp_path / "checkpoints"
    options = ["--checkpoints", str(checkpoints), *"--save-interval 1 --lora-rank 4".split()]

    def run(*more: str) -> tuple[int, list[str], str]:
        shutil.rmtree(tmp_path / "tuned", ignore_errors=True)
        command = ["megatron.adaptive", *COMMAND[2:], *paths_in(tmp_path), *options, *more]
        monkeypatch.setattr("sys.argv", command)
        status = program.main()
        output, errors = capsys.readouterr()
        return status, [line for line in output.splitlines() if " loss " in line], errors

    status, losses, _ = run()
    assert status == 0
    assert losses[-2].startswith("step 4 of 4: loss ")
    shutil.rmtree(max(checkpoints.glob("step_*")))
    assert run()[:2] == (0, losses[-2:])
    status, _, errors = run("--seed", "2")
    assert status == 2
    assert errors.endswith(
        "checkpoints was made with seed 1, but this run has 2; use the settings of the "
        "checkpoint, or choose a new folder for checkpoints\n"
    )
    # The pipeline does not destroy its process group after an error.
    dist.destroy_process_group()
    parallel_state.destroy_model_parallel()
    data = tmp_path / "data" / "train.jsonl"
    data.write_text("\n".join(data.read_text().splitlines()[::-1]))
    status, _, errors = run()
    assert status == 2
    assert f"was made with different samples than {data} contains now" in errors
    dist.destroy_process_group()
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--model", "nowhere"),
            "nowhere has no tokenizer or processor that transformers can read (there is no",
        ),
        (("--data", "nowhere.jsonl"), "nowhere.jsonl: No such file or directory"),
        (("--output", "model"), "model exists and is not empty; choose a new folder"),
        (
            ("--save-interval", "2"),
            "--save-interval requires a checkpoint folder; add --checkpoints DIR",
        ),
        (("--lr", "-1"), "argument --lr: '-1' is not a number from 0 to 1"),
        (
            ("--trace-detail", "layers"),
            "--trace-detail layers requires a folder for traces; add --trace-dir DIR",
        ),
        (
            ("--dtype", "float16"),
            "--dtype float16 cannot be used to train the whole model, because an update would",
        ),
        (("--batch-size", "100"), "samples are left to train on, but a step needs 100"),
    ],
)
def test_wrong_options_are_named_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: Sequence[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_text_model(tmp_path / "model")
    (tmp_path / "data").mkdir()
    write_text_data(tmp_path / "data" / "train.jsonl")
    command = ["megatron.adaptive", *COMMAND[2:], *paths_in(tmp_path), *options]
    monkeypatch.setattr("sys.argv", command)
    assert program.main() == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


def run_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: str
) -> tuple[int, str, str]:
    """Runs the command in this process, and returns its status, output and errors."""
    command = ["megatron.adaptive", *COMMAND[2:], *paths_in(folder), *options.split()]
    monkeypatch.setattr("sys.argv", command)
    return program.main(), *capsys.readouterr()


@pytest.mark.parametrize("saved", [torch.float16, torch.bfloat16])
def test_a_whole_model_saved_in_16_bits_is_trained_safely(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    saved: torch.dtype,
) -> None:
    """Checks that float16 is trained in float32, and that bfloat16 causes a warning."""
    write_text_model(tmp_path / "model", saved)
    (tmp_path / "data").mkdir()
    write_text_data(tmp_path / "data" / "train.jsonl")
    status, output, errors = run_here(tmp_path, monkeypatch, capsys, "--lr 5e-3")
    assert status == 0, errors
    losses = losses_of(output)
    assert losses["step 4 of 4"] < losses["step 1 of 4"] - 0.1
    warning = "use --dtype float32 --mixed-precision bf16"
    assert output.count(warning) == (saved == torch.bfloat16)
    kept = json.loads((tmp_path / "tuned" / "config.json").read_text())["dtype"]
    assert kept == ("float32" if saved == torch.float16 else "bfloat16")


def test_a_model_whose_gradients_are_not_finite_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text_model(tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.norm.weight"][1] = torch.nan
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "data").mkdir()
    write_text_data(tmp_path / "data" / "train.jsonl")
    status, _, errors = run_here(tmp_path, monkeypatch, capsys, "")
    assert status == 2
    assert "step 1: a gradient is infinite or NaN (the loss is nan), so training stopped" in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "tuned").exists()
    assert not dist.is_initialized()


def test_a_restart_accepts_only_the_model_that_the_same_job_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks that a restarted job accepts the model that it saved, and rejects other models."""
    write_text_model(tmp_path / "model")
    (tmp_path / "data").mkdir()
    write_text_data(tmp_path / "data" / "train.jsonl")
    options = ["--checkpoints", str(tmp_path / "checkpoints"), "--lora-rank", "4"]
    tuned_folder = tmp_path / "tuned"

    def run(restarts: int, *more: str) -> tuple[int, str, str]:
        command = ["megatron.adaptive", *COMMAND[2:], *paths_in(tmp_path), *options, *more]
        monkeypatch.setattr("sys.argv", command)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        status = program.main()
        return status, *capsys.readouterr()

    def files() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in tuned_folder.iterdir()}

    status, output, errors = run(0)
    assert status == 0, errors
    assert " loss " in output
    saved = files()
    assert {"finetune.json", "adapter_model.safetensors", "tokenizer_config.json"} <= saved.keys()
    status, output, errors = run(1)
    assert status == 0, errors
    assert " loss " not in output
    assert files() == saved
    refused = f"{tuned_folder} exists and is not empty; choose a new folder\n"
    status, _, errors = run(0)
    assert (status, errors.endswith(refused)) == (2, True)
    status, _, errors = run(1, "--seed", "2")
    assert (status, errors.endswith(refused)) == (2, True)
    data = tmp_path / "data" / "train.jsonl"
    data.write_text("\n".join(data.read_text().splitlines()[::-1]))
    status, _, errors = run(1)
    assert (status, errors.endswith(refused)) == (2, True)
    (tuned_folder / "finetune.json").unlink()
    status, _, errors = run(1)
    assert (status, errors.endswith(refused)) == (2, True)


def test_a_process_reports_an_error_that_the_first_one_of_its_node_may_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks that a process reports an error even if the first process of its node has no error."""
    (tmp_path / "tuned").write_text("")
    monkeypatch.setattr("megatron.adaptive.cli.finetune._REPORT_S", 0.01)
    for name, value in (("RANK", 1), ("LOCAL_RANK", 1), ("WORLD_SIZE", 2), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("sys.argv", ["megatron.adaptive", *COMMAND[2:], *paths_in(tmp_path)])
    assert program.main() == 2
    assert "tuned exists and is not empty; choose a new folder" in capsys.readouterr().err


def losses_of(output: str) -> dict[str, float]:
    """Returns the losses of all steps and evaluations, keyed by the text before the loss."""
    return {
        name: float(loss)
        for name, loss in re.findall(r"^(.*): (?:evaluation )?loss ([\d.]+)", output, re.M)
    }


@pytest.mark.long
@pytest.mark.multiprocess
def test_an_elastic_job_continues_with_another_number_of_replicas(tmp_path: Path) -> None:
    """Checks that a job with a changing number of replicas has the losses of a single process."""
    write_text_model(tmp_path / "model")
    (tmp_path / "data").mkdir()
    write_text_data(tmp_path / "data" / "train.jsonl")
    options = "--epochs 30 --lr 1e-4 --lora-rank 4 --length-multiple 8 --pipeline-size 1".split()
    job = ElasticJob(
        tmp_path,
        "ab",
        [],
        script=Path("finetune"),
        flags=[*paths_in(tmp_path), *options, "--save-interval", "10"],
    )
    try:
        job.trained(2, 8)  # The first incarnation only measures the model.
        job.change("a")
        job.until(lambda: job.state()["epochs"][-1]["processes"] == 1, "one process")
        assert job.end(LIMIT_S) == 0, job.said()
    finally:
        job.close()
    shapes = [epoch["shape"].partition(",")[0] for epoch in job.state()["epochs"]]
    assert shapes == ["2 processes that measure the model", "PP 1 x DP 2", "PP 1 x DP 1"]
    shutil.rmtree(tmp_path / "tuned")
    expected = losses_of(tuned(tmp_path, " ".join(options)))
    assert len(expected) == 120 + 30
    losses = losses_of(job.log.read_text())
    assert losses == pytest.approx(expected, rel=1e-4)


def test_an_elastic_job_with_images_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_image_model(tmp_path / "model")
    write_image_data(tmp_path / "data")
    order = JobOrder(checkpoints="checkpoints", progress="progress", model="model.json", epoch=0)
    monkeypatch.setenv(JOB_VARIABLE, order.to_text())
    monkeypatch.setattr("sys.argv", ["megatron.adaptive", *COMMAND[2:], *paths_in(tmp_path)])
    assert program.main() == 2
    errors = capsys.readouterr().err
    assert "train finetune in an elastic job does not support samples with images" in errors
    assert errors.count("\n") == 1
