"""Checks that training with sliced sequences gives the same results as with whole microbatches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from megatron.adaptive import accelerator

accelerator.install()

from megatron.adaptive.config.arguments import parse  # noqa: E402
from megatron.adaptive.config.environment import Environment  # noqa: E402
from megatron.adaptive.engine.stages import ForwardBackward  # noqa: E402
from megatron.adaptive.errors import ConfigError  # noqa: E402
from megatron.adaptive.gpt import attention  # noqa: E402
from megatron.adaptive.gpt.attention import attend_to_earlier  # noqa: E402
from megatron.adaptive.gpt.initialize import end_job, start_job  # noqa: E402
from megatron.adaptive.gpt.sequence_slices import LastKeysAndValues, SequenceSlices  # noqa: E402
from megatron.adaptive.gpt.setup import Run, build_run, make_loader  # noqa: E402
from megatron.adaptive.gpt.train_step import Step  # noqa: E402
from megatron.adaptive.schedule.action import place_of  # noqa: E402

from .conftest import SMALL  # noqa: E402

FLAGS = (
    f"{SMALL} --num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --micro-batch-size 2 --global-batch-size 4 --train-iters 4 "
    "--lr 1e-2 --eval-iters 1 --attention-dropout 0 --hidden-dropout 0"
)
LLAMA = (
    "--untie-embeddings-and-output-weights --position-embedding-type rope --swiglu "
    "--group-query-attention --num-query-groups 2 --normalization RMSNorm --disable-bias-linear"
)
WINDOWS = f"{LLAMA} --window-size 40,0 --window-attn-skip-freq 3"
BOUNDED = (
    f"{WINDOWS} --attention-softcap 2 --window-rotary-base 100 --norm-block-outputs "
    "--calculate-per-token-loss"
)
LATENT = (
    "--untie-embeddings-and-output-weights --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --disable-bias-linear --multi-latent-attention --q-lora-rank 16 "
    "--kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 --num-experts 4 "
    "--moe-ffn-hidden-size 16 --moe-router-topk 2 --moe-router-load-balancing-type none "
    "--moe-token-dispatcher-type alltoall"
)
DOCUMENTS = "--eod-mask-loss --reset-attention-mask --reset-position-ids"
PACKED = "--variable-seq-lengths --micro-batch-size 1 --global-batch-size 12"
ROWS = f"{LLAMA} --variable-seq-lengths --global-batch-size 8"
FUSED = "--attention-backend fused"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective"
SPLIT = "--split-backward True"
REL = 1e-6  # This is the relative tolerance for 32-bit floating-point numbers.


class Numbers(NamedTuple):
    """Results of an evaluation and a training step."""

    evaluated: float
    loss: float
    norm: float
    gradients: list[torch.Tensor]


Train = Callable[[str], tuple[Run, Numbers]]


@pytest.fixture
def train() -> Iterator[Train]:
    """Yields a function that builds a run in one process, evaluates it, and trains one step."""
    runs: list[Run] = []

    def end() -> None:
        while runs:
            run = runs.pop()
            if run.wiring is not None:
                run.wiring.close()
            end_job()

    def build(flags: str = "") -> tuple[Run, Numbers]:
        end()
        config = parse(f"{FLAGS} {flags}".split(), world_size=1, last_wins=True)
        run = build_run(start_job(config, Environment(), accelerator.detect(0, backend="gloo")))
        runs.append(run)
        step = Step(run)
        loader = make_loader(run, run.samples.train, 0)
        assert loader is not None
        count = config.num_microbatches
        evaluated = step.evaluate(make_loader(run, run.samples.valid, 0), 1, count)["lm loss"]
        gradients: list[torch.Tensor] = []

        def keep() -> None:
            weights: Any = [weight for chunk in run.chunks for weight in chunk.parameters()]
            gradients.extend(weight.main_grad.clone() for weight in weights)

        result = step.train(loader.step(count), count, 1, before_update=keep)
        assert result.grad_norm is not None
        return run, Numbers(evaluated, result.losses["lm loss"], result.grad_norm, gradients)

    yield build
    end()


def assert_close(seen: Numbers, expected: Numbers, rel: float = REL) -> None:
    assert seen[:3] == pytest.approx(expected[:3], rel=rel, abs=0)
    for value, reference in zip(seen.gradients, expected.gradients, strict=True):
        assert float((value - reference).norm()) <= rel * float(reference.norm())


@pytest.mark.parametrize(
    "model",
    [
        "",
        pytest.param(LLAMA, marks=pytest.mark.long),
        pytest.param(WINDOWS, marks=pytest.mark.long),
        pytest.param(BOUNDED, marks=pytest.mark.long),
        pytest.param(DOCUMENTS, marks=pytest.mark.long),
        pytest.param(LATENT, marks=pytest.mark.long),
    ],
    ids=range(6),
)
def test_slices_equal_whole_microbatches(train: Train, model: str) -> None:
    _, expected = train(model)
    for count, options in (
        (2, SPLIT),
        (5, FULL),
        (8, SELECTIVE),
        (16, ""),
        (7, f"{SPLIT} {FULL}"),
        (3, "--pipeline-schedule seq-1f1b"),
    )[: 3 if model == LATENT else None]:
        _, seen = train(f"{model} {options} --sequence-slices {count}")
        assert_close(seen, expected)


@pytest.mark.parametrize(
    "model",
    ["", DOCUMENTS, *(pytest.param(model, marks=pytest.mark.long) for model in (LATENT, LLAMA))],
    ids=range(4),
)
def test_slices_in_blocks_equal_whole_microbatches(
    train: Train, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = train(model)
    monkeypatch.setattr(attention, "SCORE_BLOCK", 16)
    for options in (f"{SPLIT} --sequence-slices 3", f"{FULL} --sequence-slices 5"):
        _, seen = train(f"{model} {options}")
        assert_close(seen, expected)


def test_blocks_store_no_scores_with_tokens_after_them(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept_bytes(flags: str) -> int:
        run, _ = train(f"--micro-batch-size 1 --num-layers 1 {flags}")
        assert isinstance(run.forward_backward, ForwardBackward)
        return sum(run.forward_backward.activation_bytes())

    cut = "--sequence-slices 2 --slice-cut equal-length"
    slices = kept_bytes(cut)
    monkeypatch.setattr(attention, "SCORE_BLOCK", 32)
    blocks = kept_bytes(cut)
    # Two slices store 3/4 of the scores, and eight blocks of 32 tokens store 9/16 of the scores.
    scores = 4 * 256**2 * 4  # There are four heads, and a score takes 4 bytes.
    assert slices - blocks == pytest.approx((3 / 4 - 9 / 16) * scores, rel=0.1)


PACK = "--pack-to 300"
CUTS = (
    f"{PACK} --sequence-slices 3 {SPLIT}",
    f"{PACK} --sequence-slices 16 {FULL}",
    f"--slice-tokens 48 {SPLIT}",
    "--slice-tokens 500",
    f"--slice-tokens 20 {FULL}",
    f"--slice-tokens 100 {SELECTIVE}",
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "whole", "cuts"),
    [
        pytest.param(f"{PACKED} {LLAMA} {FUSED}", PACK, CUTS, marks=pytest.mark.long),
        pytest.param(f"{PACKED} {BOUNDED}", PACK, CUTS, marks=pytest.mark.long),
        (PACKED, PACK, CUTS[1:4]),
        pytest.param(
            f"{PACKED} {LATENT} --rope-type yarn",
            "",
            (f"--slice-tokens 48 {FULL}",),
            marks=pytest.mark.long,
        ),
        pytest.param(
            ROWS,
            "",
            ("--sequence-slices 3", f"--sequence-slices 16 {FULL}"),
            marks=pytest.mark.long,
        ),
    ],
    ids=range(5),
)
def test_slices_of_documents_equal_whole_microbatches(
    train: Train, model: str, whole: str, cuts: tuple[str, ...]
) -> None:
    _, expected = train(f"{model} {whole}")
    for flags in cuts:
        _, seen = train(f"{model} {flags}")
        assert_close(seen, expected)


@pytest.mark.parametrize("model", [LLAMA, WINDOWS])
def test_kernels_give_the_same(train: Train, model: str) -> None:
    _, expected = train(f"{model} {FUSED}")
    for count, options in ((3, ""), (8, FULL)):
        _, seen = train(f"{model} {FUSED} {options} --sequence-slices {count}")
        assert_close(seen, expected)


def test_16_bits_are_as_close_as_their_rounding(train: Train) -> None:
    _, expected = train(f"{LLAMA} --bf16")
    _, seen = train(f"{LLAMA} --bf16 --sequence-slices 4")
    assert seen[:3] == pytest.approx(expected[:3], rel=2e-2)


def test_the_same_order_twice_gives_the_same_bits(train: Train) -> None:
    flags = "--attention-dropout 0.1 --hidden-dropout 0.1 --sequence-slices 4"
    _, first = train(flags)
    # When activations are recomputed, dropout must drop the same elements again.
    _, second = train(f"{flags} {FULL}")
    assert first[:3] == second[:3]
    assert all(map(torch.equal, first.gradients, second.gradients))


def test_each_slice_has_its_own_dropout(train: Train) -> None:
    _, first = train("--hidden-dropout 0.3 --sequence-slices 2")
    _, second = train("--hidden-dropout 0.3 --sequence-slices 4")
    pairs = zip(first.gradients, second.gradients, strict=True)
    assert any(float((value - other).norm()) > 0.1 * float(value.norm()) for value, other in pairs)


@pytest.mark.long
def test_nothing_is_kept_after_a_step_and_memory_is_counted(train: Train) -> None:
    run, _ = train("")
    forward_backward: Any = run.forward_backward
    (whole,) = forward_backward.activation_bytes()
    run, _ = train("--sequence-slices 8")
    slices = run.slices
    assert slices is not None
    slices.begin(0, 0)
    assert list(slices.buffers()) == []
    # The keys and values of 3 layers are stored for 2 samples of 256 tokens, with a width of 32.
    assert sum(slices.kept_bytes(0, item) for item in range(8)) == 2 * 3 * 2 * 256 * 32 * 4
    forward_backward = run.forward_backward
    (cut,) = forward_backward.activation_bytes()
    assert cut < whole  # A rank stores fewer attention scores at a time if sequences are sliced.
    # The activation memory is measured for each slice. If all slices have the same length, later
    # slices need more memory, because they store scores for more keys.
    run, _ = train("--sequence-slices 8 --slice-cut equal-length")
    forward_backward = run.forward_backward
    sizes = [forward_backward._meter.bytes_of(number) for number in range(8)]
    assert all(after > before > 0 for before, after in itertools.pairwise(sizes))


def test_windows_keep_what_later_slices_see(train: Train) -> None:
    run, _ = train(f"{WINDOWS} --sequence-slices 4 --recompute-granularity selective")
    slices = run.slices
    assert slices is not None
    # The two layers with a window store 40 of the 64 tokens in the slice, and the third layer
    # stores all of them. Keys and values have two samples, and two groups with a width of 8.
    assert slices.kept_bytes(0, 0) == (2 * 40 + 64) * 2 * 2 * 16 * 4
    run, _ = train(f"{WINDOWS} --sequence-slices 4")
    assert run.slices is not None
    assert run.slices.kept_bytes(0, 0) == 3 * 64 * 2 * 2 * 16 * 4


def test_an_evaluation_drops_what_no_later_slice_sees() -> None:
    like = [torch.zeros(32, 1, 2, 8)] * 2
    kept = LastKeysAndValues(like, 40, forgets=True)
    whole = torch.arange(128.0).view(128, 1, 1, 1).expand(128, 1, 2, 8)
    for start in range(0, 128, 32):
        first = max(0, start - 40)
        seen, _ = kept.extend(first, start, [whole[start : start + 32]] * 2)
        assert torch.equal(seen, whole[first : start + 32])
        # The buffers must not contain more than the window and one slice.
        assert sum(map(len, kept.buffers)) <= 2 * (40 + 31)


def test_documents_in_one_slice_keep_nothing(train: Train) -> None:
    run, _ = train(f"{PACKED} {LLAMA} --slice-tokens 64")
    slices = run.slices
    assert slices is not None
    assert slices.sizes is not None
    assert set(slices.sizes) == {64}
    # The count is a tuple if microbatches may have different numbers of slices.
    assert isinstance(slices.count, tuple)
    positions = [place_of(item, slices.count) for item in range(len(slices.sizes))]
    tokens = [slices._cut(position.microbatch).kept_tokens(position.part) for position in positions]
    assert 0 < sum(tokens) < 64 * len(tokens)
    forward_backward: Any = run.forward_backward
    (nbytes,) = forward_backward.activation_bytes()
    assert nbytes > 0


def test_the_cap_counts_positions_of_unequal_microbatches(train: Train) -> None:
    run, _ = train(f"{PACKED} --pack-to 300")
    forward_backward: Any = run.forward_backward
    assert forward_backward._mean_size not in (0.0, 1.0)


def test_another_attention_is_refused_by_its_layer(train: Train) -> None:
    run, _ = train("")
    layers = [m for m in run.chunks[0].modules() if hasattr(m, "core_attention")]
    layers[1].core_attention = torch.nn.Identity()
    with pytest.raises(ConfigError, match=r"slices 4 is not supported .* layer 2 .Identity"):
        SequenceSlices((4, 8, 12, 16)).attach(run.chunks)


@pytest.mark.parametrize("earlier", [1, 37])
def test_attention_to_earlier_tokens_equals_masked_scores(earlier: int) -> None:
    generator = torch.Generator().manual_seed(1)

    def tensor(length: int) -> torch.Tensor:
        return torch.randn(1, 4, length, 16, generator=generator, requires_grad=True)

    leaves = [tensor(20), tensor(20 + earlier), tensor(20 + earlier)]
    query, key, value = leaves
    output = attend_to_earlier(query, key, value, 0.3)
    hidden = torch.ones(20, 20 + earlier, dtype=torch.bool).triu(earlier + 1)
    scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(hidden, -torch.inf)
    expected = scores.softmax(-1) @ value
    weights = torch.randn(output.shape, generator=generator)
    pairs = zip(
        (output, *torch.autograd.grad((output * weights).sum(), leaves)),
        (expected, *torch.autograd.grad((expected * weights).sum(), leaves)),
        strict=True,
    )
    for value, reference in pairs:
        torch.testing.assert_close(value, reference, rtol=2e-5, atol=2e-6)
