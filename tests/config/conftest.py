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
