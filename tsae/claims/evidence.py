"""Evidence: what the folder of a run holds for the claims.

Each piece is read when a claim asks for it. A piece that is not there is not an error but a fact, `Missing`: the claim
then cannot be tested on this run, and the result says what would have to be added. A piece that is damaged, that was
there and lost a file, or that is of other rollouts or another SAE than the run, is an error. Attributions and causal
tests are put there by hand: of another log, or of other rollouts, they count as missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from tsae.activations.store import ActivationStore
from tsae.attribution.attribution import Attribution
from tsae.base.artefact import manifest_of
from tsae.base.statistics import FEWEST
from tsae.causal.intervention import Intervention, folders_of_tests
from tsae.diff.feature_diff import FeatureDiff
from tsae.errors import TsaeError, refuse
from tsae.features.feature_table import FeatureTable
from tsae.rollouts.bands import band_problems, bands_info, kind_of_bands
from tsae.rollouts.parquet import mapped, read_outline, read_pieces
from tsae.rollouts.schema import BANDS, problem_bands, typed
from tsae.rollouts.table import Rollouts

StepCheck = Callable[[str, str], Sequence[bool]]
"""(prompt, response) -> whether each step of the response is right, given what the response wrote before it."""

SAMPLE = "tsae run … --sample 8 --to OTHER"
"""Lets the base and every checkpoint answer the same problems."""
NAMES = {"rollouts": "rollouts", "labels": "labels", "sae": "weights of the SAE"}
"""Of the inputs that claims, diff and features rest on, and what messages call them."""
_BANDS = "`tsae run … --bands-from FILE`, `--difficulty FILE` or `--bands-column NAME`"
_RESUME = "the command that started this run, which resumes it"
_ROLLOUTS = ("rollouts/rollouts.parquet", "rollouts.parquet")
_MOSTLY = 0.8
"""Share of a log's responses from which on a run counts as trained on a band."""
_ROWS = 4096
"""Responses whose texts are read, at most, spread over a log. Texts of a whole log take minutes."""


def attribution_in(folder: Path) -> tuple[Attribution | None, str]:
    """The attribution in the folder of a run, of a demo (which is of its mixed run), or of a diff alone; or nothing,
    and what is needed in place of one that is there.

    Raises:
        TsaeError: where it, or the log that it is compared with, is damaged.
    """
    if not (folder / "attribution" / "attribution.json").is_file():
        return None, ""
    if (folder / "demo.json").is_file() or not any((folder / name).is_file() for name in _ROLLOUTS):
        return Attribution.load(folder / "attribution"), ""
    try:
        return Evidence(folder).attribution, ""
    except Missing as missing:
        return None, missing.needs


def inputs_of(diff: FeatureDiff) -> dict[str, str]:
    """Fingerprints of the inputs of a diff, by the names in `NAMES`; without those that it does not name."""
    return {name: str(value) for name, value in diff.made_from.items() if value is not None}


class Missing(Exception):
    """What a claim needs and a run does not hold.

    Args:
        needs: what is missing, to stand behind “needs”; with what there is instead.
        add: how to add it, to stand behind “add it by”.
    """

    def __init__(self, needs: str, add: str) -> None:
        super().__init__(needs)
        self.needs, self.add = needs, add


def need(there: object, needs: str, add: str) -> None:
    """Raise `Missing` where something is not there."""
    if not there:
        raise Missing(needs, add)


def by_problem(frame: pd.DataFrame, name: str) -> pd.Series:
    """Mean of a column over the responses to each problem, by problem_id."""
    return frame[name].astype(float).groupby(frame.problem_id).mean()


def success_rates(frame: pd.DataFrame) -> pd.Series:
    """Share of the responses to each problem that succeed, of those with an outcome, by problem_id."""
    known = frame[frame.outcome != "unknown"]
    return (known.outcome == "success").groupby(known.problem_id).mean()


@dataclass(frozen=True)
class Evidence:
    """A run, as far as it is there."""

    folder: Path
    """That `tsae run` or `tsae demo` wrote."""
    check: StepCheck | None = None
    """Says which steps of a response are right."""

    def __post_init__(self) -> None:
        nothing = not any((self.folder / name).is_file() for name in _ROLLOUTS)
        fix = "Give the folder that `tsae run`, `tsae watch` or `tsae demo` wrote."
        refuse(self.folder, (nothing, "holds no rollouts of a run", fix))

    @cached_property
    def diff(self) -> FeatureDiff:
        """What moved, and who the readers are."""
        need(self._is_there("diff/diff.json"), "a finished diff", _RESUME)
        diff = FeatureDiff.load(self.folder / "diff")
        self._need_own(self.folder / "diff", inputs_of(diff), self.of_answers)
        return diff

    @cached_property
    def features(self) -> FeatureTable:
        """Codes of every token."""
        need(self._is_there("features/features.json"), "the codes of the features", _RESUME)
        features = FeatureTable.load(self.folder / "features")
        self._need_own(self.folder / "features", features.made_from, {**inputs_of(self.diff), **self.of_answers})
        return features

    @cached_property
    def store(self) -> ActivationStore:
        """Activations."""
        there = self._is_there("activations/manifest.json", known=(self.folder / "activations").is_dir())
        need(there, "the store of activations, which is not in this folder", "the command that made this run")
        store = ActivationStore(self.folder / "activations")
        self._need_own(self.folder / "activations", {"rollouts": store.rollouts.fingerprint}, self.of_answers)
        return store

    @cached_property
    def answers(self) -> Rollouts:
        """What readers answered: sampled anew, or of the log."""
        return Rollouts.read(next(self.folder / name for name in _ROLLOUTS if (self.folder / name).is_file()))

    @cached_property
    def of_answers(self) -> dict[str, str]:
        """Fingerprints of `answers`: rollouts, labels."""
        return {"rollouts": self.answers.fingerprint, "labels": self.answers.labels_fingerprint}

    @property
    def _log_is_there(self) -> bool:
        # `tsae run` draws its rollouts from it.
        drawn = (self.folder / "run.json").is_file() and (self.folder / _ROLLOUTS[0]).is_file()
        return self._is_there("rollouts/log.parquet", known=drawn)

    def _is_there(self, name: str, *, known: bool = False) -> bool:
        """Whether a file is there. A TsaeError says that it was lost: it is `known`, or a manifest names it."""
        file = self.folder / name
        if file.is_file():
            return True
        if known or file.name in (manifest_of(file.parent) or {}).get("files", ()):
            what = f"holds no {file.name}, which was there, or whose writing was interrupted"
            raise TsaeError(what, where=file.parent, fix="Put it back, or give the command that made this run again.")
        return False

    def _need_own(self, where: Path, found: Mapping[str, str | None], expected: Mapping[str, str | None]) -> None:
        """Raise a TsaeError for a piece of something else. What neither says is not compared."""
        fix = "Put back what this run made, or run its command again in a new folder."
        for name, value in found.items():
            other = None not in (value, of := expected.get(name)) and value != of
            refuse(where, (other, f"is of other {NAMES[name]} ({value}) than this run ({of})", fix))

    @property
    def fresh(self) -> bool:
        """Whether `answers` were sampled for the analysis, and not logged in training."""
        return bool(self.answers.info.get("sampled")) or "log" not in self.answers.info

    @cached_property
    def at_steps(self) -> Rollouts:
        """What every checkpoint answered at several steps; else `answers`, which may have some."""
        there = self._is_there("steps/rollouts.parquet", known=(self.folder / "steps").is_dir())
        return Rollouts.read(self.folder / "steps" / "rollouts.parquet") if there else self.answers

    @cached_property
    def outline(self) -> pd.DataFrame:
        """The training's log, one row a response, without texts; see `tsae.rollouts.parquet.read_outline`."""
        file = self.folder / "rollouts" / "log.parquet"
        need(self._log_is_there, "the log of the training's own responses", "`tsae run` on the trainer's folder")
        outline = read_outline(file)
        known = "step" in outline and outline.step.notna().any()
        need(known, "the training step of the log's responses", "a log with steps (`tsae rollouts formats`)")
        return outline[outline.step.notna()]

    def logged(self, rows: pd.Index) -> Rollouts:
        """Responses of the log with texts, by their row in it; of many, some that are spread evenly."""
        some = rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _ROWS)).astype(int))]
        file = self.folder / "rollouts" / "log.parquet"
        wanted = np.zeros(pq.read_metadata(file).num_rows, dtype=bool)
        wanted[some] = True
        return Rollouts.read_rows(file, wanted)

    @cached_property
    def log_bands(self) -> pd.Series:
        """The band of every problem of the log, by problem_id."""
        outline = self.outline
        drawn = problem_bands(self.answers.frame).dropna()
        told = bands_info(self.answers.info, self.answers.origin) or {}
        if told.get("separate") and set(outline.problem_id) <= set(self.answers.frame.problem_id):
            return drawn  # Measured on rollouts that do not lie in this folder, and of every problem.
        if kind_of_bands(told) != "own":  # known of the problems that are read
            return drawn
        known = self.folder / _ROLLOUTS[0]
        found, _ = band_problems(outline.reset_index(drop=True), known, base=self.diff.base)
        banded = found is not None and not found.info.get("refused")
        need(banded, "bands of the log's problems that are not training steps", _BANDS)
        return drawn if found is None else drawn.combine_first(problem_bands(found.rows).dropna())

    @cached_property
    def attribution(self) -> Attribution:
        """Which samples did that."""
        folder = self.folder / "attribution"
        there = self._is_there("attribution/attribution.json")
        need(there, "an attribution of this run", "`tsae attribute … --to ANALYSIS/attribution`")
        found = Attribution.load(folder)
        of, own = found.info["inputs"]["rollouts"], self._log_fingerprint
        need(
            of == own,
            f"an attribution of this run’s own log (the one in its folder is of the log {of}, and this run’s is "
            f"{own or 'not there'})",
            "`tsae attribute … --rollouts ANALYSIS/rollouts/log.parquet --to ANALYSIS/attribution`",
        )
        return found

    @cached_property
    def _log_fingerprint(self) -> str | None:
        """That of the log, or of the answers where these are the log; None where it is not there."""
        file = self.folder / "rollouts" / "log.parquet"
        if not self._log_is_there:
            return None if self.fresh else self.answers.fingerprint
        pieces = read_pieces(file, ["problem_id", "policy", "outcome", "prompt_ids", "response_ids"])
        return Rollouts(mapped(typed(piece, str(file)) for piece in pieces), where=str(file)).fingerprint

    @cached_property
    def tests(self) -> list[Intervention]:
        """Causal tests of features, each a folder below causal."""
        names = [f"causal/{test.name}/causal.json" for test in folders_of_tests(self.folder)]
        files = [self.folder / name for name in names if self._is_there(name)]
        add = "the same `tsae run` with `--causal`, or `tsae causal --to ANALYSIS/causal/NAME`"
        need(files, "causal tests of features, since a correlation is not a verdict", add)
        return [Intervention.load(file.parent) for file in files]

    def trained_on(self, checkpoint: str) -> str | None:
        """The band that a checkpoint was trained on: named by the series, or of four fifths of the log's responses."""
        reader = next(r for r in self.diff.info["readers"] if r["id"] == checkpoint)
        named = reader.get("trained_on")
        if named is not None or len(self.diff.final_checkpoints) > 1:
            return named if named in BANDS else None
        try:
            shares = self.training_bands
        except Missing:
            return None
        return str(shares.idxmax()) if shares.max() >= _MOSTLY else None

    @cached_property
    def training_bands(self) -> pd.Series:
        """Share of every band in the log's responses to problems with a band."""
        bands = self.outline.problem_id.map(self.log_bands).dropna()
        return bands.value_counts(normalize=True).reindex(BANDS, fill_value=0.0)

    def trained_mostly_on(self, band: str) -> list[str]:
        """The last checkpoints of the runs that were trained on problems of a band.

        Raises:
            Missing: where there is none.
        """
        found = [checkpoint for checkpoint in self.diff.final_checkpoints if self.trained_on(checkpoint) == band]
        told = ", ".join(
            f"{checkpoint} on {self.trained_on(checkpoint) or 'a mixture, or it is not known'}"
            for checkpoint in self.diff.final_checkpoints
        )
        add = f"a training on {band} problems alone, named in series.json (trained_on)"
        need(found, f"a run that was trained on {band} problems (there is {told})", add)
        return found

    def success(self, policy: str, band: str = "all", *, of: Rollouts | None = None) -> pd.Series:
        """Share of a policy's responses to each problem that succeed, by problem_id."""
        frame = (self.answers if of is None else of).frame
        return success_rates(frame[(frame.policy == policy) & ((frame.band == band) | (band == "all"))])

    def need_bands(self, *bands: str) -> None:
        """Refuse, with `Missing`, answers whose bands are training steps, or with too few problems in one of these."""
        rollouts = self.answers
        steps = (bands_info(rollouts.info, rollouts.origin) or {}).get("refused")
        need(not steps, "bands that are not training steps", _BANDS)
        counts = problem_bands(rollouts.frame).value_counts()
        few = [f"{counts.get(band, 0)} {band}" for band in bands if counts.get(band, 0) < FEWEST]
        there = f"{FEWEST} {' and '.join(bands)} problems or more (there are {', '.join(few)})"
        need(not few, there, f"problems of these bands, and `{SAMPLE}`")

    def steps(self, rollouts: Rollouts) -> Iterator[tuple[str, list[tuple[int, str]]]]:
        """(run, its (step, policy) in order, the base first as step 0) of runs that answered at two steps or more."""
        records = [*self.diff.info["readers"][1:], *self.diff.info.get("steps", [])]
        found: dict[str, dict[str, int]] = {}
        for record in records:
            if record["id"] in rollouts.policies and record["id"] != self.diff.base:
                found.setdefault(record.get("run") or record["id"], {})[record["id"]] = int(record.get("step") or 0)
        for run, policies in found.items():
            path = sorted((step, policy) for policy, step in policies.items())
            if len(path) > 1:
                yield run, [(0, self.diff.base), *path]
