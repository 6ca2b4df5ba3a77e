"""Tests that loggers are selected by name, and that users can define loggers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron.adaptive.config.arguments import parse
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.training import loggers
from megatron.adaptive.training.logger import built_in_loggers, find_loggers, make_logger

from ..multiprocess.launch import ROOT, torchrun

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16"
    " --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3"
    " --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 63 --mock-data --log-interval 1"
    " --train-iters 3"
).split()

OWN = '''
import json
from pathlib import Path

from megatron.adaptive.training.logger import Logger


class Lines(Logger):
    """Writes each point of a curve as a line of JSON."""

    def __init__(self, cfg):
        self.file = Path(cfg.checkpoint.save, "points.jsonl").open("a")

    def scalar(self, tag, value, step):
        print(json.dumps([tag, value, step]), file=self.file)

    def close(self):
        self.file.close()


class Damaged(Logger):
    def __init__(self, cfg):
        {}["key"]
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder with a user's module of loggers, which looks like an installed package."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "my_loggers.py").write_text(OWN)
    info = folder / "my_loggers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-loggers\nVersion: 1.0\n")
    points = "[megatron_adaptive.loggers]\nlines = my_loggers:Lines\n"
    (info / "entry_points.txt").write_text(points)
    return folder


def test_a_logger_of_the_user_receives_the_curves(folder: Path, tmp_path: Path) -> None:
    save = tmp_path / "saved"
    save.mkdir()
    log = tmp_path / "output.txt"
    flags = ["--pipeline-model-parallel-size", "2", "--save", str(save), "--save-interval", "9"]
    torchrun(
        ROOT / "pretrain_gpt.py",
        [*FLAGS, *flags, "--logger", "my_loggers:Lines"],
        world_size=2,
        log=log,
        limit_s=200,
        python_path=f"{folder}:{ROOT}",
    )
    points = [json.loads(line) for line in (save / "points.jsonl").read_text().splitlines()]
    losses = [f"{value:.6E}" for tag, value, _ in points if tag == "lm loss"]
    assert len(losses) == 3
    text = log.read_text()
    assert all(f"lm loss: {loss}" in text for loss in losses)
    assert {step for _, _, step in points} == {1, 2, 3}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("nothing", r"'nothing' must be one of .*mlflow, .*tensorboard, .*wandb"),
        ("my_loggers:json", "must be a subclass of .*Logger, but is a module"),
        ("my_loggers:Damaged", r"my_loggers:Damaged: .*my_loggers.py:\d+ raised KeyError: 'key'"),
        ("lines,tensorboard", "tensorboard requires --tensorboard-dir"),
    ],
)
def test_a_logger_that_cannot_be_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, names: str, message: str
) -> None:
    monkeypatch.syspath_prepend(folder)
    cfg = parse([*FLAGS, "--logger", names], world_size=1)
    with pytest.raises(ConfigError, match=message):
        print([make_logger(logger, cfg) for logger in find_loggers(cfg)])
    monkeypatch.delitem(sys.modules, "my_loggers", raising=False)


def test_a_file_in_the_folder_is_a_logger_of_this_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = OWN.split("class Damaged")[0]
    text = text.replace("    def __init__", '    name = "lines"\n\n    def __init__')
    (tmp_path / "lines.py").write_text(text)
    before = [*built_in_loggers()]
    monkeypatch.setattr(loggers, "__path__", [*loggers.__path__, str(tmp_path)])
    assert {*built_in_loggers()} == {*before, "lines"}
    cfg = parse([*FLAGS, "--logger", "lines"], world_size=1)
    assert [logger.name for logger in find_loggers(cfg)] == ["lines"]
    monkeypatch.delitem(sys.modules, f"{loggers.__name__}.lines")
