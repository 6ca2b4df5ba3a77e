"""Tests that dropout depends only on the seed, the step, the microbatch and the layer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from megatron.adaptive import accelerator

accelerator.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

from megatron.adaptive.gpt.forward import DropoutKeys, _settle, _stir  # noqa: E402

TRACKED = "model-parallel-rng"


def draw() -> tuple[float, float]:
    """Returns two random numbers: one for replicated tensors, and one for split tensors."""
    replicated = float(torch.rand((), device=accelerator.current_device()))
    with tensor_parallel.get_cuda_rng_tracker().fork():
        return replicated, float(torch.rand((), device=accelerator.current_device()))


class Drawing(TransformerLayer):  # type: ignore[misc]
    """Layer that multiplies its input by random numbers, and stores these numbers."""

    def __init__(self, number: int, *, forks: bool = True) -> None:
        torch.nn.Module.__init__(self)
        self.config = SimpleNamespace(cuda_graph_impl="none")
        self.layer_number = number
        self.drawn: list[tuple[float, ...]] = []
        self._draw = draw if forks else lambda: (float(torch.rand(())),)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.drawn.append(self._draw())
        return hidden * self.drawn[-1][-1]


Numbers = tuple[float, ...]
Draws = Callable[..., Numbers]


@pytest.fixture
def draws(one_rank: None) -> Draws:
    """Returns a function that draws random numbers in layer ``layer``.

    If ``layer`` is 0, the numbers are drawn outside of the layers.
    """

    def run(layer: int = 2, seed: int = 5, step: int = 3, microbatch: int = 2) -> Numbers:
        keys = DropoutKeys(seed, enabled=True)
        module = Drawing(layer)
        keys.attach([torch.nn.Sequential(module)])
        keys.apply(step=step, microbatch=microbatch)
        if layer == 0:
            return draw()
        module(torch.ones(1))
        return module.drawn[-1]

    return run


def test_a_seed_tells_its_key() -> None:
    keys = [0, 1, 2, 1 << 12, 1 << 24, 1 << 40, (1 << 64) - 1, 0x0123456789ABCDEF]
    seeds = [_stir(key) for key in keys]
    assert [_settle(seed) for seed in seeds] == keys
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    # Random generators on a CPU use only the lower 32 bits of a seed, so these bits must differ.
    assert len({_stir(step << 40) % (1 << 32) for step in range(1000)}) == 1000


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu])], ids=["cpu", "cuda"]
)
def test_a_state_keeps_all_bits_of_its_seed(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    seed = 0xFEDCBA9876543210
    first, second = torch.Generator(device), torch.Generator(device)
    first.manual_seed(seed)
    torch.rand(7, generator=first, device=device)
    second.set_state(first.get_state())
    assert second.initial_seed() == seed


def test_random_numbers_depend_on_the_key_alone(draws: Draws) -> None:
    first = draws()
    others = [draws(seed=6), draws(step=4), draws(microbatch=3), draws(layer=3), draws(layer=0)]
    torch.rand(100)
    assert draws() == first
    numbers = [number for pair in (first, *others) for number in pair]
    assert len(set(numbers)) == len(numbers)


def test_no_two_numbers_of_a_step_have_one_key(draws: Draws) -> None:
    drawn = [draws(microbatch=2 + (turn << 16)) for turn in range(4)]
    assert len({number for pair in drawn for number in pair}) == 8
    assert draws(microbatch=2) == drawn[0]


def test_ranks_differ_where_their_tensors_do(draws: Draws, monkeypatch: pytest.MonkeyPatch) -> None:
    (replicated, split), layer_0 = draws(), draws(layer=0)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 1)
    assert draws()[0] == replicated
    assert draws()[1] != split
    assert draws(layer=0)[0] == layer_0[0]
    assert draws(layer=0)[1] != layer_0[1]
    monkeypatch.undo()
    monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: 1)
    assert not set(draws()) & {replicated, split}


def test_replicas_draw_what_one_rank_draws_for_their_microbatches(
    draws: Draws, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [draws(microbatch=index) for index in range(6)]
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda **_: 3)
    for replica in range(3):
        monkeypatch.setattr(
            parallel_state, "get_data_parallel_rank", lambda dp_rank=replica, **_: dp_rank
        )
        assert [draws(microbatch=index) for index in range(2)] == alone[replica::3]


@pytest.mark.usefixtures("one_rank")
def test_without_dropout_nothing_is_touched() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    keys, layer = DropoutKeys(5, enabled=False), Drawing(1)
    keys.attach([layer])
    keys.apply(step=1, microbatch=1)
    assert not layer._forward_pre_hooks
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("one_rank")
def test_in_evaluation_layers_leave_the_generators_alone() -> None:
    keys, layer = DropoutKeys(5, enabled=True), Drawing(1, forks=False)
    keys.attach([layer])
    layer.eval()
    torch.manual_seed(1)
    expected = [(float(torch.rand(())),) for _ in range(2)]
    torch.manual_seed(1)
    for _ in range(2):
        layer(torch.ones(1))
    assert layer.drawn == expected


@pytest.mark.usefixtures("one_rank")
def test_layers_within_a_fork_stay_on_the_generator_for_split_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks that a layer draws the same numbers if it is recomputed after the fork has ended."""
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 1)
    keys, plain, layer = DropoutKeys(5, enabled=True), Drawing(3), Drawing(3, forks=False)
    keys.attach([plain, layer])
    keys.apply(step=1, microbatch=0)
    plain(torch.ones(1))
    hidden = torch.ones(1, requires_grad=True)
    with tensor_parallel.get_cuda_rng_tracker().fork(TRACKED):
        output = tensor_parallel.checkpoint(layer, False, hidden)
    keys.apply(step=1, microbatch=1)
    before = torch.get_rng_state()
    # The fork has ended before the backward pass recomputes the layer. The layer must still use the
    # generator for split tensors.
    output.backward()
    assert layer.drawn == [plain.drawn[0][1:]] * 2
    assert torch.equal(torch.get_rng_state(), before)
