"""Tests that the transport in ``examples/own_transport`` gives the same losses as gloo."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.transport.kind import transport_kind

from ..multiprocess.launch import ROOT, forking_every, run_ranks

FOLDER = ROOT / "examples" / "own_transport"
FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16"
    " --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 6 --lr 1e-3"
    " --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 63 --mock-data --log-interval 1"
    " --pipeline-model-parallel-size 2 --train-iters 3"
).split()

OTHERS = """
from megatron.adaptive.transport.kind import TransportKind


class Alone(TransportKind):
    def why_not(self, first, second):
        return "it connects nobody"


class Empty(TransportKind):
    def open(self, opening):
        return object()


class Damaged(TransportKind):
    def open(self, opening):
        if opening.rank == 1:
            return {}["key"]
        opening.gather("something")
"""


def train(folder: Path, transport: str, status: int = 0) -> str:
    log = folder / f"{transport.rpartition(':')[2]}.txt"
    ended = run_ranks(
        [str(ROOT / "pretrain_gpt.py"), *FLAGS, "--transport", transport],
        world_size=2,
        log=log,
        limit_s=200,
        python_path=f"{FOLDER}:{folder}:{ROOT}",
    )
    assert ended == status, log.read_text()
    return log.read_text()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_it_trains_to_the_same_losses(tmp_path: Path) -> None:
    logs = [train(tmp_path, name) for name in ("gloo", "files:Files")]
    losses = [re.findall(r"lm loss: (\S+)", log) for log in logs]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]
    assert "transport: files:Files for ranks 0-1 (asked for)" in logs[1]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiprocess
def test_it_is_checked_between_two_ranks(tmp_path: Path) -> None:
    arguments = ["--check", "--seconds", "0.1", "--json", "--transport", "files:Files"]
    variables = forking_every()
    done = subprocess.run(
        [sys.executable, "-m", "megatron.adaptive", "transport", *arguments],
        env={**variables, "PYTHONPATH": f"{FOLDER}:{variables['PYTHONPATH']}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (outcome,) = json.loads(done.stdout)
    assert (outcome["transport"], outcome["works"]) == ("files:Files", True)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("others:Alone", "others:Alone cannot connect ranks 0 and 1: it connects nobody"),
        ("others:Empty", "open returned object without name, completions, send, reserve"),
        (
            "others:Damaged",
            r"others:Damaged \(.*\), rank 1: .*others.py:\d+ raised KeyError: 'key'",
        ),
    ],
)
def test_a_transport_that_cannot_be_opened(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "others.py").write_text(OTHERS)
    log = train(tmp_path, name, status=2)
    assert re.search(message, log), log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("json:dumps", "must be a subclass of TransportKind"),
        ("json:nothing", "has no 'nothing'"),
        ("pigeon", "'pigeon' is neither one of auto, shm, rdma, tcp, gloo, nccl"),
    ],
)
def test_a_name_that_leads_nowhere(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        transport_kind(name)


def test_an_installed_package_offers_a_transport_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "their_transports-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-transports\nVersion: 1.0\n")
    points = "[megatron_adaptive.transports]\npigeons = files:Files\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)
    assert type(transport_kind("pigeons")).__name__ == "Files"
    assert TransportConfig(transport="pigeons").forced == "pigeons"
