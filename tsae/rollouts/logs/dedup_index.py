"""The ledger of an import: a few dozen bytes on disk for every trajectory, to find repeats and conflicts.

A log may not fit into memory, so hashes and numbers are kept of what is compared across all of it. Equal hashes are
searched bucket by bucket: memory does not grow with the log.

Groups of a log: which trajectories belong together, and what is odd about it.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import gammaln

from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.consistency_checks import Check
from tsae.rollouts.logs.entry import Counts, Entry, hash64
from tsae.rollouts.logs.on_disk.log_files import LogFile

_OUTCOME = {"failure": 0, "success": 1, "unknown": 2}
_SAME_TEXT = {False: "no", True: "yes", None: "no text"}
_LINE = np.dtype(
    [
        ("source", "u4"),  # Number of (policy, step).
        ("file", "u4"),
        ("number", "u8"),  # Of the line or row.
        ("problem", "u8"),  # Hash of the problem id.
        ("prompt", "u8"),  # Hash of the prompt, as it was logged.
        ("key", "u8"),  # Hash of the log's own id of the trajectory; 0 if it has none.
        ("trajectory", "u8"),  # Hash of policy, step, problem, prompt and response.
        ("content", "u8"),  # Hash of problem, prompt, response and advantage.
        ("reward", "f8"),  # NaN if unknown.
        ("outcome", "u1"),
        ("same_text", "u1"),  # Whether the ids decode to the log's text: 0 no, 1 yes, 2 no text to compare with.
        ("retokenised", "u1"),  # 1 if the ids were made from the text.
    ]
)
_AT_A_TIME = 1 << 14
_BUCKET = 1 << 17
"""Trajectories that are compared with one another at a time, about."""


class Ledger:
    """One line a trajectory, in the order in which they were read: those of a part, or of parts that were added.

    Args:
        file: for the lines of a part.
        counts: of the log.
    """

    def __init__(self, file: Path | None = None, counts: Counts | None = None) -> None:
        self.file, self.counts = file, Counts() if counts is None else counts
        self.sources: dict[tuple[str, int | None], int] = {}
        """(policy, step) -> number."""
        self._lines = np.zeros(_AT_A_TIME, _LINE)
        self._pending = self._n = 0
        self._parts: list[tuple[Path, int, np.ndarray]] = []
        """Files of lines, how many each has, and the numbers here of its sources."""

    def __len__(self) -> int:
        return self._n

    def enter(
        self,
        entry: Entry,
        file: int,
        problem: str,
        policy: str,
        *,
        prompt: int,
        tokens: tuple[bytes, bytes, str],
        finish_reason: str,
        reward: float | None,
        outcome: str,
        same_text: bool | None,
        retokenised: bool,
    ) -> None:
        """Add a trajectory.

        Args:
            entry: of the log.
            file: its file's number.
            problem: id.
            policy: name.
            prompt: hash of the prompt.
            tokens: prompt and response ids as bytes, and `Entry.apart`.
            finish_reason: stop, length or unknown.
            reward: None if unknown.
            outcome: success, failure or unknown.
            same_text: whether the ids decode to the log's text; None if it has none.
            retokenised: whether the ids were made from the text.
        """
        self._lines[self._pending] = (
            self.sources.setdefault((policy, entry.step), len(self.sources)),
            file,
            entry.number,
            hash64(problem),
            prompt,
            0 if entry.key is None else hash64(policy, entry.key),
            hash64(policy, str(entry.step), problem, entry.answer, finish_reason, *tokens),
            hash64(problem, str(entry.advantage), *tokens),
            float("nan") if reward is None else reward,
            _OUTCOME[outcome],
            2 if same_text is None else int(same_text),
            retokenised,
        )
        self.counts["outcome"][outcome] += 1
        self.counts["same text"][_SAME_TEXT[same_text]] += 1
        self._n += 1
        self._pending += 1
        if self._pending == _AT_A_TIME:
            self._flush()

    def _flush(self) -> None:
        assert self.file is not None
        with self.file.open("ab") as out:
            self._lines[: self._pending].tofile(out)
        self._pending = 0

    def close(self) -> dict[str, Any]:
        """Write the remaining lines; returns what `add` takes, for JSON."""
        self._flush()
        return {"n": self._n, "sources": list(self.sources)}

    def add(self, file: Path, state: Mapping[str, Any]) -> None:
        """Append the lines of a further part."""
        numbers = [self.sources.setdefault((name, step), len(self.sources)) for name, step in state["sources"]]
        self._parts.append((file, state["n"], np.array(numbers, dtype=np.uint32)))
        self._n += state["n"]

    def lines(self) -> Iterator[tuple[int, np.ndarray]]:
        """(number of the first, (n,) lines), some at a time."""
        start = 0
        for file, n, numbers in self._parts:
            for low in range(0, n, _AT_A_TIME):
                found = np.fromfile(file, _LINE, min(_AT_A_TIME, n - low), offset=low * _LINE.itemsize)
                found["source"] = numbers[found["source"]]
                yield start, found
                start += len(found)

    def kept(self, files: Sequence[LogFile], config: ImportConfig, *, copies: bool = False) -> np.ndarray:
        """(n,) bool: which trajectories stay; the last of repeated ones.

        A trajectory that the log has twice, word for word, counts once; so does a batch that is logged at every step
        that trains on it. Any other repetition is an error unless `config.skip` allows it.

        Args:
            files: the log's.
            config: of the import.
            copies: whether a file may repeat the one before it.

        Raises:
            TsaeError: for a repeated trajectory, and for equal trajectories with different rewards; names both places.
        """
        kept = np.ones(len(self), dtype=bool)
        again: list[tuple[int, int]] = []
        for rows, lines in self._buckets("key", kept):
            first, second = _neighbours(lines["key"], lines["key"] != 0)
            differs = (lines["trajectory"][first] != lines["trajectory"][second]) | ~_equal(
                lines["reward"][first], lines["reward"][second]
            )
            again += _first_of(rows[first[differs]], rows[second[differs]])
            kept[rows[first]] = False
        if again and "repeated" not in config.skip:
            b, a = min((b, a) for a, b in again)
            what = f"the trajectory of {self.place(files, a)} comes here again, and is another"
            fix = "If the run went on from an older checkpoint, keep what it logged last with --skip repeated."
            raise TsaeError(what, where=self.place(files, b), fix=fix)
        if not kept.all():
            self.counts["skipped"]["repeated"] += int((~kept).sum())
        if copies:
            self._drop_copies(kept, files)
        if not config.noisy_rewards:
            self._check_rewards(kept, files)
        self.groups = Groups(partial(self._buckets, kept=kept), config)
        if len(copied := self.groups.dropped):
            kept[copied] = False
            self.counts["skipped"]["repeated"] += len(copied)
        return kept

    def _check_rewards(self, kept: np.ndarray, files: Sequence[LogFile]) -> None:
        found: list[tuple[int, int]] = []
        for rows, lines in self._buckets("trajectory", kept):
            first, second = _neighbours(lines["trajectory"], np.ones(len(lines), dtype=bool))
            differs = ~_equal(lines["reward"][first], lines["reward"][second])
            found += _first_of(rows[first[differs]], rows[second[differs]])
        if found:
            b, a = min((b, a) for a, b in found)
            raise TsaeError(
                f"reward {self._line(b)['reward']:g} for the trajectory that has {self._line(a)['reward']:g} at "
                f"{self.place(files, a)}: same step, problem and response",
                where=self.place(files, b),
                fix="Correct the log; if its rewards are noisy, as a judge's are, say --noisy-rewards.",
            )

    def _buckets(self, name: str, kept: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(their numbers, lines) of the kept trajectories, bucket by bucket; equal hashes are in one bucket."""
        n = 1 + len(self) // _BUCKET
        for bucket in range(n):
            rows, found = [np.zeros(0, dtype=np.int64)], [np.zeros(0, _LINE)]
            for start, lines in self.lines():
                chosen = np.flatnonzero((lines[name] % n == bucket) & kept[start : start + len(lines)])
                rows.append(start + chosen)
                found.append(lines[chosen])
            yield np.concatenate(rows), np.concatenate(found)

    def _drop_copies(self, kept: np.ndarray, files: Sequence[LogFile]) -> None:
        """Drop files that repeat the one before: TRL logs a generation batch at every step that trains on it."""
        before = (-1, np.zeros(0, np.uint64))
        for number, start, batch in self._batches():
            again = before[0] == number - 1 and files[number].run == files[number - 1].run and len(batch) > 1
            if again and np.array_equal(before[1], batch):
                kept[start : start + len(batch)] = False
                self.counts["skipped"]["repeated"] += len(batch)
            before = (number, batch)

    def _batches(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """(file, number of its first trajectory, content of its trajectories), file by file."""
        pending: list[np.ndarray] = []
        current, first = -1, 0
        for start, lines in self.lines():
            bounds = [0, *(np.flatnonzero(np.diff(lines["file"])) + 1).tolist(), len(lines)]
            for low, high in pairwise(bounds):
                if lines["file"][low] != current:
                    if pending:
                        yield current, first, np.concatenate(pending)
                    pending, current, first = [], int(lines["file"][low]), start + low
                pending.append(lines["content"][low:high].copy())
        if pending:
            yield current, first, np.concatenate(pending)

    def prompts(self) -> np.ndarray:
        """(n,) hash of the prompt of every trajectory."""
        return np.concatenate([lines["prompt"] for _, lines in self.lines()])

    def rename(self, policies: Mapping[str, str]) -> None:
        """Give policies other names; `policies` has them by their old names."""
        self.sources = {(policies.get(name, name), step): number for (name, step), number in self.sources.items()}

    def summary(self, form: str, n_files: int, kept: np.ndarray, notes: Sequence[str]) -> Summary:
        """What was read, by policy and step and in total."""
        sources = list(self.sources)
        counts, problems = np.zeros((len(sources), len(_COUNTED)), dtype=np.int64), 0
        for _, lines in self._buckets("problem", kept):
            lines["problem"] = self.groups.problem(lines)
            counts += _counts(lines, len(sources))
            problems += len(np.unique(lines["problem"]))
        total = dict(zip(_COUNTED, counts.sum(axis=0).tolist(), strict=True)) | {"problems": problems}
        by_source = pd.DataFrame(counts, columns=_COUNTED).astype("int64")
        by_source.insert(0, "policy", [policy for policy, _ in sources])
        by_source.insert(1, "step", pd.array([step for _, step in sources], dtype="Int64"))
        table = by_source[by_source.trajectories > 0].reset_index(drop=True)
        table["success_rate"] = (table.success / table.known).where(table.known > 0)
        total["success_rate"] = total["success"] / total["known"] if total["known"] else float("nan")
        shown = [name for name in _SHOWN if name in total]
        table, skipped = table[["policy", "step", *shown]], dict(self.counts["skipped"])
        return Summary(form, n_files, table, {name: total[name] for name in shown}, skipped, tuple(notes))

    def round_trips(self) -> tuple[np.ndarray, np.ndarray]:
        """(n,) whether ids decode to the log's text (0 no, 1 yes, 2 no text); (n,) bool, whether the log has ids."""
        found = np.zeros((2, len(self)), dtype=np.uint8)
        for start, lines in self.lines():
            here = slice(start, start + len(lines))
            found[:, here] = lines["same_text"], lines["retokenised"] == 0
        return found[0], found[1] > 0

    def _line(self, row: int) -> np.void:
        return next(lines[row - start] for start, lines in self.lines() if row < start + len(lines))

    def place(self, files: Sequence[LogFile], row: int) -> str:
        """File and line of a trajectory."""
        line = self._line(row)
        return files[line["file"]].place(line["number"])


_COUNTED = [
    "trajectories", "problems", "groups", "no_variance", "known", "success", "retokenised", "not_round_tripping"
]  # fmt: skip
_SHOWN = (
    "trajectories", "problems", "groups", "no_variance", "success_rate", "retokenised", "not_round_tripping"
)  # fmt: skip


def _counts(lines: np.ndarray, n_sources: int) -> np.ndarray:
    """(n_sources, n_counted) counts of `_COUNTED` over all trajectories of some problems."""
    if not len(lines):
        return np.zeros((n_sources, len(_COUNTED)), dtype=np.int64)
    lines = lines[np.lexsort((lines["problem"], lines["source"]))]
    source, reward = lines["source"], lines["reward"]
    starts = np.flatnonzero(np.r_[True, (np.diff(source) != 0) | (np.diff(lines["problem"]) != 0)])
    size, rewarded = np.diff(np.r_[starts, len(lines)]), np.add.reduceat((~np.isnan(reward)).astype(np.int64), starts)
    # A group is of one policy and step, so that groups add up.
    alike = (size > 1) & (rewarded == size) & (np.fmin.reduceat(reward, starts) == np.fmax.reduceat(reward, starts))

    def of(rows: np.ndarray) -> np.ndarray:
        return np.bincount(rows, minlength=n_sources)

    groups = of(source[starts])
    known, right = lines["outcome"] != _OUTCOME["unknown"], lines["outcome"] == _OUTCOME["success"]
    picked = (known, right, lines["retokenised"] == 1, lines["same_text"] == 0)
    return np.stack([of(source), groups, groups, of(source[starts[alike]]), *(of(source[p]) for p in picked)], axis=1)


def _first_of(first: np.ndarray, second: np.ndarray) -> list[tuple[int, int]]:
    """The first pair, if there is one."""
    return [(int(first[0]), int(second[0]))] if len(first) else []


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


_CELLS = (14, 10, 9, 8, 13, 13, 20)


@dataclass(frozen=True)
class Summary:
    """What an import read."""

    format: str
    n_files: int
    table: pd.DataFrame
    """One row for each policy and step: policy, step, trajectories, problems, groups (a problem in that step),
    no_variance (groups of two or more with equal rewards), success_rate (of known outcomes), retokenised (responses
    whose ids were made from text), not_round_tripping (responses whose ids do not decode to the logged text)."""
    total: dict[str, float]
    """The same over the whole log."""
    skipped: dict[str, int]
    """Trajectories left out, by kind."""
    notes: tuple[str, ...]
    """What was assumed."""
    odd: tuple[str, ...] = ()
    """Those of the notes that are about padding, problem ids and copies: what most logs do not have."""
    second_look: tuple[Check, ...] = ()
    """Comparisons of what the log says twice."""

    def as_dict(self) -> dict[str, object]:
        """What goes into the table's info."""
        return {
            "format": self.format,
            "files": self.n_files,
            "skipped": self.skipped,
            "notes": list(self.notes),
            "second_look": {check.name: check.as_dict() for check in self.second_look},
        }

    def __str__(self) -> str:
        steps = self.table.step.dropna()
        span = f", {steps.nunique()} steps from {steps.min()} to {steps.max()}" if steps.nunique() > 1 else ""
        lines = [f"{self.format}: {self.n_files} file{'s' * (self.n_files != 1)}{span}"]
        width = max(8, *(len(policy) for policy in self.table.policy))
        names = ("trajectories", "problems", "success", "groups", "no variance", "retokenised", "not round-tripping")
        head = "".join(f"{name:>{cell}}" for name, cell in zip(names, _CELLS, strict=True))
        lines.append(f"  {'policy':<{width}}{'step':>8}{head}")
        # Names come from the log, and must not control the terminal.
        rows = [
            (_printable(row.policy), "–" if pd.isna(row.step) else str(row.step), row._asdict())
            for row in self.table.itertuples()
        ]
        if len(rows) > 24:
            rows = [*rows[:12], ("…", "", {}), *rows[-12:]]
        for policy, step, counts in (*rows, ("all", "", self.total)):
            lines.append(f"  {policy:<{width}}{step:>8}{_cells(counts)}".rstrip())
        for kind, n in sorted(self.skipped.items()):
            lines.append(f"left out: {n:,} {kind}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, *(f"second look at {check}" for check in self.second_look)])


def _printable(name: str) -> str:
    return "".join(character if character.isprintable() else "�" for character in name)


def _cells(counts: dict[str, float]) -> str:
    if not counts:
        return ""
    rate = "–" if np.isnan(counts["success_rate"]) else f"{counts['success_rate']:.3f}"
    names = ("trajectories", "problems", "groups", "no_variance", "retokenised", "not_round_tripping")
    shown = [f"{counts[name]:,}" for name in names]
    cells = (*shown[:2], rate, *shown[2:])
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, _CELLS, strict=True))
