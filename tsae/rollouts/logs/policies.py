"""Policies: which checkpoint sampled each trajectory.

Step N of most trainers logs responses that were sampled *before* update N, by the weights of N − 1 updates. A policy
gets the id of the checkpoint of the series that has exactly these weights (the base, for step 1). Other policies are
named after their updates, RUN-0000M.

If checkpoint N itself sampled nothing in the log, it gets the responses of the newest weights that step N logged, so
that a run's last checkpoint has trajectories too. One id always means one policy, whatever steps were kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from tsae.checkpoints.series import CheckpointSeries
from tsae.rollouts.logs.entry import Entry, Findings, writable
from tsae.rollouts.logs.log_files import LogFile

_EXACT, _UNNAMED, _STANDS_IN, _ASKED = "checkpoints that sampled", "policies", "stand-ins", "checkpoints asked for"


class Policies:
    """Names the policies of one log.

    Args:
        series: the checkpoints.
        files: the log's.
        run: the user's name of the run.
        findings: of the log.
        synchronous: whether step N is sampled by the weights of N − 1 updates, and by no older ones.
    """

    def __init__(
        self,
        series: CheckpointSeries,
        files: Sequence[LogFile],
        run: str | None,
        findings: Findings,
        *,
        synchronous: bool,
    ) -> None:
        self.run, self.counts, self.synchronous = writable(run), findings.counts, synchronous
        self.notes: list[str] = []
        self.files = list(files)
        """Under the run's name in the series, if both hold a single run."""
        runs = {file.run for file in files}
        if run is None and len(runs) == len(series.runs) == 1 and runs != set(series.runs):
            self.notes.append(f"taken for the log of run {series.runs[0]}, the only one of the checkpoints")
            self.files = [replace(file, run=series.runs[0]) for file in files]
        # A single checkpoint may be given for any step of any run: its id does not say who sampled.
        self.checkpoints = list(series) if len(series) > 1 else []
        self._known: dict[tuple[str, int | None], str | None] = {}
        """By run and updates, or by a policy's name and -1: the checkpoint that was found for a trajectory."""

    def policy(self, entry: Entry, file: LogFile) -> str:
        """Name of the policy that sampled a trajectory; see `renamed`."""
        if entry.policy is not None:
            name = str(writable(entry.policy))
            self._checkpoint(name, -1)
            return name
        if entry.step is None:
            if self.run is None:
                self.counts[_UNNAMED]["named after its run" if file.several else 'called "unknown"'] += 1
            return self.run or (file.run if file.several else "unknown")
        exact = self._checkpoint(file.run, entry.updates)
        if exact is not None:
            self.counts[_EXACT][exact] += 1
            return exact
        # Without the number of updates, only the step is known for which the weights sampled.
        name = f"{file.run}-" + (f"step{entry.step:05d}" if entry.updates is None else f"{entry.updates:05d}")
        later, updates = self._checkpoint(file.run, entry.step), -1 if entry.updates is None else entry.updates
        if later is not None:
            self.counts[_STANDS_IN][json.dumps([later, updates, name])] += 1
        return name

    def _checkpoint(self, run: str, step: int | None) -> str | None:
        """Id of the checkpoint that a run had after so many updates, if it was kept."""
        if (run, step) not in self._known:
            self._known[run, step] = self._search(run, step)
            self.counts[_ASKED][json.dumps([run, step, self._known[run, step]])] += 1
        return self._known[run, step]

    def agrees(self, findings: Findings) -> bool:
        """Whether these checkpoints give the answers that a part of the log was read with."""
        return all(self._search(run, step) == id for run, step, id in map(json.loads, findings.counts[_ASKED]))

    def _search(self, run: str, step: int | None) -> str | None:
        if step == -1:
            return run if any(checkpoint.id == run for checkpoint in self.checkpoints) else None
        for checkpoint in self.checkpoints:
            mine = checkpoint.run == run or (
                checkpoint.is_base and (step == 0 or checkpoint.id == f"{run}-{checkpoint.step:05d}")
            )
            if step == checkpoint.step and mine:
                return checkpoint.id
        return None

    @property
    def renamed(self) -> dict[str, str]:
        """By name, the checkpoints that get the trajectories of an older policy: the newest that step N logged."""
        newest: dict[str, tuple[int, str]] = {}
        for id, *policy in map(json.loads, self.counts[_STANDS_IN]):
            newest[id] = max(newest.get(id, (-2, "")), tuple(policy))
        return {name: id for id, (_, name) in newest.items() if id not in self.counts[_EXACT]}

    def assumed(self) -> list[str]:
        """Notes about what was assumed."""
        notes = []
        if self.renamed:
            first, *others = self.renamed.values()
            notes.append(
                f"{first}{f' and {len(others)} more' if others else ''}: the checkpoint that the logged step made; its "
                f"responses were sampled by weights {'' if self.synchronous else 'at least '}one update older"
            )
        for how, n in self.counts[_UNNAMED].items():
            notes.append(f"{n:,} trajectories have no policy in the log: it is {how} (--run names it)")
        return notes
