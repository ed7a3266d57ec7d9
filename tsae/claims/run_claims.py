"""The claims of a run: every claim of the literature as a function on what the run's folder holds.

A run is one training with one seed. So problems are the unit of every interval, and a verdict says what this run did,
not what such trainings do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from tsae.base import display
from tsae.base.artefact import command_facts, read_record, versions, write_record
from tsae.base.files import as_path, read_object, reading, writing
from tsae.base.table_export import Tables
from tsae.claims import inside_claims, response_claims
from tsae.claims.evidence import NAMES, Evidence, Missing, StepCheck, inputs_of, need
from tsae.claims.judging import CLAIMS, Judgement
from tsae.diff.feature_diff import FeatureDiff
from tsae.errors import TsaeError, refuse
from tsae.rollouts.bands import bands_info, bands_label

FILE = "claims.json"
TESTS: dict[str, Callable[[Evidence], Judgement]] = {
    "a": response_claims.inverted_u,
    "b": response_claims.hard_harms,
    "c": response_claims.lone_successes,
    "d": response_claims.behaviour_first,
    "e": partial(inside_claims.families_of_band, "e"),
    "f": partial(inside_claims.families_of_band, "f"),
    "g": partial(inside_claims.families_of_band, "g"),
    "j": response_claims.one_format_wins,
    "k": response_claims.difficulty_drifts,
    "n": response_claims.base_overtakes,
    "o": inside_claims.sparser_when_hard,
    "p": inside_claims.coherent_not_valid,
    "q": inside_claims.errors_breed_errors,
    "v": inside_claims.pruning_easy,
}
"""The test of every claim that one run can test, by its letter."""
REPLAYED: dict[str, Callable[[Evidence], Judgement]] = {
    "a": response_claims.inverted_u_replayed,
    "b": response_claims.hard_harms_replayed,
    "e": response_claims.easy_direct_replayed,
}
"""What replays of a mixed run with one band alone say, where a claim's own test lacks something."""
CHECKED = ("p", "q")
"""Claims that need to know which steps are right."""
ONE_RUN = (
    "One training run: problems are the unit, so this says what this run did, not what such training does. Other seeds "
    "may differ."
)
_AGAIN = "Test them again: tsae claims RUN."


@dataclass(frozen=True)
class Claims(Tables):
    """What a run shows of what the literature says."""

    records: tuple[dict[str, Any], ...]
    """One a claim, as `Judgement.record` gives it."""
    info: dict[str, Any] = field(default_factory=dict)
    """rollouts, labels: fingerprints of what the readers answered; sae: that of the weights, where known; versions;
    bands: what they are, where they come from elsewhere (`tsae.rollouts.bands.bands_label`); check: the name of the
    function that said which steps are right, if one did."""

    def table(self) -> pd.DataFrame:
        """One row a claim and part: claim, title, verdict, statement, mean, low, high, n, unit, holds, needs, add and
        caveat. A claim that cannot be tested has one row without numbers."""
        rows = [{**record, **one} for record in self.records for one in record["parts"] or [{}]]
        columns = "claim title verdict statement mean low high n unit margin equal holds needs add caveat"
        return pd.DataFrame(rows, columns=columns.split())

    def __getitem__(self, key: str) -> dict[str, Any]:
        """The record of one claim, by its letter."""
        found = {record["claim"]: record for record in self.records}
        refuse("Claims", (key not in found, f"no claim {key!r}; there are {', '.join(found)}", None))
        return found[key]

    def with_steps_of(self, before: Claims | None) -> Claims:
        """The same, with the claims on steps of an earlier test of the same run if that one knew which are right."""
        if before is None or "check" not in before.info or "check" in self.info:
            return self
        known = {record["claim"]: record for record in before.records if record["claim"] in CHECKED}
        records = tuple(known.get(record["claim"], record) for record in self.records)
        return Claims(records, {**self.info, "check": before.info["check"]})

    def __str__(self) -> str:
        return display.claims_text(self)

    def _repr_html_(self) -> str:
        return display.claims_card(self)

    def _tables(self) -> dict[str, pd.DataFrame | Any]:
        return {"claims": self.table()}

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"note": ONE_RUN, **self.info, "claims": list(self.records)}

    def save(self, folder: str | Path) -> Path:
        """Write claims.json into the run's folder, with its checksum."""
        file = as_path(folder) / FILE
        with writing(file, "Remove what lies in its place, or make its folder writable."):
            return write_record(file, {"kind": "claims", **self.as_dict(), **command_facts(file)})

    @classmethod
    def load(cls, folder: str | Path, diff: FeatureDiff | None = None) -> Claims | None:
        """What `save` wrote; None where there is nothing.

        Args:
            folder: of the run.
            diff: that the claims are shown beside.

        Raises:
            TsaeError: where it is damaged, or of other rollouts or another SAE than the diff.
        """
        file = as_path(folder) / FILE
        if not os.path.lexists(file):
            return None
        found = read_record(file, _AGAIN)
        with reading(file, _AGAIN):
            records = tuple(found.pop("claims"))
        info = {name: value for name, value in found.items() if name not in ("note", "kind", "command", "from")}
        if diff is not None:
            for name, value in inputs_of(diff).items():
                own = info.get(name, value)
                what = f"is of other {NAMES[name]} ({own}) than the diff beside it ({value})"
                refuse(file, (own != value, what, _AGAIN))
        return cls(records, info)


def claims_of(run: str | Path, only: Sequence[str] = (), *, check: StepCheck | None = None) -> Claims:
    """Ask a run what it shows of the literature's claims on sample difficulty (`tsae.claims.judging.CLAIMS`).

    Args:
        run: folder that `tsae run`, `tsae watch` or `tsae demo` wrote.
        only: letters of the claims to test; by default all.
        check: (prompt, response) -> whether each step of the response is right, for the claims on steps.

    Raises:
        TsaeError: where the folder is not a run's or what is in it is damaged, and for an unknown letter.
    """
    for key in only:
        refuse("claims", (key not in CLAIMS, f"no claim {key!r}; there are {', '.join(CLAIMS)}", "Give its letter."))
    evidence = Evidence(as_path(run), check)
    records = tuple(_judged(key, evidence).record() for key in CLAIMS if key in (only or CLAIMS))
    inputs = evidence.of_answers
    with suppress(Missing):
        inputs = {**inputs_of(evidence.diff), **inputs}
    label = ""
    with suppress(Missing):
        label = bands_label(bands_info(evidence.answers.info, evidence.answers.origin))
    bands = {"bands": label} if label else {}
    named = {} if check is None else {"check": f"{check.__module__}:{getattr(check, '__qualname__', '')}"}
    return Claims(records, {**inputs, "versions": versions(), **bands, **named})


def _judged(key: str, run: Evidence) -> Judgement:
    claim = CLAIMS[key]
    if claim.needs:
        return Judgement(claim, needs=claim.needs, add=claim.add)
    try:
        need(run.diff.final_checkpoints, "a checkpoint beside the base", "a run whose folder has one")
        return TESTS[key](run)
    except Missing as lacking:
        with suppress(Missing):
            if key in REPLAYED:
                return REPLAYED[key](run)
        return Judgement(claim, needs=lacking.needs, add=lacking.add)


def claims_before(folder: Path, diff: FeatureDiff) -> Claims | None:
    """Claims that were tested before, of the same run; None where there are none that can be read."""
    with suppress(TsaeError):
        return Claims.load(folder, diff)
    return None


def said_claims(folder: Path) -> bool:
    """Whether the lines of a run's stages say that its claims were tested. Damaged lines say nothing."""
    try:
        return "claims" in read_object(folder / "stages.json", "")
    except TsaeError:
        return False


def claims_in(folder: Path, diff: FeatureDiff) -> Claims | None:
    """Load the claims that are shown beside the diff of a run. None if the run has none.

    Raises:
        TsaeError: where they are damaged or of something else, or were there and are not any more.
    """
    found = Claims.load(folder, diff)
    if found is None and said_claims(folder):
        fix = f"Test them again: tsae claims {folder}."
        raise TsaeError("is missing, though this run's claims were tested", where=folder / FILE, fix=fix)
    return found
