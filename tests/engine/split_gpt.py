"""Runs training steps of small GPT models, with or without split backward passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.adaptive import accelerator

accelerator.install()
accelerator.quiet_libraries()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.rerun_state_machine import (  # noqa: E402
    RerunMode,
    destroy_rerun_state_machine,
    initialize_rerun_state_machine,
)
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron.adaptive.engine.stages import ActivationMeter, MegatronStages, default_process_groups  # noqa: E402
from megatron.adaptive.schedule.stage_placement import Placement  # noqa: E402

SEQUENCE, SAMPLES, HIDDEN, VOCABULARY = 16, 2, 32, 128

Order = Sequence[tuple[Any, ...]]
"""Actions of a step in the order of execution.

An action is ``("F", chunk, microbatch)``, ``("B", chunk, microbatch)``, or ``("W", chunk,
microbatch, piece, pieces)``.
"""


@contextlib.contextmanager
def job() -> Iterator[None]:
    """Initializes megatron-core's process groups and random states, and removes them at the end."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    seed()
    try:
        yield
    finally:
        destroy_rerun_state_machine()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def seed() -> None:
    """Sets the seeds of all random generators."""
    torch.manual_seed(5)
    tensor_parallel.model_parallel_cuda_manual_seed(5)


def core_config(**changes: Any) -> TransformerConfig:
    """Returns a configuration of two layers with dropout. ``changes`` replaces default values."""
    settings = {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
        "use_cpu_initialization": True,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "pipeline_dtype": changes.get("params_dtype", torch.float32),
        **changes,
    }
    return TransformerConfig(**settings)


def build(
    core: TransformerConfig,
    *,
    chunks: int = 1,
    tied: bool = False,
    rope: bool = False,
    settings: DistributedDataParallelConfig | None = None,
    spec: ModuleSpec | None = None,
) -> list[Any]:
    """Builds ``chunks`` model chunks, with the same initial weights in each call.

    If ``tied`` is true, the embedding and the output layer share their weights. If ``rope`` is
    true, the model has rotary position embeddings. ``settings`` configures data parallelism.
    """
    seed()
    spec = spec or get_gpt_layer_local_spec()
    predicting = get_gpt_mtp_block_spec(core, spec, False) if core.mtp_num_layers else None
    made = []
    for chunk in range(chunks):
        model = GPTModel(
            core,
            spec,
            VOCABULARY,
            SEQUENCE,
            pre_process=chunk == 0,
            post_process=chunk == chunks - 1,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope" if rope else "learned_absolute",
            mtp_block_spec=predicting,
        )
        module = Float16Module(core, model) if core.bf16 else model
        made.append(
            DistributedDataParallel(
                core,
                settings or DistributedDataParallelConfig(),
                module,
                disable_bucketing=chunk > 0,
            )
        )
    return made


def forward_step(iterator: Iterator[int], model: Any) -> tuple[Any, Callable[..., Any]]:
    """Runs a forward step as a user's function would, on tokens that depend on the microbatch."""
    numbers = torch.Generator().manual_seed(next(iterator))
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, SEQUENCE), generator=numbers)
    places = torch.arange(SEQUENCE).expand(SAMPLES, SEQUENCE)
    mask = torch.triu(torch.ones(SEQUENCE, SEQUENCE), 1).bool()[None, None]
    output = model(tokens, places, mask, labels=tokens.roll(1, 1))
    return output, lambda losses: (losses.float().mean(), {})


def make_stages(
    chunks: list[Any], num_microbatches: int, stores: Any = None, **changes: Any
) -> MegatronStages:
    """Returns the stages of a step with ``num_microbatches``, in a pipeline with one rank.

    If ``stores`` is not ``None``, backward passes are split. ``changes`` contains other arguments
    of ``MegatronStages``.
    """
    return MegatronStages(
        forward_step_func=forward_step,
        data_iterators=[iter(range(num_microbatches)) for _ in chunks],
        chunks=chunks,
        placement=Placement(num_ranks=1, num_chunks=len(chunks)),
        pp_rank=0,
        num_microbatches=num_microbatches,
        groups=default_process_groups(),
        **{
            "meter": ActivationMeter(),
            "forward_only": False,
            "collect_non_loss_data": False,
            "first_val_step": None,
            "stores": stores,
            **changes,
        },
    )


def drive(stages: Any, order: Order, num_chunks: int) -> None:
    """Runs the actions of ``order`` on ``stages``, and passes tensors between the chunks.

    There are ``num_chunks`` chunks, all on one rank.
    """
    carried: dict[tuple[Any, ...], torch.Tensor] = {}
    for kind, chunk, microbatch, *piece in order:
        if kind == "F":
            output = stages.forward(chunk, microbatch, carried.pop(("F", chunk, microbatch), None))
            if chunk < num_chunks - 1:
                carried["F", chunk + 1, microbatch] = output.detach()
            stages.release(chunk, microbatch)
        elif kind == "B":
            gradient = carried.pop(("B", chunk, microbatch), None)
            answer = stages.backward(chunk, microbatch, gradient)
            if chunk > 0:
                carried["B", chunk - 1, microbatch] = answer
            stages.after_backward(chunk, microbatch)
        else:
            stages.weights(chunk, microbatch, *piece)


def pairs(num_chunks: int, num_microbatches: int) -> list[tuple[Any, ...]]:
    """Returns an order of the forward and backward passes of a step.

    The forward passes of each microbatch come before the backward passes of the previous
    microbatch.
    """
    order: list[tuple[Any, ...]] = []
    for number in range(num_microbatches + 1):
        if number < num_microbatches:
            order += [("F", chunk, number) for chunk in range(num_chunks)]
        if number > 0:
            order += [("B", chunk, number - 1) for chunk in reversed(range(num_chunks))]
    return order


def with_weights(order: Order, *, late: int, pieces: int) -> list[tuple[Any, ...]]:
    """Returns ``order`` with actions added that compute weight gradients.

    The weight gradients of a backward pass are delayed until ``late`` further backward passes of
    the chunk have run. They are computed in ``pieces`` actions.
    """
    result: list[tuple[Any, ...]] = []
    waiting: dict[int, list[int]] = {}

    def owe(chunk: int) -> None:
        microbatch = waiting[chunk].pop(0)
        result.extend(("W", chunk, microbatch, piece, pieces) for piece in range(pieces))

    for action in order:
        result.append(action)
        if action[0] == "B":
            waiting.setdefault(action[1], []).append(action[2])
            if len(waiting[action[1]]) > late:
                owe(action[1])
    for chunk, numbers in waiting.items():
        for _ in list(numbers):
            owe(chunk)
    return result


def run_step(chunks: list[Any], order: Order, stores: Any = None) -> None:
    """Runs the actions of ``order`` and reduces gradients. No optimizer is called.

    If ``stores`` is not ``None``, backward passes are split.
    """
    for chunk in chunks:
        chunk.zero_grad_buffer()
    seed()
    num_microbatches = 1 + max(action[2] for action in order)
    stages = make_stages(chunks, num_microbatches, stores)
    try:
        drive(stages, order, len(chunks))
    finally:
        stages.finish()
    finalize_model_grads(chunks, None, pg_collection=default_process_groups())


def gradients(chunks: list[Any]) -> dict[str, torch.Tensor]:
    """Returns a copy of each parameter's ``main_grad``, by chunk number and parameter name."""
    return {
        f"{number} {name}": parameter.main_grad.clone()
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Checks that the gradients ``actual`` are nonzero and bitwise equal to ``expected``."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.abs().sum() > 0, name
        assert torch.equal(actual[name], tensor), name
