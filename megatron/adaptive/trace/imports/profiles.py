"""Reads what programs wrote of their own work as one run: torch.profiler's JSON, or spans.

A file of torch.profiler may have gigabytes, so it is read as a stream: events of other categories
are passed over by searching bytes, and only ranges and kernels of communication are parsed. What
they are is found by their names, see :data:`_COMPUTES`; loops without such names get them by
``torch.profiler.record_function("forward_step")`` around their forward and ``"backward_step"``
around their backward. Where a file has ranges on a GPU's time line, these count, not the host's.
Messages carry no microbatch: one received is for the next compute, one sent is the result of the
last; the rest is as in a published table (see ``published``).

Spans are those of OpenTelemetry that Megatron-LM makes, see :func:`_spans` and :data:`_SPANS`.
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
from megatron.adaptive.trace.imports.published import COLUMNS, OPTIONAL, run_of_columns
from megatron.adaptive.trace.read import RunTrace

ENDINGS = tuple(f".{name}{gz}" for name in ("json", "jsonl", "log", "txt") for gz in ("", ".gz"))
CHUNK_BYTES, HEAD_BYTES = 4 << 20, 1 << 18
MOST_LINE_BYTES = 64 << 20
MOST_HEAD_BYTES = 64 << 20
"""A head before the first event is no longer than this: it lists the groups of a rank."""

MOST_NS, MOST_RANKS = 1 << 62, 1 << 20
"""Limits of times and of ranks: what is beyond is damage."""

_COMPUTES = {
    "forward-compute": r"PP:(\d{1,9})F(\d{1,9})|forward[ _-]?(?:step|compute|pass|\d+)?"
    r"|_exec_forward_pass",
    "backward-compute": r"PP:(\d{1,9})(?:B|I)(\d{1,9})|backward[ _-]?(?:step|compute|pass|\d+)?"
    r"|_exec_backward_pass",
    "weight-compute": r"PP:(\d{1,9})W(\d{1,9})",
    "optimizer": r"Optimizer\.step#.*|optimizer[ _-]?step|_exec_optimizer_step",
}
"""Names of ranges: of torch.distributed.pipelining (and so torchtitan), Megatron-LM, DeepSpeed."""
_COLLECTIVES = {
    "all-reduce": r"all_?reduce",
    "all-gather": r"all_?gather",
    "reduce-scatter": r"reduce_?scatter",
    "all-to-all": r"all_?to_?all",
    "broadcast": r"broadcast",
    "barrier": r"barrier",
}
_LABEL = re.compile(r"PP:(\d{1,9})(SEND|RECV)_(F|B)(\d{1,9})")
"""Ranges in which torch.distributed.pipelining hands a message over, one for each."""
_RANK = re.compile(r"(?i)(?<![a-z])rank[_-]?(\d{1,9})")
_WORKER = re.compile(r"(?i)^worker[_-]?(\d{1,9})\.")
_DEFAULT_NAME = re.compile(r"(.+)\.\d+\.pt\.trace\.json(?:\.gz)?")
"""Name that the profiler's handler gives a file: host and process, then the time."""
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
"""Megatron-LM's spans, without their common beginning."""
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
    """Holds a range or kernel of a known kind; times in ns, -1 for what is not known.

    ``kind`` is one of a published table, or ``send``, ``recv`` or ``both`` for messages of which
    nothing else is known. ``root`` is the lowest rank of a collective's group.
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
    def way(self) -> str:
        """``forward``, ``backward``, ..."""
        return self.kind.split("-")[0]


@dataclass
class _RankFile:
    """Holds what a rank's file says.

    Attributes:
        path: the file.
        rank: global rank.
        world_size: of the job.
        groups: ranks of its process groups, by what they are for.
        base_ns: what times count from.
        events: what is known.
        steps: number, category, start of each step that the profiler marked.
        unknown: names of ranges that are not recognized, with their number.
        left_out: names of events that are left out, by the reason, with their number.
        is_cut: it ends in the middle.
        sizes: pipeline, tensor and data parallel ranks, as far as spans say them.
        only_group: lowest rank of the only process group, -1 where there are several.
        process: host and process from a file name as the profiler makes it, else the file name.
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
        """Counts an event that is left out."""
        self.left_out.setdefault(reason, Counter())[printable(name)] += 1


def read_profiles(place: Path, pipeline: int | None = None) -> RunTrace | None:
    """Reads the traces of a job; ``None`` where no file is of torch.profiler or has spans.

    Args:
        place: folder with a file per rank, or with files of spans; or a file of spans.
        pipeline: number of pipeline ranks where the files do not say it; ranks of a stage then
            follow each other, as in Megatron-LM.

    Raises:
        TraceError: a file cannot be read, there are two jobs, or no forward and backward is named.
    """
    kineto, spans = [], []
    for path in sorted(place.iterdir()) if place.is_dir() else [place]:
        if path.name.endswith(ENDINGS) and path.is_file():
            head = next(_chunks(_RankFile(path), HEAD_BYTES), b"")
            if b'"schemaVersion"' in head or b'"traceEvents"' in head or _is_array(head):
                kineto.append(path)
            elif b'"resourceSpans"' in head or (b'"trace_id"' in head and b'"start_time"' in head):
                spans.append(path)
    if not (files := _joined([_read(path) for path in kineto]) or _read_spans(spans)):
        return None
    _check_one_job(place, files)
    cut = dict.fromkeys(one.path.name for one in files if one.is_cut)
    notes = [f"{name} ends in the middle; what it has is used" for name in cut]
    notes += [
        f"{one.path.name}: {names.total()} events {reason} are left out: {_listed(names)}"
        for one in files
        for reason, names in one.left_out.items()
    ]
    rows = [row for one in files for row in _columns(one, *_place(one, pipeline))]
    table: dict[str, Any] = dict(
        zip((*COLUMNS, *OPTIONAL), map(list, zip(*rows, strict=True)), strict=False)
    )
    if not any(kind.endswith("-compute") for kind in table.get("optype", ())):
        advice = (
            "put torch.profiler.record_function('forward_step') and ('backward_step') around them"
            if kineto
            else "run with MEGATRON_OTEL_SPAN_GROUPS=per_step,microbatch and "
            "MEGATRON_OTEL_RANK_STRATEGY=all_ranks"
        )
        names = sum((one.unknown for one in files), Counter[str]())
        listed = f" (its ranges are {_listed(names)})" if names else ""
        raise TraceError(f"{place}: no range is named as a forward or backward{listed}; {advice}")
    starts, first = table["start_ts"], min(table["start_ts"])
    table["start_ts"] = np.array([start - first for start in starts]) / 1e9
    table["duration"] = np.array(table["duration"], dtype=np.int64) / 1e9
    world = max(one.world_size for one in files)
    run = run_of_columns(table, place, world_size=world)
    unknown = sum((one.unknown for one in files), Counter[str]())
    if unknown:
        notes.append(f"{len(unknown)} kinds of ranges are of no known kind: {_listed(unknown)}")
    return replace(run, caveats=(*run.caveats, *notes))


def _listed(names: Counter[str]) -> str:
    """Returns the most frequent names with their counts, as text."""
    return ", ".join(f"{printable(name[:60])} ({count})" for name, count in names.most_common(6))


def _is_array(head: bytes) -> bool:
    """Returns whether a file is a bare list of Chrome's events, without a head."""
    return head.lstrip(_BLANK).startswith(b"[") and b'"ph"' in head


def _joined(files: list[_RankFile]) -> list[_RankFile]:
    """Joins the files of each process and returns one for each rank.

    Files that do not state their rank get the free ranks in the order of their names, with numbers
    in names compared as numbers.
    """
    found: dict[tuple[str, int], _RankFile] = {}
    for file in sorted(files, key=lambda one: (_first_ns(one), one.path.name)):
        key = file.process, file.rank
        if key in found:
            _append(found[key], file)
        else:
            found[key] = file
    ranks = [file for file in found.values() if file.rank >= 0]
    taken = {file.rank for file in ranks}
    free = (rank for rank in count() if rank not in taken)
    for file in sorted((f for f in found.values() if f.rank < 0), key=_natural_order):
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
    """Appends a later file of the same process, with its steps after the earlier ones."""
    last = max((number for number, _, _ in file.steps), default=-1)
    first = min((number for number, _, _ in later.steps), default=last + 1)
    shift = last + 1 - first if first <= last else 0
    file.steps += [(number + shift, category, start) for number, category, start in later.steps]
    file.events += later.events
    file.unknown += later.unknown
    for reason, names in later.left_out.items():
        file.left_out[reason] = file.left_out.get(reason, Counter()) + names
    file.is_cut |= later.is_cut


def _chunks(one: _RankFile, size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yields parts of a file, unpacked; notes where it is cut off."""
    unpack = zlib.decompressobj(31) if one.path.suffix == ".gz" else None
    try:
        with one.path.open("rb") as file:
            while part := file.read(size):
                while part:
                    if unpack is None:
                        yield part
                        break
                    yield unpack.decompress(part, size)
                    part = unpack.unconsumed_tail
            if unpack is not None:
                one.is_cut = not unpack.eof
                yield unpack.flush()
    except (OSError, zlib.error) as error:
        if not one.events:
            raise TraceError(f"cannot read {one.path}: {error}") from error
        one.is_cut = True


def _read_spans(paths: list[Path]) -> list[_RankFile]:
    """Reads Megatron-LM's spans: a file may have those of all ranks, a rank several files."""
    ranks: dict[int, _RankFile] = {}
    jobs: dict[str, str] = {}
    for path in paths:
        source = _RankFile(path)
        for resource, name, start, end, found in _spans(source):
            short = name.removeprefix("megatron.")
            if short == name:
                continue
            jobs.setdefault(str(resource.get("nemo.run.id")), path.name)
            if len(jobs) > 1:
                both = " and ".join(f"{job} ({name})" for job, name in jobs.items())
                raise TraceError(f"{path.parent} mixes jobs {both}; keep the spans of one")
            said = _RANK.findall(f"{path.name} {resource.get('service.instance.id')}")
            rank = _number(resource, "dl.rank", int(said[-1]) if said else 0)
            if rank not in ranks:
                axes = ("pipeline", "tensor", "data")
                sizes = [_number(resource, f"{axis}_parallel.size", 1) for axis in axes]
                world = _number(resource, "world_size", int(np.prod(sizes)))
                ranks[rank] = _RankFile(path, rank, world, sizes=sizes)
            one = ranks[rank]
            if short == "train_step":
                # What lies between two steps is of evaluations, and of no step.
                one.steps.append((_number(found, "iteration", len(one.steps)), _SPAN, start))
                one.steps.append((-1, _SPAN, end))
            elif kind := _SPANS.get(short):
                microbatch = _number(found, "microbatch_id", -1)
                one.events.append(_Event(kind, _SPAN, start, end - start, microbatch=microbatch))
            elif not _OUTER_SPANS.fullmatch(short):
                one.unknown[name] += 1
        for one in ranks.values():
            one.is_cut |= source.is_cut and one.path == path
    return list(ranks.values())


def _number(attributes: Mapping[str, Any], name: str, default: int) -> int:
    """Returns a whole number under a name, whatever name space it is in."""
    for key, value in attributes.items():
        if f".{key}".endswith(f".{name}"):
            with suppress(TypeError, ValueError):
                return int(value)
    return default


def _spans(one: _RankFile) -> Iterator[tuple[Mapping[str, Any], str, int, int, Mapping[str, Any]]]:
    """Yields resource, name, begin, end and attributes of the spans in a file.

    They stand there as OTLP has them in JSON, a batch in a line, or as the console exporter writes
    them, over several lines or in one, with lines of a log between them.
    """
    for text in _objects(one):
        try:
            found = json.loads(text)
            for group in found.get("resourceSpans", ()):
                resource = _attributes(group.get("resource", {}))
                for span in (s for scope in group["scopeSpans"] for s in scope.get("spans", ())):
                    times = [int(span[f"{at}TimeUnixNano"]) for at in ("start", "end")]
                    yield resource, str(span["name"]), times[0], times[1], _attributes(span)
            if "start_time" in found:
                resource = found["resource"]["attributes"]
                clocks = [found[at].replace("Z", "+00:00") for at in ("start_time", "end_time")]
                times = [round(datetime.fromisoformat(c).timestamp() * 1e6) * 1000 for c in clocks]
                yield resource, str(found["name"]), times[0], times[1], found["attributes"]
        except (ValueError, KeyError, TypeError, AttributeError):
            one.is_cut |= b"TimeUnixNano" in text or b'"start_time"' in text


def _objects(one: _RankFile) -> Iterator[bytes]:
    """Yields texts of objects: lines that begin with a brace, or all from one to the closing."""
    held, parts = b"", list[bytes]()
    for chunk in _chunks(one):
        *lines, held = (held + chunk).split(b"\n")
        if len(held) + sum(map(len, parts)) > MOST_LINE_BYTES:
            most = f"more than {MOST_LINE_BYTES >> 20} MiB"
            raise TraceError(f"{one.path} has a line of {most}; give each batch of spans its own")
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
    values = [(str(one["key"]), one.get("value", {})) for one in holder.get("attributes", ())]
    return {key: next(iter(value.values()), None) for key, value in values}


def _read(path: Path) -> _RankFile:
    one = _RankFile(path)
    held, tokens, has_head = b"", [b""], False
    decode = json.JSONDecoder().raw_decode
    ended = b""
    for chunk in _chunks(one):
        held += chunk
        if not has_head:
            is_array = _is_array(held[:HEAD_BYTES])
            if b'"traceEvents"' not in held and not is_array:
                if len(held) > MOST_HEAD_BYTES:
                    break
                continue
            _take_head(one, b"" if is_array else held)
            space = b'": "' if b'"ph": ' in held or b'"name": ' in held else b'":"'
            tokens = [
                b'"cat' + space + b"user_annotation",
                b'"cat' + space + b"gpu_user_annotation",
            ]
            tokens.append(b'"name' + space + b"nccl")
            has_head = True
        # The last event may go on in the next part.
        cut = held.rfind(b"{", 0, max(held.rfind(b'"ph"'), 0))
        if cut > 0:
            _take_events(one, held[:cut], tokens, decode)
            held = held[cut:]
        ended = held[-64:]
    if not has_head:
        raise TraceError(f"{path} has no traceEvents; it is not written by torch.profiler")
    one.is_cut |= b"]" not in ended
    _take_events(one, held, tokens, decode, is_cut=one.is_cut)
    return one


def _take_head(one: _RankFile, held: bytes) -> None:
    """Reads the head of a file, before its events, and the facts in its name.

    Raises:
        TraceError: a value is impossible.
    """
    head = held[: max(held.find(b'"traceEvents"'), 0)].decode("utf-8", "replace")
    decode = json.JSONDecoder().raw_decode
    name = one.path.name
    default = _DEFAULT_NAME.fullmatch(name)
    one.process = default[1] if default else name
    try:
        info: dict[str, Any] = {}
        if found := re.search(r'"distributedInfo":\s*', head):
            info = decode(head, found.end())[0]
        if found := re.search(r'"baseTimeNanoseconds":\s*(\d+)', head):
            one.base_ns = _whole(found[1], 1 << 64)
        named = _RANK.findall(name) or _WORKER.findall(name)
        one.rank = _whole(info.get("rank", named[0] if named else -1), MOST_RANKS)
        one.world_size = _whole(info.get("world_size", 0), MOST_RANKS)
        groups = [g for g in info.get("pg_config", []) if isinstance(g, dict)]
        for purpose, pattern in _GROUPS.items():
            for group in groups:
                words = {str(group.get("pg_desc", "")), str(group.get("pg_name", ""))}
                if any(pattern.fullmatch(word) for word in words) and purpose not in one.groups:
                    one.groups[purpose] = sorted(map(int, group.get("ranks", [])))
        if len(groups) == 1 and groups[0].get("ranks"):
            one.only_group = min(map(int, groups[0]["ranks"]))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise TraceError(
            f"{one.path}: what it says of its rank and job is unreadable ({error}); record it anew"
        ) from None


def _whole(value: Any, limit: int) -> int:
    """Converts a value to a whole number from -1 up to a limit.

    Raises:
        ValueError: the value is out of range, or text that is not a number.
        TypeError: the value is neither a number nor text.
    """
    number = int(value) if len(str(value)) < 30 else limit + 1
    if not -1 <= number <= limit:
        raise ValueError(f"{str(value)[:30]} is more than {limit}")
    return number


def _take_events(
    one: _RankFile, data: bytes, tokens: list[bytes], decode: Any, *, is_cut: bool = False
) -> None:
    """Reads the events of a part of a file.

    Args:
        one: File of the rank, to which the events are added.
        data: Bytes of the part, which begins with an event.
        tokens: Texts that mark events; an event without any of them is skipped.
        decode: Decoder of the JSON object at the beginning of a text.
        is_cut: Whether the file ends in the middle with this part.
    """
    starts = set()
    for token in tokens:
        at = data.find(token)
        while at >= 0:
            starts.add(data.rfind(b"{", 0, at))
            at = data.find(token, at + len(token))
    for start in sorted(starts - {-1}):
        end = data.find(b'"ph"', data.find(b'"ph"', start) + 4)
        text = data[start : end if end >= 0 else len(data)].decode("utf-8", "replace")
        try:
            event, _ = decode(text)
        except (ValueError, RecursionError):
            if end >= 0 or not is_cut:
                name = _NAME.search(text)
                one.leave_out("that are unreadable", name[1] if name else "without a name")
            continue
        if event.get("ph") == "X" and "ts" in event:
            _take_event(one, event)


def _take_event(one: _RankFile, event: Mapping[str, Any]) -> None:
    name, category = str(event.get("name", "")), str(event.get("cat", ""))
    try:
        since_ns, length = (_ns(event.get(key, 0)) for key in ("ts", "dur"))
    except (ValueError, TypeError, OverflowError):
        one.leave_out("whose times are no numbers", name)
        return
    if length < 0:
        one.leave_out("with a negative duration", name)
        return
    start = one.base_ns + since_ns
    if step := _STEP.fullmatch(name):
        one.steps.append((int(step[1]), category, start))
        return
    if label := _LABEL.fullmatch(name):
        kind = f"{'forward' if label[3] == 'F' else 'backward'}-{label[2].lower()}"
        one.events.append(_Event(kind, category, start, length, int(label[1]), int(label[4])))
        return
    match = _KIND.fullmatch(name) or _KIND.fullmatch(_DECORATION.sub("", name))
    if match is None or _IGNORED.match(name):
        if not _IGNORED.match(name):
            one.unknown[re.sub(r"\d+", "N", name)] += 1
        return
    kind = match.lastgroup or ""
    numbers = [int(group) for group in match.groups() if group and group.isdigit()]
    stage, microbatch = numbers[:2] if len(numbers) >= 2 else (-1, -1)
    given = event.get("args")
    arguments = given if isinstance(given, dict) else {}
    group = [
        int(rank) for rank in re.findall(r"\d{1,9}", str(arguments.get("Process Group Ranks", "")))
    ]
    root = min(group) if group else one.only_group
    if kind == "both":  # one kernel of NCCL sends, receives, or does both
        kind = {"send": "send", "recv": "recv"}.get(
            str(arguments.get("Collective name", "")), "both"
        )
    kind = _NAMES.get(kind, kind)
    one.events.append(_Event(kind, category, start, length, stage, microbatch, root))


def _ns(microseconds: Any) -> int:
    """Converts a time of an event from microseconds to ns.

    Raises:
        ValueError: no event can have this time.
    """
    time_ns = round(float(microseconds) * 1e3)
    if abs(time_ns) > MOST_NS:
        raise ValueError
    return time_ns


def _check_one_job(folder: Path, files: list[_RankFile]) -> None:
    seen: dict[int, Path] = {}
    for one in files:
        if one.rank in seen:
            raise TraceError(
                f"{seen[one.rank].name} and {one.path.name} in {folder} are both of rank "
                f"{one.rank}; keep the files of one job"
            )
        seen[one.rank] = one.path
    sizes = {one.world_size for one in files if one.world_size}
    if len(sizes) > 1:
        both = " and ".join(map(str, sorted(sizes)))
        raise TraceError(f"{folder} mixes jobs of {both} ranks; keep the files of one")


def _place(one: _RankFile, pipeline: int | None) -> tuple[int, int, int]:
    """Returns pipeline rank, number of them, and replica of a rank."""
    world = max(one.world_size, one.rank + 1)
    group = one.groups.get("pp", [])
    if pipeline is not None:
        return one.rank // max(1, world // pipeline), pipeline, one.rank % max(1, world // pipeline)
    if one.sizes:
        per_stage = max(1, world // one.sizes[0])
        return one.rank // per_stage, one.sizes[0], one.rank % per_stage // one.sizes[1]
    if one.rank in group:
        data = one.groups.get("dp", [])
        return group.index(one.rank), len(group), data.index(one.rank) if one.rank in data else 0
    if any(event.kind in _MESSAGES for event in one.events):
        return one.rank, world, 0
    return 0, 1, one.rank


def _columns(one: _RankFile, pp_rank: int, num_ranks: int, dp_rank: int) -> list[tuple[Any, ...]]:
    """Returns rows of a published table, times in ns."""
    events = sorted(one.events, key=lambda event: (event.start, -event.length))
    computes = [event for event in events if event.kind.endswith("-compute")]
    host, device = "user_annotation", "gpu_user_annotation"
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
    steps = sorted((start, number) for number, category, start in one.steps if category == line)
    if not steps:  # a step ends with its optimizer
        ends = [event.start + event.length for event in events if event.kind == "optimizer"]
        steps = [(start, number) for number, start in enumerate([0, *ends])]
    starts = np.array([start for start, _ in steps])
    for event in (*events, *labels):
        place = int(np.searchsorted(starts, event.start, "right")) - 1
        event.step = steps[place][1] if place >= 0 else -1
    events = [event for event in events if event.step >= 0]
    computes = _outermost([event for event in events if event.kind.endswith("-compute")])
    others = [event for event in events if not event.kind.endswith("-compute")]
    named = [event for event in others if event.kind.endswith(("-send", "-recv"))]
    messages = {*_MESSAGES, *(event.kind for event in named)}
    found = computes + [event for event in others if event.kind not in messages]
    for end in ("send", "recv"):
        for way in ("forward", "backward"):
            mine = [event for event in named if event.kind == f"{way}-{end}"]
            found += _messages(end, mine, [], [event for event in computes if event.way == way])
        if line == _SPAN:
            found += _unspanned(end, found, computes)
        mine = [event for event in others if event.kind in (end, "both")]
        found += _messages(end, mine, [e for e in labels if e.kind.endswith(end)], computes)
    counts: Counter[tuple[int, str]] = Counter()
    for event in found:
        if event.seq < 0:
            event.seq = counts[event.step, event.kind]
            counts[event.step, event.kind] += 1
    chunk = {id(event): max(event.stage, 0) // num_ranks for event in computes}
    rows: list[tuple[Any, ...]] = []
    for event in found:
        chunks = (-1, -1, -1)
        if (own := chunk.get(id(event))) is not None:
            chunks = (own, own * num_ranks + pp_rank, event.microbatch)
        where = (dp_rank, pp_rank, one.rank, event.step, event.kind)
        rows.append((*where, event.start, event.length, event.seq, *chunks, event.root))
    return rows


def _unspanned(end: str, messages: list[_Event], computes: list[_Event]) -> list[_Event]:
    """Returns messages of which no span is made, as where one sends and receives in one call.

    An input is waited for since the compute before, and a result leaves when it is there.
    """
    known = {(e.step, e.way, e.seq) for e in messages if e.kind.endswith(f"-{end}")}
    found, step, free = [], -1, 0
    for event in computes:
        until = event.start + event.length
        start = min(free, event.start) if step == event.step else event.start
        step, free = event.step, until
        if (event.step, event.way, event.seq) not in known:
            times = (start, event.start - start) if end == "recv" else (until, 0)
            found.append(replace(event, kind=f"{event.way}-{end}", start=times[0], length=times[1]))
    return found


def _outermost(computes: list[_Event]) -> list[_Event]:
    """Returns computes that lie within no other of their kind, numbered within their step."""
    until: dict[str, int] = {}
    counts: Counter[tuple[int, str]] = Counter()
    found = []
    for event in computes:
        if event.start >= until.get(event.kind, 0):
            until[event.kind] = event.start + event.length
            event.seq = counts[event.step, event.kind]
            counts[event.step, event.kind] += 1
            if event.microbatch < 0:
                event.microbatch = event.seq
            found.append(event)
    return found


def _messages(
    end: str, messages: list[_Event], labels: list[_Event], computes: list[_Event]
) -> list[_Event]:
    """Returns messages with the way and number of the compute that took or made them.

    One of which the program says nothing is for the next compute, or from the last one. A compute
    whose input arrives within its range begins then.
    """
    starts = [event.start for event in computes]
    known = {(e.step, e.way, e.stage, e.microbatch): e for e in computes}
    found = []
    for number, message in enumerate(messages):
        near = bisect_right(starts, message.start) - (end == "send")
        compute = computes[near] if 0 <= near < len(computes) else None
        if len(labels) == len(messages):
            label = labels[number]
            compute = known.get((label.step, label.way, label.stage, label.microbatch))
        if compute is None:
            continue
        arrived = message.start + message.length
        if end == "recv" and compute.start < arrived < compute.start + compute.length:
            compute.length -= arrived - compute.start
            compute.start = arrived
        found.append(replace(message, kind=f"{compute.way}-{end}", seq=compute.seq))
    return found
