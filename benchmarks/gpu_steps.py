"""The parts of ``scripts/gpu_check.sh`` that need torch: steps of a GPT, its memory, facts.

    python benchmarks/gpu_steps.py --part PART --json FILE --limit SECONDS [--tiny]

Steps are those of a GPT of 345 million parameters in bf16. As in ``gpt_steps.py`` the competitors
take turns on the same chunks within one job. NCCL refuses two ranks on one GPU, and gloo takes no
message from a GPU: there megatron-core's own loop has its messages copied to the host and sent by
gloo, which is what ``1f1b, gloo`` does too. Ranks that share a GPU take turns on it: they show what
a pipeline costs, not what it gains.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

if str(Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import ranks
from benchmarks.gpt_steps import TWO_CHUNKS, Function, Job, Rank, difference_row
from benchmarks.ranks import rank_main
from benchmarks.report import Row, measured, missing

SHAPE = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024"
    " --max-position-embeddings 1024 --vocab-size 50256"
)
TINY_SHAPE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
    " --max-position-embeddings 64 --vocab-size 1023"
)
SIZES = {"": f"{SHAPE} --micro-batch-size 4 --global-batch-size 32"}
SIZES["tiny "] = f"{TINY_SHAPE} --micro-batch-size 1 --global-batch-size 4"
# Whether a gradient is finite is asked on the host, which waits for it; by megatron-core as well.
BASE = "--bf16 --no-check-for-nan-in-loss-and-grad --transformer-impl"
OWN = f"{BASE} local --pipeline-schedule"
ENGINE = f"{BASE} transformer_engine --split-backward True --pipeline-schedule"
SHARED = ("1f1b", "adaptive", "1f1b, pinned", "1f1b, gloo", "megatron")
PARTS = {
    "pp1": Job(f"{OWN} megatron", ("1f1b", "megatron"), ranks=1),
    "pp2": Job(f"{OWN} megatron", SHARED),
    "nccl": Job(f"{OWN} megatron", ("1f1b", "adaptive", "megatron")),
    "v": Job(f"{OWN} zb-v {TWO_CHUNKS}", ("zb-v", "adaptive")),
    "te": Job(f"{ENGINE} zb-h1", ("zb-h1", "adaptive")),
}
TITLES = {
    "pp1": "PP 1",
    "pp2": "PP 2",
    "v": "PP 2, split, V",
    "nccl": "PP 2, NCCL",
    "te": "Transformer Engine, split",
}
"""Names of the parts in rows."""
JOBS = {
    size + name: Job(f"{flags} {job.flags}", job.competitors, job.ranks)
    for size, flags in SIZES.items()
    for name, job in PARTS.items()
}
ROUNDS, TINY_ROUNDS = 12, 2
LIMITS = {"loss": 1e-3, "gradient": 1e-2}
"""Largest relative differences: sums on a GPU have no fixed order, and bf16 has few digits."""
MOST = 1.02
"""Goal of a step over megatron-core's."""
UNDERESTIMATE = 1.1
"""Most that a rank may hold over its plan, which leaves a tenth free."""
SYNCHRONIZED = "called a synchronizing CUDA operation"
"""Text by which torch's sync debug mode reports an operation."""
UNREPORTED = (
    "torch did not even report a synchronization that was made on purpose: its text is no longer "
    f"{SYNCHRONIZED!r}"
)
_PASS_S = 5.0


class GpuRank(Rank):
    """One rank; see :class:`~benchmarks.gpt_steps.Rank`."""

    JOBS: ClassVar[Mapping[str, Job]] = JOBS

    def measure(self, rounds: int) -> dict[str, Any]:
        """Takes turns.

        Returns:
            Besides ``times`` and ``differences``: of each competitor ``peak_bytes`` by rank, of
            ours ``links``, how tensors went, and ``synchronizations``, the lines of code at which
            its forwards and backwards made the host wait for the GPU, or why they are not known.
        """
        result = super().measure(rounds)
        ours = [name for name in self._functions if name != "megatron"]
        return {
            **result,
            "peak_bytes": {name: self._peak_bytes(name) for name in self._functions},
            "synchronizations": {name: self._synchronizations(name) for name in ours},
            "links": {
                name: {} if wiring.transport is None else wiring.transport.describe_links()
                for name, wiring in zip(ours, self._wirings, strict=True)
            },
        }

    def _function(self, name: str) -> Function:
        if name == "megatron":
            if self._accelerator.is_cuda and self._accelerator.backend == "gloo":
                _send_through_host()
            return super()._function(name)
        schedule, _, way = name.partition(", ")
        ways = {"pinned": {"transport_gpu": "pinned"}, "gloo": {"transport": "gloo"}}
        return self._fed(self._ours(schedule, **ways.get(way, {})))

    def _peak_bytes(self, name: str) -> list[int]:
        import torch

        if self._accelerator.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        self._timed(name)
        peaks: list[int] = self._job.gather(self._accelerator.peak_memory_bytes())
        return peaks

    def _synchronizations(self, name: str) -> list[str] | str:
        import torch

        if not self._accelerator.is_cuda:
            return "there is no GPU"
        microbatches = self.read()
        self._prepare(name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self._functions[name](microbatches)
                after_step = len(caught)
                torch.ones(1, device=self._accelerator.device).item()  # waits
            finally:
                torch.cuda.set_sync_debug_mode("default")
        if not synchronizing_lines(caught[after_step:]):
            return UNREPORTED
        lines = synchronizing_lines(caught[:after_step])
        return sorted({line for found in self._job.gather(lines) for line in found})


def synchronizing_lines(caught: Iterable[warnings.WarningMessage]) -> set[str]:
    """Returns the lines of code at which torch says that the host waited for the GPU.

    Args:
        caught: Warnings given while ``torch.cuda.set_sync_debug_mode`` was ``warn``; torch's remark
            about that mode itself is one of them.
    """
    return {
        "/".join([*Path(warning.filename).parts[-3:], str(warning.lineno)])
        for warning in caught
        if SYNCHRONIZED in str(warning.message)
    }


def _send_through_host() -> None:
    """Lets megatron-core's loop exchange tensors of GPUs over gloo."""
    import torch
    import torch.distributed as dist
    from megatron.core.pipeline_parallel import p2p_communication

    def exchange(
        *, group: Any, prev_pipeline_rank: int, next_pipeline_rank: int, **tensors: Any
    ) -> list[Any]:
        operations, incoming = [], []
        for peer, side in ((prev_pipeline_rank, "prev"), (next_pipeline_rank, "next")):
            if (sent := tensors[f"tensor_send_{side}"]) is not None:
                operations.append(dist.P2POp(dist.isend, sent.cpu(), peer, group))
            if (received := tensors[f"tensor_recv_{side}"]) is not None:
                host = torch.empty(received.shape, dtype=received.dtype, pin_memory=True)
                operations.append(dist.P2POp(dist.irecv, host, peer, group))
                incoming.append((received, host))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        with torch.no_grad():
            for received, host in incoming:
                received.copy_(host)
        return []

    p2p_communication._batched_p2p_ops = exchange


def steps(part: str, *, tiny: bool, limit_s: float) -> tuple[list[Row], dict[str, Any]]:
    """Runs the ranks of a job.

    Args:
        part: one of ``PARTS``.
        tiny: a small model and few rounds.
        limit_s: everything is killed after it.

    Returns:
        Rows of the table, and everything that was measured.

    Raises:
        RuntimeError: a rank failed, or the time limit passed.
    """
    job = ("tiny " if tiny else "") + part
    rounds = TINY_ROUNDS if tiny else ROUNDS
    found = ranks.measure(__file__, JOBS[job].ranks, rounds, job, limit_s=limit_s)
    return step_rows(part, found, tiny=tiny), found


def step_rows(part: str, found: Mapping[str, Any], *, tiny: bool = False) -> list[Row]:
    """Turns what :meth:`GpuRank.measure` returned into rows; without goals for a small model."""
    rows = []
    part = TITLES[part]
    rounds: dict[str, list[float | None]] = found["times"]
    for name, times in rounds.items():
        note = ""
        for link in list(found["links"].get(name, {}).values())[:1]:
            note = link.get("gpu_path", link["kind"])
            if link.get("gpu_reason"):
                note += f": {link['gpu_reason']}"
        taken_ms = [1e3 * one for one in times if one is not None]
        rows.append(measured(f"{part}: step, {name}", taken_ms, unit="ms", note=note))
    for name, times in rounds.items():
        if name == "megatron" or "megatron" not in rounds:
            continue
        pairs = [pair for pair in zip(times, rounds["megatron"], strict=True) if None not in pair]
        goal = None if tiny or name.endswith("gloo") else MOST
        quotients = [ours / theirs for ours, theirs in pairs]
        rows.append(measured(f"{part}: step, {name} over megatron-core", quotients, goal=goal))
    for what, limit in LIMITS.items():
        values = {name: difference[what] for name, difference in found["differences"].items()}
        note = max(values, key=lambda name: (math.isnan(values[name]), values[name]))
        rows.append(difference_row(part, what, values.values(), limit, note))
    for name, places in found["synchronizations"].items():
        what = f"{part}: synchronizations in forwards and backwards, {name}"
        if isinstance(places, str):
            rows.append(missing(what, places))
        else:
            # Through the host's pageable memory nothing else is possible.
            goal = None if name.endswith("gloo") else 0
            rows.append(Row(what=what, value=len(places), goal=goal, note=" ".join(places)))
    return rows


def memory(folder: Path, *, tiny: bool, limit_s: float) -> tuple[list[Row], dict[str, Any]]:
    """Compares what ranks held with what ``plan`` predicts for them.

    Args:
        folder: of the files of the parts before.
        tiny: they ran a small model.
        limit_s: Time limit of each of the two predictions.
    """
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "H100"
    rows, facts = [], {}
    for part, stages in (("pp1", 1), ("pp2", 2)):
        path = folder / f"{part}.json"
        title = TITLES[part]
        if not path.exists():
            rows.append(missing(f"{title}: memory over the plan's", f"{part} has no result"))
            continue
        held = json.loads(path.read_text(encoding="utf-8"))["facts"]["peak_bytes"]["1f1b"]
        planned = _planned(stages, name, tiny=tiny, limit_s=limit_s)
        facts[part] = {"held_bytes": held, "planned_bytes": planned}
        for stage, (its, predicted) in enumerate(zip(held, planned, strict=True)):
            note = f"{its / 2**30:.2f} GiB, planned {predicted / 2**30:.2f} GiB"
            what = f"{title}: memory of stage {stage} over the plan's"
            goal = None if tiny else UNDERESTIMATE
            rows.append(Row(what=what, value=its / predicted, goal=goal, note=note))
    return rows, facts


def _planned(stages: int, gpu: str, *, tiny: bool, limit_s: float) -> list[float]:
    """Returns the bytes that ``plan`` predicts for each stage."""
    shape = TINY_SHAPE if tiny else SHAPE
    size, batch = (1, 4) if tiny else (4, 32)
    cluster = (
        f"format: 1\nnodes:\n- {{type: node, gpu: {gpu}, count: 1, gpus_per_node: {stages},"
        " link: {bandwidth: 100 GB/s, latency: 10 us}}\n"
    )
    words = ["plan", "--model", shape, "--json"]
    words += f"--global-batch-size {batch} --micro-batch-sizes {size} --tp 1 --dp 1".split()
    words += f"--pp {stages} --schedules 1f1b --recompute none --precision bf16".split()
    words += "--distributed-optimizer off --attention kernel --partition".split()
    layers = int(shape.split()[1]) // stages
    words.append("-".join([str(layers)] * stages))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cluster.yaml")
        path.write_text(cluster, encoding="utf-8")
        words += ["--cluster", str(path)]
        # One plan is simulated in less time than numba takes to compile the simulator.
        found = ranks.run_module(
            "megatron.adaptive", *words, limit_s=limit_s, NUMBA_DISABLE_JIT="1"
        )
    planned: list[float] = found[0]["prediction"]["memory_bytes"]
    return planned


def device() -> tuple[list[Row], dict[str, Any]]:
    """Returns what the GPU and the packages are, and two speeds that times depend on."""
    import torch

    from megatron.adaptive import extension

    names = ("megatron-core", "numpy", "triton", "transformer-engine", "apex", "nvidia-ml-py")
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "-"
    module = extension.load()
    facts: dict[str, Any] = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda,
        "packages": versions,
        "extension": str(extension.why_missing()) if module is None else "there",
        "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    }
    if not facts["gpus"]:
        return [missing("a GPU", "torch finds no CUDA device")], facts
    its = torch.cuda.get_device_properties(0)
    facts |= {
        "gpu": its.name,
        "memory_bytes": its.total_memory,
        "capability": f"{its.major}.{its.minor}",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "cuDNN": torch.backends.cudnn.version(),
    }
    one = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    times = {}
    for what, work in {"product": lambda: one @ one, "copy": one.clone}.items():
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        spent = []
        for _ in range(20):
            begin.record()
            work()
            end.record()
            end.synchronize()
            spent.append(begin.elapsed_time(end) / 1e3)
        times[what] = statistics.median(spent[5:])
    rows = [
        Row(what="product in bf16", value=2 * 4096**3 / times["product"] / 1e12, unit="TFLOP/s"),
        Row(what="copy of 32 MiB", value=2 * one.nbytes / times["copy"] / 1e9, unit="GB/s"),
    ]
    return rows, facts


def main() -> int:
    """Runs one part; its result goes to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=("device", "memory", *PARTS), required=True)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--tiny", action="store_true", help="a small model, and no goals")
    given = parser.parse_args()
    if given.part == "device":
        rows, facts = device()
    elif given.part == "memory":
        rows, facts = memory(
            given.json.parent, tiny=given.tiny, limit_s=(given.limit - _PASS_S) / 2
        )
    else:
        rows, facts = steps(given.part, tiny=given.tiny, limit_s=given.limit - _PASS_S)
    result = {"rows": [row.as_dict() for row in rows], "facts": facts}
    given.json.write_text(json.dumps(result, default=str), encoding="utf-8")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("-"):
        sys.exit(main())
    rank_main(GpuRank)
