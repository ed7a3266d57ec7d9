"""Options of the commands on whole runs: run, watch, demo, claims."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from tsae.config import DemoConfig, RunConfig, WatchConfig


@dataclass(frozen=True)
class Run:
    """Run the whole pipeline on a training run: from its checkpoints and rollout log to a report.

    Every stage writes a folder and prints what it chose. Run the same command again to resume.
    """

    config: Annotated[RunConfig, arg(name="")]
    json: Path | None = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""


@dataclass(frozen=True)
class Watch:
    """Follow a training that goes on: analyse its new checkpoints and log steps, and write the page anew.

    The folder --to is that of `tsae run`, and so are the options. Every update prints one line. If the command is
    interrupted, give it again: it goes on. Samples are not attributed meanwhile.
    """

    config: Annotated[RunConfig, arg(name="")]
    watching: Annotated[WatchConfig, arg(name="")] = field(default_factory=WatchConfig)


@dataclass(frozen=True)
class Demo:
    """Run the whole pipeline on the shipped arithmetic checkpoints: a table of findings and a report."""

    config: Annotated[DemoConfig, arg(name="")] = field(default_factory=DemoConfig)
    open: bool = False
    """Open the report in the browser."""


@dataclass(frozen=True)
class Claims:
    """Ask a run what it shows of the literature's claims about sample difficulty.

    Every claim gets a verdict with its effects and intervals, or a line on what the run lacks and how to add it. The
    result is kept as claims.json in the run's folder, where `tsae report` and `tsae serve` find it.
    """

    run: Positional[Path]
    """Folder that `tsae run`, `tsae watch` or `tsae demo` wrote."""
    only: tuple[str, ...] = ()
    """Letters of the claims to test; by default all. Some alone are not kept in the folder."""
    check: str | None = None
    """module:function (prompt, response) -> whether each step of the response is right, for the claims on steps, such
    as tsae.testbed.classes:right_steps."""
    json: Path | None = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""
