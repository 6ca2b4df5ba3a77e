"""Runs one of four ranks. Each rank runs several programs that use the public ``Pipeline``.

Usage: ``worker.py FOLDER PROGRAM ...``. Each program checks its results. Writes the names of the
programs that passed, and the error that stopped the run, to ``FOLDER/RANK.json``.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
from models import (
    SHARED,
    WIDTH,
    WORDS,
    Knotty,
    Plain,
    Sharp,
    Single,
    Tower,
    knotty,
    make_batch,
    viewed,
    viewer,
    wasteful,
)

from megatron.adaptive import Pipeline
from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.errors import AdaptiveError, ConfigError
from megatron.adaptive.planner.model_file import read_model
from megatron.adaptive.planner.profile_file import load, make_profile
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.span_columns import match_messages

LR = 0.05
RANKS = 4


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


def decaying(parameters: Any) -> torch.optim.Optimizer:
    """Returns an optimizer with weight decay, which changes parameters even if gradients are zero.

    The optimizer still skips parameters without a gradient.
    """
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9, weight_decay=0.1)


def make(**options: Any) -> Pipeline:
    settings: dict[str, Any] = {"micro_batch_size": 2, "shared_weights": SHARED, **options}
    model = settings.pop("model", None) or knotty()
    return Pipeline(model, make_batch(4), **settings)


def make_open(**options: Any) -> Pipeline:
    return Pipeline(knotty(), make_batch(16), shared_weights=SHARED, **options)


def train(pipeline: Pipeline, batches: Sequence[Any]) -> list[float]:
    return [pipeline.step(pipeline.share(batch))[0] for batch in batches]


def reference(
    model: torch.nn.Module,
    batches: list[Any],
    clip: float = float("inf"),
    size: int = 2,
    optimizer_of: Any = sgd,
) -> tuple[list[float], list[float]]:
    """Trains the whole model in this process, and returns each step's loss and gradient norm."""
    optimizer = optimizer_of(model.parameters())
    losses, norms = [], []
    for batch in batches:
        optimizer.zero_grad()
        count = len(batch["ids"]) // size
        total = 0.0
        for start in range(0, size * count, size):
            loss = (
                model(**{name: tensor[start : start + size] for name, tensor in batch.items()})
                / count
            )
            loss.backward()
            total += float(loss.detach())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        losses.append(total)
    return losses, norms


def require_same(named: Iterable[tuple[str, torch.Tensor]], whole: torch.nn.Module) -> None:
    """Checks that the tensors in ``named`` equal the parameters and buffers of ``whole``."""
    expected = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    for name, tensor in named:
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-5)


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * RANKS
    dist.all_gather_object(values, value)
    return values


def require_refused(action: Callable[[], object], *phrases: str) -> None:
    """Checks that ``action`` raises a one-line error that contains all ``phrases`` on each rank."""
    try:
        action()
    except AdaptiveError as error:
        said = str(error)
    else:
        raise AssertionError(f"not refused: {phrases}")
    assert "\n" not in said
    for word in phrases:
        assert word in said, said


def a_model_on_meta_gets_memory_for_its_part_only() -> None:
    batches, whole = [make_batch(12, seed) for seed in range(2)], knotty()
    weights = knotty().state_dict()
    filled: list[str] = []

    def initialize(tensors: Any) -> None:
        for name, tensor in tensors.items():
            tensor.copy_(weights[name])
        filled.extend(tensors)

    losses, norms = reference(whole, batches)
    with torch.device("meta"):
        model = Knotty()
    with make(model=model, initialize=initialize) as pipeline:
        pipeline.set_optimizer(sgd)
        for batch, loss, norm in zip(batches, losses, norms, strict=True):
            assert pipeline.step(batch)[0] == pytest.approx(loss, rel=1e-5)
            assert pipeline.grad_norm == pytest.approx(norm, rel=1e-5)
        require_same(pipeline.named_parameters(), whole)
        held = [*pipeline.model.named_parameters(), *pipeline.model.named_buffers()]
        assert sorted(filled) == sorted(name for name, tensor in held if not tensor.is_meta)


def clipped_steps_on_four_ranks() -> None:
    batches, whole = [make_batch(12, seed) for seed in range(3)], knotty()
    losses, norms = reference(whole, batches, clip=0.05)
    assert min(norms) > 0.05  # The gradients must be large enough to be clipped.
    whole.eval()
    test = make_batch(4, 9)
    halves = [{n: tensor[s : s + 2] for n, tensor in test.items()} for s in (0, 2)]
    with torch.no_grad(), make() as pipeline:
        pipeline.set_optimizer(sgd, clip_norm=0.05)
        for batch, loss, norm in zip(batches, losses, norms, strict=True):
            assert pipeline.step(batch)[0] == pytest.approx(loss, rel=1e-5)
            assert pipeline.grad_norm == pytest.approx(norm, rel=1e-5)
        assert pipeline.eval(test) == pytest.approx(
            sum(float(whole(**half)) for half in halves) / 2
        )
        require_same(pipeline.named_parameters(), whole)
        buffers = [pair for pair in pipeline.model.named_buffers() if not pair[1].is_meta]
        require_same(buffers, whole)
        names = gathered({name for name, _ in pipeline.named_parameters()})
        kept = [
            parameter.numel() for parameter in pipeline.model.parameters() if not parameter.is_meta
        ]
    block = WIDTH * WIDTH + WIDTH
    # Both the first and the last rank have the embedding and the mixer.
    shared = WORDS * WIDTH + block
    assert sum(gathered(sum(kept))) == 8 * block + 2 * WIDTH + 2 * shared
    assert sum(gathered(len(buffers))) == 3
    assert "words.weight" in names[0] & names[3]
    assert not names[1] & names[2]


def a_transport_of_the_user_trains_alike() -> None:
    batches = [make_batch(8, seed) for seed in range(2)]
    losses, _ = reference(knotty(), batches)
    files = TransportConfig(transport="examples.own_transport.files:Files")
    with make(transport=files) as pipeline:
        pipeline.set_optimizer(sgd)
        assert [pipeline.step(batch)[0] for batch in batches] == pytest.approx(losses, rel=1e-5)


def replicas_train_on_their_own_samples() -> None:
    """Checks that replicas train like one process, even if a weight does not affect the loss."""
    parts = [[make_batch(8, seed + 10 * replica) for seed in range(2)] for replica in range(2)]
    batches = [{n: torch.cat([a[n], b[n]]) for n in a} for a, b in zip(*parts, strict=True)]
    whole = wasteful()
    losses, _ = reference(whole, batches, optimizer_of=decaying)
    with make(model=wasteful(), pipeline_size=2, schedule="zb-h1", partition="4-5") as pipeline:
        pipeline.set_optimizer(decaying)
        own_batches = parts[dist.get_rank() % 2]
        assert [pipeline.step(batch)[0] for batch in own_batches] == pytest.approx(losses, rel=1e-5)
        require_same(pipeline.named_parameters(), whole)


def dropout_does_not_depend_on_the_cut() -> None:
    losses = []
    for options in ({}, {"schedule": "zb-v"}, {"schedule": "gpipe", "partition": "1-1-1-6"}):
        torch.manual_seed(len(losses))
        model, before = knotty(dropout=0.3), torch.get_rng_state()
        with make(model=model, **options) as pipeline:
            pipeline.set_optimizer(sgd)
            losses.append([pipeline.step(make_batch(8))[0] for _ in range(2)])
        assert torch.equal(torch.get_rng_state(), before)
        assert losses[-1] == pytest.approx(losses[0], rel=1e-6)
    with make() as plain:
        assert plain.step(make_batch(8))[0] != pytest.approx(losses[0][0], rel=1e-6)


def fp16_skips_steps_until_the_scale_fits() -> None:
    batch, losses, overflows = make_batch(8), [], []
    with make(model=Sharp(), shared_weights=()) as pipeline:
        full = pipeline.step(batch)[0]
    with make(model=Sharp(), mixed_precision="fp16", shared_weights=()) as pipeline:
        pipeline.set_optimizer(sgd, initial_loss_scale=2.0**24, clip_norm=1.0)
        before = [parameter.detach().clone() for parameter in pipeline.parameters()]
        for step in range(16):
            loss, overflow = pipeline.step(batch)
            losses.append(loss)
            overflows.append(overflow)
            assert pipeline.loss_scale == 2.0 ** (24 - sum(overflows))
            if not step:
                pairs = zip(before, pipeline.parameters(), strict=True)
                assert all(torch.equal(parameter, other) for parameter, other in pairs)
    assert 0 < sum(overflows) < len(overflows)
    assert overflows == sorted(overflows, reverse=True)
    assert losses[0] == pytest.approx(full, rel=1e-2)
    assert losses[-1] < losses[0]
    assert gathered((losses, overflows)) == [(losses, overflows)] * RANKS


def bf16_trains() -> None:
    with make(mixed_precision="bf16", schedule="zb-h1") as pipeline:
        pipeline.set_optimizer(sgd)
        losses = [pipeline.step(make_batch(8))[0] for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


def reference_of(
    model: torch.nn.Module, steps: Sequence[Sequence[Any]], items: Sequence[Sequence[float]]
) -> list[float]:
    """Trains the model on weighted microbatches, and returns each step's loss.

    ``items`` contains the weight of each microbatch of ``steps``.
    """
    optimizer = decaying(model.parameters())
    losses = []
    for step, numbers in zip(steps, items, strict=True):
        optimizer.zero_grad()
        total = sum(numbers)
        parts = [number / total * model(**part) for part, number in zip(step, numbers, strict=True)]
        for loss in parts:
            loss.backward()
        optimizer.step()
        losses.append(sum(float(loss.detach()) for loss in parts))
    return losses


def microbatches_have_shapes_of_their_own() -> None:
    """Checks that microbatches with different numbers of images give the whole model's results."""
    images = ([3, 0, 8, 1, 2, 0, 0, 1], [0, 0, 0, 0], [0, 5, 0, 1])
    steps = [[viewed(n, 3 + n, n) for n in counts] for counts in images]
    # The messages of this microbatch are larger than the channels' buffers.
    steps[1][2] = viewed(0, 300)
    items = [[float(part["ids"].shape[1] - 1) for part in step] for step in steps]
    whole = viewer()
    losses = reference_of(whole, steps, items)
    whole.eval()
    with torch.no_grad():
        evaluated = sum(float(whole(**part)) for part in steps[0][:5]) / 5
    for options in (
        {},
        {"schedule": "interleaved", "chunks": 2, "pipeline_size": 2},
        {"schedule": "zb-v"},
    ):
        model = viewer()
        with Pipeline(
            model,
            [viewed(2, 5, 1), viewed(0, 4, 2)],
            shared_weights=[["words.weight", "head.weight"]],
            decisive_entries=["sizes"],
            **options,  # type: ignore[arg-type]
        ) as pipeline:
            pipeline.set_optimizer(decaying)
            for step, numbers, loss in zip(steps, items, losses, strict=True):
                own_batch = pipeline.share(step)
                own_items = pipeline.share(numbers)
                assert pipeline.step(own_batch, num_items=own_items)[0] == pytest.approx(
                    loss, rel=1e-5
                )
            require_same(pipeline.named_parameters(), whole)
            loss = pipeline.eval(pipeline.share(steps[0][:5]))
            assert loss == pytest.approx(evaluated, rel=1e-5)


def _unequal_steps() -> tuple[list[dict[str, torch.Tensor]], list[list[dict[str, torch.Tensor]]]]:
    """Returns a sample batch, and steps whose microbatches have different costs."""
    kinds = [viewed(2, 5, 1), viewed(0, 4, 2), viewed(5, 4, 5)]
    return kinds, [
        [kinds[kind] for kind in step]
        for step in ((2, 0, 1, 1, 0, 1, 0, 1), (2, 1, 2, 1, 1), (0, 1, 2, 1, 2, 1, 1, 1, 0))
    ]


def _trained_by_cost(**options: Any) -> tuple[list[float], dict[str, torch.Tensor], list[Any]]:
    """Trains with dropout, and returns losses, parameters, and each step's shares and orders.

    ``options`` are settings of the pipeline.
    """
    sample, steps = _unequal_steps()
    losses, places = [], []
    options |= {"decisive_entries": ["sizes"], "slicing": "record"}
    with Pipeline(viewer(dropout=0.3), sample, **options) as pipeline:
        pipeline.set_optimizer(decaying)
        for step in [*steps, steps[0]]:
            share = pipeline.share(step)
            losses.append(pipeline.step(share)[0])
            places.append((getattr(share, "numbers", None), pipeline.last_order))
        parameters = {name: part.detach() for name, part in pipeline.named_parameters()}
        assert gathered(pipeline.costs) == [pipeline.costs] * RANKS
        assert bool(pipeline.costs) == ("time" in options.values())
    return losses, parameters, places


def microbatches_are_ordered_and_dealt_by_cost() -> None:
    """Checks that dropout does not depend on a microbatch's rank and order."""
    losses, _, _ = _trained_by_cost(pipeline_size=4, schedule="1f1b")
    two: dict[str, Any] = {"pipeline_size": 2, "partition": "4-4"}
    timed, _, _ = _trained_by_cost(order="time", dealing="time", **two)
    assert timed == pytest.approx(losses, rel=1e-5)
    by_work, parameters, places = _trained_by_cost(order="work", dealing="work", **two)
    assert by_work == pytest.approx(losses, rel=1e-5)
    by_step = zip(*gathered(places), strict=True)
    numbers = [sorted({share for share, _ in of_step}) for of_step in by_step]
    for step, shares in zip((8, 5, 9, 8), numbers, strict=True):
        assert sorted(sum(shares, ())) == list(range(step))
    # A round-robin order would give one replica both costly microbatches of the second step.
    assert not any({0, 2} <= set(share) for share in numbers[1])
    assert any(list(order) != sorted(order) for of_rank in gathered(places) for _, order in of_rank)
    again, same, _ = _trained_by_cost(order="work", dealing="work", **two)
    assert again == by_work
    for name, parameter in same.items():
        assert torch.equal(parameter, parameters[name]), name


def disagreement_on_dealt_microbatches_is_named() -> None:
    """Checks that all ranks raise an error if they disagree about the microbatches of a step.

    The error must be raised before the step, so that the step can be repeated.
    """
    rank = dist.get_rank()
    with make(pipeline_size=2, dealing="work") as pipeline:
        dictionary = make_batch(4)
        text = [make_batch(2, seed, length) for seed, length in enumerate((5, 3, 5, 3))]
        refused = require_refused
        shared = pipeline.share(text)
        other = pipeline.share(text if pipeline.replica else [*text, text[0]])
        refused(lambda: pipeline.step(other), "ranks", "distributed different batches")
        shuffled = pipeline.share(text[::-1] if pipeline.replica else text)
        refused(lambda: pipeline.step(shuffled), "ranks", "distributed different batches")
        bad: Any = [] if rank == 3 else shared
        phrases = (
            ("batch is empty",) if rank == 3 else ("rank 3 rejected its batch: batch is empty",)
        )
        refused(lambda: pipeline.step(bad), *phrases)
        kind: Any = dictionary if pipeline.replica else shared
        refused(lambda: pipeline.step(kind), "have different kinds of batches")
        items = [1.0] * len(shared) if pipeline.replica else None
        refused(lambda: pipeline.step(shared, num_items=items), "disagree on num_items")
        refused(lambda: pipeline.step(list(shared)), "requires a list made by share()")
        parameter = next(pipeline.parameters())
        parameter.requires_grad_(rank != 2)
        phrases = (
            ("requires_grad of",) if rank == 2 else ("rank 2 rejected its batch: requires_grad",)
        )
        refused(lambda: pipeline.step(shared), *phrases)
        parameter.requires_grad_(True)
        if rank == 1:  # Let this rank determine the order by a different rule.
            pipeline._maker.balance.order_of = lambda parts, work: [*range(len(parts))][::-1]
        refused(lambda: pipeline.step(shared), "ranks 1 and 3", "different orders")
        vars(pipeline._maker.balance).pop("order_of", None)
        refused(lambda: pipeline.share([1.0, 2.0]), "accepts only microbatches")
        refused(lambda: pipeline.eval(shared) if rank else pipeline.step(shared), "different steps")
        assert pipeline.steps == 0
        loss, _ = pipeline.step(shared)
        assert gathered(loss) == [loss] * RANKS


def what_differs_between_ranks_is_named() -> None:
    """Checks that ranks with different settings or batches raise errors and do not wait forever."""
    rank = dist.get_rank()

    def frozen() -> Pipeline:
        model = knotty()
        model.blocks[3].weight.requires_grad_(rank != 2)
        return make(model=model)

    require_refused(frozen, "frozen parameter blocks.3.weight [8, 8] float32 on rank 2, but train")
    schedule = "gpipe" if rank == 1 else "1f1b"
    require_refused(lambda: make(schedule=schedule), "schedule='gpipe' on rank 1, but sched")
    require_refused(lambda: make(seed=rank), "seed=1 on rank 1, but seed=0 on rank 0")
    with make() as pipeline:
        assert train(pipeline, [make_batch(4)])


class Failing(torch.nn.Module):
    """Model that raises an error in its forward pass, first on rank 3 and later on other ranks."""

    def __init__(self, raised: Path) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(RANKS))
        self.raised = raised

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises an error."""
        while dist.get_rank() != 3 and not self.raised.is_file():
            time.sleep(0.02)
        raise ConfigError(f"rank {dist.get_rank()} refuses")


def an_error_of_one_rank_does_not_wait_for_the_others() -> None:
    """Checks that an error of one rank is raised before the ranks' process group times out."""
    raised = Path(sys.argv[1]) / "raised"
    model = Failing(raised)
    sample = {"x": torch.ones(2, WIDTH)}
    require_refused(lambda: Pipeline(model, sample, micro_batch_size=1), "refuses")
    raised.touch()
    dist.barrier()
    with make() as pipeline:
        loss, _ = pipeline.step(make_batch(4))
        assert gathered(loss) == [loss] * RANKS


def steps_are_traced() -> None:
    folder = Path(sys.argv[1]) / "traces"
    with make(trace_dir=str(folder)) as pipeline:
        for _ in range(2):
            pipeline.step(make_batch(8))
    dist.barrier()
    run = read_run(folder)
    assert run.iterations == run.complete_iterations() == (1, 2)
    for rank in run.ranks.values():
        table = rank.table([2])
        for kind in ("reduce", "optimizer", "step"):
            assert table.where(kind).sum() == 1, kind
        assert table.where("F").sum() == table.where("B").sum() == 4
    messages = match_messages({rank: trace.table() for rank, trace in run.ranks.items()})
    # Each step sends a message for each of 3 borders, 4 microbatches and 2 directions.
    assert len(messages) == 2 * 3 * 4 * 2


def segments_and_collectives_are_traced() -> None:
    batches = [make_batch(8, seed) for seed in (1, 2)]
    with make(pipeline_size=2, partition="4-5") as pipeline:
        plain = train(pipeline, batches)
    folder = Path(sys.argv[1]) / "detailed"
    with make(
        pipeline_size=2,
        partition="4-5",
        trace_dir=str(folder),
        trace_detail="collectives",
        transport=TransportConfig(transport="tcp"),
    ) as pipeline:
        assert train(pipeline, batches) == plain
        partition = pipeline.partition
    dist.barrier()
    run = read_run(folder)
    starts = (0, *itertools.accumulate(partition))
    for trace in run.ranks.values():
        header = trace.header
        assert header.transport == "tcp"
        assert len(header.layer_kinds) == sum(partition)
        segments = range(starts[header.pp_rank], starts[header.pp_rank + 1])
        for iteration in (1, 2):
            rows = trace.layers(iteration)
            assert [row[0] for row in rows] == list(segments)
            assert {row[3] for row in rows} == {2}
            table = trace.table([iteration])
            for column, kind in ((1, "F"), (2, "B")):
                of_segments = [row[column] for row in rows]
                assert min(of_segments) > 0
                assert sum(of_segments) <= table.duration_ns[table.where(kind)].sum()
            kinds = {group.kind: group.size for group in trace.collectives(iteration)}
            assert (kinds["data"], kinds["optimizer"]) == (2, RANKS)
            assert any(kind.startswith("shared weights 0-1") for kind in kinds)
    require_refused(
        partial(make, trace_dir="x", trace_detail="layer"), "not one of actions, layers"
    )


def blocks_and_shared_weights_are_found() -> None:
    batches = [{"x": torch.randn(8, WIDTH)} for _ in range(2)]
    for batch in batches:
        dist.broadcast(batch["x"], 0)
    whole = Plain()
    optimizer = sgd(whole.parameters())
    expected = []
    for batch in batches:
        optimizer.zero_grad()
        loss = whole(**batch)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    with Pipeline(Plain(), batches[0], micro_batch_size=2) as pipeline:
        assert pipeline.cut_points == tuple(f"blocks.{n}.cut_point" for n in range(4))
        assert pipeline.shared_weights == (("first.weight", "last.weight"),)
        pipeline.set_optimizer(sgd)
        assert train(pipeline, batches) == pytest.approx(expected, rel=1e-5)
        require_same(pipeline.named_parameters(), whole)
    shared = tuple(tuple(names) for names in SHARED)
    losses = []
    for groups in ((), SHARED):
        with make(shared_weights=groups) as pipeline:
            assert pipeline.shared_weights == shared
            losses.append(train(pipeline, [make_batch(4)]))
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(reference(knotty(), [make_batch(4)])[0], rel=1e-5)


def wrong_settings_are_named_on_every_rank() -> None:
    """Checks that each rank reports wrong settings, and can create a pipeline afterwards."""
    for options, phrases in (
        (
            {"schedule": "interleaved", "chunks": 3},
            ["8 cut points make 9 segments", "12 stages", "at least 11"],
        ),
        ({"pipeline_size": 3}, ["multiple of pipeline_size 3", "got 4"]),
        ({"partition": "1-1-1"}, ["1-1-1", "9 segments", "4 stages"]),
        ({"weights": [1.0]}, ["weights must have", "9 segments", "got 1"]),
        ({"schedule": "best"}, ["'best'", "1f1b"]),
        ({"schedule": "1f1b", "chunks": 2}, ["schedule 1f1b requires chunks=1", "got 2"]),
        ({"mixed_precision": "fp8"}, ["'fp8'", "bf16"]),
        ({"schedule": "1f1b", "split_backward": True}, ["split_backward=True", "1f1b"]),
    ):
        require_refused(lambda options=options: make(**options), *phrases)  # type: ignore[misc]
    refused = ["4 stages", "no list of repeated blocks", "CutPoint.after(module)"]
    require_refused(lambda: make(model=Single(), shared_weights=()), *refused)
    with make() as pipeline:
        other: Any = make_batch(2)["ids"]
        for batch, phrases in (
            (make_batch(3), ["3 samples", "microbatches of 2"]),
            ({"ids": other}, ["the batch lacks 'label'"]),
            (other, ["a Tensor", "dictionary"]),
            ({**make_batch(2), "ids": other.int()}, ["batch['ids']", "torch.int32", "torch.int64"]),
        ):
            require_refused(lambda batch=batch: pipeline.step(batch), *phrases)  # type: ignore[misc]
        foreign = sgd(knotty().parameters())
        phrases = ["do not belong to this process's stages", "pipeline.parameters()"]
        require_refused(lambda: pipeline.set_optimizer(foreign), *phrases)
        assert not pipeline.step(make_batch(2))[1]


def without_sizes_the_planners_best_is_taken() -> None:
    batches, whole = [make_batch(16, seed) for seed in range(2)], knotty()
    with make_open() as pipeline:
        plan = pipeline.plan
        assert plan is not None
        pipeline.set_optimizer(sgd)
        losses = train(pipeline, batches)
        size, replicas = pipeline.micro_batch_size, pipeline.replicas
        assert losses == pytest.approx(reference(whole, batches, size=size)[0], rel=1e-5)
        require_same(pipeline.named_parameters(), whole)
        if replicas > 1:
            require_refused(lambda: pipeline.share(make_batch(replicas + 1)), "cannot be divided")
        assert pipeline.pipeline_size * replicas == RANKS
        assert 16 % (replicas * size) == 0
        shape = [pipeline.pipeline_size, replicas, size, list(pipeline.partition)]
        options = (plan.best, *plan.others)
        shapes = [
            [o.pipeline_size, o.replicas, o.micro_batch_size, list(o.partition)] for o in options
        ]
        assert shape == shapes[0]
        assert shape not in shapes[1:]
        seconds = [entry.seconds for entry in options]
        assert seconds == sorted(seconds)
        assert "predicted for a step of 16 samples; next best" in str(plan)
        assert gathered(str(plan)) == [str(plan)] * RANKS
    assert {entry["within"] for entry in plan.profile.links} == {True}
    assert [entry["ranks"] for entry in plan.profile.reductions] == [2, 4]
    path = Path(sys.argv[1]) / f"profile-{dist.get_rank()}.json"
    plan.profile.write(path)
    rows = load(path)["layers"]
    assert {row["kind"] for row in rows} == {f"cut-{n}" for n in range(9)}
    assert {row["micro_batch"] for row in rows} == {1, 2, 4}
    assert read_model(str(path)).num_layers == 9
    assert make_profile(load(path)).all_reduce
    assert make_profile(load(path)).intra_links


def memory_keeps_the_model_from_one_process() -> None:
    """Checks that the planner chooses several stages if the whole model does not fit in memory."""
    torch.manual_seed(4)
    wide, sample = Tower(width=64, layers=6), {"x": torch.randn(8, 64)}
    limit = 0.6 * 16 * sum(entry.numel() for entry in wide.parameters())
    options: dict[str, Any] = {"pipeline_size": "auto", "micro_batch_size": 1}
    with Pipeline(wide, sample, memory_limit_bytes=limit, **options) as small:
        plan = small.plan
        assert plan is not None
        assert small.pipeline_size > 1
        assert small.micro_batch_size == 1
        assert max(entry.needed_bytes for entry in (plan.best, *plan.others)) <= limit
        loss = small.step(small.share(sample))[0]
    assert gathered(loss) == [loss] * RANKS


def what_is_given_is_kept() -> None:
    with make_open(pipeline_size=2, partition="4-5", batch_size=8, schedule="1f1b") as kept:
        assert kept.plan is not None
        settings = [kept.pipeline_size, list(kept.partition), kept.plan.batch_size]
        assert settings == [2, [4, 5], 8]


def what_cannot_be_planned_is_named_on_every_rank() -> None:
    for options, phrases in (
        ({"memory_limit_bytes": 2000.0}, ["fit into memory", "2e-06 GB", "more processes"]),
        ({"batch_size": 0}, ["batch_size must be", "at least 1, got 0"]),
        (
            {"batch_size": 6, "pipeline_size": 1},
            ["batch_size 6", "4 processes", "pipeline_size 1", "multiple of 4"],
        ),
        ({"pipeline_size": 3}, ["multiple of pipeline_size 3", "got 4"]),
        ({"schedule": "best"}, ["'best'", "1f1b"]),
    ):
        require_refused(lambda options=options: make_open(**options), *phrases)  # type: ignore[misc]
    require_refused(lambda: Pipeline(knotty(), {}), "no entries")


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Returns an optimizer with two parameter groups that have different options."""
    flat = [entry for entry in parameters if entry.dim() < 2]
    wide = [entry for entry in parameters if entry.dim() >= 2]
    groups = [{"params": wide}, {"params": flat, "weight_decay": 0.0, "lr": 0.02}]
    return torch.optim.AdamW([entry for entry in groups if entry["params"]], lr=0.01)


def training_goes_on_in_any_other_shape() -> None:
    folder = Path(sys.argv[1]) / "checkpoints"
    batches = [make_batch(8, seed) for seed in range(5)]
    with make(model=knotty(dropout=0.3), seed=77) as pipeline:
        pipeline.set_optimizer(adamw)
        train(pipeline, batches[:3])
        for group in pipeline._update.optimizer.param_groups:
            group["lr"] *= 0.5
        assert pipeline.save(folder, extra={"epoch": 3}).name == "step_00000003"
        evaluated = pipeline.eval(batches[0])
        expected = train(pipeline, batches[3:])
        pipeline.save(folder)
    for options in ({"pipeline_size": 2, "partition": "2-7"}, {"pipeline_size": 1}):
        torch.manual_seed(9)
        other = type(knotty())(dropout=0.3)  # This model starts with different weights.
        with make(model=other, **options) as pipeline:
            pipeline.set_optimizer(adamw)
            assert pipeline.load(folder, step=3) == {"epoch": 3}
            assert pipeline.eval(batches[0]) == pytest.approx(evaluated, rel=1e-5)
            assert train(pipeline, batches[3:]) == pytest.approx(expected, rel=1e-5)
            assert pipeline.steps == 5
            pipeline.save(folder)  # Saving step 5 again must replace the previous checkpoint.
    require_broken_checkpoints_refused(folder)
    with make(model=knotty(dropout=0.3), schedule="zb-v", pipeline_size=2) as pipeline:
        pipeline.set_optimizer(adamw)
        pipeline.load(folder, step=3)
        assert train(pipeline, batches[3:4]) == pytest.approx(expected[:1], rel=1e-5)
        pipeline.save(folder, keep=2)
    # Steps 3, 4 and 5 were saved. Only the last two must remain.
    kept = sorted(path.name for path in folder.iterdir() if path.name != ".lease")
    assert kept == ["step_00000004", "step_00000005"]


def require_broken_checkpoints_refused(folder: Path) -> None:
    with make() as pipeline:
        load, save = pipeline.load, pipeline.save
        require_refused(lambda: load(folder), "set_optimizer before load", "optimizer=False")
        require_refused(lambda: load(folder, step=8), "no checkpoint of step 8", "3, 5")
        require_refused(lambda: load(folder / "none"), "none", "no complete checkpoint")
        require_refused(lambda: save(folder, extra={"a": torch.ones(1)}), "extra", "JSON")
        require_refused(lambda: save(folder, keep=0), "keep must be", "got 0")
        inside = folder / "step_00000003" / ".metadata"
        require_refused(lambda: save(inside), ".metadata", "choose another folder")
        pipeline.set_optimizer(sgd)
        require_refused(lambda: load(folder), "AdamW", "SGD")
        load(folder, optimizer=False)
        newest = folder / "step_00000005"
        (whole,) = newest.glob("__0_*.distcp")
        size = whole.stat().st_size
        for content, phrases in (
            (b"", ["step_00000005", "has 0 bytes instead of"]),
            (b"x" * size, ["step_00000005", "__0_0.distcp is damaged (block 0", "rank 0"]),
        ):
            dist.barrier()
            if dist.get_rank() == 0:
                whole.write_bytes(content)
            dist.barrier()
            require_refused(lambda: load(folder, optimizer=False, step=5), *phrases)
        load(folder, optimizer=False)  # Without ``step``, the newest complete checkpoint is loaded.
    with make(model=knotty(blocks=9)) as larger:
        require_refused(
            lambda: larger.load(folder, optimizer=False), "the checkpoint lacks it", "blocks.8"
        )


def checkpoints_go_over_the_nodes_own_disks() -> None:
    """Checks that nodes save to local disks and then copy the checkpoints to a shared folder.

    Each of the four ranks represents a node.
    """
    folder, rank = Path(sys.argv[1]), dist.get_rank()
    shared, disk = folder / "shared", folder / "disk"
    os.environ["MEGATRON_ADAPTIVE_NODE"] = f"node-{rank}"
    batches = [make_batch(8, seed) for seed in range(7)]
    losses: dict[int, float] = {}

    def go_on(total: int, **options: Any) -> None:
        torch.manual_seed(9)
        with make(model=knotty(dropout=0.3), batch_size=8, seed=77, **options) as pipeline:
            pipeline.set_optimizer(adamw)
            for step in pipeline.loop(
                total, folder=shared, local_folder=disk, save_interval=2, keep=2
            ):
                assert step == len(losses)
                losses[step], _ = pipeline.step(pipeline.share(batches[step]))

    alike = {"partition": "2-2-2-3"}  # The equal partition gives both runs the same stages.
    go_on(5, **alike)
    (local,) = disk.glob(f"shared-*/node-{rank}")
    assert sorted(path.name for path in local.iterdir()) == ["iter_0000004", "iter_0000005"]
    assert [path.name for path in local.glob("iter_0000005/*.distcp")] == [f"__{rank}_0.distcp"]
    assert sorted(path.name for path in shared.iterdir() if path.name != ".lease") == [
        "step_00000004",
        "step_00000005",
    ]
    dist.barrier()
    # Only rank 3 needs this file, and it has an undamaged copy on the disk of its own node. The
    # test fails if a rank reads the damaged file.
    if rank == 3:
        (last,) = shared.glob("step_00000005/__3_0.distcp")
        last.write_bytes(bytes(last.stat().st_size))
    dist.barrier()
    go_on(6, **alike)  # Each rank must read from the disk of its own node.
    # These stages make each rank read files that other ranks have saved.
    go_on(7, pipeline_size=2, partition="2-7")
    del os.environ["MEGATRON_ADAPTIVE_NODE"]
    with make(model=knotty(dropout=0.3), batch_size=8, seed=77) as pipeline:
        pipeline.set_optimizer(adamw)
        assert list(losses.values()) == pytest.approx(train(pipeline, batches), rel=1e-6)


def main() -> None:
    faulthandler.dump_traceback_later(float(os.environ["WATCHDOG_S"]), exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    done: list[str] = []
    error = ""
    for name in sys.argv[2:]:
        try:
            globals()[name]()
            done.append(name)
        except Exception:
            error = f"{name}: {traceback.format_exc()}"
        report = json.dumps({"done": done, "error": error})
        (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(report)
        if error:
            # Exit immediately, because other ranks may wait for messages of this rank forever.
            os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
