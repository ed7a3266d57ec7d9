"""Rewards: check answers, choose the reward that means success, and compute advantages within groups.

Verifiers check whether a response gives the reference answer. `outcome_reward` is one rule for logs, training and
credit. Advantages are those that trainers define, and `group_table` says what each group teaches. A group is the
rollouts of one policy on one problem, in one step where the table has a column step.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pandas as pd

from tsae.base.filters import find_function
from tsae.errors import TsaeError, needing
from tsae.rollouts.schema import BANDS, problem_bands

Verifier = Callable[[str, str], bool]
"""(response, reference answer) -> is it right?"""

_NUMBER = re.compile(
    r"(?:-|(?<![\w)}])−)?"
    r"(?:(?<![\w.])(?:\d[\d,]*(?:\.\d+)?|\.\d+)[eE][-+]?\d{1,3}\b|\d[\d,]*(?:\.\d+)?|(?<![\w.])\.\d+)"
)
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\\!)(?=\d{3}(?!\d))")
"""LaTeX's commas without a space behind them."""


def exact(response: str, answer: str) -> bool:
    """The response is the answer, without spaces at the ends."""
    return response.strip() == answer.strip()


def last_number(response: str, answer: str) -> bool:
    """The last number of the response equals the last number of the answer, without thousands commas."""
    given, expected = number_in(response), number_in(answer)
    return given is not None and given == expected


def number_in(text: str) -> Decimal | None:
    """The last number of a text, exactly; None where it has none."""
    found = _NUMBER.findall(_THOUSANDS.sub("", text))
    return Decimal(found[-1].replace(",", "").replace("−", "-")) if found else None


def same_expression(response: str, answer: str) -> bool:
    """math-verify finds the response's answer equal to the reference as an expression: 0.5, \\frac{1}{2} and 50\\%.

    Raises:
        TsaeError: where math-verify is missing, or the reference answer is not an expression.
    """
    gold = expressions(answer) or expressions(f"${answer}$")
    if not gold:
        what = f"the reference answer {answer[:40]!r} is not a mathematical expression"
        fix = "Correct it, or check answers with last_number or a function of your own."
        raise TsaeError(what, where="verifier math", fix=fix)
    return equal(gold, expressions(response))


def expressions(text: str) -> list[Any]:
    """What math-verify takes for the answer of a text; empty where it finds none."""
    parse, _ = _math_verify()
    return list(_parsed(parse, text, _limit()))


@lru_cache(maxsize=1024)
def _parsed(parse: Callable[..., list[Any]], text: str, limit: int | None) -> tuple[Any, ...]:
    """Kept, because responses of a group are often alike, and even a short one takes a millisecond."""
    return tuple(parse(text, parsing_timeout=limit))


def equal(gold: list[Any], given: list[Any]) -> bool:
    """Whether math-verify finds two answers of `expressions` equal."""
    _, verify = _math_verify()
    return bool(verify(gold, given, timeout_seconds=_limit()))


def _limit() -> int | None:
    """Seconds; math-verify's limits need signals, which only the main thread gets."""
    return 5 if threading.current_thread() is threading.main_thread() else None


def _math_verify() -> tuple[Callable[..., list[Any]], Callable[..., bool]]:
    with needing("math-verify", "the verifier math", "verifier"):
        from math_verify import parse, verify
    return parse, verify


BY_NAME: dict[str, Verifier] = {"exact": exact, "last_number": last_number, "math": same_expression}
"""The verifiers that hold a response against a reference answer."""


def find_verifier(name: str) -> Verifier:
    """Find a verifier by name: exact, last_number, math, or ``module:function`` of the user's own.

    Raises:
        TsaeError: where there is none, or math needs math-verify, which is missing.
    """
    if name == "math":
        _math_verify()
    if name in BY_NAME:
        return BY_NAME[name]
    fix = f"Use {', '.join(BY_NAME)}, or module:function for your own (response, answer) -> bool."
    return cast(Verifier, find_function(name, takes=2, where="verifier", fix=fix))


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
    telling = list(names) if len(names) == 1 else [name for name in names if _TELLING.search(name.lower())]
    if len(telling) != 1:
        what = f"has the rewards {', '.join(names)}, and does not say which of them stands for a right answer"
        what = what if names else "has no reward, which could say what succeeded"
        raise TsaeError(what, where=where, fix="Name it (--outcome), or check the answers anew (--verifier).")
    return telling[0]


_EPSILON = 1e-4  # TRL's, added to the standard deviation
KINDS = ("all failures", "single success", "mixed", "all successes", "one response")


def group_advantages(
    rewards: np.ndarray,
    groups: np.ndarray,
    kind: Literal["grpo", "dr_grpo", "rloo"] = "grpo",
    *,
    ddof: int = 1,
    epsilon: float = _EPSILON,
) -> np.ndarray:
    """Advantages within groups.

    - grpo: (r − mean) / (s + ε), s the standard deviation, by default the unbiased one and ε = 1e-4 (as TRL);
    - dr_grpo: r − mean (Liu et al. 2025);
    - rloo: r − mean of the others = n/(n − 1) · (r − mean) (Ahmadian et al. 2024).

    A group of one, or of equal rewards, has advantage 0.

    Args:
        rewards: (n,) finite.
        groups: (n,) group labels.
        kind: one of these.
        ddof: 1 for the unbiased standard deviation, 0 for that of the group itself.
        epsilon: added to the standard deviation.

    Returns:
        (n,) float64.
    """
    _, group = np.unique(groups, return_inverse=True)
    n = np.bincount(group)
    rewards = np.asarray(rewards, dtype=float)
    centred = rewards - (np.bincount(group, weights=rewards) / n)[group]
    # Rounding leaves 1e-17 in groups of equal rewards; divided by a deviation of 0 it must stay 0.
    centred[_constant(rewards, group)[group]] = 0.0
    if kind == "dr_grpo":
        return centred
    if kind == "rloo":
        return centred * (n / np.maximum(n - 1, 1))[group]
    deviation = np.sqrt(np.bincount(group, weights=centred**2) / np.maximum(n - ddof, 1))
    return np.divide(centred, (deviation + epsilon)[group], out=np.zeros(len(rewards)), where=centred != 0)


def group_table(frame: pd.DataFrame, kind: Literal["grpo", "dr_grpo", "rloo"] = "grpo") -> pd.DataFrame:
    """What every group teaches.

    Args:
        frame: of `Rollouts.frame`. Trajectories of unknown outcome are left out, and those without a reward if others
            have one. If none has, a success counts 1 and a failure 0.
        kind: of the advantages.

    Returns:
        one row a group: policy, problem_id, band, n, successes, kind (one of `KINDS`, by outcomes), no_variance (all
        rewards are equal, so the group teaches nothing), top_advantage (the largest) and positive (sum of the positive
        advantages: what the group reinforces).
    """
    bands = problem_bands(frame)
    frame = frame[frame.outcome != "unknown"]
    if frame.reward.notna().any():
        frame = frame[frame.reward.notna()]
    right = (frame.outcome == "success").astype(float)
    rewards = (frame.reward if frame.reward.notna().any() else right).to_numpy()
    _, first, group = np.unique(group_names(frame), return_index=True, return_inverse=True)
    n, successes = np.bincount(group), np.bincount(group, weights=right).astype(int)
    advantages = group_advantages(rewards, group, kind)
    table = frame[["policy", "problem_id"]].iloc[first].reset_index(drop=True)
    table["band"] = table.problem_id.map(bands)
    table["n"], table["successes"] = n, successes
    table["kind"] = np.select(
        [n == 1, successes == 0, successes == n, successes == 1],
        ["one response", "all failures", "all successes", "single success"],
        "mixed",
    )
    table["no_variance"] = _constant(rewards, group)
    table["top_advantage"] = pd.Series(advantages).groupby(group).max()
    table["positive"] = np.bincount(group, weights=np.maximum(advantages, 0))
    return table


def group_summary(groups: pd.DataFrame) -> pd.DataFrame:
    """Count the groups of `group_table` by policy and band.

    Returns:
        policy, band ("all" and every band present), n_groups, a column of counts for every kind, no_variance, and
        single_success_share: the part of all positive advantage that single successes carry. In a band where nearly
        everything fails, training imitates these, whether a success was earned or luck.
    """
    rows = []
    for policy in dict.fromkeys(groups.policy):
        mine = groups[groups.policy == policy]
        for band in ("all", *(b for b in BANDS if (mine.band == b).any())):
            picked = mine if band == "all" else mine[mine.band == band]
            total, single = picked.positive.sum(), picked.positive[picked.kind == "single success"].sum()
            rows.append(
                {"policy": policy, "band": band, "n_groups": len(picked)}
                | {name: int((picked.kind == name).sum()) for name in KINDS}
                | {"no_variance": int(picked.no_variance.sum())}
                | {"single_success_share": single / total if total > 0 else np.nan}
            )
    return pd.DataFrame(rows)


def group_names(frame: pd.DataFrame) -> np.ndarray:
    """(n,) names of the trajectories' groups: same policy, same problem and, if steps are known, same step."""
    names = frame.policy + "\0" + frame.problem_id
    return (names + "\0" + frame["step"].astype(str) if "step" in frame.columns else names).to_numpy()


def _constant(rewards: np.ndarray, group: np.ndarray) -> np.ndarray:
    """(n_groups,) whether all rewards of a group are equal."""
    by_group = pd.Series(rewards).groupby(group)
    return (by_group.min() == by_group.max()).to_numpy()
