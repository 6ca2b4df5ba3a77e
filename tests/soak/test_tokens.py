"""Tests on a short text that each tokenizer returns the same tokens as its library."""

from __future__ import annotations

import pytest

from tests.soak import tokens


@pytest.mark.long
def test_every_tokenizer_gives_the_tokens_of_its_library() -> None:
    pytest.importorskip("tiktoken")
    rows = tokens.compare(0.2).rows
    assert len(rows) == 5
    assert [row.what for row in rows if not row.met] == []


def test_another_token_is_counted() -> None:
    kinds: tokens.Kinds = {"NullTokenizer": ({"vocab_size": 9}, lambda text: [1])}
    (row,) = tokens._different_documents(kinds, ["1", "3"], "")
    assert (row.value, row.met) == (1, False)
