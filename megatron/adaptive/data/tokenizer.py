"""Tokenizers: text to ids and back, and the sizes the model needs to know.

Owns reading and checking a GPT-2 style vocabulary (``vocab.json`` and ``merges.txt``) and the
padding rule of the embedding. Imports neither torch nor megatron-core, so that worker processes
start quickly; the objects carry the attributes that megatron-core's dataset configuration reads
(``vocab_size``, ``eod``, ``unique_identifiers``, ``tokenize``, ...).

megatron-core's own GPT-2 tokenizer is not used because it needs ``transformers`` and may
download; its ``NullTokenizer`` would do, but its identity leaves out the vocabulary size.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from megatron.adaptive.config.outside import parse_json
from megatron.adaptive.errors import ConfigError, DataError

END_OF_DOCUMENT = "<|endoftext|>"
TOKENIZER_TYPES = ("GPT2BPETokenizer", "NullTokenizer")


def padded_vocab_size(vocab_size: int, make_divisible_by: int, tensor_parallel_size: int) -> int:
    """Round a vocabulary up so that every tensor-parallel rank gets an equal, aligned share.

    Args:
        vocab_size: entries the tokenizer knows.
        make_divisible_by: ``--make-vocab-size-divisible-by``.
        tensor_parallel_size: ranks the embedding is split over.

    Returns:
        The smallest multiple of ``make_divisible_by * tensor_parallel_size`` that is not less
        than ``vocab_size``, as in Megatron-LM.
    """
    multiple = make_divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


class Tokenizer(ABC):
    """Text to ids and back, in the form megatron-core's datasets expect.

    Attributes:
        vocab_size: number of ids, end of document included; every id is below it.
        eod: the id that ends a document.
        unique_identifiers: distinguish this tokenizer from others; they enter the keys of cached
            dataset indices.
    """

    def __init__(self, vocab_size: int, eod: int, **identity: str) -> None:
        self.vocab_size, self.eod = vocab_size, eod
        name = type(self).__name__
        self.unique_identifiers = OrderedDict({"class": name, "size": vocab_size, **identity})

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Return the ids of ``text``, without an end of document."""

    def heading(self, role: str) -> list[int]:
        """Return the ids that precede a message of ``role`` in a conversation."""
        return self.tokenize(f"{role}:\n")

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text; the same as :meth:`tokenize` one by one, only faster."""
        return [self.tokenize(text) for text in texts]

    @abstractmethod
    def detokenize(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``."""


class GPT2BPETokenizer(Tokenizer):
    """GPT-2's byte-level BPE from ``vocab.json`` and ``merges.txt``.

    The text ``<|endoftext|>`` inside a document is ordinary text: a document cannot end itself.

    Args:
        vocab_file: JSON object from token to id.
        merge_file: one merge rule a line, two tokens parted by one space, best first.

    Raises:
        DataError: a file is missing, malformed, or the two do not belong together.
    """

    def __init__(self, vocab_file: str | Path, merge_file: str | Path) -> None:
        vocab_text = _read_text(Path(vocab_file), "--vocab-file")
        merge_text = _read_text(Path(merge_file), "--merge-file")
        vocab = _parse_vocab(vocab_text, vocab_file)
        merges = _parse_merges(merge_text, merge_file, vocab, vocab_file)
        digest = hashlib.sha256(f"{vocab_text}\0{merge_text}".encode()).hexdigest()[:16]
        super().__init__(max(vocab.values()) + 1, vocab[END_OF_DOCUMENT], digest=digest)
        self._encoder = FastTokenizer(models.BPE(vocab=vocab, merges=merges))
        self._encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._encoder.decoder = decoders.ByteLevel()

    def tokenize(self, text: str) -> list[int]:
        return list(self._encoder.encode(_without_surrogates(text), add_special_tokens=False).ids)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        clean = [_without_surrogates(text) for text in texts]
        encodings = self._encoder.encode_batch_fast(clean, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def detokenize(self, ids: Iterable[int]) -> str:
        return str(self._encoder.decode([int(i) for i in ids], skip_special_tokens=False))


class NullTokenizer(Tokenizer):
    """Ids written as decimal numbers parted by blanks; for mock data and measurements.

    As in Megatron-LM the end of document comes on top of the given size: ids
    ``0..vocab_size-1`` are ordinary, ``eod`` is ``vocab_size``.

    Args:
        vocab_size: ``--vocab-size``, number of ordinary ids.

    Raises:
        ConfigError: ``vocab_size`` is not positive.
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ConfigError(f"--vocab-size is {vocab_size}, but must be at least 1")
        super().__init__(vocab_size + 1, eod=vocab_size)

    def tokenize(self, text: str) -> list[int]:
        return [self._number(word) for word in text.split()]

    def heading(self, role: str) -> list[int]:
        return []  # there are no ids for words

    def _number(self, word: str) -> int:
        try:
            index = int(word)
        except ValueError:
            raise DataError(
                f"NullTokenizer reads numbers parted by blanks, but found {word[:60]!r}; "
                "use GPT2BPETokenizer for text"
            ) from None
        if not 0 <= index <= self.eod:
            raise DataError(
                f"id {index} is outside 0..{self.eod}; raise --vocab-size above {self.eod}"
            )
        return index

    def detokenize(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(index)) for index in ids)


def build_tokenizer(
    tokenizer_type: str,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    *,
    vocab_size: int | None = None,
) -> Tokenizer:
    """Build the tokenizer that the command line names.

    Args:
        tokenizer_type: one of :data:`TOKENIZER_TYPES`.
        vocab_file: ``vocab.json``, for ``GPT2BPETokenizer``.
        merge_file: ``merges.txt``, for ``GPT2BPETokenizer``.
        vocab_size: number of ordinary ids, for ``NullTokenizer``.

    Raises:
        ConfigError: unknown type, or a flag the type needs is missing.
        DataError: a vocabulary file is missing or broken.
    """
    if tokenizer_type == "GPT2BPETokenizer":
        if not vocab_file or not merge_file:
            missing = "--merge-file" if vocab_file else "--vocab-file"
            raise ConfigError(f"GPT2BPETokenizer needs {missing}, which was not given")
        return GPT2BPETokenizer(vocab_file, merge_file)
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None:
            raise ConfigError("NullTokenizer needs --vocab-size, which was not given")
        return NullTokenizer(vocab_size)
    raise ConfigError(
        f"tokenizer type {tokenizer_type!r} is not supported; "
        f"--tokenizer-type takes {' or '.join(TOKENIZER_TYPES)}"
    )


def _read_text(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; {flag} must name an existing file") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}); "
            f"check what {flag} names"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check {flag}") from None


def _parse_vocab(text: str, path: str | Path) -> dict[str, int]:
    try:
        vocab = parse_json(text)
    except ValueError as error:
        raise DataError(
            f"{path}: is not JSON ({error}); --vocab-file must be a GPT-2 vocab.json"
        ) from None
    if not isinstance(vocab, dict) or not vocab:
        raise DataError(
            f"{path}: holds {type(vocab).__name__} instead of a filled JSON object from token to id"
        )
    for token, index in vocab.items():
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise DataError(f"{path}: token {token!r} has id {index!r}, not a number from 0 on")
    if len(set(vocab.values())) != len(vocab):
        raise DataError(f"{path}: two tokens share an id; every id may occur once")
    if END_OF_DOCUMENT not in vocab:
        raise DataError(
            f"{path}: has no token {END_OF_DOCUMENT!r}, which ends every document; "
            "use a GPT-2 style vocabulary that holds it"
        )
    missing = [symbol for symbol in pre_tokenizers.ByteLevel.alphabet() if symbol not in vocab]
    if missing:
        raise DataError(
            f"{path}: lacks {len(missing)} of the 256 byte symbols (such as {min(missing)!r}), so "
            "text would be lost; use a byte-level vocabulary that holds all of them"
        )
    return vocab


def _parse_merges(
    text: str, path: str | Path, vocab: dict[str, int], vocab_file: str | Path
) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    # Not splitlines(): it would also split at separators that may be part of a token.
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.rstrip("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            raise DataError(
                f"{path}:{number}: {line[:60]!r} is not two tokens parted by one space; "
                "--merge-file must be a GPT-2 merges.txt"
            )
        left, right = parts
        for token in (left, right, left + right):
            if token not in vocab:
                raise DataError(
                    f"{path}:{number}: token {token[:60]!r} is not in {vocab_file}; "
                    "--merge-file and --vocab-file must belong together"
                )
        merges.append((left, right))
    return merges


def _without_surrogates(text: str) -> str:
    """Join surrogate pairs and replace lone halves, which JSON can hold and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
