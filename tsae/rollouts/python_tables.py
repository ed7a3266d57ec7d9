"""Tables of Python as a log: DataFrames, Arrow's and polars' tables, data sets of Hugging Face, columns, and rows.

A table becomes one Parquet file, which is read as any other log. Errors name the user's own columns, rows and labels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tsae.errors import TsaeError

NAME = "the table"
_FIX = (
    "Give a DataFrame (pandas, polars), a pyarrow.Table, a datasets.Dataset, a dict of columns, or dicts of rows; "
    "Rollouts.read takes the path of a file."
)
_FAILS = (pa.ArrowException, TypeError, ValueError, OverflowError)


class PythonTable:
    """A table, as a file of a log.

    Args:
        given: the table, a trajectory a row.
        needed: names of the columns that are read; others are dropped where Arrow cannot hold them.
        file: to write.

    Raises:
        TsaeError: for what is not a table, and for columns of several types or lengths.
    """

    def __init__(self, given: Any, needed: Iterable[str], file: Path) -> None:
        self.file = file
        self._labels: Sequence[Any] | None = None
        """Index labels of the rows, if they have any but their numbers."""
        arrays, needed = [], set(needed)
        for name, values in self._columns(given):
            try:
                arrays.append((name, _array(values)))
            except _FAILS as error:
                if name in needed:
                    kinds = [None if value is None else type(value) for value in values]
                    first = next(filter(None, kinds), None)
                    row = next((i for i, kind in enumerate(kinds) if kind not in (first, None)), 0)
                    what = f"column {name!r} cannot be read ({error})"
                    fix = "Give texts, numbers, flags or lists of them."
                    raise TsaeError(what, where=self.named(f"{file}: row {row}"), fix=fix) from error
        try:
            pq.write_table(pa.Table.from_arrays([array for _, array in arrays], [name for name, _ in arrays]), file)
        except _FAILS as error:
            raise TsaeError(f"has columns that do not fit together ({error})", where=NAME, fix=_FIX) from error

    def named(self, text: str) -> str:
        """A text with the rows of the table in place of those of the file."""

        def row(found: re.Match[str]) -> str:
            label = "" if self._labels is None else f" (index {self._labels[int(found[1])]!r})"
            return f"{NAME}: row {found[1]}{label}"

        return re.sub(rf"{re.escape(str(self.file))}: row (\d+)", row, text).replace(str(self.file), NAME)

    def _columns(self, given: Any) -> list[tuple[str, Any]]:
        """(name, values) of every column, index levels with a name among them."""
        if isinstance(given, Mapping) and given and all(hasattr(part, "column_names") for part in given.values()):
            if len(given) > 1:  # a DatasetDict
                what, first = f"has the splits {', '.join(map(str, given))}", next(iter(given))
                raise TsaeError(what, where=NAME, fix=f"Give one of them, such as data[{first!r}].")
            (given,) = given.values()
        if isinstance(given, pd.DataFrame):
            if not given.index.equals(pd.RangeIndex(len(given))):
                self._labels = given.index
            levels = [name for name in given.index.names if name is not None]
            for name in levels:
                if name in given and not given.index.get_level_values(name).equals(pd.Index(given[name])):
                    what = f"has a column and an index level {name!r} that differ"
                    raise TsaeError(what, where=NAME, fix="Rename or drop one of them.")
            own = [(str(name), given.iloc[:, i]) for i, name in enumerate(given)]
            return own + [(str(n), pd.Series(given.index.get_level_values(n))) for n in levels if n not in given]
        if hasattr(given, "with_format") and hasattr(given, "__len__"):  # datasets
            given = given.with_format("arrow")[:]
        elif not hasattr(given, "__arrow_c_stream__") and hasattr(given, "to_arrow"):
            given = given.to_arrow()
        if hasattr(given, "__arrow_c_stream__") or hasattr(given, "__arrow_c_array__"):
            try:
                table = pa.table(given)
            except pa.ArrowInvalid as error:  # a Series
                raise TsaeError(f"is of type {type(given).__name__}, not a table", where=NAME, fix=_FIX) from error
            return list(zip(table.column_names, table.columns, strict=True))
        if isinstance(given, Mapping) and all(hasattr(v, "__len__") and not isinstance(v, str) for v in given.values()):
            return [(str(name), values) for name, values in given.items()]
        rows = list(given) if isinstance(given, Iterable) and not isinstance(given, (str, bytes, Mapping)) else [given]
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping) or row is given:
                what = f"is of type {type(row).__name__}, expected a row as a dict, or a table"
                raise TsaeError(what, where=self.named(f"{self.file}: row {number}"), fix=_FIX)
        return [(str(name), [row.get(name) for row in rows]) for name in dict.fromkeys(n for row in rows for n in row)]


def _array(values: Any) -> pa.Array | pa.ChunkedArray:
    """A column as Arrow has it: tensors as lists, ids of any kind as texts."""
    if isinstance(values, pd.Series) and isinstance(values.dtype, pd.SparseDtype):
        values = values.sparse.to_dense()
    if getattr(values, "ndim", 1) > 1:
        values = values.tolist()
    try:
        found = values if isinstance(values, pa.ChunkedArray) else pa.array(values, from_pandas=True)
    except _FAILS:
        found = pa.array([_plain(value) for value in values], from_pandas=True)
    if pa.types.is_decimal(found.type) or isinstance(found.type, pa.BaseExtensionType):
        found = pa.array([_plain(value) for value in found.to_pylist()])
    if pa.types.is_list(found.type) and pa.types.is_floating(found.type.value_type):
        with suppress(pa.ArrowInvalid):  # whole numbers alone are token ids
            found = found.cast(pa.list_(pa.int64()))
    schema = pa.schema([("column", found.type)])
    pq.ParquetWriter(pa.BufferOutputStream(), schema).close()  # refuses a struct of nothing
    return found


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, (UUID, Decimal)):
        return str(value) if isinstance(value, UUID) else float(value)
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, np.generic) else value
