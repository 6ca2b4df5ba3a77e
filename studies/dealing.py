"""Measures the gain of distributing microbatches over data-parallel replicas by cost.

Two cases are measured: documents of different lengths, and a slow replica. The trainer runs in real
processes. Layers sleep for the time that they would take on a device (``timed_layers.py``), so that
four ranks can share two processors. Half of this time depends on the number of tokens, the other
half on the number of token pairs. Implements the ``lengths`` part of ``studies/schedules.py``.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness.processes import train
from harness.report import Result, Row, measured, ratios

WORKER = Path(__file__).parents[1] / "tests" / "support" / "timed_layers.py"
LIMIT_S = 600.0
SEQ_LENGTH, SAMPLES, LAYER_MS = 128, 48, 16.0
# Fraction of a layer's time that grows with the number of token pairs, for a document of maximum
# length.
PAIRS = 0.5
FACTOR, WARM_UP = 1.5, 6
COMMON = (
    f"--hidden-size 16 --num-attention-heads 2 --seq-length {SEQ_LENGTH} --micro-batch-size 1 "
    f"--max-position-embeddings {SEQ_LENGTH} --lr 1e-3 --eval-iters 0 --log-interval 1 "
    "--tokenizer-type NullTokenizer --vocab-size 63 --mock-data --distributed-timeout-minutes 2"
).split()
GRID = [
    *"--num-layers 4 --pipeline-model-parallel-size 2 --global-batch-size".split(),
    f"{SAMPLES}",
]
PACKED = ["--variable-seq-lengths", "--pack-to", str(SEQ_LENGTH)]
OFF = ["--balance-replicas", "off"]


def dealing(*, quick: bool) -> Result:
    """Measures training on documents of different lengths, and training with a slow replica."""
    with tempfile.TemporaryDirectory() as name:
        folder, steps = Path(name), WARM_UP + (8 if quick else 30)
        fixed = _steps_ms([*GRID, "--pipeline-schedule", "1f1b"], folder / "fixed", 4, steps)
        turns = _steps_ms([*GRID, *PACKED, *OFF], folder / "turns", 4, steps)
        dealt = _steps_ms([*GRID, *PACKED], folder / "dealt", 4, steps)
        # All jobs train on the same documents, so the ratio of their step times is also the ratio
        # of tokens per second.
        lengths = [
            measured(
                f"PP 2 x DP 2, packed documents: tokens/s over {over}",
                ratios(other, dealt),
                goal=goal,
                least=True,
            )
            for over, other, goal in (
                ("fixed-length padding, 1F1B", fixed, 1.5),
                ("the same dealt in turns, as given", turns, 1.15),
            )
        ]
        alone = ["--num-layers", "2", "--global-batch-size", "40"]
        slow = {"SLOW_RANKS": "0", "SLOW_FACTOR": str(FACTOR), "LAYER_MS": "4"}
        quiet, even, balanced = (
            statistics.median(_steps_ms([*alone, *words], folder / name, 2, steps, **settings))
            for name, words, settings in (
                ("quiet", OFF, {"LAYER_MS": "4"}),
                ("even", OFF, slow),
                ("balanced", ["--balance-replicas", "speed"], slow),
            )
        )
    ideal = quiet * 2 / (1 + 1 / FACTOR)
    print(
        f"step time with a replica slowed x{FACTOR:g}: {quiet:.0f} ms without the slowdown, "
        f"{even:.0f} ms round-robin, {balanced:.0f} ms balanced, {ideal:.0f} ms ideal"
    )
    regained = Row(
        what=f"DP 2, a replica x{FACTOR:g}: share of the ideal that is regained",
        value=(even - balanced) / (even - ideal) if even > ideal else 0.0,
        goal=0.8,
        least=True,
    )
    facts = {"fixed_ms": fixed, "turns_ms": turns, "dealt_ms": dealt}
    slowed = {"quiet_ms": quiet, "even_ms": even, "balanced_ms": balanced}
    return Result(rows=[*lengths, regained], facts={"dealing": {**facts, **slowed}})


def _steps_ms(
    words: Sequence[str], folder: Path, ranks: int, steps: int, **settings: str
) -> list[float]:
    """Returns the step times of a job in milliseconds, except those of the warm-up steps."""
    words = [str(WORKER), *COMMON, *words, "--train-iters", str(steps)]
    variables = {"LAYER_MS": str(LAYER_MS), "LAYER_PAIRS": f"{PAIRS}/{SEQ_LENGTH}", **settings}
    lines = train(words, folder, ranks, LIMIT_S, variables)
    found = {line["iteration"]: line["step_ms"] for line in lines if "iteration" in line}
    return [found[step] for step in range(WARM_UP + 1, steps + 1)]
