"""Measures reading and writing of Hugging Face folders, and compares many random models.

    python benchmarks/hugging_face.py --part random --count 50 [--family llama]
    python benchmarks/hugging_face.py --part size [--gigabytes 2]
    python benchmarks/hugging_face.py --part tokens [--megabytes 10]

``random`` draws models of each family and shapes of ranks, checks import and export, and prints per
family how far logits and gradients are from those of ``transformers`` at most. ``size`` makes up a
model on disk and prints the peak of memory over that before, the speed over reading and writing
the same bytes, and what ``--load-hf`` adds to the memory of each of four ranks. ``tokens`` counts
the documents of mixed text that a tokenizer here cuts otherwise than the library it stands on, and
prints the speed of ``preprocess-data`` over that library, on a core and on all.
"""

from __future__ import annotations

import argparse
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

from benchmarks.ranks import GptRank, run_ranks  # noqa: E402

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


def compare_random(count: int, families: Sequence[str]) -> int:
    """Draws so many models of each family and prints the largest differences of each."""
    name = (
        "tests/checkpoint/test_hugging_face_random.py::test_random_models_are_those_of_transformers"
    )
    tests = [f"{name}[{family}]" for family in families] or [name]
    command = [sys.executable, "-m", "pytest", "-q", "-s", "--reruns", "0", *tests]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "HF_EXAMPLES": str(count)}
    ).returncode


def measure_size(gigabytes: float) -> None:
    """Prints peak memory and speed of import and export of a made-up model."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        total = _make_up(folder / "model", gigabytes)
        files = sorted((folder / "model").glob("*.safetensors"))
        largest = 32000 * 2048 * 2
        print(f"{total / 1e9:.2f} GB; the largest tensor has {largest / 1e6:.0f} MB")
        for what, words in (
            ("import_hf", [str(folder / "model"), "--output", str(folder / "checkpoint")]),
            ("export_hf", [str(folder / "checkpoint"), "--output", str(folder / "out")]),
        ):
            command = [sys.executable, "-c", _CHILD, what, *words]
            plain_s = _copy(files, folder / "copy")
            ran = subprocess.run(command, capture_output=True, text=True)
            if ran.returncode:
                raise SystemExit(ran.stderr)
            measured = next(line for line in ran.stdout.splitlines() if line.startswith("MEASURED"))
            seconds, peak = map(float, measured.split()[1:])
            print(
                f"{what}: {seconds:.1f} s, {plain_s / seconds:.2f} of the speed of reading and"
                f" writing the bytes ({plain_s:.1f} s); peak {peak / 1e6:.0f} MB over that before"
            )
        words = [__file__, "--part", "rank", "--model", str(folder / "model")]
        run_ranks([*words, "--output", str(folder)], 4, 240.0)
        for file in sorted(folder.glob("rank*.json")):
            own, more = json.loads(file.read_text())
            print(
                f"--load-hf, tp 2 and pp 2, {file.stem}: a peak of {more / 1e6:.0f} MB over the"
                f" memory of a rank that has drawn its part of {own / 1e6:.0f} MB by lot"
                f" (goal: {largest / 1e6:.0f}, one tensor)"
            )


def load_as_rank(model: Path, output: Path) -> None:
    """Loads a model as a rank of a job does, and writes the bytes of its part and of the peak."""
    from megatron.adaptive import accelerator

    accelerator.install()

    from megatron.adaptive.checkpoint.trainer_checkpoints import Checkpoints

    rank = GptRank([*_RUN.split(), "--load-hf", str(model)])
    weights = [one for chunk in rank._run.chunks for one in chunk.parameters()]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _memory("VmRSS")
    Checkpoints(rank._run).load()
    found = sum(one.numel() * one.element_size() for one in weights), _memory("VmHWM") - before
    (output / f"rank{rank._job.rank}.json").write_text(json.dumps(found))
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


def compare_tokens(megabytes: float) -> None:
    """Prints what differs from the libraries' own tokens, and the speed beside them."""
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
    size = sum(len(text.encode()) for text in texts)
    print(f"{size / 1e6:.1f} MB in {len(texts)} documents")
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
            print(f"{kind}: {sum(map(len, found))} tokens, {wrong} documents differ (goal 0)")
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
            print(
                f"preprocess-data, {workers} workers: {float(alone.stdout) / seconds:.2f} of the"
                f" speed of tokenizers alone ({3 * size / 1e6 / seconds:.2f} MB/s; goal 0.8)"
            )


def main() -> None:
    """Runs a part."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", choices=("random", "size", "rank", "tokens"), required=True)
    parser.add_argument("--count", type=int, default=50, help="models of each family")
    parser.add_argument("--family", action="append", help="one alone; may be repeated")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--megabytes", type=float, default=10.0)
    parser.add_argument("--model", type=Path, help="of a rank")
    parser.add_argument("--output", type=Path, help="of a rank")
    options = parser.parse_args()
    if options.part == "rank":
        load_as_rank(options.model, options.output)
        return
    if options.part == "tokens":
        compare_tokens(options.megabytes)
        return
    if options.part == "size":
        measure_size(options.gigabytes)
        return
    raise SystemExit(compare_random(options.count, options.family or []))


if __name__ == "__main__":
    main()
