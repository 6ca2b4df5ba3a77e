"""The default corpus: the Python standard library's own source files, made without a download.

Owns the choice of files, the vocabulary trained on them and the folder that holds the result::

    <folder>/corpus.jsonl                    {"text": ..., "path": ...} a line
             vocab.json  merges.txt          byte-level BPE in GPT-2's form, with <|endoftext|>
             corpus_text_document.bin/.idx   tokens, for --data-path <folder>/corpus_text_document
             corpus.json                     settings and sizes; says that the rest is whole
             index_cache/                    made by training runs

A folder with its manifest is whole, and is used again by the next call.
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
from megatron.adaptive.data.indexed import INDEX_CACHE, locked
from megatron.adaptive.data.preprocess import PreprocessSpec, Progress, preprocess
from megatron.adaptive.data.tokenizer import END_OF_DOCUMENT
from megatron.adaptive.errors import ConfigError, DataError

_FORMAT = 1
_MANIFEST, _LOCK = "corpus.json", ".lock"
_LEFT_BEHIND = ".corpus_text_document.*.tmp.*"  # by a process that was killed
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
# 256 byte symbols and the end of document; fewer would lose text.
_SMALLEST_VOCABULARY = 257


@dataclass(frozen=True, kw_only=True)
class CorpusSpec:
    """Settings of a corpus.

    Attributes:
        output_dir: folder to hold it.
        vocab_size: entries of the vocabulary, end of document included.
        max_bytes: source text taken at most.
        source_dir: tree of ``.py`` files, the running Python's standard library by default.
        workers: processes that tokenize.
    """

    output_dir: Path
    vocab_size: int = 8192
    max_bytes: int = 24_000_000
    source_dir: Path | None = None
    workers: int = 1

    def settings(self) -> dict[str, int]:
        """Return what a folder must have been made with to be used again."""
        return {"format": _FORMAT, "vocab_size": self.vocab_size, "max_bytes": self.max_bytes}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Paths of a corpus.

    Attributes:
        jsonl: one JSON object a source file.
        vocab_file: for ``--vocab-file``.
        merge_file: for ``--merge-file``.
        data_prefix: for ``--data-path``.
        reused: the folder was there already.
    """

    jsonl: Path
    vocab_file: Path
    merge_file: Path
    data_prefix: Path
    reused: bool


def make_corpus(spec: CorpusSpec, *, progress: Progress | None = None) -> Corpus:
    """Make the corpus, or find it made by an earlier call with the same settings.

    A second process that does the same at the same time waits, and finds it made.

    Args:
        spec: folder and sizes.
        progress: see :func:`megatron.adaptive.data.preprocess.preprocess`.

    Raises:
        ConfigError: a size is too small.
        DataError: no source files, the folder holds something else or a corpus of a newer format,
            or it cannot be written.
    """
    if spec.vocab_size < _SMALLEST_VOCABULARY:
        raise ConfigError(
            f"--vocab-size is {spec.vocab_size}, but {_SMALLEST_VOCABULARY} is the least: "
            f"256 bytes and {END_OF_DOCUMENT}"
        )
    for flag, value in (("--max-bytes", spec.max_bytes), ("--workers", spec.workers)):
        if value < 1:
            raise ConfigError(f"{flag} is {value}, but must be at least 1")
    folder = spec.output_dir.absolute()
    reused = _is_whole(folder, spec)
    if not reused:
        documents = _documents(spec)
        _refuse_foreign(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / _LOCK):
                reused = _is_whole(folder, spec)  # another process was faster
                if not reused:
                    _fill(folder, documents, spec, progress)
        except OSError as error:
            raise DataError(
                f"{folder}: cannot be written ({error.strerror}); free space or choose another "
                "--output-dir"
            ) from None
    return Corpus(
        jsonl=folder / "corpus.jsonl",
        vocab_file=folder / "vocab.json",
        merge_file=folder / "merges.txt",
        data_prefix=folder / "corpus_text_document",
        reused=reused,
    )


def source_files(source_dir: Path) -> list[Path]:
    """Return the ``.py`` files below ``source_dir`` in an order that does not depend on it.

    Tests, caches and installed packages are left out. Files come in the order of a hash of their
    relative path: neighbours in a folder spread over the corpus, so that its last hundredths, the
    validation split, look like the rest.
    """
    found = []
    for parent, folders, names in os.walk(source_dir):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        found += [Path(parent, name) for name in names if name.endswith(".py")]

    def key(path: Path) -> tuple[str, str]:
        relative = path.relative_to(source_dir).as_posix()
        return hashlib.sha256(relative.encode("utf-8", "surrogateescape")).hexdigest(), relative

    return sorted(found, key=key)


def _documents(spec: CorpusSpec) -> list[tuple[str, str]]:
    """Returns (relative path, text) of the files that fit into ``max_bytes`` together."""
    source_dir = spec.source_dir or Path(sysconfig.get_path("stdlib"))
    found: list[tuple[str, str]] = []
    taken = 0
    for path in source_files(source_dir):
        try:
            raw = read_whole(path)
            text = raw.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip() and taken + len(raw) <= spec.max_bytes:
            taken += len(raw)
            found.append((path.relative_to(source_dir).as_posix(), text))
    if not found:
        raise DataError(
            f"{source_dir}: holds no Python source file within {spec.max_bytes} bytes; raise "
            "--max-bytes, install Python with its sources, or give your own text to "
            "tools/preprocess_data.py"
        )
    return found


def _fill(
    folder: Path, documents: list[tuple[str, str]], spec: CorpusSpec, progress: Progress | None
) -> None:
    """Writes all files, the manifest last; without it the others count for nothing."""
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
    """Checks that a folder holds a corpus of these settings."""
    try:
        manifest = parse_json(read_whole(folder / _MANIFEST))
        if manifest["format"] > _FORMAT:
            raise DataError(
                f"{folder / _MANIFEST} has format {manifest['format']}, but this program reads"
                f" {_FORMAT}; use the program that made it, or choose another --output-dir"
            )
        return all(manifest.get(key) == value for key, value in spec.settings().items()) and all(
            (folder / name).stat().st_size == manifest["sizes"][name] for name in _FILES
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _refuse_foreign(folder: Path) -> None:
    """Raise unless ``folder`` may be replaced: it is missing, empty, or holds only our files."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise DataError(f"{folder}: is not a folder; choose another --output-dir")
    ours = {*_FILES, _MANIFEST, _LOCK, INDEX_CACHE}
    ours |= {entry.name for entry in folder.glob(_LEFT_BEHIND)}
    foreign = sorted(entry.name for entry in folder.iterdir() if entry.name not in ours)
    if foreign:
        raise DataError(
            f"{folder}: holds other files (such as {foreign[0]!r}) and no corpus of these "
            "settings; choose another --output-dir or empty it"
        )
