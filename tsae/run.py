"""`tsae run`: from the folder that a trainer left, checkpoints and rollout log, to the report.

Chooses what was not given, and prints each choice: which checkpoints are compared, which reward means success, where
bands begin, how much is read, how wide the SAE is. Every choice is also an option.

1. series: the checkpoints of the folder, and the model that training started from.
2. rollouts: the log is imported. Problems get bands by the base's pass rates where these are known, else by those that
   the log shows (`tsae.rollouts.bands.band_problems`). From a log beyond the token budget whole problems are drawn, as
   many from every band: the unit of all statistics is the problem.
3. The stages of `tsae.pipeline`. Samples are attributed from the whole log, where it and the settings allow it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

import tsae
from tsae.activations.config import CaptureConfig
from tsae.activations.store import ActivationStore
from tsae.attribution.attribution import Attribution
from tsae.attribution.find_settings import find_settings
from tsae.attribution.sample_kinds import other_problems
from tsae.base.artefact import file_hash, versions
from tsae.base.files import plain
from tsae.base.mirror import local, removed
from tsae.base.part import digest_of
from tsae.causal.findings import Tested, causal_tests
from tsae.causal.intervention import folders_of_tests
from tsae.checkpoints.series import CheckpointSeries, complete_checkpoints
from tsae.config import RunConfig
from tsae.diff.comparisons import contrast_bands
from tsae.diff.feature_diff import FeatureDiff
from tsae.doctor import check, find_run_log, find_series
from tsae.errors import TsaeError, refuse
from tsae.features.feature_table import FeatureTable
from tsae.pipeline import Choice, Pipeline, fingerprints, n_tokens
from tsae.report.story import facts
from tsae.report.text import visible
from tsae.rollouts.band_source import asked_problems, bands_from, read_source
from tsae.rollouts.bands import Bands, band_counts, band_problems, kind_of_bands, of_steps
from tsae.rollouts.config import ImportConfig, SamplingConfig
from tsae.rollouts.fresh_rollouts import (
    answered_anew,
    draw_problems,
    drawn_problems,
    longest_response,
    separate_rollouts,
)
from tsae.rollouts.importing import check_grown, import_log
from tsae.rollouts.log_detection import find_log
from tsae.rollouts.logs.log_files import name_in
from tsae.rollouts.logs.outcome_rules import with_outcome
from tsae.rollouts.parquet import read_outline
from tsae.rollouts.schema import problem_bands
from tsae.rollouts.table import Rollouts
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.model import TemporalSAE
from tsae.stages import RunRecord, Stage, StageLines, carry_out, read_run, recorded

_LOOKS = 3
"""At a run whose checkpoints are removed while they are read."""
_FIRINGS = 1000
"""Times that a latent fires in one pass over the store, on average. Rarer ones are hardly learned or compared."""
_SAMPLING = "sampling"
"""Folder of the batches of an unfinished sampling."""
_SHARD_TOKENS = 8192
"""Fewest of the largest shard. A shard has a quarter of the largest on average."""
_PASSES, _FEWEST_TOKENS, _MOST_PASSES = 4, 1_000_000, 20


class State(NamedTuple):
    """What there is of a training: all of it, or as much as is complete while it goes on."""

    series: CheckpointSeries
    origin: str
    """Which model is the base, and what names it."""
    log: Path
    sizes: Mapping[Path, int]
    """Files of the log, and how many bytes of each count."""
    cache: Path | None = None
    """The analysis before, of a training that goes on, with what was read of the log, and the codes of shards."""
    kept: str | None = None
    """Fingerprint of the SAE that is kept; None where one is trained."""
    trained: dict[str, float | None] | None = None
    """FVE by reader when the kept SAE was trained."""

    @property
    def only(self) -> Mapping[Path, int] | None:
        """What of the log counts, where it grows (`tsae.rollouts.importing.import_log`)."""
        return self.sizes if self.cache else None

    def facts(self, config: RunConfig) -> dict[str, Any]:
        """What run.json says of an analysis: settings, inputs and versions; and the SAE, if it is kept."""
        settings = {name: value for name, value in asdict(config).items() if name not in ("path", "to", "device")}
        settings["diff"] = config.diff.settings()
        found: dict[str, Any] = recorded({
            "run": {**settings, "path": config.path.resolve()},
            "series": [[c.id, c.path] for c in self.series],
            "log": [[name_in(self.log, file), size] for file, size in self.sizes.items()],
            "versions": versions(),
            **({} if self.kept is None else {"sae": self.kept}),
        })  # fmt: skip
        return found


def analyze_run(config: RunConfig, *, progress: bool = True, say: Callable[[str], None] = print) -> FeatureDiff:
    """Analyse a training run from the folder that its trainer left.

    Args:
        config: which run, and the choices that you make yourself.
        progress: show bars.
        say: called with one line for each stage: what was chosen, and why. The lines are kept in stages.json.

    Returns:
        The diff. The report is ``report.html`` in `RunConfig.to`.

    Raises:
        TsaeError: for a folder without checkpoints or rollout log, a missing base, a single checkpoint with nothing to
            compare it with, rewards of which none is known to mean success, or a folder `to` that holds something else.
            Raised before anything is computed, where that can be known (`tsae.doctor.check`).
    """
    check(config, say)
    return analyze_checked(config, progress=progress, say=say)


def analyze_checked(config: RunConfig, *, progress: bool = True, say: Callable[[str], None] = print) -> FeatureDiff:
    """Analyse a run after `tsae.doctor.check`. A checkpoint that goes meanwhile is left out, and a line says so."""
    looks = 0
    while True:
        looks += 1
        before = complete_checkpoints(config.path)
        try:
            series, origin = find_series(config)
            log = find_run_log(config)
            sizes = {file.path: file.path.stat().st_size for file in find_log(log, config.importing)[1]}
            return analyze_state(config, State(series, origin, log, sizes), progress=progress, say=say)
        except (TsaeError, OSError) as error:
            there = complete_checkpoints(config.path)
            gone = [os.path.relpath(folder, config.path.resolve()) for folder in before if folder not in there]
            if not gone or looks == _LOOKS:
                raise
            why = "a trainer with save_total_limit keeps its last checkpoints only"
            what = f"looking again: {', '.join(gone)} was removed or changed while it was read ({why}): {error}"
            say(visible(what.splitlines()[0]))


def analyze_state(config: RunConfig, state: State, *, progress: bool, say: Callable[[str], None]) -> FeatureDiff:
    """Analyse what there is of a training run; see `analyze_run`."""
    sae = None if config.sae is None else tsae.load_sae(config.sae, site=config.site, device=config.device)
    known, series = read_source(config.source), state.series
    readers = series.select(config.checkpoints) if config.checkpoints else series.final()
    form, files, _ = find_log(state.log, config.importing, state.only)
    importing, success = with_outcome(form.read(files[0], config.importing), config.importing, state.log)
    # Features would get other numbers.
    watched = state.cache is None and "sae" in (read_run(config.to, "run.json") or {})
    fix = "`tsae watch` wrote it, and can continue it. Or delete that folder, or give another one (--to)."
    refuse(config.to, (watched, "holds something else than an analysis by `tsae run`", fix))
    record = RunRecord(config.to, "run.json", state.facts(config), "an analysis")
    lines = StageLines(config.to / "stages.json", say)
    which = "as asked" if config.checkpoints else "the last step of every run"
    others = ", ".join(c.id for c in list(readers)[1:])
    told = [note.rstrip(".") for note in series.notes if "stands in for the base" not in note]  # `origin` says that
    lines.say(
        "series", "; ".join([f"{len(series)} checkpoints; {state.origin}; compared with it: {others} ({which})", *told])
    )
    # Every reader reads everything, since a log has most problems from one policy only. Of fresh rollouts, the base
    # reads all, the others the base's and their own. Shards are small and steady: few are captured again.
    capturing = CaptureConfig(
        device=config.device,
        plan="all" if config.sample is None else "paired",
        shard_tokens=max(_SHARD_TOKENS, config.tokens // 8),
        steady_shards=True,
    )
    drawing = _draw_settings(config, readers)
    questions: dict[str, dict[str, Any]] = {}
    if config.attribute:
        problems = None if config.problems is None else file_hash(config.problems)
        questions["attribution"] = {"attribution": asdict(config.attribution), **drawing, "problems": problems}
    if config.causal:
        questions["causal"] = {"tests": asdict(config.tests), "seed": config.seed}
    work = _Run(
        to=config.to, readers=readers, title=f"What training changed: {series.name}",
        diff=replace(config.diff, seed=config.seed), capturing=capturing, site=config.site if sae is None else sae.site,
        sae_settings={name: getattr(config, name) for name in ("d_sae", "k", "training_tokens", "seed")},
        published=sae, kept=state.trained, codes=state.cache and state.cache / ".codes", questions=questions,
        progress=progress, config=config, importing=importing, success=success, state=state, record=record,
        drawing=drawing, known=known,
    )  # fmt: skip
    shown: FeatureDiff = carry_out(work.stages(work.rollouts()), record, lines.say, say)["report"]
    return shown


def choose_sae(store: ActivationStore, config: RunConfig) -> Choice:
    """Choose the SAE that a store can train, and the length of its training; see `RunConfig`."""
    d_model = store.d_model(next(iter(store.manifest["sites"])))
    tokens = n_tokens(store)
    k = config.k or min(SAEConfig().k, max(4, d_model // 12))
    by_data, by_model = tokens * k // _FIRINGS, 8 * d_model
    d_sae = config.d_sae or max(32, 1 << (max(1, min(by_data, by_model)).bit_length() - 1))
    why = "" if config.d_sae else f"width by {'data' if by_data < by_model else 'd_model'}"
    training = config.training_tokens or max(_PASSES * tokens, min(_FEWEST_TOKENS, _MOST_PASSES * tokens))
    # About a thousand steps where possible; BatchTopK and InfoNCE need large batches.
    batch = 2048 if training >= 2_000_000 else 1024
    return Choice(
        SAEConfig(d_sae=d_sae, k=min(k, d_sae)),
        TrainingConfig(tokens=max(training, batch), batch_tokens=batch, seed=config.seed, device=config.device),
        why,
    )


def _drawn_lines(drawn: Rollouts, _: Path) -> dict[str, str]:
    told = drawn.info.get("stages", {})
    return {name: told[name] for name in ("rollouts", "second look", "sampled", "bands") if name in told}


def _draw_settings(config: RunConfig, readers: CheckpointSeries) -> dict[str, Any]:
    """The options that decide which rollouts are read, and their bands."""
    names = ["tokens", "seed", "sample", "bands_from", "source", "by"]
    names += ["server", "minutes"] * (config.sample is not None)
    files = (config.bands_from, None if config.source.difficulty is None else local(config.source.difficulty))
    of_bands = [file_hash(file) if file is not None and file.is_file() else None for file in files]
    sampled = None if config.sample is None else [c.id for c in readers]
    return {**plain({name: getattr(config, name) for name in names}), "bands_from": of_bands, "readers": sampled}


@dataclass(frozen=True, kw_only=True)
class _Run(Pipeline):
    """The stages of one analysis."""

    config: RunConfig
    state: State
    importing: ImportConfig
    success: str
    """How the log says that a response is right."""
    record: RunRecord
    drawing: Mapping[str, Any]
    """The options that decide which rollouts are read."""
    known: pd.DataFrame
    """What is known of the problems from elsewhere."""

    @property
    def whole(self) -> Path:
        """The imported log."""
        return self.to / "rollouts" / "log.parquet"

    def rollouts(self) -> list[Stage]:
        """The stages that import the log and draw rollouts from it."""
        log = self._log_settings()
        return [
            Stage("log", "rollouts/log.parquet", log, self._import, self._checked_log, fingerprint=lambda _: log),
            Stage(
                "rollouts", "rollouts/rollouts.parquet", self.drawing, self._draw, self._read_drawn, ("log",),
                fingerprint=fingerprints, lines=_drawn_lines,
            ),
        ]  # fmt: skip

    def _log_settings(self) -> dict[str, Any]:
        state = self.state
        # Labels may change and leave the size. A log that grows is compared when it has grown.
        read = () if state.cache else state.sizes
        hashes = [file_hash(file) for file in read if file.is_file()]
        facts = state.facts(self.config)
        return {"log": [str(state.log.resolve()), facts["log"], hashes], "importing": asdict(self.importing),
                "series": facts["series"]}  # fmt: skip

    def _import(self) -> Path:
        state = self.state
        import_log(
            state.log, self.whole, state.series, self.importing, only=state.only,
            kept=state.cache and state.cache / ".log", progress=self.progress,
        )  # fmt: skip
        return self._checked_log()

    def _checked_log(self) -> Path:
        state = self.state
        if state.cache:
            check_grown(state.cache / "rollouts" / "log.parquet", self.whole, state.log)
        return self.whole

    def _read_drawn(self, whole: Path) -> Rollouts:
        removed(self.to / "rollouts" / _SAMPLING)  # after a kill between these two
        return self._checked(tsae.Rollouts.read(self.to / "rollouts" / "rollouts.parquet"))

    def _checked(self, rollouts: Rollouts) -> Rollouts:
        # A band that is missing is said before the work.
        contrast_bands(rollouts, self.config.diff, self.to / "rollouts")
        self.record.add_found(second_look=rollouts.info.get("log", {}).get("second_look"))
        return rollouts

    def _draw(self, whole: Path) -> Rollouts:
        """Band and draw the rollouts; ``info["stages"]`` says how.

        Keeps only an index of the log in memory, with token ids and texts of the drawn trajectories.
        """
        config, series, readers, success = self.config, self.state.series, self.readers, self.success
        folder = config.to / "rollouts"
        outline = read_outline(whole)
        base = series.base.id
        measured_on = None if config.bands_from is None else separate_rollouts(config.bands_from, whole, base)
        every, told = self._bands(outline, measured_on)
        bands = every[-1] if every else None
        outline["band"] = None if bands is None else bands.rows.band.to_numpy()
        if config.sample is None:
            rows = draw_problems(outline, config.tokens, config.seed, whole)
        else:
            rows = drawn_problems(outline, config.sample * len(readers), config.tokens, config.seed, whole)
        drawn = tsae.Rollouts.read_rows(whole, rows)
        for one in every:
            drawn = drawn.in_bands(one.select(rows))
        logged = drawn.info["log"]
        left = "".join(f", {n:,} {kind} left out" for kind, n in sorted(logged["skipped"].items()))
        for outcome, other in (("success", "failure"), ("failure", "success")):
            if set(outline.outcome) - {"unknown"} == {other}:
                success += f" (there is no {outcome}, so that successes and failures are not compared)"
        rewards = [name for name in outline.columns if name.startswith("reward/")]
        for name in rewards if len(rewards) > 1 else ():
            if outline[name].nunique() == 1:
                success += f"; {name[7:]} is {outline[name].dropna().iloc[0]:g} for every response, and says nothing"
        part = "all of them are read"
        if config.sample is not None:
            part = f"{drawn.n_problems:,} of its problems are answered anew"
        elif not rows.all():
            part = (
                f"{len(drawn):,} trajectories of {drawn.n_problems:,} problems are read, drawn as many from every band "
                f"up to {config.tokens:,} tokens"
            )
            if bands is not None:
                told += f"; of those that are read: {band_counts(problem_bands(drawn.frame))}"
        assumed = [note for note in logged["notes"] if not note.startswith("success: ")]
        drawn.info["stages"] = {
            "rollouts": f"{logged['format']}, {len(outline):,} trajectories of {outline.problem_id.nunique():,} "
            f"problems{left}; {part}; success: {success}" + "".join(f"; {note}" for note in assumed),
            "second look": "; ".join(check["line"] for check in logged["second_look"].values()),
            "bands": told,
        }
        if config.sample is not None:
            drawn = answered_anew(
                list(readers),
                drawn,
                SamplingConfig(
                    n_samples=config.sample,
                    max_new_tokens=longest_response(list(readers), outline),
                    seed=config.seed,
                    device=config.device,
                ),
                verifier=config.importing.verifier,
                measured_on=measured_on,
                server=config.server if config.server.url else None,
                minutes=config.minutes,
                pieces=folder / _SAMPLING / digest_of(plain(self.drawing)),
                progress=self.progress,
            )
        drawn.write(folder / "rollouts.parquet")
        removed(folder / _SAMPLING)
        return self._checked(drawn)

    def _bands(self, outline: pd.DataFrame, measured_on: pd.DataFrame | None) -> tuple[list[Bands], str]:
        """All bands of the log's problems, those that are contrasted last, and a line about them."""
        config, whole, base = self.config, self.whole, self.state.series.base.id
        own, told = band_problems(outline, whole, base=base, measured_on=measured_on, seed=config.seed)
        found: dict[str, tuple[Bands | None, str]] = {"own": (own, told)}
        if config.source.kinds:
            problems = asked_problems(whole, config.source, self.known)
            for bands, line in bands_from(config.source, self.known, outline.problem_id, problems, whole):
                steps = "" if config.sample else f"; {of_steps(bands, outline, config.seed)}"
                found[kind_of_bands(bands.info)] = bands, line + steps
        chosen = (*config.source.kinds, "own")[0] if config.by == "auto" else config.by
        order = sorted(found, key=lambda kind: kind == chosen)
        lines = [("" if kind == chosen else f"kept beside, {kind}: ") + found[kind][1] for kind in reversed(order)]
        if found[chosen][0] is None:
            return [], lines[0]
        return [one for kind in order if (one := found[kind][0]) is not None], "; ".join(lines)

    def choose(self, store: ActivationStore) -> Choice:
        return choose_sae(store, self.config)

    def targets(self, diff: FeatureDiff) -> list[int]:
        return facts.moved_features(diff, self.config.attribution.n_features)

    def attribute(self, sae: TemporalSAE, diff: FeatureDiff) -> Attribution:
        """From the whole log. Says what is missing before it loads."""
        config, series, whole = self.config, self.state.series, self.whole
        # A trainer may have rotated others away meanwhile.
        there = [c for c in series if c.is_base or not Path(c.path).is_absolute() or Path(c.path).exists()]
        series = replace(series, checkpoints=tuple(there))
        settings = find_settings(series)
        options = replace(config.attribution, device=config.device, seed=config.seed)
        if "features" in options.targets:
            options = replace(options, features=options.features or tuple(self.targets(diff)))
        outline, base = read_outline(whole), series.base
        tokens = int(outline.prompt_length.sum() + outline.response_length.sum())
        what = f"the log has {tokens:,} tokens, more than the {config.tokens:,} that are read (--tokens)"
        fix = "Raise --tokens, or attribute a stretch between two checkpoints (--steps)"
        refuse(whole, (tokens > config.tokens, what, fix))
        measured_on = None if config.bands_from is None else separate_rollouts(config.bands_from, whole, base.id)
        every, _ = self._bands(outline, measured_on)
        log = tsae.Rollouts.read(whole)
        for one in every:  # whole problems, so that every sample is in a band
            of_all = one.rows.assign(band=one.rows.problem_id.map(problem_bands(one.rows)))
            log = log.in_bands(one._replace(rows=of_all))
        problems = None if config.problems is None else other_problems(config.problems, log, base.id)
        return tsae.attribute(
            series, log, config.to / "attribution", settings=settings, sae=sae, problems=problems, config=options,
            progress=self.progress,
        )  # fmt: skip

    def test(self, sae: TemporalSAE, store: ActivationStore, features: FeatureTable, diff: FeatureDiff) -> Tested:
        config, to = self.config, self.to
        tested = causal_tests(
            self.readers, sae, store, features, diff, config.tests, to=to / "causal", page=to / "report.html",
            verifier=config.importing.verifier, seed=config.seed, device=config.device, minutes=config.minutes,
            progress=self.progress,
        )  # fmt: skip
        self.record.add_found(causal=[folder.name for folder in folders_of_tests(to)])
        return tested
