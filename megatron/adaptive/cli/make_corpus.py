"""``make_corpus``: a corpus and vocabulary from Python's own source files, without a download."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.adaptive.cli.common import run_cli
from megatron.adaptive.cli.preprocess_data import (
    available_cores,
    progress_display,
    tidy_on_sigterm,
)
from megatron.adaptive.config.command_parser import CommandParser, count, number
from megatron.adaptive.data.corpus import CorpusSpec, make_corpus


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``make_corpus`` with ``argv`` (the process's arguments by default)."""
    return run_cli(_run, argv)


def _run(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    spec = CorpusSpec(
        output_dir=args.output_dir,
        vocab_size=args.vocab_size,
        max_bytes=args.max_bytes,
        workers=args.workers,
    )
    start_s = time.monotonic()
    with tidy_on_sigterm(), progress_display(None, log_interval=1000) as progress:
        corpus = make_corpus(spec, progress=progress)
    how = "found" if corpus.reused else f"made in {time.monotonic() - start_s:.1f} s"
    print(f"corpus {how}: {corpus.jsonl}")
    files = ("--data-path", corpus.data_prefix, "--vocab-file", corpus.vocab_file)
    print(f"train with {shlex.join(map(str, (*files, '--merge-file', corpus.merge_file)))}")
    return 0


def _parser() -> CommandParser:
    defaults = CorpusSpec(output_dir=Path())
    parser = CommandParser(
        prog="make_corpus.py",
        allow_abbrev=False,
        description="Make a training corpus from the Python standard library's source files.",
    )
    add = parser.add_argument
    add("--output-dir", type=Path, required=True, metavar="DIR", help="folder to make")
    add(
        "--vocab-size",
        type=count,
        default=defaults.vocab_size,
        metavar="N",
        help=f"entries of the vocabulary (default: {defaults.vocab_size})",
    )
    add(
        "--max-bytes",
        type=number(int, 1, 1 << 40),
        default=defaults.max_bytes,
        metavar="N",
        help=f"source text taken at most (default: {defaults.max_bytes})",
    )
    add(
        "--workers",
        type=number(int, 1, 1024),
        default=available_cores(),
        metavar="N",
        help="processes that tokenize (default: one a core)",
    )
    return parser
