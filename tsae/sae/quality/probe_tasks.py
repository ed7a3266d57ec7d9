"""Tasks for probes of single response tokens: labels, the tokens that have them, weights and folds.

Shortcuts that are ruled out:

- The problem: folds are over problems, so that a probe never sees the problems that it is tested on. Only the label
  "problem" needs every problem in training: there folds are over trajectories, and only problems with several count.
- Difficulty: outcome and behaviours are balanced within each problem (only problems that have both kinds count), so
  that knowing the problem does not help.
- The prompt: only response tokens are probed.
- Frequent classes: all classes weigh the same; chance is 1 / number of classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tsae.checkpoints.loading import text_of
from tsae.errors import TsaeError
from tsae.rollouts.schema import BANDS
from tsae.rollouts.table import Rollouts
from tsae.sae.quality.probes import Task, folds

Annotator = Callable[[str, Sequence[str]], Sequence[str]]
"""(prompt text, response tokens as strings) -> class of each response token."""

_FOLDS, _MIN_UNITS = 5, 10


class Places(NamedTuple):
    """Which response tokens are probed."""

    row: np.ndarray
    """(n,) row id of the trajectory."""
    token_id: np.ndarray
    """(n,)."""
    place: np.ndarray
    """(n,) position in the response."""


def trajectory_tasks(
    rollouts: Rollouts, places: Places, max_problems: int, seed: int
) -> tuple[list[Task], dict[str, str]]:
    """Tasks about trajectories: band, outcome, behaviours, problem; and the reasons of labels that cannot be probed.

    Args:
        rollouts: that the tokens are of.
        places: of the tokens.
        max_problems: classes of the label "problem".
        seed: of the folds.
    """
    frame = rollouts.frame
    problem = np.unique(frame.problem_id.to_numpy(), return_inverse=True)[1]
    found: dict[str, Task | str] = {}
    band = np.array([BANDS.index(b) if b in BANDS else -1 for b in frame.band])
    found["band"] = _between("band", band[places.row], problem[places.row], seed)
    outcome = np.array([{"failure": 0, "success": 1}.get(o, -1) for o in frame.outcome])
    found["outcome"] = _within("outcome", outcome[places.row], problem[places.row], seed)
    for name in rollouts.info.get("behaviours", []):
        values = frame[name].to_numpy(dtype=float)
        if set(np.unique(values[~np.isnan(values)])) <= {0.0, 1.0}:
            code = np.where(np.isnan(values), -1, values).astype(int)
            found[name] = _within(name, code[places.row], problem[places.row], seed)
    found["problem"] = _which_problem(problem, places.row, max_problems, seed)
    return _tasks_and_reasons(found)


def _tasks_and_reasons(found: Mapping[str, Task | str]) -> tuple[list[Task], dict[str, str]]:
    """The tasks, and the reasons of the labels that cannot be probed."""
    tasks = [task for task in found.values() if isinstance(task, Task)]
    return tasks, {label: reason for label, reason in found.items() if isinstance(reason, str)}


def token_tasks(
    rollouts: Rollouts,
    places: Places,
    max_tokens: int,
    annotator: Annotator | None,
    token_strings: Sequence[str] | None,
    seed: int,
) -> tuple[list[Task], dict[str, str]]:
    """Tasks about tokens: identity and class; and the reasons of labels that cannot be probed.

    Args:
        rollouts: that the tokens are of.
        places: of the tokens.
        max_tokens: classes of the label "identity", the commonest tokens.
        annotator: gives the label "class"; needs token_strings.
        token_strings: text of every token id.
        seed: of the folds.
    """
    problem = np.unique(rollouts.frame.problem_id.to_numpy(), return_inverse=True)[1][places.row]
    labels = {"identity": places.token_id}
    if annotator is not None:
        if token_strings is None:
            raise TsaeError("an annotator needs the text of tokens", where="separation", fix="Give token_strings.")
        labels["class"] = _classes(rollouts, places, annotator, token_strings)
    found: dict[str, Task | str] = {}
    for label, values in labels.items():
        names, code, count = np.unique(values, return_inverse=True, return_counts=True)
        common = np.argsort(-count, kind="stable")[:max_tokens]
        rank = np.full(len(names), -1)
        rank[common] = np.arange(len(common))
        found[label] = _between(label, rank[code], problem, seed)
    return _tasks_and_reasons(found)


def _classes(rollouts: Rollouts, places: Places, annotator: Annotator, token_strings: Sequence[str]) -> np.ndarray:
    """(n,) class names of the drawn tokens."""
    prompts = rollouts.table["prompt"].to_pylist()
    found: list[str] = []
    classes: Sequence[str] = ()
    for i, row in enumerate(places.row.tolist()):
        if not i or row != places.row[i - 1]:
            _, response = rollouts.tokens(row)
            classes = annotator(prompts[row] or "", [text_of(token_strings, id) for id in response])
        found.append(classes[places.place[i]])
    return np.array(found)


def _between(label: str, code: np.ndarray, problem: np.ndarray, seed: int) -> Task | str:
    """A label that other problems have too: classes weigh the same; classes of few problems are left out."""
    classes = [c for c in np.unique(code[code >= 0]) if len(np.unique(problem[code == c])) >= _MIN_UNITS]
    if len(classes) < 2:
        return f"fewer than two classes occur in {_MIN_UNITS} problems"
    token = np.flatnonzero(np.isin(code, classes))
    y = np.searchsorted(classes, code[token])
    weight = 1 / np.bincount(y)[y]
    unit = np.unique(problem[token], return_inverse=True)[1]
    # Where every problem has one class, spread the classes over the folds.
    first = np.zeros(unit.max() + 1, dtype=int)
    first[unit[::-1]] = y[::-1]
    return Task(label, token, y, weight, unit, folds(len(first), _FOLDS, seed, within=first))


def _within(label: str, code: np.ndarray, problem: np.ndarray, seed: int) -> Task | str:
    """A binary label that varies within problems: both classes weigh the same in each problem that has both."""
    zeros, ones = (np.bincount(problem[code == c], minlength=problem.max() + 1) for c in (0, 1))
    mixed = (zeros > 0) & (ones > 0)
    if mixed.sum() < _MIN_UNITS:
        return f"{mixed.sum()} problems have both kinds, fewer than {_MIN_UNITS}"
    token = np.flatnonzero(mixed[problem] & (code >= 0))
    y = code[token]
    weight = 1 / np.stack([zeros, ones])[y, problem[token]]
    unit = np.unique(problem[token], return_inverse=True)[1]
    return Task(label, token, y, weight, unit, folds(unit.max() + 1, _FOLDS, seed))


def _which_problem(problem: np.ndarray, row: np.ndarray, most: int, seed: int) -> Task | str:
    """Which problem a token's trajectory answers: folds over trajectories."""
    rows = np.unique(row)
    n_trajectories = np.bincount(problem[rows])
    several = np.flatnonzero(n_trajectories >= 3)
    if len(several) < 2:
        return "fewer than two problems have three trajectories"
    chosen = several[np.linspace(0, len(several) - 1, min(most, len(several))).astype(int)]
    token = np.flatnonzero(np.isin(problem[row], chosen))
    y = np.searchsorted(chosen, problem[row[token]])
    weight = 1 / np.bincount(y)[y]
    trajectories, unit = np.unique(row[token], return_inverse=True)
    of_problem = problem[trajectories]
    n_folds = min(_FOLDS, int(n_trajectories[chosen].min()))
    return Task("problem", token, y, weight, unit, folds(len(trajectories), n_folds, seed, within=of_problem))
