"""Tests training and evaluation steps of a complete run in one process."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.adaptive import accelerator

accelerator.install()

from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper  # noqa: E402

from megatron.adaptive.config.arguments import parse  # noqa: E402
from megatron.adaptive.config.environment import Environment  # noqa: E402
from megatron.adaptive.engine.policy_factory import Orders  # noqa: E402
from megatron.adaptive.engine.stages import ForwardBackward  # noqa: E402
from megatron.adaptive.errors import AdaptiveError, DeviceMemoryError  # noqa: E402
from megatron.adaptive.gpt import train_step  # noqa: E402
from megatron.adaptive.gpt.initialize import end_job, start_job  # noqa: E402
from megatron.adaptive.gpt.setup import Run, build_run, make_loader  # noqa: E402
from megatron.adaptive.gpt.train_step import Step, StepResult, params_norm  # noqa: E402
from megatron.adaptive.schedule.stage_placement import Placement  # noqa: E402

from .conftest import SMALL  # noqa: E402

FLAGS = (
    f"{SMALL} --num-layers 2 --global-batch-size 4 --train-iters 4 --lr 1e-2 --eval-iters 2 "
    "--log-interval 2 --attention-dropout 0 --hidden-dropout 0"
)

Start = Callable[[str], Run]


@pytest.fixture
def start() -> Iterator[Start]:
    """Yields a function that closes the previous run, and builds and returns a new one."""
    runs: list[Run] = []

    def end() -> None:
        while runs:
            run = runs.pop()
            if run.wiring is not None:
                run.wiring.close()
            end_job()

    def build(flags: str = "") -> Run:
        end()
        config = parse(f"{FLAGS} {flags}".split(), world_size=1, last_wins=True)
        job = start_job(config, Environment(), accelerator.detect(0, backend="gloo"))
        runs.append(build_run(job))
        return runs[-1]

    yield build
    end()


def train(run: Run, steps: int = 2) -> list[StepResult]:
    step, loader = Step(run), make_loader(run, run.samples.train, 0)
    assert loader is not None
    return [step.train(loader.step(4), 4, number) for number in range(1, steps + 1)]


def first_weight(run: Run) -> torch.Tensor:
    return next(run.chunks[0].parameters()).detach()


def test_a_step_changes_the_weights_and_says_how(start: Start) -> None:
    run = start("--log-num-zeros-in-grad")
    before = first_weight(run).clone()
    # Store losses as a previous model would leave them, under the names that releases of
    # megatron-core use. The run must remove them.
    names = ("values", "loss_values", "correct_values", "total_values")
    MTPLossLoggingHelper.tracker.update({name: torch.ones(2) for name in names})
    first, second = train(run)
    assert not set(names) & set(MTPLossLoggingHelper.tracker)
    assert not torch.equal(first_weight(run), before)
    for result in (first, second):
        assert result.updated
        assert list(result.losses) == ["lm loss"]
        assert result.losses["lm loss"] == pytest.approx(math.log(128), rel=0.1)
        assert result.grad_norm is not None
        assert result.grad_norm > 0
        assert result.num_zeros is not None
        assert result.num_zeros >= 0
    # The bubble fraction is measured only in iterations that are logged.
    assert first.bubble_fraction is None
    assert second.bubble_fraction is not None
    assert 0 <= second.bubble_fraction < 1
    total = sum(float(p.detach().double().pow(2).sum()) for p in run.chunks[0].parameters())
    assert params_norm(run) == pytest.approx(total**0.5)


class _Operations(TorchDispatchMode):
    """Records the reads of values by the host, and the largest tensor of 64-bit numbers.

    Attributes:
        reads: Number of operations that wait for the device to read a value.
        largest: Number of elements of the largest float64 tensor, including converted arguments.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # no types in torch
        self.reads = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            sizes = [each.numel() for each in (*args, result) if isinstance(each, torch.Tensor)]
            self.largest = max(self.largest, *sizes)
        return result


def test_the_norm_of_parameters_needs_little_memory_and_one_wait(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start()
    monkeypatch.setattr(train_step, "_NORM_PART", 1000)
    with _Operations() as operations:
        norm = params_norm(run)
    assert operations.reads == 1
    assert operations.largest <= 1000
    total = sum(float(p.detach().double().pow(2).sum()) for p in run.chunks[0].parameters())
    assert norm == pytest.approx(total**0.5, rel=1e-12)


RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.parametrize(
    "flags", ["", RECOMPUTE, "--split-backward False"], ids=["", "recompute", "whole"]
)
@pytest.mark.parametrize("dropout", ["", "--attention-dropout 0.2 --hidden-dropout 0.2"])
def test_the_engine_gives_what_megatron_core_gives(start: Start, dropout: str, flags: str) -> None:
    results = []
    for schedule in (f"adaptive {flags}", "megatron"):
        run = start(f"--pipeline-schedule {schedule} {dropout}")
        assert (run.wiring is None) == (schedule == "megatron")
        results.append([(r.losses, r.grad_norm) for r in train(run, 3)])
    assert results[0] == results[1]


def test_evaluation_leaves_the_weights_alone(start: Start) -> None:
    run = start("--hidden-dropout 0.5 --attention-dropout 0.5")
    before = first_weight(run).clone()
    step = Step(run)
    losses = [
        step.evaluate(make_loader(run, run.samples.valid, 0), 2, 4)["lm loss"] for _ in range(2)
    ]
    assert torch.equal(first_weight(run), before)
    # If dropout were active in evaluation, the two losses would differ.
    assert losses[0] == losses[1]
    assert all(parameter.grad is None for parameter in run.chunks[0].parameters())


def test_an_overflow_in_fp16_leaves_the_weights_alone(start: Start) -> None:
    run = start(f"--fp16 --initial-loss-scale {2.0**40} --hysteresis 1")
    before = first_weight(run).clone()
    scale = float(run.optimizer.get_loss_scale())
    (result,) = train(run, 1)
    assert not result.updated
    assert torch.equal(first_weight(run), before)
    assert float(run.optimizer.get_loss_scale()) == scale / 2


def test_a_gradient_that_is_no_number_is_named(start: Start) -> None:
    run = start("")
    with torch.no_grad():
        next(run.chunks[0].parameters())[:] = math.nan
    with pytest.raises(AdaptiveError) as info:
        train(run, 1)
    text = str(info.value)
    assert text.startswith("iteration 1: rank 0 found an infinite or NaN gradient")
    assert "--lr" in text
    assert len(text.splitlines()) == 1


def full(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nAnd more.")


def too_much(*_: Any, **__: Any) -> None:
    torch.empty(1 << 58, dtype=torch.int8)


def broken(*_: Any, **__: Any) -> None:
    raise RuntimeError("a bug")


OUT_OF_MEMORY = r"^rank 0 \(pipeline rank 0, CPU\) ran out of memory with "
REMEDIES = (
    "lower --micro-batch-size.*--recompute-granularity .*--pipeline-model-parallel-size, or "
    "--use-distributed-optimizer$"
)


@pytest.mark.parametrize(
    ("fail", "kind", "said"),
    [
        (full, DeviceMemoryError, rf"{OUT_OF_MEMORY}.* Tried to allocate 2.00 GiB; {REMEDIES}"),
        # If memory is exhausted on a CPU, torch raises an error with a different message.
        (too_much, DeviceMemoryError, f"{OUT_OF_MEMORY}.*{REMEDIES}"),
        (broken, RuntimeError, "^a bug$"),
    ],
)
def test_running_out_of_memory_names_rank_and_remedies(
    fail: Callable[..., None], kind: type[Exception], said: str, start: Start
) -> None:
    run = start("")
    run.chunks[0].register_forward_pre_hook(fail)
    with pytest.raises(kind, match=said):
        train(run, 1)


@pytest.mark.parametrize(
    ("schedule", "cap", "phrase"),
    [
        ("adaptive", None, "lower --micro-batch-size or --activation-cap (now 6; 4 needs no more"),
        ("adaptive", 4.0, "lower --micro-batch-size or --activation-cap (now 4), or use"),
        ("1f1b", None, "lower --micro-batch-size, or use --recompute-granularity"),
    ],
)
def test_running_out_of_memory_names_the_limit_on_activations(
    schedule: str, cap: float | None, phrase: str, start: Start
) -> None:
    run = start("")
    four = Placement(num_ranks=4, num_chunks=1)
    run = dataclasses.replace(run, placement=four)
    assert isinstance(run.forward_backward, ForwardBackward)
    run.forward_backward.orders = Orders(schedule=schedule, placement=four, pp_rank=0, cap=cap)
    assert phrase in str(train_step.out_of_memory(run, MemoryError(), 16))


def test_an_error_that_names_infiniband_is_no_divergence(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("")

    def fail() -> None:
        raise RuntimeError("NCCL error: Infiniband device mlx5_0 was lost")

    monkeypatch.setattr(run.optimizer, "step", fail)
    with pytest.raises(RuntimeError, match="Infiniband"):
        train(run, 1)
