"""Which samples there are: blends, splits, masks, and data that is refused before it hangs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.adaptive.data.corpus import Corpus
from megatron.adaptive.data.datasets import (
    Blend,
    DataSpec,
    build_datasets,
    parse_blend,
    parse_split,
)
from megatron.adaptive.data.loader import MicrobatchLoader
from megatron.adaptive.data.tokenizer import GPT2BPETokenizer, NullTokenizer
from megatron.adaptive.errors import ConfigError, DataError

Write = Callable[..., str]
LENGTH = 16


def _spec(prefix: object, tmp_path: Path, **changes: object) -> DataSpec:
    settings: dict[str, object] = {
        "seq_length": LENGTH,
        "seed": 7,
        "data_path": (str(prefix),) if not isinstance(prefix, tuple) else prefix,
        "data_cache_path": str(tmp_path / "cache"),
        **changes,
    }
    return DataSpec(**settings)  # type: ignore[arg-type]


def _numbered(count: int, length: int, first: int = 0) -> list[list[int]]:
    """Documents that hold their own number, so that a token tells where it came from."""
    return [[first + number] * length for number in range(count)]


# Reading the flags


@pytest.mark.parametrize(
    ("words", "blend"),
    [
        (["a"], Blend(("a",))),
        (["a", "b"], Blend(("a", "b"))),
        (["a", "b", "c"], Blend(("a", "b", "c"))),
        (["0.3", "a", "0.7", "b"], Blend(("a", "b"), (0.3, 0.7))),
        (["30", "a", "70", "b"], Blend(("a", "b"), (30.0, 70.0))),
        (["1", "a"], Blend(("a",))),
    ],
)
def test_blends_are_read(words: list[str], blend: Blend) -> None:
    assert parse_blend(words) == blend


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "is empty"),
        (["0.3", "a", "b", "c"], "'b' stands where a weight should"),
        (["a", "b", "0.5", "c"], "'a' stands where a weight should"),
        (["0.3", "a", "0.7"], "neither a prefix nor followed by one"),
        (["0", "a", "1", "b"], "weight 0.0 must be a number above 0"),
        (["-1", "a", "1", "b"], "weight -1.0"),
        (["nan", "a", "1", "b"], "weight nan"),
    ],
)
def test_wrong_blends_are_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_blend(words)


def test_a_prefix_may_look_like_a_number(
    write_tokens: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_tokens([[1]], name="2024")
    monkeypatch.chdir(tmp_path)
    assert parse_blend(["2024"]) == Blend(("2024",))


def test_splits_are_read_as_shares() -> None:
    assert parse_split("969, 30, 1") == (0.969, 0.03, 0.001)
    assert parse_split("1") == (1.0, 0.0, 0.0)
    assert parse_split("1,1") == (0.5, 0.5, 0.0)


@pytest.mark.parametrize("split", ["", "a,b", "0,0,0", "1,-1,0", "1,1,1,1", "1,,1", "nan", "inf,1"])
def test_wrong_splits_are_named(split: str) -> None:
    with pytest.raises(ConfigError, match="--split"):
        parse_split(split)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_path": None}, "no data given"),
        ({"mock_data": True}, "--data-path and --mock-data given"),
        ({"valid_data_path": ("a",)}, "--data-path and --train-data-path"),
        ({"data_path": None, "train_data_path": ("a",), "split": "1"}, "goes with --data-path"),
        ({"data_path": None, "valid_data_path": ("a",)}, "no --train-data-path"),
        ({"split": "0,1,1"}, "--split 0,1,1: leaves no data for training"),
    ],
)
def test_contradicting_sources_are_named(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_datasets(_spec("a", tmp_path, **changes), NullTokenizer(10), train_samples=1)


# Samples


def test_samples_of_the_corpus(corpus: Corpus, tokenizer: GPT2BPETokenizer, tmp_path: Path) -> None:
    spec = _spec(corpus.data_prefix, tmp_path, split="80,10,10")
    train, valid, test = build_datasets(
        spec, tokenizer, train_samples=30, valid_samples=5, test_samples=2
    )
    assert train is not None
    assert valid is not None
    assert test is not None
    assert len(train) >= 30
    sample = train[3]
    assert sorted(sample) == ["labels", "loss_mask", "position_ids", "tokens"]
    assert sample["tokens"].shape == (LENGTH,)
    assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
    assert sample["position_ids"].tolist() == list(range(LENGTH))
    assert sample["loss_mask"].tolist() == [1.0] * LENGTH


def test_the_splits_share_no_document(write_tokens: Write, tmp_path: Path) -> None:
    prefix = write_tokens(_numbered(20, 40))
    splits = build_datasets(
        _spec(prefix, tmp_path, split="70,20,10"),
        NullTokenizer(99),
        train_samples=100,
        valid_samples=10,
        test_samples=5,
    )
    seen = [
        {int(t) for i in range(len(split)) for t in split[i]["tokens"]} for split in splits if split
    ]
    assert seen == [set(range(14)), set(range(14, 18)), {18, 19}]


def test_one_pass_holds_every_token_once(write_tokens: Write, tmp_path: Path) -> None:
    prefix = write_tokens(_numbered(20, 40))
    train, _, _ = build_datasets(
        _spec(prefix, tmp_path, split="1"), NullTokenizer(99), train_samples=49
    )
    assert train is not None
    tokens = torch.cat([train[i]["tokens"] for i in range(len(train))])
    # 800 tokens, of which 49 samples of 16 and the last label are used.
    assert len(train) == 49
    assert tokens.bincount(minlength=20).max() == 40
    assert tokens.bincount(minlength=20).sum() == 784


def test_a_seed_gives_an_order(write_tokens: Write, tmp_path: Path) -> None:
    prefix = write_tokens(_numbered(30, 40))

    def order(seed: int, cache: str) -> list[list[int]]:
        spec = _spec(prefix, tmp_path, split="1", seed=seed, data_cache_path=str(tmp_path / cache))
        train, _, _ = build_datasets(spec, NullTokenizer(99), train_samples=60)
        assert train is not None
        return [train[i]["tokens"].tolist() for i in range(60)]

    assert order(1, "a") == order(1, "b")
    assert order(1, "a") != order(2, "a")


def test_weights_decide_the_mixture(write_tokens: Write, tmp_path: Path) -> None:
    small = write_tokens(_numbered(5, 40), name="small")
    large = write_tokens(_numbered(50, 40, first=50), name="large")
    spec = _spec(("3", small, "1", large), tmp_path, split="1")
    train, _, _ = build_datasets(spec, NullTokenizer(200), train_samples=200)
    assert train is not None
    assert len(train) >= 200
    of_small = sum(int(train[i]["tokens"][0]) < 50 for i in range(200))
    assert abs(of_small - 150) <= 2
    step = MicrobatchLoader(
        train, consumed_samples=0, micro_batch_size=4, dp_rank=0, dp_size=1
    ).step(1)
    assert sorted(step[0]) == ["labels", "loss_mask", "position_ids", "tokens"]


def test_reading_without_a_map_and_threads_change_nothing(
    write_tokens: Write, tmp_path: Path
) -> None:
    prefixes = [write_tokens(_numbered(9, 40), name=name) for name in "ab"]
    paths = ("1", prefixes[0], "1", prefixes[1])
    built = []
    for number, threads in enumerate((1, 3)):
        spec = _spec(
            paths,
            tmp_path,
            split="1",
            mmap_bin_files=threads == 1,
            num_dataset_builder_threads=threads,
            data_cache_path=str(tmp_path / f"cache{number}"),
        )
        train, _, _ = build_datasets(spec, NullTokenizer(99), train_samples=30)
        assert train is not None
        built.append([train[i]["tokens"].tolist() for i in range(30)])
    assert built[0] == built[1]


def test_without_weights_all_is_taken_once(write_tokens: Write, tmp_path: Path) -> None:
    paths = tuple(write_tokens(_numbered(9, 40), name=name) for name in "abc")
    spec = _spec(paths, tmp_path, split="1")
    train, _, _ = build_datasets(spec, NullTokenizer(99), train_samples=60)
    assert train is not None
    assert len(train) == 60
    with pytest.raises(DataError, match="the train data holds 66 samples, but 100 are needed"):
        build_datasets(spec, NullTokenizer(99), train_samples=100)


def test_each_split_may_have_its_own_files(write_tokens: Write, tmp_path: Path) -> None:
    a, b, c = (write_tokens(_numbered(5, 40, first=10 * i), name="abc"[i]) for i in range(3))
    spec = _spec(
        "", tmp_path, data_path=None, train_data_path=("1", a, "1", b), valid_data_path=(c,)
    )
    train, valid, test = build_datasets(
        spec, NullTokenizer(99), train_samples=20, valid_samples=4, test_samples=4
    )
    assert train is not None
    assert valid is not None
    assert test is None
    assert max(int(train[i]["tokens"].max()) for i in range(20)) < 20
    assert min(int(valid[i]["tokens"].min()) for i in range(4)) >= 20


def test_a_split_nobody_asks_for_is_not_built(write_tokens: Write, tmp_path: Path) -> None:
    # One document: nothing is left for validation and test, which is fine without them.
    spec = _spec(write_tokens([[1] * 100]), tmp_path)
    train, valid, test = build_datasets(spec, NullTokenizer(9), train_samples=50)
    assert train is not None
    assert (valid, test) == (None, None)
    assert build_datasets(spec, NullTokenizer(9), train_samples=0) == (None, None, None)


def test_a_split_without_documents_is_refused(write_tokens: Write, tmp_path: Path) -> None:
    """megatron-core counts passes over an empty split for ever."""
    prefix = write_tokens(_numbered(10, 40))
    with pytest.raises(DataError, match=r"969,30,1 leaves no document for valid \(10 in all\)"):
        build_datasets(_spec(prefix, tmp_path), NullTokenizer(99), train_samples=9, valid_samples=1)
    spec = _spec(prefix, tmp_path, split="100,0,0")
    assert build_datasets(spec, NullTokenizer(99), train_samples=9, valid_samples=1)[1] is None


def test_data_shorter_than_a_sample_repeats_or_is_refused(
    write_tokens: Write, tmp_path: Path
) -> None:
    paths = tuple(write_tokens([[1, 2, 3]], name=name) for name in "abc")
    train, _, _ = build_datasets(
        _spec(paths[0], tmp_path, split="1"), NullTokenizer(9), train_samples=5
    )
    assert train is not None
    assert len(train) == 5
    with pytest.raises(DataError, match="shorter than one sample of 16 tokens"):
        build_datasets(_spec(paths, tmp_path, split="1"), NullTokenizer(9), train_samples=5)


def test_document_ends_reset_positions_attention_and_loss(
    write_tokens: Write, tmp_path: Path
) -> None:
    tokenizer = NullTokenizer(9)
    prefix = write_tokens([[1, 2, 3, tokenizer.eod]] * 20)
    spec = _spec(
        prefix,
        tmp_path,
        split="1",
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
    )
    train, _, _ = build_datasets(spec, tokenizer, train_samples=4)
    assert train is not None
    sample = train[0]
    assert sample["position_ids"].tolist() == [0, 1, 2, 3] * 4
    assert sample["loss_mask"].tolist() == [1.0, 1.0, 1.0, 0.0] * 4
    hidden = sample["attention_mask"]
    assert hidden.shape == (1, LENGTH, LENGTH)
    assert hidden.dtype == torch.bool
    block = torch.arange(LENGTH) // 4
    visible = (block[:, None] == block[None, :]) & torch.ones(LENGTH, LENGTH).tril().bool()
    assert torch.equal(~hidden[0], visible)


def test_mock_data_needs_no_files(tmp_path: Path) -> None:
    spec = _spec("", tmp_path, data_path=None, mock_data=True)
    train, valid, test = build_datasets(
        spec, NullTokenizer(50), train_samples=20, valid_samples=4, test_samples=0
    )
    assert train is not None
    assert valid is not None
    assert test is None
    assert 0 <= int(train[0]["tokens"].max()) <= 50
    assert os.listdir(tmp_path) == []


# Data that does not fit


def test_missing_and_foreign_files_are_refused(write_tokens: Write, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.idx: no such file"):
        build_datasets(_spec("nowhere", tmp_path), NullTokenizer(9), train_samples=1)
    prefix = write_tokens([[1] * 40])
    Path(f"{prefix}.idx").write_bytes(b"something else entirely")
    with pytest.raises(DataError, match="is no token index"):
        build_datasets(_spec(prefix, tmp_path), NullTokenizer(9), train_samples=1)


def test_a_vocabulary_too_small_for_the_data_is_refused(
    write_tokens: Write, tmp_path: Path
) -> None:
    prefix = write_tokens([[1, 2, 60, 3] * 10])
    with pytest.raises(DataError, match="holds id 60, but the vocabulary has only 51 ids"):
        build_datasets(_spec(prefix, tmp_path), NullTokenizer(50), train_samples=1)
    assert not (tmp_path / "cache").exists()


def test_an_unwritable_cache_is_named(write_tokens: Write, tmp_path: Path) -> None:
    prefix = write_tokens([[1] * 40])
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(DataError, match="writable folder with --data-cache-path"):
        build_datasets(_spec(prefix, tmp_path, split="1"), NullTokenizer(9), train_samples=1)


def test_data_parallel_ranks_cover_the_dataset(
    corpus: Corpus, tokenizer: GPT2BPETokenizer, tmp_path: Path
) -> None:
    spec = _spec(corpus.data_prefix, tmp_path)
    train, _, _ = build_datasets(spec, tokenizer, train_samples=24)
    assert train is not None
    drawn: dict[int, list[int]] = {}
    for rank in (0, 1):
        loader = MicrobatchLoader(
            train, consumed_samples=0, micro_batch_size=3, dp_rank=rank, dp_size=2
        )
        for number, part in enumerate(loader.step(4)):
            for row in range(3):
                drawn[6 * number + 3 * rank + row] = part["tokens"][row].tolist()
    assert len(drawn) == 24
    assert all(drawn[i] == train[i]["tokens"].tolist() for i in range(24))
