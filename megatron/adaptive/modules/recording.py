"""Records the torch calls in the forward pass of a model with cut points.

::

    model with CutPoint()s ──recorder or torch.export──> Tape, in training and in evaluation

Each call is recorded as the model makes it (``dropout``, ``layer_norm``,
``scaled_dot_product_attention``, a custom ``autograd.Function``), not as the smaller operations
inside. So running the recording gives the same gradients as the model. Python code between calls is
not recorded, so every microbatch takes the branches that the code took for the sample. This is
right for branches that depend on shapes or on the training mode, but wrong for branches that depend
on the values of tensors. So a forward pass that reads the value of a tensor which may differ
between microbatches raises an error that names the line.

Every recorded tensor has an index (its number). The arguments of recorded calls refer to tensors by
this number.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from megatron.adaptive.accelerator import default_generator
from megatron.adaptive.errors import ConfigError


def mark(tensors: Any, cut_point: int, passing: int) -> Any:
    """Returns ``tensors`` unchanged; an active recorder notes that the cut point was reached.

    Args:
        tensors: A tensor, or tuples and lists of tensors.
        cut_point: ``id()`` of the :class:`CutPoint` module.
        passing: Sequence number of this call, counted over all cut points of the process.
    """
    # torch.export keeps only operations of torch, so pass each tensor through a custom operation.
    if torch.compiler.is_exporting():
        if isinstance(tensors, torch.Tensor):
            return _exported_mark(tensors, cut_point, passing)
        if isinstance(tensors, (tuple, list)):
            return type(tensors)(mark(entry, cut_point, passing) for entry in tensors)
    elif has_torch_function((_WITNESS,)):
        return handle_torch_function(mark, (), tensors, cut_point, passing)
    return tensors


@torch.library.custom_op("megatron_adaptive::mark", mutates_args=())
def _exported_mark(tensor: torch.Tensor, cut_point: int, passing: int) -> torch.Tensor:
    return tensor.clone()


_exported_mark.register_fake(lambda tensor, cut_point, passing: torch.empty_like(tensor))
# Tensor for mark() to test whether a recorder is active: if so, has_torch_function() returns true.
_WITNESS = torch.empty(0)
_PASSINGS = itertools.count()


class CutPoint(torch.nn.Module):
    """Marks a position in the forward pass where a model may be cut into stages.

    The module returns its arguments unchanged. A cut divides the whole forward pass, in the order
    of its operations. Every tensor that is computed before the cut and used after it is sent to the
    next stage, even if it is not an argument of the cut point. Each instance must be called exactly
    once per forward pass, for any input::

        for block, cut in zip(self.blocks, self.cuts):
            x = cut(block(x))

    If you cannot edit the model's ``forward``, :meth:`after` adds a cut point behind one of its
    modules.
    """

    @staticmethod
    def after(module: torch.nn.Module) -> CutPoint:
        """Adds a cut point behind a module of a model, and returns the cut point.

        Args:
            module: Module that is called once per forward pass. The cut point is added to it as the
                submodule ``cut_point``.
        """
        cut_point = CutPoint()
        module.add_module("cut_point", cut_point)
        module.register_forward_hook(_pass)
        return cut_point

    def forward(self, *values: Any) -> Any:
        """Returns the argument, or a tuple of the arguments if there are several."""
        value = values[0] if len(values) == 1 else values
        return mark(value, id(self), next(_PASSINGS))


def _pass(module: Any, inputs: Any, output: Any) -> Any:
    return module.cut_point(output)


@dataclass(frozen=True, slots=True)
class Ref:
    """Refers to a tensor in the arguments of a recorded call, by the tensor's index on the tape."""

    value: int


@dataclass(slots=True, kw_only=True)
class Value:
    """Describes a tensor of the recorded forward pass.

    Attributes:
        shape: Shape of the tensor.
        dtype: Element type of the tensor.
        requires_grad: Whether a gradient is computed for the tensor or through it.
        source: Origin of the tensor: ``input``, ``parameter``, ``buffer`` or ``constant``; empty if
            a recorded call computed it.
        name: Name of the input, parameter or buffer; empty for other tensors.
        tensor: The tensor itself if it is a constant, otherwise ``None``.
        made_by: Index of the call that computed the tensor, -1 if no recorded call did.
        storage: Address of the tensor's memory, the same for tensors that share memory.
        varies: Whether the tensor depends on an input, a parameter or a random number.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    source: str = ""
    name: str = ""
    tensor: torch.Tensor | None = None
    made_by: int = -1
    storage: int = 0
    varies: bool = True


@dataclass(slots=True, kw_only=True)
class Call:
    """Describes a recorded call of a torch function.

    Attributes:
        function: Function that was called.
        args: Positional arguments, with a :class:`Ref` for every tensor.
        kwargs: Keyword arguments, with a :class:`Ref` for every tensor.
        reads: Indices on the tape of the tensors in the arguments.
        outputs: Index on the tape of each new tensor, and the indices and keys that lead to the
            tensor in the call's result.
        changes: Index on the tape of each argument changed in place, before and after the call.
        segment: Number of cut points that the forward pass had reached before the call.
        is_random: Whether the call drew random numbers.
        with_grad: Whether gradients were enabled during the call.
        autocast: Element type of matrix products under autocast, ``None`` if autocast was off.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    outputs: tuple[tuple[int, tuple[Any, ...]], ...]
    changes: tuple[tuple[int, int], ...]
    segment: int
    is_random: bool
    with_grad: bool
    autocast: torch.dtype | None


@dataclass(slots=True, kw_only=True)
class Tape:
    """Contains a recorded forward pass.

    Attributes:
        values: All tensors. Other records refer to a tensor by its index in this list.
        calls: All calls in the order in which the model made them.
        cuts: Names of the cut points in the order in which the forward pass reaches them.
        loss: Index on the tape of the tensor that holds the loss.
        device: Device on which the forward pass was recorded.
        aliases: Maps the first name of a parameter or buffer with several names to its other names.
        autocast: Element type of matrix products in mixed precision, ``None`` in full precision.
    """

    values: list[Value] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    cuts: list[str] = field(default_factory=list)
    loss: int = -1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    autocast: torch.dtype | None = None

    @property
    def num_segments(self) -> int:
        """Returns the number of segments into which the cut points divide the forward pass."""
        return len(self.cuts) + 1

    @property
    def is_random(self) -> bool:
        """Returns whether any call draws random numbers."""
        return any(call.is_random for call in self.calls)


# Functions that return the value of a tensor to Python, where the recorder cannot follow it.
_READING = frozenset(
    (
        "item",
        "__bool__",
        "__int__",
        "__float__",
        "__complex__",
        "__index__",
        "tolist",
        "numpy",
        "__array__",
        "__contains__",
        "equal",
        "allclose",
        "is_nonzero",
    )
)
# Name of torch's autograd function for activation checkpointing. The recorder calls the function
# inside it directly, so that the calls in it are recorded.
_RECOMPUTING = "CheckpointFunction"


class ReadsValueError(ConfigError):
    """Raised if the forward pass reads the value of a tensor in Python."""


@contextlib.contextmanager
def undisturbed(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Restores the model's buffers and the random generators of CPU and ``device`` on exit."""
    kept = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in kept:
                        buffer.copy_(kept[name])


@contextlib.contextmanager
def _custom_functions(recorder: _Recorder) -> Iterator[None]:
    """Passes calls of ``autograd.Function.apply`` to the recorder, because torch does not."""
    function: Any = torch.autograd.Function
    original = function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        plain = original.__get__(None, cls)
        if recorder.is_inside:
            return plain(*args, **kwargs)
        if cls.__name__ == _RECOMPUTING:
            return args[0](*args[2:])
        return recorder.note(plain, args, kwargs, plain)

    function.apply = classmethod(apply)
    try:
        yield
    finally:
        function.apply = original


class _Recorder(TorchFunctionMode):
    """Records the torch calls of a model on a :class:`Tape`.

    Args:
        model: Model whose calls are recorded.
        inputs: Tensors of the microbatch, by the name of their batch entry.
        freeze: Whether to allow Python to read tensor values, which are then the same for every
            microbatch, instead of raising an error.
        decisive: Names of the inputs whose values Python may read, because they are the same
            whenever the recording is used.
        may_miss: Whether the forward pass may leave out cut points.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inputs: Mapping[str, torch.Tensor],
        freeze: bool,
        decisive: Sequence[str] = (),
        *,
        may_miss: bool = False,
    ) -> None:
        super().__init__()
        self.is_inside = False
        self.tape = Tape()
        self._freeze = freeze
        self._may_miss = may_miss
        self._passing = -1
        self._numbers: dict[int, int] = {}
        # Keep all tensors alive, because Python may reuse the id() of a freed tensor.
        self._kept: list[torch.Tensor] = []
        self._cut_names = {
            id(module): name
            for name, module in model.named_modules()
            if isinstance(module, CutPoint)
        }
        self._names: dict[int, tuple[str, str]] = {}
        aliases: dict[int, list[str]] = {}
        for source, named in (
            ("parameter", model.named_parameters(remove_duplicate=False)),
            ("buffer", model.named_buffers(remove_duplicate=False)),
        ):
            for name, tensor in named:
                self._names.setdefault(id(tensor), (source, name))
                aliases.setdefault(id(tensor), []).append(name)
                self._kept.append(tensor)
        self.tape.aliases = {names[0]: tuple(names[1:]) for names in aliases.values()}
        for name, tensor in inputs.items():
            self._add(tensor, source="input", name=name, varies=name not in decisive)
            self.tape.device = tensor.device
        first = next(model.parameters(), None)
        if first is not None:
            self.tape.device = first.device
        self._generators = [torch.default_generator]
        if self.tape.device.type == "cuda":
            self._generators.append(default_generator(self.tape.device))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (mark, torch.ops.megatron_adaptive.mark.default):
            self._pass_cut(*args[1:])
            return args[0]
        return self.note(func, args, kwargs or {}, func)

    def note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Any) -> Any:
        """Runs a call, and records it if the call makes or changes a tensor."""
        tensors = [tensor for tensor, _ in _paths((args, kwargs))]
        self._refuse_reading(function, tensors)
        versions = [tensor._version for tensor in tensors]
        before = [generator.get_state() for generator in self._generators]
        self.is_inside = True
        try:
            with torch._C.DisableTorchFunction():
                result = run(*args, **kwargs)
        finally:
            self.is_inside = False
        changed = {
            id(tensor): tensor
            for tensor, version in zip(tensors, versions, strict=True)
            if tensor._version != version
        }
        results = list(_paths(result))
        if not (results or changed):
            return result
        reads: dict[int, None] = {}
        template: Any = map_aggregate((args, kwargs), partial(self._refer, reads))
        made: dict[int, tuple[torch.Tensor, tuple[Any, ...]]] = {}
        for tensor, path in results:
            # If a result already has a number, the call only returned one of its arguments.
            if id(tensor) not in self._numbers:
                made.setdefault(id(tensor), (tensor, path))
        if made or changed:
            self._write(function, template, reads, made.values(), changed.values(), before)
        return result

    def _write(
        self,
        function: Any,
        template: Any,
        reads: Iterable[int],
        made: Iterable[tuple[torch.Tensor, tuple[Any, ...]]],
        changed: Iterable[torch.Tensor],
        before: list[torch.Tensor],
    ) -> None:
        """Adds a call to the tape.

        Args:
            function: Function that was called.
            template: Arguments of the call, with a :class:`Ref` in place of each tensor.
            reads: Indices on the tape of the tensors in the arguments.
            made: New tensors, each with the indices and keys that lead to it in the call's result.
            changed: Arguments that the call changed in place.
            before: States of the random generators before the call, to detect whether the call drew
                numbers.
        """
        tape = self.tape
        is_random = any(
            not torch.equal(generator.get_state(), state)
            for generator, state in zip(self._generators, before, strict=True)
        )
        varies = is_random or any(tape.values[read].varies for read in reads)
        number = len(tape.calls)
        outputs = [
            (self._add(tensor, made_by=number, varies=varies), path) for tensor, path in made
        ]
        changes = []
        for tensor in changed:
            old = self._numbers[id(tensor)]
            value = tape.values[old]
            if value.source == "parameter":
                raise ConfigError(
                    f"{_where()} changes parameter {value.name} within the forward; only buffers "
                    "may change there"
                )
            if value.source == "buffer":
                # A changed buffer keeps its number, because a stage looks it up by name.
                changes.append((old, old))
                continue
            changes.append((old, self._add(tensor, made_by=number, varies=varies or value.varies)))
        tape.calls.append(
            Call(
                function=function,
                args=template[0],
                kwargs=template[1],
                reads=tuple(reads),
                outputs=tuple(outputs),
                changes=tuple(changes),
                segment=len(tape.cuts),
                is_random=is_random,
                with_grad=torch.is_grad_enabled(),
                autocast=torch.get_autocast_dtype(tape.device.type)
                if torch.is_autocast_enabled(tape.device.type)
                else None,
            )
        )

    def _refer(self, reads: dict[int, None], argument: Any) -> Any:
        """Replaces a tensor by a :class:`Ref` and adds its number to ``reads``."""
        if not isinstance(argument, torch.Tensor):
            return argument
        number = self._numbers.get(id(argument))
        if number is None:
            number = self._source(argument)
        reads[number] = None
        return Ref(number)

    def _source(self, tensor: torch.Tensor) -> int:
        """Numbers a tensor that no recorded call made: an input, parameter, buffer or constant."""
        source, name = self._names.get(id(tensor), ("constant", ""))
        if source == "constant" and tensor.requires_grad:
            raise ConfigError(
                f"{_where()} uses a tensor of shape {list(tensor.shape)} that requires a gradient "
                "and is no parameter of the model: register it with a module as a parameter"
            )
        return self._add(
            tensor,
            source=source,
            name=name,
            tensor=tensor if source == "constant" else None,
            varies=source == "parameter",
        )

    def _add(self, tensor: torch.Tensor, /, **facts: Any) -> int:
        number = len(self.tape.values)
        self.tape.values.append(
            Value(
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                requires_grad=tensor.requires_grad,
                storage=_storage(tensor),
                **facts,
            )
        )
        self._numbers[id(tensor)] = number
        self._kept.append(tensor)
        return number

    def _pass_cut(self, cut_point: int, passing: int) -> None:
        """Records that the forward pass has reached a cut point."""
        # After torch.export, a cut point is reached once for each of its tensors. Count only the
        # first.
        if passing == self._passing:
            return
        self._passing = passing
        name = self._cut_names.get(cut_point)
        if name is None:
            raise ConfigError(
                f"{_where()} calls a CutPoint that is no module of the model: make it in __init__ "
                "and keep it as an attribute"
            )
        if name in self.tape.cuts:
            raise ConfigError(
                f"cut point {name} is passed twice in one forward ({_where()}): give each place a "
                "CutPoint of its own"
            )
        self.tape.cuts.append(name)

    def _refuse_reading(self, function: Any, tensors: list[torch.Tensor]) -> None:
        """Raises a ``ReadsValueError`` if a call reads a value that may vary by microbatch."""
        name = getattr(function, "__name__", "")
        if name not in _READING or self._freeze:
            return
        for tensor in tensors:
            number = self._numbers.get(id(tensor))
            is_parameter = self._names.get(id(tensor), ("", ""))[0] == "parameter"
            if is_parameter or (number is not None and self.tape.values[number].varies):
                raise ReadsValueError(
                    f"{_where()} looks at the values of a tensor ({name}), and what follows may "
                    "differ between microbatches: compute with tensors there, keep cut points out "
                    "of such control flow, name the batch entry that decides in decisive_entries, "
                    'or give slicing="record" if the answer is always the sample\'s'
                )

    def finish(self, loss: Any) -> None:
        """Checks the recorded forward pass and notes which tensor is the loss."""
        missed = [name for name in self._cut_names.values() if name not in self.tape.cuts]
        if missed and not self._may_miss:
            raise ConfigError(
                f"cut point {missed[0]} is not passed in the sample's forward"
                f"{f', nor are {len(missed) - 1} others' if len(missed) > 1 else ''}: cut points "
                "must not be inside control flow; move it, or remove it"
            )
        number = self._numbers.get(id(loss))
        if number is None or loss.dim() or not loss.is_floating_point():
            shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(
                f"the forward gives a loss of {shape}: it must be a floating-point scalar that is "
                "computed from the batch; return one, or give loss=function(output, batch)"
            )
        self.tape.loss = number
        self._kept.clear()


def _paths(
    structure: Any, path: tuple[Any, ...] = ()
) -> Iterator[tuple[torch.Tensor, tuple[Any, ...]]]:
    """Yields the tensors in nested containers, each with the indices and keys that lead to it."""
    if isinstance(structure, torch.Tensor):
        yield structure, path
    elif isinstance(structure, (tuple, list)):
        for number, part in enumerate(structure):
            yield from _paths(part, (*path, number))
    elif isinstance(structure, dict):
        for name, part in structure.items():
            yield from _paths(part, (*path, name))


def _storage(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's memory, 0 if it has no storage."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        # Sparse tensors have no storage, so asking for it raises an error.
        return 0


def _where() -> str:
    """Returns the file and line of the user's code that is running, for error messages."""
    for frame in reversed(traceback.extract_stack()):
        plain = frame.filename.replace("\\", "/")
        if "/torch/" not in plain and "/megatron/adaptive/" not in plain:
            return f"{plain.rsplit('/', 1)[-1]}:{frame.lineno} ({frame.name})"
    return "the model"


Slicing = Literal["auto", "record", "export"]
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Maps the name of a mixed precision to the element type of matrix products."""

Loss = Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class Forward:
    """Computes the loss of a microbatch.

    Attributes:
        model: Model whose forward pass contains :class:`CutPoint` modules. The model gets the
            batch's entries as keyword arguments; if there is a ``loss`` function, only those that
            its ``forward`` takes.
        loss: Function ``(output, batch) -> scalar``. ``None`` if the model returns the loss, a
            mapping with an entry ``loss``, or a sequence that starts with the loss.
        arguments: More keyword arguments of the model's ``forward``, the same for every microbatch.
        mixed_precision: ``bf16`` or ``fp16`` for autocast; parameters keep their types. fp16 uses
            a dynamic loss scale.
        decisive_entries: Names of batch entries whose values the model's Python code may read.
            Microbatches with other values get a recording of their own.

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
                f"decisive_entries {self.decisive_entries!r}: give a sequence of names of batch "
                "entries"
            )
        if self.mixed_precision not in (None, *PRECISIONS):
            raise ConfigError(
                f"mixed_precision {self.mixed_precision!r}: choose {' or '.join(PRECISIONS)}, or "
                "None"
            )

    @property
    def autocast(self) -> torch.dtype | None:
        """Returns the element type of matrix products in mixed precision, else ``None``."""
        return None if self.mixed_precision is None else PRECISIONS[self.mixed_precision]

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> Any:
        """Returns the loss of a microbatch."""
        entries = {name: tensor for name, tensor in batch.items() if self._takes(name)}
        output = self.model(**entries, **(self.arguments or {}))
        return self.loss(output, batch) if self.loss is not None else _loss_in(output)

    def _takes(self, name: str) -> bool:
        """Returns whether to pass this entry of the batch to the model."""
        if self.loss is None:
            return True
        parameters = inspect.signature(self.model.forward).parameters
        return name in parameters or any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
        )

    @property
    def device(self) -> torch.device:
        """Returns the device of the model's first parameter."""
        first = next(self.model.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def under_autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the autocast context, which does nothing without mixed precision."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)


@dataclass(frozen=True, eq=False, repr=False)
class SampledModel(Forward):
    """Contains a model and the sample batch with which its forward pass is recorded.

    Attributes:
        sample_batch: Dictionary of tensors whose first axis is the axis of samples. The forward
            pass is recorded with its first microbatch and checked with a second one. Or a list of
            microbatches, dictionaries of tensors of any shapes, which use all parameters.
        shared_weights: Groups of parameter names. All names of a group belong to the same
            parameter, which is used on both sides of a cut.
        slicing: Method of recording the forward pass: ``record`` records the torch calls of the
            model, ``export`` uses ``torch.export``, ``auto`` exports only if necessary. See
            ``docs/reference/cutpoint.md``.
    """

    sample_batch: Mapping[str, torch.Tensor] | Sequence[Mapping[str, torch.Tensor]]
    _: KW_ONLY
    shared_weights: Sequence[Sequence[str]] = ()
    slicing: Slicing = "auto"

    @property
    def sample(self) -> Mapping[str, torch.Tensor]:
        """Returns the sample batch, which must not be a list of microbatches."""
        assert isinstance(self.sample_batch, Mapping)
        return self.sample_batch


@dataclass(frozen=True, kw_only=True)
class Forwards:
    """Contains a model's recorded forward passes in training and in evaluation mode.

    Attributes:
        training: Forward pass recorded in training mode.
        evaluation: Forward pass recorded in evaluation mode, with the same cut points.
        way: Method by which the forward passes were recorded, ``record`` or ``export``.
    """

    training: Tape
    evaluation: Tape
    way: str

    @classmethod
    def of(
        cls,
        forward: Forward,
        sample: Mapping[str, torch.Tensor],
        slicing: str,
        *,
        may_miss: bool = False,
    ) -> Forwards:
        """Records the model on a microbatch in training and in evaluation mode.

        Args:
            forward: Model and loss function.
            sample: Tensors of the microbatch by name, on the model's device.
            slicing: Method of recording. ``record`` records the calls of torch that the model
                makes. ``export`` records those that the module from ``torch.export`` makes.
                ``auto`` exports only if the model reads values of tensors.
            may_miss: Whether the forward pass may leave out cut points.

        Raises:
            ConfigError: If the model can be neither recorded nor exported. The message names the
                line of the model.
        """
        if slicing not in get_args(Slicing):
            raise ConfigError(f"slicing {slicing!r}: choose one of {', '.join(get_args(Slicing))}")
        exported = partial(_exported, may_miss=may_miss)
        if slicing == "export":
            return cls._both(forward, sample, exported, "export")
        try:
            take = partial(_recorded, freeze=slicing == "record", may_miss=may_miss)
            return cls._both(forward, sample, take, "record")
        except ReadsValueError as error:
            try:
                return cls._both(forward, sample, exported, "export")
            except _ExportError as other:
                raise ConfigError(f"{error} (torch.export: {other})") from other

    @classmethod
    def _both(
        cls,
        forward: Forward,
        sample: Mapping[str, torch.Tensor],
        take: Callable[[Forward, Mapping[str, torch.Tensor]], Tape],
        way: str,
    ) -> Forwards:
        with mode_of(forward.model, training=True), torch.enable_grad():
            training = take(forward, sample)
        with mode_of(forward.model, training=False), torch.no_grad():
            evaluation = take(forward, sample)
        training.autocast = evaluation.autocast = forward.autocast
        if training.cuts != evaluation.cuts:
            raise ConfigError(
                f"in training the forward passes the cut points {', '.join(training.cuts)}, in "
                f"evaluation {', '.join(evaluation.cuts)}: cut points must not be inside control "
                "flow"
            )
        return cls(training=training, evaluation=evaluation, way=way)


@contextlib.contextmanager
def mode_of(model: torch.nn.Module, *, training: bool) -> Iterator[None]:
    """Puts a model into training or evaluation mode, and restores its mode on exit.

    If the model is already in this mode, submodules in the other mode keep their mode.
    """
    before = [(module, module.training) for module in model.modules()]
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


def _recorded(
    forward: Forward,
    sample: Mapping[str, torch.Tensor],
    run: Callable[..., Any] | None = None,
    *,
    freeze: bool = False,
    may_miss: bool = False,
) -> Tape:
    """Records a forward pass on a microbatch; buffers and random generators stay unchanged.

    Args:
        forward: Model and loss function.
        sample: Tensors of the microbatch, by the name of their batch entry.
        run: Function to record instead of ``forward``; it gets the tensors as keyword arguments.
        freeze: Whether to allow Python to read tensor values, which are then the same for every
            microbatch, instead of raising an error.
        may_miss: Whether the forward pass may leave out cut points.
    """
    recorder = _Recorder(forward.model, sample, freeze, forward.decisive_entries, may_miss=may_miss)
    with (
        forward.under_autocast(),
        undisturbed(forward.model, recorder.tape.device),
        _custom_functions(recorder),
        recorder,
    ):
        loss = forward(sample) if run is None else run(**sample)
    recorder.finish(loss)
    return recorder.tape


class _ExportError(ConfigError):
    """Raised if ``torch.export`` failed."""


class _Lossy(torch.nn.Module):
    """Wraps a model so that it returns only its loss."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.model = forward.model
        self._forward = forward

    def forward(self, **batch: torch.Tensor) -> Any:
        return self._forward(batch)


def _exported(
    forward: Forward, sample: Mapping[str, torch.Tensor], *, may_miss: bool = False
) -> Tape:
    """Exports a model, runs the exported module and returns the tape of that run."""
    with undisturbed(forward.model, forward.device):
        try:
            exported = torch.export.export(_Lossy(forward), (), dict(sample), strict=False)
            module = exported.module()
        except Exception as error:
            # torch.export may raise many types of exceptions. All of them mean that the export
            # failed.
            raise _ExportError(str(error).strip().splitlines()[0][:200]) from error
    return _recorded(forward, sample, module, may_miss=may_miss)


def _loss_in(output: Any) -> Any:
    """Returns the loss in a model's output: the output, its entry ``loss`` or its first element."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping) and isinstance(output.get("loss"), torch.Tensor):
        return output["loss"]
    if isinstance(getattr(output, "loss", None), torch.Tensor):
        return output.loss
    if isinstance(output, (tuple, list)) and output:
        return output[0]
    return output
