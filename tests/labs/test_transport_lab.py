"""The transports between small machines with software RDMA, as Python programs use them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from . import rdma_lab
from .rdma_lab import Result, run

pytestmark = [
    pytest.mark.rdma_lab,
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # the first test may have to compile the kernel
]

ROOT = Path(__file__).absolute().parents[2]
VARIABLES = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "eth0",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
}
GPT = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 "
    "--global-batch-size 4 --lr 1e-3 --log-interval 1 --mock-data --vocab-size 255 "
    "--tokenizer-type NullTokenizer --eval-iters 0 --seed 7 --train-iters 4"
).split()


@pytest.fixture(scope="module", autouse=True)
def lab(pytestconfig: pytest.Config) -> None:
    """Skip where the lab cannot run."""
    if reason := rdma_lab.why_not():
        pytest.skip(reason)
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    try:
        with capture.global_and_fixture_disabled():  # that it is being compiled is worth a line
            rdma_lab.prepare()
    except rdma_lab.LabError as error:  # no network, most likely
        pytest.skip(str(error))


def python(words: list[str], *, nodes: int, timeout_s: float, **more: str) -> Result:
    """Run this Python on all nodes."""
    return run(
        [sys.executable, *words],
        nodes=nodes,
        memory_mib=3000 if nodes == 1 else 1500,
        timeout_s=timeout_s,
        env=VARIABLES | more,
    )


def test_rdma_keeps_the_contract_of_all_transports() -> None:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "rdma"]
    words += [str(ROOT / "tests" / "transport" / "test_contract.py")]
    result = python(words, nodes=1, timeout_s=900.0, TRANSPORT_CONTRACT="rdma")
    assert result.status == 0, result.text
    passed = re.search(r"(\d+) passed", result.text)
    assert passed is not None, result.text
    assert int(passed[1]) >= 20
    assert "skipped" not in result.text


def test_two_nodes_choose_rdma_and_it_works() -> None:
    words = ["-m", "megatron.adaptive", "transport", "--check", "--seconds", "1"]
    result = python(words, nodes=2, timeout_s=300.0)
    assert result.status == 0, result.text
    assert re.search(
        r"0-1 +\* rdma +[0-9.]+ us +[0-9.]+ GB/s  both have an active port", result.text
    )
    assert "do not see each other's processes" in result.text
    for other in ("tcp", "gloo"):
        assert re.search(rf"0-1 +{other} +[0-9.]+ us", result.text), result.text


@pytest.mark.parametrize("transport", ["rdma", "tcp"])
def test_a_gpt_over_two_nodes_learns_as_on_one(transport: str) -> None:
    program = [str(ROOT / "pretrain_gpt.py"), *GPT]
    alone = python(program, nodes=1, timeout_s=300.0)
    assert alone.status == 0, alone.text
    flags = ["--pipeline-model-parallel-size", "2", "--model-chunks", "2"]
    result = python([*program, *flags, "--transport", transport], nodes=2, timeout_s=600.0)
    assert result.status == 0, result.text
    assert f"transport: {transport} for ranks 0-1 (asked for)" in result.text
    expected, losses = losses_of(alone.text), losses_of(result.text)
    assert len(expected) == 4
    assert losses == pytest.approx(expected, rel=1e-5)


def losses_of(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", text)]
