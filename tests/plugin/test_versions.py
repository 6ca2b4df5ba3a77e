"""Tests the plugin with all supported megatron-core releases, and the detection of releases.

The module also tests ``train megatron-lm``, which runs the trainer of Megatron-LM. Wheels of
megatron-core contain this trainer since release 0.17.
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
# Outputs are not deallocated, because up to release 0.17 megatron-core frees them before gloo has
# sent them.
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
    """Returns a list of cases. Each case combines an entry of ``orders`` with one of the models.

    ``turn`` determines which model is combined with the first entry.
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
        # The results of all schedules must be bitwise equal to those of megatron-core's schedule.
        assert case["runs"] == dict.fromkeys(case["runs"], plain)


@pytest.mark.parametrize(
    "python_path",
    [pytest.param(version, marks=real) for version in ("0.15.3", "0.19.2", *OTHERS)],
    indirect=True,
)
def test_tensor_parallel_steps_too(python_path: str, tmp_path: Path) -> None:
    # These cases use a loop without and with split backward passes, and a V with split backward
    # passes.
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
    """Checks that Megatron-LM's trainer gives the same results with schedules of this project."""
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
    # The first run has three steps. The second run continues from its checkpoint with one step in a
    # V, and evaluates the validation and test sets.
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
    """Checks that a changed bit in an index file, which would reorder samples, is detected."""
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
    """Checks that outputs are not freed before gloo has sent them, which would change losses."""
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
    # There are ten lines for four steps, the validation set and the test set.
    assert len(said["megatron"]) == 10
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
        "train megatron-lm does not support --fim-data (text to be filled in); run"
    )
