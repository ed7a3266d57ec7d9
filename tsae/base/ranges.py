"""What numbers of a config may be."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from tsae.errors import TsaeError

_SEEDS = ("seed", "data_seed")
_MOST = 2**32 - 1
"""Largest seed that every generator of random numbers takes."""
_UNLIMITED = ("max_norm",)
"""May be infinite: nothing is then beyond it."""


_SUREST = 0.999999
"""Largest confidence of an interval. A value closer to 1 may be rounded to 1, and the ends are then NaN."""


def need_numbers(config: Any) -> None:
    """Refuse numbers that cannot be used: NaN, infinity, and confidences and seeds out of their range.

    Args:
        config: a dataclass; its fields, and the items of those that are tuples, are looked at.

    Raises:
        TsaeError: which names the field.
    """
    where = type(config).__name__
    for field in fields(config):
        value, name = getattr(config, field.name), field.name
        if name in _SEEDS and isinstance(value, int) and not 0 <= value <= _MOST:
            raise TsaeError(f"{name}={value} must lie between 0 and {_MOST:,}", where=where)
        if name == "confidence" and not 0 < value <= _SUREST:
            raise TsaeError(f"{name}={value} must lie between 0 and {_SUREST}", where=where)
        for one in value if isinstance(value, tuple) else (value,):
            if not isinstance(one, float) or math.isfinite(one) or (one > 0 and name in _UNLIMITED):
                continue
            raise TsaeError(f"{name}={value} is not finite", where=where)


def need_at_most(config: Any, **most: int) -> None:
    """Refuse numbers so large that what was asked for would never end, or would be lost in rounding.

    Args:
        config: a dataclass.
        most: the largest value of a field, by its name, and of each item of a tuple. A field that is None is not looked
            at.

    Raises:
        TsaeError: which names the field.
    """
    for name, limit in most.items():
        value = getattr(config, name)
        for one in value if isinstance(value, tuple) else (value,):
            if one is not None and one > limit:
                raise TsaeError(f"{name}={one:,} is more than {limit:,}", where=type(config).__name__)
