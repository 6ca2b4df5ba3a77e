"""Profiles models with cut points: pieces, links and all-reduces, for the planner.

Owns what is measured when and by whom, and what the planner makes of it; how pieces are measured
is in ``segments``, links and all-reduces in ``profiling.links``.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive import accelerator as _accelerator

# Before the modules below import megatron-core.
_accelerator.install()
with _accelerator.quiet_imports():
    from megatron.adaptive.engine.process_context import Job
    from megatron.adaptive.errors import AdaptiveError, ConfigError, DeviceMemoryError
    from megatron.adaptive.modules.batch import BatchShape, require_whole, samples_in, stretched
    from megatron.adaptive.modules.cutting import check_groups, check_shared
    from megatron.adaptive.modules.mesh import join_job
    from megatron.adaptive.modules.recording import Forwards, SampledModel, Tape
    from megatron.adaptive.modules.segments import (
        MakeOptimizer,
        SegmentSample,
        measure_segments,
        optimizer_seconds,
        tensors_of,
        tied_parameters,
    )
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


@dataclass(frozen=True, eq=False, repr=False)
class Profiler(SampledModel):
    """Measures a model's pieces between cut points, links and all-reduces.

    ::

        profile = Profiler(Net(), sample_batch).run()
        profile.write("profile.json")       # for python -m megatron.adaptive plan

    Args:
        model, sample_batch: the model stays as it is; for these and their settings see
            :class:`~megatron.adaptive.modules.recording.SampledModel`.
        micro_batch_sizes: samples of microbatches; where ``None``, 1, 2, 4 and so on up to the
            sample's, as far as memory and ``time_limit_s`` allow.
        split_backward: measure backwards also by inputs and by weights.
        optimizer: a function that makes one of a list of parameters, whose step is timed; AdamW
            where ``None``.
        repeats: runs that count; the median is taken.
        links: measure links between the processes and all-reduces.
        memory_limit_bytes: of a process, in place of what the device has free.
        time_limit_s: seconds after which no larger microbatch is begun.
        name: of the model, in the profile.
        timeout_s: limit of every wait for another process.

    Raises:
        ConfigError: a setting, the batch or the model breaks a rule; named.
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
        gone = next((name for name, one in self.model.named_parameters() if one.is_meta), None)
        if gone is not None:
            raise ConfigError(
                f"parameter {gone} is on the meta device, where a Pipeline puts those of other "
                "stages: profile the model before, or build another"
            )
        for size in self.micro_batch_sizes or ():
            require_whole(1, micro_batch_sizes=size)
        require_whole(1, repeats=self.repeats)
        for limit in ("time_limit_s", "memory_limit_bytes"):
            value = getattr(self, limit)
            if value is not None and not value > 0:
                raise ConfigError(f"{limit} {value!r}: give a number above 0")

    def run(self) -> ModuleProfile:
        """Measures. Collective over all processes of the job; returns the same on all of them.

        One process of each kind of device measures the pieces while the others wait.

        Raises:
            ConfigError: the model breaks a rule.
            DeviceMemoryError: no microbatch fits.
        """
        job = join_job(self.timeout_s)
        try:
            return self.measure(job)
        finally:
            job.close()

    def measure(self, job: Job, *, most: int | None = None) -> ModuleProfile:
        """Measures in a job that is there already; see :meth:`run`.

        Args:
            job: of all ranks.
            most: samples of the largest microbatch, where sizes are doubled; the sample's where
                ``None``.
        """
        begin_s = time.monotonic()
        if most is None:
            most = samples_in(self.sample_batch, "sample_batch")
        nodes = job.gather(self._about(job))
        kinds = [one["facts"]["gpu"] for one in nodes]
        mine: Any = None
        if kinds.index(kinds[job.rank]) == job.rank:
            mine = self._part(job, nodes[job.rank]["limit"], most)
        gathered = job.gather(mine)
        for one in (mine, *gathered):
            if isinstance(one, AdaptiveError):
                raise one  # its own with where it came from, before what others sent
        parts = [one for one in gathered if one is not None]
        names = _node_names(nodes)
        links: list[dict[str, Any]] = []
        reductions: list[dict[str, Any]] = []
        if self.links and dist.get_world_size() > 1:
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
            sizes = ", ".join(map(str, profile.micro_batch_sizes))
            print(
                f"profile: {len(profile.cut_points) + 1} segments of {profile.name} with "
                f"microbatches of {sizes} sample{'' if sizes == '1' else 's'} measured in "
                f"{profile.seconds:.1f} s",
                flush=True,
            )
        return profile

    def _about(self, job: Job) -> dict[str, Any]:
        """Returns what this process knows of itself and its node."""
        place = job.places[job.rank]
        machine = place["machine"]
        processes = sum(one["machine"] == machine for one in job.places)
        limit = self.memory_limit_bytes
        if limit is None:
            limit = free_memory_bytes(job.accelerator, processes) * (1 - KEPT_FREE)
            if job.accelerator.is_cuda:  # its tensors are gone when the planned run starts
                limit += torch.cuda.memory_allocated(job.accelerator.device)
        return {
            "machine": machine,
            "host": place["host"],
            "shares_memory": not job.accelerator.is_cuda,
            "processes": processes,
            "facts": node_facts(job.accelerator, processes),
            "limit": limit,
        }

    def _part(self, job: Job, limit_bytes: float, most: int) -> DeviceSamples | AdaptiveError:
        """Measures the pieces, on one rank of a kind of device; errors go to all ranks."""
        device, model = job.accelerator.device, self.model
        samples: list[SegmentSample] = []
        tape: Tape | None = None
        try:
            for found, rows in self._by_size(device, limit_bytes, most):
                tape = found
                samples += rows
            if tape is None:
                return DeviceMemoryError(
                    f"profile: no microbatch of {min(self.micro_batch_sizes or (1,))} samples "
                    f"fits into {limit_bytes / 1e9:.3g} GB: mark more cut points, so that pieces "
                    "get smaller"
                )
            tied = tied_parameters(tape, tensors_of(model))
            sizes = Counter[int]()
            for one in model.parameters():
                sizes[one.element_size()] += one.numel()
            return DeviceSamples(
                gpu=gpu_name(job.accelerator),
                cut_points=tuple(tape.cuts),
                samples=tuple(samples),
                tied_parameters=tied[0],
                tied_segments=tied[1],
                element_bytes=max(sizes, key=sizes.__getitem__, default=4),
                optimizer_s=optimizer_seconds(model, device, self.optimizer),
                is_random=tape.is_random,
            )
        except AdaptiveError as error:
            return error
        except Exception as error:
            # Others wait for an answer; here it keeps its traceback.
            failed = ConfigError(
                f"profile: rank {job.rank} failed to run the model: {type(error).__name__}: "
                f"{(str(error).splitlines() or [''])[0]}"
            )
            failed.__cause__ = error
            return failed

    def _by_size(
        self, device: torch.device, limit_bytes: float, most: int
    ) -> Iterator[tuple[Tape, list[SegmentSample]]]:
        """Yields the tape and the pieces of one size of microbatch after the other."""
        begin_s = time.monotonic()
        host = self.device.type == "cpu"
        needed = recorded = 0.0  # bytes for each sample
        doubled = [2**power for power in range(most.bit_length())]
        given = sorted(set(self.micro_batch_sizes or ()))
        for size in given or doubled:
            if not given and time.monotonic() - begin_s > self.time_limit_s:
                return
            room = available_host_bytes() if host else limit_bytes
            if needed * size > limit_bytes or recorded * size > room:
                return
            batch = {
                name: one[:size].to(self.device, copy=True)  # what is kept of it has its size
                for name, one in stretched(self.sample_batch, size).items()
            }
            try:
                tape = Forwards.of(self, batch, self.slicing).training
                check_shared(tape, self.shared_weights)
                rows = measure_segments(
                    self, tape, batch, device, split=self.split_backward, repeats=self.repeats
                )
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                return
            yield tape, rows
            needed = max(one.kept_bytes + one.workspace_bytes + one.output_bytes for one in rows)
            needed /= size
            recorded = sum(math.prod(v.shape) * v.dtype.itemsize for v in tape.values) / size


@dataclass(frozen=True, kw_only=True)
class DeviceSamples:
    """Holds what was measured on one kind of device.

    Attributes:
        gpu: its name.
        cut_points: names of the cut points, in order.
        samples: of every piece and size of microbatch.
        tied_parameters: numbers that several pieces share.
        tied_segments: the first and the last of these pieces.
        element_bytes: of most parameters.
        optimizer_s: of a step of the optimizer, for each parameter.
        is_random: whether the model draws random numbers.
    """

    gpu: str
    cut_points: tuple[str, ...]
    samples: tuple[SegmentSample, ...]
    tied_parameters: int
    tied_segments: tuple[int, ...]
    element_bytes: int
    optimizer_s: float
    is_random: bool = False


@dataclass(frozen=True, kw_only=True)
class ModuleProfile:
    """Holds a measured model with cut points.

    Attributes:
        name: of the model.
        parts: by kind of device; the first is rank 0's.
        nodes: of each rank, see ``_about``.
        names: node type of each rank.
        links, reductions: rows of a profile file; empty where they were not measured.
        seconds: that measuring took.
    """

    name: str
    parts: tuple[DeviceSamples, ...]
    nodes: tuple[Mapping[str, Any], ...]
    names: tuple[str, ...]
    links: tuple[Mapping[str, Any], ...]
    reductions: tuple[Mapping[str, Any], ...]
    seconds: float

    @property
    def cut_points(self) -> tuple[str, ...]:
        """Names of the cut points, in the order of the forward."""
        return self.parts[0].cut_points

    @property
    def samples(self) -> tuple[SegmentSample, ...]:
        """Pieces as rank 0's device runs them."""
        return self.parts[0].samples

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Sizes that were measured on all kinds of devices, ascending."""
        sizes = [{one.micro_batch for one in part.samples} for part in self.parts]
        return tuple(sorted(set.intersection(*sizes)))

    def document(self, *, split: bool = True) -> dict[str, Any]:
        """Returns what a profile file holds; see ``docs/planner.md``.

        Args:
            split: give backwards by inputs and by weights apart, where both were measured.
        """
        return profile_file.document(
            self._model(),
            [_layer_row(part.gpu, one, split) for part in self.parts for one in part.samples],
            made=profile_file.timestamp(),
            nodes={
                name: dict(node["facts"]) for name, node in zip(self.names, self.nodes, strict=True)
            },
            links=[dict(row) for row in self.links],
            all_reduce=[dict(row) for row in self.reductions],
            optimizer_s_per_parameter={part.gpu: part.optimizer_s for part in self.parts},
            action_sigma=max(
                spread(row for one in part.samples for row in one.durations_s)
                for part in self.parts
            ),
        )

    def write(self, path: str | Path) -> None:
        """Writes a profile file for ``python -m megatron.adaptive plan``.

        Raises:
            ConfigError: the file cannot be written.
        """
        profile_file.write(self.document(), Path(path))

    def _model(self) -> dict[str, Any]:
        part = self.parts[0]
        largest = max(one.micro_batch for one in part.samples)
        pieces = [
            {
                "kind": profile_file.cut_kind(one.segment),
                "parameters": one.parameters,
                "output_elements": one.output_bytes / largest / MESSAGE_ELEMENT_BYTES,
                "activation_bytes": one.kept_bytes / largest,
                "workspace_bytes": one.workspace_bytes / largest,
            }
            for one in part.samples
            if one.micro_batch == largest
        ]
        model: dict[str, Any] = {"name": self.name, "precision": "fp32", "layers": pieces}
        if part.tied_segments:
            model["tied_parameters"] = part.tied_parameters
            model["tied_layers"] = list(part.tied_segments)
        return model

    @property
    def hosts(self) -> tuple[MeasuredHost, ...]:
        """Describes the job's nodes in the order of the ranks; memory is what a process may use."""
        found: dict[str, MeasuredHost] = {}
        for name, node in zip(self.names, self.nodes, strict=True):
            former = found.get(node["machine"])
            found[node["machine"]] = MeasuredHost(
                host=node["host"],
                type=name,
                gpu=node["facts"]["gpu"],
                processes=node["processes"],
                memory_bytes=min(node["limit"], former.memory_bytes if former else math.inf),
                shares_memory=node["shares_memory"],
            )
        return tuple(found.values())


def _layer_row(gpu: str, one: SegmentSample, split: bool) -> dict[str, Any]:
    both = one.split_s if split and one.split_s is not None else (one.backward_s, 0.0)
    return {
        "kind": profile_file.cut_kind(one.segment),
        "gpu": gpu,
        "tp": 1,
        "micro_batch": one.micro_batch,
        "forward_s": one.forward_s,
        "backward_input_s": both[0],
        "backward_weight_s": both[1],
        "kept_bytes": one.kept_bytes,
        "parameters": one.parameters,
    }


def _node_names(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names the type of each rank's node: nodes of one GPU with unequal numbers of it differ."""
    kinds = dict.fromkeys((one["facts"]["gpu"], one["processes"]) for one in nodes)
    gpus = [gpu for gpu, _ in kinds]
    return [
        one["facts"]["gpu"]
        + (f"-x{one['processes']}" if gpus.count(one["facts"]["gpu"]) > 1 else "")
        for one in nodes
    ]


def _widths(nodes: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns numbers of replicas that may lie on one node."""
    counts = {one["processes"] for one in nodes}
    least = math.gcd(*counts, len(nodes))
    return [width for width in range(2, least + 1) if least % width == 0]
