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
    """Base64 of deflated JSON, or of text as it is; `inflate` of report/templates/data.js undoes it.

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
    with np.errstate(divide="ignore", invalid="ignore"):
        places = np.clip(digits - 1 - np.floor(np.log10(np.abs(values))), -22, 22)
        # Whole numbers and powers of ten up to 22 are exact: their quotient is the float nearest to the decimal.
        up, down = 10.0 ** np.maximum(places, 0), 10.0 ** np.maximum(-places, 0)
        rounded = np.where(values == 0, 0.0, np.rint(values * up / down) / up * down)
    rounded[~np.isfinite(values)] = np.nan
    return json.dumps(rounded.tolist(), separators=(",", ":")).replace("NaN", "null")
