"""The table of planted truth: no line says what is not so more often than promised."""

from __future__ import annotations

import math

import check_statements
import numpy as np
import pytest

from tsae.diff.config import DiffConfig

DRAWS = 50  # scripts/check_statements.py makes 200 or more
QUICK = DiffConfig(n_bootstrap=100, n_permutations=1000, threads=1)


@pytest.mark.slow
@pytest.mark.parametrize("line", check_statements.LINES, ids=lambda line: f"{line.statement}: {line.where}")
def test_no_statement_is_false_more_often_than_promised(line: check_statements.Line) -> None:
    false, found = np.array([line.draw(seed, QUICK) for seed in range(DRAWS)]).T
    if np.isnan(false).all():  # Nothing false can be said; so that the line does show something:
        assert found.mean() > line.promised
        return
    error = max(false.std() / math.sqrt(len(false)), math.sqrt(line.promised * (1 - line.promised) / DRAWS / 4))
    assert false.mean() <= line.promised + 2.5 * error
