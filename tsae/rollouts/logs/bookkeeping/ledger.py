"""The ledger of an import: a few dozen bytes on disk for every trajectory, to find repeats and conflicts.

A log may not fit into memory, so hashes and numbers are kept of what is compared across all of it. Equal hashes are
searched bucket by bucket: memory does not grow with the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.bookkeeping.counts import Counts
from tsae.rollouts.logs.bookkeeping.groups import Groups
from tsae.rollouts.logs.bookkeeping.summary import Summary
from tsae.rollouts.logs.entries.entry import Entry
from tsae.rollouts.logs.entries.hashes import hash64
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
