"""Who sampled: the policies of a log's trajectories, as ids of checkpoints where these are kept.

Step N of most trainers logs responses that were sampled *before* update N, that is by the weights of N − 1 updates.
With a series of checkpoints, a policy gets the id of the checkpoint that has exactly these weights (the base, for step
1). Others are called after their updates, RUN-0000M. But where the log has nothing that checkpoint N itself sampled,
the newest weights that step N logged pass for it, so that a run's last checkpoint has trajectories. An id is one
policy's, whatever steps were kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tsae.checkpoints.series import CheckpointSeries
from tsae.rollouts.logs.entry import Entry
from tsae.rollouts.logs.files import LogFile


class Policies:
    """Names the policies of one log.

    Args:
        series: the checkpoints.
        files: the log's.
        run: what the user calls the run.
        synchronous: whether step N is sampled by the weights of N − 1 updates, and by no older ones.
    """

    def __init__(
        self, series: CheckpointSeries, files: Sequence[LogFile], run: str | None, *, synchronous: bool
    ) -> None:
        self.run, self.synchronous = run, synchronous
        self.notes: list[str] = []
        self.files = self._in_runs_of(series, files)
        """The files, under the run's name of the series where both hold a single run."""
        # A single checkpoint stands for any step of any run: its id says nothing of who sampled.
        self.checkpoints = list(series) if len(series) > 1 else []
        self._exact: set[str] = set()
        """Checkpoints that sampled part of the log themselves."""
        self._stands_in: dict[str, tuple[int, str]] = {}
        """By checkpoint: updates and name of the newest policy whose responses were logged when it was made."""
        self._unnamed = 0

    def policy(self, entry: Entry, file: LogFile) -> str:
        """Of the policy that sampled a trajectory: the name; see `renamed`."""
        if entry.policy is not None:
            return entry.policy
        if entry.step is None:
            self._unnamed += self.run is None
            return self.run or "unknown"
        exact = self._checkpoint(file.run, entry.updates)
        if exact is not None:
            self._exact.add(exact)
            return exact
        # Of weights that the log does not number, only the step is known for which they sampled.
        name = f"{file.run}-" + (f"step{entry.step:05d}" if entry.updates is None else f"{entry.updates:05d}")
        later, updates = self._checkpoint(file.run, entry.step), -1 if entry.updates is None else entry.updates
        if later is not None:
            self._stands_in[later] = max(self._stands_in.get(later, (updates, name)), (updates, name))
        return name

    def _checkpoint(self, run: str, step: int | None) -> str | None:
        """Id of the checkpoint that a run had after so many updates, where it was kept."""
        for checkpoint in self.checkpoints:
            mine = checkpoint.run == run or (
                checkpoint.is_base and (step == 0 or checkpoint.id == f"{run}-{checkpoint.step:05d}")
            )
            if step == checkpoint.step and mine:
                return checkpoint.id
        return None

    def _in_runs_of(self, series: CheckpointSeries, files: Sequence[LogFile]) -> list[LogFile]:
        runs = {file.run for file in files}
        if self.run is None and len(runs) == len(series.runs) == 1 and runs != set(series.runs):
            self.notes.append(f"taken for the log of run {series.runs[0]}, the only one of the checkpoints")
            return [replace(file, run=series.runs[0]) for file in files]
        return list(files)

    def state(self) -> dict[str, Any]:
        """What was found in a part of the log, as JSON has it."""
        return {"exact": sorted(self._exact), "stands_in": self._stands_in, "unnamed": self._unnamed}

    def add(self, state: Mapping[str, Any]) -> None:
        """Take in what was found in a further part."""
        self._exact.update(state["exact"])
        for id, (updates, name) in state["stands_in"].items():
            self._stands_in[id] = max(self._stands_in.get(id, (updates, name)), (updates, name))
        self._unnamed += state["unnamed"]

    @property
    def renamed(self) -> dict[str, str]:
        """Policies that pass for the checkpoint made one update later, or more, by their names."""
        return {name: id for id, (_, name) in self._stands_in.items() if id not in self._exact}

    def assumed(self) -> list[str]:
        """What was taken for granted."""
        notes = []
        if self.renamed:
            first, *others = self.renamed.values()
            notes.append(
                f"{first}{f' and {len(others)} more' if others else ''}: the checkpoint that the logged step made; its "
                f"responses were sampled by weights {'' if self.synchronous else 'at least '}one update older"
            )
        if self._unnamed:
            notes.append(
                f'{self._unnamed:,} trajectories have no policy in the log: it is called "unknown" (--run names it)'
            )
        return notes
