"""Provides the logger ``mlflow``, for MLflow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.data.tokenizer import need_package
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.training.logger import Logger


class MLflow(Logger):
    """Logs to an MLflow tracking server or folder."""

    name = "mlflow"
    flag = "mlflow_experiment"

    def __init__(self, cfg: TrainerConfig) -> None:
        self._package = need_package("mlflow", "--mlflow-experiment", "trace")
        settings = cfg.logging
        try:
            if settings.mlflow_tracking_uri is not None:
                self._package.set_tracking_uri(settings.mlflow_tracking_uri)
            self._package.set_experiment(settings.mlflow_experiment)
            self._package.start_run(run_name=settings.mlflow_run_name)
            self._package.log_dict(cfg.to_dict(), "settings.json")
        # MLflow raises errors of many types, for example if the server is unreachable.
        except Exception as error:
            raise ConfigError(
                f"--mlflow-experiment {settings.mlflow_experiment}: MLflow rejected the "
                f"experiment ({' '.join(str(error).split())}); check --mlflow-tracking-uri"
            ) from None

    def scalar(self, tag: str, value: float, step: int) -> None:
        name = re.sub(r"[^\w\-./ ]", "-", tag)
        self._package.log_metric(name, value, step=step, synchronous=False)

    def picture(self, path: Path, step: int) -> None:
        self._package.log_artifact(str(path))

    def note(self, name: str, content: Any) -> None:
        self._package.log_dict(content, f"{name}.json")

    def close(self) -> None:
        self._package.flush_async_logging()
        self._package.end_run()
