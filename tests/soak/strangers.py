"""Lets strangers connect to the listeners of real jobs, and checks that the jobs are unaffected.

A stranger is a client that does not know the job's secret. This machine runs an elastic job of two
nodes that keep snapshots for each other and compare clocks, a master of pods that waits for its
worker, ``doctor``, and ranks that wait for a peer over ``tcp`` and ``shm``. One process per
listener opens many connections from many addresses, and sends random bytes, messages of a protocol
without secrets, and handshakes that are truncated, guessed, repeated or reflected. It also keeps
hundreds of idle connections open. The process does not close a connection before the listener does,
so that the listener can read everything. For Unix sockets, the process runs as another user.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.report import Result, Row, one_line
from megatron.adaptive import extension
from megatron.adaptive.cli.doctor import check_way
from megatron.adaptive.handshake import Handshake, Session, StrangerError, new_secret
from tests.cluster.jobs import ElasticJob
from tests.multiprocess.launch import ROOT, forking, free_port, kill_tree, start, tail, wait_until
from tests.soak.planted_secrets import NOBODY

LIMIT_S = 200.0
HELD = 200
_AT_ONCE = 48
_END_S = 6.0
"""Timeout in seconds of a connection.

Listeners close wrong connections immediately, and silent connections after five seconds.
"""
_ANSWER_BYTES = 72
_MOST_COMPARED = 300
_TRAINER = Path(__file__).with_name("observed_trainer.py")
_STEP_S = 0.1
# This is the socket option IP_BIND_ADDRESS_NO_PORT of <linux/in.h>. It delays the choice of a port
# until the socket connects.
_NO_PORT = 24
_SHARES = {"elastic": 0.5, "pods": 0.15, "doctor": 0.13, "tcp": 0.16, "shm": 0.06}
"""Fraction of the total time limit that is used for each kind of listener."""
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
    """Connection from a stranger (a client without the secret) to a listener.

    Attributes:
        first: Bytes that are sent immediately.
        then: Function that creates the next bytes from the listener's answer, or ``None`` if no
            answer is expected.
    """

    first: bytes
    then: Callable[[bytes], bytes] | None = None


def visits(draw: random.Random) -> Iterator[Visit]:
    """Yields an endless series of connections of all kinds. ``draw`` selects random values."""
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
            # Here the stranger sends the listener's proof back.
            Visit(shake.first, lambda answer: answer[-32:]),
            Visit(shake.first, lambda answer, shake=shake: _guess(shake, answer)),  # type: ignore[misc]
            Visit(hello, lambda answer, sealed=sealed: answer[:32] + sealed),  # type: ignore[misc]
            Visit(b"\0" * 65536),
        )


def hellos(draw: random.Random) -> Iterator[Visit]:
    """Yields an endless series of connections to a rank that waits for its peers.

    ``draw`` selects random values.
    """
    while True:
        version, verdict, zero = draw.choice((0, 1, 2, 0xFFFF)), draw.choice((0, 1, 255)), 0
        token, purpose = draw.randbytes(16), draw.choice((b"tcp", b"shm", b"rdma", b"\xff" * 16))
        rank, target = draw.choice((0, 1, -1, 1 << 30)), draw.choice((0, 1, -1))
        form = struct.Struct("<IHBB16sii16s")
        hello = form.pack(0x4D41484C, version, verdict, zero, token, rank, target, purpose)
        record = struct.pack("<III", 0x4D415243, 0xFFFFFFFF, draw.randrange(4))
        yield from (
            Visit(hello),
            Visit(form.pack(0x4D41484C, 1, 0, 0, bytes(16), 0, 1, b"tcp") + record),
            Visit(hello[: draw.randrange(1, 48)]),
            Visit(draw.randbytes(48)),
            Visit(hello, lambda answer: answer),
            Visit(hello + record + draw.randbytes(512)),
            Visit(json.dumps(draw.choice(_WORDS)).encode() + b"\n"),
        )


def _guess(shake: Handshake, answer: bytes) -> bytes:
    """Returns the last handshake message of a client with a wrong secret.

    ``shake`` is the handshake of the client, and ``answer`` is the answer of the listener.
    """
    with contextlib.suppress(StrangerError):
        shake.advance(answer)
    return shake._prove("visitor") + Session(b"one", b"two").seal(b'{"what": "welcome"}')


@dataclass(frozen=True, kw_only=True)
class Place:
    """Listener of a job. Strangers (clients without the secret) connect to it.

    Attributes:
        name: Name of the listener.
        port: TCP port on the loopback address, or 0 for a Unix socket.
        unix: Abstract name of the Unix socket.
        kind: Type of the socket.
        says: Function that takes a random number generator, and yields what a stranger sends in
            each connection.
    """

    name: str
    port: int = 0
    unix: str = ""
    kind: int = socket.SOCK_STREAM
    says: Callable[[random.Random], Iterator[Visit]] = visits


class Crowd:
    """Opens many connections at a time to one listener, from many addresses of this machine.

    Args:
        place: Listener to connect to.
        seed: Seed of the connections.
    """

    def __init__(self, service: Place, seed: int) -> None:
        self._service = service
        self._draw = random.Random(seed)
        self._visits = service.says(random.Random(seed + 1))
        self._open: deque[tuple[socket.socket, Visit]] = deque()
        self._held: list[socket.socket] = []
        self.said = self.unheard = 0

    def speak(self, messages: int, is_over: Callable[[], bool]) -> None:
        """Sends up to ``messages`` messages, and stops early if ``is_over`` returns true.

        Args:
            messages: Number of messages.
            is_over: Function that returns whether to stop early.
        """
        visited = 0
        while self.said < messages and not is_over():
            visited += 1
            if visited % 8 == 0 and self._service.port:
                self._hold()
            with contextlib.suppress(OSError):
                visit = next(self._visits)
                connection = self._connect()
                self._open.append((connection, visit))
                self._say(connection, visit.first, is_last=visit.then is None)
            if len(self._open) >= _AT_ONCE:
                self._finish(*self._open.popleft())
        # Check ``is_over`` each time. If the listener has stopped, each call waits for a timeout.
        while self._open and not is_over():
            self._finish(*self._open.popleft())
        for connection in [*self._held, *(connection for connection, _ in self._open)]:
            connection.close()

    def _hold(self) -> None:
        """Opens an idle connection. If enough are open, sends a byte on one of them instead."""
        if len(self._held) >= HELD:
            connection = self._held.pop(self._draw.randrange(HELD))
            with contextlib.suppress(OSError):
                connection.send(b"M")
                self._held.append(connection)
                return
            connection.close()
        with contextlib.suppress(OSError):
            self._held.append(self._connect())

    def _connect(self) -> socket.socket:
        listener = self._service
        if not listener.port:
            connection = socket.socket(socket.AF_UNIX, listener.kind)
            connection.settimeout(_END_S)
            connection.connect(f"\0{listener.unix}")
            return connection
        connection = socket.socket()
        connection.settimeout(_END_S)
        # Reset connections on close. Otherwise, the machine would run out of ports within seconds.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.setsockopt(socket.IPPROTO_IP, _NO_PORT, 1)
        try:
            connection.bind(
                (f"127.{self._draw.randrange(1, 255)}.0.{self._draw.randrange(1, 255)}", 0)
            )
            connection.connect(("127.0.0.1", listener.port))
        except OSError:
            connection.close()
            raise
        return connection

    def _say(self, connection: socket.socket, data: bytes, *, is_last: bool) -> None:
        self.said += 1
        with contextlib.suppress(OSError):
            connection.sendall(data)
            if is_last:
                connection.shutdown(socket.SHUT_WR)

    def _finish(self, connection: socket.socket, visit: Visit) -> None:
        """Sends the rest of ``visit``, and waits until the listener closes the connection."""
        try:
            answer = connection.recv(4096)
            if visit.then is not None and len(answer) >= min(_ANSWER_BYTES, 48):
                self._say(connection, visit.then(answer), is_last=True)
                self._open.append((connection, Visit(b"")))
                return
            while answer:
                answer = connection.recv(4096)
        except TimeoutError:
            self.unheard += 1
        except OSError:
            pass  # The listener may reset the connection.
        connection.close()


@contextlib.contextmanager
def crowds(
    places: Sequence[Place], messages: int, seed: int, result: dict[str, Any] | None = None
) -> Iterator[list[Any]]:
    """Lets strangers (clients without the secret) connect to listeners until the context ends.

    Args:
        places: Listeners to connect to.
        messages: Number of messages to each listener.
        seed: Seed of the connections.
        result: Dict to which the numbers of messages and of connections that stayed open are added,
            by listener.

    Yields:
        Processes of the strangers, one for each listener.
    """
    context = multiprocessing.get_context("fork")
    over, counts = context.Event(), context.SimpleQueue()
    talking = []
    for number, service in enumerate(places):
        arguments = (service, messages, seed + 10 * number, counts, over.is_set)
        talking.append(context.Process(target=_speak, args=arguments, daemon=True))
        talking[-1].start()
    try:
        yield talking
        over.set()
        for service, process in zip(places, talking, strict=True):
            process.join(LIMIT_S)
            if process.is_alive():
                raise RuntimeError(f"the strangers at {service.name} did not finish")
    finally:
        for process in talking:
            process.kill()
            process.join()
    while result is not None and not counts.empty():
        name, said, unheard, took_s = counts.get()
        result["said"][name] = said
        result["per_s"][name] = said / max(0.1, took_s)
        if unheard:
            result["unheard"][name] = unheard


def _speak(
    service: Place, messages: int, seed: int, counts: Any, is_over: Callable[[], bool]
) -> None:
    """Connects strangers (clients without the secret) to ``service``, in a separate process.

    ``seed`` is the seed of all random numbers.

    The strangers send up to ``messages`` messages, and stop early if ``is_over`` returns true. The
    process adds its results to ``counts``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if service.unix:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    crowd, begun_s = Crowd(service, seed), time.monotonic()
    crowd.speak(messages, is_over)
    counts.put((service.name, crowd.said, crowd.unheard, time.monotonic() - begun_s))
    os._exit(0)


def _unix_names(kind: int, pids: Sequence[int]) -> list[str]:
    """Returns the names of abstract Unix sockets on which the processes ``pids`` listen.

    Only sockets of this package with the type ``kind`` are included.

    Ranks use stream sockets, and stop listening when all channels are open. Nodes that keep
    snapshots use sockets that preserve message boundaries.
    """
    rows = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    listen = {row[7] for row in rows if len(row) == 8 and row[3] == "00010000"}
    every = [
        connection
        for pid in pids
        for connection in psutil.Process(pid).net_connections(kind="unix")
    ]
    names = {connection.laddr for connection in every if connection.type == kind} & listen
    return sorted(name[1:] for name in names if name.startswith("@megatron-adaptive-"))


def rows(messages: int, limit_s: float, seed: int) -> Result:
    """Measures how strangers (clients without the secret) affect jobs, and returns table rows.

    See :func:`measure` for the arguments.
    """
    result = measure(messages, limit_s, seed)
    least = min(result["said"].values())
    said = ", ".join(
        f"{name} {count:,} ({result['per_s'][name]:,.0f}/s)"
        for name, count in result["said"].items()
    )
    table = [
        Row(
            what=f"strangers: {text}",
            value=len(result[key]),
            goal=0,
            note=one_line("; ".join(result[key])),
        )
        for key, text in (("ends", "jobs or nodes that ended"), ("effects", "other effects"))
    ]
    value = result["differences"] if result["steps"] else None
    note = f"{result['steps']} steps"
    table.append(Row(what="strangers: losses that differ", value=value, goal=0, note=note))
    note = f"of {messages:,}, in {result['talked_s']:.0f} s; {said}"
    table.append(
        Row(
            what="strangers: messages to the listener with the fewest messages",
            value=least,
            note=note,
        )
    )
    return Result(rows=table, facts={"strangers": result})


def measure(messages: int, limit_s: float, seed: int) -> dict[str, Any]:
    """Lets clients without the secret, called strangers, connect to each listener of several jobs.

    Args:
        messages: Number of messages to each listener.
        limit_s: Maximum time in seconds during which strangers send messages, in total.
        seed: Seed of the connections.

    Returns:
        Dict with ``said`` and ``per_s`` (messages, and messages per second, by listener),
        ``unheard`` (connections that a listener did not close, by listener), ``ends`` (jobs and
        nodes that exited or restarted), ``effects`` (descriptions of other effects), ``steps``
        (number of steps that were compared with an undisturbed run), ``differences`` (number of
        losses that are not bitwise equal) and ``talked_s`` (time in seconds during which strangers
        sent messages).
    """
    result: dict[str, Any] = {
        **{name: {} for name in ("said", "per_s", "unheard")},
        **{name: [] for name in ("ends", "effects")},
        "talked_s": 0.0,
    }
    limits_s = {name: share * limit_s for name, share in _SHARES.items()}
    with tempfile.TemporaryDirectory(prefix="strangers-") as name:
        folder = Path(name)
        _elastic(folder, messages, limits_s["elastic"], seed, result)
        _pods(folder, messages, limits_s["pods"], seed, result)
        _doctor(folder, messages, limits_s["doctor"], seed, result)
        for kind in ("tcp", "shm"):
            _ranks(kind, messages, limits_s[kind], seed, result)
    return result


def _talk(
    places: Sequence[Place],
    messages: int,
    limit_s: float,
    seed: int,
    result: dict[str, Any],
    is_over: Callable[[], object],
    then: Callable[[], object] = lambda: None,
) -> None:
    """Lets strangers (clients without the secret) connect to the listeners ``places``.

    Stops after ``messages`` messages to each listener, after ``limit_s`` seconds, or when
    ``is_over`` returns true. Then calls ``then``, while the strangers' processes still exist.

    ``seed`` is the seed of all random numbers. The message counts are added to ``result``.
    """
    begun_s = time.monotonic()
    with crowds(places, messages, seed, result) as talking:
        while any(process.is_alive() for process in talking) and not is_over():
            if time.monotonic() > begun_s + limit_s:
                break
            time.sleep(0.1)
        result["talked_s"] += time.monotonic() - begun_s
        then()


def listening(process: psutil.Process) -> list[int]:
    """Returns the TCP ports on which ``process`` listens."""
    connections = process.net_connections(kind="tcp")
    return sorted(
        {
            connection.laddr.port
            for connection in connections
            if connection.status == psutil.CONN_LISTEN
        }
    )


def _elastic(
    folder: Path, messages: int, limit_s: float, seed: int, result: dict[str, Any]
) -> None:
    flags = ["--train-iters", "100000", "--save-interval", "100000"]
    ports = folder / "ports"
    variables = {"OBSERVED_PORTS": str(ports), "OBSERVED_STEP_S": str(_STEP_S)}
    for path in (folder / "elastic", ports):
        path.mkdir()
    begun_s = time.monotonic()
    job = ElasticJob(
        folder / "elastic",
        "ab",
        [*flags, "--trace-dir", str(folder / "traces")],
        ["--replicate-every", "5"],
        script=_TRAINER,
        variables=variables,
    )
    try:
        job.trained(1, 6)
        helpers = [job.manager.pid, job.agent("a"), job.agent("b")]
        names = ("manager", "keeper a", "keeper b")
        places = [
            Place(name=name, port=port)
            for name, pid in zip(names, helpers, strict=True)
            for port in listening(psutil.Process(pid))
        ]
        places.append(Place(name="clocks", port=int((ports / "clocks").read_text())))
        if os.geteuid() == 0:
            kind = socket.SOCK_SEQPACKET
            places += [
                Place(name=f"keeper's Unix socket {number}", unix=name, kind=kind)
                for number, name in enumerate(_unix_names(kind, helpers), 1)
            ]
        _talk(places, messages, limit_s, seed, result, lambda: job.manager.poll() is not None)
        job.trained(1, max(job.steps(1)) + 5)
        now = job.state()
        if len(now["epochs"]) > 1 or [job.agent("a"), job.agent("b")] != helpers[1:]:
            result["ends"].append(f"elastic: {now['epochs'][-1]['reason']}")
        result["effects"] += [
            f"elastic: a node {node['name']} joined"
            for node in now["machines"]
            if node["name"] not in "ab"
        ]
        if "off" in now["copies"]:
            result["effects"].append(f"elastic: snapshots are {now['copies']}")
        # Each listener is allowed to print one warning per minute.
        lines = len(places) * (1 + int(time.monotonic() - begun_s) // 60)
        result["effects"] += _complaints(job.said(), lines)
        job.stop()
    except AssertionError as error:
        result["ends"].append(f"elastic: {error}")
    finally:
        job.close()
    disturbed = {line["iteration"]: line["loss"] for line in job.lines() if "iteration" in line}
    compared = min(max(disturbed, default=0), _MOST_COMPARED)
    (folder / "alone").mkdir()
    flags = ["--train-iters", str(compared), "--save-interval", "100000"]
    alone = ElasticJob(folder / "alone", "ab", flags)
    try:
        if status := alone.end(LIMIT_S):
            result["ends"].append(
                f"the job for comparison: status {status}: {alone.said()[-2000:]}"
            )
    finally:
        alone.close()
    expected = {line["iteration"]: line["loss"] for line in alone.lines() if "iteration" in line}
    result["steps"] = len(expected)
    result["differences"] = sum(
        disturbed.get(iteration) != loss for iteration, loss in expected.items()
    )


def _complaints(said: str, most: int) -> list[str]:
    """Returns complaints if ``said`` contains a traceback or more than ``most`` warnings."""
    warnings = [line for line in said.splitlines() if "does not belong to this job and" in line]
    complaints = ["a traceback"] if "Traceback" in said else []
    return complaints + ([f"{len(warnings)} warnings"] if len(warnings) > most else [])


@contextlib.contextmanager
def _started(
    log: Path, *command: str | Path, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the program ``command`` until the context exits.

    The program writes to ``log``, and gets the environment variables ``variables``.
    """
    program = start(command, log, {**forking(), **variables})
    try:
        yield program
    finally:
        kill_tree(program)


def _pods(folder: Path, messages: int, limit_s: float, seed: int, result: dict[str, Any]) -> None:
    work = folder / "pods"
    work.mkdir()
    conf, logs, said = work / "conf.sh", work / "logs", work / "master.txt"
    conf.write_text(_CONF)
    port, begun_s = free_port(), time.monotonic()
    waiting = logs / "master.json"
    variables = {"PYTHON": sys.executable, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with contextlib.ExitStack() as stack:
        command = ["bash", ROOT / "run_master.sh", conf, "--timeout", "3000"]
        master = stack.enter_context(_started(said, *command, **variables))
        wait_until(lambda: waiting.exists() and _is_open(port), said.read_text, LIMIT_S)
        nodes = {said: master}

        def join() -> None:
            """Starts the worker while strangers connect, and waits until all nodes have joined."""
            end_s = time.monotonic() + LIMIT_S
            command = ["bash", ROOT / "run_worker.sh", "--log-dir", logs]
            with crowds([service], 10**9, seed + 1):
                worker = _started(work / "worker.txt", *command, **variables)
                nodes[work / "worker.txt"] = stack.enter_context(worker)
                while waiting.exists() and time.monotonic() < end_s:
                    time.sleep(0.02)

        service = Place(name="master of pods", port=port)
        is_over = lambda: master.poll() is not None  # noqa: E731
        _talk([service], messages, limit_s, seed, result, is_over, join)
        for log, node in nodes.items():
            if status := node.wait(LIMIT_S):
                result["ends"].append(f"{log.stem}: status {status}: {tail(log, 2000)}")
        lines = 1 + int(time.monotonic() - begun_s) // 60
        result["effects"] += _complaints(said.read_text(), lines)


def _doctor(folder: Path, messages: int, limit_s: float, seed: int, result: dict[str, Any]) -> None:
    """Lets clients without the secret connect to ``doctor``, which waits for a node to start.

    Then starts this node.

    The parameters are those of :func:`_talk`. The log is written to ``folder``.
    """
    secret, port, log = new_secret(), free_port(), folder / "doctor.txt"
    command = [sys.executable, "-m", "megatron.adaptive", "doctor", "--master-addr", "127.0.0.1"]
    command += ["--master-port", str(port), "--timeout", "3000", "--json"]
    with _started(log, *command, MEGATRON_ADAPTIVE_SECRET=secret) as doctor:
        wait_until(lambda: _is_open(port) or doctor.poll() is not None, log.read_text, LIMIT_S)

        def come() -> None:
            for check in check_way("127.0.0.1", port, LIMIT_S, secret):
                if check.state == "error":
                    result["ends"].append(f"doctor: {check.text}")

        service = Place(name="doctor", port=port)
        _talk([service], messages, limit_s, seed, result, lambda: doctor.poll() is not None, come)
        # Ignore the exit status of ``doctor``, because it depends on the machine.
        doctor.wait(LIMIT_S)
        said = log.read_text()
        result["effects"] += _complaints(said, 0)
        if "and this node can reach each other" not in said:
            result["ends"].append(f"doctor: {said[-500:]}")


def _ranks(kind: str, messages: int, limit_s: float, seed: int, result: dict[str, Any]) -> None:
    """Lets clients without the secret connect to a rank that waits for its peer.

    Then starts the peer.

    The ranks connect with the transport ``kind``. The other parameters are those of :func:`_talk`.
    """
    if kind == "shm" and os.geteuid() != 0:
        return
    module, token = extension.require("this part"), os.urandom(16)
    low, high = (module.Node(rank, token, 1, 2) for rank in range(2))
    former = set(_unix_names(socket.SOCK_STREAM, [os.getpid()]))
    address = high.listen("unix") if kind == "shm" else high.listen("tcp", "127.0.0.1")
    service = Place(name=f"ranks over {kind}", says=hellos)
    if kind == "shm":
        (unix,) = {*_unix_names(socket.SOCK_STREAM, [os.getpid()])} - former
        service = dataclasses.replace(service, unix=unix)
    else:
        service = dataclasses.replace(service, port=int(address.rpartition(":")[2]))
    options = {"slot_bytes": 4096, "slots": 8}
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(high.open, kind, 0, "", limit_s + LIMIT_S, **options)

        def come() -> None:
            try:
                low.open(kind, 1, address, LIMIT_S, **options)
                waiting.result(LIMIT_S)
            except Exception as error:
                result["ends"].append(f"ranks over {kind}: {error}")

        _talk([service], messages, limit_s, seed, result, waiting.done, come)
        closing = [pool.submit(transport.close, 10.0) for transport in (low, high)]
        for transport in closing:
            transport.result(LIMIT_S)


def _is_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False
