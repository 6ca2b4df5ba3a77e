"""Profiles models with cut points for the planner: segments, messages and all-reduces.

This module distributes the measurements over ranks and collects the results in a profile. The
module ``segments`` measures the parts of the model between cut points, and ``profiling.links``
measures all-reduces, and messages between ranks.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.adaptive import accelerator as _accelerator

# Call install() before the modules below import megatron-core, so that it can run without CUDA.
_accelerator.install()
with _accelerator.quiet_imports():
    from megatron.adaptive.engine.process_context import Job
    from megatron.adaptive.errors import AdaptiveError, ConfigError, DeviceMemoryError
    from megatron.adaptive.modules.batch import BatchShape, require_whole, samples_in, stretched
    from megatron.adaptive.modules.cutting import (
        check_groups,
        frozen_segments,
        late_calls,
        postpone,
    )
    from megatron.adaptive.modules.early_samples import (
        EarlySamples,
        is_cheap,
        measured_early,
        node_processors,
        recorded_bytes,
    )
    from megatron.adaptive.modules.mesh import join_job
    from megatron.adaptive.modules.recording import RecordingCache, SampledModel, with_cut_points
    from megatron.adaptive.modules.segments import (
        MakeOptimizer,
        SegmentSample,
        interpolated,
        measure_segments,
        optimizer_seconds,
        tensors_of,
        tied_parameters,
        with_split_like,
    )
    from megatron.adaptive.modules.tape import Tape
    from megatron.adaptive.planner import profile_file
    from megatron.adaptive.planner.measured_module import MESSAGE_ELEMENT_BYTES, MeasuredHost
    from megatron.adaptive.profiling.action_timing import spread
    from megatron.adaptive.profiling.free_memory import (
        KEPT_FREE,
        available_host_bytes,
        free_memory_bytes,
        gpu_name,
        node_facts,
    )
    from megatron.adaptive.profiling.links import measure_links, measure_reductions


LONG_S = 0.02
"""Duration in seconds of a segment's forward and backward passes. In a quick profile, segments that
take at least this long are measured only once.
"""


_MOST_COPIED = 1 << 26
"""Maximum size in bytes of a whole batch that is copied and recorded as one microbatch."""


@dataclass(frozen=True, eq=False, repr=False)
class Profiler(SampledModel):
    """Measures a model's segments (parts between cut points) and the job's communication.

    ::

        profile = Profiler(Net(), sample_batch).run()
        profile.write("profile.json")       # for python -m megatron.adaptive plan

    Args:
        model: Model to measure. It is not changed, except that cut points are added if it has none.
            Parameters and buffers on the ``meta`` device get random values for the measurements.
            :class:`~megatron.adaptive.modules.recording.SampledModel` describes further settings.
        sample_batch: Batch with which the forward pass is recorded.
        micro_batch_sizes: Microbatch sizes to measure, in samples. ``None`` measures 1, 2, 4 and so
            on up to the size of the sample batch, while memory and ``time_limit_s`` allow.
        split_backward: Whether to also measure the split backward pass, in which gradients of
            inputs and of weights are computed separately.
        optimizer: Function that creates an optimizer from a list of parameters, to time an
            optimizer step; ``None`` uses AdamW.
        repeats: Number of repetitions of each measurement. The profile contains the median.
        links: Whether to measure all-reduces, and messages between processes.
        memory_limit_bytes: Maximum memory per process in bytes; ``None`` allows 90% of the device's
            free memory.
        time_limit_s: Time in seconds after which no larger microbatch size is measured.
        name: Name of the model in the profile; ``None`` uses its class name.
        timeout_s: Maximum time in seconds to wait for another process.

    Raises:
        ConfigError: If a setting, the sample batch or the model is invalid. The message names the
            cause.
    """

    _: KW_ONLY
    micro_batch_sizes: Sequence[int] | None = None
    split_backward: bool = True
    optimizer: MakeOptimizer | None = None
    repeats: int = 3
    links: bool = True
    memory_limit_bytes: float | None = None
    time_limit_s: float = 60.0
    name: str | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        BatchShape(self.sample_batch, 1)
        check_groups(self.model, self.shared_weights)
        for size in self.micro_batch_sizes or ():
            require_whole(1, micro_batch_sizes=size)
        require_whole(1, repeats=self.repeats)
        for limit in ("time_limit_s", "memory_limit_bytes"):
            value = getattr(self, limit)
            if value is not None and not value > 0:
                raise ConfigError(f"{limit} must be a positive number, got {value!r}")

    def run(self) -> ModuleProfile:
        """Returns the profile, the same on all processes. All processes must call this.

        For each type of device, one process measures the segments while the others wait.

        Raises:
            ConfigError: If the model cannot be recorded or run.
            DeviceMemoryError: If even the smallest microbatch does not fit in memory.
        """
        job = join_job(self.timeout_s)
        try:
            return with_cut_points(self).measure(job)
        finally:
            job.close()

    def measure(
        self,
        job: Job,
        *,
        batch_size: int | None = None,
        most: int | None = None,
        is_quick: bool = False,
        recordings: RecordingCache | None = None,
    ) -> ModuleProfile:
        """Does the same as :meth:`run`, but in a job that all processes have already joined.

        Args:
            job: Job that all ranks have joined.
            batch_size: Number of samples per step; ``None`` uses the size of the sample batch. If
                it is greater than 1 and the model cannot run a single sample, the smallest measured
                microbatch has two samples.
            most: Maximum number of samples per microbatch if ``micro_batch_sizes`` is not set;
                ``None`` uses ``batch_size``.
            is_quick: Whether to measure only the smallest and the largest microbatch, interpolate
                the costs of sizes in between, and repeat only short measurements. If there are
                enough processors, two processes with the same type of device measure the two sizes
                at the same time. Ignored if ``micro_batch_sizes`` is set.
            recordings: Cache of recordings of the model; ``None`` creates a new cache.
        """
        begin_s = time.monotonic()
        if batch_size is None:
            batch_size = samples_in(self.sample_batch, "sample_batch")
        if most is None:
            most = batch_size
        nodes = job.gather(self._about(job))
        kinds = [node["facts"]["gpu"] for node in nodes]
        cache = RecordingCache() if recordings is None else recordings
        device = job.accelerator.device
        limit_bytes = nodes[job.rank]["limit"]
        is_quick = is_quick and not self.micro_batch_sizes
        early = EarlySamples()
        if is_quick:
            early = self._measured_early(job, nodes, most, batch_size, cache)
        own_part: Any = None
        if kinds.index(kinds[job.rank]) == job.rank:
            if is_quick:
                measured = self._smallest_and_largest(
                    device, limit_bytes, most, batch_size, cache, early
                )
            else:
                measured = self._by_size(device, limit_bytes, most, batch_size, cache)
            own_part = self._part(job, limit_bytes, measured)
        gathered = job.gather(own_part)
        # Prefer this rank's own error, because errors from other ranks have no traceback.
        for part in (own_part, *gathered):
            if isinstance(part, AdaptiveError):
                raise part
        parts = [part for part in gathered if part is not None]
        names = _node_names(nodes)
        links: list[dict[str, Any]] = []
        reductions: list[dict[str, Any]] = []
        if self.links and len(nodes) > 1:
            rows = [row for part in parts for row in part.samples]
            links = measure_links(job, names, most_bytes=max(row.output_bytes for row in rows))
            numbers = sum(row.parameters for row in rows if row.micro_batch == rows[0].micro_batch)
            reductions = measure_reductions(job, names, _widths(nodes), most_bytes=4 * numbers)
        profile = ModuleProfile(
            name=type(self.model).__name__ if self.name is None else self.name,
            parts=tuple(parts),
            nodes=tuple(nodes),
            names=tuple(names),
            links=tuple(links),
            reductions=tuple(reductions),
            seconds=time.monotonic() - begin_s,
        )
        if job.rank == 0:
            print(f"profile: {profile}", flush=True)
        return profile

    def _about(self, job: Job) -> dict[str, Any]:
        """Returns the properties of this process's device, memory and machine, for the profile."""
        location = job.places[job.rank]
        machine = location["machine"]
        processes = sum(other["machine"] == machine for other in job.places)
        limit = self.memory_limit_bytes
        if limit is None:
            limit = free_memory_bytes(job.accelerator, processes) * (1 - KEPT_FREE)
            # Count the memory of this process's current tensors as free, because the tensors will
            # not exist in the planned run.
            if job.accelerator.is_cuda:
                limit += torch.cuda.memory_allocated(job.accelerator.device)
        return {
            "machine": machine,
            "host": location["host"],
            "shares_memory": not job.accelerator.is_cuda,
            "processes": processes,
            "facts": node_facts(job.accelerator, processes),
            "limit": limit,
            **node_processors(),
        }

    def _measured_early(
        self,
        job: Job,
        nodes: Sequence[Mapping[str, Any]],
        most: int,
        batch_size: int,
        cache: RecordingCache,
    ) -> EarlySamples:
        """Measures the smallest and the largest microbatch on two processes at the same time.

        All ranks must call this.

        Args:
            job: Job that all ranks have joined.
            nodes: Device, memory and machine of each rank, from :meth:`_about`.
            most: Maximum number of samples per microbatch.
            batch_size: Number of samples per step.
            cache: Object that keeps recordings of the model.
        """
        size = 2 ** (most.bit_length() - 1)
        if size == 1:
            return EarlySamples()
        device = job.accelerator.device
        room = min(nodes[job.rank]["limit"], available_host_bytes())

        def largest() -> list[SegmentSample] | None:
            batch = self._microbatch(size)
            tape = self._recorded(batch, cache)
            if not is_cheap(tape, room):
                return None
            return self._measured_tape(tape, batch, device, self.split_backward, LONG_S)

        def record() -> None:
            if job.rank == 0:
                cache.both(self, self._microbatch(size))
            else:
                cache.training(self, self._microbatch(size))

        return measured_early(
            self.model,
            job,
            nodes,
            smallest=lambda: self._smallest(batch_size, device, cache, split=False),
            largest=largest,
            record=record,
        )

    def _part(
        self, job: Job, limit_bytes: float, measured: Iterator[tuple[Tape, list[SegmentSample]]]
    ) -> DeviceSamples | AdaptiveError:
        """Measures segments on this rank, on behalf of all ranks with the same type of device.

        The iterator ``measured`` measures one microbatch size per item. ``limit_bytes`` is the
        memory limit to report in error messages. Errors are returned instead of raised, so that all
        ranks can raise the same error.
        """
        device = job.accelerator.device
        model = self.model
        samples: list[SegmentSample] = []
        tape: Tape | None = None
        try:
            for size_tape, rows in measured:
                tape = size_tape
                samples += rows
            if tape is None:
                return DeviceMemoryError(
                    f"profile: a microbatch of {min(self.micro_batch_sizes or (1,))} samples "
                    f"does not fit into {limit_bytes / 1e9:.3g} GB; add cut points to make the "
                    "segments smaller"
                )
            tied = tied_parameters(tape, tensors_of(model))
            elements = Counter[int]()
            for parameter in model.parameters():
                elements[parameter.element_size()] += parameter.numel()
            return DeviceSamples(
                gpu=gpu_name(job.accelerator),
                cut_points=tuple(tape.cuts),
                samples=tuple(samples),
                tied_parameters=tied[0],
                tied_segments=tied[1],
                element_bytes=max(elements, key=elements.__getitem__, default=4),
                optimizer_s=optimizer_seconds(model, device, self.optimizer),
                is_random=tape.is_random,
                frozen_segments=frozen_segments(tape),
            )
        except AdaptiveError as error:
            return error
        except Exception as error:
            # Return the error instead of raising it, because other ranks wait for a result. Its
            # __cause__ keeps the original traceback.
            failed = ConfigError(
                f"profile: rank {job.rank} failed to run the model: {type(error).__name__}: "
                f"{(str(error).splitlines() or [''])[0]}"
            )
            failed.__cause__ = error
            return failed

    def _by_size(
        self,
        device: torch.device,
        limit_bytes: float,
        most: int,
        batch_size: int,
        cache: RecordingCache,
    ) -> Iterator[tuple[Tape, list[SegmentSample]]]:
        """Yields the recorded forward pass and the measured segments for each microbatch size.

        Unless ``micro_batch_sizes`` is set, the sizes are powers of two up to ``most`` samples. The
        method stops at the first size that does not fit into ``limit_bytes``.
        """
        begin_s = time.monotonic()
        doubled = [2**power for power in range(most.bit_length())]
        given_sizes = sorted(set(self.micro_batch_sizes or ()))
        previous: tuple[Tape, list[SegmentSample]] | None = None
        for size in given_sizes or doubled:
            if not given_sizes and time.monotonic() - begin_s > self.time_limit_s:
                return
            if previous is not None:
                if size <= previous[1][0].micro_batch:
                    continue
                if not self._fits(size, *previous, limit_bytes):
                    return
            if previous is None and not given_sizes:
                previous = self._smallest(batch_size, device, cache, split=self.split_backward)
            else:
                previous = self._measured(size, device, cache, split=self.split_backward)
            if previous is None:
                return
            yield previous

    def _smallest_and_largest(
        self,
        device: torch.device,
        limit_bytes: float,
        most: int,
        batch_size: int,
        cache: RecordingCache,
        early: EarlySamples,
    ) -> Iterator[tuple[Tape, list[SegmentSample]]]:
        """Yields the same as :meth:`_by_size`, but measures only the smallest and largest size.

        The costs of other sizes are interpolated. ``early`` contains measurements that two
        processes have already made.
        """
        # The smallest size is measured repeatedly even if its segments are slow, to determine how
        # much the durations of equal actions vary.
        if early.error is not None:
            raise early.error
        smallest = early.smallest
        if not early.is_measured:
            smallest = self._smallest(batch_size, device, cache, split=False)
        if smallest is None:
            return
        tape, rows = smallest
        least = rows[0].micro_batch
        # run_s is the estimated time per sample for measuring all segments once, with warm-up.
        run_s = 2 * sum(row.seconds for row in rows) / least
        doubled = [2**power for power in range(most.bit_length())]
        for size in [size for size in reversed(doubled) if size > least]:
            is_long = size > 2 * least and run_s * size > self.time_limit_s
            if is_long or not self._fits(size, tape, rows, limit_bytes):
                continue
            if early.largest is not None and early.largest[0].micro_batch == size:
                # Use the tape of the smallest size, because all sizes have the same segments.
                largest: tuple[Tape, list[SegmentSample]] | None = tape, early.largest
            else:
                largest = self._measured(
                    size, device, cache, split=self.split_backward, enough_s=LONG_S
                )
            if largest is not None:
                tape, larger = largest
                rows = [with_split_like(b, a) for a, b in zip(rows, larger, strict=True)]
                yield tape, [*rows, *interpolated(rows, larger), *larger]
                return
        if self.split_backward:
            smallest = self._measured(least, device, cache, split=True, enough_s=LONG_S)
        if smallest is not None:
            yield smallest

    def _fits(
        self, size: int, tape: Tape, rows: Sequence[SegmentSample], limit_bytes: float
    ) -> bool:
        """Returns whether ``size`` samples are expected to fit into ``limit_bytes`` of memory.

        The estimate is based on a smaller microbatch: ``tape`` is its recording, and ``rows``
        contains its measured segments.
        """
        samples = rows[0].micro_batch
        needed = max(row.kept_bytes + row.workspace_bytes + row.output_bytes for row in rows)
        recorded = recorded_bytes(tape)
        room = available_host_bytes() if self.device.type == "cpu" else limit_bytes
        return needed * size <= limit_bytes * samples and recorded * size <= room * samples

    def largest_that_fits(self, job: Job, batch_size: int, recordings: RecordingCache) -> int:
        """Returns the largest microbatch size that divides the batch and should fit in memory.

        Returns 0 if not even one sample is expected to fit. This method measures nothing. It
        estimates the memory of a sample as twice the size of all values that a recorded forward
        pass computes for the sample. The factor of two accounts for gradients and for temporary
        values of operators.

        Args:
            job: Job that all ranks have joined.
            batch_size: Number of samples per step.
            recordings: Object that keeps recordings of the model.
        """
        # Record two samples if possible, because batch normalization cannot be trained on a single
        # sample.
        count = min(2, batch_size)
        has_values = all(not parameter.is_meta for parameter in self.model.parameters())
        if not has_values and _entry_bytes(self.sample) * batch_size <= _MOST_COPIED:
            # Record the whole batch, because it becomes the microbatch if there is enough memory.
            count = batch_size
        tape = self._recorded(self._microbatch(count), recordings)
        per_sample = 2 * recorded_bytes(tape) / count
        # A trained parameter also needs memory for its gradient and for AdamW's two state tensors.
        parameters = sum(
            each.numel() * each.element_size() * (4 if each.requires_grad else 1)
            for each in self.model.parameters()
        )
        room = self._about(job)["limit"] - parameters
        sizes = [size for size in range(1, batch_size + 1) if batch_size % size == 0]
        return max((size for size in sizes if size * per_sample <= room), default=0)

    def _microbatch(self, size: int) -> dict[str, torch.Tensor]:
        """Returns a microbatch of the first ``size`` samples of the sample batch."""
        # Copy the entries, because views would keep the memory of the whole batch allocated.
        return {
            name: tensor[:size].to(self.device, copy=True)
            for name, tensor in stretched(self.sample, size).items()
        }

    def _recorded(self, batch: Mapping[str, torch.Tensor], cache: RecordingCache) -> Tape:
        """Returns the recorded forward pass on ``batch`` in training mode.

        The recording is stored in ``cache``.
        """
        tape = cache.training(self, batch).training
        postpone(tape, late_calls(tape))
        return tape

    def _smallest(
        self, batch_size: int, device: torch.device, cache: RecordingCache, *, split: bool
    ) -> tuple[Tape, list[SegmentSample]] | None:
        """Measures a microbatch of one sample, or of two if the model cannot run a single sample.

        For example, batch normalization cannot be trained on a single sample. Two samples are tried
        only if ``batch_size`` is greater than 1. If ``split`` is true, the split backward pass is
        also measured. Returns ``None`` if the microbatch does not fit in memory.
        """
        try:
            return self._measured(1, device, cache, split=split)
        except Exception:
            # Measuring one sample failed, so try a microbatch of two. If that fails as well, raise
            # the first error.
            if batch_size > 1:
                with contextlib.suppress(Exception):
                    return self._measured(2, device, cache, split=split)
            raise

    def _measured(
        self,
        size: int,
        device: torch.device,
        cache: RecordingCache,
        *,
        split: bool,
        enough_s: float = math.inf,
    ) -> tuple[Tape, list[SegmentSample]] | None:
        """Records and measures a microbatch of ``size`` samples on ``device``.

        If ``split`` is true, the split backward pass is also measured. Segments that take at least
        ``enough_s`` seconds are measured only once.

        Returns the recording and the measured segments, or ``None`` if the microbatch does not fit
        in memory.
        """
        batch = self._microbatch(size)
        try:
            tape = self._recorded(batch, cache)
            return tape, self._measured_tape(tape, batch, device, split, enough_s)
        except torch.OutOfMemoryError:
            pass  # Free memory after this block, because the traceback still references tensors.
        _accelerator.free_unused_memory(device)
        return None

    def _measured_tape(
        self,
        tape: Tape,
        batch: Mapping[str, torch.Tensor],
        device: torch.device,
        split: bool,
        enough_s: float,
    ) -> list[SegmentSample]:
        return measure_segments(
            self, tape, batch, device, split=split, repeats=self.repeats, enough_s=enough_s
        )


def _entry_bytes(sample: Mapping[str, torch.Tensor]) -> float:
    """Returns the size in bytes of one sample of the batch ``sample``."""
    return sum(tensor[0].numel() * tensor.element_size() for tensor in sample.values())


@dataclass(frozen=True, kw_only=True)
class DeviceSamples:
    """Contains the measurements on one type of device.

    Attributes:
        gpu: Name of the device type, such as the product name of a GPU.
        cut_points: Names of the cut points in the order of the forward pass.
        samples: Measurements of each segment for each microbatch size.
        tied_parameters: Number of elements in parameters that several segments share.
        tied_segments: First and last segment that share parameters; empty if there are no shared
            parameters.
        element_bytes: Element size in bytes of the most common parameter dtype.
        optimizer_s: Time of an optimizer step in seconds, per parameter element.
        is_random: Whether the model draws random numbers, for example in dropout.
        frozen_segments: Number of leading segments through which no gradient flows.
    """

    gpu: str
    cut_points: tuple[str, ...]
    samples: tuple[SegmentSample, ...]
    tied_parameters: int
    tied_segments: tuple[int, ...]
    element_bytes: int
    optimizer_s: float
    is_random: bool = False
    frozen_segments: int = 0


@dataclass(frozen=True, kw_only=True)
class ModuleProfile:
    """Contains the profile of a model with cut points.

    Attributes:
        name: Name of the model.
        parts: Measurements on each type of device, starting with rank 0's type.
        nodes: Properties of each rank's device, memory and machine.
        names: Node type of each rank.
        links: Measured times of messages between ranks, in the format of profile files; empty if
            not measured.
        reductions: Measured times of all-reduces, in the format of profile files; empty if not
            measured.
        seconds: Duration of the measurements in seconds.
    """

    name: str
    parts: tuple[DeviceSamples, ...]
    nodes: tuple[Mapping[str, Any], ...]
    names: tuple[str, ...]
    links: tuple[Mapping[str, Any], ...]
    reductions: tuple[Mapping[str, Any], ...]
    seconds: float

    def __str__(self) -> str:
        estimated = self.estimated_sizes
        measured = [size for size in self.micro_batch_sizes if size not in estimated]
        text = (
            f"measured {len(self.cut_points) + 1} segments of {self.name} with microbatches of "
            f"{_samples(measured)} in {self.seconds:.1f} s"
        )
        return f"{text}; estimated microbatches of {_samples(estimated)}" if estimated else text

    @property
    def cut_points(self) -> tuple[str, ...]:
        """Returns the names of the cut points in the order of the forward pass."""
        return self.parts[0].cut_points

    @property
    def samples(self) -> tuple[SegmentSample, ...]:
        """Returns the measurements of segments on rank 0's type of device."""
        return self.parts[0].samples

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Returns the microbatch sizes with known costs on all device types, in ascending order.

        In a quick profile, the costs of some sizes are estimated (see :attr:`estimated_sizes`).
        """
        sizes = [{sample.micro_batch for sample in part.samples} for part in self.parts]
        return tuple(sorted(set.intersection(*sizes)))

    @property
    def estimated_sizes(self) -> tuple[int, ...]:
        """Returns the microbatch sizes whose costs are estimated on at least one device type."""
        rows = [sample for part in self.parts for sample in part.samples if sample.is_estimated]
        estimated = {row.micro_batch for row in rows}
        return tuple(size for size in self.micro_batch_sizes if size in estimated)

    def document(self, *, split: bool = True) -> dict[str, Any]:
        """Returns the content of a profile file, as described in ``docs/reference/planner.md``.

        Args:
            split: Whether to use the times of the split backward pass, if they were measured,
                instead of those of the unsplit one.
        """
        return profile_file.document(
            self._model(),
            [_layer_row(part.gpu, sample, split) for part in self.parts for sample in part.samples],
            made=profile_file.timestamp(),
            nodes={
                name: dict(node["facts"]) for name, node in zip(self.names, self.nodes, strict=True)
            },
            links=[dict(row) for row in self.links],
            all_reduce=[dict(row) for row in self.reductions],
            optimizer_s_per_parameter={part.gpu: part.optimizer_s for part in self.parts},
            action_sigma=max(
                spread(row for sample in part.samples for row in sample.durations_s)
                for part in self.parts
            ),
        )

    def write(self, path: str | Path) -> None:
        """Writes the profile to the file ``path``, for ``python -m megatron.adaptive plan``.

        Raises:
            ConfigError: If the file cannot be written.
        """
        profile_file.write(self.document(), Path(path))

    def _model(self) -> dict[str, Any]:
        """Returns the entry ``model`` of a profile file, in which each segment is a layer."""
        part = self.parts[0]
        largest = max(sample.micro_batch for sample in part.samples)
        pieces = [
            {
                "kind": profile_file.cut_kind(sample.segment),
                "parameters": sample.parameters,
                "frozen_parameters": sample.frozen_parameters,
                "output_elements": sample.output_bytes / largest / MESSAGE_ELEMENT_BYTES,
                "activation_bytes": sample.kept_bytes / largest,
                "workspace_bytes": sample.workspace_bytes / largest,
            }
            for sample in part.samples
            if sample.micro_batch == largest
        ]
        model: dict[str, Any] = {"name": self.name, "precision": "fp32", "layers": pieces}
        if part.tied_segments:
            model["tied_parameters"] = part.tied_parameters
            model["tied_layers"] = list(part.tied_segments)
        if part.frozen_segments:
            model["frozen_layers"] = part.frozen_segments
        return model

    @property
    def hosts(self) -> tuple[MeasuredHost, ...]:
        """Returns the job's nodes and their memory per process, in the order of their ranks."""
        hosts: dict[str, MeasuredHost] = {}
        for name, node in zip(self.names, self.nodes, strict=True):
            former = hosts.get(node["machine"])
            hosts[node["machine"]] = MeasuredHost(
                host=node["host"],
                type=name,
                gpu=node["facts"]["gpu"],
                processes=node["processes"],
                memory_bytes=min(node["limit"], former.memory_bytes if former else math.inf),
                shares_memory=node["shares_memory"],
            )
        return tuple(hosts.values())


def _layer_row(gpu: str, sample: SegmentSample, split: bool) -> dict[str, Any]:
    """Returns the row for the measured segment ``sample`` in a profile file.

    ``gpu`` is the name of the device type. If ``split`` is true and the split backward pass was
    measured, the row contains its times. The row contains the key ``source`` only if the times were
    estimated.
    """
    backward_s = (sample.backward_s, 0.0)
    is_estimated = sample.is_estimated
    if split and sample.split_s is not None:
        backward_s = sample.split_s
        is_estimated |= sample.is_split_estimated
    return {
        "kind": profile_file.cut_kind(sample.segment),
        "gpu": gpu,
        "tp": 1,
        "micro_batch": sample.micro_batch,
        "forward_s": sample.forward_s,
        "backward_input_s": backward_s[0],
        "backward_weight_s": backward_s[1],
        "kept_bytes": sample.kept_bytes,
        "parameters": sample.parameters,
        **({"source": "estimated"} if is_estimated else {}),
    }


def _samples(sizes: Sequence[int]) -> str:
    """Returns a list of microbatch sizes as text, such as ``1, 4 samples``."""
    return f"{', '.join(map(str, sizes))} sample{'' if list(sizes) == [1] else 's'}"


def _node_names(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the node type of each rank, which is the name of its GPU.

    If nodes with the same GPU run different numbers of processes, this number is appended to the
    name.
    """
    kinds = dict.fromkeys((node["facts"]["gpu"], node["processes"]) for node in nodes)
    gpus = [gpu for gpu, _ in kinds]
    return [
        node["facts"]["gpu"]
        + (f"-x{node['processes']}" if gpus.count(node["facts"]["gpu"]) > 1 else "")
        for node in nodes
    ]


def _widths(nodes: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the possible numbers of replicas on one node, except 1.

    ``nodes`` describes the device, memory and machine of each rank.
    """
    counts = {node["processes"] for node in nodes}
    least = math.gcd(*counts, len(nodes))
    return [width for width in range(2, least + 1) if least % width == 0]
