"""Reuse of freed buffers.

Fresh memory costs several times what filling it does, because the system clears every page first. A buffer that is
always overwritten would destroy batches that somebody kept. So a buffer is reused only once nothing refers to it.
CPython's reference counts tell: an array, a view of it and a tensor made from it all refer to the array that owns the
memory.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any

import numpy as np


class Reused:
    """Gives out arrays, in buffers that are free again where there are any. Threads may share it.

    Args:
        most: buffers that it keeps. Where all are in use, it forgets one for a new one; a forgotten buffer is freed
            with the arrays that use it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._pieces: list[np.ndarray] = []
        self._lock = threading.Lock()

    def empty(self, rows: int, width: int, dtype: Any) -> np.ndarray:
        """(rows, width) array with arbitrary values."""
        n_bytes = rows * width * np.dtype(dtype).itemsize
        with self._lock:
            free = [i for i in range(len(self._pieces)) if _references(self._pieces, i) == _UNUSED]
            fitting = [i for i in free if self._pieces[i].nbytes >= n_bytes]
            if not fitting:
                if len(self._pieces) == self._most:
                    del self._pieces[free[0] if free else 0]
                # Batches differ by some tokens: leave room for one that is a little larger.
                self._pieces.append(np.empty(n_bytes + n_bytes // 16, np.uint8))
                fitting = [len(self._pieces) - 1]
            return self._pieces[fitting[0]][:n_bytes].view(dtype).reshape(rows, width)


def _references(arrays: list[np.ndarray], i: int) -> int:
    return sys.getrefcount(arrays[i])


_UNUSED = _references([np.empty(0)], 0)
"""References to an array that only a list holds."""


def give_back() -> None:
    """Return what the allocator keeps, but nobody uses, to the system; where it is glibc's.

    Its heap is full of holes after many large arrays between small ones: an encoding grew by half a gigabyte.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
