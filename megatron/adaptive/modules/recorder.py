"""Records the torch calls of a running model on a tape.

The recorder records the calls that the model itself makes, such as ``dropout``, ``layer_norm``,
``scaled_dot_product_attention`` or a custom ``autograd.Function``, and not the smaller operations
inside these calls. Therefore, a replay of the recording has the same gradients as the model.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType, MappingProxyType
from typing import Any

import numpy
import torch
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from megatron.adaptive.accelerator import default_generator
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.autocast_dtypes import RecordedAutocast
from megatron.adaptive.modules.cut_points import cut_points_of, mark
from megatron.adaptive.modules.host_memory import Constants, copied
from megatron.adaptive.modules.tape import Call, Ref, Tape, Value

# Functions that return the values of a tensor as Python objects, which the recorder cannot track.
READING = frozenset(
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
        "__dlpack__",
        "__contains__",
        "equal",
        "allclose",
        "is_nonzero",
    )
)
# Functions that register gradient hooks. A recording of such a call would not contain the code of
# the hook.
HOOKING = frozenset(("register_hook", "register_post_accumulate_grad_hook"))
# Name of torch's autograd function for activation checkpointing. The recorder calls the
# checkpointed function directly, in order to record the calls inside.
_RECOMPUTING = "CheckpointFunction"


class ReadsValueError(ConfigError):
    """Raised if the forward pass cannot be recorded, for example because it reads tensor values."""


@contextlib.contextmanager
def undisturbed(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Restores the model's buffers and the random generators of CPU and ``device`` on exit."""
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    tables = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for table, buffers in tables:
                table.clear()
                table.update(buffers)
            with torch.no_grad():
                for buffer, values in kept:
                    buffer.copy_(values)


@contextlib.contextmanager
def custom_functions(recorder: CallRecorder) -> Iterator[None]:
    """Passes calls of ``autograd.Function.apply`` to the recorder.

    Torch function modes do not see these calls.
    """
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


class _Captured(TorchFunctionMode):
    """Collects or replaces tensors that a function uses without receiving them as arguments.

    Args:
        is_known: Function that is called with a tensor, and returns whether to collect the tensor.
        replaced: Replacement tensors, keyed by the ``id()`` of the original tensors.

    Attributes:
        tensors: Collected tensors, keyed by their ``id()``.
    """

    def __init__(
        self,
        is_known: Callable[[torch.Tensor], bool] = lambda tensor: False,
        replaced: Mapping[int, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self._is_known = is_known
        self._replaced = replaced
        self.tensors: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments: Any = map_aggregate((args, kwargs or {}), self._replace)
        return func(*arguments[0], **arguments[1])

    def _replace(self, part: Any) -> Any:
        if isinstance(part, torch.Tensor) and self._is_known(part):
            self.tensors[id(part)] = part
        return self._replaced.get(id(part), part)


class MappedFunction:
    """Runs a function returned by ``torch.vmap``, with its captured tensors as an extra argument.

    Args:
        run: Function of torch that runs a mapped function.
        options: First arguments of ``run``: the mapped function, and the options of the mapping.
        modes: Torch function modes that were active around the call.
        captured: Tensors that the mapped function uses without receiving them as arguments.
    """

    __name__ = "vmap"

    def __init__(
        self,
        run: Callable[..., Any],
        options: Sequence[Any],
        modes: Sequence[TorchFunctionMode],
        captured: Iterable[torch.Tensor] = (),
    ) -> None:
        self._run = run
        self._options = options
        self._modes = modes
        # Keep the tensors alive, because Python may reuse the id() of a freed tensor.
        self._captured = tuple(captured)

    def __call__(self, captured: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """Runs the function with ``captured`` in place of the tensors that it captured before."""
        pairs = zip(self._captured, captured, strict=True)
        return self._call(_Captured(replaced={id(old): new for old, new in pairs}), args, kwargs)

    def captures(
        self, is_known: Callable[[torch.Tensor], bool], args: Any, kwargs: Any
    ) -> list[torch.Tensor]:
        """Runs the function with ``args`` and ``kwargs``, and returns the tensors that it captures.

        Only tensors for which ``is_known`` returns ``True`` are included.
        """
        mode = _Captured(is_known)
        self._call(mode, args, kwargs)
        return list(mode.tensors.values())

    def _call(self, mode: TorchFunctionMode, args: Any, kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch._C._EnableTorchFunction())
            for active in (*self._modes, mode):
                stack.enter_context(active)
            return self._run(*self._options, *args, **kwargs)


@contextlib.contextmanager
def mapped_functions(recorder: CallRecorder) -> Iterator[None]:
    """Passes calls of functions returned by ``torch.vmap`` to the recorder as single calls."""
    apis: Any = torch._functorch.apis
    original = apis.vmap_impl

    def run(*arguments: Any, **kwargs: Any) -> Any:
        if recorder.is_inside:
            return original(*arguments, **kwargs)
        return recorder.note_mapped(original, arguments[:5], arguments[5:], kwargs)

    apis.vmap_impl = run
    try:
        yield
    finally:
        apis.vmap_impl = original


@dataclass(frozen=True, slots=True)
class _Read:
    """Describes a line of Python code that reads the values of a tensor.

    Attributes:
        storages: Memory addresses of the tensor and of all tensors from which it was computed.
        code_line: File and line of the Python code.
    """

    storages: set[int]
    code_line: str


@dataclass(frozen=True, slots=True)
class _Attribute:
    """Describes an attribute of a module that was a tensor before the forward pass.

    Attributes:
        module: Module with the attribute.
        path: Name of the module in the model.
        key: Name of the attribute in the module.
        is_buffer: Whether the attribute is a buffer.
        tensor: Value of the attribute before the forward pass.
    """

    module: torch.nn.Module
    path: str
    key: str
    is_buffer: bool
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        """Returns the full name of the attribute in the model."""
        return f"{self.path}.{self.key}" if self.path else self.key

    @property
    def current(self) -> Any:
        """Returns the current value of the attribute."""
        table = self.module._buffers if self.is_buffer else vars(self.module)
        return table.get(self.key)


def _refuse_hooks(model: torch.nn.Module) -> None:
    """Raises ``ConfigError`` if a module of ``model`` has a backward hook."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise ConfigError(
                f"{name or type(module).__name__} has a backward hook, which would not run because "
                "stages replay recorded calls instead of calling modules; remove the hook, or "
                "change the gradient with an autograd.Function"
            )


def _refuse_side_effects(function: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` if a call of ``function`` has an effect that cannot be recorded.

    This is the case if the call registers a gradient hook, or draws random numbers from a separate
    generator. ``args`` and ``kwargs`` are the arguments of the call.
    """
    if getattr(function, "__name__", "") in HOOKING:
        raise ConfigError(
            f"{where()} registers a gradient hook, which cannot be recorded; change the gradient "
            "with an autograd.Function"
        )
    if any(isinstance(part, torch.Generator) for part in (*args, *kwargs.values())):
        raise ConfigError(
            f"{where()} draws random numbers from its own generator, so the numbers would depend "
            "on the order of microbatches; remove the generator, and pass a seed to Pipeline"
        )


class CallRecorder(TorchFunctionMode):
    """Records the torch calls of a model on a :class:`Tape`.

    Args:
        model: Model whose calls are recorded.
        inputs: Tensors of the microbatch, keyed by the name of the batch entry.
        freeze: Whether Python code may read the values of all tensors. The values are assumed to be
            the same in every microbatch. If ``False``, reading values is an error.
        decisive: Names of the inputs whose values Python code may always read, because the
            recording is used only for microbatches with the same values.
        may_miss: Whether the forward pass may skip cut points.
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
        cut_points = cut_points_of(model)
        self._cut_names = {id(cut_point): name for name, cut_point in cut_points.items()}
        self._optional = {name for name, cut_point in cut_points.items() if cut_point.is_optional}
        self._repeated: set[str] = set()
        _refuse_hooks(model)
        self._reads: list[_Read] = []
        self._attributes = [
            _Attribute(module, name, key, is_buffer, tensor)
            for name, module in model.named_modules()
            for is_buffer, table in ((True, module._buffers), (False, vars(module)))
            for key, tensor in table.items()
            if isinstance(tensor, torch.Tensor)
        ]
        self._arrays = [
            (f"{name}.{key}" if name else key, array)
            for name, module in model.named_modules()
            for key, array in vars(module).items()
            if isinstance(array, numpy.ndarray)
        ]
        self._constants = Constants()
        self._attribute_ids = {id(attribute.tensor) for attribute in self._attributes}
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
        self._autocast = RecordedAutocast(self.tape.device)
        self._watch_random_numbers()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_inside:
            return func(*args, **(kwargs or {}))
        if func in (mark, torch.ops.megatron_adaptive.mark.default):
            self._pass_cut(*args[1:])
            return args[0]
        return self.note(func, args, kwargs or {}, func)

    def note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Any) -> Any:
        """Runs a call, and records it if it creates or changes a tensor.

        ``function`` is the function to record, and ``run`` is an equivalent function to call.
        """
        tensors = [tensor for tensor, _ in tensor_paths((args, kwargs))]
        # Functions of torch.func compute with wrapped tensors. The results are unwrapped without a
        # call that could be recorded, so they would become constants with the values of this
        # microbatch.
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise ReadsValueError(
                f"{where()} runs inside a function of torch.func, but only vmap can be recorded; "
                "use operations on plain tensors there"
            )
        self._refuse_reading(function, tensors)
        _refuse_side_effects(function, args, kwargs)
        states = [(tensor._version, tensor.requires_grad) for tensor in tensors]
        # Copy lists and arrays, because the call may change them but replays need the original
        # values.
        arguments: Any = map_aggregate((args, kwargs), copied)
        self._watch_random_numbers()
        self.is_inside = True
        try:
            with torch._C.DisableTorchFunction():
                self._keep_constants(tensors)
                result = self._run(function, args, kwargs, run)
                result = self._autocast.adapt(run, arguments, result, self.tape.autocast)
        finally:
            self.is_inside = False
        changed = {
            id(tensor): tensor
            for tensor, state in zip(tensors, states, strict=True)
            if (tensor._version, tensor.requires_grad) != state
        }
        results = list(tensor_paths(result))
        if not (results or changed):
            return result
        reads: dict[int, None] = {}
        template: Any = map_aggregate(arguments, partial(self._refer, reads))
        made: dict[int, tuple[torch.Tensor, tuple[Any, ...]]] = {}
        for tensor, path in results:
            # Skip results that are already on the tape. They are arguments that the call returned.
            if id(tensor) not in self._numbers:
                made.setdefault(id(tensor), (tensor, path))
        if made or changed:
            self._write(function, template, reads, made.values(), changed.values())
        return result

    def _run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Any) -> Any:
        """Runs a call and returns its result.

        Args:
            function: Function to record on the tape.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            run: Function to call, equivalent to ``function``.
        """
        return run(*args, **kwargs)

    def _keep_constants(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copies those ``tensors`` that no recorded call created and that are not yet copied.

        Attributes of modules are not copied, because the forward pass must not change them.
        """
        for tensor in tensors:
            key = id(tensor)
            listed = (self._numbers, self._names, self._constants, self._attribute_ids)
            if not any(key in numbers for numbers in listed):
                self._constants.add(tensor, self._copy(tensor))

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone()

    def _watch_random_numbers(self) -> None:
        """Saves the states of the random generators.

        :meth:`_drew_random_numbers` compares these states with later states.
        """
        generators = [torch.default_generator]
        if self.tape.device.type == "cuda":
            generators.append(default_generator(self.tape.device))
        self._states = [(generator, generator.get_state()) for generator in generators]

    def _drew_random_numbers(self) -> bool:
        """Returns whether random numbers were drawn since the last :meth:`_watch_random_numbers`.

        The method compares the states of the generators of the CPU and of the model's device.
        """
        return any(
            not torch.equal(generator.get_state(), state) for generator, state in self._states
        )

    def note_mapped(
        self, run: Any, options: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a function returned by ``torch.vmap``, and records it as one call.

        Args:
            run: Function of torch that runs a mapped function.
            options: First arguments of ``run``: the mapped function, and the options of the
                mapping.
            args: Positional arguments of the mapped function.
            kwargs: Keyword arguments of the mapped function.
        """
        stack = _get_current_function_mode_stack()
        modes = stack[stack.index(self) + 1 :]

        def is_known(tensor: torch.Tensor) -> bool:
            return id(tensor) in self._numbers or id(tensor) in self._names

        self.is_inside = True
        try:
            captured = MappedFunction(run, options, modes).captures(is_known, args, kwargs)
        finally:
            self.is_inside = False
        function = MappedFunction(run, options, modes, captured)
        return self.note(function, (captured, *args), kwargs, function)

    def _write(
        self,
        function: Any,
        template: Any,
        reads: Iterable[int],
        made: Iterable[tuple[torch.Tensor, tuple[Any, ...]]],
        changed: Iterable[torch.Tensor],
    ) -> None:
        """Adds a call to the tape.

        Args:
            function: Function that was called.
            template: Arguments of the call, with a :class:`Ref` in place of each tensor.
            reads: Tape indices of the tensors in the arguments.
            made: New tensors, each with its path (indices and keys) in the call's result.
            changed: Arguments that the call changed in place.
        """
        tape = self.tape
        is_random = self._drew_random_numbers()
        varies = is_random or any(tape.values[read].varies for read in reads)
        number = len(tape.calls)
        outputs = [
            (self._add(tensor, made_by=number, varies=varies), path) for tensor, path in made
        ]
        changes = []
        for tensor in changed:
            old = self._numbers[id(tensor)]
            value = tape.values[old]
            name = self._parameter_of(value)
            if name:
                raise ConfigError(
                    f"{where()} changes parameter {name} in the forward pass; only buffers may "
                    "change there"
                )
            if value.source == "buffer":
                # A buffer keeps its index on the tape when it changes, because a stage looks up
                # buffers by name.
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
                autocast=self._autocast.dtype(tape.autocast),
            )
        )

    def _refer(self, reads: dict[int, None], argument: Any) -> Any:
        """Replaces a tensor with a :class:`Ref`, and adds the tensor's tape index to ``reads``.

        Returns any other ``argument`` unchanged.
        """
        if not isinstance(argument, torch.Tensor):
            return argument
        number = self._numbers.get(id(argument))
        if number is None:
            number = self._source(argument)
        reads[number] = None
        return Ref(number)

    def _source(self, tensor: torch.Tensor) -> int:
        """Adds ``tensor``, which no recorded call created, to the tape, and returns its index."""
        source, name = self._names.get(id(tensor), ("constant", ""))
        if source == "constant" and tensor.requires_grad:
            raise ConfigError(
                f"{where()} uses a tensor of shape {list(tensor.shape)} that requires a gradient "
                "but is not a parameter of the model; register it with a module as a parameter"
            )
        return self._add(
            tensor,
            source=source,
            name=name,
            tensor=self._constants.copy_of(tensor) if source == "constant" else None,
            varies=source == "parameter",
        )

    def _add(self, tensor: torch.Tensor, /, **facts: Any) -> int:
        number = len(self.tape.values)
        self.tape.values.append(
            Value(
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                requires_grad=tensor.requires_grad,
                storage=self._storage(tensor),
                **facts,
            )
        )
        self._numbers[id(tensor)] = number
        self._kept.append(tensor)
        return number

    def _storage(self, tensor: torch.Tensor) -> int:
        """Returns the address of a tensor's memory, or 0 if the tensor has no storage."""
        try:
            return tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):
            # Sparse tensors have no storage, and raise an error.
            return 0

    def _parameter_of(self, value: Value) -> str:
        """Returns the name of a parameter that shares memory with ``value``, or an empty string."""
        if value.source == "parameter":
            return value.name
        storages = (
            other.name
            for other in self.tape.values
            if other.source == "parameter" and other.storage == value.storage != 0
        )
        return next(storages, "")

    def _pass_cut(self, cut_point: int, passing: int) -> None:
        """Records that the forward pass reached the cut point whose ``id()`` is ``cut_point``.

        ``passing`` is the number of cut-point calls in this process before this call.
        """
        # An exported module calls a cut point once for each of its tensors. Count only the first of
        # these calls.
        if passing == self._passing:
            return
        self._passing = passing
        name = self._cut_names.get(cut_point)
        if name is None:
            raise ConfigError(
                f"{where()} calls a CutPoint that is not a module of the model; create it in "
                "__init__ and store it as an attribute"
            )
        if name in self.tape.cuts and name in self._optional:
            self._repeated.add(name)
            return
        if name in self.tape.cuts:
            raise ConfigError(
                f"cut point {name} is called twice in one forward pass ({where()}); use a "
                "separate CutPoint for each call"
            )
        self.tape.cuts.append(name)

    def _refuse_reading(self, function: Any, tensors: list[torch.Tensor]) -> None:
        """Raises ``ReadsValueError`` if ``function`` reads values that vary between microbatches.

        ``tensors`` contains the tensors in the arguments of the call.
        """
        name = getattr(function, "__name__", "")
        if name not in READING or is_checking():
            return
        self._reads.extend(_Read(self._sources_of(tensor), where()) for tensor in tensors)
        for tensor in tensors if not self._freeze else ():
            number = self._numbers.get(id(tensor))
            is_parameter = self._names.get(id(tensor), ("", ""))[0] == "parameter"
            if is_parameter or (number is not None and self.tape.values[number].varies):
                raise ReadsValueError(
                    f"{where()} reads the values of a tensor ({name}), so later calls may differ "
                    "between microbatches; use operations on tensors there, keep cut points out "
                    "of branches on these values, add the batch entry that determines the values "
                    'to decisive_entries, or set slicing="record" if the values are equal for all '
                    "microbatches"
                )

    def _sources_of(self, tensor: torch.Tensor) -> set[int]:
        """Returns the memory addresses of ``tensor`` and of all tensors that it depends on."""
        waiting = [self._numbers[id(tensor)]] if id(tensor) in self._numbers else []
        storages = {self._storage(tensor)}
        seen: set[int] = set()
        while waiting:
            number = waiting.pop()
            if number not in seen:
                seen.add(number)
                value = self.tape.values[number]
                storages.add(value.storage)
                if value.made_by >= 0:
                    waiting.extend(self.tape.calls[value.made_by].reads)
        return storages - {0}

    def note_buffers(self) -> None:
        """Stores on the tape the names of the buffers whose values Python code has read."""
        storages = {storage for read in self._reads for storage in read.storages}
        self.tape.read_buffers = {
            attribute.name
            for attribute in self._attributes
            if attribute.is_buffer and self._storage(attribute.tensor) in storages
        }

    def check_reads(self) -> None:
        """Checks that the forward pass does not change a buffer whose values Python code has read.

        Raises:
            ReadsValueError: If the forward pass changes such a buffer, so that the values differ
                between microbatches.
        """
        tape = self.tape
        changed = {tape.values[old].storage for call in tape.calls for old, _ in call.changes}
        for read in self._reads:
            for attribute in self._attributes:
                storage = self._storage(attribute.tensor)
                if attribute.is_buffer and storage in changed & read.storages:
                    raise ReadsValueError(
                        f"{read.code_line} reads the values of buffer {attribute.name}, which "
                        "the forward pass changes; use operations on tensors there, or set "
                        'slicing="record" if the values are equal for all microbatches'
                    )

    def check_attributes(self) -> None:
        """Checks that no module attribute carries a tensor from one microbatch to the next.

        Raises:
            ConfigError: If the forward pass assigns a new tensor to an attribute that it uses, or
                changes in place a tensor attribute that is not a buffer.
        """
        tape = self.tape
        changed = {tape.values[old].storage for call in tape.calls for old, _ in call.changes}
        buffers = (attribute.tensor for attribute in self._attributes if attribute.is_buffer)
        changed -= {0, *map(self._storage, buffers)}
        places = [(each.name, self._storage(each.tensor)) for each in self._attributes]
        places += [(name, array.ctypes.data) for name, array in self._arrays]
        for name, storage in places:
            if storage in changed:
                raise ConfigError(
                    f"the forward pass changes {name}, which is not a buffer, so the "
                    "change cannot be recorded; register it with register_buffer"
                )
        self._check_constants()
        for attribute in self._attributes:
            tensor = attribute.current
            number = self._numbers.get(id(tensor))
            is_used = attribute.is_buffer or id(attribute.tensor) in self._numbers
            if tensor is attribute.tensor or number is None or not is_used:
                continue
            old = self._storage(attribute.tensor)
            if self.tape.values[number].varies or old in self._sources_of(tensor):
                raise ConfigError(
                    f"the forward pass assigns another tensor to {attribute.name}, which cannot "
                    "be recorded; register it with a module as a buffer, and change it in place "
                    "with copy_"
                )

    def _check_constants(self) -> None:
        """Raises ``ConfigError`` if the forward pass changes memory that two constants share.

        In a replay, a stage changes only a copy of one constant, so the change would not affect the
        other constant.
        """
        tape = self.tape
        changed = {tape.values[old].storage for call in tape.calls for old, _ in call.changes}
        sources: dict[int, list[Value]] = {}
        for value in tape.values:
            if value.source and value.storage in changed - {0}:
                sources.setdefault(value.storage, []).append(value)
        for sharing in sources.values():
            if len(sharing) > 1 and all(value.source == "constant" for value in sharing):
                raise ConfigError(
                    f"the forward pass changes a tensor of shape {list(sharing[0].shape)} in place "
                    "that shares memory with another tensor, so the change cannot be recorded; "
                    "use an out-of-place operation"
                )

    def finish(self, loss: Any) -> None:
        """Checks the recorded forward pass, and stores the index of ``loss`` on the tape."""
        required = [name for name in self._cut_names.values() if name not in self._optional]
        missed = [name for name in required if name not in self.tape.cuts]
        if missed and not self._may_miss:
            raise ConfigError(
                f"the forward pass of the sample_batch does not call cut point {missed[0]}"
                f"{f' and {len(missed) - 1} others' if len(missed) > 1 else ''}; move cut points "
                "out of control flow, or remove those that are not called"
            )
        number = self._numbers.get(id(loss))
        if number is None or loss.dim() or not loss.is_floating_point():
            shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(
                f"the loss must be a floating-point scalar computed from the batch, got {shape}; "
                "return such a loss from forward, or pass loss=function(output, batch)"
            )
        self.tape.loss = number
        self.tape.remove_cuts(self._repeated)
        shared = self._constants.shared()
        for value in self.tape.values:
            value.tensor = shared.get(id(value.tensor), value.tensor)
        self._constants.clear()
        self._kept.clear()


def tensor_paths(
    structure: Any, path: tuple[Any, ...] = ()
) -> Iterator[tuple[torch.Tensor, tuple[Any, ...]]]:
    """Yields the tensors in ``structure``, each with its path of indices and keys.

    ``structure`` may be a nested container, and ``path`` is the path of ``structure`` itself.
    """
    if isinstance(structure, torch.Tensor):
        yield structure, path
    elif isinstance(structure, (tuple, list)):
        for number, part in enumerate(structure):
            yield from tensor_paths(part, (*path, number))
    elif isinstance(structure, dict):
        for name, part in structure.items():
            yield from tensor_paths(part, (*path, name))


def is_checking() -> bool:
    """Returns whether the current code runs inside ``torch._check`` or a similar function.

    Such functions read a value only to decide whether to raise an error.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch" and frame.f_code.co_name.startswith("_check"):
            return True
        frame = frame.f_back
    return False


def where() -> str:
    """Returns the current file and line in the user's code, for use in error messages."""
    for frame in reversed(traceback.extract_stack()):
        plain = frame.filename.replace("\\", "/")
        if "/torch/" not in plain and "/megatron/adaptive/" not in plain:
            return f"{plain.rsplit('/', 1)[-1]}:{frame.lineno} ({frame.name})"
    return "the model"
