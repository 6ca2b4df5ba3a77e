"""Tests that malicious input causes one error line and status 2, without control characters."""

from __future__ import annotations

import json
import re
from pathlib import Path
from zipfile import ZipFile

import pytest

from megatron.adaptive import __main__ as program
from megatron.adaptive.cluster.job_state_file import read_state, render_state
from tests.soak.commands import CASES, HOSTILE, complaint, write_files
from tests.support.synthetic_trace import SyntheticRun, write_synthetic

# Tests in this process omit this option, because the program reads it after the ranks have
# connected, and a process can connect only once.
LATE = "--replay-schedule"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
SAMPLE = {"unix_s": 1.0, "processes": [], "gpus": []}
WRONG = [[], {}, "x", None, -1, 1e300, True, [[1]], {"a": HOSTILE}, HOSTILE, 2**63]


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> int:
    """Runs a subcommand with ``arguments`` in this process, and returns its exit status."""
    monkeypatch.setattr("sys.argv", ["megatron.adaptive", *arguments])
    try:
        return program.main()
    except SystemExit as end:
        return int(end.code or 0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    return folder


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("command", "part"), [case for case in CASES if LATE not in case[0]])
def test_what_is_wrong_ends_with_one_line(
    command: str,
    part: str,
    files: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(files)
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    arguments = (word.replace("{f}", str(files)) for word in command.split(" "))
    status = run(capsys, monkeypatch, *arguments)
    assert complaint(status, capsys.readouterr().err, part) == ""


def test_names_in_traces_reach_no_terminal_sheet_or_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = tmp_path / f"a{HOSTILE}" / "traces"
    write_synthetic(traces, SyntheticRun(num_ranks=2, num_microbatches=4, iterations=3))
    for path in traces.glob("trace_rank_*"):
        head, _, rest = path.read_text().partition("\n")
        path.write_text(
            json.dumps({**json.loads(head), "run": HOSTILE, "schedule": HOSTILE}) + "\n" + rest
        )
    views = [
        "--output-dir",
        str(tmp_path / "views"),
        "--format",
        "xlsx,html,png,tensorboard,perfetto",
    ]
    for arguments in (
        ["trace", str(traces), *views],
        ["trace", "diagnose", str(traces)],
        ["job", "top", str(traces), "--once"],
    ):
        assert run(capsys, monkeypatch, *arguments) == 0
        said = capsys.readouterr()
        # The program uses colours only on a terminal.
        assert CONTROLS.findall(said.out + said.err) == []
    (sheet,) = (tmp_path / "views").glob("*.xlsx")
    with ZipFile(sheet) as book:
        texts = "".join(book.read(name).decode() for name in book.namelist() if name.endswith("l"))
    assert CONTROLS.findall(texts) == []
    assert "\\x1b]0;owned" in texts
    (page,) = (tmp_path / "views").glob("*.html")
    text = page.read_text()
    assert "\\\\x1b]0;owned" in text or "\\\\u001b]0;owned" in text
    data = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.S)
    assert CONTROLS.findall("".join(str(json.loads(block)) for block in data)) == []


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_a_job_whose_files_hold_anything_is_reported(
    wrong: object,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = tmp_path / "logs" / "job"
    job.mkdir(parents=True)
    sound = {"unix_ns": 1, "iteration": 1, "step_ms": 1.0, "loss": 1.0, "tokens_per_s": 1.0}
    start = {"unix_ns": 1, "total_iterations": 9, "start_iteration": 0}
    lines = [wrong, start, sound]
    lines += [{**line, name: wrong} for line in (start, sound) for name in line]
    (job / "progress.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    use = (
        [{"memory_bytes": 1, "cpu_percent": 1}],
        [{"index": 0, "used_percent": 1, "memory_used_bytes": 1}],
    )
    samples = [wrong, {**SAMPLE, "processes": use[0], "gpus": use[1]}]
    samples += [{**SAMPLE, name: value} for name in SAMPLE for value in (wrong, [wrong])]
    samples += [{**SAMPLE, "gpus": [{**use[1][0], name: wrong}]} for name in (*use[1][0], "pids")]
    (job / "n.gpu").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    (job / "n.out").write_text(f"=== {HOSTILE} node 0 starts\n{HOSTILE}\nerror: {HOSTILE}\n")
    record = {"conf": {}, "flags": [], "processes": [1], "started_unix_s": 1, "world_size": 1}
    for name in (*record, ""):
        record_text = json.dumps({**record, name: wrong} if name else wrong)
        (job / "run.json").write_text(record_text)
        for arguments in (
            ["job", "status", "job", "--log-dir", str(job.parent)],
            ["job", "top", str(job), "--once"],
        ):
            assert run(capsys, monkeypatch, *arguments) in (0, 1)
            said = capsys.readouterr()
            assert CONTROLS.findall(said.out + said.err) == []
    assert run(capsys, monkeypatch, "job", "report", str(job)) == 0
    state = tmp_path / "elastic" / "state.json"
    state.parent.mkdir()
    whole = {
        "format": 1, "status": "x", "iteration": 1, "total_iterations": 2, "unix_ns": 1,
        "checkpoint_iteration": 1, "lost_steps": 0, "manager": {"pid": 1, "host": "h"},
        "machines": [{"name": "n", "status": "s", "slots": 1, "why": "w"}],
        "epochs": [{"epoch": 1, "shape": "s", "nodes": ["n"], "resumed_iteration": 0,
                    "reason": "r", "lost_steps": 0, "phases_s": {}, "step_s": 1.0}],
    }  # fmt: skip
    state.write_text(json.dumps(whole))
    assert "epochs" in render_state(read_state(tmp_path))
    for name in whole:
        state.write_text(json.dumps({**whole, name: wrong}))
        status = run(capsys, monkeypatch, "train", "elastic", "--status", str(tmp_path))
        said = capsys.readouterr()
        assert status in (0, 2)
        assert CONTROLS.findall(said.out + said.err) == []
