"""Compares the trainer's steps and checkpoints between the supported releases of megatron-core."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import pytest

from ..multiprocess.launch import ROOT, forkserver, run_ranks, tail
from ..support.core_trees import UNPACKED, trees_of_others

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.multiprocess]

INSTALLED = metadata.version("megatron-core")
COMMON = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4
    --lr-decay-iters 4 --mock-data --vocab-size 64 --log-interval 1 --eval-iters 0
    --pipeline-model-parallel-size 2
"""
LLAMA = """
    --normalization RMSNorm --swiglu --position-embedding-type rope --group-query-attention
    --num-query-groups 2 --disable-bias-linear --untie-embeddings-and-output-weights
"""
EXPERTS = """
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-aux-loss-coeff 0.01
    --moe-router-load-balancing-type aux_loss --disable-bias-linear
"""
LATENT = """
    --multi-latent-attention --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8
    --kv-lora-rank 8 --q-lora-rank 8 --normalization RMSNorm --swiglu
    --position-embedding-type rope --untie-embeddings-and-output-weights
"""
MODELS: Mapping[str, tuple[int, str]] = {
    # This model has a tied embedding, dropout and a sharded optimizer. It is trained with split
    # backward passes, a V placement, and context parallelism.
    "gpt": (
        4,
        "--pipeline-schedule zb-v --num-virtual-stages-per-pipeline-rank 2"
        " --context-parallel-size 2 --use-distributed-optimizer",
    ),
    # Releases of megatron-core number the layers for multi-token prediction differently.
    "llama": (2, f"{LLAMA} --mtp-num-layers 1"),
    "experts": (4, f"{EXPERTS} --expert-model-parallel-size 2 --bf16"),
    # Keys and values are compressed and normalized, but queries are not compressed.
    # DeepSeek-V2-Lite has the same layout.
    "whole queries": (2, LATENT.replace("--q-lora-rank 8", "--qk-layernorm")),
    "latent": (4, f"{LATENT} {EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel"),
}
"""Number of ranks of each model, and flags of the trainer."""
CASES = [
    *(("0.17.1", model) for model in ("gpt", "llama")),
    *(("0.18.2", model) for model in ("experts", "latent")),
    *((release, model) for release in ("0.19.2", *trees_of_others()) for model in MODELS),
]
"""Pairs of a release and a model to train. The newest release trains all models."""
STEPS = re.compile(r"lm loss: (\S+) .*grad norm: (\S+)")


def path_of(release: str) -> str:
    """Returns the PYTHONPATH for ``release``. Skips the test if the release was not unpacked."""
    if release == INSTALLED:
        return str(ROOT)
    core = UNPACKED / f"megatron-core=={release}"
    others = [*UNPACKED.glob("triton==*")]
    if not core.exists() or not others:
        pytest.skip(f"megatron-core {release} is missing; run bash prerequisite.sh --versions")
    return ":".join(map(str, [core, ROOT, *others]))


def train(
    release: str, model: str, folder: Path, flags: str, *, rate: str = "1e-3"
) -> list[tuple[str, ...]]:
    """Trains a model with ``release``, and returns the loss and gradient norm of each step.

    ``model`` is a name in ``MODELS``. ``folder`` is the folder for the log. ``flags`` contains
    other flags, and ``rate`` is the learning rate.
    """
    ranks, settings = MODELS[model]
    log = folder / f"{release}.txt"
    arguments = f"{COMMON} {settings} {flags} --lr {rate}".split()
    command = ["-m", "megatron.adaptive", "train", "rank", *arguments]
    path = path_of(release)
    status = run_ranks(command, world_size=ranks, log=log, limit_s=150.0, python_path=path)
    assert status == 0, tail(log)
    return STEPS.findall(log.read_text())


@pytest.fixture(scope="module")
def release(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yields a release of megatron-core that is unpacked in addition to the installed release."""
    path = path_of(request.param)
    yield request.param
    forkserver(path).close()


@pytest.mark.parametrize(("release", "model"), CASES, indirect=["release"])
def test_steps_and_checkpoints_are_those_of_the_installed_release(
    release: str, tmp_path: Path, model: str
) -> None:
    saved = {name: tmp_path / f"by-{name}" for name in (INSTALLED, release)}
    first = {
        name: train(name, model, tmp_path, f"--train-iters 2 --save {folder} --save-interval 2")
        for name, folder in saved.items()
    }
    assert len(first[INSTALLED]) == 2
    assert first[release] == first[INSTALLED]
    # Each release continues from the checkpoint of the other release, and with another learning
    # rate.
    more = "--train-iters 4 --override-opt-param-scheduler"
    rest = {
        name: train(name, model, tmp_path, f"{more} --load {saved[other]}", rate="2e-3")
        for name, other in ((INSTALLED, release), (release, INSTALLED))
    }
    assert len(rest[INSTALLED]) == 2
    assert rest[release] == rest[INSTALLED]
