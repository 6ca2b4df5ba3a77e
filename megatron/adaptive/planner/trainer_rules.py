"""Checks plans and sequence slices against the rules of the trainer."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.environment import Installed
from megatron.adaptive.config.sequence_slices import LEAST_TOKENS
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.model_description import Model
from megatron.adaptive.planner.model_file import ANY_RUN
from megatron.adaptive.planner.plan import FP8_FLAGS
from megatron.adaptive.planner.search_options import SearchOptions
from megatron.adaptive.schedule.catalog import is_rule

_NUMBERS = (1, 2, 4, 8, 16)
"""Numbers of slices to try by default."""
_USUAL_TOKENS = 1024
"""Minimum average number of tokens per slice by default. Shorter slices use a GPU less efficiently,
but estimated layer times do not take this into account."""


def trainer_refusal(model: Model, flags: Sequence[str], world_size: int | None) -> str:
    """Returns the reason why the trainer rejects a model with these flags, or an empty string.

    If the model was not described by the trainer's arguments, it cannot be checked, so it is
    accepted.

    Args:
        model: Model to train.
        flags: Flags of the plan.
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
    """Returns the reason why a model's sequences cannot be sliced, or an empty string."""
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
    """Returns the numbers of slices to try by default for ``model``."""
    most = model.sequence // _USUAL_TOKENS
    if most < 2 or slices_refusal(model):
        return (1,)
    return tuple(number for number in _NUMBERS if number <= most)


def check_slices(options: SearchOptions, model: Model) -> None:
    """Checks that the search may use the numbers of slices in ``options``.

    Raises:
        ConfigError: The model's sequences cannot be cut into this number of slices, or none of the
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
