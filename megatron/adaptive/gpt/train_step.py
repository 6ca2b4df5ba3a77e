"""Runs training and evaluation steps: forward and backward passes, optimizer and mean losses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.adaptive.config.megatron_core_flags import CoreConfig
from megatron.adaptive.engine.executor import RankTimes
from megatron.adaptive.engine.stages import ForwardBackward
from megatron.adaptive.errors import AdaptiveError, DeviceMemoryError
from megatron.adaptive.gpt.core_releases import (
    balancing_losses,
    reset_balancing_losses,
    take_prediction_losses,
)
from megatron.adaptive.gpt.forward import (
    LOSS_NAME,
    TOKEN_NAME,
    DropoutKeys,
    GptForward,
    NextToken,
    feed,
)
from megatron.adaptive.gpt.setup import Run
from megatron.adaptive.schedule.memory_caps import static_cap
from megatron.adaptive.schedule.microbatch_assignment import Dealt


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Contains the results of a training step.

    Attributes:
        losses: Mean losses, keyed by name, on ranks of the last stage; empty on other ranks.
        updated: Whether the parameters were updated. The optimizer skips the update if gradients
            overflow in fp16.
        grad_norm: L2 norm of all gradients before clipping, or ``None`` if it is not computed.
        num_zeros: Number of zeros in the gradients, or ``None`` if they are not counted.
        bubble_fraction: Fraction of the step during which ranks were idle, averaged over all ranks;
            ``None`` at iterations that are not logged.
        curves: Values that are only written to TensorBoard, keyed by tag, on ranks of the last
            stage.
    """

    losses: dict[str, float]
    updated: bool
    grad_norm: float | None
    num_zeros: int | None
    bubble_fraction: float | None
    curves: dict[str, float] = field(default_factory=dict)


class Step:
    """Runs training steps, evaluation and text generation with the model of a run."""

    def __init__(self, run: Run) -> None:
        config = run.job.config
        self._run = run
        self._config = config
        self._dropout = DropoutKeys(
            config.run.seed,
            enabled=config.model.hidden_dropout > 0
            or config.model.attention_dropout > 0
            or config.lora.lora_dropout > 0,
        )
        self._dropout.attach(run.chunks)
        self._forward = GptForward(run.job.accelerator)
        self._balancing = _balancing_losses(config.core)
        self._eval_steps = 0
        # Times of the latest training step. None before the first step, and always None with
        # megatron-core's schedule.
        self.times: RankTimes | None = None

    def train(
        self,
        microbatches: Any,
        num_microbatches: int,
        iteration: int,
        before_update: Callable[[], None] = lambda: None,
        dealt: Dealt | None = None,
    ) -> StepResult:
        """Runs the forward and backward passes of a step and updates the parameters.

        Args:
            microbatches: Microbatches of this rank, or ``None`` on a rank that does not need data.
            num_microbatches: Number of microbatches of this rank.
            iteration: Index of the step, which determines the random numbers of dropout.
            before_update: Function that is called just before the optimizer changes the parameters.
            dealt: Assignment of microbatches to replicas, or ``None`` if microbatches are assigned
                round-robin.

        Raises:
            AdaptiveError: If a gradient is infinite or NaN.
            DeviceMemoryError: If the device ran out of memory.
        """
        run = self._run
        try:
            chunk: Any  # megatron-core does not declare the types of its wrapper.
            for chunk in run.chunks:
                chunk.train()
                chunk.zero_grad_buffer()
            run.optimizer.zero_grad()
            if run.replay is not None:
                run.replay.begin(iteration)
            reduced = self._forward_backward(
                microbatches, num_microbatches, step=iteration, forward_only=False, dealt=dealt
            )
            before_update()
            with run.tracing.span("optimizer"):
                updated, grad_norm, num_zeros = run.optimizer.step()
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise out_of_memory(run, error, num_microbatches) from error
        except RuntimeError as error:
            if _CPU_MEMORY in str(error):
                raise out_of_memory(run, error, num_microbatches) from error
            if _NOT_FINITE.search(str(error)):
                raise _diverged(run, iteration, error) from error
            raise
        losses = self._mean_losses([reduced], dealt) | self._further_losses(len(reduced), dealt)
        curves: dict[str, float] = {}
        if self._balancing:
            balancing, curves = self._mean_balancing_losses(len(reduced), dealt)
            losses |= balancing
        return StepResult(
            losses=losses,
            curves=curves,
            updated=bool(updated),
            grad_norm=None if grad_norm is None else float(grad_norm),
            num_zeros=None if num_zeros is None else int(num_zeros),
            bubble_fraction=self._finish_step(iteration),
        )

    def evaluate(
        self,
        loader: Any,
        iterations: int,
        num_microbatches: int,
        *,
        until: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Returns the mean losses over batches of ``loader``, computed without gradients.

        Args:
            loader: Loader of the batches, or ``None`` on a rank that does not need data.
            iterations: Maximum number of batches.
            num_microbatches: Number of microbatches of this rank per batch.
            until: Function that is called after each batch and stops the evaluation by returning
                true. Must return the same value on all ranks.

        Returns:
            Mean losses, keyed by name, on ranks of the last stage; empty on other ranks.
        """
        steps = []
        for _ in range(iterations):
            microbatches = None if loader is None else loader.step(num_microbatches)
            steps.append(self._forward_only(microbatches, num_microbatches))
            if until():
                break
        return self._mean_losses(steps)

    def generate(self, tokens: Sequence[int], count: int, num_microbatches: int) -> list[int]:
        """Continues a text by greedy decoding and returns the new tokens. All ranks must call this.

        This method is only meant for inspecting the model. It is slow, because every replica
        processes the whole text again for each new token.

        Args:
            tokens: Tokens of the text. There must be at least one.
            count: Maximum number of new tokens. Generation also stops when the text reaches the
                sequence length.
            num_microbatches: Number of microbatches per step, which all contain the same text. Some
                schedules require more than one microbatch.

        Returns:
            The new tokens, on all ranks.
        """
        job = self._run.job
        length = self._config.model.seq_length
        text = list(tokens)
        for _ in range(min(count, length - len(text))):
            rows = torch.zeros(self._config.batch.micro_batch_size, length, dtype=torch.int64)
            rows[:, : len(text)] = torch.tensor(text)
            batch = {"tokens": rows, "position_ids": torch.arange(length).expand_as(rows)}
            forward = NextToken(job.accelerator, len(text) - 1)
            reduced = self._forward_only([batch] * num_microbatches, num_microbatches, forward)
            # Send the new token to all ranks. Ranks without the last stage contribute -1.
            last = torch.tensor(int(reduced[0][TOKEN_NAME]) if reduced else -1)
            dist.all_reduce(last, op=dist.ReduceOp.MAX, group=job.control_group)
            text.append(int(last))
        return text[len(tokens) :]

    @torch.no_grad()
    def _forward_only(
        self, microbatches: Any, num_microbatches: int, forward: NextToken | None = None
    ) -> list[Any]:
        """Runs forward passes in evaluation mode, and returns the losses of each microbatch.

        There are ``num_microbatches`` microbatches. ``forward`` is the forward step function. If it
        is ``None``, the forward step function of training is used.
        """
        run = self._run
        for chunk in run.chunks:
            chunk.eval()
        self._eval_steps += 1
        reported = self._forward_backward(
            microbatches,
            num_microbatches,
            step=-self._eval_steps,
            forward_only=True,
            forward=forward,
        )
        if run.wiring is not None:
            run.wiring.executor.finish_step()
        return reported

    def _forward_backward(
        self,
        microbatches: Any,
        num_microbatches: int,
        *,
        step: int,
        forward_only: bool,
        dealt: Dealt | None = None,
        forward: NextToken | None = None,
    ) -> list[Any]:
        run = self._run
        model = self._config.model
        if microbatches is not None:
            # Packing documents may have reduced the number of microbatches.
            num_microbatches = len(microbatches)
        more: dict[str, Any] = {}
        # Only the executor accepts the sizes of microbatches.
        if run.wiring is not None:
            more["sizes"] = getattr(microbatches, "sizes", None)
        if dealt is not None:
            more["loss_parts"] = dealt.total
        numbers = None if dealt is None else dealt.numbers
        slices = run.slices
        if slices is not None:
            slices.plan(getattr(microbatches, "contents", ()))
        feeds = [feed(microbatches, num_microbatches, slices) for _ in run.chunks]
        function: Any = forward or self._forward
        if not forward_only:
            function = self._dropout.keyed(
                function, run.chunks, step=step, numbers=numbers, slices=slices
            )
        single = len(run.chunks) == 1
        return run.forward_backward(
            forward_step_func=function,
            data_iterator=feeds[0] if single else feeds,
            model=run.chunks[0] if single else run.chunks,
            num_microbatches=num_microbatches,
            seq_length=model.seq_length,
            micro_batch_size=self._config.batch.micro_batch_size,
            forward_only=forward_only,
            **more,
        )

    def _finish_step(self, iteration: int) -> float | None:
        """Ends the trace of a step, and returns the fraction of time that ranks were idle.

        The fraction is computed only at logged iterations, because this needs an all-reduce.
        Otherwise, and with megatron-core's schedule, the result is ``None``.
        """
        run = self._run
        if run.wiring is None:
            run.tracing.end_iteration()
            return None
        self.times = times = run.wiring.executor.finish_step()
        run.tracing.end_iteration()
        if iteration % self._config.logging.log_interval:
            return None
        sums = torch.tensor([times.busy_s], dtype=torch.float64)
        longest = torch.tensor([times.span_s], dtype=torch.float64)
        dist.all_reduce(sums, group=run.job.control_group)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=run.job.control_group)
        available = float(longest) * run.job.config.world_size
        return max(0.0, 1.0 - float(sums) / available) if available else None

    def _mean_losses(
        self, steps: Sequence[list[Any]], dealt: Dealt | None = None
    ) -> dict[str, float]:
        """Returns the mean losses over microbatches, steps and data-parallel ranks.

        If losses are computed per token, the mean is taken over all tokens.

        Args:
            steps: Losses of each microbatch in each step.
            dealt: Assignment of the microbatches of a single step to replicas, or ``None`` if
                microbatches are assigned round-robin.

        Returns:
            Mean losses, keyed by name, on ranks of the last stage; empty on other ranks.
        """
        reported = [losses for step in steps for losses in step]
        if not reported:
            return {}
        total = torch.stack([losses[LOSS_NAME] for losses in reported])
        # Each entry is the mean loss of a microbatch or, if losses are computed per token, a pair
        # of a sum and a number of tokens.
        replicas = parallel_state.get_data_parallel_world_size()
        if total.dim() > 1:
            mean = total.sum(dim=0)
        elif dealt is None:
            mean = total.mean()
        else:
            mean = total.sum() * (replicas / dealt.total)
        if replicas > 1:
            dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
            mean /= replicas
        return {LOSS_NAME: float(mean[0] / mean[1] if mean.dim() else mean)}

    def _further_losses(self, num_microbatches: int, dealt: Dealt | None) -> dict[str, float]:
        """Returns the mean losses of multi-token prediction, keyed by Megatron-LM's names.

        The step has ``num_microbatches`` microbatches on this replica. ``dealt`` is the assignment
        of microbatches to replicas, or ``None`` if microbatches are assigned round-robin.

        All microbatches have the same weight in the mean, even if their numbers of tokens differ,
        as in Megatron-LM.
        """
        # Remove the values even if they are not used, because they may be from a previous model.
        sums = take_prediction_losses()
        if sums is None or not num_microbatches or self._config.model.mtp_num_layers is None:
            return {}
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(sums, group=group)
        everywhere = num_microbatches * group.size()
        if dealt is not None:
            everywhere = dealt.total * parallel_state.get_context_parallel_world_size()
        means = (sums / everywhere).tolist()
        return {f"mtp_{depth} loss": mean for depth, mean in enumerate(means, 1)}

    def _mean_balancing_losses(
        self, num_microbatches: int, dealt: Dealt | None
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Returns the mean load-balancing losses of experts. All ranks must call this.

        The names are the same as in Megatron-LM. The means are taken over microbatches and over
        layers with experts. As in megatron-core, load-balancing losses are averaged over replicas.
        Within a replica, they are summed over tensor-parallel and context-parallel ranks, because
        each rank has a part of the sum. The z-loss is averaged over all ranks of a stage, while
        megatron-core uses the value of a single rank.

        Returns:
            Two dictionaries: the mean losses, keyed by name, and the losses of each layer, keyed by
            TensorBoard's tag. The second dictionary is empty without ``--moe-per-layer-logging``.
            Both are empty on ranks without the last stage.
        """
        run = self._run
        names = self._balancing
        core = run.core
        num_layers = core.num_layers + (core.mtp_num_layers or 0)
        sums = torch.zeros(len(names), num_layers, dtype=torch.float64)
        recorded = balancing_losses()
        for row, name in enumerate(names):
            if name in recorded:  # Stages without experts have no balancing losses.
                sums[row] = recorded[name]
        reset_balancing_losses()
        dist.all_reduce(sums, group=run.job.control_group)
        if not num_microbatches:
            return {}, {}
        replicas = parallel_state.get_data_parallel_world_size()
        stage = replicas * parallel_state.get_tensor_and_context_parallel_world_size()
        shares = {_GLOBAL_LOSS: 1, _Z_LOSS: stage}
        sums /= torch.tensor([[shares.get(name, replicas)] for name in names])
        sums *= 1 / num_microbatches if dealt is None else replicas / dealt.total
        pattern = core.moe_layer_freq
        if isinstance(pattern, int):
            pattern = [number % pattern == 0 for number in range(core.num_layers)]
        means = (sums.sum(dim=1) / (sum(pattern) + (core.mtp_num_layers or 0))).tolist()
        curves = {
            f"moe/{name}_layer_{layer}": value
            for name, row in zip(names, sums.tolist(), strict=True)
            for layer, value in enumerate(row)
            if core.moe_per_layer_logging
        }
        return dict(zip(names, means, strict=True)), curves


_GLOBAL_LOSS = "global_load_balancing_loss"
_Z_LOSS = "z_loss"
_LOSS_OF_KIND = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": _GLOBAL_LOSS,
}


def _balancing_losses(core: CoreConfig) -> tuple[str, ...]:
    """Returns megatron-core's names for the enabled load-balancing losses of experts."""
    if core.num_moe_experts is None:
        return ()
    kinds = zip(core.moe_router_load_balancing_type, core.moe_aux_loss_coeff, strict=True)
    names = [_LOSS_OF_KIND[kind] for kind, weight in kinds if weight and kind in _LOSS_OF_KIND]
    return (*names, _Z_LOSS) if core.moe_z_loss_coeff else tuple(names)


def gather_parameters(run: Run) -> None:
    """Gathers the updated parameters of ``run`` now, instead of in the next forward pass.

    Call this function on all ranks before reading parameters. It does nothing without
    ``--overlap-param-gather``.
    """
    if run.job.config.parallel.overlap_param_gather:
        chunk: Any  # megatron-core does not declare the types of its wrapper.
        for chunk in run.chunks:
            chunk.start_param_sync(force_sync=True)


def counted_parameters(
    run: Run, chunk: torch.nn.Module
) -> Iterator[tuple[str, torch.nn.Parameter, int]]:
    """Yields the parameters of a chunk that this rank must include in a sum over all ranks.

    To count each parameter exactly once, add ``value / copies`` to the sum for each yielded
    parameter.

    Args:
        run: Run to which the chunk belongs.
        chunk: Model chunk of this rank.

    Yields:
        Name of a parameter, the parameter, and the number of ranks that yield the same parameter
        (``copies``).
    """
    replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    if run.job.config.parallel.unequal_sizes is not None:
        # The parameters on all replicas except the first are marked as shared, so they are skipped
        # below.
        replicas = 1
    for name, parameter in chunk.named_parameters():
        if getattr(parameter, "shared", False):
            continue
        if not getattr(parameter, "allreduce", True):  # Experts have fewer copies.
            yield name, parameter, parallel_state.get_expert_data_parallel_world_size()
        elif (
            getattr(parameter, "tensor_model_parallel", False)
            or parallel_state.get_tensor_model_parallel_rank() == 0
        ):
            yield name, parameter, replicas


_NORM_PART = 1 << 23
"""Number of elements that :func:`params_norm` converts to float64 at a time. They need 64 MiB."""


def params_norm(run: Run) -> float:
    """Returns the L2 norm of all parameters of the whole model. All ranks must call this."""
    gather_parameters(run)
    squares = [torch.zeros((), dtype=torch.float64, device=run.job.accelerator.device)]
    for chunk in run.chunks:
        for _, parameter, copies in counted_parameters(run, chunk):
            # Convert the parameter to float64 in parts, because a whole copy would need more
            # memory.
            for part in parameter.detach().flatten().split(_NORM_PART):
                squares.append(torch.linalg.vector_norm(part, dtype=torch.float64) ** 2 / copies)
    # The host waits only here, where the sum is copied from the device.
    total = torch.stack(squares).sum().cpu()
    dist.all_reduce(total, group=run.job.control_group)
    norm: float = float(total) ** 0.5
    return norm


_NOT_FINITE = re.compile(r"\bfound (NaN|Inf) in local grad norm\b")
"""Pattern of megatron-core's error message about a gradient that is infinite or NaN."""
_CPU_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""Text in the message of the RuntimeError that torch raises if host memory is exhausted."""


def _cap_advice(run: Run, num_microbatches: int) -> str:
    """Returns the part of an error message that advises a lower ``--activation-cap``.

    The result is empty if the cap does not apply or is already the minimum. There are
    ``num_microbatches`` microbatches per step.
    """
    if not isinstance(run.forward_backward, ForwardBackward):
        return ""
    orders = run.forward_backward.orders
    cap = orders.candidate(num_microbatches).cap
    if cap is None or cap <= 1:
        return ""
    least = static_cap(run.placement)
    hint = ""
    if orders.widths is None and least < cap:
        hint = f"; {least:.3g} needs no more memory than a static schedule such as 1f1b"
    return f" or --activation-cap (now {cap:.3g}{hint})"


def out_of_memory(run: Run, error: Exception, num_microbatches: int) -> DeviceMemoryError:
    """Creates the error to raise if this rank's device has run out of memory.

    Args:
        run: Training run of this rank.
        error: Error that torch raised.
        num_microbatches: Number of microbatches of this rank per step.
    """
    accelerator = run.job.accelerator
    gib = 1024**3
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    asked = str(error).splitlines()[0].rstrip(".") if str(error) else "out of memory"
    return DeviceMemoryError(
        f"rank {run.job.rank} (pipeline rank {pp_rank}, {accelerator.name}) ran out of memory with "
        f"{accelerator.memory_in_use_bytes() / gib:.2f} GiB allocated (peak "
        f"{accelerator.peak_memory_bytes() / gib:.2f} GiB): {asked}; lower --micro-batch-size"
        f"{_cap_advice(run, num_microbatches)}, or use --recompute-granularity selective (or full "
        "with --recompute-method uniform --recompute-num-layers 1), a larger "
        "--pipeline-model-parallel-size, or --use-distributed-optimizer"
    )


def _diverged(run: Run, iteration: int, error: Exception) -> AdaptiveError:
    return AdaptiveError(
        f"iteration {iteration}: rank {run.job.rank} found an infinite or NaN gradient: "
        f"{str(error).splitlines()[0]}; lower --lr, or pass "
        "--no-check-for-nan-in-loss-and-grad to ignore such gradients"
    )
