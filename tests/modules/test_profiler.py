"""Tests profiling a model in a single process."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.adaptive.cli import plan as plan_command
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules import Profiler
from megatron.adaptive.modules.mesh import join_job
from megatron.adaptive.modules.profiler import ModuleProfile
from megatron.adaptive.modules.recording import RecordingCache
from megatron.adaptive.planner import profile_file
from megatron.adaptive.planner.model_file import read_model

from .models import SHARED, WIDTH, WORDS, Net, Tower, knotty, make_batch

WIDE = 16


def test_bytes_and_parameters_are_those_of_the_pieces() -> None:
    profile = Profiler(Tower(), {"x": torch.randn(4, WIDE)}).run()
    assert profile.micro_batch_sizes == (1, 2, 4)
    assert profile.cut_points == ("cuts.0", "cuts.1")
    assert len(profile.samples) == 9
    for sample in profile.samples:
        row = 4 * WIDE * sample.micro_batch
        assert sample.parameters == WIDE * WIDE
        assert sample.output_bytes == (row if sample.segment < 2 else 0)
        # The backward pass needs the input of the matrix multiplication and the output of the
        # sigmoid.
        assert sample.kept_bytes == 2 * row
        assert sample.split_s is not None
        assert min(sample.forward_s, sample.backward_s, *sample.split_s) > 0


def test_the_model_stays_as_it_is() -> None:
    model = knotty(dropout=0.2)
    for tensor in model.parameters():
        tensor.grad = torch.ones_like(tensor)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(11)
    state = torch.get_rng_state()
    profile = Profiler(model, make_batch(2), shared_weights=SHARED, micro_batch_sizes=[2]).run()
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(bool((tensor.grad == 1).all()) for tensor in model.parameters())  # type: ignore[union-attr]
    assert model.training
    # The first and the last segment both use the parameters of embedding and mixer.
    shared = WORDS * WIDTH + WIDTH * WIDTH + WIDTH
    described = profile.document()["model"]
    assert (described["tied_parameters"], described["tied_layers"]) == (shared, [0, 8])
    counts = sum(tensor.numel() for tensor in model.parameters())
    assert sum(tensor["parameters"] for tensor in described["layers"]) - shared == counts


def test_memory_ends_the_doubling() -> None:
    largest = 2 * 4 * WIDE * 4
    profile = Profiler(
        Tower(), {"x": torch.randn(16, WIDE)}, memory_limit_bytes=largest * 1.6, links=False
    ).run()
    assert profile.micro_batch_sizes == (1, 2, 4)


def test_memory_is_freed_after_a_microbatch_that_did_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks that torch's cache is emptied after the tensors of the microbatch are freed."""
    tensors: list[weakref.ref[torch.Tensor]] = []
    left: list[bool] = []

    def measure(profiler: Profiler, *args: Any) -> Any:
        tensor = torch.ones(2)
        tensors.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError

    def empty_cache() -> None:
        left.extend(tensor() is not None for tensor in tensors)

    monkeypatch.setattr(Profiler, "_measured_tape", measure)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    profiler = Profiler(Tower(), {"x": torch.randn(4, WIDE)})
    gpu = torch.device("cuda", 0)
    assert profiler._measured(2, gpu, RecordingCache(), split=False) is None
    assert left == [False]


class Lonely(Tower):
    """Model that cannot process a single sample, like a model with batch normalization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the batch ``x``."""
        if len(x) < 2:
            raise ValueError("Expected more than 1 value per channel when training")
        return super().forward(x)


def measured_quickly(model: torch.nn.Module, sample: dict[str, torch.Tensor]) -> ModuleProfile:
    """Returns the quick profile of ``model`` that a ``Pipeline`` uses to choose its sizes."""
    job = join_job(60.0)
    try:
        return Profiler(model, sample).measure(job, is_quick=True)
    finally:
        job.close()


def test_sizes_that_were_not_measured_are_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = measured_quickly(Tower(), {"x": torch.randn(8, WIDE)})
    assert profile.micro_batch_sizes == (1, 2, 4, 8)
    assert profile.estimated_sizes == (2, 4)
    said = capsys.readouterr().out
    assert "profile: measured 3 segments of Tower with microbatches of 1, 8 samples in " in said
    assert " s; estimated microbatches of 2, 4 samples\n" in said
    profile.write(tmp_path / "profile.json")
    written = profile_file.make_profile(profile_file.load(tmp_path / "profile.json")).layers
    # The profile with split backward passes also marks size 1 as estimated, because only unsplit
    # backward passes were measured.
    for layers, sizes in (
        (written, {1, 2, 4}),
        (profile_file.make_profile(profile.document(split=False)).layers, {2, 4}),
    ):
        estimated = [key[-1] for key, times in layers.items() if times.source == "estimated"]
        assert sorted(estimated) == sorted(3 * [*sizes])
    Profiler(Tower(), {"x": torch.randn(2, WIDE)}).run().write(tmp_path / "whole.json")
    assert "estimated" not in capsys.readouterr().out
    assert "estimated" not in (tmp_path / "whole.json").read_text()


@pytest.mark.parametrize("model", [Net, Lonely])
def test_a_model_that_needs_two_samples_is_measured_with_two(model: Any) -> None:
    def sample(count: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(count, 4 if model is Net else WIDE)}

    assert Profiler(model(), sample(5)).run().micro_batch_sizes == (2, 4)
    assert measured_quickly(model(), sample(8)).micro_batch_sizes == (2, 4, 8)
    assert measured_quickly(model(), sample(2)).micro_batch_sizes == (2,)
    # The model cannot be trained with a single sample, so the profiler must raise the model's
    # error.
    with pytest.raises(ConfigError, match="more than 1 value per channel"):
        Profiler(model(), sample(1)).run()
    with pytest.raises(ConfigError, match="more than 1 value per channel"):
        measured_quickly(model(), sample(1))


def test_the_planner_reads_what_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    measured = Profiler(Tower(), {"x": torch.randn(4, WIDE)}, name="tower").run()
    measured.write(path)
    with pytest.raises(ConfigError, match="choose another file"):
        measured.write(tmp_path / "none" / "profile.json")
    again = profile_file.make_profile(profile_file.load(path))
    here = profile_file.make_profile(measured.document())
    assert again.layers == here.layers
    assert again.optimizer_s_per_parameter == here.optimizer_s_per_parameter
    assert len(read_model(str(path)).layers) == len(measured.cut_points) + 1
    cluster = tmp_path / "cluster.json"
    node = {
        "type": "box", "gpu": "cpu", "count": 1, "gpus_per_node": 2, "memory": "8 GB",
        "link": {"bandwidth": "1 GB/s", "latency": "5 us"},
    }  # fmt: skip
    cluster.write_text(json.dumps({"format": 1, "nodes": [node]}))
    capsys.readouterr()
    arguments = ["--model", str(path), "--profile", str(path), "--cluster", str(cluster)]
    assert plan_command.main([*arguments, "--global-batch-size", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_backwards_are_given_as_they_run() -> None:
    sample = {"x": torch.randn(1, WIDE)}  # The microbatches may have more samples than this batch.
    profile = Profiler(Tower(), sample, split_backward=False, micro_batch_sizes=[3, 2]).run()
    assert profile.micro_batch_sizes == (2, 3)
    assert profile.samples[-1].kept_bytes == 2 * 4 * WIDE * 3
    rows = profile.document()["layers"]
    assert [row["backward_weight_s"] for row in rows] == [0.0] * 6
    both = Profiler(Tower(), sample, micro_batch_sizes=[1]).run()
    assert all(row["backward_weight_s"] > 0 for row in both.document()["layers"])
    whole = both.document(split=False)["layers"]
    assert [row["backward_input_s"] for row in whole] == [
        sample.backward_s for sample in both.samples
    ]


class Failing(Tower):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise IndexError("no such row")


@pytest.mark.parametrize(
    ("model", "options", "phrases"),
    [
        (Tower, {"micro_batch_sizes": [0]}, ["micro_batch_sizes must be", "at least 1, got 0"]),
        (Tower, {"repeats": 0}, ["repeats must be", "at least 1, got 0"]),
        (Tower, {"memory_limit_bytes": -1.0}, ["memory_limit_bytes", "positive", "got -1.0"]),
        (Tower, {"mixed_precision": "fp8"}, ["'fp8'", "bf16"]),
        (Failing, {}, ["rank 0", "IndexError", "no such row"]),
    ],
)
def test_what_is_wrong_is_one_line(model: Any, options: dict[str, Any], phrases: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Profiler(model(), {"x": torch.randn(2, WIDE)}, **options).run()
    assert "\n" not in str(caught.value)
    for word in phrases:
        assert word in str(caught.value)
