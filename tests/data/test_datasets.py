"""Tests samples of blended and split data, their masks, and which data is rejected."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.adaptive.config.data import DataConfig
from megatron.adaptive.data.cache import cached_arrays
from megatron.adaptive.data.corpus import Corpus
from megatron.adaptive.data.datasets import (
    Blend,
    Samples,
    build_datasets,
    has_other_epochs,
    parse_blend,
)
from megatron.adaptive.data.loader import MicrobatchLoader
from megatron.adaptive.data.tokenizer import GPT2BPETokenizer, NullTokenizer, Tokenizer
from megatron.adaptive.errors import ConfigError, DataError
from megatron.adaptive.schedule.document_rows import Batching

from ..multiprocess.launch import forking_every

Write = Callable[..., str]
LENGTH = 16


def _build(
    prefix: object,
    tmp_path: Path,
    tokenizer: Tokenizer,
    samples: tuple[int, int, int],
    **changes: Any,
) -> tuple[Samples | None, Samples | None, Samples | None]:
    """Builds the datasets for training, validation and test from one or more file prefixes.

    ``samples`` contains the number of samples for each dataset. ``changes`` contains other settings
    of the data.
    """
    seed = changes.pop("seed", 7)
    settings: dict[str, Any] = {
        "data_path": (str(prefix),) if not isinstance(prefix, tuple) else prefix,
        "data_cache_path": str(tmp_path / "cache"),
        **changes,
    }
    names = ("train_samples", "valid_samples", "test_samples")
    counts = dict(zip(names, samples, strict=True))
    return build_datasets(DataConfig(**settings), tokenizer, seq_length=LENGTH, seed=seed, **counts)


def _train(prefix: object, tmp_path: Path, samples: int, **changes: Any) -> Samples:
    """Returns a training dataset of ``samples`` samples from the files with the prefix ``prefix``.

    All documents are used for training, so there are no other datasets.
    """
    settings: dict[str, Any] = {"split": "1", **changes}
    train, _, _ = _build(prefix, tmp_path, NullTokenizer(200), (samples, 0, 0), **settings)
    assert train is not None
    return train


def _tokens(dataset: Samples) -> list[list[int]]:
    return [dataset[i]["tokens"].tolist() for i in range(len(dataset))]


def _numbered(count: int, length: int, first: int = 0) -> list[list[int]]:
    """Returns ``count`` documents of ``length`` tokens. All tokens of a document are equal.

    The token is the number of the document, starting at ``first``.
    """
    return [[first + number] * length for number in range(count)]


# The following tests check how flags are parsed.


@pytest.mark.parametrize(
    ("arguments", "blend"),
    [
        (["a"], (["a"], None)),
        (["a", "b"], (["a", "b"], None)),
        (["a", "b", "c"], (["a", "b", "c"], None)),
        (["0.3", "a", "0.7", "b"], (["a", "b"], [0.3, 0.7])),
        (["30", "a", "70", "b"], (["a", "b"], [30.0, 70.0])),
        (["1", "a"], (["a"], None)),
    ],
)
def test_blends_are_read(arguments: list[str], blend: Blend) -> None:
    assert parse_blend(arguments) == blend


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "is empty"),
        (["0.3", "a", "b", "c"], "0.3 a b c: some prefixes have no positive weight"),
        (["a", "b", "0.5", "c"], "some prefixes have no positive weight"),
        (["0", "a", "1", "b"], "0 a 1 b: some prefixes have no positive weight"),
        (["-1", "a", "1", "b"], "no positive weight"),
        (["nan", "a", "1", "b"], "no positive weight"),
    ],
)
def test_wrong_blends_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_blend(arguments)


# The following tests check the samples.


def test_samples_of_the_corpus(corpus: Corpus, tokenizer: GPT2BPETokenizer, tmp_path: Path) -> None:
    splits = _build(corpus.data_prefix, tmp_path, tokenizer, (30, 5, 2), split="80,10,10")
    assert None not in splits
    train = splits[0]
    assert train is not None
    assert len(train) >= 30
    sample = train[3]
    assert sorted(sample) == ["labels", "loss_mask", "position_ids", "tokens"]
    assert sample["tokens"].shape == (LENGTH,)
    assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
    assert sample["position_ids"].tolist() == list(range(LENGTH))
    assert sample["loss_mask"].tolist() == [1.0] * LENGTH


def test_the_splits_share_no_document(write_tokens: Write, tmp_path: Path) -> None:
    prefix = write_tokens(_numbered(20, 40))
    splits = _build(prefix, tmp_path, NullTokenizer(99), (100, 10, 5), split="70,20,10")
    seen = [{token for sample in _tokens(split) for token in sample} for split in splits if split]
    assert seen == [set(range(14)), set(range(14, 18)), {18, 19}]


def test_one_pass_holds_every_token_once(write_tokens: Write, tmp_path: Path) -> None:
    train = _train(write_tokens(_numbered(20, 40)), tmp_path, 49)
    tokens = torch.tensor(_tokens(train)).flatten()
    # The 20 documents have 800 tokens. These give 49 samples of 16 tokens and a last label.
    assert len(train) == 49
    assert tokens.bincount(minlength=20).max() == 40
    assert tokens.bincount(minlength=20).sum() == 784


def test_another_number_of_epochs_changes_the_order(write_tokens: Write, tmp_path: Path) -> None:
    prefix = write_tokens(_numbered(20, 9))
    sizes = (2, 8, 21, 40, 44, 61, 65)
    made = {size: _train(prefix, tmp_path, size) for size in sizes}
    for before in sizes:
        for now in sizes:
            least = min(before, now)
            same = _tokens(made[before])[:least] == _tokens(made[now])[:least]
            assert has_other_epochs(made[now], before, now) is not same, (before, now)


def test_weights_decide_the_mixture(write_tokens: Write, tmp_path: Path) -> None:
    small = write_tokens(_numbered(5, 40), name="small")
    large = write_tokens(_numbered(50, 40, first=50), name="large")
    train = _train(("3", small, "1", large), tmp_path, 200)
    assert len(train) >= 200
    of_small = sum(int(train[i]["tokens"][0]) < 50 for i in range(200))
    assert abs(of_small - 150) <= 2
    batching = Batching(micro_batch_size=4, replicas=1)
    step = MicrobatchLoader(train, consumed_samples=0, batching=batching, dp_rank=0).step(1)
    assert sorted(step[0]) == ["labels", "loss_mask", "position_ids", "tokens"]


def test_the_seed_gives_the_order_not_threads_nor_maps(write_tokens: Write, tmp_path: Path) -> None:
    first, second = (write_tokens(_numbered(9, 40), name=name) for name in "ab")
    built = [
        _tokens(
            _train(
                ("1", first, "1", second),
                tmp_path,
                30,
                seed=seed,
                mmap_bin_files=threads == 1,
                num_dataset_builder_threads=threads,
                data_cache_path=str(tmp_path / f"cache{threads}"),
            )
        )
        for seed, threads in ((1, 1), (1, 3), (2, 1))
    ]
    assert built[0] == built[1]
    assert built[0] != built[2]


def test_without_weights_all_is_taken_once(write_tokens: Write, tmp_path: Path) -> None:
    paths = tuple(write_tokens(_numbered(9, 40), name=name) for name in "abc")
    assert len(_train(paths, tmp_path, 60)) == 60
    with pytest.raises(DataError, match="the train data has 66 samples, but 100 are needed"):
        _train(paths, tmp_path, 100)


def test_each_split_may_have_its_own_files(write_tokens: Write, tmp_path: Path) -> None:
    a, b, c = (write_tokens(_numbered(5, 40, first=10 * i), name="abc"[i]) for i in range(3))
    paths = {"data_path": None, "train_data_path": ("1", a, "1", b), "valid_data_path": (c,)}
    train, valid, test = _build("", tmp_path, NullTokenizer(99), (20, 4, 4), **paths)
    assert train is not None
    assert valid is not None
    assert test is None
    assert max(int(train[i]["tokens"].max()) for i in range(20)) < 20
    assert min(int(valid[i]["tokens"].min()) for i in range(4)) >= 20


def test_a_split_nobody_asks_for_is_not_built(write_tokens: Write, tmp_path: Path) -> None:
    # The only document is used for training, so there is none for validation and test. This is
    # allowed, because no samples are requested for them.
    prefix = write_tokens([[1] * 100])
    train, *others = _build(prefix, tmp_path, NullTokenizer(9), (50, 0, 0))
    assert train is not None
    assert others == [None, None]
    assert _build(prefix, tmp_path, NullTokenizer(9), (0, 0, 0)) == (None, None, None)


def test_a_split_without_documents_is_refused(write_tokens: Write, tmp_path: Path) -> None:
    """Checks that a split without documents raises an error. megatron-core would hang instead."""
    prefix = write_tokens(_numbered(10, 40))
    with pytest.raises(DataError, match="10 documents, .* 969,30,1 leaves none for valid"):
        _build(prefix, tmp_path, NullTokenizer(99), (9, 1, 0))
    splits = _build(prefix, tmp_path, NullTokenizer(99), (9, 1, 0), split="100,0,0")
    assert splits[1] is None


def test_data_shorter_than_a_sample_repeats_or_is_refused(
    write_tokens: Write, tmp_path: Path
) -> None:
    paths = tuple(write_tokens([[1, 2, 3]], name=name) for name in "abc")
    assert len(_train(paths[0], tmp_path, 5)) == 5
    with pytest.raises(DataError, match="shorter than one sample of 16 tokens"):
        _train(paths, tmp_path, 5)


def test_document_ends_reset_positions_attention_and_loss(
    write_tokens: Write, tmp_path: Path
) -> None:
    prefix = write_tokens([[1, 2, 3, NullTokenizer(200).eod]] * 20)
    resets = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    sample = _train(prefix, tmp_path, 4, **dict.fromkeys(resets, True))[0]
    assert sample["position_ids"].tolist() == [0, 1, 2, 3] * 4
    assert sample["loss_mask"].tolist() == [1.0, 1.0, 1.0, 0.0] * 4
    hidden = sample["attention_mask"]
    assert hidden.shape == (1, LENGTH, LENGTH)
    assert hidden.dtype == torch.bool
    block = torch.arange(LENGTH) // 4
    visible = (block[:, None] == block[None, :]) & torch.ones(LENGTH, LENGTH).tril().bool()
    assert torch.equal(~hidden[0], visible)


# The following tests check which data is rejected.


def test_missing_and_foreign_files_are_refused(write_tokens: Write, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.idx: no such file"):
        _train("nowhere", tmp_path, 1)
    prefix = write_tokens([[1, 2, 60, 3] * 10])
    with pytest.raises(DataError, match="contains id 60, but the vocabulary has only 51 ids"):
        _build(prefix, tmp_path, NullTokenizer(50), (1, 0, 0))
    assert not (tmp_path / "cache").exists()
    Path(f"{prefix}.idx").write_bytes(b"something else entirely")
    with pytest.raises(DataError, match="is not a token index"):
        _train(prefix, tmp_path, 1)


# The following tests check the cache of shuffling indices: that it is shared, complete, up to date
# with the data, and local to a node.


def _cached(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.npy")}


def test_the_second_build_reads_the_first_ones_cache(write_tokens: Write, tmp_path: Path) -> None:
    """Checks that the cache is stored in the folder of the data by default, and is reused."""
    prefix = write_tokens(_numbered(40, 30))
    first = _tokens(_train(prefix, tmp_path, 40, data_cache_path=None))
    before = _cached(tmp_path / "index_cache")
    again = _train(prefix, tmp_path, 40, data_cache_path=None)
    assert _tokens(again) == first
    assert len(before) == 3
    assert _cached(tmp_path / "index_cache") == before
    assert isinstance(again.shuffle_index, np.memmap)  # type: ignore[attr-defined]


def test_data_made_again_under_the_same_name_is_noticed(
    write_tokens: Write, tmp_path: Path
) -> None:
    prefix = write_tokens(_numbered(40, 30))
    _train(prefix, tmp_path, 40)
    write_tokens(_numbered(60, 17, first=50))
    tokens = _tokens(_train(prefix, tmp_path, 40))
    assert {token for sample in tokens for token in sample} <= set(range(50, 110))
    assert tokens == _tokens(_train(prefix, tmp_path, 40, data_cache_path=str(tmp_path / "other")))


def test_what_a_killed_build_left_is_not_taken_for_a_cache(
    write_tokens: Write, tmp_path: Path
) -> None:
    prefix = write_tokens(_numbered(40, 30))
    expected = _tokens(_train(prefix, tmp_path, 40))
    names = sorted(_cached(tmp_path / "cache"))
    # Simulate a build that was killed: the first file is complete, the second is incomplete, and
    # the third is missing.
    os.unlink(tmp_path / "cache" / names[2])
    whole = (tmp_path / "cache" / names[1]).read_bytes()
    (tmp_path / "cache" / names[1]).unlink()
    (tmp_path / "cache" / f".{names[1]}.0a1b2c3d.tmp").write_bytes(whole[:50])
    assert _tokens(_train(prefix, tmp_path, 40)) == expected


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "bit": lambda raw: raw[:140] + bytes([raw[140] ^ 4]) + raw[141:],
    "zeros": lambda raw: raw[:128] + bytes(len(raw) - 128),
    "cut": lambda raw: raw[: len(raw) - 40],
    "empty": lambda raw: b"",
}


@pytest.mark.parametrize("part", ["document", "sample", "shuffle"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_made_anew(
    damage: str, part: str, write_tokens: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = write_tokens(_numbered(40, 30))
    expected = _tokens(_train(prefix, tmp_path, 40))
    (path,) = (tmp_path / "cache").glob(f"*-{part}.npy")
    raw = path.read_bytes()
    path.write_bytes(DAMAGES[damage](raw))
    assert _tokens(_train(prefix, tmp_path, 40)) == expected
    assert path.read_bytes() == raw
    assert f"{path} is damaged" in caplog.text


@pytest.mark.parametrize(
    ("part", "change", "rule"),
    [
        ("shuffle", lambda array: array + 1, "the index of a sample is out of range"),
        ("document", lambda array: array + 40, "the index of a document is out of range"),
        ("sample", lambda array: array[::-1], "the starts of samples are not in ascending order"),
        (
            "sample",
            lambda array: array + np.array([0, 99]),
            "the start of a sample is out of range",
        ),
        ("sample", lambda array: array[1:], "the shapes of the arrays do not match"),
        ("shuffle", lambda array: array * 1.0, "the indices are not integers"),
    ],
)
def test_an_index_of_other_data_is_made_anew(
    part: str,
    change: Callable[[Any], Any],
    rule: str,
    write_tokens: Write,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Checks that a cached index is replaced if its values do not match the data."""
    prefix = write_tokens(_numbered(40, 30))
    expected = _tokens(_train(prefix, tmp_path, 40))
    (path,) = (tmp_path / "cache").glob(f"*-{part}.npy")
    array = change(np.load(path))
    path.unlink()
    cached_arrays(str(path.parent), [path.stem], lambda: [array])
    assert _tokens(_train(prefix, tmp_path, 40)) == expected
    assert rule in caplog.text


def test_damaged_conversations_are_tokenized_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    talk = [{"role": "user", "content": "1 2"}, {"role": "assistant", "content": "3"}]
    path = tmp_path / "talks.jsonl"
    path.write_text((json.dumps({"messages": talk}) + "\n") * 4)
    options = {"sft": True, "variable_seq_lengths": True}
    expected = _tokens(_train(path, tmp_path, 4, **options))
    for file in sorted((tmp_path / "cache").glob("*.npy")):
        raw = bytearray(file.read_bytes())
        raw[130] ^= 1
        file.write_bytes(raw)
        assert _tokens(_train(path, tmp_path, 4, **options)) == expected
        assert f"{file} is damaged" in caplog.text


def test_no_warning_about_a_missing_cache(
    write_tokens: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Set the level, because other tests may have silenced this logger.
    caplog.set_level(logging.WARNING, logger="megatron.core")
    _train(write_tokens(_numbered(40, 30)), tmp_path, 40)
    assert "path_to_cache" not in caplog.text
    # After the build, such warnings must be shown again.
    logging.getLogger("megatron.core.datasets.gpt_dataset").warning("path_to_cache is None")
    assert "path_to_cache is None" in caplog.text


def test_an_unwritable_cache_is_named(write_tokens: Write, tmp_path: Path) -> None:
    prefix = write_tokens([[1] * 40])
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(DataError, match="writable folder with --data-cache-path"):
        _train(prefix, tmp_path, 1)


RANK_PROGRAM = """
import sys
from megatron.adaptive import accelerator
accelerator.install()
import torch.distributed as dist
from megatron.adaptive.config.data import DataConfig
from megatron.adaptive.data.datasets import build_datasets
from megatron.adaptive.data.tokenizer import NullTokenizer
rank, store, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
data = f"{folder}/data"
for paths in ((data,), ("1", data, "2", data), (data, data, data)):
    data_config = DataConfig(data_path=paths, split="80,20,0")
    train, valid, test = build_datasets(
        data_config, NullTokenizer(99), seq_length=16, seed=3, train_samples=40, valid_samples=5,
        test_samples=2,        is_built_on_rank=lambda: rank != 1,
    )
    assert test is None
    assert (train is None) == (valid is None) == (rank == 1)
    if train is not None:
        print([train[i]["tokens"].tolist() for i in range(len(train))])
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ranks_that_share_no_disk_build_the_same_samples(
    write_tokens: Write, tmp_path: Path
) -> None:
    """Checks that a node without access to the indices of global rank 0 builds the same samples.

    Rank 1 has no data files and needs no samples, like a rank in the middle of a pipeline.
    """
    folders = [tmp_path / name for name in ("node0", "nothing", "node1")]
    for folder in folders:
        folder.mkdir()
        if folder.name != "nothing":
            write_tokens(_numbered(40, 30), name=f"{folder.name}/data")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_PROGRAM, str(rank), str(tmp_path / "store"), folder],
            env=forking_every(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, folder in enumerate(folders)
    ]
    try:
        results = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0, 0], results
    assert results[0][0] == results[2][0] != ""
    assert results[1][0] == ""
    for folder in (folders[0], folders[2]):
        assert _cached(folder / "index_cache")
