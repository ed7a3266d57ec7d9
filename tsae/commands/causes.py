"""`tsae attribute`, `tsae causal` and `tsae influence`."""

from __future__ import annotations

import sys
from dataclasses import field, replace
from pathlib import Path

from tyro.conf import OmitArgPrefixes, Positional

import tsae
from tsae.attribution.config import AttributionConfig, InfluenceConfig
from tsae.base.filters import find_function
from tsae.base.validation import Count, Daily, config
from tsae.causal.config import InterventionConfig
from tsae.commands.common import as_json, load_series, own_rollouts, say_wrote
from tsae.errors import TsaeError, refuse
from tsae.rollouts.config import BandsBy


@config
class Attribute:
    """Find which training samples moved features and behaviours: their shares of the change, and the change without
    them.

    Needs the run's base, one later checkpoint, its log with every step, and the trainer's settings.
    """

    run: Positional[Path]
    """Folder of the run: checkpoints or series.json, and the trainer's settings (training_args.bin of TRL,
    .hydra/config.yaml of verl, wandb/ …). Or the folder that `tsae run` wrote, which has log, SAE and diff."""
    to: Daily[Path | None] = None
    """Folder for the results. The replay keeps its states there, and removes them when it ends. By default, the
    results go to `attribution` in the folder that `tsae run` wrote."""
    rollouts: Daily[Path | None] = None
    """The run's log: a Parquet file that `tsae rollouts import` wrote, or the trainer's own. By default the log in the
    run's folder."""
    series: Daily[tuple[str, ...]] = ()
    """Checkpoints with the base first, where the run's folder neither holds nor names the base."""
    sae: Daily[Path | None] = None
    """Folder that `tsae train` wrote: features become targets."""
    first_token: str | None = None
    """Text of one token: the probability that a response begins with it becomes a target."""
    name: str | None = None
    """Name of the run, where the series has several."""
    settings: Daily[Path | None] = None
    """File or folder of the trainer's settings; by default they lie beside the checkpoints."""
    trainer_version: str | None = None
    """Version of the trainer, such as 0.18.1: its defaults count where a recipe is silent. By default the version that
    the run's README.md or Weights & Biases name."""
    problems: Daily[Path | None] = None
    """Parquet file of the base's responses, with outcomes, to problems that the run did not train on (tsae rollouts
    sample). Accuracy and behaviours are then attributed on these. By default on the log's own problems."""
    by: BandsBy = "auto"
    """Whose bands, where the rollouts have several: own, difficulty (another model's) or level (the data set's)."""
    top: Daily[Count] = 10
    """Number of samples to print; in the JSON, as many for each target and against it."""
    json: Daily[Path | None] = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""
    config: OmitArgPrefixes[AttributionConfig] = field(default_factory=AttributionConfig)

    @property
    def analysed(self) -> bool:
        """Whether the folder is that of an analysis."""
        return (self.run / "run.json").is_file()

    def __post_init__(self) -> None:
        if self.to is None and self.analysed:
            object.__setattr__(self, "to", self.run / "attribution")
        refuse("--to", (self.to is None, "is missing", "Give it, or the folder that `tsae run` wrote."))

    def execute(self) -> None:
        from tsae.attribution.find_settings import find_settings
        from tsae.attribution.sample_kinds import other_problems
        from tsae.report.attribution import attribution_text

        if self.analysed and not self.series and self.rollouts is None:
            self, series, log = _of_analysis(self)
        else:
            series = load_series(*self.series) if self.series else _of_run(self.run)
            log = tsae.Rollouts.read(self.rollouts or self.run, series)
        assert self.to is not None
        first_token = None if self.first_token is None else _token_id(series.base, self.first_token)
        log = log.by(self.by)
        found = tsae.attribute(
            series,
            log,
            self.to,
            settings=find_settings(series, self.name, self.settings, version=self.trainer_version),
            sae=self.sae,
            run=self.name,
            first_token=first_token,
            problems=None if self.problems is None else other_problems(self.problems, log, series.base.id),
            config=self.config,
        )
        with as_json(self.json) as write:
            print(attribution_text(found, self.top))
            beside = self.analysed and self.to == self.run / "attribution"
            say_wrote(self.to, f"`tsae report {self.run}` shows it" if beside else None)
            targets = [] if found.info["gate"] else list(found.targets.target)
            names = ["targets", "steps", *(["bands", "groups", "entropy", "tokens"] if targets else [])]
            samples = {name: found.of_target(name, self.top) for name in targets}
            write({**{name: getattr(found, name) for name in names}, "samples": samples, "info": found.info})


def _of_run(run: Path) -> tsae.CheckpointSeries:
    """The checkpoints of a run's folder, with the base that it holds or names, as `tsae run` finds it."""
    from tsae.config import RunConfig
    from tsae.doctor import NoBase, find_series

    try:
        series, origin = find_series(RunConfig(path=run))
    except NoBase as error:
        return error.series
    print(f"note: {origin}", file=sys.stderr)
    return series


def _of_analysis(options: Attribute) -> tuple[Attribute, tsae.CheckpointSeries, tsae.Rollouts]:
    """The options, the checkpoints and the log with its bands, from what an analysis holds."""
    from tsae.config import RunConfig
    from tsae.doctor import find_series
    from tsae.report.story.facts import moved_features
    from tsae.rollouts.schema import problem_bands
    from tsae.stages import read_run

    folder, asked = options.run, (read_run(options.run, "run.json") or {})["run"]
    series, _ = find_series(RunConfig(path=asked["path"], base=asked["base"]))
    log, drawn = (tsae.Rollouts.read(folder / "rollouts" / f"{name}.parquet") for name in ("log", "rollouts"))
    bands = problem_bands(drawn.frame)
    log = log.with_column("band", [bands.get(problem) for problem in log.table["problem_id"].to_pylist()])
    log = tsae.Rollouts(log.table, {**log.info, **{k: v for k, v in drawn.info.items() if k.startswith("bands")}})
    config = options.config
    if not config.features:
        moved = moved_features(tsae.FeatureDiff.load(folder / "diff"), config.n_features)
        config = replace(config, features=tuple(moved))
    return replace(options, sae=options.sae or folder / "sae", config=config), series, log


@config
class Causal:
    """Ablate, steer or transplant features while a checkpoint generates, beside matched random ones and other controls.

    Features are chosen by number, or as those that one checkpoint raised and another lowered.
    """

    series: tuple[str, ...]
    """A folder of checkpoints (series.json, or as a trainer left it). Or several checkpoints with the base first; each
    is a folder, an adapter, a .gguf file or a Hugging Face id (org/model@revision/subfolder)."""
    checkpoint: str
    """Id of the checkpoint that generates."""
    sae: Path
    """Folder that `tsae train` wrote."""
    features: Path
    """Folder that `tsae encode` wrote with this SAE: how often and how strongly features fire."""
    to: Path
    """Folder for outcomes.parquet, rollouts.parquet and causal.json."""
    choose: Daily[tuple[int, ...]] = ()
    """Features by number."""
    diff: Daily[Path | None] = None
    """Folder that `tsae diff` wrote, in place of numbers: takes the features that --raised raised and --lowered
    lowered. All of them are kept out of the random features."""
    raised: Daily[str | None] = None
    """With --diff: id of the checkpoint that raised the features."""
    lowered: Daily[str | None] = None
    """With --diff: id of the checkpoint that lowered them."""
    top: Daily[Count | None] = None
    """With --diff: only this many of them, the clearest first."""
    store: Path | None = None
    """Folder that `tsae capture` wrote, for the condition mean_difference: from --lowered to --raised; in a transplant
    from --checkpoint to --donor."""
    donor: str | None = None
    """With --mode transplant: id of the checkpoint whose features are put in. It reads along, and both models are held
    at once."""
    problems: Daily[Path | None] = None
    """JSON lines of id, prompt, answer, or a Parquet file of rollouts, whose problems have bands. By default the
    problems on which the features were encoded. Fresh problems are the fairer test."""
    verifier: str = "last_number"
    """exact, last_number, math (needs tsae[verify]), or module:function for your own (response, answer) -> bool."""
    describe: str | None = None
    """module:function of your own Rollouts -> Rollouts that adds columns and names them as behaviours."""
    json: Daily[Path | None] = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""
    config: OmitArgPrefixes[InterventionConfig] = field(default_factory=InterventionConfig)

    def execute(self) -> None:
        from tsae.causal.controls import mean_difference
        from tsae.report.terminal import behaviour_text
        from tsae.rollouts.problems import Problem, read_problems
        from tsae.rollouts.rewards import find_verifier

        family = opposed_features(self)
        verify = find_verifier(self.verifier)
        fix = "Give module:function for your own Rollouts -> Rollouts."
        describe = None if self.describe is None else find_function(self.describe, takes=1, where="describe", fix=fix)
        problems: list[Problem] | tsae.Rollouts | None = None
        if self.problems is not None:
            as_lines = self.problems.suffix == ".jsonl"
            problems = read_problems(self.problems) if as_lines else tsae.Rollouts.read(self.problems)
        sae, direction = tsae.TemporalSAE.load(self.sae), None
        if self.store is not None:
            up, down = (self.raised, self.lowered) if self.donor is None else (self.donor, self.checkpoint)
            if up is None or down is None:
                raise TsaeError("gives a direction only with --raised and --lowered", where="--store")
            direction = mean_difference(tsae.ActivationStore(self.store), sae.site, up, down, sae=sae)
        series = load_series(*self.series)
        found = tsae.intervene(
            series[self.checkpoint],
            sae,
            self.features,
            self.choose or family[: self.top],
            self.config,
            problems=problems,
            verify=verify,
            direction=direction,
            donor=None if self.donor is None else series[self.donor],
            exclude=family,
            describe=describe,
        )
        with as_json(self.json) as write:
            print(behaviour_text(found.outcomes.rename(columns={"condition": "policy"})))
            for behaviour in found.measured:
                print(f"\n{found.summary(behaviour)}")
            say_wrote(found.save(self.to))
            write({**found.info, "record": found.record(), "outcomes": found.outcomes})


@config
class Influence:
    """Find training samples that push a feature: exact first order of one policy-gradient step, for small models."""

    series: tuple[str, ...]
    """Folder of checkpoints (series.json, or as a trainer left it), or one checkpoint."""
    rollouts: Path
    """Parquet file of rollouts with advantages."""
    sae: Path
    """Folder that `tsae train` wrote."""
    features: tuple[int, ...]
    """Indices of the features."""
    checkpoint: str | None = None
    """Id of the checkpoint that takes the step, with its own rollouts as the batch; by default the base."""
    on: Path | None = None
    """Other rollouts of that checkpoint, over which features are averaged; by default the batch."""
    to: Path | None = None
    """Folder for influence.parquet, one row per sample and feature."""
    json: Path | None = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""
    config: OmitArgPrefixes[InfluenceConfig] = field(default_factory=InfluenceConfig)

    def execute(self) -> None:
        from tsae.report.terminal import influence_text

        series = load_series(*self.series)
        checkpoint = series.base if self.checkpoint is None else series[self.checkpoint]
        batch = own_rollouts(self.rollouts, checkpoint.id)
        on = None if self.on is None else own_rollouts(self.on, checkpoint.id)
        found = tsae.influence(checkpoint, batch, self.sae, self.features, on=on, config=self.config)
        with as_json(self.json) as write:
            print(influence_text(found))
            if self.to is not None:
                say_wrote(found.save(self.to), found)
            write({**found.info, "influence": found.table})


def _token_id(base: tsae.Checkpoint, text: str) -> int:
    ids: list[int] = base.load_tokenizer().encode(text, add_special_tokens=False)
    fix = "Give the text of a single token of this tokenizer."
    refuse("--first-token", (len(ids) != 1, f"{text!r} is {len(ids)} tokens, expected one", fix))
    return ids[0]


def opposed_features(options: Causal) -> list[int]:
    """Features that one checkpoint raised and another lowered; none where they are chosen by number alone.

    Raises:
        TsaeError: where no option chooses features, or no feature is opposed.
    """
    if options.diff is None and options.choose:
        return []
    if options.diff is None or options.raised is None or options.lowered is None:
        fix = "Give --choose with numbers, or --diff with --raised and --lowered."
        raise TsaeError("no features chosen", where="tsae causal", fix=fix)
    diff = tsae.FeatureDiff.load(options.diff, features=tsae.FeatureTable.load(options.features))
    found = diff.opposed(options.raised, options.lowered)
    message = f"no feature was raised by {options.raised} and lowered by {options.lowered}"
    refuse(options.diff, (found.empty, message, None))
    return [int(feature) for feature in found.index]
