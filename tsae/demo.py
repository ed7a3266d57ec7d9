"""`tsae demo`: the whole pipeline on the shipped arithmetic checkpoints, from sampling to the report.

Bands are measured on separate rollouts. Else the base's luck on the analysed rollouts would decide which problems are
called hard. Samples are attributed of a fourth run, on problems of all levels, which ships as TRL left it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tsae
from tsae.activations.config import CaptureConfig
from tsae.attribution.attribution import Attribution
from tsae.attribution.config import AttributionConfig
from tsae.attribution.sample_kinds import other_problems
from tsae.base.artefact import versions
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries
from tsae.config import DemoConfig
from tsae.pipeline import (
    Choice,
    attribution_stage,
    capture_stage,
    diff_stage,
    encoding_stage,
    evaluation_stage,
    fingerprints,
    last_stages,
    training_stage,
)
from tsae.report.attribution import attribution_text
from tsae.report.terminal import print_findings
from tsae.rollouts.table import Rollouts
from tsae.sae.model import TemporalSAE
from tsae.stages import RunRecord, Stage, carry_out
from tsae.testbed import eval_problems, mixed_run, verify
from tsae.testbed import series as shipped_series
from tsae.testbed.classes import FAMILIES, right_steps, token_classes, with_behaviours
from tsae.testbed.tokenizer import MAX_RESPONSE_TOKENS

_SHOWN = 3
"""Samples to read that are printed."""


def demo(config: DemoConfig | None = None, *, progress: bool = True) -> Path:
    """Run the demo and print its findings. Stages that an earlier run with this config finished are read from disk.

    Returns:
        Path of the report.
    """
    config = config or DemoConfig()
    to = config.to
    record = RunRecord(to, "demo.json", {"demo": {**asdict(config), "to": None}, "versions": versions()}, "a demo")
    series = shipped_series().final()
    found = carry_out(demo_stages(config, progress=progress), record, lambda *_, **__: None, print)
    print(f"{found['rollouts']}\n  read by {', '.join(c.id for c in series)}")
    print_findings(found["diff"], found["evaluation"])
    if config.attribute:
        print(f"\n{attribution_text(Attribution.load(to / 'attribution'), _SHOWN)}")
    report = to / "report.html"
    print(f"\nReport: {report.resolve()}")
    return report


def demo_stages(config: DemoConfig, *, progress: bool = True) -> list[Stage]:
    """The stages of the demo."""
    to, series = config.to, shipped_series().final()
    asked = {name: getattr(config, name) for name in ("problems", "samples", "band_samples", "seed")}
    choice = Choice(config.sae, replace(config.training, seed=config.seed))
    attributing = attribution_stage(to, asked, lambda sae, diff: _attributed(config, sae, progress), lambda diff: None)
    return [
        Stage(
            "rollouts", "rollouts.parquet", asked, lambda: demo_rollouts(config, progress=progress),
            lambda: Rollouts.read(to / "rollouts.parquet"),
            fingerprint=fingerprints,
        ),
        capture_stage(to, series, progress=progress),
        training_stage(
            to, lambda _: choice, {"sae": asdict(choice.sae), "training": asdict(choice.training)}, progress=progress
        ),
        evaluation_stage(to),
        encoding_stage(to, progress=progress),
        *(_steps_stages(config, asked, progress) if config.steps else []),
        diff_stage(
            to, series, tsae.DiffConfig(seed=config.seed), annotator=token_classes, families=FAMILIES,
            steps=config.steps,
            progress=progress,
        ),
        *([attributing] if config.attribute else []),
        *last_stages(
            to, ["attribution"] if config.attribute else [], check=right_steps,
            title="What easy, medium and hard training did to an arithmetic model",
        ),
    ]  # fmt: skip


def _attributed(config: DemoConfig, sae: TemporalSAE, progress: bool) -> Attribution:
    """Which samples of the mixed run moved what on the demo's problems. Its bands are the problems' levels."""
    series = CheckpointSeries.load(shipped_series().base.path, mixed_run())
    log = Rollouts.read(mixed_run() / "completions", series)
    problems = other_problems(config.to / "rollouts.parquet", log, series.base.id)
    options = AttributionConfig(
        n_features=4, n_fixed=96, groups=("band", "lone success"), tokens_of=128, seed=config.seed
    )
    found = tsae.attribute(
        series, log, config.to / "attribution", sae=sae, problems=problems, config=options, progress=progress
    )
    told = "This is a fourth run, from the same base, on easy, medium and hard problems at once."
    return replace(found, info={**found.info, "notes": [told, *found.info["notes"]]}).save(config.to / "attribution")


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


def _steps_stages(config: DemoConfig, asked: Mapping[str, Any], progress: bool) -> list[Stage]:
    """All shipped checkpoints, each on its own responses, with the entropy of its predictions."""
    path, series = config.to / "steps" / "rollouts.parquet", shipped_series()

    def sample(rollouts: Rollouts) -> Rollouts:
        earlier = [checkpoint for checkpoint in series if checkpoint.id not in rollouts.policies]
        sampled = with_behaviours(_sampled(earlier, config, progress))
        band = dict(zip(*(rollouts.table[name].to_pylist() for name in ("problem_id", "band")), strict=True))
        sampled = sampled.with_column("band", [band[id] for id in sampled.table["problem_id"].to_pylist()])
        together = tsae.Rollouts.concat([rollouts, sampled])
        together.write(path)
        return together

    return [
        Stage(
            "steps/rollouts", "steps/rollouts.parquet", dict(asked), sample, lambda _: Rollouts.read(path),
            ("rollouts",), fingerprint=fingerprints,
        ),
        capture_stage(
            config.to, series, config=CaptureConfig(plan="own", token_statistics=True), within="steps/",
            progress=progress,
        ),
        encoding_stage(config.to, within="steps/", progress=progress),
    ]  # fmt: skip


def _sampled(checkpoints: Iterable[Checkpoint], config: DemoConfig, progress: bool, **changes: Any) -> Rollouts:
    problems = eval_problems(config.problems, seed=config.seed)
    sampling = tsae.SamplingConfig(
        n_samples=config.samples, max_new_tokens=MAX_RESPONSE_TOKENS, batch_size=720, seed=config.seed
    )
    sampling = replace(sampling, **changes)
    return tsae.Rollouts.concat(
        [tsae.sample(checkpoint, problems, sampling, verify=verify, progress=progress) for checkpoint in checkpoints]
    )
