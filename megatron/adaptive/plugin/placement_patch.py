"""Lays the model of an unmodified Megatron-LM out in a V.

megatron-core asks in a few places where a stage lies. Each is answered here, as long as the plug-in
is installed and the placement in force is a V; else megatron-core answers itself::

    4 ranks, 2 chunks    megatron-core's loop    V
    rank 0               E: 0   4                   3   4
    rank 1                  1   5                   2   5
    rank 2                  2   6                   1   6
    rank 3                  3   7 :L             E: 0   7 :L

Both ends are on the *last* rank, where Megatron-LM looks for losses and numbers of tokens, and
where it writes its logs: the last stage stays where it was, only the first one moves. The engine
counts positions from there, so that its own V begins at position 0 as everywhere.

- The layers of each stage are those that megatron-core's loop gives it, in another place. Layer
  numbers, and with them names in checkpoints, follow from :class:`PlacedLayout`.
- Both copies of a tied embedding are on one rank; :mod:`megatron.adaptive.gpt.model_placement` says
  what that asks for. In a checkpoint they are one tensor of two names on a rank.
- A forward that asks whether its rank is the first, without saying which chunk is meant, gets the
  answer for the chunk that runs: a batch's tokens are for one, its labels for the other.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.pipeline_parallel import utils as pipeline_utils
from megatron.core.transformer import transformer_block
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.adaptive.config.schedule_specs import PlacementKind
from megatron.adaptive.errors import ConfigError, SetupError
from megatron.adaptive.gpt.model_placement import PlacedLayout, stages_of, start_equal
from megatron.adaptive.plugin.settings import megatron_arguments
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.without_cuda import renew_program

_CHUNKS = 2


class TurnedLayout(PlacedLayout):
    """A layout whose positions count from the last rank of the pipeline.

    Args:
        placement: where stages live, by position.
        stages: layers of each stage in pipeline order.
        given: the layout that the configuration had without the plug-in.
    """

    def __init__(self, placement: Placement, stages: Sequence[list[str]], given: Any) -> None:
        super().__init__(placement, stages)
        self.given = given

    def _stage_of(self, pp_rank: int | None, vp_stage: int | None) -> int:
        if pp_rank is None:
            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        return super()._stage_of(self.pipeline_model_parallel_size - 1 - pp_rank, vp_stage)


class Placed:
    """Answers for megatron-core where stages lie.

    Args:
        kind: returns the placement in force.

    Attributes:
        running: the chunk that is meant where megatron-core does not say which one, if one runs.
    """

    def __init__(self, kind: Callable[[], PlacementKind]) -> None:
        self._kind = kind
        self.running: int | None = None
        self._first: weakref.ref[torch.nn.Module] | None = None
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def put(self) -> None:
        """Replace megatron-core's functions.

        Raises:
            SetupError: megatron-core has none of a name.
        """
        for owner, name, replacement in (
            (parallel_state, "initialize_model_parallel", self._initialize),
            (parallel_state, "is_pipeline_first_stage", self._is_first),
            (pipeline_utils, "is_pp_first_stage", self._is_first_of),
            (dist_checkpointing, "save", self._save),
            (dist_checkpointing, "load", self._load),
            (BlendedMegatronDatasetBuilder, "__init__", self._build_data),
            (TransformerConfig, "__post_init__", self._configure),
            (LanguageModule, "setup_embeddings_and_output_layer", self._set_up_embeddings),
        ):
            original = getattr(owner, name, None)
            if original is None:
                self.take_back()
                raise SetupError(
                    f"megatron-core {megatron.core.__version__}: {owner.__name__} has no {name}, "
                    "by which stages are placed; use megatron-core 0.15 to 0.19 or leave install() "
                    "out"
                )
            self._replaced.append((owner, name, original, standing_for(original, replacement)))
        for owner, name, original, ours in self._replaced:
            exchange(owner, name, original, ours)

    def take_back(self) -> None:
        """Give megatron-core its functions back."""
        for owner, name, original, ours in self._replaced:
            exchange(owner, name, ours, original)
        self._replaced.clear()

    @property
    def is_v(self) -> bool:
        """Whether the placement in force is a V."""
        return self._kind() == "v"

    def _initialize(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Give embedding groups the rank that the first stage is on."""
        renew_program()  # by now the program has imported what it needs
        if self.is_v:
            given = inspect.signature(original).bind(*args, **kwargs)
            for name in ("get_embedding_ranks", "get_position_embedding_ranks"):
                default = getattr(parallel_state, name.replace("get", "default"))
                choose = given.arguments.get(name) or default
                given.arguments[name] = functools.partial(_first_moved, choose)
            args, kwargs = given.args, given.kwargs
        return original(*args, **kwargs)

    def _is_first(
        self,
        original: Callable[..., bool],
        ignore_virtual: bool = True,
        vp_stage: int | None = None,
    ) -> bool:
        if not self.is_v:
            return original(ignore_virtual=ignore_virtual, vp_stage=vp_stage)
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return False
        if (
            ignore_virtual
            or parallel_state.get_virtual_pipeline_model_parallel_world_size() is None
        ):
            return self.running in (None, 0)
        assert vp_stage is not None, "vp_stage must be passed where a rank has several chunks"
        return vp_stage == 0

    def _is_first_of(self, original: Callable[..., bool], pp_group: Any) -> bool:
        if not self.is_v:
            return original(pp_group)
        return bool(pipeline_utils.is_pp_last_stage(pp_group))

    def _build_data(
        self, original: Callable[..., None], builder: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Let rank 0 build the data, though it holds neither end of a V.

        In a loop it always does: it makes the indices that other ranks then read, and whether it
        has data decides for all ranks whether Megatron-LM trains.
        """
        given = inspect.signature(original).bind(builder, *args, **kwargs)
        reads = given.arguments["is_built_on_rank"]
        if self.is_v:
            given.arguments["is_built_on_rank"] = lambda: reads() or dist.get_rank() == 0
        original(*given.args, **given.kwargs)

    def _configure(self, original: Callable[..., None], config: Any) -> None:
        """Give a configuration the layout of a V."""
        if isinstance(config.pipeline_model_parallel_layout, TurnedLayout):  # a copy is made
            config.pipeline_model_parallel_layout = config.pipeline_model_parallel_layout.given
        original(config)
        if self.is_v and config.pipeline_model_parallel_size > 1:
            _check(config)
            config.pipeline_model_parallel_layout = _turned(
                config.pipeline_model_parallel_size,
                _stages_in_loop(config),
                config.pipeline_model_parallel_layout,
            )

    def _set_up_embeddings(self, original: Callable[..., None], model: Any) -> None:
        """Let both copies of a tied embedding start equal: megatron-core has set one to zero."""
        original(model)
        if not self.is_v or model.config.pipeline_model_parallel_size == 1:
            return
        if model.pre_process:
            self._first = weakref.ref(model)
        elif model.post_process and self._first is not None:
            first = self._first()
            start_equal([model] if first is None else [first, model])

    def _save(self, original: Callable[..., Any], state: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_v:
            from megatron.adaptive.checkpoint.megatron_state import without_local_copies

            state = without_local_copies(state)
        return original(state, *args, **kwargs)

    def _load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loaded = original(*args, **kwargs)
        if not self.is_v:
            return loaded
        from megatron.adaptive.checkpoint.megatron_state import with_own_storage

        if isinstance(loaded, tuple):  # with the keys that did not fit
            return (with_own_storage(loaded[0]), *loaded[1:])
        return with_own_storage(loaded)


def exchange(owner: Any, name: str, old: Any, new: Any) -> None:
    """Replace a name where it is defined and in every module that holds it from its import on."""
    setattr(owner, name, new)
    for module in list(sys.modules.values()):
        # Through the dictionary: getattr would load what lazy modules put off.
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)


def kind_of(config: Any) -> PlacementKind:
    """Return how the chunks of a model with this configuration lie."""
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    return layout.placement.kind if isinstance(layout, PlacedLayout) else "loop"


def standing_for(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``ours`` with the original and what it is called with."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    return replacement


def _first_moved(choose: Callable[..., list[int]], pp_ranks: list[int], *rest: Any) -> list[int]:
    chosen = {pp_ranks[-1] if rank == pp_ranks[0] else rank for rank in choose(pp_ranks, *rest)}
    return [rank for rank in pp_ranks if rank in chosen]


def _check(config: Any) -> None:
    """Refuse what cannot lie in a V."""
    chunks = config.virtual_pipeline_model_parallel_size or 1
    if chunks != _CHUNKS:
        raise ConfigError(
            f"placement v with {chunks} model chunk{'s' * (chunks > 1)} on a pipeline rank: it has "
            f"{_CHUNKS}; give --num-virtual-stages-per-pipeline-rank {_CHUNKS} or use placement "
            "loop with another schedule"
        )
    if getattr(config, "mtp_standalone", False):
        raise ConfigError(
            "pipeline_model_parallel_layout of the model with multi-token prediction on a stage of "
            "its own: a V has it on the last stage; move its layers there or use placement loop"
        )
    holders = parallel_state.get_embedding_group(check_initialized=False)
    if holders is not None and holders.size() > 1:
        ranks = ", ".join(map(str, dist.get_process_group_ranks(holders)))
        raise ConfigError(
            f"ranks {ranks} have an embedding in common, as in a loop, where a V has it on one: "
            "call install() with placement v before megatron-core's process groups are made"
        )
    arguments = megatron_arguments()
    if arguments is None or not (
        getattr(arguments, "save", None) or getattr(arguments, "load", None)
    ):
        return
    if getattr(arguments, "ckpt_format", None) == "torch":
        raise ConfigError(
            "checkpoints of --ckpt-format torch with placement v: they name layers by their place "
            "on a rank, which a loop would read wrongly; use torch_dist"
        )
    if getattr(arguments, "use_distributed_optimizer", False) and not getattr(
        arguments, "dist_ckpt_optim_fully_reshardable", True
    ):
        raise ConfigError(
            "checkpoints of the distributed optimizer by buckets with placement v: a loop would "
            "read them wrongly; give --dist-ckpt-optim-fully-reshardable"
        )


def _stages_in_loop(config: Any) -> tuple[tuple[str, ...], ...]:
    """Return the layers that megatron-core gives each stage, in pipeline order."""
    ranks = config.pipeline_model_parallel_size
    places = [(rank, chunk) for chunk in range(_CHUNKS) for rank in range(ranks)]
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return tuple(tuple(layer.name for layer in layout.layout[r][c]) for r, c in places)
    layers = [
        transformer_block.get_num_layers_to_build(config, vp_stage=chunk, pp_rank=rank)
        for rank, chunk in places
    ]
    return tuple(map(tuple, stages_of(layers, config.mtp_num_layers or 0)))


# Megatron-LM makes a configuration for every batch that it reads.
@functools.lru_cache(maxsize=8)
def _turned(ranks: int, stages: Sequence[Sequence[str]], given: Any) -> TurnedLayout:
    placement = Placement(num_ranks=ranks, num_chunks=_CHUNKS, kind="v")
    return TurnedLayout(placement, [list(stage) for stage in stages], given)
