"""Planted truth: how often a report says what is not so, and how often it sees what is there.

    python scripts/check_statements.py
    python scripts/check_statements.py --only moved opposed --draws 1000

A statement is something that a report, or what is learned from one, says: that features moved, differ by outcome,
differ more in one band, are kept under a control or reinforced, that two runs moved them in opposite directions, that
a behaviour rose, that an edit does more than random ones, that credit has an effect. Each is drawn many times from
worlds whose truth is known (`scripts/statements`), where nothing is there, at the very boundary of what counts, and
where something is. Its false rate is the mean over draws of false statements / statements (0 where none is made),
which is what q promises; where a world has one thing to say (rose, beyond random, credit) it is the chance of a false
statement. What it finds is the mean share of what is planted; of controls, the share of their verdicts that are right.

Ends with one line of JSON: ratio = the worst false rate / what was promised for it.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tyro
from statements import Line, changes, controls, credit, diffs, random_sets, reinforced

import tsae

LINES: list[Line] = [line for of in (diffs, controls, changes, random_sets, reinforced, credit) for line in of.LINES]
"""Whoever adds a statement to the report adds its lines here."""


@dataclass(frozen=True)
class CheckStatements:
    """Rates of false statements, and power."""

    draws: int = 200
    """Worlds drawn for every line."""
    only: tuple[str, ...] = ()
    """Statements to check; all by default."""
    config: tsae.DiffConfig = field(
        default_factory=lambda: tsae.DiffConfig(n_bootstrap=200, n_permutations=1000, threads=1)
    )
    """Of the diffs."""


def mean(values: np.ndarray) -> float | None:
    """Of those that are known; None where none is."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def check(line: Line, draws: int, config: tsae.DiffConfig) -> dict[str, Any]:
    """Draw a line's worlds."""
    start = time.process_time()
    drawn = np.array([line.draw(seed, config) for seed in range(draws)])
    false, found = mean(drawn[:, 0]), mean(drawn[:, 1])
    return {
        "statement": line.statement,
        "planted": line.where,
        "false": false,
        "error": None if false is None else float(np.nanstd(drawn[:, 0])) / math.sqrt(draws),
        "promised": line.promised,
        "found": found,
        "seconds": round(time.process_time() - start, 1),
    }


def main() -> None:
    options = tyro.cli(CheckStatements, description=__doc__)
    rows: list[dict[str, Any]] = []
    print("| statement | planted | false | promised | found |\n|---|---|---|---|---|")
    for line in LINES:
        if options.only and line.statement not in options.only:
            continue
        row = check(line, options.draws, options.config)
        rows.append(row)
        false = "" if row["false"] is None else f"{row['false']:.3f} ± {row['error']:.3f}"
        found = "" if row["found"] is None else f"{row['found']:.2f}"
        print(f"| {line.statement} | {line.where} | {false} | {line.promised:g} | {found} |", flush=True)
    ratio = max((row["false"] / row["promised"] for row in rows if row["false"] is not None), default=None)
    worst = None if ratio is None else round(ratio, 2)
    rows = [{name: round(x, 4) if isinstance(x, float) else x for name, x in row.items()} for row in rows]
    print(json.dumps({"name": "check_statements", "ratio": worst, "draws": options.draws, "rows": rows}))


if __name__ == "__main__":
    main()
