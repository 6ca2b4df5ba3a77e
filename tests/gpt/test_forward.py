"""Loss, data feed, and dropout that follows the microbatch."""

from __future__ import annotations

import pytest
import torch

from megatron.adaptive import accelerator

accelerator.install()

from megatron.adaptive.gpt.forward import (  # noqa: E402
    LOSS_NAME,
    ChunkFeed,
    DropoutKeys,
    GptForward,
    masked_mean_loss,
)

pytestmark = pytest.mark.usefixtures("one_rank")


def test_loss_is_the_mean_of_what_the_mask_leaves() -> None:
    losses = torch.tensor([[1.0, 2.0], [3.0, 100.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    loss, reported = masked_mean_loss(mask, losses)
    assert float(loss) == 2.0
    assert float(reported[LOSS_NAME]) == 2.0
    assert not reported[LOSS_NAME].requires_grad
    loss.backward()
    assert losses.grad is not None
    assert losses.grad.tolist() == [[0.5, 0.0], [0.5, 0.0]]


def test_loss_of_nothing_is_zero() -> None:
    loss, _ = masked_mean_loss(torch.zeros(2, 2), torch.ones(2, 2))
    assert float(loss) == 0.0


class Noisy(torch.nn.Module):
    """Answers with the tokens, or a random number where there are none."""

    def forward(
        self,
        tokens: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        labels: torch.Tensor | None,
    ) -> torch.Tensor:
        return torch.rand(1) if tokens is None else tokens * labels


def test_forward_takes_the_next_microbatch() -> None:
    forward = GptForward(accelerator.detect(0, backend="gloo"), DropoutKeys(5, enabled=True))
    batch = {
        "tokens": torch.tensor([[2, 3]]),
        "labels": torch.tensor([[5, 7]]),
        "position_ids": torch.tensor([[0, 1]]),
        "loss_mask": torch.tensor([[1.0, 0.0]]),
    }
    output, loss_function = forward(ChunkFeed([batch], count=1, step=1), Noisy())
    assert output.tolist() == [[10, 21]]
    loss, _ = loss_function(output)
    assert float(loss) == 10.0


def test_forward_without_data_has_no_loss() -> None:
    forward = GptForward(accelerator.detect(0, backend="gloo"), DropoutKeys(5, enabled=True))

    def run(step: int, *, training: bool = True) -> list[float]:
        feed = ChunkFeed(None, count=2, step=step)
        model = Noisy().train(training)
        pairs = [forward(feed, model) for _ in range(2)]
        assert all(function is None for _, function in pairs)
        return [float(output) for output, _ in pairs]

    assert run(1) == run(1) != run(2)
    # Validation has no dropout and takes no keys.
    state = torch.get_rng_state()
    first = run(1, training=False)
    torch.set_rng_state(state)
    assert run(2, training=False) == first
