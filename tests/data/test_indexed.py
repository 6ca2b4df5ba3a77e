"""Tests how token files are checked, with files from megatron-core and with damaged files."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.adaptive.data import indexed
from megatron.adaptive.data.indexed import check_indexed, check_vocabulary_fits
from megatron.adaptive.errors import DataError

Write = Callable[..., str]
DOCUMENTS = [[1, 2, 3], [4], [5, 6]]


def _patch(path: str, offset: int, raw: bytes) -> None:
    with open(path, "r+b") as stream:
        stream.seek(offset)
        stream.write(raw)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.uint8])
def test_what_megatron_core_wrote_passes(write_tokens: Write, dtype: type[np.integer]) -> None:
    info = check_indexed(write_tokens(DOCUMENTS, dtype=dtype))
    assert (info.num_sequences, info.num_tokens) == (3, 6)
    assert info.dtype == dtype


def test_a_multimodal_index_passes(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "m.bin"), multimodal=True)
    builder.add_document(np.array([1, 2, 3]), [1, 2], [0, 1])
    builder.finalize(str(tmp_path / "m.idx"))
    info = check_indexed(tmp_path / "m")
    assert info.num_sequences == 2


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_a_missing_file_is_named(write_tokens: Write, suffix: str) -> None:
    prefix = write_tokens(DOCUMENTS)
    Path(f"{prefix}{suffix}").unlink()
    with pytest.raises(DataError, match=rf"data\{suffix}: no such file"):
        check_indexed(prefix)


def test_a_prefix_with_suffix_or_cut_short_gets_a_hint(write_tokens: Write) -> None:
    prefix = write_tokens(DOCUMENTS, name="big_text_document")
    with pytest.raises(DataError, match=r"did you mean .*big_text_document\?"):
        check_indexed(f"{prefix}.bin")
    with pytest.raises(DataError, match=r"did you mean .*big_text_document\?"):
        check_indexed(prefix.removesuffix("_text_document"))


@pytest.mark.parametrize(
    ("offset", "raw", "message"),
    [
        (0, b"NOTMEGATR", "is not a token index (starts with b'NOTMEGATR'"),
        (9, struct.pack("<Q", 2), "version 2"),
        (17, b"\x00", "dtype code 0"),
        (17, b"\x09", "dtype code 9"),
        (17, b"\x07", "dtype code 7"),
        (18, struct.pack("<Q", 2**60), "is truncated"),
        (18, struct.pack("<Q", 2), "too many bytes"),
        (34, struct.pack("<i", -3), "sequence 0 has length -3"),
        (34, struct.pack("<i", 9), "data.bin: has 12 bytes, but its index lists 12 tokens"),
        (17, b"\x04", "data.bin: has 12 bytes, but its index lists 6 tokens of 4 bytes"),
        (46, struct.pack("<q", 2), "offsets that do not match"),
        (78, struct.pack("<q", 3), "do not increase from 0 to 3"),
    ],
)
def test_damage_is_named(write_tokens: Write, offset: int, raw: bytes, message: str) -> None:
    prefix = write_tokens(DOCUMENTS)
    _patch(f"{prefix}.idx", offset, raw)
    with pytest.raises(DataError) as caught:
        check_indexed(prefix)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("suffix", "length", "message"),
    [
        *((".idx", kept, "is (truncated|not a token index)") for kept in (0, 20, 90)),
        *((".bin", length, r"has \d+ bytes") for length in (10, 11, 14)),
    ],
)
def test_files_of_another_length_are_seen(
    write_tokens: Write, suffix: str, length: int, message: str
) -> None:
    path = Path(f"{write_tokens(DOCUMENTS)}{suffix}")
    path.write_bytes((path.read_bytes() + b"\0\0")[:length])
    with pytest.raises(DataError, match=rf"data\{suffix}: {message}"):
        check_indexed(path.with_suffix(""))


def test_an_index_without_documents_is_refused(write_tokens: Write) -> None:
    with pytest.raises(DataError, match="contains no document"):
        check_indexed(write_tokens([]))


def test_an_id_outside_the_vocabulary_is_named(write_tokens: Write) -> None:
    prefix = write_tokens([[1, 2], [7, 3]])
    check_vocabulary_fits(check_indexed(prefix), 8)
    with pytest.raises(DataError, match=r"contains id 7, but .* only 7 ids; .*\(8 ids or more\)"):
        check_vocabulary_fits(check_indexed(prefix), 7)
    with pytest.raises(DataError, match="negative id -5"):
        check_vocabulary_fits(check_indexed(write_tokens([[1, -5]], dtype=np.int32)), 8)


@pytest.mark.parametrize("start", [0, 20_000, 39_999])
def test_large_data_is_sampled_from_end_to_end(
    write_tokens: Write, monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    monkeypatch.setattr(indexed, "_SCAN_WHOLE_BYTES", 40_000)
    monkeypatch.setattr(indexed, "_PIECE_BYTES", 400)
    tokens = [3] * 40_000
    # Data that was tokenized with another vocabulary contains many wrong IDs, not just one.
    tokens[start : start + 500] = [900] * len(tokens[start : start + 500])
    prefix = write_tokens([tokens])
    check_vocabulary_fits(check_indexed(prefix), 901)
    with pytest.raises(DataError, match="contains id 900"):
        check_vocabulary_fits(check_indexed(prefix), 900)
