"""What users name: one value or several, features, functions of their own (module:function), and the top of a table."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tsae.errors import TsaeError, refuse

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


def find_function(name: str, *, takes: int, where: str, fix: str) -> Callable[..., Any]:
    """Import the function that ``module:function`` names; modules in the current folder are found too.

    Args:
        name: of the function.
        takes: how many arguments it will be called with.
        where: the option, for messages.
        fix: what to give.

    Raises:
        TsaeError: where there is no such function, or it takes other arguments.
    """
    module, _, function = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), function)):  # before anything is imported
        raise TsaeError(f"{name!r} is not known and not of the form module:function", where=where, fix=fix)
    # A console script does not put the current folder on the path, as `python -m` does.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise TsaeError(f"cannot find {name!r} ({error})", where=where, fix=fix) from error
    if not callable(found):
        raise TsaeError(f"{name!r} is a {type(found).__name__}, not a function", where=where, fix=fix)
    with contextlib.suppress(ValueError):  # of functions in C nobody knows
        signature = inspect.signature(found)
        try:
            signature.bind(*range(takes))
        except TypeError as error:
            what = f"{name!r} cannot be called with {takes} argument{'s' * (takes != 1)} ({error})"
            raise TsaeError(what, where=where, fix=fix) from error
    return cast(Callable[..., Any], found)
