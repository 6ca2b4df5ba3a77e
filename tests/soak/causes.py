"""Plants one cause at a time in small training jobs, and judges the diagnoses.

    python -m tests.soak.causes [--runs N] [--only NAME ...] [--json FILE]

Two ranks train a small GPT on this machine. Either rank 1 (see ``support/hindered_rank.py``) or the
link between the ranks is slowed down. The verdict on a diagnosis is ``right`` if it names the
planted cause. It is ``wrong`` if it names the planted cause on the wrong rank, or a cause that was
not planted and that the finding's own counter does not prove. Otherwise it is ``missed``. Other
programs may use this machine's processors and memory, so a finding whose counter shows waits for
processors or memory is never wrong. If the ranks wait for processors most of the time, a missed
cause is ``masked`` and does not count. Exits with status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from harness.processes import environment, kill_tree  # noqa: E402
from harness.report import Result, Row, measure, missing, parser_of  # noqa: E402
from megatron.adaptive.trace.diagnose import Finding, diagnose  # noqa: E402
from megatron.adaptive.trace.machine_counters import (  # noqa: E402
    DISK_WAIT,
    ELAPSED,
    MEMORY_WAIT,
    PROCESSOR_WAIT,
    STEAL,
    THROTTLED,
)
from megatron.adaptive.trace.network_counters import RESENT_SEGMENTS  # noqa: E402
from megatron.adaptive.trace.read import RunTrace, read_run  # noqa: E402
from tests.multiprocess.launch import Ranks, tail  # noqa: E402
from tests.support.control_groups import (  # noqa: E402
    Limit,
    disk_speed,
    limited_group,
    memory_size,
    processor_quota,
)

SCRIPT = ROOT / "tests" / "support" / "hindered_rank.py"
HINDERED = 1
LIMIT_S = 150.0
FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 6 --lr 1e-3 "
    "--eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 63 --mock-data --num-workers 0 "
    "--pipeline-model-parallel-size 2 --distributed-timeout-minutes 2 --train-iters 14 "
    "--diagnose-interval 0 --trace-detail layers"
).split()
SLOW_LINK = ("--transport", "tests.support.slow_link:SlowLink")
BUSY = "import os\nos.sched_setaffinity(0, {{{processor}}})\nwhile True: pass"
FILE_BYTES = 64 << 20

RIGHT, WRONG, MISSED, MASKED = "right", "wrong", "missed", "masked"
FAILED = "failed"
COUNTED = (RIGHT, WRONG, MISSED)
STARVED = 0.5
"""Fraction of a step that ranks wait for processors, above which a missed cause is masked."""
Named = tuple[str, str]
"""Cause of a finding, and the counter that explains the finding (empty if there is no counter)."""


@dataclass
class Plant:
    """Changes to a job that make it slower.

    Attributes:
        variables: Environment variables of the job's ranks.
        flags: Additional flags of the trainer.
        network: Network namespace in which the job runs, or an empty string for the default
            namespace.
    """

    variables: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    network: str = ""


Planting = Callable[[Path, random.Random], "contextlib.AbstractContextManager[Plant | None]"]


@dataclass(frozen=True)
class Case:
    """Cause that makes a job slow, and the expected diagnosis.

    Attributes:
        plant: Function that returns a context manager in which the cause is present. The context
            manager yields the changes to the job, or ``None`` if this machine cannot produce the
            cause.
        right: Pairs of a cause and the counter that explains the cause. A diagnosis is right if its
            findings contain at least one of these pairs.
        also: Additional pairs that are not considered wrong, because they follow from the cause.
        ranks: Ranks that a right finding must name. Any ranks are accepted if this is empty.
    """

    plant: Planting
    right: frozenset[Named]
    also: frozenset[Named] = frozenset()
    ranks: tuple[int, ...] = (HINDERED,)


@dataclass(frozen=True)
class Answer:
    """Diagnosis of a job that was slowed down on purpose.

    Attributes:
        name: Name of the cause that slowed down the job.
        verdict: Constant :data:`RIGHT`, :data:`WRONG`, :data:`MISSED`, :data:`MASKED`, or
            :data:`FAILED`, which means that the job did not finish.
        named: For each finding, the cause that it names and the counter that explains the cause.
        text: Text of the diagnosis.
    """

    name: str
    verdict: str
    named: tuple[Named, ...]
    text: str


def _both(*causes: str, counter: str = "") -> frozenset[Named]:
    return frozenset((cause, counter) for cause in causes)


@contextlib.contextmanager
def _nothing(folder: Path, draw: random.Random) -> Iterator[Plant | None]:
    yield Plant()


@contextlib.contextmanager
def _beside_programs(number: int, *, is_pinned: bool) -> Iterator[Plant | None]:
    """Keeps processors busy with ``number`` programs each, until the context exits.

    If ``is_pinned``, the slow rank is pinned to one processor, and only that processor is kept
    busy. Yields the variables that pin the rank.
    """
    processors = sorted(os.sched_getaffinity(0))
    used = processors[-1:] if is_pinned else processors
    programs = [
        subprocess.Popen([sys.executable, "-c", BUSY.format(processor=processor)])
        for processor in used
        for _ in range(number)
    ]
    try:
        yield Plant({"PINNED": str(used[0])} if is_pinned else {})
    finally:
        for program in programs:
            program.kill()
            program.wait()


def _other_programs(folder: Path, draw: random.Random) -> Any:
    return _beside_programs(draw.randint(2, 3), is_pinned=False)


def _pinned(folder: Path, draw: random.Random) -> Any:
    return _beside_programs(draw.randint(1, 2), is_pinned=True)


@contextlib.contextmanager
def _in_group(limit: Limit, variables: Mapping[str, str] | None = None) -> Iterator[Plant | None]:
    with limited_group(limit) as group:
        yield None if group is None else Plant({"GROUP": str(group), **(variables or {})})


def _quota(folder: Path, draw: random.Random) -> Any:
    return _in_group(processor_quota(draw.uniform(0.12, 0.2)))


def _file(folder: Path) -> str:
    path = folder / "read-often"
    path.write_bytes(os.urandom(1 << 20) * (FILE_BYTES >> 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return str(path)


def _memory(folder: Path, draw: random.Random) -> Any:
    return _in_group(memory_size(), {"MAPPED_FILE": _file(folder)})


def _disk(folder: Path, draw: random.Random) -> Any:
    limit = disk_speed(folder, draw.randint(8, 16) << 20)
    return _in_group(limit, {"READ_FILE": _file(folder)})


@contextlib.contextmanager
def _with(variables: dict[str, str], *flags: str) -> Iterator[Plant | None]:
    yield Plant(variables, tuple(flags))


def _reader(folder: Path, draw: random.Random) -> Any:
    return _with({"READ_S": f"{draw.uniform(0.08, 0.15):.3f}"})


def _delayed_link(folder: Path, draw: random.Random) -> Any:
    seconds = f"{draw.uniform(0.08, 0.15):.3f}"
    return _with({"SLOW_LINK": "0-1", "SLOW_LINK_S": seconds}, *SLOW_LINK)


def _slow_member(folder: Path, draw: random.Random) -> Any:
    layer = f"{draw.choice((1, 2))}:{draw.uniform(0.06, 0.1):.3f}"
    flags = "--pipeline-model-parallel-size 1 --tensor-model-parallel-size 2"
    return _with({"SLOW_LAYER": layer}, *flags.split(), "--trace-detail", "collectives")


def _slow_layer(folder: Path, draw: random.Random) -> Any:
    return _with({"SLOW_LAYER": f"{draw.choice((2, 3))}:{draw.uniform(0.06, 0.1):.3f}"})


@contextlib.contextmanager
def _lossy_link(folder: Path, draw: random.Random) -> Iterator[Plant | None]:
    """Creates a network namespace for a job, whose loopback device drops packets.

    Packets are dropped by netem or, if netem is missing, by a short queue. The random number
    generator ``draw`` chooses the loss rate or the speed of the queue. Yields the changes that make
    the job use the namespace, or ``None`` if this machine cannot drop packets.
    """
    name = f"causes{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    if made.returncode:
        yield None
        return
    try:
        inside = ["ip", "netns", "exec", name]
        subprocess.run([*inside, "ip", "link", "set", "lo", "up", "mtu", "1500"], check=True)
        rules = (
            f"netem loss {draw.uniform(1.5, 3):.2f}%",
            f"tbf rate {draw.randint(12, 20)}mbit burst 6kb limit 12kb",
        )
        for rule in rules:
            command = [*inside, "tc", "qdisc", "add", "dev", "lo", "root", *rule.split()]
            if subprocess.run(command, capture_output=True).returncode == 0:
                yield Plant(flags=("--transport", "gloo"), network=name)
                return
        yield None
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)


_BUSY_RANKS = _both("slow rank", "busy machine", counter=PROCESSOR_WAIT)
_SLOW_STAGE = _both("slow rank", "uneven stages")
CASES: dict[str, Case] = {
    "quiet": Case(_nothing, frozenset()),
    "other programs": Case(_other_programs, _BUSY_RANKS, _SLOW_STAGE),
    "pinned beside a program": Case(_pinned, _BUSY_RANKS, _SLOW_STAGE),
    "quota": Case(
        _quota, _both("slow rank", "busy machine", counter=THROTTLED), _both("uneven stages")
    ),
    "memory pressure": Case(
        _memory,
        _both("slow rank", "busy machine", counter=MEMORY_WAIT)
        | _both("slow rank", counter=DISK_WAIT),
        # A rank that is slowed down by its disk also reads its data slowly.
        _SLOW_STAGE | _both("slow data") | _both("slow data", counter=DISK_WAIT),
    ),
    "slow disk": Case(_disk, _both("slow data", counter=DISK_WAIT)),
    "slow reader": Case(_reader, _both("slow data")),
    "delayed link": Case(_delayed_link, _both("slow link"), ranks=(0, 1)),
    "lossy link": Case(
        _lossy_link,
        _both("slow link", "lossy link", counter=RESENT_SEGMENTS),
        _both("slow link"),
        ranks=(),
    ),
    # Both ranks of the tensor-parallel group take longer for the layer, because one rank waits for
    # the slow rank.
    "slow member": Case(_slow_member, _both("slow collective member"), _SLOW_STAGE),
    "slow layer": Case(_slow_layer, _both("slow layer"), _SLOW_STAGE),
}
"""Maps the name of each cause to its :class:`Case`."""

_TRUE_BY_COUNTERS = frozenset((PROCESSOR_WAIT, STEAL, MEMORY_WAIT))
"""Counters that may rise because of other programs, whatever slows down the job."""

_SYMPTOMS = frozenset((("spikes", ""),))
"""Findings that describe a symptom instead of a cause."""


def judge(case: Case, findings: Sequence[Finding]) -> tuple[str, tuple[Named, ...]]:
    """Judges the diagnosis ``findings`` of a job that was slowed down by ``case``.

    Returns the verdict, and the (cause, counter) pairs of all findings.
    """
    named = tuple(
        (finding.cause, counter)
        for finding in findings
        for counter in (
            [reason.counter for reason in (finding.reason, *finding.more_reasons) if reason] or [""]
        )
    )
    is_right = not case.right or bool(case.right & set(named))
    verdict = RIGHT if is_right else MISSED
    for cause in set(named) - case.right - case.also - _SYMPTOMS:
        if cause[1] not in _TRUE_BY_COUNTERS:
            verdict = WRONG
    for finding in findings:
        counter = finding.reason.counter if finding.reason else ""
        is_planted = (finding.cause, counter) in case.right and finding.cause != "busy machine"
        is_elsewhere = bool(case.ranks) and finding.ranks != case.ranks
        if is_planted and is_elsewhere and counter not in _TRUE_BY_COUNTERS:
            verdict = WRONG
    return verdict, named


def run_case(name: str, seed: int, folder: Path) -> Answer | None:
    """Slows down a job by the cause ``name``, and judges the diagnosis of the job.

    Returns ``None`` if this machine cannot produce the cause. ``seed`` selects the random values of
    the cause. The job writes its files to ``folder``.

    Raises:
        RuntimeError: The job failed.
    """
    case = CASES[name]
    with case.plant(folder, random.Random(f"{name} {seed}")) as plant:
        if plant is None:
            return None
        _train(plant, folder)
    run = read_run(folder / "traces")
    said = diagnose(run)
    verdict, named = judge(case, said.findings)
    if verdict == MISSED and _is_starved(run):
        verdict = MASKED
    return Answer(name, verdict, named, said.format())


def _is_starved(run: RunTrace) -> bool:
    """Returns whether a rank in ``run`` waited for processors for at least half of its time."""
    for trace in run.ranks.values():
        counts = [trace.machine(iteration) for iteration in run.iterations[1:]]
        waited_ns = sum(of_step.get(PROCESSOR_WAIT, 0) for of_step in counts)
        if waited_ns >= STARVED * sum(of_step.get(ELAPSED, 0) for of_step in counts):
            return True
    return False


def _train(plant: Plant, folder: Path) -> None:
    log = folder / "log.txt"
    command = [str(SCRIPT), *FLAGS, "--trace-dir", str(folder / "traces"), *plant.flags]
    variables = {"HINDERED": str(HINDERED), **plant.variables}
    if plant.network:
        _launch(command, variables, plant.network, log)
        return
    ranks = Ranks(command, world_size=2, log=log, limit_s=LIMIT_S, variables=variables)
    try:
        if ranks.wait(LIMIT_S) != [0, 0]:
            raise RuntimeError(f"the job failed: {tail(log)}")
    finally:
        ranks.kill()


def _launch(command: list[str], variables: Mapping[str, str], network: str, log: Path) -> None:
    """Launches ``command`` on two ranks in the network namespace ``network``.

    The ranks get the environment variables ``variables``, and write their output to ``log``.
    """
    launcher = ["ip", "netns", "exec", network, sys.executable, "-m", "megatron.adaptive", "job"]
    launcher += ["launch", "--standalone", "--nproc-per-node", "2"]
    with log.open("wb") as output:
        job = subprocess.Popen(
            [*launcher, *command],
            env=environment(**variables),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status = job.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            kill_tree(job)
    if status:
        raise RuntimeError(f"the job failed: {tail(log)}")


def answers(names: Sequence[str], runs: int, seed: int) -> list[Answer]:
    """Trains a job with each cause, one job after another, and returns the judged diagnoses.

    Args:
        names: Names of the causes.
        runs: Number of jobs with each cause.
        seed: Seed of all random numbers.
    """
    judged = []
    for number in range(runs):
        for name in names:
            with tempfile.TemporaryDirectory(prefix="causes-") as folder:
                try:
                    answer = run_case(name, seed + number, Path(folder))
                except RuntimeError as error:
                    print(f"{name}: {error}", flush=True)
                    answer = Answer(name, FAILED, (), str(error))
            if answer is not None:
                judged.append(answer)
                print(f"{name}: {answer.verdict}, named {list(answer.named)}", flush=True)
                if answer.verdict != RIGHT:
                    print(answer.text, flush=True)
    return judged


def rows_of(judged: Sequence[Answer], names: Sequence[str]) -> list[Row]:
    """Returns a table row for each cause in ``names``, and two rows about all causes together.

    ``judged`` contains the judged diagnoses of all jobs.
    """
    rows = []
    for name in names:
        counts = Counter(answer.verdict for answer in judged if answer.name == name)
        if not counts:
            rows.append(missing(f"cause: {name}", "this machine cannot plant this cause"))
            continue
        total = sum(counts[verdict] for verdict in COUNTED)
        note = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
        value = counts[RIGHT] / total if total else None
        rows.append(Row(what=f"cause: {name}", value=value, note=note, optional=True))
    counts = Counter(answer.verdict for answer in judged)
    total = sum(counts[verdict] for verdict in COUNTED)
    for title, count, goal, least in (
        ("correct causes", counts[RIGHT], 0.95, True),
        ("wrong causes", counts[WRONG], 0.01, False),
    ):
        note = f"{count} of {total} jobs; {counts[MASKED]} masked, {counts[FAILED]} failed"
        value = count / total if total else None
        rows.append(Row(what=title, value=value, goal=goal, least=least, note=note))
    return rows


def of_causes(options: argparse.Namespace) -> Result:
    """Slows down several jobs by each cause, and returns the results.

    With ``options.quick``, there is one job per cause.
    """
    names = options.only or list(CASES)
    judged = answers(names, 1 if options.quick else options.runs, options.seed)
    return Result(rows_of(judged, names), {"causes": [vars(answer) for answer in judged]})


def main() -> int:
    """Slows down jobs by each cause, and prints the results. Returns 1 if a goal is missed."""
    parser = parser_of(__doc__, {"causes": of_causes}, "each cause once")
    parser.add_argument("--runs", type=int, default=6, help="number of jobs with each cause")
    parser.add_argument("--only", nargs="+", choices=CASES, help="names of causes")
    parser.add_argument("--seed", type=int, default=4200, help="seed of all random choices")
    options = parser.parse_args()
    return measure({"causes": partial(of_causes, options)}, options)


if __name__ == "__main__":
    sys.exit(main())
