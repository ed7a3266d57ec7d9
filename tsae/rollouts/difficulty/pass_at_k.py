"""pass@k: how often at least one of k responses is right, by policy and band."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from tsae.base.statistics.intervals import change_interval, mean_interval
from tsae.rollouts.schema import BANDS

_COLUMNS = [
    "policy", "band", "k", "pass_at_k", "low", "high", "n_problems", "n_left_out", "difference", "difference_low",
    "difference_high", "n_paired",
]  # fmt: skip


def estimate(n: np.ndarray, successes: np.ndarray, k: int) -> np.ndarray:
    """Unbiased pass@k of every problem (Chen et al. 2021, arXiv 2107.03374): 1 − C(n − c, k) / C(n, k).

    Args:
        n: (n_problems,) responses.
        successes: (n_problems,) right ones.
        k: responses drawn.

    Returns:
        (n_problems,) float64; NaN where there are fewer than k responses.
    """
    found = np.full(len(n), np.nan)
    for total, right in {(int(a), int(c)) for a, c in zip(n, successes, strict=True) if a >= k}:
        # 1 − ∏ (1 − k / i) over i = n − c + 1 … n, which never overflows; a factor is 0 where every draw succeeds.
        missed = np.prod(1 - k / np.arange(total - right + 1, total + 1)) if total - right >= k else 0.0
        found[(n == total) & (successes == right)] = 1 - missed
    return found


def pass_at_k(
    rates: pd.DataFrame,
    banded: pd.DataFrame,
    *,
    reference: str,
    k: Sequence[int] = (),
    confidence: float = 0.95,
) -> pd.DataFrame:
    """pass@k by policy and band, with intervals over problems (`tsae.base.statistics.intervals`).

    Args:
        rates: of `difficulty`: n and successes of every policy and problem.
        banded: the same, with a column band, of the trajectories that are in their problem's band. A problem may have
            several rows, one a half: its pass@k is their mean. Where each half chose the other's band, responses of
            both halves must not be drawn together: halves that agree are rarely all right or all wrong in the middle.
        reference: the policy that others are compared with, problem by problem.
        k: by default powers of two up to the median number of responses to a problem.
        confidence: of the intervals.

    Returns:
        tidy: policy, band ("all" and every band present), k, pass_at_k, low, high, n_problems, n_left_out (problems
        with fewer than k responses), and difference, difference_low, difference_high against the reference on the
        n_paired problems that both have. The reference itself has NaN; fewer than 8 problems have no interval.
    """
    powers = [2**i for i in range(max(int(rates.n.median()), 1).bit_length())]
    policies = list(dict.fromkeys(rates.policy))
    rows: list[dict[str, Any]] = []
    for size in sorted(set(k)) or powers:
        for name in ("all", *(b for b in BANDS if len(banded) and (banded.band == b).any())):
            mine = rates if name == "all" else banded[banded.band == name]
            inside = (
                mine.assign(value=estimate(mine.n.to_numpy(), mine.successes.to_numpy(), size))
                .groupby(["problem_id", "policy"])
                .value.mean()
                .unstack()
                .reindex(columns=policies)
                .sort_index()
            )
            for policy in policies:
                values = inside[policy].dropna().to_numpy()
                if not len(values):
                    continue
                low, high = mean_interval(values, confidence)
                row = {"policy": policy, "band": name, "k": size, "pass_at_k": values.mean(), "low": low, "high": high}
                asked = mine.problem_id[mine.policy == policy].nunique()
                row |= {"n_problems": len(values), "n_left_out": asked - len(values)}
                paired = (inside[policy] - inside[reference]).dropna().to_numpy()
                row["n_paired"] = 0 if policy == reference else len(paired)
                if row["n_paired"]:
                    row["difference"] = paired.mean()
                    row["difference_low"], row["difference_high"] = change_interval(paired, confidence)
                rows.append(row)
    return pd.DataFrame(rows, columns=_COLUMNS)
