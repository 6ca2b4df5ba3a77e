"""Provides a small valid command line, and functions that check errors about invalid flags."""

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
    "FILES": SMALL.replace("--mock-data", "--tokenizer-type NullTokenizer"),
    "RAMP": (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
        "--max-position-embeddings 32 --micro-batch-size 2 --lr 1e-3 --train-samples 1000 "
        "--global-batch-size 16 --rampup-batch-size 4 4 100 "
        "--tokenizer-type NullTokenizer --vocab-size 9"
    ),
}
PP2 = "--pipeline-model-parallel-size 2 --global-batch-size 8"
UNLIKE = '--heterogeneous-layers-config-encoded-json {"block_configs":['
MTP = "--mtp-num-layers 1 --position-embedding-type rope"
PARALLEL = "--sequence-parallel --tensor-model-parallel-size 2"
SPREAD = (
    "--num-experts 4 --expert-model-parallel-size 2 --global-batch-size 8 "
    "--overlap-moe-expert-parallel-comm"
)
EXCHANGE = f"{SPREAD} --moe-token-dispatcher-type alltoall"
UNEQUAL = "--pipeline-model-parallel-size 2 --stage-data-parallel-sizes 2-1"


def cases_of(table: str) -> list[tuple[str, int, list[str]]]:
    """Parses a table of cases. Returns flags, world size and expected phrases of each case.

    The format of a line is ``FLAGS @WORLD_SIZE => PHRASE | PHRASE``. Without ``@WORLD_SIZE``, the
    world size is 1. An indented line continues the previous line. The flags may begin with a key of
    ``BASES``. The words ``PP2``, ``SPREAD``, ``EXCHANGE``, ``UNEQUAL``, ``UNLIKE``, ``MTP`` and
    ``PARALLEL`` stand for flags.
    """
    cases = []
    for line in table.replace("\n    ", " ").splitlines():
        command, _, message = line.partition("=> ")
        for name in ("PP2", "SPREAD", "EXCHANGE", "UNEQUAL", "UNLIKE", "MTP", "PARALLEL"):
            text = globals()[name]
            command = command.replace(name, text)
        flags, _, world_size = command.partition("@")
        cases.append((flags, int(world_size or 1), message.split(" | ")))
    return cases


def small(flags: str = "", *, world_size: int = 1) -> TrainerConfig:
    """Parses a small valid command line followed by ``flags``, which take precedence.

    Args:
        flags: Flags to add. If the first word is a key of ``BASES``, the flags are added to the
            value of this key instead of ``SMALL``. The word ENGINE simulates that Transformer
            Engine is installed.
        world_size: Number of processes of the job.
    """
    arguments = flags.split()
    base = BASES[arguments.pop(0)] if arguments[:1] and arguments[0] in BASES else SMALL
    return parse(
        [*base.split(), *(word for word in arguments if word != "ENGINE")],
        world_size=world_size,
        last_wins=True,
        installed=Installed(transformer_engine="ENGINE" in arguments),
    )


def complaint(flags: str, world_size: int = 1) -> str:
    """Checks that :func:`small` rejects ``flags`` with a one-line message, and returns the message.

    ``world_size`` is the number of processes of the job.
    """
    with pytest.raises(ConfigError) as caught:
        small(flags, world_size=world_size)
    text = str(caught.value)
    assert text
    assert text.splitlines() == [text]
    return text


def check_words(flags: str, world_size: int, phrases: list[str]) -> None:
    """Checks that ``flags`` are rejected with a message that contains all ``phrases``."""
    text = complaint(flags, world_size)
    assert [word for word in phrases if word not in text] == []
