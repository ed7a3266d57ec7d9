"""What attribution found: shares of samples, effects of kinds of samples, and how far both can be believed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tsae.attribution.sample_kinds import band_of
from tsae.attribution.shares import Shares
from tsae.base.artefact import Kind, write_artefact
from tsae.base.files import as_path
from tsae.base.filters import need_names
from tsae.base.table_export import Tables, read_tables, table_files
from tsae.errors import TsaeError
from tsae.rollouts.schema import BANDS
from tsae.rollouts.table import Rollouts

_TABLES = ("targets", "samples", "facts", "groups", "steps", "entropy", "tokens", "along")


@dataclass(frozen=True)
class Attribution(Tables):
    """Which samples moved what.

    Two questions have two answers. *Share*: who did it; shares of all samples add up to what happened. *Effect*: what
    would have been without it; effects do not add up. docs/attribution.md tells when to use which. In both, a positive
    number raised the target. All are in the target's units.
    """

    targets: pd.DataFrame
    """One row a target: target, before, after, realised (after − before), predicted (the same by the replay of all
    samples), decay (the part of weight decay), remainder (what shares leave unexplained, as a share of realised),
    flagged (whether that is much)."""
    samples: pd.DataFrame
    """One row a sample, step that used it, and target: trajectory (row of the rollouts), step, target, share, policy
    and kl (the parts of the share that the loss's policy term and its KL term have)."""
    facts: pd.DataFrame
    """One row a sample: trajectory, problem_id, step, band, level (the data set's own), outcome, reward, advantage,
    length (sampled tokens): with `samples`, all that a share is compared with. And prompt and response, of the samples
    that are shown only."""
    groups: pd.DataFrame
    """One row a group of samples and target: kind (`tsae.attribution.sample_kinds`), group, n, target, share (the sum
    of theirs), without (what the target's change would have been without them), effect (predicted − without), alone
    (the change with them only), how: "replayed", or "simulated"."""
    steps: pd.DataFrame
    """One row a step of the optimiser, to compare the replay with the run: step, n (samples), grad_norm (before
    clipping) and mean_length (tokens) of the replay and, as logged_grad_norm and logged_mean_length, of the trainer's
    log, distance (to the run's checkpoint, as a share of the way from the base), clipped. NaN where not known."""
    entropy: pd.DataFrame
    """One row for each band and fifth of the tokens: band, fifth, target, share of these tokens. The sampled tokens are
    put in order by the policy's entropy and divided into five equal parts; fifth 5 has its most open choices."""
    tokens: pd.DataFrame
    """One row a response token of the samples that are shown: trajectory, step, target, position, token_id, token
    (text), share. They add up to the sample's share."""
    along: pd.DataFrame
    """What the responses of the log show. It has a row for each third of the run ("steps 1-5"), band or "all", and
    measure: accuracy, response_length, behaviours, and attributed features as the first weights read the responses.
    mean, low and high are over problems; change, change_low and change_high are against the first third, in the
    problems that both asked. See `tsae.rollouts.behaviours.behaviour_table`."""
    info: dict[str, Any] = field(default_factory=dict)
    """recipe (the settings in words), run, series, checkpoints (their steps), inputs (fingerprints of what it was made
    from), sae (its fingerprint, or None), path_error (distance of the replay from the last checkpoint, or None),
    replay (steps: the last step; to: the last one that is replayed well; within: the largest deviation until then;
    departs: the first step that is not, or None; cause), about (which run this is, where that is not clear), gate
    (why no effect is stated; or empty), trained_on (whether right and wrong answers are those of the log's own
    problems), and notes: what was sampled, assumed or left out."""
    source: Rollouts | None = field(default=None, repr=False, compare=False)
    """The log, for texts; None after loading without it."""

    @property
    def bands(self) -> pd.DataFrame:
        """What easy, medium, hard and unbanded samples did. There is one row for each band and target, with band, n,
        target, share, without, alone and how; see `groups`."""
        table = self.groups[self.groups.kind == "band"].rename(columns={"group": "band"})
        bands = [*BANDS, *sorted(set(table.band) - set(BANDS))]
        table = self._in_order(table, table.band.map(bands.index))
        return table[["band", "n", "target", "share", "without", "alone", "how"]]

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
            need_names("kind", [kind], self.groups.kind, "Attribution.table")
            table = table[table.kind == kind]
        table = table.merge(self.targets[["target", "realised"]], on="target")
        return self._in_order(table, -table.effect.abs())

    def _in_order(self, table: pd.DataFrame, key: pd.Series) -> pd.DataFrame:
        """A table by target, in the order of `targets`, and within a target by a key of its rows."""
        place = table.target.map({name: place for place, name in enumerate(self.targets.target)})
        return table.iloc[np.lexsort((key, place))].reset_index(drop=True)

    def of_target(self, target: str, n: int = 10) -> pd.DataFrame:
        """The samples with the largest shares for and against a target, n each, with what is known of them.

        Texts come from the log. Without the log, only the samples with the largest shares have texts (see `facts`).

        Raises:
            TsaeError: for an unknown target.
        """
        mine = self._of(self._used, target).sort_values("share", ascending=False, kind="stable")
        raised, lowered = mine[mine.share > 0].head(n), mine[mine.share < 0].tail(n)
        found = pd.concat([raised, lowered]).merge(self.facts.drop(columns="step"), on="trajectory", how="left")
        if self.source is None:
            return found
        return found.assign(response=self.source.frame.response.to_numpy()[found.trajectory.to_numpy()])

    def of_sample(self, trajectory: int) -> pd.DataFrame:
        """What a sample did to every target: a row each, the largest part of its realised change first.

        Raises:
            TsaeError: where no step was trained on it.
        """
        used = self._used
        mine = used[used.trajectory == trajectory].merge(self.targets[["target", "realised"]])
        if mine.empty:
            raise TsaeError(f"no step was trained on trajectory {trajectory}", where="of_sample")
        part = (mine.share / mine.realised.abs().clip(lower=1e-30)).abs()
        return mine.assign(part=part).sort_values("part", ascending=False, ignore_index=True)

    @cached_property
    def _used(self) -> pd.DataFrame:
        """`samples` with one row for each sample and target.

        Where several steps used a sample, its shares are added, and step is the first of them.
        """
        names = {"step": "min", "share": "sum", "policy": "sum", "kl": "sum"}
        return self.samples.groupby(["trajectory", "target"], sort=False, as_index=False).agg(names)

    def _of(self, table: pd.DataFrame, target: str) -> pd.DataFrame:
        need_names("target", [target], self.targets.target, "Attribution")
        return table[table.target == target]

    def save(self, folder: str | Path) -> Attribution:
        """Write the tables as Parquet, and info as attribution.json. Until all is written, the earlier one stays."""
        tables = table_files({name: getattr(self, name) for name in _TABLES})
        inputs = {"rollouts": self.info.get("inputs", {}).get("rollouts")}
        write_artefact(folder, ATTRIBUTION, self.info, tables, config=self.info.get("config"), inputs=inputs)
        return self

    @classmethod
    def load(cls, folder: str | Path, rollouts: Rollouts | None = None) -> Attribution:
        """Read what `save` wrote.

        Args:
            folder: of the attribution.
            rollouts: the log that it was made from, for texts.

        Raises:
            TsaeError: where the folder holds no attribution or a damaged one, or the log is another.
        """
        folder = as_path(folder)
        info, tables = read_tables(folder, ATTRIBUTION, _TABLES)
        of = info.get("inputs", {}).get("rollouts")
        if rollouts is not None and rollouts.fingerprint != of:
            what = f"was made from other rollouts ({of}) than these ({rollouts.fingerprint})"
            raise TsaeError(what, where=folder, fix="Give the log that was attributed.")
        return cls(**tables, info=info, source=rollouts)

    def __repr__(self) -> str:
        return (
            f"Attribution({len(self.targets)} targets, {len(self.facts):,} samples, "
            f"{self.groups.group.nunique()} kinds)"
        )


ATTRIBUTION = Kind("attribution", 1, "attribution.json", "Make it with `tsae attribute`.", Attribution.load)

TEXTS = 20
"""Samples for and against each target whose texts are kept, so that a page needs no log."""


def target_table(split: Shares, flag: float) -> pd.DataFrame:
    remainder = split.remainder / np.where(split.realised == 0, np.nan, split.realised)
    kept = {name: getattr(split, name) for name in ("before", "after", "realised", "predicted", "decay")}
    flagged = ~(np.abs(remainder) <= flag)
    return pd.DataFrame({"target": split.targets, **kept, "remainder": remainder, "flagged": flagged})


def sample_table(split: Shares) -> pd.DataFrame:
    """(n · n_targets) rows."""
    n, names = len(split.rows), split.targets
    keys = {"trajectory": np.repeat(split.rows, len(names)), "step": np.repeat(split.steps, len(names))}
    shares = {"share": split.shares.ravel(), "policy": split.policy.ravel(), "kl": split.kl.ravel()}
    return pd.DataFrame({**keys, "target": np.tile(names, n), **shares})


def share_of_rows(split: Shares, n: int) -> np.ndarray:
    """(n, n_targets) share of every row of the rollouts, over all steps that used it."""
    found = np.zeros((n, len(split.targets)))
    np.add.at(found, split.rows, split.shares)
    return found


def fact_table(split: Shares, rollouts: Rollouts, shown: Sequence[int]) -> pd.DataFrame:
    """Rows of the samples, with texts of those that are shown and of the largest shares."""
    rows, first = np.unique(split.rows, return_index=True)
    of_rows, shown_rows = share_of_rows(split, len(rollouts))[rows], set(shown)
    for values in of_rows.T:
        order = np.argsort(values, kind="stable")
        shown_rows |= set(rows[[*order[:TEXTS], *order[-TEXTS:]]].tolist())
    frame = rollouts.frame.iloc[rows]
    texts = {name: frame[name].astype(object) for name in ("problem_id", "outcome")}
    mine = np.isin(rows, list(shown_rows))
    texts |= {name: frame[name].astype(object).where(mine) for name in ("prompt", "response")}
    columns = {name: values.where(values.notna(), None).to_numpy() for name, values in texts.items()}
    columns |= {name: frame[name].to_numpy(dtype=float) for name in ("reward", "advantage")}
    band, level = (pd.Series(values, dtype=object) for values in (band_of(rollouts)[rows], frame.level.to_numpy()))
    return pd.DataFrame(
        {
            "trajectory": rows,
            "step": split.steps[first],
            **columns,
            "band": band.where(band.notna(), None).to_numpy(),
            "level": level.where(level.notna(), None).to_numpy(),
            "length": rollouts.n_sampled[rows],
        }
    )


def group_table(
    kinds: Mapping[str, tuple[str, np.ndarray]],
    found: Mapping[tuple[str, str], tuple[np.ndarray, str]],
    whole: Mapping[str, np.ndarray],
    split: Shares,
) -> pd.DataFrame:
    """One row a group and target.

    Args:
        kinds: (kind, mask of trajectories) by the name of the group.
        found: (n_targets,) changes of trainings and how they were found, by ("without" or "alone", group).
        whole: (n_targets,) change with all samples, by how.
        split: the shares.
    """
    names = ["kind", "group", "n", "target", "share", "without", "effect", "alone", "how"]
    nothing, tables = np.full(len(split.targets), np.nan), []
    for name, (kind, mask) in kinds.items():
        without, how = found.get(("without", name), (nothing, ""))
        alone = found.get(("alone", name), (nothing, ""))[0]
        keys = {"kind": kind, "group": name, "n": int(mask.sum()), "target": split.targets}
        share, effect = split.shares[mask[split.rows]].sum(0), whole.get(how, nothing) - without
        columns = {"share": share, "without": without, "effect": effect, "alone": alone, "how": how}
        tables.append(pd.DataFrame({**keys, **columns}))
    return pd.concat(tables, ignore_index=True)[names] if tables else pd.DataFrame(columns=names)
