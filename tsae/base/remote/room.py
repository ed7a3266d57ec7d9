"""How much fetched shards may take on this machine."""

from __future__ import annotations

import math
import os

from tsae.errors import TsaeError

CACHE_GB = "TSAE_CACHE_GB"


def limit() -> float:
    """Gigabytes.

    Raises:
        TsaeError: where the variable holds no such number.
    """
    text = os.environ.get(CACHE_GB, "").strip()
    try:
        found = float(text or 100)
    except ValueError:
        found = math.nan
    if not found >= 0:
        fix = "Set it to a number such as 50, or unset it for 100."
        raise TsaeError(f"is {text!r}, expected gigabytes, 0 or more", where=f"${CACHE_GB}", fix=fix)
    return found
