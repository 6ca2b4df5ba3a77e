"""Copies a rank's state into memory that outlives it, while training goes on.

::

    step 7 ── settle: copy of 6 kept everywhere? ── take 7 ── forward, backward ── update ── settle
                                                       └── copying 7 ─────────────┘
                                                           keeper sends 7 ...................┘

The state changes in the optimizer's update alone, so that what was taken at the end of a step is
copied behind the next forward and backward. A step counts once the copy of the step before is whole
on every node: at whatever moment ranks are lost, all others have the same step, at most one back.
The keeper of the node's agent (``megatron.adaptive.elastic.keeper``) holds and sends the copies.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron.adaptive.training import checkpoint_state as state
from megatron.adaptive.training.checkpoint import Checkpoints, Progress
from megatron.adaptive.training.checkpoint_exchange import common_bytes
from megatron.adaptive.training.copy_file import SLOTS, CopyFile, available_bytes
from megatron.adaptive.training.copy_plan import RankParts, make_plan, why_not, within_slot
from megatron.adaptive.training.logging import TrainingLog
from megatron.adaptive.training.setup import Run
from megatron.adaptive.training.step import gather_parameters

__all__ = ["CopySettings", "NoCopies", "StateCopies", "make_copies"]

_KEPT_S = 60.0
_ROOM_BYTES = 1 << 16  # for what may grow in the part besides tensors
_MIB = 1024**2
# What layers of Transformer Engine keep for 8-bit types, which this trainer does not have.
_SCRATCH = "_extra_state"
_MESSAGE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class CopySettings:
    """What the node's agent tells its ranks.

    Attributes:
        address: of the keeper, an abstract local socket.
        run: name of these ranks' start.
        node: that they run on.
        domain: what is lost at once, see ``copy_plan``.
        buddy: the node that keeps copies for this one.
        every: iterations from one copy to the next.
        limit_bytes: that copies may take on a node.
    """

    address: str
    run: str
    node: str
    domain: str
    buddy: str | None
    every: int
    limit_bytes: int | None

    @classmethod
    def read(cls, text: str) -> CopySettings:
        """Read what stands in the environment."""
        return cls(**json.loads(text))


@dataclass(kw_only=True)
class _Target:
    """A tensor and its places in the slots."""

    source: torch.Tensor
    slots: list[torch.Tensor]


def make_copies(run: Run, log: TrainingLog) -> NoCopies:
    """Return what copies the run's state, if the node's agent keeps copies."""
    told = run.job.environment.copies
    return NoCopies() if told is None else StateCopies(run, CopySettings.read(told), log)


class NoCopies:
    """Copies nothing."""

    def settle(self, iteration: int) -> None:
        """Wait until the copy before is kept everywhere; call it before a step counts.

        Args:
            iteration: that was just done.
        """

    def take(self, progress: Progress) -> None:
        """Copy the state of now behind what comes next.

        Args:
            progress: how far the run has come.
        """

    def before_update(self) -> None:
        """Wait until the state may change."""

    def close(self) -> None:
        """Let copying come to its end. Idempotent."""


class StateCopies(NoCopies):
    """Copies one run's state at the end of its steps. Collective over all ranks.

    Args:
        run: the built run; another one needs another object.
        settings: how.
        log: where it is told.
    """

    def __init__(self, run: Run, settings: CopySettings, log: TrainingLog) -> None:
        self._run = run
        self._settings = settings
        self._log = log
        self._checkpoints = _whole(run)
        self._file: CopyFile | None = None
        self._socket: socket.socket | None = None
        self._targets: list[_Target] = []
        self._parts: list[Any] = []
        self._common: dict[str, Any] | None = None  # where tensors are copied from their places
        self._pool: ThreadPoolExecutor | None = None
        self._copying: Future[None] | None = None
        self._registered = 0
        self._stream: Any = None
        self._is_off = False
        self._failure = ""
        self._count = 0

    def settle(self, iteration: int) -> None:
        if self._is_off or self._copying is None or iteration % self._settings.every:
            return
        self.before_update()
        failure = self._failure or self._kept()
        flag = torch.tensor([int(bool(failure))])
        if self._run.job.config.world_size > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._run.job.control_group)
        self._copying = None
        if int(flag):
            told = next(filter(None, self._run.job.gather(failure)))
            self._turn_off(told)

    def take(self, progress: Progress) -> None:
        if self._is_off or progress.iteration % self._settings.every:
            return
        gather_parameters(self._run)
        if self._file is None:
            sharded, common = self._checkpoints.pieces(progress)
            self._begin(_parts(sharded), common, progress)
            if self._is_off:
                return
        elif self._common is None:
            sharded, common = self._checkpoints.pieces(progress)
            for target, (_, source) in zip(self._targets, self._tensors(sharded), strict=True):
                target.source = source
        else:
            common = self._common
            self._checkpoints.refresh(common, progress)
        slot, self._count = self._count % SLOTS, self._count + 1
        extra = self._extra(progress, common)
        assert self._pool is not None
        event = None
        if self._run.job.accelerator.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._copying = self._pool.submit(self._copy, slot, progress.iteration, extra, event)

    def before_update(self) -> None:
        if self._copying is not None:
            try:
                self._copying.result()
            except (OSError, RuntimeError, ValueError) as error:
                self._failure = self._failure or f"rank {self._run.job.rank}: {error}"

    def close(self) -> None:
        self.before_update()
        self._copying = None
        self._is_off = True
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._targets = []
        if self._registered:
            driver: Any = torch.cuda.cudart()
            driver.cudaHostUnregister(self._registered)
            self._registered = 0
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._file is not None:
            self._file.close()

    def _begin(self, sharded: dict[Any, Any], common: dict[str, Any], progress: Progress) -> None:
        """Agree on who copies what, and make room for it. Collective."""
        job, settings = self._run.job, self._settings
        extra_bytes = 2 * len(self._extra_of(progress, common)) + _ROOM_BYTES
        mine = RankParts(
            node=settings.node,
            domain=settings.domain,
            buddy=settings.buddy,
            machine=str(job.places[job.rank]["machine"]),
            available_bytes=available_bytes(),
            extra_bytes=extra_bytes,
            parts={part: _size(value) for part, value in sharded.items()},
        )
        gathered = job.gather((mine, time.time_ns()))
        told = [one for one, _ in gathered]
        plan = make_plan(told)
        why = why_not(plan, told, settings.limit_bytes)
        if why is not None:
            self._turn_off(why)
            return
        whole = [shard.data for shard in sharded.values() if shard.data.numel()]
        stays = state.lives_in_place(whole, self._run.chunks, self._run.optimizer)
        if all(job.gather(stays)):  # otherwise all ranks take the state apart at each step
            self._common = common
        self._parts = plan.copied_by(job.rank, mine)
        entries, at = [], 0
        for part in self._parts:
            value = sharded[part]
            entries.append(_entry(part, value, at, plan.need_of[part]))
            at += within_slot(_size(value))
        head = {
            "rank": job.rank,
            "extra_bytes": extra_bytes,
            "sent_bytes": plan.sent_bytes[job.rank],
            "tensor_bytes": plan.tensor_bytes[job.rank],
            "needs": [dataclasses.asdict(need) for need in plan.needs],
            "entries": entries,
            "has_common": state.has_parameters(self._run.optimizer),
            "manifest": dataclasses.asdict(self._checkpoints.manifest(progress)),
            "format": dataclasses.asdict(CheckpointingConfig("torch_dist", 1)),
        }
        try:
            self._open(json.dumps(head).encode(), gathered[0][1])
        except OSError as error:
            self._failure = f"rank {job.rank}: {error}"
        self._place([sharded[part].data for part in self._parts], entries)
        self._announce(sum(plan.sent_bytes), sum(plan.tensor_bytes))

    def _open(self, head: bytes, generation: int) -> None:
        """Make the file and hand it to the keeper."""
        self._file = CopyFile.create(head, whole=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_KEPT_S)
        self._socket.connect(f"\0{self._settings.address}")
        told = {
            "what": "store",
            "run": self._settings.run,
            "rank": self._run.job.rank,
            "generation": generation,
        }
        socket.send_fds(self._socket, [json.dumps(told).encode()], [self._file.descriptor])

    def _place(self, tensors: list[torch.Tensor], entries: list[dict[str, Any]]) -> None:
        """Lay tensors over the slots of the file."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="copies")
        if self._file is None:
            return
        memory = self._file.memory
        if self._run.job.accelerator.is_cuda:
            self._stream = torch.cuda.Stream()
            start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            # Else copies go through a buffer of the driver's, and hold the device up.
            driver: Any = torch.cuda.cudart()
            if int(driver.cudaHostRegister(start, len(memory), 0)) == 0:
                self._registered = start
        for tensor, entry in zip(tensors, entries, strict=True):
            slots = []
            for slot in range(SLOTS):
                at = self._file.tensors_offset(slot) + entry["at"]
                if tensor.numel():
                    flat = torch.frombuffer(
                        memory, dtype=tensor.dtype, count=tensor.numel(), offset=at
                    )
                else:
                    flat = torch.empty(0, dtype=tensor.dtype)
                slots.append(flat.view(tensor.shape))
            self._targets.append(_Target(source=tensor, slots=slots))

    def _tensors(self, sharded: dict[str, list[Any]]) -> Iterator[tuple[Any, torch.Tensor]]:
        found = _parts(sharded)
        for part in self._parts:
            yield part, found[part].data

    def _extra(self, progress: Progress, common: dict[str, Any]) -> bytes:
        extra = self._extra_of(progress, common)
        if self._file is not None and len(extra) > self._file.head["extra_bytes"]:
            self._failure = f"rank {self._run.job.rank}: {len(extra)} bytes besides tensors"
        return extra

    @staticmethod
    def _extra_of(progress: Progress, common: dict[str, Any]) -> bytes:
        content = common_bytes(common)
        told = {"progress": dataclasses.asdict(progress)}
        return json.dumps(told).encode() + b"\n" + content

    def _copy(self, slot: int, step: int, extra: bytes, event: Any) -> None:
        """Write a step into a slot; in a thread of its own."""
        if self._failure or self._file is None or self._socket is None:
            return
        file = self._file
        file.begin(slot, step)
        start = file.extra_offset(slot)
        file.memory[start : start + len(extra)] = extra
        with torch.no_grad():
            if event is None and self._targets:
                # One call: between many, the thread that trains would wait its turn many times.
                slots = [target.slots[slot] for target in self._targets]
                torch._foreach_copy_(slots, [target.source for target in self._targets])
            elif event is not None:
                with torch.cuda.stream(self._stream):
                    self._stream.wait_event(event)
                    for target in self._targets:
                        target.slots[slot].copy_(target.source, non_blocking=True)
                self._stream.synchronize()
        file.finish(slot, step, len(extra))
        self._socket.send(json.dumps({"what": "taken", "step": step, "slot": slot}).encode())

    def _kept(self) -> str:
        """Wait for the keeper to have a step kept; says what went wrong."""
        if self._socket is None:
            return ""
        rank = self._run.job.rank
        try:
            data = self._socket.recv(_MESSAGE)
        except TimeoutError:
            return f"rank {rank}: the node's agent does not answer within {_KEPT_S:g} s"
        except OSError as error:
            return f"rank {rank}: {error}"
        if not data:
            return f"rank {rank}: the node's agent does not keep copies"
        return str(json.loads(data).get("failed", ""))

    def _announce(self, sent: int, copied: int) -> None:
        every = "step" if self._settings.every == 1 else f"{self._settings.every} steps"
        kept = f"every {every} {copied / _MIB:.1f} MiB are copied and {sent / _MIB:.1f} MiB sent"
        self._log.tell(copies=kept)
        self._log.message(f"  copies of the state are kept in memory: {kept}")

    def _turn_off(self, why: str) -> None:
        self._is_off = True
        self._log.tell(copies=f"off: {why}")
        self._log.message(
            f"warning: no copies of the state are kept in memory: {why}; after a loss without"
            " notice training goes on from the last checkpoint"
        )


def _whole(run: Run) -> Checkpoints:
    """What takes the state apart, whatever the run's own checkpoints leave out."""
    config = run.job.config
    settings = dataclasses.replace(config.checkpoint, no_save_optim=False, no_save_rng=True)
    job = dataclasses.replace(run.job, config=dataclasses.replace(config, checkpoint=settings))
    return Checkpoints(job, run.chunks, run.optimizer, run.scheduler)


def _parts(sharded: dict[str, list[Any]]) -> dict[Any, Any]:
    """Return the shards by name and place."""
    found: dict[Any, Any] = {}
    for name, shards in sharded.items():
        for shard in shards:
            if isinstance(shard, ShardedObject):
                if shard.key.endswith(_SCRATCH):
                    continue
                raise TypeError(f"{name} is no tensor: copies of the state cannot hold it")
            found.setdefault((name, tuple(shard.global_offset)), shard)
    return found


def _size(shard: Any) -> int:
    return int(shard.data.numel() * shard.data.element_size())


def _entry(part: Any, shard: Any, at: int, need: int) -> dict[str, Any]:
    """What whoever restores a tensor must know."""
    name, offset = part
    return {
        "name": name,
        "offset": list(offset),
        "size": [1] * shard.prepend_axis_num + list(shard.local_shape),
        "whole": list(shard.global_shape),
        "type": str(shard.data.dtype).removeprefix("torch."),
        "at": at,
        "need": need,
    }
