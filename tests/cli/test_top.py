"""Tests that ``job top`` prints a single frame, or refreshes the frame on a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.adaptive.cli.top import main
from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.monitor import LiveRun
from megatron.adaptive.trace.status_files import NowFile
from megatron.adaptive.trace.trace_format import trace_file_name
from tests.support.synthetic_trace import Fault, SyntheticRun, write_synthetic

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "megatron.adaptive", "job", "top"]
# The program runs in a new session on this terminal, so that Ctrl-C sends it a signal.
ADOPT = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Writes a run with 2 stages and 2 replicas in iteration 6 of 20. Rank 3 of the run is slow."""
    slow = Fault(kind="slow-rank", rank=3, factor=1.5)
    traces = tmp_path / "run" / "traces"
    write_synthetic(traces, SyntheticRun(num_ranks=2, replicas=2, iterations=5, faults=(slow,)))
    say(traces, {"doing": "F", "chunk": 0, "microbatch": 3, "done": [3, 1, 0]})
    lines = [{"total_iterations": 20, "start_iteration": 0}]
    lines += [
        {"iteration": i, "step_ms": 400.0, "tokens_per_s": 12345.6, "loss": 9.0 - i}
        for i in range(1, 6)
    ]
    lines += [{"findings": []}, {"slow_rank": 3, "times": 1, "factor": 1.5}]
    with (traces / "progress.jsonl").open("w") as file:
        for number, line in enumerate(lines):
            file.write(json.dumps({**line, "unix_ns": time.time_ns() + number * 10**9}) + "\n")
    return tmp_path / "run"


def say(traces: Path, fields: dict[str, object], ranks: Sequence[int] = range(4)) -> None:
    """Writes ``fields`` as the current activity of each of the ``ranks``, as a run does."""
    for rank in ranks:
        file = NowFile(traces, rank)
        file.write({"iteration": 6, "num_microbatches": 8, "held_bytes": 3 << 20, **fields})
        file.end(None)


def frame(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[str]:
    """Runs the program with ``arguments``, and returns the lines of the frame that it prints."""
    assert main([str(argument) for argument in (*arguments, "--once")]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    return text.splitlines()


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_frame_tells_everything(
    folder: Path, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    say(folder / "traces", {"doing": "wait", "cause": "input", "done": [2, 0, 0]}, [2])
    sliced = {"doing": "B", "chunk": 0, "microbatch": 1, "slice": 5, "done": [16, 10, 0]}
    say(folder / "traces", sliced, [1])
    lines = frame(capsys, folder, "--width", str(width))
    assert max(len(line) for line in lines) <= width
    text = "\n".join(lines)
    assert re.search(r"adaptive · 2 stages x 1 chunk · 2 replicas +running, 0\.\d s old", lines[0])
    assert re.search(r"iteration 6 of 20 ━+╸? +30%, 15 s left", text)
    assert "step 400.0 ms   12,346 tokens/s   loss 4 █▆▅▃▁   bubble" in text
    header = next(line for line in lines if line.split()[:2] == ["rank", "stage"])
    assert {"now", "done", "bubble", "waits", "compute", "held"} <= set(header.split())
    ranks = {line.split()[0]: line for line in lines[lines.index(header) + 1 :]}
    assert re.match(r" +0 +0 +F 3 +3\+1", ranks["0"])
    assert re.match(r" +1 +0 +B 1\.5 +16\+10", ranks["1"])
    assert re.match(r" +2 +1 +waits input +2\+0", ranks["2"])
    assert all("3.0 MiB" in ranks[rank] for rank in "0123")
    assert [rank for rank, line in ranks.items() if " 1.50x" in line] == ["3"]
    assert ("█" in ranks["0"]) == (width >= 96)


def test_what_is_missing_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "traces" / trace_file_name(1)).unlink()
    (folder / "traces" / trace_file_name(2)).write_text("{}\nnonsense\n")
    lines = frame(capsys, folder / "traces")
    text = "\n".join(lines)
    assert "1 of 4 ranks have no trace" in text
    assert re.search(r"\n +1 +not started", text)
    assert re.search(r"\n +2 +unreadable", text)
    assert "trace_rank_00002.jsonl:1: a trace file must begin with a header" in text


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no run has written to this folder yet; pass the folder"):
        main([str(tmp_path), "--once"])


def test_many_ranks_are_told_by_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from megatron.adaptive.cli.top import draw

    write_synthetic(
        tmp_path, SyntheticRun(num_ranks=4, replicas=8, iterations=5, num_microbatches=4)
    )
    (tmp_path / "progress.jsonl").write_text('{"slow_rank": 9, "factor": 1.5}\n')
    say(tmp_path, {"doing": "B"}, range(30))
    snapshot = LiveRun(tmp_path).refresh()
    for width in (80, 140):
        Console(width=width, highlight=False).print(draw(snapshot, width, 24))
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= 24
        assert max(len(line) for line in lines) <= width
        stages = [line for line in lines if re.match(r" +\d +8 ", line)]
        assert len(stages) == 4
        assert "8 B" in stages[0]
        assert "6 B · 2 after 5" in stages[3]
        assert [" 1.5" in stage for stage in stages] == [False, True, False, False]


def test_ctrl_c_ends_it_on_a_terminal(folder: Path) -> None:
    terminal, program_end = pty.openpty()
    fcntl.ioctl(program_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    before = termios.tcgetattr(program_end)
    with subprocess.Popen(
        [sys.executable, "-c", ADOPT, *COMMAND, str(folder), "--interval", "0.1"],
        stdin=program_end,
        stdout=program_end,
        stderr=program_end,
        env=ENVIRONMENT,
    ) as process:
        screen = read_until(terminal, lambda seen: seen.count(b"iteration 6 of 20") >= 3)
        os.write(terminal, b"\x03")
        screen += read_until(terminal, lambda seen: b"\x1b[?1049l" in seen and b"held" in seen)
        assert process.wait(60) == 0
    # The program enters the alternate screen, and leaves it before it exits.
    assert b"\x1b[?1049h" in screen
    assert termios.tcgetattr(program_end)[3] == before[3]
    os.close(terminal)
    os.close(program_end)


def read_until(terminal: int, is_enough: object) -> bytes:
    """Reads the output of ``terminal`` until ``is_enough(output)`` is true, and returns it."""
    assert callable(is_enough)
    seen, end_s = b"", time.monotonic() + 60
    while not is_enough(seen):
        ready, _, _ = select.select([terminal], [], [], max(0.0, end_s - time.monotonic()))
        assert ready, seen
        seen += os.read(terminal, 65536)
    return seen
