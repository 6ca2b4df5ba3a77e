"""Spread of model and batch over processes, and the transports between ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from megatron.adaptive.config.flags import Count, Layers, Limits, Natural, Ranks, flag, switch
from megatron.adaptive.config.schedule import parse_widths


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism.

    ``world_size`` comes from the launcher, not from a flag. After parsing,
    ``num_virtual_stages_per_pipeline_rank`` holds the chunks even if they were given as
    ``num_layers_per_virtual_pipeline_stage``.
    """

    world_size: int
    tensor_model_parallel_size: Ranks = flag("Ranks that share each layer's matrices.", 1)
    pipeline_model_parallel_size: Ranks = flag("Ranks that the layers are spread over.", 1)
    stage_data_parallel_sizes: tuple[int, ...] | None = flag(
        "Ranks of each pipeline stage where they differ, joined by '-': its microbatches are dealt "
        "out to them in turn.",
        reader=parse_widths,
        unit="2-1",
        derived="the same number for each stage",
    )
    context_parallel_size: Ranks = flag("Ranks that share each sequence.", 1)
    expert_model_parallel_size: Ranks = flag(
        "Ranks that the experts of each layer are spread over, neighbours within data parallelism.",
        1,
    )
    expert_tensor_parallel_size: Ranks | None = flag(
        "Ranks that share each expert's matrices.", derived="the tensor parallel size"
    )
    num_layers_per_virtual_pipeline_stage: Layers | None = flag(
        "Layers of each chunk, another way to give the number of chunks."
    )
    num_virtual_stages_per_pipeline_rank: Count | None = flag(
        "Model chunks of each pipeline rank.",
        names=("--num-virtual-stages-per-pipeline-rank", "--model-chunks"),
        unit="CHUNKS",
    )
    microbatch_group_size_per_vp_stage: Count | None = flag(
        "Microbatches that a chunk runs in a row, for the schedules megatron and interleaved.",
        names=("--microbatch-group-size-per-virtual-pipeline-stage",),
        unit="MICROBATCHES",
        derived="the pipeline size",
    )
    overlap_p2p_comm: bool = switch(
        "Do not overlap messages between stages with work; only for --pipeline-schedule megatron.",
        off="--no-overlap-p2p-communication",
    )
    sequence_parallel: bool = switch(
        "Split the sequence over tensor parallel ranks outside the matrices."
    )
    use_distributed_optimizer: bool = switch("Split optimizer state over data parallel ranks.")
    overlap_grad_reduce: bool = switch("Reduce gradients while backward still runs.")
    overlap_param_gather: bool = switch(
        "Gather parameters while forward already runs; needs --use-distributed-optimizer and "
        "--overlap-grad-reduce."
    )
    align_grad_reduce: bool = switch(
        "Let every stage start its gradient reduction on its own.", off="--no-align-grad-reduce"
    )
    align_param_gather: bool = switch(
        "Let every stage start its parameter gathering on its own.", off="--no-align-param-gather"
    )
    ddp_bucket_size: Count | None = flag("Parameters in each bucket of the gradient reduction.")
    ddp_average_in_collective: bool = switch(
        "Average gradients inside the collective instead of before it."
    )
    cp_comm_type: str = flag(
        "How context parallel ranks exchange keys and values with Transformer Engine; local layers "
        "gather them.",
        "p2p",
        choices=("p2p", "a2a", "allgather"),
        refused_choices={"a2a+p2p": "hierarchical context parallelism is not built; use p2p"},
    )
    distributed_backend: str | None = flag(
        "Library for collectives.",
        choices=("nccl", "gloo"),
        derived="nccl where each rank has a GPU of its own, else gloo",
    )
    distributed_timeout_minutes: Count = flag("Time limit of a collective.", 10, unit="MINUTES")

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
        ranks = self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        return self.world_size // (ranks * self.context_parallel_size)

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
        AUTO,
        choices=(AUTO, *TRANSPORTS),
    )
    transport_slot_bytes: (
        Annotated[int, Limits(minimum=_LEAST_SLOT_BYTES, maximum=1 << 32)] | None
    ) = flag(
        "Largest message that shm, rdma and tcp carry in one piece.",
        unit="BYTES",
        derived="the size of the tensors between stages; 1 MiB where it varies",
    )
    transport_slots: Annotated[int, Limits(minimum=2, maximum=MOST_SLOTS)] | None = flag(
        "Messages that a channel of shm, rdma or tcp holds at a time.",
        unit="SLOTS",
        derived=f"microbatches in flight and four more, at most {MOST_SLOTS} and 256 MiB",
    )
    transport_crc: bool = switch(
        "Check every message of shm, rdma and tcp against a checksum; costs time."
    )
    transport_silence_s: Annotated[float, Limits(minimum=1, maximum=24 * 3600)] = flag(
        "A rank from which nothing, not even a heartbeat, came for so long is lost; one that was "
        "stopped for less goes on.",
        60.0,
        unit="SECONDS",
    )
    transport_gpu: str = flag(
        "How shm carries tensors of GPUs: from memory to memory where both ends reach each other's "
        "(CUDA IPC), else through pinned memory of the host (auto), or always through that.",
        AUTO,
        choices=(AUTO, PINNED),
    )
    transport_interface: str | None = flag(
        "Network interface that tcp and the exchange before rdma go over, such as eth0.",
        unit="NAME",
        derived="GLOO_SOCKET_IFNAME, or the one that the job's store is reached by",
    )
    rdma_device: str | None = flag(
        "RDMA device, with or without its port (mlx5_0, mlx5_0:1).",
        unit="NAME",
        derived="the first with an active port",
    )
    rdma_gid_index: Natural | None = flag(
        "Index of the GID that rdma uses.",
        unit="INDEX",
        derived="that of the port's IPv4 address over RoCE v2, if there is one",
    )
    rdma_mtu_bytes: int | None = flag(
        "Largest packet of rdma.",
        choices=(256, 512, 1024, 2048, 4096),
        unit="BYTES",
        derived="what both ports allow",
    )
    rdma_queue_pairs: Annotated[int, Limits(minimum=1, maximum=16)] = flag(
        "Queue pairs that a large message is spread over.", 1
    )

    @property
    def forced(self) -> str | None:
        """The transport that every pair must use, ``None`` where each pair gets its best."""
        return None if self.transport == AUTO else self.transport
