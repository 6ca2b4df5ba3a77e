"""Tests the plugin with every megatron-core release from 0.15 on, and how releases are detected.

The module also tests ``train megatron-lm``, which runs Megatron-LM's own trainer. Wheels contain
this trainer from release 0.17 on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive import accelerator
from megatron.adaptive.cli import pretrain
from megatron.adaptive.errors import ConfigError, SetupError
from megatron.adaptive.trace.read import read_run

accelerator.install()

from ..multiprocess.launch import run_ranks, tail  # noqa: E402
from ..support.core_trees import trees_of_others  # noqa: E402
from .releases import VERSIONS, real  # noqa: E402
from .test_training import check_numbers, run  # noqa: E402

OTHERS = trees_of_others()
# Up to release 0.17, the loop of megatron-core frees outputs before gloo has sent them.
SHAPES: list[dict[str, Any]] = [
    {"pp": 2, "chunks": 2, "deallocate": False, **model}
    for model in ({}, {"llama": True, "groups": True}, {"llama": True, "mtp": True})
]
LOOP: dict[str, dict[str, Any]] = {
    "adaptive": {"split_backward": False},
    "split": {"split_backward": True},
    "interleaved": {"schedule": "interleaved"},
}
V: dict[str, dict[str, Any]] = {
    "whole": {"placement": "v", "split_backward": False},
    "split, then loop": {"schedule": "zb-v", "then": None},
}


def in_pairs(orders: dict[str, dict[str, Any]], turn: int) -> list[dict[str, Any]]:
    """Returns a case for each entry of ``orders``, combined with one of the models.

    ``turn`` shifts which model is combined with which order.
    """
    return [
        {
            "shape": SHAPES[(turn + number) % len(SHAPES)],
            "runs": {name: settings},
            **({"from": f"weights {number}"} if orders is V else {}),
        }
        for number, (name, settings) in enumerate(orders.items())
    ]


FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --train-iters 4 "
    "--lr 1e-3 --eval-iters 1 --eval-interval 100 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 255 --pipeline-model-parallel-size 2 --log-interval 1 --attention-dropout 0 "
    "--hidden-dropout 0 --num-workers 0"
)
SEEN = re.compile(r"(?:lm loss|lm loss value|grad norm): ([0-9.E+-]+)")


def test_steps_are_those_of_its_own_schedule(
    python_path: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    turn = VERSIONS.index(request.node.callspec.params["python_path"])
    loop, vee = in_pairs(LOOP, turn), in_pairs(V, turn)
    results = run([*loop, *vee], 2, tmp_path, fresh=False, python_path=python_path)
    check_numbers(results[len(loop) :])
    for case in results[: len(loop)]:
        plain = case["runs"].pop("plain")
        assert len(plain[-1]["trained"]["losses"]) == 3
        # The results must be bitwise equal.
        assert case["runs"] == dict.fromkeys(case["runs"], plain)


@pytest.mark.parametrize(
    "python_path",
    [pytest.param(version, marks=real) for version in ("0.15.3", "0.19.2", *OTHERS)],
    indirect=True,
)
def test_tensor_parallel_steps_too(python_path: str, tmp_path: Path) -> None:
    # The stages are placed in a loop and in a V, each with and without split backward passes.
    cases = [*in_pairs(LOOP, 0)[:2], in_pairs(V, 1)[1]]
    cases = [{**case, "shape": {**case["shape"], "tp": 2}} for case in cases]
    check_numbers(run(cases, 4, tmp_path, fresh=False, python_path=python_path))


@pytest.mark.parametrize(
    "python_path",
    [pytest.param(version, marks=real) for version in ("0.17.1", "0.19.2", *OTHERS)],
    indirect=True,
)
def test_its_own_trainer_has_the_steps_of_its_own_schedule(
    python_path: str, tmp_path: Path
) -> None:
    """Checks ``train megatron-lm`` with and without the schedules of this project."""
    said = {}
    for name, arguments in {
        "megatron": [],
        "adaptive": "--save saved --save-interval 3 --exit-interval 3 --trace-dir traces".split(),
        "zb-v": "--load saved --num-virtual-stages-per-pipeline-rank 2".split(),
    }.items():
        log = tmp_path / f"{name}.txt"
        command = ["-m", "megatron.adaptive", "train", "megatron-lm", *FLAGS.split(), *arguments]
        command += ["--pipeline-schedule", name]
        ended = run_ranks(command, world_size=2, log=log, limit_s=150.0, python_path=python_path)
        assert ended == 0, tail(log)
        said[name] = log.read_text()
    assert "megatron.adaptive: schedule adaptive on 2 pipeline ranks" in said["adaptive"]
    # The output contains three steps, one more step in a V that starts from the loop's checkpoint,
    # and the results on the validation and test sets.
    first, rest = (SEEN.findall(said[name]) for name in ("adaptive", "zb-v"))
    assert (len(first), len(rest)) == (6, 4)
    assert first + rest == SEEN.findall(said["megatron"])
    assert (tmp_path / "saved/latest_checkpointed_iteration.txt").read_text() == "3"
    assert sorted(read_run(tmp_path / "traces").ranks) == [0, 1]


@pytest.mark.parametrize(
    "python_path",
    [pytest.param(version, marks=real) for version in ("0.17.1", "0.19.2")],
    indirect=True,
)
def test_its_own_trainer_makes_damaged_indices_anew(
    python_path: str, tmp_path: Path, write_tokens: Callable[..., str]
) -> None:
    """Checks that a flipped bit in an index file, which would change the samples, is detected."""
    prefix = write_tokens([[1 + n % 200] * 40 for n in range(60)])
    arguments = [word for word in FLAGS.split() if word != "--mock-data"]
    arguments += ["--data-path", prefix, "--split", "80,20,0", "--pipeline-schedule", "adaptive"]
    said = []
    for number in range(2):
        log = tmp_path / f"{number}.txt"
        command = ["-m", "megatron.adaptive", "train", "megatron-lm", *arguments]
        ended = run_ranks(command, world_size=2, log=log, limit_s=150.0, python_path=python_path)
        assert ended == 0, tail(log)
        said.append(SEEN.findall(log.read_text()))
        (path,) = (Path(prefix).parent / "index_cache").glob("*train-shuffle.npy")
        whole = path.read_bytes()
        path.write_bytes(whole[:140] + bytes([whole[140] ^ 1]) + whole[141:])
    assert said[0] == said[1]
    assert len(said[0]) > 4
    assert "shuffle.npy is damaged" in log.read_text()


@pytest.mark.parametrize(
    "python_path",
    [pytest.param(version, marks=real) for version in ("0.17.1", "0.18.2", "0.19.2")],
    indirect=True,
)
def test_two_chunks_in_half_precision_on_megatrons_own_schedule(
    python_path: str, tmp_path: Path
) -> None:
    """Checks that outputs are not freed before gloo has sent them."""
    arguments = "--num-virtual-stages-per-pipeline-rank 2 --bf16 --position-embedding-type rope"
    said = {}
    for name in ("megatron", "adaptive"):
        log = tmp_path / f"{name}.txt"
        command = [
            "-m",
            "megatron.adaptive",
            "train",
            "megatron-lm",
            *FLAGS.split(),
            *arguments.split(),
        ]
        command += ["--pipeline-schedule", name]
        ended = run_ranks(command, world_size=2, log=log, limit_s=150.0, python_path=python_path)
        assert ended == 0, tail(log)
        said[name] = SEEN.findall(log.read_text())
    assert len(said["megatron"]) == 10  # The ten lines are for four steps, validation and test.
    assert said["adaptive"] == said["megatron"]


def test_one_without_trainer_names_the_version_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        SetupError,
        match=r"^megatron-core [\d.]+ does not contain Megatron-LM's trainer.*0\.17 or new",
    ):
        pretrain.main([])


def test_what_needs_megatrons_own_script() -> None:
    error = pretrain._needs_script("fim_data", "text to be filled in")
    assert isinstance(error, ConfigError)
    assert str(error).startswith(
        "--fim-data (text to be filled in) requires Megatron-LM's own script"
    )
