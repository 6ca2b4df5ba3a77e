"""Tests that the plugin replaces a function of megatron-core, calls it, and restores it."""

from __future__ import annotations

import argparse
import inspect
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron.adaptive
from megatron.adaptive import accelerator
from megatron.adaptive.errors import ConfigError

accelerator.install()

from megatron.core import pipeline_parallel  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402

from megatron.adaptive.plugin.patch import Seam  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
ORIGINAL = schedules.get_forward_backward_func
TWO = {"pp_size": 2, "vp_size": None}


@pytest.fixture(autouse=True)
def taken_back() -> Iterator[None]:
    yield
    megatron.adaptive.uninstall()
    assert schedules.get_forward_backward_func is ORIGINAL


@pytest.fixture
def holder(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a module that has imported megatron-core's function, as Megatron-LM's modules do."""
    module: Any = types.ModuleType("somebody.training")
    module.get_forward_backward_func = ORIGINAL
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def put_arguments(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> None:
    training: Any = types.ModuleType("megatron.training")
    training.get_args = lambda: argparse.Namespace(**arguments)
    monkeypatch.setitem(sys.modules, "megatron.training", training)


def test_every_holder_gets_it_and_gives_it_back(holder: Any) -> None:
    megatron.adaptive.install()
    seam = schedules.get_forward_backward_func
    assert isinstance(seam, Seam)
    assert pipeline_parallel.get_forward_backward_func is seam
    assert holder.get_forward_backward_func is seam
    megatron.adaptive.install()
    megatron.adaptive.install("1f1b")  # The settings may change until the first step.
    assert schedules.get_forward_backward_func is seam
    assert seam.original is ORIGINAL
    megatron.adaptive.uninstall()
    assert pipeline_parallel.get_forward_backward_func is ORIGINAL
    assert holder.get_forward_backward_func is ORIGINAL
    megatron.adaptive.uninstall()


def test_other_settings_after_a_step_are_refused() -> None:
    megatron.adaptive.install()
    seam: Any = schedules.get_forward_backward_func
    seam.engines = types.SimpleNamespace(has_shared_settings=True, close=lambda: None)
    megatron.adaptive.install()
    with pytest.raises(ConfigError, match=r"^install\(\) was called with .*'1f1b'.* call uninst"):
        megatron.adaptive.install("1f1b")


def test_a_wrong_setting_installs_nothing() -> None:
    with pytest.raises(ConfigError, match="--pipeline-schedule zb-v"):
        megatron.adaptive.install("zb-v", placement="loop")
    assert schedules.get_forward_backward_func is ORIGINAL


def test_one_pipeline_rank_is_left_to_megatron_core() -> None:
    megatron.adaptive.install()
    chosen = schedules.get_forward_backward_func(pp_size=1, vp_size=None)
    assert chosen is schedules.forward_backward_no_pipelining


@pytest.mark.parametrize("by_flag", [False, True])
def test_schedule_megatron_is_megatron_core(monkeypatch: pytest.MonkeyPatch, by_flag: bool) -> None:
    if by_flag:
        put_arguments(monkeypatch, pipeline_schedule="megatron")
    megatron.adaptive.install("adaptive" if by_flag else "megatron")
    chosen: Any = schedules.get_forward_backward_func(**TWO)
    on_cpu = not torch.cuda.is_available()
    original = chosen.__wrapped__ if on_cpu else chosen
    assert original is schedules.forward_backward_pipelining_without_interleaving


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA stream keeps sent tensors alive")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("loop", "ranks"),
    [
        ("forward_backward_pipelining_without_interleaving", TWO),
        ("forward_backward_pipelining_with_interleaving", {"pp_size": 2, "vp_size": 2}),
    ],
)
def test_megatron_cores_own_loop_keeps_outputs_until_gloo_has_sent_them(
    monkeypatch: pytest.MonkeyPatch, loop: str, ranks: dict[str, Any], fails: bool
) -> None:
    """Checks that outputs are not freed while gloo sends them, which could change the loss."""
    config = types.SimpleNamespace(deallocate_pipeline_outputs=True)
    chunks = [torch.nn.Linear(1, 1) for _ in range(2)]
    for chunk in chunks:
        chunk.config = config  # type: ignore[assignment]
    seen = []

    def own(**arguments: Any) -> str:
        seen.append(config.deallocate_pipeline_outputs)
        if fails:
            raise RuntimeError("the user's own error")
        return "done"

    monkeypatch.setattr(schedules, loop, own)
    megatron.adaptive.install("megatron")
    step = schedules.get_forward_backward_func(**ranks)
    for model in (chunks[0], chunks):
        with pytest.raises(RuntimeError, match="own error") if fails else nullcontext():
            assert step(model=model) == "done"
    assert seen == [False, False]
    # After the step, the user's setting must be restored.
    assert config.deallocate_pipeline_outputs


def test_the_function_looks_like_megatron_cores() -> None:
    megatron.adaptive.install()
    assert inspect.signature(schedules.get_forward_backward_func) == inspect.signature(ORIGINAL)
    step = schedules.get_forward_backward_func(**TWO)
    original = schedules.forward_backward_pipelining_without_interleaving
    assert step is not original
    assert inspect.signature(step) == inspect.signature(original)
    chunked = schedules.get_forward_backward_func(pp_size=2, vp_size=2)
    assert chunked.__name__ == "forward_backward_pipelining_with_interleaving"


def test_an_unknown_loop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron.adaptive.install()
    seam: Any = schedules.get_forward_backward_func
    monkeypatch.setattr(seam, "original", lambda: print)
    with pytest.raises(ConfigError, match="^megatron-core would run the step with print, which"):
        seam()


def test_flags_are_read_when_the_function_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron.adaptive.install(activation_cap=3)
    put_arguments(monkeypatch, pipeline_schedule="1f1b")
    with pytest.raises(ConfigError, match="--activation-cap 3 requires .* got .* 1f1b"):
        schedules.get_forward_backward_func(**TWO)


def test_a_function_held_beyond_uninstall_is_megatron_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called = {}

    def own(**arguments: Any) -> str:
        called.update(arguments)
        return "done"

    monkeypatch.setattr(schedules, "forward_backward_pipelining_without_interleaving", own)
    megatron.adaptive.install()
    step = schedules.get_forward_backward_func(**TWO)
    megatron.adaptive.uninstall()
    assert step(num_microbatches=4) == "done"
    assert called == {"num_microbatches": 4}


def test_importing_and_flags_need_no_torch() -> None:
    code = (
        "import argparse, sys, megatron.adaptive\n"
        "megatron.adaptive.add_arguments(argparse.ArgumentParser())\n"
        "megatron.adaptive.uninstall()\n"
        "assert 'torch' not in sys.modules and 'megatron.core' not in sys.modules\n"
        "try: megatron.adaptive.instal\n"
        "except AttributeError: print('good')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "good\n", done.stderr
