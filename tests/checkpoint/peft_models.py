"""Creates small models with adapters, and trains them with PEFT to get reference results.

Usage: ``peft_models.py FOLDER NAME ...``. Each model is written to the subfolder ``NAME``. The
program runs in a separate process, because the simulated GPU of the tests changes how transformers
loads models.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))

import tiny_models

RANK, ALPHA, MICROBATCHES, STEPS = 3, 7, 8, 3
# The values are the family of each model and the modules to which PEFT adds adapters. The model
# "predicting" has a multi-token prediction layer, which transformers does not load.
PREDICTING = "predicting"
MODELS: dict[str, tuple[str, Any]] = {
    "llama": ("llama", "all-linear"),
    "qwen3": ("qwen3", ["q_proj", "v_proj", "up_proj"]),
    "gemma3_text": ("gemma3_text", ["q_proj", "o_proj", "down_proj"]),
    "gpt2": ("gpt2", ["c_attn", "c_proj", "c_fc"]),
    "gpt_neox": ("gpt_neox", ["query_key_value", "dense_4h_to_h"]),
    "phi3": ("phi3", ["qkv_proj", "gate_up_proj", "down_proj"]),
    "mixtral": ("mixtral", ["q_proj", "v_proj"]),
    "qwen3_moe": ("qwen3_moe", ["q_proj", "k_proj", "o_proj"]),
    "deepseek_v2": ("deepseek_v2", ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]),
    "deepseek_v3": ("deepseek_v3", ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]),
    PREDICTING: ("deepseek_v3", ["q_b_proj", "o_proj"]),
}


def make(folder: Path, family: str, targets: Any) -> None:
    """Writes a model of ``family``, its adapters, and the results of training to ``folder``.

    ``targets`` contains PEFT's setting for the modules that get adapters.
    """
    further = {"num_nextn_predict_layers": 1} if folder.name == PREDICTING else {}
    tiny_models.make(folder, family, **further)
    torch.manual_seed(1)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    kind = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=targets,
        task_type="CAUSAL_LM",
        fan_in_fan_out=family == "gpt2",
    )
    model = peft.get_peft_model(base, kind)
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    with torch.no_grad():
        for parameter in trained.values():
            parameter.copy_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder / "adapters")
    model.train()
    tokens = torch.randint(0, base.config.vocab_size, (MICROBATCHES, 1, 13))
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=0.1)
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        each = []
        for rows in tokens:
            logits = model(rows[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            (loss / MICROBATCHES).backward()
            each.append(float(loss))
        losses.append(sum(each) / len(each))
        if not gradients:
            gradients = {
                name.replace(".default", ""): parameter.grad.clone()
                for name, parameter in trained.items()
            }
        optimizer.step()
    save_file(
        gradients | {"tokens": tokens, "losses": torch.tensor(losses)},
        folder / "trained.safetensors",
    )


if __name__ == "__main__":
    for name in sys.argv[2:]:
        make(Path(sys.argv[1]) / name, *MODELS[name])
