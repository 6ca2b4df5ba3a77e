"""Fine-tunes a model of Hugging Face transformers on several processes, as a whole or with LoRA.

    bash prerequisite.sh --examples
    torchrun --nproc-per-node 4 examples/finetune/finetune.py \\
        --model MODEL --data train.jsonl --lora-rank 16 --output tuned

MODEL is a folder with ``config.json``, ``safetensors`` files and a tokenizer. Each line of the data
is a JSON object with ``text``, or with ``messages`` for the model's chat template. If the template
marks the answers of the assistant, only these are learned. For a model that takes images, the
messages contain the images, in the form that the model's processor expects.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor

from megatron.adaptive import Pipeline
from megatron.adaptive.errors import AdaptiveError, ConfigError

Microbatch = dict[str, torch.Tensor]
IGNORED = -100  # label of tokens that are not learned


def encode(processor: Any, line: str, options: argparse.Namespace) -> Microbatch:
    """Returns a sample as a microbatch of its own.

    Its length is padded to a multiple, because the pipeline records the model once per length.
    """
    sample = json.loads(line)
    if "messages" in sample:
        template = str(processor.chat_template)
        batch = processor.apply_chat_template(
            sample["messages"],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            return_assistant_tokens_mask=re.search(r"{%-?\s*generation\b", template) is not None,
        )
    else:
        batch = processor(text=sample["text"], return_tensors="pt")
    entries = {name: torch.as_tensor(entry) for name, entry in batch.items()}
    # Padding follows the text, so no token of the text attends to it, and no mask is needed.
    every_token = entries.pop("attention_mask")
    learned = entries.pop("assistant_masks", every_token).reshape(1, -1)
    entries["labels"] = entries["input_ids"].masked_fill(learned == 0, IGNORED)
    shape = entries["input_ids"].shape
    length = min(shape[1], options.max_length)
    for name, entry in entries.items():
        if entry.shape == shape:
            value = IGNORED if name == "labels" else 0
            padding = (0, -length % options.length_multiple)
            entries[name] = torch.nn.functional.pad(entry[:, :length], padding, value=value)
    return entries


def read_samples(processor: Any, options: argparse.Namespace) -> list[Microbatch]:
    """Reads all samples that have something to learn, in random order."""
    samples = []
    try:
        lines = options.data.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {options.data} cannot be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            samples.append(encode(processor, line, options))
        except (KeyError, TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"{options.data}:{number} is no sample ({type(error).__name__}: {reason}): give an "
                "object with text, or with messages for the chat template"
            ) from None
    # An answer behind --max-length leaves nothing to learn.
    samples = [sample for sample in samples if num_learned([sample]) != [0]]
    if not samples:
        raise ConfigError(f"--data {options.data} has no samples with something to learn")
    random.Random(options.seed).shuffle(samples)
    return samples


def num_learned(batch: list[Microbatch]) -> list[float]:
    """Returns the number of learned tokens in each microbatch."""
    return [float((entries["labels"][:, 1:] != IGNORED).sum()) for entries in batch]


def train(pipeline: Pipeline, samples: list[Microbatch], options: argparse.Namespace) -> None:
    """Trains on most of the samples, and evaluates on the others after each epoch."""
    is_first = torch.distributed.get_rank() == 0
    held_out = samples[: max(pipeline.replicas, round(options.eval_share * len(samples)))]
    samples = samples[len(held_out) :]
    optimizers: list[torch.optim.Optimizer] = []

    def make_optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizers.append(torch.optim.AdamW(parameters, lr=options.lr))
        return optimizers[0]

    pipeline.set_optimizer(make_optimizer, clip_norm=1.0)
    run = None
    if options.wandb and is_first:
        import wandb

        run = wandb.init(project=options.wandb, config=vars(options))
    steps = len(samples) // options.batch_size * options.epochs
    if not steps:
        sys.exit(f"error: {len(samples)} samples are left to train on: lower --batch-size")
    for epoch in range(options.epochs):
        random.Random(options.seed + epoch).shuffle(samples)
        for start in range(0, len(samples) - options.batch_size + 1, options.batch_size):
            batch = pipeline.share(samples[start : start + options.batch_size])
            for group in (group for one in optimizers for group in one.param_groups):
                group["lr"] = options.lr * (1 + math.cos(math.pi * pipeline.steps / steps)) / 2
            loss, _ = pipeline.step(batch, num_items=num_learned(batch))
            if is_first:
                print(f"step {pipeline.steps} of {steps}: loss {loss:.4f}", flush=True)
            if run is not None:
                run.log({"loss": loss, "gradient norm": pipeline.grad_norm}, step=pipeline.steps)
        batch = pipeline.share(held_out)
        loss = pipeline.eval(batch, num_items=num_learned(batch))
        if is_first:
            print(f"epoch {epoch + 1} of {options.epochs}: evaluation loss {loss:.4f}", flush=True)
        if run is not None:
            run.log({"evaluation loss": loss}, step=pipeline.steps)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--data", type=Path, required=True, help="file of JSON lines")
    parser.add_argument("--output", type=Path, required=True, help="folder for the tuned model")
    parser.add_argument("--lora-rank", type=int, default=0, help="0 trains the whole model")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8, help="samples per step")
    parser.add_argument("--lr", type=float, default=2e-4, help="learning rate of AdamW")
    parser.add_argument("--max-length", type=int, default=2048, help="most tokens per sample")
    parser.add_argument("--length-multiple", type=int, default=64, help="tokens to pad to")
    parser.add_argument("--eval-share", type=float, default=0.05, help="samples for evaluation")
    parser.add_argument("--pipeline-size", type=int, help="processes per pipeline; default: all")
    parser.add_argument("--schedule", default="adaptive", help="see docs/schedules.md")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wandb", metavar="PROJECT", help="project of Weights & Biases")
    return parser.parse_args()


def main() -> None:
    """Fine-tunes the model and saves it as a folder that transformers and vLLM read."""
    options = parse()
    # Wrong paths should end the program now, not after the training.
    if options.output.exists() and (not options.output.is_dir() or any(options.output.iterdir())):
        raise ConfigError(f"--output {options.output} exists and is not empty: name a new folder")
    try:
        processor = AutoProcessor.from_pretrained(options.model, local_files_only=True)
    except (OSError, ValueError):
        raise ConfigError(
            f"--model {options.model} has no tokenizer or processor that transformers can read: "
            "name the folder of a model"
        ) from None
    samples = read_samples(processor, options)
    adapter = None
    if options.lora_rank:
        from peft import LoraConfig

        adapter = LoraConfig(
            r=options.lora_rank, lora_alpha=2 * options.lora_rank, target_modules="all-linear"
        )
    # One sample of each kind, such as with and without images, shows what microbatches contain.
    kinds = {frozenset(sample): sample for sample in samples}
    with Pipeline.from_pretrained(
        options.model,
        list(kinds.values()),
        adapter=adapter,
        pipeline_size=options.pipeline_size,
        schedule=options.schedule,
        seed=options.seed,
        # Their values decide shapes: sizes of images, and which tokens stand for images.
        decisive_entries=[
            name
            for name in sorted(set().union(*kinds))
            if name.endswith("_grid_thw") or name == "mm_token_type_ids"
        ],
    ) as pipeline:
        train(pipeline, samples, options)
        pipeline.save_pretrained(options.output)
        if torch.distributed.get_rank() == 0:
            processor.save_pretrained(options.output)


if __name__ == "__main__":
    try:
        main()
    except AdaptiveError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
