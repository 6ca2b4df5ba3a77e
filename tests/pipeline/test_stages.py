"""What a rank's chunks keep between forward and backward, and when their gradients are reduced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.adaptive import accelerator
from megatron.adaptive.errors import ConfigError

accelerator.install()

from megatron.adaptive.pipeline.stages import ActivationMeter, GradientSync  # noqa: E402


class Product(torch.nn.Module):
    """Keeps its input and one result: ``[2, 4] -> [2, 3]`` in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        # The product is of two views of one storage, which counts once.
        rows = self.linear(values)
        return rows.view(-1) * rows.t().t().reshape(-1)


INPUT_BYTES = 2 * 4 * 4
RESULT_BYTES = 2 * 3 * 4


def test_meter_counts_storages_without_parameters() -> None:
    meter, model = ActivationMeter(), Product()
    assert meter.bytes_of(0) == 0
    with meter.measure(0, model):
        output = model(torch.ones(2, 4, requires_grad=True))
    assert meter.bytes_of(0) == INPUT_BYTES + RESULT_BYTES
    assert meter.bytes_of(1) == 0
    # What was watched still has a backward.
    output.sum().backward()
    assert model.linear.weight.grad is not None


def test_meter_looks_once_at_each_chunk() -> None:
    meter, model = ActivationMeter(), Product()
    for chunk, rows in ((0, 2), (0, 20), (1, 20)):
        with meter.measure(chunk, model):
            model(torch.ones(rows, 4))
    assert meter.bytes_of(0) == INPUT_BYTES + RESULT_BYTES
    assert meter.bytes_of(1) == 10 * meter.bytes_of(0)


def test_meter_forgets_a_forward_that_failed() -> None:
    meter, model = ActivationMeter(), Product()

    def fail() -> None:
        with meter.measure(0, model):
            model(torch.ones(2, 4))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert meter.bytes_of(0) == 0
    with meter.measure(0, model):
        model(torch.ones(2, 4))
    assert meter.bytes_of(0) == INPUT_BYTES + RESULT_BYTES


class Diary:
    """Two chunks whose gradient synchronization writes down what happens to it."""

    def __init__(self, *, explicit: bool, chunks: int = 2) -> None:
        self.events: list[str] = []
        self.chunks = [torch.nn.Linear(1, 1) for _ in range(chunks)]
        self.sync = GradientSync(
            SimpleNamespace(
                no_sync_func=[self._hold(number) for number in range(chunks)],
                grad_sync_func=[self._start(n) for n in range(chunks)] if explicit else None,
            ),
            self.chunks,
        )

    def _hold(self, number: int) -> Callable[[], Any]:
        @contextlib.contextmanager
        def hold() -> Iterator[None]:
            self.events.append(f"hold {number}")
            yield
            self.events.append(f"let go {number}")

        return hold

    def _start(self, number: int) -> Callable[[Any], None]:
        def start(parameters: Any) -> None:
            given = [id(parameter) for parameter in parameters]
            assert given == [id(parameter) for parameter in self.chunks[number].parameters()]
            self.events.append(f"reduce {number}")

        return start

    def last_backwards(self) -> None:
        for chunk in (1, 0):
            self.sync.before_last_backward(chunk)
            self.events.append(f"backward {chunk}")
            self.sync.after_last_backward(chunk)


def test_implicit_reduction_happens_within_the_last_backward() -> None:
    diary = Diary(explicit=False)
    diary.sync.hold()
    diary.last_backwards()
    diary.sync.release()
    assert diary.events == (
        ["hold 0", "hold 1", "let go 1", "backward 1", "let go 0", "backward 0"]
    )


def test_explicit_reduction_follows_the_last_backward() -> None:
    diary = Diary(explicit=True)
    diary.sync.hold()
    diary.last_backwards()
    diary.sync.release()
    assert diary.events == [
        *("hold 0", "hold 1", "backward 1", "let go 1", "reduce 1"),
        *("backward 0", "let go 0", "reduce 0"),
    ]


def test_holding_twice_holds_once() -> None:
    diary = Diary(explicit=False)
    diary.sync.hold()
    diary.sync.hold()
    diary.sync.release()
    diary.sync.release()
    assert diary.events == ["hold 0", "hold 1", "let go 0", "let go 1"]


def test_an_error_leaves_nothing_held_back() -> None:
    diary = Diary(explicit=True)
    diary.sync.hold()
    diary.sync.before_last_backward(1)
    diary.sync.after_last_backward(1)
    diary.sync.release()
    assert diary.events == ["hold 0", "hold 1", "let go 1", "reduce 1", "let go 0"]


def test_without_data_parallelism_there_is_nothing_to_hold() -> None:
    config = SimpleNamespace(no_sync_func=None, grad_sync_func=None)
    sync = GradientSync(config, [torch.nn.Linear(1, 1)] * 3)
    sync.hold()
    sync.before_last_backward(2)
    sync.after_last_backward(2)
    sync.release()


def test_one_function_serves_one_chunk_only() -> None:
    config = SimpleNamespace(no_sync_func=contextlib.nullcontext, grad_sync_func=None)
    GradientSync(config, [torch.nn.Linear(1, 1)]).hold()
    with pytest.raises(ConfigError, match="synchronization of 2 chunks; give a list"):
        GradientSync(config, [torch.nn.Linear(1, 1)] * 2)
