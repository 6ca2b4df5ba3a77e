"""Rules of precision, optimizer, recompute, data and run, and of the output folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .conftest import SMALL, Complaint, Parse


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--fp16-lm-cross-entropy", ("--fp16-lm-cross-entropy", "--fp16")),
        ("--grad-reduce-in-bf16", ("--grad-reduce-in-bf16", "--bf16")),
        ("--fp32-residual-connection", ("--fp32-residual-connection", "--fp16 or --bf16")),
        ("--bf16 --loss-scale 8", ("--loss-scale 8", "--fp16")),
        ("--fp16 --min-loss-scale 8 --initial-loss-scale 4", ("--min-loss-scale 8", "4")),
        ("--min-lr 0.1", ("--min-lr 0.1", "--lr 0.001")),
        ("--lr-warmup-init 0.1", ("--lr-warmup-init 0.1", "--lr 0.001")),
        ("--decoupled-min-lr 0.1", ("--decoupled-min-lr", "--decoupled-lr")),
        ("--decoupled-lr 0.01 --decoupled-min-lr 0.1", ("0.1", "--decoupled-lr 0.01")),
        ("--lr-warmup-iters 10", ("--lr-warmup-iters 10", "10 iters")),
        (
            "--lr-warmup-iters 6 --lr-decay-iters 5",
            ("--lr-warmup-iters 6", "5 iters", "--lr-decay-iters"),
        ),
        ("--lr-decay-style WSD", ("WSD", "--lr-wsd-decay-iters")),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 11", ("11", "10 iters")),
        ("--start-weight-decay 0.1", ("--start-weight-decay", "constant", "--weight-decay")),
        (
            "--weight-decay-incr-style linear",
            ("linear", "--start-weight-decay and --end-weight-decay"),
        ),
        (
            "--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1",
            ("--start-weight-decay 0.2", "--end-weight-decay 0.1"),
        ),
        (
            "--recompute-activations --recompute-granularity full",
            ("--recompute-activations", "full", "selective"),
        ),
        ("--recompute-granularity full", ("full", "--recompute-method", "uniform and 1")),
        ("--recompute-method block", ("--recompute-method", "none", "full")),
        (
            "--recompute-granularity selective --recompute-num-layers 1",
            ("--recompute-num-layers", "selective", "full"),
        ),
        ("--recompute-modules mlp", ("--recompute-modules", "selective")),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1 "
            "--recompute-modules mlp",
            ("--recompute-modules", "full"),
        ),
        ("--distribute-saved-activations", ("--distribute-saved-activations", "full")),
        (
            "--checkpoint-activations --distribute-saved-activations",
            ("--distribute-saved-activations", "--tensor-model-parallel-size 1"),
        ),
        ("--split 1,2,3,4", ("--split '1,2,3,4'", "949,50,1")),
        ("--split a,b", ("--split 'a,b'",)),
        ("--split 0,0", ("--split '0,0'",)),
        ("--split nan", ("--split 'nan'",)),
        ("--vocab-file v", ("GPT2BPETokenizer", "add --merge-file")),
        ("--save {tmp}/c", ("--save", "--save-interval")),
        ("--profile-step-start 12 --profile-step-end 12", ("--profile-step-end 12",)),
        ("--profile-ranks 0 1", ("--profile-ranks 1", "1 ranks")),
    ],
)
def test_training(complaint: Complaint, tmp_path: Path, flags: str, words: tuple[str, ...]) -> None:
    text = complaint(flags.format(tmp=tmp_path))
    for word in words:
        assert word in text


def test_distributed_activations_are_refused_next_to_sequence_parallel(
    complaint: Complaint,
) -> None:
    text = complaint(
        "--checkpoint-activations --distribute-saved-activations --sequence-parallel "
        "--tensor-model-parallel-size 2",
        world_size=2,
        engine=True,
    )
    assert "--sequence-parallel" in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--vocab-size 9", ("no data is given", "--data-path", "--mock-data")),
        ("--valid-data-path x", ("--train-data-path",)),
        ("--data-path x", ("GPT2BPETokenizer", "--vocab-file and --merge-file")),
        ("--mock-data --tokenizer-type NullTokenizer", ("NullTokenizer", "--vocab-size")),
    ],
)
def test_data(complaint: Complaint, flags: str, words: tuple[str, ...]) -> None:
    text = complaint(flags, base=SMALL.replace("--mock-data --vocab-size 100", ""))
    for word in words:
        assert word in text


def test_the_length_in_samples_has_its_own_flags(small: Parse) -> None:
    config = small(
        "--train-samples 1000 --lr-decay-samples 800 --lr-warmup-samples 10 "
        "--rampup-batch-size 2 2 100 --global-batch-size 8",
        base=SMALL.replace("--train-iters 10", ""),
    )
    assert config.run.train_iters is None
    assert config.batch.rampup_batch_size == (2, 2, 100)


@pytest.mark.parametrize(
    "flag",
    ["--save-interval 1 --save", "--tensorboard-dir", "--trace-dir", "--data-cache-path"],
)
def test_an_output_folder_that_cannot_be_made_is_named(
    complaint: Complaint, tmp_path: Path, flag: str
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("kept", encoding="utf-8")
    text = complaint(f"{flag} {blocker}/deeper/still")
    assert f"{flag.split()[-1]} {blocker}/deeper/still cannot be written" in text
    assert f"{blocker} is a file" in text
    assert blocker.read_text(encoding="utf-8") == "kept"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system without files")
def test_an_output_folder_on_a_file_system_that_takes_none_is_named(complaint: Complaint) -> None:
    assert "/proc/none/x cannot be written" in complaint("--trace-dir /proc/none/x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_folder_without_permission_is_named(complaint: Complaint, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "Permission denied" in complaint(f"--trace-dir {tmp_path}/x")


def test_trying_an_output_folder_leaves_nothing_behind(small: Parse, tmp_path: Path) -> None:
    small(f"--save {tmp_path}/a/b --save-interval 5 --trace-dir {tmp_path}/t")
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_cannot_be_written_is_refused_before_the_run(
    complaint: Complaint, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    text = complaint(f"--record-schedule {tmp_path}/file/orders.json")
    assert "--record-schedule" in text
    assert "cannot be written" in text
