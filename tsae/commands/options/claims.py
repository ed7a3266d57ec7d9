"""Options of the command claims."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


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
