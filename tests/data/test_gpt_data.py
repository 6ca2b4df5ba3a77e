"""The cache of shuffling indices: shared, renewed with the data, whole, and local to a node."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.adaptive.data.datasets import DataSpec, Samples, build_datasets
from megatron.adaptive.data.tokenizer import NullTokenizer
from megatron.adaptive.errors import DataError

Write = Callable[..., str]
LENGTH = 16


def _build(prefix: str, cache: Path | None, samples: int = 40) -> Samples:
    spec = DataSpec(
        seq_length=LENGTH,
        seed=3,
        data_path=(prefix,),
        split="1",
        data_cache_path=str(cache) if cache else None,
    )
    train, _, _ = build_datasets(spec, NullTokenizer(200), train_samples=samples)
    assert train is not None
    return train


def _tokens(dataset: Samples) -> list[list[int]]:
    return [dataset[i]["tokens"].tolist() for i in range(len(dataset))]


def _cached(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.npy")}


def _documents(first: int) -> list[list[int]]:
    return [[first + number] * 30 for number in range(40)]


def test_the_second_build_reads_the_first_ones_cache(write_tokens: Write, tmp_path: Path) -> None:
    prefix = write_tokens(_documents(0))
    first = _tokens(_build(prefix, tmp_path / "cache"))
    before = _cached(tmp_path / "cache")
    again = _build(prefix, tmp_path / "cache")
    assert _tokens(again) == first
    assert len(before) == 3
    assert _cached(tmp_path / "cache") == before
    assert isinstance(again.shuffle_index, np.memmap)  # type: ignore[attr-defined]


def test_the_cache_is_beside_the_data_by_default(write_tokens: Write, tmp_path: Path) -> None:
    _build(write_tokens(_documents(0)), None)
    assert len(_cached(tmp_path / "index_cache")) == 3


def test_data_made_again_under_the_same_name_is_noticed(
    write_tokens: Write, tmp_path: Path
) -> None:
    prefix = write_tokens(_documents(0))
    _build(prefix, tmp_path / "cache")
    write_tokens([[50 + number] * 17 for number in range(60)])
    tokens = _tokens(_build(prefix, tmp_path / "cache"))
    assert {token for sample in tokens for token in sample} <= set(range(50, 110))
    assert tokens == _tokens(_build(prefix, tmp_path / "other"))


def test_what_a_killed_build_left_is_not_taken_for_a_cache(
    write_tokens: Write, tmp_path: Path
) -> None:
    prefix = write_tokens(_documents(0))
    expected = _tokens(_build(prefix, tmp_path / "cache"))
    names = sorted(_cached(tmp_path / "cache"))
    # Killed after the first part was written whole and the second in part.
    os.unlink(tmp_path / "cache" / names[2])
    whole = (tmp_path / "cache" / names[1]).read_bytes()
    (tmp_path / "cache" / names[1]).unlink()
    (tmp_path / "cache" / f".{names[1]}.0a1b2c3d.tmp").write_bytes(whole[:50])
    assert _tokens(_build(prefix, tmp_path / "cache")) == expected


def test_no_warning_about_a_missing_cache(
    write_tokens: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Whatever another test in this process has silenced.
    caplog.set_level(logging.WARNING, logger="megatron.core")
    _build(write_tokens(_documents(0)), tmp_path / "cache")
    assert "path_to_cache" not in caplog.text
    # The filter goes with the build.
    logging.getLogger("megatron.core.datasets.gpt_dataset").warning("path_to_cache is None")
    assert "path_to_cache is None" in caplog.text


def test_an_unreadable_cache_is_an_error_for_the_user(write_tokens: Write, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="--data-cache-path"):
        _build(write_tokens(_documents(0)), tmp_path / "file" / "cache")


RANK_PROGRAM = """
import sys
from megatron.adaptive import accelerator
accelerator.install()
import torch.distributed as dist
from megatron.adaptive.data.datasets import DataSpec, build_datasets
from megatron.adaptive.data.tokenizer import NullTokenizer
rank, store, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
data = f"{folder}/data"
for paths in ((data,), ("1", data, "2", data), (data, data, data)):
    spec = DataSpec(seq_length=16, seed=3, data_path=paths, split="80,20,0")
    train, valid, test = build_datasets(
        spec, NullTokenizer(99), train_samples=40, valid_samples=5, test_samples=2,
        is_built_on_rank=lambda: rank != 1,
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
    """megatron-core lets global rank 0 alone write, so a second node finds no index.

    Rank 1 needs no samples, as a middle stage, and has no files.
    """
    folders = [tmp_path / name for name in ("node0", "nothing", "node1")]
    for folder in folders:
        folder.mkdir()
        if folder.name != "nothing":
            write_tokens(_documents(0), name=f"{folder.name}/data")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_PROGRAM, str(rank), str(tmp_path / "store"), folder],
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
