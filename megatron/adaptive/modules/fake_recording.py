"""Records the forward pass of a model on the ``meta`` device without allocating its parameters.

::

    parameters, buffers, microbatch ──replaced by fakes──> forward ──FakeRecorder──> Tape

A fake (torch's ``FakeTensor``) has a shape, a dtype and a device, but no memory and no data. Torch
calls on fakes compute only the shapes of results. If a call needs data, for example to choose a
branch or a shape, the recorder computes the data by running the recorded calls that produce it on
real tensors. This works unless the data depend on parameters or on random numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.host_memory import copied
from megatron.adaptive.modules.recorder import (
    READING,
    CallRecorder,
    ReadsValueError,
    is_checking,
    tensor_paths,
    where,
)
from megatron.adaptive.modules.tape import Call, Ref, Tape

# Names of the dropout-rate parameters of torch operations. An operation with a dropout rate of 0
# draws no random numbers.
_PROBABILITIES = ("dropout_p", "dropout")


def is_on_meta(model: torch.nn.Module) -> bool:
    """Returns whether any parameter or buffer of a model is on the ``meta`` device."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


# torch releases before 2.8 do not have this operation.
_GROUPED_MM: Any = getattr(getattr(torch.ops.aten, "_grouped_mm", None), "default", None)


class Fakes:
    """Replaces the tensors of a model and of a microbatch with fake tensors on one device.

    A fake tensor has a shape and a dtype, but no memory.

    Args:
        model: Model with parameters or buffers on the ``meta`` device.
        sample: Tensors of the microbatch, keyed by name. The fakes use the device of these tensors.

    Attributes:
        device: Device of the fakes.
        sample: Fakes of the microbatch's tensors, keyed by name.
        mode: ``FakeTensorMode`` in which torch calls accept fakes.
        values: Real tensors of the microbatch and real buffers of the model. Each key is a pair of
            a kind (``input`` or ``buffer``) and the tensor's name. Buffers on the ``meta`` device
            are not included.
    """

    def __init__(self, model: torch.nn.Module, sample: Mapping[str, torch.Tensor]) -> None:
        self._model = model
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.device = next(iter(sample.values())).device
        self.sample = {name: self.fake(tensor) for name, tensor in sample.items()}
        self.values = {("input", name): tensor for name, tensor in sample.items()}
        for name, buffer in model.named_buffers():
            if not buffer.is_meta:
                self.values["buffer", name] = buffer

    def fake_of(self, value: Any) -> Any:
        """Returns a fake of ``value`` if it is a tensor; otherwise ``value`` itself."""
        return self.fake(value) if isinstance(value, torch.Tensor) else value

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a fake of ``tensor``. The fake of a parameter is also a parameter."""
        with self.mode:
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device
            )
            if isinstance(tensor, torch.nn.Parameter):
                return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
            return fake.requires_grad_(tensor.requires_grad)

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """Replaces the model's tensors with fakes and activates ``mode``; undoes both on exit."""
        fakes: dict[int, torch.Tensor] = {}
        tables = [
            (module, table, dict(table))
            for module in self._model.modules()
            for table in (module._parameters, module._buffers)
        ]
        try:
            for module, _, tensors in tables:
                for name, tensor in tensors.items():
                    if tensor is not None:
                        fake = fakes.get(id(tensor))
                        if fake is None:
                            fake = fakes[id(tensor)] = self.fake(tensor)
                        # Use setattr(), so that recurrent layers also update their own lists of
                        # weights.
                        setattr(module, name, fake)
            with self.mode:
                yield
        finally:
            for module, table, tensors in tables:
                table.clear()
                for name, tensor in tensors.items():
                    table[name] = None
                    setattr(module, name, tensor)


class _Operations(TorchDispatchMode):
    """Runs operations on fakes, and records whether any of them draws random numbers.

    Attributes:
        is_random: Whether an operation has drawn random numbers since this attribute was reset to
            ``False``.
    """

    is_random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _drops(func, args, kwargs):
            self.is_random = True
        if func is _GROUPED_MM and args[0].dtype != torch.bfloat16:
            # This operation accepts only bfloat16 if tensors are fake, although its CPU kernel also
            # accepts other dtypes.
            result = func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **kwargs)
            return result.to(args[0].dtype)
        return func(*args, **kwargs)


def _drops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether the random operation ``func`` draws random numbers for these arguments.

    Dropout with a rate of 0 does not draw random numbers.
    """
    for index, parameter in enumerate(func._schema.arguments):
        if parameter.name in _PROBABILITIES:
            by_place: float = args[index] if index < len(args) else parameter.default_value
            probability: float = kwargs.get(parameter.name, by_place)
            return probability > 0
    return True


class FakeRecorder(CallRecorder):
    """Records the torch calls of a model whose tensors are fakes.

    Args:
        model: Model whose tensors are replaced with fakes by :meth:`Fakes.in_model`.
        inputs: Fakes of the microbatch's tensors, keyed by the name of the batch entry.
        freeze: Whether Python code may read the values of all tensors. The values are assumed to be
            the same in every microbatch. If ``False``, reading values is an error.
        decisive: Names of the inputs whose values Python code may always read, because the
            recording is used only for microbatches with the same values.
        fakes: Fakes of the model and of the microbatch.
        may_miss: Whether the forward pass may skip cut points.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inputs: Mapping[str, torch.Tensor],
        freeze: bool,
        decisive: Sequence[str] = (),
        *,
        fakes: Fakes,
        may_miss: bool = False,
    ) -> None:
        self._operations = _Operations()  # type: ignore[no-untyped-call]  # torch's class has no type hints
        self._fakes = fakes
        super().__init__(model, inputs, freeze, decisive, may_miss=may_miss)

    def _watch_random_numbers(self) -> None:
        self._operations.is_random = False

    def _drew_random_numbers(self) -> bool:
        return self._operations.is_random

    def _storage(self, tensor: torch.Tensor) -> int:
        # Fake tensors have no memory, so identify the storage by the address of the storage object,
        # which a fake shares with its views.
        if isinstance(tensor, FakeTensor):
            storage: int = tensor.untyped_storage()._cdata
            return storage
        return super()._storage(tensor)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        with unset_fake_temporarily():
            return super()._copy(tensor)

    def _run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Any) -> Any:
        for tensor, _ in tensor_paths((args, kwargs)):
            if tensor.is_meta and id(tensor) not in self._names:
                self._refuse_constant(tensor)
        if getattr(function, "__name__", "") in READING:
            return self._run_with_values(args, kwargs, run)
        if function is torch.tensor and any(True for _ in tensor_paths(args)):
            # torch.tensor() reads the values of tensors in its argument, so it needs real tensors.
            return self._fakes.fake_of(self._run_with_values(args, kwargs, run))
        try:
            with self._operations:
                return run(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            # The shape of an indexing result depends on the values of the index, but not on those
            # of the indexed tensor.
            indexed = args[0] if function is torch.Tensor.__getitem__ else None
            result = self._run_with_values(args, kwargs, run, indexed)
            return map_aggregate(result, self._fakes.fake_of)

    def _number_of(self, tensor: torch.Tensor) -> int:
        """Returns the tape index of ``tensor``, or -1 if the tensor is unknown.

        If ``tensor`` is a parameter or buffer that the tape does not contain yet, this method adds
        the tensor to the tape.
        """
        if id(tensor) not in self._numbers and id(tensor) in self._names:
            return self._source(tensor)
        return self._numbers.get(id(tensor), -1)

    def _source(self, tensor: torch.Tensor) -> int:
        if isinstance(tensor, FakeTensor) and id(tensor) not in self._names:
            self._refuse_constant(tensor)
        return super()._source(tensor)

    def _refuse_constant(self, tensor: torch.Tensor) -> None:
        """Raises ``ConfigError`` for a tensor that has no data and is not part of the model."""
        raise ConfigError(
            f"{where()} uses a tensor of shape {list(tensor.shape)} that has no data and is "
            "neither a parameter nor a buffer of the model; register it with a module, or build "
            "the model with its weights"
        )

    def _run_with_values(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Any,
        unread: torch.Tensor | None = None,
    ) -> Any:
        """Runs a call on real tensors instead of fakes, and returns its result.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            run: Function to call.
            unread: Fake whose values do not affect the result, so that zeros can replace them;
                ``None`` if the values of all fakes matter.
        """
        fakes = [
            tensor
            for tensor, _ in tensor_paths((args, kwargs))
            if isinstance(tensor, FakeTensor) and tensor is not unread
        ]
        numbers = [self._number_of(fake) for fake in fakes]
        values = None if -1 in numbers else values_on(self.tape, numbers, self._fakes.values)
        if values is None and is_checking():
            return True
        if values is None:
            raise ReadsValueError(
                f"{where()} needs the values of a tensor that depends on parameters, but parameters"
                " on the meta device have no values; avoid operations there whose result shapes or"
                " branches depend on values, or build the model with its weights"
            )
        by_id = {id(fake): values[number] for fake, number in zip(fakes, numbers, strict=True)}
        if unread is not None:
            with unset_fake_temporarily():
                zero = torch.zeros((), dtype=unread.dtype, device=self._fakes.device)
                by_id[id(unread)] = zero.expand(unread.shape)
        real: Any = map_aggregate((args, kwargs), lambda part: by_id.get(id(part), part))
        with unset_fake_temporarily(), torch.no_grad():
            return run(*real[0], **real[1])


def values_on(
    tape: Tape, numbers: Iterable[int], sources: Mapping[tuple[str, str], torch.Tensor]
) -> dict[int, torch.Tensor] | None:
    """Computes the values of recorded tensors by running the calls that produce them.

    Args:
        tape: Recorded part of the forward pass.
        numbers: Tape indices of the tensors to compute.
        sources: Real inputs and buffers. Each key is a pair of a kind (``input`` or ``buffer``) and
            a name.

    Returns:
        Computed tensors, keyed by tape index, or ``None`` if a tensor depends on a parameter or on
            random numbers.
    """
    calls = _calls_for(tape, numbers)
    if any(call.is_random for call in calls):
        return None
    env: dict[int, torch.Tensor] = {}
    with unset_fake_temporarily(), torch.no_grad():
        for number in {*numbers, *(read for call in calls for read in call.reads)}:
            value = tape.values[number]
            if value.source:
                tensor = value.tensor
                if tensor is None:
                    tensor = sources.get((value.source, value.name))
                if tensor is None:
                    return None
                env[number] = tensor.detach().clone()
        for call in calls:
            _run_call(call, env, tape.device)
    return {number: env[number] for number in numbers}


def _calls_for(tape: Tape, numbers: Iterable[int]) -> list[Call]:
    """Returns the calls that compute or change the tensors with the indices ``numbers``.

    The calls have the same order as in ``tape``, the recorded forward pass.
    """
    needed = set(numbers)
    memory = {tape.values[number].storage for number in needed} - {0}
    calls = []
    for call in reversed(tape.calls):
        made = {number for number, _ in call.outputs} | {new for _, new in call.changes}
        changed = {tape.values[old].storage for old, _ in call.changes}
        if made & needed or changed & memory:
            calls.append(call)
            needed.update(call.reads)
            memory |= {tape.values[read].storage for read in call.reads} - {0}
    return calls[::-1]


def _run_call(call: Call, env: dict[int, torch.Tensor], device: torch.device) -> None:
    """Runs a recorded call on the tensors in ``env``, and stores the results in ``env``.

    Autocast on ``device`` is set as it was when the call was recorded.
    """
    arguments: Any = map_aggregate(
        (call.args, call.kwargs),
        lambda part: env[part.value] if isinstance(part, Ref) else copied(part),
    )
    with torch.autocast(device.type, dtype=call.autocast, enabled=call.autocast is not None):
        result = call.function(*arguments[0], **arguments[1])
    for number, path in call.outputs:
        part = result
        for key in path:
            part = part[key]
        env[number] = part
    for old, new in call.changes:
        env[new] = env[old]
