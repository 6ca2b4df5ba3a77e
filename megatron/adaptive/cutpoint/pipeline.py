"""The pipeline of a model with cut points: what a user's training loop calls."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron.adaptive import accelerator as _accelerator

# Before the modules below import megatron-core.
_accelerator.install()
_accelerator.quiet_libraries()

from megatron.adaptive.config.schedule import KEEPING_ALL  # noqa: E402
from megatron.adaptive.config.transport import TransportConfig  # noqa: E402
from megatron.adaptive.cutpoint.batch import BatchShape  # noqa: E402
from megatron.adaptive.cutpoint.forwards import Forward, Forwards, Slicing  # noqa: E402
from megatron.adaptive.cutpoint.holding import (  # noqa: E402
    check_groups,
    keep_only,
    shared_weights,
    unused_parameters,
)
from megatron.adaptive.cutpoint.measure import check_replay, segment_seconds  # noqa: E402
from megatron.adaptive.cutpoint.mesh import start_mesh  # noqa: E402
from megatron.adaptive.cutpoint.messages import Layout  # noqa: E402
from megatron.adaptive.cutpoint.orders import Orders, choose_placement  # noqa: E402
from megatron.adaptive.cutpoint.partition import (  # noqa: E402
    balanced,
    check_stages,
    given_partition,
)
from megatron.adaptive.cutpoint.program import RandomKey, StageProgram  # noqa: E402
from megatron.adaptive.cutpoint.slices import StagePlan, check_shared, slice_tape  # noqa: E402
from megatron.adaptive.cutpoint.stages import Held, ProgramStages  # noqa: E402
from megatron.adaptive.cutpoint.tape import Tape  # noqa: E402
from megatron.adaptive.cutpoint.update import Update  # noqa: E402
from megatron.adaptive.errors import AdaptiveError, ConfigError  # noqa: E402
from megatron.adaptive.pipeline.build import build_executor, inputs_in_flight  # noqa: E402
from megatron.adaptive.pipeline.executor import StepTimes  # noqa: E402
from megatron.adaptive.pipeline.meter import ActivationMeter  # noqa: E402
from megatron.adaptive.pipeline.tracing import Tracing  # noqa: E402
from megatron.adaptive.pipeline.weight_gradient import WeightGradientStore  # noqa: E402
from megatron.adaptive.trace.clock_sync import start_clock_sync  # noqa: E402
from megatron.adaptive.trace.event import TraceHeader  # noqa: E402
from megatron.adaptive.trace.files import set_aside  # noqa: E402
from megatron.adaptive.trace.recorder import Recorder  # noqa: E402

__all__ = ["Pipeline"]

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LEAST_SLOT_BYTES = 4096


class Pipeline:
    """Trains a module whose stages lie on several processes.

    Collective over all processes of the job, as :meth:`step`, :meth:`eval` and :meth:`close` are.
    All of them build the same model with the same weights; afterwards each holds the parameters of
    its own stages, and those of others are on the ``meta`` device.

    Args:
        model: with :class:`CutPoint` modules in its forward; called with the batch's entries as
            keyword arguments; where ``loss`` is given, with those that it takes.
        sample_batch: a batch, a dictionary of tensors whose first axis is that of the samples. Its
            first microbatch is run to find the stages; a second one checks them.
        micro_batch_size: samples of a microbatch.
        loss: ``(output, batch) -> scalar``; ``None`` where the model's output is the loss, has an
            entry ``loss`` or begins with it.
        arguments: further keyword arguments of forward, always the same.
        pipeline_size: processes of a pipeline, all where ``None``; the rest are replicas.
        schedule: order of work, see ``docs/schedules.md``.
        chunks: stages per process; chosen by the schedule where ``None``.
        activation_cap: most activations a process keeps, in microbatches over its chunks.
        split_backward: compute weight gradients apart; chosen by the schedule where ``None``.
        partition: segments between cut points that each stage gets, as ``"3-4-5"`` or numbers.
        weights: what each segment costs, in any unit; measured with the sample where ``None``.
        shared_weights: groups of names of parameters that are one and used on both sides of a cut.
        mixed_precision: ``bf16`` or ``fp16`` for autocast with parameters as they are; fp16 with a
            dynamic loss scale.
        seed: of dropout and all else that is random within the model.
        slicing: ``record``, ``export`` or ``auto``; see ``docs/cutpoint.md``.
        transport: how neighbouring processes are connected.
        trace_dir: folder for traces, ``None`` for none.
        timeout_s: limit of every wait for another process.

    Attributes:
        model: as given.
        partition: segments of each stage.
        cut_points: names of all cut points in the order of the forward.
        grad_norm: norm of the whole model's gradient in the last step, before clipping.
        times: of this process in the last step.

    Raises:
        ConfigError: a setting, the batch or the model breaks a rule; named.
        ScheduleError: the schedule is unknown or does not fit.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        sample_batch: Mapping[str, torch.Tensor],
        *,
        micro_batch_size: int,
        loss: Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor] | None = None,
        arguments: Mapping[str, Any] | None = None,
        pipeline_size: int | None = None,
        schedule: str = "adaptive",
        chunks: int | None = None,
        activation_cap: float | None = None,
        split_backward: bool | None = None,
        partition: str | Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
        shared_weights: Sequence[Sequence[str]] = (),
        mixed_precision: Literal["bf16", "fp16"] | None = None,
        seed: int = 1234,
        slicing: Slicing = "auto",
        transport: TransportConfig | None = None,
        trace_dir: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        if mixed_precision not in (None, *_PRECISIONS):
            raise ConfigError(
                f"mixed_precision {mixed_precision!r}: choose {' or '.join(_PRECISIONS)}, or None"
            )
        self._shape = BatchShape(sample_batch, micro_batch_size)
        check_groups(model, shared_weights)
        self.model = model
        self.grad_norm = 0.0
        self.times: StepTimes | None = None
        self._meter = ActivationMeter()
        self._step = 0
        self._mesh = start_mesh(pipeline_size, timeout_s)
        try:
            placement = choose_placement(schedule, self._mesh.pipeline_size, chunks)
            self._orders = Orders(
                schedule=schedule,
                placement=placement,
                pp_rank=self._mesh.pp_rank,
                cap=activation_cap,
                split=split_backward,
            )
            split = self._orders.weight_pieces > 0
            autocast = None if mixed_precision is None else _PRECISIONS[mixed_precision]
            forward = Forward(
                model=model, loss=loss, arguments=dict(arguments or {}), autocast=autocast
            )
            self._find_stages(forward, sample_batch, shared_weights, partition, weights, slicing)
        except AdaptiveError:
            self._mesh.close()
            raise
        self._tracing = self._start_trace(trace_dir, len(next(iter(sample_batch.values()))))
        self._wiring = self._connect(transport or TransportConfig(), timeout_s)
        self._tracing.watch(self._wiring.executor.look)
        self._random = RandomKey(seed, self._mesh.dp_rank, self.device)
        self._stores = [WeightGradientStore() for _ in self._programs] if split else None
        self._update.start(is_fp16=mixed_precision == "fp16")

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self._mesh.accelerator.device

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied with before the backward; 1 except in fp16."""
        return self._update.scale

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters of this process's stages, by their names in the model."""
        yield from self._update.parameters.items()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters of this process's stages."""
        yield from self._update.parameters.values()

    def set_optimizer(
        self,
        optimizer: Any,
        *,
        clip_norm: float | None = None,
        initial_loss_scale: float = 65536.0,
        loss_scale_interval: int = 2000,
    ) -> None:
        """Say what updates the parameters after each step.

        Args:
            optimizer: a ``torch.optim.Optimizer`` over :meth:`parameters`, or a function that makes
                one of a list of parameters; ``None`` on a process that holds none.
            clip_norm: largest norm of the whole model's gradient; ``None`` for no limit.
            initial_loss_scale: of fp16.
            loss_scale_interval: steps without an overflow after which it doubles.

        Raises:
            ConfigError: the optimizer holds parameters of other stages.
        """
        self._update.set_optimizer(optimizer, clip_norm, initial_loss_scale, loss_scale_interval)

    def step(self, batch: Mapping[str, torch.Tensor]) -> tuple[float, bool]:
        """Train on a batch: forward, backward, sums over replicas, optimizer.

        Without an optimizer the gradients stay in ``grad`` until the next step.

        Args:
            batch: of this replica, the same on all processes of its pipeline; its samples divide
                into microbatches. Processes use the entries that their stages need.

        Returns:
            The mean loss over microbatches and replicas, and whether the gradient was not finite,
            so that nothing was updated; the same on all processes.

        Raises:
            ConfigError: the batch does not divide or does not look like the sample.
            TransportError: another process is gone or silent.
        """
        count = self._shape.num_microbatches(batch)
        self._step += 1
        self._tracing.begin_iteration(self._step, count, is_traced=True)
        for parameter in self._update.parameters.values():
            parameter.grad = None
        losses = self._run(batch, count, forward_only=False)
        with self._tracing.span("reduce"):
            self._update.reduce()
            loss, self.grad_norm = self._update.totals(losses, count)
        with self._tracing.span("optimizer"):
            overflow = self._update.apply(self.grad_norm)
        self._mesh.accelerator.synchronize()
        self.times = self._wiring.executor.finish_step()
        self._tracing.end_iteration()
        return loss, overflow

    def eval(self, batch: Mapping[str, torch.Tensor]) -> float:
        """Return the mean loss of a batch in evaluation mode; the same on all processes.

        Args:
            batch: as in :meth:`step`.

        Raises:
            ConfigError: the batch does not divide or does not look like the sample.
            TransportError: another process is gone or silent.
        """
        count = self._shape.num_microbatches(batch)
        with self._tracing.host_span("evaluate"):
            losses = self._run(batch, count, forward_only=True)
            self._wiring.executor.finish_step()
            loss, _ = self._update.totals(losses, count, with_norm=False)
        return loss

    def close(self) -> None:
        """End the pipeline: channels, traces and the process groups that it made. Collective."""
        self._wiring.close()
        self._tracing.close()
        self._mesh.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:  # else others may not come to it
            self.close()

    def _run(
        self, batch: Mapping[str, torch.Tensor], count: int, *, forward_only: bool
    ) -> list[torch.Tensor]:
        """Run the forwards, and backwards, of a batch; returns the losses of the last stage."""
        programs = self._eval_programs if forward_only else self._programs
        names = {name for program in programs for name in program.plan.inputs}
        self._random.step = -1 if forward_only else self._step
        stages = ProgramStages(
            programs=programs,
            microbatches=[
                self._shape.microbatch(batch, number, self.device, names) for number in range(count)
            ],
            random=self._random,
            held=self._held_for_meter,
            device=self.device,
            meter=self._meter,
            stores=self._stores,
            scale=1.0 if forward_only else self._update.scale,
            forward_only=forward_only,
        )
        before = self._random.generator.get_state()
        try:
            with torch.set_grad_enabled(not forward_only):
                self._wiring.executor.run(
                    stages,
                    self._orders.policy(count, forward_only=forward_only),
                    self._orders.state(count, forward_only=forward_only),
                )
        finally:
            stages.finish()
            self._random.generator.set_state(before)
        return stages.losses

    def _find_stages(
        self,
        forward: Forward,
        sample: Mapping[str, torch.Tensor],
        groups: Sequence[Sequence[str]],
        partition: str | Sequence[int] | None,
        weights: Sequence[float] | None,
        slicing: str,
    ) -> None:
        """Cut the model, keep this rank's part of it and prepare to run that."""
        placement, mesh = self._orders.placement, self._mesh
        first = self._shape.microbatch(sample, 0, forward.device)
        forwards = Forwards.of(forward, first, slicing)
        tape = forwards.training
        self.cut_points = tuple(tape.cuts)
        check_stages(tape.num_segments, placement.num_stages)
        check_shared(tape, groups)
        # Times differ from rank to rank: one tells all.
        answer = None
        if mesh.environment.rank == 0:
            answer = self._measure(forward, forwards, sample, needs=not (partition or weights))
        answer = mesh.from_first(answer)
        if isinstance(answer, AdaptiveError):
            raise answer
        if partition is not None:
            self.partition = given_partition(partition, tape.num_segments, placement.num_stages)
        else:
            self.partition = balanced(
                _checked(weights, tape.num_segments) or answer, placement.num_stages
            )
        self.weights = tuple(weights or answer or ())
        plans = slice_tape(tape, self.partition)
        eval_plans = slice_tape(forwards.evaluation, self.partition)
        self._hold(forward, forwards, plans, eval_plans)

    def _measure(
        self, forward: Forward, forwards: Forwards, sample: Mapping[str, torch.Tensor], needs: bool
    ) -> Any:
        """On one rank: check the replay, and time the segments if that is needed."""
        size = self._shape.micro_batch_size
        try:
            if len(next(iter(sample.values()))) >= 2 * size:
                check_replay(forward, forwards, self._shape.microbatch(sample, 1, forward.device))
            if needs:
                first = self._shape.microbatch(sample, 0, forward.device)
                return segment_seconds(forward, forwards.training, first)
        except AdaptiveError as error:
            return error
        return None

    def _hold(
        self,
        forward: Forward,
        forwards: Forwards,
        plans: Sequence[StagePlan],
        eval_plans: Sequence[StagePlan],
    ) -> None:
        placement, mesh = self._orders.placement, self._mesh
        stages = [placement.stage_of(mesh.pp_rank, c) for c in range(placement.num_chunks)]
        uses: dict[str, set[int]] = {}
        for stage, both in enumerate(zip(plans, eval_plans, strict=True)):
            for plan in both:
                for name in plan.parameters:
                    uses.setdefault(name, set()).add(placement.locate(stage)[0])
        mine = {n for s in stages for p in (plans[s], eval_plans[s]) for n in p.buffers}
        mine |= {name for name, ranks in uses.items() if mesh.pp_rank in ranks}
        if 0 in stages:  # somebody must keep them for a checkpoint
            mine.update(unused_parameters(self.model, (forwards.training, forwards.evaluation)))
        order = [name for name, _ in self.model.named_parameters()]
        held = keep_only(self.model, mine, self.device)
        self._held_for_meter = Held(held)

        def programs(tape: Any, of: Sequence[StagePlan]) -> list[StageProgram]:
            return [
                StageProgram(
                    tape, of[stage], held, self.device,
                    is_last=stage == placement.num_stages - 1, autocast=forward.autocast,
                )
                for stage in stages
            ]  # fmt: skip

        self._programs = programs(forwards.training, plans)
        self._eval_programs = programs(forwards.evaluation, eval_plans)
        self._largest_message = max(
            layout.nbytes
            for tape, of in ((forwards.training, plans), (forwards.evaluation, eval_plans))
            for layout in _layouts(tape, of)
        )
        shared = shared_weights(uses, order)
        self._update = Update(
            mesh=mesh,
            parameters={n: held[n] for n in order if n in held and n in uses},  # type: ignore[misc]
            shared=shared,
            groups=mesh.groups_of(dict.fromkeys(one.positions for one in shared)),
        )

    def _connect(self, transport: TransportConfig, timeout_s: float) -> Any:
        placement = self._orders.placement
        if transport.transport_slot_bytes is None:
            size = max(_LEAST_SLOT_BYTES, self._largest_message)
            transport = dataclasses.replace(transport, transport_slot_bytes=size)
        return build_executor(
            placement=placement,
            accelerator=self._mesh.accelerator,
            places=self._mesh.places,
            payload_shape=None,
            payload_dtype=torch.float32,
            timeout_s=timeout_s,
            recorder=self._tracing.recorder,
            transport=transport,
            in_flight=inputs_in_flight(
                placement,
                4 * placement.num_ranks,
                cap=self._orders.cap,
                keeps_all=self._orders.schedule in KEEPING_ALL,
            ),
        )

    def _start_trace(self, trace_dir: str | None, samples: int) -> Tracing:
        """Open this rank's trace. Collective over all ranks."""
        if trace_dir is None:
            return Tracing()
        mesh, placement = self._mesh, self._orders.placement
        if mesh.environment.local_rank == 0:
            set_aside(trace_dir)
        dist.barrier(group=mesh.control_group)
        run = mesh.from_first(f"{mesh.environment.run_id}-{os.getpid()}")
        work = self.weights and tuple(self._stage_sums(self.weights))
        header = TraceHeader.create(
            run=run,
            rank=mesh.environment.rank,
            world_size=dist.get_world_size(),
            pp_rank=mesh.pp_rank,
            dp_rank=mesh.dp_rank,
            num_ranks=placement.num_ranks,
            num_chunks=placement.num_chunks,
            num_microbatches=max(1, samples // self._shape.micro_batch_size),
            schedule=self._orders.schedule,
            placement=placement.kind,
            layers=self.partition,
            work=work,
        )
        recorder = Recorder(trace_dir, header)
        sync = start_clock_sync(
            rank=mesh.environment.rank,
            clock_id=header.clock,
            address=mesh.environment.master_addr,
            gather=mesh.gather,
            deliver=recorder.add_clock_samples,
        )
        return Tracing(recorder, mesh.accelerator.clock(), sync)

    def _stage_sums(self, weights: Sequence[float]) -> Iterator[float]:
        start = 0
        for segments in self.partition:
            yield sum(weights[start : start + segments])
            start += segments


def _checked(weights: Sequence[float] | None, num_segments: int) -> Sequence[float] | None:
    if weights is not None and len(weights) != num_segments:
        raise ConfigError(
            f"{len(weights)} weights were given for {num_segments} segments: give one for each "
            "piece between cut points"
        )
    return weights


def _layouts(tape: Tape, plans: Sequence[StagePlan]) -> Iterator[Layout]:
    for plan in plans:
        values = [tape.values[number] for number in plan.sent]
        yield Layout.of(values)
