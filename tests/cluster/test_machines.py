"""The machines file, right and wrong."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from megatron.adaptive.cluster.membership import Machine, read_machines
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
    ("text", "told"),
    [
        ("", "it names no machine"),
        ("# nothing\n\n", "it names no machine"),
        ("a\nb\na slots=2\n", "line 3: a is in line 1 already"),
        ("localhost\nlocalhost\n", "name=NAME each"),
        ("a slots=0\n", "line 1: slots=0: write a whole number from 1 on"),
        ("a slots=two\n", "slots=two"),
        ("a 8\n", "'8': after the host come slots=N and name=NAME only"),
        ("a gpus=8\n", "'gpus=8'"),
        ("-oProxyCommand=x\n", "is not a name of a host"),
        ("a name=../b\n", "'../b' is not a name"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "machines.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match="^--machines ") as caught:
        read_machines(path)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_one_that_is_no_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_machines(tmp_path / "none.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="it is no text"):
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
