"""`tsae demo`: the whole pipeline on the shipped arithmetic checkpoints, from sampling to the report.

Bands are measured on rollouts of their own, so that the base's luck on the analysed rollouts does not decide which
problems are called hard.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tsae.sae.config import SAEConfig, TrainingConfig

if TYPE_CHECKING:
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
    from tsae.pipeline import Choice, analyse, claim
    from tsae.provenance import versions
    from tsae.report.terminal import print_findings
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
    from tsae.testbed.measure import MAX_RESPONSE_TOKENS

    path = config.to / "rollouts.parquet"
    if path.is_file():
        return tsae.Rollouts.read(path)
    series = tsae.testbed.series().final()
    problems = tsae.testbed.eval_problems(config.problems, seed=config.seed)
    sampling = tsae.SamplingConfig(
        n_samples=config.samples, max_new_tokens=MAX_RESPONSE_TOKENS, batch_size=720, seed=config.seed
    )
    for_bands = replace(sampling, n_samples=config.band_samples, seed=config.seed + 1)
    verify = tsae.testbed.verify
    measured_on = tsae.sample(series.base, problems, for_bands, verify=verify, progress=progress)
    parts = [tsae.sample(checkpoint, problems, sampling, verify=verify, progress=progress) for checkpoint in series]
    rollouts = with_behaviours(tsae.Rollouts.concat(parts)).with_advantages()
    rollouts = rollouts.with_bands(series.base, measured_on=measured_on)
    rollouts.write(path)
    return rollouts
