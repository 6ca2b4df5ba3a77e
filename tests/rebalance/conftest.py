"""Makes the fixtures that create a trainer available to the tests in this folder."""

from __future__ import annotations

from tests.fixtures import corpus, make, tokenizer, worker, write_tokens

__all__ = ["corpus", "make", "tokenizer", "worker", "write_tokens"]
