"""Fine-tunes a Hugging Face model on several processes, either all weights or with LoRA.

    bash prerequisite.sh --examples
    torchrun --nproc-per-node 4 examples/finetune/finetune.py \\
        --model MODEL --data train.jsonl --lora-rank 16 --output tuned

This is a short program that you can copy and change. ``python -m megatron.adaptive train finetune``
has more options, checkpoints and learning-rate decay. docs/finetune.md describes the data.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.adaptive import Pipeline
from megatron.adaptive.cli.common import run_cli
from megatron.adaptive.modules.samples import SampleReader, load_processor, num_learned


def main(argv: Sequence[str]) -> None:
    """Fine-tunes the model, and saves it to a folder that transformers and vLLM can read."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument(
        "--data", type=Path, required=True, help="file of samples in JSON Lines format"
    )
    parser.add_argument("--output", type=Path, required=True, help="new folder for the tuned model")
    parser.add_argument(
        "--lora-rank",
        type=int,
        default=0,
        help="rank of the LoRA adapters; 0 trains the whole model",
    )
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8, help="samples per step")
    parser.add_argument("--lr", type=float, default=2e-4, help="learning rate of AdamW")
    parser.add_argument("--wandb", metavar="PROJECT", help="project of Weights & Biases")
    options = parser.parse_args(argv)

    processor = load_processor(options.model)
    # Pad lengths to multiples of 32. Otherwise, the pipeline would trace the model for each length.
    samples = SampleReader(processor=processor, length_multiple=32).read(options.data)
    order = list(range(len(samples)))
    random.Random(1).shuffle(order)
    held_out = [samples[index] for index in order[: len(order) // 10 + 1]]
    order = order[len(held_out) :]
    adapter = None
    if options.lora_rank:
        from peft import LoraConfig

        adapter = LoraConfig(r=options.lora_rank, target_modules="all-linear")

    with Pipeline.from_pretrained(
        options.model,
        # Pass one sample of each kind. For example, samples with images and samples without images
        # are different kinds.
        samples.kinds,
        adapter=adapter,
        decisive_entries=samples.decisive_entries,
    ) as pipeline:
        is_first = torch.distributed.get_rank() == 0
        run: Any = None
        if options.wandb and is_first:
            import wandb

            run = wandb.init(project=options.wandb)

        def report(name: str, loss: float) -> None:
            if is_first:
                print(f"step {pipeline.steps}: {name} {loss:.6f}", flush=True)
            if run is not None:
                run.log({name: loss}, step=pipeline.steps)

        pipeline.set_optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=options.lr))
        for epoch in range(options.epochs):
            random.Random(epoch).shuffle(order)
            for start in range(0, len(order), options.batch_size):
                batch = [samples[index] for index in order[start : start + options.batch_size]]
                # The loss is the mean over the tokens that the model learns to predict. All
                # processes of a replica pass the same batch.
                batch = pipeline.share(batch)
                loss, _ = pipeline.step(batch, num_items=num_learned(batch))
                report("loss", loss)
            batch = pipeline.share(held_out)
            report("evaluation loss", pipeline.eval(batch, num_items=num_learned(batch)))
        pipeline.save_pretrained(options.output)
        if is_first:
            processor.save_pretrained(options.output)


if __name__ == "__main__":
    sys.exit(run_cli(main))
