"""Options of the commands on whatever lies on disk: verify, repair."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True)
class Verify:
    """Check everything that tsae wrote: is it as it was written, is it complete, does it rest on what is there now?

    Prints a table, and for what is not intact the command that makes it again. Exit status 2 if anything is not intact.
    """

    paths: Positional[tuple[Path, ...]] = (Path(),)
    """Files or folders: a store, an SAE, features, a diff, rollouts, …, or the folder of a whole `tsae run` or
    `tsae demo`."""
    json: Path | None = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""


@dataclass(frozen=True)
class Repair:
    """Make again what `tsae verify` finds damaged, missing, unfinished or outdated, in the order of dependence.

    What is damaged is removed only when its replacement is complete. What is intact stays. Of a store only damaged
    shards are captured again.
    """

    paths: Positional[tuple[Path, ...]] = (Path(),)
    """Files or folders, as for `tsae verify`."""
    dry_run: bool = False
    """Print what would be done."""
    trust: bool = False
    """Also run recorded commands that name functions (module:function) or addresses. Commands come from files in these
    folders: look at them first (--dry-run) if the folders are a stranger's."""
