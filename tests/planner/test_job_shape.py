"""Tests the choice of a pipeline size and a microbatch size for running processes.

The result is compared with all possible choices.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodePool, NodeType
from megatron.adaptive.planner.cost import predict
from megatron.adaptive.planner.job_shape import Running, choose_option, least_largest
from megatron.adaptive.planner.model_description import LayerKind, Model, Precision
from megatron.adaptive.planner.plan import Plan, place_ranks
from megatron.adaptive.planner.profile import LayerTimes, PlanInputs, Profile
from megatron.adaptive.schedule import numba_kernels, simulate

FAST = LinkSpeed(bytes_per_s=1e10, latency_s=1e-6)


def partitions(count: int, stages: int) -> list[tuple[int, ...]]:
    every = itertools.product(range(1, count + 1), repeat=stages)
    return [sizes for sizes in every if sum(sizes) == count]


def test_the_largest_stage_is_the_least_possible_and_squares_break_ties() -> None:
    dice = random.Random(7)
    for _ in range(60):
        count, stages = dice.randint(2, 7), dice.randint(1, 4)
        costs = []
        for _ in range(min(stages, count)):
            weights = [dice.randint(0, 6) for _ in range(count)]
            table = np.full((count + 1, count + 1), np.inf)
            for begin, end in itertools.combinations(range(count + 1), 2):
                if dice.random() > 0.15:
                    table[begin, end] = sum(weights[begin:end])
            costs.append(table)

        def value(partition: Any, costs: Any = costs) -> tuple[float, float]:
            ends = list(itertools.accumulate(partition))
            parts = [c[e - p, e] for c, p, e in zip(costs, partition, ends, strict=True)]
            return max(parts), sum(part * part for part in parts)

        best = min(value(partition) for partition in partitions(count, len(costs)))
        chosen = least_largest(costs)
        if best[0] == np.inf:
            assert chosen is None
        else:
            assert chosen is not None
            assert value(chosen) == pytest.approx(best)


def job(
    *,
    pieces: int = 6,
    gpus: tuple[int, ...] = (4,),
    memory: float = 1e12,
    batch: int = 16,
    schedule: str = "1f1b",
    parameters: float = 1e6,
    slow: dict[str, float] | None = None,
    chunks: int = 1,
) -> Running:
    """Returns a running job. ``gpus`` contains the number of GPUs of each node.

    In larger microbatches, a sample takes less time. ``slow`` contains the factors by which some
    node types are slower.
    """
    kinds = [
        LayerKind(
            name=f"cut-{n}", parameters=parameters, output_elements=1000.0,
            activation_bytes=1e4, workspace_bytes=1e3 * n,
        )
        for n in range(pieces)
    ]  # fmt: skip
    model = Model(
        name="pieces",
        kinds={kind.name: kind for kind in kinds},
        layers=tuple(kind.name for kind in kinds),
        precision=Precision.named("fp32"),
    )
    names = [f"type{number}" for number in range(len(gpus))]
    layers = {
        (kind.name, name, 1, size): LayerTimes(
            forward_s=(slow or {}).get(name, 1.0) * 1e-4 * (1 + number % 3) * (size + 1),
            backward_input_s=(slow or {}).get(name, 1.0) * 2e-4 * (1 + number % 3) * (size + 1),
            kept_bytes=1e4 * size,
        )
        for number, kind in enumerate(kinds)
        for name in names
        for size in (1, 2, 4)
    }
    groups = tuple(
        NodePool(
            type=NodeType(name=name, gpu=name, gpus=count, memory_bytes=memory, intra=FAST), count=1
        )
        for name, count in zip(names, gpus, strict=True)
    )
    profile = Profile(layers=layers)
    return Running(
        model=model, cluster=Cluster(groups=groups, network=FAST), order=tuple(range(len(gpus))),
        batch=batch, schedule=schedule, chunks=chunks, whole=profile, split=None,
    )  # fmt: skip


def seconds_of(running: Running, size: int, micro_batch: int, partition: tuple[int, ...]) -> float:
    dp = running.cluster.num_gpus // size
    places = place_ranks(
        running.cluster, running.order, tp=1, dp=dp, pp=size, micro_batch=micro_batch
    )
    plan = Plan(
        tp=1, dp=dp, pp=size, micro_batch=micro_batch, global_batch=running.batch,
        partition=partition, places=places, schedule=running.schedule,
    )  # fmt: skip
    return predict(plan, PlanInputs(running.model, running.cluster, running.whole)).seconds


@pytest.mark.parametrize("batch", [4, 12, 16])
def test_no_shape_with_balanced_stages_is_faster(batch: int) -> None:
    running = job(batch=batch)
    options = choose_option(running, most=4)
    assert [option.seconds for option in options] == sorted(option.seconds for option in options)
    best = options[0]
    assert best.seconds == pytest.approx(
        seconds_of(running, best.pipeline_size, best.micro_batch_size, best.partition)
    )
    for size, micro_batch in itertools.product((1, 2, 4), (1, 2, 3, 4)):
        if batch % (4 // size * micro_batch):
            continue
        only = choose_option(running, pipeline_sizes=(size,), micro_batches=(micro_batch,))
        assert only[0].seconds >= best.seconds
        assert (only[0].pipeline_size, only[0].micro_batch_size) == (size, micro_batch)


def test_a_model_that_needs_two_samples_gets_two() -> None:
    options = choose_option(job(batch=8), least=2, most=4)
    assert options
    assert all(option.micro_batch_size in (2, 4) for option in options)


def test_memory_is_a_limit() -> None:
    whole = choose_option(job(parameters=1e8), pipeline_sizes=(1,), micro_batches=(1,))[0]
    # The model has six pieces. Each takes 1.6 GB, including the state of Adam.
    assert whole.needed_bytes == pytest.approx(6 * 1.6e9, rel=1e-2)
    limit = whole.needed_bytes * 0.6
    options = choose_option(job(parameters=1e8, memory=limit), most=4)
    assert all(option.pipeline_size > 1 and option.needed_bytes <= limit for option in options)
    less = choose_option(job(parameters=1e8, memory=3.3e9), most=4)
    assert {option.pipeline_size for option in less} == {4}
    assert max(less[0].partition) == 2


def test_a_stage_that_keeps_much_gets_fewer_pieces() -> None:
    # The first rank stores activations of two microbatches under 1F1B, and the second rank stores
    # those of one.
    running = job(gpus=(2,), batch=8, parameters=0.0, memory=1.01e5)
    best = choose_option(running, pipeline_sizes=(2,), micro_batches=(2,))[0]
    assert best.fits
    assert best.partition[0] * 2 * 2e4 <= 1.01e5
    assert best.partition[0] < best.partition[1]


def test_a_lower_cap_of_a_rule_needs_less() -> None:
    running = job(schedule="adaptive", parameters=0.0)
    sizes: dict[str, Any] = {"pipeline_sizes": (4,), "micro_batches": (1,)}
    free = choose_option(running, **sizes)[0]
    capped = choose_option(replace(running, cap=2.0), **sizes)[0]
    assert capped.needed_bytes < free.needed_bytes / 2


def test_slow_nodes_get_less() -> None:
    running = job(gpus=(2, 2), slow={"type1": 3.0})
    best = choose_option(running, pipeline_sizes=(2,), micro_batches=(1,))[0]
    assert best.partition[0] > best.partition[1]
    turned = choose_option(replace(running, order=(1, 0)), pipeline_sizes=(2,), micro_batches=(1,))[
        0
    ]
    assert turned.partition[0] < turned.partition[1]


@pytest.mark.parametrize("schedule", ["zb-v", "interleaved", "adaptive"])
def test_every_schedule_has_a_shape(schedule: str) -> None:
    running = job(schedule=schedule, chunks=2 if schedule == "interleaved" else 1)
    options = choose_option(running, pipeline_sizes=(2,), most=4)
    assert len(options[0].partition) == running.placement(2).num_stages
    assert options[0].fits
    assert str(options[0]).startswith("2 pipelines of 2 processes, microbatches of")


def test_short_simulations_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that compiled code is not used to simulate a few thousand actions.

    All ranks wait for the plan. Loading compiled code takes half a second, and compiling takes 10
    s.
    """
    running = job(schedule="adaptive")
    compiled = choose_option(running, most=4)[0]
    expected = seconds_of(
        running, compiled.pipeline_size, compiled.micro_batch_size, compiled.partition
    )

    def refuse(rule: Any) -> Any:
        raise AssertionError(f"{rule} was compiled")

    monkeypatch.setattr(numba_kernels, "_loops", dict)
    monkeypatch.setattr(simulate, "compiled_loop", refuse)
    monkeypatch.setattr(numba_kernels, "compiled_loop", refuse)
    best = choose_option(running, most=4)[0]
    assert best.seconds == expected
    monkeypatch.setattr(numba_kernels, "LOADED_FROM", 0)
    monkeypatch.setattr(numba_kernels, "COMPILED_FROM", 0)
    with pytest.raises(AssertionError, match="was compiled"):
        choose_option(running, most=4)


@pytest.mark.parametrize(
    ("options", "required", "phrases"),
    [
        ({"batch": 2}, {"pipeline_sizes": (1,)}, ["batch_size 2", "4 processes", "pipeline_size"]),
        ({"pieces": 3}, {"pipeline_sizes": (4,)}, ["3 segments", "mark more cut points"]),
        ({"memory": 1e6}, {}, ["fit into memory", "0.001 GB", "smaller batch_size"]),
    ],
)
def test_what_is_impossible_is_named(
    options: dict[str, Any], required: dict[str, Any], phrases: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        choose_option(job(**options), most=4, **required)
    for word in phrases:
        assert word in str(refusal.value)
    assert "\n" not in str(refusal.value)


def with_frozen_pieces(running: Running, frozen: int) -> Running:
    """Returns a copy of the job ``running`` whose first ``frozen`` pieces are frozen."""
    names = set(running.model.layers[:frozen])
    kinds = {
        name: replace(kind, frozen_parameters=kind.parameters, activation_bytes=0.0)
        if name in names
        else kind
        for name, kind in running.model.kinds.items()
    }
    layers = {
        key: replace(times, backward_input_s=0.0, kept_bytes=0.0) if key[0] in names else times
        for key, times in running.whole.layers.items()
    }
    model = replace(running.model, kinds=kinds, frozen_layers=frozen)
    return replace(running, model=model, whole=replace(running.whole, layers=layers))


@pytest.mark.parametrize("schedule", ["adaptive", "1f1b"])
def test_frozen_pieces_have_no_backward_passes_gradients_or_optimizer_state(schedule: str) -> None:
    shape: dict[str, Any] = {"pipeline_sizes": (2,), "micro_batches": (2,)}
    trained = job(schedule=schedule, parameters=1e8, gpus=(2,))
    frozen = with_frozen_pieces(trained, 3)
    charged, best = (choose_option(each, **shape)[0] for each in (trained, frozen))
    assert best.partition[0] > charged.partition[0]
    assert best.seconds <= seconds_of(frozen, 2, 2, charged.partition)
    assert best.seconds < charged.seconds
    # A trained piece takes 1.6 GB, and a frozen piece takes only 0.4 GB.
    alone = [
        choose_option(each, pipeline_sizes=(1,), micro_batches=(1,))[0].needed_bytes
        for each in (trained, frozen)
    ]
    assert alone[0] - alone[1] == pytest.approx(3 * 1.2e9, rel=1e-2)
