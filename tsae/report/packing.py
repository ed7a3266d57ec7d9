"""Large data for the page: JSON, deflated, in base64; the browser unpacks a part when it is first looked at."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np


def packed(content: Any) -> str:
    """Base64 of deflated JSON; `unpack` of report/data.js undoes it. It holds no character that HTML knows."""
    text = content if isinstance(content, str) else json.dumps(content, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode("ascii"), 6)).decode("ascii")


def number_array(values: np.ndarray, digits: int = 3) -> str:
    """JSON of an array with so many significant digits; what is not finite becomes null."""
    values = np.asarray(values, dtype=float)
    fast = f"%.{digits}g"
    return "[" + ",".join([fast % v if np.isfinite(v) else "null" for v in values.tolist()]) + "]"
