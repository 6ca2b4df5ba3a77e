"""Tests that ``doctor`` checks a node, and the connection between two nodes."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from pathlib import Path

import pytest

from megatron.adaptive.cli import doctor
from megatron.adaptive.cli.doctor import answer_peers, check_node, check_way
from megatron.adaptive.cluster.inventory import rdma_ports

from ..multiprocess.launch import free_port


def test_a_node_is_checked_and_told_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status = doctor.main(["--json", "--master-port", str(free_port())])
    report = json.loads(capsys.readouterr().out)
    by_name = {check["name"]: check for check in report["checks"]}
    assert {"Python", "torch", "CUDA", "extension", "/dev/shm", "RDMA", "port", "clock"} <= set(
        by_name
    )
    assert by_name["torch"]["state"] == "ok"
    assert status == int(any(check["state"] == "error" for check in report["checks"]))
    for check in report["checks"]:
        assert (check["state"] == "ok") == (check["mend"] == "")


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        (check,) = [check for check in check_node(port) if check.name == "port"]
    assert check.state == "warning"
    assert f"MASTER_PORT={port}" in check.text


def test_two_nodes_reach_each_other() -> None:
    port = free_port()
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.extend(asyncio.run(answer_peers(port, 30.0))))
    thread.start()
    checks = check_way("127.0.0.1", port, 30.0)
    thread.join(30.0)
    assert [check.state for check in checks] == ["ok", "ok", "ok"]
    assert [check.state for check in answers] == ["ok"]  # type: ignore[attr-defined]


def test_nobody_there_is_an_error_with_a_remedy() -> None:
    (check,) = check_way("127.0.0.1", free_port(), 0.0)
    assert (check.state, "firewall" in check.mend) == ("error", True)
    (check,) = asyncio.run(answer_peers(free_port(), 0.1))
    assert check.state == "error"


def test_rdma_ports_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    for folder in ("gids", "gid_attrs/types"):
        (port / folder).mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "link_layer").write_text("Ethernet\n")
    gids = ["fe80:0000:0000:0000:0000:0000:0000:0001", "0000:0000:0000:0000:0000:ffff:0a00:0001"]
    for index, (gid, kind) in enumerate(
        [(gids[0], "RoCE v2"), (gids[1], "IB/RoCE v1"), (gids[1], "RoCE v2")]
    ):
        (port / "gids" / str(index)).write_text(f"{gid}\n")
        (port / "gid_attrs" / "types" / str(index)).write_text(f"{kind}\n")
    (first_port,) = rdma_ports(tmp_path)
    assert (first_port.device, first_port.state, first_port.gid_index) == ("mlx5_0", "ACTIVE", 2)
