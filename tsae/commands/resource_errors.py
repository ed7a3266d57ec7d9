"""Errors of the system that a user can put right: no space, memory, files or permission."""

from __future__ import annotations

import errno
import os
import re
import socket

from tsae.errors import TsaeError, is_panic

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
