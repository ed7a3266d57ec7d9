"""One writer at a time: a lock beside an output, which the operating system takes away from a process that dies.

The lock of ``out/features`` is the file ``out/.features.lock``; that of its second part is
``out/.features.part-1.lock``. Who holds it stands in it.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path
from tempfile import TemporaryFile

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout, lock_descriptor

from tsae.base.files import writing
from tsae.base.part import Part, first_process
from tsae.errors import TsaeError

_PATIENCE_S = 0.2
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What file systems without locks answer."""
_parts: set[tuple[int, Path]] = set()
"""Outputs of which a thread of this process writes a part."""


@contextmanager
def output_lock(to: str | Path, part: Part | None = None) -> Iterator[None]:
    """Be the only process that writes an output, or a part of it, while the block runs.

    Parts exclude the whole, and not each other; a part waits for a whole that is being written. The part that finishes
    last takes the lock of the whole, too. A thread that holds a lock may take it again. Of the processes that torchrun
    started, the main one speaks for all.

    Args:
        to: the file or folder that is written. Its parent is made if it is missing.
        part: which part of it, for one of several.

    Raises:
        TsaeError: where another process writes it, which is named; where the lock cannot be written.
    """
    to = Path(os.path.abspath(to))  # a link to a file is replaced, and its place is here
    to = to.resolve() if to.is_dir() else to.parent.resolve() / to.name
    # A mounted volume may have nothing but its inside to write to.
    folder = to if to.is_dir() and not os.access(to.parent, os.W_OK) else to.parent
    whole, key = folder / f".{to.name}.lock", (threading.get_ident(), to)
    with ExitStack() as stack:
        if not first_process():
            pass
        elif part is not None and part.n > 1:
            stack.enter_context(_held(folder / f".{to.name}.part-{part.index}.lock", to))
            with _held(whole, to, wait=True):  # own lock first, so that of two that start at once one sees the other
                pass
            _parts.add(key)
            stack.callback(_parts.discard, key)
        else:
            stack.enter_context(_held(whole, to, wait=key in _parts))
            for other in () if key in _parts else folder.glob(f".{escape(to.name)}.part-*.lock"):
                with _held(other, to):  # left by a process that was killed
                    pass
        yield


def drop_dead_lock(to: Path) -> None:
    """Remove the lock file of a process that was killed when it had written the output, if there is one."""
    if (to.parent / f".{to.name}.lock").exists():
        with suppress(TsaeError), output_lock(to):
            pass


@contextmanager
def _held(file: Path, to: Path, *, wait: bool = False) -> Iterator[None]:
    with writing(to.parent, "Make room there, or give another path."):
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(file)
        with suppress(Timeout):
            lock.acquire(timeout=_PATIENCE_S)
        if not lock.is_locked:
            owner = _owner(lock)
            if not wait:
                fix = "Wait until it has ended, or stop it; the same command then resumes from what is on disk."
                raise TsaeError(f"is being written by {owner}", where=to, fix=fix)
            print(f"waiting: {to} is being written by {owner}", file=sys.stderr)
            lock.acquire()
        mine = None if isinstance(lock, SoftFileLock) or lock.lock_counter > 1 else os.stat(file)
    try:
        yield
    finally:
        with suppress(OSError):  # Windows removes no open file; who took a removed lock's place keeps its own
            if mine is not None and os.path.samestat(os.stat(file), mine):
                file.unlink()
        lock.release()


def _lock(file: Path) -> BaseFileLock:
    """The lock of the operating system; on a file system without locks the file itself is one."""
    with TemporaryFile(dir=file.parent) as probe:  # it has no name that a killed process could leave
        try:
            lock_descriptor(probe.fileno())
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return SoftFileLock(file, is_singleton=True)
    return FileLock(file, is_singleton=True, on_acquired=_sign)


def _sign(descriptor: int) -> None:
    # As SoftFileLock does, which takes a file that says anything else from its holder.
    os.write(descriptor, f"{os.getpid()}\n{socket.gethostname()}\n".encode())


def _owner(lock: BaseFileLock) -> str:
    file, found = Path(lock.lock_file), [""]
    with suppress(OSError, ValueError):  # Windows lets nobody read it
        found = file.read_text(encoding="utf-8").split()
    named = f"process {found[0]} on {found[1]}" if len(found) > 1 else "another process"
    return f"{named} (if it has died, remove {file.name})" if isinstance(lock, SoftFileLock) else named
