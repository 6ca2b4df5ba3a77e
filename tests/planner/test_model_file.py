"""Tests the sizes of models that are read from names, arguments or files, and errors about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.adaptive.config.command_parser import flags_in
from megatron.adaptive.config.model import MODELS
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.layer_costs import make_estimator
from megatron.adaptive.planner.model_file import arguments_model, preset, preset_names, read_model

SMALL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
SMALL += "--max-position-embeddings 32 --vocab-size 1000"


@pytest.mark.parametrize(
    ("name", "billions", "layers"),
    [
        ("gpt2-xl", 1.558, 48),
        ("gpt3-175b", 174.6, 96),
        ("llama2-70b", 68.98, 80),
        ("llama3-8b", 8.03, 32),
        ("bert-large", 0.335, 24),
        ("t5-3b", 2.853, 48),
    ],
)
def test_sizes_are_those_that_are_published(name: str, billions: float, layers: int) -> None:
    model = preset(name)
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.002)
    assert model.num_counted == layers


def test_every_preset_can_be_made() -> None:
    for name in preset_names():
        assert preset(name, "fp16").precision.element_bytes == 2
    assert preset("gpt2", "fp32").parameters == preset("gpt2", "bf16").parameters
    # 25 is possible because the number of attention heads is divisible by 25.
    assert preset("gpt2-xl").max_tp == 25


def test_activations_are_those_of_the_literature() -> None:
    """Checks that sizes of stored activations match the formulas of Korthikanti et al. (2022)."""
    model = preset("gpt3-175b", "fp16", attention="unfused")
    length, hidden, heads = 2048, 12288, 96
    layer = model.kinds["transformer"]
    # Equation 1 of the paper says that a layer stores s b h (34 + 5 a s / h) bytes.
    whole = length * hidden * (34 + 5 * heads * length / hidden)
    assert layer.kept_bytes(1) == pytest.approx(whole)
    # Equation 2 says that a layer with tensor parallelism stores s b h (10 + 24/t + 5 a s / (h t))
    # bytes.
    split = length * hidden * (10 + 24 / 8 + 5 * heads * length / (8 * hidden))
    assert layer.kept_bytes(8) == pytest.approx(split)
    assert layer.kept_bytes(8, "selective") == pytest.approx(length * hidden * (10 + 24 / 8))
    assert layer.kept_bytes(8, "full") == pytest.approx(2 * length * hidden)
    # Equation 4 says that a layer without attention scores stores s b h 34/t bytes, because
    # sequence parallelism divides all activations.
    split = layer.kept_bytes(8, "selective", sequence_parallel=True)
    assert split == pytest.approx(length * hidden * 34 / 8)
    assert layer.kept_bytes(8, "full", sequence_parallel=True) == 2 * length * hidden / 8


def test_t5_is_cut_between_encoder_and_decoder_and_hands_the_memory_on() -> None:
    model = preset("t5-large")
    cut = model.layers.index("decoder_embedding")
    assert model.splits == {cut}
    assert {model.layer(index).group for index in range(cut)} == {"encoder"}
    encoder, decoder = model.kinds["encoder"], model.kinds["decoder"]
    assert decoder.output_elements > encoder.output_elements
    assert decoder.parameters > encoder.parameters
    assert model.tied_layers == (0, cut, model.num_layers - 1)


def test_fused_attention_counts_for_every_form_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "words").write_text(SMALL)
    for text in (SMALL, str(tmp_path / "words"), "gpt2"):
        layers = [
            read_model(text, attention=kernel).kinds["transformer"]
            for kernel in ("fused", "unfused")
        ]
        assert layers[0].attention_bytes == 0 < layers[1].attention_bytes


SEVEN_B = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --swiglu "
    "--max-position-embeddings 4096 --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 32000"
)


def test_kernels_of_the_trainers_own_layers_keep_no_scores() -> None:
    """Checks that attention kernels store no scores, which would take most of the memory."""
    unfused, kernel, fused = (
        arguments_model(SEVEN_B.split(), "7B", "bf16", attention=kind)
        for kind in ("unfused", "kernel", "fused")
    )
    assert [model.attention for model in (unfused, kernel, fused)] == ["unfused", "kernel", "fused"]
    held = [8 * 4 * model.kinds["transformer"].kept_bytes(1) for model in (unfused, kernel, fused)]
    pairs = 32 * 4096**2
    # A kernel stores one number per row of scores. Without a kernel, a layer stores the
    # probabilities, their values after dropout, and the dropout mask.
    assert held[0] - held[1] == 8 * 4 * (pairs * (2 + 2 + 1) - 32 * 4096 * 4)
    assert 103e9 < held[0] < 105e9
    assert held[1] == held[2] < 19e9
    assert (
        kernel.kinds["transformer"].workspace_bytes < unfused.kinds["transformer"].workspace_bytes
    )


@pytest.mark.parametrize(
    ("flags", "attention"),
    [
        ("", "kernel"),
        ("--attention-dropout 0 --window-size 128,0", "kernel"),
        ("--attention-softcap 50", "unfused"),
        ("--attention-softcap 50 --transformer-impl transformer_engine", "unfused"),
        ("--softmax-type learnable", "unfused"),
        ("--attention-backend unfused --transformer-impl local", "unfused"),
        ("--attention-backend unfused --transformer-impl transformer_engine", "unfused"),
        ("--attention-backend auto --transformer-impl local", "kernel"),
        ("--transformer-impl transformer_engine", "fused"),
    ],
)
def test_scores_are_counted_where_no_kernel_takes_them(flags: str, attention: str) -> None:
    arguments = [*SEVEN_B.split(), *flags.split()]
    assert arguments_model(arguments, "7B", "bf16", attention="kernel").attention == attention


def test_heads_of_odd_width_have_a_kernel_in_half_precision_alone() -> None:
    arguments = [*SEVEN_B.split(), "--kv-channels", "20"]
    kernels = {
        name: arguments_model(arguments, "odd", name, attention="kernel").attention
        for name in ("fp32", "bf16")
    }
    assert kernels == {"fp32": "unfused", "bf16": "kernel"}


def test_a_cpu_has_a_kernel_where_it_is_asked_for() -> None:
    arguments = [*SEVEN_B.split(), *"--attention-backend fused --transformer-impl local".split()]
    assert arguments_model(arguments, "7B", attention="unfused").attention == "unfused"
    arguments += ["--attention-dropout", "0"]
    assert arguments_model(arguments, "7B", attention="unfused").attention == "kernel"


def test_an_argument_list_says_model_and_precision_and_nothing_else() -> None:
    run = f"{SMALL} --tensor-model-parallel-size 8 --bf16 --micro-batch-size 3 --save /nowhere"
    model = arguments_model(run.split(), "mine")
    assert model.precision.name == "bf16"
    assert model.num_counted == 4
    assert model.arguments == (*SMALL.split(), "--bf16")
    assert arguments_model(SMALL.split(), "mine").precision.name == "fp32"
    assert arguments_model(run.split(), "mine", "fp16").precision.name == "fp16"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpt2-xxl", "unknown model 'gpt2-xxl'; the nearest is gpt2-xl"),
        (f"{SMALL} --context-parallel-size 2", "the plan sets --context-parallel-size 2;"),
        (f"{SMALL} --slice-tokens 2048", "the plan sets --slice-tokens 2048;"),
        ("--num-layers '4", "No closing quotation"),
        ("nowhere.yaml", "No such file or directory; pass a model file"),
    ],
)
def test_a_bad_model_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model(text)


@pytest.mark.parametrize("text", ["gpt2", "preset.yaml", "arguments.yaml", MODELS["gpt2"]])
@pytest.mark.parametrize(("sequence", "positions"), [(4096, 4096), (256, 1024)])
def test_another_length_of_samples(
    text: str, sequence: int, positions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("preset.yaml").write_text("format: 1\npreset: gpt2\n")
    Path("arguments.yaml").write_text(f"format: 1\narguments: {MODELS['gpt2']}\n")
    usual, model = read_model(text), read_model(text, sequence=sequence)
    assert (usual.sequence, model.sequence) == (1024, sequence)
    assert model.tokens_per_sample == sequence
    assert model.parameters - usual.parameters == (positions - 1024) * 768
    values = flags_in(model.arguments)
    assert values["--seq-length"] == [str(sequence)]
    assert values["--max-position-embeddings"] == [str(positions)]


def test_arguments_without_a_length_take_the_flag() -> None:
    text = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 1000"
    assert read_model(text, sequence=32).kinds == read_model(SMALL).kinds
    with pytest.raises(ConfigError, match="--num-attention-heads"):
        read_model("--num-layers 4 --hidden-size 64", sequence=32)


def test_a_length_that_cannot_change_is_named() -> None:
    assert read_model("bert-base", sequence=512).sequence == 512
    with pytest.raises(ConfigError, match="bert-base, whose samples have 512 tokens; remove"):
        read_model("bert-base", sequence=1024)


def test_the_forms_of_a_model_file_mean_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"format: 1\nname: m\narguments: {SMALL} --bf16\n")
    (tmp_path / "b.toml").write_text(
        'format = 1\nname = "m"\nprecision = "bf16"\n[shape]\nlayers = 4\nhidden = 64\n'
        "heads = 4\nsequence = 32\nvocabulary = 1024\n"
    )
    first, second = (
        read_model(str(tmp_path / "a.yaml"), attention="unfused"),
        read_model(str(tmp_path / "b.toml")),
    )
    assert first.kinds == second.kinds
    assert first.layers == second.layers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("format: 1\n", "must have one of preset, arguments, shape, layers"),
        ("format: 1\npreset: gpt2\nlayers: []\n", "layers must have at least one entry, got 0"),
        ("format: 1\npreset: gpt2\npreset: gpt3\n", "line 3: 'preset' is given twice"),
        ("format: 1\nshape: {layers: 2}\n", "shape.hidden is missing"),
        ("format: 1\nlayers: [{kind: a, parameters: -1}]\n", "parameters must be .* got -1"),
        ("format: [1\n", "not valid YAML"),
        (
            "format: 1\nlayers: [{kind: a, parameters: 10, frozen_parameters: 11}]\n",
            r"layers\[0\].frozen_parameters must be at most .* parameters, 10, got 11",
        ),
        (
            "format: 1\nlayers: [{kind: a, count: 2}]\nfrozen_layers: 2\n",
            "frozen_layers must be less than the number of layers, 2, got 2",
        ),
    ],
)
def test_a_bad_model_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as info:
        read_model(str(path))
    assert "\n" not in str(info.value)


def test_a_frozen_model_keeps_gradients_of_adapters_alone() -> None:
    arguments = [*MODELS["llama3-8b"].split(), "--bf16", "--vocab-size", "128256"]
    whole = arguments_model(arguments, "whole", attention="fused")
    lora = arguments_model([*arguments, "--lora-rank", "16"], "lora", attention="fused")
    assert lora.parameters == whole.parameters
    # This is the number of parameters that PEFT reports for target_modules="all-linear".
    assert lora.precision.trained * lora.parameters == pytest.approx(41_943_040)
    assert lora.precision.optimizer_bytes < 0.01 * whole.precision.optimizer_bytes
    assert lora.precision.gradient_bytes < 0.01 * whole.precision.gradient_bytes
    assert lora.precision.parameter_bytes == pytest.approx(2 * (1 + lora.precision.trained))
    times = [make_estimator(model)("transformer", "H100", 1, 1.0) for model in (whole, lora)]
    assert times[1].backward_weight_s < 0.05 * times[0].backward_weight_s
    assert times[1].backward_input_s == pytest.approx(times[0].backward_input_s, rel=0.01)
    few = [*arguments, "--lora-rank", "16", "--lora-targets", "q_proj,v_proj"]
    assert arguments_model(few, "few").precision.trained * lora.parameters == pytest.approx(
        32 * 16 * (2 * 4096 + 4096 + 1024)
    )
