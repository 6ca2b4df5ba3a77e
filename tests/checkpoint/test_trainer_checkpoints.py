"""Tests that resumed runs have bitwise equal results, even with other parallel sizes."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.enums import ModelType
from megatron.core.utils import unwrap_model

from megatron.adaptive.checkpoint.folder import CheckpointFolder
from megatron.adaptive.checkpoint.trainer_checkpoints import Progress
from megatron.adaptive.engine.folder_lease import Lease
from megatron.adaptive.errors import CheckpointError, DamagedCheckpointError

from ..multiprocess.launch import run_ranks, tail

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests" / "multiprocess" / "checkpoint_worker.py"
TRACKER = "latest_checkpointed_iteration.txt"
Make = Callable[..., Any]


def ranks(count: int, scenario: str, folder: Path) -> tuple[int | None, str]:
    """Runs the worker's ``scenario`` on ``count`` ranks. Returns the exit status and the output."""
    log = folder.with_name(f"{folder.name}.log")
    status = run_ranks(
        [str(WORKER), scenario, str(folder)], world_size=count, log=log, limit_s=240.0
    )
    return status, tail(log)


@pytest.fixture
def saved(make: Make, worker: Any, tmp_path: Path) -> Path:
    """Saves a checkpoint after iteration 2, and returns the folder of checkpoints."""
    run = make(save=tmp_path / "saved")
    run.step(2)
    run.checkpoints.save(worker.progress(2))
    return tmp_path / "saved"


@pytest.mark.multiprocess
@pytest.mark.long
def test_a_checkpoint_of_each_shape_loads_into_others(tmp_path: Path) -> None:
    """Checks that a run that resumes with other parallel sizes matches an uninterrupted run."""
    status, said = ranks(4, "reshape", tmp_path)
    assert status == 0, said
    assert "reshape: ok" in said


@pytest.mark.multiprocess
def test_a_failure_on_one_rank_is_told_by_all_and_leaves_nothing(tmp_path: Path) -> None:
    status, said = ranks(2, "failures", tmp_path)
    assert status == 0, said
    assert "failures: ok" in said
    assert CheckpointFolder(tmp_path).latest() == 2


@pytest.mark.multiprocess
def test_a_rank_killed_while_it_writes_leaves_the_former_checkpoint(
    make: Make, worker: Any, tmp_path: Path
) -> None:
    status, _ = ranks(2, "killed", tmp_path)
    assert status
    assert not (tmp_path / "iter_0000002").exists()
    run = make(load=tmp_path, save=tmp_path)
    assert run.checkpoints.load() == worker.progress(1)
    run.checkpoints.save(worker.progress(3))
    names = sorted(entry.name for entry in tmp_path.iterdir() if entry.name != ".lease")
    assert names == ["iter_0000001", "iter_0000003", TRACKER]


@pytest.mark.parametrize(
    "flags",
    [
        {},
        pytest.param({"bf16": None}, marks=pytest.mark.long),
        # This loss scale is so large that gradients still overflow long after the checkpoint was
        # saved.
        {"fp16": None, "initial_loss_scale": "4294967296"},
        {"optimizer": "sgd"},
        {"use_distributed_optimizer": None},
    ],
    ids=str,
)
def test_a_resumed_run_goes_on_bit_for_bit(
    make: Make, worker: Any, tmp_path: Path, flags: dict[str, str | None]
) -> None:
    """Checks that losses and final state of a resumed run equal those of an uninterrupted run."""
    run = make(save=tmp_path, **flags)
    run.learn(0, 3)
    run.checkpoints.save(worker.progress(3))
    losses = run.learn(3, 30)
    end = run.state()
    resumed = make(load=tmp_path, **flags)
    torch.manual_seed(99)
    assert resumed.checkpoints.load() == worker.progress(3)
    assert resumed.learn(3, 30) == losses
    worker.require_equal(resumed.state(), end, "resumed")
    if "fp16" in flags:
        assert end["loss scale"] < 2**32


@pytest.mark.parametrize(
    "flags",
    [
        {},
        pytest.param({"bf16": None, "swiglu": None}, marks=pytest.mark.long),
        pytest.param({"use_distributed_optimizer": None}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_checkpoint_of_megatron_lm_is_loaded_where_it_is_trusted(
    make: Make, worker: Any, tmp_path: Path, flags: dict[str, str | None]
) -> None:
    """Checks that Megatron-LM's checkpoints can be loaded if the user trusts their pickles."""
    # The two trainers draw different random numbers for dropout, so turn it off.
    flags = {**flags, "attention_dropout": "0", "hidden_dropout": "0"}
    run = make(**flags)
    run.learn(0, 3)
    path = save_as_megatron_lm(run, tmp_path, 3)
    losses = run.learn(3, 12)
    with pytest.raises(CheckpointError, match="pass --trust-checkpoint if you trust") as caught:
        make(load=tmp_path, **flags).checkpoints.load()
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert "\n" not in str(caught.value)
    resumed = make(load=tmp_path, trust_checkpoint=None, **flags)
    progress = dataclasses.replace(worker.progress(3), skipped_iterations=0)
    assert resumed.checkpoints.load() == progress
    assert resumed.learn(3, 12) == losses
    worker.require_equal(resumed.state(), run.state(), "resumed")
    with pytest.raises(
        CheckpointError, match=r"--ffn-hidden-size is \d+ in the checkpoint, but 48"
    ):
        make(load=tmp_path, trust_checkpoint=None, ffn_hidden_size="48", **flags).checkpoints.load()
    # megatron-core 0.19 does not write this file, but a load reads the file first if it exists.
    file = path / "common.pt"
    common = torch.load(file, weights_only=False) if file.exists() else {}
    torch.save({**common, "evil": Evil(tmp_path / "ran")}, file)
    with pytest.raises(CheckpointError, match=r"cannot read .*common\.pt"):
        make(load=tmp_path, trust_checkpoint=None, **flags).checkpoints.load()
    assert not (tmp_path / "ran").exists()


class Evil:
    """Object whose unpickling would run a program."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._path}",)


def save_as_megatron_lm(run: Any, folder: Path, iteration: int, further: Any = None) -> Path:
    """Saves ``run`` as Megatron-LM's trainer does, and returns the path of the checkpoint."""
    config, path = run.config, folder / f"iter_{iteration:07d}"
    samples = iteration * config.batch.global_batch_size
    rows = unwrap_model(run.chunks[0]).vocab_size
    arguments = argparse.Namespace(
        **{**vars(config.model), **vars(config.parallel), **vars(config.optimizer)},
        **vars(config.precision),
        consumed_train_samples=samples,
        consumed_valid_samples=5,
        padded_vocab_size=rows,
        params_dtype=torch.float32,
        exit_signal=signal.SIGTERM,
        model_type=ModelType.encoder_or_decoder,
        data_cache_path=folder,
    )
    content = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    model = unwrap_model(run.chunks[0]).sharded_state_dict(metadata=content)
    whole = {
        "args": arguments,
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "num_floating_point_operations_so_far": 10,
        "model": model,
        "optimizer": run.optimizer.sharded_state_dict({"model": model}, metadata=content),
        "opt_param_scheduler": run.scheduler.state_dict(),
        "rng_state": ShardedObject("rng_state", [{"python": 1}], (1, 1), (0, 0)),
    }
    if further is not None:
        whole["further"] = further
    path.mkdir()
    dist_checkpointing.save(whole, str(path), ("torch_dist", 1), content_metadata=content)
    (folder / TRACKER).write_text(str(iteration))
    return path


def test_common_values_beside_the_tensors_are_read(make: Make, tmp_path: Path) -> None:
    """Checks that values can be loaded that megatron-core 0.19 stores outside of common.pt."""
    flags: dict[str, str | None] = {"attention_dropout": "0", "hidden_dropout": "0"}
    run = make(**flags)
    run.learn(0, 3)
    path = save_as_megatron_lm(run, tmp_path, 3)
    file = path / "common.pt"
    if file.exists():
        common = torch.load(file, weights_only=False)
        shutil.rmtree(path)
        save_as_megatron_lm(run, tmp_path, 3, ShardedObject("common_state", common, (1,), (0,)))
        file.unlink()
    losses = run.learn(3, 6)
    resumed = make(load=tmp_path, trust_checkpoint=None, **flags)
    resumed.checkpoints.load()
    assert resumed.learn(3, 6) == losses


def test_what_is_written_behind_training_is_the_state_of_its_moment(
    make: Make, worker: Any, tmp_path: Path
) -> None:
    losses = make().learn(0, 6)
    run = make(save=tmp_path, keep_checkpoints=2)
    assert run.learn(0, 1) == losses[:1]
    run.checkpoints.save(worker.progress(1), behind=True)
    assert run.learn(1, 3) == losses[1:3]
    run.checkpoints.save(worker.progress(3), behind=True)
    # This call must wait until the previous checkpoint has been written.
    run.checkpoints.save(worker.progress(4), behind=True)
    assert run.learn(3, 6) == losses[3:]
    run.checkpoints.saver.finish()
    path = CheckpointFolder(tmp_path).complete_path
    for iteration in (1, 3, 4):
        assert run.checkpoints.saver.completed() == (iteration, path(iteration))
    assert run.checkpoints.saver.completed() is None
    resumed = make(load=tmp_path, ckpt_step=3)
    assert resumed.checkpoints.load() == worker.progress(3)
    assert resumed.learn(3, 6) == losses[3:]
    assert len(list(tmp_path.glob("iter_*"))) == 2


def test_a_failure_behind_training_is_told_and_the_next_takes_its_place(
    make: Make, worker: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Checks that training continues if checkpoints cannot be written for some time."""
    folder = tmp_path / "late"
    run = make(save=folder / "inner")
    folder.write_text("a file in the way")
    run.checkpoints.save(worker.progress(1), behind=True)
    with pytest.raises(CheckpointError, match="iteration 2 was not written to .*Not a directory"):
        run.checkpoints.save(worker.progress(2), behind=True)
    (text,) = caplog.messages
    assert "iteration 1 was not written to" in text
    assert text.endswith("training waits until the checkpoint of iteration 2 is written instead")
    run.checkpoints.saver.finish()

    run.checkpoints.save(worker.progress(3), behind=True)
    run.step(1)
    state = run.state()
    with pytest.raises(CheckpointError, match="iteration 3 was not written"):
        run.checkpoints.saver.finish()
    run.checkpoints.save(worker.progress(4), behind=True)
    pending = run.checkpoints.saver._pending
    assert pending is not None
    pending.join()
    folder.unlink()
    path = run.checkpoints.save(worker.progress(5), behind=True)
    assert path == CheckpointFolder(folder / "inner").complete_path(5)
    resumed = make(load=folder / "inner")
    assert resumed.checkpoints.load() == worker.progress(5)
    worker.require_equal(resumed.state(), state, "resumed")

    assert run.checkpoints.save(worker.progress(6), behind=True) is None
    assert run.checkpoints.save(worker.progress(7)).is_dir()
    assert CheckpointFolder(folder / "inner").latest() == 7


@pytest.mark.parametrize("flags", [{}, {"save_local": "disk"}], ids=["shared", "local"])
def test_ranks_that_the_job_went_on_without_save_nothing(
    make: Make, worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, str]
) -> None:
    """Checks that a suspended job that continues does not overwrite another job's checkpoints."""
    monkeypatch.chdir(tmp_path)
    saved = tmp_path / "saved"
    run = make(save=saved, **flags)
    run.checkpoints.save(worker.progress(1))
    folder = CheckpointFolder(saved)
    folder.lease = Lease(saved)
    folder.lease.claim()
    others = folder.begin(2)
    with pytest.raises(CheckpointError, match="was taken over by .* while this job was stopped"):
        run.checkpoints.save(worker.progress(2))
    run.checkpoints.save(worker.progress(2), behind=True)
    with pytest.raises(CheckpointError, match="was taken over by .* while this job was stopped"):
        run.checkpoints.saver.finish()
    assert others.is_dir()
    assert CheckpointFolder(saved).latest() == 1
    assert run.local is None or list(run.local._folder.steps()) == [1]


def test_saving_starts_no_process(make: Make, worker: Any, tmp_path: Path) -> None:
    children = Path("/proc/self/task")
    if not children.exists():
        pytest.skip("needs /proc")

    def count() -> int:
        total = 0
        for task in children.iterdir():
            with contextlib.suppress(OSError):  # The thread may have ended in the meantime.
                total += len((task / "children").read_text().split())
        return total

    before = count()
    make(save=tmp_path).checkpoints.save(worker.progress(1))
    assert count() == before


def test_a_folder_without_checkpoint_starts_anew_with_a_warning(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder, why in ((tmp_path, "contains no checkpoint"), (tmp_path / "no", "does not exist")):
        with caplog.at_level(logging.WARNING):
            assert make(load=folder).checkpoints.load() is None
        assert f"--load {folder} {why}; starting from scratch" in caplog.text
        with pytest.raises(CheckpointError, match=f"{why}; pass a folder with a checkpoint"):
            make(load=folder, exit_on_missing_checkpoint=None).checkpoints.load()


def test_one_of_several_checkpoints_is_chosen(make: Make, worker: Any, saved: Path) -> None:
    make(save=saved).checkpoints.save(worker.progress(4))
    assert make(load=saved).checkpoints.load() == worker.progress(4)
    assert make(load=saved, ckpt_step=2).checkpoints.load() == worker.progress(2)
    with pytest.raises(CheckpointError, match="iter_0000003 does not exist"):
        make(load=saved, ckpt_step=3).checkpoints.load()


def test_fine_tuning_takes_the_weights_alone(make: Make, saved: Path) -> None:
    run = make(load=saved, finetune=None, lr="5e-3")
    before = run.state()
    assert run.checkpoints.load() == Progress()
    after = run.state()
    assert run.scheduler.num_steps == 0
    assert after["group 0 lr"] == before["group 0 lr"]
    assert not any("exp_avg" in name for name in after)
    name = "0.decoder.layers.0.mlp.linear_fc1.weight weight"
    assert not torch.equal(after[name], before[name])


def test_weights_alone_reach_the_main_weights_of_16_bit_training(
    make: Make, worker: Any, tmp_path: Path
) -> None:
    run = make(save=tmp_path, bf16=None, no_save_optim=None)
    run.step(2)
    weights = run.state()
    run.checkpoints.save(worker.progress(2))
    with pytest.raises(CheckpointError, match="contains no optimizer state"):
        make(load=tmp_path, bf16=None).checkpoints.load()
    run = make(load=tmp_path, bf16=None, no_load_optim=None)
    assert run.checkpoints.load() == worker.progress(2)
    assert run.scheduler.num_steps == 16
    for name, value in run.state().items():
        if name.endswith(" main"):
            rounded = weights[name.removesuffix("main") + "weight"]
            assert torch.equal(value, rounded.float())


def test_another_schedule_of_the_learning_rate_is_refused_unless_told_which(
    make: Make, saved: Path
) -> None:
    ways = "--override-opt-param-scheduler .* or --use-checkpoint-opt-param-scheduler"
    with pytest.raises(CheckpointError, match=f"--lr: 0.01 in the checkpoint, 0.02 here.*{ways}"):
        make(load=saved, lr="2e-2").checkpoints.load()
    overriding = make(load=saved, lr="2e-2", override_opt_param_scheduler=None)
    overriding.checkpoints.load()
    other = make(load=saved, lr="2e-2", use_checkpoint_opt_param_scheduler=None)
    other.checkpoints.load()
    same = make(load=saved)
    same.checkpoints.load()
    assert overriding.state()["group 0 max_lr"] == torch.tensor(2e-2)
    assert overriding.state()["group 0 lr"] > 1.5e-2
    assert other.state()["group 0 lr"] == same.state()["group 0 lr"]
    assert other.state()["group 0 max_lr"] == torch.tensor(1e-2)


def test_other_padding_of_the_vocabulary_is_told_with_the_way_to_keep_it(
    make: Make, worker: Any, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        run = make(load=saved, make_vocab_size_divisible_by=128)
        run.checkpoints.load()
        assert "has 112 rows in the embedding, but this run has 128" in caplog.text
        assert "use --make-vocab-size-divisible-by to keep the number of rows" in caplog.text
        weight = worker.unwrap_model(run.chunks[0]).embedding.word_embeddings.weight
        assert not weight[112:].any()
        assert weight[100:112].any()
        caplog.clear()
        make(load=saved, make_vocab_size_divisible_by=112).checkpoints.load()
        assert "rows in the embedding" not in caplog.text


def test_another_order_of_the_data_is_a_warning(
    make: Make, worker: Any, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        make(load=saved).checkpoints.load()
        make(load=saved, seed=7, finetune=None).checkpoints.load()
        make(load=saved, seed=7, skip_train=None).checkpoints.load()
        assert "order of the training samples" not in caplog.text
        make(load=saved, seed=7).checkpoints.load()
    (record,) = caplog.records
    text = record.getMessage()
    assert "--seed is 1234 in the checkpoint, but 7 here; this changes the order of the" in text
    assert "samples may repeat or never be used" in text
    assert "\n" not in text


def test_another_model_and_damage_are_refused(make: Make, saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^--load .*: --num-layers is 4 in the checkpoint"):
        make(load=saved, num_layers="2").checkpoints.load()
    with pytest.raises(CheckpointError, match="padded vocabulary has 112 .* 256 rows here"):
        make(load=saved, vocab_size="250").checkpoints.load()
    shard = saved / "iter_0000002" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is damaged"):
        make(load=saved).checkpoints.load()


def test_a_file_of_the_right_size_and_the_wrong_content_is_refused(make: Make, saved: Path) -> None:
    for name in ("__0_0.distcp", ".metadata", "common.pt"):
        file = saved / "iter_0000002" / name
        content = file.read_bytes()
        file.write_bytes(bytes(len(content)))
        with pytest.raises(CheckpointError) as caught:
            make(load=saved).checkpoints.load()
        assert "\n" not in str(caught.value)
        file.write_bytes(content)
    make(load=saved).checkpoints.load()
