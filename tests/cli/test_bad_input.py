"""Tests that invalid input causes one helpful error line and status 2, and leaves no files.

Tests that need no separate process call the program's parser. The other tests start real jobs.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.adaptive.cli import pretrain_gpt, run_single
from megatron.adaptive.cli.common import EXIT_EXPECTED_ERROR
from megatron.adaptive.config.flags import fields_of
from megatron.adaptive.config.trainer import groups
from megatron.adaptive.data.indexed import check_indexed, check_vocabulary_fits
from megatron.adaptive.errors import AdaptiveError, DataError, TransportError

from ..multiprocess.launch import Ranks, forking, has_ended, run_forked, run_ranks, tail, wait_until
from ..support.recorded_sleeps import record_sleeps

ROOT = Path(__file__).resolve().parents[2]
TRAINER = str(ROOT / "pretrain_gpt.py")
SMALL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 2 "
    "--lr 1e-3 --eval-iters 0 --mock-data --vocab-size 100"
)


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program of the project with a timeout, and returns the finished process."""
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """Checks that ``done`` rejected its input, and returns the single line that it printed."""
    lines = done.stderr.splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: "), done.stderr
    return lines[0]


@pytest.fixture
def runs_with_one(tmp_path: Path) -> Path:
    (tmp_path / "first").mkdir()
    (tmp_path / "latest").symlink_to("first")
    return tmp_path


def test_a_run_that_wrote_nothing_is_taken_back(runs_with_one: Path) -> None:
    run_dir = runs_with_one / "second"
    (run_dir / "checkpoints").mkdir(parents=True)
    run_single._point(runs_with_one / "latest", "second")
    run_single._forget_if_empty(run_dir, "first")
    assert not run_dir.exists()
    assert (runs_with_one / "latest").resolve().name == "first"


def test_two_runs_started_in_one_second_have_a_folder_each(tmp_path: Path) -> None:
    folders = {run_single._new_folder(tmp_path, "same-second") for _ in range(3)}
    assert len(folders) == 3
    assert all(folder.is_dir() for folder in folders)


@pytest.mark.parametrize(
    ("variables", "waits"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, []),
        ({"RANK": "abc", "WORLD_SIZE": "2"}, []),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, [6.0]),
        # The first rank of a node must print its error before the other ranks of the node.
        ({"RANK": "4", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}, [3.0]),
    ],
)
def test_ranks_wait_for_rank_0_before_they_print_an_error(
    variables: dict[str, str], waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    waited = record_sleeps(monkeypatch)
    pretrain_gpt._wait_for_rank_0(AdaptiveError("bad"))
    assert waited == waits
    pretrain_gpt._wait_for_rank_0(TransportError("cut off"))
    assert waited == waits


def test_an_error_of_one_rank_alone_is_printed(tmp_path: Path) -> None:
    # The file is missing only on the node of this rank, so this rank must report the error.
    flags = ["--load-hf", str(tmp_path / "no-model")]
    done = run(TRAINER, *SMALL.split(), *flags, RANK="1", WORLD_SIZE="2", LOCAL_RANK="0")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "no-model" in done.stderr


def test_signals_are_given_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert pretrain_gpt.run(["--no-such-flag"]) == 2
    assert signal.getsignal(signal.SIGINT) is before
    assert "the nearest is" in capsys.readouterr().err


def test_a_folder_as_data_names_the_corpus_in_it(tmp_path: Path) -> None:
    (tmp_path / "corpus.idx").touch()
    with pytest.raises(DataError, match=f"did you mean {tmp_path}/corpus"):
        check_indexed(tmp_path)


def test_a_missing_bin_is_not_answered_with_itself(tmp_path: Path) -> None:
    (tmp_path / "corpus.idx").touch()
    with pytest.raises(DataError, match="corpus.idx requires it"):
        check_indexed(tmp_path / "corpus")


def test_unreadable_tokens_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from megatron.adaptive.data import indexed

    # The tests may run as root, which can read every file. So simulate a missing permission.
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    info = indexed.IndexedInfo(prefix="p", dtype=np.dtype("<u2"), num_sequences=1, num_tokens=1)
    monkeypatch.setattr(np, "memmap", refuse)
    with pytest.raises(DataError, match=r"cannot read .*p\.bin \(Permission denied\)"):
        check_vocabulary_fits(info, 10)


def test_unknown_subcommand_names_the_nearest() -> None:
    said = complaint(run("-m", "megatron.adaptive", "lunch"))
    assert "did you mean job launch" in said


@pytest.mark.long
@pytest.mark.multiprocess
def test_missing_vocabulary_is_said_once_by_two_ranks(tmp_path: Path) -> None:
    flags = SMALL.replace("--mock-data --vocab-size 100", f"--data-path {tmp_path}/corpus")
    done = run(
        *"-m megatron.adaptive job launch --standalone --nproc-per-node 2".split(),
        TRAINER,
        *flags.split(),
        *f"--vocab-file {tmp_path}/vocab.json --merge-file {tmp_path}/merges.txt".split(),
        **forking(),
    )
    assert "No such file or directory; check --vocab-file" in complaint(done)
    assert not any(tmp_path.iterdir())


SLOW_RANK = """
import os, sys, time
from megatron.adaptive import accelerator
accelerator.install()
with accelerator.quiet_imports():
    from megatron.adaptive.cli import pretrain_gpt
    from megatron.adaptive.gpt import initialize
    from megatron.adaptive.transport.liveness import here

gather_places = initialize.gather_places

def slow():
    time.sleep(3)
    return gather_places()

def quick():
    return [here(0), here(0)]

initialize.gather_places = slow if os.environ["RANK"] == "1" else quick
sys.exit(pretrain_gpt.run())
"""


@pytest.mark.multiprocess
def test_a_rank_that_connects_slowly_does_not_report_a_lost_peer(tmp_path: Path) -> None:
    """Checks that a rank prints nothing if another rank has already reported an error."""
    (tmp_path / "slow.py").write_text(SLOW_RANK)
    flags = SMALL.replace("--mock-data --vocab-size 100", f"--data-path {tmp_path}/corpus")
    vocabulary = f"--vocab-file {tmp_path}/vocab.json --merge-file {tmp_path}/merges.txt"
    command = [str(tmp_path / "slow.py"), *flags.split(), *vocabulary.split()]
    log = tmp_path / "output.txt"
    ranks = Ranks(command, world_size=2, log=log, limit_s=60.0)
    try:
        wait_until(lambda: all(map(has_ended, ranks.processes())), log.read_text, 60.0)
    finally:
        ranks.kill()
    errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, tail(log)
    assert errors[0].endswith("vocab.json: No such file or directory; check --vocab-file")


UNEQUAL_RANKS = """
import os, sys
from megatron.adaptive import accelerator
accelerator.install()
with accelerator.quiet_imports():
    from megatron.adaptive.cli import pretrain_gpt

of_rank_1 = sys.argv.pop().split()
if os.environ["RANK"] == "1":
    sys.argv += of_rank_1
sys.exit(pretrain_gpt.run())
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("of_rank_1", "error"),
    [
        ("--seed 7", "--seed 7 on rank 1, but --seed 1234 on rank 0; start all ranks of a job"),
        ("--save saved --save-interval 2", "--save on rank 1, but no such setting on rank 0"),
    ],
)
def test_flags_that_differ_between_ranks_are_named(
    of_rank_1: str, error: str, tmp_path: Path
) -> None:
    (tmp_path / "unequal.py").write_text(UNEQUAL_RANKS)
    log = tmp_path / "output.txt"
    command = [str(tmp_path / "unequal.py"), *SMALL.split(), of_rank_1]
    assert run_ranks(command, world_size=2, log=log, limit_s=60.0) == EXIT_EXPECTED_ERROR, tail(log)
    errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, tail(log)
    assert error in errors[0]


def test_settings_that_may_differ_between_ranks_exist() -> None:
    from megatron.adaptive.gpt import initialize

    names = {spec.dest for kind in groups().values() for spec in fields_of(kind)}
    assert names >= initialize._MAY_DIFFER | initialize._PATHS
    assert not initialize._MAY_DIFFER & initialize._PATHS


@pytest.mark.multiprocess
def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables = {"RANK": "0", "WORLD_SIZE": "1", **master}
        command = [TRAINER, *SMALL.split()]
        alone = run_forked(command, folder=tmp_path, limit_s=60, variables=variables)
        launched = run(
            *"-m megatron.adaptive job launch --nproc-per-node 2 --master-addr 127.0.0.1".split(),
            *f"--master-port {port} {TRAINER} {SMALL}".split(),
            **forking(),
        )
    for done in (alone, launched):
        assert f"127.0.0.1:{port}" in complaint(done)


def test_a_reader_that_has_gone_is_no_error() -> None:
    """Checks that no error is printed if the reader of the output closes the pipe early."""
    command = [sys.executable, "-m", "megatron.adaptive", "train", "flags"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdout.close()
        assert program.stderr.read() == ""
    assert program.returncode == 128 + signal.SIGPIPE


def test_a_closed_standard_error_is_no_traceback(tmp_path: Path) -> None:
    """Checks that no traceback is printed if standard error is closed with ``2>&-``."""
    script = tmp_path / "closed.sh"
    program = f"{sys.executable} -m megatron.adaptive simulate --stages 2 --microbatches"
    script.write_text(f"{program} x 2>&-; echo $?; {program} 4 2>&- >/dev/null; echo $?\n")
    done = subprocess.run(
        ["bash", str(script)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout, done.stderr) == ("2\n0\n", "")


@pytest.mark.parametrize("limit", [48, pytest.param(128, marks=pytest.mark.long)])
def test_too_few_files_are_said_before_ranks_start(limit: int, tmp_path: Path) -> None:
    arguments = f"-m megatron.adaptive job launch --standalone --nproc-per-node 2 {TRAINER} {SMALL}"
    command = f"ulimit -n {limit}; exec {sys.executable} {arguments}"
    done = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert f"may open only {limit} (ulimit -n)" in complaint(done)


def test_a_limit_that_may_be_raised_is_raised() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (60, 4000))\n"
        "from megatron.adaptive.config.environment import require_files\n"
        "require_files(4); print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert run("-c", code).stdout == "(4000, 4000)\n"


def test_a_model_beyond_any_memory_is_refused_before_it_is_built(tmp_path: Path) -> None:
    flags = SMALL.replace("--hidden-size 32", "--hidden-size 1000000")
    done = run_forked([TRAINER, *flags.split()], folder=tmp_path, limit_s=60)
    assert done.returncode == 2
    assert "GiB of weights on each of 1 ranks" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("flag", ["--hidden-size", "--train-iters", "--vocab-size"])
def test_numbers_beyond_any_use_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_gpt.run([*SMALL.split(), flag, str(10**18)]) == 2
    assert f"{flag}: {10**18} is too large; give at most" in capsys.readouterr().err
