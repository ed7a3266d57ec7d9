"""The ledger of an import: a few dozen bytes a trajectory, by which repeats, conflicts and the summary are found.

A log may not fit into memory; what has to be compared across all of it is kept as hashes and numbers.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entry import Entry
from tsae.rollouts.logs.files import LogFile

if TYPE_CHECKING:
    from tsae.rollouts.logs.second_look import Check

_CELLS = (14, 10, 9, 8, 13, 13, 20)
Outcome = {"failure": 0, "success": 1, "unknown": 2}


def hash64(*parts: str | bytes) -> int:
    """64 bits of the parts, kept apart."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        encoded = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return int.from_bytes(digest.digest(), "little")


@dataclass
class Ledger:
    """One line a trajectory, in the order in which they were read."""

    sources: dict[tuple[str, int | None], int] = field(default_factory=dict)
    """(policy, step) -> number."""
    source: array[int] = field(default_factory=lambda: array("I"))
    file: array[int] = field(default_factory=lambda: array("I"))
    number: array[int] = field(default_factory=lambda: array("Q"))
    problem: array[int] = field(default_factory=lambda: array("Q"))
    """Hash of the problem id."""
    key: array[int] = field(default_factory=lambda: array("Q"))
    """Hash of the log's own id of the trajectory; 0 where it has none."""
    trajectory: array[int] = field(default_factory=lambda: array("Q"))
    """Hash of source, problem, prompt and response."""
    content: array[int] = field(default_factory=lambda: array("Q"))
    """Hash of problem, prompt, response and advantage."""
    reward: array[float] = field(default_factory=lambda: array("d"))
    """NaN where unknown."""
    outcome: array[int] = field(default_factory=lambda: array("B"))
    same_text: array[int] = field(default_factory=lambda: array("B"))
    """Whether the ids decode to the log's text: 0 no, 1 yes, 2 no text to compare with."""
    retokenised: array[int] = field(default_factory=lambda: array("B"))
    """1 where the ids were made from the text."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Trajectories left out, by kind."""

    def __len__(self) -> int:
        return len(self.source)

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
        source = self.sources.setdefault((policy, entry.step), len(self.sources))
        self.source.append(source)
        self.file.append(file)
        self.number.append(entry.number)
        self.problem.append(hash64(problem))
        self.key.append(0 if entry.key is None else hash64(policy, entry.key))
        self.trajectory.append(hash64(str(source), problem, entry.answer, finish_reason, *tokens))
        self.content.append(hash64(problem, str(entry.advantage), *tokens))
        self.reward.append(float("nan") if reward is None else reward)
        self.outcome.append(Outcome[outcome])
        self.same_text.append(2 if same_text is None else int(same_text))
        self.retokenised.append(retokenised)

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
        keys = np.asarray(self.key)
        kept = np.ones(len(self), dtype=bool)
        first, second = _neighbours(keys, keys != 0)
        trajectory, reward = np.asarray(self.trajectory), np.asarray(self.reward)
        again = (trajectory[first] != trajectory[second]) | ~_equal(reward[first], reward[second])
        # What stands there twice, word for word, is one trajectory; anything else has to be decided.
        if again.any() and "repeated" not in config.skip:
            raise TsaeError(
                f"the trajectory of {self.place(files, first[again][0])} comes here again, and is another",
                where=self.place(files, second[again][0]),
                fix="If the run went on from an older checkpoint, keep what it logged last with --skip repeated.",
            )
        if len(first):
            kept[first] = False
            self.skipped["repeated"] += len(first)
        if copies:
            self._drop_copies(kept, files, config)
        if not config.noisy_rewards:
            first, second = _neighbours(trajectory, kept)
            differs = ~_equal(reward[first], reward[second])
            if differs.any():
                a, b = first[differs][0], second[differs][0]
                raise TsaeError(
                    f"reward {reward[b]:g} for the trajectory that has {reward[a]:g} at {self.place(files, a)}: same "
                    "step, problem and response",
                    where=self.place(files, b),
                    fix="Correct the log; if its rewards are noisy, as a judge's are, say --noisy-rewards.",
                )
        return kept

    def _drop_copies(self, kept: np.ndarray, files: Sequence[LogFile], config: ImportConfig) -> None:
        """TRL logs its last generation batch again where several steps train on one."""
        content, file = np.asarray(self.content), np.asarray(self.file)
        bounds = np.searchsorted(file, np.arange(len(files) + 1))
        batches = [content[low:high] for low, high in pairwise(bounds)]
        for number in range(1, len(files)):
            before, batch = batches[number - 1], batches[number]
            if files[number].run != files[number - 1].run or len(batch) < 2 or not np.array_equal(before, batch):
                continue
            if "repeated" not in config.skip:
                raise TsaeError(
                    f"has what {files[number - 1].path.name} has: the run trained several steps on one generation "
                    "batch, and logged it at each",
                    where=files[number].path,
                    fix="Keep the first of them with --skip repeated.",
                )
            kept[bounds[number] : bounds[number + 1]] = False
            self.skipped["repeated"] += len(batch)

    def rename(self, policies: Mapping[str, str]) -> None:
        """Give policies other names, by their old ones."""
        self.sources = {(policies.get(name, name), step): number for (name, step), number in self.sources.items()}

    def summary(self, form: str, n_files: int, kept: np.ndarray, notes: Sequence[str]) -> Summary:
        """What was read, per policy and step and in all."""
        columns = ("source", "problem", "reward", "outcome", "same_text", "retokenised")
        rows = pd.DataFrame({name: np.asarray(getattr(self, name))[kept] for name in columns})
        sources = list(self.sources)
        table = pd.DataFrame([_counts(part) for _, part in rows.groupby("source")])
        order = [sources[number] for number in sorted(rows.source.unique())]
        table.insert(0, "policy", [policy for policy, _ in order])
        table.insert(1, "step", pd.array([step for _, step in order], dtype="Int64"))
        total = _counts(rows)
        # A group is of one policy and step, so that groups add up.
        total |= {name: int(table[name].sum()) for name in ("groups", "no_variance")}
        return Summary(form, n_files, table, total, dict(self.skipped), tuple(notes))

    def place(self, files: Sequence[LogFile], row: int | np.integer) -> str:
        """File and line of a trajectory."""
        return files[self.file[row]].place(self.number[row])


@dataclass(frozen=True)
class Summary:
    """What an import read."""

    format: str
    n_files: int
    table: pd.DataFrame
    """A row a policy and step: policy, step, trajectories, problems, groups (of a problem in that step), no_variance
    (groups of two or more whose rewards are all equal), success_rate (of known outcomes), retokenised (responses whose
    ids were made from text), not_round_tripping (responses whose ids do not decode to the logged text)."""
    total: dict[str, float]
    """The same over all of the log."""
    skipped: dict[str, int]
    """Trajectories left out, by kind."""
    notes: tuple[str, ...]
    """What was assumed."""
    second_look: tuple[Check, ...] = ()
    """What the log says twice, compared."""

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
        # Names come from the log, and do not get at the terminal's controls.
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


def _counts(rows: pd.DataFrame) -> dict[str, float]:
    known = rows.outcome[rows.outcome != Outcome["unknown"]]
    groups = rows.groupby("problem").reward.agg(["size", "count", "min", "max"])
    alike = (groups["size"] > 1) & (groups["count"] == groups["size"]) & (groups["min"] == groups["max"])
    return {
        "trajectories": len(rows),
        "problems": len(groups),
        "groups": len(groups),
        "no_variance": int(alike.sum()),
        "success_rate": float((known == Outcome["success"]).mean()) if len(known) else float("nan"),
        "retokenised": int(rows.retokenised.sum()),
        "not_round_tripping": int((rows.same_text == 0).sum()),
    }


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
