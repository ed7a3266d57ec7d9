"""Memory for batches that is used again once nobody holds the batch.

Fresh memory costs several times what filling it does: the system gives it out page by page, each cleared first. A
buffer that is always used again would overwrite batches that somebody kept. So memory is used again where nothing
refers to it. CPython's reference counts tell: an array, a view of it or a tensor made from it holds what its memory
belongs to.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np


class Reused:
    """Gives out arrays, in memory that it gave out before where nothing refers to that any more.

    May be used from several threads.

    Args:
        most: pieces of memory that it holds on to. Pieces that somebody keeps are forgotten for new ones, so that they
            are freed with what was made of them.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._pieces: list[np.ndarray] = []
        self._lock = threading.Lock()

    def empty(self, rows: int, width: int, dtype: Any) -> np.ndarray:
        """(rows, width) of values that mean nothing."""
        n_bytes = rows * width * np.dtype(dtype).itemsize
        with self._lock:
            free = [i for i in range(len(self._pieces)) if _references(self._pieces, i) == _UNUSED]
            fitting = [i for i in free if self._pieces[i].nbytes >= n_bytes]
            if not fitting:
                if len(self._pieces) == self._most:
                    del self._pieces[free[0] if free else 0]
                # Batches differ by some tokens: one that is a little larger is to find room.
                self._pieces.append(np.empty(n_bytes + n_bytes // 16, np.uint8))
                fitting = [len(self._pieces) - 1]
            return self._pieces[fitting[0]][:n_bytes].view(dtype).reshape(rows, width)


def _references(arrays: list[np.ndarray], i: int) -> int:
    return sys.getrefcount(arrays[i])


_UNUSED = _references([np.empty(0)], 0)
"""References to an array that only a list holds."""
