"""Reads dumps of torch's flight recorder, and finds stuck calls and the ranks that block them.

torch writes a dump on each rank if ``TORCH_FR_BUFFER_SIZE`` is set and a NCCL collective takes too
long. The file name ends with ``trace_rank_`` and the rank, as in ``comm_lib_trace_rank_0`` or, in
older releases, ``nccl_trace_rank_0``. In jobs that use NVIDIA's resiliency extension (NVRx), it
ends with ``_dump_`` and the rank. A dump is a pickle, or JSON from ``_dump_fr_trace_json``.

A dump lists the latest collectives of each process group, numbered in the same way on all ranks of
the group. Messages (point-to-point calls) are numbered differently on each rank, so this module
matches the calls of each sender and receiver by their order. A pickle can run code when it is
loaded, so a pickle with anything but plain values is rejected.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron.adaptive.config.input_files import parse_json, printable, read_bytes
from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.read import describe_numbers

_FILE_NAME = re.compile(r"(?!core)(?:.*trace_rank|.*_dump)_(\d+)(\.json|\.pkl|\.pickle)?")
_VERSION = re.compile(r"2(\.\d+)*")
_LIBRARY = re.compile(r"/(torch|site-packages|dist-packages)/")
_PEERS = re.compile(r"(\d+)(->|<-)(\d+)")
_BATCH = "coalesced"
"""Suffix of the name of an entry that stands for a whole batch of messages.

Such an entry follows the entries of the batch's individual messages.
"""


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """Describes a rank's call of a collective, a send or a receive.

    Attributes:
        rank: Global rank.
        group: Name of the process group, with its description if it has one.
        number: Index of the collective, counted per process group, or index of the message, which
            each rank counts separately.
        name: Name of the operation, such as ``nccl:all_reduce``.
        sizes: Dtypes and shapes of the inputs as text, such as ``Float [3, 4]``.
        is_message: Whether the call is a send or a receive, that is, one end of a message between
            two ranks.
        has_ended: Whether the operation has finished on this rank.
        line_of_code: Line that made the call, as ``file:line in function``; empty if it was not
            recorded.
        created_ns: Time of the call in ns since 1970, or 0 if it was not recorded.
    """

    rank: int
    group: str
    number: int
    name: str
    sizes: str
    is_message: bool
    has_ended: bool
    line_of_code: str
    created_ns: int


@dataclass(frozen=True, kw_only=True)
class Dump:
    """Contains the communication calls of one rank, as dumped by torch's flight recorder.

    Attributes:
        rank: Global rank.
        calls: Calls in chronological order.
        members: Global ranks of each process group, keyed by the name of the group. Groups that
            the dump does not list are missing.
        begun: Index of the last collective that the rank called in each group, even if the entry
            of this collective was overwritten.
        is_whole: Whether the dump contains all calls of the rank. If not, the oldest ones were
            overwritten.
    """

    rank: int
    calls: tuple[RecordedCall, ...]
    members: Mapping[str, tuple[int, ...]]
    begun: Mapping[str, int]
    is_whole: bool


@dataclass(frozen=True, kw_only=True)
class StuckCall:
    """Describes a collective or message that does not finish.

    Attributes:
        call: Call in which the ranks wait, as recorded by the first waiting rank.
        waiting: Global ranks that are waiting in the call.
        late: Global ranks of the group that have not made the call yet.
        missing: Global ranks of the group that have not written a dump.
        mismatch: Text that lists the ranks that called a different operation at the same index, and
            which one; empty if all ranks called the same operation.
        is_entered: Whether all ranks have made the call, which means that the transfer itself is
            stuck.
    """

    call: RecordedCall
    waiting: tuple[int, ...]
    late: tuple[int, ...]
    missing: tuple[int, ...]
    mismatch: str
    is_entered: bool

    def format(self) -> str:
        """Returns the call as text, with the waiting ranks and those that did not make the call."""
        call = self.call
        kind = "message" if call.is_message else "collective"
        line_of_code = f", at {call.line_of_code}" if call.line_of_code else ""
        lines = [
            f"stuck: {kind} {call.number} of group {call.group}: {call.name} of {call.sizes}",
            f"  {_ranks(self.waiting)} {_verb(self.waiting, 'wait')} in this call{line_of_code}",
        ]
        if self.late:
            has = "has" if len(self.late) == 1 else "have"
            lines.append(f"  {_ranks(self.late)} {has} not made this call")
        if self.missing:
            lines.append(f"  no dump of {_ranks(self.missing)}")
        if self.mismatch:
            lines.append(f"  other ranks made a different call at this position: {self.mismatch}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class StuckCalls:
    """Describes a hang of a job, according to the dumps of its ranks.

    Attributes:
        ranks: Global ranks that have written a dump.
        stuck: Collectives and messages that do not finish.
        culprits: Global ranks for which the other ranks wait; empty if the dumps do not show them.
        text: Sentence that gives the reason for the hang.
        advice: Instruction on how to resolve the hang; empty if no call is stuck.
        notes: Caveats about the dumps.
    """

    ranks: tuple[int, ...]
    stuck: tuple[StuckCall, ...]
    culprits: tuple[int, ...]
    text: str
    advice: str
    notes: tuple[str, ...] = ()

    def format(self) -> str:
        """Returns the stuck calls, the reason and the advice as text."""
        count = len(self.stuck)
        lines = [
            f"flight recorder dumps of {len(self.ranks)} rank{'s' * (len(self.ranks) != 1)}: "
            f"{count or 'no'} stuck call{'s' * (count != 1)}",
            *(stuck.format() for stuck in self.stuck),
            self.text,
        ]
        if self.advice:
            lines.append(f"  do: {self.advice}")
        return "\n".join(printable(line, lines=True) for line in lines)

    def to_json(self) -> dict[str, Any]:
        """Returns the result as a dict for ``json.dumps``."""
        return asdict(self)


def dump_files(folder: Path | None) -> dict[int, Path]:
    """Maps each rank to the path of its dump in ``folder``.

    The dict is empty if there are no dumps.
    """
    if folder is None or not folder.is_dir():
        return {}
    matches = ((_FILE_NAME.fullmatch(path.name), path) for path in sorted(folder.iterdir()))
    return {int(match[1]): path for match, path in matches if match}


def read_dumps(folder: Path) -> list[Dump]:
    """Reads all dumps in ``folder``, and returns them in ascending order of rank.

    Raises:
        TraceError: A file is not a dump, is damaged, or has an unsupported version.
    """
    return [_read_dump(rank, path) for rank, path in sorted(dump_files(folder).items())]


def find_stuck(dumps: Sequence[Dump]) -> StuckCalls:
    """Finds unfinished collectives and messages in ``dumps``, and the ranks that block them."""
    by_rank = {dump.rank: dump for dump in dumps}
    pending: dict[tuple[str, tuple[int, ...], int], list[RecordedCall]] = {}
    for dump in dumps:
        first: dict[tuple[str, tuple[int, ...]], RecordedCall] = {}
        for call in dump.calls:
            if not call.has_ended:
                first.setdefault((call.group, _route(call, dump)), call)
        for (group, route), call in first.items():
            number = 0 if call.is_message else call.number
            pending.setdefault((group, route, number), []).append(call)
    stuck = [
        _message(calls, route, by_rank) if route else _collective(calls, by_rank)
        for (_, route, _), calls in pending.items()
    ]
    stuck.sort(key=lambda stuck: (stuck.call.created_ns, stuck.call.group))
    culprits, text, advice = _conclude(stuck)
    notes = [
        f"no dump of {_ranks(missing)}: the process may have exited, or torch did not write a dump"
        for missing in [sorted({rank for call in stuck for rank in call.missing})]
        if missing
    ]
    return StuckCalls(
        ranks=tuple(sorted(by_rank)),
        stuck=tuple(stuck),
        culprits=culprits,
        text=text,
        advice=advice,
        notes=tuple(notes),
    )


def _collective(calls: Sequence[RecordedCall], dumps: Mapping[int, Dump]) -> StuckCall:
    """Describes the collective to which the unfinished ``calls`` belong.

    ``dumps`` contains the dump of each rank.
    """
    call = calls[0]
    listed = {rank for dump in dumps.values() for rank in dump.members.get(call.group, ())}
    # torch does not list the members of gloo groups, so use the ranks that have used the group.
    members = sorted(listed or {rank for rank, dump in dumps.items() if call.group in dump.begun})
    waiting = tuple(sorted(other.rank for other in calls))
    with_dump = [rank for rank in members if rank in dumps and rank not in waiting]
    late = [rank for rank in with_dump if dumps[rank].begun.get(call.group, 0) < call.number]
    same = [
        other
        for rank in members
        if rank in dumps
        for other in dumps[rank].calls
        if (other.group, other.number, other.is_message) == (call.group, call.number, False)
    ]
    differ = [other for other in same if _signature(other) != _signature(call)]
    missing = tuple(rank for rank in members if rank not in dumps)
    return StuckCall(
        call=call,
        waiting=waiting,
        late=tuple(late),
        missing=missing,
        mismatch="; ".join(f"rank {o.rank} called {o.name} of {o.sizes}" for o in differ),
        is_entered=not (late or missing or differ),
    )


def _message(
    calls: Sequence[RecordedCall], route: tuple[int, ...], dumps: Mapping[int, Dump]
) -> StuckCall:
    """Describes the message to which the unfinished ``calls`` belong.

    Args:
        calls: Calls of the sender, of the receiver, or of both.
        route: Result of :func:`_route`: the global ranks of the sender and the receiver.
        dumps: Dump of each rank.
    """
    call = calls[0]
    waiting = tuple(sorted(other.rank for other in calls))
    late = tuple(
        end
        for end in route
        if end in dumps and end not in waiting and _is_late(end, call, route, dumps)
    )
    missing = tuple(end for end in route if end not in dumps)
    return StuckCall(
        call=call,
        waiting=waiting,
        late=late,
        missing=missing,
        mismatch="",
        is_entered=len(route) == 2 and not (late or missing),
    )


def _is_late(
    end: int, call: RecordedCall, route: tuple[int, ...], dumps: Mapping[int, Dump]
) -> bool:
    """Returns whether the rank ``end`` has yet to call its send or receive of a message.

    Args:
        end: Global rank of the sender or the receiver. All calls of this rank on the route have
            finished.
        call: Unfinished call of the other rank.
        route: Global ranks of the sender and the receiver.
        dumps: Dump of each rank.
    """
    waiting, silent = (
        [each for each in dump.calls if each.group == call.group and _route(each, dump) == route]
        for dump in (dumps[call.rank], dumps[end])
    )
    if dumps[call.rank].is_whole and dumps[end].is_whole:
        return len(silent) <= waiting.index(call)
    # All calls of ``end`` on the route have finished, so the matching call has not been made yet.
    return True


def _route(call: RecordedCall, dump: Dump) -> tuple[int, ...]:
    """Returns the global ranks of the sender and the receiver of a message.

    ``dump`` is the dump of the rank that made the call. The result is empty if ``call`` is a
    collective, and contains only the calling rank if torch did not record the rank at the other
    end.
    """
    if not call.is_message:
        return ()
    match = _PEERS.search(call.name)
    if match is None:
        return (call.rank,)
    # The name of a message contains two ranks within the group. The first one made the call.
    members = dump.members.get(call.group, ())
    ends = [int(match[1]), int(match[3])]
    ends = [members[end] if end < len(members) else end for end in ends]
    return tuple(ends if match[2] == "->" else reversed(ends))


def _signature(call: RecordedCall) -> tuple[str, str]:
    """Returns the properties of ``call`` that must be equal on all ranks.

    These are the name and, for all-reduce and broadcast, the sizes of the inputs.
    """
    has_equal_sizes = call.name.endswith(("all_reduce", "allreduce", "broadcast"))
    return call.name, call.sizes if has_equal_sizes else ""


def _conclude(stuck: Sequence[StuckCall]) -> tuple[tuple[int, ...], str, str]:
    """Returns the ranks that block the job, the reason for the hang, and advice for the user.

    ``stuck`` contains all calls that do not finish.
    """
    if not stuck:
        return (), "every recorded collective has finished on the ranks that called it", ""
    if different := next((call for call in stuck if call.mismatch), None):
        return (
            (),
            f"ranks called different operations as collective {different.call.number} of group "
            f"{different.call.group}",
            "make all ranks of the group call the same collectives in the same order",
        )
    waiting = {rank for call in stuck for rank in call.waiting}
    late = {rank for call in stuck for rank in call.late}
    missing = tuple(sorted({rank for call in stuck for rank in call.missing}))
    if free := tuple(sorted(late - waiting)):
        return (
            free,
            f"{_ranks(free)} {_verb(free, 'block')} the job: other ranks wait for {_ranks(free)}, "
            f"which {'does' if len(free) == 1 else 'do'} not wait in a recorded call",
            f"find out what {_ranks(free)} {'was' if len(free) == 1 else 'were'} doing "
            "(py-spy dump, log, data reader)",
        )
    if missing:
        return (
            missing,
            f"{_ranks(missing)} did not write a dump, and other ranks are waiting",
            f"check the log of {_ranks(missing)} for errors, and whether a machine has failed",
        )
    if entered := next((call for call in stuck if call.is_entered), None):
        return (), *_endless(entered)
    if late and any(call.call.is_message for call in stuck):
        ends = _ranks(sorted(late | waiting))
        return (
            (),
            f"{ends} wait for messages or collectives from each other, or are still computing",
            f"look at the stacks and logs of {ends} (py-spy dump)",
        )
    if late:
        return (
            tuple(sorted(late)),
            f"{_ranks(sorted(late))} wait for each other in different collectives",
            "make all ranks call the collectives of all groups in the same order",
        )
    return (
        (),
        f"no dump shows who sends the messages for {_ranks(sorted(waiting))}",
        f"look at the stacks and logs of {_ranks(sorted(waiting))} (py-spy dump)",
    )


def _endless(stuck: StuckCall) -> tuple[str, str]:
    """Returns the reason for the hang and advice, for a stuck call that all ranks have entered."""
    call = stuck.call
    if call.is_message:
        return (
            f"both ranks of the message {call.name.split(':')[-1]} of group {call.group} have made"
            " their calls, but the transfer of the message does not finish",
            f"check the network and the devices of {_ranks(stuck.waiting)}",
        )
    return (
        f"all ranks of group {call.group} have entered collective {call.number}, "
        "but the collective does not finish",
        f"check the network and the devices of {_ranks(stuck.waiting)}",
    )


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles only lists, dicts, strings and numbers, so that a pickle cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"the file contains an object of {module}.{name}")

    def persistent_load(self, identifier: Any) -> Any:
        raise pickle.UnpicklingError("the pickle refers to data outside of the file")


def _read_dump(rank: int, path: Path) -> Dump:
    data = read_bytes(path, "pass a folder with dumps of torch's flight recorder", TraceError)
    content: Any
    try:
        if data.lstrip()[:1] == b"{":
            content = parse_json(data)
        else:
            content = _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # A damaged pickle may raise any exception.
        raise TraceError(
            f"{path} is not a dump of torch's flight recorder: {printable(str(error)) or 'damaged'}"
        ) from None
    version = content.get("version") if isinstance(content, dict) else None
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise TraceError(
            f"{path} must be a dump of version 2.x of torch's flight recorder, got version "
            f"{printable(str(version))[:40]}; use a release of torch that writes this version"
        )
    try:
        return _parse(rank, content)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise TraceError(
            f"{path} is a damaged dump of torch's flight recorder: "
            f"{type(error).__name__}: {printable(str(error))[:80]}"
        ) from None


def _parse(rank: int, content: Mapping[str, Any]) -> Dump:
    entries = content.get("entries", ())
    calls = _without_batches([_call(rank, entry) for entry in entries])
    members = {}
    for name, config in content.get("pg_config", {}).items():
        ranks = config["ranks"]
        ranks = json.loads(ranks) if isinstance(ranks, str) else ranks
        if ranks:
            members[_group(config.get("name", name), config.get("desc", ""))] = tuple(
                int(member) for member in ranks
            )
    begun: dict[str, int] = {}
    for call in calls:
        if not call.is_message:
            begun[call.group] = max(begun.get(call.group, 0), call.number)
    names = {str(entry["pg_id"]): _group(*entry["process_group"]) for entry in content["entries"]}
    for number, status in content.get("pg_status", {}).items():
        if (group := names.get(str(number))) is not None:
            last = int(status["last_enqueued_collective"])
            begun[group] = max(begun.get(group, 0), last)
    # torch numbers its records from 0 and overwrites the oldest ones first, so a dump is complete
    # if the first record has the number 0.
    is_whole = all(int(entry.get("record_id", 1)) == 0 for entry in entries[:1])
    return Dump(rank=rank, calls=tuple(calls), members=members, begun=begun, is_whole=is_whole)


def _without_batches(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """Returns ``calls`` without the entries that stand for whole batches of messages.

    torch marks only the entry of a batch as finished, not the entries of its messages. Therefore,
    this function marks the messages of a finished batch as finished.
    """
    kept: list[RecordedCall] = []
    for call in calls:
        if not (call.is_message and call.name.endswith(_BATCH)):
            kept.append(call)
            continue
        for index, other in enumerate(kept):
            if other.is_message and (other.group, other.number) == (call.group, call.number):
                kept[index] = replace(other, has_ended=other.has_ended or call.has_ended)
    return kept


def _call(rank: int, entry: Mapping[str, Any]) -> RecordedCall:
    is_message = bool(entry["is_p2p"])
    sizes = ", ".join(
        f"{kind} {list(size)}"
        for kind, size in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    )
    return RecordedCall(
        rank=rank,
        group=_group(*entry["process_group"]),
        number=int(entry["p2p_seq_id" if is_message else "collective_seq_id"]),
        name=str(entry["profiling_name"]),
        sizes=sizes or "nothing",
        is_message=is_message,
        # gloo's calls keep the state "scheduled", but are marked as retired when they finish.
        has_ended=bool(entry["retired"]) or entry["state"] == "completed",
        line_of_code=_place(entry.get("frames", ())),
        created_ns=int(entry.get("time_created_ns") or 0),
    )


def _place(frames: Iterable[Mapping[str, Any]]) -> str:
    """Returns the innermost stack frame outside of libraries as text.

    The result is empty if all frames are in libraries.
    """
    for frame in frames:
        if not _LIBRARY.search(str(frame["filename"])):
            file_name = "/".join(Path(str(frame["filename"])).parts[-2:])
            return f"{file_name}:{frame['line']} in {frame['name']}"
    return ""


def _group(name: str, description: str) -> str:
    has_description = description not in ("", "undefined", name)
    return f"{name} ({description})" if has_description else str(name)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {describe_numbers(ranks)}"


def _verb(ranks: Sequence[int], verb: str) -> str:
    return verb if len(ranks) != 1 else f"{verb}s"
