"""Tests samples that are single documents: packing, padding, masks, and that all are used."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.adaptive.config.data import DataConfig
from megatron.adaptive.data.datasets import build_datasets
from megatron.adaptive.data.lengths import left_out
from megatron.adaptive.data.loader import Deal, LengthMicrobatches, MicrobatchLoader
from megatron.adaptive.data.tokenizer import NullTokenizer
from megatron.adaptive.errors import ConfigError, DataError
from megatron.adaptive.schedule.document_rows import Batching, most_slices
from megatron.adaptive.schedule.pack_documents import first_fit

LONGEST = 12


def build(path: object, tmp_path: Path, samples: int, **more: Any) -> Any:
    data = DataConfig(
        data_path=(str(path),),
        data_cache_path=str(tmp_path / "cache"),
        split="1",
        variable_seq_lengths=True,
        **more,
    )
    return build_datasets(
        data, NullTokenizer(200), seq_length=LONGEST, seed=3, train_samples=samples
    )[0]


@pytest.mark.parametrize("unit", [1, 2, 6])
def test_rows_hold_every_sample_once_and_no_more_than_fits(unit: int) -> None:
    rng = np.random.default_rng(1)
    for count in (unit, 2 * unit, 24 * unit):
        lengths = rng.integers(1, 11, count).tolist()
        rows = first_fit(lengths, 10, unit)
        assert len(rows) % unit == 0
        assert sorted(sample for row in rows for sample in row) == list(range(count))
        assert max(sum(lengths[n] for n in row) for row in rows) <= 10
        assert len(rows) <= -(-(11 / 9 * sum(lengths) / 5 + 1) // unit) * unit
    assert first_fit([7, 3, 9, 2, 5, 4], 10) == [[0, 1], [2], [3], [4, 5]]


@pytest.mark.parametrize("replicas", [1, 3])
def test_rows_of_slices_are_equal_and_hold_the_longest_document(replicas: int) -> None:
    rng = np.random.default_rng(5)
    for tokens in (16, 100, 700):
        lengths = np.clip(rng.lognormal(4.0, 1.5, 96), 1, 1750).astype(int).tolist()
        batching = Batching(micro_batch_size=1, varies=True, replicas=replicas, slice_tokens=tokens)
        steps = [LengthMicrobatches(lengths, batching, rank, None) for rank in range(replicas)]
        sizes = {size for step in steps for size in step.sizes}
        assert len(sizes) == 1
        width = sizes.pop()
        slices, rest = divmod(width, tokens)
        least = -(-max(lengths) // tokens)
        assert not rest
        assert least <= slices <= most_slices(least)
        rows = [row for step in steps for _, *row in step.contents]
        assert sorted(length for row in rows for length in row) == sorted(lengths)
        assert len(rows) == steps[0].load.num_microbatches
        # Packing into rows of exactly the required length must not need less space.
        exact = replace(batching, slice_tokens=None, pack_to=least * tokens)
        assert len(rows) * slices <= len(exact.plan(lengths)) * least


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_row_has_as_many_slices_as_its_longest_document_needs(replicas: int) -> None:
    rng = np.random.default_rng(6)
    for tokens in (16, 100, 700):
        lengths = np.clip(rng.lognormal(4.0, 1.5, 96), 1, 1750).astype(int).tolist()
        batching = Batching(
            micro_batch_size=1,
            varies=True,
            replicas=replicas,
            slice_tokens=tokens,
            varies_slices=True,
        )
        steps = [LengthMicrobatches(lengths, batching, rank, None) for rank in range(replicas)]
        rows = [row for step in steps for row in step.contents]
        for width, *documents in rows:
            assert sum(documents) <= width
            assert width == max(-(-sum(documents) // tokens), 1) * tokens
        assert sorted(length for _, *row in rows for length in row) == sorted(lengths)
        assert len(rows) % replicas == 0
        # If there is only one replica, a row must not have more slices than its longest document
        # needs.
        if replicas == 1:
            assert all(width == -(-max(row) // tokens) * tokens for width, *row in rows)


def test_microbatches_tell_their_positions() -> None:
    batching = Batching(micro_batch_size=2, varies=True, replicas=1, multiple=4, shortest=8)
    step = LengthMicrobatches([3, 9, 1, 2], batching, 0, None)
    # The samples of 3 and 9 tokens are padded to 12 tokens, and the other two to the minimum of 8
    # tokens.
    assert step.sizes == (24, 16)


def test_too_few_samples_for_every_replica_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 3 samples, .* at least 4, .* multiple of 4"):
        first_fit([1, 1, 1], 10, 4)


@pytest.mark.parametrize("pack_to", [None, 2 * LONGEST])
def test_every_shape_takes_the_same_documents(
    write_tokens: Callable[..., str], tmp_path: Path, pack_to: int | None
) -> None:
    """Checks that all numbers of replicas use the same documents, even in a resumed run."""
    prefix = write_tokens([[n] * (1 + n % 16) for n in range(1, 50)])
    dataset = build(prefix, tmp_path, 96)
    assert left_out([dataset]) == (
        "9 documents are cut at --seq-length, "
        "3 documents are skipped because they have no token to predict"
    )

    def taken(
        replicas: int, consumed: int, steps: int, deal: Deal | None = None
    ) -> list[list[tuple[int, ...]]]:
        batching = Batching(micro_batch_size=1, varies=True, pack_to=pack_to, replicas=replicas)
        options = {"consumed_samples": consumed, "batching": batching}
        loaders = [MicrobatchLoader(dataset, dp_rank=r, **options) for r in range(replicas)]
        silent = MicrobatchLoader(dataset, dp_rank=0, reads=False, **options)
        steps_read = []
        for _ in range(steps):
            # Replicas may get different numbers of microbatches if they are assigned by cost.
            parts = [loader.step(16 // replicas, deal) for loader in loaders]
            beside = silent.step(16 // replicas, deal)
            assert len(parts[0]) == len(beside)
            assert deal is None or replicas == 1 or len({len(part) for part in parts}) > 1
            documents: list[tuple[int, ...]] = []
            for batch in (batch for part in parts for batch in part):
                rows = batch["tokens"][batch["loss_mask"] > 0]
                lengths = batch["lengths"].tolist() if pack_to else [len(rows)]
                documents += [tuple(document.tolist()) for document in rows.split(lengths)]
                if pack_to:
                    positions = batch["position_ids"][0].split(lengths)
                    assert all(p.tolist() == list(range(len(p))) for p in positions)
                assert batch["tokens"].shape[1] <= (pack_to or LONGEST)
            assert parts[0].load.tokens == sum(map(len, documents))
            if pack_to:
                rows_of_replica = parts[0]
                assert [b["lengths"].tolist() for b in rows_of_replica] == [
                    b["lengths"].tolist() for b in beside
                ]
            steps_read.append(sorted(documents))
        return steps_read

    whole = taken(1, 0, 6)
    assert taken(2, 0, 2) + taken(4, 32, 4) == whole
    assert taken(2, 0, 6, lambda sizes: (range(1, len(sizes)), [0])) == whole
    assert max(len(document) for step in whole for document in step) == LONGEST


def test_only_what_the_assistant_says_is_taught(tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    talk = [
        ("system", "9"),
        ("user", "1 2"),
        ("assistant", "3 4"),
        ("user", "5"),
        ("assistant", "6"),
    ]
    lines = [{"messages": [{"role": role, "content": text} for role, text in talk]}]
    # There is nothing to learn in this conversation, because it has no answer.
    lines += [{"messages": [{"role": "user", "content": "7"}]}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    sample = build(path, tmp_path, 1, sft=True)[0]
    end = 200
    assert sample["tokens"].tolist() == [9, end, 1, 2, end, 3, 4, end, 5, end, 6]
    assert sample["labels"].tolist() == [end, 1, 2, end, 3, 4, end, 5, end, 6, end]
    assert sample["loss_mask"].tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("line", ["{", "{}", '{"messages": []}', '{"messages": [{"role": "x"}]}'])
def test_a_line_that_is_no_conversation_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match=r"talks.jsonl:1 is not a conversation"):
        build(path, tmp_path, 1, sft=True)


WELL = {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2 3"}]}


@pytest.mark.parametrize(
    "line",
    [
        b"\xef\xbb\xbf" + json.dumps(WELL).encode(),
        json.dumps({**WELL, "score": float("nan")}).encode(),
        json.dumps({**WELL, "score": float("-inf"), "id": 10**40}).encode(),
        json.dumps(WELL)[:-1].encode() + b', "id": ' + b"9" * 6000 + b', "x": 1e999}',
        json.dumps(WELL).encode() + b"\r",
        json.dumps({**WELL, "tools": [{"type": "function"}], "lang": None}).encode(),
    ],
)
def test_what_nobody_reads_does_not_count(tmp_path: Path, line: bytes) -> None:
    """Checks that byte order marks, Windows line endings and unused fields are ignored."""
    path = tmp_path / "talks.jsonl"
    path.write_bytes(line + b"\n" + json.dumps(WELL).encode() + b"\n")
    dataset = build(path, tmp_path, 2, sft=True)
    assert [dataset[n]["tokens"].tolist() for n in range(2)] == [[1, 200, 2, 3]] * 2
    assert dataset[0]["loss_mask"].tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": "weather"}, "talks.jsonl:1: tools must be a list of objects"),
        ({"documents": [1]}, "talks.jsonl:1: documents must be a list of objects"),
        (
            {"messages": [{"role": "assistant", "content": 5}]},
            "talks.jsonl:1 is not a conversation",
        ),
        (
            {"messages": [{"role": "assistant", "content": None}]},
            "talks.jsonl:1: without a chat template, a message must be text with role system, user",
        ),
        (
            {"messages": [{"role": "tool", "content": "1"}, {"role": "assistant", "content": "2"}]},
            "without a chat template, .* is a str with role 'tool'; use a tokenizer",
        ),
    ],
)
def test_fields_of_another_kind_are_named(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({**WELL, **fields}) + "\n")
    with pytest.raises(DataError, match=message):
        build(path, tmp_path, 1, sft=True)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "talks.jsonl")
    with pytest.raises(DataError, match="talks.jsonl is not a regular file"):
        build(tmp_path / "talks.jsonl", tmp_path, 1, sft=True)
