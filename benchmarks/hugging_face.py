"""Measures import, export and loading of Hugging Face models, and the speed of tokenization.

    python benchmarks/hugging_face.py [--quick] [--part PART ...] [--json FILE]

Parts: ``size`` compares the speed and memory of importing and exporting a generated model with
reading and writing the same bytes, and measures the memory that ``--load-hf`` adds to each of four
ranks. ``preprocess`` compares the speed of ``data preprocess`` with ``tokenizers`` alone. Exits
with status 1 if a goal is missed.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.gpt_ranks import GptRank  # noqa: E402
from harness.processes import environment, run_ranks  # noqa: E402
from harness.report import Result, Row, measure, parser_of  # noqa: E402

HIDDEN, INNER, VOCABULARY = 2048, 5632, 32000
"""Hidden size, feed-forward size and vocabulary size of the generated model."""
LARGEST_BYTES = VOCABULARY * HIDDEN * 2
"""Size of the largest tensor in the generated model, in bytes."""
MOST_TENSORS = 4.0
"""Maximum memory use of import and export, as a multiple of the largest tensor's size."""
LEAST_SPEED = 0.8
"""Minimum speed relative to reading and writing the same bytes, or to ``tokenizers`` alone."""
_BLOCK = 1 << 23
# This program runs a command of the package, and prints the duration and the peak memory use.
_CHILD = """
import sys, time
from megatron.adaptive import accelerator
accelerator.install()
import megatron.adaptive.checkpoint.hugging_face_weights
from benchmarks.hugging_face import memory_bytes
from megatron.adaptive.cli import checkpoint
before, begin = memory_bytes("VmHWM"), time.perf_counter()
getattr(checkpoint, sys.argv[1])(sys.argv[2:])
print("MEASURED", time.perf_counter() - begin, memory_bytes("VmHWM") - before)
"""
_MESH = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
_RUN = f"{_MESH} --bf16 --seq-length 128 --micro-batch-size 1 --global-batch-size 4 --lr 1e-4"
_RUN += " --train-iters 1 --eval-iters 0 --mock-data"
# This program reads and encodes JSON lines, and prints the seconds that the encoding took.
_TOKENIZERS = """
import json, sys, time
from tokenizers import Tokenizer
encoder = Tokenizer.from_file(sys.argv[1])
texts = [json.loads(line)["text"] for line in open(sys.argv[2])]
begin = time.perf_counter()
for first in range(0, len(texts), 64):
    encoder.encode_batch(texts[first : first + 64], add_special_tokens=False)
print(time.perf_counter() - begin)
"""


def size(gigabytes: float) -> Result:
    """Measures import, export and loading of models, for the part ``size``.

    Args:
        gigabytes: Approximate size of the model.
    """
    rows = []
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        nbytes = _generate_model(folder / "model", gigabytes)
        files = sorted((folder / "model").glob("*.safetensors"))
        note = f"{nbytes / 1e9:.2f} GB; the largest tensor has {LARGEST_BYTES / 1e6:.0f} MB"
        for function, source, output in (
            ("import_hf", "model", "checkpoint"),
            ("export_hf", "checkpoint", "out"),
        ):
            copy_s = _copy(files, folder / "copy")
            arguments = [str(folder / source), "--output", str(folder / output)]
            seconds, peak_bytes = _run_command(function, arguments)
            rows.append(
                Row(
                    what=f"{function}: speed over reading and writing the bytes",
                    value=copy_s / seconds,
                    goal=LEAST_SPEED,
                    least=True,
                    note=note,
                )
            )
            title = f"{function}: peak of memory in largest tensors"
            rows.append(Row(what=title, value=peak_bytes / LARGEST_BYTES, goal=MOST_TENSORS))
        command = [__file__, "--part", "rank", "--model", str(folder / "model")]
        run_ranks([*command, "--output", str(folder)], 4, 240.0)
        peaks = [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]
        title = "--load-hf, tp 2 and pp 2: peak of a rank in largest tensors, over its weights"
        rows.append(Row(what=title, value=max(peaks) / LARGEST_BYTES, goal=1.0))
    return Result(rows=rows)


def _run_command(function: str, arguments: Sequence[str]) -> tuple[float, float]:
    """Runs ``function`` of the module ``cli.checkpoint`` in a new process, and measures the run.

    ``arguments`` are the arguments on the command line. Returns the duration in seconds and the
    increase of the peak memory use in bytes.
    """
    command = [sys.executable, "-c", _CHILD, function, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode:
        raise RuntimeError(done.stderr[-1000:])
    line = next(line for line in done.stdout.splitlines() if line.startswith("MEASURED"))
    seconds, peak_bytes = map(float, line.split()[1:])
    return seconds, peak_bytes


def load_as_rank(model: Path, output: Path) -> None:
    """Loads a model as a rank of a job does, and writes the peak memory use of the loading.

    Args:
        model: Folder of the model.
        output: Folder to which each rank writes its result.
    """
    from megatron.adaptive import accelerator

    accelerator.install()
    rank = GptRank([*_RUN.split(), "--load-hf", str(model)])
    Path("/proc/self/clear_refs").write_text("5")  # Writing 5 resets the recorded peak.
    before = memory_bytes("VmRSS")
    rank.load()
    peak = memory_bytes("VmHWM") - before
    (output / f"rank{rank.rank}.json").write_text(json.dumps(peak))
    rank.close()


def memory_bytes(name: str) -> int:
    """Returns the value ``name`` of ``/proc/self/status``, such as ``VmHWM``, in bytes."""
    match = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) << 10


def _copy(files: Sequence[Path], target: Path) -> float:
    """Copies ``files`` to the file ``target`` on disk, and returns the duration in seconds."""
    begin_s = time.perf_counter()
    with target.open("wb", buffering=0) as out:
        for path in files:
            with path.open("rb", buffering=0) as file:
                while block := file.read(_BLOCK):
                    out.write(block)
        os.fsync(out.fileno())
    seconds = time.perf_counter() - begin_s
    target.unlink()
    return seconds


def _generate_model(folder: Path, gigabytes: float) -> int:
    """Writes a random Llama of about ``gigabytes`` GB to ``folder``. Returns its size in bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from megatron.adaptive.checkpoint.safetensors import write_folder

    layer_bytes = 2 * (2 * HIDDEN * HIDDEN + 2 * 256 * HIDDEN + 3 * HIDDEN * INNER)
    layers = (gigabytes * 1e9 - 2 * LARGEST_BYTES) / layer_bytes
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=max(2, 2 * round(layers / 2)),
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        rms_norm_eps=1e-5,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    config.save_pretrained(folder)
    write_folder(
        folder,
        {name: (torch.bfloat16, shape) for name, shape in shapes.items()},
        lambda name: torch.randn(shapes[name], dtype=torch.bfloat16),
        shard_bytes=10**9,
    )
    return sum(2 * math.prod(shape) for shape in shapes.values())


def preprocessing(megabytes: float) -> Result:
    """Measures ``data preprocess`` relative to ``tokenizers``, for the part ``preprocess``.

    Args:
        megabytes: Approximate size of the text before it is repeated three times.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    from harness.texts import mixed_text
    from megatron.adaptive.data.corpus import CorpusSpec, make_corpus

    texts = 3 * mixed_text(megabytes)
    nbytes = sum(len(text.encode()) for text in texts)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        corpus = make_corpus(CorpusSpec(output_dir=folder / "corpus", max_bytes=4_000_000))
        encoder = Tokenizer(models.BPE.from_file(str(corpus.vocab_file), str(corpus.merge_file)))
        encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        encoder.add_special_tokens(["<|end|>"])
        (folder / "hf").mkdir()
        encoder.save(str(folder / "hf" / "tokenizer.json"))
        (folder / "hf" / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
        return Result(rows=_preprocess_speeds(folder, texts, nbytes))


def _preprocess_speeds(folder: Path, texts: Sequence[str], nbytes: int) -> list[Row]:
    """Returns rows with the speed of ``data preprocess`` relative to ``tokenizers`` alone.

    Args:
        folder: Folder for inputs and outputs. Its folder ``hf`` contains the Hugging Face
            tokenizer.
        texts: Documents to encode.
        nbytes: Total size of the documents.
    """
    from megatron.adaptive.data.preprocess import PreprocessSpec, preprocess

    hf, lines = folder / "hf", folder / "text.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def preprocess_s(inputs: Path, workers: int) -> float:
        begin_s = time.perf_counter()
        preprocess(
            PreprocessSpec(
                inputs=(inputs,),
                output_prefix=str(folder / f"out{workers}"),
                workers=workers,
                tokenizer_type="HuggingFaceTokenizer",
                tokenizer_model=str(hf),
            )
        )
        return time.perf_counter() - begin_s

    (folder / "line.jsonl").write_text('{"text": "one"}\n')
    # Run ``preprocess`` once before measuring, because its first call imports modules.
    preprocess_s(folder / "line.jsonl", 1)
    rows = []
    for workers in sorted({1, os.cpu_count() or 1}):
        os.environ["RAYON_NUM_THREADS"] = str(workers)
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if workers > 1 else "false"
        command = [sys.executable, "-c", _TOKENIZERS, str(hf / "tokenizer.json"), str(lines)]
        alone = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds = preprocess_s(lines, workers)
        rows.append(
            Row(
                what=f"data preprocess, {workers} workers: speed over tokenizers alone",
                value=float(alone.stdout) / seconds,
                goal=LEAST_SPEED,
                least=True,
                note=f"{nbytes / 1e6 / seconds:.2f} MB/s",
            )
        )
    return rows


def main() -> int:
    """Measures the parts and prints the results. Returns 1 if a goal is missed, otherwise 0."""
    parser = parser_of(__doc__, ("size", "preprocess", "rank"), "a smaller model and less text")
    parser.add_argument(
        "--gigabytes", type=float, help="size of the model in GB (default 2, or 0.5 with --quick)"
    )
    parser.add_argument(
        "--megabytes", type=float, help="size of the text in MB (default 10, or 2 with --quick)"
    )
    parser.add_argument("--model", type=Path, help="folder of the model, for part rank")
    parser.add_argument("--output", type=Path, help="folder of the result, for part rank")
    options = parser.parse_args()
    if options.part == ["rank"]:  # This process was started by the part "size".
        load_as_rank(options.model, options.output)
        return 0
    gigabytes = options.gigabytes or (0.5 if options.quick else 2.0)
    megabytes = options.megabytes or (2.0 if options.quick else 10.0)
    parts = {"size": lambda: size(gigabytes), "preprocess": lambda: preprocessing(megabytes)}
    return measure(parts, options)


if __name__ == "__main__":
    sys.exit(main())
