"""Runs unchanged schedules of megatron-core on emulated stages.

The communication settings are safe with gloo: outputs are kept until they have been sent. With
several chunks, messages are not batched but overlap with computation, as in Megatron-LM's
configuration.

megatron-core waits for its sends, and gloo completes a send when the peer requests the message.
Therefore a rank may wait for an action of a peer although it does not need the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from harness.emulated_work import RankWork
from harness.sleeping_ranks import DTYPE, WIDTH

from .competitors import Competitor
from .modules import EmulatedChunk, PeerRunner
from .scenarios import Draws


class StepChunk(EmulatedChunk):
    """Emulated stage with the attributes that megatron-core requires of a model chunk."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, stage: int, num_stages: int, config: TransformerConfig) -> None:
        super().__init__(stage, num_stages)
        self.config = config
        self.received: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        """Sets the input of the stage, which is the only element of ``tensors``."""
        self.received = tensors[0]


def config_of(competitor: Competitor, num_ranks: int, **more: Any) -> TransformerConfig:
    """Returns megatron-core's configuration for ``competitor`` on ``num_ranks`` ranks.

    ``more`` contains additional settings.
    """
    several = competitor.num_chunks > 1
    return TransformerConfig(
        num_layers=num_ranks * competitor.num_chunks,
        hidden_size=WIDTH,
        num_attention_heads=1,
        pipeline_model_parallel_size=num_ranks,
        virtual_pipeline_model_parallel_size=competitor.num_chunks if several else None,
        pipeline_dtype=DTYPE,
        calculate_per_token_loss=True,  # This makes megatron-core leave the loss unchanged.
        **more,
    )


class StepRunner(PeerRunner):
    """Base class of runners that call a step function with the arguments of megatron-core.

    Attributes:
        call: Keyword arguments of the next step.
    """

    call: dict[str, Any]

    def prepare(self, work: RankWork, draws: Draws) -> None:
        super().prepare(work, draws)
        data = self.inputs((1, 1, WIDTH))
        self.call = {
            "forward_step_func": forward_step,
            "data_iterator": [iter(data) for _ in self.chunks],
            "model": list(self.chunks),
            "num_microbatches": self.num_microbatches,
            "seq_length": 1,
            "micro_batch_size": 1,
        }


class MegatronRunner(StepRunner):
    """Runs megatron-core's 1F1B or interleaved 1F1B. See ``PeerRunner`` for the arguments."""

    def __init__(self, competitor: Competitor, rank: int, num_ranks: int) -> None:
        several = competitor.num_chunks > 1
        config = config_of(
            competitor,
            num_ranks,
            overlap_p2p_comm=several,
            batch_p2p_comm=not several,
            deallocate_pipeline_outputs=False,
        )
        super().__init__(competitor, rank, num_ranks, partial(StepChunk, config=config))
        self._groups = _process_groups(num_ranks, rank)
        self._communicator = P2PCommunicator(self._groups.pp, config)
        self._function: Any = (
            schedules.forward_backward_pipelining_with_interleaving
            if several
            else schedules.forward_backward_pipelining_without_interleaving
        )

    def run(self) -> None:
        """Runs the prepared step. Only this call is timed."""
        groups = {"p2p_communicator": self._communicator, "pg_collection": self._groups}
        self._function(**self.call, **groups)


def forward_step(iterator: Iterator[torch.Tensor], chunk: StepChunk) -> tuple[torch.Tensor, Any]:
    """Runs a forward pass of ``chunk``, like the forward step function of a user's script.

    ``iterator`` yields the inputs of the first stage. Returns the output and the loss function.
    """
    received = next(iterator) if chunk.is_first else chunk.received
    assert received is not None

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        return chunk.loss(output), torch.ones((), dtype=torch.int), {}

    return chunk(received), loss


def _process_groups(num_ranks: int, rank: int) -> ProcessGroupCollection:
    groups: Any = ProcessGroupCollection()
    groups.pp = dist.new_group(list(range(num_ranks)), backend="gloo")
    alone = [dist.new_group([member], backend="gloo") for member in range(num_ranks)][rank]
    groups.tp = groups.cp = groups.dp_cp = alone
    groups.embd = groups.pos_embd = None
    return groups
