"""Tests the import and export of Hugging Face models, and errors about invalid models."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.adaptive.checkpoint.export import require_same
from megatron.adaptive.cli.checkpoint import export_hf, import_hf
from megatron.adaptive.cli.pretrain_gpt import load_recipe, train
from megatron.adaptive.config.arguments import parse, read_recipe
from megatron.adaptive.config.families.registry import supported_types
from megatron.adaptive.config.hugging_face import INDEX, SINGLE, load_config
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import AdaptiveError, ConfigError

from ..multiprocess.launch import run_ranks, tail
from . import tiny_models

WORKER = Path(__file__).parents[1] / "multiprocess" / "hugging_face_worker.py"
PRETRAIN = Path(__file__).parents[2] / "pretrain_gpt.py"
RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
LOGITS, GRADIENTS = 1e-5, 1e-4


def compare(folder: Path, cases: list[tuple[str, list[str]]], world_size: int) -> None:
    """Checks that models have the expected outputs on ``world_size`` ranks.

    ``cases`` contains pairs of a model in ``folder`` and flags with parallel sizes.
    """
    (folder / "cases.json").write_text(
        json.dumps([{"model": name, "flags": flags} for name, flags in cases])
    )
    log = folder.with_name(f"{folder.name}-{world_size}.log")
    command = [str(WORKER), str(folder)]
    status = run_ranks(command, world_size=world_size, log=log, limit_s=280.0)
    assert status == 0, tail(log)
    said = [line.split() for line in log.read_text().splitlines()]
    logits = [line for line in said if line[:1] == ["LOGITS"]]
    gradients = [line for line in said if line[:1] == ["GRADIENTS"]]
    assert {line[2] for line in logits} == {name for name, _ in cases}
    assert len(logits) >= len(cases)
    assert [line for line in logits if not float(line[1]) < LOGITS] == []
    assert [line for line in gradients if not float(line[1]) < GRADIENTS] == []
    assert len(gradients) == len(cases)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a small model of each family and its expected outputs."""
    folder = tmp_path_factory.mktemp("models")
    for name in tiny_models.FAMILIES:
        tiny_models.make(folder / name, name)
    tiny_models.make(folder / "predicting", "deepseek_v3", num_nextn_predict_layers=1)
    return folder


def load(name: str) -> list[str]:
    return ["--load-hf", f"FOLDER/{name}"]


@pytest.mark.multiprocess
def test_logits_and_gradients_are_those_of_transformers(models: Path) -> None:
    compare(models, [(name, load(name)) for name in tiny_models.FAMILIES], 1)


@pytest.mark.long
@pytest.mark.multiprocess
def test_shapes_of_two_ranks_compute_the_same(models: Path, tmp_path: Path) -> None:
    import_hf([str(models / "llama"), "--output", str(models / "imported")])
    from_checkpoint = ["--load", "FOLDER/imported", "--finetune"]
    tensor = ["--tensor-model-parallel-size", "2"]
    pipeline = ["--pipeline-model-parallel-size", "2"]
    chunks = [*pipeline, "--num-virtual-stages-per-pipeline-rank", "2"]
    flags = (models / "imported" / "model_flags.txt").read_text().split()
    cases = [
        ("llama", [*load("llama"), *chunks, "--pipeline-placement", "v"]),
        ("llama", [*flags, *from_checkpoint, *tensor]),
        # Between ranks, use gloo, so that this case does not need the extension.
        ("llama", [*flags, *from_checkpoint, *chunks, "--transport", "gloo"]),
        ("gpt2", [*load("gpt2"), *pipeline, "--partition", "3-1"]),
    ]
    compare(models, cases, 2)


@pytest.mark.multiprocess
@pytest.mark.long
def test_every_family_computes_the_same_on_four_ranks(models: Path) -> None:
    cases = []
    for name in tiny_models.FAMILIES:
        mesh = [
            *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
            *("--num-virtual-stages-per-pipeline-rank", "2"),
        ]
        more = ["--sequence-parallel"] if name in tiny_models.MIXED else []
        cases.append((name, [*load(name), *mesh, *more]))
        if name in tiny_models.MIXED:
            spread = ["--expert-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
            cases.append((name, [*load(name), *spread]))
        deep = ["--pipeline-model-parallel-size", "4", "--num-virtual-stages-per-pipeline-rank"]
        deep += ["2", "--pipeline-placement", "v" if len(cases) % 2 else "loop"]
        cases.append((name, [*load(name), *deep, "--partition", "0-1-1-0-1-0-1-0"]))
    compare(models, cases, 4)


@pytest.mark.multiprocess
def test_layers_that_predict_are_read_and_written(models: Path, tmp_path: Path) -> None:
    pipeline = ["--pipeline-model-parallel-size", "2"]
    predicting = models / "predicting"
    compare(models, [("predicting", load("predicting"))], 1)
    compare(models, [("predicting", [*load("predicting"), *pipeline])], 2)
    import_hf([str(predicting), "--output", str(tmp_path / "checkpoint")])
    export_hf([str(tmp_path / "checkpoint"), "--output", str(tmp_path / "out")])
    assert (tmp_path / "out" / SINGLE).read_bytes() == (predicting / SINGLE).read_bytes()
    copied = "model.layers.4.embed_tokens.weight"
    shutil.copytree(predicting, tmp_path / "other")
    _edit(lambda t: t[copied].add_(1))(tmp_path / "other")
    with pytest.raises(AdaptiveError, match=f"{copied} differs from model.embed_tokens"):
        import_hf([str(tmp_path / "other"), "--output", str(tmp_path / "refused")])
    # The transformers library saves models without their multi-token prediction layers. Such a
    # model must be loaded without these layers.
    assert "mtp_num_layers" not in load_config(models / "deepseek_v3").settings


@pytest.mark.parametrize("name", tiny_models.FAMILIES)
def test_export_writes_the_same_files(name: str, models: Path, tmp_path: Path) -> None:
    import_hf([str(models / name), "--output", str(tmp_path / "checkpoint")])
    export_hf([str(tmp_path / "checkpoint"), "--output", str(tmp_path / "out")])
    for file in (SINGLE, "config.json", "generation_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (models / name / file).read_bytes()


def test_every_family_has_a_small_model() -> None:
    """Checks that all families are tested. Kimi-K2, which equals DeepSeek-V3, is tested below."""
    assert {*tiny_models.FAMILIES, "kimi_k2"} == {*supported_types()}


def test_kimi_k2_is_read_and_written_as_deepseek_v3(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kimi"
    shutil.copytree(models / "deepseek_v3", folder)
    _change(folder, model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"])
    import_hf([str(folder), "--output", str(tmp_path / "checkpoint")])
    export_hf([str(tmp_path / "checkpoint"), "--output", str(tmp_path / "out")])
    for file in (SINGLE, "config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (folder / file).read_bytes()


def test_weights_in_8_bits_are_read_as_what_they_stand_for(tmp_path: Path) -> None:
    folder, expected = tmp_path / "model", {}
    tiny_models.make(folder, "llama", hidden_size=160, head_dim=40)
    tensors = load_file(folder / SINGLE)
    for name, whole in [*tensors.items()]:
        expected[name] = tensors[name] = whole.bfloat16()
        if not name.endswith("_proj.weight"):
            continue
        scales = torch.rand([-(-n // 128) for n in whole.shape]) + 0.5
        rows, columns = (torch.arange(n) // 128 for n in whole.shape)
        small = (whole / scales[rows][:, columns]).to(torch.float8_e4m3fn)
        tensors |= {name: small, f"{name}_scale_inv": scales}
        expected[name] = (small.float() * scales[rows][:, columns]).bfloat16()
    save_file(tensors, folder / SINGLE)
    kind = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    _change(folder, quantization_config=kind, dtype="bfloat16")
    import_hf([str(folder), "--output", str(tmp_path / "checkpoint")])
    export_hf([str(tmp_path / "checkpoint"), "--output", str(tmp_path / "out")])
    exported = load_file(tmp_path / "out" / SINGLE)
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.multiprocess
def test_a_run_hands_on_what_describes_its_model(models: Path, tmp_path: Path) -> None:
    """Checks that ``hf export`` needs only a run's checkpoint, and not the original folder."""
    shutil.copytree(models / "llama", tmp_path / "model")
    import_hf([str(tmp_path / "model"), "--output", str(tmp_path / "imported")])
    shutil.rmtree(tmp_path / "model")
    flags = (tmp_path / "imported" / "model_flags.txt").read_text().split()
    # The flags give the size of the vocabulary without the end-of-document token.
    flags[flags.index("--vocab-size") + 1] = str(tiny_models.VOCABULARY - 1)
    more = f"--load {tmp_path}/imported --finetune --save {tmp_path}/own --mock-data "
    more += " --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 --eval-iters 0"
    more += " --save-interval 1"
    command = [str(PRETRAIN), *flags, *more.split()]
    assert run_ranks(command, world_size=1, log=tmp_path / "log", limit_s=200.0) == 0
    export_hf([str(tmp_path / "own"), "--output", str(tmp_path / "out")])
    config = (models / "llama" / "config.json").read_bytes()
    assert (tmp_path / "out" / "config.json").read_bytes() == config
    assert (
        load_file(tmp_path / "out" / SINGLE).keys() == load_file(models / "llama" / SINGLE).keys()
    )


def test_shards_and_index_are_those_of_transformers(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    config = transformers.AutoConfig.from_pretrained(models / "qwen2")
    # Load the configuration from a file, because the transformers library writes the keys of such a
    # configuration in alphabetical order.
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=7000)
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 3
    import_hf([str(tmp_path / "theirs"), "--output", str(tmp_path / "checkpoint")])
    arguments = [str(tmp_path / "checkpoint"), "--output", str(tmp_path / "out")]
    export_hf([*arguments, "--shard-gb", "7e-6"])
    names = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    for file in names:
        exported, expected = ((tmp_path / name / file).read_bytes() for name in ("out", "theirs"))
        assert exported == expected, file
    caplog.clear()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not caplog.records
    for parameter, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, other)


# These are the keys of published configuration files, without those that have no effect.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "qk_rope_head_dim": 64,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "moe_layer_freq": 1,
        "rope_theta": 10000,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 163840,
        "vocab_size": 102400,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 4096,
        },
    },
    "llama3.2-1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "hidden_act": "silu",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
}


@pytest.mark.parametrize("name", _PUBLISHED)
def test_recipes_are_of_the_published_models(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_PUBLISHED[name]))
    shared = [*load_recipe(RECIPES / "common.yaml")]
    of_training = shared[shared.index("tokenizer_type") :]
    recipe = []
    for key, value in load_recipe(RECIPES / f"{name}.yaml").items():
        if key not in of_training:
            recipe.append(f"--{key.replace('_', '-')}")
            recipe += [] if value is True else [str(value)]
    run = "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data --seq-length 4096 --bf16"
    require_same(
        parse([*recipe, *run.split()], world_size=1), load_config(tmp_path).settings, name, tmp_path
    )


def _change(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def _edit(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / SINGLE)
        change(tensors)
        save_file(tensors, folder / SINGLE)

    return edit


def _cut(folder: Path) -> None:
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[:-100])


def _lengthen(folder: Path) -> None:
    with (folder / SINGLE).open("ab") as file:
        file.write(bytes(64))


def _overlap(folder: Path) -> None:
    """Makes two matrices of equal shape overlap in the weights file in ``folder``.

    The bytes that are no longer used are removed.
    """
    raw = (folder / SINGLE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    last = max(
        (name for name in header if name != "__metadata__"),
        key=lambda name: header[name]["data_offsets"][1],
    )
    same = [name for name, entry in header.items() if entry.get("shape") == header[last]["shape"]]
    other = next(name for name in same if name != last)
    begin = header[last]["data_offsets"][0]
    header[last]["data_offsets"] = header[other]["data_offsets"]
    text = json.dumps(header).encode()
    (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + data[:begin])


def _pickle(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model-00001-of-00001.bin")


def _miss_a_shard(folder: Path) -> None:
    table = {"model.norm.weight": "model-00002-of-00002.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": table}))


_HEAD = "lm_head.weight"
_QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (_miss_a_shard, "model-00002-of-00002.safetensors is missing, but .* lists 1"),
        (_cut, "model.safetensors is truncated or damaged .*copy the file again"),
        (_lengthen, "model.safetensors is truncated or damaged .*no bytes may follow"),
        (_overlap, "model.safetensors is truncated or damaged .* overlaps .*copy the file again"),
        (_pickle, "pytorch_model-00001-of-00001.bin, a pickle, .* save_pretrained"),
        (_edit(lambda t: t.update({_QUERY: t[_QUERY][:8].clone()})), r"q_proj.weight with shape"),
        (_edit(lambda t: t.update({_QUERY: t[_QUERY].to(torch.int8)})), "q_proj.* has the type I8"),
        (
            _edit(lambda t: t.update({_QUERY: t[_QUERY].half()})),
            "one parameter have different dtypes",
        ),
        (_edit(lambda t: t.pop(_HEAD)), r"such as lm_head.weight \(config.json says .* not tied"),
        (
            _edit(lambda t: t.pop(_QUERY)),
            "1 of 39 tensors, such as model.layers.0.self_attn.q_proj.weight",
        ),
        (_edit(lambda t: t.update(more=t[_HEAD][:1].clone())), "contains more, but the model"),
        (
            lambda folder: _change(folder, tie_word_embeddings=True),
            "lm_head.weight differs from model.embed_tokens.weight",
        ),
        (lambda folder: _change(folder, num_hidden_layers=3), "layers.3.*does not have"),
        (lambda folder: _change(folder, vocab_size=80), "embed_tokens.weight with shape"),
        (lambda folder: (folder / "config.json").unlink(), "config.json: No such file"),
    ],
)
def test_folders_that_are_not_whole_are_refused(
    break_it: Callable[[Path], object], message: str, models: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "llama"
    shutil.copytree(models / "llama", folder)
    break_it(folder)
    with pytest.raises(AdaptiveError, match=message) as info:
        import_hf([str(folder), "--output", str(tmp_path / "checkpoint")])
    assert "\n" not in str(info.value)
    assert not list((tmp_path).glob("checkpoint/iter_*"))


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' .* nearest .* is silu"),
        ("llama", {"attention_bias": True}, "attention_bias True requests a bias of the output"),
        ("llama", {"mlp_bias": True}, "mlp_bias True requests"),
        ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number, got '1e-5'"),
        ("llama", {"rope_parameters": [1]}, "config.json: a value has another type than in files"),
        (
            "mistral",
            {"sliding_window": "x"},
            "config.json: sliding_window must be an integer, got 'x'",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_parameters .* requests dynamic rotation",
        ),
        ("llama", {"rope_parameters": {"type": "linear", "factor": 1.5}}, "linear rotation"),
        ("llama", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping 30.0 .* unknown"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantized weights.*dequantize the model"),
        ("llama", {"model_type": "lama"}, "nearest is llama, which has the same keys; use llama"),
        (
            "llama",
            {"model_type": "qwen2_vl", "vision_config": {"a": 1}},
            "does not separate the keys of its text",
        ),
        (
            "llama",
            {"model_type": "mpt", "alibi": True},
            "nearest is llama, which lacks positions encoded as a bias of the scores; alibi",
        ),
        ("gemma", {"use_bidirectional_attention": True}, "True requests attention to later tokens"),
        ("gemma", {"hidden_act": "silu"}, "hidden_act 'silu' .* nearest .* is gelu"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' .* gelu_pytorch_tanh"),
        ("gemma2", {"sliding_window_size": 9}, "sliding_window_size 9 requests two sizes"),
        ("gemma3_text", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping 30.0 .* unknown"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "yarn"}}},
            "rope_parameters .* requests",
        ),
        ("gemma3_text", {"model_type": "gemma3"}, "'gemma3' is unknown; the nearest is gemma"),
        ("llama", {"model_type": "phi"}, "phi requests a single norm .* family is phi3"),
        ("gpt2", {"embd_pdrop": 0.1}, "embd_pdrop 0.1 requests a different dropout"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok 1 requests a single expert"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob False .* nearest .* is true"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method .* nearest .* is greedy"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True .* nearest .* is false"),
    ],
)
def test_what_the_layers_lack_is_refused_by_its_key(
    name: str, keys: dict[str, Any], message: str, models: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((models / name / "config.json").read_text())
    _change(tmp_path, **keys)
    with pytest.raises(ConfigError, match=message) as info:
        load_config(tmp_path)
    assert "\n" not in str(info.value)


# The following tests use recipes that read the model from a folder, and flags that contradict this
# folder.


RECIPE = {
    "num_layers": 99,
    "hidden_size": 999,
    "num_attention_heads": 9,
    "ffn_hidden_size": 9999,
    "max_position_embeddings": 9999,
    "rotary_base": 500,
    "qk_layernorm": True,
    "norm_epsilon": 0.5,
    "attention_dropout": 0.25,
    "seq_length": 16,
    "micro_batch_size": 1,
    "train_iters": 1,
    "lr": 1e-4,
    "variants": {"size": {"large": {"num_query_groups": 3}, "small": {}}},
}


def _read(recipe: dict[str, Any], *changes: str) -> TrainerConfig:
    flags = read_recipe(recipe, [*changes], "recipe.yaml").flags
    return parse(flags, world_size=1, needs_data=False)


def test_a_recipe_takes_its_model_from_the_folder(models: Path) -> None:
    folder = f"load_hf={models / 'llama'}"
    config = _read(RECIPE, folder)
    expected = parse(
        f"--load-hf {models / 'llama'} --mock-data --seq-length 16 --micro-batch-size 1"
        " --train-iters 1 --lr 1e-4".split(),
        world_size=1,
    )
    for group in ("model", "core"):
        values, references = (vars(getattr(settings, group)) for settings in (config, expected))
        changed = {key: value for key, value in values.items() if value != references[key]}
        # The recipe's dropout is a setting of training, so it must be kept.
        assert changed in ({}, {"attention_dropout": 0.25})
    assert config.model.num_layers == 4
    with pytest.raises(ConfigError, match=r"--num-layers 5 contradicts the value 4 .*--load-hf"):
        _read(RECIPE, folder, "num_layers=5")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--hidden-size", 128),
        ("--num-layers", 3),
        ("--ffn-hidden-size", 100),
        ("--num-query-groups", 4),
    ],
)
def test_a_size_that_contradicts_the_folder_is_named(flag: str, value: int, models: Path) -> None:
    run = f"--load-hf {models / 'llama'} --mock-data --micro-batch-size 1 --train-iters 1 --lr 1"
    config = parse([*run.split()], world_size=1)
    there = getattr(config.model, flag[2:].replace("-", "_"))
    with pytest.raises(ConfigError, match=f"{flag} {value} contradicts the value {there}"):
        parse([*run.split(), flag, str(value)], world_size=1)
    parse([*run.split(), flag, str(there)], world_size=1)


@pytest.mark.multiprocess
def test_a_folder_of_other_weights_is_refused_before_a_model_is_built(
    models: Path, tmp_path: Path
) -> None:
    """Checks that a folder with the wrong weights is rejected before a huge model is built."""
    folder = tmp_path / "model"
    shutil.copytree(models / "llama", folder)
    sizes = {"hidden_size": 16384, "num_hidden_layers": 128, "intermediate_size": 65536}
    _change(folder, **sizes, num_attention_heads=128, num_key_value_heads=128, head_dim=128)
    run = f"--load-hf {folder} --mock-data --micro-batch-size 1 --train-iters 1 --lr 1 --bf16"
    log = tmp_path / "log.txt"
    command = [str(PRETRAIN), *run.split(), "--seq-length", "16"]
    assert run_ranks(command, world_size=1, log=log, limit_s=100.0) == 2, tail(log)
    errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "tensors, such as" in errors[0] or "with shape" in errors[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: [1, 2]", r"recipe.yaml: base must be the name of a file, got \[1, 2\]"),
        ("base: 5", "recipe.yaml: base must be the name of a file, got 5"),
        (
            "base: list.yaml",
            r"list.yaml, the base of .*, must contain keys with values, got \[1, 2\]",
        ),
        ("base: two.yaml", "two.yaml, the base of .*, must not have a base itself"),
        ("base: nothing.yaml", "nothing.yaml: No such file"),
        ("- 1", r"recipe.yaml must contain keys with values, got \[1\]"),
    ],
)
def test_a_base_that_is_no_recipe_is_named(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    (tmp_path / "list.yaml").write_text("[1, 2]")
    (tmp_path / "two.yaml").write_text("base: list.yaml")
    assert train([str(tmp_path / "recipe.yaml"), "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


def test_a_dry_run_needs_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    for task in ("pretrain", "finetune", "lora"):
        arguments = [str(RECIPES / "qwen3-0.6b.yaml"), f"task={task}", "gpus=8", "--dry-run"]
        assert train(arguments) == 0
        assert "num_layers: 28" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="there is no training data"):
        parse(read_recipe(load_recipe(RECIPES / "qwen3-0.6b.yaml"), [], "x").flags, world_size=1)
