"""Format: how the log of one trainer is recognised, and how its rows become entries."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entries.entry import Entry, Parser, Unusable
from tsae.rollouts.logs.entries.fields import Fields, Row, read_list
from tsae.rollouts.logs.on_disk.log_files import OTHER_TABLES, HalfLine, LogFile, kind_of

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
    suffixes: tuple[str, ...] = (*TABLES, *OTHER_TABLES)
    """Of its files, by `kind_of`."""
    cut: bool = True
    """Whether a file can be read from any of its lines: nothing is remembered from one line to the next."""

    def takes(self, file: Path, row: Row, config: ImportConfig) -> bool:
        """Whether a file with this first row may be its."""
        return kind_of(file) in self.suffixes and self.fits(row, config)


def has(*columns: str) -> Callable[[Row, ImportConfig], bool]:
    """Whether a row has all of these columns."""
    return lambda row, config: set(columns) <= row.keys()


EntryOf = Callable[[Fields], Entry | None]
"""The entry of a trajectory; None for one that does not belong to what was asked for."""
Split = Callable[[Fields], Iterable[Fields | Unusable]]
"""The trajectories of a row."""


def by_row(entry: EntryOf, split: Split | None = None) -> Parser:
    """A parser that reads every row alike.

    Args:
        entry: see `EntryOf`.
        split: see `Split`; by default a row is a trajectory.
    """
    return lambda file, config: each_row(file, config, entry, split)


def each_row(
    file: LogFile, config: ImportConfig, entry: EntryOf, split: Split | None = None
) -> Iterator[Entry | Unusable]:
    """The trajectories of every row of a file.

    Raises:
        TsaeError: for a row that its trainer does not write, in place of Python's own error about the value.
    """
    try:
        for number, row in file.rows():
            fields = Fields(row, file.place(number), file, config, number)
            where = fields.where
            try:
                for part in [fields] if split is None else split(fields):
                    if isinstance(part, Unusable):
                        yield part
                        continue
                    where = part.where
                    yield from _entry_of(part, entry)
            except Unusable as unusable:
                yield unusable
            # RuntimeError: PyTorch's, where a tensor of a .pt file stands for a number or a list.
            except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RuntimeError) as error:
                what = f"is not built as its trainer writes it ({type(error).__name__}: {error})"
                raise TsaeError(what, where=where, fix="Correct or drop that row.") from error
    except HalfLine as half:
        yield Unusable("cut", half.what, where=str(half.where), fix="Correct or delete that line")


def _entry_of(part: Fields, entry: EntryOf) -> Iterator[Entry | Unusable]:
    try:
        found = entry(part)
    except Unusable as unusable:
        yield unusable
        return
    if found is not None:
        found.number, found.extra = part.line, part.kept() | found.extra
        yield found


def each_response(fields: Fields, column: str, aligned: Iterable[str], whole: Iterable[str] = ()) -> list[Fields]:
    """The trajectories of a row that holds all responses to a problem, or a batch.

    Args:
        fields: of the row.
        column: the list of responses.
        aligned: columns that hold a list with a value for each response, or nothing.
        whole: columns that are not divided. Any other list of as many values is.

    Raises:
        TsaeError: for an aligned column that is not a list of as many values.
    """
    row: Row = {name: read_list(value) if name in (column, *aligned) else value for name, value in fields.row.items()}
    n = len(row[column])
    for name in aligned:
        value = row.get(name)
        if value is not None and (not isinstance(value, list) or len(value) != n):
            found = len(value) if isinstance(value, list) else f"a {type(value).__name__}"
            what = f"{n} values in {column} but {found} in {name}"
            raise fields.error(what, "Correct or drop that row: one value for each response.")
    lists = {name for name, value in row.items() if isinstance(value, list) and len(value) == n} - set(whole)
    return [
        replace(
            fields,
            row={name: value[index] if name in lists else value for name, value in row.items()},
            where=f"{fields.where}, trajectory {index + 1}",
            index=index,
        )
        for index in range(n)
    ]


def each_of_a_batch(fields: Fields) -> list[Fields]:
    """The trajectories of a line that is an object of columns; a line of single values is one trajectory."""
    first = next((name for name, value in fields.row.items() if isinstance(value, list)), None)
    return [fields] if first is None else each_response(fields, first, fields.row)
