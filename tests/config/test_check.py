"""Rules of model, parallelism, batch and schedule: value, rule and remedy on one line."""

from __future__ import annotations

import pytest

from .conftest import Complaint, Parse


@pytest.mark.parametrize(
    ("flags", "world_size", "words"),
    [
        (
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
            6,
            ("world size 6", "tensor 2 x pipeline 2", "= 4", "multiple of 4"),
        ),
        ("--tensor-model-parallel-size 2", 1, ("world size 1", "multiple of 2")),
        ("", 0, ("world size 0",)),
        (
            "--num-layers 10 --pipeline-model-parallel-size 2 --model-chunks 2",
            2,
            ("--num-layers 10", "4 stages", "multiple of 4", "--partition", "2-3-3-2"),
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
            2,
            ("--num-layers 4", "pipeline 2", "stage 3 = 6"),
        ),
        (
            "--pipeline-model-parallel-size 2 --model-chunks 2 --partition 2-2",
            2,
            ("--partition 2-2", "has 2 stages", "pipeline 2 x chunks 2 make 4"),
        ),
        (
            "--pipeline-model-parallel-size 2 --partition 2-3",
            2,
            ("--partition 2-3", "holds 5 layers", "--num-layers is 4"),
        ),
        (
            "--global-batch-size 6",
            2,
            ("--global-batch-size 6", "--micro-batch-size 2 x data parallel size 2 = 4"),
        ),
        (
            "--num-attention-heads 2 --tensor-model-parallel-size 4",
            4,
            ("--num-attention-heads 2", "--tensor-model-parallel-size 4"),
        ),
        (
            "--group-query-attention --num-query-groups 3 --num-attention-heads 6 "
            "--hidden-size 60 --tensor-model-parallel-size 2",
            2,
            ("--num-query-groups 3", "--tensor-model-parallel-size 2"),
        ),
        (
            "--ffn-hidden-size 33 --tensor-model-parallel-size 2",
            2,
            ("--ffn-hidden-size 33", "--tensor-model-parallel-size 2"),
        ),
    ],
)
def test_shape_of_the_job(
    complaint: Complaint, flags: str, world_size: int, words: tuple[str, ...]
) -> None:
    text = complaint(flags, world_size=world_size)
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--hidden-size 66", ("--hidden-size 66", "--num-attention-heads 4")),
        ("--hidden-size 20 --swiglu", ("--swiglu", "--hidden-size 20", "--ffn-hidden-size")),
        ("--seq-length 64", ("--seq-length 64", "--max-position-embeddings 32", "raise")),
        ("--num-query-groups 2", ("--num-query-groups 2", "--group-query-attention")),
        (
            "--group-query-attention --num-query-groups 3",
            ("--num-attention-heads 4", "--num-query-groups 3"),
        ),
        ("--swiglu --squared-relu", ("--swiglu", "--squared-relu")),
        ("--no-position-embedding", ("--no-position-embedding", "learned_absolute", "rope")),
        ("--transformer-impl transformer_engine", ("not installed", "--transformer-impl local")),
        ("--attention-backend flash", ("--attention-backend flash", "Transformer Engine")),
        ("--use-flash-attn", ("--use-flash-attn", "Transformer Engine")),
        ("--cross-entropy-fusion-impl te", ("fusion-impl te", "Transformer Engine")),
        ("--apply-layernorm-1p", ("--apply-layernorm-1p", "apex")),
        ("--use-distributed-optimizer --optimizer sgd", ("--optimizer sgd", "adam")),
        ("--overlap-param-gather", ("--overlap-param-gather", "--use-distributed-optimizer")),
        (
            "--overlap-param-gather --use-distributed-optimizer",
            ("--overlap-param-gather", "--overlap-grad-reduce"),
        ),
    ],
)
def test_model_and_kernels(complaint: Complaint, flags: str, words: tuple[str, ...]) -> None:
    text = complaint(flags)
    for word in words:
        assert word in text


def test_head_width_of_its_own_frees_the_hidden_size(small: Parse) -> None:
    assert small("--hidden-size 66 --kv-channels 20").model.kv_channels == 20


def test_sequence_parallel(small: Parse, complaint: Complaint) -> None:
    text = complaint("--sequence-parallel")
    assert "--tensor-model-parallel-size 1" in text
    flags = "--sequence-parallel --tensor-model-parallel-size 2"
    text = complaint(flags, world_size=2)
    assert "LayerNorm" in text
    assert "Transformer Engine" in text
    assert small(flags, world_size=2, apex=True).parallel.sequence_parallel
    assert small(flags, world_size=2, engine=True).parallel.sequence_parallel
    # apex has no fused RMSNorm that megatron-core's local layers would use.
    text = complaint(flags + " --normalization RMSNorm", world_size=2, apex=True)
    assert "RMSNorm" in text
    text = complaint(flags + " --seq-length 31", world_size=2, engine=True)
    assert "--seq-length 31 is not a multiple of 2" in text


def test_context_parallel(small: Parse, complaint: Complaint) -> None:
    flags = "--context-parallel-size 2"
    assert "is not installed" in complaint(flags, world_size=2)
    assert "is not in use" in complaint(
        flags + " --transformer-impl local", world_size=2, engine=True
    )
    assert "2 x --context-parallel-size 2 = 4" in complaint(
        flags + " --seq-length 30", world_size=2, engine=True
    )
    assert small(flags, world_size=4, engine=True).parallel.data_parallel_size == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--train-samples 10 --rampup-batch-size 8 2 10", ("starts at 8", "start lower")),
        ("--train-samples 10 --rampup-batch-size 2 4 10", ("never reaches", "8", "distance 6")),
        ("--train-samples 10 --rampup-batch-size 1 1 10", ("2 x data parallel size 1 = 2",)),
        ("--train-samples 4", ("--train-samples 4", "one batch of 8")),
    ],
)
def test_batch(complaint: Complaint, flags: str, words: tuple[str, ...]) -> None:
    base = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1 "
        "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 "
        "--mock-data --vocab-size 9"
    )
    text = complaint(flags, base=base)
    for word in words:
        assert word in text


PP2 = "--pipeline-model-parallel-size 2 --global-batch-size 8"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (f"{PP2} --pipeline-schedule interleaved", ("interleaved", "1 chunks", "1f1b")),
        (
            "--model-chunks 2 --pipeline-schedule interleaved",
            ("--model-chunks 2", "at least 2", "pipeline size 1"),
        ),
        (f"{PP2} --model-chunks 2 --pipeline-schedule 1f1b", ("1f1b", "2 chunks", "interleaved")),
        (
            "--model-chunks 2 --pipeline-schedule megatron",
            ("--model-chunks 2", "at least 2", "pipeline size 1"),
        ),
        (
            "--model-chunks 2 --pipeline-schedule adaptive",
            ("--model-chunks 2", "at least 2", "pipeline size 1"),
        ),
        (
            f"{PP2} --model-chunks 2 --pipeline-schedule megatron --no-overlap-p2p-communication",
            ("megatron", "--no-overlap-p2p-communication", "3"),
        ),
        (
            f"{PP2} --model-chunks 2 --pipeline-schedule interleaved --global-batch-size 6",
            ("3 microbatches", "groups of 2", "multiple of 4", "adaptive"),
        ),
        (
            f"{PP2} --model-chunks 2 --pipeline-schedule megatron --global-batch-size 2",
            ("1 microbatches", "groups of 2"),
        ),
        (
            f"{PP2} --model-chunks 2 --pipeline-schedule interleaved "
            "--microbatch-group-size-per-virtual-pipeline-stage 1",
            ("stage 1", "pipeline size 2"),
        ),
        (
            f"{PP2} --pipeline-schedule 1f1b --activation-cap 2",
            ("--activation-cap 2", "1f1b", "adaptive"),
        ),
        (
            "--repartition auto",
            ("--repartition auto", "pipeline size 1", "--pipeline-model-parallel-size"),
        ),
        (
            f"{PP2} --repartition auto --pipeline-schedule megatron",
            ("--repartition auto", "megatron", "simulated", "adaptive"),
        ),
        (
            f"{PP2} --pipeline-placement v",
            ("--pipeline-placement v", "1 chunk", "--model-chunks 2", "loop"),
        ),
        *(
            (
                f"{PP2} --model-chunks 2 --pipeline-placement v --pipeline-schedule {schedule}",
                ("--pipeline-placement v", schedule, "adaptive", "--pipeline-placement loop"),
            )
            for schedule in ("megatron", "interleaved")
        ),
        (
            f"{PP2} --pipeline-placement v --pipeline-schedule 1f1b",
            ("--pipeline-placement v", "1f1b", "adaptive", "--pipeline-placement loop"),
        ),
    ],
)
def test_schedule(complaint: Complaint, flags: str, words: tuple[str, ...]) -> None:
    text = complaint(flags, world_size=2 if PP2 in flags else 1)
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    "flags",
    [
        f"{PP2}",
        f"{PP2} --global-batch-size 6 --model-chunks 2",
        f"{PP2} --pipeline-schedule 1f1b",
        f"{PP2} --pipeline-schedule megatron --model-chunks 2",
        f"{PP2} --pipeline-schedule interleaved --model-chunks 2",
        f"{PP2} --pipeline-schedule interleaved --model-chunks 2 --global-batch-size 10 "
        "--microbatch-group-size-per-virtual-pipeline-stage 3",
        f"{PP2} --partition 4-0 --pipeline-schedule megatron",
        f"{PP2} --partition 0-4-0-0 --model-chunks 2 --activation-cap 1.5",
        f"{PP2} --partition 0-4-0-0 --model-chunks 2 --pipeline-placement v",
        f"{PP2} --partition 1-1-0-1-1-0 --model-chunks 3 --pipeline-placement v",
        f"{PP2} --pipeline-placement loop --pipeline-schedule 1f1b",
    ],
)
def test_schedules_that_run(small: Parse, flags: str) -> None:
    config = small(flags, world_size=2)
    assert sum(config.layers_per_stage) == 4
    assert len(config.layers_per_stage) == config.num_stages


def test_a_batch_that_grows_must_fill_groups_at_every_size(complaint: Complaint) -> None:
    base = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1 "
        "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 "
        "--mock-data --vocab-size 9 --train-samples 100 --rampup-batch-size 2 1 10 "
        "--pipeline-model-parallel-size 2 --model-chunks 2 --pipeline-schedule interleaved"
    )
    assert "3 microbatches (global batch 3)" in complaint(base=base, world_size=2)
