"""Megatron-LM's own trainer from the wheel of megatron-core, with our schedules and without."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.adaptive.cli import pretrain
from megatron.adaptive.errors import ConfigError, SetupError
from megatron.adaptive.trace.read import read_run

from ..multiprocess.launch import ROOT, forkserver, run_ranks, tail

UNPACKED = ROOT / "build/megatron-core"
FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --train-iters 4 "
    "--lr 1e-3 --eval-iters 1 --eval-interval 100 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 255 --transformer-impl local --pipeline-model-parallel-size 2 --log-interval 1 "
    "--no-persist-layer-norm --no-gradient-accumulation-fusion --attention-dropout 0 "
    "--hidden-dropout 0 --num-workers 0"
)
TRACED = "--trace-dir traces"
SEEN = re.compile(r"(?:lm loss|lm loss value|grad norm): ([0-9.E+-]+)")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("version", ["0.17.1", "0.19.2"])
def test_steps_are_those_of_megatrons_own_schedule(version: str, tmp_path: Path) -> None:
    core = UNPACKED / f"megatron-core=={version}"
    others = [path for path in UNPACKED.glob("*==*") if not path.name.startswith("megatron-core")]
    if not core.exists() or not others:
        pytest.skip(f"megatron-core {version} is not there: bash prerequisite.sh --versions")
    path = ":".join(map(str, [core, ROOT, *others]))
    said = {}
    try:
        for name, words in {
            "megatron": [],
            "adaptive": f"--save saved --save-interval 3 --exit-interval 3 {TRACED}".split(),
            "zb-v": "--load saved --num-virtual-stages-per-pipeline-rank 2".split(),
        }.items():
            log = tmp_path / f"{name}.txt"
            command = ["-m", "megatron.adaptive", "pretrain", *FLAGS.split(), *words]
            command += ["--pipeline-schedule", name]
            status = run_ranks(command, world_size=2, log=log, limit_s=150.0, python_path=path)
            assert status == 0, tail(log)
            said[name] = log.read_text()
    finally:
        forkserver(path).close()
    assert "megatron.adaptive: schedule adaptive on 2 pipeline ranks" in said["adaptive"]
    # Three steps, and one more in a V from the loop's checkpoint, then validation and test.
    first, rest = (SEEN.findall(said[name]) for name in ("adaptive", "zb-v"))
    assert (len(first), len(rest)) == (6, 4)
    assert first + rest == SEEN.findall(said["megatron"])
    assert (tmp_path / "saved/latest_checkpointed_iteration.txt").read_text() == "3"
    assert sorted(read_run(tmp_path / "traces").ranks) == [0, 1]


def test_one_without_trainer_names_the_version_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        SetupError, match=r"^megatron-core [\d.]+ carries no trainer .*0\.17 or new"
    ):
        pretrain.main([])


def test_what_needs_megatrons_own_script() -> None:
    error = pretrain._needs_script("fim_data", "text to be filled in")
    assert isinstance(error, ConfigError)
    assert str(error).startswith("--fim-data (text to be filled in) needs Megatron-LM's own script")
