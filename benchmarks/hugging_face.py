"""Measures import, export and load of Hugging Face folders, and tokenizers beside their libraries.

    python benchmarks/hugging_face.py [--quick] [--part PART ...] [--json FILE]

Parts: ``size``, speed and memory of import and export of a generated model, over reading and
writing its bytes, and the memory that ``--load-hf`` adds to each of four ranks; ``tokens``, the
number of documents for which a tokenizer here and its library return different tokens, and the
speed of ``data preprocess`` over ``tokenizers`` alone. Exits with status 1 if a goal is missed.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.gpt_ranks import GptRank  # noqa: E402
from harness.processes import environment, run_ranks  # noqa: E402
from harness.report import Result, Row, measure, parser_of  # noqa: E402

HIDDEN, INNER, VOCABULARY = 2048, 5632, 32000
"""Sizes of the generated model."""
LARGEST_BYTES = VOCABULARY * HIDDEN * 2
"""Size of the largest tensor of the generated model."""
MOST_TENSORS = 4.0
"""Largest memory of import and export, in largest tensors of the model."""
LEAST_SPEED = 0.8
"""Lowest speed over reading and writing the same bytes, and over ``tokenizers`` alone."""
_BLOCK = 1 << 23
# Runs a command of the package in a process of its own, and prints its seconds and peak of memory.
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
# Reads JSON lines and encodes them; prints the seconds of the encoding.
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
    """Part ``size``: measures import, export and load.

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
    """Runs a function of ``cli.checkpoint`` in a process; returns seconds and added memory."""
    command = [sys.executable, "-c", _CHILD, function, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode:
        raise RuntimeError(done.stderr[-1000:])
    line = next(line for line in done.stdout.splitlines() if line.startswith("MEASURED"))
    seconds, peak_bytes = map(float, line.split()[1:])
    return seconds, peak_bytes


def load_as_rank(model: Path, output: Path) -> None:
    """Loads a model as a rank of a job does, and writes the memory that this adds at its peak.

    Args:
        model: Folder of the model.
        output: Folder for the result of each rank.
    """
    from megatron.adaptive import accelerator

    accelerator.install()
    rank = GptRank([*_RUN.split(), "--load-hf", str(model)])
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = memory_bytes("VmRSS")
    rank.load()
    peak = memory_bytes("VmHWM") - before
    (output / f"rank{rank.rank}.json").write_text(json.dumps(peak))
    rank.close()


def memory_bytes(name: str) -> int:
    """Returns a value of ``/proc/self/status`` in bytes, such as that of ``VmHWM``, the peak."""
    match = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) << 10


def _copy(files: Sequence[Path], target: Path) -> float:
    """Copies the bytes of files to one file and syncs it; returns the seconds."""
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
    """Writes a Llama with random weights of about this size; returns its size in bytes."""
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


_SCRIPTS = (
    "aáeéiïoößuü",
    "абвгдеёжз",
    "αβγδεζ",
    "中文字漢語日本",
    "かなカナ",
    "אבגד",
    "مرحبا",
    "हिन्दी",
    "🙂🚀✓—",
)


def _mixed_text(megabytes: float) -> list[str]:
    """Returns sources of the standard library, each followed by random words of one script."""
    from megatron.adaptive.data.corpus import source_files

    draw = random.Random(1)
    documents, left = [], megabytes * 1e6
    for path in source_files(Path(sysconfig.get_path("stdlib"))):
        source = path.read_bytes().decode("utf-8", "ignore")
        letters = draw.choice(_SCRIPTS)
        parts = [
            "".join(draw.choices(letters, k=draw.randint(1, 9)))
            + draw.choice((" ", "  ", "\n", "\r\n\t", ", ", "\u00a0", "'s ", f" {draw.random()} "))
            for _ in range(len(source) // 12)
        ]
        documents += [source, "".join(parts)]
        left -= sum(len(text.encode()) for text in documents[-2:])
        if left < 0:
            return documents
    raise SystemExit(f"the standard library has less text than {megabytes} MB")


Kinds = dict[str, tuple[dict[str, Any], Callable[[str], Sequence[int]]]]
"""Settings of each kind of tokenizer, and its library's function that encodes a text."""


def tokens(megabytes: float) -> Result:
    """Part ``tokens``: compares tokens and the speed of ``data preprocess``.

    Args:
        megabytes: Size of the text.
    """
    texts = _mixed_text(megabytes)
    nbytes = sum(len(text.encode()) for text in texts)
    note = f"{nbytes / 1e6:.1f} MB in {len(texts)} documents"
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        rows = _different_documents(_make_tokenizers(folder, texts), texts, note)
        rows += _preprocess_speeds(folder, texts, 3 * nbytes)
    return Result(rows=rows)


def _make_tokenizers(folder: Path, texts: Sequence[str]) -> Kinds:
    """Trains tokenizers; that of Hugging Face's libraries is in the folder ``hf``."""
    import sentencepiece
    from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import TikTokenTokenizer
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from megatron.adaptive.data.corpus import CorpusSpec, make_corpus

    corpus = make_corpus(CorpusSpec(output_dir=folder / "corpus", max_bytes=4_000_000))
    gpt2_files = {"vocab_file": str(corpus.vocab_file), "merge_file": str(corpus.merge_file)}

    def byte_pairs() -> Tokenizer:
        tokenizer = Tokenizer(models.BPE.from_file(*gpt2_files.values()))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return tokenizer

    gpt2, chat = byte_pairs(), byte_pairs()
    chat.decoder = decoders.ByteLevel()
    chat.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    hf = folder / "hf"
    hf.mkdir()
    chat.save(str(hf / "tokenizer.json"))
    (hf / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.splitlines()[:50]),
        model_prefix=str(folder / "pieces"),
        vocab_size=4000,
        byte_fallback=True,
        minloglevel=2,
    )
    pieces_file, ranks_file = str(folder / "pieces.model"), str(folder / "ranks.json")
    size = _write_ranks(Path(ranks_file), chat.get_vocab()) + 19
    pieces = sentencepiece.SentencePieceProcessor(model_file=pieces_file)
    fast = PreTrainedTokenizerFast.from_pretrained(hf)
    tiktoken = TikTokenTokenizer(ranks_file, None, 19, pattern="v2", vocab_size=size)
    tiktoken_settings = {
        "tokenizer_model": ranks_file,
        "tiktoken_pattern": "v2",
        "vocab_size": size,
        "tiktoken_num_special_tokens": 19,
    }
    return {
        "GPT2BPETokenizer": (gpt2_files, lambda text: gpt2.encode(text).ids),
        "HuggingFaceTokenizer": (
            {"tokenizer_model": str(hf)},
            lambda text: fast(text, add_special_tokens=False).input_ids,
        ),
        "SentencePieceTokenizer": ({"tokenizer_model": pieces_file}, pieces.encode),
        "Llama2Tokenizer": (
            {"tokenizer_model": pieces_file},
            lambda text: [pieces.bos_id(), *pieces.encode(text)],
        ),
        "TikTokenizer": (tiktoken_settings, tiktoken.text_to_ids),
    }


def _write_ranks(path: Path, vocabulary: Mapping[str, int]) -> int:
    """Writes a vocabulary of byte pairs as tiktoken's ranks; returns the number of tokens."""
    import base64

    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letter_of: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    byte_of = {letter: byte for byte, letter in letter_of.items()}
    merged = [
        bytes(byte_of[letter] for letter in token)
        for token in sorted(vocabulary, key=vocabulary.__getitem__)
        if not token.startswith("<|") and len(token) > 1
    ]
    ranks = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": ""}
        for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), *merged])
    ]
    path.write_text(json.dumps(ranks))
    return len(ranks)


def _different_documents(kinds: Kinds, texts: Sequence[str], note: str) -> list[Row]:
    """Returns for each kind the number of documents whose tokens differ from the library's."""
    from megatron.adaptive.config.data import TokenizerConfig
    from megatron.adaptive.data.tokenizer import build_tokenizer

    rows = []
    for kind, (settings, encode) in kinds.items():
        config = TokenizerConfig(tokenizer_type=kind, **settings)
        documents = build_tokenizer(config).tokenize_batch(texts)
        different = sum(
            document != encode(text) for document, text in zip(documents, texts, strict=True)
        )
        title = f"{kind}: documents with other tokens"
        rows.append(Row(what=title, value=different, goal=0, note=note))
    return rows


def _preprocess_speeds(folder: Path, texts: Sequence[str], nbytes: int) -> list[Row]:
    """Returns the speeds of ``data preprocess`` over ``tokenizers`` alone.

    Args:
        folder: Folder for inputs and outputs, with the Hugging Face tokenizer in ``hf``.
        texts: Documents, which are written three times.
        nbytes: Size of all that is written.
    """
    from megatron.adaptive.data.preprocess import PreprocessSpec, preprocess

    hf, lines = folder / "hf", folder / "text.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts] * 3))

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
    preprocess_s(folder / "line.jsonl", 1)  # imports the writer of tokens
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
    """Measures and prints; returns 1 if a goal is missed."""
    parser = parser_of(__doc__, ("size", "tokens", "rank"), "a smaller model and less text")
    parser.add_argument("--gigabytes", type=float, help="size of the model (2; 0.5)")
    parser.add_argument("--megabytes", type=float, help="size of the text (10; 2)")
    parser.add_argument("--model", type=Path, help="folder of the model, for part rank")
    parser.add_argument("--output", type=Path, help="folder of the result, for part rank")
    options = parser.parse_args()
    if options.part == ["rank"]:  # a process of part size
        load_as_rank(options.model, options.output)
        return 0
    gigabytes = options.gigabytes or (0.5 if options.quick else 2.0)
    megabytes = options.megabytes or (2.0 if options.quick else 10.0)
    parts = {"size": lambda: size(gigabytes), "tokens": lambda: tokens(megabytes)}
    return measure(parts, options)


if __name__ == "__main__":
    sys.exit(main())
