"""Outcome rules: outcome and reward of every trajectory, by rules that hold for the whole log."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entry import Entry, Findings, total
from tsae.rollouts.rewards import BY_NAME, Verifier, find_verifier, outcome_reward

_NAMES, _CHECKED, _RULES, _DECIDES, _SUMMED = "rewards", "verifier", "success", "decides", "summed"


class OutcomeRules:
    """Decides outcome and reward of the entries of one log.

    Args:
        config: of the import.
        findings: of the log.
        a_file_a_step: whether the log's files are one run's steps, and so have the same columns.
    """

    def __init__(self, config: ImportConfig, findings: Findings, *, a_file_a_step: bool) -> None:
        self.config, self.a_file_a_step = config, a_file_a_step
        self.counts, self.first = findings.counts, findings.first
        self.verify: Verifier | None = find_verifier(config.verifier) if config.verifier else None

    @property
    def names(self) -> Mapping[str, int]:
        """Trajectories by the rewards that they have."""
        return self.counts[_NAMES]

    def right(self, entry: Entry, response: str) -> bool | None:
        """Success or failure: by the verifier if there is one, else by the log; None if neither says.

        Args:
            entry: a trajectory.
            response: its text.

        Raises:
            TsaeError: if the verifier cannot judge it, several rewards might decide, or another reward decides than
                before.
        """
        self.counts[_NAMES].update(entry.rewards.keys())
        if self.verify is None:
            return self._logged(entry)
        if self.config.verifier in BY_NAME and not entry.answer:
            what = f"has no reference answer to check with {self.config.verifier}"
            entry.refuse(what, "Name the column of the answer (--column answer=NAME).")
        try:
            right = bool(self.verify(response, entry.answer))
        except TsaeError as error:
            entry.refuse(error.what, error.fix, error)
        except Exception as error:  # of the user's own function
            what = f"the verifier {self.config.verifier} fails on it ({type(error).__name__}: {error})"
            entry.refuse(what, "Correct the function: it gets (response, answer) as texts.", error)
        logged = self.logged(entry)
        self.counts[_CHECKED].update({"compared": logged is not None, "agreed": logged is right})
        return right

    def logged(self, entry: Entry) -> bool | None:
        """Success or failure by the log, whatever a verifier says; None if the log leaves that to the verifier."""
        told = self.config.outcome or entry.decides or len(self.config.rewards or entry.rewards) == 1
        return self._logged(entry) if self.verify is None or entry.correct is not None or told else None

    def _logged(self, entry: Entry) -> bool | None:
        limit, names = self.config.success_above, tuple(self.config.rewards or entry.rewards)
        if self.config.outcome is None and entry.correct is not None:
            self.counts[_RULES]["the log says so"] += 1
            return entry.correct
        if name := self.config.outcome or entry.decides:
            value, told_by = entry.rewards.get(name), name
        elif len(names) <= 1:
            value, told_by = self.reward(entry), "".join(names)
        else:
            name = outcome_reward(names, where=entry.where)
            value, told_by = entry.rewards.get(name), f"{name}, of {', '.join(names)} the one named for it,"
        if name or told_by:
            self._same(_DECIDES, name or told_by, entry.where)
        if value is None:
            return None
        self.counts[_RULES][f"{told_by} is above {limit:g}"] += 1
        return value > limit

    def reward(self, entry: Entry) -> float | None:
        """The total that was used in training, or the sum of the rewards that the user names.

        Raises:
            TsaeError: if a sum has other parts than that of the trajectories before.
        """
        if not self.config.rewards:
            if entry.summed:
                self._same(_SUMMED, json.dumps(sorted(entry.rewards)), entry.where)
            return entry.reward
        missing = [name for name in self.config.rewards if name not in entry.rewards]
        if missing:
            what = f"has no reward {missing[0]!r}; it has {', '.join(entry.rewards) or 'none'}"
            entry.refuse(what, "Name rewards that are there (--rewards).")
        return total({name: entry.rewards[name] for name in self.config.rewards})

    def _same(self, kind: str, name: str, where: str) -> None:
        if name not in self.first[kind]:
            self.first[kind][name] = where
            self.check()

    def check(self) -> None:
        """Check that all rows are judged alike.

        Raises:
            TsaeError: if another reward decides in one file of a run than in others, or totals are sums of other
                rewards.
        """
        deciding, sums = self.first[_DECIDES], self.first[_SUMMED]
        if len(deciding) > 1 and self.a_file_a_step and self.verify is None:
            (before, _), (name, where), *_ = deciding.items()
            what = f"{name} says here what is right, {before} in the rows before"
            fix = "Name the reward that counts (--outcome), or check the answers anew (--verifier)."
            raise TsaeError(what, where=where, fix=fix)
        if len(sums) > 1:
            (first, _), (second, where), *_ = sums.items()
            raise TsaeError(
                f"its rewards are {', '.join(json.loads(second))}; those of the rows before are "
                f"{', '.join(json.loads(first))}: their sums are not the same quantity",
                where=where,
                fix="Name the rewards that all rows have (--rewards), or import such files apart.",
            )

    def notes(self, n: int, n_unknown: int) -> Iterator[str]:
        """Notes about `n` trajectories, `n_unknown` of them of unknown outcome."""
        for name, with_it in self.names.items() if self.a_file_a_step else ():
            if with_it < n:
                yield f"{name}: {with_it:,} of {n:,} trajectories have this reward; the rewards of the others lack it"
        if self.verify is not None:
            checked = self.counts[_CHECKED]
            agreement = f", and the log agrees in {checked['agreed']:,} of {checked['compared']:,}"
            yield f"success: {self.config.verifier} finds the answer in the response" + agreement * bool(
                checked["compared"]
            )
        elif self.counts[_RULES]:
            yield f"success: {'; or '.join(sorted(self.counts[_RULES]))}"
        if n_unknown:
            yield (
                f"{n_unknown:,} trajectories have no reward that says whether they are right: their outcome is unknown"
            )


def with_outcome(entries: Iterable[object], importing: ImportConfig, log: Path) -> tuple[ImportConfig, str]:
    """Choose the reward that means success, and say why; the name decides where the log has several."""
    if importing.verifier is not None:
        return importing, f"the answer is right ({importing.verifier})"
    first = next((entry for entry in entries if isinstance(entry, Entry)), None)
    above = f"is above {importing.success_above:g}"
    if importing.outcome is not None:
        return importing, f"{importing.outcome} {above} (as asked)"
    if first is None or first.correct is not None:
        return importing, "the log says so"
    names = tuple(importing.rewards or first.rewards)
    if not names:
        return importing, "unknown (the log holds no reward)"
    if first.decides or len(names) <= 1:
        told = "the log's only reward" if len(names) == 1 else "the one that the trainer's logs have for it"
        return importing, f"{first.decides or names[0]} {above} ({told})"
    telling = outcome_reward(names, where=log)
    return replace(importing, outcome=telling), f"{telling} {above} (of {', '.join(names)}, by its name)"
