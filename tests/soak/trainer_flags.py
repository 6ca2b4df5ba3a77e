"""Trains with single flags of this project's ``pretrain_gpt.py``, and checks the results.

    python -m tests.soak.trainer_flags [--sets NAME,...] [--quick] [--logs FOLDER]

Each row of ``trainer_flags.txt`` has flags to test, and the flags of their context. A tiny GPT is
trained for some steps with megatron-core's own schedule and with a schedule of this project. Both
must log the same losses, gradient norms and evaluations. A third run has only the flags of the
context. It shows whether the tested flags have an effect. The table has one line for each row:

    equal       both schedules log the same numbers, and the flags have the expected effect
    refused     the run exited before its first step, with one line that names the reason
    own fails   megatron-core's schedule fails with these flags, so there is no reference
    IDLE        the flags should change the numbers, but do not
    CHANGES     the flags should not change the numbers, but do
    DIFFERS     the two schedules log different numbers
    FAILS       a run failed in another way, or a refused flag was accepted

Exits with status 1 if a result is written in capitals.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from harness.families import ending_all
from tests.multiprocess.launch import ROOT, run_ranks
from tests.soak.feature_set_table import read_rows, split_ranks

TABLE = Path(__file__).with_name("trainer_flags.txt")
QUICK = ("distributed-inputs", "glu-offset", "lean-norm")
LIMIT_S = 150.0
_COMMON = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 "
    "--lr 1e-3 --eval-iters 1 --eval-interval 100 --tokenizer-type NullTokenizer "
    "--vocab-size 63 --log-interval 1 --num-workers 0 --pipeline-model-parallel-size 2 "
    "--attention-dropout 0 --hidden-dropout 0 --distributed-timeout-minutes 2"
).split()
_STEP = re.compile(r"iteration +(\d+)/.*?lm loss: (\S+).*?grad norm: (\S+)")
_EVALUATED = re.compile(r"lm loss value: (\S+)")
_ERROR = re.compile(r"error: .*")


@dataclass(frozen=True, kw_only=True)
class FlagSet:
    """Row of the table ``trainer_flags.txt``.

    Attributes:
        name: Name in the table.
        ranks: Number of ranks.
        context: Flags without which the tested flags are invalid or have no effect.
        flags: Flags to test.
        mark: ``same`` if the flags must not change the results, ``refused`` if the run must end
            before its first step, and otherwise empty.
    """

    name: str
    ranks: int
    context: tuple[str, ...]
    flags: tuple[str, ...]
    mark: str


@dataclass(frozen=True)
class Run:
    """Results of a run.

    Attributes:
        is_complete: Whether all ranks exited with status 0.
        numbers: Logged losses, gradient norms and evaluations, as text.
        errors: Logged lines of errors.
    """

    is_complete: bool
    numbers: tuple[tuple[str, ...], ...]
    errors: tuple[str, ...]


def read_sets(text: str) -> dict[str, FlagSet]:
    """Returns the rows of the table ``text`` by name."""
    sets: dict[str, FlagSet] = {}
    for (name,), context, flags, *mark in read_rows(text):
        ranks, of_context = split_ranks(context)
        more_ranks, of_test = split_ranks(flags)
        sets[name] = FlagSet(
            name=name,
            ranks=max(ranks, more_ranks),
            context=of_context,
            flags=of_test,
            mark=" ".join(mark[0]) if mark else "",
        )
    return sets


SETS = read_sets(TABLE.read_text(encoding="utf-8"))


@dataclass
class Trainer:
    """Runs ``pretrain_gpt.py`` with flags of the table.

    Attributes:
        folder: Folder for the logs and the data.
    """

    folder: Path
    _of_contexts: dict[tuple[object, ...], Run] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with warnings.catch_warnings():
            # megatron-core warns that optional packages are missing.
            warnings.simplefilter("ignore")
            from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self._prefix = self.folder / "tokens"
        draw = np.random.default_rng(7)
        builder = IndexedDatasetBuilder(f"{self._prefix}.bin", dtype=np.uint16)
        for _ in range(64):
            tokens = draw.integers(0, 62, size=int(draw.integers(20, 80)))
            builder.add_document(tokens.astype(np.uint16), [len(tokens)])
        builder.finalize(f"{self._prefix}.idx")

    def run(self, flag_set: FlagSet, kind: str) -> Run:
        """Trains with the schedule and the flags that ``kind`` selects.

        The kind ``own`` uses megatron-core's schedule. The kinds ``engine`` and ``context`` use
        this project's engine, but ``context`` omits the flags that are tested.
        """
        core = ("--pipeline-schedule", "megatron")
        if kind != "context":
            flags = (*flag_set.context, *flag_set.flags, *(core if kind == "own" else ()))
            return self._train(flag_set, kind, flags)
        key = (flag_set.ranks, flag_set.context)
        if key not in self._of_contexts:
            self._of_contexts[key] = self._train(flag_set, kind, flag_set.context)
        return self._of_contexts[key]

    def _train(self, flag_set: FlagSet, kind: str, flags: Sequence[str]) -> Run:
        folder = self.folder / flag_set.name / kind
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "log.txt"
        filled = [flag.replace("PREFIX", str(self._prefix)) for flag in flags]
        if not any(flag.endswith("data-path") for flag in filled):
            filled.append("--mock-data")
        if "--train-samples" not in filled:
            filled = ["--train-iters", "3", *filled]
        status = run_ranks(
            [str(ROOT / "pretrain_gpt.py"), *_COMMON, *filled],
            world_size=flag_set.ranks,
            log=log,
            limit_s=LIMIT_S,
        )
        text = log.read_text(errors="replace")
        numbers = (*_STEP.findall(text), *((loss,) for loss in _EVALUATED.findall(text)))
        return Run(status == 0, numbers, tuple(_ERROR.findall(text)))


def judge(trainer: Trainer, flag_set: FlagSet) -> tuple[str, str]:
    """Trains with ``flag_set``, and returns the result as a word of the table, and the reason."""
    engine = trainer.run(flag_set, "engine")
    reason = engine.errors[0] if engine.errors else "no line of the log contains an error"
    if flag_set.mark == "refused":
        is_refused = not engine.is_complete and len(engine.errors) == 1 and not engine.numbers
        return ("refused", reason) if is_refused else ("FAILS", f"not refused: {reason}")
    if not engine.is_complete:
        return "FAILS", reason
    reference = trainer.run(flag_set, "own")
    if not reference.is_complete:
        return "own fails", reference.errors[0] if reference.errors else ""
    if reference.numbers != engine.numbers or not reference.numbers:
        return "DIFFERS", f"{engine.numbers} instead of {reference.numbers}"
    is_idle = trainer.run(flag_set, "context").numbers == engine.numbers
    if is_idle != (flag_set.mark == "same"):
        return ("IDLE" if is_idle else "CHANGES"), str(engine.numbers[-1])
    return "equal", f"{len(engine.numbers)} lines"


def main() -> int:
    """Trains all rows and prints the table. Returns 1 if a result is not as expected."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sets", help="names of rows, separated by commas (default: all)")
    parser.add_argument("--quick", action="store_true", help=f"train only {', '.join(QUICK)}")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the logs in this folder")
    options = parser.parse_args()
    names = options.sets.split(",") if options.sets else [*(QUICK if options.quick else SETS)]
    if unknown := [name for name in names if name not in SETS]:
        parser.error(f"--sets: there is no row {unknown[0]}; the rows are {', '.join(SETS)}")
    results: Counter[str] = Counter()
    with ending_all(), tempfile.TemporaryDirectory(prefix="trainer-flags-") as temporary:
        folder = (options.logs or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        trainer = Trainer(folder)
        for name in names:
            result, reason = judge(trainer, SETS[name])
            results[result] += 1
            print(f"{name:<22} {result:<10} {reason}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in results.items()))
    return int(any(result.isupper() for result in results))


if __name__ == "__main__":
    sys.exit(main())
