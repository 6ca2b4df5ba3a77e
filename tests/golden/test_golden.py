"""Tests that the current code can read the files of an earlier version (see ``cases.py``)."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# The test reads one kind of file with this module, and all other files with commands of the
# package.
from megatron.adaptive.planner.measured_module import MeasuredModule
from tests.multiprocess.launch import forking

from . import cases
from .cases import LIMIT_S, Job, run_jobs

# This file contains results of the same runs on several machines. On a machine that is not listed,
# results are compared with those of the first machine, with a tolerance.
MACHINES: list[dict[str, Any]] = json.loads((cases.FILES / "expected.json").read_text())
EXPECTED = next(
    (answers for answers in MACHINES if answers["machine"] == cases.machine()), MACHINES[0]
)
ANSWERS: dict[str, Any] = json.loads((cases.FILES / "answers.json").read_text())
# This is a relative tolerance. The order in which numbers are summed depends on the processor and
# the version of torch, so results may differ slightly.
NEAR = 1e-5
NEWER = "newer"
REFUSED = {
    "refused-checkpoint": (1, f"{cases.MOCK} --load {NEWER}-single --exit-on-missing-checkpoint"),
    "refused-order": (
        2,
        f"{cases.MOCK} {cases.CHUNKS} --pipeline-schedule file --schedule-file {NEWER}-order.json",
    ),
    "refused-record": (2, f"{cases.MOCK} {cases.CHUNKS} --replay-schedule {NEWER}-record.json"),
    "refused-tokens": (
        1,
        cases.RUNS["run-corpus"][1].replace("corpus/corpus_text", f"{NEWER}-corpus/corpus_text"),
    ),
}
REFUSED_PIPELINE = Job(
    name="refused-pipeline",
    script={
        **cases.PIPELINES["pipeline-1-in-2"][1],
        "pipeline": {"pipeline_size": 1, "micro_batch_size": 2},
        "report_dir": "report-refused",
        "load": f"{NEWER}-pipeline-1",
    },
)
# These jobs read files of a version that is too new, and must reject them.
REFUSED_BY_RANKS = {
    f"{NEWER}-single/iter_0000002": "refused-checkpoint",
    f"{NEWER}-pipeline-1/step_00000003": "refused-pipeline",
    f"{NEWER}-order.json": "refused-order",
    f"{NEWER}-record.json": "refused-record",
    f"{NEWER}-corpus/corpus_text_document.idx": "refused-tokens",
}


def change(path: Path, key: str) -> Path:
    """Copies a JSON file, increases its version ``key``, and returns the path of the copy."""
    copy = path.with_name(f"{NEWER}-{path.name}")
    shutil.copy(path, copy)
    raise_version(copy, key)
    return copy


def raise_version(path: Path, key: str, by: int = 1) -> None:
    content = json.loads(path.read_text())
    content[key] = content.get(key, 1) + by
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with all golden files, and with copies that claim a later format version."""
    folder = tmp_path_factory.mktemp("golden")
    cases.unpack(folder)
    for name in ("single", "pipeline-1", "corpus"):
        shutil.copytree(folder / name, folder / f"{NEWER}-{name}")
    raise_version(folder / f"{NEWER}-single" / "iter_0000002" / "manifest.json", "version", 2)
    raise_version(folder / f"{NEWER}-pipeline-1" / "step_00000003" / "pipeline.json", "format", 2)
    index = folder / f"{NEWER}-corpus" / "corpus_text_document.idx"
    with index.open("r+b") as file:
        file.seek(9)
        file.write(struct.pack("<Q", 2))
    change(folder / "order.json", "version")
    change(folder / "record.json", "version")
    return folder


@pytest.fixture
def here(golden: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Changes to the folder of golden files, and removes environment variables of launchers."""
    monkeypatch.chdir(golden)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    return golden


@pytest.fixture(scope="module", autouse=True)
def node() -> Iterator[None]:
    """Sets the name of the node whose disk contains the golden checkpoint parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESTS_ALL_MOCK_DATA", "1")
        patch.setenv("MEGATRON_ADAPTIVE_NODE", "node-a")
        yield


@pytest.fixture(scope="module")
def ran(golden: Path) -> tuple[dict[str, tuple[int | None, str]], dict[str, Any]]:
    """Runs all jobs. Returns their output, and the results of the jobs that succeeded."""
    jobs = [*cases.run_jobs_of(cases.RUNS), *cases.resume_jobs(), *cases.pipeline_jobs()]
    said = run_jobs(golden, [*jobs, *cases.run_jobs_of(REFUSED), REFUSED_PIPELINE])
    done = [job for job in jobs if said[job.name][0] == 0]
    return said, cases.figures(golden, done)


def same(results: Any, expected: Any) -> None:
    """Checks that ``results`` equal ``expected``, except for rounding on an unlisted machine.

    Checksums of loaded data must always be equal.
    """
    if results == expected:
        return
    assert results["loaded"] == expected["loaded"] if "loaded" in expected else True
    assert EXPECTED["machine"] != cases.machine(), (results, expected)
    for key in ("losses", "grad_norms"):
        assert results[key].keys() == expected[key].keys()
        for step, number in expected[key].items():
            measured, other = float.fromhex(results[key][step]), float.fromhex(number)
            assert math.isclose(measured, other, rel_tol=NEAR), (key, step, measured, other)


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [name for name in EXPECTED["runs"] if name != "elastic-script"])
def test_losses_gradients_and_loaded_tensors_are_what_they_were(ran: Any, name: str) -> None:
    said, results = ran
    status, text = said[name]
    assert status == 0, text
    same(results[name], EXPECTED["runs"][name])


@pytest.mark.long
@pytest.mark.multiprocess
def test_parts_on_a_nodes_own_disk_are_copied_where_they_belong(ran: Any, golden: Path) -> None:
    said, _ = ran
    assert "continuing the copy of iteration 2 to" in said["resume-local"][1]
    assert (golden / "shared" / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert (golden / "shared" / "iter_0000002" / "manifest.json").is_file()


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("path", REFUSED_BY_RANKS)
def test_ranks_refuse_a_version_to_come(ran: Any, path: str) -> None:
    status, text = ran[0][REFUSED_BY_RANKS[path]]
    assert status != 0
    lines = [
        line for line in text.splitlines() if re.match(r"(?:rank \d+: )?error: |.*Error: ", line)
    ]
    assert len(lines) == 1, text
    assert path in lines[0]
    assert re.search(r"\b2\b", lines[0].replace(path, "")), lines[0]


@pytest.mark.parametrize("name", cases.ANSWERS)
def test_a_command_reads_what_it_read(here: Path, name: str) -> None:
    expected = dict(ANSWERS[name]) if isinstance(ANSWERS[name], dict) else ANSWERS[name]
    if name == "status":
        # This job wrote its progress only to logs, from which progress is no longer read.
        for figure in "iteration iterations iteration_ms tokens_per_s is_over effective".split():
            del expected[figure]
    alike(cases.answer(name), expected, name)


def alike(actual: Any, expected: Any, where: str) -> None:
    """Checks that JSON values are equal except for rounding. ``where`` is shown in errors."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        # Later versions may add keys, so only the expected keys are compared.
        assert set(actual) >= set(expected), where
        for key, value in expected.items():
            alike(actual[key], value, f"{where}.{key}")
    elif isinstance(expected, list) and isinstance(actual, list):
        assert len(actual) == len(expected), (where, actual, expected)
        for index, value in enumerate(expected):
            alike(actual[index], value, f"{where}[{index}]")
    elif isinstance(expected, float) and isinstance(actual, (int, float)):
        assert math.isclose(actual, expected, rel_tol=1e-9, abs_tol=1e-12), (
            where,
            actual,
            expected,
        )
    else:
        assert actual == expected, where


def test_profiles_are_merged_and_made_of_timed_pieces(here: Path) -> None:
    arguments = ["profile", "--merge", "profile.json", "profile.json", "--output", "merged.json"]
    assert cases.command(arguments)[0] == 0
    merged, measured = (json.loads(Path(n).read_text()) for n in ("merged.json", "profile.json"))
    assert merged["layers"] == measured["layers"]
    assert merged["links"] == measured["links"]
    arguments = [
        "profile",
        "--cut-points",
        "pieces.csv",
        "--name",
        "pieces",
        "--output",
        "made.json",
    ]
    assert cases.command(arguments)[0] == 0
    assert json.loads(Path("made.json").read_text()) == json.loads(Path("pieces.json").read_text())


def test_a_corpus_is_found(here: Path) -> None:
    status, said, errors = cases.command(cases.CORPUS)
    assert status == 0, errors
    assert said.startswith("corpus found: ")


def test_the_report_of_a_job_is_made_of_its_files(here: Path) -> None:
    status, _, errors = cases.command(["job", "report", "logs/pods", "--output", "report.html"])
    assert status == 0, errors
    page = Path("report.html").read_text()
    for word in ("PIPELINE_MP_SIZE", "TRAINER_FLAGS", "0-vm"):
        assert word in page, word


def test_a_node_reads_the_settings_that_were_submitted(here: Path) -> None:
    path = here / "submitted.json"
    path.write_text(path.read_text().replace("HERE", str(here)))
    status, _, errors = cases.command(["job", "node", "slurm", str(path), "logs/none"])
    assert status == 2
    # The command has read the settings without an error, because this check comes after all others.
    assert "must be started by srun" in errors


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_job_that_changes_its_shape_goes_on(golden: Path) -> None:
    """Checks that a job resumes with golden files: checkpoint, measured model, state and lease."""
    done = subprocess.run(
        [sys.executable, "-m", "megatron.adaptive", *cases.elastic_words("elastic-script", 5)],
        cwd=golden,
        env=forking(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S * 2,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    same(cases.elastic_figures(golden), EXPECTED["runs"]["elastic-script"])
    state = json.loads((golden / "elastic-script" / "elastic" / "state.json").read_text())
    assert [epoch["epoch"] for epoch in state["earlier"]] == [1, 2]
    # If the job had measured the model again, it would have a second entry with another reason.
    assert [epoch["reason"] for epoch in state["epochs"]] == ["start"]
    assert [epoch["resumed_iteration"] for epoch in state["epochs"]] == [3]
    assert list((golden / "elastic-script" / ".lease").glob("claim-*.json"))


def plan_words(**more: str) -> list[str]:
    flags = {"model": cases.SHAPE, "cluster": "here.yaml", "profile": "profile.json", **more}
    return [*cases.PLAN, *(word for name, value in flags.items() for word in (f"--{name}", value))]


def newer_trace(folder: Path) -> Path:
    copy = folder / f"{NEWER}-traces"
    shutil.copytree(folder / "runs" / "golden" / "traces", copy, dirs_exist_ok=True)
    path = copy / "trace_rank_00000.jsonl"
    path.write_text(path.read_text().replace('"version": 2', '"version": 3', 1))
    return path


Make = Callable[[Path], Path]
# Each value contains a function that writes a file of a later version, a command that must reject
# this file, and the version of the file.
REFUSED_BY_COMMANDS: dict[str, tuple[Make, list[str], int]] = {
    "trace": (newer_trace, ["trace", f"{NEWER}-traces", "--json"], 3),
    "plan by the trainer": (
        lambda folder: change(folder / "plan.json", "format"),
        ["train", "rank", *cases.PLANNED.split(), "--plan", f"{NEWER}-plan.json"],
        2,
    ),
    "plan by the launcher": (
        lambda folder: change(folder / "plan.json", "format"),
        ["job", "submit", "plan-conf.sh", "--plan", f"{NEWER}-plan.json", "--dry-run"],
        2,
    ),
    "profile": (
        lambda folder: change(folder / "profile.json", "format"),
        plan_words(profile=f"{NEWER}-profile.json"),
        2,
    ),
    "profile of cut points": (
        lambda folder: change(folder / "cut.json", "format"),
        plan_words(model="cut.json", profile=f"{NEWER}-cut.json"),
        2,
    ),
    "profile for the simulator": (
        lambda folder: change(folder / "times.json", "version"),
        [*cases.ANSWERS["simulate"][:-1], f"{NEWER}-times.json"],
        2,
    ),
    "cluster": (
        lambda folder: rewritten(folder / "here.yaml"),
        plan_words(cluster=f"{NEWER}-here.yaml"),
        2,
    ),
    "model": (
        lambda folder: rewritten(folder / "model.yaml"),
        [*cases.PLAN, "--model", f"{NEWER}-model.yaml", "--cluster", "cluster.yaml"],
        2,
    ),
}


def rewritten(path: Path) -> Path:
    copy = path.with_name(f"{NEWER}-{path.name}")
    copy.write_text(path.read_text().replace("format: 1", "format: 2"))
    return copy


@pytest.mark.parametrize("form", REFUSED_BY_COMMANDS)
def test_a_command_refuses_a_version_to_come(here: Path, form: str) -> None:
    make, arguments, version = REFUSED_BY_COMMANDS[form]
    path = make(here)
    status, output, errors = cases.command(arguments)
    assert status == 2
    assert output == ""
    assert len(errors.splitlines()) == 1, errors
    assert path.name in errors
    assert re.search(rf"\b{version}\b", errors.replace(path.name, "")), errors


def test_a_state_of_a_version_to_come_is_refused(here: Path) -> None:
    shutil.copytree("elastic-trainer", f"{NEWER}-elastic", dirs_exist_ok=True)
    raise_version(Path(f"{NEWER}-elastic", "elastic", "state.json"), "format")
    status, _, errors = cases.command(["train", "elastic", "--status", f"{NEWER}-elastic"])
    assert status == 2
    assert "state.json" in errors


def test_a_measured_model_of_a_version_to_come_is_refused(here: Path) -> None:
    path = here / "elastic-script" / "elastic" / "model.json"
    assert MeasuredModule.read(path) is not None
    from megatron.adaptive.errors import ConfigError

    with pytest.raises(ConfigError, match=r"model\.json"):
        MeasuredModule.read(change(path, "format"))


def test_a_corpus_of_a_version_to_come_is_refused(here: Path) -> None:
    folder = here / "another" / "corpus"
    shutil.copytree(here / "corpus", folder)
    raise_version(folder / "corpus.json", "format")
    arguments = [*cases.CORPUS]
    arguments[arguments.index("--output-dir") + 1] = str(folder)
    status, _, errors = cases.command(arguments)
    assert status == 2
    assert "corpus.json" in errors
