"""Compares the start of ``Pipeline.from_pretrained`` with a start of ``transformers``.

    python -m tests.soak.starts [--quick] [--json FILE]

A start lasts from the call that loads a folder of safetensors files until the end of the first
training step. ``transformers`` starts in one process that uses all processors; the pipeline starts
on one, two and four processes that share them. Imports are not timed. Exits with status 1 if a goal
is missed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.processes import run_ranks
from harness.report import Result, Row, measure, measured, parser_of, ratios

MOST = 1.5
"""Maximum duration of a pipeline's start, divided by the duration of a ``transformers`` start."""
RANKS = (1, 2, 4)
REPEATS = 3
LIMIT_S = 600.0
SAMPLES, TOKENS, VOCABULARY = 8, 64, 16000
LAYERS = 23
"""Number of layers of the model. Its parameters then take 2 GB."""
ALONE = "alone"


def write_model(folder: Path, layers: int) -> None:
    """Writes a Llama model with ``layers`` layers and random weights to ``folder``."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1280,
        intermediate_size=3456,
        num_hidden_layers=layers,
        num_attention_heads=20,
        num_key_value_heads=20,
        max_position_embeddings=TOKENS,
    )
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="200MB")


def batch() -> dict[str, Any]:
    """Returns the inputs and labels of the first step."""
    import torch

    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, TOKENS), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def start_alone(folder: Path) -> tuple[float, float]:
    """Loads the model in ``folder`` with ``transformers`` and trains one step.

    Returns the value of ``perf_counter`` after the step, and the loss.
    """
    import torch
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loss = model(**batch()).loss
    loss.backward()
    optimizer.step()
    return time.perf_counter(), float(loss.detach())


def start_pipeline(folder: Path) -> tuple[float, float]:
    """Loads the model in ``folder`` as a pipeline and trains one step.

    Returns the value of ``perf_counter`` after the step, and the loss.
    """
    import torch

    from megatron.adaptive import Pipeline

    sample = {name: entry[:1] for name, entry in batch().items()}
    with Pipeline.from_pretrained(folder, sample, batch_size=SAMPLES) as pipeline:
        pipeline.set_optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=1e-4))
        loss, _ = pipeline.step(batch())
        return time.perf_counter(), float(loss)


def be_rank(kind: str, folder: str, output: str) -> None:
    """Runs one process, which loads the model in ``folder`` and trains one step.

    ``kind`` selects ``transformers`` or a pipeline. The process writes the duration in seconds and
    the loss to the folder ``output``.
    """
    import torch
    import transformers

    from megatron.adaptive import Pipeline

    # Access both classes, so that their modules are imported before the time is measured.
    assert transformers.LlamaForCausalLM is not None
    assert Pipeline is not None
    torch.set_num_threads(int(os.environ["THREADS"]))
    start_s = time.perf_counter()
    end_s, loss = (start_alone if kind == ALONE else start_pipeline)(Path(folder))
    Path(output, os.environ.get("RANK", "0")).write_text(f"{end_s - start_s} {loss}")


def start(kind: str, folder: Path, ranks: int) -> tuple[float, float]:
    """Starts ``ranks`` processes that load the model in ``folder`` and train one step.

    Returns the duration in seconds of the slowest process, and the loss of the step. ``kind``
    selects ``transformers`` or a pipeline.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    variables = {"THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as output:
        run_ranks([__file__, kind, str(folder), output], ranks, LIMIT_S, variables)
        results = [file.read_text().split() for file in Path(output).iterdir()]
    assert len(results) == ranks, f"{len(results)} of {ranks} processes wrote a result"
    return max(float(seconds) for seconds, _ in results), float(results[0][1])


def starts(quick: bool) -> Result:
    """Starts the model several times with each library, and returns table rows about the durations.

    There is a row for each number of processes. If ``quick``, the model is small, and each start is
    measured once.
    """
    rows: list[Row] = []
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), layers=2 if quick else LAYERS)
        for _ in range(1 if quick else REPEATS):
            alone_s, loss = start(ALONE, Path(name), 1)
            seconds.setdefault(ALONE, []).append(alone_s)
            for ranks in RANKS[:2] if quick else RANKS:
                pipeline_s, pipeline_loss = start("pipeline", Path(name), ranks)
                assert abs(pipeline_loss / loss - 1) < 1e-5, (pipeline_loss, loss)
                seconds.setdefault(str(ranks), []).append(pipeline_s)
    for ranks, values in seconds.items():
        if ranks != ALONE:
            title = f"start on {ranks} processes, over transformers"
            goal = None if quick else MOST
            rows.append(measured(title, ratios(values, seconds[ALONE]), goal=goal))
    rows.append(measured("start of transformers", seconds[ALONE], unit="s"))
    return Result(rows=rows, facts={"seconds": seconds})


def main(arguments: list[str] | None = None) -> int:
    """Measures the starts and prints the results. Returns 1 if a goal is missed."""
    options = parser_of(__doc__, (), "a small model, once").parse_args(arguments)
    options.part = None
    return measure({"starts": lambda: starts(options.quick)}, options)


if __name__ == "__main__":
    if sys.argv[1:2] and not sys.argv[1].startswith("-"):
        be_rank(*sys.argv[1:])
    else:
        sys.exit(main())
