"""Commands on checkpoints: capture and drift."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import OmitArgPrefixes

import tsae
from tsae.activations.config import CaptureConfig
from tsae.commands.common import as_json, load_series, say_wrote
from tsae.errors import TsaeError

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Capture:
    """Record residual-stream activations while checkpoints read trajectories; a capture that was killed goes on.

    On several processes: torchrun --nproc-per-node 2 -m tsae capture …
    """

    series: tuple[str, ...]
    """Folder of checkpoints (series.json or checkpoint-N folders), or several checkpoints, the base first: folders,
    adapters, .gguf files, Hugging Face ids (org/model@revision/subfolder)."""
    rollouts: Path
    """Parquet file of rollouts, which the checkpoints read."""
    to: Path
    """Folder of the activation store."""
    sites: tuple[str, ...] = ()
    """TransformerLens names such as blocks.14.hook_resid_post; by default the output of the middle block."""
    checkpoints: tuple[str, ...] = ()
    """Ids of the readers beside the base; by default the last step of every run."""
    config: OmitArgPrefixes[CaptureConfig] = field(default_factory=CaptureConfig)

    def run(self) -> None:
        from tsae.base.distributed import first_process

        series = load_series(*self.series)
        series = series.select(self.checkpoints) if self.checkpoints else series.final()
        rollouts = tsae.Rollouts.read(self.rollouts)
        store = tsae.capture(series, rollouts, list(self.sites), to=self.to, config=self.config)
        if first_process():
            say_wrote(store.path, store)


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
    json: Path | None = None
    """File for the results as JSON; - for standard output, and text then goes to standard error."""

    def run(self) -> None:
        from tsae.report.pages.drift import write_drift
        from tsae.report.printed.drift import drift_text

        series = load_series(*self.series)
        series = series.select(self.checkpoints) if self.checkpoints else series
        if len(series) < 2:
            raise TsaeError(
                "there is nothing but the base", where=series.name, fix="Give at least one more checkpoint."
            )
        drift = tsae.weight_drift(series, spectral=self.spectral)
        with as_json(self.json) as write:
            print(drift_text(drift))
            if self.to is not None:
                self.to.mkdir(parents=True, exist_ok=True)
                drift.to_parquet(self.to / "drift.parquet", index=False)
                write_drift(drift, self.to / "drift.html")
                say_wrote(self.to)
            write({"drift": drift})
