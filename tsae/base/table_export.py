"""Tables of results for other libraries: pandas, polars, and Parquet files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tsae.base.artefact import Kind, read_artefact
from tsae.base.files import as_path, reading, replacing
from tsae.errors import TsaeError, needing


def write_table(file: str | Path, table: pd.DataFrame, *, index: bool = False, compression: str = "snappy") -> Path:
    """Write a table as Parquet, whole or not at all. A link at the file's place is replaced, and not followed."""
    with replacing(file) as partial:
        table.to_parquet(partial, index=index, compression=compression)
    return as_path(file)


def table_files(tables: Mapping[str, pd.DataFrame | None], **how: Any) -> dict[str, Callable[[Path], object]]:
    """The tables as files of an artefact (`tsae.base.artefact.write_artefact`); None is left out."""
    return {
        f"{name}.parquet": partial(write_table, table=table, **how)
        for name, table in tables.items()
        if table is not None
    }


def read_tables(
    folder: Path, kind: Kind, names: Iterable[str], optional: Iterable[str] = (), *, others: Iterable[str] = ()
) -> tuple[dict[str, Any], dict[str, pd.DataFrame]]:
    """The main file of an artefact, and its tables by name; the optional ones need not be there.

    Args:
        folder: that holds it.
        kind: that it must be.
        names: of tables.
        optional: of further tables.
        others: names of further files that it must have.

    Raises:
        TsaeError: where something is missing or damaged.
    """
    there = [*names, *(name for name in optional if (folder / f"{name}.parquet").is_file())]
    info, tables = read_artefact(folder, kind, [*(f"{name}.parquet" for name in there), *others]), {}
    for name in there:
        with reading(folder / f"{name}.parquet", kind.fix):
            tables[name] = pd.read_parquet(folder / f"{name}.parquet")
    return info, tables


class Tables:
    """A frozen dataclass with tables among its fields; the first one is what is meant where none is named."""

    def to_pandas(self, table: str | None = None) -> pd.DataFrame:
        """A table as a DataFrame of its own; what names its rows is a column.

        Args:
            table: the field's name.

        Raises:
            TsaeError: where there is no such table.
        """
        known = self._tables()
        found = known.get(next(iter(known), "") if table is None else table)
        if found is None:
            what = f"{type(self).__name__} has no table {table!r}; there are {', '.join(known) or 'none'}"
            raise TsaeError(what, where="to_pandas")
        if isinstance(found, pa.Table):
            return found.to_pandas()
        return found.reset_index() if found.index.name else found.copy()

    def to_parquet(self, file: str | Path, table: str | None = None) -> Path:
        """Write a table as a plain Parquet file, whole or not at all; see `to_pandas`."""
        frame = pa.Table.from_pandas(self.to_pandas(table), preserve_index=False)
        with replacing(file) as partial:
            pq.write_table(frame, partial, compression="zstd")
        return as_path(file)

    def to_polars(self, table: str | None = None) -> Any:
        """A table as a polars DataFrame; see `to_pandas`.

        Raises:
            TsaeError: where polars is missing.
        """
        frame = self.to_pandas(table)
        with needing("polars", "a table for polars", "to_polars"):
            import polars
        return polars.from_arrow(pa.Table.from_pandas(frame, preserve_index=False))

    def _tables(self) -> dict[str, pd.DataFrame | pa.Table]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if isinstance(value, pd.DataFrame | pa.Table)}
