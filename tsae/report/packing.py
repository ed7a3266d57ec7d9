"""Large data for the page: deflated, in base64; the browser unpacks a part when it is first looked at."""

from __future__ import annotations

import base64
import json
import zlib
from functools import cache
from typing import Any

import numpy as np
from plotly.offline import get_plotlyjs


def packed(content: Any) -> str:
    """Base64 of deflated JSON, or of text as it is; `inflate` of report/data.js undoes it.

    It holds no character that HTML knows.
    """
    text = content if isinstance(content, str) else json.dumps(content, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode("utf-8"), 6)).decode("ascii")


@cache
def packed_plotly() -> str:
    """Plotly's script, from the installed package: packed it has two fifths of its size."""
    return packed(get_plotlyjs())


def number_array(values: np.ndarray, digits: int = 3) -> str:
    """JSON of an array with so many significant digits; what is not finite becomes null."""
    values = np.asarray(values, dtype=float)
    fast = f"%.{digits}g"
    return "[" + ",".join([fast % v if np.isfinite(v) else "null" for v in values.tolist()]) + "]"
