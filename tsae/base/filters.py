"""Arguments that take one value or several, numbers of features, and the rows of a table that lead it."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsae.errors import refuse

if TYPE_CHECKING:
    import pandas as pd


def several(value: Any) -> tuple[Any, ...]:
    """The values as a tuple. A text, a number, a truth value and None are one value; any other iterable is several."""
    # Arrays of no dimension have __iter__, too.
    single = isinstance(value, (str, bytes)) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0
    return (value,) if single else tuple(value)


def feature_number(given: Any, n_features: int, where: str | Path) -> int:
    """A feature by its number, or by that number as text.

    Raises:
        TsaeError: where there is no such feature.
    """
    number = int(given) if isinstance(given, str) and given.isdecimal() else given
    missing = f"no feature {given!r}; there are 0 to {n_features - 1}"
    refuse(where, (not hasattr(number, "__index__"), missing, None))
    need_features([index(number)], n_features, where)
    return index(number)


def need_names(what: str, given: Iterable[Any], known: Iterable[Any], where: str | Path) -> None:
    """Refuse a name that there is not, and list those that there are."""
    known = list(dict.fromkeys(known))
    for name in given:
        there = ", ".join(map(str, known)) or "none"
        refuse(where, (name not in known, f"no {what} {name!r}; there are {there}", None))


def need_features(chosen: Iterable[int], n_features: int, where: str | Path) -> None:
    """Refuse numbers of features that there are not."""
    for feature in chosen:
        refuse(where, (not 0 <= feature < n_features, f"no feature {feature}; there are 0 to {n_features - 1}", None))


def strongest(table: pd.DataFrame, column: str, n: int | None = None) -> pd.DataFrame:
    """The n rows (or all) with the largest size in a column, the largest first; ties stay in their order."""
    order = table[column].abs().sort_values(ascending=False, kind="stable").index
    return table.loc[order].head(len(table) if n is None else n).reset_index(drop=True)
