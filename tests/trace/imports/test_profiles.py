"""Tests the import of files that torch.profiler wrote.

The files in ``profiles`` were created by ``make_profiles``.
"""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.cli.trace import import_run
from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.imports import profiles
from megatron.adaptive.trace.imports.profiles import read_profiles
from megatron.adaptive.trace.locate import load_run
from megatron.adaptive.trace.span_columns import match_messages
from megatron.adaptive.trace.whatif.answers import what_if

from ...multiprocess.launch import run_ranks

PROFILES = Path(__file__).parent / "profiles"
MICROBATCHES, STEPS = 4, 3


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Returns a copy of the profiles of the loop ``plain``, which tests may change."""
    return Path(shutil.copytree(PROFILES / "plain", tmp_path / "job"))


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()))))


@pytest.mark.parametrize(("name", "chunks"), [("plain", 1), ("pipelining", 2)])
def test_a_real_profile_has_every_action_and_message(name: str, chunks: int) -> None:
    run = load_run(PROFILES / name)
    assert (run.world_size, run.num_ranks, run.num_chunks) == (2, 2, chunks)
    assert run.complete_iterations() == (1, 2, 3)
    assert not run.notes()
    tables = {rank: trace.table([2]) for rank, trace in run.ranks.items()}
    for table in tables.values():
        for kind in ("F", "B"):
            assert table.where(kind).sum() == chunks * MICROBATCHES
        assert table.where("optimizer").sum() == 1
        assert table.where("collective").sum() == 2 * chunks
    assert len(match_messages(tables)) == 2 * (2 * chunks - 1) * MICROBATCHES
    answers = what_if(run)
    assert not answers.notes
    assert answers.simulated_s.shape == (STEPS,)
    assert (answers.simulated_s < answers.recorded_s * 1.02).all()


@pytest.mark.multiprocess
def test_three_lines_around_a_loop_record_it(tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("recorded_loop.py"))
    folder, log = tmp_path / "recorded", tmp_path / "log.txt"
    status = run_ranks([program, str(folder)], world_size=2, log=log, limit_s=120)
    assert status == 0, log.read_text()
    assert import_run([str(folder), "--output", str(tmp_path / "traces")]) == 0
    run = load_run(tmp_path / "traces")
    assert (run.world_size, run.num_ranks, len(run.iterations)) == (2, 1, 3)
    for trace in run.ranks.values():
        table = trace.table([run.iterations[1]])
        counts = [int(table.where(kind).sum()) for kind in ("F", "B", "optimizer", "collective")]
        assert counts == [2, 2, 1, 4]
    answers = what_if(run)
    assert run.ranks[1].header.dp_rank == 1
    assert answers.slowest == (1,)
    assert answers.repairs[0].description.startswith(
        "rank 1 (stage 0, replica 1) as fast as others"
    )
    assert "--balance-replicas" in answers.repairs[0].flag


def test_the_size_of_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_profiles(PROFILES / "plain").ranks[1].table().spans()
    monkeypatch.setattr(profiles, "CHUNK_BYTES", 700)
    monkeypatch.setattr(profiles._chunks, "__defaults__", (700,))
    assert read_profiles(PROFILES / "plain").ranks[1].table().spans() == whole


def test_a_file_that_is_cut_off_is_used_as_far_as_it_goes(copied: Path) -> None:
    path = copied / "rank0.json.gz"
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    run = read_profiles(copied)
    assert "rank0.json.gz is truncated; only the events that it still has are used" in run.notes()
    assert run.ranks[0].iterations


def test_missing_ranks_and_clocks_apart_are_said(copied: Path) -> None:
    later = b'"baseTimeNanoseconds": 9'
    edit(copied / "rank1.json.gz", lambda text: text.replace(b'"baseTimeNanoseconds": 1', later))
    notes = read_profiles(copied).notes()
    assert len(notes) == 1
    assert notes[0].startswith("clocks of ranks 1 are off by up to 8,000,000,000 s")
    (copied / "rank1.json.gz").unlink()
    assert any("no trace of ranks 1" in note for note in read_profiles(copied).notes())


def test_two_jobs_and_files_of_others_are_refused(copied: Path) -> None:
    shutil.copy(copied / "rank1.json.gz", copied / "again_rank1.json.gz")
    with pytest.raises(
        TraceError, match=r"again_rank1.*rank1.*both belong to rank 1; keep only the files of one"
    ):
        read_profiles(copied)
    edit(
        copied / "again_rank1.json.gz",
        lambda text: text.replace(b'"rank": 1, "world_size": 2', b'"rank": 2, "world_size": 8'),
    )
    with pytest.raises(TraceError, match="contains jobs of 2 and 8 ranks"):
        read_profiles(copied)


def test_a_loop_without_names_is_advised(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in copied.iterdir():
        edit(path, lambda text: text.replace(b"ward_step", b"_thing"))
    with pytest.raises(TraceError, match=r"record_function\('forward_step'\)"):
        read_profiles(copied)
    for path in copied.iterdir():
        edit(path, lambda text: text.replace(b"back_thing", b"backward_step"))
    assert import_run([str(copied), "--output", str(copied / "traces")]) == 0
    assert "unknown names are ignored: for_thing (24)" in capsys.readouterr().err


def range_of(name: str, start_us: float, length_us: float, category: str, **more: Any) -> Any:
    event = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7}
    return {**event, "ts": start_us, "dur": length_us, "args": more}


def test_kernels_of_nccl_and_ranges_on_the_device_count(tmp_path: Path) -> None:
    """Checks that ranges on the device and NCCL kernels are read, for two stages and two replicas.

    The test writes the JSON files without spaces.
    """
    for rank in range(4):
        stage = rank // 2
        peers = [2 * stage, 2 * stage + 1]
        config = [
            {"pg_desc": "PIPELINE_MODEL_PARALLEL_GROUP", "ranks": [rank % 2, rank % 2 + 2]},
            {"pg_desc": "DATA_PARALLEL_GROUP", "ranks": peers},
        ]
        device = "gpu_user_annotation"
        events = [
            range_of("ProfilerStep#5", 0, 100, device),
            # A range on the host shows when work was launched, not when it ran. It must be ignored
            # if there are ranges on the device.
            range_of("forward_step", 0, 1, "user_annotation"),
            range_of("forward_step", 10 + 20 * stage, 10, device),
            range_of("backward_step", 60 - 20 * stage, 20 - 5 * stage, device),
            range_of(
                "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
                *((20, 40) if stage == 0 else (5, 25)),
                "kernel",
                **{"Collective name": "recv" if stage else "coalesced"},
            ),
            range_of(
                "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                81,
                9,
                "kernel",
                **{"Process Group Ranks": str(peers)},
            ),
            range_of("ncclDevKernel_Unheard_Of()", 95, 1, "kernel"),
        ]
        if stage:
            events.append(
                range_of("ncclDevKernel_SendRecv()", 55, 5, "kernel", **{"Collective name": "send"})
            )
        data = {
            "schemaVersion": 1,
            "distributedInfo": {"rank": rank, "world_size": 4, "pg_config": config},
            "traceEvents": events,
        }
        (tmp_path / f"r{rank}.json").write_text(json.dumps(data, separators=(",", ":")))
    run = read_profiles(tmp_path)
    assert (run.num_ranks, run.iterations) == (2, (5,))
    first, last = run.ranks[0], run.ranks[3]
    assert (first.header.pp_rank, last.header.pp_rank, last.header.dp_rank) == (0, 1, 1)
    assert [span.duration_ns for span in first.spans(5) if span.action == "F"] == [10_000]
    assert [span.peer for span in last.spans(5) if span.action == "collective"] == [2]
    assert any("ncclDevKernel_Unheard_Of() (4)" in note for note in run.notes())
    messages = match_messages({rank: trace.table() for rank, trace in run.ranks.items()})
    assert len(messages) == 4
    assert not what_if(run).notes[1:]


SPANS = PROFILES / "spans"


@pytest.mark.parametrize("form", ["console", "otlp", "otlp/spans.jsonl.gz"])
def test_spans_of_megatron_lm_become_a_run(form: str) -> None:
    run = load_run(SPANS / form)
    assert (run.world_size, run.num_ranks, run.num_chunks) == (2, 2, 1)
    assert run.complete_iterations() == (1, 2, 3)
    assert not run.notes()
    tables = {rank: trace.table([2]) for rank, trace in run.ranks.items()}
    for table in tables.values():  # The spans of the evaluation after the step must not be counted.
        for kind, count in (("F", 4), ("B", 4), ("optimizer", 1), ("collective", 1)):
            assert table.where(kind).sum() == count
    assert len(match_messages(tables)) == 2 * MICROBATCHES
    assert what_if(run).simulated_s.shape == (STEPS,)


def test_forms_of_spans_say_the_same() -> None:
    console, otlp = (load_run(SPANS / form).ranks[1].table([3]) for form in ("console", "otlp"))
    assert console.microbatch.tolist() == otlp.microbatch.tolist()
    # The console exporter rounds times to microseconds, so the times may differ slightly.
    assert abs(console.start_ns - otlp.start_ns).max() <= 1000


def spans_with(folder: Path, change: Callable[[str], str]) -> Path:
    folder.mkdir()
    text = gzip.decompress((SPANS / "otlp" / "spans.jsonl.gz").read_bytes()).decode()
    (folder / "spans.jsonl").write_text(change(text))
    return folder


def test_spans_that_lack_something_are_said_or_refused(tmp_path: Path) -> None:
    def of_two(text: str) -> str:
        first, second = text.splitlines()
        return "\n".join([first, second.replace("job-7", "job-8")])

    with pytest.raises(TraceError, match="contains jobs job-7 .* and job-8"):
        load_run(spans_with(tmp_path / "two", of_two))
    coarse = spans_with(tmp_path / "coarse", lambda text: text.replace("microbatch.", "layer."))
    with pytest.raises(TraceError, match="MEGATRON_OTEL_SPAN_GROUPS=per_step,microbatch"):
        load_run(coarse)
    loaded = load_run(
        spans_with(tmp_path / "other", lambda text: text.replace("grad_sync.finish", "new.thing"))
    )
    assert any(
        "unknown names are ignored: megatron.new.thing (6)" in note for note in loaded.notes()
    )
    cut = load_run(spans_with(tmp_path / "cut", lambda text: text[: len(text) * 3 // 4]))
    assert "spans.jsonl is truncated; only the events that it still has are used" in cut.notes()
    assert any("no trace of ranks 1" in note for note in cut.notes())


# The following tests use file names, file formats, and sample events of other programs.


def _loop(shift_us: float = 0, names: tuple[str, str] = ("forward_step", "backward_step")) -> Any:
    """Returns the events of a rank that runs two steps with two microbatches each.

    The events do not contain the rank. ``shift_us`` is the start of the first step in microseconds.
    ``names`` contains the names of the forward and backward ranges.
    """
    events = []
    for step in range(2):
        begin = shift_us + 1000 * step
        events.append(range_of(f"ProfilerStep#{step}", begin, 700, "user_annotation"))
        for number in range(2):
            start = begin + 100 * number
            events.append(range_of(names[0], start, 100, "user_annotation"))
            events.append(range_of(names[1], start + 200 + 100 * number, 200, "user_annotation"))
        events.append(range_of("Optimizer.step#Adam.step", begin + 650, 50, "user_annotation"))
    return events


def _write(path: Path, events: Any, **head: Any) -> None:
    path.write_text(json.dumps({"schemaVersion": 1, **head, "traceEvents": events}))


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["vm42_991.1718000000000.pt.trace.json"], [0]),
        (["profile_2024-06-11.json"], [0]),
        (["node7_12.1718000000000.pt.trace.json", "node7_9.1718000000000.pt.trace.json"], [0, 1]),
        (
            ["gpu01_100.1718000000000.pt.trace.json", "gpu02_100.1718000000000.pt.trace.json"],
            [0, 1],
        ),
        (["host3_rank1.1718000000000.pt.trace.json", "host3_rank0.17180.pt.trace.json"], [0, 1]),
        (["job_Rank-1_2024.json", "job_Rank-0_2023.json"], [0, 1]),
        (["worker1.1718000000000.pt.trace.json", "worker0.1718000000000.pt.trace.json"], [0, 1]),
        (["frank7_1.1718000000000.pt.trace.json"], [0]),
        (["trace_10.json", "trace_9.json"], [0, 1]),
    ],
)
def test_numbers_of_hosts_and_dates_are_no_ranks(
    names: list[str], ranks: list[int], tmp_path: Path
) -> None:
    for name in names:
        _write(tmp_path / name, _loop())
    run = read_profiles(tmp_path)
    assert sorted(run.ranks) == ranks
    assert not any("no trace of ranks" in note for note in run.notes())


def test_what_a_file_says_of_its_rank_counts_before_its_name(tmp_path: Path) -> None:
    for rank in range(2):
        info = {"backend": "gloo", "rank": rank, "world_size": 2}
        _write(tmp_path / f"rank{1 - rank}.json", _loop(rank * 10), distributedInfo=info)
    run = read_profiles(tmp_path)
    first = {rank: trace.table().spans()[0].start_ns for rank, trace in run.ranks.items()}
    assert first[0] < first[1]


@pytest.mark.parametrize("info", [{}, {"distributedInfo": {"rank": 0, "world_size": 1}}])
def test_files_of_one_process_follow_each_other(info: dict[str, Any], tmp_path: Path) -> None:
    """Checks that steps are numbered consecutively if a process writes several files.

    Each file starts at step 0, as with ``repeat=2`` in the schedule of the profiler.
    """
    _write(tmp_path / "h_1.1718000009999.pt.trace.json", _loop(9e6), **info)
    _write(tmp_path / "h_1.1718000000000.pt.trace.json", _loop(), **info)
    run = read_profiles(tmp_path)
    assert list(run.ranks) == [0]
    assert run.complete_iterations() == (0, 1, 2, 3)
    assert not run.notes()


@pytest.mark.parametrize("name", ["S(1): \x01 <module>", "load C:\\data\\quit"])
def test_an_unreadable_event_is_named_and_the_rest_taken(name: str, tmp_path: Path) -> None:
    """Checks that an event with invalid characters is omitted and the other events are read.

    The invalid characters are a control character and backslashes that are not escaped.
    """
    strange = range_of("STRANGE", 710, 5, "user_annotation")
    text = json.dumps({"schemaVersion": 1, "traceEvents": [*_loop()[:6], strange, *_loop()[6:]]})
    (tmp_path / "rank0.json").write_text(text.replace("STRANGE", name))
    run = read_profiles(tmp_path)
    assert run.complete_iterations() == (0, 1)
    (note,) = run.notes()
    shown = name.replace("\x01", "\\x01")
    assert note == f"rank0.json: 1 events that cannot be read are left out: {shown} (1)"


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("dur", -1, "with a negative duration"),
        ("dur", float("nan"), "whose times are not numbers"),
        ("dur", "soon", "whose times are not numbers"),
        ("ts", 1e300, "whose times are not numbers"),
        ("ts", None, "whose times are not numbers"),
    ],
)
def test_events_with_impossible_times_are_counted(
    field: str, value: Any, reason: str, tmp_path: Path
) -> None:
    strange = {**range_of("forward_step", 5, 1, "user_annotation"), field: value}
    _write(tmp_path / "rank0.json", [*_loop(), strange])
    run = read_profiles(tmp_path)
    (note,) = run.notes()
    assert note == f"rank0.json: 1 events {reason} are left out: forward_step (1)"
    assert run.complete_iterations() == (0, 1)


@pytest.mark.parametrize("before", ["", "\n ", "\ufeff"])
def test_a_list_of_events_is_read(before: str, tmp_path: Path) -> None:
    """Checks that a plain list of events can be read, which is Chrome's format without a header."""
    (tmp_path / "rank0.json").write_text(before + json.dumps(_loop()))
    run = read_profiles(tmp_path)
    assert run.complete_iterations() == (0, 1)
    assert not run.notes()


@pytest.mark.parametrize(
    "names",
    [("## forward ##", "## backward ##"), ("[Forward]", "[Backward]"), ("--forward_step", "*")],
)
def test_decorated_ranges_are_known(names: tuple[str, str], tmp_path: Path) -> None:
    _write(tmp_path / "rank0.json", _loop(names=names))
    table = read_profiles(tmp_path).ranks[0].table([0])
    assert table.where("F").sum() == 2


def test_a_refusal_lists_the_ranges(tmp_path: Path) -> None:
    _write(tmp_path / "rank0.json", _loop(names=("to_the_end", "and_back\x1b[1m")))
    with pytest.raises(TraceError, match="its ranges are to_the_end .*, and_back") as caught:
        read_profiles(tmp_path)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    "head",
    [
        {"distributedInfo": {"rank": "two"}},
        {"distributedInfo": {"rank": 10**12}},
        {"distributedInfo": [1]},
        {"distributedInfo": {"rank": 0, "pg_config": 3}},
        {"baseTimeNanoseconds": 10**40},
    ],
)
def test_an_impossible_head_is_named(head: dict[str, Any], tmp_path: Path) -> None:
    _write(tmp_path / "rank0.json", _loop(), **head)
    with pytest.raises(TraceError, match="rank0.json: rank and job cannot be read"):
        read_profiles(tmp_path)
