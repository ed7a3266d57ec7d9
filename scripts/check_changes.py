"""How often a behaviour is said to have risen or fallen where it did neither, by number of problems.

From this comes the number of problems below which nothing is called a change. The worlds are those of
check_statements.py. Called a change is what the interval of the paired change leaves 0 out of. Beside the intervals of
`tsae.base.statistics`, which call nothing a change below 8 problems, the percentile bootstrap.

    python scripts/check_changes.py [--draws 4000]

Ends with one line of JSON: {"name", "fewest", "rates": {world: {n: rate}}, "worst": the largest of n >= fewest}.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
from numpy.random import Generator
from scipy.stats import t as student
from statements.changes import WORLDS

from tsae.base.statistics import FEWEST, change_interval

PROBLEMS = (2, 3, 5, 6, 8, 10, 16, 30, 60)


def percentile_calls(rng: Generator, differences: np.ndarray) -> np.ndarray:
    """(n_draws,) whether the percentile bootstrap calls a change; (n_draws, n) differences."""
    n = differences.shape[1]
    weights = rng.multinomial(n, np.full(n, 1 / n), size=1000) / n
    low, high = np.quantile(differences @ weights.T, [0.025, 0.975], axis=1)
    return np.asarray((low > 1e-12) | (high < -1e-12))


def t_calls(differences: np.ndarray) -> np.ndarray:
    """(n_draws,) whether Student's t calls a change, as `change_interval` does from 8 problems on."""
    n = differences.shape[1]
    half = student.ppf(0.975, n - 1) * differences.std(1, ddof=1) / np.sqrt(n)
    calls = np.asarray(np.abs(differences.mean(1)) > half + 1e-12)
    if n >= FEWEST:  # The same, to the last digit, as what is shown.
        low, high = change_interval(differences[0], 0.95)
        assert calls[0] == (low > 1e-12 or high < -1e-12)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--draws", type=int, default=4000)
    n_draws = parser.parse_args().draws
    rng = np.random.default_rng(0)
    rates: dict[str, dict[str, float]] = {}
    print(f"{'problems':<42}" + "".join(f"{n:>13}" for n in PROBLEMS))
    for name, draw in WORLDS.items():
        cells, rates[name] = [], {}
        for n in PROBLEMS:
            differences = np.stack([draw(rng, n) for _ in range(n_draws)])
            rate = float(t_calls(differences).mean())
            rates[name][str(n)] = round(rate, 4)
            cells.append(f"{rate:.3f} ({percentile_calls(rng, differences).mean():.3f})")
        print(f"{name:<42}" + "".join(f"{cell:>13}" for cell in cells), flush=True)
    print("Student's t (percentile bootstrap); below 8 problems nothing is called a change")
    worst = max(rate for found in rates.values() for n, rate in found.items() if int(n) >= FEWEST)
    print(json.dumps({"name": "changes", "fewest": FEWEST, "rates": rates, "worst": worst}))


if __name__ == "__main__":
    main()
