"""Training, validation and test samples from token files, or made up.

Owns the reading of ``--data-path`` and its relatives and the checks that must fail before training
starts. Samples themselves are megatron-core's (``GPTDataset`` and its blends); drawing them as
microbatches is :mod:`megatron.adaptive.data.loader`'s. megatron-core is imported when datasets
are built, not with this module, so that the accelerator substitutions come first.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.adaptive import accelerator
from megatron.adaptive.data.indexed import INDEX_CACHE, check_indexed, check_vocabulary_fits
from megatron.adaptive.data.tokenizer import Tokenizer
from megatron.adaptive.errors import ConfigError, DataError

__all__ = [
    "DEFAULT_SPLIT",
    "Blend",
    "DataSpec",
    "Samples",
    "build_datasets",
    "parse_blend",
    "parse_split",
]

DEFAULT_SPLIT = "969,30,1"
_SPLIT_NAMES = ("train", "valid", "test")

Samples = Sequence[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Names the source and form of samples; the fields are named as the flags.

    Attributes:
        seq_length: tokens a sample.
        seed: of the shuffling.
        data_path: one prefix, several, or weights and prefixes in turn; shared out by ``split``.
        split: weights of train, valid and test, ``969,30,1`` by default.
        train_data_path: prefixes for training only; excludes ``data_path``.
        valid_data_path: as ``train_data_path``, for validation.
        test_data_path: as ``train_data_path``, for the test.
        mock_data: made-up samples without files.
        data_cache_path: folder for shuffling indices, ``index_cache`` beside the data by default.
        reset_position_ids: count positions anew after each end of document.
        reset_attention_mask: let no token see an earlier document.
        eod_mask_loss: leave the loss at an end of document out.
        mmap_bin_files: map ``.bin`` files into memory instead of reading from them.
        num_dataset_builder_threads: threads that build the datasets of a blend.
    """

    seq_length: int
    seed: int
    data_path: tuple[str, ...] | None = None
    split: str | None = None
    train_data_path: tuple[str, ...] | None = None
    valid_data_path: tuple[str, ...] | None = None
    test_data_path: tuple[str, ...] | None = None
    mock_data: bool = False
    data_cache_path: str | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    mmap_bin_files: bool = True
    num_dataset_builder_threads: int = 1

    def split_paths(self) -> tuple[tuple[str, ...] | None, ...]:
        """Return the paths of train, valid and test that are given one by one."""
        return self.train_data_path, self.valid_data_path, self.test_data_path


@dataclass(frozen=True)
class Blend:
    """Prefixes of token files and how much of each to take.

    Attributes:
        prefixes: paths without suffix.
        weights: positive share of each; ``None`` takes everything once, in proportion to size.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    def for_megatron(self) -> tuple[list[str], list[float] | None]:
        """Return the pair that megatron-core's dataset settings take."""
        return list(self.prefixes), None if self.weights is None else list(self.weights)


def parse_blend(words: Sequence[str], flag: str = "--data-path") -> Blend:
    """Read ``a``, ``a b c`` or ``0.3 a 0.7 b``.

    Raises:
        ConfigError: weights and prefixes do not alternate, or a weight is not positive.
    """
    given = " ".join(words)
    if not words:
        raise ConfigError(f"{flag} is empty; name at least one prefix")
    weights = [_weight(word) for word in words[::2]]
    if len(words) % 2 or all(weight is None for weight in weights):
        # A path may look like a number, so an odd count is read as paths unless one is missing.
        odd = [word for word in words if _weight(word) is not None and not _exists(word)]
        if odd:
            raise ConfigError(
                f"{flag} {given}: {odd[0]} is neither a prefix nor followed by one; "
                "write weights and prefixes in turn (0.3 a 0.7 b) or prefixes only"
            )
        return Blend(tuple(words))
    valid = [weight for weight in weights if weight is not None]
    if len(valid) != len(weights):
        missing = words[2 * weights.index(None)]
        raise ConfigError(
            f"{flag} {given}: {missing!r} stands where a weight should; write weights and prefixes "
            "in turn (0.3 a 0.7 b) or prefixes only"
        )
    for weight in valid:
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(f"{flag} {given}: weight {weight} must be a number above 0")
    prefixes = tuple(words[1::2])
    return Blend(prefixes, tuple(valid) if len(prefixes) > 1 else None)


def _weight(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _exists(prefix: str) -> bool:
    return Path(f"{prefix}.idx").exists()


def parse_split(split: str) -> tuple[float, float, float]:
    """Read ``969,30,1`` into shares that add up to 1; missing ones are 0.

    Raises:
        ConfigError: not one to three numbers from 0 on, or all are 0.
    """
    words = split.split(",")
    weights = [_weight(word) for word in words]
    valid = [w for w in weights if w is not None and math.isfinite(w) and w >= 0]
    if len(valid) != len(words) or len(words) > len(_SPLIT_NAMES) or not sum(valid):
        raise ConfigError(
            f"--split {split}: must be one to three numbers from 0 on, parted by commas and not "
            "all 0, such as 969,30,1"
        )
    total = sum(valid)
    shares = [weight / total for weight in valid] + [0.0] * (len(_SPLIT_NAMES) - len(valid))
    return shares[0], shares[1], shares[2]


def build_datasets(
    spec: DataSpec,
    tokenizer: Tokenizer,
    *,
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
        spec: where samples come from.
        tokenizer: its ``eod`` and size enter the samples.
        train_samples: training samples needed in all, from the first iteration to the last.
        valid_samples: as ``train_samples``, over all validations; 0 builds none.
        test_samples: as ``valid_samples``.
        is_built_on_rank: whether this rank needs samples. Must be true on global rank 0.

    Returns:
        One dataset each, ``None`` where no samples are asked for, the split has no share, or this
        rank needs none. A sample is a dict of ``tokens``, ``labels``, ``position_ids``
        ``[seq_length] int64``, ``loss_mask [seq_length] float32`` and, with
        ``reset_attention_mask``, ``attention_mask [1, seq_length, seq_length] bool`` (true where
        hidden).

    Raises:
        ConfigError: the settings contradict each other.
        DataError: a file is missing or broken, does not fit the vocabulary, or is too small.
    """
    counts = (train_samples, valid_samples, test_samples)
    if not any(counts):
        return None, None, None
    blends = _blends(spec)
    here = is_built_on_rank()
    if here:
        _check_blends(spec, blends, counts, tokenizer.vocab_size)
    with warnings.catch_warnings():
        # megatron-core warns about optional GPU packages at import and about pad tokens.
        warnings.simplefilter("ignore")
        try:
            built = _build(spec, tokenizer, blends, counts, is_built_on_rank)
        except MemoryError:
            given = ", ".join(f"{n} {c}" for n, c in zip(_SPLIT_NAMES, counts, strict=True))
            raise DataError(
                f"the order of so many samples ({given}) does not fit into memory; lower "
                "--train-iters or --eval-iters, or raise --eval-interval"
            ) from None
    if here:
        for name, dataset, count in zip(_SPLIT_NAMES, built, counts, strict=True):
            if dataset is not None and len(dataset) < count:
                raise DataError(
                    f"the {name} data holds {len(dataset)} samples, but {count} are needed; give "
                    "weights (0.5 a 0.5 b), which let data repeat, or ask for fewer iterations"
                )
    return built


def _blends(spec: DataSpec) -> tuple[Blend | None, Blend | None, Blend | None] | None:
    """Return the blend of each split, or ``None`` for mock data; the sources exclude each other."""
    separate = any(paths is not None for paths in spec.split_paths())
    given = [
        flag
        for flag, is_given in (
            ("--data-path", spec.data_path is not None),
            ("--train-data-path (or --valid-, --test-data-path)", separate),
            ("--mock-data", spec.mock_data),
        )
        if is_given
    ]
    if len(given) != 1:
        what = " and ".join(given) or "no data"
        raise ConfigError(
            f"{what} given; give one of --data-path, --train-data-path and --mock-data"
        )
    if spec.mock_data:
        return None
    if spec.data_path is not None:
        blend = parse_blend(spec.data_path)
        return blend, blend, blend
    if spec.split is not None:
        raise ConfigError(f"--split {spec.split} goes with --data-path, not --train-data-path")
    train, valid, test = (
        None if paths is None else parse_blend(paths, f"--{name}-data-path")
        for name, paths in zip(_SPLIT_NAMES, spec.split_paths(), strict=True)
    )
    return train, valid, test


def _check_blends(
    spec: DataSpec,
    blends: tuple[Blend | None, ...] | None,
    counts: tuple[int, ...],
    vocab_size: int,
) -> None:
    """Check on every rank what megatron-core would assert, hang at or trip over later."""
    if blends is None:
        return
    shares = parse_split(spec.split or DEFAULT_SPLIT) if spec.data_path is not None else None
    if counts[0] and (blends[0] is None or (shares is not None and not shares[0])):
        given = "no --train-data-path" if shares is None else f"--split {spec.split}"
        raise ConfigError(f"{given}: leaves no data for training; give it a share")
    infos = {}
    for blend in blends:
        for prefix in blend.prefixes if blend is not None else ():
            if prefix not in infos:
                infos[prefix] = check_indexed(prefix)
                check_vocabulary_fits(prefix, vocab_size)
    if shares is None:
        return
    # The same sums in the same order as megatron-core, whose rounding this must foresee.
    edges = (0.0, shares[0], shares[0] + shares[1], shares[0] + shares[1] + shares[2])
    for split, (name, count) in enumerate(zip(_SPLIT_NAMES, counts, strict=True)):
        if not count or not shares[split]:
            continue
        for prefix, info in infos.items():
            first, last = (round(edges[split + i] * info.num_sequences) for i in (0, 1))
            # megatron-core would look for samples in an empty split for ever.
            if first >= last:
                raise DataError(
                    f"{prefix}: --split {spec.split or DEFAULT_SPLIT} leaves no document for "
                    f"{name} ({info.num_sequences} in all); change --split"
                    + ("" if name == "train" else ", give that share 0, or set --eval-iters 0")
                )


def _build(
    spec: DataSpec,
    tokenizer: Tokenizer,
    blends: tuple[Blend | None, Blend | None, Blend | None] | None,
    counts: tuple[int, int, int],
    is_built_on_rank: Callable[[], bool],
) -> tuple[Samples | None, Samples | None, Samples | None]:
    accelerator.install()
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import MockGPTDataset

    from megatron.adaptive.data.gpt_data import (
        CachedGPTDataset,
        CachedGPTDatasetConfig,
        quiet_cache_warnings,
    )

    source: dict[str, Any] = {}
    if blends is not None and spec.data_path is not None and blends[0] is not None:
        source = {"blend": blends[0].for_megatron(), "split": spec.split or DEFAULT_SPLIT}
    elif blends is not None:
        source["blend_per_split"] = [
            blend.for_megatron() if blend is not None and count else None
            for blend, count in zip(blends, counts, strict=True)
        ]
    config = CachedGPTDatasetConfig(
        random_seed=spec.seed,
        sequence_length=spec.seq_length,
        tokenizer=tokenizer,
        reset_position_ids=spec.reset_position_ids,
        reset_attention_mask=spec.reset_attention_mask,
        eod_mask_loss=spec.eod_mask_loss,
        create_attention_mask=spec.reset_attention_mask,
        mmap_bin_files=spec.mmap_bin_files,
        num_dataset_builder_threads=spec.num_dataset_builder_threads,
        index_cache=_index_cache(spec, blends),
        **source,
    )
    if config.split_matrix is not None:
        # megatron-core takes 0 samples for "at least one" and may look for it for ever.
        config.split_matrix = [
            share if count else None
            for share, count in zip(config.split_matrix, counts, strict=True)
        ]
    cls = MockGPTDataset if blends is None else CachedGPTDataset
    with quiet_cache_warnings():
        builder = BlendedMegatronDatasetBuilder(cls, list(counts), is_built_on_rank, config)
        train, valid, test = builder.build()
    return train, valid, test


def _index_cache(spec: DataSpec, blends: tuple[Blend | None, ...] | None) -> str:
    if spec.data_cache_path:
        return spec.data_cache_path
    for blend in blends or ():
        if blend is not None:
            return str(Path(blend.prefixes[0]).parent / INDEX_CACHE)
    return ""
