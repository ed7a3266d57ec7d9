"""What may be a seed."""

from __future__ import annotations

from tsae.errors import TsaeError

_MOST = 2**32 - 1


def need_seed(seed: int | None, where: str, name: str = "seed") -> None:
    """Refuse a number that not every generator of random numbers takes. None is one that is not given.

    Raises:
        TsaeError: unless it lies between 0 and 2³² − 1.
    """
    if seed is not None and not 0 <= seed <= _MOST:
        raise TsaeError(f"{name}={seed} must lie between 0 and {_MOST:,}", where=where)
