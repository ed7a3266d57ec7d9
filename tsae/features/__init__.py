"""Features: the SAE's sparse codes of every stored token, and what features respond to."""

from tsae.features.table import FeatureTable

__all__ = ["FeatureTable"]
