"""Runs Megatron-LM's steps on the executor, which all ranks build together at the first one.

Owns the channels, the choice of ``auto``, the keys of dropout, the trace and the end of all. What a
step does is :class:`~megatron.adaptive.engine.stages.ForwardBackward`, what is seen of
Megatron-LM around it :mod:`~megatron.adaptive.plugin.run_trace`.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron.adaptive import device_collectives
from megatron.adaptive.accelerator import Accelerator, current_device, keep_freed_memory
from megatron.adaptive.config.input_files import printable, say
from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.engine.deferred_layers import attach_stores, why_not_split
from megatron.adaptive.engine.executor import RankTimes
from megatron.adaptive.engine.executor_setup import (
    Wiring,
    build_executor,
    gather,
    gather_places,
    open_trace,
    require_equal_settings,
)
from megatron.adaptive.engine.expert_load import measured_experts
from megatron.adaptive.engine.hang_guard import HangGuard
from megatron.adaptive.engine.policy_factory import Orders
from megatron.adaptive.engine.process_context import Job, environment_of_rank
from megatron.adaptive.engine.stages import ForwardBackward
from megatron.adaptive.engine.tracing import OutsideTrace
from megatron.adaptive.errors import ConfigError, TraceError, TransportError
from megatron.adaptive.gpt.forward import DropoutKeys
from megatron.adaptive.gpt.model_placement import add_up_copies
from megatron.adaptive.plugin.first_weights import DEFAULT_SEED
from megatron.adaptive.plugin.placement_patch import Placed
from megatron.adaptive.plugin.run_trace import StepTrace, stage_sizes
from megatron.adaptive.plugin.settings import Settings, megatron_arguments
from megatron.adaptive.plugin.unsupported_features import (
    check_call,
    check_model,
    why_not_by_default,
)
from megatron.adaptive.rebalance.auto_schedule import Tuner
from megatron.adaptive.schedule.stage_placement import Placement


class Engine:
    """Runs the steps of this rank.

    Args:
        settings: the plugin's, in force for all steps.
        placed: answers where stages lie.
        own: megatron-core's own function, to be traced from outside; the executor where ``None``.

    Attributes:
        left_open: it was closed after a failed step: threads still wait for messages.
    """

    # From the first step on.
    _job: Job
    _orders: Orders

    def __init__(
        self, settings: Settings, placed: Placed, own: Callable[..., Any] | None = None
    ) -> None:
        self._settings = settings
        self._placed = placed
        self._own = own
        self._accelerator = _this_device()
        self._chunks: list[torch.nn.Module] = []
        self._forward_backward: ForwardBackward | OutsideTrace | None = None
        self._group: dist.ProcessGroup | None = None
        self._payload: tuple[int, ...] | None = None
        self._splits = False
        self._wiring: Wiring | None = None
        self._dropout: DropoutKeys | None = None
        self._tuner: Tuner | None = None
        self._trace: StepTrace | None = None
        self._iteration = 0
        self._step: int | None = None  # microbatches of the training step under way
        self._done: tuple[RankTimes, int] | None = None  # what the last one took, and the same
        self._broken = False
        self._guard: HangGuard | None = None
        self._runs = False  # within a step
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
        if self._own is None:
            check_call(given)
        model, trains = given["model"], not given.get("forward_only", False)
        chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
        config = get_model_config(chunks[0])
        self._finish_step()
        if chunks != self._chunks:
            replicas = parallel_state.get_data_parallel_world_size()
            if self._own is None:
                check_model(config, chunks, self._settings, replicas=replicas)
            self._chunks, self._forward_backward = chunks, None
        self._connect(config, given)
        self._tune()
        assert self._forward_backward is not None
        trace = self._trace
        if trains:
            current = getattr(megatron_arguments(), "curr_iteration", None)
            # Megatron-LM may run a step again, to see whether its results are the same.
            self._iteration = (self._iteration if current is None else current) + 1
            if self._dropout is not None:
                keyed = self._dropout.keyed(
                    given["forward_step_func"], chunks, step=self._iteration
                )
                given = {**given, "forward_step_func": keyed}
            if trace is not None:
                trace.begin(self._iteration, given)
                given = {**given, "data_iterator": trace.timed(given["data_iterator"])}
        if self._settings.kind == "v":
            given = {**given, "forward_step_func": self._by_chunk(given["forward_step_func"])}
        self._runs = True
        try:
            with nullcontext() if trace is None or trains else trace.evaluating():
                reported = self._forward_backward(**given)
            if trains:
                if self._settings.kind == "v":
                    add_up_copies(chunks)
                self._step = given["num_microbatches"]
                if trace is not None:
                    trace.returned(reported)
            return reported
        except BaseException:
            self._broken = True  # peers are not where a farewell would find them
            raise
        finally:
            self._runs = False

    def _by_chunk(self, forward_step_func: Callable[..., Any]) -> Callable[..., Any]:
        """Let megatron-core know which chunk runs."""
        numbers = {id(chunk): number for number, chunk in enumerate(self._chunks)}
        placed = self._placed

        @functools.wraps(forward_step_func)
        def step(data_iterator: Any, model: Any, *rest: Any, **options: Any) -> Any:
            placed.running = numbers[id(model)]
            try:
                return forward_step_func(data_iterator, model, *rest, **options)
            finally:
                placed.running = None

        return step

    def close(self) -> None:
        """End the trace and the channels; all ranks must do so. After a failed step only the trace.

        Raises:
            TransportError: another rank did not close its channels in time.
        """
        atexit.unregister(self._close_at_exit)
        self._finish_step()
        if self._trace is not None:
            self._trace.close(is_orderly=not self._broken)
            self._trace = None
        if self._dropout is not None:
            self._dropout.detach(self._chunks)
        if self._guard is not None:
            self._guard.close()
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
            say(f"megatron.adaptive at exit: {error}")

    def _connect(self, config: Any, given: Mapping[str, Any]) -> None:
        group = parallel_state.get_pipeline_model_parallel_group()
        placement = Placement(
            num_ranks=group.size(), num_chunks=len(self._chunks), kind=self._settings.kind
        )
        payload = _payload_shape(config, given, len(self._chunks))
        if self._group is None:
            self._group, self._payload = group, payload
            self._job = Job(
                environment=environment_of_rank(),
                accelerator=self._accelerator,
                control_group=dist.group.WORLD,
                places=gather_places(),
            )
            require_equal_settings(_shared_settings(self._settings, config))
            self._splits = self._choose_split(config)
            self._orders = self._make_orders(config, placement)
            if self._settings.trace_dir is not None:
                self._trace = self._open_trace(self._settings.trace_dir, given)
            if self._own is None:
                self._build(config, given["num_microbatches"])
            settings = self._settings
            self._guard = HangGuard(
                self._job,
                after_s=settings.hang_after_s,
                on_hang=settings.on_hang,
                page_folder=settings.trace_dir,
            )
            self._guard.snapshot = self._evidence
            atexit.register(self._close_at_exit)
        elif group is not self._group or placement != self._orders.placement:
            raise ConfigError(
                f"the pipeline of {placement.num_ranks} ranks with {placement.num_chunks} chunks "
                "each is not the one of the first step, which the engine is connected for: call "
                "megatron.adaptive.uninstall() and install() on all ranks in between"
            )
        elif self._own is None and self._payload is not None and payload != self._payload:
            self._payload = None  # not all alike, as it seemed
            self._build(config, given["num_microbatches"])
        if self._forward_backward is None and self._own is not None:
            assert self._trace is not None
            self._forward_backward = OutsideTrace(self._own, self._trace.tracing)
            self._trace.tracing.watch(self._forward_backward.snapshot)
        elif self._forward_backward is None:
            assert self._wiring is not None
            self._forward_backward = ForwardBackward(
                executor=self._wiring.executor,
                orders=self._orders,
                stores=attach_stores(self._chunks) if self._splits else None,
                span=None if self._trace is None else self._trace.tracing.span,
            )
            self._dropout = self._make_keys(config)
            self._tuner = self._make_tuner(config)

    def _evidence(self) -> dict[str, Any]:
        """Returns what this rank does; called from the thread of the hang guard."""
        known = {} if self._trace is None else self._trace.tracing.now()
        if self._wiring is not None:
            known |= self._wiring.executor.evidence()
        elif isinstance(self._forward_backward, OutsideTrace):
            known |= self._forward_backward.snapshot()
        return {"doing": "", **known, "iteration": self._iteration, "in_step": self._runs}

    def _open_trace(self, folder: str, given: Mapping[str, Any]) -> StepTrace:
        job, orders, placement = self._job, self._orders, self._orders.placement
        sizes = stage_sizes(job, placement, orders.pp_rank, self._chunks, given["seq_length"])
        tracing = open_trace(
            folder,
            job,
            placement,
            schedule=self._settings.schedule,
            num_microbatches=given["num_microbatches"],
            layers=sizes[0],
            work=sizes[1],
            pp_rank=orders.pp_rank,
        )
        tracing.experts = measured_experts(self._chunks, self._accelerator)
        done = getattr(megatron_arguments(), "curr_iteration", None) or 0
        return StepTrace(tracing, self._settings, self._accelerator, done, self._finish_step)

    def _make_keys(self, config: Any) -> DropoutKeys | None:
        """Returns what seeds dropout; says who does where that changes from run to run."""
        has_dropout = config.hidden_dropout > 0 or config.attention_dropout > 0
        if not has_dropout or not self._settings.keyed_dropout:
            if has_dropout and len(self._chunks) > 1 and self._settings.is_rule:
                self._say(
                    "dropout's numbers follow the order of forwards, which a rule with several "
                    "chunks chooses anew each time: give --keyed-dropout True to repeat a run"
                )
            return None
        seed = getattr(megatron_arguments(), "seed", None)
        keys = DropoutKeys(DEFAULT_SEED if seed is None else seed, enabled=True)
        keys.attach(self._chunks)
        return keys

    def _make_tuner(self, config: Any) -> Tuner | None:
        """Returns what chooses for ``auto``, as long as it has not chosen. Collective."""
        orders, settings = self._orders, self._settings
        if orders.schedule != "auto":
            return None
        assert self._wiring is not None
        assert isinstance(self._forward_backward, ForwardBackward)
        return Tuner(
            job=self._job,
            pp_ranks=self._pp_ranks,
            chunks=self._chunks,
            forward_backward=self._forward_backward,
            transport=self._wiring.transport,
            payload_shape=self._payload or (1,),
            payload_dtype=config.pipeline_dtype or torch.float32,
            loads=None,
            gain=None,
            cap=settings.activation_cap,
            can_turn=False,  # the model is Megatron-LM's
            timeout_s=settings.timeout_s,
            say=self._say,
        )

    def _tune(self) -> None:
        """Adds what the last training step took to the choice of ``auto``; it may be made now."""
        done, self._done = self._done, None
        if self._tuner is None or done is None:
            return
        decision = self._tuner.after_step(*done)
        if decision is not None:
            self._say(decision.text)
            self._tuner = None

    def _choose_split(self, config: Any) -> bool:
        """Return whether backwards are split, on all ranks alike; collective over all of them."""
        wanted, reason = self._settings.splits, None
        if self._own is not None:
            return bool(wanted)
        if wanted is None and self._settings.schedule != "file":
            replicas = parallel_state.get_data_parallel_world_size()
            reason = why_not_by_default(config, self._chunks, replicas=replicas)
        if wanted is not False:
            reason = reason or why_not_split(self._chunks)
        reasons = [each for each in gather(reason) if each is not None]
        if wanted and reasons:
            raise ConfigError(
                f"backwards cannot be split: {reasons[0]}; choose a schedule with whole backwards "
                "such as 1f1b, or drop split_backward"
            )
        return wanted is not False and not reasons

    def _build(self, config: Any, num_microbatches: int) -> None:
        """Connect this rank with the others; collective over all ranks of the job."""
        dtype, placement = config.pipeline_dtype, self._orders.placement
        former = self._wiring
        self._wiring = build_executor(
            placement=placement,
            accelerator=self._accelerator,
            places=self._job.places,
            payload_shape=self._payload,
            payload_dtype=torch.float32 if dtype is None else dtype,
            timeout_s=self._settings.timeout_s,
            tracing=None if self._trace is None else self._trace.tracing,
            transport=TransportConfig(
                transport=self._settings.transport,
                transport_silence_s=self._settings.transport_silence_s,
            ),
            in_flight=self._orders.inputs_in_flight(num_microbatches),
            pp_ranks=self._pp_ranks,
            model=config,
        )
        self._forward_backward = None
        if former is not None:
            former.close()  # by now all ranks are here, with nothing under way
            return
        self._say(
            f"schedule {self._settings.schedule} on {placement.num_ranks} pipeline ranks "
            f"with {placement.num_chunks} model chunk{'s' * (len(self._chunks) > 1)} each"
            f"{' in a V' * (placement.kind == 'v')}"
        )

    @property
    def _pp_ranks(self) -> list[int]:
        """The ranks of this pipeline by position: a V begins and ends at megatron-core's last."""
        ranks: list[int] = dist.get_process_group_ranks(self._group)
        return ranks[::-1] if self._settings.kind == "v" else ranks

    def _make_orders(self, config: Any, placement: Placement) -> Orders:
        settings = self._settings
        return Orders(
            schedule=settings.schedule,
            placement=placement,
            pp_rank=self._pp_ranks.index(dist.get_rank()),
            cap=settings.activation_cap,
            splits=self._splits,
            pieces=settings.weight_pieces,
            schedule_file=settings.schedule_file,
            group_size=getattr(config, "microbatch_group_size_per_vp_stage", None),
            beside=bool(getattr(config, "overlap_moe_expert_parallel_comm", False)),
            auto_candidates=settings.auto_candidates or (),
        )

    def _finish_step(self) -> None:
        """Take what the training step under way did, if one is; waits until its device is done."""
        step, self._step = self._step, None
        waits = self._trace is not None or self._tuner is not None
        if step is None or not waits or self._broken:
            return
        if self._wiring is not None:
            self._done = (self._wiring.executor.finish_step(), step)
        if self._trace is not None:
            self._trace.end()

    def _say(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(f"megatron.adaptive: {printable(text, lines=True)}", flush=True)


def _this_device() -> Accelerator:
    """Return the device that Megatron-LM has chosen for this process."""
    device = current_device()
    if device.type != "cuda":
        keep_freed_memory()
        return Accelerator(device=device, backend="gloo", name="CPU")
    backend = "nccl" if "nccl" in dist.get_backend_config() else "gloo"
    if backend == "gloo":
        device_collectives.install()
    return Accelerator(device=device, backend=backend, name=torch.cuda.get_device_name(device))


def _shared_settings(settings: Settings, config: Any) -> dict[str, str]:
    """Returns what all ranks must have alike, of the plug-in and of how experts communicate."""
    own = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    for name in ("trace_dir", "schedule_file"):  # paths may differ
        own.pop(name, None)
    for name in ("overlap_moe_expert_parallel_comm", "moe_token_dispatcher_type"):
        own[name] = getattr(config, name, None)
    return {name: f"{name}={value}" for name, value in own.items()}


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
