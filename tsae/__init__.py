"""tsae: what changed inside a language model trained with verifiable rewards, and which training samples did that."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tsae.base.views import register

_HOMES = {
    "ActivationStore": "tsae.activations.store",
    "BandCutoffs": "tsae.rollouts.config",
    "BandQuantiles": "tsae.rollouts.config",
    "CaptureConfig": "tsae.activations.config",
    "Checkpoint": "tsae.checkpoints.series",
    "CheckpointSeries": "tsae.checkpoints.series",
    "DiffConfig": "tsae.diff.config",
    "DifficultyConfig": "tsae.rollouts.config",
    "Dynamics": "tsae.diff.dynamics",
    "FeatureDiff": "tsae.diff.result",
    "FeatureTable": "tsae.features.table",
    "InsertionConfig": "tsae.causal.config",
    "Intervention": "tsae.causal.result",
    "InterventionConfig": "tsae.causal.config",
    "Influence": "tsae.diff.policy_gradient.influence",
    "InfluenceConfig": "tsae.diff.config",
    "LiveConfig": "tsae.activations.config",
    "NoiseNull": "tsae.diff.result",
    "LiveSource": "tsae.activations.live",
    "Problem": "tsae.rollouts.problems",
    "Rollouts": "tsae.rollouts.table",
    "Reinforcement": "tsae.diff.policy_gradient.reinforcement",
    "RunConfig": "tsae.run",
    "SAEConfig": "tsae.sae.config",
    "SamplingConfig": "tsae.rollouts.config",
    "Separation": "tsae.sae.separation",
    "Stability": "tsae.sae.stability",
    "TemporalSAE": "tsae.sae.model",
    "TrainingConfig": "tsae.sae.config",
    "TsaeError": "tsae.errors",
    "analyze_run": "tsae.run",
    "capture": "tsae.activations.capture",
    "difficulty": "tsae.rollouts.moving",
    "dynamics": "tsae.diff.dynamics",
    "encode": "tsae.features.encode",
    "evaluate": "tsae.sae.evaluation",
    "feature_diff": "tsae.diff.feature_diff",
    "insertion": "tsae.causal.insertion",
    "intervene": "tsae.causal.intervene",
    "influence": "tsae.diff.policy_gradient.measure_influence",
    "noise_null": "tsae.diff.controls.noise_null",
    "reinforcement": "tsae.diff.policy_gradient.measure_reinforcement",
    "sample": "tsae.rollouts.sampling",
    "separation": "tsae.sae.separation",
    "stability": "tsae.sae.stability",
    "train": "tsae.sae.training",
    "train_many": "tsae.sae.many",
    "weight_drift": "tsae.checkpoints.drift",
    "trajectory_statistics": "tsae.activations.statistics",
}

__all__ = [*_HOMES, "testbed"]


# Results show themselves through the report, which is imported when the first one does.
register(lambda: import_module("tsae.report.door"))


def __getattr__(name: str) -> Any:
    """Load public names on first use, so that `import tsae` imports neither torch nor transformers."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "testbed":
        return import_module("tsae.testbed")
    raise AttributeError(f"module 'tsae' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
