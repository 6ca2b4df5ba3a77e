"""Assigns the stages of an unmodified Megatron-LM to ranks with a V-shaped placement.

A few functions of megatron-core return the position of a stage. While the plugin is installed, it
replaces these functions. The replacements only return different results if the placement is
V-shaped::

    4 ranks, 2 chunks    megatron-core's loop    V
    rank 0               E: 0   4                   3   4
    rank 1                  1   5                   2   5
    rank 2                  2   6                   1   6
    rank 3                  3   7 :L             E: 0   7 :L

In this drawing, E is the embedding and L is the loss. The first and the last stage are both on the
*last* rank, because Megatron-LM reads losses and token counts on that rank, and writes its logs
there. The last stage therefore stays on its rank, and the first stage moves to that rank. The
engine counts positions from the last rank, so that the V begins at position 0, as everywhere in
this package.

- Each stage has the same layers as in megatron-core's loop. :class:`PlacedLayout` determines the
  layer numbers and the names in checkpoints.
- Both copies of a tied embedding are on the same rank. :mod:`megatron.adaptive.gpt.model_placement`
  handles this. In a checkpoint, this rank has one tensor with two names.
- A forward step may ask whether its rank is the first, without specifying a chunk. The result then
  refers to the chunk that is running, because the first chunk needs the tokens of a batch, and the
  second chunk needs the labels.
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
# Pipeline groups that were created for a V-shaped placement. This is a global variable, because the
# groups belong to parallel_state and outlive uninstall().
_GROUPS_OF_V: weakref.WeakSet[Any] = weakref.WeakSet()


class TurnedLayout(PlacedLayout):
    """Assignment of layers to stages, where positions are counted from the last pipeline rank.

    Args:
        placement: Assignment of pipeline stages to positions.
        stages: Names of the layers in each stage, in pipeline order.
        original: Layout that the model's configuration had before, or ``None``.
    """

    def __init__(self, placement: Placement, stages: Sequence[list[str]], original: Any) -> None:
        super().__init__(placement, stages)
        self.original = original

    def _stage_of(self, pp_rank: int | None, vp_stage: int | None) -> int:
        if pp_rank is None:
            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        return super()._stage_of(self.pipeline_model_parallel_size - 1 - pp_rank, vp_stage)


class Placed:
    """Replaces megatron-core's functions that return the position of a stage.

    Args:
        kind: Function that returns the current kind of placement, ``loop`` or ``v``.

    Attributes:
        running: Index of the chunk whose forward step is running, or ``None``. This index is used
            if megatron-core asks for the position of a stage without specifying a chunk.
    """

    def __init__(self, kind: Callable[[], PlacementKind]) -> None:
        self._kind = kind
        self.running: int | None = None
        self._first: weakref.ref[torch.nn.Module] | None = None
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def put(self) -> None:
        """Replaces the functions of megatron-core, wherever they have been imported.

        Raises:
            SetupError: The installed megatron-core lacks one of the functions.
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
                    "which is needed to place stages; use megatron-core 0.15 to 0.20, or do not "
                    "call install()"
                )
            self._replaced.append((owner, name, original, standing_for(original, replacement)))
        for owner, name, original, replacement in self._replaced:
            exchange(owner, name, original, replacement)

    def take_back(self) -> None:
        """Restores the functions of megatron-core."""
        for owner, name, original, replacement in self._replaced:
            exchange(owner, name, replacement, original)
        self._replaced.clear()

    @property
    def is_v(self) -> bool:
        """Returns whether the current placement is V-shaped."""
        return self._kind() == "v"

    def _initialize(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Creates megatron-core's process groups by calling ``original``.

        In a V-shaped placement, the embedding groups contain the last rank, which has the first
        stage, in place of the first rank.
        """
        # The program has imported its modules by now, so replace CUDA functions in all of them.
        renew_program()
        if self.is_v:
            bound = inspect.signature(original).bind(*args, **kwargs)
            for name in ("get_embedding_ranks", "get_position_embedding_ranks"):
                default = getattr(parallel_state, name.replace("get", "default"))
                choose = bound.arguments.get(name) or default
                bound.arguments[name] = functools.partial(_first_moved, choose)
            args = bound.args
            kwargs = bound.kwargs
        created = original(*args, **kwargs)
        if self.is_v:
            _GROUPS_OF_V.add(parallel_state.get_pipeline_model_parallel_group())
        return created

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
        assert vp_stage is not None, "vp_stage must be passed if a rank has several chunks"
        return vp_stage == 0

    def _is_first_of(self, original: Callable[..., bool], pp_group: Any) -> bool:
        if not self.is_v:
            return original(pp_group)
        return bool(pipeline_utils.is_pp_last_stage(pp_group))

    def _build_data(
        self, original: Callable[..., None], builder: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Calls ``original`` and, in a V-shaped placement, also makes rank 0 build datasets.

        With this placement, the last rank has both the first and the last stage, so rank 0 would
        have no data. But rank 0 builds the indices of the datasets, which other ranks then read.
        Without data on rank 0, Megatron-LM would not train on any rank.
        """
        bound = inspect.signature(original).bind(builder, *args, **kwargs)
        builds_here = bound.arguments["is_built_on_rank"]
        if self.is_v:
            bound.arguments["is_built_on_rank"] = lambda: builds_here() or dist.get_rank() == 0
        original(*bound.args, **bound.kwargs)

    def _configure(self, original: Callable[..., None], config: Any) -> None:
        """Stores the layout of a V-shaped placement in the model's configuration ``config``.

        Raises:
            ConfigError: The configuration does not support a V-shaped placement, or the placement
                differs from the one for which megatron-core's process groups were created.
        """
        # An earlier call may have changed this configuration, or the configuration from which it
        # was copied, so restore the original layout first.
        if isinstance(config.pipeline_model_parallel_layout, TurnedLayout):
            config.pipeline_model_parallel_layout = config.pipeline_model_parallel_layout.original
        original(config)
        if config.pipeline_model_parallel_size == 1:
            return
        if not self.is_v:
            _check_groups_of_loop()
            return
        _check(config)
        config.pipeline_model_parallel_layout = _turned(
            config.pipeline_model_parallel_size,
            _stages_in_loop(config),
            config.pipeline_model_parallel_layout,
        )

    def _set_up_embeddings(self, original: Callable[..., None], model: Any) -> None:
        """Calls ``original``, and then makes both copies of a tied embedding of ``model`` equal.

        megatron-core's function ``original`` sets one of the copies to zero.
        """
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

        if isinstance(loaded, tuple):  # The other elements are lists of keys that did not match.
            return (with_own_storage(loaded[0]), *loaded[1:])
        return with_own_storage(loaded)


def exchange(owner: Any, name: str, old: Any, new: Any) -> None:
    """Replaces the attribute ``name`` in ``owner`` and in each module that has imported it.

    ``old`` is the current value of the attribute, and ``new`` is the new value.
    """
    setattr(owner, name, new)
    for module in list(sys.modules.values()):
        # getattr would trigger imports in lazy modules, so read the dictionary of the module.
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)


def kind_of(config: Any) -> PlacementKind:
    """Returns the placement kind of a model with the configuration ``config``."""
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    return layout.placement.kind if isinstance(layout, PlacedLayout) else "loop"


def standing_for(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a replacement for ``original`` that calls ``function``.

    The replacement has the name and the docstring of ``original``. It calls ``function`` with
    ``original``, followed by the arguments of the call.
    """

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return replacement


def _first_moved(choose: Callable[..., list[int]], pp_ranks: list[int], *rest: Any) -> list[int]:
    chosen = {pp_ranks[-1] if rank == pp_ranks[0] else rank for rank in choose(pp_ranks, *rest)}
    return [rank for rank in pp_ranks if rank in chosen]


def _check_groups_of_loop() -> None:
    """Raises an error if megatron-core's process groups were created for a V-shaped placement.

    With such groups, the embedding groups do not contain the first rank, so the copies of a tied
    embedding would diverge.
    """
    group = parallel_state.get_pipeline_model_parallel_group(check_initialized=False)
    if group is not None and group in _GROUPS_OF_V:
        raise ConfigError(
            "megatron-core's process groups were created for placement v, but the model has "
            "placement loop, which requires different groups for the tied embedding; after "
            "install(), call parallel_state.destroy_model_parallel() and "
            "initialize_model_parallel() again"
        )


def _check(config: Any) -> None:
    """Raises an error if the model's configuration does not support a V-shaped placement."""
    chunks = config.virtual_pipeline_model_parallel_size or 1
    if chunks != _CHUNKS:
        raise ConfigError(
            f"placement v requires {_CHUNKS} model chunks on each pipeline rank, got {chunks} "
            f"model chunk{'s' * (chunks > 1)}; set --num-virtual-stages-per-pipeline-rank "
            f"{_CHUNKS}, or use placement loop with another schedule"
        )
    if getattr(config, "mtp_standalone", False):
        raise ConfigError(
            "pipeline_model_parallel_layout of the model puts multi-token prediction on a "
            "separate stage, but placement v requires it on the last stage; move its layers "
            "there, or use placement loop"
        )
    holders = parallel_state.get_embedding_group(check_initialized=False)
    if holders is not None and holders.size() > 1:
        ranks = ", ".join(map(str, dist.get_process_group_ranks(holders)))
        raise ConfigError(
            "megatron-core's process groups were created for placement loop, in which ranks "
            f"{ranks} share the tied embedding, but the model has placement v; call install() "
            "with placement v before the process groups are created"
        )
    arguments = megatron_arguments()
    if arguments is None or not (
        getattr(arguments, "save", None) or getattr(arguments, "load", None)
    ):
        return
    if getattr(arguments, "ckpt_format", None) == "torch":
        raise ConfigError(
            "placement v does not support --ckpt-format torch, because such checkpoints name "
            "layers by their position on a rank, so a job with placement loop would load the "
            "wrong layers; use torch_dist"
        )
    if getattr(arguments, "use_distributed_optimizer", False) and not getattr(
        arguments, "dist_ckpt_optim_fully_reshardable", True
    ):
        raise ConfigError(
            "placement v does not support checkpoints that store the distributed optimizer's "
            "state by bucket, because a job with placement loop would load the wrong values; add "
            "--dist-ckpt-optim-fully-reshardable"
        )


def _stages_in_loop(config: Any) -> tuple[tuple[str, ...], ...]:
    """Returns, for each stage, the names of the layers that megatron-core assigns to the stage.

    ``config`` is the configuration of the model. The stages are in pipeline order.
    """
    ranks = config.pipeline_model_parallel_size
    chunks = [(rank, chunk) for chunk in range(_CHUNKS) for rank in range(ranks)]
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return tuple(tuple(layer.name for layer in layout.layout[r][c]) for r, c in chunks)
    layers = [
        transformer_block.get_num_layers_to_build(config, vp_stage=chunk, pp_rank=rank)
        for rank, chunk in chunks
    ]
    return tuple(map(tuple, stages_of(layers, config.mtp_num_layers or 0)))


# Cache the layouts, because Megatron-LM creates a configuration object for every batch.
@functools.lru_cache(maxsize=8)
def _turned(ranks: int, stages: Sequence[Sequence[str]], original: Any) -> TurnedLayout:
    placement = Placement(num_ranks=ranks, num_chunks=_CHUNKS, kind="v")
    return TurnedLayout(placement, [list(stage) for stage in stages], original)
