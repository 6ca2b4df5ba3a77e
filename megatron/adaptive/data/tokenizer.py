"""Converts text to token ids and back, and computes the size of the vocabulary.

This module reads and checks three kinds of tokenizers: a GPT-2 vocabulary (``vocab.json`` and
``merges.txt``), the folder of a Hugging Face tokenizer with its chat template, and the files of
SentencePiece and tiktoken. All files are local. Their content is not executed, except chat
templates, which run in a sandbox. Only ``TikTokenizer`` imports torch and megatron-core, so that
worker processes start quickly. Tokenizers have the attributes that megatron-core's dataset
configuration reads (``vocab_size``, ``eod``, ``unique_identifiers``, ``tokenize``, ...).

megatron-core's GPT-2 tokenizer is not used, because it needs ``transformers`` and may download
files. megatron-core's ``NullTokenizer`` is not used, because its identifiers do not contain the
vocabulary size, so the caches of different vocabularies would have the same keys.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import re
import sys
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from megatron.adaptive.config.data import TokenizerConfig
from megatron.adaptive.config.input_files import parse_json, read_bytes, read_text
from megatron.adaptive.data.chat import TAUGHT_ROLE, ChatTemplate, Conversation, without_surrogates
from megatron.adaptive.errors import ConfigError, DataError

END_OF_DOCUMENT = "<|endoftext|>"
_ROLES = ("system", "user", "assistant")  # These roles are allowed if there is no chat template.
_TEMPLATE_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_CHAT_VERSION = 3
"""Version of the code that selects the tokens on which the loss is computed.

The version is part of the cache key of tokenized conversations. Increase the version whenever that
code changes.
"""
_MODEL = "check --tokenizer-model"
_IDS_OF_TIKTOKEN = 1 << 17
"""Default number of ids of a tiktoken vocabulary, including special tokens, as in Megatron-LM."""


def padded_vocab_size(vocab_size: int, make_divisible_by: int, tensor_parallel_size: int) -> int:
    """Returns the vocabulary size, rounded up so that tensor-parallel ranks get equal parts.

    Args:
        vocab_size: Number of token ids of the tokenizer.
        make_divisible_by: Required divisor of the size per rank, which is the value of
            ``--make-vocab-size-divisible-by``.
        tensor_parallel_size: Number of ranks over which the embedding is split.

    Returns:
        The smallest multiple of ``make_divisible_by * tensor_parallel_size`` that is at least
        ``vocab_size``, as in Megatron-LM.
    """
    multiple = make_divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


class Tokenizer(ABC):
    """Converts text to ids and back, with the interface that megatron-core's datasets expect.

    Attributes:
        vocab_size: Number of token ids, including the end-of-document id. All ids are smaller than
            this number.
        eod: End-of-document id.
        unique_identifiers: Values that distinguish this tokenizer from other tokenizers. They are
            part of the keys of cached dataset indices.
    """

    def __init__(self, vocab_size: int, eod: int, **identity: str) -> None:
        self.vocab_size = vocab_size
        self.eod = eod
        name = type(self).__name__
        self.unique_identifiers = OrderedDict({"class": name, "size": vocab_size, **identity})

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Returns the token ids of ``text``, without an end-of-document id."""

    def heading(self, role: str) -> list[int]:
        """Returns the token ids that introduce a message of ``role`` in a conversation."""
        return self.tokenize(f"{role}:\n")

    def conversation(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        """Returns the token ids of ``conversation``, and whether each token is taught.

        Taught tokens are the tokens on which the loss is computed, that is, the assistant's text.
        Without a chat template, a message is tokenized as the heading of its role, its content, and
        the end-of-document id.

        Raises:
            DataError: If the chat template raises an error or, without a template, a message is not
                text or has an unknown role.
        """
        ids: list[int] = []
        taught: list[bool] = []
        for message in conversation.messages:
            role = message["role"]
            content = message.get("content")
            if role not in _ROLES or not isinstance(content, str):
                raise DataError(
                    "without a chat template, a message must be text with role "
                    f"{', '.join(_ROLES)}, but a message is a {type(content).__name__} with role "
                    f"{role!r}; use a tokenizer with a chat template"
                )
            head = self.heading(role)
            body = [*self.tokenize(content), self.eod]
            ids += [*head, *body]
            taught += [False] * len(head) + [role == TAUGHT_ROLE] * len(body)
        return ids, taught

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text in ``texts``. This is faster than :meth:`tokenize`."""
        return [self.tokenize(text) for text in texts]

    @abstractmethod
    def detokenize(self, ids: Iterable[int]) -> str:
        """Returns the text of the token ids ``ids``."""


class _LibraryTokenizer(Tokenizer):
    """Wraps a tokenizer object of the ``tokenizers`` library.

    Args:
        encoder: Tokenizer object of the ``tokenizers`` library.
        eod: End-of-document id.
        digest: Hash of the tokenizer's files, which distinguishes it from other tokenizers.
    """

    def __init__(self, encoder: FastTokenizer, eod: int, digest: str) -> None:
        # Use the highest id instead of the number of ids, because ids may have gaps if tokens were
        # added.
        super().__init__(max(encoder.get_vocab().values()) + 1, eod, digest=digest)
        self._encoder = encoder

    def tokenize(self, text: str) -> list[int]:
        return list(self._encoder.encode(without_surrogates(text), add_special_tokens=False).ids)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        clean = [without_surrogates(text) for text in texts]
        encodings = self._encoder.encode_batch_fast(clean, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def detokenize(self, ids: Iterable[int]) -> str:
        return str(self._encoder.decode([int(i) for i in ids], skip_special_tokens=False))


class GPT2BPETokenizer(_LibraryTokenizer):
    """Tokenizes with GPT-2's byte-level BPE, using a ``vocab.json`` and a ``merges.txt``.

    The text ``<|endoftext|>`` inside a document is treated as ordinary text, not as the
    end-of-document token.

    Args:
        vocab_file: Path of a JSON file that maps each token to its id.
        merge_file: Path of a text file with one merge rule per line, most frequent rule first. A
            rule is two tokens separated by a space.

    Raises:
        DataError: If a file is missing or malformed, or the two files do not belong together.
    """

    def __init__(self, vocab_file: str | Path, merge_file: str | Path) -> None:
        vocab_text = read_text(Path(vocab_file), "check --vocab-file", DataError)
        merge_text = read_text(Path(merge_file), "check --merge-file", DataError)
        try:
            vocab, merges = models.BPE.read_file(str(vocab_file), str(merge_file))
            encoder = FastTokenizer(models.BPE(vocab=vocab, merges=merges))
        except Exception as error:  # The library raises only the base class Exception.
            raise DataError(
                f"{vocab_file} and {merge_file} do not belong together ({error}); --vocab-file "
                "must be a GPT-2 vocab.json, and --merge-file its merges.txt"
            ) from None
        needed = {END_OF_DOCUMENT, *pre_tokenizers.ByteLevel.alphabet()}
        if missing := needed - vocab.keys():
            raise DataError(
                f"{vocab_file} lacks {max(missing, key=len)!r} (missing tokens: {len(missing)}), "
                "so text would be lost; use a GPT-2 vocabulary with a token for each byte value, "
                f"and with {END_OF_DOCUMENT}"
            )
        _check_merges(vocab, merges, Path(vocab_file), Path(merge_file))
        digest = hashlib.sha256(f"{vocab_text}\0{merge_text}".encode()).hexdigest()[:16]
        encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        encoder.decoder = decoders.ByteLevel()
        super().__init__(encoder, vocab[END_OF_DOCUMENT], digest)


_SPECIAL = re.compile(r"<.*>|\[.*\]|\|\|\|.*\|\|\||madeupword.*")
_MOSTLY = 0.9


def _check_merges(
    vocab: dict[str, int], merges: list[tuple[str, str]], vocab_file: Path, merge_file: Path
) -> None:
    """Checks that the vocabulary ``vocab`` and its merge rules ``merges`` belong together.

    Error messages contain the path ``vocab_file`` or ``merge_file``.

    Every token of several bytes is the result of a merge rule. If a token or a rule was changed,
    there is therefore a token without a rule. In most vocabularies, ids have the same order as the
    rules. For these vocabularies, the check also detects rules that are out of order.

    Raises:
        DataError: If an id or a rule is duplicated, if ids have gaps, if a token has no rule, or if
            a few rules are out of order.
    """
    ids = sorted(vocab.values())
    if len(set(ids)) != len(ids):
        raise DataError(f"{vocab_file}: two tokens have the same id; ids must be unique")
    if ids[0] != 0 or ids[-1] != len(ids) - 1:
        lacking = next(expected for expected, number in enumerate([*ids, -1]) if expected != number)
        raise DataError(f"{vocab_file}: no token has the id {lacking}, but ids must have no gaps")
    merged_ids = [vocab.get(left + right, -1) for left, right in merges]
    # Compare rules, not the tokens that they produce, because two rules may produce the same token.
    if len(set(merges)) != len(merges):
        raise DataError(f"{merge_file}: a rule is duplicated; the files are damaged")
    has_rule = set(merged_ids)
    alone = [
        token
        for token, number in vocab.items()
        if len(token) > 1 and number not in has_rule and _SPECIAL.fullmatch(token) is None
    ]
    if alone:
        raise DataError(
            f"{vocab_file} has {alone[0]!r} ({len(alone)} such tokens), which no rule of "
            f"{merge_file} produces; the files are damaged, or do not belong together"
        )
    rising = sum(after > before for before, after in itertools.pairwise(merged_ids))
    if _MOSTLY * (len(merged_ids) - 1) <= rising < len(merged_ids) - 1:
        index = next(n for n in range(1, len(merged_ids)) if merged_ids[n] < merged_ids[n - 1])
        raise DataError(
            f"{merge_file}: rule {index + 1} ({' '.join(merges[index])}) is out of order, "
            f"although ids of {vocab_file} follow the other rules; the files are damaged"
        )


class HuggingFaceTokenizer(_LibraryTokenizer):
    """Uses a Hugging Face tokenizer folder, with its special tokens and chat template.

    As in the ``transformers`` library, special tokens inside a document are recognized, but this
    class adds no special tokens. The end-of-document token is the ``eos_token`` in
    ``tokenizer_config.json`` or ``special_tokens_map.json``, otherwise the ``eos_token_id`` in
    ``config.json``.

    Args:
        folder: Path of the folder with ``tokenizer.json``, the value of ``--tokenizer-model``.

    Raises:
        DataError: If a file is missing or damaged, or no file sets the end-of-document token.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        text = read_text(self._folder / "tokenizer.json", _MODEL, DataError)
        try:
            encoder = FastTokenizer.from_str(text)
        except Exception as error:  # The library raises only the base class Exception.
            raise DataError(
                f"{folder}/tokenizer.json is not a tokenizer of the tokenizers library ({error})"
            ) from None
        encoder.no_padding()
        encoder.no_truncation()
        self._named = {
            name: token["content"] if isinstance(token, dict) else token
            for file in ("special_tokens_map.json", "tokenizer_config.json")
            for name, token in self._json(file).items()
            if name.endswith("_token") and isinstance(token, str | dict)
        }
        templates = self._find_templates()
        self._chat = None
        if "default" in templates:
            tokens = {name: text for name, text in self._named.items() if name in _TEMPLATE_TOKENS}
            self._chat = ChatTemplate(templates, tokens, folder)
        state = f"{text}\0{sorted(templates.items())}\0{self._named}\0{_CHAT_VERSION}"
        digest = hashlib.sha256(state.encode()).hexdigest()
        super().__init__(encoder, self._end(encoder), digest[:16])

    def conversation(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        if self._chat is None:
            return super().conversation(conversation)
        written = self._chat.write(conversation)
        # Add no special tokens, because the rendered text already contains all of them.
        encoding = self._encoder.encode(written.text, add_special_tokens=False)
        taught = [False] * len(encoding.ids)
        for start, stop in written.spans:
            _teach(taught, encoding, start, stop)
        return list(encoding.ids), taught

    def _find_templates(self) -> dict[str, str]:
        """Returns the text of each chat template in the folder, keyed by the template's name."""
        value = self._json("tokenizer_config.json").get("chat_template")
        if isinstance(value, list):
            value = {
                entry["name"]: entry["template"]
                for entry in value
                if isinstance(entry, dict) and {"name", "template"} <= entry.keys()
            }
        templates = value if isinstance(value, dict) else {"default": value}
        file = self._folder / "chat_template.jinja"
        if file.is_file():
            templates = {"default": read_text(file, _MODEL, DataError)}
        for path in sorted((self._folder / "additional_chat_templates").glob("*.jinja")):
            templates[path.stem] = read_text(path, _MODEL, DataError)
        return {name: text for name, text in templates.items() if isinstance(text, str)}

    def _end(self, encoder: FastTokenizer) -> int:
        token = self._named.get("eos_token")
        token_id = None if token is None else encoder.token_to_id(token)
        if token_id is None:
            token_id = self._json("config.json").get("eos_token_id")
            token_id = token_id[0] if isinstance(token_id, list) and token_id else token_id
        if type(token_id) is not int:
            fault = "no file sets the eos_token" if token is None else f"{token!r} is not a token"
            raise DataError(
                f"{self._folder}: {fault}, but it is needed as the end-of-document token; set "
                "eos_token in tokenizer_config.json"
            )
        return token_id

    def _json(self, name: str) -> dict[str, Any]:
        path = self._folder / name
        if not path.is_file():
            return {}
        try:
            # Parse leniently, because the transformers library writes 10^30 for an unlimited
            # length.
            content = parse_json(read_text(path, _MODEL, DataError), strict=False)
        except ValueError as error:
            raise DataError(f"{path} is not JSON ({error})") from None
        return content if isinstance(content, dict) else {}


class SentencePieceTokenizer(Tokenizer):
    """Tokenizes with a SentencePiece model.

    Args:
        file: Path of the model file, the value of ``--tokenizer-model``.
        begins: Whether a beginning-of-sequence token is added before each text, as for
            ``Llama2Tokenizer``.

    Raises:
        ConfigError: If the package sentencepiece is missing.
        DataError: If the file is missing or damaged, or has no end-of-sequence token.
    """

    def __init__(self, file: str | Path, *, begins: bool = False) -> None:
        package = need_package("sentencepiece", "SentencePieceTokenizer", "hf")
        content = read_bytes(Path(file), _MODEL, DataError)
        try:
            self._model = package.SentencePieceProcessor(model_proto=content, add_bos=begins)
        except RuntimeError:
            raise DataError(
                f"{file} is not a SentencePiece model; check --tokenizer-model"
            ) from None
        if self._model.eos_id() < 0:
            raise DataError(f"{file} has no end-of-sequence token; train the model with an eos_id")
        digest = hashlib.sha256(content + bytes([begins])).hexdigest()[:16]
        super().__init__(self._model.get_piece_size(), self._model.eos_id(), digest=digest)

    def tokenize(self, text: str) -> list[int]:
        return list(self._model.encode(without_surrogates(text)))

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return list(self._model.encode([*map(without_surrogates, texts)], num_threads=1))

    def detokenize(self, ids: Iterable[int]) -> str:
        return str(self._model.decode([int(i) for i in ids]))


class TikTokenizer(Tokenizer):
    """Wraps megatron-core's tiktoken tokenizer, in which special tokens have the lowest ids.

    Args:
        file: Path of a JSON list ``[{"rank": 0, "token_bytes": BASE64, "token_str": ""}, ...]``,
            the value of ``--tokenizer-model``.
        vocab_size: Number of token ids, including special tokens.
        num_special: Number of special tokens.
        pattern: Name of the regular expression that splits text into words, ``v1`` or ``v2``.
        special: Special tokens in the order of their ids, or ``None`` for those of megatron-core.
            Names such as ``<SPECIAL_7>`` are added if there are fewer than ``num_special`` tokens.

    Raises:
        ConfigError: If the package tiktoken is missing, or ``special`` does not contain a required
            token or repeats a token.
        DataError: If the file is missing or damaged, or the sizes do not match.
    """

    def __init__(
        self,
        file: str | Path,
        vocab_size: int,
        num_special: int,
        pattern: str,
        special: Sequence[str] | None = None,
    ) -> None:
        need_package("tiktoken", "TikTokenizer", "hf")
        content = read_bytes(Path(file), _MODEL, DataError)
        prepare_megatron_core()
        from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import (
            SPECIAL_TOKENS,
            TikTokenTokenizer,
        )

        if special is not None:
            _check_special_tokens(special, SPECIAL_TOKENS, num_special)
        try:
            built = TikTokenTokenizer(
                str(file),
                None if special is None else list(special),
                num_special,
                pattern=pattern,
                vocab_size=vocab_size,
            )
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError):
            raise DataError(
                f"{file} must be a .json list of objects with rank, token_bytes and token_str; "
                f"the first {vocab_size - num_special} objects (--vocab-size {vocab_size} minus "
                f"--tiktoken-num-special-tokens {num_special}) must have ranks 0, 1, 2, ...; "
                "check --tokenizer-model and both numbers"
            ) from None
        self._model = built.tokenizer
        about = f"{num_special} {pattern} {'' if special is None else json.dumps(list(special))}"
        digest = hashlib.sha256(about.encode() + content).hexdigest()[:16]
        super().__init__(vocab_size, built.eod, digest=digest)

    def tokenize(self, text: str) -> list[int]:
        return list(self._model.encode(text, allowed_special="all"))

    def detokenize(self, ids: Iterable[int]) -> str:
        return str(self._model.decode([int(i) for i in ids]))


def _check_special_tokens(
    special: Sequence[str], required: Sequence[str], num_special: int
) -> None:
    """Raises an error if the tokens ``special`` are not suitable for :class:`TikTokenizer`.

    ``special`` must contain the tokens ``required``, and at most ``num_special`` tokens.
    """
    flag = "--tiktoken-special-tokens"
    if missing := [token for token in required if token not in special]:
        raise ConfigError(
            f"{flag} {' '.join(special)} must contain {' '.join(required)}; add {' '.join(missing)}"
        )
    if len(set(special)) < len(special):
        raise ConfigError(f"{flag} {' '.join(special)} contains a token twice; remove one")
    if len(special) > num_special:
        raise ConfigError(
            f"{flag} contains {len(special)} tokens, but --tiktoken-num-special-tokens is "
            f"{num_special}; raise this number"
        )


class NullTokenizer(Tokenizer):
    """Reads token ids as decimal numbers separated by spaces, for mock data and measurements.

    As in Megatron-LM, the ids ``0..vocab_size-1`` are ordinary tokens, and ``vocab_size`` is the
    end-of-document id.

    Args:
        vocab_size: Number of ordinary token ids, the value of ``--vocab-size``.

    Raises:
        ConfigError: If ``vocab_size`` is not positive.
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ConfigError(f"--vocab-size must be at least 1, got {vocab_size}")
        super().__init__(vocab_size + 1, eod=vocab_size)

    def tokenize(self, text: str) -> list[int]:
        return [self._number(digits) for digits in text.split()]

    def heading(self, role: str) -> list[int]:
        return []  # This tokenizer has no token ids for the names of roles.

    def _number(self, digits: str) -> int:
        try:
            index = int(digits)
        except ValueError:
            raise DataError(
                f"NullTokenizer requires numbers separated by spaces, got {digits[:60]!r}; use "
                "GPT2BPETokenizer for text"
            ) from None
        if not 0 <= index <= self.eod:
            raise DataError(
                f"id {index} is outside 0..{self.eod}; raise --vocab-size above {self.eod}"
            )
        return index

    def detokenize(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(index)) for index in ids)


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Returns the tokenizer that ``config`` (``--tokenizer-type``) selects.

    Raises:
        ConfigError: If a required flag or package is missing, or ``--vocab-size`` is less than the
            tokenizer's number of ids.
        DataError: If a file is missing or damaged.
    """
    kind = config.tokenizer_type
    size = config.vocab_size
    model = config.tokenizer_model or ""
    if config.missing:
        raise ConfigError(f"{kind} requires {' and '.join(config.missing)}; add this flag")
    if config.tiktoken_special_tokens is not None and kind != "TikTokenizer":
        raise ConfigError(
            f"--tiktoken-special-tokens requires --tokenizer-type TikTokenizer, got {kind}; remove "
            "the flag, or add the tokens to the files of the tokenizer if it has any"
        )
    built: Tokenizer
    if kind == "NullTokenizer":
        return NullTokenizer(size or 0)
    if kind == "GPT2BPETokenizer":
        built = GPT2BPETokenizer(config.vocab_file or "", config.merge_file or "")
    elif kind == "HuggingFaceTokenizer":
        built = HuggingFaceTokenizer(model)
    elif kind == "TikTokenizer":
        special = config.tiktoken_num_special_tokens
        pattern, tokens = config.tiktoken_pattern, config.tiktoken_special_tokens
        built = TikTokenizer(model, size or _IDS_OF_TIKTOKEN, special, pattern, tokens)
    else:
        built = SentencePieceTokenizer(model, begins=kind == "Llama2Tokenizer")
    if size is not None and built.vocab_size > size:
        raise ConfigError(
            f"--vocab-size {size} is less than the {built.vocab_size} ids of the tokenizer "
            f"({kind}), so the model would have no embedding row for the last ids; use the "
            "model's tokenizer, or remove --vocab-size"
        )
    return built


def prepare_megatron_core() -> None:
    """Lets this process import megatron-core even if the machine has no CUDA."""
    if "megatron.core" not in sys.modules:
        from megatron.adaptive import accelerator

        accelerator.install()


def need_package(name: str, flag: str, extra: str) -> Any:
    """Returns the optional package ``name``, or raises an error that says how to install it.

    Args:
        name: Name of the package to import.
        flag: Flag or value that needs the package, for the error message.
        extra: Name of this project's pip extra that installs the package.

    Raises:
        ConfigError: If the package is missing.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"{flag} needs the package {name}, which is not installed; install "
            f"megatron-adaptive[{extra}], or remove the flag"
        ) from None


def _teach(taught: list[bool], encoding: Any, start: int, stop: int) -> None:
    """Marks the tokens of a range of characters as taught: the loss is computed on these tokens.

    A token that lies only partly in the range is taught too. If a character consists of several
    tokens, all of them are taught.

    Args:
        taught: Whether the loss is computed on each token. The list is changed in place.
        encoding: Tokens of the text with their offsets, from the ``tokenizers`` library.
        start: Offset of the first taught character in the text.
        stop: Offset after the last taught character.
    """
    if start == stop:
        return
    for number, (begin, end) in enumerate(encoding.offsets):
        if begin < stop and end > start:
            taught[number] = True
