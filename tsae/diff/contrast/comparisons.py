"""Which rows are compared with which: the comparisons that `tsae.diff.contrast.draw_contrast` draws."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np

from tsae.diff.config import DiffConfig
from tsae.diff.contrast.rows import Rows
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable
from tsae.rollouts.bands import bands_info
from tsae.rollouts.schema import BANDS
from tsae.rollouts.table import Rollouts

_SAME_PROMPTS = "both sides read the same prompts with the same checkpoint"
CONTRAST = ("kind", "checkpoint", "part", "band", "outcome")
"""Columns that tell one comparison from another."""
MAIN_PARTS = ("total", "same_trajectories")
OUTCOME_PART = "success_minus_failure"


@dataclass(frozen=True)
class Comparison:
    """Two sides of rows. A contrast, its controls, its null and its baselines all rest on the same one."""

    kind: str
    """"shift", "outcome" or "interaction"."""
    checkpoint: str
    part: str
    band: str
    outcome: str
    a: np.ndarray
    """Rows of the first side: the checkpoint's, or successes; of an interaction, those of both bands."""
    b: np.ndarray
    """Rows of the second side: the base's, or failures."""
    problems: np.ndarray
    """Codes of the problems that count: each has rows on both sides."""
    n_left_out: int
    """Problems of the band that lack one of the two sides."""
    bands: tuple[Comparison, Comparison] | None = None
    """Of an interaction: the outcome comparisons of the harder and of the easier band."""
    note: str = ""
    """Why nothing is drawn, or ""."""

    @property
    def key(self) -> dict[str, str]:
        """The columns `CONTRAST`."""
        return {name: getattr(self, name) for name in CONTRAST}

    @property
    def rows(self) -> np.ndarray:
        """Rows of both sides."""
        return np.union1d(self.a, self.b)

    @property
    def fingerprint(self) -> str:
        """A name of the rows, the same for the same two sides; empty without rows."""
        if self.bands is not None:
            return "+".join(band.fingerprint for band in self.bands)
        if not len(self.problems):
            return ""
        digest = hashlib.sha256(np.sort(self.a).astype(np.int64).tobytes())
        digest.update(b"|" + np.sort(self.b).astype(np.int64).tobytes())
        return digest.hexdigest()[:12]

    @property
    def n_problems(self) -> int:
        """Problems that count; of an interaction, in both bands together."""
        return len(self.problems) if self.bands is None else sum(len(band.problems) for band in self.bands)


def main_part(parts: Mapping[str, str]) -> str | None:
    """Choose the part that stands for a checkpoint's shift: total, or same_trajectories if total cannot be drawn.

    Args:
        parts: by part of its shift over all problems, why it was not drawn, or "".
    """
    present = [part for part in MAIN_PARTS if part in parts]
    return next((part for part in present if not parts[part]), present[0] if present else None)


def contrast_bands(rollouts: Rollouts, config: DiffConfig, where: str | Path) -> list[str]:
    """Return "all", then the bands that are asked for or present; `where` is named where one is missing.

    Raises:
        TsaeError: where a band that is asked for has no problems.
    """
    band = set(rollouts.table["band"].to_pylist()) - {None}
    wanted = list(config.bands) if config.bands is not None else [b for b in BANDS if b in band]
    for name in wanted:
        if name not in band:
            raise TsaeError(
                f"no problem is in the band {name!r}; the rollouts have {', '.join(sorted(band)) or 'no bands'}",
                where=where,
                fix="Measure bands first (`tsae rollouts bands`), or leave that band out.",
            )
    return ["all", *wanted]


def comparisons(features: FeatureTable, rows: Rows, config: DiffConfig) -> list[Comparison]:
    """Every comparison of a diff: shifts first, then outcome effects, then interactions."""
    effects = list(outcome_comparisons(features, rows, config))
    shifts = shift_comparisons(features, rows, config)
    between = (_unless_refused(features, found) for found in interaction_comparisons(effects, config))
    return [*shifts, *effects, *between]


def main_comparisons(found: Sequence[Comparison], checkpoint: str) -> list[Comparison]:
    """A checkpoint's main shift in every band, and its outcome effects: the comparisons that a report leads with."""
    shifts = [of for of in found if of.kind == "shift" and of.checkpoint == checkpoint and of.outcome == "all"]
    part = main_part({of.part: of.note for of in shifts if of.band == "all"})
    outcomes = [of for of in found if of.kind == "outcome" and of.checkpoint == checkpoint]
    return [*(of for of in shifts if of.part == part), *outcomes]


def shift_comparisons(features: FeatureTable, rows: Rows, config: DiffConfig) -> Iterator[Comparison]:
    """Every shift of every non-base reader, by part, band and outcome."""
    base = features.readers[0]
    for reader in features.readers[1:]:
        sides: dict[str, tuple[tuple[str, str | None], tuple[str, str | None]]] = {
            "total": ((reader, reader), (base, base)),
            "policy": ((base, reader), (base, base)),
            "representation": ((reader, reader), (base, reader)),
            "same_trajectories": ((reader, base), (base, base)),
        }
        if rows.own(base) is None:
            # In logs of other policies or other problems, only what all readers read can be compared.
            sides = {"same_trajectories": ((reader, None), (base, None))}
        elif len(rows.by_reader[reader, reader]) == 0:
            sides = {"same_trajectories": sides["same_trajectories"]}
        for part, ((reader_a, policy_a), (reader_b, policy_b)) in sides.items():
            for band in contrast_bands(features.rollouts, config, features.origin):
                for outcome in ("all", "success", "failure"):
                    a = rows.pick(reader_a, policy_a, band, outcome)
                    b = rows.pick(reader_b, policy_b, band, outcome)
                    # Both sides of the representation part are the checkpoint's trajectories. It is drawn over the
                    # problems of the other two parts: otherwise the parts would not add up.
                    among = rows.pick(base, base, band, outcome) if part == "representation" else b
                    found = _compare(rows, "shift", reader, part, band, outcome, a, b, among)
                    note = _too_few(found, "such trajectories on both sides", config)
                    found = replace(found, note=_SAME_PROMPTS if config.within_prompt and part == "policy" else note)
                    yield _unless_refused(features, found)


def outcome_comparisons(features: FeatureTable, rows: Rows, config: DiffConfig) -> Iterator[Comparison]:
    """Success − failure within problem, for every reader and band."""
    for reader in features.readers:
        policy = rows.own(reader)
        for band in contrast_bands(features.rollouts, config, features.origin):
            a, b = (rows.pick(reader, policy, band, outcome) for outcome in ("success", "failure"))
            yield _unless_refused(features, outcome_comparison(rows, a, b, reader, band, config))


def outcome_comparison(
    rows: Rows, success: np.ndarray, failure: np.ndarray, checkpoint: str, band: str, config: DiffConfig
) -> Comparison:
    """Successes against failures of the same problems, both rows of the checkpoint."""
    found = _compare(rows, "outcome", checkpoint, OUTCOME_PART, band, "all", success, failure)
    note = _SAME_PROMPTS if config.within_prompt else _too_few(found, "both outcomes", config)
    return replace(found, note=note)


def interaction_comparisons(outcomes: list[Comparison], config: DiffConfig) -> Iterator[Comparison]:
    """The outcome effect in the harder − in the easier of every two bands, for every reader."""
    for easier, harder in combinations([found for found in outcomes if found.band != "all"], 2):
        if easier.checkpoint != harder.checkpoint:
            continue
        short = [part for part in (harder, easier) if part.note]
        note = ""
        if config.within_prompt:
            note = _SAME_PROMPTS
        elif short:
            few = [f"{part.n_problems} problems of the band {part.band}" for part in short]
            note = f"{' and '.join(few)} have both outcomes; {config.min_problems} are needed"
            note = next((part.note for part in short if part.n_problems >= config.min_problems), note)
        yield Comparison(
            kind="interaction",
            checkpoint=harder.checkpoint,
            part=OUTCOME_PART,
            band=f"{harder.band}-{easier.band}",
            outcome="all",
            a=np.concatenate([harder.a, easier.a]),
            b=np.concatenate([harder.b, easier.b]),
            problems=np.union1d(harder.problems, easier.problems),
            n_left_out=harder.n_left_out + easier.n_left_out,
            bands=(harder, easier),
            note=note,
        )


def _compare(
    rows: Rows,
    kind: str,
    checkpoint: str,
    part: str,
    band: str,
    outcome: str,
    a: np.ndarray,
    b: np.ndarray,
    among: np.ndarray | None = None,
) -> Comparison:
    """Compare rows a with rows b on the problems that both have, and that the rows `among` have."""
    both = np.intersect1d(rows.problem[a], rows.problem[b])
    if among is not None:
        both = np.intersect1d(both, rows.problem[among])
    left_out = len(np.union1d(rows.problem[a], rows.problem[b])) - len(both)
    a, b = (side[np.isin(rows.problem[side], both)] for side in (a, b))
    return Comparison(kind, checkpoint, part, band, outcome, a, b, both, left_out)


def _too_few(found: Comparison, what: str, config: DiffConfig) -> str:
    if found.n_problems >= config.min_problems:
        return ""
    return f"{found.n_problems} problems have {what}; {config.min_problems} are needed"


def _unless_refused(features: FeatureTable, found: Comparison) -> Comparison:
    """Refuse a comparison within a band if the bands' info says that they cannot be told from training steps."""
    refused = (bands_info(features.rollouts.info, features.rollouts.origin) or {}).get("refused")
    return replace(found, note=refused) if refused and found.band != "all" else found
