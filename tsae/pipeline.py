"""The stages that `tsae demo` and `tsae run` share, from rollouts to the report: each writes a folder of its own.

A stage writes its last file when it is finished; a later call then reads that stage from disk. Capture and training
resume where they were interrupted, the other stages start again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import tsae
from tsae.activations.config import CaptureConfig
from tsae.activations.store import ActivationStore
from tsae.attribution.attribution import Attribution
from tsae.base.artefact import is_whole, read_manifest
from tsae.base.files import read_object, write_json
from tsae.base.output_lock import output_lock
from tsae.causal.findings import Tested
from tsae.checkpoints.series import CheckpointSeries
from tsae.checkpoints.tokenizers import token_strings
from tsae.claims.evidence import StepCheck, attribution_in
from tsae.claims.run_claims import FILE as CLAIMS
from tsae.claims.run_claims import Claims, claims_before, claims_of
from tsae.diff.baselines import baselines
from tsae.diff.config import DiffConfig
from tsae.diff.feature_diff import FeatureDiff
from tsae.errors import TsaeError
from tsae.features.contexts import Annotator, logit_effects
from tsae.features.encode import encoded
from tsae.features.feature_table import FeatureTable
from tsae.report.attribution import statement
from tsae.report.claims import expected
from tsae.report.story.statements import noise_lines
from tsae.report.text import visible
from tsae.rollouts.table import Rollouts
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.model import SAE, TemporalSAE
from tsae.sae.quality.evaluation import Evaluation


@contextmanager
def _stage(path: Path) -> Iterator[None]:
    """Say how a stage that cannot be read is made again by the command of the run.

    Raises:
        TsaeError: in place of one about this stage.
    """
    try:
        yield
    except TsaeError as error:
        if error.where is None or not Path(error.where).is_relative_to(path):
            raise
        fix = f"Remove {path}, and give the same command again: it makes what is missing."
        raise TsaeError(error.what, where=error.where, fix=fix) from error


class Choice(NamedTuple):
    """An SAE to train."""

    sae: SAEConfig
    training: TrainingConfig
    why: str = ""
    """What decided its size, in a few words."""


class Before(NamedTuple):
    """What an analysis takes from an earlier one, of the same training when it was shorter (`tsae watch`)."""

    sae: TemporalSAE | None
    """It is not trained again; None to train one."""
    trained: dict[str, float | None]
    """FVE by reader when the SAE was trained."""
    activations: Path
    """Folder of a store; its shards are copied where they hold what they are to hold now. It may be missing."""
    codes: Path
    """Folder for the codes of every shard (`tsae.encode`); it may be missing."""


class Say(Protocol):
    """Tells of a finished stage: its name, and one line on what it did."""

    def __call__(self, stage: str, line: str, *, made: bool = False) -> None: ...


def _silent(stage: str, line: str, *, made: bool = False) -> None:
    pass


class Stages:
    """Prints one line for each stage, marks stages that an earlier call finished, and keeps the lines in a file."""

    def __init__(self, file: Path, say: Callable[[str], None]) -> None:
        self.file, self.print = file, say
        self.before = read_object(file, "Remove it: it only holds what was printed.") if file.is_file() else {}
        self.lines: dict[str, str] = dict(self.before)

    def say(self, stage: str, line: str, *, made: bool = False) -> None:
        """Print the line of a stage. With `made`, this call did the work: the line does not say "from disk"."""
        done = " [from disk]" if stage in self.before and not made else ""
        # Names come from the log and from folders: they must not control the terminal.
        self.print(f"{stage + ':':<13}{visible(line)}{done}")
        self.lines[stage] = line
        write_json(self.file, self.lines)


def analyse(
    series: CheckpointSeries,
    rollouts: Rollouts,
    to: Path,
    *,
    choose: Callable[[ActivationStore], Choice],
    published: TemporalSAE | None = None,
    sites: Sequence[str] = (),
    capturing: CaptureConfig | None = None,
    diffing: DiffConfig | None = None,
    annotator: Annotator | None = None,
    families: Mapping[str, Sequence[str]] | None = None,
    steps: tuple[CheckpointSeries, Rollouts] | None = None,
    attribute: Callable[[TemporalSAE, FeatureDiff], Attribution] | None = None,
    test: Callable[[TemporalSAE, ActivationStore, FeatureTable, FeatureDiff], Tested] | None = None,
    check: StepCheck | None = None,
    before: Before | None = None,
    title: str | None = None,
    say: Say | None = None,
    progress: bool = True,
) -> tuple[FeatureDiff, Evaluation]:
    """Capture, train, evaluate, encode, diff and report, all below one folder.

    Args:
        series: the readers.
        rollouts: what they read, with outcomes and, where known, bands.
        to: folder for activations, sae, evaluation, features, diff and report.html.
        choose: chooses the SAE and its training, given the store.
        published: an SAE in place of one that is trained; a copy is kept in `to`/sae.
        sites: one TransformerLens name; by default the output of the middle block.
        capturing: defaults of `CaptureConfig`.
        diffing: defaults of `DiffConfig`.
        annotator: names the class of every response token.
        families: classes of each family of features.
        steps: checkpoints at more steps of the runs, with the base, and rollouts of all of them. They show what
            features and behaviours do along steps. The SAE is not trained on them. Written below `to`/steps.
        attribute: attributes the run, given SAE and diff, and saves that in `to`/attribution. A TsaeError says why it
            cannot; the page then says so.
        test: tests features causally, and saves that in `to`/causal.
        check: says which steps of a response are right, for claims on steps (`tsae.claims_of`).
        before: an earlier analysis, of which this one takes what it can.
        title: title of the report.
        say: called with the name of each finished stage and one line on what it did; `Stages.say` is one.
        progress: show bars.

    Returns:
        The diff, with the features as its source, and the evaluation on held-out problems.
    """
    say = say or _silent
    if published is not None:
        _need_same(published, to / "sae")
        if before is not None:  # else features would have other numbers from here on
            _need_same(published, before.activations.parent / "sae")
    sae = published if published is not None or before is None else before.sae
    earlier, kept = (None, None) if before is None else (before.activations, before.codes)
    folder, sites = to / "activations", sites if sae is None else (sae.site,)
    store = tsae.capture(series, rollouts, sites, to=folder, config=capturing, earlier=earlier, progress=progress)
    site = next(iter(store.manifest["sites"]))
    tokens = sum(shard.n_tokens for shard in store.shards())
    block = "the middle block" if not sites else "as asked"
    say(
        "activations",
        f"{site} ({block}), {tokens:,} tokens of {len(store.readers)} readers, d_model {store.d_model(site)}",
    )

    if sae is None:
        config, training, why = choose(store)
        if is_whole(to / "sae"):
            with _stage(to / "sae"):
                read_manifest(to / "sae", SAE)
        sae = tsae.train(store, config, to=to / "sae", training=training, progress=progress)
        passes = training.tokens / max(tokens, 1)
        told = f"trained on {training.tokens:,} tokens, {passes:.1f} times the store{f' ({why})' if why else ''}"
    elif published is not None:
        if not _holds_sae(to / "sae"):
            sae.save(to / "sae")
        told = "published, not trained here"
    else:
        told = "kept from an earlier, shorter part of the training"
    active = f", k {sae.config.k}" if sae.config.k else ""
    norms = sae.training_info.get("norms")
    left = f"; {norms['outlier_share']:.2%} left out by their norm" if norms and published is None else ""
    say("sae", f"{sae.config.d_sae:,} latents{active}, {told}{left}")

    file = to / "evaluation" / "evaluation.json"
    if file.is_file():
        with _stage(file):
            evaluation = Evaluation.load(file)
    else:
        evaluation = tsae.evaluate(sae, store)
        evaluation.save(file)
    say(
        "evaluation",
        f"on held-out problems: FVE {evaluation.fve:.3f}, L0 {evaluation.l0:.1f}, {evaluation.alive:.0%} alive",
    )

    if encoded(to / "features"):
        with _stage(to / "features"), output_lock(to / "features"):  # clears the lock of a process that was killed
            features = tsae.FeatureTable.load(to / "features")
        features.need_sae(sae.fingerprint, sae.config.d_sae)
    else:
        features = tsae.encode(sae, store, to=to / "features", kept=kept, progress=progress)
    say("features", f"{features.codes.nnz:,} active codes of {features.codes.shape[0]:,} tokens")

    if (to / "diff" / "diff.json").is_file():
        with _stage(to / "diff"):
            diff = tsae.FeatureDiff.load(to / "diff", features=features)
        (diffing or DiffConfig()).need_same(diff.info["config"], to / "diff")
    else:
        strings = token_strings(series.base.load_tokenizer())
        diff = tsae.feature_diff(
            features,
            diffing,
            annotator=annotator,
            families=families,
            token_strings=strings,
            steps=None if steps is None else _encode_steps(*steps, to / "steps", sae, progress),
            logits=logit_effects(sae, series.base, strings),
            progress=progress,
        )
        diff = replace(diff, baselines=baselines(features, store, diffing))
        diff = diff.with_noise(
            tsae.noise_null(series, sae, features, diffing, capturing=capturing, scratch=to / "diff", progress=progress)
        )
        try:
            diff = diff.with_reinforcement(tsae.reinforcement(features, diffing))
        except TsaeError as error:
            diff = replace(diff, info={**diff.info, "no_reinforcement": error.what})
        if rollouts.info.get("sampled"):
            diff = replace(
                diff, info={**diff.info, "sampled": rollouts.info["sampled"], **_pass_at_k(rollouts, series)}
            )
        if before is not None and before.sae is not None:
            diff = replace(diff, info={**diff.info, "sae_kept": before.trained})
        diff.save(to / "diff")
    say("diff", _drawn(diff))
    if diff.info.get("noise"):
        say("noise", "; ".join(noise_lines(diff.info["noise"])))

    attribution = None
    if attribute is not None:
        attribution, told = _attributed(attribute, sae, diff, to)
        if attribution is None:
            diff = replace(diff, info={**diff.info, "no_attribution": told})
        say("attribution", told)

    report = to / "report.html"
    if test is not None:
        tested = test(sae, store, features, diff)
        for one in tested.tests:
            diff = one.mark(diff)
        made = f"{len(tested.tests)} of {tested.planned} tests of what the diff found: ablated, transplanted, steered"
        say(
            "causal",
            (made if tested.planned else "no feature moved: there is nothing to test")
            + f"; {tested.why}" * bool(tested.why),
        )
    written = report.is_file()
    with _stage(to / CLAIMS):
        claims = Claims.load(to, diff) if written else None
    asked = claims is None
    if claims is None:
        # A function that somebody named to `tsae claims` is not called here, and what it found is not lost.
        claims = claims_of(to, check=check).with_steps_of(claims_before(to, diff))
        claims.save(to)
    say("claims", expected(diff, claims).sentences[0], made=asked)
    if not written:
        diff.to_html(report, title=title, attribution=attribution, claims=claims)
    say("report", str(report), made=not written)
    return diff, evaluation


def _holds_sae(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("cfg.json", "config.json"))


def _need_same(published: TemporalSAE, folder: Path) -> None:
    """Refuse a published SAE if a run's folder holds another: what is published under a name may change.

    Raises:
        TsaeError: where it does.
    """
    if _holds_sae(folder):
        found = TemporalSAE.load(folder).fingerprint
        if found != published.fingerprint:
            raise TsaeError(
                f"is another SAE than the published one (weights {found}, published {published.fingerprint})",
                where=folder,
                fix="Give another folder with --to.",
            )


def _pass_at_k(rollouts: Rollouts, series: CheckpointSeries) -> dict[str, Any]:
    """pass@k of every reader, for the diff's info; nothing where no answer was checked."""
    if (rollouts.frame.outcome == "unknown").all():
        return {}
    table = tsae.difficulty(rollouts, series=series).pass_at_k
    # Of some problems only half of the responses are in the band. Without these, those left would be a selection.
    kept = (table.band == "all") | ((table.n_left_out == 0) & rollouts.frame.band.notna().any())
    return {"pass_at_k": json.loads(table[kept].to_json(orient="records"))}


def _attributed(
    attribute: Callable[[TemporalSAE, FeatureDiff], Attribution], sae: TemporalSAE, diff: FeatureDiff, to: Path
) -> tuple[Attribution | None, str]:
    """The attribution and what it did; or nothing, and what is missing for it."""
    try:
        found, why = attribution_in(to)
        found = attribute(sae, diff) if found is None and not why else found
    except TsaeError as error:
        # The name alone: the page of a run does not depend on where it lies.
        where = f"{Path(error.where).name}: " if error.where else ""
        fix = (error.fix or "See docs/attribution.md").rstrip(".")
        missing = f"{where}{error.what.rstrip('.')}"
        return None, f"Not known. {missing}. {fix}; `tsae attribute` then adds it."
    if found is None:
        return None, f"Not known. It needs {why}. `tsae attribute` adds it."
    return found, " ".join(statement(found).sentences)


def _encode_steps(
    series: CheckpointSeries, rollouts: Rollouts, to: Path, sae: TemporalSAE, progress: bool
) -> FeatureTable:
    """Codes of what every checkpoint sampled itself, with the entropy of its predictions."""
    if encoded(to / "features"):
        return tsae.FeatureTable.load(to / "features")
    reading = tsae.CaptureConfig(plan="own", token_statistics=True)
    store = tsae.capture(series, rollouts, [sae.site], to=to / "activations", config=reading, progress=progress)
    return tsae.encode(sae, store, to=to / "features", check=False, progress=progress)


def _drawn(diff: FeatureDiff) -> str:
    """Say how many contrasts were drawn, which were not, and why."""
    table = diff.contrasts
    refused = table[table.note.astype(bool)]
    text = f"{len(table) - len(refused)} contrasts drawn"
    if len(refused):
        told = (diff.info["bands"] or {}).get("refused")
        few = refused[refused.note != told] if told else refused
        if len(few) < len(refused):
            text += f", {len(refused) - len(few)} of bands not (bands are steps)"
        if len(few):
            cells = few.band + few.outcome.where(few.outcome != "all", "").radd(" ").str.rstrip()
            text += f", {len(few)} not (too few problems): {', '.join(dict.fromkeys(cells))}"
    if "no_reinforcement" in diff.info:
        text += f"; reinforcement not computed ({diff.info['no_reinforcement']})"
    return text
