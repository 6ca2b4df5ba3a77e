"""Saves and loads the checkpoints of a training run.

All ranks save and load together. A checkpoint gets its final name only when it is complete. It
consists of a manifest (``checkpoint.folder``) and files in megatron-core's ``torch_dist`` format,
which can be loaded with any parallel sizes and any partition of the layers. If a checkpoint does
not match a run, the error message lists each difference with both values and a remedy.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_outplace,
    extract_matching_values,
    merge,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factory_merges
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from megatron.adaptive.checkpoint import megatron_state as state
from megatron.adaptive.checkpoint import plain_values
from megatron.adaptive.checkpoint.collective_errors import RankGroup
from megatron.adaptive.checkpoint.export import load_adapters
from megatron.adaptive.checkpoint.folder import CheckpointFolder, Manifest
from megatron.adaptive.checkpoint.hugging_face_weights import (
    DESCRIPTION,
    EMBEDDING,
    carry_description,
    carry_flags,
    check_folder,
    load_weights,
)
from megatron.adaptive.checkpoint.match_settings import (
    data_changes,
    require_same_model,
    require_same_optimizer,
)
from megatron.adaptive.checkpoint.megatron_lm import make_manifest, require_reshardable
from megatron.adaptive.checkpoint.node_local import LocalDisk, prepare
from megatron.adaptive.checkpoint.reader import CheckpointReader, WantedPart
from megatron.adaptive.checkpoint.saver import CheckpointSaver, load_first_whole
from megatron.adaptive.checkpoint.snapshots import SnapshotState
from megatron.adaptive.checkpoint.writer import (
    COMMON,
    PICKLED_COMMON,
    Part,
    Piece,
    SavedObject,
    TakenState,
    common_files,
)
from megatron.adaptive.config.input_files import printable
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.engine.process_context import Job
from megatron.adaptive.errors import CheckpointError
from megatron.adaptive.gpt.lora import MARK
from megatron.adaptive.gpt.setup import Run
from megatron.adaptive.gpt.train_step import gather_parameters

_LOG = logging.getLogger(__name__)
_CONTENT = "content_metadata"
_SCHEDULER = "opt_param_scheduler"
_REMEDY = "Free space there or choose another folder with --save"
# Transformer Engine saves state for 8-bit data types under names with this suffix. A checkpoint may
# lack this state, because this trainer does not use 8-bit data types.
_SCRATCH = "_extra_state"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Numbers of iterations and samples that a run has completed.

    Attributes:
        iteration: Number of completed iterations.
        consumed_train_samples: Number of training samples used.
        consumed_valid_samples: Number of validation samples used.
        skipped_iterations: Number of iterations without an update because gradients overflowed.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0


class Checkpoints:
    """Saves and loads the checkpoints of one run. All ranks must call each method together.

    Args:
        run: Run with a built model. This object keeps references only to the model, optimizer,
            scheduler and datasets.
        local: Local disk of the node, to which checkpoints are written first, or ``None`` to write
            them directly to ``--save``.
        config: Settings to use, or ``None`` for the settings of the run. ``config.checkpoint``
            determines which state is saved and loaded.
        saver: Saver that an earlier object of the same job has used, or ``None`` to create one. It
            is passed on because it may still be writing a checkpoint.

    Attributes:
        saver: Object that writes the checkpoints and reads them back.
        weights_iteration: Iteration of the checkpoint that :meth:`load` has loaded, or 0 if it has
            loaded none.
    """

    def __init__(
        self,
        run: Run,
        local: LocalDisk | None = None,
        config: TrainerConfig | None = None,
        saver: CheckpointSaver | None = None,
    ) -> None:
        self._config = run.job.config if config is None else config
        self._config_dict = self._config.to_dict()
        self._settings = self._config.checkpoint
        self._chunks = run.chunks
        self._optimizer = run.optimizer
        self._scheduler = run.scheduler
        self._samples = run.samples
        self._all = RankGroup(run.job.rank, run.job.control_group)
        self.saver = CheckpointSaver(run.job, local) if saver is None else saver
        self._sharing: FullyParallelSaveStrategyWrapper | None = None
        self.weights_iteration = 0
        self._is_checked = False
        self._standing: tuple[state.StateParts, list[int]] | None = None

    def save(self, progress: Progress, *, behind: bool = False) -> Path | None:
        """Writes a checkpoint, and returns its path, or ``None`` if it is not complete yet.

        Args:
            progress: Number of completed iterations and samples. The checkpoint is named after the
                iteration.
            behind: Whether to write in a background thread while training continues.
        """
        return self.saver.save(
            CheckpointFolder(str(self._settings.save)),
            progress.iteration,
            lambda: self._take(progress),
            keep=self._settings.keep_checkpoints,
            remedy=_REMEDY,
            behind=behind,
        )

    def apart(self, progress: Progress, *, is_whole: bool) -> state.StateParts:
        """Splits the state of this rank into the parts of a checkpoint, and returns the parts.

        All ranks must call this together if the optimizer communicates.

        Args:
            progress: Number of completed iterations and samples, to store in the checkpoint.
            is_whole: Whether to include parts that are also written by another rank. The value must
                be the same in every call.

        Returns:
            Parts of this rank's state. If no tensor has moved in memory since the last call, this
            is the same object as in the last call, with updated values.
        """
        if self._standing is not None:
            parts, addresses = self._standing
            if addresses == state.addresses(self._chunks, self._optimizer):
                self._refresh(parts, progress)
                return parts
            self._standing = None
        sharded, common = save_preprocess(
            self._state_to_save(progress),
            # All checkpoints of a run have the same parts, so check them only once.
            validate_access_integrity=not (is_whole or self._is_checked),
            # Do not require equal common values on all ranks, because some of the values differ
            # between stages.
            preprocess_common_before_consistancy_check=lambda common: {},
        )
        self._is_checked = True
        if not is_whole and self._settings.ckpt_fully_parallel_save and self._replicas() > 1:
            if self._sharing is None:
                strategy = get_default_save_sharded_strategy()
                self._sharing = FullyParallelSaveStrategyWrapper(
                    strategy, _replica_group(), do_cache_distribution=True
                )
            self._sharing.apply_saving_parallelization(sharded)
        parts = state.StateParts.of(sharded, common, is_whole=is_whole)
        if (
            self._settings.no_save_optim or not state.is_sharded(self._optimizer)
        ) and parts.is_lasting(self._chunks, self._optimizer):
            self._standing = parts, state.addresses(self._chunks, self._optimizer)
        return parts

    def manifest(self, progress: Progress) -> Manifest:
        """Returns the manifest for a checkpoint of the current state at ``progress``."""
        return {
            "progress": dataclasses.asdict(progress),
            "config": self._config_dict,
            "shape": state.mesh_shape(self._config),
            "padded_vocab_size": state.padded_vocab_size(self._chunks),
            "has_optimizer": not self._settings.no_save_optim,
            "has_rng": not self._settings.no_save_rng,
            "save_id": "",
        }

    def load(self) -> Progress | None:
        """Loads the selected checkpoint into the model, the optimizer and the scheduler.

        ``--finetune`` loads only the weights and starts at iteration 0. ``--no-load-optim``
        continues at the saved iteration, but uses the learning rate of this run's settings. Random
        states are restored if the parallel sizes have not changed. Otherwise they are not needed,
        because dropout depends only on the seed and the position of each microbatch.

        Returns:
            Progress of the run, or ``None`` if there is no checkpoint to load.

        Raises:
            CheckpointError: If a required checkpoint is missing, or if the checkpoint is damaged,
                has a newer format or does not match this run. The weights of the model may already
                have changed.
        """
        steps: list[int] = []
        if self._settings.load is not None:
            steps = self._all.on_first(self._steps)
        lora = self._config.lora
        folder = self._settings.load_hf
        if folder is not None and (lora.is_on or not steps):
            path = Path(folder)
            self._all.together(lambda: load_weights(self._chunks, path, self._config))
            self._optimizer.reload_model_params()
        self._all.on_first(self._carry_description)
        if not steps and lora.load_lora is not None:
            self._load_adapters(lora.load_lora)
        return load_first_whole(steps, self._load, self._all) if steps else None

    def _load_adapters(self, folder: str) -> None:
        path = Path(folder)
        self._all.together(lambda: load_adapters(self._chunks, path, self._config))
        self._optimizer.reload_model_params()

    def _carry_description(self) -> None:
        """Copies the model's configuration and tokenizer, for exports, to the ``--save`` folder."""
        settings = self._settings
        sources = [Path(settings.load) / DESCRIPTION] if settings.load is not None else []
        sources += [Path(settings.load_hf)] if settings.load_hf is not None else []
        if settings.save is not None and sources:
            try:
                Path(settings.save).mkdir(parents=True, exist_ok=True)
                carry_description(sources, Path(settings.save))
                carry_flags(self._config)
            except OSError as error:
                raise CheckpointError(f"{settings.save}: {error.strerror}. {_REMEDY}") from None

    def _load(self, iteration: int) -> Progress:
        """Loads the checkpoint of ``iteration``, and returns the progress of the run."""
        path, manifest = self._all.on_first(lambda: self._find(iteration))
        self._standing = None
        save_id = manifest["save_id"]
        files = manifest["files"]
        blocks = manifest["blocks"]
        with self.saver.reading(path, iteration, save_id, files, blocks) as reader:
            content = self._read(reader, manifest)
        common = content.common
        loaded = content.loaded
        state.load_model(self._chunks, loaded, strict=content.has_all)
        if self._config.lora.load_lora is not None and not content.has_adapters:
            self._load_adapters(self._config.lora.load_lora)
        if self._loads_optimizer:
            state.load_optimizer(self._optimizer, loaded["optimizer"])
            state.load_scheduler(self._scheduler, self._optimizer, common[_SCHEDULER])
        else:
            self._optimizer.reload_model_params()  # This also updates the 32-bit weights.
            if not self._settings.finetune:
                self._scheduler.step(common[_SCHEDULER]["num_steps"])
        if self._loads_rng(manifest):
            state.load_rng(loaded[state.RNG])
        progress = Progress(**manifest["progress"])
        self.weights_iteration = progress.iteration
        if self._settings.finetune:
            progress = Progress()
        if self.saver.local is not None:
            self.saver.local.resumed = progress.iteration
        return progress

    def _take(self, progress: Progress) -> TakenState:
        """Returns the state of this rank at ``progress``, in the form that the saver expects."""
        parts = self.apart(progress, is_whole=False)
        about = self.manifest(progress)
        return TakenState(
            pieces=parts.pieces,
            objects={name: SavedObject.of(value) for name, value in parts.objects.items()},
            once=common_files(parts.common),
            manifest=lambda save_id, _: {**about, "save_id": save_id},
        )

    def _refresh(self, parts: state.StateParts, progress: Progress) -> None:
        """Updates the values in ``parts`` that do not share memory with the state of the run.

        These values are the optimizer's parameter groups, the random states, and the counters,
        which are set to ``progress``.
        """
        parts.common.update(self._counters(progress))
        if "optimizer" in parts.common:
            state.refresh_optimizer(parts.common["optimizer"], self._optimizer)
        if not self._settings.no_save_rng:
            random = state.sharded_rng(self._config)
            parts.objects[random.unique_key] = [random.data]

    def _counters(self, progress: Progress) -> dict[str, Any]:
        return {
            "iteration": progress.iteration,
            "progress": dataclasses.asdict(progress),
            _SCHEDULER: self._scheduler.state_dict(),
        }

    def _state_to_save(self, progress: Progress) -> dict[str, Any]:
        content = dict(state.METADATA)
        weights = state.sharded_model(self._chunks, content)
        if self._config.lora.is_on and self._settings.load_hf is not None:
            # The base weights are in the folder of --load-hf, so do not save them.
            weights = _only(weights, adapters=True, base=False)
        whole: dict[str, Any] = {_CONTENT: content, **self._counters(progress), **weights}
        if not self._settings.no_save_optim:
            whole["optimizer"] = state.sharded_optimizer(
                self._optimizer, weights, content, loading=False
            )
        if not self._settings.no_save_rng:
            whole[state.RNG] = state.sharded_rng(self._config)
        return state.without_local_copies(whole)

    def _steps(self) -> list[int]:
        """Returns the iterations of the checkpoints to try, in order. Runs only on rank 0.

        The list is empty if the run starts from scratch or from a Hugging Face model.

        Raises:
            CheckpointError: If there is no checkpoint, although one is required.
        """
        folder = CheckpointFolder(str(self._settings.load))
        named = self._settings.ckpt_step
        steps = [*folder.candidates()] if named is None else [named]
        if steps:
            return steps
        reason = "contains no checkpoint" if folder.path.is_dir() else "does not exist"
        if self._settings.exit_on_missing_checkpoint:
            raise CheckpointError(
                f"--load {folder.path} {reason}; pass a folder with a checkpoint, or remove "
                "--exit-on-missing-checkpoint to start from scratch"
            )
        base = self._settings.load_hf
        start = "scratch" if base is None else f"--load-hf {base}"
        text = printable(f"--load {folder.path} {reason}; starting from {start}")
        _LOG.warning("WARNING: %s", text)
        return []

    def _find(self, iteration: int) -> tuple[Path, Manifest]:
        """Returns path and manifest of the checkpoint of ``iteration``. Runs only on rank 0."""
        folder = CheckpointFolder(str(self._settings.load))
        path, manifest = folder.open(iteration, trust=self._settings.trust_checkpoint)
        if not manifest["config"]:
            with CheckpointReader(path, manifest["files"], {}) as reader:
                common = _common(reader)
            manifest = make_manifest(path, manifest["files"], common, self._config)
            if self._loads_optimizer and self._config.parallel.use_distributed_optimizer:
                require_reshardable(path, common.get(_CONTENT) or {})
        rows = state.padded_vocab_size(self._chunks)
        require_same_model(manifest, self._config, rows, f"--load {path}")
        if rows != manifest["padded_vocab_size"]:
            _LOG.warning(
                "WARNING: --load %s has %d rows in the embedding, but this run has %d; padding "
                "rows start at zero and count in the softmax, as in Megatron-LM, so the loss will "
                "differ; use --make-vocab-size-divisible-by to keep the number of rows",
                path,
                manifest["padded_vocab_size"],
                rows,
            )
        if self._loads_optimizer:
            require_same_optimizer(manifest, self._config, f"--load {path}")
        self._warn_about_data(path, manifest)
        return path, manifest

    def _warn_about_data(self, path: Path, manifest: Manifest) -> None:
        """Warns if a run that has used samples resumes with a different order of the samples."""
        used = manifest["progress"].get("consumed_train_samples", 0)
        if self._settings.finetune or self._config.run.skip_train or not used:
            return
        name = f"--load {path}"
        if changes := data_changes(manifest, self._config, self._samples.train, name):
            text = printable(f"{name}: {'; '.join(changes)}")
            _LOG.warning(
                "WARNING: %s; this changes the order of the training samples, and the run skips "
                "the first %d, so samples may repeat or never be used; use the settings of the "
                "checkpoint to avoid this",
                text,
                used,
            )

    @property
    def _loads_optimizer(self) -> bool:
        return not (self._settings.no_load_optim or self._settings.finetune)

    def _loads_rng(self, manifest: Manifest) -> bool:
        if self._settings.no_load_rng or self._settings.finetune or not manifest["has_rng"]:
            return False
        return bool(manifest["shape"] == state.mesh_shape(self._config))

    def _read(self, reader: CheckpointReader, manifest: Manifest) -> _Content:
        """Reads this rank's part of the checkpoint from ``reader``. All ranks must call this."""
        path, common = reader.path, self._all.together(lambda: _common(reader))
        content = common.get(_CONTENT) or {}  # Megatron-LM before 0.14 did not save this metadata.
        weights = state.sharded_model(self._chunks, content)
        has_all = has_adapters = True
        if self._config.lora.is_on:
            has_adapters = any(MARK in name for name in reader.tensors)
            has_base = EMBEDDING in reader.tensors
            if not has_base and self._settings.load_hf is None:
                raise CheckpointError(
                    f"--load {path} contains only adapters; pass their base model as --load-hf"
                )
            has_all = has_adapters and has_base
            weights = _only(weights, adapters=has_adapters, base=has_base)
        whole: dict[str, Any] = dict(weights)
        if self._loads_optimizer:
            optimizer = self._optimizer
            saved = common["optimizer"]
            self._all.together(
                lambda: state.require_same_groups(optimizer, saved, f"--load {path}")
            )
            whole["optimizer"] = state.sharded_optimizer(
                self._optimizer, weights, content, loading=True
            )
        if self._loads_rng(manifest):
            whole[state.RNG] = state.sharded_rng(self._config)
        # Do not add rank numbers to error messages here, because _read_shards already adds them.
        loaded = self._all.together(
            lambda: self._read_shards(whole, common, reader), name_ranks=False
        )
        return _Content(common, loaded, has_all, has_adapters)

    def _read_shards(
        self, whole: dict[str, Any], common: dict[str, Any], reader: CheckpointReader
    ) -> dict[str, Any]:
        """Reads the shards in ``whole``, and returns the loaded state. All ranks must call this.

        Args:
            whole: State that contains an empty shard for each saved value.
            common: Values that all ranks share. The loaded state is merged into this dictionary.
            reader: Reader of the checkpoint.
        """

        def read(shards: Any, _: object = None) -> Any:
            return self._all.together(lambda: _read_into(shards, reader))

        shards, unsharded, factories = load_preprocess(whole)
        shards = self._all.together(
            lambda: _present(extract_sharded_base(shards)[0], reader), name_ranks=False
        )
        if self._settings.ckpt_fully_parallel_load and self._replicas() > 1:
            # The wrapper calls only the ``load`` method of the strategy, so no other is needed.
            strategy = SimpleNamespace(load=read)
            sharing = FullyParallelLoadStrategyWrapper(strategy, _replica_group())
            loaded = sharing.load(shards, reader.path)
        else:
            loaded = read(shards)
        merge(common, unsharded)
        merge(common, loaded)
        return state.with_own_storage(apply_factory_merges(common, factories))

    def _replicas(self) -> int:
        """Returns the number of ranks that have the same state and share the work of saving it."""
        if self._config.parallel.unequal_sizes is not None:
            return 1
        count: int = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        return count


class _Content(NamedTuple):
    """State that one rank has read from a checkpoint.

    Attributes:
        common: Values that all ranks share, keyed by name.
        loaded: State of this rank, keyed by name.
        has_all: Whether the checkpoint contains all weights of the run.
        has_adapters: Whether the checkpoint contains adapter weights (LoRA).
    """

    common: dict[str, Any]
    loaded: dict[str, Any]
    has_all: bool
    has_adapters: bool


def _only(weights: dict[str, dict[str, Any]], *, adapters: bool, base: bool) -> dict[str, Any]:
    """Returns the adapter weights of each chunk, all other weights, or both.

    Args:
        weights: Weights of each chunk, keyed by name.
        adapters: Whether to include the weights of adapters.
        base: Whether to include all other weights.
    """
    kept = {True: adapters, False: base}
    return {
        chunk: {name: weight for name, weight in part.items() if kept[MARK in name]}
        for chunk, part in weights.items()
    }


def _common(reader: CheckpointReader) -> dict[str, Any]:
    return dict(reader.read_values(COMMON, PICKLED_COMMON))


def _present(shards: dict[str, Any], reader: CheckpointReader) -> dict[str, Any]:
    """Returns the ``shards`` that the checkpoint contains.

    Only state for 8-bit data types may be missing.

    Raises:
        CheckpointError: If any other shard is missing.
    """

    def is_there(shard: Any) -> bool:
        if isinstance(shard, ShardedObject):
            return shard.unique_key in reader.objects
        return shard.key in reader.tensors

    present, others = extract_matching_values(shards, is_there)
    # Only layers of Transformer Engine save state for 8-bit data types.
    keys = {shard.key for shard in nested_values(others)}
    absent = sorted(key for key in keys if not key.endswith(_SCRATCH))
    if absent:
        raise CheckpointError(
            f"--load {reader.path} has no {absent[0]} ({len(absent)} entries are missing), so it "
            "belongs to a different model or optimizer; use the settings with which it was "
            "trained"
        )
    return dict(present)


def _read_into(shards: Any, reader: CheckpointReader) -> Any:
    """Returns the state ``shards``, with each shard replaced by the value that ``reader`` reads."""
    parts: list[WantedPart] = []
    objects: dict[str, list[Any]] = {}
    padding: list[torch.Tensor] = []

    def prepare_target(shard: Any) -> Any:
        if isinstance(shard, ShardedObject):
            name = shard.unique_key
            if name not in objects:
                objects[name] = reader.read_object(name)
            left = objects[name]
            return left.pop(0) if len(left) > 1 else left[0]
        saved = reader.tensors[shard.key].size
        size = torch.Size(shard.global_shape)
        if saved != size and not shard.allow_shape_mismatch:
            raise CheckpointError(
                f"{reader.path} has {shard.key} with shape {list(saved)}, but the run needs "
                f"{list(size)}; the checkpoint belongs to a different model"
            )
        if shard.data is None:
            shard.init_data(torch.device("cpu"))
        data = shard.data.detach()
        lead = shard.prepend_axis_num
        ends = zip(data.shape, saved[lead:], shard.global_offset[lead:], strict=True)
        for axis, (length, end, begin) in enumerate(ends):
            if (kept := min(length, max(0, end - begin))) < length:
                padding.append(data.narrow(axis, kept, length - kept))
        part = WantedPart(
            name=shard.key,
            offset=shard.global_offset,
            target=data[(None,) * lead],
            may_exceed=shard.allow_shape_mismatch,
        )
        parts.append(part)
        return data

    state = dict_list_map_outplace(prepare_target, shards)
    reader.read(parts)
    for rows in padding:  # The checkpoint does not contain these padding rows.
        rows.zero_()
    return state


def _replica_group() -> dist.ProcessGroup:
    group: dist.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group


def prepare_folder(job: Job, config: TrainerConfig) -> LocalDisk | None:
    """Reserves the folder ``--save`` for this job, and finishes an earlier run's upload to it.

    The upload is finished only if this run resumes from the newest checkpoint in ``--save``.
    Without ``--save``, this function does nothing.

    Returns:
        Local disk of this node for checkpoints, or ``None`` if the run does not use local disks.
    """
    settings = config.checkpoint
    if settings.save is None:
        return None
    folder = CheckpointFolder(settings.save)

    def latest() -> int | None:
        if settings.load is None or settings.ckpt_step is not None:
            return None
        load = CheckpointFolder(settings.load)
        return load.latest() or 0 if load.path.resolve() == folder.path.resolve() else None

    return prepare(folder, job, _REMEDY, settings.save_local, latest, settings.keep_checkpoints)


def check_model_folder(job: Job, config: TrainerConfig) -> None:
    """Compares the tensors of ``--load-hf`` with those of the model, before the model is built.

    All ranks must call this together; rank 0 reads the headers of the files. A run that resumes
    from a checkpoint skips the check, because it does not need the weights in this folder.

    Raises:
        AdaptiveError: If names, shapes or types of the folder's tensors do not match the model.
    """
    settings = config.checkpoint
    if (folder := settings.load_hf) is None:
        return

    def check() -> None:
        is_there = settings.load is not None and Path(settings.load).is_dir()
        steps = [*CheckpointFolder(str(settings.load)).candidates()] if is_there else []
        if config.lora.is_on or not (steps or settings.ckpt_step is not None):
            check_folder(Path(folder), config)

    RankGroup(job.rank, job.control_group).on_first(check)


class RunState(SnapshotState):
    """Provides the state of a run to in-memory snapshots.

    Args:
        run: Run with a built model.
        progress: Function that returns the number of iterations and samples completed so far.
    """

    def __init__(self, run: Run, progress: Callable[[], Progress]) -> None:
        self._run = run
        self._progress = progress
        # Snapshots need the optimizer's state, even if the run's checkpoints do not include it.
        config = run.job.config
        settings = dataclasses.replace(config.checkpoint, no_save_optim=False, no_save_rng=True)
        config = dataclasses.replace(config, checkpoint=settings)
        self._checkpoints = Checkpoints(run, config=config)
        self._parts: state.StateParts | None = None

    def take(self) -> tuple[Mapping[Part, Piece] | None, bytes]:
        gather_parameters(self._run)
        progress = self._progress()
        former = self._parts
        parts = self._parts = self._checkpoints.apart(progress, is_whole=True)
        # Copy buffers immediately, because some buffers, such as the expert bias of routers, change
        # before the optimizer's update.
        buffers = state.buffer_storages(self._run.chunks)
        copied = {
            part: dataclasses.replace(piece, tensor=piece.tensor.clone())
            for part, piece in parts.pieces.items()
            if piece.tensor.numel() and piece.tensor.untyped_storage().data_ptr() in buffers
        }
        for name in parts.objects:
            if f"{_SCRATCH}/" not in name:
                raise TypeError(
                    f"{name} is not a tensor, so it cannot be included in a snapshot of the state"
                )
        line = json.dumps({"progress": dataclasses.asdict(progress)}).encode()
        extra = line + b"\n" + plain_values.dumps(parts.common)
        is_unmoved = parts is former and not copied
        return None if is_unmoved else {**parts.pieces, **copied}, extra

    def head(self) -> Mapping[str, Any]:
        return {
            "has_common": state.has_parameters(self._run.optimizer),
            "manifest": self._checkpoints.manifest(self._progress()),
        }
