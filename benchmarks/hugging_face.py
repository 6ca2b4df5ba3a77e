"""Measures import, export and load of Hugging Face folders, and tokenizers beside their libraries.

    python benchmarks/hugging_face.py [--quick] [--part PART ...] [--json FILE]

Parts: ``size``, speed and memory of import and export of a made-up model, over reading and writing
its bytes, and the memory that ``--load-hf`` adds to each of four ranks; ``tokens``, documents of
mixed text that a tokenizer here cuts otherwise than its library, and the speed of
``data preprocess`` over ``tokenizers`` alone. Exits with status 1 if a goal is missed.
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
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.gpt_ranks import GptRank  # noqa: E402
from harness.processes import environment, run_ranks  # noqa: E402
from harness.report import Result, Row, measure, parser_of  # noqa: E402

LARGEST_BYTES = 32000 * 2048 * 2
MOST_TENSORS = 4.0
"""Most memory of import and export, in largest tensors of the model."""
LEAST_SPEED = 0.8
"""Least speed over reading and writing the same bytes, and over the tokenizers alone."""
_BLOCK = 1 << 23
# A command in a process of its own, which then says the time it took and its peak of memory.
_CHILD = """
import re, sys, time
from pathlib import Path
from megatron.adaptive import accelerator
accelerator.install()
import megatron.adaptive.checkpoint.hugging_face_weights
from megatron.adaptive.cli import checkpoint
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
before, begin = peak(), time.perf_counter()
getattr(checkpoint, sys.argv[1])(sys.argv[2:])
print("MEASURED", time.perf_counter() - begin, peak() - before)
"""
_MESH = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
_RUN = f"{_MESH} --bf16 --seq-length 128 --micro-batch-size 1 --global-batch-size 4 --lr 1e-4"
_RUN += " --train-iters 1 --eval-iters 0 --mock-data"
# Reads JSON lines and encodes them, nothing else; says the seconds of the encoding.
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
    """Part ``size``."""
    rows = []
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        total = _make_up(folder / "model", gigabytes)
        files = sorted((folder / "model").glob("*.safetensors"))
        note = f"{total / 1e9:.2f} GB; the largest tensor has {LARGEST_BYTES / 1e6:.0f} MB"
        for what, words in (
            ("import_hf", [str(folder / "model"), "--output", str(folder / "checkpoint")]),
            ("export_hf", [str(folder / "checkpoint"), "--output", str(folder / "out")]),
        ):
            plain_s = _copy(files, folder / "copy")
            command = [sys.executable, "-c", _CHILD, what, *words]
            ran = subprocess.run(command, capture_output=True, text=True, env=environment())
            if ran.returncode:
                raise RuntimeError(ran.stderr[-1000:])
            line = next(line for line in ran.stdout.splitlines() if line.startswith("MEASURED"))
            seconds, peak_bytes = map(float, line.split()[1:])
            speed = f"{what}: speed over reading and writing the bytes"
            rows.append(
                Row(what=speed, value=plain_s / seconds, goal=LEAST_SPEED, least=True, note=note)
            )
            peak = f"{what}: peak of memory in largest tensors"
            value = peak_bytes / LARGEST_BYTES
            rows.append(Row(what=peak, value=value, goal=MOST_TENSORS))
        words = [__file__, "--part", "rank", "--model", str(folder / "model")]
        run_ranks([*words, "--output", str(folder)], 4, 240.0)
        peaks = [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]
        what = "--load-hf, tp 2 and pp 2: peak of a rank in largest tensors, over its weights"
        rows.append(Row(what=what, value=max(peaks) / LARGEST_BYTES, goal=1.0))
    return Result(rows=rows)


def load_as_rank(model: Path, output: Path) -> None:
    """Loads a model as a rank of a job does, and writes the peak of its memory in bytes."""
    from megatron.adaptive import accelerator

    accelerator.install()

    from megatron.adaptive.checkpoint.trainer_checkpoints import Checkpoints

    rank = GptRank([*_RUN.split(), "--load-hf", str(model)])
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _memory("VmRSS")
    Checkpoints(rank._run).load()
    peak = _memory("VmHWM") - before
    (output / f"rank{rank._job.rank}.json").write_text(json.dumps(peak))
    rank.close()


def _memory(name: str) -> int:
    """Returns a figure of this process's memory in bytes."""
    match = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) << 10


def _copy(files: Sequence[Path], target: Path) -> float:
    """Reads and writes the bytes of files, durably; returns the seconds."""
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


def _make_up(folder: Path, gigabytes: float) -> int:
    """Writes a Llama of about this size; returns its bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from megatron.adaptive.checkpoint.safetensors import write_folder

    hidden, inner, rows = 2048, 5632, 32000
    layer = 2 * (2 * hidden * hidden + 2 * 256 * hidden + 3 * hidden * inner)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=max(2, 2 * round((gigabytes * 1e9 - 4 * rows * hidden) / layer / 2)),
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=rows,
        rms_norm_eps=1e-5,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
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
    """Returns documents: sources of the standard library, between them words of many scripts."""
    from megatron.adaptive.data.corpus import source_files

    draw = random.Random(1)
    documents, left = [], megabytes * 1e6
    for path in source_files(Path(sysconfig.get_path("stdlib"))):
        source = path.read_bytes().decode("utf-8", "ignore")
        letters = draw.choice(_SCRIPTS)
        words = [
            "".join(draw.choices(letters, k=draw.randint(1, 9)))
            + draw.choice((" ", "  ", "\n", "\r\n\t", ", ", "\u00a0", "'s ", f" {draw.random()} "))
            for _ in range(len(source) // 12)
        ]
        documents += [source, "".join(words)]
        left -= sum(len(text.encode()) for text in documents[-2:])
        if left < 0:
            return documents
    raise SystemExit(f"the standard library has less text than {megabytes} MB")


def tokens(megabytes: float) -> Result:
    """Part ``tokens``."""
    import base64

    import sentencepiece
    from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import TikTokenTokenizer
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    from megatron.adaptive.config.data import TokenizerConfig
    from megatron.adaptive.data.corpus import CorpusSpec, make_corpus
    from megatron.adaptive.data.preprocess import PreprocessSpec, preprocess
    from megatron.adaptive.data.tokenizer import build_tokenizer

    texts = _mixed_text(megabytes)
    nbytes = sum(len(text.encode()) for text in texts)
    note = f"{nbytes / 1e6:.1f} MB in {len(texts)} documents"
    rows = []
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        corpus = make_corpus(CorpusSpec(output_dir=folder / "corpus", max_bytes=4_000_000))
        bpe = Tokenizer(models.BPE.from_file(str(corpus.vocab_file), str(corpus.merge_file)))
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        bpe.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        (folder / "hf").mkdir()
        bpe.save(str(folder / "hf" / "tokenizer.json"))
        (folder / "hf" / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in texts for line in text.splitlines()[:50]),
            model_prefix=str(folder / "pieces"),
            vocab_size=4000,
            byte_fallback=True,
            minloglevel=2,
        )
        byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
        merged = [
            bytes(byte_of[letter] for letter in token)
            for token, _ in sorted(bpe.get_vocab().items(), key=lambda one: one[1])
            if not token.startswith("<|") and len(token) > 1
        ]
        ranks = [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": ""}
            for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), *merged])
        ]
        (folder / "ranks.json").write_text(json.dumps(ranks))
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "pieces.model"))
        folder_s = PreTrainedTokenizerFast.from_pretrained(folder / "hf")
        words = {"vocab_size": len(ranks) + 19, "tiktoken_num_special_tokens": 19}
        tiktoken = TikTokenTokenizer(
            str(folder / "ranks.json"), None, 19, pattern="v2", vocab_size=words["vocab_size"]
        )
        files = {"vocab_file": str(corpus.vocab_file), "merge_file": str(corpus.merge_file)}
        plain = Tokenizer(models.BPE.from_file(*files.values()))
        plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        kinds = {
            "GPT2BPETokenizer": (files, lambda text: plain.encode(text).ids),
            "HuggingFaceTokenizer": (
                {"tokenizer_model": str(folder / "hf")},
                lambda text: folder_s(text, add_special_tokens=False).input_ids,
            ),
            "SentencePieceTokenizer": (
                {"tokenizer_model": str(folder / "pieces.model")},
                pieces.encode,
            ),
            "Llama2Tokenizer": (
                {"tokenizer_model": str(folder / "pieces.model")},
                lambda text: [pieces.bos_id(), *pieces.encode(text)],
            ),
            "TikTokenizer": (
                {"tokenizer_model": str(folder / "ranks.json"), "tiktoken_pattern": "v2", **words},
                tiktoken.text_to_ids,
            ),
        }
        for kind, (given, encode) in kinds.items():
            ours = build_tokenizer(TokenizerConfig(tokenizer_type=kind, **given))
            found = ours.tokenize_batch(texts)
            wrong = sum(a != encode(text) for a, text in zip(found, texts, strict=True))
            what = f"{kind}: documents with other tokens"
            rows.append(Row(what=what, value=wrong, goal=0, note=note))
        lines = folder / "text.jsonl"
        lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 3))

        def preprocessed_s(inputs: Path, workers: int) -> float:
            given = {
                "tokenizer_type": "HuggingFaceTokenizer",
                "tokenizer_model": str(folder / "hf"),
            }
            prefix, begin_s = str(folder / f"out{workers}"), time.perf_counter()
            preprocess(
                PreprocessSpec(inputs=(inputs,), output_prefix=prefix, workers=workers, **given)
            )
            return time.perf_counter() - begin_s

        (folder / "line.jsonl").write_text('{"text": "one"}\n')
        preprocessed_s(folder / "line.jsonl", 1)  # imports what writes tokens
        for workers in sorted({1, os.cpu_count() or 1}):
            os.environ["RAYON_NUM_THREADS"] = str(workers)
            os.environ["TOKENIZERS_PARALLELISM"] = "true" if workers > 1 else "false"
            ran = [sys.executable, "-c", _TOKENIZERS, str(folder / "hf" / "tokenizer.json")]
            alone = subprocess.run([*ran, str(lines)], capture_output=True, text=True, check=True)
            seconds = preprocessed_s(lines, workers)
            speed = float(alone.stdout) / seconds
            what = f"data preprocess, {workers} workers: speed over tokenizers alone"
            note = f"{3 * nbytes / 1e6 / seconds:.2f} MB/s"
            rows.append(Row(what=what, value=speed, goal=LEAST_SPEED, least=True, note=note))
    return Result(rows=rows)


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
