"""Options of `tsae crosscoder`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import OmitArgPrefixes

from tsae.activations.config import Subset
from tsae.sae.config import SAEConfig, TrainingConfig


@dataclass(frozen=True)
class Crosscoder:
    """Train a crosscoder of the base and another checkpoint, and say which latents are new, lost or shared.

    A second opinion beside `tsae diff`: it asks for directions that one checkpoint lacks, not for features whose use
    changed. Latent scaling tells artefacts from changes. Resumes an unfinished training.

    Of a published crosscoder of dictionary_learning: --published FOLDER.
    """

    store: Path
    """Folder that `tsae capture` wrote."""
    reader: str
    """Id of the checkpoint that is compared with the base, such as hard-150."""
    to: Path
    """Folder for the crosscoder."""
    published: Path | None = None
    """Crosscoder of dictionary_learning (model_final.pt, ae.pt or model.safetensors) in place of a training; its first
    model is the base. It is written to --to in the form of tsae."""
    all_problems: bool = False
    """Judge on all problems, not only on those held out of training."""
    json: Path | None = None
    """File for the results as JSON; - for standard output. Text then goes to standard error."""
    subset: OmitArgPrefixes[Subset] = field(default_factory=Subset)
    sae: OmitArgPrefixes[SAEConfig] = field(default_factory=lambda: SAEConfig(groups=(1.0,), temporal_weight=0.0))
    training: OmitArgPrefixes[TrainingConfig] = field(default_factory=TrainingConfig)
