"""What a run says about itself: Megatron-LM's log lines, curves in TensorBoard, a progress bar.

Owns wording, averages and frequency. Measuring is the training loop's; it hands in one
:class:`IterationReport` for each iteration. Everything is written by one rank, the last of those
that hold the loss; where stages lie in a loop that is the last of all, as in Megatron-LM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, TextIO, cast

from tqdm import tqdm

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.engine.progress import ProgressFile
from megatron.adaptive.gpt.model import flops_per_token
from megatron.adaptive.training.tensorboard import Curves, perplexity

if TYPE_CHECKING:
    pass

__all__ = ["IterationReport", "TrainingLog", "startup_line"]

_MAIN_LOSS = "lm loss"
_TOLD = (  # of a report
    "consumed_samples",
    "learning_rate",
    "grad_norm",
    "memory_bytes",
    "peak_memory_bytes",
)
_DEFAULT_COLUMNS = 100


def startup_line(cfg: TrainerConfig) -> str:
    """Return Megatron-LM's line about the parallel sizes.

    Unequal stages and a context parallel size above 1 follow at the end, so that the beginning is
    always the same.
    """
    parallel = cfg.parallel
    line = (
        f"using world size: {parallel.world_size}, "
        f"data-parallel-size: {parallel.data_parallel_size}, "
        f"tensor-model-parallel size: {parallel.tensor_model_parallel_size}, "
        f"pipeline-model-parallel size: {parallel.pipeline_model_parallel_size}"
    )
    if parallel.unequal_sizes is not None:
        line += f", ranks of each stage: {format_partition(parallel.unequal_sizes)}"
    if parallel.context_parallel_size > 1:
        line += f", context-parallel size: {parallel.context_parallel_size}"
    return line


@dataclass(frozen=True, kw_only=True)
class IterationReport:
    """What one iteration measured.

    Attributes:
        iteration: number of the iteration, the first being 1.
        consumed_samples: samples of the whole training so far, this iteration's included.
        elapsed_s: wall time of the iteration.
        learning_rate: as the optimizer holds it after the iteration.
        global_batch_size: samples of the iteration over all ranks.
        losses: mean of each loss over the batch, by name.
        loss_scale: as the optimizer holds it after the iteration, 1 without one.
        grad_norm: before clipping, ``None`` if unknown.
        skipped: the optimizer left the weights alone because of an overflow.
        is_nan: a loss was infinite or not a number.
        params_norm: norm of all parameters, with ``--log-params-norm``.
        num_zeros: zeros in the gradient, with ``--log-num-zeros-in-grad``.
        bubble_fraction: idle time over step time, mean over the pipeline's ranks, in [0, 1].
        memory_bytes: in use on the device (on a CPU: of the process) after the iteration.
        peak_memory_bytes: largest value of ``memory_bytes`` so far.
    """

    iteration: int
    consumed_samples: int
    elapsed_s: float
    learning_rate: float
    global_batch_size: int
    losses: Mapping[str, float]
    loss_scale: float
    grad_norm: float | None
    skipped: bool = False
    is_nan: bool = False
    params_norm: float | None = None
    num_zeros: int | None = None
    bubble_fraction: float | None = None
    memory_bytes: int = 0
    peak_memory_bytes: int = 0


class TrainingLog:
    """The log of a run: lines on ``stream``, curves in TensorBoard, a bar on a terminal.

    Every rank has one and calls it alike; only the writer does anything. Not thread-safe.

    Args:
        cfg: the run's settings.
        is_writer: whether this rank writes; exactly one does.
        accelerator: whose peak the utilization is relative to.
        total_iterations: of the whole training.
        start_iteration: iterations done before this process began, 0 for a new run.
        stream: where lines go, standard output by default.
        padded_vocab_size: rows of the embedding; by default the tokenizer is loaded to ask it.

    Raises:
        ConfigError: TensorBoard's folder cannot be written.
    """

    def __init__(
        self,
        cfg: TrainerConfig,
        *,
        is_writer: bool,
        accelerator: Accelerator,
        total_iterations: int,
        start_iteration: int,
        stream: TextIO | None = None,
        padded_vocab_size: int | None = None,
    ) -> None:
        self._cfg = cfg
        self._settings = cfg.logging
        self._accelerator = accelerator
        self._padded_vocab_size = padded_vocab_size
        self._is_writer = is_writer
        self._total_iterations = total_iterations
        self._stream = sys.stdout if stream is None else stream
        self._interval = _Interval()
        self._consumed_samples: int | None = None
        self._bar: tqdm[Any] | None = None
        self._curves: Curves | None = None
        self._progress = ProgressFile(None)
        if is_writer:
            self._open(start_iteration)

    def _open(self, start_iteration: int) -> None:
        self._meter = _make_meter(self._cfg, self._accelerator, self._padded_vocab_size)
        if self._settings.tensorboard_dir is not None:
            self._curves = Curves(self._cfg)
        self._open_progress(start_iteration)
        if sys.stderr.isatty():
            self._bar = _make_bar(self._total_iterations, start_iteration)

    def _open_progress(self, start_iteration: int) -> None:
        self._progress.close()
        self._progress = ProgressFile(self._cfg.progress_dir)
        self._progress.begins(start_iteration, self._total_iterations)

    def hand_over(
        self, iteration: int, *, is_writer: bool, tell: Callable[[object], Sequence[object]]
    ) -> None:
        """Let another rank write from here on, with the averages under way; all ranks call it.

        Args:
            iteration: iterations done.
            is_writer: whether this rank writes from now on; one does.
            tell: gathers an object of every rank.
        """
        told = tell((self._interval, self._consumed_samples) if self._is_writer else None)
        if self._is_writer and not is_writer:
            self.close()
        elif is_writer and not self._is_writer:
            (state,) = [one for one in told if one is not None]
            self._interval, self._consumed_samples = cast("tuple[_Interval, int | None]", state)
            self._open(iteration)
        elif is_writer:
            self._open_progress(iteration)  # the traces before the move were put aside
        self._is_writer = is_writer

    @property
    def tensorboard(self) -> Any:
        """The ``SummaryWriter`` of the writer rank, ``None`` elsewhere and without TensorBoard."""
        return None if self._curves is None else self._curves.writer

    def iteration(self, report: IterationReport) -> None:
        """Take in an iteration; each ``--log-interval`` prints a line about those since the last.

        The line has the means of time, losses (of iterations that were not skipped) and bubble,
        and the latest value of everything else.
        """
        if not self._is_writer:
            return
        self._consumed_samples = report.consumed_samples
        self._interval.add(report)
        speed = self._meter.speed(report.global_batch_size, report.elapsed_s)
        if self._bar is not None:
            self._advance(self._bar, report, speed)
        if (
            self._curves is not None
            and report.iteration % self._settings.tensorboard_log_interval == 0
        ):
            self._curves.iteration(report, speed)
        self._tell_progress(report, speed)
        if report.iteration % self._settings.log_interval == 0:
            self.message(self._line(report))
            self._interval = _Interval()

    def validation(
        self,
        iteration: int,
        prefix: str,
        losses: Mapping[str, float],
        consumed_samples: int | None = None,
    ) -> None:
        """Print the losses of a validation or test.

        Args:
            iteration: after which it was made.
            prefix: what the line is about; with the word ``test`` in it the curves are named so.
            losses: mean of each loss, by name.
            consumed_samples: of the whole training; by default what :meth:`iteration` said last.
        """
        if not self._is_writer:
            return
        line = f" validation loss at {prefix} | "
        for name, loss in losses.items():
            line += f"{name} value: {loss:.6E} | {name} PPL: {perplexity(loss):.6E} | "
        dashes = "-" * (len(line) + 1)
        self.message(f"{dashes}\n{line}\n{dashes}")
        if self._curves is not None:
            if consumed_samples is None:
                consumed_samples = self._consumed_samples
            split = "test" if "test" in prefix.split() else "validation"
            self._curves.validation(split, losses, iteration, consumed_samples)

    def ends(self, reason: str) -> None:
        """Print why the training ended, and tell those who look on."""
        self.message(f"training ends: {reason}")
        self._progress.ended(reason)

    def tell(self, **values: float | str | list[float]) -> None:
        """Tell those who look on, not the user."""
        self._progress.report(values)

    def message(self, text: str) -> None:
        """Print a text at once, above the progress bar."""
        if not self._is_writer:
            return
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            tqdm.write(text, file=self._stream)
            self._stream.flush()

    def close(self) -> None:
        """Take the bar away and write what TensorBoard still waits for; may be called again."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._curves is not None:
            self._curves.close()
            self._curves = None
        self._progress.close()

    def _tell_progress(self, report: IterationReport, speed: Speed) -> None:
        self._progress.iteration(
            report.iteration,
            {
                "step_ms": round(report.elapsed_s * 1e3, 3),
                "tokens_per_s": round(speed.tokens_per_s * self._meter.world_size, 1),
                "loss": report.losses.get(_MAIN_LOSS),
                **{name: getattr(report, name) for name in _TOLD},
            },
            is_logged=report.iteration % self._settings.log_interval == 0,
        )

    def _advance(self, bar: tqdm[Any], report: IterationReport, speed: Speed) -> None:
        shown = {"tokens/s": f"{speed.tokens_per_s * self._meter.world_size:.0f}"}
        if _MAIN_LOSS in report.losses:
            shown = {"loss": f"{report.losses[_MAIN_LOSS]:.3f}", **shown}
        bar.set_postfix(shown, refresh=False)
        bar.update(report.iteration - bar.n)

    def _line(self, report: IterationReport) -> str:
        """Return the line about the interval that ends with ``report``.

        Source: ``training_log`` of Megatron-LM, for names, order and widths up to the number of
        NaN iterations; what follows is ours.
        """
        interval = self._interval
        speed = self._meter.speed(interval.samples, interval.elapsed_s)
        parts = [
            f" [{datetime.now().strftime('%Y-%m-%d %H:%M:%S')}]"
            f" iteration {report.iteration:8d}/{self._total_iterations:8d}",
            f"consumed samples: {report.consumed_samples:12d}",
            f"elapsed time per iteration (ms): {interval.mean_elapsed_s * 1000.0:.1f}",
        ]
        if self._settings.log_throughput and speed.flops_per_s is not None:
            parts.append(f"throughput per GPU (TFLOP/s/GPU): {speed.flops_per_s / 1e12:.1f}")
        parts += [
            f"learning rate: {report.learning_rate:.6E}",
            f"global batch size: {report.global_batch_size:5d}",
        ]
        parts += [f"{name}: {loss:.6E}" for name, loss in interval.mean_losses().items()]
        parts.append(f"loss scale: {report.loss_scale:.1f}")
        if report.grad_norm is not None:
            parts.append(f"grad norm: {report.grad_norm:.3f}")
        if report.num_zeros is not None:
            parts.append(f"num zeros: {report.num_zeros}")
        if report.params_norm is not None:
            parts.append(f"params norm: {report.params_norm:.3f}")
        parts += [
            f"number of skipped iterations: {interval.skipped:3d}",
            f"number of nan iterations: {interval.nans:3d}",
            f"tokens/s/rank: {speed.tokens_per_s:.1f}",
        ]
        if speed.utilization is not None:
            parts.append(f"MFU: {speed.utilization:.1%}")
        bubble = interval.mean_bubble_fraction()
        if bubble is not None:
            parts.append(f"bubble: {bubble:.1%}")
        return " | ".join(parts) + " |"


def _make_bar(total_iterations: int, start_iteration: int) -> tqdm[Any]:
    """Return a bar on standard error."""
    try:
        has_width = os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except OSError:
        has_width = False
    return tqdm(
        total=total_iterations,
        initial=start_iteration,
        file=sys.stderr,
        leave=False,
        # A terminal that does not know its width says 0, and tqdm would fit the bar into that.
        dynamic_ncols=has_width,
        ncols=None if has_width else _DEFAULT_COLUMNS,
        # Iterations differ too much in length for tqdm to learn how many to wait for.
        miniters=1,
        desc="training",
        unit="it",
    )


@dataclass
class _Interval:
    """Sums over the iterations since the last line."""

    iterations: int = 0
    elapsed_s: float = 0.0
    samples: int = 0
    skipped: int = 0
    nans: int = 0
    losses: dict[str, list[float]] = field(default_factory=dict)
    bubble_fractions: list[float] = field(default_factory=list)

    def add(self, report: IterationReport) -> None:
        self.iterations += 1
        self.elapsed_s += report.elapsed_s
        self.samples += report.global_batch_size
        self.skipped += report.skipped
        self.nans += report.is_nan
        if not report.skipped:
            for name, loss in report.losses.items():
                self.losses.setdefault(name, []).append(loss)
        if report.bubble_fraction is not None:
            self.bubble_fractions.append(report.bubble_fraction)

    @property
    def mean_elapsed_s(self) -> float:
        return self.elapsed_s / self.iterations

    def mean_losses(self) -> dict[str, float]:
        """Return the mean of each loss; none where every iteration was skipped."""
        return {name: sum(losses) / len(losses) for name, losses in self.losses.items()}

    def mean_bubble_fraction(self) -> float | None:
        known = self.bubble_fractions
        return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class Speed:
    """Speed of one rank.

    Attributes:
        tokens_per_s: tokens of the whole batch divided by all ranks.
        flops_per_s: model FLOP/s, ``None`` if nobody asks.
        utilization: ``flops_per_s`` over the device's 16-bit peak, ``None`` without a peak.
    """

    tokens_per_s: float
    flops_per_s: float | None
    utilization: float | None


@dataclass(frozen=True, kw_only=True)
class _Meter:
    """Turns samples and time into speed."""

    tokens_per_sample: int
    world_size: int
    flops_per_token: float | None
    peak_flops: float | None

    def speed(self, samples: int, elapsed_s: float) -> Speed:
        tokens = samples * self.tokens_per_sample / self.world_size
        # A clock too coarse for a tiny model must not end the run.
        tokens_per_s = tokens / elapsed_s if elapsed_s > 0 else 0.0
        if self.flops_per_token is None:
            return Speed(tokens_per_s, None, None)
        flops_per_s = tokens_per_s * self.flops_per_token
        share = flops_per_s / self.peak_flops if self.peak_flops else None
        return Speed(tokens_per_s, flops_per_s, share)


def _make_meter(
    cfg: TrainerConfig, accelerator: Accelerator, padded_vocab_size: int | None
) -> _Meter:
    peak_flops = accelerator.peak_flops
    is_asked = cfg.logging.log_throughput or peak_flops is not None
    return _Meter(
        tokens_per_sample=cfg.model.seq_length,
        world_size=cfg.world_size,
        flops_per_token=flops_per_token(cfg, padded_vocab_size=padded_vocab_size)
        if is_asked
        else None,
        peak_flops=peak_flops,
    )
