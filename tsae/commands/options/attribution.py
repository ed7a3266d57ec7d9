"""Options of the command attribute."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import OmitArgPrefixes, Positional

from tsae.attribution.config import AttributionConfig


@dataclass(frozen=True)
class Attribute:
    """Find which training samples moved features and behaviours: shares that add up, and what would be without them.

    Needs the run's base, one later checkpoint, its log with every step, and the trainer's settings.
    """

    run: Positional[Path]
    """Folder of the run: checkpoint-N folders or series.json, and the trainer's settings (training_args.bin of TRL,
    .hydra/config.yaml of verl, wandb/ …)."""
    to: Path
    """Folder for the results, and for the path of the replay while it is needed."""
    rollouts: Path | None = None
    """The run's log: a Parquet file that `tsae rollouts import` wrote, or the trainer's own. By default the log in the
    run's folder."""
    series: tuple[str, ...] = ()
    """Checkpoints with the base first, where the run's folder lacks the base."""
    sae: Path | None = None
    """Folder that `tsae train` wrote: features become targets."""
    first_token: str | None = None
    """Text of one token: the probability that a response begins with it becomes a target."""
    name: str | None = None
    """Name of the run, where the series has several."""
    settings: Path | None = None
    """File or folder of the trainer's settings; by default they lie beside the checkpoints."""
    trainer_version: str | None = None
    """Of the trainer, such as 0.18.1, whose defaults count where a recipe says nothing; by default what the run's
    README.md or Weights & Biases name."""
    problems: Path | None = None
    """Parquet file of the base's responses, with outcomes, to problems that the run did not train on (tsae rollouts
    sample): accuracy and behaviours are attributed there. By default on the log's own problems."""
    top: int = 10
    """Samples to print; in the JSON, so many for each target and against it."""
    json: Path | None = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""
    config: OmitArgPrefixes[AttributionConfig] = field(default_factory=AttributionConfig)
