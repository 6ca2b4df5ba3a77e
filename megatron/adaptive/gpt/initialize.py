"""Connects a process to all other processes of a training job.

This module also sets up the device, the process groups and the random seeds.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.rerun_state_machine import (
    RerunMode,
    destroy_rerun_state_machine,
    initialize_rerun_state_machine,
)

from megatron.adaptive.accelerator import Accelerator, agree_on_sharing
from megatron.adaptive.config.attention import allows_cudnn
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.config.flags import fields_of
from megatron.adaptive.config.trainer import TrainerConfig, groups
from megatron.adaptive.engine.executor_setup import gather_places, require_equal_settings
from megatron.adaptive.engine.process_context import Job, destroy_groups, is_alone, process_groups
from megatron.adaptive.engine.rendezvous import meet
from megatron.adaptive.gpt.model_placement import (
    embedding_ranks,
    placement_of,
    set_up_unequal_mesh,
    widths_of,
)
from megatron.adaptive.gpt.optimizer_kernels import use_foreach_kernels


@dataclass(frozen=True, kw_only=True)
class TrainingJob(Job):
    """Represents a process in a job that trains a GPT model.

    Attributes:
        config: Settings of the run.
        stop_group: Gloo process group of all ranks, reserved for agreeing to stop early. Other code
            must not use this group, because an operation is always pending on it.
        mesh_groups: Process groups that megatron-core created for the configured parallel sizes.
    """

    config: TrainerConfig
    stop_group: dist.ProcessGroup
    mesh_groups: list[Any] = field(default_factory=list)

    @property
    def is_writer(self) -> bool:
        """Returns whether this rank writes the log.

        The last rank that computes the loss writes the log. If stages are placed round-robin, this
        is the last rank of the job, as in Megatron-LM.
        """
        if widths_of(self.config) is not None:
            return self.environment.rank == self.environment.world_size - 1
        placement = placement_of(self.config)
        pp_rank, _ = placement.locate(placement.num_stages - 1)
        # Global ranks are sorted by pipeline rank, so the ranks with the same pipeline rank are
        # consecutive.
        per_position = self.environment.world_size // placement.num_ranks
        return self.environment.rank == (pp_rank + 1) * per_position - 1


def start_job(
    config: TrainerConfig, environment: Environment, accelerator: Accelerator
) -> TrainingJob:
    """Connects this process to all other ranks and sets up megatron-core's parallel state.

    All ranks must call this. The caller must call :func:`end_job` at the end.
    """
    parallel = config.parallel
    timeout = datetime.timedelta(minutes=parallel.distributed_timeout_minutes)
    store = meet(environment, timeout)
    accelerator = agree_on_sharing(
        accelerator, store, rank=environment.rank, world_size=environment.world_size
    )
    dist.init_process_group(
        accelerator.backend,
        store=store,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timeout,
    )
    require_equal_settings(_shared_settings(config))
    return _joined(config, environment, accelerator, timeout)


def start_alone(
    config: TrainerConfig, environment: Environment, accelerator: Accelerator
) -> TrainingJob:
    """Sets up a rank like :func:`start_job`, but without connecting to other ranks.

    The process groups use torch's fake backend, which does not send anything. The rank's model,
    optimizer and activations are as large as in the job, but sums over ranks are wrong, and
    collectives take no time.

    The caller must call :func:`end_job` at the end.
    """
    # This import registers the fake backend, which belongs to torch's internal test utilities.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(
        dist.Backend.FAKE,
        store=FakeStore(),
        rank=environment.rank,
        world_size=environment.world_size,
    )
    timeout = datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes)
    return _joined(config, environment, accelerator, timeout)


def _joined(
    config: TrainerConfig,
    environment: Environment,
    accelerator: Accelerator,
    timeout: datetime.timedelta,
) -> TrainingJob:
    """Creates the remaining process groups of a job. All ranks must call this."""
    _choose_attention(config)
    if accelerator.is_cuda:
        use_foreach_kernels()
    before = process_groups()
    set_up_mesh(config)
    mesh_groups = [group for group in process_groups() if group not in before]
    seed_everything(config.run.seed)
    # megatron-core requires this object. It is disabled, because this program checks for NaN
    # itself.
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    backend = dist.Backend.FAKE if is_alone() else "gloo"
    return TrainingJob(
        config=config,
        environment=environment,
        accelerator=accelerator,
        control_group=dist.new_group(backend=backend, timeout=timeout),
        stop_group=dist.new_group(backend=backend, timeout=timeout),
        mesh_groups=mesh_groups,
        places=gather_places(),
        timeout=timeout,
    )


def _choose_attention(config: TrainerConfig) -> None:
    """Excludes cuDNN from torch's attention kernels if it is not suitable for the run.

    The setting applies to the whole process, including autograd's threads.
    """
    is_suitable = allows_cudnn(
        dropout=config.model.attention_dropout,
        has_mask=config.data.reset_attention_mask
        or config.parallel.context_parallel_size > 1
        or config.core.window_size is not None,
        is_varied=config.data.variable_seq_lengths,
        is_threaded=config.schedule.overlap_moe_expert_parallel_comm,
    )
    if not is_suitable:
        torch.backends.cuda.enable_cudnn_sdp(False)


_COMPARED_GROUPS = (
    *("model", "parallel", "batch", "precision", "optimizer", "recompute", "core", "schedule"),
    *("data", "checkpoint", "logging", "run", "lora"),
)
_MAY_DIFFER = frozenset(
    {
        *("trace_dir", "record_schedule", "replay_schedule", "schedule_file", "diagnose_interval"),
        *("data_cache_path", "mmap_bin_files", "num_workers", "num_dataset_builder_threads"),
        *("save_local", "trust_checkpoint", "logging_level", "progress_dir", "logger"),
        *("tensorboard_dir", "tensorboard_queue_size", "prometheus_address", "prometheus_file"),
        *("wandb_project", "wandb_entity", "wandb_exp_name", "wandb_save_dir"),
        *("mlflow_experiment", "mlflow_run_name", "mlflow_tracking_uri"),
        *("exit_duration_in_mins", "manual_gc", "manual_gc_interval", "profile", "profile_ranks"),
        *("use_pytorch_profiler", "profile_step_start", "profile_step_end"),
        *("profile_execution", "profile_name"),
    }
)
"""Settings that may differ between ranks, because each affects only the rank on which it is set."""
_PATHS = frozenset(
    {
        *("data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path"),
        *("tokenizer_model", "vocab_file", "merge_file"),
        *("save", "load", "load_hf", "load_lora"),
    }
)
"""Settings that are paths. The same files may have different paths on different nodes, so ranks
only compare whether these settings are set.
"""


def _shared_settings(config: TrainerConfig) -> dict[str, str]:
    """Returns the settings that must be equal on all ranks, as command-line arguments."""
    settings = {}
    for group, kind in groups().items():
        if group not in _COMPARED_GROUPS:
            continue
        for spec in fields_of(kind):
            if not spec.has_flag or spec.dest in _MAY_DIFFER:
                continue
            value = getattr(getattr(config, group), spec.dest)
            if spec.dest in _PATHS:
                settings[spec.dest] = spec.name if value else ""
            else:
                settings[spec.dest] = f"{spec.name} {value}"
    return settings


@contextlib.contextmanager
def _groups_of_default_backend() -> Iterator[None]:
    """Makes new process groups use the fake backend if the default group uses it.

    megatron-core also creates gloo groups. In a job with the fake backend, these would wait for
    processes that do not exist.
    """
    new_group = dist.new_group

    def fake_group(*arguments: Any, **options: Any) -> Any:
        return new_group(*arguments, **{**options, "backend": dist.Backend.FAKE})

    if is_alone():
        dist.new_group = fake_group
    try:
        yield
    finally:
        dist.new_group = new_group


def set_up_mesh(config: TrainerConfig) -> None:
    """Creates process groups for the parallel sizes in ``config``. All ranks must call this."""
    with _groups_of_default_backend():
        _make_mesh(config)


def _make_mesh(config: TrainerConfig) -> None:
    parallel = config.parallel
    widths = widths_of(config)
    if widths is not None:
        set_up_unequal_mesh(widths, parallel.distributed_timeout_minutes)
        return
    parallel_state.initialize_model_parallel(
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size
        if parallel.pipeline_model_parallel_size > 1
        else None,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        distributed_timeout_minutes=parallel.distributed_timeout_minutes,
        get_embedding_ranks=embedding_ranks(config),
    )


def remake_mesh(job: TrainingJob) -> None:
    """Replaces megatron-core's process groups and resets the seeds after a change of settings.

    All ranks must call this between two steps. The process groups in ``job.mesh_groups`` are
    destroyed, so no object may use them afterwards. Other process groups are kept.
    """
    parallel_state.destroy_model_parallel()
    destroy_groups(job.mesh_groups)
    before = process_groups()
    set_up_mesh(job.config)
    job.mesh_groups[:] = [group for group in process_groups() if group not in before]
    seed_everything(job.config.run.seed)


def end_job() -> None:
    """Destroys all process groups. Each rank must call this after its last collective."""
    destroy_rerun_state_machine()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def seed_everything(seed: int) -> None:
    """Seeds the random generators from ``seed`` before the model is built, like Megatron-LM.

    Pipeline ranks get different seeds. Ranks of one tensor-parallel group have the same seed for
    replicated tensors, and different seeds for split tensors.
    """
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
