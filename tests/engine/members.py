"""Runs one member of a decision group, a group of processes that share a pipeline rank.

The tests start this program with torchrun: ``members.py PROGRAM ARGUMENT FOLDER``. ``PROGRAM`` is
the name of a function, whose result is written to ``FOLDER/RANK.json``. ``ARGUMENT`` is a kind of
channel, ``message`` or ``memory``. For functions that test stopping, it contains the time limit of
each rank in minutes, such as ``30,0``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive import extension
from megatron.adaptive.engine.agreement import Agreement, connect
from megatron.adaptive.engine.decision_channel import Reader, Writer, make_channels
from megatron.adaptive.engine.executor import Executor
from megatron.adaptive.engine.schedule_record import Recording, RecordShape, ScheduleRecord
from megatron.adaptive.engine.stop import StopRequest
from megatron.adaptive.errors import PeerLostError
from megatron.adaptive.schedule import runtime_rules
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.catalog import make_schedule
from megatron.adaptive.schedule.policy import Follow, Policy, RulePolicy
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.transport.interface import Arrival, CompletionQueue, Label
from tests.engine import loopback
from tests.engine.loopback import Loopback, Writing
from tests.transport.contract_rank import error_of

WATCHDOG_S = 60.0
MICROBATCHES = 8
# Each chunk gets its forward inputs from the other rank, and each chunk except the last also gets
# backward inputs. The tests simulate the other rank.
PLACEMENT = Placement(num_ranks=2, num_chunks=3)
PP_RANK = 1
ADAPTIVE = RulePolicy("adaptive", runtime_rules.ready_first)


def inputs(step: int, seed: int) -> list[Arrival]:
    """Returns all inputs of the pipeline rank in step ``step``, shuffled with ``seed``."""
    actions = []
    for chunk in range(PLACEMENT.num_chunks):
        for kind in (ActionKind.F, ActionKind.B):
            if kind is ActionKind.B and PLACEMENT.target_of(ActionKind.F, PP_RANK, chunk) is None:
                continue
            actions += [Action(kind, chunk, number) for number in range(MICROBATCHES)]
    random.Random(seed).shuffle(actions)
    return [arrival(step, action) for action in actions]


def arrival(step: int, action: Action) -> Arrival:
    return loopback.arrival(Label(step, action), 0, torch.zeros(1))


def describe(rank: int) -> str:
    return f"rank {rank} (stage 1)"


def make_executor(transport: Loopback, agreement: Agreement, timeout_s: float = 20.0) -> Executor:
    return Executor(
        placement=PLACEMENT,
        pp_rank=PP_RANK,
        transport=transport,
        agreement=agreement,
        timeout_s=timeout_s,
    )


def run_step(executor: Executor, policy: Policy, stages: Writing, weight_pieces: int = 0) -> None:
    state = RankState(
        placement=PLACEMENT,
        rank=PP_RANK,
        num_microbatches=MICROBATCHES,
        weight_pieces=weight_pieces,
    )
    executor.run(stages, policy, state)


class Member:
    """Represents this process in the group of processes that share a pipeline rank."""

    def __init__(self, argument: str, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.ranks = list(range(size))
        self.argument = argument
        self.group = dist.new_group(self.ranks, backend="gloo")
        self.module = extension.require("this test") if argument == "memory" else None
        self.made: list[Any] = []
        # Messages that are sent with this transport are dropped.
        self.transport = Loopback(-1, {-1: CompletionQueue()})

    def stop_request(self) -> StopRequest:
        return StopRequest(float(self.argument.split(",")[self.rank]))

    def agreement(self) -> Agreement:
        queue = self.transport.completions
        return connect(self.group, self.ranks, self.rank, queue, 20.0, describe, self.module)

    def channels(self) -> tuple[Writer, list[Reader]]:
        """Opens channels, and returns the writer and the readers. They stay open until exit."""
        writer, readers = make_channels(self.group, self.ranks, self.rank, describe, self.module)
        self.made.append((writer, readers))
        return writer, [*readers.values()]


def agree(member: Member) -> dict[str, Any]:
    """Gives each member its inputs in a different order, and returns the actions that it ran.

    The last member gets its inputs more slowly than the others.

    Backward passes are not split in steps 0 and 1, but are split in steps 2 and 3. Steps 4 and 5
    use a static order.
    """
    agreement = member.agreement()
    arrived_ns: dict[str, int] = {}
    started_ns: dict[str, int] = {}
    taken: list[list[str]] = []
    static = make_schedule("gpipe", PLACEMENT, MICROBATCHES).orders[PP_RANK]
    policies: list[Policy] = [ADAPTIVE] * 4 + [Follow(static, "gpipe")] * 2

    def feed() -> None:
        for step in range(len(policies)):
            for message in inputs(step, 10 * member.rank + step):
                if member.rank == member.size - 1:
                    time.sleep(0.001)
                arrived_ns[f"{step}:{message.label.action}"] = time.monotonic_ns()
                member.transport.completions.put(message)

    def when_run(action: Action) -> None:
        started_ns[f"{len(taken)}:{action}"] = time.monotonic_ns()

    dist.barrier()
    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    executor = make_executor(member.transport, agreement)
    for step, policy in enumerate(policies):
        stages = Writing(when_run)
        run_step(executor, policy, stages, weight_pieces=3 * (step in (2, 3)))
        taken.append(stages.actions)
    feeder.join(WATCHDOG_S)
    shared_words = words_of(agreement)
    agreement.close()
    return {
        "taken": taken,
        "arrived": arrived_ns,
        "started": started_ns,
        "static": [str(action) for action in static],
        "words": shared_words,
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }


def words_of(agreement: Any) -> int | None:
    """Returns how many numbers have been sent through the decision channel of ``agreement``.

    Returns ``None`` if the kind of channel does not count them.
    """
    log = getattr(agreement._decisions, "_log", None)
    return None if log is None else getattr(log, "published", None) or log.position


def lacking(member: Member) -> list[str]:
    """Runs a step in which a follower lacks one input, and returns this member's error."""
    agreement = member.agreement()
    for message in inputs(0, 0):
        if member.rank == 0 or str(message.label.action) != "F0-1":
            member.transport.completions.put(message)
    timeout_s = 0.5 if member.rank == 0 else 1.0
    executor = make_executor(member.transport, agreement, timeout_s)
    return error_of(lambda: run_step(executor, ADAPTIVE, Writing()))


def broken(member: Member) -> list[str]:
    """Runs a step in which the last follower loses a connection, and returns this rank's error."""
    agreement = member.agreement()
    executor = make_executor(member.transport, agreement)
    if member.rank == member.size - 1:
        error = PeerLostError("the connection to rank 9 broke")
        threading.Timer(0.3, member.transport.completions.put, [error]).start()
    started = time.monotonic()
    text = error_of(lambda: run_step(executor, ADAPTIVE, Writing()))
    return [*text, "soon" if time.monotonic() - started < 10 else "late"]


def many(member: Member) -> dict[str, Any]:
    """Sends more values than fit into a channel to two readers that differ in speed.

    Returns the values that were read, and the error of waiting for a value that is never sent.
    """
    values = [number * number << 20 | number for number in range(600)]
    writer, readers = member.channels()
    if member.rank == 0:
        for value in values:
            writer.publish(value, 20.0)
        writer.close()
        for other in readers:
            other.close()
        member.channels()
        dist.barrier()
        return {"read": values, "error": []}
    (reader,) = readers
    read = []
    while (value := reader.next(20.0)) is not None:
        read.append(value)
        if member.rank == 2 and value % 8 == 0:
            time.sleep(0.001)
    reader.close()
    writer.close()
    _, (silent,) = member.channels()
    error = error_of(lambda: silent.next(0.2))
    dist.barrier()
    return {"read": read, "error": error}


def deaf(member: Member) -> list[str]:
    """Sends values to a reader that does not read them, and returns the error of the writer."""
    writer, _ = member.channels()
    if member.rank == 0:
        text = error_of(lambda: [writer.publish(number, 0.2) for number in range(1000)])
        dist.barrier()
        return text
    dist.barrier()
    return []


def record(member: Member) -> dict[str, Any]:
    """Records the orders of actions on two pipeline ranks, and returns the content of the file.

    A third rank writes the file, but has no order of its own.
    """
    folder, group = Path(sys.argv[3]), dist.group.WORLD
    path = folder / "schedule.json"
    shape = RecordShape(ranks=2, chunks=1, placement="loop", weight_pieces=0)
    pp_rank = member.rank - 1 if member.rank else None

    def recording(after_step: int) -> Recording:
        return Recording(
            path, shape, order_index=pp_rank, is_writer=member.rank == 0, after_step=after_step
        )

    orders = [(0, 0, 1, 1), (0, 1, 0, 1)]
    first = recording(0)
    for step in (1, 2, 3):
        first.append(step, orders[member.rank - 1])
        if step != 2:
            first.write(group)
    again = recording(2)
    again.append(4, orders[0])
    again.write(group)
    dist.barrier()
    loaded = ScheduleRecord.load(path)
    return {
        "steps": loaded.steps,
        "codes": [[loaded.codes(step, rank, 2) for rank in range(2)] for step in loaded.steps],
        "pending": len(first._pending) + len(again._pending),
    }


def run(member: Member) -> Any:
    """Asks in each iteration whether to stop, on ranks that differ in speed.

    The ranks synchronize only in ``StopRequest.agreed``. Returns the last iteration and the reason.

    If none of the time limits is 0, the last rank gets a signal in its fourth iteration.
    """
    rng = random.Random(member.rank)
    with member.stop_request() as stop:
        for iteration in range(100_000):
            if stop.agreed(dist.group.WORLD):
                return [iteration, stop.reason]
            if iteration == 3 and member.rank == 2 and "0" not in member.argument.split(","):
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.02 * rng.random() * member.rank)
    return None


def lost(member: Member) -> Any:
    """Ends all ranks except rank 0, which continues to ask whether a stop was requested.

    Returns the error that rank 0 gets.
    """
    with member.stop_request() as stop:
        for _ in range(4):
            stop.agreed(dist.group.WORLD)
        if member.rank:
            return None
        return error_of(lambda: [stop.agreed(dist.group.WORLD) for _ in range(10_000)])


def late(member: Member) -> Any:
    """Checks that rank 0 does not wait for ranks that have not yet asked whether to stop."""
    folder, seen = Path(sys.argv[3]), []

    def await_mark(name: str) -> None:
        while not (folder / name).exists():
            time.sleep(0.01)

    with member.stop_request() as stop:
        for iteration in range(3):
            if member.rank == 1:
                await_mark(f"asked{iteration}.0")
            seen.append(stop.agreed(dist.group.WORLD))
            (folder / f"asked{iteration}.{member.rank}").touch()
            if member.rank == 0:
                await_mark(f"asked{iteration}.1")
        return [*seen, stop.finish(), stop.reason]


def last(member: Member) -> Any:
    """Requests a stop in the last iteration, so that only ``finish`` can report the request."""
    with member.stop_request() as stop:
        if member.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        seen = [stop.agreed(dist.group.WORLD), stop.reason]
        dist.barrier()
        return [*seen, stop.finish(), stop.finish(), stop.reason]


PROGRAMS: dict[str, Callable[[Member], Any]] = {
    program.__name__: program
    for program in (agree, lacking, broken, many, deaf, record, run, lost, late, last)
}


def main() -> None:
    program, argument, folder = sys.argv[1:]
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    member = Member(argument, dist.get_rank(), dist.get_world_size())
    result = PROGRAMS[program](member)
    (Path(folder) / f"{member.rank}.json").write_text(json.dumps(result))
    # Two of the programs end a process early, so the other processes must not wait for it.
    if program not in ("broken", "lost"):
        dist.barrier()
    # A receive that timed out breaks connections of gloo. Therefore, exit without closing the
    # process group.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
