"""Saves and loads checkpoints in jobs of many shapes. Tests start this program as ranks.

Usage: ``checkpoint_worker.py SCENARIO FOLDER``. A rank that detects an error raises an exception,
and the test prints the output of the rank. A shape consists of the parallel sizes and the
partition. The same processes run all shapes, because starting processes takes seconds.

The initial value of a weight depends only on its position in the model, and its synthetic gradient
depends only on its value. So steps are bitwise identical in every shape. A state that was loaded
from a checkpoint of another shape can be compared with the state of a run that never changed its
shape.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.adaptive import accelerator

accelerator.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import finalize_model_grads  # noqa: E402
from megatron.core.utils import unwrap_model  # noqa: E402

from megatron.adaptive.checkpoint import node_local, writer  # noqa: E402
from megatron.adaptive.checkpoint.folder import CheckpointFolder  # noqa: E402
from megatron.adaptive.checkpoint.trainer_checkpoints import Checkpoints, Progress, prepare_folder  # noqa: E402
from megatron.adaptive.config.arguments import parse  # noqa: E402
from megatron.adaptive.config.environment import Environment  # noqa: E402
from megatron.adaptive.config.trainer import TrainerConfig  # noqa: E402
from megatron.adaptive.errors import CheckpointError  # noqa: E402
from megatron.adaptive.gpt.build_model import (  # noqa: E402
    build_chunks,
    build_optimizer,
    build_scheduler,
    transformer_config,
)
from megatron.adaptive.gpt.initialize import TrainingJob, end_job, seed_everything, start_job  # noqa: E402
from megatron.adaptive.gpt.model_placement import placement_of  # noqa: E402

Flags = dict[str, str | None]

VOCAB = 100
TRAIN_SAMPLES = 800
BASE = {
    "--num-layers": "4",
    "--hidden-size": "32",
    "--num-attention-heads": "4",
    "--seq-length": "16",
    "--max-position-embeddings": "16",
    "--micro-batch-size": "1",
    "--global-batch-size": "8",
    "--train-iters": "100",
    "--lr": "1e-2",
    "--min-lr": "1e-3",
    "--clip-grad": "0.0",
    "--make-vocab-size-divisible-by": "16",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": str(VOCAB - 1),
    "--mock-data": None,
}


def settings(flags: Flags) -> TrainerConfig:
    """Returns the configuration of a small model. ``flags`` replace the flags in :data:`BASE`."""
    argv = [word for flag in (BASE | flags).items() for word in flag if word is not None]
    return parse(argv, world_size=Environment.read().world_size)


class Jobs:
    """Holds this process's job, and replaces the job when other process groups are needed."""

    def __init__(self) -> None:
        self._job: TrainingJob | None = None

    def join(self, config: TrainerConfig) -> TrainingJob:
        """Returns a job with the configuration ``config``, which this process has joined.

        Leaves the previous job first if that job has different process groups.
        """
        if self._job is not None and _mesh(self._job.config) != _mesh(config):
            self.leave()
        if self._job is None:
            environment = Environment.read()
            device = accelerator.detect(environment.local_rank)
            self._job = start_job(config, environment, device)
        seed_everything(config.run.seed)
        self._job = dataclasses.replace(self._job, config=config)
        return self._job

    def leave(self) -> None:
        """Leaves the job, destroys its process groups, and agrees on a new port with other ranks.

        The launcher's store still contains the addresses of the old groups, so the next job needs
        another port.

        Process groups that are not destroyed would keep dozens of threads.
        """
        if self._job is None:
            return
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = [probe.getsockname()[1]]
        dist.broadcast_object_list(port, src=0, group=self._job.control_group)
        if self._job.environment.is_launched:
            os.environ["MASTER_PORT"] = str(port[0])
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        dist.barrier(group=self._job.control_group)
        end_job()
        self._job = None


def _mesh(config: TrainerConfig) -> tuple[object, ...]:
    """Returns the settings in ``config`` that determine the process groups."""
    return config.parallel, config.placement_kind


class Training:
    """Holds a model with one shape, its optimizer, its scheduler and its checkpoints."""

    def __init__(self, jobs: Jobs, flags: Flags) -> None:
        self.config = settings(flags)
        self.job = job = jobs.join(self.config)
        model, parallel = self.config.model, self.config.parallel
        placement = placement_of(self.config)
        multiple = model.make_vocab_size_divisible_by * parallel.tensor_model_parallel_size
        rows = -(-(self.config.data.vocab_size + 1) // multiple) * multiple
        device = job.accelerator
        core = transformer_config(self.config, device)
        self.chunks = build_chunks(self.config, core, device, placement, rows)
        self.optimizer = build_optimizer(self.config, self.chunks)
        self.scheduler = build_scheduler(self.config, self.optimizer, TRAIN_SAMPLES)
        self.samples = SimpleNamespace(train=None)
        # Without --save-local, the folder of --save is reserved when the first checkpoint is saved.
        has_local = self.config.checkpoint.save_local is not None
        self.local = prepare_folder(job, self.config) if has_local else None
        run: Any = self
        self.checkpoints = Checkpoints(run, self.local, self.config)

    def resume(self) -> Progress | None:
        """Loads a checkpoint as the trainer does, and returns the progress that it contains."""
        return self.checkpoints.load()

    def step(self, count: int = 1) -> None:
        """Takes ``count`` optimizer steps with gradients that depend only on the weights."""
        for _ in range(count):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
                for parameter in chunk.parameters():
                    parameter.main_grad.copy_(parameter.detach() * 0.5 + 0.25)
            self.optimizer.step()
            self.scheduler.step(self.config.batch.global_batch_size)

    def learn(self, first: int, last: int) -> list[float]:
        """Trains on synthetic tokens in one process, from iteration ``first`` to ``last - 1``.

        Returns:
            Loss of each iteration. Dropout uses the current state of the random number generators.
        """
        losses = []
        chunk, device = self.chunks[0], self.job.accelerator.device
        for iteration in range(first, last):
            generator = torch.Generator().manual_seed(iteration)
            tokens = torch.randint(0, VOCAB, (2, 17), generator=generator).to(device)
            chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            places = torch.arange(16, device=device).expand(2, 16)
            loss = chunk(tokens[:, :-1], places, None, labels=tokens[:, 1:]).float().mean()
            self.optimizer.scale_loss(loss).backward()
            finalize_model_grads(self.chunks)
            done, _, _ = self.optimizer.step()
            if done:
                self.scheduler.step(self.config.batch.global_batch_size)
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, torch.Tensor]:
        """Returns the tensors of the training state that this rank holds, keyed by name."""
        tensors_by_name = {}
        leaf = self.optimizer.chained_optimizers[0]
        inner = leaf.optimizer
        for index, chunk in enumerate(self.chunks):
            for name, parameter in unwrap_model(chunk).named_parameters():
                key = f"{index}.{name}"
                held = getattr(parameter, "main_param", None)
                held = parameter if held is None else held
                tensors = {"weight": parameter, "main": held, **inner.state.get(held, {})}
                tensors_by_name |= {
                    f"{key} {part}": _real(name, value) for part, value in tensors.items()
                }
        for number, group in enumerate(inner.param_groups):
            for name in ("lr", "weight_decay", "max_lr", "min_lr", "wd_mult", "lr_mult"):
                tensors_by_name[f"group {number} {name}"] = torch.tensor(float(group[name]))
            # If the optimizer is distributed, also add the optimizer states of parameter shards.
            if leaf.config.use_distributed_optimizer:
                for position, held in enumerate(group["params"]):
                    for name, value in inner.state[held].items():
                        tensors_by_name[f"group {number} {position} {name}"] = (
                            value.detach().clone()
                        )
        if leaf.config.fp16:
            tensors_by_name["loss scale"] = self.optimizer.get_loss_scale().clone()
        return tensors_by_name


def _real(name: str, value: torch.Tensor) -> torch.Tensor:
    """Returns a copy of the tensor ``value`` without rows that only pad the vocabulary.

    ``name`` is the name of the tensor.
    """
    value = value.detach().clone()
    if value.dim() == 2 and ("word_embeddings" in name or "output_layer" in name):
        first = parallel_state.get_tensor_model_parallel_rank() * len(value)
        return value[: max(VOCAB - first, 0)]
    return value


def progress(iteration: int) -> Progress:
    return Progress(
        iteration=iteration,
        consumed_train_samples=8 * iteration,
        consumed_valid_samples=5,
        skipped_iterations=1,
    )


def require_equal(actual: dict[str, Any], expected: dict[str, Any], subject: str) -> None:
    """Checks that the states ``actual`` and ``expected`` are bitwise equal.

    ``subject`` describes the comparison in the error message.
    """
    if actual.keys() != expected.keys():
        raise SystemExit(
            f"{subject}: only one state has {sorted(actual.keys() ^ expected.keys())[:6]}"
        )
    for name, value in expected.items():
        if not torch.equal(actual[name], value):
            gap = (actual[name].double() - value.double()).abs()
            raise SystemExit(f"{subject}: {name} differs in {int((gap > 0).sum())} places")


def shape(tp: int, pp: int, chunks: int = 1, **flags: str | None) -> Flags:
    flags_of_shape: Flags = {
        "--tensor-model-parallel-size": str(tp),
        "--pipeline-model-parallel-size": str(pp),
    }
    if chunks > 1:
        flags_of_shape["--num-virtual-stages-per-pipeline-rank"] = str(chunks)
    return flags_of_shape | {f"--{name.replace('_', '-')}": value for name, value in flags.items()}


def saving(folder: Path) -> Flags:
    return {"--save": str(folder), "--save-interval": "1"}


def reshape(
    jobs: Jobs, folder: Path, common: Flags, sources: list[Flags], targets: list[Flags]
) -> None:
    """Checks that checkpoints of each shape in ``sources`` can be loaded in each of ``targets``.

    The loaded state and the next step must be identical to those of a run that had the target shape
    from the start. ``common`` contains flags of all runs.
    """
    for number, source in enumerate(sources):
        run = Training(jobs, common | source | saving(folder / f"{number}"))
        run.step()
        # The second checkpoint is written in the background, but in the same format.
        run.checkpoints.save(progress(1))
        run.step()
        run.checkpoints.save(progress(2), behind=True)
        run.checkpoints.saver.finish()
    for target in targets:
        run = Training(jobs, common | target)
        run.step(2)
        saved = run.state()
        run.step()
        later = run.state()
        for number, source in enumerate(sources):
            subject = f"{source} -> {target}"
            run = Training(jobs, common | target | {"--load": str(folder / f"{number}")})
            if run.checkpoints.load() != progress(2):
                raise SystemExit(f"{subject}: the loaded counters differ from the saved counters")
            require_equal(run.state(), saved, f"{subject} loaded")
            run.step()
            require_equal(run.state(), later, f"{subject} one step later")


def scenario_reshape(jobs: Jobs, folder: Path) -> None:
    """Checks that models and optimizers of many shapes can be resharded.

    Some partitions are uneven or have empty stages. All jobs write to ``folder``.
    """
    empty = shape(1, 4, partition="0-3-1-0")
    # The last ranks have no layers, and one of these ranks has no parameters.
    hollow = shape(1, 4, partition="0-4-0-0")
    chunked = shape(1, 2, 2, partition="1-0-2-1", pipeline_placement="loop")
    spread = shape(2, 1, ckpt_fully_parallel_load=None)
    # One rank has the first and the last stage, so this rank holds both copies of a tied embedding.
    turned = shape(1, 2, 2, partition="1-2-1-0", pipeline_placement="v")
    copies = shape(1, 1)
    both = shape(2, 2)
    modern: Flags = {
        "--swiglu": None,
        "--untie-embeddings-and-output-weights": None,
        "--group-query-attention": None,
        "--num-query-groups": "2",
        "--normalization": "RMSNorm",
        "--position-embedding-type": "rope",
        "--disable-bias-linear": None,
        "--decoupled-lr": "2e-2",
    }
    fp16: Flags = {"--fp16": None, "--initial-loss-scale": "65536"}
    split: Flags = {
        "--use-distributed-optimizer": None,
        # The padded vocabulary must have the same size in every shape, because the elements of
        # optimizer shards have no names.
        "--make-vocab-size-divisible-by": "64",
    }
    together: Flags = {"--ckpt-fully-parallel-load": None}
    reshape(jobs, folder / "tied", {}, [empty], [empty, both, copies, chunked, turned])
    reshape(jobs, folder / "turned", together, [turned], [turned, chunked])
    reshape(jobs, folder / "turned16", split | {"--bf16": None}, [turned], [spread])
    reshape(jobs, folder / "back", {}, [chunked], [hollow])
    reshape(jobs, folder / "split", split, [hollow], [hollow, spread])
    reshape(jobs, folder / "split16", split | {"--bf16": None}, [spread], [chunked])
    reshape(jobs, folder / "modern", modern, [chunked], [both])
    reshape(jobs, folder / "bf16", {"--bf16": None}, [both], [both, chunked])
    reshape(jobs, folder / "fp16", fp16, [chunked], [both])
    reshape(jobs, folder / "sgd", {"--optimizer": "sgd"}, [both], [spread])


def refused(save: Callable[[], object]) -> str:
    """Calls ``save``, which must raise a CheckpointError, and returns the text of the error."""
    try:
        save()
    except CheckpointError as error:
        return str(error)
    raise SystemExit("the save did not raise an error")


@contextlib.contextmanager
def full_disk(limit_bytes: int, *, here: bool) -> Iterator[None]:
    """Simulates a full disk if ``here``, by limiting the size of files that this rank can write.

    Writing more than ``limit_bytes`` bytes to a file then fails.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def scenario_failures(jobs: Jobs, folder: Path) -> None:
    """Checks that a failed write makes the save fail on all ranks and leaves no files."""
    run = Training(jobs, shape(1, 2) | saving(folder))
    rank = dist.get_rank()
    run.step(2)
    run.checkpoints.save(progress(1))
    for failing, limit_bytes in ((1, 5000), (0, 5000), (0, 200)):
        with full_disk(limit_bytes, here=rank == failing):
            text = refused(lambda: run.checkpoints.save(progress(2)))
        if f"rank {failing}: " not in text or "iteration 2 was not written" not in text:
            raise SystemExit(f"rank {failing} failed, but the error is: {text}")
        if "File too large" not in text:
            raise SystemExit(f"the error does not contain the reason: {text}")
        left = sorted(entry.name for entry in folder.iterdir() if entry.name != ".lease")
        if left != ["iter_0000001", "latest_checkpointed_iteration.txt"]:
            raise SystemExit(f"the folder contains {left} after a failed save")
        dist.barrier()
    if rank == 0:
        # Such a folder is left behind by a run that crashes while it saves.
        (folder / ".iter_0000007.partial").mkdir()
    run.checkpoints.save(progress(2))
    if (folder / ".iter_0000007.partial").exists():
        raise SystemExit("the partial checkpoint of a crashed run was not removed")


def scenario_killed(jobs: Jobs, folder: Path) -> None:
    """Kills rank 1 while it writes a checkpoint to ``folder``."""
    run = Training(jobs, shape(1, 2) | saving(folder))
    run.step(2)
    run.checkpoints.save(progress(1))
    if dist.get_rank() == 1:
        write = writer._write_file

        def write_and_die(*args: Any) -> None:
            write(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        writer._write_file = write_and_die
    run.checkpoints.save(progress(2))


def with_disks(folder: Path, **flags: str | None) -> Flags:
    """Gives this rank a separate node name, and returns flags for local disks below ``folder``."""
    os.environ["MEGATRON_ADAPTIVE_NODE"] = f"node-{Environment.read().rank}"
    disks = saving(folder / "shared") | {"--save-local": str(folder / "disk")}
    return shape(1, 2, **flags) | disks | {"--load": str(folder / "shared")}


def scenario_local(jobs: Jobs, folder: Path) -> None:
    """Checks that local checkpoints are copied to shared storage, and that ranks can load both."""
    # Untie the embeddings, because the last stage would otherwise need the first stage's embedding,
    # which is on another disk.
    flags = with_disks(folder, keep_checkpoints="2", untie_embeddings_and_output_weights=None)
    run = Training(jobs, flags)
    for iteration in range(1, 5):
        run.step()
        run.checkpoints.save(progress(iteration), behind=True)
    run.checkpoints.saver.drain()
    saved = run.state()
    shared, rank = CheckpointFolder(folder / "shared"), dist.get_rank()
    steps_on_node = run.local._folder.steps()
    if shared.latest() != 4 or len(shared.steps()) > 2 or list(steps_on_node) != [3, 4]:
        raise SystemExit(
            f"shared storage has {shared.steps()}, and a node's disk has {steps_on_node}"
        )
    here = {path.name for path in steps_on_node[4].glob("*.distcp")}
    if here != {f"__{rank}_0.distcp"}:
        raise SystemExit(f"a node's disk has {here}")
    dist.barrier()
    for target in ({}, shape(2, 1), {"--ckpt-fully-parallel-load": None}):
        again = Training(jobs, flags | target)
        if again.resume() != progress(4):
            raise SystemExit("the newest checkpoint was not loaded")
        if not target:
            require_equal(again.state(), saved, "loaded")
    if rank == 0:  # The files keep their sizes, so only reading can detect the damage.
        for path in shared.complete_path(4).glob("*.distcp"):
            path.write_bytes(bytes(path.stat().st_size))
    dist.barrier()
    again = Training(jobs, flags)
    again.resume()
    require_equal(again.state(), saved, "loaded from the nodes' own disks")
    if Training(jobs, flags | shape(2, 1)).resume() != progress(3):
        raise SystemExit("files of another node were not read from shared storage")


def scenario_copy_killed(jobs: Jobs, folder: Path) -> None:
    """Kills rank 1 while a checkpoint is copied from a local disk to shared storage."""
    run = Training(jobs, with_disks(folder))
    run.step()
    run.checkpoints.save(progress(1))
    if dist.get_rank() == 1:
        pieces = node_local.Upload._pieces

        def copy_and_die(upload: node_local.Upload) -> Iterator[None]:
            for _ in pieces(upload):
                os.kill(os.getpid(), signal.SIGKILL)
                yield

        node_local.Upload._pieces = copy_and_die  # type: ignore[method-assign]
    run.step()
    run.checkpoints.save(progress(2))


def scenario_copy_resumed(jobs: Jobs, folder: Path) -> None:
    """Checks that a run resumes from the copies that ``scenario_copy_killed`` left behind."""
    flags = with_disks(folder)
    whole = len(list((folder / "disk").glob("*/*"))) == 2
    expected = 2 if whole else 1
    undisturbed = Training(jobs, shape(1, 2))
    undisturbed.step(expected)
    run = Training(jobs, flags)
    resumed = run.resume()
    if resumed != progress(expected):
        raise SystemExit(f"the run resumed from {resumed}")
    require_equal(run.state(), undisturbed.state(), "loaded")
    run.step()
    undisturbed.step()
    require_equal(run.state(), undisturbed.state(), "one step later")
    run.checkpoints.save(progress(expected + 1))
    steps = list(run.local._folder.steps())
    if steps[-1] != expected + 1:
        raise SystemExit(f"a node's disk has {steps}")


SCENARIOS = {
    name.removeprefix("scenario_"): function
    for name, function in list(globals().items())
    if name.startswith("scenario_")
}


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    jobs = Jobs()
    SCENARIOS[name](jobs, folder)
    jobs.leave()
    if Environment.read().rank == 0:
        print(f"{name}: ok", flush=True)


if __name__ == "__main__":
    main()
