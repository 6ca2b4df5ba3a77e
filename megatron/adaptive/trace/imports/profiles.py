"""Reads traces of other programs' runs, from torch.profiler's JSON or OpenTelemetry spans.

A torch.profiler file may be gigabytes in size, so it is read as a stream. A byte search skips
irrelevant events, so that only named ranges and communication kernels are parsed. The name of a
range determines the kind of operation (:data:`_COMPUTES`). If a training loop has no such names,
users can add them with ``torch.profiler.record_function("forward_step")`` around the forward pass,
and ``"backward_step"`` around the backward pass. Ranges on a GPU's timeline are preferred to ranges
on the host. The files do not contain the microbatch of a message, so a received message is assigned
to the next computation, and a sent message to the previous one. Otherwise, the rules are the same
as for published tables (see ``published``).

OpenTelemetry spans are recognized by the names that Megatron-LM uses (:data:`_SPANS`).
"""

from __future__ import annotations

import json
import re
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from megatron.adaptive.config.input_files import printable
from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.imports.published import OperationRow, run_of_columns
from megatron.adaptive.trace.read import RunTrace

ENDINGS = tuple(f".{name}{gz}" for name in ("json", "jsonl", "log", "txt") for gz in ("", ".gz"))
CHUNK_BYTES = 4 << 20
HEAD_BYTES = 1 << 18
MOST_LINE_BYTES = 64 << 20
MOST_HEAD_BYTES = 64 << 20
"""Maximum number of bytes before the first event. These bytes list the job's process groups."""

MOST_NS = 1 << 62
"""Largest plausible time in nanoseconds. A file with a larger time is damaged."""
MOST_RANKS = 1 << 20
"""Largest plausible number of ranks. A file that states a larger one is damaged."""

_COMPUTES = {
    "forward-compute": r"PP:(\d{1,9})F(\d{1,9})|forward[ _-]?(?:step|compute|pass|\d+)?"
    r"|_exec_forward_pass",
    "backward-compute": r"PP:(\d{1,9})(?:B|I)(\d{1,9})|backward[ _-]?(?:step|compute|pass|\d+)?"
    r"|_exec_backward_pass",
    "weight-compute": r"PP:(\d{1,9})W(\d{1,9})",
    "optimizer": r"Optimizer\.step#.*|optimizer[ _-]?step|_exec_optimizer_step",
}
"""Maps each kind of computation to a pattern for the range names of common training loops."""
_COLLECTIVES = {
    "all-reduce": r"all_?reduce",
    "all-gather": r"all_?gather",
    "reduce-scatter": r"reduce_?scatter",
    "all-to-all": r"all_?to_?all",
    "broadcast": r"broadcast",
    "barrier": r"barrier",
}
_LABEL = re.compile(r"PP:(\d{1,9})(SEND|RECV)_(F|B)(\d{1,9})")
"""Name of the range in which torch.distributed.pipelining sends or receives a message."""
_RANK = re.compile(r"(?i)(?<![a-z])rank[_-]?(\d{1,9})")
_WORKER = re.compile(r"(?i)^worker[_-]?(\d{1,9})\.")
_DEFAULT_NAME = re.compile(r"(.+)\.\d+\.pt\.trace\.json(?:\.gz)?")
"""Default file name of torch.profiler's trace handler: HOST_PROCESS.TIME.pt.trace.json."""
_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
_DECORATION = re.compile(r"^\W+|\W+$")
_BLANK = b"\xef\xbb\xbf \t\r\n"
_MESSAGES = ("send", "recv", "both")
_STEP = re.compile(r"ProfilerStep#(\d{1,15})")
_IGNORED = re.compile(
    r"PP:\d+(?:UNSHARD|RESHARD|REDUCE_GRAD)|Optimizer\.zero_grad|FSDP::|nccl:coalesced|PyTorch "
)
_GROUPS = {
    "pp": re.compile(r"(?i)pipeline_model_parallel_group|mesh_pp|pp|pipe\w*"),
    "dp": re.compile(r"(?i)data_parallel_group|mesh_(dp|dp_replicate|dp_shard|fsdp)|dp|data"),
    "tp": re.compile(r"(?i)tensor_model_parallel_group|mesh_tp|tp|tensor"),
}
_SPANS = {
    "microbatch.forward": "forward-compute",
    "microbatch.backward": "backward-compute",
    "optimizer_step": "optimizer",
    "grad_sync.finish": "grads-reduce-scatter",
    **{f"p2p.{e}_{w}": f"{w}-{e}" for w in ("forward", "backward") for e in ("recv", "send")},
}
"""Maps each Megatron-LM span name, without the prefix ``megatron.``, to a kind of operation."""
_OUTER_SPANS = re.compile(
    r"(?:pretrain|train|forward_backward|grad_sync\.start|pp|model_init|startup|layer|activation"
    r"|evaluate|(?:save_|load_)?checkpoint)(?:\..*)?"
)
_SPAN = "span"


def _kind_pattern() -> re.Pattern[str]:
    computes = "|".join(f"(?P<{n.split('-')[0]}>{p})" for n, p in _COMPUTES.items())
    others = "|".join(f"(?P<c{n}>.*{p}.*)" for n, p in enumerate(_COLLECTIVES.values()))
    both = (
        r"(?P<both>nccl\w*SendRecv.*)|(?P<send>(?:gloo|nccl):send.*)|(?P<recv>(?:gloo|nccl):recv.*)"
    )
    return re.compile(f"(?i)(?:{computes}|{both}|(?:gloo:|nccl)(?:{others}))")


_KIND = _kind_pattern()
_NAMES = {name.split("-")[0]: name for name in _COMPUTES}
_NAMES |= {f"c{number}": name for number, name in enumerate(_COLLECTIVES)}


@dataclass
class _Event:
    """Contains one operation of a rank, as read from the file. Unknown numbers are -1.

    Attributes:
        kind: Kind of operation, as in a published table; or ``send``, ``recv`` or ``both`` (sent,
            received, or possibly both) for a message that may be forward or backward.
        category: Category of the event (``cat`` in the file): range or kernel, on host or GPU.
        start: Start time in nanoseconds.
        length: Duration in nanoseconds.
        stage: Index of the pipeline stage.
        microbatch: Index of the microbatch in its step.
        root: Lowest rank of the collective's process group.
        step: Index of the training step.
        seq: Index of the operation among operations of the same kind in its step.
    """

    kind: str
    category: str
    start: int
    length: int
    stage: int = -1
    microbatch: int = -1
    root: int = -1
    step: int = -1
    seq: int = -1

    @property
    def direction(self) -> str:
        """First part of the operation's kind, such as ``forward`` or ``backward``."""
        return self.kind.split("-")[0]


@dataclass
class _RankFile:
    """Contains the data from one rank's trace file.

    Attributes:
        path: Path of the file.
        rank: Global rank, or -1 if unknown.
        world_size: Number of ranks in the job, or 0 if unknown.
        groups: Ranks in this rank's process group of each kind (``pp``, ``dp`` and ``tp``).
        base_ns: Time in nanoseconds to which the times of the events are relative.
        events: Ranges and kernels with a known kind of operation.
        steps: (Number, category, start time) of each step marked by the profiler.
        unknown: Number of ranges for each unrecognized name.
        left_out: Number of omitted events, keyed by reason and name.
        is_cut: Whether the file is truncated.
        sizes: Pipeline, tensor-parallel and data-parallel size; empty if unknown.
        only_group: Lowest rank of the process group if the file lists a single group; otherwise -1.
        process: Host and process ID if the file has a default name; otherwise the file name.
    """

    path: Path
    rank: int = -1
    world_size: int = 0
    groups: dict[str, list[int]] = field(default_factory=dict)
    base_ns: int = 0
    events: list[_Event] = field(default_factory=list)
    steps: list[tuple[int, str, int]] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    left_out: dict[str, Counter[str]] = field(default_factory=dict)
    is_cut: bool = False
    sizes: list[int] = field(default_factory=list)
    only_group: int = -1
    process: str = ""

    def leave_out(self, reason: str, name: str) -> None:
        """Counts an omitted event called ``name``. A note shows the counts of each ``reason``."""
        self.left_out.setdefault(reason, Counter())[printable(name)] += 1


@dataclass(frozen=True)
class _Span:
    """Contains an OpenTelemetry span.

    Attributes:
        resource: Attributes of the process that wrote the span, keyed by name.
        name: Name of the span.
        start: Start time in nanoseconds.
        end: End time in nanoseconds.
        attributes: Attributes of the span, keyed by name.
    """

    resource: Mapping[str, Any]
    name: str
    start: int
    end: int
    attributes: Mapping[str, Any]


def read_profiles(source: Path, pipeline: int | None = None) -> RunTrace | None:
    """Reads a job's traces, or returns ``None`` if ``source`` has no file in a known format.

    Args:
        source: Folder with torch.profiler files or span files, or path of one span file.
        pipeline: Number of pipeline ranks, or ``None`` to use the number in the files. If given,
            the ranks of a stage are assumed to be consecutive, as in Megatron-LM.

    Raises:
        TraceError: A file cannot be read, the files belong to two jobs, or no range has the name of
            a forward or backward pass.
    """
    kineto, spans = [], []
    for path in sorted(source.iterdir()) if source.is_dir() else [source]:
        if path.name.endswith(ENDINGS) and path.is_file():
            head = next(_chunks(_RankFile(path), HEAD_BYTES), b"")
            if b'"schemaVersion"' in head or b'"traceEvents"' in head or _is_array(head):
                kineto.append(path)
            elif b'"resourceSpans"' in head or (b'"trace_id"' in head and b'"start_time"' in head):
                spans.append(path)
    if not (files := _joined([_read(path) for path in kineto]) or _read_spans(spans)):
        return None
    _check_same_job(source, files)
    cut = dict.fromkeys(rank_file.path.name for rank_file in files if rank_file.is_cut)
    notes = [f"{name} is truncated; only the events that it still has are used" for name in cut]
    notes += [
        f"{rank_file.path.name}: {names.total()} events {reason} are left out: {_listed(names)}"
        for rank_file in files
        for reason, names in rank_file.left_out.items()
    ]
    rows = [row for rank_file in files for row in _rows(rank_file, *_ranks(rank_file, pipeline))]
    columns = map(list, zip(*rows, strict=True))
    table: dict[str, Any] = dict(zip(OperationRow._fields, columns, strict=False))
    if not any(kind.endswith("-compute") for kind in table.get("optype", ())):
        advice = (
            "wrap each pass in torch.profiler.record_function('forward_step') or ('backward_step')"
            if kineto
            else "run with MEGATRON_OTEL_SPAN_GROUPS=per_step,microbatch and "
            "MEGATRON_OTEL_RANK_STRATEGY=all_ranks"
        )
        names = sum((rank_file.unknown for rank_file in files), Counter[str]())
        listed = f" (its ranges are {_listed(names)})" if names else ""
        raise TraceError(f"{source} has no range for a forward or backward pass{listed}; {advice}")
    starts, first = table["start_ts"], min(table["start_ts"])
    table["start_ts"] = np.array([start - first for start in starts]) / 1e9
    table["duration"] = np.array(table["duration"], dtype=np.int64) / 1e9
    world = max(rank_file.world_size for rank_file in files)
    run = run_of_columns(table, source, world_size=world)
    unknown = sum((rank_file.unknown for rank_file in files), Counter[str]())
    if unknown:
        notes.append(f"ranges with {len(unknown)} unknown names are ignored: {_listed(unknown)}")
    return replace(run, caveats=(*run.caveats, *notes))


def _listed(names: Counter[str]) -> str:
    """Returns the most frequent of ``names`` and their counts as text for messages."""
    return ", ".join(f"{printable(name[:60])} ({count})" for name, count in names.most_common(6))


def _is_array(head: bytes) -> bool:
    """Returns whether a file that starts with ``head`` is an event list in Chrome's format."""
    return head.lstrip(_BLANK).startswith(b"[") and b'"ph"' in head


def _joined(files: list[_RankFile]) -> list[_RankFile]:
    """Merges the files that belong to the same process, and returns one entry per rank.

    If the rank of a file is unknown, the file gets an unused rank. Such files are numbered in the
    natural order of their names (``rank2`` before ``rank10``).
    """
    by_process: dict[tuple[str, int], _RankFile] = {}
    for file in sorted(files, key=lambda file: (_first_ns(file), file.path.name)):
        key = file.process, file.rank
        if key in by_process:
            _append(by_process[key], file)
        else:
            by_process[key] = file
    ranks = [file for file in by_process.values() if file.rank >= 0]
    taken = {file.rank for file in ranks}
    free = (rank for rank in count() if rank not in taken)
    for file in sorted((f for f in by_process.values() if f.rank < 0), key=_natural_order):
        file.rank = next(free)
        ranks.append(file)
    return sorted(ranks, key=lambda file: file.rank)


def _first_ns(file: _RankFile) -> int:
    starts = [event.start for event in file.events] + [start for _, _, start in file.steps]
    return min(starts, default=0)


def _natural_order(file: _RankFile) -> list[tuple[int, str]]:
    parts = re.findall(r"\d{1,18}|\D+", file.path.name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _append(file: _RankFile, later: _RankFile) -> None:
    """Appends the data of ``later``, a later file of the same process, and renumbers its steps."""
    last = max((number for number, _, _ in file.steps), default=-1)
    first = min((number for number, _, _ in later.steps), default=last + 1)
    shift = last + 1 - first if first <= last else 0
    file.steps += [(number + shift, category, start) for number, category, start in later.steps]
    file.events += later.events
    file.unknown += later.unknown
    for reason, names in later.left_out.items():
        file.left_out[reason] = file.left_out.get(reason, Counter()) + names
    file.is_cut |= later.is_cut


def _chunks(file: _RankFile, size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yields the file's decompressed bytes in parts, and sets ``is_cut`` for a truncated file."""
    unpack = zlib.decompressobj(31) if file.path.suffix == ".gz" else None
    try:
        with file.path.open("rb") as stream:
            while part := stream.read(size):
                while part:
                    if unpack is None:
                        yield part
                        break
                    yield unpack.decompress(part, size)
                    part = unpack.unconsumed_tail
            if unpack is not None:
                file.is_cut = not unpack.eof
                yield unpack.flush()
    except (OSError, zlib.error) as error:
        if not file.events:
            raise TraceError(f"cannot read {file.path}: {error}") from error
        file.is_cut = True


def _read_spans(paths: list[Path]) -> list[_RankFile]:
    """Reads Megatron-LM's spans from the files in ``paths``, and returns one entry per rank."""
    ranks: dict[int, _RankFile] = {}
    jobs: dict[str, str] = {}
    for path in paths:
        source = _RankFile(path)
        for span in _spans(source):
            short = span.name.removeprefix("megatron.")
            if short == span.name:
                continue
            resource = span.resource
            jobs.setdefault(str(resource.get("nemo.run.id")), path.name)
            if len(jobs) > 1:
                both = " and ".join(f"{job} ({name})" for job, name in jobs.items())
                raise TraceError(f"{path.parent} contains jobs {both}; keep only one job's spans")
            named = _RANK.findall(f"{path.name} {resource.get('service.instance.id')}")
            rank = _number(resource, "dl.rank", int(named[-1]) if named else 0)
            if rank not in ranks:
                axes = ("pipeline", "tensor", "data")
                sizes = [_number(resource, f"{axis}_parallel.size", 1) for axis in axes]
                world = _number(resource, "world_size", int(np.prod(sizes)))
                ranks[rank] = _RankFile(path, rank, world, sizes=sizes)
            rank_file = ranks[rank]
            if short == "train_step":
                # Spans between two steps belong to evaluations. Set their step to -1, so that they
                # are omitted.
                number = _number(span.attributes, "iteration", len(rank_file.steps))
                rank_file.steps.append((number, _SPAN, span.start))
                rank_file.steps.append((-1, _SPAN, span.end))
            elif kind := _SPANS.get(short):
                microbatch = _number(span.attributes, "microbatch_id", -1)
                length = span.end - span.start
                event = _Event(kind, _SPAN, span.start, length, microbatch=microbatch)
                rank_file.events.append(event)
            elif not _OUTER_SPANS.fullmatch(short):
                rank_file.unknown[span.name] += 1
        for rank_file in ranks.values():
            rank_file.is_cut |= source.is_cut and rank_file.path == path
    return list(ranks.values())


def _number(attributes: Mapping[str, Any], name: str, default: int) -> int:
    """Returns the attribute ``name``, with or without a dotted prefix, as an integer."""
    for key, value in attributes.items():
        if f".{key}".endswith(f".{name}"):
            with suppress(TypeError, ValueError):
                return int(value)
    return default


def _spans(file: _RankFile) -> Iterator[_Span]:
    """Yields the OpenTelemetry spans in ``file``.

    The file is JSON of the OpenTelemetry protocol (OTLP) with a batch of spans per line, or output
    of the console exporter. In console output, a span may take several lines, and log lines may
    appear between spans.
    """
    for text in _objects(file):
        try:
            content = json.loads(text)
            for group in content.get("resourceSpans", ()):
                resource = _attributes(group.get("resource", {}))
                for span in (s for scope in group["scopeSpans"] for s in scope.get("spans", ())):
                    start = int(span["startTimeUnixNano"])
                    end = int(span["endTimeUnixNano"])
                    yield _Span(resource, str(span["name"]), start, end, _attributes(span))
            if "start_time" in content:
                resource = content["resource"]["attributes"]
                start = _unix_ns(content["start_time"])
                end = _unix_ns(content["end_time"])
                yield _Span(resource, str(content["name"]), start, end, content["attributes"])
        except (ValueError, KeyError, TypeError, AttributeError):
            file.is_cut |= b"TimeUnixNano" in text or b'"start_time"' in text


def _unix_ns(clock: str) -> int:
    """Converts a UTC time in ISO format, which may end with ``Z``, to nanoseconds since 1970."""
    return round(datetime.fromisoformat(clock.replace("Z", "+00:00")).timestamp() * 1e6) * 1000


def _objects(file: _RankFile) -> Iterator[bytes]:
    """Yields the text of each JSON object in ``file``. An object may take several lines."""
    held = b""
    parts: list[bytes] = []
    for chunk in _chunks(file):
        *lines, held = (held + chunk).split(b"\n")
        if len(held) + sum(map(len, parts)) > MOST_LINE_BYTES:
            most = f"more than {MOST_LINE_BYTES >> 20} MiB"
            raise TraceError(f"{file.path}: a line has {most}; write one batch of spans per line")
        for line in lines:
            if parts or line.rstrip() == b"{":
                parts.append(line)
            elif line.startswith(b"{"):
                yield line
            if parts and line.rstrip() == b"}":
                yield b"\n".join(parts)
                parts = []
    yield b"\n".join([*parts, held])


def _attributes(holder: Mapping[str, Any]) -> dict[str, Any]:
    values = [(str(entry["key"]), entry.get("value", {})) for entry in holder.get("attributes", ())]
    return {key: next(iter(value.values()), None) for key, value in values}


def _read(path: Path) -> _RankFile:
    file = _RankFile(path)
    held = b""
    tokens = [b""]
    has_head = False
    decode = json.JSONDecoder().raw_decode
    ended = b""
    for chunk in _chunks(file):
        held += chunk
        if not has_head:
            is_array = _is_array(held[:HEAD_BYTES])
            if b'"traceEvents"' not in held and not is_array:
                if len(held) > MOST_HEAD_BYTES:
                    break
                continue
            _take_head(file, b"" if is_array else held)
            space = b'": "' if b'"ph": ' in held or b'"name": ' in held else b'":"'
            tokens = [
                b'"cat' + space + b"user_annotation",
                b'"cat' + space + b"gpu_user_annotation",
            ]
            tokens.append(b'"name' + space + b"nccl")
            has_head = True
        # The last event may be incomplete, so keep its bytes until the next chunk has been read.
        cut = held.rfind(b"{", 0, max(held.rfind(b'"ph"'), 0))
        if cut > 0:
            _take_events(file, held[:cut], tokens, decode)
            held = held[cut:]
        ended = held[-64:]
    if not has_head:
        raise TraceError(f"{path} has no traceEvents, so it was not written by torch.profiler")
    file.is_cut |= b"]" not in ended
    _take_events(file, held, tokens, decode, is_cut=file.is_cut)
    return file


def _take_head(file: _RankFile, held: bytes) -> None:
    """Reads the rank, world size and groups from the file's name and its first bytes (``held``).

    Raises:
        TraceError: A value in the first bytes is impossible.
    """
    head = held[: max(held.find(b'"traceEvents"'), 0)].decode("utf-8", "replace")
    decode = json.JSONDecoder().raw_decode
    name = file.path.name
    default = _DEFAULT_NAME.fullmatch(name)
    file.process = default[1] if default else name
    try:
        info: dict[str, Any] = {}
        if match := re.search(r'"distributedInfo":\s*', head):
            info = decode(head, match.end())[0]
        if match := re.search(r'"baseTimeNanoseconds":\s*(\d+)', head):
            file.base_ns = _whole(match[1], 1 << 64)
        named = _RANK.findall(name) or _WORKER.findall(name)
        file.rank = _whole(info.get("rank", named[0] if named else -1), MOST_RANKS)
        file.world_size = _whole(info.get("world_size", 0), MOST_RANKS)
        groups = [g for g in info.get("pg_config", []) if isinstance(g, dict)]
        for purpose, pattern in _GROUPS.items():
            for group in groups:
                names = {str(group.get("pg_desc", "")), str(group.get("pg_name", ""))}
                if any(pattern.fullmatch(word) for word in names) and purpose not in file.groups:
                    file.groups[purpose] = sorted(map(int, group.get("ranks", [])))
        if len(groups) == 1 and groups[0].get("ranks"):
            file.only_group = min(map(int, groups[0]["ranks"]))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise TraceError(
            f"{file.path}: rank and job cannot be read ({error}); record the file again"
        ) from None


def _whole(value: Any, limit: int) -> int:
    """Returns ``value`` as an integer, which must be between -1 and ``limit``.

    Raises:
        ValueError: The value is out of range, or is text that does not contain a number.
        TypeError: The value is neither a number nor text.
    """
    number = int(value) if len(str(value)) < 30 else limit + 1
    if not -1 <= number <= limit:
        raise ValueError(f"{str(value)[:30]} is not between -1 and {limit}")
    return number


def _take_events(
    file: _RankFile, data: bytes, tokens: list[bytes], decode: Any, *, is_cut: bool = False
) -> None:
    """Reads the events in ``data``, one chunk of a file.

    Args:
        file: File of the rank, to which the events are added.
        data: Bytes of the chunk, starting at the beginning of an event.
        tokens: Byte strings that mark the events to read. Events that contain none of them are
            skipped.
        decode: Function that decodes the JSON object at the beginning of a text.
        is_cut: Whether this is the last chunk of a truncated file.
    """
    starts = set()
    for token in tokens:
        offset = data.find(token)
        while offset >= 0:
            starts.add(data.rfind(b"{", 0, offset))
            offset = data.find(token, offset + len(token))
    for start in sorted(starts - {-1}):
        end = data.find(b'"ph"', data.find(b'"ph"', start) + 4)
        text = data[start : end if end >= 0 else len(data)].decode("utf-8", "replace")
        try:
            event, _ = decode(text)
        except (ValueError, RecursionError):
            if end >= 0 or not is_cut:
                name = _NAME.search(text)
                file.leave_out("that cannot be read", name[1] if name else "without a name")
            continue
        if event.get("ph") == "X" and "ts" in event:
            _take_event(file, event)


def _take_event(file: _RankFile, event: Mapping[str, Any]) -> None:
    """Adds ``event`` to ``file`` if its kind of operation is known. Otherwise, counts its name."""
    name = str(event.get("name", ""))
    category = str(event.get("cat", ""))
    try:
        since_ns, length = (_ns(event.get(key, 0)) for key in ("ts", "dur"))
    except (ValueError, TypeError, OverflowError):
        file.leave_out("whose times are not numbers", name)
        return
    if length < 0:
        file.leave_out("with a negative duration", name)
        return
    start = file.base_ns + since_ns
    if step := _STEP.fullmatch(name):
        file.steps.append((int(step[1]), category, start))
        return
    if label := _LABEL.fullmatch(name):
        kind = f"{'forward' if label[3] == 'F' else 'backward'}-{label[2].lower()}"
        file.events.append(_Event(kind, category, start, length, int(label[1]), int(label[4])))
        return
    match = _KIND.fullmatch(name) or _KIND.fullmatch(_DECORATION.sub("", name))
    if match is None or _IGNORED.match(name):
        if not _IGNORED.match(name):
            file.unknown[re.sub(r"\d+", "N", name)] += 1
        return
    kind = match.lastgroup or ""
    numbers = [int(group) for group in match.groups() if group and group.isdigit()]
    stage, microbatch = numbers[:2] if len(numbers) >= 2 else (-1, -1)
    event_arguments = event.get("args")
    arguments = event_arguments if isinstance(event_arguments, dict) else {}
    group = [
        int(rank) for rank in re.findall(r"\d{1,9}", str(arguments.get("Process Group Ranks", "")))
    ]
    root = min(group) if group else file.only_group
    # NCCL uses the same kernel for sends, for receives and for both at once. The kernel's name does
    # not distinguish them, but the event's arguments may.
    if kind == "both":
        kind = {"send": "send", "recv": "recv"}.get(
            str(arguments.get("Collective name", "")), "both"
        )
    kind = _NAMES.get(kind, kind)
    file.events.append(_Event(kind, category, start, length, stage, microbatch, root))


def _ns(microseconds: Any) -> int:
    """Converts the time of an event from microseconds to nanoseconds.

    Raises:
        ValueError: The time is implausibly large.
    """
    time_ns = round(float(microseconds) * 1e3)
    if abs(time_ns) > MOST_NS:
        raise ValueError
    return time_ns


def _check_same_job(folder: Path, files: list[_RankFile]) -> None:
    seen: dict[int, Path] = {}
    for file in files:
        if file.rank in seen:
            raise TraceError(
                f"{seen[file.rank].name} and {file.path.name} in {folder} both belong to rank "
                f"{file.rank}; keep only the files of one job"
            )
        seen[file.rank] = file.path
    sizes = {file.world_size for file in files if file.world_size}
    if len(sizes) > 1:
        both = " and ".join(map(str, sorted(sizes)))
        raise TraceError(f"{folder} contains jobs of {both} ranks; keep only the files of one job")


def _ranks(file: _RankFile, pipeline: int | None) -> tuple[int, int, int]:
    """Returns the pipeline rank, pipeline size and replica of the rank in ``file``."""
    world = max(file.world_size, file.rank + 1)
    group = file.groups.get("pp", [])
    if pipeline is not None:
        return (
            file.rank // max(1, world // pipeline),
            pipeline,
            file.rank % max(1, world // pipeline),
        )
    if file.sizes:
        per_stage = max(1, world // file.sizes[0])
        return file.rank // per_stage, file.sizes[0], file.rank % per_stage // file.sizes[1]
    if file.rank in group:
        data = file.groups.get("dp", [])
        return group.index(file.rank), len(group), data.index(file.rank) if file.rank in data else 0
    if any(event.kind in _MESSAGES for event in file.events):
        return file.rank, world, 0
    return 0, 1, file.rank


def _rows(file: _RankFile, pp_rank: int, num_ranks: int, dp_rank: int) -> list[OperationRow]:
    """Returns the operations in ``file`` as rows of a table in the published format."""
    operations, computes = _operations(file)
    counts: Counter[tuple[int, str]] = Counter()
    for event in operations:
        if event.seq < 0:
            event.seq = counts[event.step, event.kind]
            counts[event.step, event.kind] += 1
    chunk = {id(event): max(event.stage, 0) // num_ranks for event in computes}
    rows = []
    for event in operations:
        local_chunk = chunk.get(id(event))
        is_compute = local_chunk is not None
        rows.append(
            OperationRow(
                dp_rank=dp_rank,
                stage=pp_rank,
                rank=file.rank,
                step=event.step,
                optype=event.kind,
                start_ts=event.start,
                duration=event.length,
                seq_id=event.seq,
                mc=-1 if local_chunk is None else local_chunk,
                gmc=-1 if local_chunk is None else local_chunk * num_ranks + pp_rank,
                mb_id=event.microbatch if is_compute else -1,
                group=event.root,
            )
        )
    return rows


def _operations(file: _RankFile) -> tuple[list[_Event], list[_Event]]:
    """Returns two lists for the rank in ``file``: all its operations, and only its computations."""
    events = sorted(file.events, key=lambda event: (event.start, -event.length))
    computes = [event for event in events if event.kind.endswith("-compute")]
    host = "user_annotation"
    device = "gpu_user_annotation"
    lines = {event.category for event in computes}
    line = device if device in lines else next(iter(lines - {"kernel"}), host)
    has_kernels = any(event.category == "kernel" for event in events)
    labels = [e for e in events if e.kind.endswith(("-send", "-recv")) and e.category == host]
    events = [
        event
        for event in events
        if event.category == (line if event.kind in _COMPUTES or not has_kernels else "kernel")
        and not (event.kind.endswith(("-send", "-recv")) and event.category == host)
    ]
    _set_steps(file, line, events, labels)
    events = [event for event in events if event.step >= 0]
    computes = _outermost([event for event in events if event.kind.endswith("-compute")])
    others = [event for event in events if not event.kind.endswith("-compute")]
    named = [event for event in others if event.kind.endswith(("-send", "-recv"))]
    messages = {*_MESSAGES, *(event.kind for event in named)}
    operations = computes + [event for event in others if event.kind not in messages]
    for end in ("send", "recv"):
        for direction in ("forward", "backward"):
            chosen = [event for event in named if event.kind == f"{direction}-{end}"]
            partners = [event for event in computes if event.direction == direction]
            operations += _messages(end, chosen, [], partners)
        if line == _SPAN:
            operations += _unspanned(end, operations, computes)
        chosen = [event for event in others if event.kind in (end, "both")]
        operations += _messages(end, chosen, [e for e in labels if e.kind.endswith(end)], computes)
    return operations, computes


def _set_steps(file: _RankFile, line: str, events: list[_Event], labels: list[_Event]) -> None:
    """Sets the step of all ``events`` and ``labels``.

    If there are no step marks, each optimizer call ends a step.
    """
    steps = sorted((start, number) for number, category, start in file.steps if category == line)
    if not steps:
        ends = [event.start + event.length for event in events if event.kind == "optimizer"]
        steps = [(start, number) for number, start in enumerate([0, *ends])]
    starts = np.array([start for start, _ in steps])
    for event in (*events, *labels):
        index = int(np.searchsorted(starts, event.start, "right")) - 1
        event.step = steps[index][1] if index >= 0 else -1


def _unspanned(end: str, messages: list[_Event], computes: list[_Event]) -> list[_Event]:
    """Returns the sends or receives (``end``) that have no span because one call did both.

    Their times are estimated: the wait for an input begins at the end of the previous computation,
    and a result is sent at the end of the computation that produced it.
    """
    has_span = {(e.step, e.direction, e.seq) for e in messages if e.kind.endswith(f"-{end}")}
    missing = []
    step = -1
    free = 0
    for event in computes:
        until = event.start + event.length
        start = min(free, event.start) if step == event.step else event.start
        step = event.step
        free = until
        if (event.step, event.direction, event.seq) not in has_span:
            kind = f"{event.direction}-{end}"
            times = (start, event.start - start) if end == "recv" else (until, 0)
            missing.append(replace(event, kind=kind, start=times[0], length=times[1]))
    return missing


def _outermost(computes: list[_Event]) -> list[_Event]:
    """Removes computations nested in others of the same kind, and renumbers the rest."""
    until: dict[str, int] = {}
    counts: Counter[tuple[int, str]] = Counter()
    outermost = []
    for event in computes:
        if event.start >= until.get(event.kind, 0):
            until[event.kind] = event.start + event.length
            event.seq = counts[event.step, event.kind]
            counts[event.step, event.kind] += 1
            if event.microbatch < 0:
                event.microbatch = event.seq
            outermost.append(event)
    return outermost


def _messages(
    end: str, messages: list[_Event], labels: list[_Event], computes: list[_Event]
) -> list[_Event]:
    """Returns the messages, with direction and number taken from the computation of each message.

    Without labels, a received message belongs to the next computation, and a sent message to the
    previous one. If an input arrives during the range of its computation, the start of the
    computation is moved to the arrival.

    Args:
        end: Side of the messages, ``send`` or ``recv``.
        messages: Messages of the rank, ordered by start.
        labels: Named ranges around messages, used only if there are as many labels as messages.
        computes: Computations of the rank, ordered by start.
    """
    starts = [event.start for event in computes]
    compute_of = {(e.step, e.direction, e.stage, e.microbatch): e for e in computes}
    paired = []
    for number, message in enumerate(messages):
        near = bisect_right(starts, message.start) - (end == "send")
        compute = computes[near] if 0 <= near < len(computes) else None
        if len(labels) == len(messages):
            label = labels[number]
            key = label.step, label.direction, label.stage, label.microbatch
            compute = compute_of.get(key)
        if compute is None:
            continue
        arrived = message.start + message.length
        if end == "recv" and compute.start < arrived < compute.start + compute.length:
            compute.length -= arrived - compute.start
            compute.start = arrived
        paired.append(replace(message, kind=f"{compute.direction}-{end}", seq=compute.seq))
    return paired
