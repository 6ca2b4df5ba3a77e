"""Implements ``simulate``, which compares schedules by simulation.

python -m megatron.adaptive simulate --stages 8 --chunks 2 --microbatches 32 --jitter 0.3 \
    --schedules 1f1b,interleaved,zb-v,adaptive
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from megatron.adaptive.cli.common import show
from megatron.adaptive.config.command_parser import PROGRAM, CommandParser, count, number
from megatron.adaptive.config.sequence_slices import SLICE_CUTS
from megatron.adaptive.errors import ConfigError, ScheduleError
from megatron.adaptive.schedule.catalog import (
    Candidate,
    is_rule,
    make_candidate,
    policy_names,
    schedule_names,
)
from megatron.adaptive.schedule.choose_by_simulation import CandidateOutcome, evaluate, pace_of
from megatron.adaptive.schedule.workload import Link, StageProfile, StageTimes, load_profile
from megatron.adaptive.trace.files import replaced

_BAR = 40
_MAX_ACTIONS = 200_000
_MAX_WORK = 4_000_000
"""Maximum number of simulated forward passes per schedule. A million of them take up to 30 s."""
_SCHEDULES = "1f1b,interleaved,zb-v,adaptive"
_PROFILE_KEYS = {
    "forward": "forward_s",
    "backward": "backward_s",
    "weight": "weight_s",
    "exchange": "exchange_s",
    "exchanges": "exchanges",
    "latency": "latency_s",
    "occupancy": "occupancy_s",
    "jitter": "action_sigma",
    "microbatch_jitter": "microbatch_sigma",
    "slow_rank": "rank_factors",
}
"""Keys of a profile file, keyed by the option that sets the same value."""


def main(argv: Sequence[str]) -> int:
    """Simulates the schedules, prints a table, and writes a chart and a JSON file if requested."""
    options = _parser().parse_args(argv)
    profile = _profile(options, options.stages * options.chunks)
    spread = profile.action_sigma or profile.microbatch_sigma or profile.latency_sigma
    seeds = range(options.seed, options.seed + (options.draws if spread else 1))
    _check_work(options, len(seeds))
    outcomes, refused = _simulate(options, profile, list(seeds))
    draws = (
        f"{len(seeds)} draw{'s' * (len(seeds) > 1)} each; peak: activations on a rank, where 1 is "
        "one microbatch in all chunks of the rank"
    )
    if max(options.sequence_slices) > 1:
        counts = " or ".join(map(str, options.sequence_slices))
        draws += (
            f"\n{counts} slices per microbatch, {options.slice_cut}; attention takes "
            f"{profile.attention_share:.0%} of a forward pass"
        )
    _print_table(draws, outcomes)
    if refused:
        show()
    for name, reason in refused.items():
        show(f"left out {name}: {reason}")
    if options.chart is not None:
        # Import this module only here, because the import takes half a second and only charts need
        # it.
        from megatron.adaptive.trace.views.picture import write_comparison

        write_comparison([(str(o.candidate), o.example) for o in outcomes], options.chart)
        show(f"\nchart: {options.chart}")
    if options.json is not None:
        _write_json(options.json, outcomes)
    return 0


def _simulate(
    options: argparse.Namespace, profile: StageProfile, seeds: Sequence[int]
) -> tuple[list[CandidateOutcome], dict[str, ScheduleError]]:
    """Simulates each schedule in ``--schedules`` that supports the sizes in ``options``.

    Returns:
        Outcomes in the order of ``--schedules``, and the reasons why the other schedules do not
        support these sizes, keyed by schedule.

    Raises:
        ConfigError: The name of a schedule is unknown, or no schedule supports these sizes.
    """
    outcomes: list[CandidateOutcome] = []
    refused: dict[str, ScheduleError] = {}
    counts = options.sequence_slices
    names = [name.strip() for name in options.schedules.split(",")]
    for name, num_slices in product(names, counts):
        try:
            is_rule(name)
            if name in schedule_names() and name not in policy_names():
                raise ScheduleError(
                    f"schedule {name!r} has no backward passes, because it is for validation only; "
                    f"choose one of {', '.join(policy_names())}"
                )
        except ScheduleError as error:
            raise ConfigError(f"--schedules {options.schedules}: {error}") from error
        try:
            candidate = _candidate(options, name, num_slices)
            if num_slices > 1:
                # The schedule "hinted" orders actions by their relative durations. These durations
                # depend on the share of attention: attention has no weight gradients, and the
                # backward pass of attention takes twice as long as its forward pass.
                candidate = replace(candidate, pace=pace_of(profile, num_slices))
            outcomes.append(evaluate(candidate, options.microbatches, profile, seeds))
        except ScheduleError as error:
            slices = f" with {num_slices} slices" if len(counts) > 1 else ""
            refused[f"{name}{slices}"] = error
    if not outcomes:
        reasons = "; ".join(map(str, refused.values()))
        raise ConfigError(f"--schedules {options.schedules}: {reasons}")
    return outcomes, refused


def _write_json(path: Path, outcomes: Sequence[CandidateOutcome]) -> None:
    records = [
        {
            "schedule": outcome.candidate.name,
            "placement": outcome.candidate.placement.kind,
            "chunks": outcome.candidate.placement.num_chunks,
            "weight_pieces": outcome.candidate.weight_pieces,
            "cap": outcome.candidate.cap,
            "sequence_slices": outcome.candidate.num_slices,
            "makespans_s": list(outcome.makespans_s),
            "bubble_fraction": outcome.bubble_fraction,
            "efficiency": 1 - outcome.bubble_fraction,
            "peak_microbatches": outcome.peak_units,
        }
        for outcome in outcomes
    ]
    with replaced(path) as temporary:
        Path(temporary).write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Formats help texts, including the default values of options."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, []) else super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=f"{PROGRAM} simulate",
        description="Compare pipeline schedules on simulated work.",
        formatter_class=_Formatter,
    )
    add = parser.add_argument
    add("--stages", type=count, required=True, help="number of pipeline ranks")
    text = "number of chunks per rank, for schedules that support several"
    add("--chunks", type=count, default=2, help=text)
    add("--microbatches", type=count, required=True, help="number of microbatches per step")
    text = f"schedules to compare: {', '.join(policy_names())}"
    add("--schedules", default=_SCHEDULES, metavar="A,B", help=text)
    work = parser.add_argument_group("work")
    add = work.add_argument
    text = "profile with measured times; see docs/reference/schedules.md"
    add("--profile", type=Path, metavar="FILE", help=text)
    for name, default, unit, text in (
        ("forward", "1", "S", "seconds of a rank's forward pass"),
        ("exchange", "0", "S", "seconds of all-to-alls in each forward and backward pass"),
        ("latency", "0", "S", "seconds until a message arrives at the next rank"),
        ("occupancy", "0", "S", "seconds for which a message occupies its link"),
        ("jitter", "0", "SIGMA", "sigma of lognormal jitter per action"),
        ("microbatch-jitter", "0", "SIGMA", "sigma of lognormal jitter per microbatch"),
    ):
        add(f"--{name}", type=float, metavar=unit, help=f"{text} (default: {default})")
    text = "seconds of a rank's {} (default: --forward x (1 {} --attention-share))"
    add("--backward", type=float, metavar="S", help=text.format("backward pass for inputs", "+"))
    add("--weight", type=float, metavar="S", help=text.format("weight gradients", "-"))
    text = "number of all-to-alls in a chunk's forward pass, with --exchange (default: 4)"
    add("--exchanges", type=count, help=text)
    slow = "slow down a rank by this factor; may be repeated"
    add("--slow-rank", action="append", default=[], metavar="R:FACTOR", help=slow)
    _add_slices(parser)
    rule = parser.add_argument_group("run-time rules")
    add = rule.add_argument
    text = "maximum number of microbatches whose activations a rank holds at the same time"
    add("--cap", type=float, metavar="MICROBATCHES", help=text)
    pieces = number(int, 0, 1000)
    add(
        "--weight-pieces",
        type=pieces,
        metavar="N",
        help="maximum number of parts of a weight gradient; 0 computes weight gradients in the "
        "backward pass",
    )
    text = (
        "order in which stages are assigned to ranks, for schedules that support both; v requires "
        "2 chunks"
    )
    add("--placement", choices=("loop", "v"), help=text)
    out = parser.add_argument_group("output")
    add = out.add_argument
    text = "number of simulated steps per schedule, if there is jitter"
    add("--draws", type=count, default=20, help=text)
    add("--seed", type=number(int, 0, 2**53), default=0, help="seed of the first simulated step")
    add("--chart", type=Path, metavar="FILE.png", help="also draw the steps as an image")
    add("--json", type=Path, metavar="FILE", help="also write the results to this file")
    return parser


def _add_slices(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sequence slices").add_argument
    text = (
        "number of slices into which each microbatch is cut along its sequence; several numbers "
        "to compare"
    )
    add("--sequence-slices", type=_counts, default="1", metavar="N,N", help=text)
    text = (
        "fraction of a forward pass that attention takes, from 0 to 1; the backward pass of "
        "attention takes twice as long as its forward pass"
    )
    add("--attention-share", type=number(float, 0, 1), default=0.0, metavar="SHARE", help=text)
    text = "whether slices have equal costs or equal numbers of tokens"
    add("--slice-cut", choices=SLICE_CUTS, default=SLICE_CUTS[0], help=text)
    text = (
        "overhead in seconds of each slice after the first, added to both the forward and the "
        "backward pass of a rank"
    )
    add("--slice-overhead", type=number(float, 0, 1e5), default=0.0, metavar="S", help=text)


def _counts(text: str) -> list[int]:
    """Parses ``text``, a comma-separated list of positive integers."""
    return [count(part.strip()) for part in text.split(",")]


def _profile(options: argparse.Namespace, num_stages: int) -> StageProfile:
    if options.profile is not None:
        for name, key in _PROFILE_KEYS.items():
            if getattr(options, name) not in (None, []):
                raise ConfigError(
                    f"--{name.replace('_', '-')} cannot be combined with --profile; set {key} in "
                    "the profile"
                )
        profile = load_profile(options.profile, num_stages=num_stages)
        return replace(
            profile,
            attention_share=options.attention_share,
            slice_cut=options.slice_cut,
            slice_s=options.slice_overhead / options.chunks,
        )
    if options.exchanges is not None and options.exchange is None:
        raise ConfigError(
            f"--exchanges {options.exchanges} requires --exchange, the time of all-to-alls; add "
            "--exchange S, or remove --exchanges"
        )
    chunks = options.chunks
    share = options.attention_share
    forward_s = 1.0 if options.forward is None else options.forward
    exchange_s = options.exchange or 0.0
    backward_s = forward_s * (1 + share) if options.backward is None else options.backward
    weight_s = forward_s * (1 - share) if options.weight is None else options.weight
    return StageProfile(
        times=StageTimes.equal(
            num_stages,
            forward_s=forward_s / chunks,
            backward_s=backward_s / chunks,
            weight_s=weight_s / chunks,
            exchange_s=exchange_s / chunks,
            exchanges=(options.exchanges or 4) if exchange_s else 0,
        ),
        link=Link(latency_s=options.latency or 0.0, occupancy_s=options.occupancy or 0.0),
        rank_factors=_rank_factors(options),
        action_sigma=options.jitter or 0.0,
        microbatch_sigma=options.microbatch_jitter or 0.0,
        attention_share=share,
        slice_cut=options.slice_cut,
        slice_s=options.slice_overhead / chunks,
    )


def _check_work(options: argparse.Namespace, draws: int) -> None:
    """Raises an error if the simulation would take many minutes or too much memory.

    ``draws`` is the number of simulations per schedule, each with different random durations.
    """
    most = max(options.sequence_slices)
    work = options.stages * options.chunks * options.microbatches * most
    if work > _MAX_ACTIONS or work * draws > _MAX_WORK:
        slices = ""
        if most > 1:
            slices = f" x --sequence-slices {most}"
        raise ConfigError(
            f"--stages {options.stages} x --chunks {options.chunks} x --microbatches "
            f"{options.microbatches}{slices} result in {work:,} actions in each of {draws} "
            f"draws, but at most {_MAX_ACTIONS:,} are allowed per draw, and {_MAX_WORK:,} in all "
            "draws together; reduce these numbers"
        )


def _rank_factors(options: argparse.Namespace) -> tuple[float, ...] | None:
    if not options.slow_rank:
        return None
    factors = [1.0] * options.stages
    for text in options.slow_rank:
        rank, _, factor = text.partition(":")
        try:
            factors[int(rank)] = float(factor)
        except (ValueError, IndexError):
            raise ConfigError(
                "--slow-rank must be RANK:FACTOR, with a rank from 0 to"
                f" {options.stages - 1}, got {text}"
            ) from None
    return tuple(factors)


def _candidate(options: argparse.Namespace, name: str, num_slices: int) -> Candidate:
    return make_candidate(
        name,
        options.stages,
        options.chunks,
        options.microbatches,
        placement_kind=options.placement,
        cap=options.cap,
        weight_pieces=options.weight_pieces,
        num_slices=num_slices,
    )


def _print_table(head: str, outcomes: Sequence[CandidateOutcome]) -> None:
    """Prints each schedule's step time, speed-up over the first schedule, bubble and memory.

    ``head`` is the text above the table.
    """
    first = outcomes[0].mean_s
    slowest = max(outcome.mean_s for outcome in outcomes)
    if not first:
        raise ConfigError(
            "all actions take 0 s; set --forward, --backward or --weight to a positive value"
        )
    width = max(len(str(outcome.candidate)) for outcome in outcomes)
    is_sliced = any(outcome.candidate.num_slices > 1 for outcome in outcomes)
    efficiency = "efficiency  " * is_sliced
    print(f"{head}\n\n{'schedule':{width}}  step s  speed-up  bubble  {efficiency} peak")
    for outcome in outcomes:
        bar = "█" * round(_BAR * outcome.mean_s / slowest)
        efficiency = f"{1 - outcome.bubble_fraction:10.3f}  " * is_sliced
        print(
            f"{outcome.candidate!s:{width}}  {outcome.mean_s:6.4g}  {first / outcome.mean_s:7.3f}x"
            f"  {outcome.bubble_fraction:5.1%}  {efficiency}{outcome.peak_units:5.3g}  {bar}"
        )
