"""Small GPT models whose steps are run action by action, whole or split; also a program of ranks.

Usage under torchrun: ``split_gpt.py``. Every rank compares gradients of split steps with those of
whole ones, tensor-parallel and data-parallel, and raises where they differ in a single bit.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
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
from megatron.core.tensor_parallel.layers import (  # noqa: E402
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron.adaptive.engine.deferred_layers import attach_store, attach_stores, defer_layers  # noqa: E402
from megatron.adaptive.engine.stages import ActivationMeter, MegatronStages, default_process_groups  # noqa: E402
from megatron.adaptive.engine.weight_gradient import WeightGradientStore  # noqa: E402
from megatron.adaptive.schedule.placement import Placement  # noqa: E402

SEQUENCE, SAMPLES, HIDDEN, VOCABULARY = 16, 2, 32, 128
TIMEOUT = datetime.timedelta(seconds=60)

Order = Sequence[tuple[Any, ...]]
"""Actions ``("F", chunk, microbatch)``, ``("B", ...)`` and ``("W", ..., piece, pieces)``."""


@contextlib.contextmanager
def job(store: Any = None, *, rank: int = 0, world: int = 1, tp: int = 1) -> Iterator[None]:
    """Process groups and random states of megatron-core within."""
    dist.init_process_group(
        "gloo", store=store or dist.HashStore(), rank=rank, world_size=world, timeout=TIMEOUT
    )
    parallel_state.initialize_model_parallel(tp)
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    seed()
    try:
        yield
    finally:
        destroy_rerun_state_machine()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def seed() -> None:
    """Start all random numbers anew."""
    torch.manual_seed(5)
    tensor_parallel.model_parallel_cuda_manual_seed(5)


def core_config(**changes: Any) -> TransformerConfig:
    """A configuration of two layers with dropout."""
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
    """Build chunks that start from the same weights."""
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
    """megatron-core's user function: tokens follow from the microbatch's number."""
    numbers = torch.Generator().manual_seed(next(iterator))
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, SEQUENCE), generator=numbers)
    places = torch.arange(SEQUENCE).expand(SAMPLES, SEQUENCE)
    mask = torch.triu(torch.ones(SEQUENCE, SEQUENCE), 1).bool()[None, None]
    output = model(tokens, places, mask, labels=tokens.roll(1, 1))
    return output, lambda losses: (losses.float().mean(), {})


def make_stages(
    chunks: list[Any], num_microbatches: int, stores: Any = None, **changes: Any
) -> MegatronStages:
    """Stages of one step of a pipeline of one rank, split if stores are given."""
    first = 100 * parallel_state.get_data_parallel_rank()
    return MegatronStages(
        forward_step_func=forward_step,
        data_iterators=[iter(range(first, first + num_microbatches)) for _ in chunks],
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
    """Run actions and carry the tensors between the chunks of one rank."""
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
        else:
            stages.weights(chunk, microbatch, *piece)


def pairs(num_chunks: int, num_microbatches: int) -> list[tuple[Any, ...]]:
    """The forwards and backwards of a step: one microbatch's forward and backward, then the next.

    Each forward but the first comes before the backward of the microbatch before.
    """
    order: list[tuple[Any, ...]] = []
    for number in range(num_microbatches + 1):
        if number < num_microbatches:
            order += [("F", chunk, number) for chunk in range(num_chunks)]
        if number > 0:
            order += [("B", chunk, number - 1) for chunk in reversed(range(num_chunks))]
    return order


def with_weights(order: Order, *, late: int, pieces: int) -> list[tuple[Any, ...]]:
    """Add the weight gradients of each backward ``late`` backwards of its chunk after it."""
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
    """Run one step as ``ForwardBackward`` and the training loop do, without an optimizer."""
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
    """Return copies of all ``main_grad`` by chunk and name."""
    return {
        f"{number} {name}": parameter.main_grad.clone()
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def reduced(chunks: list[Any]) -> dict[str, torch.Tensor]:
    """Return the parts of the gradient buffers that this rank's distributed optimizer reads."""
    rank, world = parallel_state.get_data_parallel_rank(), dist.get_world_size()
    found = {}
    for number, chunk in enumerate(chunks):
        for place, buffer in enumerate(chunk.buffers):
            for bucket in buffer.buckets:
                shard = bucket.grad_data.chunk(world)[rank]
                found[f"{number} {place} {bucket.bucket_id}"] = shard.clone()
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare to the last bit, and that there is something to compare."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.abs().sum() > 0, name
        assert torch.equal(found[name], tensor), name


def check_tensor_parallel() -> None:
    """Split steps of two tensor-parallel ranks, outer layers included."""
    core = core_config(tensor_model_parallel_size=2)
    plain = build(core, tied=True)
    run_step(plain, pairs(1, 3))
    expected = gradients(plain)
    chunks = build(core, tied=True)
    stores = attach_stores(chunks)
    for late, pieces in ((0, 1), (1, 3)):
        run_step(chunks, with_weights(pairs(1, 3), late=late, pieces=pieces), stores)
        assert_equal(gradients(chunks), expected)


class SequenceParallel(torch.nn.Module):
    """The layers of a sequence-parallel model; megatron-core's norms of torch refuse to be one."""

    def __init__(self, core: TransformerConfig) -> None:
        super().__init__()
        given = {"config": core, "init_method": torch.nn.init.xavier_normal_}
        linear = {**given, "bias": True, "skip_bias_add": False}
        self.word_embeddings = VocabParallelEmbedding(
            VOCABULARY, HIDDEN, reduce_scatter_embeddings=True, **given
        )
        self.fc1 = ColumnParallelLinear(HIDDEN, 4 * HIDDEN, **linear)
        self.fc2 = RowParallelLinear(4 * HIDDEN, HIDDEN, input_is_parallel=True, **linear)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[b, s] -> [s / ranks, b, h]``."""
        hidden = self.word_embeddings(tokens)
        output: torch.Tensor = self.fc2(torch.tanh(self.fc1(hidden)[0]))[0] + hidden
        return output


def check_sequence_parallel() -> None:
    """Layers of two sequence-parallel ranks; weight gradients gather their input anew."""
    core = core_config(tensor_model_parallel_size=2, sequence_parallel=True)
    results = []
    for splits in (False, True):
        seed()
        model = SequenceParallel(core)
        if splits:
            assert defer_layers(model) == []
        store = WeightGradientStore()
        assert attach_store(model, store) == (3 if splits else 0)
        store.active = splits
        for number in range(3):
            tokens = torch.randint(0, VOCABULARY, (SAMPLES, SEQUENCE))
            with store.collect(number):
                model(tokens).square().sum().backward()
        for number in range(3):
            store.run(number, 0, 2)
            store.run(number, 1, 2)
        results.append({name: p.grad for name, p in model.named_parameters()})
    assert_equal(results[1], results[0])


def check_data_parallel(overlap: bool, distributed: bool, explicit: bool) -> None:
    """Steps, whole and split by turns, of two replicas that finish chunks in different order."""
    settings = DistributedDataParallelConfig(
        overlap_grad_reduce=overlap, use_distributed_optimizer=distributed, bucket_size=5000
    )
    collect = reduced if distributed else gradients
    results = []
    for splits in (False, True):
        core = core_config()
        chunks = build(core, chunks=2, settings=settings)
        if overlap:
            core.no_sync_func = [chunk.no_sync for chunk in chunks]
            if explicit:
                core.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
        stores = attach_stores(chunks) if splits else None
        whole = pairs(2, 3)
        late = with_weights(whole, late=3, pieces=2)
        if parallel_state.get_data_parallel_rank() == 0:
            # Here the first chunk is complete before the last.
            order = {0: 1, 1: 2}
            late = [
                *(action for action in late if action[0] != "W"),
                *sorted((a for a in late if a[0] == "W"), key=lambda a: (order[a[1]], a[2], a[3])),
            ]
        for number in range(5):
            split = splits and number % 4 != 0  # a whole step before and after split ones
            run_step(chunks, late if split else whole, stores if split else None)
            results.append(collect(chunks))
    for found in results[1:]:
        assert_equal(found, results[0])


def main() -> None:
    """Run all checks on every rank; the process groups are made anew for each."""
    faulthandler.dump_traceback_later(float(os.environ["WATCHDOG_S"]), exit=True)
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world,
        is_master=False,  # torchrun's agent already serves this port
        timeout=TIMEOUT,
    )
    checks: list[tuple[int, Callable[..., None], tuple[bool, ...]]] = [
        (2, check_tensor_parallel, ()),
        (2, check_sequence_parallel, ()),
        (1, check_data_parallel, (False, False, False)),
        (1, check_data_parallel, (True, False, False)),
        (1, check_data_parallel, (True, True, False)),
        (1, check_data_parallel, (True, True, True)),
    ]
    for number, (tp, check, arguments) in enumerate(checks):
        if rank == 0:
            print(check.__name__, *arguments, flush=True)
        corner = dist.PrefixStore(f"check-{number}", store)
        with job(corner, rank=rank, world=world, tp=tp):
            check(*arguments)
            dist.barrier()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
