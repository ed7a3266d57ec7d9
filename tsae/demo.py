"""`tsae demo`: the whole pipeline on the shipped arithmetic checkpoints, from sampling to the report.

Bands are measured on rollouts of their own, so that the base's luck on the analysed rollouts does not decide which
problems are called hard.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tsae.sae.config import SAEConfig, TrainingConfig

if TYPE_CHECKING:
    from tsae.checkpoints.series import Checkpoint, CheckpointSeries
    from tsae.rollouts.table import Rollouts


@dataclass(frozen=True)
class DemoConfig:
    """Size and seed of the demo."""

    to: Path = Path("demo")
    """Folder for rollouts, activations, SAE, features, diff and report."""
    problems: int = 60
    """Problems of each level (1, 4 to 6, and 10 to 14 operations)."""
    samples: int = 8
    """Responses per problem and checkpoint."""
    band_samples: int = 24
    """Further responses of the base per problem, only to measure bands."""
    steps: bool = False
    """Follow features along steps 25, 50, 100 and 150 of the runs too: more sampling and reading, about a minute."""
    seed: int = 0
    """Seed of everything random."""
    sae: SAEConfig = field(default_factory=lambda: SAEConfig(d_sae=256, k=8))
    """The T-SAE."""
    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(tokens=1_500_000, batch_tokens=1024))
    """Its training."""


def demo(config: DemoConfig | None = None, *, progress: bool = True) -> Path:
    """Run the demo and print its findings; stages that an earlier run of the same config finished are read from disk.

    Returns:
        path of the report.
    """
    import tsae
    from tsae.base.provenance import versions
    from tsae.pipeline import Choice, analyse, claim
    from tsae.report.printed.findings import print_findings
    from tsae.testbed.classes import FAMILIES, token_classes

    config = config or DemoConfig()
    to = config.to
    claim(to, "demo.json", {"demo": {**asdict(config), "to": None}, "versions": versions()}, "a demo")
    series = tsae.testbed.series().final()
    rollouts = demo_rollouts(config, progress=progress)
    print(f"{rollouts}\n  read by {', '.join(c.id for c in series)}")
    diff, evaluation = analyse(
        series,
        rollouts,
        to,
        choose=lambda store: Choice(config.sae, replace(config.training, seed=config.seed)),
        diffing=tsae.DiffConfig(seed=config.seed),
        annotator=token_classes,
        families=FAMILIES,
        steps=demo_steps(config, rollouts, progress=progress) if config.steps else None,
        title="What easy, medium and hard training did to an arithmetic model",
        progress=progress,
    )
    print_findings(diff, evaluation)
    report = to / "report.html"
    print(f"\nReport: {report.resolve()}")
    return report


def demo_rollouts(config: DemoConfig, *, progress: bool = True) -> Rollouts:
    """The demo's rollouts, sampled, or read where an earlier run left them."""
    import tsae
    from tsae.testbed.classes import with_behaviours

    path = config.to / "rollouts.parquet"
    if path.is_file():
        return tsae.Rollouts.read(path)
    series = tsae.testbed.series().final()
    for_bands = _sampled([series.base], config, progress, n_samples=config.band_samples, seed=config.seed + 1)
    rollouts = with_behaviours(_sampled(series, config, progress)).with_advantages()
    rollouts = rollouts.with_bands(series.base, measured_on=for_bands)
    rollouts.write(path)
    return rollouts


def demo_steps(config: DemoConfig, rollouts: Rollouts, *, progress: bool = True) -> tuple[CheckpointSeries, Rollouts]:
    """All shipped checkpoints with the demo's rollouts and as many of every earlier step."""
    import tsae
    from tsae.testbed.classes import with_behaviours

    series, path = tsae.testbed.series(), config.to / "steps" / "rollouts.parquet"
    if path.is_file():
        return series, tsae.Rollouts.read(path)
    earlier = [checkpoint for checkpoint in series if checkpoint.id not in rollouts.policies]
    sampled = with_behaviours(_sampled(earlier, config, progress))
    band = dict(zip(*(rollouts.table[name].to_pylist() for name in ("problem_id", "band")), strict=True))
    sampled = sampled.with_column("band", [band[id] for id in sampled.table["problem_id"].to_pylist()])
    together = tsae.Rollouts.concat([rollouts, sampled])
    together.write(path)
    return series, together


def _sampled(checkpoints: Iterable[Checkpoint], config: DemoConfig, progress: bool, **changes: int) -> Rollouts:
    import tsae
    from tsae.testbed.measure import MAX_RESPONSE_TOKENS

    problems = tsae.testbed.eval_problems(config.problems, seed=config.seed)
    sampling = tsae.SamplingConfig(
        n_samples=config.samples, max_new_tokens=MAX_RESPONSE_TOKENS, batch_size=720, seed=config.seed
    )
    sampling = replace(sampling, **changes)
    verify = tsae.testbed.verify
    return tsae.Rollouts.concat(
        [tsae.sample(checkpoint, problems, sampling, verify=verify, progress=progress) for checkpoint in checkpoints]
    )
