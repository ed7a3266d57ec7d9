"""Lines that hold a batch: an object of columns, each with a value a trajectory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entry import Entry, Row, Unusable, as_its_trainer_writes, columns_to_keep
from tsae.rollouts.logs.files import HalfLine, LogFile


def each_of_a_batch(
    file: LogFile, config: ImportConfig, read: Callable[[list[Row], str], Iterator[Entry | Unusable]]
) -> Iterator[Entry | Unusable]:
    """The trajectories of every line of a file; `read` gets a line's rows and where it is.

    It yields one for every row, in order; their places are made more exact, and columns kept, here.
    """
    try:
        for line, columns in file.rows():
            where = file.place(line)
            rows = rows_of(columns, where)
            for row, found in zip(rows, as_its_trainer_writes(read(rows, where), where), strict=True):
                if isinstance(found, Entry):
                    found.number, found.extra = line, columns_to_keep(row, config) | found.extra
                yield found
    except HalfLine as half:
        yield Unusable("cut", half.what, where=str(half.where), fix="Correct or delete that line")


def rows_of(columns: Row, where: str) -> list[Row]:
    """The rows of an object of columns; a single row of values is itself.

    Raises:
        TsaeError: where columns are of different lengths.
    """
    lists = {name: values for name, values in columns.items() if isinstance(values, list)}
    if not lists:
        return [columns]
    lengths = {name: len(values) for name, values in lists.items()}
    if len(lists) < len(columns) or len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} {lengths.get(name, 'a single value')}" for name in columns)
        raise TsaeError(
            f"a line of columns, which are of different lengths ({shown})",
            where=where,
            fix="Correct or delete that line.",
        )
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def one_by_one(rows: Sequence[Row], where: str, read: Callable[[Row, int, str], Entry]) -> Iterator[Entry | Unusable]:
    """What `read` makes of the rows of a line; it gets a row, its number in the line from 0 on, and where it is."""
    for index, row in enumerate(rows):
        try:
            yield read(row, index, place_in(where, index))
        except Unusable as unusable:
            yield unusable


def place_in(where: str, index: int) -> str:
    """Where a row of a line of columns is; rows are shown counted from 1."""
    return f"{where}, trajectory {index + 1}"
