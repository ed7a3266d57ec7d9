"""The user's own functions, named as module:function on the command line."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, cast

from tsae.errors import TsaeError


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
