"""Compares the losses of up to four ranks that share a GPU with those of a single process."""

from __future__ import annotations

import pytest

from .device import gpu_or_rehearsal
from .jobs import ALONE, HALF, GpuJob, GpuJobs, compared

pytestmark = [*gpu_or_rehearsal, pytest.mark.multiprocess, pytest.mark.timeout(400)]

ADAPTIVE = "--pipeline-schedule adaptive"
V = f"{ADAPTIVE} --model-chunks 2 --pipeline-placement v --split-backward True"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
BF16 = "--bf16"
FP16 = "--fp16 --initial-loss-scale 1024"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LENGTHS = "--variable-seq-lengths --seq-length 72 --max-position-embeddings 72"
# Each stage has two tensor-parallel ranks. If a flag is repeated, the last value counts.
TENSOR = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
REPLICAS = "--pipeline-model-parallel-size 2 --use-distributed-optimizer"
JOBS = {
    "alone": GpuJob(flags=ALONE),
    "alone, dropout": GpuJob(flags=f"{ALONE} {DROPOUT}"),
    "alone, bf16": GpuJob(flags=f"{ALONE} {BF16}"),
    "alone, fp16": GpuJob(flags=f"{ALONE} {FP16}"),
    # This reference has the whole batch in one microbatch. Otherwise, padding might count as a
    # token.
    "alone, lengths": GpuJob(flags=f"{ALONE} {LENGTHS} --micro-batch-size 8"),
    "1f1b": GpuJob(flags="--pipeline-schedule 1f1b", ranks=2, like="alone"),
    "megatron": GpuJob(flags=ALONE, ranks=2, like="alone"),
    "dropout": GpuJob(flags=f"{V} {DROPOUT}", ranks=2, like="alone, dropout"),
    "bf16": GpuJob(flags=f"{V} {BF16}", ranks=2, like="alone, bf16", rel=HALF),
    "fp16": GpuJob(flags=f"{ADAPTIVE} {FP16}", ranks=2, like="alone, fp16", rel=HALF),
    "recompute": GpuJob(flags=f"{V} {RECOMPUTE}", ranks=2, like="alone"),
    "lengths": GpuJob(flags=f"{ADAPTIVE} {LENGTHS}", ranks=2, like="alone, lengths"),
    "moves": GpuJob(flags=ADAPTIVE, ranks=2, like="alone", moves={"1": [3, 5], "2": [6, 2]}),
    "three ranks": GpuJob(flags=f"{ADAPTIVE} --partition 3-3-2", ranks=3, like="alone"),
    "four ranks": GpuJob(flags="--pipeline-schedule zb-h1", ranks=4, like="alone"),
    "tensor ranks": GpuJob(flags=f"{ADAPTIVE} {TENSOR}", ranks=4, like="alone"),
    "replicas": GpuJob(flags=f"{ADAPTIVE} {REPLICAS}", ranks=4, like="alone"),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> GpuJobs:
    return GpuJobs(JOBS, tmp_path_factory.mktemp, 45.0)


@pytest.mark.parametrize("name", compared(JOBS))
def test_losses_are_those_of_one_process(jobs: GpuJobs, name: str) -> None:
    jobs.check(name)
