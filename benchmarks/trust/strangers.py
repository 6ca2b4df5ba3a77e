"""Strangers at the listeners of real jobs: they change nothing, end nothing and move no loss.

An elastic job of two nodes that keep snapshots for each other, and a master of pods that waits for
its worker, run on this machine. Meanwhile one client with many connections, from many addresses,
says random bytes, what a node of a version without secrets would say, handshakes that are cut
short, guessed, repeated or sent back, and holds hundreds of connections open without a word.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import Result, Row
from megatron.adaptive.handshake import Handshake, Session, StrangerError
from tests.cluster.jobs import ElasticJob
from tests.multiprocess.launch import ROOT, environment

LIMIT_S = 200.0
HELD = 300
_AT_ONCE = 48
_ANSWER_BYTES = 72
_MOST_COMPARED = 300
_WORDS = (
    {"what": "join", "secret": "guessed", "name": "a", "host": "h", "pid": 1, "slots": 1},
    {"what": "hello", "host": "h", "gpus": 0, "processes": None, "node_rank": [], "address": ""},
    {"what": "leave", "status": 0},
    {"what": "start", "ranks": [{"key": "1/0", "script": "/bin/sh", "folder": "/"}]},
    {"run": "", "rank": 0, "generation": 1, "secret": "", "head_bytes": 1 << 62},
)
_CONF = """
MODEL=tiny
DEVICE=cpu
TRAIN_ITERS=5
GLOBAL_BATCH_SIZE=4
PIPELINE_MP_SIZE=2
NNODES=2
NPROC_PER_NODE=1
TRAINER_FLAGS='--vocab-size 255'
"""


@dataclass
class Visit:
    """One stranger's connection.

    Attributes:
        first: what it says at once.
        then: makes of the listener's answer what it says next, ``None`` where it waits for none.
    """

    first: bytes
    then: Callable[[bytes], bytes] | None = None


def visits(draw: random.Random) -> Iterator[Visit]:
    """Yields visits of all kinds, for ever."""
    hello = Handshake("guessed", "manager", visiting=True).first
    wrong = Session(b"one", b"two")
    while True:
        shake = Handshake("guessed", draw.choice(("manager", "pods", "snapshots")), visiting=True)
        size = draw.choice((1, 39, 40, 41, 72, 200, 4096))
        text = json.dumps(draw.choice(_WORDS)).encode() + b"\n"
        sealed = wrong.seal(text)
        yield from (
            Visit(draw.randbytes(size)),
            Visit(text),
            Visit(b'{"what": "join", "x": ' + b"[" * 5000),
            Visit(struct.pack("!I", 0xFFFFFFFF) + draw.randbytes(64)),
            Visit(shake.first[: draw.randrange(1, 40)]),
            Visit(shake.first + draw.randbytes(32) + sealed),
            Visit(shake.first, lambda answer: answer[-32:]),  # the listener's own proof
            Visit(shake.first, lambda answer, shake=shake: _guess(shake, answer)),  # type: ignore[misc]
            Visit(hello, lambda answer, sealed=sealed: answer[:32] + sealed),  # type: ignore[misc]
            Visit(b"\0" * 65536),
        )


def _guess(shake: Handshake, answer: bytes) -> bytes:
    """Goes on as if the secret had been the right one."""
    with contextlib.suppress(StrangerError):
        shake.advance(answer)
    return shake._prove("visitor") + Session(b"one", b"two").seal(b'{"what": "welcome"}')


class Strangers:
    """Visits listeners from many addresses of this machine over many connections at once.

    Args:
        ports: of the listeners.
        seed: of what is said.
    """

    def __init__(self, ports: Sequence[int], seed: int) -> None:
        self._ports = ports
        self._visits = visits(random.Random(seed))
        self._draw = random.Random(seed + 1)
        self._selector = selectors.DefaultSelector()
        self._open: dict[socket.socket, tuple[Visit, float]] = {}
        self._held: list[socket.socket] = []
        self.said = 0

    def hold(self, count: int) -> None:
        """Opens connections that say next to nothing and stay."""
        for at in range(count):
            with contextlib.suppress(OSError):
                one = self._connect(self._ports[at % len(self._ports)])
                self._held.append(one)

    def speak(self, messages: int, until: Callable[[], object] = lambda: False) -> None:
        """Says so many messages, or until something has become true."""
        end_said, turn = self.said + messages, 0
        while self.said < end_said and not until():
            while len(self._open) < _AT_ONCE:
                turn += 1
                with contextlib.suppress(OSError):
                    one = self._connect(self._ports[turn % len(self._ports)])
                    self._open[one] = next(self._visits), time.monotonic() + 1.0
                    self._selector.register(one, selectors.EVENT_WRITE)
            for key, events in self._selector.select(0.01):
                self._advance(key.fileobj, events)  # type: ignore[arg-type]
            now_s = time.monotonic()
            for one in [one for one, (_, end_s) in self._open.items() if end_s < now_s]:
                self._end(one)
            if turn % 7 == 0 and self._held:  # one byte now and then keeps them open
                with contextlib.suppress(OSError):
                    self._draw.choice(self._held).send(b"M")

    def close(self) -> None:
        """Ends all connections."""
        for one in list(self._open):
            self._end(one)
        for one in self._held:
            one.close()
        self._selector.close()

    def _connect(self, port: int) -> socket.socket:
        one = socket.socket()
        one.setblocking(False)
        # Closing resets the connection: else the machine runs out of ports within seconds.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.bind((f"127.{self._draw.randrange(1, 255)}.0.{self._draw.randrange(1, 255)}", 0))
        code = one.connect_ex(("127.0.0.1", port))
        if code not in (0, errno.EINPROGRESS):
            one.close()
            raise OSError(code, os.strerror(code))
        return one

    def _advance(self, one: socket.socket, events: int) -> None:
        visit, _ = self._open[one]
        try:
            if events & selectors.EVENT_WRITE:
                one.send(visit.first)
                self.said += 1
                self._selector.modify(one, selectors.EVENT_READ)
                if len(visit.first) < 40:  # the listener would wait for more
                    self._end(one)
            else:
                answer = one.recv(4096)
                if not answer or visit.then is None or len(answer) < _ANSWER_BYTES:
                    self._end(one)
                else:
                    one.send(visit.then(answer))
                    self.said += 1
                    self._open[one] = Visit(b""), time.monotonic() + 1.0
        except OSError:
            self._end(one)

    def _end(self, one: socket.socket) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(one)
        del self._open[one]
        one.close()


def rows(messages: int, seed: int) -> Result:
    """Lets strangers say ``messages`` to every listener; see :func:`measure`."""
    found = measure(messages, seed)
    said = ", ".join(f"{count:,} to {job}" for job, count in found["said"].items())
    named = {"ends": "jobs or nodes that ended", "effects": "other effects"}
    table = [
        Row(
            what=f"strangers: {text}",
            value=len(found[key]),
            goal=0,
            note="; ".join(found[key])[:300],
        )
        for key, text in named.items()
    ]
    note = (
        f"{found['steps']} steps; {said}; {found['messages_per_s']:.0f} messages/s with all starts"
    )
    value = found["differences"] if found["steps"] else None
    table.append(Row(what="strangers: losses that differ", value=value, goal=0, note=note))
    return Result(rows=table, facts={"strangers": found})


def measure(messages: int, seed: int) -> dict[str, Any]:
    """Lets strangers say ``messages`` to each listener of two jobs.

    Returns:
        ``said``, messages by job; ``ports``, listeners by job; ``ends``, jobs and nodes that ended
        or began anew; ``effects``, in words, what else they did; ``steps``, compared with a run of
        its own, and ``differences``, losses among them that are not equal bit for bit;
        ``messages_per_s``.
    """
    found: dict[str, Any] = {"said": {}, "ports": {}, "ends": [], "effects": []}
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="strangers-") as name:
        _elastic(Path(name), messages, seed, found)
        _pods(Path(name), messages, seed, found)
    found["messages_per_s"] = sum(found["said"].values()) / (time.monotonic() - begun_s)
    return found


def listening(process: psutil.Process) -> list[int]:
    """Lists the TCP ports that a process listens at."""
    connections = process.net_connections(kind="tcp")
    return sorted({one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN})


def _elastic(folder: Path, messages: int, seed: int, found: dict[str, Any]) -> None:
    flags = ["--train-iters", "1000000", "--save-interval", "100000"]
    (folder / "elastic").mkdir()
    begun_s = time.monotonic()
    job = ElasticJob(folder / "elastic", "ab", flags, ["--replicate-every", "5"])
    try:
        job.trained(1, 6)
        helpers = [job.manager.pid, job.agent("a"), job.agent("b")]
        ports = [port for pid in helpers for port in listening(psutil.Process(pid))]
        strangers = Strangers(ports, seed)
        strangers.hold(HELD)
        with contextlib.closing(strangers):
            strangers.speak(messages * len(ports), lambda: job.manager.poll() is not None)
        job.trained(1, max(job.steps(1)) + 5)
        now = job.state()
        found["said"]["elastic"], found["ports"]["elastic"] = strangers.said, len(ports)
        if len(now["epochs"]) > 1 or [job.agent("a"), job.agent("b")] != helpers[1:]:
            found["ends"].append(f"elastic: {now['epochs'][-1]['reason']}")
        found["effects"] += [
            f"elastic: a node {node['name']} joined"
            for node in now["machines"]
            if node["name"] not in "ab"
        ]
        lines = len(ports) * (1 + int(time.monotonic() - begun_s) // 60)  # one a minute each
        found["effects"] += _complaints(job.said(), lines)
        job.stop()
    except AssertionError as error:
        found["ends"].append(f"elastic: {error}")
    finally:
        job.close()
    disturbed = {line["iteration"]: line["loss"] for line in job.lines() if "iteration" in line}
    compared = min(max(disturbed, default=0), _MOST_COMPARED)
    (folder / "alone").mkdir()
    flags = ["--train-iters", str(compared), "--save-interval", "100000"]
    alone = ElasticJob(folder / "alone", "ab", flags)
    try:
        if status := alone.end(LIMIT_S):
            found["ends"].append(f"the job for comparison: status {status}: {alone.said()[-2000:]}")
    finally:
        alone.close()
    expected = {line["iteration"]: line["loss"] for line in alone.lines() if "iteration" in line}
    found["steps"] = len(expected)
    found["differences"] = sum(disturbed.get(at) != loss for at, loss in expected.items())


def _complaints(said: str, most: int) -> list[str]:
    """Returns what a job printed about strangers that it should not have."""
    warnings = [line for line in said.splitlines() if "is not of this job and was refused" in line]
    found = ["a traceback"] if "Traceback" in said else []
    return found + ([f"{len(warnings)} warnings"] if len(warnings) > most else [])


def _pods(folder: Path, messages: int, seed: int, found: dict[str, Any]) -> None:
    conf, logs = folder / "pods" / "conf.sh", folder / "pods" / "logs"
    conf.parent.mkdir()
    conf.write_text(_CONF)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    variables = {**environment(), "PYTHON": sys.executable, "MASTER_ADDR": "127.0.0.1"}
    variables["MASTER_PORT"] = str(port)
    pods: dict[str, subprocess.Popen[str]] = {}
    begun_s = time.monotonic()
    said: dict[str, list[str]] = {"master": [], "worker": []}

    def start(name: str, *words: str | Path) -> None:
        pods[name] = subprocess.Popen(
            ["bash", str(ROOT / f"run_{name}.sh"), *map(str, words)],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        reading = threading.Thread(
            target=lambda: said[name].extend(pods[name].stdout or ()), daemon=True
        )
        reading.start()

    try:
        start("master", conf, "--timeout", "3000")
        waiting, end_s = logs / "master.json", time.monotonic() + LIMIT_S
        while not waiting.exists() or not _is_open(port):
            assert time.monotonic() < end_s, said
            time.sleep(0.05)
        strangers = Strangers([port], seed)
        strangers.hold(HELD)
        with contextlib.closing(strangers):
            strangers.speak(messages, lambda: pods["master"].poll() is not None)
            start("worker", "--log-dir", logs)
            # They go on until the nodes have met; then the port is torch's.
            strangers.speak(10**9, lambda: not waiting.exists() or time.monotonic() > end_s)
        found["said"]["pods"], found["ports"]["pods"] = strangers.said, 1
        for name, pod in pods.items():
            status = pod.wait(LIMIT_S)
            if status:
                found["ends"].append(
                    f"pods: {name}, status {status}: {''.join(said[name])[-2000:]}"
                )
        lines = 1 + int(time.monotonic() - begun_s) // 60
        found["effects"] += _complaints("".join(said["master"]), lines)
    finally:
        for pod in pods.values():
            if pod.poll() is None:
                os.killpg(pod.pid, signal.SIGKILL)
                pod.wait(10)


def _is_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False
