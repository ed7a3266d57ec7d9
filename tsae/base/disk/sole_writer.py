"""One writer at a time: a lock beside an output, which the system takes away from a process that dies.

The lock of ``out/features`` is the file ``out/.features.lock``; the second of eight parts of it has
``out/.features.part-1.lock``. The operating system holds it (flock), also on NFS, so that nothing is left of it after a
crash. Where a file system has no locks, a file that must be new stands in for it, with host and process inside.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from tsae.base.files import partial_name, writing
from tsae.base.part import Part
from tsae.base.torchrun import first_process
from tsae.base.untrusted import parse_json
from tsae.errors import TsaeError

_PATIENCE_S = 1.0
"""How long a process waits before it says for whom."""
_PAUSE_S = 0.01
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What file systems without locks answer; filelock itself knows another answer."""
_held: dict[tuple[int, int, Path], int] = {}
"""How often a thread of this process has taken a lock."""


@contextmanager
def sole_writer(to: str | Path, part: Part | None = None) -> Iterator[None]:
    """Be the only process that writes an output, or a part of it, while the block runs.

    The second process stops. Parts exclude the whole, and not each other; a part waits for a whole that is being
    written. The part that finishes last takes the lock of the whole, too, and joins them.
    A thread that holds the lock may take it again. Of the processes that torchrun started, the main one speaks for all.

    Args:
        to: the file or folder that is written. Its parent is made if it is missing.
        part: which part of it, for one of several.

    Raises:
        TsaeError: where another process writes it, which is named; where the lock cannot be written.
    """
    to = _place(Path(os.path.abspath(to)))
    whole = _file(to)
    own = whole if part is None or part.n == 1 else _file(to, part)
    thread = (os.getpid(), threading.get_ident())
    key = (*thread, own)
    joins = own == whole and any(held[:2] == thread and held[2].name.startswith(f".{to.name}.part-") for held in _held)
    if key in _held or not first_process():
        yield
        return
    with writing(to.parent, "Make room there, or give another path."):
        own.parent.mkdir(parents=True, exist_ok=True)
        lock = _taken(own, to, patient=joins)
    _held[key] = 1
    try:
        # First the own lock, then a look at the others'. So of two that start at once, at least one sees the other.
        others = [] if joins else own.parent.glob(f".{_plain(to.name)}.part-*.lock") if own == whole else [whole]
        for other in others:
            if other.exists():
                _taken(other, to, patient=other == whole).give_back()  # left by a process that was killed
        yield
    finally:
        del _held[key]
        lock.give_back()


def clear_parts(folder: Path, names: Sequence[str]) -> None:
    """Remove what killed parts left under names of `Part.own`, from an output that this process writes.

    Args:
        folder: of the output.
        names: of the files in it that parts write.
    """
    folder = _place(Path(os.path.abspath(folder)))
    for left in folder.iterdir():
        found = re.search(r"\.part-(\d{1,9})", left.name)
        part = Part(int(found[1]), int(found[1]) + 1) if found else Part()
        own = [part.own(folder / name) for name in names]
        # A part that holds its lock may still be writing.
        if left in (*own, *map(partial_name, own)) and not _file(folder, part).exists():
            left.unlink(missing_ok=True)


class _Taken(NamedTuple):
    """A lock that this process holds."""

    lock: BaseFileLock
    file: Path
    state: os.stat_result

    def give_back(self) -> None:
        """Release it and remove its file, if that is still the same: somebody may have removed it by hand, and another
        process may hold the next one."""
        if not isinstance(self.lock, SoftFileLock):  # which removes it, and looks at that itself
            with suppress(OSError):  # Windows removes no open file
                if os.path.samestat(os.stat(self.file), self.state):
                    self.file.unlink()
        self.lock.release()


def _place(to: Path) -> Path:
    """The real path of an output, without links on the way. If the output itself is a link to a file, it stays: writing
    replaces such a link."""
    return to.resolve() if to.is_dir() else to.parent.resolve() / to.name


def _file(to: Path, part: Part | None = None) -> Path:
    # Beside the output, because a folder that is not there yet is not made for a lock alone. A mounted volume may have
    # nothing but its inside to write to.
    folder = to if to.is_dir() and not os.access(to.parent, os.W_OK) else to.parent
    return folder / f".{to.name}{'' if part is None else f'.part-{part.index}'}.lock"


def _plain(name: str) -> str:
    """The name, for a glob."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _taken(file: Path, to: Path, patient: bool = False) -> _Taken:
    """The lock, which says whose it is.

    Args:
        file: of the lock.
        to: what is written.
        patient: wait for it.

    Raises:
        TsaeError: where it is another's.
    """
    lock: BaseFileLock = FileLock(file)
    patience = _PATIENCE_S if patient else 0.0
    give_up = time.monotonic() + _PATIENCE_S
    owner = ""
    while not owner:
        try:
            lock.acquire(timeout=patience)
            break
        except Timeout:
            # While a process takes the lock or gives it back, the file does not name it.
            owner = _owner(file) or ("" if time.monotonic() < give_up else _unknown(file))
            time.sleep(_PAUSE_S)
        except OSError as error:
            if error.errno not in _NO_LOCKS or isinstance(lock, SoftFileLock):
                raise
            lock = SoftFileLock(file)
    if owner:
        if not patient:
            raise TsaeError(
                f"is being written by {owner}",
                where=to,
                fix="Wait until it has ended, or stop it; the same command then goes on from what is on disk.",
            )
        print(f"waiting: {to} is being written by {owner}", file=sys.stderr)
        lock.acquire()
    if not isinstance(lock, SoftFileLock):  # which has written its own
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        ours = {"host": socket.gethostname(), "process": os.getpid(), "since": since, "command": sys.argv[:2]}
        file.write_text(json.dumps(ours))
    return _Taken(lock, file, os.stat(file))


def _owner(file: Path) -> str:
    """Who holds a lock, in words; empty where it does not say."""
    try:
        found = parse_json(file.read_text())
        return f"process {int(found['process'])} on {found['host']!s:.80}, since {found['since']!s:.40}"
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return ""


def _unknown(file: Path) -> str:
    return f"another process (if it has died, remove {file.name})"
