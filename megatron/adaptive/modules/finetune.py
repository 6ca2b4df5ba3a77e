"""Fine-tunes a saved ``transformers`` model on a file of samples. Used by ``train finetune``.

``examples/finetune/finetune.py`` is a short version of this module that users can copy and change.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from megatron.adaptive.config.environment import Environment
from megatron.adaptive.engine.process_context import naming_lost_peers
from megatron.adaptive.errors import AdaptiveError, CheckpointError, ConfigError, SetupError
from megatron.adaptive.modules.batch import Microbatch
from megatron.adaptive.modules.pipeline import Pipeline
from megatron.adaptive.modules.pretrained import read_config
from megatron.adaptive.modules.pretrained_saving import finish, guarded
from megatron.adaptive.modules.processors import load_processor
from megatron.adaptive.modules.recording import Slicing
from megatron.adaptive.modules.samples import SampleFile, SampleReader, num_learned

if TYPE_CHECKING:
    # Import this only for type checkers. At run time, Pipeline must be imported first, because
    # importing it prepares megatron-core to run without CUDA.
    from megatron.adaptive.modules.content import MicrobatchOrder

_RECORD = "finetune.json"
"""Name of the file with the settings of the run, in the folder of the tuned model."""

_WITHOUT_EFFECT = (
    "checkpoints",
    "save_interval",
    "wandb",
    "trace_dir",
    "trace_detail",
    "trace_interval",
)
"""Names of the settings that do not affect the tuned model."""

_READ_LIMIT_S = 600.0
"""Maximum time in seconds to wait until another process has encoded its part of the samples."""


class DivergedError(AdaptiveError):
    """Raised on all processes if training cannot continue because a gradient is infinite or NaN."""


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """Contains the settings of a fine-tuning run.

    Attributes:
        model: Folder of the model.
        data: Path of the file of samples, in JSON Lines format.
        output: New or empty folder for the tuned model.
        image_folder: Folder that contains all images; ``None`` uses the folder of ``data``.
        lora_rank: Rank of the LoRA adapters; 0 trains the whole model.
        epochs: Number of passes over the training samples.
        batch_size: Number of samples per step, over all replicas.
        lr: Initial learning rate of AdamW. The rate decays to 0 along a cosine.
        max_length: Maximum number of tokens per sample; longer samples are truncated.
        length_multiple: Padding unit; each sample is padded to a multiple of this number of tokens.
        eval_share: Fraction of the samples that are held out for evaluation, at least 0 and less
            than 1.
        pipeline_size: Number of processes per pipeline; ``None`` uses all processes.
        schedule: Name of the schedule.
        dtype: Dtype of the parameters, such as ``bfloat16``. ``None`` uses the dtype of the saved
            model, or float32 if the whole model is trained and the dtype is float16.
        mixed_precision: ``bf16`` or ``fp16`` for autocast; ``None`` disables autocast.
        recompute: Calls that the backward pass recomputes. See :class:`Pipeline` for the values.
        slicing: Method of recording the forward pass. See :class:`Pipeline` for the values.
        repartition: Whether segments move between processes. See :class:`Pipeline` for the values.
        order: Order in which a process runs the samples of a step. See :class:`Pipeline` for the
            values.
        trace_dir: Folder to which traces are written; ``None`` disables tracing.
        trace_detail: Events in a trace. See :class:`Pipeline` for the values.
        trace_interval: Number of steps from one traced step to the next.
        seed: Seed of the sample order, of adapters and of dropout.
        checkpoints: Folder of checkpoints. An interrupted run continues from its newest checkpoint;
            ``None`` disables checkpoints.
        save_interval: Number of steps between checkpoints; ``None`` saves only at the end.
        wandb: Weights & Biases project to log to; ``None`` disables logging to Weights & Biases.
        trust_remote_code: Whether Python code in the model's folder may be run.
    """

    model: Path
    data: Path
    output: Path
    image_folder: Path | None = None
    lora_rank: int = 0
    epochs: int = 1
    batch_size: int = 8
    lr: float = 2e-4
    max_length: int = 2048
    length_multiple: int = 64
    eval_share: float = 0.05
    pipeline_size: int | None = None
    schedule: str = "adaptive"
    dtype: str | None = None
    mixed_precision: Literal["bf16", "fp16"] | None = None
    recompute: Literal["all", "selective"] | None = None
    slicing: Slicing = "auto"
    repartition: Literal["off", "auto"] = "off"
    order: MicrobatchOrder = "given"
    trace_dir: Path | None = None
    trace_detail: Literal["actions", "layers", "collectives", "kernels"] = "actions"
    trace_interval: int = 1
    seed: int = 1
    checkpoints: Path | None = None
    save_interval: int | None = None
    wandb: str | None = None
    trust_remote_code: bool = False

    def read(self) -> tuple[Any, SampleFile]:
        """Returns the processor of the model and the encoded samples.

        All processes must call this, because they share the work of encoding the samples.

        Raises:
            ConfigError: If the output folder is not empty, the model or a sample cannot be read, or
                the settings request training the whole model in float16. After a restart, the
                output folder may contain the model that the same job saved before the restart.
        """
        # Check the output folder before training. Otherwise, the model could not be saved after
        # training, and would be lost.
        self._check_output()
        if self.dtype == "float16" and not self.lora_rank:
            raise ConfigError(
                "--dtype float16 cannot be used to train the whole model, because an update would "
                "destroy the parameters; use --dtype float32 --mixed-precision fp16, or train "
                "adapters with --lora-rank"
            )
        processor = load_processor(self.model, trust_remote_code=self.trust_remote_code)
        reader = SampleReader(
            processor=processor,
            max_length=self.max_length,
            length_multiple=self.length_multiple,
            image_folder=self.image_folder,
            config=read_config(self.model, trust_remote_code=self.trust_remote_code),
        )
        samples = _read_together(reader, self.data)
        self.num_trained(len(samples))
        self._check_output(samples)
        return processor, samples

    def is_saved(self, samples: SampleFile | None = None) -> bool:
        """Returns whether this job saved the tuned model before it was restarted.

        Args:
            samples: Samples to compare with the saved model's samples; ``None`` compares only the
                settings.
        """
        if not Environment.read().restart_count:
            return False
        try:
            record = json.loads((self.output / _RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        digest = None if samples is None else samples.digest
        return bool(record == self.record(digest or record.get("samples")))

    def record(self, digest: str) -> dict[str, Any]:
        """Returns the settings that determine the tuned model.

        These settings are saved in the folder of the tuned model.

        Args:
            digest: Hash of the samples.
        """
        values = dataclasses.asdict(self)
        for name in _WITHOUT_EFFECT:
            del values[name]
        texts = {name: str(value) for name, value in values.items() if isinstance(value, Path)}
        return {**values, **texts, "samples": digest}

    def _check_output(self, samples: SampleFile | None = None) -> None:
        folder = self.output
        is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
        if not is_new and not self.is_saved(samples):
            raise ConfigError(f"{folder} exists and is not empty; choose a new folder")

    def num_trained(self, num_samples: int) -> int:
        """Returns the number of training samples. The other samples are used for evaluation.

        This number does not depend on the number of processes, so a run can continue from a
        checkpoint with a different number of processes.

        Args:
            num_samples: Total number of samples.

        Raises:
            ConfigError: If too few samples are left for training.
        """
        num_held_out = max(1, round(self.eval_share * num_samples)) if self.eval_share else 0
        num_trained = num_samples - num_held_out
        if num_trained < self.batch_size:
            raise ConfigError(
                f"{max(0, num_trained)} samples are left to train on, but a step needs "
                f"{self.batch_size}; use more samples or a smaller batch size"
            )
        return num_trained

    def parameter_dtype(self) -> torch.dtype:
        """Returns the dtype in which the model's parameters are loaded.

        If the whole model is trained, float16 parameters are loaded in float32, because an
        optimizer cannot update them in float16.
        """
        if self.dtype is not None:
            chosen = getattr(torch, self.dtype)
        else:
            config = read_config(self.model, trust_remote_code=self.trust_remote_code)
            chosen = getattr(config, "dtype", None)
        if not isinstance(chosen, torch.dtype):
            return torch.float32
        return torch.float32 if chosen == torch.float16 and not self.lora_rank else chosen

    @property
    def adapter(self) -> Any:
        """Returns PEFT's configuration of the adapters, or ``None`` if there are no adapters."""
        if not self.lora_rank:
            return None
        try:
            from peft import LoraConfig
        except ImportError as error:
            raise SetupError(f"adapters need peft ({error}); run pip install peft") from None
        return LoraConfig(
            r=self.lora_rank, lora_alpha=2 * self.lora_rank, target_modules="all-linear"
        )


@naming_lost_peers()
def _read_together(reader: SampleReader, path: Path) -> SampleFile:
    """Reads the sample file ``path`` with ``reader``, and divides the work among the processes.

    All processes must call this.
    """
    if Environment.read().world_size == 1:
        return reader.read(path)
    # Import this after Pipeline, which prepares megatron-core to run without CUDA.
    from megatron.adaptive.modules.mesh import join_job

    # Close this job before the pipeline joins another job, which may have different settings.
    job = join_job(_READ_LIMIT_S)
    try:
        samples = reader.read(path, job)
    except Exception:
        job.close_after_error()
        raise
    job.close()
    return samples


def fine_tune(settings: FineTuning, processor: Any, samples: SampleFile) -> None:
    """Fine-tunes the model, and saves it as a folder that ``transformers`` can load.

    All processes must call this.

    Args:
        settings: Settings of the run.
        processor: Processor of the model, which is saved in the same folder.
        samples: Samples from :meth:`FineTuning.read`.
    """
    is_elastic = Environment.read().job is not None
    dtype = settings.parameter_dtype()
    # Samples have different lengths, and models may pass masks. config/attention.py explains why
    # cuDNN is not suitable for either.
    torch.backends.cuda.enable_cudnn_sdp(False)
    with Pipeline.from_pretrained(
        settings.model,
        _alike(samples, settings.batch_size) if is_elastic else samples.kinds,
        adapter=settings.adapter,
        dtype=dtype,
        trust_remote_code=settings.trust_remote_code,
        micro_batch_size=1 if is_elastic else None,
        pipeline_size=settings.pipeline_size,
        batch_size=settings.batch_size,
        schedule=settings.schedule,
        mixed_precision=settings.mixed_precision,
        recompute=settings.recompute,
        slicing=settings.slicing,
        repartition=settings.repartition,
        order=settings.order,
        trace_dir=None if settings.trace_dir is None else str(settings.trace_dir),
        trace_detail=settings.trace_detail,
        trace_interval=settings.trace_interval,
        seed=settings.seed,
        decisive_entries=samples.decisive_entries,
    ) as pipeline:
        run = _Run(settings, pipeline, samples)
        if dtype == torch.bfloat16 and not settings.lora_rank:
            run.say(
                "warning: the parameters and the optimizer's state are in bfloat16, which loses "
                "small updates; with enough memory, use --dtype float32 --mixed-precision bf16"
            )
        try:
            run.train()
        except DivergedError:
            # All processes raise this error after the same step, so none is waiting for another.
            pipeline.close()
            raise
        _save(settings, pipeline, processor, samples)


def _save(settings: FineTuning, pipeline: Pipeline, processor: Any, samples: SampleFile) -> None:
    """Saves the model and its processor, unless this job saved them before a restart.

    ``settings`` contains the path of the output folder, and ``pipeline`` contains the trained
    model. A digest of ``samples`` is also saved in the folder.

    The folder has a temporary name until all files are complete. If a process fails before then,
    the restarted job saves the model again.
    """
    mesh, output = pipeline._mesh, settings.output
    unnamed = output.parent / f".{output.name}.tuned"

    def begin() -> bool:
        shutil.rmtree(unnamed, ignore_errors=True)
        return settings.is_saved(samples)

    def end() -> None:
        processor.save_pretrained(unnamed)
        text = json.dumps(settings.record(samples.digest), indent=2)
        (unnamed / _RECORD).write_text(text + "\n", encoding="utf-8")
        finish(unnamed, output)

    if not mesh.on_first(begin):
        pipeline.save_pretrained(unnamed)
        mesh.on_first(lambda: guarded(end))


def _alike(samples: SampleFile, count: int) -> Microbatch:
    """Returns a batch that contains the largest sample ``count`` times.

    The launcher of an elastic job uses this batch to choose a layout with enough memory.

    Args:
        samples: All samples of the run.
        count: Number of samples in the batch.

    Raises:
        ConfigError: If the samples have entries without a batch dimension, such as images.
    """
    kinds = samples.kinds
    # Use the largest sample, because the planned layout must have enough memory for every sample.
    sample = samples[samples.largest]
    entries = [*kinds[0].values(), *sample.values()]
    if len(kinds) > 1 or any(entry.shape[:1] != (1,) for entry in entries):
        raise ConfigError(
            "train finetune in an elastic job does not support samples with images; start it "
            "with torchrun --max-restarts N or job launch, and with --checkpoints DIR, so that "
            "later starts continue from the newest checkpoint"
        )
    return {name: entry.expand(count, *entry.shape[1:]) for name, entry in sample.items()}


class _Run:
    """Trains a pipeline on samples, and reports losses.

    Args:
        settings: Settings of the run.
        pipeline: Pipeline of the model.
        samples: Samples for training and evaluation.

    """

    def __init__(self, settings: FineTuning, pipeline: Pipeline, samples: SampleFile) -> None:
        self._settings = settings
        self._pipeline = pipeline
        self._samples = samples
        self._is_first = torch.distributed.get_rank() == 0
        order = list(range(len(samples)))
        random.Random(settings.seed).shuffle(order)
        num_trained = settings.num_trained(len(order))
        self._trained = order[:num_trained]
        self._held_out = order[num_trained:]
        self._steps_per_epoch = num_trained // settings.batch_size
        self._optimizers: list[torch.optim.Optimizer] = []
        self._logger: Any = None

    def train(self) -> None:
        """Trains all epochs, and evaluates after each epoch. All processes must call this.

        Raises:
            DivergedError: If a step is skipped because its gradient is not finite, and the loss
                scale cannot be lowered further.
        """
        settings = self._settings
        pipeline = self._pipeline
        steps = self._steps_per_epoch * settings.epochs
        pipeline.set_optimizer(self._make_optimizer, clip_norm=1.0)
        self._open_logger()
        self.say(
            f"{len(self._trained)} samples for training, {len(self._held_out)} for evaluation, "
            f"{self._samples.num_empty} skipped because they have no tokens to learn"
        )
        for step in pipeline.loop(
            steps,
            folder=settings.checkpoints,
            save_interval=settings.save_interval,
            state={"order of samples": self},
        ):
            epoch, position = divmod(step, self._steps_per_epoch)
            for group in (group for item in self._optimizers for group in item.param_groups):
                group["lr"] = settings.lr * (1 + math.cos(math.pi * step / steps)) / 2
            batch = self._encoded(pipeline.share(self._indices(epoch, position)))
            scale = pipeline.loss_scale
            loss, is_skipped = pipeline.step(batch, num_items=num_learned(batch))
            # Without fp16, the loss scale is always 1. With fp16, a scale of 1 cannot be lowered
            # further.
            if is_skipped and scale <= 1:
                raise _diverged(step + 1, loss, settings)
            self.say(f"step {step + 1} of {steps}: loss {loss:.6f}")
            self._log({"loss": loss, "gradient norm": pipeline.grad_norm})
            if self._held_out and position + 1 == self._steps_per_epoch:
                loss = self._evaluate()
                self.say(f"epoch {epoch + 1} of {settings.epochs}: evaluation loss {loss:.6f}")
                self._log({"evaluation loss": loss})

    def state_dict(self) -> dict[str, int | str]:
        """Returns the values that determine which samples each step trains on."""
        settings = self._settings
        return {
            "seed": settings.seed,
            "epochs": settings.epochs,
            "batch size": settings.batch_size,
            "samples to train on": len(self._trained),
            "samples": self._samples.digest,
        }

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Checks that ``state`` from a checkpoint describes the order of samples of this run.

        With another order, training would skip some samples and train on others twice.

        Raises:
            CheckpointError: If the order of samples differs.
        """
        for name, value in self.state_dict().items():
            saved = state.get(name)
            if name == "samples" and saved not in (None, value):
                raise CheckpointError(
                    f"the checkpoint in {self._settings.checkpoints} was made with different "
                    f"samples than {self._settings.data} contains now; restore the file and its "
                    "images, or choose a new folder for checkpoints"
                )
            # Checkpoints of earlier versions do not contain the digest of the samples.
            if name != "samples" and saved != value:
                raise CheckpointError(
                    f"the checkpoint in {self._settings.checkpoints} was made with {name} {saved}, "
                    f"but this run has {value}; use the settings of the checkpoint, or choose a "
                    "new folder for checkpoints"
                )

    def _evaluate(self) -> float:
        """Returns the mean loss per token of the evaluation samples.

        All processes must call this. Evaluation batches have the size of a training batch, because
        a larger batch may not fit in memory.
        """
        pipeline = self._pipeline
        indices = self._held_out
        size = max(self._settings.batch_size, pipeline.replicas)
        total = total_items = 0.0
        for start in range(0, len(indices), size):
            chosen = indices[start : start + size]
            # Each replica needs a sample. If there are fewer samples than replicas, repeat one with
            # 0 items, so that the repetitions do not change the mean.
            items = [(index, float(self._samples.num_learned[index])) for index in chosen]
            items += [(chosen[0], 0.0)] * max(0, pipeline.replicas - len(chosen))
            part = pipeline.share(items)
            loss = pipeline.eval(
                self._encoded([index for index, _ in part]), num_items=[count for _, count in part]
            )
            count = sum(number for _, number in items)
            total += count * loss
            total_items += count
        return total / total_items

    def _encoded(self, indices: Sequence[int]) -> list[Microbatch]:
        """Returns the encoded samples at ``indices``."""
        return [self._samples[index] for index in indices]

    def _indices(self, epoch: int, position: int) -> list[int]:
        """Returns the indices of the samples for the step at ``position`` in ``epoch``.

        The samples have a different order in each epoch.
        """
        order = list(self._trained)
        random.Random(self._settings.seed + 1 + epoch).shuffle(order)
        size = self._settings.batch_size
        return order[position * size : (position + 1) * size]

    def _make_optimizer(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        self._optimizers.append(torch.optim.AdamW(parameters, lr=self._settings.lr))
        return self._optimizers[-1]

    def _open_logger(self) -> None:
        """Starts a Weights & Biases run on the first process if the setting ``wandb`` is set."""
        if self._settings.wandb is not None and self._is_first:
            try:
                import wandb
            except ImportError as error:
                raise SetupError(
                    f"Weights & Biases needs wandb ({error}); run pip install wandb"
                ) from None
            values = {
                name: str(value) if isinstance(value, Path) else value
                for name, value in dataclasses.asdict(self._settings).items()
            }
            self._logger = wandb.init(project=self._settings.wandb, config=values)

    def _log(self, values: dict[str, float]) -> None:
        if self._logger is not None:
            self._logger.log(values, step=self._pipeline.steps)

    def say(self, line: str) -> None:
        """Prints ``line`` on the first process."""
        if self._is_first:
            print(line, flush=True)


def _diverged(step: int, loss: float, settings: FineTuning) -> DivergedError:
    """Returns the error for a step whose gradient is not finite.

    ``step`` is the number of the step, ``loss`` its loss, and ``settings`` the settings of the run.
    """
    scale = " although the loss scale is 1" if settings.mixed_precision == "fp16" else ""
    return DivergedError(
        f"step {step}: a gradient is infinite or NaN{scale} (the loss is {loss}), so training "
        "stopped and no model was saved; lower --lr, check the model and the data, or use "
        "--dtype float32 without --mixed-precision"
    )
