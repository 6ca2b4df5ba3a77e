"""Tests that several processes encode samples together. Threads represent the processes here."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.adaptive.errors import ConfigError

pytest.importorskip("transformers", reason="bash prerequisite.sh --examples")

from megatron.adaptive.modules import samples
from megatron.adaptive.modules.samples import SampleFile, SampleReader

from ..support.tuned_models import make_tokenizer, write_image_data

LIMIT_S = 60.0


class Meeting:
    """Gathers the values of several threads, each of which represents one rank of a job."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._barrier = threading.Barrier(ranks, timeout=LIMIT_S)
        self._values: list[Any] = [None] * ranks

    def job(self, rank: int) -> Any:
        """Returns a job for the thread that represents rank ``rank``."""

        def gather(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
            return values

        return SimpleNamespace(
            rank=rank, environment=SimpleNamespace(world_size=self.ranks), gather=gather
        )


def read_together(paths: list[Path], reader: Any = None, **options: Any) -> list[Any]:
    """Reads each of ``paths`` on a separate rank, and returns each rank's samples or error.

    ``reader`` is a function that creates a reader. By default, the reader is created with
    ``options``.
    """
    meeting = Meeting(len(paths))

    def read(rank: int) -> Any:
        made = SampleReader(processor=make_tokenizer(), **options) if reader is None else reader()
        try:
            return made.read(paths[rank], meeting.job(rank))
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(len(paths)) as pool:
        return list(pool.map(read, range(len(paths))))


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


TEXTS = [{"text": "a" * (number % 7)} for number in range(53)]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kept_bytes", [1 << 30, 4000, 0])
def test_samples_are_those_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, kept_bytes: int
) -> None:
    """Checks that each line is encoded only once, and that all ranks keep the same samples."""
    path = write(tmp_path / "train.jsonl", TEXTS)
    expected = SampleReader(processor=make_tokenizer(), kept_bytes=kept_bytes).read(path)
    encoded: list[int] = []
    encode = SampleFile._encode

    def counted(self: SampleFile, line: Any) -> Any:
        encoded.append(line.number)
        return encode(self, line)

    monkeypatch.setattr(SampleFile, "_encode", counted)
    monkeypatch.setattr(samples, "_EXCHANGED_BYTES", 3000)
    all_read = read_together([path] * ranks, kept_bytes=kept_bytes)
    assert sorted(encoded) == list(range(1, len(TEXTS) + 1))
    assert expected.num_empty > 0
    for read in all_read:
        attributes = "digest num_learned largest num_empty _lines _indices_of_kinds"
        for name in attributes.split():
            assert getattr(read, name) == getattr(expected, name)
        assert read._kept.keys() == expected._kept.keys()
        for sample, same in zip(read, expected, strict=True):
            assert sample.keys() == same.keys()
            assert all(torch.equal(sample[name], same[name]) for name in same)


def test_all_ranks_name_the_first_wrong_line(tmp_path: Path) -> None:
    """Checks that all ranks raise the same error if several ranks find invalid lines."""
    lines: list[Any] = [*TEXTS[1:6], {"wrong": 1}, {"wrong": 2}, *TEXTS[1:6], {"wrong": 3}]
    path = write(tmp_path / "train.jsonl", lines)
    errors = read_together([path] * 3)
    assert errors == [errors[0]] * 3
    assert errors[0].startswith(f"{path}:6: the line must be a JSON object with the key")


def test_files_that_differ_between_ranks_are_named(tmp_path: Path) -> None:
    """Checks that an error is raised before training if ranks have different files."""
    path = write(tmp_path / "train.jsonl", TEXTS)
    other = write(tmp_path / "other.jsonl", TEXTS[:-1])
    errors = read_together([path, path, other])
    assert [error.partition(" ")[2] for error in errors] == [
        "differs between rank 2 and rank 0; give all processes the same file"
    ] * 3
    missing = tmp_path / "missing.jsonl"
    error = f"{missing}: No such file or directory; pass a file in JSON Lines format"
    assert read_together([path, missing]) == [f"rank 1: {error}"] * 2
    assert read_together([missing] * 2) == [error] * 2


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_long_samples_behind_short_ones_are_not_sent_all_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Checks that ranks exchange samples with limited memory if long samples follow short ones."""
    texts = [{"text": "ab"}] * 500 + [{"text": "a" * 2000}] * 500
    path = write(tmp_path / "train.jsonl", texts)
    expected = SampleReader(processor=make_tokenizer()).read(path)
    monkeypatch.setattr(samples, "_EXCHANGED_BYTES", 1 << 18)
    monkeypatch.setattr(samples, "_MOST_EXCHANGED_BYTES", 1 << 19)
    sent: list[int] = []
    meeting_job = Meeting.job

    def job(self: Meeting, rank: int) -> Any:
        made = meeting_job(self, rank)
        gather = made.gather

        def counted(value: Any) -> list[Any]:
            if isinstance(value, list):
                entries = [each.sample.values() for each in value if each.sample is not None]
                sent.append(sum(entry.nbytes for sample in entries for entry in sample))
            values: list[Any] = gather(value)
            return values

        made.gather = counted
        return made

    monkeypatch.setattr(Meeting, "job", job)
    for read in read_together([path] * ranks):
        assert read.digest == expected.digest
        assert read.num_learned == expected.num_learned
        assert 500 < len(read._kept) < 1000
        for sample, same in zip(read, expected, strict=True):
            assert all(torch.equal(sample[name], same[name]) for name in same)
    assert 0 < ranks * max(sent) <= 1 << 19


def test_images_are_sent_too(tmp_path: Path) -> None:
    """Checks that samples with images are the same as in a single process."""
    from ..support.tuned_models import make_processor

    write_image_data(tmp_path / "data")
    path = tmp_path / "data" / "train.jsonl"
    expected = SampleReader(processor=make_processor()).read(path)
    for read in read_together([path] * 2, lambda: SampleReader(processor=make_processor())):
        assert not isinstance(read, str), read
        assert read.digest == expected.digest
        assert read.decisive_entries == expected.decisive_entries
        assert all(
            torch.equal(sample[name], same[name])
            for sample, same in zip(read, expected, strict=True)
            for name in same
        )
