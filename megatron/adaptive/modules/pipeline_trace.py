"""Writes the trace of a ``Pipeline``, and starts new trace files whenever segments move.

The header of a trace file describes a single partition. Therefore, when the partition changes, the
existing files are moved to another folder, and new files are started::

    steps 1-50, 1-6-1-1 ──> traces/      segments move: renamed to traces-1/
    steps 51-,  2-3-2-2 ──> traces/
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch.distributed as dist

from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.config.schedule import is_next_traced, trace_details
from megatron.adaptive.engine.collective_meter import CollectiveMeter
from megatron.adaptive.engine.executor_setup import open_trace
from megatron.adaptive.engine.kernel_recorder import KernelRecorder
from megatron.adaptive.engine.tracing import Tracing
from megatron.adaptive.modules.assembly import Assembly, PipelineSettings
from megatron.adaptive.modules.segment_meter import SegmentMeter, segments_of
from megatron.adaptive.modules.sizes import SettledSizes
from megatron.adaptive.modules.step_work import StepWork
from megatron.adaptive.schedule.catalog import Candidate
from megatron.adaptive.schedule.stage_placement import Placement, frozen_stages_of


class PipelineTrace:
    """Opens this process's trace. All processes must call the constructor.

    Args:
        request: Settings of the pipeline.
        samples: Number of samples in the sample batch, or of microbatches if the batch is a list.
        sizes: Process groups and layout of the job. The traces of each layout of an elastic job are
            written to a separate folder.
        assembly: This rank's part of the model.
        placement: Assignment of stages to ranks.

    Attributes:
        folder: Folder of the trace files; ``None`` if tracing is off.
        tracing: Trace of this process. It remains the same object when the partition changes.
    """

    def __init__(
        self,
        request: PipelineSettings,
        samples: int,
        sizes: SettledSizes,
        assembly: Assembly,
        placement: Placement,
    ) -> None:
        assert request.micro_batch_size is not None
        self._request = request
        self._num_microbatches = max(1, samples // request.micro_batch_size)
        self._mesh = sizes.mesh
        self._assembly = assembly
        self._placement = placement
        self.folder = request.trace_dir
        if sizes.order is not None and self.folder is not None:
            self.folder = f"{self.folder}/epoch-{sizes.order.epoch}"
        self._meter: SegmentMeter | None = None
        self._steps_here = 0
        self._usually_frozen = 0
        self.tracing = self._open(assembly.partition)

    @property
    def meter(self) -> SegmentMeter | None:
        """Returns the object that times segments, or ``None`` if the current step is not traced.

        Also returns ``None`` if ``trace_detail`` does not include segments.
        """
        return self._meter if self.tracing.is_traced else None

    def begin_step(self, step: int, work: StepWork) -> None:
        """Begins a training step, and traces it unless the trace settings skip it.

        Args:
            step: Index of the step, starting at 1.
            work: Microbatches of this replica, in execution order.
        """
        request = self._request
        frozen = self._skipped_stages(work.frozen_stages)
        self.tracing.begin_iteration(
            step,
            len(work.microbatches),
            sizes=work.listed_sizes,
            # Record the number of frozen stages only if it differs from the number in the trace's
            # header. For example, no gradient flows through a trained image encoder in a step
            # without images.
            frozen_stages=-1 if frozen == self._usually_frozen else frozen,
            is_traced=is_next_traced(
                self._steps_here, request.trace_interval, request.trace_iterations
            ),
        )
        self._steps_here += 1

    def continue_with(self, partition: Sequence[int]) -> None:
        """Continues the trace in new files for ``partition``. All processes must call this.

        Call this between two steps. Existing files are moved to ``<folder>-1``, or to a folder with
        the next free number.

        Args:
            partition: Number of segments in each stage.

        Raises:
            TraceError: If the existing files cannot be moved.
        """
        if self.folder is None:
            return
        self.tracing.close()
        # Wait until all processes have closed their files before the folder is renamed.
        dist.barrier(group=self._mesh.control_group)
        self.tracing.adopt(self._open(partition))

    def _open(self, partition: Sequence[int]) -> Tracing:
        request = self._request
        assembly = self._assembly
        costs = iter(assembly.weights)
        transport = request.transport or TransportConfig()
        self._usually_frozen = self._skipped_stages(
            frozen_stages_of(partition, assembly.frozen_segments)
        )
        tracing = open_trace(
            self.folder,
            self._mesh,
            self._placement,
            schedule=request.schedule,
            num_microbatches=self._num_microbatches,
            layers=partition,
            work=[sum(itertools.islice(costs, size)) for size in partition if assembly.weights],
            transport=transport.forced or "",
            layer_kinds=assembly.segment_kinds,
            layer_work=assembly.mean_work,
            content_rules=(request.order, request.dealing),
            frozen_stages=self._usually_frozen,
            collector=request.trace_otlp,
        )
        if self.folder is not None:
            self._add_details(tracing, self.folder, partition)
        return tracing

    def _skipped_stages(self, frozen_stages: int) -> int:
        """Returns the number of leading stages whose backward pass the schedule skips.

        Args:
            frozen_stages: Number of leading stages through which no gradient flows.
        """
        return Candidate(
            name=self._request.schedule, placement=self._placement, frozen_stages=frozen_stages
        ).skipped_stages

    def _add_details(self, tracing: Tracing, folder: str, partition: Sequence[int]) -> None:
        """Enables the measurements in ``tracing`` that the setting ``trace_detail`` selects.

        Trace files are written to ``folder``, and ``partition`` is the number of segments per
        stage.
        """
        request = self._request
        mesh = self._mesh
        details = trace_details(request.trace_detail)
        clock = mesh.accelerator.clock()
        if "layers" in details:
            segments = segments_of(partition, self._placement, mesh.pp_rank)
            tracing.layers = self._meter = SegmentMeter(segments, clock)
        if "collectives" in details:
            groups = self._assembly.update.process_groups()
            tracing.collectives = CollectiveMeter(groups, clock)
        if "kernels" in details and mesh.rank in request.profile_ranks:
            tracing.kernels = KernelRecorder(
                folder,
                mesh.rank,
                range(request.profile_step_start, request.profile_step_end),
                on_gpu=mesh.accelerator.is_cuda,
                say=functools.partial(print, flush=True),
                setting="trace_detail='kernels'",
            )
