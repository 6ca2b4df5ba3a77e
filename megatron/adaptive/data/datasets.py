"""Builds training, validation and test samples from token files, or generates mock samples.

This module parses ``--data-path`` and similar flags, checks the data before training, and caches
shuffling indices. Samples come from megatron-core's ``GPTDataset``, or from a blend, which mixes
several datasets by weight. :mod:`megatron.adaptive.data.loader` groups samples into microbatches.

In megatron-core, only global rank 0 writes the shuffling indices of a corpus, and all other ranks
read them, which fails on a node that does not share a disk with rank 0. Also, a killed process
leaves a partial cache behind, and megatron-core does not notice if a corpus is replaced by another
corpus with the same name. With this module, one process per node writes the cache under a file
lock. Files get their final names only when they are complete. The cache key includes the size and
the modification time of the corpus.

This module imports megatron-core. On a machine without CUDA, import it only after
:func:`megatron.adaptive.accelerator.install` was called.
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
from megatron.adaptive.data.cache import cached_arrays
from megatron.adaptive.data.indexed import INDEX_CACHE, check_indexed, check_vocabulary_fits, pieces
from megatron.adaptive.data.lengths import Conversations, DocumentDataset
from megatron.adaptive.data.tokenizer import Tokenizer
from megatron.adaptive.errors import ConfigError, DataError

_SPLIT_NAMES = ("train", "valid", "test")
_PARTS = ("document", "sample", "shuffle")
_CHECK_WHOLE_BYTES = 64 << 20  # Larger index arrays are checked only in part.

Samples = Sequence[dict[str, Any]]
Indices = tuple[npt.NDArray[np.generic], npt.NDArray[np.generic], npt.NDArray[np.generic]]
Blend = tuple[list[str], list[float] | None]
"""Paths of token files without suffix, and the weight of each file, as in megatron-core.

If the weights are ``None``, each file is read once, and files are mixed in proportion to their
sizes.
"""


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
    """Checks the data and builds the training, validation and test samples.

    If ``torch.distributed`` is initialized, this function is collective: every rank must call it
    with the same arguments, even if the rank needs no samples. Global rank 0 builds first, then all
    other ranks build at the same time. Shuffling indices are cached under a file lock. On a node
    that does not share a disk with rank 0, one process builds the indices and the other processes
    read them.

    The order of samples depends on the seed, the sequence length and the split. As in Megatron-LM,
    it also depends on the number of epochs that ``train_samples`` needs, so the order changes if a
    run is extended by an epoch.

    Args:
        data: Settings of the data, from the command line.
        tokenizer: Tokenizer that made the token files. Its ``eod`` and vocabulary size affect the
            samples.
        seq_length: Number of tokens per sample.
        seed: Seed that determines the order of the samples.
        train_samples: Number of training samples of the whole run.
        valid_samples: Total number of samples in all validations. With 0, no validation data is
            built.
        test_samples: Number of test samples. With 0, no test data is built.
        is_built_on_rank: Function that returns whether this rank needs samples. It must return true
            on global rank 0.

    Returns:
        Training, validation and test dataset. A dataset is ``None`` if its number of samples is 0,
        if ``--split`` assigns no documents to it, or if this rank needs no samples. A sample is a
        dict with ``tokens``, ``labels``, ``position_ids`` ``[seq_length] int64``, ``loss_mask
        [seq_length] float32`` and, with ``reset_attention_mask``, ``attention_mask [1, seq_length,
        seq_length] bool`` (true for masked tokens). With ``variable_seq_lengths``, a sample is a
        document, truncated after ``seq_length`` tokens.

    Raises:
        ConfigError: If a list of datasets and weights is malformed, or --split leaves no data for
            training.
        DataError: If a file is missing or broken, does not fit the vocabulary, or is too small.
    """
    counts = (train_samples, valid_samples, test_samples)
    if not any(counts):
        return None, None, None
    blends, source = _blends(data, counts)
    needs_samples = is_built_on_rank()
    with warnings.catch_warnings():
        # Ignore the warning about tokenizers without a padding token.
        warnings.simplefilter("ignore")
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
        if needs_samples:
            edges = config.split_matrix if data.data_path else None
            _check(data, blends, edges, counts, tokenizer.vocab_size)
        if config.split_matrix is not None:
            # Drop splits whose count is 0. Otherwise megatron-core would search each of them for a
            # sample, possibly forever.
            config.split_matrix = [
                share if count else None
                for share, count in zip(config.split_matrix, counts, strict=True)
            ]
        train, valid, test = _built(data, config, counts, is_built_on_rank)
    for name, dataset, count in zip(_SPLIT_NAMES, (train, valid, test), counts, strict=True):
        if needs_samples and dataset is not None and len(dataset) < count:
            raise DataError(
                f"the {name} data has {len(dataset)} samples, but {count} are needed; add "
                "weights before the prefixes (0.5 a 0.5 b), so that the data repeats, or run fewer "
                "iterations"
            )
    return train, valid, test


def _built(
    data: DataConfig,
    config: CachedGPTDatasetConfig,
    counts: tuple[int, ...],
    is_built_on_rank: Callable[[], bool],
) -> Any:
    """Calls megatron-core to build the training, validation and test datasets of ``data``.

    ``counts`` contains the number of samples of each dataset.

    Raises:
        DataError: If the shuffling index does not fit into memory.
    """
    cls: Any = MockGPTDataset if data.mock_data else CachedGPTDataset
    if data.variable_seq_lengths:
        cls = DocumentDataset
    try:
        with _quiet_megatron_core():
            builder = BlendedMegatronDatasetBuilder(cls, list(counts), is_built_on_rank, config)
            return builder.build()
    except Exception as error:
        if not _is_too_much(error):
            raise
        sizes = ", ".join(f"{n} {c}" for n, c in zip(_SPLIT_NAMES, counts, strict=True))
        raise DataError(
            f"the shuffling index for all samples ({sizes}) does not fit into memory; "
            "lower --train-iters or --eval-iters, or raise --eval-interval"
        ) from None


@contextmanager
def _quiet_megatron_core() -> Iterator[None]:
    """Silences megatron-core's warning about uncached indices, because this module caches them."""
    logger = logging.getLogger("megatron.core.datasets")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _is_too_much(error: BaseException | None) -> bool:
    """Returns whether ``error`` or one of its causes reports an array that is too large."""
    while error is not None:
        text = str(error).lower()
        if isinstance(error, MemoryError | OverflowError) or "array is too big" in text:
            return True
        if isinstance(error, ValueError) and "dimension" in text:
            return True
        error = error.__cause__ or error.__context__
    return False


def _blends(data: DataConfig, counts: tuple[int, ...]) -> tuple[list[Blend | None], dict[str, Any]]:
    """Returns the blend of each split, and the settings that pass the blends to megatron-core.

    ``data`` contains the user's settings. ``counts`` contains the number of samples of each split.
    """
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
    needed = [blend if count else None for blend, count in zip(blends, counts, strict=True)]
    return blends, {"blend_per_split": needed}


def _check(
    data: DataConfig,
    blends: Sequence[Blend | None],
    edges: Sequence[tuple[float, float] | None] | None,
    counts: tuple[int, ...],
    vocab_size: int,
) -> None:
    """Checks the data on every rank, because bad data would make megatron-core fail or hang later.

    Args:
        data: Settings of the data, from the command line.
        blends: Files and weights of each split, or a single entry if all splits share the same
            files. Empty for mock data.
        edges: Start and end of each split, as fractions of the documents in each file, or ``None``
            if the splits do not share the same files.
        counts: Number of samples that the run needs from each split.
        vocab_size: Number of token ids of the tokenizer.
    """
    if not blends:
        return
    if counts[0] and edges is not None and edges[0] is None:
        raise ConfigError(
            f"--split {data.split} leaves no data for training; give training a share above 0"
        )
    if data.sft:
        return  # Conversations are checked when their files are read.
    infos = {}
    for prefix in dict.fromkeys(prefix for blend in blends if blend for prefix in blend[0]):
        infos[prefix] = check_indexed(prefix)
        check_vocabulary_fits(infos[prefix], vocab_size)
    for name, count, share in zip(_SPLIT_NAMES, counts, edges or [None] * 3, strict=True):
        if not count or share is None:
            continue
        for prefix, info in infos.items():
            first, last = (round(edge * info.num_sequences) for edge in share)
            # Reject an empty split, because megatron-core would search it for samples forever.
            if first >= last:
                raise DataError(
                    f"{prefix} has {info.num_sequences} documents, of which --split {data.split} "
                    f"leaves none for {name}; change --split"
                    + ("" if name == "train" else ", set this share to 0, or set --eval-iters 0")
                )


def _index_cache(data: DataConfig, blends: Sequence[Blend | None]) -> str:
    if data.data_cache_path:
        return data.data_cache_path
    prefixes = [blend[0][0] for blend in blends if blend is not None]
    return str(Path(prefixes[0]).parent / INDEX_CACHE) if prefixes else ""


def parse_blend(values: Sequence[str], flag: str = "--data-path") -> Blend:
    """Parses a list of datasets, such as ``a b c`` or, with weights, ``0.3 a 0.7 b``.

    ``values`` contains the words of the list. ``flag`` is the name of the flag, for error messages.

    Raises:
        ConfigError: If weights and prefixes do not alternate, or a weight is not positive.
    """
    if not values:
        raise ConfigError(f"{flag} is empty; give at least one prefix")
    weights = [_weight(value) for value in values[::2]]
    if len(values) % 2 or all(weight is None for weight in weights):
        return list(values), None
    valid = [weight for weight in weights if weight is not None and 0 < weight < math.inf]
    if len(valid) < len(weights):
        raise ConfigError(
            f"{flag} {' '.join(values)}: some prefixes have no positive weight before them; "
            "alternate weights and prefixes (0.3 a 0.7 b), or give only prefixes"
        )
    return list(values[1::2]), valid if len(valid) > 1 else None


def _weight(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@dataclass
class CachedGPTDatasetConfig(GPTDatasetConfig):
    """Adds two settings to megatron-core's configuration of a GPT dataset.

    ``path_to_cache`` is always empty, so megatron-core builds indices in memory, and this module
    caches them.

    Attributes:
        index_cache: Path of the folder in which shuffling indices are cached.
        sft: Whether the data files are JSON lines of conversations instead of token files.
    """

    index_cache: str = ""
    sft: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path_to_cache = ""

    def prepare(self, path: str) -> Conversations:
        """Returns the tokenized conversations in the file ``path``, from the cache if possible."""
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataError(f"cannot read {path} ({error.strerror}); check --data-path") from None
        if not S_ISREG(status.st_mode):
            raise DataError(f"{path} is not a regular file; give a file of JSON lines")
        identity = f"{path}{status.st_size}{status.st_mtime_ns}{self.tokenizer.unique_identifiers}"
        key = hashlib.sha256(identity.encode()).hexdigest()[:24]
        names = [f"{key}-{part}" for part in ("tokens", "taught", "ends")]
        arrays = cached_arrays(
            self.index_cache,
            names,
            lambda: Conversations.read(path, self.tokenizer),
            lambda cached: Conversations.broken_rule(cached, self.tokenizer.vocab_size),
        )
        return Conversations(*arrays)


class CachedGPTDataset(GPTDataset):
    """GPT dataset of megatron-core, with shuffling indices that this package caches."""

    def _build_document_sample_shuffle_indices(self) -> Indices:
        names = [f"{self._cache_key()}-{part}" for part in _PARTS]
        documents, samples, shuffle = cached_arrays(
            self.config.index_cache, names, self._build, lambda cached: self._broken_rule(*cached)
        )
        return documents, samples, shuffle

    def epochs(self, samples: int) -> tuple[int, bool]:
        """Returns the number of epochs of a run, and whether the last one is shuffled separately.

        Args:
            samples: Number of samples that a run needs.
        """
        length, extra = self.config.sequence_length, self.config.add_extra_token_to_sequence
        tokens = self._get_num_tokens_per_epoch()
        epochs = max(1, -(-(samples * length + extra) // tokens))
        in_last = samples - ((epochs - 1) * tokens - extra) // length
        # This is megatron-core's condition for shuffling the last epoch separately.
        is_separate = in_last < int(0.8 * ((tokens - extra) // length))
        return epochs, epochs > 1 and is_separate

    def _broken_rule(
        self, documents: npt.NDArray[Any], samples: npt.NDArray[Any], shuffle: npt.NDArray[Any]
    ) -> str:
        """Describes what is wrong with the index arrays. The result is empty if they are valid.

        Args:
            documents: Indices of the documents in shuffled order, ``[epochs * documents]``.
            samples: Start of each sample: an index in ``documents`` and a token offset in that
                document, ``[samples + 1, 2]``.
            shuffle: Indices of the samples in the order of use, ``[samples]``.
        """
        arrays = (documents, samples, shuffle)
        if any(array.dtype.kind not in "iu" or not array.size for array in arrays):
            return "the indices are not integers"
        if documents.ndim != 1 or samples.shape != (shuffle.size + 1, 2) or shuffle.ndim != 1:
            return "the shapes of the arrays do not match"
        edges = int(self.indices.min()), int(self.indices.max())
        if not all(_is_within(piece, *edges) for piece in _spread(documents)):
            return "the index of a document is out of range"
        if not all(_is_within(piece, 0, shuffle.size - 1) for piece in _spread(shuffle)):
            return "the index of a sample is out of range"
        longest = int(self.dataset.sequence_lengths.max())
        for piece in _spread(samples):
            starts, tokens = piece.T
            if not _is_within(starts, 0, documents.size) or not _is_within(tokens, 0, longest):
                return "the start of a sample is out of range"
            if not np.all(starts[1:] >= starts[:-1]):
                return "the starts of samples are not in ascending order"
        return ""

    def _build(self) -> Indices:
        built: Indices = super()._build_document_sample_shuffle_indices()
        if not len(built[2]):
            raise DataError(
                f"{self.dataset_path}: the {self.index_split.name} split is shorter than one "
                f"sample of {self.config.sequence_length} tokens; lower --seq-length, or add "
                "weights before the prefixes (0.5 a 0.5 b), so that the data repeats"
            )
        return built

    def _cache_key(self) -> str:
        statuses = [os.stat(f"{self.dataset_path}{suffix}") for suffix in (".idx", ".bin")]
        state = [(status.st_size, status.st_mtime_ns) for status in statuses]
        digest = hashlib.sha256(f"{self.unique_description}{state}".encode()).hexdigest()
        return f"{digest[:24]}-{self.index_split.name}"


def has_other_epochs(dataset: Any, before: int, now: int) -> bool:
    """Returns whether the order of samples differs between runs of ``before`` and ``now`` samples.

    The number of samples affects the order, because the samples of all epochs are shuffled
    together, except those of a short last epoch.

    Args:
        dataset: Training dataset from :func:`build_datasets` for ``now`` samples, or ``None``.
        before: Number of training samples of an earlier run.
        now: Number of training samples of this run, at least 1.
    """
    parts = [
        part
        for part in getattr(dataset, "datasets", [dataset])
        if isinstance(part, CachedGPTDataset) and part.num_samples is not None
    ]
    return any(
        part.epochs(-(-part.num_samples * before // now)) != part.epochs(part.num_samples)
        for part in parts
    )


def _spread(array: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """Yields ``array`` as a whole if it is small, or evenly spaced parts if it is large.

    A few parts are enough to detect an index that was built from different data. Damaged bytes
    have already been ruled out by the checksum.
    """
    for start, stop in pieces(len(array), array[0].nbytes, _CHECK_WHOLE_BYTES):
        yield array[start:stop]


def _is_within(array: npt.NDArray[Any], least: int, most: int) -> bool:
    return least <= int(array.min()) and int(array.max()) <= most
