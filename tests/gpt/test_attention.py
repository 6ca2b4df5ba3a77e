"""Compares torch's attention kernels with attention that computes all scores."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.adaptive import accelerator

accelerator.install()

from megatron.core.transformer.enums import AttnBackend, AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron.adaptive.config.attention import AttentionCase, Kernel  # noqa: E402
from megatron.adaptive.gpt import attention  # noqa: E402
from megatron.adaptive.gpt.attention import Documents, LocalAttention  # noqa: E402

HEADS, WIDTH = 4, 16
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float64: 1e-12}
"""Maximum difference between equal results near 1: a few rounding errors of each dtype."""


def make_attention(backend: str, **settings: Any) -> LocalAttention:
    usual = {"attention_dropout": 0.0, "num_query_groups": HEADS, "attention_softmax_in_fp32": True}
    options = {name: settings.pop(name) for name in ("v_channels",) if name in settings}
    softcap = settings.pop("attention_softcap", None)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        attention_backend=AttnBackend[backend],
        **{**usual, **settings},
    )
    config.attention_softcap = softcap
    return LocalAttention(config, 1, AttnMaskType.causal, "self", **options)


def make_inputs(
    dtype: torch.dtype, *, length: int = 12, samples: int = 2, groups: int = HEADS, values: int = 16
) -> list[torch.Tensor]:
    """Returns random queries, keys and values of ``dtype`` with shape ``[s, b, heads, width]``.

    ``length`` is the number of tokens, ``samples`` is the number of sequences, ``groups`` is the
    number of heads of keys and values, and ``values`` is the width of values.
    """
    generator = torch.Generator().manual_seed(3)
    shapes = [(HEADS, WIDTH), (groups, WIDTH), (groups, values)]
    return [
        torch.randn(length, samples, *shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in shapes
    ]


def outcome(
    module: LocalAttention, inputs: list[torch.Tensor], mask: Any = None, **options: Any
) -> list[torch.Tensor]:
    """Returns the output of ``module`` with ``mask``, and the gradients of all ``inputs``."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    output = module(*leaves, mask, **options)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), leaves)]


def assert_same(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    for tensor, other in zip(first, second, strict=True):
        assert tensor.shape == other.shape
        tolerance = TOLERANCE[tensor.dtype]
        torch.testing.assert_close(tensor, other, rtol=tolerance, atol=tolerance)


def by_kernel(monkeypatch: pytest.MonkeyPatch, kernel: Kernel, *, shares: bool = False) -> None:
    """Makes all attention layers use the given ``kernel``, as they would on a GPU.

    If ``shares`` is true, the kernel accepts fewer heads of keys than of queries.
    """

    def choose(case: AttentionCase) -> Kernel:
        # For packed rows, the masked kernel is not used. Instead, the causal kernel runs for each
        # document.
        return Kernel.CAUSAL if kernel is Kernel.MASKED and case.is_packed else kernel

    monkeypatch.setattr(attention, "kernel_for", choose)
    monkeypatch.setattr(attention, "shares_keys", lambda case: shares)


def packed_by_documents(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    other_ends: torch.Tensor,
    longest: int,
    other_longest: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """Imitates torch's ``varlen_attn`` as it is documented, because it exists only for GPUs."""
    assert ends.dtype is other_ends.dtype is torch.int32
    bounds = ends.tolist()
    assert longest == other_longest == max(b - a for a, b in itertools.pairwise(bounds))
    left, right = window_size
    outputs = []
    for begin, end in itertools.pairwise(bounds):
        q, k, v = (tensor[begin:end].transpose(0, 1) for tensor in (query, key, value))
        assert len(q) == len(k) == len(v)
        distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)[None, :]
        seen = (distance >= -right) & ((distance <= left) | torch.tensor(left < 0))
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
class TestEqual:
    """Checks that kernels give equal outputs and gradients for all variants of attention."""

    @pytest.mark.parametrize("groups", [HEADS, 2, 1])
    @pytest.mark.parametrize("length", [1, 7, 12])
    def test_causal(self, dtype: torch.dtype, groups: int, length: int) -> None:
        inputs = make_inputs(dtype, groups=groups, length=length)
        first, second = (
            outcome(make_attention(name, num_query_groups=groups), inputs)
            for name in ("unfused", "fused")
        )
        assert_same(first, second)

    def test_queries_that_share_keys(
        self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inputs = make_inputs(dtype, groups=2)
        first = outcome(make_attention("unfused", num_query_groups=2), inputs)
        by_kernel(monkeypatch, Kernel.CAUSAL, shares=True)
        assert_same(first, outcome(make_attention("auto", num_query_groups=2), inputs))

    @pytest.mark.parametrize("scaled", [False, True])
    def test_scale(self, dtype: torch.dtype, scaled: bool) -> None:
        settings: dict[str, Any] = {"apply_query_key_layer_scaling": scaled}
        inputs = make_inputs(dtype)
        first, second = (outcome(make_attention(n, **settings), inputs) for n in ("local", "fused"))
        assert_same(first, second)

    @pytest.mark.parametrize("values", [8, 32])
    def test_values_of_another_width(
        self, dtype: torch.dtype, values: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inputs = make_inputs(dtype, values=values)
        first = outcome(make_attention("auto", v_channels=values), inputs)
        by_kernel(monkeypatch, Kernel.CAUSAL)
        second = outcome(make_attention("auto", v_channels=values), inputs)
        assert second[0].shape == (12, 2, HEADS * values)
        assert_same(first, second)

    @pytest.mark.parametrize("kernel", [Kernel.MASKED, Kernel.PACKED])
    @pytest.mark.parametrize("groups", [HEADS, 2])
    def test_window(
        self, dtype: torch.dtype, groups: int, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings: dict[str, Any] = {"window_size": (3, 0), "num_query_groups": groups}
        inputs = make_inputs(dtype, groups=groups)
        first = outcome(make_attention("unfused", **settings), inputs)
        causal = outcome(make_attention("unfused", num_query_groups=groups), inputs)
        assert not torch.allclose(first[0], causal[0], atol=0.1)
        monkeypatch.setattr(attention, "varlen_attn", packed_by_documents)
        by_kernel(monkeypatch, kernel)
        assert_same(first, outcome(make_attention("auto", **settings), inputs))

    def test_mask_of_the_data(self, dtype: torch.dtype) -> None:
        inputs = make_inputs(dtype)
        hidden = torch.ones(2, 1, 12, 12, dtype=torch.bool).triu(1)
        hidden[0, :, 5:, :5] = True
        hidden[1, :, 9:, :9] = True
        first, second = (outcome(make_attention(n), inputs, hidden) for n in ("unfused", "fused"))
        assert_same(first, second)

    @pytest.mark.parametrize(
        ("window", "kernel"),
        [
            (None, Kernel.CAUSAL),
            ((2, 0), Kernel.MASKED),
            (None, Kernel.PACKED),
            ((2, 0), Kernel.PACKED),
        ],
    )
    def test_packed_documents(
        self,
        dtype: torch.dtype,
        window: tuple[int, int] | None,
        kernel: Kernel,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        settings: dict[str, Any] = {"window_size": window, "num_query_groups": 2}
        inputs = [projection.squeeze(1) for projection in make_inputs(dtype, samples=1, groups=2)]
        documents = Documents.of(torch.tensor([5, 1, 6]), lambda tensor: tensor)
        first = outcome(make_attention("unfused", **settings), inputs, packed_seq_params=documents)
        monkeypatch.setattr(attention, "varlen_attn", packed_by_documents)
        by_kernel(monkeypatch, kernel)
        second = outcome(make_attention("auto", **settings), inputs, packed_seq_params=documents)
        assert second[0].shape == (12, 1, HEADS * WIDTH)
        assert_same(first, second)

    @pytest.mark.parametrize("rank", [0, 1])
    def test_part_of_a_sequence(
        self, dtype: torch.dtype, rank: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        query, key, value = make_inputs(dtype)
        whole = outcome(make_attention("unfused"), [query, key, value])[0]
        chunks = [torch.arange(12).chunk(4)[part] for part in (rank, 3 - rank)]
        rows = torch.cat(chunks)

        class Group:
            def rank(self) -> int:
                return rank

        monkeypatch.setattr(attention.parallel_state, "get_context_parallel_group", Group)
        monkeypatch.setattr(LocalAttention, "_all_parts", lambda self, tensor, group: tensor)
        outcomes = []
        for name in ("unfused", "fused"):
            module = make_attention(name, context_parallel_size=2)
            leaves = [tensor.clone().requires_grad_() for tensor in (query[rows], key, value)]
            output = module(*leaves)
            weights = torch.linspace(-1, 1, output.numel(), dtype=dtype).view_as(output)
            outcomes.append([output, *torch.autograd.grad((output * weights).sum(), leaves)])
        assert_same(*outcomes)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(outcomes[1][0], whole[rows], rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "settings",
    [{"attention_softcap": 2.0}, {"softmax_type": "off-by-one"}, {"softmax_type": "learnable"}],
    ids=str,
)
def test_what_no_kernel_computes_stays_as_it_is(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_kernel(*_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("a kernel was called")

    inputs = make_inputs(torch.float32)
    settings |= {"perform_initialization": False} if "softmax_type" in settings else {}
    modules = [make_attention(name, **settings) for name in ("unfused", "fused")]
    for module in modules:
        if module.softmax_offset is not None:
            with torch.no_grad():
                module.softmax_offset.fill_(0.5)
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", no_kernel)
    first, second = (outcome(module, inputs) for module in modules)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    plain = outcome(make_attention("unfused"), inputs)
    assert not torch.allclose(first[0], plain[0], atol=1e-3)


@pytest.mark.usefixtures("one_rank")
def test_a_cpu_keeps_its_numbers_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(torch.float32)
    first, second = (outcome(make_attention(name), inputs) for name in ("unfused", "auto"))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.usefixtures("one_rank")
def test_dropout_of_a_kernel_draws_from_the_generator_for_split_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_kernel(monkeypatch, Kernel.CAUSAL)
    module = make_attention("auto", attention_dropout=0.5)
    inputs = make_inputs(torch.float32, length=64)
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = (module(*inputs) for _ in range(2))
        assert torch.equal(torch.get_rng_state(), before)
        assert not torch.allclose(first, second)
        mean = torch.stack([module(*inputs) for _ in range(400)]).mean(0)
    module.eval()
    whole = module(*inputs)
    assert torch.equal(whole, module(*inputs))
    # The mean over 400 random dropout masks must be close to the output without dropout.
    assert (mean - whole).abs().mean() < 3 * (first - whole).abs().mean() / 20


def test_models_of_one_process_take_different_kernels(build: Callable[..., list[Any]]) -> None:
    """Checks that models with different attention backends can be built in one process."""
    kinds = {}
    for name in ("fused", "unfused", "auto"):
        (chunk,) = build(f"--attention-backend {name} --transformer-impl local")
        modules = [module for module in chunk.modules() if isinstance(module, LocalAttention)]
        assert len(modules) == 4
        kinds[name] = {module.case.backend for module in modules}
    assert kinds == {name: {name} for name in kinds}


def kept_bytes(run: Callable[[], torch.Tensor]) -> int:
    """Returns the size in bytes of all memory that ``run()`` keeps until its backward pass."""
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = run()
    kept[output.untyped_storage().data_ptr()] = output.untyped_storage().nbytes()
    return sum(kept.values())


@pytest.mark.usefixtures("one_rank")
def test_a_kernel_keeps_no_scores() -> None:
    length, samples = 256, 2
    inputs = make_inputs(torch.float32, length=length, samples=samples)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    scores_bytes = 4 * samples * HEADS * length**2
    fused = kept_bytes(lambda: make_attention("fused")(*leaves))
    unfused = kept_bytes(lambda: make_attention("unfused")(*leaves))
    inputs_bytes = 4 * sum(tensor.numel() for tensor in inputs)
    output_bytes, sums_bytes = inputs_bytes // 3, 4 * samples * HEADS * length
    assert unfused >= scores_bytes + inputs_bytes
    assert fused == inputs_bytes + output_bytes + sums_bytes


@pytest.mark.usefixtures("one_rank")
def test_layers_share_the_mask_that_their_backwards_keep() -> None:
    inputs = [tensor.requires_grad_() for tensor in make_inputs(torch.float32, length=64)]
    masks: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] == (64, 64):
            masks.add(tensor.untyped_storage().data_ptr())
        return tensor

    layers = [make_attention("fused", window_size=(3, 0)) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = [layer(*inputs) for layer in layers]
    assert len(outputs) == 3
    assert len(masks) == 1


def test_the_packed_kernel_of_an_older_torch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_release(query: Any, key: Any, value: Any, is_causal: bool = False) -> None: ...

    def later(query: Any, key: Any, value: Any, *, scale: Any, window_size: Any) -> None: ...

    for function, has in ((None, False), (first_release, False), (later, True)):
        monkeypatch.setattr(attention, "varlen_attn", function)
        assert attention.has_packed_kernel() is has
