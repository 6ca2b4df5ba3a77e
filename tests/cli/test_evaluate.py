"""Tests that ``evaluate`` computes the same perplexity and sample as ``transformers``."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron.adaptive.cli.pretrain_gpt import evaluate
from megatron.adaptive.config.input_files import printable

from ..multiprocess.launch import TRANSFORMERS, forking, run_forked

END, LENGTH = "<end>", 32
TEXT = "A pipeline is as fast as its slowest stage. " * 20
PROMPT = "The slowest stage"


# The reference runs in a separate process, because other tests may have patched torch in this
# process.
REFERENCE = f"""
import json, sys, torch, transformers
from tokenizers import Tokenizer
folder, text, prompt = sys.argv[1:]
tokenizer = Tokenizer.from_file(folder + "/tokenizer.json")
model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
ids = [*tokenizer.encode(text).ids, tokenizer.token_to_id("{END}")]
count = (len(ids) - 1) // {LENGTH} // 2 * 2
rows = torch.tensor([ids[i * {LENGTH} : (i + 1) * {LENGTH} + 1] for i in range(count)])
said = tokenizer.encode(prompt).ids
with torch.no_grad():
    logits = model(rows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    for _ in range(8):
        said.append(int(model(torch.tensor([said])).logits[0, -1].argmax()))
print(json.dumps([float(loss), tokenizer.decode(said, skip_special_tokens=False)]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a small fp32 Llama with a byte-level tokenizer and returns its folder."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("llama")
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate([*names, END])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        initializer_range=0.2,
    )
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[float, str]:
    """Returns the loss and the generated text that ``transformers`` computes for the model."""
    done = subprocess.run(
        [sys.executable, "-c", REFERENCE, str(folder), TEXT, PROMPT],
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    loss, said = json.loads(done.stdout)
    return loss, said


def run_warm(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs ``command`` in ``folder``, and returns the finished process.

    The command's processes are forked from a process that has already imported transformers.
    """
    return run_forked(
        command, folder=folder, limit_s=200.0, variables=forking(TRANSFORMERS), modules=TRANSFORMERS
    )


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "flags", [[], ["--nproc-per-node", "2", "--pipeline-model-parallel-size", "2"]]
)
def test_figures_are_those_of_transformers(
    folder: Path, tmp_path: Path, expected: tuple[float, str], flags: list[str]
) -> None:
    loss, said = expected
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": TEXT}) + "\n")
    command = ["-m", "megatron.adaptive", "evaluate", "--data", str(text), *flags]
    command += ["--load-hf", str(folder), "--seq-length", str(LENGTH), "--global-batch-size", "2"]
    command += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    command += ["--prompt", PROMPT, "--tokens", "8"]
    done = run_warm(command, tmp_path)
    assert done.returncode == 0, done.stderr
    figures = re.findall(
        r"on (\w+) set \| lm loss value: (\S+) \| lm loss PPL: (\S+) ", done.stdout
    )
    assert [name for name, _, _ in figures] == ["validation"], done.stdout
    assert f"text {text}: evaluating " in done.stdout
    assert float(figures[0][1]) == pytest.approx(loss, rel=1e-5)
    assert float(figures[0][2]) == pytest.approx(math.exp(loss), rel=1e-4)
    assert f"sample: {printable(said, lines=True)}\n" in done.stdout


@pytest.mark.multiprocess
@pytest.mark.parametrize("more", [pytest.param([], marks=pytest.mark.long), ["--lora-rank", "4"]])
def test_checkpoints_of_a_run_from_a_folder_say_their_model(
    folder: Path, tmp_path: Path, more: list[str]
) -> None:
    """Checks that ``evaluate`` needs no flags of the model, which are in the checkpoint."""
    tokens = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    run = "--mock-data --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-6"
    run += f" --seq-length {LENGTH} --save {tmp_path}/saved --save-interval 2 --eval-iters 0"
    command = ["-m", "megatron.adaptive", "train", "rank", "--load-hf", str(folder), *run.split()]
    done = run_warm([*command, *tokens, *more], tmp_path)
    assert done.returncode == 0, done.stderr
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": TEXT}) + "\n")
    command = ["-m", "megatron.adaptive", "evaluate", "--data", str(text), "--load"]
    command += [str(tmp_path / "saved"), "--seq-length", str(LENGTH), *tokens]
    done = run_warm(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "loss at iteration 2 on validation set | lm loss value: " in done.stdout
    assert f"text {text}: evaluating " in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--load-hf FOLDER", "evaluate requires a text; pass --data FILE or --prompt TEXT"),
        ("--prompt x", "evaluate requires a model; pass --load CKPT or --load-hf DIR"),
        ("--load-hf FOLDER --data FOLDER/short.jsonl", "9 tokens, fewer than one batch of 1 x 32"),
    ],
)
def test_bad_input(
    folder: Path, options: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "short.jsonl").write_text('{"text": "too shor"}\n')
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    arguments = [
        *options.replace("FOLDER", str(folder)).split(),
        *flags,
        "--seq-length",
        str(LENGTH),
    ]
    assert evaluate(arguments) == 2
    assert said in capsys.readouterr().err
