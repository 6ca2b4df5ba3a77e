"""Runs ``plan``: finds the best ways to train a model on a cluster.

::

    python -m megatron.adaptive plan --model gpt2-xl --cluster cluster.yaml \\
        --global-batch-size 64 --output plan.json
    torchrun ... pretrain_gpt.py --plan plan.json ...
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.adaptive.cli.common import show
from megatron.adaptive.cli.doctor import node_report
from megatron.adaptive.cli.plan_inputs import add_input_arguments, parse_counts, read_inputs
from megatron.adaptive.cli.submit import slurm
from megatron.adaptive.cli.validate import main as check_runs
from megatron.adaptive.config.command_parser import CommandParser, number
from megatron.adaptive.config.input_files import read_text
from megatron.adaptive.config.plan_file import load_plan
from megatron.adaptive.config.schedule import parse_partition
from megatron.adaptive.config.schedule_specs import selectable_names
from megatron.adaptive.config.schema_files import FORMS, forms, quantity
from megatron.adaptive.errors import ConfigError, SetupError
from megatron.adaptive.planner.cluster import describe_cluster, make_cluster
from megatron.adaptive.planner.model_description import RECOMPUTE, Model
from megatron.adaptive.planner.model_file import PRESETS
from megatron.adaptive.planner.plan import (
    EXPORTS,
    compare_text,
    explain,
    export_text,
    plan_document,
    table,
    write_plan,
)
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.propose import (
    SCHEDULES,
    Proposal,
    Request,
    find_front,
    propose,
    why_not,
    write_front,
    write_page,
)
from megatron.adaptive.planner.search import SEARCHED, Objective, SearchOptions

_WHOLE = selectable_names(
    lambda spec: spec.planned == "by default" and spec.splits_backward == "never"
)
"""Orders whose backwards are not split."""


def main(argv: Sequence[str]) -> int:
    """Plans, prints the best plans, and writes what was asked for."""
    if "--check" in argv:
        return check_runs(["--data" if word == "--check" else word for word in argv])
    alone = any(word.startswith(("--compare", "--discover")) for word in argv)
    options = _parser(required=not alone).parse_args(argv)
    if options.discover is not None:
        return _discover(options.discover)
    if options.compare:
        files = [(str(path), load_plan(path)) for path in options.compare]
        show(compare_text(files))
        return 0
    ours = [f"--{name}" for name in ("output", "conf", "json", "pareto") if getattr(options, name)]
    ours += [f"--export {options.export}"] * (options.export in ("plan", "conf", "sbatch"))
    if options.fp8 and ours:
        raise ConfigError(
            f"--fp8 with {ours[0]}: the trainer has no fp8: drop one of them, or give --export"
            " megatron or torchtitan"
        )
    given = read_inputs(options)
    request = _request(options, given.model)
    if options.pareto is not None:
        return _front(options, given, request)
    proposal = propose(given, request)
    documents = [plan_document(row.plan, given, row.prediction) for row in proposal.rows]
    if options.export:
        file = str(options.output or "plan.json")
        print(export_text(documents[0], options.export, given.model.arguments, file), end="")
    elif options.json:
        print(json.dumps(documents, indent=2))
    else:
        _print(options, given, proposal)
        if options.explain:
            show("\n" + explain(proposal.rows[0], given))
            show("\nwhy not\n" + "\n".join(why_not(given, request, proposal.rows[0])))
    if options.page is not None:
        write_page(proposal.rows, given, options.page)
    if options.output is not None:
        write_plan(documents[0], options.output)
    if options.conf is not None:
        write_plan(documents[0], options.conf, as_conf=True)
    return 0


def _discover(files: Sequence[Path]) -> int:
    """Prints a cluster file, from outputs of tools or by asking those of this machine."""
    texts = [(str(path), read_text(path, "give what a tool printed; see --help")) for path in files]
    if not files and shutil.which("scontrol"):
        texts.append(("scontrol show node", slurm(["scontrol", "show", "node"])))
        with suppress(SetupError):  # without a plugin for topologies
            texts.append(("scontrol show topology", slurm(["scontrol", "show", "topology"])))
    if not files and shutil.which("nvidia-smi"):
        report = json.dumps({"host": socket.gethostname(), "node": node_report()})
        texts.append(("this node", report))
    known = [one for one in texts if "No topology" not in one[1] and (files or one[1].strip())]
    if not known:
        raise ConfigError(
            "--discover: neither scontrol nor nvidia-smi is here: run doctor --json on each node,"
            " and give the files"
        )
    document, assumed = describe_cluster(known)
    make_cluster(document, "--discover", {})
    show(json.dumps(document, indent=2))
    for text in assumed:
        show(f"assumed: {text}; correct it, or measure with profile", file=sys.stderr)
    return 0


def _parser(*, required: bool) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m megatron.adaptive plan",
        description="Find the best ways to train a model on a cluster; see docs/planner.md.",
    )
    add_input_arguments(parser, required=required)
    amount, plans = number(float, 0, 1e15), number(int, 1, 10_000)
    size: dict[str, Any] = {
        "type": number(int, 1, 100_000_000),
        "required": required,
        "metavar": "N",
    }
    parser.add_argument("--global-batch-size", **size, help="samples of a step")
    add = parser.add_argument_group("what is best").add_argument
    add("--objective", choices=("time", "cost"), default="time", help="least of it (%(default)s)")
    add("--time-limit", metavar="2 s", help="longest step; with --tokens the longest run, in h")
    add("--max-price", type=amount, metavar="X", help="most for an hour of all nodes")
    add("--budget", type=amount, metavar="X", help="most for the run of --tokens")
    tokens: dict[str, Any] = {"type": number(float, 0, 1e18), "default": 0.0, "metavar": "N"}
    add("--tokens", **tokens, help="of the whole run, as in 300e9")
    _add_choices(parser)
    add = parser.add_argument_group("output").add_argument
    add("--top", type=plans, default=3, metavar="N", help="plans to print (%(default)s)")
    add("--explain", action="store_true", help="where its time and memory go, and why no neighbour")
    add("--output", type=Path, metavar="PLAN.json", help="write the best as a plan file")
    add("--conf", type=Path, metavar="PLAN.sh", help="write it as variables of conf.sh")
    add("--pareto", type=Path, metavar="DIR", help="front of cost and speed over parts of it")
    add("--page", type=Path, metavar="FILE.html", help="plans, memory and the best one's timeline")
    add("--json", action="store_true", help="print the plans as JSON")
    add("--export", choices=EXPORTS, help="only print the best one, for another program")
    add("--compare", type=Path, nargs="+", metavar="PLAN.json", help="only compare plan files")
    text = "only print a cluster file, by Slurm and nvidia-smi or what these and doctor printed"
    add("--discover", type=Path, nargs="*", metavar="FILE", help=text)
    add("--check", metavar="DIR", help="only compare predictions with traced runs, as validate")
    add("--schema", choices=FORMS, action=_PrintSchema, help="only print that of an input file")
    return parser


class _PrintSchema(argparse.Action):
    """Prints the JSON schema of an input file, as ``--help`` prints the options."""

    def __call__(self, parser: argparse.ArgumentParser, *given: Any, **_: Any) -> None:
        print(json.dumps(forms()[str(given[1])], indent=2))
        parser.exit()


def _add_choices(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what may be chosen, all that is possible by default")
    add = group.add_argument
    for name, text in (
        ("tp", "tensor-parallel widths"),
        ("dp", "data-parallel replicas"),
        ("pp", "pipeline ranks"),
        ("expert-parallel-size", "replicas that the experts of each layer are spread over"),
        (
            "context-parallel-size",
            "ranks that share each sequence; without it, 4096 tokens at least are one rank's",
        ),
        ("micro-batch-sizes", "samples of a microbatch"),
    ):
        add(f"--{name}", metavar="1,2", help=text)
    add("--partition", metavar="8-8-8", help="layers of each stage")
    add("--recompute", metavar="none,full", help=f"of {', '.join(RECOMPUTE)}")
    known = f"{','.join(SCHEDULES)}; 1f1b,interleaved with --attention fused"
    add("--schedules", metavar="A,B", help=known)
    switch: dict[str, Any] = {"choices": ("both", "on", "off"), "default": "both"}
    add("--distributed-optimizer", **switch, help="%(default)s")
    add("--overlap-grad-reduce", action="store_true", help="the run overlaps it")
    text = "where tp is above 1; %(default)s"
    add("--sequence-parallel", nargs="?", const="on", **switch, help=text)
    add("--all-nodes", action="store_true", help="leave no node out")
    add("--unequal", action="store_true", help="also stages of unequal widths; run with --tp 1")


def _request(options: argparse.Namespace, model: Model) -> Request:
    recompute = tuple((options.recompute or ",".join(RECOMPUTE)).split(","))
    for name in recompute:
        if name not in RECOMPUTE:
            raise ConfigError(f"--recompute {name}: choose of {', '.join(RECOMPUTE)}")
    schedules: tuple[str, ...] = SCHEDULES
    is_fused = any(
        kind.attention_flops and not kind.attention_bytes for kind in model.kinds.values()
    )
    if (is_fused and not model.has_own_kernels) or model.name in PRESETS:
        # Transformer Engine's layers compute weight gradients within the backward; BERT and T5 are
        # for Megatron-LM's own programs, which know no other schedule.
        schedules = _WHOLE
    if options.schedules:
        schedules = tuple(options.schedules.split(","))
    for name in schedules:
        if name not in SEARCHED:
            raise ConfigError(f"--schedules {name}: choose of {', '.join(SEARCHED)}")
    partition: tuple[int, ...] = ()
    if options.partition:
        try:
            partition = parse_partition(options.partition)
        except ValueError as error:
            raise ConfigError(f"--partition {options.partition}: {error}") from error
    switches = {"both": (False, True), "on": (True,), "off": (False,)}
    return Request(
        global_batch=options.global_batch_size,
        objective=_objective(options, model),
        options=SearchOptions(
            schedules=schedules,
            tp=parse_counts("--tp", options.tp),
            dp=parse_counts("--dp", options.dp),
            pp=parse_counts("--pp", options.pp),
            expert_ranks=parse_counts("--expert-parallel-size", options.expert_parallel_size),
            micro_batch=parse_counts("--micro-batch-sizes", options.micro_batch_sizes),
            recompute=recompute,
            distributed_optimizer=switches[options.distributed_optimizer],
            overlap_reduce=options.overlap_grad_reduce,
            sequence_parallel=switches[options.sequence_parallel],
            context_ranks=parse_counts("--context-parallel-size", options.context_parallel_size),
            partition=partition,
            all_nodes=options.all_nodes,
            unequal=options.unequal,
            top=options.top,
        ),
    )


def _objective(options: argparse.Namespace, model: Model) -> Objective:
    """Turns limits of a run into limits of a step."""
    for name in ("max_price", "budget"):
        value = getattr(options, name)
        if value == 0:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: it must be above 0")
    if options.budget is not None and not options.tokens:
        raise ConfigError("--budget is for a whole run: give its --tokens too")
    steps = options.tokens / (options.global_batch_size * model.tokens_per_sample or 1)
    limit_s = math.inf
    if options.time_limit is not None:
        limit_s = quantity(options.time_limit, "s", "--time-limit")
        if options.tokens:
            limit_s /= steps
    return Objective(
        least=options.objective,
        most_seconds_per_step=limit_s,
        most_price_per_hour=math.inf if options.max_price is None else options.max_price,
        most_price_per_step=math.inf if options.budget is None else options.budget / steps,
    )


def _print(options: argparse.Namespace, inputs: PlanInputs, proposal: Proposal) -> None:
    model, cluster = inputs.model, inputs.cluster
    size = model.parameters
    words = f"{size / 1e9:.3g} B" if size >= 1e9 else f"{size / 1e6:.3g} M"
    types = model.precision.name + " and fp8" * model.precision.fp8
    show(
        f"{model.name}, {words} parameters, {types}, on {cluster.num_gpus} GPUs;"
        f" {options.global_batch_size} samples for a step\n"
    )
    show(table(proposal.rows, inputs, options.tokens))
    result = proposal.result
    if proposal.refused:
        show(f"left out what the trainer refuses: {proposal.refused[0]}")
    print(f"\n{result.configurations:,} configurations bounded, {result.timed:,} pipelines timed")
    if result.gap > 0:
        print(f"the best may be improved by {result.gap:.1%} at most")
    known = {gpu for _, gpu, _, _ in inputs.profile.layers}
    guessed = dict.fromkeys(node.gpu for node in cluster.types if node.gpu not in known)
    if guessed:
        show(
            f"estimated from data sheets, not measured: {', '.join(guessed)}; see"
            " python -m megatron.adaptive profile"
        )
    elif proposal.rows[0].prediction.estimated:
        print("some durations of the best lie beside those that were measured")


def _front(options: argparse.Namespace, inputs: PlanInputs, request: Request) -> int:
    """Finds the front over parts of the cluster, writes plans and charts, prints the table."""
    rows = find_front(inputs, request)
    write_front(rows, inputs, options.pareto)
    show(table(rows, inputs, options.tokens))
    show(f"\n{options.pareto}: front.html, front.png, front.json and a plan file for each point")
    return 0
