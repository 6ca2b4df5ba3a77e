"""Tests that random damage to any file that a run reads is either detected or harmless.

No damage may make a program hang. There are three kinds of files:

- Files that programs write and that determine a run: trackers, manifests, leases, indices and
  vocabularies. A damaged file must be rejected, or must have the same content as before the damage.
- Files that people write: ``conf.sh``, plans, recipes, machines, clusters and schedules. A damaged
  file may have a different meaning. Accepted values must be within their ranges, and must be
  printed before a run begins.
- Files that only describe a run: traces, states and the records of a job. A damaged file must not
  cause a traceback.

The environment variable ``DAMAGES`` sets the number of cases, and ``SEED`` sets the first seed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive import __main__ as program
from megatron.adaptive.checkpoint.folder import INDEX, CheckpointFolder, PipelineFolder
from megatron.adaptive.cli.pretrain_gpt import load_recipe
from megatron.adaptive.cluster.conf import load_conf
from megatron.adaptive.cluster.membership import read_machines
from megatron.adaptive.config.arguments import parse, read_recipe
from megatron.adaptive.config.input_files import shown
from megatron.adaptive.config.model import model_flags
from megatron.adaptive.config.plan_file import load_plan, plan_variables
from megatron.adaptive.data.indexed import check_indexed
from megatron.adaptive.data.tokenizer import GPT2BPETokenizer
from megatron.adaptive.engine import folder_lease
from megatron.adaptive.errors import AdaptiveError
from megatron.adaptive.planner.cluster import read_cluster
from megatron.adaptive.schedule import schedule_file
from megatron.adaptive.trace.metrics import run_figures
from megatron.adaptive.trace.read import read_run
from tests.support.synthetic_trace import SyntheticRun, write_synthetic

ROOT = Path(__file__).resolve().parents[2]
COUNT = int(os.environ.get("DAMAGES", "60"))
SEED = int(os.environ.get("SEED", "1"))
LIMIT_S = 60.0
LONGEST = 2000
WRONG = (
    "NaN",
    "-3",
    "1e300",
    "1" + "0" * 30,
    "9" * 5000,
    "null",
    "true",
    '"x"',
    "[]",
    "{}",
    "-0.0",
)
TEXT = "def f(x):\n    return [x, 'naïve ✓', 3.14159]  # the quick brown fox\n" * 5


@dataclass(frozen=True)
class Subject:
    """Kind of file that is damaged.

    Attributes:
        name: Name of the kind.
        file: Path of the file in the folder of inputs.
        read: Function that reads the file as a run would. It gets the folder of inputs, and returns
            the values that the run would use.
        decides: Whether the file determines a run, so that damage must be either rejected or
            harmless.
    """

    name: str
    file: str
    read: Callable[[Path], Any]
    decides: bool = False


def _checkpoints(folder: Path) -> Any:
    folders = CheckpointFolder(folder / "checkpoints")
    manifests = []
    for step in folders.candidates():
        with contextlib.suppress(AdaptiveError):
            path, manifest = folders.open(step)
            manifests.append((path.name, json.dumps(manifest, sort_keys=True)))
    return manifests[0] if manifests else None


def _pipelines(folder: Path) -> Any:
    path, manifest = PipelineFolder(folder / "pipeline").open(3)
    return path.name, json.dumps(manifest, sort_keys=True)


def _index(folder: Path) -> Any:
    info = check_indexed(folder / "corpus")
    content = (folder / "corpus.idx").read_bytes()
    return info.dtype.itemsize, info.num_tokens, content[34:]


def _vocabulary(folder: Path) -> Any:
    made = GPT2BPETokenizer(folder / "vocab.json", folder / "merges.txt")
    return made.vocab_size, made.eod, made.tokenize(TEXT)


def _lease(folder: Path) -> Any:
    """Returns whether a job may take over the lease on ``folder`` because its owner has exited."""
    lease = folder_lease.Lease(folder / "claimed")
    lease.taken(1)
    return folder_lease._is_gone(lease._facts(1))


def _recipe(folder: Path) -> Any:
    recipe = read_recipe(load_recipe(folder / "recipe.yaml"), [], "recipe.yaml")
    return parse(recipe.flags, world_size=recipe.nodes * recipe.processes_per_node).to_dict()


def _traces(folder: Path) -> Any:
    return run_figures(read_run(folder / "traces"), workers=1).num_actions.sum()


def _command(*arguments: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "sys.argv", ["x", *(word.replace("{f}", str(folder)) for word in arguments)]
            )
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                return program.main()

    return read


SUBJECTS = (
    Subject("tracker", "checkpoints/latest_checkpointed_iteration.txt", _checkpoints, True),
    Subject("manifest", "checkpoints/iter_0000030/manifest.json", _checkpoints),
    Subject("manifest alone", "pipeline/step_00000003/pipeline.json", _pipelines, True),
    Subject("index", "corpus.idx", _index, True),
    Subject("vocabulary", "vocab.json", _vocabulary, True),
    Subject("merges", "merges.txt", _vocabulary, True),
    Subject("lease", "claimed/.lease/claim-1.json", _lease, True),
    Subject("plan", "plan.json", lambda f: plan_variables(load_plan(f / "plan.json"), "plan")),
    Subject("recipe", "recipe.yaml", _recipe),
    Subject("conf.sh", "conf.sh", lambda f: load_conf(f / "conf.sh").texts()),
    Subject("machines", "machines", lambda f: read_machines(f / "machines")),
    Subject("flags", "model.flags", lambda f: model_flags("model.flags", f)),
    Subject("schedule", "order.json", lambda f: schedule_file.load(f / "order.json")),
    Subject("schedule table", "order.csv", lambda f: schedule_file.load(f / "order.csv")),
    Subject("cluster", "cluster.yaml", lambda f: read_cluster(f / "cluster.yaml")),
    Subject("trace", "traces/trace_rank_00000.jsonl", _traces),
    Subject(
        "trace of top", "traces/trace_rank_00001.jsonl", _command("job", "top", "{f}", "--once")
    ),
    Subject("state", "elastic/state.json", _command("train", "elastic", "--status", "{f}")),
    Subject(
        "record", "logs/job/run.json", _command("job", "status", "job", "--log-dir", "{f}/logs")
    ),
    Subject(
        "progress",
        "logs/job/progress.jsonl",
        _command("job", "status", "job", "--log-dir", "{f}/logs"),
    ),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Any) -> Path:
    """Returns a folder that contains an undamaged file of each kind."""
    folder = tmp_path_factory.mktemp("whole")
    for source, name in ((corpus.vocab_file, "vocab.json"), (corpus.merge_file, "merges.txt")):
        shutil.copy(source, folder / name)
    for ending in (".idx", ".bin"):
        shutil.copy(f"{corpus.data_prefix}{ending}", folder / f"corpus{ending}")
    head = {"shape": {"tensor": 1}, "padded_vocab_size": 128, "has_optimizer": True}
    head |= {"has_rng": True, "config": {"model": {}}}
    saved = CheckpointFolder(folder / "checkpoints")
    for step in (10, 20, 30):
        partial = saved.begin(step)
        for name in ("metadata.json", INDEX):
            (partial / name).write_text("{}")
        (partial / "__0_0.distcp").write_bytes(os.urandom(2000))
        saved.commit(step, {**head, "progress": {"iteration": step}})
    pipelines = PipelineFolder(folder / "pipeline")
    (pipelines.begin(3) / INDEX).write_text("{}")
    facts = {"seed": 5, "loss_scale": None, "extra": {}, "optimizer": "SGD", "save_id": "a"}
    pipelines.commit(3, {**facts, "options": {"w": {"lr": 0.1}}, "states": {}})
    folder_lease.Lease(folder / "claimed").claim(job="one", restarts=0)
    # The lease must belong to a process that outlives the test, because a lease of this process
    # would count as abandoned.
    other = os.getppid()
    holder = {**folder_lease._here(), "pid": other, "ticks": folder_lease._state(other)[1]}
    holder |= {"job": "one", "restarts": 0, "since_unix_s": 1e9}
    claim = json.dumps({**holder, "sum": folder_lease._sum(holder)})
    (folder / "claimed" / ".lease" / "claim-1.json").write_text(claim)
    degrees = {"tensor": 1, "pipeline": 2, "data": 2}
    plan = {"format": 1, "degrees": degrees, "micro_batch_size": 2}
    (folder / "plan.json").write_text(
        json.dumps({**plan, "global_batch_size": 8, "schedule": "1f1b", "partition": [2, 2]})
    )
    (folder / "recipe.yaml").write_text(
        "num_layers: 4\nhidden_size: 64\nnum_attention_heads: 4\nseq_length: 32\n"
        "max_position_embeddings: 32\nmicro_batch_size: 2\nlr: 3e-4\ntrain_iters: 10\n"
        "mock_data: true\nvocab_size: 100\nvariants:\n  size: {small: {}, big: {num_layers: 8}}\n"
    )
    (folder / "conf.sh").write_text(
        "MODEL=tiny\nDEVICE=cpu\nNNODES=2\nNPROC_PER_NODE=2\nLR=1e-3\nPIPELINE_MP_SIZE=2\n"
    )
    (folder / "machines").write_text("a slots=2\nb slots=4 name=c  # spare\n10.0.0.3\n")
    (folder / "model.flags").write_text("--num-layers 4 --hidden-size 64 # comment\n--swiglu\n")
    (folder / "order.json").write_text(
        '{"version": 1, "ranks": 2, "chunks": 1, "microbatches": 2,\n'
        ' "orders": ["F0-0 F0-1 B0-0 B0-1", "F0-0 B0-0 F0-1 B0-1"]}\n'
    )
    (folder / "order.csv").write_text("0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n")
    shutil.copy(ROOT / "examples" / "planner" / "cluster.yaml", folder)
    write_synthetic(folder / "traces", SyntheticRun(num_ranks=2, num_microbatches=4, iterations=3))
    _write_job(folder)
    return folder


def _write_job(folder: Path) -> None:
    state = {
        "format": 1, "status": "x", "iteration": 1, "total_iterations": 2, "unix_ns": 1,
        "checkpoint_iteration": 1, "lost_steps": 0, "manager": {"pid": 1, "host": "h"},
        "machines": [{"name": "n", "status": "s", "slots": 1, "why": "w", "slowness": 1.5}],
        "epochs": [{"epoch": 1, "shape": "s", "nodes": ["n"], "resumed_iteration": 0,
                    "reason": "r", "lost_steps": 0, "phases_s": {"whole": 1.0}, "step_s": 1.0,
                    "predicted_step_s": 1.0}],
    }  # fmt: skip
    (folder / "elastic").mkdir()
    (folder / "elastic" / "state.json").write_text(json.dumps(state, indent=1))
    job = folder / "logs" / "job"
    job.mkdir(parents=True)
    (job / "n.out").write_text("a line\n")
    record = {"conf": {"LR": "1"}, "flags": ["--lr"], "processes": [1], "started_unix_s": 1}
    (job / "run.json").write_text(json.dumps({**record, "world_size": 1}))
    start = {"unix_ns": 1, "total_iterations": 9, "start_iteration": 0}
    line = {"unix_ns": 1, "iteration": 1, "step_ms": 1.0, "loss": 1.0, "tokens_per_s": 1.0}
    (job / "progress.jsonl").write_text(f"{json.dumps(start)}\n{json.dumps(line)}\n")


def damage(path: Path, draw: random.Random) -> str:
    """Damages the file ``path`` in a random way, and returns the name of the kind of damage."""
    content = bytearray(path.read_bytes())
    kind = draw.choice(list(_KINDS))
    made = _KINDS[kind](content, draw)
    path.unlink()
    if isinstance(made, bytes | bytearray):
        path.write_bytes(made)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    return kind


def _flip(content: bytearray, draw: random.Random) -> bytes:
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return content


def _byte(content: bytearray, draw: random.Random) -> bytes:
    content[draw.randrange(len(content))] = draw.randrange(256)
    return content


def _zeros(content: bytearray, draw: random.Random) -> bytes:
    start = draw.randrange(len(content))
    part = content[start : start + draw.randrange(1, 64)]
    content[start : start + len(part)] = bytes(len(part))
    return content


def _lines(content: bytearray, draw: random.Random) -> bytes:
    lines = bytes(content).split(b"\n")
    first, second = draw.randrange(len(lines)), draw.randrange(len(lines))
    way = draw.choice(("swap", "lose", "twice"))
    if way == "swap":
        lines[first], lines[second] = lines[second], lines[first]
    elif way == "lose":
        del lines[first]
    else:
        lines.insert(first, lines[first])
    return b"\n".join(lines)


def _number(content: bytearray, draw: random.Random) -> bytes:
    text = bytes(content)
    numbers = [*re.finditer(rb"(?<![\w.])\d+(?:\.\d+)?", text)]
    if not numbers:
        return _flip(content, draw)
    match = draw.choice(numbers)
    return text[: match.start()] + draw.choice(WRONG).encode() + text[match.end() :]


_KINDS: dict[str, Callable[[bytearray, random.Random], Any]] = {
    "bit": _flip,
    "byte": _byte,
    "zeros": _zeros,
    "lines": _lines,
    "number": _number,
    "cut": lambda content, draw: content[: draw.randrange(len(content))],
    "empty": lambda content, draw: b"",
    "more": lambda content, draw: bytes(content) + draw.randbytes(draw.randrange(1, 40)),
    "noise": lambda content, draw: draw.randbytes(len(content)),
    "fifo": lambda content, draw: None,
    "endless": lambda content, draw: None,
    "folder": lambda content, draw: None,
}


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError if the ``with`` block takes longer than ``seconds``."""

    def late(*_: object) -> None:
        raise TimeoutError(f"the damaged file was not read within {seconds:g} s")

    former = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def fault(subject: Subject, folder: Path, before: Any) -> str:
    """Lets ``subject`` read a damaged file, and returns what is wrong with the result.

    Returns an empty string if nothing is wrong. ``before`` is the value that was read before the
    damage.
    """
    try:
        with limit(LIMIT_S):
            answer = subject.read(folder)
    except AdaptiveError as error:
        text = shown(str(error))
        # File names in error messages may contain invisible formatting characters (Cf), so allow
        # these.
        is_line = len(text.splitlines()) == 1 and 0 < len(text) < LONGEST
        is_line &= not any(unicodedata.category(letter) in ("Cc", "Cs") for letter in text)
        return "" if is_line else f"no line: {text[:300]!r}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return "" if not subject.decides or answer == before else "silent"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)


@pytest.mark.timeout(0 if COUNT > 1000 else 300)
@pytest.mark.usefixtures("alone")
def test_damages_are_refused_or_without_effect(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before: dict[str, Any] = {}
    wrong: list[str] = []
    for number in range(SEED, SEED + COUNT):
        draw = random.Random(number)
        subject = SUBJECTS[number % len(SUBJECTS)]
        if subject.name not in before:
            before[subject.name] = subject.read(whole)
        folder = tmp_path / "damaged"
        shutil.copytree(whole, folder, copy_function=os.link)
        path = folder / subject.file
        shutil.copy(path, tmp_path / "kept")
        path.unlink()
        shutil.copy(tmp_path / "kept", path)
        kind = damage(path, draw)
        if why := fault(subject, folder, before[subject.name]):
            wrong.append(f"{number}: {kind} in {subject.name}: {why}")
            with capsys.disabled():
                print(f"\n{wrong[-1]}", flush=True)
        shutil.rmtree(folder)
    capsys.readouterr()
    assert not wrong, "\n".join([f"{len(wrong)} of {COUNT}:", *wrong])


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.usefixtures("alone")
def test_a_thousand_damages_are_refused_or_without_effect(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.COUNT", max(COUNT, 1000))
    test_damages_are_refused_or_without_effect(whole, tmp_path, capsys)
