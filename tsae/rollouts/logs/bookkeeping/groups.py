"""Groups of a log: which trajectories belong together, and what is odd about it.

1. An id with several prompts is no problem's, as numbers that start again at every step: id and prompt together are the
   problem, unless `ImportConfig.merge_prompts` says that they are variants of one.
2. Rows that the log holds twice word for word count once (`ImportConfig.copies`). Equal responses alone do not show
   that: a policy that is sure repeats itself. So either nearly all groups with different responses, or groups that are
   a multiple of the usual size, must consist of equal parts; and by the responses' frequencies chance must give that
   less than once in a hundred logs.
3. Prompts with several ids, and groups of unequal sizes, are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from math import log

import numpy as np
import pandas as pd
from scipy.special import gammaln

from tsae.rollouts.config import ImportConfig

Buckets = Callable[[str], Iterator[tuple[np.ndarray, np.ndarray]]]
"""Gets a column of the ledger; gives (numbers, lines) of the kept trajectories, those of equal values together."""
_CHANCE, _NEARLY = log(0.01), 0.9
_GROUP = ["source", "problem"]


class Groups:
    """The groups of a log.

    Args:
        buckets: of the ledger.
        config: of the import.
    """

    def __init__(self, buckets: Buckets, config: ImportConfig) -> None:
        self._buckets, self.config = buckets, config
        self.several = _several(buckets, "problem", "prompt")
        """By hash of a problem id with several prompts, how many it has."""
        self.shared = _several(buckets, "prompt", "problem")
        """By hash of a prompt with several problem ids, how many it has."""
        groups = pd.concat([_parts(rows) for rows in self._rows()])
        parts, self._sure = _equal_parts(groups)
        self._within = self._repeats(parts)
        # A whole group comes again under another step or policy.
        again = groups.mixed & groups.duplicated("content")
        self._again = self._repeats(again.map({True: np.inf, False: 1.0}))
        found = [self._within] if config.copies == "drop" or (config.copies == "auto" and self._sure) else []
        found += [self._again] if config.copies == "drop" else []
        self.dropped = np.unique(np.concatenate([np.zeros(0, np.int64), *found]))
        """Numbers of the trajectories that repeat others, and do not count."""

    def problem(self, lines: np.ndarray) -> np.ndarray:
        """(n,) hashes of the problems of trajectories."""
        apart = np.isin(lines["problem"], self.several.index) & (not self.config.merge_prompts)
        return np.where(apart, lines["problem"] ^ lines["prompt"], lines["problem"])

    def _rows(self) -> Iterator[pd.DataFrame]:
        for rows, lines in self._buckets("problem"):
            content = lines["trajectory"] ^ (lines["content"] << np.uint64(1)) ^ lines["reward"].view(np.uint64)
            columns = {"row": rows, "source": lines["source"], "problem": self.problem(lines), "content": content}
            yield pd.DataFrame({**columns, "unstepped": lines["content"]}).sort_values("row")

    def _repeats(self, parts: pd.Series) -> np.ndarray:
        """Numbers of the trajectories that repeat others, of groups that consist of so many equal parts."""
        again = [np.zeros(0, np.int64)]
        for rows in self._rows() if (parts > 1).any() else ():
            alike = rows.groupby([*_GROUP, "content"]).row
            mine = parts.reindex(pd.MultiIndex.from_frame(rows[_GROUP])).to_numpy()
            again.append(rows.row[alike.cumcount() >= np.ceil(alike.transform("size") / mine)])
        return np.concatenate(again)

    def notes(self, *, odd: bool, ids: bool = True) -> Iterator[str]:
        """What is to be said.

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
        of = [] if odd else [rows.groupby(_GROUP).size() for rows in self._rows()]
        sizes = Counter[int](size for counts in of for size in counts)
        if len(sizes) > 1:
            usual = max(sizes, key=lambda size: (sizes[size], size))
            parts = (counts[counts < usual].groupby("problem").sum() for counts in of)
            cut = sum(int((sums == usual).sum()) for sums in parts)
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
    times = rows.groupby([*_GROUP, "content"]).row.transform("size")
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


def _several(buckets: Buckets, name: str, other: str) -> pd.Series:
    """By value of a column that stands beside several of another, how many these are."""
    found = [pd.DataFrame({n: lines[n] for n in (name, other)}) for _, lines in buckets(name)]
    counts = pd.concat([pairs.groupby(name)[other].nunique() for pairs in found])
    return counts[counts > 1]
