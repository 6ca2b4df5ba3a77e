"""Trains feature sets of an unmodified Megatron-LM with its own schedule and with this engine.

    python -m tests.soak.feature_sets --tree PATH [--sets NAME,...] [--json FILE] [--logs FOLDER]

PATH is a checkout of Megatron-LM. The default is the environment variable MEGATRON_LM. Its
``pretrain_gpt.py`` runs with the lines of docs/plugin.md, on CPUs, with a tiny GPT. Each set of
``feature_sets.txt`` is trained for some steps twice: with ``--pipeline-schedule megatron``, which
is megatron-core's own loop, and with a schedule of this project. All losses, gradient norms and
evaluations, and the weights of every rank after every step, must be bitwise equal. With a V
placement, ranks hold different layers than in the reference run, so losses and norms must be equal
to 1e-6. The table has one line for each set:

    equal       the numbers are equal
    refused     the engine exited before the first step, with one line that names the reason
    own fails   the tree's own schedule does not run here, so there is no reference
    DIFFERS     the numbers differ
    FAILS       the engine failed in another way

Exits with status 1 if a set differs or fails. The file of ``--json`` gets a line for each set. The
folder of ``--logs`` keeps the last run of each set. If the tree needs modules that this environment
lacks, such as ``six`` for Megatron-LM 0.16, add their folders to PYTHONPATH. The module triton is
unpacked by ``prerequisite.sh --versions``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.families import ending_all
from tests.multiprocess.launch import ROOT, Forkserver, Ranks
from tests.soak.feature_set_table import SETS, FeatureSet
from tests.support.core_trees import UNPACKED

TREE = "MEGATRON_LM"
"""Environment variable with the path of a Megatron-LM checkout, used without ``--tree``."""
QUICK = (
    "adaptive",
    "zb-h1",
    "chunks-interleaved",
    "v-zb",
    "llama",
    "experts",
    "prediction",
    "bf16",
)
PLUGIN = ROOT / "tests" / "plugin"
LIMIT_S = 180.0
REL = 1e-6
"""Maximum relative difference between the losses and norms of two runs with a V placement."""
COMMON = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 --train-iters 3 "
    "--lr 1e-3 --eval-iters 1 --eval-interval 100 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 63 --log-interval 1 --num-workers 0 --pipeline-model-parallel-size 2 "
    "--attention-dropout 0 --hidden-dropout 0 --distributed-timeout-minutes 2 "
    # A machine without CUDA, Transformer Engine and apex needs the following options.
    "--distributed-backend gloo --transformer-impl local --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion"
).split()
_ERROR = re.compile(r"(?:^|\.)(?:[A-Z]\w*(?:Error|Exception|Exit)\b.*|.*error: .*)")
_OURS = re.compile(r"(?:megatron\.adaptive\.errors\.\w+: |error: )(.*)")
_NAMED = re.compile(r"megatron\.adaptive\.errors|rank \d+: error: ")
_NOISE = ("Connection closed by peer", "Broken pipe", "SIGABRT", "is gone: ", "lost its channel")
"""Error texts that only report the failure of another rank."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Results of training one feature set once.

    Attributes:
        status: Exit status of the first rank that failed, 0 if no rank failed, or ``None`` after a
            timeout.
        lines: List for each rank, with the values that the rank recorded after each step and
            evaluation.
        reason: Log line that states why the run failed. Empty if the run succeeded.
        is_named: Whether the error was raised by this project instead of another library.
    """

    status: int | None
    lines: list[list[dict[str, Any]]]
    reason: str = ""
    is_named: bool = False

    @property
    def has_begun(self) -> bool:
        """Whether any rank has completed a step."""
        return any(self.lines)


@dataclass
class Tree:
    """Runs ``pretrain_gpt.py`` of a Megatron-LM checkout.

    Attributes:
        folder: Folder for the logs and notes of all runs. A new run of a feature set replaces the
            logs and notes of an earlier run.
    """

    path: Path
    folder: Path
    _own: dict[tuple[object, ...], Run] = field(default_factory=dict)
    _server: Forkserver | None = None

    def __post_init__(self) -> None:
        others = [*os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        others += map(str, UNPACKED.glob("triton==*"))
        folders = [str(self.path), str(ROOT), *(name for name in others if name)]
        self._python_path = os.pathsep.join(dict.fromkeys(folders))
        self._compile_helpers()

    def run(self, feature_set: FeatureSet, kind: str) -> Run:
        """Trains ``feature_set`` with the schedule that ``kind`` selects.

        The kind ``own`` uses megatron-core's schedule, and ``engine`` uses this project's engine.
        The result of ``own`` is reused for feature sets with the same flags.
        """
        if kind == "engine":
            return self._train(feature_set, kind, feature_set.engine_flags)
        key = (feature_set.ranks, feature_set.flags, feature_set.own_flags)
        if key not in self._own:
            self._own[key] = self._train(feature_set, kind, feature_set.own_flags)
        return self._own[key]

    def _train(self, feature_set: FeatureSet, kind: str, flags: Sequence[str]) -> Run:
        folder = self.folder / feature_set.name / kind
        # Delete the old notes, because ranks append to existing files.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        log = folder / "log.txt"
        command = [str(PLUGIN / "user_script.py"), str(self.path / "pretrain_gpt.py")]
        command += [str(folder / "notes"), *COMMON, *feature_set.flags, *flags]
        ranks = Ranks(
            command,
            world_size=feature_set.ranks,
            log=log,
            limit_s=LIMIT_S,
            python_path=self._python_path,
            server=self._forkserver(),
        )
        try:
            ended = ranks.wait(LIMIT_S + 5)
        finally:
            ranks.kill()
        status: int | None = next((code for code in ended if code), 0)
        if not status and len(ended) < feature_set.ranks:
            status = None
        notes = [folder / f"notes.{rank}" for rank in range(feature_set.ranks)]
        lines = [
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
            for path in notes
        ]
        if status == 0:
            return Run(status=status, lines=lines)
        reason, is_named = reason_of(log.read_text(errors="replace"))
        return Run(status=status, lines=lines, reason=reason, is_named=is_named)

    def _forkserver(self) -> Forkserver:
        if self._server is None or not self._server.is_alive:
            server = str(PLUGIN / "script_server.py")
            self._server = Forkserver(self._python_path, [server])
        return self._server

    def _compile_helpers(self) -> None:
        """Compiles the C++ helper for data sets in the checkout for the current Python version.

        The checkout's makefile uses ``python3`` and ``python3-config`` from PATH. A virtual
        environment has no ``python3-config``, so the helper's file name would get the suffix of
        another Python version.
        """
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        os.environ.update(PATH=programs, MAKEFLAGS=f"LIBEXT={suffix}")
        subprocess.run(
            ["make", "-s", "-C", str(self.path / "megatron/core/datasets")],
            check=True,
            stdout=subprocess.DEVNULL,
        )


def reason_of(log: str) -> tuple[str, bool]:
    """Returns the line of ``log`` that states the error, and whether this project raised it."""
    errors = [line.strip() for line in log.splitlines() if _ERROR.search(line)]
    errors = [line for line in errors if not any(noise in line for noise in _NOISE)] or errors
    for line in errors:
        if match := _OURS.search(line):
            return match[1], _NAMED.search(line) is not None
    return (errors[0] if errors else "no line of the log contains an error"), False


def compare(feature_set: FeatureSet, reference: Run, engine: Run) -> tuple[str, str]:
    """Returns the result as a word for the table, and the reason for the result."""
    if reference.status != 0:
        return "own fails", reference.reason
    if engine.status != 0:
        if engine.is_named and not engine.has_begun:
            return "refused", engine.reason
        return "FAILS", engine.reason
    if not any("losses" in line and line["losses"] for lines in reference.lines for line in lines):
        return "FAILS", "no rank has a loss"
    for rank, (expected, seen) in enumerate(zip(reference.lines, engine.lines, strict=True)):
        if len(expected) != len(seen):
            return "DIFFERS", f"rank {rank}: {len(seen)} notes instead of {len(expected)}"
        for number, (before, after) in enumerate(zip(expected, seen, strict=True), 1):
            difference = _difference(before, after, is_close=feature_set.is_v)
            if difference:
                return "DIFFERS", f"rank {rank}, note {number}: {difference}"
    return "equal", f"{sum(map(len, reference.lines))} notes" + " to 1e-6" * feature_set.is_v


def _difference(expected: dict[str, Any], seen: dict[str, Any], *, is_close: bool) -> str:
    for name, value in _flat(expected):
        other = dict(_flat(seen)).get(name)
        if value == other or (is_close and (name == "weights" or _is_close(value, other))):
            continue
        shown = [_shown(text) for text in (other, value)]
        return f"{name} is {shown[0]} instead of {shown[1]}"
    return ""


def _flat(note: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in note.items():
        if isinstance(value, dict):
            yield from value.items()
        else:
            yield name, value


def _is_close(first: str, second: str | None) -> bool:
    if second is None or "none" in (first, second):
        return False
    pairs = zip(_numbers(first), _numbers(second), strict=True)
    return all(abs(a - b) <= REL * max(abs(a), abs(b)) for a, b in pairs)


def _numbers(text: str) -> list[float]:
    return [float.fromhex(word) for word in text.split()]


def _shown(text: str | None) -> str:
    if text is None or "0x" not in text:
        return str(text)
    return " ".join(f"{number:.9g}" for number in _numbers(text))


def main() -> int:
    """Trains the feature sets and prints the table. Returns 1 if a set differs or fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = os.environ.get(TREE)
    parser.add_argument(
        "--tree", type=Path, default=default, help="folder of a Megatron-LM checkout"
    )
    parser.add_argument("--sets", help="names of sets, separated by commas (default: all)")
    parser.add_argument("--quick", action="store_true", help=f"train only {', '.join(QUICK)}")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the lines to this file"
    )
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the logs in this folder")
    options = parser.parse_args()
    if options.tree is None:
        print(f"not run: {TREE} is not set to a Megatron-LM checkout; set it, or use --tree")
        return 0
    if not (options.tree / "pretrain_gpt.py").exists():
        parser.error(
            f"--tree {options.tree}: there is no pretrain_gpt.py; use a Megatron-LM checkout"
        )
    names = options.sets.split(",") if options.sets else [*(QUICK if options.quick else SETS)]
    if unknown := [name for name in names if name not in SETS]:
        parser.error(f"--sets: there is no set {unknown[0]}; the sets are {', '.join(SETS)}")
    with ending_all(), tempfile.TemporaryDirectory(prefix="feature-sets-") as folder:
        tree = Tree(options.tree.resolve(), (options.logs or Path(folder)).resolve())
        table = [measure(tree, SETS[name], options.json) for name in names]
    counts = Counter(row["result"] for row in table)
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    return int(any(result.isupper() for result in counts))


def measure(tree: Tree, feature_set: FeatureSet, path: Path | None = None) -> dict[str, Any]:
    """Trains a feature set with both schedules, and prints the result as a line of the table.

    If ``path`` is not ``None``, also appends the result to this file as JSON.
    """
    begin_s = time.monotonic()
    reference = tree.run(feature_set, "own")
    # If the reference run fails, there is nothing to compare with, so skip the second run.
    engine = tree.run(feature_set, "engine") if reference.status == 0 else reference
    result, reason = compare(feature_set, reference, engine)
    row = {
        "set": feature_set.name,
        "result": result,
        "reason": reason,
        "seconds": round(time.monotonic() - begin_s, 1),
    }
    print(f"{row['set']:26} {result:10} {row['seconds']:6.1f} s  {reason[:300]}", flush=True)
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return row


if __name__ == "__main__":
    sys.exit(main())
