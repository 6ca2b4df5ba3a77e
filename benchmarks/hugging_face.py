"""Measures reading and writing of Hugging Face folders, and compares many random models.

    python benchmarks/hugging_face.py --part random --count 50 [--family llama]
    python benchmarks/hugging_face.py --part size [--gigabytes 2]

``random`` draws models of each family and shapes of ranks, checks import and export, and prints per
family how far logits and gradients are from those of ``transformers`` at most. ``size`` makes up a
model on disk and prints the peak of memory over that before, and the speed over reading and writing
the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

_BLOCK = 1 << 23
# A command in a process of its own, which then says the time it took and its peak of memory.
_CHILD = """
import re, sys, time
from pathlib import Path
from megatron.adaptive import accelerator
accelerator.install()
import megatron.adaptive.checkpoint.hugging_face
from megatron.adaptive.cli import checkpoint
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
before, begin = peak(), time.perf_counter()
getattr(checkpoint, sys.argv[1])(sys.argv[2:])
print("MEASURED", time.perf_counter() - begin, peak() - before)
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

    from megatron.adaptive.checkpoint.safetensors import write_folder

    hidden, inner, rows = 2048, 5632, 32000
    layer = 2 * (2 * hidden * hidden + 2 * 256 * hidden + 3 * hidden * inner)
    layers = max(1, round((gigabytes * 1e9 - 4 * rows * hidden) / layer))
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": rows,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (rows, hidden)}
    for number in range(layers):
        for name, shape in (
            ("self_attn.q_proj", (hidden, hidden)),
            ("self_attn.k_proj", (256, hidden)),
            ("self_attn.v_proj", (256, hidden)),
            ("self_attn.o_proj", (hidden, hidden)),
            ("mlp.gate_proj", (inner, hidden)),
            ("mlp.up_proj", (inner, hidden)),
            ("mlp.down_proj", (hidden, inner)),
            ("input_layernorm", (hidden,)),
            ("post_attention_layernorm", (hidden,)),
        ):
            shapes[f"model.layers.{number}.{name}.weight"] = shape
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (rows, hidden)}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_folder(
        folder,
        {name: (torch.bfloat16, shape) for name, shape in shapes.items()},
        lambda name: torch.randn(shapes[name], dtype=torch.bfloat16),
        shard_bytes=10**9,
    )
    return sum(2 * math.prod(shape) for shape in shapes.values())


def main() -> None:
    """Runs a part."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", choices=("random", "size"), required=True)
    parser.add_argument("--count", type=int, default=50, help="models of each family")
    parser.add_argument("--family", action="append", help="one alone; may be repeated")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    options = parser.parse_args()
    if options.part == "size":
        measure_size(options.gigabytes)
        return
    raise SystemExit(compare_random(options.count, options.family or []))


if __name__ == "__main__":
    main()
