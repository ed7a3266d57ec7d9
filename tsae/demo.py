"""`tsae demo`: the whole pipeline on the shipped arithmetic checkpoints, from sampling to the report.

Bands are measured on rollouts of their own, so that the base's luck on the analysed rollouts does not decide which
problems are called hard.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsae.errors import TsaeError
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
    """Of everything random."""
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
    from tsae.checkpoints.loading import token_strings
    from tsae.diff.diff import feature_diff
    from tsae.provenance import versions, write_json
    from tsae.report import write_report
    from tsae.report.terminal import print_findings
    from tsae.testbed.classes import FAMILIES, token_classes

    config = config or DemoConfig()
    to = config.to
    stamp = {"demo": {**asdict(config), "to": None}, "versions": versions()}
    _claim(to, stamp)
    series = tsae.testbed.series().final()
    rollouts = demo_rollouts(config, progress=progress)
    print(f"{rollouts}\n  read by {', '.join(c.id for c in series)}")
    store = tsae.capture(series, rollouts, to=to / "activations", progress=progress)
    training = replace(config.training, seed=config.seed)
    sae = tsae.train(store, config.sae, to=to / "sae", training=training, progress=progress)
    if (to / "features" / "run.json").is_file():
        features = tsae.FeatureTable.load(to / "features")
    else:
        features = tsae.encode(sae, store, to=to / "features", progress=progress)
    strings = token_strings(series.base.load_tokenizer())
    diff = feature_diff(
        features,
        tsae.DiffConfig(seed=config.seed),
        annotator=token_classes,
        families=FAMILIES,
        token_strings=strings,
        progress=progress,
    )
    diff.save(to / "diff")
    report = write_report(
        diff, to / "report.html", title="What easy, medium and hard training did to an arithmetic model"
    )
    print_findings(diff, tsae.evaluate(sae, store))
    write_json(to / "demo.json", stamp)
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


def _claim(to: Path, stamp: dict[str, Any]) -> None:
    """Make the folder, or check that what is in it comes from the same config."""
    import json

    from tsae.provenance import write_json

    file = to / "demo.json"
    if to.is_dir() and any(to.iterdir()):
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        # Compared as JSON: tuples and lists, paths and strings are the same there.
        if found != json.loads(json.dumps(stamp, default=str)):
            raise TsaeError(
                "holds something else than a demo of these settings and versions",
                where=to,
                fix="Delete that folder, or give another one with --to.",
            )
    write_json(file, stamp)
