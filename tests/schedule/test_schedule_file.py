"""Tests reading and writing schedule files, and errors about invalid files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import schedule_file
from megatron.adaptive.schedule.catalog import make_schedule, placement_for, schedule_names
from megatron.adaptive.schedule.schedule import Schedule
from megatron.adaptive.schedule.schedule_file import load, save
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.validate import render_schedule

# This script runs in a separate process, because neither the package nor the tests may need torch.
TORCH_WRITES_ITS_SCHEDULES = """
import sys
from types import SimpleNamespace
import torch
from torch.distributed.pipelining import schedules

def write(name, ranks, chunks, microbatches):
    stages = [
        SimpleNamespace(
            group_size=ranks, group_rank=0, num_stages=ranks * chunks, stage_index=chunk * ranks,
            submod=torch.nn.Identity(), is_first=False, is_last=False, has_backward=True,
            stage_index_to_group_rank=None,
        )
        for chunk in range(chunks)
    ]
    schedule = getattr(schedules, "Schedule" + name)(
        stages, microbatches, loss_fn=lambda output, target: output
    )
    path = f"{sys.argv[1]}/{name}-{ranks}-{chunks}-{microbatches}"
    schedule._dump_csv(path + ".csv", "compute_only")
    schedule._dump_csv(path + "-lowered.csv", "compute_comms")

write("ZBVZeroBubble", 3, 2, 7)
write("ZBVZeroBubble", 4, 2, 3)
write("InterleavedZeroBubble", 4, 1, 8)
write("InterleavedZeroBubble", 2, 2, 4)
write("Interleaved1F1B", 3, 2, 6)
write("Interleaved1F1B", 3, 1, 6)
write("LoopedBFS", 2, 2, 4)
write("DualPipeV", 2, 2, 6)
"""


def v_of_two(ranks: int) -> Placement:
    return Placement(num_ranks=ranks, num_chunks=2, kind="v")


def loaded(tmp_path: Path, text: str, suffix: str = ".json") -> Schedule:
    path = tmp_path / f"mine{suffix}"
    path.write_text(text, encoding="utf-8")
    return load(path)


def refused(tmp_path: Path, text: str, suffix: str = ".json") -> list[str]:
    with pytest.raises(ScheduleError) as caught:
        loaded(tmp_path, text, suffix)
    lines = str(caught.value).splitlines()
    start = f"schedule file {tmp_path / ('mine' + suffix)}: "
    assert lines[0].startswith(start)
    return [lines[0].removeprefix(start), *lines[1:]]


def content(**changes: object) -> str:
    """Returns a valid file for one rank, changed by ``changes``. ``None`` removes an entry."""
    good: dict[str, object] = {
        "version": 1,
        "name": "mine",
        "placement": "loop",
        "ranks": 1,
        "chunks": 1,
        "microbatches": 2,
        "orders": ["F0-0 B0-0 F0-1 B0-1"],
    }
    good.update(changes)
    return json.dumps({key: value for key, value in good.items() if value is not None})


def test_the_examples_of_the_docstring_are_good(tmp_path: Path) -> None:
    assert schedule_file.__doc__ is not None
    examples = re.findall(r"::\n\n((?:    .*\n)+)", schedule_file.__doc__)
    as_json, as_csv = (textwrap.dedent(example) for example in examples)
    assert loaded(tmp_path, as_json).weight_pieces == 1
    assert loaded(tmp_path, as_csv, ".csv").num_microbatches == 2


# The following tests read and write JSON files.


def test_json_is_written_a_rank_a_line(tmp_path: Path) -> None:
    path = tmp_path / "zb.json"
    save(make_schedule("zb-v", v_of_two(2), 1), path)
    assert path.read_text() == (
        '{\n "version": 1,\n "name": "zb-v",\n "placement": "v",\n "ranks": 2,\n "chunks": 2,\n'
        ' "microbatches": 1,\n "orders": [\n'
        '  "F0-0 F1-0 B1-0 W1-0 B0-0 W0-0",\n'
        '  "F0-0 F1-0 B1-0 W1-0 B0-0 W0-0"\n ]\n}\n'
    )


@pytest.mark.parametrize("name", schedule_names())
def test_what_was_saved_is_loaded(name: str, tmp_path: Path) -> None:
    schedule = make_schedule(name, placement_for(name, 3, 2), 6)
    save(schedule, tmp_path / "any.json")
    assert load(tmp_path / "any.json") == schedule


def test_pieces_names_and_defaults(tmp_path: Path) -> None:
    order = "F0-0 B0-0 W0-0 W0-0.1 F0-1 B0-1 W0-1.0 W0-1.1"
    schedule = loaded(tmp_path, content(orders=[order], name=None, placement=None))
    assert schedule.weight_pieces == 2
    assert schedule.name == "mine"
    assert schedule.placement == Placement(num_ranks=1, num_chunks=1)
    assert render_schedule(schedule).endswith("W0-1   W0-1.1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON .Expecting property name"),
        ("[]", "must be keys with values"),
        (content(version=2), "version must be 1.*got 2"),
        (content(ranks=None, orders=None), "ranks is missing"),
        (content(version=None), "version is missing"),
        (content(rank=3), "rank is not a key; the nearest is ranks"),
        (content(ranks="1"), "ranks must be an integer.*got '1'"),
        (content(microbatches=0), "microbatches must be .* got 0"),
        (content(chunks=True), "chunks must be .* got True"),
        (content(placement="x"), "placement must be one of loop, v.*got 'x'"),
        (content(placement=["v"]), r"placement must be .* got \['v'\]"),
        (content(name=3), "name must be .* got 3"),
        (content(orders="F0-0"), "orders must be a list.*got 'F0-0'"),
        (content(orders=[["F0-0"]]), r"orders\[0\] must be text.*got .*"),
        (content(ranks=2), "an order for each of the 2 ranks, got 1"),
        (
            content(microbatches=10**12),
            "require 1000000000000 forward actions per rank.*lists only 4 actions",
        ),
        (content(orders=["F0-0 B0-0 F0_1"]), "rank 0, position 2: 'F0_1' is not an action"),
        (content(orders=["F0-0 B0-0.1"]), "rank 0, position 1: 'B0-0.1' is not an action"),
        (content(orders=["G0-0"]), "'G0-0' is not an action: write F0-3, B0-3, W0-3 or W0-3.1"),
        (content(orders=["F0--1"]), "'F0--1' is not an action"),
    ],
)
def test_bad_json_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        loaded(tmp_path, text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("order", "message", "marked"),
    [
        ("F0-0 B0-0 F0-1", "position 3: the order ends before B0-1", "[missing]"),
        ("F0-0 W0-0 B0-0 F0-1", "position 1: W0-0 cannot be here: its own backward", "[W0-0]"),
    ],
)
def test_an_impossible_order_is_drawn(
    tmp_path: Path, order: str, message: str, marked: str
) -> None:
    lines = refused(tmp_path, content(orders=[order]))
    assert lines[0].startswith(f"schedule mine, rank 0, {message}")
    assert marked in lines[1]


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="none.json: No such file"):
        load(tmp_path / "none.json")
    with pytest.raises(ScheduleError, match=r"x.txt: the file name must end in .json or .csv"):
        load(tmp_path / "x.txt")
    (tmp_path / "latin.csv").write_bytes(b"\xff")
    with pytest.raises(ScheduleError, match="latin.csv: byte 0 is not valid UTF-8"):
        load(tmp_path / "latin.csv")
    schedule = make_schedule("1f1b", Placement(num_ranks=1, num_chunks=1), 1)
    with pytest.raises(ScheduleError, match="the file name must end in .json"):
        save(schedule, tmp_path / "x.csv")
    with pytest.raises(ScheduleError, match="cannot be written: .*No such file"):
        save(schedule, tmp_path / "none" / "x.json")


# The following tests read CSV files.


def test_csv_of_whole_backwards_with_gaps(tmp_path: Path) -> None:
    schedule = loaded(tmp_path, "0F0,0F1,,0B0,,0B1\r\n,1F0,1B0,1F1,1B1\r\n\r\n", ".csv")
    assert schedule.orders == make_schedule("1f1b", Placement(num_ranks=2, num_chunks=1), 2).orders
    assert schedule.weight_pieces == 0


def test_csv_of_split_backwards_in_a_v(tmp_path: Path) -> None:
    text = "0F0,3F0,3B0, ,0I0,0W0\n1F0,2F0,2I0,1B0,2W0\n"
    schedule = loaded(tmp_path, text, ".csv")
    assert schedule.placement == v_of_two(2)
    assert [" ".join(map(str, order)) for order in schedule.orders] == [
        "F0-0 F1-0 B1-0 W1-0 B0-0 W0-0",
        "F0-0 F1-0 B1-0 B0-0 W0-0 W1-0",
    ]


def test_csv_with_communication_and_overlap(tmp_path: Path) -> None:
    text = (
        "0UNSHARD,0F0,0SEND_F0,(0F1;0B0)OVERLAP_F_B,0WAIT_SEND_F0,0RECV_B0,0B1,0REDUCE_GRAD,"
        "0WAIT_REDUCE_GRAD,0RESHARD\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1WAIT_SEND_B0\n"
    )
    schedule = loaded(tmp_path, text, ".csv")
    assert schedule.orders == make_schedule("1f1b", Placement(num_ranks=2, num_chunks=1), 2).orders


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0,0X0", "row 1, column 3: a cell must be STAGE, .* got '0X0'"),
        ("0F0,0B0\n1F0,F1", "row 2, column 2: a cell must be .* got 'F1'"),
        ("0F0,0B", "row 1, column 2: a cell must be .* got '0B'"),
        ("(0F0;0B0)OVERLAP", r"row 1, column 1: .* got '\(0F0;0B0\)OVERLAP'"),
        ("(0F0;0Q0)OVERLAP_F_B", r"row 1, column 1: .* got '\(0F0;0Q0\)OVERLAP_F_B'"),
        ("", "the file contains no actions"),
        ("0UNSHARD\n\n", "the file contains no actions"),
        ('"0F0', "the file is not valid CSV: unexpected end of data"),
        ("0F0,0B0\n0F1,0B1", "a stage must be in a single row, but stage 0 is in rows 1 and 2"),
        (
            "0F0,0B0\n2F0,2B0",
            "every row must have the same .* there are 2 stages up to 2 in 2 rows",
        ),
        ("0F0,3F0\n1F0\n2F0", "4 stages up to 3 in 3 rows"),
        (
            "0F0,2F0\n1F0,5F0\n3F0,4F0",
            "in a loop or a V, got 0 in row 1, 1 in row 2, 2 in row 1, 3 in",
        ),
        ("0F999999,0B999999", "require 1000000 forward actions per rank.*lists only 2 actions"),
    ],
)
def test_bad_csv_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        loaded(tmp_path, text, ".csv")
    assert "\n" not in str(caught.value)


def test_weight_gradients_only_for_some_are_drawn(tmp_path: Path) -> None:
    lines = refused(tmp_path, "0F0,0I0,0W0,0F1,0I1\n", ".csv")
    assert lines[0].endswith("position 5: the order ends before W0-1: list each action once")


@pytest.fixture(scope="module")
def by_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch")
    done = subprocess.run(
        [sys.executable, "-c", TORCH_WRITES_ITS_SCHEDULES, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    if "No module named 'torch'" in done.stderr:
        pytest.skip("torch is not installed")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    ("name", "placement", "splits"),
    [
        ("ZBVZeroBubble-3-2-7", v_of_two(3), True),
        ("ZBVZeroBubble-4-2-3", v_of_two(4), True),
        ("InterleavedZeroBubble-4-1-8", Placement(num_ranks=4, num_chunks=1), True),
        ("InterleavedZeroBubble-2-2-4", Placement(num_ranks=2, num_chunks=2), True),
        ("Interleaved1F1B-3-2-6", Placement(num_ranks=3, num_chunks=2), False),
        ("Interleaved1F1B-3-1-6", Placement(num_ranks=3, num_chunks=1), False),
        ("DualPipeV-2-2-6", v_of_two(2), True),
    ],
)
def test_what_torch_writes_is_read(
    by_torch: Path, name: str, placement: Placement, splits: bool
) -> None:
    schedule = load(by_torch / f"{name}.csv")
    assert schedule.placement == placement
    assert schedule.num_microbatches == int(name.split("-")[-1])
    assert schedule.weight_pieces == int(splits)
    assert load(by_torch / f"{name}-lowered.csv").orders == schedule.orders


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("ZBVZeroBubble-3-2-7", "zb-v"),
        ("ZBVZeroBubble-4-2-3", "zb-v"),
        ("InterleavedZeroBubble-4-1-8", "zb-h1"),
        ("Interleaved1F1B-3-2-6", "interleaved"),
    ],
)
def test_torch_has_the_same_orders(by_torch: Path, name: str, schedule: str) -> None:
    by_torch_file = load(by_torch / f"{name}.csv")
    made = make_schedule(schedule, by_torch_file.placement, by_torch_file.num_microbatches)
    assert made.orders == by_torch_file.orders


def test_descending_backwards_are_refused(by_torch: Path) -> None:
    with pytest.raises(ScheduleError, match="position 8: B1-3 cannot be here: B1-0 comes before"):
        load(by_torch / "LoopedBFS-2-2-4.csv")


@given(text=st.text(alphabet="0123FBIW();,-.\n OVERLAP_", max_size=40))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_text(text, encoding="utf-8")
    try:
        schedule = load(path)
    except ScheduleError:
        return
    assert isinstance(schedule, Schedule)
