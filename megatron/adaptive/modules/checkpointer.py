"""Saves and loads a pipeline by the names of its parameters, whoever holds them.

Nothing in a checkpoint knows of stages, ranks or replicas: any other pipeline of the same model
goes on from it. Replicas hold the same; the first of them writes, each rank what its stages have.
Running means of other replicas are not kept. Snapshots in memory hold the same as checkpoints.
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
from megatron.adaptive.modules.update import LossScale, Update

_FORMER_STATE = "state.pt"
_MODEL, _OPTIMIZER = "model.", "optimizer."
_PLAIN = (bool, int, float, str, type(None))
_REMEDY = "Free space there or name another folder"


class Checkpointer:
    """Saves and loads a rank's state; every rank has one, all of them call it together.

    Args:
        mesh: the job.
        model: the user's.
        held: parameters and buffers of this rank, by name.
        update: has optimizer and loss scale.

    Attributes:
        saver: writes checkpoints.
    """

    def __init__(
        self, mesh: Mesh, model: torch.nn.Module, held: Mapping[str, torch.Tensor], update: Update
    ) -> None:
        self._mesh = mesh
        self._update = update
        self._ranks = RankGroup(mesh.rank, mesh.control_group)
        self.saver = CheckpointSaver(mesh)
        passing = {  # buffers that the model's own state leaves out
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            for name in module._non_persistent_buffers_set
        }
        self._held = {name: one.detach() for name, one in held.items() if name not in passing}

    def save(
        self,
        folder: str | Path,
        head: Mapping[str, Any],
        *,
        is_behind: bool = False,
        keep: int | None = None,
        state: Mapping[str, Any],
    ) -> Path | None:
        """Write a checkpoint; returns its folder, ``None`` while it is written behind training.

        Args:
            folder: of checkpoints.
            head: of :meth:`head`.
            is_behind: let training go on meanwhile.
            keep: complete ones that stay, all where ``None``.
            state: the user's objects, by name.

        Raises:
            CheckpointError: it could not be written.
            ConfigError: ``keep`` is no number.
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
        """Prepares a folder of checkpoints for this job alone; see :func:`local_disk.prepare`.

        Args:
            folder: that is seen by all nodes.
            base: the folder on each node's own disk where those for it go first, ``None`` for none.
            keep: complete ones that stay in either, all in shared storage where ``None``.
        """
        shared = PipelineFolder(folder)
        self.saver.local = prepare(
            shared, self._mesh, _REMEDY, base, lambda: shared.latest() or 0, keep
        )
        return self.saver.local

    def apart(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return this rank's tensors by their names in a checkpoint, and what describes them.

        The tensors are those of now: they change with the next update.
        """
        states, plain = self._states()
        tensors = {
            **{_MODEL + name: one for name, one in self._held.items()},
            **{_OPTIMIZER + name: one for name, one in states.items()},
        }
        groups = [[self._options(group), names] for group, names in self._groups()]
        return tensors, {"kind": self._kind(), "groups": groups, "plain": plain}

    def is_buffer(self, name: str) -> bool:
        """Return whether a tensor of :meth:`apart` may change in a forward."""
        own = name.removeprefix(_MODEL)
        return own != name and own not in self._update.parameters

    def head(self, step: int, seed: int, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return what is the same on all ranks; see ``make_pipeline_manifest``.

        Raises:
            ConfigError: ``extra`` cannot be written.
        """
        try:
            json.dumps(extra)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"extra cannot be written as JSON ({error}): give plain values"
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
        """Read a checkpoint; returns its manifest. See :meth:`Pipeline.load`."""
        self.saver.finish()
        folders, given = PipelineFolder(folder), state or {}

        def load(step: int | None) -> dict[str, Any]:
            return self._load(folders, step, given, optimizer=optimizer, trust=trust)

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
        """Read the checkpoint of a step; returns its manifest."""
        ranks = self._ranks
        path, manifest = ranks.on_first(lambda: folders.open(step, trust=trust))
        ranks.together(lambda: require_seen(path, self._mesh))
        save_id, files = str(manifest.get("save_id", "")), manifest["files"]
        has_optimizer = optimizer and manifest["optimizer"] is not None
        about = path, int(manifest["step"]), save_id, files, manifest.get("blocks", {})
        with self.saver.reading(*about) as reader:
            states = self._read(reader, manifest if has_optimizer else None)
            content = ranks.together(lambda: _read_state(reader, files, state))
        if has_optimizer:
            self._restore_optimizer(states, manifest["options"])
        if self._update.scaler is not None and manifest["loss_scale"] is not None:
            self._update.scaler = LossScale(**manifest["loss_scale"])
        for name, one in state.items():
            one.load_state_dict(content[name])
        return manifest

    def _take(self, head: Mapping[str, Any], state: Mapping[str, Any]) -> TakenState:
        """Take the state of now apart."""
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
        """Read this rank's parameters and buffers in place, and the optimizer's state of them."""
        path, known = reader.path, reader.tensors

        def prepare() -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
            wanted = self._wanted(path, known)
            if manifest is None:
                return wanted, {}
            self._check_optimizer(path, manifest)
            return wanted, self._empty_states(known, manifest)

        wanted, states = self._ranks.together(prepare, name_ranks=False)
        wanted |= {
            f"{_OPTIMIZER}{name}.{key}": one
            for name, parts in states.items()
            for key, one in parts.items()
            if isinstance(one, torch.Tensor)
        }
        parts = [
            WantedPart(name=name, offset=(0,) * one.dim(), target=one)
            for name, one in wanted.items()
        ]
        self._ranks.together(lambda: reader.read(parts))
        return states

    def _kind(self) -> str | None:
        optimizer = self._update.optimizer
        return None if optimizer is None else type(optimizer).__name__

    def _states(self) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
        """Return the optimizer's tensors by ``name.key``, and its plain values by name."""
        tensors: dict[str, torch.Tensor] = {}
        plain: dict[str, dict[str, Any]] = {}
        if self._update.optimizer is None:
            return tensors, plain
        for name, parameter in self._update.parameters.items():
            for key, one in self._update.optimizer.state.get(parameter, {}).items():
                if isinstance(one, torch.Tensor):
                    tensors[f"{name}.{key}"] = one
                elif isinstance(one, _PLAIN):
                    plain.setdefault(name, {})[key] = one
                else:
                    raise CheckpointError(
                        f"the optimizer keeps {key!r} of {name} as a {type(one).__name__}: only "
                        "tensors and plain values can be saved"
                    )
        return tensors, plain

    @staticmethod
    def _options(group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a group of parameters that can be saved."""
        plain = {key: _plain(one) for key, one in group.items() if key != "params"}
        return {key: one for key, one in plain.items() if isinstance(one, (*_PLAIN, list))}

    def _groups(self) -> Iterator[tuple[dict[str, Any], list[str]]]:
        if self._update.optimizer is None:
            return
        names = {id(one): name for name, one in self._update.parameters.items()}
        for group in self._update.optimizer.param_groups:
            yield group, [names[id(one)] for one in group["params"]]

    def _wanted(self, path: Path, known: Mapping[str, SavedTensor]) -> dict[str, torch.Tensor]:
        """Return this rank's tensors by their names in the checkpoint, to be filled in place."""
        for name, one in self._held.items():
            saved = known.get(_MODEL + name)
            if saved is None or tuple(saved.size) != tuple(one.shape):
                has = "lacks it" if saved is None else f"has it with shape {list(saved.size)}"
                raise CheckpointError(
                    f"{path}: the model has {name} with shape {list(one.shape)}, the checkpoint "
                    f"{has}: load it into the model that was saved"
                )
        return {_MODEL + name: one for name, one in self._held.items()}

    def _check_optimizer(self, path: Path, manifest: Mapping[str, Any]) -> None:
        kind = self._kind()
        if self._update.parameters and kind is None:
            raise ConfigError(
                f"{path} holds the state of an optimizer: call set_optimizer before load, or give "
                "optimizer=False"
            )
        if kind not in (None, manifest["optimizer"]):
            raise CheckpointError(
                f"{path} holds the state of {manifest['optimizer']}, the optimizer is {kind}: use "
                "the same, or give optimizer=False"
            )
        for _, names in self._groups():
            options = [manifest["options"].get(name) for name in names]
            unequal = [n for n, one in zip(names, options, strict=True) if one != options[0]]
            if unequal:
                raise CheckpointError(
                    f"{path}: {names[0]} and {unequal[0]} were in groups with other options, the "
                    f"optimizer has them in one of {len(names)}: make the same groups"
                )

    def _empty_states(
        self, known: Mapping[str, SavedTensor], manifest: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Return room for the optimizer's state of this rank's parameters, plain values filled."""
        states: dict[str, dict[str, Any]] = {
            name: dict(manifest["states"].get(name, {})) for name in self._update.parameters
        }
        for full, saved in known.items():
            if not full.startswith(_OPTIMIZER):
                continue
            name, key = full[len(_OPTIMIZER) :].rsplit(".", 1)
            if name in states:
                parameter = self._update.parameters[name]
                alike = tuple(saved.size) == tuple(parameter.shape) and parameter.dim()
                states[name][key] = torch.empty(
                    saved.size, dtype=saved.dtype, device=parameter.device if alike else "cpu"
                )
        return states

    def _restore_optimizer(
        self, states: Mapping[str, Mapping[str, Any]], options: Mapping[str, Mapping[str, Any]]
    ) -> None:
        optimizer = self._update.optimizer
        if optimizer is None:
            return
        whole = optimizer.state_dict()
        whole["state"] = {}
        for (group, names), saved in zip(self._groups(), whole["param_groups"], strict=True):
            for name, number in zip(names, saved["params"], strict=True):
                if states[name]:
                    whole["state"][number] = dict(states[name])
            for key, one in (options.get(names[0], {}) if names else {}).items():
                saved[key] = _like(one, group.get(key))
        optimizer.load_state_dict(whole)


class PipelineState(SnapshotState):
    """Takes one rank's state apart for snapshots in memory; see ``SnapshotState``.

    Args:
        checkpointer: takes it apart.
        head: returns what is the same on all ranks, see :meth:`Checkpointer.head`.
        state: the user's objects that are saved as well, by name.
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
        # Buffers are copied at once, for a forward may change them.
        is_buffer = self._checkpointer.is_buffer
        copied = {name: one.clone() if is_buffer(name) else one for name, one in tensors.items()}
        return _pieces(copied), extra

    def head(self) -> Mapping[str, Any]:
        return {"has_common": True}

    def is_changed(self) -> bool:
        """Return whether tensors came: optimizers make their state with the first update."""
        return _layout(self._checkpointer.apart()[0]) != self._layout


def _pieces(tensors: Mapping[str, torch.Tensor]) -> dict[Part, Piece]:
    """Return whole tensors as parts of a checkpoint."""
    return {
        (name, (0,) * one.dim()): Piece(tensor=one, size=list(one.shape), whole=list(one.shape))
        for name, one in tensors.items()
    }


def _layout(tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    return [(name, one.shape, one.dtype) for name, one in tensors.items()]


def _state_bytes(state: Mapping[str, Any]) -> bytes:
    """Return a file of what the user's objects hold."""
    try:
        return plain_values.dumps({name: one.state_dict() for name, one in state.items()})
    except TypeError as error:
        raise ConfigError(
            f"state: what {', '.join(state)} hold cannot be read again ({error}): give objects"
            " whose state_dict() has plain values and tensors alone"
        ) from error


def _read_state(
    reader: CheckpointReader, files: Collection[str], names: Collection[str]
) -> dict[str, Any]:
    states: dict[str, Any] = {}
    if names and {PIPELINE_STATE, _FORMER_STATE} & {*files}:
        states = reader.read_values(PIPELINE_STATE, _FORMER_STATE)
    missing = [name for name in names if name not in states]
    if missing:
        has = ", ".join(states) or "none"
        raise CheckpointError(
            f"{reader.path}: it has no state of {missing[0]!r} (it has: {has}): give the names that"
            " it was saved with"
        )
    return states


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _like(saved: Any, present: Any) -> Any:
    """Give an option of a checkpoint the type that the optimizer has for it."""
    if isinstance(present, torch.Tensor):
        return torch.full_like(present, saved)
    return tuple(saved) if isinstance(present, tuple) and isinstance(saved, Sequence) else saved
