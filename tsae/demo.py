"""`tsae demo`: the whole pipeline on the shipped arithmetic checkpoints, from sampling to the report.

Bands are measured on separate rollouts. Else the base's luck on the analysed rollouts would decide which problems are
called hard. Samples are attributed of a fourth run, on problems of all levels, which ships as TRL left it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tsae
from tsae.activations.store import ActivationStore
from tsae.attribution.attribution import Attribution
from tsae.attribution.config import AttributionConfig
from tsae.attribution.find_settings import find_settings
from tsae.attribution.sample_kinds import other_problems
from tsae.base.artefact import versions
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries
from tsae.config import DemoConfig
from tsae.diff.feature_diff import FeatureDiff
from tsae.pipeline import Choice, Pipeline, fingerprints
from tsae.report.story import facts
from tsae.report.terminal import print_run
from tsae.rollouts.table import Rollouts
from tsae.sae.model import TemporalSAE
from tsae.stages import RunRecord, Stage, carry_out
from tsae.testbed import TASK, eval_problems, mixed_run, verify
from tsae.testbed import series as shipped_series
from tsae.testbed.classes import FAMILIES, right_steps, token_classes, with_behaviours
from tsae.testbed.tokenizer import MAX_RESPONSE_TOKENS

_FEATURES = 4
"""Features that are attributed: those that the page names."""


def demo(config: DemoConfig | None = None, *, progress: bool = True, everything: bool = False) -> Path:
    """Run the demo and print its verdicts, or everything that it found. Stages that an earlier run with this config
    finished are read from disk.

    Returns:
        Path of the report.
    """
    config = config or DemoConfig()
    to, series = config.to, shipped_series().final()
    record = RunRecord(to, "demo.json", {"demo": {**asdict(config), "to": None}, "versions": versions()}, "a demo")
    drawing = {name: getattr(config, name) for name in ("problems", "samples", "band_samples", "seed")}
    training = replace(config.training, seed=config.seed)
    work = _Demo(
        to=to, readers=series, title="What easy, medium and hard training did to an arithmetic model", task=TASK,
        diff=tsae.DiffConfig(seed=config.seed), sae_settings={"sae": asdict(config.sae), "training": asdict(training)},
        steps=shipped_series() if config.steps else None, annotator=token_classes, families=FAMILIES, check=right_steps,
        questions={"attribution": drawing} if config.attribute else {}, progress=progress,
        config=config, choice=Choice(config.sae, training), drawing=drawing,
    )  # fmt: skip
    found = carry_out(work.stages(*work.rollouts()), record, lambda *_, **__: None, print)
    print(f"{found['rollouts']!r}\n  read by {', '.join(c.id for c in series)}")
    report = to / "report.html"
    attribution = Attribution.load(to / "attribution") if config.attribute else None
    print_run(found["report"], attribution, report, found["evaluation"], everything=everything)
    return report


@dataclass(frozen=True, kw_only=True)
class _Demo(Pipeline):
    """The stages of the demo."""

    config: DemoConfig
    choice: Choice
    drawing: Mapping[str, Any]
    """Options that decide what is sampled."""

    def choose(self, store: ActivationStore) -> Choice:
        return self.choice

    def rollouts(self) -> tuple[list[Stage], list[Stage]]:
        """The stages that sample the rollouts, and those that sample those of more steps."""
        path, of_steps = self.to / "rollouts.parquet", self.to / "steps" / "rollouts.parquet"
        sampled = Stage(
            "rollouts", path.name, self.drawing, lambda: demo_rollouts(self.config, progress=self.progress),
            lambda: Rollouts.read(path), fingerprint=fingerprints,
        )  # fmt: skip
        more = Stage(
            "steps/rollouts", "steps/rollouts.parquet", self.drawing, lambda found: self._add_steps(found, of_steps),
            lambda _: Rollouts.read(of_steps), ("rollouts",), fingerprint=fingerprints,
        )  # fmt: skip
        return [sampled], [more] if self.config.steps else []

    def _add_steps(self, rollouts: Rollouts, path: Path) -> Rollouts:
        """All shipped checkpoints, each on its own responses, with the entropy of its predictions."""
        earlier = [checkpoint for checkpoint in shipped_series() if checkpoint.id not in rollouts.policies]
        sampled = with_behaviours(_sampled(earlier, self.config, self.progress))
        band = dict(zip(*(rollouts.table[name].to_pylist() for name in ("problem_id", "band")), strict=True))
        sampled = sampled.with_column("band", [band[id] for id in sampled.table["problem_id"].to_pylist()])
        together = tsae.Rollouts.concat([rollouts, sampled])
        together.write(path)
        return together

    def targets(self, diff: FeatureDiff) -> list[int]:
        return facts.moved_features(diff, _FEATURES)

    def attribute(self, sae: TemporalSAE, diff: FeatureDiff) -> Attribution:
        """Which samples of the mixed run moved what on the demo's problems. Its bands are the problems' levels."""
        base, to = shipped_series().base, self.to / "attribution"
        series = CheckpointSeries.load(base.path, mixed_run())
        log = Rollouts.read(mixed_run() / "completions", series)
        problems = other_problems(self.to / "rollouts.parquet", log, base.id)
        options = AttributionConfig(
            features=tuple(self.targets(diff)),
            n_features=_FEATURES,
            n_fixed=96,
            groups=("band", "lone success"),
            tokens_of=128,
            seed=self.config.seed,
        )
        return tsae.attribute(
            series, log, to, settings=find_settings(series), sae=sae, problems=problems, config=options,
            about="This is a fourth run, from the same base, on easy, medium and hard problems at once.",
            progress=self.progress,
        )  # fmt: skip


def demo_rollouts(config: DemoConfig, *, progress: bool = True) -> Rollouts:
    """Sample the demo's rollouts, or read those of an earlier run."""
    path = config.to / "rollouts.parquet"
    if path.is_file():
        return tsae.Rollouts.read(path)
    series = shipped_series().final()
    for_bands = _sampled([series.base], config, progress, n_samples=config.band_samples, seed=config.seed + 1)
    rollouts = with_behaviours(_sampled(series, config, progress)).with_advantages()
    rollouts = rollouts.with_bands(series.base, measured_on=for_bands)
    rollouts.write(path)
    return rollouts


def _sampled(checkpoints: Iterable[Checkpoint], config: DemoConfig, progress: bool, **changes: Any) -> Rollouts:
    problems = eval_problems(config.problems, seed=config.seed)
    sampling = tsae.SamplingConfig(
        n_samples=config.samples, max_new_tokens=MAX_RESPONSE_TOKENS, batch_size=720, seed=config.seed
    )
    sampling = replace(sampling, **changes)
    return tsae.Rollouts.concat(
        [tsae.sample(checkpoint, problems, sampling, verify=verify, progress=progress) for checkpoint in checkpoints]
    )
