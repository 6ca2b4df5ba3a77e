"""Runs one rank of a planned job without the other ranks, and measures its memory and times.

``plan --try`` runs this module in a separate process (``cli.try_rank``), so that the process uses
only the memory of the rank.

The trainer's own functions set up the rank. The other ranks of the job do not exist. Torch's fake
backend replaces the process groups, and ``transport.stand_in`` creates the inputs that would come
from other stages. The rank runs whole steps in the order of the plan's schedule. It never waits,
because every input is available immediately. The planner adds the waiting times.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.adaptive import accelerator as device
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.tried import TriedRank
from megatron.adaptive.profiling.action_timing import spread
from megatron.adaptive.profiling.free_memory import gpu_name, process_bytes, total_host_bytes
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.policy import Follow, Policy, actions_of
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import StageProfile, StageTimes, draw
from megatron.adaptive.training.pretrain import expected_error, prepare_process
from megatron.adaptive.transport.stand_in import ExpectedInput

WARM_UP = 2
"""Number of steps that are not measured. The first step also creates the optimizer state."""
MEASURED = 4
"""Number of measured steps."""


@dataclass(frozen=True, kw_only=True)
class TrialRequest:
    """Rank to run, and the plan that contains this rank.

    Attributes:
        model_arguments: Arguments of the trainer for the model and its precision.
        plan_arguments: Arguments of the trainer that describe the plan.
        world_size: Number of ranks of the job.
        rank: Global rank to run.
        stage_work: Number of operations in each stage's forward pass, in any unit. If the schedule
            chooses actions at run time, their order is simulated with times proportional to these
            numbers.
        needed_bytes: Memory that the rank needs according to the planner, in bytes.
        kinds: Kinds of layers to measure separately, after the steps of the rank.
        last: Kind of the last layer.
    """

    model_arguments: tuple[str, ...]
    plan_arguments: tuple[str, ...]
    world_size: int
    rank: int
    stage_work: tuple[float, ...]
    needed_bytes: float
    kinds: tuple[str, ...]
    last: str


def try_rank(request: TrialRequest) -> tuple[TriedRank, dict[str, Any]]:
    """Runs steps of the rank in ``request``, and then measures a layer of each kind.

    Returns:
        Tuple of the rank's memory and times, and the content of a profile file with the layers.

    Raises:
        ConfigError: If the plan cannot be run, or the rank needs more memory than the device has.
        DeviceMemoryError: If the device has too little memory.
    """
    run_flags = "--mock-data --tokenizer-type NullTokenizer --eval-iters 0 --lr 1e-4"
    # Do not check for NaN, because sums over ranks are meaningless without the other ranks.
    run_flags += f" --train-iters {WARM_UP + MEASURED} --no-check-for-nan-in-loss-and-grad"
    config = parse(
        [*request.model_arguments, *request.plan_arguments, *run_flags.split()],
        world_size=request.world_size,
        last_wins=True,
    )
    environment = replace(Environment.read({}), rank=request.rank, world_size=request.world_size)
    accelerator = prepare_process(config, environment)
    _require_memory(request, accelerator)
    from megatron.adaptive.gpt.initialize import end_job, start_alone

    try:
        tried = _run_steps(start_alone(config, environment, accelerator), request)
        end_job()
        # Free the rank's model and optimizer, so that the layers have as much memory as in a new
        # process.
        accelerator.free_unused_memory()
        return tried, _measure_layers(request, config)
    except BaseException as error:
        if (expected := expected_error(error, request.rank)) is not error:
            raise expected from error
        raise
    finally:
        if torch.distributed.is_initialized():
            end_job()


def _require_memory(request: TrialRequest, accelerator: device.Accelerator) -> None:
    """Checks that ``accelerator`` has the memory that the rank in ``request`` needs.

    The needed memory is the planner's estimate.
    """
    if accelerator.is_cuda:
        whole_bytes = torch.cuda.get_device_properties(accelerator.device).total_memory
    else:
        whole_bytes = total_host_bytes()
    if request.needed_bytes > whole_bytes:
        raise ConfigError(
            f"rank {request.rank} needs {request.needed_bytes / 1e9:,.1f} GB according to the "
            f"plan, but {accelerator.name} has {whole_bytes / 1e9:,.1f} GB; try a rank that "
            "needs less memory, a plan with more stages or with recomputation, or a larger device"
        )


def _measure_layers(request: TrialRequest, config: TrainerConfig) -> dict[str, Any]:
    """Measures a layer of each kind in ``request``, in a job of one tensor-parallel group."""
    from megatron.adaptive.training.profile_run import ProfileOptions, profile_layers

    tp = config.parallel.tensor_model_parallel_size
    options = ProfileOptions(
        name="",
        arguments=request.model_arguments,
        kinds=request.kinds,
        last=request.last,
        widths=(tp,),
        micro_batches=(config.batch.micro_batch_size,),
        links=False,
        backend=config.parallel.distributed_backend,
        alone=True,
    )
    environment = replace(Environment.read({}), world_size=tp, local_world_size=tp)
    document = profile_layers(options, environment)
    # This process is rank 0, for which profile_layers() always returns a document.
    assert document is not None
    return document


@dataclass(kw_only=True)
class _Samples:
    """Collects measurements of steps, in seconds.

    Attributes:
        num_slices: Number of slices of each microbatch, or 1 for whole microbatches.
        step_s: Time of each step.
        optimizer_s: Time of the optimizer update in each step.
        busy_s: Total time of the actions in each step.
        means_s: Mean time per microbatch in each step, keyed by kind and chunk of the actions.
        equal_s: Times of equal actions: one list for each step, kind and chunk. The parts of a
            weight gradient, and the slices of a microbatch, count as one action.
        largest_bytes: Size of the largest tensor that is allocated from the C library's heap during
            a step. Tensors of 32 MiB and more are not allocated from the heap.
    """

    num_slices: int = 1
    step_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    means_s: dict[tuple[ActionKind, int], list[float]] = field(default_factory=dict)
    equal_s: list[list[float]] = field(default_factory=list)
    largest_bytes: int = 0

    def add_actions(self, actions: Sequence[tuple[Action, int]]) -> None:
        """Adds the ``actions`` of one step, each with its duration in nanoseconds."""
        sums: dict[tuple[ActionKind, int], dict[int, float]] = {}
        for action, duration_ns in actions:
            of_kind = sums.setdefault((action.kind, action.chunk), {})
            microbatch = action.microbatch // self.num_slices
            of_kind[microbatch] = of_kind.get(microbatch, 0.0) + duration_ns / 1e9
        for key, of_kind in sums.items():
            self.equal_s.append(list(of_kind.values()))
            self.means_s.setdefault(key, []).append(statistics.fmean(of_kind.values()))

    def typical(self, kind: ActionKind, num_chunks: int) -> tuple[float, ...]:
        """Returns the typical time of an action of ``kind`` in seconds, for each chunk.

        The typical time is the median of the steps' mean times, or 0 if there are no times. The
        means include delayed actions, because delays also make a step longer.
        """
        lanes = [self.means_s.get((kind, chunk), [0.0]) for chunk in range(num_chunks)]
        return tuple(map(statistics.median, lanes))

    def beside_s(self) -> float:
        """Returns the median time in seconds that a step spends outside of actions and updates."""
        parts = zip(self.step_s, self.optimizer_s, self.busy_s, strict=True)
        return statistics.median(max(0.0, step - more - busy) for step, more, busy in parts)


def _run_steps(job: Any, request: TrialRequest) -> TriedRank:
    """Builds the rank's part of the model, runs the steps, and returns the measurements."""
    from megatron.core import parallel_state

    from megatron.adaptive.gpt.setup import build_run, require_room

    # Import the training loop, because its code also takes memory on a real rank.
    importlib.import_module("megatron.adaptive.training.loop")
    # The trainer makes the same call, which affects when memory is freed.
    device.freeze_imports()
    accelerator = job.accelerator
    context_bytes = process_bytes(accelerator) if accelerator.is_cuda else 0
    require_room(job.config, accelerator)
    run = build_run(job)
    if run.wiring is None:
        raise ConfigError(
            "schedule megatron cannot be tried, because trials do not run megatron-core's "
            "schedules; try the plan with schedule 1f1b or interleaved, which run actions in the "
            "same order"
        )
    samples = _measured_steps(run, _set_order(run, job.config.num_microbatches, request))
    num_chunks = run.placement.num_chunks
    return TriedRank(
        rank=job.rank,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        device=gpu_name(accelerator),
        memory_bytes=accelerator.peak_memory_bytes() + context_bytes + _gaps(accelerator, samples),
        busy_s=statistics.median(samples.busy_s),
        optimizer_s=statistics.median(samples.optimizer_s),
        beside_s=samples.beside_s(),
        forward_s=samples.typical(ActionKind.F, num_chunks),
        backward_s=samples.typical(ActionKind.B, num_chunks),
        weight_s=samples.typical(ActionKind.W, num_chunks),
        sigma=spread(samples.equal_s),
    )


def _measured_steps(run: Any, order: Sequence[Action]) -> _Samples:
    """Runs all steps, and returns the measurements of the steps after the warm-up.

    Each step runs its actions in ``order``.
    """
    from megatron.adaptive.gpt.setup import make_loader
    from megatron.adaptive.gpt.train_step import Step

    job = run.job
    count = job.config.num_microbatches
    transport = run.wiring.transport
    expected = [] if transport is None else _inputs_of(order, run.placement, job)
    step = Step(run)
    loader = make_loader(run, run.samples.train, 0)
    samples = _Samples(num_slices=job.config.num_slices)
    for iteration in range(1, WARM_UP + MEASURED + 1):
        if transport is not None:
            transport.begin(iteration - 1, expected)
        marks_s: list[float] = [_now(job.accelerator)]
        microbatches = None if loader is None else loader.step(count)

        def mark(marks_s: list[float] = marks_s) -> None:
            marks_s.append(_now(job.accelerator))

        # Use _LargestTensor in a step that is not measured, because it makes operations slower.
        is_watched = iteration == WARM_UP and not job.accelerator.is_cuda
        watch = _LargestTensor() if is_watched else None
        with watch or contextlib.nullcontext():
            step.train(microbatches, count, iteration, before_update=mark)
        mark()
        if watch is not None:
            samples.largest_bytes = watch.largest_bytes
        if iteration > WARM_UP:
            begin_s, update_s, end_s = marks_s
            assert step.times is not None
            samples.step_s.append(end_s - begin_s)
            samples.optimizer_s.append(end_s - update_s)
            samples.busy_s.append(step.times.busy_s)
            samples.add_actions(step.times.actions)
    if loader is not None:
        loader.close()
    return samples


class _LargestTensor(TorchDispatchMode):
    """Measures the size in bytes of the largest tensor that is allocated from the heap."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # no types in torch
        self.largest_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        present = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            if _storage(tensor) not in present:
                size_bytes = tensor.untyped_storage().nbytes()
                if size_bytes < device.MAPPED_FROM_BYTES:
                    self.largest_bytes = max(self.largest_bytes, size_bytes)
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _gaps(accelerator: device.Accelerator, samples: _Samples) -> int:
    """Estimates how many more bytes a rank loses to heap fragmentation in a job than in a trial.

    In a job, received messages lie between other tensors, at different positions in each step.
    According to measurements, a job of many steps therefore needs memory for about one more tensor
    of the largest size than a trial. Returns 0 on a GPU, where torch counts the bytes of tensors
    without the gaps between them.
    """
    return 0 if accelerator.is_cuda else samples.largest_bytes


def _now(accelerator: device.Accelerator) -> float:
    """Waits for ``accelerator``, and returns the value of a monotonic clock in seconds."""
    accelerator.synchronize()
    return time.perf_counter()


class _FixedOrder:
    """Makes a rank run its actions in the same order in every step.

    Args:
        order: Actions of the rank, in the order to run them.
        num_slices: Number of slices of each microbatch, or 1 for whole microbatches.
    """

    def __init__(self, order: Sequence[Action], num_slices: int) -> None:
        self._policy = Follow(order, num_slices=num_slices)

    def policy(self, num_microbatches: int) -> Policy:
        """Returns the policy for the next step, which uses the same order as all other steps."""
        return self._policy


def _set_order(run: Any, num_microbatches: int, request: TrialRequest) -> tuple[Action, ...]:
    """Makes ``run`` follow a fixed order of the rank's actions, and returns this order.

    Some schedules choose actions at run time, depending on the inputs that have arrived. In a
    trial, no other rank sends inputs, so the order is taken from a simulated step.
    """
    orders = run.forward_backward.orders
    policy = orders.policy(num_microbatches, forward_only=False)
    if isinstance(policy, Follow):
        return policy.order
    candidate = orders.candidate(num_microbatches)
    work_s = request.stage_work
    config = run.job.config
    profile = StageProfile(
        times=StageTimes(forward_s=work_s, backward_s=work_s, weight_s=work_s),
        attention_share=config.attention_share,
        slice_cut=config.schedule.slice_cut,
    )
    num_slices = candidate.num_slices
    work = draw(candidate.placement, num_microbatches, profile, num_slices=num_slices)
    simulated = candidate.simulate(work, compiled=False)
    order = tuple(
        actions_of(
            simulated.codes[orders.pp_rank].tolist(),
            candidate.placement.num_chunks,
            candidate.weight_pieces,
            num_slices,
        )
    )
    orders.replay = _FixedOrder(order, num_slices)
    return order


def _inputs_of(order: Sequence[Action], placement: Placement, job: Any) -> list[ExpectedInput]:
    """Returns the inputs that the actions in ``order`` need from other ranks, in the same order.

    ``placement`` assigns the stages to ranks.
    """
    from megatron.core import parallel_state

    ranks = torch.distributed.get_process_group_ranks(
        parallel_state.get_pipeline_model_parallel_group()
    )
    pp_rank = ranks.index(job.rank)
    config = job.config
    shared = config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
    ends = config.slice_ends
    lengths = [(end - start) // shared for start, end in itertools.pairwise((0, *ends))]
    inputs = []
    for action in order:
        if action.kind is ActionKind.W:
            continue
        source = placement.source_of(action.kind, pp_rank, action.chunk)
        if source is not None and source[0] != pp_rank:
            plain = Action(action.kind, action.chunk, action.microbatch)
            length = lengths[action.microbatch % len(lengths)] if len(lengths) > 1 else None
            inputs.append(ExpectedInput(plain, ranks[source[0]], length))
    return inputs
