"""Tests that small random models of all Hugging Face families compute the same as transformers.

A test creates a model with ``transformers``, and computes its logits and gradients. Ranks of this
project then load the model with random parallel sizes, and report how much their results differ. By
default, a few models are tested, which are the same in every run. With ``HF_EXAMPLES=50``, 50
models of each family are tested.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.adaptive.cli.checkpoint import export_hf, import_hf

from ..multiprocess.launch import Ranks, tail
from . import tiny_models
from .test_hugging_face_weights import GRADIENTS, LOGITS, WORKER

EXAMPLES = int(os.environ.get("HF_EXAMPLES", "0"))
LIMIT_S = 60.0
SHORT = ("llama", "gpt2", "mixtral", "qwen3")  # The short suite tests only these families.


class Answering:
    """Starts ranks that load several models one after another, and reads their results."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self._folder, self.world_size = folder, world_size
        self._ranks: Ranks | None = None
        self._starts = itertools.count()

    def gaps(self, model: Path, flags: list[str]) -> dict[str, float]:
        """Returns the largest relative error of the logits and of the gradients, keyed by kind.

        The ranks load ``model`` with ``flags``.
        """
        if self._ranks is None:
            self._here = self._folder / f"start{next(self._starts)}"
            self._here.mkdir(parents=True)
            self._log, self._numbers = self._here / "log.txt", itertools.count()
            command = [str(WORKER), str(self._here)]
            size = self.world_size
            self._ranks = Ranks(command, world_size=size, log=self._log, limit_s=3000.0)
        number, read = next(self._numbers), self._log.stat().st_size
        arguments = ["--load-hf", str(model), *flags]
        order = self._here / "next"
        order.write_text(json.dumps({"model": str(model), "flags": arguments}))
        order.rename(self._here / f"{number}.json")
        end_s = time.monotonic() + LIMIT_S
        while not (self._here / f"{number}.done").exists():
            if self._ranks.wait(0.005) or time.monotonic() > end_s:
                self.close()
                raise AssertionError(tail(self._log))
        largest: dict[str, float] = {}
        for line in self._log.read_text()[read:].splitlines():
            kind, *others = line.split() or [""]
            if kind in ("LOGITS", "GRADIENTS"):
                gap = float(others[0])
                largest[kind] = max(largest.get(kind, 0.0), math.inf if math.isnan(gap) else gap)
        return largest

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.kill()
        self._ranks = None


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answering]:
    ranks = Answering(tmp_path_factory.mktemp("eight"), 8)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answering]:
    ranks = Answering(tmp_path_factory.mktemp("alone"), 1)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answering]:
    ranks = Answering(tmp_path_factory.mktemp("four"), 4)
    yield ranks
    ranks.close()


def shapes(name: str, ranks: int) -> list[list[str]]:
    """Returns flags for all combinations of parallel sizes on up to ``ranks`` ranks.

    ``name`` is the family of the model.
    """
    listed = []
    for pipeline, tensor in itertools.product((4, 2, 1), (2, 1)):
        if tensor * pipeline > ranks or (ranks == 8 and pipeline < 4):
            continue
        mesh = ["--tensor-model-parallel-size", str(tensor)]
        mesh += ["--pipeline-model-parallel-size", str(pipeline)]
        spread = [[], *([["--expert-model-parallel-size", "2"]] * (name in tiny_models.MIXED))]
        for experts in spread:
            if experts and tensor * pipeline == ranks:
                if tensor == 1:
                    continue
                experts = [*experts, "--expert-tensor-parallel-size", "1"]
            for kind in ("v", "loop", None)[0 if pipeline > 1 else 2 :]:
                chunks = ["--num-virtual-stages-per-pipeline-rank", "2", "--pipeline-placement"]
                listed.append([*mesh, *experts, *([*chunks, kind] if kind else [])])
    return listed


def drawn(name: str, ranks: int, draw: random.Random) -> tuple[int, list[str]]:
    """Draws a number of layers, and flags with parallel sizes for up to ``ranks`` ranks.

    ``name`` is the family of the model, and ``draw`` generates the random numbers. Returns the
    number of layers and the flags.
    """
    every = shapes(name, ranks)
    first = [*tiny_models.FAMILIES].index(name)
    flags = draw.choice(every) if EXAMPLES else every[first % len(every)]
    stages = int(flags[3]) * (2 if "--pipeline-placement" in flags else 1)
    layers = draw.choice((tiny_models.LAYERS, 8)) if stages == 8 else tiny_models.LAYERS
    if stages > layers or draw.random() < 0.3:
        ends = sorted(draw.randrange(layers + 1) for _ in range(stages - 1))
        counts = (end - begin for begin, end in itertools.pairwise((0, *ends, layers)))
        flags = [*flags, "--partition", "-".join(map(str, counts))]
    if flags[1] == "2" and (name in tiny_models.MIXED or draw.random() < 0.5):
        flags = [*flags, "--sequence-parallel"]
    return layers, flags


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SHORT else pytest.mark.long)
        for name in tiny_models.FAMILIES
    ],
)
def test_random_models_are_those_of_transformers(
    name: str, alone: Answering, four: Answering, eight: Answering, tmp_path: Path
) -> None:
    numbers = itertools.count()
    worst: dict[str, float] = {}

    @settings(
        max_examples=EXAMPLES or 1,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=True))
    def check(draw: random.Random) -> None:
        model = tmp_path / str(next(numbers))
        ranks = eight if EXAMPLES and draw.random() < 0.2 else four
        layers, flags = drawn(name, ranks.world_size, draw)
        sizes = tiny_models.random_sizes(name, draw, layers)
        tiny_models.make(model, name, draw.randrange(1 << 20), **sizes)
        checkpoint, out = model.with_suffix(".checkpoint"), model.with_suffix(".out")
        import_hf([str(model), "--output", str(checkpoint)])
        export_hf([str(checkpoint), "--output", str(out)])
        for file in out.iterdir():
            assert file.read_bytes() == (model / file.name).read_bytes(), file.name
        both = [alone.gaps(model, []), ranks.gaps(model, flags)]
        for kind, limit in (("LOGITS", LOGITS), ("GRADIENTS", GRADIENTS)):
            largest = max(gaps[kind] for gaps in both)
            worst[kind] = max(worst.get(kind, 0.0), largest)
            assert largest < limit, (sizes, flags)

    check()
    print(f"WORST {name}: {next(numbers)} models, {worst}")
