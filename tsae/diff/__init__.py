"""What changed, who changed it, and how sure are we: contrasts of features with their uncertainty."""

from tsae.diff.config import DiffConfig
from tsae.diff.result import FeatureDiff

__all__ = ["DiffConfig", "FeatureDiff"]
