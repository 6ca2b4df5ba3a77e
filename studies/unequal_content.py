"""Compares schedules for a vision-language model whose microbatches have different image counts.

Implements the ``content`` part of ``studies/schedules.py``. Processes exchange real messages, and
sleep instead of computing. The model has an image encoder with 5 billion parameters and a language
model with 32 billion. A microbatch has a text of 256 tokens and 0 to 8 images. The number of images
is drawn from a log-normal distribution. All configurations run the same steps. 1F1B and interleaved
1F1B use the partition that is fastest in simulation. The rule ``adaptive`` uses the partition that
``Pipeline`` chooses, and runs microbatches in the order of the data or in an order by predicted
cost. In the second part, microbatches are distributed over two replicas, either round-robin or by
predicted cost. The predictions are fitted during the first steps. In the third part, the encoder is
frozen, and both partitions are the fastest in simulation.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from megatron.adaptive import accelerator

# Ranks are forked from a process that has already imported this module, so prepare torch here.
accelerator.install()
with accelerator.quiet_imports():
    from megatron.adaptive.modules.batch_comparison import BatchComparison, Declared, Digest
    from megatron.adaptive.modules.content import ContentBalance, is_by_cost
from harness.emulated_work import EmulatedRank  # noqa: E402
from harness.processes import fork_ranks  # noqa: E402
from harness.report import Result, Row, measured, ratios  # noqa: E402
from megatron.adaptive.engine.process_context import gather  # noqa: E402
from megatron.adaptive.modules.batch import Signature  # noqa: E402
from megatron.adaptive.planner.job_shape import least_largest_of  # noqa: E402
from megatron.adaptive.schedule.action import ActionKind  # noqa: E402
from megatron.adaptive.schedule.catalog import Candidate  # noqa: E402
from megatron.adaptive.schedule.memory_caps import default_cap  # noqa: E402
from megatron.adaptive.schedule.simulate import simulate  # noqa: E402
from megatron.adaptive.schedule.stage_placement import Placement, frozen_stages_of  # noqa: E402
from megatron.adaptive.schedule.workload import PS_PER_S, Workload  # noqa: E402

RANKS = 4
MICROBATCHES = 12
"""Number of microbatches per step and replica."""
TEXT_TOKENS = 256
IMAGE_TOKENS = 256
IMAGE_PATCHES = 1024
MEDIAN_IMAGES = 2.0
SIGMA = 1.0
ENCODER_LAYERS = 24
DECODER_LAYERS = 32
"""Number of layer pairs in the language model. Partitions count such pairs instead of layers."""
ENCODER_WORK = 5.0 * IMAGE_PATCHES / ENCODER_LAYERS
"""Work of the forward pass of one image through one layer, in billions of multiplications."""
DECODER_WORK = 32.0 / DECODER_LAYERS
"""Work of the forward pass of one token through one layer, in billions of multiplications."""
FORWARD_S = 0.08
"""Mean duration in seconds of the forward pass of a microbatch through the whole model."""
WARM_STEPS = 4
LIMIT_S = 900.0
SEED = 20_000


@dataclass(frozen=True, kw_only=True)
class Way:
    """Configuration that is measured.

    Attributes:
        schedule: Name of the schedule.
        chunks: Number of stages on each rank.
        replicas: Number of data-parallel replicas of the pipeline.
        rule: Values of the arguments ``order`` and ``dealing`` of ``Pipeline``.
        frozen: Whether the encoder is frozen, so that it has no backward passes.
    """

    schedule: str
    chunks: int = 1
    replicas: int = 1
    rule: tuple[Literal["given", "time"], Literal["turns", "time"]] = ("given", "turns")
    frozen: bool = False

    @property
    def placement(self) -> Placement:
        """Returns the placement, which assigns stages to ranks."""
        return Placement(num_ranks=RANKS, num_chunks=self.chunks, kind="loop")

    @property
    def is_rule(self) -> bool:
        """Returns whether ranks choose their actions at run time, with W as a separate action."""
        return self.schedule == "adaptive"


ONE = {
    "1f1b": Way(schedule="1f1b"),
    "interleaved": Way(schedule="interleaved", chunks=2),
    "adaptive, order as given": Way(schedule="adaptive", chunks=2),
    "adaptive, order by cost": Way(schedule="adaptive", chunks=2, rule=("time", "turns")),
}
TWO = {
    "1f1b, 2 replicas": Way(schedule="1f1b", replicas=2),
    "adaptive, order by cost, 2 replicas": Way(
        schedule="adaptive", chunks=2, replicas=2, rule=("time", "turns")
    ),
    "adaptive, order and dealing by cost, 2 replicas": Way(
        schedule="adaptive", chunks=2, replicas=2, rule=("time", "time")
    ),
}
FROZEN = {
    "1f1b, frozen encoder": Way(schedule="1f1b", frozen=True),
    "adaptive, frozen encoder": Way(
        schedule="adaptive", chunks=2, rule=("time", "turns"), frozen=True
    ),
}
WAYS = {**ONE, **TWO, **FROZEN}
OURS = "adaptive, order by cost"
DEALT = "adaptive, order and dealing by cost, 2 replicas"
FILLED = "adaptive, frozen encoder"
GOALS = {
    (OURS, "1f1b"): 1.6,
    (OURS, "interleaved"): 1.3,
    (DEALT, "1f1b, 2 replicas"): 1.9,
    (FILLED, "1f1b, frozen encoder"): 1.3,
}


def images_of(seed: int, count: int) -> list[int]:
    """Returns the number of images in each of ``count`` microbatches, drawn with ``seed``."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN_IMAGES), SIGMA, count)
    return [int(number) for number in np.clip(np.rint(drawn), 0, 8)]


@functools.cache
def _second() -> float:
    """Returns the duration of a billion multiplications in seconds."""
    images = np.mean(images_of(SEED, 4096))
    tokens = TEXT_TOKENS + IMAGE_TOKENS * images
    work = ENCODER_WORK * ENCODER_LAYERS * images + DECODER_WORK * DECODER_LAYERS * tokens
    return FORWARD_S / float(work)


def layer_seconds(images: list[int]) -> Any:
    """Returns the forward time of each layer in seconds, with shape ``[layers, microbatches]``."""
    counts = np.array(images, dtype=float)
    seen = np.tile(ENCODER_WORK * counts, (ENCODER_LAYERS, 1))
    read = np.tile(DECODER_WORK * (TEXT_TOKENS + IMAGE_TOKENS * counts), (DECODER_LAYERS, 1))
    return np.concatenate([seen, read]) * _second()


def stage_seconds(partition: tuple[int, ...], images: list[int], *, frozen: bool = False) -> Any:
    """Returns the forward time of each stage in seconds, with shape ``[stages, microbatches]``.

    If ``frozen`` is true, the frozen layers of the encoder are not counted.
    """
    layers = layer_seconds(images)
    if frozen:
        layers[:ENCODER_LAYERS] = 0.0
    starts = np.cumsum((0, *partition))[:-1]
    return np.add.reduceat(layers, starts, axis=0)


def candidate_of(way: Way, partition: tuple[int, ...], sizes: list[float]) -> Candidate:
    """Returns the schedule of ``way`` for microbatches with the relative sizes ``sizes``."""
    placement = way.placement
    cap = max(default_cap(placement, len(sizes)), *sizes) if way.is_rule else None
    pieces = 4 if way.is_rule else 0
    return Candidate(
        name=way.schedule,
        placement=placement,
        weight_pieces=pieces,
        cap=cap,
        frozen_stages=frozen_stages_of(partition, ENCODER_LAYERS * way.frozen),
    )


def relative_sizes(images: list[int]) -> list[float]:
    """Returns the size of the activations of each microbatch, relative to the mean."""
    sizes = layer_seconds(images).sum(axis=0)
    return [float(size) for size in sizes / sizes.mean()]


def simulated(way: Way, partition: tuple[int, ...], images: list[int]) -> float:
    """Returns the simulated step time in seconds. Messages take no time in the simulation."""
    placement = way.placement
    count = len(images)
    forward = stage_seconds(partition, images)
    backward = stage_seconds(partition, images, frozen=way.frozen)
    durations = np.array([forward, backward, backward])
    if not way.is_rule:
        durations = np.array([forward, 2 * backward, 0 * backward])
    sizes = relative_sizes(images)
    candidate = candidate_of(way, partition, sizes)
    result = simulate(
        placement,
        count,
        candidate.policies(count),
        Workload(
            durations_ps=np.rint(durations * PS_PER_S).astype(np.int64),
            delays_ps=np.zeros((2, placement.num_stages, count), np.int64),
            occupancy_ps=np.zeros((RANKS, RANKS), np.int64),
        ),
        sizes=sizes if way.is_rule else None,
        compiled=True,
        cap=candidate.cap,
        weight_pieces=candidate.weight_pieces,
        frozen_stages=candidate.skipped_stages,
    )
    return result.makespan_s


def partition_of(way: Way) -> tuple[int, ...]:
    """Returns the number of layers of each stage for the configuration ``way``.

    The largest stage is as small as possible for the mean microbatch. For a fixed order or a frozen
    encoder, a search then moves single layers between stages as long as the simulated steps become
    shorter.
    """
    steps = [images_of(SEED + number, MICROBATCHES) for number in range(6)]

    def cost(partition: tuple[int, ...]) -> float:
        return sum(simulated(way, partition, images) for images in steps)

    weights = layer_seconds(images_of(SEED, 4096)).mean(axis=1)
    if way.frozen:
        weights[:ENCODER_LAYERS] /= 3
    best = least_largest_of(weights.tolist(), way.placement.num_stages)
    assert best is not None
    if way.is_rule and not way.frozen:
        return best
    lowest = cost(best)
    improves = True
    while improves:
        improves = False
        for left in range(len(best) - 1):
            for change in (-1, 1):
                moved = list(best)
                moved[left] += change
                moved[left + 1] -= change
                if min(moved) > 0 and (each := cost(tuple(moved))) < lowest:
                    best, lowest, improves = tuple(moved), each, True
    return best


def microbatch(images: int) -> dict[str, Any]:
    """Returns a microbatch with ``images`` images, as a dictionary of tensors."""
    part = {"ids": torch.zeros(1, TEXT_TOKENS + IMAGE_TOKENS * images, dtype=torch.int64)}
    if images:
        part["patches"] = torch.zeros(IMAGE_PATCHES * images, 1)
    return part


class Job:
    """Runs one configuration in this process, and makes the same decisions as ``Pipeline``.

    Args:
        way: Configuration to run.
        partition: Number of layers of each stage.
        rank: Rank of this process. Ranks with the same position in their pipelines are consecutive.
    """

    def __init__(self, way: Way, partition: tuple[int, ...], rank: int) -> None:
        self._way = way
        position, replica = divmod(rank, way.replicas)
        self._member = EmulatedRank(
            position, replica=replica, replicas=way.replicas, varies=way.frozen
        )
        mesh: Any = SimpleNamespace(
            rank=rank,
            dp_rank=replica,
            dp_size=way.replicas,
            pp_rank=position,
            pipeline_size=RANKS,
            control_group=dist.group.WORLD,
            gather=gather,
        )
        order, dealing = way.rule
        # The costs are unknown at first, so start with the same cost for all microbatches.
        kinds = [Signature.of(microbatch(images)) for images in (0, 2)]
        self._comparison = BatchComparison(
            mesh=mesh, is_on=False, is_by_cost=is_by_cost(order, dealing)
        )
        self._balance = ContentBalance(
            order=order,
            dealing=dealing,
            comparison=self._comparison,
            placement=way.placement,
            partition=(1,) * way.placement.num_stages,
            sample_work={kind: [1.0] * way.placement.num_stages for kind in kinds},
        )
        self._partition = partition

    def step(self, number: int) -> tuple[float, float]:
        """Runs a step, and returns its duration in seconds and the peak of stored activations."""
        way = self._way
        whole = [microbatch(count) for count in images_of(number, MICROBATCHES * way.replicas)]
        passed = self._balance.share(whole)
        assert passed is not None
        order = self._balance.order_of(passed, [1.0] * len(passed))
        self._comparison.begin_call(is_training=True)
        if self._comparison.is_due:
            entries = self._comparison.entries_of(passed)
            facts = Declared(
                step=number,
                replica=self._comparison.mesh.dp_rank,
                is_listed=True,
                dealt=passed.digest,
                count=len(passed),
                content=Digest.of(entries),
                order=Digest.of({}, *order).kinds,
            )
            sums = self._comparison.agree(facts, entries, self._balance.take_sums())
            self._balance.add_sums(sums)
        run = [passed[index] for index in order]
        self._balance.begin(run)
        images = [(part["ids"].shape[1] - TEXT_TOKENS) // IMAGE_TOKENS for part in run]
        sizes = relative_sizes(images)
        forward = stage_seconds(self._partition, images).tolist()
        backward = stage_seconds(self._partition, images, frozen=way.frozen).tolist()
        step = self._member.step(
            candidate_of(way, self._partition, sizes),
            {ActionKind.F: forward, ActionKind.B: backward, ActionKind.W: backward},
            len(run),
            sizes=sizes,
            unit=float(layer_seconds(images).sum() / len(images)) / FORWARD_S,
        )
        self._balance.end(step.times)
        return step.seconds, step.peak

    def close(self) -> None:
        """Closes the channels. All ranks must call this together."""
        self._member.close()


def run_rank(
    rank: int, partitions: dict[str, tuple[int, ...]], steps: int
) -> dict[str, list[tuple[float, float]]]:
    """Runs ``steps`` steps of each configuration in ``partitions``, after warm-up steps.

    Returns the duration in seconds and the peak of stored activations of each step, keyed by
    configuration.
    """
    jobs = {name: Job(WAYS[name], parts, rank) for name, parts in partitions.items()}
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
    for step in range(WARM_STEPS + steps):
        for name, job in jobs.items():
            result = job.step(step)
            if step >= WARM_STEPS:
                results[name].append(result)
    for job in jobs.values():
        job.close()
    return results


def rows_of(
    results: dict[str, list[tuple[float, float]]], partitions: dict[str, tuple[int, ...]]
) -> list[Row]:
    """Returns the table rows for ``results``, the measurements of several configurations.

    ``partitions`` contains the number of layers of each stage, keyed by configuration.
    """
    subject = next(name for name in (FILLED, DEALT, OURS) if name in results)
    seconds = {name: [second for second, _ in steps] for name, steps in results.items()}
    rows = [
        measured(
            f"speed of {subject} over {name}",
            ratios(each, seconds[subject]),
            goal=GOALS.get((subject, name)),
            least=True,
            note=f"layers {'-'.join(map(str, partitions[name]))}",
        )
        for name, each in seconds.items()
        if name != subject
    ]
    first = next(iter(results))
    peaks = {name: max(peak for _, peak in results[name]) for name in (first, subject)}
    rows.append(
        Row(what=f"activations of {subject} over {first}", value=peaks[subject] / peaks[first])
    )
    return rows


def measure(*, quick: bool) -> Result:
    """Measures all configurations with one replica, two replicas, and a frozen encoder."""
    steps = 3 if quick else 12
    result = Result()
    for ways in (ONE, TWO, FROZEN):
        partitions = {name: partition_of(way) for name, way in ways.items()}
        ranks = RANKS * next(iter(ways.values())).replicas
        results = fork_ranks("studies.unequal_content", ranks, LIMIT_S, partitions, steps)
        result.add(Result(rows=rows_of(results, partitions), facts={f"{ranks} ranks": results}))
    return result
