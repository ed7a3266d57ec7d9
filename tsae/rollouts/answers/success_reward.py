"""Choose the reward that means success: one rule for logs, training and credit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tsae.errors import TsaeError

_TELLING = re.compile(r"(?<!in)(?:accura|correct)|(?<![a-z])acc(?![a-z])")


def outcome_reward(names: Sequence[str], asked: str | None = None, where: str | Path | None = None) -> str:
    """Name of the reward that means success; never a sum of several.

    It is the one that was asked for, else the only one, else the only one whose name says accuracy or correctness.

    Args:
        names: of the rewards, at least one.
        asked: the name that the user gave (`--outcome`).
        where: the log or argument, for error messages.

    Raises:
        TsaeError: where the asked one is not there, or nothing says which of several rewards means success.
    """
    if asked is not None:
        if asked not in names:
            what = f"has no reward {asked!r}; there are {', '.join(names) or 'none'}"
            raise TsaeError(what, where=where, fix="Name one of these.")
        return asked
    if not names:
        raise TsaeError("has no reward, which could say what succeeded", where=where, fix="Score the responses first.")
    telling = list(names) if len(names) == 1 else [name for name in names if _TELLING.search(name.lower())]
    if len(telling) != 1:
        what = f"has the rewards {', '.join(names)}, and does not say which of them stands for a right answer"
        raise TsaeError(what, where=where, fix="Name it (--outcome), or check the answers anew (--verifier).")
    return telling[0]
