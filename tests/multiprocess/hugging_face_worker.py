"""Loads Hugging Face models in jobs of many shapes, and compares logits and gradients.

Usage: ``hugging_face_worker.py FOLDER``, as ranks of a job. The file ``cases.json`` in this folder
lists models and flags. If the file does not exist, a test writes one case after another to
``0.json``, ``1.json``, ... The folder of each model contains ``expected.safetensors`` with the
logits of ``tokens`` and the named gradients of their mean loss. The program prints the errors of
the logits, and the errors of the gradients of a step under the run's schedule. Errors are relative
to the largest expected value.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

# This import provides modules that are missing on a machine without a GPU.
from worker import Meshes, connect  # isort: skip

import torch
import torch.distributed as dist
from lora_worker import Shards, gap, joined, microbatches, shards_of_gradients
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.utils import unwrap_model
from safetensors.torch import load_file

from megatron.adaptive.checkpoint.hugging_face_weights import HuggingFaceReader
from megatron.adaptive.checkpoint.trainer_checkpoints import Checkpoints
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.gpt.setup import build_run
from megatron.adaptive.gpt.train_step import Step

BASE = "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data --attention-dropout 0"
BASE += " --hidden-dropout 0 --global-batch-size 4 --clip-grad 0"


class Loaded:
    """Holds a model with one shape, whose weights are loaded as ``flags`` specify."""

    def __init__(self, meshes: Meshes, flags: list[str], length: int) -> None:
        world = Environment.read().world_size
        # The flag --seq-length must come last, because the flags in a checkpoint contain the length
        # that was used in training. Gloo channels transfer only messages of the configured length.
        flags = [*BASE.split(), *flags, "--seq-length", str(length)]
        self.config = parse(flags, world_size=world, last_wins=True)
        self.job = meshes.join(self.config)
        self.run = build_run(self.job)
        for chunk in self.run.chunks:
            for parameter in chunk.parameters():
                parameter.data.fill_(torch.nan)  # NaN marks weights that are not loaded.
        Checkpoints(self.run).load()
        self.predicted: torch.Tensor | None = None

    def logits(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Runs all stages on ``tokens``, and returns the logits on the rank of the last stage.

        Returns ``None`` on other ranks.

        Logits of a multi-token prediction layer are stored in ``predicted``.
        """
        places, placement = torch.arange(tokens.shape[1]).expand(tokens.shape), self.run.placement
        rank, hidden = parallel_state.get_pipeline_model_parallel_rank(), None
        peers = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        for stage in range(placement.num_stages):
            owner, chunk = placement.locate(stage)
            if stage and placement.locate(stage - 1)[0] != owner:
                before = placement.locate(stage - 1)[0]
                if rank == before:
                    dist.send(hidden.contiguous(), peers[owner])
                elif rank == owner:
                    hidden = torch.empty(self._payload(tokens))
                    dist.recv(hidden, peers[before])
            if rank == owner:
                model = self.run.chunks[chunk]
                if stage:
                    unwrap_model(model).set_input_tensor(hidden)
                is_last = stage == placement.num_stages - 1
                with torch.no_grad():
                    if is_last and self.config.model.mtp_num_layers:
                        hidden = self._both_logits(model, tokens, places)
                    else:
                        hidden = model(tokens, places, None)
        if placement.locate(placement.num_stages - 1)[0] != rank:
            return None
        return gather_from_tensor_model_parallel_region(hidden)

    def _both_logits(self, model: Any, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the output layer of ``model``, which itself returns only losses.

        ``tokens`` contains the inputs, and ``places`` contains the positions of the tokens.
        """
        outputs: list[torch.Tensor] = []
        layer = unwrap_model(model).output_layer
        hook = layer.register_forward_hook(
            lambda _, inputs, output: outputs.append(output[0].transpose(0, 1).clone())
        )
        model(tokens, places, None, labels=tokens)
        hook.remove()
        self.predicted = gather_from_tensor_model_parallel_region(outputs[0])
        return outputs[-1]

    def _payload(self, tokens: torch.Tensor) -> tuple[int, int, int]:
        length = tokens.shape[1]
        if self.config.parallel.sequence_parallel:
            length //= self.config.parallel.tensor_model_parallel_size
        return length, len(tokens), self.config.model.hidden_size

    def gradients(self, tokens: torch.Tensor) -> list[Shards]:
        """Takes a step with ``tokens``, and returns the gradient shards of each rank."""
        batch, kept = microbatches(tokens[:, None]), list[Shards]()
        Step(self.run).train(batch, len(batch), 1, lambda: kept.append(self._shards()))
        gathered: list[Shards] = self.job.gather(kept[0])
        return gathered

    def _shards(self) -> Shards:
        return shards_of_gradients(self.run)


def cases(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the cases in ``cases.json``, or the cases that a test writes to numbered files."""
    if (folder / "cases.json").exists():
        yield from json.loads((folder / "cases.json").read_text())
        return
    for number in itertools.count():
        path = folder / f"{number}.json"
        while not path.exists():
            time.sleep(0.003)
        yield json.loads(path.read_text()) | {"done": f"{number}.done"}


def compare(meshes: Meshes, folder: Path, case: dict[str, Any]) -> None:
    """Loads the model of ``case`` in one shape, and prints the errors of logits and gradients.

    ``meshes`` provides the process groups, and ``folder`` contains the model.
    """
    model = folder / case["model"]
    expected = load_file(model / "expected.safetensors")
    tokens, logits = expected.pop("tokens"), expected.pop("logits")
    predicted = expected.pop("predicted", None)
    flags = [word.replace("FOLDER", str(folder)) for word in case["flags"]]
    # The trainer adds a token ID for the end of documents, so this size is smaller by one.
    flags += ["--vocab-size", str(logits.shape[-1] - 1)]
    loaded = Loaded(meshes, flags, tokens.shape[1] - 1)
    with torch.no_grad():
        computed = loaded.logits(tokens[:, :-1])
    name = f"{case['model']} {' '.join(case['flags'])}"
    if computed is not None:
        computed = computed[..., : logits.shape[-1]]
        worst = gap(computed, logits)
        if predicted is not None:
            assert loaded.predicted is not None
            computed = loaded.predicted[..., : logits.shape[-1]]
            worst = max(worst, gap(computed, predicted))
        print(f"LOGITS {worst:.3e} {name}", flush=True)
    parts = loaded.gradients(tokens)
    if dist.get_rank() == 0:
        with HuggingFaceReader(model, loaded.config) as reader:
            gradients = joined(parts, reader.tensors)
        worst = max((gap(gradients[key], tensor), key) for key, tensor in expected.items())
        print(f"GRADIENTS {worst[0]:.3e} {worst[1]} {name}", flush=True)
    meshes.leave(loaded.job, loaded.run)


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    environment = Environment.read()
    meshes = Meshes(connect(environment), environment)
    for case in cases(folder):
        compare(meshes, folder, case)
        if dist.get_rank() == 0 and "done" in case:
            (folder / case["done"]).touch()


if __name__ == "__main__":
    main()
