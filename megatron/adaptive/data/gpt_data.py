"""megatron-core's GPT dataset with index caches that survive kills, re-made data and local disks.

megatron-core lets global rank 0 alone write the shuffling indices of a corpus and all other ranks
read them, which fails on a node that does not share its disk; it leaves a half-written cache when
it is killed, and it does not notice that a corpus was made again under the same name. Here any
process may write: under a file lock, so that one process a node does the work, through temporary
names, and under a key that holds size and time of the corpus.

Imports megatron-core at its top: on a machine without CUDA import this module only after the
accelerator substitutions are installed. :mod:`megatron.adaptive.data.datasets` does so.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from megatron.adaptive.errors import DataError

__all__ = ["CachedGPTDataset", "CachedGPTDatasetConfig", "quiet_cache_warnings"]

_PARTS = ("document", "sample", "shuffle")

Indices = tuple[npt.NDArray[np.generic], npt.NDArray[np.generic], npt.NDArray[np.generic]]


@dataclass
class CachedGPTDatasetConfig(GPTDatasetConfig):
    """GPT dataset settings plus the cache folder.

    Attributes:
        index_cache: folder of shuffling indices. ``path_to_cache`` stays empty, which makes
            megatron-core to build in memory; keeping the result is done here.
    """

    index_cache: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path_to_cache = ""


class CachedGPTDataset(GPTDataset):
    """megatron-core's GPT dataset; only where its indices are kept differs."""

    def _build_document_sample_shuffle_indices(self) -> Indices:
        folder = Path(self.config.index_cache)
        paths = [folder / f"{self._cache_key()}-{part}.npy" for part in _PARTS]
        try:
            if not all(path.is_file() for path in paths):
                folder.mkdir(parents=True, exist_ok=True)
                with _locked(folder / ".lock"):
                    if not all(path.is_file() for path in paths):
                        self._write(paths)
            first, second, third = (np.load(path, mmap_mode="r") for path in paths)
        except OSError as error:
            raise DataError(
                f"{folder}: shuffling indices cannot be kept there ({error.strerror or error}); "
                "give a writable folder with --data-cache-path"
            ) from None
        return first, second, third

    def _write(self, paths: list[Path]) -> None:
        with quiet_cache_warnings():
            built = super()._build_document_sample_shuffle_indices()
        if not len(built[2]):
            raise DataError(
                f"{self.dataset_path}: the {self.index_split.name} split is shorter than one "
                f"sample of {self.config.sequence_length} tokens; lower --seq-length, or give "
                "weights (0.5 a 0.5 b), which let data repeat"
            )
        for path, array in zip(paths, built, strict=True):
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
            try:
                with temporary.open("wb") as stream:
                    np.save(stream, array)
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)

    def _cache_key(self) -> str:
        stats = [os.stat(f"{self.dataset_path}{suffix}") for suffix in (".idx", ".bin")]
        state = [(stat.st_size, stat.st_mtime_ns) for stat in stats]
        digest = hashlib.sha256(f"{self.unique_description}{state}".encode()).hexdigest()
        return f"{digest[:24]}-{self.index_split.name}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel frees it when a process dies."""
    with path.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextmanager
def quiet_cache_warnings() -> Iterator[None]:
    """Drop megatron-core's warning that nothing is cached: it is, but not by megatron-core."""

    def keep(record: logging.LogRecord) -> bool:
        return "path_to_cache is None" not in record.getMessage()

    loggers = [
        logging.getLogger(f"megatron.core.datasets.{name}")
        for name in ("gpt_dataset", "blended_dataset")
    ]
    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(keep)
