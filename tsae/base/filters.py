"""Arguments that take one value or several."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def several(value: Any) -> tuple[Any, ...]:
    """The values as a tuple. A text, a number, a truth value and None are one value; any other iterable is several."""
    # Arrays of no dimension have __iter__, too.
    single = isinstance(value, (str, bytes)) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0
    return (value,) if single else tuple(value)
