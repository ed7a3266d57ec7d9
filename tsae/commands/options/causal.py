"""Options of the commands on causes: causal, influence."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import OmitArgPrefixes

from tsae.causal.config import InterventionConfig
from tsae.diff.config import InfluenceConfig


@dataclass(frozen=True)
class Causal:
    """Ablate, steer or transplant features while a checkpoint generates, beside matched random ones and other controls.

    Features are chosen by number, or as those that one checkpoint raised and another lowered.
    """

    series: tuple[str, ...]
    """A folder of checkpoints (series.json or checkpoint-N folders). Or several checkpoints with the base first; each
    is a folder, an adapter, a .gguf file or a Hugging Face id (org/model@revision/subfolder)."""
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
    """Folder that `tsae diff` wrote: instead of numbers, the features that --raised raised and --lowered lowered. All
    of them are kept out of the random features."""
    raised: str | None = None
    """With --diff: id of the checkpoint that raised the features."""
    lowered: str | None = None
    """With --diff: id of the checkpoint that lowered them."""
    top: int | None = None
    """With --diff: only this many of them, the clearest first."""
    store: Path | None = None
    """Folder that `tsae capture` wrote, for the condition mean_difference: from --lowered to --raised; in a transplant
    from --checkpoint to --donor."""
    donor: str | None = None
    """With --mode transplant: id of the checkpoint whose features are put in. It reads along, and both models are held
    at once."""
    problems: Path | None = None
    """JSON lines of id, prompt, answer, or a Parquet file of rollouts, whose problems have bands; by default the
    problems that the features were encoded on. Fresh problems are the fairer test."""
    verifier: str = "last_number"
    """exact, last_number, math (needs tsae[verify]), or module:function for your own (response, answer) -> bool."""
    describe: str | None = None
    """module:function of your own Rollouts -> Rollouts that adds columns and names them as behaviours."""
    json: Path | None = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""
    config: OmitArgPrefixes[InterventionConfig] = field(default_factory=InterventionConfig)


@dataclass(frozen=True)
class Influence:
    """Find training samples that push a feature: exact first order of one policy-gradient step, for small models."""

    series: tuple[str, ...]
    """Folder of checkpoints (series.json or checkpoint-N folders), or one checkpoint."""
    rollouts: Path
    """Parquet file of rollouts with advantages."""
    sae: Path
    """Folder that `tsae train` wrote."""
    features: tuple[int, ...]
    """Indices of the features."""
    checkpoint: str | None = None
    """Id of the checkpoint that takes the step, with its own rollouts as the batch; by default the base."""
    on: Path | None = None
    """Other rollouts of that checkpoint to average features over; by default the batch."""
    to: Path | None = None
    """Folder for influence.parquet, one row per sample and feature."""
    json: Path | None = None
    """File for the results as JSON. With - they go to standard output, and text to standard error."""
    config: OmitArgPrefixes[InfluenceConfig] = field(default_factory=InfluenceConfig)
