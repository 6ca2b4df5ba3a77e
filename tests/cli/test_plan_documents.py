"""Tests ``plan --slice-tokens``: reading of document lengths, and training with the plan."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.adaptive.cli import plan_inputs
from megatron.adaptive.cli.plan import main
from megatron.adaptive.cli.plan_inputs import read_lengths
from megatron.adaptive.cluster.conf import load_conf
from megatron.adaptive.cluster.node_processes import check_trainer, trainer_flags
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.documents import make_documents
from megatron.adaptive.planner.model_file import arguments_model
from megatron.adaptive.schedule.action import each_count
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.status_files import PROGRESS_NAME

from ..multiprocess.launch import ROOT, torchrun

MODEL = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 256 "
MODEL += "--max-position-embeddings 256 --vocab-size 63 --attention-dropout 0 --hidden-dropout 0"
CLUSTER = """\
format: 1
nodes: [{gpu: A100-40, count: 1, gpus_per_node: 2, link: {bandwidth: 230 GB/s}}]
network: {bandwidth: 25 Gbit/s}
"""
LONG_TAIL = "--document-lengths lognormal:20:1.5"


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return path


def plan(cluster: Path, flags: str) -> int:
    command = ["--cluster", str(cluster), "--model", MODEL, "--precision", "fp32"]
    more = "--global-batch-size 16 --pp 2 --schedules adaptive --attention kernel"
    return main([*command, *more.split(), *flags.split()])


def write_tokens(prefix: Path, lengths: list[int]) -> None:
    """Writes a token file to ``prefix`` that contains one document for each of ``lengths``."""
    count = len(lengths)
    starts = np.cumsum([0, *lengths])[:-1] * 2
    parts = (np.array(lengths, "<i4"), starts.astype("<i8"), np.arange(count + 1, dtype="<i8"))
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, count, count + 1)
    Path(f"{prefix}.idx").write_bytes(header + b"".join(part.tobytes() for part in parts))
    Path(f"{prefix}.bin").write_bytes(np.ones(sum(lengths), "<u2").tobytes())


def test_lengths_are_read_from_token_files_lists_and_distributions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokens(tmp_path / "corpus", [5, 1, 300, 0, 2])
    # A sample is one token shorter than its document, and is truncated at the sequence length.
    lengths, longest = read_lengths(str(tmp_path / "corpus"), 256)
    assert (lengths.tolist(), longest) == ([4, 256, 1], 256)
    for text in ("7 8\n300\n", "[7, 8, 300]"):
        (tmp_path / "lengths").write_text(text)
        monkeypatch.setattr(plan_inputs, "_PIECE", 1)
        lengths, longest = read_lengths(str(tmp_path / "lengths"), 256)
        assert (lengths.tolist(), longest) == ([7, 8, 256], 256)
    lengths, longest = read_lengths("lognormal:20:1.5", 256)
    assert longest == max(lengths) == 256
    assert np.median(lengths) == pytest.approx(20, abs=1)
    # Every process must draw the same lengths.
    assert np.array_equal(read_lengths("lognormal:20:1.5", 256)[0], lengths)


def test_many_lengths_are_never_python_objects(tmp_path: Path) -> None:
    """Checks that lengths take less memory than Python lists, which need 32 bytes per length."""
    count = 1_000_000
    write_tokens(tmp_path / "corpus", [2] * count)
    model = arguments_model(MODEL.split(), "m", "fp32", attention="kernel")
    make_documents(model, [1], 16)  # The first call imports modules, so it is not measured.
    tracemalloc.start()
    try:
        lengths, _ = read_lengths(str(tmp_path / "corpus"), 256)
        documents = make_documents(model, lengths, 16)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert documents.mean_tokens == 16
    assert peak_bytes < 20 * count


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--slice-tokens 64", "--slice-tokens 64 requires the lengths of the documents; add -"),
        ("--slice-tokens auto", "--slice-tokens auto requires the lengths of the documents"),
        (LONG_TAIL, "lognormal:20:1.5 has no effect without .*; add --slice-tokens auto"),
        (f"{LONG_TAIL} --slice-tokens 8", "a slice must have at least 16 tokens"),
        (f"{LONG_TAIL} --slice-tokens 512", "512 must not exceed the longest document, .* 256"),
        (f"{LONG_TAIL} --slice-tokens x", "must be a list of different positive integers"),
        (f"{LONG_TAIL} --slice-tokens 32 --sequence-slices 4", "conflicts with --sequence-slices"),
        (f"{LONG_TAIL} --slice-tokens 32 --schedules 1f1b", "got --schedules 1f1b"),
        (f"{LONG_TAIL} --slice-tokens 32 --export megatron", "does not cut packed documents"),
        ("--slice-tokens 32 --document-lengths lognormal:20", "must be lognormal:MEDIAN:SIGMA"),
        ("--slice-tokens 32 --document-lengths lognormal:0:1", "must be lognormal:MEDIAN:SIGMA"),
        ("--slice-tokens 32 --document-lengths lognormal:20:nan", "must be lognormal:MEDIAN:SIGMA"),
        ("--slice-tokens 32 --document-lengths nowhere", "nowhere: No such file .*; --document-le"),
        ("--slice-tokens 32 --document-lengths {}/bad", "number 2 is -3"),
        ("--slice-tokens 32 --document-lengths {}/empty", "no document that is long enough"),
    ],
)
def test_a_bad_request_is_named_in_one_line(
    flags: str, message: str, cluster: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad").write_text("5 -3 7")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match=message) as caught:
        plan(cluster, flags.format(tmp_path))
    assert "\n" not in str(caught.value)


def test_trainer_and_launcher_run_what_was_planned(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, conf = tmp_path / "plan.json", tmp_path / "plan.sh"
    assert plan(cluster, f"{LONG_TAIL} --slice-tokens auto --output {path} --conf {conf}") == 0
    document = json.loads(path.read_text())
    tokens = document["slice_tokens"]
    assert tokens in (16, 32, 64, 128, 256)
    assert f"{tokens} tokens" in capsys.readouterr().out
    run_flags = "--train-iters 1 --lr 1e-4 --mock-data".split()
    by_plan = parse([*MODEL.split(), *run_flags, "--plan", str(path)], world_size=2)
    assert by_plan.slice_tokens == tokens
    assert by_plan.data.variable_seq_lengths
    (tmp_path / "model.txt").write_text(MODEL)
    file = tmp_path / "conf.sh"
    file.write_text("MODEL=model.txt\nPLAN=plan.json\nDEVICE=cpu\n")
    by_conf = load_conf(file)
    check_trainer(by_conf, 2, tmp_path)
    assert trainer_flags(by_conf, tmp_path).count("--variable-seq-lengths") == 1
    file.write_text(conf.read_text() + "MODEL=model.txt\nDEVICE=cpu\n")
    assert trainer_flags(load_conf(file), tmp_path) == trainer_flags(by_conf, tmp_path)
    with pytest.raises(ConfigError, match="--slice-tokens 48 contradicts --plan"):
        parse(
            [*MODEL.split(), *run_flags, "--plan", str(path), "--slice-tokens", "48"], world_size=2
        )


def test_plans_of_packed_documents_cannot_be_tried(cluster: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert plan(cluster, f"{LONG_TAIL} --slice-tokens 32 --output {path}") == 0
    with pytest.raises(ConfigError, match=r"--try does not support slice_tokens \(32\)"):
        main(["--try", str(path), "--model", MODEL])


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(640)
def test_a_run_of_a_plan_trains_packed_documents(cluster: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    flags = f"{LONG_TAIL} --slice-tokens 32,64 --dp 1 --tp 1 --output {path}"
    assert plan(cluster, flags) == 0
    tokens = json.loads(path.read_text())["slice_tokens"]

    def losses(name: str, world_size: int, *more: str) -> list[float]:
        folder = tmp_path / name
        run = "--mock-data --tokenizer-type NullTokenizer --train-iters 3 --eval-iters 0 "
        run += f"--lr 1e-3 --log-interval 1 --progress-dir {folder}"
        command = [*MODEL.split(), *run.split(), *more]
        log = folder.with_suffix(".txt")
        torchrun(ROOT / "pretrain_gpt.py", command, world_size=world_size, log=log, limit_s=200)
        lines: Any = map(json.loads, (folder / PROGRESS_NAME).read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    alone = "--variable-seq-lengths --micro-batch-size 1 --global-batch-size 16".split()
    ran = losses("planned", 2, "--plan", str(path), "--trace-dir", str(tmp_path / "traces"))
    assert ran == pytest.approx(losses("alone", 1, *alone), rel=1e-5)
    assert len(ran) == 3
    run = read_run(tmp_path / "traces")
    for trace in run.ranks.values():
        for iteration in run.iterations:
            rows = [positions for positions, *_ in trace.lengths(iteration)]
            counts = each_count(len(rows), trace.slices(iteration))
            assert rows == [count * tokens for count in counts]
            assert max(counts) > 1
