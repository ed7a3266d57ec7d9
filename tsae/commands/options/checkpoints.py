"""Options of the commands on checkpoints: capture, drift."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import OmitArgPrefixes

from tsae.activations.config import CaptureConfig, StatesConfig
from tsae.commands.options.spread import Spread


@dataclass(frozen=True)
class Capture:
    """Record residual-stream activations while checkpoints read trajectories. Resumes an unfinished capture.

    On several processes: torchrun --nproc-per-node 2 -m tsae capture …

    In parts that know nothing of each other: --parts 8 --workers 2 on this machine, --parts 8 --executor slurm on a
    cluster, or --part 2/8 wherever you start it.
    """

    series: tuple[str, ...]
    """A folder of checkpoints (series.json or checkpoint-N folders). Or several checkpoints with the base first; each
    is a folder, an adapter, a .gguf file or a Hugging Face id (org/model@revision/subfolder)."""
    rollouts: Path
    """Parquet file of rollouts, which the checkpoints read."""
    to: Path
    """Folder of the activation store."""
    sites: tuple[str, ...] = ()
    """TransformerLens names such as blocks.14.hook_resid_post; by default the output of the middle block."""
    checkpoints: tuple[str, ...] = ()
    """Ids of the readers beside the base; by default the last step of every run."""
    part: str | None = None
    """Record only a part of the shards, such as 2/7. Parts know nothing of each other; the last one to finish completes
    the store, which is the same as that of one process."""
    config: OmitArgPrefixes[CaptureConfig] = field(default_factory=CaptureConfig)
    server: StatesConfig = field(default_factory=StatesConfig)
    spread: OmitArgPrefixes[Spread] = field(default_factory=Spread)


@dataclass(frozen=True)
class Drift:
    """Measure where training wrote: how far every weight is from the base's, by layer and module."""

    series: tuple[str, ...]
    """A folder of checkpoints (series.json or checkpoint-N folders). Or several checkpoints with the base first; each
    is a folder, an adapter or a Hugging Face id (org/model@revision/subfolder)."""
    checkpoints: tuple[str, ...] = ()
    """Ids to measure; by default all."""
    spectral: bool = True
    """Also measure spectral norm and stable rank of the updates. This takes most of the time."""
    to: Path | None = None
    """Folder for drift.parquet, one row per checkpoint and tensor, and the page drift.html."""
    json: Path | None = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""
