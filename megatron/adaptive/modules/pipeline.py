"""The pipeline of a model with cut points: what a user's training loop calls."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.adaptive import accelerator as _accelerator

# Before the modules below import megatron-core.
_accelerator.install()
with _accelerator.quiet_imports():
    from megatron.adaptive.config.flags import check_values, fields_of
    from megatron.adaptive.config.parallel import TransportConfig
    from megatron.adaptive.config.schedule import ScheduleConfig
    from megatron.adaptive.engine.executor import ActivationMeter, RankTimes
    from megatron.adaptive.engine.executor_setup import build_executor, open_trace
    from megatron.adaptive.engine.hang_guard import HangGuard
    from megatron.adaptive.engine.process_context import naming_lost_peers
    from megatron.adaptive.engine.weight_gradient import WeightGradientStore
    from megatron.adaptive.errors import AdaptiveError, ConfigError
    from megatron.adaptive.modules.assembly import PipelineSettings, assemble
    from megatron.adaptive.modules.batch import BatchShape, samples_in, stretched
    from megatron.adaptive.modules.cutting import check_groups
    from megatron.adaptive.modules.program import ProgramStages, RandomKey
    from megatron.adaptive.modules.sizes import choose_orders, place
    from megatron.adaptive.modules.step_loop import NO_LOOP, Loop
    from megatron.adaptive.modules.update import LossScale


_LEAST_SLOT_BYTES = 4096


class Pipeline:
    """Trains a module whose stages lie on several processes.

    Collective over all processes of the job, as :meth:`step`, :meth:`eval` and :meth:`close` are.
    All of them build the same model with the same weights; afterwards each holds the parameters of
    its own stages, and those of others are on the ``meta`` device.

    Args:
        model: with :class:`CutPoint` modules in its forward.
        sample_batch: a batch, a dictionary of tensors whose first axis is that of the samples.
        **more: the other attributes of :class:`~megatron.adaptive.modules.recording.SampledModel`
            and :class:`~megatron.adaptive.modules.assembly.PipelineSettings`.

    Attributes:
        model: as given.
        plan: what the planner chose and why, ``None`` where it was not asked here.
        device: of this process.
        pipeline_size: processes of a pipeline.
        replicas: pipelines.
        replica: pipeline that this process belongs to, from 0 on.
        micro_batch_size: samples of a microbatch.
        partition: segments of each stage.
        weights: what each segment costs; empty where nobody asked.
        cut_points: names of all cut points in the order of the forward.
        steps: training steps so far, those before a checkpoint that was loaded included.
        loss: of the last step.
        grad_norm: norm of the whole model's gradient in the last step, before clipping.
        times: of this process in the last step.

    Raises:
        ConfigError: a setting, the batch or the model breaks a rule; named.
        ScheduleError: the schedule is unknown or does not fit.
    """

    @naming_lost_peers()
    def __init__(
        self, model: torch.nn.Module, sample_batch: Mapping[str, torch.Tensor], **more: Any
    ) -> None:
        request = PipelineSettings(model, sample_batch, **more)
        check_values(
            {name: getattr(request, name) for name in ("hang_after_s", "on_hang")},
            {spec.dest: spec for spec in fields_of(ScheduleConfig)},
        )
        samples = samples_in(sample_batch, "sample_batch")
        if request.micro_batch_size is not None:
            BatchShape(sample_batch, request.micro_batch_size)
        check_groups(model, request.shared_weights)
        self.model = model
        self.grad_norm = self.loss = 0.0
        self.times: RankTimes | None = None
        self._loop: Loop | None = None
        self._is_closed = False
        self.steps = 0
        self._mesh, request, self.plan, self._order_of_job = place(request)
        assert request.micro_batch_size is not None
        self._batch_size, self.micro_batch_size = request.samples, request.micro_batch_size
        self.device = self._mesh.accelerator.device
        self.pipeline_size = self._mesh.pipeline_size
        self.replicas, self.replica = self._mesh.dp_size, self._mesh.dp_rank
        sample = stretched(sample_batch, self.micro_batch_size)
        self._shape = BatchShape(sample, self.micro_batch_size)
        try:
            self._orders = orders = choose_orders(
                request, self._mesh.pipeline_size, self._mesh.pp_rank
            )
            made = assemble(request, self._shape, self._mesh, orders.placement)
        except AdaptiveError:
            self._mesh.close()
            raise
        self._made, self._update = made, made.update
        self.cut_points, self.partition = made.cut_points, made.partition
        self.weights, costs = made.weights, iter(made.weights)
        trace_dir = request.trace_dir
        if self._order_of_job is not None and trace_dir is not None:
            trace_dir = f"{trace_dir}/epoch-{self._order_of_job.epoch}"
        self._trace_dir = trace_dir
        self._tracing = open_trace(
            trace_dir,
            self._mesh,
            orders.placement,
            schedule=request.schedule,
            num_microbatches=max(1, samples // self.micro_batch_size),
            layers=self.partition,
            work=[sum(itertools.islice(costs, size)) for size in self.partition if self.weights],
        )
        transport = request.transport or TransportConfig()
        if transport.transport_slot_bytes is None:
            size = max(_LEAST_SLOT_BYTES, made.largest_message)
            transport = dataclasses.replace(transport, transport_slot_bytes=size)
        self._wiring = build_executor(
            placement=orders.placement,
            accelerator=self._mesh.accelerator,
            places=self._mesh.places,
            payload_shape=None,
            payload_dtype=torch.float32,
            timeout_s=request.timeout_s,
            tracing=self._tracing,
            transport=transport,
            in_flight=orders.inputs_in_flight(4 * orders.placement.num_ranks),
        )
        self._random = RandomKey(request.seed, self._mesh.dp_rank, self.device)
        self._meter = ActivationMeter()
        self._stores: list[WeightGradientStore] | None = None
        if orders.weight_pieces:
            self._stores = [WeightGradientStore() for _ in made.programs]
        if request.mixed_precision == "fp16":
            self._update.scaler = LossScale()
        self._guard = HangGuard(
            self._mesh, after_s=request.hang_after_s, on_hang=request.on_hang, page_folder=trace_dir
        )
        tracing, executor = self._tracing, self._wiring.executor
        # Called from the guard's thread.
        self._guard.snapshot = lambda: {**tracing.now(), **executor.evidence(), "may_pause": True}
        self._mesh.settle()

    def share(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this replica's part of a batch of all of them, for :meth:`step`.

        Raises:
            ConfigError: the samples do not divide.
        """
        count = samples_in(batch, "batch")
        if count % self.replicas:
            raise ConfigError(
                f"a batch of {count} samples does not divide among {self.replicas} replicas: give "
                f"a multiple of {self.replicas * self.micro_batch_size}"
            )
        part = count // self.replicas
        return {name: one.narrow(0, self.replica * part, part) for name, one in batch.items()}

    @property
    def loss_scale(self) -> float:
        """Factor of the loss before the backward; 1 except in fp16."""
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

    @naming_lost_peers()
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
        if self._loop is not None:
            self._loop.require(count * self.micro_batch_size)
        elif self._order_of_job is not None:
            raise ConfigError(NO_LOOP)
        self.steps += 1
        self._tracing.begin_iteration(self.steps, count, is_traced=True)
        for parameter in self._update.parameters.values():
            parameter.grad = None
        losses = self._run(batch, count, step=self.steps, scale=self._update.scale)
        with self._tracing.span("reduce"):
            self._update.reduce()
            self.loss, self.grad_norm = self._update.totals(losses, count)
        with self._tracing.span("optimizer"):
            if self._loop is not None:
                self._loop.before_update()
            overflow = self._update.apply(self.grad_norm)
        self._mesh.accelerator.synchronize()
        self.times = self._wiring.executor.finish_step()
        self._tracing.end_iteration()
        return self.loss, overflow

    @naming_lost_peers()
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
            losses = self._run(batch, count, step=-1, scale=None)
            self._wiring.executor.finish_step()
            loss, _ = self._update.totals(losses, count, with_norm=False)
        return loss

    def _run(
        self, batch: Mapping[str, torch.Tensor], count: int, *, step: int, scale: float | None
    ) -> list[torch.Tensor]:
        """Run a batch; returns the losses of its microbatches, of the last stage alone.

        Args:
            batch: of this replica.
            count: microbatches in it.
            step: that random numbers follow from.
            scale: what the loss is multiplied with, ``None`` for forwards in evaluation alone.
        """
        forward_only, executor = scale is None, self._wiring.executor
        programs = self._made.eval_programs if forward_only else self._made.programs
        names = {name for program in programs for name in program.plan.inputs}
        self._random.step, self._random.count = step, count
        stages = ProgramStages(
            programs=programs,
            microbatches=[
                self._shape.microbatch(batch, number, self.device, names) for number in range(count)
            ],
            random=self._random,
            held=self._made.held,
            device=self.device,
            meter=self._meter,
            stores=self._stores,
            scale=1.0 if scale is None else scale,
            forward_only=forward_only,
        )
        before = self._random.generator.get_state()
        try:
            with torch.set_grad_enabled(not forward_only):
                executor.run(
                    stages,
                    self._orders.policy(count, forward_only=forward_only),
                    self._orders.state(count, forward_only=forward_only),
                )
        finally:
            stages.finish()
            self._random.generator.set_state(before)
        return stages.losses

    @naming_lost_peers()
    def save(
        self,
        folder: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        keep: int | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> Path:
        """Save parameters, buffers, optimizer, loss scale, step and seed. Collective.

        Pipelines of the same model with other sizes, partitions and numbers of replicas can load
        it. It appears under its name when it is complete.

        Args:
            folder: of checkpoints, seen by all nodes; this one becomes ``step_XXXXXXXX`` there.
            extra: plain values to keep with it, such as the state of a learning-rate scheduler.
            keep: complete checkpoints that stay, the newest; all where ``None``.
            state: objects with ``state_dict`` and ``load_state_dict`` to keep with it, by name, the
                same on all processes: those of the first are kept.

        Returns:
            Where it is.

        Raises:
            CheckpointError: the folder cannot be written, or is not shared.
            ConfigError: ``extra``, ``keep`` or ``state`` is wrong.
        """
        path: Path = self._checkpointer.save(
            folder, self._head(extra), keep=keep, state=state or {}
        )
        return path

    def _head(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns what a checkpoint of now says besides what it holds."""
        return dict(self._checkpointer.head(self.steps, self._random.seed, extra))

    @naming_lost_peers()
    def load(
        self,
        folder: str | Path,
        *,
        step: int | None = None,
        optimizer: bool = True,
        state: Mapping[str, Any] | None = None,
        trust_checkpoint: bool = False,
    ) -> dict[str, Any]:
        """Go on from a checkpoint of :meth:`save`. Collective; after :meth:`set_optimizer`.

        Args:
            folder: as given to ``save``.
            step: which one; the newest that is whole where ``None``.
            optimizer: load its state as well.
            state: objects that were saved with it, by name; each gets its state.
            trust_checkpoint: load one of a former version as well, which has pickles.

        Returns:
            The ``extra`` that was saved.

        Raises:
            CheckpointError: there is none, it is damaged, not trusted, or of another model or
                optimizer.
            ConfigError: it has the state of an optimizer, and none is set.
        """
        found = self._checkpointer.load(
            folder, step=step, optimizer=optimizer, state=state, trust=trust_checkpoint
        )
        self.steps, self._random.seed = found["step"], found["seed"]
        extra: dict[str, Any] = found["extra"]
        return extra

    @naming_lost_peers()
    def loop(self, total_steps: int, **more: Any) -> Loop:
        """Go on from the newest checkpoint, and return the steps that are left, from 0 on.

        Collective; call it after :meth:`set_optimizer`. Call :meth:`step` once in each turn of the
        loop. If any process gets SIGTERM, SIGINT, SIGUSR1 or SIGHUP, all save after the same step
        and the program ends with status 0. See ``docs/elastic.md``.

        Args:
            total_steps: of the whole training, those before a checkpoint included.
            **more: the other arguments of :class:`~megatron.adaptive.modules.step_loop.Loop`.

        Raises:
            CheckpointError: the newest checkpoint cannot be loaded, or is of another batch size.
            ConfigError: a setting is wrong, or there is a loop already.
        """
        if self._loop is not None:
            raise ConfigError("Pipeline.loop was called already: one loop has all steps")
        self._loop = Loop(self, total_steps, **more)
        return self._loop

    @functools.cached_property
    def _checkpointer(self) -> Any:
        # It imports much that most runs do without.
        from megatron.adaptive.modules.checkpointer import Checkpointer

        return Checkpointer(self._mesh, self.model, self._made.held, self._update)

    @naming_lost_peers()
    def close(self) -> None:
        """End the pipeline: channels, traces and the process groups that it made. Collective.

        Idempotent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._loop is not None:
            self._loop.close()
        self._guard.close()
        self._wiring.close()
        self._tracing.close()
        self._mesh.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:  # else others may not come to it
            self.close()


# What ``help()`` and notebooks show: the settings by name, with their defaults.
Pipeline.__signature__ = inspect.signature(PipelineSettings)  # type: ignore[attr-defined]
Pipeline.loop.__signature__ = inspect.signature(Loop)  # type: ignore[attr-defined]
