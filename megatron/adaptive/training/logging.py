"""Reports the progress of a run in log lines, loggers, ``progress.jsonl`` and a progress bar.

The training loop measures each iteration and passes an :class:`IterationReport`. This module
decides when and how to report, and computes averages. It converts the report to a list of values,
and writes each value to the log line, to a curve and to ``progress.jsonl``. Loggers such as
TensorBoard, Weights & Biases and MLflow (``logger.py``, ``loggers``) receive the curves, an image
of a pipeline step and the findings of the diagnosis.

A single rank writes everything: the last of the ranks that compute the loss. If stages are placed
round-robin, this is the last rank of the job, as in Megatron-LM.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from tqdm import tqdm

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.config.input_files import printable, say
from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.data.loader import Load
from megatron.adaptive.engine.progress import ProgressFile, Value
from megatron.adaptive.errors import AdaptiveError
from megatron.adaptive.gpt.build_model import flops_per_token
from megatron.adaptive.gpt.train_step import StepResult
from megatron.adaptive.planner.cluster import known_gpu
from megatron.adaptive.trace.trace_format import SLICES
from megatron.adaptive.training.logger import Logger, find_loggers, make_logger

_MAIN_LOSS = "lm loss"
_SIZES = (  # Names of the parallel sizes to write to progress.jsonl.
    "world_size",
    "data_parallel_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
)
_MAX_EXPONENT = 20.0  # Perplexities above exp(20) are shown as exp(20), as in Megatron-LM.


def startup_line(cfg: TrainerConfig) -> str:
    """Returns the line about the parallel sizes in ``cfg``, in the format of Megatron-LM.

    Two optional parts come last, so that the rest of the line always has the same format: the ranks
    of each stage if stages are unequal, and the context-parallel size if it is above 1.
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
class TrainedStep(StepResult):
    """Result of a completed training step, which is passed to the hooks.

    Attributes:
        iteration: Index of the iteration in the whole training run, from 1.
        global_batch_size: Number of samples in the step, over all ranks.
        num_microbatches: Number of microbatches that this rank processed in the step.
        load: Number of tokens and fraction of padding over all microbatches, or ``None`` if samples
            have equal lengths.
        begin_s: Start time of the step, as a value of :func:`time.perf_counter` in seconds.
    """

    iteration: int
    global_batch_size: int
    num_microbatches: int = 0
    load: Load | None = None
    begin_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class IterationReport(TrainedStep):
    """Result and measurements of a completed training step, for the log.

    Attributes:
        consumed_samples: Number of training samples used so far, including those of this iteration.
        elapsed_s: Wall time of the iteration in seconds.
        learning_rate: Learning rate after the iteration.
        loss_scale: Loss scaling factor after the iteration, or 1 without loss scaling.
        params_norm: L2 norm of all parameters, or ``None`` without ``--log-params-norm``.
        memory_bytes: Memory in use after the iteration, in bytes: on the GPU, or by the process if
            it runs on a CPU.
        peak_memory_bytes: Maximum of ``memory_bytes`` so far.
    """

    consumed_samples: int
    elapsed_s: float
    learning_rate: float
    loss_scale: float
    params_norm: float | None
    memory_bytes: int
    peak_memory_bytes: int

    @property
    def is_nan(self) -> bool:
        """Returns whether at least one loss is infinite or NaN."""
        return not all(math.isfinite(loss) for loss in self.losses.values())


class TrainingLog:
    """Writes a run's log lines, its metrics in loggers, and a progress bar on a terminal.

    All ranks make the same calls, but only one rank writes. This class is not thread-safe.

    Args:
        cfg: Settings of the run.
        is_writer: Whether this rank writes. It must be true on exactly one rank.
        accelerator: Device of this rank. Its peak FLOP/s is the reference of the utilization (MFU).
        total_iterations: Number of iterations of the whole training run.
        start_iteration: Number of iterations completed before this process began, or 0 for a new
            run.
        stream: Stream to which lines are printed, or ``None`` for standard output.
        padded_vocab_size: Number of rows of the embedding, to compute FLOPs, or ``None`` to derive
            it from the tokenizer.

    Raises:
        ConfigError: If TensorBoard's folder is not writable.
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
        self._bubble_note = f" ({SLICES})" if accelerator.is_shared else ""
        part = known_gpu(accelerator.name)
        self._peak_flops = None if part is None else part.flops["fp16"]
        self._padded_vocab_size = padded_vocab_size
        self._is_writer = is_writer
        self._total_iterations = total_iterations
        self._begun_at = start_iteration
        self._stream = sys.stdout if stream is None else stream
        self._flops_per_token: float | None = None
        self._reports: list[IterationReport] = []  # Reports since the last log line.
        self._iteration = start_iteration
        self._gains: tuple[str, ...] = ()
        self._bar: tqdm[Any] | None = None
        self._curves: _Curves | None = None
        # Look up the loggers on every rank, so that a wrong name raises an error on all ranks.
        self._loggers = find_loggers(cfg)
        self._progress = ProgressFile(None)
        if is_writer:
            self._open(start_iteration)

    def _open(self, start_iteration: int) -> None:
        if self._settings.log_throughput or self._peak_flops is not None:
            self._flops_per_token = flops_per_token(
                self._cfg, padded_vocab_size=self._padded_vocab_size
            )
        if self._loggers:
            self._curves = _Curves(self._cfg, self._loggers)
        self._open_progress(start_iteration)
        if sys.stderr.isatty():
            self._bar = _make_bar(self._total_iterations, start_iteration)

    def _open_progress(self, start_iteration: int) -> None:
        self._progress.close()
        self._progress = ProgressFile(self._cfg.progress_dir)
        parallel = self._cfg.parallel
        sizes = {name: getattr(parallel, name) for name in _SIZES}
        if start_iteration != self._begun_at:
            sizes["moved"] = True
        self._progress.begins(start_iteration, self._total_iterations, **sizes)

    def hand_over(
        self, iteration: int, *, is_writer: bool, gather: Callable[[object], Sequence[Any]]
    ) -> None:
        """Makes a different rank write the log, and sends it the reports since the last log line.

        All ranks must call this.

        Args:
            iteration: Number of completed iterations.
            is_writer: Whether this rank writes from now on. It must be true on exactly one rank.
            gather: Function that gathers an object from every rank.
        """
        was_writer, self._is_writer = self._is_writer, is_writer
        gathered = gather(self._reports if was_writer else None)
        if was_writer and is_writer:
            # Open a new file, because the previous one was moved together with the traces.
            self._open_progress(iteration)
        elif is_writer:
            (self._reports,) = (reports for reports in gathered if reports is not None)
            self._open(iteration)
        elif was_writer:
            self.close()

    @property
    def tensorboard(self) -> Any:
        """Returns an object with TensorBoard's ``add_scalar``, or ``None`` without loggers."""
        return self._curves

    def iteration(self, report: IterationReport) -> None:
        """Logs the iteration in ``report``. Prints a line every ``--log-interval`` iterations.

        The time, the losses and the pipeline bubble in the line are means over the iterations since
        the last line. All other values are the latest ones. The means of the losses exclude skipped
        iterations.
        """
        if not self._is_writer:
            return
        self._iteration = report.iteration
        self._reports.append(report)
        now = self._throughput([report])
        if self._bar is not None:
            self._advance(self._bar, report, now)
        settings = self._settings
        is_logged = report.iteration % self._settings.log_interval == 0
        figures = self._figures(report, now)
        if self._curves is not None and report.iteration % settings.tensorboard_log_interval == 0:
            for figure in figures:
                self._curves.add(figure, report.iteration)
        entry = {figure.entry: figure.value for figure in figures if figure.entry}
        self._progress.iteration(report.iteration, entry, is_logged=is_logged)
        if is_logged:
            date = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
            head = f" [{date}] iteration {report.iteration:8d}/{self._total_iterations:8d}"
            self.message(" | ".join([head, *(f.text for f in figures if f.text)]) + " |")
            self._reports = []

    def validation(self, iteration: int, prefix: str, losses: Mapping[str, float]) -> None:
        """Prints validation or test losses.

        Args:
            iteration: Iteration after which the losses were computed.
            prefix: Beginning of the line. If it contains the word ``test``, the losses are added to
                the curves for test, otherwise to the curves for validation.
            losses: Mean of each loss, keyed by name.
        """
        if not self._is_writer:
            return
        line = f" validation loss at {prefix} | "
        for name, loss in losses.items():
            line += f"{name} value: {loss:.6E} | {name} PPL: {_perplexity(loss):.6E} | "
        dashes = "-" * (len(line) + 1)
        self.message(f"{dashes}\n{line}\n{dashes}")
        if self._curves is not None:
            split = "test" if "test" in prefix.split() else "validation"
            points = {f"{name} {split}": loss for name, loss in losses.items()}
            if self._settings.log_validation_ppl_to_tensorboard:
                ppl = {f"{name} {split} ppl": _perplexity(loss) for name, loss in losses.items()}
                points |= ppl
            for tag, value in points.items():
                self._curves.add_scalar(tag, value, iteration)

    def ends(self, reason: str) -> None:
        """Prints the ``reason`` why training ends, and writes it to ``progress.jsonl``."""
        self.message(f"training ends: {reason}")
        folder = self._cfg.schedule.trace_dir
        if self._curves is not None and folder is not None:
            self._curves.draw(Path(folder), self._iteration)
        self._progress.report({"ended": reason})

    def report(self, **values: Value) -> None:
        """Writes values to ``progress.jsonl``.

        If the values include findings of the diagnosis, the loggers receive the gain that fixing
        each finding would bring.
        """
        self._progress.report(values)
        findings = values.get("findings")
        if self._curves is None or not isinstance(findings, list):
            return
        # Findings that are no longer reported are assumed to be fixed, so set their gain to 0.
        gains = dict.fromkeys(self._gains, 0.0)
        entries = [finding for finding in findings if isinstance(finding, dict)]
        gains |= {f"gain/{entry['name']}": entry["gain"] for entry in entries}
        for tag, gain in gains.items():
            self._curves.add_scalar(tag, gain, self._iteration)
        self._gains = tuple(gains)
        self._curves.note("findings", findings)

    def message(self, text: str) -> None:
        """Prints ``text`` immediately, above the progress bar if there is one."""
        if not self._is_writer:
            return
        if self._bar is None:
            print(printable(text, lines=True), file=self._stream, flush=True)
        else:
            tqdm.write(printable(text, lines=True), file=self._stream)
            self._stream.flush()

    def close(self) -> None:
        """Removes the progress bar, and closes the loggers. Safe to call more than once."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._curves is not None:
            self._curves.close()
            self._curves = None
        self._progress.close()

    def _advance(self, bar: tqdm[Any], report: IterationReport, now: _Throughput) -> None:
        shown = {"tokens/s": f"{now.tokens_per_s * self._cfg.world_size:.0f}"}
        if _MAIN_LOSS in report.losses:
            shown = {"loss": f"{report.losses[_MAIN_LOSS]:.3f}", **shown}
        bar.set_postfix(shown, refresh=False)
        bar.update(report.iteration - bar.n)

    def _throughput(self, reports: Sequence[IterationReport]) -> _Throughput:
        """Returns the mean throughput per rank over the iterations in ``reports``."""
        length = self._cfg.model.seq_length
        each = [
            report.load.tokens if report.load else report.global_batch_size * length
            for report in reports
        ]
        elapsed_s = sum(report.elapsed_s for report in reports)
        tokens = sum(each) / self._cfg.world_size
        # Avoid a division by 0, because an iteration of a tiny model may take no measurable time.
        tokens_per_s = tokens / elapsed_s if elapsed_s > 0 else 0.0
        if self._flops_per_token is None:
            return _Throughput(tokens_per_s)
        flops_per_s = tokens_per_s * self._flops_per_token
        peak_flops = self._peak_flops
        return _Throughput(
            tokens_per_s,
            flops_per_s / 1e12 if self._settings.log_throughput else None,
            flops_per_s / peak_flops if peak_flops else None,
        )

    def _figures(self, report: IterationReport, now: _Throughput) -> list[_Figure]:
        """Lists all values to report for the iteration ``report``, in the order of the log line.

        ``now`` is the throughput of the iteration.

        The first values, up to and including the number of NaN iterations, have the same names,
        order, widths and TensorBoard tags as in Megatron-LM's ``training_log``. Megatron-LM does
        not report the other values.
        """
        reports = self._reports
        mean = self._throughput(self._reports)
        mean_ms = statistics.fmean(entry.elapsed_s for entry in reports) * 1000.0
        fractions = [entry.bubble_fraction for entry in reports]
        bubbles = [fraction for fraction in fractions if fraction is not None]
        bubble = statistics.fmean(bubbles) if bubbles else None
        slices = self._bubble_note
        kept = [entry.losses for entry in reports if entry.updated]
        means = {}
        for name in dict.fromkeys(name for each in kept for name in each):
            values = [each[name] for each in kept if name in each]
            means[name] = sum(values) / len(values)
        nans = sum(entry.is_nan for entry in reports)
        skipped = sum(not entry.updated for entry in reports)
        tokens_per_s = round(now.tokens_per_s * self._cfg.world_size, 1)
        return [
            _Figure("consumed samples: {:12d}", report.consumed_samples, entry="consumed_samples"),
            _Figure("elapsed time per iteration (ms): {:.1f}", mean_ms),
            _Figure(curve="iteration-time", value=report.elapsed_s),
            _Figure(entry="step_ms", value=round(report.elapsed_s * 1e3, 3)),
            _Figure("throughput per GPU (TFLOP/s/GPU): {:.1f}", mean.teraflops),
            _Figure(curve="throughput", value=now.teraflops),
            _Figure(
                "learning rate: {:.6E}", report.learning_rate, "learning-rate", "learning_rate"
            ),
            _Figure(
                "global batch size: {:5d}",
                report.global_batch_size,
                "batch-size",
                "global_batch_size",
            ),
            *_load_figures(report.load),
            *(_Figure(curve=n, value=v) for n, v in (report.losses | report.curves).items()),
            *(_Figure(f"{name}: {{:.6E}}", loss) for name, loss in means.items()),
            _Figure(entry="loss", value=report.losses.get(_MAIN_LOSS)),
            _Figure("loss scale: {:.1f}", report.loss_scale, "loss-scale"),
            _Figure("grad norm: {:.3f}", report.grad_norm, "grad-norm", "grad_norm"),
            _Figure("num zeros: {}", report.num_zeros, "num-zeros"),
            _Figure("params norm: {:.3f}", report.params_norm, "params-norm"),
            _Figure("number of skipped iterations: {:3d}", skipped),
            _Figure("number of nan iterations: {:3d}", nans),
            _Figure("tokens/s/rank: {:.1f}", mean.tokens_per_s),
            _Figure(curve="tokens-per-s-per-rank", value=now.tokens_per_s),
            _Figure(entry="tokens_per_s", value=tokens_per_s),
            _Figure("MFU: {:.1%}", mean.utilization),
            _Figure(curve="model-flops-utilization", value=now.utilization),
            _Figure(f"bubble: {{:.1%}}{slices}", bubble),
            _Figure(curve=f"bubble-fraction{slices}", value=report.bubble_fraction),
            _Figure(curve="world-size", value=self._cfg.world_size),
            _Figure("", report.memory_bytes, "mem-allocated-bytes", "memory_bytes"),
            _Figure(curve="mem-max-allocated-bytes", value=report.peak_memory_bytes),
            _Figure("", report.peak_memory_bytes, "peak-memory-bytes", "peak_memory_bytes"),
        ]


class _Throughput(NamedTuple):
    """Throughput of training, per rank.

    Attributes:
        tokens_per_s: Number of tokens per second in the whole batch, divided by the number of
            ranks.
        teraflops: Model TFLOP/s, or ``None`` if they are not reported.
        utilization: Model FLOP/s divided by the device's 16-bit peak FLOP/s (MFU), or ``None`` if
            the peak is unknown.
    """

    tokens_per_s: float
    teraflops: float | None = None
    utilization: float | None = None


class _Figure(NamedTuple):
    """A reported value of an iteration, with the destinations to which it is written.

    Attributes:
        form: Format string for the log line, or an empty string if the line does not contain the
            value.
        value: Value to report, or ``None`` if it is unknown.
        curve: Tag of the curve in the loggers, or an empty string for no curve. Flags may turn the
            curve off.
        entry: Name of the entry in ``progress.jsonl``, or an empty string for no entry.
    """

    form: str = ""
    value: float | None = None
    curve: str = ""
    entry: str = ""

    @property
    def text(self) -> str:
        """Returns the value as text for the log line, or an empty string if it is unknown."""
        return "" if self.value is None else self.form.format(self.value)


def _perplexity(loss: float) -> float:
    # Pass the loss first, because min() returns a NaN only if it is the first argument.
    return math.exp(min(loss, _MAX_EXPONENT))


class _Curves:
    """Passes the reported values to all loggers, except values that flags exclude.

    Flags such as ``--log-timers-to-tensorboard`` and ``--log-memory-to-tensorboard`` turn on values
    that Megatron-LM also logs, under the same names. Speed, bubble and peak memory are always
    included. If a logger fails, a warning is printed, and the logger receives no more values, but
    training continues.
    """

    def __init__(self, cfg: TrainerConfig, loggers: Sequence[type[Logger]]) -> None:
        settings = cfg.logging
        shown = {
            "learning-rate": settings.log_learning_rate_to_tensorboard,
            "batch-size": settings.log_batch_size_to_tensorboard,
            "loss-scale": settings.log_loss_scale_to_tensorboard,
            "world-size": settings.log_world_size_to_tensorboard,
            "iteration-time": settings.log_timers_to_tensorboard,
            "mem-allocated-bytes": settings.log_memory_to_tensorboard,
            "mem-max-allocated-bytes": settings.log_memory_to_tensorboard,
        }
        self._left_out = {tag for tag, is_shown in shown.items() if not is_shown}
        self._loggers = [make_logger(logger, cfg) for logger in loggers]

    def add(self, figure: _Figure, iteration: int) -> None:
        """Adds the value of ``figure`` at ``iteration`` to its curve, unless flags exclude it."""
        if figure.curve and figure.value is not None and figure.curve not in self._left_out:
            self.add_scalar(figure.curve, figure.value, iteration)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Adds the point (``step``, ``value``) to the curve ``tag``.

        The arguments are the same as for PyTorch's ``SummaryWriter``, because megatron-core's
        timers call this method.
        """
        self._each(lambda logger: logger.scalar(tag, float(value), step))

    def note(self, name: str, content: Any) -> None:
        """Passes ``content``, a JSON-serializable record such as a diagnosis, to every logger.

        ``name`` is the name of the record.
        """
        self._each(lambda logger: logger.note(name, content))

    def draw(self, traces: Path, iteration: int) -> None:
        """Draws the last traced step, and passes the image to the loggers for ``iteration``.

        Args:
            traces: Folder of the traces.
            iteration: Index of the iteration under which the loggers store the image.
        """
        if all(type(logger).picture is Logger.picture for logger in self._loggers):
            return  # No logger stores images.
        from megatron.adaptive.trace.read import read_run
        from megatron.adaptive.trace.step_view import pipeline_step
        from megatron.adaptive.trace.views.picture import write_picture

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "pipeline.png")
            try:
                write_picture(pipeline_step(read_run(traces)), path)
            except AdaptiveError as error:
                say(f"warning: cannot draw the image for the loggers: {error}")
                return
            self._each(lambda logger: logger.picture(path, iteration))

    def close(self) -> None:
        """Closes all loggers."""
        self._each(lambda logger: logger.close())

    def _each(self, act: Callable[[Logger], object]) -> None:
        for logger in list(self._loggers):
            try:
                act(logger)
            except Exception as error:  # The packages of the loggers may raise errors of any type.
                self._loggers.remove(logger)
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                name = type(logger).__name__
                say(f"warning: logger {name} failed and receives no more values: {reason}")


def _load_figures(load: Load | None) -> list[_Figure]:
    """Returns the reported statistics of a step's microbatches; none if ``load`` is ``None``."""
    if load is None:
        return []
    return [
        _Figure("tokens: {:d}", load.tokens, "tokens", "tokens"),
        _Figure("padding: {:.3f}", load.padding, "padding", "padding"),
        _Figure("microbatches: {:d}", load.num_microbatches, "microbatches", "microbatches"),
        _Figure(value=load.longest, curve="longest-document", entry="longest_document"),
        _Figure(value=load.mean_length, curve="mean-document", entry="mean_document"),
        _Figure(value=load.least_tokens, curve="least-microbatch", entry="least_microbatch"),
        _Figure(value=load.most_tokens, curve="most-microbatch", entry="most_microbatch"),
    ]


def _make_bar(total_iterations: int, start_iteration: int) -> tqdm[Any]:
    """Returns a progress bar on standard error for the remaining iterations."""
    return tqdm(
        total=total_iterations,
        initial=start_iteration,
        file=sys.stderr,
        leave=False,
        dynamic_ncols=True,
        # Draw the bar after every iteration, because tqdm's default interval assumes that all
        # iterations take the same time.
        miniters=1,
        desc="training",
        unit="it",
    )
