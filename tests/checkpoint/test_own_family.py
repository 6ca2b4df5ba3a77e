"""Tests the import and export of models of a family that users define outside of the package."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.adaptive.checkpoint.folder import CheckpointFolder
from megatron.adaptive.checkpoint.reader import CheckpointReader, WantedPart
from megatron.adaptive.cli.checkpoint import export_hf, import_hf
from megatron.adaptive.config.arguments import parse, read_recipe
from megatron.adaptive.config.hugging_face import SINGLE, load_config
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.model_file import read_model

from ..multiprocess.launch import ROOT

PAGE = ROOT / "docs" / "huggingface.md"
RUN = "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data".split()
HIDDEN, WIDTH, FFN, VOCABULARY, LAYERS = 16, 8, 24, 40, 2
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": WIDTH,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
AURORA = {**SIZES, "model_type": "aurora", "depth": LAYERS, "score_scale": 4.0}
# Models of Qwen 3 have the same layers, but with different names.
QWEN = {**SIZES, "model_type": "qwen3", "num_hidden_layers": LAYERS, "rms_norm_eps": 1e-5}
ROWS = {"q": 4 * WIDTH, "k": 2 * WIDTH, "v": 2 * WIDTH}


def code_of_page() -> str:
    """Returns the code of the example class that the documentation shows."""
    section = PAGE.read_text().partition("## Add a family")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return str(code)


@pytest.fixture
def aurora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Changes to a folder with a model and the documentation's example, and returns the folder."""
    (tmp_path / "aurora.py").write_text(code_of_page())
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "aurora", raising=False)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(AURORA, indent=2))
    torch.manual_seed(5)
    tensors = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    tensors["lm_head.weight"] = (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        modules = {f"self_attn.{name}_proj": (rows, HIDDEN) for name, rows in ROWS.items()}
        modules |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (HIDDEN,))
        modules |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (WIDTH,))
        modules |= dict.fromkeys(("ffn.gate", "ffn.up"), (FFN, HIDDEN))
        modules |= {"self_attn.o_proj": (HIDDEN, 4 * WIDTH), "ffn.down": (HIDDEN, FFN)}
        tensors |= {f"model.blocks.{layer}.{name}.weight": size for name, size in modules.items()}
    values = {name: torch.randn(shape) for name, shape in tensors.items()}
    save_file(values, model / SINGLE, metadata={"format": "pt"})
    return tmp_path


def core_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors in the folder ``checkpoint``, keyed by their names in megatron-core."""
    folder = CheckpointFolder(checkpoint)
    path, manifest = folder.open(0)
    tensors = {}
    with CheckpointReader(path, manifest["files"], manifest["blocks"]) as reader:
        for name, saved in reader.tensors.items():
            tensors[name] = torch.empty(tuple(saved.size), dtype=saved.dtype)
            offset = [0] * len(saved.size)
            reader.read([WantedPart(name=name, offset=offset, target=tensors[name])])
    return tensors


def test_its_weights_come_in_and_go_out_again(aurora: Path) -> None:
    family = ["--hf-family", "aurora:Aurora"]
    import_hf([str(aurora / "model"), "--output", "imported", *family])
    export_hf(["imported", "--output", "out"])
    before, after = load_file(aurora / "model" / SINGLE), load_file(aurora / "out" / SINGLE)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    config = "config.json"
    assert (aurora / "out" / config).read_bytes() == (aurora / "model" / config).read_bytes()

    renamed = {}
    for name, tensor in before.items():
        name = name.replace("model.blocks.", "model.layers.").replace("ffn.", "mlp.")
        renamed[re.sub(r"mlp\.(\w+)", r"mlp.\1_proj", name)] = tensor
    (aurora / "qwen").mkdir()
    (aurora / "qwen" / "config.json").write_text(json.dumps(QWEN))
    save_file(renamed, aurora / "qwen" / SINGLE)
    import_hf([str(aurora / "qwen"), "--output", "same"])
    imported, expected = core_tensors(aurora / "imported"), core_tensors(aurora / "same")
    assert imported.keys() == expected.keys()
    assert all(torch.equal(imported[name], expected[name]) for name in imported)


def test_its_settings_are_those_of_the_class(aurora: Path) -> None:
    flags = ["--load-hf", "model", "--hf-family", "aurora:Aurora"]
    config = parse([*RUN, *flags], world_size=1)
    assert config.model.num_layers == LAYERS
    assert config.model.qk_layernorm
    assert config.model.norm_epsilon == 1e-5
    assert config.core.softmax_scale == 0.5
    assert config.data.vocab_size == VOCABULARY
    with pytest.raises(
        ConfigError,
        match="--num-layers 3 contradicts the value 2 in config.json of --load-hf model",
    ):
        parse([*RUN, *flags, "--num-layers", "3"], world_size=1)
    with pytest.raises(ConfigError, match="model_type 'aurora' is unknown"):
        parse([*RUN, "--load-hf", "model"], world_size=1)
    sizes = "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8"
    sizes += " --max-position-embeddings 8 --vocab-size 40"
    with pytest.raises(ConfigError, match="--hf-family .* requires --load-hf"):
        parse([*RUN, *flags[2:], *sizes.split()], world_size=1)


def test_a_recipe_takes_its_settings_from_the_folder(aurora: Path) -> None:
    recipe = {"qk_layernorm": True, "softmax_scale": 3.0, "num_layers": 7, "load_hf": "model"}
    recipe |= {"hf_family": "aurora:Aurora"}
    flags = read_recipe(recipe, [], "recipe.yaml").flags
    assert sorted(flags) == ["--hf-family", "--load-hf", "aurora:Aurora", "model"]


def _change(folder: Path, **keys: Any) -> None:
    (folder / "model" / "config.json").write_text(json.dumps({**AURORA, **keys}))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sparse_attention": True}, "sparse_attention True requests attention to chosen tokens"),
        ({"other": 1}, "other 1 requests something unknown"),
        ({"depth": None}, "depth is missing, but every model needs it"),
        ({"depth": 2.5}, "depth must be an integer.*got 2.5"),
        ({"score_scale": "x"}, "score_scale must be a number.*got 'x'"),
        ({"model_type": "borealis"}, "'borealis' does not belong to family aurora:Aurora, whose"),
    ],
)
def test_a_key_that_it_does_not_support_is_named(
    keys: dict[str, Any], message: str, aurora: Path
) -> None:
    _change(aurora, **keys)
    with pytest.raises(ConfigError, match=message) as info:
        load_config(aurora / "model", "aurora:Aurora")
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("aurora:Boreas", ("", ""), "aurora.py has no 'Boreas'"),
        ("nowhere:Aurora", ("", ""), "module 'nowhere' cannot be imported"),
        ("aurora", ("", ""), "'aurora' is neither package.module:Class nor an entry point"),
        ("aurora:Llama.settings", ("", ""), "must be a subclass of"),
        (
            "aurora:Aurora",
            ('("aurora",)', '"aurora"'),
            "aurora.py:.* model_types must be .* got 'aurora'",
        ),
        ("aurora:Aurora", ('"qk_layernorm"', '"qk_layer_norm"'), "the nearest is qk_layernorm"),
        (
            "aurora:Aurora",
            (
                "    layer_prefix",
                '    outer_weights = {"lm_head": "output_layer"}\n    layer_prefix',
            ),
            "outer_weights does not contain embedding.word_embeddings",
        ),
        ("aurora:Aurora", ("**= -0.5", '+= "x"'), "adjust of Aurora .aurora.py:.*raised TypeError"),
    ],
)
def test_a_class_that_is_wrong_is_named(
    name: str, change: tuple[str, str], message: str, aurora: Path
) -> None:
    path = aurora / "aurora.py"
    if change[0]:
        assert change[0] in path.read_text()
        path.write_text(path.read_text().replace(*change))
    with pytest.raises(ConfigError, match=message) as info:
        load_config(aurora / "model", name)
    assert "\n" not in str(info.value)


def test_a_package_provides_one_by_its_model_type(
    aurora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that a family is found without a flag if a package registers it for the model type."""
    about = aurora / "aurora-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: aurora\nVersion: 1.0\n")
    points = "[megatron_adaptive.families]\naurora = aurora:Aurora\nborealis = aurora:Aurora\n"
    (about / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(aurora)
    _change(aurora, model_type="borealis", score_scale=16.0)
    config = parse([*RUN, "--load-hf", "model"], world_size=1)
    assert config.core.softmax_scale == 0.25
    model = read_model("model", attention="fused")
    assert model.num_counted == LAYERS
