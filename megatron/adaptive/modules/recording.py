"""Records the forward pass of a model with cut points in training and evaluation mode.

::

    model with CutPoint()s ──recorder or torch.export──> Tape, in training and in evaluation

Python code between torch calls is not recorded, so a replay takes the same branches for every
microbatch as for the recorded one. This is correct for branches that depend on shapes or on the
training mode, but not for branches that depend on tensor values. Therefore, if a forward pass reads
a tensor value that may differ between microbatches, recording raises an error that names the line.

If any parameter or buffer is on the ``meta`` device, the forward pass runs on tensors without data
(see :mod:`~megatron.adaptive.modules.fake_recording`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensor

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.autocast_dtypes import autocast_for_recording
from megatron.adaptive.modules.blocks import repeated_blocks
from megatron.adaptive.modules.cut_points import CutPoint, are_added, cut_points_of
from megatron.adaptive.modules.cutting import late_calls
from megatron.adaptive.modules.fake_recording import FakeRecorder, Fakes, is_on_meta
from megatron.adaptive.modules.recompute import Recompute, check_recompute
from megatron.adaptive.modules.recorder import (
    CallRecorder,
    ReadsValueError,
    custom_functions,
    mapped_functions,
    undisturbed,
)
from megatron.adaptive.modules.tape import Tape

Slicing = Literal["auto", "record", "export"]
Mode = Literal["training", "evaluation"]
MODES: tuple[Mode, ...] = get_args(Mode)
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Autocast dtypes, keyed by the value of ``mixed_precision``."""

MakeRecorder = Callable[[torch.nn.Module, Mapping[str, torch.Tensor], bool], CallRecorder]
Loss = Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class Forward:
    """Computes the loss of a microbatch.

    Attributes:
        model: Model to train. If it contains no :class:`CutPoint`, cut points are added between its
            repeated blocks. The model receives the entries of the batch as keyword arguments. If
            ``loss`` is set, it receives only the entries that its ``forward`` accepts.
        loss: Function ``(output, batch) -> scalar``; ``None`` if the model returns the loss, a
            mapping with an entry ``loss``, or a sequence that starts with the loss.
        arguments: Additional keyword arguments for the model's ``forward``, the same for every
            microbatch.
        mixed_precision: ``bf16`` or ``fp16`` for autocast; parameters keep their dtypes. fp16 uses
            a dynamic loss scale. ``None`` disables autocast.
        decisive_entries: Names of batch entries whose values the model's Python code may read.
            Microbatches with different values are recorded separately.

    Raises:
        ConfigError: If ``mixed_precision`` is neither ``bf16`` nor ``fp16``.
    """

    model: torch.nn.Module
    _: KW_ONLY
    loss: Loss | None = None
    arguments: Mapping[str, Any] | None = None
    mixed_precision: Literal["bf16", "fp16"] | None = None
    decisive_entries: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.decisive_entries, str):
            raise ConfigError(
                "decisive_entries must be a sequence of names of batch entries, got "
                f"{self.decisive_entries!r}"
            )
        if self.mixed_precision not in (None, *PRECISIONS):
            raise ConfigError(
                f"mixed_precision must be {' or '.join(PRECISIONS)}, or None, got "
                f"{self.mixed_precision!r}"
            )

    @property
    def autocast(self) -> torch.dtype | None:
        """Returns the autocast dtype, or ``None`` if mixed precision is disabled."""
        return None if self.mixed_precision is None else PRECISIONS[self.mixed_precision]

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> Any:
        """Returns the loss of the microbatch ``batch``."""
        entries = {name: tensor for name, tensor in batch.items() if self._takes(name)}
        output = self.model(**entries, **(self.arguments or {}))
        return self.loss(output, batch) if self.loss is not None else _loss_in(output)

    def _takes(self, name: str) -> bool:
        """Returns whether to pass the batch entry ``name`` to the model."""
        if self.loss is None:
            return True
        parameters = inspect.signature(self.model.forward).parameters
        return name in parameters or any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
        )

    @property
    def device(self) -> torch.device:
        """Returns the device of the first parameter that has data, or the CPU if there is none."""
        real = (parameter for parameter in self.model.parameters() if not parameter.is_meta)
        first = next(real, None)
        return torch.device("cpu") if first is None else first.device

    def under_autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context manager that turns on autocast if mixed precision is enabled."""
        return autocast_for_recording(self.device, self.autocast)


@dataclass(frozen=True, eq=False, repr=False)
class SampledModel(Forward):
    """Contains a model and the sample batch with which its forward pass is recorded.

    Attributes:
        sample_batch: Batch with the same entries as later batches: a dictionary of tensors whose
            first dimension indexes the samples, or a list of microbatches. For a dictionary, the
            forward pass is recorded with the first microbatch and checked with the second. In a
            list, each microbatch is a dictionary of tensors of any shape; together, they must use
            all parameters.
        shared_weights: Groups of parameter names. All names in a group must refer to the same
            parameter. Parameters used on both sides of a cut are detected without this setting.
        slicing: Method of recording the forward pass: ``record`` records the model's torch calls,
            ``export`` uses ``torch.export``, ``auto`` uses ``torch.export`` only if necessary. See
            ``docs/reference/cutpoint.md``.
        recompute: Calls that the backward pass recomputes, instead of keeping their results in
            memory: ``all`` calls, only attention (``selective``), or the calls of segments with the
            given indices. ``None`` disables recomputation.
    """

    sample_batch: Mapping[str, torch.Tensor] | Sequence[Mapping[str, torch.Tensor]]
    _: KW_ONLY
    shared_weights: Sequence[Sequence[str]] = ()
    slicing: Slicing = "auto"
    recompute: Recompute = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_recompute(self.recompute)

    @property
    def sample(self) -> Mapping[str, torch.Tensor]:
        """Returns the sample batch if it is a dictionary."""
        assert isinstance(self.sample_batch, Mapping)
        return self.sample_batch


Settings = TypeVar("Settings", bound=SampledModel)


def with_cut_points(settings: Settings) -> Settings:
    """Adds cut points between repeated blocks if the model has no cut points.

    Returns the settings. If the cut points were added automatically and the model's ``forward`` has
    an argument ``use_cache``, the returned settings also pass ``use_cache=False``, because training
    does not use a key-value cache.
    """
    model = settings.model
    if not cut_points_of(model) and repeated_blocks(model):
        CutPoint.between_blocks(model)
    has_cache = "use_cache" in inspect.signature(model.forward).parameters
    if not has_cache or not are_added(model):
        return settings
    return dataclasses.replace(
        settings, arguments={"use_cache": False, **(settings.arguments or {})}
    )


@dataclass(frozen=True, kw_only=True)
class Forwards:
    """Contains a model's recorded forward passes in training and evaluation mode.

    Attributes:
        tapes: Recorded forward pass for each mode. All tapes have the same cut points.
        way: Method by which the forward passes were recorded: ``record``, ``trace`` or ``export``.
    """

    tapes: Mapping[Mode, Tape]
    way: str

    @property
    def training(self) -> Tape:
        """Returns the forward pass recorded in training mode."""
        return self.tapes["training"]

    @property
    def evaluation(self) -> Tape:
        """Returns the forward pass recorded in evaluation mode."""
        return self.tapes["evaluation"]

    # Disable inference mode. The recorder detects changes by version counters, which tensors do not
    # have in inference mode.
    @classmethod
    @torch.inference_mode(mode=False)
    def of(
        cls,
        forward: Forward,
        sample: Mapping[str, torch.Tensor],
        slicing: str,
        *,
        may_miss: bool = False,
        way: str = "record",
        modes: Sequence[Mode] = MODES,
    ) -> Forwards:
        """Records the model on a microbatch, by default in training and evaluation mode.

        Args:
            forward: Model and loss function.
            sample: Tensors of the microbatch, keyed by name, on the model's device.
            slicing: Method of recording. ``record`` records the torch calls of the model.
                ``export`` records the torch calls of the module that ``torch.export`` creates.
                ``auto`` first tries ``record``. If the model reads tensor values, ``auto`` records
                it again while torch reports that an export is in progress. If the model still reads
                values, ``auto`` exports it.
            may_miss: Whether the forward pass may skip cut points.
            way: Method by which the sample batch was recorded: ``record``, ``trace`` or ``export``.
                If ``slicing`` is ``auto``, this method is tried first. Random numbers depend on the
                positions of calls, which differ between methods.
            modes: Modes in which the model is recorded.

        Raises:
            ConfigError: If the model can neither be recorded nor exported. The message names the
                line in the model's code.
        """
        if slicing not in get_args(Slicing):
            raise ConfigError(
                f"slicing must be one of {', '.join(get_args(Slicing))}, got {slicing!r}"
            )
        if not is_on_meta(forward.model):
            make: MakeRecorder = partial(
                CallRecorder, decisive=forward.decisive_entries, may_miss=may_miss
            )
            return cls._of(forward, sample, slicing, make, way, modes)
        fakes = Fakes(forward.model, sample)
        make = partial(
            FakeRecorder, fakes=fakes, decisive=forward.decisive_entries, may_miss=may_miss
        )
        with fakes.in_model():
            return cls._of(forward, fakes.sample, slicing, make, way, modes)

    @classmethod
    def _of(
        cls,
        forward: Forward,
        sample: Mapping[str, torch.Tensor],
        slicing: str,
        make: MakeRecorder,
        way: str,
        modes: Sequence[Mode],
    ) -> Forwards:
        export = partial(_exported, make=make)
        if slicing == "auto" and way == "trace":
            traced = cls._traced(forward, sample, make, modes)
            if traced is not None:
                return traced
        if slicing == "auto" and way == "export":
            with contextlib.suppress(_ExportError, ReadsValueError):
                return cls._taken(forward, sample, export, "export", modes)
        if slicing == "export":
            return cls._taken(forward, sample, export, "export", modes)
        if slicing == "record" and are_added(forward.model):
            # Method ``record`` assumes that the model reads the same values in all microbatches.
            # Use _traced(), with which the model reads fewer values.
            take = partial(_traced, make=make, freeze=True)
            return cls._taken(forward, sample, take, "record", modes)
        try:
            take = partial(_recorded, make=make, freeze=slicing == "record")
            return cls._taken(forward, sample, take, "record", modes)
        except ReadsValueError as error:
            traced = cls._traced(forward, sample, make, modes)
            if traced is not None:
                return traced
            try:
                return cls._taken(forward, sample, export, "export", modes)
            except _ExportError as other:
                raise ConfigError(f"{error} (torch.export: {other})") from other
            except ReadsValueError:
                # Raise the first error, because it names a line of the model instead of a line of
                # the exported module.
                raise error from None

    @classmethod
    def _traced(
        cls,
        forward: Forward,
        sample: Mapping[str, torch.Tensor],
        make: MakeRecorder,
        modes: Sequence[Mode],
    ) -> Forwards | None:
        """Records ``forward`` on ``sample`` with :func:`_traced`. Returns ``None`` if that fails.

        ``make`` creates the recorder, and ``modes`` lists the modes to record.
        """
        try:
            forwards = cls._taken(forward, sample, partial(_traced, make=make), "trace", modes)
        except ReadsValueError:
            return None
        # If the user placed the cut points and the model draws random numbers, return None, so that
        # the model is exported as in earlier versions. Random numbers depend on the positions of
        # calls, so another method would change them.
        if forwards.tapes[modes[0]].is_random and not are_added(forward.model):
            return None
        return forwards

    @classmethod
    def _taken(
        cls,
        forward: Forward,
        sample: Mapping[str, torch.Tensor],
        take: Callable[[Forward, Mapping[str, torch.Tensor]], Tape],
        way: str,
        modes: Sequence[Mode],
    ) -> Forwards:
        """Records ``forward`` on ``sample`` in each of ``modes``, and returns the forward passes.

        The function ``take`` records one forward pass. ``way`` is the name of its method.
        """
        tapes: dict[Mode, Tape] = {}
        for mode in modes:
            is_training = mode == "training"
            with mode_of(forward.model, training=is_training), torch.set_grad_enabled(is_training):
                tapes[mode] = take(forward, sample)
        forwards = cls(tapes=tapes, way=way)
        if len(tapes) > 1:
            forwards._require_same_cuts(forward.model)
        return forwards

    def joined(self, other: Forwards, model: torch.nn.Module) -> Forwards:
        """Returns these forward passes combined with ``other``, recorded in another mode.

        Removes optional cut points that the model reaches in only one of the two modes.

        Args:
            other: Forward passes of the same microbatch, recorded by the same method.
            model: Recorded model.

        Raises:
            ConfigError: If the remaining cut points differ between the modes.
        """
        forwards = Forwards(tapes={**self.tapes, **other.tapes}, way=self.way)
        forwards._require_same_cuts(model)
        return forwards

    def _require_same_cuts(self, model: torch.nn.Module) -> None:
        """Removes optional cut points that the forward pass reaches in only one mode.

        Raises ``ConfigError`` if the remaining cut points differ between the modes.
        """
        training, evaluation = self.training, self.evaluation
        for name, cut_point in cut_points_of(model).items():
            if cut_point.is_optional and (name in training.cuts) != (name in evaluation.cuts):
                training.remove_cuts((name,))
                evaluation.remove_cuts((name,))
        if training.cuts != evaluation.cuts:
            raise ConfigError(
                f"the forward pass calls the cut points {', '.join(training.cuts)} in training, "
                f"but {', '.join(evaluation.cuts)} in evaluation; cut points must not be inside "
                "control flow"
            )


def host_random_state() -> tuple[Any, ...]:
    """Returns the states of the random generators of Python and numpy."""
    state: Any = numpy.random.get_state()
    return (random.getstate(), state[1].tobytes(), *state[2:])


class RecordingCache:
    """Records the model on microbatches, and keeps the recordings for the pipeline."""

    def __init__(self) -> None:
        self._kept: list[tuple[Mode, Mapping[str, torch.Tensor], Forwards]] = []

    def training(self, model: SampledModel, microbatch: Mapping[str, torch.Tensor]) -> Forwards:
        """Records a model in training mode, and keeps the recording if possible.

        The pipeline must make some recordings itself, so these are not kept: recordings with calls
        that will be moved behind frozen segments, and recordings of a model that draws random
        numbers with Python or numpy. The pipeline detects such numbers only while it records.

        Args:
            model: Model with its settings for recording.
            microbatch: Tensors of the microbatch, on the model's device.

        Raises:
            ConfigError: If the model cannot be recorded.
        """
        before = host_random_state()
        forwards = Forwards.of(model, microbatch, model.slicing, modes=("training",))
        if host_random_state() == before and late_calls(forwards.training) is None:
            self._kept.append(("training", microbatch, forwards))
        return forwards

    def both(self, model: SampledModel, microbatch: Mapping[str, torch.Tensor]) -> None:
        """Records a model in training and then in evaluation mode, and keeps the recordings.

        Args:
            model: Model with its settings for recording.
            microbatch: Tensors of the microbatch, on the model's device.

        Raises:
            ConfigError: If the model cannot be recorded.
        """
        training = self.training(model, microbatch)
        before = host_random_state()
        forwards = evaluation_of(model, microbatch, training)
        if host_random_state() == before:
            self._kept.append(("evaluation", microbatch, forwards))

    def take(self, microbatch: Mapping[str, torch.Tensor], mode: Mode) -> Forwards | None:
        """Removes and returns a recording of an equal microbatch, or returns ``None``.

        Equal microbatches have the same entries with the same values.

        Args:
            microbatch: Tensors of the microbatch, on the model's device.
            mode: Mode of the recording.
        """
        for index, (kept_mode, kept, forwards) in enumerate(self._kept):
            if (
                kept_mode == mode
                and kept.keys() == microbatch.keys()
                and all(_is_equal(kept[name], microbatch[name]) for name in kept)
            ):
                del self._kept[index]
                return forwards
        return None


def evaluation_of(
    model: SampledModel, microbatch: Mapping[str, torch.Tensor], training: Forwards
) -> Forwards:
    """Records ``model`` on ``microbatch`` in evaluation mode.

    ``training`` is the recording in training mode. Its recording method is tried first.
    """
    return Forwards.of(model, microbatch, model.slicing, way=training.way, modes=("evaluation",))


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (
        first.dtype == second.dtype
        and first.device == second.device
        and first.requires_grad == second.requires_grad
        and torch.equal(first, second)
    )


@contextlib.contextmanager
def mode_of(model: torch.nn.Module, *, training: bool) -> Iterator[None]:
    """Puts a model into training or evaluation mode, and restores the mode on exit.

    If the model is already in the requested mode, submodules in the other mode are not changed.
    """
    before = [(module, module.training) for module in model.modules()]
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


def copies_of(microbatch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns a copy of a microbatch that shares no memory with the original."""
    return {
        name: tensor.detach().clone().requires_grad_(tensor.requires_grad)
        for name, tensor in microbatch.items()
    }


def _recorded(
    forward: Forward,
    sample: Mapping[str, torch.Tensor],
    run: Callable[..., Any] | None = None,
    *,
    make: MakeRecorder,
    freeze: bool = False,
) -> Tape:
    """Records a forward pass on a microbatch, and restores buffers and random generators.

    Args:
        forward: Model and loss function.
        sample: Tensors of the microbatch, keyed by the name of the batch entry.
        run: Function to record instead of ``forward``. It receives the tensors as keyword
            arguments.
        make: Class of the recorder, or a function with the same arguments.
        freeze: Whether Python code may read the values of all tensors. The values are assumed to be
            the same in every microbatch. If ``False``, reading values is an error.
    """
    # Copy the inputs, because the forward pass may change them in place. The recorder also needs a
    # separate tensor object for each input, but a microbatch may contain the same object under two
    # names.
    inputs = copies_of(sample)
    recorder = make(forward.model, inputs, freeze)
    recorder.tape.autocast = forward.autocast
    with forward.under_autocast(), undisturbed(forward.model, recorder.tape.device):
        with custom_functions(recorder), mapped_functions(recorder), recorder:
            loss = forward(inputs) if run is None else run(**inputs)
        recorder.note_buffers()
        if not freeze:
            recorder.check_reads()
        recorder.check_attributes()
    recorder.finish(loss)
    return recorder.tape


def _traced(
    forward: Forward,
    sample: Mapping[str, torch.Tensor],
    *,
    make: MakeRecorder,
    freeze: bool = False,
) -> Tape:
    """Records a model while torch reports that an export is in progress.

    During an export, many libraries avoid reading tensor values. The recorded calls are still the
    calls of the model, and recording is much faster than an export.

    Args:
        forward: Model and loss function.
        sample: Tensors of the microbatch, keyed by the name of the batch entry.
        make: Class of the recorder, or a function with the same arguments.
        freeze: Whether Python code may read the values of all tensors.
    """
    compiler: Any = torch.compiler
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    before = {flag: getattr(compiler, flag, False) for flag in flags}
    try:
        for flag in flags:
            setattr(compiler, flag, True)
        return _recorded(forward, sample, make=make, freeze=freeze)
    finally:
        for flag, value in before.items():
            setattr(compiler, flag, value)


class _ExportError(ConfigError):
    """Raised if ``torch.export`` failed."""


class _Lossy(torch.nn.Module):
    """Wraps a model and its loss function in a module that returns the loss."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.model = forward.model
        self._forward = forward

    def forward(self, **batch: torch.Tensor) -> Any:
        return self._forward(batch)


def _exported(forward: Forward, sample: Mapping[str, torch.Tensor], *, make: MakeRecorder) -> Tape:
    """Exports the model of ``forward``, and returns a recording of the exported module.

    The model is exported and recorded with the microbatch ``sample``. ``make`` creates the
    recorder.
    """
    with undisturbed(forward.model, forward.device):
        try:
            # Discard stderr, to which torch writes the whole graph if an export fails.
            with contextlib.redirect_stderr(io.StringIO()):
                exported = torch.export.export(_Lossy(forward), (), dict(sample), strict=False)
            module = exported.module()
        except Exception as error:
            # Catch all exceptions, because torch.export may raise many types.
            raise _ExportError(str(error).strip().splitlines()[0][:200]) from error
    if any("vmap" in getattr(node.target, "__name__", "") for node in module.graph.nodes):
        raise _ExportError("the exported module uses torch.vmap")
    if _reads_values(module):
        raise _ExportError("the exported module also reads values of tensors")
    tape = _recorded(forward, sample, module, make=make)
    if any(isinstance(value.tensor, FakeTensor) for value in tape.values):
        raise _ExportError("the exported module contains tensors without data")
    return tape


def _reads_values(exported: torch.fx.GraphModule) -> bool:
    """Returns whether an exported module reads tensor values and computes tensors from them.

    Values that the module reads only to check them do not count.
    """
    numbers: set[torch.fx.Node] = set()
    aten = torch.ops.aten
    for node in exported.graph.nodes:
        if node.target in (aten.item.default, aten._local_scalar_dense.default):
            numbers.add(node)
        elif not numbers.isdisjoint(node.all_input_nodes):
            if isinstance(node.meta.get("val"), (torch.Tensor, list, tuple)):
                return True
            numbers.add(node)
    return False


def _loss_in(output: Any) -> Any:
    """Returns the loss in a model's output.

    The loss is the output itself, its entry or attribute ``loss``, or its first item.
    """
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping) and isinstance(output.get("loss"), torch.Tensor):
        return output["loss"]
    if isinstance(getattr(output, "loss", None), torch.Tensor):
        return output.loss
    if isinstance(output, (tuple, list)) and output:
        return output[0]
    return output
