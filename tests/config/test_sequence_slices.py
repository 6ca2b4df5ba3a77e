"""Tests how sequences are cut into slices of equal cost or equal length."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.sequence_slices import (
    LEAST_TOKENS,
    SliceRule,
    first_tokens,
    least_row,
    slice_ends,
    tokens_to_choose,
)
from megatron.adaptive.errors import ConfigError


def cost(end: int, length: int, share: float) -> float:
    """Returns the cost of the first ``end`` of ``length`` tokens, as a fraction of the whole cost.

    ``share`` is the fraction of the whole cost that is due to attention.
    """
    part = end / length
    return (1 - share) * part + share * part**2


@given(
    slices=st.integers(1, 16),
    multiple=st.sampled_from([1, 2, 4, 8]),
    blocks=st.integers(16, 4000),
    share=st.floats(0, 1),
)
def test_slices_cover_the_sequence(slices: int, multiple: int, blocks: int, share: float) -> None:
    length = blocks * multiple
    if slices > 1 and blocks // slices * multiple < LEAST_TOKENS:
        with pytest.raises(ConfigError, match=f"--sequence-slices {slices} ") as caught:
            slice_ends(length, slices, multiple, share)
        # The number of slices that the error suggests must be valid.
        most = int(str(caught.value).split("use ")[1].split()[0])
        assert most < slices
        slices = most
    ends = slice_ends(length, slices, multiple, share)
    assert ends[-1] == length
    lengths = [end - start for start, end in pairwise((0, *ends))]
    assert len(ends) == 1 or min(lengths) >= LEAST_TOKENS
    assert all(end % multiple == 0 for end in ends)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 1.0])
def test_slices_cost_the_same(share: float) -> None:
    ends = slice_ends(64_000, 8, 1, share)
    costs = [cost(b, 64_000, share) - cost(a, 64_000, share) for a, b in pairwise((0, *ends))]
    assert costs == pytest.approx([1 / 8] * 8, rel=1e-3)


@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=30),
    slices=st.integers(1, 12),
    tokens=st.none() | st.sampled_from([16, 64, 512]),
    multiple=st.sampled_from([1, 2, 8]),
    pair_cost=st.floats(0, 0.1),
)
def test_slices_hold_every_token_of_every_document(
    lengths: list[int], slices: int, tokens: int | None, multiple: int, pair_cost: float
) -> None:
    rule = SliceRule(
        slices=slices, tokens=tokens, multiple=multiple, pair_cost=pair_cost, is_packed=True
    )
    unit = tokens or multiple
    width = -(-max(sum(lengths), least_row(slices, multiple)) // unit) * unit
    cut = rule.cut(width, lengths)
    assert cut.ends[-1] == width
    sizes = [end - start for start, end in pairwise((0, *cut.ends))]
    assert min(sizes) >= LEAST_TOKENS
    assert max(sizes) <= rule.most_tokens(width, max(*lengths, width - sum(lengths)))
    assert all(size % multiple == 0 for size in sizes)
    assert len(sizes) == slices if tokens is None else set(sizes) == {tokens}
    parts = [part for index in range(len(sizes)) for part in cut.pieces(index)]
    # Parts must follow each other without a gap, and the parts of a document must cover it
    # completely.
    assert all(before.end == after.start for before, after in pairwise(parts))
    begins = [part.begin for part in parts if part.start == part.begin]
    ends = [part.close for part in parts if part.end == part.close]
    of_documents = [end - begin for begin, end in zip(begins, ends, strict=True)]
    assert of_documents[: len(lengths)] == lengths
    assert tokens is None or max([0, *of_documents[len(lengths) :]]) <= tokens
    kept = sum(cut.kept_tokens(index) for index in range(len(sizes)))
    assert kept == sum(part.end - part.start for part in parts if not part.is_whole)


def test_slices_of_documents_cost_the_same() -> None:
    lengths = [40_000, 100, 20_000, 3_900]
    cut = SliceRule(slices=8, pair_cost=1e-4, is_packed=True).cut(64_000, lengths)

    def cost_of(index: int) -> float:
        def until(tokens: int) -> float:
            return tokens + 1e-4 * tokens**2

        parts = cut.pieces(index)
        return sum(until(p.end - p.begin) - until(p.start - p.begin) for p in parts)

    costs = [cost_of(index) for index in range(8)]
    assert costs == pytest.approx([sum(costs) / 8] * 8, rel=1e-3)


def test_lengths_to_choose_from_are_halves_of_the_longest_document() -> None:
    assert tokens_to_choose(8192, 1) == (8192, 4096, 2048, 1024, 512, 256)
    assert first_tokens(8192, 1) == 1024
    assert tokens_to_choose(1000, 8) == (1000, 504, 256, 128, 64, 32)
    assert tokens_to_choose(40, 1) == (40, 20, 16)
    assert first_tokens(40, 1) == 16
    assert tokens_to_choose(16, 1) == (16,)


@given(
    documents=st.lists(st.integers(1, 200), min_size=1, max_size=8),
    tokens=st.sampled_from([16, 64, 512]),
)
def test_the_work_of_slices_adds_up_to_that_of_the_documents(
    documents: list[int], tokens: int
) -> None:
    width = -(-sum(documents) // tokens) * tokens
    cut = SliceRule(slices=1, tokens=tokens, is_packed=True).cut(width, documents)
    works = [cut.work(index) for index in range(len(cut.ends))]
    assert [size for size, _ in works] == [tokens] * len(works)
    lengths = [end - start for start, end in pairwise((0, *cut.documents))]
    assert sum(pairs for _, pairs in works) == sum(length**2 for length in lengths)


LENGTHS = "--variable-seq-lengths --slice-tokens"
AUTO = "--pipeline-schedule auto --slice-tokens"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--slice-tokens 8", "8 is too small; give at least 16"),
        ("--slice-tokens 64 --sequence-slices 2", "exclude each other"),
        (f"{LENGTHS} 64 --pack-to 4096", "exclude each other"),
        (f"{LENGTHS} 64 --micro-batch-size 2", "exclude each other"),
        (
            f"{LENGTHS} 18 --tensor-model-parallel-size 4 --sequence-parallel",
            "--slice-tokens 18 is not a multiple of --tensor-model-parallel-size 4",
        ),
        (f"{LENGTHS} 64 --pipeline-schedule 1f1b", "other schedules do not support slices"),
        (
            f"{LENGTHS} 64 --pipeline-schedule seq-1f1b --repartition auto "
            "--pipeline-model-parallel-size 2",
            "ranks hold unequal numbers of slices",
        ),
        (f"{LENGTHS} auto", "--slice-tokens auto requires --pipeline-schedule auto, got"),
        (f"{AUTO} auto --pipeline-model-parallel-size 2", "auto requires --variable-seq-lengths"),
        (
            f"{AUTO} 64 --pipeline-model-parallel-size 2",
            "sequences of equal length use --sequence-slices",
        ),
        (f"{AUTO} auto --variable-seq-lengths", "a single rank has no waiting time"),
        (
            f"{AUTO} auto --variable-seq-lengths --pipeline-model-parallel-size 2 --seq-length 16",
            "--slice-tokens auto requires documents of at least 32 tokens, got --seq-length 16",
        ),
    ],
)
def test_what_does_not_go_with_a_length_of_slices_is_refused(flags: str, message: str) -> None:
    base = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 "
        "--global-batch-size 8 --train-iters 1 --lr 1e-3 --mock-data --vocab-size 64 "
        "--max-position-embeddings 4096 --seq-length 4096"
    )
    with pytest.raises(ConfigError, match=message) as caught:
        parse(f"{base} {flags}".split(), world_size=4, last_wins=True)
    assert "\n" not in str(caught.value)


def test_the_share_of_attention_follows_the_model() -> None:
    flags = (
        "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --micro-batch-size 1 "
        "--global-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --vocab-size 64 "
        "--max-position-embeddings 8192 --seq-length 8192 --sequence-slices 4"
    )

    def lengths(more: str) -> list[int]:
        config = parse(f"{flags} {more}".split(), world_size=1)
        return [end - start for start, end in pairwise((0, *config.slice_ends))]

    # Products with weights need 12 h^2 multiplications per token. A token attends to s / 2 tokens
    # on average, which needs h s multiplications.
    share = parse(flags.split(), world_size=1).attention_share
    assert share == pytest.approx(8192 / (12 * 256 + 8192))
    by_cost = lengths("")
    assert sorted(by_cost, reverse=True) == by_cost
    assert by_cost[0] > 1.5 * by_cost[-1]
    assert lengths("--slice-cut equal-length") == [2048] * 4
    assert lengths("--window-size 127,0") == [2048] * 4


def test_elastic_jobs_do_not_measure_speeds_of_varying_slices() -> None:
    text = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 64 --lr 1e-3"
    text += " --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4"
    text += " --train-iters 1 --mock-data --vocab-size 100 --tokenizer-type NullTokenizer"
    for flags, balance in (("", "both"), (LENGTHS + " 16", "lengths")):
        config = parse([*text.split(), *flags.split()], world_size=2).in_elastic_job()
        assert config.balance == balance
