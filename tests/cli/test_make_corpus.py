"""Tests that ``make_corpus`` creates a corpus from the standard library of this Python version."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.adaptive.data.indexed import check_indexed, check_vocabulary_fits
from megatron.adaptive.data.tokenizer import GPT2BPETokenizer

TOOL = Path(__file__).resolve().parents[2] / "tools" / "make_corpus.py"


@pytest.mark.long
def test_the_printed_flags_lead_to_a_corpus_that_fits(tmp_path: Path) -> None:
    command = [
        *(sys.executable, str(TOOL), "--output-dir", "made"),
        *("--max-bytes", "500000", "--vocab-size", "1000"),
    ]
    runs = [
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs
    assert runs[0].stdout.startswith("corpus made in ")
    assert runs[1].stdout.startswith("corpus found: ")
    printed = shlex.split(runs[1].stdout.splitlines()[-1])
    flags = dict(zip(printed[2::2], printed[3::2], strict=True))
    tokenizer = GPT2BPETokenizer(flags["--vocab-file"], flags["--merge-file"])
    assert tokenizer.vocab_size == 1000
    assert check_indexed(flags["--data-path"]).num_tokens > 100_000
    check_vocabulary_fits(check_indexed(flags["--data-path"]), tokenizer.vocab_size)
    assert os.listdir(tmp_path) == ["made"]
