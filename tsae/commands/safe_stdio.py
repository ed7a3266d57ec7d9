"""What a terminal may be sent: texts come from strangers' logs, and a control character in one could steer it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from tsae.report.text import visible

_BAR = re.compile(r"(?:\n|\x1b\[A)*")
"""How a progress bar moves to its line."""


class _SafeStream:
    """A stream that shows control characters as their code points; all else is the stream's own.

    Args:
        stream: that is written to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if not _BAR.fullmatch(text):
            text = "\r".join(map(visible, text.split("\r"))) if self._returns(text) else visible(text)
        self._stream.write(text)
        return len(text)

    def _returns(self, text: str) -> bool:
        # A bar goes back to the begin of its line, and begins or ends what it writes with that.
        return "\r" not in text.strip("\r")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def safe_stdio() -> Iterator[None]:
    """While the block runs, nothing that is printed steers the terminal, but for progress bars."""
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _SafeStream(out), _SafeStream(err)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err
