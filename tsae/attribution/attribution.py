"""What attribution found: shares of samples, effects of kinds and problems, and how far both can be believed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tsae.attribution.credit.token_shares import Directions, token_shares
from tsae.attribution.gradients.gradient_store import GradientStore
from tsae.attribution.gradients.path import TrainingPath
from tsae.base.files import as_path, read_object, reading
from tsae.base.seal import read_whole, write_whole
from tsae.base.table_export import Tables, write_table
from tsae.checkpoints.checkpoint import Checkpoint
from tsae.checkpoints.loading import text_of, token_strings, weights_fingerprint
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError
from tsae.rollouts.table import Rollouts

_COLUMNS = {
    "targets": ("target", "before", "after", "realised", "simulated"),
    "samples": ("trajectory", "step", "target", "share"),
    "facts": ("trajectory", "problem_id", "step", "band", "outcome"),
    "groups": ("group", "n", "target", "share", "without", "effect", "alone"),
    "problems": ("problem_id", "target", "share", "effect", "low", "high"),
    "segments": ("target",),
}
_TABLES = ("targets", "samples", "facts", "groups", "problems", "segments")
DIRECTIONS = re.compile("directions-[0-9a-f]{16}")
"""Names of folders that hold directions."""


def is_left_over(directions: Path) -> bool:
    """Whether a folder of directions belongs to no attribution: the one beside it names another folder."""
    if not DIRECTIONS.fullmatch(directions.name):
        return False
    try:
        named = read_object(directions.parent / "attribution.json", "Attribute again.").get("directions")
    except TsaeError:
        return False
    return bool(named != directions.name)


@dataclass(frozen=True)
class Attribution(Tables):
    """Which samples moved what.

    Two questions have two answers. *Share*: who did it; shares of all samples add up to what happened. *Effect*: what
    would have been without it, by simulation; effects do not add up. docs/attribution.md tells when to use which. In
    both, a positive number raised the target.

    What can be told apart: a share is known for every sample and token. Effects are simulated directly for kinds of
    samples and for the samples with the largest shares. The effects of problems come from a regression on random
    halves, which has fewer unknowns than subsets. Effects of thousands of single samples are not identified by a few
    hundred subsets, and are not given.
    """

    targets: pd.DataFrame
    """One row a target: target, before, after, realised (after − before), simulated (the same with all samples, by
    simulation), decay (the part of weight decay), remainder (what shares leave unexplained, as a share of realised),
    flagged, r2: of the problems' effects, on halves that the regression has not seen, and validated and
    validated_error: rank correlation of simulated with really replayed changes over halves of the problems, and the
    median distance between them (config.validate). NaN where there are none."""
    samples: pd.DataFrame
    """One row a sample and target: trajectory (row of the rollouts), step, target, share in the target's units, effect
    (what leaving it out alone takes away, by simulation; NaN where that was not done), and baselines: product_base and
    product_path (plain inner products at the start and along the path, the second TracIn), and covariance (advantage ×
    what the sample shows of the target against the mean of its prompt group, at the start of the run)."""
    facts: pd.DataFrame
    """One row a sample: trajectory, problem_id, step, band, outcome, reward, advantage, length (sampled tokens) and
    gradient_norm: with `samples`, all that a share is compared with. And prompt and response, of the samples with the
    largest shares only: `tsae.attribution.tables.TEXTS` for and against each target."""
    groups: pd.DataFrame
    """One row a group of samples and target: kind (`tsae.attribution.sample_kinds`), group, n, target, share (the sum
    of theirs), without (what the target's change would have been without them), effect (simulated − without), alone
    (the change with them only)."""
    problems: pd.DataFrame
    """One row a problem and target: problem_id, n, target, share, effect (Banzhaf value: the mean of what the problem
    adds to random subsets of the others), low, high (95 % interval over the simulated subsets). Empty without
    subsets."""
    segments: pd.DataFrame
    """One row a target and stretch between checkpoints, with flagged; see `tsae.attribution.credit.shares.Shares`."""
    info: dict[str, Any] = field(default_factory=dict)
    """recipe, config, series, run, checkpoints (their steps), inputs (fingerprints of what it was made from), weights
    (fingerprints of the checkpoints' files, by step), sae (its fingerprint, or None), directions (the folder of those
    of the targets, which `tokens` reads), path_error (largest of the segments), and notes: what was sampled, assumed or
    left out."""
    source: Rollouts | None = field(default=None, repr=False, compare=False)
    """The log, for texts and tokens; None after loading without it."""
    folder: Path | None = field(default=None, repr=False, compare=False)
    """Where it was saved."""

    def table(self, target: str | None = None, kind: str | None = None) -> pd.DataFrame:
        """`groups` with the realised change of the target, by the size of the effect within a target.

        Args:
            target: only this one.
            kind: only groups of this kind, such as band.

        Raises:
            TsaeError: for an unknown target or kind.
        """
        table = self.groups if target is None else self._of(self.groups, target)
        if kind is not None:
            known = list(dict.fromkeys(self.groups.kind))
            if kind not in known:
                raise TsaeError(f"no kind {kind!r}; there are {', '.join(known) or 'none'}", where="Attribution.table")
            table = table[table.kind == kind]
        table = table.merge(self.targets[["target", "realised"]], on="target")
        order = {name: place for place, name in enumerate(self.targets.target)}
        table = table.assign(_place=table.target.map(order), _size=-table.effect.abs())
        return table.sort_values(["_place", "_size"], ignore_index=True).drop(columns=["_place", "_size"])

    def of_target(self, target: str, n: int = 10) -> pd.DataFrame:
        """The samples with the largest shares for and against a target, n each, with what is known of them.

        Texts come from the log. Without the log, only the samples with the largest shares have texts (see `facts`).

        Raises:
            TsaeError: for an unknown target.
        """
        mine = self._of(self.samples, target).sort_values("share", ascending=False)
        raised, lowered = mine[mine.share > 0].head(n), mine[mine.share < 0].tail(n)
        return self._with_facts(pd.concat([raised, lowered]))

    def of_sample(self, trajectory: int) -> pd.DataFrame:
        """What a sample did to every target: a row each, the largest part of its realised change first.

        Raises:
            TsaeError: where no step was trained on it.
        """
        mine = self.samples[self.samples.trajectory == trajectory].merge(self.targets[["target", "realised"]])
        if mine.empty:
            raise TsaeError(f"no step was trained on trajectory {trajectory}", where="of_sample")
        part = (mine.share / mine.realised.abs().clip(lower=1e-30)).abs()
        return mine.assign(part=part).sort_values("part", ascending=False, ignore_index=True)

    def tokens(self, trajectory: int, target: str, series: CheckpointSeries) -> pd.DataFrame:
        """Which tokens of a sample carry its share in a target.

        Args:
            trajectory: row of the rollouts.
            target: its name.
            series: the run's checkpoints.

        Returns:
            one row a response token: position, token_id, token (text) and share. They add up to the sample's share,
            to the precision of bfloat16.

        Raises:
            TsaeError: for an unknown target or sample, where the log or the folder of the attribution is missing, and
                for checkpoints that are not those of the attribution.
        """
        self._of(self.samples, target)
        place = self.facts[self.facts.trajectory == trajectory]
        if place.empty:
            raise TsaeError(f"no step was trained on trajectory {trajectory}", where="tokens")
        if self.source is None or self.folder is None:
            what = "the log is not at hand"
            raise TsaeError(what, where="Attribution.tokens", fix="Load with it: Attribution.load(to, rollouts).")
        begin, step = int(self.info["checkpoints"][0]), int(place.step.iloc[0])
        steps = [s for s in self.info["checkpoints"] if s <= step - 1][-1:] + [
            s for s in self.info["checkpoints"] if s > step - 1
        ][:1]
        near = [c for c in series if c.step in steps and (c.is_base or c.run == self.info["run"])]
        self._check_files({c.step: c for c in near}, steps, series.name)
        path = TrainingPath.of(series.select([c.id for c in near]), self.info["run"])
        local = TrainingPath(path.trained, {s - begin: weights for s, weights in path.knots.items() if s >= begin})
        j = list(self.targets.target).index(target)
        store = GradientStore(self.folder / "gradients")
        directions = Directions(self.folder / self.info["directions"])
        shares = token_shares(store, local, directions, self.source, trajectory, step - begin, j)
        ids = self.source.tokens(trajectory)[1]
        strings = token_strings(series.base.load_tokenizer())
        columns = {"token_id": ids, "token": [text_of(strings, i) for i in ids], "share": shares}
        return pd.DataFrame({"position": np.arange(len(ids)), **columns})

    def _check_files(self, given: Mapping[int, Checkpoint], steps: Sequence[int], where: str) -> None:
        """Compare files with what was written down."""
        for step in steps:
            found = weights_fingerprint(given[step]) if step in given else "not there"
            if found != (told := self.info["weights"][str(step)]):
                raise TsaeError(
                    f"the checkpoint after step {step} is not the one that was attributed (weights: {found}, then: "
                    f"{told})",
                    where=where,
                    fix="Give the series that was attributed, with its checkpoints as they were; or attribute again.",
                )

    def _of(self, table: pd.DataFrame, target: str) -> pd.DataFrame:
        if target not in set(self.targets.target):
            raise TsaeError(f"no target {target!r}; there are {', '.join(self.targets.target)}", where="Attribution")
        return table[table.target == target]

    def _with_facts(self, samples: pd.DataFrame) -> pd.DataFrame:
        found = samples.merge(self.facts.drop(columns="step"), on="trajectory", how="left")
        if self.source is None:
            return found
        return found.assign(response=self.source.frame.response.to_numpy()[found.trajectory.to_numpy()])

    def save(self, folder: str | Path) -> Attribution:
        """Write the tables as Parquet, and info as attribution.json; gives itself with the folder.

        Until all is written, the earlier attribution stays.
        """
        tables = {f"{name}.parquet": partial(write_table, table=getattr(self, name)) for name in _TABLES}
        return replace(self, folder=write_whole(folder, "attribution.json", self.info, tables))

    @classmethod
    def load(cls, folder: str | Path, rollouts: Rollouts | None = None) -> Attribution:
        """Read what `save` wrote.

        Args:
            folder: of the attribution.
            rollouts: the log that it was made from, for texts and tokens.

        Raises:
            TsaeError: where the folder holds no attribution or a damaged one, or the log is another.
        """
        folder = as_path(folder)
        files = ("attribution.json", *(f"{table}.parquet" for table in _TABLES))
        info = read_whole(folder, files, "Attribute again.", "Give a folder that `tsae attribute` wrote.")
        with reading(folder, "Attribute again."):
            tables = {name: pd.read_parquet(folder / f"{name}.parquet") for name in _TABLES}
            for name, columns in _COLUMNS.items():
                if lacking := set(columns) - set(tables[name]):
                    raise ValueError(f"{name}.parquet has no column {min(lacking)}")
            of = str(info["inputs"]["rollouts"])
            if not DIRECTIONS.fullmatch(lie := str(info["directions"])):
                raise ValueError(f"{lie!r} is no folder of directions")
        if rollouts is not None and rollouts.fingerprint != of:
            what = f"was made from other rollouts ({of}) than these ({rollouts.fingerprint})"
            raise TsaeError(what, where=folder, fix="Give the log that was attributed.")
        return cls(**tables, info=info, source=rollouts, folder=folder)

    def __repr__(self) -> str:
        return (
            f"Attribution({len(self.targets)} targets, {len(self.facts):,} samples, "
            f"{self.groups.group.nunique()} kinds)"
        )
