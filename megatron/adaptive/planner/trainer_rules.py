"""Checks plans, sequence slices and slice lengths against the rules of the trainer."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.environment import Installed
from megatron.adaptive.config.sequence_slices import LEAST_TOKENS, tokens_to_choose
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import Cluster
from megatron.adaptive.planner.documents import RunDocuments
from megatron.adaptive.planner.model_description import Model
from megatron.adaptive.planner.model_file import ANY_RUN
from megatron.adaptive.planner.plan import FP8_FLAGS
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.search_options import SearchOptions
from megatron.adaptive.schedule.catalog import is_rule

_NUMBERS = (1, 2, 4, 8, 16)
"""Numbers of slices per sequence to try by default."""
_USUAL_TOKENS = 1024
"""Minimum mean number of tokens per slice. By default, shorter slices are not tried, because they
use a GPU less efficiently, which estimated layer times do not take into account."""
_MOST_ITEMS = 8192
"""Maximum number of documents or slices per step. The planner does not simulate larger steps.
"""


def trainer_refusal(model: Model, flags: Sequence[str], world_size: int | None) -> str:
    """Returns why the trainer rejects ``model`` with ``flags``, or "" if the trainer accepts it.

    A model that is not described by the trainer's arguments cannot be checked, so it is accepted.

    Args:
        model: Model to train.
        flags: Command-line flags of the plan.
        world_size: Number of processes of the plan, or ``None`` for a single process.
    """
    arguments = [
        argument for argument in model.arguments if argument not in ("--fp16", "--bf16", *FP8_FLAGS)
    ]
    if not arguments:
        return ""
    if "--transformer-impl" not in arguments:
        is_engine = model.attention == "fused"
        arguments += ["--transformer-impl", "transformer_engine" if is_engine else "local"]
    try:
        parse(
            [*ANY_RUN, *arguments, *flags],
            world_size=world_size or 1,
            last_wins=True,
            installed=Installed(transformer_engine=True),
        )
    except ConfigError as error:
        return str(error).removeprefix("--plan the plan: ")
    return ""


def slices_refusal(model: Model) -> str:
    """Returns why the sequences of ``model`` cannot be cut into slices, or an empty string."""
    if refusal := trainer_refusal(model, ["--sequence-slices", "2"], 1):
        return refusal
    if model.most_slices() < 2 or (model.has_experts and not model.arguments):
        return (
            "sequence slices require causal attention in the trainer's own layers, no "
            f"multi-token prediction, no load-balancing losses, and at least {2 * LEAST_TOKENS} "
            "tokens"
        )
    return ""


def usual_slices(model: Model) -> tuple[int, ...]:
    """Returns the numbers of slices per sequence that are tried for ``model`` by default."""
    most = model.sequence // _USUAL_TOKENS
    if most < 2 or slices_refusal(model):
        return (1,)
    return tuple(number for number in _NUMBERS if number <= most)


def check_slices(options: SearchOptions, model: Model) -> None:
    """Checks that the search may use the numbers of slices per sequence in ``options``.

    Raises:
        ConfigError: The model's sequences cannot be cut into this many slices, or none of the
            schedules supports slices.
    """
    numbers = ",".join(map(str, options.slices))
    most = max(options.slices)
    if most == 1:
        return
    if refusal := slices_refusal(model):
        raise ConfigError(f"--sequence-slices {numbers} cannot be used for {model.name}: {refusal}")
    if most > model.most_slices():
        raise ConfigError(
            f"--sequence-slices {most}: {model.name} has sequences of {model.sequence} tokens, "
            f"but a slice needs at least {LEAST_TOKENS}; use {model.most_slices()} slices or "
            "fewer"
        )
    if 1 not in options.slices and not any(is_rule(name) for name in options.schedules):
        raise ConfigError(
            f"--sequence-slices {numbers} requires a run-time rule that orders the slices; add "
            "adaptive to --schedules"
        )


def tokens_to_try(documents: RunDocuments, multiple: int) -> tuple[int, ...]:
    """Returns the slice lengths in tokens that ``plan --slice-tokens auto`` can choose.

    They are a subset of the lengths that the trainer can choose. Slices of long documents have at
    least 1,024 tokens.

    Args:
        documents: Documents on which the run trains.
        multiple: Number by which the length of each slice must be divisible.
    """
    least = documents.mean_tokens / _MOST_ITEMS
    lengths = tokens_to_choose(documents.longest, multiple)
    lengths = tuple(length for length in lengths if length >= least) or lengths[:1]
    if documents.longest < 2 * _USUAL_TOKENS:
        return lengths
    return tuple(length for length in lengths if length >= _USUAL_TOKENS)


def needs_lengths(tokens: str) -> str:
    """Returns the error message for ``--slice-tokens`` without the lengths of the documents."""
    return (
        f"--slice-tokens {tokens} requires the lengths of the documents; add --document-lengths"
        " with the prefix of a .bin and .idx file, a file of numbers, or lognormal:MEDIAN:SIGMA"
    )


def check_slice_tokens(options: SearchOptions, inputs: PlanInputs) -> None:
    """Checks that the search may use the slice lengths in ``options``.

    Raises:
        ConfigError: The lengths of the documents are missing, a slice length is too short or too
            long, or another option excludes slices of a fixed length.
    """
    tokens = options.slice_tokens
    if not tokens:
        return
    listed = ",".join(map(str, tokens))
    if inputs.documents is None:
        raise ConfigError(needs_lengths(listed))
    flag = f"--slice-tokens {listed}"
    longest = inputs.documents.longest
    if min(tokens) < LEAST_TOKENS:
        raise ConfigError(
            f"{flag}: a slice must have at least {LEAST_TOKENS} tokens; use longer slices"
        )
    for length in tokens:
        multiple = widest_tp(options.tp, inputs.cluster)
        if length > longest and length > tokens_to_choose(longest, multiple)[0]:
            raise ConfigError(
                f"{flag}: {length} must not exceed the longest document, which has {longest}"
                " tokens; use fewer tokens, or use --pack-to instead of --slice-tokens"
            )
    size = max(inputs.documents.batch, round(inputs.documents.mean_tokens / min(tokens)))
    if size > _MOST_ITEMS:
        raise ConfigError(
            f"{flag}: a step has about {size:,} documents or slices, but the planner can simulate"
            f" at most {_MOST_ITEMS:,}; use longer slices or a smaller --global-batch-size"
        )
    for name, reason in (
        ("pp", "slices cannot save time if there is only one stage"),
        ("context_ranks", "a sequence that is divided among ranks cannot be cut into slices"),
        ("micro_batch", "each microbatch is a single row of packed documents"),
    ):
        values = getattr(options, name)
        is_wrong = values == (1,) if name == "pp" else bool(values) and 1 not in values
        if is_wrong:
            other = f"{_FLAGS[name]} {','.join(map(str, values))}"
            raise ConfigError(f"{flag} conflicts with {other}: {reason}; remove one of them")
    if options.unequal:
        raise ConfigError(
            f"{flag} conflicts with --unequal, whose stages cannot run parts of a microbatch;"
            " remove one of them"
        )
    if not any(map(orders_rows, options.schedules)):
        raise ConfigError(
            f"{flag} requires a schedule that supports different numbers of slices per microbatch,"
            f" got --schedules {','.join(options.schedules)}; add adaptive to --schedules"
        )
    _check_divided(flag, options)


_FLAGS = {
    "pp": "--pp",
    "context_ranks": "--context-parallel-size",
    "micro_batch": "--micro-batch-sizes",
}


def orders_rows(schedule: str) -> bool:
    """Returns whether a schedule supports rows that have different numbers of slices."""
    return is_rule(schedule) and schedule != "hinted"


def widest_tp(tp: Sequence[int], cluster: Cluster) -> int:
    """Returns the largest tensor-parallel size that the search may choose.

    Args:
        tp: Sizes to choose from, or empty for all sizes that fit into a node.
        cluster: Cluster with the nodes to plan for.
    """
    return max(tp or [node.gpus for node in cluster.types])


def _check_divided(flag: str, options: SearchOptions) -> None:
    """Checks that tensor-parallel ranks can divide slices if sequence parallelism is required."""
    if options.sequence_parallel != (True,) or not options.tp or 1 in options.tp:
        return
    if not any(length % tp == 0 for length in options.slice_tokens for tp in options.tp):
        sizes = ",".join(map(str, options.tp))
        raise ConfigError(
            f"{flag} must be a multiple of --tp {sizes}, because sequence parallelism divides each"
            " slice; change one of them, or use --sequence-parallel off"
        )
