"""Tests the threads of the NCCL transport between real processes, without a GPU.

In the channels, gloo replaces NCCL. Host streams replace GPU streams, and their work finishes when
a test allows it. ``test_contract.py`` also tests this transport.
"""

from __future__ import annotations

import contextlib
import datetime
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.errors import TransportError
from megatron.adaptive.transport import nccl
from megatron.adaptive.transport.kind import Opening
from megatron.adaptive.transport.nccl import MOST_CTAS, Channels, CudaStreams, NcclKind

from .contract_rank import CPU, LIMIT_S, PairGroup, StoreGather
from .pool import Pool

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]


@pytest.mark.long
def test_a_channel_holds_what_is_under_way(pool: Pool) -> None:
    """Checks that tensors are freed soon after they were sent, even in a long series of sends."""
    excess, _ = pool.run("programs.many_sends", 2, count=3000, ahead=25)
    assert len(excess) >= 15
    assert max(excess) <= 2


def test_a_message_leaves_when_it_is_computed(pool: Pool) -> None:
    """Checks that a message is announced only after it has been computed.

    Otherwise, its receive would occupy the receiver's GPU for longer than necessary.
    """
    sender, receiver = pool.run("programs.late_computation", 2)
    assert sender == ["receive-from-1", "send-to-1"]
    assert receiver == ["receive-from-0", "send-to-0"]


def test_an_arrival_is_announced_when_its_data_is_there(pool: Pool) -> None:
    """Checks that a message is announced only after its data has arrived.

    Its memory must also stay allocated until the stream that uses it has finished.
    """
    assert pool.run("programs.late_data", 2) == [[], ["MainThread"]]


def test_who_takes_nothing_holds_up_nobody_else(pool: Pool) -> None:
    name, text = pool.run("programs.one_takes_nothing", 3)[0]
    assert name == "DeadlineError"
    assert "were not received within 0.3 s by rank 1 (stage 1 on host-1)" in text


def test_a_rank_opens_its_own_channels_alone(pool: Pool) -> None:
    """Checks that a rank is not involved in opening the channels of other ranks."""
    assert pool.run("programs.row", 4) == [2, 4, 4, 2]


def test_a_channel_that_cannot_be_opened_is_an_error_on_all_ranks(pool: Pool) -> None:
    (name, text), *others = pool.run("programs.broken_row", 4)
    assert others == [[name, text]] * 3
    assert name == "TransportError"
    assert re.match("rank [123]: a channel over NCCL cannot be opened: .* with --transport", text)


class PairKind(NcclKind):
    """Opens simulated communicators, which send nothing. The ranks are threads of one process.

    Attributes:
        stuck: Descriptions of the channels that only one end has freed in time.
    """

    def __init__(self) -> None:
        self.stuck: list[str] = []

    def pair_group(self, opening: Opening, store: dist.Store, index: int) -> Any:
        """Returns a communicator of two ranks, which share ``store``. Its abort fails."""
        done = SimpleNamespace(wait=lambda: None)
        group = SimpleNamespace(send=lambda *_: done, recv=lambda *_: done)
        return PairGroup(group, store, index, self.stuck)


def opening_of(rank: int, peers: Sequence[int], gather: Callable[[Any], list[Any]]) -> Any:
    return SimpleNamespace(
        rank=rank,
        peers=peers,
        gather=gather,
        accelerator=Accelerator(device=CPU, backend="gloo", name="CPU"),
        timeout_s=LIMIT_S,
    )


@pytest.mark.parametrize(
    ("num_ranks", "is_ring"), [(2, False), (4, False), (8, False), (3, True), (4, True), (8, True)]
)
def test_ranks_free_channels_in_an_order_in_which_none_waits_for_ever(
    num_ranks: int, is_ring: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that ranks in chains and rings free their communicators without a deadlock.

    Freeing a communicator waits until the rank at the other end frees it as well.
    """
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    kind = PairKind()
    freed = []

    def run(rank: int) -> None:
        neighbours = [rank - 1, rank + 1]
        if is_ring:
            peers = [peer % num_ranks for peer in neighbours]
        else:
            peers = [peer for peer in neighbours if 0 <= peer < num_ranks]
        gather = StoreGather(store, rank, num_ranks, "gather")
        channels = kind._channels(opening_of(rank, peers, gather))
        assert set(channels.outgoing) == set(channels.incoming) == set(peers)
        channels.free(is_idle=True)
        freed.append(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
    assert sorted(freed) == list(range(num_ranks))
    assert kind.stuck == []


def channels_of(groups: Sequence[Any]) -> Channels:
    """Returns the channels from rank 0 to other ranks, with the communicators ``groups``."""
    return Channels(0, {(0, peer): group for peer, group in enumerate(groups, 1)}, CPU)


def test_a_channel_that_is_stuck_does_not_hang_the_exit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nccl, "FREE_S", 0.5)
    never = threading.Event()
    ends = threading.Event()

    def fail() -> None:
        raise RuntimeError("unhandled system error\nin a made-up library")

    groups = [SimpleNamespace(shutdown=end) for end in (never.wait, fail, ends.set)]
    channels_of(groups).free(is_idle=True)
    assert ends.wait(LIMIT_S)
    never.set()
    assert capsys.readouterr().err == (
        "warning: channels over NCCL could not be freed: rank 0 to rank 2: unhandled system error; "
        "rank 0 to rank 1: the other end did not free it within 0.5 s\n"
    )


def test_channels_are_aborted_at_once_and_their_errors_hide_no_other() -> None:
    """Checks that an abort does not wait for another, because each may take minutes."""
    together = threading.Barrier(3)
    seen: list[int] = []

    def abort() -> None:
        seen.append(together.wait(LIMIT_S))
        raise RuntimeError("the communicator cannot be aborted")

    def close() -> None:
        try:
            raise TransportError("the original error")
        finally:
            channels_of([SimpleNamespace(abort=abort)] * 3).free(is_idle=False)

    with pytest.raises(TransportError, match="the original error"):
        close()
    assert sorted(seen) == [0, 1, 2]


def test_a_group_that_cannot_connect_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the group's destructor does not abort it, which may take minutes."""
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", dist.HashStore)
    aborted: list[int] = []

    def fail(*_: Any) -> None:
        raise RuntimeError("unhandled system error")

    kind = NcclKind()
    group = SimpleNamespace(send=fail, recv=fail, abort=lambda: aborted.append(1))
    monkeypatch.setattr(kind, "pair_group", lambda *_: group)
    other = ([0], secrets.token_hex(2))

    def gather(value: Any) -> list[Any]:
        return [value, other if isinstance(value, tuple) else None]

    with pytest.raises(TransportError, match="rank 0: .* opened: unhandled system error; choose"):
        kind._channels(opening_of(0, [1], gather))
    assert aborted == [1]


@pytest.mark.parametrize("has_config", [True, False])
def test_a_channel_uses_few_blocks_of_the_gpu(
    has_config: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the options of a communicator, with and without support for ``max_ctas`` in torch."""
    made: list[Any] = []

    class Nccl:
        def __init__(self, *arguments: Any) -> None:
            made.extend(arguments)

        @staticmethod
        def Options(**options: Any) -> Any:  # noqa: N802
            config = {"config": SimpleNamespace(max_ctas=-1)} if has_config else {}
            return SimpleNamespace(**options, **config)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    store = dist.HashStore()
    NcclKind().pair_group(opening_of(0, [1], list), store, 1)
    assert made[:3] == [store, 1, 2]
    options = made[3]
    assert options.is_high_priority_stream
    assert options._timeout == datetime.timedelta(seconds=nccl.OPEN_S)
    assert not has_config or options.config.max_ctas == MOST_CTAS


class Cuda:
    """Replaces functions of ``torch.cuda``, and records their calls with the current stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self._local = threading.local()
        for name in ("set_device", "Stream", "Event", "stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def set_device(self, device: torch.device) -> None:
        self.calls.append(f"{device} is current")

    def Stream(self, device: torch.device, priority: int) -> str:  # noqa: N802
        return f"stream of {device}, priority {priority}"

    def Event(self, *, blocking: bool) -> Any:  # noqa: N802
        assert blocking, "a waiting thread must sleep"
        return SimpleNamespace(record=lambda stream: self.calls.append(f"event on {stream}"))

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.calls.append(f"enters {stream}")
        former, self._local.stream = self.current_stream(None), stream
        yield
        self._local.stream = former

    def current_stream(self, device: Any) -> str:
        return getattr(self._local, "stream", "the computing stream")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def in_thread(body: Callable[[], None]) -> None:
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()


def test_a_thread_makes_its_gpu_current_before_its_stream(cuda: Cuda) -> None:
    """Checks that a thread selects its GPU first. Otherwise, its stream would be on GPU 0."""
    streams = CudaStreams(torch.device("cuda", 3))

    def body() -> None:
        with streams.private():
            streams.mark()

    in_thread(body)
    stream = "stream of cuda:3, priority -1"
    assert cuda.calls == ["cuda:3 is current", f"enters {stream}", f"event on {stream}"]


def test_a_finished_tensor_is_kept_for_the_stream_that_uses_it(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[str] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: kept.append(stream))
    tensor = torch.ones(1)
    streams = CudaStreams(torch.device("cuda", 0))
    assert streams.use(tensor) is tensor
    streams.mark()
    assert kept == ["the computing stream"]
    assert cuda.calls == ["event on the computing stream"]


@pytest.mark.parametrize("schedule", ["1f1b", "adaptive"])
def test_a_late_tensor_parallel_rank_holds_up_nobody_for_ever(pool: Pool, schedule: str) -> None:
    """Checks that ranks do not deadlock if one of the tensor-parallel ranks is late."""
    first, late, *others = pool.run(
        "late_rank.train", 4, schedule=schedule, steps=6, microbatches=6, seed=1
    )
    # The gradient of a microbatch has three elements, which are initially equal to its index. The
    # all-reduce in each of the two backward passes doubles them.
    assert first == late == [[3.0 * 2 * 2 * number for number in range(6)]] * 6
    assert others == [[[]] * 6] * 2
