"""Tests which RDMA ports NCCL and UCX use."""

from __future__ import annotations

import pytest

from megatron.adaptive.cluster.inventory import RdmaPort, rdma_variables


def port(device: str, link: str = "Ethernet", gid: int | None = 3, up: bool = True) -> RdmaPort:
    state = "ACTIVE" if up else "DOWN"
    return RdmaPort(device=device, port=1, state=state, link=link, gid_index=gid)


@pytest.mark.parametrize(
    ("ports", "devices", "gid"),
    [
        ([], None, None),
        ([port("mlx5_0", up=False)], None, None),
        ([port("mlx5_0", gid=None)], None, None),
        ([port("mlx5_0"), port("mlx5_1", up=False)], "mlx5_0:1", "3"),
        ([port("mlx5_0"), port("mlx5_1", gid=5)], "mlx5_0:1,mlx5_1:1", None),
        # InfiniBand does not need a GID. NCCL and UCX do not use the additional Ethernet port.
        ([port("mlx5_0", "InfiniBand", None), port("mlx5_1")], "mlx5_0:1", None),
    ],
)
def test_the_ports_that_can_be_used(
    ports: list[RdmaPort], devices: str | None, gid: str | None
) -> None:
    expected = {}
    if devices is not None:
        expected = {"NCCL_IB_HCA": f"={devices}", "UCX_NET_DEVICES": devices}
    if gid is not None:
        expected |= {"NCCL_IB_GID_INDEX": gid, "UCX_IB_GID_INDEX": gid}
    assert rdma_variables(ports, {}) == expected


def test_what_the_user_says_stays() -> None:
    settings = {"NCCL_IB_HCA": "mlx5_9", "UCX_IB_GID_INDEX": "1"}
    assert rdma_variables([port("mlx5_0")], settings) == {
        "UCX_NET_DEVICES": "mlx5_0:1",
        "NCCL_IB_GID_INDEX": "3",
    }
