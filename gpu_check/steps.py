"""Runs the parts of the check that need torch: GPT steps, memory, and facts about the machine.

    python gpu_check/steps.py --part PART --json FILE --limit SECONDS [--tiny]

The GPT has 345 million parameters and is trained in bf16. The competitors train the same model
chunks in turn, within one job. NCCL does not support two ranks on one GPU, and gloo does not send
GPU tensors. Therefore, megatron-core's own loop copies its messages to the host and sends them over
gloo, like ``1f1b, gloo``. Ranks that share a GPU run alternately, so their times show the cost of a
pipeline, not its speedup.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

if str(Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import gpt_ranks
from harness.gpt_competitors import TWO_CHUNKS, CompetingRank, Function, Job, difference_row
from harness.gpt_ranks import GPT, rank_main
from harness.processes import run_module
from harness.report import Row, measured, missing, ratios

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
# Disable the check for NaN in losses and gradients. It makes the host wait for the GPU, also in
# megatron-core.
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
"""Titles of the parts in the rows of the report."""
JOBS = {
    size + name: Job(f"{flags} {job.flags}", job.competitors, job.ranks)
    for size, flags in SIZES.items()
    for name, job in PARTS.items()
}
ROUNDS, TINY_ROUNDS = 6, 1
LIMITS = {"loss": 1e-3, "gradient": 1e-2}
"""Largest allowed relative differences between the results of competitors.

The results differ, because the order of summation varies on a GPU, and because bf16 is imprecise.
"""
MOST = 1.02
"""Largest allowed ratio of a step's duration to the duration of megatron-core's step."""
UNDERESTIMATE = 1.1
"""Largest allowed ratio of a rank's measured memory to its planned memory.

Plans leave a tenth of the memory free.
"""
SYNCHRONIZED = "called a synchronizing CUDA operation"
"""Text by which warnings of torch about synchronizing operations are recognized."""
UNREPORTED = (
    "torch did not report a deliberate synchronization; its warning may no longer contain "
    f"{SYNCHRONIZED!r}"
)
_END_S = 5.0
"""Time that is reserved for writing the result, in seconds. It is part of the time limit."""


class GpuRank(CompetingRank):
    """Runs one rank. The name of a competitor may end with a transport, for example ``1f1b, gloo``.

    Args:
        _: Folder for files. It is not used.
        job: Name of the job in ``JOBS``.
    """

    def __init__(self, _: Path, job: str) -> None:
        super().__init__(JOBS[job], GPT)

    def measure(self, rounds: int) -> dict[str, Any]:
        """Measures all competitors in turn, for ``rounds`` rounds.

        Returns:
            The measurements. In addition to ``times`` and ``differences``, they contain
            ``peak_bytes`` of each competitor by rank, ``links`` and ``synchronizations``. ``links``
            describes how each schedule of this project transfers tensors. ``synchronizations``
            lists the lines of code at which its forward and backward passes made the host wait for
            the GPU, or gives the reason why these lines are unknown.
        """
        result = super().measure(rounds)
        schedules = [name for name in self._functions if name != "megatron"]
        return {
            **result,
            "peak_bytes": {name: self._peak_bytes(name) for name in self._functions},
            "synchronizations": {name: self._synchronizations(name) for name in schedules},
            "links": {
                name: {} if wiring.transport is None else wiring.transport.describe_links()
                for name, wiring in zip(schedules, self._wirings, strict=True)
            },
        }

    def function_of(self, name: str) -> Function:
        if name == "megatron":
            if self._accelerator.is_cuda and self._accelerator.backend == "gloo":
                _send_through_host()
            return super().function_of(name)
        schedule, _, way = name.partition(", ")
        ways = {"pinned": {"transport_gpu": "pinned"}, "gloo": {"transport": "gloo"}}
        return self.fed(self.engine_of(schedule, **ways.get(way, {})))

    def _peak_bytes(self, name: str) -> list[int]:
        import torch

        if self._accelerator.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        self.step_s(name)
        peaks: list[int] = self._job.gather(self._accelerator.peak_memory_bytes())
        return peaks

    def _synchronizations(self, name: str) -> list[str] | str:
        import torch

        if not self._accelerator.is_cuda:
            return "there is no GPU"
        microbatches = self.read()
        self.prepare(name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self._functions[name](microbatches)
                after_step = len(caught)
                # The method ``item`` waits for the GPU. If torch does not report this, its other
                # reports are incomplete, too.
                torch.ones(1, device=self._accelerator.device).item()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        if not synchronizing_lines(caught[after_step:]):
            return UNREPORTED
        lines = synchronizing_lines(caught[:after_step])
        return sorted({line for of_rank in self._job.gather(lines) for line in of_rank})


def synchronizing_lines(caught: Iterable[warnings.WarningMessage]) -> set[str]:
    """Returns the lines of code at which the host waited for the GPU, according to ``caught``.

    Args:
        caught: Warnings that were raised while ``torch.cuda.set_sync_debug_mode`` was ``warn``,
            including torch's note about that mode.
    """
    return {
        "/".join([*Path(warning.filename).parts[-3:], str(warning.lineno)])
        for warning in caught
        if SYNCHRONIZED in str(warning.message)
    }


def _send_through_host() -> None:
    """Makes megatron-core's training loop copy GPU tensors to the host and send them over gloo."""
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
    """Runs the ranks of a part. Returns rows for the report, and all measurements.

    Args:
        part: Name of the part in ``PARTS``.
        tiny: Whether to use a small model and few rounds.
        limit_s: Timeout in seconds, after which all processes are killed.

    Raises:
        RuntimeError: A rank failed or timed out.
    """
    job = ("tiny " if tiny else "") + part
    rounds = TINY_ROUNDS if tiny else ROUNDS
    result = gpt_ranks.measure(__file__, JOBS[job].ranks, rounds, job, limit_s=limit_s)
    return step_rows(part, result, tiny=tiny), result


def step_rows(part: str, result: Mapping[str, Any], *, tiny: bool = False) -> list[Row]:
    """Returns the rows of the report for ``result``.

    ``result`` was returned by :meth:`GpuRank.measure`. If ``tiny`` is set, the ratios of step times
    have no goals.
    """
    title = TITLES[part]
    times: dict[str, list[float]] = result["times"]
    rows = [
        measured(
            f"{title}: step, {name}",
            [1e3 * seconds for seconds in series],
            unit="ms",
            note=_link_note(result["links"].get(name, {})),
        )
        for name, series in times.items()
    ]
    for name, series in times.items():
        if name == "megatron" or "megatron" not in times:
            continue
        goal = None if tiny or name.endswith("gloo") else MOST
        row_title = f"{title}: step, {name} over megatron-core"
        rows.append(measured(row_title, ratios(series, times["megatron"]), goal=goal))
    for quantity, limit in LIMITS.items():
        values = {name: difference[quantity] for name, difference in result["differences"].items()}
        worst = max(values, key=lambda name: (math.isnan(values[name]), values[name]))
        rows.append(difference_row(title, quantity, values.values(), limit, worst))
    for name, lines in result["synchronizations"].items():
        row_title = f"{title}: synchronizations in forwards and backwards, {name}"
        if isinstance(lines, str):
            rows.append(missing(row_title, lines))
        else:
            # Gloo has no goal, because copies to pageable host memory always make the host wait.
            goal = None if name.endswith("gloo") else 0
            rows.append(Row(what=row_title, value=len(lines), goal=goal, note=" ".join(lines)))
    return rows


def _link_note(links: Mapping[str, Mapping[str, str]]) -> str:
    """Returns how the first link in ``links`` transfers tensors, and the reason if it is known."""
    for link in links.values():
        way = link.get("gpu_path", link["kind"])
        reason = link.get("gpu_reason")
        return f"{way}: {reason}" if reason else way
    return ""


def memory(folder: Path, *, tiny: bool, limit_s: float) -> tuple[list[Row], dict[str, Any]]:
    """Compares the measured memory in parts ``pp1`` and ``pp2`` with the prediction of ``plan``.

    Args:
        folder: Folder with the results of these parts.
        tiny: Whether these parts used the small model.
        limit_s: Time limit of each call of ``plan``, in seconds.
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
        for stage, (nbytes, predicted) in enumerate(zip(held, planned, strict=True)):
            note = f"{nbytes / 2**30:.2f} GiB, planned {predicted / 2**30:.2f} GiB"
            row_title = f"{title}: memory of stage {stage} over the plan's"
            goal = None if tiny else UNDERESTIMATE
            rows.append(Row(what=row_title, value=nbytes / predicted, goal=goal, note=note))
    return rows, facts


def _planned(stages: int, gpu: str, *, tiny: bool, limit_s: float) -> list[float]:
    """Returns the memory in bytes that ``plan`` predicts for each stage of a pipeline."""
    shape = TINY_SHAPE if tiny else SHAPE
    size, batch = (1, 4) if tiny else (4, 32)
    cluster = (
        f"format: 1\nnodes:\n- {{type: node, gpu: {gpu}, count: 1, gpus_per_node: {stages},"
        " link: {bandwidth: 100 GB/s, latency: 10 us}}\n"
    )
    arguments = ["plan", "--model", shape, "--json"]
    arguments += f"--global-batch-size {batch} --micro-batch-sizes {size} --tp 1 --dp 1".split()
    arguments += f"--pp {stages} --schedules 1f1b --recompute none --precision bf16".split()
    arguments += "--distributed-optimizer off --attention kernel --partition".split()
    layers = int(shape.split()[1]) // stages
    arguments.append("-".join([str(layers)] * stages))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cluster.yaml")
        path.write_text(cluster, encoding="utf-8")
        arguments += ["--cluster", str(path)]
        # Disable compilation, because compiling the simulator takes longer than simulating one plan
        # without compilation.
        plans = run_module("megatron.adaptive", *arguments, limit_s=limit_s, NUMBA_DISABLE_JIT="1")
    planned: list[float] = plans[0]["prediction"]["memory_bytes"]
    return planned


def device() -> tuple[list[Row], dict[str, Any]]:
    """Measures two speeds of the GPU. Returns them as rows, and facts about GPU and packages."""
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
    properties = torch.cuda.get_device_properties(0)
    facts |= {
        "gpu": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "cuDNN": torch.backends.cudnn.version(),
    }
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    programs: dict[str, Callable[[], Any]] = {
        "product": lambda: matrix @ matrix,
        "copy": lambda: matrix.clone(),
    }
    times = {}
    for name, work in programs.items():
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        spent = []
        for _ in range(20):
            begin.record()
            work()
            end.record()
            end.synchronize()
            spent.append(begin.elapsed_time(end) / 1e3)
        times[name] = statistics.median(spent[5:])
    rows = [
        Row(what="product in bf16", value=2 * 4096**3 / times["product"] / 1e12, unit="TFLOP/s"),
        Row(what="copy of 32 MiB", value=2 * matrix.nbytes / times["copy"] / 1e9, unit="GB/s"),
    ]
    return rows, facts


def main() -> int:
    """Runs a part, writes its result to a file, and returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=("device", "memory", *PARTS), required=True)
    parser.add_argument(
        "--json", type=Path, required=True, metavar="FILE", help="file for the result"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="time limit in seconds (default: %(default)g)",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="run a small model, without goals for its times"
    )
    options = parser.parse_args()
    if options.part == "device":
        rows, facts = device()
    elif options.part == "memory":
        rows, facts = memory(
            options.json.parent, tiny=options.tiny, limit_s=(options.limit - _END_S) / 2
        )
    else:
        rows, facts = steps(options.part, tiny=options.tiny, limit_s=options.limit - _END_S)
    result = {"rows": [row.as_dict() for row in rows], "facts": facts}
    options.json.write_text(json.dumps(result, default=str), encoding="utf-8")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("-"):
        sys.exit(main())
    rank_main(GpuRank)
