"""Tests how environment variables of launchers are read."""

from __future__ import annotations

import shlex

import pytest

from megatron.adaptive.config.environment import (
    Environment,
    Installed,
    is_secret,
    masked,
    masked_text,
)
from megatron.adaptive.errors import ConfigError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "OMP_NUM_THREADS": "3",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}


def test_single_variables() -> None:
    """Checks variables one by one. If a value is a list, only its first item is used."""
    for value, interface in (("eth1", "eth1"), (" ib0 ,ib1", "ib0"), ("", None), (",", None)):
        assert Environment.read({"GLOO_SOCKET_IFNAME": value}).socket_interface == interface
    for value in ("True", "False", ""):
        environment = Environment.read({"TORCHELASTIC_USE_AGENT_STORE": value})
        assert environment.has_agent_store == (value == "True")
    assert Environment.read({"OMP_NUM_THREADS": "4,2"}).omp_num_threads == 4


def test_the_variables_of_torchrun_are_read() -> None:
    assert Environment.read(TORCHRUN) == Environment(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        node_rank=1,
        master_addr="node0",
        master_port=29500,
        run_id="job",
        restart_count=2,
        omp_num_threads=3,
        cuda_device_max_connections=1,
        is_launched=True,
        meeting_s=48.0,
    )


def test_without_a_launcher_a_process_is_rank_0_of_1() -> None:
    alone = Environment.read({})
    assert (alone.rank, alone.world_size, alone.local_rank, alone.local_world_size) == (0, 1, 0, 1)
    assert alone.master_port is None
    assert not alone.is_launched


def test_a_launcher_without_local_ids_counts_as_one_node() -> None:
    process = Environment.read({"RANK": "2", "WORLD_SIZE": "4"})
    assert (process.local_rank, process.local_world_size) == (2, 4)


def test_the_process_itself_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert Environment.read().rank == 5


@pytest.mark.parametrize(
    ("change", "phrases"),
    [
        ({"RANK": "5,7"}, ("RANK", "'5,7'", "integer")),
        ({"RANK": "five"}, ("RANK", "'five'", "integer")),
        ({"WORLD_SIZE": "0"}, ("WORLD_SIZE", "0", "from 1 to 1000000")),
        ({"RANK": "-1"}, ("RANK", "-1", "at least 0")),
        ({"RANK": "8"}, ("RANK", "8", "below WORLD_SIZE = 8")),
        ({"LOCAL_RANK": "4"}, ("LOCAL_RANK", "below LOCAL_WORLD_SIZE = 4")),
        ({"MASTER_PORT": "70000"}, ("MASTER_PORT", "70000", "from 1 to 65535")),
        ({"OMP_NUM_THREADS": "many"}, ("OMP_NUM_THREADS", "'many'")),
        ({"WORLD_SIZE": ""}, ("RANK", "WORLD_SIZE is not")),
    ],
)
def test_a_bad_variable_is_named_with_its_rule(
    change: dict[str, str], phrases: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        Environment.read(TORCHRUN | change)
    text = str(caught.value)
    assert "\n" not in text
    for word in phrases:
        assert word in text


def test_packages_are_looked_up_without_being_imported() -> None:
    assert isinstance(Installed.detect().transformer_engine, bool)


def test_a_secret_is_known_by_a_word_of_its_name() -> None:
    secret = "HF_TOKEN WANDB_API_KEY DB_PASSWORD AWS_SECRET_ACCESS_KEY GOOGLE_CREDENTIALS hf_token"
    others = "KEYBOARD TOKENIZERS_PARALLELISM HF_HOME MONKEY NCCL_DEBUG SECRETARY PWD"
    assert [name for name in secret.split() if not is_secret(name)] == []
    assert [name for name in others.split() if is_secret(name)] == []


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("--wandb-key abc --lr 1", "--wandb-key *** --lr 1"),
        ("--wandb-key=abc", "--wandb-key=***"),
        # The next word is a flag, so --api-token has no value that must be hidden.
        ("--api-token --lr 1", "--api-token --lr 1"),
        ("--linear-key-head-dim 64 --moe-token-dispatcher-type alltoall", None),
        ("--calculate-per-token-loss 1 --json-keys text", None),
        ("--export=ALL,HF_TOKEN=abc,X=1", "--export=ALL,HF_TOKEN=***,X=1"),
        ("--data-path https://me:abc@host/x", "--data-path https://***@host/x"),
        ("git+ssh://abc@host /a@b c://d", "git+ssh://***@host /a@b c://d"),
        ("--lr 1 'a  b'", None),
    ],
)
def test_secrets_of_a_command_line_are_hidden(command: str, shown: str | None) -> None:
    text = masked_text(command)
    assert text.replace("'", "") == (command if shown is None else shown).replace("'", "")
    assert masked(shlex.split(command)) == shlex.split(text)
