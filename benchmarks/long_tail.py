"""Compares methods of training on documents whose lengths have a long tail.

    python benchmarks/long_tail.py [--quick] [--json FILE]

Four processes exchange real messages and sleep instead of computing. All methods train on the same
documents: lengths are log-normal with sigma 1.5, and the longest documents are truncated to 32
times the median. There are three kinds of microbatches: one document that is padded to the length
of the longest (1F1B), a row of documents with the length of the longest document (packing: 1F1B, or
the default schedule in a V), or such a row that is cut into slices of tokens (``--slice-tokens``).
Exits with status 1 if a goal is missed.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from harness.emulated_work import EmulatedRank  # noqa: E402
from harness.processes import fork_ranks  # noqa: E402
from harness.report import Result, Row, measure, measured, parser_of, ratios  # noqa: E402
from megatron.adaptive.config.sequence_slices import Cut, SliceRule  # noqa: E402
from megatron.adaptive.data.loader import LengthMicrobatches  # noqa: E402
from megatron.adaptive.schedule.action import ActionKind  # noqa: E402
from megatron.adaptive.schedule.catalog import Candidate  # noqa: E402
from megatron.adaptive.schedule.document_rows import Batching  # noqa: E402
from megatron.adaptive.schedule.memory_caps import default_cap  # noqa: E402
from megatron.adaptive.schedule.stage_placement import Placement  # noqa: E402

RANKS = 4
MEDIAN = 64  # Lengths are in tokens.
LONGEST = 32 * MEDIAN
SLICE_TOKENS = 2 * MEDIAN
DOCUMENTS = 64
PAIR_COST = 0.4 / LONGEST
"""Cost of attention per pair of tokens in a document, relative to the other work per token."""
TOKEN_S = 2e-5
"""Seconds that the forward pass of a token takes in half of a rank's layers, without attention."""
GOALS = {"packing, 1f1b": 1.3, "padding, 1f1b": 3.0}
SLICED = "slices, adaptive in a V"
LIMIT_S = 900.0


class Way(NamedTuple):
    """Method to train on the documents of a step: schedule, microbatches and their slices.

    Attributes:
        schedule: Name of the schedule.
        in_v: Whether each rank has two chunks in a V, and weight gradients are separate actions.
        cuts: For each microbatch, its documents and the positions at which it is cut into slices.
    """

    schedule: str
    in_v: bool
    cuts: list[Cut]

    @property
    def placement(self) -> Placement:
        """Returns the placement, which assigns stages to ranks."""
        return Placement(
            num_ranks=RANKS, num_chunks=1 + self.in_v, kind="v" if self.in_v else "loop"
        )

    @property
    def items(self) -> list[tuple[int, float]]:
        """Returns the number of tokens and the attention cost of each item (slice or whole row)."""
        return [
            (
                sum(part.end - part.start for part in parts),
                PAIR_COST
                * sum(
                    (part.end - part.begin) ** 2 - (part.start - part.begin) ** 2 for part in parts
                ),
            )
            for cut in self.cuts
            for parts in map(cut.pieces, range(len(cut.ends)))
        ]

    def seconds(self) -> dict[ActionKind, list[list[float]]]:
        """Returns the durations in seconds of each kind of action, indexed by ``[stage][item]``.

        Attention takes twice as long in the backward pass for inputs (B) as in the forward pass
        (F). The backward pass for weights (W) does not contain attention.
        """
        tokens, attention = np.array(self.items).T
        halves = 2 // self.placement.num_chunks
        return {
            kind: [(work * halves * TOKEN_S).tolist()] * self.placement.num_stages
            for kind, work in zip(
                ActionKind, (tokens + attention, tokens + 2 * attention, tokens), strict=True
            )
        }


def ways(seed: int) -> tuple[int, dict[str, Way]]:
    """Returns the number of tokens in a step, and the compared methods, keyed by name.

    ``seed`` determines the lengths of the documents.
    """
    drawn = np.random.default_rng(seed).lognormal(0.0, 1.5, DOCUMENTS) * MEDIAN
    lengths = np.clip(drawn, 1, LONGEST).astype(int).tolist()
    lengths[0] = LONGEST

    def cuts(rule: SliceRule, **batching: Any) -> list[Cut]:
        made = Batching(micro_batch_size=1, replicas=1, varies=True, **batching)
        rows = LengthMicrobatches(lengths, made, 0, None).contents
        return [rule.cut(positions, documents) for positions, *documents in rows]

    whole = SliceRule(slices=1, is_packed=True)
    packed = cuts(whole, pack_to=LONGEST)
    padded = [replace(cut, documents=()) for cut in cuts(whole, multiple=LONGEST)]
    tokens = replace(whole, tokens=SLICE_TOKENS)
    return sum(lengths), {
        "padding, 1f1b": Way("1f1b", False, padded),
        "packing, 1f1b": Way("1f1b", False, packed),
        "packing, adaptive in a V": Way("adaptive", True, packed),
        SLICED: Way("adaptive", True, cuts(tokens, slice_tokens=SLICE_TOKENS, varies_slices=True)),
    }


def run_rank(rank: int, seeds: list[int]) -> list[dict[str, Any]]:
    """Runs a step with each method for each of ``seeds`` on rank ``rank``.

    Returns a record per step with its duration, and its maximum memory in tokens.
    """
    member = EmulatedRank(rank)
    records = []
    for seed in seeds:
        tokens, by_name = ways(seed)
        for name, way in by_name.items():
            num_slices = tuple(len(cut.ends) for cut in way.cuts)
            count = len(way.cuts)
            sizes = [size for size, _ in way.items]
            mean = sum(sizes) / len(sizes)
            mean_number = len(sizes) / count
            largest = max(cut.ends[-1] for cut in way.cuts) / (mean * mean_number)
            cap = max(default_cap(way.placement, count, mean_number), largest)
            candidate = Candidate(
                name=way.schedule,
                placement=way.placement,
                weight_pieces=2 if way.in_v else 0,
                cap=cap if way.in_v else None,
            )
            step = member.step(
                candidate,
                way.seconds(),
                count,
                num_slices=1 if max(num_slices) == 1 else num_slices,
                sizes=[size / mean for size in sizes],
                unit=mean * mean_number,
            )
            records.append(
                {"seed": seed, "way": name, "tokens": tokens, "s": step.seconds, "peak": step.peak}
            )
    member.close()
    return records


def long_tail(options: Any) -> Result:
    """Runs steps with all methods, and compares their speed and memory."""
    seeds = list(range(1 if options.quick else 3))
    records = fork_ranks("benchmarks.long_tail", RANKS, LIMIT_S, seeds)
    by_way = {name: [record for record in records if record["way"] == name] for name in ways(0)[1]}
    rows = []
    for name, steps in by_way.items():
        held = float(np.median([step["peak"] / LONGEST for step in steps]))
        if name == SLICED:
            rows.append(Row(what=f"{name}: memory", value=held, unit="longest documents"))
            continue
        speeds = ratios([step["s"] for step in steps], [step["s"] for step in by_way[SLICED]])
        title = f"tokens/s of slices over {name}"
        note = f"holds {held:.2f} longest documents at most"
        rows.append(measured(title, speeds, goal=GOALS.get(name), least=True, note=note))
    return Result(rows=rows, facts={"records": records})


def main() -> int:
    """Measures the methods and prints the results. Returns 1 if a goal is missed, otherwise 0."""
    options = parser_of(__doc__, ("long tail",)).parse_args()
    return measure({"long tail": partial(long_tail, options)}, options)


if __name__ == "__main__":
    sys.exit(main())
