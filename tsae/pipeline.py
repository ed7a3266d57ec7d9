"""The stages that `tsae demo` and `tsae run` share, from activations to the page.

A stage writes its manifest, or its file, when it is finished. Capture, training and encoding resume where they were
interrupted; the other stages start again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import tsae
from tsae.activations.config import CaptureConfig
from tsae.activations.manifest import check_store
from tsae.activations.store import ActivationStore
from tsae.attribution.attribution import Attribution
from tsae.base.artefact import file_hash, is_whole, manifest_of
from tsae.base.files import plain
from tsae.base.output_lock import output_lock
from tsae.base.part import digest_of
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
from tsae.diff.explain import FILE as EXPLANATIONS
from tsae.diff.explain import labelled
from tsae.diff.feature_diff import FeatureDiff
from tsae.errors import TsaeError
from tsae.features.contexts import Annotator, logit_effects
from tsae.features.encode import encoded
from tsae.features.feature_table import FeatureTable
from tsae.report.attribution import statement
from tsae.report.claims import expected
from tsae.report.story.statements import noise_lines, with_stand_in
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


class Attributed(NamedTuple):
    """What is known of the samples that moved the features."""

    found: Attribution | None
    told: str
    """What it says; or what is missing."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What is made of rollouts in the folder of a run, and how. A subclass chooses the SAE, and attributes."""

    to: Path
    readers: CheckpointSeries
    title: str
    """Of the page."""
    task: str = ""
    """What the problems ask for, in a few sentences, where that is known."""
    diff: DiffConfig
    sae_settings: Mapping[str, Any]
    """Options that decide which SAE is trained."""
    site: str | None = None
    """TransformerLens name; by default the middle block."""
    capturing: CaptureConfig = field(default_factory=CaptureConfig)
    published: TemporalSAE | None = None
    """An SAE in place of one that is trained; a copy is kept in the folder."""
    kept: Mapping[str, float | None] | None = None
    """FVE by reader when the SAE was trained, if that was on an earlier, shorter part of the training. The SAE that is
    there is then kept, although the store has grown."""
    codes: Path | None = None
    """Folder in which the codes of every shard stay for the next encoding."""
    steps: CheckpointSeries | None = None
    """Readers of "steps/rollouts", each of its own: more steps of the runs, which show what features and behaviours do
    along them. The SAE is not trained on them."""
    annotator: Annotator | None = None
    """Names the class of every response token."""
    families: Mapping[str, Sequence[str]] | None = None
    """Classes of each family of features."""
    check: StepCheck | None = None
    """Says which steps of a response are right, for claims on steps (`tsae.claims_of`)."""
    questions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Which of attribution and causal are asked, and the options that decide what they find."""
    progress: bool = True

    def choose(self, store: ActivationStore) -> Choice:
        """Choose the SAE and its training."""
        raise NotImplementedError

    def attribute(self, sae: TemporalSAE, diff: FeatureDiff) -> Attribution:
        """Say which samples did that, and save it in the folder attribution.

        Raises:
            TsaeError: says why it cannot; the page then says so.
        """
        raise NotImplementedError

    def targets(self, diff: FeatureDiff) -> Any:
        """What of the diff decides what is attributed."""

    def test(self, sae: TemporalSAE, store: ActivationStore, features: FeatureTable, diff: FeatureDiff) -> Tested:
        """Make the tests that are missing in the folder causal."""
        raise NotImplementedError

    def stages(self, rollouts: Sequence[Stage], of_steps: Sequence[Stage] = ()) -> list[Stage]:
        """All stages, in order.

        Args:
            rollouts: the stages that give the rollouts.
            of_steps: those that give the rollouts of more steps.
        """
        found = [*rollouts, self._capture(self.readers, self.capturing), self._sae(), self._evaluation()]
        found += [self._encoding(), *of_steps]
        if self.steps is not None:
            capturing = CaptureConfig(plan="own", token_statistics=True)
            found += [self._capture(self.steps, capturing, "steps/"), self._encoding("steps/")]
        asked = [{"attribution": self._attribution, "causal": self._causal}[name]() for name in self.questions]
        return [*found, self._diff(), *asked, self._claims(), self._page()]

    def _capture(self, readers: CheckpointSeries, config: CaptureConfig, within: str = "") -> Stage:
        """Capture what every reader computes on the rollouts of a folder; `within` is its name in the run's folder."""
        name = f"{within}activations"
        folder = self.to / name
        sites = [self.site] if self.site else []

        def load(_: Rollouts) -> ActivationStore | None:
            store = ActivationStore(folder) if is_whole(folder) else None
            if store is None or not store.manifest["complete"]:
                return None
            # A capture again mends single shards, and clears their records away after a kill.
            return None if any(folder.glob("*/*.json")) or check_store(folder) else store

        def lines(store: ActivationStore, _: Rollouts) -> dict[str, str]:
            read = next(iter(store.manifest["sites"]))
            block = "as asked" if sites else "the middle block"
            n, d_model = f"{n_tokens(store):,} tokens of {len(store.readers)} readers", store.d_model(read)
            return {name: f"{read} ({block}), {n}, d_model {d_model}"}

        options = {option: value for option, value in asdict(config).items() if option != "device"}
        fingerprints_of_readers = [[c.id, weights_fingerprint(c)] for c in readers]
        return Stage(
            name, name, {"site": self.site, "readers": fingerprints_of_readers, "capture": options},
            lambda rollouts: tsae.capture(readers, rollouts, sites, to=folder, config=config,
                                          earlier=before(self.to, name), progress=self.progress),
            load, (f"{within}rollouts",), rests_on=fingerprints, lines=lines,
        )  # fmt: skip

    def _sae(self) -> Stage:
        folder, published = self.to / "sae", self.published

        def load_published(_: ActivationStore) -> TemporalSAE | None:
            TemporalSAE.load(folder)
            return published

        if published is not None:
            return Stage(
                "sae", "sae", {"sae": published.fingerprint}, lambda _: (published.save(folder), published)[1],
                load_published, ("activations",), rests_on=lambda store: None, fingerprint=_sae_print,
                lines=lambda sae, _: {"sae": sae_line(sae, "published, not trained here")},
            )  # fmt: skip

        def make(store: ActivationStore) -> TemporalSAE:
            config, training, _ = self.choose(store)
            return tsae.train(store, config, to=folder, training=training, progress=self.progress)

        def lines(sae: TemporalSAE, store: ActivationStore) -> dict[str, str]:
            told = "kept from an earlier, shorter part of the training"
            if self.kept is None:
                _, training, why = self.choose(store)
                passes = f"{training.tokens / max(n_tokens(store), 1):.1f} times the store{f' ({why})' if why else ''}"
                told = f"trained on {training.tokens:,} tokens, {passes}"
            norms = sae.training_info.get("norms")
            left = f"; {norms['outlier_share']:.2%} left out by their norm" if norms else ""
            return {"sae": f"{sae_line(sae, told)}{left}"}

        return Stage(
            "sae", "sae", self.sae_settings, make,
            lambda _: TemporalSAE.load(folder, device=self.capturing.device) if is_whole(folder) else None,
            ("activations",), fingerprint=_sae_print, lines=lines, kept=self.kept is not None,
        )  # fmt: skip

    def _evaluation(self) -> Stage:
        file = self.to / "evaluation" / "evaluation.json"

        def make(sae: TemporalSAE, store: ActivationStore) -> Evaluation:
            found = tsae.evaluate(sae, store)
            found.save(file)
            return found

        return Stage(
            "evaluation", "evaluation/evaluation.json", {}, make, lambda *_: Evaluation.load(file),
            ("sae", "activations"),
            lines=lambda found, *_: {
                "evaluation": f"on held-out problems: FVE {found.fve:.3f}, L0 {found.l0:.1f}, {found.alive:.0%} alive"
            },
        )  # fmt: skip

    def _encoding(self, within: str = "") -> Stage:
        name = f"{within}features"
        folder, kept = self.to / name, None if within else self.codes

        def load(*_: Any) -> FeatureTable | None:
            if not encoded(folder):
                return None
            with output_lock(folder):  # clears the lock of a process that was killed
                return FeatureTable.load(folder)

        def lines(features: FeatureTable, *_: Any) -> dict[str, str]:
            return {name: f"{features.codes.nnz:,} active codes of {features.codes.shape[0]:,} tokens"}

        return Stage(
            name, name, {},
            lambda sae, store: tsae.encode(sae, store, to=folder, kept=kept, progress=self.progress),
            load, ("sae", f"{within}activations"), lines=lines,
        )  # fmt: skip

    def _diff(self) -> Stage:
        """What moved, with its controls, baselines and null."""
        folder, config, series = self.to / "diff", self.diff, self.readers

        def make(
            rollouts: Rollouts, sae: TemporalSAE, store: ActivationStore, features: FeatureTable, *more: FeatureTable
        ) -> FeatureDiff:
            strings = token_strings(series.base.load_tokenizer())
            diff = tsae.feature_diff(
                features, config, annotator=self.annotator, families=self.families, token_strings=strings,
                steps=more[0] if more else None, logits=logit_effects(sae, series.base, strings),
                progress=self.progress,
            )  # fmt: skip
            diff = replace(diff, baselines=baselines(features, store, config))
            noise = tsae.noise_null(
                series, sae, features, config, capturing=self.capturing, scratch=folder, progress=self.progress
            )
            diff = diff.with_noise(noise)
            info: dict[str, Any] = {"title": self.title, **({"task": self.task} if self.task else {})}
            try:
                diff = diff.with_reinforcement(tsae.reinforcement(features, config))
            except TsaeError as error:
                info["no_reinforcement"] = error.what
            if rollouts.info.get("sampled"):
                info |= {"sampled": rollouts.info["sampled"], **_pass_at_k(rollouts, series)}
            if self.kept:
                info["sae_kept"] = dict(self.kept)
            diff = replace(diff, info={**diff.info, **info})
            diff.save(folder)
            return diff

        def load(
            rollouts: Rollouts, sae: TemporalSAE, store: ActivationStore, features: FeatureTable, *_: FeatureTable
        ) -> FeatureDiff | None:
            if not is_whole(folder):
                return None
            diff = FeatureDiff.load(folder, features=features)
            config.need_same(diff.info["config"], folder)  # `tsae diff` may have written another one here
            return diff

        def lines(diff: FeatureDiff, *_: Any) -> dict[str, str]:
            noise = {"noise": "; ".join(noise_lines(diff.info["noise"]))} if diff.info.get("noise") else {}
            return {"diff": _drawn(diff), **noise}

        steps = self.steps is not None
        return Stage(
            "diff", "diff", {"diff": config.settings(), "sae_kept": self.kept, "steps": steps}, make, load,
            ("rollouts", "sae", "activations", "features", *["steps/features"] * steps), lines=lines,
        )  # fmt: skip

    def _attribution(self) -> Stage:
        folder = self.to / "attribution"

        def make(sae: TemporalSAE, diff: FeatureDiff) -> Attributed:
            try:
                found = self.attribute(sae, diff)
            except TsaeError as error:
                # The name alone: the page of a run does not depend on where it lies.
                where = f"{Path(error.where).name}: " if error.where else ""
                fix = (error.fix or "See docs/attribution.md").rstrip(".")
                missing = f"{where}{error.what.rstrip('.')}"
                return Attributed(None, f"Not known. {missing}. {fix}; `tsae attribute` then adds it.")
            return Attributed(found, " ".join(with_stand_in(diff, statement(found)).sentences))

        def load(sae: TemporalSAE, diff: FeatureDiff) -> Attributed | None:
            found, why = attribution_in(self.to)
            if found is not None:
                return Attributed(found, " ".join(with_stand_in(diff, statement(found)).sentences))
            return Attributed(None, f"Not known. It needs {why}. `tsae attribute` adds it.") if why else None

        return Stage(
            "attribution", "attribution", self.questions["attribution"], make, load, ("sae", "diff"),
            rests_on=lambda sae, diff: [_sae_print(sae), self.targets(diff)],
            fingerprint=lambda known: [known.told, _hashes(folder)],
            lines=lambda known, *_: {"attribution": known.told},
        )  # fmt: skip

    def _causal(self) -> Stage:
        """Features tested by ablation, steering and transplant."""
        settings = self.questions["causal"]

        def load(sae: TemporalSAE, store: ActivationStore, features: FeatureTable, diff: FeatureDiff) -> Tested | None:
            folders = [self.to / "causal" / one.name for one in planned_tests(diff, settings["tests"]["features"])]
            if not all(map(is_whole, folders)):
                return None
            return Tested(tuple(map(Intervention.load, folders)), len(folders), "")

        def lines(tested: Tested, *_: Any) -> dict[str, str]:
            told = "no feature moved: there is nothing to test"
            if tested.planned:
                told = f"{len(tested.tests)} of {tested.planned} tests of what the diff found: ablated, transplanted, "
                told += "steered"
            return {"causal": told + f"; {tested.why}" * bool(tested.why)}

        return Stage(
            "causal", "causal", settings, self.test, load, ("sae", "activations", "features", "diff"),
            fingerprint=lambda tested: self._hashes_of_tests(), lines=lines,
        )  # fmt: skip

    def _hashes_of_tests(self) -> dict[str, Any]:
        return {test.name: _hashes(test) for test in folders_of_tests(self.to)}

    def _claims(self) -> Stage:
        """What the run shows of the literature's claims."""

        def make(diff: FeatureDiff, *_: Any) -> Claims:
            # A function that somebody named to `tsae claims` is not called here, and what it found is not lost.
            earlier = claims_before(before(self.to, "."), diff) or claims_before(self.to, diff)
            claims = claims_of(self.to, check=self.check).with_steps_of(earlier)
            claims.save(self.to)
            return claims

        # Tests that an earlier command made are evidence, too.
        tests = {} if "causal" in self.questions else self._hashes_of_tests()
        return Stage(
            "claims", CLAIMS, {"tests": tests, "check": self.check is not None}, make,
            lambda diff, *_: Claims.load(self.to, diff), ("diff", *self.questions),
            fingerprint=lambda claims: digest_of(plain(claims.as_dict())),  # without the command that wrote them
            lines=lambda claims, diff, *_: {"claims": expected(diff, claims).sentences[0]},
        )  # fmt: skip

    def _page(self) -> Stage:
        page, inputs = self.to / "report.html", ("diff", *self.questions, "claims")
        file = self.to / "explanations" / EXPLANATIONS
        labels = {"labels": file_hash(file)} if file.is_file() else {}

        def shown(*found: Any) -> FeatureDiff:
            """The diff with labels, with what was tested causally, and why nothing was attributed."""
            results = dict(zip(inputs, found, strict=True))
            diff = labelled(results["diff"], file.parent)
            for test in results["causal"].tests if "causal" in results else ():
                diff = test.mark(diff)
            if "attribution" in results and results["attribution"].found is None:
                diff = replace(diff, info={**diff.info, "no_attribution": results["attribution"].told})
            return diff

        def make(*found: Any) -> FeatureDiff:
            results, diff = dict(zip(inputs, found, strict=True)), shown(*found)
            attribution = results["attribution"].found if "attribution" in results else None
            diff.to_html(page, attribution=attribution, claims=results["claims"])
            return diff

        return Stage(
            "report", page.name, {"title": self.title, **labels}, make, shown, inputs,
            lines=lambda *_: {"report": str(page)},
        )  # fmt: skip


def fingerprints(rollouts: Rollouts) -> list[str]:
    """Of the tokens, and of outcomes, bands and other labels."""
    return [rollouts.fingerprint, rollouts.labels_fingerprint]


def n_tokens(store: ActivationStore) -> int:
    """Tokens of a store, of all readers."""
    return sum(shard.n_tokens for shard in store.shards())


def _sae_print(sae: TemporalSAE) -> Any:
    return [sae.fingerprint, sae.norm_limit, sae.norm_centre]


def sae_line(sae: TemporalSAE, told: str) -> str:
    """Say how wide an SAE is and where it comes from."""
    return f"{sae.config.d_sae:,} latents{f', k {sae.config.k}' if sae.config.k else ''}, {told}"


def _hashes(folder: Path) -> Any:
    return (manifest_of(folder) or {}).get("files")


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
