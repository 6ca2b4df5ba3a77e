"""Imports the fixtures that build a trainer, so that the tests in this folder find them."""

from __future__ import annotations

from tests.checkpoint.keepers import keepers
from tests.fixtures import corpus, make, tokenizer, worker, write_tokens

__all__ = ["corpus", "keepers", "make", "tokenizer", "worker", "write_tokens"]
