"""Problems beside those of a log, on which targets are measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.builders import make_rollouts
from tsae.attribution.sample_kinds import other_problems
from tsae.errors import TsaeError


def test_problems_of_the_log_are_left_out(tmp_path: Path) -> None:
    every = make_rollouts(n_problems=6)
    every.write(tmp_path / "all.parquet")
    log = every.select((every.frame.problem_id.isin(every.frame.problem_id.unique()[:2])).to_numpy().nonzero()[0])
    base = every.policies[0]
    found = other_problems(tmp_path / "all.parquet", log, base)
    prompts = {log.tokens(row)[0].tobytes() for row in range(len(log))}
    kept = [row for row in range(len(every)) if every.tokens(row)[0].tobytes() not in prompts]
    assert len(found) == sum(every.frame.policy[row] == base for row in kept) > 0
    assert set(found.frame.policy) == {base}
    with pytest.raises(TsaeError, match="asks no other problems"):
        other_problems(tmp_path / "all.parquet", every, base)
