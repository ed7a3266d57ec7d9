"""tsae: what changed inside a language model trained with verifiable rewards, and which training samples did that."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "ActivationStore": "tsae.activations.store",
    "BandCutoffs": "tsae.rollouts.config",
    "CaptureConfig": "tsae.activations.config",
    "Checkpoint": "tsae.checkpoints.series",
    "CheckpointSeries": "tsae.checkpoints.series",
    "DiffConfig": "tsae.diff.config",
    "FeatureDiff": "tsae.diff.result",
    "FeatureTable": "tsae.features.table",
    "LiveConfig": "tsae.activations.config",
    "LiveSource": "tsae.activations.live",
    "Problem": "tsae.rollouts.problems",
    "Rollouts": "tsae.rollouts.table",
    "SAEConfig": "tsae.sae.config",
    "SamplingConfig": "tsae.rollouts.config",
    "TemporalSAE": "tsae.sae.model",
    "TrainingConfig": "tsae.sae.config",
    "TsaeError": "tsae.errors",
    "capture": "tsae.activations.capture",
    "encode": "tsae.features.encode",
    "evaluate": "tsae.sae.evaluation",
    "feature_diff": "tsae.diff.diff",
    "sample": "tsae.rollouts.sampling",
    "train": "tsae.sae.training",
    "trajectory_statistics": "tsae.activations.statistics",
}

__all__ = [*_HOMES, "testbed"]


def __getattr__(name: str) -> Any:
    """Load public names on first use, so that `import tsae` imports neither torch nor transformers."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "testbed":
        return import_module("tsae.testbed")
    raise AttributeError(f"module 'tsae' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
