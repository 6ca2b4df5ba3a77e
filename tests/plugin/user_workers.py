"""Defines two more programs with their own training loop, which imitate workers started by Ray.

The programs do not use this package. They build their models with :mod:`user_callers`:

- :func:`run_replay` imitates the training actor of slime, a framework for reinforcement learning.
  The policy and the reference take turns in one model, whose weights are exchanged. A call without
  gradients records which outputs each layer selects. Training then replays these selections, first
  in the forward passes and again in the recomputation before each backward pass.
- :func:`run_threads` imitates a worker with several threads. Each call is made in a new thread.
  Calls without gradients run in torch's inference mode, and the first call is one of these.

Each program returns the results of one rank: results of loss functions, gradient norms, and a
digest of the weights.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from user_callers import (
    Batch,
    Loss,
    Model,
    Program,
    _begin,
    _for_each,
    _log_probs,
    _logits,
    _update,
    draw,
    make_groups,
    make_model,
    served_weights,
)

KEPT = 24
"""Number of outputs that each layer selects from its 32 outputs."""
ATTEMPT_S = 100.0
"""Timeout of a call of the schedule in seconds."""


def _call(model: Model, batches: list[Batch], step: Any, *, forward_only: bool) -> list[Any]:
    """Calls the schedule with ``batches``, which have equal lengths. Returns its results."""
    samples, length = batches[0]["tokens"].shape
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=_for_each([iter(batches) for _ in model.chunks]),
        model=model.chunks,
        num_microbatches=len(batches),
        seq_length=length,
        micro_batch_size=samples,
        decoder_seq_length=length,
        forward_only=forward_only,
    )
    return results


def _look(batch: Batch, output: torch.Tensor) -> Any:
    return torch.tensor(0.0), {"log_probs": _log_probs(output, batch["tokens"])}


def _learn(batch: Batch, output: torch.Tensor) -> Any:
    value = -(_log_probs(output, batch["tokens"]) * batch["weights"][:, 1:]).mean()
    return value, {"loss": value.detach()}


def _plain(loss: Loss, iterator: Iterator[Batch], model: Any) -> Any:
    batch = next(iterator)
    return _logits(model, batch["tokens"]), partial(loss, batch)


# The following class and functions imitate the training actor of slime, a framework for RL.


class Replay:
    """Lets each layer select some of its outputs, records these selections, and replays them.

    Args:
        model: Model whose MLP layers select outputs.

    Attributes:
        mode: Use of selections in the current pass: ``"record"`` records them, and ``"forward"``
            and ``"backward"`` replay them.
    """

    def __init__(self, model: Model) -> None:
        self.mode = "record"
        self._choices: dict[Any, list[torch.Tensor]] = defaultdict(list)
        self._next: dict[tuple[Any, str], int] = defaultdict(int)
        for chunk in model.chunks:
            for name, layer in chunk.named_modules():
                if name.endswith(".mlp"):
                    layer.register_forward_hook(self._choose)

    def clear(self) -> None:
        """Discards all recorded selections."""
        self._choices.clear()
        self._next.clear()

    def _choose(self, layer: Any, inputs: Any, outputs: Any) -> Any:
        output, bias = outputs
        if self.mode == "record":
            self._choices[layer].append(output.detach().topk(KEPT).indices)
            indices = self._choices[layer][-1]
        else:
            indices = self._choices[layer][self._next[layer, self.mode]]
            self._next[layer, self.mode] += 1
        return output * torch.zeros_like(output).scatter(-1, indices, 1.0), bias

    def step(self, loss: Loss, iterator: Iterator[Batch], model: Any) -> Any:
        """Runs the next microbatch through ``model``. Returns the output and the loss function.

        When the microbatch is recomputed before its backward pass, the same selections are
        replayed.
        """
        if self.mode != "record":
            self.mode = "forward"
        outputs = _plain(loss, iterator, model)
        if self.mode != "record":
            self.mode = "backward"
        return outputs


def run_replay(program: Program, prepare: Callable[[dict[str, Model]], None]) -> list[Any]:
    """Trains a policy. The policy and its reference share a model and swap weights, as in slime.

    ``prepare`` is called with the model before the first step. Returns the results of this rank.
    """
    recompute = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    model = make_model(program, make_groups(program), seed=17, **recompute)
    prepare({"actor": model})
    replay = Replay(model)
    weights = [weight for chunk in model.chunks for weight in chunk.parameters()]
    backups = {"reference": [weight.detach().clone() for weight in weights]}
    seen: list[Any] = []
    for step in range(program.steps):
        backups["actor"] = [weight.detach().clone() for weight in weights]
        batches = draw([(2, 12)] * 6, 31 * step)
        for name in ("reference", "actor"):
            for weight, kept in zip(weights, backups[name], strict=True):
                weight.data.copy_(kept)
            replay.clear()
            replay.mode = "record"
            for chunk in model.chunks:
                chunk.eval()
            with torch.no_grad():
                looked = _call(model, batches, partial(replay.step, _look), forward_only=True)
            seen.append([result["log_probs"].flatten().tolist() for result in looked])
        # The two training steps have different numbers of microbatches.
        for part in (batches[:4], batches[4:]):
            replay.mode = "forward"
            _begin(model)
            learned = _call(model, part, partial(replay.step, _learn), forward_only=False)
            seen.append([float(result["loss"]) for result in learned])
            seen.append([_update(model), served_weights(model)])
    return seen


# The following functions imitate a worker with several threads.


def _in_new_thread(action: Callable[[], Any]) -> Any:
    """Runs ``action`` in a new thread. Returns its result or raises its error."""
    outcomes: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcomes.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(ATTEMPT_S)
    if errors:
        raise errors[0]
    if not outcomes:
        raise TimeoutError(f"a call took more than {ATTEMPT_S:g} s")
    return outcomes[0]


def run_threads(program: Program, prepare: Callable[[dict[str, Model]], None]) -> list[Any]:
    """Trains a model with calls that are each made in a new thread.

    ``prepare`` is called with the model before the first step. Returns the results of this rank.
    """
    model = make_model(program, make_groups(program), seed=29)
    prepare({"model": model})

    def look(batches: list[Batch]) -> list[Any]:
        for chunk in model.chunks:
            chunk.eval()
        with torch.inference_mode():
            looked = _call(model, batches, partial(_plain, _look), forward_only=True)
            return [result["log_probs"].flatten().tolist() for result in looked]

    def learn(batches: list[Batch]) -> list[Any]:
        _begin(model)
        learned = _call(model, batches, partial(_plain, _learn), forward_only=False)
        return [[float(result["loss"]) for result in learned], _update(model)]

    seen: list[Any] = []
    for step in range(program.steps):
        batches = draw([(2, 12)] * 4, 7 * step)
        seen.append(_in_new_thread(partial(look, batches)))
        seen.append(_in_new_thread(partial(learn, batches)))
        seen.append(served_weights(model))
    return seen


WORKERS = {"replay": run_replay, "threads": run_threads}
