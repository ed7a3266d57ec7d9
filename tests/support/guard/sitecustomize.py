"""Watch a process for pickles that are loaded and for connections to other machines, and forbid both.

`tests/conftest.py` starts this in the process of the tests. The processes that they start import it by themselves,
because its folder is on PYTHONPATH. What was forbidden is written to the file ``TSAE_GUARD_LOG``, and the test during
which that happened fails: a command that catches the error cannot hide it.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

LOG = "TSAE_GUARD_LOG"

# Who may load pickles: libraries that talk to processes which they started themselves, never files from outside.
_MAY_UNPICKLE = (
    f"{os.sep}multiprocessing{os.sep}",  # arguments and results of a test's own children
    f"{os.sep}concurrent{os.sep}futures{os.sep}",  # the same
    f"{os.sep}site-packages{os.sep}ray{os.sep}",  # tasks of the Ray cluster that a test starts
    f"{os.sep}site-packages{os.sep}torch{os.sep}distributed{os.sep}",  # the rendezvous of torchrun's processes
)
_LOOPBACK = ("127.", "::1", "localhost", "::ffff:127.")
_ANYWHERE = ("", "0.0.0.0", "::", None)  # to listen on
# Daemons of a library, which run none of our code. Ray's look for the cloud in which they are, and `transformers serve`
# for a newer version of itself.
_DAEMONS = (f"{os.sep}site-packages{os.sep}ray{os.sep}", f"{os.sep}bin{os.sep}transformers")
_ASKS = {"socket.connect": 1, "socket.sendto": 1, "socket.getaddrinfo": 0, "socket.gethostbyname": 0}
"""Events, and which of their arguments says where."""


class Forbidden(OSError):
    """What the guard raises."""


def watch() -> None:
    """From now on to the end of the process; a second call changes nothing."""
    if hasattr(sys, "_tsae_guard"):  # a worker of the tests is a process of a test, too
        return
    sys._tsae_guard = True  # type: ignore[attr-defined]
    own: dict[str, bool] = {}

    def is_own(host: str) -> bool:
        """Whether this is an address of this machine: only such can be bound to."""
        if not (host.replace(".", "").isdigit() or ":" in host):
            return host == os.uname().nodename
        import socket  # not at the start of every process

        if host not in own:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
                try:
                    probe.bind((host, 0))
                    own[host] = True
                except OSError:
                    own[host] = False
        return own[host]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            who = _caller(sys._getframe(1))
            if who is not None and not any(part in who for part in _MAY_UNPICKLE):
                _forbid(f"{who} loads a pickle, of {args[0]}.{args[1]}")
        elif event in _ASKS:
            place = args[_ASKS[event]]
            host = place[0] if isinstance(place, tuple) and place else place
            if isinstance(place, tuple) or event in ("socket.getaddrinfo", "socket.gethostbyname"):
                host = host.decode() if isinstance(host, bytes) else host
                if host not in _ANYWHERE and not str(host).startswith(_LOOPBACK) and not is_own(str(host)):
                    _forbid(f"{event} to {host}, asked by {_caller(sys._getframe(1))}")

    sys.addaudithook(hook)


def _caller(frame: FrameType | None) -> str | None:
    """The file from which a pickle was loaded, or the network was asked."""
    while frame is not None and os.path.basename(frame.f_code.co_filename) in ("pickle.py", "socket.py"):
        frame = frame.f_back
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _forbid(what: str) -> None:
    with open(os.environ[LOG], "a", encoding="utf-8") as stream:
        stream.write(f"{os.environ.get('PYTEST_CURRENT_TEST')}: {' '.join(sys.argv[:4])}: {what}\n")
    raise Forbidden(f"forbidden in tests: {what}")


if os.environ.get(LOG) and not any(daemon in word for daemon in _DAEMONS for word in sys.orig_argv[1:]):
    watch()
