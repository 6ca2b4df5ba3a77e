"""Tests that a single command trains a model from scratch, and writes traces and a chart."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.adaptive.cli import run_single
from megatron.adaptive.cli.common import run_cli
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.trace.read import read_run

from ..multiprocess.launch import environment, forking_every, kill_tree, wait_until

ROOT = Path(__file__).resolve().parents[2]
WATCHDOG_S = 150.0

# This script replaces the example script, and records its options and environment variables.
SCRIPT = """
{ for name in PIPELINE_PARALLEL MODEL_CHUNKS TENSOR_PARALLEL DATA_PARALLEL SCHEDULE DATA_DIR RUN_DIR
  do printf '%s=%s\\n' "$name" "${!name}"; done
  for word in "$@"; do printf 'option %s\\n' "$word"; done; } > "$RUN_DIR/started"
[ -n "${UNSAVED:-}" ] || {
  mkdir -p "$RUN_DIR/checkpoints/iter_0000005"; touch "$_/manifest.json"; }
exit "${STATUS:-0}"
"""


SHAPE = ("PIPELINE_PARALLEL", "MODEL_CHUNKS", "TENSOR_PARALLEL", "DATA_PARALLEL", "SCHEDULE")
MOVES_LAYERS = ["--repartition", "auto", "--repartition-interval", "20"]


class Started:
    """Options and environment variables with which the example script was started."""

    def __init__(self, path: Path) -> None:
        lines = path.read_text().splitlines()
        self.options = [line.removeprefix("option ") for line in lines if "option " in line]
        self.variables = dict(line.split("=", 1) for line in lines if "option " not in line)


Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Returns a function that runs ``run_single`` with ``SCRIPT``, but creates no corpus."""
    script = tmp_path / "script.sh"
    script.write_text(SCRIPT)
    monkeypatch.setattr(run_single, "_SCRIPT", script)
    monkeypatch.setattr(run_single, "make_corpus", lambda flags: 0)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def call(*argv: str) -> int:
        folders = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(tmp_path / "data")]
        try:
            return run_cli(run_single.main, [*folders, *argv])
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    return call


def runs_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "runs").glob("[!.]*") if not path.is_symlink())


def test_defaults(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    (name,) = runs_in(tmp_path)
    assert name.endswith("-adaptive-p2-c1-t1-d1")
    started = Started(tmp_path / "runs" / name / "started")
    assert started.options == MOVES_LAYERS
    folders = {"DATA_DIR": str(tmp_path / "data"), "RUN_DIR": str(tmp_path / "runs" / name)}
    shape = zip(SHAPE, ("2", "1", "1", "1", "adaptive"), strict=True)
    assert started.variables == {**dict(shape), **folders}
    assert (tmp_path / "runs" / "latest").resolve().name == name
    stdout = capsys.readouterr().out
    assert str(tmp_path / "runs" / name) in stdout
    assert "--pipeline_parallel 2 --model_chunks 1 --runs-dir" in stdout


@pytest.mark.parametrize("dash", ["_", "-"])
def test_options_reach_the_script_and_what_follows_two_dashes_the_trainer(
    dash: str, run: Run, tmp_path: Path
) -> None:
    shape = f"--pipeline{dash}parallel 4 --model{dash}chunks=2 --tensor{dash}parallel 3"
    argv = f"{shape} --data{dash}parallel 5 --pipeline-schedule interleaved"
    argv += " -- --train-iters 7 -- --resume"
    assert run(*argv.split()) == 0
    (name,) = runs_in(tmp_path)
    assert name.endswith("-interleaved-p4-c2-t3-d5")
    started = Started(tmp_path / "runs" / "latest" / "started")
    assert [started.variables[key] for key in SHAPE] == ["4", "2", "3", "5", "interleaved"]
    assert started.options == [*MOVES_LAYERS, "--train-iters", "7", "--", "--resume"]


@pytest.mark.parametrize("flag", ["--pipeline-schedule ", "--pipeline-schedule="])
@pytest.mark.parametrize(
    ("schedule", "named"), [("zb-v", "zb-v"), ("own.orders:Mine", "own.orders-Mine")]
)
def test_the_folder_is_named_after_the_schedule_of_the_trainers_options(
    flag: str, schedule: str, named: str, run: Run, tmp_path: Path
) -> None:
    assert run(*f"--model_chunks 2 -- {flag}{schedule}".split()) == 0
    (name,) = runs_in(tmp_path)
    assert name.endswith(f"-{named}-p2-c2-t1-d1")


def test_another_number_of_layers_is_cut_by_the_trainer(run: Run, tmp_path: Path) -> None:
    assert run(*"--pipeline_parallel 3 -- --num-layers 9".split()) == 0
    options = Started(tmp_path / "runs" / "latest" / "started").options
    assert options == [*MOVES_LAYERS, "--num-layers", "9"]


@pytest.mark.parametrize(
    "argv",
    [
        "--pipeline_parallel 1",
        "--pipeline-schedule megatron",
        "-- --partition 3-5",
        "-- --plan=plan.json",
        "--pipeline-schedule auto -- --slice-tokens 64 --variable-seq-lengths",
    ],
)
def test_layers_stay_where_nothing_or_the_user_says_where(
    argv: str, run: Run, tmp_path: Path
) -> None:
    assert run(*argv.split()) == 0
    options = Started(tmp_path / "runs" / "latest" / "started").options
    assert not set(options) & set(MOVES_LAYERS)


@pytest.mark.parametrize(
    ("ranks", "chunks", "partition"), [(3, 1, "2-3-3"), (5, 1, None), (3, 2, None), (4, 2, "")]
)
def test_layers_that_do_not_divide_get_a_partition(
    ranks: int, chunks: int, partition: str | None, run: Run, tmp_path: Path
) -> None:
    argv = f"--pipeline_parallel {ranks} --model_chunks {chunks} -- --train-iters 7"
    assert run(*argv.split()) == 0
    options = Started(tmp_path / "runs" / "latest" / "started").options
    added = options[: -len(MOVES_LAYERS) - 2]
    if partition == "":
        assert added == []
        return
    flag, value = added
    assert flag == "--partition"
    layers = [int(word) for word in value.split("-")]
    assert len(layers) == ranks * chunks
    assert sum(layers) == 8
    assert max(layers) - min(layers) <= 1
    assert partition in (None, value)
    # Check that the trainer accepts this partition.
    config = parse(
        f"--num-layers 8 --hidden-size 8 --num-attention-heads 2 --seq-length 8 "
        f"--max-position-embeddings 8 --micro-batch-size 1 --global-batch-size {ranks} "
        f"--train-iters 1 --lr 1 --mock-data --vocab-size 100 --partition {value} "
        f"--pipeline-model-parallel-size {ranks} "
        f"--num-virtual-stages-per-pipeline-rank {chunks}".split(),
        world_size=ranks,
    )
    assert list(config.layers_per_stage) == layers


def test_resume_goes_on_in_the_latest_run(run: Run, tmp_path: Path) -> None:
    assert run() == 0
    assert run() == 0
    before = runs_in(tmp_path)
    assert len(before) == 2
    latest = (tmp_path / "runs" / "latest").resolve()
    assert latest.name == before[-1]
    (latest / "started").unlink()
    assert run("--resume", "--", "--train-iters", "9") == 0
    assert runs_in(tmp_path) == before
    load = ["--load", str(latest / "checkpoints")]
    assert Started(latest / "started").options == [*MOVES_LAYERS, *load, "--train-iters", "9"]


@pytest.mark.parametrize("status", [1, 2, 137])
def test_status_is_that_of_the_training(
    status: int, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STATUS", str(status))
    assert run() == status
    # A stopped run can be resumed, but a failed run cannot.
    assert ("--resume" in capsys.readouterr().out) == (status > 128)


def resume_commands(stdout: str) -> list[list[str]]:
    lines = [line for line in stdout.splitlines() if "--resume" in line]
    return [shlex.split(line)[2:] for line in lines]


def test_the_resume_command_repeats_all_options(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks that the printed command continues this run, and not another run."""
    monkeypatch.setenv("STATUS", "130")
    argv = "--tensor_parallel 2 --pipeline-schedule interleaved --model_chunks 2".split()
    assert run(*argv, "--", "--num-layers", "4", "--sample-prompt", "two words") == 130
    (command,) = resume_commands(capsys.readouterr().out)
    capsys.readouterr()
    first = Started(tmp_path / "runs" / "latest" / "started")
    (tmp_path / "runs" / "latest" / "started").unlink()
    assert run_single.main(command) == 130
    resumed = Started(tmp_path / "runs" / "latest" / "started")
    assert resumed.variables == first.variables
    load = ["--load", str((tmp_path / "runs" / "latest").resolve() / "checkpoints")]
    added = len(first.options) - 4
    assert resumed.options == [*first.options[:added], *load, *first.options[added:]]
    monkeypatch.setenv("STATUS", "0")
    assert run("--", "--train-iters", "7") == 0
    (command,) = resume_commands(capsys.readouterr().out)[-1:]
    longer = "--train-iters 7 --train-iters N --override-opt-param-scheduler".split()
    assert command[command.index("--") + 1 :] == longer


def test_a_run_resumes_from_the_folder_of_the_users_flags(run: Run, tmp_path: Path) -> None:
    save = ["--", "--save", str(tmp_path / "own")]
    assert run(*save) == 0
    assert run("--resume", *save) == 0
    options = Started(tmp_path / "runs" / "latest" / "started").options
    assert options[options.index("--load") + 1] == str(tmp_path / "own")


@pytest.mark.parametrize("status", ["0", "130"])
def test_without_a_checkpoint_no_resume_command_is_printed(
    status: str, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STATUS", status)
    monkeypatch.setenv("UNSAVED", "1")
    assert run() == int(status)
    stdout = capsys.readouterr().out
    assert "next commands" in stdout
    assert "--resume" not in stdout


# This script replaces the example script, and runs until it receives SIGTERM.
WAITING_SCRIPT = """
trap 'touch "$RUN_DIR/asked_to_end"; exit 0' TERM
touch "$RUN_DIR/started"
while true; do sleep 0.1; done
"""


def test_a_job_whose_command_was_killed_is_asked_to_end(tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text(WAITING_SCRIPT)
    program = f"""
import sys
from pathlib import Path
from megatron.adaptive.cli import run_single
run_single._SCRIPT = Path({str(script)!r})
run_single.make_corpus = lambda flags: 0
run_single.main(sys.argv[1:])
"""
    folders = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(tmp_path / "data")]
    command = subprocess.Popen([sys.executable, "-c", program, *folders], env=environment())
    latest = tmp_path / "runs" / "latest"
    try:
        wait_until((latest / "started").exists, lambda: command.poll(), WATCHDOG_S)
        command.kill()
        command.wait()
        wait_until((latest / "asked_to_end").exists, lambda: sorted(latest.iterdir()), WATCHDOG_S)
    finally:
        kill_tree(command)


@pytest.mark.parametrize(
    ("schedule", "chunks", "needed"),
    [("interleaved", 1, "2 or more"), ("zb-v", 1, "2"), ("zb-v", 3, "2"), ("zb-h1", 2, "1")],
)
def test_chunks_are_named_as_this_command_names_them(
    schedule: str, chunks: int, needed: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--pipeline-schedule", schedule, "--model_chunks", str(chunks)]
    assert run(*options) == 2
    said = f"--pipeline-schedule {schedule} requires --model_chunks {needed}, got {chunks};"
    assert said in capsys.readouterr().err
    assert run(*options, "--", "--model-chunks", "2") == 0


def test_a_folder_that_cannot_be_made(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").write_text("a file")
    assert run() == 2
    stderr = capsys.readouterr().err
    assert len(stderr.splitlines()) == 1
    assert "--runs-dir" in stderr


# This program runs ``train single`` with only a third of the corpus, to save time.
START = """
import sys
from megatron.adaptive.cli import common, run_single
whole = run_single.make_corpus
run_single.make_corpus = lambda flags: whole([*flags, "--max-bytes", "9000000"])
sys.exit(common.run_cli(run_single.main, sys.argv[1:]))
"""
TINY = (
    "--num-layers 4 --hidden-size 32 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr-warmup-iters 1 "
    "--save-interval 4 --log-interval 2 --eval-interval 4 --eval-iters 1"
)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_from_nothing_to_a_chart(tmp_path: Path) -> None:
    log = tmp_path / "output.txt"
    with log.open("w") as output:
        job = subprocess.Popen(
            [
                *(sys.executable, "-c", START),
                *("--pipeline_parallel", "2", "--model_chunks", "2"),
                *("--runs-dir", str(tmp_path / "runs"), "--data-dir", str(tmp_path / "data")),
                *("--", *TINY.split()),
            ],
            env=forking_every(),
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = job.wait(WATCHDOG_S)
        finally:
            kill_tree(job)
    text = log.read_text()
    assert status == 0, text
    assert "Traceback" not in text
    assert "--load" not in text
    run = tmp_path / "runs" / "latest"
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints",
        "tensorboard",
        "trace_pipeline_2_model_chunks_2.png",
        "trace_pipeline_2_model_chunks_2.txt",
        "traces",
    ]
    for name in ("checkpoints", "tensorboard"):
        assert any(path.is_file() for path in (run / name).rglob("*")), name
    trace = read_run(run / "traces")
    assert trace.iterations == (1, 2, 3, 4)
    assert trace.complete_iterations() == (1, 2, 3, 4)
    assert "using world size: 2, data-parallel-size: 1" in text
    assert "lm loss" in text
    # The output must mention all folders and the commands for the next steps.
    for mentioned in (*run.resolve().iterdir(), *("process_trace.py", "visualize_trace.py")):
        assert str(mentioned) in text
    (command,) = resume_commands(text)
    assert command[:4] == ["--pipeline_parallel", "2", "--model_chunks", "2"]
    assert "--resume" in command
    assert json.loads((tmp_path / "data" / "corpus.json").read_text())["documents"] > 100
