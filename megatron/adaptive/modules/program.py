"""Runs the calls of one stage for one microbatch."""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron.adaptive.engine.weight_gradient import WeightGradientStore
from megatron.adaptive.modules.deferred import deferred_call
from megatron.adaptive.modules.messages import Layout
from megatron.adaptive.modules.slices import StagePlan
from megatron.adaptive.modules.tape import Call, Ref, Tape, fill

__all__ = ["RandomKey", "StageProgram"]


class RandomKey:
    """Seeds the generator of the device from where and when a number is drawn.

    So neither the order of work nor the cut into stages changes a random number, nor do replicas
    that share a batch one after the other.

    Args:
        seed: the run's seed.
        dp_rank: the replica; each has numbers of its own.
        device: whose generator is used.

    Attributes:
        seed: as given; another one counts from the next number on.
        step: of the training.
        count: microbatches of a replica in this step.
    """

    def __init__(self, seed: int, dp_rank: int, device: torch.device) -> None:
        self.seed = seed
        self._dp_rank = dp_rank
        self.generator = torch.default_generator
        if device.type == "cuda":
            self.generator = torch.cuda.default_generators[device.index or 0]
        self.step = 0
        self.count = 0

    def apply(self, microbatch: int, call: int) -> None:
        """Set the generator for one call of one microbatch."""
        number = self._dp_rank * self.count + microbatch
        place = struct.pack("<qqqq", self.seed, self.step, number, call)
        digest = hashlib.blake2b(place, digest_size=8).digest()
        self.generator.manual_seed(int.from_bytes(digest, "little"))


class _Step:
    """One call, prepared: what it reads is put into its arguments, what it makes is taken out."""

    __slots__ = ("_args", "_call", "_flat", "_kwargs", "drops", "layer", "number")

    def __init__(self, call: Call, number: int, drops: Sequence[int], tape: Tape) -> None:
        self._call = call
        self._flat = not call.kwargs and all(
            type(one) is Ref or not isinstance(one, (tuple, list, dict, slice)) for one in call.args
        )
        self._args, self._kwargs = call.args, call.kwargs
        self.number = number
        self.drops = tuple(drops)
        self.layer = deferred_call(call, tape)

    def move(self, source: torch.device, target: torch.device) -> None:
        """Take devices among the arguments for ``target`` where they say ``source``."""

        def leaf(one: Any) -> Any:
            if isinstance(one, torch.device):
                return target if one.type == source.type else one
            return str(target) if isinstance(one, str) and one == str(source) else one

        self._args, self._kwargs = fill((self._args, self._kwargs), leaf)

    def run(
        self, env: dict[int, torch.Tensor], store: WeightGradientStore | None, ambient: Any
    ) -> None:
        """Run the call on the values of ``env``, and put there what it makes."""
        call = self._call
        if self.layer is not None and store is not None:
            output = self.layer.run(env, store, call.autocast)
            if output is not None:
                env[call.outputs[0][0]] = output
                return
        if self._flat:
            args: Any = [env[one.value] if type(one) is Ref else one for one in self._args]
            kwargs: Any = {}
        else:
            args, kwargs = fill(
                (self._args, self._kwargs),
                lambda one: env[one.value] if type(one) is Ref else one,
            )
        if call.with_grad and call.autocast == ambient:
            result = call.function(*args, **kwargs)
        else:
            with self._context(env, ambient):
                result = call.function(*args, **kwargs)
        for value, path in call.outputs:
            one = result
            for key in path:
                one = one[key]
            env[value] = one
        for old, new in call.changes:
            env[new] = env[old]

    def _context(self, env: Mapping[int, torch.Tensor], ambient: Any) -> contextlib.ExitStack:
        call, stack = self._call, contextlib.ExitStack()
        if not call.with_grad:
            stack.enter_context(torch.no_grad())
        if call.autocast != ambient:
            device = next((one.device.type for one in env.values()), "cpu")
            stack.enter_context(
                torch.autocast(device, dtype=call.autocast, enabled=call.autocast is not None)
            )
        return stack


class StageProgram:
    """A stage that can be run.

    Args:
        tape: the forward.
        plan: this stage's part of it.
        held: parameters and buffers by name; those of the stage must be there.
        device: where it runs.
        is_last: it computes the loss.
        autocast: element type of matrix products under mixed precision.

    Attributes:
        plan: as given.
        forward_layout, backward_layout: of the messages to the stage before: what it sends with a
            forward, what it gets back with a backward.
        next_forward, next_backward: likewise of those to the stage after.
    """

    def __init__(
        self,
        tape: Tape,
        plan: StagePlan,
        held: Mapping[str, torch.Tensor],
        device: torch.device,
        *,
        is_last: bool,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.plan = plan
        self._tape = tape
        self._held = held
        self._device = device
        self._autocast = autocast
        self._result = tape.loss if is_last else None
        values = tape.values
        self._gradients_in = [n for n in plan.received if values[n].requires_grad]
        self._gradients_out = [n for n in plan.sent if values[n].requires_grad]
        self.forward_layout = Layout.of([values[n] for n in plan.received])
        self.backward_layout = Layout.of([values[n] for n in self._gradients_in])
        self.next_forward = Layout.of([values[n] for n in plan.sent])
        self.next_backward = Layout.of([values[n] for n in self._gradients_out])
        self._sources: list[tuple[int, str, str]] = []
        self._constants: dict[int, torch.Tensor] = {}
        self._steps = self._prepare()

    def _prepare(self) -> list[_Step]:
        tape, plan = self._tape, self.plan
        keep = {*plan.sent, *([] if self._result is None else [self._result])}
        last: dict[int, int] = {}
        seen: set[int] = set()
        for place, number in enumerate(plan.calls):
            call = tape.calls[number]
            for one in (*call.reads, *(old for old, _ in call.changes)):
                last[one] = place
                value = tape.values[one]
                if value.source and one not in seen:
                    seen.add(one)
                    self._take(one)
            for one, _ in call.outputs:
                last.setdefault(one, place)
            for _, new in call.changes:
                last.setdefault(new, place)
        for one in (*plan.sent, *keep):
            if tape.values[one].source and one not in seen:
                seen.add(one)
                self._take(one)
        drops: dict[int, list[int]] = {}
        for one, place in last.items():
            if one not in keep:
                drops.setdefault(place, []).append(one)
        steps = [
            _Step(tape.calls[number], number, drops.get(place, ()), tape)
            for place, number in enumerate(plan.calls)
        ]
        if tape.device.type != self._device.type:
            for step in steps:
                step.move(tape.device, self._device)
        return steps

    def _take(self, number: int) -> None:
        value = self._tape.values[number]
        if value.source == "constant":
            assert value.tensor is not None
            self._constants[number] = value.tensor.detach().to(self._device)
        else:
            self._sources.append((number, value.source, value.name))

    def forward(
        self,
        inputs: Mapping[str, torch.Tensor],
        received: Sequence[torch.Tensor],
        *,
        random: Callable[[int], None],
        store: WeightGradientStore | None = None,
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Run the stage.

        Args:
            inputs: the microbatch.
            received: values of the stage before, leaves of this stage's graph.
            random: called with a call's number before it draws random numbers.
            store: takes weight gradients that are put off.

        Returns:
            What the stage sends, in the order of the plan, and the loss on the last stage.
        """
        env: dict[int, torch.Tensor] = dict(self._constants)
        env.update(zip(self.plan.received, received, strict=True))
        for number, source, name in self._sources:
            env[number] = inputs[name] if source == "input" else self._held[name]
        for number in self.plan.copied:
            env[number] = env[number].clone()
        calls, ambient = self._tape.calls, self._autocast
        with _NOTHING if ambient is None else torch.autocast(self._device.type, dtype=ambient):
            for step in self._steps:
                if calls[step.number].is_random:
                    random(step.number)
                step.run(env, store, ambient)
                for one in step.drops:
                    del env[one]
        sent = [env[number] for number in self.plan.sent]
        return sent, None if self._result is None else env[self._result]

    def require_gradients(self, received: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the values of a message as leaves, those requiring a gradient that have one."""
        wanted = set(self._gradients_in)
        return [
            one.detach().requires_grad_(number in wanted)
            for number, one in zip(self.plan.received, received, strict=True)
        ]

    def gradients_of(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the gradients that go back to the stage before."""
        wanted = set(self._gradients_in)
        pairs = zip(self.plan.received, leaves, strict=True)
        return [leaf.grad for number, leaf in pairs if number in wanted]

    def differentiated(self, sent: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what gets a gradient from the stage after, in the order of that message."""
        wanted = set(self._gradients_out)
        pairs = zip(self.plan.sent, sent, strict=True)
        return [one for number, one in pairs if number in wanted]


_NOTHING = contextlib.nullcontext()
