"""Defines the settings for parallelism, and for the transport of messages between ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from megatron.adaptive.config.flags import Count, Layers, Limits, Natural, Ranks, flag, switch
from megatron.adaptive.config.schedule import parse_widths
from megatron.adaptive.config.transport_specs import BUILT_IN, load_transport
from megatron.adaptive.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism.

    The launcher sets ``world_size``, which has no flag. With
    ``num_layers_per_virtual_pipeline_stage``, the parser computes
    ``num_virtual_stages_per_pipeline_rank``, which is the number of chunks.
    """

    world_size: int
    tensor_model_parallel_size: Ranks = flag("Number of ranks that share each layer's matrices.", 1)
    pipeline_model_parallel_size: Ranks = flag("Number of ranks that share the layers.", 1)
    stage_data_parallel_sizes: tuple[int, ...] | None = flag(
        "Number of ranks of each pipeline stage, such as 2-1-1, if these numbers differ; "
        "microbatches are distributed over the ranks of a stage.",
        reader=parse_widths,
        unit="2-1",
        derived="the same number for each stage",
    )
    context_parallel_size: Ranks = flag("Number of ranks that share each sequence.", 1)
    expert_model_parallel_size: Ranks = flag(
        "Number of ranks that share the experts of each layer; they have consecutive data-parallel "
        "indices.",
        1,
    )
    expert_tensor_parallel_size: Ranks | None = flag(
        "Number of ranks that share each expert's matrices.", derived="the tensor parallel size"
    )
    num_layers_per_virtual_pipeline_stage: Layers | None = flag(
        "Number of layers in each chunk; an alternative way to set the number of chunks."
    )
    num_virtual_stages_per_pipeline_rank: Count | None = flag(
        "Number of model chunks on each pipeline rank.",
        names=("--num-virtual-stages-per-pipeline-rank", "--model-chunks"),
        unit="CHUNKS",
    )
    microbatch_group_size_per_vp_stage: Count | None = flag(
        "Number of consecutive microbatches that a chunk runs before the next chunk.",
        names=("--microbatch-group-size-per-virtual-pipeline-stage",),
        unit="MICROBATCHES",
        derived="the pipeline size",
    )
    overlap_p2p_comm: bool = switch(
        "Do not overlap messages between stages with computation.",
        off="--no-overlap-p2p-communication",
    )
    sequence_parallel: bool = switch(
        "Split the sequence over tensor parallel ranks in normalization and dropout."
    )
    use_distributed_optimizer: bool = switch("Split optimizer state over data parallel ranks.")
    overlap_grad_reduce: bool = switch("Overlap gradient reduction with backward passes.")
    overlap_param_gather: bool = switch(
        "Overlap parameter gathering with forward passes; requires --use-distributed-optimizer "
        "and --overlap-grad-reduce."
    )
    align_grad_reduce: bool = switch(
        "Let each stage start its gradient reduction without waiting for other stages.",
        off="--no-align-grad-reduce",
    )
    align_param_gather: bool = switch(
        "Let each stage start parameter gathering without waiting for other stages.",
        off="--no-align-param-gather",
    )
    ddp_bucket_size: Count | None = flag(
        "Number of parameters in each bucket of the gradient reduction."
    )
    ddp_average_in_collective: bool = switch(
        "Average gradients inside the collective instead of before it."
    )
    cp_comm_type: str = flag(
        "Method of exchanging keys and values between context-parallel ranks in layers of "
        "Transformer Engine; local layers always gather them.",
        "p2p",
        choices=("p2p", "a2a", "allgather"),
        refused_choices={"a2a+p2p": "hierarchical context parallelism is not supported; use p2p"},
    )
    distributed_backend: str | None = flag(
        "Backend of torch.distributed for collectives.",
        choices=("nccl", "gloo"),
        derived="nccl if each rank has its own GPU, otherwise gloo",
    )
    distributed_timeout_minutes: Count = flag("Timeout of a collective.", 10, unit="MINUTES")

    @property
    def unequal_sizes(self) -> tuple[int, ...] | None:
        """Number of ranks of each stage, or ``None`` if all stages have the same number."""
        sizes = self.stage_data_parallel_sizes
        return sizes if sizes is not None and len(set(sizes)) > 1 else None

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel replicas. Each replica processes different samples.

        If stages have unequal numbers of ranks, this is the least common multiple of these numbers.
        The number of microbatches per step is a multiple of the result. Therefore, all ranks of a
        stage run the same number of microbatches.
        """
        if self.unequal_sizes is not None:
            return math.lcm(*self.unequal_sizes)
        ranks = self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        return self.world_size // (ranks * self.context_parallel_size)

    def microbatches_of(self, pp_rank: int, num_microbatches: int) -> int:
        """Returns the number of microbatches that each rank of a stage runs per step.

        Args:
            pp_rank: Pipeline rank of the stage.
            num_microbatches: Number of microbatches per step and data-parallel replica.
        """
        if self.unequal_sizes is None:
            return num_microbatches
        return num_microbatches * self.data_parallel_size // self.unequal_sizes[pp_rank]

    @property
    def num_chunks(self) -> int:
        """Number of model chunks (virtual stages) that each pipeline rank holds."""
        return self.num_virtual_stages_per_pipeline_rank or 1

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        """Number of chunks per rank, or ``None`` for a single chunk, as Megatron-LM expects."""
        return self.num_chunks if self.num_chunks > 1 else None

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages: pipeline ranks times chunks per rank."""
        return self.pipeline_model_parallel_size * self.num_chunks


AUTO = "auto"
PINNED = "pinned"
TRANSPORTS = tuple(BUILT_IN)
"""Values of ``--transport`` that select one of this package's transports for all pairs of ranks."""

MOST_SLOTS = 64
_LEAST_SLOT_BYTES = 4096


def _is_own_transport(name: str) -> bool:
    """Returns whether ``name`` refers to a user's transport, not to a transport of this package.

    Raises:
        ValueError: The transport does not exist or cannot be imported.
    """
    try:
        load_transport(name)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return name not in BUILT_IN


@dataclass(frozen=True, kw_only=True)
class TransportConfig:
    """Transports between stages."""

    transport: str = flag(
        "Transport between neighbouring pipeline ranks: the best transport for each pair "
        "(auto), the same transport for all pairs, or your own transport as "
        "package.module:Class.",
        AUTO,
        choices=(AUTO, *TRANSPORTS),
        also_takes=_is_own_transport,
    )
    transport_slot_bytes: (
        Annotated[int, Limits(minimum=_LEAST_SLOT_BYTES, maximum=1 << 32)] | None
    ) = flag(
        "Maximum size of a message that shm, rdma and tcp send in one piece.",
        unit="BYTES",
        derived="the size of the tensors between stages; 1 MiB if it varies",
    )
    transport_slots: Annotated[int, Limits(minimum=2, maximum=MOST_SLOTS)] | None = flag(
        "Number of messages that a channel of shm, rdma or tcp buffers.",
        unit="SLOTS",
        derived=f"microbatches in flight plus four, at most {MOST_SLOTS} and 256 MiB",
    )
    transport_crc: bool = switch(
        "Verify a checksum of every message over shm, rdma and tcp, which takes additional time."
    )
    transport_silence_s: Annotated[float, Limits(minimum=1, maximum=24 * 3600)] = flag(
        "Time without any message or heartbeat after which a rank is considered lost; a rank that "
        "is suspended for a shorter time can continue.",
        60.0,
        unit="SECONDS",
    )
    transport_gpu: str = flag(
        "Path that GPU tensors take over shm: directly between GPUs if they can access each "
        "other's memory (CUDA IPC), otherwise through pinned host memory (auto); or always through "
        "pinned host memory (pinned).",
        AUTO,
        choices=(AUTO, PINNED),
    )
    transport_interface: str | None = flag(
        "Network interface for tcp and for the setup of rdma, such as eth0.",
        unit="NAME",
        derived="GLOO_SOCKET_IFNAME, or the interface that reaches the job's store",
    )
    rdma_device: str | None = flag(
        "RDMA device, with or without its port (mlx5_0, mlx5_0:1).",
        unit="NAME",
        derived="the first device with an active port",
    )
    rdma_gid_index: Natural | None = flag(
        "Index of the GID that rdma uses.",
        unit="INDEX",
        derived="the GID of the port's IPv4 address over RoCE v2, if there is one",
    )
    rdma_mtu_bytes: int | None = flag(
        "Maximum packet size (MTU) of rdma.",
        choices=(256, 512, 1024, 2048, 4096),
        unit="BYTES",
        derived="the largest size that both ports allow",
    )
    rdma_queue_pairs: Annotated[int, Limits(minimum=1, maximum=16)] = flag(
        "Number of queue pairs over which a large message is split.", 1
    )

    @property
    def forced(self) -> str | None:
        """Transport for all pairs of ranks, or ``None`` if the best is chosen for each pair."""
        return None if self.transport == AUTO else self.transport
