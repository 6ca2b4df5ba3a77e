"""Makes the default corpus from the source files of Python's standard library, without downloads.

This module selects source files, trains a vocabulary on them, tokenizes them, and writes this
folder::

    <folder>/corpus.jsonl                    one {"text": ..., "path": ...} per line
             vocab.json  merges.txt          byte-level BPE in GPT-2's form, with <|endoftext|>
             corpus_text_document.bin/.idx   tokens, for --data-path <folder>/corpus_text_document
             corpus.json                     manifest: settings, and size of each file
             index_cache/                    shuffling indices, written by training runs

The manifest is written last, so a folder with a manifest is complete. The next call with the same
settings reuses the corpus.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers, trainers

from megatron.adaptive.config.input_files import parse_json, read_whole
from megatron.adaptive.data.file_lock import locked
from megatron.adaptive.data.indexed import INDEX_CACHE
from megatron.adaptive.data.preprocess import PreprocessSpec, Progress, preprocess
from megatron.adaptive.data.tokenizer import END_OF_DOCUMENT
from megatron.adaptive.errors import ConfigError, DataError

_FORMAT = 1
_MANIFEST = "corpus.json"
_LOCK = ".lock"
# Temporary files that a killed process leaves behind.
_LEFT_BEHIND = ".corpus_text_document.*.tmp.*"
_FILES = (
    "corpus.jsonl",
    "vocab.json",
    "merges.txt",
    "corpus_text_document.bin",
    "corpus_text_document.idx",
)
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"}
)
# The vocabulary must contain the 256 byte values and the end-of-document token. With a smaller
# vocabulary, some text could not be encoded.
_SMALLEST_VOCABULARY = 257


@dataclass(frozen=True, kw_only=True)
class CorpusSpec:
    """Settings of a corpus.

    Attributes:
        output_dir: Folder to which the corpus is written.
        vocab_size: Number of tokens in the vocabulary, including the end-of-document token.
        max_bytes: Maximum total size of the source files in bytes.
        source_dir: Folder with ``.py`` files, or ``None`` for the running Python's standard
            library.
        workers: Number of processes that tokenize in parallel.
    """

    output_dir: Path
    vocab_size: int = 8192
    max_bytes: int = 24_000_000
    source_dir: Path | None = None
    workers: int = 1

    def settings(self) -> dict[str, int]:
        """Returns the settings that must match before an existing corpus is reused."""
        return {"format": _FORMAT, "vocab_size": self.vocab_size, "max_bytes": self.max_bytes}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Paths of a finished corpus.

    Attributes:
        jsonl: Path of the JSON lines file, which has one line per source file.
        vocab_file: Path of ``vocab.json``, the value for ``--vocab-file``.
        merge_file: Path of ``merges.txt``, the value for ``--merge-file``.
        data_prefix: Path of the token files without suffix, the value for ``--data-path``.
        reused: Whether an earlier call made the corpus.
    """

    jsonl: Path
    vocab_file: Path
    merge_file: Path
    data_prefix: Path
    reused: bool


def make_corpus(spec: CorpusSpec, *, progress: Progress | None = None) -> Corpus:
    """Makes a corpus, or reuses a corpus that an earlier call made with the same settings.

    If two processes call this function at the same time, one process makes the corpus and the other
    process waits.

    Args:
        spec: Source, sizes and output folder of the corpus.
        progress: Function that is called after each tokenized batch, with the number of documents
            and the number of input bytes so far.

    Raises:
        ConfigError: If ``vocab_size``, ``max_bytes`` or ``workers`` is too small.
        DataError: If there are no source files, or if the output folder is not writable or contains
            other files or a corpus of a newer format.
    """
    if spec.vocab_size < _SMALLEST_VOCABULARY:
        raise ConfigError(
            f"--vocab-size must be at least {_SMALLEST_VOCABULARY} (one token for each "
            f"byte value, and {END_OF_DOCUMENT}), got {spec.vocab_size}"
        )
    for flag, value in (("--max-bytes", spec.max_bytes), ("--workers", spec.workers)):
        if value < 1:
            raise ConfigError(f"{flag} must be at least 1, got {value}")
    folder = spec.output_dir.absolute()
    reused = _is_whole(folder, spec)
    if not reused:
        documents = _documents(spec)
        _refuse_foreign(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / _LOCK):
                # Another process may have made the corpus while this process waited.
                reused = _is_whole(folder, spec)
                if not reused:
                    _fill(folder, documents, spec, progress)
        except OSError as error:
            raise DataError(
                f"cannot write to {folder} ({error.strerror}); free space or choose another folder"
            ) from None
    return Corpus(
        jsonl=folder / "corpus.jsonl",
        vocab_file=folder / "vocab.json",
        merge_file=folder / "merges.txt",
        data_prefix=folder / "corpus_text_document",
        reused=reused,
    )


def source_files(source_dir: Path) -> list[Path]:
    """Returns the ``.py`` files below ``source_dir``, without test, cache and package folders.

    Files are sorted by a hash of their relative path, so their order is the same on every machine.
    This order also spreads the files of a folder over the whole corpus, so that the last part,
    which is used for validation, is similar to the rest.
    """
    files = []
    for parent, folders, names in os.walk(source_dir):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        files += [Path(parent, name) for name in names if name.endswith(".py")]

    def key(path: Path) -> tuple[str, str]:
        relative = path.relative_to(source_dir).as_posix()
        return hashlib.sha256(relative.encode("utf-8", "surrogateescape")).hexdigest(), relative

    return sorted(files, key=key)


def _documents(spec: CorpusSpec) -> list[tuple[str, str]]:
    """Returns the paths and texts of source files, up to ``spec.max_bytes`` bytes in total."""
    source_dir = spec.source_dir or Path(sysconfig.get_path("stdlib"))
    documents: list[tuple[str, str]] = []
    taken = 0
    for path in source_files(source_dir):
        try:
            raw = read_whole(path)
            text = raw.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip() and taken + len(raw) <= spec.max_bytes:
            taken += len(raw)
            documents.append((path.relative_to(source_dir).as_posix(), text))
    if not documents:
        raise DataError(
            f"{source_dir} contains no Python source file of at most {spec.max_bytes} bytes; raise "
            "--max-bytes, install Python with its sources, or use your own text with "
            "tools/preprocess_data.py"
        )
    return documents


def _fill(
    folder: Path, documents: list[tuple[str, str]], spec: CorpusSpec, progress: Progress | None
) -> None:
    """Writes a corpus of ``documents`` to ``folder``, using the settings in ``spec``.

    The manifest is written last, because it marks the corpus as complete.
    """
    for old in (folder / _MANIFEST, *folder.glob(_LEFT_BEHIND)):
        old.unlink(missing_ok=True)
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as stream:
        for path, text in documents:
            stream.write(json.dumps({"text": text, "path": path}) + "\n")
    _train_vocabulary(folder, [text for _, text in documents], spec.vocab_size)
    preprocess(
        PreprocessSpec(
            inputs=(folder / "corpus.jsonl",),
            output_prefix=str(folder / "corpus"),
            vocab_file=str(folder / "vocab.json"),
            merge_file=str(folder / "merges.txt"),
            append_eod=True,
            workers=spec.workers,
        ),
        progress=progress,
    )
    manifest = {
        **spec.settings(),
        "documents": len(documents),
        "sizes": {name: (folder / name).stat().st_size for name in _FILES},
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _train_vocabulary(folder: Path, texts: list[str], vocab_size: int) -> None:
    model = FastTokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    model.model.save(str(folder))


def _is_whole(folder: Path, spec: CorpusSpec) -> bool:
    """Returns whether ``folder`` contains a complete corpus with the settings in ``spec``.

    Raises:
        DataError: If the corpus has a newer format.
    """
    try:
        manifest = parse_json(read_whole(folder / _MANIFEST))
        if manifest["format"] > _FORMAT:
            raise DataError(
                f"{folder / _MANIFEST} has format {manifest['format']}, but this program "
                f"supports only format {_FORMAT}; use the program that made the corpus, or "
                "choose another folder"
            )
        return all(manifest.get(key) == value for key, value in spec.settings().items()) and all(
            (folder / name).stat().st_size == manifest["sizes"][name] for name in _FILES
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _refuse_foreign(folder: Path) -> None:
    """Raises an error if ``folder`` contains files that do not belong to a corpus."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; choose another folder")
    expected = {*_FILES, _MANIFEST, _LOCK, INDEX_CACHE}
    expected |= {entry.name for entry in folder.glob(_LEFT_BEHIND)}
    foreign = sorted(entry.name for entry in folder.iterdir() if entry.name not in expected)
    if foreign:
        raise DataError(
            f"{folder} contains other files (such as {foreign[0]!r}) and no corpus with these "
            "settings; choose another folder, or empty the folder"
        )
