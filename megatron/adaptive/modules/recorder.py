"""Records a forward by running it: every call of torch goes through one place.

A call is seen as the model makes it (``dropout``, ``layer_norm``, ``scaled_dot_product_attention``,
a custom ``autograd.Function``), so that its replay is differentiated as the model would be. Python
between calls is not seen: what it decided for the sample stays decided. Decisions by shape or
training mode hold for every microbatch. Decisions by value do not, and a forward that reads values
of tensors which vary is refused with the line that does so.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.cut_point import CutPoint, mark
from megatron.adaptive.modules.tape import Call, Ref, Tape, Value, fill, refs_in

__all__ = ["ReadsValueError", "record", "undisturbed"]

# Functions that tell Python what is in a tensor.
_READING = frozenset(
    ("item __bool__ __int__ __float__ __complex__ __index__ tolist numpy __array__ __contains__ "
     "equal allclose is_nonzero").split()
)  # fmt: skip
_RECOMPUTING = "CheckpointFunction"  # runs its function in another pass, which is not wanted here


class ReadsValueError(ConfigError):
    """The forward decides by what is in a tensor."""


def record(
    model: torch.nn.Module,
    inputs: Mapping[str, torch.Tensor],
    run: Callable[[], Any],
    *,
    marks: Callable[[torch.nn.Module], bool] = lambda module: isinstance(module, CutPoint),
    freeze: bool = False,
) -> Tape:
    """Run a forward and return what it did.

    Buffers and random generators are left as they were.

    Args:
        model: whose parameters and buffers are used.
        inputs: the tensors that vary from microbatch to microbatch.
        run: runs the forward on ``inputs`` and returns the loss.
        marks: tells which modules are cut points.
        freeze: take what the forward reads from tensors as fixed.

    Raises:
        ReadsValueError: the forward reads values that vary.
        ConfigError: a cut point is passed twice or not at all, or the loss is no scalar.
    """
    recorder = _Recorder(model, inputs, marks, freeze)
    with undisturbed(model, recorder.tape.device), _custom_functions(recorder), recorder:
        loss = run()
    recorder.finish(loss)
    return recorder.tape


@contextlib.contextmanager
def undisturbed(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Leave the model's buffers and the generators of host and ``device`` as they were."""
    kept = {name: one.detach().clone() for name, one in model.named_buffers()}
    generators = _generators(device)
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        with torch.no_grad():
            for name, one in model.named_buffers():
                if name in kept:
                    one.copy_(kept[name])
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _generators(device: torch.device) -> list[torch.Generator]:
    found = [torch.default_generator]
    if device.type == "cuda":
        found.append(torch.cuda.default_generators[device.index or 0])
    return found


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
        self,
        model: torch.nn.Module,
        inputs: Mapping[str, torch.Tensor],
        marks: Callable[[torch.nn.Module], bool],
        freeze: bool,
    ) -> None:
        super().__init__()
        self.is_inside = False
        self.tape = Tape()
        self._freeze = freeze
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # so that no id is used twice
        self._cut_names = {id(one): name for name, one in model.named_modules() if marks(one)}
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
        self._generators = _generators(self.tape.device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is mark:
            self._pass_cut(args[1])
            return args[0]
        return self.note(func, args, kwargs or {}, func)

    def note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Any) -> Any:
        """Run a call and write it down where it makes or changes a tensor."""
        given = list(_tensors((args, kwargs)))
        self._refuse_reading(function, given)
        versions = [one._version for one in given]
        before = [generator.get_state() for generator in self._generators]
        self.is_inside = True
        try:
            with torch._C.DisableTorchFunction():
                result = run(*args, **kwargs)
        finally:
            self.is_inside = False
        changed = [
            one for one, version in zip(given, versions, strict=True) if one._version != version
        ]
        results = list(_paths(result))
        if results or changed:
            template = fill((args, kwargs), self._leaf)
            # What returns its argument has made nothing.
            made = [(one, path) for one, path in results if id(one) not in self._numbers]
            if made or changed:
                self._write(function, template, made, _distinct(changed), before)
        return result

    def _write(
        self,
        function: Any,
        template: Any,
        made: list[tuple[torch.Tensor, tuple[Any, ...]]],
        changed: list[torch.Tensor],
        before: list[torch.Tensor],
    ) -> None:
        tape = self.tape
        reads = tuple(dict.fromkeys(refs_in(template)))
        is_random = any(
            not torch.equal(generator.get_state(), state)
            for generator, state in zip(self._generators, before, strict=True)
        )
        varies = is_random or any(tape.values[one].varies for one in reads)
        number = len(tape.calls)
        outputs = [
            (self._add(one, made_by=number, varies=varies), path) for one, path in _once(made)
        ]
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
                reads=reads,
                outputs=tuple(outputs),
                changes=tuple(changes),
                segment=len(tape.cuts),
                is_random=is_random,
                with_grad=torch.is_grad_enabled(),
                autocast=_autocast(tape.device.type),
            )
        )

    def _leaf(self, one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        number = self._numbers.get(id(one))
        return Ref(self._source(one) if number is None else number)

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

    def _pass_cut(self, cut_point: torch.nn.Module) -> None:
        name = self._cut_names.get(id(cut_point))
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
        self.tape.loss_value = float(loss.detach())
        self._kept.clear()


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    for one, _ in _paths(given):
        yield one


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


def _once(
    made: list[tuple[torch.Tensor, tuple[Any, ...]]],
) -> Iterator[tuple[torch.Tensor, tuple[Any, ...]]]:
    seen: set[int] = set()
    for one, path in made:
        if id(one) not in seen:
            seen.add(id(one))
            yield one, path


def _distinct(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(one): one for one in tensors}.values())


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors and the like
        return 0


def _autocast(device_type: str) -> torch.dtype | None:
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _where() -> str:
    """Return file and line of the model's code that is running."""
    for frame in reversed(traceback.extract_stack()):
        plain = frame.filename.replace("\\", "/")
        if "/torch/" not in plain and "/megatron/adaptive/" not in plain:
            return f"{plain.rsplit('/', 1)[-1]}:{frame.lineno} ({frame.name})"
    return "the model"
