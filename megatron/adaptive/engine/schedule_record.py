"""The orders that a run took, in one file, and a policy that takes them again.

A run-time rule looks at what has arrived, so that two runs seldom take the same order. A record
makes an order repeatable: to look for a fault, to compare, to profile. Numbers do not depend on it:
each stage takes its forwards, its backwards and its weight gradients in ascending order of the
microbatches, whatever it takes in between. That is why one replica's orders are enough, though
under a run-time rule every data-parallel replica has its own: replayed by all of them, they give
the same losses and gradients bit by bit.

Only training steps are recorded; an evaluation has one order. The file is JSON; ``orders`` are
codes as of ``schedule.policy.codes_of``, each listed once, and a step names one per rank::

    {"format": "megatron-adaptive schedule", "version": 1,
     "shape": {"ranks": 2, "chunks": 1, "placement": "loop", "weight_pieces": 0, "replicas": 0},
     "orders": [[0, 0, 1, 1], [0, 1, 0, 1]],
     "steps": {"1": [0, 1], "2": [0, 1]}}

Where microbatches are dealt to replicas, sums depend on who got which. Then a step names an order
for each rank of each replica, and ``dealt`` the microbatches of each replica::

     "dealt": {"1": [[0, 3], [1, 2]]}
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron.adaptive.config.input_files import read_json
from megatron.adaptive.errors import ConfigError, TraceError
from megatron.adaptive.schedule.policy import Follow, actions_of
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.trace.files import Outage, replaced
from megatron.adaptive.trace.read import describe_numbers

_FORMAT = "megatron-adaptive schedule"
_VERSION = 1
_HINT = "name a file that --record-schedule wrote"

Codes = tuple[int, ...]
Shares = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class RecordShape:
    """Describes what two runs must share for one to take the other's orders.

    Microbatches are not among it: they may grow from step to step, and an order gives their number.

    Attributes:
        ranks: pipeline-parallel ranks.
        chunks: chunks per rank.
        placement: kind of placement.
        weight_pieces: parts of each weight gradient, 0 for whole backwards.
        replicas: that microbatches are dealt to, 0 where they have them in turns.
    """

    ranks: int
    chunks: int
    placement: str
    weight_pieces: int
    replicas: int = 0

    @property
    def num_orders(self) -> int:
        """Orders of a step."""
        return self.ranks * max(1, self.replicas)

    @staticmethod
    def of(placement: Placement, weight_pieces: int, replicas: int = 0) -> RecordShape:
        """Return the shape of a run."""
        return RecordShape(
            ranks=placement.num_ranks,
            chunks=placement.num_chunks,
            placement=placement.kind,
            weight_pieces=weight_pieces,
            replicas=replicas,
        )


_REMEDIES = {
    "ranks": "--pipeline-model-parallel-size",
    "chunks": "--num-virtual-stages-per-pipeline-rank",
    "placement": "--pipeline-placement",
    "weight_pieces": "--pipeline-schedule and the pieces of weight gradients",
    "replicas": "--balance-replicas and the data-parallel size",
}


class ScheduleRecord:
    """The orders of all ranks of a pipeline, by step.

    Args:
        shape: of the pipeline.
        source: where it comes from, for messages.
    """

    def __init__(self, shape: RecordShape, source: str = "the record") -> None:
        self.shape = shape
        self._source = source
        self._orders: dict[Codes, Codes] = {}  # each once
        self._steps: dict[int, tuple[Codes, ...]] = {}
        self._dealt: dict[int, Shares] = {}

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps, ascending."""
        return tuple(sorted(self._steps))

    def add(self, step: int, orders: Sequence[Sequence[int]], dealt: Shares | None = None) -> None:
        """Keep a step's orders, one per rank; in the place of earlier ones of that step."""
        own = self._orders
        if dealt is not None:
            self._dealt[step] = dealt
        self._steps[step] = tuple(own.setdefault(order, order) for order in map(tuple, orders))

    def drop_after(self, step: int) -> None:
        """Forget all steps after ``step``."""
        self._steps = {number: found for number, found in self._steps.items() if number <= step}

    def save(self, path: str | Path) -> None:
        """Write the record, whole or not at all.

        Raises:
            TraceError: it cannot be written there.
        """
        numbers = {order: number for number, order in enumerate(self._orders)}
        content: dict[str, Any] = {
            "format": _FORMAT,
            "version": _VERSION,
            "shape": asdict(self.shape),
            "orders": list(numbers),
            "steps": {
                str(step): [numbers[order] for order in self._steps[step]] for step in self.steps
            },
        }
        if self.shape.replicas:
            content["dealt"] = {str(step): self._dealt[step] for step in self.steps}
        with replaced(path) as temporary:
            temporary.write_text(json.dumps(content, separators=(",", ":")), encoding="ascii")

    @staticmethod
    def load(path: str | Path) -> ScheduleRecord:
        """Read a record.

        Raises:
            ConfigError: there is none, it is damaged or of a newer version.
        """
        content = read_json(Path(path), _HINT)
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise _damaged(path, f'its "format" is not "{_FORMAT}"')
        if content.get("version") != _VERSION:
            raise ConfigError(
                f"{path} has version {content.get('version')!r} of the format, this program reads "
                f"{_VERSION}; record the schedule anew"
            )
        try:
            return _parse(content, str(path))
        except (KeyError, TypeError, ValueError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise _damaged(path, reason) from error

    def require_shape(self, shape: RecordShape) -> None:
        """Refuse a run of another shape.

        Raises:
            ConfigError: names each field that differs, with both values.
        """
        ours, theirs = asdict(shape), asdict(self.shape)
        differing = [name for name in ours if ours[name] != theirs[name]]
        if differing:
            pairs = ", ".join(
                f"{name} {theirs[name]} there, {ours[name]} here" for name in differing
            )
            flags = ", ".join(_REMEDIES[name] for name in differing)
            raise ConfigError(
                f"{self._source} is of a pipeline of another shape: {pairs}; give {flags} of the "
                "recorded run"
            )

    def require_steps(self, first: int, last: int) -> None:
        """Refuse to replay steps that are not there.

        Raises:
            ConfigError: names the steps that are there and those that are missing.
        """
        missing = [step for step in range(first, last + 1) if step not in self._steps]
        if missing:
            raise ConfigError(
                f"{self._source} holds steps {describe_numbers(self.steps)}, and lacks "
                f"{describe_numbers(missing)} of those to be replayed; train other iterations, or "
                "record more"
            )

    def codes(self, step: int, place: int, num_microbatches: int) -> Codes:
        """Return the order that a rank took in a step.

        Args:
            step: the step.
            place: of the rank among those of the step.
            num_microbatches: of the rank, in this run.

        Raises:
            ConfigError: the step is not there, or had another number of microbatches.
        """
        self.require_steps(step, step)
        codes = self._steps[step][place]
        lanes = 3 * self.shape.chunks
        self._require_count(step, sum(code % lanes == 0 for code in codes), num_microbatches)
        return codes

    def dealt(self, step: int, num_microbatches: int) -> Shares:
        """Return the microbatches that each replica had in a step, of so many.

        Raises:
            ConfigError: the step is not there, or had another number of microbatches.
        """
        self.require_steps(step, step)
        self._require_count(step, sum(map(len, self._dealt[step])), num_microbatches)
        return self._dealt[step]

    def _require_count(self, step: int, recorded: int, present: int) -> None:
        if recorded != present:
            raise ConfigError(
                f"step {step} of {self._source} has {recorded} microbatches, this run's has "
                f"{present}; give the batch sizes and the data-parallel size of the recorded run"
            )


class Recording:
    """Writes down what this rank does, and now and then the whole pipeline's file.

    Args:
        path: the file.
        shape: of the pipeline.
        place: of this rank's order among those of a step: position in the pipeline, those of a
            further replica after those of the one before. ``None`` outside the first tensor- and
            context-parallel rank, and in further replicas unless microbatches are dealt to them:
            such a rank keeps nothing.
        is_writer: whether this is the first rank of the group of :meth:`write`.
        after_step: last step of an earlier start of the job, whose file is continued.

    Raises:
        ConfigError: the file to be continued is damaged or of another shape.
    """

    def __init__(
        self,
        path: str | Path,
        shape: RecordShape,
        *,
        place: int | None,
        is_writer: bool,
        after_step: int = 0,
    ) -> None:
        self._path = Path(path)
        self._shape = shape
        self._place = place
        self._pending: dict[int, tuple[Codes, Shares | None]] = {}
        self._outage = Outage(path, "writes, all of which is in this one")
        self._record = ScheduleRecord(shape)
        if is_writer and after_step and self._path.exists():
            self._record = ScheduleRecord.load(path)
            self._record.require_shape(shape)
            self._record.drop_after(after_step)

    def append(self, step: int, codes: Iterable[int], dealt: Shares | None = None) -> None:
        """Keep the order of a training step, as ``Executor.last_codes`` gives it."""
        if self._place is not None:
            self._pending[step] = tuple(codes), dealt

    def write(self, group: Any) -> None:
        """Gather what is new and write the file, if it can be. Collective over ``group``.

        Args:
            group: a gloo group that holds the recording ranks and maybe others, such as all ranks.
        """
        import torch.distributed as dist  # reading a record needs no torch

        first = dist.get_process_group_ranks(group)[0]
        is_first = dist.get_rank() == first
        gathered: list[Any] | None = [None] * group.size() if is_first else None
        mine = None if self._place is None else (self._place, self._pending)
        dist.gather_object(mine, gathered, dst=first, group=group)
        self._pending = {}
        if gathered is not None:
            by_place = dict(one for one in gathered if one is not None)
            places = range(self._shape.num_orders)
            assert sorted(by_place) == list(places), sorted(by_place)
            for step, (_, dealt) in by_place[0].items():
                self._record.add(step, [by_place[place][step][0] for place in places], dealt)
            try:
                self._record.save(self._path)
                self._outage.ends()
            except TraceError as error:
                self._outage.begins(error)


class Replay:
    """Takes the orders of a record on one rank.

    Args:
        record: of a pipeline of this shape.
        shape: of this run.
        place: of this rank's order among those of a step, as of :class:`Recording`.

    Attributes:
        record: as given.

    Raises:
        ConfigError: the record is of another shape.
    """

    def __init__(self, record: ScheduleRecord, shape: RecordShape, place: int) -> None:
        record.require_shape(shape)
        self.record = record
        self._place = place
        self._step = 0
        self._policies: dict[Codes, Follow] = {}

    def begin(self, step: int) -> None:
        """Say which training step comes next."""
        self._step = step

    def policy(self, num_microbatches: int) -> Follow:
        """Return the policy of the step that was begun: a static order, for the agreement too.

        Raises:
            ConfigError: the record lacks the step, or had other microbatches in it.
        """
        codes = self.record.codes(self._step, self._place, num_microbatches)
        if codes not in self._policies:
            shape = self.record.shape
            order = actions_of(codes, shape.chunks, shape.weight_pieces)
            self._policies[codes] = Follow(order, "replay")
        return self._policies[codes]


def _parse(content: Mapping[str, Any], source: str) -> ScheduleRecord:
    """Return the record in a file's content; raises plain errors where it is damaged."""
    names = [field.name for field in fields(RecordShape)]
    given = {"replicas": 0, **content["shape"]}
    record = ScheduleRecord(RecordShape(**{name: given[name] for name in names}), source)
    shape = record.shape
    for name in ("ranks", "chunks", "weight_pieces", "replicas"):
        if not _is_count(getattr(shape, name)):
            raise ValueError(f'"{name}" is {getattr(shape, name)!r}')
    orders = [tuple(order) for order in content["orders"]]
    for order in orders:
        _require_whole(order, shape)
    for step, numbers in content["steps"].items():
        known = all(_is_count(number) and number < len(orders) for number in numbers)
        if len(numbers) != shape.num_orders or not known:
            raise ValueError(
                f"step {step} does not name an order for each of {shape.num_orders} ranks"
            )
        dealt = None
        if shape.replicas:
            dealt = tuple(tuple(one) for one in content["dealt"][step])
            every = sorted(number for one in dealt for number in one)
            if every != list(range(len(every))):
                raise ValueError(f"step {step} does not deal each microbatch once")
        record.add(int(step), [orders[number] for number in numbers], dealt)
    return record


def _require_whole(order: Codes, shape: RecordShape) -> None:
    """Refuse an order that has not every action once."""
    if not all(_is_count(code) for code in order):
        raise ValueError("an order holds something else than codes")
    lanes = 3 * shape.chunks
    counts = Counter(code % lanes for code in order)
    expected = {
        kind * shape.chunks + chunk: counts[0] * pieces
        for kind, pieces in enumerate((1, 1, shape.weight_pieces))
        for chunk in range(shape.chunks)
        if pieces
    }
    if not order or counts != expected:
        raise ValueError("an order does not hold each action once")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _damaged(path: str | Path, reason: str) -> ConfigError:
    return ConfigError(f"{path} is no record of a schedule or is damaged: {reason}; {_HINT}")
