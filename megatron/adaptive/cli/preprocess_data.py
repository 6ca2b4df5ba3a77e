"""Implements ``preprocess_data``, which converts JSON lines to token files.

Its flags are the same as in Megatron-LM. ``make_corpus`` creates a text corpus and a vocabulary
from the source files of Python's standard library.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from megatron.adaptive.cli.common import run_cli, show
from megatron.adaptive.config.command_parser import PROGRAM, CommandParser, count, number
from megatron.adaptive.config.data import TokenizerConfig
from megatron.adaptive.config.flags import fields_of
from megatron.adaptive.data.corpus import CorpusSpec, make_corpus
from megatron.adaptive.data.preprocess import PreprocessSpec, Progress, expand_inputs, preprocess

_TOKENIZER = fields_of(TokenizerConfig)


def available_cores() -> int:
    """Returns the number of CPU cores that this process is allowed to use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def progress_display(total_bytes: int | None) -> Iterator[Progress]:
    """Shows a progress bar on stderr during a ``with`` block. Yields a function that advances it.

    If stderr is not a terminal, the bar is printed only every 10 s.

    Args:
        total_bytes: Size of the whole input in bytes, or ``None`` if unknown.
    """
    pause: dict[str, Any] = {} if sys.stderr.isatty() else {"mininterval": 10.0, "delay": 10.0}
    with tqdm(total=total_bytes, unit="B", unit_scale=True, desc="tokenizing", **pause) as bar:

        def advance(documents: int, input_bytes: int) -> None:
            bar.set_postfix_str(f"{documents} documents", refresh=False)
            bar.update(input_bytes - bar.n)

        yield advance


@contextmanager
def tidy_on_sigterm() -> Iterator[None]:
    """Raises ``SystemExit`` if SIGTERM arrives during a ``with`` block.

    Like the ``KeyboardInterrupt`` after Ctrl-C, the exception lets the program remove temporary
    files and stop its worker processes.
    """

    def leave(signum: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``preprocess_data`` with the arguments ``argv``, or those of the process by default."""
    return run_cli(_run, argv)


def _run(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    values = vars(args)
    spec = PreprocessSpec(
        inputs=expand_inputs(args.input),
        output_prefix=args.output_prefix,
        json_keys=tuple(args.json_keys),
        **{spec.dest: values[spec.dest] for spec in _TOKENIZER if spec.dest in values},
        append_eod=args.append_eod,
        workers=args.workers,
    )
    total_bytes = sum(path.stat().st_size for path in spec.inputs)
    with tidy_on_sigterm(), progress_display(total_bytes) as progress:
        summary = preprocess(spec, progress=progress)
    rate = summary.input_bytes / 1e6 / summary.elapsed_s
    empty = f" ({summary.num_empty} empty texts skipped)" if summary.num_empty else ""
    show(
        f"{summary.num_documents} documents{empty}, {summary.num_tokens} tokens in "
        f"{summary.elapsed_s:.1f} s ({rate:.2f} MB/s, {rate / spec.workers:.2f} MB/s per worker)"
    )
    for prefix in summary.prefixes:
        show(f"train with --data-path {shlex.quote(str(prefix))}")
    return 0


_WORKERS: dict[str, Any] = {
    "type": number(int, 1, 1024),
    "metavar": "N",
    "help": "number of processes that tokenize (default: one per core)",
}


def _parser() -> CommandParser:
    parser = CommandParser(
        prog=f"{PROGRAM} data preprocess",
        description="Convert JSON lines to the .bin and .idx files of --data-path.",
    )
    add = parser.add_argument
    text = "JSON lines files or glob patterns, one JSON object per line"
    add("--input", nargs="+", required=True, metavar="FILE", help=text)
    text = "keys whose text is tokenized; each key has separate output files (default: text)"
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help=text)
    text = "prefix of the output files PREFIX_KEY_document.bin and .idx"
    add("--output-prefix", required=True, metavar="PREFIX", help=text)
    for spec in _TOKENIZER:
        add(*spec.names, **spec.options())
    add(
        "--append-eod", action="store_true", help="end each document with the end-of-document token"
    )
    add("--workers", default=available_cores(), **_WORKERS)
    text = "accepted for compatibility with Megatron-LM, but has no effect"
    add("--log-interval", type=number(int, 1, 1_000_000_000), metavar="N", help=text)
    text = "accepted for compatibility with Megatron-LM; only mmap is supported"
    add("--dataset-impl", choices=["mmap"], default="mmap", help=text)
    return parser


def make_corpus_main(argv: Sequence[str] | None = None) -> int:
    """Runs ``make_corpus`` with the arguments ``argv``, or those of the process by default."""
    return run_cli(_make_corpus, argv)


def _make_corpus(argv: Sequence[str]) -> int:
    args = _corpus_parser().parse_args(argv)
    spec = CorpusSpec(**vars(args))
    start_s = time.monotonic()
    with tidy_on_sigterm(), progress_display(None) as progress:
        corpus = make_corpus(spec, progress=progress)
    origin = "found" if corpus.reused else f"made in {time.monotonic() - start_s:.1f} s"
    show(f"corpus {origin}: {corpus.jsonl}")
    files = ("--data-path", corpus.data_prefix, "--vocab-file", corpus.vocab_file)
    show(f"train with {shlex.join(map(str, (*files, '--merge-file', corpus.merge_file)))}")
    return 0


def _corpus_parser() -> CommandParser:
    defaults = CorpusSpec(output_dir=Path())
    parser = CommandParser(
        prog=f"{PROGRAM} data corpus",
        description="Create a training corpus from the Python standard library's source files.",
    )
    add = parser.add_argument
    add("--output-dir", type=Path, required=True, metavar="DIR", help="folder to create")
    for name, kind, default, text in (
        ("--vocab-size", count, defaults.vocab_size, "size of the vocabulary"),
        (
            "--max-bytes",
            number(int, 1, 1 << 40),
            defaults.max_bytes,
            "maximum size of the source text in bytes",
        ),
    ):
        add(name, type=kind, default=default, metavar="N", help=f"{text} (default: {default})")
    add("--workers", default=available_cores(), **_WORKERS)
    return parser
