"""Nodes that join a manager by themselves."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import pytest

from megatron.adaptive.cluster.agent import AgentConnection
from megatron.adaptive.cluster.membership import Machine, Membership


@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_one_port_is_reached_by_both_versions_of_ip(address: str, turn: int) -> None:
    """Two sockets had two ports, of which nodes were told either."""
    if address == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")

    async def join() -> str:
        members = Membership(None, None, "192.0.2.1", "secret", print)
        await members.start()
        link = await AgentConnection.connect(address, members.port, 5.0)
        link.send("join", secret="secret", name="a", host="h", pid=1, slots=1)
        answer = await link.receive()
        assert answer is not None
        assert answer["what"] == "welcome"
        found = members.nodes["a"].link
        assert found is not None
        await link.close()
        await members.close(0, hands_over=True)
        return found.peer

    assert asyncio.run(join()) == address


def test_a_manager_that_hands_over_ends_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nodes that look for another manager are still connected when the loop ends."""

    async def join() -> AgentConnection:
        members = Membership(None, None, "127.0.0.1", "secret", print)
        await members.start()
        link = await AgentConnection.connect("127.0.0.1", members.port, 5.0)
        link.send("join", secret="secret", name="a", host="h", pid=1, slots=1)
        answer = await link.receive()
        assert answer is not None
        assert answer["what"] == "welcome"
        return link

    asyncio.run(join())
    assert caplog.text == ""


@pytest.mark.slow
def test_the_manager_s_own_agent_is_started_again(capfd: pytest.CaptureFixture[str]) -> None:
    """The node stayed out for ever when its agent alone was killed, or given up."""

    async def pids(members: Membership, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            event = await asyncio.wait_for(members.events.get(), 60.0)
            if event.kind != "joined":
                continue
            node = members.nodes["a"]
            assert node.status == "present"
            found.append(node.pid)
            if len(found) == 1:
                os.kill(node.pid, signal.SIGKILL)
            elif len(found) == 2:
                assert node.link is not None
                node.status = "lost"
                node.link.send("leave")
        return found

    async def run() -> list[int]:
        own = Machine(name="a", host="localhost", slots=1)
        members = Membership(None, own, "127.0.0.1", "secret", print)
        await members.start()
        try:
            return await pids(members, 3)
        finally:
            await members.close(0, hands_over=False)

    assert len(set(asyncio.run(run()))) == 3
    assert "Traceback" not in capfd.readouterr().err
