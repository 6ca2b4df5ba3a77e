"""Settings of the transports, and what they exclude."""

from __future__ import annotations

import pytest

from megatron.adaptive.config.parallel import TRANSPORTS

from .conftest import Complaint, Parse


def test_defaults_leave_the_choice_to_the_ranks(small: Parse) -> None:
    transport = small().transport
    assert transport.forced is None
    assert (transport.transport_slot_bytes, transport.transport_slots) == (None, None)
    assert not transport.transport_crc
    assert transport.transport_gpu == "auto"


@pytest.mark.parametrize("name", TRANSPORTS)
def test_each_can_be_forced(small: Parse, name: str) -> None:
    assert small(f"--transport {name}").transport.forced == name


def test_everything_can_be_set(small: Parse) -> None:
    transport = small(
        "--transport rdma --transport-slot-bytes 65536 --transport-slots 12 --transport-crc "
        "--transport-gpu pinned --transport-interface ib0 "
        "--rdma-device mlx5_0:1 --rdma-gid-index 3 --rdma-mtu-bytes 4096 --rdma-queue-pairs 4"
    ).transport
    assert (transport.transport_slot_bytes, transport.transport_slots) == (65536, 12)
    assert (transport.transport_crc, transport.transport_interface) == (True, "ib0")
    assert transport.transport_gpu == "pinned"
    assert (transport.rdma_device, transport.rdma_gid_index) == ("mlx5_0:1", 3)
    assert (transport.rdma_mtu_bytes, transport.rdma_queue_pairs) == (4096, 4)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--transport udp", ("'udp' is not one of auto, shm, rdma, tcp, gloo, nccl",)),
        ("--transport-slots 1", ("--transport-slots", "at least 2")),
        ("--transport-slots 65", ("--transport-slots", "at most 64")),
        ("--transport-slot-bytes 100", ("--transport-slot-bytes", "at least 4096")),
        ("--rdma-mtu-bytes 1500", ("--rdma-mtu-bytes", "not one of 256, 512")),
        (
            "--transport tcp --rdma-device mlx5_0",
            ("--rdma-device mlx5_0 has no effect with --transport tcp", "--transport rdma"),
        ),
        ("--transport shm --rdma-gid-index 1", ("--rdma-gid-index 1 has no effect",)),
        (
            "--transport gloo --pipeline-schedule megatron",
            ("--transport gloo with --pipeline-schedule megatron", "megatron-core's own"),
        ),
    ],
)
def test_what_is_wrong_is_said(complaint: Complaint, flags: str, words: tuple[str, ...]) -> None:
    text = complaint(flags)
    assert all(word in text for word in words), text
