"""The temporal sparse autoencoder: config, model, loss, training, evaluation."""

from tsae.sae.config import SAEConfig, TrainingConfig

__all__ = ["SAEConfig", "TrainingConfig"]
