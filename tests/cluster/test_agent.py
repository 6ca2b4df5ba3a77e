"""Tests that agents reject managers of other versions, and that hanging checks block nothing."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.cluster.agent import EXIT_REFUSED, Agent
from megatron.adaptive.cluster.connection import Connection, Listener
from megatron.adaptive.cluster.incarnation import NodeWork
from megatron.adaptive.cluster.membership import PURPOSE, Membership
from megatron.adaptive.errors import SetupError

SECRET = "secret"
LIMIT_S = 120.0


def make_agent(port: int, folder: Path, script: str = "") -> Agent:
    """Returns an agent of the node ``a``, whose ranks run a script with the text ``script``."""
    path = folder / "train.py"
    path.write_text(script)
    work = NodeWork(script=str(path), arguments=(), checkpoints=str(folder))
    return Agent(name="a", address="127.0.0.1", port=port, secret=SECRET, work=work, slots=1)


def order(key: str, *arguments: str) -> dict[str, Any]:
    """Returns a manager's request to start the process ``key`` with ``arguments``."""
    return {"key": key, "variables": {"LOCAL_RANK": "0"}, "arguments": list(arguments)}


def test_a_node_of_an_older_version_is_refused() -> None:
    async def join() -> dict[str, Any] | None:
        members = Membership(None, None, "127.0.0.1", SECRET)
        await members.start()
        link = await Connection.connect("127.0.0.1", members.port, 5.0, SECRET, PURPOSE)
        link.send("join", name="a", host="h", pid=1, slots=1)
        answer = await link.receive()
        await link.close()
        await members.close(0, hands_over=True)
        return answer

    answer = asyncio.run(join())
    assert answer is not None
    assert answer["what"] == "refused"
    assert "runs a different version than this node" in answer["why"]


def test_a_manager_of_an_older_version_is_refused(tmp_path: Path) -> None:
    """Checks that a node rejects a manager of an older version, whose messages differ."""

    async def join() -> None:
        async def welcome(link: Connection) -> None:
            await link.receive()
            link.send("welcome")
            await link.receive()

        listener = Listener(welcome, SECRET, PURPOSE, print, host="127.0.0.1")
        try:
            await make_agent(listener.port, tmp_path).run()
        finally:
            listener.close()

    with pytest.raises(
        SetupError, match=r"at 127\.0\.0\.1 runs a different version than this node"
    ):
        asyncio.run(join())


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.slow
def test_ranks_start_without_checks_and_unknown_orders(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Checks that hanging device checks do not block ranks, and that unknown requests fail."""

    async def run() -> list[int]:
        members = Membership(None, None, "127.0.0.1", SECRET)
        await members.start()
        agent = make_agent(members.port, tmp_path, "print('the script ran')")
        serving = asyncio.create_task(agent.run())
        while (event := await asyncio.wait_for(members.events.get(), LIMIT_S)).kind != "ready":
            assert event.kind == "joined"

        async def status_of(key: str, *arguments: str, **values: Any) -> int:
            ranks = [order(key, *arguments)]
            answer = await members.ask("a", "start", LIMIT_S, ranks=ranks, **values)
            return int(answer["status"])

        # No device reaches this limit, so each check takes about a second.
        limits = json.dumps({"limits": {"memory": 1e30}})
        checks = [status_of(f"check-{n}/a", limits, program="check") for n in range(2)]
        statuses = await asyncio.gather(
            *checks, status_of("1/0"), status_of("restore-1/a", limits, is_restore=True)
        )
        members.release(members.nodes["a"], "", 0)
        await asyncio.wait_for(serving, LIMIT_S)
        await members.close(0, hands_over=False)
        return statuses

    assert asyncio.run(run()) == [-signal.SIGKILL, -signal.SIGKILL, 0, EXIT_REFUSED]
    printed, said = capfd.readouterr()
    assert printed.count("the script ran") == 1
    (line,) = (line for line in said.splitlines() if "error" in line)
    assert line.endswith(
        "node a: the manager's request to start restore-1/a contains 'is_restore', which this "
        "node does not support; install the same version on all nodes"
    )
