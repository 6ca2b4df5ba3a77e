"""Defines a training program like that of Megatron-LM, which does not use this package.

Like ``megatron.training.training``, the program imports ``get_forward_backward_func`` from
megatron-core. It calls this function before training and before each evaluation, and calls the
returned function with the same arguments as Megatron-LM. The models are those of megatron-core.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.timers import Timers
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model, unwrap_model

SEQ_LENGTH = 16
VOCAB_SIZE = 64
MICRO_BATCH_SIZE = 2
NUM_MICROBATCHES = 4
Batch = dict[str, torch.Tensor]
# megatron-core 0.15 does not have this argument.
_KNOWN = signature(schedules.forward_backward_no_pipelining).parameters
LAST_ARGUMENTS = {name: False for name in ("force_all_reduce",) if name in _KNOWN}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Parallel sizes and configuration of a model.

    Attributes:
        tp, pp, chunks: Tensor-parallel size, pipeline size, and model chunks per rank. The
            remaining processes are data-parallel replicas.
        per_token: Whether losses are averaged over all tokens of the batch.
        overlap: Whether the reduction of gradients overlaps with the backward pass.
        deallocate: Whether outputs are freed after they were sent, as in Megatron-LM.
        timers: Whether megatron-core's timers are enabled.
        llama: Whether the model is like Llama instead of GPT.
        groups: Whether process groups are passed to models and steps, as in Megatron Bridge.
        dropout: Dropout probability in attention and hidden states.
        eval_micro_batch_size: Number of samples per microbatch in evaluation.
        tied: Whether the embedding and the output layer share their weights.
        mtp: Whether the model has a multi-token prediction layer.
        distributed: Whether the optimizer's state is sharded over replicas.
        more: Other settings of the model configuration.
    """

    tp: int = 1
    pp: int = 1
    chunks: int = 1
    per_token: bool = False
    overlap: bool = False
    deallocate: bool = True
    timers: bool = False
    llama: bool = False
    groups: bool = False
    dropout: float = 0.0
    eval_micro_batch_size: int = MICRO_BATCH_SIZE
    tied: bool = True
    mtp: bool = False
    distributed: bool = False
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Job:
    """Model that is ready for training, with the objects that a step needs."""

    shape: Shape
    config: Any
    chunks: list[Any]
    optimizer: Any
    iterations: int = 0


def setup(shape: Shape) -> Job:
    """Creates process groups, a model and an optimizer. The weights are the same in every call."""
    parallel_state.initialize_model_parallel(
        shape.tp,
        shape.pp,
        shape.chunks if shape.chunks > 1 else None,
        expert_model_parallel_size=shape.more.get("expert_model_parallel_size", 1),
    )
    torch.manual_seed(1234 + parallel_state.get_pipeline_model_parallel_rank())
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    config = configuration(shape)
    settings = DistributedDataParallelConfig(
        overlap_grad_reduce=shape.overlap, use_distributed_optimizer=shape.distributed
    )
    chunks = [
        DistributedDataParallel(config, settings, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(model_chunks(shape, config))
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            weight_decay=0.01,
            clip_grad=1.0,
            use_distributed_optimizer=shape.distributed,
        ),
        chunks,
    )
    config.grad_scale_func = optimizer.scale_loss
    config.timers = Timers(2, "minmax") if shape.timers else None
    if shape.overlap:
        holds = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = holds[0] if len(holds) == 1 else holds
    config.finalize_model_grads_func = finalize_model_grads
    return Job(shape=shape, config=config, chunks=chunks, optimizer=optimizer)


def configuration(shape: Shape) -> TransformerConfig:
    """Returns megatron-core's model configuration for the sizes in ``shape``."""
    llama: dict[str, Any] = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "num_query_groups": 2,
    }
    settings: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "attention_dropout": shape.dropout,
        "hidden_dropout": shape.dropout,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": shape.tp,
        "pipeline_model_parallel_size": shape.pp,
        "virtual_pipeline_model_parallel_size": shape.chunks if shape.chunks > 1 else None,
        "pipeline_dtype": torch.float32,
        "calculate_per_token_loss": shape.per_token,
        "deallocate_pipeline_outputs": shape.deallocate,
        # If there are two chunks per rank, gloo would confuse the two messages between a pair of
        # ranks without this setting.
        "overlap_p2p_comm": shape.chunks > 1,
        "batch_p2p_comm": shape.chunks == 1,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        **({"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1} if shape.mtp else {}),
    }
    return TransformerConfig(**settings | (llama if shape.llama else {}) | shape.more)


def model_chunks(shape: Shape, config: TransformerConfig) -> list[Any]:
    """Builds the model chunks of this rank, as Megatron-LM's ``get_model`` does."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, normalization=config.normalization
    )
    chunks = []
    for vp_stage in range(shape.chunks):
        several = shape.chunks > 1
        first = parallel_state.is_pipeline_first_stage(
            ignore_virtual=not several, vp_stage=vp_stage
        )
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=not several, vp_stage=vp_stage)
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCAB_SIZE,
            max_sequence_length=SEQ_LENGTH,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=shape.tied and not shape.llama,
            position_embedding_type="rope" if shape.llama else "learned_absolute",
            vp_stage=vp_stage if several else None,
            mtp_block_spec=get_gpt_mtp_block_spec(
                config, spec, use_transformer_engine=False, vp_stage=vp_stage if several else None
            )
            if shape.mtp
            else None,
            pg_collection=process_groups() if shape.groups else None,
        )
        chunk.model_type = ModelType.encoder_or_decoder
        chunks.append(chunk)
    return chunks


def process_groups() -> ProcessGroupCollection:
    """Returns the process groups of ``parallel_state`` as a ``ProcessGroupCollection``."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    return groups


def handed_over(job: Job) -> dict[str, Any]:
    """Returns the step arguments that contain process groups, or ``{}`` if none are passed."""
    if not job.shape.groups:
        return {}
    groups = process_groups()
    communicator = P2PCommunicator(pp_group=groups.pp, config=job.config)
    return {"pg_collection": groups, "p2p_communicator": communicator}


def batches(micro_batch_size: int) -> Iterator[Batch]:
    """Yields an endless series of random microbatches, which differ between replicas."""
    generator = torch.Generator().manual_seed(7 + parallel_state.get_data_parallel_rank())
    while True:
        size = (micro_batch_size, SEQ_LENGTH + 1)
        tokens = torch.randint(VOCAB_SIZE, size, generator=generator)
        mask = torch.ones(micro_batch_size, SEQ_LENGTH)
        mask[0, : int(torch.randint(1, 9, (1,), generator=generator))] = 0.0
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "mask": mask}


def iterators(job: Job, micro_batch_size: int) -> Any:
    """Returns a data iterator. If there are several chunks, returns a list with one per chunk."""
    if job.shape.chunks == 1:
        return batches(micro_batch_size)
    return [batches(micro_batch_size) for _ in job.chunks]


def loss_func(mask: torch.Tensor, output: torch.Tensor, non_loss_data: bool = False) -> Any:
    """Returns the loss, the number of tokens, and the values to report.

    If ``non_loss_data`` is true, returns the mean of ``output`` instead.
    """
    if non_loss_data:
        return output.detach().mean().item()
    total = torch.sum(output.float().view(-1) * mask.view(-1))
    tokens = mask.sum().to(torch.int)
    report = torch.cat([total.detach().clone().view(1), tokens.float().view(1)])
    return total, tokens, {"lm loss": report}


def forward_step(data_iterator: Iterator[Batch], model: Any) -> Any:
    """Runs the next microbatch through ``model``. Each stage gets only the inputs that it needs."""
    batch: dict[str, Any] = dict(next(data_iterator))
    stage = get_attr_wrapped_model(model, "vp_stage")
    is_end = any(
        at_end(ignore_virtual=stage is None, vp_stage=stage)
        for at_end in (
            parallel_state.is_pipeline_first_stage,
            parallel_state.is_pipeline_last_stage,
        )
    )
    # Pass only the inputs that Megatron-LM's get_batch and get_batch_on_this_tp_rank would pass.
    if not is_end or parallel_state.is_pipeline_first_stage():
        batch["labels"] = batch["mask"] = None
    looks_up_again = is_end and get_attr_wrapped_model(model, "config").mtp_num_layers
    if not looks_up_again and not (is_end and parallel_state.is_pipeline_first_stage()):
        batch["tokens"] = None
    positions = (
        None if batch["tokens"] is None else torch.arange(SEQ_LENGTH).expand(batch["tokens"].shape)
    )
    hidden = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).triu(1)
    output = model(batch["tokens"], positions, hidden, labels=batch["labels"])
    return output, partial(loss_func, batch["mask"])


def train(job: Job, steps: int) -> dict[str, list[float]]:
    """Runs ``steps`` training steps. Returns the losses (on the last stage) and gradient norms."""
    for chunk in job.chunks:
        chunk.train()
    data = iterators(job, MICRO_BATCH_SIZE)
    forward_backward_func = get_forward_backward_func()
    losses, norms = [], []
    for _ in range(steps):
        for chunk in job.chunks:
            chunk.zero_grad_buffer()
        job.optimizer.zero_grad()
        reduced = forward_backward_func(
            forward_step_func=forward_step,
            data_iterator=data,
            model=job.chunks,
            num_microbatches=NUM_MICROBATCHES,
            seq_length=SEQ_LENGTH,
            micro_batch_size=MICRO_BATCH_SIZE,
            decoder_seq_length=None,
            forward_only=False,
            adjust_tensor_shapes_fn=None,
            **LAST_ARGUMENTS,
            **handed_over(job),
        )
        updated, norm, _ = job.optimizer.step()
        assert updated
        job.iterations += 1
        norms.append(float(norm))
        losses += mean_loss(reduced)
    return {"losses": losses, "norms": norms}


def evaluate(job: Job, steps: int) -> dict[str, list[float]]:
    """Runs ``steps`` evaluations, and one more that collects data other than losses."""
    for chunk in job.chunks:
        chunk.eval()
    arguments = {
        "forward_step_func": forward_step,
        "data_iterator": iterators(job, job.shape.eval_micro_batch_size),
        "model": job.chunks,
        "num_microbatches": NUM_MICROBATCHES,
        "seq_length": SEQ_LENGTH,
        "micro_batch_size": job.shape.eval_micro_batch_size,
        "forward_only": True,
        **handed_over(job),
    }
    forward_backward_func = get_forward_backward_func()
    timers, job.config.timers = job.config.timers, None
    with torch.no_grad():
        losses = [
            loss for _ in range(steps) for loss in mean_loss(forward_backward_func(**arguments))
        ]
        collected = forward_backward_func(**arguments, collect_non_loss_data=True)
    job.config.timers = timers
    return {"losses": losses, "collected": collected}


def mean_loss(reduced: list[dict[str, torch.Tensor]]) -> list[float]:
    """Returns the mean loss of the batch on the last stage, or ``[]`` on other stages."""
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        assert reduced == []
        return []
    total = torch.vstack([losses["lm loss"] for losses in reduced]).sum(dim=0)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return [float(total[0] / total[1])]


def weights_norm(job: Job) -> float:
    """Returns the norm of all weights on all ranks. Copies of a weight count separately."""
    weights = [weight for chunk in job.chunks for weight in chunk.parameters()]
    total = torch.stack([weight.detach().double().pow(2).sum() for weight in weights]).sum()
    dist.all_reduce(total)
    return float(total) ** 0.5


def _replicas() -> Any:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _state(job: Job, with_optimizer: bool, *, is_loading: bool) -> dict[str, Any]:
    model = {
        f"model{number}": chunk.sharded_state_dict(metadata={"dp_cp_group": _replicas()})
        for number, chunk in enumerate(unwrap_model(job.chunks))
    }
    # Loading the state of a distributed optimizer would require Transformer Engine or apex.
    if job.shape.distributed or not with_optimizer:
        return model
    return model | {"optimizer": job.optimizer.sharded_state_dict(model, is_loading=is_loading)}


def save(job: Job, folder: str, *, with_optimizer: bool) -> None:
    """Writes a checkpoint as Megatron-LM does. Each replica writes a part of it."""
    if dist.get_rank() == 0:
        Path(folder).mkdir(parents=True)
    dist.barrier()
    strategy = FullyParallelSaveStrategyWrapper(
        TorchDistSaveShardedStrategy("torch_dist", 1), _replicas(), True
    )
    dist_checkpointing.save(_state(job, with_optimizer, is_loading=False), folder, strategy)


def load(job: Job, folder: str, *, with_optimizer: bool) -> None:
    """Loads weights from a checkpoint, and the optimizer's state if ``with_optimizer`` is true."""
    strategy = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), _replicas())
    state = dist_checkpointing.load(_state(job, with_optimizer, is_loading=True), folder, strategy)
    for number, chunk in enumerate(unwrap_model(job.chunks)):
        chunk.load_state_dict(state[f"model{number}"])
    if "optimizer" in state:
        job.optimizer.load_state_dict(state["optimizer"])
    else:
        job.optimizer.reload_model_params()
