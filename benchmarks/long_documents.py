"""Compares training on sliced long sequences with training on whole long sequences.

    python benchmarks/long_documents.py [--quick] [--part PART ...] [--json FILE]

``training`` trains a small GPT on one document of 8,192 tokens per step, whole and in 8 slices, on
two pipeline ranks and on one rank. ``emulated`` runs 8 processes that sleep instead of computing,
with few long sequences and 60% of the work in attention. ``simulated`` simulates steps of 16 ranks.
Exits with status 1 if a goal is missed.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from harness.emulated_work import EmulatedRank, seconds_of  # noqa: E402
from harness.processes import fork_ranks, train  # noqa: E402
from harness.report import Result, Row, measure, measured, parser_of, ratios  # noqa: E402
from megatron.adaptive.schedule.catalog import Candidate, make_candidate  # noqa: E402
from megatron.adaptive.schedule.choose_by_simulation import evaluate  # noqa: E402
from megatron.adaptive.schedule.memory_caps import with_rounding  # noqa: E402
from megatron.adaptive.schedule.stage_placement import Placement  # noqa: E402
from megatron.adaptive.schedule.workload import StageProfile, StageTimes, draw  # noqa: E402
from megatron.adaptive.trace.metrics import rank_figures  # noqa: E402
from megatron.adaptive.trace.read import read_run  # noqa: E402

SLICES = 8
LIMIT_S = 3000.0
MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --micro-batch-size 1 "
    "--global-batch-size 1 --lr 1e-3 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 1023 --attention-dropout 0 --hidden-dropout 0 --log-interval 1 "
    "--distributed-timeout-minutes 60"
)
MEMORY_GOAL = 0.6
STEP_GOALS = {2: 0.8, 1: 1.05}
"""Maximum ratio of step times with and without slices, keyed by the number of pipeline ranks."""
RANKS = 8
FORWARD_S = 0.8
"""Duration in seconds of the forward pass of a whole sequence on an emulated rank."""
OVER_WHOLE = {4: 1.9, 8: 1.22, 16: 1.1}
OVER_INTERLEAVED = {8: 1.3, 16: 1.15}
EFFICIENCY = {8: 0.95, 16: 0.97, 32: 0.98}
"""Minimum efficiency of steps with slices, keyed by the number of sequences per step."""
ATTENTION = 0.6
WHOLE, SLICED, INTERLEAVED = "whole", "slices", "interleaved"


def training(options: Any) -> Result:
    """Trains with whole and with sliced sequences, on two ranks and on one rank."""
    tokens = 1024 if options.quick else 8192
    steps = 2 if options.quick else 3
    rows, facts = [], {}
    for ranks in (2, 1):
        jobs = {number: _train(ranks, number, tokens, steps) for number in (SLICES, 1)}
        name = f"PP {ranks}, {tokens} tokens, {SLICES} slices"
        goal = None if options.quick else STEP_GOALS[ranks]
        step_ratios = ratios(jobs[SLICES].steps_s, jobs[1].steps_s)
        rows.append(measured(f"{name}: step over whole", step_ratios, goal=goal))
        if ranks > 1:
            part = jobs[SLICES].peak_bytes / jobs[1].peak_bytes
            memory_goal = None if options.quick else MEMORY_GOAL
            rows.append(Row(what=f"{name}: activations over whole", value=part, goal=memory_goal))
        facts[name] = {number: job._asdict() for number, job in jobs.items()}
    return Result(rows=rows, facts={"training": facts})


class TrainedJob(NamedTuple):
    """Measurements of one training job.

    Attributes:
        steps_s: Duration of each step after the first, in seconds.
        peak_bytes: Maximum size of the activations that a rank stored, in bytes.
        losses: Loss of each step.
    """

    steps_s: list[float]
    peak_bytes: int
    losses: list[float]


def _train(ranks: int, slices: int, tokens: int, steps: int) -> TrainedJob:
    """Trains one warm-up step and ``steps`` measured steps, and returns the measurements.

    ``ranks`` is the number of pipeline ranks. The batch of a step is one sequence of ``tokens``
    tokens, which is cut into ``slices`` slices.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [str(ROOT / "pretrain_gpt.py"), *MODEL.split()]
        command += ["--seq-length", str(tokens), "--max-position-embeddings", str(tokens)]
        command += ["--pipeline-model-parallel-size", str(ranks), "--train-iters", str(steps + 1)]
        command += ["--sequence-slices", str(slices), "--trace-dir", f"{folder}/traces"]
        lines = train(command, Path(folder), ranks, LIMIT_S)
        run = read_run(Path(folder) / "traces")
        iterations = run.complete_iterations()[1:]
        peaks = [
            rank_figures(trace.table(iterations), run.num_chunks, trace.slices).peak_in_flight_bytes
            for trace in run.ranks.values()
        ]
    timed = [line for line in lines if "loss" in line]
    steps_s = [line["step_ms"] / 1e3 for line in timed][1:]
    losses = [line["loss"] for line in timed]
    return TrainedJob(steps_s, int(max(peak.max() for peak in peaks)), losses)


def profile_of(ranks: int) -> StageProfile:
    """Returns a profile of equal stages, two for each of ``ranks`` ranks.

    In a forward pass, most of the work is attention.
    """
    # A weight gradient takes as long as the linear part of a forward pass.
    linear, attention = FORWARD_S * (1 - ATTENTION) / 2, FORWARD_S * ATTENTION / 2
    times = StageTimes.equal(
        2 * ranks, forward_s=linear + attention, backward_s=linear + 2 * attention, weight_s=linear
    )
    return StageProfile(times=times, attention_share=ATTENTION)


def candidates(ranks: int, count: int) -> dict[str, Candidate]:
    """Returns the schedules that are compared, keyed by name.

    The pipeline has ``ranks`` ranks, and a step has ``count`` sequences.
    """
    v = Placement(num_ranks=ranks, num_chunks=2, kind="v")
    whole = [
        Candidate(name=name, placement=v, weight_pieces=4, cap=float(ranks))
        for name in ("adaptive", "hinted")
    ]
    whole.append(make_candidate("zb-v", ranks, 2, count))
    outcomes = [evaluate(candidate, count, profile_of(ranks), (0,)) for candidate in whole]
    fitting = [outcome for outcome in outcomes if outcome.peak_units <= with_rounding(ranks)]
    named = {
        WHOLE: min(fitting, key=lambda outcome: outcome.mean_s).candidate,
        SLICED: Candidate(
            name="adaptive", placement=v, weight_pieces=4, cap=ranks / 2, num_slices=SLICES
        ),
    }
    if count in OVER_INTERLEAVED:
        named[INTERLEAVED] = make_candidate("interleaved", ranks, 2, count)
    return named


def run_rank(rank: int, counts: list[int], repeats: int) -> list[dict[str, Any]]:
    """Runs emulated steps of all schedules on rank ``rank``, and returns a record per step.

    Each schedule runs ``repeats`` times for each number of sequences in ``counts``. A record
    contains the duration and the maximum memory of a step.
    """
    member = EmulatedRank(rank)
    records = []
    for count, repeat in itertools.product(counts, range(repeats)):
        for name, candidate in candidates(RANKS, count).items():
            slices = candidate.num_slices
            drawn = draw(candidate.placement, count, profile_of(RANKS), num_slices=slices)
            step = member.step(candidate, seconds_of(drawn), count, sizes=drawn.sizes or None)
            records.append(
                {
                    "count": count,
                    "repeat": repeat,
                    "name": name,
                    "order": str(candidate),
                    "s": step.seconds,
                    "peak": step.peak,
                }
            )
    member.close()
    return records


def emulated(options: Any) -> Result:
    """Compares slices with the best and with the interleaved schedule of whole sequences."""
    counts = [4] if options.quick else list(OVER_WHOLE)
    repeats = 1 if options.quick else 3
    records = fork_ranks("benchmarks.long_documents", RANKS, LIMIT_S, counts, repeats)
    rows = [row for count in counts for row in _rows(records, count)]
    return Result(rows=rows, facts={"emulated": records})


def _rows(records: list[dict[str, Any]], count: int) -> Iterator[Row]:
    of_count = [record for record in records if record["count"] == count]
    named = {
        name: [record for record in of_count if record["name"] == name]
        for name in (WHOLE, SLICED, INTERLEAVED)
    }
    sliced = named[SLICED]
    held = statistics.median(record["peak"] for record in sliced)
    for name, goals in ((WHOLE, OVER_WHOLE), (INTERLEAVED, OVER_INTERLEAVED)):
        if not named[name]:
            continue
        factors = ratios([r["s"] for r in named[name]], [r["s"] for r in sliced])
        other = statistics.median(record["peak"] for record in named[name])
        yield measured(
            f"{count} sequences, {SLICES} slices: speed over {name}",
            factors,
            goal=goals[count],
            least=True,
            note=f"holds {held:.3g} sequences instead of {other:.3g} ({named[name][0]['order']})",
        )


def simulated(options: Any) -> Result:
    """Simulates the efficiency of 16 ranks with 16 slices and memory for 4 sequences."""
    del options
    v = Placement(num_ranks=16, num_chunks=2, kind="v")
    sliced = Candidate(name="adaptive", placement=v, weight_pieces=4, cap=4.0, num_slices=16)
    rows = []
    for count, goal in EFFICIENCY.items():
        outcome = evaluate(sliced, count, profile_of(16), (0,))
        rows.append(
            Row(
                what=f"16 ranks, {count} sequences, 16 slices, memory for 4: efficiency",
                value=1 - outcome.bubble_fraction,
                goal=goal,
                least=True,
            )
        )
    return Result(rows=rows)


PARTS = {"training": training, "emulated": emulated, "simulated": simulated}


def main() -> int:
    """Measures the parts and prints the results. Returns 1 if a goal is missed, otherwise 0."""
    options = parser_of(__doc__, tuple(PARTS)).parse_args()
    parts = options.part or tuple(PARTS)
    return measure({name: partial(PARTS[name], options) for name in parts}, options)


if __name__ == "__main__":
    sys.exit(main())
