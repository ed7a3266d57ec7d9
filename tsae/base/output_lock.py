"""One writer at a time: a lock beside an output, which the operating system takes away from a process that dies.

The lock of ``out/features`` is the file ``out/.features.lock``; that of its second part is
``out/.features.part-1.lock``. Who holds it stands in ``out/.features.lock.owner``: on Windows nobody can read a file
that is locked.
"""

from __future__ import annotations

import errno
import glob
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from tsae.base.files import writing
from tsae.base.part import Part, first_process
from tsae.errors import TsaeError

_PATIENCE_S = 0.2
_LOOKS = 10
"""How often a lock is tried that does not say yet whose it is."""
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
    to = Path(os.path.abspath(to))
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
        elif key in _parts:
            stack.enter_context(_held(whole, to, wait=True))
        else:
            stack.enter_context(_held(whole, to))
            for other in folder.glob(f".{glob.escape(to.name)}.part-*.lock"):
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
    lock: BaseFileLock = FileLock(file, is_singleton=True)
    with writing(to.parent, "Make room there, or give another path."):
        file.parent.mkdir(parents=True, exist_ok=True)
        owner = ""
        for _ in range(_LOOKS):
            try:
                lock.acquire(timeout=_PATIENCE_S)
            except Timeout:
                owner = _owner(file)  # empty while another process takes the lock or gives it back: look again
            except OSError as error:
                if error.errno not in _NO_LOCKS or isinstance(lock, SoftFileLock):
                    raise
                lock = SoftFileLock(file, is_singleton=True)
            if lock.is_locked or owner:
                break
        if not lock.is_locked:
            owner = owner or f"another process (if it has died, remove {file.name})"
            if not wait:
                fix = "Wait until it has ended, or stop it; the same command then resumes from what is on disk."
                raise TsaeError(f"is being written by {owner}", where=to, fix=fix)
            print(f"waiting: {to} is being written by {owner}", file=sys.stderr)
            lock.acquire()
    own = lock.lock_counter == 1 and not isinstance(lock, SoftFileLock)
    state = None
    try:
        if own:
            with writing(to.parent, "Make room there, or give another path."):
                _owner_file(file).write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
                state = os.stat(file)
        yield
    finally:
        if own:
            with suppress(OSError):
                _owner_file(file).unlink()
        with suppress(OSError):  # Windows removes no open file; somebody may have removed it by hand
            if own and (state is None or os.path.samestat(os.stat(file), state)):
                file.unlink()
        lock.release()


def _owner_file(lock: Path) -> Path:
    return lock.with_name(f"{lock.name}.owner")


def _owner(file: Path) -> str:
    try:
        found = _owner_file(file).read_text(encoding="utf-8")[:200]
    except (OSError, ValueError):
        found = ""
    return found if found.startswith("process ") else ""
