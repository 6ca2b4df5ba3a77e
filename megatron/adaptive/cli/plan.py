r"""Implements ``plan``, which finds the best ways to train a model on a cluster.

::

    python -m megatron.adaptive plan --model gpt2-xl --cluster cluster.yaml \\
        --global-batch-size 64 --output plan.json
    torchrun ... pretrain_gpt.py --plan plan.json ...
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.adaptive.cli.common import show
from megatron.adaptive.cli.doctor import node_report
from megatron.adaptive.cli.plan_inputs import (
    add_input_arguments,
    parse_counts,
    read_inputs,
    with_documents,
)
from megatron.adaptive.cli.submit import slurm
from megatron.adaptive.cli.try_plan import try_plan
from megatron.adaptive.cli.validate import main as check_runs
from megatron.adaptive.config.command_parser import PROGRAM, CommandParser, flags_in, number
from megatron.adaptive.config.input_files import read_text
from megatron.adaptive.config.plan_file import load_plan
from megatron.adaptive.config.schedule import parse_partition
from megatron.adaptive.config.schedule_specs import selectable_names
from megatron.adaptive.config.schema_files import FORMS, forms, quantity
from megatron.adaptive.errors import ConfigError, SetupError
from megatron.adaptive.planner.chunk_partition import SEARCHED
from megatron.adaptive.planner.cluster import make_cluster
from megatron.adaptive.planner.discover_cluster import describe_cluster
from megatron.adaptive.planner.explain_plan import explain, packed_advice, why_not
from megatron.adaptive.planner.model_description import RECOMPUTE, Model
from megatron.adaptive.planner.model_file import PRESETS
from megatron.adaptive.planner.plan import EXPORTS, export_text, plan_document, write_plan
from megatron.adaptive.planner.plan_text import compare_text, table
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.propose import (
    SCHEDULES,
    Proposal,
    Request,
    find_front,
    propose,
    write_front,
    write_page,
)
from megatron.adaptive.planner.search_options import Objective, SearchOptions
from megatron.adaptive.planner.trainer_rules import (
    needs_lengths,
    tokens_to_try,
    usual_slices,
    widest_tp,
)

_WHOLE = selectable_names(
    lambda spec: spec.planned == "by default" and spec.splits_backward == "never"
)
"""Names of the schedules that compute weight gradients as part of the backward pass."""

_OF_TRY = ("--rank", "--world-size")
_USED_IN_MODE = {
    "--compare": (),
    "--discover": (),
    "--try": (*_OF_TRY, "--model", "--attention", "--output", "--json"),
}
"""Other options that a mode uses, keyed by the option that selects the mode."""
_UNUSED_BESIDE = {
    "--pareto": ("--output", "--conf", "--json", "--export", "--explain", "--page"),
    "--export": ("--json", "--explain"),
    "--json": ("--explain",),
}
"""Options that have no effect if another option is set, keyed by this other option."""


def main(argv: Sequence[str]) -> int:
    """Searches for the best plans, prints them, and writes the files that ``argv`` requests."""
    if any(argument.partition("=")[0] == "--check" for argument in argv):
        data = re.compile("--check(?==|$)")
        return check_runs([data.sub("--data", argument) for argument in argv])
    is_standalone = any(
        argument.startswith(("--compare", "--discover", "--try")) for argument in argv
    )
    options = _parser(required=not is_standalone).parse_args(argv)
    names = [f"--{name.rstrip('_').replace('_', '-')}" for name in vars(options)]
    # An argument with spaces is a value, such as the trainer's flags in --model.
    _check_modes(names, flags_in([argument for argument in argv if " " not in argument]))
    if options.try_ is not None:
        return try_plan(options)
    if options.discover is not None:
        return _discover(options.discover)
    if options.compare:
        files = [(str(path), load_plan(path)) for path in options.compare]
        show(compare_text(files))
        return 0
    run_options = [
        f"--{name}" for name in ("output", "conf", "json", "pareto") if getattr(options, name)
    ]
    run_options += [f"--export {options.export}"] * (options.export in ("plan", "conf", "sbatch"))
    if options.fp8 and run_options:
        raise ConfigError(
            f"--fp8 cannot be combined with {run_options[0]}, because the trainer does not support"
            " fp8; remove one of them, or use --export megatron or torchtitan"
        )
    inputs = with_documents(
        read_inputs(options), options.document_lengths, options.global_batch_size
    )
    request = _request(options, inputs)
    if options.pareto is not None:
        return _front(options, inputs, request)
    proposal = propose(inputs, request)
    documents = [plan_document(row.plan, inputs, row.prediction) for row in proposal.rows]
    if options.export:
        file = str(options.output or "plan.json")
        print(export_text(documents[0], options.export, inputs.model.arguments, file), end="")
    elif options.json:
        print(json.dumps(documents, indent=2))
    else:
        _print(options, inputs, proposal)
        if options.explain:
            show("\n" + explain(proposal.rows[0], inputs))
            show("\nwhy not\n" + "\n".join(why_not(inputs, request, proposal.rows[0])))
    if options.page is not None:
        write_page(proposal.rows, inputs, options.page)
    if options.output is not None:
        write_plan(documents[0], options.output)
    if options.conf is not None:
        write_plan(documents[0], options.conf, as_conf=True)
    return 0


def _check_modes(names: Sequence[str], values_of: Mapping[str, Sequence[str]]) -> None:
    """Checks that the selected mode uses all options on the command line.

    Args:
        names: Names of all options of ``plan``.
        values_of: Values of the options on the command line, keyed by option name.

    Raises:
        ConfigError: The selected mode does not use an option.
    """
    mode = next((mode for mode in _USED_IN_MODE if mode in values_of), None)
    if mode is not None:
        unused = set(names) - {mode, *_USED_IN_MODE[mode]}
        _check_unused(mode, [name for name in values_of if name in unused])
        return
    for name in _OF_TRY:
        if name in values_of:
            text = " ".join([name, *values_of[name]])
            raise ConfigError(
                f"{text} requires --try and a plan file; add --try PLAN.json, or remove {name}"
            )
    for other, ignored in _UNUSED_BESIDE.items():
        if other in values_of:
            _check_unused(other, [name for name in ignored if name in values_of])


def _check_unused(name: str, unused: Sequence[str]) -> None:
    if unused:
        raise ConfigError(f"{unused[0]} has no effect with {name}; remove one of them")


def _discover(files: Sequence[Path]) -> int:
    """Prints a cluster file, based on the output of tools such as ``scontrol`` or ``nvidia-smi``.

    Args:
        files: Files with the output of such tools. If there are no files, the tools are run on this
            machine.
    """
    texts = [
        (str(path), read_text(path, "pass a file with a tool's output; see --help"))
        for path in files
    ]
    if not files and shutil.which("scontrol"):
        texts.append(("scontrol show node", slurm(["scontrol", "show", "node"])))
        with suppress(SetupError):  # The command fails if Slurm has no topology plugin.
            texts.append(("scontrol show topology", slurm(["scontrol", "show", "topology"])))
    if not files and shutil.which("nvidia-smi"):
        report = json.dumps({"host": socket.gethostname(), "node": node_report()})
        texts.append(("this node", report))
    sources = [
        entry for entry in texts if "No topology" not in entry[1] and (files or entry[1].strip())
    ]
    if not sources:
        raise ConfigError(
            '--discover found neither scontrol nor nvidia-smi; run "doctor --json" on each node, '
            "and pass files with its output to --discover"
        )
    document, assumed = describe_cluster(sources)
    make_cluster(document, "--discover", {})
    show(json.dumps(document, indent=2))
    for text in assumed:
        show(
            f"assumed: {text}; correct this value if it is wrong, or measure it with the profile "
            "command",
            file=sys.stderr,
        )
    return 0


def _parser(*, required: bool) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=f"{PROGRAM} plan",
        description="Find the best ways to train a model on a cluster; see docs/planner.md.",
    )
    add_input_arguments(parser, required=required)
    amount = number(float, 0, 1e15)
    plans = number(int, 1, 10_000)
    size: dict[str, Any] = {
        "type": number(int, 1, 100_000_000),
        "required": required,
        "metavar": "N",
    }
    parser.add_argument("--global-batch-size", **size, help="samples per step")
    text = "lengths of packed documents: PREFIX of .bin and .idx, FILE, or lognormal:MEDIAN:SIGMA"
    parser.add_argument("--document-lengths", metavar="LENGTHS", help=text)
    add = parser.add_argument_group("objective and limits").add_argument
    text = "minimize the step time or the cost (%(default)s)"
    add("--objective", choices=("time", "cost"), default="time", help=text)
    text = "maximum step time; with --tokens, maximum hours of the run"
    add("--time-limit", metavar="2 s", help=text)
    add("--max-price", type=amount, metavar="X", help="maximum price per hour of all nodes")
    add("--budget", type=amount, metavar="X", help="maximum price of the run; requires --tokens")
    tokens: dict[str, Any] = {"type": number(float, 0, 1e18), "default": 0.0, "metavar": "N"}
    add("--tokens", **tokens, help="number of tokens in the whole run, such as 300e9")
    _add_choices(parser)
    add = parser.add_argument_group("output").add_argument
    add("--top", type=plans, default=3, metavar="N", help="number of plans to print (%(default)s)")
    text = "show how the best plan uses time and memory, and why similar plans are worse"
    add("--explain", action="store_true", help=text)
    add("--output", type=Path, metavar="PLAN.json", help="write the best plan as a plan file")
    add("--conf", type=Path, metavar="PLAN.sh", help="write the best plan as variables of conf.sh")
    text = "find the Pareto front of cost and speed for parts of the cluster"
    add("--pareto", type=Path, metavar="DIR", help=text)
    text = "write the plans and a timeline as an HTML page"
    add("--page", type=Path, metavar="FILE.html", help=text)
    add("--json", action="store_true", help="print the plans as JSON")
    add("--export", choices=EXPORTS, help="only print the best plan in another program's format")
    add("--compare", type=Path, nargs="+", metavar="PLAN.json", help="only compare plan files")
    text = (
        "only print a cluster file, based on the output of scontrol and nvidia-smi, or on files "
        "with the output of these tools or of doctor"
    )
    add("--discover", type=Path, nargs="*", metavar="FILE", help=text)
    text = "only compare predictions with traced runs, as plan validate does"
    add("--check", metavar="DIR", help=text)
    text = "only run one rank of a plan on this device, and add the measurements to the plan file"
    add("--try", dest="try_", type=Path, metavar="PLAN.json", help=text)
    ranks = number(int, 0, 100_000_000)
    add("--rank", type=ranks, default=0, metavar="R", help="rank to run with --try (%(default)s)")
    text = "number of ranks in the job with --try, which must match the plan"
    add("--world-size", type=plans, metavar="N", help=text)
    text = "only print the JSON schema of an input file"
    add("--schema", choices=FORMS, action=_PrintSchema, help=text)
    return parser


class _PrintSchema(argparse.Action):
    """Prints the JSON schema of an input file and exits, as ``--help`` does."""

    def __call__(self, parser: argparse.ArgumentParser, *values: Any, **_: Any) -> None:
        print(json.dumps(forms()[str(values[1])], indent=2))
        parser.exit()


def _add_choices(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("values to choose from (default: all possible values)")
    add = group.add_argument
    for name, text in (
        ("tp", "tensor-parallel widths"),
        ("dp", "data-parallel replicas"),
        ("pp", "pipeline ranks"),
        ("expert-parallel-size", "replicas that share the experts of each layer"),
        (
            "context-parallel-size",
            "ranks that share each sequence; by default, each rank gets at least 4096 tokens",
        ),
        ("micro-batch-sizes", "samples per microbatch"),
        (
            "sequence-slices",
            "slices per sequence; by default up to 16, with at least 1024 tokens on average",
        ),
    ):
        add(f"--{name}", metavar="1,2", help=text)
    text = "tokens per slice of packed documents, or auto; requires --document-lengths"
    add("--slice-tokens", metavar="1024,2048", help=text)
    add("--partition", metavar="8-8-8", help="layers of each stage")
    add("--recompute", metavar="none,full", help=f"any of {', '.join(RECOMPUTE)}")
    text = f"default: {','.join(SCHEDULES)}, or 1f1b,interleaved if --attention is fused"
    add("--schedules", metavar="A,B", help=text)
    switch: dict[str, Any] = {"choices": ("both", "on", "off"), "default": "both"}
    add("--distributed-optimizer", **switch, help="shard the optimizer state (%(default)s)")
    add("--overlap-grad-reduce", action="store_true", help="plan runs that use this flag")
    text = "used if tp is above 1 (%(default)s)"
    add("--sequence-parallel", nargs="?", const="on", **switch, help=text)
    add("--all-nodes", action="store_true", help="use all nodes")
    text = "also plan stages with different data-parallel sizes; requires --tp 1"
    add("--unequal", action="store_true", help=text)


def _request(options: argparse.Namespace, inputs: PlanInputs) -> Request:
    model = inputs.model
    recompute = tuple((options.recompute or ",".join(RECOMPUTE)).split(","))
    for name in recompute:
        if name not in RECOMPUTE:
            raise ConfigError(f"--recompute must be one of {', '.join(RECOMPUTE)}, got {name}")
    schedules: tuple[str, ...] = SCHEDULES
    is_fused = any(
        kind.attention_flops and not kind.attention_bytes for kind in model.kinds.values()
    )
    if (is_fused and not model.has_own_kernels) or model.name in PRESETS:
        # Transformer Engine's layers compute weight gradients as part of the backward pass.
        # Megatron-LM's programs for BERT and T5 have no schedules that split the backward pass.
        schedules = _WHOLE
    if options.schedules:
        schedules = tuple(options.schedules.split(","))
    for name in schedules:
        if name not in SEARCHED:
            raise ConfigError(
                f"--schedules must be a list of names from {', '.join(SEARCHED)}, got {name}"
            )
    partition: tuple[int, ...] = ()
    if options.partition:
        try:
            partition = parse_partition(options.partition)
        except ValueError as error:
            raise ConfigError(f"--partition {options.partition}: {error}") from error
    switches = {"both": (False, True), "on": (True,), "off": (False,)}
    return Request(
        global_batch=options.global_batch_size,
        objective=_objective(options, inputs),
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
            slices=_slices(options, model),
            slice_tokens=_slice_tokens(options, inputs),
            partition=partition,
            all_nodes=options.all_nodes,
            unequal=options.unequal,
            top=options.top,
        ),
    )


def _slices(options: argparse.Namespace, model: Model) -> tuple[int, ...]:
    """Returns the candidate values for the number of slices per sequence."""
    if options.slice_tokens is None:
        return parse_counts("--sequence-slices", options.sequence_slices) or usual_slices(model)
    for flag, value in (("--sequence-slices", options.sequence_slices), ("--fp8", options.fp8)):
        if value:
            text = flag if value is True else f"{flag} {value}"
            raise ConfigError(
                f"--slice-tokens {options.slice_tokens} conflicts with {text}; remove one of them"
            )
    return (1,)


def _slice_tokens(options: argparse.Namespace, inputs: PlanInputs) -> tuple[int, ...]:
    """Returns the candidate slice lengths for packed documents, in tokens, longest first."""
    documents, text = inputs.documents, options.slice_tokens
    if text is None and documents is not None:
        raise ConfigError(
            f"--document-lengths {options.document_lengths} has no effect without --slice-tokens;"
            " add --slice-tokens auto, or remove --document-lengths"
        )
    if text is not None and documents is None:
        raise ConfigError(needs_lengths(text))
    if text != "auto" or documents is None:
        return parse_counts("--slice-tokens", text)[::-1]
    # If sequence parallelism is on, tensor-parallel ranks divide each slice.
    is_divided = options.sequence_parallel != "off"
    widest = widest_tp(parse_counts("--tp", options.tp), inputs.cluster)
    return tokens_to_try(documents, widest if is_divided else 1)


def _objective(options: argparse.Namespace, inputs: PlanInputs) -> Objective:
    """Converts limits on a whole run, such as a budget, into limits on a single step."""
    for name in ("max_price", "budget"):
        value = getattr(options, name)
        if value == 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be positive, got {value:g}")
    if options.budget is not None and not options.tokens:
        raise ConfigError(
            "--budget requires --tokens, the number of tokens in the whole run; add --tokens N"
        )
    steps = options.tokens / (inputs.step_tokens(options.global_batch_size) or 1)
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
    model = inputs.model
    cluster = inputs.cluster
    size = model.parameters
    amount = f"{size / 1e9:.3g} B" if size >= 1e9 else f"{size / 1e6:.3g} M"
    most = "up to " if inputs.documents is not None else ""
    # The number of tokens is 1 if the model is a list of layers that does not specify it.
    length = f" of {most}{model.tokens_per_sample:,} tokens" * (model.tokens_per_sample > 1)
    types = model.precision.name + " and fp8" * model.precision.fp8
    show(
        f"{model.name}, {amount} parameters, {types}, on {cluster.num_gpus} GPUs; "
        f"{options.global_batch_size} samples{length} per step\n"
    )
    show(table(proposal.rows, inputs, options.tokens))
    if advice := packed_advice(proposal.rows[0], inputs):
        show(advice)
    result = proposal.result
    if proposal.refused:
        show(f"omitted plans that the trainer does not support: {proposal.refused[0]}")
    print(
        f"\ncomputed lower bounds for {result.configurations:,} configurations, and step times for "
        f"{result.timed:,} pipelines"
    )
    if result.gap > 0:
        print(f"no skipped plan can be faster by more than {result.gap:.1%}")
    measured = {gpu for _, gpu, _, _ in inputs.profile.layers}
    guessed = dict.fromkeys(node.gpu for node in cluster.types if node.gpu not in measured)
    if guessed:
        show(
            f"estimated from data sheets, not measured: {', '.join(guessed)}; see python -m "
            "megatron.adaptive profile"
        )
    elif proposal.rows[0].prediction.estimated:
        print("some durations of the best plan are extrapolated from measurements")


def _front(options: argparse.Namespace, inputs: PlanInputs, request: Request) -> int:
    """Finds the Pareto front of plans that use parts of the cluster.

    Writes the front to files, and prints it as a table.
    """
    rows = find_front(inputs, request)
    write_front(rows, inputs, options.pareto)
    show(table(rows, inputs, options.tokens))
    show(
        f"\nwrote to {options.pareto}: front.html, front.png, front.json and a plan file for each "
        "point"
    )
    return 0
