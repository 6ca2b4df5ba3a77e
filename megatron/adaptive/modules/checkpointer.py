"""Saves and loads checkpoints of a pipeline. Tensors are saved under their names in the model.

The content of a checkpoint does not depend on the number of stages, ranks or replicas, which may
therefore be different when the checkpoint is loaded. All replicas have the same parameters, so only
the ranks of the first replica save them. Some buffers, such as the running means of batch
normalization, may differ between replicas. Only the first replica's buffers are saved. In-memory
snapshots contain the same state as checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron.adaptive.checkpoint import plain_values
from megatron.adaptive.checkpoint.collective_errors import RankGroup
from megatron.adaptive.checkpoint.folder import (
    PIPELINE_STATE,
    PipelineFolder,
    make_pipeline_manifest,
)
from megatron.adaptive.checkpoint.node_local import LocalDisk, prepare
from megatron.adaptive.checkpoint.reader import CheckpointReader, SavedTensor, WantedPart
from megatron.adaptive.checkpoint.saver import CheckpointSaver, load_first_whole, require_seen
from megatron.adaptive.checkpoint.snapshots import SnapshotState
from megatron.adaptive.checkpoint.writer import Part, Piece, TakenState
from megatron.adaptive.errors import CheckpointError, ConfigError
from megatron.adaptive.modules.mesh import Mesh
from megatron.adaptive.modules.update import PARAMETER_LISTS, LossScale, Update

_FORMER_STATE = "state.pt"
_MODEL = "model."
_OPTIMIZER = "optimizer."
_PLAIN = (bool, int, float, str, type(None))
_REMEDY = "Free space there or choose another folder"


class Checkpointer:
    """Saves and loads this rank's part of a checkpoint. All ranks must call each method together.

    Args:
        mesh: Replica and pipeline position of this process, and its process groups.
        model: Whole model of the user. Its non-persistent buffers are not saved.
        held: Parameters and buffers that this rank keeps, keyed by name.
        update: Object that owns the optimizer and the loss scale.

    Attributes:
        saver: Object that writes the checkpoint files, directly or in a background thread.
    """

    def __init__(
        self, mesh: Mesh, model: torch.nn.Module, held: Mapping[str, torch.Tensor], update: Update
    ) -> None:
        self._mesh = mesh
        self._update = update
        self._ranks = RankGroup(mesh.rank, mesh.control_group)
        self.saver = CheckpointSaver(mesh)
        # Do not save non-persistent buffers. torch's state_dict() omits them too.
        not_saved = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            for name in module._non_persistent_buffers_set
        }
        self._not_saved = not_saved
        # Keep a reference to this dictionary instead of a copy, because its entries change when
        # parameters move between ranks.
        self._all_held = held

    @property
    def _held(self) -> dict[str, torch.Tensor]:
        """Returns the parameters and buffers of this rank that are saved, keyed by name."""
        return {
            name: tensor.detach()
            for name, tensor in self._all_held.items()
            if name not in self._not_saved
        }

    def save(
        self,
        folder: str | Path,
        head: Mapping[str, Any],
        *,
        is_behind: bool = False,
        keep: int | None = None,
        state: Mapping[str, Any],
    ) -> Path | None:
        """Writes a checkpoint. Returns its folder, or ``None`` while files are still being written.

        Args:
            folder: Folder that contains the checkpoints of the run.
            head: Result of :meth:`head`.
            is_behind: Whether a background thread writes the files while training continues.
            keep: Number of newest complete checkpoints to keep; ``None`` for all.
            state: Other objects to save, keyed by name. Each has a ``state_dict`` method.

        Raises:
            CheckpointError: If the checkpoint cannot be written.
            ConfigError: If ``keep`` is not a valid number of checkpoints.
        """
        return self.saver.save(
            PipelineFolder(folder),
            int(head["step"]),
            lambda: self._take(head, state),
            keep=keep,
            remedy=_REMEDY,
            behind=is_behind,
        )

    def prepare(
        self, folder: str | Path, base: str | Path | None, keep: int | None
    ) -> LocalDisk | None:
        """Reserves the checkpoint folder for this job, and a node-local folder if ``base`` is set.

        Returns the object that manages the node-local folder, or ``None`` if ``base`` is ``None``.

        Args:
            folder: Folder of checkpoints that all nodes can access.
            base: Folder on each node's local disk in which checkpoints are written first; ``None``
                writes directly to ``folder``.
            keep: Number of newest complete checkpoints to keep in each of the two folders; ``None``
                keeps all in ``folder``.
        """
        shared = PipelineFolder(folder)
        self.saver.local = prepare(
            shared, self._mesh, _REMEDY, base, lambda: shared.latest() or 0, keep
        )
        return self.saver.local

    def apart(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Returns this rank's tensors, keyed by their names in a checkpoint, and its other state.

        The other state is a dict with the optimizer's type (``kind``), the options of each
        parameter group (``groups``), and those values in the optimizer's state that are not tensors
        (``plain``). The tensors are not copied, so the next optimizer step changes them.
        """
        states, plain = self._states()
        tensors = {
            **{_MODEL + name: tensor for name, tensor in self._held.items()},
            **{_OPTIMIZER + name: tensor for name, tensor in states.items()},
        }
        groups = [[self._options(group), names] for group, names in self._groups()]
        return tensors, {"kind": self._kind(), "groups": groups, "plain": plain}

    def is_buffer(self, name: str) -> bool:
        """Returns whether the checkpoint entry ``name`` is a buffer of the model.

        A snapshot must copy buffers immediately, because the next forward pass may change them.
        """
        model_name = name.removeprefix(_MODEL)
        return model_name != name and model_name not in self._update.parameters

    def head(self, step: int, seed: int, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns the entries of the checkpoint's manifest that are the same on all ranks.

        Args:
            step: Number of completed training steps.
            seed: Seed of the random numbers that the model draws, for example in dropout.
            extra: Numbers, strings, lists and dictionaries to save, such as a scheduler's state.

        Raises:
            ConfigError: If ``extra`` cannot be written as JSON.
        """
        try:
            json.dumps(extra)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"extra cannot be written as JSON ({error}); pass only numbers, strings, lists and "
                "dictionaries"
            ) from None
        scaler = self._update.scaler
        return {
            "step": step,
            "seed": seed,
            "loss_scale": None if scaler is None else asdict(scaler),
            "extra": dict(extra or {}),
        }

    def load(
        self,
        folder: str | Path,
        *,
        step: int | None,
        optimizer: bool,
        state: Mapping[str, Any] | None = None,
        trust: bool = False,
    ) -> dict[str, Any]:
        """Reads a checkpoint and returns its manifest. ``Pipeline.load`` lists the arguments."""
        self.saver.wait()
        folders = PipelineFolder(folder)
        objects = state or {}

        def load(step: int | None) -> dict[str, Any]:
            return self._load(folders, step, objects, optimizer=optimizer, trust=trust)

        if step is not None:
            return load(step)
        steps = self._ranks.on_first(lambda: [*folders.candidates()])
        return load_first_whole(steps, load, self._ranks) if steps else load(None)

    def _load(
        self,
        folders: PipelineFolder,
        step: int | None,
        state: Mapping[str, Any],
        *,
        optimizer: bool,
        trust: bool,
    ) -> dict[str, Any]:
        """Reads the checkpoint of step ``step`` in ``folders`` and returns its manifest.

        This method also loads the saved states into the user's objects in ``state``. ``optimizer``
        determines whether to load the optimizer's state, and ``trust`` determines whether to accept
        pickled checkpoints.
        """
        ranks = self._ranks
        path, manifest = ranks.on_first(lambda: folders.open(step, trust=trust))
        ranks.together(lambda: require_seen(path, self._mesh))
        save_id = str(manifest.get("save_id", ""))
        files = manifest["files"]
        blocks = manifest.get("blocks", {})
        has_optimizer = optimizer and manifest["optimizer"] is not None
        with self.saver.reading(path, int(manifest["step"]), save_id, files, blocks) as reader:
            states = self._read(reader, manifest if has_optimizer else None)
            content = ranks.together(lambda: _read_state(reader, files, state))
        if has_optimizer:
            self._restore_optimizer(states, manifest["options"])
        if self._update.scaler is not None and manifest["loss_scale"] is not None:
            self._update.scaler = LossScale(**manifest["loss_scale"])
        for name, user_object in state.items():
            user_object.load_state_dict(content[name])
        return manifest

    def _take(self, head: Mapping[str, Any], state: Mapping[str, Any]) -> TakenState:
        """Returns this rank's current state in the form that :attr:`saver` writes.

        The entries of ``head`` are added to the checkpoint's manifest. Only the first rank saves
        the states of the user's objects in ``state``.
        """
        once: dict[str, bytes] = {}
        if state:
            self._ranks.first(lambda: once.update({PIPELINE_STATE: _state_bytes(state)}))
        tensors, about = self.apart()
        return TakenState(
            pieces={} if self._mesh.dp_rank else _pieces(tensors),
            once=once,
            manifest=lambda save_id, ranks: make_pipeline_manifest(
                {**head, "save_id": save_id}, ranks.gather(about)
            ),
        )

    def _read(
        self, reader: CheckpointReader, manifest: Mapping[str, Any] | None
    ) -> dict[str, dict[str, Any]]:
        """Reads saved values into this rank's tensors, and returns the optimizer's state.

        Args:
            reader: Reader of the checkpoint.
            manifest: Manifest of the checkpoint; ``None`` to skip the optimizer's state.

        Returns:
            Optimizer state, keyed by parameter name. The state of a parameter is a dict with keys
                such as ``exp_avg``.
        """
        path = reader.path
        saved_tensors = reader.tensors

        def prepare() -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
            targets = self._wanted(path, saved_tensors)
            if manifest is None:
                return targets, {}
            self._check_optimizer(path, manifest)
            return targets, self._empty_states(saved_tensors, manifest)

        targets, states = self._ranks.together(prepare, name_ranks=False)
        targets |= {
            f"{_OPTIMIZER}{name}.{key}": target
            for name, parts in states.items()
            for key, target in parts.items()
            if isinstance(target, torch.Tensor)
        }
        parts = [
            WantedPart(name=name, offset=(0,) * target.dim(), target=target)
            for name, target in targets.items()
        ]
        self._ranks.together(lambda: reader.read(parts))
        return states

    def _kind(self) -> str | None:
        optimizer = self._update.optimizer
        return None if optimizer is None else type(optimizer).__name__

    def _states(self) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
        """Returns the optimizer's state as two dicts: tensors, and all other values.

        A key of the first dict consists of the name of a parameter and a key of its state, such as
        ``weight.exp_avg``. The second dict maps the name of each parameter to a dict of values.
        """
        tensors: dict[str, torch.Tensor] = {}
        plain: dict[str, dict[str, Any]] = {}
        if self._update.optimizer is None:
            return tensors, plain
        for name, parameter in self._update.parameters.items():
            for key, value in self._update.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}.{key}"] = value
                elif isinstance(value, _PLAIN):
                    plain.setdefault(name, {})[key] = value
                else:
                    raise CheckpointError(
                        f"{key!r} in the optimizer's state of {name} is a {type(value).__name__}, "
                        "but only tensors, numbers and strings can be saved"
                    )
        return tensors, plain

    @staticmethod
    def _options(group: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those options of a parameter group that can be saved in a checkpoint."""
        plain = {key: _plain(value) for key, value in _without_lists(group).items()}
        return {key: value for key, value in plain.items() if isinstance(value, (*_PLAIN, list))}

    def _groups(self) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """Yields the optimizer's parameter groups, each with the names of its parameters."""
        if self._update.optimizer is None:
            return
        names = {id(parameter): name for name, parameter in self._update.parameters.items()}
        for group in self._update.optimizer.param_groups:
            yield group, [names[id(parameter)] for parameter in group["params"]]

    def _wanted(
        self, path: Path, saved_tensors: Mapping[str, SavedTensor]
    ) -> dict[str, torch.Tensor]:
        """Returns this rank's parameters and buffers, keyed by their names in a checkpoint.

        Raises:
            CheckpointError: If a tensor is missing from ``saved_tensors`` or was saved with a
                different shape. The message contains ``path``.
        """
        for name, tensor in self._held.items():
            saved = saved_tensors.get(_MODEL + name)
            if saved is None or tuple(saved.size) != tuple(tensor.shape):
                has = "lacks it" if saved is None else f"has it with shape {list(saved.size)}"
                raise CheckpointError(
                    f"{path}: the model has {name} with shape {list(tensor.shape)}, but the "
                    f"checkpoint {has}; load the checkpoint into the same model that was saved"
                )
        return {_MODEL + name: tensor for name, tensor in self._held.items()}

    def _check_optimizer(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Checks the optimizer's type and parameter groups against ``manifest``.

        Error messages name ``path``, the path of the checkpoint.
        """
        kind = self._kind()
        # A rank whose parameters are all frozen has no optimizer.
        if kind is None and any(p.requires_grad for p in self._update.parameters.values()):
            raise ConfigError(
                f"{path} contains the state of an optimizer, but this Pipeline has no optimizer; "
                "call set_optimizer before load, or pass optimizer=False"
            )
        if kind not in (None, manifest["optimizer"]):
            raise CheckpointError(
                f"{path} contains the state of {manifest['optimizer']}, but the optimizer is "
                f"{kind}; use the same optimizer, or pass optimizer=False"
            )
        for _, names in self._groups():
            options = [_without_lists(manifest["options"].get(name, {})) for name in names]
            unequal = [
                n
                for n, group_options in zip(names, options, strict=True)
                if group_options != options[0]
            ]
            if unequal:
                raise CheckpointError(
                    f"{path}: {names[0]} and {unequal[0]} were saved in groups with different "
                    f"options, but the optimizer has both in one group of {len(names)} "
                    "parameters; use the same parameter groups as the saved optimizer"
                )

    def _empty_states(
        self, saved_tensors: Mapping[str, SavedTensor], manifest: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Returns an optimizer state for this rank, with uninitialized tensors.

        The tensors have the names, shapes and dtypes in ``saved_tensors``. Values that are not
        tensors are taken from ``manifest``.
        """
        states: dict[str, dict[str, Any]] = {
            name: dict(manifest["states"].get(name, {})) for name in self._update.parameters
        }
        for full, saved in saved_tensors.items():
            if not full.startswith(_OPTIMIZER):
                continue
            name, key = full[len(_OPTIMIZER) :].rsplit(".", 1)
            if name in states:
                parameter = self._update.parameters[name]
                has_shape = tuple(saved.size) == tuple(parameter.shape) and parameter.dim()
                states[name][key] = torch.empty(
                    saved.size, dtype=saved.dtype, device=parameter.device if has_shape else "cpu"
                )
        return states

    def _restore_optimizer(
        self, states: Mapping[str, Mapping[str, Any]], options: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Restores the optimizer's ``states`` and ``options``, both keyed by parameter name."""
        optimizer = self._update.optimizer
        if optimizer is None:
            return
        content = optimizer.state_dict()
        content["state"] = {}
        for (group, names), saved in zip(self._groups(), content["param_groups"], strict=True):
            for name, number in zip(names, saved["params"], strict=True):
                if states[name]:
                    content["state"][number] = dict(states[name])
            options_of_group = options.get(names[0], {}) if names else {}
            for key, value in _without_lists(options_of_group).items():
                saved[key] = _like(value, group.get(key))
        optimizer.load_state_dict(content)


class PipelineState(SnapshotState):
    """Provides a rank's state for snapshots, which are copies in memory that survive a crash.

    Args:
        checkpointer: Object that reads and writes the rank's state.
        head: Function that calls :meth:`Checkpointer.head` and returns its result.
        state: Other objects to save, keyed by name. Each has a ``state_dict`` method.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        head: Callable[[], Mapping[str, Any]],
        state: Mapping[str, Any],
    ) -> None:
        self._checkpointer = checkpointer
        self._head = head
        self._state = state
        self._layout: list[Any] = []

    def take(self) -> tuple[Mapping[Part, Piece], bytes]:
        tensors, about = self._checkpointer.apart()
        self._layout = _layout(tensors)
        line = json.dumps({**self._head(), **about}).encode() + b"\n"
        extra = line + (_state_bytes(self._state) if self._state else b"")
        # Copy buffers immediately, because the next forward pass may change them.
        is_buffer = self._checkpointer.is_buffer
        copied = {
            name: tensor.clone() if is_buffer(name) else tensor for name, tensor in tensors.items()
        }
        return _pieces(copied), extra

    def head(self) -> Mapping[str, Any]:
        return {"has_common": True}

    def is_changed(self) -> bool:
        """Returns whether the names, shapes or dtypes of tensors changed since :meth:`take` ran.

        For example, the first step of an optimizer adds tensors.
        """
        return _layout(self._checkpointer.apart()[0]) != self._layout


def _pieces(tensors: Mapping[str, torch.Tensor]) -> dict[Part, Piece]:
    """Returns one checkpoint entry per tensor. Each entry contains a whole tensor."""
    return {
        (name, (0,) * tensor.dim()): Piece(
            tensor=tensor, size=list(tensor.shape), whole=list(tensor.shape)
        )
        for name, tensor in tensors.items()
    }


def _layout(tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]


def _state_bytes(state: Mapping[str, Any]) -> bytes:
    """Returns the content of the checkpoint file that holds the states of the user's objects."""
    try:
        return plain_values.dumps(
            {name: user_object.state_dict() for name, user_object in state.items()}
        )
    except TypeError as error:
        raise ConfigError(
            f"state_dict() of {', '.join(state)} cannot be saved ({error}); pass objects whose "
            "state_dict() contains only plain values and tensors"
        ) from error


def _read_state(
    reader: CheckpointReader, files: Collection[str], names: Collection[str]
) -> dict[str, Any]:
    """Reads the saved states of the user's objects whose names are in ``names``.

    ``files`` contains the names of the files in the checkpoint that ``reader`` reads.
    """
    states: dict[str, Any] = {}
    if names and {PIPELINE_STATE, _FORMER_STATE} & {*files}:
        states = reader.read_values(PIPELINE_STATE, _FORMER_STATE)
    missing = [name for name in names if name not in states]
    if missing:
        present = ", ".join(states) or "none"
        raise CheckpointError(
            f"{reader.path} does not contain the state of {missing[0]!r} (it contains: "
            f"{present}); use the names under which the states were saved"
        )
    return states


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _without_lists(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a parameter group, without its parameters and their names."""
    # Older checkpoints contain the parameters' names among the options.
    return {key: value for key, value in group.items() if key not in PARAMETER_LISTS}


def _like(saved: Any, present: Any) -> Any:
    """Converts the ``saved`` value of an option to the type of ``present``, its current value."""
    if isinstance(present, torch.Tensor):
        return torch.full_like(present, saved)
    return tuple(saved) if isinstance(present, tuple) and isinstance(saved, Sequence) else saved
