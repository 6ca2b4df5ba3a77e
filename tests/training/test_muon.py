"""Compares ``--optimizer muon`` with a separate training loop, with and without moves of layers.

megatron-core imports muon from a package that requires Python 3.12. That package imports
``typing.override``, which ``muon_path`` adds to older versions of Python.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from ..multiprocess.launch import forkserver, run_ranks, tail
from ..support.core_trees import UNPACKED
from .test_own_loop import GATED, GATED_FLAGS, UNTIED, Model, compare
from .test_releases import INSTALLED, path_of

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.multiprocess]

WORKER = Path(__file__).parents[1] / "multiprocess" / "worker.py"
RELEASE = "0.19.2"
# Each tensor-parallel rank has only a part of a weight, but muon needs whole weights. In the mode
# duplicated, all ranks compute the update of the whole weight.
LLAMA = Model(
    flags=f"{GATED_FLAGS} {UNTIED} --ffn-hidden-size 64 --group-query-attention"
    " --num-query-groups 2 --mtp-num-layers 1 --tensor-model-parallel-size 2"
    " --make-vocab-size-divisible-by 64"
    " --optimizer muon --muon-tp-mode duplicated --muon-nesterov --weight-decay 0.1",
    ranks=4,
    settings={**GATED, "num_query_groups": 2, "ffn_hidden_size": 64, "mtp_num_layers": 1},
    optimizer={
        "optimizer": "muon",
        "muon_momentum": 0.9,
        "muon_nesterov": True,
        "muon_tp_mode": "duplicated",
        "weight_decay": 0.1,
    },
    rel=3e-6,
)
FLAGS = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2
    --lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size 255
    --attention-dropout 0 --hidden-dropout 0 --pipeline-model-parallel-size 2 --optimizer muon
    --train-iters 5 --eval-iters 0 --decoupled-lr 5e-3
"""


@pytest.fixture(scope="module")
def muon_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yields a PYTHONPATH with which ranks import megatron-core and the package for muon."""
    package = UNPACKED / "emerging-optimizers==0.3.0"
    if find_spec("emerging_optimizers") is None and not package.exists():
        pytest.skip("emerging-optimizers is missing; run bash prerequisite.sh --versions")
    parts = [path_of(RELEASE), str(package)]
    if sys.version_info < (3, 12):
        folder = tmp_path_factory.mktemp("names")
        line = "import typing, typing_extensions; typing.override = typing_extensions.override"
        (folder / "sitecustomize.py").write_text(line)
        parts.append(str(folder))
    path = ":".join(parts)
    yield path
    forkserver(path).close()


def test_steps_are_those_of_megatron_cores_own_loop(
    muon_path: str, tmp_path: Path, write_tokens: Callable[..., str]
) -> None:
    compare(LLAMA, muon_path, tmp_path, write_tokens)


def test_stages_move_with_the_state_of_both_optimizers(muon_path: str, tmp_path: Path) -> None:
    """Checks that losses are the same if layers move, or if a restart changes the placement."""
    plain = {"flags": FLAGS.split(), "steps": 3, "evaluate_after": 5, "after": None}
    whole = {**plain, "steps": 5}
    half = [*plain["flags"], "--bf16"]
    v = "--pipeline-schedule zb-v --num-virtual-stages-per-pipeline-rank 2".split()
    cases = [
        {**whole, "name": "plain"},
        {**whole, "name": "moved", "moves": {"2": [3, 1], "4": [1, 3]}},
        {**plain, "name": "saved", "moves": {"1": [3, 1]}, "save": True},
        {**whole, "name": "continued", "flags": [*plain["flags"], *v], "after": "saved"},
        {**whole, "name": "half", "flags": half},
        {**whole, "name": "half moved", "flags": half, "moves": {"2": [3, 1]}},
    ]
    cases_file, results = tmp_path / "cases.json", tmp_path / "results.json"
    cases_file.write_text(json.dumps(cases))
    log = tmp_path / "output.txt"
    command = [str(WORKER), str(cases_file), str(results)]
    status = run_ranks(command, world_size=2, log=log, limit_s=200.0, python_path=muon_path)
    assert status == 0, tail(log)
    seen = json.loads(results.read_text())
    losses = {name: report["losses"][-1] for name, report in seen.items()}
    losses["continued"] = [*losses["saved"], *seen["continued"]["losses"][0]]
    assert losses["moved"] == pytest.approx(losses["plain"], rel=1e-6)
    assert losses["continued"] == pytest.approx(losses["plain"], rel=1e-6)
    assert losses["half moved"] == pytest.approx(losses["half"], rel=1e-4)
    assert len({*losses["plain"]}) == 5


def test_without_its_package_muon_is_refused_in_one_line(tmp_path: Path) -> None:
    log = tmp_path / "output.txt"
    flags = f"{FLAGS} --mock-data".replace("parallel-size 2", "parallel-size 1").split()
    command = ["-m", "megatron.adaptive", "train", "rank", *flags]
    for release in (INSTALLED, RELEASE):
        if release == RELEASE and find_spec("emerging_optimizers") is not None:
            continue
        status = run_ranks(
            command, world_size=1, log=log, limit_s=100.0, python_path=path_of(release)
        )
        said = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
        assert (status, len(said)) == (2, 1), tail(log)
        assert "--optimizer muon" in said[0]
