"""Tests that each model in a process has a separate engine with separate settings."""

from __future__ import annotations

import argparse
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron.adaptive
from megatron.adaptive import accelerator, device_collectives
from megatron.adaptive.engine import process_context
from megatron.adaptive.errors import ConfigError

accelerator.install()

from megatron.adaptive.plugin import step_runner  # noqa: E402
from megatron.adaptive.plugin.engines import Engines  # noqa: E402
from megatron.adaptive.plugin.placement_patch import Placed  # noqa: E402
from megatron.adaptive.plugin.run_trace import _mean_loss, _summed_loss  # noqa: E402
from megatron.adaptive.plugin.settings import Settings  # noqa: E402

SHARED = Settings(schedule="hinted", first_weights="by-layer", on_hang="end")


def model(num_chunks: int = 1) -> list[torch.nn.Module]:
    return [torch.nn.Linear(1, 1) for _ in range(num_chunks)]


@pytest.fixture
def engines() -> Engines:
    return Engines(Placed(lambda: "loop"))


def test_each_model_has_an_engine(engines: Engines) -> None:
    actor, critic = model(2), model()
    engines.give(critic, Settings(schedule="1f1b", timeout_s=5.0))
    first = engines.engine_of(actor, SHARED, None)
    # A model with a single chunk may be passed as a module instead of a list.
    second = engines.engine_of(critic[0], SHARED, None)
    assert first is not second
    assert engines.engine_of(actor, SHARED, None) is first
    assert engines.engine_of(actor[1:], SHARED, None) is first
    assert first._settings == SHARED
    settings = second._settings
    assert (settings.schedule, settings.timeout_s) == ("1f1b", 5.0)
    # These settings were not given for the model, so they are those for the whole process.
    assert (settings.first_weights, settings.on_hang) == ("by-layer", "end")
    engines.close()


def test_models_do_not_share_a_trace(engines: Engines) -> None:
    shared = Settings(trace_dir="traces")
    folders = [engines.engine_of(model(), shared, None)._settings.trace_dir for _ in range(3)]
    assert folders == ["traces", "traces-model-2", "traces-model-3"]
    engines.close()


@pytest.mark.parametrize(
    ("schedule", "num_chunks", "line"),
    [
        ("gpipe", 2, "twice for a Linear of 2 chunks, with schedule=1f1b and then schedule=gpipe;"),
        ("1f1b", 1, "twice for a Linear of 1 chunk, first with 2 of its chunks; call it once"),
    ],
)
def test_two_settings_for_one_model(
    engines: Engines, schedule: str, num_chunks: int, line: str
) -> None:
    chunks = model(2)
    engines.give(chunks, Settings(schedule="1f1b"))
    # A second call with the same settings must have no effect.
    engines.give(chunks, Settings(schedule="1f1b"))
    with pytest.raises(ConfigError, match=rf"^install\(\) was called {line}"):
        engines.give(chunks[:num_chunks], Settings(schedule=schedule))


@pytest.mark.parametrize("no_model", [[], "gpt", [None]])
def test_what_is_no_model(engines: Engines, no_model: Any) -> None:
    with pytest.raises(
        ConfigError, match="^model must be a module, or the list of .* as passed to the schedule"
    ):
        engines.give(no_model, Settings())


def test_settings_that_come_too_late(engines: Engines) -> None:
    chunks = model()
    assert not engines.has_shared_settings
    engines.engine_of(chunks, SHARED, None)
    assert engines.has_shared_settings
    with pytest.raises(ConfigError, match=r"^install\(\) was called for a Linear of 1 chunk after"):
        engines.give(chunks, Settings(schedule="1f1b"))
    engines.close()


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"placement": "v"}, "placement=v was passed to .* for one model, but process groups"),
        ({"on_hang": "end"}, "on_hang=end was passed to .* for one model, but all models share"),
    ],
)
def test_settings_of_the_whole_process(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}"):
        megatron.adaptive.install(**settings, model=model(2))


def test_a_program_with_its_own_loop_may_pause(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks whether pauses between steps count as hangs, which depends on the training loop."""
    engine = engines.engine_of(model(), SHARED, None)
    assert engine._evidence()["may_pause"]
    training: Any = types.ModuleType("megatron.training")
    arguments = argparse.Namespace()
    training.get_args = lambda: arguments
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    # Some programs, such as slime, parse Megatron-LM's flags, but may pause in their own training
    # loop.
    assert engine._evidence()["may_pause"]
    arguments.curr_iteration = 3
    assert not engine._evidence()["may_pause"]
    engines.close()


@pytest.mark.parametrize(("backend", "installs"), [("nccl", False), ("gloo", True)])
def test_ranks_that_share_a_gpu_are_counted_by_its_id(
    backend: str, installs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that ranks on the same GPU are counted, although each rank sees only one GPU."""
    calls: list[bool] = []
    monkeypatch.setattr(device_collectives, "install", lambda: calls.append(True))
    monkeypatch.setattr(step_runner, "current_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="a")
    )
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "get_backend_config", lambda: f"cpu:gloo,cuda:{backend}")
    monkeypatch.setattr(process_context, "gather", lambda value, group: ["a", "b", value, "b"])
    device = step_runner._this_device()
    assert (device.shares, device.backend) == (2, backend)
    assert bool(calls) is installs


@pytest.mark.parametrize(
    ("reported", "mean"),
    [
        ([{"lm loss": torch.tensor([6.0, 4.0])}, {"lm loss": torch.tensor([2.0, 4.0])}], 1.0),
        ([{"loss": torch.tensor(3.0)}, {"loss": torch.tensor([5.0])}], 4.0),
        ([{"lm loss": (torch.tensor(6.0), torch.tensor(2.0))}], 3.0),
        ([[{"loss": 1.0}, None]], None),
        ([{"loss": torch.zeros(2, 5)}], None),
        ([{"loss": torch.tensor(1.0)}, {"other": torch.tensor(1.0)}], None),
        ([{"loss": torch.tensor(1.0)}, {}], None),
    ],
)
def test_what_loss_functions_report(reported: list[Any], mean: float | None) -> None:
    """Checks the mean of the reported losses. Microbatches may report different keys."""
    total = _summed_loss(reported)
    assert _mean_loss(total, 1) == mean
    # There are two replicas, but only one reported a loss, so there is no mean.
    assert _mean_loss(total, 2) is None
