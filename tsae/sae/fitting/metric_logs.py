"""Metrics to Weights & Biases, trackio or TensorBoard, where one is named."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from tsae.errors import TsaeError

_NEEDS = {"wandb": "wandb", "trackio": "trackio", "tensorboard": "torch.utils.tensorboard"}
"""By name: the module."""


class MetricLog(Protocol):
    """Takes the metrics of one training."""

    def log(self, metrics: Mapping[str, float], step: int) -> Any:
        """Take the metrics of a step."""
        ...

    def finish(self) -> Any:
        """The training is over."""
        ...


def open_log(target: str, config: Mapping[str, Any], name: str | None, id: str | None) -> MetricLog:
    """A log of one training.

    Args:
        target: `TrainingConfig.log_to`.
        config: JSON to show beside the metrics.
        name: of the run; the tool's choice by default.
        id: of the training: if it was logged before, its run goes on; a new run by default. TensorBoard and trackio
            know a run by its name.

    Raises:
        TsaeError: where the package is missing.
    """
    tool, _, where = target.partition(":")
    try:
        module = import_module(_NEEDS[tool])
    except ImportError as error:
        raise TsaeError(
            f"logging to {target} needs the package {tool}",
            where="TrainingConfig.log_to",
            fix=f"Install it with `pip install {tool}`.",
        ) from error
    if tool == "tensorboard":
        return _TensorBoard(module, Path(where) / (name or "sae"), config)
    settings: dict[str, Any] = {"project": where, "config": dict(config), "name": name}
    settings["resume"] = "allow" if id else "never"
    if tool == "trackio":
        return module.init(**settings)
    # Several trainings of one process are several runs.
    settings |= {"id": id, "resume": settings["resume"] if id else None, "reinit": "create_new"}
    return module.init(**settings)


class _TensorBoard:
    """Event files of one run."""

    def __init__(self, module: Any, folder: Path, config: Mapping[str, Any]) -> None:
        self._writer = module.SummaryWriter(str(folder))
        self._writer.add_text("config", "\n\n".join(f"{name}: {value}" for name, value in config.items()))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()
