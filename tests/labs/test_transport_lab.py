"""Tests the transports between nodes of the RDMA lab with real RDMA verbs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.labs import rdma_speed as lab_benchmark

from ..cpp_tests import VERBS, CppTests
from ..multiprocess.launch import run_forked
from . import rdma_lab
from .rdma_lab import Result, run
from .test_rdma_lab import rdma_lab_or_skip

pytestmark = [
    pytest.mark.rdma_lab,
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # The first test may have to compile the kernel.
]

ROOT = Path(__file__).absolute().parents[2]
DEBIAN_PYTHON = "/usr/bin/python3"
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
TWO_STAGES = "--pipeline-model-parallel-size 2 --model-chunks 2".split()


lab = pytest.fixture(scope="module", autouse=True)(rdma_lab_or_skip)


@pytest.fixture(scope="module")
def programs() -> CppTests:
    """Returns an object that builds the C++ tests with real RDMA verbs."""
    return build_with_verbs("cpp-tests-verbs")


def build_with_verbs(folder: str, flags: Sequence[str] = ()) -> CppTests:
    """Returns a builder of C++ tests in ``folder``. Skips the test if libibverbs is missing.

    ``flags`` contains additional flags for the compiler.
    """
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None or not Path("/usr/include/infiniband/verbs.h").exists():
        pytest.skip("needs a C++ compiler and libibverbs-dev")
    flags = (*VERBS, *flags)
    return CppTests(compiler, flags=flags, folder=ROOT / "build" / folder)


def on_nodes(script: str, *, nodes: int, timeout_s: float, **more: str) -> Result:
    """Runs the shell script ``script`` on ``nodes`` nodes, and returns the result.

    In the script, ``$PYTHON`` is this interpreter. The run fails after ``timeout_s`` seconds.
    ``more`` contains additional environment variables.
    """
    return run(
        ["sh", "-ec", script],
        nodes=nodes,
        memory_mib=3000 if nodes == 1 else 1500,
        timeout_s=timeout_s,
        env=VARIABLES | {"PYTHON": sys.executable} | more,
    )


def test_rdma_keeps_the_contract_of_all_transports() -> None:
    command = "-m pytest -q -p no:cacheprovider -k rdma tests/transport/test_contract.py"
    script = f"cd {ROOT}; $PYTHON {command}"
    result = on_nodes(script, nodes=1, timeout_s=900.0, TRANSPORT_CONTRACT="rdma")
    assert result.status == 0, result.text
    passed = re.search(r"(\d+) passed", result.text)
    assert passed is not None, result.text
    assert int(passed[1]) >= 20
    assert "skipped" not in result.text


SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}
SANITIZED_TESTS = (
    ("rdma_channel_test", "both directions, four queue pairs", "01"),
    ("rdma_channel_test", "both directions, one slot", "01"),
    ("channel_test", "sizes (rdma)", "0"),
    ("channel_test", "returns (rdma)", "1"),
    ("channel_test", "reserve (rdma)", "1"),
)
"""Tests that run with sanitizers, each with a program, its argument, and the nodes that run it.

There are few tests, because the nodes are slow.
"""


@pytest.mark.sanitizer
def test_cpp_with_sanitizers_on_emulated_nodes() -> None:
    """Checks that C++ programs with real verbs pass the address, UB and thread sanitizers."""
    if reason := rdma_lab.qemu.why_not():
        pytest.skip(reason)
    lines, expected, port = [], {"0": 0, "1": 0}, 21000
    for name, flags in SANITIZERS.items():
        programs = build_with_verbs(f"cpp-tests-verbs-{name}", flags)
        for program, only, nodes in SANITIZED_TESTS:
            # The ports of a program are not free immediately after it exits, so each program uses
            # different ports.
            port += 100
            command = shlex.join([str(programs.build(program)), only])
            lines.append(f"case {nodes} in *$RANK*) LAB_FIRST_PORT={port} {command};; esac")
            for node in nodes:
                expected[node] += 1
    runs = "\n".join(lines)
    # The thread sanitizer supports at most 28 bits of address space randomization.
    script = f"""
        echo 28 >/proc/sys/vm/mmap_rnd_bits
        export ASAN_OPTIONS=detect_leaks=1 TSAN_OPTIONS=halt_on_error=1 TEST_PATIENCE_S=240
        {runs}
    """
    result = run(["sh", "-ec", script], timeout_s=900.0, memory_mib=1500, machine="qemu")
    assert result.status == 0, result.text
    for said, count in zip(result.output, expected.values(), strict=True):
        assert said.count("0 failed\n") == count, result.text


@pytest.mark.parametrize("name", ["rdma_channel_test", "rdma_fault_test"])
def test_cpp_on_two_nodes(programs: CppTests, name: str) -> None:
    """Checks transfers, lost peers, lost packets, a cut link, and violations of the protocol."""
    result = run([str(programs.build(name))], timeout_s=600.0)
    assert result.status == 0, result.text
    for said in result.output:
        assert said.endswith("0 failed\n"), result.text


def test_cpp_contract_of_all_transports(programs: CppTests) -> None:
    result = run([str(programs.build("channel_test")), "(rdma)"], nodes=1, timeout_s=600.0)
    assert result.status == 0, result.text
    assert result.output[0].count("ok   ") > 15, result.text


def test_killed_ranks_leave_nothing_and_are_missed() -> None:
    others, _slowest, left = lab_benchmark.kills(3).rows
    assert (others.value, left.value) == (0, 0), (others, left)


def test_a_peer_written_from_the_description_alone(programs: CppTests) -> None:
    """Checks that an independent peer, written only from the documentation, echoes all tensors."""
    script = f"""
        if [ $RANK = 0 ]; then
            {programs.build("rdma_echo_test")} 21001 8 8192
            {programs.build("rdma_echo_test")} 21002 1 100
        else
            {DEBIAN_PYTHON} -c 'import pyverbs' || exit 77
            {DEBIAN_PYTHON} tests/labs/pyverbs_peer.py --port 21001
            {DEBIAN_PYTHON} tests/labs/pyverbs_peer.py --port 21002 --slots 1 --slot-bytes 100
        fi
    """
    result = on_nodes(f"cd {ROOT}\n{script}", nodes=2, timeout_s=300.0)
    if 77 in result.statuses:
        pytest.skip("needs python3-pyverbs")
    assert result.status == 0, result.text
    assert result.output[1].count("echoed 300 messages\n") == 2, result.text


def test_two_nodes_choose_rdma_and_a_gpt_learns_over_any_transport_as_in_one_process(
    tmp_path: Path,
) -> None:
    program = [str(ROOT / "pretrain_gpt.py"), *GPT]
    runs = {"a check": ["-m", "megatron.adaptive", *"transport --check --seconds 0.5".split()]}
    for transport in ("rdma", "tcp"):
        runs[f"over {transport}"] = [*program, *TWO_STAGES, "--transport", transport]
    programs = [
        {"title": title, "variables": {"MASTER_PORT": str(29501 + number)}, "words": command}
        for number, (title, command) in enumerate(runs.items())
    ]
    script = f"$PYTHON tests/labs/one_import.py {shlex.quote(json.dumps(programs))}"
    result = on_nodes(f"cd {ROOT}; {script}", nodes=2, timeout_s=900.0)
    assert result.status == 0, result.text
    check, *jobs = re.split("over (?:rdma|tcp)\n", result.output[0])
    assert re.search(r"0-1 +\* rdma +[0-9.]+ us +[0-9.]+ GB/s  both have an active port", check)
    assert "do not see each other's processes" in check
    for other in ("tcp", "gloo"):
        assert re.search(rf"0-1 +{other} +[0-9.]+ us", check), check

    alone = run_forked(program, folder=tmp_path, limit_s=300.0)
    assert alone.returncode == 0, alone.stderr
    expected = losses_of(alone.stdout)
    assert len(expected) == 4
    last = re.split("over (?:rdma|tcp)\n", result.output[1])[1:]
    for transport, parts in zip(("rdma", "tcp"), zip(jobs, last, strict=True), strict=True):
        text = "".join(parts)
        assert f"transport: {transport} for ranks 0-1 (asked for)" in text
        assert losses_of(text) == pytest.approx(expected, rel=1e-5)


def losses_of(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", text)]
