"""Which shape a job takes on the processes that are there.

Without a profile: as many processes as the batch and the layers allow, and of those shapes the one
with the pipeline nearest to that of the command line, a deeper one first, for the model was meant
to fit into so many stages. The global batch stays. With a profile the planner chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.partition import format_partition, nearly_even_split
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import ConfigError

__all__ = ["Chooser", "Shape", "choose_shape"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A shape and the flags that stand for it.

    Attributes:
        tensor: tensor-parallel width.
        pipeline: pipeline ranks.
        data: replicas.
        partition: layers of each stage.
        micro_batch: samples of a microbatch.
        flags: of the trainer, to be put after the user's own.
    """

    tensor: int
    pipeline: int
    data: int
    partition: tuple[int, ...]
    micro_batch: int
    flags: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """Processes that it takes."""
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        text = f"PP {self.pipeline} x DP {self.data}"
        if self.tensor > 1:
            text += f" x TP {self.tensor}"
        return f"{text}, layers {format_partition(self.partition)}"


Chooser = Callable[[Sequence[str], Sequence[int]], Shape | None]


def choose_shape(arguments: Sequence[str], slots: Sequence[int]) -> Shape | None:
    """Choose a shape by the rule above.

    Args:
        arguments: of the trainer, as the user gave them.
        slots: processes of each node, in the order of the ranks.

    Returns:
        The shape, ``None`` where none fits.

    Raises:
        ConfigError: the arguments break a rule in every shape of any size; says the first.
    """
    asked = _asked(arguments)
    tensor = asked.parallel.tensor_model_parallel_size
    usable = sum(count // tensor for count in slots)
    for replicas, pipeline in _degrees(asked, usable):
        for chunks in dict.fromkeys((asked.parallel.num_chunks, 1)):
            shape = _shape(asked, arguments, pipeline, replicas, chunks)
            if shape is not None:
                return shape
    return None


def _asked(arguments: Sequence[str]) -> TrainerConfig:
    """Read the arguments for the smallest world in which they are sound.

    Its size does not matter here: degrees are taken apart from it.
    """
    words = list(arguments)
    first: ConfigError | None = None
    for replicas in (1, *range(2, 9)):
        try:
            unit = _unit(words)
            return parse(words, world_size=unit * replicas, last_wins=True)
        except ConfigError as error:
            first = first or error
    assert first is not None
    raise first


def _unit(words: Sequence[str]) -> int:
    """Processes of one replica as the flags say."""
    unit = 1
    for name in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"):
        value = "1"
        for at, word in enumerate(words):
            if word == name and at + 1 < len(words):
                value = words[at + 1]
            elif word.startswith(f"{name}="):
                value = word.partition("=")[2]
        unit *= int(value) if value.isdecimal() and int(value) else 1
    return unit


def _degrees(asked: TrainerConfig, usable: int) -> Iterator[tuple[int, int]]:
    """Replicas and pipeline ranks on so many groups of tensor-parallel ranks, best first."""
    per_replica = asked.batch.global_batch_size // asked.batch.micro_batch_size
    meant = asked.parallel.pipeline_model_parallel_size
    found = [
        (replicas, pipeline)
        for pipeline in range(1, min(usable, asked.model.num_layers) + 1)
        for replicas in range(1, usable // pipeline + 1)
        if per_replica % replicas == 0
    ]

    def rank(degrees: tuple[int, int]) -> tuple[int, bool, int]:
        replicas, pipeline = degrees
        return -replicas * pipeline, pipeline < meant, abs(pipeline - meant)

    return iter(sorted(found, key=rank))


def _shape(
    asked: TrainerConfig, arguments: Sequence[str], pipeline: int, replicas: int, chunks: int
) -> Shape | None:
    """The flags of a shape, ``None`` where the trainer would refuse them."""
    tensor = asked.parallel.tensor_model_parallel_size
    chunks = chunks if pipeline > 1 else 1
    if pipeline * chunks > asked.model.num_layers:
        return None
    partition = nearly_even_split(asked.model.num_layers, pipeline * chunks)
    flags = ["--pipeline-model-parallel-size", str(pipeline)]
    if asked.parallel.num_chunks > 1 or chunks > 1:
        flags += ["--model-chunks", str(chunks)]
    flags += ["--partition", format_partition(partition)]
    try:
        parse([*arguments, *flags], world_size=tensor * pipeline * replicas, last_wins=True)
    except ConfigError:
        return None
    return Shape(
        tensor=tensor,
        pipeline=pipeline,
        data=replicas,
        partition=partition,
        micro_batch=asked.batch.micro_batch_size,
        flags=tuple(flags),
    )
