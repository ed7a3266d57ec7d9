"""Progress bars."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def progress_bar(
    what: str,
    unit: str,
    total: int | None = None,
    *,
    over: Iterable[Any] | None = None,
    shown: bool = True,
    initial: int = 0,
) -> Any:
    """A tqdm bar with its rate: for a with statement, or for a loop over the items of `over`.

    In a terminal a bar goes away when it is full, so that results are not below a screen of bars. A log keeps it.

    Args:
        what: stands before the bar.
        unit: what is counted; tokens and bytes ("B") are shown in thousands or millions.
        total: how many there are; known by itself where `over` has a length.
        over: items to loop over.
        shown: whether to show it.
        initial: how many were done before.
    """
    # tqdm reads TQDM_MININTERVAL, which the command line sets, when it is imported.
    from tqdm.auto import tqdm

    scaled, kept = unit in ("token", "B"), not sys.stderr.isatty()
    return tqdm(
        over, desc=what, total=total, unit=unit, unit_scale=scaled, disable=not shown, leave=kept, initial=initial
    )
