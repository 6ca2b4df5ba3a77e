"""Measures the manager of a thousand nodes, which join at the same time and are lost gradually.

::

    benchmark ─┬─ manager      like a user's manager, without a node
               ├─ agents       hundreds in one process: real sockets and messages, no ranks
               ├─ agents
               └─ status       python -m megatron.adaptive train elastic --status, every few seconds

An agent does everything that the agent of a node does, but its ranks are simulated: they start and
exit immediately. Half of the lost agents close their connection, as if they had been killed. The
other half stop sending, like machines that lose power.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from harness.processes import run_module
from harness.report import Result, Row
from megatron.adaptive.checkpoint.snapshot_keeper import SnapshotKeeper
from megatron.adaptive.cluster.agent import Agent
from megatron.adaptive.cluster.connection import SILENCE_S
from megatron.adaptive.cluster.incarnation import JobSpec, NodeWork
from megatron.adaptive.cluster.layout_rule import Chooser
from megatron.adaptive.cluster.manager import Manager
from megatron.adaptive.cluster.membership import allow_files
from tests.cluster.jobs import environment
from tests.multiprocess.launch import ROOT

LAYERS = 8
FLAGS = (
    f"--num-layers {LAYERS} --hidden-size 32 --num-attention-heads 4 --seq-length 16"
    " --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 1000 --lr 1e-2"
    " --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 63 --mock-data --train-iters 9999"
    f" --save-interval 10 --pipeline-model-parallel-size {LAYERS}"
).split()
PROCESSES = 2
LIMIT_S = 120.0
GOAL_JOINED_S, GOAL_LATE_S, GOAL_CORES, GOAL_GB, GOAL_STATUS_S = 20.0, 2.0, 0.5, 1.0, 2.0
LOST = re.compile(r"node (n\d+) is lost")
STATUS_EVERY_S = 5.0


def measure(
    agents: int, minutes: float, every_s: float, folder: Path, seed: int, *, silent: bool = True
) -> Result:
    """Starts agents, and then loses one percent of them at regular intervals.

    Args:
        agents: Number of agents.
        minutes: Time in minutes during which agents are lost.
        every_s: Time between two losses, in seconds.
        folder: Empty folder for the job.
        seed: Seed for choosing the lost agents.
        silent: Whether half of the lost agents only stop sending, which the manager detects after a
            timeout. All other lost agents close the connection.
    """
    draw = random.Random(seed)
    checkpoints = folder / "checkpoints"
    manager = _Program("manager", checkpoints, agents)
    clients: list[_Program] = []
    try:
        share = [agents * index // PROCESSES for index in range(PROCESSES + 1)]
        for first, end in itertools.pairwise(share):
            clients.append(_Program("agents", checkpoints, first, end))
        for client in clients:
            client.until(r'"ready"')
        process = psutil.Process(manager.process.pid)
        begun_s, used_s = time.monotonic(), sum(process.cpu_times()[:2])
        for client in clients:
            client.order(join=True)
        joined = [json.loads(client.until(r'"joined"'))["joined"] for client in clients]
        joined_s = max(joined) - begun_s
        started = manager.until(r"epoch 1 \(start\)")
        while not (checkpoints / "elastic" / "state.json").exists():
            time.sleep(0.1)  # The manager writes its state every two seconds.
        lost: dict[str, tuple[float, bool]] = {}
        present = [f"n{number}" for number in range(agents)]
        answers_s: list[float] = []
        peak_bytes = 0
        end_s = (next_s := time.monotonic()) + 60 * minutes
        status_s = next_s
        while time.monotonic() < end_s:
            if time.monotonic() >= next_s:
                next_s += every_s
                for index, name in enumerate(draw.sample(present, max(2, agents // 100))):
                    present.remove(name)
                    is_silent = silent and bool(index % 2)
                    lost[name] = time.monotonic(), is_silent
                    for client in clients:
                        client.order(**{"silence" if is_silent else "cut": name})
            if time.monotonic() >= status_s:
                status_s = time.monotonic() + STATUS_EVERY_S
                answers_s.append(_status_s(checkpoints))
            peak_bytes = max(peak_bytes, process.memory_info().rss)
            time.sleep(0.05)
        noticed_s = manager.found_all(LOST, len(lost), SILENCE_S + 10.0)
        cores = (sum(process.cpu_times()[:2]) - used_s) / (time.monotonic() - begun_s)
        morphs = sum(" epoch " in line for _, line in manager.lines) - 1
        manager.process.send_signal(signal.SIGTERM)
        manager.process.wait(LIMIT_S)
    finally:
        for program in (*clients, manager):
            program.close()
    unknown = [name for name in lost if name not in noticed_s]
    late_s = [
        noticed_s[name] - at_s - (SILENCE_S if is_silent else 0.0)
        for name, (at_s, is_silent) in lost.items()
        if name in noticed_s
    ]
    peak = peak_bytes / 1e9
    rows = [
        Row(
            what=f"{agents} nodes that join together: time until all have joined",
            value=joined_s,
            unit="s",
            goal=GOAL_JOINED_S,
            note=f"they had their orders {started - begun_s:.1f} s after their start",
        ),
        Row(
            what="time from the limit until the manager detects a lost node",
            value=max(late_s) if late_s and not unknown else None,
            unit="s",
            goal=GOAL_LATE_S,
            note=f"the latest of {len(lost)}, half of them silent ({SILENCE_S:g} s)"
            + (f"; {len(unknown)} were never detected" if unknown else ""),
        ),
        Row(
            what="the manager's processor time",
            value=cores,
            unit="cores",
            goal=GOAL_CORES,
            note=f"{morphs} morphs of the whole job in {minutes:g} min",
        ),
        Row(what="the manager's memory", value=peak, unit="GB", goal=GOAL_GB),
        Row(
            what="time until the manager reports its status",
            value=max(answers_s),
            unit="s",
            goal=GOAL_STATUS_S,
            note=f"the slowest of {len(answers_s)}, median {statistics.median(answers_s):.2f} s",
        ),
    ]
    facts = {"control plane": {"late_s": late_s, "status_s": answers_s, "morphs": morphs}}
    return Result(rows=rows, facts=facts)


def _status_s(checkpoints: Path) -> float:
    """Runs ``train elastic --status`` on ``checkpoints``, and returns its duration in seconds.

    Raises an error if the printed status is older than ten seconds or lists no machines.
    """
    arguments = ["train", "elastic", "--status", checkpoints, "--json"]
    begun_s = time.monotonic()
    state = run_module("megatron.adaptive", *arguments, limit_s=LIMIT_S)
    took_s = time.monotonic() - begun_s
    age_s = time.time() - state["unix_ns"] / 1e9
    if age_s > 10.0 or not state["machines"]:
        raise RuntimeError(f"the state of the job is {age_s:.0f} s old")
    return took_s


class _Program:
    """Runs this file as a process, and stores each output line with its arrival time."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            [sys.executable, __file__, *map(str, arguments)],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line))

    def order(self, **values: object) -> None:
        """Sends ``values`` to the process as a line of JSON."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(values) + "\n")
        self.process.stdin.flush()

    def until(self, pattern: str, limit_s: float = LIMIT_S) -> Any:
        """Waits for an output line that matches ``pattern``.

        Returns the line if it is JSON, or the arrival time of the line otherwise. Fails after
        ``limit_s`` seconds.
        """
        end_s = time.monotonic() + limit_s
        is_over = False
        while not is_over:
            is_over = not self._reader.is_alive() or time.monotonic() > end_s
            for at_s, line in self.lines:
                if re.search(pattern, line):
                    return line if line.startswith("{") else at_s
            time.sleep(0.02)
        said = "".join(line for _, line in self.lines[-3:])
        raise RuntimeError(f"{self.arguments[0]} printed no {pattern} within {limit_s:g} s: {said}")

    def found_all(self, pattern: re.Pattern[str], count: int, limit_s: float) -> dict[str, float]:
        """Waits until the output contains ``count`` matches of ``pattern``.

        Returns the arrival time of each match in seconds, keyed by the name in the match. After
        ``limit_s`` seconds, returns the matches that were found so far.
        """
        times: dict[str, float] = {}
        end_s = time.monotonic() + limit_s
        while len(times) < count and time.monotonic() < end_s:
            times = {m[1]: time_s for time_s, line in self.lines for m in pattern.finditer(line)}
            time.sleep(0.1)
        return times

    def close(self) -> None:
        """Kills the process, and closes the pipes to it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def manage(checkpoints: Path, nodes: int) -> None:
    """Runs the manager of a job with ``nodes`` nodes, which saves to ``checkpoints``."""
    spec = JobSpec(
        script=ROOT / "pretrain_gpt.py",
        arguments=(*FLAGS, "--save", str(checkpoints)),
        checkpoints=checkpoints,
        nodes=nodes,
        join_s=LIMIT_S,
        address="127.0.0.1",
    )
    sys.exit(asyncio.run(Manager(spec, Chooser()).run()))


class LightAgent(Agent):
    """Agent of a node that only records which ranks the manager starts, and does not run any."""

    def __init__(
        self, *, name: str, owner: dict[str, Any], work: NodeWork, keeper: SnapshotKeeper
    ) -> None:
        endpoint = {key: owner[key] for key in ("address", "port", "secret")}
        super().__init__(name=name, slots=1, work=work, keeper=keeper, **endpoint)
        self._ranks: set[str] = set()
        self.is_silent = False
        self.joined = asyncio.Event()

    async def _start_forkserver(self) -> Any:
        self._orders = _Nothing()  # type: ignore[assignment]
        assert self._link is not None
        self._link.send("ready")
        self.joined.set()
        return _Nothing()

    def _order(self, **order: Any) -> None:
        if self.is_silent or self._link is None:
            return
        if "start" in order:
            self._ranks.add(order["start"]["key"])
        else:
            status = 0 if order["signal"] == signal.SIGUSR1 else -order["signal"]
            for key in self._ranks:
                self._link.send("ended", key=key, status=status)
            self._ranks.clear()

    def lose(self, *, silently: bool) -> None:
        """Makes the manager lose this agent.

        Args:
            silently: Whether to keep the connection open and only stop the heartbeats. Otherwise,
                the connection is closed.
        """
        self.is_silent = True
        assert self._link is not None
        if silently:
            assert self._link._beating is not None
            self._link._beating.cancel()
        else:
            self._link._writer.transport.abort()


class _Nothing:
    """Placeholder for an exited process, and also for the standard input of that process."""

    returncode = 0

    async def wait(self) -> int:
        return 0

    def close(self) -> None:
        pass


async def attend(checkpoints: Path, first: int, end: int) -> None:
    """Runs agents ``first`` to ``end - 1`` of the job that saves to ``checkpoints``.

    A first line on standard input makes the agents join the job. Each following line is a JSON
    object that names agents that must stop sending or close their connection.
    """
    allow_files(1 << 16)
    owner: dict[str, Any] = {}
    parent = os.getppid()
    while "port" not in owner:
        await asyncio.sleep(0.1)
        if os.getppid() != parent:
            return
        for path in (checkpoints / ".lease").glob("private-*.json"):
            owner = json.loads(path.read_text())
    keeper = SnapshotKeeper("127.0.0.1")
    work = NodeWork(script="", arguments=(), checkpoints=str(checkpoints))
    agents = {
        f"n{index}": LightAgent(name=f"n{index}", owner=owner, work=work, keeper=keeper)
        for index in range(first, end)
    }
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    _print(ready=True)
    if not await reader.readline():
        return
    serving = [asyncio.create_task(agent.run()) for agent in agents.values()]
    try:
        joined = asyncio.gather(*(agent.joined.wait() for agent in agents.values()))
        done, _ = await asyncio.wait([joined, *serving], return_when=asyncio.FIRST_COMPLETED)
        for finished in done:
            await finished  # This raises an error if the manager rejected the agent.
        _print(joined=time.monotonic())
        async for line in reader:
            for event, name in json.loads(line).items():
                if name in agents:
                    agents[name].lose(silently=event == "silence")
    finally:
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


def _print(**values: object) -> None:
    print(json.dumps(values), flush=True)


def main(arguments: Sequence[str]) -> None:
    """Runs the manager or the agents, depending on the first of ``arguments``."""
    checkpoints = Path(arguments[1])
    if arguments[0] == "manager":
        manage(checkpoints, int(arguments[2]))
    else:
        asyncio.run(attend(checkpoints, int(arguments[2]), int(arguments[3])))


if __name__ == "__main__":
    main(sys.argv[1:])
