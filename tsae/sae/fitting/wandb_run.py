"""Metrics to Weights & Biases, where a project is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tsae.errors import TsaeError


def start_wandb(project: str, config: Mapping[str, Any], name: str | None, id: str | None) -> Any:
    """A W&B run.

    Args:
        project: its name.
        config: JSON to show beside the metrics.
        name: of the run; W&B's choice by default.
        id: a run of this id, if there is one, goes on; a new run by default.

    Raises:
        TsaeError: where the package is missing.
    """
    try:
        import wandb
    except ImportError as error:
        raise TsaeError(
            f"logging to the W&B project {project!r} needs the package wandb",
            where="TrainingConfig.wandb_project",
            fix="Install it with `pip install wandb`.",
        ) from error
    settings: dict[str, Any] = {"project": project, "config": dict(config), "name": name, "id": id}
    # Several trainings of one process are several runs.
    return wandb.init(**settings, resume="allow" if id else None, reinit="create_new")
