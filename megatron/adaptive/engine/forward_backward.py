"""A replacement for what megatron-core's ``get_forward_backward_func()`` returns.

Same signature, same return value; the order of work is that of the schedule or policy it was made
with. One object serves a whole run: it owns the executor and, per number of microbatches, the
policy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.adaptive.engine.executor import ActivationMeter, Executor
from megatron.adaptive.engine.record import Replay
from megatron.adaptive.engine.stages import MegatronStages, default_process_groups
from megatron.adaptive.engine.weight_gradient import WeightGradientStore
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.schedule import interleaved, unequal
from megatron.adaptive.schedule.compare import Candidate
from megatron.adaptive.schedule.memory import default_cap
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.policy import Follow, Policy
from megatron.adaptive.schedule.registry import is_rule, make_policies
from megatron.adaptive.schedule.schedule import Schedule
from megatron.adaptive.schedule.state import RankState
from megatron.adaptive.schedule.widths import Widths


class ForwardBackward:
    """Runs forward and backward passes of a step; call it like megatron-core's function.

    Args:
        executor: the engine of this rank.
        placement: where stages live.
        pp_rank: position of this rank in the pipeline.
        schedule: name of a schedule or policy.
        activation_cap: most activations a rank may hold, in whole-rank microbatches; chosen from
            the shape of the pipeline where ``None``.
        group_size: microbatches that a chunk runs in a row under ``interleaved``; the size of the
            pipeline where ``None``.
        weight_pieces: parts of each weight gradient, 0 for whole backwards.
        stores: where the chunks' layers leave their weight gradients, for split backwards.
        given: the schedule to follow where ``schedule`` is ``file``.
        replay: recorded orders to take in training steps; the caller says which step begins.
        widths: of the stages where they are unequal; the loss is then the mean over the whole
            step, and gradients are to be summed, not averaged, over the ranks of a stage.
        span: traces a block as a span of a kind; told of ``reduce`` where the caller does not do so
            himself.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        placement: Placement,
        pp_rank: int,
        schedule: str,
        activation_cap: float | None = None,
        group_size: int | None = None,
        weight_pieces: int = 0,
        stores: Sequence[WeightGradientStore] | None = None,
        given: Schedule | None = None,
        replay: Replay | None = None,
        widths: Widths | None = None,
        span: Callable[[str], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._executor = executor
        self._placement = placement
        self._pp_rank = pp_rank
        self._schedule = schedule
        self._cap = activation_cap
        self._group_size = group_size
        self._weight_pieces = weight_pieces
        self._stores = stores
        self._given = given
        self._replay = replay
        self._widths = widths
        self._span = span or _untraced
        self._meter = ActivationMeter()
        self._policies: dict[tuple[int, bool], Policy] = {}

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: ProcessGroupCollection | None = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Run one step; see megatron-core for the arguments.

        Returns:
            What ``loss_func`` returned for logging, one entry per microbatch in ascending order, on
            the last stage; an empty list elsewhere.

        Raises:
            ConfigError: an argument asks for what this executor does not do.
            TransportError: another rank is gone or silent.
        """
        if adjust_tensor_shapes_fn is not None:
            raise ConfigError(
                "adjust_tensor_shapes_fn was given, but channels here carry each tensor's own "
                "shape; leave it out"
            )
        chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        if not len(chunks) == len(iterators) == self._placement.num_chunks:
            raise ConfigError(
                f"{len(chunks)} model chunks and {len(iterators)} data iterators were given to a "
                f"pipeline of {self._placement.num_chunks} chunks per rank; give one of each per "
                "chunk"
            )
        groups = pg_collection or default_process_groups()
        stages = MegatronStages(
            forward_step_func=forward_step_func,
            data_iterators=iterators,
            chunks=chunks,
            placement=self._placement,
            pp_rank=self._pp_rank,
            num_microbatches=num_microbatches,
            groups=groups,
            meter=self._meter,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            split=self._weight_pieces > 0 and not forward_only,
            stores=self._stores,
            loss_parts=self._of_all(num_microbatches),
        )
        timers = stages.config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(
                barrier=stages.config.barrier_with_L1_time
            )
        try:
            with torch.set_grad_enabled(not forward_only and torch.is_grad_enabled()):
                self._executor.run(
                    stages,
                    self._policy(num_microbatches, forward_only),
                    self._state(num_microbatches, forward_only),
                )
        finally:
            stages.finish()
        if not forward_only and stages.config.finalize_model_grads_func is not None:
            with self._span("reduce"):
                stages.config.finalize_model_grads_func(
                    chunks,
                    stages.num_tokens if stages.config.calculate_per_token_loss else None,
                    pg_collection=groups,
                    # megatron-core 0.15 does not know it.
                    **({"force_all_reduce": True} if force_all_reduce else {}),
                )
        if timers is not None:
            timers("forward-backward").stop()
        return stages.reduced_losses

    def use(self, candidate: Candidate) -> None:
        """Take another schedule or rule from the next step on; all ranks must do so alike.

        Raises:
            ConfigError: it needs another placement, or stores that this object was not made with.
        """
        if candidate.placement != self._placement or (candidate.weight_pieces and not self._stores):
            raise ConfigError(
                f"{candidate} cannot run on chunks that lie in a {self._placement.kind} with "
                f"{'split' if self._stores else 'whole'} backwards; build the model for it"
            )
        self._schedule = candidate.name
        self._cap = candidate.cap
        self._weight_pieces = candidate.weight_pieces
        self._policies.clear()

    def renew(self, stores: Sequence[WeightGradientStore] | None) -> None:
        """Go on with chunks whose layers have changed, under the same order of work.

        Args:
            stores: as at first, of the chunks as they are now.
        """
        self._stores = stores
        self._meter = ActivationMeter()
        self._policies.clear()

    def candidate(self, num_microbatches: int) -> Candidate:
        """What runs, in the words of the simulator.

        Args:
            num_microbatches: microbatches of a step.
        """
        name = "adaptive" if self._schedule == "auto" else self._schedule
        return Candidate(
            name=name,
            placement=self._placement,
            weight_pieces=self._weight_pieces,
            cap=self._cap_for(num_microbatches) if is_rule(name) else None,
        )

    def activation_bytes(self) -> tuple[int, ...]:
        """Bytes that one microbatch keeps in each chunk of this rank, 0 before the first."""
        return tuple(self._meter.bytes_of(chunk) for chunk in range(self._placement.num_chunks))

    def _of_all(self, num_microbatches: int) -> int:
        """Microbatches that the step's loss is the mean of, given those of this rank."""
        if self._widths is None:
            return num_microbatches
        return num_microbatches * self._widths.sizes[self._pp_rank]

    def _policy(self, num_microbatches: int, forward_only: bool) -> Policy:
        if self._replay is not None and not forward_only:
            return self._replay.policy(num_microbatches)
        key = (num_microbatches, forward_only)
        if key not in self._policies:
            self._policies[key] = self._make_policy(num_microbatches, forward_only)
        return self._policies[key]

    def _make_policy(self, num_microbatches: int, forward_only: bool) -> Policy:
        if self._schedule == "interleaved" and self._group_size and not forward_only:
            schedule = interleaved.make(
                self._placement, num_microbatches, group_size=self._group_size
            )
            return Follow(schedule.orders[self._pp_rank], schedule.name)
        if self._given is not None and not forward_only:
            return self._follow_given(num_microbatches)
        name = "forward-only" if forward_only else self._schedule
        if name == "auto":
            name = "adaptive"  # until something was measured
        if self._widths is not None:
            return unequal.make_policy(name, self._widths, self._pp_rank, num_microbatches)
        policies = make_policies(
            name,
            self._placement,
            num_microbatches,
            cap=self._cap_for(num_microbatches),
            weight_pieces=self._weight_pieces,
        )
        return policies[self._pp_rank]

    def _follow_given(self, num_microbatches: int) -> Policy:
        given = self._given
        assert given is not None
        if given.num_microbatches != num_microbatches:
            raise ConfigError(
                f"schedule {given.name} is one of {given.num_microbatches} microbatches and this "
                f"step has {num_microbatches}; set --global-batch-size to match it"
            )
        return Follow(given.orders[self._pp_rank], given.name)

    def _cap_for(self, num_microbatches: int) -> float:
        if self._cap is not None:
            return self._cap
        if self._widths is not None:
            return unequal.default_cap(self._widths, self._pp_rank, num_microbatches)
        return default_cap(self._placement, num_microbatches)

    def _state(self, num_microbatches: int, forward_only: bool) -> RankState:
        return RankState(
            placement=self._placement,
            rank=self._pp_rank,
            num_microbatches=num_microbatches,
            cap=None if forward_only else self._cap_for(num_microbatches),
            forward_only=forward_only,
            weight_pieces=self._weight_pieces,
        )


def _untraced(kind: str) -> AbstractContextManager[None]:
    return contextlib.nullcontext()
