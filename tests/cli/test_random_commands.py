"""Tests that invalid random commands print one error line and exit with 2, and ``--help`` with 0.

The environment variable ``COMMANDS`` sets the number of command lines, and ``SEED`` the first seed.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.adaptive import __main__ as program
from megatron.adaptive.config.flags import fields_of
from megatron.adaptive.config.trainer import groups
from tests.soak.commands import HOSTILE, complaint, write_files

COUNT = int(os.environ.get("COMMANDS", "150"))
SEED = int(os.environ.get("SEED", "1"))
LIMIT_S = 10.0
NO_NUMBERS = ("abc", "nan", "1e999", "9" * 5000, "1.5.2", "0x1g", "-", HOSTILE, "None", "[]", "²")
NO_CHOICES = (HOSTILE, "bogus", "9" * 300, "None", "é")
NO_PATHS = ("{f}/none", "{f}/fifo", "/dev/zero", f"{{f}}/{HOSTILE}", "{f}/binary.json")
_TRAINER = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16"
    " --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 2 --lr 1e-3"
    " --train-iters 2 --mock-data --vocab-size 63 --tokenizer-type NullTokenizer"
)


@dataclass(frozen=True)
class Command:
    """Subcommand, and the parts of its command line that the test replaces with wrong values.

    Attributes:
        base: Valid command line of the subcommand.
        numbers: Options that take a number.
        choices: Options that take one of several names.
        paths: Options that take an existing file or folder, or an empty string for positional
            arguments.
    """

    base: str
    numbers: str = ""
    choices: str = ""
    paths: str = ""


COMMANDS = (
    Command(
        "simulate --stages 2 --microbatches 4",
        numbers="--stages --microbatches --chunks --forward --backward --latency --jitter --draws",
        choices="--schedules",
        paths="--profile",
    ),
    Command(
        "plan --model gpt2-xl --global-batch-size 8 --cluster {f}/cluster.yaml",
        numbers="--tp --top --tokens --global-batch-size",
        paths="--cluster --profile",
    ),
    Command("plan validate", paths="--data"),
    Command("trace", paths="TRACE"),
    Command("trace diagnose", paths="TRACE"),
    Command("trace process", paths="--run-dir"),
    Command("trace draw", paths="--run-dir"),
    Command("job top --once", numbers="--interval --width", paths="TRACE"),
    Command("job report", paths="TRACE"),
    Command("job status job", paths="--log-dir"),
    Command("job submit --dry-run", paths="TRACE"),
    Command("train elastic", numbers="--max-restarts --wait", paths="--machines --status"),
    Command("checkpoint list", paths="TRACE"),
    Command("checkpoint verify", paths="TRACE"),
    Command("hf import", paths="TRACE"),
    Command("hf export", paths="TRACE"),
    Command("evaluate --prompt a", numbers="--tokens --nproc-per-node", paths="--load-hf"),
    Command("profile --output p --model gpt2", numbers="--tp --repeats"),
    Command("doctor", numbers="--master-port"),
    Command("transport --check", numbers="--seconds", choices="--transport"),
    Command("train single", numbers="--pipeline_parallel", choices="--pipeline-schedule"),
    Command("job launch", numbers="--nproc-per-node --nnodes", paths="TRACE"),
    Command("train recipe", paths="TRACE"),
    Command(
        "train finetune --model {f} --data {f}/layers.json --output {f}/o",
        numbers="--epochs --batch-size --lr --eval-share --seed --nproc-per-node",
        choices="--dtype --recompute",
    ),
    Command("data corpus --output-dir {f}/made", numbers="--vocab-size --workers --max-bytes"),
    Command(
        "data preprocess --input {f}/layers.json --output-prefix {f}/o",
        numbers="--workers",
        paths="--vocab-file",
    ),
    Command("job node master --nproc-per-node 1", numbers="--master-port --timeout", paths="TRACE"),
    Command("job node worker", numbers="--master-port --node-rank --timeout"),
    Command("train flags", paths="TRACE"),
)


def trainer() -> Command:
    """Returns the trainer's command, with all flags that take a number or one of several names."""
    specs = [spec for kind in groups().values() for spec in fields_of(kind) if spec.has_flag]
    single = [spec for spec in specs if not (spec.many or spec.reader or spec.is_switch)]
    numbers = [spec.name for spec in single if spec.base in (int, float)]
    choices = [spec.name for spec in single if spec.choices]
    return Command(f"train rank {_TRAINER}", " ".join(numbers), " ".join(choices))


def draw_words(draw: random.Random) -> list[str]:
    """Draws a random wrong command line, and returns its words."""
    command = trainer() if draw.random() < 0.4 else draw.choice(COMMANDS)
    arguments = command.base.split()
    ways = [(command.numbers, NO_NUMBERS), (command.choices, NO_CHOICES)]
    ways = [way for way in [*ways, (command.paths, NO_PATHS)] if way[0]]
    if not ways or draw.random() < 0.15:
        return [*arguments, f"--{''.join(draw.choices('abcdefxyz', k=9))}", draw.choice(NO_CHOICES)]
    options, values = draw.choice(ways)
    option, value = draw.choice(options.split()), draw.choice(values)
    if option in arguments:
        arguments[arguments.index(option) + 1] = value
        return arguments
    joined = f"{option}={value}" if draw.random() < 0.5 else ""
    if option == "TRACE":
        return [*arguments, value]
    return [*arguments, *([joined] if joined else [option, value])]


def run(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Runs a subcommand with ``arguments``, and returns its exit status and its error output."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["megatron.adaptive", *arguments])
        try:
            status = program.main()
        except SystemExit as end:
            status = int(end.code or 0)
    return status, capsys.readouterr().err


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    os.mkfifo(folder / "fifo")
    return folder


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)


@pytest.mark.timeout(0 if COUNT > 1000 else 300)
def test_wrong_command_lines_end_with_one_line(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Exclude the first call from the measurement, because it imports modules.
    run(["simulate", "--stages", "x", "--microbatches", "4"], capsys)
    wrong: list[str] = []
    slowest = 0.0
    for number in range(SEED, SEED + COUNT):
        arguments = [word.replace("{f}", str(files)) for word in draw_words(random.Random(number))]
        begun_s = time.monotonic()
        try:
            why = complaint(*run(arguments, capsys), "error: ")
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        slowest = max(slowest, time.monotonic() - begun_s)
        if why:
            wrong.append(f"{number}: {' '.join(arguments)[:200]!r}: {why}")
    with capsys.disabled():
        print(f"\n{COUNT} command lines; the slowest took {slowest:.1f} s")
    assert not wrong, "\n".join([f"{len(wrong)} of {COUNT}:", *wrong])


@pytest.mark.parametrize("name", list(program.SUBCOMMANDS))
def test_help_ends_with_status_0(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, errors = run([*name.split(), "--help"], capsys)
    assert (status, errors) == (0, "")


def test_an_empty_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs" / "job").mkdir(parents=True)
    for arguments in (
        ["job", "status", "job", "--log-dir", str(tmp_path / "logs")],
        ["job", "top", str(tmp_path / "logs" / "job"), "--once"],
        ["trace", str(tmp_path / "logs" / "job")],
        ["checkpoint", "list", str(tmp_path / "logs" / "job")],
    ):
        assert complaint(*run(arguments, capsys), str(tmp_path / "logs")) == ""
