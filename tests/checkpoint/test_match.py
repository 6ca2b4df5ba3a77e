"""Tests that a checkpoint of a different model or optimizer is rejected with a reason."""

from __future__ import annotations

import pytest

from megatron.adaptive.checkpoint.folder import Manifest
from megatron.adaptive.checkpoint.match_settings import (
    data_changes,
    require_same_model,
    require_same_optimizer,
)
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import CheckpointError

BASE = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 99"
)


def settings(extra: str = "", *, world_size: int = 1) -> TrainerConfig:
    text = BASE + " " + extra
    for flag, value in (("--num-layers", 4), ("--max-position-embeddings", 16)):
        if flag not in text:
            text += f" {flag} {value}"
    return parse(text.split(), world_size=world_size, last_wins=True)


def manifest(
    config: TrainerConfig, padded_vocab_size: int = 128, optimizer: bool = True
) -> Manifest:
    return {
        "progress": {},
        "config": config.to_dict(),
        "shape": {},
        "padded_vocab_size": padded_vocab_size,
        "has_optimizer": optimizer,
        "has_rng": True,
    }


def test_every_shape_of_one_model_fits() -> None:
    saved = manifest(settings("--tensor-model-parallel-size 2", world_size=2), 256)
    present = settings("--pipeline-model-parallel-size 2 --partition 0-4 --bf16", world_size=2)
    require_same_model(saved, present, 128, "x")


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        ("--swiglu --ffn-hidden-size 128", "", "--swiglu is given in the checkpoint, but not"),
        ("", "--disable-bias-linear", "--disable-bias-linear is not given in the checkpoint, but"),
        ("--position-embedding-type rope", "", "--position-embedding-type is rope in"),
        ("--max-position-embeddings 32", "", "--max-position-embeddings is 32 in"),
        ("--untie-embeddings-and-output-weights", "", "--untie-embeddings-and-output-weights is"),
        ("--group-query-attention --num-query-groups 2", "", "--num-query-groups is 2 in the"),
        ("--norm-epsilon 1e-6", "", "--norm-epsilon is 1e-06 in the checkpoint, but 1e-05 here"),
    ],
)
def test_another_model_is_refused_with_what_differs(before: str, now: str, text: str) -> None:
    with pytest.raises(CheckpointError, match="to a different model") as caught:
        require_same_model(manifest(settings(before)), settings(now), 128, "--load x")
    assert text in str(caught.value)
    assert str(caught.value).count(" in the checkpoint") == 1


def test_settings_without_effect_may_differ() -> None:
    saved = manifest(settings("--rotary-base 5000"))
    require_same_model(saved, settings(), 128, "x")
    rope = "--position-embedding-type rope"
    saved = manifest(settings(f"{rope} --max-position-embeddings 32"))
    require_same_model(saved, settings(rope), 128, "x")


def test_fine_tuning_may_change_what_weights_mean_but_not_their_shape() -> None:
    rope = "--position-embedding-type rope"
    saved = manifest(settings(f"{rope} --rotary-base 5000"))
    require_same_model(saved, settings(f"{rope} --finetune"), 128, "x")
    with pytest.raises(CheckpointError, match="--rotary-base is 5000"):
        require_same_model(saved, settings(rope), 128, "x")
    saved = manifest(settings("--num-layers 2 --qk-layernorm"))
    text = "--num-layers is 2 in the checkpoint, but 4 here; --qk-layernorm"
    with pytest.raises(CheckpointError, match=text):
        require_same_model(saved, settings("--finetune"), 128, "x")


@pytest.mark.parametrize(("rows", "fits"), [(128, True), (256, True), (384, False), (512, False)])
def test_padding_may_change_the_rows_of_the_embedding_but_no_more(rows: int, fits: bool) -> None:
    """Checks that different rows of the embedding are accepted if only the padding differs."""
    saved = manifest(settings("--tensor-model-parallel-size 2", world_size=2), rows)
    if rows == 128:
        saved = manifest(settings(), rows)
    if fits:
        require_same_model(saved, settings(), 128, "x")
        return
    with pytest.raises(CheckpointError, match=f"padded vocabulary has {rows}"):
        require_same_model(saved, settings(), 128, "x")


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        ("--optimizer sgd", "", "--optimizer is sgd in the checkpoint, but adam here"),
        ("--bf16", "", "type of parameters is bfloat16 in the checkpoint, but float32 here"),
        ("", "--use-distributed-optimizer", "--use-distributed-optimizer is not given in the"),
        ("--decoupled-lr 1e-2", "", "--decoupled-lr is given in the checkpoint, but not"),
    ],
)
def test_another_optimizer_is_refused_by_name(before: str, now: str, text: str) -> None:
    with pytest.raises(CheckpointError, match="--no-load-optim or --finetune") as caught:
        require_same_optimizer(manifest(settings(before)), settings(now), "--load x")
    assert text in str(caught.value)


def test_a_checkpoint_without_optimizer_is_refused_where_one_is_needed() -> None:
    with pytest.raises(CheckpointError, match="contains no optimizer state"):
        require_same_optimizer(manifest(settings(), optimizer=False), settings(), "x")
    require_same_optimizer(manifest(settings()), settings(), "x")


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        ("", "", ""),
        ("", "--split 9,1,0", "--split is 969,30,1 in the checkpoint, but 9,1,0 here"),
        ("", "--seed 7", "--seed is 1234 in the checkpoint, but 7 here"),
        ("--seq-length 8", "", "--seq-length is 8 in the checkpoint, but 16 here"),
        ("", "--train-iters 20 --eval-iters 1", ""),
    ],
)
def test_another_order_of_the_data_is_named(before: str, now: str, text: str) -> None:
    changes = data_changes(manifest(settings(before)), settings(now), None, "x")
    assert changes == [text] * bool(text)


def test_settings_of_another_version_are_refused() -> None:
    saved = manifest(settings())
    values = {group: dict(content) for group, content in saved["config"].items()}
    values["model"]["new_setting"] = 1
    other = {**saved, "config": values}
    with pytest.raises(
        CheckpointError, match="x: saved settings contain the unknown model setting"
    ):
        require_same_model(other, settings(), 128, "x")
