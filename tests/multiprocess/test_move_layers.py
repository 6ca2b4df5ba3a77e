"""Tests that moving layers between stages during training does not change losses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .launch import SMALL_GPT, UNLIKE_LAYERS, CaseRuns

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(250),
]

LIMIT_S = 200.0
BASE = (
    f"{SMALL_GPT} --num-layers 8 --train-iters 7 --lr-decay-iters 9 "
    "--attention-dropout 0.1 --hidden-dropout 0.1"
)
DISTRIBUTED = "--use-distributed-optimizer"
OVERLAPPED = f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
EXPERTS = (
    "--num-experts 4 --moe-layer-freq [0,0,1,1,0,1,1,1] --moe-ffn-hidden-size 32 "
    "--disable-bias-linear --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2"
)
# Each value contains flags, and the numbers of layers per stage after iterations 2 and 4. Some
# stages become empty, some keep their layers, and some give one layer away and receive another.
SHAPES = {
    "pp4": ("--pipeline-model-parallel-size 4", "3-1-2-2", "0-4-1-3"),
    "pp2 dp2 distributed": (f"--pipeline-model-parallel-size 2 {DISTRIBUTED}", "3-5", "7-1"),
    "pp2 dp2 overlapped bf16": (
        f"--pipeline-model-parallel-size 2 --bf16 {OVERLAPPED}",
        "3-5",
        "6-2",
    ),
    "pp2 dp2 v fp16": (
        "--pipeline-model-parallel-size 2 --model-chunks 2 --fp16 --initial-loss-scale 1024 "
        "--loss-scale-window 2",
        "2-3-2-1",
        "0-2-2-4",
    ),
    "pp2 tp2 1f1b sgd bf16": (
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --pipeline-schedule 1f1b "
        "--bf16 --optimizer sgd --sgd-momentum 0.5",
        "1-7",
        "8-0",
    ),
    "pp2 dp2 v adapters distributed bf16": (
        f"--pipeline-model-parallel-size 2 --model-chunks 2 --bf16 --swiglu {DISTRIBUTED} "
        "--lora-rank 2 --lora-dropout 0.1",
        "2-3-2-1",
        "0-2-2-4",
    ),
    "pp4 unlike": (f"--pipeline-model-parallel-size 4 {UNLIKE_LAYERS}", "3-1-2-2", "0-4-1-3"),
    # The norm before the prediction layers moves together with the last layer.
    "pp2 ep2 mtp alltoall distributed": (
        f"{EXPERTS} {DISTRIBUTED} --moe-token-dispatcher-type alltoall --mtp-num-layers 1 "
        "--position-embedding-type rope",
        "3-5",
        "8-0",
    ),
    "pp2 ep2 v allgather fp16": (
        f"{EXPERTS} --model-chunks 2 --moe-token-dispatcher-type allgather --fp16 "
        "--initial-loss-scale 1024 --loss-scale-window 2",
        "2-3-2-1",
        "0-2-2-4",
    ),
}

RESUMED = "pp2 dp2 distributed"


def layers(partition: str) -> list[int]:
    """Returns the number of layers of each stage in ``partition``, such as ``3-5``."""
    return [int(part) for part in partition.split("-")]


def case(name: str, flags: str, steps: int, **more: Any) -> dict[str, Any]:
    """Returns the case ``name`` for ``worker.py``, which takes ``steps`` steps with ``flags``.

    ``more`` replaces other entries of the case.
    """
    all_flags = f"{BASE} --clip-grad 0 {flags}".split()
    defaults = {
        "name": name,
        "flags": all_flags,
        "steps": steps,
        "evaluate_after": 3,
        "after": None,
    }
    return {**defaults, **more}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> CaseRuns:
    """Returns an object that trains all cases on first use, and provides their results."""
    cases = []
    for name, (flags, first, second) in SHAPES.items():
        moves = {"2": layers(first), "4": layers(second)}
        cases.append(case(f"{name} still", flags, 7 if name == RESUMED else 5))
        cases.append(case(name, flags, 5, moves=moves))
    cases.append(case("resumed", SHAPES[RESUMED][0], 7, after=RESUMED))
    return CaseRuns(lambda size: cases, tmp_path_factory.mktemp, LIMIT_S)


@pytest.mark.parametrize("name", SHAPES)
def test_training_is_the_same_to_the_last_bit(runs: CaseRuns, name: str) -> None:
    moved, still = runs(4, name), runs(4, f"{name} still")
    assert moved["losses"] == [losses[:5] for losses in still["losses"]]
    assert moved["further"] == [losses[:5] for losses in still["further"]]
    assert moved["evaluated"] == still["evaluated"]
    assert moved["grad_norms"][0] == pytest.approx(still["grad_norms"][0][:5], rel=1e-5)
    assert moved["params_norm"][0] == pytest.approx(still["params_norm"][0], rel=1e-5)


def test_a_checkpoint_has_the_new_partition_and_goes_on(runs: CaseRuns) -> None:
    resumed, still = runs(4, "resumed"), runs(4, f"{RESUMED} still")
    (manifest,) = (runs.folders[4] / RESUMED).glob("*/manifest.json")
    settings = json.loads(manifest.read_text())["config"]
    assert settings["schedule"]["partition"] == layers(SHAPES[RESUMED][2])
    assert resumed["losses"] == [losses[5:] for losses in still["losses"]]
