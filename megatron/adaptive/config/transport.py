"""How tensors travel between the stages of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.config.flags import flag

__all__ = ["AUTO", "MOST_SLOTS", "NATIVE", "PINNED", "TRANSPORTS", "TransportConfig"]

AUTO = "auto"
PINNED = "pinned"
NATIVE = ("shm", "rdma", "tcp")
"""Transports of the C++ extension."""

TRANSPORTS = (*NATIVE, "gloo", "nccl")
"""What ``--transport`` may force."""

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
