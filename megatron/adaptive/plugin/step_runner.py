"""Runs the steps of one model on this package's executor.

All ranks build the executor together in the first step of the model.

This module creates and closes the channels between ranks, the tuner for ``auto``, the object that
seeds dropout, and the trace. :class:`~megatron.adaptive.engine.stages.ForwardBackward` runs a step,
and :mod:`~megatron.adaptive.plugin.run_trace` traces what Megatron-LM does outside of steps.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from megatron.adaptive.accelerator import Accelerator, current_device, keep_freed_memory
from megatron.adaptive.config.input_files import printable
from megatron.adaptive.config.schedule import trace_details
from megatron.adaptive.engine.collective_meter import CollectiveMeter, model_parallel_groups
from megatron.adaptive.engine.deferred_layers import attach_stores, why_not_split
from megatron.adaptive.engine.executor import RankTimes
from megatron.adaptive.engine.executor_setup import (
    Wiring,
    build_executor,
    gather_places,
    open_trace,
    require_equal_settings,
)
from megatron.adaptive.engine.expert_load import measured_experts
from megatron.adaptive.engine.hang_guard import HangGuard
from megatron.adaptive.engine.kernel_recorder import KernelRecorder
from megatron.adaptive.engine.layer_meter import LayerMeter
from megatron.adaptive.engine.model_groups import ModelGroups
from megatron.adaptive.engine.policy_factory import Orders
from megatron.adaptive.engine.process_context import (
    Job,
    device_in_groups,
    environment_of_rank,
    gather,
)
from megatron.adaptive.engine.stages import ForwardBackward
from megatron.adaptive.engine.tracing import OutsideTrace
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.gpt.forward import DropoutKeys
from megatron.adaptive.gpt.model_placement import add_up_copies
from megatron.adaptive.plugin.first_weights import DEFAULT_SEED
from megatron.adaptive.plugin.placement_patch import Placed
from megatron.adaptive.plugin.run_trace import StepTrace, stage_sizes
from megatron.adaptive.plugin.settings import Settings, megatron_arguments, timeout_of_groups
from megatron.adaptive.plugin.unsupported_features import (
    check_call,
    check_model,
    why_not_by_default,
)
from megatron.adaptive.rebalance.auto_schedule import Tuner
from megatron.adaptive.schedule.stage_placement import Placement


class Watch:
    """Detects hangs of a process, and closes its models when the interpreter exits.

    Args:
        close: Function that closes all models of the process.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._guard: HangGuard | None = None

    def begin(self, job: Job, settings: Settings) -> None:
        """Starts the hang detector after a model has been connected, if it is not running yet.

        All ranks must call this together.
        """
        # Python runs exit functions in reverse order of registration. The channels and the trace of
        # the model have already registered exit functions, and this function must run before them.
        atexit.unregister(self._close)
        atexit.register(self._close)
        if self._guard is None:
            self._guard = HangGuard(
                job,
                after_s=settings.hang_after_s,
                on_hang=settings.on_hang,
                page_folder=settings.trace_dir,
            )

    def look_at(self, evidence: Callable[[], Mapping[str, Any]]) -> None:
        """Makes the hang detector watch one model until this method is called for another model.

        ``evidence`` is a function that returns what this rank is doing in the model.
        """
        if self._guard is not None:
            self._guard.snapshot = evidence

    def close(self) -> None:
        """Stops the hang detector. This method can be called more than once."""
        atexit.unregister(self._close)
        if self._guard is not None:
            self._guard.close()


class Engine:
    """Runs the training and evaluation steps of one model on this rank.

    Args:
        settings: Settings of the model, with command-line flags applied.
        placed: Replacement for megatron-core's functions that return the position of a stage.
        traced: Step function of megatron-core that the engine runs and traces, or ``None`` if the
            executor runs the steps.
        modules: Chunks of the model, without wrappers.
        number: Index of the model in the process, from 1.
        watch: Hang detector of the process.

    Attributes:
        modules: Chunks of the model, without wrappers.
        has_failed: Whether a step has raised an error. After an error, the other ranks might not
            close their channels.
        left_open: Whether :meth:`close` left channels open because a step failed. The threads of
            these channels still wait for messages.
    """

    # The attributes below are set in the first step.
    _accelerator: Accelerator
    _job: Job
    _orders: Orders
    _groups: ModelGroups

    def __init__(
        self,
        settings: Settings,
        placed: Placed,
        traced: Callable[..., Any] | None = None,
        *,
        modules: Sequence[torch.nn.Module],
        number: int,
        watch: Watch,
    ) -> None:
        self.modules = modules
        self.has_failed = False
        self._number = number
        self._watch = watch
        self._settings = settings
        self._placed = placed
        self._traced = traced
        self._chunks: list[torch.nn.Module] = []
        self._forward_backward: ForwardBackward | OutsideTrace | None = None
        self._is_connected = False
        self._splits = False
        self._wiring: Wiring | None = None
        self._dropout: DropoutKeys | None = None
        self._tuner: Tuner | None = None
        self._trace: StepTrace | None = None
        self._iteration = 0
        # Number of microbatches in the current training step, or None between steps.
        self._step: int | None = None
        # Times of the last training step, and its number of microbatches, or ``None``.
        self._done: tuple[RankTimes, int] | None = None
        self._runs = False  # True while a step is running.
        self.left_open = False

    def run(self, arguments: Mapping[str, Any]) -> list[Any]:
        """Runs a step. All ranks of the job must take part in the model's first step.

        Args:
            arguments: Arguments of megatron-core's function that runs a step.

        Returns:
            Results of the loss function, as megatron-core's function returns them.

        Raises:
            ConfigError: The engine does not support the model or an argument.
            TransportError: Another rank has exited, or does not respond.
        """
        if self._traced is None:
            check_call(arguments)
        model = arguments["model"]
        trains = not arguments.get("forward_only", False)
        chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
        config = get_model_config(chunks[0])
        self._finish_step()
        groups = ModelGroups(arguments.get("pg_collection"))
        if self._is_connected:
            self._check_same_pipeline(groups, len(chunks))
        if chunks != self._chunks:
            if self._traced is None:
                check_model(config, chunks, self._settings, groups)
            self._groups = groups
            self._chunks = chunks
            self._forward_backward = None
        self._connect(config, arguments)
        self._tune()
        assert self._forward_backward is not None
        trace = self._trace
        if trains:
            arguments = self._begin_training_step(arguments)
        if self._settings.kind == "v":
            by_chunk = self._by_chunk(arguments["forward_step_func"])
            arguments = {**arguments, "forward_step_func": by_chunk}
        self._runs = True
        try:
            with nullcontext() if trace is None or trains else trace.evaluating():
                reported = self._forward_backward(**arguments)
            if trains:
                if self._settings.kind == "v":
                    add_up_copies(chunks)
                self._step = arguments["num_microbatches"]
                if trace is not None:
                    trace.returned(reported)
            return reported
        except BaseException:
            self.has_failed = True
            raise
        finally:
            self._runs = False

    def _begin_training_step(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Counts the step, and wraps ``arguments`` to seed dropout and to trace data reads."""
        current = getattr(megatron_arguments(), "curr_iteration", None)
        # Use Megatron-LM's iteration number if there is one. Megatron-LM may repeat a step to check
        # that the results are the same, so dropout must have the same seed in the repetition.
        self._iteration = (self._iteration if current is None else current) + 1
        if self._dropout is not None:
            keyed = self._dropout.keyed(
                arguments["forward_step_func"], self._chunks, step=self._iteration
            )
            arguments = {**arguments, "forward_step_func": keyed}
        if self._trace is not None:
            self._trace.begin(self._iteration, arguments)
            timed = self._trace.timed(arguments["data_iterator"])
            arguments = {**arguments, "data_iterator": timed}
        return arguments

    def _by_chunk(self, forward_step_func: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps ``forward_step_func`` to store the index of the running chunk in ``placed``."""
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

    def close(self, *, is_orderly: bool) -> None:
        """Closes the trace and the channels.

        Args:
            is_orderly: Whether all ranks close the engine without an error. If not, the channels
                are left open.

        Raises:
            TransportError: Another rank did not close its channels in time.
        """
        if is_orderly:
            self._finish_step()
        if self._trace is not None:
            self._trace.close(is_orderly=is_orderly)
            self._trace = None
        if self._dropout is not None:
            self._dropout.detach(self._chunks)
        wiring = self._wiring
        self._wiring = None
        if wiring is not None and is_orderly:
            wiring.close()
        elif wiring is not None:
            self.left_open = True

    def _check_same_pipeline(self, groups: ModelGroups, num_chunks: int) -> None:
        """Raises an error if a step has different ranks or chunks than the model's first step.

        ``groups`` contains the process groups of the step, and ``num_chunks`` is the step's number
        of chunks.
        """
        placement = self._orders.placement
        num_ranks = groups.pp.size()
        if num_ranks == placement.num_ranks and num_chunks == placement.num_chunks:
            if groups.connect_same_ranks(self._groups):
                return
            change = "different process groups than the model's first step"
        else:
            change = (
                f"{num_ranks} pipeline ranks with {num_chunks} chunks each, but the model's "
                f"first step had {placement.num_ranks} ranks with {placement.num_chunks} chunks "
                "each"
            )
        raise ConfigError(
            f"this step has {change}; pass all chunks of the model in every step, or call "
            "megatron.adaptive.uninstall() and install() on all ranks between the steps"
        )

    def _connect(self, config: Any, arguments: Mapping[str, Any]) -> None:
        if not self._is_connected:
            self._connect_first(config, arguments)
            self._is_connected = True
        self._watch.look_at(self._evidence)
        if self._forward_backward is None and self._traced is not None:
            assert self._trace is not None
            self._forward_backward = OutsideTrace(self._traced, self._trace.tracing)
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
            self._tuner = self._make_tuner(config, arguments)

    def _connect_first(self, config: Any, arguments: Mapping[str, Any]) -> None:
        """Connects this rank to other ranks, and opens the trace of this rank.

        All ranks must call this together.
        """
        settings = self._settings
        placement = Placement(
            num_ranks=self._groups.pp.size(), num_chunks=len(self._chunks), kind=settings.kind
        )
        self._accelerator = _this_device()
        self._job = Job(
            environment=environment_of_rank(),
            accelerator=self._accelerator,
            control_group=dist.group.WORLD,
            places=gather_places(self._groups),
            timeout=timeout_of_groups(megatron_arguments()),
        )
        require_equal_settings(_shared_settings(settings, config))
        if (warning := settings.warning_about_effects()) is not None:
            self._say(warning)
        self._splits = self._choose_split(config)
        self._orders = self._make_orders(config, placement)
        if settings.trace_dir is not None:
            self._trace = self._open_trace(settings.trace_dir, arguments)
        if self._traced is None:
            self._build(config, arguments)
        self._watch.begin(self._job, settings)

    def _evidence(self) -> dict[str, Any]:
        """Returns what this rank is doing, for the report about a job that hangs.

        The thread of the hang detector calls this method.
        """
        activity = {} if self._trace is None else self._trace.tracing.now()
        if self._wiring is not None:
            activity |= self._wiring.executor.evidence()
        elif isinstance(self._forward_backward, OutsideTrace):
            activity |= self._forward_backward.snapshot()
        # A program with its own training loop may pause between steps, for example to generate
        # samples. Megatron-LM's own training loop, which sets ``curr_iteration``, does not pause.
        may_pause = getattr(megatron_arguments(), "curr_iteration", None) is None
        return {
            "doing": "",
            **activity,
            "iteration": self._iteration,
            "in_step": self._runs,
            "may_pause": may_pause,
        }

    def _open_trace(self, folder: str, arguments: Mapping[str, Any]) -> StepTrace:
        orders = self._orders
        layers, work = stage_sizes(
            self._job, orders.placement, orders.pp_rank, self._chunks, arguments["seq_length"]
        )
        tracing = open_trace(
            folder,
            self._job,
            orders.placement,
            schedule=self._settings.schedule,
            num_microbatches=arguments["num_microbatches"],
            layers=layers,
            work=work,
            pp_rank=orders.pp_rank,
            model_groups=self._groups,
            # megatron-core's own schedules send messages without a transport of this package.
            transport="" if self._traced is not None else self._settings.channels.forced or "",
            collector=self._settings.trace_otlp,
        )
        details = trace_details(self._settings.trace_detail)
        if "layers" in details:
            tracing.layers = LayerMeter(self._chunks, self._accelerator.clock())
        if "collectives" in details:
            groups = model_parallel_groups(self._groups)
            tracing.collectives = CollectiveMeter(groups, self._accelerator.clock())
        kernel_iterations = self._settings.kernel_iterations(self._job.rank, megatron_arguments())
        if kernel_iterations:
            tracing.kernels = KernelRecorder(
                folder,
                self._job.rank,
                kernel_iterations,
                on_gpu=self._accelerator.is_cuda,
                say=functools.partial(print, flush=True),
            )
        tracing.experts = measured_experts(self._chunks, self._accelerator, self._groups)
        done = getattr(megatron_arguments(), "curr_iteration", None) or 0
        return StepTrace(
            tracing, self._settings, self._accelerator, done, self._finish_step, self._groups
        )

    def _make_keys(self, config: Any) -> DropoutKeys | None:
        """Returns the object that seeds dropout, or ``None`` if Megatron-LM seeds it.

        Prints a warning if dropout would differ between runs because Megatron-LM seeds it.
        """
        has_dropout = config.hidden_dropout > 0 or config.attention_dropout > 0
        if not has_dropout or not self._settings.keyed_dropout:
            if has_dropout and len(self._chunks) > 1 and self._settings.is_rule:
                self._say(
                    "dropout depends on the order of forward passes, which can differ between "
                    "runs if a run-time rule schedules several chunks per rank; set "
                    "--keyed-dropout True for reproducible runs"
                )
            return None
        seed = getattr(megatron_arguments(), "seed", None)
        keys = DropoutKeys(
            DEFAULT_SEED if seed is None else seed, enabled=True, model_groups=self._groups
        )
        keys.attach(self._chunks)
        return keys

    def _make_tuner(self, config: Any, arguments: Mapping[str, Any]) -> Tuner | None:
        """Returns the object that tunes the schedule ``auto``, or ``None`` for other schedules.

        All ranks must call this together.
        """
        settings = self._settings
        if self._orders.schedule != "auto":
            return None
        assert self._wiring is not None
        assert isinstance(self._forward_backward, ForwardBackward)
        return Tuner(
            job=self._job,
            pp_ranks=self._pp_ranks,
            chunks=self._chunks,
            forward_backward=self._forward_backward,
            transport=self._wiring.transport,
            payload_shape=self._payload_shape(config, arguments) or (1,),
            payload_dtype=config.pipeline_dtype or torch.float32,
            loads=None,
            gain=None,
            cap=settings.activation_cap,
            # Megatron-LM has already built the model, so its placement cannot change.
            can_turn=False,
            timeout_s=settings.timeout_s,
            say=self._say,
        )

    def _tune(self) -> None:
        """Passes the times of the last step to the tuner, which may choose a different schedule."""
        done = self._done
        self._done = None
        if self._tuner is None or done is None:
            return
        decision = self._tuner.after_step(*done)
        if decision is not None:
            self._say(decision.text)
            self._tuner = None

    def _choose_split(self, config: Any) -> bool:
        """Returns whether weight gradients are separate actions, with the same result on all ranks.

        All ranks must call this together.
        """
        requested = self._settings.splits
        reason = None
        if self._traced is not None:
            return bool(requested)
        if requested is None and self._settings.schedule != "file":
            _, replicas = self._groups.replica
            reason = why_not_by_default(config, self._chunks, replicas=replicas)
        if requested is not False:
            reason = reason or why_not_split(self._chunks)
        reasons = [each for each in gather(reason) if each is not None]
        if requested and reasons:
            raise ConfigError(
                f"backward passes cannot be split: {reasons[0]}; choose a schedule that does not "
                "split them, such as 1f1b, or remove split_backward"
            )
        return requested is not False and not reasons

    def _build(self, config: Any, arguments: Mapping[str, Any]) -> None:
        """Builds the executor and connects it to other ranks. All ranks must call this together."""
        dtype = config.pipeline_dtype
        placement = self._orders.placement
        self._wiring = build_executor(
            placement=placement,
            accelerator=self._accelerator,
            places=self._job.places,
            payload_shape=self._payload_shape(config, arguments),
            payload_dtype=torch.float32 if dtype is None else dtype,
            # A caller may change the shape of tensors in any step, and on only one of the replicas.
            # In such a step, ranks could not agree to reconnect. The channels therefore accept all
            # shapes from the start.
            payload_varies=True,
            timeout_s=self._settings.timeout_s,
            tracing=None if self._trace is None else self._trace.tracing,
            transport=self._settings.channels,
            in_flight=self._orders.inputs_in_flight(arguments["num_microbatches"]),
            pp_ranks=self._pp_ranks,
            model=config,
            model_groups=self._groups,
        )
        self._say(
            f"schedule {self._settings.schedule} on {placement.num_ranks} pipeline ranks "
            f"with {placement.num_chunks} model chunk{'s' * (len(self._chunks) > 1)} each"
            f"{' in a V' * (placement.kind == 'v')}"
            + f", for model {self._number} of this process"
            * (self._number > 1)
        )

    def _payload_shape(self, config: Any, arguments: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Returns the shape ``[s, b, h]`` of tensors between stages, or ``None`` if shapes vary.

        ``config`` is the configuration of the model, and ``arguments`` are the arguments of the
        step function.
        """
        varying = ("variable_seq_lengths", "mtp_num_layers", "fp32_residual_connection")
        if config.pipeline_dtype is None or any(getattr(config, name, None) for name in varying):
            return None
        length: int = arguments["seq_length"]
        if len(self._chunks) == 1 and arguments.get("decoder_seq_length") is not None:
            length = arguments["decoder_seq_length"]
        length //= self._groups.cp.size()
        if config.sequence_parallel:
            length //= self._groups.tp.size()
        return (length, arguments["micro_batch_size"], config.hidden_size)

    @property
    def _pp_ranks(self) -> list[int]:
        """Returns the global ranks of this pipeline, ordered by their positions in the placement.

        In a V-shaped placement, position 0 is megatron-core's last rank.
        """
        ranks: list[int] = dist.get_process_group_ranks(self._groups.pp)
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
        """Waits until the device has finished the current training step, and ends this step."""
        step = self._step
        self._step = None
        waits = self._trace is not None or self._tuner is not None
        if step is None or not waits or self.has_failed:
            return
        if self._wiring is not None:
            self._done = (self._wiring.executor.finish_step(), step)
        if self._trace is not None:
            self._trace.end()

    def _say(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(f"megatron.adaptive: {printable(text, lines=True)}", flush=True)


def _this_device() -> Accelerator:
    """Returns the CPU or GPU that Megatron-LM has chosen for this process.

    All ranks must call this together, because they count the ranks that share a GPU.
    """
    device = current_device()
    name = "CPU"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        keep_freed_memory()
    return device_in_groups(Accelerator(device=device, backend="gloo", name=name))


def _shared_settings(settings: Settings, config: Any) -> dict[str, str]:
    """Returns the settings that must be equal on all ranks, including settings of MoE layers."""
    shared = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    for name in ("trace_dir", "schedule_file"):  # Paths may differ between ranks.
        shared.pop(name, None)
    for name in ("overlap_moe_expert_parallel_comm", "moe_token_dispatcher_type"):
        shared[name] = getattr(config, name, None)
    return {name: f"{name}={value}" for name, value in shared.items()}
