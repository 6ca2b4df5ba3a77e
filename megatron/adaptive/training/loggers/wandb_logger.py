"""Provides the logger ``wandb``, for Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.data.tokenizer import need_package
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.training.logger import Logger


class WeightsAndBiases(Logger):
    """Logs to Weights & Biases, online or, with ``WANDB_MODE=offline``, to files."""

    name = "wandb"
    flag = "wandb_project"

    def __init__(self, cfg: TrainerConfig) -> None:
        self._package = need_package("wandb", "--wandb-project", "trace")
        settings = cfg.logging
        save = cfg.checkpoint.save
        folder = settings.wandb_save_dir or (None if save is None else str(Path(save, "wandb")))
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        try:
            self._run = self._package.init(
                project=settings.wandb_project,
                entity=settings.wandb_entity,
                name=settings.wandb_exp_name,
                dir=folder,
                config=cfg.to_dict(),
            )
        # wandb raises errors of many types, for example if there is no account or the server is
        # unreachable.
        except Exception as error:
            raise ConfigError(
                f"--wandb-project {settings.wandb_project}: Weights & Biases rejected "
                f"the project ({' '.join(str(error).split())}); run 'wandb login', or set "
                "WANDB_MODE=offline"
            ) from None

    def scalar(self, tag: str, value: float, step: int) -> None:
        self._run.log({tag: value}, step=step)

    def picture(self, path: Path, step: int) -> None:
        self._run.log({"pipeline": self._package.Image(str(path))}, step=step)

    def note(self, name: str, content: Any) -> None:
        columns = list(dict.fromkeys(key for entry in content for key in entry))
        rows = [[entry.get(key) for key in columns] for entry in content]
        self._run.log({name: self._package.Table(columns, rows)}, commit=False)

    def close(self) -> None:
        self._run.finish()
