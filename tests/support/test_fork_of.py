"""Tests which programs are forked instead of started, and that reused PIDs are detected."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiprocess.forked_nodes.sitecustomize import fork_of, is_program, started
from tests.multiprocess.launch import TRANSFORMERS, forking_every, run_forked


@pytest.fixture
def program() -> Iterator[subprocess.Popen[bytes]]:
    """Yields a process that waits for input until the test ends."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as waiting:
        yield waiting
        waiting.kill()


def test_both_processes_must_have_started_when_the_file_says(
    program: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    path, pid = tmp_path / "nodes", program.pid
    file = tmp_path / f"nodes-{pid}"
    assert fork_of(str(path), pid) is None
    file.write_text(f"{started(pid)} {pid} {started(pid)}")
    assert fork_of(str(path), pid) == pid
    for former in (f"1 {pid} {started(pid)}", f"{started(pid)} {pid} 1", ""):
        file.write_text(former)
        assert fork_of(str(path), pid) is None
    file.write_text(f"{started(pid)} {pid} {started(pid)}")
    program.kill()
    program.wait()
    assert fork_of(str(path), pid) is None


@pytest.mark.multiprocess
@pytest.mark.parametrize("unbuffered", [[], ["-u"]])
def test_lines_of_code_are_forked_with_what_is_imported(unbuffered: list[str]) -> None:
    code = "import sys; print('torch' in sys.modules, __name__, sys.argv); sys.exit(3)"
    done = subprocess.run(
        [sys.executable, *unbuffered, "-c", code, "word"],
        env=forking_every(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "True __main__ ['-c', 'word']\n"), done.stderr


@pytest.mark.multiprocess
def test_further_modules_are_imported_before_a_fork(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script = tmp_path / "imported.py"
    script.write_text(f"import sys; print({set(TRANSFORMERS)} <= sys.modules.keys())")
    by_variables = subprocess.run(
        [sys.executable, str(script)],
        env=forking_every(TRANSFORMERS),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    by_server = run_forked([str(script)], folder=tmp_path, limit_s=120.0, modules=TRANSFORMERS)
    for done in (by_variables, by_server):
        assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_processes_with_descriptors_of_their_own_are_not_forked() -> None:
    assert is_program(["-m", "megatron.adaptive", "--version"])
    assert is_program(["program.py", "--flag"])
    assert not is_program(["-c", "from multiprocessing.spawn import spawn_main; spawn_main()"])
    assert not is_program(["-I", "-S", "program.py"])
    assert not is_program([])
