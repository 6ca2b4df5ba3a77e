"""The example that fine-tunes a folder of transformers: losses fall, and transformers reads it."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.adaptive.errors import ConfigError

from ..multiprocess.launch import ROOT, environment

pytest.importorskip("transformers", reason="bash prerequisite.sh --examples")
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

pytestmark = pytest.mark.multiprocess
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}</s>{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)


def write_model(folder: Path) -> None:
    """Writes a small model with random weights and a tokenizer with a token for each letter."""
    letters = [chr(code) for code in range(32, 127)]
    special = ["<pad>", "</s>", "<user>", "<assistant>"]
    vocabulary = {token: index for index, token in enumerate(special + letters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="?",
        additional_special_tokens=special[2:],
        chat_template=TEMPLATE,
    )
    fast.save_pretrained(folder)
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    config = LlamaConfig(
        vocab_size=len(vocabulary), num_attention_heads=4, num_key_value_heads=2, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def write_data(path: Path) -> None:
    """Writes conversations and texts of different lengths."""
    lines = []
    for number in range(40):
        question = {"role": "user", "content": f"{number} times two?"}
        answer = {"role": "assistant", "content": f"It is {2 * number}." + " Yes." * (number % 3)}
        messages = {"messages": [question, answer]}
        text = {"text": "one, two, " * (number % 5 + 1)}
        lines.append(json.dumps(messages if number % 4 else text))
    path.write_text("\n".join(lines), encoding="utf-8")


@pytest.mark.parametrize("rank", [0, 4])
def test_a_folder_is_tuned_and_saved(tmp_path: Path, rank: int) -> None:
    write_model(tmp_path / "model")
    write_data(tmp_path / "train.jsonl")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "examples/finetune/finetune.py"),
            *("--model", str(tmp_path / "model"), "--data", str(tmp_path / "train.jsonl")),
            *("--output", str(tmp_path / "tuned"), "--lora-rank", str(rank)),
            *("--epochs", "3", "--lr", "1e-2", "--length-multiple", "32", "--eval-share", "0.1"),
        ],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"evaluation loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3
    # Adapters in layers of random weights, before an output layer that stays, change little.
    assert losses[2] < (1.0 if rank else 0.9) * losses[0]
    tuned: Any
    if rank:
        from peft import PeftModel

        base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        tuned = PeftModel.from_pretrained(base, str(tmp_path / "tuned"))
    else:
        tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tuned")
    text = tokenizer("one, two, one, two, ", return_tensors="pt")
    loss = tuned(**text, labels=text["input_ids"]).loss
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loss < before(**text, labels=text["input_ids"]).loss - (0 if rank else 1)


def load_example() -> Any:
    """Imports the example as a module."""
    spec = importlib.util.spec_from_file_location(
        "finetune", ROOT / "examples/finetune/finetune.py"
    )
    assert spec is not None
    assert spec.loader is not None
    finetune = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(finetune)
    return finetune


@pytest.mark.parametrize("mark", ["{% generation %}", "{%- generation -%}", "{%generation%}"])
def test_only_answers_are_learned(tmp_path: Path, mark: str) -> None:
    """However the template writes the tag around them."""
    finetune = load_example()
    write_model(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer.chat_template = TEMPLATE.replace("{% generation %}", mark)
    question = {"role": "user", "content": "one?"}
    answer = {"role": "assistant", "content": "two"}
    options = SimpleNamespace(max_length=64, length_multiple=8)
    line = json.dumps({"messages": [question, answer]})
    labels = finetune.encode(tokenizer, line, options)["labels"][0]
    assert tokenizer.decode(labels[labels >= 0]).replace(" ", "") == "two</s>"
    options.max_length = 4
    assert finetune.num_learned([finetune.encode(tokenizer, line, options)]) == [0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"--model": "nowhere"}, "--model nowhere has no tokenizer"),
        ({"--data": "nowhere.jsonl"}, "--data nowhere.jsonl cannot be read"),
        ({"--data": "wrong.jsonl"}, "wrong.jsonl:2 is no sample (KeyError: 'text')"),
        ({"--data": "broken.jsonl"}, "broken.jsonl:1 is no sample (JSONDecodeError: "),
        ({"--data": "empty.jsonl"}, "--data empty.jsonl has no samples"),
        ({"--output": "model"}, "--output model exists and is not empty: name a new folder"),
    ],
)
def test_wrong_input_is_named_in_one_line_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    write_data(tmp_path / "train.jsonl")
    Path("wrong.jsonl").write_text('{"text": "a"}\n{"prompt": "a"}\n')
    Path("broken.jsonl").write_text('{"text": \n')
    Path("empty.jsonl").write_text("\n")
    options = {"--model": "model", "--data": "train.jsonl", "--output": "tuned", **flags}
    program = load_example()
    arguments = [argument for option in options.items() for argument in option]
    monkeypatch.setattr(sys, "argv", ["finetune.py", *arguments])
    with pytest.raises(ConfigError) as caught:
        program.main()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
