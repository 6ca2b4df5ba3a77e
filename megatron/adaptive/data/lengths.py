"""Provides samples of different lengths. Each sample is one document or conversation.

A sample is truncated after ``--seq-length`` tokens, and contains tokens of only one document.

This module imports megatron-core. On a machine without CUDA, import it only after
:func:`megatron.adaptive.accelerator.install` was called.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset

from megatron.adaptive.config.input_files import open_file, parse_json
from megatron.adaptive.data.chat import REASONING, TAUGHT_ROLE, Conversation
from megatron.adaptive.data.tokenizer import Tokenizer
from megatron.adaptive.errors import DataError

_MOCK_DOCUMENTS = 100_000
_MOCK_SIGMA = 0.8
"""Standard deviation of the logarithm of mock documents' lengths; typical for web corpora."""
_MOCK_MEDIAN = 0.25
"""Median length of a mock document, as a fraction of ``--seq-length``."""
_MOST_ORDERS = 2
"""Maximum number of epochs whose order of documents is kept in memory."""


class DocumentDataset(MegatronDataset):
    """Provides documents as samples, in a different random order in each epoch.

    Attributes:
        num_cut: Number of documents that are truncated because they are longer than
            ``--seq-length``.
        num_empty: Number of documents that are skipped because they have fewer than two tokens, so
            that there is no token to predict.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # A sample is one token shorter than its document, because the last token is only a label.
        lengths = np.asarray(self.dataset.sequence_lengths)[self.indices].astype(np.int64) - 1
        is_used = lengths > 0
        longest = self.config.sequence_length
        self.num_empty = int((~is_used).sum())
        self.num_cut = int((lengths > longest).sum())
        self._documents = self.indices[is_used]
        self._lengths = np.minimum(lengths[is_used], longest)
        self._orders: dict[int, npt.NDArray[np.int64]] = {}
        if not self._documents.size:
            raise DataError(
                f"{self.dataset_path}: the {self.index_split.name} split has no document of two "
                "tokens or more; change --split or the data"
            )

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Returns the number of documents that are divided by ``--split``."""
        return len(low_level_dataset.sequence_lengths)

    @staticmethod
    def build_low_level_dataset(dataset_path: Any, config: Any) -> Any:
        """Opens the file ``dataset_path``, or generates mock documents if the path is ``None``.

        The file contains JSON lines with ``--sft``, and tokens otherwise.
        """
        if dataset_path is None:
            return _MockDocuments(config.tokenizer, config.sequence_length)
        if config.sft:
            return config.prepare(dataset_path)
        return GPTDataset.build_low_level_dataset(dataset_path, config)

    def __len__(self) -> int:
        return self._documents.size if self.num_samples is None else int(self.num_samples)

    def length_of(self, index: int) -> int:
        """Returns the number of tokens of the sample ``index``, without reading the tokens."""
        return int(self._lengths[self._row(index)])

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[Any]]:
        row = self._row(index)
        document = int(self._documents[row])
        length = int(self._lengths[row])
        ids = np.asarray(self.dataset.get(document, 0, length + 1), dtype=np.int64)
        sample = {"tokens": ids[:-1], "labels": ids[1:], "position_ids": np.arange(length)}
        taught = getattr(self.dataset, "is_taught", None)
        mask = np.ones(length) if taught is None else taught(document, length + 1)[1:]
        return {**sample, "loss_mask": mask.astype(np.float32)}

    def _row(self, index: int) -> int:
        epoch, position = divmod(int(index), self._documents.size)
        if epoch not in self._orders:
            if len(self._orders) >= _MOST_ORDERS:
                self._orders.pop(min(self._orders))
            key = [self.config.random_seed, self.index_split.value, epoch]
            self._orders[epoch] = np.random.default_rng(key).permutation(self._documents.size)
        return int(self._orders[epoch][position])


def left_out(datasets: Sequence[Any]) -> str:
    """Returns a phrase with the numbers of truncated and skipped documents in ``datasets``.

    The phrase is empty if there are none.
    """
    parts = [
        part for dataset in datasets for part in getattr(dataset, "datasets", [dataset]) if part
    ]
    cut, empty = (sum(getattr(p, n, 0) for p in parts) for n in ("num_cut", "num_empty"))
    clauses = [f"{cut} documents are cut at --seq-length"] * bool(cut)
    clauses += [f"{empty} documents are skipped because they have no token to predict"] * bool(
        empty
    )
    return ", ".join(clauses)


class _MockDocuments:
    """Generates mock documents with log-normal lengths, which are the same in every run."""

    def __init__(self, tokenizer: Tokenizer, seq_length: int) -> None:
        self._tokenizer = tokenizer
        drawn = np.random.default_rng(0).lognormal(0.0, _MOCK_SIGMA, _MOCK_DOCUMENTS)
        most = 1.0 * seq_length
        self.sequence_lengths = 1 + np.clip(drawn * most * _MOCK_MEDIAN, 1, most).astype(np.int32)

    def get(self, index: int, offset: int, length: int) -> npt.NDArray[np.int64]:
        ids = (index + np.arange(offset, offset + length)) % self._tokenizer.eod
        if offset + length == self.sequence_lengths[index]:
            ids[-1] = self._tokenizer.eod
        return ids


class Conversations:
    """Tokens of conversations, each with a flag that states whether the loss is computed on it.

    The loss is computed only on *taught* tokens: the assistant's text and the tokens that end it.

    Args:
        ids: Token ids of all conversations, concatenated, ``[tokens] int32``.
        taught: Whether each token is taught, ``[tokens] bool``.
        ends: Offset in ``ids`` at which each conversation begins, followed by the total number of
            tokens, ``[conversations + 1] int64``.
    """

    def __init__(
        self, ids: npt.NDArray[Any], taught: npt.NDArray[Any], ends: npt.NDArray[Any]
    ) -> None:
        self._ids = ids
        self._taught = taught
        self._ends = ends
        self.sequence_lengths = np.diff(ends)

    def get(self, index: int, offset: int, length: int) -> npt.NDArray[Any]:
        """Returns ``length`` token ids of conversation ``index``, beginning at token ``offset``."""
        start = int(self._ends[index]) + offset
        return self._ids[start : start + length]

    def is_taught(self, index: int, length: int) -> npt.NDArray[Any]:
        """Returns whether each of the first ``length`` tokens is taught, as an array of flags.

        The loss is computed only on taught tokens. ``index`` is the index of the conversation.
        """
        start = int(self._ends[index])
        return self._taught[start : start + length]

    @staticmethod
    def broken_rule(arrays: Sequence[npt.NDArray[Any]], vocab_size: int) -> str:
        """Describes what is wrong with ``arrays``. The result is empty if they are valid.

        ``vocab_size`` is the number of tokens in the vocabulary.
        """
        ids, taught, ends = arrays
        is_ids = ids.dtype == np.int32 and ids.ndim == 1
        if not is_ids or taught.dtype != np.bool_ or taught.shape != ids.shape:
            return "the arrays of tokens and of loss flags do not match"
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            return "a token is outside the vocabulary"
        if ends.dtype != np.int64 or ends.ndim != 1 or not ends.size:
            return "the ends of conversations are not integers"
        if int(ends[0]) or int(ends[-1]) != ids.size or bool(np.any(np.diff(ends) < 0)):
            return "the ends of conversations do not increase up to the number of tokens"
        return ""

    @staticmethod
    def read(path: str, tokenizer: Tokenizer) -> tuple[npt.NDArray[Any], ...]:
        """Tokenizes the JSON lines in ``path``, each ``{"messages": [{"role": ..., ...}, ...]}``.

        The fields ``messages``, ``tools`` and ``documents`` of a line are passed to the chat
        template; other fields are ignored.

        Returns:
            Token ids, flags of taught tokens, and offsets, which are the arguments of
            :class:`Conversations`. A conversation without a message from the assistant has no
            tokens.

        Raises:
            DataError: If a line is not a conversation, or the file cannot be read.
        """
        ids: list[int] = []
        taught: list[bool] = []
        ends = [0]
        try:
            with io.TextIOWrapper(open_file(path), encoding="utf-8-sig") as lines:
                for number, line in enumerate(lines, start=1):
                    if not line.strip():
                        continue
                    conversation = _conversation(line, f"{path}:{number}")
                    if any(message["role"] == TAUGHT_ROLE for message in conversation.messages):
                        try:
                            new_ids, new_taught = tokenizer.conversation(conversation)
                        except DataError as error:
                            raise DataError(f"{path}:{number}: {error}") from None
                        ids += new_ids
                        taught += new_taught
                    ends.append(len(ids))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"cannot read {path} ({error}); --sft requires JSON lines of conversations"
            ) from None
        return np.array(ids, np.int32), np.array(taught, np.bool_), np.array(ends, np.int64)


def _conversation(line: str, where: str) -> Conversation:
    """Parses ``line``, a JSON line, as a conversation.

    ``where`` contains the path of the file and the number of the line.

    Raises:
        DataError: If the line is not a conversation. The message states the file and the line.
    """
    try:
        # Parse leniently, because ignored fields may contain numbers of any size.
        fields = parse_json(line, strict=False)
        messages = fields["messages"]
        extras = [fields.get(name) for name in ("tools", "documents")]
    except (ValueError, TypeError, KeyError):
        messages = None
        extras = []
    has_messages = isinstance(messages, list) and messages
    if not has_messages or not all(isinstance(m, dict) and _is_message(m) for m in messages):
        raise DataError(
            f"{where} is not a conversation; write "
            f'{{"messages": [{{"role": "user", "content": "..."}}, ...]}}'
        )
    for name, value in zip(("tools", "documents"), extras, strict=True):
        is_list = isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
        if value is not None and not is_list:
            raise DataError(
                f"{where}: {name} must be a list of objects; write a list, or remove the key"
            )
    tools, documents = extras
    return Conversation(messages=messages, tools=tools, documents=documents)


def _is_message(message: dict[str, Any]) -> bool:
    content = message.get("content")
    says = any(key in message for key in ("content", "tool_calls", *REASONING))
    is_content = content is None or isinstance(content, str | list)
    return isinstance(message.get("role"), str) and says and is_content
