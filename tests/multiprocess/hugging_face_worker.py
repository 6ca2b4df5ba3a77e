"""Ranks that load Hugging Face models in many shapes and compare what they compute.

Usage: ``hugging_face_worker.py FOLDER``. ``cases.json`` there lists models and flags, or a test
puts one after the other into ``0.json``, ``1.json`` ...; beside each model's own files lie
``expected.safetensors``: the logits of ``tokens``, and gradients by name of the mean loss where
these shall be compared, which a single rank does. A rank prints how far off logits and gradients
are, relative to the largest number among those expected.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.adaptive import accelerator

accelerator.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import finalize_model_grads  # noqa: E402
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region  # noqa: E402
from megatron.core.utils import unwrap_model  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from megatron.adaptive.checkpoint import hugging_face, state  # noqa: E402
from megatron.adaptive.checkpoint.training import Checkpoints  # noqa: E402
from megatron.adaptive.config.arguments import parse  # noqa: E402
from megatron.adaptive.config.environment import Environment  # noqa: E402
from megatron.adaptive.gpt.model import (  # noqa: E402
    build_chunks,
    build_optimizer,
    build_scheduler,
    load_tokenizer,
    transformer_config,
)
from megatron.adaptive.gpt.placement import placement_of  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))

from checkpoint_worker import Jobs  # noqa: E402

BASE = "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data --attention-dropout 0"
BASE += " --hidden-dropout 0 --global-batch-size 4"


class Loaded:
    """A model in one shape, with the weights that its flags name."""

    def __init__(self, jobs: Jobs, flags: list[str]) -> None:
        world = Environment.read().world_size
        self.config = parse([*BASE.split(), *flags], world_size=world, last_wins=True)
        self.job = jobs.join(self.config)
        device, self.placement = self.job.accelerator, placement_of(self.config)
        _, rows = load_tokenizer(self.config)
        self.core = transformer_config(self.config, device)
        self.chunks = build_chunks(self.config, self.core, device, self.placement, rows)
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                parameter.data.fill_(torch.nan)  # none may keep what it was drawn from
        self.optimizer = build_optimizer(self.config, self.chunks)
        self.scheduler = build_scheduler(self.config, self.optimizer, 100)
        run: Any = self
        Checkpoints(run, None, self.config).load()
        self.core.finalize_model_grads_func = None
        self.predicted: torch.Tensor | None = None

    def logits(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Runs the stages one after the other; returns logits where the last one is.

        Those of a layer that predicts further go to ``predicted``.
        """
        places = torch.arange(tokens.shape[1]).expand(tokens.shape)
        rank, hidden = parallel_state.get_pipeline_model_parallel_rank(), None
        peers = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        for stage in range(self.placement.num_stages):
            owner, chunk = self.placement.locate(stage)
            if stage and self.placement.locate(stage - 1)[0] != owner:
                before = self.placement.locate(stage - 1)[0]
                if rank == before:
                    dist.send(hidden.contiguous(), peers[owner])
                elif rank == owner:
                    hidden = torch.empty(self._payload(tokens))
                    dist.recv(hidden, peers[before])
            if rank == owner:
                model = self.chunks[chunk]
                if stage:
                    unwrap_model(model).set_input_tensor(hidden)
                is_last = stage == self.placement.num_stages - 1
                with torch.no_grad():
                    if is_last and self.config.model.mtp_num_layers:
                        hidden = self._both_logits(model, tokens, places)
                    else:
                        hidden = model(tokens, places, None)
        if self.placement.locate(self.placement.num_stages - 1)[0] != rank:
            return None
        return gather_from_tensor_model_parallel_region(hidden)

    def _both_logits(self, model: Any, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Runs a model that gives losses alone; its logits come one after the other."""
        found: list[torch.Tensor] = []
        layer = unwrap_model(model).output_layer
        hook = layer.register_forward_hook(
            lambda _, given, output: found.append(output[0].transpose(0, 1).clone())
        )
        model(tokens, places, None, labels=tokens)
        hook.remove()
        self.predicted = gather_from_tensor_model_parallel_region(found[0])
        return found[-1]

    def _payload(self, tokens: torch.Tensor) -> tuple[int, int, int]:
        length = tokens.shape[1]
        if self.config.parallel.sequence_parallel:
            length //= self.config.parallel.tensor_model_parallel_size
        return length, len(tokens), self.config.model.hidden_size

    def gradients(self, tokens: torch.Tensor, folder: Path) -> dict[str, torch.Tensor]:
        """Returns gradients of the mean loss by their names in the folder; one rank alone."""
        (chunk,) = self.chunks
        chunk.zero_grad_buffer()
        places = torch.arange(tokens.shape[1] - 1).expand(len(tokens), tokens.shape[1] - 1)
        loss = chunk(tokens[:, :-1], places, None, labels=tokens[:, 1:]).float().mean()
        loss.backward()
        finalize_model_grads(self.chunks)
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.main_grad)
        weights = state.sharded_model(self.chunks, state.METADATA)
        hugging_face.apply_factories(weights)
        whole: dict[str, torch.Tensor] = {}
        for shard in hugging_face.nested_values(weights):
            if isinstance(shard, hugging_face.ShardedTensor):
                target = whole.setdefault(shard.key, torch.zeros(shard.global_shape))
                target[shard.global_slice()] = shard.data
        found: dict[str, torch.Tensor] = {}
        with hugging_face.HuggingFaceReader(folder, self.config) as reader:
            for name, shape in hugging_face.their_shapes(reader.tensors).items():
                found[name] = torch.zeros(shape)
            for name, our in reader.tensors.items():
                for rows in our.rows:
                    source = whole[name][rows.expert] if our.experts else whole[name]
                    target = found[rows.name].t() if rows.turned else found[rows.name]
                    part = source[rows.at : rows.at + rows.count]
                    target[rows.first : rows.first + rows.count] = part
        return found


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.shape != expected.shape:
        raise SystemExit(f"{found.shape} instead of {expected.shape}")
    scale = max(float(expected.abs().max()), 1e-30)
    return float((found.detach().double() - expected.double()).abs().max()) / scale


def cases(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the cases of ``cases.json``, or where there is none those that are put there."""
    if (folder / "cases.json").exists():
        yield from json.loads((folder / "cases.json").read_text())
        return
    for number in itertools.count():
        path = folder / f"{number}.json"
        while not path.exists():
            time.sleep(0.003)
        yield json.loads(path.read_text()) | {"done": f"{number}.done"}


def main() -> None:
    folder = Path(sys.argv[1])
    jobs = Jobs()
    for case in cases(folder):
        model = folder / case["model"]
        expected = load_file(model / "expected.safetensors")
        tokens, logits = expected.pop("tokens"), expected.pop("logits")
        predicted = expected.pop("predicted", None)
        flags = [word.replace("FOLDER", str(folder)) for word in case["flags"]]
        # One more id comes on top, for the end of documents.
        loaded = Loaded(jobs, [*flags, "--vocab-size", str(logits.shape[-1] - 1)])
        with torch.no_grad():
            found = loaded.logits(tokens)
        name = f"{case['model']} {' '.join(case['flags'])}"
        if found is not None:
            found = found[..., : logits.shape[-1]]
            worst = gap(found, logits)
            if predicted is not None:
                assert loaded.predicted is not None
                found = loaded.predicted[..., : logits.shape[-1]]
                worst = max(worst, gap(found, predicted))
            print(f"LOGITS {worst:.3e} {name}", flush=True)
        if expected and dist.get_world_size() == 1:
            gradients = loaded.gradients(tokens, model)
            worst = max((gap(gradients[key], one), key) for key, one in expected.items())
            print(f"GRADIENTS {worst[0]:.3e} {worst[1]} {name}", flush=True)
        dist.barrier()
        if dist.get_rank() == 0 and "done" in case:
            (folder / case["done"]).touch()
    jobs.leave()


if __name__ == "__main__":
    main()
