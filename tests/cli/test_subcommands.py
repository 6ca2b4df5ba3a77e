"""Tests that subcommands are few, grouped and documented, and that old names suggest new names."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from megatron.adaptive import __main__ as program
from megatron.adaptive import __version__

MOST = 14
GROUPS = list(dict.fromkeys(name.partition(" ")[0] for name in program.SUBCOMMANDS))
FORMER = {
    "run-single": "train single",
    "train": "train recipe",
    "pretrain-gpt": "train rank",
    "run": "train elastic",
    "pretrain": "train megatron-lm",
    "flags": "train flags",
    "launch": "job launch",
    "node": "job node",
    "status": "job status",
    "submit": "job submit",
    "top": "job top",
    "report": "job report",
    "validate": "plan validate",
    "process-trace": "trace process",
    "visualize-trace": "trace draw",
    "import-hf": "hf import",
    "export-hf": "hf export",
    "preprocess-data": "data preprocess",
    "make-corpus": "data corpus",
}


def run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Runs the command line ``line`` in this process, and returns its status, output and errors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["megatron.adaptive", *shlex.split(line)])
        try:
            status = program.main()
        except SystemExit as end:
            status = int(end.code or 0)
    output, errors = capsys.readouterr()
    return status, output, errors


def refused(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs the command line ``line``, which must be rejected, and returns its error message."""
    status, output, errors = run(line, capsys)
    assert (status, output) == (2, "")
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    return errors.removeprefix("error: ").rstrip("\n")


def test_there_are_few() -> None:
    assert len(GROUPS) <= MOST


def test_help_lists_each_once_and_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    status, output, errors = run("--help", capsys)
    assert (status, errors) == (0, "")
    lines = [" ".join(line.split()) for line in output.splitlines()]
    for name, subcommand in program.SUBCOMMANDS.items():
        assert lines.count(f"{name} {subcommand.summary}") == 1
    assert max(map(len, output.splitlines())) <= 100
    assert run("", capsys)[1] == output


@pytest.mark.parametrize("group", [group for group in GROUPS if program._modes(group)])
def test_help_of_a_group_lists_its_modes(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, output, errors = run(f"{group} --help", capsys)
    assert (status, errors) == (0, "")
    assert output.startswith(f"usage: python -m megatron.adaptive {group} ")
    lines = [" ".join(line.split()) for line in output.splitlines()]
    for mode in program._modes(group):
        assert f"{mode.name} {mode.summary}" in lines
    if group not in program.SUBCOMMANDS:  # This group requires a subcommand.
        assert run(group, capsys) == (0, output, "")


@pytest.mark.parametrize("name", list(program.SUBCOMMANDS))
def test_help_says_the_whole_usage(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, output, errors = run(f"{name} --help", capsys)
    assert (status, errors) == (0, "")
    assert f"usage: python -m megatron.adaptive {name} " in output
    text = " ".join(output.split())
    assert re.findall(r"(?i)\(default: (?:None|False)\)", text) == []
    assert re.findall(r"(?i)default(?:s to| is) (?:None|False)\.", text) == []


def test_help_of_train_says_on_one_screen_which_mode_to_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = run("train --help", capsys)[1].splitlines()
    assert len(lines) <= 24
    advice = "\n".join(lines[lines.index("which mode to choose:") :])
    for mode in program._modes("train"):
        assert mode.name in advice or f"train recipe, elastic and {mode.name.split()[1]}" in advice


def test_former_names_are_these() -> None:
    assert {name: new.name for name, new in program.FORMER.items()} == FORMER


@pytest.mark.parametrize("former", [name for name in FORMER if name not in GROUPS])
def test_a_former_name_says_the_new_one(former: str, capsys: pytest.CaptureFixture[str]) -> None:
    rest = "--some 'two words' -- -x"
    expected = f"subcommand {former} is now: {FORMER[former]} {rest}"
    assert refused(f"{former} {rest}", capsys) == expected
    assert refused(f"{former} --help", capsys).endswith(f"is now: {FORMER[former]} --help")


def test_a_recipe_without_its_mode_says_the_mode(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = refused("train examples/recipes/qwen3-0.6b.yaml gpus=2", capsys)
    expected = "train recipe examples/recipes/qwen3-0.6b.yaml gpus=2"
    assert line == f"subcommand train is now: {expected}"
    monkeypatch.chdir(tmp_path)
    Path("mine").touch()
    assert refused("train mine", capsys) == "subcommand train is now: train recipe mine"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("trian", "train"),
        ("lunch x.py", "job launch"),
        ("run-singel", "train single"),
        ("export_hf", "hf export"),
        ("train singel", "train single"),
        ("train run-single", "train single"),
        ("job lunch x.py", "job launch"),
        ("hf improt", "hf import"),
        ("trace diagnos", "trace diagnose"),
        ("trace visualize-trace", "trace draw"),
        ("plan validat --data x", "plan validate"),
    ],
)
def test_a_misspelt_name_suggests_a_present_one(
    line: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(line, capsys).endswith(f"did you mean {name}")


def test_a_name_like_no_other_lists_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused("xyzzy", capsys).endswith(f"choose one of {', '.join(GROUPS)}")
    assert refused("hf xyzzy", capsys).endswith("choose one of import, export")


@pytest.mark.parametrize(
    "word", [name.split()[1] for name in program.SUBCOMMANDS if name.startswith("trace ")]
)
def test_a_folder_named_like_a_mode_is_reached_by_its_path(
    word: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(word).mkdir()
    # The argument is read as a folder, which is rejected only because it is empty.
    assert refused(f"trace ./{word}", capsys).startswith(f"{word} contains no trace")
    assert f"megatron.adaptive trace {word} " in run(f"trace {word} --help", capsys)[1]


def test_a_folder_that_resembles_a_mode_is_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("diagnoses").mkdir()
    assert refused("trace diagnoses", capsys).startswith("diagnoses contains no trace")


def test_version_names_what_it_builds_on_without_torch() -> None:
    code = (
        "import sys; sys.argv[1:] = ['--version']; from megatron.adaptive.__main__ import main;"
        "main(); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    python = ".".join(map(str, sys.version_info[:3]))
    versions = {name: metadata.version(name) for name in ("megatron-core", "torch")}
    assert done.stdout == (
        f"megatron-adaptive {__version__}, megatron-core {versions['megatron-core']},"
        f" torch {versions['torch']}, Python {python}\n"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_python_exits_is_one_line(number: signal.Signals) -> None:
    # The signal arrives after the job has ended, while Python unloads torch.
    code = (
        "import atexit, sys, time; from megatron.adaptive.__main__ import program\n"
        "sys.argv[1:] = ['--version']\n"
        "atexit.register(lambda: (print('leaving', flush=True), time.sleep(60)))\n"
        "sys.exit(program())\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.stdout.readline() == "leaving\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert len(errors.splitlines()) == 1, errors
