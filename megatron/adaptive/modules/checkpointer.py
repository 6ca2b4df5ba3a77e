"""Saves and loads checkpoints of a pipeline. Tensors are saved under their names in the model.

A checkpoint does not depend on the number of stages, ranks or replicas, so any other pipeline of
the same model can continue from it. All replicas have the same parameters, so only the ranks of the
first replica save them. Buffers may differ between replicas, such as the running means of batch
normalization; the first replica's buffers are saved. Snapshots in memory contain the same state as
checkpoints.
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
    """Saves and loads this rank's part of a checkpoint. All ranks must call the methods together.

    Args:
        mesh: Replica and pipeline position of this process, and its process groups.
        model: The user's whole model. Its non-persistent buffers are not saved.
        held: Parameters and buffers that this rank keeps, by name in the model.
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
        # Do not save non-persistent buffers, which torch's state_dict() does not contain either.
        not_saved = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            for name in module._non_persistent_buffers_set
        }
        self._not_saved = not_saved
        # Keep a reference to this dictionary, because parameters that move between ranks are
        # replaced in it.
        self._all_held = held

    @property
    def _held(self) -> dict[str, torch.Tensor]:
        """Returns the parameters and buffers of this rank that checkpoints contain, by name."""
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
        """Writes a checkpoint and returns its folder, or ``None`` if a thread is still writing it.

        Args:
            folder: Folder that contains the checkpoints of the run.
            head: Step, seed, loss scale and user values from :meth:`head`.
            is_behind: Whether a background thread writes the files while training continues.
            keep: Number of newest complete checkpoints to keep; ``None`` for all.
            state: User objects with a ``state_dict`` method whose states are saved, by name.

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
        """Reserves the checkpoint folder for this job, and also the local folder if there is one.

        Returns the object that manages the local folder, or ``None`` if there is no local folder.

        Args:
            folder: Folder of checkpoints, visible to all nodes.
            base: Folder on each node's local disk where checkpoints are written first; ``None`` to
                write to ``folder`` directly.
            keep: Number of newest complete checkpoints to keep in each of the two folders; ``None``
                keeps all in ``folder``.
        """
        shared = PipelineFolder(folder)
        self.saver.local = prepare(
            shared, self._mesh, _REMEDY, base, lambda: shared.latest() or 0, keep
        )
        return self.saver.local

    def apart(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Returns this rank's tensors by their names in a checkpoint, and the rest of its state.

        The rest is the optimizer's type, the options of each parameter group, and the optimizer's
        values that are not tensors.

        The tensors are not copied, so the next optimizer step changes them.
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

        Forward passes may change buffers, so a snapshot must copy them immediately.
        """
        model_name = name.removeprefix(_MODEL)
        return model_name != name and model_name not in self._update.parameters

    def head(self, step: int, seed: int, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns the entries of a checkpoint's manifest that are equal on all ranks.

        Args:
            step: Number of training steps so far.
            seed: Seed of the random numbers that the model draws, for example in dropout.
            extra: Numbers, strings, lists and dictionaries to save, such as a scheduler's state.

        Raises:
            ConfigError: If ``extra`` cannot be written as JSON.
        """
        try:
            json.dumps(extra)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"extra cannot be written as JSON ({error}); use plain values"
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
        """Reads a checkpoint and returns its manifest. See ``Pipeline.load`` for the arguments."""
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

        The user's objects in ``state`` are set to their saved states. The arguments ``optimizer``
        and ``trust`` say whether to load the optimizer's state, and whether to accept checkpoints
        that are pickles.
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
        """Returns this rank's current state as an object that ``saver`` can write.

        The entries of ``head`` become part of the checkpoint's manifest. The states of the user's
        objects in ``state`` are saved only by the first rank.
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
            reader: Opened checkpoint from which tensors are read.
            manifest: Manifest of the checkpoint; ``None`` to skip the optimizer's state.

        Returns:
            Optimizer state by parameter name. Each parameter's state maps keys such as ``exp_avg``
            to values.
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
        """Returns the optimizer's state as two dicts: one of tensors, and one of all other values.

        The keys of the first dict join a parameter's name and a key of its state, such as
        ``weight.exp_avg``. The second dict maps each parameter's name to a dict of its values by
        key.
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
                        f"the optimizer keeps {key!r} of {name} as a {type(value).__name__}; only "
                        "tensors and plain values can be saved"
                    )
        return tensors, plain

    @staticmethod
    def _options(group: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options of the parameter group ``group`` that checkpoints can contain."""
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
        """Returns this rank's parameters and buffers by their names in the checkpoint ``path``.

        Raises:
            CheckpointError: If one of these tensors is missing in ``saved_tensors`` or has a
                different shape there.
        """
        for name, tensor in self._held.items():
            saved = saved_tensors.get(_MODEL + name)
            if saved is None or tuple(saved.size) != tuple(tensor.shape):
                has = "lacks it" if saved is None else f"has it with shape {list(saved.size)}"
                raise CheckpointError(
                    f"{path}: the model has {name} with shape {list(tensor.shape)}, but the "
                    f"checkpoint {has}; load it into the model that was saved"
                )
        return {_MODEL + name: tensor for name, tensor in self._held.items()}

    def _check_optimizer(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Checks that the optimizer has the type and parameter groups that ``manifest`` lists.

        ``path`` is the path of the checkpoint, for error messages.
        """
        kind = self._kind()
        # A rank whose parameters are all frozen has no optimizer.
        if kind is None and any(p.requires_grad for p in self._update.parameters.values()):
            raise ConfigError(
                f"{path} has the state of an optimizer; call set_optimizer before load, or pass "
                "optimizer=False"
            )
        if kind not in (None, manifest["optimizer"]):
            raise CheckpointError(
                f"{path} has the state of {manifest['optimizer']}, but the optimizer is {kind};"
                " use the same optimizer, or pass optimizer=False"
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
        """Returns optimizer state for this rank, with empty tensors to read saved values into.

        The names and shapes of the tensors come from ``saved_tensors``.

        Values that are not tensors are taken from ``manifest``.
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
    """Provides a rank's state for snapshots, which are in-memory copies that survive a crash.

    Args:
        checkpointer: Object that reads and writes the rank's state.
        head: Function that calls :meth:`Checkpointer.head` and returns its result.
        state: Objects of the user whose ``state_dict`` is also saved, by name.
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
        """Returns whether tensors were added, removed or reshaped since the last :meth:`take`.

        A changed dtype counts too.

        For example, an optimizer's first step adds tensors.
        """
        return _layout(self._checkpointer.apart()[0]) != self._layout


def _pieces(tensors: Mapping[str, torch.Tensor]) -> dict[Part, Piece]:
    """Returns a checkpoint entry for each tensor. Each entry contains the whole tensor."""
    return {
        (name, (0,) * tensor.dim()): Piece(
            tensor=tensor, size=list(tensor.shape), whole=list(tensor.shape)
        )
        for name, tensor in tensors.items()
    }


def _layout(tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]


def _state_bytes(state: Mapping[str, Any]) -> bytes:
    """Returns the content of the checkpoint file with the states of the objects in ``state``."""
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
    """Reads the saved states of the user's objects that are listed in ``names``.

    ``reader`` reads the checkpoint, which contains ``files``.
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
    # Older checkpoints also contain the parameters' names in the options, so remove these too.
    return {key: value for key, value in group.items() if key not in PARAMETER_LISTS}


def _like(saved: Any, present: Any) -> Any:
    """Converts ``saved``, an option's value, to the type of ``present``, its current value."""
    if isinstance(present, torch.Tensor):
        return torch.full_like(present, saved)
    return tuple(saved) if isinstance(present, tuple) and isinstance(saved, Sequence) else saved
