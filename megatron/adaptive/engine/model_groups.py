"""Looks up a model's process groups, in ``parallel_state`` or in a collection from the caller.

A program that creates its process groups itself passes them to megatron-core's schedule as a
``ProcessGroupCollection``. ``parallel_state`` may then be empty.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.adaptive.errors import ConfigError

_NEEDED = ("pp", "tp", "cp", "dp", "dp_cp")
_EXPERTS = ("ep", "expt_tp", "tp_ep")
_BY_KIND = {
    "tensor": "tp",
    "context": "cp",
    "data": "dp",
    "data and context": "dp_cp",
    "expert": "ep",
    "expert data": "expt_dp",
    "model": "mp",
    "optimizer": "intra_dist_opt",
}
"""Names of the attributes of ``ProcessGroupCollection``, keyed by the kind of the process group.
"""


class ModelGroups:
    """Provides the process groups that connect this rank to the other ranks of a model.

    Groups of ``parallel_state`` are looked up on each access, because a run may need only some
    groups.

    Args:
        collection: Process groups created by the caller, or ``None`` to use ``parallel_state``.

    Raises:
        ConfigError: A required group is missing in ``collection``.
    """

    def __init__(self, collection: Any = None) -> None:
        self._collection = collection
        if collection is None:
            return
        lacking = [name for name in _NEEDED if getattr(collection, name, None) is None]
        if lacking:
            raise ConfigError(
                f"pg_collection has no {', '.join(lacking)}, but the engine requires the groups "
                f"{', '.join(_NEEDED)}; set these groups, or remove pg_collection to use the "
                "groups of parallel_state"
            )

    @property
    def is_of_parallel_state(self) -> bool:
        """Returns whether the pipeline has the same ranks as the pipeline of ``parallel_state``."""
        if self._collection is None:
            return True
        if not parallel_state.model_parallel_is_initialized():
            return False
        return has_same_ranks(self.pp, parallel_state.get_pipeline_model_parallel_group())

    @property
    def pp(self) -> Any:
        """Returns the group of this rank's pipeline."""
        if self._collection is None:
            return parallel_state.get_pipeline_model_parallel_group()
        return self._collection.pp

    @property
    def tp(self) -> Any:
        """Returns the group of tensor-parallel ranks."""
        if self._collection is None:
            return parallel_state.get_tensor_model_parallel_group()
        return self._collection.tp

    @property
    def cp(self) -> Any:
        """Returns the group of context-parallel ranks."""
        if self._collection is None:
            return parallel_state.get_context_parallel_group()
        return self._collection.cp

    @property
    def dp(self) -> Any:
        """Returns the group of data-parallel ranks."""
        if self._collection is None:
            return parallel_state.get_data_parallel_group()
        return self._collection.dp

    @property
    def dp_cp(self) -> Any:
        """Returns the group of data- and context-parallel ranks."""
        if self._collection is None:
            return parallel_state.get_data_parallel_group(with_context_parallel=True)
        return self._collection.dp_cp

    @property
    def replica(self) -> tuple[int, int]:
        """Returns the index of this rank's data-parallel replica, and the number of replicas."""
        if self._collection is None:
            rank: int = parallel_state.get_data_parallel_rank()
            return rank, parallel_state.get_data_parallel_world_size()
        return self.dp.rank(), self.dp.size()

    @property
    def tp_rank(self) -> int:
        """Returns this rank's index in the group of tensor-parallel ranks."""
        if self._collection is None:
            rank: int = parallel_state.get_tensor_model_parallel_rank()
            return rank
        return int(self.tp.rank())

    @property
    def cp_rank(self) -> int:
        """Returns this rank's index in the group of context-parallel ranks."""
        if self._collection is None:
            rank: int = parallel_state.get_context_parallel_rank()
            return rank
        return int(self.cp.rank())

    @property
    def pp_rank(self) -> int:
        """Returns this rank's index in the group of its pipeline."""
        if self._collection is None:
            rank: int = parallel_state.get_pipeline_model_parallel_rank()
            return rank
        return int(self.pp.rank())

    @property
    def dp_cp_rank(self) -> int:
        """Returns this rank's index in the group of data- and context-parallel ranks."""
        if self._collection is None:
            rank: int = parallel_state.get_data_parallel_rank(with_context_parallel=True)
            return rank
        return int(self.dp_cp.rank())

    @property
    def meeting(self) -> list[Any]:
        """Returns the groups whose ranks communicate in forward and backward passes of every model.

        :attr:`experts` and :attr:`balanced` contain the groups that are only used in models with
        experts.
        """
        if self._collection is None:
            return [parallel_state.get_tensor_and_context_parallel_group()]
        return [self.tp, self.cp]

    @property
    def experts(self) -> list[Any]:
        """Returns the groups whose ranks exchange tokens between experts."""
        if self._collection is None:
            return [
                parallel_state.get_expert_model_parallel_group(),
                parallel_state.get_expert_tensor_parallel_group(),
                parallel_state.get_expert_tensor_and_model_parallel_group(),
            ]
        groups = [getattr(self._collection, name, None) for name in _EXPERTS]
        return [group for group in groups if group is not None]

    @property
    def balanced(self) -> list[Any]:
        """Returns the groups over which an auxiliary loss may balance the load of experts."""
        if self._collection is None:
            return [parallel_state.get_tensor_and_data_parallel_group(True)]
        return [self.tp, self.dp_cp]

    def by_kind(self) -> dict[str, Any]:
        """Returns the model's groups, keyed by kind, with ``None`` for groups that do not exist."""
        if self._collection is not None:
            return {kind: getattr(self._collection, name, None) for kind, name in _BY_KIND.items()}
        return {
            "tensor": parallel_state.get_tensor_model_parallel_group(check_initialized=False),
            "context": parallel_state.get_context_parallel_group(check_initialized=False),
            "data": parallel_state.get_data_parallel_group(),
            "data and context": parallel_state.get_data_parallel_group(with_context_parallel=True),
            "expert": parallel_state.get_expert_model_parallel_group(check_initialized=False),
            "expert data": parallel_state.get_expert_data_parallel_group(check_initialized=False),
            "model": parallel_state.get_model_parallel_group(check_initialized=False),
            "optimizer": parallel_state.get_intra_distributed_optimizer_instance_group(
                check_initialized=False
            ),
        }

    def connect_same_ranks(self, other: ModelGroups) -> bool:
        """Returns whether the groups of ``other`` have the same ranks as these groups.

        Compares the pipeline-, tensor- and context-parallel groups.
        """
        pairs = ((self.pp, other.pp), (self.tp, other.tp), (self.cp, other.cp))
        return all(has_same_ranks(group, twin) for group, twin in pairs)


def has_same_ranks(group: Any, other: Any) -> bool:
    """Returns whether ``group`` and ``other`` contain the same ranks in the same order."""
    if group is other:
        return True
    if not isinstance(group, dist.ProcessGroup) or not isinstance(other, dist.ProcessGroup):
        return False
    return dist.get_process_group_ranks(group) == dist.get_process_group_ranks(other)
