"""Dropout depends on step, microbatch and layer alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.adaptive import accelerator

accelerator.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402
from megatron.core.utils import unwrap_model  # noqa: E402

from megatron.adaptive.gpt.forward import DropoutKeys, GptForward, _settle, _stir, feed  # noqa: E402
from megatron.adaptive.schedule.placement import Placement  # noqa: E402

TRACKED = "model-parallel-rng"


def draw() -> tuple[float, float]:
    """Numbers for replicated and for split tensors."""
    replicated = float(torch.rand((), device=accelerator.current_device()))
    with tensor_parallel.get_cuda_rng_tracker().fork():
        return replicated, float(torch.rand((), device=accelerator.current_device()))


class Drawing(TransformerLayer):  # type: ignore[misc]
    """A layer that multiplies with random numbers and writes down which."""

    def __init__(self, number: int, *, forks: bool = True) -> None:
        torch.nn.Module.__init__(self)
        self.config = SimpleNamespace(cuda_graph_impl="none")
        self.layer_number = number
        self.drawn: list[tuple[float, ...]] = []
        self._draw = draw if forks else lambda: (float(torch.rand(())),)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.drawn.append(self._draw())
        return given * self.drawn[-1][-1]


Numbers = tuple[float, ...]
Draws = Callable[..., Numbers]


@pytest.fixture
def draws(one_rank: None) -> Draws:
    """What is drawn under a key: outside of layers (0) or in a layer."""

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
    # A CPU generator starts from the lower half.
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
        monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda at=replica, **_: at)
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
    """Ranks that split the sequence would drop the same elements of their different parts."""
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 1)
    keys, plain, layer = DropoutKeys(5, enabled=True), Drawing(3), Drawing(3, forks=False)
    keys.attach([plain, layer])
    keys.apply(step=1, microbatch=0)
    plain(torch.ones(1))
    given = torch.ones(1, requires_grad=True)
    with tensor_parallel.get_cuda_rng_tracker().fork(TRACKED):
        output = tensor_parallel.checkpoint(layer, False, given)
    keys.apply(step=1, microbatch=1)
    before = torch.get_rng_state()
    # Here no fork tells any more which generator the layer ran on.
    output.backward()
    assert layer.drawn == [plain.drawn[0][1:]] * 2
    assert torch.equal(torch.get_rng_state(), before)


FLAGS = (
    "--micro-batch-size 2 --global-batch-size 4 --untie-embeddings-and-output-weights "
    "--attention-dropout 0.3 --hidden-dropout 0.3"
)
MICROBATCHES = [
    {
        "tokens": torch.arange(16).reshape(2, 8) * 5 % 97 + number,
        "labels": torch.arange(16).reshape(2, 8) * 7 % 97,
        "position_ids": torch.arange(8).expand(2, 8),
        "loss_mask": torch.ones(2, 8),
    }
    for number in range(2)
]
Losses = list[torch.Tensor]
Gradients = dict[str, torch.Tensor]


class Pipeline:
    """All stages of a model in this process, which runs them for one microbatch after the other.

    Args:
        build: builds the chunks of a rank.
        flags: settings of the model.
        placement: where stages would live.
    """

    def __init__(
        self,
        build: Callable[..., list[Any]],
        flags: str = "",
        placement: Placement = Placement(num_ranks=1, num_chunks=1),  # noqa: B008
    ) -> None:
        ranks = placement.num_ranks
        built = [build(f"{FLAGS} {flags}", rank, ranks) for rank in range(ranks)]
        places = [placement.locate(stage) for stage in range(placement.num_stages)]
        self.stages = [built[rank][chunk] for rank, chunk in places]
        self._keys = DropoutKeys(5, enabled=True)
        self._keys.attach(self.stages)
        self._forward = GptForward(accelerator.detect(0, backend="gloo"))

    def run(self, *, step: int = 1, backwards: Sequence[int] = ()) -> tuple[Losses, Gradients]:
        """Run all forwards, then the backwards in the given order.

        Returns:
            Losses ``[b, s]`` of the microbatches, and gradients by the parameters' place.
        """
        feeds = [feed(MICROBATCHES, 2) for _ in self.stages]
        forward = self._keys.keyed(self._forward, self.stages, step=step)
        losses = []
        for _ in MICROBATCHES:
            output = None
            for given, stage in zip(feeds, self.stages, strict=True):
                (model,) = unwrap_model([stage])
                model.set_input_tensor(output)
                output, _ = forward(given, stage)
            assert output is not None
            losses.append(output)
        for number in backwards:
            losses[number].mean().backward()
        gradients = {
            f"{place} {name}": parameter.main_grad.clone()
            for place, stage in enumerate(self.stages)
            for name, parameter in stage.named_parameters()
        }
        return [loss.detach() for loss in losses], gradients


Build = Callable[..., list[Any]]


def same(first: Losses, second: Losses) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("flags", "ranks", "chunks", "kind"),
    [
        ("", 2, 1, "loop"),
        ("--partition 0-1-3-0", 4, 1, "loop"),
        ("--pipeline-placement loop", 2, 2, "loop"),
        ("--pipeline-placement v --partition 1-0-2-1", 2, 2, "v"),
    ],
)
def test_stages_draw_what_the_whole_model_draws(
    flags: str, ranks: int, chunks: int, kind: Any, build: Build
) -> None:
    whole, _ = Pipeline(build).run()
    flags += f" --pipeline-model-parallel-size {ranks}"
    if chunks > 1:
        flags += f" --model-chunks {chunks}"
    cut = Pipeline(build, flags, Placement(num_ranks=ranks, num_chunks=chunks, kind=kind))
    assert len(cut.stages) == ranks * chunks
    losses, _ = cut.run()
    assert same(losses, whole)
    assert not same(cut.run(step=2)[0], whole)
    for stage in cut.stages:
        stage.eval()
    assert same(cut.run(step=1)[0], cut.run(step=2)[0])


@pytest.mark.parametrize(
    ("flags", "backwards"),
    [
        ("full --recompute-method uniform --recompute-num-layers 1", (0, 1)),
        ("full --recompute-method uniform --recompute-num-layers 2", (1, 0)),
        ("full --recompute-method block --recompute-num-layers 1", (1, 0)),
        ("selective", (1, 0)),
    ],
)
def test_what_is_recomputed_is_dropped_again(
    flags: str, backwards: Sequence[int], build: Build
) -> None:
    """When a layer runs again, the generators stand at another microbatch and layer."""
    losses, gradients = Pipeline(build).run(backwards=backwards)
    other = Pipeline(build, f"--recompute-granularity {flags}")
    again, recomputed = other.run(backwards=backwards)
    assert same(again, losses)
    assert list(recomputed) == list(gradients)
    for name, gradient in gradients.items():
        assert gradient.any()
        assert torch.equal(recomputed[name], gradient), name
