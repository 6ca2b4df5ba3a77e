"""A small valid command line, and a way to state what an invalid one must say."""

from __future__ import annotations

import pytest

from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.environment import Installed
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import ConfigError

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --train-iters 10 --lr 1e-3 "
    "--mock-data --vocab-size 100"
)
BASES = {
    "SMALL": SMALL,
    "NO_DATA": SMALL.replace("--mock-data --vocab-size 100", ""),
    "NO_LENGTH": SMALL.replace("--train-iters 10", ""),
    "NO_RATE": SMALL.replace("--lr 1e-3", ""),
    "GROWS": SMALL.replace("--train-iters 10", "--train-samples 100 --global-batch-size 8"),
    "NOTHING": "",
}
PP2 = "--pipeline-model-parallel-size 2 --global-batch-size 8"
UNEQUAL = "--pipeline-model-parallel-size 2 --stage-data-parallel-sizes 2-1"


def broken_cases(table: str) -> list[tuple[str, int, list[str]]]:
    """Reads flags, processes and words of the message from lines ``FLAGS @2 => WORD | WORD``.

    ``@2`` is left out for one process. Indented lines continue the one before. The flags may begin
    with one of ``BASES``; ``PP2`` and ``UNEQUAL`` stand for theirs.
    """
    cases = []
    for line in table.replace("\n    ", " ").splitlines():
        given, _, message = line.partition("=> ")
        flags, _, world_size = given.replace("PP2", PP2).replace("UNEQUAL", UNEQUAL).partition("@")
        cases.append((flags, int(world_size or 1), message.split(" | ")))
    return cases


def small(
    flags: str = "",
    *,
    world_size: int = 1,
    engine: bool = False,
    apex: bool = False,
    base: str = SMALL,
) -> TrainerConfig:
    """Parses the small command line with further flags, later ones winning.

    Args:
        flags: on top of ``base``; a first word of ``BASES`` names another one.
        world_size: all processes.
        engine: whether Transformer Engine is installed.
        apex: whether apex is.
        base: what ``flags`` are added to.
    """
    first, _, rest = flags.strip().partition(" ")
    if first in BASES:
        base, flags = BASES[first], rest
    return parse(
        f"{base} {flags}".split(),
        world_size=world_size,
        last_wins=True,
        installed=Installed(transformer_engine=engine, apex=apex),
    )


def complaint(flags: str = "", **options: int | bool | str) -> str:
    """The one line that a command line of :func:`small` is refused with."""
    with pytest.raises(ConfigError) as caught:
        small(flags, **options)  # type: ignore[arg-type]
    text = str(caught.value)
    assert text
    assert text.splitlines() == [text]
    return text


def check_words(flags: str, world_size: int, words: list[str]) -> None:
    """A command line is refused with these words."""
    text = complaint(flags, world_size=world_size)
    assert [word for word in words if word not in text] == []
