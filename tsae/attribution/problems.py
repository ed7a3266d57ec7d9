"""Problems that a run did not train on: what is measured there says what it learned, not what it remembers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np

from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts


def other_problems(path: str | Path, log: Rollouts, base: str) -> Rollouts:
    """Read the base's responses to problems that are not those of a log; two are the same if their prompts are equal.

    Args:
        path: Parquet file of rollouts.
        log: of the run.
        base: id of the model that training started from; responses of other policies are left out.

    Returns:
        the responses, in bands by the base's pass rates where there are problems of every band.

    Raises:
        TsaeError: where none is left.
    """
    found = Rollouts.read(path)
    first = np.flatnonzero(~log.frame.problem_id.duplicated())
    trained = {log.tokens(int(row))[0].tobytes() for row in first}
    others = np.array([found.tokens(row)[0].tobytes() not in trained for row in range(len(found))], dtype=bool)
    mine = others & ((found.frame.policy == base) | (len(found.policies) == 1)).to_numpy()
    if not mine.any():
        what = f"asks no other problems than the run's log, or has no response of {base} to them"
        raise TsaeError(what, where=path, fix="Sample others from the base (tsae rollouts sample), or leave it out.")
    found = found.select(np.flatnonzero(mine))
    if found.frame.band.isna().all():
        with suppress(TsaeError):  # a band has no problem: levels take their place, or nothing does
            found = found.with_bands(None)
    return found
