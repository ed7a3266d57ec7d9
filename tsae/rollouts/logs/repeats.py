"""Repeats: what a log holds twice, which trajectories belong together, and what is odd about their groups.

All of it works on the index of an import: numbers and hashes of every trajectory (`logs.import_parts`).

1. A trajectory whose key comes again counts once if it is the same word for word; otherwise that is an error, or with
   ``--skip repeated`` the last one counts, as after a resume.
2. An id with several prompts is not the id of one problem, as numbers that start again at every step: id and prompt
   together are the problem, unless `ImportConfig.merge_prompts` says that they are variants of one.
3. Rows that the log holds twice word for word count once (`ImportConfig.copies`). Equal responses alone do not show
   that: a policy that is sure repeats itself. So either nearly all groups with different responses, or groups that are
   a multiple of the usual size, must consist of equal parts; and by the responses' frequencies chance must give that
   less than once in a hundred logs.
4. Prompts with several ids, and groups of unequal sizes, are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import log

import numpy as np
import pandas as pd
from scipy.special import gammaln

from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.log_files import LogFile

COLUMNS = ("file", "number", "problem", "prompt", "key", "trajectory", "content", "reward")
"""Columns of the index, beside source: the number of (policy, step)."""
_CHANCE, _NEARLY = log(0.01), 0.9
_GROUP = ["source", "problem"]
Place = Callable[[int], str]
"""File and line of a trajectory, by its number."""


def drop_repeats(
    index: pd.DataFrame, files: Sequence[LogFile], config: ImportConfig, place: Place, *, copies: bool
) -> np.ndarray:
    """(n,) bool: which trajectories stay; the last of repeated ones.

    A trajectory that the log has twice, word for word, counts once; so does a batch that is logged at every step that
    trains on it. Any other repetition is an error unless `config.skip` allows it.

    Args:
        index: of the log.
        files: the log's.
        config: of the import.
        place: see `Place`.
        copies: whether a file may repeat the one before it: TRL logs a generation batch at every step that trains on
            it.

    Raises:
        TsaeError: for a repeated trajectory, and for equal trajectories with different rewards; names both places.
    """
    kept, reward = np.ones(len(index), dtype=bool), index.reward.to_numpy()
    first, second = _neighbours(index["key"].to_numpy(), index["key"].to_numpy() != 0)
    trajectory = index.trajectory.to_numpy()
    differs = (trajectory[first] != trajectory[second]) | ~_equal(reward[first], reward[second])
    if copies and differs.any():
        other = _evaluations(index, files, first[differs], second[differs])
        if other.any() and "repeated" not in config.skip:
            at = int(np.flatnonzero(other)[0])
            what = f"is of a second table of step {index.step.iloc[at]}, with other prompts, as an evaluation logs it"
            raise TsaeError(what, where=place(at), fix="Keep the first of them with --skip repeated.")
        kept &= ~other
        stay = kept[first] & kept[second]
        first, second, differs = first[stay], second[stay], differs[stay]
    if differs.any() and "repeated" not in config.skip:
        a, b = first[differs][0], second[differs][0]
        what = f"the trajectory of {place(a)} comes here again, and is another"
        fix = "If the run resumed from an older checkpoint, keep what it logged last with --skip repeated."
        raise TsaeError(what, where=place(b), fix=fix)
    kept[first] = False
    if copies:
        bounds = [0, *(np.flatnonzero(np.diff(index.file)) + 1).tolist(), len(index)]
        content, file = index.content.to_numpy(), index.file.to_numpy()
        batches = [(int(file[low]), low, high) for low, high in pairwise(bounds) if low < high]
        for (before, *held), (number, low, high) in pairwise(batches):
            again = before == number - 1 and files[number].run == files[before].run and high - low > 1
            if again and np.array_equal(content[slice(*held)], content[low:high]):
                kept[low:high] = False
    if not config.noisy_rewards:
        first, second = _neighbours(trajectory, kept)
        differs = ~_equal(reward[first], reward[second])
        if differs.any():
            a, b = first[differs][0], second[differs][0]
            raise TsaeError(
                f"reward {reward[b]:g} for the trajectory that has {reward[a]:g} at {place(a)}: same step, problem and "
                "response",
                where=place(b),
                fix="Correct the log; if its rewards are noisy, as a judge's are, give --noisy-rewards.",
            )
    return kept


def _evaluations(index: pd.DataFrame, files: Sequence[LogFile], first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(n,) bool: trajectories of a table of wandb that an evaluation logged behind that of the training.

    Such a table has the run and step of the training's table, and other prompts. It lies in the same folder, because a
    run that was resumed writes into another one.

    Args:
        index: of the log.
        files: the log's.
        first, second: positions of trajectories that have one key and differ.
    """
    file, prompt = index["file"].to_numpy(), index.prompt.to_numpy()
    folder = pd.factorize(np.array([str(file.path.parent) for file in files]))[0][file]
    other = (file[first] != file[second]) & (folder[first] == folder[second]) & (prompt[first] != prompt[second])
    table = index.groupby(["file", "step"]).ngroup().to_numpy()
    return np.isin(table, table[second[other]])


def goes_back(index: pd.DataFrame, files: Sequence[LogFile]) -> Iterator[str]:
    """Where the steps of a file go back to groups that it had before, as after a resume.

    A file in the order of its problems goes back too, but not to groups that it had; a shuffled one does all the time.

    Args:
        index: of the trajectories that stay.
        files: the log's.
    """
    for number, rows in index.dropna(subset=["step"]).groupby("file"):
        back, turn = rows.step.diff() < 0, (rows.step.diff() != 0).cumsum()
        turns = turn.groupby([rows[name] for name in _GROUP]).nunique()
        if 0 < back.sum() < rows.step.nunique() and (turns > 1).any():
            yield (
                f"{files[number].path.name} goes back to step {rows.step[back].iloc[0]} and has groups of it twice, as "
                "when a run resumed from an older checkpoint: both attempts count (delete the lines of the first)"
            )


class Groups:
    """The groups of a log.

    Args:
        index: of the trajectories that stay, so far.
        config: of the import.
    """

    def __init__(self, index: pd.DataFrame, config: ImportConfig) -> None:
        self.config = config
        self.several = _several(index, "problem", "prompt")
        """By hash of a problem id with several prompts, how many it has."""
        self.shared = _several(index, "prompt", "problem")
        """By hash of a prompt with several problem ids, how many it has."""
        rows = index[["source", "problem", "content"]].rename(columns={"content": "unstepped"})
        rows["problem"] = self.problem(index)
        # Unsigned: numpy adds and shifts without overflow.
        rows["content"] = (
            index.trajectory.to_numpy()
            ^ (index.content.to_numpy() << np.uint64(1))
            ^ index.reward.to_numpy().view(np.uint64)
        )
        groups = _parts(rows)
        parts, self._sure = _equal_parts(groups)
        self._within = self._repeats(rows, parts)
        # A whole group comes again under another step or policy.
        again = groups.mixed & groups.duplicated("content")
        self._again = self._repeats(rows, again.map({True: np.inf, False: 1.0}))
        found = [self._within] if config.copies == "drop" or (config.copies == "auto" and self._sure) else []
        found += [self._again] if config.copies == "drop" else []
        self.dropped = np.unique(np.concatenate([np.zeros(0, np.int64), *found]))
        """Numbers of the trajectories that repeat others, and do not count."""
        self._sizes = rows[_GROUP][~rows.index.isin(self.dropped)].groupby(_GROUP).size()

    def problem(self, index: pd.DataFrame) -> np.ndarray:
        """(n,) hashes of the problems of trajectories."""
        problem, prompt = index.problem.to_numpy(), index.prompt.to_numpy()
        apart = np.isin(problem, self.several.index) & (not self.config.merge_prompts)
        return np.where(apart, problem ^ prompt, problem)

    def _repeats(self, rows: pd.DataFrame, parts: pd.Series) -> np.ndarray:
        """Numbers of the trajectories that repeat others, of groups that consist of so many equal parts."""
        if not (parts > 1).any():
            return np.zeros(0, np.int64)
        alike = rows.groupby([*_GROUP, "content"]).content
        mine = parts.reindex(pd.MultiIndex.from_frame(rows[_GROUP])).to_numpy()
        return rows.index[alike.cumcount() >= np.ceil(alike.transform("size") / mine)].to_numpy()

    def notes(self, *, odd: bool, ids: bool = True) -> Iterator[str]:
        """What is to be reported.

        Args:
            odd: what most logs do not have, or what is not surely wrong.
            ids: whether the log has problem ids.
        """
        if odd and len(self.several):
            yield f"{len(self.several):,} problem ids have several prompts each, {self.several.sum():,} in all: " + (
                "each id counts as one problem, as asked (--merge-prompts)"
                if self.config.merge_prompts
                else "every prompt counts as a problem of its own (--merge-prompts, if each id is one problem)"
            )
        if odd and ids and len(self.shared):
            yield (
                f"{len(self.shared):,} prompts have several problem ids each, {self.shared.sum():,} in all: every id "
                "counts as a problem of its own (--column problem_id=prompt, if equal prompts are one problem)"
            )
        if (n := len(self._within)) and odd == self._sure:
            yield (
                f"{n:,} trajectories repeat others of their groups word for word, which chance "
                + ("hardly gives: " if self._sure else "may give: ")
                + ("they count once (--copies keep)" if len(self.dropped) else "all of them count (--copies drop)")
            )
        if not odd and (n := len(self._again)):
            yield (
                f"{n:,} trajectories come again under another step or policy, word for word: "
                + ("the first count" if self.config.copies == "drop" else "all of them count (--copies drop)")
            )
        sizes = Counter[int](() if odd else self._sizes)
        if len(sizes) > 1:
            usual = max(sizes, key=lambda size: (sizes[size], size))
            cut = int((self._sizes[self._sizes < usual].groupby("problem").sum() == usual).sum())
            shown = ", ".join(f"{times:,} of {size:,}" for size, times in sizes.most_common(4)) + ", …" * (
                len(sizes) > 4
            )
            yield f"groups have unequal numbers of trajectories: {shown}" + (
                f"; {cut:,} are cut, with parts in several steps or policies (--column step=NAME, policy=NAME)"
                * (cut > 0)
            )


def _parts(rows: pd.DataFrame) -> pd.DataFrame:
    """By group: its size, of how many equal parts it consists, the logarithm of the chance of that, whether its
    trajectories differ, and what is in it, whatever its step and policy."""
    times = rows.groupby([*_GROUP, "content"]).content.transform("size")
    of, by = times.groupby([rows[name] for name in _GROUP]), rows.groupby(_GROUP)
    found = pd.DataFrame({"size": of.size(), "parts": of.agg(np.gcd.reduce), "content": by.unstepped.sum()})
    # Each equal part counts as one draw. Two draws agree as often as two rows of the group do.
    n, agree = found["size"] / found.parts, of.mean() / found["size"]
    return found.assign(chance=np.minimum(n * np.log(agree) + gammaln(n + 1), 0), mixed=agree < 1)


def _equal_parts(groups: pd.DataFrame) -> tuple[pd.Series, bool]:
    """(of how many equal parts each group consists, 1 where that says nothing; whether chance hardly gives them)."""
    even = groups.parts > 1
    if even.any() and (even & groups.mixed).sum() >= _NEARLY * groups.mixed.sum():
        return groups.parts * 0 + np.gcd.reduce(groups.parts[even]), groups.chance[even].sum() < _CHANCE
    usual = groups["size"][~even].mode().max()
    chosen = even & (groups["size"] == usual * groups.parts)
    return groups.parts.where(chosen, 1), groups.chance[chosen].sum() < _CHANCE


def _several(index: pd.DataFrame, name: str, other: str) -> pd.Series:
    """By value of a column that stands beside several of another, how many these are."""
    counts = index[[name, other]].drop_duplicates()[name].value_counts(sort=False)
    return counts[counts > 1]


def _equal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(n,) bool: equal numbers, or both unknown (NaN)."""
    return np.asarray((a == b) | (np.isnan(a) & np.isnan(b)))


def _neighbours(values: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions of equal values, each with the next one of that value, ordered by the second."""
    rows = np.flatnonzero(mask)
    order = rows[np.argsort(values[rows], kind="stable")]
    equal = np.flatnonzero(values[order][1:] == values[order][:-1])
    first, second = order[equal], order[equal + 1]
    by_second = np.argsort(second)
    return first[by_second], second[by_second]
