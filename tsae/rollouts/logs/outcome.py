"""What a log says of right and wrong: the outcome and the reward of an entry, by rules that hold for the whole log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tsae.errors import TsaeError
from tsae.rollouts.answers.grading import BY_NAME, Verifier, find_verifier
from tsae.rollouts.answers.success_reward import outcome_reward
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entry import Entry


class Outcomes:
    """Settles outcome and reward of the entries of one log.

    Args:
        config: of the import.
        a_file_a_step: whether the log's files have the same columns, being one run's steps.
    """

    def __init__(self, config: ImportConfig, *, a_file_a_step: bool) -> None:
        self.config, self.a_file_a_step = config, a_file_a_step
        self.verify: Verifier | None = find_verifier(config.verifier) if config.verifier else None
        self.names: Counter[str] = Counter()
        """Trajectories by the rewards that they have."""
        self.compared = self.agreed = 0
        self._decisive: str | None = None
        """The reward that said what is right so far."""
        self._first_at: str | None = None
        """Where it did first."""
        self._rules: set[str] = set()
        self._parts: frozenset[str] | None = None
        """Names of the rewards that make up a total."""
        self._parts_at: str | None = None
        """Where they did first."""

    def right(self, entry: Entry, response: str) -> bool | None:
        """Success or failure: by the verifier where there is one, else by the log; None where nothing says.

        Args:
            entry: a trajectory.
            response: its text.

        Raises:
            TsaeError: where the verifier cannot judge it, several rewards might say what is right, or another than
                before would.
        """
        if self.verify is None:
            return self._logged(entry)
        if self.config.verifier in BY_NAME and not entry.answer:
            raise TsaeError(
                f"has no reference answer to check with {self.config.verifier}",
                where=entry.where,
                fix="Name the column of the answer (--column answer=NAME).",
            )
        try:
            right = bool(self.verify(response, entry.answer))
        except TsaeError as error:
            raise TsaeError(error.what, where=entry.where, fix=error.fix) from error
        except Exception as error:  # of the user's own function
            raise TsaeError(
                f"the verifier {self.config.verifier} fails on it ({type(error).__name__}: {error})",
                where=entry.where,
                fix="Correct the function: it gets (response, answer) as texts.",
            ) from error
        logged = self.logged(entry)
        self.compared += logged is not None
        self.agreed += logged is right
        return right

    def logged(self, entry: Entry) -> bool | None:
        """Success or failure by the log, whatever a verifier says; None where it leaves that to the verifier."""
        told = self.config.outcome or entry.decides or len(self.config.rewards or entry.rewards) == 1
        return self._logged(entry) if self.verify is None or entry.correct is not None or told else None

    def _logged(self, entry: Entry) -> bool | None:
        """Success or failure by the log's word, or by the reward that stands for it."""
        limit, names = self.config.success_above, tuple(self.config.rewards or entry.rewards)
        if self.config.outcome is None and entry.correct is not None:
            self._rules.add("the log says so")
            return entry.correct
        if name := self.config.outcome or entry.decides:
            value, told_by = entry.rewards.get(name), name
        elif len(names) <= 1:
            value, told_by = self.reward(entry), "".join(names)
        else:
            name = outcome_reward(names, where=entry.where)
            value, told_by = entry.rewards.get(name), f"{name}, of {', '.join(names)} the one named for it,"
        self._decides(name or told_by, entry.where)
        if value is None:
            return None
        self._rules.add(f"{told_by} is above {limit:g}")
        return value > limit

    def _decides(self, name: str | None, where: str | None) -> None:
        """The files of a run have the same columns; where one lacks a column, another must not pass for it."""
        if not name:
            return
        if self.a_file_a_step and self.verify is None and self._decisive not in (None, name):
            raise TsaeError(
                f"{name} says here what is right, {self._decisive} in the rows before",
                where=where,
                fix="Name the reward that counts (--outcome), or check the answers anew (--verifier).",
            )
        self._first_at = self._first_at or where
        self._decisive = name

    def state(self) -> dict[str, Any]:
        """What was found in a part of the log, as JSON has it."""
        return {
            "names": self.names,
            "agreement": [self.agreed, self.compared],
            "decisive": [self._decisive, self._first_at],
            "rules": sorted(self._rules),
            "parts": [None if self._parts is None else sorted(self._parts), self._parts_at],
        }

    def add(self, state: Mapping[str, Any]) -> None:
        """Take in what was found in a further part.

        Raises:
            TsaeError: where another reward says there what is right, or totals are of other rewards.
        """
        self._decides(*state["decisive"])
        self._add_up(*state["parts"])
        self.names.update(state["names"])
        self.agreed += state["agreement"][0]
        self.compared += state["agreement"][1]
        self._rules.update(state["rules"])

    def reward(self, entry: Entry) -> float | None:
        """The total that was used in training, or the sum of the rewards that the user names.

        Raises:
            TsaeError: where a sum has other parts than that of the trajectories before.
        """
        if not self.config.rewards:
            if entry.summed:
                self._add_up(entry.rewards, entry.where)
            return entry.reward
        missing = [name for name in self.config.rewards if name not in entry.rewards]
        if missing:
            raise TsaeError(
                f"has no reward {missing[0]!r}; it has {', '.join(entry.rewards) or 'none'}",
                where=entry.where,
                fix="Name rewards that are there (--rewards).",
            )
        values = [entry.rewards[name] for name in self.config.rewards]
        return sum(value for value in values if value is not None) if any(v is not None for v in values) else None

    def _add_up(self, names: Iterable[str] | None, where: str | None) -> None:
        """Totals have the same rewards as their parts."""
        if names is None:
            return
        parts = frozenset(names)
        if self._parts is None:
            self._parts, self._parts_at = parts, where
        if parts != self._parts:
            raise TsaeError(
                f"its rewards are {', '.join(sorted(parts))}; those of the rows before are "
                f"{', '.join(sorted(self._parts))}: their sums are not the same quantity",
                where=where,
                fix="Name the rewards that all rows have (--rewards), or import such files apart.",
            )

    def notes(self, n: int, n_unknown: int) -> Iterator[str]:
        """What was assumed of `n` trajectories, `n_unknown` of them of unknown outcome."""
        for name, with_it in self.names.items() if self.a_file_a_step else ():
            if with_it < n:
                yield f"{name}: {with_it:,} of {n:,} trajectories have this reward; the rewards of the others lack it"
        if self.verify is not None:
            agreement = f", and the log agrees in {self.agreed:,} of {self.compared:,}" if self.compared else ""
            yield f"success: {self.config.verifier} finds the answer in the response{agreement}"
        elif self._rules:
            yield f"success: {'; or '.join(sorted(self._rules))}"
        if n_unknown:
            yield (
                f"{n_unknown:,} trajectories have no reward that says whether they are right: their outcome is unknown"
            )
