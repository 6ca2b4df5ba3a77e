"""Defines three training programs that call megatron-core's schedule in a loop of their own.

The programs do not use this package. Each of them calls ``get_forward_backward_func`` in the same
way as an existing training program:

- :func:`run_actor` imitates the actor, critic and reference of verl. It has several models,
  microbatches of different lengths, and outputs that are dictionaries. Between calls, it offloads
  weights, gradients and optimizer state.
- :func:`run_policy` imitates the policy of NeMo-RL. It passes a single chunk without a list, and a
  generator of microbatches. The length and the number of microbatches differ between calls and
  between replicas. Gradients are accumulated over several calls before they are reduced.
- :func:`run_bridge` imitates the training step of Megatron Bridge. It uses the same function object
  in all steps, and creates the process groups and the communicator itself.

Each program returns the results of one rank: results of loss functions, gradient norms, and a
digest of the weights.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
import user_training as user
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model

LONGEST = 32
NUM_MICROBATCHES = 4
VOCAB_SIZE = user.VOCAB_SIZE
Batch = dict[str, torch.Tensor]
Loss = Callable[..., Any]


@dataclass(kw_only=True, eq=False)
class Model:
    """Model of a program, with its optimizer and its process groups.

    Attributes:
        config: Model configuration of megatron-core.
        chunks: Model chunks on this rank. If they are trained, they are wrapped for data
            parallelism.
        optimizer: Optimizer of the model, or ``None`` if it is not trained.
        groups: Process groups of the model.
    """

    config: Any
    chunks: list[Any]
    optimizer: Any
    groups: ProcessGroupCollection


@dataclass(frozen=True, kw_only=True)
class Program:
    """Parallel sizes and options of a program.

    Attributes:
        pp: Number of pipeline ranks.
        vp: Number of model chunks on each rank.
        foreign: Whether the program creates the process groups itself, without ``parallel_state``.
        overlap: Whether gradients are reduced while the backward pass is still running.
        drops_last: Whether steps of :func:`run_bridge` omit the last microbatch, whose loss is 0.
        steps: Number of training iterations.
    """

    pp: int = 2
    vp: int = 1
    foreign: bool = False
    overlap: bool = False
    drops_last: bool = False
    steps: int = 2


def make_groups(program: Program) -> ProcessGroupCollection:
    """Creates and returns the process groups for the parallel sizes of ``program``."""
    if not program.foreign:
        parallel_state.initialize_model_parallel(
            1, program.pp, program.vp if program.vp > 1 else None
        )
        return user.process_groups()
    parallel_state._set_global_memory_buffer()  # megatron-core's attention needs this buffer.
    groups = ProcessGroupCollection()
    replicas = dist.get_world_size() // program.pp
    # Unlike in parallel_state, adjacent pipeline stages are on adjacent global ranks.
    pipelines = [
        list(range(first * program.pp, (first + 1) * program.pp)) for first in range(replicas)
    ]
    stages = [list(ranks) for ranks in zip(*pipelines, strict=True)]
    alone = [[rank] for rank in range(dist.get_world_size())]
    groups.pp = _subgroup(pipelines)
    groups.mp = _subgroup(pipelines)
    groups.dp = groups.dp_cp = groups.intra_dp_cp = _subgroup(stages)
    groups.tp = groups.cp = groups.tp_cp = groups.ep = _subgroup(alone)
    groups.expt_tp = groups.tp_ep = groups.inter_dist_opt = _subgroup(alone)
    groups.hcp = None
    groups.embd = _subgroup([[ranks[0], ranks[-1]] for ranks in pipelines])
    groups.pos_embd = _subgroup([[ranks[0]] for ranks in pipelines])
    groups.tp_ep_pp = _subgroup(pipelines)
    groups.tp_dp_cp = groups.expt_dp = groups.intra_expt_dp = _subgroup(stages)
    groups.intra_dist_opt = _subgroup([list(range(dist.get_world_size()))])
    return groups


def _subgroup(lists: Sequence[list[int]]) -> Any:
    """Creates a group for each list of ranks. Returns this rank's group, or ``None``."""
    joined = None
    for ranks in lists:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            joined = group
    return joined


def make_model(
    program: Program, groups: ProcessGroupCollection, *, seed: int, trains: bool = True, **more: Any
) -> Model:
    """Builds a model whose initial weights depend only on ``seed``.

    Args:
        program: Parallel sizes of the model.
        groups: Process groups of the model.
        seed: Seed of the initial weights.
        trains: Whether the model has gradients and an optimizer.
        **more: Changes of the model configuration.
    """
    position = dist.get_group_rank(groups.pp, dist.get_rank())
    torch.manual_seed(seed + position)
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed, **({"tp_rank": 0, "ep_rank": 0, "etp_rank": 0} if program.foreign else {})
    )
    config = user.configuration(
        user.Shape(pp=program.pp, chunks=program.vp, deallocate=program.vp == 1, more=more)
    )
    chunks = []
    for stage in range(program.vp):
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=VOCAB_SIZE,
            max_sequence_length=LONGEST,
            pre_process=position == 0 and stage == 0,
            post_process=position == program.pp - 1 and stage == program.vp - 1,
            share_embeddings_and_output_weights=False,
            vp_stage=stage if program.vp > 1 else None,
            pg_collection=groups,
        )
        chunk.model_type = ModelType.encoder_or_decoder
        chunks.append(chunk)
    model = Model(config=config, chunks=chunks, optimizer=None, groups=groups)
    if trains:
        _make_trainable(model, program)
    return model


def _make_trainable(model: Model, program: Program) -> None:
    groups: dict[str, Any] = {"pg_collection": model.groups} if program.foreign else {}
    reduction = DistributedDataParallelConfig(overlap_grad_reduce=program.overlap)
    model.chunks = [
        DistributedDataParallel(model.config, reduction, chunk, number > 0, **groups)
        for number, chunk in enumerate(model.chunks)
    ]
    settings = OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.01, clip_grad=1.0)
    more = {"use_gloo_process_groups": False, **groups} if program.foreign else {}
    model.optimizer = get_megatron_optimizer(settings, model.chunks, **more)
    model.config.grad_scale_func = model.optimizer.scale_loss
    model.config.finalize_model_grads_func = finalize_model_grads
    if program.overlap:
        model.config.no_sync_func = _for_each([chunk.no_sync for chunk in model.chunks])


def _for_each(functions: list[Any]) -> Any:
    """Returns the only element of ``functions``, or all of ``functions`` if there are several."""
    return functions[0] if len(functions) == 1 else functions


def draw(lengths: Sequence[tuple[int, int]], seed: int) -> list[Batch]:
    """Returns one random microbatch for each pair in ``lengths``: number of samples, and length."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for samples, length in lengths:
        tokens = torch.randint(VOCAB_SIZE, (samples, length), generator=generator)
        weights = torch.rand(samples, length, generator=generator)
        batches.append({"tokens": tokens, "weights": weights})
    return batches


def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    samples, length = tokens.shape
    positions = torch.arange(length).expand(samples, length)
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    output: torch.Tensor = model(tokens, positions, hidden)
    return output


def _log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the log probabilities of the next tokens in ``tokens``, with shape ``[b, s - 1]``."""
    logs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    return logs.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def _is_last(model: Any) -> bool:
    return bool(get_attr_wrapped_model(model, "post_process"))


def _begin(model: Model) -> None:
    for chunk in model.chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    model.optimizer.zero_grad()


def _update(model: Model) -> float:
    updated, norm, _ = model.optimizer.step()
    assert updated
    return float(norm)


# The following functions imitate the actor of verl.


class Reinforced:
    """Calls the schedule for one of several models, with microbatches of different lengths.

    Args:
        model: Model that the calls run.
        as_values: Whether the model is a critic, which outputs a value for each token.
    """

    def __init__(self, model: Model, *, as_values: bool = False) -> None:
        self.model = model
        self._as_values = as_values

    def call(self, batches: list[Batch], loss: Loss, *, forward_only: bool) -> list[Any]:
        chunks = self.model.chunks
        data: Any = [iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches)

        def forward_step(iterator: Iterator[Batch], chunk: Any) -> Any:
            batch = next(iterator)
            output: Any = _logits(chunk, batch["tokens"])
            if _is_last(chunk):
                output = self._outputs(output, batch)
            return output, partial(loss, batch=batch, count=len(batches))

        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data,
            model=chunks,
            num_microbatches=len(batches),
            seq_length=sum(batch["tokens"].numel() for batch in batches),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return results

    def _outputs(self, logits: torch.Tensor, batch: Batch) -> Batch:
        if self._as_values:
            return {"values": logits.float().mean(dim=-1)}
        probabilities = torch.softmax(logits[:, :-1].float(), dim=-1)
        entropy = -(probabilities * probabilities.clamp_min(1e-9).log()).sum(dim=-1)
        return {"log_probs": _log_probs(logits, batch["tokens"]), "entropy": entropy}

    def look(self, batches: list[Batch], name: str) -> list[list[float]]:
        """Runs forward passes, and returns the model's output ``name`` for each microbatch."""

        def loss(output: Batch, *, batch: Batch, count: int) -> Any:
            return torch.tensor(1.0), {name: output[name].detach().clone()}

        for chunk in self.model.chunks:
            chunk.eval()
        with torch.no_grad():
            seen = self.call(batches, loss, forward_only=True)
        return [result[name].flatten().tolist() for result in seen]

    def learn(self, batches: list[Batch]) -> dict[str, Any]:
        """Runs a training step, and returns the loss function's results and the gradient norm."""

        def loss(output: Batch, *, batch: Batch, count: int) -> Any:
            if self._as_values:
                value = ((output["values"] - batch["weights"]) ** 2).mean()
            else:
                gain = output["log_probs"] * batch["weights"][:, 1:]
                value = -gain.mean() - 0.01 * output["entropy"].mean()
            metrics = {"loss": value.detach().item(), "tokens": batch["tokens"].numel()}
            return value * count, [metrics, None]

        _begin(self.model)
        seen = self.call(batches, loss, forward_only=False)
        return {"metrics": [metrics for metrics, _ in seen], "norm": _update(self.model)}


class Offloaded:
    """Offloads weights, gradients and optimizer state of a model between two calls.

    Args:
        model: Model to offload.
    """

    def __init__(self, model: Model) -> None:
        self._weights = [weight for chunk in model.chunks for weight in chunk.parameters()]
        self._gradients = [buffer.grad_data for chunk in model.chunks for buffer in chunk.buffers]
        several = getattr(model.optimizer, "chained_optimizers", [model.optimizer])
        self._states = [single.optimizer.state for single in several]
        self._kept: list[torch.Tensor] = []
        self._nbytes: list[int] = []

    def out(self) -> None:
        """Frees the gradients, and moves weights and optimizer state to another place in memory."""
        self._kept = [weight.data.clone() for weight in self._weights]
        self._nbytes = [gradient.untyped_storage().nbytes() for gradient in self._gradients]
        for weight in self._weights:
            weight.data = torch.empty(0)
        for gradient in self._gradients:
            gradient.untyped_storage().resize_(0)
        for state in self._states:
            for values in state.values():
                values.update({name: value.clone() for name, value in values.items()})

    def back(self) -> None:
        """Restores the weights, and allocates new gradients with the value zero."""
        for weight, kept in zip(self._weights, self._kept, strict=True):
            weight.data = kept
        for gradient, nbytes in zip(self._gradients, self._nbytes, strict=True):
            gradient.untyped_storage().resize_(nbytes)
            gradient.zero_()


def served_weights(model: Model) -> str:
    """Returns a digest of the pipeline's weights, as an inference engine would receive them."""
    digest = hashlib.sha256()
    ranks = dist.get_process_group_ranks(model.groups.pp)
    for source in ranks:
        names = [
            (number, name, tuple(weight.shape))
            for number, chunk in enumerate(model.chunks)
            for name, weight in chunk.named_parameters()
        ]
        box = [names]
        dist.broadcast_object_list(box, src=source, group=model.groups.pp)
        weights = {
            (number, name): weight
            for number, chunk in enumerate(model.chunks)
            for name, weight in chunk.named_parameters()
        }
        for number, name, shape in box[0]:
            weight = torch.empty(shape)
            if source == dist.get_rank():
                weight.copy_(weights[number, name].detach())
            dist.broadcast(weight, src=source, group=model.groups.pp)
            digest.update(weight.numpy().tobytes())
    return digest.hexdigest()


def run_actor(program: Program, prepare: Callable[[dict[str, Model]], None]) -> list[Any]:
    """Trains an actor and a critic with a reference model, as verl does.

    ``prepare`` is called with a dict of the models before the first step. Returns the results of
    this rank.
    """
    groups = make_groups(program)
    varying = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    models = {
        "actor": make_model(program, groups, seed=11, **varying),
        "reference": make_model(program, groups, seed=11, trains=False, **varying),
        "critic": make_model(program, groups, seed=23, hidden_size=48, **varying),
    }
    prepare(models)
    actor, reference = Reinforced(models["actor"]), Reinforced(models["reference"])
    critic = Reinforced(models["critic"], as_values=True)
    away = Offloaded(models["actor"])
    replica = groups.dp.rank()
    seen: list[Any] = []
    for step in range(program.steps):
        seed = 1000 * step + 100 * replica
        # The number and the lengths of the microbatches differ between replicas.
        whole = draw([(2, 9), (1, 31), (3, 5), (1, 17)][: 4 - 2 * (replica > 0)], seed)
        short = draw([(1, 7 + 3 * replica), (2, 12)], seed + 1)
        if step:
            away.back()
        seen.append(actor.look(whole, "log_probs"))
        seen.append(reference.look(whole, "log_probs"))
        seen.append(critic.look(short, "values"))
        seen.append([critic.learn(short), critic.learn(whole)])
        seen.append([actor.learn(whole), actor.learn(short)])
        seen.append([served_weights(models[name]) for name in ("actor", "critic")])
        away.out()
    return seen


# The following functions imitate the policy of NeMo-RL.


def policy_step(iterator: Iterator[Batch], model: Any, process: Callable[[Batch], Loss]) -> Any:
    """Runs the next microbatch through ``model``. Returns the output and the loss function."""
    batch = next(iterator)
    return _logits(model, batch["tokens"]), process(batch)


def policy_call(model: Model, batches: list[Batch], process: Any, *, forward_only: bool) -> Any:
    """Calls the schedule. A single chunk is passed without a list, and the data as a generator."""
    samples, length = batches[0]["tokens"].shape
    chunks = model.chunks
    several = len(chunks) > 1
    return get_forward_backward_func()(
        forward_step_func=partial(policy_step, process=process),
        data_iterator=[_yield(batches) for _ in chunks] if several else _yield(batches),
        model=chunks if several else chunks[0],
        num_microbatches=len(batches),
        seq_length=length,
        micro_batch_size=samples,
        decoder_seq_length=length,
        forward_only=forward_only,
    )


@contextlib.contextmanager
def accumulating(model: Model, program: Program) -> Iterator[None]:
    """Accumulates gradients over all calls in this context, and reduces them when it ends."""
    config = model.config
    former = config.no_sync_func
    config.no_sync_func = _for_each([contextlib.nullcontext for _ in model.chunks])
    config.finalize_model_grads_func = None
    with contextlib.ExitStack() as stack:
        for chunk in model.chunks:
            stack.enter_context(chunk.no_sync())
        yield
    config.no_sync_func = former
    config.finalize_model_grads_func = finalize_model_grads
    if program.overlap:
        for chunk in model.chunks:
            chunk.start_grad_sync()
    finalize_model_grads(model.chunks)


def _yield(batches: list[Batch]) -> Iterator[Batch]:
    yield from batches


def run_policy(program: Program, prepare: Callable[[dict[str, Model]], None]) -> list[Any]:
    """Trains a policy model, as NeMo-RL does.

    ``prepare`` is called with the model before the first step. Returns the results of this rank.
    """
    groups = make_groups(program)
    model = make_model(program, groups, seed=5)
    prepare({"policy": model})
    replica = groups.dp.rank()

    def log_probs_of(batch: Batch) -> Loss:
        def process(output: torch.Tensor) -> Any:
            return torch.tensor(0.0), {"logprobs": _log_probs(output, batch["tokens"])}

        return process

    def top_of(batch: Batch) -> Loss:
        def process(output: torch.Tensor) -> Any:
            values, indices = torch.topk(output, 2)
            return torch.tensor(0.0), {"values": values, "indices": indices}

        return process

    seen: list[Any] = []
    for step in range(program.steps):
        # The length alternates between two values on the second replica, and is constant on the
        # first.
        length = 16 - 4 * replica * (step % 2)
        count = 6 if step == 0 else 4
        batches = draw([(2, length)] * count, 50 * step + replica)
        for chunk in model.chunks:
            chunk.eval()
        with torch.no_grad():
            looked = policy_call(model, batches, log_probs_of, forward_only=True)
            top = policy_call(model, draw([(2, 16)] * 2, 77 + step), top_of, forward_only=True)
        seen.append([result["logprobs"].flatten().tolist() for result in looked])
        seen.append([result["indices"].flatten().tolist() for result in top])

        def loss_of(batch: Batch, count: int = count) -> Loss:
            def process(output: torch.Tensor) -> Any:
                value = -(_log_probs(output, batch["tokens"]) * batch["weights"][:, 1:]).sum()
                return value * count, {"loss": value.detach(), "samples": len(output)}

            return process

        _begin(model)
        with accumulating(model, program):
            learned = policy_call(model, batches[:2], loss_of, forward_only=False)
            learned += policy_call(model, batches[2:], loss_of, forward_only=False)
        seen.append([[float(result["loss"]), result["samples"]] for result in learned])
        seen.append([_update(model), served_weights(model)])
    return seen


# The following functions imitate the training step of Megatron Bridge.


def bridge_loss(batch: Batch, output: torch.Tensor, non_loss_data: bool = False) -> Any:
    """Returns the loss, the number of tokens, and the values to log.

    If ``non_loss_data`` is true, returns the mean of ``output`` instead.
    """
    if non_loss_data:
        return {"mean": output.detach().mean().item()}
    losses = -_log_probs(output, batch["tokens"]) * batch["weights"][:, 1:]
    tokens = (batch["weights"][:, 1:] > 0).sum().to(torch.int)
    total = losses.sum()
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


class BridgeStep:
    """Forward step function that is an object. A call runs a microbatch through a chunk."""

    def __call__(
        self, iterator: Iterator[Batch], model: Any, return_schedule_plan: bool = False
    ) -> Any:
        batch = next(iterator)
        return _logits(model, batch["tokens"]), partial(bridge_loss, batch)


def run_bridge(program: Program, prepare: Callable[[dict[str, Model]], None]) -> list[Any]:
    """Trains a model, as Megatron Bridge does.

    ``prepare`` is called with the model before the first step. Returns the results of this rank.
    """
    groups = make_groups(program)
    model = make_model(program, groups, seed=3, calculate_per_token_loss=True)
    prepare({"model": model})
    sizes: dict[str, Any] = {}
    if "pp_size" in signature(get_forward_backward_func).parameters:
        sizes = {"pp_size": groups.pp.size(), "vp_size": program.vp if program.vp > 1 else None}
    run_step = get_forward_backward_func(**sizes)
    handed_over = {
        "p2p_communicator": P2PCommunicator(pp_group=groups.pp, config=model.config),
        "pg_collection": groups,
    }
    step_function = BridgeStep()
    replica = groups.dp.rank()

    def call(samples: int, length: int, seed: int, **more: Any) -> Any:
        batches = draw([(samples, length)] * NUM_MICROBATCHES, seed + replica)
        batches[-1]["weights"].zero_()
        if program.drops_last:
            del batches[-1]
        results = run_step(
            forward_step_func=step_function,
            data_iterator=_for_each([iter(batches) for _ in model.chunks]),
            model=model.chunks,
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=samples,
            decoder_seq_length=length,
            adjust_tensor_shapes_fn=None,
            **handed_over,
            **more,
        )
        return results[: NUM_MICROBATCHES - 1]

    seen: list[Any] = []
    for step in range(program.steps):
        _begin(model)
        length = 12 + 8 * step
        reduced = call(2, length, 10 * step, forward_only=False)
        seen.append([result["lm loss"].tolist() for result in reduced])
        seen.append([_update(model), served_weights(model)])
        for chunk in model.chunks:
            chunk.eval()
        with torch.no_grad():
            reduced = call(1, length, 500, forward_only=True)
            looked = call(1, length, 500, forward_only=True, collect_non_loss_data=True)
        seen.append([result["lm loss"].tolist() for result in reduced])
        seen.append([result["mean"] for result in looked])
    return seen


PROGRAMS = {"actor": run_actor, "policy": run_policy, "bridge": run_bridge}
