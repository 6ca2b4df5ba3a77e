"""Records the forward of a model with cut points: every call of torch goes through one place.

::

    model with CutPoint()s ──recorder or torch.export──> Tape, in training and in evaluation

A call is seen as the model makes it (``dropout``, ``layer_norm``, ``scaled_dot_product_attention``,
a custom ``autograd.Function``), so that its replay is differentiated as the model would be. Python
between calls is not seen: what it decided for the sample stays decided. Decisions by shape or
training mode hold for every microbatch. Decisions by value do not, and a forward that reads values
of tensors which vary is refused with the line that does so.

Every tensor has a number, by which the arguments of calls refer to it.
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


def mark(given: Any, cut_point: int, passing: int) -> Any:
    """Return ``given``; a recorder that is active sees the call.

    Args:
        given: tensors, alone or in tuples and lists.
        cut_point: identity of the cut point.
        passing: number of this pass through a cut point.
    """
    if torch.compiler.is_exporting():  # torch.export drops what is no operation of torch
        if isinstance(given, torch.Tensor):
            return _exported_mark(given, cut_point, passing)
        if isinstance(given, (tuple, list)):
            return type(given)(mark(one, cut_point, passing) for one in given)
    elif has_torch_function((_WITNESS,)):
        return handle_torch_function(mark, (), given, cut_point, passing)
    return given


@torch.library.custom_op("megatron_adaptive::mark", mutates_args=())
def _exported_mark(given: torch.Tensor, cut_point: int, passing: int) -> torch.Tensor:
    return given.clone()


_exported_mark.register_fake(lambda given, cut_point, passing: torch.empty_like(given))
_WITNESS = torch.empty(0)  # an active recorder claims every tensor
_PASSINGS = itertools.count()


class CutPoint(torch.nn.Module):
    """A place where a model may be cut into stages.

    Returns what it is given. The whole forward is cut there, in the order of its operations: what
    was computed before and is used after crosses the cut by itself, whether it was given or not.
    Each instance is called once per forward, whatever the inputs' values::

        for block, cut in zip(self.blocks, self.cuts):
            x = cut(block(x))

    Where the forward is not yours, :meth:`after` marks the end of a module in it.
    """

    @staticmethod
    def after(module: torch.nn.Module) -> CutPoint:
        """Put a cut point behind a module of a model, and return it.

        Args:
            module: called once per forward; gets the cut point as its part ``cut_point``.
        """
        cut_point = CutPoint()
        module.add_module("cut_point", cut_point)
        module.register_forward_hook(_pass)
        return cut_point

    def forward(self, *given: Any) -> Any:
        """Return the argument, or the tuple of them where there are several."""
        value = given[0] if len(given) == 1 else given
        return mark(value, id(self), next(_PASSINGS))


def _pass(module: torch.nn.Module, given: Any, output: Any) -> Any:
    return module.cut_point(output)  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a value among the arguments of a call."""

    value: int


@dataclass(slots=True, kw_only=True)
class Value:
    """A tensor of the forward.

    Attributes:
        shape, dtype: of the tensor.
        requires_grad: whether a gradient flows through it.
        source: ``input``, ``parameter``, ``buffer`` or ``constant``; empty for a call's result.
        name: of an input, a parameter or a buffer.
        tensor: a constant.
        made_by: number of the call, -1 for a source.
        storage: equal for values that share memory.
        varies: depends on an input, a parameter or a random number.
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
    """One call of a function of torch.

    Attributes:
        function: what was called.
        args, kwargs: its arguments, with a :class:`Ref` for every tensor.
        reads: values among the arguments.
        outputs: value and place in the result of each new tensor.
        changes: a changed argument's value before and after the call.
        segment: number of cut points passed before.
        is_random: it took from the random generator.
        with_grad: gradients were enabled.
        autocast: the element type that torch chose for matrix products, ``None`` if off.
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
    """A recorded forward.

    Attributes:
        values: all tensors.
        calls: all calls in order.
        cuts: names of the cut points in the order they were passed.
        loss: value of the loss.
        device: where it was recorded.
        aliases: other names of a parameter or buffer, by its first name.
        autocast: element type of matrix products under mixed precision.
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
        """Pieces between cut points."""
        return len(self.cuts) + 1

    @property
    def is_random(self) -> bool:
        """Whether any call draws random numbers."""
        return any(call.is_random for call in self.calls)


# Functions that give Python what is in a tensor.
_READING = frozenset(
    ("item __bool__ __int__ __float__ __complex__ __index__ tolist numpy __array__ __contains__ "
     "equal allclose is_nonzero").split()
)  # fmt: skip
_RECOMPUTING = "CheckpointFunction"  # runs its function in another pass, which is not wanted here


class ReadsValueError(ConfigError):
    """The forward decides by what is in a tensor."""


@contextlib.contextmanager
def undisturbed(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Leave the model's buffers and the generators of host and ``device`` as they were."""
    kept = {name: one.detach().clone() for name, one in model.named_buffers()}
    with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, one in model.named_buffers():
                    if name in kept:
                        one.copy_(kept[name])


@contextlib.contextmanager
def _custom_functions(recorder: _Recorder) -> Iterator[None]:
    """Let the recorder see ``autograd.Function.apply``, which is no function of torch."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        plain = original.__get__(None, cls)
        if recorder.is_inside:
            return plain(*args, **kwargs)
        if cls.__name__ == _RECOMPUTING:
            return args[0](*args[2:])
        return recorder.note(plain, args, kwargs, plain)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


class _Recorder(TorchFunctionMode):
    def __init__(
        self, model: torch.nn.Module, inputs: Mapping[str, torch.Tensor], freeze: bool
    ) -> None:
        super().__init__()
        self.is_inside = False
        self.tape = Tape()
        self._freeze = freeze
        self._passing = -1
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # so that no id is used twice
        self._cut_names = {
            id(one): name for name, one in model.named_modules() if isinstance(one, CutPoint)
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
            self._add(tensor, source="input", name=name)
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
        """Run a call and write it down where it makes or changes a tensor."""
        given = [one for one, _ in _paths((args, kwargs))]
        self._refuse_reading(function, given)
        versions = [one._version for one in given]
        before = [generator.get_state() for generator in self._generators]
        self.is_inside = True
        try:
            with torch._C.DisableTorchFunction():
                result = run(*args, **kwargs)
        finally:
            self.is_inside = False
        changed = {
            id(one): one
            for one, version in zip(given, versions, strict=True)
            if one._version != version
        }
        results = list(_paths(result))
        if not (results or changed):
            return result
        reads: dict[int, None] = {}
        template: Any = map_aggregate((args, kwargs), partial(self._refer, reads))
        made: dict[int, tuple[torch.Tensor, tuple[Any, ...]]] = {}
        for one, path in results:
            if id(one) not in self._numbers:  # what returns its argument has made nothing
                made.setdefault(id(one), (one, path))
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
        tape = self.tape
        is_random = any(
            not torch.equal(generator.get_state(), state)
            for generator, state in zip(self._generators, before, strict=True)
        )
        varies = is_random or any(tape.values[one].varies for one in reads)
        number = len(tape.calls)
        outputs = [(self._add(one, made_by=number, varies=varies), path) for one, path in made]
        changes = []
        for one in changed:
            old = self._numbers[id(one)]
            value = tape.values[old]
            if value.source == "parameter":
                raise ConfigError(
                    f"{_where()} changes parameter {value.name} within the forward; only buffers "
                    "may change there"
                )
            if value.source == "buffer":
                changes.append((old, old))  # stays with its name
                continue
            changes.append((old, self._add(one, made_by=number, varies=varies or value.varies)))
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

    def _refer(self, reads: dict[int, None], one: Any) -> Any:
        """Return what stands for an argument; the values among them are added to ``reads``."""
        if not isinstance(one, torch.Tensor):
            return one
        number = self._numbers.get(id(one))
        if number is None:
            number = self._source(one)
        reads[number] = None
        return Ref(number)

    def _source(self, tensor: torch.Tensor) -> int:
        """Take in a tensor that no call made."""
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

    def _add(self, tensor: torch.Tensor, /, **known: Any) -> int:
        number = len(self.tape.values)
        self.tape.values.append(
            Value(
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                requires_grad=tensor.requires_grad,
                storage=_storage(tensor),
                **known,
            )
        )
        self._numbers[id(tensor)] = number
        self._kept.append(tensor)
        return number

    def _pass_cut(self, cut_point: int, passing: int) -> None:
        if passing == self._passing:  # another tensor of the same pass
            return
        self._passing, name = passing, self._cut_names.get(cut_point)
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

    def _refuse_reading(self, function: Any, given: list[torch.Tensor]) -> None:
        name = getattr(function, "__name__", "")
        if name not in _READING or self._freeze:
            return
        for one in given:
            number = self._numbers.get(id(one))
            is_parameter = self._names.get(id(one), ("", ""))[0] == "parameter"
            if is_parameter or (number is not None and self.tape.values[number].varies):
                raise ReadsValueError(
                    f"{_where()} looks at the values of a tensor ({name}), and what follows may "
                    "differ between microbatches: compute with tensors there, keep cut points out "
                    'of such control flow, or give slicing="record" if the answer is always the '
                    "sample's"
                )

    def finish(self, loss: Any) -> None:
        """Check what was recorded and take the loss."""
        missed = [name for name in self._cut_names.values() if name not in self.tape.cuts]
        if missed:
            raise ConfigError(
                f"cut point {missed[0]} is not passed in the sample's forward"
                f"{f', nor are {len(missed) - 1} others' if len(missed) > 1 else ''}: cut points "
                "must not lie inside control flow; move it, or remove it"
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
    given: Any, path: tuple[Any, ...] = ()
) -> Iterator[tuple[torch.Tensor, tuple[Any, ...]]]:
    """Yield the tensors in a structure with the way to each."""
    if isinstance(given, torch.Tensor):
        yield given, path
    elif isinstance(given, (tuple, list)):
        for number, one in enumerate(given):
            yield from _paths(one, (*path, number))
    elif isinstance(given, dict):
        for name, one in given.items():
            yield from _paths(one, (*path, name))


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors and the like
        return 0


def _where() -> str:
    """Return file and line of the model's code that is running."""
    for frame in reversed(traceback.extract_stack()):
        plain = frame.filename.replace("\\", "/")
        if "/torch/" not in plain and "/megatron/adaptive/" not in plain:
            return f"{plain.rsplit('/', 1)[-1]}:{frame.lineno} ({frame.name})"
    return "the model"


Slicing = Literal["auto", "record", "export"]
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Mixed precisions by their name."""

Loss = Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class Forward:
    """Makes a loss of a microbatch.

    Attributes:
        model: with :class:`CutPoint` modules in its forward; called with the batch's entries as
            keyword arguments; where ``loss`` is given, with those that it takes.
        loss: ``(output, batch) -> scalar``; ``None`` where the model's output is the loss, has an
            entry ``loss`` or begins with it.
        arguments: further keyword arguments of forward, always the same.
        mixed_precision: ``bf16`` or ``fp16`` for autocast with parameters as they are; fp16 with a
            dynamic loss scale.

    Raises:
        ConfigError: there is no such precision.
    """

    model: torch.nn.Module
    _: KW_ONLY
    loss: Loss | None = None
    arguments: Mapping[str, Any] | None = None
    mixed_precision: Literal["bf16", "fp16"] | None = None

    def __post_init__(self) -> None:
        if self.mixed_precision not in (None, *PRECISIONS):
            raise ConfigError(
                f"mixed_precision {self.mixed_precision!r}: choose {' or '.join(PRECISIONS)}, or "
                "None"
            )

    @property
    def autocast(self) -> torch.dtype | None:
        """Element type of matrix products under mixed precision."""
        return None if self.mixed_precision is None else PRECISIONS[self.mixed_precision]

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> Any:
        """Return the loss of a microbatch."""
        given = {name: one for name, one in batch.items() if self._takes(name)}
        output = self.model(**given, **(self.arguments or {}))
        return self.loss(output, batch) if self.loss is not None else _loss_in(output)

    def _takes(self, name: str) -> bool:
        """Whether an entry of the batch goes to the model; the loss function gets them all."""
        if self.loss is None:
            return True
        known = inspect.signature(self.model.forward).parameters
        return name in known or any(one.kind is one.VAR_KEYWORD for one in known.values())

    @property
    def device(self) -> torch.device:
        """Device of the model's first parameter."""
        first = next(self.model.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def under_autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of mixed precision."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)


@dataclass(frozen=True, eq=False, repr=False)
class SampledModel(Forward):
    """A model with a batch to record its forward with.

    Attributes:
        sample_batch: a dictionary of tensors whose first axis is that of the samples. Its first
            microbatch is run to find the stages; a second one checks them.
        shared_weights: groups of names of parameters that are one and used on both sides of a cut.
        slicing: ``record``, ``export`` or ``auto``; see ``docs/cutpoint.md``.
    """

    sample_batch: Mapping[str, torch.Tensor]
    _: KW_ONLY
    shared_weights: Sequence[Sequence[str]] = ()
    slicing: Slicing = "auto"


@dataclass(frozen=True, kw_only=True)
class Forwards:
    """Both tapes.

    Attributes:
        training, evaluation: the tapes; they pass the same cut points.
        way: ``record`` or ``export``.
    """

    training: Tape
    evaluation: Tape
    way: str

    @classmethod
    def of(cls, forward: Forward, sample: Mapping[str, torch.Tensor], slicing: str) -> Forwards:
        """Run the model in both modes on a microbatch and return what it did.

        Args:
            forward: the model.
            sample: a microbatch on the model's device.
            slicing: ``record`` takes the calls of torch as the model makes them, ``export`` those
                of ``torch.export``; ``auto`` exports where the model looks at values.

        Raises:
            ConfigError: neither is possible; names the place.
        """
        if slicing not in get_args(Slicing):
            raise ConfigError(f"slicing {slicing!r}: choose one of {', '.join(get_args(Slicing))}")
        if slicing == "export":
            return cls._both(forward, sample, _exported, "export")
        try:
            take = partial(_recorded, freeze=slicing == "record")
            return cls._both(forward, sample, take, "record")
        except ReadsValueError as error:
            try:
                return cls._both(forward, sample, _exported, "export")
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
                f"evaluation {', '.join(evaluation.cuts)}: cut points must not lie inside control "
                "flow"
            )
        return cls(training=training, evaluation=evaluation, way=way)


@contextlib.contextmanager
def mode_of(model: torch.nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model into a mode; a model in training mode keeps parts of it that are not."""
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
) -> Tape:
    """Run a forward on a microbatch and return what it did; buffers and generators are as before.

    Args:
        forward: the model.
        sample: the tensors that vary from microbatch to microbatch.
        run: runs in place of ``forward``, with the microbatch's entries as keywords.
        freeze: take what the forward reads from tensors as fixed.
    """
    recorder = _Recorder(forward.model, sample, freeze)
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
    """torch.export refused."""


class _Lossy(torch.nn.Module):
    """A model that returns nothing but its loss."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.model = forward.model
        self._forward = forward

    def forward(self, **batch: torch.Tensor) -> Any:
        return self._forward(batch)


def _exported(forward: Forward, sample: Mapping[str, torch.Tensor]) -> Tape:
    """Export a model, then record a run of what came out: that is its tape."""
    with undisturbed(forward.model, forward.device):
        try:
            exported = torch.export.export(_Lossy(forward), (), dict(sample), strict=False)
            module = exported.module()
        except Exception as error:  # of very many kinds
            raise _ExportError(str(error).strip().splitlines()[0][:200]) from error
    return _recorded(forward, sample, module)


def _loss_in(output: Any) -> Any:
    """Return the loss of a model's output: itself, its entry ``loss``, or its first element."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping) and isinstance(output.get("loss"), torch.Tensor):
        return output["loss"]
    if isinstance(getattr(output, "loss", None), torch.Tensor):
        return output.loss
    if isinstance(output, (tuple, list)) and output:
        return output[0]
    return output
