"""Tests the flags, the output, the exit status and the leftover files of ``preprocess_data``."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron.adaptive.cli.preprocess_data import main
from megatron.adaptive.data.indexed import check_indexed

TOOL = Path(__file__).resolve().parents[2] / "tools" / "preprocess_data.py"


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} {n}"}) + "\n" for n in range(50)))
    return path


def _null(tmp_path: Path, *more: str) -> list[str]:
    return [
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "100"),
        *("--output-prefix", str(tmp_path / "out"), *more),
    ]


def test_megatron_lms_flags_make_megatron_lms_files(
    tmp_path: Path, numbers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(
        [
            *("--input", str(tmp_path / "*.jsonl"), "--json-keys", "text", "--append-eod"),
            *_null(tmp_path, "--workers", "1", "--dataset-impl", "mmap", "--log-interval", "10"),
        ]
    )
    assert status == 0
    info = check_indexed(tmp_path / "out_text_document")
    assert (info.num_sequences, info.num_tokens) == (50, 150)
    captured = capsys.readouterr()
    assert "50 documents, 150 tokens" in captured.out
    assert f"--data-path {tmp_path / 'out_text_document'}" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--input", "absent.jsonl"], "absent.jsonl: no such file"),
        (["--dataset-impl", "lazy"], "invalid choice: 'lazy'"),
        (["--split-sentences"], "unrecognized arguments: --split-sentences"),
        (["--workers", "0"], "--workers: '0' is not a whole number from 1"),
        (["--log-interval", "0"], "--log-interval: '0' is not a whole number from 1"),
        (["--tokenizer-type", "GPT2BPETokenizer"], "requires --vocab-file"),
        (["--json-keys", "body"], "numbers.jsonl:1: has no key 'body'"),
    ],
)
def test_expected_errors_are_one_line_and_status_2(
    tmp_path: Path,
    numbers: Path,
    capsys: pytest.CaptureFixture[str],
    changes: list[str],
    message: str,
) -> None:
    status = main(["--input", str(numbers), *_null(tmp_path), "--workers", "1", *changes])
    captured = capsys.readouterr()
    assert status == 2
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert captured.out == ""
    assert os.listdir(tmp_path) == ["numbers.jsonl"]


def test_missing_flags_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "--input, --output-prefix" in capsys.readouterr().err


@pytest.mark.long
def test_the_tool_runs_from_any_folder_with_workers_and_a_progress_bar(
    tmp_path: Path, numbers: Path
) -> None:
    terminal, program_end = pty.openpty()
    fcntl.ioctl(program_end, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 100, 0, 0))
    program = subprocess.Popen(
        [sys.executable, TOOL, "--input", numbers.name, *_null(tmp_path, "--workers", "2")],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=program_end,
        text=True,
    )
    os.close(program_end)
    shown = b""
    try:
        while chunk := os.read(terminal, 4096):
            shown += chunk
    except OSError:
        pass  # Linux reports EIO if the other end of a terminal is closed.
    finally:
        os.close(terminal)
    output, _ = program.communicate(timeout=60)
    assert program.returncode == 0
    assert "50 documents, 100 tokens" in output
    assert check_indexed(tmp_path / "out_text_document").num_sequences == 50
    assert b"tokenizing" in shown
    assert b"50 documents" in shown


def _wait_for(condition: Callable[[], bool], event: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"no {event} within 60 s"
        time.sleep(0.02)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_a_stopped_run_leaves_no_output_and_no_workers(
    tmp_path: Path, numbers: Path, number: int, status: int
) -> None:
    large = tmp_path / "large.jsonl"
    large.write_text(numbers.read_text() * 30_000)
    program = subprocess.Popen(
        [sys.executable, TOOL, "--input", large, *_null(tmp_path, "--workers", "2")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _wait_for(lambda: any(map(_size, tmp_path.glob(".out*.tmp.bin"))), "token written")
        workers = psutil.Process(program.pid).children()
        assert len(workers) >= 2
        program.send_signal(number)
        _, errors = program.communicate(timeout=60)
    finally:
        program.kill()
    assert program.returncode == status
    _wait_for(lambda: not any(map(_is_alive, workers)), "end of the workers")
    if number == signal.SIGKILL:
        # A process that is killed by SIGKILL cannot remove its files. So the temporary file must be
        # hidden.
        assert not list(tmp_path.glob("out*"))
    else:
        assert "Traceback" not in errors
        assert sorted(os.listdir(tmp_path)) == ["large.jsonl", "numbers.jsonl"]
