"""The ledger of an import: a few dozen bytes a trajectory on the disk, by which repeats and conflicts are found.

A log may not fit into memory; what has to be compared across all of it is kept as hashes and numbers. To find equal
ones, those whose hashes fall into one of several buckets are looked at at a time, so that memory does not grow.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entry import Entry
from tsae.rollouts.logs.files import LogFile
from tsae.rollouts.logs.summary import Summary

Outcome = {"failure": 0, "success": 1, "unknown": 2}
_LINE = np.dtype(
    [
        ("source", "u4"),  # Number of (policy, step).
        ("file", "u4"),
        ("number", "u8"),  # Of the line or row.
        ("problem", "u8"),  # Hash of the problem id.
        ("key", "u8"),  # Hash of the log's own id of the trajectory; 0 where it has none.
        ("trajectory", "u8"),  # Hash of policy, step, problem, prompt and response.
        ("content", "u8"),  # Hash of problem, prompt, response and advantage.
        ("reward", "f8"),  # NaN where unknown.
        ("outcome", "u1"),
        ("same_text", "u1"),  # Whether the ids decode to the log's text: 0 no, 1 yes, 2 no text to compare with.
        ("retokenised", "u1"),  # 1 where the ids were made from the text.
    ]
)
_AT_A_TIME = 1 << 14
_BUCKET = 1 << 17
"""Trajectories that are compared with one another at a time, about."""


def hash64(*parts: str | bytes) -> int:
    """64 bits of the parts, kept apart."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        encoded = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return int.from_bytes(digest.digest(), "little")


class Ledger:
    """One line a trajectory, in the order in which they were read: those of a part, or of parts that were added.

    Args:
        file: to write the lines of a part to.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.sources: dict[tuple[str, int | None], int] = {}
        """(policy, step) -> number."""
        self.skipped: Counter[str] = Counter()
        """Trajectories left out, by kind."""
        self.outcomes: Counter[str] = Counter()
        """Trajectories by outcome."""
        self.same_text: Counter[bool | None] = Counter()
        """Trajectories by whether their ids decode to the log's text; None where it has none."""
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
        tokens: tuple[bytes, bytes, str],
        finish_reason: str,
        reward: float | None,
        outcome: str,
        same_text: bool | None,
        retokenised: bool,
    ) -> None:
        """Add a trajectory.

        Args:
            entry: as its reader made it.
            file: its file's number.
            problem: id.
            policy: name.
            tokens: prompt and response ids as bytes, and what else tells it from another.
            finish_reason: stop, length or unknown.
            reward: None where unknown.
            outcome: success, failure or unknown.
            same_text: whether the ids decode to the log's text; None where it has none.
            retokenised: whether the ids were made from the text.
        """
        source = (policy, entry.step)
        self._lines[self._pending] = (
            self.sources.setdefault(source, len(self.sources)),
            file,
            entry.number,
            hash64(problem),
            0 if entry.key is None else hash64(policy, entry.key),
            hash64(policy, str(entry.step), problem, entry.answer, finish_reason, *tokens),
            hash64(problem, str(entry.advantage), *tokens),
            float("nan") if reward is None else reward,
            Outcome[outcome],
            2 if same_text is None else int(same_text),
            retokenised,
        )
        self.outcomes[outcome] += 1
        self.same_text[same_text] += 1
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
        """Write what is left; returns what `add` takes, as JSON has it."""
        self._flush()
        return {
            "n": self._n,
            "sources": list(self.sources),
            "skipped": self.skipped,
            "outcomes": self.outcomes,
            "same_text": list(self.same_text.items()),
        }

    def add(self, file: Path, state: Mapping[str, Any]) -> None:
        """Put the lines of a part behind those that are there."""
        numbers = [self.sources.setdefault((name, step), len(self.sources)) for name, step in state["sources"]]
        self._parts.append((file, state["n"], np.array(numbers, dtype=np.uint32)))
        self._n += state["n"]
        self.skipped.update(state["skipped"])
        self.outcomes.update(state["outcomes"])
        self.same_text.update(dict(state["same_text"]))

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
        """(n,) bool: which trajectories stay; of repeated ones the last.

        Those that the log has twice word for word count once; others that it has twice, where `config.skip` allows.

        Args:
            files: the log's.
            config: of the import.
            copies: whether a file may be the one before it over again.

        Raises:
            TsaeError: naming both places, for a trajectory that comes twice, and for equal trajectories with
                different rewards.
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
        # What stands there twice, word for word, is one trajectory; anything else has to be decided.
        if again and "repeated" not in config.skip:
            b, a = min((b, a) for a, b in again)
            raise TsaeError(
                f"the trajectory of {self.place(files, a)} comes here again, and is another",
                where=self.place(files, b),
                fix="If the run went on from an older checkpoint, keep what it logged last with --skip repeated.",
            )
        if not kept.all():
            self.skipped["repeated"] += int((~kept).sum())
        if copies:
            self._drop_copies(kept, files, config)
        if not config.noisy_rewards:
            self._check_rewards(kept, files)
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
        """(their numbers, lines) of trajectories that are kept, those of equal values of a hash always together."""
        n = 1 + len(self) // _BUCKET
        for bucket in range(n):
            rows, found = [np.zeros(0, dtype=np.int64)], [np.zeros(0, _LINE)]
            for start, lines in self.lines():
                chosen = np.flatnonzero((lines[name] % n == bucket) & kept[start : start + len(lines)])
                rows.append(start + chosen)
                found.append(lines[chosen])
            yield np.concatenate(rows), np.concatenate(found)

    def _drop_copies(self, kept: np.ndarray, files: Sequence[LogFile], config: ImportConfig) -> None:
        """TRL logs its last generation batch again where several steps train on one."""
        before = (-1, np.zeros(0, np.uint64))
        for number, start, batch in self._batches():
            again = before[0] == number - 1 and files[number].run == files[number - 1].run and len(batch) > 1
            if again and np.array_equal(before[1], batch):
                if "repeated" not in config.skip:
                    raise TsaeError(
                        f"has what {files[number - 1].path.name} has: the run trained several steps on one generation "
                        "batch, and logged it at each",
                        where=files[number].path,
                        fix="Keep the first of them with --skip repeated.",
                    )
                kept[start : start + len(batch)] = False
                self.skipped["repeated"] += len(batch)
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

    def rename(self, policies: Mapping[str, str]) -> None:
        """Give policies other names, by their old ones."""
        self.sources = {(policies.get(name, name), step): number for (name, step), number in self.sources.items()}

    def summary(self, form: str, n_files: int, kept: np.ndarray, notes: Sequence[str]) -> Summary:
        """What was read, per policy and step and in all."""
        sources = list(self.sources)
        counts, problems = np.zeros((len(sources), len(_COUNTED)), dtype=np.int64), 0
        for _, lines in self._buckets("problem", kept):
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
        return Summary(
            form, n_files, table[["policy", "step", *shown]], {n: total[n] for n in shown}, dict(self.skipped),
            tuple(notes),
        )  # fmt: skip

    def round_trips(self) -> tuple[np.ndarray, np.ndarray]:
        """((n,) whether ids decode to the log's text: 0 no, 1 yes, 2 no text; (n,) bool, whether the log has ids)."""
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
    """(n_sources, n_counted) of `_COUNTED`, of all trajectories of some problems."""
    counts = np.zeros((n_sources, len(_COUNTED)), dtype=np.int64)
    if not len(lines):
        return counts
    lines = lines[np.lexsort((lines["problem"], lines["source"]))]
    source, reward = lines["source"], lines["reward"]
    starts = np.flatnonzero(np.r_[True, (np.diff(source) != 0) | (np.diff(lines["problem"]) != 0)])
    size, known = np.diff(np.r_[starts, len(lines)]), np.add.reduceat((~np.isnan(reward)).astype(np.int64), starts)
    # A group is of one policy and step, so that groups add up.
    alike = (size > 1) & (known == size) & (np.fmin.reduceat(reward, starts) == np.fmax.reduceat(reward, starts))

    def of(rows: np.ndarray) -> np.ndarray:
        return np.bincount(rows, minlength=n_sources)

    groups = of(source[starts])
    counts[:] = np.stack(
        [
            of(source),
            groups,
            groups,
            of(source[starts[alike]]),
            of(source[lines["outcome"] != Outcome["unknown"]]),
            of(source[lines["outcome"] == Outcome["success"]]),
            of(source[lines["retokenised"] == 1]),
            of(source[lines["same_text"] == 0]),
        ],
        axis=1,
    )
    return counts


def _first_of(first: np.ndarray, second: np.ndarray) -> list[tuple[int, int]]:
    """The first pair, where there is one."""
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
