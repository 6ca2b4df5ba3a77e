"""Tests that damaged files in the cache are detected, reported and replaced."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megatron.adaptive.data.cache import cached_arrays
from megatron.adaptive.errors import DataError

NAMES = ("order", "places")


class Maker:
    """Callable that creates two arrays and counts its calls."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> list[npt.NDArray[Any]]:
        self.times += 1
        return [np.arange(1000, dtype=np.int32), np.arange(24, dtype=np.int64).reshape(12, 2)]

    def arrays(self, folder: Path) -> list[npt.NDArray[Any]]:
        return cached_arrays(str(folder), NAMES, self)

    def check(self, folder: Path) -> None:
        for array, expected in zip(self.arrays(folder), self(), strict=True):
            assert array.dtype == expected.dtype
            assert np.array_equal(array, expected)


def _flip(path: Path, offset: int, bit: int = 0) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1 << bit
    path.write_bytes(raw)


def _swap(path: Path) -> None:
    other = path.with_name("places.npy")
    raw = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(raw)


def _replace(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


DAMAGES: dict[str, Callable[[Path], object]] = {
    "bit of the data": lambda path: _flip(path, 3000),
    "bit of the header": lambda path: _flip(path, 20),
    "bit of the mark": lambda path: _flip(path, -20),
    "bit of the checksum": lambda path: _flip(path, -1, 7),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "zeros in a page": lambda path: path.write_bytes(
        path.read_bytes()[:512] + bytes(512) + path.read_bytes()[1024:]
    ),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "of numpy alone": lambda path: np.save(path, np.arange(1000, dtype=np.int32)[::-1]),
    "each under the other's name": _swap,
    "pipe": _replace(os.mkfifo),
    "device": _replace(lambda path: path.symlink_to("/dev/zero")),
    "link to itself": _replace(lambda path: path.symlink_to(path)),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_made_anew(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    maker = Maker()
    maker.arrays(tmp_path)
    DAMAGES[damage](tmp_path / "order.npy")
    maker.check(tmp_path)
    assert maker.times == 3  # One of these calls was made by check() to get the expected arrays.
    maker.check(tmp_path)
    assert maker.times == 4
    messages = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    if damage == "missing":
        assert messages == []
    else:
        assert len(messages) == 1
        assert "order.npy" in messages[0]
        assert "rebuilding" in messages[0]


def test_no_random_change_is_taken(tmp_path: Path) -> None:
    maker, draw = Maker(), random.Random(5)
    maker.arrays(tmp_path)
    whole = {name: (tmp_path / f"{name}.npy").read_bytes() for name in NAMES}
    for _ in range(200):
        path = tmp_path / f"{draw.choice(NAMES)}.npy"
        raw = bytearray(whole[path.stem])
        start = draw.randrange(len(raw))
        stop = start + draw.choice((1, 4, 64))
        kind = draw.randrange(3)
        if kind == 0:
            raw[start] ^= 1 << draw.randrange(8)
        elif kind == 1:
            raw[start:stop] = draw.randbytes(stop - start)
        else:
            del raw[start:stop]
        path.write_bytes(raw)
        before, changed = maker.times, bytes(raw) != whole[path.stem]
        maker.arrays(tmp_path)
        assert maker.times == before + changed
        assert path.read_bytes() == whole[path.stem]


def test_arrays_that_do_not_suit_the_data_are_made_anew(tmp_path: Path) -> None:
    maker = Maker()
    maker.arrays(tmp_path)
    cached_arrays(
        str(tmp_path), NAMES, maker, lambda arrays: "a document does not belong to the data"
    )
    assert maker.times == 2


def test_a_whole_file_is_mapped_and_not_written(tmp_path: Path) -> None:
    maker = Maker()
    maker.arrays(tmp_path)
    before = [(tmp_path / f"{name}.npy").stat().st_mtime_ns for name in NAMES]
    assert all(isinstance(array, np.memmap) for array in maker.arrays(tmp_path))
    assert [(tmp_path / f"{name}.npy").stat().st_mtime_ns for name in NAMES] == before
    assert maker.times == 1
    # Other programs must be able to read the file with numpy.
    assert np.array_equal(np.load(tmp_path / "order.npy"), np.arange(1000))


def test_arrays_without_elements_are_kept(tmp_path: Path) -> None:
    empty = [np.zeros(0, np.int32), np.zeros(0, np.bool_)]
    for _ in range(2):
        arrays = cached_arrays(str(tmp_path), NAMES, lambda: empty)
        assert [(array.dtype, array.shape) for array in arrays] == [
            (np.int32, (0,)),
            (np.bool_, (0,)),
        ]


def test_a_pipe_for_a_lock_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    Maker().check(tmp_path)


def test_a_folder_under_the_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "order.npy").mkdir()
    with pytest.raises(DataError, match=r"cannot store shuffling indices .* --data-cache-path"):
        Maker().arrays(tmp_path)


TRACED = """
import sys
from pathlib import Path
import numpy as np
events = []
def watch(event, arguments):
    if event in ("open", "os.rename"):
        events.append((event, str(arguments[0])))
import os
fsync = os.fsync
def synced(descriptor):
    events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
    fsync(descriptor)
os.fsync = synced
sys.addaudithook(watch)
from megatron.adaptive.data.cache import cached_arrays
cached_arrays(sys.argv[1], ["a", "b"], lambda: [np.arange(9), np.arange(3)])
folder = sys.argv[1]
steps = []
for event, name in events:
    if not name.startswith(folder) or event == "open":
        continue
    name = "folder" if name == folder else Path(name).name.lstrip(".").split(".")[0]
    steps.append(f"{event} {name}")
print("\\n".join(steps))
"""


def test_a_name_stands_for_bytes_that_are_on_the_disk(tmp_path: Path) -> None:
    """Checks that files are synced before they are renamed, in case the power fails in between."""
    command = [sys.executable, "-c", TRACED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    expected = ["fsync a", "os.rename a", "fsync b", "os.rename b", "fsync folder"]
    assert done.stdout.split("\n")[:-1] == expected


FULL = """
import resource, sys
import numpy as np
from megatron.adaptive.data.cache import cached_arrays
from megatron.adaptive.errors import DataError
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    cached_arrays(sys.argv[1], ["a"], lambda: [np.arange(100_000)])
except DataError as error:
    print(error)
"""


def test_a_full_disk_is_said_in_the_words_of_the_system(tmp_path: Path) -> None:
    """Checks that a full disk is reported with the operating system's error, not with numpy's."""
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert (
        "cannot store shuffling indices (File too large); choose a writable folder" in done.stdout
    )
    assert not list(tmp_path.glob("*.npy"))
    assert not list(tmp_path.glob(".*.tmp"))
