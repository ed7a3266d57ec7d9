"""Values that a filter selects by: one, or several."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def several(value: Any) -> tuple[Any, ...]:
    """What a filter was given, as a tuple: a text, a number, a truth value or None stands for itself alone.

    Args:
        value: one of these, or a list, tuple, set, array, column or other iterable of them.
    """
    # Arrays of no dimension have __iter__, too.
    single = isinstance(value, (str, bytes)) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0
    return (value,) if single else tuple(value)
