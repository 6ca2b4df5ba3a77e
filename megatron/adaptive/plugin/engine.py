"""Runs Megatron-LM's steps on the executor, which all ranks build together at the first one.

Owns the channels, the trace and their end. What a step does is
:class:`~megatron.adaptive.engine.forward_backward.ForwardBackward`.

Actions, waits and messages of the trace come from the executor, as in our own trainer. Around them
there are three places to look from without changing anything of Megatron-LM's: the iterator it
hands in (``data``), the function that finishes gradients (``reduce``), and torch's own hooks around
the step of every optimizer (``optimizer``). Of validation and checkpoints nothing is seen.
"""

from __future__ import annotations

import atexit
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megatron.adaptive.accelerator import Accelerator, current_device
from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.engine.build import (
    Wiring,
    build_executor,
    gather_places,
    open_trace,
)
from megatron.adaptive.engine.deferred_layers import attach_stores
from megatron.adaptive.engine.forward_backward import ForwardBackward
from megatron.adaptive.engine.job import Job, environment_of_rank
from megatron.adaptive.engine.orders import Orders, weight_pieces
from megatron.adaptive.engine.tracing import Tracing
from megatron.adaptive.errors import ConfigError, TraceError, TransportError
from megatron.adaptive.gpt.placement import add_up_copies
from megatron.adaptive.plugin.placed import Placed
from megatron.adaptive.plugin.refused import check_call, check_model
from megatron.adaptive.plugin.settings import Settings, megatron_arguments
from megatron.adaptive.schedule.placement import Placement


class Engine:
    """Runs the steps of this rank.

    Args:
        settings: the plugin's, in force for all steps.
        placed: answers where stages lie.

    Attributes:
        left_open: it was closed after a failed step: threads still wait for messages.
    """

    def __init__(self, settings: Settings, placed: Placed) -> None:
        self._settings = settings
        self._placed = placed
        self._accelerator = _this_device()
        self._chunks: list[torch.nn.Module] = []
        self._forward_backward: ForwardBackward | None = None
        self._group: dist.ProcessGroup | None = None
        self._placement: Placement | None = None
        self._payload: tuple[int, ...] | None = None
        self._wiring: Wiring | None = None
        self._trace: StepTrace | None = None
        self._broken = False
        self.left_open = False

    def run(self, given: Mapping[str, Any]) -> list[Any]:
        """Run a step. The first one is collective over all ranks of the job.

        Args:
            given: the arguments of megatron-core's function.

        Returns:
            What megatron-core's function returns.

        Raises:
            ConfigError: the model or an argument asks for what the engine does not do.
            TransportError: another rank is gone or silent.
        """
        check_call(given)
        model = given["model"]
        chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
        config = get_model_config(chunks[0])
        if chunks != self._chunks:
            replicas = parallel_state.get_data_parallel_world_size()
            check_model(config, chunks, self._settings, replicas=replicas)
            self._chunks, self._forward_backward = chunks, None
        self._connect(config, given)
        assert self._forward_backward is not None
        self._end_iteration()
        if self._trace is not None and not given.get("forward_only", False):
            self._trace.begin(given["num_microbatches"])
            given = {**given, "data_iterator": self._trace.timed(given["data_iterator"])}
        if len(chunks) > 1:
            given = {**given, "forward_step_func": self._by_chunk(given["forward_step_func"])}
        try:
            answer = self._forward_backward(**given)
            if self._settings.kind == "v" and not given.get("forward_only", False):
                add_up_copies(chunks)
            return answer
        except BaseException:
            self._broken = True  # peers are not where a farewell would find them
            raise

    def _by_chunk(self, forward_step_func: Callable[..., Any]) -> Callable[..., Any]:
        """Let megatron-core know which chunk runs."""

        @functools.wraps(forward_step_func)
        def step(data_iterator: Any, model: Any, *rest: Any, **options: Any) -> Any:
            chunk = next(n for n, one in enumerate(self._chunks) if one is model)
            with self._placed.running(chunk):
                return forward_step_func(data_iterator, model, *rest, **options)

        return step

    def close(self) -> None:
        """End the trace and the channels; all ranks must do so. After a failed step only the trace.

        Raises:
            TransportError: another rank did not close its channels in time.
        """
        atexit.unregister(self._close_at_exit)
        self._end_iteration()
        if self._trace is not None:
            self._trace.close()
            self._trace = None
        wiring, self._wiring = self._wiring, None
        if wiring is not None and self._broken:
            self.left_open = True
        elif wiring is not None:
            wiring.close()

    def _close_at_exit(self) -> None:
        # After an error that nobody caught the others wait elsewhere, so no farewell.
        self._broken = self._broken or getattr(sys, "last_value", None) is not None
        try:
            self.close()
        except (TransportError, TraceError) as error:
            print(f"megatron.adaptive at exit: {error}", file=sys.stderr, flush=True)

    def _connect(self, config: Any, given: Mapping[str, Any]) -> None:
        group = parallel_state.get_pipeline_model_parallel_group()
        placement = Placement(
            num_ranks=group.size(), num_chunks=len(self._chunks), kind=self._settings.kind
        )
        payload = _payload_shape(config, given, len(self._chunks))
        if self._wiring is None:
            self._group, self._placement, self._payload = group, placement, payload
            settings = self._settings
            if settings.trace_dir is not None:
                job = Job(
                    environment=environment_of_rank(),
                    accelerator=self._accelerator,
                    control_group=dist.group.WORLD,
                    places=gather_places(),
                )
                self._trace = StepTrace(
                    open_trace(
                        settings.trace_dir,
                        job,
                        placement,
                        schedule=settings.schedule,
                        num_microbatches=given["num_microbatches"],
                        pp_rank=self._pp_ranks.index(dist.get_rank()),
                    )
                )
            self._build(config, given["num_microbatches"])
            atexit.register(self._close_at_exit)
        elif group is not self._group or placement != self._placement:
            raise ConfigError(
                f"the pipeline of {placement.num_ranks} ranks with {placement.num_chunks} chunks "
                "each is not the one of the first step, which the engine is connected for: call "
                "megatron.adaptive.uninstall() and install() on all ranks in between"
            )
        elif self._payload is not None and payload != self._payload:
            self._payload = None  # not all alike, as it seemed
            self._build(config, given["num_microbatches"])
        if self._forward_backward is None:
            assert self._wiring is not None
            self._forward_backward = ForwardBackward(
                executor=self._wiring.executor,
                orders=self._orders(config),
                stores=attach_stores(self._chunks) if self._settings.split_backward else None,
                span=None if self._trace is None else self._trace.tracing.span,
            )

    def _build(self, config: Any, num_microbatches: int) -> None:
        """Connect this rank with the others; collective over all ranks of the job."""
        assert self._placement is not None
        dtype = config.pipeline_dtype
        former = self._wiring
        self._wiring = build_executor(
            placement=self._placement,
            accelerator=self._accelerator,
            places=gather_places(),
            payload_shape=self._payload,
            payload_dtype=torch.float32 if dtype is None else dtype,
            timeout_s=self._settings.timeout_s,
            recorder=None if self._trace is None else self._trace.tracing.recorder,
            transport=TransportConfig(
                transport=self._settings.transport,
                transport_silence_s=self._settings.transport_silence_s,
            ),
            in_flight=self._orders(config).inputs_in_flight(num_microbatches),
            pp_ranks=self._pp_ranks,
        )
        if self._trace is not None:
            self._trace.tracing.watch(self._wiring.executor.snapshot)
        self._forward_backward = None
        if former is not None:
            former.close()  # by now all ranks are here, with nothing under way
        elif dist.get_rank() == 0:
            print(
                f"megatron.adaptive: schedule {self._settings.schedule} on "
                f"{self._placement.num_ranks} pipeline ranks with {self._placement.num_chunks} "
                f"model chunk{'s' * (self._placement.num_chunks > 1)} each"
                f"{' in a V' * (self._placement.kind == 'v')}",
                flush=True,
            )

    @property
    def _pp_ranks(self) -> list[int]:
        """The ranks of this pipeline by position: a V begins and ends at megatron-core's last."""
        ranks: list[int] = dist.get_process_group_ranks(self._group)
        return ranks[::-1] if self._settings.kind == "v" else ranks

    def _orders(self, config: Any) -> Orders:
        assert self._placement is not None
        settings = self._settings
        return Orders(
            schedule=settings.schedule,
            placement=self._placement,
            pp_rank=self._pp_ranks.index(dist.get_rank()),
            cap=settings.activation_cap,
            weight_pieces=weight_pieces(
                settings.weight_pieces, splits=settings.split_backward, is_rule=settings.is_rule
            ),
            group_size=getattr(config, "microbatch_group_size_per_vp_stage", None),
        )

    def _end_iteration(self) -> None:
        """Write what the step before did, by now done on the device as well."""
        if self._trace is None or self._wiring is None or self._broken:
            return
        self._accelerator.synchronize()
        self._wiring.executor.finish_step()
        self._trace.end()


class StepTrace:
    """The trace of this rank, step by step.

    A trace that cannot be written ends, and says so once; training goes on.

    Args:
        tracing: where it goes.

    Attributes:
        tracing: as given.
    """

    def __init__(self, tracing: Tracing) -> None:
        self.tracing = tracing
        self._iteration = 0
        self._optimizers = 0  # within each other
        self._update: AbstractContextManager[None] | None = None
        self._hooks = [
            register_optimizer_step_pre_hook(self._update_begins),
            register_optimizer_step_post_hook(self._update_ends),
        ]

    def begin(self, num_microbatches: int) -> None:
        """Begin a training step, under the number that the log will have for it."""
        current = getattr(megatron_arguments(), "curr_iteration", None)
        self._iteration = max(self._iteration, current or 0) + 1
        self._try(
            functools.partial(
                self.tracing.begin_iteration, self._iteration, num_microbatches, is_traced=True
            )
        )

    def end(self) -> None:
        """Write what the step before did, and what came after it."""
        self._try(self.tracing.end_iteration)

    def close(self) -> None:
        """End the trace.

        Raises:
            TraceError: something could not be written.
        """
        for hook in self._hooks:
            hook.remove()
        self.tracing.close()

    def timed(self, iterators: Any) -> Any:
        """The data iterators of a training step, their reads traced; ``None`` stays what it is."""
        if isinstance(iterators, list):
            return [self.timed(one) for one in iterators]
        return None if iterators is None else _Timed(iterators, self.tracing.data_read)

    def _update_begins(self, *_: Any) -> None:
        self._optimizers += 1
        if self._optimizers == 1:
            self._update = self.tracing.span("optimizer")
            self._update.__enter__()

    def _update_ends(self, *_: Any) -> None:
        self._optimizers = max(0, self._optimizers - 1)
        update = self._update
        if not self._optimizers and update is not None:
            self._update = None
            update.__exit__(None, None, None)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except TraceError as error:
            print(f"megatron.adaptive: {error}", file=sys.stderr, flush=True)


class _Timed:
    """An iterator whose reads are timed; in everything else the one that it stands for.

    Args:
        iterator: gives a microbatch at a time.
        was_read: called with the number, start and end of each.
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


def _this_device() -> Accelerator:
    """Return the device that Megatron-LM has chosen for this process."""
    device = current_device()
    if device.type != "cuda":
        return Accelerator(device=device, backend="gloo", name="CPU")
    backend = "nccl" if "nccl" in dist.get_backend_config() else "gloo"
    return Accelerator(device=device, backend=backend, name=torch.cuda.get_device_name(device))


def _payload_shape(
    config: Any, given: Mapping[str, Any], num_chunks: int
) -> tuple[int, ...] | None:
    """Return ``[s, b, h]`` of the tensors between stages, ``None`` where they may differ."""
    differs = ("variable_seq_lengths", "mtp_num_layers", "fp32_residual_connection")
    if config.pipeline_dtype is None or any(getattr(config, name, None) for name in differs):
        return None
    length: int = given["seq_length"]
    if num_chunks == 1 and given.get("decoder_seq_length") is not None:
        length = given["decoder_seq_length"]
    length //= parallel_state.get_context_parallel_world_size()
    if config.sequence_parallel:
        length //= parallel_state.get_tensor_model_parallel_world_size()
    return (length, given["micro_batch_size"], config.hidden_size)
