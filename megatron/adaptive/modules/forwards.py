"""The two forwards of a model as tapes: in training and in evaluation."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.cut_point import CutPoint
from megatron.adaptive.modules.recorder import ReadsValueError, record, undisturbed
from megatron.adaptive.modules.tape import Tape

__all__ = ["PRECISIONS", "SLICINGS", "Forward", "Forwards", "Slicing"]

Slicing = Literal["auto", "record", "export"]
SLICINGS = ("auto", "record", "export")
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Mixed precisions by their name."""

Loss = Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Forward:
    """How a model makes a loss of a microbatch.

    Attributes:
        model: the model.
        loss: makes the loss of its output and the batch; ``None`` where the model gives it.
        arguments: further keyword arguments of its forward.
        autocast: element type of matrix products under mixed precision.
    """

    model: torch.nn.Module
    loss: Loss | None
    arguments: Mapping[str, Any]
    autocast: torch.dtype | None

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> Any:
        """Return the loss of a microbatch."""
        given = {name: one for name, one in batch.items() if self._takes(name)}
        output = self.model(**given, **self.arguments)
        return self.loss(output, batch) if self.loss is not None else _loss_in(output)

    def _takes(self, name: str) -> bool:
        """Whether an entry of the batch goes to the model; the loss function gets them all."""
        if self.loss is None:
            return True
        known = inspect.signature(self.model.forward).parameters
        return name in known or any(one.kind is one.VAR_KEYWORD for one in known.values())

    @property
    def device(self) -> torch.device:
        """Where the model's first parameter is."""
        first = next(self.model.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def under_autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of mixed precision."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)


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
        if slicing not in SLICINGS:
            raise ConfigError(f"slicing {slicing!r}: choose one of {', '.join(SLICINGS)}")
        if slicing == "export":
            return cls._both(forward, sample, _exported, "export")
        try:
            freeze = slicing == "record"
            return cls._both(forward, sample, lambda f, s: _recorded(f, s, freeze=freeze), "record")
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
        with _mode(forward.model, training=True), torch.enable_grad():
            training = take(forward, sample)
        with _mode(forward.model, training=False), torch.no_grad():
            evaluation = take(forward, sample)
        if training.cuts != evaluation.cuts:
            raise ConfigError(
                f"in training the forward passes the cut points {', '.join(training.cuts)}, in "
                f"evaluation {', '.join(evaluation.cuts)}: cut points must not lie inside control "
                "flow"
            )
        return cls(training=training, evaluation=evaluation, way=way)


@contextlib.contextmanager
def _mode(model: torch.nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model into a mode; a model in training mode keeps parts of it that are not."""
    before = [(module, module.training) for module in model.modules()]
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


def _recorded(forward: Forward, sample: Mapping[str, torch.Tensor], *, freeze: bool) -> Tape:
    with forward.under_autocast():
        return record(forward.model, sample, lambda: forward(sample), freeze=freeze)


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
    cuts = {f"model.{n}": m for n, m in forward.model.named_modules() if isinstance(m, CutPoint)}
    with undisturbed(forward.model, forward.device):
        try:
            exported = torch.export.export(_Lossy(forward), (), dict(sample), strict=False)
            module = exported.module()
        except Exception as error:  # of very many kinds
            raise _ExportError(str(error).strip().splitlines()[0][:200]) from error
    _mark_cuts(module, cuts)
    with forward.under_autocast():
        return record(forward.model, sample, lambda: module(**sample))


def _mark_cuts(module: Any, cuts: Mapping[str, torch.nn.Module]) -> None:
    """Have the graph call ``mark`` where the model called its cut points."""
    seen: set[str] = set()
    calls: dict[str, int] = {}
    for node in list(module.graph.nodes):
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        path = stack[-1][0].split("@")[0] if stack else ""
        if path not in cuts or node.target is not torch.ops.aten.clone.default:
            continue
        times = len(stack[-1][0].split("@"))
        if path in seen and calls[path] == times:
            continue
        seen.add(path)
        calls[path] = times
        node.target, node.args, node.kwargs = _Marker(cuts[path]), (node.args[0],), {}
    module.recompile()


class _Marker:
    """A function for a graph that marks one cut point."""

    __name__ = __qualname__ = "cut_point"
    __module__ = __name__

    def __init__(self, cut_point: torch.nn.Module) -> None:
        self._cut_point = cut_point

    def __call__(self, given: torch.Tensor) -> Any:
        from megatron.adaptive.modules.cut_point import mark

        return mark(given, self._cut_point)


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
