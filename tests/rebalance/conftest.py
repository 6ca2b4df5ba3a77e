"""Imports the fixtures for tests that create a trainer."""

from __future__ import annotations

from tests.fixtures import corpus, make, tokenizer, worker, write_tokens

__all__ = ["corpus", "make", "tokenizer", "worker", "write_tokens"]
