"""Spread of model and batch over processes, and the transports between ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.adaptive.config.flags import flag
from megatron.adaptive.config.schedule import parse_widths

__all__ = [
    "AUTO",
    "MOST_SLOTS",
    "NATIVE",
    "PINNED",
    "ParallelConfig",
    "TRANSPORTS",
    "TransportConfig",
]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism.

    ``world_size`` comes from the launcher, not from a flag. After parsing,
    ``num_virtual_stages_per_pipeline_rank`` holds the chunks even if they were given as
    ``num_layers_per_virtual_pipeline_stage``.
    """

    world_size: int
    tensor_model_parallel_size: int = flag(
        "Ranks that share each layer's matrices.", default=1, minimum=1, unit="RANKS"
    )
    pipeline_model_parallel_size: int = flag(
        "Ranks that the layers are spread over.", default=1, minimum=1, unit="RANKS"
    )
    stage_data_parallel_sizes: tuple[int, ...] | None = flag(
        "Ranks of each pipeline stage where they differ, joined by '-': its microbatches are dealt "
        "out to them in turn.",
        default=None,
        convert=parse_widths,
        derived="the same number for each stage",
        unit="2-1",
    )
    context_parallel_size: int = flag(
        "Ranks that share each sequence; needs Transformer Engine.",
        default=1,
        minimum=1,
        unit="RANKS",
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        "Layers of each chunk, another way to give the number of chunks.",
        default=None,
        minimum=1,
        unit="LAYERS",
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        "Model chunks of each pipeline rank.",
        names=("--num-virtual-stages-per-pipeline-rank", "--model-chunks"),
        default=None,
        minimum=1,
        unit="CHUNKS",
    )
    microbatch_group_size_per_vp_stage: int | None = flag(
        "Microbatches that a chunk runs in a row, for the schedules megatron and interleaved.",
        names=("--microbatch-group-size-per-virtual-pipeline-stage",),
        default=None,
        minimum=1,
        derived="the pipeline size",
        unit="MICROBATCHES",
    )
    overlap_p2p_comm: bool = flag(
        "Do not overlap messages between stages with work; only for --pipeline-schedule megatron.",
        names=("--no-overlap-p2p-communication",),
        default=True,
    )
    sequence_parallel: bool = flag(
        "Split the sequence over tensor parallel ranks outside the matrices.", default=False
    )
    async_tensor_model_parallel_allreduce: bool = flag(
        "No effect, as in Megatron-LM.",
        names=("--no-async-tensor-model-parallel-allreduce",),
        default=True,
    )
    use_distributed_optimizer: bool = flag(
        "Split optimizer state over data parallel ranks.", default=False
    )
    overlap_grad_reduce: bool = flag("Reduce gradients while backward still runs.", default=False)
    overlap_param_gather: bool = flag(
        "Gather parameters while forward already runs; needs --use-distributed-optimizer and "
        "--overlap-grad-reduce.",
        default=False,
    )
    align_grad_reduce: bool = flag(
        "Let every stage start its gradient reduction on its own.",
        names=("--no-align-grad-reduce",),
        default=True,
    )
    align_param_gather: bool = flag(
        "Let every stage start its parameter gathering on its own.",
        names=("--no-align-param-gather",),
        default=True,
    )
    ddp_bucket_size: int | None = flag(
        "Parameters in each bucket of the gradient reduction.", default=None, minimum=1
    )
    ddp_average_in_collective: bool = flag(
        "Average gradients inside the collective instead of before it.", default=False
    )
    cp_comm_type: str = flag(
        "How context parallel ranks exchange keys and values.",
        default="p2p",
        choices=("p2p", "a2a", "allgather"),
        refused_choices={"a2a+p2p": "hierarchical context parallelism is not built; use p2p"},
    )
    distributed_backend: str | None = flag(
        "Library for collectives.",
        default=None,
        choices=("nccl", "gloo"),
        derived="nccl where each rank has a GPU of its own, else gloo",
    )
    distributed_timeout_minutes: int = flag(
        "Time limit of a collective.", default=10, minimum=1, unit="MINUTES"
    )

    @property
    def model_parallel_size(self) -> int:
        """Ranks that together hold one copy of the model."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )

    @property
    def unequal_sizes(self) -> tuple[int, ...] | None:
        """Ranks of each stage where they differ, ``None`` where all stages are alike."""
        sizes = self.stage_data_parallel_sizes
        return sizes if sizes is not None and len(set(sizes)) > 1 else None

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model that work on different samples.

        Of stages with unequal numbers of ranks: microbatches after which all ranks of each stage
        have had the same number.
        """
        if self.unequal_sizes is not None:
            return math.lcm(*self.unequal_sizes)
        return self.world_size // self.model_parallel_size

    def microbatches_of(self, pp_rank: int, num_microbatches: int) -> int:
        """Microbatches of each rank of a stage.

        Args:
            pp_rank: of the stage.
            num_microbatches: of a step and copy of the model, see :attr:`data_parallel_size`.
        """
        if self.unequal_sizes is None:
            return num_microbatches
        return num_microbatches * self.data_parallel_size // self.unequal_sizes[pp_rank]

    @property
    def num_chunks(self) -> int:
        """Model chunks of each pipeline rank, 1 if none were asked for."""
        return self.num_virtual_stages_per_pipeline_rank or 1

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        """Megatron-LM's name for the chunks: ``None`` for a single one."""
        return self.num_chunks if self.num_chunks > 1 else None

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline: pipeline ranks times chunks."""
        return self.pipeline_model_parallel_size * self.num_chunks


AUTO = "auto"
PINNED = "pinned"
NATIVE = ("shm", "rdma", "tcp")
"""Transports of the C++ extension."""

TRANSPORTS = (*NATIVE, "gloo", "nccl")
"""Values of ``--transport`` that force a transport."""

MOST_SLOTS = 64
_LEAST_SLOT_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class TransportConfig:
    """Transports between stages."""

    transport: str = flag(
        "What connects neighbouring ranks of the pipeline: chosen for each pair (auto), or one "
        "for all of them.",
        default=AUTO,
        choices=(AUTO, *TRANSPORTS),
    )
    transport_slot_bytes: int | None = flag(
        "Largest message that shm, rdma and tcp carry in one piece.",
        default=None,
        minimum=_LEAST_SLOT_BYTES,
        maximum=1 << 32,
        unit="BYTES",
        derived="the size of the tensors between stages; 1 MiB where it varies",
    )
    transport_slots: int | None = flag(
        "Messages that a channel of shm, rdma or tcp holds at a time.",
        default=None,
        minimum=2,
        maximum=MOST_SLOTS,
        unit="SLOTS",
        derived=f"microbatches in flight and four more, at most {MOST_SLOTS} and 256 MiB",
    )
    transport_crc: bool = flag(
        "Check every message of shm, rdma and tcp against a checksum; costs time.", default=False
    )
    transport_gpu: str = flag(
        "How shm carries tensors of GPUs: from memory to memory where both ends reach each other's "
        "(CUDA IPC), else through pinned memory of the host (auto), or always through that.",
        default=AUTO,
        choices=(AUTO, PINNED),
    )
    transport_interface: str | None = flag(
        "Network interface that tcp and the exchange before rdma go over, such as eth0.",
        default=None,
        unit="NAME",
        derived="GLOO_SOCKET_IFNAME, or the one that the job's store is reached by",
    )
    rdma_device: str | None = flag(
        "RDMA device, with or without its port (mlx5_0, mlx5_0:1).",
        default=None,
        unit="NAME",
        derived="the first with an active port",
    )
    rdma_gid_index: int | None = flag(
        "Index of the GID that rdma uses.",
        default=None,
        minimum=0,
        unit="INDEX",
        derived="that of the port's IPv4 address over RoCE v2, if there is one",
    )
    rdma_mtu_bytes: int | None = flag(
        "Largest packet of rdma.",
        default=None,
        choices=(256, 512, 1024, 2048, 4096),
        unit="BYTES",
        derived="what both ports allow",
    )
    rdma_queue_pairs: int = flag(
        "Queue pairs that a large message is spread over.", default=1, minimum=1, maximum=16
    )

    @property
    def forced(self) -> str | None:
        """The transport that every pair must use, ``None`` where each pair gets its best."""
        return None if self.transport == AUTO else self.transport
