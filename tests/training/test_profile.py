"""Tests how the measurements of a profiling run are evaluated, with made-up measurements."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.adaptive import accelerator

accelerator.install()

from megatron.adaptive.accelerator import Accelerator  # noqa: E402
from megatron.adaptive.training import profile_run  # noqa: E402
from megatron.adaptive.training.profile_run import (  # noqa: E402
    Figures,
    ProfileOptions,
    _config,
    _equal_memory,
    _measure,
    layer_sample,
)

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --vocab-size 100"
)
GIB = 1 << 30


def stage(forward_s: float, parameters: float = 10.0) -> Figures:
    halves = {"backward_input_s": forward_s, "backward_weight_s": 0.0, "kept_bytes": forward_s}
    return {"forward_s": forward_s, "parameters": parameters, "sigma": 0.0, **halves}


def test_the_difference_of_two_stages_is_a_layer() -> None:
    layer = layer_sample(stage(0.5, 10), stage(1.1, 30))
    assert layer["forward_s"] == pytest.approx(0.3)
    assert layer["parameters"] == 10
    assert layer["launch_s"] == pytest.approx(0.2)


def test_noise_does_not_make_a_layer_free() -> None:
    layer = layer_sample(stage(0.9), stage(0.6))
    assert layer["forward_s"] == pytest.approx(0.1)
    assert layer["launch_s"] == pytest.approx(0.8)


def test_layers_are_measured_whole_if_a_run_has_slices() -> None:
    for slices in ("--slice-tokens 64", "--sequence-slices 4"):
        options = ProfileOptions(name="small", arguments=tuple(f"{MODEL} {slices}".split()))
        assert not _config(options, 1, 2, 1).cuts_sequences


class Job(SimpleNamespace):
    """Simulates rank 0 of two tensor-parallel ranks.

    Args:
        other: Value of the other rank in each exchange.
        device: Device of this rank.
    """

    def __init__(self, other: Any, device: str = "cpu") -> None:
        super().__init__(
            config=_config(ProfileOptions(name="small", arguments=tuple(MODEL.split())), 2, 1, 2),
            environment=SimpleNamespace(world_size=2),
            accelerator=Accelerator(device=torch.device(device), backend="gloo", name=device),
            is_first=True,
            gather=lambda value: [value, other],
        )


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    state = profile_run.parallel_state
    monkeypatch.setattr(state, "get_tensor_model_parallel_group", lambda: None)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(("fits", "other_fits"), [(True, True), (True, False), (False, True)])
def test_tensor_parallel_ranks_skip_the_same_measurements(
    fits: bool, other_fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that a measurement is skipped if it does not fit on one of the ranks.

    The tensors of the failed measurement must be freed before torch's cache is emptied.
    """
    tensors: list[weakref.ref[torch.Tensor]] = []
    left: list[bool] = []

    def measure_stage(*args: Any, **options: Any) -> Figures:
        tensor = torch.ones(2)
        tensors.append(weakref.ref(tensor))
        if not fits:
            raise torch.OutOfMemoryError
        return stage(0.5)

    def free_memory(device: Accelerator) -> None:
        left.extend(tensor() is not None for tensor in tensors)

    monkeypatch.setattr(profile_run, "_measure_stage", measure_stage)
    monkeypatch.setattr(Accelerator, "free_unused_memory", free_memory)
    options = ProfileOptions(name="s", arguments=tuple(MODEL.split()), kinds=("layer",))
    samples = _measure(options, Job(other_fits), 2, 1, optimizer=False)
    assert len(samples) == (fits and other_fits)
    assert left == ([] if fits else [False])


@pytest.mark.usefixtures("two_ranks")
def test_tensor_parallel_ranks_have_equal_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a rank uses no more memory than a rank whose GPU has less free memory.

    Otherwise, that rank alone would run out of memory, and the other would wait in a collective.
    """
    fractions: list[float] = []
    cuda = SimpleNamespace(
        mem_get_info=lambda device: (60 * GIB, 80 * GIB),
        memory_reserved=lambda device: 0,
        memory_allocated=lambda device: 0,
        get_device_properties=lambda device: SimpleNamespace(total_memory=80 * GIB),
        set_per_process_memory_fraction=lambda fraction, device: fractions.append(fraction),
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    for other in (20 * GIB, 70 * GIB):
        with _equal_memory(Job(other, "cuda:0"), 2):
            pass
    assert fractions == [pytest.approx(0.25), 1.0, pytest.approx(0.9 * 60 / 80), 1.0]
