"""The file of one rank: what torch reads of it, and that it is written whole."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.adaptive.checkpoint.shards import ShardFile

TENSORS = [
    torch.randn(3, 5),
    torch.randn(64, 64, dtype=torch.float64),
    torch.randn(7).bfloat16(),
    torch.randn(2, 3).half(),
    torch.arange(9, dtype=torch.uint8),
    torch.tensor([True, False]),
    torch.tensor(2.5),
    torch.zeros(4, 4),
    torch.ones(4, 4),
    torch.empty(0),
    torch.empty(3, 0, dtype=torch.bfloat16),
    torch.randn(6, 4).t(),
    torch.randn(10, 10)[2:5, 1:3],
    torch.randn(5, requires_grad=True),
]


def make(tensors: Sequence[torch.Tensor], objects: int = 0) -> ShardFile:
    """The form of a file of tensors like these."""
    places = [(MetadataIndex(f"t{at}", torch.Size([0])), one) for at, one in enumerate(tensors)]
    return ShardFile("__0_0.distcp", places, [MetadataIndex(f"o{at}") for at in range(objects)])


def pieces(folder: Path, results: Sequence[Any]) -> dict[str, bytes]:
    """Parts of the file by name."""
    content = (folder / "__0_0.distcp").read_bytes()
    found = {}
    end = 0
    for one in results:
        where = one.storage_data
        assert where.offset == end
        end += where.length
        found[one.index.fqn] = content[where.offset : end]
    assert end == len(content)
    return found


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    form = make([torch.zeros_like(one) for one in TENSORS])
    for _ in range(2):  # the second time over the first
        found = pieces(tmp_path, form.write(tmp_path, TENSORS, []))
        for at, tensor in enumerate(TENSORS):
            read = torch.load(io.BytesIO(found[f"t{at}"]), weights_only=True)
            assert read.dtype == tensor.dtype
            assert torch.equal(read, tensor)


def test_every_part_is_a_sound_archive(tmp_path: Path) -> None:
    """Its checksums are those of its own data."""
    found = pieces(tmp_path, make(TENSORS).write(tmp_path, TENSORS, []))
    for content in found.values():
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            assert archive.testzip() is None


def test_objects_of_any_length_follow(tmp_path: Path) -> None:
    form = make(TENSORS[:1], objects=2)
    for told in (["a", "b" * 3000], ["a" * 500, ""]):
        objects = [memoryview(pickle.dumps(one)) for one in told]
        results = form.write(tmp_path, TENSORS[:1], objects)
        found = pieces(tmp_path, results)
        assert [pickle.loads(found[f"o{at}"]) for at in range(2)] == told
        assert list(form.results_of_objects(objects)) == results[1:]


def test_a_system_that_takes_little_at_once_gets_the_rest_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = make(TENSORS)
    form.write(tmp_path, TENSORS, [])
    expected = (tmp_path / form.name).read_bytes()
    writev, calls = os.writev, []

    def little(descriptor: int, buffers: Sequence[memoryview]) -> int:
        calls.append(len(buffers))
        return writev(descriptor, [buffers[0][:777]])

    monkeypatch.setattr(os, "writev", little)
    form.write(tmp_path, TENSORS, [])
    assert (tmp_path / form.name).read_bytes() == expected
    assert len(calls) > len(TENSORS)


def test_there_may_be_more_tensors_than_one_call_takes(tmp_path: Path) -> None:
    many = [torch.tensor([float(at)]) for at in range(900)]
    found = pieces(tmp_path, make(many).write(tmp_path, many, []))
    assert [torch.load(io.BytesIO(one)).item() for one in found.values()] == list(range(900))


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        make(TENSORS[:1]).write(tmp_path / "no", TENSORS[:1], [])
    assert caught.value.filename == str(tmp_path / "no" / "__0_0.distcp")
