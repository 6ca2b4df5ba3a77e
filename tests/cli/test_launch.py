"""Tests that the launcher checks options before it starts ranks, and reports which rank failed."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.adaptive.cli import launch
from megatron.adaptive.errors import AdaptiveError

from ..multiprocess.launch import forkserver, kill_tree

ROOT = Path(__file__).resolve().parents[2]
WATCHDOG_S = 90.0
TRAINER = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data "
    "--vocab-size 100"
)

Launch = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def signals_end_programs() -> Iterator[None]:
    """Restores the default signal handlers, because nohup makes programs ignore SIGHUP."""
    actions = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    former = {number: signal.signal(number, action) for number, action in actions.items()}
    yield
    for number, action in former.items():
        signal.signal(number, action)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Launch]:
    """Yields a function that starts a launcher. Kills all launchers after the test.

    The function takes the text of a script and the number of ranks. ``is_standalone`` says whether
    to pass ``--standalone``. With ``is_forked=True``, the launcher is forked from a process that
    has imported torch. Tests that inspect the launcher's process or send signals to it cannot use
    this option.
    """
    processes: list[subprocess.Popen[str]] = []

    def run(
        text: str, ranks: int, *, is_standalone: bool = True, is_forked: bool = False
    ) -> object:
        script = tmp_path / "script.py"
        script.write_text(text)
        variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        forked = forkserver().nodes()[1] if is_forked else {}
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "megatron.adaptive", "job", "launch"),
                *(["--standalone"] if is_standalone else []),
                *("--nproc-per-node", str(ranks), str(script)),
            ],
            env={**variables, "PYTHONPATH": str(ROOT), **forked},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        kill_tree(process)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Waits until ``process`` exits, and returns its status, stdout and stderr."""
    stdout, stderr = process.communicate(timeout=WATCHDOG_S)
    return process.returncode, stdout, stderr


TOUCH = "import pathlib, os; pathlib.Path('started.' + os.environ['RANK']).touch()\n"


@pytest.mark.parametrize(
    ("launcher", "trainer", "phrases"),
    [
        ("--nproc-per-node 2", "--pipeline-model-parallel-size 4", ["world size 2"]),
        ("--nproc-per-node 2", "--num-layer 4", ["--num-layer", "--num-layers"]),
        ("--nproc-per-node 1", "--global-batch-size 3 --micro-batch-size 2", ["--global-batch-"]),
        # Two nodes have 4 ranks in total, but the pipeline needs a multiple of 3.
        ("--nproc-per-node 2 --nnodes 2", "--pipeline-model-parallel-size 3", ["world size 4"]),
    ],
)
def test_options_are_checked_for_the_world_size(
    launcher: str, trainer: str, phrases: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(TOUCH)
    argv = [*launcher.split(), str(script), *TRAINER.split(), *trainer.split()]
    with pytest.raises(AdaptiveError) as info:
        launch.main(argv)
    text = str(info.value)
    assert len(text.splitlines()) == 1
    for word in phrases:
        assert word in text
    assert not list(tmp_path.glob("started.*"))


@pytest.mark.long
def test_a_silent_program_at_the_address_of_node_0_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.adaptive.engine import rendezvous

    monkeypatch.setattr(rendezvous, "_ANSWER_S", 1.0)
    script = tmp_path / "script.py"
    script.write_text(TOUCH)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"--master-addr 127.0.0.1 --master-port {server.getsockname()[1]}"
        with pytest.raises(AdaptiveError, match="did not reply like a torch store"):
            launch.main([*f"--nnodes 2 --node-rank 1 {address}".split(), str(script)])
    # The launcher must not retry, because another attempt would fail in the same way.
    assert "waiting for node 0" not in capsys.readouterr().err


@pytest.mark.multiprocess
@pytest.mark.parametrize("is_standalone", [True, False])
def test_ranks_run_with_one_thread_each(start: Launch, is_standalone: bool) -> None:
    # Each line must be written with a single call, because the ranks share the pipe.
    text = (
        "import os\n"
        "line = f\"rank {os.environ['RANK']} {os.environ['OMP_NUM_THREADS']}\\n\"\n"
        "os.write(1, line.encode())\n"
    )
    status, stdout, stderr = finish(start(text, 2, is_standalone=is_standalone, is_forked=True))
    assert (status, stderr) == (0, "")
    assert sorted(stdout.splitlines()) == ["rank 0 1", "rank 1 1"]


@pytest.mark.multiprocess
def test_a_killed_rank_is_named(start: Launch) -> None:
    text = (
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    print(os.getpid(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(60)\n"
    )
    status, stdout, stderr = finish(start(text, 2, is_forked=True))
    assert status == 1
    assert len(stderr.splitlines()) == 1
    assert stderr.startswith(f"error: rank 1 (pid {stdout.strip()}) was killed by signal 9")
    assert "SIGKILL" in stderr


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("collective", ["broadcast_object_list", "all_gather_object"])
def test_a_rank_that_is_killed_during_the_start_causes_no_traceback(
    collective: str, start: Launch
) -> None:
    # Rank 0 kills itself before the ranks exchange settings, or before they exchange host names and
    # PIDs.
    text = (
        "import os, signal, sys\n"
        "import torch.distributed as dist\n"
        "from megatron.adaptive.cli.pretrain_gpt import run\n"
        f"original = dist.{collective}\n"
        "def die(*args, **options):\n"
        "    if os.environ['RANK'] == '0':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return original(*args, **options)\n"
        f"dist.{collective} = die\n"
        f"sys.exit(run({TRAINER.split()!r} + ['--pipeline-model-parallel-size', '2']))\n"
    )
    status, _, stderr = finish(start(text, 2))
    assert status != 0
    assert "Traceback" not in stderr
    lines = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert any(
        re.match(r"error: rank 0 \(pid \d+\) was killed by signal 9", line) for line in lines
    )
    # The launcher prints one line. Rank 1 also prints a line if it detects the lost connection
    # before it is stopped.
    assert len(lines) <= 2


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("code", [2, 3])
def test_status_of_the_first_failure_is_passed_on(code: int, start: Launch) -> None:
    text = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        f"    print('error: said by the rank', file=sys.stderr, flush=True); sys.exit({code})\n"
        "time.sleep(60)\n"
    )
    status, _, stderr = finish(start(text, 2, is_forked=True))
    assert status == code
    said, *rest = stderr.splitlines()
    assert said == "error: said by the rank"
    if code == 2:  # An expected error causes no further message.
        assert rest == []
    else:
        assert len(rest) == 1
        assert re.fullmatch(r"error: rank 0 \(pid \d+\) exited with status 3; .*", rest[0])


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_ranks(number: signal.Signals, start: Launch, tmp_path: Path) -> None:
    text = (
        "import os, pathlib, signal, sys, time\n"
        "def leave(number, frame):\n"
        "    pathlib.Path('told.' + os.environ['RANK']).write_text(str(number))\n"
        "    sys.exit(0)\n"
        f"signal.signal({int(number)}, leave)\n"
        f"{TOUCH}"
        "time.sleep(60)\n"
    )
    process = start(text, 2)
    wait_for_ranks(process, tmp_path, 2)
    process.send_signal(number)
    status, _, stderr = finish(process)
    assert status == 128 + number
    assert stderr.splitlines() == [f"stopped by signal {number.name}"]
    assert [path.read_text() for path in tmp_path.glob("told.*")] == [str(int(number))] * 2


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("number", "again"),
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGHUP),
        # These are the signals if the user presses Ctrl-C and then closes the terminal.
        (signal.SIGINT, signal.SIGHUP),
    ],
)
def test_a_signal_that_comes_again_lets_ranks_save(
    number: signal.Signals, again: signal.Signals, start: Launch, tmp_path: Path
) -> None:
    # The launcher must keep running after the second signal, because it serves the ranks' store.
    text = (
        "import os, pathlib, signal, sys, time\n"
        "def leave(number, frame):\n"
        "    pathlib.Path('told').touch()\n"
        "    while not pathlib.Path('again').exists():\n"
        "        time.sleep(0.01)\n"
        "    time.sleep(1)\n"
        "    pathlib.Path('launcher').write_text(str(os.getppid()))\n"
        "    sys.exit(0)\n"
        f"signal.signal({int(number)}, leave)\n"
        f"{TOUCH}"
        "time.sleep(60)\n"
    )
    process = start(text, 1)
    wait_for_ranks(process, tmp_path, 1)
    process.send_signal(number)
    end = time.monotonic() + WATCHDOG_S
    while not (tmp_path / "told").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    for _ in range(5):
        process.send_signal(again)
        time.sleep(0.02)
    (tmp_path / "again").touch()
    status, _, stderr = finish(process)
    assert status == 128 + number
    assert stderr.splitlines() == [f"stopped by signal {number.name}"]
    assert (tmp_path / "launcher").read_text() == str(process.pid)


def wait_for_ranks(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    """Waits until ``count`` ranks of ``process`` have created their files in ``folder``."""
    end = time.monotonic() + WATCHDOG_S
    while len(list(folder.glob("started.*"))) < count:
        assert time.monotonic() < end
        assert process.poll() is None, finish(process)
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.multiprocess
def test_hangups_stay_ignored_under_nohup(start: Launch, tmp_path: Path) -> None:
    text = f"{TOUCH}while not pathlib.Path('go').exists():\n    pass\n"
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start(text, 1)
    finally:
        signal.signal(signal.SIGHUP, former)
    wait_for_ranks(process, tmp_path, 1)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    (tmp_path / "go").touch()
    assert finish(process)[::2] == (0, "")


SAVING_SCRIPT = f"""
from megatron.adaptive.engine.stop import StopRequest

with StopRequest() as stop:
    {TOUCH.strip()}
    while not stop.agreed(None):
        print("working", flush=True)
    print("saving", flush=True)
    pathlib.Path("saved").write_text(stop.reason)
"""


@pytest.mark.multiprocess
def test_ranks_save_when_the_terminal_is_closed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SAVING_SCRIPT)
    command = [sys.executable, "-m", "megatron.adaptive", "job", "launch", "--standalone"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(command[0], [*command, "script.py"], {**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        end = time.monotonic() + WATCHDOG_S
        while not list(tmp_path.glob("started.*")):
            assert time.monotonic() < end
            os.read(terminal, 1 << 16)
    finally:
        os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    assert (tmp_path / "saved").read_text() == "signal SIGHUP"


@pytest.mark.long
@pytest.mark.multiprocess
def test_ranks_whose_launcher_is_killed_name_it(start: Launch, tmp_path: Path) -> None:
    text = f"""
import os, sys, time
import torch.distributed as dist
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.transport.liveness import Watcher, here

dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
is_launchers = Environment.read().has_agent_store
Watcher([here(0)] * 2, dist.get_rank(), store, print, 0.2, is_launchers_store=is_launchers)
{TOUCH}
time.sleep(60)
"""
    process = start(text, 2)
    wait_for_ranks(process, tmp_path, 2)
    process.kill()
    _, _, stderr = finish(process)
    lines = [line for line in stderr.splitlines() if line]
    assert len(lines) == 2, stderr
    assert all("the launcher that serves the job's store is gone" in line for line in lines)


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_of_imports_is_one_line(number: signal.Signals, start: Launch) -> None:
    process = start("import time; time.sleep(60)", 1)
    status = Path("/proc", str(process.pid), "status")
    end = time.monotonic() + WATCHDOG_S
    # The program installs its signal handlers before it imports slow modules.
    while not _handled(status) >> (number - 1) & 1:
        assert time.monotonic() < end
        time.sleep(0.005)
    process.send_signal(number)
    ended, _, stderr = finish(process)
    assert ended == 128 + number
    assert stderr in ("stopped by the user\n", f"stopped by signal {number.name}\n")


def test_an_interrupt_of_the_first_imports_prints_no_traceback(tmp_path: Path) -> None:
    """Checks that Ctrl-C prints no traceback before the handlers are installed."""
    code = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
    (tmp_path / "difflib.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "megatron.adaptive", "--version"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def _handled(status: Path) -> int:
    """Returns a bit mask of the signals that a process handles, or 0 until it handles SIGHUP.

    ``status`` is the file ``/proc/PID/status`` of the process.
    """
    line = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
    mask = int(line.split()[1], 16)
    # SIGHUP is the last signal for which the program installs a handler. Python itself handles
    # Ctrl-C from the start.
    return mask if mask >> (signal.SIGHUP - 1) & 1 else 0
