"""Tests how the machines file is read, and how nodes join a manager without being listed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from megatron.adaptive.cluster.connection import Connection
from megatron.adaptive.cluster.membership import (
    PROTOCOL,
    PURPOSE,
    Machine,
    Membership,
    over_ssh,
    read_machines,
)
from megatron.adaptive.errors import ConfigError


def test_a_file_names_hosts_with_slots_and_nodes_on_one_host(tmp_path: Path) -> None:
    path = tmp_path / "machines.txt"
    path.write_text(
        "# of the lab\nnode-a slots=8\n\nnode-b   # as many as GPUs\nlocalhost name=c\n"
    )
    assert read_machines(path) == (
        Machine(name="node-a", host="node-a", slots=8),
        Machine(name="node-b", host="node-b"),
        Machine(name="c", host="localhost"),
    )
    assert [machine.is_local for machine in read_machines(path)] == [False, False, True]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "lists no machine"),
        ("# nothing\n\n", "lists no machine"),
        ("a\nb\na slots=2\n", "line 3: a is already in line 1"),
        ("localhost\nlocalhost\n", "different names with name=NAME"),
        ("a slots=0\n", "line 1: slots must be a positive integer, got 0"),
        ("a slots=two\n", "got two"),
        ("a 8\n", "'8' is not allowed; only slots=N and name=NAME may follow the host"),
        ("a gpus=8\n", "'gpus=8'"),
        ("-oProxyCommand=x\n", "is not a valid name for a host"),
        ("a name=../b\n", "'../b' is not a valid name"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "machines.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match="^--machines ") as caught:
        read_machines(path)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_one_that_is_no_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_machines(tmp_path / "none.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="it is not a text file"):
        read_machines(tmp_path / "binary")


@pytest.mark.parametrize(
    ("host", "loopback", "local"),
    [
        ("localhost", True, True),
        ("127.0.0.1", True, True),
        (socket.gethostname(), False, True),
        (socket.gethostname().upper(), False, True),
        ("203.0.113.7", False, False),
        ("2001:db8::7", False, False),
        ("another-machine", False, False),
    ],
)
def test_this_machine_is_known_by_its_names(host: str, loopback: bool, local: bool) -> None:
    machine = Machine(name="a", host=host)
    assert (machine.has_loopback, machine.is_local) == (loopback, local)


@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_another_machine_gets_its_environment_by_standard_input(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    program = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:], input()]))"
    variables = {"HF_TOKEN": 'it\'s "a" $(id) \\ \n é', "PYTHONPATH": str(tmp_path)}
    command, begin = over_ssh("far", ["-c", program, "a b", "$x"], variables)
    assert command[-2] == "far"
    assert "HF_TOKEN" not in " ".join(command)
    clean = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    shell_command = [shell, "-c", command[-1]]
    said = subprocess.run(
        shell_command, input=begin + b"the rest\n", env=clean, capture_output=True, check=True
    )
    environment, arguments, rest = json.loads(said.stdout)
    assert variables.items() <= environment.items()
    assert (arguments, rest) == (["a b", "$x"], "the rest")


async def joined(members: Membership, address: str = "127.0.0.1") -> Connection:
    """Listens with ``members``, connects to it as node ``a``, and returns the connection."""
    await members.start()
    link = await Connection.connect(address, members.port, 5.0, "secret", PURPOSE)
    link.send("join", protocol=PROTOCOL, name="a", host="h", pid=1, slots=1)
    answer = await link.receive()
    assert answer is not None
    assert answer["what"] == "welcome"
    return link


@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_one_port_is_reached_by_both_versions_of_ip(address: str, turn: int) -> None:
    """Checks that IPv4 and IPv6 share a socket, because two sockets would have two ports."""
    if address == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")

    async def join() -> str:
        members = Membership(None, None, "192.0.2.1", "secret")
        link = await joined(members, address)
        other_end = members.nodes["a"].link
        assert other_end is not None
        await link.close()
        await members.close(0, hands_over=True)
        return other_end.peer

    assert asyncio.run(join()) == address


def test_a_manager_that_hands_over_ends_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Checks that no traceback is printed if a manager hands over its job with open connections."""
    asyncio.run(joined(Membership(None, None, "127.0.0.1", "secret")))
    assert caplog.text == ""


def test_a_question_ends_with_its_answer_the_deadline_or_the_node() -> None:
    async def ask() -> None:
        members = Membership(None, None, "127.0.0.1", "secret")
        link = await joined(members)
        asked = asyncio.create_task(members.ask("a", "port", 20.0))
        question = await link.receive()
        assert question is not None
        assert question["what"] == "port"
        link.send("answer", number=question["number"], port=7)
        assert (await asked)["port"] == 7
        with pytest.raises(TimeoutError, match="a did not reply in time"):
            await members.ask("a", "port", 0.01)
        asked = asyncio.create_task(members.ask("a", "port", 20.0))
        await asyncio.sleep(0)
        await link.close()
        # The request that was pending during the loss must fail, and so must a later request.
        for _ in range(2):
            with pytest.raises(ConnectionError, match="a was also lost"):
                await asked
            asked = asyncio.create_task(members.ask("a", "port", 20.0))
        with pytest.raises(ConnectionError):
            await asked
        await members.close(0, hands_over=True)

    asyncio.run(ask())


@pytest.mark.long
def test_the_manager_s_own_agent_is_started_again(capfd: pytest.CaptureFixture[str]) -> None:
    """Checks that the manager restarts the agent on its node if it was killed or released."""

    async def pids(members: Membership, count: int) -> list[int]:
        pids: list[int] = []
        while len(pids) < count:
            event = await asyncio.wait_for(members.events.get(), 60.0)
            if event.kind != "joined":
                continue
            node = members.nodes["a"]
            assert node.status == "present"
            pids.append(node.pid)
            if len(pids) == 1:
                os.kill(node.pid, signal.SIGKILL)
            elif len(pids) == 2:
                assert node.link is not None
                node.status = "lost"
                node.link.send("leave")
        return pids

    async def run() -> list[int]:
        machine = Machine(name="a", host="localhost", slots=1)
        work = {"script": "x.py", "arguments": (), "checkpoints": "/nowhere"}
        members = Membership(None, machine, "127.0.0.1", "secret", work)
        await members.start()
        try:
            return await pids(members, 3)
        finally:
            await members.close(0, hands_over=False)

    assert len(set(asyncio.run(run()))) == 3
    assert "Traceback" not in capfd.readouterr().err
