"""The tokenizers: round trips, GPT-2's file form, padding, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from megatron.adaptive.data.corpus import Corpus
from megatron.adaptive.data.tokenizer import (
    END_OF_DOCUMENT,
    GPT2BPETokenizer,
    NullTokenizer,
    build_tokenizer,
    padded_vocab_size,
)
from megatron.adaptive.errors import ConfigError, DataError


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A tiny vocabulary: the bytes, two merges, the end of document."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc", END_OF_DOCUMENT]
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_text(json.dumps({symbol: i for i, symbol in enumerate(symbols)}))
    merges.write_text("#version: 0.2\na b\nab c\n")
    return vocab, merges


@pytest.mark.parametrize(
    "text",
    ["def f(x):\n\treturn x  # π ≈ 3.14", "", " \r\n\x00\x7f", "naïve ✓ 🙂 中文", "a" * 5000],
)
def test_text_survives_the_round_trip(tokenizer: GPT2BPETokenizer, text: str) -> None:
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    assert all(0 <= index < tokenizer.vocab_size for index in ids)
    assert tokenizer.tokenize_batch([text, "x"]) == [ids, tokenizer.tokenize("x")]


def test_merges_are_applied_best_first(files: tuple[Path, Path]) -> None:
    tokenizer = GPT2BPETokenizer(*files)
    tokens = [tokenizer.detokenize([index]) for index in tokenizer.tokenize("abcab b")]
    assert tokens == ["abc", "ab", " ", "b"]


def test_a_merge_line_may_begin_like_a_comment(files: tuple[Path, Path]) -> None:
    vocab, merges = files
    ids = json.loads(vocab.read_text())
    ids["##"] = len(ids)
    vocab.write_text(json.dumps(ids))
    merges.write_text("# #\n")
    assert GPT2BPETokenizer(vocab, merges).tokenize("##") == [ids["##"]]


def test_end_of_document_in_the_text_is_text(tokenizer: GPT2BPETokenizer) -> None:
    ids = tokenizer.tokenize(f"a{END_OF_DOCUMENT}b")
    assert tokenizer.eod not in ids
    assert tokenizer.detokenize(ids) == f"a{END_OF_DOCUMENT}b"


def test_lone_surrogates_are_replaced_and_pairs_joined(tokenizer: GPT2BPETokenizer) -> None:
    text = json.loads(r'"x\ud800y"') + "\ud83d\ude42"
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == "x\ufffdy🙂"
    assert tokenizer.tokenize_batch([text]) == [tokenizer.tokenize(text)]


def test_identity_follows_the_content_not_the_place(corpus: Corpus, tmp_path: Path) -> None:
    here = GPT2BPETokenizer(corpus.vocab_file, corpus.merge_file)
    shutil.copy(corpus.vocab_file, tmp_path / "v.json")
    merges = corpus.merge_file.read_text(encoding="utf-8").rstrip("\n").split("\n")
    (tmp_path / "m.txt").write_text("\n".join(merges), encoding="utf-8")
    (tmp_path / "fewer.txt").write_text("\n".join(merges[:-1]), encoding="utf-8")
    moved = GPT2BPETokenizer(tmp_path / "v.json", corpus.merge_file)
    other = GPT2BPETokenizer(tmp_path / "v.json", tmp_path / "fewer.txt")
    assert moved.unique_identifiers == here.unique_identifiers
    assert other.unique_identifiers != here.unique_identifiers
    assert NullTokenizer(5).unique_identifiers != NullTokenizer(6).unique_identifiers


@pytest.mark.parametrize(
    ("size", "multiple", "ranks", "padded"),
    [(50257, 128, 1, 50304), (50257, 128, 2, 50432), (8192, 128, 8, 8192), (1, 1, 1, 1)],
)
def test_padding_gives_every_rank_an_aligned_share(
    size: int, multiple: int, ranks: int, padded: int
) -> None:
    assert padded_vocab_size(size, multiple, ranks) == padded


def test_null_tokenizer_puts_the_end_on_top() -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.tokenize("3 0\n99 100") == [3, 0, 99, 100]
    assert tokenizer.detokenize([3, 0]) == "3 0"


@pytest.mark.parametrize(("text", "message"), [("3 x", "'x'"), ("101", "0..100"), ("-1", "0..100")])
def test_null_tokenizer_refuses_what_is_no_id(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        NullTokenizer(100).tokenize(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("SentencePiece",), "GPT2BPETokenizer or NullTokenizer"),
        (("GPT2BPETokenizer",), "--vocab-file"),
        (("GPT2BPETokenizer", "vocab.json"), "--merge-file"),
        (("NullTokenizer",), "--vocab-size"),
    ],
)
def test_missing_flags_are_named(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(*arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{broken", "is not JSON"),
        ("[1, 2]", "list instead of"),
        ("{}", "filled JSON object"),
        ('{"a": "b"}', "token 'a' has id 'b'"),
        ('{"a": -1}', "token 'a' has id -1"),
        ('{"a": 1, "b": 1}', "share an id"),
        ('{"a": 0}', "no token '<|endoftext|>'"),
        ('{"a": 0, "<|endoftext|>": 1}', "lacks 255 of the 256 byte symbols"),
        (b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_broken_vocabularies_are_named(
    files: tuple[Path, Path], content: str | bytes, message: str
) -> None:
    vocab, merges = files
    vocab.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError) as caught:
        GPT2BPETokenizer(vocab, merges)
    assert str(caught.value).startswith(f"{vocab}: ")
    assert message in str(caught.value)
    vocab.unlink()
    with pytest.raises(DataError, match="vocab.json: no such file; --vocab-file"):
        GPT2BPETokenizer(vocab, merges)


@pytest.mark.parametrize(
    ("content", "place", "message"),
    [
        ("a b\nab c d\n", ":2", "two tokens parted by one space"),
        ("a  b\n", ":1", "two tokens parted by one space"),
        ("a b\nb a\n", ":2", "token 'ba' is not in"),
    ],
)
def test_broken_merges_are_named_with_their_line(
    files: tuple[Path, Path], content: str, place: str, message: str
) -> None:
    vocab, merges = files
    merges.write_text(content)
    with pytest.raises(DataError) as caught:
        GPT2BPETokenizer(vocab, merges)
    assert str(caught.value).startswith(f"{merges}{place}: ")
    assert message in str(caught.value)
