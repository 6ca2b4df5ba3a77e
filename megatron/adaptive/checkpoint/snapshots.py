"""Takes snapshots of a rank's state in memory that outlives it, while training goes on.

::

    step 7 ── settle: snapshot of 6 kept everywhere? ── take 7 ── forward, backward ── update ── ...
                                                           └── copying 7 ─────────────┘
                                                               keeper sends 7 ...............┘

The state changes in the optimizer's update alone, so that what was taken at the end of a step is
copied behind the next forward and backward. A step counts once the snapshot of the step before is
whole on every node: at whatever moment ranks are lost, all others have the same step, at most one
back. The keeper of the node's agent (``checkpoint.snapshot_keeper``) holds and sends the snapshots.

The program that trains says what its state is made of: see :class:`SnapshotState`.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.accelerator import lock_pages
from megatron.adaptive.checkpoint.snapshot_keeper import ALIGN, SLOTS, SnapshotFile, slot_bytes
from megatron.adaptive.checkpoint.writer import Part, Piece, entry_of, overlay
from megatron.adaptive.config.input_files import parse_json
from megatron.adaptive.engine.process_context import Job
from megatron.adaptive.profiling.free_memory import available_host_bytes

_SHARE = 0.8  # of the memory that is left
_GIB = 1024**3
_KEPT_S = 60.0
_ROOM_BYTES = 1 << 16  # for what may grow in the part besides tensors
_MIB = 1024**2
_MESSAGE = 1 << 16
_FAILED, _CHANGED = 2, 1


@dataclass(frozen=True, kw_only=True)
class SnapshotSettings:
    """Configures snapshots, as the node's agent gives it to its ranks.

    Attributes:
        address: of the keeper, an abstract local socket.
        run: name of these ranks' start.
        node: that they run on.
        domain: that is lost at once, see :class:`RankParts`.
        buddy: the node that keeps snapshots for this one.
        every: iterations from one snapshot to the next.
        limit_bytes: that snapshots may take on a node.
    """

    address: str
    run: str
    node: str
    domain: str
    buddy: str | None
    every: int
    limit_bytes: int | None

    @classmethod
    def read(cls, text: str) -> SnapshotSettings:
        """Read the environment variable."""
        return cls(**parse_json(text))


class SnapshotState(ABC):
    """The state of a rank, as its program takes it apart."""

    @abstractmethod
    def take(self) -> tuple[Mapping[Part, Piece] | None, bytes]:
        """Return the tensors of now, ``None`` if all are where they were, and what belongs to them.

        Collective. What belongs to them has a line of JSON first.
        """

    @abstractmethod
    def head(self) -> Mapping[str, Any]:
        """Return what is so at every step and whoever restores it must know.

        At least ``has_common``, whether what all ranks have in common belongs to these tensors,
        and of the trainer ``manifest``, that of a checkpoint.
        """

    def is_changed(self) -> bool:
        """Return whether it has other pieces than when they were taken last."""
        return False


class NoSnapshots:
    """Takes no snapshots."""

    def settle(self, iteration: int) -> None:
        """Wait until the snapshot before is kept everywhere; call it before a step counts.

        Args:
            iteration: that was just done.
        """

    def take(self, iteration: int) -> None:
        """Copy the state of now behind what comes next.

        Args:
            iteration: that was done last.
        """

    def before_update(self) -> None:
        """Wait until the state may change."""

    def close(self) -> None:
        """Let copying come to its end. Idempotent."""


class Snapshots(NoSnapshots):
    """Takes snapshots of a state at the end of its steps. Collective over all ranks.

    Args:
        state: of this rank; another one needs another object.
        job: this process among the others.
        settings: how.
        report: takes what is kept, or why nothing is, for the progress file.
        say: takes the same for the user's log.
    """

    def __init__(
        self,
        state: SnapshotState,
        job: Job,
        settings: SnapshotSettings,
        report: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self._state = state
        self._job = job
        self._settings = settings
        self._report, self._say = report, say
        self._file: SnapshotFile | None = None
        self._socket: socket.socket | None = None
        self._sources: list[torch.Tensor] = []
        self._slots: list[list[torch.Tensor]] = [[] for _ in range(SLOTS)]  # places of each
        self._parts: list[Part] = []
        self._pool: ThreadPoolExecutor | None = None
        self._copying: Future[None] | None = None
        self._registered = 0
        self._stream: Any = None
        self._is_off = False
        self._is_outgrown = self._has_changed = False
        self._failure = ""
        self._count = 0

    def settle(self, iteration: int) -> None:
        if self._is_off or self._copying is None or iteration % self._settings.every:
            return
        self.before_update()
        failure = self._failure or ("" if self._is_outgrown else self._kept())
        changed = self._is_outgrown or self._state.is_changed()
        flag = torch.tensor([_FAILED if failure else _CHANGED if changed else 0])
        if len(self._job.places) > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._job.control_group)
        self._copying = None
        self._has_changed = int(flag) == _CHANGED
        if int(flag) == _FAILED:
            self._turn_off(next(filter(None, self._job.gather(failure))))

    def take(self, iteration: int) -> None:
        if self._is_off or iteration % self._settings.every:
            return
        if self._has_changed:
            self._release()
        pieces, extra = self._state.take()
        if self._pool is None:
            assert pieces is not None
            self._begin(pieces, len(extra))
            if self._is_off:
                return
        elif pieces is not None:
            self._sources = [pieces[part].tensor for part in self._parts]
        assert self._pool is not None
        if self._file is not None and len(extra) > self._file.head["extra_bytes"]:
            self._is_outgrown = True  # all make room anew at the next step
            self._copying = self._pool.submit(lambda: None)
            return
        slot, self._count = self._count % SLOTS, self._count + 1
        event = None
        if self._job.accelerator.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._copying = self._pool.submit(
            self._copy, slot, iteration, extra, event, self._versions()
        )

    def before_update(self) -> None:
        if self._copying is not None:
            try:
                self._copying.result()
            except (OSError, RuntimeError, ValueError) as error:
                self._failure = self._failure or f"rank {self._job.rank}: {error}"

    def close(self) -> None:
        self.before_update()
        self._copying = None
        self._is_off = True
        self._release()

    def _release(self) -> None:
        """Give up the file; its snapshots stay with the keeper until there are others."""
        self._is_outgrown = self._has_changed = False
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._sources, self._slots = [], [[] for _ in range(SLOTS)]
        if self._registered:
            driver: Any = torch.cuda.cudart()
            driver.cudaHostUnregister(self._registered)
            self._registered = 0
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self, pieces: Mapping[Part, Piece], extra_bytes: int) -> None:
        """Agree on who copies what, and make room for it. Collective."""
        job, settings = self._job, self._settings
        extra_bytes = 2 * extra_bytes + _ROOM_BYTES
        mine = RankParts(
            node=settings.node,
            domain=settings.domain,
            buddy=settings.buddy,
            machine=str(job.places[job.rank]["machine"]),
            available_bytes=available_host_bytes(),
            extra_bytes=extra_bytes,
            parts={part: piece.tensor.nbytes for part, piece in pieces.items()},
        )
        gathered = job.gather((mine, time.time_ns()))
        ranks = [one for one, _ in gathered]
        plan = make_plan(ranks)
        why = why_not(plan, ranks, settings.limit_bytes)
        if why is not None:
            self._turn_off(why)
            return
        self._parts = plan.copied_by(job.rank, mine)
        needs = {need: number for number, need in enumerate(dict.fromkeys(plan.needs.values()))}
        entries, at = [], 0
        for part in self._parts:
            place = {"at": at, "need": needs[plan.needs[part]]}
            entries.append(entry_of(part, pieces[part]) | place)
            at += _within_slot(pieces[part].tensor.nbytes)
        head = {
            "rank": job.rank,
            "extra_bytes": extra_bytes,
            "sent_bytes": plan.sent_bytes[job.rank],
            "tensor_bytes": plan.tensor_bytes[job.rank],
            "needs": [dataclasses.asdict(need) for need in needs],
            "entries": entries,
            **self._state.head(),
        }
        try:
            self._open(json.dumps(head).encode(), gathered[0][1])
        except OSError as error:
            self._failure = f"rank {job.rank}: {error}"
        self._place([pieces[part].tensor for part in self._parts], entries)
        self._announce(sum(plan.sent_bytes), sum(plan.tensor_bytes))

    def _open(self, head: bytes, generation: int) -> None:
        """Make the file and hand it to the keeper."""
        self._file = SnapshotFile.create(head, whole=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_KEPT_S)
        self._socket.connect(f"\0{self._settings.address}")
        message = {
            "what": "store",
            "run": self._settings.run,
            "rank": self._job.rank,
            "generation": generation,
        }
        socket.send_fds(self._socket, [json.dumps(message).encode()], [self._file.descriptor])

    def _place(self, tensors: list[torch.Tensor], entries: list[dict[str, Any]]) -> None:
        """Lay tensors over the slots of the file."""
        self._pool = ThreadPoolExecutor(
            1, "snapshots", initializer=self._job.accelerator.make_current
        )
        if self._file is None:
            return
        memory = self._file.memory
        if self._job.accelerator.is_cuda:
            self._stream = torch.cuda.Stream()
            start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            # Else copies go through a buffer of the driver's, and hold the device up.
            if lock_pages(start, len(memory), self._job.accelerator.device):
                self._registered = start
        for tensor, entry in zip(tensors, entries, strict=True):
            for slot in range(SLOTS):
                at = self._file.tensors_offset(slot) + entry["at"]
                self._slots[slot].append(overlay(memory, at, tensor.dtype, tensor.shape))
        self._sources = tensors

    def _versions(self) -> list[int]:
        """Return numbers that change with the tensors."""
        return [source._version for source in self._sources]

    def _copy(self, slot: int, step: int, extra: bytes, event: Any, versions: list[int]) -> None:
        """Write a step into a slot; in a thread of its own."""
        if self._failure or self._file is None or self._socket is None:
            return
        file = self._file
        file.begin(slot, step)
        start = file.extra_offset(slot)
        file.memory[start : start + len(extra)] = extra
        with torch.no_grad():
            if event is None and self._sources:
                # One call: between many, the thread that trains would wait its turn many times.
                torch._foreach_copy_(self._slots[slot], self._sources)
            elif event is not None:
                with torch.cuda.stream(self._stream):
                    self._stream.wait_event(event)
                    for place, source in zip(self._slots[slot], self._sources, strict=True):
                        place.copy_(source, non_blocking=True)
                self._stream.synchronize()
        if self._versions() != versions:
            raise ValueError(
                f"weights or optimizer state changed after step {step} and before the update of the"
                " next one, while they were copied: change them at the end of a step"
            )
        file.finish(slot, step, len(extra))
        self._socket.send(json.dumps({"what": "taken", "step": step, "slot": slot}).encode())

    def _kept(self) -> str:
        """Wait for the keeper to have a step kept; returns what went wrong."""
        if self._socket is None:
            return ""
        rank = self._job.rank
        try:
            data = self._socket.recv(_MESSAGE)
        except TimeoutError:
            return f"rank {rank}: the node's agent does not answer within {_KEPT_S:g} s"
        except OSError as error:
            return f"rank {rank}: {error}"
        if not data:
            return f"rank {rank}: the node's agent does not keep copies"
        return str(parse_json(data).get("failed", ""))

    def _announce(self, sent: int, copied: int) -> None:
        every = "step" if self._settings.every == 1 else f"{self._settings.every} steps"
        kept = f"every {every} {copied / _MIB:.1f} MiB are copied and {sent / _MIB:.1f} MiB sent"
        self._report(kept)
        self._say(f"  copies of the state are kept in memory: {kept}")

    def _turn_off(self, why: str) -> None:
        self._is_off = True
        self._report(f"off: {why}")
        self._say(
            f"warning: no copies of the state are kept in memory: {why}; after a loss without"
            " notice training goes on from the last checkpoint"
        )


def make_snapshots(
    job: Job,
    state: Callable[[], SnapshotState],
    report: Callable[[str], None],
    say: Callable[[str], None],
) -> NoSnapshots:
    """Return what takes snapshots of a rank's state, if the node's agent keeps them.

    Args:
        job: this process among the others.
        state: makes what takes the state apart; called at once, and only where it is needed.
        report, say: see :class:`Snapshots`.
    """
    settings = job.environment.copies
    if settings is None:
        return NoSnapshots()
    return Snapshots(state(), job, SnapshotSettings.read(settings), report, say)


@dataclass(frozen=True, kw_only=True)
class RankParts:
    """Describes one rank to the others.

    Attributes:
        node: that it runs on.
        domain: that is lost at once; a node, or the machine of several.
        buddy: the node that keeps snapshots for this one, ``None`` where there is no other.
        machine: whose memory its node uses.
        available_bytes: that the machine has left.
        extra_bytes: the most that it copies besides tensors.
        parts: size of each part of the state that it holds, in bytes.
    """

    node: str
    domain: str
    buddy: str | None
    machine: str
    available_bytes: int
    extra_bytes: int
    parts: dict[Part, int]


@dataclass(frozen=True, kw_only=True)
class Need:
    """Parts that the same ranks copy.

    Attributes:
        ranks: any of which is enough.
        is_sent: whether the one rank's copy is also with its buddy.
    """

    ranks: tuple[int, ...]
    is_sent: bool


@dataclass(frozen=True, kw_only=True)
class SnapshotPlan:
    """Says which rank copies which part, and what is sent to another node.

    A part that ranks of several nodes hold, as data-parallel replicas and tied embeddings do, is
    copied by one rank of each of these nodes and goes nowhere. A part of one node alone is copied
    there by one rank and sent to the node's buddy. All ranks draw the same plan.

    Attributes:
        needs: for each part who copies it.
        sent_bytes, tensor_bytes: of each rank: what it sends, and copies in all.
    """

    needs: dict[Part, Need] = field(default_factory=dict)
    sent_bytes: list[int] = field(default_factory=list)
    tensor_bytes: list[int] = field(default_factory=list)

    def copied_by(self, rank: int, own: RankParts) -> list[Part]:
        """Return the parts that a rank copies, those first that it sends."""
        mine = [part for part in own.parts if rank in self.needs[part].ranks]
        return sorted(mine, key=lambda part: (not self.needs[part].is_sent, part))


def _within_slot(size: int) -> int:
    """Return what a tensor takes in a slot, with the gap after it."""
    return -(-size // ALIGN) * ALIGN


def make_plan(ranks: Sequence[RankParts]) -> SnapshotPlan:
    """Share out the copying.

    Args:
        ranks: of each rank.
    """
    holders: dict[Part, list[int]] = {}
    sizes: dict[Part, int] = {}
    for rank, one in enumerate(ranks):
        for part, size in one.parts.items():
            holders.setdefault(part, []).append(rank)
            sizes[part] = size
    load = [0] * len(ranks)
    plan = SnapshotPlan()
    for part in sorted(holders, key=lambda part: (-sizes[part], part)):
        chosen: dict[str, int] = {}
        for rank in holders[part]:
            best = chosen.setdefault(ranks[rank].domain, rank)
            if load[rank] < load[best]:
                chosen[ranks[rank].domain] = rank
        copying = tuple(sorted(chosen.values()))
        for rank in copying:
            load[rank] += _within_slot(sizes[part])
        is_sent = len(copying) == 1 and ranks[copying[0]].buddy is not None
        plan.needs[part] = Need(ranks=copying, is_sent=is_sent)
    for rank, one in enumerate(ranks):
        copied = plan.copied_by(rank, one)
        sent = [part for part in copied if plan.needs[part].is_sent]
        plan.sent_bytes.append(sum(_within_slot(one.parts[part]) for part in sent))
        plan.tensor_bytes.append(sum(_within_slot(one.parts[part]) for part in copied))
    return plan


def why_not(plan: SnapshotPlan, ranks: Sequence[RankParts], limit_bytes: int | None) -> str | None:
    """Name the node that lacks the memory for its part of a plan, ``None`` where all have it.

    Args:
        plan: of all ranks.
        ranks: of each rank.
        limit_bytes: that snapshots may take on a node, ``None`` for what is there.
    """
    taken: dict[str, int] = defaultdict(int)
    for rank, one in enumerate(ranks):
        taken[one.node] += SLOTS * slot_bytes(one.extra_bytes, plan.tensor_bytes[rank])
        if plan.sent_bytes[rank] and one.buddy is not None:
            taken[one.buddy] += SLOTS * slot_bytes(one.extra_bytes, plan.sent_bytes[rank])
    for node, size in taken.items():
        if limit_bytes is not None and size > limit_bytes:
            return (
                f"they take {size / _GIB:.3g} GiB on node {node} and --replicate-memory lets them"
                f" take {limit_bytes / _GIB:.3g} GiB: raise it"
            )
    nodes = {one.node: one.machine for one in ranks}
    for one in ranks:
        size = sum(taken[node] for node, machine in nodes.items() if machine == one.machine)
        if size > _SHARE * one.available_bytes:
            return (
                f"they take {size / _GIB:.3g} GiB on the machine of node {one.node}, which has"
                f" {one.available_bytes / _GIB:.3g} GiB left and must keep a fifth of that: use"
                " more nodes, or less memory for other things"
            )
    return None
