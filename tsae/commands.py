"""Commands that measure checkpoints and rollouts, beside the stages in `tsae.cli`; and what all commands say."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import OmitArgPrefixes

from tsae.causal.config import InterventionConfig
from tsae.diff.config import DiffConfig, InfluenceConfig
from tsae.errors import TsaeError
from tsae.rollouts.config import BandCutoffs, BandQuantiles, DifficultyConfig

if TYPE_CHECKING:
    from tsae.checkpoints.series import CheckpointSeries
    from tsae.rollouts.table import Rollouts


@dataclass(frozen=True)
class Drift:
    """Where training wrote: how far every weight is from the base's, by layer and module."""

    series: tuple[str, ...]
    """Folder of checkpoints (series.json or checkpoint-N folders), or several checkpoints, the base first: folders,
    adapters, Hugging Face ids (org/model@revision/subfolder)."""
    checkpoints: tuple[str, ...] = ()
    """Ids to measure; by default all."""
    spectral: bool = True
    """Spectral norm and stable rank of the updates too, which takes most of the time."""
    to: Path | None = None
    """Folder for drift.parquet, one row a checkpoint and tensor, and the page drift.html."""

    def run(self) -> None:
        import tsae
        from tsae.report.drift import drift_text, write_drift

        series = load_series(*self.series)
        series = series.select(self.checkpoints) if self.checkpoints else series
        if len(series) < 2:
            raise TsaeError(
                "there is nothing but the base", where=series.name, fix="Give at least one more checkpoint."
            )
        drift = tsae.weight_drift(series, spectral=self.spectral)
        print(drift_text(drift))
        if self.to is not None:
            self.to.mkdir(parents=True, exist_ok=True)
            drift.to_parquet(self.to / "drift.parquet", index=False)
            write_drift(drift, self.to / "drift.html")
            say_wrote(self.to)


@dataclass(frozen=True)
class Bands:
    """Put every problem into easy, medium or hard by a policy's pass rate."""

    rollouts: Path
    """Parquet file."""
    to: Path
    """Parquet file to write; may be the same."""
    reference: str | None = None
    """Policy whose pass rate counts; by default all policies together."""
    measured_on: Path | None = None
    """Other rollouts of the same problems to measure on; avoids regression to the mean."""
    cutoffs: OmitArgPrefixes[BandCutoffs] = field(default_factory=BandCutoffs)
    shares: tuple[float, float] | None = None
    """Instead of cut-offs: the share of the problems that is easy, and the share that is hard, such as 0.3 0.3."""

    def run(self) -> None:
        import tsae

        rollouts = tsae.Rollouts.read(self.rollouts)
        measured_on = None if self.measured_on is None else tsae.Rollouts.read(self.measured_on)
        cutoffs = self.cutoffs if self.shares is None else BandQuantiles(*self.shares)
        banded = rollouts.with_bands(self.reference, cutoffs=cutoffs, measured_on=measured_on)
        say_wrote(banded.write(self.to), banded)
        problems = banded.frame.drop_duplicates("problem_id").band.value_counts()
        print("problems: " + ", ".join(f"{band} {problems.get(band, 0)}" for band in ("easy", "medium", "hard")))


@dataclass(frozen=True)
class Difficulty:
    """How difficulty moved: pass rates and bands of every checkpoint, pass@k, and what groups have to teach."""

    rollouts: Path
    """Parquet file with rollouts of several checkpoints."""
    series: tuple[str, ...] = ()
    """Folder of the checkpoints, which names runs and steps; without it all policies are one run, in their order."""
    reference: str | None = None
    """Policy that sets shares and bands, and that others are compared with; by default the base, or the first."""
    to: Path | None = None
    """Folder for the tables and the page difficulty.html."""
    cutoffs: OmitArgPrefixes[BandCutoffs] = field(default_factory=BandCutoffs)
    shares: tuple[float, float] | None = None
    """Instead of cut-offs: the share of the reference's problems that is easy, and the share that is hard."""
    config: OmitArgPrefixes[DifficultyConfig] = field(default_factory=DifficultyConfig)

    def run(self) -> None:
        import tsae

        found = tsae.difficulty(
            tsae.Rollouts.read(self.rollouts),
            self.config,
            series=load_series(*self.series) if self.series else None,
            reference=self.reference,
            cutoffs=self.cutoffs if self.shares is None else BandQuantiles(*self.shares),
        )
        print(found)
        if self.to is not None:
            say_wrote(found.save(self.to))


@dataclass(frozen=True)
class Behaviours:
    """What responses do: loops, repeated answers, skipped computation, formats; by band, with paired changes."""

    rollouts: Path
    """Parquet file with the texts of the responses."""
    to: Path | None = None
    """Parquet file to write with a column for every behaviour; may be the same."""
    reference: str | None = None
    """Policy that others are compared with, and whose successes set a problem's usual length; by default the first."""
    required_steps: str | None = None
    """module:function of your own (prompt, answer) -> operations that a solution needs, or None."""

    def run(self) -> None:
        import tsae
        from tsae.plugins import find_function
        from tsae.report.terminal import behaviour_text, format_text
        from tsae.rollouts.behaviours import behaviour_table, format_table, with_behaviours

        rollouts = tsae.Rollouts.read(self.rollouts)
        reference = self.reference or rollouts.policies[0]
        fix = "Give module:function for your own (prompt, answer) -> number of operations."
        name = self.required_steps
        required = None if name is None else find_function(name, where="required_steps", fix=fix)
        found = with_behaviours(rollouts, required_steps=required, reference=reference)
        print(behaviour_text(behaviour_table(found, reference=reference)))
        print(f"\n{format_text(format_table(found, reference=reference))}")
        if self.to is not None:
            say_wrote(found.write(self.to), found)


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
    """Checkpoint id."""
    lowered: str | None = None
    """Checkpoint id."""
    top: int | None = None
    """Only the clearest this many of them."""
    store: Path | None = None
    """Folder that `tsae capture` wrote, for the condition mean_difference: from --lowered to --raised."""
    problems: Path | None = None
    """JSON lines of id, prompt, answer, or a Parquet file of rollouts, whose problems have bands; by default those that
    the features were encoded on. Fresh ones are the fairer test."""
    verifier: str = "last_number"
    """exact, last_number, math (needs tsae[verify]), or module:function for your own (response, answer) -> bool."""
    describe: str | None = None
    """module:function of your own Rollouts -> Rollouts that adds columns and names them as behaviours."""
    config: OmitArgPrefixes[InterventionConfig] = field(default_factory=InterventionConfig)

    def run(self) -> None:
        import tsae
        from tsae.causal.controls import mean_difference
        from tsae.plugins import find_function
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
            direction = mean_difference(tsae.ActivationStore(self.store), sae.site, self.raised, self.lowered)
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
        print(behaviour_text(found.outcomes.rename(columns={"condition": "policy"})))
        for behaviour in found.measured:
            print(f"\n{found.summary(behaviour)}")
        say_wrote(found.save(self.to))

    def _family(self) -> list[int]:
        """Features that one checkpoint raised and another lowered; none where they are chosen by number alone."""
        import tsae

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
    """Which features the base's rollouts reinforce, by band and outcome, and whether the runs then moved like that."""

    features: Path
    """Folder that `tsae encode` wrote; its rollouts carry advantages."""
    diff: Path | None = None
    """Folder that `tsae diff` wrote from them: compare predicted with realised shifts."""
    to: Path | None = None
    """Folder for reinforcement.parquet, groups.parquet and, with --diff, predicted.parquet."""
    policy: str | None = None
    """Whose rollouts count; by default the base's."""
    config: OmitArgPrefixes[DiffConfig] = field(default_factory=DiffConfig)

    def run(self) -> None:
        import tsae
        from tsae.report.reinforcement import prediction_text, reinforcement_text

        found = tsae.reinforcement(self.features, self.config, policy=self.policy)
        tables = {"reinforcement": found.table, "groups": found.groups}
        print(reinforcement_text(found))
        if self.diff is not None:
            tables["predicted"] = found.compare(tsae.FeatureDiff.load(self.diff))
            print(f"\n{prediction_text(tables['predicted'])}")
        if self.to is not None:
            self.to.mkdir(parents=True, exist_ok=True)
            for name, table in tables.items():
                table.to_parquet(self.to / f"{name}.parquet", index=False)
            say_wrote(self.to)


@dataclass(frozen=True)
class Influence:
    """Which training samples push a feature: the exact first order of one policy-gradient step, for small models."""

    series: tuple[str, ...]
    """Folder of checkpoints (series.json or checkpoint-N folders), or one checkpoint."""
    rollouts: Path
    """Parquet file with advantages."""
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
    config: OmitArgPrefixes[InfluenceConfig] = field(default_factory=InfluenceConfig)

    def run(self) -> None:
        import tsae
        from tsae.report.reinforcement import influence_text

        series = load_series(*self.series)
        checkpoint = series.base if self.checkpoint is None else series[self.checkpoint]
        rollouts = own_rollouts(self.rollouts, checkpoint.id)
        on = None if self.on is None else own_rollouts(self.on, checkpoint.id)
        found = tsae.influence(checkpoint, rollouts, self.sae, self.features, on=on, config=self.config)
        print(influence_text(found))
        if self.to is not None:
            say_wrote(found.save(self.to), found)


def own_rollouts(path: Path, policy: str) -> Rollouts:
    """What a policy sampled.

    Raises:
        TsaeError: where it sampled nothing.
    """
    import tsae

    rollouts = tsae.Rollouts.read(path)
    if policy not in rollouts.policies:
        raise TsaeError(
            f"holds nothing that {policy} sampled; policies are {', '.join(rollouts.policies)}",
            where=path,
            fix="Give rollouts of that checkpoint, or another --checkpoint.",
        )
    return rollouts.where(policy=policy)


def load_series(*sources: str | Path) -> CheckpointSeries:
    """The series, with its notes on standard error."""
    from tsae.checkpoints.series import CheckpointSeries

    series = CheckpointSeries.load(*sources)
    for note in series.notes:
        print(f"note: {note}", file=sys.stderr)
    return series


def say_wrote(path: Path, what: object | None = None) -> None:
    print(f"wrote {path}" + (f": {what}" if what is not None else ""))
