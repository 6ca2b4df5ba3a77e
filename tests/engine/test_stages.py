"""Tests what chunks keep until their backward passes, and when gradients are reduced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.adaptive.errors import ConfigError, ScheduleError

from .split_gpt import (
    HIDDEN,
    SAMPLES,
    SEQUENCE,
    build,
    core_config,
    drive,
    job,
    make_stages,
    pairs,
    run_step,
    with_weights,
)

# isort: split
from megatron.core.distributed import DistributedDataParallelConfig

from megatron.adaptive.engine.deferred_layers import attach_stores
from megatron.adaptive.engine.executor import ActivationMeter
from megatron.adaptive.engine.stages import GradientSync


class Product(torch.nn.Module):
    """Module that keeps its input of shape ``[2, 4]`` and one result of shape ``[2, 3]``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        # Both factors are views of the same storage, so this storage must be counted only once.
        rows = self.linear(values)
        return rows.view(-1) * rows.t().t().reshape(-1)


INPUT_BYTES = 2 * 4 * 4
RESULT_BYTES = 2 * 3 * 4


def test_meter_counts_storages_without_parameters_once_for_each_chunk() -> None:
    meter, model = ActivationMeter(), Product()
    assert meter.bytes_of(0) == 0
    for chunk, rows in ((0, 2), (0, 20), (1, 20)):
        with meter.measure(chunk, model.parameters()):
            output = model(torch.ones(rows, 4, requires_grad=True))
    assert meter.bytes_of(0) == INPUT_BYTES + RESULT_BYTES
    assert meter.bytes_of(1) == 10 * meter.bytes_of(0)
    # After the measurement, the backward pass must still work.
    output.sum().backward()
    assert model.linear.weight.grad is not None


def test_meter_forgets_a_forward_that_failed() -> None:
    meter, model = ActivationMeter(), Product()

    def fail() -> None:
        with meter.measure(0, model.parameters()):
            model(torch.ones(2, 4))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert meter.bytes_of(0) == 0
    with meter.measure(0, model.parameters()):
        model(torch.ones(2, 4))
    assert meter.bytes_of(0) == INPUT_BYTES + RESULT_BYTES


class Diary:
    """Creates chunks, and records the events of their gradient synchronization as a list."""

    def __init__(self, *, explicit: bool, chunks: int = 2, ends_step: bool = False) -> None:
        self.events: list[str] = []
        self.chunks = [torch.nn.Linear(1, 1) for _ in range(chunks)]
        self.sync = GradientSync(
            SimpleNamespace(
                no_sync_func=[self._hold(number) for number in range(chunks)],
                grad_sync_func=[self._start(n) for n in range(chunks)] if explicit else None,
            ),
            self.chunks,
            ends_step=ends_step,
        )

    def last_weights(self, *order: int) -> None:
        for chunk in order:
            self.events.append(f"weights {chunk}")
            self.sync.after_last_weights(chunk)

    def _hold(self, number: int) -> Callable[[], Any]:
        @contextlib.contextmanager
        def hold() -> Iterator[None]:
            self.events.append(f"hold {number}")
            yield
            self.events.append(f"let go {number}")

        return hold

    def _start(self, number: int) -> Callable[[Any], None]:
        def start(parameters: Any) -> None:
            ids = [id(parameter) for parameter in parameters]
            assert ids == [id(parameter) for parameter in self.chunks[number].parameters()]
            self.events.append(f"reduce {number}")

        return start

    def last_backwards(self) -> None:
        for chunk in reversed(range(len(self.chunks))):
            self.sync.before_last_backward(chunk)
            self.events.append(f"backward {chunk}")
            self.sync.after_last_backward(chunk)


@pytest.mark.parametrize(
    ("explicit", "events"),
    [
        (False, "hold 0, hold 1, let go 1, backward 1, let go 0, backward 0"),
        (True, "hold 0, hold 1, backward 1, let go 1, reduce 1, backward 0, let go 0, reduce 0"),
    ],
    ids=["within the last backward", "after it"],
)
def test_reduction_happens_with_the_last_backward(explicit: bool, events: str) -> None:
    diary = Diary(explicit=explicit)
    diary.sync.hold()
    diary.sync.hold()  # The second call must have no effect.
    diary.last_backwards()
    diary.sync.release()
    assert ", ".join(diary.events) == events


def test_the_only_chunk_of_the_first_rank_reduces_within_its_last_backward() -> None:
    # The step ends with this backward pass, so a later reduction would not overlap with anything.
    diary = Diary(explicit=True, chunks=1, ends_step=True)
    diary.sync.hold()
    diary.last_backwards()
    diary.sync.release()
    assert diary.events == ["hold 0", "let go 0", "backward 0"]
    # Several chunks reduce one after another, each after its last backward pass.
    diary = Diary(explicit=True, ends_step=True)
    diary.last_backwards()
    assert diary.events == ["backward 1", "reduce 1", "backward 0", "reduce 0"]


@pytest.mark.parametrize(
    ("order", "reductions"),
    [
        ((2, 1, 0), "weights 2, reduce 2, weights 1, reduce 1, weights 0, reduce 0"),
        ((0, 1, 2), "weights 0, weights 1, weights 2, reduce 2, reduce 1, reduce 0"),
        ((1, 2, 0), "weights 1, weights 2, reduce 2, reduce 1, weights 0, reduce 0"),
        ((2, 0, 1), "weights 2, reduce 2, weights 0, weights 1, reduce 1, reduce 0"),
    ],
)
def test_split_backwards_reduce_from_the_last_chunk(order: Any, reductions: str) -> None:
    # Replicas may finish their chunks in different orders, but all must reduce in the same order.
    diary = Diary(explicit=True, chunks=3)
    diary.sync.hold()
    diary.last_weights(*order)
    diary.sync.release()
    seen = [event for event in diary.events if not event.startswith(("hold", "let go"))]
    assert ", ".join(seen) == reductions
    # The context ``no_sync_func`` must end directly before the reduction of its chunk.
    for number in range(3):
        index = diary.events.index(f"let go {number}")
        assert diary.events[index + 1] == f"reduce {number}"


@pytest.mark.parametrize("held", [False, True])
def test_split_backwards_reduce_where_hooks_would_have(held: bool) -> None:
    chunk = torch.nn.Linear(1, 1)
    reductions: list[int] = []
    chunk.start_grad_sync = lambda: reductions.append(1)
    hold = contextlib.nullcontext if held else None
    sync = GradientSync(SimpleNamespace(no_sync_func=hold, grad_sync_func=None), [chunk])
    sync.hold()
    sync.after_last_weights(0)
    assert len(reductions) == int(held)


def test_split_backwards_need_something_to_reduce_with() -> None:
    diary = Diary(explicit=False, chunks=1)
    diary.sync.hold()
    with pytest.raises(ConfigError, match="chunk 0 has a no_sync_func, but is a Linear without"):
        diary.last_weights(0)


def test_an_error_leaves_nothing_held_back() -> None:
    diary = Diary(explicit=True)
    diary.sync.hold()
    diary.sync.before_last_backward(1)
    diary.sync.after_last_backward(1)
    diary.sync.release()
    assert diary.events == ["hold 0", "hold 1", "let go 1", "reduce 1", "let go 0"]


def test_one_function_serves_one_chunk_only() -> None:
    config = SimpleNamespace(no_sync_func=contextlib.nullcontext, grad_sync_func=None)
    GradientSync(config, [torch.nn.Linear(1, 1)]).hold()
    with pytest.raises(
        ConfigError, match="synchronization needs a list with one function for each of the 2 chunks"
    ):
        GradientSync(config, [torch.nn.Linear(1, 1)] * 2)


@pytest.fixture
def one_process() -> Iterator[None]:
    with job():
        yield


@pytest.mark.usefixtures("one_process")
class TestSplit:
    """Tests stages that split backward passes, for models of one or two chunks."""

    def test_activations_and_what_is_retained(self) -> None:
        core = core_config(add_bias_linear=False)
        chunks = build(core, chunks=2, rope=True)
        stores = attach_stores(chunks)
        stages = make_stages(chunks, 2, stores)
        order = with_weights(pairs(2, 2), late=2, pieces=1)
        assert [stages.retained_bytes(chunk, 0) for chunk in (0, 1)] == [0, 0]
        drive(stages, [action for action in order if action[0] != "W"], 2)
        row = SEQUENCE * SAMPLES * HIDDEN * 4
        # The four linear layers of a transformer layer keep inputs of 1 + 1 + 1 + 4 rows and
        # gradients of 3 + 1 + 4 + 1 rows. The embedding keeps its tokens and a gradient.
        tokens = SEQUENCE * SAMPLES * 8
        first = stages.retained_bytes(0, 0)
        assert first == (2 * 16 + 1) * row + tokens
        assert stages.activation_bytes(0, 0) > 0
        drive(stages, [action for action in order if action[0] == "W"], 2)
        assert [store.pending for store in stores] == [0, 0]
        assert stages.retained_bytes(0, 0) == first
        stages.finish()

    def test_reduction_starts_with_the_last_piece(self) -> None:
        core = core_config()
        chunks = build(core, chunks=2)
        events: list[str] = []
        core.no_sync_func = [chunk.no_sync for chunk in chunks]
        core.grad_sync_func = [
            lambda _, number=number: events.append(f"reduce {number}") for number in (0, 1)
        ]
        stages = make_stages(chunks, 2, attach_stores(chunks))
        for chunk in chunks:
            chunk.zero_grad_buffer()
        compute = stages.weights

        def weights(*piece: int) -> None:
            compute(*piece)
            events.append(f"weights {piece}")

        stages.weights = weights  # type: ignore[method-assign]
        drive(stages, with_weights(pairs(2, 2), late=0, pieces=3), 2)
        stages.finish()
        assert len(events) == 2 * 2 * 3 + 2
        for chunk in (1, 0):
            index = events.index(f"reduce {chunk}")
            assert events[index + 1] == f"weights {(chunk, 1, 2, 3)}"

    @pytest.mark.parametrize("overlap", [False, True])
    def test_the_first_rank_reduces_with_hooks(self, overlap: bool) -> None:
        core = core_config()
        wrapper = DistributedDataParallelConfig(overlap_grad_reduce=overlap)
        (chunk,) = chunks = build(core, settings=wrapper)
        order = pairs(1, 2)
        core.no_sync_func = chunk.no_sync
        core.grad_sync_func = lambda _: pytest.fail("the hooks have reduced the gradients")
        run_step(chunks, order)  # megatron-core reduces the first gradients at the end of the step.
        chunk.zero_grad_buffer()
        stages = make_stages(chunks, 2)
        drive(stages, order[:-1], 1)
        assert all(group.grad_reduce_handle is None for group in chunk.bucket_groups)
        drive(stages, order[-1:], 1)
        stages.finish()
        reduced = [group.grad_reduce_handle is not None for group in chunk.bucket_groups]
        assert reduced == [overlap] * len(reduced)

    def test_parameters_of_all_chunks_are_gathered_at_the_start(self) -> None:
        # If a chunk gathered its parameters in its first forward pass, it would have to wait.
        core = core_config()
        chunks = build(core, chunks=3)
        events: list[int] = []
        core.param_sync_func = [
            lambda _, number=number: events.append(number) for number in range(3)
        ]
        make_stages(chunks, 1).gather_parameters()
        assert events == [0, 1, 2]
        events.clear()
        chunks[1].bucket_groups[0].param_gather_dispatched = True
        make_stages(chunks, 1).gather_parameters()
        assert events == [0, 2]
        events.clear()
        make_stages(chunks, 1, forward_only=True).gather_parameters()
        assert events == []

    def test_an_error_leaves_no_store_active(self) -> None:
        chunks = build(core_config())
        stores = attach_stores(chunks)
        stages = make_stages(chunks, 2, stores)
        drive(stages, [("F", 0, 0), ("B", 0, 0)], 1)
        assert stores[0].active
        assert stores[0].pending == 1
        stages.finish()
        assert not stores[0].active
        assert stores[0].pending == 0
        run_step(chunks, pairs(1, 2))

    def test_whole_backwards_leave_nothing_for_later(self) -> None:
        stages = make_stages(build(core_config(), chunks=2), 1)
        text = "chunk 0, microbatch 0 were requested in a step that does not split backward passes"
        with pytest.raises(ScheduleError, match=text):
            stages.weights(0, 0, 0, 1)
        stages.finish()
