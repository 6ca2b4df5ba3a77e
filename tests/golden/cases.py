"""Defines jobs and commands that read golden files, and whose results must not change.

Golden files were written by an earlier version of this package (0.1, before its folders were
rearranged). They are kept unchanged as long as the package can read them. If a file format is
changed on purpose, new files are added in addition to the old ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import platform
import re
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.multiprocess.launch import ROOT, run_ranks

FILES = Path(__file__).with_name("files")
SCRIPT = Path(__file__).with_name("script.py")
LIMIT_S = 60.0  # This is the timeout of a job in seconds.
SHAPE = (
    "--num-layers 4 --hidden-size 8 --ffn-hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --vocab-size 31 --make-vocab-size-divisible-by 8"
)
TRAINER = (
    f"{SHAPE} --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --lr-decay-style cosine "
    "--min-lr 1e-3 --eval-iters 0 --log-interval 1 --attention-dropout 0.1 --hidden-dropout 0.1 "
    "--train-iters 4 --distributed-timeout-minutes 1"
)
MOCK = f"{TRAINER} --mock-data"
PLANNED = MOCK.replace("--micro-batch-size 1 --global-batch-size 4", "")
PP2 = "--pipeline-model-parallel-size 2"
CHUNKS = f"{PP2} --model-chunks 2"
V_SPLIT = f"{CHUNKS} --pipeline-schedule zb-v"
FP16 = "--fp16 --initial-loss-scale 1024"
SHARDED = "--bf16 --use-distributed-optimizer"

CORPUS = "data corpus --output-dir corpus --vocab-size 300 --max-bytes 4000 --workers 1".split()

# Maps each golden checkpoint to the number of ranks and the flags of the run that loads it.
RESUMED = {
    "single": (2, CHUNKS),
    "chunks": (1, ""),
    "v-split": (2, f"{PP2} --partition 3-1 --pipeline-schedule 1f1b"),
    "async": (1, FP16),
    # Each node's disk contains checkpoint parts of the same ranks as in this run.
    "local": (2, PP2),
    "distributed": (1, SHARDED),
}
# These runs do not load a checkpoint, but most of them read other golden files.
RUNS = {
    "run-single": (1, MOCK),
    "run-1f1b": (2, f"{MOCK} {PP2} --pipeline-schedule 1f1b"),
    "run-chunks": (2, f"{MOCK} {CHUNKS}"),
    "run-zb-v": (2, f"{MOCK} {V_SPLIT}"),
    "run-order-json": (2, f"{MOCK} {CHUNKS} --pipeline-schedule file --schedule-file order.json"),
    "run-order-csv": (2, f"{MOCK} {PP2} --pipeline-schedule file --schedule-file order.csv"),
    "run-replay": (2, f"{MOCK} {CHUNKS} --replay-schedule record.json"),
    "run-plan": (2, f"{PLANNED} --plan plan.json"),
    "run-stages": (3, f"{PLANNED} --plan stages.json"),
    "run-corpus": (
        1,
        f"{TRAINER.replace('--vocab-size 31', '')} --tokenizer-type GPT2BPETokenizer "
        "--data-path corpus/corpus_text_document --vocab-file corpus/vocab.json "
        "--merge-file corpus/merges.txt --split 100,0,0",
    ),
}
# All jobs need a fixed partition. Otherwise, the model would be partitioned by measured times, and
# sums would be computed in a different order each time.
PIPELINES: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline-run": (
        2,
        {
            "total": 5,
            "pipeline": {
                "pipeline_size": 2,
                "micro_batch_size": 2,
                "schedule": "zb-h1",
                "partition": "2-2",
            },
        },
    ),
    "pipeline-1-in-2": (
        2,
        {
            "total": 5,
            "pipeline": {"pipeline_size": 2, "micro_batch_size": 2, "partition": "2-2"},
            "load": "pipeline-1",
        },
    ),
    "pipeline-2-in-1": (
        1,
        {"total": 5, "pipeline": {"pipeline_size": 1, "micro_batch_size": 2}, "load": "pipeline-2"},
    ),
}
ELASTIC_SCRIPT = {"report_dir": "report-elastic", "pipeline": {}, "loop": {"save_interval": 2}}

ARGUMENTS = f"{SHAPE} --fp16"
PLAN = ["plan", "--global-batch-size", "4", "--json", "--top", "2"]
# The output of these commands depends on golden files.
ANSWERS: dict[str, list[str]] = {
    "trace": ["trace", "runs/golden", "--format", "perfetto", "--output-dir", "drawn", "--json"],
    "trace-of-several-clocks": [
        *("trace", "synthetic", "--format", "perfetto", "--output-dir", "drawn", "--json")
    ],
    "trace-latest": ["trace", "--format", "perfetto", "--output-dir", "drawn", "--json"],
    "trace-text": [
        *("trace", "process", "--run-dir", "trace_pipeline_2_model_chunks_2.txt"),
        *("--output-dir", "drawn", "--json"),
    ],
    "diagnosis": ["trace", "diagnose", "runs/golden", "--json"],
    "diagnosis-of-a-fault": ["trace", "diagnose", "synthetic", "--json"],
    "top": ["job", "top", "runs/golden", "--once", "--width", "100"],
    "plan-yaml": [*PLAN, "--model", "model.yaml", "--cluster", "cluster.yaml"],
    "plan-toml": [*PLAN, "--model", "model.toml", "--cluster", "cluster.toml"],
    "plan-profile": [
        *(*PLAN, "--model", SHAPE, "--cluster", "here.yaml", "--profile", "profile.json")
    ],
    "plan-cut-points": [
        *(*PLAN, "--model", "cut.json", "--cluster", "here.yaml", "--profile", "cut.json")
    ],
    "plan-pieces": [
        *(*PLAN, "--model", "pieces.json", "--cluster", "here.yaml", "--profile", "pieces.json")
    ],
    "plan-calibrated": [
        *(*PLAN, "--model", SHAPE, "--cluster", "here.yaml", "--profile", "profile.json"),
        *("--calibrate", "runs/golden/traces"),
    ],
    "simulate": [
        *("simulate", "--stages", "2", "--chunks", "2", "--microbatches", "4", "--draws", "3"),
        *("--profile", "times.json"),
    ],
    "submit": ["job", "submit", "conf.sh", "--dry-run"],
    "submit-plan": ["job", "submit", "plan-conf.sh", "--dry-run"],
    "submit-plan-variables": ["job", "submit", "plan-variables-conf.sh", "--dry-run"],
    "submit-stages": ["job", "submit", "plan-conf.sh", "--plan", "stages.json", "--dry-run"],
    "status": ["job", "status", "pods", "--log-dir", "logs", "--json"],
    "elastic-trainer": ["train", "elastic", "--status", "elastic-trainer"],
    "elastic-script": ["train", "elastic", "--status", "elastic-script"],
    "elastic-script-json": ["train", "elastic", "--status", "elastic-script", "--json"],
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Program that runs on one or more ranks in a test.

    Attributes:
        name: Name of the job. All ranks write their output to ``<name>.txt`` in the folder of the
            run.
        ranks: Number of processes.
        flags: Flags of the trainer. If empty, the job runs ``script.py`` instead.
        script: Arguments of the function ``train`` in ``script.py``.
    """

    name: str
    ranks: int = 1
    flags: str = ""
    script: dict[str, Any] = field(default_factory=dict)


def run_jobs(folder: Path, jobs: Sequence[Job]) -> dict[str, tuple[int | None, str]]:
    """Runs ``jobs`` one after another in ``folder``, which is their working directory.

    Returns:
        For each job name, the exit status (of the first rank that failed, or 0) and the output of
        all ranks.
    """
    said = {}
    for job in jobs:
        program = ROOT / "pretrain_gpt.py" if job.flags else SCRIPT
        arguments = job.flags.split() or [json.dumps(job.script)]
        log = folder / f"{job.name}.txt"
        status = run_ranks(
            [str(program), *arguments], world_size=job.ranks, log=log, limit_s=LIMIT_S
        )
        said[job.name] = status, log.read_text(errors="replace")
    return said


def machine() -> dict[str, str]:
    """Returns the properties of this machine that affect the results of floating-point sums."""
    import torch

    facts = {
        "torch": torch.__version__,
        "processor": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "vendor": _vendor(),
    }
    if "MKL_CBWR" in os.environ:  # This variable selects the processor instructions that MKL uses.
        facts["mkl"] = os.environ["MKL_CBWR"]
    return facts


def _vendor() -> str:
    """Returns the vendor of the processor, because MKL chooses its kernels by vendor."""
    match = re.search(r"vendor_id\s*: (\S+)", Path("/proc/cpuinfo").read_text())
    return match.group(1) if match else ""


def extract(path: Path, folder: Path) -> None:
    """Unpacks the archive ``path`` into ``folder``."""
    with tarfile.open(path) as packed:
        packed.extractall(folder, filter="data")


def unpack(folder: Path) -> None:
    """Unpacks all golden files into ``folder``."""
    for path in sorted(FILES.glob("*.tar.xz")):
        extract(path, folder)
    # Rename the folder of checkpoint parts on the node's disk. Its name depends on the path of the
    # shared folder.
    path = hashlib.sha256(str((folder / "shared").resolve()).encode()).hexdigest()[:8]
    (folder / "disk").mkdir()
    (folder / "local").rename(folder / "disk" / f"shared-{path}")


def run_jobs_of(runs: Mapping[str, tuple[int, str]]) -> list[Job]:
    """Returns a job for each of ``runs``. A job writes its progress to ``report-<name>``."""
    return [
        Job(name=name, ranks=ranks, flags=f"{flags} --progress-dir report-{name}")
        for name, (ranks, flags) in runs.items()
    ]


def resume_jobs() -> list[Job]:
    """Returns a job for each golden checkpoint of the trainer. The job resumes from it."""
    runs = {}
    for name, (ranks, flags) in RESUMED.items():
        more = f"--load {name} --exit-on-missing-checkpoint --trust-checkpoint"
        if name == "local":
            more = "--load shared --save shared --save-interval 2 --save-local disk"
            more += " --trust-checkpoint"
        runs[f"resume-{name}"] = (ranks, f"{MOCK} {flags} {more}")
    return run_jobs_of(runs)


def pipeline_jobs() -> list[Job]:
    """Returns the jobs that run a ``Pipeline``."""
    return [
        Job(name=name, ranks=ranks, script={"report_dir": f"report-{name}", **script})
        for name, (ranks, script) in PIPELINES.items()
    ]


def figures(folder: Path, jobs: Sequence[Job]) -> dict[str, Any]:
    """Returns the exact losses, gradient norms and learning rates, keyed by the name of the job."""
    results: dict[str, Any] = {}
    for job in jobs:
        reports = folder / f"report-{job.name}"
        if job.script:
            ranks = [json.loads((reports / f"rank-{n}.json").read_text()) for n in range(job.ranks)]
            results[job.name] = {
                **{key: ranks[0][key] for key in ("losses", "grad_norms", "learning_rate")},
                "loaded": {
                    n: s
                    for figures_of_rank in ranks
                    for n, s in figures_of_rank.get("loaded", {}).items()
                },
            }
            continue
        lines = [json.loads(line) for line in (reports / "progress.jsonl").read_text().splitlines()]
        rows = {str(line["iteration"]): line for line in lines if "iteration" in line}
        results[job.name] = {
            "losses": {n: row["loss"].hex() for n, row in rows.items()},
            "grad_norms": {n: float(row["grad_norm"]).hex() for n, row in rows.items()},
            "learning_rate": [row["learning_rate"] for row in rows.values()],
        }
    return results


def elastic_words(checkpoints: str, total: int) -> list[str]:
    """Returns the arguments of the command that runs ``script.py`` as an elastic job.

    The script trains until step ``total``, and saves its checkpoints in ``checkpoints``.
    """
    script = json.dumps({**ELASTIC_SCRIPT, "total": total})
    command = ["train", "elastic", "--machines", "machines.txt", "--checkpoint", checkpoints]
    return [*command, str(SCRIPT), script]


def elastic_figures(folder: Path) -> dict[str, Any]:
    """Returns the results of the job that :func:`elastic_words` describes, from its last start."""
    report: dict[str, Any] = json.loads((folder / "report-elastic" / "rank-0.json").read_text())
    return report


def command(arguments: Sequence[str]) -> tuple[int, str, str]:
    """Runs ``python -m megatron.adaptive`` with ``arguments``, but in this process.

    Returns:
        Exit status, standard output and standard error.
    """
    from megatron.adaptive.__main__ import main

    former, output, errors = sys.argv, io.StringIO(), io.StringIO()
    sys.argv = ["megatron.adaptive", *arguments]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            status = main()
    finally:
        sys.argv = former
    return status, output.getvalue(), errors.getvalue()


def answer(name: str) -> Any:
    """Runs the command that :data:`ANSWERS` defines for ``name``, and returns its output.

    The current folder must be a folder of golden files.

    Returns:
        The parsed output if it is JSON, or otherwise its lines. Parts that depend on the time or
        the folder are removed or replaced.
    """
    status, output, errors = command(ANSWERS[name])
    assert status == 0, errors
    output = output.replace(str(Path.cwd()), "HERE")
    with contextlib.suppress(ValueError):
        document = json.loads(output)
        for key in ("since_s", "is_stalled"):
            if isinstance(document, dict):
                document.pop(key, None)
        return document
    lines = [re.sub(r"\b\d+ s ago", "AGO", line.rstrip()) for line in output.splitlines()]
    if ANSWERS[name][:2] == [
        "job",
        "submit",
    ]:  # The other lines of the batch script do not depend on golden files.
        lines = [line for line in lines if line.startswith("#SBATCH")]
    return lines
