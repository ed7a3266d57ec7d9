"""Format: how the log of one trainer is recognised and read."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entries.entry import Parser
from tsae.rollouts.logs.entries.fields import Row
from tsae.rollouts.logs.on_disk.log_files import kind_of

TABLES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Format:
    """One trainer's way of logging rollouts."""

    name: str
    title: str
    read: Parser
    fits: Callable[[Row, ImportConfig], bool]
    """Whether a row has its columns."""
    file: re.Pattern[str] | None = None
    """Matches the path of its files, with named groups step, run and subset; None if names say nothing."""
    a_file_a_step: bool = False
    """A run has one file a step: two are an error."""
    synchronous: bool = True
    """Whether the weights that sampled for a step are those right before its update."""
    validates: Callable[[Path], bool] | None = None
    """Whether a file is a validation's, by its name."""
    suffixes: tuple[str, ...] = TABLES
    """Of its files, by `kind_of`."""
    cut: bool = True
    """Whether a file can be read from any of its lines: nothing is remembered from one line to the next."""

    def takes(self, file: Path, row: Row, config: ImportConfig) -> bool:
        """Whether a file with this first row may be its."""
        return kind_of(file) in self.suffixes and self.fits(row, config)


def has(*columns: str) -> Callable[[Row, ImportConfig], bool]:
    """Whether a row has all of these columns."""
    return lambda row, config: set(columns) <= row.keys()
