"""Commands on features: diff, causal, reinforcement, influence, report."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import OmitArgPrefixes

import tsae
from tsae.causal.config import InterventionConfig
from tsae.checkpoints.loading import token_strings
from tsae.commands.common import as_json, load_series, own_rollouts, say_wrote
from tsae.diff.config import DiffConfig, InfluenceConfig
from tsae.errors import TsaeError

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Diff:
    """Compare every checkpoint with the base, and successes with failures; print the findings."""

    features: Path
    """Folder that `tsae encode` wrote."""
    to: Path
    """Folder of the diff."""
    tokenizer: Path | None = None
    """Checkpoint whose tokenizer names the tokens; without it they are shown by id."""
    annotator: str | None = None
    """module:function of an annotator (prompt, response tokens) -> one class per token, such as
    tsae.features.mathematics:math_classes."""
    families: bool = False
    """Group features by the FAMILIES of the annotator's module and test their shifts."""
    store: Path | None = None
    """The store that was encoded: set plain directions and a probe beside the best features."""
    steps: Path | None = None
    """Features of more steps of the runs, of the same SAE: follows features along steps; by default those of
    --features, where a run has two steps there."""
    compare: Path | None = None
    """Folder of another diff of the same SAE: say which effects both found."""
    insertion: int = 0
    """Of every checkpoint and of the base's outcome effects this many of the clearest discoveries: does inserting a
    feature's top tokens elsewhere fire it? Runs the models: give --series and --sae."""
    series: tuple[str, ...] = ()
    """Folder of checkpoints, or several checkpoints, the base first. With --sae, noise as large as each update is read
    too (--noise-draws): what moves where nothing was learnt. --insertion needs both."""
    device: str = "cpu"
    """Torch device that reads with noise: cpu, cuda, cuda:1, …"""
    markdown: Path | None = None
    """File to write the clearest total shifts to, as a Markdown table."""
    stability: Path | None = None
    """The SAE's folder, where `tsae evaluate --seeds` ran after `tsae encode`; else found beside the features."""
    sae: Path | None = None
    """The SAE's folder, for --series; with --tokenizer's checkpoint it says which next tokens features promote."""
    json: Path | None = None
    """File for the results as JSON; - for standard output, and text then goes to standard error."""
    config: OmitArgPrefixes[DiffConfig] = field(default_factory=DiffConfig)

    def run(self) -> None:
        from tsae.causal.insertion import insert_discoveries
        from tsae.diff.controls.baselines import baselines
        from tsae.diff.families import find_families
        from tsae.features.annotations import find_annotator
        from tsae.features.logits import logit_effects
        from tsae.report.findings import findings_content
        from tsae.report.noise import NOT_RUN, noise_lines
        from tsae.report.terminal import baseline_text, insertion_text, print_findings

        if self.insertion and not (self.series and self.sae):
            raise TsaeError("runs the models", where="--insertion", fix="Give --series and --sae.")
        base = None if self.tokenizer is None else load_series(self.tokenizer).base
        strings = None if base is None else token_strings(base.load_tokenizer())
        logits = None
        if self.sae is not None and base is not None and strings is not None:
            logits = logit_effects(tsae.TemporalSAE.load(self.sae), base, strings)
        elif self.sae is not None and not self.series:
            raise TsaeError(
                "needs checkpoints: one whose unembedding is read, or those that read with noise",
                where="--sae",
                fix="Give --tokenizer, or --series.",
            )
        if self.series and self.sae is None:
            raise TsaeError("names checkpoints, of which nothing is read", where="--series", fix="Give --sae too.")
        series = load_series(*self.series) if self.series else None
        annotator = None if self.annotator is None else find_annotator(self.annotator)
        features = tsae.FeatureTable.load(self.features)
        families = find_families(self.annotator) if self.families else None
        other = None if self.compare is None else tsae.FeatureDiff.load(self.compare)
        diff = tsae.feature_diff(
            features,
            self.config,
            annotator=annotator,
            families=families,
            token_strings=strings,
            stability=self.stability,
            logits=logits,
            steps=self.steps,
        )
        if series is not None and self.sae is not None:
            reading = tsae.CaptureConfig(device=self.device)
            diff = diff.with_noise(
                tsae.noise_null(series, self.sae, features, self.config, capturing=reading, scratch=self.to)
            )
        with as_json(self.json) as write:
            content = findings_content(diff)
            print_findings(diff)
            if self.config.noise_draws:
                lines = noise_lines(diff.info["noise"]) if series is not None else [NOT_RUN]
                print("\n" + "\n".join(lines))
            content["noise"] = diff.info.get("noise")
            if self.store is not None:
                found = baselines(features, self.store, self.config)
                print(f"\n{baseline_text(found)}")
                diff = replace(diff, baselines=found)
                content["baselines"] = found
            if self.sae is not None and series is not None and self.insertion:
                inserted = insert_discoveries(diff, series, self.sae, features, self.insertion)
                print(f"\n{insertion_text(inserted, strings)}")
                diff = replace(diff, insertion=inserted)
                content["insertion"] = inserted
            say_wrote(diff.save(self.to), diff)
            if other is not None:
                content["agreement"] = diff.compare(other).agreement.value_counts().to_dict()
                print(f"\nAgainst {self.compare}: {content['agreement']}")
            if self.markdown is not None:
                self.markdown.write_text(diff.to_markdown(), encoding="utf-8")
                say_wrote(self.markdown)
            write(content)


@dataclass(frozen=True)
class Causal:
    """Ablate, clamp or steer features while a checkpoint generates, beside matched random features and other controls.

    Features are chosen by number, or as those that one checkpoint raised and another lowered.
    """

    series: tuple[str, ...]
    """Folder of checkpoints (series.json or checkpoint-N folders), or several checkpoints, the base first: folders,
    adapters, .gguf files, Hugging Face ids (org/model@revision/subfolder)."""
    checkpoint: str
    """Id of the checkpoint that generates."""
    sae: Path
    """Folder that `tsae train` wrote."""
    features: Path
    """Folder that `tsae encode` wrote with this SAE: how often and how strongly features fire."""
    to: Path
    """Folder for outcomes.parquet, rollouts.parquet and causal.json."""
    choose: tuple[int, ...] = ()
    """Features by number."""
    diff: Path | None = None
    """Folder that `tsae diff` wrote: instead of numbers, the features that --raised raised and --lowered lowered. Those
    of them that are not chosen are no random features either."""
    raised: str | None = None
    """With --diff: id of the checkpoint that raised the features."""
    lowered: str | None = None
    """With --diff: id of the checkpoint that lowered them."""
    top: int | None = None
    """With --diff: only this many of them, the clearest."""
    store: Path | None = None
    """Folder that `tsae capture` wrote, for the condition mean_difference: from --lowered to --raised."""
    problems: Path | None = None
    """JSON lines of id, prompt, answer, or a Parquet file of rollouts, whose problems have bands; by default those that
    the features were encoded on. Fresh ones are the fairer test."""
    verifier: str = "last_number"
    """exact, last_number, math (needs tsae[verify]), or module:function for your own (response, answer) -> bool."""
    describe: str | None = None
    """module:function of your own Rollouts -> Rollouts that adds columns and names them as behaviours."""
    json: Path | None = None
    """File for the results as JSON; - for standard output, and text then goes to standard error."""
    config: OmitArgPrefixes[InterventionConfig] = field(default_factory=InterventionConfig)

    def run(self) -> None:
        from tsae.base.plugins import find_function
        from tsae.causal.controls import mean_difference
        from tsae.report.terminal import behaviour_text
        from tsae.rollouts.checking import find_verifier
        from tsae.rollouts.problems import read_problems

        family = self._family()
        verify = find_verifier(self.verifier)
        fix = "Give module:function for your own Rollouts -> Rollouts."
        describe = None if self.describe is None else find_function(self.describe, where="describe", fix=fix)
        problems: Any = None
        if self.problems is not None:
            as_lines = self.problems.suffix == ".jsonl"
            problems = read_problems(self.problems) if as_lines else tsae.Rollouts.read(self.problems)
        sae, direction = tsae.TemporalSAE.load(self.sae), None
        if self.store is not None:
            if self.raised is None or self.lowered is None:
                raise TsaeError("gives a direction only with --raised and --lowered", where="--store")
            direction = mean_difference(
                tsae.ActivationStore(self.store), sae.site, self.raised, self.lowered, norm_limit=sae.norm_limit
            )
        found = tsae.intervene(
            load_series(*self.series)[self.checkpoint],
            sae,
            self.features,
            self.choose or family[: self.top],
            self.config,
            problems=problems,
            verify=verify,
            direction=direction,
            exclude=family,
            describe=describe,
        )
        with as_json(self.json) as write:
            print(behaviour_text(found.outcomes.rename(columns={"condition": "policy"})))
            for behaviour in found.measured:
                print(f"\n{found.summary(behaviour)}")
            say_wrote(found.save(self.to))
            write({**found.info, "record": found.record(), "outcomes": found.outcomes})

    def _family(self) -> list[int]:
        """Features that one checkpoint raised and another lowered; none where they are chosen by number alone."""
        if self.diff is None and self.choose:
            return []
        if self.diff is None or self.raised is None or self.lowered is None:
            raise TsaeError(
                "no features chosen",
                where="tsae causal",
                fix="Give --choose with numbers, or --diff with --raised and --lowered.",
            )
        found = tsae.FeatureDiff.load(self.diff).opposed(self.raised, self.lowered)
        if found.empty:
            raise TsaeError(f"no feature was raised by {self.raised} and lowered by {self.lowered}", where=self.diff)
        return [int(feature) for feature in found.index]


@dataclass(frozen=True)
class Reinforcement:
    """Which features the base's rollouts reinforce, by band and kind of group, and whether the runs then moved so."""

    features: Path
    """Folder that `tsae encode` wrote; its rollouts carry advantages."""
    diff: Path | None = None
    """Folder that `tsae diff` wrote from them: compare predicted with realised shifts."""
    to: Path | None = None
    """Folder for reinforcement.parquet, groups.parquet and, with --diff, predicted.parquet."""
    policy: str | None = None
    """Whose rollouts count; by default the base's."""
    series: tuple[str, ...] = ()
    """Folder of checkpoints, or several checkpoints, for the vanilla gradient: they read the responses that they
    sampled once more. Not needed where the rollouts have a column logprob."""
    device: str = "cpu"
    """A torch device, for --series."""
    json: Path | None = None
    """File for the results as JSON; - for standard output, and text then goes to standard error."""
    config: OmitArgPrefixes[DiffConfig] = field(default_factory=DiffConfig)

    def run(self) -> None:
        from tsae.report.reinforcement import prediction_text, reinforcement_text

        series = load_series(*self.series) if self.series else None
        found = tsae.reinforcement(self.features, self.config, policy=self.policy, series=series, device=self.device)
        tables = {"reinforcement": found.table, "groups": found.groups}
        with as_json(self.json) as write:
            print(reinforcement_text(found))
            if self.diff is not None:
                tables["predicted"] = found.compare(tsae.FeatureDiff.load(self.diff))
                print(f"\n{prediction_text(tables['predicted'])}")
            if self.to is not None:
                self.to.mkdir(parents=True, exist_ok=True)
                for name, table in tables.items():
                    table.to_parquet(self.to / f"{name}.parquet", index=False)
                say_wrote(self.to)
            write(tables)


@dataclass(frozen=True)
class Influence:
    """Which training samples push a feature: the exact first order of one policy-gradient step, for small models."""

    series: tuple[str, ...]
    """Folder of checkpoints (series.json or checkpoint-N folders), or one checkpoint."""
    rollouts: Path
    """Parquet file of rollouts with advantages."""
    sae: Path
    """Folder that `tsae train` wrote."""
    features: tuple[int, ...]
    """Indices of the features."""
    checkpoint: str | None = None
    """Id of the checkpoint at which the step is taken, whose rollouts are its batch; by default the base."""
    on: Path | None = None
    """Other rollouts of that checkpoint, over which features are averaged; by default the batch."""
    to: Path | None = None
    """Folder for influence.parquet, one row a sample and feature."""
    json: Path | None = None
    """File for the results as JSON; - for standard output, and text then goes to standard error."""
    config: OmitArgPrefixes[InfluenceConfig] = field(default_factory=InfluenceConfig)

    def run(self) -> None:
        from tsae.report.reinforcement import influence_text

        series = load_series(*self.series)
        checkpoint = series.base if self.checkpoint is None else series[self.checkpoint]
        rollouts = own_rollouts(self.rollouts, checkpoint.id)
        on = None if self.on is None else own_rollouts(self.on, checkpoint.id)
        found = tsae.influence(checkpoint, rollouts, self.sae, self.features, on=on, config=self.config)
        with as_json(self.json) as write:
            print(influence_text(found))
            if self.to is not None:
                say_wrote(found.save(self.to), found)
            write({**found.info, "influence": found.table})


@dataclass(frozen=True)
class Report:
    """Write a diff as one self-contained HTML file that opens with no network."""

    diff: Path
    """Folder that `tsae diff` wrote."""
    to: Path
    """The .html file to write."""
    features: Path | None = None
    """Folder that `tsae encode` wrote, for examples."""
    title: str | None = None
    """Title of the page."""
    causal: tuple[Path, ...] = ()
    """Folders that `tsae causal` wrote, with features of this diff: the report says what was tested."""
    reinforcement: Path | None = None
    """Folder that `tsae reinforcement --diff` wrote: predicted beside realised shifts."""

    def run(self) -> None:
        import pandas as pd

        features = None if self.features is None else tsae.FeatureTable.load(self.features)
        diff = tsae.FeatureDiff.load(self.diff, features=features)
        for folder in self.causal:
            diff = tsae.Intervention.load(folder).mark(diff)
        if self.reinforcement is not None:
            if not (self.reinforcement / "predicted.parquet").is_file():
                raise TsaeError(
                    "holds no predicted.parquet",
                    where=self.reinforcement,
                    fix="Make it with `tsae reinforcement --diff`.",
                )
            tables = {
                name: pd.read_parquet(self.reinforcement / f"{name}.parquet") for name in ("reinforcement", "predicted")
            }
            diff = replace(diff, **tables)
        say_wrote(diff.to_html(self.to, title=self.title))
