"""Defines small models with cut points. Each model has a property that makes cutting difficult."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from megatron.adaptive.modules import CutPoint, Pipeline

WIDTH, WORDS = 8, 16


class Knotty(nn.Module):
    """Model with shared weights, skip connections, dropout, a running mean and unequal blocks.

    The model computes a loss from ``ids [n, s] int64``, ``mask [n, s] bool`` and ``label [n, s]
    int64``.
    """

    def __init__(self, blocks: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.mixer = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(blocks))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.dropout = dropout

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the batch."""
        first = self.mixer(self.words(ids))
        weight = mask.float().unsqueeze(-1) / mask.sum(dim=1, keepdim=True).unsqueeze(-1)
        gate = torch.sigmoid(first.mean(dim=1, keepdim=True))
        x = first
        for number, (block, cut) in enumerate(zip(self.blocks, self.cuts, strict=True)):
            x = x + torch.tanh(block(F.dropout(x, self.dropout, self.training))) * weight
            if number == 1:
                x = self.norm(x.flatten(0, 1)).view_as(x)
            if number == 4:
                x = x + first
            x = cut(x)
        return F.cross_entropy(self.head(self.mixer(x) * gate).flatten(0, 1), label.flatten())


class Tower(nn.Module):
    """Model whose costs can be computed by hand. It computes a loss from ``x [n, width]``."""

    def __init__(self, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(layers - 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the batch ``x``."""
        for layer, cut in zip(self.layers, [*self.cuts, nn.Identity()], strict=True):
            x = cut(torch.sigmoid(layer(x)))
        return x.mean()


SHARED = [["words.weight", "head.weight"], ["mixer.weight"], ["mixer.bias"]]


def knotty(**options: float) -> Knotty:
    """Returns a :class:`Knotty` with the same weights in each call."""
    torch.manual_seed(3)
    return Knotty(**options)  # type: ignore[arg-type]


class Wasteful(Knotty):
    """Model with a layer whose output is not used, like the pooler of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the batch."""
        loss = super().forward(ids, mask, label)
        self.pooler(self.words(ids)[:, 0])
        return loss


def wasteful() -> Wasteful:
    """Returns a :class:`Wasteful` with the same weights in each call."""
    torch.manual_seed(3)
    return Wasteful()


class Sharp(nn.Module):
    """Model whose gradients between stages overflow in fp16 if the loss scale is large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(3))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the batch."""
        x = F.one_hot(ids % 8, 8).float()
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number < 3:
                x = self.cuts[number](x)
        return (x.float() ** 2).sum()


def make_batch(samples: int, seed: int = 0, length: int = 5) -> dict[str, torch.Tensor]:
    """Returns a batch of ``samples`` random samples for :func:`knotty`.

    Each sample has ``length`` tokens, drawn with ``seed``.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (samples, length), generator=generator)
    return {
        "ids": ids,
        "mask": torch.rand(samples, length, generator=generator) > 0.2,
        "label": ids.roll(-1, dims=1),
    }


class Net(nn.Module):
    """Model with dropout and with a buffer that each forward pass changes.

    The model computes a loss from ``x [n, 4]``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.cut, self.last = CutPoint(), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the batch ``x``."""
        x = F.dropout(self.norm(self.first(x)), 0.1, self.training)
        return self.last(self.cut(x)).square().mean()


def batch_of(step: int, samples: int = 4) -> dict[str, torch.Tensor]:
    """Returns the batch of training step ``step`` for :class:`Net`, with ``samples`` samples."""
    return {"x": torch.randn(samples, 4, generator=torch.Generator().manual_seed(step))}


class Training:
    """Trains :class:`Net` in this process with a learning rate scheduler, and stores the losses."""

    def __init__(
        self, samples: int = 4, precision: Any = None, optimizer: Any = torch.optim.AdamW
    ) -> None:
        torch.manual_seed(1)
        self.pipeline = Pipeline(
            Net(), batch_of(0, samples), micro_batch_size=2, mixed_precision=precision
        )
        self.optimizer = optimizer(self.pipeline.parameters(), lr=0.1)
        # This loss scale makes the first steps overflow in fp16, so the optimizer has no state yet.
        self.pipeline.set_optimizer(self.optimizer, initial_loss_scale=2.0**40)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], 0.5)
        self.state: dict[str, Any] = {"scheduler": self.scheduler}
        self.losses: dict[int, float] = {}

    def run(
        self,
        total: int,
        folder: Path | None,
        *,
        last: int | None = None,
        before: Callable[[int], object] = lambda step: None,
        **options: Any,
    ) -> None:
        """Trains until step ``total``, or stops before step ``last`` if it is not ``None``.

        Stopping early leaves the run in the state of a killed process. Checkpoints are in
        ``folder``. Before each step is trained, ``before`` is called with the number of the step.
        """
        for step in self.pipeline.loop(total, folder=folder, state=self.state, **options):
            if step == last:
                break
            before(step)
            self.losses[step], _ = self.pipeline.step(batch_of(step))
            self.scheduler.step()


IMAGE = WORDS - 1


class Viewer(nn.Module):
    """Model that encodes images of different sizes and decodes text of any length.

    ``ids [n, s] int64`` contains ``IMAGE`` at the position of an image. ``patches [p, 6]`` contains
    the patches of all images, and ``sizes [images] int64`` contains the number of patches of each
    image. Without images, ``patches`` and ``sizes`` are absent.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.eye = nn.Linear(6, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layer_cuts = nn.ModuleList(CutPoint() for _ in range(3))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout, batch_first=True) for _ in range(4)
        )
        self.cuts = nn.ModuleList(CutPoint() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(
        self,
        ids: torch.Tensor,
        patches: torch.Tensor | None = None,
        sizes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the loss of a batch with the entries ``ids``, ``patches`` and ``sizes``."""
        x = self.words(ids)
        if patches is not None:
            assert sizes is not None
            seen = self.eye(patches)
            for layer, cut in zip(self.layers, self.layer_cuts, strict=True):
                seen = cut(seen + torch.tanh(layer(seen)))
            images = torch.stack([image.mean(dim=0) for image in seen.split(sizes.tolist())])
            where = (ids == IMAGE).unsqueeze(-1).expand_as(x)
            x = x.masked_scatter(where, images)
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        for block, cut in zip(self.blocks, self.cuts, strict=True):
            x = cut(block(x, src_mask=mask))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def viewer(**options: float) -> Viewer:
    """Returns a :class:`Viewer` with the same weights in each call."""
    torch.manual_seed(6)
    return Viewer(**options)


def frozen_viewer() -> Viewer:
    """Returns a :class:`Viewer` whose image encoder is frozen.

    The model embeds the text before it encodes the images.
    """
    model = viewer()
    model.eye.requires_grad_(False)
    model.layers.requires_grad_(False)
    return model


def viewed(images: int, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns a microbatch for :func:`viewer` with ``length`` words and ``images`` images.

    The content is drawn with ``seed``.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, IMAGE, (1, length + images), generator=generator)
    if not images:
        return {"ids": ids}
    ids[0, torch.randperm(length + images, generator=generator)[:images]] = IMAGE
    sizes = torch.randint(1, 5, (images,), generator=generator)
    patches = torch.randn(int(sizes.sum()), 6, generator=generator)
    return {"ids": ids, "patches": patches, "sizes": sizes}


class Plain(nn.Module):
    """Model whose blocks have no cut points, and which never calls the last block.

    The model computes a loss from ``x [n, 8]``.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)
        )
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the batch ``x``."""
        x = self.first(x)
        for block in self.blocks[:4]:
            x = x + block(x)
        return self.last(x).square().mean()


class Single(nn.Module):
    """Model that has no repeated blocks, so that no cut points can be added."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Returns the loss of a batch with the entries ``ids``, ``mask`` and ``label``."""
        return self.words(ids).square().mean() * mask.float().mean() + label.float().mean()
