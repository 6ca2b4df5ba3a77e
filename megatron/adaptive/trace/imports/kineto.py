"""Reads the JSON that torch.profiler writes, a file per rank, as one run.

A file may have gigabytes, so it is read as a stream: events of other categories are passed over by
searching bytes, and only ranges and kernels of communication are parsed. What they are is found by
their names, see :data:`_COMPUTES`; loops without such names get them by
``torch.profiler.record_function("forward_step")`` around their forward and ``"backward_step"``
around their backward. Where a file has ranges on a GPU's time line, these count, not the host's.
Messages carry no microbatch: one received is for the next compute, one sent is the result of the
last; the rest is as in a published table (see ``published``).
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.imports.published import run_of_columns
from megatron.adaptive.trace.read import RunTrace

ENDINGS = (".json", ".json.gz")
CHUNK_BYTES, HEAD_BYTES = 4 << 20, 1 << 12
MOST_HEAD_BYTES = 64 << 20
"""A head before the first event is no longer than this: it lists the groups of a rank."""

_COMPUTES = {
    "forward-compute": r"PP:(\d+)F(\d+)|forward[ _-]?(?:step|compute|pass|\d+)?|_exec_forward_pass",
    "backward-compute": r"PP:(\d+)(?:B|I)(\d+)|backward[ _-]?(?:step|compute|pass|\d+)?"
    r"|_exec_backward_pass",
    "weight-compute": r"PP:(\d+)W(\d+)",
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
_LABEL = re.compile(r"PP:(\d+)(SEND|RECV)_(F|B)(\d+)")
"""Ranges in which torch.distributed.pipelining hands a message over, one for each."""
_MESSAGES = ("send", "recv", "both")
_STEP = re.compile(r"ProfilerStep#(\d+)")
_IGNORED = re.compile(
    r"PP:\d+(?:UNSHARD|RESHARD|REDUCE_GRAD)|Optimizer\.zero_grad|FSDP::|nccl:coalesced|PyTorch "
)
_GROUPS = {
    "pp": re.compile(r"(?i)pipeline_model_parallel_group|mesh_pp|pp|pipe\w*"),
    "dp": re.compile(r"(?i)data_parallel_group|mesh_(dp|dp_replicate|dp_shard|fsdp)|dp|data"),
    "tp": re.compile(r"(?i)tensor_model_parallel_group|mesh_tp|tp|tensor"),
}


def _kind_pattern() -> re.Pattern[str]:
    computes = "|".join(f"(?P<{n.split('-')[0]}>{p})" for n, p in _COMPUTES.items())
    others = "|".join(f"(?P<c{n}>.*{p}.*)" for n, p in enumerate(_COLLECTIVES.values()))
    both = (
        r"(?P<both>nccl\w*SendRecv.*)|(?P<send>(?:gloo|nccl):send.*)|(?P<recv>(?:gloo|nccl):recv.*)"
    )
    return re.compile(f"(?i)(?:{computes}|{both}|(?:gloo:|nccl)(?:{others}))")


_KIND = _kind_pattern()


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
        unknown: names of ranges that say nothing here, with their number.
        is_cut: it ends in the middle.
        only_group: lowest rank of the only process group, -1 where there are several.
    """

    path: Path
    rank: int = -1
    world_size: int = 0
    groups: dict[str, list[int]] = field(default_factory=dict)
    base_ns: int = 0
    events: list[_Event] = field(default_factory=list)
    steps: list[tuple[int, str, int]] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    is_cut: bool = False
    only_group: int = -1


def kineto_files(folder: Path) -> list[Path]:
    """Returns the files in a folder that torch.profiler wrote, by their first bytes."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.name.endswith(ENDINGS) and path.is_file():
            head = next(_chunks(_RankFile(path), HEAD_BYTES), b"")
            if b'"schemaVersion"' in head or b'"traceEvents"' in head:
                found.append(path)
    return found


def read_kineto(folder: Path, pipeline: int | None = None) -> RunTrace:
    """Reads the traces of a job.

    Args:
        folder: one file per rank.
        pipeline: number of pipeline ranks where the files do not say it; ranks of a stage then
            follow each other, as in Megatron-LM.

    Raises:
        TraceError: a file cannot be read or is none of torch.profiler, there are two jobs, or no
            forward and backward is named.
    """
    files = [_read(path) for path in kineto_files(folder)]
    _check_one_job(folder, files)
    notes = [
        f"{one.path.name} ends in the middle; what it has is used" for one in files if one.is_cut
    ]
    rows = [row for one in files for row in _columns(one, *_place(one, pipeline))]
    if not any(row["optype"].endswith("-compute") for row in rows):
        raise TraceError(
            f"{folder}: no range is named as a forward or backward; put torch.profiler."
            "record_function('forward_step') and ('backward_step') around them"
        )
    first = min(row["start_ns"] for row in rows)
    table: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    table["start_ts"] = np.array([start - first for start in table.pop("start_ns")]) / 1e9
    table["duration"] = np.array(table.pop("duration_ns"), dtype=np.int64) / 1e9
    world = max(one.world_size for one in files)
    run = run_of_columns(table, folder, world_size=world)
    unknown = sum((one.unknown for one in files), Counter[str]())
    if unknown:
        listed = ", ".join(f"{name[:60]} ({count})" for name, count in unknown.most_common(6))
        notes.append(f"{len(unknown)} kinds of ranges are of no known kind: {listed}")
    return replace(run, caveats=(*run.caveats, *notes))


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


def _read(path: Path) -> _RankFile:
    one = _RankFile(path)
    held, tokens, has_head = b"", [b""], False
    decode = json.JSONDecoder().raw_decode
    ended = b""
    for chunk in _chunks(one):
        held += chunk
        if not has_head:
            if b'"traceEvents"' not in held:
                if len(held) > MOST_HEAD_BYTES:
                    break
                continue
            _take_head(one, held)
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
    _take_events(one, held, tokens, decode)
    one.is_cut |= b"]" not in ended
    return one


def _take_head(one: _RankFile, held: bytes) -> None:
    head = held[: held.index(b'"traceEvents"')].decode("utf-8", "replace")
    decode = json.JSONDecoder().raw_decode
    info: dict[str, Any] = {}
    if found := re.search(r'"distributedInfo":\s*', head):
        info = decode(head, found.end())[0]
    if found := re.search(r'"baseTimeNanoseconds":\s*(\d+)', head):
        one.base_ns = int(found[1])
    named = re.findall(r"(?:rank|worker)?[_-]?(\d+)", one.path.name)
    one.rank = int(info.get("rank", named[0] if named else 0))
    one.world_size = int(info.get("world_size", 0))
    groups = [g for g in info.get("pg_config", []) if isinstance(g, dict)]
    for purpose, pattern in _GROUPS.items():
        for group in groups:
            words = {str(group.get("pg_desc", "")), str(group.get("pg_name", ""))}
            if any(pattern.fullmatch(word) for word in words) and purpose not in one.groups:
                one.groups[purpose] = sorted(map(int, group.get("ranks", [])))
    if len(groups) == 1 and groups[0].get("ranks"):
        one.only_group = min(map(int, groups[0]["ranks"]))


def _take_events(one: _RankFile, data: bytes, tokens: list[bytes], decode: Any) -> None:
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
        except ValueError:
            one.is_cut = True
            continue
        if event.get("ph") == "X" and "ts" in event:
            _take_event(one, event)


def _take_event(one: _RankFile, event: Mapping[str, Any]) -> None:
    name, category = str(event["name"]), str(event.get("cat", ""))
    start = one.base_ns + round(float(event["ts"]) * 1e3)
    length = round(float(event.get("dur", 0)) * 1e3)
    if step := _STEP.fullmatch(name):
        one.steps.append((int(step[1]), category, start))
        return
    if label := _LABEL.fullmatch(name):
        kind = f"{'forward' if label[3] == 'F' else 'backward'}-{label[2].lower()}"
        one.events.append(_Event(kind, category, start, length, int(label[1]), int(label[4])))
        return
    match = _KIND.fullmatch(name)
    if match is None or _IGNORED.match(name):
        if not _IGNORED.match(name):
            one.unknown[re.sub(r"\d+", "N", name)] += 1
        return
    kind = match.lastgroup or ""
    numbers = [int(group) for group in match.groups() if group and group.isdigit()]
    stage, microbatch = numbers[:2] if len(numbers) >= 2 else (-1, -1)
    arguments = event.get("args", {})
    group = [
        int(rank) for rank in re.findall(r"\d+", str(arguments.get("Process Group Ranks", "")))
    ]
    root = min(group) if group else one.only_group
    if kind == "both":  # one kernel of NCCL sends, receives, or does both
        kind = {"send": "send", "recv": "recv"}.get(
            str(arguments.get("Collective name", "")), "both"
        )
    for words in _COMPUTES:
        if match.groupdict().get(words.split("-")[0]) is not None:
            kind = words
    for number, word in enumerate(_COLLECTIVES):
        if match.groupdict().get(f"c{number}") is not None:
            kind = word
    one.events.append(_Event(kind, category, start, length, stage, microbatch, root))


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
        raise TraceError(
            f"{folder} mixes jobs of {' and '.join(map(str, sorted(sizes)))} ranks; keep the files "
            "of one"
        )


def _place(one: _RankFile, pipeline: int | None) -> tuple[int, int, int]:
    """Returns pipeline rank, number of them, and replica of a rank."""
    world = max(one.world_size, one.rank + 1)
    group = one.groups.get("pp", [])
    if pipeline is not None:
        return one.rank // max(1, world // pipeline), pipeline, one.rank % max(1, world // pipeline)
    if one.rank in group:
        data = one.groups.get("dp", [])
        return group.index(one.rank), len(group), data.index(one.rank) if one.rank in data else 0
    if any(event.kind in _MESSAGES for event in one.events):
        return one.rank, world, 0
    return 0, 1, one.rank


def _columns(one: _RankFile, pp_rank: int, num_ranks: int, dp_rank: int) -> list[dict[str, Any]]:
    """Returns rows of a published table."""
    events = sorted(one.events, key=lambda event: (event.start, -event.length))
    computes = [event for event in events if event.kind.endswith("-compute")]
    host, device = "user_annotation", "gpu_user_annotation"
    line = device if any(event.category == device for event in computes) else host
    has_kernels = any(event.category == "kernel" for event in events)
    labels = [e for e in events if e.kind.endswith(("-send", "-recv")) and e.category == host]
    events = [
        event
        for event in events
        if event.category == (line if event.kind in _COMPUTES or not has_kernels else "kernel")
        and not event.kind.endswith(("-send", "-recv"))
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
    found = computes + [event for event in others if event.kind not in _MESSAGES]
    for end in ("send", "recv"):
        mine = [event for event in others if event.kind in (end, "both")]
        found += _messages(end, mine, [e for e in labels if e.kind.endswith(end)], computes)
    counts: Counter[tuple[int, str]] = Counter()
    for event in found:
        if event.seq < 0:
            event.seq = counts[event.step, event.kind]
            counts[event.step, event.kind] += 1
    chunk = {id(event): max(event.stage, 0) // num_ranks for event in computes}
    return [
        {
            "dp_rank": dp_rank,
            "stage": pp_rank,
            "rank": one.rank,
            "step": event.step,
            "optype": event.kind,
            "start_ns": event.start,
            "duration_ns": event.length,
            "seq_id": event.seq,
            "mc": chunk.get(id(event), -1),
            "gmc": chunk[id(event)] * num_ranks + pp_rank if id(event) in chunk else -1,
            "mb_id": event.microbatch if id(event) in chunk else -1,
            "group": event.root,
        }
        for event in found
    ]


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
        near = int(np.searchsorted(starts, message.start, "right")) - (end == "send")
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
