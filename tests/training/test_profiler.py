"""Tests that the selected iterations of a small computation are profiled, and no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.adaptive import accelerator

accelerator.install()

import torch  # noqa: E402

from megatron.adaptive.config.arguments import parse  # noqa: E402
from megatron.adaptive.config.environment import Installed  # noqa: E402
from megatron.adaptive.config.trainer import TrainerConfig  # noqa: E402
from megatron.adaptive.errors import ConfigError  # noqa: E402
from megatron.adaptive.training.hook import make_profiler  # noqa: E402

SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --train-iters 10 --lr 1e-3 "
    "--mock-data --vocab-size 100"
)
WINDOW = "--profile-step-start 2 --profile-step-end 4"


def settings(flags: str = "", world_size: int = 1) -> TrainerConfig:
    installed = Installed(transformer_engine=False)
    argv = f"{SMALL} {flags}".split()
    return parse(argv, world_size=world_size, last_wins=True, installed=installed)


def work(iteration: int) -> None:
    """Multiplies two matrices, whose shape identifies the ``iteration`` in a profile."""
    torch.mm(torch.ones(iteration + 1, 3), torch.ones(3, 2))


def run(
    cfg: TrainerConfig, folder: Path | None, *, rank: int = 0, first: int = 0, last: int = 6
) -> None:
    profiler = make_profiler(cfg, rank, folder)
    for iteration in range(first, last):
        profiler.before_step(iteration)
        work(iteration)
    profiler.close()
    profiler.close()


def traces(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.pt.trace.json"))


def profiled_iterations(trace: Path) -> list[int]:
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return [
        event["args"]["Input Dims"][0][0] - 1 for event in events if event.get("name") == "aten::mm"
    ]


def test_execution_profile_lies_under_its_name_where_tensorboard_looks(tmp_path: Path) -> None:
    run(settings(f"--profile-execution True --profile-name first {WINDOW}"), tmp_path)
    (trace,) = traces(tmp_path)
    assert trace.parent == tmp_path / "first"
    assert trace.name.startswith("rank_00000.")
    assert profiled_iterations(trace) == [2, 3]


def test_each_iteration_is_marked(tmp_path: Path) -> None:
    run(settings(f"--profile --use-pytorch-profiler {WINDOW}"), tmp_path)
    (trace,) = traces(tmp_path)
    assert trace.parent == tmp_path
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"ProfilerStep#0", "ProfilerStep#1"} <= names
    assert "ProfilerStep#2" not in names


@pytest.mark.parametrize(("first", "last", "profiled"), [(0, 3, [[2]]), (3, 8, [[3]]), (5, 8, [])])
def test_a_part_of_a_run_profiles_its_part_of_the_window(
    tmp_path: Path, first: int, last: int, profiled: list[list[int]]
) -> None:
    run(settings(f"--profile --use-pytorch-profiler {WINDOW}"), tmp_path, first=first, last=last)
    assert [profiled_iterations(trace) for trace in traces(tmp_path)] == profiled


def test_ranks_that_are_asked_for_write_files_of_their_own(tmp_path: Path) -> None:
    cfg = settings(f"--profile-execution True {WINDOW} --profile-ranks 1 3", world_size=4)
    for rank in range(4):
        run(cfg, tmp_path, rank=rank)
    assert [trace.name.split(".")[0] for trace in traces(tmp_path)] == ["rank_00001", "rank_00003"]


@pytest.mark.parametrize("flags", ["", "--profile-execution False --use-pytorch-profiler"])
def test_nothing_happens_unasked(tmp_path: Path, flags: str) -> None:
    run(settings(f"{flags} {WINDOW}"), tmp_path)
    run(settings(f"{flags} {WINDOW}"), None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the range is for nsys")
def test_without_a_gpu_a_plain_profile_is_a_trace(tmp_path: Path) -> None:
    run(settings(f"--profile {WINDOW}"), tmp_path)
    assert len(traces(tmp_path)) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_with_a_gpu_a_plain_profile_is_a_range_for_nsys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    runtime = torch.cuda.cudart()
    for name in ("cudaProfilerStart", "cudaProfilerStop"):
        original = getattr(runtime, name)
        monkeypatch.setattr(
            runtime, name, lambda name=name, call=original: (seen.append(name), call())
        )
    run(settings(f"--profile {WINDOW}"), tmp_path)
    assert seen == ["cudaProfilerStart", "cudaProfilerStop"]
    assert traces(tmp_path) == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("flags", ["--profile-execution True", "--profile --use-pytorch-profiler"])
def test_a_trace_without_a_folder_is_refused_on_every_rank(flags: str, rank: int) -> None:
    with pytest.raises(ConfigError, match="requires --tensorboard-dir") as caught:
        make_profiler(settings(flags, world_size=2), rank, None)
    assert flags.split()[0] in str(caught.value)
