"""Scans real jobs for planted secrets, as another user of the machine would.

Secrets are planted in the environment of a job over ssh, and in ``conf.sh`` of a pod job and of a
Slurm job. While the jobs run, a process of another user repeatedly reads every command line and
every file that it may read.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from tests.cluster.jobs import FLAGS, JobFolder, command, environment
from tests.labs import sshd
from tests.multiprocess.launch import ROOT, free_port, start, wait_until

LIMIT_S = 120.0
NOBODY = 65534
NAMES = ("HF_TOKEN", "NCCL_LAB_PASSWORD", "TORCH_LAB_SECRET", "GLOO_API_KEY")
PLAIN = {"HF_HOME": '/nowhere/it\'s "$HOME" & `x`'}
"""Variable without a secret, which the job's processes must receive unchanged."""
_PERIOD_S = 0.05
_LARGEST = 1 << 26
_SERVER = """
ListenAddress 127.0.0.1
Port {port}
SetEnv TMPDIR={{0}}
"""
_CLIENT = """
HostName 127.0.0.1
Port {port}
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""
_CONF = """
MODEL=tiny
DEVICE=cpu
TRAIN_ITERS=3
GLOBAL_BATCH_SIZE=2
NNODES=1
NPROC_PER_NODE=1
TRAINER_FLAGS='--vocab-size 255'
"""


class Scanner:
    """Searches for secrets as another user of the machine, until :meth:`close` is called.

    If this process runs as root, the searching process drops all privileges. Otherwise, the
    searching process skips files that other users cannot read. The process is forked immediately,
    so create the scanner before you start any threads.

    Args:
        secrets: Texts to search for.
        folders: Folders that are searched recursively.
    """

    def __init__(self, secrets: Sequence[str], folders: Sequence[Path]) -> None:
        fork = multiprocessing.get_context("fork")
        self._link, scanner_end = fork.Pipe()
        texts = [secret.encode() for secret in secrets]
        self._process = fork.Process(target=_serve, args=(scanner_end, texts, folders), daemon=True)
        self._process.start()
        scanner_end.close()

    def files(self) -> tuple[int, list[str]]:
        """Searches for secrets in the folders.

        Returns the number of files read, and the paths of files with secrets.
        """
        self._link.send("files")
        assert self._link.poll(LIMIT_S), "the scanner does not answer"
        result: tuple[int, list[str]] = self._link.recv()
        return result

    def close(self) -> tuple[int, list[str]]:
        """Stops searching for secrets in the command lines of all processes.

        Returns the number of different command lines that were read, and those that contain a
        secret.
        """
        self._link.send("end")
        assert self._link.poll(LIMIT_S), "the scanner does not answer"
        result: tuple[int, list[str]] = self._link.recv()
        self._process.join(LIMIT_S)
        return result


def _serve(link: Connection, secrets: list[bytes], folders: Sequence[Path]) -> None:
    is_other = os.geteuid() == 0
    if is_other:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    begun_s = time.time() - 1.0
    lines: set[bytes] = set()
    while True:
        asked = link.recv() if link.poll(_PERIOD_S) else ""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                lines.add(path.read_bytes())
        if asked == "files":
            read, paths = 0, []
            for path in _readable(folders, begun_s, is_other):
                with contextlib.suppress(OSError):
                    content = path.read_bytes()
                    read += 1
                    if any(secret in content for secret in secrets):
                        paths.append(str(path))
            link.send((read, paths))
        elif asked == "end":
            bad = [line for line in lines if any(secret in line for secret in secrets)]
            link.send((len(lines), [line.replace(b"\0", b" ").decode() for line in bad]))
            return


def _readable(folders: Sequence[Path], since_s: float, is_other: bool) -> Iterator[Path]:
    """Yields the files that were modified after ``since_s`` and that other users can read.

    ``folders`` are searched recursively. ``is_other`` states whether this process already runs as a
    different user.
    """
    for folder in folders:
        for parent, below, names in os.walk(folder):
            if not is_other:
                below[:] = [b for b in below if os.lstat(Path(parent, b)).st_mode & stat.S_IXOTH]
            for name in names:
                path = Path(parent, name)
                with contextlib.suppress(OSError):
                    status = path.lstat()
                    may = is_other or status.st_mode & stat.S_IROTH
                    small = stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST
                    if may and small and status.st_mtime >= since_s:
                        yield path


def measure(seed: int = 1) -> dict[str, Any]:
    """Runs jobs that have secrets, and searches for the secrets as another user.

    Args:
        seed: Seed of the secrets.

    Returns:
        Dict with ``found`` (files and command lines with a secret), ``commands`` and ``files``
        (numbers of command lines and files that were read), ``seen`` (how many of two visible
        secrets the scanner found), ``arrived`` (number of jobs whose processes had all variables),
        ``jobs`` (number of jobs that were run) and ``skipped`` (reasons why jobs were not run).
    """
    draw = random.Random(seed)
    # Surround the secrets with characters that are special in a shell, in JSON or in regular
    # expressions.
    secrets = {name: f"{draw.getrandbits(128):032x}" for name in NAMES}
    planted = {name: f'it\'s "{key}" $(id) `x` \\ é' for name, key in secrets.items()}
    with tempfile.TemporaryDirectory(prefix="faults-secrets-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        seen = _seen_in_sight(folder)
        # The jobs also write their temporary files to these folders.
        scanner = Scanner([*secrets.values()], [folder, Path("/dev/shm")])
        arrived, skipped, files, hits = 0, [], 0, list[str]()

        def scan() -> None:
            nonlocal files
            read, places = scanner.files()
            files += read
            hits.extend(places)

        jobs = (_over_ssh, _on_pods, _on_slurm)
        for job in jobs:
            job_folder = folder / job.__name__.strip("_")
            job_folder.mkdir()
            try:
                arrived += job(job_folder, planted, scan)
            except _CannotRunError as error:
                skipped.append(str(error))
            scan()
        commands, lines = scanner.close()
    return {
        "found": [*dict.fromkeys(hits), *lines],
        "commands": commands,
        "files": files,
        "seen": seen,
        "arrived": arrived,
        "jobs": len(jobs) - len(skipped),
        "skipped": skipped,
    }


class _CannotRunError(Exception):
    """Raised if this machine lacks a program that the job needs."""


def _seen_in_sight(folder: Path) -> int:
    """Puts a text into a file and into a command line, and returns how often the scanner finds it.

    The file is written to ``folder``.
    """
    (folder / "in-sight").write_text("the secret is in-plain-sight")
    scanner = Scanner(["in-plain-sight"], [folder])
    with subprocess.Popen(["sleep", "60", "in-plain-sight"], stderr=subprocess.DEVNULL) as sleeper:
        sleeper.kill()
    with subprocess.Popen([sys.executable, "-c", "input()", "in-plain-sight"], stdin=-1) as shown:
        wait_until(
            lambda: "in-plain-sight" in psutil.Process(shown.pid).cmdline(), lambda: "", LIMIT_S
        )
        time.sleep(4 * _PERIOD_S)
        shown.kill()
    _, files = scanner.files()
    _, commands = scanner.close()
    (folder / "in-sight").unlink()
    return bool(files) + bool(commands)


def _over_ssh(folder: Path, planted: Mapping[str, str], scan: Callable[[], None]) -> bool:
    """Runs a job with secrets, whose only node is reached by ssh.

    The manager of the job gets the secrets ``planted`` as variables. ``scan`` searches for the
    secrets while the job runs. Returns whether the processes of the node received all variables.
    """
    if reason := sshd.why_not():
        raise _CannotRunError(reason)
    programs = _ssh_programs(folder)
    expected = {**planted, **PLAIN}
    (folder / "machines.txt").write_text("far name=far slots=1\n")
    arguments = command(
        folder / "machines.txt",
        folder / "checkpoints",
        ["--train-iters", "99999", "--save-interval", "99999"],
        flags=[*FLAGS, "--pipeline-model-parallel-size", "1"],
    )
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    variables = environment(**expected, PATH=path, TMPDIR=str(folder))
    manager = start(arguments, folder / "log.txt", variables)
    server = int((folder / "sshd.pid").read_text())
    job = JobFolder(folder / "checkpoints")
    try:
        job.until(lambda: job.state().get("iteration", 0) >= 2, "two steps")
        scan()
        (node,) = job.state()["machines"]
        agent = psutil.Process(node["pid"])
        far = [agent, *agent.children(recursive=True)]
        assert manager.pid not in {process.pid for process in agent.parents()}, (
            "the node was not reached by ssh"
        )
        # Ranks are not checked, because they inherit the variables of the process that forks them.
        arrived = len(far) > 1 and all(
            expected.items() <= process.environ().items() for process in far[:2]
        )
        manager.send_signal(signal.SIGTERM)
        assert manager.wait(LIMIT_S) == 128 + signal.SIGTERM, (folder / "log.txt").read_text()
        return arrived
    finally:
        manager.kill()
        manager.wait()
        os.kill(server, signal.SIGTERM)


def _ssh_programs(folder: Path) -> Path:
    """Starts an sshd as this user.

    Returns the folder of an ``ssh`` program that always connects to this sshd.
    """
    port = free_port()
    programs, command = sshd.prepare(folder, _SERVER.format(port=port), _CLIENT.format(port=port))
    if os.geteuid() == 0:
        # sshd requires this folder if it runs as root, and has no option to change the path.
        Path("/run/sshd").mkdir(exist_ok=True)
    subprocess.run(command, check=True)
    wait_until((folder / "sshd.pid").exists, lambda: "sshd", LIMIT_S)
    return programs


def _conf(folder: Path, planted: Mapping[str, str]) -> Path:
    """Writes a ``conf.sh`` with the secrets ``planted`` to ``folder``, and returns its path.

    Only this user can read the file.
    """
    quoted = {name: value.replace("'", "'\\''") for name, value in {**planted, **PLAIN}.items()}
    path = folder / "conf.sh"
    path.touch(0o600)
    path.write_text(_CONF + "".join(f"{name}='{value}'\n" for name, value in quoted.items()))
    return path


def _on_pods(folder: Path, planted: Mapping[str, str], scan: Callable[[], None]) -> bool:
    """Runs a job of one pod with secrets, and creates the report page and the status of the job.

    ``planted`` contains the secrets, and ``scan`` searches for them while the job runs. Returns
    whether a rank received all variables.
    """
    conf = _conf(folder, planted)
    expected = {**planted, **PLAIN}
    arguments = ["bash", str(ROOT / "run_master.sh"), str(conf), "--master-port", str(free_port())]
    arrived = False
    variables = environment(PYTHON=sys.executable, TMPDIR=str(folder))
    job = start(arguments, folder / "log.txt", variables)
    while job.poll() is None:
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(job.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    arrived |= (
                        expected.items() <= process.environ().items()
                        and "RANK" in process.environ()
                    )
        time.sleep(_PERIOD_S)
    assert job.returncode == 0, (folder / "log.txt").read_text()
    scan()
    (run,) = (path.parent for path in folder.glob("logs/*/run.json"))
    module = [sys.executable, "-m", "megatron.adaptive"]
    for view in (
        ["job", "report", str(run)],
        ["job", "status", run.name, "--log-dir", str(run.parent), "--json"],
    ):
        done = subprocess.run([*module, *view], env=environment(), capture_output=True, check=True)
        (folder / f"{view[1]}.txt").write_bytes(done.stdout + done.stderr)
    return arrived


def _on_slurm(folder: Path, planted: Mapping[str, str], scan: Callable[[], None]) -> bool:
    """Submits a job with secrets to fake Slurm programs.

    ``planted`` contains the secrets, and ``scan`` searches for them. Returns whether ``sbatch``
    received all secrets.
    """
    programs = folder / "bin"
    programs.mkdir()
    (programs / "sinfo").write_text("#!/bin/sh\necho 'pc|(null)|4'\n")
    kept = folder / "environment.json"
    (programs / "sbatch").write_text(
        f'#!/bin/sh\nsleep 0.3\ncp "$2" {folder}/script\numask 077\n'
        f'{sys.executable} -c "import json, os; print(json.dumps(dict(os.environ)))" > {kept}\n'
        "echo 7\n"
    )
    for path in programs.iterdir():
        path.chmod(0o755)
    arguments = [
        sys.executable,
        "-m",
        "megatron.adaptive",
        "job",
        "submit",
        str(_conf(folder, planted)),
    ]
    path_text = f"{programs}{os.pathsep}{os.environ['PATH']}"
    variables = {**environment(), "PATH": path_text, "TMPDIR": str(folder)}
    done = subprocess.run(arguments, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (settings,) = folder.glob("logs/submitted/*.json")
    content = json.loads(settings.read_text())
    assert {*content["secrets"]} == {*planted}
    assert PLAIN.items() <= content["conf"].items()
    return planted.items() <= json.loads(kept.read_text()).items()
