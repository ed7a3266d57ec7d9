"""What lies between a command and its system: what a terminal may be sent, and errors that a user can put right.

Texts come from strangers' logs, and a control character in one could steer the terminal. The system may lack space,
memory, files or permission.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from tsae.errors import TsaeError, is_panic
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


_FIXES = {
    "Make room, and give the same command again: what is finished is kept.": (
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG,
    ),
    "Give a path that you may write to.": (errno.EROFS,),
    "Change its permissions, or give a path that you may read and write.": (errno.EACCES, errno.EPERM),
    "Allow more open files (ulimit -n), and give the same command again.": (errno.EMFILE, errno.ENFILE),
    "Give the command more memory, or smaller batches.": (errno.ENOMEM,),
    "Look at the disk. The same command resumes from what is finished.": (errno.EIO, errno.ESTALE),
    "A folder lies where a file belongs, or a file where a folder does. Move it away, or give another path.": (
        errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP,
    ),
    "Give a shorter path.": (errno.ENAMETOOLONG,),
    "Allow more processes and threads (ulimit -u), or use fewer.": (errno.EAGAIN,),
}  # fmt: skip
_BY_NUMBER = {number: fix for fix, numbers in _FIXES.items() for number in numbers}
_NUMBER = re.compile(r"(?:os error|errno =|\[Errno) (\d+)")
_MEMORY = re.compile(r"can't allocate memory|out of memory|Unable to allocate|std::bad_alloc", re.IGNORECASE)
_DEVICE = re.compile(
    r"device string|device type|not compiled with (CUDA|XPU)|not linked with support for|No CUDA GPUs|NVIDIA driver|"
    r"invalid device ordinal",
    re.IGNORECASE,
)
_THREADS = re.compile(r"can't start new thread|Resource temporarily unavailable")


def resource_error(error: BaseException) -> TsaeError | None:
    """A refusal in place of an error, where the machine lacks disk, memory, files, threads, or a permission.

    Args:
        error: of Python, or of a library that passes the system's number on in its words (HDF5, Arrow, safetensors).
    """
    first = (str(error).splitlines() or [""])[0]
    if is_panic(error):
        what = f"a library met what it did not expect ({first})"
        return TsaeError(what, fix="Look at the files that the command reads: one may be damaged.")
    where = None
    fix = None
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _MEMORY.search(str(error))):
        return TsaeError(f"there is not enough memory ({first or type(error).__name__})", fix=_BY_NUMBER[errno.ENOMEM])
    if isinstance(error, RuntimeError | AssertionError | NotImplementedError) and _DEVICE.search(str(error)):
        return TsaeError(f"there is no such device ({first})", fix="Give --device cpu, or cuda where there is a GPU.")
    if isinstance(error, RuntimeError) and _THREADS.search(str(error)):
        fix = _BY_NUMBER[errno.EAGAIN]
    elif isinstance(error, OSError) and not isinstance(error, socket.timeout | ConnectionError):
        number = error.errno
        if number is None and (found := _NUMBER.search(str(error))):
            number = int(found[1])
        fix = _BY_NUMBER.get(number or 0)
        named = error.filename2 or error.filename  # of a renaming its target
        where = os.fspath(named) if isinstance(named, str | os.PathLike) else None
        first = error.strerror or first
    elif type(error).__name__ == "SafetensorError" and (found := _NUMBER.search(str(error))):
        fix = _BY_NUMBER.get(int(found[1]))
    return None if fix is None else TsaeError(f"the system refuses: {first}", where=where, fix=fix)
