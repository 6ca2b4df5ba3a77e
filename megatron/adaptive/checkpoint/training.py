"""Saves and loads a training run, whole or not at all, by all ranks together.

A checkpoint is megatron-core's ``torch_dist``, which loads into every mesh and partition, with a
manifest of ours beside it (``checkpoint_folder.py``). It is written in the process that trains:
megatron-core's own writer starts a process by ``spawn`` and others by ``fork`` at each save, which
costs seconds and copies the sockets and mappings of the channels into the children.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.validation import StrictHandling

from megatron.adaptive.checkpoint import state as state
from megatron.adaptive.checkpoint.async_writer import Behind
from megatron.adaptive.checkpoint.cached_state import Standing
from megatron.adaptive.checkpoint.exchange import Exchange, by_name, common_bytes
from megatron.adaptive.checkpoint.folder import CheckpointFolder, Manifest
from megatron.adaptive.checkpoint.local import LocalDisk
from megatron.adaptive.checkpoint.match import require_same_model, require_same_optimizer
from megatron.adaptive.checkpoint.saver import InProcessSaver, Shards
from megatron.adaptive.checkpoint.writer import CheckpointWriter
from megatron.adaptive.errors import CheckpointError
from megatron.adaptive.gpt.initialize import TrainingJob

__all__ = ["Checkpoints", "Progress"]

_LOG = logging.getLogger(__name__)
_CONTENT = "content_metadata"
_SCHEDULER = "opt_param_scheduler"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come.

    Attributes:
        iteration: iterations done.
        consumed_train_samples: training samples used.
        consumed_valid_samples: validation samples used.
        skipped_iterations: iterations without an update, for an overflow.
    """

    iteration: int
    consumed_train_samples: int
    consumed_valid_samples: int
    skipped_iterations: int


class Checkpoints:
    """Saves and loads one run. Every method but :meth:`completed` is collective over all ranks.

    Args:
        job: this process within the job; ``job.config.checkpoint`` says what is saved and loaded.
        chunks: this rank's model chunks, wrapped for data parallelism.
        optimizer: megatron-core's optimizer over their parameters.
        scheduler: megatron-core's schedule of learning rate and weight decay.
        local: the node's own disk, where checkpoints go first, ``None`` for ``--save`` at once.
    """

    def __init__(
        self,
        job: TrainingJob,
        chunks: Sequence[torch.nn.Module],
        optimizer: Any,
        scheduler: Any,
        local: LocalDisk | None = None,
    ) -> None:
        self._job = job
        self._local = local
        self._config = job.config
        self._config_told = job.config.to_dict()
        self._settings = job.config.checkpoint
        self._chunks = chunks
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._all = Exchange(job.rank, job.control_group)
        self._background: Exchange | None = None
        self._saver = InProcessSaver()
        self._writer = CheckpointWriter(job, self._saver, local)
        self._sharing: FullyParallelSaveStrategyWrapper | None = None
        self._is_checked = False
        self._standing: Standing | None = None
        self._behind = Behind()

    def save(self, progress: Progress) -> Path:
        """Write a checkpoint; the ones before it stay.

        Blocks until it is complete and durable. One that could not be written behind training
        before is told of; this one takes its place.

        Args:
            progress: how far the run has come; the iteration names the checkpoint.

        Returns:
            Its folder.

        Raises:
            CheckpointError: it could not be written on some rank; nothing of it is left.
        """
        self._is_former_lacking(progress.iteration)
        path = self._take(progress, self._all, copy=False)()
        if path is None:
            assert self._local is not None
            path = self._local.drain(tell=False)
            assert path is not None
        return path

    def save_behind(self, progress: Progress) -> Path | None:
        """Copy the state into the host's memory and write it while training goes on.

        Waits for the checkpoint before, if that is not complete yet. If that could not be written,
        this one is written at once: a disk that was full for a while costs no steps.

        Args:
            progress: how far the run has come.

        Returns:
            Its folder where it was written at once.

        Raises:
            CheckpointError: neither the checkpoint before it nor this one could be written.
        """
        if self._is_former_lacking(progress.iteration):
            return self._take(progress, self._all, copy=False)()
        if self._background is None:
            timeout = datetime.timedelta(minutes=self._config.parallel.distributed_timeout_minutes)
            # Its own: training's may be in use at the same moment.
            group = dist.new_group(backend="gloo", timeout=timeout)
            self._background = Exchange(self._job.rank, group)
        write = self._take(progress, self._background, copy=True)
        self._behind.begin(write, progress.iteration)
        return None

    def _is_former_lacking(self, iteration: int) -> bool:
        """Whether the checkpoint before that of ``iteration`` failed; the same on all ranks."""
        why = self._behind.lacking(iteration)
        if why and self._job.is_first:
            _LOG.warning("WARNING: %s", why)
        return bool(why)

    def completed(self) -> tuple[int, Path] | None:
        """Iteration and folder of a checkpoint that was completed behind training; each once."""
        found = self._behind.completed()
        if found is None and self._local is not None:
            found = self._local.completed()
        return found

    def finish(self) -> None:
        """Wait for the checkpoint that is being written behind training, if there is one.

        Raises:
            CheckpointError: it could not be written; nothing of it is left.
        """
        self._behind.finish()

    def close(self) -> None:
        """Wait until the last checkpoint is where it is to be, in shared storage.

        Raises:
            CheckpointError: it could not be written, or not be copied there.
        """
        self.finish()
        if self._local is not None:
            self._local.drain()

    def pieces(self, progress: Progress) -> tuple[dict[str, list[Any]], dict[str, Any]]:
        """Take this rank's state apart as a checkpoint has it. Collective where optimizers are.

        Args:
            progress: how far the run has come.

        Returns:
            megatron-core's sharded tensors and objects by their names in a checkpoint, also those
            that another rank would write; and what is the same on all ranks.
        """
        sharded, common = save_preprocess(
            self._state_to_save(progress), validate_access_integrity=False
        )
        return by_name(sharded), common

    def refresh(self, common: dict[str, Any], progress: Progress) -> None:
        """Bring the second part of :meth:`pieces` to now, in place; not of sharded optimizers."""
        common |= {
            "iteration": progress.iteration,
            "progress": dataclasses.asdict(progress),
            _SCHEDULER: self._scheduler.state_dict(),
        }
        if "optimizer" in common:
            state.refresh_optimizer(common["optimizer"], self._optimizer)

    def load(self) -> Progress | None:
        """Load the checkpoint that the settings name into model, optimizer and schedule.

        ``--finetune`` loads the weights and starts anew; ``--no-load-optim`` also goes on counting,
        with the schedule of the learning rate at its place but from this run's settings. Random
        states are restored into the same mesh; others need none, for dropout is drawn from the
        seed and the place of each microbatch.

        Returns:
            How far the run had come, ``None`` where there is nothing to load.

        Raises:
            CheckpointError: the checkpoint is missing where one must be, damaged, of a newer
                format, or does not fit this run; the model may be loaded in part.
        """
        if self._settings.load is None:
            return None
        found = self._all.on_first(self._find, name_rank=False)
        if found is None:
            return None
        path, manifest = found
        self._standing = None
        if self._local is None:
            self._read(path, path, manifest)
        else:
            step = int(manifest.progress["iteration"])
            with self._local.reading(path, step, manifest.save_id, manifest.files) as near:
                self._read(path, near, manifest)
        progress = Progress(**manifest.progress)
        if self._settings.finetune:
            progress = Progress(**{field.name: 0 for field in dataclasses.fields(Progress)})
        if self._local is not None:
            self._local.resumed = progress.iteration
        return progress

    def _take(
        self, progress: Progress, ranks: Exchange, *, copy: bool
    ) -> Callable[[], Path | None]:
        """Take the state as it is now.

        Args:
            progress: how far the run has come.
            ranks: with whom it will be written.
            copy: whether it is copied, so that it may change before it is written.

        Returns:
            What writes it, collective over ``ranks``; gives its folder, ``None`` while it is on
            the nodes' own disks alone.
        """
        if self._settings.save is None:
            raise CheckpointError("there is no folder to save a checkpoint in: add --save")
        folder = CheckpointFolder(self._settings.save)
        shards, common = self._again(progress) or self._apart(progress)
        shards = self._saver.taken(shards, copy=copy)
        content, manifest = common_bytes(common), self.manifest(progress)
        return lambda: self._writer.put(folder, manifest, content, shards, ranks)

    def _apart(self, progress: Progress) -> tuple[Shards, dict[str, Any]]:
        """Take the state apart; returns what this rank writes, and what all have in common."""
        sharded, common = save_preprocess(
            self._state_to_save(progress),
            # All of a run's checkpoints are cut alike.
            validate_access_integrity=not self._is_checked,
            preprocess_common_before_consistancy_check=lambda common: {},  # differs by stage
        )
        self._is_checked = True
        if self._settings.ckpt_fully_parallel_save and self._replicas() > 1:
            if self._sharing is None:
                self._sharing = FullyParallelSaveStrategyWrapper(
                    self._saver, _replica_group(), do_cache_distribution=True
                )
            self._sharing.apply_saving_parallelization(sharded)
        shards = by_name(sharded, own=True)
        if self._settings.no_save_optim or not state.is_sharded(self._optimizer):
            self._standing = Standing.of(shards, common, self._chunks, self._optimizer)
        return shards, common

    def _again(self, progress: Progress) -> tuple[Shards, dict[str, Any]] | None:
        """The same at less cost, where the state is where it was when it was last taken apart."""
        standing = self._standing
        if standing is None:
            return None
        if standing.addresses != state.addresses(self._chunks, self._optimizer):
            self._standing = None
            return None
        self.refresh(standing.common, progress)
        for shard in standing.random:
            shard.data = state.sharded_rng(self._config).data
        return standing.shards, standing.common

    def _state_to_save(self, progress: Progress) -> dict[str, Any]:
        content = dict(state.METADATA)
        weights = state.sharded_model(self._chunks, content)
        whole: dict[str, Any] = {
            _CONTENT: content,
            "iteration": progress.iteration,
            "progress": dataclasses.asdict(progress),
            _SCHEDULER: self._scheduler.state_dict(),
            **weights,
        }
        if not self._settings.no_save_optim:
            whole["optimizer"] = state.sharded_optimizer(
                self._optimizer, weights, content, loading=False
            )
        if not self._settings.no_save_rng:
            whole[state.RNG] = state.sharded_rng(self._config)
        return state.without_local_copies(whole)

    def manifest(self, progress: Progress) -> Manifest:
        """What a checkpoint of now says of itself."""
        return Manifest(
            progress=dataclasses.asdict(progress),
            config=self._config_told,
            shape=state.mesh_shape(self._config),
            padded_vocab_size=state.padded_vocab_size(self._chunks),
            has_optimizer=not self._settings.no_save_optim,
            has_rng=not self._settings.no_save_rng,
            save_id="" if self._local is None else secrets.token_hex(8),
        )

    def _find(self) -> tuple[Path, Manifest] | None:
        """Return the checkpoint to load; on rank 0 only."""
        folder = CheckpointFolder(str(self._settings.load))
        iteration = self._settings.ckpt_step
        if iteration is None:
            iteration = folder.latest()
        if iteration is None:
            why = "holds no checkpoint" if folder.path.is_dir() else "does not exist"
            if self._settings.exit_on_missing_checkpoint:
                raise CheckpointError(
                    f"--load {folder.path} {why}: name a folder with one, or leave out "
                    "--exit-on-missing-checkpoint to start from scratch"
                )
            _LOG.warning("WARNING: --load %s %s: starting from scratch", folder.path, why)
            return None
        path, manifest = folder.open(iteration)
        rows = state.padded_vocab_size(self._chunks)
        require_same_model(manifest, self._config, rows, f"--load {path}")
        if rows != manifest.padded_vocab_size:
            self._warn_of_padding(rows, manifest.padded_vocab_size, path)
        if self._loads_optimizer:
            require_same_optimizer(manifest, self._config, f"--load {path}")
        return path, manifest

    def _warn_of_padding(self, rows: int, saved_rows: int, path: Path) -> None:
        tensor_parallel = self._config.parallel.tensor_model_parallel_size
        divisor, rest = divmod(saved_rows, tensor_parallel)
        remedy = "" if rest else f"; --make-vocab-size-divisible-by {divisor} keeps their number"
        _LOG.warning(
            "WARNING: --load %s has %d rows in the embedding and this run has %d: rows that only "
            "pad the vocabulary start at zero, and count in the softmax as in Megatron-LM, so the "
            "loss will not be the same%s",
            path,
            saved_rows,
            rows,
            remedy,
        )

    @property
    def _loads_optimizer(self) -> bool:
        return not (self._settings.no_load_optim or self._settings.finetune)

    def _loads_rng(self, manifest: Manifest) -> bool:
        wanted = not (self._settings.no_load_rng or self._settings.finetune)
        return wanted and manifest.has_rng and manifest.shape == state.mesh_shape(self._config)

    def _read(self, path: Path, near: Path, manifest: Manifest) -> None:
        """Read a checkpoint from ``near``, where its files are to be found."""
        common = self._all.together(lambda: dist_checkpointing.load_common_state_dict(str(near)))
        content = common[_CONTENT]
        weights = state.sharded_model(self._chunks, content)
        whole: dict[str, Any] = dict(weights)
        if self._loads_optimizer:
            self._all.together(lambda: self._require_same_groups(common, path))
            whole["optimizer"] = state.sharded_optimizer(
                self._optimizer, weights, content, loading=True
            )
        if self._loads_rng(manifest):
            whole[state.RNG] = state.sharded_rng(self._config)
        loaded = self._all.together(lambda: self._read_shards(whole, path, near))
        state.load_model(self._chunks, loaded)
        if self._loads_optimizer:
            state.load_optimizer(self._optimizer, loaded["optimizer"])
            state.load_scheduler(self._scheduler, self._optimizer, common[_SCHEDULER])
        else:
            state.reload_main_params(self._optimizer)
            if not self._settings.finetune:
                self._scheduler.step(common[_SCHEDULER]["num_steps"])
        if self._loads_rng(manifest):
            state.load_rng(loaded[state.RNG])

    def _require_same_groups(self, common: dict[str, Any], path: Path) -> None:
        before, now = state.saved_groups(common["optimizer"]), state.count_groups(self._optimizer)
        if before != now:
            raise CheckpointError(
                f"--load {path} holds optimizer state in {before} groups of parameters and this "
                f"run has {now}: give the same --decoupled-lr and weight decay, or load the "
                "weights alone with --no-load-optim"
            )

    def _read_shards(self, whole: dict[str, Any], path: Path, near: Path) -> dict[str, Any]:
        strategy = get_default_load_sharded_strategy(str(near))
        if self._settings.ckpt_fully_parallel_load and self._replicas() > 1:
            strategy = FullyParallelLoadStrategyWrapper(strategy, _replica_group())
        loaded, _, absent = dist_checkpointing.load(
            whole, str(near), strategy, strict=StrictHandling.RETURN_UNEXPECTED
        )
        # Layers of Transformer Engine keep their own scratch state, which others do not write.
        absent = sorted(key for key in absent if not key.endswith("_extra_state"))
        if absent:
            raise CheckpointError(
                f"--load {path} has no {absent[0]} ({len(absent)} such): it is of another model or "
                "optimizer; give the settings it was trained with"
            )
        return state.with_own_storage(loaded)

    def _replicas(self) -> int:
        """Ranks that can share out what they hold alike; all ranks of the job must agree on it."""
        if self._config.parallel.unequal_sizes is not None:
            return 1
        return parallel_state.get_data_parallel_world_size(with_context_parallel=True)


def _replica_group() -> dist.ProcessGroup:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
