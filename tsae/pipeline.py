"""The stages that `tsae demo` and `tsae run` share, from rollouts to the report: each function here gives one.

A stage writes its manifest, or its file, when it is finished. Capture, training and encoding resume where they were
interrupted; the other stages start again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import tsae
from tsae.activations.config import CaptureConfig
from tsae.activations.manifest import check_store
from tsae.activations.store import ActivationStore
from tsae.attribution.attribution import Attribution
from tsae.base.artefact import is_whole, manifest_of
from tsae.base.output_lock import output_lock
from tsae.causal.findings import Tested, planned_tests
from tsae.causal.intervention import Intervention, folders_of_tests
from tsae.checkpoints.loading import weights_fingerprint
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
from tsae.rollouts.table import Rollouts
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.model import TemporalSAE
from tsae.sae.quality.evaluation import Evaluation
from tsae.stages import Stage, before


class Choice(NamedTuple):
    """An SAE to train."""

    sae: SAEConfig
    training: TrainingConfig
    why: str = ""
    """What decided its size, in a few words."""


def capture_stage(
    to: Path,
    series: CheckpointSeries,
    site: str | None = None,
    config: CaptureConfig | None = None,
    *,
    asked: bool = False,
    within: str = "",
    progress: bool = True,
) -> Stage:
    """The store: every reader on the rollouts, at one site, by default the middle block.

    Args:
        to: folder of the run.
        series: the readers.
        site: TransformerLens name.
        config: of the capture.
        asked: whether somebody chose the site.
        within: folder below that of the run, such as "steps/", which holds the rollouts, too.
        progress: show bars.
    """
    name = f"{within}activations"
    folder = to / name

    def make(rollouts: Rollouts) -> ActivationStore:
        earlier = before(to, name)
        sites = [site] if site else ()
        return tsae.capture(series, rollouts, sites, to=folder, config=config, earlier=earlier, progress=progress)

    def load(rollouts: Rollouts) -> ActivationStore | None:
        store = ActivationStore(folder) if is_whole(folder) else None
        if store is None or not store.manifest["complete"]:
            return None
        # A capture again mends single shards, and clears their records away after a kill.
        return None if any(folder.glob("*/*.json")) or check_store(folder) else store

    def lines(store: ActivationStore, _: Rollouts) -> dict[str, str]:
        read = next(iter(store.manifest["sites"]))
        block = "as asked" if asked else "the middle block"
        readers = f"{n_tokens(store):,} tokens of {len(store.readers)} readers"
        return {name: f"{read} ({block}), {readers}, d_model {store.d_model(read)}"}

    known = {option: value for option, value in asdict(config or CaptureConfig()).items() if option != "device"}
    readers = [[c.id, weights_fingerprint(c)] for c in series]
    return Stage(
        name,
        name,
        {"site": site, "readers": readers, "capture": known},
        make,
        load,
        (f"{within}rollouts",),
        rests_on=fingerprints,
        lines=lines,
    )


def fingerprints(rollouts: Rollouts) -> list[str]:
    """Of the tokens, and of outcomes, bands and other labels."""
    return [rollouts.fingerprint, rollouts.labels_fingerprint]


def n_tokens(store: ActivationStore) -> int:
    """Tokens of a store, of all readers."""
    return sum(shard.n_tokens for shard in store.shards())


def training_stage(
    to: Path,
    choose: Callable[[ActivationStore], Choice],
    settings: Mapping[str, Any],
    *,
    device: str = "cpu",
    kept: bool = False,
    progress: bool = True,
) -> Stage:
    """The SAE, trained on the store.

    Args:
        to: folder of the run.
        choose: chooses the SAE and its training.
        settings: options that decide the choice.
        device: that the SAE is loaded on.
        kept: an SAE that is there is kept, although the store has grown.
        progress: show bars.
    """
    folder = to / "sae"

    def make(store: ActivationStore) -> TemporalSAE:
        config, training, _ = choose(store)
        return tsae.train(store, config, to=folder, training=training, progress=progress)

    def load(store: ActivationStore) -> TemporalSAE | None:
        return TemporalSAE.load(folder, device=device) if is_whole(folder) else None

    def lines(sae: TemporalSAE, store: ActivationStore) -> dict[str, str]:
        if kept:
            return sae_line(sae, "kept from an earlier, shorter part of the training", norms=True)
        _, training, why = choose(store)
        passes = f"{training.tokens / max(n_tokens(store), 1):.1f} times the store{f' ({why})' if why else ''}"
        return sae_line(sae, f"trained on {training.tokens:,} tokens, {passes}", norms=True)

    return Stage(
        "sae", "sae", dict(settings), make, load, ("activations",), fingerprint=_sae_print, lines=lines, kept=kept
    )


def published_stage(to: Path, sae: TemporalSAE) -> Stage:
    """A published SAE in place of one that is trained; a copy is kept in the folder of the run."""

    def make(store: ActivationStore) -> TemporalSAE:
        sae.save(to / "sae")
        return sae

    def load(store: ActivationStore) -> TemporalSAE:
        TemporalSAE.load(to / "sae")
        return sae

    return Stage(
        "sae", "sae", {"sae": sae.fingerprint}, make, load, ("activations",),
        rests_on=lambda store: None, fingerprint=_sae_print,
        lines=lambda sae, _: sae_line(sae, "published, not trained here"),
    )  # fmt: skip


def _sae_print(sae: TemporalSAE) -> Any:
    return [sae.fingerprint, sae.norm_limit, sae.norm_centre]


def sae_line(sae: TemporalSAE, told: str, *, norms: bool = False) -> dict[str, str]:
    """Say how wide an SAE is and where it comes from."""
    active = f", k {sae.config.k}" if sae.config.k else ""
    known = sae.training_info.get("norms") if norms else None
    left = f"; {known['outlier_share']:.2%} left out by their norm" if known else ""
    return {"sae": f"{sae.config.d_sae:,} latents{active}, {told}{left}"}


def evaluation_stage(to: Path) -> Stage:
    """How well the SAE reconstructs held-out problems."""
    file = to / "evaluation" / "evaluation.json"

    def make(sae: TemporalSAE, store: ActivationStore) -> Evaluation:
        found = tsae.evaluate(sae, store)
        found.save(file)
        return found

    def line(found: Evaluation, *_: Any) -> dict[str, str]:
        told = f"on held-out problems: FVE {found.fve:.3f}, L0 {found.l0:.1f}, {found.alive:.0%} alive"
        return {"evaluation": told}

    load = lambda sae, store: Evaluation.load(file)  # noqa: E731
    return Stage("evaluation", "evaluation/evaluation.json", {}, make, load, ("sae", "activations"), lines=line)


def encoding_stage(to: Path, *, kept: Path | None = None, within: str = "", progress: bool = True) -> Stage:
    """Codes of every token.

    Args:
        to: folder of the run.
        kept: folder in which the codes of every shard stay for the next encoding.
        within: as for `capture_stage`.
        progress: show a bar.
    """
    name = f"{within}features"
    folder = to / name

    def make(sae: TemporalSAE, store: ActivationStore) -> FeatureTable:
        return tsae.encode(sae, store, to=folder, kept=kept, progress=progress)

    def load(sae: TemporalSAE, store: ActivationStore) -> FeatureTable | None:
        if not encoded(folder):
            return None
        with output_lock(folder):  # clears the lock of a process that was killed
            return FeatureTable.load(folder)

    def line(features: FeatureTable, *_: Any) -> dict[str, str]:
        return {name: f"{features.codes.nnz:,} active codes of {features.codes.shape[0]:,} tokens"}

    return Stage(name, name, {}, make, load, ("sae", f"{within}activations"), lines=line)


def diff_stage(
    to: Path,
    series: CheckpointSeries,
    config: DiffConfig,
    capture: CaptureConfig | None = None,
    *,
    annotator: Annotator | None = None,
    families: Mapping[str, Sequence[str]] | None = None,
    steps: bool = False,
    sae_kept: Mapping[str, float | None] | None = None,
    progress: bool = True,
) -> Stage:
    """What moved, with its controls, baselines and null.

    Args:
        to: folder of the run.
        series: the readers.
        config: which contrasts are drawn.
        capture: how noisy checkpoints read, for the null.
        annotator: names the class of every response token.
        families: classes of each family of features.
        steps: whether "steps/features" has the codes of more steps of the runs, each on its own rollouts. They show
            what features and behaviours do along steps. The SAE is not trained on them.
        sae_kept: FVE by reader when the SAE was trained, if that was earlier in this training.
        progress: show bars.
    """
    folder = to / "diff"

    def make(
        rollouts: Rollouts, sae: TemporalSAE, store: ActivationStore, features: FeatureTable, *more: FeatureTable
    ) -> FeatureDiff:
        strings = token_strings(series.base.load_tokenizer())
        diff = tsae.feature_diff(
            features,
            config,
            annotator=annotator,
            families=families,
            token_strings=strings,
            steps=more[0] if more else None,
            logits=logit_effects(sae, series.base, strings),
            progress=progress,
        )
        diff = replace(diff, baselines=baselines(features, store, config))
        diff = diff.with_noise(
            tsae.noise_null(series, sae, features, config, capturing=capture, scratch=folder, progress=progress)
        )
        info: dict[str, Any] = {}
        try:
            diff = diff.with_reinforcement(tsae.reinforcement(features, config))
        except TsaeError as error:
            info["no_reinforcement"] = error.what
        if rollouts.info.get("sampled"):
            info |= {"sampled": rollouts.info["sampled"], **_pass_at_k(rollouts, series)}
        if sae_kept:
            info["sae_kept"] = dict(sae_kept)
        diff = replace(diff, info={**diff.info, **info})
        diff.save(folder)
        return diff

    def load(
        rollouts: Rollouts, sae: TemporalSAE, store: ActivationStore, features: FeatureTable, *more: FeatureTable
    ) -> FeatureDiff | None:
        if not is_whole(folder):
            return None
        diff = FeatureDiff.load(folder, features=features)
        config.need_same(diff.info["config"], folder)  # `tsae diff` may have written another one here
        return diff

    def lines(diff: FeatureDiff, *_: Any) -> dict[str, str]:
        noise = {"noise": "; ".join(noise_lines(diff.info["noise"]))} if diff.info.get("noise") else {}
        return {"diff": _drawn(diff), **noise}

    return Stage(
        "diff", "diff", {"diff": config.settings(), "sae_kept": sae_kept, "steps": steps}, make, load,
        ("rollouts", "sae", "activations", "features", *["steps/features"] * steps), lines=lines,
    )  # fmt: skip


class Attributed(NamedTuple):
    """What is known of the samples that moved the features."""

    found: Attribution | None
    told: str
    """What it says; or what is missing."""


def attribution_stage(
    to: Path,
    settings: Mapping[str, Any],
    attribute: Callable[[TemporalSAE, FeatureDiff], Attribution],
    rests_on: Callable[[FeatureDiff], Any],
) -> Stage:
    """Which samples did that.

    Args:
        to: folder of the run.
        settings: options that decide what is attributed, and fingerprints of what else is read.
        attribute: attributes the run, and saves that in `to`/attribution. A TsaeError says why it cannot; the page then
            says so.
        rests_on: what of the diff decides the targets.
    """

    def there() -> Attributed | None:
        found, why = attribution_in(to)
        if found is None and not why:
            return None
        told = f"Not known. It needs {why}. `tsae attribute` adds it." if found is None else _said(found)
        return Attributed(found, told)

    def make(sae: TemporalSAE, diff: FeatureDiff) -> Attributed:
        try:
            found = attribute(sae, diff)
        except TsaeError as error:
            # The name alone: the page of a run does not depend on where it lies.
            where = f"{Path(error.where).name}: " if error.where else ""
            fix = (error.fix or "See docs/attribution.md").rstrip(".")
            missing = f"{where}{error.what.rstrip('.')}"
            return Attributed(None, f"Not known. {missing}. {fix}; `tsae attribute` then adds it.")
        return Attributed(found, _said(found))

    def key(sae: TemporalSAE, diff: FeatureDiff) -> Any:
        return [_sae_print(sae), rests_on(diff)]

    return Stage(
        "attribution", "attribution", dict(settings), make, lambda sae, diff: there(), ("sae", "diff"), rests_on=key,
        fingerprint=lambda known: [known.told, _hashes(to / "attribution")],
        lines=lambda known, *_: {"attribution": known.told},
    )  # fmt: skip


def _said(found: Attribution) -> str:
    return " ".join(statement(found).sentences)


def _hashes(folder: Path) -> Any:
    return (manifest_of(folder) or {}).get("files")


def causal_stage(
    to: Path, settings: Mapping[str, Any], test: Callable[..., Tested], found: Callable[[list[str]], None]
) -> Stage:
    """Features tested by ablation, steering and transplant.

    Args:
        to: folder of the run.
        settings: options that decide what is tested.
        test: makes the tests that are missing in `to`/causal, given SAE, store, features and diff.
        found: called with the names of the tests that are there.
    """

    def make(*inputs: Any) -> Tested:
        tested = test(*inputs)
        found([folder.name for folder in folders_of_tests(to)])
        return tested

    def load(sae: TemporalSAE, store: ActivationStore, features: FeatureTable, diff: FeatureDiff) -> Tested | None:
        plan = planned_tests(diff, settings["tests"]["features"])
        if not all(is_whole(to / "causal" / one.name) for one in plan):
            return None
        return Tested(tuple(Intervention.load(to / "causal" / one.name) for one in plan), len(plan), "")

    def line(tested: Tested, *_: Any) -> dict[str, str]:
        made = f"{len(tested.tests)} of {tested.planned} tests of what the diff found: ablated, transplanted, steered"
        told = made if tested.planned else "no feature moved: there is nothing to test"
        return {"causal": told + f"; {tested.why}" * bool(tested.why)}

    return Stage(
        "causal", "causal", dict(settings), make, load, ("sae", "activations", "features", "diff"),
        fingerprint=lambda tested: {test.name: _hashes(test) for test in folders_of_tests(to)}, lines=line,
    )  # fmt: skip


def last_stages(to: Path, inputs: Sequence[str], *, title: str, check: StepCheck | None = None) -> list[Stage]:
    """What the run shows of the literature's claims, and the page.

    Args:
        to: folder of the run.
        inputs: which of attribution and causal there are.
        title: of the page.
        check: says which steps of a response are right, for claims on steps (`tsae.claims_of`).
    """

    def make(diff: FeatureDiff, *rest: Any) -> Claims:
        # A function that somebody named to `tsae claims` is not called here, and what it found is not lost.
        earlier = claims_before(before(to, "."), diff) or claims_before(to, diff)
        claims = claims_of(to, check=check).with_steps_of(earlier)
        claims.save(to)
        return claims

    def load(diff: FeatureDiff, *rest: Any) -> Claims | None:
        return Claims.load(to, diff)

    def write(diff: FeatureDiff, *rest: Any) -> Path:
        results = {"diff": diff, **dict(zip((*inputs, "claims"), rest, strict=True))}
        attribution = results["attribution"].found if "attribution" in results else None
        diff = with_results(results)
        return diff.to_html(page, title=title, attribution=attribution, claims=results["claims"])

    page, shown = to / "report.html", ("diff", *inputs)
    # Tests that an earlier command made are evidence, too.
    tests = {test.name: _hashes(test) for test in folders_of_tests(to)} if "causal" not in inputs else {}
    return [
        Stage(
            "claims", CLAIMS, {"tests": tests, "check": check is not None}, make, load, shown,
            lines=lambda claims, diff, *_: {"claims": expected(diff, claims).sentences[0]},
        ),
        Stage(
            "report", page.name, {"title": title}, write, lambda *_: page, (*shown, "claims"),
            lines=lambda *_: {"report": str(page)},
        ),
    ]  # fmt: skip


def with_results(results: Mapping[str, Any]) -> FeatureDiff:
    """The diff, with a note of what was tested causally, and of why nothing was attributed."""
    diff: FeatureDiff = results["diff"]
    for test in results["causal"].tests if "causal" in results else ():
        diff = test.mark(diff)
    if "attribution" in results and results["attribution"].found is None:
        diff = replace(diff, info={**diff.info, "no_attribution": results["attribution"].told})
    return diff


def _pass_at_k(rollouts: Rollouts, series: CheckpointSeries) -> dict[str, Any]:
    """pass@k of every reader, for the diff's info; nothing where no answer was checked."""
    if (rollouts.frame.outcome == "unknown").all():
        return {}
    table = tsae.difficulty(rollouts, series=series).pass_at_k
    # Of some problems only half of the responses are in the band. Without these, those left would be a selection.
    kept = (table.band == "all") | ((table.n_left_out == 0) & rollouts.frame.band.notna().any())
    return {"pass_at_k": json.loads(table[kept].to_json(orient="records"))}


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
