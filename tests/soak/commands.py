"""Checks that invalid command lines and files cause a one-line error and status 2 within 10 s.

The table is :data:`CASES`. In a command line, ``{f}`` stands for the folder of :func:`write_files`.
Tests run the lines in their own process, and :func:`measure` runs each line as a new program.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron.adaptive.trace.trace_format import TraceHeader, header_line, trace_file_name
from tests.multiprocess.launch import ROOT

LIMIT_S = 10.0
HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m"
"""Name that would set a terminal's title, clear it, and reverse the direction of its text."""
DEEP = "[" * 100_000

_CLUSTER = """
format: 1
nodes:
- {gpu: A100-40, count: 2, gpus_per_node: 2, link: {bandwidth: 230 GB/s}}
network: {bandwidth: 40 Gbit/s}
"""
_PLAN = "plan --model gpt2-xl --global-batch-size 8 --cluster {f}/cluster.yaml"
_CONF = "job submit {f}/conf.sh --dry-run --plan {f}"
_TRAINER = (
    "train rank --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16"
    " --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 2 --lr 1e-3"
    " --train-iters 2 --mock-data --vocab-size 63 --tokenizer-type NullTokenizer"
)
CASES: tuple[tuple[str, str], ...] = tuple(
    (line.partition(" => ")[0].strip(), line.partition(" => ")[2])
    for line in f"""
simulate --stages 100000 --microbatches 8 => actions in each of
simulate --stages 4 --microbatches 100000000000 => --microbatches
simulate --stages 4 --microbatches 99999999999999999999999999 => --microbatches
simulate --stages 64 --chunks 64 --microbatches 5000 => actions
simulate --stages 4 --microbatches 8 --jitter 0.1 --draws 100000000 => --draws
simulate --stages -1 --microbatches 8 => --stages
simulate --stages 4 --microbatches 8 --forward nan => forward time
simulate --stages 4 --microbatches 8 --latency -1 => latency_s must be
simulate --stages 4 --microbatches 8 --jitter inf => action_sigma must be
simulate --stages 4 --microbatches 8 --forward 0 --backward 0 --weight 0 => to a positive value
simulate --stages 4 --microbatches 8 --weight-pieces 1000000000 => --weight-pieces
simulate --stages 4 --microbatches 8 --slow-rank 0:nan => factor of rank 0
simulate --stages 4 --microbatches 8 --schedules bogus => bogus
simulate --stages 0 --microbatches 8 => '0' is not a whole number from 1 to 1,000,000
simulate --microbatches 8 => --stages
simulate --stages 4 --microbatches 8 --speed 3 => --speed
simulate --stages 4 --microbatches 8 --schedules adaptive --cap 0.5 => cap must be at least 1
simulate --stages 4 --microbatches 8 --schedules adaptive --cap nan => cap must be at least 1
simulate --stages 4 --microbatches 3 --schedules interleaved => raise the global batch size
simulate --stages 4 --microbatches 8 --slow-rank 4:2 => a rank from 0 to 3
simulate --stages 4 --microbatches 8 --slow-rank fast => must be RANK:FACTOR
simulate --stages 4 --microbatches 8 --profile {{f}}/none.json => specify a profile
simulate --stages 1 --microbatches 8 --profile {{f}}/deep.json => levels deep
simulate --stages 1 --microbatches 8 --profile {{f}}/empty.json => not valid JSON
simulate --stages 1 --microbatches 8 --profile {{f}}/links.json => links
simulate --stages 1 --microbatches 8 --profile {{f}} => Is a directory
{_PLAN} --profile {{f}}/deep.json => levels deep
{_PLAN} --profile {{f}}/wide.json => 64 bits
{_PLAN} --profile {{f}}/nan.json => not a finite
{_PLAN} --profile {{f}}/twice.json => given twice
{_PLAN} --profile {{f}}/binary.json => not valid UTF-8
{_PLAN} --profile {{f}}/unreadable.json => error:
{_PLAN} --top 1000000000 => --top
{_PLAN} --tokens nan => --tokens
{_PLAN} --tp 99999999999999999999 => --tp
{_PLAN} --time-limit 5 => --time-limit
plan --model gpt2-xl --global-batch-size 1000000000000 --cluster {{f}}/cluster.yaml => --global
plan --model gpt2-xl --global-batch-size -8 --cluster {{f}}/cluster.yaml => --global
plan --model gpt2-xl --global-batch-size 8 --cluster {{f}}/deep.yaml => nested
plan --model gpt2-xl --global-batch-size 8 --cluster {{f}}/deep.toml => nested
plan --model gpt2-xl --global-batch-size 8 --cluster {{f}}/deep.json => levels deep
plan --model gpt2-xl --global-batch-size 8 --cluster {{f}}/bomb.yaml => is not a key
plan --model gpt2-xl --global-batch-size 8 --cluster {{f}}/many.yaml => nodes
plan --model gpt2-xl --global-batch-size 8 --cluster {{f}}/none.yaml => No such file
plan --model {{f}}/layers.json --global-batch-size 8 --cluster {{f}}/cluster.yaml => at most
plan --model {{f}}/deep.json --global-batch-size 8 --cluster {{f}}/cluster.yaml => levels deep
{_CONF}/future.json => version
{_CONF}/deep.json => levels deep
{_CONF}/list.json => plan
{_CONF}/empty.json => not valid JSON
{_CONF}/binary.json => not valid UTF-8
{_CONF}/types.json => is not a key
job submit {{f}}/none.sh => no such file
job submit {{f}}/conf.sh --dry-run --set NNODES=99999999999 => NNODES
job submit {{f}}/conf.sh --dry-run --set NNODES=999999999 => at most
job submit {{f}}/conf.sh --dry-run --set TENSOR_MP_SIZE=3 => WORLD_SIZE
job submit {{f}}/loop.sh --dry-run => read_variables
{_TRAINER} --lr nan => --lr
{_TRAINER} --micro-batch-size 99999999999999999999999 => --micro-batch-size
{_TRAINER} --model-chunks 1000000 => --num-virtual-stages-per-pipeline-rank 1000000
{_TRAINER} --num-layers 9000000000000000000 => error:
{_TRAINER} --pipeline-model-parallel-size 1000000000 => error:
{_TRAINER} --schedule bogus => --schedule
{_TRAINER} --replay-schedule {{f}}/deep.json => deep.json
{_TRAINER} --data-path {{f}}/none => exclude
trace {{f}}/trace-deep => levels deep
trace {{f}}/trace-world => world_size
trace {{f}}/trace-wide => 64 bits
trace {{f}}/trace-types => must be
trace {{f}}/trace-future => version
trace {{f}}/trace-binary => JSON
trace {{f}}/trace-names => mixes runs
trace {{f}}/trace-empty => empty
trace {{f}}/none => does not exist
trace {{f}}/cluster.yaml => must be named trace_pipeline
trace diagnose {{f}}/trace-deep => levels deep
job top {{f}}/none --once => none
job top => pass the folder of a run or its traces
job top --interval 0 => '0' is not a time in seconds from 0.05 to 3,600; see --help
job top --onec => job top: unrecognized arguments: --onec; the nearest is --once
job top --twice => job top: unrecognized arguments: --twice; see --help
job top {{f}} --once --width 1000000000 => --width
train elastic --status {{f}}/job-deep => levels deep
train elastic --status {{f}}/job-list => not a JSON object
train elastic --status {{f}}/job-types => damaged
train elastic --status {{f}}/job-future => format
train elastic --status {{f}}/none => No such file
train elastic --max-restarts 99999999999999999999 {{f}}/conf.sh => --max-restarts
train elastic --checkpoint {{f}}/c --wait 1e400 x.py => --wait
job report {{f}}/none => pass
job status {HOSTILE} --log-dir {{f}} => Slurm does not know
plan validate --data {{f}}/none => none
profile --output p => requires exactly one of --model, --merge, --cut-points
profile --output p --model gpt2 --cut-points x.csv => got --model and --cut-points
profile --output p --model bert-large => only measures GPT and Llama models
profile --output p --model gpt2 --micro-batch-sizes 1,0 => must be a list of different
profile --output p --model gpt2 --tp 5 => heads and the feed-forward size of gpt2, got 5
profile --output p --model gpt2 --tp 2 => --tp 2 must divide the 1 processes of a node
profile --output p --model gpt2 --repeats 0 => '0' is not a whole number from 1 to 100,000
profile --output p --merge {{f}}/none.json => No such file
doctor --master-addr 127.0.0.1 --master-port 99999999 => --master-port
transport => requires --check
transport --check --transport udp => 'udp' is neither one of auto, shm
transport --check --seconds nan => --seconds
train single --resume --runs-dir {{f}}/none => remove --resume
train single --pipeline_paralel 2 => the nearest is --pipeline_parallel
train single --lr 1 => unrecognized arguments: --lr 1; options of the trainer follow after --
train single --trace-dir x => --trace-dir x; options of the trainer follow after --
train single --xyz 1 => unrecognized arguments: --xyz 1; options of the trainer follow after --
train single --train-iters 5 => options of the trainer follow after --
train single --pipeline_parallel => expected one argument
train single --pipeline_parallel two => 'two' is not a whole number from 1 to 1,000,000; see --help
train single --data-dir {{f}}/cluster.yaml => cluster.yaml is not a folder; choose another folder
train single --pipeline-schedule fastest => adaptive
train single --schedule 1f1b => use --pipeline-schedule
train single stray => unrecognized arguments: stray
job launch => training_script
job launch --bogus 3 x.py => unrecognized arguments: --bogus
job launch --nproc-per-node abc x.py => got abc (not a number)
job launch --nproc-per-node 0 x.py => --nproc-per-node must be from 1
job launch --nnodes a x.py => --nnodes must be a positive integer or MIN:MAX, got a
job launch --rdzv-backend mail x.py => --rdzv-backend must be one of
job launch --nproc-per-node 2 /nowhere/pretrain_gpt.py => no such file
job launch --nproc-per-node 2 / => is a folder
job launch --nproc-per-node 99999999999 {{f}}/conf.sh => --nproc-per-node
data preprocess --input {{f}}/deep.json --output-prefix {{f}}/o --workers 1000000000 => --workers
data corpus => --output-dir
data corpus --output-dir x --vocab-size 10 => must be at least 257
data corpus --output-dir x --workers 0 => --workers: '0' is not a whole number from 1
data corpus --output-dir {{f}}/corpus --max-bytes 99999999999999999999 => --max-bytes
{HOSTILE} => unknown subcommand
""".strip().splitlines()
)
"""Command lines, each with a part of the expected error message."""


def write_files(folder: Path) -> None:
    """Writes all files that the command lines use to ``folder``."""
    header = TraceHeader(
        run="one", rank=0, world_size=1, pp_rank=0, num_ranks=1, num_chunks=1,
        num_microbatches=4, schedule=HOSTILE, host=HOSTILE,
    )  # fmt: skip
    line = header_line(header)

    def changed(**values: Any) -> str:
        return json.dumps({**json.loads(line), **values}) + "\n"

    texts = {
        "deep.json": DEEP,
        "deep.yaml": DEEP,
        "deep.toml": f"a = {DEEP}",
        "empty.json": "",
        "list.json": "[1, 2]",
        "layers.json": '{"format": 1, "shape": {"layers": 999999999, "hidden": 8, "heads": 1, '
        '"sequence": 8, "vocabulary": 8}}',
        "wide.json": f'{{"model": {"9" * 400}}}',
        "nan.json": '{"layers": NaN}',
        "twice.json": '{"layers": [], "layers": []}',
        "links.json": '{"version": 1, "forward_s": [1], "backward_s": [1], "links": '
        '[{"from": [1], "to": {}, "latency_s": 1}]}',
        "future.json": '{"version": 999}',
        "types.json": '{"version": 1, "stages": 7, "world_size": {"a": []}}',
        "cluster.yaml": _CLUSTER,
        "many.yaml": _CLUSTER.replace("count: 2", "count: 999999999999"),
        "bomb.yaml": "".join(
            f"{name}: &{name} [{', '.join([f'*{before}'] * 9) if before else 'x'}]\n"
            for before, name in zip(["", *"abcdefgh"], "abcdefghi", strict=True)
        ),
        "conf.sh": "MODEL=tiny\nDEVICE=cpu\nNNODES=2\nNPROC_PER_NODE=2\n",
        "loop.sh": "read_variables",
        "trace-deep": f"{DEEP}\n",
        "trace-world": changed(world_size=2_000_000_000),
        "trace-wide": line.replace('"world_size": 1,', f'"world_size": {"9" * 30},'),
        "trace-types": changed(world_size="2e9"),
        "trace-future": changed(version=99),
        "trace-binary": "\0\1\2\n",
        "trace-empty": "",
        "trace-names": changed(world_size=2, run=HOSTILE),
        "job-deep": DEEP,
        "job-list": "[]",
        "job-types": '{"format": 1, "iteration": [], "epochs": 7}',
        "job-future": '{"format": 99}',
    }
    for name, text in texts.items():
        kind = name.partition("-")[0]
        path = folder / name
        if kind == "trace":
            path = path / trace_file_name(0)
        elif kind == "job":
            path = path / "elastic" / "state.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "trace-names" / trace_file_name(1)).write_text(changed(world_size=2, rank=1))
    (folder / "binary.json").write_bytes(random.Random(1).randbytes(4096))
    if os.geteuid():
        (folder / "unreadable.json").touch(0)
    # The root user can read files of any mode, but reading /proc/self/mem fails at offset 0.
    else:
        (folder / "unreadable.json").symlink_to("/proc/self/mem")


def complaint(status: int, errors: str, part: str) -> str:
    """Returns what is wrong with a program's response to wrong input, or ``""`` if nothing is.

    Args:
        status: Exit status of the program.
        errors: Standard error of the program.
        part: Text that the error message must contain.
    """
    lines = errors.splitlines()
    if status != 2:
        return f"status {status}: {errors[-300:]!r}"
    if len(lines) != 1 or not lines[0].isprintable():
        return f"{len(lines)} lines: {errors[-300:]!r}"
    return "" if part in lines[0] and len(lines[0]) < 1000 else f"{lines[0][:300]!r}"


def measure(cases: Sequence[tuple[str, str]] = CASES) -> dict[str, Any]:
    """Runs every command line as a separate program, two programs at a time.

    Returns:
        Dict with ``cases`` (number of command lines), ``wrong`` (wrong responses by command line)
        and ``longest_s`` (duration of the slowest program in seconds).
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)

    def one(case: tuple[str, str]) -> tuple[str, str, float]:
        arguments = [word.replace("{f}", folder) for word in case[0].split(" ")]
        begin_s = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "megatron.adaptive", *arguments],
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
                cwd=folder,
                stdin=subprocess.DEVNULL,
            )
            why = complaint(done.returncode, done.stderr, case[1])
        except subprocess.TimeoutExpired:
            why = f"the program did not end within {LIMIT_S:g} s"
        return case[0], why, time.monotonic() - begin_s

    with tempfile.TemporaryDirectory(prefix="faults-commands-") as folder:
        write_files(Path(folder))
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(one, cases))
    return {
        "cases": len(results),
        "wrong": {line: why for line, why, _ in results if why},
        "longest_s": max(seconds for _, _, seconds in results),
    }
