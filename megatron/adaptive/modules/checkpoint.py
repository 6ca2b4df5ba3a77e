"""Saves and loads a pipeline by the names of its parameters, whoever holds them.

Nothing in a checkpoint knows of stages, ranks or replicas: any other pipeline of the same model
goes on from it. Replicas hold the same; the first of them writes, each rank what its stages have.
Running means of other replicas are not kept.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron.adaptive.errors import AdaptiveError, CheckpointError, ConfigError
from megatron.adaptive.modules.checkpoint_folder import (
    PipelineFolder,
    read_manifest,
)
from megatron.adaptive.modules.mesh import Mesh
from megatron.adaptive.modules.saving import STATE, Saver, all_see, first_line, on_first
from megatron.adaptive.modules.update import LossScale, Update

__all__ = ["Checkpointer"]

_MODEL, _OPTIMIZER = "model.", "optimizer."
_PLAIN = (bool, int, float, str, type(None))


class Checkpointer:
    """Takes a rank's state apart, and loads; every rank has one, all of them call it together.

    Args:
        mesh: the job.
        model: the user's.
        held: parameters and buffers of this rank, by name.
        update: has optimizer and loss scale.

    Attributes:
        saver: writes checkpoints.
    """

    def __init__(
        self,
        mesh: Mesh,
        model: torch.nn.Module,
        held: Mapping[str, torch.Tensor],
        update: Update,
    ) -> None:
        self._mesh = mesh
        self._update = update
        self.saver = Saver(mesh, self.apart)
        passing = set(_not_saved(model))
        self._held = {name: one.detach() for name, one in held.items() if name not in passing}

    def apart(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return this rank's tensors by their names in a checkpoint, and what it tells of them.

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
        """Whether a tensor of :meth:`apart` may change in a forward."""
        own = name.removeprefix(_MODEL)
        return own != name and own not in self._update.parameters

    def head(self, step: int, seed: int, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return what all ranks would say of a checkpoint of now; see ``make_manifest``.

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
    ) -> dict[str, Any]:
        """Read a checkpoint; returns its manifest. See :meth:`Pipeline.load`."""
        self.saver.finish()
        path: Path = on_first(self._mesh, lambda: PipelineFolder(folder).find(step), f"{folder}")
        all_see(self._mesh, path)
        manifest: dict[str, Any] = on_first(self._mesh, lambda: read_manifest(path), f"{path}")
        has_optimizer = optimizer and manifest["optimizer"] is not None
        with self.saver.reading(path, manifest) as near:
            states = self._read(path, near, manifest if has_optimizer else None)
            content = _read_state(path, near, manifest, state) if state else {}
        if has_optimizer:
            self._restore_optimizer(states, manifest["options"])
        if self._update.scaler is not None and manifest["loss_scale"] is not None:
            self._update.scaler = LossScale(**manifest["loss_scale"])
        for name, one in (state or {}).items():
            one.load_state_dict(content[name])
        return manifest

    def _read(
        self, path: Path, near: Path, manifest: Mapping[str, Any] | None
    ) -> dict[str, dict[str, Any]]:
        """Read this rank's parameters and buffers in place, and the optimizer's state of them.

        Args:
            path: of the checkpoint.
            near: where its files are read.
            manifest: of it, where the optimizer's state is wanted.
        """
        reader = FileSystemReader(near)
        wanted: dict[str, torch.Tensor] = {}
        states: dict[str, dict[str, Any]] = {}
        problem: AdaptiveError | None = None
        try:
            known = {
                name: one
                for name, one in reader.read_metadata().state_dict_metadata.items()
                if hasattr(one, "size")
            }
            wanted = self._wanted(path, known)
            if manifest is not None:
                self._check_optimizer(path, manifest)
                states = self._empty_states(known, manifest)
        except AdaptiveError as error:
            problem = error
        except Exception as error:  # a broken file may raise anything
            problem = CheckpointError(f"{path}: cannot be read: {first_line(error)}")
        self._raise_any(problem)
        wanted.update(
            (f"{_OPTIMIZER}{name}.{key}", one)
            for name, parts in states.items()
            for key, one in parts.items()
            if isinstance(one, torch.Tensor)
        )
        try:
            with torch.no_grad():
                dcp.load(
                    wanted,
                    storage_reader=reader,
                    planner=DefaultLoadPlanner(),
                    process_group=self._mesh.control_group,
                )
        except (CheckpointException, Exception) as error:
            raise CheckpointError(f"{path}: loading failed: {first_line(error)}") from error
        return states

    def _raise_any(self, problem: AdaptiveError | None) -> None:
        """Raise on all ranks what one of them found."""
        found = [one for one in self._mesh.gather(problem) if one is not None]
        if problem is not None:
            raise problem
        if found:
            raise found[0]

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

    def _wanted(self, path: Path, known: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return this rank's tensors by their names in the checkpoint, to be filled in place."""
        for name, one in self._held.items():
            told = known.get(_MODEL + name)
            if told is None or tuple(told.size) != tuple(one.shape):
                has = "lacks it" if told is None else f"has it with shape {list(told.size)}"
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
        self, known: Mapping[str, Any], manifest: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Return room for the optimizer's state of this rank's parameters, plain values filled."""
        states: dict[str, dict[str, Any]] = {
            name: dict(manifest["states"].get(name, {})) for name in self._update.parameters
        }
        for full, told in known.items():
            if not full.startswith(_OPTIMIZER):
                continue
            name, key = full[len(_OPTIMIZER) :].rsplit(".", 1)
            if name in states:
                parameter = self._update.parameters[name]
                alike = tuple(told.size) == tuple(parameter.shape) and parameter.dim()
                states[name][key] = torch.empty(
                    told.size,
                    dtype=told.properties.dtype,
                    device=parameter.device if alike else "cpu",
                )
        return states

    def _restore_optimizer(
        self, states: Mapping[str, Mapping[str, Any]], options: Mapping[str, Mapping[str, Any]]
    ) -> None:
        optimizer = self._update.optimizer
        if optimizer is None:
            return
        told = optimizer.state_dict()
        told["state"] = {}
        for (group, names), saved in zip(self._groups(), told["param_groups"], strict=True):
            for name, number in zip(names, saved["params"], strict=True):
                if states[name]:
                    told["state"][number] = dict(states[name])
            for key, one in (options.get(names[0], {}) if names else {}).items():
                saved[key] = _like(one, group.get(key))
        optimizer.load_state_dict(told)


def _read_state(
    path: Path, near: Path, manifest: Mapping[str, Any], names: Collection[str]
) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if STATE in manifest["files"]:
        told = torch.load(near / STATE, weights_only=True, map_location="cpu")
    missing = [name for name in names if name not in told]
    if missing:
        has = ", ".join(told) or "none"
        raise CheckpointError(
            f"{path}: it has no state of {missing[0]!r} (it has: {has}): give the names that it was"
            " saved with"
        )
    return told


def _not_saved(model: torch.nn.Module) -> Iterator[str]:
    """Yield the buffers that the model's own state leaves out."""
    for prefix, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            yield f"{prefix}.{name}" if prefix else name


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _like(saved: Any, present: Any) -> Any:
    """Give an option of a checkpoint the type that the optimizer has for it."""
    if isinstance(present, torch.Tensor):
        return torch.full_like(present, saved)
    return tuple(saved) if isinstance(present, tuple) and isinstance(saved, Sequence) else saved
