"""Training, validation and test samples from token files, or made up.

Owns the reading of ``--data-path`` and its relatives, the checks that must fail before training
starts, and the caches of shuffling indices. Samples themselves are megatron-core's (``GPTDataset``
and its blends); drawing them as microbatches is :mod:`megatron.adaptive.data.loader`'s.

megatron-core lets global rank 0 alone write the shuffling indices of a corpus and all other ranks
read them, which fails on a node that does not share its disk; it leaves a half-written cache when
it is killed, and it does not notice that a corpus was made again under the same name. Here any
process may write: under a file lock, so that one process a node does the work, through temporary
names, and under a key that holds size and time of the corpus.

Imports megatron-core at its top: on a machine without CUDA import this module only after the
accelerator substitutions are installed.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

from megatron.adaptive.config.data import DataConfig
from megatron.adaptive.data.cache import kept
from megatron.adaptive.data.indexed import INDEX_CACHE, check_indexed, check_vocabulary_fits, pieces
from megatron.adaptive.data.lengths import Conversations, DocumentDataset
from megatron.adaptive.data.tokenizer import Tokenizer
from megatron.adaptive.errors import ConfigError, DataError

_SPLIT_NAMES = ("train", "valid", "test")
_PARTS = ("document", "sample", "shuffle")
_CHECK_WHOLE_BYTES = 64 << 20  # largest index that is checked completely

Samples = Sequence[dict[str, Any]]
Indices = tuple[npt.NDArray[np.generic], npt.NDArray[np.generic], npt.NDArray[np.generic]]
Blend = tuple[list[str], list[float] | None]
"""Prefixes of token files and the positive share of each, as megatron-core takes them; ``None``
takes everything once, in proportion to size."""


def build_datasets(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    seq_length: int,
    seed: int,
    train_samples: int,
    valid_samples: int = 0,
    test_samples: int = 0,
    is_built_on_rank: Callable[[], bool] = lambda: True,
) -> tuple[Samples | None, Samples | None, Samples | None]:
    """Check the data, then build the train, valid and test samples.

    Collective where ``torch.distributed`` is initialized: every rank calls it with the same
    arguments, whether it needs samples or not. Global rank 0 builds first, then the others at
    once; shuffling indices are cached under a file lock, so that on a node that does not share
    rank 0's disk one process builds and the rest read.

    The order of samples follows from seed, sequence length, split and, as in Megatron-LM, from the
    number of passes over the data that ``train_samples`` takes: a run that is prolonged into a
    further pass sees another order.

    Args:
        data: where samples come from.
        tokenizer: its ``eod`` and size enter the samples.
        seq_length: tokens a sample.
        seed: of the shuffling.
        train_samples: training samples needed in all, from the first iteration to the last.
        valid_samples: as ``train_samples``, over all validations; 0 builds none.
        test_samples: as ``valid_samples``.
        is_built_on_rank: whether this rank needs samples. Must be true on global rank 0.

    Returns:
        One dataset each, ``None`` where no samples are asked for, the split has no share, or this
        rank needs none. A sample is a dict of ``tokens``, ``labels``, ``position_ids``
        ``[seq_length] int64``, ``loss_mask [seq_length] float32`` and, with
        ``reset_attention_mask``, ``attention_mask [1, seq_length, seq_length] bool`` (true where
        hidden). With ``variable_seq_lengths`` a sample is a document of up to ``seq_length``
        tokens; see :mod:`megatron.adaptive.data.lengths`.

    Raises:
        ConfigError: a blend cannot be read, or --split leaves nothing for training.
        DataError: a file is missing or broken, does not fit the vocabulary, or is too small.
    """
    counts = (train_samples, valid_samples, test_samples)
    if not any(counts):
        return None, None, None
    blends, source = _blends(data, counts)
    here = is_built_on_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core's, about pad tokens
        config = CachedGPTDatasetConfig(
            random_seed=seed,
            sequence_length=seq_length,
            tokenizer=tokenizer,
            reset_position_ids=data.reset_position_ids,
            reset_attention_mask=data.reset_attention_mask,
            eod_mask_loss=data.eod_mask_loss,
            create_attention_mask=data.reset_attention_mask,
            mmap_bin_files=data.mmap_bin_files,
            num_dataset_builder_threads=data.num_dataset_builder_threads,
            index_cache=_index_cache(data, blends),
            sft=data.sft,
            **source,
        )
        if here:
            edges = config.split_matrix if data.data_path else None
            _check(data, blends, edges, counts, tokenizer.vocab_size)
        if config.split_matrix is not None:
            # megatron-core takes 0 samples for "at least one" and may look for it for ever.
            config.split_matrix = [
                share if count else None
                for share, count in zip(config.split_matrix, counts, strict=True)
            ]
        cls: Any = MockGPTDataset if data.mock_data else CachedGPTDataset
        if data.variable_seq_lengths:
            cls = DocumentDataset
        try:
            with _quiet_megatron_core():
                builder = BlendedMegatronDatasetBuilder(cls, list(counts), is_built_on_rank, config)
                train, valid, test = builder.build()
        except Exception as error:
            if not _is_too_much(error):
                raise
            given = ", ".join(f"{n} {c}" for n, c in zip(_SPLIT_NAMES, counts, strict=True))
            raise DataError(
                f"the order of so many samples ({given}) does not fit into memory; lower "
                "--train-iters or --eval-iters, or raise --eval-interval"
            ) from None
    for name, dataset, count in zip(_SPLIT_NAMES, (train, valid, test), counts, strict=True):
        if here and dataset is not None and len(dataset) < count:
            raise DataError(
                f"the {name} data holds {len(dataset)} samples, but {count} are needed; give "
                "weights (0.5 a 0.5 b), which let data repeat, or ask for fewer iterations"
            )
    return train, valid, test


@contextmanager
def _quiet_megatron_core() -> Iterator[None]:
    """Silences megatron-core's warning that nothing is cached: this module caches it itself."""
    logger = logging.getLogger("megatron.core.datasets")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _is_too_much(error: BaseException | None) -> bool:
    """Returns whether an error, which megatron-core may wrap, says that an array is too large."""
    while error is not None:
        text = str(error).lower()
        if isinstance(error, MemoryError | OverflowError) or "array is too big" in text:
            return True
        if isinstance(error, ValueError) and "dimension" in text:
            return True
        error = error.__cause__ or error.__context__
    return False


def _blends(data: DataConfig, counts: tuple[int, ...]) -> tuple[list[Blend | None], dict[str, Any]]:
    """Return the blend of each split, and how megatron-core's settings name them."""
    if data.mock_data:
        return [], {}
    if data.data_path is not None:
        blend = parse_blend(data.data_path)
        return [blend], {"blend": blend, "split": data.split}
    separate = (data.train_data_path, data.valid_data_path, data.test_data_path)
    blends = [
        None if paths is None else parse_blend(paths, f"--{name}-data-path")
        for name, paths in zip(_SPLIT_NAMES, separate, strict=True)
    ]
    asked = [blend if count else None for blend, count in zip(blends, counts, strict=True)]
    return blends, {"blend_per_split": asked}


def _check(
    data: DataConfig,
    blends: Sequence[Blend | None],
    edges: Sequence[tuple[float, float] | None] | None,
    counts: tuple[int, ...],
    vocab_size: int,
) -> None:
    """Check on every rank what megatron-core would assert, hang at or trip over later.

    Args:
        data: the settings.
        blends: of the splits, one where they share it, none for mock data.
        edges: where each split begins and ends in the documents of a file, where they share it.
        counts: samples of each split.
        vocab_size: of the tokenizer.
    """
    if not blends:
        return
    if counts[0] and edges is not None and edges[0] is None:
        raise ConfigError(f"--split {data.split}: leaves no data for training; give it a share")
    if data.sft:
        return  # conversations are checked as they are read
    infos = {}
    for prefix in dict.fromkeys(prefix for blend in blends if blend for prefix in blend[0]):
        infos[prefix] = check_indexed(prefix)
        check_vocabulary_fits(infos[prefix], vocab_size)
    for name, count, share in zip(_SPLIT_NAMES, counts, edges or [None] * 3, strict=True):
        if not count or share is None:
            continue
        for prefix, info in infos.items():
            first, last = (round(edge * info.num_sequences) for edge in share)
            # megatron-core would look for samples in an empty split for ever.
            if first >= last:
                raise DataError(
                    f"{prefix}: --split {data.split} leaves no document for {name} "
                    f"({info.num_sequences} in all); change --split"
                    + ("" if name == "train" else ", give that share 0, or set --eval-iters 0")
                )


def _index_cache(data: DataConfig, blends: Sequence[Blend | None]) -> str:
    if data.data_cache_path:
        return data.data_cache_path
    prefixes = [blend[0][0] for blend in blends if blend is not None]
    return str(Path(prefixes[0]).parent / INDEX_CACHE) if prefixes else ""


def parse_blend(words: Sequence[str], flag: str = "--data-path") -> Blend:
    """Read ``a``, ``a b c`` or ``0.3 a 0.7 b``.

    Raises:
        ConfigError: weights and prefixes do not alternate, or a weight is not positive.
    """
    if not words:
        raise ConfigError(f"{flag} is empty; name at least one prefix")
    weights = [_weight(word) for word in words[::2]]
    if len(words) % 2 or all(weight is None for weight in weights):
        return list(words), None
    valid = [weight for weight in weights if weight is not None and 0 < weight < math.inf]
    if len(valid) < len(weights):
        raise ConfigError(
            f"{flag} {' '.join(words)}: not every prefix has a weight above 0 before it; write "
            "weights and prefixes in turn (0.3 a 0.7 b) or prefixes only"
        )
    return list(words[1::2]), valid if len(valid) > 1 else None


def _weight(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


@dataclass
class CachedGPTDatasetConfig(GPTDatasetConfig):
    """GPT dataset settings plus the cache folder.

    Attributes:
        index_cache: folder of shuffling indices. ``path_to_cache`` stays empty, which makes
            megatron-core to build in memory; keeping the result is done here.
        sft: files are JSON lines of conversations.
    """

    index_cache: str = ""
    sft: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path_to_cache = ""

    def prepare(self, path: str) -> Conversations:
        """Tokenizes a file of conversations, or opens what a process has made of it before."""
        try:
            stat = os.stat(path)
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror}); check --data-path"
            ) from None
        if not S_ISREG(stat.st_mode):
            raise DataError(f"{path}: is no regular file; name one of JSON lines")
        identity = f"{path}{stat.st_size}{stat.st_mtime_ns}{self.tokenizer.unique_identifiers}"
        key = hashlib.sha256(identity.encode()).hexdigest()[:24]
        names = [f"{key}-{part}" for part in ("tokens", "taught", "ends")]
        arrays = kept(
            self.index_cache,
            names,
            lambda: Conversations.read(path, self.tokenizer),
            lambda found: Conversations.broken_rule(found, self.tokenizer.vocab_size),
        )
        return Conversations(*arrays)


class CachedGPTDataset(GPTDataset):
    """megatron-core's GPT dataset; only where its indices are kept differs."""

    def _build_document_sample_shuffle_indices(self) -> Indices:
        names = [f"{self._cache_key()}-{part}" for part in _PARTS]
        first, second, third = kept(
            self.config.index_cache, names, self._build, lambda found: self._broken_rule(*found)
        )
        return first, second, third

    def _broken_rule(
        self, documents: npt.NDArray[Any], samples: npt.NDArray[Any], shuffle: npt.NDArray[Any]
    ) -> str:
        """Returns the rule of megatron-core's indices that the arrays break, empty for none.

        Args:
            documents: ``[epochs * documents]``, numbers of the documents in the order they are
                read.
            samples: ``[samples + 1, 2]``, the place in ``documents`` and the token at which each
                sample begins.
            shuffle: ``[samples]``, numbers of the samples in the order they are taken.
        """
        if any(one.dtype.kind not in "iu" or not one.size for one in (documents, samples, shuffle)):
            return "they are not whole numbers"
        if documents.ndim != 1 or samples.shape != (shuffle.size + 1, 2) or shuffle.ndim != 1:
            return "their shapes do not belong together"
        edges = int(self.indices.min()), int(self.indices.max())
        if not all(_is_within(piece, *edges) for piece in _spread(documents)):
            return "a document is none of the data's"
        if not all(_is_within(piece, 0, shuffle.size - 1) for piece in _spread(shuffle)):
            return "a sample is none of the data's"
        longest = int(self.dataset.sequence_lengths.max())
        for piece in _spread(samples):
            places, tokens = piece.T
            if not _is_within(places, 0, documents.size) or not _is_within(tokens, 0, longest):
                return "a sample begins outside the data"
            if not np.all(places[1:] >= places[:-1]):
                return "samples do not follow each other"
        return ""

    def _build(self) -> Indices:
        built: Indices = super()._build_document_sample_shuffle_indices()
        if not len(built[2]):
            raise DataError(
                f"{self.dataset_path}: the {self.index_split.name} split is shorter than one "
                f"sample of {self.config.sequence_length} tokens; lower --seq-length, or give "
                "weights (0.5 a 0.5 b), which let data repeat"
            )
        return built

    def _cache_key(self) -> str:
        stats = [os.stat(f"{self.dataset_path}{suffix}") for suffix in (".idx", ".bin")]
        state = [(stat.st_size, stat.st_mtime_ns) for stat in stats]
        digest = hashlib.sha256(f"{self.unique_description}{state}".encode()).hexdigest()
        return f"{digest[:24]}-{self.index_split.name}"


def _spread(array: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """Yields all rows of a small array, or pieces of a large one spread from first row to last.

    The checksum has found damaged bytes before. Only an index of other data is left to find, and
    any piece shows that.
    """
    for start, stop in pieces(len(array), array[0].nbytes, _CHECK_WHOLE_BYTES):
        yield array[start:stop]


def _is_within(array: npt.NDArray[Any], least: int, most: int) -> bool:
    return least <= int(array.min()) and int(array.max()) <= most
