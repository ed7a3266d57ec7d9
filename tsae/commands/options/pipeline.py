"""Options of the commands that run every stage: run, demo."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from tsae.config import DemoConfig, RunConfig


@dataclass(frozen=True)
class Run:
    """The whole pipeline on what a trainer left: from the checkpoints and the rollout log of a run to a report.

    Every stage is a folder and says what it decided; the same command goes on where it was interrupted.
    """

    config: Annotated[RunConfig, arg(name="")]
    json: Path | None = None
    """File for the results as JSON; - for standard output, and text then goes to standard error."""


@dataclass(frozen=True)
class Demo:
    """The whole pipeline on the shipped arithmetic checkpoints: a findings table and a report."""

    config: Annotated[DemoConfig, arg(name="")] = field(default_factory=DemoConfig)
    open: bool = False
    """Open the report in the browser."""
