"""A command in a process that is forked off one with all imports. The forking process imports this module alone."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fault_injection.inside import sitecustomize
from tsae.cli import main


def command(words: Sequence[str], where: str, environment: Mapping[str, str], said: str, humble: bool) -> None:
    """Run a command and end with its exit status. What it prints goes to the files "out" and "err" of a folder."""
    os.setsid()
    os.environ.update(environment)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(Path(said) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.chdir(where)
    if humble:
        _respect_permissions()
    if "FAULT" in environment:
        sitecustomize.begin(environment["FAULT"])
    sys.argv = ["tsae", *words]
    main(list(words))


def _respect_permissions() -> None:
    """Let permissions of files count for the superuser, too (capabilities CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH)."""
    libc = ctypes.CDLL(None)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    for place in range(3):  # effective, permitted, inheritable
        sets[place] &= ~0b110
    libc.capset(header, sets)


for _name in os.environ.pop("FAULT_IMPORTS", "").split():
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
gc.freeze()  # what is shared with the forks stays shared
