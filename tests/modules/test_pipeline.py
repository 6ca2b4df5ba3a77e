"""Tests ``Pipeline`` on four processes, which run the programs of ``worker.py``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ..multiprocess.launch import Ranks, run_ranks, tail, torchrun, wait_until

pytestmark = pytest.mark.multiprocess

WORKER = Path(__file__).with_name("worker.py")
RANKS, LIMIT_S = 4, 300.0
PROGRAMS = re.findall(r"^def (\w+)\(\) -> None:", WORKER.read_text(), re.MULTILINE)[:-1]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns the results of each rank of one job, which runs the programs of all tests."""
    folder = tmp_path_factory.mktemp("pipeline")
    log = folder / "output.txt"
    run_ranks([str(WORKER), str(folder), *PROGRAMS], world_size=RANKS, log=log, limit_s=LIMIT_S)
    paths = [folder / f"{rank}.json" for rank in range(RANKS)]
    assert any(path.is_file() for path in paths), tail(log)
    return [json.loads(path.read_text()) for path in paths if path.is_file()]


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_on_four_processes(results: list[dict[str, Any]], program: str) -> None:
    errors = [result["error"] for result in results if result["error"]]
    assert [program in result["done"] for result in results] == [True] * RANKS, "\n".join(errors)


@pytest.mark.parametrize(
    ("program", "reports"),
    [("unequal_dictionaries", 0), ("unequal_models", 2), ("equal_models", 0)],
)
def test_replicas_on_two_processes(tmp_path: Path, program: str, reports: int) -> None:
    log = tmp_path / "output.txt"
    torchrun(WORKER.with_name("replica_worker.py"), [program], world_size=2, log=log, limit_s=120.0)
    text = "the processes built the model with different values of "
    assert log.read_text().count(text) == reports


@pytest.mark.parametrize(("transport", "short_rank"), [("shm", 0), ("shm", 1), ("tcp", 0)])
def test_a_rank_that_runs_fewer_steps_is_named_at_once(
    tmp_path: Path, transport: str, short_rank: int
) -> None:
    log = tmp_path / "output.txt"
    worker = WORKER.with_name("unequal_steps.py")
    torchrun(worker, [transport, str(short_rank)], world_size=2, log=log, limit_s=120.0)
    (line,) = re.findall(r"named: (.*)", log.read_text())
    assert re.match(rf"rank {1 - short_rank} of the pipeline .* in step 1, ", line), line
    assert f"but rank {short_rank} closed the channel" in line
    assert line.endswith("run the same number of steps on all ranks")


def test_a_peer_that_dies_as_all_add_up_the_loss_is_named(tmp_path: Path) -> None:
    log = tmp_path / "output.txt"
    ranks = Ranks([str(WORKER.with_name("lost_peer.py"))], world_size=2, log=log, limit_s=120.0)
    try:
        wait_until(lambda: "named: " in log.read_text(), log.read_text, 120.0)
    finally:
        ranks.kill()
    assert "named: rank 0 lost its connection with another rank (" in log.read_text()
    assert "Traceback" not in log.read_text()
