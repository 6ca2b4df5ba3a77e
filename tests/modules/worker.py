"""One of four ranks: runs programs on the public ``Pipeline``, one after the other.

Usage: ``worker.py FOLDER PROGRAM ...``. Results by program go to ``FOLDER/RANK.json``; an error
ends the list.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
from models import SHARED, Wide, knotty, make_batch

from megatron.adaptive import CutPoint, Pipeline
from megatron.adaptive.errors import AdaptiveError

LR = 0.05


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


def make(**options: Any) -> Pipeline:
    given: dict[str, Any] = {"micro_batch_size": 2, "shared_weights": SHARED, **options}
    model = given.pop("model", None) or knotty()
    return Pipeline(model, make_batch(4), **given)


def reference(
    model: torch.nn.Module, batches: list[Any], clip: float | None, size: int = 2
) -> dict[str, Any]:
    """Train the whole model on microbatches of that size in this process alone."""
    optimizer = sgd(model.parameters())
    losses, norms = [], []
    for batch in batches:
        optimizer.zero_grad()
        count = len(batch["ids"]) // size
        total = 0.0
        for start in range(0, size * count, size):
            loss = model(**{name: one[start : start + size] for name, one in batch.items()}) / count
            loss.backward()
            total += float(loss.detach())
        limit = float("inf") if clip is None else clip
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
        losses.append(total)
    return {"losses": losses, "norms": norms, "parameters": dict(model.named_parameters())}


def compare(pipeline: Pipeline, expected: dict[str, Any], found: list[float]) -> dict[str, Any]:
    worst = 0.0
    for name, one in pipeline.named_parameters():
        whole = expected["parameters"][name].detach()
        worst = max(worst, float((one.detach() - whole).norm() / whole.norm()))
    return {
        "losses": found,
        "expected": expected["losses"],
        "parameters": worst,
        "names": sorted(name for name, _ in pipeline.named_parameters()),
        "kept": sum(one.numel() for one in pipeline.model.parameters() if not one.is_meta),
    }


def four_stages() -> dict[str, Any]:
    """Clipped steps on four ranks, with what the buffers became and an evaluation."""
    batches = [make_batch(12, seed) for seed in range(3)]
    whole = knotty()
    expected = reference(whole, batches, clip=0.05)
    whole.eval()
    with torch.no_grad(), make() as pipeline:
        pipeline.set_optimizer(sgd, clip_norm=0.05)
        norms = []
        losses = []
        for batch in batches:
            losses.append(pipeline.step(batch)[0])
            norms.append(pipeline.grad_norm)
        test = make_batch(4, 9)
        evaluated = pipeline.eval(test)
        halves = [{n: one[s : s + 2] for n, one in test.items()} for s in (0, 2)]
        buffers = {
            name: float((one - dict(whole.named_buffers())[name]).abs().max())
            for name, one in pipeline.model.named_buffers()
            if not one.is_meta
        }
        return {
            **compare(pipeline, expected, losses),
            "norms": [norms, expected["norms"]],
            "evaluated": [evaluated, sum(float(whole(**half)) for half in halves) / 2],
            "buffers": buffers,
            "partition": pipeline.partition,
        }


def two_replicas() -> dict[str, Any]:
    """Two pipelines of two, each with its half of the samples."""
    parts = [[make_batch(8, seed + 10 * replica) for seed in range(2)] for replica in range(2)]
    whole = [{n: torch.cat([a[n], b[n]]) for n in a} for a, b in zip(*parts, strict=True)]
    expected = reference(knotty(), whole, clip=None)
    with make(pipeline_size=2, schedule="zb-h1", partition="4-5") as pipeline:
        pipeline.set_optimizer(sgd)
        replica = dist.get_rank() % 2
        losses = [pipeline.step(batch)[0] for batch in parts[replica]]
        return compare(pipeline, expected, losses)


def dropout() -> dict[str, Any]:
    """The same losses however the model is cut, and the caller's generator is left alone."""
    found = []
    for options in ({}, {"schedule": "zb-v"}, {"schedule": "gpipe", "partition": "1-1-1-6"}):
        model = knotty(dropout=0.3)
        torch.manual_seed(len(found))
        before = torch.get_rng_state()
        with make(model=model, **options) as pipeline:
            pipeline.set_optimizer(sgd)
            found.append([pipeline.step(make_batch(8))[0] for _ in range(2)])
        assert torch.equal(torch.get_rng_state(), before)
    plain = make()
    with plain:
        without = plain.step(make_batch(8))[0]
    return {"losses": found, "without": without}


class Sharp(torch.nn.Module):
    """Gradients between its stages that fp16 cannot hold at a large loss scale."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.cuts = torch.nn.ModuleList(CutPoint() for _ in range(3))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.one_hot(ids % 8, 8).float()
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number < 3:
                x = self.cuts[number](x)
        return (x.float() ** 2).sum()


def half() -> dict[str, Any]:
    """fp16: steps that overflow change nothing, until the scale fits; bf16 trains."""
    with make(model=Sharp(), mixed_precision="fp16", shared_weights=()) as pipeline:
        pipeline.set_optimizer(sgd, initial_loss_scale=2.0**24, clip_norm=1.0)
        batch = make_batch(8)
        before = [one.detach().clone() for one in pipeline.parameters()]
        told, scales = [], []
        unchanged = None
        for _ in range(16):
            told.append(pipeline.step(batch))
            scales.append(pipeline.loss_scale)
            if unchanged is None:
                pairs = zip(before, pipeline.parameters(), strict=True)
                unchanged = all(torch.equal(one, other) for one, other in pairs)
        norm = pipeline.grad_norm
    with make(model=Sharp(), shared_weights=()) as pipeline:
        full = pipeline.step(batch)[0]
        full_norm = pipeline.grad_norm
    with make(mixed_precision="bf16", schedule="zb-h1") as pipeline:
        pipeline.set_optimizer(sgd)
        rounded = [pipeline.step(batch)[0] for _ in range(5)]
    return {
        "told": told, "scales": scales, "unchanged": unchanged, "norm": norm,
        "full": [full, full_norm], "bf16": rounded,
    }  # fmt: skip


def trace() -> dict[str, Any]:
    """Spans of two steps are written."""
    folder = Path(sys.argv[1]) / "traces"
    with make(trace_dir=str(folder)) as pipeline:
        for _ in range(2):
            pipeline.step(make_batch(8))
    return {"files": sorted(path.name for path in folder.iterdir())}


def refusals() -> dict[str, Any]:
    """What is wrong is said on every rank, and the next pipeline works."""
    said = {}
    for name, options in {
        "stages": {"schedule": "interleaved", "chunks": 3},
        "shared": {"shared_weights": SHARED[1:]},
        "size": {"pipeline_size": 3},
        "partition": {"partition": "1-1-1"},
        "weights": {"weights": [1.0]},
        "schedule": {"schedule": "best"},
        "chunks": {"schedule": "1f1b", "chunks": 2},
        "precision": {"mixed_precision": "fp8"},
        "split": {"schedule": "1f1b", "split_backward": True},
    }.items():
        said[name] = error_of(lambda options=options: make(**options))  # type: ignore[misc]
    with make() as pipeline:
        said["batch"] = error_of(lambda: pipeline.step(make_batch(3)))
        said["keys"] = error_of(lambda: pipeline.step({"ids": make_batch(2)["ids"]}))
        said["dictionary"] = error_of(lambda: pipeline.step(make_batch(2)["ids"]))  # type: ignore[arg-type]
        said["shape"] = error_of(lambda: pipeline.step(make_batch(2, length=7)))
        said["optimizer"] = error_of(lambda: pipeline.set_optimizer(sgd(knotty().parameters())))
        said["loss"] = str(pipeline.step(make_batch(2))[1])
    return said


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except AdaptiveError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def automatic() -> dict[str, Any]:
    """Started without sizes; with memory for a part of the model; with one of the sizes given."""
    batches = [make_batch(16, seed) for seed in range(2)]
    with open_pipeline() as pipeline:
        plan = pipeline.plan
        assert plan is not None
        pipeline.set_optimizer(sgd)
        losses = [pipeline.step(pipeline.share(batch))[0] for batch in batches]
        size = pipeline.micro_batch_size
        expected = reference(knotty(), batches, clip=None, size=size)
        told = {
            **compare(pipeline, expected, losses),
            "shape": [pipeline.pipeline_size, pipeline.replicas, size],
            "partition": pipeline.partition,
            "chosen": shape_of(plan.best),
            "seconds": [one.seconds for one in (plan.best, *plan.others)],
            "others": [shape_of(one) for one in plan.others],
            "text": str(plan),
            "links": [one["within"] for one in plan.profile.links],
            "reduced": [one["ranks"] for one in plan.profile.reductions],
            "replica": pipeline.replica,
        }
        shared = error_of(lambda: pipeline.share(make_batch(pipeline.replicas + 1)))
    if told["shape"][1] > 1:
        told["unshared"] = shared
    profile = plan.profile
    if dist.get_rank() == 0:
        profile.write(Path(sys.argv[1]) / "profile.json")
    # Memory for half of the parameters with what Adam keeps.
    torch.manual_seed(4)
    wide, sample = Wide(), {"x": torch.randn(8, 64)}
    limit = 0.6 * 16 * sum(one.numel() for one in wide.parameters())
    options: dict[str, Any] = {"pipeline_size": "auto", "micro_batch_size": 1}
    with Pipeline(wide, sample, memory_limit_bytes=limit, **options) as small:
        assert small.plan is not None
        told["small"] = {
            "shape": [small.pipeline_size, small.micro_batch_size],
            "needed": [one.needed_bytes for one in (small.plan.best, *small.plan.others)],
            "limit": limit,
            "loss": small.step(small.share(sample))[0],
        }
    with open_pipeline(pipeline_size=2, partition="4-5", batch_size=8, schedule="1f1b") as kept:
        assert kept.plan is not None
        told["kept"] = [kept.pipeline_size, kept.partition, kept.plan.batch_size]
    return told


def open_pipeline(**options: Any) -> Pipeline:
    return Pipeline(knotty(), make_batch(16), shared_weights=SHARED, **options)


def shape_of(option: Any) -> list[Any]:
    size = [option.pipeline_size, option.replicas, option.micro_batch_size]
    return [*size, list(option.partition)]


def no_plan() -> dict[str, Any]:
    """What cannot be planned, on every rank."""

    def said(**options: Any) -> str:
        return error_of(lambda: open_pipeline(**options))

    return {
        "memory": said(memory_limit_bytes=2000.0),
        "batch": said(batch_size=0),
        "odd": said(batch_size=6, pipeline_size=1),
        "size": said(pipeline_size=3),
        "schedule": said(schedule="best"),
        "unshared": error_of(lambda: Pipeline(knotty(), make_batch(16))),
        "sample": error_of(lambda: Pipeline(knotty(), {})),
    }


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Two groups with options of their own."""
    flat = [one for one in parameters if one.dim() < 2]
    wide = [one for one in parameters if one.dim() >= 2]
    groups = [{"params": wide}, {"params": flat, "weight_decay": 0.0, "lr": 0.02}]
    return torch.optim.AdamW([one for one in groups if one["params"]], lr=0.01)


def saved() -> dict[str, Any]:
    """Training goes on in any other shape from what one of them saved."""
    folder = Path(sys.argv[1]) / "checkpoints"
    batches = [make_batch(8, seed) for seed in range(5)]

    def train(pipeline: Pipeline, first: int, last: int) -> list[float]:
        return [pipeline.step(pipeline.share(one))[0] for one in batches[first:last]]

    with make(model=knotty(dropout=0.3), seed=77) as pipeline:
        pipeline.set_optimizer(adamw)
        first = train(pipeline, 0, 3)
        for group in pipeline._update.optimizer.param_groups:
            group["lr"] *= 0.5
        path = pipeline.save(folder, extra={"epoch": 3})
        evaluated = pipeline.eval(batches[0])
        expected = train(pipeline, 3, 5)
        pipeline.save(folder)
        told: dict[str, Any] = {"first": first, "expected": expected, "name": path.name}
    found = []
    for options in (
        {"pipeline_size": 2, "partition": "2-7"},
        {"pipeline_size": 1},
    ):
        torch.manual_seed(9)
        other = type(knotty())(dropout=0.3)  # other weights
        with make(model=other, **options) as pipeline:
            pipeline.set_optimizer(adamw)
            extra = pipeline.load(folder, step=3)
            again = pipeline.eval(batches[0])
            found.append([extra, again, train(pipeline, 3, 5), pipeline.steps])
            pipeline.save(folder)  # takes the place of the former one
    refused = refused_checkpoints(folder)
    with make(model=knotty(dropout=0.3), schedule="zb-v", pipeline_size=2) as pipeline:
        pipeline.set_optimizer(adamw)
        pipeline.load(folder, step=3)
        told["split"] = train(pipeline, 3, 4)
        pipeline.save(folder, keep=2)
    told["kept"] = sorted(one.name for one in folder.iterdir())
    return {**told, "found": found, "evaluated": evaluated, "refused": refused}


def refused_checkpoints(folder: Path) -> dict[str, str]:
    said = {}
    first = dist.get_rank() == 0
    with make() as pipeline:
        said["optimizer"] = error_of(lambda: pipeline.load(folder))
        said["step"] = error_of(lambda: pipeline.load(folder, step=8))
        said["nothing"] = error_of(lambda: pipeline.load(folder / "none"))
        said["extra"] = error_of(lambda: pipeline.save(folder, extra={"a": torch.ones(1)}))
        said["keep"] = error_of(lambda: pipeline.save(folder, keep=0))
        said["file"] = error_of(lambda: pipeline.save(folder / "step_00000003" / ".metadata"))
        pipeline.set_optimizer(sgd)
        said["kind"] = error_of(lambda: pipeline.load(folder))
        pipeline.load(folder, optimizer=False)
        newest = folder / "step_00000005"
        if first:  # a disk that lost a part, and one that holds something else there
            (whole,) = newest.glob("__0_*.distcp")
            kept = whole.read_bytes()
            whole.write_bytes(b"")
        dist.barrier()
        said["short"] = error_of(lambda: pipeline.load(folder, optimizer=False))
        if first:
            whole.write_bytes(b"x" * len(kept))
        dist.barrier()
        said["broken"] = error_of(lambda: pipeline.load(folder, optimizer=False))
    with make(model=knotty(blocks=9)) as pipeline:
        said["model"] = error_of(lambda: pipeline.load(folder, optimizer=False))
    return said


def disks() -> dict[str, Any]:
    """Checkpoints go to the disks of four nodes, one for each rank, and from there to all."""
    folder, rank = Path(sys.argv[1]), dist.get_rank()
    shared, disk = folder / "shared", folder / "disk"
    os.environ["MEGATRON_ADAPTIVE_NODE"] = f"node-{rank}"
    batches = [make_batch(8, seed) for seed in range(7)]

    def train(total: int, **options: Any) -> dict[int, float]:
        losses = {}
        torch.manual_seed(9)
        with make(model=knotty(dropout=0.3), batch_size=8, seed=77, **options) as pipeline:
            pipeline.set_optimizer(adamw)
            for step in pipeline.loop(
                total, folder=shared, local_folder=disk, save_interval=2, keep=2
            ):
                losses[step], _ = pipeline.step(pipeline.share(batches[step]))
        return losses

    alike = {"partition": "2-2-2-3"}  # the stages of one are those of the next
    begun = train(5, **alike)
    (own,) = disk.glob(f"shared-*/node-{rank}")
    told: dict[str, Any] = {
        "steps": sorted(one.name for one in own.iterdir()),
        "parts": sorted(one.name for one in own.glob("iter_0000005/*.distcp")),
        "shared": sorted(one.name for one in shared.iterdir()),
    }
    dist.barrier()
    if rank == 3:  # what only it needs, of the right size: it would notice reading it there
        (last,) = shared.glob("step_00000005/__3_0.distcp")
        last.write_bytes(bytes(last.stat().st_size))
    dist.barrier()
    told["near"] = train(6, **alike)  # each has its own part
    told["apart"] = train(7, pipeline_size=2, partition="2-7")  # and needs others' here
    del os.environ["MEGATRON_ADAPTIVE_NODE"]
    with make(model=knotty(dropout=0.3), batch_size=8, seed=77) as pipeline:
        pipeline.set_optimizer(adamw)
        whole = [pipeline.step(pipeline.share(one))[0] for one in batches]
    return {**told, "begun": begun, "whole": whole}


PROGRAMS = {
    one.__name__: one
    for one in (
        four_stages,
        two_replicas,
        dropout,
        half,
        trace,
        refusals,
        automatic,
        no_plan,
        saved,
        disks,
    )
}


def main() -> None:
    faulthandler.dump_traceback_later(float(os.environ["WATCHDOG_S"]), exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    path = Path(sys.argv[1]) / f"{dist.get_rank()}.json"
    for program in (PROGRAMS[name] for name in sys.argv[2:]):
        try:
            results[program.__name__] = program()
        except Exception:
            results["error"] = f"{program.__name__}: {traceback.format_exc()}"
            break
        finally:
            path.write_text(json.dumps(results))
    if "error" in results:
        os._exit(1)  # others wait for what does not come
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
