"""Disturb a process from inside: Python imports this file by itself when its folder is on the path.

``FAULT`` is ``what:when:folder``. An audit hook counts the moments in which something under the folder is opened for
writing, made, renamed or removed. From moment ``when`` on (for a kill: at that moment) it does ``what``:

- count: write a line to ``FAULT_COUNT`` at each;
- kill, int, term: send the process SIGKILL, SIGINT, SIGTERM;
- full: let every such call fail, as on a full disk;
- size-N, files-N, memory-N: let files grow to N bytes, open N more files, take N more bytes of memory.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_MOMENTS = {"os.rename", "os.remove", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.rmdir"}


def _limit(what: str) -> None:
    kind, _, number = what.partition("-")
    if kind == "size":
        _lower(resource.RLIMIT_FSIZE, int(number))
    elif kind == "files":
        _lower(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) + int(number))
    elif kind == "memory":
        with open("/proc/self/statm") as stream:
            used = int(stream.read().split()[0]) * resource.getpagesize()
        _lower(resource.RLIMIT_AS, used + int(number))


def _lower(limited: int, number: int) -> None:
    """Set a limit, but none above the one that the process was given: not everybody may raise that."""
    most = resource.getrlimit(limited)[1]
    resource.setrlimit(limited, (number if most == resource.RLIM_INFINITY else min(number, most), most))


def begin(fault: str) -> None:
    what, when, folder = fault.split(":", 2)
    left = int(when)
    busy = False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left, busy
        if busy or not (event in _MOMENTS or (event == "open" and args[2] & _WRITING)):
            return
        path = args[0]
        if not isinstance(path, (str, bytes)) or not os.path.abspath(os.fsdecode(path)).startswith(folder):
            return
        busy = True
        try:
            left -= 1
            if what == "count":
                with open(os.environ["FAULT_COUNT"], "a") as stream:
                    stream.write(f"{event} {path!r}\n")
            elif what == "full" and left < 0:
                raise OSError(errno.ENOSPC, "No space left on device", path)
            elif left == -1:
                signals = {"kill": signal.SIGKILL, "int": signal.SIGINT, "term": signal.SIGTERM}
                if what in signals:
                    os.kill(os.getpid(), signals[what])
                else:
                    _limit(what)
        finally:
            busy = False

    sys.addaudithook(hook)


if "FAULT" in os.environ:
    begin(os.environ["FAULT"])
