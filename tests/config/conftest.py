"""A small valid command line, and a way to state what an invalid one must say."""

from __future__ import annotations

from collections.abc import Callable

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

Parse = Callable[..., TrainerConfig]
Complaint = Callable[..., str]


def broken_cases(table: str) -> list[tuple[str, int, list[str]]]:
    """Reads flags, processes and words of the message from lines ``FLAGS @2 => WORD | WORD``.

    ``@2`` is left out for one process. Indented lines continue the one before.
    """
    cases = []
    for line in table.replace("\n    ", " ").splitlines():
        given, _, message = line.partition("=> ")
        flags, _, world_size = given.partition("@")
        cases.append((flags, int(world_size or 1), message.split(" | ")))
    return cases


def _parse(flags: str, world_size: int, engine: bool, apex: bool, base: str) -> TrainerConfig:
    return parse(
        f"{base} {flags}".split(),
        world_size=world_size,
        last_wins=True,
        installed=Installed(transformer_engine=engine, apex=apex),
    )


@pytest.fixture
def small() -> Parse:
    """Parse the small command line with further flags, later ones winning."""

    def run(
        flags: str = "",
        *,
        world_size: int = 1,
        engine: bool = False,
        apex: bool = False,
        base: str = SMALL,
    ) -> TrainerConfig:
        return _parse(flags, world_size, engine, apex, base)

    return run


@pytest.fixture
def complaint() -> Complaint:
    """The one line that the small command line with further flags is refused with."""

    def run(
        flags: str = "",
        *,
        world_size: int = 1,
        engine: bool = False,
        apex: bool = False,
        base: str = SMALL,
    ) -> str:
        with pytest.raises(ConfigError) as caught:
            _parse(flags, world_size, engine, apex, base)
        text = str(caught.value)
        assert text
        assert text.splitlines() == [text]
        return text

    return run
