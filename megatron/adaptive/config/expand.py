"""``--plan FILE`` of the trainer: the flags that a plan file stands for, in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.adaptive.config.flags import FieldSpec
from megatron.adaptive.config.plan import load_plan, plan_flags, world_size_of
from megatron.adaptive.errors import ConfigError

__all__ = ["PLAN_FLAG", "PLAN_HELP", "expand_plan"]

PLAN_FLAG = "--plan"
PLAN_HELP = (
    "Plan file that stands for the flags of its degrees, partition, batch, schedule and memory; "
    "see docs/plan.md."
)


def expand_plan(argv: Sequence[str], specs: Mapping[str, FieldSpec], world_size: int) -> list[str]:
    """Put a plan's flags in the place of ``--plan FILE``.

    Args:
        argv: a command line of the trainer.
        specs: all flags by field.
        world_size: number of all processes.

    Returns:
        The command line without ``--plan``. Flags that are given as the plan has them are there
        once.

    Raises:
        ConfigError: the plan cannot be read, contradicts a flag, or is for other processes.
    """
    path, rest = _take(argv)
    if path is None:
        return rest
    told = load_plan(Path(path), f"{PLAN_FLAG} ")
    flags = plan_flags(told, path)
    needed = world_size_of(told)
    if needed is not None and needed != world_size:
        raise ConfigError(
            f"{PLAN_FLAG} {path} is for {needed} processes, this run has {world_size}: start as"
            " many, or plan for these nodes"
        )
    dest_of = {name: spec.dest for spec in specs.values() for name in spec.names}
    given = {dest_of[word]: words for word, words in _flags(rest).items() if word in dest_of}
    half = next((name for name in ("fp16", "bf16") if name in given), None)
    if told.get("precision", half) not in (half, None) and half is not None:
        raise ConfigError(
            f"--{half}: {PLAN_FLAG} {path} says {told['precision']}; leave one of them out"
        )
    added: list[str] = []
    for word, words in _flags(flags).items():
        said = given.get(dest_of[word])
        if said is None:
            added += [word, *words]
        elif said != words:
            raise ConfigError(
                f"{word} {' '.join(said)}: {PLAN_FLAG} {path} says {' '.join(words) or 'so'};"
                " leave one of them out"
            )
    return [*rest, *added]


def _take(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Part ``--plan FILE`` from the rest."""
    rest: list[str] = []
    path: str | None = None
    words = iter(argv)
    for word in words:
        if word != PLAN_FLAG and not word.startswith(f"{PLAN_FLAG}="):
            rest.append(word)
            continue
        value = word.partition("=")[2] or next(words, "")
        if not value or value.startswith("--"):
            raise ConfigError(f"{PLAN_FLAG}: expected one argument, the plan file")
        if path is not None and path != value:
            raise ConfigError(f"{PLAN_FLAG} is given twice: a run has one plan; keep one")
        path = value
    return path, rest


def _flags(argv: Sequence[str]) -> dict[str, list[str]]:
    """Flags with the words that follow them; the last of equal ones."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found[name] = [value] if equals else []
        elif name:
            found[name].append(word)
    return found
