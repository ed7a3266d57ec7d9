"""Claims on what responses do along a training: lone successes (c), behaviour first (d), one format wins (j)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from tsae.base.statistics.intervals import change_interval
from tsae.claims.evidence import Evidence, Missing
from tsae.claims.judging import CONFIDENCE, Judgement, Part
from tsae.claims.literature import CLAIMS
from tsae.claims.problem_effects import between, part, those_that_can, within
from tsae.rollouts.behaviours import measures, with_behaviours
from tsae.rollouts.logs.entry import hash64
from tsae.rollouts.rewards import group_names
from tsae.rollouts.table import Rollouts

_GROUP = 4
"""Fewest responses of a group in which a success can be called lone."""
_BLOCKS = 6
"""Parts into which the steps of a log are cut."""
_FEWEST_STEPS = 4
_WINS, _ALONE, _BETTER = 0.8, 0.95, 0.1
"""Share from which on a format has won; share from which on there was no other to begin with; lead in success that
would decide."""
_LONGER = "a longer log, with every step (`tsae rollouts formats` says what to switch on)"
_SIGNS = (
    {"skipped_steps": "more steps are skipped", "direct_answer": "answers come directly more often"},
    {"repeated_answer": "answers are repeated more often"},
)
"""What stands for skipped computation and for repetition: the first that a run has."""
Place = tuple[float, Any]
"""A step, and what was answered there: a policy, or rows of a log."""


def lone_successes(run: Evidence) -> Judgement:
    """c: lone successes of a group against successes of groups with several, by problem."""
    outline = run.outline
    outline = outline[outline.outcome != "unknown"]
    right, group = outline.outcome == "success", pd.Series(_groups(outline), index=outline.index)
    size, successes = group.map(group.value_counts()), right.groupby(group).transform("sum")
    lone = outline.index[right & (successes == 1) & (size >= _GROUP)]
    others = outline.index[right & (successes > 1) & (size >= _GROUP)]
    if not len(lone) or not len(others):
        raise Missing(
            f"groups of {_GROUP} responses or more with one success, and others with several (there are {len(lone)} "
            f"lone successes and {len(others)} others)",
            _LONGER,
        )
    frames = [_described(run.logged(rows)).frame for rows in (lone, others)]
    for frame in frames:
        frame["shorter"] = _shorter(frame, outline, group)
    said = {
        "direct_answer": "Lone successes answer directly more often than other successes.",
        "skipped_steps": "Lone successes skip more steps than other successes.",
        "shorter": "Lone successes are shorter than the median of their group more often than other successes.",
    }
    parts, left = those_that_can(
        [
            partial(between, told, _by_problem(frames[0], name), _by_problem(frames[1], name), _LONGER)
            for name, told in said.items()
            if all(name in frame for frame in frames)
        ]
    )
    return Judgement(
        CLAIMS["c"],
        parts,
        caveat=f"{left}Whether this does the damage needs trainings without lone successes, or without dividing by the "
        "deviation (TRL: scale_rewards=False).",
        whole=False,
    )


def behaviour_first(run: Evidence) -> Judgement:
    """d: at the last checkpoint, or block of log steps, before accuracy fell: had behaviour moved already?"""
    found: list[Part] = []
    caveats: list[str] = []
    reasons: list[Missing] = []
    rollouts = run.at_steps
    for name, path in run.steps(rollouts) if run.fresh else ():
        accuracy = {policy: run.success(policy, of=rollouts) for _, policy in path}
        try:
            before = _before_the_fall(path, partial(_fell, accuracy), name)
            start, then = (_described(rollouts.where(policy=policy)) for policy in (path[0][1], before[1]))
            parts, left = _moved(start, then, f"At step {before[0]} of {name}, before accuracy fell", within)
        except Missing as reason:
            reasons.append(reason)
            continue
        found += parts
        caveats += [left] if left else []
    if not found and not reasons:
        outline = run.outline
        blocks = _blocks(outline)
        before = _before_the_fall(blocks, partial(_fell_in_log, outline), "the log")
        start, then = (_described(run.logged(rows)) for rows in (blocks[0][1], before[1]))
        parts, left = _moved(start, then, f"From step {before[0]:g}, before accuracy fell", between)
        found, caveats = list(parts), [left] if left else []
    if not found:
        raise reasons[0]
    caveats += [f"Left out for lack of {reason.needs}. " for reason in reasons]
    told = "".join(dict.fromkeys(caveats)).strip()
    return Judgement(CLAIMS["d"], tuple(found), caveat=told, whole=not told)


def one_format_wins(run: Evidence) -> Judgement:
    """j: the top format at the end of the first epoch, and how successful it was at the start.

    Which format is on top is seen in one half of the last problems, and how many have it is counted in the other: among
    formats that are as common, the top one of the very responses that are counted would lead by chance.
    """
    outline = run.outline
    asked = outline.drop_duplicates(["problem_id", "step"]).sort_values("step")
    again = asked[asked.problem_id.duplicated()]
    epoch = outline if again.empty else outline[outline.step < again.step.min()]
    steps = np.sort(epoch.step.unique())
    if len(steps) < _FEWEST_STEPS:
        raise Missing(f"{_FEWEST_STEPS} steps or more of the first epoch (there are {len(steps)})", _LONGER)
    quarter = len(steps) // 4
    rows = [epoch.index[np.isin(epoch.step, some)] for some in (steps[:quarter], steps[-quarter:])]
    start, end = (_described(run.logged(some)).frame for some in rows)
    shares = pd.crosstab(end.problem_id, end.format, normalize="index")
    seen = sorted(shares.index, key=hash64)[::2]
    winner = str(shares.loc[seen].mean().idxmax())
    shares = shares.drop(index=seen)
    before = (start.format == winner).groupby(start.problem_id).mean()
    if before.mean() >= _ALONE:
        share = f"“{winner}” has {100 * before.mean():.0f} % of the first steps"
        raise Missing(f"responses in several formats to begin with ({share})", "a base that answers in several formats")
    known = start[start.outcome != "unknown"]
    right = [_by_problem(some.assign(right=some.outcome == "success"), "right")
             for some in (known[known.format != winner], known[known.format == winner])]  # fmt: skip
    last = f"in step {steps[-1]:g}" if quarter == 1 else f"in steps {steps[-quarter]:g} to {steps[-1]:g}"
    most = f"More than {100 * _WINS:.0f} % of responses {last} have the format “{winner}”."
    lead = f"At the start it was not by {100 * _BETTER:.0f} points more successful than the others."
    several = "a base that answers a problem in several formats"
    parts = (
        part(most, shares[winner].to_numpy(), _LONGER, margin=_WINS, same=1.0),
        between(f"It has a larger share {last} than at the start.", shares[winner], before, _LONGER),
        within(lead, right[0], right[1], several, margin=-_BETTER),
    )
    told = "No problem is asked twice in this log: all of it counts as the first epoch. " if again.empty else ""
    told += f"The format was chosen on {len(seen)} other problems of these steps."
    return Judgement(CLAIMS["j"], parts, caveat=told)


def _before_the_fall(path: Sequence[Place], fell: Callable[[Place, Place], bool], name: str) -> Place:
    """The place before the first one whose accuracy is clearly below that of the first place of all.

    Raises:
        Missing: where accuracy does not fall, or there is no place between.
    """
    for previous, place in pairwise(path):
        if fell(path[0], place):
            if previous is path[0]:
                raise Missing(
                    f"checkpoints before accuracy falls ({name}: it has fallen at the first one after the start)",
                    "more frequent checkpoints (save_steps), of which all are read (`--checkpoints`)",
                )
            return previous
    raise Missing(f"a fall of accuracy ({name}: it does not clearly fall)", "a training in which it does")


def _fell(accuracy: Mapping[str, pd.Series], start: Place, then: Place) -> bool:
    """Whether accuracy fell within problems; of too few of them it is not known to."""
    differences = (accuracy[start[1]] - accuracy[then[1]]).dropna().to_numpy()
    return change_interval(differences, CONFIDENCE)[0] > 0


def _fell_in_log(outline: pd.DataFrame, start: Place, then: Place) -> bool:
    """The same, over other problems."""
    try:
        return between("", _success(outline, start[1]), _success(outline, then[1]), _LONGER).holds is True
    except Missing:
        return False


def _moved(start: Rollouts, then: Rollouts, when: str, compare: Callable[..., Part]) -> tuple[tuple[Part, ...], str]:
    """Shorter responses, skipped computation and repetition at a place against the start."""
    tables = [measures(side).assign(problem_id=side.frame.problem_id) for side in (start, then)]
    first, second = ({name: _by_problem(table, name) for name in table if name != "problem_id"} for table in tables)
    wanted = [(f"{when}, responses are shorter.", first["response_length"], second["response_length"])]
    for signs in _SIGNS:
        if (name := next((name for name in signs if name in first and name in second), None)) is not None:
            wanted.append((f"{when}, {signs[name]}.", second[name], first[name]))
    return those_that_can([partial(compare, *one, _LONGER) for one in wanted])


def _blocks(outline: pd.DataFrame) -> list[Place]:
    """(first step, rows) of consecutive parts of a log."""
    steps = np.sort(outline.step.unique())
    if len(steps) < _FEWEST_STEPS:
        raise Missing(f"{_FEWEST_STEPS} steps of a log or more (there are {len(steps)})", _LONGER)
    parts = np.array_split(steps, min(_BLOCKS, len(steps)))
    return [(float(some[0]), outline.index[np.isin(outline.step, some)]) for some in parts]


def _success(outline: pd.DataFrame, rows: pd.Index) -> pd.Series:
    some = outline.loc[rows]
    some = some[some.outcome != "unknown"]
    return (some.outcome == "success").groupby(some.problem_id).mean()


def _shorter(frame: pd.DataFrame, outline: pd.DataFrame, group: pd.Series) -> np.ndarray:
    """(n,) 1 for a response that is shorter than the median of its group, else 0."""
    median = outline.response_length.groupby(group).median()
    return (frame.response_length.to_numpy() < median[_groups(frame)].to_numpy()).astype(float)


def _groups(frame: pd.DataFrame) -> np.ndarray:
    """(n,) names of groups. Steps are numbers of one type, although a part of a log may lack some."""
    return group_names(frame.assign(step=frame.step.astype(float)))


def _described(rollouts: Rollouts) -> Rollouts:
    if rollouts.frame.response.isna().any():
        raise Missing("the texts of the responses", "a log with texts")
    return with_behaviours(rollouts)


def _by_problem(frame: pd.DataFrame, name: str) -> pd.Series:
    return frame[name].astype(float).groupby(frame.problem_id).mean()


LOGGED: dict[str, Callable[[Evidence], Judgement]] = {
    "c": lone_successes,
    "d": behaviour_first,
    "j": one_format_wins,
}
