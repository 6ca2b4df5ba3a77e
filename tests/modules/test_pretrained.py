"""Tests ``Pipeline.from_pretrained`` and ``save_pretrained``, partly with two ranks."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.adaptive.errors import AdaptiveError, ConfigError
from megatron.adaptive.modules import Pipeline

from ..multiprocess.launch import TRANSFORMERS, run_ranks, tail
from .models import Tower

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")

WORKER = Path(__file__).with_name("pretrained_worker.py")
RANKS, LIMIT_S = 2, 300.0
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
BATCH = {"input_ids": torch.ones(2, 8, dtype=torch.int64)}
BATCH["labels"] = BATCH["input_ids"]


def save_models(folder: Path) -> None:
    """Saves a model with tied weights in several files, and a model with experts, to ``folder``."""
    torch.manual_seed(0)
    tied = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(tied).save_pretrained(folder / "tied", max_shard_size="40KB")
    experts = transformers.MixtralConfig(**SMALL, num_local_experts=4)
    transformers.MixtralForCausalLM(experts).save_pretrained(folder / "experts")
    for name in ("tied", "experts"):
        (folder / name / "tokenizer_config.json").write_text("{}")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder that contains the models of :func:`save_models`."""
    folder = tmp_path_factory.mktemp("pretrained")
    save_models(folder)
    return folder


@pytest.mark.long
@pytest.mark.multiprocess
def test_on_two_processes(folders: Path) -> None:
    programs = ["tied_weights_and_split_backwards", "merged_experts"]
    programs.append("adapters_beside_frozen_weights")
    programs += ["evaluation_is_recorded_when_it_is_used"]
    programs += ["two_sizes_are_measured_at_the_same_time"]
    programs += ["evaluation_with_other_parameters_is_recorded_at_the_start"]
    if parameters := int(os.environ.get("LARGE_MODEL_PARAMETERS", "0")):
        sizes = {**SMALL, "hidden_size": 1024, "intermediate_size": 2816}
        layers = max(4, parameters // 12_900_000)
        config = transformers.LlamaConfig(**{**sizes, "num_hidden_layers": layers})
        transformers.LlamaForCausalLM(config).save_pretrained(folders / "large")
        programs = ["memory_of_own_part_only", *programs]
    log = folders / "output.txt"
    run_ranks(
        [str(WORKER), str(folders), *programs],
        world_size=RANKS,
        log=log,
        limit_s=LIMIT_S,
        # If the memory of ranks is measured, each rank must import its modules itself, and must not
        # be forked from a server.
        modules=() if parameters else TRANSFORMERS,
    )
    for rank in range(RANKS):
        result = json.loads((folders / f"{rank}.json").read_text())
        assert result["done"] == programs, result["error"] or tail(log)


def change_config(**changes: Any) -> Callable[[Path], None]:
    """Returns a function that sets the keys ``changes`` in the ``config.json`` of a folder."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Returns a function that applies ``change`` to the tensors in a folder's only weights file."""

    def rewrite(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = safetensors.load_file(path)
        change(tensors)
        safetensors.save_file(tensors, path)

    return rewrite


NORM = "model.norm.weight"
CODE = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}


@pytest.mark.parametrize(
    ("name", "damage", "expected_texts"),
    [
        ("tied", lambda folder: (folder / "config.json").unlink(), ["config.json"]),
        (
            "tied",
            lambda folder: next(folder.glob("model-00002*")).unlink(),
            ["model-00002-of-", "missing"],
        ),
        (
            "experts",
            change_tensors(lambda tensors: tensors.pop(NORM)),
            ["lacks tensors that MixtralForCausalLM requires", NORM],
        ),
        (
            "experts",
            change_tensors(lambda tensors: tensors.update(extra=torch.ones(2))),
            ["contains extra", "does not use"],
        ),
        (
            "experts",
            change_tensors(lambda tensors: tensors.update({NORM: torch.ones(8)})),
            [NORM, "[8]", "[32]"],
        ),
        (
            "experts",
            change_config(quantization_config={"quant_method": "gptq"}),
            ["quantized", "quantization_config"],
        ),
        ("experts", change_config(model_type="own", auto_map=CODE), ["'own'", "trust_remote_code"]),
        ("experts", change_config(model_type="own"), ["'own'", "newer version"]),
        ("experts", change_config(architectures=["OwnModel"]), ["OwnModel", "architectures"]),
    ],
)
def test_a_folder_that_is_wrong_is_named_in_one_line(
    folders: Path,
    tmp_path: Path,
    name: str,
    damage: Callable[[Path], None],
    expected_texts: list[str],
) -> None:
    folder = tmp_path / name
    shutil.copytree(folders / name, folder)
    damage(folder)
    with pytest.raises(AdaptiveError) as caught:
        Pipeline.from_pretrained(folder, BATCH, micro_batch_size=1)
    assert "\n" not in str(caught.value)
    for text in (str(folder), *expected_texts):
        assert text in str(caught.value)


def test_weights_come_from_the_folder_alone(folders: Path) -> None:
    with pytest.raises(ConfigError, match="initialize cannot be used with from_pretrained"):
        Pipeline.from_pretrained(folders / "tied", BATCH, initialize=print)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="dtype must be .* got 'bf16'"):
        Pipeline.from_pretrained(folders / "tied", BATCH, dtype="bf16")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("adapter", "expected_texts"),
    [
        ({"target_modules": ["nowhere"]}, ["nowhere"]),
        ({"target_modules": "all-linear", "use_dora": True}, ["use_dora"]),
        ({"target_modules": "all-linear", "init_lora_weights": "pissa"}, ["'pissa'"]),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [1]}, ["indices=[1]"]),
        ({"target_modules": ["q_proj"], "alora_invocation_tokens": [3]}, ["tokens=[3]"]),
        ({"target_modules": ["q_proj"], "layer_replication": [(0, 2)]}, ["layer_replication"]),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    folders: Path, adapter: dict[str, Any], expected_texts: list[str]
) -> None:
    with pytest.raises(AdaptiveError) as caught:
        Pipeline.from_pretrained(
            folders / "tied", BATCH, micro_batch_size=1, adapter=peft.LoraConfig(**adapter)
        )
    assert "\n" not in str(caught.value)
    for text in ("adapter", *expected_texts):
        assert text in str(caught.value)


def test_a_copy_of_a_tied_weight_is_trained_beside_adapters(folders: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    kind = transformers.AutoModelForCausalLM
    with Pipeline.from_pretrained(
        folders / "tied", BATCH, micro_batch_size=2, adapter=config
    ) as pipeline:
        saved = pipeline.save_pretrained(tmp_path / "before")
        model = peft.PeftModel.from_pretrained(kind.from_pretrained(folders / "tied"), str(saved))
        model.eval()
        with torch.no_grad():
            assert pipeline.eval(BATCH) == pytest.approx(float(model(**BATCH).loss), rel=1e-5)


def test_after_an_error_of_other_code_another_pipeline_can_be_made(folders: Path) -> None:
    def fail(tensors: object) -> None:
        raise RuntimeError("mine")

    config = transformers.LlamaConfig(**SMALL)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    with pytest.raises(RuntimeError, match="mine"):
        Pipeline(model, BATCH, micro_batch_size=1, initialize=fail)
    Pipeline.from_pretrained(folders / "tied", BATCH, micro_batch_size=1).close()


def test_one_process_saves_one_file_to_a_new_folder(folders: Path, tmp_path: Path) -> None:
    output = tmp_path / "saved"
    with Pipeline.from_pretrained(
        folders / "experts", BATCH, micro_batch_size=1, dtype=torch.bfloat16
    ) as pipeline:
        pipeline.save_pretrained(output)
        assert sorted(path.name for path in output.iterdir()) == [
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer_config.json",
        ]
        with pytest.raises(
            AdaptiveError, match="saved exists and is not empty; choose a new folder"
        ):
            pipeline.save_pretrained(output)
        with pytest.raises(
            ConfigError, match="shard_bytes must be an integer of at least 1, got None"
        ):
            pipeline.save_pretrained(tmp_path / "other", shard_bytes=None)  # type: ignore[arg-type]
    original = safetensors.load_file(folders / "experts" / "model.safetensors")
    saved = safetensors.load_file(output / "model.safetensors")
    assert saved.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(saved[name], tensor.bfloat16())


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        (["q_proj", "v_proj"], {"q_proj", "v_proj"}),
        (r".*\.layers\.[01]\.mlp\.\w+_proj", {"gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_a_model_that_peft_has_wrapped_trains_its_adapters(
    folders: Path, tmp_path: Path, targets: Any, modules: set[str]
) -> None:
    base = transformers.AutoModelForCausalLM.from_pretrained(folders / "tied")
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=targets))
    with Pipeline(model, BATCH, micro_batch_size=1, arguments={"use_cache": False}) as pipeline:
        pipeline.set_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.01))
        first, _ = pipeline.step(BATCH)
        assert pipeline.step(BATCH)[0] < first
        pipeline.save_pretrained(tmp_path / "adapters")
    names = safetensors.load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in names} == modules


def test_only_models_of_transformers_are_saved(tmp_path: Path) -> None:
    with (
        Pipeline(Tower(), {"x": torch.ones(2, 16)}, micro_batch_size=1) as pipeline,
        pytest.raises(AdaptiveError, match="requires a model of the transformers .*got a Tower"),
    ):
        pipeline.save_pretrained(tmp_path / "tower")
    pipeline.close()
