"""`tsae drift`, `tsae diff`, `tsae reinforcement` and `tsae explain`."""

from __future__ import annotations

import sys
from dataclasses import field, replace
from functools import partial
from pathlib import Path

from tyro.conf import OmitArgPrefixes, Positional

import tsae
from tsae.base.artefact import Kind, write_artefact
from tsae.base.files import write_text
from tsae.base.validation import Daily, Size, config
from tsae.commands.common import as_json, load_series, say_wrote, with_address
from tsae.diff.config import DiffConfig, ExplainConfig
from tsae.errors import refuse
from tsae.rollouts.config import BandsBy, EndpointConfig

DRIFT = Kind("drift", 1, "", "Make it with `tsae drift`.")
REINFORCEMENT = Kind("reinforcement", 1, "reinforcement.json", "Make it with `tsae reinforcement --diff`.")
"""Its JSON file holds the fingerprint of the rollouts."""


@config
class Drift:
    """Measure where training wrote: how far every weight is from the base's, by layer and module."""

    series: tuple[str, ...]
    """A folder of checkpoints (series.json, or as a trainer left it). Or several checkpoints with the base first; each
    is a folder, an adapter or a Hugging Face id (org/model@revision/subfolder)."""
    checkpoints: tuple[str, ...] = ()
    """Ids to measure; by default all."""
    spectral: bool = True
    """Also measure spectral norm and stable rank of the updates. This takes most of the time."""
    to: Path | None = None
    """Folder for drift.parquet, one row per checkpoint and tensor, and the page drift.html."""
    json: Path | None = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""

    def execute(self) -> None:
        from tsae.base.table_export import table_files
        from tsae.report.drift import drift_text, write_drift

        series = load_series(*self.series)
        series = series.select(self.checkpoints) if self.checkpoints else series
        refuse(series.name, (len(series) < 2, "there is nothing but the base", "Give at least one more checkpoint."))
        drift = tsae.weight_drift(series, spectral=self.spectral)
        with as_json(self.json) as write:
            print(drift_text(drift))
            if self.to is not None:
                files = table_files({"drift": drift}) | {"drift.html": partial(write_drift, drift)}
                say_wrote(write_artefact(self.to, DRIFT, None, files))
            write({"drift": drift})


@config
class Diff:
    """Compare every checkpoint with the base, and successes with failures; print the findings."""

    run: Positional[Path | None] = None
    """Folder that `tsae run`, `tsae watch` or `tsae demo` wrote: its features are compared again by other options."""
    features: Daily[Path | None] = None
    """Folder that `tsae encode` wrote, in place of RUN."""
    to: Daily[Path | None] = None
    """Folder of the diff. Without it, nothing is written."""
    tokenizer: Daily[Path | None] = None
    """Checkpoint whose tokenizer names the tokens; by default the features know their texts."""
    annotator: Daily[str | None] = None
    """module:function of an annotator (prompt, response tokens) -> one class per token, such as
    tsae.features.mathematics:math_classes."""
    families: bool = False
    """Group features by the FAMILIES of the annotator's module, and test the shifts of the groups."""
    store: Path | None = None
    """The store that was encoded: compares the best features with plain directions and a probe."""
    steps: Path | None = None
    """Features of more steps of the runs, by the same SAE, to follow features along steps. By default --features, if a
    run has two steps there."""
    compare: Path | None = None
    """Folder of another diff by the same SAE: prints which effects both found."""
    insertion: Size = 0
    """Number of the clearest discoveries to test, for each checkpoint and for the base's outcome effects. Does a
    feature fire when its top tokens are inserted elsewhere? Runs the models: give --series and --sae."""
    series: Daily[tuple[str, ...]] = ()
    """Folder of checkpoints, or several checkpoints, the base first. With --sae they also read with noise as large as
    each update (--noise-draws), which shows what moves where nothing was learned. --insertion needs both."""
    device: str = "cpu"
    """Torch device for --series: cpu, cuda, cuda:1, …"""
    markdown: Path | None = None
    """File to write the clearest total shifts to, as a Markdown table."""
    stability: Path | None = None
    """The SAE's folder, if `tsae evaluate --seeds` ran after `tsae encode`; by default found beside the features."""
    sae: Daily[Path | None] = None
    """The SAE's folder, for --series. With --tokenizer also shows which next tokens features promote."""
    by: Daily[BandsBy] = "auto"
    """Whose bands are contrasted, where the rollouts have several: own, difficulty (another model's) or level (the data
    set's). By default those that the rollouts were drawn by."""
    all: Daily[bool] = False
    """Print every table. By default the verdicts are printed, which fit one screen."""
    json: Daily[Path | None] = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""
    config: OmitArgPrefixes[DiffConfig] = field(default_factory=DiffConfig)

    def __post_init__(self) -> None:
        if self.run is not None and self.features is None:
            object.__setattr__(self, "features", self.run / "features")
        refuse("--features", (self.features is None, "is missing", "Give it, or the folder of a run."))

    def execute(self) -> None:
        from tsae.causal.insertion import insert_discoveries
        from tsae.diff.baselines import baselines
        from tsae.diff.descriptions import find_families
        from tsae.features.contexts import find_annotator, logit_effects
        from tsae.report import tables
        from tsae.report.story.findings import findings_content
        from tsae.report.story.statements import NOT_RUN, noise_lines
        from tsae.report.tables import table_text
        from tsae.report.terminal import print_findings, print_summary

        _check(self)
        assert self.features is not None
        features = tsae.FeatureTable.load(self.features).by(self.by)
        base = None if self.tokenizer is None else load_series(self.tokenizer).base
        strings = None if base is None else _strings(features, base)
        logits = None
        if self.sae is not None and base is not None and strings is not None:
            sae = tsae.TemporalSAE.load(self.sae)
            features.need_sae(sae.fingerprint, sae.config.d_sae)
            logits = logit_effects(sae, base, strings)
        series = load_series(*self.series) if self.series else None
        annotator = None if self.annotator is None else find_annotator(self.annotator)
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
            capturing = tsae.CaptureConfig(device=self.device)
            noise = tsae.noise_null(series, self.sae, features, self.config, capturing=capturing, scratch=self.to)
            diff = diff.with_noise(noise)
        with as_json(self.json) as write:
            content = findings_content(diff)
            (print_findings if self.all else print_summary)(diff)
            if self.config.noise_draws and not (self.all and series is not None):
                lines = noise_lines(diff.info["noise"]) if series is not None else [NOT_RUN]
                print("\n" + "\n".join(lines))
            content["noise"] = diff.info.get("noise")
            if self.store is not None:
                content["baselines"] = found = baselines(features, self.store, self.config)
                diff = replace(diff, baselines=found)
                print(f"\n{table_text(tables.baselines(found))}")
            if self.sae is not None and series is not None and self.insertion:
                content["insertion"] = inserted = insert_discoveries(diff, series, self.sae, features, self.insertion)
                diff = replace(diff, insertion=inserted)
                named = {id: repr(text) for id, text in diff.info["token_strings"].items()}
                print(f"\n{table_text(tables.insertion(inserted, named))}")
            if self.to is not None:
                say_wrote(diff.save(self.to), repr(diff))
            if other is not None:
                content["agreement"] = diff.compare(other).agreement.value_counts().to_dict()
                print(f"\nAgainst {self.compare}: {content['agreement']}")
            if self.markdown is not None:
                write_text(self.markdown, diff.to_markdown())
                say_wrote(self.markdown)
            write(content)


@config
class Reinforcement:
    """Find the features that the base's rollouts reinforce, by band and kind of group, and compare with the runs."""

    features: Path
    """Folder that `tsae encode` wrote; its rollouts carry advantages."""
    diff: Path | None = None
    """Folder that `tsae diff` wrote from them: compare predicted with realised shifts."""
    to: Path | None = None
    """Folder for reinforcement.parquet, groups.parquet and, with --diff, predicted.parquet."""
    policy: str | None = None
    """Policy whose rollouts count; by default the base."""
    series: tuple[str, ...] = ()
    """Folder of checkpoints, or several checkpoints, for the vanilla gradient: they read their own responses again. Not
    needed if the rollouts have a column logprob."""
    device: str = "cpu"
    """Torch device for --series: cpu, cuda, cuda:1, …"""
    json: Path | None = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""
    config: OmitArgPrefixes[DiffConfig] = field(default_factory=DiffConfig)

    def execute(self) -> None:
        from tsae.base.table_export import table_files
        from tsae.report.tables import predicted, table_text
        from tsae.report.terminal import reinforcement_text

        series = load_series(*self.series) if self.series else None
        found = tsae.reinforcement(self.features, self.config, policy=self.policy, series=series, device=self.device)
        tables = {"reinforcement": found.table, "groups": found.groups}
        with as_json(self.json) as write:
            print(reinforcement_text(found))
            if self.diff is not None:
                tables["predicted"] = found.compare(tsae.FeatureDiff.load(self.diff))
                print(f"\n{table_text(predicted(tables['predicted']))}")
            if self.to is not None:
                files = table_files(tables)
                of = found.source.made_from
                say_wrote(write_artefact(self.to, REINFORCEMENT, of, files, config=self.config, inputs=of))
            write(tables)


@config
class Explain:
    """Label features by what they respond to, and test every label on other contexts.

    A model behind a server with chat completions names them: --server.url http://localhost:8000/v1 --server.model NAME.
    Without a server, rules of tokens and positions do. Labels that fail their test are not shown. Answers are kept, so
    that the same command resumes.
    """

    run: Positional[Path]
    """Folder that `tsae run`, `tsae demo` or `tsae diff` wrote."""
    to: Daily[Path | None] = None
    """Folder for the labels and the server's answers; by default explanations, beside the diff, where `tsae report`
    finds it."""
    features: Path | None = None
    """Folder that `tsae encode` wrote; by default features, beside the diff."""
    server: Daily[EndpointConfig] = field(default_factory=EndpointConfig)
    json: Daily[Path | None] = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""
    config: OmitArgPrefixes[ExplainConfig] = field(default_factory=ExplainConfig)

    def __post_init__(self) -> None:
        if self.to is None:
            object.__setattr__(self, "to", self.diff.parent / "explanations")

    @property
    def diff(self) -> Path:
        """The folder of the diff."""
        return self.run / "diff" if (self.run / "diff").is_dir() else self.run

    def execute(self) -> None:
        from tsae.report.terminal import explanation_text

        features = tsae.FeatureTable.load(self.features or self.diff.parent / "features")
        diff = tsae.FeatureDiff.load(self.diff, features=features)
        assert self.to is not None
        with as_json(self.json) as write:
            server, say = with_address(self.server), partial(print, file=sys.stderr)
            found = tsae.explain(diff, self.config, server=server, to=self.to, say=say)
            print(explanation_text(found))
            say_wrote(self.to, found)
            write({**found.info, "explanations": found.table})


def _strings(features: tsae.FeatureTable, base: tsae.Checkpoint) -> list[str]:
    """The texts of the vocabulary.

    Raises:
        TsaeError: where the tokenizer is not that of the features' tokens.
    """
    from tsae.activations.reading_plan import check_tokenizer
    from tsae.checkpoints.tokenizers import token_strings

    return token_strings(check_tokenizer(base, features.rollouts))


def _check(options: Diff) -> None:
    """Which options need which others.

    Raises:
        TsaeError: where one is missing.
    """
    series, sae = bool(options.series), options.sae is not None
    refuse("--insertion", (options.insertion and not (series and sae), "runs the models", "Give --series and --sae."))
    what = "needs checkpoints: one whose unembedding is read, or those that read with noise"
    refuse("--sae", (sae and options.tokenizer is None and not series, what, "Give --tokenizer, or --series."))
    refuse("--series", (series and not sae, "names checkpoints, of which nothing is read", "Give --sae too."))
