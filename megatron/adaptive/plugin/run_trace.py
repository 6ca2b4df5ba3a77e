"""Traces a run of the user's own Megatron-LM, and writes the progress of the run to a file.

The executor traces actions, waits and messages, as in the trainer of this package. Other work is
traced without changes to Megatron-LM, as spans of these kinds: ``data`` for reads from the data
iterator, ``reduce`` for the function that completes gradients, ``optimizer`` for optimizer steps
(using torch's hooks), ``evaluate`` for evaluation steps, and ``checkpoint`` for
``dist_checkpointing.save``. Losses are read from the return value of the step function.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.utils import get_model_config, unwrap_model
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megatron.adaptive.accelerator import Accelerator, current_device
from megatron.adaptive.config.input_files import say
from megatron.adaptive.engine.diagnosis import RunningDiagnosis
from megatron.adaptive.engine.model_groups import ModelGroups
from megatron.adaptive.engine.process_context import Job
from megatron.adaptive.engine.progress import COMPLETE, ProgressFile
from megatron.adaptive.engine.tracing import Tracing
from megatron.adaptive.errors import TraceError
from megatron.adaptive.plugin.settings import Settings, megatron_arguments
from megatron.adaptive.schedule.stage_placement import Placement

_LOSS = "lm loss"
_ENDED = "the program ended"


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """Training step that is currently running.

    Attributes:
        iteration: Index of the step, from 1.
        begin_s: Start of the step, as a value of :func:`time.perf_counter`.
        samples: Number of samples in the step, over all replicas.
        tokens: Number of tokens in these samples.
    """

    iteration: int
    begin_s: float
    samples: int
    tokens: int


class StepTrace:
    """Traces the steps of this rank. On one rank, also writes the progress of the run to a file.

    If the trace cannot be written, a message is printed once and tracing stops, but training
    continues.

    Args:
        tracing: Trace to which spans are added.
        settings: Settings of the plugin.
        accelerator: CPU or GPU of this rank.
        iteration: Number of training steps that were completed before this process started.
        finish_step: Function that ends the current step. It is called before a checkpoint is saved.
        model_groups: Process groups of the model.
    """

    def __init__(
        self,
        tracing: Tracing,
        settings: Settings,
        accelerator: Accelerator,
        iteration: int,
        finish_step: Callable[[], object],
        model_groups: ModelGroups,
    ) -> None:
        self.tracing = tracing
        self._accelerator = accelerator
        self._finish_step = finish_step
        self._groups = model_groups
        self._begun: _Begun | None = None
        self._loss: torch.Tensor | None = None
        self._rate: float | None = None
        self._done = iteration
        self._total = int(getattr(megatron_arguments(), "train_iters", None) or 0)
        # Number of optimizer steps that are running. An optimizer may call another optimizer.
        self._optimizers = 0
        self._update: AbstractContextManager[None] | None = None
        self._hooks = [
            register_optimizer_step_pre_hook(self._update_begins),
            register_optimizer_step_post_hook(self._update_ends),
        ]
        self._save = dist_checkpointing.save
        dist_checkpointing.save = self._saving(self._save)
        # Only the rank that writes Megatron-LM's log has the losses, so this rank also writes the
        # progress.
        is_writer = dist.get_rank() == dist.get_world_size() - 1
        folder = settings.trace_dir if is_writer else None
        self._progress = ProgressFile(folder)
        if is_writer:
            self._progress.begins(iteration, self._total, **_sizes(model_groups))
        self._diagnosis = RunningDiagnosis(
            folder,
            settings.diagnose_interval,
            iteration,
            functools.partial(print, flush=True),
            lambda **values: self._progress.report(values),
        )

    def begin(self, iteration: int, arguments: Mapping[str, Any]) -> None:
        """Starts to trace a training step.

        Args:
            iteration: Index of the step in Megatron-LM's log. If Megatron-LM repeats a step, the
                trace contains the repetition as a step with the next index.
            arguments: Arguments of megatron-core's function that runs a step.
        """
        iteration = max(iteration, self._done + 1)
        microbatches = arguments["num_microbatches"]
        _, replicas = self._groups.replica
        samples = microbatches * arguments["micro_batch_size"] * replicas
        self._begun = _Begun(
            iteration=iteration,
            begin_s=time.perf_counter(),
            samples=samples,
            tokens=samples * arguments["seq_length"],
        )
        self._try(
            functools.partial(self.tracing.begin_iteration, iteration, microbatches, is_traced=True)
        )

    def returned(self, reported: Sequence[Any]) -> None:
        """Stores the loss of a training step, summed over all replicas.

        ``reported`` contains the results of the loss function on this replica. All replicas must
        call this method together. On a GPU, the method does not wait for the all-reduce.
        """
        self._loss = _summed_over_replicas(reported, self._groups.dp_cp)

    def end(self) -> None:
        """Ends the current step, if there is one, and writes its measurements.

        The device must have finished all work of the step.
        """
        begun = self._begun
        self._begun = None
        if begun is None:
            return
        elapsed_s = time.perf_counter() - begun.begin_s
        self._try(self.tracing.end_iteration)
        loss = self._loss
        self._loss = None
        self._done = begun.iteration
        self._progress.iteration(
            begun.iteration,
            {
                "step_ms": round(elapsed_s * 1e3, 3),
                "tokens_per_s": round(begun.tokens / elapsed_s, 1),
                "loss": _mean_loss(loss, self._groups.dp_cp.size()),
                "learning_rate": self._rate,
                "global_batch_size": begun.samples,
                "peak_memory_bytes": self._accelerator.peak_memory_bytes(),
            },
            is_logged=False,
        )
        self._diagnosis.after_iteration(begun.iteration)

    def evaluating(self) -> AbstractContextManager[None]:
        """Returns a context manager that traces the duration of its block as an evaluation."""
        return self.tracing.host_span("evaluate")

    def close(self, *, is_orderly: bool) -> None:
        """Closes the trace and the progress file, and removes all hooks.

        Args:
            is_orderly: Whether all steps have succeeded.

        Raises:
            TraceError: A file could not be written.
        """
        for hook in self._hooks:
            hook.remove()
        dist_checkpointing.save = self._save
        self._diagnosis.close()
        if is_orderly:
            is_complete = self._total and self._done >= self._total
            self._progress.report({"ended": COMPLETE if is_complete else _ENDED})
        self._progress.close()
        self.tracing.close()

    def timed(self, iterators: Any) -> Any:
        """Wraps the data iterators of a training step, so that their reads are traced.

        ``iterators`` is an iterator, ``None``, or a list of such values. ``None`` is returned
        unchanged.
        """
        if isinstance(iterators, list):
            return [self.timed(iterator) for iterator in iterators]
        return None if iterators is None else _Timed(iterators, self.tracing.data_read)

    def _update_begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._optimizers += 1
        if self._optimizers == 1:
            self._rate = max(float(group["lr"]) for group in optimizer.param_groups)
            self._update = self.tracing.span("optimizer")
            self._update.__enter__()

    def _update_ends(self, *_: Any) -> None:
        self._optimizers = max(0, self._optimizers - 1)
        update = self._update
        if not self._optimizers and update is not None:
            self._update = None
            update.__exit__(None, None, None)

    def _saving(self, save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def traced(*args: Any, **kwargs: Any) -> Any:
            self._finish_step()
            with self.tracing.host_span("checkpoint"):
                return save(*args, **kwargs)

        return traced

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except TraceError as error:
            say(f"megatron.adaptive: {error}")


class _Timed:
    """Wraps a data iterator and measures its reads.

    Attributes that this class does not define are read from the iterator.

    Args:
        iterator: Iterator over microbatches.
        was_read: Function that is called after each read. Its arguments are the index of the read,
            and the start and the end of the read in nanoseconds.
    """

    def __init__(self, iterator: Iterator[Any], was_read: Callable[[int, int, int], None]) -> None:
        self._iterator = iterator
        self._was_read = was_read
        self._count = 0

    def __iter__(self) -> _Timed:
        return self

    def __next__(self) -> Any:
        start_ns = time.monotonic_ns()
        item = next(self._iterator)
        self._was_read(self._count, start_ns, time.monotonic_ns())
        self._count += 1
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def stage_sizes(
    job: Job, placement: Placement, pp_rank: int, chunks: Sequence[torch.nn.Module], seq_length: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Returns the number of layers and the compute cost of each stage.

    All ranks must call this together. The cost of a stage is its number of multiply-adds divided by
    the number for one layer, as in the trainer of this package. ``seq_length`` is the number of
    tokens of a sample. Both results are empty if a chunk has no list of layers.
    """
    local = {
        placement.stage_of(pp_rank, chunk): _sizes_of(model, seq_length)
        for chunk, model in enumerate(chunks)
    }
    by_stage: dict[int, tuple[int, float, float] | None] = {}
    for part in job.gather(local):
        by_stage |= part
    sizes = [size for _, size in sorted(by_stage.items()) if size is not None]
    layer = max((layer for _, layer, _ in sizes), default=0.0)
    if len(sizes) < len(by_stage) or not layer:
        return (), ()
    layers = tuple(count for count, _, _ in sizes)
    return layers, tuple(count + beside / layer for count, _, beside in sizes)


def _sizes_of(chunk: torch.nn.Module, seq_length: int) -> tuple[int, float, float] | None:
    """Returns the number of layers of ``chunk``, and two costs in multiply-adds per token.

    The first cost is for one layer, and the second cost is for the logits. ``seq_length`` is the
    number of tokens of a sample.
    """
    model = unwrap_model([chunk])[0]
    config = get_model_config(chunk)
    layers = getattr(getattr(model, "decoder", None), "layers", None)
    if layers is None:
        return None
    heads = (config.kv_channels or 0) * config.num_attention_heads
    weights = max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=0)
    each = weights + heads * seq_length / config.tensor_model_parallel_size
    output = getattr(model, "output_layer", None) if getattr(model, "post_process", 0) else None
    width = getattr(output, "output_size_per_partition", 0)
    return len(layers), each if weights else 0.0, float(config.hidden_size * width)


def _summed_over_replicas(reported: Sequence[Any], group: dist.ProcessGroup) -> torch.Tensor | None:
    """Adds up the losses of all replicas, in the form that :func:`_summed_loss` returns.

    The result is ``None`` on ranks without the last stage. All replicas of the last stage must call
    this together. A replica without a loss contributes zeros, because other replicas may have a
    loss and wait for the all-reduce.

    Args:
        reported: Results of the loss function on the last stage, or empty on other stages.
        group: Process group of the replicas.
    """
    if not reported:
        return None
    total = _summed_loss(reported)
    if total is None:
        total = torch.zeros(3, device=current_device())
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total


def _mean_loss(total: torch.Tensor | None, num_replicas: int) -> float | None:
    """Returns the mean loss over replicas, or ``None`` if any replica reported no loss.

    ``total`` is a result of :func:`_summed_over_replicas` for ``num_replicas`` replicas, or
    ``None``. This function waits for the device.
    """
    if total is None:
        return None
    loss, count, replicas = total.tolist()
    return loss / count if count and replicas == num_replicas else None


def _summed_loss(reported: Sequence[Any]) -> torch.Tensor | None:
    """Returns a tensor with three values: a replica's loss, the divisor of the loss, and 1.

    After summing over replicas, the last value is the number of replicas that have a loss. The
    result is ``None`` if ``reported`` does not have the form of Megatron-LM's losses.

    Source: ``train_step`` of Megatron-LM, which reports either a loss, or a sum over tokens and the
    number of tokens.
    """
    if not all(isinstance(losses, Mapping) and losses for losses in reported):
        return None
    name = _LOSS if _LOSS in reported[0] else next(iter(reported[0]))
    pairs = []
    for value in (losses.get(name) for losses in reported):
        parts = value if isinstance(value, tuple | list) else [value]
        if not all(isinstance(part, torch.Tensor) for part in parts):
            return None
        numbers = [part.detach().reshape(-1).float() for part in parts]
        pair = torch.cat(numbers) if numbers else torch.zeros(0)
        if pair.numel() not in (1, 2):
            return None
        count = pair[1] if pair.numel() == 2 else torch.ones_like(pair[0])
        pairs.append(torch.stack([pair[0], count]))
    total = torch.stack(pairs).sum(dim=0)
    return torch.cat([total, torch.ones_like(total[:1])])


def _sizes(groups: ModelGroups) -> dict[str, int]:
    """Returns the parallel sizes of the run, keyed by their names in ``progress.jsonl``."""
    return {
        "world_size": dist.get_world_size(),
        "data_parallel_size": groups.replica[1],
        "tensor_model_parallel_size": groups.tp.size(),
        "pipeline_model_parallel_size": groups.pp.size(),
    }
