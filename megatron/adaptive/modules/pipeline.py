"""Defines ``Pipeline``, which trains a model with cut points in the user's own training loop."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from megatron.adaptive import accelerator as _accelerator

# Call install() before the modules below import megatron-core, so that it can run without CUDA.
_accelerator.install()
with _accelerator.quiet_imports():
    from megatron.adaptive.config.parallel import TransportConfig
    from megatron.adaptive.engine.executor import RankTimes
    from megatron.adaptive.engine.executor_setup import Wiring, build_executor
    from megatron.adaptive.engine.hang_guard import HangGuard
    from megatron.adaptive.engine.process_context import naming_lost_peers
    from megatron.adaptive.engine.weight_gradient import WeightGradientStore
    from megatron.adaptive.errors import ConfigError
    from megatron.adaptive.modules.assembly import (
        Initialize,
        PipelineOptions,
        PipelineSettings,
        assemble,
    )
    from megatron.adaptive.modules.batch import Batch, Microbatch
    from megatron.adaptive.modules.content import Dealing, MicrobatchOrder
    from megatron.adaptive.modules.first_partition import FirstPartition
    from megatron.adaptive.modules.pipeline_trace import PipelineTrace
    from megatron.adaptive.modules.program import ProgramStages, StageProgram
    from megatron.adaptive.modules.random_key import RandomKey
    from megatron.adaptive.modules.recompute import Recompute
    from megatron.adaptive.modules.recording import Loss, Slicing, with_cut_points
    from megatron.adaptive.modules.repartition import (
        SegmentBalancer,
        check_repartition,
        make_balancer,
    )
    from megatron.adaptive.modules.request_checks import check_model_and_sample, check_settings
    from megatron.adaptive.modules.segments import MakeOptimizer
    from megatron.adaptive.modules.sizes import choose_orders, settle_sizes
    from megatron.adaptive.modules.step_loop import NO_LOOP, Loop
    from megatron.adaptive.modules.step_work import BatchForm, StepMaker, StepWork
    from megatron.adaptive.modules.update import LossScale

if TYPE_CHECKING:
    from typing_extensions import Unpack

_LEAST_SLOT_BYTES = 4096


def _inputs(
    microbatch: Microbatch, programs: Sequence[StageProgram], device: torch.device
) -> dict[str, torch.Tensor]:
    """Returns those entries of ``microbatch`` that ``programs`` use, moved to ``device``."""
    names = {name for program in programs for name in program.plan.inputs}
    return {name: _accelerator.to_device(microbatch[name], device) for name in names}


class Pipeline:
    """Trains a model whose stages are divided among several processes.

    All processes of the job must call the constructor, :meth:`step`, :meth:`eval` and
    :meth:`close`. All processes must build the same model. If their initial values differ, all use
    those of the first process. The constructor keeps only the parameters of this process's stages
    and moves all other parameters to the ``meta`` device. If the model is already on the ``meta``
    device, only the parameters of this process's stages are allocated, and ``initialize`` sets
    their values.

    Args:
        model: Model to train. If it contains no :class:`CutPoint`, cut points are added between its
            repeated blocks. The model receives the entries of the batch as keyword arguments. If
            ``loss`` is set, it receives only the entries that its ``forward`` accepts.
        sample_batch: Batch with the same entries as later batches: a dictionary of tensors whose
            first dimension indexes the samples, or a list of microbatches. For a dictionary, the
            forward pass is recorded with the first microbatch and checked with the second. In a
            list, each microbatch is a dictionary of tensors of any shape; together, they must use
            all parameters.
        loss: Function ``(output, batch) -> scalar``; ``None`` if the model returns the loss, a
            mapping with an entry ``loss``, or a sequence that starts with the loss.
        arguments: Additional keyword arguments for the model's ``forward``, the same for every
            microbatch.
        mixed_precision: ``bf16`` or ``fp16`` for autocast; parameters keep their dtypes. fp16 uses
            a dynamic loss scale. ``None`` disables autocast.
        decisive_entries: Names of batch entries whose values the model's Python code may read.
            Microbatches with different values are recorded separately.
        shared_weights: Groups of parameter names. All names in a group must refer to the same
            parameter. Parameters used on both sides of a cut are detected without this setting.
        slicing: Method of recording the forward pass: ``record`` records the model's torch calls,
            ``export`` uses ``torch.export``, ``auto`` uses ``torch.export`` only if necessary. See
            ``docs/reference/cutpoint.md``.
        recompute: Calls that the backward pass recomputes, instead of keeping their results in
            memory: ``all`` calls, only attention (``selective``), or the calls of segments with the
            given indices. ``None`` disables recomputation.
        max_recordings: Maximum number of recordings of the model's forward pass to keep. Each new
            combination of tensor shapes and values of ``decisive_entries`` in a microbatch needs a
            new recording.
        order: Order in which a replica runs the microbatches of a list. ``given`` keeps the list's
            order, and is required if the forward pass changes buffers in training. ``work`` and
            ``time`` run cheap microbatches first and last. ``work`` measures the cost of a
            microbatch by its recording's operation count, and gives the same order in every run.
            ``time`` uses the predicted time.
        dealing: Method by which ``share`` distributes a list of microbatches over replicas.
            ``turns`` assigns microbatches round-robin. ``work`` balances operation counts across
            replicas, and ``time`` balances predicted times.
        compare_batches: Whether to check in some steps that all processes of a replica pass the
            same batch; use ``False`` if batches differ on purpose.
        repartition: Whether to move segments and their optimizer state between processes if
            measured times predict a gain: ``auto`` or ``off``.
        repartition_interval: Number of steps between checks for a better partition; at least 4.
        repartition_gain: Minimum predicted gain for moving segments, as a fraction of the step
            time.
        micro_batch_size: Number of samples per microbatch; ``None`` lets the planner choose.
            Must be ``None`` or 1 if the sample batch is a list of microbatches.
        pipeline_size: Number of processes per pipeline. Additional processes run replicas of the
            pipeline. ``auto`` lets the planner choose. ``None`` uses all processes, or lets the
            planner choose if ``micro_batch_size`` is also ``None``.
        batch_size: Number of samples per step over all replicas; ``None`` uses the size of the
            sample batch.
        memory_limit_bytes: Memory in bytes per process that planned layouts may use; ``None``
            allows 90% of the device's free memory.
        schedule: Name of the schedule, as listed in ``docs/schedules.md``.
        chunks: Number of stages per process; ``None`` uses the schedule's default.
        activation_cap: Maximum number of microbatches whose activations a process keeps. One
            microbatch in all stages of the process counts as 1. ``None`` uses a default that
            depends on the numbers of stages and microbatches.
        split_backward: Whether to compute weight gradients in separate actions, not in the backward
            pass. ``None`` uses the schedule's default, or ``False`` if ``recompute`` is ``"all"``,
            because separate weight gradients would need the memory that recomputation saves.
        partition: Number of segments (parts between cut points) in each stage, such as ``"3-4-5"``
            or a sequence of numbers; ``None`` balances the costs of the stages.
        weights: Cost of each segment, in any unit; ``None`` measures the costs with the sample
            batch.
        seed: Seed of the random numbers that the model draws, for example in dropout.
        transport: Settings of the connections between processes; ``None`` uses the defaults.
        trace_dir: Folder to which traces are written; ``None`` disables tracing.
        trace_detail: Events in a trace: ``actions`` for actions only, ``layers`` to add the forward
            and backward passes of each segment, ``collectives`` to also add each collective,
            ``kernels`` to also add operators (CPU) or kernels (GPU) of selected steps and ranks.
        trace_interval: Number of steps from one traced step to the next; 1 traces every step.
        trace_iterations: Number of traced steps after which tracing stops; ``None`` for no limit.
        trace_otlp: URL of an OpenTelemetry collector that also receives the spans while the job
            runs (OTLP over HTTP), or ``None``. Requires ``trace_dir``.
        profile_ranks: Ranks of the processes that record kernels.
        profile_step_start: First step in which kernels are recorded, counted from 1.
        profile_step_end: First step after the recorded ones, in which kernels are not recorded.
        timeout_s: Maximum time in seconds to wait for another process.
        hang_after_s: Number of seconds without progress after which the process that blocks all
            others is reported. 0 disables the report. ``None`` uses 10 times the median step time,
            but at least 30 s. The time between two steps does not count.
        on_hang: Reaction to a hang: ``report`` writes a report page and prints a line, ``end`` also
            stops the job.
        initialize: Function that fills this process's parameters and buffers in place. Its argument
            maps their names to tensors. Required if the model is on the ``meta`` device.

    Attributes:
        model: The user's model, as passed to the constructor.
        plan: Layout that the planner chose, and alternatives; ``None`` if the planner was not used.
        device: Device on which this process computes.
        pipeline_size: Number of processes per pipeline.
        replicas: Number of replicas of the pipeline. Each replica trains on a part of the batch.
        replica: Index of this process's replica, starting at 0.
        micro_batch_size: Number of samples per microbatch.
        partition: Number of segments in each stage. It changes when segments move.
        weights: Relative cost of each segment; empty if the partition was chosen without costs.
        cut_points: Names of all cut points in the order in which the forward pass reaches them.
        shared_weights: All names of each parameter that several processes use.
        steps: Number of completed training steps, including those before a loaded checkpoint.
        loss: Mean loss of the last step over all microbatches and replicas.
        grad_norm: Norm of the whole model's gradient in the last step, before clipping.
        last_order: Index of each microbatch of the last step in its batch, in execution order.
        times: Times of this process in the last step, such as compute and wait times.

    Raises:
        ConfigError: If a setting, the sample batch or the model is invalid. The message names the
            cause.
        ScheduleError: If the schedule is unknown or does not fit the pipeline.
    """

    @naming_lost_peers()
    def __init__(
        self,
        model: torch.nn.Module,
        sample_batch: Batch,
        *,
        loss: Loss | None = None,
        arguments: Mapping[str, Any] | None = None,
        mixed_precision: Literal["bf16", "fp16"] | None = None,
        decisive_entries: Sequence[str] = (),
        shared_weights: Sequence[Sequence[str]] = (),
        slicing: Slicing = "auto",
        recompute: Recompute = None,
        max_recordings: int = 64,
        order: MicrobatchOrder = "given",
        dealing: Dealing = "turns",
        compare_batches: bool = True,
        repartition: Literal["off", "auto"] = "off",
        repartition_interval: int = 50,
        repartition_gain: float = 0.05,
        micro_batch_size: int | None = None,
        pipeline_size: int | Literal["auto"] | None = None,
        batch_size: int | None = None,
        memory_limit_bytes: float | None = None,
        schedule: str = "adaptive",
        chunks: int | None = None,
        activation_cap: float | None = None,
        split_backward: bool | None = None,
        partition: str | Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
        seed: int = 1234,
        transport: TransportConfig | None = None,
        trace_dir: str | None = None,
        trace_detail: Literal["actions", "layers", "collectives", "kernels"] = "actions",
        trace_interval: int = 1,
        trace_iterations: int | None = None,
        trace_otlp: str | None = None,
        profile_ranks: Sequence[int] = (0,),
        profile_step_start: int = 10,
        profile_step_end: int = 12,
        timeout_s: float = 600.0,
        hang_after_s: float | None = None,
        on_hang: Literal["report", "end"] = "report",
        initialize: Initialize | None = None,
    ) -> None:
        arguments_by_name = locals()
        names = [spec.name for spec in dataclasses.fields(PipelineSettings)]
        self._begin(PipelineSettings(**{name: arguments_by_name[name] for name in names}))

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        sample_batch: Batch,
        *,
        adapter: Any = None,
        dtype: torch.dtype | Literal["auto"] | None = None,
        trust_remote_code: bool = False,
        **settings: Unpack[PipelineOptions],
    ) -> Pipeline:
        """Creates a pipeline for a model that was saved with ``transformers``.

        All processes must call this. Each process reads only the tensors of its stages. Nothing is
        downloaded.

        Args:
            folder: Folder with ``config.json`` and ``safetensors`` files.
            sample_batch: Batch with the same entries as later batches, as for :class:`Pipeline`.
            adapter: ``LoraConfig`` of PEFT to train only adapters; ``None`` to train all
                parameters.
            dtype: Dtype of the parameters; ``auto`` and ``None`` use the dtype in ``config.json``.
            trust_remote_code: Whether Python code in the folder may be run.
            settings: Additional keyword arguments of :class:`Pipeline`.

        Raises:
            CheckpointError: If a file is missing or damaged, or does not fit ``config.json``.
            ConfigError: If the model cannot be built, or an argument is invalid.
        """
        # Import this only when needed, because transformers and PEFT are optional.
        from megatron.adaptive.modules.pretrained import open_pretrained

        source = open_pretrained(
            Path(folder), adapter=adapter, dtype=dtype, trust_remote_code=trust_remote_code
        )
        pipeline = cls(source.model, sample_batch, **source.settings(settings))
        pipeline._source_folder = Path(folder)
        return pipeline

    @naming_lost_peers()
    def save_pretrained(self, folder: str | Path, *, shard_bytes: int = 5_000_000_000) -> Path:
        """Writes the model as a folder that ``transformers`` can load.

        All processes must call this. Each process writes the tensors of its stages. If PEFT has
        added adapters to the model, only the adapters are written, in PEFT's format. The folder
        is renamed to its final name when it is complete.

        Args:
            folder: New or empty folder to write, accessible on all nodes.
            shard_bytes: Maximum size of a file in bytes. A larger tensor gets its own file.

        Returns:
            Path of the folder.

        Raises:
            CheckpointError: If the folder cannot be written.
            ConfigError: If the model is not a ``transformers`` model, or the folder is not empty.
        """
        # Import this only when needed, because transformers is optional.
        from megatron.adaptive.modules.pretrained_saving import save_pretrained

        path = Path(folder)
        with self._tracing.host_span("checkpoint"):
            save_pretrained(
                path,
                self.model,
                self._assembly.held,
                self._mesh,
                source=self._source_folder,
                shard_bytes=shard_bytes,
            )
        return path

    def _begin(self, request: PipelineSettings) -> None:
        """Creates this process's part of the pipeline from the settings ``request``.

        All processes must call this.
        """
        check_settings(request)
        request, samples = check_model_and_sample(request)
        request = with_cut_points(request)
        self.model = request.model
        self._source_folder: Path | None = None
        self.grad_norm = self.loss = 0.0
        self.last_order: tuple[int, ...] = ()
        self.times: RankTimes | None = None
        self._loop: Loop | None = None
        self._is_closed = False
        self.steps = 0
        sizes = settle_sizes(request)
        request = sizes.request
        assert request.micro_batch_size is not None
        self._mesh = sizes.mesh
        self.plan = sizes.plan
        self._order_of_job = sizes.order
        self._batch_size = request.samples
        self.micro_batch_size = request.micro_batch_size
        self.device = self._mesh.accelerator.device
        self.pipeline_size = self._mesh.pipeline_size
        self.replicas = self._mesh.dp_size
        self.replica = self._mesh.dp_rank
        form = BatchForm(request.sample_batch, self.micro_batch_size)
        try:
            check_repartition(request, is_elastic=sizes.order is not None)
            self._orders = choose_orders(request, self._mesh.pipeline_size, self._mesh.pp_rank)
            self._assembly = assemble(
                request, form.examples, self._mesh, FirstPartition(self._orders), sizes.recordings
            )
        except Exception:
            self._mesh.close_after_error()
            raise
        self._update = self._assembly.update
        self._maker = StepMaker(request, form, self._assembly, self._mesh, self._orders.placement)
        self.cut_points = self._assembly.cut_points
        self.shared_weights = self._assembly.shared_weights
        self.partition = self._assembly.partition
        self.weights = self._assembly.weights
        self._trace = PipelineTrace(request, samples, sizes, self._assembly, self._orders.placement)
        self._tracing = self._trace.tracing
        self._wiring = self._make_wiring(request)
        self._random = RandomKey(request.seed, self.device)
        self._stores: list[WeightGradientStore] | None = None
        if self._orders.weight_pieces:
            self._stores = [WeightGradientStore() for _ in range(self._orders.placement.num_chunks)]
        if request.mixed_precision == "fp16":
            self._update.scaler = LossScale()
        self._guard = self._make_guard(request)
        self._repartitioner = make_balancer(
            request, self._assembly, self._mesh, self._orders, self._maker.balance
        )
        self._mesh.settle()

    def _make_wiring(self, request: PipelineSettings) -> Wiring:
        """Creates the executor, which runs this rank's stages, and its channels to other ranks.

        ``request`` contains the settings of the pipeline. Unless they set another size, the buffers
        of the channels have the size of the largest message.
        """
        transport = request.transport or TransportConfig()
        if transport.transport_slot_bytes is None:
            size = max(_LEAST_SLOT_BYTES, self._assembly.largest_message)
            transport = dataclasses.replace(transport, transport_slot_bytes=size)
        placement = self._orders.placement
        return build_executor(
            placement=placement,
            accelerator=self._mesh.accelerator,
            places=self._mesh.places,
            payload_shape=None,
            payload_dtype=torch.float32,
            timeout_s=request.timeout_s,
            tracing=self._tracing,
            transport=transport,
            in_flight=self._orders.inputs_in_flight(4 * placement.num_ranks),
        )

    def _make_guard(self, request: PipelineSettings) -> HangGuard:
        """Creates the hang detector, which watches the trace and the executor.

        ``request`` contains the settings of the pipeline.
        """
        guard = HangGuard(
            self._mesh,
            after_s=request.hang_after_s,
            on_hang=request.on_hang,
            page_folder=self._trace.folder,
        )
        tracing = self._tracing
        executor = self._wiring.executor
        guard.snapshot = lambda: {**tracing.now(), **executor.evidence(), "may_pause": True}
        return guard

    def share(self, batch: Any) -> Any:
        """Returns this replica's part of a whole batch, to be passed to :meth:`step`.

        A dictionary is divided into equal contiguous parts. The microbatches of a list are
        distributed round-robin, or by predicted cost if ``dealing`` is ``work`` or ``time``. In the
        latter case, all processes must pass the same whole list, and must pass the result to
        :meth:`step` unchanged. The result has an attribute ``numbers`` with the indices of its
        microbatches in the whole list.

        Raises:
            ConfigError: If the samples cannot be divided equally among the replicas, or a list has
                fewer microbatches than there are replicas.
        """
        return self._maker.share(batch)

    @property
    def costs(self) -> list[dict[str, float]]:
        """Returns each stage's fitted cost in seconds per unit of data, keyed by the unit.

        A unit is an element of a batch entry, a pair of elements in a sequence, or a microbatch.
        Costs are fitted only if ``order`` or ``dealing`` is ``time``. The list is empty before the
        first fit.
        """
        return self._maker.balance.seconds

    @property
    def segment_seconds(self) -> tuple[float, ...]:
        """Returns the time of each segment in seconds, averaged over recent microbatches.

        To balance the stages for these microbatches, pass the result as ``weights`` at the next
        start. Like ``costs``, the result is empty before the first fit.
        """
        return self._maker.balance.segment_seconds

    @property
    def loss_scale(self) -> float:
        """Returns the loss scale of the backward pass, which is 1 except with fp16."""
        return self._update.scale

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yields pairs of name and parameter for the parameters of this process's stages."""
        yield from self._update.parameters.items()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yields the parameters of this process's stages."""
        yield from self._update.parameters.values()

    def set_optimizer(
        self,
        optimizer: torch.optim.Optimizer | MakeOptimizer | None,
        *,
        clip_norm: float | None = None,
        initial_loss_scale: float = 65536.0,
        loss_scale_interval: int = 2000,
    ) -> torch.optim.Optimizer | None:
        """Sets the optimizer that updates the parameters after each step, and returns it.

        Returns ``None`` on a process that trains no parameters.

        Args:
            optimizer: A ``torch.optim.Optimizer`` over :meth:`parameters`, or a function that
                creates an optimizer from a list of trained parameters. On a process without trained
                parameters, the function is not called, and ``None`` may be passed.
            clip_norm: Maximum norm of the whole model's gradient; ``None`` disables clipping.
            initial_loss_scale: Loss scale of the first step in fp16.
            loss_scale_interval: Number of steps without overflow until the loss scale doubles.

        Raises:
            ConfigError: If the optimizer contains parameters of other stages, or a trained
                parameter has dtype float16.
        """
        scaling = initial_loss_scale, loss_scale_interval
        return self._update.set_optimizer(optimizer, clip_norm, *scaling)

    @naming_lost_peers()
    def step(self, batch: Batch, *, num_items: Sequence[float] | None = None) -> tuple[float, bool]:
        """Runs a training step: all forward and backward passes, and the update of the parameters.

        All processes must call this. If no optimizer is set, the averaged gradients remain in the
        parameters' ``grad`` until the next step.

        Args:
            batch: Batch of this replica, the same on all its processes: a dictionary whose number
                of samples is a multiple of the microbatch size, or a list of microbatches of any
                shapes. Either all replicas must pass a dictionary, or all must pass a list. A
                process uses only the entries that its stages need.
            num_items: Number of items, such as tokens with a label, in each microbatch. A
                microbatch's loss must be a mean over these items. The step's loss and gradients are
                then means over all items of all replicas. ``None`` averages over microbatches.

        Returns:
            The mean loss over microbatches (or items) and replicas, and whether the update was
                skipped because the gradient was not finite; the same on all processes.

        Raises:
            ConfigError: If the batch cannot be divided into microbatches, differs from the sample
                batch in entries or dtypes, differs between the processes of a replica, or uses
                parameters that the sample batch did not use.
            TransportError: If another process has exited or does not respond.
        """
        work = self._maker.work(batch, num_items, self.steps + 1)
        count = len(work.microbatches)
        if self._loop is not None:
            self._loop.require(None if work.is_listed else count * self.micro_batch_size)
        elif self._order_of_job is not None:
            raise ConfigError(NO_LOOP)
        self.steps += 1
        self._trace.begin_step(self.steps, work)
        for parameter in self._update.parameters.values():
            parameter.grad = None
        self._maker.balance.begin(work.microbatches)
        self.last_order = tuple(work.order)
        losses = self._run(work, step=self.steps, scale=self._update.scale)
        with self._tracing.span("reduce"):
            self._update.reduce()
            self.loss, self.grad_norm = self._update.totals(
                losses, count, weights=work.passed_weights
            )
        with self._tracing.span("optimizer"):
            if self._loop is not None:
                self._loop.before_update()
            overflow = self._update.apply(self.grad_norm, self.steps)
        self._mesh.accelerator.synchronize()
        self.times = self._wiring.executor.finish_step()
        self._maker.balance.end(self.times)
        self._tracing.end_iteration()
        if self._repartitioner is not None:
            self._after_step(self._repartitioner, work, self.times)
        return self.loss, overflow

    def _after_step(self, repartitioner: SegmentBalancer, work: StepWork, times: RankTimes) -> None:
        """Moves segments if the measured ``times`` predict a gain. All processes must call this.

        ``work`` contains the microbatches of the last step, and ``times`` contains the durations of
        this rank's actions. ``repartitioner`` decides which segments to move.
        """
        move = repartitioner.after_step(work, times)
        if move is None:
            return
        self._checkpointer.saver.wait()
        if repartitioner.carry_out(move):
            self.partition = self._assembly.recordings.part.partition
            self.shared_weights = repartitioner.shared_weights
            self._trace.continue_with(self.partition)
            self._wiring.executor.record_to(self._tracing.recorder)
            if self._loop is not None:
                self._loop.trace_begins_anew()

    @naming_lost_peers()
    def eval(self, batch: Batch, *, num_items: Sequence[float] | None = None) -> float:
        """Returns the mean loss of a batch in evaluation mode, the same on all processes.

        Args:
            batch: Batch of this replica, as for :meth:`step`.
            num_items: Number of items in each microbatch, as for :meth:`step`.

        Raises:
            ConfigError: If the batch is invalid, as for :meth:`step`.
            TransportError: If another process has exited or does not respond.
        """
        work = self._maker.work(batch, num_items, -1)
        with self._tracing.host_span("evaluate"):
            losses = self._run(work, step=-1, scale=None)
            self._wiring.executor.finish_step()
            loss, _ = self._update.totals(
                losses, len(work.microbatches), weights=work.passed_weights, with_norm=False
            )
        return loss

    def _run(self, work: StepWork, *, step: int, scale: float | None) -> list[torch.Tensor]:
        """Runs ``work`` and returns the loss of each microbatch, in the order of the batch.

        The list is empty on a rank without the last stage.

        Args:
            work: Microbatches of this replica and their programs, in execution order.
            step: Index of the training step, which seeds the random numbers.
            scale: Factor by which the loss is multiplied; ``None`` runs only forward passes, in
                evaluation mode.
        """
        self._mesh.check_launcher()
        forward_only = scale is None
        executor = self._wiring.executor
        programs = [chunks.programs(forward_only=forward_only) for chunks in work.programs]
        count = len(programs)
        frozen_stages = 0 if forward_only else work.frozen_stages
        state = self._orders.state(
            count, forward_only=forward_only, sizes=work.sizes, frozen_stages=frozen_stages
        )
        self._random.begin(step, work.numbers)
        stages = ProgramStages(
            programs=programs,
            microbatches=[
                _inputs(part, chunks, self.device)
                for part, chunks in zip(work.microbatches, programs, strict=True)
            ],
            random=self._random,
            held=self._assembly.held,
            device=self.device,
            meters=[chunks.meter for chunks in work.programs],
            stores=self._stores,
            scale=1.0 if scale is None else scale,
            loss_weights=work.weights,
            forward_only=forward_only,
            frozen_chunks=state.frozen_chunks,
            meter=None if forward_only else self._trace.meter,
        )
        before = self._random.states()
        try:
            with torch.set_grad_enabled(not forward_only):
                executor.run(
                    stages,
                    self._orders.policy(
                        count, forward_only=forward_only, frozen_stages=frozen_stages
                    ),
                    state,
                )
        finally:
            stages.finish()
            self._random.restore(before)
        return work.as_passed(stages.losses)

    @naming_lost_peers()
    def save(
        self,
        folder: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        keep: int | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> Path:
        """Saves a checkpoint of parameters, buffers, optimizer, loss scale, step and seed.

        All processes must call this. Any pipeline of the same model can load the checkpoint, even
        with a different pipeline size, partition or number of replicas. The checkpoint is renamed
        to its final name when it is complete.

        Args:
            folder: Folder of checkpoints that all nodes can access. The checkpoint is written to
                its subfolder ``step_XXXXXXXX``.
            extra: Numbers, strings, lists and dictionaries to save, such as the state of a
                learning-rate scheduler.
            keep: Number of newest complete checkpoints to keep; ``None`` for all.
            state: Objects with ``state_dict`` and ``load_state_dict`` methods to save, keyed by
                name. All processes must pass the same names. The first process's states are saved.

        Returns:
            Path of the checkpoint.

        Raises:
            CheckpointError: If the folder cannot be written, or is not shared.
            ConfigError: If ``extra``, ``keep`` or ``state`` is invalid.
        """
        with self._tracing.host_span("checkpoint"):
            path: Path = self._checkpointer.save(
                folder, self._head(extra), keep=keep, state=state or {}
            )
        return path

    def _head(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns the step, the seed, the loss scale and ``extra``, to be saved in a checkpoint."""
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
        """Loads a checkpoint that was saved by :meth:`save`.

        All processes must call this, after :meth:`set_optimizer`.

        Args:
            folder: Folder of checkpoints.
            step: Training step of the checkpoint; ``None`` loads the newest undamaged checkpoint.
            optimizer: Whether to also load the optimizer's state.
            state: Objects to restore, keyed by the names used in :meth:`save`. The saved state of
                each object is passed to its method ``load_state_dict``.
            trust_checkpoint: Whether to also load checkpoints of old versions, which contain
                pickles. They are read without running code. See ``docs/security.md``.

        Returns:
            The saved value of ``extra``.

        Raises:
            CheckpointError: If there is no checkpoint, or it is damaged, not trusted, or from
                another model or optimizer.
            ConfigError: If the checkpoint has the state of an optimizer, but no optimizer is set.
        """
        manifest = self._checkpointer.load(
            folder, step=step, optimizer=optimizer, state=state, trust=trust_checkpoint
        )
        self._maker.comparison.restart()
        self.steps = manifest["step"]
        self._random.seed = manifest["seed"]
        extra: dict[str, Any] = manifest["extra"]
        return extra

    @naming_lost_peers()
    def loop(
        self,
        total_steps: int,
        *,
        folder: str | Path | None = None,
        save_interval: int | None = None,
        keep: int | None = None,
        state: Mapping[str, Any] | None = None,
        async_save: bool = False,
        local_folder: str | Path | None = None,
        diagnose_interval: int = 100,
        trust_checkpoint: bool = False,
    ) -> Loop:
        """Loads the newest checkpoint, and returns an iterator over the remaining steps.

        All processes must call this, after :meth:`set_optimizer`. Call :meth:`step` once in each
        iteration of the loop. If any process receives SIGTERM, SIGINT, SIGUSR1 or SIGHUP, all
        processes save a checkpoint after the same step and exit with status 0. See
        ``docs/elastic.md``.

        Args:
            total_steps: Number of steps of the whole training run, counted from step 0.
            folder: Folder of checkpoints; ``None`` disables checkpoints. An elastic job uses its
                launcher's checkpoint folder instead.
            save_interval: Number of steps between checkpoints; ``None`` saves only at the end.
            keep: Number of newest complete checkpoints to keep; ``None`` for all.
            state: Objects whose states are also saved and loaded, keyed by name. See
                :meth:`Pipeline.save`.
            async_save: Whether a background thread writes checkpoints, so that training waits only
                for a copy in memory.
            local_folder: Folder on each node's local disk to which checkpoints are written first. A
                background thread copies them to ``folder``.
            diagnose_interval: Number of steps between searches for slow ranks in the trace; 0
                disables the search. Ignored without a trace.
            trust_checkpoint: Whether to also load checkpoints of old versions, which contain
                pickles. They are read without running code. See ``docs/security.md``.

        Raises:
            CheckpointError: If the newest checkpoint cannot be loaded, or has a different batch
                size.
            ConfigError: If a setting is invalid, or this pipeline already has a loop.
        """
        if self._loop is not None:
            raise ConfigError("Pipeline.loop was already called; run all steps in one loop")
        self._loop = Loop(
            self,
            total_steps,
            folder=folder,
            save_interval=save_interval,
            keep=keep,
            state=state,
            async_save=async_save,
            local_folder=local_folder,
            diagnose_interval=diagnose_interval,
            trust_checkpoint=trust_checkpoint,
        )
        return self._loop

    @functools.cached_property
    def _checkpointer(self) -> Any:
        # Import this only when needed, because the import is slow.
        from megatron.adaptive.modules.checkpointer import Checkpointer

        return Checkpointer(self._mesh, self.model, self._assembly.held, self._update)

    @naming_lost_peers()
    def close(self) -> None:
        """Closes channels and the trace, and destroys the pipeline's process groups.

        All processes must call this. Calling it more than once is safe.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._loop is not None:
            self._loop.close()
        self._update.report_skipped()
        self._guard.close()
        self._wiring.close()
        self._tracing.close()
        self._mesh.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        # Skip close() after an error, because close() waits for all processes and others may never
        # call it.
        if error is None:
            self.close()
