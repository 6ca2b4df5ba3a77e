"""Records in a file the order in which each rank ran its actions, and replays this order.

A run-time scheduling rule chooses actions depending on when inputs arrive, so two runs rarely have
the same order of actions. A record makes the order reproducible for debugging, comparisons, or
profiling. Losses and gradients do not depend on the order, because each stage runs its F, its B and
its W actions in ascending order of microbatches. So it is enough to record one data-parallel
replica, although each replica has a different order under a run-time rule. If all replicas replay
this record, losses and gradients are bitwise equal to those of the recorded run.

Only training steps are recorded, because an evaluation always has the same order. The file is JSON.
``orders`` lists each distinct order once, as codes of actions (see ``schedule.policy.codes_of``).
``steps`` contains the index of each rank's order in each step::

    {"format": "megatron-adaptive schedule", "version": 1,
     "shape": {"ranks": 2, "chunks": 1, "placement": "loop", "weight_pieces": 0, "replicas": 0},
     "orders": [[0, 0, 1, 1], [0, 1, 0, 1]],
     "steps": {"1": [0, 1], "2": [0, 1]}}

If microbatches are assigned to replicas to balance the load, the sums of gradients depend on the
assignment. A step then has an index for each rank of each replica, and ``dealt`` lists the
microbatches of each replica::

     "dealt": {"1": [[0, 3], [1, 2]]}

If microbatches are cut into slices, ``slices`` in ``shape`` is the number of slices per microbatch.
A run with a different number of slices can also replay the record. Each action of this run takes
the place of a recorded action. Its slice and the recorded slice end at the same token or, if there
is no such recorded slice, the recorded slice is the first that ends later. The replay cannot
deadlock, because the recorded run executed the recorded actions in that order.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron.adaptive.config.input_files import read_json
from megatron.adaptive.errors import ConfigError, TraceError
from megatron.adaptive.schedule.action import NUMBER, ActionKind
from megatron.adaptive.schedule.policy import Follow, actions_of
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.trace.files import Outage, replaced
from megatron.adaptive.trace.read import describe_numbers

_FORMAT = "megatron-adaptive schedule"
_VERSION = 1
_HINT = "pass a file that --record-schedule wrote"

Codes = tuple[int, ...]
"""Codes of the actions of one rank in a step, in execution order."""
Shares = tuple[tuple[int, ...], ...]
"""Indices of the microbatches that each replica processes in a step, as one tuple per replica."""


@dataclass(frozen=True, kw_only=True)
class RecordShape:
    """Sizes that a recorded run and its replay must share, except for ``slices``.

    The number of microbatches is not included, because it may differ between steps, and can be
    derived from the length of an order.

    Attributes:
        ranks: Number of pipeline-parallel ranks.
        chunks: Number of chunks per rank.
        placement: Name of the stage placement, ``loop`` or ``v``.
        weight_pieces: Number of W actions per weight gradient, or 0 if there are no W actions.
        replicas: Number of replicas if microbatches are assigned to replicas to balance the load,
            or 0 if they are assigned round-robin.
        slices: Number of slices of each microbatch; 1 for whole microbatches. A run with a
            different number of slices can also replay the record.
    """

    ranks: int
    chunks: int
    placement: str
    weight_pieces: int
    replicas: int = 0
    slices: int = 1

    @property
    def num_orders(self) -> int:
        """Returns the number of recorded orders per step, which is one per recorded rank."""
        return self.ranks * max(1, self.replicas)

    @staticmethod
    def of(
        placement: Placement, weight_pieces: int, replicas: int = 0, slices: int = 1
    ) -> RecordShape:
        """Returns the shape of a run. See :class:`RecordShape` for the arguments."""
        return RecordShape(
            ranks=placement.num_ranks,
            chunks=placement.num_chunks,
            placement=placement.kind,
            weight_pieces=weight_pieces,
            replicas=replicas,
            slices=slices,
        )

    def content(self) -> dict[str, Any]:
        """Returns the fields of the shape as they are stored in the file.

        ``slices`` is omitted if it is 1.
        """
        return {
            name: value for name, value in asdict(self).items() if (name, value) != ("slices", 1)
        }


_REMEDIES = {
    "ranks": "--pipeline-model-parallel-size",
    "chunks": "--num-virtual-stages-per-pipeline-rank",
    "placement": "--pipeline-placement",
    "weight_pieces": "--pipeline-schedule and the pieces of weight gradients",
    "replicas": "--balance-replicas and the data-parallel size",
}


class ScheduleRecord:
    """Contains the order of actions of each rank of a pipeline, for each recorded step.

    Args:
        shape: Sizes of the recorded pipeline.
        source: Path of the record's file, which is used in error messages.
    """

    def __init__(self, shape: RecordShape, source: str = "the record") -> None:
        self.shape = shape
        self._source = source
        # Maps each order to the first equal tuple that was added, so that equal orders share
        # memory.
        self._orders: dict[Codes, Codes] = {}
        self._steps: dict[int, tuple[Codes, ...]] = {}
        self._dealt: dict[int, Shares] = {}

    @property
    def steps(self) -> tuple[int, ...]:
        """Returns the indices of the recorded steps, in ascending order."""
        return tuple(sorted(self._steps))

    def add(self, step: int, orders: Sequence[Sequence[int]], dealt: Shares | None = None) -> None:
        """Stores each rank's order of actions in the step with the index ``step``.

        ``orders`` contains one order per rank. ``dealt`` contains the microbatches of each replica,
        or is ``None`` if these are not recorded.

        Orders that were stored earlier for the same step are replaced.
        """
        known_orders = self._orders
        if dealt is not None:
            self._dealt[step] = dealt
        self._steps[step] = tuple(
            known_orders.setdefault(order, order) for order in map(tuple, orders)
        )

    def drop_after(self, step: int) -> None:
        """Removes all steps with an index greater than ``step``."""
        self._steps = {number: orders for number, orders in self._steps.items() if number <= step}

    def save(self, path: str | Path) -> None:
        """Writes the record to the file ``path`` atomically.

        Raises:
            TraceError: The file cannot be written.
        """
        numbers = {order: number for number, order in enumerate(self._orders)}
        content: dict[str, Any] = {
            "format": _FORMAT,
            "version": _VERSION,
            "shape": self.shape.content(),
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
        """Reads a record from the file ``path`` and returns it.

        Raises:
            ConfigError: The file does not exist, is damaged, or has a different version.
        """
        content = read_json(Path(path), _HINT)
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise _damaged(path, f'its "format" must be "{_FORMAT}"')
        if content.get("version") != _VERSION:
            raise ConfigError(
                f"{path} must have version {_VERSION} of the format, got "
                f"{content.get('version')!r}; record the schedule again"
            )
        try:
            return _parse(content, str(path))
        except (KeyError, TypeError, ValueError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise _damaged(path, reason) from error

    def require_shape(self, shape: RecordShape) -> None:
        """Checks that ``shape`` matches the recorded run, except for the number of slices.

        Raises:
            ConfigError: A size differs. The message lists all differing sizes with both values.
        """
        present = asdict(shape)
        recorded = asdict(self.shape)
        differing = [name for name in _REMEDIES if present[name] != recorded[name]]
        if differing:
            pairs = ", ".join(
                f"{name} {recorded[name]} in the recording, {present[name]} here"
                for name in differing
            )
            flags = ", ".join(_REMEDIES[name] for name in differing)
            raise ConfigError(
                f"{self._source} was recorded with a different pipeline shape ({pairs}); use the "
                f"same {flags} as the recorded run"
            )

    def require_steps(self, first: int, last: int) -> None:
        """Checks that the record contains all steps from ``first`` to ``last``.

        Raises:
            ConfigError: Steps are missing. The message lists the missing and the recorded steps.
        """
        missing = [step for step in range(first, last + 1) if step not in self._steps]
        if missing:
            raise ConfigError(
                f"{self._source} contains steps {describe_numbers(self.steps)}, but the replay "
                f"also needs {describe_numbers(missing)}; train only the recorded iterations, "
                "or record more steps"
            )

    def codes(self, step: int, index: int, num_microbatches: int) -> Codes:
        """Returns the recorded order of one rank in one step, as a tuple of codes.

        Args:
            step: Index of the step.
            index: Index of the rank's order in the step's list of orders.
            num_microbatches: Number of microbatches that the rank runs in this step of the current
                run.

        Raises:
            ConfigError: The step was not recorded, or was recorded with a different number of
                microbatches.
        """
        self.require_steps(step, step)
        codes = self._steps[step][index]
        lanes = 3 * self.shape.chunks
        forwards = sum(code % lanes == 0 for code in codes)
        self._require_count(step, forwards // self.shape.slices, num_microbatches)
        return codes

    def cut(self, num_slices: int) -> ScheduleRecord:
        """Returns a copy of this record, converted to ``num_slices`` slices per microbatch."""
        if num_slices == self.shape.slices:
            return self
        record = ScheduleRecord(replace(self.shape, slices=num_slices), self._source)
        cut = {order: _cut(order, self.shape, num_slices) for order in self._orders}
        for step in self.steps:
            orders = [cut[order] for order in self._steps[step]]
            record.add(step, orders, self._dealt.get(step))
        return record

    def dealt(self, step: int, num_microbatches: int) -> Shares:
        """Returns the indices of the microbatches of each replica in the recorded step.

        Args:
            step: Index of the step.
            num_microbatches: Number of microbatches of all replicas in this step of the current
                run.

        Raises:
            ConfigError: The step was not recorded, or was recorded with a different number of
                microbatches.
        """
        self.require_steps(step, step)
        self._require_count(step, sum(map(len, self._dealt[step])), num_microbatches)
        return self._dealt[step]

    def _require_count(self, step: int, recorded: int, present: int) -> None:
        if recorded != present:
            raise ConfigError(
                f"step {step} of {self._source} has {recorded} microbatches, but the step of "
                f"this run has {present}; use the batch sizes and the data-parallel size of the "
                "recorded run"
            )


class Recording:
    """Records the orders of this rank. :meth:`write` saves the orders of the whole pipeline.

    Args:
        path: Path of the file.
        shape: Sizes of the recorded pipeline.
        order_index: Index of this rank's order in a step's list of orders: its pipeline rank, plus
            the number of ranks of earlier replicas. ``None`` if this rank records nothing. Only the
            first tensor- and context-parallel rank of a stage records, either in the first replica
            only or, if microbatches are balanced, in all replicas.
        is_writer: Whether this rank writes the file. This must be true on the first rank of the
            group that is passed to :meth:`write`.
        after_step: Index of the last step before the job started or resumed. If it is not 0 and the
            file exists, the steps in the file up to this step are kept, after conversion to the
            number of slices of this run.

    Raises:
        ConfigError: The existing file is damaged, or was written by a run with different sizes.
    """

    def __init__(
        self,
        path: str | Path,
        shape: RecordShape,
        *,
        order_index: int | None,
        is_writer: bool,
        after_step: int = 0,
    ) -> None:
        self._path = Path(path)
        self._shape = shape
        self._order_index = order_index
        self._pending: dict[int, tuple[Codes, Shares | None]] = {}
        self._outage = Outage(path, "writes")
        self._record = ScheduleRecord(shape)
        if is_writer and after_step and self._path.exists():
            self._record = ScheduleRecord.load(path)
            self._record.require_shape(shape)
            self._record.drop_after(after_step)
            self._record = self._record.cut(shape.slices)

    def append(self, step: int, codes: Iterable[int], dealt: Shares | None = None) -> None:
        """Records the order of the training step ``step``.

        ``codes`` are the codes from ``Executor.last_codes``, and ``dealt`` are the microbatches of
        each replica, or ``None`` if these are not recorded.
        """
        if self._order_index is not None:
            self._pending[step] = tuple(codes), dealt

    def write(self, group: Any) -> None:
        """Gathers the orders that all ranks recorded since the last call, and writes the file.

        If writing fails, a warning is printed.

        All ranks of ``group`` must call this method.

        Args:
            group: Gloo group that contains all recording ranks, for example the group of all ranks.
        """
        # Import torch only here, because reading a record must not require torch.
        import torch.distributed as dist

        first = dist.get_process_group_ranks(group)[0]
        is_first = dist.get_rank() == first
        gathered: list[Any] | None = [None] * group.size() if is_first else None
        recorded = None if self._order_index is None else (self._order_index, self._pending)
        dist.gather_object(recorded, gathered, dst=first, group=group)
        self._pending = {}
        if gathered is not None:
            by_index = dict(entry for entry in gathered if entry is not None)
            indices = range(self._shape.num_orders)
            assert sorted(by_index) == list(indices), sorted(by_index)
            for step, (_, dealt) in by_index[0].items():
                self._record.add(step, [by_index[index][step][0] for index in indices], dealt)
            try:
                self._record.save(self._path)
                self._outage.ends()
            except TraceError as error:
                self._outage.begins(error)


class Replay:
    """Creates policies that make one rank follow its recorded orders.

    Args:
        record: Record of a run with the same sizes.
        shape: Sizes of this run.
        order_index: Index of this rank's order in a step's list of orders (see :class:`Recording`).

    Attributes:
        record: Record with the orders to follow, converted to this run's number of slices.

    Raises:
        ConfigError: The record is from a run with different sizes.
    """

    def __init__(self, record: ScheduleRecord, shape: RecordShape, order_index: int) -> None:
        record.require_shape(shape)
        self.record = record.cut(shape.slices)
        self._order_index = order_index
        self._step = 0
        self._policies: dict[Codes, Follow] = {}

    def begin(self, step: int) -> None:
        """Selects ``step`` as the training step that :meth:`policy` replays."""
        self._step = step

    def policy(self, num_microbatches: int) -> Follow:
        """Returns a policy that follows the recorded order of the current step.

        The executor treats the policy as static, so the ranks of a decision group do not need to
        agree on actions.

        Raises:
            ConfigError: The step was not recorded, or was recorded with a different number of
                microbatches.
        """
        codes = self.record.codes(self._step, self._order_index, num_microbatches)
        if codes not in self._policies:
            shape = self.record.shape
            order = actions_of(codes, shape.chunks, shape.weight_pieces, shape.slices)
            self._policies[codes] = Follow(order, "replay", num_slices=shape.slices)
        return self._policies[codes]


def _parse(content: Mapping[str, Any], source: str) -> ScheduleRecord:
    """Creates a record from ``content``, the parsed content of the file ``source``.

    Raises ``KeyError``, ``TypeError`` or ``ValueError`` if the content is damaged.
    """
    names = [field.name for field in fields(RecordShape)]
    shape_values = {"replicas": 0, "slices": 1, **content["shape"]}
    record = ScheduleRecord(RecordShape(**{name: shape_values[name] for name in names}), source)
    shape = record.shape
    for name in ("ranks", "chunks", "weight_pieces", "replicas"):
        if not _is_count(getattr(shape, name)):
            raise ValueError(
                f'"{name}" must be an integer of at least 0, but "{name}" is '
                f"{getattr(shape, name)!r}"
            )
    if not _is_count(shape.slices) or shape.slices == 0:
        raise ValueError(f'"slices" must be at least 1, but "slices" is {shape.slices!r}')
    orders = [tuple(order) for order in content["orders"]]
    for order in orders:
        _require_whole(order, shape)
    for step, numbers in content["steps"].items():
        exist = all(_is_count(number) and number < len(orders) for number in numbers)
        if len(numbers) != shape.num_orders or not exist:
            raise ValueError(
                f"step {step} must list one valid order index for each of {shape.num_orders} ranks"
            )
        dealt = None
        if shape.replicas:
            dealt = tuple(tuple(microbatches) for microbatches in content["dealt"][step])
            every = sorted(number for microbatches in dealt for number in microbatches)
            if every != list(range(len(every))):
                raise ValueError(f"step {step} must assign every microbatch exactly once")
        record.add(int(step), [orders[number] for number in numbers], dealt)
    return record


def _require_whole(order: Codes, shape: RecordShape) -> None:
    """Raises ``ValueError`` unless ``order`` contains each action of a rank exactly once.

    ``shape`` contains the sizes of the recorded pipeline.
    """
    if not all(_is_count(code) for code in order):
        raise ValueError("an order must contain only non-negative integers")
    lanes = 3 * shape.chunks
    counts = Counter(code % lanes for code in order)
    expected = {
        kind * shape.chunks + chunk: counts[0] * pieces
        for kind, pieces in enumerate((1, 1, shape.weight_pieces))
        for chunk in range(shape.chunks)
        if pieces
    }
    if not order or counts != expected or counts[0] % shape.slices:
        raise ValueError("an order must contain every action exactly once")


def _cut(order: Codes, shape: RecordShape, num_slices: int) -> Codes:
    """Converts a rank's order of actions to ``num_slices`` slices per microbatch.

    ``shape`` contains the sizes of the recorded pipeline.

    The actions of a chunk and kind are numbered in execution order. On all stages, actions with the
    same number (``turn``) therefore process the same slice, and run at the position of the same
    recorded slice.
    """
    indices: dict[int, list[int]] = defaultdict(list)
    for index, code in enumerate(order):
        indices[code % (3 * shape.chunks)].append(index)
    placed: list[tuple[int, int, int]] = []
    for code, recorded in indices.items():
        pieces = shape.weight_pieces if code // shape.chunks == NUMBER[ActionKind.W] else 1
        microbatches = len(recorded) // (pieces * shape.slices)
        for turn in range(microbatches * num_slices):
            microbatch, part = divmod(turn, num_slices)
            last = -(-(part + 1) * shape.slices // num_slices) - 1
            item = microbatch * shape.slices + last
            placed += [(recorded[item * pieces + n], turn, code) for n in range(pieces)]
    return tuple(code for _, _, code in sorted(placed))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _damaged(path: str | Path, reason: str) -> ConfigError:
    return ConfigError(f"{path} is damaged or is not a schedule record: {reason}; {_HINT}")
