"""How a rank of a job ends."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch.distributed as dist

from megatron.adaptive.config.environment import Environment
from megatron.adaptive.errors import PeerLostError
from megatron.adaptive.training import pretrain as module

GLOO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error"
    " [10.57.0.4]:24756: Connection reset by peer. This is typically caused by a remote worker"
    " hanging or bugs in the application. Check the logs of the application"
)
WAITED = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out"
    " waiting 60000ms for recv operation to complete"
)


class Watching:
    """What a watcher that knows, or does not, of a lost rank looks like to a rank that fails."""

    def __init__(self, lost: PeerLostError | None) -> None:
        self.lost = lost
        self.reported: list[tuple[str, bool]] = []

    def verdict(self, within_s: float) -> PeerLostError | None:
        return self.lost

    def report(self, text: str, *, known: bool) -> None:
        self.reported.append((text, known))


class Store:
    """The store of a job of which no rank has told of an error; the others part in the end."""

    def __init__(self) -> None:
        self.looks = 0

    def add(self, key: str, count: int) -> int:
        self.looks += key == "parted" and not count
        return count if key == "error" else self.looks // 3


def wrapped() -> Exception:
    """A broken connection as megatron-core's builder of datasets hands it on."""
    error = Exception("the dataset failed to build")
    error.__cause__ = RuntimeError(GLOO)
    return error


RANK_3 = Environment(rank=3, local_rank=3, world_size=4)
LOST = PeerLostError("rank 1 is lost")
BROKEN = "error: rank 3 lost its connection with another rank ("


@pytest.mark.parametrize(
    ("error", "lost", "told"),
    [
        (RuntimeError("Connection closed"), LOST, ""),
        (wrapped(), LOST, ""),
        (wrapped(), None, BROKEN + "Read error [10.57.0.4]:24756: Connection reset by peer), "),
        (RuntimeError(WAITED), None, BROKEN + "Timed out waiting 60000ms for recv "),
        (dist.DistNetworkError("Failed to recv\n#0"), None, BROKEN + "Failed to recv), "),
        (OSError(28, "No space left on device"), None, "error: rank 3 cannot write: No"),
        (RuntimeError("shape mismatch"), None, "RuntimeError: shape mismatch"),
        (ValueError("a bug"), LOST, "ValueError: a bug"),
    ],
)
def test_only_a_bug_leaves_a_traceback(
    error: Exception,
    lost: PeerLostError | None,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A rank that was lost looked like a bug where datasets were built, or the network was cut."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    watcher: Any = Watching(lost)
    store: Any = Store()
    with pytest.raises(SystemExit) as ended:
        module._fail(module._expected(error, 3), store, watcher, RANK_3)
    said = capsys.readouterr().err
    is_bug = told.startswith(type(error).__name__)
    assert ended.value.code == (1 if is_bug else 2)
    assert told in said
    if not is_bug:
        assert said.count("\n") == bool(told)
    assert [one for _, one in watcher.reported] == [not is_bug]


@pytest.mark.parametrize(("lost", "looks"), [(None, 9), (LOST, 0)])
def test_the_first_rank_keeps_the_store_until_others_have_read_why(
    lost: PeerLostError | None, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others, which had met the same error, told it again and that the store was gone."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    watcher: Any = Watching(lost)
    store: Any = Store()
    first = Environment(rank=0, local_rank=0, world_size=4)
    with pytest.raises(SystemExit):
        module._fail(PeerLostError("a connection broke"), store, watcher, first)
    assert store.looks == looks
