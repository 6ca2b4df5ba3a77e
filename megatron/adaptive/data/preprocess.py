"""Converts JSON lines to megatron-core's ``.bin/.idx`` token files, in parallel.

::

    files ──> batches of lines ──> worker processes ──> in order ──> a builder per key ──> rename
              (parent)             parse, tokenize      (parent)     hidden temporary files

The output files appear only after all input has been converted. The parent process reads and writes
files, and worker processes parse and tokenize. Only a few batches are in progress at a time, so
memory use does not grow with the input. The output does not depend on the number of workers. The
parent imports torch and megatron-core only when it writes the first result, so that workers start
without these packages, and tokenize while the parent imports them.
"""

from __future__ import annotations

import glob
import itertools
import multiprocessing
import multiprocessing.connection
import os
import secrets
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.adaptive.config.data import TokenizerConfig
from megatron.adaptive.config.input_files import open_file, parse_json
from megatron.adaptive.data.tokenizer import build_tokenizer, prepare_megatron_core
from megatron.adaptive.errors import ConfigError, DataError

_BATCH_BYTES = 1 << 20
_BATCHES_PER_WORKER = 3

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class PreprocessSpec(TokenizerConfig):
    """Settings of a conversion to token files: input, keys, tokenizer and output.

    Attributes:
        inputs: Paths of the input files, which have one JSON object per line. Documents keep the
            order of the input.
        output_prefix: Prefix of the output files, ``<output_prefix>_<key>_document.bin`` and
            ``.idx``.
        json_keys: Keys of a JSON object whose values become documents. Each key gets a separate
            pair of output files.
        append_eod: Whether the end-of-document id is appended to each document.
        workers: Number of processes that tokenize in parallel. With 1, the calling process
            tokenizes.
    """

    inputs: tuple[Path, ...]
    output_prefix: str
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int = 1

    def prefix_of(self, key: str) -> str:
        """Returns the path of the token files of ``key`` without suffix, for ``--data-path``."""
        return f"{self.output_prefix}_{key}_document"


@dataclass(frozen=True, kw_only=True)
class PreprocessSummary:
    """Output paths and statistics of a conversion to token files.

    Attributes:
        prefixes: Path of each key's token files, without suffix.
        num_documents: Number of JSON objects that were read.
        num_empty: Number of texts that were skipped because they have no tokens, over all keys.
        num_tokens: Number of tokens that were written, over all keys.
        input_bytes: Number of input bytes that were read.
        elapsed_s: Duration of the conversion in seconds.
    """

    prefixes: tuple[str, ...]
    num_documents: int
    num_empty: int
    num_tokens: int
    input_bytes: int
    elapsed_s: float


_Batch = tuple[Path, int, list[bytes]]
"""Path of an input file, number of the batch's first line, and all lines of the batch."""


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Tokens of a batch of lines.

    Attributes:
        ids: Token ids of the batch's documents for each key, concatenated.
        lengths: Number of tokens in each document, for each key.
        num_documents: Number of JSON objects in the batch.
        num_bytes: Number of input bytes of the batch.
    """

    ids: list[npt.NDArray[np.int32]]
    lengths: list[list[int]]
    num_documents: int
    num_bytes: int


def expand_inputs(patterns: Sequence[str]) -> tuple[Path, ...]:
    """Returns the files that match the names or globs in ``patterns``, without duplicates.

    The files that match a glob are sorted by name.

    Raises:
        DataError: If a file name or pattern matches no readable file.
    """
    files: dict[Path, None] = {}
    for pattern in patterns:
        exists = Path(pattern).exists()
        names = [pattern] if exists else sorted(glob.glob(pattern, recursive=True))
        paths = [Path(name) for name in names if Path(name).is_file()]
        if not paths:
            reason = "is not a regular file" if names else "no such file"
            raise DataError(f"{pattern}: {reason}; --input requires JSON lines files or a pattern")
        for path in paths:
            if not os.access(path, os.R_OK):
                raise DataError(f"cannot read {path}; check its permissions")
            files[path] = None
    return tuple(files)


def preprocess(spec: PreprocessSpec, *, progress: Progress | None = None) -> PreprocessSummary:
    """Tokenizes JSON lines into a ``.bin/.idx`` pair for each key.

    Existing output files are replaced only after all input has been tokenized. If an error occurs,
    no new files remain. Blank lines are skipped.

    Args:
        spec: Input files, JSON keys, tokenizer and output path.
        progress: Function that is called in this process after each batch, with the number of
            documents and the number of input bytes so far.

    Returns:
        Paths of the output files, and the numbers of documents, tokens and bytes.

    Raises:
        ConfigError: If a setting is invalid.
        DataError: If a line is not JSON or does not contain a key, if the input contains no
            documents, if a vocabulary is damaged, or if the output cannot be written. The message
            about a line states its file and number.
    """
    _check(spec)
    try:
        return _write(spec, progress)
    except OSError as error:
        raise DataError(
            f"cannot write to {spec.output_prefix} ({error.strerror}); free space or choose "
            "another --output-prefix"
        ) from None


def _write(spec: PreprocessSpec, progress: Progress | None) -> PreprocessSummary:
    start_s = time.monotonic()
    tokenizer = build_tokenizer(spec)
    num_documents = input_bytes = 0
    with ExitStack() as stack:
        results = stack.enter_context(closing(_encoded_batches(spec)))
        outputs = [
            stack.enter_context(_Output(spec.prefix_of(key), tokenizer.vocab_size))
            for key in spec.json_keys
        ]
        for batch in results:
            for output, ids, lengths in zip(outputs, batch.ids, batch.lengths, strict=True):
                output.add(ids, lengths)
            num_documents += batch.num_documents
            input_bytes += batch.num_bytes
            if progress is not None:
                progress(num_documents, input_bytes)
        for key, output in zip(spec.json_keys, outputs, strict=True):
            if not output.num_documents:
                raise DataError(
                    f"{_names(spec.inputs)}: no text under key {key!r}; use a file with at least "
                    "one non-empty text"
                )
        for output in outputs:
            output.finish()
        for output in outputs:
            output.publish()
    return PreprocessSummary(
        prefixes=tuple(output.prefix for output in outputs),
        num_documents=num_documents,
        num_empty=sum(num_documents - output.num_documents for output in outputs),
        num_tokens=sum(output.num_tokens for output in outputs),
        input_bytes=input_bytes,
        elapsed_s=time.monotonic() - start_s,
    )


def _check(spec: PreprocessSpec) -> None:
    if spec.workers < 1:
        raise ConfigError(f"--workers must be at least 1, got {spec.workers}")
    if not spec.json_keys:
        raise ConfigError("--json-keys must contain at least one key")
    if len(set(spec.json_keys)) != len(spec.json_keys):
        raise ConfigError(
            f"--json-keys must not contain a key twice, got {' '.join(spec.json_keys)!r}"
        )
    if not spec.inputs:
        raise ConfigError("no input; give at least one file with --input")


def _names(paths: Sequence[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def _batches(inputs: Iterable[Path]) -> Iterator[_Batch]:
    for path in inputs:
        try:
            with open_file(path) as stream:
                first_line = 1
                while lines := stream.readlines(_BATCH_BYTES):
                    yield path, first_line, lines
                    first_line += len(lines)
        except OSError as error:
            raise DataError(f"cannot read {path} ({error.strerror})") from None


class _Encoder:
    """Parses and tokenizes batches of lines, in a worker process or in the parent process."""

    def __init__(self, spec: PreprocessSpec) -> None:
        # Disable the threads of the tokenizers library, which would start one thread per core in
        # each worker process.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._tokenizer = build_tokenizer(spec)
        self._keys = spec.json_keys
        self._append_eod = spec.append_eod

    def __call__(self, batch: _Batch) -> _Encoded:
        path, first_line, lines = batch
        rows = []
        for line_number, line in enumerate(lines, start=first_line):
            if not line.isspace():
                try:
                    rows.append(self._parse(line))
                except ValueError as error:
                    raise DataError(f"{path}:{line_number}: {error}") from None
        ids = []
        lengths = []
        for column in zip(*rows, strict=True) if rows else [()] * len(self._keys):
            try:
                tokens = [row for row in self._tokenizer.tokenize_batch(column) if row]
            except DataError as error:
                raise DataError(f"{path}: {error}") from None
            if self._append_eod:
                tokens = [[*row, self._tokenizer.eod] for row in tokens]
            ids.append(np.fromiter(itertools.chain.from_iterable(tokens), dtype=np.int32))
            lengths.append([len(row) for row in tokens])
        return _Encoded(ids, lengths, len(rows), sum(map(len, lines)))

    def _parse(self, line: bytes) -> list[str]:
        """Returns the text of each key in ``line``, and raises an error if a key is missing."""
        try:
            document = parse_json(line, strict=False)
        except ValueError as error:
            raise ValueError(f"is not JSON ({error}); each line must be one JSON object") from None
        if not isinstance(document, dict):
            raise ValueError(
                f"is a JSON {type(document).__name__}; each line must be one JSON object"
            )
        for key in self._keys:
            if key not in document:
                raise ValueError(
                    f"has no key {key!r} (it has {', '.join(document) or 'none'}); set "
                    "--json-keys to the key of the text"
                )
            if not isinstance(document[key], str):
                raise ValueError(
                    f"the value of {key!r} is a {type(document[key]).__name__}, but must be a "
                    "string"
                )
        return [document[key] for key in self._keys]


_worker_encoder: list[_Encoder] = []


def _start_worker(spec: PreprocessSpec) -> None:
    # Ignore Ctrl-C in the worker. The parent removes the temporary files and stops the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker_encoder.append(_Encoder(spec))


def _end_with_parent() -> None:
    """Makes this worker exit if the parent exits, because it would otherwise wait forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _encode_in_worker(batch: _Batch) -> _Encoded:
    return _worker_encoder[0](batch)


def _encoded_batches(spec: PreprocessSpec) -> Generator[_Encoded]:
    """Yields tokenized batches of ``spec`` in order, and stops the workers at the end."""
    if spec.workers == 1:
        yield from map(_Encoder(spec), _batches(spec.inputs))
        return
    pool = ProcessPoolExecutor(
        max_workers=spec.workers,
        # Spawn workers, because a fork is unsafe while the parent has other threads, such as those
        # of torch.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(spec,),
    )
    pending: deque[Future[_Encoded]] = deque()
    try:
        for batch in _batches(spec.inputs):
            pending.append(pool.submit(_encode_in_worker, batch))
            if len(pending) >= _BATCHES_PER_WORKER * spec.workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            "a worker process exited unexpectedly (killed, or out of memory); start again with "
            "fewer --workers"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Output:
    """Writes a ``.bin/.idx`` pair under temporary names until :meth:`publish` renames them."""

    def __init__(self, prefix: str, vocab_size: int) -> None:
        self.prefix = prefix
        self.num_documents = self.num_tokens = 0
        self._vocab_size = vocab_size
        path = Path(prefix)
        self._temporary = str(path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp"))
        self._builder: Any = None
        path.parent.mkdir(parents=True, exist_ok=True)
        # Create the file now to detect an unwritable folder before text is tokenized.
        Path(f"{self._temporary}.bin").touch()

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *exception: object) -> None:
        """Closes the files, and removes files that still have temporary names."""
        if self._builder is not None:
            with suppress(OSError):
                self._builder.data_file.close()
        for suffix in (".bin", ".idx"):
            Path(f"{self._temporary}{suffix}").unlink(missing_ok=True)

    def add(self, ids: npt.NDArray[np.int32], lengths: list[int]) -> None:
        """Appends documents to the token file.

        Args:
            ids: Token ids of the documents, concatenated.
            lengths: Number of tokens in each document.
        """
        if self._builder is None:
            self._builder = _new_builder(f"{self._temporary}.bin", self._vocab_size)
        end = 0
        for length in lengths:
            self._builder.add_document(ids[end : end + length], [length])
            end += length
        self.num_documents += len(lengths)
        self.num_tokens += len(ids)

    def finish(self) -> None:
        """Writes the index and flushes the tokens. The files keep their temporary names."""
        self._builder.finalize(f"{self._temporary}.idx")

    def publish(self) -> None:
        """Renames the token file, and then the index, to their final names.

        The index is renamed last, because it marks the data as complete.
        """
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        for suffix in (".bin", ".idx"):
            os.replace(f"{self._temporary}{suffix}", f"{self.prefix}{suffix}")


def _new_builder(bin_path: str, vocab_size: int) -> Any:
    with warnings.catch_warnings():
        # Silence megatron-core's warnings about missing GPU packages, which are not needed here.
        warnings.simplefilter("ignore")
        prepare_megatron_core()
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    return IndexedDatasetBuilder(bin_path, dtype=DType.optimal_dtype(vocab_size))
