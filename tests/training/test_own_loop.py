"""Compares the trainer with a loop that uses only megatron-core, for each supported release.

The loop, ``own_loop.py``, is a program like those that users of megatron-core write. It runs in one
process with megatron-core's own schedule. It continues from the trainer's first checkpoint, which
it reads with functions of megatron-core. ``test_releases.py`` compares releases only with each
other, so it would not find an error that occurs with all releases.

By default, one model is compared for each release. With ``OWN_LOOP=all``, all models are compared
for each release.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ..multiprocess.launch import run_ranks, tail
from ..support.core_trees import trees_of_others
from .test_releases import INSTALLED, STEPS, path_of, release  # noqa: F401

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.multiprocess]

PROGRAM = Path(__file__).with_name("own_loop.py")
VOCABULARY = 128
SEQUENCE = 16
BATCH = 4
STEPS_TAKEN = 4
COMMON = f"""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length {SEQUENCE}
    --max-position-embeddings {SEQUENCE} --micro-batch-size 1 --global-batch-size {BATCH} --lr 1e-3
    --lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1}
    --log-interval 1 --eval-iters 0 --attention-dropout 0 --hidden-dropout 0 --split 1,0,0
    --seed 1234 --train-iters {STEPS_TAKEN} --save-interval 1 --pipeline-model-parallel-size 2
"""
SIZES = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
LEARNED = {"share_embeddings_and_output_weights": True}
ROTARY = {"share_embeddings_and_output_weights": False, "position_embedding_type": "rope"}


@dataclass(frozen=True, kw_only=True)
class Model:
    """Model that is described twice: by flags of the trainer, and by settings of megatron-core.

    Attributes:
        flags: Flags of the trainer.
        ranks: Number of ranks on which the trainer runs.
        settings: Settings of megatron-core's model configuration that are added to ``SIZES``.
        gpt: Arguments of megatron-core's model class.
        optimizer: Settings of megatron-core's optimizer configuration.
        bf16: Whether weights are in bfloat16.
        rel: Maximum relative difference between losses that rounding errors may cause.
    """

    flags: str
    ranks: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)
    gpt: Mapping[str, Any] = field(default_factory=lambda: ROTARY)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    bf16: bool = False
    rel: float = 1e-6


UNTIED = "--position-embedding-type rope --untie-embeddings-and-output-weights"
GATED = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False}
GATED_FLAGS = "--normalization RMSNorm --swiglu --disable-bias-linear"
MODELS = {
    "gpt": Model(flags="", gpt=LEARNED),
    "llama": Model(
        flags=f"{GATED_FLAGS} {UNTIED} --group-query-attention --num-query-groups 2"
        " --ffn-hidden-size 64 --mtp-num-layers 1 --pipeline-schedule zb-v"
        " --num-virtual-stages-per-pipeline-rank 2",
        settings={**GATED, "num_query_groups": 2, "ffn_hidden_size": 64, "mtp_num_layers": 1},
    ),
    # Since release 0.19, megatron-core supports the last two of these settings.
    "repeated": Model(
        flags=f"{GATED_FLAGS} {UNTIED} --ffn-hidden-size 64 --mtp-num-layers 2"
        " --mtp-use-repeated-layer --mtp-detach-heads",
        settings={
            **GATED,
            "ffn_hidden_size": 64,
            "mtp_num_layers": 2,
            "mtp_use_repeated_layer": True,
            "mtp_detach_heads": True,
        },
    ),
    "half": Model(flags=f"{UNTIED} --bf16 --pipeline-schedule zb-h1", bf16=True, rel=1e-4),
    "experts": Model(
        flags=f"{UNTIED} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16"
        " --moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type aux_loss --disable-bias-linear"
        " --expert-model-parallel-size 2",
        ranks=4,
        settings={
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 16,
            "moe_aux_loss_coeff": 0.01,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_token_dispatcher_type": "alltoall",
            "add_bias_linear": False,
        },
    ),
}
RELEASES = (INSTALLED, "0.17.1", "0.18.2", "0.19.2", *trees_of_others())
CHOSEN = dict(zip(RELEASES, ("gpt", "half", "experts", "repeated"), strict=False))
"""Model that is compared for each release by default."""
NEWEST = "repeated"
"""Model that is compared for releases that are not in ``CHOSEN``. It needs release 0.19 or newer.
"""


def cases() -> list[tuple[str, str]]:
    """Returns pairs of a release and a model to compare, depending on ``OWN_LOOP``."""
    if os.environ.get("OWN_LOOP") != "all":
        return [(version, CHOSEN.get(version, NEWEST)) for version in RELEASES]
    older = RELEASES[:3]
    return [
        (version, name)
        for version in RELEASES
        for name in MODELS
        if name != NEWEST or version not in older
    ]


def run(command: list[str], ranks: int, log: Path, path: str) -> None:
    """Runs ``command`` on several ranks, and fails the test if a rank fails.

    There are ``ranks`` ranks, which write their output to ``log``. ``path`` is the PYTHONPATH with
    which they import megatron-core.
    """
    status = run_ranks(command, world_size=ranks, log=log, limit_s=150.0, python_path=path)
    assert status == 0, tail(log)


@pytest.mark.parametrize(("release", "model"), cases(), indirect=["release"])
def test_steps_are_those_of_its_own_loop(
    release: str,  # noqa: F811
    model: str,
    tmp_path: Path,
    write_tokens: Callable[..., str],
) -> None:
    compare(MODELS[model], path_of(release), tmp_path, write_tokens)


def compare(described: Model, path: str, folder: Path, write_tokens: Callable[..., str]) -> None:
    """Checks that the trainer and the separate loop compute the same losses of a model.

    Args:
        described: Model to train.
        path: PYTHONPATH with which ranks import megatron-core.
        folder: Folder for the files of this comparison.
        write_tokens: Function that writes documents to token files.
    """
    numbers = random.Random(7)
    documents = [
        [numbers.randrange(VOCABULARY - 1) for _ in range(numbers.randrange(10, 60))]
        for _ in range(40)
    ]
    data = write_tokens(documents)
    saved, log = folder / "saved", folder / "trainer.txt"
    flags = f"{COMMON} {described.flags} --data-path {data} --save {saved}".split()
    run(["-m", "megatron.adaptive", "train", "rank", *flags], described.ranks, log, path)
    trained = [(float(loss), float(norm)) for loss, norm in STEPS.findall(log.read_text())]
    assert len(trained) == STEPS_TAKEN
    task, written = folder / "task.json", folder / "steps.json"
    content = {
        "checkpoint": str(saved / "iter_0000001"),
        "data": data,
        "cache": str(folder / "cache"),
        "model": {**SIZES, **described.settings},
        "gpt": dict(described.gpt),
        "steps": STEPS_TAKEN - 1,
        "vocabulary": VOCABULARY,
        "sequence": SEQUENCE,
        "batch": BATCH,
        "bf16": described.bf16,
        "optimizer": dict(described.optimizer),
    }
    task.write_text(json.dumps(content))
    run([str(PROGRAM), str(task), str(written)], 1, folder / "loop.txt", path)
    reference = json.loads(written.read_text())
    assert len(reference) == STEPS_TAKEN - 1
    for step, expected in zip(trained[1:], reference, strict=True):
        assert step[0] == pytest.approx(expected[0], rel=described.rel, abs=0)
        # The log rounds gradient norms to three decimal places.
        assert step[1] == pytest.approx(expected[1], abs=0.00051 + 10 * described.rel)
