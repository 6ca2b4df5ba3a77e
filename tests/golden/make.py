"""Makes the golden files: every form that the package writes to disk, as the present code does.

    python -m tests.golden.make              makes tests/golden/files anew
    python -m tests.golden.make answers      makes a part of it anew, see PARTS
    python -m tests.golden.make --compare    compares losses and gradient norms bit for bit

The files stay as they are for as long as the package reads them: they are made anew only when a
form changes on purpose.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import cases
from .ranks import ROOT, Job, environment, run_jobs

PLAIN = cases.FILES / "plain"
CLUSTER_YAML = """\
format: 1
nodes:
  - {type: big, gpu: A100-40, count: 1, gpus_per_node: 2,
     link: {bandwidth: 230 GB/s, latency: 5 us}, price_per_hour: 10, zone: here}
  - {type: small, gpu: T4, count: 1, gpus_per_node: 2, memory: 14 GiB, hosts: [node-b],
     link: {bandwidth: 10 GB/s, sizes: [[64 KiB, 2 GB/s]], latency: 8 us},
     network: {bandwidth: 10 Gbit/s, latency: 30 us}, price_per_hour: 2, zone: there}
network: {bandwidth: 25 Gbit/s, latency: 20 us}
links:
  - {between: [big, small], bandwidth: 20 Gbit/s, shared: false}
between_zones: {bandwidth: 1 Gbit/s, latency: 20 ms}
"""
CLUSTER_TOML = """\
format = 1
network = {bandwidth = "25 Gbit/s", latency = "20 us"}
[[nodes]]
type = "big"
gpu = "A100-40"
count = 1
gpus_per_node = 2
link = {bandwidth = "230 GB/s", latency = "5 us"}
"""
HERE_YAML = """\
format: 1
nodes:
  - {type: here, gpu: cpu, count: 3, gpus_per_node: 1, memory: 4 GiB,
     link: {bandwidth: 5 GB/s, latency: 10 us}}
network: {bandwidth: 10 Gbit/s, latency: 30 us}
"""
MODEL_YAML = """\
format: 1
name: shaped
precision: fp16
shape: {layers: 6, hidden: 64, heads: 4, sequence: 128, vocabulary: 1000, ffn: 128}
"""
MODEL_TOML = """\
format = 1
name = "listed"
layers = [
    {kind = "stem", parameters = 1e6, forward_flops = 1e9, output_elements = 1e4},
    {kind = "block", count = 4, parameters = 2e6, forward_flops = 3e9, output_elements = 1e4},
]
"""
PIECES = """\
cut_point,gpu,micro_batch,forward_s,backward_s,parameters,output_bytes,kept_bytes
0,cpu,1,0.0021,0.0043,310000,20971,83886
1,cpu,1,0.0034,0.0069,126000,20971,146800
2,cpu,1,0.0011,0.0019,52000,4,4096
"""
TIMES = {
    "version": 1,
    "forward_s": [0.010, 0.011, 0.010, 0.012],
    "backward_s": [0.010, 0.012, 0.011, 0.013],
    "weight_s": [0.008, 0.009, 0.008, 0.009],
    "latency_s": 0.0005,
    "links": [{"from": 0, "to": 1, "latency_s": 0.001, "occupancy_s": 0.0002}],
    "rank_factors": [1.0, 1.2],
    "action_sigma": 0.1,
}
ORDER = " ".join(
    [f"F{chunk}-{n}" for chunk in (0, 1) for n in range(4)]
    + [f"B{chunk}-{n}" for chunk in (1, 0) for n in range(4)]
)
ORDER_JSON = {
    "version": 1,
    "name": "all-forwards-first",
    "placement": "loop",
    "ranks": 2,
    "chunks": 2,
    "microbatches": 4,
    "orders": [ORDER, ORDER],
}
ORDER_CSV = """\
0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3
1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3
"""
CONF = """\
# shellcheck shell=bash disable=SC2034
JOB_NAME=golden
MODEL=flags.txt            # a file of flags
TRAIN_ITERS=3
LR=1e-3
GLOBAL_BATCH_SIZE=4
MICRO_BATCH_SIZE=1
DATA=mock
TRAINER_FLAGS='--eval-iters 0'
PIPELINE_MP_SIZE=$((1 + 1))
MODEL_CHUNKS=2
NNODES=1
NPROC_PER_NODE=2
DEVICE=cpu
SLURM_TIME=0:10:00
LOG_DIR=logs
TRACE=true
OMP_NUM_THREADS=1
"""
PLAN_CONF = """\
# shellcheck shell=bash disable=SC2034,SC1091
MODEL=flags.txt
DATA=mock
DEVICE=cpu
TRAIN_ITERS=3
PLAN=plan.json
"""
# run_single.sh writes the text form; alone it would train on a corpus of minutes.
TEXT_TRACE = """\
import sys
from megatron.adaptive.trace.order import write_legacy
from megatron.adaptive.trace.read import read_run
write_legacy(read_run(sys.argv[1]), sys.argv[2])
"""
VARIABLES_CONF = PLAN_CONF.replace("PLAN=plan.json", '. "$(dirname "${BASH_SOURCE[0]}")/plan.sh"')
MACHINES = "localhost name=a slots=1\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Make the files, or compare; returns 1 where a figure differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.make", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--compare", action="store_true", help="change nothing, say what differs")
    options = parser.parse_args(argv)
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {min(unknown)!r}: choose of {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        folder = Path(name)
        if options.compare:
            return _compare(folder)
        PLAIN.mkdir(parents=True, exist_ok=True)
        for part in options.parts or PARTS:
            print(time.strftime("%X"), part, flush=True)
            PARTS[part](folder)
    sizes = [path.stat().st_size for path in cases.FILES.rglob("*") if path.is_file()]
    print(f"{cases.FILES}: {len(sizes)} files of {sum(sizes) / 1024:.0f} KiB")
    return 0


def _inputs(_: Path) -> None:
    """Write what a user writes."""
    for name, text in {
        "cluster.yaml": CLUSTER_YAML,
        "cluster.toml": CLUSTER_TOML,
        "here.yaml": HERE_YAML,
        "model.yaml": MODEL_YAML,
        "model.toml": MODEL_TOML,
        "pieces.csv": PIECES,
        "order.csv": ORDER_CSV,
        "conf.sh": CONF,
        "plan-conf.sh": PLAN_CONF,
        "plan-variables-conf.sh": VARIABLES_CONF,
        "machines.txt": MACHINES,
        "flags.txt": f"# what conf.sh names\n{cases.SHAPE}\n",
        "times.json": _text(TIMES),
        "order.json": _text(ORDER_JSON),
    }.items():
        (PLAIN / name).write_text(text)


def _profiles(folder: Path) -> None:
    """Measure layers, pieces between cut points, and pieces that were timed elsewhere."""
    words = "-m torch.distributed.run --standalone --nproc-per-node 2 -m megatron.adaptive profile"
    what = "--repeats 2 --micro-batch-sizes 1,2 --tp 1 --node-type here".split()
    target = PLAIN / "profile.json"
    _python(folder, *words.split(), "--model", cases.SHAPE, "--output", str(target), *what)
    target = PLAIN / "cut.json"
    code = "from megatron.adaptive import Profiler; from tests.golden import script as one; "
    code += "shared = [['embedding.weight', 'head.weight']]; "
    code += "profiler = Profiler(one.Net(), one.batch_of(0), shared_weights=shared, name='net'); "
    _python(folder, "-c", f"{code}profiler.run().write({str(target)!r})")
    words = ["profile", "--cut-points", str(PLAIN / "pieces.csv"), "--name", "pieces"]
    _adaptive(folder, *words, "--output", str(PLAIN / "pieces.json"))


def _plans(folder: Path) -> None:
    """Plan a pipeline, and one with stages of unequal widths."""
    shutil.copytree(PLAIN, folder / "planned")
    words = ["plan", "--model", cases.SHAPE, "--cluster", "here.yaml", "--profile", "profile.json"]
    words += "--global-batch-size 4 --precision fp32 --tp 1 --micro-batch-sizes 1".split()
    words += "--distributed-optimizer off --recompute none --pp 2".split()
    plan, conf = str(PLAIN / "plan.json"), str(PLAIN / "plan.sh")
    _adaptive(folder / "planned", *words, "--dp", "1", "--output", plan, "--conf", conf)
    words += ["--unequal", "--all-nodes", "--schedules", "1f1b", "--micro-batch-sizes", "1,2"]
    _adaptive(folder / "planned", *words, "--output", str(PLAIN / "stages.json"))
    told = json.loads((PLAIN / "stages.json").read_text())
    assert len({len(stage["tensor"]) for stage in told["stages"]}) == 2, told


def _corpus(folder: Path) -> None:
    """Make a vocabulary and tokens of a few of Python's own sources."""
    _adaptive(folder, *cases.CORPUS)
    _pack(folder, "corpus")


def _checkpoints(folder: Path) -> None:
    """Train two of four iterations and save."""
    jobs = []
    for name, (ranks, flags) in cases.SAVED.items():
        more = f"--save {name} --save-interval 2 --exit-interval 2"
        if name == "local":
            more = "--save shared --save-interval 2 --exit-interval 2 --save-local disk"
        jobs.append(Job(name=f"save-{name}", ranks=ranks, flags=f"{cases.MOCK} {flags} {more}"))
    work = folder / "checkpoints"
    _run(work, jobs)
    (disk,) = (work / "disk").iterdir()
    disk.rename(work / "local")
    for name in cases.SAVED:
        _pack(work, name)


def _pipelines(folder: Path) -> None:
    """Save a Pipeline by hand and in its loop, on one process and on two."""
    one = {"pipeline_size": 1, "micro_batch_size": 2}
    two = {"pipeline_size": 2, "micro_batch_size": 2}
    loop = {"folder": "pipeline-2", "save_interval": 2, "keep": 1, "async_save": True}
    by_hand = {"told": "told", "total": 3, "pipeline": one, "save": "pipeline-1"}
    in_loop = {"told": "told", "total": 3, "pipeline": two, "loop": loop}
    work = folder / "pipelines"
    jobs = [Job(name="one", script=by_hand), Job(name="two", ranks=2, script=in_loop)]
    _run(work, jobs)
    _pack(work, "pipeline-1")
    _pack(work, "pipeline-2")


def _traces(folder: Path) -> None:
    """Trace a run, record its order, make up one of two machines, and write the text form."""
    work = folder / "traces"
    flags = f"{cases.MOCK} {cases.CHUNKS} --trace-dir runs/golden/traces"
    jobs = [Job(name="traced", ranks=2, flags=f"{flags} --record-schedule record.json")]
    _run(work, jobs)
    shutil.copy(work / "record.json", PLAIN / "record.json")
    (work / "runs" / "latest").write_text("golden\n")
    target = PLAIN / "trace_pipeline_2_model_chunks_2.txt"
    _python(work, "-c", TEXT_TRACE, "runs/golden/traces", str(target))
    _pack(work, "runs")
    made = "--ranks 2 --pipeline 2 --iterations 12 --microbatches 4 --hosts 2 --clock-offset 0.01"
    fault = ["--clock-drift", "20", "--fault", "slow-rank:1:1.5"]
    tool = str(ROOT / "tools" / "make_trace.py")
    _python(work, tool, "--output", "synthetic", *made.split(), *fault)
    _pack(work, "synthetic")


def _jobs(folder: Path) -> None:
    """Start a job of one node, one for Slurm, and two that change their shape."""
    work = folder / "jobs"
    shutil.copytree(PLAIN, work)
    _adaptive(work, "node", "master", "conf.sh", "--master-addr", "127.0.0.1")
    (job,) = (work / "logs").glob("pods-*")
    job.rename(work / "logs" / "pods")
    shutil.rmtree(work / "logs" / "pods" / "traces")  # of the same form as the others
    for name, says in {"sinfo": "cpus|(null)|4", "sbatch": "17"}.items():
        program = work / "programs" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\necho '{says}'\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    _adaptive(work, "submit", "conf.sh", programs=work / "programs")
    (submitted,) = (work / "logs" / "submitted").glob("*.json")
    told = json.loads(submitted.read_text())
    assert told["folder"] == str(work)
    (PLAIN / "submitted.json").write_text(submitted.read_text().replace(str(work), "HERE"))
    shutil.rmtree(work / "logs" / "submitted")
    for path in (work / "logs" / "pods").iterdir():
        path.write_text(path.read_text().replace(str(work), "HERE").replace(str(ROOT), "ROOT"))
    _pack(work, "logs")

    words = ["run", "--machines", "machines.txt", "--checkpoint"]
    flags = f"{cases.MOCK} --save-interval 2".replace("--train-iters 4", "--train-iters 2")
    trainer = str(ROOT / "pretrain_gpt.py")
    _adaptive(work, *words, "elastic-trainer", trainer, *flags.split())
    for path in (work / "elastic-trainer").glob("*iter*"):  # as other checkpoints are
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    _pack(work, "elastic-trainer")
    _adaptive(work, *cases.elastic_words("elastic-script", 3))
    _pack(work, "elastic-script")


def _runs(folder: Path) -> None:
    """Write losses and gradient norms of runs, also of those that go on from checkpoints."""
    cases.unpack(folder / "unpacked")
    found = _figures(folder / "unpacked")
    _adaptive(folder / "unpacked", *cases.elastic_words("elastic-script", 5))
    found["elastic-script"] = cases.elastic_figures(folder / "unpacked")
    told = {"machine": cases.machine(), "runs": found}
    (cases.FILES / "expected.json").write_text(_text(told))


def _answers(folder: Path) -> None:
    """Write what commands say to the golden files."""
    cases.unpack(folder / "asked")
    os.chdir(folder / "asked")
    try:
        answers = {name: cases.answer(name) for name in cases.ANSWERS}
    finally:
        os.chdir(ROOT)
    (cases.FILES / "answers.json").write_text(_text(answers))


def _figures(folder: Path) -> dict[str, Any]:
    jobs = [*cases.run_jobs_of(cases.RUNS), *cases.resume_jobs(), *cases.pipeline_jobs()]
    _run(folder, jobs)
    return cases.figures(folder, jobs)


def _compare(folder: Path) -> int:
    expected = json.loads((cases.FILES / "expected.json").read_text())
    if expected["machine"] != cases.machine():
        print(f"made on {expected['machine']}, compared on {cases.machine()}")
    cases.unpack(folder)
    found = _figures(folder)
    del expected["runs"]["elastic-script"]  # a test of its own
    differing = [name for name in expected["runs"] if expected["runs"][name] != found.get(name)]
    for name in differing:
        print(f"{name}: {expected['runs'][name]}\n  now {found.get(name)}")
    print(f"{len(expected['runs']) - len(differing)} of {len(expected['runs'])} are as they were")
    return int(bool(differing))


def _run(folder: Path, jobs: Sequence[Job]) -> None:
    for name, (statuses, said) in run_jobs(folder, jobs).items():
        assert not any(statuses), f"{name}: {said}"


def _adaptive(folder: Path, *words: str, programs: Path | None = None) -> None:
    _python(folder, "-m", "megatron.adaptive", *words, programs=programs)


def _python(folder: Path, *words: str, programs: Path | None = None) -> None:
    variables = environment()
    if programs is not None:
        variables["PATH"] = f"{programs}:{variables['PATH']}"
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"


def _pack(folder: Path, name: str) -> None:
    with tarfile.open(cases.FILES / f"{name}.tar.xz", "w:xz") as packed:
        packed.add(folder / name, name)


def _text(told: Any) -> str:
    return json.dumps(told, indent=1, ensure_ascii=False) + "\n"


PARTS = {
    "inputs": _inputs,
    "profiles": _profiles,
    "plans": _plans,
    "corpus": _corpus,
    "checkpoints": _checkpoints,
    "pipelines": _pipelines,
    "traces": _traces,
    "jobs": _jobs,
    "runs": _runs,
    "answers": _answers,
}

if __name__ == "__main__":
    sys.exit(main())
