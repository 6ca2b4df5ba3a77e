"""Tests how a rank exits after an error, and what a job prints about its devices."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.adaptive import accelerator
from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.errors import DataError, PeerLostError, SetupError
from megatron.adaptive.training import pretrain as module
from megatron.adaptive.training.pretrain import device_lines, require_hardware_queues
from tests.multiprocess.launch import ROOT

accelerator.install()

from megatron.adaptive.training.loop import Rebalancing  # noqa: E402

GLOO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error"
    " [10.57.0.4]:24756: Connection reset by peer. This is typically caused by a remote worker"
    " hanging or bugs in the application. Check the logs of the application"
)
WAITED = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out"
    " waiting 60000ms for recv operation to complete"
)


class Watching:
    """Imitates a watcher. It reports the error ``lost``, or nothing if ``lost`` is ``None``."""

    def __init__(self, lost: PeerLostError | None) -> None:
        self.lost = lost
        self.reported: list[tuple[str, bool]] = []

    def verdict(self, within_s: float) -> PeerLostError | None:
        return self.lost

    def report(self, text: str, *, is_shown: bool) -> None:
        self.reported.append((text, is_shown))


class Store:
    """Imitates a store in which the other ranks appear to exit after a few calls."""

    def __init__(self) -> None:
        self.looks = 0

    def add(self, key: str, count: int) -> int:
        self.looks += key == "parted" and not count
        return count if key == "error" else self.looks // 3


def wrapped() -> Exception:
    """Returns a dataset error of megatron-core whose cause is a lost connection."""
    error = Exception("the dataset failed to build")
    error.__cause__ = RuntimeError(GLOO)
    return error


RANK_3 = Environment(rank=3, local_rank=3, world_size=4)
LOST = PeerLostError("rank 1 is lost")
BROKEN = "error: rank 3 lost its connection with another rank ("


@pytest.mark.parametrize(
    ("error", "lost", "message"),
    [
        (RuntimeError("Connection closed"), LOST, ""),
        (wrapped(), LOST, ""),
        (wrapped(), None, BROKEN + "Read error [10.57.0.4]:24756: Connection reset by peer), "),
        (RuntimeError(WAITED), None, BROKEN + "Timed out waiting 60000ms for recv "),
        (dist.DistNetworkError("Failed to recv\n#0"), None, BROKEN + "Failed to recv), "),
        (OSError(28, "No space left on device"), None, "error: rank 3 cannot write: No"),
        (RuntimeError("shape mismatch"), None, "RuntimeError: shape mismatch"),
        (ValueError("a bug"), LOST, "ValueError: a bug"),
    ],
)
def test_only_a_bug_leaves_a_traceback(
    error: Exception,
    lost: PeerLostError | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Checks that a traceback is printed only for bugs, and at most one line for other errors."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    watcher: Any = Watching(lost)
    store: Any = Store()
    with pytest.raises(SystemExit) as ended:
        module._fail(module.expected_error(error, 3), store, watcher, RANK_3)
    said = capsys.readouterr().err
    is_bug = message.startswith(type(error).__name__)
    assert ended.value.code == (1 if is_bug else 2)
    assert message in said
    if not is_bug:
        assert said.count("\n") == bool(message)
    assert [is_expected for _, is_expected in watcher.reported] == [not is_bug]


@pytest.mark.parametrize(("lost", "looks"), [(None, 9), (LOST, 0)])
def test_the_first_rank_keeps_the_store_until_others_have_read_why(
    lost: PeerLostError | None, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that rank 0, which serves the store, exits only after others have read its error."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    watcher: Any = Watching(lost)
    store: Any = Store()
    first = Environment(rank=0, local_rank=0, world_size=4)
    with pytest.raises(SystemExit):
        module._fail(PeerLostError("a connection broke"), store, watcher, first)
    assert store.looks == looks


GPU = Accelerator(device=torch.device("cuda", 0), backend="gloo", name="a GPU", shares=2)
OVERLAP = "--overlap-moe-expert-parallel-comm"


def settings(**changes: bool) -> Any:
    """Returns settings with ``changes``, for example to overlap communication with computation."""
    names = ("overlap_grad_reduce", "overlap_param_gather", "overlap_moe_expert_parallel_comm")
    held = types.SimpleNamespace(**{name: changes.get(name, False) for name in names})
    held.world_size, held.load = 2, None
    held.use_cpu_initialization = changes.get("use_cpu_initialization", True)
    return types.SimpleNamespace(parallel=held, schedule=held, checkpoint=held, model=held)


def test_experts_that_overlap_need_more_than_one_hardware_queue() -> None:
    overlaps = settings(overlap_moe_expert_parallel_comm=True)
    queues = [Environment(cuda_device_max_connections=number) for number in (1, 2)]
    with pytest.raises(
        SetupError, match=f"^{OVERLAP} requires .*, but CUDA_DEVICE_MAX_CONNECTIONS is 1.*32$"
    ):
        require_hardware_queues(overlaps, queues[0], GPU)
    require_hardware_queues(overlaps, queues[1], GPU)
    require_hardware_queues(settings(), queues[0], GPU)


def test_overlap_on_a_shared_gpu_is_told_to_gain_nothing() -> None:
    lines = device_lines(settings(overlap_grad_reduce=True), GPU)
    assert lines[0] == (
        "2 ranks share a GPU, so busy times and bubbles reflect time slices of a shared GPU"
    )
    assert lines[1].startswith("warning: --overlap-grad-reduce: ")
    assert "remove the flag" in lines[1]
    assert len(device_lines(settings(), GPU)) == 1
    assert device_lines(settings(), dataclasses.replace(GPU, shares=1)) == []


def test_layers_do_not_move_by_times_of_a_shared_gpu() -> None:
    said: list[str] = []
    schedule = types.SimpleNamespace(pipeline_schedule="1f1b", repartition="auto")
    job = types.SimpleNamespace(accelerator=GPU, gather=lambda shares_gpu: [shares_gpu, False])
    live: Any = types.SimpleNamespace(
        log=types.SimpleNamespace(message=said.append),
        config=types.SimpleNamespace(schedule=schedule, slices_to_choose=()),
        run=types.SimpleNamespace(job=job, placement=types.SimpleNamespace(num_ranks=2)),
        step=types.SimpleNamespace(times=None),
    )
    hook = Rebalancing(live)
    hook.after_step(types.SimpleNamespace(num_microbatches=4))  # type: ignore[arg-type]
    hook.before_step(2)
    assert said == [
        "  layers do not move, because measured times reflect time slices of a shared GPU"
    ]


@pytest.mark.parametrize(
    "name", ["pretrain_gpt_distributed_small", "pretrain_gpt_345m", "deepseek_small"]
)
@pytest.mark.parametrize(("flag", "queues"), [("--bf16", "8"), (OVERLAP, "32")])
def test_examples_use_more_than_one_hardware_queue(name: str, flag: str, queues: str) -> None:
    lines = (ROOT / "examples" / "gpt" / f"{name}.sh").read_text().splitlines()
    begin = lines.index('case " $* " in')
    (end,) = (n for n, line in enumerate(lines) if line.startswith("export CUDA_DEVICE_MAX"))
    script = "\n".join([*lines[begin : end + 1], "echo $CUDA_DEVICE_MAX_CONNECTIONS"])
    done = subprocess.run(
        ["bash", "-euc", script, name, flag], capture_output=True, text=True, check=True, env={}
    )
    assert done.stdout.strip() == queues


def test_first_weights_that_depend_on_the_layout_are_told() -> None:
    alone = dataclasses.replace(GPU, shares=1)
    (line,) = device_lines(settings(use_cpu_initialization=False), alone)
    assert "use --use-cpu-initialization to draw the same weights in every layout" in line
    on_cpu = dataclasses.replace(alone, device=torch.device("cpu"))
    assert device_lines(settings(use_cpu_initialization=False), on_cpu) == []


@pytest.mark.slow
def test_a_data_worker_that_is_killed_during_a_step_is_one_line() -> None:
    """Checks that a killed data worker causes a one-line error, even during a step."""

    class Endless(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return itertools.count()

    loading = iter(torch.utils.data.DataLoader(Endless(), batch_size=None, num_workers=1))
    next(loading)
    (worker,) = loading._workers  # type: ignore[attr-defined]

    def lose_worker() -> None:
        os.kill(worker.pid, signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(RuntimeError) as info:
        lose_worker()
    expected = module.expected_error(info.value, 3)
    assert isinstance(expected, DataError)
    assert f"rank 3: the process that loads its data (pid {worker.pid}) was killed" in str(expected)
    assert len(str(expected).splitlines()) == 1
