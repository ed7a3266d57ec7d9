"""What a log says of right and wrong: the outcome and the reward of an entry, by rules that hold for the whole log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tsae.errors import TsaeError
from tsae.rollouts.checking import BY_NAME, Verifier, find_verifier
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entry import Entry
from tsae.rollouts.outcomes import outcome_reward


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
        self._rules: set[str] = set()

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
        # The files of a run have the same columns; where one lacks a column, another must not pass for it.
        decisive = name or told_by
        if self.a_file_a_step and self.verify is None and decisive and self._decisive not in (None, decisive):
            raise TsaeError(
                f"{decisive} says here what is right, {self._decisive} in the rows before",
                where=entry.where,
                fix="Name the reward that counts (--outcome), or check the answers anew (--verifier).",
            )
        self._decisive = decisive or self._decisive
        if value is None:
            return None
        self._rules.add(f"{told_by} is above {limit:g}")
        return value > limit

    def reward(self, entry: Entry) -> float | None:
        """The total that was used in training, or the sum of the rewards that the user names."""
        if not self.config.rewards:
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
